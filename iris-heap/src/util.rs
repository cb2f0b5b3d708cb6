//! Helpers for all files of the crate, which depend on no other module than the error type.

use std::any::Any;
use std::cell::Cell;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::error::{Error, Result};
use crate::system::Limit;

/// Locks a mutex even if it is poisoned, because every lock of this crate protects data that a
/// panic cannot leave inconsistent.
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

/// Opens a file that the user has named. Pipes and devices are refused, because reading them could
/// block or never end.
///
/// # Errors
/// The system's error; `InvalidInput` for anything but a regular file.
pub(crate) fn open_regular(path: &Path) -> std::io::Result<File> {
    // Without this flag, opening a pipe would block until a writer opens it.
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(std::io::Error::new(
            ErrorKind::InvalidInput,
            "no regular file: expected one, and no folder, pipe or device",
        )),
    }
}

/// Reads a text file that the user has named, of at most 64 MiB.
///
/// # Errors
/// The system's error; `InvalidInput` for anything but a regular file; `InvalidData` for a longer
/// file, and for one that is not UTF-8.
pub fn read_file(path: &Path) -> std::io::Result<String> {
    let (file, mut text) = (open_regular(path)?, String::new());
    let length = file.take(LONGEST_FILE + 1).read_to_string(&mut text)?;
    match length as u64 <= LONGEST_FILE {
        true => Ok(text),
        false => Err(std::io::Error::new(
            ErrorKind::InvalidData,
            format!("more than {LONGEST_FILE} bytes: expected at most that many"),
        )),
    }
}

/// Largest size in bytes of a file that the user names, such as a tuning file or a benchmark's record.
const LONGEST_FILE: u64 = 64 << 20;

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

/// Id of the process that made an object. A forked child of that process has a copy of the object's
/// locks, sockets and mapped memory, but none of the threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Maker(u32);

impl Maker {
    /// Returns the id of this process, for an object that this process makes.
    pub(crate) fn this() -> Maker {
        Maker(std::process::id())
    }

    /// Checks that this process made the object and is not a forked child of that process. Functions
    /// make this check before they wait, or write memory that other ranks have mapped.
    pub(crate) fn check(self, what: &str) -> Result<()> {
        let (Maker(own), this) = (self, std::process::id());
        if own == this {
            return Ok(());
        }
        let why = format!(
            "this process, {this}, was forked from process {own}, which is the rank: use it there, or \
             start a program anew with exec"
        );
        Err(unsupported(what, &why))
    }
}

thread_local! {
    /// Whether this thread runs work that was enqueued on streams.
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as a worker, which runs enqueued work.
pub(crate) fn mark_worker() {
    IS_WORKER.set(true);
}

/// Fails if called from enqueued work. Functions that wait for streams call this first, because
/// they could otherwise wait for the end of the work that called them. Functions that take a lock
/// call it too, if other threads hold that lock while they wait for streams.
pub(crate) fn check_may_wait(what: &str) -> Result<()> {
    match IS_WORKER.get() {
        true => Err(Error::WaitFromWork { what: what.into() }),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_a_device_and_an_endless_file_are_refused() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        mknodat(CWD, path("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let refused = |path: &Path| read_file(path).unwrap_err().to_string();
        for path in [&path("pipe"), Path::new("/dev/zero"), folder.path()] {
            assert!(refused(path).contains("no regular file"), "{}", path.display());
        }
        let long = File::create(path("long")).unwrap();
        long.set_len(LONGEST_FILE + 1).unwrap();
        assert!(refused(&path("long")).contains("at most"), "one byte too many");
        std::fs::write(path("text"), "text").unwrap();
        assert_eq!(read_file(&path("text")).unwrap(), "text");
    }
}
