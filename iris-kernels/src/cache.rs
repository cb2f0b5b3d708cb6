//! Cache of compiled kernels on disk. Its files are executed, so the folder must be accessible to
//! its user only.
//!
//! An entry is written under a temporary name and then renamed, so that concurrent processes see it
//! complete or not at all. An entry that does not match its checksum is treated as absent and is
//! written anew.

mod in_build;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use iris_heap::{check_file_size, fnv};

pub use in_build::in_build;

use crate::rtc::error::{Error, Result};

const MAGIC: &[u8; 8] = b"iriscub1";
const HEADER: usize = 8 + 16 + 16;

/// Key of a cache entry: the name of its file, and the hash with which a valid file begins.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Key {
    file: String,
    hash: u128,
}

impl Key {
    /// Makes the key of a compilation of the file `source` for `arch`. `parts` must contain
    /// everything else that determines the result: text, options, and the compiler's version.
    pub fn of(source: &str, arch: &str, parts: &[&[u8]]) -> Self {
        Self::new(source, arch, fnv(parts))
    }

    fn new(source: &str, arch: &str, hash: u128) -> Self {
        let plain = |text: &str| {
            let kept = text.strip_suffix(".cu").unwrap_or(text).chars();
            kept.map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).take(48).collect()
        };
        let (source, arch): (String, String) = (plain(source), plain(arch));
        Self { file: format!("{source}-{arch}-{hash:032x}"), hash }
    }
}

/// Folder that holds machine code of compiled kernels, one file for each.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// Opens the cache of this user: the folder `IRIS_CACHE`, or `iris` in the user's cache folder.
    ///
    /// # Errors
    /// Errors of [`Cache::open`].
    pub fn of_user() -> Result<Self> {
        Self::open(&Self::user_folder())
    }

    /// Folder that [`Cache::of_user`] opens; it may not exist yet.
    pub fn user_folder() -> PathBuf {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        match (variable("IRIS_CACHE"), variable("XDG_CACHE_HOME"), variable("HOME")) {
            (Some(told), ..) => PathBuf::from(told),
            (_, Some(caches), _) => PathBuf::from(caches).join("iris"),
            (.., Some(home)) => PathBuf::from(home).join(".cache/iris"),
            _ => std::env::temp_dir().join(format!("iris-cache-{}", user())),
        }
    }

    /// Opens a cache folder; creates it with mode 0700 if it does not exist.
    ///
    /// # Errors
    /// [`Error::Cache`] if the folder cannot be created, is a symbolic link or not a folder,
    /// belongs to another user, or is accessible to other users.
    pub fn open(folder: &Path) -> Result<Self> {
        let wrong = |why: String| Error::Cache { path: folder.into(), why };
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(|error| {
            wrong(format!("cannot be created: {error}; expected a folder that this user can write"))
        })?;
        // The path itself is checked, without following links, because the owner of the parent
        // folder could redirect a link later.
        let metadata = fs::symlink_metadata(folder)
            .map_err(|error| wrong(format!("{error}; expected a folder of this user")))?;
        if !metadata.is_dir() {
            return Err(wrong("is not a folder; expected a folder of this user".into()));
        }
        if metadata.uid() != user() {
            let owner = metadata.uid();
            return Err(wrong(format!("belongs to user {owner}; expected user {}", user())));
        }
        if metadata.mode() & 0o077 != 0 {
            let mode = metadata.mode() & 0o777;
            return Err(wrong(format!("has mode {mode:o}; expected 700: its files are executed")));
        }
        Ok(Self { folder: folder.into() })
    }

    /// Machine code stored under `key`; `None` if no code is stored or the file is damaged.
    pub fn get(&self, key: &Key) -> Option<Vec<u8>> {
        let path = self.folder.join(&key.file);
        let mut bytes = Vec::new();
        File::open(&path).ok()?.read_to_end(&mut bytes).ok()?;
        let whole = bytes.len() >= HEADER
            && bytes.starts_with(MAGIC)
            && bytes[8..24] == key.hash.to_le_bytes()
            && bytes[24..HEADER] == fnv(&[&bytes[HEADER..]]).to_le_bytes();
        if !whole {
            tracing::warn!(entry = %path.display(), "damaged entry in the cache of kernels");
            return None;
        }
        Some(bytes.split_off(HEADER))
    }

    /// Stores the code of an entry; replaces an earlier one.
    ///
    /// # Errors
    /// [`Error::Cache`] if the entry cannot be written.
    pub fn put(&self, key: &Key, code: &[u8]) -> Result<()> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let part = self.folder.join(format!(".{}-{number}-{}", std::process::id(), key.file));
        let whole = self.folder.join(&key.file);
        let written =
            write_new(&part, &[MAGIC, &key.hash.to_le_bytes(), &fnv(&[code]).to_le_bytes(), code])
                .and_then(|()| fs::rename(&part, &whole));
        written.map_err(|error| {
            let _ = fs::remove_file(&part);
            Error::Cache {
                path: whole,
                why: format!(
                    "cannot be written: {error}; expected a folder that this user can write"
                ),
            }
        })
    }

    /// Stores `code` as [`Cache::put`] does. A failure is only logged, because a full disk must not
    /// fail a call whose compilation has succeeded.
    pub(crate) fn keep(&self, key: &Key, code: &[u8]) {
        if let Err(error) = self.put(key, code) {
            tracing::warn!(%error, "a compilation is not kept");
        }
    }

    /// Marks an entry as used now.
    fn touch(&self, key: &Key) {
        // A failure is ignored, because the time only decides which entries are removed first.
        let _ = File::open(self.folder.join(&key.file))
            .and_then(|file| file.set_modified(SystemTime::now()));
    }

    /// Path of the cache's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

/// Folder of kernels shipped with the program: `kernels` in the folder of the executable; it may
/// not exist. The folder is trusted like the executable. `None` if the system does not report the
/// executable's path.
pub fn carried_folder() -> Option<PathBuf> {
    Some(std::env::current_exe().ok()?.with_file_name("kernels"))
}

/// Cache of the kernels that are shipped with the program, in [`carried_folder`]; `None` if this
/// folder does not exist.
pub(crate) fn carried() -> Option<Cache> {
    let folder = carried_folder()?;
    folder.is_dir().then_some(Cache { folder })
}

fn write_new(path: &Path, parts: &[&[u8]]) -> std::io::Result<()> {
    // A file with this name can only be left over from a killed process that had the same process
    // id.
    let _ = fs::remove_file(path);
    let bytes = parts.iter().map(|part| part.len() as u64).sum();
    check_file_size("the entry", bytes).map_err(std::io::Error::other)?;
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    parts.iter().try_for_each(|part| file.write_all(part))
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("a temporary folder")
    }

    fn key(hash: u128) -> Key {
        Key::new("some kernel.cu", "sm_90a", hash)
    }

    #[test]
    fn keeps_and_finds_entries() {
        let root = folder();
        let cache = Cache::open(&root.path().join("a/b")).expect("a new folder");
        assert_eq!(cache.get(&key(1)), None);
        cache.put(&key(1), b"code").expect("room");
        assert_eq!(cache.get(&key(1)).as_deref(), Some(&b"code"[..]));
        assert_eq!(cache.get(&key(2)), None);
        cache.put(&key(1), b"newer").expect("room");
        assert_eq!(cache.get(&key(1)).as_deref(), Some(&b"newer"[..]));
    }

    #[test]
    fn a_damaged_entry_is_absent_and_can_be_replaced() {
        let root = folder();
        let cache = Cache::open(&root.path().join("cache")).expect("a new folder");
        cache.put(&key(1), b"some code").expect("room");
        let file = cache.folder().join(&key(1).file);
        let whole = fs::read(&file).expect("the entry");
        for at in [0, 9, 30, HEADER, whole.len() - 1] {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            fs::write(&file, bytes).expect("writable");
            assert_eq!(cache.get(&key(1)), None, "byte {at} differs");
        }
        for len in [0, 10, HEADER, whole.len() - 1] {
            fs::write(&file, &whole[..len]).expect("writable");
            assert_eq!(cache.get(&key(1)), None, "cut to {len}");
        }
        // The code of entry 2 is stored under the file name of entry 1, which must not be accepted.
        cache.put(&key(2), b"other code").expect("room");
        fs::copy(cache.folder().join(&key(2).file), &file).expect("writable");
        assert_eq!(cache.get(&key(1)), None);
        cache.put(&key(1), b"some code").expect("room");
        assert_eq!(cache.get(&key(1)).as_deref(), Some(&b"some code"[..]));
    }

    #[test]
    fn refuses_a_folder_that_is_not_the_users_alone() {
        let root = folder();
        let open = root.path().join("open");
        fs::create_dir(&open).expect("room");
        fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).expect("ours");
        let error = Cache::open(&open).expect_err("others can read it").to_string();
        assert!(error.contains("has mode 755; expected 700"), "{error}");

        let own = root.path().join("own");
        Cache::open(&own).expect("a new folder");
        let link = root.path().join("link");
        std::os::unix::fs::symlink(&own, &link).expect("room");
        let error = Cache::open(&link).expect_err("a link").to_string();
        assert!(error.contains("is not a folder"), "{error}");

        let file = root.path().join("file");
        fs::write(&file, "").expect("room");
        assert!(Cache::open(&file).is_err());

        // The test needs a folder that another user owns: `/`, except if this user is root.
        if user() != 0 {
            let error = Cache::open("/".as_ref()).expect_err("not ours").to_string();
            assert!(error.contains("belongs to user"), "{error}");
        }
    }
}
