//! What every file may need, and which needs none but the error.

use std::any::Any;
use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};

/// The state behind these locks is consistent between any two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Checks that a file may have so many bytes: beyond the limit the system ends the process by SIGXFSZ.
///
/// # Errors
/// [`Error::Invalid`] with the limit and how to raise it.
pub fn check_file_size(name: &str, bytes: u64) -> Result<()> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize).current;
    match limit {
        Some(limit) if bytes > limit => Err(Error::invalid(
            format!("size of {name}"),
            format!("{bytes} bytes"),
            format!("at most {limit}, the limit on file sizes (raise it with ulimit -f)"),
        )),
        _ => Ok(()),
    }
}

pub(crate) fn unsupported(what: &str, why: &str) -> Error {
    Error::Unsupported { what: what.into(), why: why.into() }
}

thread_local! {
    /// Whether this thread does what was enqueued on streams, and nothing else.
    static WORKS: Cell<bool> = const { Cell::new(false) };
}

/// From here on this thread does enqueued work.
pub(crate) fn works_from_now_on() {
    WORKS.set(true);
}

/// That this is no enqueued work. What waits for streams, or holds what others hold while they wait
/// for streams, may else wait for itself: for good.
pub(crate) fn check_may_wait(what: &str) -> Result<()> {
    match WORKS.get() {
        true => Err(Error::WaitFromWork { what: what.into() }),
        false => Ok(()),
    }
}
