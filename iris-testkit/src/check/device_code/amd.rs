//! What clang makes of the device source for AMD's architectures.

use std::path::Path;
use std::process::{Command, Stdio};

use iris_sync::{Order, Scope};

use super::probes::{self, Kind, Probe, Rmw};
use super::{Finding, LOCAL, Outcome, STAGED, Source, compare, first_word, options};

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

pub(super) fn check(arch: &str, source: &Source) -> Outcome {
    let Some((clang, version)) = clang() else {
        return Outcome::Skipped("no clang-19, clang-20, clang-21 or clang on the path".into());
    };
    let failed = |what: String| Outcome::Failed(vec![Finding::new("type", what)]);
    let folder = match tempfile::tempdir() {
        Ok(folder) => folder,
        Err(error) => return failed(error.to_string()),
    };
    let mut findings = Vec::new();
    match (Checker { clang, arch, source, folder: folder.path() }).run(&mut findings) {
        Ok((probes, twice)) if findings.is_empty() => {
            Outcome::Done { compiler: version, kernels: source.kernels.len(), probes, twice }
        }
        Ok(_) => Outcome::Failed(findings),
        Err(log) if log.contains("invalid target ID") || log.contains("unsupported HIP gpu") => {
            Outcome::Skipped(format!("{version} does not know {arch}"))
        }
        Err(log) => {
            findings.push(Finding::new("type", log));
            Outcome::Failed(findings)
        }
    }
}

struct Checker<'a> {
    clang: &'a str,
    arch: &'a str,
    source: &'a Source,
    /// Where the source is written to.
    folder: &'a Path,
}

impl Checker<'_> {
    /// What `file` is compiled to, as text; an error is the compiler's log.
    fn compile(&self, file: &str, options: &[String]) -> Result<String, String> {
        let mut command = Command::new(self.clang);
        command.args(["-x", "hip", "-nogpuinc", "-nogpulib", "--cuda-device-only", "-O3"]);
        command.args(["-std=c++17", "-S", "-o", "-"]);
        command.arg(format!("--offload-arch={}", self.arch)).args(options);
        command.arg("-I").arg(self.folder).arg(self.folder.join(file));
        let output = command.stdin(Stdio::null()).output();
        let output = output.map_err(|error| format!("{}: {error}", self.clang))?;
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// How many probes were read in LLVM's language, and how many as instructions too.
    fn run(&self, findings: &mut Vec<Finding>) -> Result<(usize, usize), String> {
        let unwritten = |error: std::io::Error| format!("{}: {error}", self.folder.display());
        self.source.write_to(self.folder).map_err(unwritten)?;
        let probes = probes::all();
        let text = probes::source(&probes);
        std::fs::write(self.folder.join("probes.cu"), text).map_err(unwritten)?;
        let code = self.compile("probes.cu", &[])?;
        let twice = compare(
            "isa",
            findings,
            &probes,
            |entry| instructions(&code, entry),
            |probe| isa(probe, self.arch),
        );
        let language = self.compile("probes.cu", &["-emit-llvm".into()])?;
        let read = compare(
            "ir",
            findings,
            &probes,
            |entry| operations(&language, entry),
            |probe| Some(ir(probe)),
        );
        let defines = options().defines;
        let defines: Vec<String> =
            defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
        for (name, _) in &self.source.kernels {
            let code = self.compile(name, &defines)?;
            findings.extend(wrong_in(name, &code, self.arch).map(|what| Finding::new("isa", what)));
        }
        Ok((read, twice))
    }
}

/// The body of a kernel in the compiler's assembly.
fn body<'a>(code: &'a str, entry: &str) -> Option<&'a str> {
    let start = code.find(&format!("\n{entry}:"))?;
    Some(&code[start..][..code[start..].find("s_endpgm")?])
}

/// The instructions of a kernel that touch its word, write caches back or invalidate them.
pub(super) fn instructions(code: &str, entry: &str) -> Option<Vec<String>> {
    let mut found = Vec::new();
    for line in body(code, entry)?.lines().map(str::trim) {
        if line.starts_with("buffer_") {
            found.push(line.to_string());
        } else if let Some((_, flags)) = line.split_once("offset:24") {
            found.push(format!("{} {}", first_word(line), flags.trim()).trim_end().to_string());
        }
    }
    Some(found)
}

/// The instructions of a probe, where they do not depend on how the compiler composes them.
pub(super) fn isa(probe: &Probe, arch: &str) -> Option<Vec<String>> {
    let system = probe.scope == Scope::System;
    let releases = matches!(probe.order, Order::Release | Order::AcqRel);
    let acquires = matches!(probe.order, Order::Acquire | Order::AcqRel);
    let mut code = Vec::new();
    let old = arch == "gfx90a";
    let scope = if system { "sc0 sc1" } else { "sc1" };
    if releases && !old {
        code.push(format!("buffer_wbl2 {scope}"));
    } else if releases && system {
        code.push("buffer_wbl2".into());
    }
    // Of a read-modify-write, sc0 and glc say that the old value is returned.
    let rmw = if system { "sc0 sc1" } else { "sc0" };
    let (name, flags) = match (probe.kind, old) {
        (Kind::Load, true) => ("load_dword", "glc"),
        (Kind::Load, false) => ("load_dword", scope),
        (Kind::Store, true) => ("store_dword", ""),
        (Kind::Store, false) => ("store_dword", scope),
        (Kind::Rmw(Rmw::Add), true) => ("atomic_add", "glc"),
        (Kind::Rmw(Rmw::Exchange), true) => ("atomic_swap", "glc"),
        (Kind::CompareExchange, true) => ("atomic_cmpswap", "glc"),
        (Kind::Rmw(Rmw::Add), false) => ("atomic_add", rmw),
        (Kind::Rmw(Rmw::Exchange), false) => ("atomic_swap", rmw),
        (Kind::CompareExchange, false) => ("atomic_cmpswap", rmw),
        (Kind::Fence, _) => ("", ""),
        // Other operations may be loops of exchanges, on memory whose kind is not known.
        (Kind::Rmw(_) | Kind::AddF32 | Kind::KeepFault, _) => return None,
    };
    let wide = match (probe.wide, name.ends_with("dword")) {
        (true, true) => "x2",
        (true, false) => "_x2",
        (false, _) => "",
    };
    if !name.is_empty() {
        code.push(format!("global_{name}{wide} {flags}").trim_end().into());
    }
    match (acquires, old) {
        (true, false) => code.push(format!("buffer_inv {scope}")),
        (true, true) => {
            code.extend(system.then(|| "buffer_invl2".into()));
            code.push("buffer_wbinvl1_vol".into());
        }
        (false, _) => {}
    }
    Some(code)
}

/// The atomic operations of a kernel in LLVM's language: what, at which scope, in which order.
fn operations(text: &str, entry: &str) -> Option<Vec<String>> {
    let start = text.find(&format!(" @{entry}("))?;
    let body = &text[start..][..text[start..].find("\n}")?];
    let mut found = Vec::new();
    for line in body.lines().skip(1) {
        let line = line.split_once(" = ").map_or(line, |(_, right)| right).trim();
        let mut words = line.split_whitespace();
        let what = match (words.next(), words.next()) {
            (Some("load"), Some("atomic")) => "load".to_string(),
            (Some("store"), Some("atomic")) => "store".into(),
            (Some("atomicrmw"), Some(what)) => what.into(),
            (Some("cmpxchg"), _) => "cmpxchg".into(),
            (Some("fence"), _) => "fence".into(),
            _ => continue,
        };
        // Of one address space or of all: words and the data they order are both global.
        let scope = line.split_once("syncscope(\"").map_or("", |(_, right)| right);
        let scope = scope.split('"').next().unwrap_or_default();
        let scope = if scope.starts_with("agent") {
            "agent"
        } else if matches!(scope, "" | "one-as") {
            "system"
        } else {
            scope
        };
        let orders = ["monotonic", "acquire", "release", "acq_rel", "seq_cst"];
        let order = line.split([' ', ',']).find(|word| orders.contains(word));
        found.push(format!("{what} {scope} {}", order.unwrap_or("without an order")));
    }
    Some(found)
}

/// The operations of a probe.
fn ir(probe: &Probe) -> Vec<String> {
    let order = match probe.order {
        Order::Relaxed => "monotonic",
        Order::Acquire => "acquire",
        Order::Release => "release",
        Order::AcqRel => "acq_rel",
    };
    let scope = if probe.scope == Scope::System { "system" } else { "agent" };
    let one = |what: &str| vec![format!("{what} {scope} {order}")];
    match probe.kind {
        Kind::Load => one("load"),
        Kind::Store => one("store"),
        Kind::Rmw(Rmw::Add) => one("add"),
        Kind::Rmw(Rmw::Exchange) => one("xchg"),
        Kind::Rmw(Rmw::And) => one("and"),
        Kind::Rmw(Rmw::Or) => one("or"),
        Kind::Rmw(Rmw::Xor) => one("xor"),
        Kind::Rmw(Rmw::Min) => one("min"),
        Kind::Rmw(Rmw::Max) => one("max"),
        Kind::CompareExchange => one("cmpxchg"),
        Kind::Fence => one("fence"),
        Kind::AddF32 => [one("load"), one("cmpxchg")].concat(),
        Kind::KeepFault => {
            let mut all = one("cmpxchg");
            all.extend(vec!["store system monotonic".to_string(); 8]);
            all.push("store system release".into());
            all
        }
    }
}

/// What must not be in the code of a kernel.
fn wrong_in(name: &str, code: &str, arch: &str) -> impl Iterator<Item = String> {
    let mut wrong = Vec::new();
    let system = if arch == "gfx90a" { "buffer_invl2" } else { "buffer_inv sc0 sc1" };
    if !code.contains(system) && !LOCAL.contains(&name) {
        wrong.push(format!("{name}: no acquire of system scope"));
    }
    // On gfx90a a release at the scope of the device leaves no trace.
    let mut entry = "";
    let mut released = false;
    for line in code.lines().map(str::trim) {
        if let Some(label) = line.split(':').next().filter(|label| label.starts_with("iris_")) {
            entry = label;
        }
        let stores = line.starts_with("global_store") || line.starts_with("flat_store");
        if stores && released && entry != STAGED {
            wrong.push(format!("{name}: a store of {entry} releases at device scope"));
        }
        if line.starts_with("buffer_wbl2") {
            released = line == "buffer_wbl2 sc1";
        } else if stores || line.starts_with("global_") || line.starts_with("flat_") {
            released = false;
        }
    }
    wrong.into_iter()
}
