//! `cargo xtask package`: packs the library crates as files for a registry, and runs a program that
//! depends on these files alone.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::program::cargo;

/// Packages to be published. Each package follows the packages that it depends on.
const PACKAGES: [&str; 4] = ["iris-sync", "iris-heap", "iris-kernels", "iris-ops"];

/// Oldest Rust toolchain that the workspace supports: `rust-version` of its manifest.
const OLDEST: &str = "1.88";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Builds the program with the oldest Rust version that the workspace supports, which rustup
    /// must have.
    #[arg(long)]
    pub(crate) oldest: bool,
}

/// Packs the library crates, unpacks the files and runs a program over them, outside of the workspace.
pub(crate) fn run(root: &Path, options: &Options) -> Result<()> {
    let folder = root.join("target/outside");
    let packed = folder.join("packed");
    fs::create_dir_all(&packed).with_context(|| packed.display().to_string())?;
    pack(root, &folder)?;
    let crates = unpack(&folder, &packed)?;
    write_program(&folder, &crates)?;
    // The program is built with the dependency versions of the workspace's lock file.
    fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock")).context("Cargo.lock")?;
    // The program is tiny, so it is built without optimisation, because optimising takes most of a
    // build's time. The candle example is also built so, and one target folder serves both.
    let mut command = match options.oldest {
        false => cargo(&folder, &["run"]),
        true => oldest(&folder, &["run"]),
    };
    command.arg("--target-dir").arg(root.join("target"));
    run_to_end(command)
}

/// Cargo command of the oldest toolchain, run through rustup.
fn oldest(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", OLDEST, "cargo"]).args(arguments).current_dir(folder);
    // These variables name programs of the toolchain that runs xtask. They are removed, because
    // they would be used in place of the oldest toolchain's programs.
    for variable in ["RUSTUP_TOOLCHAIN", "CARGO", "RUSTC", "RUSTDOC"] {
        command.env_remove(variable);
    }
    command
}

/// Command that fails if the oldest supported toolchain is not installed.
pub(crate) fn oldest_probe(root: &Path) -> Command {
    oldest(root, &["--version"])
}

/// Makes the `.crate` files of the packages without building them. The program that uses the crates
/// builds them all.
fn pack(root: &Path, folder: &Path) -> Result<()> {
    let target = folder.join("target/packages");
    let _ = fs::remove_dir_all(target.join("package"));
    let mut command = cargo(root, &["package", "--no-verify", "--allow-dirty", "--target-dir"]);
    command.arg(&target);
    for package in PACKAGES {
        command.args(["-p", package]);
    }
    run_to_end(command)
}

/// Unpacks the `.crate` files into the folder `to`; returns the name and the folder of each crate.
fn unpack(folder: &Path, to: &Path) -> Result<Vec<(String, PathBuf)>> {
    let packed = folder.join("target/packages/package");
    let mut crates = Vec::new();
    for entry in fs::read_dir(&packed).with_context(|| packed.display().to_string())? {
        let file = entry?.path();
        if file.extension().is_none_or(|extension| extension != "crate") {
            continue;
        }
        let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let (name, _) = stem.rsplit_once('-').with_context(|| format!("no version in {stem}"))?;
        let _ = fs::remove_dir_all(to.join(&stem));
        let mut command = Command::new("tar");
        command.arg("xzf").arg(&file).arg("-C").arg(to);
        run_to_end(command)?;
        crates.push((name.to_owned(), to.join(&stem)));
    }
    let all = PACKAGES.iter().all(|package| crates.iter().any(|(name, _)| name == package));
    if !all || crates.len() != PACKAGES.len() {
        bail!("{} has {crates:?}, expected {PACKAGES:?}", packed.display());
    }
    Ok(crates)
}

/// Writes the program of the README, with a manifest that names the unpacked crates by path, and
/// the versions of all other dependencies.
fn write_program(folder: &Path, crates: &[(String, PathBuf)]) -> Result<()> {
    let mut manifest = String::from(
        "[package]\nname = \"outside\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n\n\
         [dependencies]\nanyhow = \"1\"\niris-heap = \"0.1\"\niris-ops = \"0.1\"\n\n\
         [profile.dev]\ndebug = false\nincremental = false\n\n[patch.crates-io]\n",
    );
    for (name, path) in crates {
        writeln!(manifest, "{name} = {{ path = {:?} }}", path.display().to_string())?;
    }
    let source = folder.join("src");
    fs::create_dir_all(&source).with_context(|| source.display().to_string())?;
    fs::write(folder.join("Cargo.toml"), manifest).context("Cargo.toml")?;
    let program = crates.iter().find(|(name, _)| name == "iris-ops").context("no iris-ops")?;
    let program = program.1.join("examples/01_two_ranks.rs");
    fs::copy(&program, source.join("main.rs")).with_context(|| program.display().to_string())?;
    Ok(())
}

fn run_to_end(mut command: Command) -> Result<()> {
    let status = command.status().with_context(|| format!("{command:?} did not start"))?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests that the manifest of the workspace and `OLDEST` name the same version of Rust.
    #[test]
    fn the_oldest_rust_is_that_of_the_manifest() {
        let manifest = fs::read_to_string(crate::root().join("Cargo.toml")).expect("Cargo.toml");
        let manifest: toml::Table = manifest.parse().expect("TOML");
        let package = &manifest["workspace"]["package"];
        assert_eq!(package["rust-version"].as_str(), Some(OLDEST));
    }
}
