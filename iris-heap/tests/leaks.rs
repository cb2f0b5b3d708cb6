//! Leak test: a thousand worlds and heaps must leave nothing behind. It is a test program of its
//! own, because it counts resources of the whole process.

#![allow(unsafe_code, reason = "reads through the addresses that the heap gave")]

use std::fs;

use iris_heap::{Error, HeapOptions, SymmetricHeap, World};

/// Numbers of this process's descriptors, threads, mappings made by iris, and all mappings.
fn state() -> [usize; 4] {
    let count = |folder: &str| fs::read_dir(folder).unwrap().count();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let ours = maps.lines().filter(|l| l.contains("memfd:iris")).count();
    [count("/proc/self/fd"), count("/proc/self/task"), ours, maps.lines().count()]
}

#[test]
fn a_thousand_worlds_leave_nothing() {
    let round = |number: usize| {
        let rank = |w: World| {
            let heap = SymmetricHeap::open(&w, HeapOptions::new().threads(2))?;
            let x = heap.ones::<f32>(1000)?;
            let stream = heap.stream()?;
            stream.launch_cpu("nothing", 2, std::sync::Arc::new(|_| Ok(())))?;
            stream.sync()?;
            if number.is_multiple_of(2) {
                heap.free(x)?;
            }
            let mut own = [0f32; 4];
            // SAFETY: the array outlives the slice, which is freed at once.
            let import = unsafe { heap.import(own.as_mut_ptr(), 4) }?;
            heap.free(import)?;
            let part = w.split(Some(w.rank() as u32), 0)?;
            part.map_or(Ok(()), |part| part.close())?;
            // In some rounds neither the heap nor the world is closed.
            if number % 10 == 3 {
                return Ok(());
            }
            heap.close()?;
            if number % 10 != 6 {
                drop((heap, stream));
                w.close()?;
            }
            Ok::<_, Error>(())
        };
        World::run_threads(2, rank).unwrap();
    };
    // Warm-up rounds, after which the process has the resources that it keeps for good (thread
    // stacks, allocator arenas).
    (0..50).for_each(round);
    let settle = |want: [usize; 4]| {
        // The counts are polled, because threads of unclosed heaps are not joined and take a moment
        // to end. The number of mappings may differ by a few dozen: the C library has arenas of two
        // mappings each, whose number depends on which threads allocate at once. A mapping leaked
        // in every tenth round would add a hundred.
        let enough =
            |s: [usize; 4]| (0..3).all(|kind| s[kind] <= want[kind]) && s[3] < want[3] + 64;
        let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while !enough(state()) && std::time::Instant::now() < end {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert!(enough(state()), "{:?} expected, {:?} there", want, state());
    };
    let mut before = state();
    before[2] = 0;
    settle(before);
    (0..1000).for_each(round);
    settle(before);
}
