//! Lock files by which processes that are not connected yet detect whether other processes are
//! alive, and read why a process gave up.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use super::held::Held;

/// File that this process keeps locked until its end.
#[derive(Debug)]
pub(super) struct Presence {
    path: PathBuf,
    file: Held<File>,
}

impl Presence {
    pub(super) fn show(path: PathBuf) -> std::io::Result<Presence> {
        // The file gets its final name only after it is locked, because an unlocked file means that
        // its rank has ended. The name contains the rank, because processes in different PID
        // namespaces may have the same id.
        let rank = path.extension().unwrap_or_default().to_string_lossy();
        let part = path.with_extension(format!("part-{rank}-{}", std::process::id()));
        let file = Held::new(|| File::create(&part))?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        fs::rename(&part, &path)?;
        Ok(Presence { path, file })
    }

    /// Whether another process has removed the file.
    pub(super) fn is_removed(&self) -> bool {
        !self.path.exists()
    }

    /// Removes the file, because other processes need not watch this process any longer.
    pub(super) fn remove(self) {
        if is_at(&self.file, &self.path) {
            let _ = fs::remove_file(&self.path);
        }
    }

    /// Writes `reason` into the file and unlocks it, so that this rank counts as ended, with that
    /// reason, even if this process continues.
    pub(super) fn leave(&self, reason: &[u8]) {
        if let Err(error) = (&*self.file).write_all(reason) {
            tracing::debug!(%error, "the reason of an error is not told to ranks that wait");
        }
        let _ = flock(&self.file, FlockOperation::Unlock);
    }

    /// Whether the process that created the file at `path` is alive; `None` if there is no such
    /// file.
    pub(super) fn is_alive(path: &Path) -> Option<bool> {
        let file = File::open(path).ok()?;
        let held = flock(&file, FlockOperation::NonBlockingLockShared).is_err();
        // The result counts only if the opened file is still at `path`, because a living process
        // may have replaced or removed it.
        (held || is_at(&file, path)).then_some(held)
    }
}

/// Whether an opened file is still at `path`, and has not been removed or replaced.
pub(super) fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(mine), Ok(there)) => (there.dev(), there.ino()) == (mine.dev(), mine.ino()),
        _ => false,
    }
}
