//! Lock files by which processes that are not connected yet detect whether other processes are
//! alive.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// File that this process keeps locked until its end; removed on drop.
#[derive(Debug)]
pub(super) struct Presence {
    path: PathBuf,
    file: File,
}

impl Presence {
    pub(super) fn show(path: PathBuf) -> std::io::Result<Presence> {
        // The file gets its final name only once it is locked, because a file without a lock means
        // that its rank has ended. The name contains the rank, because processes in different PID
        // namespaces may have the same id.
        let rank = path.extension().unwrap_or_default().to_string_lossy();
        let part = path.with_extension(format!("part-{rank}-{}", std::process::id()));
        let file = File::create(&part)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        fs::rename(&part, &path)?;
        Ok(Presence { path, file })
    }

    /// Whether the file is still there, and was not removed or replaced by another process.
    pub(super) fn is_shown(&self) -> bool {
        is_at(&self.file, &self.path)
    }

    /// Whether there is no file of this name any more.
    pub(super) fn is_removed(&self) -> bool {
        !self.path.exists()
    }

    /// Whether the process that created this file has ended.
    pub(super) fn is_over(path: &Path) -> bool {
        // The opened file must still be there, because a living process may have replaced or
        // removed it.
        File::open(path).is_ok_and(|file| !is_held(&file) && is_at(&file, path))
    }

    /// Whether a living process holds the file.
    pub(super) fn is_shown_at(path: &Path) -> bool {
        File::open(path).is_ok_and(|file| is_held(&file))
    }
}

/// Whether a process holds the lock of `file`.
fn is_held(file: &File) -> bool {
    flock(file, FlockOperation::NonBlockingLockShared).is_err()
}

/// Whether an opened file is still at `path`, and has not been removed or replaced.
pub(super) fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(mine), Ok(there)) => (there.dev(), there.ino()) == (mine.dev(), mine.ino()),
        _ => false,
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        if self.is_shown() {
            let _ = fs::remove_file(&self.path);
        }
    }
}
