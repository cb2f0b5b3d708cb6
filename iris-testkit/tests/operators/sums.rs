//! Order in which the parts of ranks are added.

use iris_heap::World;
use iris_ops::Topology;
use iris_testkit::suite::{Case, Op};

use crate::common::ready::{Ready, all_cases};

/// Result of a case in a world of `size` ranks: the rows of C of all ranks, in the order of ranks.
fn results(case: &Case, size: usize) -> Vec<Vec<f32>> {
    let of_rank = |world: World| -> anyhow::Result<_> {
        let mut ready = Ready::new(&world, case)?;
        ready.call_and_sync()?;
        let (rows, cols) = case.shapes(Topology::from(&ready.heap), case.options.m)[2];
        let c = ready.heap.read(ready.c.slice(..rows * cols)?)?;
        ready.heap.close()?;
        Ok(c)
    };
    World::run_threads(size, of_rank).unwrap_or_else(|error| panic!("{case:?}: {error}"))
}

/// Sum in the order of ranks of the inputs of `count` elements of an all-reduce.
fn in_order(size: usize, count: usize) -> Vec<f32> {
    let of_rank = |rank| move |i| iris_heap::random_unit(1, rank, i) as f32;
    let add = |sum: Vec<f32>, rank| {
        sum.iter().zip((0..).map(of_rank(rank))).map(|(x, y)| x + y).collect()
    };
    (1..size).fold((0..count).map(of_rank(0)).collect(), add)
}

/// Tests that all variants of all sums give the bits of a sum in the order of ranks, whichever rank
/// owns an element. Sums of three or more random numbers differ if the owner's number is added first.
#[test]
fn sums_are_in_the_order_of_ranks() {
    for size in [3, 5] {
        let mut products = None;
        for case in all_cases() {
            let is_sum = matches!(
                case.op,
                Op::AllReduce | Op::ReduceScatter | Op::MatmulAllReduce | Op::MatmulReduceScatter
            );
            if !is_sum || ["spinlock", "atomic"].contains(&&*case.variant) {
                continue;
            }
            let all = results(&case, size);
            let expected = match case.op.multiplies() {
                false => in_order(size, case.options.m * case.options.n),
                // The first case has variant `one_shot`.
                true => products.get_or_insert_with(|| all[0].clone()).clone(),
            };
            match case.op {
                Op::AllReduce | Op::MatmulAllReduce => {
                    all.iter().for_each(|c| assert_eq!(*c, expected, "{size} ranks: {case:?}"));
                }
                _ => assert_eq!(all.concat(), expected, "{size} ranks: {case:?}"),
            }
        }
    }
}
