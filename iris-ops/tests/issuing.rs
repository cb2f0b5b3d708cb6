//! Tests of issuing a call on the CPU, for every operator and variant: failures and allocations.
//!
//! Each launch of a call fails in turn. Then either no peer has seen the call, and a second attempt
//! succeeds; or the heap is poisoned on all ranks, and the errors of all ranks report this. A
//! second test checks that a call allocates no memory if a call before it had as many launches in
//! progress at once.

use std::sync::{Arc, mpsc};

use iris_heap::{HeapOptions, Stream, SymSlice, SymmetricHeap, World};
use iris_kernels::Recovery;
use iris_ops::{AnyOp, MatRef, Op, OpError, Operands, Plan, Shapes, Variant};
use iris_testkit::allocations::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const RANKS: usize = 2;
const SHAPE: [usize; 3] = [8, 16, 8];
/// Number of elements that are allocated for each matrix: enough for the largest matrix of any
/// case.
const ELEMENTS: usize = 16 * 16;

/// Outcome of a rank's call if one of rank 0's launches fails.
#[derive(Clone, PartialEq, Debug)]
enum Outcome {
    /// All launches were enqueued, so the call succeeded. The field has the elements of C.
    Done(Vec<f32>),
    /// The named step failed, and a second attempt at the call succeeded. The second field has the
    /// elements of C.
    Retried(String, Vec<f32>),
    /// The named step failed, or a peer's error arrived; the heap is poisoned.
    Poisoned(String),
}

#[test]
fn each_launch_that_fails_leaves_a_call_to_retry_or_a_poisoned_heap() {
    let mut steps = Vec::new();
    for op in Op::ALL {
        for variant in op.variants() {
            let what = format!("{op} {variant}");
            let (expected, peers) = match run(op, variant, None) {
                [Outcome::Done(c), Outcome::Done(peers)] => (c, peers),
                failed => panic!("{what}: {failed:?}"),
            };
            for launches in 0.. {
                let [outcome, peer] = run(op, variant, Some(launches));
                match peer {
                    // The peer's call may have received all it needs before rank 0's launch failed.
                    Outcome::Done(sums) => assert_eq!(sums, peers, "{what}: rank 1"),
                    Outcome::Poisoned(_) => {}
                    Outcome::Retried(..) => panic!("{what}: rank 1, of which no launch fails"),
                }
                match outcome {
                    Outcome::Done(sums) => {
                        assert_eq!(sums, expected, "{what}");
                        assert!(launches > 0, "{what}: has no launch");
                        break;
                    }
                    Outcome::Retried(step, sums) => {
                        assert_eq!(sums, expected, "{what}: after {step} had failed");
                        steps.push((what.clone(), step, Recovery::Retry));
                    }
                    Outcome::Poisoned(step) => steps.push((what.clone(), step, Recovery::Close)),
                }
            }
        }
    }
    let then = |what: &str| -> Vec<_> {
        let of = steps.iter().filter(|(name, ..)| name == what);
        of.map(|(_, step, then)| (step.as_str(), *then)).collect()
    };
    // A call becomes visible to peers by its first communicating launch. If this launch or an
    // earlier GEMM fails, the call can be retried.
    assert_eq!(then("all_reduce two_shot"), [("two_shot of the operands", Recovery::Retry)]);
    assert_eq!(
        then("matmul_all_reduce unfused"),
        [
            ("gemm of A, all rows, to the partial", Recovery::Retry),
            ("two_shot of the partial", Recovery::Retry)
        ]
    );
    // The all-gather before the product has been enqueued, so peers wait for this call and it
    // cannot be retried.
    assert_eq!(
        then("all_gather_matmul unfused"),
        [
            ("all_gather of shards of A", Recovery::Retry),
            ("gemm of the gathered A, all rows, to C", Recovery::Close)
        ]
    );
    let copied = then("matmul_reduce_scatter copy_engine");
    assert_eq!(copied[0], ("open", Recovery::Retry));
    assert!(copied[1..].iter().all(|(_, then)| *then == Recovery::Close), "{copied:?}");
}

#[test]
fn calls_after_the_first_allocate_nothing() {
    for op in Op::ALL {
        for variant in op.variants() {
            let allocated = World::run_threads(RANKS, |world| {
                let (heap, made) = make(&world, op, variant)?;
                let (operands, _) = operands(&heap, made.plan())?;
                let stream = heap.stream()?;
                let call = || made.run(&operands, &stream).map_err(iris_heap::Error::other);
                // The first launch of each call waits until the call has returned. So all launches
                // of a call are in progress at once, in both calls: a launch allocates memory if
                // more launches are in progress than ever before.
                let held = || {
                    let (release, held) = mpsc::channel::<()>();
                    stream
                        .call_cpu("hold", move || held.recv().map_err(iris_heap::Error::other))?;
                    let (allocated, outcome) = Counting::during(call);
                    release.send(()).map_err(iris_heap::Error::other)?;
                    outcome.and_then(|()| stream.sync()).map(|()| allocated)
                };
                held()?;
                let allocated = held()?;
                heap.close()?;
                Ok::<_, iris_heap::Error>(allocated)
            });
            assert_eq!(allocated.expect("both ranks"), [0; RANKS], "{op} {variant}");
        }
    }
}

/// Opens a heap, and makes the operator in it with the given variant.
fn make(world: &World, op: Op, variant: Variant) -> iris_heap::Result<(Arc<SymmetricHeap>, AnyOp)> {
    let [m, n, k] = SHAPE;
    let mut request = op.request(m, n, k);
    request.variant = Some(variant);
    let plan = request.plan(world).map_err(iris_heap::Error::other)?;
    let heap = SymmetricHeap::open(world, HeapOptions::new().threads(2))?;
    let made = AnyOp::new(&heap, &plan).map_err(iris_heap::Error::other)?;
    Ok((heap, made))
}

/// Runs one call in which rank 0's launch number `launches`, counted from 0, fails. If `launches`
/// is `None`, no launch fails. Checks that both ranks agree whether the heap is poisoned.
fn run(op: Op, variant: Variant, launches: Option<u32>) -> [Outcome; RANKS] {
    let outcomes = World::run_threads(RANKS, |world| {
        let (heap, made) = make(&world, op, variant)?;
        let (operands, c) = operands(&heap, made.plan())?;
        let stream = heap.stream()?;
        if let Some(launches) = launches.filter(|_| world.rank() == 0) {
            heap.control().fail_launch_after(launches);
        }
        let result = || heap.read(c).expect("C");
        let outcome = call(&heap, &made, &operands, &stream, (world.rank() == 0, &result));
        heap.control().fail_launch_after(u32::MAX);
        // After this barrier, rank 0 has poisoned the heap or will not.
        world.barrier()?;
        let poisoned = heap.check().is_err();
        drop(made);
        let closed = heap.close();
        // Closing a poisoned heap may return an error of the call again.
        if !poisoned {
            closed?;
        }
        Ok::<_, iris_heap::Error>((outcome, poisoned))
    });
    let [(first, poisoned), (second, peers)] =
        outcomes.expect("both ranks").try_into().expect("two ranks");
    let expected = matches!(first, Outcome::Poisoned(_));
    assert_eq!([poisoned, peers], [expected; 2], "{op} {variant}: {first:?}, {second:?}");
    [first, second]
}

/// Issues the call, issues it again if the error allows a retry, and waits for it.
fn call(
    heap: &SymmetricHeap,
    op: &AnyOp,
    operands: &Operands,
    stream: &Stream,
    (fails, c): (bool, &dyn Fn() -> Vec<f32>),
) -> Outcome {
    let name = op.plan().op().name();
    match op.run(operands, stream) {
        Ok(()) => match stream.sync() {
            Ok(()) => Outcome::Done(c()),
            // The call of this rank fails too, because the peer's call has failed.
            Err(error) if !fails => Outcome::Poisoned(error.to_string()),
            Err(error) => panic!("{name}: {error}"),
        },
        Err(OpError::Step { step, recovery: Recovery::Retry, .. }) => {
            heap.check().expect("a heap of which no peer has seen a call");
            op.run(operands, stream).expect("the second try");
            stream.sync().expect("a call that was enqueued");
            Outcome::Retried(step, c())
        }
        Err(error @ OpError::Step { recovery: Recovery::Close, .. }) => {
            let said = error.to_string();
            assert!(said.starts_with(name) && said.contains("poisoned"), "{said}");
            assert!(heap.check().is_err(), "{said}: the heap can be used");
            assert!(matches!(op.run(operands, stream), Err(OpError::Poisoned { .. })), "{said}");
            let OpError::Step { step, .. } = error else { unreachable!() };
            Outcome::Poisoned(step)
        }
        // The peer's call has failed and has poisoned the heap, for this rank too.
        Err(OpError::Poisoned { cause, .. }) if !fails => Outcome::Poisoned(cause.to_string()),
        Err(other) => panic!("{name}: {other}"),
    }
}

/// Operands of a call in new heap memory that is filled with ones, and the slice with C.
fn operands(
    heap: &Arc<SymmetricHeap>,
    plan: &Plan,
) -> iris_heap::Result<(Operands, SymSlice<f32>)> {
    let Shapes { a, b, c, .. } = plan.shapes(SHAPE[0]);
    // Allocation is collective, so all ranks allocate the same size. A rank may use only a part of
    // it.
    let ones = |(rows, cols): (usize, usize)| {
        Ok::<_, iris_heap::Error>(MatRef::sym(heap.ones::<f32>(ELEMENTS)?, rows, cols))
    };
    let slice = heap.zeros::<f32>(ELEMENTS)?;
    let c = MatRef::sym(slice, c.0, c.1);
    Ok((Operands::new(ones(a)?, ones(b.unwrap_or_default())?, c), slice))
}
