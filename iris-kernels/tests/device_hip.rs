//! That clang compiles the device source for AMD's devices. Without clang 19 these tests say that they
//! were skipped. What instructions come out is read in iris-testkit, `check/device_code`.

use std::path::Path;
use std::process::Command;

use iris_kernels::source::KERNELS;

const KERNEL_FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");

/// The first clang there is that knows HIP for these devices.
fn clang() -> Option<&'static str> {
    let found = ["clang-19", "clang-20", "clang"].into_iter().find(|name| {
        let targets = Command::new(name).arg("-print-targets").output();
        targets.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("amdgcn"))
    });
    if found.is_none() {
        println!("skipped: no clang with a target amdgcn; looked for clang-19, clang-20, clang");
    }
    found
}

fn assembly(clang: &str, source: &Path, arch: &str, defines: &[&str]) -> String {
    let output = Command::new(clang)
        .args(["-x", "hip", "-nogpuinc", "-nogpulib", "--cuda-device-only", "-O3", "-std=c++17"])
        .args(["-Wall", "-Wextra", "-Werror", "-S", "-o", "-"])
        .arg(format!("--offload-arch={arch}"))
        .arg(format!("-I{KERNEL_FOLDER}"))
        .args(defines)
        .arg(source)
        .output()
        .expect("clang starts");
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} for {arch}: {log}", source.display());
    String::from_utf8(output.stdout).expect("assembly is text")
}

#[test]
fn every_kernel_compiles() {
    let Some(clang) = clang() else { return };
    for arch in ["gfx90a", "gfx942"] {
        for text in KERNELS {
            let source = Path::new(KERNEL_FOLDER).join(text.name);
            let text = assembly(clang, &source, arch, &["-DIRIS_DTYPE=2"]);
            assert!(text.contains("\niris_"), "{} has a kernel", source.display());
        }
    }
}

#[test]
fn sums_in_f32_are_swapped_in() {
    let Some(clang) = clang() else { return };
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
