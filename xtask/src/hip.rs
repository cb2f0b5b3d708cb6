//! The feature `hip` of iris-heap: its table of HIP's functions held against bindings and headers of AMD's.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::program::cargo;
use crate::steps::Step;

/// Below a root of ROCm's, or `/usr` on Debian.
const HEADER: &str = "include/hip/hip_runtime_api.h";

/// As a step of `cargo xtask test`. A person's machine may lack the headers; CI's may not.
pub(crate) fn step(root: &Path) -> Step {
    let told = ["HIP_PATH", "ROCM_PATH"].into_iter().filter_map(std::env::var_os);
    let places = told.map(PathBuf::from).chain(["/opt/rocm".into(), "/usr".into()]);
    let places: Vec<PathBuf> = places.collect();
    let found = places.iter().find(|place| place.join(HEADER).is_file());
    let found = found.cloned().unwrap_or_else(|| "/usr".into());
    let arguments = ["test", "--release", "-p", "iris-heap", "--features", "hip", "--lib", "hip::"];
    let mut command = cargo(root, &arguments);
    command.env("HIP_PATH", &found);
    let step = Step::command("hip", command);
    if std::env::var_os("CI").is_some_and(|value| value == "true") {
        return step;
    }
    let mut probe = Command::new("test");
    probe.arg("-f").arg(found.join(HEADER));
    step.needs("libamdhip64-dev (HIP's headers)", probe)
}
