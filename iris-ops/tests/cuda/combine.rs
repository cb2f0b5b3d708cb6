//! Sums of weighted parts on GPUs: against the same steps apart, and in a graph.

use anyhow::Result;
use half::{bf16, f16};
use iris_heap::{DType, Element, World};
use iris_ops::Op;
use iris_testkit::combine::{Case, Combined};

use crate::graphs::{callers, captured, drop_graph};
use crate::open;

/// Cases of one operator: parts of a token of a mixture of experts, rows that no vector divides, and
/// rows that are longer than what a thread holds in registers.
fn cases(op: Op) -> Vec<Case> {
    let of = |m, n, parts| Case::new(op, [m, n, parts]);
    let mut all = vec![
        of(8, 7168, 8),
        Case { added: 2, ..of(33, 1000, 6) },
        Case { added: 1, gap: 3, in_place: true, ..of(9, 77, 3) },
        Case { added: 2, wire: Some(DType::F32), gelu: true, ..of(5, 132, 2) },
        Case { special: true, added: 1, ..of(7, 96, 5) },
    ];
    if op == Op::AllReduce {
        all.extend([
            Case { norm: true, added: 2, invariant: true, ..of(8, 7168, 8) },
            Case { norm: true, added: 1, in_place: true, gap: 8, ..of(40, 1024, 4) },
            Case { norm: true, added: 2, ..of(3, 16_384, 1) },
            Case { norm: true, gap: 4, ..of(6, 260, 7) },
        ]);
    }
    all
}

fn check<T: Element>(world: &World) -> Result<()> {
    let heap = open(world)?;
    for op in [Op::AllReduce, Op::ReduceScatter] {
        for case in cases(op) {
            let most = case.shape[0];
            Combined::<T>::new(&heap, case)?.check_calls(&[most, 1, 0, most - 1])?;
        }
    }
    Ok(heap.close()?)
}

pub(crate) fn weighted_parts_are_summed_like_the_same_steps_apart() {
    for size in [1, 2, 3, 4] {
        World::run_threads(size, |world| {
            check::<bf16>(&world)?;
            check::<f16>(&world)?;
            check::<f32>(&world)
        })
        .unwrap();
    }
}

/// Captures a call with two added matrices and an RMSNorm, and replays it with changing operands.
pub(crate) fn a_graph_of_weighted_parts_is_replayed() {
    const M: usize = 8;
    for size in [2, 4] {
        World::run_threads(size, |world| -> Result<()> {
            let heap = open(&world)?;
            let (theirs, stream) = callers(&heap)?;
            let case = Case { norm: true, added: 2, ..Case::new(Op::AllReduce, [M, 1024, 8]) };
            let sum = Combined::<bf16>::new(&heap, case)?;
            let args = sum.args(M);
            let graph = captured(&theirs, || sum.run(&args, &stream))?;
            world.barrier()?;
            for call in 0..20 {
                sum.fill(M, call)?;
                graph.launch()?;
                stream.sync()?;
                sum.check(M, call, &stream)?;
            }
            drop_graph(graph);
            drop(sum);
            Ok(heap.close()?)
        })
        .unwrap();
    }
}
