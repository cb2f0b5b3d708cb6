//! Tests that independent checks find a wrong scope that is put into a copy of the device source on
//! purpose (a plant). More than one check must find it. Every file under `iris-kernels/kernels` has
//! a plant.
//!
//! | check | what finds it |
//! |---|---|
//! | tidy | the rules of device source: who may name a scope, how assembly is written |
//! | table | the rows of memory.h, as the preprocessor writes them out, against iris-sync |
//! | type | a compiler refuses it |
//! | hook | the host form accesses a peer's address, and not at system scope |
//! | access | the host form accesses with an order or scope that iris-sync's table has not |
//! | ptx, machine code, isa, ir | see `iris_models::check::device_code` |
//!
//! This file is long because the plants are one list.
#![cfg(iris_cxx)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, OnceLock};

use iris_kernels::source::KERNELS;
use iris_models::check::device_code::{ARCHS, DeviceSource, Outcome, check};
use iris_models::headers::COMPILER;
use iris_sync::{Access, Order, Scope};
use iris_testkit::{Level, harness};

/// Fault planted into the device source: each edit replaces text in a file. `kernel` is the file
/// whose compiled code shows the fault, optionally followed by the name of one of its entries.
/// Other kernels are not compiled for devices.
struct Plant {
    edits: Vec<(&'static str, String, String)>,
    kernel: &'static str,
    /// Names of the checks that must find the fault; no other check may.
    found: &'static [&'static str],
}

/// Text of a store to a peer that publishes at device scope, which is wrong.
const RAW: &str = "::iris::port::store<::iris::Order::Release, ::iris::Scope::Device>\
                   (1ull << 60, 1, -1); ";

fn plants() -> Vec<Plant> {
    let mut all = Vec::new();
    let mut add = |file, old: &str, new: String, kernel, found| {
        all.push(Plant { edits: vec![(file, old.into(), new)], kernel, found });
    };
    // Control: an edit that changes nothing, in which no check may find anything.
    add("iris/sym.h", "namespace iris {", "namespace iris {".into(), "all_gather.cu", &[]);
    // Faults that add wrong stores outside the protocols, in every kernel and in the headers that
    // kernels use.
    const BESIDE: &[&str] = &["hook", "isa", "ptx", "tidy"];
    // The first kernel of copied.cu, `iris_open`, is one that may release at device scope.
    const IN_OPEN: &[&str] = &["hook", "ptx", "tidy"];
    for kernel in KERNELS {
        let found = if kernel.name == "copied.cu" { IN_OPEN } else { BESIDE };
        add(kernel.name, ") {", format!(") {{ {RAW}"), kernel.name, found);
    }
    let before = |text: &str| format!("{RAW}{text}");
    const LL: &str = "all_gather.cu iris_all_gather_ll";
    const LIST: &str = "all_gather.cu iris_all_gather_list_ll";
    const COMBINE: &str = "all_reduce.cu iris_one_shot_combine_ll";
    const COPIES: &str = "copied.cu iris_copies";
    for (file, text, kernel) in [
        ("iris/args.h", "return Launch{args.heap,", "all_gather.cu"),
        ("iris/body/ll.h", "of_result(source).store(item, data);", LL),
        ("iris/body/combine.h", "const u32 dtype = from.parts.dtype;", COMBINE),
        ("iris/body/ll_list.h", "const u64 bits = u64(data[1]) << 32 | data[0];", LIST),
        ("iris/copy.h", "if (rows <= 1 || (to_ld == cols", "all_gather.cu"),
        ("iris/flow/ll.h", "const ll::Share& share = given.share;", LL),
        ("iris/ll.h", "m.store_pair<Access::LlStore>(m.pair(peer", LL),
        ("iris/body/deliver.h", "const View c = own_c(tile, area);", "all_gather.cu"),
        ("iris/flow/launch.h", "Workgroup wg(launch);", "all_gather.cu"),
        ("iris/flow/accumulate.h", "body.zero(tile)", "all_reduce.cu iris_zero"),
        ("iris/flow/copied.h", "wg.push_copied(peer, first + part);", COPIES),
        (
            "iris/flow/deliver.h",
            "const u32 me = wg.rank(), produced = delivery.produced();",
            "all_gather.cu",
        ),
        ("iris/flow/gather.h", "body.push_part(wg.rank(), part, parity);", "all_gather_matmul.cu"),
        ("iris/flow/reduce.h", "body.reduce(tile, parity);", "all_reduce.cu"),
        ("iris/barrier.h", "m.store<Access::BarrierStore>", "barrier.cu"),
        ("iris/call.h", "return static_cast<u32>(value) & 1;", "all_gather.cu"),
        ("iris/channel.h", "const u32 at = rank + step;", "all_gather.cu"),
        ("iris/entry.h", "m.store<Access::EntryStore>", "all_gather.cu"),
        ("iris/lock.h", "m.store<Access::LockGive>", "all_reduce.cu iris_add_locked"),
        ("iris/body/gather.h", "copy_view(shards.inbox(peer, me, parity)", "all_gather_matmul.cu"),
        ("iris/gemm/producer.h", "product.clear();", "matmul.cu"),
        ("iris/body/partial.h", "copy_view(to, View::of(args.a)", "reduce_scatter.cu"),
        ("iris/body/epilogue.h", "if (args.epilogue & EPILOGUE_GELU) {", "matmul.cu"),
        ("iris/body/norm.h", "squares.of_thread[thread] = own;", "copy.cu iris_norm"),
        ("iris/body/reduce.h", "producer.produce(plan.tile(tile));", "reduce_scatter.cu"),
        ("iris/body/sums.h", "const bool mine = source == from.rank;", "reduce_scatter.cu"),
        ("iris/dtype.h", "raw.low = port::read<Vec16>(address);", "reduce_scatter.cu"),
        ("iris/schedule.h", "return tile % size;", "all_reduce.cu iris_zero"),
        ("iris/view.h", "const u32 runs = to.transposed", "all_gather.cu"),
        ("iris/workgroup.h", "m.store<Access::SignalStore>", COPIES),
    ] {
        add(file, text, before(text), kernel, BESIDE);
    }
    // Faults in code that only one vendor's form contains. Devices do not use fma.h for GEMMs of
    // 16-bit types, so the device checks find nothing.
    let text = "const u32 m = a.transposed ?";
    add("iris/gemm/fma.h", text, before(text), "matmul.cu", &["hook", "tidy"]);
    // Faults in tile_flags.h. The device checks cannot find them, because the store to a flag is
    // itself a release at device scope, so compiled code may contain such a store.
    let text = "m.dev_store<Access::FlagStore>";
    add("iris/tile_flags.h", text, before(text), "all_gather_matmul.cu", &["hook", "tidy"]);
    let text = "const u32 warp = port::thread() / WARP;\n        const u32 row";
    add("iris/gemm/sm80.h", text, before(text), "matmul.cu", &["ptx", "tidy"]);
    let text = "asm volatile(\"cp.async.commit_group;\"";
    add("iris/gemm/sm80_ptx.h", text, before(text), "matmul.cu", &["ptx", "tidy"]);
    // Fault in gemm/sm90.h, shown by another kernel, because matmul.cu does not use the tile of
    // these instructions.
    let text = "gemm::begin_products();";
    add("iris/gemm/sm90.h", text, before(text), "matmul_all_gather.cu", &["ptx", "tidy"]);
    let text = "const u32 vector = item / WIDTH % 8 ^ first % 8";
    add("iris/gemm/sm90_lines.h", text, before(text), "matmul_all_gather.cu", &["ptx", "tidy"]);
    let text = "const u32 lane = port::thread() % WAVE, wave = port::thread() / WAVE;";
    add("iris/gemm/cdna3.h", text, before(text), "matmul.cu", &["isa", "tidy"]);
    // Faults in files that may name a scope, so tidy finds nothing; the hooks find nothing either,
    // because they run no execution that gives up.
    let text = "m.record(fault);";
    add("iris/wait.h", text, before(text), "all_gather.cu", &["isa", "ptx"]);
    // Faults in files that may not name a scope. The hooks find nothing, because they run no
    // execution that records a fault.
    let text = "const i32 all[8] =";
    add("iris/fault.h", text, before(text), "all_gather.cu", &["isa", "ptx", "tidy"]);
    let text = "if (!OBSERVED || counters == 0) return;";
    add("iris/trace.h", text, format!("{text} {RAW}"), "all_gather.cu", &["hook", "isa", "ptx"]);
    let text = "port::add_f32<Scope::System>";
    let new = text.replace("System", "Device");
    add("iris/body/accumulate.h", text, new, "all_reduce.cu iris_add_atomic", &["hook", "ptx"]);

    // Faults in the types of words, and in the table of their accesses.
    let text = "using SymWord = ScopedWord<Scope::System, i32>;";
    let new = text.replace("System", "Device");
    const ALL: &[&str] = &["access", "hook", "ir", "isa", "machine code", "ptx"];
    add("iris/sym.h", text, new, "barrier.cu", ALL);
    for row in ["X(SignalStore, Release, ", "X(AbortLoad, Relaxed, "] {
        let (old, new) = (format!("{row}System"), format!("{row}Device"));
        add("iris/memory.h", &old, new, "barrier.cu", &["table", "type"]);
    }
    // Redefinition of the scopes before every use of the access table. Checks find it only where
    // the edited header is included; the hooks and the probes include only sync.h.
    for (file, found) in [
        ("iris/sync.h", &["access", "hook", "ir", "isa", "machine code", "ptx", "table"][..]),
        ("iris/flow.h", &["isa", "ptx"]),
    ] {
        let text = if file == "iris/sync.h" {
            "#include \"iris/sym.h\""
        } else {
            "#include \"iris/sync.h\""
        };
        let new = format!("#include \"iris/port.h\"\n#define System Device\n{text}");
        add(file, text, new, "barrier.cu", found);
    }
    add(
        "iris/port.h",
        "constexpr int USER_ACCESS = -1;",
        "constexpr int USER_ACCESS = -1;\n#define System Device".into(),
        "barrier.cu",
        &["access", "hook", "ir", "isa", "machine code", "ptx", "table"],
    );
    // Change of both the access table and the type of the word, so that the two agree.
    all.push(Plant {
        edits: vec![
            ("iris/memory.h", "X(SignalStore, Release, System)".into(), "X(SignalStore, Release, Device)".into()),
            (
                "iris/memory.h",
                "check<A, Scope::System>();\n        word.store<AccessRow<A>::order, static_cast<int>(A)>(value);".into(),
                "port::store<AccessRow<A>::order, AccessRow<A>::scope>(heap.signal[1] + 24, value, static_cast<int>(A)); (void)word;".into(),
            ),
        ],
        kernel: "barrier.cu",
        found: &["access", "hook", "ir", "isa", "machine code", "ptx", "table"],
    });
    // Faults in headers that only users' kernels include or call; one kernel is extended to use
    // them.
    let uses = "Words m(args.heap, args.channel); epoch::publish(m, m.signal(1, 0, 0), Call(1));";
    let text = "m.store<Access::VersionStore>";
    all.push(Plant {
        edits: vec![
            ("iris/epoch.h", text.into(), format!("{RAW}{text}")),
            ("copy.cu", ") {".into(), format!(") {{ {uses}")),
        ],
        kernel: "copy.cu",
        found: BESIDE,
    });
    let uses = "TileView view{}; view.heap = args.heap; view.channel = args.channel; \
                Tiles tiles(view); (void)tiles.wait(1);";
    let text = "const u32 from = source(tile), me";
    all.push(Plant {
        edits: vec![
            ("iris/tiles.h", text.into(), format!("{RAW}{text}")),
            ("copy.cu", "#include".into(), "#include \"iris/tiles.h\"\n#include".into()),
            ("copy.cu", ") {".into(), format!(") {{ {uses}")),
        ],
        kernel: "copy.cu",
        found: BESIDE,
    });
    let mut add = |file, old: &str, new: &str, found| {
        let edits = vec![(file, old.into(), new.into())];
        all.push(Plant { edits, kernel: "barrier.cu", found });
    };

    // Faults in the forms of port.h for each vendor and for the host. The host form is part of the
    // checks and must report the true scope to the hooks.
    let (scope, told) = ("static_cast<int>(S), access);", "1, access);");
    add("iris/port_host.h", scope, told, &["access"]);
    add("iris/port_host.h", scope, "0, access);", &["access", "hook"]);
    const CUDA: &[&str] = &["machine code", "ptx"];
    let file = "iris/port_cuda.h";
    add(
        file,
        "macro(order, \"sys\", what, constraint)",
        "macro(order, \"gpu\", what, constraint)",
        CUDA,
    );
    add(file, "\"st.\" order \".\" scope", "\"st.\" order \".gpu\"", CUDA);
    add(
        file,
        "\"atom.\" order \".\" scope \".global.cas.\"",
        "\"atom.\" order \".gpu.global.cas.\"",
        CUDA,
    );
    add(
        file,
        "IRIS_BOTH_SCOPES(IRIS_STORE, \"release\"",
        "IRIS_BOTH_SCOPES(IRIS_STORE, \"relaxed\"",
        CUDA,
    );
    add(file, "fence.acq_rel.sys;", "fence.acq_rel.gpu;", CUDA);
    // Fault in a vector access: its elements are half words, so data and call number could be read
    // at different times.
    const PTX: &[&str] = &["ptx"];
    add(
        file,
        "asm volatile(\"st.relaxed.sys.global.v2.b64 [%0], {%1, %2};\" ::\"l\"(address), \"l\"(words[0]),\n                     \"l\"(words[1])",
        "asm volatile(\"st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};\" ::\"l\"(address), \
         \"r\"(static_cast<u32>(words[0])), \"r\"(static_cast<u32>(words[0] >> 32)), \
         \"r\"(static_cast<u32>(words[1])), \"r\"(static_cast<u32>(words[1] >> 32))",
        PTX,
    );
    add(file, "ld.relaxed.sys.global.v2.b64", "ld.volatile.global.v2.b64", PTX);
    // Fault in inline assembly: without a memory clobber, the compiler may move or remove it.
    let source = DeviceSource::embedded();
    let (_, text) = source.headers.iter().find(|(name, _)| *name == file).expect("embedded");
    for begin in ["ld.\"", "atom.\" order \".\" scope \".global.\"", "ld.global.u32"] {
        let old = text.split("asm ").find(|it| it.starts_with(&format!("volatile(\"{begin}")));
        let (old, _) = old.and_then(|it| it.split_once(": \"memory\")")).expect("a statement");
        let new = old.replacen("volatile", "", 1);
        add(file, &format!("{old}: \"memory\")"), &format!("{new})"), &["ptx", "tidy"]);
    }
    const HIP: &[&str] = &["ir", "isa"];
    let file = "iris/port_hip.h";
    add(
        file,
        "return call(order, __HIP_MEMORY_SCOPE_SYSTEM)",
        "return call(order, __HIP_MEMORY_SCOPE_AGENT)",
        HIP,
    );
    // Three faulty releases. The first has no effect at all. The second is the compiler's own
    // release, which waits for the address and then omits the wait for the write-back. The third
    // has no wait.
    let text = "    release<O, S>();\n#define IRIS_CALL(order, scope) __hip_atomic_store";
    let call = "#define IRIS_CALL(order, scope) __hip_atomic_store";
    add(file, text, call, HIP);
    let own = "#define IRIS_CALL(order, scope) __hip_atomic_store(at<T>(address), value, \
               O == Order::Release ? __ATOMIC_RELEASE : order, scope) //";
    add(file, text, own, HIP);
    add(file, "        wait_for_stores();\n    }\n}", "    }\n}", HIP);
    // Fault that lets a wave end a call before its stores, LL stores included, are complete.
    let (text, new) =
        ("site != Site::Waited &&", "site != Site::Waited && site != Site::Finish &&");
    all.push(Plant {
        edits: vec![(file, text.into(), new.into())],
        kernel: "all_gather.cu",
        found: &["isa"],
    });
    // Fault that copies the arguments to each thread's private memory, where references to the
    // arguments still work.
    let text = "port::in_place(given)";
    all.push(Plant {
        edits: vec![("iris/args.h", text.into(), "given".into())],
        kernel: "barrier.cu",
        found: &["isa"],
    });
    let mut add = |file, old: &str, new: &str, found| {
        let edits = vec![(file, old.into(), new.into())];
        all.push(Plant { edits, kernel: "barrier.cu", found });
    };
    // Faults that let a wave reach the barrier before a signal while its stores are not complete.
    add(file, "if (publishes(site)) wait_for_stores();", "", &["isa"]);
    add(file, "site != Site::Waited &&", "site != Site::Waited && site != Site::Flag &&", &["isa"]);
    add(
        file,
        "__builtin_amdgcn_fence(__ATOMIC_RELEASE, \"\")",
        "__builtin_amdgcn_fence(__ATOMIC_RELEASE, \"agent\")",
        HIP,
    );
    // Fault in a kernel that is launched early: it does not wait for its predecessor.
    add("barrier.cu", "    port::take_turn();\n", "", &["ptx"]);
    let text = "return load<Order::Relaxed, Scope::System>(control";
    let new = text.replace("System", "Device");
    add("iris/port_device.h", text, &new, &["ir", "isa", "machine code", "ptx"]);
    let text = "store<Order::Release, Scope::System>(claim, 2";
    let new = text.replace("System", "Device");
    add("iris/port_device.h", text, &new, &["ir", "isa", "ptx"]);
    all
}

/// Device source with the faults of a plant.
fn planted(plant: &Plant) -> DeviceSource {
    let mut source = DeviceSource::embedded();
    for (file, old, new) in &plant.edits {
        let mut files = source.headers.iter_mut().chain(&mut source.kernels);
        let (_, text) = files.find(|(name, _)| name == file).expect("a file of the device source");
        assert!(text.contains(old), "{file} has no {old}");
        *text = text.replacen(old, new, 1);
    }
    source
}

fn compiler(folder: &Path) -> Command {
    let mut command = Command::new(COMPILER);
    // The source is below the current folder, so that the path of the folder is no option: equal
    // compilations in different folders have equal options.
    command.current_dir(folder).args(["-std=c++17", "-w", "-x", "c++", "-I."]);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Path of the xtask program, built once, because cargo is slower to start than xtask itself.
fn xtask() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        // Path of xtask: it is in the parent of the folder that has the tests.
        let own = std::env::current_exe().expect("a program");
        let folder = own.ancestors().nth(2).expect("a folder");
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.args(["build", "--quiet", "-p", "xtask"]);
        command.args(folder.ends_with("release").then_some("--release"));
        assert!(command.status().expect("cargo starts").success(), "xtask is not built");
        folder.join("xtask")
    })
}

/// Output of `xtask tidy` for a tree that contains only `source`; `None` if tidy finds nothing.
fn tidy(source: &DeviceSource) -> Option<String> {
    let root = tempfile::tempdir().expect("a folder");
    source.write_to(&root.path().join("iris-kernels/kernels")).expect("written");
    let mut command = Command::new(xtask());
    let output = command.arg("tidy").arg(root.path()).output().expect("xtask starts");
    let said = text(&output.stderr);
    (!output.status.success()).then(|| {
        assert!(said.contains("tidy found"), "{said}");
        said
    })
}

const ORDERS: [Order; 4] = [Order::Relaxed, Order::Acquire, Order::Release, Order::AcqRel];

/// Rows of memory.h's table that differ from those of iris-sync.
fn table(folder: &Path) -> Option<String> {
    let source = folder.join("table.cpp");
    let text_ = "#include \"iris/sync.h\"\n#define X(name, order, scope) ROW name order scope;\nIRIS_ACCESSES(X)";
    std::fs::write(&source, text_).expect("written");
    let output = compiler(folder).args(["-E", "-P"]).arg(&source).output().expect("it starts");
    let said = text(&output.stdout);
    let rows: Vec<String> = said
        .split("ROW ")
        .skip(1)
        .filter_map(|row| Some(row.split(';').next()?.to_string()))
        .collect();
    let ours: Vec<String> = Access::ALL
        .iter()
        .map(|access| format!("{} {:?} {:?}", access.name(), access.order(), access.scope()))
        .collect();
    (rows != ours).then(|| format!("{rows:?}"))
}

/// Compiles `kernel` with hooks, runs it, and returns the findings of the hooks.
fn hooks(folder: &Path, source: &DeviceSource, kernel: &str) -> Vec<(&'static str, String)> {
    let program = folder.join("hooks");
    let (_, code) = source.kernels.iter().find(|(name, _)| *name == kernel).expect("a kernel");
    let entries: String = code
        .split("IRIS_KERNEL ")
        .skip(1)
        .filter_map(|rest| rest.split_once('('))
        .map(|(name, rest)| {
            // Arguments of each entry: the first parameter after `IRIS_ARGS` is `OpArgs`; the
            // others are integers.
            let parameters = rest.split(')').next().expect("a list of parameters");
            let others = ["0", "3", "1"].iter().take(parameters.matches(',').count());
            let all: Vec<_> = std::iter::once("args").chain(others.copied()).collect();
            format!("{name}({});", all.join(", "))
        })
        .collect();
    let mut command = compiler(folder);
    command
        .args(["-O0", "-DIRIS_FACTOR=0", "-DIRIS_OBSERVED=1"])
        .arg(format!("-DIRIS_PLANT_FILE=\"{kernel}\""))
        .arg(format!("-DIRIS_PLANT_ENTRIES={entries}"))
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/plants/hooks.cpp"));
    if let Err(log) = harness::compile(command, &program) {
        return vec![("type", log)];
    }
    let Output { status, stdout, .. } = Command::new(&program).output().expect("it starts");
    let said = text(&stdout);
    assert!(status.success() && said.contains("access ") && !said.contains("not"), "{said}");
    let wrong = |line: &&str| {
        let Some(numbers) = line.strip_prefix("access ") else { return false };
        let numbers: Vec<usize> =
            numbers.split(' ').map(|it| it.parse().expect("a number")).collect();
        let access = Access::ALL[numbers[0]];
        let scope = [Scope::Device, Scope::System][numbers[2]];
        (ORDERS[numbers[1]], scope) != (access.order(), access.scope())
    };
    let lines = said.lines();
    let scopes =
        lines.clone().filter(|line| line.starts_with("scope")).map(|it| ("hook", it.into()));
    scopes.chain(lines.filter(wrong).map(|it| ("access", it.into()))).collect()
}

/// Text of a kernel file with only the entry `entry`; an empty name selects the first entry.
fn of_entry(text: &str, entry: &str) -> String {
    const BEGIN: &str = "\nIRIS_KERNEL ";
    let mut parts = text.split(BEGIN);
    let head = parts.next().expect("what comes first");
    let named = |part: &&str| entry.is_empty() || part.starts_with(&format!("{entry}("));
    let part = parts.find(named).unwrap_or_else(|| panic!("no entry {entry}"));
    // The directive before the next entry is not part of this one.
    let part = part.split("\n#if ").next().expect("what comes first");
    format!("{head}{BEGIN}{part}\n")
}

/// Checks that found a fault in the source of `plant`, with their messages; and the checks that
/// were skipped.
fn found_by(plant: &Plant) -> (Vec<(&'static str, String)>, Vec<&'static str>) {
    let mut source = planted(plant);
    let folder = tempfile::tempdir().expect("a folder");
    source.write_to(folder.path()).expect("written");
    let mut found: Vec<_> = tidy(&source).map(|said| ("tidy", said)).into_iter().collect();
    found.extend(table(folder.path()).map(|rows| ("table", rows)));
    let (kernel, entry) = plant.kernel.split_once(' ').unwrap_or((plant.kernel, ""));
    found.extend(hooks(folder.path(), &source, kernel));
    source.kernels.retain(|(name, _)| *name == kernel);
    for (_, text) in &mut source.kernels {
        *text = of_entry(text, entry);
    }
    // Whole-matrix GEMM kernels are left out, because tests/device_code.rs tests their checks.
    source.gemms.clear();
    source.assembled = false;
    let mut skipped = Vec::new();
    for (arch, checks) in [("sm_90a", ["ptx", "machine code"]), ("gfx942", ["isa", "ir"])] {
        let arch = ARCHS.into_iter().find(|it| it.name == arch).expect("an architecture");
        match check(arch, &source).outcome {
            Outcome::Failed(findings) => {
                found.extend(findings.into_iter().map(|it| (it.by, it.what)))
            }
            Outcome::Skipped(_) => skipped.extend(checks),
            Outcome::Done { .. } => {}
        }
    }
    (found, skipped)
}

#[test]
fn a_wrong_scope_in_any_file_is_found_by_independent_checks() {
    let plants = plants();
    // Edits are made once before anything is compiled, so that an edit whose text is gone fails at
    // once.
    plants.iter().for_each(|plant| drop(planted(plant)));
    // The level quick takes a sample of the plants.
    let step = if Level::from_env() >= Level::Normal { 1 } else { 5 };
    let next = Mutex::new(plants.iter().step_by(step));
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some(plant) = next.lock().unwrap().next() else { break };
                    let (found, skipped) = found_by(plant);
                    let by: BTreeSet<&str> = found.iter().map(|(check, _)| *check).collect();
                    let expected: BTreeSet<&str> =
                        plant.found.iter().copied().filter(|it| !skipped.contains(it)).collect();
                    let files: BTreeSet<&str> =
                        plant.edits.iter().map(|(file, ..)| *file).collect();
                    println!("{files:?}: found by {by:?}; skipped: {skipped:?}");
                    if by != expected {
                        wrong.lock().unwrap().push(format!(
                            "{:?}: {by:?}, expected {expected:?}: {found:#?}",
                            plant.edits
                        ));
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_file_has_a_plant_that_two_checks_find() {
    let (plants, source) = (plants(), DeviceSource::embedded());
    for (file, _) in source.headers.iter().chain(&source.kernels) {
        // Files without a plant in this list: a file of constants, a file that selects a header,
        // and the whole-matrix GEMMs, whose checks tests/device_code.rs tests.
        const NONE: [&str; 6] = [
            "iris/gemm_config.h",
            "iris/gemm/product.h",
            "iris/gemm/core.h",
            "iris/gemm/whole.h",
            "iris/gemm/sm90_ptx.h",
            "iris/gemm/sm90_wgmma.h",
        ];
        if NONE.contains(file) {
            continue;
        }
        let enough = |plant: &&Plant| {
            plant.found.len() >= 2 && plant.edits.iter().any(|(name, ..)| name == file)
        };
        assert!(plants.iter().any(|plant| enough(&plant)), "{file} has none");
    }
}

#[test]
fn the_example_runs() {
    // Path of the example, which is in the parent of this program's folder. Building it by another
    // command would rebuild all dependencies with other features.
    let own = std::env::current_exe().expect("this program");
    let built = own.parent().and_then(Path::parent).expect("a folder");
    let output = Command::new(built.join("examples/check_my_protocol")).output();
    let output = output.expect("the example, which `cargo test` without --test builds, starts");
    let (said, log) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{said}{log}");
    assert_eq!(said.matches("  ok").count(), 2, "{said}");
    assert_eq!(said.matches("Relaxed: ").count(), 2, "{said}");
    assert_eq!(said.matches("Race(").count(), 2, "{said}");
}
