//! The compiled device code: what the compilers make of each access, read instruction by
//! instruction. No GPU is needed.
//!
//! NVRTC compiles for NVIDIA's architectures, clang for AMD's. A probe is a kernel that makes one
//! access of the protocols to word 5 of some memory; its instructions must be exactly those of the
//! access' order and scope. All kernels are compiled too.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use iris_kernels::rtc::{Compiler, KernelSource, Options, TileBuild};
use iris_kernels::source::{HEADERS, KERNELS};
use iris_sync::{Access, Order, Scope};

/// Whose architecture, and whether a check without it is no check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arch {
    /// Its name: `sm_90a`, `gfx942`.
    pub name: &'static str,
    /// Whether it is required.
    pub required: bool,
}

/// All that are looked at.
pub const ARCHS: [Arch; 6] = [
    Arch { name: "sm_80", required: true },
    Arch { name: "sm_90a", required: true },
    Arch { name: "sm_100", required: false },
    Arch { name: "gfx90a", required: true },
    Arch { name: "gfx942", required: true },
    Arch { name: "gfx950", required: false },
];

/// What came of an architecture.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Everything compiled, and as it should be.
    Done {
        /// The compiler.
        compiler: String,
        /// Kernels compiled.
        kernels: usize,
        /// Accesses whose instructions were read.
        probes: usize,
    },
    /// There is no compiler for it; where it was looked for.
    Skipped(String),
    /// Something did not compile, or not to what it should be.
    Failed(String),
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

/// Compile everything for `arch`, with the headers as they are embedded, or those in `headers`.
pub fn check(arch: Arch, headers: Option<&Path>) -> Compiled {
    let start = Instant::now();
    let outcome =
        if arch.name.starts_with("sm_") { nvidia(arch.name) } else { amd(arch.name, headers) };
    let outcome = outcome.unwrap_or_else(Outcome::Failed);
    Compiled { arch, outcome, seconds: start.elapsed().as_secs_f64() }
}

/// The probes: a kernel an access.
pub fn probes() -> String {
    let mut text = String::from(
        "#include \"iris/sync.h\"\n\
         using namespace iris;\n\
         #define PROBE(name, what) IRIS_KERNEL probe_##name(IRIS_ARGS HeapView heap, \\\n\
         IRIS_ARGS Channel channel, i32* out) { \\\n\
         const Words m{heap, channel}; const SymWord sym = heap.word(1, 5); \\\n\
         const DevWord dev = heap.device_word(5); what; }\n",
    );
    for &access in Access::ALL {
        let name = access.name();
        let (word, dev) = match access.scope() {
            Scope::System => ("sym", ""),
            Scope::Device => ("dev", "dev_"),
        };
        text += &match Kind::of(access) {
            Kind::Load => format!("PROBE({name}, *out = m.{dev}load<Access::{name}>({word}))\n"),
            Kind::Store => format!("PROBE({name}, m.{dev}store<Access::{name}>({word}, 3))\n"),
            Kind::Add => format!("PROBE({name}, *out = m.{dev}add<Access::{name}>({word}, 3))\n"),
            Kind::CompareExchange => {
                format!("PROBE({name}, *out = m.compare_exchange<Access::{name}>({word}, 3, 4))\n")
            }
        };
    }
    text
}

/// Kernels that raise flags for other workgroups of their device: the only stores that release at
/// the scope of the device. In any other kernel such a store is one whose scope is too narrow.
const STAGED: [&str; 1] = ["all_gather_matmul.cu"];

/// Whether a store releases at the scope of the device, in the code of AMD.
fn releases_on_device(code: &str) -> bool {
    let mut released = false;
    code.lines().map(str::trim).any(|line| {
        let stores = line.starts_with("global_store") || line.starts_with("flat_store");
        let found = released && stores;
        if line.starts_with("buffer_wbl2") {
            released = line == "buffer_wbl2 sc1";
        } else if stores || line.starts_with("global_") || line.starts_with("flat_") {
            released = false;
        }
        found
    })
}

/// Kernels that reach no peer. All others must have an access of system scope.
const LOCAL: [&str; 2] = ["copy.cu", "matmul.cu"];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Load,
    Store,
    Add,
    CompareExchange,
}

impl Kind {
    fn of(access: Access) -> Self {
        match access.name() {
            "LockTake" => Kind::CompareExchange,
            "FinishAdd" => Kind::Add,
            name if name.ends_with("Load") => Kind::Load,
            _ => Kind::Store,
        }
    }
}

/// The instructions of `access` in PTX.
fn ptx(access: Access) -> Vec<String> {
    let order = match access.order() {
        Order::Relaxed => "relaxed",
        Order::Acquire => "acquire",
        Order::Release => "release",
        Order::AcqRel => "acq_rel",
    };
    let scope = if access.scope() == Scope::System { "sys" } else { "gpu" };
    vec![match Kind::of(access) {
        Kind::Load => format!("ld.{order}.{scope}.global.s32"),
        Kind::Store => format!("st.{order}.{scope}.global.s32"),
        Kind::Add => format!("atom.{order}.{scope}.global.add.u32"),
        Kind::CompareExchange => format!("atom.{order}.{scope}.global.cas.b32"),
    }]
}

/// The instructions of `access` on an architecture of AMD.
fn amd_code(access: Access, arch: &str) -> Vec<String> {
    let (kind, system) = (Kind::of(access), access.scope() == Scope::System);
    let releases = matches!(access.order(), Order::Release | Order::AcqRel);
    let acquires = matches!(access.order(), Order::Acquire | Order::AcqRel);
    let mut code = Vec::new();
    let old = arch == "gfx90a";
    let scope = if system { "sc0 sc1" } else { "sc1" };
    if releases && !old {
        code.push(format!("buffer_wbl2 {scope}"));
    } else if releases && system {
        code.push("buffer_wbl2".into());
    }
    // Of a read-modify-write, sc0 and glc say that the old value is returned.
    let (name, flags) = match (kind, old) {
        (Kind::Load, true) => ("global_load_dword", "glc"),
        (Kind::Load, false) => ("global_load_dword", scope),
        (Kind::Store, true) => ("global_store_dword", ""),
        (Kind::Store, false) => ("global_store_dword", scope),
        (Kind::Add, true) => ("global_atomic_add", "glc"),
        (Kind::CompareExchange, true) => ("global_atomic_cmpswap", "glc"),
        (Kind::Add, false) => ("global_atomic_add", if system { "sc0 sc1" } else { "sc0" }),
        (Kind::CompareExchange, false) => {
            ("global_atomic_cmpswap", if system { "sc0 sc1" } else { "sc0" })
        }
    };
    code.push(format!("{name} {flags}").trim_end().into());
    match (acquires, old) {
        (true, false) => code.push(format!("buffer_inv {scope}")),
        (true, true) => {
            code.extend(system.then(|| "buffer_invl2".into()));
            code.push("buffer_wbinvl1_vol".into());
        }
        (false, _) => {}
    }
    code
}

/// Compare the instructions of every probe; an error names all that differ.
fn compare(
    text: &str,
    found: impl Fn(&str, &str) -> Option<Vec<String>>,
    wanted: impl Fn(Access) -> Vec<String>,
) -> Result<usize, String> {
    let mut wrong = Vec::new();
    for &access in Access::ALL {
        let name = format!("probe_{}", access.name());
        let (found, wanted) = (found(text, &name), wanted(access));
        if found.as_ref() != Some(&wanted) {
            wrong.push(format!("{access:?} is {found:?}, expected {wanted:?}"));
        }
    }
    if wrong.is_empty() { Ok(Access::ALL.len()) } else { Err(wrong.join("; ")) }
}

/// The instructions of a PTX entry that name a scope.
fn scoped_ptx(text: &str, entry: &str) -> Option<Vec<String>> {
    let body = text.split(".entry ").find(|part| part.starts_with(&format!("{entry}(")))?;
    let first = |line: &str| line.split_whitespace().next().unwrap_or_default().to_string();
    let scoped = |word: &String| {
        word.split('.').any(|part| matches!(part, "sys" | "gpu" | "cta" | "cluster" | "volatile"))
            || word.starts_with("membar")
    };
    Some(body.lines().map(first).filter(scoped).collect())
}

/// The instructions of a kernel of AMD that touch word 5, write caches back or invalidate them.
fn scoped_amd(text: &str, entry: &str) -> Option<Vec<String>> {
    let start = text.find(&format!("\n{entry}:"))?;
    let body = &text[start..][..text[start..].find("s_endpgm")?];
    let mut code = Vec::new();
    for line in body.lines().map(str::trim) {
        let name = line.split_whitespace().next().unwrap_or_default();
        if name.starts_with("buffer_") {
            code.push(line.to_string());
        } else if let Some((_, flags)) = line.split_once("offset:20") {
            code.push(format!("{name} {}", flags.trim()).trim_end().to_string());
        }
    }
    Some(code)
}

/// Kernels are compiled for f16 and the smallest tile: the protocols in them are the same in all.
fn options() -> Options {
    let smallest = TileBuild::ALL[TileBuild::ALL.len() - 1];
    Options::op(1, smallest)
}

fn nvidia(arch: &str) -> Result<Outcome, String> {
    let compiler = match Compiler::nvrtc() {
        Ok(compiler) => compiler,
        Err(error) => return Ok(Outcome::Skipped(error.to_string())),
    };
    let text = |source: KernelSource<'_>, options: &Options| {
        let code = compiler.compile(source, options, &arch.replace("sm_", "compute_"));
        let code = code.map_err(|error| error.to_string())?;
        String::from_utf8(code).map_err(|error| error.to_string())
    };
    let source = probes();
    let probe = KernelSource { name: "probes.cu", text: &source };
    let probes = compare(&text(probe, &Options::new())?, scoped_ptx, ptx)?;
    for &kernel in KERNELS {
        let ptx = text(kernel.into(), &options())?;
        for wrong in ["ld.global.nc", "ldu.", "volatile", ".cta.", "membar"] {
            if ptx.contains(wrong) && !(wrong == ".cta." && only_shared_cta(&ptx)) {
                return Err(format!("{}: the PTX has {wrong}", kernel.name));
            }
        }
        if !ptx.contains(".sys.") && !LOCAL.contains(&kernel.name) {
            return Err(format!("{}: no access of system scope", kernel.name));
        }
        if ptx.contains("st.release.gpu") && !STAGED.contains(&kernel.name) {
            return Err(format!("{}: a store releases at device scope", kernel.name));
        }
        compiler.compile(kernel.into(), &options(), arch).map_err(|error| error.to_string())?;
    }
    let (major, minor) = compiler.version();
    let compiler = format!("NVRTC {major}.{minor}");
    Ok(Outcome::Done { compiler, kernels: KERNELS.len(), probes })
}

/// Whether scope `cta` stands only where shared memory is accessed.
fn only_shared_cta(ptx: &str) -> bool {
    ptx.lines().filter(|line| line.contains(".cta.")).all(|line| line.contains(".shared"))
}

/// Whether there is a clang to compile for AMD's architectures.
pub fn has_clang() -> bool {
    clang().is_some()
}

/// The first clang there is, with its version.
fn clang() -> Option<(&'static str, String)> {
    ["clang-19", "clang-20", "clang-21", "clang"].into_iter().find_map(|name| {
        let output = Command::new(name).arg("--version").stderr(Stdio::null()).output().ok()?;
        let version = String::from_utf8_lossy(&output.stdout).lines().next()?.to_string();
        output.status.success().then_some((name, version))
    })
}

fn amd(arch: &str, headers: Option<&Path>) -> Result<Outcome, String> {
    let Some((clang, version)) = clang() else {
        return Ok(Outcome::Skipped("no clang-19, clang-20, clang-21 or clang on the path".into()));
    };
    let failed = |error: std::io::Error| format!("{clang}: {error}");
    let folder = tempfile::tempdir().map_err(failed)?;
    let root = match headers {
        Some(root) => root.to_path_buf(),
        None => {
            std::fs::create_dir(folder.path().join("iris")).map_err(failed)?;
            for text in HEADERS.iter().chain(KERNELS) {
                std::fs::write(folder.path().join(text.name), text.text).map_err(failed)?;
            }
            folder.path().to_path_buf()
        }
    };
    let probe = folder.path().join("probes.cu");
    std::fs::write(&probe, probes()).map_err(failed)?;
    let text = |source: &PathBuf, options: &[String]| {
        let mut command = Command::new(clang);
        command.args(["-x", "hip", "-nogpuinc", "-nogpulib", "--cuda-device-only", "-O3"]);
        command.args(["-std=c++17", "-S", "-o", "-"]).arg(format!("--offload-arch={arch}"));
        command.args(options).arg("-I").arg(&root).arg(source);
        let output = command.stdin(Stdio::null()).output().map_err(failed)?;
        if !output.status.success() {
            let log = String::from_utf8_lossy(&output.stderr).into_owned();
            let unknown = log.contains("invalid target ID") || log.contains("unsupported HIP gpu");
            return if unknown { Ok(None) } else { Err(log) };
        }
        Ok(Some(String::from_utf8_lossy(&output.stdout).into_owned()))
    };
    let Some(code) = text(&probe, &[])? else {
        return Ok(Outcome::Skipped(format!("{version} does not know {arch}")));
    };
    let probes = compare(&code, scoped_amd, |access| amd_code(access, arch))?;
    let build = options();
    let defines: Vec<String> =
        build.defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
    for kernel in KERNELS {
        let code = text(&root.join(kernel.name), &defines)?.unwrap_or_default();
        let system = if arch == "gfx90a" { "buffer_invl2" } else { "buffer_inv sc0 sc1" };
        if !code.contains(system) && !LOCAL.contains(&kernel.name) {
            return Err(format!("{}: no acquire of system scope", kernel.name));
        }
        if releases_on_device(&code) && !STAGED.contains(&kernel.name) {
            return Err(format!("{}: a store releases at device scope", kernel.name));
        }
    }
    Ok(Outcome::Done { compiler: version, kernels: KERNELS.len(), probes })
}
