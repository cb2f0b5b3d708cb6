//! The ratios that `iris bench` measures, as jobs: two sides, taken in turns.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use iris_heap::{HeapOptions, Stream, SymmetricHeap, World, random_unit};
use iris_ops::{Plan, Ranks, TileShape};
use iris_testkit::oracle::split;
use iris_testkit::suite::{self, AnyOp, Op, Operands, Options};
use serde::{Deserialize, Serialize};

use crate::errors::usage;
use crate::job::{Job, gather, median, slowest};
use crate::matrices::{Matrix, room};
use crate::problem::known_variant;
use crate::progress::Progress;
use iris_heap::DType::F32;

/// Which two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// One rank's op, and the GEMM crate called directly.
    Gemm,
    /// The fused op, and its parts one after the other: product, barrier, reduction.
    Fusion,
    /// The op on many ranks, and on the first few of them.
    Ranks,
}

/// A ratio of two times: what is measured, and what is asked of it. f32.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ratio {
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) m: usize,
    pub(crate) n: usize,
    /// Of the whole: it is split over the ranks.
    pub(crate) k: usize,
    #[serde(default = "auto")]
    pub(crate) variant: String,
    #[serde(default = "one")]
    pub(crate) ranks: usize,
    #[serde(default = "one")]
    base_ranks: usize,
    /// Of a rank.
    threads: usize,
    /// Rows and columns of a tile, instead of the plan's choice.
    tile: Option<[usize; 2]>,
    repetitions: usize,
    pub(crate) at_most: f64,
}

fn auto() -> String {
    "auto".into()
}

fn one() -> usize {
    1
}

/// A ratio, ready to be measured.
#[derive(Serialize, Deserialize)]
pub(crate) struct RatioJob(Ratio);

impl RatioJob {
    /// Checked.
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
        fused(ratio, Ranks::new(0, *ranks))?;
        Ok(RatioJob(ratio.clone()))
    }
}

/// The plan of the op that is measured.
fn fused(ratio: &Ratio, ranks: Ranks) -> Result<Plan> {
    let k = split(ratio.k, ranks.size, ranks.rank).len();
    let mut options = Options::new(ratio.m, ratio.n, k);
    options.tile = ratio.tile.map(|[m, n]| TileShape { m, n });
    suite::plan(Op::MatmulAllReduce, &ratio.variant, ranks, &options)
}

/// A heap with the matrices of a rank in it.
struct Bed {
    heap: Arc<SymmetricHeap>,
    stream: Stream,
    a: Matrix,
    b: Matrix,
    c: Matrix,
}

impl Bed {
    /// Collective in `world`. Of the unfused side the heap has room for the workspace, too.
    #[track_caller]
    fn new(ratio: &Ratio, world: &World) -> Result<Bed> {
        let ranks = Ranks::from(world);
        let (mut data, mut signal) = (0, 0);
        for plan in [fused(ratio, Ranks::new(0, ranks.size))?, reduction(ratio, ranks)?] {
            data += plan.data_bytes();
            signal += plan.signal_bytes();
        }
        let Ratio { m, n, .. } = *ratio;
        let most = split(ratio.k, ranks.size, 0).len();
        let k = split(ratio.k, ranks.size, ranks.rank).len();
        data += [m * most, most * n, m * n].map(|elements| room(F32, elements)).iter().sum::<u64>();
        let options = HeapOptions::new()
            .threads(ratio.threads)
            .data_bytes(data)
            .signal_bytes(signal + (64 << 10));
        let heap = SymmetricHeap::open(world, options)?;
        let a = Matrix::new(&heap, F32, m * most, (m, k))?;
        let b = Matrix::new(&heap, F32, most * n, (k, n))?;
        let c = Matrix::new(&heap, F32, m * n, (m, n))?;
        a.fill(&heap, |row, col| random_unit(1, ranks.rank, row * k + col))?;
        b.fill(&heap, |row, col| random_unit(2, ranks.rank, row * n + col))?;
        c.poison(&heap)?;
        Ok(Bed { stream: heap.stream()?, heap, a, b, c })
    }

    fn operands(&self) -> Result<Operands> {
        let Bed { a, b, c, .. } = self;
        Ok(Operands::new(a.matrix()?, b.matrix()?, c.matrix()?))
    }

    /// Microseconds of ops that are enqueued together, which all ranks begin together.
    fn time(&self, ops: &mut [(&mut AnyOp, Operands)]) -> Result<f64> {
        self.heap.world().barrier()?;
        let begun = Instant::now();
        for (op, operands) in ops {
            op.run(operands, &self.stream)?;
        }
        self.stream.sync()?;
        Ok(begun.elapsed().as_secs_f64() * 1e6)
    }
}

/// The plan of the all-reduce alone.
fn reduction(ratio: &Ratio, ranks: Ranks) -> Result<Plan> {
    let options = Options::new(ratio.m, ratio.n, 0);
    suite::plan(Op::AllReduce, &ratio.variant, ranks, &options)
}

/// One repetition of a side: its time in microseconds.
type Side<'a> = &'a mut dyn FnMut() -> Result<f64>;

/// The two sides in turns, the second one first in every other repetition, once to warm up.
fn turns(ratio: &Ratio, rank: usize, sides: [Side<'_>; 2]) -> Result<[Vec<f64>; 2]> {
    let mut progress = Progress::new("repetitions", rank, ratio.repetitions);
    let mut times = [Vec::new(), Vec::new()];
    for repetition in 0..=ratio.repetitions {
        for turn in 0..2 {
            let side = (repetition + turn) % 2;
            let time = sides[side]()?;
            if repetition > 0 {
                times[side].push(time);
            }
        }
        progress.step();
    }
    Ok(times)
}

/// What came of a ratio: medians over the repetitions of the slowest rank's times.
#[derive(Serialize, Deserialize)]
pub(crate) struct Times {
    /// What is measured, in microseconds.
    pub(crate) time: f64,
    /// The base, in microseconds.
    pub(crate) base: f64,
    /// One by the other, of each repetition: the two sides of one had the same weather.
    pub(crate) ratio: f64,
}

impl Job for RatioJob {
    type Report = Times;

    const NAME: &str = "ratio";

    fn run_rank(&self, world: &World) -> Result<Option<Times>> {
        let ratio = &self.0;
        let ranks = Ranks::from(world);
        let bed = Bed::new(ratio, world)?;
        let operands = bed.operands()?;
        let mut op = AnyOp::new(&bed.heap, &fused(ratio, ranks)?)?;
        let mut fused_side = || bed.time(&mut [(&mut op, operands)]);
        let times = match ratio.kind {
            Kind::Gemm => {
                let mut base = DirectGemm::new(ratio, &bed)?;
                turns(ratio, ranks.rank, [&mut fused_side, &mut || Ok(base.time())])?
            }
            Kind::Fusion => {
                let k = split(ratio.k, ranks.size, ranks.rank).len();
                let (local, none) = (Options::new(ratio.m, ratio.n, k), Options::new(0, 0, 0));
                let make = |op: Op, variant: &str, options: &Options| {
                    AnyOp::new(&bed.heap, &suite::plan(op, variant, ranks, options)?)
                        .map_err(anyhow::Error::from)
                };
                let mut multiply = make(Op::Matmul, "auto", &local)?;
                let mut barrier = make(Op::Barrier, "auto", &none)?;
                let message = Options::new(ratio.m, ratio.n, 0);
                let mut reduce = make(Op::AllReduce, &ratio.variant, &message)?;
                let in_place = Operands::new(operands.c, operands.b, operands.c);
                turns(
                    ratio,
                    ranks.rank,
                    [&mut fused_side, &mut || {
                        bed.time(&mut [
                            (&mut multiply, operands),
                            (&mut barrier, operands),
                            (&mut reduce, in_place),
                        ])
                    }],
                )?
            }
            Kind::Ranks => {
                // The first ranks have a world and a heap of their own; the others wait for them
                // on the host, which takes no processor.
                let few = world.split((ranks.rank < ratio.base_ranks).then_some(0), 0)?;
                let small = few.as_ref().map(|few| Bed::new(ratio, few)).transpose()?;
                let mut made = match (&few, &small) {
                    (Some(few), Some(bed)) => {
                        let plan = fused(ratio, Ranks::from(few))?;
                        Some(AnyOp::new(&bed.heap, &plan)?)
                    }
                    _ => None,
                };
                let mut few_side = || {
                    world.barrier()?;
                    let time = match (&small, &mut made) {
                        (Some(bed), Some(op)) => bed.time(&mut [(op, bed.operands()?)])?,
                        _ => 0.0,
                    };
                    world.barrier()?;
                    Ok(time)
                };
                let times = turns(ratio, ranks.rank, [&mut fused_side, &mut few_side])?;
                drop(made);
                if let Some(bed) = small {
                    bed.heap.close()?;
                }
                if let Some(few) = few {
                    few.close()?;
                }
                times
            }
        };
        let all: Vec<[Vec<f64>; 2]> = gather(world, &times)?;
        drop(op);
        bed.heap.close()?;
        let side =
            |side: usize| slowest(&all.iter().map(|rank| rank[side].clone()).collect::<Vec<_>>());
        let (time, base) = (side(0), side(1));
        let ratios = time.iter().zip(&base).map(|(time, base)| time / base).collect();
        Ok((ranks.rank == 0).then(|| Times {
            ratio: median(ratios),
            time: median(time),
            base: median(base),
        }))
    }
}

/// The GEMM crate, called directly with as many threads.
struct DirectGemm {
    shape: [usize; 3],
    parallelism: gemm::Parallelism,
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl DirectGemm {
    fn new(ratio: &Ratio, bed: &Bed) -> Result<DirectGemm> {
        let single = |matrix: &Matrix| -> Result<Vec<f32>> {
            Ok(matrix.read(&bed.heap)?.into_iter().map(|value| value as f32).collect())
        };
        let parallelism = match ratio.threads {
            1 => gemm::Parallelism::None,
            threads => gemm::Parallelism::Rayon(threads),
        };
        let Ratio { m, n, k, .. } = *ratio;
        let (a, b, c) = (single(&bed.a)?, single(&bed.b)?, vec![0.0; m * n]);
        Ok(DirectGemm { shape: [m, n, k], parallelism, a, b, c })
    }

    fn time(&mut self) -> f64 {
        let [m, n, k] = self.shape;
        let begun = Instant::now();
        // SAFETY: the vectors hold m x k, k x n and m x n elements, row by row.
        #[allow(unsafe_code, reason = "the crate's only interface takes pointers")]
        unsafe {
            gemm::gemm(
                m,
                n,
                k,
                self.c.as_mut_ptr(),
                1,
                n as isize,
                false,
                self.a.as_ptr(),
                1,
                k as isize,
                self.b.as_ptr(),
                1,
                n as isize,
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
