//! Tests that NVRTC compiles the device source, and that misuse of the headers does not compile.
//! Without NVRTC the tests are ignored, and the places that were searched are shown. iris-models
//! checks the generated instructions, in `check/device_code`.

use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::time::Instant;

use iris_kernels::build::{FaultInjection, Hold, OmittedWait};
use iris_kernels::gemm_config::{CoreConfig, TileConfig, TileSize};
use iris_kernels::rtc::{self, Compiler, Error, KernelSource, Options, Vendor};
use iris_kernels::source::KERNELS;
use iris_sync::Access;
use iris_testkit::harness::{self, Group, named};

/// Example programs that contain a kernel's source as a raw string, each with the program's text.
const EXAMPLES: [(&str, &str); 2] = [
    ("ring.rs", include_str!("../examples/ring.rs")),
    ("wait_on_tile.rs", include_str!("../../iris-ops/examples/wait_on_tile.rs")),
];

fn main() -> ExitCode {
    if std::env::var_os(FIRST_START).is_some() {
        return first_start();
    }
    let missing = match Compiler::nvrtc() {
        Err(error @ Error::NotFound { .. }) => Some(error.to_string()),
        _ => None,
    };
    harness::run_together(vec![
        Group::new(None, named![the_examples_are_short]),
        Group::new(
            missing.clone(),
            named![
                every_kernel_compiles,
                a_users_source_compiles_and_errors_carry_the_log,
                the_kernels_of_the_examples_compile,
                the_kernels_of_the_stress_test_compile,
                the_kernels_of_the_benchmark_compile,
                kernels_that_are_held_up_compile,
                products_that_are_held_up_or_do_not_wait_compile,
                a_slow_first_start_is_shown_on_a_terminal_only,
            ],
        ),
        // This test is slow (minutes): it compiles every kernel for every type, tile size and
        // architecture.
        Group::new(missing, named![every_kernel_compiles_for_every_build]).slow(),
    ])
}

fn compile(source: KernelSource<'_>, options: &Options, arch: &str) -> rtc::Result<Vec<u8>> {
    harness::compiled_by(Compiler::nvrtc()?, source, options, arch)
}

/// Tests that kernels with products compile, for every type and two of the three tile sizes. The
/// checks of iris-models cover other builds: they compile all kernels for sm_90a with one constant
/// changed.
fn every_kernel_compiles() {
    let [first, second, _] = TileSize::ALL;
    compile_all(&[second], &[("sm_90a", 0), ("sm_90a", 2)], false);
    compile_all(&[first], &[("sm_90a", 1)], false);
}

fn every_kernel_compiles_for_every_build() {
    let types = |arch| (0..3).map(move |dtype| (arch, dtype));
    let all: Vec<_> = types("sm_80").chain(types("sm_90a")).collect();
    compile_all(&TileSize::ALL, &all, true);
}

/// Compiles kernels with products for these tile sizes, architectures and types; also compiles
/// message kernels if `messages`. Prints the slowest compilations.
fn compile_all(tiles: &[TileSize], targets: &[(&str, u32)], messages: bool) {
    let mut jobs = Vec::new();
    for (at, &(arch, dtype)) in targets.iter().enumerate() {
        for text in KERNELS {
            // Message kernels do not depend on the element type, so one build per architecture
            // suffices for them.
            let first = targets[..at].iter().all(|(before, _)| *before != arch);
            let tiles = match text.name.contains("matmul") {
                true => tiles,
                false => &tiles[..usize::from(first && messages)],
            };
            jobs.extend(tiles.iter().map(|&tile| (arch, dtype, text, tile)));
        }
    }
    let (jobs, times) = (Mutex::new(jobs.into_iter()), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let Some((arch, dtype, text, tile)) = jobs.lock().unwrap().next() else { break };
            let begun = Instant::now();
            let options = TileConfig::of(arch, dtype, tile).options();
            let code = compile((*text).into(), &options, arch).unwrap_or_else(|it| panic!("{it}"));
            assert!(code.starts_with(b"\x7fELF"), "{} for {arch} is a cubin", text.name);
            times.lock().unwrap().push((begun.elapsed(), text.name, dtype, tile.m, arch));
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let mut times = times.into_inner().unwrap();
    times.sort();
    for (time, name, dtype, tile, arch) in times.iter().rev().take(5) {
        println!("{:.1} s: {name}, type {dtype}, tile {tile}, {arch}", time.as_secs_f64());
    }
}

fn a_users_source_compiles_and_errors_carry_the_log() {
    let ring = KernelSource {
        name: "ring.cu",
        text: r#"
            #include "iris/sym.h"
            #include "iris/sync.h"
            using namespace iris;
            IRIS_KERNEL pass(IRIS_ARGS HeapView heap, Slice<float> to, Slice<float> from, u32 word) {
                const u32 next = (heap.rank + 1) % heap.size;
                put_with_signal(heap, to, from, from.len, next, heap.word(next, word), 1);
                wait_until(heap, heap.word(heap.rank, word), Equal{}, 1,
                           (heap.rank + heap.size - 1) % heap.size);
            }"#,
    };
    let code = compile(ring, &Options::new(), "sm_90a").expect("it is right");
    assert!(code.starts_with(b"\x7fELF"));

    for (text, message) in [
        // A word of device scope must not convert to a word of system scope; the two words have
        // different types.
        ("DevWord f(const HeapView& heap) { return heap.word(0, 0); }", "no suitable"),
        // An access of device scope must be refused on a word of system scope, because the access
        // table fixes the scope of each access.
        (
            "i32 f(const Words& m, SymWord w) { return m.load<Access::FlagLoad>(w); }",
            "the scope must be that of the access in the table",
        ),
        // A kernel must not get the raw address of a word. With it, the kernel could access the
        // word without an order and a scope.
        ("u64 f(SymWord w) { return w.address; }", "inaccessible"),
        ("void f(SymWord w) { w.store<Order::Acquire>(1); }", "a store must be relaxed or release"),
    ] {
        let text = format!(
            "#include \"iris/sync.h\"\nusing namespace iris;\n__device__ {text}\n\
             IRIS_KERNEL k(IRIS_ARGS HeapView heap, Channel c) {{ (void)sizeof(f); }}"
        );
        let source = KernelSource { name: "wrong.cu", text: &text };
        match compile(source, &Options::new(), "sm_90a") {
            Err(Error::Compile { log, .. }) => assert!(log.contains(message), "{text}: {log}"),
            other => panic!("{text} compiled: {other:?}"),
        }
    }
}

fn the_examples_are_short() {
    for (name, program) in EXAMPLES {
        let lines = program.lines().count();
        assert!(lines < 60, "{name} has {lines} lines");
    }
}

fn the_kernels_of_the_examples_compile() {
    for (name, program) in EXAMPLES {
        let (_, rest) = program.split_once("r#\"").expect("a raw string");
        let (text, _) = rest.split_once("\"#").expect("its end");
        for arch in ["sm_80", "sm_90a"] {
            let code = compile(KernelSource { name, text }, &Options::new(), arch);
            let code = code.unwrap_or_else(|error| panic!("{error}"));
            assert!(code.starts_with(b"\x7fELF"), "{name}");
        }
    }
}

fn the_kernels_of_the_stress_test_compile() {
    let text = include_str!("../../iris-testkit/src/stress/stress.cu");
    let hold = Some((Hold::Filling, 1000));
    let without = Some(Access::VersionLoad);
    let fault_injection = FaultInjection { delay_ns: 1000, without, hold, whole: None };
    let options = fault_injection.options(Options::new());
    let code = compile(KernelSource { name: "stress.cu", text }, &options, "sm_90a");
    let code = code.unwrap_or_else(|error| panic!("{error}"));
    for name in ["iris_stress_fill", "iris_stress_compare", "iris_stress_ring"] {
        assert!(code.windows(name.len()).any(|bytes| bytes == name.as_bytes()), "{name}");
    }
}

fn the_kernels_of_the_benchmark_compile() {
    let norm = include_str!("../../iris-testkit/cli/src/gpu_bench/norm.cu");
    let touch = include_str!("../../iris-testkit/cli/src/gpu_bench/touch.cu");
    let options = Options::new().define("IRIS_THREADS", 512);
    for (name, text, kernel) in [("norm.cu", norm, "add_norm"), ("touch.cu", touch, "touch")] {
        let code = compile(KernelSource { name, text }, &options, "sm_90a");
        let code = code.unwrap_or_else(|error| panic!("{error}"));
        assert!(code.windows(kernel.len()).any(|bytes| bytes == kernel.as_bytes()), "{kernel}");
    }
}

/// Tests that each location of memory.h at which a test build can delay workgroups occurs in the
/// kernels that need it.
fn kernels_that_are_held_up_compile() {
    for (name, place) in [
        ("broadcast.cu", Hold::Received),
        ("broadcast.cu", Hold::Entered),
        ("all_reduce.cu", Hold::Adding),
    ] {
        let source = KERNELS.iter().copied().find(|text| text.name == name).expect("embedded");
        let text = |hold| {
            let fault_injection = FaultInjection { hold, ..FaultInjection::default() };
            let options = fault_injection.options(Options::new());
            let code = compile(source.into(), &options, "compute_90a");
            String::from_utf8(code.unwrap_or_else(|error| panic!("{error}"))).expect("text")
        };
        let sleeps = |text: &str| text.matches("nanosleep").count();
        let (held, plain) = (text(Some((place, 5_000_000))), text(None));
        assert!(sleeps(&held) > sleeps(&plain), "{name} is not held up at {place:?}");
        assert!(held.contains("5000000") && !plain.contains("5000000"), "{name} at {place:?}");
    }
}

/// Tests that whole-matrix GEMMs have delays, or lack waits, only in builds of stress tests that
/// request this.
fn products_that_are_held_up_or_do_not_wait_compile() {
    let [_, gather, scatter, exchange, one_shot] = iris_kernels::source::GEMMS else {
        panic!("five sources")
    };
    let text = |source: &iris_kernels::source::Text, fault_injection: FaultInjection| {
        let config = match source.name {
            name if name == exchange.name || name == one_shot.name => CoreConfig::flipped(64, 1, 8),
            _ => CoreConfig::wide(256, 2, 4),
        };
        let options = fault_injection.options_of_products(config.options([2; 2]));
        let code = compile((*source).into(), &options, "compute_90a");
        String::from_utf8(code.unwrap_or_else(|error| panic!("{error}"))).expect("text")
    };
    let with =
        |without, hold, whole| FaultInjection { without, hold, whole, ..FaultInjection::default() };
    // A build that removes only the waits of gates compiles the GEMMs with unchanged options.
    let gates = with(Some(Access::SignalLoad), None, Some(OmittedWait::Others));
    let defines = |fault_injection: FaultInjection| {
        fault_injection.options_of_products(Options::new()).defines
    };
    assert_eq!(defines(gates), defines(FaultInjection::default()));
    // GEMMs for few rows also wait for other words and for headers, so some of their polling loops
    // must remain.
    for (source, access, is_alone) in [
        (gather, Access::SignalLoad, true),
        (scatter, Access::SignalLoad, true),
        (exchange, Access::LlLoad, false),
        (one_shot, Access::SignalLoad, false),
    ] {
        let plain = text(source, FaultInjection::default());
        let left_out = text(source, with(Some(access), None, Some(OmittedWait::Products)));
        // Each polling loop contains one sleep, so the number of sleeps is the number of loops.
        let sleeps = |text: &str| text.matches("nanosleep").count();
        let (all, left) = (sleeps(&plain), sleeps(&left_out));
        assert!(all > 0 && (left == 0) == is_alone, "{} still waits", source.name);
        assert!(left_out != plain, "{} has all its waits", source.name);
    }
    for (source, place) in
        [(scatter, Hold::Storing), (exchange, Hold::Entered), (one_shot, Hold::Entered)]
    {
        let held = text(source, with(None, Some((place, 5_000_000)), Some(OmittedWait::Products)));
        assert!(held.contains("5000000"), "{} is not held up", source.name);
    }
}

/// Environment variable that marks the child process of the test
/// `a_slow_first_start_is_shown_on_a_terminal_only`.
const FIRST_START: &str = "IRIS_TEST_FIRST_START";

/// Program of the child process: compiles a kernel that is not in the cache, on two threads, like
/// two ranks that are threads.
fn first_start() -> ExitCode {
    let source = KERNELS.iter().copied().find(|text| text.name == "all_reduce.cu");
    let compile = || {
        let options = Options::new().define("IRIS_THREADS", 512);
        rtc::compile(Vendor::Nvidia, source.expect("embedded").into(), &options, "sm_90a")
    };
    let begun = std::time::Instant::now();
    let all = std::thread::scope(|scope| {
        let other = scope.spawn(compile);
        [compile(), other.join().expect("it does not panic")]
    });
    println!("{}", begun.elapsed().as_secs_f64());
    ExitCode::from(u8::from(all.iter().any(Result::is_err)))
}

fn a_slow_first_start_is_shown_on_a_terminal_only() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let cache = folder.path().join("cache");
    let program = std::env::current_exe().expect("this program");
    let start = |terminal: bool| {
        // The program `script` runs the child with a pseudo-terminal as stdout and stderr.
        let mut command =
            Command::new(if terminal { "script".as_ref() } else { program.as_os_str() });
        if terminal {
            command.args(["-qec", &format!("'{}'", program.display()), "/dev/null"]);
        }
        command.env(FIRST_START, "1").env("IRIS_CACHE", &cache).env_remove("RUST_LOG");
        let output = command.stdin(Stdio::null()).output().expect("it starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (text(&output.stdout), text(&output.stderr))
    };
    let (_, silent) = start(false);
    assert_eq!(silent, "", "stderr is no terminal");
    let (cached, _) = start(true);
    assert!(!cached.contains("compiling"), "nothing is compiled: {cached:?}");
    std::fs::remove_dir_all(&cache).expect("the cache");
    let (shown, _) = start(true);
    let mut seconds = shown.lines().filter_map(|line| line.rsplit('K').next()?.trim().parse().ok());
    let seconds: f64 = seconds.next_back().unwrap_or_else(|| panic!("no time in {shown:?}"));
    let told = shown.contains("iris: compiling all_reduce.cu for sm_90a: kernel 1/1, 2 s");
    // A compilation of about two seconds may or may not show the progress line. So the line is
    // checked only for clearly shorter and longer compilations.
    assert!(told && seconds > 1.9 || !told && seconds < 2.5, "{seconds} s: {shown:?}");
}
