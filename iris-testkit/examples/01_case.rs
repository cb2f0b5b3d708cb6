//! Example of a case of the suite: a fused product over three ranks, whose sizes are no multiples
//! of the tile, compared with the reference in every element.
//!
//! ```sh
//! cargo run --release -p iris-testkit --example 01_case
//! ```

use iris_heap::{HeapOptions, World};
use iris_testkit::suite::{Case, Op, Options, open, run_case};

fn main() -> anyhow::Result<()> {
    // C, 33 x 65, is the sum over ranks of A (33 x 17) times B (17 x 65).
    let case = Case::new(Op::MatmulAllReduce, "auto", Options::new(33, 65, 17));
    let reports = World::run_threads(3, |world| -> anyhow::Result<_> {
        let rig = open(&world, HeapOptions::new(), [&case])?;
        let report = run_case(&rig.heap, &case)?;
        rig.heap.close()?;
        world.close()?;
        Ok(report)
    })?;
    for (rank, report) in reports.iter().enumerate() {
        println!("rank {rank}: {} calls of {} are right", report.times.len(), report.variant);
    }
    Ok(())
}
