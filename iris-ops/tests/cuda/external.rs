//! Tests with matrices and streams of cudarc, with legacy memory handles between processes, and a
//! check for memory leaks.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use iris_heap::{BackendKind, HeapOptions, SymmetricHeap, World};
use iris_ops::{MatRef, Topology};
use iris_testkit::launch;
use iris_testkit::suite::Op;

use crate::graphs::callers;
use crate::open;
use crate::sample::Sample;

/// Matrix over a slice of device memory that cudarc allocated.
fn external(
    slice: &CudaSlice<f32>,
    stream: &Arc<CudaStream>,
    (rows, cols): (usize, usize),
) -> MatRef {
    let (address, _used) = slice.device_ptr(stream);
    // SAFETY: the caller keeps the slice until the stream has completed the calls that use the
    // matrix.
    unsafe { MatRef::external_mut(address as *mut f32, slice.len(), rows, cols) }
}

/// Runs every operator with A, B and C in cudarc's memory, and with copies before and after each
/// call on the same cudarc stream. Only this stream orders the copies and the call. Variants that
/// pull need A in the heap.
fn external_matrices(world: &World) -> Result<()> {
    const CALLS: usize = 8;
    let heap = open(world)?;
    let (theirs, stream) = callers(&heap)?;
    for sample in Sample::all(Topology::from(world)) {
        if sample.case.op == Op::Barrier {
            continue;
        }
        let (op, room) = (sample.make(&heap)?, sample.room(&heap)?);
        let pulled = ["pull", "staged"].contains(&sample.case.variant.as_str());
        let [a_shape, b_shape, c_shape] = sample.shapes();
        let new = |elements: usize| theirs.alloc_zeros::<f32>(elements.max(1));
        let mut a = new(room.a.len())?;
        let mut b = new(room.b.len())?;
        let mut c = new(room.c.len())?;
        let mut operands = sample.operands(&room);
        if !pulled {
            operands.a = external(&a, &theirs, a_shape);
        }
        operands.b = external(&b, &theirs, b_shape);
        operands.c = external(&c, &theirs, c_shape);
        let calls = if pulled { 1 } else { CALLS };
        let mut kept = Vec::new();
        for call in 0..calls {
            sample.fill(&heap, &room, call)?;
            for (which, to) in [(0, &mut a), (1, &mut b)] {
                let mut values = sample.elements(which, call);
                values.resize(to.len(), f32::NAN);
                let staged = theirs.clone_htod(&values)?;
                theirs.memcpy_dtod(&staged, to)?;
            }
            let poison = theirs.clone_htod(&vec![f32::NAN; c.len()])?;
            theirs.memcpy_dtod(&poison, &mut c)?;
            op.run(&operands, &stream)?;
            let mut result = new(c.len())?;
            theirs.memcpy_dtod(&c, &mut result)?;
            kept.push(result);
        }
        stream.sync()?;
        for (call, result) in kept.iter().enumerate() {
            sample.check(&theirs.clone_dtoh(result)?, call).context("memory of cudarc's")?;
        }
        op.free()?;
        [room.a, room.b, room.c].into_iter().try_for_each(|slice| heap.free(slice))?;
    }
    Ok(heap.close()?)
}

pub(crate) fn matrices_and_streams_of_cudarc_work() {
    for size in [1, 2, 4] {
        World::run_threads(size, |world| external_matrices(&world)).unwrap();
    }
}

/// Command-line argument that makes this program one rank of [`processes_over_legacy_handles`].
pub(crate) const LEGACY_RANK: &str = "legacy-rank";

/// Runs every operator in this process. Its ranks share plain device memory by legacy IPC handles.
pub(crate) fn legacy_rank() -> Result<()> {
    let world = World::from_env()?;
    let options = HeapOptions::new().backend(BackendKind::Cuda).legacy_memory(true);
    let heap = SymmetricHeap::open(&world, options.data_bytes(64 << 20))?;
    let stream = heap.stream()?;
    for sample in Sample::all(Topology::from(&world)) {
        let (op, room) = (sample.make(&heap)?, sample.room(&heap)?);
        for call in 0..3 {
            sample.fill(&heap, &room, call)?;
            op.run(&sample.operands(&room), &stream)?;
            stream.sync()?;
            if sample.case.op != Op::Barrier {
                sample.check(&heap.read(room.c)?, call)?;
            }
        }
        op.free()?;
        [room.a, room.b, room.c].into_iter().try_for_each(|slice| heap.free(slice))?;
    }
    heap.close()?;
    Ok(world.close()?)
}

pub(crate) fn processes_over_legacy_handles() {
    let program = std::env::current_exe().unwrap();
    for size in [2, 4] {
        let options = launch::Options::default().deadline(Duration::from_secs(300));
        let outcome = launch::launch(&program, &[LEGACY_RANK], size, options).unwrap();
        assert!(outcome.ok(), "{}", outcome.report());
    }
}

/// Tests that a hundred heaps with operators, opened and closed one after the other, leak no device
/// memory.
///
/// A slack of 16 MiB is allowed. The driver allocates blocks of 2 MiB for streams, events and
/// launches, and a few more after the first round, when it has loaded the kernels. A leak would
/// exceed the slack: one data segment is 64 MiB, and the smallest allocation of a heap, 2 MiB of
/// device words, would leak a hundred times.
pub(crate) fn memory_comes_back_after_a_hundred_heaps_with_ops() {
    const SLACK: u64 = 16 << 20;
    let devices = BackendKind::Cuda.device_count().unwrap();
    let round = || {
        World::run_threads(devices.max(2), |world| -> Result<()> {
            let heap = open(&world)?;
            let stream = heap.stream()?;
            let ops = [(Op::MatmulAllReduce, "two_shot"), (Op::AllGatherMatmul, "staged")];
            for (op, variant) in ops {
                let sample = Sample::new(op, variant, Default::default(), Topology::from(&world));
                let (op, room) = (sample.make(&heap)?, sample.room(&heap)?);
                sample.fill(&heap, &room, 0)?;
                op.run(&sample.operands(&room), &stream)?;
                stream.sync()?;
                sample.check(&heap.read(room.c)?, 0)?;
                op.free()?;
            }
            Ok(heap.close()?)
        })
        .unwrap();
    };
    let free = || -> Vec<u64> {
        (0..devices).map(|device| BackendKind::Cuda.memory_info(device).unwrap().0).collect()
    };
    round();
    let before = free();
    (0..100).for_each(|_| round());
    let after = free();
    println!("free before {before:?}, after {after:?}");
    for (device, (before, after)) in before.into_iter().zip(after).enumerate() {
        assert!(after + SLACK >= before, "device {device}: free {before} before, {after} after");
    }
}
