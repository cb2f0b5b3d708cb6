//! Private folders of jobs, and removal of folders whose launcher is dead.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

/// Name of the file in a job's folder that the launcher keeps locked while it lives. The file
/// contains the folder's path, so that a file of another program, or a copy of the folder, does not
/// count as a job's folder.
const LOCK: &str = "launcher";

/// Creates and locks the file [`LOCK`] in `folder`; a locked file means that the job's launcher
/// lives.
pub(super) fn hold(folder: &Path) -> io::Result<File> {
    // The file gets its final name only after it is locked, because an unlocked file of that name
    // means a dead launcher.
    let part = folder.join("launcher.part");
    let mut file = File::create(&part)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    file.write_all(folder.as_os_str().as_bytes())?;
    fs::rename(part, folder.join(LOCK))?;
    Ok(file)
}

/// Removes the folders of jobs whose launcher and keeper (the shell that removes the folder when
/// the launcher ends) were both killed. It searches the parent folder of `own`, the folder of the
/// current job.
pub(super) fn sweep(own: &Path) {
    let entries = own.parent().and_then(|temporary| fs::read_dir(temporary).ok());
    for entry in entries.into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("iris-") && is_left(&entry.path()) {
            // Errors are ignored, because another launcher may have removed the folder first.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Whether `folder` was made by a launcher of this user that has ended.
fn is_left(folder: &Path) -> bool {
    let (user, lock) = (rustix::process::geteuid().as_raw(), folder.join(LOCK));
    // Other users cannot put links or pipes into a folder with this owner and mode.
    let ours = |at: &fs::Metadata| at.is_dir() && at.uid() == user && at.mode() & 0o7777 == 0o700;
    fs::symlink_metadata(folder).is_ok_and(|at| ours(&at))
        && fs::symlink_metadata(&lock).is_ok_and(|at| at.is_file())
        && fs::read(&lock).is_ok_and(|path| path == folder.as_os_str().as_bytes())
        && File::open(&lock)
            .is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockShared).is_ok())
}
