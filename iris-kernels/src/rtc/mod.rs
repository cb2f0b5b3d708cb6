//! Compiling device source at run time, by NVRTC or hiprtc, with a cache on disk.
//!
//! **Problem.** One source has to become machine code for whatever device is there, in programs that
//! must also start where no compiler of a vendor is installed.
//!
//! **Solution.** The vendor's compiler is a library that is looked for when it is first needed, in
//! the places where it is known to be; its functions are called by name. What it made is kept.
//!
//! **Running.** [`compile`] does it all: from a source of [`crate::source`], or one's own that
//! includes `"iris/sym.h"` and `"iris/sync.h"`, to a cubin or code object. The first time that takes
//! seconds; a line on stderr says so.
//!
//! **Debugging.** An error of the compiler carries its log; a compiler that is missing, every place
//! that was looked at.
//!
//! **Limits.** A cubin runs on the architecture it was made for, no other.

mod api;
mod clang;
pub(crate) mod error;
mod hiprtc;
mod nvrtc;
pub(crate) mod search;
mod slow;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

pub use error::{Error, Result};

use crate::cache::{self, Cache, Key};
use crate::source::{HEADERS, Text};
use api::{Api, Made};
use clang::Clang;

/// Whose compiler.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Vendor {
    /// NVRTC.
    Nvidia,
    /// hiprtc, or clang.
    Amd,
}

impl Vendor {
    /// Whose an architecture is, by its name: `gfx942` is AMD's, all others are NVIDIA's.
    pub fn of(arch: &str) -> Self {
        if arch.starts_with("gfx") { Vendor::Amd } else { Vendor::Nvidia }
    }
}

/// A source to compile, with a name for messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelSource<'a> {
    /// What messages call it: a file name.
    pub name: &'a str,
    /// Its text. It may include the headers of [`crate::source::HEADERS`].
    pub text: &'a str,
}

impl From<Text> for KernelSource<'static> {
    fn from(text: Text) -> Self {
        Self { name: text.name, text: text.text }
    }
}

impl<'a> From<&'a str> for KernelSource<'a> {
    /// A source without a name of its own.
    fn from(text: &'a str) -> Self {
        Self { name: "source.cu", text }
    }
}

/// What a source is compiled with.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// Macros and their values, in the order given.
    pub defines: Vec<(String, String)>,
    /// Further options, passed on as they are.
    pub arguments: Vec<String>,
}

impl Options {
    /// None.
    pub fn new() -> Self {
        Self::default()
    }

    /// Add a macro.
    #[must_use]
    pub fn define(mut self, name: &str, value: impl ToString) -> Self {
        self.defines.push((name.into(), value.to_string()));
        self
    }

    /// Add an option of the compiler.
    #[must_use]
    pub fn argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// The options as the compilers of both vendors take them.
    pub(crate) fn words(&self) -> Vec<String> {
        let defines = self.defines.iter().map(|(name, value)| format!("-D{name}={value}"));
        defines.chain(self.arguments.iter().cloned()).collect()
    }
}

/// A compiler that was found.
#[derive(Debug)]
pub struct Compiler {
    vendor: Vendor,
    tool: Tool,
    version: (i32, i32),
}

/// How a compiler is called.
#[derive(Debug)]
enum Tool {
    Library(Api),
    Program(Clang),
}

impl Compiler {
    /// NVRTC, loaded the first time.
    ///
    /// # Errors
    /// [`Error::NotFound`] says where it was looked for.
    pub fn nvrtc() -> Result<&'static Compiler> {
        static LOADED: OnceLock<Result<Compiler>> = OnceLock::new();
        LOADED.get_or_init(nvrtc::load).as_ref().map_err(Error::clone)
    }

    /// hiprtc, loaded the first time.
    ///
    /// # Errors
    /// [`Error::NotFound`] says where it was looked for.
    pub fn hiprtc() -> Result<&'static Compiler> {
        static LOADED: OnceLock<Result<Compiler>> = OnceLock::new();
        LOADED.get_or_init(hiprtc::load).as_ref().map_err(Error::clone)
    }

    /// clang for AMD's architectures, looked for the first time.
    ///
    /// # Errors
    /// [`Error::NotFound`] says where it was looked for.
    pub fn clang() -> Result<&'static Compiler> {
        static FOUND: OnceLock<Result<Compiler>> = OnceLock::new();
        let find = || {
            let clang = Clang::find()?;
            let version = clang.version;
            Ok(Compiler::new(Vendor::Amd, Tool::Program(clang), version))
        };
        FOUND.get_or_init(find).as_ref().map_err(Error::clone)
    }

    /// The vendor's compiler for an architecture. AMD's is hiprtc, or clang where that is missing or older
    /// than the architecture.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Architecture`] if hiprtc is too old and there is no clang.
    pub fn of(vendor: Vendor, arch: &str) -> Result<&'static Compiler> {
        if vendor == Vendor::Nvidia {
            return Self::nvrtc();
        }
        let hiprtc = Self::hiprtc();
        match &hiprtc {
            Ok(compiler) if compiler.knows(arch) => return hiprtc,
            // Who says which one it is to be is told that it is not there.
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

    /// Whether it can be asked for an architecture at all. Of those that it does not have, a compiler says
    /// so; but hiprtc ends the process.
    pub fn knows(&self, arch: &str) -> bool {
        match (&self.tool, self.vendor) {
            (Tool::Library(_), Vendor::Amd) => hiprtc::knows(self.version, arch),
            _ => true,
        }
    }

    /// Its name and version.
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

    /// Major and minor version; of hiprtc the release of ROCm, and what its runtime has behind that.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The library's file, or the program's.
    pub fn path(&self) -> &Path {
        match &self.tool {
            Tool::Library(api) => api.path(),
            Tool::Program(clang) => clang.program(),
        }
    }

    /// Compile for an architecture (`sm_90a`, `gfx942`), without the cache. With `compute_90a` the
    /// result is PTX, as text.
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

    /// The same with other headers than those of [`crate::source::HEADERS`].
    ///
    /// # Errors
    /// As [`Self::compile`].
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

    /// PTX and machine code of one compilation, for an architecture of NVIDIA's as `sm_90a`.
    ///
    /// # Errors
    /// As [`Self::compile`].
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
    ) -> Result<Made> {
        let mut words = match self.vendor {
            Vendor::Nvidia => nvrtc::fixed(arch),
            Vendor::Amd => hiprtc::fixed(arch),
        };
        words.extend(options.words());
        match &self.tool {
            Tool::Library(api) => api.compile(source, headers, &words, arch),
            Tool::Program(clang) => {
                let code = clang.compile(source, headers, &words, arch)?;
                Ok(Made { text: Vec::new(), code })
            }
        }
    }
}

/// Compile for an architecture, or take what was compiled before: from the folder that a program
/// carries with it, which does not ask for a compiler at all, or from the cache.
///
/// # Errors
/// [`Error::NotFound`] for a missing compiler, [`Error::Compile`] with its log, [`Error::Cache`] for
/// a cache folder that others can write.
pub fn compile(
    vendor: Vendor,
    source: KernelSource<'_>,
    options: &Options,
    arch: &str,
) -> Result<Vec<u8>> {
    if let Some(carried) = cache::carried()
        && let Some(code) = carried.get(&key(source, options, arch, None))
    {
        return Ok(code);
    }
    let compiler = Compiler::of(vendor, arch)?;
    let cache = Cache::of_user()?;
    let key = key(source, options, arch, Some(compiler.version));
    // Ranks that are threads ask for the same at the same time: one compiles, the others wait for it.
    let turn = turn(&key);
    let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(code) = cache.get(&key) {
        return Ok(code);
    }
    let say = || {
        let (name, words) = (source.name, options.words().join(" "));
        let folder = cache.folder().display();
        slow::to_stderr(&format!(
            "iris: compiling {name} for {arch} ({words}); it will be kept in {folder}"
        ));
    };
    let code = slow::telling(SLOW, say, || compiler.compile(source, options, arch))?;
    cache.put(&key, &code)?;
    Ok(code)
}

/// Whose turn it is to compile what has this key.
fn turn(key: &Key) -> Arc<Mutex<()>> {
    static TURNS: Mutex<Option<HashMap<Key, Arc<Mutex<()>>>>> = Mutex::new(None);
    let mut turns = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    turns.get_or_insert_default().entry(key.clone()).or_default().clone()
}

/// What compiles for so long is told of.
const SLOW: Duration = Duration::from_secs(1);

/// The name of a compiled source: by everything that it depends on. Without a version it is the
/// name in a folder that a program carries with it.
pub fn key(
    source: KernelSource<'_>,
    options: &Options,
    arch: &str,
    version: Option<(i32, i32)>,
) -> Key {
    // The headers are most of what is hashed, and the same for all kernels.
    static OF_HEADERS: OnceLock<[u8; 16]> = OnceLock::new();
    let headers = OF_HEADERS.get_or_init(|| {
        let texts = HEADERS.iter().flat_map(|header| [header.name, header.text]);
        iris_heap::fnv(&texts.map(str::as_bytes).collect::<Vec<_>>()).to_le_bytes()
    });
    let (words, version) = (options.words(), format!("{version:?}"));
    let words = words.iter().map(String::as_bytes);
    let others = [arch.as_bytes(), version.as_bytes()];
    let parts: Vec<&[u8]> =
        [source.text.as_bytes(), headers].into_iter().chain(words).chain(others).collect();
    Key::new(source.name, arch, iris_heap::fnv(&parts))
}
