//! Tests of operators in CUDA graphs. They are captured in global mode, which restricts all
//! threads, while other threads use everything of the library. Then they are replayed with changing
//! inputs.

use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream, sys};
use iris_heap::{BackendKind, HeapOptions, Stream, SymmetricHeap, World};
use iris_ops::all_reduce::{Options, Variant};
use iris_ops::{AllReduce, Barrier, CollectiveArgs, MatRef, Topology, barrier};
use iris_testkit::suite::Op;

use crate::sample::{Room, Sample};
use crate::{numbers, open, summed};

/// Lock held while a capture is in progress, because instantiating another graph would disturb the
/// capture.
static CAPTURE: Mutex<()> = Mutex::new(());

/// Makes a stream with cudarc on the heap's device. Returns the stream, and the heap's view of it.
pub(crate) fn callers(heap: &SymmetricHeap) -> Result<(Arc<CudaStream>, Stream)> {
    let context = CudaContext::new(heap.device().index)?;
    let theirs = context.new_stream()?;
    let stream = heap.gpu()?.stream_of(&theirs)?;
    Ok((theirs, stream))
}

/// Captures the work that `enqueue` puts on the stream `theirs`, and returns this work as a graph.
pub(crate) fn captured(
    theirs: &Arc<CudaStream>,
    enqueue: impl FnOnce() -> Result<()>,
) -> Result<CudaGraph> {
    let _capture = CAPTURE.lock();
    theirs.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
    let done = enqueue();
    let graph = theirs.end_capture(sys::CUgraphInstantiate_flags(0))?;
    done?;
    graph.context("an empty graph")
}

/// Drops a graph while holding [`CAPTURE`], because dropping a graph would disturb the capture of
/// another thread.
pub(crate) fn drop_graph(graph: CudaGraph) {
    let _capture = CAPTURE.lock();
    drop(graph);
}

/// Replays a graph of an operator and a barrier on the caller's stream, with changing inputs.
fn replayed(world: World) -> Result<()> {
    let heap = open(&world)?;
    let (rank, size) = (world.rank(), world.size());
    let (theirs, stream) = callers(&heap)?;
    let len = 5000;
    let plan = Options::new(len).variant(Variant::OneShot).plan(&heap)?;
    let op = AllReduce::new(&heap, &plan)?;
    let barrier = Barrier::new(&heap, &barrier::Options::new().plan(&heap)?)?;
    let (x, y) = (heap.alloc::<f32>(len)?, heap.full::<f32>(len, f32::NAN)?);
    let args = CollectiveArgs::new(MatRef::sym(x, 1, len), MatRef::sym(y, 1, len));
    // The operator also runs outside the graph: once before the capture, and once after the
    // replays.
    heap.write(x, &numbers(len, rank, 0))?;
    op.run(&args, &stream)?;
    stream.sync()?;
    world.barrier()?;
    let graph = captured(&theirs, || {
        op.run(&args, &stream)?;
        barrier.run(&stream)?;
        // Allocations and waits would break the capture, so they must be refused while the capture
        // is in progress.
        let refused = heap.alloc_device_words(1).map(drop).unwrap_err().to_string();
        ensure!(refused.contains("captured"), "{refused}");
        let refused = stream.sync().unwrap_err().to_string();
        ensure!(refused.contains("captured"), "{refused}");
        // Functions that do not use the captured stream must work during the capture.
        heap.read(x)?;
        Ok(heap.check()?)
    })?;
    world.barrier()?;
    for call in 0..1000 {
        heap.write(x, &numbers(len, rank, call))?;
        graph.launch()?;
        stream.sync()?;
        if call % 50 == 0 {
            let expected = summed(size, |source| numbers(len, source, call));
            ensure!(heap.read(y)? == expected, "replay {call} of rank {rank} is wrong");
            // All ranks compare their results before any rank begins the next call, which may write
            // C of its peers.
            world.barrier()?;
        }
    }
    op.run(&args, &stream)?;
    stream.sync()?;
    drop_graph(graph);
    drop((op, barrier));
    heap.close()?;
    Ok(())
}

pub(crate) fn a_graph_is_replayed_a_thousand_times() {
    for size in [2, 4] {
        World::run_threads(size, replayed).unwrap();
    }
}

/// Tests that functions that allocate or close are refused during a capture, on all ranks, with an
/// error that gives the reason. The capture must continue, and the refused functions must work
/// after the capture.
pub(crate) fn allocation_in_a_capture_is_refused() {
    let outcome = World::run_threads(2, |world| -> Result<()> {
        let heap = open(&world)?;
        let (theirs, stream) = callers(&heap)?;
        let sample =
            Sample::new(Op::AllReduce, "two_shot", Default::default(), Topology::from(&world));
        let (op, room) = (sample.make(&heap)?, sample.room(&heap)?);
        let refuse = |what: &str, outcome: Result<()>| {
            let error = format!("{:#}", outcome.expect_err("allocation in a capture"));
            let by_peer = world.rank() == 1 && error.contains("rank 0");
            ensure!(error.contains("captured") || by_peer, "{what}: {error}");
            Ok(())
        };
        let attempts = || -> Result<()> {
            refuse("alloc", heap.alloc::<f32>(16).map(drop).map_err(Into::into))?;
            refuse("alloc_signal", heap.alloc_signal(16).map(drop).map_err(Into::into))?;
            refuse("new", sample.make(&heap).map(drop))?;
            refuse("free", heap.free(room.b).map_err(Into::into))?;
            // The stream may have work from before the capture. Nothing can wait for that work
            // during the capture.
            refuse("close", heap.close().map_err(Into::into))
        };
        let graph = if world.rank() == 0 {
            captured(&theirs, || {
                op.run(&sample.operands(&room), &stream)?;
                let finished = heap.finish().expect_err("a captured stream").to_string();
                ensure!(finished.contains("captured"), "{finished}");
                attempts()
            })?
        } else {
            attempts()?;
            captured(&theirs, || Ok(op.run(&sample.operands(&room), &stream)?))?
        };
        world.barrier()?;
        for call in 0..20 {
            sample.fill(&heap, &room, call)?;
            graph.launch()?;
            stream.sync()?;
            sample.check(&heap.read(room.c)?, call)?;
        }
        drop_graph(graph);
        sample.make(&heap)?.free()?;
        heap.free(room.b)?;
        op.free()?;
        Ok(heap.close()?)
    });
    outcome.unwrap();
}

/// Threads that use separate heaps on the same devices during captures and replays, and their
/// current task.
struct Others {
    what: AtomicU8,
    rounds: AtomicUsize,
}

/// Tasks of the other threads. STOP: end. USE: use the open heap. OPEN: use the open heap, and also
/// open and close another heap.
const STOP: u8 = 0;
const USE: u8 = 1;
const OPEN: u8 = 2;

impl Others {
    /// Runs the two ranks of the other threads until their task becomes `STOP`.
    fn run(&self) -> Result<()> {
        World::run_threads(2, |world| -> Result<()> {
            let heap = small(&world)?;
            loop {
                // The task may change at any time, so both ranks use the value that rank 0 has
                // read.
                let what = world.allgather(&[self.what.load(Ordering::Relaxed)])?[0][0];
                if what == STOP {
                    return Ok(heap.close()?);
                }
                errand(&heap)?;
                if what == OPEN {
                    let other = small(&world)?;
                    errand(&other)?;
                    other.close()?;
                }
                if world.rank() == 0 {
                    self.rounds.fetch_add(1, Ordering::Relaxed);
                }
            }
        })?;
        Ok(())
    }

    /// Waits until the other threads have begun and completed one whole round of their task after
    /// this call began.
    fn round(&self) -> Result<()> {
        let (before, begun) = (self.rounds.load(Ordering::Relaxed), Instant::now());
        while self.rounds.load(Ordering::Relaxed) < before + 2 {
            ensure!(begun.elapsed() < Duration::from_secs(60), "the other threads do nothing");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

fn small(world: &World) -> Result<Arc<SymmetricHeap>> {
    let options = HeapOptions::new().backend(BackendKind::Cuda);
    Ok(SymmetricHeap::open(world, options.data_bytes(4 << 20).signal_bytes(1 << 20))?)
}

/// Uses many functions of the library: allocation, copies by host and by stream, events, and an
/// operator that is made and run.
fn errand(heap: &Arc<SymmetricHeap>) -> Result<()> {
    const LEN: usize = 3000;
    let (rank, size) = (heap.rank(), heap.size());
    let (x, y) = (heap.full::<f32>(LEN, rank as f32 + 1.0)?, heap.zeros::<f32>(LEN)?);
    let words = heap.alloc_device_words(7)?;
    heap.write_device_words(words, &[3; 7])?;
    let plan = Options::new(LEN).workgroups(4).variant(Variant::TwoShot).plan(heap)?;
    let op = AllReduce::new(heap, &plan)?;
    let (stream, second) = (heap.stream()?, heap.stream()?);
    op.run(&CollectiveArgs::new(MatRef::sym(x, 1, LEN), MatRef::sym(y, 1, LEN)), &stream)?;
    let event = stream.record()?;
    second.wait(&event)?;
    heap.copy_on(&second, (x, rank), (y, rank))?;
    heap.write_on(&second, y, &[9.0; LEN])?;
    second.sync()?;
    event.sync()?;
    let sum = (size * (size + 1) / 2) as f32;
    ensure!(heap.read(x)? == [sum; LEN] && heap.read(y)? == [9.0; LEN]);
    ensure!(heap.read_device_words(words)? == [3; 7]);
    heap.free_device_words(words)?;
    op.check()?;
    op.free()?;
    heap.free(x)?;
    Ok(heap.free(y)?)
}

/// Captures every operator on this rank and replays it, while the other threads work.
fn all_replayed(world: &World, others: &Others, while_replaying: u8) -> Result<()> {
    let heap = open(world)?;
    let ranks = Topology::from(world);
    let (theirs, stream) = callers(&heap)?;
    let word = heap.zeros::<i32>(1)?;
    let mut calls = 0;
    for (index, sample) in Sample::all(ranks).into_iter().enumerate() {
        let (op, room): (_, Room) = (sample.make(&heap)?, sample.room(&heap)?);
        let operands = sample.operands(&room);
        let set = |what| -> Result<()> {
            if ranks.rank == 0 {
                others.what.store(what, Ordering::Relaxed);
                if what == USE {
                    // Waits for one round. Afterwards the last heap that the other threads opened
                    // is closed.
                    others.round()?;
                }
            }
            Ok(world.barrier()?)
        };
        set(OPEN)?;
        let graph = captured(&theirs, || {
            op.run(&operands, &stream)?;
            // The ranks take turns: one of them keeps its capture open for a whole round of the
            // other threads.
            if index % ranks.size == ranks.rank { others.round() } else { Ok(()) }
        });
        let graph = graph.with_context(|| sample.name())?;
        set(while_replaying)?;
        for call in 0..20 {
            calls += 1;
            sample.fill(&heap, &room, call)?;
            heap.write(word, &[calls])?;
            graph.launch()?;
            stream.sync()?;
            if sample.case.op != Op::Barrier {
                sample.check(&heap.read(room.c)?, call)?;
                continue;
            }
            for rank in 0..ranks.size {
                // The other ranks may already be in the call after this one, but must not be in an
                // earlier call.
                let seen = heap.read_from(word, rank)?[0];
                ensure!((calls..=calls + 1).contains(&seen), "{rank} at {seen}, call {calls}");
            }
        }
        drop_graph(graph);
        op.free()?;
        [room.a, room.b, room.c].into_iter().try_for_each(|slice| heap.free(slice))?;
    }
    Ok(heap.close()?)
}

fn beside_others(size: usize, while_replaying: u8) {
    // The kernels are loaded first, because loading may wait for the device.
    let load = |world: World| -> Result<()> {
        let heap = open(&world)?;
        Sample::all(Topology::from(&world))
            .iter()
            .try_for_each(|s| Ok::<_, anyhow::Error>(s.make(&heap)?.free()?))?;
        Ok(heap.close()?)
    };
    World::run_threads(size, load).unwrap();
    let others = Others { what: AtomicU8::new(USE), rounds: AtomicUsize::new(0) };
    let (outcome, theirs) = std::thread::scope(|scope| {
        let theirs = scope.spawn(|| others.run());
        let outcome =
            World::run_threads(size, |world| all_replayed(&world, &others, while_replaying));
        others.what.store(STOP, Ordering::Relaxed);
        (outcome, theirs.join())
    });
    outcome.unwrap();
    theirs.expect("the other threads end").unwrap();
}

/// Tests captures and replays while other threads work. During replays the other threads do not
/// open or close heaps, because this may wait for a device that ranks share.
pub(crate) fn every_op_is_captured_and_replayed_beside_other_threads() {
    beside_others(4, USE);
}

/// Tests that other threads may also open and close heaps during replays, if each rank has a
/// separate device.
pub(crate) fn heaps_come_and_go_while_graphs_run() {
    beside_others(BackendKind::Cuda.device_count().unwrap().min(4), OPEN);
}
