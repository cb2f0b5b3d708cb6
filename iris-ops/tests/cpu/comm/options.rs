//! Tests of the options and of the memory of communicators.

use anyhow::Result;
use iris_heap::{DType, HeapOptions, Segment, SymmetricHeap, World};
use iris_ops::comm::{Comm, Footprint, Options};
use iris_ops::{Device, Topology};
use iris_testkit::error_texts::fails;

use super::{CPU, nodes, small, sums};

#[test]
fn options_that_differ_are_named() {
    type Change = fn(Options) -> Options;
    let cases: [(Change, [&str; 2]); 3] = [
        (|it| it.name("dp"), ["name is none on rank 0", "dp on rank 1"]),
        (|it| it.max_bytes(8192), ["max_bytes is 4096 on rank 0", "8192 on rank 1"]),
        (|it| it.sums(&[DType::F32]), ["sums is f32, f16, bf16 on rank 0", "f32 on rank 1"]),
    ];
    for (change, words) in cases {
        let rank = |world: World| -> Result<Vec<String>> {
            let options = if world.rank() == 1 { change(small()) } else { small() };
            let mut told = vec![Comm::from_world(CPU, &world, &options).err()];
            let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
            told.push(Comm::in_heap(CPU, &heap, &options).err());
            Ok(told.into_iter().map(|error| error.expect("an error").to_string()).collect())
        };
        for text in World::run_threads(2, rank).unwrap().concat() {
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
    }
}

/// Tests that a rank whose options are refused tells the other rank, which need not wait for it.
#[test]
fn options_that_one_rank_refuses_are_told_to_all() {
    let rank = |world: World| -> Result<String> {
        let options = small().max_bytes([8192, 1][world.rank()]);
        let error = Comm::from_world(CPU, &world, &options).unwrap_err().to_string();
        // The rank keeps its world, so that nobody takes it for lost.
        world.close()?;
        Ok(error)
    };
    let told = World::run_threads(2, rank).unwrap();
    assert!(told[1].contains("max_bytes of a communicator is 1"), "{told:?}");
    assert!(told[0].contains("rank 1 failed") && told[0].contains("max_bytes"), "{told:?}");
}

/// Tests that a communicator uses as much memory as `footprint` returns, and gives all of it back.
#[test]
fn a_communicator_takes_its_footprint_of_a_heap() {
    let rank = |world: World| -> Result<()> {
        let options = small();
        let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
        let free = || [Segment::Data, Segment::Signal].map(|segment| heap.free_bytes(segment).0);
        let before = free();
        let comm = Comm::in_heap(CPU, &heap, &options)?;
        let (after, footprint) = (free(), options.footprint(&heap)?);
        let taken = [before[0] - after[0], before[1] - after[1]];
        assert_eq!(taken, [footprint.data_bytes, footprint.signal_bytes]);
        sums::<f32>(&comm, 100)?;
        comm.close()?;
        assert_eq!(free(), before);
        Ok(heap.close()?)
    };
    for size in [1, 2, 5] {
        World::run_threads(size, rank).unwrap();
    }
    for (nodes, per_node) in nodes::WORLDS {
        World::run_nodes(nodes, per_node, rank).unwrap();
    }
}

/// Tests that a communicator for which a heap has too little room leaves nothing allocated.
#[test]
fn a_communicator_without_room_leaves_the_heap_as_it_was() {
    let rank = |world: World| -> Result<()> {
        let whole = small().footprint(&SymmetricHeap::open(&world, HeapOptions::new())?)?;
        // Room for the workspace, but not for the buffers that are allocated after it; and without
        // the words of the barrier, which is made last.
        let without_stage = HeapOptions::new().data_bytes(whole.data_bytes - 1024);
        let signal = whole.signal_bytes + iris_heap::abi::SIGNAL_RESERVED;
        let without_barrier = HeapOptions::new().signal_bytes(signal - 1024);
        for options in [without_stage, without_barrier] {
            let heap = SymmetricHeap::open(&world, options)?;
            let free = || [Segment::Data, Segment::Signal].map(|part| heap.free_bytes(part).0);
            let before = free();
            for _ in 0..2 {
                fails(Comm::in_heap(CPU, &heap, &small()), &["free"]);
                assert_eq!(free(), before);
            }
            heap.close()?;
        }
        Ok(())
    };
    World::run_threads(2, rank).unwrap();
    World::run_nodes(2, 2, rank).unwrap();
}

/// Makes the table of workspace sizes that the documentation must contain.
fn table() -> String {
    let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
    let mut text = String::from(
        "| world | largest message of a launch | data on H200s (MiB) | signals (MiB) | data on the CPU (MiB) | signals (MiB) |\n\
         | --- | --- | --- | --- | --- | --- |\n",
    );
    for size in [2, 4, 8] {
        for max in [1, 8, 64] {
            let options = Options::new().max_bytes(max << 20);
            let ranks = Topology::new(0, size);
            let h200 = Device::named("h200").unwrap();
            let columns = [ranks.on_device(h200).untuned(), ranks.untuned()].map(|ranks| {
                let Footprint { data_bytes, signal_bytes, .. } = options.footprint(ranks).unwrap();
                format!("{} | {}", mib(data_bytes), mib(signal_bytes))
            });
            text += &format!("| {size} | {max} MiB | {} | {} |\n", columns[0], columns[1]);
        }
    }
    text
}

#[test]
fn the_table_of_workspaces_is_what_plans_say() {
    let (derived, written) = (table(), include_str!("../../../src/comm/footprint.md"));
    assert_eq!(derived.trim(), written.trim(), "footprint.md should be:\n{derived}");
}
