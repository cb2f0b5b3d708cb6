//! Ratios of the messages of a mixture of experts whose experts are split over the ranks.

use anyhow::Result;
use iris_heap::{Bytes, DType, Element, SymSlice, SymmetricHeap, World};
use iris_ops::{
    AllGather, CollectiveArgs, MatRef, Plan, ReduceScatter, Topology, all_gather, reduce_scatter,
};
use iris_testkit::rank_setup::Rig;

use super::{Kind, Ratio, Times};
use crate::progress::Progress;
use crate::timing::{balanced, in_turns};

/// Plans of the measured side, and of its baseline: all of the variant `ll`.
pub(super) fn plans(ratio: &Ratio, ranks: Topology) -> Result<[Vec<Plan>; 2]> {
    let Ratio { m, n, k, .. } = *ratio;
    Ok(match ratio.kind {
        Kind::List => {
            let gather = |n| all_gather::Options::rows(m, n).variant(all_gather::Variant::Ll);
            let list = gather(n).and(DType::I32, k).and(DType::F32, k).plan(ranks)?;
            // A gather of one tensor has no i32, so the ids are moved as f32.
            let each = [n, k, k].map(|n| gather(n).plan(ranks));
            [vec![list], each.into_iter().collect::<Result<_, _>>()?]
        }
        _ => {
            let sum = |n| reduce_scatter::Options::rows(m, n).variant(reduce_scatter::Variant::Ll);
            [vec![sum(n).combine(k).plan(ranks)?], vec![sum(k * n).plan(ranks)?]]
        }
    })
}

/// Measures the ratio on this rank. Collective; rank 0 returns the times.
pub(super) fn run(ratio: &Ratio, world: &World) -> Result<Option<Times>> {
    let ranks = Topology::from(world);
    let Ratio { m, n, k, .. } = *ratio;
    let [own, base] = plans(ratio, ranks)?;
    let all: Vec<&Plan> = own.iter().chain(&base).collect();
    // At most two inputs and two outputs of K N columns, or of N and 2 K columns.
    let bytes = Bytes::new(4 * 4 * (m * (k * n + n + 2 * k)) as u64 + (1 << 16));
    let heap = SymmetricHeap::open(world, Plan::heap_options(&all, bytes)?.threads(ratio.threads))?;
    let rig = Rig { stream: heap.stream()?, heap };
    let heap = &rig.heap;
    let rows = own[0].rows_of(ranks.rank, m).len();
    let progress = Progress::hidden();
    let turns = |time: &mut dyn FnMut(usize) -> Result<f64>| {
        in_turns((world, &progress), ratio.repetitions, (2, balanced), time)
    };
    let times = match ratio.kind {
        Kind::List => {
            let tokens = Gathered::<f32>::new(heap, [rows, m], n)?;
            let ids = Gathered::<i32>::new(heap, [rows, m], k)?;
            let weights = Gathered::<f32>::new(heap, [rows, m], k)?;
            let words = Gathered::<f32>::new(heap, [rows, m], k)?;
            let list = AllGather::new(heap, &own[0])?;
            let [input, output] = tokens.matrices();
            let mut args = CollectiveArgs::new(input, output);
            for [input, output] in [ids.matrices(), weights.matrices()] {
                args = args.and(input, output);
            }
            let each = base.iter().map(|plan| AllGather::new(heap, plan));
            let each = each.collect::<Result<Vec<_>, _>>()?;
            let of = [&tokens, &words, &weights].map(|tensor| {
                let [input, output] = tensor.matrices();
                CollectiveArgs::new(input, output)
            });
            turns(&mut |side| {
                rig.time(|stream| match side {
                    0 => Ok(list.run(&args, stream)?),
                    _ => {
                        Ok(each.iter().zip(&of).try_for_each(|(op, args)| op.run(args, stream))?)
                    }
                })
            })?
        }
        _ => {
            let (parts, weights) = (heap.full(m * k * n, 0.5_f32)?, heap.full(m * k, 0.5_f32)?);
            let (sum, sums) = (heap.zeros::<f32>(m * n)?, heap.zeros::<f32>(m * k * n)?);
            let parts = MatRef::sym(parts, m, k * n);
            let args = CollectiveArgs::new(parts, MatRef::sym(sum, rows, n));
            let args = args.weights(MatRef::sym(weights, m, k));
            let whole = CollectiveArgs::new(parts, MatRef::sym(sums, rows, k * n));
            let combined = ReduceScatter::new(heap, &own[0])?;
            let plain = ReduceScatter::new(heap, &base[0])?;
            turns(&mut |side| {
                let (op, args) = if side == 0 { (&combined, &args) } else { (&plain, &whole) };
                rig.time(|stream| Ok(op.run(args, stream)?))
            })?
        }
    };
    rig.heap.close()?;
    Ok((ranks.rank == 0).then(|| Times::of(times)))
}

/// Input and output of a gather of `n` columns.
struct Gathered<T: Element> {
    slices: [SymSlice<T>; 2],
    rows: [usize; 2],
    n: usize,
}

impl<T: Element> Gathered<T> {
    fn new(heap: &SymmetricHeap, rows: [usize; 2], n: usize) -> Result<Self> {
        Ok(Self { slices: [heap.zeros(rows[1] * n)?, heap.zeros(rows[1] * n)?], rows, n })
    }

    fn matrices(&self) -> [MatRef; 2] {
        [0, 1].map(|at| MatRef::sym(self.slices[at], self.rows[at], self.n))
    }
}
