//! `cargo xtask dist`: the program `iris`, its compiled kernels and the script that takes the record
//! of a machine in one folder, and an archive of the folder, for a GPU host without Rust and without
//! this repository.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::program;

/// Largest size of the archive in bytes. The size is limited because the archive is copied between
/// machines. The folder is about three times as large.
const LIMIT: u64 = 60 << 20;

/// Options of `cargo xtask dist`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Architectures to compile the kernels for, separated by commas. Those of NVIDIA need NVRTC,
    /// those of AMD hiprtc or clang and lld; a GPU is not needed.
    #[arg(long, default_value = "sm_90a,gfx942")]
    arch: String,
}

/// Builds `dist/` from scratch, and `dist.tar.gz`, which contains it.
pub(crate) fn run(root: &Path, options: &Options) -> Result<()> {
    let built = program::build_iris(root)?;
    let dist = root.join("dist");
    if dist.exists() {
        fs::remove_dir_all(&dist).with_context(|| format!("removing {}", dist.display()))?;
    }
    fs::create_dir_all(&dist)?;
    for name in ["record.sh", "decode.toml"] {
        fs::copy(root.join("bench").join(name), dist.join(name)).context(name)?;
    }
    let iris = dist.join("iris");
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(&iris).arg(&built);
    let stripped = strip.status().context("strip, of binutils, did not start")?;
    ensure!(stripped.success(), "strip ended with {stripped}");
    let mut compile = Command::new(&iris);
    compile.args(["kernels", "--arch", &options.arch, "--out"]).arg(dist.join("kernels"));
    let compiled = compile.status().with_context(|| format!("starting {}", iris.display()))?;
    ensure!(compiled.success(), "`iris kernels` ended with {compiled}");
    let archive = root.join("dist.tar.gz");
    let mut pack = Command::new("tar");
    pack.arg("-C").arg(root).arg("-czf").arg(&archive).arg("dist");
    let packed = pack.status().context("tar did not start")?;
    ensure!(packed.success(), "tar ended with {packed}");
    let bytes = fs::metadata(&archive)?.len();
    ensure!(bytes <= LIMIT, "dist.tar.gz has {bytes} bytes, expected at most {LIMIT}");
    println!("dist.tar.gz: {:.1} MiB", bytes as f64 / f64::from(1 << 20));
    Ok(())
}
