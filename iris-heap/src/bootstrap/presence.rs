//! Files by which processes see of each other, before they are connected, whether they live.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// A file whose lock this process holds, removed when it is dropped.
#[derive(Debug)]
pub(super) struct Presence {
    path: PathBuf,
    _file: File,
}

impl Presence {
    pub(super) fn show(path: PathBuf) -> std::io::Result<Presence> {
        // Under another name until it is locked: a file that is found without a lock is a dead rank's.
        let part = path.with_extension(format!("part{}", std::process::id()));
        let file = File::create(&part)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        fs::rename(&part, &path)?;
        Ok(Presence { path, _file: file })
    }

    /// Whether the process that showed this file has ended.
    pub(super) fn is_over(path: &Path) -> bool {
        let number = |file: std::io::Result<fs::Metadata>| file.map(|it| it.ino()).ok();
        File::open(path).is_ok_and(|file| {
            let free = flock(&file, FlockOperation::NonBlockingLockShared).is_ok();
            // A living process may have replaced or removed it meanwhile.
            free && number(file.metadata()) == number(fs::metadata(path))
        })
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}
