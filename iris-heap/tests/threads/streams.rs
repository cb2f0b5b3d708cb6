//! Tests of misused streams: memory of another heap, waits from enqueued work, heaps that close or
//! are dropped. Misuse is an error and never a hang; each test has a time limit.

#![allow(unsafe_code, reason = "copies to words that stay allocated")]

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use iris_heap::{Error, ErrorKind, Event, Group, Stream, SymSlice, SymmetricHeap, World};
use iris_testkit::error_texts::fails;

use super::{each, options};

/// Runs `f` on a thread of its own, and fails if it does not end within 300 s.
#[track_caller]
fn bounded<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, outcome) = mpsc::channel();
    let thread = std::thread::spawn(move || done.send(f()));
    match outcome.recv_timeout(Duration::from_secs(300)) {
        Ok(value) => value,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it waits for ever"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(thread.join().map(drop).unwrap_err())
        }
    }
}

/// Makes `N` heaps in a world of one rank.
fn heaps<const N: usize>() -> [Arc<SymmetricHeap>; N] {
    let world = World::threads(1).unwrap().remove(0);
    std::array::from_fn(|_| SymmetricHeap::open(&world, options()).unwrap())
}

/// Keeps a stream busy until a message is sent or the sender is dropped.
fn hold(stream: &Stream) -> mpsc::Sender<()> {
    let (go, gone) = mpsc::channel::<()>();
    let wait = move || {
        let _ = gone.recv_timeout(Duration::from_secs(400));
        Ok(())
    };
    stream.call_cpu("hold", wait).unwrap();
    go
}

/// Calls `f` from work on `stream` while this thread waits for all streams; returns the result of
/// `f`.
fn inside<T: Send + 'static>(
    heap: &Arc<SymmetricHeap>,
    stream: &Stream,
    f: impl FnOnce(Arc<SymmetricHeap>, Stream) -> T + Send + 'static,
) -> T {
    let (give, got) = mpsc::channel();
    let (both, begun) = (heap.clone(), mpsc::channel::<()>());
    let this = stream.clone();
    let call = move || {
        // After this sleep the other thread waits for all streams.
        let _ = begun.1.recv();
        std::thread::sleep(Duration::from_millis(20));
        let _ = give.send(f(both, this));
        Ok(())
    };
    stream.call_cpu("inside", call).unwrap();
    begun.0.send(()).unwrap();
    heap.finish().unwrap();
    got.recv().unwrap()
}

/// Tests that enqueued work cannot wait for streams: it would wait for its own end, or for a thread
/// that waits for it.
#[test]
fn what_is_enqueued_cannot_wait_for_streams() {
    let refused = |what: &str, outcome: Result<(), Error>| {
        let error = outcome.map_err(|e| (e.kind(), e.to_string()));
        let Err((ErrorKind::Usage, text)) = error else { panic!("{what}: {error:?}") };
        assert!(text.contains("enqueued"), "{what}: {text}");
    };
    type Action = fn(Arc<SymmetricHeap>, Stream) -> Result<(), Error>;
    let actions: [(&str, Action); 9] = [
        ("sync of the own stream", |_, stream| stream.sync()),
        ("sync of another stream", |heap, _| heap.stream()?.sync()),
        ("sync of an event", |_, stream| stream.record()?.sync()),
        ("finish", |heap, _| heap.finish()),
        ("close", |heap, _| heap.close()),
        ("alloc", |heap, _| heap.alloc::<u8>(1).map(drop)),
        ("free", |heap, _| heap.free_many(&[])),
        ("import", |heap, _| {
            let descriptor = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
            heap.import_descriptor::<u8>(descriptor, 1).map(drop)
        }),
        ("open", |heap, _| SymmetricHeap::open(heap.local_world(), options()).map(drop)),
    ];
    for (what, action) in actions {
        bounded(move || {
            let [heap] = heaps();
            let stream = heap.stream().unwrap();
            refused(what, inside(&heap, &stream, action));
            // The checks are repeated in a workgroup of a kernel, which is enqueued work, too.
            let outcomes = Arc::new(Mutex::new(Vec::new()));
            let (all, this, within) = (outcomes.clone(), stream.clone(), heap.clone());
            let kernel = move |_: Group| {
                let outcome = action(within.clone(), this.clone());
                all.lock().unwrap().push(outcome);
                Ok(())
            };
            stream.launch_cpu("inside", 2, Arc::new(kernel)).unwrap();
            stream.sync().unwrap();
            let outcomes = std::mem::take(&mut *outcomes.lock().unwrap());
            assert_eq!(outcomes.len(), 2);
            outcomes.into_iter().for_each(|outcome| refused(what, outcome));
            // The heap must be unchanged, so that it can be closed.
            heap.close().unwrap();
        });
    }
}

#[test]
fn what_is_enqueued_may_make_streams_and_enqueue() {
    let order = bounded(|| {
        let [heap] = heaps();
        let stream = heap.stream().unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let within = log.clone();
        let made = inside(&heap, &stream, move |heap, this| {
            let other = heap.stream()?;
            let (first, second) = (within.clone(), within);
            other.call_cpu("first", move || {
                first.lock().unwrap().push(1);
                Ok(())
            })?;
            this.wait(&other.record()?)?;
            this.call_cpu("second", move || {
                second.lock().unwrap().push(2);
                Ok(())
            })?;
            // Work that drops a handle of a heap and a stream; `stream` itself is dropped below
            // while it has work.
            drop((heap, other));
            Ok::<_, Error>(this)
        });
        drop(stream);
        made.unwrap().sync().unwrap();
        heap.close().unwrap();
        let log = log.lock().unwrap();
        log.clone()
    });
    assert_eq!(order, [1, 2]);
}

/// Tests that `close` can wait for enqueued work that asks the heap for a stream.
#[test]
fn a_heap_closes_while_work_asks_it_for_streams() {
    bounded(|| {
        let [heap] = heaps();
        let stream = heap.stream().unwrap();
        let (within, asked) = (heap.clone(), Arc::new(AtomicU32::new(0)));
        let count = asked.clone();
        stream
            .call_cpu("asks", move || {
                let end = std::time::Instant::now() + Duration::from_millis(200);
                while std::time::Instant::now() < end {
                    drop(within.stream());
                    count.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            })
            .unwrap();
        heap.close().unwrap();
        assert!(asked.load(Ordering::Relaxed) > 0);
    });
}

/// Tests that a sync waits for all accepted work although another thread closes the heap: a caller
/// that lends memory to the work takes it back after the sync, whatever the sync returns.
#[test]
fn a_sync_waits_for_work_of_a_heap_that_closes() {
    bounded(|| {
        for _ in 0..20 {
            let [heap] = heaps();
            let stream = heap.stream().unwrap();
            let ran = Arc::new(AtomicU32::new(0));
            std::thread::scope(|scope| {
                scope.spawn(|| heap.close().unwrap());
                // At most eight jobs wait, so that the closing thread reaches every step of its
                // close while there is work.
                let mut accepted = 0;
                loop {
                    let count = ran.clone();
                    let slow = move || {
                        std::thread::sleep(Duration::from_millis(1));
                        count.fetch_add(1, Ordering::Relaxed);
                        Ok(())
                    };
                    match stream.call_cpu("slow", slow) {
                        Ok(()) => accepted += 1,
                        Err(error) => {
                            break assert!(matches!(error, Error::Closed { .. }), "{error}");
                        }
                    }
                    while accepted - ran.load(Ordering::Relaxed) > 8 {
                        std::thread::yield_now();
                    }
                }
                let outcome = stream.sync();
                assert_eq!(ran.load(Ordering::Relaxed), accepted, "jobs run, jobs accepted");
                assert!(matches!(outcome, Err(Error::Closed { .. })), "{outcome:?}");
            });
        }
    });
}

/// Tests that two threads can wait for all streams while streams are made and dropped.
#[test]
fn several_threads_wait_for_all_streams() {
    bounded(|| {
        let [heap] = heaps();
        for _ in 0..50 {
            let done = Arc::new(AtomicU32::new(0));
            let stream = heap.stream().unwrap();
            let set = done.clone();
            let slow = move || {
                std::thread::sleep(Duration::from_millis(2));
                set.store(1, Ordering::Relaxed);
                Ok(())
            };
            stream.call_cpu("slow", slow).unwrap();
            drop(stream);
            std::thread::scope(|scope| {
                for _ in 0..2 {
                    scope.spawn(|| {
                        heap.finish().unwrap();
                        assert_eq!(done.load(Ordering::Relaxed), 1, "it did not wait");
                    });
                }
            });
        }
        heap.close().unwrap();
    });
}

/// Tests an enqueued closure whose destructor, which is code of the program, panics: the panic ends
/// no stream.
#[test]
fn a_destructor_that_panics_ends_no_stream() {
    struct Bomb(Arc<AtomicU32>);
    impl Drop for Bomb {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
            panic!("by design");
        }
    }
    bounded(|| {
        let [heap] = heaps();
        let (stream, dropped) = (heap.stream().unwrap(), Arc::new(AtomicU32::new(0)));
        let bomb = Bomb(dropped.clone());
        let kernel = move |_: Group| {
            let _ = &bomb;
            Ok(())
        };
        stream.launch_cpu("bomb", 2, Arc::new(kernel)).unwrap();
        assert!(matches!(stream.sync(), Err(Error::Panicked { .. })));
        assert_eq!(dropped.load(Ordering::Relaxed), 1);
        let ran = Arc::new(AtomicU32::new(0));
        let counter = ran.clone();
        let count = move |_: Group| {
            counter.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        stream.launch_cpu("after", 2, Arc::new(count)).unwrap();
        // The stream still runs work, but results may be undefined since the panic.
        assert!(matches!(stream.sync(), Err(Error::Aborted { .. })));
        assert_eq!(ran.load(Ordering::Relaxed), 2);
        heap.close().unwrap();
    });
}

/// Tests that a copy of one heap's memory on another heap's stream is refused: the first heap would
/// neither wait for the copy before it frees the memory, nor keep the memory mapped.
#[test]
fn a_copy_on_a_stream_of_another_heap_is_refused() {
    bounded(|| {
        let [heap, other] = heaps();
        let x: SymSlice<u8> = heap.alloc(1000).unwrap();
        let stream = other.stream().unwrap();
        let go = hold(&stream);
        let words = heap.alloc_device_words(2).unwrap();
        for outcome in [
            heap.write_on(&stream, x, &[7; 1000]),
            heap.copy_on(&stream, (x, 0), (x, 0)),
            // SAFETY: the words stay allocated.
            unsafe { heap.copy_words(&stream, words, &[(0, 1)]) },
            heap.check_stream("a test", &stream),
        ] {
            fails(outcome, &["another heap"]);
        }
        // No copy may write to the block after it is freed and reused, because all copies were
        // refused.
        heap.free(x).unwrap();
        let y: SymSlice<u8> = heap.zeros(1000).unwrap();
        drop(go);
        stream.sync().unwrap();
        assert_eq!(heap.read(y).unwrap(), [0; 1000]);

        heap.check_stream("a test", &heap.stream().unwrap()).unwrap();
        heap.close().unwrap();
        other.close().unwrap();
    });
}

/// Tests that an event orders streams of two heaps, whichever heap closes first. The event keeps no
/// memory of a heap mapped.
#[test]
fn an_event_of_another_heap_orders_and_keeps_nobody() {
    type End = fn(Arc<SymmetricHeap>);
    let ends: [(&str, End); 2] =
        [("closed", |heap| heap.close().unwrap()), ("dropped", |heap| drop(heap))];
    for (_, end) in ends {
        bounded(move || {
            let [heap, other] = heaps();
            let (stream, theirs) = (heap.stream().unwrap(), other.stream().unwrap());
            let go = hold(&theirs);
            let event: Event = theirs.record().unwrap();
            stream.wait(&event).unwrap();
            let behind = stream.record().unwrap();
            std::thread::sleep(Duration::from_millis(20));
            assert!(!behind.is_done());
            drop(go);
            drop(theirs);
            end(other);
            stream.sync().unwrap();
            assert!(behind.is_done() && event.is_done());
            heap.close().unwrap();
        });
    }
}

/// Tests that a kernel that runs when its heap is dropped keeps all memory mapped, imports
/// included.
#[test]
fn imported_memory_stays_while_work_may_use_it() {
    bounded(|| {
        let [heap] = heaps();
        let file = memory_file(1 << 20);
        let x: SymSlice<u8> = heap.import_descriptor(file, 1 << 20).unwrap();
        let address = heap.resolve(x, 0).unwrap() as usize;
        let stream = heap.stream().unwrap();
        let (go, gone): (_, Receiver<()>) = mpsc::channel();
        let gone = Mutex::new(gone);
        let (give, got) = mpsc::channel();
        let (begin, begun) = mpsc::channel();
        let kernel = move |_: Group| {
            let _ = begin.send(());
            let _ = gone.lock().unwrap().recv();
            let _ = give.send(mapped(address));
            Ok(())
        };
        stream.launch_cpu("reads", 1, Arc::new(kernel)).unwrap();
        // The launch must have begun before the heap is dropped, because work that has not begun is
        // skipped.
        begun.recv().unwrap();
        while Arc::strong_count(&heap) > 1 {
            std::thread::yield_now();
        }
        drop(heap);
        drop(go);
        assert!(got.recv().unwrap(), "unmapped under a kernel that runs");
    });
}

fn memory_file(bytes: u64) -> OwnedFd {
    use rustix::fs::{MemfdFlags, SealFlags};
    let file = rustix::fs::memfd_create("iris-test-import", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    file
}

/// Whether this process has a mapping that contains `address`.
fn mapped(address: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| {
        let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
        let (start, end) = range.unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        (number(start)..number(end)).contains(&address)
    })
}

/// Tests that both exchanges of `close` carry the call site in the program.
#[test]
fn the_call_site_of_every_exchange_is_the_callers() {
    let gave_up = Arc::new(AtomicBool::new(false));
    let outcomes = each(2, |world| {
        let heap = SymmetricHeap::open(&world, options())?;
        if world.rank() == 1 {
            // Work for which `close` waits between its two exchanges.
            let (stream, gave_up) = (heap.stream()?, gave_up.clone());
            stream.call_cpu("slow", move || {
                while !gave_up.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(())
            })?;
        }
        let line = line!() + 1;
        let closed = heap.close();
        gave_up.store(true, Ordering::Relaxed);
        closed.map_err(|e| {
            let here = format!("streams.rs:{line}");
            assert!(e.to_string().contains(&here), "{here} is not in: {e}");
            assert!(!e.to_string().contains("src/"), "{e}");
            e
        })
    });
    for outcome in outcomes {
        let error = outcome.unwrap_err();
        assert!(matches!(&error, Error::Absent { ranks, .. } if ranks == &[1]), "{error}");
    }
}

/// Tests that words copied by the host and by a stream at the same time are old or new. Under
/// ThreadSanitizer (see CONTRIBUTING.md) the test also shows that the copies are atomic.
#[test]
fn copies_that_race_yield_whole_words() {
    bounded(|| {
        const LEN: usize = 1000;
        let [heap] = heaps();
        let (x, y) = (heap.zeros::<u32>(LEN).unwrap(), heap.zeros::<u32>(LEN).unwrap());
        let signals = heap.alloc_signal(LEN).unwrap();
        heap.write(signals, &[0; LEN]).unwrap();
        let stream = heap.stream().unwrap();
        let whole = |words: Vec<u32>| words.iter().all(|&word| word == 0 || word == u32::MAX);
        for round in 0..100 {
            let word = if round % 2 == 0 { u32::MAX } else { 0 };
            heap.write_on(&stream, x, &[word; LEN]).unwrap();
            heap.copy_on(&stream, (y, 0), (x, 0)).unwrap();
            heap.write_on(&stream, signals, &[word as i32; LEN]).unwrap();
            assert!(whole(heap.read(x).unwrap()) && whole(heap.read(y).unwrap()));
            assert!(whole(heap.read(signals.cast::<u32>().unwrap()).unwrap()));
            heap.write(x, &[!word; LEN]).unwrap();
        }
        stream.sync().unwrap();
        heap.close().unwrap();
    });
}

/// Tests that memory is given back only when the streams of the rank have finished.
#[test]
fn memory_is_given_back_after_the_work_of_all_streams() {
    bounded(|| {
        let [heap] = heaps();
        let x = heap.zeros::<f32>(8).unwrap();
        let go = hold(&heap.stream().unwrap());
        let freed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                heap.free(x).unwrap();
                freed.store(true, Ordering::Release);
            });
            std::thread::sleep(Duration::from_millis(100));
            assert!(!freed.load(Ordering::Acquire), "a stream is still busy");
            drop(go);
        });
        heap.close().unwrap();
    });
}
