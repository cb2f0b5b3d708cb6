//! `iris test`: every op, variant and element type, over shapes that are no multiples of tiles,
//! against a reference; for machines that have only this program.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::Result;
use iris_heap::{BackendKind, DType, World};
use iris_ops::{Epilogue, Library, Shard, StagingLayout, TileShape};
use iris_testkit::harness::no_backend;
use iris_testkit::launch::with_environment;
use iris_testkit::suite::{
    AnyOp, Case, Input, Layout, Op, Options as OpOptions, Residual, open, plan, run_case,
};
use iris_testkit::{Level, say};
use serde::{Deserialize, Serialize};

use crate::device::{Device, Devices};
use crate::errors::usage;
use crate::job::{Job, Place, Said, text};
use crate::progress::Progress;
use crate::smoke;
use crate::watch::{Line, give_up, watched};

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
    /// Numbers of ranks, such as 3,5,8, instead of the level's; the ranks are threads.
    #[arg(long, value_name = "N", value_delimiter = ',')]
    ranks: Vec<usize>,
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

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Shapes M, N, K: ragged shapes, single rows and columns, fewer rows than ranks, K of 0, and empty
/// matrices.
const SHAPES: [(usize, usize, usize); 10] = [
    (33, 65, 17),
    (107, 96, 48),
    (1, 64, 32),
    (64, 1, 5),
    (3, 5, 4),
    (130, 200, 70),
    (7, 3, 0),
    (0, 6, 3),
    (5, 7, 1),
    (200, 33, 130),
];

/// Edge cases of products, tested in every type at every level: one row, one column, both, and
/// values of K that are no multiple of the 8 elements (16 bytes) that kernels load at a time.
const EDGES: [(usize, usize, usize); 4] = [(1, 72, 13), (67, 1, 29), (1, 1, 9), (40, 48, 100)];

/// Shapes of products with few rows, and so many columns that each multiprocessor of a large GPU
/// has a tile; some variants then are a single launch.
const FEW: [(usize, usize, usize); 5] =
    [(1, 6280, 72), (17, 8200, 200), (63, 8192, 136), (128, 12808, 40), (127, 8200, 264)];

/// Tiles to test: the plan's choice, and small ones that cut ragged shapes into several.
const TILES: [Option<(usize, usize)>; 3] = [None, Some((8, 16)), Some((5, 3))];

/// Part of the suite that the command line selects.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Selection {
    #[serde(with = "text")]
    level: Level,
    /// Name of the only operator to test; `None` for all.
    op: Option<String>,
}

impl Selection {
    /// Cases for a world of `ranks` ranks, in the same order on every rank.
    fn cases(&self, backend: BackendKind, ranks: usize) -> Vec<Case> {
        let mut cases = match self.level {
            Level::Smoke => smoke::cases(backend, ranks),
            level => cases(level, backend),
        };
        cases.retain(|case| self.op.as_ref().is_none_or(|op| op == case.op.name()));
        cases
    }
}

/// Cases of `level`, which must be a level above smoke.
fn cases(level: Level, backend: BackendKind) -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, (m, n, k)) in EDGES.into_iter().enumerate() {
        for (turn, dtype) in TYPES.into_iter().enumerate() {
            let options = OpOptions::new(m, n, k).dtype(dtype).backend(backend);
            let products = ops(&options.columns_per_flag(8), index + turn);
            cases.extend(products.into_iter().filter(|case| case.op.multiplies()));
        }
    }
    for (index, (m, n, k)) in SHAPES.into_iter().enumerate() {
        for (turn, dtype) in TYPES.into_iter().enumerate() {
            let at = index + turn;
            let tiles = match level {
                Level::Quick if at % 3 != 0 => continue,
                Level::Full => 0..TILES.len(),
                _ => at % 3..at % 3 + 1,
            };
            for tile in tiles.map(|tile| TILES[tile]) {
                let options = OpOptions::new(m, n, k).dtype(dtype).backend(backend);
                let mut options = options.columns_per_flag(8);
                if let Some((m, n)) = tile {
                    options = options.tile(TileShape { m, n });
                }
                cases.extend(ops(&options, at));
            }
        }
    }
    if !backend.traits().host_threads {
        cases.extend(few(backend));
    }
    cases
}

/// All-reduces of the shapes [`FEW`] in all memory layouts, of which some let only rank 0 use
/// tensor maps for A.
fn few(backend: BackendKind) -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, (m, n, k)) in FEW.into_iter().enumerate() {
        for (turn, dtype) in TYPES[1..].iter().enumerate() {
            for variant in ["unfused_ll", "unfused_one_shot", "one_shot"] {
                let at = 2 * index + turn;
                let options = OpOptions::new(m, n, k).dtype(*dtype).backend(backend);
                let options = options.library([Library::Auto, Library::Ours][turn]);
                let mut case = Case::new(Op::MatmulAllReduce, variant, options);
                let ranks = iris_ops::Ranks::new(0, 2).on(backend);
                if plan(case.op, variant, ranks, &case.options).is_err() {
                    continue;
                }
                case.seed = 1 + at as u64;
                case.bias = at % 3 == 1;
                case.input = [Input::Integers, Input::Reals][turn];
                case.uneven = at % 4 == 3;
                let skewed = at % 8 == 0;
                case.a = Layout { transposed: at % 4 == 1, skewed, ..Layout::default() };
                case.b.transposed = at / 2 % 2 == 1;
                case.c = Layout { transposed: at % 5 == 4, pad: at % 3 * 4, ..Layout::default() };
                cases.push(case);
            }
        }
    }
    cases
}

/// Cases for every op, variant and shard with these options; `at` selects further features.
fn ops(options: &OpOptions, at: usize) -> Vec<Case> {
    let in_turns = |mut case: Case| {
        case.seed = 1 + at as u64;
        case.uneven = at % 4 == 1;
        if at.is_multiple_of(2) {
            case.input = Input::Reals;
            case.bias = case.op.multiplies();
            if case.bias && at.is_multiple_of(4) {
                case.options = case.options.epilogue(Epilogue::Gelu);
            }
        }
        // One case in five has counters: on a GPU, kernels that count are separate builds, and the
        // suite compares the counts with the expected ones.
        case.options = case.options.counted(at % 5 == 3);
        if at % 3 == 1 {
            case.options = case.options.staging(StagingLayout::MContiguous);
        }
        case
    };
    let mut cases = Case::each(options);
    cases.extend(Case::each_normed(options).into_iter().map(|mut case| {
        let places = [Residual::Apart, Residual::None, Residual::InC];
        case.residual = places[at % places.len()];
        case
    }));
    cases.into_iter().map(in_turns).collect()
}

/// World in which the suite runs cases: number and kind of its ranks.
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
        // Passes on the deadline by a variable that ranks that are processes read.
        with_environment(&[(DEADLINE, &(2.0 * minutes).to_string())]);
    }
    let (level, backend) = (options.level(), options.backend);
    let selection = Selection { level, op: options.op.map(|op| op.name().to_owned()) };
    let limit = minutes.map(|minutes| Duration::from_secs_f64(120.0 * minutes));
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    let missing = no_backend(backend);
    if let Some(reason) = &missing {
        say!("skipped: {reason}")?;
    }
    let all_begun = Instant::now();
    let mut worlds = worlds(level, backend);
    if !options.ranks.is_empty() {
        let threads = |&count| Ranks { count, threads: 1, as_threads: true, sharing: false };
        worlds = options.ranks.iter().map(threads).collect();
    }
    worlds.retain(|ranks| ranks.as_threads || !options.threads_as_ranks);
    for Ranks { count: ranks, threads, as_threads, sharing } in worlds {
        let place = Place::new(ranks, as_threads)?;
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
        let device = Device::new(backend, Some(threads), devices)?;
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
    device: Device,
    selection: &'a Selection,
    cases: &'a [Case],
    /// Maximum duration of one case; `None` for no limit.
    limit: Option<Duration>,
}

impl SuiteWorld<'_> {
    /// Runs all cases, and continues after a failed case with the next one in a new world. Returns
    /// the number of failures.
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
            // Case that failed: the last one that rank 0 began. If it began none, the world itself
            // failed.
            let at = Line::all(&said.text()).rev().find_map(Line::begun).unwrap_or(first);
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
    let OpOptions { m, n, k, dtype, shard, .. } = &case.options;
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
    device: Device,
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
        let heap = open(world, self.device.heap(world), &cases)?.heap;
        if self.selection.level == Level::Smoke && backend != BackendKind::Cpu {
            // All kernels are compiled first, so that no case's time or deadline includes compiling.
            let begun = Instant::now();
            for case in &cases[self.first..] {
                let plan = plan(case.op, &case.variant, world, &case.options_of(world.rank()))?;
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

    #[test]
    fn every_op_variant_and_type_is_there() {
        for level in [Level::Quick, Level::Normal, Level::Full] {
            let cases = cases(level, BackendKind::Cpu);
            for op in Op::ALL {
                for variant in op.variants() {
                    for dtype in TYPES {
                        let fits = |case: &&Case| {
                            case.op == op
                                && case.variant == variant.name()
                                && case.options.dtype == dtype
                        };
                        let fitting: Vec<_> = cases.iter().filter(fits).collect();
                        assert!(!fitting.is_empty(), "{level:?} {op} {variant}");
                        let edge = |is: fn(&OpOptions) -> bool| {
                            let is = |case: &&Case| {
                                is(&case.options) && !case.options.k.is_multiple_of(8)
                            };
                            fitting.iter().any(|&case| is(&case)) || !op.multiplies()
                        };
                        assert!(edge(|options| options.m == 1), "{level:?} {op} {variant}: M = 1");
                        assert!(edge(|options| options.n == 1), "{level:?} {op} {variant}: N = 1");
                    }
                }
            }
        }
    }
}
