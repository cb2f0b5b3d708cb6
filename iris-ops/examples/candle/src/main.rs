//! A small Llama model, tensor-parallel over ranks of one host. candle computes within a rank; iris
//! does the communication between ranks.
//!
//! ```text
//! iris-candle check                    # makes weights, runs one rank and several in every way, compares tokens
//! iris-candle weights FILE             # weights from a fixed seed
//! iris-candle run FILE [--threads N] [--fused] [--split-tokens] [--cuda]
//! ```
//!
//! `run` without `--threads` is one rank among the processes of a launcher: mpirun, or a launcher
//! that sets `RANK` and `WORLD_SIZE` in the environment.

mod call;
mod check;
mod config;
mod functions;
mod llama;
mod mixture;
mod parallel;
#[cfg(feature = "cuda")]
#[allow(dead_code, reason = "compared with what it was over NCCL, and compiled")]
#[path = "../swap/after.rs"]
mod swap;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use candle_core::{Device, Tensor};
use iris_heap::{BackendKind, World};
use iris_ops::Topology;
use iris_ops::comm::{Comm, OnStream, Options};

use config::Config;
use llama::Llama;
use mixture::Exchange;
use parallel::{RowParallel, Shard};

/// Token numbers of the prompt.
const PROMPT: [u32; 7] = [1, 17, 96, 5, 200, 33, 2];

/// Number of tokens that the model generates after the prompt.
const NEW_TOKENS: usize = 24;

/// Options of a run of the model: how ranks compute and communicate.
#[derive(Clone, Copy, Debug, Default)]
struct Ways {
    /// Whether row-parallel layers use one operator that fuses the GEMM with the sum over ranks.
    fused: bool,
    /// Whether each rank routes its own rows of the tokens in a mixture of experts.
    split_tokens: bool,
    /// Whether candle alone sums the results of experts, for one rank: the reference of the check.
    candle_alone: bool,
    cuda: bool,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["check"] => check::run(),
        ["weights", file] => llama::make_weights(&Config::small(), Path::new(file)),
        ["run", file, ref options @ ..] => run(PathBuf::from(file), options),
        _ => bail!(
            "expected check, weights FILE, or run FILE [--threads N] [--fused] [--split-tokens] [--cuda]"
        ),
    }
}

/// Generates tokens, with ranks as threads or as one process of several, and prints the tokens of
/// rank 0.
fn run(file: PathBuf, options: &[&str]) -> Result<()> {
    let mut ways = Ways::default();
    let mut threads = None;
    let mut rest = options.iter();
    while let Some(&option) = rest.next() {
        match option {
            "--fused" => ways.fused = true,
            "--split-tokens" => ways.split_tokens = true,
            "--cuda" => ways.cuda = true,
            "--threads" => {
                let number = rest.next().context("--threads without a number")?;
                threads = Some(number.parse().context("--threads")?);
            }
            other => bail!("unknown option {other}"),
        }
    }
    let (rank, tokens) = match threads {
        Some(size) => (0, generate_by_threads(&file, size, ways)?.swap_remove(0)),
        None => {
            let world = World::from_env()?;
            let tokens = generate(&world, &file, ways)?;
            world.close()?;
            (world.rank(), tokens)
        }
    };
    if rank == 0 {
        let words: Vec<_> = tokens.iter().map(u32::to_string).collect();
        println!("{}", words.join(" "));
    }
    Ok(())
}

/// Runs each rank as a thread, and returns the tokens of each.
fn generate_by_threads(file: &Path, size: usize, ways: Ways) -> Result<Vec<Vec<u32>>> {
    World::run_threads(size, |world| generate(&world, file, ways))
}

/// Generates the tokens on this rank, together with the other ranks. Collective.
fn generate(world: &World, file: &Path, ways: Ways) -> Result<Vec<u32>> {
    let (device, stream) = device(world, ways)?;
    let config = Config::small();
    // Each rank has a part of the heads and of the feed-forward columns; the parts may differ in
    // size.
    let shard = Shard { rank: world.rank(), size: world.size() };
    let ranks =
        Topology::from(world).on(if ways.cuda { BackendKind::Cuda } else { BackendKind::Cpu });
    // Planning is local. Operators need room in the heap in addition to the communicator.
    let plans = RowParallel::plans(&config, PROMPT.len(), shard, ranks)?;
    let experts = Exchange::plans(&config, PROMPT.len(), ranks)?;
    let operators: Vec<_> = plans.iter().chain(&experts).collect();
    let sizes = Options::new().max_bytes(1 << 16).operators(&operators);
    let comm = Arc::new(Comm::from_world(stream, world, &sizes)?);
    let exchange = || Exchange::new(&comm, shard, &experts, ways.split_tokens);
    let exchange = (!ways.candle_alone).then(exchange).transpose()?.map(Arc::new);
    let plans = ways.fused.then_some(&plans);
    let mut llama = Llama::load(&config, file, &device, shard, &comm, plans, exchange)?;
    let mut tokens = PROMPT.to_vec();
    for _ in 0..NEW_TOKENS {
        // The first step processes the whole prompt, each later step only the new token, because
        // the cache has the keys and values of the earlier tokens.
        let seen = llama.seen();
        let input = Tensor::new(&tokens[seen..], &device)?;
        let best = llama.forward(&input)?.argmax(0)?.to_scalar::<u32>()?;
        // This simulates a server that samples on one rank: rank 0 broadcasts its token to the
        // other ranks.
        let mut token = if world.rank() == 0 { [best] } else { [0] };
        match &device {
            Device::Cpu => comm.broadcast_in_place(&mut token, 0)?,
            // All ranks have computed the same bits, so they all find the same best token without a
            // broadcast.
            _ => token = [best],
        }
        tokens.push(token[0]);
    }
    drop(llama);
    comm.close()?;
    Ok(tokens.split_off(PROMPT.len()))
}

/// Device of candle for this rank, and the stream for its communicator.
fn device(world: &World, ways: Ways) -> Result<(Device, OnStream)> {
    if !ways.cuda {
        return Ok((Device::Cpu, BackendKind::Cpu.into()));
    }
    #[cfg(feature = "cuda")]
    {
        let device = candle_core::CudaDevice::new_with_stream(world.local_rank())?;
        let stream = device.cuda_stream();
        Ok((Device::Cuda(device), stream.into()))
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = world;
        bail!("built without the feature `cuda`")
    }
}
