//! Test of the cache of compiled kernels under many concurrent processes.

use std::path::PathBuf;
use std::process::Command;

use iris_kernels::cache::Cache;
use iris_kernels::rtc::{KernelSource, Options, key};

const FOLDER: &str = "IRIS_TEST_CACHE_FOLDER";
const ENTRIES: u32 = 6;

fn code(entry: u32) -> Vec<u8> {
    (0..200_000_u32).map(|i| (i.wrapping_mul(entry + 7) >> 3) as u8).collect()
}

fn name(entry: u32) -> iris_kernels::cache::Key {
    let source = KernelSource { name: "some.cu", text: "no matter" };
    key(source, &Options::new().define("ENTRY", entry), "sm_90a", Some((13, 0)))
}

/// Program of each process that the test `eight_processes_at_once` starts. It does nothing without
/// the environment variable that this test sets.
#[test]
fn as_one_process() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else {
        println!("skipped: runs as a process of eight_processes_at_once");
        return;
    };
    let cache = Cache::open(&folder).expect("the folder of all");
    for round in 0..20 {
        for entry in 0..ENTRIES {
            match cache.get(&name(entry)) {
                Some(seen) => assert!(seen == code(entry), "entry {entry}, round {round}"),
                None => cache.put(&name(entry), &code(entry)).expect("room"),
            }
            if (round + entry) % 5 == 0 {
                cache.put(&name(entry), &code(entry)).expect("room");
            }
        }
    }
}

#[test]
fn eight_processes_at_once() {
    let root = tempfile::tempdir().expect("a temporary folder");
    // The folder does not exist yet, so all processes try to create it at the same moment.
    let folder = root.path().join("deep/cache");
    let program = std::env::current_exe().expect("this program");
    let children: Vec<_> = (0..8)
        .map(|_| {
            Command::new(&program)
                .args(["--exact", "as_one_process", "--nocapture"])
                .env(FOLDER, &folder)
                .spawn()
                .expect("this program starts")
        })
        .collect();
    for mut child in children {
        assert!(child.wait().expect("a child").success());
    }
    let cache = Cache::open(&folder).expect("the folder of all");
    for entry in 0..ENTRIES {
        assert!(cache.get(&name(entry)).is_some_and(|seen| seen == code(entry)), "entry {entry}");
    }
    let left: Vec<_> = std::fs::read_dir(&folder).expect("there").flatten().collect();
    assert_eq!(left.len(), ENTRIES as usize, "temporary files are gone: {left:?}");
}
