//! Ops on GPUs: captured and replayed, on the caller's stream, with an absent rank. Without a GPU
//! the tests are ignored. Ranks are threads that share the devices there are; the suite of cases is
//! in iris-testkit.

use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cudarc::driver::{CudaContext, sys};
use iris_heap::cuda::CudaBackend;
use iris_heap::{BackendKind, DType, HeapOptions, Settings, SymmetricHeap, World};
use iris_ops::matmul_all_reduce::Variant;
use iris_ops::{AllReduce, Barrier, CopyArgs, MatRef, MatmulAllReduce, MatmulArgs, Options};
use iris_testkit::harness::{self, Group, named};

/// One capture at a time: making a graph of one disturbs another that is under way.
static CAPTURE: Mutex<()> = Mutex::new(());

fn main() -> ExitCode {
    harness::run(vec![
        Group::new(None, named![a_tile_that_no_kernel_takes_is_refused_by_the_plan]),
        Group::new(
            harness::no_gpu(),
            named![
                sums_of_products_are_exact,
                a_graph_is_replayed_a_thousand_times,
                ops_of_two_streams_are_in_order,
                an_absent_rank_is_a_fault_and_the_process_lives,
            ],
        ),
    ])
}

fn open(world: &World) -> Result<Arc<SymmetricHeap>> {
    let options = HeapOptions::new().backend(BackendKind::Cuda).data_bytes(64 << 20);
    Ok(SymmetricHeap::open(world, options)?)
}

fn options(m: usize, n: usize, k: usize) -> Options {
    Options::new(m, n, k).backend(BackendKind::Cuda)
}

/// Small integers, other ones for each rank and call.
fn numbers(len: usize, rank: usize, call: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + rank * 5 + call * 3) % 9) as f32 - 4.0).collect()
}

fn product(a: &[f32], b: &[f32], (m, n, k): (usize, usize, usize)) -> Vec<f32> {
    let element = |i: usize| (0..k).map(|d| a[i / n * k + d] * b[d * n + i % n]).sum();
    (0..m * n).map(element).collect()
}

fn matmul_all_reduce(world: World, variant: Variant) -> Result<()> {
    let heap = open(&world)?;
    let (rank, size) = (world.rank(), world.size());
    let (m, n, k) = (33, 70, 45);
    let plan = MatmulAllReduce::plan((&world).into(), &options(m, n, k), variant)?;
    let mut op = MatmulAllReduce::new(&heap, &plan)?;
    let (a, b) = (heap.alloc::<f32>(m * k)?, heap.alloc::<f32>(k * n)?);
    let c = heap.full::<f32>(m * n, f32::NAN)?;
    let stream = heap.stream()?;
    for call in 0..20 {
        heap.write(a, &numbers(m * k, rank, call))?;
        heap.write(b, &numbers(k * n, rank + 1, call))?;
        let args =
            MatmulArgs::new(MatRef::sym(a, m, k), MatRef::sym(b, k, n), MatRef::sym(c, m, n));
        op.run(&args, &stream)?;
        stream.sync()?;
        let mut expected = vec![0.0; m * n];
        for source in 0..size {
            let (a, b) = (numbers(m * k, source, call), numbers(k * n, source + 1, call));
            for (sum, x) in expected.iter_mut().zip(product(&a, &b, (m, n, k))) {
                *sum += x;
            }
        }
        let got = heap.read(c)?;
        let wrong = got.iter().zip(&expected).position(|(g, e)| g != e);
        ensure!(
            wrong.is_none(),
            "{variant:?}, {size} ranks, call {call}: element {wrong:?} is {:?}, expected {:?}",
            wrong.map(|i| got[i]),
            wrong.map(|i| expected[i])
        );
        // C may be written by a peer once this rank has entered the next call.
        world.barrier()?;
    }
    drop(op);
    heap.close()?;
    Ok(())
}

fn sums_of_products_are_exact() {
    for size in [1, 2, 4] {
        for &variant in Variant::ALL {
            World::run_threads(size, |world| matmul_all_reduce(world, variant))
                .unwrap_or_else(|error| panic!("{variant:?} of {size} ranks: {error}"));
        }
    }
}

/// An op and a barrier in a graph on the caller's stream, replayed with inputs that change.
fn replayed(world: World) -> Result<()> {
    let heap = open(&world)?;
    let (rank, size) = (world.rank(), world.size());
    let backend = CudaBackend::of(&heap)?;
    let context = CudaContext::new(heap.backend().device().index)?;
    let theirs = context.new_stream()?;
    let stream = backend.stream_of(&theirs)?;
    let len = 5000;
    let plan = AllReduce::plan((&world).into(), &options(1, len, 0), Variant::OneShot)?;
    let mut op = AllReduce::new(&heap, &plan)?;
    let plan = Barrier::plan((&world).into(), &options(0, 0, 0))?;
    let mut barrier = Barrier::new(&heap, &plan)?;
    let (x, y) = (heap.alloc::<f32>(len)?, heap.full::<f32>(len, f32::NAN)?);
    let args = CopyArgs::new(MatRef::sym(x, 1, len), MatRef::sym(y, 1, len));
    // A call before the capture, one behind it, and the graph between them.
    heap.write(x, &numbers(len, rank, 0))?;
    op.run(&args, &stream)?;
    stream.sync()?;
    world.barrier()?;
    let graph = {
        let _capture = CAPTURE.lock();
        theirs.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
        op.run(&args, &stream)?;
        barrier.run(&stream)?;
        // Allocation and waiting are errors that leave the capture alone.
        let refused = heap.alloc_device_words(1).map(drop).unwrap_err().to_string();
        ensure!(refused.contains("captured"), "{refused}");
        let refused = stream.sync().unwrap_err().to_string();
        ensure!(refused.contains("captured"), "{refused}");
        // What is not about the stream goes on.
        heap.read(x)?;
        heap.check()?;
        theirs.end_capture(sys::CUgraphInstantiate_flags(0))?.context("an empty graph")?
    };
    world.barrier()?;
    for call in 0..1000 {
        heap.write(x, &numbers(len, rank, call))?;
        graph.launch()?;
        stream.sync()?;
        if call % 50 == 0 {
            let mut expected = vec![0.0; len];
            for source in 0..size {
                for (sum, v) in expected.iter_mut().zip(numbers(len, source, call)) {
                    *sum += v;
                }
            }
            ensure!(heap.read(y)? == expected, "replay {call} of rank {rank} is wrong");
            // Nobody begins the next call, which may write here, before all have compared.
            world.barrier()?;
        }
    }
    op.run(&args, &stream)?;
    stream.sync()?;
    drop(graph);
    drop((op, barrier));
    heap.close()?;
    Ok(())
}

fn a_graph_is_replayed_a_thousand_times() {
    for size in [2, 4] {
        World::run_threads(size, replayed).unwrap();
    }
}

/// Calls that alternate between two streams are still one after the other.
fn ops_of_two_streams_are_in_order() {
    let outcome = World::run_threads(2, |world| -> Result<()> {
        let heap = open(&world)?;
        let streams = [heap.stream()?, heap.stream()?, heap.stream()?];
        let len = 1000;
        let plan = AllReduce::plan((&world).into(), &options(1, len, 0), Variant::TwoShot)?;
        let mut op = AllReduce::new(&heap, &plan)?;
        let x = [heap.ones::<f32>(len)?, heap.zeros::<f32>(len)?];
        for call in 0..12 {
            let place = |i: usize| MatRef::sym(x[i % 2], 1, len);
            op.run(&CopyArgs::new(place(call), place(call + 1)), &streams[call % 3])?;
        }
        for stream in &streams {
            stream.sync()?;
        }
        ensure!(heap.read(x[0])? == vec![4096.0; len]);
        drop(op);
        Ok(heap.close()?)
    });
    outcome.unwrap();
}

fn an_absent_rank_is_a_fault_and_the_process_lives() {
    let settings = Settings::default().deadline(0.01);
    let each = World::run_threads_each(2, &settings, |world| -> Result<()> {
        let heap = open(&world)?;
        let plan = AllReduce::plan((&world).into(), &options(1, 64, 0), Variant::OneShot)?;
        let mut op = AllReduce::new(&heap, &plan)?;
        let (x, y) = (heap.ones::<f32>(64)?, heap.zeros::<f32>(64)?);
        let args = CopyArgs::new(MatRef::sym(x, 1, 64), MatRef::sym(y, 1, 64));
        let stream = heap.stream()?;
        let started = Instant::now();
        if world.rank() == 0 {
            op.run(&args, &stream)?;
            let error = stream.sync().expect_err("rank 1 does not call").to_string();
            ensure!(error.contains("all_reduce") && error.contains("rank 1"), "{error}");
            println!("after {:.1?}: {error}", started.elapsed());
            let again = op.run(&args, &stream).expect_err("the op is poisoned").to_string();
            ensure!(again.contains("all_reduce"), "{again}");
        }
        ensure!(started.elapsed() < Duration::from_secs(20));
        if world.rank() == 1 {
            // The others wait as long for a host as kernels do for an entry: 6 s.
            std::thread::sleep(Duration::from_secs(4));
        }
        world.barrier()?;
        ensure!(heap.check().is_err(), "rank {} was not told", world.rank());
        drop(op);
        Ok(heap.close()?)
    });
    each.unwrap().into_iter().collect::<Result<Vec<_>>>().unwrap();
    // The context is as good as before.
    World::run_threads(2, |world| matmul_all_reduce(world, Variant::OneShot)).unwrap();
}

fn a_tile_that_no_kernel_takes_is_refused_by_the_plan() {
    let world = World::threads(1).unwrap().remove(0);
    let tile = iris_ops::TileShape { m: 256, n: 64 };
    let large = options(512, 512, 64).dtype(DType::BF16).tile(tile);
    let error = MatmulAllReduce::plan((&world).into(), &large, Variant::Auto).unwrap_err();
    assert!(error.to_string().contains("256 x 64"), "{error}");
    // The one that the plan chooses is not.
    for (m, n) in [(1, 8192), (16, 1024), (4096, 4096), (3, 5)] {
        let options = options(m, n, 64).dtype(DType::BF16);
        let plan = MatmulAllReduce::plan((&world).into(), &options, Variant::Auto).unwrap();
        let tile = plan.tile();
        assert!(tile.m <= 128 && tile.n <= 128 && tile.m >= 8, "{m} x {n}: {tile:?}");
    }
}
