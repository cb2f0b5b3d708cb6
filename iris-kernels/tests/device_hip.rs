//! Tests that clang compiles the device source for AMD's devices. The tests are ignored without a
//! clang that supports these devices. iris-models checks the generated instructions, in
//! `check/device_code`.

use std::path::Path;
use std::process::{Command, ExitCode};

use iris_kernels::rtc::{Compiler, Options};
use iris_kernels::source::{KERNELS, SourceKind};
use iris_testkit::harness::{self, Group, named};
use rayon::prelude::*;

const KERNEL_FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");

fn main() -> ExitCode {
    let looked = "no clang with a target amdgcn; looked for clang-19, clang-20, clang";
    let missing = find_clang().is_none().then(|| looked.into());
    let no_linker = missing.clone().or_else(|| {
        let linkers = ["ld.lld-19", "ld.lld-20", "ld.lld"].map(harness::no_program);
        linkers.iter().all(Option::is_some).then(|| "no ld.lld, which links code objects".into())
    });
    harness::run_together(vec![
        Group::new(
            missing,
            named![every_kernel_compiles, kernels_of_users_compile, sums_in_f32_are_swapped_in,],
        ),
        Group::new(no_linker, named![clang_makes_what_a_device_loads]),
    ])
}

/// Name of the first clang on this machine that can compile for AMD's devices; `None` if no clang
/// can.
fn find_clang() -> Option<&'static str> {
    ["clang-19", "clang-20", "clang"].into_iter().find(|name| {
        let targets = Command::new(name).arg("-print-targets").output();
        targets.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("amdgcn"))
    })
}

fn clang() -> &'static str {
    find_clang().expect("main found it")
}

fn assembly(clang: &str, source: &Path, arch: &str, defines: &[&str]) -> String {
    let mut command = Command::new(clang);
    command
        .args(["-x", "hip", "-nogpuinc", "-nogpulib", "--cuda-device-only", "-O3", "-std=c++17"])
        .args(["-Wall", "-Wextra", "-Werror", "-S"])
        .arg(format!("--offload-arch={arch}"))
        .arg(format!("-I{KERNEL_FOLDER}"))
        .args(defines)
        .arg(source);
    let output = tempfile::NamedTempFile::new().expect("room");
    harness::compile(command, output.path())
        .unwrap_or_else(|log| panic!("{} for {arch}: {log}", source.display()));
    std::fs::read_to_string(output.path()).expect("assembly is text")
}

/// Tests that kernels with products compile for bf16, and that clang parses message kernels. The
/// checks of iris-models compile message kernels to instructions, with one constant changed, but
/// without warnings.
fn every_kernel_compiles() {
    let clang = clang();
    let arches = ["gfx90a", "gfx942"];
    let jobs: Vec<_> =
        arches.iter().flat_map(|arch| KERNELS.iter().map(move |it| (arch, it))).collect();
    jobs.par_iter().for_each(|(arch, text)| {
        let source = Path::new(KERNEL_FOLDER).join(text.name);
        let product = text.kind == SourceKind::TileGemm;
        let how = if product { "-O3" } else { "-fsyntax-only" };
        let text = assembly(clang, &source, arch, &["-DIRIS_FACTOR=2", how]);
        assert!(!product || text.contains("\niris_"), "{} has a kernel", source.display());
    });
}

/// Tests that clang makes a code object in the format that the runtime loads, and that clang's log
/// is returned for a wrong source.
fn clang_makes_what_a_device_loads() {
    let clang = Compiler::clang().unwrap_or_else(|error| panic!("{error}"));
    let source = KERNELS.iter().find(|text| text.kind == SourceKind::Barrier).expect("a kernel");
    for (arch, machine) in [("gfx90a", 0x3f), ("gfx942", 0x4c)] {
        let code = clang.compile((*source).into(), &Options::new(), arch).expect("it compiles");
        // The ELF header must have AMD's machine type (0xe0), and the architecture in its flags.
        assert!(code.starts_with(b"\x7fELF") && code[18..20] == [0xe0, 0]);
        assert_eq!(code[48], machine, "{arch}");
        let name = b"iris_barrier.kd";
        assert!(code.windows(name.len()).any(|bytes| bytes == name), "its descriptor for {arch}");
    }
    let error = clang.compile("#include \"iris/nothing.h\"".into(), &Options::new(), "gfx942");
    let error = error.expect_err("no such header").to_string();
    assert!(error.contains("nothing.h") && error.contains("gfx942"), "{error}");
    let unknown =
        clang.compile((*source).into(), &Options::new(), "gfx1").expect_err("no such arch");
    assert!(unknown.to_string().contains("gfx1"), "{unknown}");
}

fn kernels_of_users_compile() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let root = env!("CARGO_MANIFEST_DIR");
    let operations = Path::new(root).join("tests/user_kernels.cu");
    assert!(assembly(clang(), &operations, "gfx942", &[]).contains("copies_16"));
    for (file, kernel) in [("norm.cu", "add_norm"), ("touch.cu", "touch")] {
        let of_bench = Path::new(root).join("../iris-testkit/cli/src/gpu_bench").join(file);
        assert!(assembly(clang(), &of_bench, "gfx942", &[]).contains(kernel));
    }
    for program in ["examples/ring.rs", "../iris-ops/examples/wait_on_tile.rs"] {
        let text = std::fs::read_to_string(format!("{root}/{program}")).expect("the example");
        let kernel = text.split("r#\"").nth(1).and_then(|text| text.split("\"#").next());
        let file = folder.path().join("example.cu");
        std::fs::write(&file, kernel.expect("a raw string")).expect("room");
        assert!(assembly(clang(), &file, "gfx942", &[]).contains("amdhsa_kernel"), "{program}");
    }
}

fn sums_in_f32_are_swapped_in() {
    let clang = clang();
    let source = Path::new(KERNEL_FOLDER).join("all_reduce.cu");
    for arch in ["gfx90a", "gfx942"] {
        let text = assembly(clang, &source, arch, &[]);
        let start = text.find("\niris_add_atomic:").expect("the kernel");
        let body = &text[start..];
        let body = &body[..body.find(".end_amdhsa_kernel").expect("its end")];
        assert!(body.contains("global_atomic_cmpswap"), "{arch}");
        assert!(!body.contains("atomic_add_f32"), "{arch}: may be dropped on fine-grained memory");
    }
}
