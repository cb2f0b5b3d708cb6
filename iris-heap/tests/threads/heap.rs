//! Tests of collectives, heaps and streams that all kinds of ranks share, and of their failures.

#![allow(unsafe_code, reason = "reads through the addresses that the heap gave")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use iris_heap::abi::abort;
use iris_heap::{DType, Error, Group, Request, Segment, SymmetricHeap, World};
use iris_testkit::error_texts::fails;
use iris_testkit::worlds::{on_heaps, on_threads};

use super::{each, options};

/// Polls `done` like a kernel, for at most 300 s, so that a failing test ends.
fn wait_until(done: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(300);
    while !done() {
        assert!(Instant::now() < until, "waited for ever");
        std::thread::yield_now();
    }
}

/// Checks that all ranks fail, and that `right` returns true for the rank and error of each.
#[track_caller]
fn all_fail<T>(results: Vec<Result<T, Error>>, right: impl Fn(usize, &Error) -> bool) {
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(_) => panic!("rank {rank} did not fail"),
            Err(e) => assert!(right(rank, &e), "rank {rank}: {e} ({e:?})"),
        }
    }
}

#[test]
fn bytes_are_gathered_by_rank() {
    let sums = World::run_threads(4, |w| {
        for round in 0..50u8 {
            let all = w.allgather(&[w.rank() as u8, round])?;
            assert_eq!(all, [[0, round], [1, round], [2, round], [3, round]]);
            w.barrier()?;
        }
        Ok::<_, Error>(w.rank())
    });
    assert_eq!(sums.unwrap(), [0, 1, 2, 3]);
}

#[test]
fn bytes_of_the_root_reach_every_rank() {
    let of = |root: usize| vec![root as u8; 1000 * root];
    World::run_threads(4, |w| {
        for root in 0..4 {
            assert_eq!(w.broadcast(root, &of(w.rank()))?, of(root));
        }
        assert!(matches!(w.broadcast(4, b""), Err(Error::Invalid { .. })));
        Ok::<_, Error>(())
    })
    .unwrap();
    // Ranks name different roots, one of which is no rank.
    for roots in [[0, 1], [0, 7]] {
        let error = World::run_threads(2, |w| w.broadcast(roots[w.rank()], b"x")).unwrap_err();
        for root in roots {
            assert!(error.to_string().contains(&format!("broadcast from rank {root} at")));
        }
    }
}

#[test]
fn a_world_of_one_needs_nobody() {
    let w = World::threads(1).unwrap().remove(0);
    assert_eq!(w.allgather(b"x").unwrap(), [b"x"]);
    assert_eq!(w.broadcast(0, b"x").unwrap(), b"x");
    let heap = SymmetricHeap::open(&w, options()).unwrap();
    assert_eq!(heap.read(heap.arange::<f32>(3).unwrap()).unwrap(), [0.0, 1.0, 2.0]);
    heap.close().unwrap();
    assert!(matches!(heap.alloc::<f32>(1), Err(Error::Closed { .. })));
    w.clone().close().unwrap();
    assert!(matches!(w.barrier(), Err(Error::Closed { .. })));
}

#[test]
fn sizes_of_worlds() {
    for size in [0, 4097] {
        fails(World::threads(size), &[&size.to_string(), "4096"]);
    }
}

#[test]
fn a_world_with_a_heap_does_not_close() {
    World::run_threads(2, |w| {
        let heap = (w.rank() == 0).then(|| w.clone());
        let part = w.split(heap.as_ref().map(|_| 0), 0)?;
        let e = w.clone().close().unwrap_err();
        assert!(matches!(e, Error::StillOpen { rank: 0, heaps: 0, worlds: 1 }), "{e}");
        part.map_or(Ok(()), |part| part.close())?;
        w.close()
    })
    .unwrap();
}

#[test]
fn every_rank_reads_what_its_peers_wrote() {
    on_heaps(4, options(), |w, heap| {
        let x = heap.rand::<f32>(100, 9)?;
        let y = heap.full(100, w.rank() as i32)?;
        assert_eq!((x.offset(), y.offset()), (0, 1024));
        for rank in 0..4 {
            let want: Vec<f32> =
                (0..100).map(|i| iris_heap::random_unit(9, rank, i) as f32).collect();
            assert_eq!(heap.read_from(x, rank)?, want);
            assert_eq!(heap.read_from(y.slice(5..7)?, rank)?, [rank as i32; 2]);
        }
        let view = heap.view();
        for rank in 0..4 {
            assert_eq!(heap.resolve(y, rank)? as u64, view.data[rank] + 1024);
        }
        assert_eq!((view.rank, view.size, view.data[4]), (w.rank() as u32, 4, 0));
        let s = heap.alloc_signal(4)?;
        assert_eq!(s.offset(), 4096, "behind the reserved words");
        w.barrier()?;
        Ok(())
    });
}

#[test]
fn a_panicking_rank_tells_the_others() {
    let results = each(3, |w| {
        if w.rank() == 1 {
            panic!("by design");
        }
        w.barrier()
    });
    all_fail(results, |rank, e| match rank {
        1 => matches!(e, Error::Panicked { message, .. } if message == "by design"),
        _ => {
            matches!(e, Error::PeerAborted { rank: 1, reason, .. } if reason.contains("by design"))
        }
    });
    let e = World::run_threads(3, |w| {
        if w.rank() == 1 {
            panic!("by design");
        }
        w.barrier()
    });
    assert!(matches!(e, Err(Error::Panicked { .. })), "the cause, not its consequence: {e:?}");
}

#[test]
fn a_lost_peer_sets_the_abort_word_of_waiting_kernels() {
    let results = each(2, |w| {
        let heap = SymmetricHeap::open(&w, options())?;
        if w.rank() == 1 {
            return Err(Error::other(std::io::Error::other("by design")));
        }
        let stream = heap.stream()?;
        let control = heap.memory().control;
        let kernel = move |_: Group| {
            wait_until(|| control.host_abort() != 0);
            Ok(())
        };
        stream.launch_cpu("wait", 2, Arc::new(kernel))?;
        stream.sync()?;
        heap.check()
    });
    let told = results[0].as_ref().unwrap_err();
    assert!(
        matches!(told, Error::PeerAborted { rank: 1, reason, .. } if reason == "by design"),
        "{told}"
    );
}

#[test]
fn streams_keep_their_order_and_launches_theirs() {
    on_heaps(1, options().threads(3), |_, heap| {
        let (a, b) = (heap.stream()?, heap.stream()?);
        let log = Arc::new(std::sync::Mutex::new(Vec::new()));
        for i in 0..60u32 {
            let log = log.clone();
            let stream = if i % 3 == 0 { &a } else { &b };
            let kernel = move |g: Group| {
                log.lock().unwrap().push((i, g.index));
                Ok(())
            };
            stream.launch_cpu("log", 1 + i % 3, Arc::new(kernel))?;
        }
        a.sync()?;
        b.sync()?;
        let mut log = log.lock().unwrap().clone();
        assert!(log.is_sorted_by_key(|&(i, _)| i), "launches ran in the order of issue");
        log.sort_unstable();
        let want: Vec<_> = (0..60).flat_map(|i| (0..1 + i % 3).map(move |g| (i, g))).collect();
        assert_eq!(log, want, "every workgroup once");
        Ok(())
    });
}

#[test]
fn an_event_orders_two_streams() {
    on_heaps(1, options(), |_, heap| {
        let (a, b) = (heap.stream()?, heap.stream()?);
        for _ in 0..20 {
            let word = Arc::new(AtomicU32::new(0));
            let (first, second) = (word.clone(), word.clone());
            a.call_cpu("slow", move || {
                std::thread::sleep(Duration::from_millis(2));
                first.store(1, Ordering::Relaxed);
                Ok(())
            })?;
            let event = a.record()?;
            b.wait(&event)?;
            b.call_cpu("after", move || {
                assert_eq!(second.load(Ordering::Relaxed), 1);
                Ok(())
            })?;
            b.sync()?;
            assert!(event.is_done());
        }
        Ok(())
    });
}

#[test]
fn workgroups_of_a_launch_run_at_the_same_time() {
    on_heaps(2, options().threads(4), |_, heap| {
        let stream = heap.stream()?;
        let here = Arc::new(AtomicU32::new(0));
        let kernel = move |g: Group| {
            here.fetch_add(1, Ordering::Relaxed);
            wait_until(|| here.load(Ordering::Relaxed) >= g.count);
            Ok(())
        };
        stream.launch_cpu("meet", 4, Arc::new(kernel))?;
        stream.sync()?;
        let e = stream.launch_cpu("five", 5, Arc::new(|_| Ok(()))).unwrap_err();
        assert!(matches!(e, Error::TooManyGroups { groups: 5, threads: 4, .. }), "{e}");
        assert!(stream.launch_cpu("none", 0, Arc::new(|_| Ok(()))).is_err());
        Ok(())
    });
}

#[test]
fn the_first_error_comes_from_sync_once() {
    on_heaps(1, options(), |_, heap| {
        let stream = heap.stream()?;
        for word in [3, 4] {
            let fail = move |g: Group| match g.index {
                1 => Err(Error::GaveUp { rank: word, host: None, reason: None }),
                _ => Ok(()),
            };
            stream.launch_cpu("fail", 2, Arc::new(fail))?;
        }
        let done = Arc::new(AtomicU32::new(0));
        let after = done.clone();
        stream.call_cpu("after", move || {
            after.store(1, Ordering::Relaxed);
            Ok(())
        })?;
        assert!(matches!(stream.sync(), Err(Error::GaveUp { rank: 3, .. })));
        assert_eq!(done.load(Ordering::Relaxed), 1, "what follows is still done");
        stream.sync()?;
        Ok(())
    });
}

#[test]
fn work_that_panics_or_fails_releases_those_that_wait_for_it() {
    for (threads, panics) in [(1, true), (2, true), (2, false)] {
        let results = each(2, |w| {
            let heap = SymmetricHeap::open(&w, options().threads(threads))?;
            let stream = heap.stream()?;
            let (memory, rank) = (heap.memory(), w.rank());
            let kernel = move |g: Group| {
                if rank == 1 && g.index + 1 == g.count {
                    panic!("by design");
                }
                wait_until(|| memory.control.host_abort() != 0 || abort_word(&memory, rank) != 0);
                Ok(())
            };
            let own = || Err(Error::other(std::io::Error::other("not finite")));
            match rank == 1 && !panics {
                true => stream.call_cpu("own", own)?,
                false => stream.launch_cpu("panic", threads as u32, Arc::new(kernel))?,
            }
            let outcome = stream.sync();
            let check = heap.check();
            let expected = match (rank, &check) {
                (0, Err(Error::GaveUp { rank, .. })) => *rank == 1,
                (1, Err(Error::Aborted { .. })) => true,
                _ => false,
            };
            assert!(expected, "{check:?}");
            w.barrier()?; // the close of a failed heap waits for no rank
            heap.close()?;
            outcome
        });
        assert!(results[0].is_ok());
        let e = results[1].as_ref().unwrap_err();
        let is_own = match e {
            Error::Panicked { group, .. } => panics && *group == Some(threads as u32 - 1),
            e => !panics && e.to_string().contains("not finite"),
        };
        assert!(is_own, "{e}");
    }
}

fn abort_word(memory: &iris_heap::Memory, rank: usize) -> i32 {
    let word = memory.signal[rank].address() as *mut i32;
    // SAFETY: `word` is the first word of a signal segment, which is mapped while `memory` is held.
    unsafe { std::sync::atomic::AtomicI32::from_ptr(word) }.load(Ordering::Acquire)
}

/// Tests that a rank whose heap is of no use because a peer was lost tells that to ranks that do not
/// know it, and not that it has given up itself.
#[test]
fn a_poisoned_heap_tells_the_loss_that_is_the_reason() {
    on_threads(World::threads(3).unwrap(), |world: World| {
        let heap = SymmetricHeap::open(&world, options()).unwrap();
        let memory = heap.memory();
        world.barrier().unwrap();
        if world.rank() == 2 {
            return world.abort();
        }
        wait_until(|| memory.control.host_abort() != 0);
        heap.poison(abort::CLOSED).unwrap();
        let told: Vec<_> = (0..3).map(|rank| abort_word(&memory, rank)).collect();
        assert_eq!(told, [abort::PEER_LOST + 2; 3]);
        assert_eq!(world.lost(), Some(2));
    });
}

#[test]
fn copies_in_stream_order() {
    World::run_threads(2, |w| {
        let heap = SymmetricHeap::open(&w, options())?;
        let stream = heap.stream()?;
        let (x, y) = (heap.zeros::<f32>(10)?, heap.zeros::<f32>(10)?);
        heap.write_on(&stream, x, &[w.rank() as f32 + 1.0; 10])?;
        stream.sync()?;
        w.barrier()?;
        let peer = 1 - w.rank();
        heap.copy_on(&stream, (y, w.rank()), (x, peer))?;
        stream.sync()?;
        assert_eq!(heap.read(y)?, [peer as f32 + 1.0; 10]);
        assert!(heap.write_on(&stream, x, &[0.0; 9]).is_err());
        assert!(heap.copy_on(&stream, (y, 2), (x, 0)).is_err());
        heap.close()?;
        assert!(matches!(stream.record(), Err(Error::Closed { .. })));
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[test]
fn a_dropped_heap_waits_for_nobody() {
    let w = World::threads(1).unwrap().remove(0);
    let heap = SymmetricHeap::open(&w, options()).unwrap();
    let stream = heap.stream().unwrap();
    let control = heap.memory().control;
    let (leave, seen) = std::sync::mpsc::channel();
    let kernel = move |_: Group| {
        leave.send("running").map_err(Error::other)?;
        wait_until(|| control.host_abort() != 0);
        leave.send("left").map_err(Error::other)
    };
    stream.launch_cpu("wait", 2, Arc::new(kernel)).unwrap();
    let next = || seen.recv_timeout(Duration::from_secs(300)).unwrap();
    assert_eq!([next(), next()], ["running"; 2]);
    drop(heap);
    assert_eq!([next(), next()], ["left"; 2]);
}

#[test]
fn all_or_nothing_in_one_step() {
    on_heaps(2, options(), |_, heap| {
        let before = heap.free_bytes(Segment::Data);
        let request = |bytes| Request::new(Segment::Data, bytes, "inbox");
        let signal = Request::new(Segment::Signal, 128, "flags");
        let e = heap.alloc_many("op", &[request(1 << 19), request(1 << 20), signal.clone()]);
        match e.unwrap_err() {
            Error::OutOfHeap { asked, free, largest, total, what, name, .. } => {
                assert_eq!((asked, free, largest), (1 << 20, 1 << 19, 1 << 19));
                assert_eq!(total, (1 << 19) + (1 << 20), "of data memory");
                assert_eq!((what.as_str(), name.as_ref()), ("op", "inbox"));
            }
            e => panic!("{e}"),
        }
        assert_eq!(heap.free_bytes(Segment::Data), before);
        let got = heap.alloc_many("op", &[request(10), signal])?;
        assert_eq!(got[0].bytes(), 10);
        heap.free_many(&got)?;
        assert_eq!(heap.free_bytes(Segment::Data), before);
        Ok(())
    });
}

#[test]
fn a_segment_that_cannot_be_allocated_is_refused_on_all_ranks() {
    for wrong in [0..1, 0..2] {
        let results = each(2, |w| {
            let heap = SymmetricHeap::open(&w, options())?;
            let segment = match wrong.contains(&w.rank()) {
                true => Segment::Registered(0),
                false => Segment::Data,
            };
            let before = heap.free_bytes(Segment::Data);
            let got = heap.alloc_many("op", &[Request::new(segment, 64, "inbox")]);
            assert_eq!(heap.free_bytes(Segment::Data), before);
            heap.close()?;
            got
        });
        all_fail(results, |_, e| match wrong.len() {
            1 => matches!(e, Error::Disagreement { .. }) && e.to_string().contains("registered 0"),
            _ => e.to_string().contains("segment of a request is registered 0"),
        });
    }
}

#[test]
fn a_refused_step_waits_for_nothing() {
    on_heaps(1, options(), |_, heap| {
        let x = heap.alloc::<u8>(10)?;
        heap.free(x)?;
        let stream = heap.stream()?;
        let (go, gone) = std::sync::mpsc::channel();
        stream.call_cpu("wait", move || {
            // Work for which `free` must not wait: if it did, only the timeout would end the wait.
            let _ = gone.recv_timeout(Duration::from_secs(10));
            Ok(())
        })?;
        let done = stream.record()?;
        assert!(matches!(heap.free(x), Err(Error::NotAllocated { .. })));
        assert!(!done.is_done(), "it waited for the stream");
        go.send(()).unwrap();
        heap.finish()?;
        assert!(done.is_done());
        Ok(())
    });
}

#[test]
fn imported_memory_is_a_slice() {
    on_heaps(2, options(), |w, heap| {
        let mut mine = vec![w.rank() as f32; 16];
        // SAFETY: `mine` outlives the slice, and is not accessed directly before the slice is freed
        // below.
        let x = unsafe { heap.import(mine.as_mut_ptr(), 16) }?;
        assert_eq!(x.segment(), Segment::Registered(0));
        assert_eq!(heap.read_from(x.slice(3..5)?, 1)?, [1.0; 2]);
        w.barrier()?;
        heap.write(x.slice(0..1)?, &[9.0])?;
        heap.free(x)?;
        assert_eq!(mine[..2], [9.0, w.rank() as f32]);
        assert!(matches!(heap.read(x), Err(Error::NotAllocated { .. })));
        // A later import may take the number of the one that was given back, but not its slices.
        // SAFETY: as above.
        let next = unsafe { heap.import(mine.as_mut_ptr(), 16) }?;
        assert!(matches!(heap.read(x), Err(Error::NotAllocated { .. })));
        heap.free(next)?;
        Ok(())
    });
}

#[test]
fn device_words_are_local_and_zero() {
    on_heaps(2, options(), |w, heap| {
        if w.rank() == 1 {
            heap.alloc_device_words(5)?;
        }
        let d = heap.alloc_device_words(33)?;
        assert_eq!((d.offset(), d.len()), (128 * w.rank() as u64, 33));
        let address = heap.resolve_device_words(d)? as u64;
        assert_eq!(address, heap.view().device_words + d.offset());
        assert_eq!(heap.read_device_words(d)?, [0; 33]);
        heap.write_device_words(d, &[7; 33])?;
        heap.free_device_words(d)?;
        // Later words may lie at the same place, and are 0 there.
        let next = heap.alloc_device_words(33)?;
        assert_eq!((next.offset(), heap.read_device_words(next)?), (d.offset(), vec![0; 33]));
        assert!(heap.resolve_device_words(d).is_err());
        assert!(heap.free_device_words(d).is_err());
        heap.free_device_words(next)?;
        assert!(matches!(heap.alloc_device_words(1 << 20), Err(Error::OutOfHeap { .. })));
        Ok(())
    });
}

#[test]
fn types_of_elements() {
    on_heaps(1, options(), |_, heap| {
        assert_eq!(heap.read(heap.ones::<half::bf16>(2)?)?, [half::bf16::ONE; 2]);
        assert_eq!(heap.read(heap.arange::<half::f16>(3)?)?[2].to_f32(), 2.0);
        let r = heap.read(heap.rand::<i32>(4000, 1)?)?;
        assert!((-8..=8).all(|v| r.contains(&v)) && r.iter().all(|v| v.abs() <= 8));
        let r = heap.read(heap.rand::<u8>(4000, 1)?)?;
        assert!((0..=8).all(|v| r.contains(&v)) && r.iter().all(|&v| v <= 8));
        assert_eq!(DType::BF16.size(), 2);
        Ok(())
    });
}
