//! Worlds whose ranks are threads of this process, and functions that run a program on all of them.

use std::any::Any;
use std::fmt::{self, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Thread};

use super::collective::END_OF_RANK;
use super::{Place, World, check_size};
use crate::bootstrap::threads::Threads;
use crate::env::Settings;
use crate::error::{Error, Result};
use crate::root_error::Distance;
use crate::util::{panic_message, thread_error};

/// Error of a rank, with the key by which the root error is chosen: the error's distance from the
/// root cause, then the number of ranks that had failed before.
struct Placed<E>((Distance, usize), E);

impl<E: Display> Display for Placed<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.1.fmt(f)
    }
}

impl<E: From<Error>> From<Error> for Placed<E> {
    fn from(error: Error) -> Self {
        Placed((Distance::Root, usize::MAX), error.into())
    }
}

impl World {
    /// Makes a world of `size` ranks that are threads of this process; returns one handle per rank,
    /// to be moved to a thread of its own.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `size` is 0 or above [`MAX_WORLD`](crate::MAX_WORLD); [`Error::Env`].
    pub fn threads(size: usize) -> Result<Vec<World>> {
        World::threads_with(size, &Settings::from_env()?)
    }

    /// Does [`World::threads`] with the program's settings instead of the environment's.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `size` is 0 or above [`MAX_WORLD`](crate::MAX_WORLD); errors of
    /// [`Settings::check`].
    pub fn threads_with(size: usize, settings: &Settings) -> Result<Vec<World>> {
        check_size("size of the world", size)?;
        settings.check()?;
        let world = |(rank, t): (usize, Threads)| {
            let place = Place { node: 0, local_rank: rank, local_size: size };
            World::new(Arc::new(t), settings.clone(), place, None)
        };
        Ok(Threads::all(size).into_iter().enumerate().map(world).collect())
    }

    /// Runs `f` on `size` threads, one per rank, and returns the results by rank.
    ///
    /// A rank that returns `Ok` closes its world if `f` has not. A rank that fails or panics tells
    /// the other ranks its error at once, by [`World::abort_with`].
    ///
    /// # Errors
    /// The root error: the first failure, ignoring ranks that failed only after they were told of
    /// another rank's failure. A panic is [`Error::Panicked`].
    pub fn run_threads<T, E, F>(size: usize, f: F) -> Result<Vec<T>, E>
    where
        T: Send,
        E: Send + From<Error> + Display,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        World::run_to_root(World::threads(size)?, f)
    }

    /// Runs `f` on one thread per world, and returns the results or the root error, like
    /// [`World::run_threads`].
    pub(super) fn run_to_root<T, E, F>(worlds: Vec<World>, f: F) -> Result<Vec<T>, E>
    where
        T: Send,
        E: Send + From<Error> + Display,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        let size = worlds.len();
        let failures = AtomicUsize::new(0);
        let placed = |world: World| {
            let told = world.inner.returned_errors.clone();
            let place = || (told.distance(), failures.fetch_add(1, Ordering::Relaxed));
            match catch_unwind(AssertUnwindSafe(|| f(world))) {
                Ok(Ok(value)) => Ok(value),
                Ok(Err(e)) => Err(Placed(place(), e)),
                Err(panic) => Err(Placed(place(), panicked(&thread::current(), &*panic).into())),
            }
        };
        let results = World::run_worlds(worlds, placed);
        let mut first: Option<Placed<E>> = None;
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

    /// Does [`World::run_threads`], but returns the result of every rank instead of only the root
    /// error.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `size` is 0 or above [`MAX_WORLD`](crate::MAX_WORLD).
    pub fn run_threads_each<T, E, F>(
        size: usize,
        settings: &Settings,
        f: F,
    ) -> Result<Vec<Result<T, E>>>
    where
        T: Send,
        E: Send + From<Error> + Display,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        Ok(World::run_worlds(World::threads_with(size, settings)?, f))
    }

    /// Runs `f` on one thread per world, and returns the result of every rank, like
    /// [`World::run_threads_each`].
    pub(super) fn run_worlds<T, E, F>(worlds: Vec<World>, f: F) -> Vec<Result<T, E>>
    where
        T: Send,
        E: Send + From<Error> + Display,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        let f = &f;
        let rank_main = move |world: World| {
            let result = catch_unwind(AssertUnwindSafe(|| f(world.clone())))
                .unwrap_or_else(|panic| Err(panicked(&thread::current(), &*panic).into()));
            match &result {
                // An error of `close` is ignored here: it means that another rank has failed, and
                // that rank reports the error.
                Ok(_) => drop(world.close_in(END_OF_RANK)),
                // The alternate form of an `anyhow::Error` has all of its causes.
                Err(error) => world.abort_with(format_args!("{error:#}")),
            }
            result
        };
        thread::scope(|scope| {
            let start = |world: World| {
                let rank = world.rank();
                let spare = world.clone();
                let name = format!("iris-rank-{rank}");
                let builder = thread::Builder::new().name(name.clone());
                let thread = builder.spawn_scoped(scope, move || rank_main(world));
                thread.map_err(|e| {
                    let error = thread_error(&name, e);
                    // Ranks that have started wait for the rank whose thread failed to start, so
                    // this rank tells them the error at once.
                    spare.abort_with(&error);
                    error
                })
            };
            let started: Vec<_> = worlds.into_iter().map(start).collect();
            let finish = |started: Result<thread::ScopedJoinHandle<'_, _>>| {
                let handle = started?;
                let thread = handle.thread().clone();
                handle.join().unwrap_or_else(|panic| Err(panicked(&thread, &*panic).into()))
            };
            started.into_iter().map(finish).collect()
        })
    }
}

fn panicked(thread: &Thread, panic: &(dyn Any + Send)) -> Error {
    let name = thread.name().unwrap_or_default().to_string();
    Error::Panicked { name, group: None, message: panic_message(panic) }
}
