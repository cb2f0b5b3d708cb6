//! Fake HIP runtime, which runs kernels on the host, and fakes of hipBLASLt and RCCL. This module
//! compiles them and starts programs under test with them.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use tempfile::{NamedTempFile, TempDir};

use crate::harness;

/// Folder of the fakes' C++ sources.
pub const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hip");

/// Folder of the headers with which the fake compiles kernels for the host.
const HOOKS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../iris-kernels/tests/host");

/// Folder of the kernels that the fake has compiled, next to this program. All programs that use
/// the fake share the folder, because compiling takes most of their time. The folder's name is a
/// hash of the inputs that all kernels share (the fake's headers and the compiler's version); the
/// names of the files in it depend on a kernel's text, headers and macros.
fn code() -> &'static Path {
    static CODE: OnceLock<PathBuf> = OnceLock::new();
    CODE.get_or_init(|| {
        let mut hasher = DefaultHasher::new();
        let mut files: Vec<_> =
            std::fs::read_dir(HOOKS).unwrap().map(|it| it.unwrap().path()).collect();
        files.push(Path::new(SOURCES).join("compute.h"));
        files.sort();
        files.iter().for_each(|file| std::fs::read(file).unwrap().hash(&mut hasher));
        let compiler = Command::new("g++").arg("--version").output().unwrap();
        compiler.stdout.hash(&mut hasher);
        let program = std::env::current_exe().unwrap();
        let folder = program.parent().unwrap().join("fake-hip");
        let name = format!("{:016x}", hasher.finish());
        // Folders of other hashes were compiled from older sources and are not used any more.
        for old in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            if old.file_name() != *name {
                let _ = std::fs::remove_dir_all(old.path());
            }
        }
        let folder = folder.join(name);
        std::fs::create_dir_all(&folder).unwrap();
        folder
    })
}

/// Shared library with the interface of one release of the HIP runtime, which runs kernels on the
/// host; compiled into a temporary folder.
pub struct Fake {
    folder: TempDir,
    library: PathBuf,
}

impl Fake {
    /// Fake runtime with the interface of HIP `release`, 5 or 7; compiled at the first call.
    pub fn of(release: u32) -> &'static Fake {
        static BUILT: [OnceLock<Fake>; 2] = [const { OnceLock::new() }; 2];
        BUILT[usize::from(release == 7)].get_or_init(|| Fake::build(release))
    }

    /// Fake runtime of HIP release 7, with fakes of hipBLASLt and RCCL in the same folder; all
    /// three are compiled at the first call.
    pub fn with_libraries() -> &'static Fake {
        static BUILT: OnceLock<Fake> = OnceLock::new();
        BUILT.get_or_init(|| {
            let fake = Fake::build(7);
            compile("blaslt.cpp", &[], &fake.folder.path().join("libhipblaslt.so.1"));
            compile("rccl.cpp", &[], &fake.folder.path().join("librccl.so.1"));
            fake
        })
    }

    fn build(release: u32) -> Fake {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join(format!("libamdhip64.so.{release}"));
        compile("runtime.cpp", &[&format!("-DFAKE_RELEASE={release}")], &library);
        Fake { folder, library }
    }

    /// Environment variables with which a program loads this runtime, which logs its calls to the file
    /// `log`.
    pub fn environment(&self, log: &Path) -> [(&'static str, PathBuf); 7] {
        let folder = self.folder.path();
        [
            ("LD_LIBRARY_PATH", folder.into()),
            ("IRIS_HIPRTC", self.library.clone()),
            ("IRIS_CACHE", folder.join("cache")),
            ("FAKE_HIP_HOOKS", HOOKS.into()),
            ("FAKE_HIP_CODE", code().into()),
            ("FAKE_HIP_LOG", log.into()),
            // Each thread of a kernel is a thread of the host. By default glibc keeps the stacks of
            // five, and maps and unmaps all others at each launch.
            ("GLIBC_TUNABLES", "glibc.pthread.stack_cache_size=1073741824".into()),
        ]
    }

    /// Runs a program that loads this runtime, with the environment variables `set`; returns its
    /// output and a log of the runtime calls that it made.
    pub fn run(
        &self,
        program: &Path,
        arguments: &[&str],
        set: &[(&str, &str)],
    ) -> (Output, String) {
        let log = NamedTempFile::new().unwrap();
        let output = Command::new(program)
            .args(arguments)
            .envs(self.environment(log.path()))
            .envs(set.iter().copied())
            .output()
            .unwrap();
        (output, std::fs::read_to_string(log.path()).unwrap())
    }
}

/// Compiles `source`, a file of [`SOURCES`], to the shared library `to`, with further `options` for
/// g++.
pub fn compile(source: &str, options: &[&str], to: &Path) {
    let options = options.iter().map(ToString::to_string);
    let all = ["-std=c++20".into(), "-shared".into(), format!("{SOURCES}/{source}")];
    harness::compile_for_host(options.chain(all), to);
}

/// Lines of the log `calls` whose call failed. Error 704 (peer access is already enabled) does not
/// count as a failure.
pub fn failed(calls: &str) -> Vec<&str> {
    let good = |line: &&str| !line.ends_with("= 0") && !line.ends_with("= 704");
    calls.lines().filter(good).collect()
}
