//! Tests of communicators on memory and streams that cudarc has made.

use anyhow::Result;
use cudarc::driver::CudaContext;
use iris_heap::{BackendKind, World};
use iris_ops::comm::{Comm, Options, ReduceOp};
use iris_testkit::error_texts::fails;

/// Runs sums of many launches each on one cudarc stream, and reads the results on another cudarc
/// stream, which only cudarc's own events make wait. If a guard were dropped before its call is
/// enqueued, memory would be read or freed too early.
pub(crate) fn calls(world: &World) -> Result<()> {
    const LEN: usize = 1 << 20;
    let (rank, size) = (world.rank(), world.size());
    let context = CudaContext::new(rank % BackendKind::Cuda.device_count()?)?;
    let (stream, other) = (context.new_stream()?, context.new_stream()?);
    let comm = Comm::from_world(stream.clone(), world, &Options::new().max_bytes(1 << 16))?;
    for call in 0..8 {
        let x = stream.clone_htod(&vec![(rank + call) as f32; LEN])?;
        let mut y = stream.alloc_zeros::<f32>(LEN)?;
        comm.all_reduce(&x, &mut y, &ReduceOp::Sum)?;
        drop(x);
        let expected = (0..size).map(|rank| (rank + call) as f32).sum::<f32>();
        assert!(other.clone_dtoh(&y)?.iter().all(|&sum| sum == expected), "call {call}");
    }
    // Collectives on views of a slice of `u32`, a type that can be moved but not summed.
    let own = stream.clone_htod(&[7, 8, rank as u32, 9])?;
    let mut all = stream.alloc_zeros::<u32>(3 * size)?;
    comm.all_gather(&own.slice(..3), &mut all)?;
    comm.barrier()?;
    let expected: Vec<u32> = (0..size as u32).flat_map(|rank| [7, 8, rank]).collect();
    assert_eq!(stream.clone_dtoh(&all)?, expected);
    // Part `to` of rank `from` has LEN / 4 elements of value 10 from + to.
    let part = |from: usize, to: usize| vec![(10 * from + to) as f32; LEN / 4];
    let own: Vec<f32> = (0..size).flat_map(|to| part(rank, to)).collect();
    let own = stream.clone_htod(&own)?;
    let mut sum = stream.alloc_zeros::<f32>(LEN / 4)?;
    comm.reduce_scatter(&own, &mut sum, &ReduceOp::Sum)?;
    let expected = (0..size).map(|from| part(from, rank)[0]).sum::<f32>();
    assert!(other.clone_dtoh(&sum)?.iter().all(|&sum| sum == expected));
    let mut got = stream.alloc_zeros::<f32>(size * LEN / 4)?;
    comm.all_to_all(&own, &mut got)?;
    let expected: Vec<f32> = (0..size).flat_map(|from| part(from, rank)).collect();
    assert!(other.clone_dtoh(&got)? == expected, "all_to_all");
    // Bytes go through the communicator's own buffers.
    for root in 0..size {
        let mut bytes = stream.clone_htod(&vec![rank as u8; 100_001])?;
        comm.broadcast_in_place(&mut bytes, root as i32)?;
        assert!(other.clone_dtoh(&bytes)? == vec![root as u8; 100_001], "broadcast from {root}");
    }
    fails(comm.broadcast_in_place(&mut [0_u32; 4], 0), &["of the host"]);
    Ok(comm.close()?)
}

pub(crate) fn comm_takes_memory_and_streams_of_cudarc() {
    // Each rank has a separate device. If threads shared a device, a copy by cudarc that waits for
    // its stream could hold up the launch for which the copy waits.
    let devices = BackendKind::Cuda.device_count().unwrap();
    for size in [1, 2, 4].into_iter().filter(|&size| size <= devices) {
        let rank = |world: World| -> Result<()> {
            calls(&world)?;
            Ok(world.close()?)
        };
        World::run_threads(size, rank).unwrap();
    }
}
