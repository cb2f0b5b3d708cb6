//! Helpers for all files of the crate, which depend on no other module than the error type.

use std::any::Any;
use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::error::{Error, Result};
use crate::system::Limit;

/// Locks a mutex even if it is poisoned, because the data under each lock of the crate is
/// consistent between any two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Name by which the system knows this host.
pub(crate) fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).into()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "no text".into()
    }
}

/// Checks that this process may create a file of `bytes` bytes. If a file exceeded the limit on
/// file sizes, the system would kill the process by SIGXFSZ.
///
/// # Errors
/// [`Error::Invalid`] with the limit and how to raise it.
pub fn check_file_size(name: &str, bytes: u64) -> Result<()> {
    match Limit::FileSize.value() {
        Some(limit) if bytes > limit => Err(Error::invalid(
            format!("size of {name}"),
            format!("{bytes} bytes"),
            format!("at most {limit}, the limit on file sizes (raise it with ulimit -f)"),
        )),
        _ => Ok(()),
    }
}

/// Starts a thread with this name.
///
/// # Errors
/// [`Error::System`].
pub(crate) fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    let name = name.into();
    let builder = std::thread::Builder::new().name(name.clone());
    builder.spawn(run).map_err(|error| thread_error(&name, error))
}

/// Error of a thread that the system has not started.
pub(crate) fn thread_error(name: &str, error: std::io::Error) -> Error {
    let error = match error.kind() {
        std::io::ErrorKind::WouldBlock => std::io::Error::other(format!(
            "{error}; the system allows no more threads or memory: see `ulimit -u`, `ulimit -v`, and pids.max of the \
             control group"
        )),
        _ => error,
    };
    Error::system(format!("starting thread {name}"), error)
}

pub(crate) fn unsupported(what: &str, why: &str) -> Error {
    Error::Unsupported { what: what.into(), why: why.into() }
}

thread_local! {
    /// Whether this thread runs work that was enqueued on streams.
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as a worker, which runs enqueued work.
pub(crate) fn mark_worker() {
    IS_WORKER.set(true);
}

/// Fails if called from enqueued work. Otherwise a function that waits for streams could wait for
/// the end of the work that called it. So could a function that takes a lock which other threads
/// hold while they wait for streams.
pub(crate) fn check_may_wait(what: &str) -> Result<()> {
    match IS_WORKER.get() {
        true => Err(Error::WaitFromWork { what: what.into() }),
        false => Ok(()),
    }
}
