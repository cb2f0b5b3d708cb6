//! Tests that an operator is made either on all ranks or on none, if one rank fails or differs from
//! the others.

use iris_heap::{HeapOptions, Segment, World};

use super::*;
use crate::all_reduce::{Options, Variant};
use crate::{AllReduce, CollectiveArgs, MatRef, Op, Topology};

const OP: Op = Op::AllReduce;

fn plan(world: &World, variant: Variant) -> Plan {
    Options::rows(8, 6).variant(variant).plan(world).expect("a plan")
}

/// Runs an all-reduce of ones; returns whether every element of the result is the number of ranks.
fn sums_are_right(heap: &Arc<SymmetricHeap>) -> bool {
    let plan = plan(heap.local_world(), Variant::TwoShot);
    let op = AllReduce::new(heap, &plan).expect("an op");
    let (a, c) = (heap.ones::<f32>(48).expect("A"), heap.zeros::<f32>(48).expect("C"));
    let stream = heap.stream().expect("a stream");
    let args = CollectiveArgs::new(MatRef::sym(a, 8, 6), MatRef::sym(c, 8, 6));
    op.run(&args, &stream).expect("a call");
    stream.sync().expect("sums");
    let right = heap.read(c).expect("C").iter().all(|&sum| sum == heap.size() as f32);
    op.free().expect("freed");
    heap.free_many(&[a.raw(), c.raw()]).expect("freed");
    right
}

#[test]
fn words_that_one_rank_cannot_prepare_are_prepared_by_none() {
    World::run_threads(3, |world| {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().device_words(128).threads(1))?;
        let free = || (heap.free_bytes(Segment::Data), heap.free_bytes(Segment::Signal));
        let before = free();
        let plan = plan(&world, Variant::OneShot);
        // If a failed attempt left its words allocated, five rounds would need more device words
        // than the heap has.
        for _ in 0..5 {
            let made = Operator::make(OP, &heap, &plan, None, |workspace| {
                workspace.prepare_words()?;
                let worn = Error::invalid(OP, "a word", "worn out", "a new one");
                if heap.rank() == 1 { Err(worn) } else { Ok(()) }
            });
            let error = made.expect_err("an error").to_string();
            let place = format!("all_reduce of 8 x 6 f32 at {}:", file!());
            assert!(error.starts_with(&place), "{error}");
            assert!(error.contains("a word is worn out, expected a new one"), "{error}");
            assert_eq!(
                error.contains("rank 1 failed in all_reduce, "),
                heap.rank() != 1,
                "{error}"
            );
            assert_eq!(free(), before);
            assert!(sums_are_right(&heap));
        }
        heap.close()
    })
    .expect("every rank");
}

/// Tests that ranks with different kernel sources are refused, because their kernels would disagree
/// about the protocol.
#[test]
fn kernel_sources_are_compared_when_an_op_is_made() {
    let plan = Options::rows(8, 6).plan(Topology::new(0, 2)).expect("a plan");
    let items = make::agreed(&plan);
    let sources = items.iter().find(|(name, _)| *name == "kernel sources");
    assert_eq!(sources.map(|(_, hash)| hash.len()), Some(32));
}

/// Tests the error if ranks read different tuning files, for example on two machines, or because
/// `iris tune` ran between the starts of two ranks.
#[test]
fn ranks_that_read_other_tuning_files_are_told_both() {
    let told = World::run_threads(2, |world| {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
        let file = format!("/cache/tuning-{}.toml (00ff)", world.rank());
        let ranks = Topology::from(&world);
        let tuning: &'static _ =
            Box::leak(Box::new(ranks.tuning().with_file(file, None, Vec::new(), Vec::new())));
        let plan = Options::rows(8, 6).plan(ranks.with(tuning)).expect("a plan");
        assert!(plan.tuned_by().is_some());
        Ok::<_, iris_heap::Error>(
            AllReduce::new(&heap, &plan).expect_err("other files").to_string(),
        )
    });
    let said = &told.expect("every rank")[0];
    let [one, other] =
        [0, 1].map(|rank| format!("/cache/tuning-{rank}.toml (00ff) on rank {rank}"));
    assert!(said.contains("tuning") && said.contains(&one) && said.contains(&other), "{said}");
}

#[test]
fn tiles_of_an_owner_are_spread_over_the_workgroups() {
    assert_eq!([spread(264, 4), spread(132, 3), spread(12, 1), spread(1, 8)], [263, 131, 12, 1]);
    assert_eq!((spread(36, 6), spread(2, 2)), (35, 1));
}
