//! Operating-system limits that error messages mention.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Whether an error means that the process or the system has run out of file descriptors or kernel
/// memory.
pub(crate) fn is_full(error: &std::io::Error) -> bool {
    let code = Errno::from_io_error(error);
    code.is_some_and(|c| [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM].contains(&c))
}

/// Text of a system error, with advice on what to do if there is any.
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

/// This process's limit of open files, as text.
pub(crate) fn open_files() -> String {
    getrlimit(Resource::Nofile).current.map_or("none".into(), |limit| limit.to_string())
}
