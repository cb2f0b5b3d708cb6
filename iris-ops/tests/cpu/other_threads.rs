//! Tests of a thread that issues calls while another thread of its rank closes the heap, frees a
//! matrix of the calls or copies it. All of this is safe code on the CPU.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use iris_heap::{BackendKind, Stream, SymSlice, SymmetricHeap, World};
use iris_ops::comm::{self, Comm};
use iris_ops::matmul::Options;
use iris_ops::{HeapReserve, MatRef, Matmul, MatmulArgs, MatrixArg, Plan, scope};

fn alone() -> World {
    World::threads(1).unwrap().remove(0)
}

/// Opens a heap of one rank and makes products of `n` x `n` matrices in it.
fn make(n: usize) -> (Arc<SymmetricHeap>, Matmul) {
    let world = alone();
    let plan = Options::new(n, n, n).plan(&world).unwrap();
    let heap = Plan::open_heap(&world, &[&plan], HeapReserve::matrices()).unwrap();
    let op = Matmul::new(&heap, &plan).unwrap();
    (heap, op)
}

/// Imports a new file of `len` elements.
fn import(heap: &SymmetricHeap, len: usize) -> SymSlice<f32> {
    use rustix::fs::{MemfdFlags, SealFlags};
    let file: OwnedFd =
        rustix::fs::memfd_create("iris-test-import", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, 4 * len as u64).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
    heap.import_descriptor(file, len).unwrap()
}

/// Rows and columns of lent matrices.
const N: usize = 256;

/// Calls that use lent matrices, while another thread closes the heap.
struct Calls<'a> {
    heap: &'a SymmetricHeap,
    stream: &'a Stream,
    op: &'a Matmul,
    /// Whether a call was enqueued.
    called: &'a AtomicBool,
}

impl Calls<'_> {
    /// Enqueues calls, with about eight in progress at a time, until one is refused.
    fn until_refused<M: MatrixArg>(&self, args: &MatmulArgs<M>) -> anyhow::Result<()> {
        let mut ends = VecDeque::new();
        loop {
            self.op.run(args, self.stream)?;
            ends.push_back(self.stream.record()?);
            self.called.store(true, Ordering::Relaxed);
            if ends.len() > 8 {
                let first = ends.pop_front().unwrap();
                while !first.is_done() {
                    std::thread::yield_now();
                }
            }
        }
    }
}

/// Lends two inputs and an output to calls by `lend`, while another thread closes the heap; many times.
/// The output must not be written after `lend` has returned.
fn close_while_lent(lend: impl Fn(&Calls, [&[f32]; 2], &mut [f32]) -> anyhow::Result<()>) {
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
            let calls = Calls { heap: &heap, stream: &stream, op: &op, called: &called };
            let outcome = lend(&calls, [&a, &b], &mut c);
            called.store(true, Ordering::Relaxed);
            let error = outcome.unwrap_err();
            assert!(error.to_string().contains("closed"), "{error:#}");
            c.fill(-1.0);
            closing.join().unwrap().unwrap();
        });
        drop((stream, op, heap));
        assert!(c.iter().all(|&x| x == -1.0), "written after it was lent");
    }
}

#[test]
fn lent_memory_is_not_written_after_its_scope() {
    close_while_lent(|calls, [a, b], c| {
        scope(calls.heap, calls.stream, |scope| {
            let (a, b) = (scope.read(a, N, N), scope.read(b, N, N));
            calls.until_refused(&MatmulArgs::new(a, b, scope.write(c, N, N)))
        })
    });
}

/// Tests the recipe of the guide for `MatRef::external`, which waits on every path.
#[test]
#[allow(unsafe_code, reason = "memory of the caller's is given by its address")]
fn external_memory_is_not_written_after_a_sync() {
    close_while_lent(|calls, [a, b], c| {
        // SAFETY: the memory lives until `sync` has returned, and nobody else accesses it.
        let [a, b, c] = unsafe {
            [
                MatRef::external(a.as_ptr(), a.len(), N, N),
                MatRef::external(b.as_ptr(), b.len(), N, N),
                MatRef::external_mut(c.as_mut_ptr(), c.len(), N, N),
            ]
        };
        let enqueued = calls.until_refused(&MatmulArgs::new(a, b, c));
        let done = calls.stream.sync();
        enqueued?;
        Ok(done?)
    });
}

/// Tests that a call of a communicator with host memory returns only after the last write, although
/// another thread closes the heap while the call, which has many launches, is enqueued.
#[test]
fn host_memory_is_not_written_after_the_call_of_a_communicator() {
    const LEN: usize = 1 << 20;
    let options = comm::Options::new().max_bytes(1 << 12);
    for _ in 0..10 {
        World::run_threads(2, |world| -> anyhow::Result<()> {
            let comm = Comm::from_world(BackendKind::Cpu, &world, &options)?;
            let (from, mut to) = (vec![1.0_f32; LEN], vec![0.0_f32; LEN]);
            world.barrier()?;
            std::thread::scope(|threads| {
                // A launch that is refused on one rank makes the calls and the close of both ranks fail.
                let closing = threads.spawn(|| comm.heap().close());
                let _ = comm.all_reduce(&from, &mut to, &comm::ReduceOp::Sum);
                to.fill(-1.0);
                let _ = closing.join().unwrap();
            });
            drop(comm);
            anyhow::ensure!(to.iter().all(|&x| x == -1.0), "written after the call");
            Ok(())
        })
        .unwrap();
    }
}

/// Imports a slice and frees it while another thread calls `run` with it until `run` fails; many
/// times. Returns the texts of the errors.
fn free_while(
    heap: &SymmetricHeap,
    len: usize,
    run: impl Fn(SymSlice<f32>) -> anyhow::Result<()> + Sync,
) -> Vec<String> {
    let round = |_| {
        let slice = import(heap, len);
        let calls = AtomicUsize::new(0);
        std::thread::scope(|threads| {
            let calling = threads.spawn(|| {
                loop {
                    if let Err(error) = run(slice) {
                        return format!("{error:#}");
                    }
                    calls.fetch_add(1, Ordering::Relaxed);
                }
            });
            while calls.load(Ordering::Relaxed) < 3 {
                std::thread::yield_now();
            }
            heap.free(slice).unwrap();
            calling.join().unwrap()
        })
    };
    (0..50).map(round).collect()
}

/// Tests that an imported matrix stays mapped for the calls that have been accepted, and that later
/// calls are refused, if another thread frees it.
#[test]
fn an_imported_matrix_is_freed_while_another_thread_calls() {
    const N: usize = 64;
    let (heap, op) = make(N);
    let (b, c) = (heap.ones::<f32>(N * N).unwrap(), heap.zeros::<f32>(N * N).unwrap());
    let stream = heap.stream().unwrap();
    let errors = free_while(&heap, N * N, |a| {
        let of = |slice| MatRef::sym(slice, N, N);
        Ok(op.run(&MatmulArgs::new(of(a), of(b), of(c)), &stream)?)
    });
    for error in errors {
        assert!(error.contains("are not allocated"), "{error}");
    }
    stream.sync().unwrap();
    heap.close().unwrap();
}

/// Tests the same of the calls of a communicator, whose copies take addresses.
#[test]
fn an_imported_message_is_freed_while_another_thread_calls() {
    const LEN: usize = 1 << 16;
    let comm = Comm::from_world(BackendKind::Cpu, &alone(), &comm::Options::new()).unwrap();
    let heap = comm.heap();
    let to = import(heap, LEN);
    let errors = free_while(heap, LEN, |from| {
        let mut to = to;
        Ok(comm.all_gather::<f32, _, _>(&from, &mut to)?)
    });
    for error in errors {
        assert!(error.contains("are not allocated"), "{error}");
    }
    comm.stream().sync().unwrap();
    comm.close().unwrap();
}

/// Tests that a call runs although threads copy its matrix without a pause.
#[test]
fn calls_run_while_threads_read_their_result() {
    const N: usize = 512;
    let (heap, op) = make(N);
    let of = |slice| MatRef::sym(slice, N, N);
    let (a, b) = (heap.ones::<f32>(N * N).unwrap(), heap.ones::<f32>(N * N).unwrap());
    let c = heap.zeros::<f32>(N * N).unwrap();
    let stream = heap.stream().unwrap();
    let (stop, reads) = (AtomicBool::new(false), AtomicUsize::new(0));
    let ran = std::thread::scope(|threads| {
        for _ in 0..32 {
            threads.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    heap.read(c).unwrap();
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        while reads.load(Ordering::Relaxed) < 24 {
            std::thread::yield_now();
        }
        op.run(&MatmulArgs::new(of(a), of(b), of(c)), &stream).unwrap();
        let (end, limit) = (stream.record().unwrap(), Instant::now() + Duration::from_secs(100));
        while !end.is_done() && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
        let ran = end.is_done();
        stop.store(true, Ordering::Relaxed);
        ran
    });
    stream.sync().unwrap();
    assert!(ran, "the call has not begun in 100 s");
    assert_eq!(heap.read(c).unwrap()[..4], [N as f32; 4]);
    heap.close().unwrap();
}
