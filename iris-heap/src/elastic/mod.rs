//! Going on after a lost rank: [`Member`], a process of a job that outlives the worlds of its epochs.
//!
//! An *epoch* is a world with its heaps and operators. If a rank of it is lost or stopped, the epoch is
//! revoked: nothing of it is mended. The remaining processes agree on the members of the next epoch
//! ([`page`]), and meet in a new world.

mod page;
mod policy;
mod watch;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::abi::MAX_RANKS;
use crate::backend::nothing_passed;
use crate::bootstrap::unique_id::UniqueId;
use crate::bootstrap::{ProcessId, is_readable};
use crate::env::Settings;
use crate::error::{Error, Result};
use crate::root_error::Distance;
use crate::segment::JointMemory;
use crate::util::{Maker, check_may_wait, lock, spawn, unsupported};
use crate::world::World;

use page::{LAST_EPOCH, Page, Phase};
pub use policy::Policy;
use policy::{mask, slots};

/// Interval between two looks while this process waits for others to come to a decision.
const LOOK: Duration = Duration::from_millis(1);
/// Longest time that one look counts for. If this process was stopped during it, the others may not
/// be late.
const LONGEST_LOOK: Duration = Duration::from_millis(100);

/// Number of attempts to meet that may fail for a reason of this process, before it leaves the job. A
/// single one may still follow from the death of another process.
const FAILURES: u32 = 3;

/// Process of a job whose ranks go on after one of them is lost. It survives the worlds.
///
/// ```no_run
/// # use iris_heap::{Error, ErrorKind, Member, Next, Policy, World};
/// # fn build(world: &World) -> Result<(), Error> { unimplemented!() }
/// # fn step(model: &mut ()) -> Result<(), Error> { unimplemented!() }
/// let world = World::from_env()?;
/// let member = Member::join(&world, Policy::new().sizes(&[4, 2, 1]))?;
/// let mut model = build(&world)?; // opens a heap, plans, makes operators
/// drop(world);
/// loop {
///     match step(&mut model) {
///         Err(error) if error.kind() == ErrorKind::PeerLost => match member.next()? {
///             Next::Epoch(world, _) => model = build(&world)?,
///             _ => break, // a spare or too few
///         },
///         outcome => outcome?,
///     }
/// }
/// # Ok::<(), Error>(())
/// ```
///
/// A rank is lost to the others when its process has ended (`kill -9`, a crash), is stopped for longer
/// than [`Policy::patience`], has left, or has called [`Member::revoke`]. All calls and exchanges of the
/// epoch then fail with errors of the kind [`ErrorKind::PeerLost`](crate::ErrorKind::PeerLost), and
/// every remaining process calls [`Member::next`]. A process that was left out, because it was
/// stopped, gets [`Error::Evicted`] when it goes on; what it still stores lands in memory of the old
/// epoch.
///
/// Limits: processes of one node and of one PID namespace, heaps of the CPU, at most 4096 epochs. No
/// process can join later.
pub struct Member {
    shared: Arc<Shared>,
    /// Lock held by a call of [`Member::next`].
    step: Mutex<()>,
}

/// Number of a process in its job: its rank in the first world. It stays the same in all epochs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(pub usize);

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "member {}", self.0)
    }
}

/// Way in which a process was lost to its job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// The process has ended.
    Dead,
    /// The process left the job by itself.
    Left,
    /// The process lives, but the others went on without it, because it was stopped or late.
    Evicted,
}

/// Outcome of [`Member::next`] for this process.
#[derive(Debug)]
#[non_exhaustive]
pub enum Next {
    /// World of the new epoch, in which this process is a rank.
    Epoch(World, Change),
    /// This process is a spare: a smaller number of ranks than there are processes went on. Call
    /// [`Member::next`] again at once; it waits until the spare is needed or the job is over.
    Spare,
    /// Fewer processes are left than [`Policy::sizes`] allows, so there is no further epoch.
    TooFew {
        /// Number of processes that are left.
        alive: usize,
    },
    /// This process was a spare, and the ranks have closed their world and left.
    Over,
}

/// Difference between a world and the world before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// For each rank of the new world, its rank in the epoch that this process was in before; `None` if
    /// it was a spare then.
    pub from: Vec<Option<usize>>,
    /// Processes that are no longer part of the job, lost since that epoch.
    pub lost: Vec<MemberId>,
}

/// Another process of the job.
struct Process {
    id: ProcessId,
    /// Descriptor of the process, readable once it has ended and made its last store.
    descriptor: OwnedFd,
}

/// Epoch in which this process is.
#[derive(Clone)]
struct Current {
    epoch: u64,
    /// Slots of the processes that went on in this epoch, as a mask.
    kept: u64,
    /// Slots of the world's ranks, in the order of their ranks.
    ranks: Vec<usize>,
    /// World of the epoch; `None` for a spare, and before its ranks have met.
    world: Option<World>,
    /// Epoch to which the others went on without this process.
    evicted: Option<u64>,
}

/// State that a member shares with its thread.
struct Shared {
    page: Page,
    /// Slot of this process in the page: its rank in the first world.
    slot: usize,
    /// Processes of all slots; `None` for this process.
    processes: Vec<Option<Process>>,
    policy: Policy,
    settings: Settings,
    job: UniqueId,
    process: Maker,
    current: Mutex<Current>,
    /// Slots of processes that were seen stopped for as long as the patience, as a mask.
    given_up: AtomicU64,
    /// Whether this process has left, so that its thread ends.
    left: AtomicBool,
}

impl Member {
    /// Makes this process a member of a job that may go on without some of the ranks of `world`, the
    /// first world. Collective. Open heaps of `world` afterwards.
    ///
    /// # Errors
    /// [`Error::Disagreement`] if the policies differ; [`Error::Invalid`] for a policy that no world
    /// can keep; [`Error::Unsupported`] for ranks that are threads of one process, on several nodes,
    /// or in different PID namespaces; [`Error::System`]; errors of [`World::barrier`].
    #[track_caller]
    pub fn join(world: &World, policy: Policy) -> Result<Member> {
        check_may_wait("Member::join")?;
        world.agree("Member::join", &policy.items())?;
        let made = Shared::check(world, &policy).and_then(|()| {
            let makes = world.rank() == 0;
            Ok((makes.then(Page::create).transpose()?, UniqueId::new()?))
        });
        let told = |(_, id): &(_, UniqueId)| id.to_string().into_bytes();
        let ((file, _), ids) = world.all_ok_with("Member::join", made, told)?;
        let file = share(world, file);
        let prepared = file.and_then(|file| {
            let job = String::from_utf8_lossy(&ids[0]).parse()?;
            let processes = (0..world.size()).map(|rank| match world.process(rank) {
                Some(id) if rank != world.rank() => {
                    Ok(Some(Process { id, descriptor: id.open()? }))
                }
                _ => Ok(None),
            });
            Ok((Page::map(file)?, job, processes.collect::<Result<Vec<_>>>()?))
        });
        // After this step every process has opened the others while they were alive, so that no
        // descriptor is of another process with the same number.
        let (page, job, processes) = world.all_ok("Member::join", prepared)?;
        world.set_elastic();
        let ranks: Vec<_> = (0..world.size()).collect();
        let (kept, first) = (mask(&ranks), Some(world.clone()));
        let shared = Arc::new(Shared {
            page,
            slot: world.rank(),
            processes,
            policy,
            settings: world.settings().clone(),
            job,
            process: Maker::this(),
            current: Mutex::new(Current { epoch: 0, kept, ranks, world: first, evicted: None }),
            given_up: AtomicU64::new(0),
            left: AtomicBool::new(false),
        });
        let watched = shared.clone();
        spawn("iris-member", move || watch::run(&watched))?;
        Ok(Member { shared, step: Mutex::new(()) })
    }

    /// Number of this process in the job.
    pub fn id(&self) -> MemberId {
        MemberId(self.shared.slot)
    }

    /// Number of the epoch that this process is in, from 0.
    pub fn epoch(&self) -> u64 {
        self.shared.current().epoch
    }

    /// World of the epoch that this process is in.
    ///
    /// # Errors
    /// [`Error::Revoked`] if the epoch has ended; [`Error::Evicted`]; [`Error::Unsupported`] for a
    /// spare.
    pub fn world(&self) -> Result<World> {
        let current = self.shared.current();
        match (current.evicted, current.world) {
            (Some(epoch), _) => Err(Error::Evicted { epoch }),
            (None, _) if self.is_revoked() => Err(Error::Revoked),
            (None, Some(world)) => Ok(world),
            (None, None) => Err(unsupported("the world of a spare", "it has none")),
        }
    }

    /// Ends the epoch for all its processes, without waiting for any: waiting kernels leave, calls and
    /// exchanges fail with [`Error::Revoked`]. For a loss that only the program can see, such as a
    /// device that returns wrong results. Does nothing if the epoch has ended.
    pub fn revoke(&self) {
        if self.shared.process.check("Member::revoke").is_ok() {
            self.shared.revoke(&self.shared.current());
        }
    }

    /// Whether the epoch has ended for this process, so that [`Member::next`] is due. An error of the
    /// kind [`ErrorKind::PeerLost`](crate::ErrorKind::PeerLost) may be a moment earlier.
    pub fn is_revoked(&self) -> bool {
        let current = self.shared.current();
        self.shared.page.phase(self.shared.slot) >= Phase::revoked(current.epoch)
            || current.world.is_some_and(|world| world.has_lost())
    }

    /// Processes that are lost to the job so far, in the order of their numbers.
    pub fn lost(&self) -> Vec<(MemberId, Loss)> {
        let (shared, current) = (&self.shared, self.shared.current());
        let loss = |slot| match (shared.page.phase(slot).has_left(), shared.is_dead(slot)) {
            (true, _) => Some(Loss::Left),
            (false, true) => Some(Loss::Dead),
            (false, false) => (current.kept >> slot & 1 == 0).then_some(Loss::Evicted),
        };
        let others = (0..shared.processes.len()).filter(|&slot| slot != shared.slot);
        others.filter_map(|slot| Some((MemberId(slot), loss(slot)?))).collect()
    }

    /// Goes on to the next epoch, without the processes that are lost. Every process that is left must
    /// call this; it ends the present epoch if that has not ended. Waits for processes that run until
    /// they call it too, at most [`Settings::meeting`]; for a stopped process, at most
    /// [`Policy::patience`]. If a further process is lost meanwhile, goes on without it, too.
    ///
    /// The old world, its heaps and its operators stay as they are, and can be dropped at any time.
    ///
    /// # Errors
    /// [`Error::Evicted`] if the others went on without this process; [`Error::Unsupported`] after 4096
    /// epochs. For an error of this process alone, such as too many open files, it leaves the job, and
    /// the others go on.
    pub fn next(&self) -> Result<Next> {
        self.shared.process.check("Member::next")?;
        check_may_wait("Member::next")?;
        let _step = lock(&self.step);
        self.shared.next().inspect_err(|error| {
            if !matches!(error, Error::Evicted { .. }) {
                self.shared.leave(Phase::LEFT);
            }
        })
    }

    /// Leaves the job; dropping the member does the same. If this process has closed its world, the
    /// job is over, otherwise the others go on without this process.
    pub fn leave(self) {}
}

impl Drop for Member {
    fn drop(&mut self) {
        if self.shared.process.check("leaving a job").is_err() {
            return;
        }
        let world = self.shared.current().world;
        let is_over = world.is_some_and(|world| world.is_closing());
        self.shared.leave(if is_over { Phase::ENDED } else { Phase::LEFT });
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Member({}, epoch {})", self.id(), self.epoch())
    }
}

/// Passes the file of rank 0's page to all ranks: collective.
#[track_caller]
fn share(world: &World, file: Option<JointMemory>) -> Result<JointMemory> {
    if world.size() == 1 {
        return file.ok_or_else(|| nothing_passed(0));
    }
    let descriptors = file.into_iter().map(JointMemory::into_descriptor).collect();
    let mut passed = world.share_descriptors(descriptors)?;
    let descriptor = passed.swap_remove(0).pop().ok_or_else(|| nothing_passed(0))?;
    JointMemory::import(descriptor, &Page::sizes())
}

impl Shared {
    /// Checks that the ranks of `world` can be members.
    fn check(world: &World, policy: &Policy) -> Result<()> {
        const WHAT: &str = "going on after a lost rank";
        policy.check()?;
        if world.nodes() > 1 || world.size() > MAX_RANKS {
            return Err(unsupported(WHAT, "the world has several nodes; expected one"));
        }
        if world.size() > 1 && world.same_process() {
            return Err(unsupported(WHAT, "the ranks are threads; expected a process for each"));
        }
        Ok(())
    }

    fn current(&self) -> Current {
        lock(&self.current).clone()
    }

    /// Whether the process in `slot` has ended; false for this process.
    fn is_dead(&self, slot: usize) -> bool {
        self.processes[slot].as_ref().is_some_and(|process| is_readable(&process.descriptor))
    }

    /// Whether the process in `slot` is stopped; false for this process.
    fn is_stopped(&self, slot: usize) -> bool {
        self.processes[slot].as_ref().is_some_and(|process| process.id.is_stopped())
    }

    fn leave(&self, phase: Phase) {
        self.page.enter(self.slot, phase);
        self.left.store(true, Ordering::Release);
    }

    /// Ends the epoch `current` for this process.
    fn revoke(&self, current: &Current) {
        self.page.enter(self.slot, Phase::revoked(current.epoch));
        if let Some(world) = &current.world {
            world.revoke();
        }
    }

    /// Does [`Member::next`].
    fn next(&self) -> Result<Next> {
        let old = self.current();
        if let Some(epoch) = old.evicted {
            return Err(Error::Evicted { epoch });
        }
        if old.ranks.is_empty() {
            return Ok(Next::TooFew { alive: old.kept.count_ones() as usize });
        }
        if old.world.is_none() && !self.is_needed(&old) {
            return Ok(Next::Over);
        }
        self.revoke(&old);
        let (mut at, mut own_failures) = (old.clone(), 0);
        for attempt in 1.. {
            let (before, epoch) = (at.epoch, at.epoch + 1);
            at.kept = self.agree(&at)?;
            if at.kept >> self.slot & 1 == 0 {
                lock(&self.current).evicted = Some(epoch);
                return Err(Error::Evicted { epoch });
            }
            (at.epoch, at.ranks, at.world) = (epoch, self.policy.choose(at.kept), None);
            tracing::info!(epoch, before, ranks = ?at.ranks, "the job goes on");
            let Some(rank) = at.ranks.iter().position(|&slot| slot == self.slot) else {
                let alive = at.kept.count_ones() as usize;
                let too_few = at.ranks.is_empty();
                *lock(&self.current) = at;
                return Ok(if too_few { Next::TooFew { alive } } else { Next::Spare });
            };
            let job = format!("unique id {}, epoch {epoch}", self.job);
            let limit = self.policy.patience * attempt;
            let (size, settings) = (at.ranks.len(), self.settings.clone());
            match World::of_job(job, rank, size, Ok(settings), Some(limit)) {
                Ok(world) => {
                    world.set_elastic();
                    at.world = Some(world.clone());
                    let change = change(&old, &at);
                    *lock(&self.current) = at;
                    return Ok(Next::Epoch(world, change));
                }
                Err(error) => {
                    tracing::info!(epoch, %error, "the ranks have not met");
                    own_failures += u32::from(Distance::of(&error) == Distance::Root);
                    if own_failures == FAILURES {
                        return Err(error);
                    }
                }
            }
            *lock(&self.current) = at.clone();
            self.revoke(&at);
        }
        unreachable!("the loop ends by `return`")
    }

    /// Waits, as a spare of the epoch `current`, until another process has ended the epoch. Returns
    /// false if the job is over.
    fn is_needed(&self, current: &Current) -> bool {
        let is_over = || slots(current.kept).any(|slot| self.page.phase(slot) == Phase::ENDED);
        while self.page.phase(self.slot) < Phase::revoked(current.epoch) {
            if is_over() {
                return false;
            }
            std::thread::sleep(watch::TICK);
        }
        true
    }

    /// Agrees with the other processes of the epoch `at` on those who go on in the next epoch. Returns
    /// their slots as a mask.
    fn agree(&self, at: &Current) -> Result<u64> {
        let next = at.epoch + 1;
        if next > LAST_EPOCH {
            let why = format!("a job has at most {LAST_EPOCH}; start all ranks anew");
            return Err(unsupported("another epoch", &why));
        }
        self.page.enter(self.slot, Phase::waits(at.epoch));
        let mut waited = Duration::ZERO;
        loop {
            let begun = Instant::now();
            match self.page.decided(next) {
                0 => {}
                decided => return Ok(decided),
            }
            let (mut proposed, mut is_awaited) = (1 << self.slot, false);
            for slot in slots(at.kept).filter(|&slot| slot != self.slot) {
                // Whether the process has ended is looked at first: a process that has ended after
                // it began to wait is left out.
                let is_dead = self.is_dead(slot);
                let phase = self.page.phase(slot);
                if is_dead || phase.has_left() {
                    continue;
                }
                if phase >= Phase::waits(at.epoch) {
                    proposed |= 1 << slot;
                } else {
                    is_awaited |= self.is_awaited(at, slot, phase, waited);
                }
            }
            if !is_awaited {
                return Ok(self.page.decide(next, proposed));
            }
            std::thread::sleep(LOOK);
            waited += begun.elapsed().min(LONGEST_LOOK);
        }
    }

    /// Whether a living process in `slot` that does not wait for the next epoch yet is awaited any
    /// longer, if this process has waited for the time `waited`.
    fn is_awaited(&self, at: &Current, slot: usize, phase: Phase, waited: Duration) -> bool {
        let given_up = self.given_up.load(Ordering::Acquire) >> slot & 1 == 1;
        if given_up && self.is_stopped(slot) {
            return false;
        }
        // A process whose thread has ended the epoch runs, and its program will come. A spare has
        // nothing to do but wait.
        let will_come = phase >= Phase::revoked(at.epoch) && at.ranks.contains(&slot);
        waited < self.policy.patience
            || will_come && waited < self.settings.meeting_deadline() && !self.is_stopped(slot)
    }
}

/// Difference between the epochs `old` and `new` of this process.
fn change(old: &Current, new: &Current) -> Change {
    let rank_of = |slot: &usize| old.ranks.iter().position(|was| was == slot);
    Change {
        from: new.ranks.iter().map(rank_of).collect(),
        lost: slots(old.kept & !new.kept).map(MemberId).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_names_ranks_by_the_world_before() {
        let at = |kept, ranks: &[usize]| {
            let (epoch, ranks) = (0, ranks.to_vec());
            Current { epoch, kept, ranks, world: None, evicted: None }
        };
        let change = change(&at(0b11110, &[1, 3]), &at(0b11000, &[3, 4]));
        let lost = vec![MemberId(1), MemberId(2)];
        assert_eq!(change, Change { from: vec![Some(1), None], lost });
    }

    #[test]
    fn threads_are_refused_on_every_rank() {
        World::run_threads(2, |world| -> Result<()> {
            let error = Member::join(&world, Policy::new()).unwrap_err();
            assert!(
                matches!(error, Error::Unsupported { .. } | Error::PeerFailed { .. }),
                "{error}"
            );
            assert!(error.to_string().contains("the ranks are threads"), "{error}");
            Ok(())
        })
        .unwrap();
    }
}
