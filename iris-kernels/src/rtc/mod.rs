//! Run-time compilation of device source by NVRTC, hiprtc or clang, with a cache on disk.
//!
//! **Problem.** One source must become machine code for the present device, and programs must start
//! even if no vendor's compiler is installed.
//!
//! **Solution.** The vendor's compiler is a library. It is searched in its usual places when it is
//! first needed, and its functions are loaded by name. Compiled code is cached.
//!
//! **Running.** [`compile`] turns a source into a cubin or code object. The source is one of
//! [`crate::source`], or a user's source that includes `"iris/sym.h"` and `"iris/sync.h"`. The
//! first compilation takes seconds; [`progress`] shows its progress if stderr is a terminal.
//!
//! **Debugging.** A compilation error has the compiler's log; the error for a missing compiler
//! lists every place that was searched.
//!
//! **Limits.** A cubin runs only on the architecture for which it was compiled.

#![allow(unsafe_code, reason = "the run-time compilers, loaded by path")]

mod api;
mod clang;
pub(crate) mod error;
mod hiprtc;
mod nvrtc;
pub mod progress;
pub(crate) mod search;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

pub use error::{Error, Result};

use crate::cache::{self, Cache, Key};
use crate::source::{HEADERS, Text};
use api::{Api, Compiled};
use clang::Clang;

/// Vendor of a compiler and of the devices for which it compiles.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Vendor {
    /// NVIDIA, with the compiler NVRTC.
    Nvidia,
    /// AMD, with the compiler hiprtc or clang.
    Amd,
}

impl Vendor {
    /// Vendor of an architecture, from the architecture's name: `gfx942` is AMD's, names without
    /// `gfx` are NVIDIA's.
    pub fn of(arch: &str) -> Self {
        if arch.starts_with("gfx") { Vendor::Amd } else { Vendor::Nvidia }
    }
}

/// Device source to be compiled, with a file name for the compiler's messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelSource<'a> {
    /// File name that the compiler's messages show.
    pub name: &'a str,
    /// Source text; it may include the headers of [`crate::source::HEADERS`].
    pub text: &'a str,
}

impl From<Text> for KernelSource<'static> {
    fn from(text: Text) -> Self {
        Self { name: text.name, text: text.text }
    }
}

impl<'a> From<&'a str> for KernelSource<'a> {
    /// Makes a source from its text, with the default name `source.cu`.
    fn from(text: &'a str) -> Self {
        Self { name: "source.cu", text }
    }
}

/// Options of a compilation: macros and further arguments.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// Macros and their values, in the order given.
    pub defines: Vec<(String, String)>,
    /// Further options, which are passed to the compiler unchanged.
    pub arguments: Vec<String>,
}

impl Options {
    /// Makes options without any macro or argument.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the macro `name` with this value.
    #[must_use]
    pub fn define(mut self, name: &str, value: impl ToString) -> Self {
        self.defines.push((name.into(), value.to_string()));
        self
    }

    /// Adds an option, which is passed to the compiler unchanged.
    #[must_use]
    pub fn argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Command-line options in the form that the compilers of both vendors accept.
    pub(crate) fn words(&self) -> Vec<String> {
        let defines = self.defines.iter().map(|(name, value)| format!("-D{name}={value}"));
        defines.chain(self.arguments.iter().cloned()).collect()
    }
}

/// Compiler of device source on this machine, ready for use.
#[derive(Debug)]
pub struct Compiler {
    vendor: Vendor,
    tool: Tool,
    version: (i32, i32),
}

/// Kind of compiler: a library, or an external program.
#[derive(Debug)]
enum Tool {
    Library(Api),
    Program(Clang),
}

impl Compiler {
    /// Returns NVRTC, which is loaded at the first call.
    ///
    /// # Errors
    /// [`Error::NotFound`] with the places that were searched.
    pub fn nvrtc() -> Result<&'static Compiler> {
        static LOADED: OnceLock<Result<Compiler>> = OnceLock::new();
        LOADED.get_or_init(nvrtc::load).as_ref().map_err(Error::clone)
    }

    /// Returns hiprtc, which is loaded at the first call.
    ///
    /// # Errors
    /// [`Error::NotFound`] with the places that were searched.
    pub fn hiprtc() -> Result<&'static Compiler> {
        static LOADED: OnceLock<Result<Compiler>> = OnceLock::new();
        LOADED.get_or_init(hiprtc::load).as_ref().map_err(Error::clone)
    }

    /// Returns clang for AMD's architectures, which is searched at the first call.
    ///
    /// # Errors
    /// [`Error::NotFound`] with the places that were searched.
    pub fn clang() -> Result<&'static Compiler> {
        static FOUND: OnceLock<Result<Compiler>> = OnceLock::new();
        let find = || {
            let clang = Clang::find()?;
            let version = clang.version;
            Ok(Compiler::new(Vendor::Amd, Tool::Program(clang), version))
        };
        FOUND.get_or_init(find).as_ref().map_err(Error::clone)
    }

    /// Returns the vendor's compiler for an architecture. For AMD it is hiprtc, or clang if hiprtc
    /// is missing or does not support the architecture.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Architecture`] if hiprtc is too old and clang is missing.
    pub fn of(vendor: Vendor, arch: &str) -> Result<&'static Compiler> {
        if vendor == Vendor::Nvidia {
            return Self::nvrtc();
        }
        let hiprtc = Self::hiprtc();
        match &hiprtc {
            Ok(compiler) if compiler.knows(arch) => return hiprtc,
            // If the user has named a hiprtc library that is missing, the error is reported and
            // clang is not used.
            Err(_) if search::variable("IRIS_HIPRTC").is_some() => return hiprtc,
            _ => {}
        }
        Self::clang().map_err(|no_clang| match hiprtc {
            Err(missing) => missing,
            Ok(old) => Error::Architecture {
                compiler: old.title(),
                arch: arch.into(),
                instead: no_clang.to_string(),
            },
        })
    }

    fn new(vendor: Vendor, tool: Tool, version: (i32, i32)) -> Self {
        let compiler = Self { vendor, tool, version };
        tracing::debug!(file = %compiler.path().display(), ?version, "compiler of kernels");
        compiler
    }

    /// Whether this compiler may be called for an architecture. For an unsupported architecture,
    /// NVRTC and clang return an error, but hiprtc aborts the process.
    pub fn knows(&self, arch: &str) -> bool {
        match (&self.tool, self.vendor) {
            (Tool::Library(_), Vendor::Amd) => hiprtc::knows(self.version, arch),
            _ => true,
        }
    }

    /// Name and version of the compiler.
    pub fn title(&self) -> String {
        let (major, minor) = self.version;
        match (&self.tool, self.vendor) {
            (Tool::Library(_), Vendor::Nvidia) => format!("NVRTC {major}.{minor}"),
            (Tool::Library(_), Vendor::Amd) => {
                format!("hiprtc of ROCm {major}.{}.{}", minor / 100_000, minor % 100_000)
            }
            (Tool::Program(_), _) => format!("clang {major}.{minor}"),
        }
    }

    /// Major and minor version. For hiprtc: the major release of ROCm, and the remaining digits of
    /// the HIP runtime's version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Path of the compiler's library or program.
    pub fn path(&self) -> &Path {
        match &self.tool {
            Tool::Library(api) => api.path(),
            Tool::Program(clang) => clang.program(),
        }
    }

    /// Text for keys of caches. It contains everything on which the compiled code depends, except
    /// the source: the compiler's file with its size and time, and all options.
    pub fn command(&self, options: &Options, arch: &str) -> String {
        let path = self.path();
        let file = path.metadata().map(|it| (it.len(), it.modified().ok())).ok();
        let words = [fixed_options(self.vendor, arch), options.words()].concat();
        format!("{} {} {file:?} {words:?}", self.title(), path.display())
    }

    /// Compiles for an architecture (`sm_90a`, `gfx942`), without the cache. For a virtual
    /// architecture such as `compute_90a` the result is PTX text.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's log.
    pub fn compile(
        &self,
        source: KernelSource<'_>,
        options: &Options,
        arch: &str,
    ) -> Result<Vec<u8>> {
        let headers: Vec<KernelSource<'_>> = HEADERS.iter().map(|&text| text.into()).collect();
        self.compile_with(source, &headers, options, arch)
    }

    /// Compiles a source as [`Self::compile`] does, with `headers` in place of
    /// [`crate::source::HEADERS`].
    ///
    /// # Errors
    /// Errors of [`Self::compile`].
    pub fn compile_with(
        &self,
        source: KernelSource<'_>,
        headers: &[KernelSource<'_>],
        options: &Options,
        arch: &str,
    ) -> Result<Vec<u8>> {
        let made = self.make(source, headers, options, arch)?;
        let text = self.vendor == Vendor::Nvidia && arch.starts_with("compute_");
        Ok(if text { made.text } else { made.code })
    }

    /// Returns both PTX and machine code of a single compilation, for an architecture of NVIDIA
    /// such as `sm_90a`.
    ///
    /// # Errors
    /// Errors of [`Self::compile`].
    pub fn compile_with_ptx(
        &self,
        source: KernelSource<'_>,
        headers: &[KernelSource<'_>],
        options: &Options,
        arch: &str,
    ) -> Result<(String, Vec<u8>)> {
        let made = self.make(source, headers, options, arch)?;
        Ok((String::from_utf8_lossy(&made.text).into_owned(), made.code))
    }

    fn make(
        &self,
        source: KernelSource<'_>,
        headers: &[KernelSource<'_>],
        options: &Options,
        arch: &str,
    ) -> Result<Compiled> {
        let mut words = [fixed_options(self.vendor, arch), options.words()].concat();
        if self.vendor == Vendor::Nvidia {
            words.extend(nvrtc::parallel(self.version));
        }
        match &self.tool {
            Tool::Library(api) => api.compile(source, headers, &words, arch),
            Tool::Program(clang) => {
                let code = clang.compile(source, headers, &words, arch)?;
                Ok(Compiled { text: Vec::new(), code })
            }
        }
    }
}

/// Options for every compilation for `arch`.
fn fixed_options(vendor: Vendor, arch: &str) -> Vec<String> {
    match vendor {
        Vendor::Nvidia => nvrtc::fixed_options(arch),
        Vendor::Amd => hiprtc::fixed_options(arch),
    }
}

/// Compiles for an architecture, or returns code that was compiled before: from the folder shipped
/// with the program, which needs no compiler, or from the cache.
///
/// # Errors
/// [`Error::NotFound`] for a missing compiler; [`Error::Compile`] with the compiler's log;
/// [`Error::Cache`] for a cache folder that other users can access.
pub fn compile(
    vendor: Vendor,
    source: KernelSource<'_>,
    options: &Options,
    arch: &str,
) -> Result<Vec<u8>> {
    if let Some(code) = carried(source, options, arch) {
        return Ok(code);
    }
    let compiler = Compiler::of(vendor, arch)?;
    let cache = Cache::of_user()?;
    let key = key(source, options, arch, Some(compiler.version));
    // Ranks that are threads of one process request the same code at the same time. One thread
    // compiles it, and the others wait here for its result.
    let lock = compile_lock(&key);
    let _guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(code) = cache.get(&key) {
        return Ok(code);
    }
    let folder = cache.folder().display();
    tracing::info!(source = source.name, arch, options = ?options.words(), %folder, "compiling a kernel that is not cached");
    let what = format!("{} for {arch}", source.name);
    let code = progress::compiling(&what, || compiler.compile(source, options, arch))?;
    cache.keep(&key, &code);
    Ok(code)
}

/// Code from the folder that is shipped with the program; `None` if the folder does not have it.
pub(crate) fn carried(source: KernelSource<'_>, options: &Options, arch: &str) -> Option<Vec<u8>> {
    cache::carried()?.get(&key(source, options, arch, None))
}

/// Returns the lock that allows only one compilation with this key at a time.
fn compile_lock(key: &Key) -> Arc<Mutex<()>> {
    static LOCKS: Mutex<Option<HashMap<Key, Arc<Mutex<()>>>>> = Mutex::new(None);
    let mut locks = LOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    locks.get_or_insert_default().entry(key.clone()).or_default().clone()
}

/// Cache key of a compiled source: a hash of everything that determines the code. `version` is the
/// compiler's; it is `None` for the folder of kernels that is shipped with a program.
pub fn key(
    source: KernelSource<'_>,
    options: &Options,
    arch: &str,
    version: Option<(i32, i32)>,
) -> Key {
    // The headers are hashed only once per process, because they are most of the text and equal for
    // all kernels.
    static OF_HEADERS: OnceLock<[u8; 16]> = OnceLock::new();
    let headers = OF_HEADERS.get_or_init(|| {
        let texts = HEADERS.iter().flat_map(|header| [header.name, header.text]);
        iris_heap::fnv(&texts.map(str::as_bytes).collect::<Vec<_>>()).to_le_bytes()
    });
    let words = [fixed_options(Vendor::of(arch), arch), options.words()].concat();
    let version = format!("{version:?}");
    let words = words.iter().map(String::as_bytes);
    let others = [arch.as_bytes(), version.as_bytes()];
    let parts: Vec<&[u8]> =
        [source.text.as_bytes(), headers].into_iter().chain(words).chain(others).collect();
    Key::of(source.name, arch, &parts)
}
