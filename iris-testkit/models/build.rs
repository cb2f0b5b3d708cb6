//! Compiles `cxx/*.cpp`: the device headers with the hooks of a model, and programs over them.
//!
//! If no C++ compiler is found, the crate is built without `cfg(iris_cxx)`. The checks of the
//! headers then report that they were skipped, and which compiler was looked for. If a compiler
//! exists but rejects the headers, the build fails.

use std::path::Path;
use std::process::{Command, Stdio};

const SOURCES: &str = "cxx";
const HEADERS: &str = "../../iris-kernels/kernels";

fn main() {
    println!("cargo::rustc-check-cfg=cfg(iris_cxx)");
    for folder in [SOURCES, HEADERS, "examples"] {
        println!("cargo::rerun-if-changed={folder}");
    }
    // Include path for programs of other crates: build scripts of crates with this one in their
    // [dependencies] see it as DEP_IRIS_MODEL_INCLUDE.
    let root = std::env::current_dir().unwrap_or_default();
    if let Ok(folders) = std::env::join_paths([root.join(HEADERS), root.join(SOURCES)]) {
        println!("cargo::metadata=include={}", folders.display());
    }
    let mut build = cc::Build::new();
    // Flags: failures of a model unwind through C++ frames, so exceptions are on. The code is
    // optimised in every profile, because a model runs it millions of times, on small stacks.
    let flags = ["-std=c++17", "-fexceptions", "-funwind-tables", "-Wall", "-Wextra", "-Werror"];
    build.cpp(true).opt_level(2).include(HEADERS).include(SOURCES);
    for flag in flags {
        build.flag(flag);
    }
    let compiler = build.get_compiler();
    let mut version = Command::new(compiler.path());
    version.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    println!("cargo::rustc-env=IRIS_CXX_COMPILER={}", compiler.path().display());
    if !version.status().is_ok_and(|status| status.success()) {
        println!(
            "cargo::warning=no C++ compiler ({}): the device headers will not be checked",
            compiler.path().display()
        );
        return;
    }
    let mut sources: Vec<_> = std::fs::read_dir(Path::new(SOURCES))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "cpp"))
        .collect();
    sources.sort();
    build.files(sources).compile("iris_cxx");
    println!("cargo::rustc-cfg=iris_cxx");
}
