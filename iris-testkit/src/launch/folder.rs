//! Folders of jobs: which of them a living launcher holds.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

/// The file of a job's folder whose lock the launcher holds.
const LOCK: &str = "launcher";

/// Makes and locks the file by which others see that a job's launcher lives.
pub(super) fn hold(folder: &Path) -> io::Result<File> {
    // Under another name until it is locked: without a lock it is a dead launcher's.
    let part = folder.join("launcher.part");
    let file = File::create(&part)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    fs::rename(part, folder.join(LOCK))?;
    Ok(file)
}

/// Removes the folders that launchers have left which were killed together with their keepers.
pub(super) fn sweep(own: &Path) {
    let entries = own.parent().and_then(|temporary| fs::read_dir(temporary).ok());
    for entry in entries.into_iter().flatten().flatten() {
        let left = |file: File| flock(&file, FlockOperation::NonBlockingLockShared).is_ok();
        if entry.file_name().to_string_lossy().starts_with("iris-")
            && File::open(entry.path().join(LOCK)).is_ok_and(left)
        {
            // Another user's, or another launcher was faster.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
