//! Tests that need what a host may not have: a GPU, a vendor's compiler. Where it is missing they
//! are reported as ignored, with the reason, and not as passed.
//!
//! A test program of this kind has `harness = false` in its manifest and a `main`:
//!
//! ```no_run
//! use iris_testkit::harness::{self, Group, named};
//! # fn memory_comes_back() {}
//! fn main() -> std::process::ExitCode {
//!     harness::run(vec![Group::new(harness::no_gpu(), named![memory_comes_back])])
//! }
//! ```

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex, PoisonError};

use iris_heap::{BackendKind, Error, ErrorKind};
use libtest_mimic::{Arguments, Completion, Trial};

/// Tests by name: a test fails by a panic.
pub type Named = Vec<(&'static str, fn())>;

/// Functions without arguments as tests that have their names.
#[macro_export]
#[doc(hidden)]
macro_rules! __named {
    ($($test:ident),* $(,)?) => { vec![$((stringify!($test), $test as fn())),*] };
}
pub use __named as named;

/// Tests that need the same.
pub struct Group {
    missing: Option<String>,
    slow: bool,
    tests: Named,
}

impl Group {
    /// These tests; `missing` says what they need and do not have.
    pub fn new(missing: Option<String>, tests: Named) -> Group {
        Group { missing, slow: false, tests }
    }

    /// The same, but run only where ignored tests are asked for.
    #[must_use]
    pub fn slow(mut self) -> Group {
        self.slow = true;
        self
    }
}

/// Why there is no NVIDIA GPU to use, if there is none.
///
/// # Panics
/// As [`fewer_gpus_than`].
pub fn no_gpu() -> Option<String> {
    fewer_gpus_than(1)
}

/// Why there are not so many NVIDIA GPUs, if there are fewer.
///
/// # Panics
/// If there is a driver that does not work: that is no reason to skip a test.
pub fn fewer_gpus_than(count: usize) -> Option<String> {
    let missing = missing_gpus(BackendKind::Cuda, count);
    missing.unwrap_or_else(|error| panic!("whether there are GPUs: {error}"))
}

/// Why there are not so many GPUs of this kind, if there are fewer.
///
/// # Errors
/// Those of a driver that is there and does not work.
pub fn missing_gpus(backend: BackendKind, count: usize) -> Result<Option<String>, Error> {
    match backend.device_count() {
        Ok(visible) if visible >= count => Ok(None),
        Ok(visible) => Ok(Some(format!("{visible} {backend} devices are visible, not {count}"))),
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(Some(error.to_string())),
        Err(error) => Err(error),
    }
}

/// Why there are no heaps of this backend, if there are none.
///
/// # Panics
/// As [`fewer_gpus_than`].
pub fn no_backend(backend: BackendKind) -> Option<String> {
    if backend.traits().host_threads {
        return None;
    }
    let missing = missing_gpus(backend, 1);
    missing.unwrap_or_else(|error| panic!("whether there are GPUs: {error}"))
}

/// Why this program does not start, if it does not.
pub fn no_program(name: &str) -> Option<String> {
    let started = Command::new(name).arg("--version").output();
    started.err().map(|error| format!("{name} does not start: {error}"))
}

/// Compiles sources of the device's language as host code, by g++ and without a warning. `arguments`
/// are the sources and further options; headers are those of iris-kernels and of its tests.
///
/// # Panics
/// With what the compiler said, if it does not compile.
pub fn compile_for_host<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>, to: &Path) {
    let kernels = concat!(env!("CARGO_MANIFEST_DIR"), "/../iris-kernels");
    let output = Command::new("g++")
        .args(["-O1", "-fPIC", "-fexceptions", "-Wall", "-Wextra", "-Werror", "-pthread"])
        .args([format!("-I{kernels}/kernels"), format!("-I{kernels}/tests/host")])
        .args(["-x", "c++"])
        .args(arguments)
        .arg("-o")
        .arg(to)
        .output();
    let output = output.unwrap_or_else(|error| panic!("g++ does not start: {error}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Runs what the command line asks for, one test at a time: tests of devices share them, and ranks
/// as threads need a hardware queue for each stream.
///
/// The command line is that of Rust's own harness, except that `--include-ignored` does not run a
/// test that has not what it needs.
pub fn run(groups: Vec<Group>) -> ExitCode {
    crate::launch::with_environment(&[crate::launch::QUEUES]);
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    run_with(&arguments, groups)
}

/// As [`run`], with tests that share nothing, several at a time.
pub fn run_together(groups: Vec<Group>) -> ExitCode {
    run_with(&Arguments::from_args(), groups)
}

fn run_with(arguments: &Arguments, groups: Vec<Group>) -> ExitCode {
    let trials = groups.into_iter().flat_map(|Group { missing, slow, tests }| {
        // Told once: it may name every place that was looked at.
        let reason = missing.map(|reason| Arc::new(Mutex::new(reason)));
        tests.into_iter().map(move |(name, test)| {
            let reason = reason.clone();
            let run = move || match reason {
                None => {
                    test();
                    Ok(Completion::Completed)
                }
                Some(reason) => {
                    let mut reason = reason.lock().unwrap_or_else(PoisonError::into_inner);
                    let told = std::mem::replace(&mut *reason, "as above".into());
                    Ok(Completion::ignored_with(told))
                }
            };
            Trial::ignorable_test(name, run).with_ignored_flag(slow)
        })
    });
    libtest_mimic::run(arguments, trials.collect()).exit_code()
}
