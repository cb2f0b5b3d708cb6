//! Runs the model in every way that this host has, and compares the tokens with those of one rank.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::config::Config;
use crate::llama::make_weights;
use crate::{NEW_TOKENS, Ways, generate_by_threads};

pub fn run() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("weights.safetensors");
    make_weights(&Config::small(), &file)?;
    let alone = Ways { candle_alone: true, ..Ways::default() };
    let alone = generate_by_threads(&file, 1, alone)?.swap_remove(0);
    ensure!(alone.len() == NEW_TOKENS, "{alone:?}");
    let kinds = alone.iter().collect::<std::collections::HashSet<_>>().len();
    ensure!(kinds > NEW_TOKENS / 2, "a model that repeats itself shows little: {alone:?}");
    println!("one rank: {alone:?}");
    for (what, ways) in [
        ("product, then all-reduce", Ways::default()),
        ("fused", Ways { fused: true, ..Ways::default() }),
        ("tokens of mixtures split", Ways { split_tokens: true, ..Ways::default() }),
    ] {
        for size in [1, 2, 3, 4] {
            for (rank, tokens) in generate_by_threads(&file, size, ways)?.into_iter().enumerate() {
                ensure!(tokens == alone, "rank {rank} of {size} threads, {what}: {tokens:?}");
            }
            println!("{size} threads, {what}: the same tokens");
        }
        for size in [2, 3] {
            let tokens = by_loop(&file, size, ways)?;
            ensure!(tokens == alone, "{size} processes by a loop, {what}: {tokens:?}");
            println!("{size} processes by a loop, {what}: the same tokens");
        }
        match by_mpirun(&file, 2, ways)? {
            None => println!("2 processes by mpirun, {what}: skipped, since there is no mpirun"),
            Some(tokens) => {
                ensure!(tokens == alone, "2 processes by mpirun, {what}: {tokens:?}");
                println!("2 processes by mpirun, {what}: the same tokens");
            }
        }
    }
    Ok(())
}

/// Command-line arguments with which a rank of the model is started.
fn arguments(file: &Path, ways: Ways) -> Vec<std::ffi::OsString> {
    let mut arguments = vec!["run".into(), file.into()];
    arguments.extend(ways.fused.then(|| "--fused".into()));
    arguments.extend(ways.split_tokens.then(|| "--split-tokens".into()));
    arguments
}

/// Runs each rank as a process, as this shell command does: `for r in 0 1; do RANK=$r WORLD_SIZE=2
/// program & done; wait`.
fn by_loop(file: &Path, size: usize, ways: Ways) -> Result<Vec<u32>> {
    let program = std::env::current_exe()?;
    let start = |rank: usize| {
        let mut command = Command::new(&program);
        command.args(arguments(file, ways)).stdout(Stdio::piped());
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        command.env("WORLD_SIZE", size.to_string());
        Ok(command.spawn()?)
    };
    let ranks = (0..size).map(start).collect::<Result<Vec<Child>>>()?;
    let outputs = ranks.into_iter().map(Child::wait_with_output).collect::<Result<Vec<_>, _>>()?;
    let failed = outputs.iter().find(|output| !output.status.success());
    ensure!(failed.is_none(), "a rank failed: {failed:?}");
    tokens(&outputs[0].stdout)
}

/// Runs the ranks by mpirun; returns `None` if mpirun is not installed.
fn by_mpirun(file: &Path, size: usize, ways: Ways) -> Result<Option<Vec<u32>>> {
    let mut command = Command::new("mpirun");
    // Without these flags mpirun refuses to run as root, and to start more ranks than cores; CI
    // does both.
    command.args(["--allow-run-as-root", "--oversubscribe", "-n", &size.to_string()]);
    let command = command.arg(std::env::current_exe()?).args(arguments(file, ways));
    let output = match command.output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        output => output?,
    };
    ensure!(output.status.success(), "mpirun: {output:?}");
    tokens(&output.stdout).map(Some)
}

fn tokens(line: &[u8]) -> Result<Vec<u32>> {
    let text = String::from_utf8_lossy(line);
    let words = text.split_whitespace().map(|word| word.parse().context(text.to_string()));
    words.collect()
}
