//! [`Session`], steps of a model whose ranks go on after one of them is lost.

use std::fmt;
use std::sync::Arc;

use iris_heap::{Change, Error, Member, MemberId, Next, World};

/// Model of a [`Member`], built anew for each epoch, and the loop that goes on after a lost rank.
///
/// The closure `build` makes the model for a world: heap, plans, operators, parts of the weights. It
/// gets the [`Change`] since the epoch of the last model, and that model, from which it may take what
/// outlives an epoch: memory outside of heaps, and blocks of the old heap
/// ([`SymmetricHeap::retire`](iris_heap::SymmetricHeap::retire)). What it leaves is dropped when the
/// new model stands; to free the old heap before a new one is opened, it sets the option to `None`.
/// Build may make collective calls of the world, for example to agree on the step at which to go
/// on: when a rank is lost, some of the others may have completed the step, and some may have not.
///
/// ```no_run
/// use iris_heap::{BackendKind, Member, Policy, World};
/// use iris_ops::{Comm, Session, StepOutcome, comm::{Options, ReduceOp}};
///
/// let member = Member::join(&World::from_env()?, Policy::new().sizes(&[4, 2, 1]))?;
/// let mut session = Session::open(member, |world, _change, _old| {
///     anyhow::Ok(Comm::from_world(BackendKind::Cpu, world, &Options::new())?)
/// })?;
/// let mut steps = 0;
/// while steps < 1000 {
///     let outcome = session.step(|comm| {
///         let mut sum = [0.0];
///         comm.all_reduce(&[1.0], &mut sum, &ReduceOp::Sum)?;
///         Ok(sum)
///     })?;
///     match outcome {
///         StepOutcome::Done(_sum) => steps += 1,
///         StepOutcome::Rebuilt(change) => println!("{} ranks go on", change.members.len()),
///         StepOutcome::Spare => {} // the next step waits until this process is needed
///         _ => break,
///     }
/// }
/// session.close()?;
/// # anyhow::Ok(())
/// ```
pub struct Session<M, B> {
    /// Model of the last epoch in which this process was a rank. Dropped before the member leaves.
    model: Option<M>,
    /// Whether `model` is of the present epoch.
    is_ready: bool,
    /// Members of the epoch of the last model, by rank; empty if this process was a spare since.
    members: Vec<MemberId>,
    /// Members that were lost since the last model was built.
    lost: Vec<MemberId>,
    build: B,
    member: Arc<Member>,
}

/// Outcome of [`Session::step`] for this process.
#[derive(Debug)]
#[non_exhaustive]
pub enum StepOutcome<T> {
    /// Value that the closure of the step returned.
    Done(T),
    /// The epoch has ended, and the model is built for the next one. The step was not made, or not
    /// to its end; what it wrote is undefined. Contains the difference to the epoch of the model before.
    Rebuilt(Change),
    /// This process is a spare. Call [`Session::step`] again at once; it waits until the spare is needed
    /// or the job is over.
    Spare,
    /// Fewer processes are left than [`Policy::sizes`](iris_heap::Policy::sizes) allows, so there is no
    /// further epoch.
    TooFew {
        /// Number of processes that are left.
        alive: usize,
    },
    /// This process was a spare, and the ranks have closed their world and left.
    Over,
}

impl<M, B> fmt::Debug for Session<M, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({:?})", self.member)
    }
}

impl<M, B> Session<M, B> {
    /// Member of the session, for example to revoke the epoch.
    pub fn member(&self) -> &Arc<Member> {
        &self.member
    }

    /// Ends the session: drops the model, closes the world with the other ranks, and leaves the job,
    /// which is then over. Collective over the ranks of the epoch, all of which have made their last
    /// step. A process without a world (a spare, or one of too few) only leaves.
    ///
    /// A clone of the member's `Arc` that is still held keeps this process from leaving.
    ///
    /// # Errors
    /// [`Error::Revoked`] if the epoch has ended since the last step; errors of [`World::close`].
    #[track_caller]
    pub fn close(self) -> iris_heap::Result<()> {
        if !self.is_ready {
            return Ok(());
        }
        let world = self.member.world()?;
        drop(self.model);
        world.close()
    }
}

impl<M, E, B> Session<M, B>
where
    B: FnMut(&World, &Change, &mut Option<M>) -> Result<M, E>,
    E: From<Error>,
{
    /// Builds the model for the present epoch of `member`; the change that the closure gets has no rank
    /// from an epoch before. If a rank is lost meanwhile, goes on to the next epoch as
    /// [`Session::step`] does.
    ///
    /// # Errors
    /// Error of `build` that does not follow from the loss of a rank; errors of [`Member::world`] and
    /// [`Member::next`].
    pub fn open(member: impl Into<Arc<Member>>, build: B) -> Result<Self, E> {
        let member = member.into();
        let (members, lost) = (Vec::new(), Vec::new());
        let mut session = Self { model: None, is_ready: false, members, lost, build, member };
        let members = session.member.members();
        let from = vec![None; members.len()];
        let is_built = match session.member.world() {
            Ok(world) => session.build(&world, &Change { members, from, lost: vec![] })?,
            Err(Error::Revoked) => false,
            Err(error) => return Err(error.into()),
        };
        if !is_built {
            session.go_on::<()>()?;
        }
        Ok(session)
    }

    /// Runs one step of the model, `f`, and returns its value. If the epoch has ended before or during
    /// the step, goes on instead: agrees with the other processes that are left ([`Member::next`]),
    /// builds the model anew, and returns [`StepOutcome::Rebuilt`]; an error that `f` returned is dropped
    /// then. Whether the epoch has ended is told by the member ([`Member::is_revoked`]) and not by the
    /// error of `f`, so that error may have any type.
    ///
    /// # Errors
    /// Error of `f` or of `build` that does not follow from the loss of a rank, a rank that gave up or
    /// a late rank; the others go on without this process if it drops the session. Errors of
    /// [`Member::next`], such as [`Error::Evicted`] for a process that was left out.
    pub fn step<T>(&mut self, f: impl FnOnce(&mut M) -> Result<T, E>) -> Result<StepOutcome<T>, E> {
        if let Some(model) = self.model.as_mut().filter(|_| self.is_ready)
            && !self.member.is_revoked()
        {
            match f(model) {
                Ok(value) => return Ok(StepOutcome::Done(value)),
                Err(error) if !self.member.is_revoked() => return Err(error),
                Err(_) => {}
            }
        }
        self.go_on()
    }

    /// Goes on to an epoch in which all ranks have built their models, or in which this process has
    /// none.
    fn go_on<T>(&mut self) -> Result<StepOutcome<T>, E> {
        self.is_ready = false;
        loop {
            let (world, Change { members, lost, .. }) = match self.member.next()? {
                Next::Epoch(world, change) => (world, change),
                Next::TooFew { alive } => return Ok(StepOutcome::TooFew { alive }),
                Next::Over => return Ok(StepOutcome::Over),
                // `Next::Spare`.
                _ => {
                    self.members.clear();
                    self.lost.clear();
                    return Ok(StepOutcome::Spare);
                }
            };
            self.lost.extend(lost);
            // The epochs since that of the last model have had none.
            let rank_before = |id| self.members.iter().position(|was| was == id);
            let from = members.iter().map(rank_before).collect();
            let change = Change { members, from, lost: self.lost.clone() };
            if self.build(&world, &change)? {
                return Ok(StepOutcome::Rebuilt(change));
            }
        }
    }

    /// Builds the model of an epoch. Returns false if a rank was lost meanwhile. An error of this rank
    /// itself is returned although the others may have ended the epoch because of it.
    fn build(&mut self, world: &World, change: &Change) -> Result<bool, E> {
        match (self.build)(world, change, &mut self.model) {
            Ok(model) => self.model = Some(model),
            Err(_) if world.has_failed() => return Ok(false),
            Err(error) => return Err(error),
        }
        self.members.clone_from(&change.members);
        self.lost.clear();
        self.is_ready = true;
        Ok(true)
    }
}
