//! Feature `hip` of iris-heap: compares its table of HIP's functions with AMD's bindings and
//! headers.

use std::path::Path;
use std::process::Command;

use crate::features::{hip_headers, with_features};
use crate::program::cargo;
use crate::steps::Step;

/// Step of `cargo xtask test` that tests the table of HIP's functions. It asks for the whole
/// workspace, because dependencies of iris-heap alone have fewer features and would be built again.
pub(crate) fn step(root: &Path) -> Step {
    let mut command = with_features(cargo(root, &["test", "--release", "--workspace", "--lib"]));
    command.args(["--quiet", "hip::"]);
    let mut probe = Command::new("test");
    probe.arg("-n").arg(hip_headers().unwrap_or_default());
    Step::command("hip", command).needs("libamdhip64-dev (HIP's headers)", probe)
}
