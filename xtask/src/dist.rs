//! `cargo xtask dist`: the program `iris` and its compiled kernels in one folder, for a GPU host that
//! has neither Rust nor this repository.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::program;

/// The most that the folder may hold, in bytes: it travels.
const LIMIT: u64 = 60 << 20;

/// What the folder is for.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Architectures to compile the kernels for, with commas between. NVIDIA's need NVRTC, AMD's hiprtc or clang
    /// and lld; a GPU is not needed.
    #[arg(long, default_value = "sm_90a,gfx942")]
    arch: String,
}

/// Makes `dist/` anew.
pub(crate) fn run(root: &Path, options: &Options) -> Result<()> {
    let built = program::build_iris(root)?;
    let dist = root.join("dist");
    if dist.exists() {
        fs::remove_dir_all(&dist).with_context(|| format!("removing {}", dist.display()))?;
    }
    fs::create_dir_all(&dist)?;
    let iris = dist.join("iris");
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(&iris).arg(&built);
    let stripped = strip.status().context("strip, of binutils, did not start")?;
    ensure!(stripped.success(), "strip ended with {stripped}");
    let mut compile = Command::new(&iris);
    compile.args(["kernels", "--arch", &options.arch, "--out"]).arg(dist.join("kernels"));
    let compiled = compile.status().with_context(|| format!("starting {}", iris.display()))?;
    ensure!(compiled.success(), "`iris kernels` ended with {compiled}");
    let bytes = size(&dist)?;
    ensure!(bytes <= LIMIT, "dist/ has {bytes} bytes, expected at most {LIMIT}");
    println!("dist/: {:.1} MiB", bytes as f64 / f64::from(1 << 20));
    Ok(())
}

/// Bytes of all files of a folder.
fn size(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.metadata()?;
        bytes += if kind.is_dir() { size(&entry.path())? } else { kind.len() };
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_folder_is_as_large_as_its_files() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        std::fs::create_dir(folder.path().join("kernels")).expect("a folder");
        std::fs::write(folder.path().join("a"), [0; 100]).expect("a file");
        std::fs::write(folder.path().join("kernels/b"), [0; 11]).expect("a file");
        assert_eq!(super::size(folder.path()).expect("a size"), 111);
    }
}
