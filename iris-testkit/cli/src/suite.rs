//! `iris test`: every op, variant and element type, over shapes that are no multiples of tiles,
//! against a reference; for machines that have only this program.

mod cases;

use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use iris_heap::{BackendKind, MAX_RANKS, World};
use iris_ops::{OpRequest, Shard};
use iris_testkit::harness::no_backend;
use iris_testkit::launch::with_environment;
use iris_testkit::suite::{AnyOp, Case, Op, open, plan, run_case};
use iris_testkit::{Level, say};
use serde::{Deserialize, Serialize};

use crate::device::{DeviceOptions, Devices};
use crate::errors::usage;
use crate::job::{Job, Place, Said};
use crate::progress::Progress;
use crate::smoke;
use crate::watch::{Line, give_up, watched};
use cases::Selection;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Backend: cpu, cuda or hip.
    #[arg(long, default_value = "cpu")]
    backend: BackendKind,
    /// GPUs to which the ranks are assigned round-robin: their number, or a list such as 0,2
    /// [default: all].
    #[arg(long, value_name = "D")]
    devices: Option<Devices>,
    /// Test level: smoke (each operator and variant on two small shapes; minutes even if a call
    /// takes seconds), quick, normal or full.
    #[arg(long, default_value_t)]
    level: Level,
    /// Run a sample; short for --level quick.
    #[arg(long, conflicts_with_all = ["full", "level"])]
    quick: bool,
    /// Run all shapes with all tiles, and more numbers of ranks; short for --level full.
    #[arg(long, conflicts_with = "level")]
    full: bool,
    /// Test only this operator.
    #[arg(long)]
    op: Option<Op>,
    /// Skip the worlds whose ranks are processes.
    #[arg(long)]
    threads_as_ranks: bool,
    /// Numbers of ranks, such as 3,5,8, instead of the level's; the ranks are threads, or processes
    /// with --nodes.
    #[arg(long, value_name = "N", value_delimiter = ',')]
    ranks: Vec<usize>,
    /// Number of nodes that this host simulates. Each has 1 rank in a first world and 2 in a second,
    /// or its part of --ranks.
    #[arg(long, default_value_t = 1)]
    nodes: usize,
    /// Minutes that a wait in a kernel may take without progress. A case that takes twice as long
    /// ends the test [default: as IRIS_DEADLINE says; 5 at level smoke].
    #[arg(long, value_name = "MINUTES")]
    deadline: Option<f64>,
}

impl Options {
    fn level(&self) -> Level {
        match (self.quick, self.full) {
            (true, _) => Level::Quick,
            (_, true) => Level::Full,
            _ => self.level,
        }
    }

    /// Minutes that a wait in a kernel may take without progress; `None` for the default.
    fn minutes(&self) -> Result<Option<f64>> {
        let by_level = || (self.level() == Level::Smoke && !is_set(DEADLINE)).then_some(5.0);
        match self.deadline {
            Some(minutes) if !(0.01..=1e5).contains(&minutes) => {
                Err(usage("--deadline", minutes, "minutes, from 0.01 to 100000"))
            }
            Some(minutes) => Ok(Some(minutes)),
            None => Ok(by_level()),
        }
    }
}

/// Environment variable with a factor for all deadlines; with factor 1 a kernel waits half a minute
/// for progress.
const DEADLINE: &str = "IRIS_DEADLINE";

fn is_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty())
}

/// World in which the suite runs cases: number and kind of its ranks.
#[derive(Clone, Copy)]
struct Ranks {
    count: usize,
    /// Number of threads of each rank, on the CPU backend.
    threads: usize,
    as_threads: bool,
    /// Whether all ranks share one GPU.
    sharing: bool,
}

/// Worlds in which a level runs its cases.
fn worlds(level: Level, backend: BackendKind) -> Vec<Ranks> {
    let worlds: &[(usize, usize, bool)] = match level {
        Level::Smoke => &smoke::WORLDS,
        Level::Quick => &[(2, 1, true), (4, 1, false)],
        Level::Normal => {
            &[(1, 2, true), (2, 2, true), (3, 3, true), (8, 1, true), (2, 1, false), (4, 1, false)]
        }
        Level::Full => &[
            (1, 2, true),
            (2, 2, true),
            (3, 3, true),
            (4, 1, true),
            (8, 1, true),
            (2, 1, false),
            (3, 2, false),
            (4, 1, false),
            (8, 1, false),
        ],
    };
    let ranks = |&(count, threads, as_threads): &(_, _, _)| Ranks {
        count,
        threads,
        as_threads,
        sharing: false,
    };
    let sharing = Ranks { count: 4, threads: 1, as_threads: true, sharing: true };
    let shared = (!backend.traits().host_threads && level > Level::Smoke).then_some(sharing);
    worlds.iter().map(ranks).chain(shared).collect()
}

/// Runs the suite; returns whether no case failed.
pub(crate) fn main(options: &Options) -> Result<bool> {
    let minutes = options.minutes()?;
    if let Some(minutes) = minutes {
        // Passes the deadline to ranks that are processes, by an environment variable.
        with_environment(&[(DEADLINE, &(2.0 * minutes).to_string())]);
    }
    let (level, backend) = (options.level(), options.backend);
    let (op, nodes) = (options.op.map(|op| op.name().to_owned()), options.nodes);
    let selection = Selection { level, op, nodes };
    let limit = minutes.map(|minutes| Duration::from_secs_f64(120.0 * minutes));
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    let missing = no_backend(backend);
    if let Some(reason) = &missing {
        say!("skipped: {reason}")?;
    }
    let all_begun = Instant::now();
    let mut worlds = worlds(level, backend);
    let counts = match &options.ranks[..] {
        [] if nodes > MAX_RANKS / 2 => {
            let expected = format!("1 to {}, for two ranks on each node", MAX_RANKS / 2);
            return Err(usage("--nodes", nodes, expected));
        }
        [] if nodes > 1 => vec![nodes, 2 * nodes],
        counts => counts.to_vec(),
    };
    if !counts.is_empty() {
        let as_threads = nodes == 1;
        let given = |count| Ranks { count, threads: 1, as_threads, sharing: false };
        worlds = counts.into_iter().map(given).collect();
    }
    worlds.retain(|ranks| ranks.as_threads || !options.threads_as_ranks);
    let place = |of: Ranks| Place::new(of.count, of.as_threads)?.on_nodes(nodes, options.backend);
    let places: Vec<Place> = worlds.iter().map(|&of| place(of)).collect::<Result<_>>()?;
    for (Ranks { count: ranks, threads, as_threads: _, sharing }, place) in
        worlds.into_iter().zip(places)
    {
        let of_each = match sharing {
            true => "on one GPU".into(),
            false => format!("{threads} threads each"),
        };
        let world = format!("{ranks} ranks as {}, {of_each}", place.words());
        let cases = selection.cases(backend, ranks);
        let count = cases.len();
        if missing.is_some() {
            say!("{world}: {count} cases skipped")?;
            skipped += count;
            continue;
        }
        if count == 0 {
            continue;
        }
        let begun = Instant::now();
        let devices = match sharing {
            true => Some(options.devices.unwrap_or_default().first()),
            false => options.devices,
        };
        let device = DeviceOptions::new(backend, Some(threads), devices)?;
        let run = SuiteWorld { place, device, selection: &selection, cases: &cases, limit };
        let failures = run.to_the_end()?;
        failed += failures;
        passed += count - failures;
        say!("{world}: {count} cases, {failures} failed, {:.1?}", begun.elapsed())?;
    }
    say!("in {:.1?}:", all_begun.elapsed())?;
    say!("{passed} passed, {failed} failed, {skipped} skipped")?;
    Ok(failed == 0)
}

/// World of the suite and the cases that run in it.
struct SuiteWorld<'a> {
    place: Place,
    device: DeviceOptions,
    selection: &'a Selection,
    cases: &'a [Case],
    /// Maximum duration of one case; `None` for no limit.
    limit: Option<Duration>,
}

impl SuiteWorld<'_> {
    /// Runs all cases. After a failed case, runs the next case in a new world. Returns the number
    /// of failures.
    fn to_the_end(&self) -> Result<usize> {
        let (mut first, mut failures) = (0, 0);
        // A smoke test prints a line for each case, so it needs no progress bar.
        let shown = if self.selection.level > Level::Smoke { self.cases.len() } else { 0 };
        let progress = (shown > 0).then(|| Progress::new("cases", 0, shown));
        let tell = |line: Line| {
            if let (Some(progress), Line::Done(..)) = (&progress, line) {
                progress.step();
            }
            self.tell(line);
        };
        while first < self.cases.len() {
            let said = Said::default();
            let selection = self.selection.clone();
            let job = SuiteJob { device: self.device, selection, first, said: Some(said.clone()) };
            let run = || self.place.run_with(&job, &said);
            let done = watched(&said, self.limit, tell, |at| self.late(at), run);
            let Err(error) = done else { break };
            // Case that failed: the last case that rank 0 began. If rank 0 began none, the world
            // itself failed, and a new one would fail too.
            let Some(at) = Line::all(&said.text()).rev().find_map(Line::begun) else {
                let rest = self.cases.len() - first;
                say!("{rest} cases FAILED before the first began: {error:#}")?;
                return Ok(failures + rest);
            };
            say!("case {at}, {}, FAILED: {error:#}", self.title(at))?;
            failures += 1;
            first = at + 1;
        }
        Ok(failures)
    }

    fn title(&self, at: usize) -> String {
        self.cases.get(at).map_or_else(String::new, title)
    }

    /// Prints the end of a case at level smoke, where one case may take seconds.
    fn tell(&self, line: Line) {
        if self.selection.level > Level::Smoke {
            return;
        }
        // An error of stdout is ignored, because the next line that the suite prints reports it.
        let _ = match line {
            Line::Begun(_) => Ok(()),
            Line::Ready(seconds) => say!("kernels of {} cases: {seconds:.1} s", self.cases.len()),
            Line::Done(at, seconds) => say!("case {at}, {}: {seconds:.2} s", self.title(at)),
        };
    }

    /// Ends the program because case `at` has taken too long; ranks cannot be stopped one by one.
    fn late(&self, at: usize) {
        let limit = self.limit.unwrap_or_default();
        let _ = say!("case {at}, {}, FAILED: it has not ended within {limit:.1?}", self.title(at));
        give_up();
    }
}

/// Title of a case, in one line.
fn title(case: &Case) -> String {
    let OpRequest { m, n, k, dtype, shard, .. } = &*case.options;
    let by = if *shard == Shard::Columns { " by columns" } else { "" };
    let shape = match case.op {
        Op::Barrier => String::new(),
        op if op.multiplies() => format!(" {m} x {n} x {k} {dtype}"),
        _ => format!(" {m} x {n} {dtype}"),
    };
    let normed = if case.options.rms_norm.is_some() { ", normed" } else { "" };
    format!("{} {}{by}{shape}{normed}", case.op, case.variant)
}

/// Job that runs the cases from index `first` on, in one world.
#[derive(Serialize, Deserialize)]
pub(crate) struct SuiteJob {
    device: DeviceOptions,
    selection: Selection,
    first: usize,
    /// Output of ranks that are threads; `None` for processes, which print to stdout.
    #[serde(skip)]
    said: Option<Said>,
}

impl SuiteJob {
    /// Prints a progress line on rank 0; does nothing on other ranks.
    fn say(&self, world: &World, line: Line) -> Result<()> {
        let line = format!("{line}\n");
        match &self.said {
            _ if world.rank() != 0 => Ok(()),
            Some(said) => Ok(said.clone().write_all(line.as_bytes())?),
            None => Ok(io::stdout().write_all(line.as_bytes())?),
        }
    }
}

impl Job for SuiteJob {
    type Report = usize;

    const NAME: &str = "suite";

    fn run_rank(&self, world: &World) -> Result<Option<usize>> {
        let backend = self.device.backend();
        let cases = self.selection.cases(backend, world.size());
        let options = self.device.heap(world);
        let nodes = world.for_heap(&options)?.nodes();
        ensure!(
            nodes == self.selection.nodes,
            "not all GPUs can access each other's memory, so the ranks form {nodes} nodes: run `iris test --nodes {nodes}`"
        );
        let heap = open(world, options, &cases)?.heap;
        if self.selection.level == Level::Smoke && backend != BackendKind::Cpu {
            // All kernels are compiled first, so that no case's time or deadline includes compiling.
            let begun = Instant::now();
            for case in &cases[self.first..] {
                let plan = plan(case.op, &case.variant, &heap, &case.options_of(world.rank()))?;
                AnyOp::new(&heap, &plan)?.free()?;
            }
            self.say(world, Line::Ready(begun.elapsed().as_secs_f64()))?;
        }
        for (at, case) in cases.iter().enumerate().skip(self.first) {
            self.say(world, Line::Begun(at))?;
            let begun = Instant::now();
            run_case(&heap, case)?;
            self.say(world, Line::Done(at, begun.elapsed().as_secs_f64()))?;
        }
        heap.close()?;
        Ok((world.rank() == 0).then_some(cases.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_a_gpu_at_every_level() {
        for level in [Level::Quick, Level::Normal, Level::Full] {
            let shares = |ranks: &Ranks| ranks.sharing && ranks.as_threads && ranks.count > 1;
            assert!(worlds(level, BackendKind::Cuda).iter().any(shares), "{level:?}");
            assert!(!worlds(level, BackendKind::Cpu).iter().any(shares), "{level:?}");
        }
    }
}
