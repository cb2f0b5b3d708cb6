//! [`World`]: the ranks of a job, and what they exchange on the host.

mod collective;
pub(crate) mod hosts;
pub(crate) mod network;
mod nodes;
mod split;
mod threads;

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::abi::abort;
use crate::bootstrap::launcher_env::{Launch, UniqueId};
use crate::bootstrap::threads::Threads;
use crate::bootstrap::unix::Processes;
use crate::bootstrap::{Bootstrap, rendezvous};
use crate::control::{Control, code_of};
use crate::env::{self, Settings};
use crate::error::{Error, Result};
use crate::root::Told;
use crate::wire::{Reader, Writer};
use hosts::Hosts;

pub use crate::bootstrap::launcher_env::MAX_WORLD;
pub(crate) use crate::bootstrap::launcher_env::Place;
use crate::util::{lock, unsupported};

/// The ranks of a job, or of a part of it, seen from one of them. Cheap to clone; clones are the
/// same rank.
///
/// All methods that talk to other ranks are collective: every rank calls them, in the same order,
/// from the same place of the program. Each exchange carries its number, kind and call site, so
/// that a difference is an error that names both, and has a deadline, after which it is an error
/// that names the ranks that did not come. After an absence or a loss the world is broken: every
/// further call returns that error. Close it and open a new one.
///
/// A world that is dropped without [`World::close`] counts as a lost rank on its peers.
///
/// A process that forks stays the rank. In the child, which may be dropped or call `exec`, everything
/// collective is [`Error::Unsupported`], and dropping a world or a heap does nothing. Peers learn of
/// the end of the process that made the world even if a child outlives it.
#[derive(Clone)]
pub struct World {
    inner: Arc<Inner>,
}

struct Inner {
    bootstrap: Arc<dyn Bootstrap>,
    settings: Settings,
    place: Place,
    hosts: Hosts,
    /// Number of the next exchange; held while one runs.
    sequence: Mutex<u64>,
    closed: Mutex<bool>,
    /// Control blocks of the heaps that are open.
    controls: Arc<Mutex<Vec<Weak<Control>>>>,
    heaps: AtomicUsize,
    children: AtomicUsize,
    /// Errors that this rank's program was given, by worlds split off this one, too.
    told: Arc<Told>,
    parent: Option<World>,
    /// The process that made the world: a child that it forks has copies of sockets and locks, and none
    /// of the threads.
    process: u32,
}

/// Counts an open heap of a world for as long as it lives.
pub(crate) struct Registration {
    world: World,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.world.inner.heaps.fetch_sub(1, Ordering::Relaxed);
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "World(rank {} of {})", self.rank(), self.size())
    }
}

impl World {
    /// The world that the launcher of this process describes: `RANK` and `WORLD_SIZE` (torchrun, or
    /// by hand), or the variables of Open MPI, MPICH and others that speak PMI, or Slurm. Without
    /// any, a world of one.
    ///
    /// Ranks by hand meet by `MASTER_ADDR` and `MASTER_PORT`, which the ranks of another job do not
    /// share; without a port all must be started by the same process. `IRIS_RENDEZVOUS` is for
    /// either case: a private folder of the job's own.
    ///
    /// A process may make several worlds, one after the other: all ranks in the same order.
    ///
    /// Ranks that have not come after a hundredth of the deadline, 6 s, are named in a warning: on
    /// stderr, or to `tracing` where the program has set that up.
    ///
    /// # Errors
    /// [`Error::Env`] for a value that means nothing; [`Error::Unsupported`] for ranks on several
    /// hosts; [`Error::Absent`] with the ranks that have not come by the deadline;
    /// [`Error::Rendezvous`] with what is wrong, such as two processes of one rank.
    pub fn from_env() -> Result<World> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let settings = Settings::from_env()?;
        let launch = Launch::from_env()?;
        let Launch { rank, size, place, .. } = launch;
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        if let Some(network) = network::from_env(&launch, number)? {
            return World::over_network_with(&network, rank, size, settings);
        }
        if size == 1 {
            return Ok(World::alone(settings, place));
        }
        let folder = env::read("IRIS_RENDEZVOUS")?;
        let job = folder.map_or_else(|| launch.job.clone(), |f| format!("IRIS_RENDEZVOUS={f}"));
        let job = format!("{job}, world {number}");
        World::rendezvous(&job, true, rank, size, place, settings)
    }

    /// The world of the `size` processes of this host that know `id`, for programs with a launcher
    /// of their own: one makes it, all get it, each gives its rank.
    ///
    /// # Errors
    /// As [`World::from_env`]; [`Error::Invalid`] for a size or rank outside its range.
    pub fn from_unique_id(id: &UniqueId, rank: usize, size: usize) -> Result<World> {
        check_size("size of the world", size)?;
        if rank >= size {
            return Err(Error::invalid("rank", rank, format!("0 to {}", size - 1)));
        }
        let settings = Settings::from_env()?;
        let place = Place { node: 0, local_rank: rank, local_size: size };
        if size == 1 {
            return Ok(World::alone(settings, place));
        }
        World::rendezvous(&format!("unique id {id}"), false, rank, size, place, settings)
    }

    fn alone(settings: Settings, place: Place) -> World {
        let mut threads = Threads::all(1);
        World::new(Arc::new(threads.remove(0)), settings, place, None)
    }

    fn rendezvous(
        job: &str,
        launched: bool,
        rank: usize,
        size: usize,
        place: Place,
        settings: Settings,
    ) -> Result<World> {
        let place_to_meet = rendezvous::Place::new(job.into(), launched)?;
        let processes = Processes::rendezvous(place_to_meet, rank, size, settings.host_deadline())?;
        tracing::debug!(rank, size, job, "all ranks have met");
        Ok(World::new(Arc::new(processes), settings, place, None))
    }

    pub(crate) fn new(
        bootstrap: Arc<dyn Bootstrap>,
        settings: Settings,
        place: Place,
        parent: Option<World>,
    ) -> World {
        let hosts = Hosts::one(bootstrap.size());
        World::make(bootstrap, settings, (place, hosts), parent)
    }

    /// A world whose ranks share nodes as `hosts` says.
    pub(crate) fn on_nodes(
        bootstrap: Arc<dyn Bootstrap>,
        settings: Settings,
        hosts: Hosts,
        parent: Option<World>,
    ) -> World {
        let place = hosts.place(bootstrap.rank());
        World::make(bootstrap, settings, (place, hosts), parent)
    }

    fn make(
        bootstrap: Arc<dyn Bootstrap>,
        settings: Settings,
        (place, hosts): (Place, Hosts),
        parent: Option<World>,
    ) -> World {
        let controls: Arc<Mutex<Vec<Weak<Control>>>> = Arc::default();
        let watched = controls.clone();
        bootstrap.watch(Arc::new(move |error| {
            // The error itself is returned to the thread that waits for these kernels.
            tracing::debug!(%error, "waiting kernels are told to leave");
            for control in lock(&watched).iter().filter_map(Weak::upgrade) {
                control.set_host_abort(code_of(error));
            }
        }));
        if let Some(parent) = &parent {
            parent.inner.children.fetch_add(1, Ordering::Relaxed);
        }
        let told = parent.as_ref().map_or_else(Arc::default, |parent| parent.inner.told.clone());
        let inner = Inner {
            bootstrap,
            settings,
            place,
            hosts,
            sequence: Mutex::new(0),
            closed: Mutex::new(false),
            controls,
            heaps: AtomicUsize::new(0),
            children: AtomicUsize::new(0),
            told,
            parent,
            process: std::process::id(),
        };
        World { inner: Arc::new(inner) }
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.inner.bootstrap.rank()
    }

    /// Ranks of the world.
    pub fn size(&self) -> usize {
        self.inner.bootstrap.size()
    }

    pub(crate) fn hosts(&self) -> &Hosts {
        &self.inner.hosts
    }

    /// Number of the host this rank is on.
    pub fn node(&self) -> usize {
        self.inner.place.node
    }

    /// This rank's number among the ranks of its host.
    pub fn local_rank(&self) -> usize {
        self.inner.place.local_rank
    }

    /// Ranks on this host.
    pub fn local_size(&self) -> usize {
        self.inner.place.local_size
    }

    /// Deadlines and threads.
    pub fn settings(&self) -> &Settings {
        &self.inner.settings
    }

    /// Whether all ranks are threads of this process.
    pub fn same_process(&self) -> bool {
        self.inner.bootstrap.same_process()
    }

    /// Closes the world: collective. Heaps and worlds split off it are closed or dropped before.
    /// All clones are closed with it.
    ///
    /// # Errors
    /// [`Error::StillOpen`] on every rank, and the world stays open and may be closed later, if one
    /// has a heap or a split world open; as [`World::barrier`], and this rank is closed all the same.
    #[track_caller]
    pub fn close(&self) -> Result<()> {
        let heaps = self.inner.heaps.load(Ordering::Relaxed);
        let worlds = self.inner.children.load(Ordering::Relaxed);
        let message = Writer::default().u64(heaps as u64).u64(worlds as u64).finish();
        let outcome = self.collective("close", &message).and_then(|all| {
            for (rank, message) in all.iter().enumerate() {
                let mut r = Reader::new("close", message);
                let (heaps, worlds) = (r.u64()? as usize, r.u64()? as usize);
                if (heaps, worlds) != (0, 0) {
                    return Err(Error::StillOpen { rank, heaps, worlds });
                }
            }
            Ok(())
        });
        match &outcome {
            Ok(()) => self.leave(true),
            Err(Error::StillOpen { .. } | Error::Closed { .. } | Error::Mismatch { .. }) => {}
            Err(_) => self.leave(false),
        }
        outcome
    }

    /// Checks that this process made the world and is no child that was forked from it.
    pub(crate) fn check_process(&self, what: &str) -> Result<()> {
        self.inner.check_process(what)
    }

    /// Tells the peers that this rank cannot go on: to them it is lost. Not collective.
    pub fn abort(&self) {
        self.leave(false);
    }

    fn leave(&self, clean: bool) {
        self.inner.leave(clean);
    }

    /// Notes an error that the program is given because of another rank.
    pub(crate) fn tell<T>(&self, outcome: Result<T>) -> Result<T> {
        let outcome = outcome.map_err(|error| self.inner.hosts.describe(error));
        outcome.inspect_err(|error| self.inner.told.note(error))
    }

    /// Counts a heap as open, and has its waiting kernels told when a peer is lost.
    pub(crate) fn register(&self, control: &Arc<Control>) -> Registration {
        self.inner.heaps.fetch_add(1, Ordering::Relaxed);
        control.note_errors(&self.inner.told);
        let mut controls = lock(&self.inner.controls);
        controls.retain(|c| c.strong_count() > 0);
        controls.push(Arc::downgrade(control));
        drop(controls);
        // Lost before this? Then the watcher has not seen the new block.
        if let Some(error) = self.inner.bootstrap.lost() {
            control.set_host_abort(code_of(&error));
        }
        Registration { world: self.clone() }
    }
}

impl Inner {
    fn check_process(&self, what: &str) -> Result<()> {
        let (own, this) = (self.process, std::process::id());
        if own == this {
            return Ok(());
        }
        let why = format!(
            "this process, {this}, was forked from process {own}, which is the rank: use it there, or \
             start a program anew with exec"
        );
        Err(unsupported(what, &why))
    }

    fn leave(&self, clean: bool) {
        if self.check_process("leaving").is_err()
            || std::mem::replace(&mut *lock(&self.closed), true)
        {
            return;
        }
        self.bootstrap.leave(clean);
        if let Some(parent) = &self.parent {
            parent.inner.children.fetch_sub(1, Ordering::Relaxed);
        }
        if !clean {
            for control in lock(&self.controls).iter().filter_map(Weak::upgrade) {
                control.set_host_abort(abort::USER);
            }
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.check_process("dropping").is_err() {
            // The sockets are the parent's, and its threads cannot be joined here.
            std::mem::forget(self.bootstrap.clone());
            return;
        }
        if !*lock(&self.closed) && self.bootstrap.size() > 1 {
            let rank = self.bootstrap.rank();
            tracing::debug!(rank, "a world was dropped without close: its peers lose this rank");
        }
        self.leave(false);
    }
}

pub(crate) fn check_size(what: &str, size: usize) -> Result<()> {
    if (1..=MAX_WORLD).contains(&size) {
        return Ok(());
    }
    Err(Error::invalid(what, size, format!("1 to {MAX_WORLD}")))
}
