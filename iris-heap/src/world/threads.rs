//! Worlds whose ranks are threads of this process, and functions that run a program on all of them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::collective::END_OF_RANK;
use super::{Place, World, check_size};
use crate::bootstrap::threads::Threads;
use crate::env::Settings;
use crate::error::{Error, Result};
use crate::root::Distance;
use crate::util::{panic_message, thread_error};

/// Error of a rank, with its place among the errors of all ranks: the distance from the root cause,
/// then the number of ranks that had failed before it.
struct Placed<E>((Distance, usize), E);

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
    /// A rank that returns `Ok` closes its world if `f` has not. A rank that fails or panics is
    /// reported lost to the others at once, so that they need not wait for their deadlines.
    ///
    /// # Errors
    /// The root error: the first failure, ignoring ranks that failed only after they were told of
    /// another rank's failure. A panic is [`Error::Panicked`].
    pub fn run_threads<T, E, F>(size: usize, f: F) -> Result<Vec<T>, E>
    where
        T: Send,
        E: Send + From<Error>,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        World::run_to_root(World::threads(size)?, f)
    }

    /// Runs `f` on one thread per world, and returns the results or the root error, like
    /// [`World::run_threads`].
    pub(super) fn run_to_root<T, E, F>(worlds: Vec<World>, f: F) -> Result<Vec<T>, E>
    where
        T: Send,
        E: Send + From<Error>,
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
                Err(panic) => {
                    let name = std::thread::current().name().unwrap_or_default().to_string();
                    let message = panic_message(&*panic);
                    Err(Placed(place(), Error::Panicked { name, group: None, message }.into()))
                }
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

    /// Does [`World::run_threads`], but returns the result of every rank instead of the root error.
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
        E: Send + From<Error>,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        Ok(World::run_worlds(World::threads_with(size, settings)?, f))
    }

    /// Runs `f` on one thread per world, and returns the result of every rank, like
    /// [`World::run_threads_each`].
    pub(super) fn run_worlds<T, E, F>(worlds: Vec<World>, f: F) -> Vec<Result<T, E>>
    where
        T: Send,
        E: Send + From<Error>,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        let f = &f;
        let rank_main = move |world: World| {
            let result = catch_unwind(AssertUnwindSafe(|| f(world.clone())));
            match &result {
                // An error of `close` is ignored here: it means that another rank has failed, and
                // that rank reports the error.
                Ok(Ok(_)) => drop(world.close_in(END_OF_RANK)),
                _ => world.abort(),
            }
            result
        };
        std::thread::scope(|scope| {
            let start = |world: World| {
                let rank = world.rank();
                let spare = world.clone();
                let name = format!("iris-rank-{rank}");
                let builder = std::thread::Builder::new().name(name.clone());
                let thread = builder.spawn_scoped(scope, move || rank_main(world));
                if thread.is_err() {
                    // The ranks that have started wait for this one, and must learn it at once.
                    spare.abort();
                }
                (name, thread)
            };
            let started: Vec<_> = worlds.into_iter().map(start).collect();
            let finish = |(name, thread): (String, std::io::Result<_>)| {
                let thread: std::thread::ScopedJoinHandle<'_, _> = match thread {
                    Ok(thread) => thread,
                    Err(e) => {
                        return Err(thread_error(&name, e).into());
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
        })
    }
}
