//! `iris tune`: times what an op could choose, in turns in one run, and prints the rows of a tuning
//! table that say what was fastest. On GPUs by the clock of the benchmark, and only what is faster than the rules.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use iris_heap::{BackendKind, DType, SymmetricHeap, World};
use iris_ops::Ranks;
use iris_testkit::suite::{AnyOp, Op, Operands};
use iris_testkit::{harness, say};
use serde::{Deserialize, Serialize};

use crate::bench::provenance;
use crate::device::Device;
use crate::errors::unread;
use crate::gpu_bench::tune;
use crate::job::{Job, Place, gather, median_of_slowest};
use crate::matrices::Matrix;
use crate::problem::Problem;
use crate::progress::Progress;

/// A choice takes the place of the rule's if its median time is below this part of the rule's.
const WORTH_IT: f64 = 0.9;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Numbers of ranks: processes on the CPU, threads of this process on GPUs [default: 2,4 on the CPU, one a
    /// GPU else].
    #[arg(long, value_delimiter = ',')]
    ranks: Vec<usize>,
    /// Calls of each choice, on the CPU [default: 200].
    #[arg(long)]
    iters: Option<usize>,
    /// What computes: cpu, cuda or hip.
    #[arg(long, default_value = "cpu")]
    pub(crate) backend: BackendKind,
    /// What to tune, of GPUs, in the form of bench/cuda.toml, which it is by default.
    #[arg(long, value_name = "FILE")]
    pub(crate) cases: Option<PathBuf>,
    /// Only the ops whose names hold this text, of GPUs.
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Option<String>,
    /// The commit that is measured, where there is no git to ask.
    #[arg(long, value_name = "COMMIT", env = "IRIS_COMMIT")]
    pub(crate) commit: Option<String>,
    /// Seconds after which the program ends whatever it waits for, of GPUs [default: 400].
    #[arg(long, value_name = "SECONDS")]
    pub(crate) limit: Option<u64>,
}

/// What is tuned: M, N and K of the whole, as in `iris run`.
const SHAPES: [Shape; 5] = [
    // The transformer layer of `iris run`, and a decoding step of it.
    (Op::MatmulAllReduce, 107, 384, 1536),
    (Op::MatmulAllReduce, 8, 384, 1536),
    (Op::AllGatherMatmul, 107, 1536, 384),
    (Op::AllReduce, 107, 384, 0),
    (Op::MatmulAllReduce, 512, 512, 512),
];

/// Variants of an op that may be chosen, and tiles that are worth a try on the CPU. No tile is the rule's.
fn choices(op: Op) -> Vec<Choice> {
    let (variants, tiles): (&[&str], &[[usize; 2]]) = match op {
        Op::MatmulAllReduce => (&["one_shot", "two_shot"], &[[64, 256], [128, 128], [32, 128]]),
        // Variants that take A in any memory: an automatic choice is for all calls of its plan.
        Op::AllGatherMatmul => (&["baseline", "unfused"], &[[64, 256]]),
        _ => (&["one_shot", "two_shot"], &[]),
    };
    let tiles: Vec<_> = [None].into_iter().chain(tiles.iter().copied().map(Some)).collect();
    let rule = [Choice { variant: "auto".into(), tile: None }];
    let all = variants.iter().flat_map(|&variant| {
        tiles.iter().map(move |&tile| Choice { variant: variant.into(), tile })
    });
    rule.into_iter().chain(all).collect()
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Choice {
    variant: String,
    tile: Option<[usize; 2]>,
}

/// Tunes and prints.
pub(crate) fn main(options: &Options) -> Result<bool> {
    let Options { backend, ranks, iters, .. } = options;
    if !backend.traits().host_threads {
        unread("tuning of GPUs", &[("--iters", iters.map(|iters| iters.to_string()))])?;
        if let Some(reason) = harness::missing_gpus(*backend, 1)? {
            say!("skipped: {reason}")?;
            return Ok(true);
        }
        let worlds = match &ranks[..] {
            [] => vec![backend.device_count()?.max(2)],
            ranks => ranks.to_vec(),
        };
        return worlds.into_iter().try_fold(true, |ok, ranks| Ok(tune(options, ranks)? && ok));
    }
    unread(
        "tuning of the CPU",
        &[
            ("--cases", options.cases.as_ref().map(|file| file.display().to_string())),
            ("--only", options.only.clone()),
            ("--limit", options.limit.map(|seconds| seconds.to_string())),
        ],
    )?;
    let iters = iters.unwrap_or(200);
    let device = Device::new(*backend, None, None)?;
    say!("# By `iris tune`: medians of {iters} calls of the slowest rank.")?;
    for &ranks in if ranks.is_empty() { &[2, 4] } else { &ranks[..] } {
        for shape in SHAPES {
            let job = TuneJob::new(shape, ranks, iters, device)?;
            let medians = Place::new(ranks, false)?.run(&job)?;
            say!("{}", row(&job, ranks, &medians, options.commit.clone())?)?;
        }
    }
    Ok(true)
}

/// The row that these medians, in microseconds, make. The rule's comes first.
fn row(job: &TuneJob, ranks: usize, medians: &[f64], commit: Option<String>) -> Result<String> {
    let Problem { op, m, n, dtype, .. } = &job.problem;
    let timed = || job.choices.iter().zip(medians);
    let (rule, own) = timed().next().context("the rule was timed")?;
    let (best, time) = timed().min_by(|a, b| a.1.total_cmp(b.1)).unwrap_or((rule, own));
    let (best, time) = if *time < own * WORTH_IT { (best, time) } else { (rule, own) };
    let mut problem = job.problem.clone();
    (problem.variant, problem.tile) = (best.variant.clone(), best.tile);
    let plan = problem.plan(Ranks::new(0, ranks))?;
    let (variant, tile) = (plan.variant(), plan.tile());
    Ok(format!(
        "\n[[row]]\nop = \"{op}\"\nworld = {ranks}\ndtype = \"{}\"\nm = [{m}, {m}]\nn = {n}\n\
         variant = \"{variant}\"\ntile = [{}, {}]\n\
         provenance = \"{}; {time:.0} us, the rule {own:.0} us\"",
        dtype.name(),
        tile.m,
        tile.n,
        provenance(job.device.backend(), commit),
    ))
}

/// Every choice on every rank.
#[derive(Serialize, Deserialize)]
pub(crate) struct TuneJob {
    problem: Problem,
    choices: Vec<Choice>,
    iterations: usize,
    device: Device,
}

type Shape = (Op, usize, usize, usize);

impl TuneJob {
    /// The rule's choice, then all that differ from it.
    fn new((op, m, n, k): Shape, ranks: usize, iterations: usize, device: Device) -> Result<Self> {
        let problem = Problem::new(op.name(), [m, n, k], DType::F32, device.backend());
        let mut job = Self { problem, choices: Vec::new(), iterations, device };
        let mut seen = Vec::new();
        for choice in choices(op) {
            let plan = job.problem(&choice).plan(Ranks::new(0, ranks))?;
            let comes_to = (plan.variant(), plan.tile());
            if !seen.contains(&comes_to) {
                seen.push(comes_to);
                job.choices.push(choice);
            }
        }
        Ok(job)
    }

    fn problem(&self, choice: &Choice) -> Problem {
        let Choice { variant, tile } = choice.clone();
        Problem { variant, tile, ..self.problem.clone() }
    }
}

impl Job for TuneJob {
    /// The median time of each choice, in microseconds.
    type Report = Vec<f64>;

    const NAME: &str = "tune";

    fn run_rank(&self, world: &World) -> Result<Option<Vec<f64>>> {
        let (problem, ranks) = (&self.problem, Ranks::from(world));
        let op = problem.op()?;
        let (mut data, mut signal) = (0, 0);
        for choice in &self.choices {
            let (more, words) = self.problem(choice).heap_bytes(ranks.size)?;
            (data, signal) = (data + more, signal + words);
        }
        let heap = SymmetricHeap::open(world, self.device.heap(world, data, signal))?;
        let (most, shapes) = (problem.most(ranks.size)?, problem.shapes(ranks)?);
        let matrix = |which: usize| Matrix::new(&heap, problem.dtype, most[which], shapes[which]);
        let [a, b, c] = [matrix(0)?, matrix(1)?, matrix(2)?];
        a.fill(&heap, |row, col| problem.own_a(op, ranks, row, col))?;
        b.fill(&heap, |row, col| problem.own_b(op, ranks, row, col))?;
        c.poison(&heap)?;
        let operands =
            Operands { a: a.matrix()?, b: b.matrix()?, c: c.matrix()?, bias: None, norm: None };
        let stream = heap.stream()?;
        let mut ops = Vec::new();
        for choice in &self.choices {
            ops.push(AnyOp::new(&heap, &self.problem(choice).plan(ranks)?)?);
        }
        let mut times = vec![Vec::new(); ops.len()];
        let mut progress = Progress::new("turns", ranks.rank, self.iterations);
        // The first turn warms up.
        for turn in 0..=self.iterations {
            for (op, times) in ops.iter_mut().zip(&mut times) {
                world.barrier()?;
                let begun = Instant::now();
                op.run(&operands, &stream)?;
                stream.sync()?;
                if turn > 0 {
                    times.push(begun.elapsed().as_secs_f64() * 1e6);
                }
            }
            progress.step();
        }
        drop(progress);
        let all = gather(world, &times)?;
        for op in ops {
            op.free()?;
        }
        heap.close()?;
        let of_choice = |at: usize| {
            let ranks: Vec<Vec<f64>> = all.iter().map(|times| times[at].clone()).collect();
            median_of_slowest(&ranks)
        };
        Ok((ranks.rank == 0).then(|| (0..self.choices.len()).map(of_choice).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_can_be_planned() {
        for (op, m, n, k) in SHAPES {
            for Choice { variant, tile } in choices(op) {
                let problem = Problem::new(op.name(), [m, n, k], DType::F32, BackendKind::Cpu);
                let problem = Problem { variant, tile, ..problem };
                if let Err(error) = problem.plan(Ranks::new(0, 2)) {
                    panic!("{} {tile:?}: {error}", problem.variant);
                }
            }
        }
    }

    #[test]
    fn the_rule_stays_unless_another_choice_is_clearly_faster() {
        let cpu = Device::new(BackendKind::Cpu, None, None).unwrap();
        let job = TuneJob::new((Op::AllReduce, 107, 384, 0), 4, 1, cpu).unwrap();
        let chosen = |medians: [f64; 2]| {
            let row = row(&job, 4, &medians, None).unwrap();
            let table: toml::Table = row.parse().unwrap();
            table["row"][0]["variant"].as_str().unwrap().to_owned()
        };
        // What the rule says is not timed twice.
        let rule = chosen([100.0, 99.0]);
        assert_ne!(job.choices[1].variant, rule);
        assert_eq!(job.choices.len(), 2);
        assert_eq!(chosen([100.0, 50.0]), job.choices[1].variant);
    }
}
