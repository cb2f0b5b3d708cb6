//! Private folders of jobs, and removal of folders whose launcher is dead.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

/// Name of the file in a job's folder that the launcher keeps locked while it lives.
const LOCK: &str = "launcher";

/// Creates and locks the file [`LOCK`] in `folder`; while it is locked, the job's launcher lives.
pub(super) fn hold(folder: &Path) -> io::Result<File> {
    // The file gets its name only once it is locked, because a file of this name that is not locked
    // means a dead launcher.
    let part = folder.join("launcher.part");
    let file = File::create(&part)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    fs::rename(part, folder.join(LOCK))?;
    Ok(file)
}

/// Removes the folders of jobs whose launcher and keeper were both killed. They lie beside `own`,
/// the folder of the current job.
pub(super) fn sweep(own: &Path) {
    let entries = own.parent().and_then(|temporary| fs::read_dir(temporary).ok());
    for entry in entries.into_iter().flatten().flatten() {
        let left = |file: File| flock(&file, FlockOperation::NonBlockingLockShared).is_ok();
        if entry.file_name().to_string_lossy().starts_with("iris-")
            && File::open(entry.path().join(LOCK)).is_ok_and(left)
        {
            // Errors are ignored: the folder is another user's, or another launcher removed it
            // first.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
