//! A feed-forward block of two layers over two ranks, with matrices in memory of the program's own:
//! both ranks have the input, each rank computes half of the inner columns, and both get the whole
//! output.
//!
//! ```sh
//! cargo run --release -p iris-ops --example 02_two_layers
//! ```

#![allow(unsafe_code, reason = "matrices in memory of the program")]

use iris_heap::World;
use iris_ops::{
    Epilogue, HeapReserve, Matmul, MatmulAllReduce, MatmulArgs, Plan, matmul, matmul_all_reduce,
    scope,
};

/// Number of rows (tokens), number of columns of input and output, and inner columns of all ranks.
const SHAPE: (usize, usize, usize) = (4, 6, 8);

fn rank(world: World) -> anyhow::Result<Vec<f32>> {
    let (m, hidden, inner) = (SHAPE.0, SHAPE.1, SHAPE.2 / world.size());
    let up = matmul::Options::new(m, inner, hidden).epilogue(Epilogue::Gelu).name("up");
    let down = matmul_all_reduce::Options::new(m, hidden, inner).name("down");
    let (up, down) = (up.plan(&world)?, down.plan(&world)?);
    // The heap needs room only for the operators' exchanges, because all matrices are in host
    // memory.
    let heap = Plan::open_heap(&world, &[&up, &down], HeapReserve::none())?;
    let (up, down) = (Matmul::new(&heap, &up)?, MatmulAllReduce::new(&heap, &down)?);

    let (x, w_up) = (vec![1.0_f32; m * hidden], vec![0.5_f32; hidden * inner]);
    let (w_down, mut h) = (vec![0.25_f32; inner * hidden], vec![0.0_f32; m * inner]);
    let mut y = vec![0.0_f32; m * hidden];
    let stream = heap.stream()?;
    scope(&heap, &stream, |scope| {
        let (x, w_up) = (scope.read(&x, m, hidden), scope.read(&w_up, hidden, inner));
        let (w_down, y) = (scope.read(&w_down, inner, hidden), scope.write(&mut y, m, hidden));
        let up_args = MatmulArgs::new(x, w_up, scope.write(&mut h, m, inner));
        up.run(&up_args, &stream)?;
        down.run(&MatmulArgs::new(up_args.c.as_input(), w_down, y), &stream)
    })?; // waits for both calls
    heap.close()?;
    world.close()?;
    Ok(y)
}

fn main() -> anyhow::Result<()> {
    let results = World::run_threads(2, rank)?;
    println!("both ranks have {:.3?} ..", &results[0][..4]);
    // Expected element of the result: gelu(6 * 0.5) = 2.99595, times eight inner columns, times the
    // weight 0.25.
    let right = |y: &f32| (y - 8.0 * 0.25 * 2.99595).abs() < 1e-3;
    anyhow::ensure!(results[0] == results[1] && results[0].iter().all(right), "{results:?}");
    Ok(())
}
