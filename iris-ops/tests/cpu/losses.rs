//! Tests that all consequences of the loss of a rank have one kind on every rank that is left,
//! wherever a rank is when it learns of the loss.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use iris_heap::abi::abort;
use iris_heap::{Error, ErrorKind, HeapOptions, Settings, SymmetricHeap, World};
use iris_ops::{AllReduce, CollectiveArgs, MatRef, all_reduce};
use iris_testkit::worlds::on_threads;

const RANKS: usize = 64;
const LOST: usize = 17;
/// Calls before the loss; the ranks are in different ones when they learn of it.
const CALLS: usize = 4;

/// Errors of one rank after the loss, each with the name of the function.
type Errors = Vec<(&'static str, Error)>;

fn run_rank(world: World, leave: fn(&World), gone: &AtomicUsize) -> Result<Errors, Error> {
    let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(1 << 16).threads(1))?;
    let plan = all_reduce::Options::new(8).plan(&heap).expect("a plan");
    let op = AllReduce::new(&heap, &plan).expect("an operator");
    let matrix = MatRef::vector(heap.full::<f32>(8, 1.0)?);
    let stream = heap.stream()?;
    let (rank, mut errors) = (world.rank(), Errors::new());
    for call in 0.. {
        if rank == LOST && call == CALLS {
            // Its kernels may wait in a call when it leaves.
            let _ = op.run(&CollectiveArgs::new(matrix, matrix), &stream);
            leave(&world);
            // Its kernels tell what its world tells, and it is not lost to itself.
            assert_eq!(heap.control().host_abort(), abort::PEER_LOST + LOST as i32);
            assert_ne!(heap.check().unwrap_err().kind(), ErrorKind::PeerLost);
            gone.fetch_add(1, Ordering::Relaxed);
            return Ok(errors);
        }
        // A quarter of the ranks waits on the host.
        if rank % 4 == 0 && call == CALLS {
            break;
        }
        let issued = op.run(&CollectiveArgs::new(matrix, matrix), &stream);
        if let Err(error) = stream.sync() {
            errors.push(("Stream::sync", error));
        }
        if issued.is_err() || !errors.is_empty() {
            break;
        }
    }
    if rank % 4 == 1 {
        errors.extend(heap.close().err().map(|error| ("SymmetricHeap::close", error)));
    }
    errors.extend(world.barrier().err().map(|error| ("World::barrier", error)));
    // The world and the heap may learn of the loss one after the other.
    let until = Instant::now() + Duration::from_secs(300);
    let wait_for = |is_there: &dyn Fn() -> bool| {
        while !is_there() {
            assert!(Instant::now() < until, "rank {rank} knows of no loss");
            thread::sleep(Duration::from_millis(1));
        }
    };
    if rank % 4 != 1 {
        wait_for(&|| heap.check().is_err());
        errors.extend(heap.check().err().map(|error| ("SymmetricHeap::check", error)));
        errors.extend(heap.close().err().map(|error| ("SymmetricHeap::close", error)));
    }
    wait_for(&|| world.lost().is_some());
    assert_eq!(world.lost(), Some(LOST), "rank {rank}");
    errors.extend(world.close().err().map(|error| ("World::close", error)));
    Ok(errors)
}

#[test]
fn all_consequences_of_a_loss_have_one_kind_on_all_ranks() {
    for leave in [World::abort as fn(&World), |world| world.abort_with("by design")] {
        let gone = AtomicUsize::new(0);
        let worlds = World::threads_with(RANKS, &Settings::default()).unwrap();
        let all = on_threads(worlds, |world| run_rank(world, leave, &gone).unwrap());
        assert_eq!(gone.into_inner(), 1);
        for (rank, errors) in all.iter().enumerate() {
            for (function, error) in errors {
                assert_eq!(error.kind(), ErrorKind::PeerLost, "rank {rank}, {function}: {error}");
            }
        }
    }
}
