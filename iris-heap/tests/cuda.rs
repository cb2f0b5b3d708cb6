//! Tests of the CUDA backend on a GPU: memory, streams, faults, leaks. Ignored on a machine without
//! a GPU. Ranks are threads unless stated otherwise; if there are fewer devices than ranks, ranks
//! share them.

#![allow(unsafe_code, reason = "reads through the addresses that the heap gave")]

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, sys};
use iris_heap::{
    BackendKind, Error, ErrorKind, HeapOptions, Segment, Settings, SymmetricHeap, World, abi,
};
use iris_testkit::error_texts::fails;
use iris_testkit::harness::{self, Group, named};
use iris_testkit::launch;

fn main() -> ExitCode {
    if std::env::var_os(LEGACY).is_some() {
        rank_program();
        return ExitCode::SUCCESS;
    }
    let no_gpu = harness::no_gpu();
    let a_gpu = no_gpu.is_none().then(|| "there is a CUDA device".into());
    harness::run(vec![
        Group::new(a_gpu, named![a_heap_without_a_device_is_an_error]),
        Group::new(
            no_gpu,
            named![
                ranks_see_each_others_memory,
                processes_see_each_others_memory,
                ranks_of_one_device_divide_it,
                memory_comes_back_after_a_hundred_heaps,
                faults_and_losses_come_from_sync,
                a_heap_may_be_dropped,
                a_heap_may_be_dropped_after_a_busy_stream,
                nothing_is_enqueued_on_a_heap_that_closes,
                a_stream_of_the_callers_may_go_at_any_time,
                a_heap_stays_open_while_a_stream_that_was_let_go_is_captured,
                a_new_stream_waits_for_no_other,
                streams_and_memory_come_as_numbers,
            ],
        ),
    ])
}

fn options() -> HeapOptions {
    HeapOptions::new().backend(BackendKind::Cuda).data_bytes(8 << 20).signal_bytes(1 << 20)
}

fn on_one_rank(
    options: HeapOptions,
    test: impl Fn(Arc<SymmetricHeap>) -> Result<(), Error> + Sync,
) {
    World::run_threads(1, |world| test(SymmetricHeap::open(&world, options.clone())?)).unwrap();
}

/// Uses memory and streams of a world of any size, with virtual memory or, if `legacy`, with plain
/// memory, and checks the results.
fn exchange(world: World, legacy: bool) -> Result<(), Error> {
    let (rank, size) = (world.rank(), world.size());
    let heap = SymmetricHeap::open(&world, options().legacy_memory(legacy))?;
    let x = heap.arange::<f32>(1000)?;
    let y = heap.zeros::<f32>(1000)?;
    heap.write(x, &vec![rank as f32 + 0.5; 1000])?;
    world.barrier()?;
    // Data of a peer is read in two ways: directly by the host, and by a copy on a stream.
    for peer in 0..size {
        assert_eq!(heap.read_from(x.slice(990..)?, peer)?, [peer as f32 + 0.5; 10]);
    }
    world.barrier()?;
    let stream = heap.stream()?;
    let next = (rank + 1) % size;
    heap.copy_on(&stream, (y, next), (x, rank))?;
    let done = stream.record()?;
    let second = heap.stream()?;
    second.wait(&done)?;
    heap.write_on(&second, x, &vec![-1.0; 1000])?;
    second.sync()?;
    assert!(done.is_done());
    world.barrier()?;
    let from = (rank + size - 1) % size;
    assert_eq!(heap.read(y)?, vec![from as f32 + 0.5; 1000]);
    assert_eq!(heap.read(x)?, vec![-1.0; 1000]);
    // New memory must be zeroed, and so must the words that the heap reserves.
    let words = heap.alloc_signal(64)?;
    assert_eq!(heap.read(words)?, [0; 64]);
    let device_words = heap.alloc_device_words(33)?;
    heap.write_device_words(device_words, &[7; 33])?;
    assert_eq!(heap.read_device_words(device_words)?, [7; 33]);
    heap.free_device_words(device_words)?;
    heap.check()?;
    world.barrier()?;
    heap.free(x)?;
    assert!(matches!(heap.read(x), Err(Error::NotAllocated { .. })));
    heap.free(y)?;
    heap.free(words)?;
    assert_eq!(heap.free_bytes(Segment::Data).0, 8 << 20);
    heap.close()?;
    assert_eq!(stream.sync().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(stream.record().map(drop).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(heap.stream().map(drop).unwrap_err().kind(), ErrorKind::Closed);
    Ok(())
}

fn ranks_see_each_others_memory() {
    let devices = BackendKind::Cuda.devices().unwrap();
    for d in &devices {
        println!("device {}: {} {}, {} workgroups", d.index, d.name, d.uuid, d.workgroups);
    }
    for size in [1, 2, 4, devices.len().max(2) * 2] {
        for legacy in [false, true] {
            World::run_threads(size, |world| exchange(world, legacy)).unwrap();
        }
    }
}

/// Program of one rank, started by `processes_see_each_others_memory`.
fn rank_program() {
    let legacy = std::env::var(LEGACY).expect("the other test says which memory") == "1";
    let world = World::from_env().unwrap();
    exchange(world.clone(), legacy).unwrap();
    world.close().unwrap();
}

const LEGACY: &str = "HEAP_TEST_LEGACY";

fn processes_see_each_others_memory() {
    let program = std::env::current_exe().unwrap();
    for (size, legacy) in [(2, "0"), (4, "0"), (2, "1"), (4, "1")] {
        let options = launch::Options::default().env("IRIS_DEADLINE", "0.1").env(LEGACY, legacy);
        let outcome = launch::launch(&program, &[""], size, options).unwrap();
        assert!(outcome.ok(), "legacy {legacy}: {}", outcome.report());
    }
}

fn ranks_of_one_device_divide_it() {
    let all = BackendKind::Cuda.devices().unwrap()[0].workgroups;
    let each = World::run_threads(4, |world| {
        let heap = SymmetricHeap::open(&world, options().device(0))?;
        assert_eq!(heap.ranks_on_device(), 4);
        assert!(heap.device().arch.starts_with("sm_"));
        let groups = heap.workgroups();
        heap.close()?;
        Ok::<_, Error>(groups)
    });
    assert_eq!(each.unwrap(), [all / 4; 4]);
    let error = World::run_threads(1, |world| SymmetricHeap::open(&world, options().device(99)));
    fails(error.map(drop), &["99"]);
}

fn memory_comes_back_after_a_hundred_heaps() {
    let round = || {
        World::run_threads(2, |world| {
            let heap = SymmetricHeap::open(&world, options().device(0))?;
            let x = heap.ones::<f32>(1 << 16)?;
            let stream = heap.stream()?;
            heap.copy_on(&stream, (x, 1 - world.rank()), (x, world.rank()))?;
            stream.sync()?;
            heap.close()
        })
        .unwrap()
    };
    round();
    let (before, _) = BackendKind::Cuda.memory_info(0).unwrap();
    for _ in 0..100 {
        round();
    }
    let (after, _) = BackendKind::Cuda.memory_info(0).unwrap();
    println!("free before {before}, after {after}");
    // The free memory may differ by 16 MiB, because other processes may use the device. One leaked
    // heap would show as 20 MiB, 100 heaps as 2 GiB.
    assert!(after + (16 << 20) > before, "free before {before}, after {after}");
}

fn faults_and_losses_come_from_sync() {
    let settings = Settings::default().deadline(0.05);
    let results = World::run_threads_each(2, &settings, |world| {
        let heap = SymmetricHeap::open(&world, options())?;
        let op = heap.control().name_op("an_op");
        let stream = heap.stream()?;
        stream.sync()?;
        world.barrier()?;
        if world.rank() == 0 {
            // Fault record in the form in which a kernel writes it.
            let fault = iris_sync::Fault {
                kind: iris_sync::FaultKind::NoProgress,
                op: op as i32,
                call: 3,
                tile: 5,
                rank: 1,
                seen: 2,
                wanted: 3,
                field: -1,
            };
            let mut words = [0; abi::FAULT_WORDS];
            words[..8].copy_from_slice(&fault.to_words());
            assert!(heap.control().record_fault(&words));
            let error = stream.sync().unwrap_err();
            assert!(
                matches!(error, Error::Fault { op, fault: f, .. } if op == "an_op" && f == fault)
            );
            world.abort();
            return Ok(());
        }
        // The abort word, which kernels poll, must show that the peer has left, without a driver
        // call.
        let end = Instant::now() + Duration::from_secs(20);
        while heap.control().host_abort() == 0 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        // No call has waited for the peer, so what the stream has done is complete.
        stream.sync()?;
        // The peer's reason is its error about this rank.
        let told = heap.check().unwrap_err();
        assert!(matches!(told, Error::PeerAborted { rank: 0, .. }), "{told}");
        // Closing after the loss must return an error, but free all resources.
        assert_eq!(heap.close().unwrap_err().kind(), ErrorKind::PeerLost);
        Ok::<_, Error>(())
    });
    for result in results.unwrap() {
        result.unwrap();
    }
}

/// Tests that dropping a heap returns without waiting for peers or for enqueued work.
fn a_heap_may_be_dropped() {
    let started = Instant::now();
    let results = World::run_threads_each(2, &Settings::default(), |world| {
        let heap = SymmetricHeap::open(&world, options())?;
        let x = heap.zeros::<f32>(1 << 20)?;
        let stream = heap.stream()?;
        heap.copy_on(&stream, (x, 1 - world.rank()), (x, world.rank()))?;
        drop(heap);
        assert_eq!(stream.sync().unwrap_err().kind(), ErrorKind::Closed);
        Ok::<_, Error>(())
    });
    for result in results.unwrap() {
        result.unwrap();
    }
    assert!(started.elapsed() < Duration::from_secs(20));
}

/// Tests a heap that is dropped while work of a released stream still runs: the heap's memory must
/// stay mapped, and the device must remain usable.
fn a_heap_may_be_dropped_after_a_busy_stream() {
    let results = World::run_threads(2, |world| {
        let large = HeapOptions::new().backend(BackendKind::Cuda).data_bytes(1 << 30);
        let heap = SymmetricHeap::open(&world, large)?;
        let x = heap.alloc::<u8>(500 << 20)?;
        let y = heap.alloc::<u8>(500 << 20)?;
        let stream = heap.stream()?;
        for _ in 0..100 {
            heap.copy_on(&stream, (y, 1 - world.rank()), (x, world.rank()))?;
        }
        let done = stream.record()?;
        drop(stream);
        drop(heap);
        // The test needs copies that have not ended by now; about 100 ms of copies were enqueued in
        // far less time.
        assert!(!done.is_done(), "the copies were done before the heap was dropped");
        done.sync()
    });
    results.unwrap();
    World::run_threads(2, |world| exchange(world, false)).unwrap();
}

/// Tests that copies that another thread enqueues while a heap closes are either executed or
/// refused.
fn nothing_is_enqueued_on_a_heap_that_closes() {
    for round in 0..50 {
        let begun = Instant::now();
        on_one_rank(options(), |heap| {
            let stream = heap.stream()?;
            let (x, y) = (heap.alloc::<u8>(1000)?, heap.alloc::<u8>(1000)?);
            std::thread::scope(|scope| {
                let copies = scope.spawn(|| {
                    loop {
                        let copied = heap.copy_on(&stream, (x, 0), (y, 0));
                        let Err(error) = copied else {
                            assert!(begun.elapsed() < Duration::from_secs(20), "it stays open");
                            continue;
                        };
                        return error;
                    }
                });
                std::thread::sleep(Duration::from_millis(round % 5));
                let closed = heap.close();
                assert_eq!(copies.join().unwrap().kind(), ErrorKind::Closed);
                closed
            })
        });
    }
    World::run_threads(2, |world| exchange(world, false)).unwrap();
}

/// Tests that the caller may destroy its stream as soon as the last `Stream` of it is dropped, even
/// while another thread waits for all streams of the heap.
fn a_stream_of_the_callers_may_go_at_any_time() {
    on_one_rank(options(), |heap| {
        let x = heap.zeros::<u8>(1 << 20)?;
        let y = heap.zeros::<u8>(1 << 20)?;
        let over = AtomicBool::new(false);
        let context = CudaContext::new(heap.device().index).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    heap.finish()?;
                }
                Ok::<_, Error>(())
            });
            let used = (0..2000).try_for_each(|_| {
                let theirs = context.new_stream().unwrap();
                // SAFETY: `stream` is dropped before `theirs`, which keeps the driver's stream
                // alive.
                let stream = unsafe { heap.stream_from_raw(theirs.cu_stream() as u64) }?;
                heap.copy_on(&stream, (y, 0), (x, 0))
            });
            over.store(true, Ordering::Relaxed);
            waits.join().unwrap().and(used)
        })?;
        heap.close()
    });
}

/// Tests that a heap refuses to close while a released stream is still captured, because it cannot
/// wait for that stream.
fn a_heap_stays_open_while_a_stream_that_was_let_go_is_captured() {
    on_one_rank(options(), |heap| {
        let x = heap.zeros::<u8>(1 << 20)?;
        let context = CudaContext::new(heap.device().index).unwrap();
        let theirs = context.new_stream().unwrap();
        let stream = heap.gpu()?.stream_of(&theirs)?;
        heap.copy_on(&stream, (x, 0), (x, 0))?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        theirs.begin_capture(mode).unwrap();
        drop(stream);
        assert_eq!(heap.close().unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(heap.finish().unwrap_err().kind(), ErrorKind::Unsupported);
        theirs.end_capture(sys::CUgraphInstantiate_flags(0)).unwrap();
        heap.finish()?;
        heap.close()
    });
}

/// Tests that released streams are reused, but only after their work has ended.
fn a_new_stream_waits_for_no_other() {
    on_one_rank(HeapOptions::new().backend(BackendKind::Cuda).data_bytes(1 << 30), |heap| {
        let x = heap.alloc::<u8>(500 << 20)?;
        let y = heap.alloc::<u8>(500 << 20)?;
        let busy = heap.stream()?;
        for _ in 0..500 {
            heap.copy_on(&busy, (y, 0), (x, 0))?;
        }
        let (done, first) = (busy.record()?, busy.raw_handle());
        drop(busy);
        let stream = heap.stream()?;
        let second = stream.raw_handle();
        // The test needs copies that have not ended by now.
        assert!(!done.is_done(), "the copies were done before there was another stream");
        assert_ne!(first, second);
        heap.finish()?;
        assert_eq!(heap.stream()?.raw_handle(), first);
        drop(stream);
        heap.close()
    });
}

/// Tests that streams and memory can be passed as plain handles and addresses; here they come from
/// another heap.
fn streams_and_memory_come_as_numbers() {
    let outcome = World::run_threads(1, |world| {
        let (theirs, heap) =
            (SymmetricHeap::open(&world, options())?, SymmetricHeap::open(&world, options())?);
        let (stream, memory) = (theirs.stream()?, theirs.full::<f32>(1000, 1.5)?);
        let (raw, address) = (stream.raw_handle(), theirs.resolve(memory, 0)? as u64);
        // SAFETY: `stream`, which keeps the driver's stream alive, is dropped after the last use of
        // `same`.
        let same = unsafe { heap.stream_from_raw(raw) }?;
        assert_eq!(same.raw_handle(), raw);
        // SAFETY: `memory` is freed after the imported slice, and only this heap uses it until
        // then.
        let imported = unsafe { heap.import(address as *mut f32, 1000) }?;
        let y = heap.zeros::<f32>(1000)?;
        heap.copy_on(&same, (y, 0), (imported, 0))?;
        same.sync()?;
        assert_eq!(heap.read(y)?, [1.5; 1000]);
        // The other heap's own `Stream` is refused, although it has the same handle.
        assert_eq!(heap.copy_on(&stream, (y, 0), (y, 0)).unwrap_err().kind(), ErrorKind::Usage);
        drop(same);
        heap.free(imported)?;
        heap.close()?;
        stream.sync()?;
        theirs.free(memory)?;
        theirs.close()
    });
    outcome.unwrap();
}

/// Tests that without a driver, opening a heap fails with an error that names the missing library
/// and the places searched.
fn a_heap_without_a_device_is_an_error() {
    let error = World::run_threads(2, |world| SymmetricHeap::open(&world, options()).map(drop));
    let error = error.unwrap_err();
    let text = error.to_string();
    let driver = text.contains("libcuda") || text.contains("cuInit") || text.contains("devices");
    assert!(driver, "{text}");
}
