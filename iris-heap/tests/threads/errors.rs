//! Tests of error texts, and tests that every error is returned by some call of the program.

#![allow(unsafe_code, reason = "reads through the addresses that the heap gave")]

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use iris_heap::abi::{FAULT_WORDS, abort};
use iris_heap::{Error, ErrorKind, Group, Settings, Stream, SymmetricHeap, UniqueId, World};
use iris_testkit::worlds::{on_heaps, on_threads};

use super::{each, small};

/// Tests that an abort word of any value is reported, because a broken peer could write anything.
#[test]
fn an_abort_word_that_names_no_rank_is_an_error_that_shows_it() {
    on_heaps(2, small(), |w, heap| {
        let word = heap.memory().signal[w.rank()].address() as *mut i32;
        // SAFETY: `word` is the first word of this rank's signal segment, which is mapped while the
        // heap is open.
        let word = unsafe { AtomicI32::from_ptr(word) };
        let (own, peer) = (w.rank() as i32, 1 - w.rank() as i32);
        for code in [i32::MIN, -1, 3, abort::PEER_LOST + own, 1002, i32::MAX] {
            word.store(code, Ordering::Relaxed);
            let e = heap.check().unwrap_err();
            assert!(matches!(e, Error::Aborted { code: shown, .. } if shown == code), "{e}");
        }
        word.store(abort::PEER_LOST + peer, Ordering::Relaxed);
        let e = heap.check().unwrap_err();
        assert!(matches!(e, Error::PeerLost { rank } if rank == peer as usize), "{e}");
        word.store(2, Ordering::Relaxed);
        assert!(matches!(heap.check(), Err(Error::GaveUp { rank: 1, .. })));
        word.store(0, Ordering::Relaxed);
        heap.control().set_host_abort(i32::MIN);
        let e = heap.check().unwrap_err();
        assert!(matches!(e, Error::Aborted { code: i32::MIN, .. }), "{e}");
        Ok(())
    });
}

/// Tests that every rank gets an error if one rank has enqueued only a part of a call.
#[test]
fn a_poisoned_heap_is_of_no_further_use_on_any_rank() {
    on_heaps(3, small(), |w, heap| {
        if w.rank() == 1 {
            heap.poison(iris_heap::abi::abort::INCOMPLETE)?;
        }
        w.barrier()?;
        let e = heap.check().unwrap_err();
        match w.rank() {
            1 => assert!(e.to_string().contains("enqueued only in part"), "{e}"),
            _ => assert!(matches!(e, Error::GaveUp { rank: 1, .. }), "{e}"),
        }
        Ok(())
    });
}

/// Tests that after a fault every wait for results is an error, because the results are undefined.
#[test]
fn every_wait_after_a_fault_is_an_error() {
    on_heaps(1, small(), |_, heap| {
        let (stream, x) = (heap.stream()?, heap.zeros::<f32>(4)?);
        let reads = [heap.read_on(&stream, x)?, heap.read_on(&stream, x)?];
        assert!(heap.control().record_fault(&a_fault(&heap)));
        for other in [&stream, &stream, &heap.stream()?] {
            assert!(matches!(other.sync(), Err(Error::Fault { .. })));
        }
        for read in reads {
            assert!(matches!(read.wait(), Err(Error::Fault { .. })));
        }
        Ok(())
    });
}

fn a_fault(heap: &SymmetricHeap) -> [i32; FAULT_WORDS] {
    let op = heap.control().name_op("an_op") as i32;
    let (kind, call, tile, rank) = (iris_sync::FaultKind::NotEntered, 3, -1, 1);
    let fault = iris_sync::Fault { kind, op, call, tile, rank, seen: 2, wanted: 3, field: -1 };
    let mut words = [0; FAULT_WORDS];
    words[..8].copy_from_slice(&fault.to_words());
    words
}

/// Tests that the fault of an enqueued call is returned by the first wait or check, or else by
/// `close`.
#[test]
fn closing_returns_what_nobody_was_told() {
    World::run_threads(1, |w| {
        type Tell = fn(&SymmetricHeap, &Stream) -> Result<(), Error>;
        let tells: [(bool, Tell); 4] = [
            (false, |_, _| Ok(())),
            (false, |heap, _| heap.finish()),
            (true, |_, stream| stream.sync()),
            (true, |heap, stream| heap.check().and_then(|()| stream.sync())),
        ];
        for (told, tell) in tells {
            let heap = SymmetricHeap::open(&w, small())?;
            let stream = heap.stream()?;
            // The kernel records a fault and fails, like one that gives up a wait.
            let (words, memory) = (a_fault(&heap), heap.memory());
            let kernel = move |_: Group| {
                memory.control.record_fault(&words);
                memory.control.outcome()
            };
            stream.launch_cpu("gives up", 1, Arc::new(kernel))?;
            heap.finish()?;
            assert_eq!(tell(&heap, &stream).is_err(), told);
            // `close` must return the fault even after the stream was dropped.
            drop(stream);
            let closed = heap.close();
            match told {
                true => closed?,
                false => {
                    let fault = matches!(&closed, Err(Error::Fault { op, .. }) if op == "an_op");
                    assert!(fault, "{closed:?}");
                }
            }
            assert_eq!(heap.close().unwrap_err().kind(), ErrorKind::Closed);
        }
        // `close` must also return errors other than faults: the first one that no wait has
        // returned.
        let heap = SymmetricHeap::open(&w, small())?;
        let (stream, other) = (heap.stream()?, heap.stream()?);
        stream.call_cpu("first", || Err(Error::GaveUp { rank: 7, host: None, reason: None }))?;
        stream.sync().unwrap_err();
        other.call_cpu("second", || Err(Error::GaveUp { rank: 8, host: None, reason: None }))?;
        heap.finish()?;
        stream.call_cpu("third", || Err(Error::GaveUp { rank: 9, host: None, reason: None }))?;
        drop(other);
        heap.finish()?;
        // The error of a dropped stream must remain when new streams are made.
        drop(heap.stream()?);
        assert!(matches!(heap.close(), Err(Error::GaveUp { rank: 8, .. })));
        w.close()
    })
    .unwrap();
}

/// Tests the error of a host step that waited in vain: it also contains the cause, the fault that
/// this rank's kernel left before.
#[test]
fn a_host_that_waits_in_vain_shows_what_its_kernel_left() {
    let gave_up = AtomicBool::new(false);
    let results = each(2, |w| {
        let heap = SymmetricHeap::open(&w, small())?;
        if w.rank() == 0 {
            heap.control().record_fault(&a_fault(&heap));
            let met = w.barrier();
            gave_up.store(true, Ordering::Relaxed);
            return met;
        }
        // Rank 1 never calls `barrier`, and returns only when rank 0 has given up waiting.
        while !gave_up.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    });
    let e = results[0].as_ref().unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Timeout);
    let Error::AfterFault { fault, then } = e else { panic!("{e}") };
    assert!(matches!(&**fault, Error::Fault { op, .. } if op == "an_op"), "{e}");
    assert!(matches!(&**then, Error::Absent { ranks, .. } if ranks == &[1]), "{e}");
    assert!(e.to_string().contains("rank 1 has not entered"), "{e}");
}

/// Tests that the text of an error that explains a fault has the cause once: the fault is not added.
#[test]
fn an_error_that_explains_a_fault_stands_alone() {
    for reason in [Some("the disk is full"), None] {
        let results = each(2, |w| {
            let heap = SymmetricHeap::open(&w, small())?;
            if w.rank() == 0 {
                heap.control().record_fault(&a_fault(&heap));
            }
            w.barrier()?;
            match (w.rank(), reason) {
                (0, _) => return w.barrier(),
                (_, Some(reason)) => w.abort_with(reason),
                (_, None) => w.abort(),
            }
            Ok(())
        });
        let e = results[0].as_ref().unwrap_err();
        let (cause, is_told) = match reason {
            Some(reason) => (reason, matches!(e, Error::PeerAborted { rank: 1, .. })),
            None => ("is lost", matches!(e, Error::PeerLost { rank: 1 })),
        };
        let text = e.to_string();
        assert!(is_told && text.matches(cause).count() == 1, "{e:?}");
        assert!(!text.contains("has not entered"), "{text}");
    }
}

/// Tests that the panic of a rank's thread is not reported as the panic of a workgroup.
#[test]
fn who_panicked_is_named_as_what_it_is() {
    let panics = |w: World| -> Result<(), Error> {
        assert!(w.rank() == 5, "by design");
        Ok(())
    };
    let one = World::run_threads(1, panics).unwrap_err();
    let each = each(1, panics).remove(0).unwrap_err();
    for e in [one, each] {
        assert!(e.to_string().starts_with("iris-rank-0: panicked: by design; "), "{e}");
    }
    on_heaps(1, small().threads(2), |_, heap| {
        let stream = heap.stream()?;
        stream.call_cpu("a function", || panic!("by design"))?;
        let error = stream.sync().unwrap_err().to_string();
        assert!(error.starts_with("a function: panicked: by design; "), "{error}");
        let kernel = |g: Group| match g.index {
            1 => panic!("by design"),
            _ => Ok(()),
        };
        stream.launch_cpu("a kernel", 2, Arc::new(kernel))?;
        let e = stream.sync().unwrap_err().to_string();
        assert!(e.starts_with("a kernel, workgroup 1: panicked: by design; "), "{e}");
        Ok(())
    });
}

/// Tests that an error whose text includes its cause has no `source`: otherwise the cause would be
/// printed twice.
#[test]
fn causes_are_printed_once() {
    let file = std::fs::File::open("/dev/null").unwrap().into();
    on_heaps(1, small(), |_, heap| {
        let file = std::os::fd::OwnedFd::try_clone(&file).unwrap();
        let e = heap.import_descriptor::<u8>(file, 10).unwrap_err();
        let mut texts = vec![e.to_string()];
        let mut source = std::error::Error::source(&e);
        while let Some(error) = source {
            assert!(texts.iter().all(|t| !t.contains(&error.to_string())), "{texts:?}: {error}");
            texts.push(error.to_string());
            source = error.source();
        }
        let e = Error::other(std::io::Error::other("by design"));
        assert!(std::error::Error::source(&e).is_none() && e.to_string() == "by design");
        Ok(())
    });
}

/// Tests that each kind of wait ends at the deadline that the program set for it, while the others
/// are hours long.
#[test]
fn each_kind_of_wait_has_its_own_deadline() {
    let (long, short) = (Duration::from_secs(9999), Duration::from_millis(50));
    let settings = Settings::default().work(long).step(long).meeting(long);
    let absent = |outcome: Result<World, Error>| {
        let error = outcome.unwrap_err();
        assert!(matches!(&error, Error::Absent { waited, .. } if *waited < long), "{error}");
    };
    let id = UniqueId::new().unwrap();
    absent(World::from_unique_id_with(&id, 0, 2, &settings.clone().meeting(short)));
    let alone = World::from_env_with(&settings.clone().step(short)).unwrap();
    assert_eq!(alone.settings().progress_deadline(), short);
    let heap = SymmetricHeap::open(&alone, small()).unwrap();
    assert_eq!(heap.view().progress_deadline_ns, short.as_nanos() as u64);
    assert_eq!(heap.view().entry_deadline_ns, long.as_nanos() as u64);
    heap.close().unwrap();
    alone.close().unwrap();
    let mut worlds = World::threads_with(2, &settings.work(short).step(short)).unwrap();
    let (_late, waits) = (worlds.pop().unwrap(), worlds.pop().unwrap());
    absent(waits.barrier().map(|()| waits));
}

/// Records that `rank` has not come, and tells all ranks, as a kernel does.
fn record_silence(heap: &SymmetricHeap, rank: i32) {
    let mut words = [0; FAULT_WORDS];
    (words[0], words[4]) = (iris_sync::FaultKind::NotEntered as i32, rank);
    assert!(heap.control().record_fault(&words));
    for signal in &heap.memory().signal {
        // SAFETY: `signal` is mapped while the heap is open, and begins with the abort word.
        let word = unsafe { AtomicI32::from_ptr(signal.address() as *mut i32) };
        word.store(rank + 1, Ordering::Relaxed);
    }
}

/// Tests that a rank which has waited in vain for another one, and leaves, tells the others that one's
/// name.
#[test]
fn a_rank_that_leaves_for_a_silent_rank_names_it() {
    let end = Barrier::new(3);
    let run = |world: World| {
        let heap = SymmetricHeap::open(&world, small()).unwrap();
        let told = match world.rank() {
            1 => {
                record_silence(&heap, 0);
                let own = heap.check();
                drop((heap, world));
                own
            }
            2 => world.barrier(),
            _ => Ok(()),
        };
        end.wait();
        told
    };
    let told = on_threads(World::threads(3).unwrap(), run);
    for rank in [1, 2] {
        let text = told[rank].as_ref().unwrap_err().to_string();
        assert!(text.contains("rank 0 has not entered"), "rank {rank}: {text}");
    }
}

/// Tests that a rank which has waited in vain for another one, and closes its heap, tells the others
/// that one's name.
#[test]
fn a_heap_that_is_closed_for_a_silent_rank_names_it() {
    World::run_threads(3, |world| {
        let heap = SymmetricHeap::open(&world, small())?;
        if world.rank() == 1 {
            record_silence(&heap, 0);
            assert!(matches!(heap.check(), Err(Error::Fault { .. })));
            heap.close()?;
        } else {
            let told = world.barrier().unwrap_err();
            assert!(matches!(told, Error::GaveUp { rank: 0, .. }), "{told}");
            drop(heap.close());
        }
        world.close()
    })
    .unwrap();
}

/// Tests that a heap which another rank's failure has ended is not closed well on a rank that has got no
/// error before.
#[test]
fn a_close_tells_the_failure_of_another_rank() {
    World::run_threads(2, |world| {
        let heap = SymmetricHeap::open(&world, small())?;
        if world.rank() == 1 {
            heap.poison(abort::INCOMPLETE)?;
        }
        world.barrier()?;
        let closed = heap.close();
        if world.rank() == 0 {
            assert!(matches!(closed, Err(Error::GaveUp { rank: 1, .. })), "{closed:?}");
        }
        world.close()
    })
    .unwrap();
}
