//! A row-parallel linear layer on memory and streams of cudarc's, captured in a graph: `cargo run --release -p iris-ops
//! --features cudarc-0-19 --example cudarc`, on a host with NVIDIA GPUs. One rank a GPU, as threads.

#![allow(unsafe_code, reason = "what cudarc leaves to a program that captures")]

use anyhow::{Context, Result};
use cudarc::driver::{CudaContext, sys};
use iris_heap::{BackendKind, SymmetricHeap, World};
use iris_ops::matmul_all_reduce::Options;
use iris_ops::{HeapReserve, MatmulAllReduce, MatmulArgs, Operand, Plan, Topology};

const SHAPE: (usize, usize, usize) = (16, 4096, 1024);

fn layer(world: World) -> Result<f32> {
    let (m, n, k) = SHAPE;
    // Context and stream that belong to the program. The heap is on the same device and uses its
    // primary context, as cudarc does.
    let context = CudaContext::new(world.local_rank())?;
    let stream = context.new_stream()?;
    let ranks = Topology::from(&world).on(BackendKind::Cuda);
    let plan = Options::new(m, n, k).plan(ranks)?;
    let heap = SymmetricHeap::open(
        &world,
        Plan::heap_options(&[&plan], HeapReserve::none())?.device(context.ordinal()),
    )?;
    let op = MatmulAllReduce::new(&heap, &plan)?; // the one collective step
    let ours = heap.gpu()?.stream_of(&stream)?;

    // Memory that belongs to the program. Its elements are 1 and 0.5, so an element of the sum is
    // ranks * k / 2.
    let x = stream.clone_htod(&vec![1.0_f32; m * k])?;
    let weight = stream.clone_htod(&vec![0.5_f32; n * k])?; // N x K, as linear layers have it
    let mut y = stream.alloc_zeros::<f32>(m * n)?;
    let mut call = || -> Result<()> {
        let args = MatmulArgs::new(
            Operand::read(&x, &stream, m, k),
            Operand::read(&weight, &stream, n, k).transposed(),
            Operand::write(&mut y, &stream, m, n),
        );
        // Enqueues the call. If this returns an error, no memory is freed too early either: the
        // operands have told cudarc about the call.
        Ok(op.run(&args, &ours)?)
    };
    call()?; // the first call of a problem may load kernels, which a capture forbids
    stream.synchronize()?;
    // SAFETY: one stream, so that nothing is left for events to order, and a capture has none of before.
    unsafe { context.disable_event_tracking() };
    stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let enqueued = call();
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0))?;
    enqueued?;
    let graph = graph.context("an empty graph")?;
    for _ in 0..100 {
        graph.launch()?; // all ranks launch it, in the same order among their calls
    }
    let sum = stream.clone_dtoh(&y)?[0];
    heap.check()?; // names a rank that was waited for in vain, if there is one
    drop(graph); // before the operator whose calls are in it
    heap.close()?;
    world.close()?;
    Ok(sum)
}

fn main() -> Result<()> {
    let devices = BackendKind::Cuda.device_count().unwrap_or(0);
    if devices == 0 {
        println!("no NVIDIA GPU here");
        return Ok(());
    }
    let expected = (devices * SHAPE.2) as f32 / 2.0;
    let sums = World::run_threads(devices, layer)?;
    anyhow::ensure!(sums.iter().all(|&sum| sum == expected), "{sums:?}, not {expected}");
    println!("{devices} ranks: {expected} on each");
    Ok(())
}
