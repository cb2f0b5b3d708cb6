//! What is refused before anything is launched, that the next call is right after it, and what ops
//! leave alone: memory, the host, and each other.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::ready::{Ready, all_cases};
use half::f16;
use iris_heap::{BackendKind, DType, ErrorKind, HeapOptions, Segment, SymmetricHeap, World};
use iris_ops::{
    AllGatherMatmul, AllReduce, Broadcast, CopyArgs, Epilogue, Error, MatRef, MatmulAllReduce,
    MatmulArgs, Options, Ranks, Shard, TileShape, all_gather_matmul, all_reduce, broadcast,
    matmul_all_reduce,
};
use iris_testkit::suite::{AnyOp, Case, OpName, plan};

/// Each mistake is an error that names the matrix and what is wrong with it, on the rank that makes
/// it; the others wait for its next call, which is right.
#[test]
fn wrong_matrices_are_refused_and_the_next_call_is_right() {
    World::run_threads(2, |world| -> anyhow::Result<()> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
        let other = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
        let (m, n, k) = (8, 6, 9);
        let variant = matmul_all_reduce::Variant::TwoShot;
        let plan = MatmulAllReduce::plan((&world).into(), &Options::new(m, n, k), variant)?;
        let mut op = MatmulAllReduce::new(&heap, &plan)?;
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
                "9 rows, but the plan was made for at most 8",
            ),
            (with_a(MatRef::sym(half, m, k)), "A is of f16, the plan says f32"),
            (with_b(MatRef::sym(half, k, n)), "B is of f16, the plan says f32"),
            (with_c(MatRef::sym(half, m, n)), "C is of f16, the plan says f32"),
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
            // Only one of the ranks errs.
            if world.rank() == 1 {
                let error = op.run(&mistake, &stream).unwrap_err();
                assert!(error.to_string().contains(message), "{error}, expected {message}");
                assert!(error.to_string().starts_with("matmul_all_reduce: "), "{error}");
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
        heap.close()?;
        Ok(())
    })
    .unwrap();
}

#[test]
fn wrong_messages_and_shards_are_refused() {
    World::run_threads(2, |world| -> anyhow::Result<()> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
        let stream = heap.stream()?;
        let options = Options::new(8, 6, 0);
        let (a, c) = (heap.zeros::<f32>(100)?, heap.zeros::<f32>(100)?);
        let (ra, rc) = (MatRef::sym(a, 8, 6), MatRef::sym(c, 8, 6));
        let plan = AllReduce::plan((&world).into(), &options, all_reduce::Variant::OneShot)?;
        let mut op = AllReduce::new(&heap, &plan)?;
        let mut refused = |args: CopyArgs, message: &str| {
            let error = op.run(&args, &stream).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        };
        refused(CopyArgs::receive(rc), "input is missing");
        refused(CopyArgs::new(ra, MatRef::sym(a.slice(6..)?, 8, 6)), "C and A overlap");
        refused(CopyArgs::new(ra, ra.with_ld(7)), "C and A overlap");
        refused(CopyArgs::new(ra, MatRef::sym(c, 6, 8)), "output is 6 x 8, expected 8 x 6");
        let plan =
            Broadcast::plan((&world).into(), &options.clone().root(1), broadcast::Variant::Push)?;
        let mut op = Broadcast::new(&heap, &plan)?;
        if world.rank() == 1 {
            let error = op.run(&CopyArgs::receive(rc), &stream).unwrap_err().to_string();
            assert!(error.contains("input is missing"), "{error}");
        }
        for variant in [all_gather_matmul::Variant::Pull, all_gather_matmul::Variant::Staged] {
            let options = Options::new(4, 3, 5).shard(Shard::Columns);
            let plan = AllGatherMatmul::plan((&world).into(), &options, variant)?;
            let mut op = AllGatherMatmul::new(&heap, &plan)?;
            let cols = [3, 2][world.rank()];
            let (b, out) = (heap.zeros::<f32>(15)?, heap.zeros::<f32>(12)?);
            let mut refused = |a: MatRef, message: &str| {
                let args = MatmulArgs::new(a, MatRef::sym(b, 5, 3), MatRef::sym(out, 4, 3));
                let error = op.run(&args, &stream).unwrap_err().to_string();
                assert!(error.contains(message), "{error}");
            };
            let transposed = MatRef::sym(a, cols, 4).transposed();
            refused(transposed, "A of variant");
            if cols == 2 {
                // Rank 0 has three columns without gaps: is that a leading dimension of 3 or none?
                refused(MatRef::sym(a, 4, 2).with_ld(3), "leading dimension of A is 3");
            }
        }
        heap.close()?;
        Ok(())
    })
    .unwrap();
}

#[test]
fn plans_that_make_no_sense_are_refused() {
    let ranks = Ranks::new(0, 2);
    let base = || Options::new(8, 6, 4);
    let tile = |m, n| base().tile(TileShape { m, n });
    let refused = |op: OpName, options: Options, message: &str| {
        for variant in op.variants() {
            let error = plan(op, variant, ranks, &options).unwrap_err().to_string();
            assert!(error.contains(message), "{error}, expected {message}");
            assert!(error.starts_with(op.name()), "{error}");
        }
    };
    for op in OpName::ALL {
        if op != OpName::Barrier {
            refused(op, tile(0, 4), "tile is 0 x 4");
            refused(op, tile(4, 65537), "tile is 4 x 65537");
            refused(op, base().dtype(DType::I32), "dtype is i32");
            refused(op, base().wire(DType::U8), "wire is u8");
            refused(op, Options::new(1 << 30, 4, 4), "m is 1073741824");
            refused(
                op,
                Options::new(1 << 29, 1 << 29, 4).tile(TileShape { m: 1, n: 1 }),
                "signals",
            );
        }
        refused(op, base().k_per_flag(0), "k_per_flag is 0");
        refused(op, base().workgroups(0), "workgroups is 0");
        refused(op, base().root(2), "root is 2");
        if !op.multiplies() && op != OpName::Barrier {
            refused(op, base().output(DType::F16), "output is f16");
        }
    }
    for op in [OpName::AllGather, OpName::AllToAll, OpName::Broadcast] {
        refused(op, base().epilogue(Epilogue::Gelu), "epilogue is Gelu");
    }
    for (ranks, message) in
        [(Ranks::new(0, 0), "world"), (Ranks::new(0, 65), "world"), (Ranks::new(2, 2), "rank is 2")]
    {
        let error = plan(OpName::AllReduce, "auto", ranks, &base()).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    let error = plan(OpName::AllReduce, "ring", ranks, &base()).unwrap_err().to_string();
    assert!(error.contains("ring") && error.contains("two_shot"), "{error}");
}

/// Numbers are checked before anything is computed from them: whatever they are, there is a plan or
/// an error, and no sum overflows.
#[test]
fn no_number_is_too_large_to_be_refused() {
    let sizes =
        [0, 1, (1 << 29) + 1, 1 << 30, 1 << 31, 1 << 32, (1 << 32) + 8, 1 << 63, usize::MAX];
    let refused = |op: OpName, variant: &str, backend, options: &Options| {
        let options = options.clone().backend(backend);
        let planned = plan(op, variant, Ranks::new(1, 3), &options);
        planned.map(|plan| (plan.data_bytes(), plan.signal_bytes())).is_err()
    };
    for op in OpName::ALL {
        for variant in ["auto"].into_iter().chain(op.variants()) {
            if variant == "auto" && ["local", "flat"].contains(&op.variants()[0]) {
                continue;
            }
            for backend in [BackendKind::Cpu, BackendKind::Cuda] {
                let refused = |options: &Options| refused(op, variant, backend, options);
                for (m, n, k) in sizes
                    .iter()
                    .flat_map(|&m| sizes.iter().flat_map(move |&n| sizes.map(|k| (m, n, k))))
                {
                    let options = Options::new(m, n, k);
                    let large = [m, n, k].iter().any(|&size| size >= 1 << 30);
                    assert!(refused(&options) || !large, "{op} {variant}: {m} x {n} x {k}");
                    refused(&options.tile(TileShape { m: 65536, n: 65536 }));
                }
                let options = || Options::new(8, 6, 4);
                assert!(!refused(&options()), "{op} {variant}");
                for size in sizes.into_iter().filter(|&size| size >= 1 << 31) {
                    assert!(refused(&options().k_per_flag(size)), "{op}: k_per_flag {size}");
                    assert!(refused(&options().k_block(size)), "{op}: k_block {size}");
                    assert!(refused(&options().fetchers(size)), "{op}: fetchers {size}");
                    assert!(refused(&options().root(size)), "{op}: root {size}");
                    assert!(refused(&options().members(vec![0, size])), "{op}: member {size}");
                    refused(&options().workgroups(size));
                }
                refused(&options().trace_spans(u32::MAX));
                refused(&options().k_per_flag(1 << 29).k_block(1 << 29));
                // Members are of a barrier.
                assert!(refused(&options().members(vec![70])), "{op} {variant}");
                let some = refused(&options().members(vec![0, 1]));
                assert_eq!(some, op != OpName::Barrier, "{op} {variant}");
            }
        }
    }
}

/// One rank that cannot make an op is named on all, nothing is lost, and the next op is right.
#[test]
fn an_op_that_one_rank_cannot_make_is_made_by_none() {
    World::run_threads(3, |world| -> anyhow::Result<()> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().device_words(4096).threads(1))?;
        let free = || (heap.free_bytes(Segment::Data), heap.free_bytes(Segment::Signal));
        let mut before = free();
        let case = Case::new(OpName::AllReduce, "two_shot", Options::new(8, 6, 0));
        // The first time the call counter is missing, then there is one and words are.
        for words in [4096, 4096 - 32] {
            let plan = plan(case.op, &case.variant, (&world).into(), &case.options)?;
            let taken = (world.rank() == 1).then(|| heap.alloc_device_words(words)).transpose()?;
            let error = AnyOp::new(case.op, &heap, &plan).err().unwrap().to_string();
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
            // All but the line of the call counter.
            let words = heap.alloc_device_words(4096 - 32)?;
            heap.free_device_words(words)?;
        }
        heap.close()?;
        Ok(())
    })
    .unwrap();
}

#[test]
fn plans_that_differ_are_refused_and_named() {
    type Change = fn(&mut Options);
    let changes: [(&str, Change); 12] = [
        ("m", |o| o.m = 9),
        ("n", |o| o.n = 7),
        ("k", |o| o.k = 12),
        ("dtype", |o| (o.dtype, o.output) = (DType::F16, Some(DType::F32))),
        ("output", |o| o.output = Some(DType::BF16)),
        ("wire", |o| o.wire = Some(DType::BF16)),
        ("tile", |o| o.tile = Some(TileShape { m: 3, n: 4 })),
        ("epilogue", |o| o.epilogue = iris_ops::Epilogue::Gelu),
        ("k_per_flag", |o| o.k_per_flag = Some(3)),
        ("root", |o| o.root = 1),
        ("trace_spans", |o| o.trace_spans = 5),
        ("first_call", |o| o.first_call = 7),
    ];
    World::run_threads(3, |world| -> anyhow::Result<()> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
        let free = heap.free_bytes(Segment::Data);
        for (item, change) in changes {
            let mut options = Options::new(8, 6, 11).tile(TileShape { m: 2, n: 4 });
            options.wire = Some(DType::F32);
            if world.rank() == 1 {
                change(&mut options);
            }
            let plan = plan(OpName::MatmulAllGather, "push", (&world).into(), &options)?;
            let error = AnyOp::new(OpName::MatmulAllGather, &heap, &plan).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Disagreement, "{item}: {error}");
            let Error::Heap { op: "matmul_all_gather", cause } = &error else { panic!("{error}") };
            let iris_heap::Error::Disagreement { item: named, ranks, values, .. } = &**cause else {
                panic!("{error}")
            };
            assert_eq!((&**named, &ranks[..], values.len()), (item, &[1][..], 3), "{error}");
        }
        // Variants, too; and a plan that is of another op, or for another world.
        let options = Options::new(8, 6, 4);
        let variant = ["one_shot", "two_shot", "one_shot"][world.rank()];
        let plan_made = plan(OpName::MatmulAllReduce, variant, (&world).into(), &options)?;
        let error = AnyOp::new(OpName::MatmulAllReduce, &heap, &plan_made).err().unwrap();
        assert!(error.to_string().contains("variant") && error.to_string().contains("two_shot"));
        let plan_made = plan(OpName::AllReduce, "one_shot", (&world).into(), &options)?;
        let error = AnyOp::new(OpName::MatmulAllReduce, &heap, &plan_made).err().unwrap();
        assert!(matches!(&error, Error::Invalid { value, .. } if value == "one of all_reduce"));
        let elsewhere = Ranks::new(world.rank(), if world.rank() == 2 { 4 } else { 3 });
        let plan_made = plan(OpName::Barrier, "flat", elsewhere, &options)?;
        let error = AnyOp::new(OpName::Barrier, &heap, &plan_made).err().unwrap();
        let told = matches!(&error, Error::OtherWorld { planned_size: 4, size: 3, .. });
        assert_eq!(told, world.rank() == 2, "{error}");
        assert!(told || error.to_string().contains("rank 2 failed"), "{error}");
        assert_eq!(heap.free_bytes(Segment::Data), free, "nothing was taken");
        heap.close()?;
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_full_heap_refuses_an_op_and_stays_usable() {
    World::run_threads(3, |world| -> anyhow::Result<()> {
        let options = HeapOptions::new().data_bytes(1 << 20).threads(1);
        let heap = SymmetricHeap::open(&world, options)?;
        let free = (heap.free_bytes(Segment::Data), heap.free_bytes(Segment::Signal));
        let words = heap.alloc_device_words(1)?.offset();
        let large = Options::new(1000, 1000, 0);
        let plan = AllReduce::plan((&world).into(), &large, all_reduce::Variant::OneShot)?;
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
            // Its text says the op's name and the cause once.
            assert!(error.to_string().starts_with("all_reduce: out of data memory"), "{error}");
            assert!(std::error::Error::source(&error).is_none(), "{error}");
        }
        let after = (heap.free_bytes(Segment::Data), heap.free_bytes(Segment::Signal));
        assert_eq!(after, free);
        // Device words were given back: the next are where they would have been.
        assert_eq!(heap.alloc_device_words(1)?.offset() / 4096, words / 4096);
        let mut ready = Ready::on(
            heap.clone(),
            &Case::new(OpName::AllReduce, "one_shot", Options::new(8, 6, 0)),
        )?;
        ready.call()?;
        ready.sync()?;
        assert!(heap.read(ready.c)?[..48].iter().all(|value| value.is_finite()));
        heap.close()?;
        Ok(())
    })
    .unwrap();
}

/// What a plan says it needs is what the op takes.
#[test]
fn plans_tell_the_bytes_that_ops_take() {
    World::run_threads(3, |world| -> anyhow::Result<()> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
        for case in all_cases() {
            let plan = plan(case.op, &case.variant, (&world).into(), &case.options)?;
            let free = || (heap.free_bytes(Segment::Data).0, heap.free_bytes(Segment::Signal).0);
            let before = free();
            let op = AnyOp::new(case.op, &heap, &plan)?;
            let took = (before.0 - free().0, before.1 - free().1);
            assert_eq!(took, (plan.data_bytes(), plan.signal_bytes()), "{case:?}");
            op.free()?;
            assert_eq!(free(), before, "{case:?}");
        }
        heap.close()?;
        Ok(())
    })
    .unwrap();
}

#[test]
fn calls_take_no_memory() {
    World::run_threads(3, |world| -> anyhow::Result<()> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
        for case in all_cases() {
            let mut ready = Ready::on(heap.clone(), &case)?;
            let free = || (heap.free_bytes(Segment::Data), heap.free_bytes(Segment::Signal));
            let before = free();
            ready.call()?;
            ready.sync()?;
            assert_eq!(free(), before, "{case:?}");
        }
        heap.close()?;
        Ok(())
    })
    .unwrap();
}

#[test]
fn run_returns_before_any_peer_has_come() {
    let (returned, came) = (AtomicBool::new(false), AtomicBool::new(false));
    World::run_threads(2, |world| -> anyhow::Result<()> {
        let case = Case::new(OpName::AllReduce, "two_shot", Options::new(8, 6, 0));
        let mut ready = Ready::new(&world, &case)?;
        if world.rank() == 0 {
            for _ in 0..3 {
                ready.call()?;
            }
            assert!(!came.load(Ordering::Acquire), "run waited for a peer");
            returned.store(true, Ordering::Release);
        } else {
            let begun = Instant::now();
            while !returned.load(Ordering::Acquire) && begun.elapsed() < Duration::from_secs(20) {
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
    World::run_threads(2, |world| -> anyhow::Result<()> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
        let options = Options::new(8, 6, 0);
        let plan = AllReduce::plan((&world).into(), &options, all_reduce::Variant::TwoShot)?;
        let (first, second) = (AllReduce::new(&heap, &plan)?, AllReduce::new(&heap, &plan)?);
        let op = if world.rank() == 0 { first } else { second };
        let error = op.free().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Disagreement, "{error}");
        heap.close()?;
        Ok(())
    })
    .unwrap();
}

/// An op that is dropped keeps its block, and nothing minds; not even with calls under way.
#[test]
fn ops_may_be_dropped() {
    World::run_threads(3, |world| -> anyhow::Result<()> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
        for case in all_cases() {
            let mut ready = Ready::on(heap.clone(), &case)?;
            ready.call()?;
            let Ready { op, stream, .. } = ready;
            drop(op);
            stream.sync()?;
        }
        heap.close()?;
        world.close()?;
        Ok(())
    })
    .unwrap();
}
