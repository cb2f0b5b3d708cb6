//! Going on after a lost rank: [`Member`], a process of a job that outlives the worlds of its epochs.
//!
//! An *epoch* is a world with its heaps and operators. If a rank of it is lost or stopped, the epoch is
//! revoked: nothing of it is mended. The remaining processes agree on the members of the next epoch
//! ([`page`], [`agree`]), and meet in a new world.

mod agree;
mod page;
mod policy;
mod watch;

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::abi::MAX_RANKS;
use crate::backend::nothing_passed;
use crate::bootstrap::unique_id::UniqueId;
use crate::bootstrap::{ProcessId, is_readable};
use crate::env::Settings;
use crate::error::{Error, Result};
use crate::segment::JointMemory;
use crate::util::{Maker, check_may_wait, lock, spawn, unsupported};
use crate::world::World;

use page::{Page, Phase};
pub use policy::Policy;
use policy::mask;

/// Process of a job whose ranks go on after one of them is lost. It survives the worlds.
///
/// ```no_run
/// # use iris_heap::{Error, Member, Next, Policy, World};
/// /// Opens a heap, plans, makes operators, and takes steps until the job is over.
/// fn serve(world: &World) -> Result<(), Error> {
///     # unimplemented!()
/// }
///
/// let mut world = World::from_env()?;
/// let member = Member::join(&world, Policy::new().sizes(&[4, 2, 1]))?;
/// loop {
///     match serve(&world) {
///         // A rank is lost, or one gave up or is late, and will leave or go on, too.
///         Err(_) if member.is_revoked() => {}
///         outcome => break outcome?,
///     }
///     world = loop {
///         match member.next()? {
///             Next::Epoch(world, _) => break world,
///             Next::Spare => {} // the next call waits
///             _ => return Ok(()),
///         }
///     };
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
    /// Members of the job that are the ranks of the new world, in the order of their ranks; equal on all
    /// ranks.
    pub members: Vec<MemberId>,
    /// For each rank of the new world, its rank in the epoch that this process was in before; `None` if
    /// it was a spare then. If a process was lost while the ranks met, ranks may come from different
    /// epochs.
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
    /// first world. Collective, once, before heaps of `world` are opened and worlds are split off it.
    ///
    /// # Errors
    /// [`Error::Disagreement`] if the policies differ; [`Error::Invalid`] for a policy that no world
    /// can keep; [`Error::Unsupported`] for ranks that are threads of one process, on several nodes,
    /// whose processes are not known (they met over the network) or are in different PID namespaces,
    /// and for a world that has a heap, a split world or a member; [`Error::System`];
    /// [`Error::PeerFailed`] with the reason of another rank; errors of [`World::barrier`].
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
        world.set_epoch(0);
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
        spawn("iris-member", move || watch::run(&watched))
            .inspect_err(|_| shared.leave(Phase::LEFT))?;
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

    /// Members of the job that are the ranks of the present epoch, in the order of their ranks.
    pub fn members(&self) -> Vec<MemberId> {
        self.shared.current().ranks.into_iter().map(MemberId).collect()
    }

    /// World of the epoch that this process is in.
    ///
    /// # Errors
    /// [`Error::Revoked`] if the epoch has ended; [`Error::Evicted`]; [`Error::Unsupported`] for a
    /// spare.
    pub fn world(&self) -> Result<World> {
        let current = self.shared.current();
        self.shared.check_in_job()?;
        match (current.evicted, current.world) {
            (Some(epoch), _) => Err(Error::Evicted { epoch }),
            (None, Some(world)) if self.is_revoked() => world.note(Err(Error::Revoked)),
            (None, Some(world)) => Ok(world),
            (None, None) if self.is_revoked() => Err(Error::Revoked),
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

    /// Whether the epoch has ended for this process, so that [`Member::next`] is due: it was revoked, a
    /// rank is lost, or a call or an exchange has returned an error about another rank after which no
    /// further one can succeed (a loss, a rank that gave up, one that is late). A failure of this rank
    /// itself does not end the epoch. If a program got an error from the library, this tells without
    /// delay whether to go on.
    pub fn is_revoked(&self) -> bool {
        let current = self.shared.current();
        self.shared.page.phase(self.shared.slot) >= Phase::revoked(current.epoch)
            || current.world.is_some_and(|world| world.has_ended())
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
        let mut others = (0..world.size()).filter(|&rank| rank != world.rank());
        if let Some(rank) = others.find(|&rank| world.process(rank).is_none()) {
            let why = format!(
                "the process of rank {rank} is not known; expected ranks that met on this host, not over the \
                 network"
            );
            return Err(unsupported(WHAT, &why));
        }
        if world.is_elastic() {
            return Err(unsupported(WHAT, "the world has a member; expected one call of join"));
        }
        match world.open_parts() {
            (0, 0) => Ok(()),
            (heaps, worlds) => {
                let why = format!(
                    "the world has {heaps} open heaps and {worlds} split worlds; expected 0 of both"
                );
                Err(unsupported(WHAT, &why))
            }
        }
    }

    /// Checks that this process has not left the job.
    fn check_in_job(&self) -> Result<()> {
        if self.page.phase(self.slot).has_left() {
            let why = "this process has left its job after an error; start it anew with the others";
            return Err(unsupported("a member of a job", why));
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
}

#[cfg(test)]
mod tests {
    use super::page::LAST_EPOCH;
    use super::*;
    use crate::{BackendKind, HeapOptions, SymmetricHeap};

    /// World of one rank, and its member.
    fn alone() -> (World, Member) {
        let world = World::of_job("alone".into(), 0, 1, Ok(Settings::default()), None).unwrap();
        let member = Member::join(&world, Policy::new()).unwrap();
        (world, member)
    }

    #[test]
    fn heaps_of_gpus_are_refused() {
        let (world, member) = alone();
        let options = HeapOptions::new().backend(BackendKind::Cuda);
        let error = SymmetricHeap::open(&world, options).unwrap_err();
        assert!(error.to_string().contains("in a world of a Member"), "{error}");
        assert!(matches!(member.world(), Ok(world) if world.size() == 1));
        world.close().unwrap();
    }

    /// Tests the refusal of an epoch after the last one, and that the member has then left.
    #[test]
    fn there_is_a_last_epoch() {
        let (_world, member) = alone();
        lock(&member.shared.current).epoch = LAST_EPOCH - 1;
        assert!(matches!(member.next(), Ok(Next::Epoch(world, _)) if world.size() == 1));
        let error = member.next().unwrap_err();
        assert!(error.to_string().contains("at most 4096; start all ranks anew"), "{error}");
        assert_eq!(member.shared.page.phase(0), Phase::LEFT);
        for error in [member.next().unwrap_err(), member.world().unwrap_err()] {
            assert!(error.to_string().contains("has left its job after an error"), "{error}");
        }
    }

    #[test]
    fn a_world_that_is_in_use_is_refused() {
        let (world, _member) = alone();
        let error = Member::join(&world, Policy::new()).unwrap_err();
        assert!(error.to_string().contains("expected one call of join"), "{error}");
        let world = World::of_job("heap".into(), 0, 1, Ok(Settings::default()), None).unwrap();
        let _heap = SymmetricHeap::open(&world, HeapOptions::new()).unwrap();
        let error = Member::join(&world, Policy::new()).unwrap_err();
        assert!(error.to_string().contains("1 open heaps and 0 split worlds"), "{error}");
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
