//! [`World`]: the ranks of a job, and what they exchange on the host.
//!
//! Long because the life of a world (made, split, watched, closed) shares one private state.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use crate::abi::{MAX_RANKS, abort};
use crate::bootstrap::launch::{Launch, UniqueId};
use crate::bootstrap::rendezvous;
use crate::bootstrap::threads::Threads;
use crate::bootstrap::unix::Processes;
use crate::bootstrap::{Bootstrap, Object, Step};
use crate::control::{Control, code_of};
use crate::env::{self, Settings};
use crate::error::{Error, Result, odd_ranks};
use crate::wire::{Reader, Writer, hash};

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
#[derive(Clone)]
pub struct World {
    inner: Arc<Inner>,
}

struct Inner {
    bootstrap: Arc<dyn Bootstrap>,
    settings: Settings,
    place: Place,
    /// Number of the next exchange; held while one runs.
    sequence: Mutex<u64>,
    closed: Mutex<bool>,
    /// Control blocks of the heaps that are open.
    controls: Arc<Mutex<Vec<Weak<Control>>>>,
    heaps: AtomicUsize,
    children: AtomicUsize,
    parent: Option<World>,
}

/// Where a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) node: usize,
    pub(crate) local_rank: usize,
    pub(crate) local_size: usize,
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

/// An error and how many ranks had failed before.
struct Numbered<E>(usize, E);

impl<E: From<Error>> From<Error> for Numbered<E> {
    fn from(error: Error) -> Self {
        Numbered(usize::MAX, error.into())
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
        if size == 1 {
            return Ok(World::alone(settings, place));
        }
        let folder = env::read("IRIS_RENDEZVOUS")?;
        let job = folder.map_or_else(|| launch.job.clone(), |f| format!("IRIS_RENDEZVOUS={f}"));
        let job = format!("{job}, world {number}");
        World::meet(&job, true, rank, size, place, settings)
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
        World::meet(&format!("unique id {id}"), false, rank, size, place, settings)
    }

    fn alone(settings: Settings, place: Place) -> World {
        let mut threads = Threads::all(1);
        World::new(Arc::new(threads.remove(0)), settings, place, None)
    }

    fn meet(
        job: &str,
        launched: bool,
        rank: usize,
        size: usize,
        place: Place,
        settings: Settings,
    ) -> Result<World> {
        let meeting = rendezvous::Place::new(job.into(), launched)?;
        let processes = Processes::meet(meeting, rank, size, settings.host_deadline())?;
        tracing::debug!(rank, size, job, "all ranks have met");
        Ok(World::new(Arc::new(processes), settings, place, None))
    }

    /// A world of `size` ranks that are threads of this process: give each to a thread of its own.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `size` is 0 or above [`MAX_RANKS`]; [`Error::Env`].
    pub fn threads(size: usize) -> Result<Vec<World>> {
        World::threads_with(size, &Settings::from_env()?)
    }

    /// As [`World::threads`], with settings of the program's.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `size` is 0 or above [`MAX_RANKS`], and as [`Settings::check`].
    pub fn threads_with(size: usize, settings: &Settings) -> Result<Vec<World>> {
        check_size("size of the world", size)?;
        settings.check()?;
        let world = |(rank, t): (usize, Threads)| {
            let place = Place { node: 0, local_rank: rank, local_size: size };
            World::new(Arc::new(t), settings.clone(), place, None)
        };
        Ok(Threads::all(size).into_iter().enumerate().map(world).collect())
    }

    /// Runs `f` on `size` threads, one a rank, and returns their results by rank.
    ///
    /// A rank that returns `Ok` closes its world if `f` has not; one that fails or panics is lost
    /// to the others at once, so that they need not wait for their deadlines.
    ///
    /// # Errors
    /// The error of the rank that failed first. A panic is [`Error::Panicked`].
    pub fn run_threads<T, E, F>(size: usize, f: F) -> Result<Vec<T>, E>
    where
        T: Send,
        E: Send + From<Error>,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        let settings = Settings::from_env()?;
        // The others fail because the first did.
        let failures = AtomicUsize::new(0);
        let numbered = |world: World| {
            let failed = || failures.fetch_add(1, Ordering::Relaxed);
            match catch_unwind(AssertUnwindSafe(|| f(world))) {
                Ok(Ok(value)) => Ok(value),
                Ok(Err(e)) => Err(Numbered(failed(), e)),
                Err(panic) => {
                    let name = std::thread::current().name().unwrap_or_default().to_string();
                    let message = panic_message(&*panic);
                    Err(Numbered(failed(), Error::Panicked { name, group: None, message }.into()))
                }
            }
        };
        let results = World::run_threads_each(size, &settings, numbered).map_err(E::from)?;
        let mut first: Option<Numbered<E>> = None;
        let mut values = Vec::with_capacity(size);
        for result in results {
            match result {
                Ok(value) => values.push(value),
                Err(e) if first.as_ref().is_none_or(|f| e.0 < f.0) => first = Some(e),
                Err(_) => {}
            }
        }
        first.map_or(Ok(values), |e| Err(e.1))
    }

    /// As [`World::run_threads`], with the result of every rank.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `size` is 0 or above [`MAX_RANKS`].
    pub fn run_threads_each<T, E, F>(
        size: usize,
        settings: &Settings,
        f: F,
    ) -> Result<Vec<Result<T, E>>>
    where
        T: Send,
        E: Send + From<Error>,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        let worlds = World::threads_with(size, settings)?;
        let f = &f;
        let rank_main = move |world: World| {
            let result = catch_unwind(AssertUnwindSafe(|| f(world.clone())));
            match &result {
                // An error here is another rank's, which reports it itself.
                Ok(Ok(_)) => drop(world.close()),
                _ => world.abort(),
            }
            result
        };
        Ok(std::thread::scope(|scope| {
            let start = |world: World| {
                let rank = world.rank();
                let spare = world.clone();
                let name = format!("iris-rank-{rank}");
                let builder = std::thread::Builder::new().name(name.clone());
                let thread = builder.spawn_scoped(scope, move || rank_main(world));
                (name, spare, thread)
            };
            let started: Vec<_> = worlds.into_iter().map(start).collect();
            let finish = |(name, spare, thread): (String, World, std::io::Result<_>)| {
                let thread: std::thread::ScopedJoinHandle<'_, _> = match thread {
                    Ok(thread) => thread,
                    Err(e) => {
                        spare.abort();
                        return Err(Error::system(format!("starting thread {name}"), e).into());
                    }
                };
                let outcome: std::thread::Result<_> = thread.join();
                match outcome.and_then(|r| r) {
                    Ok(result) => result,
                    Err(panic) => {
                        Err(Error::Panicked { name, group: None, message: panic_message(&*panic) }
                            .into())
                    }
                }
            };
            started.into_iter().map(finish).collect()
        }))
    }

    pub(crate) fn new(
        bootstrap: Arc<dyn Bootstrap>,
        settings: Settings,
        place: Place,
        parent: Option<World>,
    ) -> World {
        let controls: Arc<Mutex<Vec<Weak<Control>>>> = Arc::default();
        let watched = controls.clone();
        bootstrap.watch(Arc::new(move |error| {
            tracing::warn!(%error, "waiting kernels are told to leave");
            for control in lock(&watched).iter().filter_map(Weak::upgrade) {
                control.set_host_abort(code_of(error));
            }
        }));
        if let Some(parent) = &parent {
            parent.inner.children.fetch_add(1, Ordering::Relaxed);
        }
        let inner = Inner {
            bootstrap,
            settings,
            place,
            sequence: Mutex::new(0),
            closed: Mutex::new(false),
            controls,
            heaps: AtomicUsize::new(0),
            children: AtomicUsize::new(0),
            parent,
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

    /// Returns when every rank has come.
    ///
    /// # Errors
    /// As every collective call: [`Error::Absent`], [`Error::Mismatch`], [`Error::PeerLost`],
    /// [`Error::Closed`].
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.collective("barrier", &[]).map(drop)
    }

    /// Gives every rank the bytes of every rank, by rank.
    ///
    /// # Errors
    /// As [`World::barrier`].
    #[track_caller]
    pub fn allgather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.collective("allgather", bytes)
    }

    /// Checks that every rank gives the same items, in the same order.
    ///
    /// # Errors
    /// [`Error::Disagreement`] with the first item that differs, on every rank; as
    /// [`World::barrier`].
    #[track_caller]
    pub fn agree(&self, what: &str, items: &[(&str, String)]) -> Result<()> {
        self.agree_with(what, items, &[]).map(drop)
    }

    /// As [`World::agree`], and gathers bytes that may differ in the same exchange.
    #[track_caller]
    pub(crate) fn agree_with(
        &self,
        what: &str,
        items: &[(&str, String)],
        bytes: &[u8],
    ) -> Result<Vec<Vec<u8>>> {
        let at = Location::caller();
        let mut message = Writer::default();
        message.u64(items.len() as u64);
        for (name, value) in items {
            message.text(name).text(value);
        }
        message.bytes(bytes);
        let all = self.collective(what, &message.finish())?;

        let mut lists: Vec<Vec<(String, String)>> = Vec::with_capacity(all.len());
        let mut extra = Vec::with_capacity(all.len());
        for message in &all {
            let mut r = Reader::new("agreement", message);
            let mut list = Vec::new();
            for _ in 0..r.u64()? {
                list.push((r.text()?, r.text()?));
            }
            extra.push(r.bytes()?.to_vec());
            lists.push(list);
        }
        let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
        for i in 0..longest {
            let item = |list: &Vec<(String, String)>| list.get(i).cloned();
            let first = item(&lists[0]);
            if lists.iter().all(|l| item(l) == first) {
                continue;
            }
            let names: Vec<Option<String>> = lists.iter().map(|l| item(l).map(|x| x.0)).collect();
            let same_name = names.iter().all(|n| *n == names[0]);
            let text = |list: &Vec<(String, String)>| match item(list) {
                None => "nothing".into(),
                Some((_, value)) if same_name => value,
                Some((name, value)) => format!("{name} {value}"),
            };
            let values: Vec<String> = lists.iter().map(text).collect();
            let name = names.into_iter().flatten().next().filter(|_| same_name);
            return Err(Error::Disagreement {
                what: format!("{what} at {at}"),
                item: name.unwrap_or_else(|| format!("item {i}")),
                ranks: odd_ranks(&values),
                values,
            });
        }
        Ok(extra)
    }

    /// Lets every rank know whether all could do their part: collective. A rank that could not gets
    /// its own error back, the others are told.
    ///
    /// # Errors
    /// [`Error::PeerFailed`]; this rank's error; as [`World::barrier`].
    #[track_caller]
    pub fn all_ok<T>(&self, what: &str, mine: Result<T>) -> Result<T> {
        let message = match &mine {
            Ok(_) => Vec::new(),
            Err(e) => Writer::default().text(&e.to_string()).finish(),
        };
        let all = self.collective(what, &message);
        let value = mine?;
        for (rank, message) in all?.iter().enumerate() {
            if !message.is_empty() {
                let message = Reader::new("outcome", message).text()?;
                return Err(Error::PeerFailed { rank, what: what.into(), message });
            }
        }
        Ok(value)
    }

    /// The world of the ranks that give the same `color`, in the order of `key`, then of their rank
    /// here. Ranks without a color get none. Split worlds are closed before the world they come
    /// from.
    ///
    /// # Errors
    /// As [`World::barrier`].
    #[track_caller]
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<World>> {
        let at = Location::caller();
        let mut m = Writer::default();
        m.u64(color.map_or(u64::MAX, u64::from)).u64(key as u64).u64(self.node() as u64);
        let all = self.collective("split", &m.finish())?;
        let mut groups: BTreeMap<u64, Vec<(i64, usize)>> = BTreeMap::new();
        let mut nodes = Vec::new();
        for (rank, message) in all.iter().enumerate() {
            let mut r = Reader::new("split", message);
            let (color, key, node) = (r.u64()?, r.u64()? as i64, r.u64()?);
            nodes.push(node);
            if color != u64::MAX {
                groups.entry(color).or_default().push((key, rank));
            }
        }
        let mut members = Vec::new();
        let mut id = 0;
        if let Some(color) = color {
            let mut group = groups.remove(&u64::from(color)).unwrap_or_default();
            group.sort_unstable();
            members = group.into_iter().map(|(_, rank)| rank).collect();
            id = color;
        }
        let sequence = lock(&self.inner.sequence);
        let group = hash(&[&sequence.to_le_bytes(), &id.to_le_bytes()]) as u64;
        let step = self.step("split", at);
        let Some(bootstrap) = self.inner.bootstrap.split(&members, group, &step)? else {
            return Ok(None);
        };
        drop(sequence);
        let here = |&&m: &&usize| nodes[m] == self.node() as u64;
        let before = |&&m: &&usize| m != self.rank();
        let place = Place {
            node: self.node(),
            local_rank: members.iter().take_while(before).filter(here).count(),
            local_size: members.iter().filter(here).count(),
        };
        let settings = self.inner.settings.clone();
        Ok(Some(World::new(bootstrap, settings, place, Some(self.clone()))))
    }

    /// Gives every rank duplicates of the descriptors of every rank, by rank. Their numbers may
    /// differ between ranks.
    ///
    /// # Errors
    /// As [`World::barrier`]; [`Error::Unsupported`] where ranks are not on one host.
    #[track_caller]
    pub fn share_descriptors(&self, descriptors: Vec<OwnedFd>) -> Result<Vec<Vec<OwnedFd>>> {
        let step = self.step("descriptors", Location::caller());
        self.collective("descriptors", &[])?;
        let _sequence = lock(&self.inner.sequence);
        self.inner.bootstrap.share_descriptors(descriptors, &step)
    }

    /// Gives every rank the object of every rank, by rank.
    ///
    /// # Errors
    /// As [`World::barrier`]; [`Error::Unsupported`] unless [`World::same_process`].
    #[track_caller]
    pub fn share_objects(&self, object: Object) -> Result<Vec<Object>> {
        let step = self.step("objects", Location::caller());
        self.collective("objects", &[])?;
        let _sequence = lock(&self.inner.sequence);
        self.inner.bootstrap.share_objects(object, &step)
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

    /// Tells the peers that this rank cannot go on: to them it is lost. Not collective.
    pub fn abort(&self) {
        self.leave(false);
    }

    fn leave(&self, clean: bool) {
        self.inner.leave(clean);
    }

    pub(crate) fn step(&self, kind: &str, at: &Location<'_>) -> Step {
        Step {
            what: format!("{kind} at {at}"),
            deadline: Instant::now() + self.inner.settings.host_deadline(),
        }
    }

    /// One exchange with its tag checked.
    #[track_caller]
    pub(crate) fn collective(&self, kind: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let at = Location::caller();
        if *lock(&self.inner.closed) {
            return Err(Error::Closed { what: "the world" });
        }
        let mut sequence = lock(&self.inner.sequence);
        *sequence += 1;
        let tag = format!("{kind} at {at} (exchange {sequence})");
        let message = Writer::default().text(&tag).bytes(bytes).finish();
        let all = self.inner.bootstrap.allgather(&message, &self.step(kind, at))?;
        let mut tags = Vec::with_capacity(all.len());
        let mut contents = Vec::with_capacity(all.len());
        for message in &all {
            let mut r = Reader::new("exchange", message);
            tags.push(r.text()?);
            contents.push(r.bytes()?.to_vec());
        }
        if tags.iter().any(|t| *t != tag) {
            return Err(Error::Mismatch { ranks: odd_ranks(&tags), calls: tags });
        }
        Ok(contents)
    }

    /// Counts a heap as open, and has its waiting kernels told when a peer is lost.
    pub(crate) fn register(&self, control: &Arc<Control>) -> Registration {
        self.inner.heaps.fetch_add(1, Ordering::Relaxed);
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
    fn leave(&self, clean: bool) {
        if std::mem::replace(&mut *lock(&self.closed), true) {
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
        if !*lock(&self.closed) && self.bootstrap.size() > 1 {
            let rank = self.bootstrap.rank();
            tracing::warn!(rank, "a world was dropped without close: its peers lose this rank");
        }
        self.leave(false);
    }
}

/// The state behind these locks is consistent between any two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn check_size(what: &str, size: usize) -> Result<()> {
    if (1..=MAX_RANKS).contains(&size) {
        return Ok(());
    }
    Err(Error::invalid(what, size, format!("1 to {MAX_RANKS}")))
}

pub(crate) fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).into()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "no text".into()
    }
}
