//! Notice on stderr about slow compilations.

use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// Runs `work`; if it takes longer than `after`, calls `say` once meanwhile.
pub(super) fn telling<T>(
    after: Duration,
    say: impl FnOnce() + Send,
    work: impl FnOnce() -> T,
) -> T {
    thread::scope(|scope| {
        // Channel that is closed when the work ends, also by a panic.
        let (_working, over) = channel::<()>();
        let watch = move || {
            if over.recv_timeout(after) == Err(RecvTimeoutError::Timeout) {
                say();
            }
        };
        // No notice if no thread can be started.
        let _ = thread::Builder::new().name("iris-slow".into()).spawn_scoped(scope, watch);
        work()
    })
}

/// Writes a line to stderr, ignoring errors.
pub(super) fn to_stderr(line: &str) {
    // A single write, so that lines of several ranks do not mix.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    #[test]
    fn something_is_said_while_work_takes_long() {
        let (said, heard) = mpsc::channel();
        let say = move || said.send(()).expect("somebody listens");
        let work = || heard.recv_timeout(Duration::from_secs(20)).is_ok();
        assert!(telling(Duration::from_millis(1), say, work), "nothing was said during the work");
    }

    #[test]
    fn nothing_is_said_of_what_is_quick_or_panics() {
        let count = AtomicUsize::new(0);
        let say = || {
            count.fetch_add(1, Ordering::Relaxed);
        };
        let long = Duration::from_secs(3600);
        assert_eq!(telling(long, say, || 7), 7);
        let panicked = std::panic::catch_unwind(|| telling(long, || (), || panic!("on purpose")));
        assert!(panicked.is_err());
        assert_eq!(count.load(Ordering::Relaxed), 0);
    }
}
