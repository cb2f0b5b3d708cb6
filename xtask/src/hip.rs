//! The feature `hip` of iris-heap: its table of HIP's functions held against bindings and headers of AMD's.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::program::cargo;
use crate::steps::Step;

/// Below a root of ROCm's, or `/usr` on Debian.
const HEADER: &str = "include/hip/hip_runtime_api.h";

/// The root of HIP's headers; `None` if they are nowhere. A person's machine may lack them; CI's may not, and is
/// given a root at which the build fails.
fn headers() -> Option<PathBuf> {
    let told = ["HIP_PATH", "ROCM_PATH"].into_iter().filter_map(std::env::var_os);
    let mut places = told.map(PathBuf::from).chain(["/opt/rocm".into(), "/usr".into()]);
    let found = places.find(|place| place.join(HEADER).is_file());
    let ci = std::env::var_os("CI").is_some_and(|value| value == "true");
    found.or_else(|| ci.then(|| "/usr".into()))
}

/// Turns the feature on where the headers are. All steps that build programs do, so that none builds the workspace
/// again.
pub(crate) fn with_feature(mut command: Command) -> Command {
    if let Some(root) = headers() {
        command.args(["--features", "iris-heap/hip"]).env("HIP_PATH", root);
    }
    command
}

/// The tests of the table as a step of `cargo xtask test`.
pub(crate) fn step(root: &Path) -> Step {
    let mut command = with_feature(cargo(root, &["test", "--release", "-p", "iris-heap", "--lib"]));
    command.arg("hip::");
    let mut probe = Command::new("test");
    probe.arg("-n").arg(headers().unwrap_or_default());
    Step::command("hip", command).needs("libamdhip64-dev (HIP's headers)", probe)
}
