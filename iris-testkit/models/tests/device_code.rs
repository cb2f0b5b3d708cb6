//! Tests of the code that compilers make of every access and operation of the device headers, with
//! the probes of `cargo xtask check-protocols`, which also compiles the kernels. The tests for a
//! vendor are ignored if the vendor's compiler is missing. An architecture that the compiler does
//! not support is only reported.

use std::process::ExitCode;

use iris_kernels::rtc::Compiler;
use iris_models::check::device_code::{ARCHS, DeviceSource, Outcome, check, has_clang};
use iris_testkit::harness::{self, Group, named};

fn main() -> ExitCode {
    let no_nvrtc = Compiler::nvrtc().err().map(|error| error.to_string());
    let no_clang = (!has_clang()).then(|| "no clang with a target amdgcn".into());
    harness::run_together(vec![
        Group::new(
            no_nvrtc,
            named![
                accesses_have_their_order_and_scope_on_nvidia,
                products_that_wait_have_the_fences_of_their_proxies,
                products_that_push_do_it_at_the_scope_of_the_system,
                products_wait_for_their_turn,
            ],
        ),
        Group::new(no_clang, named![accesses_have_their_order_and_scope_on_amd]),
    ])
}

fn accesses_have_their_order_and_scope_on_nvidia() {
    every_access("sm_");
}

fn accesses_have_their_order_and_scope_on_amd() {
    every_access("gfx");
}

/// Tests that the checks notice if fences are removed from GEMMs that wait for peers and store to
/// them.
fn products_that_wait_have_the_fences_of_their_proxies() {
    let fence = r#"asm volatile("fence.proxy.async;" ::: "memory");"#;
    let with = format!("follow_with_copies() {{ {fence} }}");
    let behind = format!("follow_copies() {{ {fence} }}");
    for (file, text, planted, expected) in [
        ("iris/gemm/sm90_ptx.h", &*with, "follow_with_copies() {}", "a copy behind an acquire"),
        ("iris/gemm/sm90_ptx.h", &*behind, "follow_copies() {}", "a release behind copies"),
    ] {
        let mut source = DeviceSource { kernels: Vec::new(), ..DeviceSource::embedded() };
        let header = source.headers.iter_mut().find(|(name, _)| *name == file).expect(file);
        assert!(header.1.contains(text), "{file} has no {text}");
        header.1 = header.1.replace(text, planted);
        is_found(&format!("{planted} in {file}"), &source, expected);
    }
}

/// Tests that the checks notice stores to a peer at device scope in GEMMs with few rows.
fn products_that_push_do_it_at_the_scope_of_the_system() {
    for file in ["gemm_sm90_exchange.cu", "gemm_sm90_one_shot.cu"] {
        let mut source = DeviceSource { kernels: Vec::new(), ..DeviceSource::embedded() };
        source.gemms.retain(|(name, _)| *name == file);
        let (_, text) = source.gemms.first_mut().expect(file);
        assert!(text.contains("core.begin();"), "{file} does not begin");
        *text = text.replace(
            "core.begin();",
            "core.begin(); port::store<Order::Release, Scope::Device>(1ull << 60, 1, -1);",
        );
        is_found(file, &source, "st.release.gpu");
    }
}

/// Tests that the checks notice a kernel that may begin before its predecessor on the stream is
/// over and does not wait for it.
fn products_wait_for_their_turn() {
    const TURN: &str = "port::take_turn();";
    let whole = "prepare();\n        if constexpr (!Op::AFTER_OPEN) ";
    let tile = "without clusters\");\n        prepare();\n        ";
    let stores = "void store(u32 group) {\n        if constexpr (Op::AFTER_OPEN) ";
    let waits = ["parts.part_slabs;\n            ", ".len();\n            "];
    let bias = "waited for that launch yet.\n        ";
    for (file, before) in [
        ("gemm_sm90.cu", whole),
        ("gemm_sm90_exchange.cu", tile),
        ("gemm_sm90_one_shot.cu", tile),
        ("gemm_sm90_gather.cu", stores),
        ("gemm_sm90_scatter.cu", stores),
        ("gemm_sm90_gather.cu", waits[0]),
        ("gemm_sm90_scatter.cu", waits[1]),
        ("gemm_sm90_gather.cu", bias),
        ("gemm_sm90_scatter.cu", bias),
    ] {
        let mut source = DeviceSource { kernels: Vec::new(), ..DeviceSource::embedded() };
        source.gemms.retain(|(name, _)| *name == file);
        let turn = format!("{before}{TURN}");
        let mut files = source.headers.iter_mut().chain(&mut source.gemms);
        let planted = files.find(|(_, text)| text.contains(&turn));
        let (_, text) = planted.unwrap_or_else(|| panic!("no turn behind {before}"));
        *text = text.replacen(&turn, &format!("{before};"), 1);
        is_found(&format!("{before} in {file}"), &source, "does not wait for its turn");
    }
}

/// Asserts that the check of the code for sm_90a finds the fault in `source`, and reports it as
/// `expected`.
fn is_found(what: &str, source: &DeviceSource, expected: &str) {
    let arch = ARCHS.into_iter().find(|arch| arch.name == "sm_90a").expect("it is one of them");
    match check(arch, source).outcome {
        Outcome::Failed(findings) => {
            assert!(format!("{findings:?}").contains(expected), "{what}: {findings:#?}");
        }
        Outcome::Skipped(why) if !arch.required => println!("skipped: {why}"),
        outcome => panic!("{what}: {outcome:?}"),
    }
}

/// Checks all architectures whose names begin with `vendor`.
fn every_access(vendor: &str) {
    let source = DeviceSource { kernels: Vec::new(), ..DeviceSource::embedded() };
    for arch in ARCHS.into_iter().filter(|arch| arch.name.starts_with(vendor)) {
        match check(arch, &source).outcome {
            Outcome::Done { compiler, probes, twice, .. } => {
                println!("{}: {probes} probes, {twice} twice, {compiler}", arch.name);
                assert!(probes > 170, "only {probes} probes");
            }
            Outcome::Skipped(why) if arch.required => panic!("{}: {why}", arch.name),
            Outcome::Skipped(why) => println!("{} skipped: {why}", arch.name),
            Outcome::Failed(findings) => panic!("{}: {findings:#?}", arch.name),
        }
    }
}
