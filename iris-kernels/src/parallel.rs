//! Parallel execution of independent jobs on the cores of the host.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Stack size of a compiling thread in bytes, equal to that of a program's main thread.
const STACK: usize = 8 << 20;

/// Runs `work` for each job, in the order of `jobs`, on up to `threads` threads, the calling thread
/// included. After the first error no further job is started.
///
/// # Errors
/// The first error of a job. It is no error if a thread cannot be started; the other threads then
/// run its jobs.
pub(crate) fn for_each<J: Sync, E: Send>(
    jobs: &[J],
    threads: usize,
    work: impl Fn(&J) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let next = AtomicUsize::new(0);
    let first = Mutex::new(None);
    let take_turns = || {
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = work(job) {
                first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                next.store(jobs.len(), Ordering::Relaxed);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(jobs.len()) {
            let builder = thread::Builder::new().name("iris-compile".into()).stack_size(STACK);
            if builder.spawn_scoped(scope, take_turns).is_err() {
                break;
            }
        }
        take_turns();
    });
    first.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Condvar;
    use std::time::Duration;

    #[test]
    fn every_job_is_done_once() {
        let jobs: Vec<usize> = (0..100).collect();
        for threads in [1, 3, 200] {
            let done: Vec<_> = jobs.iter().map(|_| AtomicUsize::new(0)).collect();
            let count = |&job: &usize| {
                done[job].fetch_add(1, Ordering::Relaxed);
                Ok::<_, ()>(())
            };
            for_each(&jobs, threads, count).expect("no error");
            assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{threads}");
        }
    }

    #[test]
    fn jobs_run_side_by_side() {
        // Each job waits until all four jobs have begun, so the test ends only if the jobs run at
        // the same time.
        let (begun, change) = (Mutex::new(0), Condvar::new());
        let wait_for_all = |_: &usize| {
            let mut count = begun.lock().expect("nobody panicked");
            *count += 1;
            change.notify_all();
            let all = change.wait_timeout_while(count, Duration::from_secs(20), |count| *count < 4);
            match all.expect("nobody panicked").1.timed_out() {
                true => Err("alone"),
                false => Ok(()),
            }
        };
        assert_eq!(for_each(&[0, 1, 2, 3], 4, wait_for_all), Ok(()));
    }

    #[test]
    fn the_first_error_is_returned_and_ends_the_loop() {
        let done = AtomicUsize::new(0);
        let jobs: Vec<usize> = (0..1000).collect();
        let work = |&job: &usize| {
            done.fetch_add(1, Ordering::Relaxed);
            if job == 5 { Err(job) } else { Ok(()) }
        };
        assert_eq!(for_each(&jobs, 1, work), Err(5));
        assert_eq!(done.load(Ordering::Relaxed), 6);
    }
}
