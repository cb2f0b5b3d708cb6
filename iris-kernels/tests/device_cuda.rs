//! That NVRTC compiles the device source, and what it refuses. Without NVRTC the tests are ignored,
//! and it is said where it was looked for. What instructions come out is read in iris-testkit,
//! `check/device_code`.

use std::process::ExitCode;

use iris_kernels::build::{Hold, Injected};
use iris_kernels::rtc::{Compiler, Error, KernelSource, Options, TileBuild};
use iris_kernels::source::KERNELS;
use iris_sync::Access;
use iris_testkit::harness::{self, Group, named};

/// Programs of users, whose kernel is a raw string.
const EXAMPLES: [(&str, &str); 2] = [
    ("ring.rs", include_str!("../examples/ring.rs")),
    ("wait_on_tile.rs", include_str!("../../iris-ops/examples/wait_on_tile.rs")),
];

fn main() -> ExitCode {
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
            ],
        ),
        // Minutes: every type and tile for every architecture.
        Group::new(missing, named![every_kernel_compiles_for_every_build]).slow(),
    ])
}

fn nvrtc() -> &'static Compiler {
    Compiler::nvrtc().unwrap_or_else(|error| panic!("{error}"))
}

fn every_kernel_compiles() {
    compile_all(&TileBuild::ALL[1..2], &[("sm_80", 2), ("sm_90a", 0), ("sm_90a", 2)]);
    compile_all(&[TileBuild::ALL[0], TileBuild::ALL[2]], &[("sm_90a", 1)]);
}

fn every_kernel_compiles_for_every_build() {
    let types = |arch| (0..3).map(move |dtype| (arch, dtype));
    let all: Vec<_> = types("sm_80").chain(types("sm_90a")).collect();
    compile_all(&TileBuild::ALL, &all);
}

/// Compile all kernels for these tiles, architectures and types, and say which took longest.
fn compile_all(tiles: &[TileBuild], targets: &[(&str, u32)]) {
    let compiler = nvrtc();
    let mut times = Vec::new();
    for &(arch, dtype) in targets {
        for text in KERNELS {
            for &tile in tiles {
                let begun = std::time::Instant::now();
                let code = compiler
                    .compile((*text).into(), &Options::op(dtype, tile), arch)
                    .unwrap_or_else(|error| panic!("{error}"));
                assert!(code.starts_with(b"\x7fELF"), "{} for {arch} is a cubin", text.name);
                times.push((begun.elapsed(), text.name, dtype, tile.m, arch));
                // Messages have no products: one build serves all.
                if !text.name.contains("matmul") {
                    break;
                }
            }
        }
    }
    times.sort();
    for (time, name, dtype, tile, arch) in times.iter().rev().take(5) {
        println!("{:.1} s: {name}, type {dtype}, tile {tile}, {arch}", time.as_secs_f64());
    }
}

fn a_users_source_compiles_and_errors_carry_the_log() {
    let compiler = nvrtc();
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
    let code = compiler.compile(ring, &Options::new(), "sm_90a").expect("it is right");
    assert!(code.starts_with(b"\x7fELF"));

    for (text, message) in [
        // A word of one scope is not one of the other.
        ("DevWord f(const HeapView& heap) { return heap.word(0, 0); }", "no suitable"),
        // The table says which scope an access has.
        (
            "i32 f(const Words& m, SymWord w) { return m.load<Access::FlagLoad>(w); }",
            "the table's scope of this access",
        ),
        // A word does not give its address away.
        ("u64 f(SymWord w) { return w.address; }", "inaccessible"),
        ("void f(SymWord w) { w.store<Order::Acquire>(1); }", "a store is relaxed or release"),
    ] {
        let text = format!(
            "#include \"iris/sync.h\"\nusing namespace iris;\n__device__ {text}\n\
             IRIS_KERNEL k(IRIS_ARGS HeapView heap, Channel c) {{ (void)sizeof(f); }}"
        );
        let source = KernelSource { name: "wrong.cu", text: &text };
        match compiler.compile(source, &Options::new(), "sm_90a") {
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
            let code = nvrtc().compile(KernelSource { name, text }, &Options::new(), arch);
            let code = code.unwrap_or_else(|error| panic!("{error}"));
            assert!(code.starts_with(b"\x7fELF"), "{name}");
        }
    }
}

fn the_kernels_of_the_stress_test_compile() {
    let text = include_str!("../../iris-testkit/src/stress/stress.cu");
    let hold = Some((Hold::Filling, 1000));
    let injected = Injected { delay_ns: 1000, without: Some(Access::VersionLoad), hold };
    let options = injected.options(Options::new());
    let code = nvrtc().compile(KernelSource { name: "stress.cu", text }, &options, "sm_90a");
    let code = code.unwrap_or_else(|error| panic!("{error}"));
    for name in ["iris_stress_fill", "iris_stress_compare", "iris_stress_ring"] {
        assert!(code.windows(name.len()).any(|bytes| bytes == name.as_bytes()), "{name}");
    }
}
