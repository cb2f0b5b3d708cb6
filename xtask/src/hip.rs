//! Feature `hip` of iris-heap: compares its table of HIP's functions with AMD's bindings and
//! headers.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::program::cargo;
use crate::steps::Step;

/// Path of HIP's header below the root folder of ROCm, or below `/usr` on Debian.
const HEADER: &str = "include/hip/hip_runtime_api.h";

/// Root folder of HIP's headers; `None` if they are not installed. In CI a missing header is an
/// error, so a root is returned at which the build fails.
fn headers() -> Option<PathBuf> {
    let told = ["HIP_PATH", "ROCM_PATH"].into_iter().filter_map(std::env::var_os);
    let mut places = told.map(PathBuf::from).chain(["/opt/rocm".into(), "/usr".into()]);
    let found = places.find(|place| place.join(HEADER).is_file());
    let ci = std::env::var_os("CI").is_some_and(|value| value == "true");
    found.or_else(|| ci.then(|| "/usr".into()))
}

/// Enables iris-heap's feature `hip` for a cargo command if HIP's headers are installed. All steps
/// that build programs use this function, so that no step rebuilds the workspace with other
/// features.
pub(crate) fn with_feature(mut command: Command) -> Command {
    if let Some(root) = headers() {
        command.args(["--features", "iris-heap/hip"]).env("HIP_PATH", root);
    }
    command
}

/// Step of `cargo xtask test` that tests the table of HIP's functions. It asks for the whole
/// workspace, because dependencies of iris-heap alone have fewer features and would be built again.
pub(crate) fn step(root: &Path) -> Step {
    let mut command = with_feature(cargo(root, &["test", "--release", "--workspace", "--lib"]));
    command.args(["--quiet", "hip::"]);
    let mut probe = Command::new("test");
    probe.arg("-n").arg(headers().unwrap_or_default());
    Step::command("hip", command).needs("libamdhip64-dev (HIP's headers)", probe)
}
