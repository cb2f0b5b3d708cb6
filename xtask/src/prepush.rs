//! `cargo xtask prepush`: quick checks for every push.

use std::path::Path;

use anyhow::Result;

use crate::level::Level;
use crate::steps;
use crate::test;

/// Runs tidy, fmt, clippy and the quick tests.
pub(crate) fn run(root: &Path) -> Result<()> {
    let mut steps = test::lint_steps(root);
    steps.push(test::test_step(root, Level::Quick));
    steps::run(steps)
}
