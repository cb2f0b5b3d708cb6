//! A wrong scope, planted in a copy of the device source, is found by more than one check that knows
//! nothing of the others: types and asserts of the headers, the hooks of their host form, the code
//! that clang makes of them.
#![cfg(iris_cxx)]

use std::path::Path;
use std::process::Command;

use iris_kernels::source::{HEADERS, KERNELS};
use iris_testkit::check::device_code::{self, ARCHS, Outcome};
use iris_testkit::model::headers::COMPILER;

/// The device source with `old` replaced by `new` in one file.
fn plant(file: &str, old: &str, new: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("iris")).expect("a folder");
    for text in HEADERS.iter().chain(KERNELS) {
        let mut source = text.text.to_string();
        if text.name == file {
            assert!(source.contains(old), "{file} has no {old}");
            source = source.replacen(old, new, 1);
        }
        std::fs::write(folder.path().join(text.name), source).expect("a file");
    }
    folder
}

/// The checks that found something in this source, with what they said.
fn found_by(source: &Path) -> Vec<(&'static str, String)> {
    let mut found = Vec::new();
    let program = source.join("hooks");
    let hooks = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/plants/hooks.cpp");
    let mut compiler = Command::new(COMPILER);
    compiler.args(["-std=c++17", "-O1", "-I"]).arg(source).arg(hooks).arg("-o").arg(&program);
    let compiled = compiler.output().expect("the compiler that built this crate");
    if compiled.status.success() {
        let run = Command::new(&program).output().expect("the program starts");
        if run.status.code() != Some(0) {
            found.push(("hook", String::from_utf8_lossy(&run.stdout).into_owned()));
        }
    } else {
        found.push(("type", String::from_utf8_lossy(&compiled.stderr).into_owned()));
    }
    for arch in ARCHS.into_iter().filter(|arch| ["gfx90a", "gfx942"].contains(&arch.name)) {
        match device_code::check(arch, Some(source)).outcome {
            Outcome::Failed(why) => found.push((arch.name, why)),
            Outcome::Skipped(why) => println!("skipped: {}: {why}", arch.name),
            Outcome::Done { .. } => {}
        }
    }
    found
}

#[test]
fn a_wrong_scope_is_found_by_independent_checks() {
    let wide = "using SymWord = ScopedWord<Scope::System, i32>;";
    let row = "X(SignalStore, Release, System)";
    let port = "return call(order, __HIP_MEMORY_SCOPE_SYSTEM)";
    let other = |text: &str| text.replace("System", "Device").replace("SYSTEM", "AGENT");
    let call = "    flow::barrier(";
    let raw =
        "    port::store<Order::Release, Scope::Device>(args.heap.signal[1] + 4096, 1, -1);\n";
    let plants: [(&str, String, String, &[&str]); 5] = [
        ("iris/sym.h", wide.into(), wide.into(), &[]),
        ("iris/sym.h", wide.into(), other(wide), &["hook", "gfx90a", "gfx942"]),
        ("iris/sync.h", row.into(), other(row), &["type", "gfx90a", "gfx942"]),
        ("iris/port_hip.h", port.into(), other(port), &["gfx90a", "gfx942"]),
        ("barrier.cu", call.into(), format!("{raw}{call}"), &["hook", "gfx942"]),
    ];
    let has_clang = device_code::has_clang();
    for (file, old, new, expected) in plants {
        let folder = plant(file, &old, &new);
        let found = found_by(folder.path());
        let by: Vec<_> = found.iter().map(|(check, _)| *check).collect();
        println!("{file}: {} -> {}: found by {by:?}", old.trim(), new.trim());
        let expected: Vec<_> =
            expected.iter().copied().filter(|it| has_clang || !it.starts_with("gfx")).collect();
        assert_eq!(by, expected, "{file}: {found:#?}");
    }
}

#[test]
fn the_example_runs() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["run", "--quiet", "--release", "-p", "iris-testkit"]);
    let output = command.args(["--example", "check_my_protocol"]).output().expect("cargo starts");
    let (said, log) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{log}");
    assert_eq!(said.matches("  ok").count(), 2, "{said}");
    assert_eq!(said.matches("Race(").count(), 2, "{said}");
}
