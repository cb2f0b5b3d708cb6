//! Cache of compilations in cargo's build folder, for tests and checks of the device source: they
//! compile hundreds of programs, of which an edit changes few.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::SystemTime;

use super::{Cache, Key};

/// File that cargo keeps in the folder of a profile, such as `target/release`. A folder that has
/// this file is taken for cargo's build folder.
const MARK: &str = ".cargo-lock";

/// Size in bytes above which the oldest entries are removed.
const LIMIT: u64 = 1 << 30;

/// Returns the result of `compile`, which must depend on `key` alone. If cargo has built this
/// program, the result is stored in the build folder (`target/release/compiled`). Later calls, also
/// by other programs of the same folder, take it from there. Errors are not stored.
///
/// # Errors
/// The error of `compile`.
pub fn in_build<E>(key: &Key, compile: impl FnOnce() -> Result<Vec<u8>, E>) -> Result<Vec<u8>, E> {
    static CACHE: OnceLock<Option<Cache>> = OnceLock::new();
    let open = || {
        let cache = Cache::open(&folder_of(&std::env::current_exe().ok()?)?).ok()?;
        shrink(cache.folder(), LIMIT);
        Some(cache)
    };
    let Some(cache) = CACHE.get_or_init(open) else { return compile() };
    if let Some(code) = cache.get(key) {
        cache.touch(key);
        return Ok(code);
    }
    let code = compile()?;
    cache.keep(key, &code);
    Ok(code)
}

/// Folder for compilations of `program`; `None` if cargo has not built the program.
fn folder_of(program: &Path) -> Option<PathBuf> {
    let profile = program.ancestors().skip(1).find(|folder| folder.join(MARK).is_file())?;
    Some(profile.join("compiled"))
}

/// Removes the least recently used entries until half of `limit` is left, if all entries together
/// have more than `limit` bytes.
fn shrink(folder: &Path, limit: u64) {
    let mut entries: Vec<(SystemTime, u64, PathBuf)> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let metadata = entry.metadata().ok()?;
            Some((metadata.modified().ok()?, metadata.len(), entry.path()))
        })
        .collect();
    let mut size: u64 = entries.iter().map(|entry| entry.1).sum();
    if size <= limit {
        return;
    }
    entries.sort();
    for (_, bytes, path) in entries {
        if size <= limit / 2 {
            break;
        }
        // A failure is ignored, because another program may have removed the entry already.
        let _ = fs::remove_file(path);
        size -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::fs::File;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_program_of_cargo_compiles_once_and_again_after_an_error() {
        let compiled = Cell::new(0);
        let hash = u128::from(std::process::id());
        let key = Key::of("in_build", "test", &[&hash.to_le_bytes()]);
        let compile = |result: Result<Vec<u8>, &'static str>| {
            in_build(&key, || {
                compiled.set(compiled.get() + 1);
                result
            })
        };
        assert_eq!(compile(Err("no such type")), Err("no such type"));
        assert_eq!(compile(Ok(b"code".to_vec())), Ok(b"code".to_vec()));
        let folder = folder_of(&std::env::current_exe().expect("a path")).expect("of cargo");
        let entry = File::open(folder.join(&key.file)).expect("the entry");
        let old = SystemTime::UNIX_EPOCH;
        entry.set_modified(old).expect("a time");
        assert_eq!(compile(Ok(b"newer".to_vec())), Ok(b"code".to_vec()));
        assert_eq!(compiled.get(), 2);
        let used = entry.metadata().and_then(|it| it.modified()).expect("a time");
        assert!(used > old, "an entry that is used stays the oldest");
    }

    #[test]
    fn the_folder_is_that_of_the_profile() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let profile = root.path().join("target/release");
        fs::create_dir_all(profile.join("deps")).expect("room");
        let program = profile.join("deps/test");
        assert_eq!(folder_of(&program), None, "no folder of cargo");
        fs::write(profile.join(MARK), "").expect("room");
        assert_eq!(folder_of(&program), Some(profile.join("compiled")));
        assert_eq!(folder_of(&profile.join("check")), Some(profile.join("compiled")));
    }

    #[test]
    fn entries_that_were_not_used_for_longest_are_removed() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let now = SystemTime::now();
        for age in 0..10_u64 {
            let file = File::create(root.path().join(age.to_string())).expect("room");
            file.set_len(100).expect("room");
            file.set_modified(now - Duration::from_secs(age)).expect("a time");
        }
        let left = || fs::read_dir(root.path()).expect("a folder").count();
        shrink(root.path(), 1000);
        assert_eq!(left(), 10);
        shrink(root.path(), 999);
        assert_eq!(left(), 4);
        assert!(root.path().join("3").exists() && !root.path().join("4").exists());
    }
}
