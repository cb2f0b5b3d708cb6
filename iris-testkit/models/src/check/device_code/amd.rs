//! Checks of the code that clang compiles from the device source for AMD architectures. This file
//! is long because instructions, LLVM IR and resources are each compared with what is expected.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use iris_kernels::gemm_config::TileSize;
use iris_sync::{Order, Scope};

use super::probes::{self, Kind, Probe, Rmw};
use super::resources::{self, Resources};
use super::ways::Ways;
use super::{DeviceSource, Finding, LOCAL, Outcome, RAISE_FLAGS, compare, first_word, options};

/// Whether a clang that can compile for AMD architectures is installed.
pub fn has_clang() -> bool {
    clang().is_some()
}

/// Name and version of the first clang in this list that is installed, asked for once.
fn clang() -> Option<(&'static str, String)> {
    static FOUND: OnceLock<Option<(&str, String)>> = OnceLock::new();
    let ask = |name| {
        let output = Command::new(name).arg("--version").stderr(Stdio::null()).output().ok()?;
        let version = String::from_utf8_lossy(&output.stdout).lines().next()?.to_string();
        output.status.success().then_some((name, version))
    };
    let names = ["clang-19", "clang-20", "clang-21", "clang"];
    FOUND.get_or_init(|| names.into_iter().find_map(ask)).clone()
}

pub(super) fn check(arch: &str, source: &DeviceSource) -> Outcome {
    let Some((clang, version)) = clang() else {
        return Outcome::Skipped("no clang-19, clang-20, clang-21 or clang on the path".into());
    };
    let failed = |what: String| Outcome::Failed(vec![Finding::new("type", what)]);
    let folder = match tempfile::tempdir() {
        Ok(folder) => folder,
        Err(error) => return failed(error.to_string()),
    };
    let mut findings = Vec::new();
    let checker = Checker { clang, version: &version, arch, source, folder: folder.path() };
    match checker.run(&mut findings) {
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

/// Resources of a compute unit of `arch` that every kernel needs, in the builds that ops request:
/// bf16 GEMMs with the largest and the smallest tile.
///
/// # Errors
/// A missing compiler, or the compiler's log.
pub fn resources(arch: &str) -> Result<Vec<Resources>, String> {
    let (clang, version) = clang().ok_or("no clang-19, clang-20, clang-21 or clang on the path")?;
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let source = DeviceSource::embedded();
    source.write_to(folder.path()).map_err(|error| error.to_string())?;
    let checker =
        Checker { clang, version: &version, arch, source: &source, folder: folder.path() };
    let (largest, smallest) = (TileSize::ALL[0], TileSize::ALL[TileSize::ALL.len() - 1]);
    let mut all = Vec::new();
    for build in iris_kernels::ahead_of_time::builds(arch) {
        let options = &build.options;
        let is_bf16 = options.defines.contains(&("IRIS_FACTOR".into(), "2".into()));
        let label = match build.tile {
            Some(tile) if is_bf16 && (tile.size == largest || tile.size == smallest) => {
                format!("{}, bf16, {} x {}", build.source.name, tile.size.m, tile.size.n)
            }
            Some(_) => continue,
            None => build.source.name.to_string(),
        };
        let defines = options.defines.iter().map(|(name, value)| format!("-D{name}={value}"));
        let (name, text) = (build.source.name, build.source.text);
        let code = checker.compile((name, text), &defines.collect::<Vec<_>>())?;
        let found = resources::read(&code).into_iter();
        all.extend(found.map(|kernel| Resources { build: label.clone(), ..kernel }));
    }
    Ok(all)
}

struct Checker<'a> {
    clang: &'a str,
    version: &'a str,
    arch: &'a str,
    source: &'a DeviceSource,
    /// Folder to which the source is written before it is compiled.
    folder: &'a Path,
}

impl Checker<'_> {
    /// Compiles `text`, the file `file`, and returns the compiler's text output, or its log as the
    /// error.
    fn compile(&self, (file, text): (&str, &str), options: &[String]) -> Result<String, String> {
        let mut command = Command::new(self.clang);
        command.args(["-x", "hip", "-nogpuinc", "-nogpulib", "--cuda-device-only", "-O3"]);
        command.args(["-std=c++17", "-S", "-o", "-"]);
        command.arg(format!("--offload-arch={}", self.arch)).args(options);
        let words = format!("{} {:?}", self.version, command.get_args());
        let code = self.source.compiled((file, text), self.arch, &words, || {
            let path = self.folder.join(file);
            std::fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
            command.arg("-I").arg(self.folder).arg(path);
            let output = command.stdin(Stdio::null()).output();
            let output = output.map_err(|error| format!("{}: {error}", self.clang))?;
            match output.status.success() {
                true => Ok(output.stdout),
                false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
            }
        })?;
        Ok(String::from_utf8_lossy(&code).into_owned())
    }

    /// Runs all checks; returns the number of probes that were read as LLVM IR, and the number of
    /// those that were also read as instructions.
    fn run(&self, findings: &mut Vec<Finding>) -> Result<(usize, usize), String> {
        let unwritten = |error: std::io::Error| format!("{}: {error}", self.folder.display());
        self.source.write_to(self.folder).map_err(unwritten)?;
        let probes = [probes::all(), probes::at_loaded_addresses()].concat();
        let text = probes::source(&probes) + &barriers_source();
        let code = self.compile(("probes.cu", &text), &[])?;
        let twice = compare(
            "isa",
            findings,
            &probes,
            |entry| instructions(&code, entry),
            |probe| isa(probe, self.arch),
        );
        findings.extend(wrong_barriers(&code).into_iter().map(|what| Finding::new("isa", what)));
        let language = self.compile(("probes.cu", &text), &["-emit-llvm".into()])?;
        let read = compare(
            "ir",
            findings,
            &probes,
            |entry| operations(&language, entry),
            |probe| Some(ir(probe)),
        );
        let defines = options(self.arch).defines;
        let defines: Vec<String> =
            defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
        for (name, text) in &self.source.kernels {
            let code = self.compile((name, text), &defines)?;
            findings.extend(wrong_in(name, &code, self.arch).map(|what| Finding::new("isa", what)));
        }
        Ok((read, twice))
    }
}

/// Instructions of the kernel `entry` in the compiler's assembly.
fn body<'a>(code: &'a str, entry: &str) -> Option<&'a str> {
    let start = code.find(&format!("\n{entry}:"))?;
    Some(&code[start..][..code[start..].find("s_endpgm")?])
}

/// Instructions of a probe kernel that access its word, that write caches back or wait for the
/// write-back, or that invalidate caches.
pub(super) fn instructions(code: &str, entry: &str) -> Option<Vec<String>> {
    let mut found: Vec<String> = Vec::new();
    for line in body(code, entry)?.lines().map(str::trim) {
        if line.starts_with("buffer_") {
            found.push(line.to_string());
        } else if waits(line) && found.last().is_some_and(|last| last.starts_with(WRITE_BACK)) {
            found.push(WAIT.into());
        } else if let Some((_, flags)) =
            line.split_once("offset:24").or_else(|| line.split_once("offset:16"))
        {
            found.push(format!("{} {}", first_word(line), flags.trim()).trim_end().to_string());
        }
    }
    Some(found)
}

/// Expected instructions of a probe; `None` if they depend on how the compiler composes them.
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
    if !code.is_empty() {
        code.push(WAIT.into());
    }
    // A read-modify-write operation has the flag sc0 or glc if it returns the old value.
    let rmw = if system { "sc0 sc1" } else { "sc0" };
    let (name, flags) = match (probe.kind, old) {
        (Kind::LoadPair, true) => ("load_dword", "glc"),
        (Kind::LoadPair, false) => ("load_dword", scope),
        (Kind::StorePair, true) => ("store_dword", ""),
        (Kind::StorePair, false) => ("store_dword", scope),
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
        // Others are not compared: they may become loops, because the compiler does not know the
        // kind of memory, or are accesses with different orders.
        (Kind::Rmw(_) | Kind::AddF32 | Kind::KeepFault | Kind::LoadQuad | Kind::StoreQuad, _) => {
            return None;
        }
    };
    let pair = matches!(probe.kind, Kind::LoadPair | Kind::StorePair);
    let wide = match (probe.wide || pair, name.ends_with("dword")) {
        (true, true) => "x2",
        (true, false) => "_x2",
        (false, _) => "",
    };
    if !name.is_empty() {
        let one = format!("global_{name}{wide} {flags}").trim_end().to_string();
        // The two words of a pair are accessed one after the other, because no document promises
        // atomicity for 16 bytes.
        code.extend(vec![one; if pair { 2 } else { 1 }]);
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

/// Atomic operations of a kernel in LLVM IR: kind, scope and order.
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
            _ if line.contains(" @llvm.amdgcn.s.waitcnt(i32 0)") => {
                found.push(WAIT.into());
                continue;
            }
            _ => continue,
        };
        // The scope may have a suffix that limits it to one address space, which is ignored: words
        // and the data that they order are both in global memory.
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

/// Expected operations of a probe in LLVM IR. A release is a separate fence and wait before a
/// relaxed access, because compilers forget to wait for the write-back of a releasing access.
fn ir(probe: &Probe) -> Vec<String> {
    let acquires = matches!(probe.order, Order::Acquire | Order::AcqRel);
    let order = if acquires { "acquire" } else { "monotonic" };
    let scope = if probe.scope == Scope::System { "system" } else { "agent" };
    let mut release = Vec::new();
    if matches!(probe.order, Order::Release | Order::AcqRel) {
        release = vec![format!("fence {scope} release"), WAIT.into()];
    }
    let one = |what: &str| [release.clone(), vec![format!("{what} {scope} {order}")]].concat();
    match probe.kind {
        Kind::LoadPair => [one("load"), one("load")].concat(),
        Kind::StorePair => [one("store"), one("store")].concat(),
        Kind::LoadQuad => vec![format!("load {scope} acquire"), format!("load {scope} monotonic")],
        Kind::StoreQuad => {
            [one("store"), vec![format!("fence {scope} release"), WAIT.into()], one("store")]
                .concat()
        }
        Kind::Load => one("load"),
        Kind::Store => one("store"),
        Kind::Rmw(rmw) => one(rmw.names()[2]),
        Kind::CompareExchange => one("cmpxchg"),
        Kind::Fence if !acquires => release,
        Kind::Fence => one("fence"),
        Kind::AddF32 => [one("load"), one("cmpxchg")].concat(),
        Kind::KeepFault => {
            let mut all = one("cmpxchg");
            all.extend(vec!["store system monotonic".to_string(); 8]);
            all.extend(["fence system release", WAIT, "store system monotonic"].map(String::from));
            all
        }
    }
}

/// Instruction that begins a write-back of caches, and marker for the wait until that write-back
/// has ended.
const WRITE_BACK: &str = "buffer_wbl2";
/// End of a write-back for accesses of the same device. On gfx90a these need none.
const OF_DEVICE: &str = "wbl2 sc1";
const WAIT: &str = "wait";

/// Whether an instruction waits for all loads and stores of its wave.
fn waits(line: &str) -> bool {
    line.starts_with("s_waitcnt") && line.contains("vmcnt(0)")
}

/// Whether an instruction accesses memory that other waves or devices can see.
fn is_access(line: &str) -> bool {
    ["global_", "flat_", "buffer_"].iter().any(|kind| line.starts_with(kind))
}

/// Instructions and labels of compiled code, by function.
fn functions(code: &str) -> Vec<(&str, Vec<&str>)> {
    let mut all: Vec<(&str, Vec<&str>)> = Vec::new();
    for line in code.lines() {
        // Comments and directives are dropped; local labels are kept.
        let line = line.split(';').next().unwrap_or_default().trim();
        match line.split_once(':') {
            Some((label, _)) if !label.starts_with('.') && !label.contains(' ') => {
                all.push((label, Vec::new()));
            }
            _ if line.is_empty() || line.starts_with('.') && !line.starts_with(".LBB") => {}
            _ => {
                if let Some((_, lines)) = all.last_mut() {
                    lines.push(line);
                }
            }
        }
    }
    all
}

/// Returns the number of write-backs, and the names of functions that do not wait for one of theirs
/// before the next access, jump or end. Without the wait, data could become visible after the word
/// that announces it.
fn unwaited<'a>(functions: &[(&'a str, Vec<&str>)]) -> (usize, Vec<&'a str>) {
    let (mut count, mut found) = (0, Vec::new());
    for (name, lines) in functions {
        for (at, _) in lines.iter().enumerate().filter(|(_, line)| line.starts_with(WRITE_BACK)) {
            count += 1;
            let ends = |line: &&&str| {
                let jumps =
                    ["s_cbranch", "s_branch", "s_setpc", "s_swappc", "s_endpgm", "s_barrier"];
                is_access(line)
                    || line.starts_with(".LBB")
                    || jumps.iter().any(|jump| line.starts_with(jump))
            };
            let next = lines[at + 1..].iter().find(|line| waits(line) || ends(line));
            if !next.is_some_and(|line| waits(line)) {
                found.push(*name);
            }
        }
    }
    (count, found)
}

/// Returns the number of workgroup barriers that lead to a write-back of the stores of all waves,
/// and the functions with such a barrier that a wave may reach before its own stores are complete.
///
/// The barriers of a write-back are the last ones on each path to it.
fn unwaited_barriers<'a>(functions: &[(&'a str, Vec<&str>)]) -> (usize, Vec<&'a str>) {
    let (mut count, mut found) = (0, Vec::new());
    for (name, lines) in functions {
        let ways = Ways::of(lines);
        let waited = |&at: &usize| {
            let before = lines[..at].iter().rfind(|line| waits(line) || is_access(line));
            before.is_some_and(|line| waits(line))
        };
        let [mut of_all, mut refreshes] = [const { BTreeSet::new() }; 2];
        let mut of_one = BTreeSet::new();
        for (at, line) in lines.iter().enumerate().filter(|(_, line)| line.starts_with(WRITE_BACK))
        {
            let before = ways.barriers_before(at);
            if before.iter().all(waited) {
                if !line.ends_with(OF_DEVICE) {
                    refreshes.extend(before.iter().copied());
                }
                of_all.extend(before);
            } else {
                of_one.insert(ways.barriers_after(at));
            }
        }
        // An LL kernel has separate bodies for two ranks and for more, or one body. The first
        // write-back of each body is for its entry and its count, which announce no store of another
        // wave. Those at its end, in calls that refresh words, must wait for other waves: a count,
        // at device scope, and behind another barrier the refresh, at system scope.
        let bodies = if name.ends_with("_ll") { refreshes.len() } else { 0 };
        if of_one.len() != bodies {
            found.push(*name);
        }
        count += of_all.len();
    }
    (count, found)
}

/// Names in port.h of the workgroup barriers after which a word is published.
const PUBLISHING: [&str; 6] = ["Signal", "Flag", "LockGive", "Arrive", "Finish", "Refresh"];

/// Kernels that store, pass the barrier of a place in `PUBLISHING`, and store again; to follow the
/// source of the probes.
fn barriers_source() -> String {
    let mut text = String::new();
    for site in PUBLISHING {
        for call in [
            format!("port::barrier(Site::{site})"),
            format!("*out = port::vote(true, Site::{site})"),
        ] {
            let kind = if call.contains("vote") { "vote" } else { "barrier" };
            text += &format!(
                "PROBE({kind}_{site}, port::write<u32>(at, 1); {call}; port::write<u32>(at + 4, 2))\n"
            );
        }
    }
    text
}

/// Names of those kernels in `code` whose barrier a wave may reach before its stores are complete.
fn wrong_barriers(code: &str) -> Vec<String> {
    let functions = functions(code);
    let mut wrong = Vec::new();
    for site in PUBLISHING {
        for name in [format!("barrier_{site}"), format!("vote_{site}")] {
            let lines = functions.iter().find(|(entry, _)| *entry == name).map(|(_, lines)| lines);
            let waited = lines.is_some_and(|lines| {
                let Some(at) = lines.iter().position(|line| *line == "s_barrier") else {
                    return false;
                };
                let store = lines[..at].iter().rposition(|line| line.starts_with("global_store"));
                store.is_some_and(|store| lines[store..at].iter().any(|line| waits(line)))
            });
            if !waited {
                wrong.push(format!(
                    "{name}: a wave comes to the barrier before its stores are over"
                ));
            }
        }
    }
    wrong
}

/// Findings for instructions that must not appear in the code of kernel file `name`.
fn wrong_in(name: &str, code: &str, arch: &str) -> impl Iterator<Item = String> {
    let mut wrong = Vec::new();
    let system = if arch == "gfx90a" { "buffer_invl2" } else { "buffer_inv sc0 sc1" };
    if !code.contains(system) && !LOCAL.contains(&name) {
        wrong.push(format!("{name}: no acquire of system scope"));
    }
    let functions = functions(code);
    let (write_backs, found) = unwaited(&functions);
    wrong.extend(found.iter().map(|at| format!("{name}: a write-back of {at} is not waited for")));
    let (barriers, found) = unwaited_barriers(&functions);
    let unwaited = |at| {
        format!("{name}: a wave comes to a publishing barrier of {at} before its stores are over")
    };
    wrong.extend(found.iter().map(unwaited));
    let kernels = resources::read(code);
    wrong.extend(kernels.iter().filter_map(Resources::wrong).map(|what| format!("{name}: {what}")));
    if kernels.is_empty() {
        wrong.push(format!("{name}: no metadata of a kernel was found"));
    }
    if !LOCAL.contains(&name) && (write_backs == 0 || barriers == 0) {
        wrong.push(format!(
            "{name}: {write_backs} write-backs behind {barriers} barriers were found"
        ));
    }
    // A release at device scope has no instruction of its own on gfx90a.
    let mut entry = "";
    let mut released = false;
    for line in code.lines().map(str::trim) {
        if let Some(label) = line.split(':').next().filter(|label| label.starts_with("iris_")) {
            entry = label;
        }
        let stores = line.starts_with("global_store") || line.starts_with("flat_store");
        if stores && released && !RAISE_FLAGS.contains(&entry) {
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
