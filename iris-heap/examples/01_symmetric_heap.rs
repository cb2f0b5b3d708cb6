//! Four ranks as threads: each reads the memory of its peers.
//!
//! ```sh
//! cargo run --release -p iris-heap --example 01_symmetric_heap
//! ```

use iris_heap::{Bytes, Error, HeapOptions, SymmetricHeap, World};

fn main() -> Result<(), Error> {
    let sums = World::run_threads(4, |world| {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().data(Bytes::mib(1)))?;
        // Collective: `x` is an array of 100 elements at the same offset on every rank; each rank
        // fills its own with its rank number.
        let x = heap.full::<f32>(100, world.rank() as f32)?;
        let mut sum = 0.0;
        for rank in 0..world.size() {
            sum += heap.read_from(x.slice(7..8)?, rank)?[0];
        }
        world.barrier()?; // no rank frees its heap while a peer may still read it
        heap.free(x)?;
        heap.close()?;
        world.close()?;
        Ok::<_, Error>(sum)
    })?;
    println!("each rank has read 0 + 1 + 2 + 3: {sums:?}");
    assert_eq!(sums, [6.0; 4]);
    Ok(())
}
