//! The compiled device code: what the compilers make of each access, read instruction by
//! instruction. No GPU is needed.
//!
//! NVRTC compiles for NVIDIA's architectures, clang for AMD's, and hiprtc where it is there. A probe is a kernel that makes one
//! access of the protocols, or one operation of the port, to a word of some memory. What becomes of
//! it is looked at twice, on two levels that know nothing of each other:
//!
//! | check | what is compared |
//! |---|---|
//! | `ptx` | the instructions of PTX, with their order and scope |
//! | `machine code` | the bytes of the cubin with those of NVIDIA's own atomic functions |
//! | `ir` | the operations of LLVM's language, with their order and scope |
//! | `isa` | the instructions for AMD's architecture, with their cache flags and fences |
//!
//! All kernels are compiled too, and must not contain what no access of theirs is compiled to.

mod amd;
mod hiprtc;
mod nvidia;
mod probes;
mod resources;
mod turns;
mod ways;

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use iris_kernels::gemm_config::{TileConfig, TileSize};
use iris_kernels::rtc::{KernelSource, Options};
use iris_kernels::source::{GEMMS, HEADERS, KERNELS};

pub use amd::{has_clang, resources};
pub use resources::Resources;

/// Whose architecture, and whether a check without it is no check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arch {
    /// Its name: `sm_90a`, `gfx942`.
    pub name: &'static str,
    /// Whether it is required.
    pub required: bool,
}

/// All that are looked at.
pub const ARCHS: [Arch; 9] = [
    Arch { name: "sm_80", required: true },
    Arch { name: "sm_90a", required: true },
    Arch { name: "sm_100", required: false },
    Arch { name: "gfx90a", required: true },
    Arch { name: "gfx942", required: true },
    Arch { name: "gfx950", required: false },
    Arch { name: "gfx90a by hiprtc", required: false },
    Arch { name: "gfx942 by hiprtc", required: false },
    Arch { name: "gfx950 by hiprtc", required: false },
];

/// Something that is not as it should be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Which check found it: `ptx`, `machine code`, `ir`, `isa`, or `type`, if it does not compile.
    pub by: &'static str,
    /// What it found.
    pub what: String,
}

impl Finding {
    fn new(by: &'static str, what: impl Into<String>) -> Self {
        Self { by, what: what.into() }
    }
}

/// What came of an architecture.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Everything compiled, and as it should be.
    Done {
        /// The compiler.
        compiler: String,
        /// Kernels compiled.
        kernels: usize,
        /// Accesses and operations whose instructions were read.
        probes: usize,
        /// Those of them that were compared on the second level too.
        twice: usize,
    },
    /// There is no compiler for it; where it was looked for.
    Skipped(String),
    /// Something did not compile, or not to what it should be.
    Failed(Vec<Finding>),
}

/// What came of an architecture, and how long it took.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Which.
    pub arch: Arch,
    /// What came of it.
    pub outcome: Outcome,
    /// Seconds.
    pub seconds: f64,
}

/// The device source that is checked: files by name.
#[derive(Clone, Debug)]
pub struct Source {
    /// What kernels include.
    pub headers: Vec<(&'static str, String)>,
    /// The kernels, one source an op.
    pub kernels: Vec<(&'static str, String)>,
    /// Products of whole matrices, for one architecture.
    pub gemms: Vec<(&'static str, String)>,
}

impl Source {
    /// The source as it is embedded in iris-kernels.
    pub fn embedded() -> Self {
        let all = |texts: &[iris_kernels::source::Text]| {
            texts.iter().map(|text| (text.name, text.text.to_string())).collect()
        };
        Self { headers: all(HEADERS), kernels: all(KERNELS), gemms: all(GEMMS) }
    }

    /// Write all files to a folder, so that it can be a compiler's include path.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn write_to(&self, folder: &Path) -> std::io::Result<()> {
        self.headers.iter().chain(&self.kernels).chain(&self.gemms).try_for_each(|(name, text)| {
            let path = folder.join(name);
            path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
            std::fs::write(path, text)
        })
    }

    /// `text` and, behind it, every header that it includes or that those include: all that decides
    /// what a compiler makes of it.
    fn with_included(&self, text: &str) -> String {
        let mut seen = BTreeSet::new();
        let mut whole = text.to_string();
        let mut begin = 0;
        while begin < whole.len() {
            let quoted = |line: &str| {
                let name = line.trim().strip_prefix("#include \"")?.split('"').next()?;
                self.headers.iter().find(|(header, _)| *header == name)
            };
            let found: Vec<_> = whole[begin..].lines().filter_map(quoted).collect();
            begin = whole.len();
            for (name, text) in found {
                if seen.insert(*name) {
                    whole += &format!("\n// {name}\n{text}");
                }
            }
        }
        whole
    }

    fn headers(&self) -> Vec<KernelSource<'_>> {
        self.headers.iter().map(|(name, text)| KernelSource { name, text }).collect()
    }
}

/// Compile `source` for `arch` and read what came out.
pub fn check(arch: Arch, source: &Source) -> Compiled {
    let start = Instant::now();
    let outcome = match arch.name.strip_suffix(" by hiprtc") {
        Some(name) => hiprtc::check(name, source),
        None if arch.name.starts_with("sm_") => nvidia::check(arch.name, source),
        None => amd::check(arch.name, source),
    };
    Compiled { arch, outcome, seconds: start.elapsed().as_secs_f64() }
}

/// Kernels that reach no peer. All others must have an access of system scope.
const LOCAL: [&str; 2] = ["copy.cu", "matmul.cu"];

/// The entries that raise a flag for others of their device, and those that wait for one or read one: only
/// there something is released, or acquired, at the scope of the device by other accesses than `FinishAdd`.
const RAISE_FLAGS: [&str; 2] = ["iris_staged", "iris_open"];
const READ_FLAGS: [&str; 4] = ["iris_staged", "iris_copies", "iris_blocks", "iris_results"];

/// Kernels are compiled for f16 and the smallest tile: the protocols in them are the same in all; and
/// observed, since others have less of the same.
fn options(arch: &str) -> Options {
    let smallest = TileSize::ALL[TileSize::ALL.len() - 1];
    TileConfig::of(arch, 1, smallest).options().define("IRIS_OBSERVED", 1)
}

/// What was compiled before in this process, by the compiler's words and all of the text. Sources that
/// differ in few files, as those with planted faults do, have most of their probes in common.
struct Compilations(Mutex<Option<HashMap<Words, Arc<Vec<u8>>>>>);

/// The compiler's words, and the text.
type Words = (String, String);

impl Compilations {
    const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// What `compile` makes of `text` of `source`, unless it was asked before. What does not compile is
    /// asked again.
    fn once<E>(
        &self,
        words: String,
        (source, text): (&Source, &str),
        compile: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Arc<Vec<u8>>, E> {
        let known = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (words, source.with_included(text));
        if let Some(code) = known().get_or_insert_default().get(&key) {
            return Ok(code.clone());
        }
        let code = Arc::new(compile()?);
        known().get_or_insert_default().insert(key, code.clone());
        Ok(code)
    }
}

/// The first word of a line.
fn first_word(line: &str) -> &str {
    line.split_whitespace().next().unwrap_or_default()
}

/// The findings of one check where a probe is not compiled to what is `wanted`; none wanted is not
/// compared. Returns how many were.
fn compare(
    by: &'static str,
    findings: &mut Vec<Finding>,
    probes: &[probes::Probe],
    found: impl Fn(&str) -> Option<Vec<String>>,
    wanted: impl Fn(&probes::Probe) -> Option<Vec<String>>,
) -> usize {
    let mut compared = 0;
    for probe in probes {
        let Some(wanted) = wanted(probe) else { continue };
        let found = found(&format!("probe_{}", probe.name));
        if found.as_ref() != Some(&wanted) {
            let name = &probe.name;
            findings.push(Finding::new(by, format!("{name} is {found:?}, expected {wanted:?}")));
        }
        compared += 1;
    }
    compared
}
