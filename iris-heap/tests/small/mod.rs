//! Small heaps of ranks that are threads, for tests of failures.

use iris_heap::{Error, HeapOptions, Settings, SymmetricHeap, World};

pub(crate) fn options() -> HeapOptions {
    HeapOptions::new().data_bytes(64 << 10).signal_bytes(1 << 16).threads(1)
}

/// Runs ranks whose host deadline is 7.2 s, and returns the result of every rank.
pub(crate) fn each<T: Send>(
    size: usize,
    f: impl Fn(World) -> Result<T, Error> + Sync,
) -> Vec<Result<T, Error>> {
    World::run_threads_each(size, &Settings::default().deadline(0.01), f).unwrap()
}

pub(crate) fn close(heap: &SymmetricHeap) -> Result<(), Error> {
    heap.close()?;
    heap.local_world().close()
}
