//! Worlds of ranks, [`World`], and their collective calls on the host.
//!
//! This file is long because each way to make a world has a public function with its own error
//! documentation.

mod collective;
mod groups;
pub(crate) mod hosts;
pub(crate) mod network;
mod nodes;
pub(crate) mod secret;
mod split;
mod threads;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::bootstrap::launcher_env::Launch;
use crate::bootstrap::threads::Threads;
use crate::bootstrap::unique_id::UniqueId;
use crate::bootstrap::unix::Processes;
use crate::bootstrap::{Bootstrap, ProcessId, Step, lost_rank, rendezvous};
use crate::control::{Control, await_reason};
use crate::encoding::{Reader, Writer};
use crate::env::Settings;
use crate::error::{Error, ErrorKind, Result};
use crate::root_error::ReturnedErrors;
use hosts::Hosts;

pub use crate::bootstrap::launcher_env::MAX_WORLD;
pub(crate) use crate::bootstrap::launcher_env::Place;
use crate::util::{Maker, lock};
pub(crate) use groups::PeerAccess;

/// Set of ranks (all ranks of a job or a part of them), as seen from one of the ranks. Clones are
/// cheap and refer to the same rank.
///
/// All methods that communicate with other ranks are collective: every rank calls them, in the same
/// order, from the same place in the program. Each exchange carries its number, kind and call site;
/// if the ranks differ, the error names both calls. Each exchange has a deadline, after which the
/// error names the ranks that did not arrive. After an absence or a loss the world is broken, and
/// every further call returns that error: close the world and open a new one.
///
/// A world dropped without [`World::close`] counts as a lost rank on its peers. If this rank got an error
/// about another rank before, its peers get the text of that error ([`Error::PeerAborted`]).
///
/// After a fork the parent process stays the rank. In the child, which may exit or call `exec`,
/// every function that waits, copies, issues a call or involves other ranks fails with
/// [`Error::Unsupported`], and dropping a world or a heap does nothing. A child keeps no connection
/// of the rank open, so the other ranks notice the rank's end even if a child outlives the rank.
/// Exception: a child that was made without the handlers of `pthread_atfork`, for example by
/// `_Fork`.
#[derive(Clone)]
pub struct World {
    inner: Arc<Inner>,
    nodes: Arc<Grouping>,
}

/// Division of the ranks into nodes; handles of the same world may differ in it.
struct Grouping {
    place: Place,
    hosts: Hosts,
}

/// Open heap that fails if a rank of a world is lost.
#[derive(Clone)]
struct OpenHeap {
    control: Weak<Control>,
    /// Nodes of the heap if it spans the nodes of the world; `None` for a heap of the world itself.
    nodes: Option<Arc<Grouping>>,
}

impl OpenHeap {
    /// Tells the heap's kernels to leave because of `error`, which the bootstrap of a world has
    /// returned. `hosts` describes the nodes of that world, and `own` is the number of this rank in
    /// errors.
    fn lose(&self, (hosts, own): (&Hosts, usize), error: &Error) {
        let Some(control) = self.control.upgrade() else { return };
        let hosts = self.nodes.as_ref().map_or(hosts, |nodes| &nodes.hosts);
        let described = hosts.describe(error.clone()).on_rank(own);
        match self.nodes {
            None => control.lose(lost_rank(error), described),
            Some(_) => {
                control.fail_elsewhere(described);
                control.end_steps();
            }
        }
    }
}

struct Inner {
    bootstrap: Arc<dyn Bootstrap>,
    settings: Settings,
    /// Number of the next exchange; the lock is held during an exchange.
    sequence: Mutex<u64>,
    closed: Mutex<bool>,
    /// Whether this rank closes the world, or has closed it cleanly.
    closing: AtomicBool,
    /// Number of the epoch, if the world is one of a job ([`Member`](crate::Member)).
    epoch: OnceLock<u64>,
    /// Open heaps, whose waiting kernels learn that a peer is lost. The callback by which the bootstrap
    /// reports a lost rank shares the list.
    open: Arc<Mutex<Vec<OpenHeap>>>,
    heaps: AtomicUsize,
    children: AtomicUsize,
    /// Worlds that were split off this world, closed ones among them.
    split: Mutex<Vec<Weak<Inner>>>,
    /// Errors that the library has returned to this rank's program. Worlds that were split off this
    /// world add their errors here.
    returned_errors: Arc<ReturnedErrors>,
    parent: Option<World>,
    process: Maker,
}

/// Guard that counts an open heap of a world.
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
    /// Makes the world that this process's launcher describes: by `RANK` and `WORLD_SIZE`
    /// (torchrun, or set by hand), by the variables of Open MPI, of MPICH and other PMI launchers,
    /// or of Slurm. Without any of these variables, makes a world of one rank. If one launcher runs
    /// inside another, the inner one counts: the launcher that is this process's nearest ancestor.
    ///
    /// Ranks started by hand find each other by `MASTER_PORT`, which must differ between jobs whose
    /// rank 0 is on the same host. Without a port, the same parent process must start all ranks and
    /// still run; a wrapper such as `timeout` counts as a parent of its own. `MASTER_ADDR`, the
    /// host of rank 0, may be a different name of that host on each rank. `IRIS_RENDEZVOUS`, a
    /// private folder of the job, replaces both variables.
    ///
    /// Ranks may be on several hosts, which then meet over TCP ([`World::over_network`]). Each host
    /// then has a heap of its own. Launchers say whether there are several hosts. If variables are
    /// set by hand, set `LOCAL_WORLD_SIZE` to the number of ranks on this host: there are several
    /// hosts if it is smaller than `WORLD_SIZE`.
    ///
    /// A process may make several worlds, one after another, if all ranks make them in the same
    /// order: each process counts its worlds, including failed attempts, and ranks meet if their
    /// counts are equal. So a restarted process does not meet processes that have kept running. To
    /// replace a lost rank, all ranks pass a new [`UniqueId`](crate::UniqueId) to
    /// [`World::from_unique_id`], or all processes start anew.
    ///
    /// After a hundredth of [`Settings::meeting`], by default 7.2 s, a warning names the ranks that have not
    /// arrived. It goes to `tracing`, or to stderr if the program has set up no subscriber.
    ///
    /// # Errors
    /// [`Error::Env`] for an invalid value, or if a variable that ranks on several hosts need is missing;
    /// [`Error::Absent`] with the ranks that have not arrived by the deadline;
    /// [`Error::Rendezvous`] for other problems, such as two processes with one rank.
    pub fn from_env() -> Result<World> {
        World::launched(Settings::from_env())
    }

    /// Makes a world as [`World::from_env`] does, with the program's settings instead of those of the
    /// environment.
    ///
    /// # Errors
    /// Errors of [`World::from_env`] and of [`Settings::check`].
    pub fn from_env_with(settings: &Settings) -> Result<World> {
        World::launched(Ok(settings.clone()))
    }

    fn launched(settings: Result<Settings>) -> Result<World> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        // A failed attempt counts too, on every rank, so that the counts of all ranks stay equal.
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let launch = Launch::from_env()?;
        World::of_launch(&launch, number, settings).map_err(|error| error.on_rank(launch.rank))
    }

    fn of_launch(launch: &Launch, number: usize, settings: Result<Settings>) -> Result<World> {
        let &Launch { rank, size, place, .. } = launch;
        if let Some(network) = network::from_env(launch, number)? {
            return World::meet_over(&network, rank, size, settings);
        }
        if size == 1 {
            return World::alone(settings, place);
        }
        let other = launch.other_host()?;
        let job = match (&launch.folder, &other) {
            (Some(folder), _) => format!("IRIS_RENDEZVOUS={folder}"),
            (None, Some(other)) => format!("{} {other}", launch.job),
            (None, None) => launch.job.clone(),
        };
        let job = format!("{job}, world {number}");
        let meeting = rendezvous::Place::new(job, launch.folder.is_some())?;
        let meeting = meeting.of_launched(other.is_some())?;
        World::rendezvous(meeting, rank, size, place, settings, None)
    }

    /// Makes the world of `size` processes of this host that share `id`, for programs with a
    /// launcher of their own: one process generates the id, all receive it, and each passes its
    /// rank, from 0.
    ///
    /// ```no_run
    /// # use iris_heap::{Error, UniqueId, World};
    /// # fn receive() -> (UniqueId, usize) { unimplemented!() }
    /// let (id, rank) = receive(); // from a parent that called `UniqueId::new`
    /// let world = World::from_unique_id(&id, rank, 4)?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of [`World::from_env`]; [`Error::Invalid`] for a size or rank outside its range.
    pub fn from_unique_id(id: &UniqueId, rank: usize, size: usize) -> Result<World> {
        World::of_id(id, rank, size, Settings::from_env())
    }

    /// Makes a world as [`World::from_unique_id`] does, with the program's settings instead of those
    /// of the environment.
    ///
    /// # Errors
    /// Errors of [`World::from_unique_id`] and of [`Settings::check`].
    pub fn from_unique_id_with(
        id: &UniqueId,
        rank: usize,
        size: usize,
        settings: &Settings,
    ) -> Result<World> {
        World::of_id(id, rank, size, Ok(settings.clone()))
    }

    fn of_id(id: &UniqueId, rank: usize, size: usize, settings: Result<Settings>) -> Result<World> {
        check_size("size of the world", size)?;
        if rank >= size {
            return Err(Error::invalid(
                "rank of from_unique_id",
                rank,
                format!("0 to {}", size - 1),
            ));
        }
        World::of_job(format!("unique id {id}"), rank, size, settings, None)
    }

    /// Makes the world of `size` processes of this host that know the name `job`, which no other
    /// processes have. They meet within `limit`; if it is `None`, within [`Settings::meeting`].
    pub(crate) fn of_job(
        job: String,
        rank: usize,
        size: usize,
        settings: Result<Settings>,
        limit: Option<Duration>,
    ) -> Result<World> {
        let place = Place { node: 0, local_rank: rank, local_size: size };
        if size == 1 {
            return World::alone(settings, place);
        }
        rendezvous::Place::new(job, false)
            .and_then(|meeting| World::rendezvous(meeting, rank, size, place, settings, limit))
            .map_err(|error| error.on_rank(rank))
    }

    fn alone(settings: Result<Settings>, place: Place) -> Result<World> {
        let settings = settings.and_then(Settings::checked)?;
        let mut threads = Threads::all(1);
        Ok(World::new(Arc::new(threads.remove(0)), settings, place, None))
    }

    fn rendezvous(
        meeting: rendezvous::Place,
        rank: usize,
        size: usize,
        place: Place,
        settings: Result<Settings>,
        limit: Option<Duration>,
    ) -> Result<World> {
        let settings = meeting.prepared(rank, settings.and_then(Settings::checked))?;
        let (job, limit) = (meeting.job.clone(), limit.unwrap_or(settings.meeting_deadline()));
        let processes = Processes::rendezvous(meeting, rank, size, limit)?;
        let deadline = Instant::now() + limit;
        let what = "exchange of process ids".into();
        processes.share_processes(&Step { what, deadline, on_missing: None, numbers: None })?;
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

    /// Makes a world with the nodes that `hosts` describes.
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
        let open: Arc<Mutex<Vec<OpenHeap>>> = Arc::default();
        let (watched, named, own) = (open.clone(), hosts.clone(), hosts.number(bootstrap.rank()));
        bootstrap.watch(Arc::new(move |error| {
            // The loss is logged at debug level only, because the thread that waits for these
            // kernels returns it as an error.
            tracing::debug!(%error, "waiting kernels are told to leave");
            lock(&watched).iter().for_each(|heap| heap.lose((&named, own), error));
        }));
        if let Some(parent) = &parent {
            parent.inner.children.fetch_add(1, Ordering::Relaxed);
        }
        let returned_errors = parent
            .as_ref()
            .map_or_else(Arc::default, |parent| parent.inner.returned_errors.clone());
        let epoch = parent.as_ref().map_or_else(OnceLock::new, |it| it.inner.epoch.clone());
        let inner = Inner {
            bootstrap,
            settings,
            sequence: Mutex::new(0),
            closed: Mutex::new(false),
            closing: AtomicBool::new(false),
            epoch,
            open,
            heaps: AtomicUsize::new(0),
            children: AtomicUsize::new(0),
            split: Mutex::default(),
            returned_errors,
            parent,
            process: Maker::this(),
        };
        let inner = Arc::new(inner);
        if let Some(parent) = &inner.parent {
            let mut split = lock(&parent.inner.split);
            split.retain(|world| world.strong_count() > 0);
            split.push(Arc::downgrade(&inner));
        }
        World { inner, nodes: Arc::new(Grouping { place, hosts }) }
    }

    /// Returns this world with the nodes `hosts`: the same ranks and the same exchanges. Closing
    /// either handle closes both.
    pub(crate) fn with_nodes(&self, hosts: Hosts) -> World {
        let place = hosts.place(self.rank());
        World { inner: self.inner.clone(), nodes: Arc::new(Grouping { place, hosts }) }
    }

    /// This rank's number, from 0.
    pub fn rank(&self) -> usize {
        self.inner.bootstrap.rank()
    }

    /// Number of ranks of the world.
    pub fn size(&self) -> usize {
        self.inner.bootstrap.size()
    }

    pub(crate) fn hosts(&self) -> &Hosts {
        &self.nodes.hosts
    }

    /// Index of the node of this rank. A node is a host, or a part of one (`IRIS_NODE`,
    /// [`World::for_heap`]).
    pub fn node(&self) -> usize {
        self.nodes.place.node
    }

    /// Number of this rank within its node.
    pub fn local_rank(&self) -> usize {
        self.nodes.place.local_rank
    }

    /// Number of ranks of this node.
    pub fn local_size(&self) -> usize {
        self.nodes.place.local_size
    }

    /// Settings of the world: deadlines and number of threads.
    pub fn settings(&self) -> &Settings {
        &self.inner.settings
    }

    /// Process of `rank`; `None` for a thread of this process, or if the process is unknown.
    pub fn process(&self, rank: usize) -> Option<ProcessId> {
        self.inner.bootstrap.process(rank)
    }

    /// Whether all ranks are threads of this process.
    pub fn same_process(&self) -> bool {
        self.inner.bootstrap.same_process()
    }

    /// Closes the world and all its clones: collective. Heaps of this world, and worlds split off
    /// it, must be closed or dropped before. If a heap of this world was closed after it had
    /// failed, this function waits for no other rank and returns `Ok`.
    ///
    /// # Errors
    /// [`Error::StillOpen`] on every rank if one has a heap or a split world open; the world then
    /// stays open and may be closed later. Errors of [`World::barrier`]; this rank is then closed
    /// nevertheless.
    #[track_caller]
    pub fn close(&self) -> Result<()> {
        self.close_in("close")
    }

    /// Closes the world as [`World::close`] does, in a step called `kind`.
    #[track_caller]
    pub(super) fn close_in(&self, kind: &str) -> Result<()> {
        let heaps = self.inner.heaps.load(Ordering::Relaxed);
        let worlds = self.inner.children.load(Ordering::Relaxed);
        let message = Writer::default().u64(heaps as u64).u64(worlds as u64).finish();
        // Set before the exchange: once it has ended on any rank, all ranks have set it.
        self.inner.closing.store(true, Ordering::Release);
        let outcome = self.exchange(kind, &message, None).and_then(|all| {
            for (rank, message) in all.iter().enumerate() {
                let mut r = Reader::new("close", message);
                let (heaps, worlds) = (r.u64()? as usize, r.u64()? as usize);
                if (heaps, worlds) != (0, 0) {
                    let rank = self.hosts().number(rank);
                    return Err(Error::StillOpen { rank, heaps, worlds });
                }
            }
            Ok(())
        });
        // Without an exchange of all ranks, the others may go on.
        let is_collective = outcome.is_ok();
        let outcome = match outcome {
            Err(error) if error.is_surrender() => match (heaps, worlds) {
                (0, 0) => Ok(()),
                _ => Err(Error::StillOpen { rank: self.rank(), heaps, worlds }),
            },
            outcome => outcome,
        };
        match &outcome {
            Ok(()) => self.inner.leave(true, None),
            Err(Error::StillOpen { .. } | Error::Closed { .. } | Error::Mismatch { .. }) => {}
            Err(_) => self.inner.leave(false, None),
        }
        if !is_collective {
            self.inner.closing.store(false, Ordering::Release);
        }
        self.note(outcome)
    }

    /// Whether this rank is closing the world, or has closed it without an error.
    pub(crate) fn is_closing(&self) -> bool {
        self.inner.closing.load(Ordering::Acquire)
    }

    /// Whether this rank has closed the world in an exchange of all ranks.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closing() && *lock(&self.inner.closed)
    }

    /// Numbers of open heaps of this world, and of open worlds that were split off it.
    pub(crate) fn open_parts(&self) -> (usize, usize) {
        (self.inner.heaps.load(Ordering::Relaxed), self.inner.children.load(Ordering::Relaxed))
    }

    /// Records that the world is the epoch with this number of a job; called once.
    pub(crate) fn set_epoch(&self, epoch: u64) {
        // A second call has no effect.
        let _ = self.inner.epoch.set(epoch);
    }

    /// Number of the epoch of a job that the world is; `None` for a world that no member has joined.
    pub(crate) fn epoch(&self) -> Option<u64> {
        self.inner.epoch.get().copied()
    }

    /// Whether the world is an epoch of a job, whose ranks may go on after a loss.
    pub(crate) fn is_elastic(&self) -> bool {
        self.epoch().is_some()
    }

    /// Ends the exchanges of all ranks of this world, and of worlds that were split off it, with
    /// [`Error::Revoked`], and stops the kernels of their heaps. Waits for no rank.
    pub(crate) fn revoke(&self) {
        self.inner.revoke();
    }

    /// Checks that this process made the world and is not a forked child of that process.
    pub(crate) fn check_process(&self, what: &str) -> Result<()> {
        self.inner.process.check(what)
    }

    /// Tells the peers that this rank cannot continue; they treat this rank as lost, in this world
    /// and in worlds that were split off it. Not collective.
    pub fn abort(&self) {
        self.inner.abort(None);
    }

    /// Does [`World::abort`] and tells the peers why: their calls fail with [`Error::PeerAborted`],
    /// which shows `reason`, unless they have learned of another failure before. Not collective.
    pub fn abort_with(&self, reason: impl fmt::Display) {
        self.inner.abort(Some(&reason.to_string()));
    }

    /// Whether a rank of this world is lost, so that no exchange waits any more.
    pub(crate) fn has_lost(&self) -> bool {
        self.inner.bootstrap.lost().is_some()
    }

    /// Whether a call or an exchange of this world, or of its heaps, has returned an error that follows
    /// from another rank (it is lost, gave up or is late), so that no further one can succeed. An error of
    /// the program's own, or one of this rank alone, changes nothing here.
    pub fn has_failed(&self) -> bool {
        self.inner.returned_errors.has_ended()
    }

    /// Whether no exchange or call with the other ranks of this world can succeed, because a rank is lost
    /// or because this rank has got an error that says so.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_lost() || self.has_failed()
    }

    /// Rank whose loss ended this world: its process or thread ended, it called [`World::abort`] or
    /// dropped the world unclosed, or it cannot be reached. `None` if no rank is lost, or none of
    /// this world. Only the first loss is returned, not later losses, for example of ranks that end
    /// because of the first. Waits for no rank; a kernel may return an error of the loss a moment
    /// earlier. A rank that gave up ([`Error::GaveUp`]) or is late ([`Error::Absent`]) is not lost.
    ///
    /// Errors that follow from a loss have the kind
    /// [`ErrorKind::PeerLost`](crate::ErrorKind::PeerLost) on every rank that is left.
    pub fn lost(&self) -> Option<usize> {
        self.inner.bootstrap.lost().as_ref().and_then(lost_rank)
    }

    /// Ends the exchanges of this world on all ranks, because a heap in it has failed on this rank.
    /// The peers get the error `told`; if it is `None`, they learn that this rank gave up.
    pub(crate) fn give_up(&self, told: Option<Error>) {
        let own = || Error::GaveUp { rank: self.rank(), host: None, reason: None };
        self.inner.bootstrap.give_up(told.unwrap_or_else(own));
    }

    /// Adds names of hosts and of this rank to an error. If the process that carries the messages
    /// of this split world was lost, returns instead the error that the parent world has for that
    /// loss.
    fn describe(&self, error: Error) -> Error {
        if let (Error::HubLost { .. }, Some(parent)) = (&error, &self.inner.parent)
            && let Some(known) = parent.inner.bootstrap.lost()
        {
            return parent.describe(known);
        }
        self.hosts().describe(error).on_rank(self.hosts().number(self.rank()))
    }

    /// Describes the error of `outcome`, if there is one, and records it as returned to the program.
    pub(crate) fn note_returned<T>(&self, outcome: Result<T>) -> Result<T> {
        self.note(outcome.map_err(|error| self.describe(error)))
    }

    /// Records the error of `outcome`, if there is one, as returned to the program.
    /// [`Error::Closed`] is not recorded, because it says nothing about why the world ended.
    pub(crate) fn note<T>(&self, outcome: Result<T>) -> Result<T> {
        outcome.inspect_err(|error| match error {
            Error::Closed { .. } => {}
            error => self.inner.returned_errors.note(error),
        })
    }

    /// Counts a heap as open; from now on the loss of a peer aborts the heap's waiting kernels.
    pub(crate) fn register(&self, control: &Arc<Control>) -> Registration {
        self.inner.heaps.fetch_add(1, Ordering::Relaxed);
        control.note_errors(&self.inner.returned_errors);
        self.watch(OpenHeap { control: Arc::downgrade(control), nodes: None });
        Registration { world: self.clone() }
    }

    /// Registers a node's heap so that its kernels and its steps between nodes are aborted if a
    /// rank of this world is lost, possibly on another node.
    pub(crate) fn watch_for(&self, control: &Arc<Control>) {
        let nodes = Some(self.nodes.clone());
        self.watch(OpenHeap { control: Arc::downgrade(control), nodes });
    }

    fn watch(&self, heap: OpenHeap) {
        let mut open = lock(&self.inner.open);
        open.retain(|heap| heap.control.strong_count() > 0);
        open.push(heap.clone());
        drop(open);
        // A rank that was lost before this point is reported here, because this heap was not
        // registered then.
        if let Some(error) = self.inner.bootstrap.lost() {
            heap.lose((self.hosts(), self.hosts().number(self.rank())), &error);
        }
    }
}

impl Inner {
    /// Control blocks of the open heaps of this world itself, without heaps that span its nodes.
    fn controls(&self) -> Vec<Arc<Control>> {
        let open = lock(&self.open);
        let own = open.iter().filter(|heap| heap.nodes.is_none());
        own.filter_map(|heap| heap.control.upgrade()).collect()
    }

    fn revoke(&self) {
        if !*lock(&self.closed) {
            self.bootstrap.give_up(Error::Revoked);
        }
        let split: Vec<_> = lock(&self.split).iter().filter_map(Weak::upgrade).collect();
        split.iter().for_each(|world| world.revoke());
    }

    fn abort(&self, reason: Option<&str>) {
        self.leave(false, reason);
        let split = std::mem::take(&mut *lock(&self.split));
        split.iter().filter_map(Weak::upgrade).for_each(|world| world.abort(reason));
    }

    /// Error about another rank that made this rank leave the world unclosed. Peers are told the
    /// error, so that they name the other rank and not this rank.
    ///
    /// In the launched world the result is `None` for a loss, because its ranks learn of a loss by
    /// themselves. A split world, or the connection of one node, can learn of a loss earlier, so
    /// this function first waits until the launched world knows of it.
    fn cause(&self) -> Option<Error> {
        let cause = self.returned_errors.about_others()?;
        if cause.kind() != ErrorKind::PeerLost || self.parent.is_some() {
            return Some(cause);
        }
        // A split world that lost the process which carries its messages (`HubLost`) learns nothing
        // that the launched world must still learn, so there is nothing to wait for.
        if !matches!(cause, Error::HubLost { .. }) {
            await_reason(|| self.bootstrap.lost().is_some());
        }
        None
    }

    /// Ends this rank's part in the world, unless it has ended; `clean` is true after a collective
    /// close. Tells the peers the `reason`, if there is one.
    fn leave(&self, clean: bool, reason: Option<&str>) {
        if self.process.check("leaving").is_err()
            || std::mem::replace(&mut *lock(&self.closed), true)
        {
            return;
        }
        if !clean {
            // Control blocks keep the first reason. The announcement to the peers may also reach
            // this rank's own heaps, so this line precedes it; otherwise they would count this rank
            // as lost.
            self.controls().iter().for_each(|control| control.leave());
        }
        let cause = if clean { None } else { self.cause() };
        if let Some(reason) = reason.map(str::to_string).or(cause.map(|error| error.to_string())) {
            let rank = self.bootstrap.rank();
            self.bootstrap.give_up(Error::PeerAborted { rank, host: None, reason });
        }
        self.bootstrap.leave(clean);
        if let Some(parent) = &self.parent {
            parent.inner.children.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.process.check("dropping").is_err() {
            // In a forked child the bootstrap is not dropped: the child cannot join the parent's
            // threads.
            std::mem::forget(self.bootstrap.clone());
            return;
        }
        if !*lock(&self.closed) && self.bootstrap.size() > 1 {
            let rank = self.bootstrap.rank();
            tracing::debug!(rank, "a world was dropped without close: its peers lose this rank");
        }
        self.leave(false, None);
    }
}

pub(crate) fn check_size(what: &str, size: usize) -> Result<()> {
    if (1..=MAX_WORLD).contains(&size) {
        return Ok(());
    }
    Err(Error::invalid(what, size, format!("1 to {MAX_WORLD}")))
}
