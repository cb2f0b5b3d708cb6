//! Stand-ins for a vendor's driver, compiler and GEMM library: compiles them, starts child
//! processes that load them, and calls their functions for tests.

#![allow(unsafe_code, reason = "functions of libraries of our own")]

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use iris_heap::BackendKind;
use iris_testkit::harness;
use libloading::Library;
use tempfile::TempDir;

/// Environment variable that makes this program a child process and gives its task.
pub(crate) const CHILD: &str = "STANDIN_CHILD";

/// Machine that a child process sees through the stand-ins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Machine {
    /// Architecture of the devices: `sm_90` as 90, or AMD's name.
    pub(crate) arch: &'static str,
    pub(crate) devices: usize,
    /// Whether the vendor's GEMM library is installed.
    pub(crate) library: bool,
}

impl Machine {
    pub(crate) fn backend(&self) -> BackendKind {
        if self.arch.starts_with("gfx") { BackendKind::Hip } else { BackendKind::Cuda }
    }
}

/// Folder with the compiled stand-ins of one vendor.
struct Built {
    folder: TempDir,
}

impl Built {
    /// Stand-ins for the vendor of `backend`, compiled at the first call.
    fn get(backend: BackendKind) -> &'static Built {
        static BUILT: [OnceLock<Built>; 2] = [const { OnceLock::new() }; 2];
        let hip = backend == BackendKind::Hip;
        BUILT[usize::from(hip)].get_or_init(|| {
            let folder = tempfile::tempdir().unwrap();
            let build = |source: &str, option: Option<&str>, name: &str| {
                let source = format!("{}/tests/{source}", env!("CARGO_MANIFEST_DIR"));
                let option = option.map(str::to_owned);
                // These two options let the stand-ins be unloaded. Without them other libraries
                // would bind to exported inline functions, or symbols would be GNU-unique. Either
                // keeps a library loaded for ever, and the test of unloading could not fail.
                let flags =
                    ["-std=c++20", "-shared", "-fno-gnu-unique", "-fvisibility-inlines-hidden"];
                let flags = flags.map(str::to_owned);
                let all = flags.into_iter().chain([source]);
                harness::compile_for_host(option.into_iter().chain(all), &folder.path().join(name));
            };
            if hip {
                build("standin/hip.cpp", None, "libamdhip64.so.7");
                build("standin/compiler.cpp", Some("-DSTANDIN_HIP"), "libhiprtc.so.7");
                build("hip/blaslt.cpp", None, "libhipblaslt.so.1");
            } else {
                build("standin/cuda.cpp", None, "libcuda.so.1");
                build("standin/compiler.cpp", None, "libnvrtc.so.13");
                build("hip/blaslt.cpp", Some("-DFAKE_CUBLASLT"), "libcublasLt.so.13");
            }
            Built { folder }
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Runs this program as a child process with the task `name`, on a machine with a stand-in (fake)
/// driver.
pub(crate) fn child(name: &str, machine: Machine, set: &[(&str, &str)]) -> Output {
    child_of(&std::env::current_exe().unwrap(), name, machine, set)
}

/// Runs `program`, a copy of this one, as a child process with the task `name`, on a machine with a
/// stand-in (fake) driver.
pub(crate) fn child_of(
    program: &Path,
    name: &str,
    machine: Machine,
    set: &[(&str, &str)],
) -> Output {
    let built = Built::get(machine.backend());
    let library = |name| if machine.library { built.path(name) } else { "/nowhere".into() };
    let multiprocessors = if machine.backend() == BackendKind::Hip { "304" } else { "132" };
    Command::new(program)
        .env(CHILD, name)
        .env("LD_LIBRARY_PATH", built.folder.path())
        .env("IRIS_NVRTC", built.path("libnvrtc.so.13"))
        .env("IRIS_HIPRTC", built.path("libhiprtc.so.7"))
        .env("IRIS_CUBLASLT", library("libcublasLt.so.13"))
        .env("IRIS_HIPBLASLT", library("libhipblaslt.so.1"))
        .env("IRIS_CACHE", built.path("cache"))
        .env("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        .env("GPU_MAX_HW_QUEUES", "32")
        .env("STANDIN_ARCH", machine.arch)
        .env("STANDIN_MULTIPROCESSORS", multiprocessors)
        .env("STANDIN_DEVICES", machine.devices.to_string())
        .envs(set.iter().copied())
        .output()
        .unwrap()
}

/// Makes the stand-in of cuBLASLt refuse products with `rows` rows when they are enqueued.
pub(crate) fn refuse_products(rows: u64) {
    let path = std::env::var("IRIS_CUBLASLT").unwrap();
    // SAFETY: the stand-in is our own library and runs no code when it is loaded.
    let library = unsafe { Library::new(path) }.unwrap();
    // SAFETY: blaslt.cpp defines the function with this type.
    let refuse = unsafe { library.get::<unsafe extern "C" fn(u64) -> c_int>(b"fake_refuse") };
    // SAFETY: `fake_refuse` accepts any number.
    assert_eq!(unsafe { refuse.unwrap()(rows) }, 0);
}

/// Functions for tests that the loaded stand-in driver exports.
pub(crate) struct Standin {
    rank: unsafe extern "C" fn(u32),
    log: unsafe extern "C" fn() -> *const c_char,
    clear: unsafe extern "C" fn(),
    log_waits: unsafe extern "C" fn(bool),
    fail: unsafe extern "C" fn(*const c_char, u64),
    failed: unsafe extern "C" fn() -> *const c_char,
    stream: unsafe extern "C" fn(c_int) -> u64,
    destroy_stream: unsafe extern "C" fn(u64) -> u32,
    begin_capture: unsafe extern "C" fn(u64) -> u32,
    end_capture: unsafe extern "C" fn(u64, *mut u64) -> u32,
    _library: Library,
}

impl Standin {
    pub(crate) fn get(backend: BackendKind) -> &'static Standin {
        static LOADED: OnceLock<Standin> = OnceLock::new();
        LOADED.get_or_init(|| {
            let name = match backend {
                BackendKind::Hip => "libamdhip64.so.7",
                _ => "libcuda.so.1",
            };
            // SAFETY: the stand-in is our own library and runs no code when it is loaded.
            let library = unsafe { Library::new(name) }.unwrap();
            macro_rules! function {
                ($name:literal) => {
                    // SAFETY: core.h declares the function with the type of the field that it is
                    // stored in.
                    *unsafe { library.get($name) }.unwrap()
                };
            }
            Standin {
                rank: function!(b"standin_rank"),
                log: function!(b"standin_log"),
                clear: function!(b"standin_clear"),
                log_waits: function!(b"standin_log_waits"),
                fail: function!(b"standin_fail"),
                failed: function!(b"standin_failed"),
                stream: function!(b"standin_stream"),
                destroy_stream: function!(b"standin_destroy_stream"),
                begin_capture: function!(b"standin_begin_capture"),
                end_capture: function!(b"standin_end_capture"),
                _library: library,
            }
        })
    }

    /// Makes this thread rank `rank`, whose memory, streams and events are numbered from 0.
    pub(crate) fn rank(&self, rank: usize) {
        // SAFETY: `standin_rank` accepts any number.
        unsafe { (self.rank)(rank as u32) };
    }

    /// Takes the log of this thread: enqueues since the last call, one per line.
    pub(crate) fn take(&self) -> String {
        // SAFETY: the text stays valid on this thread until `clear` below.
        let text = unsafe { CStr::from_ptr((self.log)()) }.to_str().unwrap().to_owned();
        // SAFETY: the log belongs to this thread alone, and its text was copied above.
        unsafe { (self.clear)() };
        text
    }

    /// Makes the log of this thread include calls in which the host waits for the device, as lines
    /// `HOST function`.
    pub(crate) fn log_waits(&self, waits: bool) {
        // SAFETY: `log_waits` takes one bool and accepts both values.
        unsafe { (self.log_waits)(waits) };
    }

    /// Makes call number `number` of `function` on this thread fail, counted from 1; 0 cancels. If
    /// `function` is "", calls of all enqueuing functions are counted.
    pub(crate) fn fail(&self, function: &str, number: u64) {
        let function = CString::new(function).unwrap();
        // SAFETY: `standin_fail` copies the name, which ends with zero.
        unsafe { (self.fail)(function.as_ptr(), number) };
    }

    /// Name of the function that failed because of [`Standin::fail`]; `None` if none has.
    pub(crate) fn failed(&self) -> Option<String> {
        // SAFETY: the text stays valid until the next call of `fail` on this thread.
        let name = unsafe { CStr::from_ptr((self.failed)()) }.to_str().unwrap();
        (!name.is_empty()).then(|| name.to_owned())
    }

    /// Creates a raw stream on `device`, as a program under test would.
    pub(crate) fn stream(&self, device: usize) -> u64 {
        // SAFETY: `standin_stream` accepts any device number.
        unsafe { (self.stream)(device as c_int) }
    }

    pub(crate) fn destroy_stream(&self, stream: u64) {
        // SAFETY: `destroy_stream` accepts any number as the stream.
        assert_eq!(unsafe { (self.destroy_stream)(stream) }, 0);
    }

    pub(crate) fn begin_capture(&self, stream: u64) {
        // SAFETY: `begin_capture` accepts any number as the stream.
        assert_eq!(unsafe { (self.begin_capture)(stream) }, 0);
    }

    /// Ends the capture of `stream`; returns the driver's error code if the capture is not valid.
    pub(crate) fn end_capture(&self, stream: u64) -> Result<(), u32> {
        let mut graph = 0;
        // SAFETY: the driver function writes the graph to `graph`, which outlives the call.
        match unsafe { (self.end_capture)(stream, &mut graph) } {
            0 => Ok(()),
            code => Err(code),
        }
    }
}
