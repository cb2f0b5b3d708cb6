//! Test of a communicator's calls of all sizes: whatever variant serves a size, and whether its
//! message consists of packs, its kernel must be loaded.

use anyhow::{Context, Result};
use half::bf16;
use iris_heap::{HeapOptions, SymmetricHeap, World};
use iris_ops::comm::{Comm, Options, ReduceOp};

use crate::library::{Machine, Standin};

/// Largest number of elements of a message.
const MOST: usize = 4 << 20;

fn rank(world: &World, machine: &Machine) -> Result<()> {
    Standin::get(machine.backend()).rank(world.rank());
    let options = HeapOptions::new().backend(machine.backend()).data_bytes(256 << 20);
    let heap = SymmetricHeap::open(world, options.device(world.rank() % machine.devices))?;
    let stream = heap.stream()?;
    let options = Options::new().max_bytes((MOST * size_of::<bf16>()) as u64);
    let comm = Comm::in_heap(&stream, &heap, &options)?;
    for bits in 3..=MOST.ilog2() {
        let count = 1 << bits;
        let named = || format!("{count} elements among {} ranks", world.size());
        let mut data = heap.alloc::<bf16>(count)?;
        comm.all_reduce_in_place(&mut data, &ReduceOp::Sum).with_context(named)?;
        comm.broadcast_in_place(&mut data, 0).with_context(named)?;
        let part = heap.alloc::<bf16>(count / world.size())?;
        comm.all_gather(&part, &mut data).with_context(named)?;
    }
    comm.close()?;
    drop((comm, stream));
    Ok(heap.close()?)
}

/// Runs the calls with the numbers of ranks with which messages in packs have run, in a child
/// process.
pub(crate) fn run(machine: &Machine) {
    for size in [2, 4] {
        World::run_threads(size, |world| rank(&world, machine)).unwrap();
    }
}
