//! `iris test`: every op, variant and element type over ragged shapes, against the oracle, on
//! machines that have this program and nothing else.

use std::io::{self, Write};
use std::time::Instant;

use anyhow::Result;
use iris_heap::{BackendKind, DType, SymmetricHeap, World};
use iris_ops::{Epilogue, Shard, StagingLayout, TileShape};
use iris_testkit::harness::no_backend;
use iris_testkit::say;
use iris_testkit::suite::{Case, Input, OpName, Options as OpOptions, heap_bytes, run_case};
use serde::{Deserialize, Serialize};

use crate::device::{Device, Devices};
use crate::job::{Job, Place, Said};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// What computes: cpu or cuda.
    #[arg(long, default_value = "cpu")]
    backend: BackendKind,
    /// The GPUs that the ranks take in turns: how many, or a list of their numbers such as 0,2
    /// [default: all].
    #[arg(long, value_name = "D")]
    devices: Option<Devices>,
    /// A sample.
    #[arg(long, conflicts_with = "full")]
    quick: bool,
    /// All shapes with all tiles, and more worlds.
    #[arg(long)]
    full: bool,
}

/// How much is tested.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum Level {
    Quick,
    Normal,
    Full,
}

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// M, N, K: ragged, single rows and columns, fewer rows than ranks, no depth, nothing at all.
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

/// Edges of products, in every type at every level: one row, one column, both; and depths that are
/// no multiple of the 8 elements, or 16 bytes, that kernels load at a time.
const EDGES: [(usize, usize, usize); 4] = [(1, 72, 13), (67, 1, 29), (1, 1, 9), (40, 48, 100)];

/// Tiles: chosen by the plan, and small ones, of which ragged shapes have several.
const TILES: [Option<(usize, usize)>; 3] = [None, Some((8, 16)), Some((5, 3))];

/// All cases of a level, the same on every rank.
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
    cases
}

/// Every op, variant and shard with these options; `at` chooses the rest in turns.
fn ops(options: &OpOptions, at: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for op in OpName::ALL {
        let mut options = options.clone();
        if !op.multiplies() {
            options.k = 0;
        }
        let shards: &[Shard] = match op {
            OpName::AllGatherMatmul => &[Shard::Rows, Shard::Columns],
            _ => &[Shard::Rows],
        };
        for (&shard, variant) in
            shards.iter().flat_map(|s| op.variants().into_iter().map(move |v| (s, v)))
        {
            let mut case = Case::new(op, variant, options.clone().shard(shard));
            case.seed = 1 + at as u64;
            case.uneven = at % 4 == 1;
            if at.is_multiple_of(2) {
                case.input = Input::Reals;
                case.bias = op.multiplies();
                if op.multiplies() && at.is_multiple_of(4) {
                    case.options = case.options.epilogue(Epilogue::Gelu);
                }
            }
            // Other kernels on a GPU, which count; the suite compares with what is promised.
            case.options = case.options.counted(at % 5 == 3);
            if at % 3 == 1 {
                case.options = case.options.staging(StagingLayout::MContiguous);
            }
            cases.push(case);
        }
    }
    cases
}

/// A world of the suite.
struct Ranks {
    count: usize,
    /// Threads of a rank, on the CPU.
    threads: usize,
    as_threads: bool,
    /// Whether all share one GPU.
    sharing: bool,
}

/// The worlds of a level.
fn worlds(level: Level, backend: BackendKind) -> Vec<Ranks> {
    let worlds: &[(usize, usize, bool)] = match level {
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
    let shared = (!backend.traits().host_threads).then_some(sharing);
    worlds.iter().map(ranks).chain(shared).collect()
}

/// Runs the suite; whether nothing failed.
pub(crate) fn main(options: &Options) -> Result<bool> {
    let level = match (options.quick, options.full) {
        (true, _) => Level::Quick,
        (_, true) => Level::Full,
        _ => Level::Normal,
    };
    let count = cases(level, options.backend).len();
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    let missing = no_backend(options.backend);
    if let Some(reason) = &missing {
        say!("skipped: {reason}")?;
    }
    for Ranks { count: ranks, threads, as_threads, sharing } in worlds(level, options.backend) {
        let place = Place::new(ranks, as_threads)?;
        let of_each = match sharing {
            true => "on one GPU".into(),
            false => format!("{threads} threads each"),
        };
        let world = format!("{ranks} ranks as {}, {of_each}", place.words());
        if missing.is_some() {
            say!("{world}: {count} cases skipped")?;
            skipped += count;
            continue;
        }
        let begun = Instant::now();
        let devices = match sharing {
            true => Some(options.devices.unwrap_or_default().first()),
            false => options.devices,
        };
        let device = Device::new(options.backend, Some(threads), devices)?;
        let failures = run_world(place, device, level, count)?;
        failed += failures;
        passed += count - failures;
        say!("{world}: {count} cases, {failures} failed, {:.1?}", begun.elapsed())?;
    }
    say!("{passed} passed, {failed} failed, {skipped} skipped")?;
    Ok(failed == 0)
}

/// Runs all cases in one world; after one that failed, goes on behind it in a new world. Returns
/// how many failed.
fn run_world(place: Place, device: Device, level: Level, count: usize) -> Result<usize> {
    let (mut first, mut failures) = (0, 0);
    while first < count {
        let said = Said::default();
        let job = SuiteJob { device, level, first, said: Some(said.clone()) };
        let Err(error) = place.run_with(&job, &said) else { break };
        // The last case that rank 0 began; before the first, the world itself failed.
        let begun = said.text().lines().rev().find_map(|line| line.strip_prefix(AT)?.parse().ok());
        let at = begun.unwrap_or(first);
        say!("case {at} FAILED: {error:#}")?;
        failures += 1;
        first = at + 1;
    }
    Ok(failures)
}

/// What rank 0 says at the beginning of a case, before its number.
const AT: &str = "case ";

/// The cases from one on, in one world.
#[derive(Serialize, Deserialize)]
pub(crate) struct SuiteJob {
    device: Device,
    level: Level,
    first: usize,
    /// Where ranks that are threads say what they begin; processes have their stdout.
    #[serde(skip)]
    said: Option<Said>,
}

impl Job for SuiteJob {
    type Report = usize;

    const NAME: &str = "suite";

    fn run_rank(&self, world: &World) -> Result<Option<usize>> {
        let cases = cases(self.level, self.device.backend());
        let (mut data, mut signal) = (0, 0);
        for case in &cases {
            let need = heap_bytes(case, world.size())?;
            (data, signal) = (need.0.max(data), need.1.max(signal));
        }
        let heap = SymmetricHeap::open(world, self.device.heap(world, data, signal))?;
        let root = world.rank() == 0;
        for (at, case) in cases.iter().enumerate().skip(self.first) {
            if root {
                let line = format!("{AT}{at}\n");
                match &self.said {
                    Some(said) => said.clone().write_all(line.as_bytes())?,
                    None => io::stdout().write_all(line.as_bytes())?,
                }
            }
            run_case(&heap, case)?;
        }
        heap.close()?;
        Ok(root.then_some(cases.len()))
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
            for op in OpName::ALL {
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
