//! Tests of a thread that issues calls while another thread of its rank closes the heap. All of this
//! is safe code on the CPU.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use iris_heap::{SymmetricHeap, World};
use iris_ops::matmul::Options;
use iris_ops::{Matmul, MatmulArgs, Plan, Room, scope};

fn alone() -> World {
    World::threads(1).unwrap().remove(0)
}

/// Opens a heap of one rank and makes products of `n` x `n` matrices in it.
fn make(n: usize) -> (Arc<SymmetricHeap>, Matmul) {
    let world = alone();
    let plan = Options::new(n, n, n).plan(&world).unwrap();
    let heap = Plan::open_heap(&world, &[&plan], Room::matrices()).unwrap();
    let op = Matmul::new(&heap, &plan).unwrap();
    (heap, op)
}

/// Tests that `scope` returns only after the last write to the lent memory, although another thread
/// closes the heap.
#[test]
fn lent_memory_is_not_written_after_its_scope() {
    const N: usize = 256;
    for _ in 0..10 {
        let (heap, op) = make(N);
        let stream = heap.stream().unwrap();
        let (a, b, mut c) = (vec![1.0_f32; N * N], vec![1.0_f32; N * N], vec![0.0_f32; N * N]);
        let called = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let closing = threads.spawn(|| {
                while !called.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                heap.close()
            });
            let outcome: anyhow::Result<()> = scope(&heap, &stream, |scope| {
                let (a, b) = (scope.read(&a, N, N), scope.read(&b, N, N));
                let args = MatmulArgs::new(a, b, scope.write(&mut c, N, N));
                let mut ends = VecDeque::new();
                loop {
                    op.run(&args, &stream)?;
                    ends.push_back(stream.record()?);
                    called.store(true, Ordering::Relaxed);
                    if ends.len() > 8 {
                        let first = ends.pop_front().unwrap();
                        while !first.is_done() {
                            std::thread::yield_now();
                        }
                    }
                }
            });
            called.store(true, Ordering::Relaxed);
            let error = outcome.unwrap_err();
            assert!(error.to_string().contains("closed"), "{error:#}");
            c.fill(-1.0);
            closing.join().unwrap().unwrap();
        });
        drop((stream, op, heap));
        assert!(c.iter().all(|&x| x == -1.0), "written after the scope");
    }
}
