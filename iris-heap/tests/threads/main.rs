//! Tests of ranks that are threads of one process: their heaps and streams, and their failures.

mod errors;
mod faults;
mod groups;
mod heap;
mod layout;
mod network;
mod streams;

use iris_heap::{Error, HeapOptions, Settings, SymmetricHeap, World};

/// Options of a heap with room for data.
fn options() -> HeapOptions {
    HeapOptions::new().data_bytes(1 << 20).signal_bytes(1 << 16).threads(2)
}

/// Options of a heap that is soon full.
fn small() -> HeapOptions {
    HeapOptions::new().data_bytes(64 << 10).signal_bytes(1 << 16).threads(1)
}

/// Runs ranks whose host deadline is 7.2 s, and returns the result of every rank.
fn each<T: Send>(
    size: usize,
    f: impl Fn(World) -> Result<T, Error> + Sync,
) -> Vec<Result<T, Error>> {
    World::run_threads_each(size, &Settings::default().deadline(0.01), f).unwrap()
}

fn close(heap: &SymmetricHeap) -> Result<(), Error> {
    heap.close()?;
    heap.local_world().close()
}
