//! Tests of wrong calls: they are refused before any launch, and the next call is right. Also tests
//! that calls allocate no memory, do not make the host wait, and do not disturb other operators.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use half::f16;
use iris_heap::{DType, ErrorKind, HeapOptions, Segment, SymmetricHeap, World};
use iris_ops::{
    AllGatherMatmul, AllReduce, Broadcast, CollectiveArgs, MatRef, MatmulAllReduce, MatmulArgs,
    NormArgs, OpError as Error, Shard, TileShape, Topology,
};
use iris_testkit::error_texts::fails;
use iris_testkit::suite::{AnyOp, Case, Op, Options, plan, run_case};
use iris_testkit::worlds::on_heaps;

use crate::common::ready::{Ready, all_cases};

/// Tests that each mistake is an error on the rank that makes it, with the matrix and the reason.
/// The other ranks wait in their call until that rank calls again, this time rightly.
#[test]
fn wrong_matrices_are_refused_and_the_next_call_is_right() {
    on_heaps(2, HeapOptions::new().threads(1), |world, heap| {
        let other = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
        let (m, n, k) = (8, 6, 9);
        let plan = plan(Op::MatmulAllReduce, "two_shot", &world, &Options::new(m, n, k))?;
        let op = MatmulAllReduce::new(&heap, &plan)?;
        let stream = heap.stream()?;
        let (a, b) = (heap.rand::<f32>(200, 1)?, heap.rand::<f32>(200, 2)?);
        let (c, bias) = (heap.zeros::<f32>(200)?, heap.rand::<f32>(n, 3)?);
        let half = heap.zeros::<f16>(200)?;
        let whole = heap.zeros::<i32>(200)?;
        let foreign = other.zeros::<f32>(200)?;
        let freed = heap.zeros::<f32>(200)?;
        heap.free(freed)?;
        let (ra, rb, rc) = (MatRef::sym(a, m, k), MatRef::sym(b, k, n), MatRef::sym(c, m, n));
        let right = MatmulArgs::new(ra, rb, rc);
        let with_a = |a: MatRef| MatmulArgs::new(a, rb, rc);
        let with_b = |b: MatRef| MatmulArgs::new(ra, b, rc);
        let with_c = |c: MatRef| MatmulArgs::new(ra, rb, c);
        let mistakes = [
            (with_a(MatRef::sym(a, m, k + 1)), "A is 8 x 10, expected 8 x 9"),
            (with_b(MatRef::sym(b, k + 1, n)), "B is 10 x 6, expected 9 x 6"),
            (with_c(MatRef::sym(c, m - 1, n)), "C is 7 x 6, expected 8 x 6"),
            (right.bias(MatRef::sym(bias, n, 1)), "bias is 6 x 1, expected 1 x 6"),
            (
                MatmulArgs::new(MatRef::sym(a, 9, k), rb, MatRef::sym(c, 9, n)),
                "9 rows, expected at most 8",
            ),
            (with_a(MatRef::sym(half, m, k)), "A has element type f16, expected f32"),
            (with_b(MatRef::sym(half, k, n)), "B has element type f16, expected f32"),
            (with_c(MatRef::sym(half, m, n)), "C has element type f16, expected f32"),
            (right.bias(MatRef::sym(whole, 1, n)), "element type of bias is i32"),
            (with_a(ra.with_ld(k - 1)), "leading dimension of A is 8, expected at least 9"),
            (with_c(rc.with_ld(0)), "leading dimension of C is 0, expected at least 6"),
            (with_a(ra.with_ld(100)), "bytes of A is 800, expected at least 2836"),
            (with_a(ra.with_ld(usize::MAX)), "bytes of A is 800"),
            (
                with_b(MatRef::sym(b.slice(150..)?, k, n)),
                "bytes of B is 200, expected at least 216",
            ),
            (with_c(MatRef::sym(a.slice(60..)?, m, n)), "C and A overlap"),
            (with_c(MatRef::sym(b, m, n)), "C and B overlap"),
            (right.bias(MatRef::sym(c.slice(40..)?, 1, n)), "C and bias overlap"),
            (with_a(MatRef::sym(foreign, m, k)), "the slice belongs to heap"),
            (with_b(MatRef::sym(freed, k, n)), "not allocated"),
        ];
        op.run(&right, &stream)?;
        stream.sync()?;
        let first = heap.read(c)?;
        let before = op.counters()?;
        for (mistake, message) in mistakes {
            // Only rank 1 makes the mistake, so only its call must return an error.
            if world.rank() == 1 {
                let error = op.run(&mistake, &stream).unwrap_err();
                let text = fails::<()>(Err(&error), &[message]);
                assert!(text.starts_with("matmul_all_reduce of 8 x 6 x 9 f32 at "), "{text}");
                let kinds = [ErrorKind::Usage, ErrorKind::Closed];
                assert!(kinds.contains(&error.kind()), "{error}: {:?}", error.kind());
            }
            heap.write(c, &[f32::NAN; 200])?;
            op.run(&right, &stream)?;
            stream.sync()?;
            assert_eq!(heap.read(c)?[..m * n], first[..m * n], "after: {message}");
        }
        let after = op.counters()?;
        assert_eq!(after.pushed, before.pushed * 20, "what was refused moved nothing");
        other.close()?;
        Ok(())
    });
}

/// Tests the checks of the matrices of an RMSNorm, and that these matrices are refused if the plan
/// has no RMSNorm.
#[test]
fn wrong_matrices_of_norms_are_refused_and_the_next_call_is_right() {
    on_heaps(2, HeapOptions::new().threads(1), |world, heap| {
        let (m, n) = (8, 6);
        let made = |options: &Options| plan(Op::AllReduce, "two_shot", &world, options);
        let plain = AllReduce::new(&heap, &made(&Options::new(m, n, 0))?)?;
        let op = AllReduce::new(&heap, &made(&Options::new(m, n, 0).rms_norm(1e-6))?)?;
        let stream = heap.stream()?;
        let matrix = || heap.full::<f32>(60, 1.0);
        let (a, c, r, w, y) = (matrix()?, matrix()?, matrix()?, matrix()?, matrix()?);
        let half = heap.zeros::<f16>(60)?;
        let whole = heap.zeros::<i32>(60)?;
        let of = |slice| MatRef::sym(slice, m, n);
        let sum = CollectiveArgs::new(of(a), of(c));
        let weight = MatRef::sym(w, 1, n);
        let norm = NormArgs::new(weight, of(y));
        let lent = [0.0_f32; 60];
        // SAFETY: the memory is refused, because it may only be read.
        #[allow(unsafe_code, reason = "a test of external memory")]
        let read_only = unsafe { MatRef::external(lent.as_ptr(), lent.len(), m, n) };
        let right = sum.norm(norm.residual(of(r)));
        let of_weight = |weight| sum.norm(NormArgs::new(weight, of(y)));
        let of_normed = |normed| sum.norm(NormArgs::new(weight, normed));
        let of_residual = |residual| sum.norm(norm.residual(residual));
        let mistakes = [
            (sum, "norm of the call is missing, expected weight and normed"),
            (of_weight(MatRef::sym(w, n, 1)), "weight is 6 x 1, expected 1 x 6"),
            (of_weight(MatRef::sym(whole, 1, n)), "element type of weight is i32"),
            (of_normed(MatRef::sym(y, m - 1, n)), "normed is 7 x 6, expected 8 x 6"),
            (of_normed(MatRef::sym(half, m, n)), "normed has element type f16, expected f32"),
            (of_normed(read_only), "memory of normed is MatRef::external, which is only read"),
            (of_normed(of(y).with_ld(3)), "leading dimension of normed is 3"),
            (of_normed(of(c)), "normed and output overlap"),
            (of_normed(of(a)), "normed and input overlap"),
            (of_normed(MatRef::sym(w.slice(3..)?, m, n)), "normed and weight overlap"),
            (of_residual(of(y)), "normed and residual overlap"),
            (of_residual(MatRef::sym(r, m, n - 1)), "residual is 8 x 5, expected 8 x 6"),
            (of_residual(MatRef::sym(half, m, n)), "residual has element type f16, expected f32"),
            (of_residual(MatRef::sym(c.slice(1..)?, m, n)), "output and residual overlap"),
            (of_weight(MatRef::sym(c.slice(40..)?, 1, n)), "output and weight overlap"),
        ];
        for (mistake, message) in mistakes {
            // Only rank 1 makes the mistake, so only its call must return an error.
            if world.rank() == 1 {
                fails(op.run(&mistake, &stream), &[message]);
            }
            heap.write(y, &[f32::NAN; 60])?;
            op.run(&right, &stream)?;
            stream.sync()?;
            // C is 1 + 1 + 1 everywhere, so all elements of a row are equal and the normalised ones
            // are 1.
            assert_eq!(heap.read(c)?[..m * n], [3.0; 48], "after: {message}");
            let normed = heap.read(y)?;
            let is_one = |value: &f32| (value - 1.0).abs() < 1e-6;
            assert!(normed[..m * n].iter().all(is_one), "after: {message}: {normed:?}");
        }
        fails(plain.run(&right, &stream), &["norm of the call is given, expected none"]);
        plain.run(&sum, &stream)?;
        stream.sync()?;
        assert_eq!(heap.read(c)?[..m * n], [2.0; 48]);
        Ok(())
    });
}

#[test]
fn wrong_messages_and_shards_are_refused() {
    on_heaps(2, HeapOptions::new().threads(1), |world, heap| {
        let stream = heap.stream()?;
        let options = Options::new(8, 6, 0);
        let (a, c) = (heap.zeros::<f32>(100)?, heap.zeros::<f32>(100)?);
        let (ra, rc) = (MatRef::sym(a, 8, 6), MatRef::sym(c, 8, 6));
        let made = plan(Op::AllReduce, "one_shot", &world, &options)?;
        let op = AllReduce::new(&heap, &made)?;
        let refused = |args: CollectiveArgs, message: &str| {
            fails(op.run(&args, &stream), &[message]);
        };
        refused(CollectiveArgs::receive(rc), "input is missing");
        refused(
            CollectiveArgs::new(ra, MatRef::sym(a.slice(6..)?, 8, 6)),
            "output and input overlap",
        );
        refused(CollectiveArgs::new(ra, ra.with_ld(7)), "output and input overlap");
        refused(CollectiveArgs::new(ra, MatRef::sym(c, 6, 8)), "output is 6 x 8, expected 8 x 6");
        let made = plan(Op::Broadcast, "push", &world, &options.clone().root(1))?;
        let op = Broadcast::new(&heap, &made)?;
        if world.rank() == 1 {
            fails(op.run(&CollectiveArgs::receive(rc), &stream), &["input is missing"]);
        }
        for variant in ["pull", "staged"] {
            let options = Options::new(4, 3, 5).shard(Shard::Columns);
            let made = plan(Op::AllGatherMatmul, variant, &world, &options)?;
            let op = AllGatherMatmul::new(&heap, &made)?;
            let cols = [3, 2][world.rank()];
            let (b, out) = (heap.zeros::<f32>(15)?, heap.zeros::<f32>(12)?);
            let refused = |a: MatRef, message: &str| {
                let args = MatmulArgs::new(a, MatRef::sym(b, 5, 3), MatRef::sym(out, 4, 3));
                fails(op.run(&args, &stream), &[message]);
            };
            let transposed = MatRef::sym(a, cols, 4).transposed();
            refused(transposed, "A of variant");
            if cols == 2 {
                // Rank 0's A has three contiguous columns, so a leading dimension of 3 on rank 1,
                // whose A has two, would be ambiguous.
                refused(MatRef::sym(a, 4, 2).with_ld(3), "leading dimension of A is 3");
            }
        }
        Ok(())
    });
}

/// Tests an op that only one rank cannot make: making it fails on all ranks, nothing leaks, and the
/// next op works.
#[test]
fn an_op_that_one_rank_cannot_make_is_made_by_none() {
    on_heaps(3, HeapOptions::new().device_words(4096).threads(1), |world, heap| {
        let free = || (heap.free_bytes(Segment::Data), heap.free_bytes(Segment::Signal));
        let mut before = free();
        let case = Case::new(Op::AllReduce, "two_shot", Options::new(8, 6, 0));
        // In the first round all device words are taken, so the call counter cannot be allocated;
        // in the second round only the counter fits, and other words are missing.
        for words in [4096, 4096 - 32] {
            let plan = plan(case.op, &case.variant, &world, &case.options)?;
            let taken = (world.rank() == 1).then(|| heap.alloc_device_words(words)).transpose()?;
            let error = AnyOp::new(&heap, &plan).err().unwrap().to_string();
            let named = if world.rank() == 1 { "rank 1" } else { "rank 1 failed in all_reduce" };
            assert!(error.contains(named) && error.contains("device-local"), "{error}");
            assert_eq!(free(), before, "nothing was taken");
            taken.map(|words| heap.free_device_words(words)).transpose()?;
            let mut ready = Ready::on(heap.clone(), &case)?;
            for _ in 0..3 {
                ready.call()?;
            }
            ready.sync()?;
            let Ready { op, c, .. } = ready;
            assert!(heap.read(c)?[..48].iter().all(|value| value.is_finite()));
            op.free()?;
            before = free();
            // The line of the call counter is still in use: all device words but that line can be
            // allocated.
            let words = heap.alloc_device_words(4096 - 32)?;
            heap.free_device_words(words)?;
        }
        Ok(())
    });
}

#[test]
fn plans_that_differ_are_refused_and_named() {
    type Change = fn(&mut Options);
    let changes: [(&str, Change); 9] = [
        ("m", |o| o.m = 9),
        ("n", |o| o.n = 7),
        ("k", |o| o.k = 12),
        ("dtype", |o| (o.dtype, o.output) = (DType::F16, Some(DType::F32))),
        ("output", |o| o.output = Some(DType::BF16)),
        ("tile", |o| o.tile = Some(TileShape { m: 3, n: 4 })),
        ("epilogue", |o| o.epilogue = iris_ops::Epilogue::Gelu),
        ("trace_spans", |o| o.trace_spans = 5),
        ("first_call", |o| o.first_call = 7),
    ];
    on_heaps(3, HeapOptions::new().threads(1), |world, heap| {
        let free = heap.free_bytes(Segment::Data);
        for (item, change) in changes {
            let mut options = Options::new(8, 6, 11).tile(TileShape { m: 2, n: 4 });
            if world.rank() == 1 {
                change(&mut options);
            }
            let plan = plan(Op::MatmulAllGather, "push", &world, &options)?;
            let error = AnyOp::new(&heap, &plan).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Disagreement, "{item}: {error}");
            let Error::Heap { op, cause } = &error else { panic!("{error}") };
            assert_eq!(*op, Op::MatmulAllGather);
            let iris_heap::Error::Disagreement { item: named, ranks, values, .. } = &**cause else {
                panic!("{error}")
            };
            assert_eq!((&**named, &ranks[..], values.len()), (item, &[1][..], 3), "{error}");
        }
        // Changes of options that only some ops have; each must be an error if only one rank makes
        // it. Plans of another op and for another world follow.
        let options = Options::new(8, 6, 4);
        let changes: [(Op, &str, &str, Change); 7] = [
            (Op::ReduceScatter, "push", "wire", |o| o.wire = Some(DType::BF16)),
            (Op::ReduceScatter, "push", "batch_invariant", |o| o.batch_invariant = true),
            (Op::Broadcast, "push", "root", |o| o.root = 1),
            (Op::AllGatherMatmul, "staged", "columns_per_flag", |o| {
                o.staged.columns_per_flag = Some(3)
            }),
            (Op::AllGatherMatmul, "pull", "shard", |o| o.shard = Shard::Columns),
            // Changes of options that may differ between ranks, unless `uniform_shape` asserts that
            // the ranks are equal.
            (Op::AllGatherMatmul, "pull", "uniform_shape", |o| o.uniform_shape = false),
            (Op::MatmulReduceScatter, "push", "k", |o| o.k = 5),
        ];
        for (op, variant, item, change) in changes {
            let mut options = options.clone().uniform_shape(true);
            if world.rank() == 1 {
                change(&mut options);
            }
            let error = AnyOp::new(&heap, &plan(op, variant, &world, &options)?).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Disagreement, "{item}: {error}");
            assert!(error.to_string().contains(item), "{error}");
        }
        let variant = ["one_shot", "two_shot", "one_shot"][world.rank()];
        let plan_made = plan(Op::MatmulAllReduce, variant, &world, &options)?;
        let error = AnyOp::new(&heap, &plan_made).err().unwrap();
        assert!(error.to_string().contains("variant") && error.to_string().contains("two_shot"));
        let plan_made = plan(Op::AllReduce, "one_shot", &world, &options)?;
        let error = MatmulAllReduce::new(&heap, &plan_made).err().unwrap();
        assert!(matches!(&error, Error::Invalid { value, .. } if value == "a plan of all_reduce"));
        let elsewhere = Topology::new(world.rank(), if world.rank() == 2 { 4 } else { 3 });
        let plan_made = plan(Op::Barrier, "flat", elsewhere, &options)?;
        fails(AnyOp::new(&heap, &plan_made), &["world is 3 on rank 0 and 1; 4 on rank 2"]);
        let plan_made = plan(Op::Barrier, "flat", Topology::new(world.rank(), 4), &options)?;
        let error = AnyOp::new(&heap, &plan_made).err().unwrap();
        let told = matches!(&error, Error::OtherWorld { planned_size: 4, size: 3, .. });
        assert!(told, "{error}");
        assert_eq!(heap.free_bytes(Segment::Data), free, "nothing was taken");
        Ok(())
    });
}

/// Tests operands in any memory. A plan does not know where operands will be, so a variant that the
/// plan chooses must accept all places. A variant that was named, and that does not accept a place,
/// fails with an error that names variants that do.
#[test]
fn an_automatic_choice_takes_operands_in_any_memory() {
    on_heaps(2, HeapOptions::new().threads(1), |_, heap| {
        let options = Options::new(107, 1536, 40);
        for op in Op::ALL.into_iter().filter(|op| op.multiplies()) {
            for external in [true, false] {
                let mut case = Case::new(op, "auto", options.clone());
                (case.a.external, case.a.transposed) = (external, !external);
                run_case(&heap, &case)?;
            }
        }
        let mut case = Case::new(Op::AllGatherMatmul, "pull", options);
        case.a.external = true;
        let error = format!("{:#}", run_case(&heap, &case).unwrap_err());
        assert!(error.contains("any A with variant baseline, unfused, copy_engine"), "{error}");
        Ok(())
    });
}

#[test]
fn a_full_heap_refuses_an_op_and_stays_usable() {
    on_heaps(3, HeapOptions::new().data_bytes(1 << 20).threads(1), |world, heap| {
        let free = (heap.free_bytes(Segment::Data), heap.free_bytes(Segment::Signal));
        let words = heap.alloc_device_words(1)?;
        let large = Options::new(1000, 1000, 0);
        let plan = plan(Op::AllReduce, "one_shot", &world, &large)?;
        for _ in 0..3 {
            let error = AllReduce::new(&heap, &plan).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
            let Error::Heap { cause, .. } = &error else { panic!("{error}") };
            let iris_heap::Error::OutOfHeap { name, asked, free, largest, total, .. } = &**cause
            else {
                panic!("{error}")
            };
            assert_eq!((&**name, *free, *largest), ("inbox", 1 << 20, 1 << 20), "{error}");
            assert!(*asked > 1 << 20 && *total == plan.data_bytes(), "{error}");
            // The error text contains the op's name once and the cause once.
            let text = error.to_string();
            let starts = "all_reduce of 1000 x 1000 f32 at ";
            assert!(text.starts_with(starts) && text.contains(": out of data memory"), "{error}");
            assert!(error.to_string().contains("HeapOptions::data"), "{error}");
            assert!(std::error::Error::source(&error).is_none(), "{error}");
        }
        let after = (heap.free_bytes(Segment::Data), heap.free_bytes(Segment::Signal));
        assert_eq!(after, free);
        // The failed op's device words were freed: only the heap's word with the number of calls
        // lies, with a cache line of its own, before the next ones.
        let next = heap.alloc_device_words(1)?;
        assert_eq!(next.offset(), words.offset() + 2 * 128);
        let mut ready =
            Ready::on(heap.clone(), &Case::new(Op::AllReduce, "one_shot", Options::new(8, 6, 0)))?;
        ready.call_and_sync()?;
        assert!(heap.read(ready.c)?[..48].iter().all(|value| value.is_finite()));
        Ok(())
    });
}

/// Tests that an op takes exactly the number of bytes and words that its plan announces.
#[test]
fn plans_tell_the_bytes_that_ops_take() {
    on_heaps(3, HeapOptions::new().threads(1), |world, heap| {
        for case in all_cases() {
            let plan = plan(case.op, &case.variant, &world, &case.options)?;
            let free = || (heap.free_bytes(Segment::Data).0, heap.free_bytes(Segment::Signal).0);
            let before = free();
            let op = AnyOp::new(&heap, &plan)?;
            let took = (before.0 - free().0, before.1 - free().1);
            assert_eq!(took, (plan.data_bytes(), plan.signal_bytes()), "{case:?}");
            op.free()?;
            assert_eq!(free(), before, "{case:?}");
        }
        Ok(())
    });
}

#[test]
fn calls_take_no_memory() {
    on_heaps(3, HeapOptions::new().threads(1), |_, heap| {
        for case in all_cases() {
            let mut ready = Ready::on(heap.clone(), &case)?;
            let free = || (heap.free_bytes(Segment::Data), heap.free_bytes(Segment::Signal));
            let before = free();
            ready.call_and_sync()?;
            assert_eq!(free(), before, "{case:?}");
        }
        Ok(())
    });
}

#[test]
fn run_returns_before_any_peer_has_come() {
    let (returned, came) = (AtomicBool::new(false), AtomicBool::new(false));
    World::run_threads(2, |world| -> anyhow::Result<()> {
        let case = Case::new(Op::AllReduce, "two_shot", Options::new(8, 6, 0));
        let mut ready = Ready::new(&world, &case)?;
        if world.rank() == 0 {
            for _ in 0..3 {
                ready.call()?;
            }
            assert!(!came.load(Ordering::Acquire), "run waited for a peer");
            returned.store(true, Ordering::Release);
        } else {
            let begun = Instant::now();
            while !returned.load(Ordering::Acquire) && begun.elapsed() < Duration::from_secs(300) {
                std::thread::sleep(Duration::from_millis(1));
            }
            came.store(true, Ordering::Release);
            for _ in 0..3 {
                ready.call()?;
            }
        }
        ready.sync()?;
        ready.heap.close()?;
        Ok(())
    })
    .unwrap();
    assert!(returned.into_inner());
}

#[test]
fn frees_in_another_order_are_refused() {
    on_heaps(2, HeapOptions::new().threads(1), |world, heap| {
        let options = Options::new(8, 6, 0);
        let plan = plan(Op::AllReduce, "two_shot", &world, &options)?;
        let (first, second) = (AllReduce::new(&heap, &plan)?, AllReduce::new(&heap, &plan)?);
        let op = if world.rank() == 0 { first } else { second };
        let error = op.free().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Disagreement, "{error}");
        Ok(())
    });
}

/// Tests that an op may be dropped even while a call is running; the op's memory is not freed then.
#[test]
fn ops_may_be_dropped() {
    on_heaps(3, HeapOptions::new().threads(1), |_, heap| {
        for case in all_cases() {
            let mut ready = Ready::on(heap.clone(), &case)?;
            ready.call()?;
            let Ready { op, stream, .. } = ready;
            drop(op);
            stream.sync()?;
        }
        Ok(())
    });
}
