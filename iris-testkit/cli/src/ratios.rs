//! Jobs that measure the ratios of `iris bench`: each times the two sides of a ratio in turns.

use std::time::Instant;

use anyhow::Result;
use gemm_common::Parallelism;
use iris_heap::{HeapOptions, World, random_unit};
use iris_ops::{Plan, TileShape, Topology};
use iris_testkit::matrix::Matrix;
use iris_testkit::oracle::split;
use iris_testkit::rank_setup::{Rig, Room};
use iris_testkit::suite::{self, AnyOp, Op, Operands, Options};
use serde::{Deserialize, Serialize};

use crate::errors::usage;
use crate::job::Job;
use crate::problem::known_variant;
use crate::progress::Progress;
use crate::timing::{balanced, in_turns, median};
use iris_heap::DType::F32;

mod experts;

/// Pair of sides whose times a ratio compares: the measured one and its baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// One rank's op, compared with a direct call of the crate `gemm-f32`.
    Gemm,
    /// Fused op, compared with its parts one after the other: GEMM, barrier, reduction.
    Fusion,
    /// Op on `ranks` ranks, compared with the op on the first `base_ranks` of them.
    Ranks,
    /// Gather of a list of tensors (M x N, and two of M x K), compared with a gather of each, all by the
    /// variant `ll`.
    List,
    /// Reduce-scatter of rows of N columns that are sums of K weighted parts, compared with one of
    /// rows of K N columns, in which the parts are not combined; both by the variant `ll`.
    Combine,
}

/// Ratio to measure, in f32, and the limit that it must not exceed.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ratio {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) m: usize,
    pub(crate) n: usize,
    /// K of the whole product, which is split over the ranks; of a mixture of experts, the number of
    /// experts of a token.
    pub(crate) k: usize,
    #[serde(default = "auto")]
    pub(crate) variant: String,
    #[serde(default = "one")]
    pub(crate) ranks: usize,
    #[serde(default = "one")]
    base_ranks: usize,
    /// Number of threads per rank.
    threads: usize,
    /// Rows and columns of a tile; `None` if the plan chooses the tile.
    tile: Option<[usize; 2]>,
    repetitions: usize,
    pub(crate) at_most: f64,
}

impl Ratio {
    /// Whether a message of a mixture of experts is measured, and not a product.
    fn is_of_experts(&self) -> bool {
        matches!(self.kind, Kind::List | Kind::Combine)
    }
}

fn auto() -> String {
    "auto".into()
}

fn one() -> usize {
    1
}

/// Job that measures one ratio on all ranks.
#[derive(Serialize, Deserialize)]
pub(crate) struct RatioJob(Ratio);

impl RatioJob {
    /// Checks the fields of `ratio` and makes the job.
    pub(crate) fn new(ratio: &Ratio) -> Result<RatioJob> {
        let Ratio { name, kind, ranks, base_ranks, .. } = ratio;
        if *kind == Kind::Gemm && *ranks != 1 {
            return Err(usage(format!("ranks of {name:?}"), ranks, "1"));
        }
        if base_ranks > ranks || *base_ranks == 0 {
            let expected = format!("1 to {ranks}, the ranks that there are");
            return Err(usage(format!("base_ranks of {name:?}"), base_ranks, expected));
        }
        known_variant("variant", Op::MatmulAllReduce, &ratio.variant)?;
        if ratio.is_of_experts() {
            if ratio.variant != "auto" {
                return Err(usage(format!("variant of {name:?}"), &ratio.variant, "none"));
            }
            experts::plans(ratio, Topology::new(0, *ranks))?;
        } else {
            fused(ratio, Topology::new(0, *ranks))?;
        }
        Ok(RatioJob(ratio.clone()))
    }
}

/// Plan of the op whose time is the ratio's numerator.
fn fused(ratio: &Ratio, ranks: Topology) -> Result<Plan> {
    let k = split(ratio.k, ranks.size, ranks.rank).len();
    let mut options = Options::new(ratio.m, ratio.n, k);
    options.tile = ratio.tile.map(|[m, n]| TileShape { m, n });
    suite::plan(Op::MatmulAllReduce, &ratio.variant, ranks, &options)
}

/// Heap, stream and matrices of a rank, which both sides of a ratio use.
struct Bed {
    rig: Rig,
    matrices: [Matrix; 3],
}

impl Bed {
    /// Opens the heap in `world`, with room for the workspace of the unfused side, too. Collective.
    #[track_caller]
    fn new(ratio: &Ratio, world: &World) -> Result<Bed> {
        let ranks = Topology::from(world);
        let Ratio { m, n, .. } = *ratio;
        let most = split(ratio.k, ranks.size, 0).len();
        let k = split(ratio.k, ranks.size, ranks.rank).len();
        let elements = [m * most, most * n, m * n];
        let both = Room::of(ranks.size, |ranks| fused(ratio, ranks))?;
        let both = both.and(Room::of(ranks.size, |ranks| reduction(ratio, ranks))?);
        // 64 KiB of signals suffice for the GEMM and the barrier of the unfused side.
        let room = both.matrices(F32, elements).and(Room { data: 0, signal: 64 << 10 });
        let rig = Rig::open(world, HeapOptions::new().threads(ratio.threads), room)?;
        let matrices = rig.matrices(F32, elements, [(m, k), (k, n), (m, n)])?;
        let [a, b, c] = &matrices;
        a.fill(&rig.heap, |row, col| random_unit(1, ranks.rank, row * k + col))?;
        b.fill(&rig.heap, |row, col| random_unit(2, ranks.rank, row * n + col))?;
        c.poison(&rig.heap)?;
        Ok(Bed { rig, matrices })
    }

    fn operands(&self) -> Result<Operands> {
        let [a, b, c] = &self.matrices;
        Ok(Operands::new(a.matrix()?, b.matrix()?, c.matrix()?))
    }

    /// Time in microseconds of `ops` enqueued one after the other; all ranks start together.
    fn time(&self, ops: &[(&AnyOp, Operands)]) -> Result<f64> {
        self.rig.time(|stream| {
            Ok(ops.iter().try_for_each(|(op, operands)| op.run(operands, stream))?)
        })
    }
}

/// Plan of the all-reduce that the unfused side runs after its GEMM.
fn reduction(ratio: &Ratio, ranks: Topology) -> Result<Plan> {
    let options = Options::new(ratio.m, ratio.n, 0);
    suite::plan(Op::AllReduce, &ratio.variant, ranks, &options)
}

/// Measured ratio and times: medians over the repetitions of the slowest rank's times.
#[derive(Serialize, Deserialize)]
pub(crate) struct Times {
    /// Time of the measured side, in microseconds.
    pub(crate) time: f64,
    /// Time of the baseline side, in microseconds.
    pub(crate) base: f64,
    /// Median of the repetitions' ratios; the two sides of a repetition ran under the same
    /// conditions.
    pub(crate) ratio: f64,
}

impl Times {
    /// Medians of the samples of both sides.
    fn of(samples: Vec<Vec<f64>>) -> Times {
        let [time, base] = samples.try_into().expect("two sides");
        let ratios = time.iter().zip(&base).map(|(time, base)| time / base).collect();
        Times { ratio: median(ratios), time: median(time), base: median(base) }
    }
}

impl Job for RatioJob {
    type Report = Times;

    const NAME: &str = "ratio";

    fn run_rank(&self, world: &World) -> Result<Option<Times>> {
        let ratio = &self.0;
        if ratio.is_of_experts() {
            return experts::run(ratio, world);
        }
        let ranks = Topology::from(world);
        let bed = Bed::new(ratio, world)?;
        let operands = bed.operands()?;
        let op = AnyOp::new(&bed.rig.heap, &fused(ratio, ranks)?)?;
        let progress = Progress::hidden();
        // The two sides take turns; `base` is the second one.
        let turns = |base: &mut dyn FnMut() -> Result<f64>| {
            let time = |side: usize| if side == 0 { bed.time(&[(&op, operands)]) } else { base() };
            in_turns((world, &progress), ratio.repetitions, (2, balanced), time)
        };
        let times = match ratio.kind {
            Kind::Gemm => {
                let mut base = DirectGemm::new(ratio, &bed)?;
                turns(&mut || Ok(base.time()))?
            }
            Kind::Fusion => {
                let k = split(ratio.k, ranks.size, ranks.rank).len();
                let (local, none) = (Options::new(ratio.m, ratio.n, k), Options::new(0, 0, 0));
                let make = |op: Op, variant: &str, options: &Options| {
                    AnyOp::new(&bed.rig.heap, &suite::plan(op, variant, ranks, options)?)
                        .map_err(anyhow::Error::from)
                };
                let multiply = make(Op::Matmul, "auto", &local)?;
                let barrier = make(Op::Barrier, "auto", &none)?;
                let message = Options::new(ratio.m, ratio.n, 0);
                let reduce = make(Op::AllReduce, &ratio.variant, &message)?;
                let in_place = Operands::new(operands.c, operands.b, operands.c);
                let apart = [(&multiply, operands), (&barrier, operands), (&reduce, in_place)];
                turns(&mut || bed.time(&apart))?
            }
            Kind::Ranks => {
                // The first `base_ranks` ranks have a world and a heap of their own. While these
                // ranks run, the other ranks wait on the host without using a core.
                let few = world.split((ranks.rank < ratio.base_ranks).then_some(0), 0)?;
                let small = few.as_ref().map(|few| Bed::new(ratio, few)).transpose()?;
                let made = match (&few, &small) {
                    (Some(few), Some(bed)) => {
                        let plan = fused(ratio, Topology::from(few))?;
                        Some(AnyOp::new(&bed.rig.heap, &plan)?)
                    }
                    _ => None,
                };
                let mut few_side = || {
                    world.barrier()?;
                    let time = match (&small, &made) {
                        (Some(bed), Some(op)) => bed.time(&[(op, bed.operands()?)])?,
                        _ => 0.0,
                    };
                    world.barrier()?;
                    Ok(time)
                };
                let times = turns(&mut few_side)?;
                drop(made);
                if let Some(bed) = small {
                    bed.rig.heap.close()?;
                }
                if let Some(few) = few {
                    few.close()?;
                }
                times
            }
            Kind::List | Kind::Combine => unreachable!("they have a function of their own"),
        };
        drop(op);
        bed.rig.heap.close()?;
        Ok((ranks.rank == 0).then(|| Times::of(times)))
    }
}

/// Direct calls of the crate `gemm-f32` with the same number of threads, as the base of [`Kind::Gemm`].
struct DirectGemm {
    shape: [usize; 3],
    parallelism: Parallelism,
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl DirectGemm {
    fn new(ratio: &Ratio, bed: &Bed) -> Result<DirectGemm> {
        let single = |matrix: &Matrix| -> Result<Vec<f32>> {
            Ok(matrix.read(&bed.rig.heap)?.into_iter().map(|value| value as f32).collect())
        };
        let parallelism = match ratio.threads {
            1 => Parallelism::None,
            threads => Parallelism::Rayon(threads),
        };
        let Ratio { m, n, k, .. } = *ratio;
        let (a, b, c) = (single(&bed.matrices[0])?, single(&bed.matrices[1])?, vec![0.0; m * n]);
        Ok(DirectGemm { shape: [m, n, k], parallelism, a, b, c })
    }

    fn time(&mut self) -> f64 {
        let [m, n, k] = self.shape;
        let begun = Instant::now();
        // SAFETY: the vectors hold m x k, k x n and m x n elements, row-major, as the strides say.
        #[allow(unsafe_code, reason = "the crate's only interface takes pointers")]
        unsafe {
            // The function computes the transpose, because it prefers a column-major result.
            gemm_f32::gemm::f32::get_gemm_fn()(
                n,
                m,
                k,
                self.c.as_mut_ptr(),
                n as isize,
                1,
                false,
                self.b.as_ptr(),
                n as isize,
                1,
                self.a.as_ptr(),
                k as isize,
                1,
                0.0,
                1.0,
                false,
                false,
                false,
                self.parallelism,
            );
        }
        begun.elapsed().as_secs_f64() * 1e6
    }
}
