//! Checks of the code that NVRTC compiles from the device source.

use std::collections::HashMap;

use iris_kernels::gemm_config::{CoreConfig, TileConfig, TileSize};
use iris_kernels::rtc::{Compiler, Error, KernelSource, Options};
use iris_kernels::source::{self, SourceKind};
use iris_sync::{Order, Scope};

use super::probes::{self, Kind, Probe, Rmw};
use super::turns::out_of_turn;
use super::{
    DeviceSource, Finding, LOCAL, Outcome, RAISE_FLAGS, READ_FLAGS, compare, first_word, options,
};

/// First NVRTC version with atomic functions of its own.
const HAS_ATOMICS: (i32, i32) = (12, 8);

/// Architecture on which GEMMs with the largest tile use warpgroup instructions (gemm/sm90.h).
/// Every source with a GEMM is checked with that tile as well.
const BY_WARPGROUPS: &str = "sm_90a";

pub(super) fn check(arch: &str, source: &DeviceSource) -> Outcome {
    let compiler = match Compiler::nvrtc() {
        Ok(compiler) => compiler,
        Err(error) => return Outcome::Skipped(error.to_string()),
    };
    let (major, minor) = compiler.version();
    let name = format!("NVRTC {major}.{minor}");
    let mut findings = Vec::new();
    let counts = Checker { compiler, arch, source }.run(&mut findings);
    match counts {
        Ok((probes, twice)) if findings.is_empty() => {
            Outcome::Done { compiler: name, kernels: source.kernels.len(), probes, twice }
        }
        Ok(_) => Outcome::Failed(findings),
        Err(Error::Compile { log, .. }) if log.contains("value for --gpu-architecture") => {
            Outcome::Skipped(format!("{name} does not know {arch}"))
        }
        Err(error) => {
            findings.push(Finding::new("type", error.to_string()));
            Outcome::Failed(findings)
        }
    }
}

struct Checker<'a> {
    compiler: &'static Compiler,
    arch: &'a str,
    source: &'a DeviceSource,
}

impl Checker<'_> {
    /// Compiles a source for `arch`: to machine code, or to PTX for a virtual architecture.
    fn compile(
        &self,
        (name, text): (&str, &str),
        options: &Options,
        arch: &str,
    ) -> Result<Vec<u8>, Error> {
        let words = self.compiler.command(options, arch);
        self.source.compiled((name, text), arch, &words, || {
            let source = KernelSource { name, text };
            self.compiler.compile_with(source, &self.source.headers(), options, arch)
        })
    }

    /// PTX and machine code of a source, compiled at once.
    fn ptx_and_code(
        &self,
        (name, text): (&str, &str),
        options: &Options,
    ) -> Result<(String, Vec<u8>), Error> {
        let words = format!("{} with PTX", self.compiler.command(options, self.arch));
        // Both are kept as one entry, with a zero in between, which PTX does not contain.
        let mut both = self.source.compiled((name, text), self.arch, &words, || {
            let (source, headers) = (KernelSource { name, text }, self.source.headers());
            let (ptx, code) =
                self.compiler.compile_with_ptx(source, &headers, options, self.arch)?;
            Ok::<_, Error>([ptx.as_bytes(), &code].join(&0))
        })?;
        let end = both.iter().position(|&byte| byte == 0).unwrap_or(both.len());
        let code = both.split_off((end + 1).min(both.len()));
        Ok((String::from_utf8_lossy(&both[..end]).into_owned(), code))
    }

    fn ptx(&self, name: &str, text: &str, options: &Options) -> Result<String, Error> {
        let arch = self.arch.replace("sm_", "compute_");
        let bytes = self.compile((name, text), options, &arch)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Runs all checks; returns the number of probes that were read, and the number of those that
    /// were also compared as machine code.
    fn run(&self, findings: &mut Vec<Finding>) -> Result<(usize, usize), Error> {
        let probes = probes::all();
        let kept = kept();
        let text = probes::source(&probes) + &kept_source(&kept);
        let (ptx, code) = self.ptx_and_code(("probes.cu", &text), &Options::new())?;
        let read = compare(
            "ptx",
            findings,
            &probes,
            |entry| scoped(&ptx, entry),
            |probe| Some(wanted(probe)),
        );
        findings.extend(lost(&kept, &ptx).map(|what| Finding::new("ptx", what)));
        let twice = self.machine_code(&code, &probes, findings)?;
        for (name, text) in &self.source.kernels {
            let mut all = vec![options(self.arch)];
            let kind = source::KERNELS.iter().find(|it| it.name == *name).map(|it| it.kind);
            if self.arch == BY_WARPGROUPS && kind == Some(SourceKind::TileGemm) {
                // Builds with tile sizes that use instructions of their own. One source is checked
                // with two of these sizes, all others only with the largest one.
                let sizes = if *name == "matmul_all_gather.cu" { 2 } else { 1 };
                let sizes = TileSize::ALL[..sizes].iter();
                all.extend(sizes.map(|&size| TileConfig::of(self.arch, 1, size).options()));
            }
            for (index, options) in all.into_iter().enumerate() {
                // Only one source with the large tile is assembled to machine code, which takes as
                // long as all other checks together.
                let assembled = self.source.assembled && (index == 0 || name == &"matmul.cu");
                let ptx = match assembled {
                    true => self.ptx_and_code((name, text), &options)?.0,
                    false => self.ptx(name, text, &options)?,
                };
                let wrong = wrong_in(name, &ptx).chain(out_of_turn(name, &ptx));
                findings.extend(wrong.map(|what| Finding::new("ptx", what)));
            }
        }
        for (name, text) in self.source.gemms.iter().filter(|_| self.arch == BY_WARPGROUPS) {
            // The gather and scatter kernels move data by bulk copies; the other kernels store by
            // all threads once the GEMM is over.
            let copies = ["gather", "scatter"].iter().any(|it| name.contains(it));
            let config = match copies {
                true => CoreConfig::wide(256, 2, 4),
                false => CoreConfig::flipped(64, 1, 8),
            };
            let ptx = self.ptx(name, text, &config.options([1; 2]))?;
            let unfenced = copies.then(|| unfenced(name, &ptx)).into_iter().flatten();
            // A GEMM without communication neither waits for peers nor stores to them.
            let alone = *name == "gemm_sm90.cu";
            let wrong = (!alone).then(|| wrong_in(name, &ptx)).into_iter().flatten();
            let wrong = wrong.chain(unfenced).chain(out_of_turn(name, &ptx));
            findings.extend(wrong.map(|what| Finding::new("ptx", what)));
        }
        Ok((read, twice))
    }

    /// Compares the machine code of the probes, `code`, with that of NVIDIA's own atomic functions. The only
    /// difference allowed is in the bits that mark an address as global, because NVIDIA's functions
    /// take any address.
    fn machine_code(
        &self,
        code: &[u8],
        probes: &[Probe],
        findings: &mut Vec<Finding>,
    ) -> Result<usize, Error> {
        if self.compiler.version() < HAS_ATOMICS {
            return Ok(0);
        }
        let source = ("atomics.cu", &*reference(probes));
        let theirs = self.compile(source, &Options::new(), self.arch)?;
        let (own, theirs) = (sections(code), sections(&theirs));
        let differ = |a: Option<&Vec<u8>>, b: Option<&Vec<u8>>| difference(a?, b?);
        let mut compared = 0;
        for probe in probes.iter().filter(|probe| function(probe).is_some()) {
            let name = format!("probe_{}", probe.name);
            let what = of_kind(probe);
            let global =
                differ(theirs.get(&format!("global_{what}")), theirs.get(&format!("any_{what}")));
            let found = differ(own.get(&name), theirs.get(&name));
            if found.is_none() || found != global {
                let what = format!("{} differs by {found:x?}, expected {global:x?}", probe.name);
                findings.push(Finding::new("machine code", what));
            }
            compared += 1;
        }
        Ok(compared)
    }
}

/// Accesses between two stores to one location, both of which must be in the code, since the
/// compiler may move nothing past an access and remove nothing: name, statement, plain stores.
fn kept() -> Vec<(String, String, usize)> {
    let mut between: Vec<(String, String, usize)> = ["u16", "u32", "u64", "Vec16"]
        .iter()
        .flat_map(|word| {
            let read = format!("port::read<{word}>(at)");
            let write = format!("port::write(at, {word}{{}})");
            [(format!("read_{word}"), read, 2), (format!("write_{word}"), write, 3)]
        })
        .collect();
    let access = "Order::Relaxed, Scope::System>(at";
    for (name, what) in [
        ("load", format!("port::load<{access}, static_cast<i32*>(nullptr), -1)")),
        ("store", format!("port::store<{access}, 3, -1)")),
        ("rmw", format!("port::rmw<Rmw::Add, {access}, 3, -1)")),
        ("cas", format!("port::compare_exchange<{access}, 3, 4, -1)")),
        ("add_system", "port::add_f32<Scope::System>(at, 1.0f)".into()),
        ("add_device", "port::add_f32<Scope::Device>(at, 1.0f)".into()),
        ("fence_system", "port::fence<Order::AcqRel, Scope::System>()".into()),
        ("fence_device", "port::fence<Order::AcqRel, Scope::Device>()".into()),
        ("pause", "port::pause(64)".into()),
        ("sleep", "port::sleep(64)".into()),
    ] {
        between.push((name.into(), what, 2));
    }
    between
}

/// Source of the kernels of these accesses, to follow that of the probes.
fn kept_source(kept: &[(String, String, usize)]) -> String {
    kept.iter()
        .map(|(name, what, _)| format!("PROBE(kept_{name}, *out = 1; {what}; *out = 2)\n"))
        .collect()
}

/// Accesses around which a plain store is missing, or one is too many.
fn lost(kept: &[(String, String, usize)], ptx: &str) -> impl Iterator<Item = String> {
    kept.iter().filter_map(|(name, _, stores)| {
        let plain = |line: &&str| line.starts_with("st.global");
        let entry = entry(ptx, &format!("kept_{name}")).unwrap_or_default();
        let found = entry.lines().map(str::trim).filter(plain).count();
        let wrong = found != *stores;
        wrong.then(|| format!("{found} plain stores around {name}, expected {stores}"))
    })
}

/// Text of the kernel entry `name` in PTX; `None` if there is no such entry.
fn entry<'a>(ptx: &'a str, name: &str) -> Option<&'a str> {
    ptx.split(".entry ").find(|part| part.starts_with(&format!("{name}(")))
}

/// Instructions of the kernel entry `name` that name a memory scope.
fn scoped(ptx: &str, name: &str) -> Option<Vec<String>> {
    let scoped = |word: &&str| {
        word.split(['.', ';'])
            .any(|part| matches!(part, "sys" | "gpu" | "cta" | "cluster" | "volatile"))
            || word.starts_with("membar")
    };
    let words = entry(ptx, name)?.lines().map(first_word).filter(scoped);
    Some(words.map(|word| word.trim_end_matches(';').into()).collect())
}

/// PTX instructions to which a probe must be compiled.
fn wanted(probe: &Probe) -> Vec<String> {
    let order = match probe.order {
        Order::Relaxed => "relaxed",
        Order::Acquire => "acquire",
        Order::Release => "release",
        Order::AcqRel => "acq_rel",
    };
    let scope = if probe.scope == Scope::System { "sys" } else { "gpu" };
    let bits = if probe.wide { 64 } else { 32 };
    let atom = |what: &str| format!("atom.{order}.{scope}.global.{what}{bits}");
    vec![match probe.kind {
        Kind::Load => format!("ld.{order}.{scope}.global.s{bits}"),
        Kind::Store => format!("st.{order}.{scope}.global.s{bits}"),
        Kind::LoadPair => format!("ld.{order}.{scope}.global.v2.b64"),
        Kind::StorePair => format!("st.{order}.{scope}.global.v2.b64"),
        Kind::LoadQuad => format!("ld.{order}.{scope}.global.b128"),
        Kind::StoreQuad => format!("st.{order}.{scope}.global.b128"),
        Kind::Rmw(rmw) => atom(rmw.names()[0]),
        Kind::CompareExchange => atom("cas.b"),
        Kind::Fence => format!("fence.acq_rel.{scope}"),
        Kind::AddF32 => format!("red.{order}.{scope}.global.add.f32"),
        Kind::KeepFault => {
            let mut code = vec!["atom.relaxed.sys.global.cas.b32".to_string()];
            code.extend(vec!["st.relaxed.sys.global.s32".to_string(); 8]);
            code.push("st.release.sys.global.s32".into());
            return code;
        }
    }]
}

/// Finds copies by tensor maps, which use the async proxy, that are not ordered with acquires and
/// releases. A fence must stand between an acquire at system scope and the next copy to shared
/// memory, and between the end of copies to global memory and the following release.
fn unfenced(name: &str, ptx: &str) -> impl Iterator<Item = String> {
    let mut wrong = Vec::new();
    // A kernel that waits for peers but stores nothing to them releases only a fault record, so it
    // needs no fence before a release.
    let signals = name.contains("scatter");
    let (mut acquired, mut ended, mut seen) = (false, false, [0; 2]);
    for line in ptx.lines().map(str::trim) {
        match first_word(line).trim_end_matches(';') {
            word if word.starts_with("ld.acquire.sys") => acquired = true,
            "fence.proxy.async" => {
                seen = [seen[0] + usize::from(acquired), seen[1] + usize::from(ended)];
                (acquired, ended) = (false, false);
            }
            "cp.async.bulk.wait_group" => ended = signals,
            word if acquired
                && word.starts_with("cp.async.bulk.tensor")
                && word.contains("mbarrier") =>
            {
                wrong.push(format!("{name}: a copy behind an acquire, without a fence"));
            }
            word if word.starts_with("st.release.sys") && ended => {
                wrong.push(format!("{name}: a release behind copies, without a fence"));
            }
            _ => {}
        }
    }
    if seen[0] == 0 || (seen[1] == 0 && signals) {
        wrong.push(format!(
            "{name}: no fence between what it waits for, or stores, and its signals"
        ));
    }
    wrong.into_iter()
}

/// Instructions that must not appear in the PTX of a kernel.
fn wrong_in(name: &str, ptx: &str) -> impl Iterator<Item = String> {
    let mut wrong = Vec::new();
    if !ptx.contains(".sys.") && !LOCAL.contains(&name) {
        wrong.push(format!("{name}: no access of system scope"));
    }
    // Functions that were not inlined come before the first entry of the PTX text.
    for part in ptx.split(".entry ") {
        let entry = part.split('(').next().unwrap_or_default();
        for instruction in part.lines().map(first_word) {
            // Counters need no order, because they are read only after the kernel is over.
            let allowed = match instruction {
                "ld.relaxed.gpu.global.s32"
                | "st.relaxed.gpu.global.s32"
                | "atom.acq_rel.gpu.global.add.u32"
                | "atom.relaxed.gpu.global.add.u64" => true,
                "st.release.gpu.global.s32" => RAISE_FLAGS.contains(&entry),
                "ld.acquire.gpu.global.s32" => READ_FLAGS.contains(&entry),
                _ if instruction.contains(".shared") => true,
                _ => {
                    let parts = || instruction.split(['.', ';']);
                    // A vector access must have whole words as elements, because the hardware
                    // promises atomicity only for each element.
                    let scoped = parts().any(|part| matches!(part, "sys" | "relaxed" | "mmio"));
                    let vector = parts().any(|part| matches!(part, "v2" | "v4" | "v8"));
                    let is_pair = instruction.ends_with(".relaxed.sys.global.v2.b64");
                    let torn = scoped && vector && !is_pair;
                    let other = |part| matches!(part, "gpu" | "cta" | "nc" | "volatile" | "ldu");
                    !torn && !parts().any(other) && !instruction.starts_with("membar")
                }
            };
            if !allowed {
                wrong.push(format!("{name}: {entry} has {instruction}"));
            }
        }
    }
    wrong.into_iter()
}

/// Call of NVIDIA's function that performs the probe's operation on `p`. Returns `None` if the code
/// of that function is longer: a 64-bit atomic on any address contains a branch for shared memory.
fn function(probe: &Probe) -> Option<String> {
    let order = match probe.order {
        Order::Relaxed => "__NV_ATOMIC_RELAXED",
        Order::Acquire => "__NV_ATOMIC_ACQUIRE",
        Order::Release => "__NV_ATOMIC_RELEASE",
        Order::AcqRel => "__NV_ATOMIC_ACQ_REL",
    };
    let scope = match probe.scope {
        Scope::System => "__NV_THREAD_SCOPE_SYSTEM",
        Scope::Device => "__NV_THREAD_SCOPE_DEVICE",
    };
    let (word, unsigned, out) =
        if probe.wide { ("i64", "u64", "out64") } else { ("i32", "u32", "out") };
    Some(match probe.kind {
        Kind::Load => format!("*{out} = __nv_atomic_load_n(p, {order}, {scope})"),
        Kind::Store => format!("__nv_atomic_store_n(p, {word}(3), {order}, {scope})"),
        Kind::Rmw(_) | Kind::CompareExchange if probe.wide => return None,
        Kind::Rmw(Rmw::Add) => format!(
            "*{out} = __nv_atomic_fetch_add(reinterpret_cast<{unsigned}*>(p), {unsigned}(3), {order}, {scope})"
        ),
        Kind::Rmw(rmw) => {
            let [_, name, _] = rmw.names();
            format!("*{out} = __nv_atomic_{name}(p, {word}(3), {order}, {scope})")
        }
        Kind::CompareExchange => format!(
            "{word} old = 3; __nv_atomic_compare_exchange_n(p, &old, {word}(4), false, {order}, \
             __NV_ATOMIC_RELAXED, {scope}); *{out} = old"
        ),
        Kind::Fence if probe.order == Order::AcqRel => {
            format!("__nv_atomic_thread_fence({order}, {scope})")
        }
        Kind::Fence
        | Kind::AddF32
        | Kind::KeepFault
        | Kind::LoadPair
        | Kind::StorePair
        | Kind::LoadQuad
        | Kind::StoreQuad => return None,
    })
}

/// Name of the probe's operation, without its order and scope.
fn of_kind(probe: &Probe) -> String {
    let bits = if probe.wide { 64 } else { 32 };
    match probe.kind {
        Kind::Rmw(rmw) => format!("{rmw:?}_{bits}"),
        kind => format!("{kind:?}_{bits}"),
    }
}

/// Source that performs the operations of the probes by NVIDIA's functions. For each kind of
/// operation it also has two kernels that differ only in whether the address is marked as global.
fn reference(probes: &[Probe]) -> String {
    let mut text = probes::FRAME.to_string();
    let mut kinds = Vec::new();
    for probe in probes {
        let Some(call) = function(probe) else { continue };
        let word = if probe.wide { "i64" } else { "i32" };
        let place = if probe.own { "own" } else { "at" };
        let pointer =
            format!("{word}* p = reinterpret_cast<{word}*>(__cvta_global_to_generic({place}))");
        text += &format!("PROBE(probe_{}, {pointer}; (void)p; {call})\n", probe.name);
        let kind = of_kind(probe);
        let plain = probe.order == Order::Relaxed && !probe.own;
        if (plain || probe.kind == Kind::Fence) && !kinds.contains(&kind) {
            text += &format!("PROBE(any_{kind}, {pointer}; (void)p; {call})\n");
            text += &format!("PROBE(global_{kind}, {})\n", assembly(probe));
            kinds.push(kind);
        }
    }
    text
}

/// Operation of a probe as inline assembly.
fn assembly(probe: &Probe) -> String {
    let instruction = &wanted(probe)[0];
    let (word, c, out) = if probe.wide { ("i64", "l", "out64") } else { ("i32", "r", "out") };
    let value = |n: u32| format!("\"{c}\"({word}({n}))");
    let returns = |operands: &str, inputs: String| {
        format!(
            "{word} v; asm volatile(\"{instruction} %0, [%1]{operands};\" : \"={c}\"(v) : \
             \"l\"(at){inputs} : \"memory\"); *{out} = v"
        )
    };
    match probe.kind {
        Kind::Load => returns("", String::new()),
        Kind::Store => {
            format!(
                "asm volatile(\"{instruction} [%0], %1;\" :: \"l\"(at), {} : \"memory\")",
                value(3)
            )
        }
        Kind::CompareExchange => returns(", %2, %3", format!(", {}, {}", value(3), value(4))),
        Kind::Fence => format!("asm volatile(\"{instruction};\" ::: \"memory\")"),
        _ => returns(", %2", format!(", {}", value(3))),
    }
}

/// Machine code of a cubin, by kernel.
fn sections(cubin: &[u8]) -> HashMap<String, Vec<u8>> {
    let number = |at: usize, bytes: usize| {
        let bytes = cubin.get(at..at + bytes)?;
        Some(bytes.iter().rev().fold(0, |sum, &byte| sum << 8 | usize::from(byte)))
    };
    let read = || {
        let (table, count, names) = (number(0x28, 8)?, number(0x3c, 2)?, number(0x3e, 2)?);
        let header = |index: usize| {
            let at = table + index * 64;
            Some((number(at, 4)?, number(at + 24, 8)?, number(at + 32, 8)?))
        };
        let (_, names, _) = header(names)?;
        let mut sections = HashMap::new();
        for index in 0..count {
            let (name, start, size) = header(index)?;
            let name = cubin.get(names + name..)?.split(|&byte| byte == 0).next()?;
            if let Some(kernel) = String::from_utf8_lossy(name).strip_prefix(".text.") {
                sections.insert(kernel.to_string(), cubin.get(start..start + size)?.to_vec());
            }
        }
        Some(sections)
    };
    read().unwrap_or_default()
}

/// Bits in which the only differing 16-byte instruction of `a` and `b` differs; `None` if more than
/// one differs.
fn difference(a: &[u8], b: &[u8]) -> Option<u128> {
    let instruction = |bytes: &[u8]| bytes.try_into().map(u128::from_le_bytes).unwrap_or_default();
    let pairs = a.chunks(16).zip(b.chunks(16)).map(|(a, b)| instruction(a) ^ instruction(b));
    let differing: Vec<u128> = pairs.filter(|&bits| bits != 0).collect();
    match (a.len() == b.len(), differing.as_slice()) {
        (true, []) => Some(0),
        (true, &[bits]) => Some(bits),
        _ => None,
    }
}
