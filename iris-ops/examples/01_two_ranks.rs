//! Two ranks as threads: a row-parallel linear layer, C = A B + bias, where each rank has half of K.
//!
//! ```sh
//! cargo run --release -p iris-ops --example 01_two_ranks
//! ```

use iris_heap::World;
use iris_ops::{
    HeapReserve, MatRef, MatmulAllReduce, MatmulArgs, Plan, matmul_all_reduce::Options,
};

fn rank(world: World) -> anyhow::Result<Vec<f32>> {
    let (m, n, k) = (5, 3, 8 / world.size());
    let plan = Options::new(m, n, k).name("linear").plan(&world)?; // local
    let heap = Plan::open_heap(&world, &[&plan], HeapReserve::matrices())?; // collective, as what follows
    let (a, b) = (heap.full::<f32>(m * k, 0.5)?, heap.ones::<f32>(k * n)?);
    let (c, bias) = (heap.zeros::<f32>(m * n)?, heap.ones::<f32>(n)?);
    let op = MatmulAllReduce::new(&heap, &plan)?;

    let stream = heap.stream()?;
    let args = MatmulArgs::new(MatRef::sym(a, m, k), MatRef::sym(b, k, n), MatRef::sym(c, m, n));
    op.run(&args.bias(MatRef::sym(bias, 1, n)), &stream)?; // enqueues; meets no other rank on the host
    stream.sync()?;
    let result = heap.read(c)?;
    heap.close()?;
    world.close()?;
    Ok(result)
}

fn main() -> anyhow::Result<()> {
    let results = World::run_threads(2, rank)?; // as processes: rank(World::from_env()?)
    println!("both ranks have {:?}", results[0]);
    anyhow::ensure!(results.iter().all(|c| *c == [5.0; 15])); // 8 * 0.5 + 1: the bias is added once
    Ok(())
}
