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
    _file: File,
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
        Ok(Presence { path, _file: file })
    }

    /// Whether the process that created this file has ended.
    pub(super) fn is_over(path: &Path) -> bool {
        let number = |file: std::io::Result<fs::Metadata>| file.map(|it| it.ino()).ok();
        File::open(path).is_ok_and(|file| {
            let free = flock(&file, FlockOperation::NonBlockingLockShared).is_ok();
            // The opened file is compared with the file that has this name now, because a living
            // process may have replaced or removed the opened file.
            free && number(file.metadata()) == number(fs::metadata(path))
        })
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}
