//! Schedules: which rank owns which tile of a result, as pure functions that host and device share.
//!
//! ```sh
//! cargo run --release -p iris-kernels --example 01_schedule
//! ```

use iris_kernels::schedule::{Grid, SplitGrid};

fn main() {
    // 100 rows, split over three ranks, in tiles of 16 x 64.
    let grid = Grid { rows: 100, cols: 128, tile_m: 16, tile_n: 64 };
    let split = SplitGrid { grid, size: 3 };
    println!("{} tiles in all, {} where rows are split by rank", grid.tiles(), split.tiles());
    for rank in 0..split.size {
        let part = split.part(rank);
        println!("  rank {rank}: {} rows, {} tiles", part.rows, part.tiles());
    }
    assert_eq!((0..split.size).map(|rank| split.part(rank).rows).sum::<u32>(), grid.rows);
}
