//! Operating-system limits that error messages mention.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Whether an error means that the process or the system has run out of file descriptors or kernel
/// memory.
pub(crate) fn is_full(error: &std::io::Error) -> bool {
    let code = Errno::from_io_error(error);
    code.is_some_and(|c| [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].contains(&c))
}

/// Text of a system error; adds the limit of open files if that limit was reached.
pub(crate) fn explain(error: &std::io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => format!("{error}; the limit is {}", open_files()),
        _ => error.to_string(),
    }
}

/// Text of this process's limit of open files.
pub(crate) fn open_files() -> String {
    getrlimit(Resource::Nofile).current.map_or("none".into(), |limit| limit.to_string())
}
