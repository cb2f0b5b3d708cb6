//! What clang makes of the device source for AMD's devices. Without a clang that has them
//! as targets the tests are ignored.

use std::path::Path;
use std::process::{Command, ExitCode};

use iris_kernels::source::KERNELS;
use iris_testkit::harness::{self, Group, named};

const KERNEL_FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
const OPERATIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/host/operations.cu");

fn main() -> ExitCode {
    let looked = "no clang with a target amdgcn; looked for clang-19, clang-20, clang";
    let missing = find_clang().is_none().then(|| looked.into());
    harness::run_together(vec![Group::new(
        missing,
        named![
            every_kernel_compiles,
            kernels_of_users_compile,
            system_scope_goes_past_the_caches_on_gfx942,
            system_scope_writes_back_on_gfx90a,
            sums_in_f32_are_swapped_in,
        ],
    )])
}

/// The first clang there is that knows HIP for these devices.
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

/// The instructions of one kernel.
fn entry<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let start = text.find(&format!("\n{name}:")).unwrap_or_else(|| panic!("no {name}"));
    let rest = &text[start..];
    let end = rest.find("s_endpgm").expect("the end of a kernel");
    rest[..end].lines().map(str::trim).collect()
}

/// The instructions that begin so.
fn of<'a>(lines: &[&'a str], kind: &str) -> Vec<&'a str> {
    lines.iter().copied().filter(|line| line.starts_with(kind)).collect()
}

fn every_kernel_compiles() {
    let clang = clang();
    for arch in ["gfx90a", "gfx942"] {
        for text in KERNELS {
            let source = Path::new(KERNEL_FOLDER).join(text.name);
            let text = assembly(clang, &source, arch, &["-DIRIS_DTYPE=2"]);
            assert!(text.contains("\niris_"), "{} has a kernel", source.display());
        }
    }
}

fn kernels_of_users_compile() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let root = env!("CARGO_MANIFEST_DIR");
    let operations = Path::new(root).join("tests/user_kernels.cu");
    assert!(assembly(clang(), &operations, "gfx942", &[]).contains("copies_16"));
    for program in ["examples/ring.rs", "../iris-ops/examples/wait_on_tile.rs"] {
        let text = std::fs::read_to_string(format!("{root}/{program}")).expect("the example");
        let kernel = text.split("r#\"").nth(1).and_then(|text| text.split("\"#").next());
        let file = folder.path().join("example.cu");
        std::fs::write(&file, kernel.expect("a raw string")).expect("room");
        assert!(assembly(clang(), &file, "gfx942", &[]).contains("amdhsa_kernel"), "{program}");
    }
}

fn system_scope_goes_past_the_caches_on_gfx942() {
    let clang = clang();
    let text = assembly(clang, OPERATIONS.as_ref(), "gfx942", &[]);

    let release = entry(&text, "sym_store_release");
    assert_eq!(of(&release, "buffer_wbl2"), ["buffer_wbl2 sc0 sc1"]);
    let store = release.iter().position(|line| line.starts_with("buffer_wbl2")).expect("seen");
    let after = of(&release[store..], "global_store_dword");
    assert!(after[0].ends_with("sc0 sc1"), "{after:?}");

    let acquire = entry(&text, "sym_load_acquire");
    assert_eq!(of(&acquire, "buffer_inv"), ["buffer_inv sc0 sc1"]);
    assert!(of(&acquire, "global_load_dword").iter().any(|line| line.ends_with("sc0 sc1")));

    for name in ["sym_add_acqrel", "sym_exchange_acquire", "sym_cas_acquire", "sym_max_release"] {
        let lines = entry(&text, name);
        let atomics = of(&lines, "global_atomic");
        assert_eq!(atomics.len(), 1, "{name}: {atomics:?}");
        assert!(atomics[0].ends_with("sc1"), "{name}: {atomics:?}");
    }

    // Of device scope: sc1 and no sc0 on fences, and nothing of system scope.
    let lines = entry(&text, "dev_store_release");
    assert_eq!(of(&lines, "buffer_wbl2"), ["buffer_wbl2 sc1"]);
    let lines = entry(&text, "dev_load_acquire");
    assert_eq!(of(&lines, "buffer_inv"), ["buffer_inv sc1"]);
    for relaxed in ["sym_load_relaxed", "sym_store_relaxed", "dev_load_relaxed"] {
        let lines = entry(&text, relaxed);
        assert_eq!(of(&lines, "buffer_"), [] as [&str; 0], "{relaxed} orders nothing");
    }
}

fn system_scope_writes_back_on_gfx90a() {
    let clang = clang();
    let text = assembly(clang, OPERATIONS.as_ref(), "gfx90a", &[]);
    assert_eq!(of(&entry(&text, "sym_store_release"), "buffer_wbl2"), ["buffer_wbl2"]);
    assert_eq!(of(&entry(&text, "dev_store_release"), "buffer_wbl2"), [] as [&str; 0]);
    let acquire = entry(&text, "sym_load_acquire");
    assert!(!of(&acquire, "buffer_invl2").is_empty(), "{acquire:?}");
    assert!(of(&entry(&text, "dev_load_acquire"), "buffer_invl2").is_empty());
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
