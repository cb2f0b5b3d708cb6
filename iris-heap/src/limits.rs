//! Limits of the system that errors name.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Whether this process or the system can have no more descriptors.
pub(crate) fn is_full(error: &std::io::Error) -> bool {
    let code = Errno::from_io_error(error);
    code.is_some_and(|c| [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].contains(&c))
}

/// The text of an error of the system, with the limit of open files if that is met.
pub(crate) fn explain(error: &std::io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => format!("{error}; the limit is {}", open_files()),
        _ => error.to_string(),
    }
}

/// The limit of open files of this process.
pub(crate) fn open_files() -> String {
    getrlimit(Resource::Nofile).current.map_or("none".into(), |limit| limit.to_string())
}
