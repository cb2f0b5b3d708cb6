//! Checks of compiled device code: the instructions that each compiler makes of each access. No GPU
//! is needed.
//!
//! NVRTC compiles for NVIDIA architectures, clang for AMD architectures, and hiprtc too if it is
//! installed. A probe is a kernel that makes one access of the protocols, or one operation of the
//! port, to a word of memory. Its compiled code is checked twice, on two independent levels:
//!
//! | check | what is compared |
//! |---|---|
//! | `ptx` | the instructions of PTX, with their order and scope |
//! | `machine code` | the bytes of the cubin with those of NVIDIA's own atomic functions |
//! | `ir` | the operations of LLVM IR, with their order and scope |
//! | `isa` | the instructions for the AMD architecture, with their cache flags and fences |
//!
//! All kernels are compiled too, and must not contain instructions that no access of the protocols
//! compiles to.

mod amd;
mod hiprtc;
mod nvidia;
mod probes;
mod resources;
mod turns;
mod ways;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

use iris_kernels::cache::{Key, in_build};
use iris_kernels::gemm_config::{TileConfig, TileSize};
use iris_kernels::rtc::{KernelSource, Options};
use iris_kernels::source::{GEMMS, HEADERS, KERNELS};

pub use amd::{has_clang, resources};
pub use resources::Resources;

/// GPU architecture, and whether its check is required.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arch {
    /// Name, such as `sm_90a` or `gfx942`.
    pub name: &'static str,
    /// Whether it is a failure if the compiler for this architecture is missing.
    pub required: bool,
}

/// Architectures whose device code is checked.
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

/// Difference between the compiled code and the code that the protocols require.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// Check that found the difference: `ptx`, `machine code`, `ir`, `isa`, or `type` if the source
    /// does not compile.
    pub by: &'static str,
    /// Description of the difference.
    pub what: String,
}

impl Finding {
    fn new(by: &'static str, what: impl Into<String>) -> Self {
        Self { by, what: what.into() }
    }
}

/// Result of the checks of one architecture's device code.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// All probes and kernels were compiled and checked.
    Done {
        /// Name and version of the compiler.
        compiler: String,
        /// Number of kernels that were compiled.
        kernels: usize,
        /// Number of probes whose instructions were read.
        probes: usize,
        /// Number of these probes that were also compared in a lower form: as machine code on
        /// NVIDIA, as instructions instead of LLVM IR on AMD.
        twice: usize,
    },
    /// No compiler was found; the text says where the check looked for one.
    Skipped(String),
    /// The source did not compile, or compiled to code that is not the expected one.
    Failed(Vec<Finding>),
}

/// Result of an architecture with its run time.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Architecture that was checked.
    pub arch: Arch,
    /// Result of the checks.
    pub outcome: Outcome,
    /// Run time in seconds.
    pub seconds: f64,
}

/// Device source to check: file names and texts.
#[derive(Clone, Debug)]
pub struct DeviceSource {
    /// Headers that the kernels include.
    pub headers: Vec<(&'static str, String)>,
    /// Kernels, one source file per op.
    pub kernels: Vec<(&'static str, String)>,
    /// Whole-matrix GEMM kernels, each for one architecture.
    pub gemms: Vec<(&'static str, String)>,
    /// Whether to check that the PTX of kernels can be assembled. The assembled kernels are not
    /// read, so only a check of the compilers needs this.
    pub assembled: bool,
}

impl DeviceSource {
    /// Device source that is embedded in the crate iris-kernels.
    pub fn embedded() -> Self {
        let all = |texts: &[iris_kernels::source::Text]| {
            texts.iter().map(|text| (text.name, text.text.to_string())).collect()
        };
        Self { headers: all(HEADERS), kernels: all(KERNELS), gemms: all(GEMMS), assembled: true }
    }

    /// Writes all files to a folder, for use as a compiler's include path.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn write_to(&self, folder: &Path) -> std::io::Result<()> {
        self.headers.iter().chain(&self.kernels).chain(&self.gemms).try_for_each(|(name, text)| {
            let path = folder.join(name);
            path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
            std::fs::write(path, text)
        })
    }

    /// Returns `text` followed by every header that it includes, directly or indirectly: all that
    /// determines the compiled code.
    fn with_included(&self, text: &str) -> String {
        let mut seen = BTreeSet::new();
        let mut whole = text.to_string();
        let mut begin = 0;
        while begin < whole.len() {
            let quoted = |line: &str| {
                let directive = line.trim_start().strip_prefix('#')?.trim_start();
                let name = directive.strip_prefix("include")?.split('"').nth(1)?;
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

    /// Result of `compile`, which compiles `text`, the file `name`, for `arch`; kept in the build
    /// folder. `options` must contain everything else that determines the result, such as the
    /// compiler's version.
    fn compiled<E>(
        &self,
        (name, text): (&str, &str),
        arch: &str,
        options: &str,
        compile: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Vec<u8>, E> {
        let text = self.with_included(text);
        let key = Key::of(name, arch, &[text.as_bytes(), options.as_bytes()]);
        in_build(&key, compile)
    }

    /// Source without the headers that a compilation for `arch` never includes, so that an edit of
    /// these compiles nothing again. A compilation that includes one fails, since it is not there.
    fn for_arch(&self, arch: &str) -> Self {
        let others: &[&str] = match arch.starts_with("sm_") {
            true => &["iris/port_host.h", "iris/port_hip.h", "iris/gemm/cdna"],
            false => &["iris/port_host.h", "iris/port_cuda.h", "iris/gemm/sm"],
        };
        let mut source = self.clone();
        source.headers.retain(|(name, _)| !others.iter().any(|other| name.starts_with(other)));
        source
    }

    fn headers(&self) -> Vec<KernelSource<'_>> {
        self.headers.iter().map(|(name, text)| KernelSource { name, text }).collect()
    }
}

/// Compiles `source` for `arch` and checks the result.
pub fn check(arch: Arch, source: &DeviceSource) -> Compiled {
    let start = Instant::now();
    let source = source.for_arch(arch.name);
    let outcome = match arch.name.strip_suffix(" by hiprtc") {
        Some(name) => hiprtc::check(name, &source),
        None if arch.name.starts_with("sm_") => nvidia::check(arch.name, &source),
        None => amd::check(arch.name, &source),
    };
    Compiled { arch, outcome, seconds: start.elapsed().as_secs_f64() }
}

/// Kernels that access no peer. All other kernels must contain an access at system scope.
const LOCAL: [&str; 2] = ["copy.cu", "matmul.cu"];

/// Kernel entries that raise a flag for other workgroups of their device, and kernel entries that
/// poll or read such a flag. Except for `FinishAdd`, only the former may release at device scope,
/// and only the latter may acquire at device scope.
const RAISE_FLAGS: [&str; 2] = ["iris_staged", "iris_open"];
const READ_FLAGS: [&str; 4] = ["iris_staged", "iris_copies", "iris_blocks", "iris_results"];

/// Compiler options for f16 and the smallest tile; the protocols are the same for every type and
/// tile. Counters are on, because builds without counters contain a subset of the code.
fn options(arch: &str) -> Options {
    let smallest = TileSize::ALL[TileSize::ALL.len() - 1];
    TileConfig::of(arch, 1, smallest).options().define("IRIS_OBSERVED", 1)
}

/// First word of a line.
fn first_word(line: &str) -> &str {
    line.split_whitespace().next().unwrap_or_default()
}

/// Adds a finding for each probe whose code differs from the `wanted` code, and returns the number
/// of probes that were compared. Probes without `wanted` code are skipped.
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
