//! Tests that operators on the CPU accept only streams of their own heap.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use iris_heap::{ErrorKind, HeapOptions, Settings, SymSlice, SymmetricHeap, World};
use iris_ops::all_reduce::{Options, Variant};
use iris_ops::{AllReduce, CollectiveArgs, MatRef, OpError as Error};
use iris_sync::FaultKind;

const M: usize = 64;
const N: usize = 64;

fn heap(world: &World) -> Arc<SymmetricHeap> {
    let options = HeapOptions::new().data_bytes(4 << 20).threads(1);
    SymmetricHeap::open(world, options).unwrap()
}

fn op(heap: &Arc<SymmetricHeap>) -> AllReduce {
    let plan = Options::rows(M, N).variant(Variant::TwoShot).plan(heap);
    AllReduce::new(heap, &plan.unwrap()).unwrap()
}

fn args(x: SymSlice<f32>, y: SymSlice<f32>) -> CollectiveArgs {
    CollectiveArgs::new(MatRef::sym(x, M, N), MatRef::sym(y, M, N))
}

#[track_caller]
fn refused(outcome: Result<(), Error>) {
    let error = outcome.expect_err("a stream of another heap");
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("is one of another heap"), "{error}");
}

/// Tests that an operator refuses streams of another heap. Streams of two heaps are not ordered, so
/// a call could overtake the previous call.
#[test]
fn an_op_does_not_alternate_over_streams_of_two_heaps() {
    World::run_threads(2, |world| {
        let (mine, other) = (heap(&world), heap(&world));
        let (x, y) = (mine.ones::<f32>(M * N)?, mine.zeros::<f32>(M * N)?);
        let op = op(&mine);
        let (own, theirs) = (mine.stream()?, other.stream()?);
        for _ in 0..10 {
            op.run(&args(x, y), &own).unwrap();
            refused(op.run(&args(x, y), &theirs));
        }
        // Streams of the operator's own heap must be accepted, and calls on these streams must be
        // ordered.
        op.run(&args(x, y), &mine.stream()?).unwrap();
        mine.finish()?;
        op.check().unwrap();
        assert_eq!(mine.read(y)?, [2.0; M * N]);
        op.free().unwrap();
        mine.close()?;
        other.close()
    })
    .unwrap();
}

/// Tests a rank that skips a call and frees the operator. The kernel of the other rank must time
/// out with an error that names the skipping rank. The host of the skipping rank waits longer and
/// must get no timeout, but learns at the end that it left out a call.
#[test]
fn a_rank_that_skips_a_call_and_frees_the_op_is_named_on_both_ranks() {
    let settings = Settings::default();
    let freed = World::run_threads_each(2, &settings, |world| {
        let heap = heap(&world);
        let (x, y) = (heap.ones::<f32>(M * N)?, heap.zeros::<f32>(M * N)?);
        let op = op(&heap);
        let stream = heap.stream()?;
        op.run(&args(x, y), &stream).unwrap();
        stream.sync()?;
        if world.rank() == 0 {
            op.run(&args(x, y), &stream).unwrap();
            // The fault is read directly: `check` would consume the fault, and `free` below must
            // return it.
            while heap.control().fault().is_none() {
                heap.control().advance_test_clock(settings.entry_deadline() / 10);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        // The collective `free` must not time out, though rank 0 arrives only after its kernel's
        // deadline. It tells both ranks why it failed.
        let freed = op.free().expect_err("the heap has failed");
        let Error::Heap { cause, .. } = freed else { panic!("{freed}") };
        heap.close()?;
        Ok::<_, iris_heap::Error>(*cause)
    });
    let freed: Vec<_> = freed.unwrap().into_iter().map(Result::unwrap).collect();
    match &freed[0] {
        iris_heap::Error::Fault { op, fault, .. } if op.starts_with("all_reduce") => {
            assert_eq!((fault.kind, fault.rank, fault.call), (FaultKind::NotEntered, 1, 2));
        }
        other => panic!("{other}"),
    }
    match &freed[1] {
        iris_heap::Error::Order { call: 2, ranks, .. } => assert_eq!(*ranks, [1]),
        other => panic!("{other}"),
    }
}

/// Tests that a copy of memory which a running call writes waits for the call, because CPU kernels
/// make plain accesses. A copy of memory that the call only reads, or does not touch, must not
/// wait.
#[test]
fn a_copy_of_a_result_waits_for_the_call() {
    let (go, gone) = mpsc::channel();
    let gone = Mutex::new(gone);
    World::run_threads(2, |world| {
        let heap = heap(&world);
        let (x, y) = (heap.ones::<f32>(M * N)?, heap.zeros::<f32>(M * N)?);
        let other = heap.zeros::<f32>(M * N)?;
        let op = op(&heap);
        let stream = heap.stream()?;
        if world.rank() == 1 {
            gone.lock().unwrap().recv().unwrap();
        }
        op.run(&args(x, y), &stream).unwrap();
        if world.rank() == 0 {
            // A positive number of waits shows that the kernel is running. The kernel cannot end
            // before rank 1 is released.
            while op.counters().unwrap().waits == 0 {
                std::thread::yield_now();
            }
            heap.write(other, &[1.0; M * N])?;
            assert_eq!(heap.read(x)?, [1.0; M * N]);
            go.send(()).unwrap();
            assert_eq!(heap.read(y)?, [2.0; M * N]);
        }
        stream.sync()?;
        op.free().unwrap();
        heap.close()
    })
    .unwrap();
}
