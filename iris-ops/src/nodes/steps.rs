//! Steps of a call over several nodes, as data: the order of node operators, exchanges and waits
//! that a rank enqueues. The time of a call is predicted from these steps.

use std::cell::{Cell, RefCell};
use std::ops::Range;

use iris_heap::DType;

pub(crate) use super::call::NodeStep;
use super::call::{Calling, Target};
use super::exchange::Exchange;
use crate::args::{Matrices, NormArgs};
use crate::check::{self, Checked};
use crate::error::Result;
use crate::matrix::MatRef;
use crate::plan::Plan;
use crate::plan::composed::{Area, Composed, Role};

/// Target that lists the steps of a call instead of enqueueing them on streams.
struct Recorder<'a> {
    composed: &'a Composed,
    steps: RefCell<Vec<NodeStep>>,
    exchanges: Cell<usize>,
}

impl Recorder<'_> {
    fn add(&self, step: NodeStep) {
        self.steps.borrow_mut().push(step);
    }
}

impl Target for Recorder<'_> {
    /// Number of bytes.
    type Block = u64;
    /// Index of the exchange.
    type End = usize;

    fn part(&self, role: Role, matrices: Matrices) -> Result<()> {
        let size = check::rows(self.composed.parts[&role].row(), &matrices);
        self.add(NodeStep::Part { role, size });
        Ok(())
    }

    fn step(&self, exchange: Exchange, bytes: u64, _: u64) -> Result<usize> {
        self.add(NodeStep::Exchange { kind: exchange.kind(), bytes });
        Ok(self.exchanges.replace(self.exchanges.get() + 1))
    }

    fn wait(&self, end: &usize) -> Result<()> {
        self.add(NodeStep::Wait(*end));
        Ok(())
    }

    fn sum(&self, _: u64, _: DType) -> Result<()> {
        Ok(())
    }

    fn area(&self, _: Area, bytes: Range<u64>) -> Result<u64> {
        Ok(bytes.end - bytes.start)
    }

    fn matrix(_: u64, dtype: DType, shape: (usize, usize)) -> MatRef {
        MatRef::nowhere(dtype, shape)
    }
}

/// Steps of a call of `m` rows on rank 0, which owns the most rows; `None` if the plan is for one
/// node or for a message of elements. A broadcast has root 0.
pub(crate) fn steps(plan: &Plan, m: usize) -> Option<Vec<NodeStep>> {
    let composed = plan.composed()?;
    if plan.request().elements || plan.row().is_local() {
        return None;
    }
    let mut plan = plan.clone();
    plan.ranks.rank = 0;
    let (request, n) = (plan.request(), plan.request().n);
    let (dtype, output) = (request.dtype, request.output_dtype());
    let shapes = plan.shapes_of(m, n, 0);
    let (a, c) = (MatRef::nowhere(dtype, shapes.a), MatRef::nowhere(output, shapes.c));
    let b = shapes.b.map(|shape| MatRef::nowhere(dtype, shape));
    let norm = request.rms_norm.map(|_| NormArgs::new(MatRef::nowhere(output, (1, n)), c));
    let matrices = Matrices { a: Some(a), b, c: Some(c), norm, ..Matrices::default() };
    let call = Checked { m, n, root: 0, matrices };
    let target = Recorder { composed, steps: RefCell::default(), exchanges: Cell::default() };
    Calling { plan: &plan, call: &call, target: &target }.all().ok()?;
    Some(target.steps.into_inner())
}

#[cfg(test)]
mod tests {
    use iris_heap::{DType, HeapOptions, SymmetricHeap, World};

    use super::*;
    use crate::nodes::Composite;
    use crate::op_names::Op;
    use crate::ops::row;
    use crate::options::{Request, Shard};

    /// Enqueues a call on rank 0 and its peers. Returns the steps that rank 0 has enqueued, and the
    /// predicted steps.
    fn enqueued(world: &World, request: &Request, m: usize) -> (Vec<NodeStep>, Vec<NodeStep>) {
        let heap = SymmetricHeap::open(world, HeapOptions::new().data_bytes(4 << 20)).unwrap();
        let plan = Plan::new((&heap).into(), request).unwrap();
        let op = Composite::new(plan.op(), &heap, &plan, None).unwrap();
        let shapes = plan.shapes_of(m, request.n, 0);
        let matrix = |shape: Option<(usize, usize)>| {
            let block = heap.zeros::<f32>(64 * 64).unwrap();
            shape.map(|(rows, cols)| MatRef::sym(block, rows, cols))
        };
        let (a, b, c) = (matrix(Some(shapes.a)), matrix(shapes.b), matrix(Some(shapes.c)));
        let stream = heap.stream().unwrap();
        op.run(&stream, &Matrices { a, b, c, ..Matrices::default() }).unwrap();
        stream.sync().unwrap();
        let log = op.log.lock().unwrap().clone();
        op.free().unwrap();
        drop(stream);
        heap.close().unwrap();
        (log, steps(&plan, m).unwrap())
    }

    /// Tests for all operators that the predicted steps are the steps that calls enqueue.
    #[test]
    fn steps_are_what_calls_enqueue() {
        for (op, shard) in Op::ALL
            .into_iter()
            .map(|op| (op, Shard::Rows))
            .chain([(Op::AllGatherMatmul, Shard::Columns)])
        {
            if row(op).is_local() {
                continue;
            }
            for (nodes, local) in [(2, 1), (2, 2), (3, 2), (4, 1)] {
                let mut request = op.request(13, 10, if op.multiplies() { 12 } else { 0 });
                (request.shard, request.blocks) = (shard, Some(3));
                request.output = op.multiplies().then_some(DType::F32);
                let all = World::run_nodes(nodes, local, |world| -> iris_heap::Result<_> {
                    let steps = enqueued(&world, &request, 11);
                    world.close().unwrap();
                    Ok(steps)
                });
                let (log, mut steps) = all.unwrap().swap_remove(0);
                steps.retain(|step| !matches!(step, NodeStep::Wait(_)));
                assert_eq!(log, steps, "{op}, {nodes} nodes of {local} ranks");
            }
        }
    }
}
