//! Tests of gathers of a list of tensors, in eager calls and in graphs. The tests on the CPU have more
//! cases.

use anyhow::{Result, ensure};
use half::bf16;
use iris_heap::{DType, Element, SymSlice, SymmetricHeap, World};
use iris_ops::{AllGather, CollectiveArgs, MatRef, all_gather};

use crate::graphs::{callers, captured, drop_graph};
use crate::open;

const ROWS: usize = 19;

/// Input and output of one tensor of a list, rows without gaps.
struct Tensor<T: Element> {
    n: usize,
    input: SymSlice<T>,
    output: SymSlice<T>,
    value: fn(usize) -> T,
}

impl<T: Element> Tensor<T> {
    fn new(heap: &SymmetricHeap, n: usize, value: fn(usize) -> T) -> Result<Tensor<T>> {
        let (input, output) = (heap.alloc(ROWS * n)?, heap.alloc(ROWS * n)?);
        Ok(Tensor { n, input, output, value })
    }

    /// Values of `rows` in the call `call`.
    fn values(&self, rows: std::ops::Range<usize>, call: usize) -> Vec<T> {
        (rows.start * self.n..rows.end * self.n).map(|at| (self.value)(at + 1000 * call)).collect()
    }

    fn fill(&self, heap: &SymmetricHeap, own: std::ops::Range<usize>, call: usize) -> Result<()> {
        heap.write(self.output, &vec![(self.value)(usize::MAX / 2); ROWS * self.n])?;
        let values = self.values(own, call);
        Ok(heap.write(self.input.slice(..values.len())?, &values)?)
    }

    fn matrices(&self, own: usize, m: usize) -> [MatRef; 2] {
        [MatRef::sym(self.input, own, self.n), MatRef::sym(self.output, m, self.n)]
    }

    fn check(&self, heap: &SymmetricHeap, m: usize, call: usize) -> Result<()> {
        let seen = heap.read(self.output.slice(..m * self.n)?)?;
        let expected = self.values(0..m, call);
        let [seen, expected] = [&seen, &expected].map(|it| bytemuck::cast_slice::<T, u8>(it));
        ensure!(seen == expected, "call {call} of {m} rows, rank {}, {}", heap.rank(), T::DTYPE);
        Ok(())
    }
}

fn gathered(world: World) -> Result<()> {
    let heap = open(&world)?;
    let (theirs, stream) = callers(&heap)?;
    let plan = all_gather::Options::rows(ROWS, 33)
        .dtype(DType::BF16)
        .and(DType::I32, 8)
        .and(DType::F32, 3)
        .plan(&heap)?;
    let op = AllGather::new(&heap, &plan)?;
    let tokens = Tensor::new(&heap, 33, |at| bf16::from_bits(at as u16))?;
    let ids = Tensor::new(&heap, 8, |at| at as i32)?;
    let weights = Tensor::new(&heap, 3, |at| at as f32)?;
    let run = |m: usize| -> Result<()> {
        let own = plan.rows_of(world.rank(), m).len();
        let ([a, c], [d, e], [f, g]) =
            (tokens.matrices(own, m), ids.matrices(own, m), weights.matrices(own, m));
        Ok(op.run(&CollectiveArgs::new(a, c).and(d, e).and(f, g), &stream)?)
    };
    let checked = |m: usize, call: usize, enqueue: &dyn Fn() -> Result<()>| -> Result<()> {
        let own = plan.rows_of(world.rank(), m);
        tokens.fill(&heap, own.clone(), call)?;
        ids.fill(&heap, own.clone(), call)?;
        weights.fill(&heap, own, call)?;
        enqueue()?;
        stream.sync()?;
        tokens.check(&heap, m, call)?;
        ids.check(&heap, m, call)?;
        weights.check(&heap, m, call)?;
        Ok(world.barrier()?)
    };
    for (call, m) in [ROWS, 1, 7, 0, ROWS - 1, world.size()].into_iter().enumerate() {
        checked(m, call, &|| run(m))?;
    }
    let graph = captured(&theirs, || run(ROWS))?;
    world.barrier()?;
    for call in 10..40 {
        checked(ROWS, call, &|| Ok(graph.launch()?))?;
    }
    checked(5, 40, &|| run(5))?;
    drop_graph(graph);
    drop(op);
    Ok(heap.close()?)
}

/// Tests lists of three tensors with ranks that share a GPU: rows that are no multiples of 8 bytes, calls
/// in which ranks have no rows, and replays of a graph.
pub(crate) fn lists_are_gathered_and_captured() {
    for size in [1, 2, 3, 5] {
        World::run_threads(size, gathered).unwrap();
    }
}
