//! `cargo xtask test`: the tests and checks that CI runs. CI's own option `--ci` adds `cargo xtask beside`
//! and the candle example.

use std::path::Path;

use anyhow::Result;

use crate::beside;
use crate::check_protocols;
use crate::features::with_features;
use crate::hip;
use crate::level::Level;
use crate::package;
use crate::program::{Program, cargo};
use crate::steps::{self, Step};
use crate::test_programs;
use crate::tidy;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Extent of the tests: normal is what CI runs; quick is a sample of the long suites, without
    /// check-protocols and package; full is everything, including ignored tests and long
    /// searches; smoke is the operators' suite only.
    #[arg(long, default_value_t)]
    level: Level,
    /// Shorthand for the option `--level quick`.
    #[arg(long, conflicts_with_all = ["full", "level"])]
    quick: bool,
    /// Shorthand for the option `--level full`.
    #[arg(long, conflicts_with = "level")]
    full: bool,
    /// Runs only the operators' suite, on this backend: `iris test --backend BACKEND`.
    #[arg(long, value_name = "BACKEND")]
    backend: Option<String>,
    /// Also runs `cargo xtask beside` and the candle example, as CI does.
    #[arg(long, conflicts_with_all = ["quick", "full", "level", "backend"])]
    ci: bool,
}

/// Runs the steps of `cargo xtask test` that the options ask for.
pub(crate) fn run(root: &Path, options: &Options) -> Result<()> {
    let level = match (options.quick, options.full) {
        (true, _) => Level::Quick,
        (_, true) => Level::Full,
        _ => options.level,
    };
    if options.backend.is_some() || level == Level::Smoke {
        let backend = options.backend.as_deref().unwrap_or("cpu");
        return Program::Iris.start(root, "test", &["--backend", backend, "--level", level.name()]);
    }
    let mut steps = lint_steps(root);
    steps.push(build_step(root));
    if level == Level::Quick {
        steps.extend([test_step(root, level), hip::step(root), doc_step(root), deny_step(root)]);
        return steps::run(steps);
    }
    // The models run at the same time as the tests, many of which wait or use one thread only and
    // leave cores idle.
    let [begin, end] = check_protocols::steps(root, level == Level::Full)?;
    steps.push(begin);
    steps.push(test_step(root, level));
    steps.push(hip::step(root));
    steps.push(doc_step(root));
    steps.push(deny_step(root));
    steps.extend(package_steps(root));
    if options.ci {
        steps.extend(ci_steps(root));
    }
    steps.push(end);
    steps::run(steps)
}

/// Steps of static checks: tidy, fmt and clippy.
pub(crate) fn lint_steps(root: &Path) -> Vec<Step> {
    let tree = root.to_owned();
    let clippy = ["clippy", "--release", "--workspace", "--all-targets", "--", "-D", "warnings"];
    vec![
        Step::function("tidy", "cargo xtask tidy", move || tidy::run(&tree)),
        Step::command("fmt", cargo(root, &["fmt", "--all", "--check"]))
            .needs("cargo-fmt", cargo(root, &["fmt", "--version"])),
        Step::command("clippy", cargo(root, &clippy))
            .needs("cargo-clippy", cargo(root, &["clippy", "--version"])),
    ]
}

/// Step that builds the tests, and the programs that the tests start.
fn build_step(root: &Path) -> Step {
    let build = ["test", "--release", "--workspace", "--no-run"];
    Step::command("build", with_features(cargo(root, &build)))
}

/// Step that runs the tests of the workspace at the level `level`.
pub(crate) fn test_step(root: &Path, level: Level) -> Step {
    let test = |arguments: &[&str]| {
        let mut command = with_features(cargo(root, &["test", "--release", "--workspace"]));
        // Make the tests independent of the caller's environment and of measurements on this
        // machine.
        command.args(arguments).env(Level::VARIABLE, level.name()).env("IRIS_TUNING", "off");
        command
    };
    let ignored: &[&str] = if level == Level::Full { &["--", "--include-ignored"] } else { &[] };
    let rerun = steps::shown(&test(ignored));
    let (build, doc) = (test(&[]), test(&[&["--doc"], ignored].concat()));
    let tree = root.to_owned();
    Step::function("test", &rerun, move || test_programs::run(&tree, build, doc, level))
}

fn doc_step(root: &Path) -> Step {
    let mut command = cargo(root, &["doc", "--release", "--workspace", "--no-deps"]);
    command.env("RUSTDOCFLAGS", "-D warnings");
    Step::command("doc", command)
}

/// Steps that pack the library crates and run a program that depends on them alone; then the same
/// program with the oldest Rust version that is supported.
fn package_steps(root: &Path) -> [Step; 2] {
    let step = |name, oldest: bool| {
        let command = if oldest { "cargo xtask package --oldest" } else { "cargo xtask package" };
        let tree = root.to_owned();
        Step::function(name, command, move || package::run(&tree, &package::Options { oldest }))
    };
    let oldest = step("msrv", true).needs("Rust of rust-version", package::oldest_probe(root));
    [step("package", false), oldest]
}

/// Steps for programs of other packages, which CI alone runs: each has a lock file of its own, and many
/// dependencies.
fn ci_steps(root: &Path) -> [Step; 2] {
    let tree = root.to_owned();
    let example = root.join("iris-ops/examples/candle");
    let mut candle = cargo(&example, &["run", "--locked", "--quiet"]);
    candle.arg("--target-dir").arg(root.join("target")).args(["--", "check"]);
    let beside = Step::function("cudarc", "cargo xtask beside", move || beside::run(&tree));
    [beside, Step::command("candle", candle)]
}

/// Step that checks licences, banned crates and sources of dependencies. Security advisories are
/// left out, because they need a database from the network.
fn deny_step(root: &Path) -> Step {
    Step::command("deny", cargo(root, &["deny", "check", "licenses", "bans", "sources"]))
        .needs("cargo-deny", cargo(root, &["deny", "--version"]))
}
