//! Two ranks as processes. Started without a launcher the program starts itself twice, as a loop in a shell would.
//!
//! ```sh
//! cargo run --release -p iris-heap --example 02_processes
//! ```

use std::process::Command;

use iris_heap::{Bytes, HeapOptions, SymmetricHeap, World};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn rank() -> Result<()> {
    let world = World::from_env()?; // from RANK, WORLD_SIZE and similar variables
    let heap = SymmetricHeap::open(&world, HeapOptions::new().data(Bytes::mib(1)))?;
    let mine = heap.full::<u32>(1, std::process::id())?;
    for rank in 0..world.size() {
        println!(
            "rank {} reads rank {rank}: process {}",
            world.rank(),
            heap.read_from(mine, rank)?[0]
        );
    }
    world.barrier()?;
    heap.close()?;
    Ok(world.close()?)
}

fn main() -> Result<()> {
    if iris_heap::launched()?.is_some() {
        return rank();
    }
    let program = std::env::current_exe()?;
    let start = |rank: &str| {
        Command::new(&program)
            .envs([("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")])
            .spawn()
    };
    let ranks = [start("0")?, start("1")?];
    for mut rank in ranks {
        let status = rank.wait()?;
        if !status.success() {
            return Err(format!("a rank ended with {status}").into());
        }
    }
    Ok(())
}
