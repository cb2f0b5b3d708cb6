//! Test harness for tests that need hardware or programs that a host may lack, such as a GPU or a
//! compiler. Tests whose requirement is missing are reported as ignored, with the reason, not as
//! passed.
//!
//! A test program that uses it has `harness = false` in its manifest and a `main`:
//!
//! ```no_run
//! use iris_testkit::harness::{self, Group, named};
//! # fn memory_comes_back() {}
//! fn main() -> std::process::ExitCode {
//!     harness::run(vec![Group::new(harness::no_gpu(), named![memory_comes_back])])
//! }
//! ```

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::process::{Command, ExitCode, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use iris_heap::{BackendKind, Error, ErrorKind};
use iris_kernels::cache::{Key, in_build};
use iris_kernels::rtc::{self, Compiler, KernelSource};
use iris_kernels::source::HEADERS;
use libtest_mimic::{Arguments, Completion, Trial};

/// Tests as pairs of a name and a function; a test fails by panicking.
pub type Named = Vec<(&'static str, fn())>;

/// Makes a [`Named`] list of functions without arguments; each test has its function's name.
#[macro_export]
#[doc(hidden)]
macro_rules! __named {
    ($($test:ident),* $(,)?) => { vec![$((stringify!($test), $test as fn())),*] };
}
pub use __named as named;

/// Makes a test of Rust's built-in harness from each row `name: body`.
#[macro_export]
#[doc(hidden)]
macro_rules! __rows {
    ($($name:ident: $body:expr;)*) => {$(
        #[test]
        fn $name() {
            $body
        }
    )*};
}
pub use __rows as rows;

/// Tests with a common requirement, such as an installed program or a GPU.
pub struct Group {
    missing: Option<String>,
    slow: bool,
    tests: Named,
}

impl Group {
    /// Makes a group of tests; `missing` is the reason why they cannot run, or `None` if they can.
    pub fn new(missing: Option<String>, tests: Named) -> Group {
        Group { missing, slow: false, tests }
    }

    /// Marks the group's tests as slow: they are ignored unless the command line asks for ignored
    /// tests.
    #[must_use]
    pub fn slow(mut self) -> Group {
        self.slow = true;
        self
    }
}

/// Reason why no NVIDIA GPU is available; `None` if there is one.
///
/// # Panics
/// If a driver exists but does not work.
pub fn no_gpu() -> Option<String> {
    fewer_gpus_than(1)
}

/// Reason why there are fewer than `count` NVIDIA GPUs; `None` if there are enough.
///
/// # Panics
/// If a driver exists but does not work: a broken driver must not skip tests.
pub fn fewer_gpus_than(count: usize) -> Option<String> {
    let missing = missing_gpus(BackendKind::Cuda, count);
    missing.unwrap_or_else(|error| panic!("the GPU driver does not work: {error}"))
}

/// Reason why there are fewer than `count` GPUs of this backend; `None` if there are enough.
///
/// # Errors
/// Errors of a driver that exists but does not work.
pub fn missing_gpus(backend: BackendKind, count: usize) -> Result<Option<String>, Error> {
    match backend.device_count() {
        Ok(visible) if visible >= count => Ok(None),
        Ok(visible) => Ok(Some(format!("{visible} {backend} devices are visible, not {count}"))),
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(Some(error.to_string())),
        Err(error) => Err(error),
    }
}

/// Reason why no heap of this backend can be opened; `None` for the CPU or if there is a GPU.
///
/// # Panics
/// If a driver exists but does not work.
pub fn no_backend(backend: BackendKind) -> Option<String> {
    if backend.traits().host_threads {
        return None;
    }
    let missing = missing_gpus(backend, 1);
    missing.unwrap_or_else(|error| panic!("the GPU driver does not work: {error}"))
}

/// Reason why the program `name` cannot be started as `name --version`; `None` if it can.
pub fn no_program(name: &str) -> Option<String> {
    let started = Command::new(name).arg("--version").output();
    started.err().map(|error| format!("{name} does not start: {error}"))
}

/// Compiles device sources as host code with g++; warnings are errors. `arguments` are the sources
/// and further options. Include paths are the kernel headers of iris-kernels and its test headers
/// for the host.
///
/// # Panics
/// If compilation fails; the message is the compiler's output.
pub fn compile_for_host<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>, to: &Path) {
    let kernels = concat!(env!("CARGO_MANIFEST_DIR"), "/../iris-kernels");
    let mut command = Command::new("g++");
    command
        .args(["-O1", "-fPIC", "-fexceptions", "-Wall", "-Wextra", "-Werror", "-pthread"])
        .args([format!("-I{kernels}/kernels"), format!("-I{kernels}/tests/host")])
        .args(["-x", "c++"])
        .args(arguments);
    compile(command, to).unwrap_or_else(|log| panic!("{log}"));
}

/// Writes the output of the compiler command `command`, g++ or clang without an option `-o`, to the
/// file `to`. The output is cached in cargo's build folder ([`in_build`]), and taken from the cache
/// if the preprocessed source, the options and the compiler's version are the same.
///
/// # Errors
/// The compiler's output if compilation fails, or why the file cannot be written.
///
/// # Panics
/// If the compiler does not start.
pub fn compile(mut command: Command, to: &Path) -> Result<(), String> {
    let name = command.get_program().to_owned();
    let started = |output: io::Result<Output>| match output {
        Ok(output) if output.status.success() => Ok(output.stdout),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => panic!("{} does not start: {error}", name.display()),
    };
    let version = started(Command::new(&name).arg("--version").output())?;
    let mut preprocess = Command::new(&name);
    // Options of the compilation may have no effect on preprocessing, about which the compiler
    // would warn.
    preprocess.args(command.get_args()).args(["-E", "-P", "-Wno-error"]);
    if let Some(folder) = command.get_current_dir() {
        preprocess.current_dir(folder);
    }
    let text = started(preprocess.output())?;
    let options = format!("{:?}", command.get_args());
    let key = Key::of(&name.to_string_lossy(), "host", &[&version, options.as_bytes(), &text]);
    let written = |error: io::Error| format!("{}: {error}", to.display());
    let code = in_build(&key, || {
        // Create the file first, because a command that only checks the syntax writes no output.
        File::create(to).map_err(written)?;
        started(command.arg("-o").arg(to).output())?;
        fs::read(to).map_err(written)
    })?;
    write_program(to, &code).map_err(written)
}

/// Writes the executable file `to` so that it can be started at once.
///
/// A separate process writes the file. If this process wrote it, each process that another thread
/// starts meanwhile would inherit the open descriptor for a moment, and the system executes no file
/// that is open for writing (`ETXTBSY`).
///
/// # Errors
/// If the shell does not start, or cannot write the file.
pub fn write_program(to: &Path, code: &[u8]) -> io::Result<()> {
    let mut shell = Command::new("/bin/sh")
        .args(["-c", "cat > \"$0\" && chmod 755 \"$0\""])
        .arg(to)
        .stdin(Stdio::piped())
        .spawn()?;
    let sent = shell.stdin.take().map_or(Ok(()), |mut input| input.write_all(code));
    let status = shell.wait()?;
    sent?;
    status.success().then_some(()).ok_or_else(|| io::Error::other(format!("cat: {status}")))
}

/// Compiles `source` with [`Compiler::compile`], or takes the result of an earlier compilation from
/// cargo's build folder ([`in_build`]).
///
/// # Errors
/// Errors of [`Compiler::compile`].
pub fn compiled_by(
    compiler: &Compiler,
    source: KernelSource<'_>,
    options: &rtc::Options,
    arch: &str,
) -> rtc::Result<Vec<u8>> {
    let command = compiler.command(options, arch);
    let headers = HEADERS.iter().flat_map(|header| [header.name, header.text]);
    let parts: Vec<_> = [source.text, &command].into_iter().chain(headers).collect();
    let parts: Vec<_> = parts.into_iter().map(str::as_bytes).collect();
    in_build(&Key::of(source.name, arch, &parts), || compiler.compile(source, options, arch))
}

/// Runs the tests that the command line selects, one at a time, because tests share the devices,
/// and ranks that are threads need a hardware queue for each stream.
///
/// The command line has the options of Rust's built-in harness, except that `--include-ignored`
/// does not run tests whose requirement is missing.
pub fn run(groups: Vec<Group>) -> ExitCode {
    crate::launch::with_environment(&[crate::launch::QUEUES]);
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    run_with(&arguments, groups)
}

/// Runs tests like [`run`], but several at a time; they must not share any state.
pub fn run_together(groups: Vec<Group>) -> ExitCode {
    run_with(&Arguments::from_args(), groups)
}

fn run_with(arguments: &Arguments, groups: Vec<Group>) -> ExitCode {
    let trials = groups.into_iter().flat_map(|Group { missing, slow, tests }| {
        // The reason may list every path that was searched, so only the first ignored test prints
        // it.
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use std::thread;

    use super::*;

    #[test]
    fn equal_sources_with_other_options_are_compiled_anew() {
        if let Some(missing) = no_program("g++") {
            eprintln!("skipped: {missing}");
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let [source, to] = ["source.cpp", "output"].map(|name| folder.path().join(name));
        // The source contains the process id, so that no earlier run has compiled and cached it.
        fs::write(&source, format!("int number() {{ return {}; }}", std::process::id()))
            .expect("room");
        let output = |option: &str| {
            let mut command = Command::new("g++");
            command.current_dir(folder.path()).args([option, "source.cpp"]);
            compile(command, &to).expect("it is right");
            fs::read(&to).expect("the output")
        };
        let [object, assembly] = ["-c", "-S"].map(output);
        assert!(object.starts_with(b"\x7fELF") && !assembly.starts_with(b"\x7fELF"));
        fs::write(&source, "int number() { return none; }").expect("room");
        let mut command = Command::new("g++");
        command.current_dir(folder.path()).args(["-c", "source.cpp"]);
        let log = compile(command, &to).expect_err("it is wrong");
        assert!(log.contains("none"), "{log}");
    }

    #[test]
    fn a_program_starts_as_soon_as_it_is_written_while_other_threads_start_processes() {
        let folder = tempfile::tempdir().expect("a folder");
        // A long comment makes the write take a while.
        let text = format!("#!/bin/sh\nexit 7\n# {}\n", "x".repeat(4 << 20));
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(Relaxed) {
                        Command::new("true").status().expect("it starts");
                    }
                });
            }
            let ends = (0..20).map(|at| {
                let program = folder.path().join(at.to_string());
                write_program(&program, text.as_bytes())?;
                Command::new(program).status()
            });
            let ends: io::Result<Vec<_>> = ends.collect();
            done.store(true, Relaxed);
            for status in ends.expect("each starts") {
                assert_eq!(status.code(), Some(7));
            }
        });
    }
}
