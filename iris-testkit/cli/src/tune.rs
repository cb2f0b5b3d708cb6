//! `iris tune`: measures the parameters of this machine. Given a file of shapes, it instead times
//! the variants and tiles of an op for these shapes, in turns in one run, and saves the fastest as
//! tuning rows. On GPUs it uses the benchmark's clock.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use iris_heap::{BackendKind, World};
use iris_ops::{OpRequest, Shard, Topology};
use iris_testkit::oracle::Meaning;
use iris_testkit::rank_setup::{Rig, Room};
use iris_testkit::suite::{AnyOp, Op, Operands, Options as OpOptions};
use iris_testkit::{harness, say};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::bench::origin::provenance;
use crate::device::DeviceOptions;
use crate::errors::{unread, usage};
use crate::gpu_bench::{self, tune};
use crate::job::{Job, Place};
use crate::operator::MOST_CALLS;
use crate::problem::{Problem, TimedVariant};
use crate::progress::Progress;
use crate::timing::{balanced, in_turns, median};
use machine::Case;
use options::Options;

mod bits;
mod fit;
mod machine;
mod measured;
pub(crate) mod options;
pub(crate) mod regret;

/// Maximum ratio for a tuning row: a choice gets a row if its median time is at most this part of
/// the median time of the predicted choice.
const WORTH_IT: f64 = 0.9;

/// Variants and tiles of an op to try on the CPU; without a tile the plan chooses one.
fn choices(op: Op) -> Vec<TimedVariant> {
    let (variants, tiles): (&[&str], &[[usize; 2]]) = match op {
        Op::MatmulAllReduce => (&["one_shot", "two_shot"], &[[64, 256], [128, 128], [32, 128]]),
        // Only variants that accept A in any memory are tried, because an automatic choice must
        // serve all calls of its plan.
        Op::AllGatherMatmul => (&["baseline", "unfused"], &[[64, 256]]),
        _ => (&["one_shot", "two_shot"], &[]),
    };
    let tiles: Vec<_> = [None].into_iter().chain(tiles.iter().copied().map(Some)).collect();
    let rule = [TimedVariant { variant: "auto".into(), tile: None }];
    let all = variants.iter().flat_map(|&variant| {
        tiles.iter().map(move |&tile| TimedVariant { variant: variant.into(), tile })
    });
    rule.into_iter().chain(all).collect()
}

/// Measures, prints the results and saves them; returns whether every measurement succeeded.
pub(crate) fn main(options: &Options) -> Result<bool> {
    let Options { backend, ranks, iters, .. } = options;
    let host = backend.traits().host_threads;
    if host {
        let limit = options.limit.map(|seconds| seconds.to_string());
        let bits = options.bits.as_ref().map(|file| file.display().to_string());
        unread("tuning of the CPU", &[("--limit", limit), ("--bits", bits)])?;
    } else {
        unread("tuning of GPUs", &[("--iters", iters.map(|iters| iters.to_string()))])?;
    }
    if options.cases.is_none() && options.bits.is_none() {
        unread("tuning of the machine", &[("--only", options.only.clone())])?;
    }
    let most = iris_heap::MAX_RANKS;
    if let Some(ranks) = ranks.iter().find(|&&ranks| !(2..=most).contains(&ranks)) {
        return Err(usage("--ranks", ranks, format!("numbers from 2 to {most}")));
    }
    if let Some(iters) = iters.filter(|iters| !(1..=MOST_CALLS).contains(iters)) {
        return Err(usage("--iters", iters, format!("at least 1 and at most {MOST_CALLS}")));
    }
    let worlds = match &ranks[..] {
        [] if host => vec![2, 4],
        [] => match harness::missing_gpus(*backend, 1)? {
            Some(reason) => {
                say!("skipped: {reason}")?;
                return Ok(true);
            }
            None => vec![backend.device_count()?.max(2)],
        },
        ranks => ranks.to_vec(),
    };
    if let Some(cases) = &options.bits {
        return bits::compare(options, cases, &worlds);
    }
    let mut all = true;
    for ranks in worlds {
        if let Some(reason) =
            (!host).then(|| harness::missing_gpus(*backend, ranks)).transpose()?.flatten()
        {
            say!("skipped: {reason}")?;
            continue;
        }
        all &= match &options.cases {
            None => machine::measure(options, ranks)?,
            Some(cases) => tune_shapes(options, cases, ranks)?,
        };
    }
    Ok(all)
}

/// Times the choices for the shapes in the file `cases`, and adds a row to this machine's tuning
/// file for each that is faster than the predicted one.
fn tune_shapes(options: &Options, cases: &Path, ranks: usize) -> Result<bool> {
    let kind = options.backend;
    let of_file = Topology::new(0, ranks).on(kind);
    let mut file = machine::file_of(of_file)?;
    let rows = Mutex::new(String::new());
    let found = |row: String| {
        say!("{row}")?;
        let mut rows = rows.lock().unwrap_or_else(PoisonError::into_inner);
        rows.push_str(&row);
        rows.push('\n');
        Ok(())
    };
    let good = if kind.traits().host_threads {
        let device = DeviceOptions::new(kind, None, None)?;
        let iters = options.iters.unwrap_or(200);
        for shape in gpu_bench::read(kind, Some(cases), options.only.as_deref())? {
            let problem = whole(shape.op, &shape.options, ranks);
            let job = TuneJob::new(problem, &choices(shape.op), ranks, iters, device)?;
            let medians = Place::new(ranks, false)?.run(&job)?;
            found(row(&job, ranks, &medians, options.commit.clone())?)?;
        }
        true
    } else {
        tune(options, ranks, &found)?
    };
    let rows = rows.into_inner().unwrap_or_else(PoisonError::into_inner);
    let count = file.add_rows(&rows)?;
    say!("# {count} rows added to {}", file.save(of_file)?.display())?;
    Ok(good)
}

/// Problem over all ranks that gives each rank a part with these options.
fn whole(op: Op, options: &OpOptions, ranks: usize) -> Problem {
    let meaning = Meaning::of(op);
    let times = |splits: bool| if splits { ranks } else { 1 };
    let OpRequest { m, n, k, dtype, .. } = **options;
    let shape = [m, n * times(meaning.splits_n()), k * times(meaning.splits_k())];
    let columns = options.shard == Shard::Columns;
    Problem { columns, untuned: true, ..Problem::new(op.name(), shape, dtype, options.backend) }
}

/// Times cases on the CPU; returns a line as in a record for each variant.
pub(crate) fn timed_on_host(cases: &[Case], ranks: usize, iters: usize) -> Result<Vec<Value>> {
    let device = DeviceOptions::new(BackendKind::Cpu, None, None)?;
    let mut lines = Vec::new();
    for (op, options, variants) in cases {
        let choices = TimedVariant::each(variants, None);
        let job = TuneJob::new(whole(*op, options, ranks), &choices, ranks, iters, device)?;
        let medians = Place::new(ranks, false)?.run(&job)?;
        for (choice, us) in job.choices.iter().zip(medians) {
            let OpRequest { m, n, k, dtype, .. } = **options;
            let plan = job.problem(choice).plan(Topology::new(0, ranks))?;
            let tile = plan.tile();
            lines.push(json!({
                "op": op.name(), "variant": choice.variant, "dtype": dtype.name(), "m": m, "n": n, "k": k,
                "tile": [tile.m, tile.n], "ranks": ranks, "us": us,
            }));
        }
    }
    Ok(lines)
}

/// Makes the tuning row that follows from the median times of the choices, in microseconds; the
/// first choice is the predicted one.
fn row(job: &TuneJob, ranks: usize, medians: &[f64], commit: Option<String>) -> Result<String> {
    let Problem { op, dtype, .. } = &job.problem;
    // Plans look for rows by the shape of one rank's part.
    let OpRequest { m, n, .. } = *job.problem.options(job.problem.op()?, Topology::new(0, ranks));
    let timed = || job.choices.iter().zip(medians);
    let (rule, own) = timed().next().context("the predicted choice was not timed")?;
    let (best, time) = timed().min_by(|a, b| a.1.total_cmp(b.1)).unwrap_or((rule, own));
    let (best, time) = if *time < own * WORTH_IT { (best, time) } else { (rule, own) };
    let mut problem = job.problem.clone();
    (problem.variant, problem.tile) = (best.variant.clone(), best.tile);
    let plan = problem.plan(Topology::new(0, ranks))?;
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

/// Job that times every choice for one problem on every rank.
#[derive(Serialize, Deserialize)]
pub(crate) struct TuneJob {
    problem: Problem,
    choices: Vec<TimedVariant>,
    iterations: usize,
    device: DeviceOptions,
}

impl TuneJob {
    /// Makes the job; drops choices whose plan equals that of an earlier one.
    fn new(
        problem: Problem,
        choices: &[TimedVariant],
        ranks: usize,
        iterations: usize,
        device: DeviceOptions,
    ) -> Result<Self> {
        let mut job = Self { problem, choices: Vec::new(), iterations, device };
        let mut seen = Vec::new();
        for choice in choices {
            let plan = job.problem(choice).plan(Topology::new(0, ranks))?;
            let comes_to = (plan.variant(), plan.tile());
            if !seen.contains(&comes_to) {
                seen.push(comes_to);
                job.choices.push(choice.clone());
            }
        }
        Ok(job)
    }

    fn problem(&self, choice: &TimedVariant) -> Problem {
        let TimedVariant { variant, tile } = choice.clone();
        Problem { variant, tile, ..self.problem.clone() }
    }
}

impl Job for TuneJob {
    /// Median time of each choice, in microseconds, in the order of `choices`.
    type Report = Vec<f64>;

    const NAME: &str = "tune";

    fn run_rank(&self, world: &World) -> Result<Option<Vec<f64>>> {
        let options = self.device.heap(world);
        let world = &world.for_heap(&options)?;
        let (problem, ranks) = (&self.problem, Topology::from(world));
        let mut room = Room::default();
        for choice in &self.choices {
            room = room.and(self.problem(choice).room(ranks.size, ranks.nodes())?);
        }
        let rig = Rig::open(world, options, room)?;
        let [a, b, c] = problem.matrices(&rig)?;
        let operands = Operands::new(a.matrix()?, b.matrix()?, c.matrix()?);
        let mut ops = Vec::new();
        for choice in &self.choices {
            ops.push(AnyOp::new(&rig.heap, &self.problem(choice).plan(ranks)?)?);
        }
        let progress = Progress::new("turns", ranks.rank, self.iterations);
        let time = |at: usize| rig.time(|stream| Ok(ops[at].run(&operands, stream)?));
        let turns = (world, &progress);
        let times = in_turns(turns, self.iterations, (ops.len(), balanced), time)?;
        drop(progress);
        for op in ops {
            op.free()?;
        }
        rig.heap.close()?;
        Ok((ranks.rank == 0).then(|| times.into_iter().map(median).collect()))
    }
}

#[cfg(test)]
mod tests {
    use iris_heap::DType;

    use super::*;

    #[test]
    fn every_choice_can_be_planned() {
        for op in [Op::MatmulAllReduce, Op::AllGatherMatmul, Op::AllReduce] {
            for TimedVariant { variant, tile } in choices(op) {
                let problem = Problem::new(op.name(), [107, 384, 64], DType::F32, BackendKind::Cpu);
                let problem = Problem { variant, tile, ..problem };
                if let Err(error) = problem.plan(Topology::new(0, 2)) {
                    panic!("{} {tile:?}: {error}", problem.variant);
                }
            }
        }
    }

    /// Tests that a row has the N of each rank's plan, by which plans look for it.
    #[test]
    fn a_row_of_an_op_that_splits_n_has_the_columns_of_a_rank() {
        let cpu = DeviceOptions::new(BackendKind::Cpu, None, None).unwrap();
        let options = OpOptions::new(107, 96, 64);
        let problem = whole(Op::AllGatherMatmul, &options, 4);
        let job = TuneJob::new(problem, &choices(Op::AllGatherMatmul), 4, 1, cpu).unwrap();
        let row = row(&job, 4, &vec![1.0; job.choices.len()], None).unwrap();
        let table: toml::Table = row.parse().unwrap();
        assert_eq!(table["row"][0]["n"].as_integer(), Some(96));
    }

    #[test]
    fn the_prediction_stays_unless_another_choice_is_clearly_faster() {
        let cpu = DeviceOptions::new(BackendKind::Cpu, None, None).unwrap();
        let problem = Problem::new("all_reduce", [107, 384, 0], DType::F32, BackendKind::Cpu);
        let job = TuneJob::new(problem, &choices(Op::AllReduce), 4, 1, cpu).unwrap();
        let chosen = |medians: [f64; 2]| {
            let row = row(&job, 4, &medians, None).unwrap();
            let table: toml::Table = row.parse().unwrap();
            table["row"][0]["variant"].as_str().unwrap().to_owned()
        };
        // A choice that equals the predicted one is dropped, so it is timed only once.
        let predicted = chosen([100.0, 99.0]);
        assert_ne!(job.choices[1].variant, predicted);
        assert_eq!(job.choices.len(), 2);
        assert_eq!(chosen([100.0, 50.0]), job.choices[1].variant);
    }
}
