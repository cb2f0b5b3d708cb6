//! Limits of the system that errors name.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Whether this process or the system can have no more descriptors.
pub(crate) fn is_full(error: &std::io::Error) -> bool {
    let code = Errno::from_io_error(error);
    code.is_some_and(|c| [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].contains(&c))
}

/// The text of an error of the system, with what to do where that is known.
pub(crate) fn explain(error: &std::io::Error) -> String {
    use std::io::ErrorKind;
    let advice = match (Errno::from_io_error(error), error.kind()) {
        (Some(Errno::MFILE), _) => {
            return format!("{error}; the limit is {}: raise it with `ulimit -n`", open_files());
        }
        (Some(Errno::NFILE), _) => "; the system has too many open files: close some",
        (_, ErrorKind::PermissionDenied) => "; see who owns it, and its permissions",
        (_, ErrorKind::OutOfMemory) => "; free memory, or open a smaller heap",
        (_, ErrorKind::StorageFull) => "; free space there",
        _ => "",
    };
    format!("{error}{advice}")
}

/// The limit of open files of this process.
pub(crate) fn open_files() -> String {
    getrlimit(Resource::Nofile).current.map_or("none".into(), |limit| limit.to_string())
}
