//! Worlds whose ranks are threads of this process, and functions that run a program on all of them.

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, Thread};
use std::time::Duration;

use super::collective::END_OF_RANK;
use super::{Place, World, check_size};
use crate::bootstrap::notice::notice;
use crate::bootstrap::threads::Threads;
use crate::env::Settings;
use crate::error::{Error, Result, list_ranks};
use crate::root_error::Distance;
use crate::util::{lock, panic_message, thread_error};

/// Key by which the root error is chosen among the errors of ranks, the least first: the error's
/// distance from the root cause, then the number of ranks that had failed before.
type Key = (Distance, usize);

/// Time after the first failure at which the user is told for which ranks the call still waits.
const PATIENCE: Duration = Duration::from_secs(2);

/// End of a rank's thread.
struct Ended {
    /// Key of the rank's failure; `None` if the rank succeeded.
    failed: Option<Key>,
    /// Error of the thread if the rank's function did not return: it panicked, or was not started.
    broken: Option<Error>,
}

/// Ranks whose functions have not returned.
struct Running {
    ranks: Mutex<Vec<usize>>,
    ended: Condvar,
}

impl Running {
    fn of(worlds: &[World]) -> Running {
        let ranks = worlds.iter().map(World::rank).collect();
        Running { ranks: Mutex::new(ranks), ended: Condvar::new() }
    }

    fn end(&self, rank: usize) {
        lock(&self.ranks).retain(|&running| running != rank);
        self.ended.notify_all();
    }

    /// List of the ranks that still run after `patience`; `None` if all have ended before.
    fn left_after(&self, patience: Duration) -> Option<String> {
        let left = self.ended.wait_timeout_while(lock(&self.ranks), patience, |it| !it.is_empty());
        let (left, _) = left.unwrap_or_else(PoisonError::into_inner);
        (!left.is_empty()).then(|| list_ranks(&left))
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
    /// the other ranks its error at once, by [`World::abort_with`]. Steps with other ranks then fail,
    /// but a function that is stuck elsewhere is not interrupted: this call returns when `f` has
    /// returned on all threads. If that takes longer than two seconds after a failure, the ranks that
    /// still run and the error are shown to the user (by `tracing`, or else on stderr).
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
        let mut first: Option<(Key, E)> = None;
        let mut values = Vec::with_capacity(worlds.len());
        for result in run_keyed(worlds, f) {
            match result {
                Ok(value) => values.push(value),
                Err(error) if first.as_ref().is_none_or(|first| error.0 < first.0) => {
                    first = Some(error);
                }
                Err(_) => {}
            }
        }
        first.map_or(Ok(values), |(_, error)| Err(error))
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
        run_keyed(worlds, f).into_iter().map(|result| result.map_err(|(_, error)| error)).collect()
    }
}

/// Runs `f` on one thread per world, and returns the results, errors with their keys.
fn run_keyed<T, E, F>(worlds: Vec<World>, f: F) -> Vec<Result<T, (Key, E)>>
where
    T: Send,
    E: Send + From<Error> + Display,
    F: Fn(World) -> Result<T, E> + Sync,
{
    let results: Vec<_> = worlds.iter().map(|_| Mutex::new(None)).collect();
    let run = |rank: usize, world: World| {
        let result = f(world);
        // The alternate form of an `anyhow::Error` has all of its causes.
        let error = result.as_ref().err().map(|error| format!("{error:#}"));
        *results[rank].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        error
    };
    let ended = run_ranks(worlds, &run);
    let mut all = Vec::with_capacity(ended.len());
    for (result, Ended { failed, broken }) in results.into_iter().zip(ended) {
        let key = failed.unwrap_or((Distance::Root, usize::MAX));
        let returned = result.into_inner().unwrap_or_else(PoisonError::into_inner);
        all.push(match (broken, returned) {
            (Some(error), _) => Err((key, error.into())),
            (None, Some(result)) => result.map_err(|error| (key, error)),
            (None, None) => unreachable!("the function of a rank returns or its thread is broken"),
        });
    }
    all
}

/// Runs `run` on one thread per world, with the number of the world in `worlds`; `run` returns the
/// text of an error. This function is not generic, because programs call [`World::run_threads`] in
/// many places, and each would get its own copy.
fn run_ranks(
    worlds: Vec<World>,
    run: &(dyn Fn(usize, World) -> Option<String> + Sync),
) -> Vec<Ended> {
    let failures = &AtomicUsize::new(0);
    let running = Running::of(&worlds);
    let rank_main = |number: usize, world: World| {
        let me = world.rank();
        let told = world.inner.returned_errors.clone();
        let returned = catch_unwind(AssertUnwindSafe(|| run(number, world.clone())));
        let broken = returned.as_ref().err().map(|panic| panicked(&thread::current(), &**panic));
        let text = match (&broken, returned) {
            (Some(error), _) => Some(error.to_string()),
            (None, returned) => returned.unwrap_or_default(),
        };
        running.end(me);
        let failed = text.map(|text| {
            let key = (told.distance(), failures.fetch_add(1, Ordering::Relaxed));
            world.abort_with(&text);
            if key.1 == 0
                && let Some(others) = running.left_after(PATIENCE)
            {
                notice(format_args!(
                    "rank {me} has failed, but its error is returned only when rank {others} ends, too: {text}"
                ));
            }
            key
        });
        if failed.is_none() {
            // An error of `close` is ignored here: it means that another rank has failed, and that
            // rank reports the error.
            drop(world.close_in(END_OF_RANK));
        }
        Ended { failed, broken }
    };
    thread::scope(|scope| {
        let start = |(number, world): (usize, World)| {
            let rank = world.rank();
            let spare = world.clone();
            let name = format!("iris-rank-{rank}");
            let builder = thread::Builder::new().name(name.clone());
            let thread = builder.spawn_scoped(scope, move || rank_main(number, world));
            thread.map_err(|e| {
                let error = thread_error(&name, e);
                // Ranks that have started wait for the rank whose thread failed to start. So they
                // are told the error at once, through the handle `spare` of that rank.
                spare.abort_with(&error);
                running.end(rank);
                error
            })
        };
        let started: Vec<_> = worlds.into_iter().enumerate().map(start).collect();
        let finish = |started: Result<thread::ScopedJoinHandle<'_, Ended>>| {
            let joined = started.and_then(|handle| {
                let thread = handle.thread().clone();
                handle.join().map_err(|panic| panicked(&thread, &*panic))
            });
            joined.unwrap_or_else(|error| Ended { failed: None, broken: Some(error) })
        };
        started.into_iter().map(finish).collect()
    })
}

fn panicked(thread: &Thread, panic: &(dyn Any + Send)) -> Error {
    let name = thread.name().unwrap_or_default().to_string();
    Error::Panicked { name, group: None, message: panic_message(panic) }
}
