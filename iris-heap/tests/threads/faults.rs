//! Tests of misuse: it must be an error on every rank, name the problem, and change nothing.

#![allow(unsafe_code, reason = "reads through the addresses that the heap gave")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use iris_heap::abi::abort;
use iris_heap::{
    BackendKind, Error, ErrorKind, Request, Segment, Settings, SymmetricHeap, UniqueId, World,
};
use iris_testkit::error_texts::fails;
use iris_testkit::worlds::{on_heaps, on_threads};

use super::{close, each, small};

/// Peak virtual memory of this process, in bytes.
fn mapped_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmPeak:")).unwrap();
    1024 * line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
}

#[test]
fn a_full_heap_names_its_numbers_and_stays_as_it_was() {
    on_heaps(3, small(), |_, heap| {
        let blocks: Vec<_> =
            (0..64).map(|_| heap.alloc::<u8>(1024)).collect::<Result<_, Error>>()?;
        for i in [3, 4, 10] {
            heap.free(blocks[i])?;
        }
        match heap.alloc::<f32>(1024).unwrap_err() {
            Error::OutOfHeap { asked, free, largest, segment, .. } => {
                assert_eq!((asked, free, largest), (4096, 3072, 2048));
                assert_eq!(segment, "data");
            }
            e => panic!("{e}"),
        }
        assert_eq!(heap.alloc::<u8>(2048)?.offset(), 3072);
        assert_eq!(heap.alloc::<u8>(1)?.offset(), 10240);
        let e = heap.alloc::<f32>(usize::MAX).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::OutOfMemory);
        assert!(e.to_string().contains("free 0"), "{e}");
        Ok(())
    });
}

#[test]
fn what_a_request_is_for_is_agreed() {
    on_heaps(2, small(), |w, heap| {
        let request = Request::new(Segment::Signal, 60 << 10, format!("words of {}", w.rank()));
        match heap.alloc_many("op", &[request]).unwrap_err() {
            Error::Disagreement { ranks, values, item, what } => {
                assert_eq!((ranks, item.as_str()), (vec![1], "request"));
                assert!(values[1].1.contains("words of 1"), "{values:?}");
                assert!(what.contains("faults.rs"), "{what}");
            }
            e => panic!("{e}"),
        }
        Ok(())
    });
}

#[test]
fn different_sizes_are_a_disagreement() {
    on_heaps(3, small(), |w, heap| {
        let before = heap.free_bytes(Segment::Data);
        match heap.alloc::<f32>(if w.rank() == 1 { 7 } else { 6 }).unwrap_err() {
            Error::Disagreement { ranks, values, .. } => {
                assert_eq!(ranks, [1]);
                assert!(values[1].1.contains("28 bytes") && values[2].1.contains("24 bytes"));
            }
            e => panic!("{e}"),
        }
        assert_eq!(heap.free_bytes(Segment::Data), before);
        // Request for another element type, which must be refused even though the size is equal.
        let e = match w.rank() {
            0 => alloc_named(&heap, "f32 x 6"),
            _ => alloc_named(&heap, "i32 x 6"),
        };
        assert_eq!(e.unwrap_err().kind(), ErrorKind::Disagreement);
        assert_eq!(heap.alloc::<f32>(6)?.offset(), 0);
        Ok(())
    });
}

/// Allocates 24 bytes called `name`, from one call site on all ranks.
fn alloc_named(heap: &SymmetricHeap, name: &'static str) -> Result<(), Error> {
    heap.alloc_many("alloc", &[Request::new(Segment::Data, 24, name)]).map(drop)
}

#[test]
fn ranks_that_do_not_allocate_are_named() {
    let gave_up = AtomicUsize::new(0);
    let results = each(4, |w| {
        let heap = SymmetricHeap::open(&w, small())?;
        while w.rank() % 2 == 1 && gave_up.load(Ordering::Relaxed) < 2 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let before = heap.free_bytes(Segment::Data);
        let outcome = heap.alloc::<f32>(6);
        gave_up.fetch_add(1, Ordering::Relaxed);
        assert_eq!(heap.free_bytes(Segment::Data), before);
        outcome
    });
    for (rank, result) in results.into_iter().enumerate() {
        let e = result.unwrap_err();
        // The ranks that arrive late must get the reason for which the other ranks gave up.
        assert!(matches!(&e, Error::Absent { ranks, .. } if ranks == &[1, 3]), "rank {rank}: {e}");
        assert!(e.to_string().contains("alloc at") && e.to_string().contains("faults.rs"), "{e}");
        assert_eq!(e.kind(), ErrorKind::Timeout);
    }
}

#[test]
fn other_calls_are_a_mismatch() {
    on_heaps(3, small(), |w, heap| {
        let e = match w.rank() {
            2 => w.barrier().unwrap_err(),
            _ => heap.zeros::<f32>(5).unwrap_err(),
        };
        match &e {
            Error::Mismatch { ranks, calls } => {
                assert_eq!(ranks, &[2]);
                assert!(calls[0].1.starts_with("alloc at") && calls[2].1.starts_with("barrier at"));
            }
            e => panic!("{e}"),
        }
        assert_eq!(e.kind(), ErrorKind::Disagreement);
        // The ranks must still be in step after the error.
        assert_eq!(heap.alloc::<u8>(1)?.offset(), 0);
        Ok(())
    });
}

#[test]
fn blocks_are_freed_in_one_order() {
    on_heaps(2, small(), |w, heap| {
        let (x, y) = (heap.zeros::<f32>(5)?, heap.zeros::<f32>(5)?);
        let e = heap.free(if w.rank() == 0 { x } else { y }).unwrap_err();
        match &e {
            Error::Disagreement { values, .. } => {
                assert!(
                    values[0].1.starts_with("data 0 ") && values[1].1.starts_with("data 1024 ")
                );
            }
            e => panic!("{e}"),
        }
        heap.read(x)?;
        heap.free(x)?;
        heap.free(y)?;
        assert_eq!(heap.free_bytes(Segment::Data), (64 << 10, 64 << 10));
        Ok(())
    });
}

#[test]
fn use_after_free_and_after_close() {
    World::run_threads(2, |w| {
        let heap = SymmetricHeap::open(&w, small())?;
        let x = heap.zeros::<f32>(5)?;
        let part = x.slice(2..4)?;
        let words = heap.alloc_signal(4)?;
        let mut mine = [0f32; 4];
        // SAFETY: the array outlives the slice, which is freed below.
        let imported = unsafe { heap.import(mine.as_mut_ptr(), 4) }?;
        for part in [
            part.raw(),
            x.slice(..4)?.raw(),
            x.slice(1..)?.raw(),
            x.slice(..0)?.raw(),
            words.slice(..3)?.raw(),
            imported.slice(..3)?.raw(),
            imported.slice(1..)?.raw(),
        ] {
            let e = heap.free_many(&[part]).unwrap_err();
            let rest = matches!(&e, Error::PartOfBlock { segment, offset, .. }
                if *segment == part.segment().to_string() && *offset == part.offset());
            assert!(rest, "a part is no block: {e}");
            assert_eq!(e.kind(), ErrorKind::Usage);
        }
        for twice in [x.raw(), words.raw(), imported.raw()] {
            let e = heap.free_many(&[twice, twice]).unwrap_err();
            assert!(matches!(e, Error::NotAllocated { .. }), "a block is freed once: {e}");
        }
        // The refused calls must have changed nothing, and the whole block can be freed under
        // another type.
        assert_eq!(heap.read(x)?, [0.0; 5]);
        heap.free(words.cast::<u8>()?)?;
        heap.free(imported)?;
        heap.free(x)?;
        let again = heap.zeros::<f32>(5)?;
        assert_eq!(again.offset(), x.offset());
        for e in [
            heap.read(x).unwrap_err(),
            heap.write(part, &[1.0; 2]).unwrap_err(),
            heap.resolve(x, 0).unwrap_err(),
            heap.free(x).unwrap_err(),
        ] {
            assert!(matches!(e, Error::NotAllocated { .. }), "the block is another's now: {e}");
        }
        heap.close()?;
        for e in [
            heap.read(again).unwrap_err(),
            heap.resolve(again, 0).map(drop).unwrap_err(),
            heap.alloc::<f32>(1).map(drop).unwrap_err(),
            heap.free(again).unwrap_err(),
            heap.stream().map(drop).unwrap_err(),
            heap.check().unwrap_err(),
            heap.alloc_device_words(1).map(drop).unwrap_err(),
            heap.close().unwrap_err(),
        ] {
            assert!(matches!(e, Error::Closed { .. }), "{e}");
        }
        w.close()
    })
    .unwrap();
}

#[test]
fn slices_of_another_heap_and_out_of_bounds() {
    World::run_threads(2, |w| {
        let a = SymmetricHeap::open(&w, small())?;
        let b = SymmetricHeap::open(&w, small())?;
        assert_ne!(a.id(), b.id());
        let (x, _y) = (a.zeros::<f32>(5)?, b.zeros::<f32>(5)?);
        let words = a.alloc_device_words(1)?;
        for e in [
            b.read(x).map(drop).unwrap_err(),
            b.resolve(x, 0).map(drop).unwrap_err(),
            b.free(x).unwrap_err(),
            b.resolve_device_words(words).map(drop).unwrap_err(),
        ] {
            assert!(
                matches!(e, Error::ForeignSlice { slice, heap }
                if (slice, heap) == (a.id(), b.id())),
                "{e}"
            );
        }
        fails(a.resolve(x, 2), &["rank of resolve is 2: expected 0 to 1"]);
        assert!(a.write(x, &[0.0; 6]).unwrap_err().to_string().contains("is 6: expected 5"));
        b.close()?;
        close(&a)
    })
    .unwrap();
}

#[test]
fn one_rank_without_its_part_stops_all() {
    on_heaps(2, small(), |w, heap| {
        let x = heap.zeros::<f32>(5)?;
        // Rank 1 passes a slice of another heap, with equal offset and serial number.
        let other = SymmetricHeap::open(&w, small())?;
        let y = other.zeros::<f32>(5)?;
        let e = heap.free(if w.rank() == 1 { y } else { x }).unwrap_err();
        match w.rank() {
            1 => assert!(matches!(e, Error::ForeignSlice { .. }), "{e}"),
            _ => assert!(matches!(e, Error::PeerFailed { rank: 1, .. }), "{e}"),
        }
        heap.read(x)?;
        other.close()?;
        Ok(())
    });
}

#[test]
fn options_that_differ_or_cannot_be() {
    World::run_threads(3, |w| {
        let bytes = (w.rank() as u64 / 2 + 1) << 20;
        fails(
            SymmetricHeap::open(&w, small().data_bytes(bytes)),
            &["data_bytes is 1048576 on rank 0 and 1; 2097152 on rank 2"],
        );
        let e = SymmetricHeap::open(&w, small().backend(BackendKind::Hip)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Unsupported, "{e}");
        fails(SymmetricHeap::open(&w, small().signal_bytes(100)), &["signal_bytes is 100"]);
        // A segment with too many words must be refused: kernels number words by 32 bits, so two
        // words would otherwise have the same number.
        let (most, page, before) = (16 << 30, 4096, mapped_bytes());
        let e = SymmetricHeap::open(&w, small().signal_bytes(most + page)).unwrap_err();
        assert!(
            e.to_string().contains("at most 17179869184") && mapped_bytes() < before + most,
            "{e}"
        );
        let e = SymmetricHeap::open(&w, small().device_words(most / 4 + 1)).unwrap_err();
        assert!(
            e.to_string().contains("at most 4294967296") && mapped_bytes() < before + most,
            "{e}"
        );
        for words in [u64::MAX, u64::MAX / 4 + 1] {
            let e = SymmetricHeap::open(&w, small().device_words(words)).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Usage, "{e}");
        }
        let e = SymmetricHeap::open(&w, small().data_bytes(u64::MAX)).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Usage, "{e}");
        let e = SymmetricHeap::open(&w, small().threads(1 - w.rank().min(1))).map(drop);
        match w.rank() {
            0 => assert!(matches!(e, Err(Error::PeerFailed { rank: 1, .. })), "{e:?}"),
            _ => assert!(matches!(e, Err(Error::Invalid { .. })), "{e:?}"),
        }
        w.barrier()?;
        w.close()
    })
    .unwrap();
}

#[test]
fn a_rank_that_leaves_while_others_open_is_lost() {
    let results = each(3, |w| {
        if w.rank() == 2 {
            w.abort();
            return Ok(());
        }
        SymmetricHeap::open(&w, small()).map(drop)
    });
    for result in &results[..2] {
        assert!(matches!(result, Err(Error::PeerLost { rank: 2 })), "{result:?}");
    }
}

#[test]
fn a_rank_that_aborts_does_not_call_itself_lost() {
    let results = each(2, |w| {
        let heap = SymmetricHeap::open(&w, small())?;
        w.barrier()?;
        if w.rank() == 1 {
            w.abort();
            return heap.check();
        }
        let ended = Instant::now() + Duration::from_secs(60);
        while heap.check().is_ok() && Instant::now() < ended {
            std::thread::yield_now();
        }
        heap.check()
    });
    assert!(matches!(results[0], Err(Error::PeerLost { rank: 1 })), "{results:?}");
    let own = matches!(results[1], Err(Error::Aborted { code: abort::USER, .. }));
    assert!(own, "{results:?}");
}

#[test]
fn an_open_heap_keeps_the_world_open() {
    World::run_threads(2, |w| {
        let heap = SymmetricHeap::open(&w, small())?;
        let e = w.close().unwrap_err();
        assert!(matches!(e, Error::StillOpen { rank: 0, heaps: 1, worlds: 0 }), "{e}");
        // The world must still be usable, although `w` is its only handle.
        w.barrier()?;
        close(&heap)?;
        assert_eq!(w.close().unwrap_err().kind(), ErrorKind::Closed);
        Ok::<_, Error>(())
    })
    .unwrap();
}

#[test]
fn deadlines_that_are_none_make_no_world() {
    for factor in [-1.0, -0.0, 0.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 3e16, 1.1e6] {
        let settings = Settings::default().deadline(factor);
        fails(
            World::threads_with(1, &settings).map(drop),
            &[&format!("factor on deadlines is {factor}")],
        );
        let each = World::run_threads_each(1, &settings, |_| Ok::<_, Error>(())).map(drop);
        assert_eq!(each.unwrap_err().kind(), ErrorKind::Usage, "{factor}");
    }
}

/// Tests that all ranks show the reason of the rank that failed first, even if others abort too.
fn check_reason(worlds: impl IntoIterator<Item = (usize, World)>) {
    on_threads(worlds, |(rank, world): (usize, World)| {
        let heap = SymmetricHeap::open(&world, small()).unwrap();
        if rank == 1 {
            return world.abort_with("the tokenizer has no file");
        }
        // The ranks of another node than that of rank 1 can close their heap.
        let closed = (world.node() == 0).then(|| heap.close().unwrap_err());
        for told in [Some(world.barrier().unwrap_err()), closed].into_iter().flatten() {
            let text = told.to_string();
            assert!(matches!(told, Error::PeerAborted { rank: 1, .. }), "{text}");
            assert!(text.contains("gave up: the tokenizer has no file;"), "{text}");
        }
        world.abort_with("a consequence");
    });
}

#[test]
fn the_first_reason_of_an_abort_is_shown_by_all() {
    check_reason(World::threads(3).unwrap().into_iter().enumerate());
    // Worlds of processes, by threads of this one.
    let id = UniqueId::new().unwrap();
    check_reason(on_threads(0..3, |rank| (rank, World::from_unique_id(&id, rank, 3).unwrap())));
    // Nodes of two ranks.
    let nodes = World::threads_on_nodes(2, 2, &Settings::default()).unwrap();
    check_reason(nodes.into_iter().enumerate());
}

/// Tests that the others show the error or panic with which the function of a rank has ended.
#[test]
fn the_error_that_ends_a_rank_is_shown_by_all() {
    for panics in [false, true] {
        let rank = |world: World| -> Result<(), Error> {
            if world.rank() != 1 {
                return world.barrier();
            }
            if panics {
                panic!("out of paper");
            }
            Err(Error::other(std::io::Error::other("out of paper")))
        };
        for told in [
            World::run_threads_each(3, &Settings::default(), rank).unwrap(),
            World::run_nodes_each((2, 2), &Settings::default(), rank).unwrap(),
        ] {
            for (rank, told) in told.into_iter().enumerate().filter(|(rank, _)| *rank != 1) {
                let told = told.unwrap_err();
                let text = told.to_string();
                assert!(matches!(told, Error::PeerAborted { rank: 1, .. }), "rank {rank}: {text}");
                assert!(text.contains("gave up: ") && text.contains("out of paper"), "{text}");
            }
        }
    }
}
