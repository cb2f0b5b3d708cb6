//! Steps of a call over several nodes, as data: the order of node operators, exchanges and waits
//! that a rank enqueues. The time of a call is predicted from these steps.

use super::exchange::{self, Kind, Sent, shift_steps};
use crate::op_row::Composition;
use crate::options::Shard;
use crate::plan::Plan;
use crate::plan::composed::{Role, slot_bytes};
use crate::split::split;

/// Step that a call over several nodes enqueues; steps are listed in the order of enqueueing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NodeStep {
    /// Operator of the node, for a call of `size` rows. In a message by elements, for parts of
    /// `size` elements.
    Part { role: Role, size: usize },
    /// Exchange between nodes that starts on a separate stream after the steps before it. `bytes`
    /// is the length of the exchange's input.
    Exchange { kind: Kind, bytes: u64 },
    /// Wait of the caller's stream for the exchange with this index in the list of steps.
    Wait(usize),
}

/// Steps of a call of `m` rows on rank 0, which owns the most rows; `None` if the plan is for one
/// node or for a message of elements. A broadcast has root 0.
pub(crate) fn steps(plan: &Plan, m: usize) -> Option<Vec<NodeStep>> {
    use NodeStep::{Exchange, Part, Wait};
    let composed = plan.composed()?;
    let request = plan.request();
    if request.elements {
        return None;
    }
    let (ranks, dtype, n, k) = (plan.topology(), request.dtype, request.n, request.k);
    let (nodes, local) = (ranks.nodes(), ranks.local().size);
    let slots = |slot: u64| nodes as u64 * slot;
    let part = |role: Role, size: usize| Part { role, size };
    let wire = request.wire_dtype();
    let (here, own) = (plan.rows_of_node(0, m).len(), plan.rows_of(0, m).len());
    // Copy of this rank's rows for the other nodes.
    let copy = |rows: usize| part(Role::Copy, rows);
    // `exchanges` are the exchanges of a gather. `arrivals` are, for each exchange, the wait for
    // it, and the node's operator `role` for the rows of each node that it brings.
    let exchanges = |bytes: u64| {
        shift_steps(composed.blocks, nodes, Sent::Block)
            .map(move |(exchange, _)| Exchange { kind: exchange.kind(), bytes })
    };
    let arrivals = |role: Role| {
        let steps = shift_steps(composed.blocks, nodes, Sent::Block).enumerate();
        steps.flat_map(move |(index, (_, shifts))| {
            let senders = exchange::Exchange::senders(shifts, (0, nodes));
            let rows = senders.map(move |node| part(role, plan.rows_of_node(node, m).len()));
            std::iter::once(Wait(index)).chain(rows)
        })
    };
    let mut steps = Vec::new();
    match plan.row().composed {
        Composition::AllReduce { .. } => {
            let blocks = composed.blocks.min(m.max(1));
            let most = m.div_ceil(blocks).div_ceil(local);
            let bytes = slot_bytes(most, n, wire);
            let rows_of = |block| {
                let rows = split(m, blocks, block).len();
                (rows, split(rows, local, 0).len())
            };
            for (rows, _) in (0..blocks).map(rows_of) {
                steps.push(part(Role::Main, rows));
                steps.push(Exchange { kind: Kind::AllReduce, bytes });
            }
            for block in 0..blocks {
                let (rows, own) = rows_of(block);
                steps.extend([Wait(block), part(Role::Finish, own), part(Role::Gather, rows)]);
                steps.extend(request.rms_norm.map(|_| part(Role::Gather, rows)));
            }
        }
        Composition::ReduceScatter => {
            let bytes = slots(slot_bytes(own, n, wire));
            let mut last = 0;
            for (index, (exchange, shifts)) in
                shift_steps(composed.blocks, nodes, Sent::Slot).enumerate()
            {
                let receivers = exchange::Exchange::receivers(shifts, (0, nodes));
                let rows = receivers.map(|node| plan.rows_of_node(node, m).len());
                steps.extend(rows.map(|rows| part(Role::Main, rows)));
                steps.push(Exchange { kind: exchange.kind(), bytes });
                last = index;
            }
            steps.extend([part(Role::Main, here), Wait(last), part(Role::Finish, own)]);
        }
        Composition::GatherC => {
            steps.extend([part(Role::Main, here), copy(own)]);
            steps.extend(exchanges(slot_bytes(own, n, request.output_dtype())));
            steps.extend(arrivals(Role::Gather));
        }
        Composition::GatherA if request.shard == Shard::Rows => {
            steps.push(copy(own));
            let cols = (request.row.dims)(n, k).a;
            steps.extend(exchanges(slot_bytes(own, cols, dtype)));
            steps.push(part(Role::Main, here));
            steps.extend(arrivals(Role::Main));
        }
        Composition::GatherA => {
            let most = composed.rows_of_block(request.m);
            let bytes = slot_bytes(k.div_ceil(ranks.size), most, dtype);
            let blocks = || composed.row_blocks(request.m, m);
            for rows in blocks() {
                steps.extend([copy(rows.len()), Exchange { kind: Kind::AllGather, bytes }]);
            }
            for (block, rows) in blocks().enumerate() {
                steps.push(Wait(block));
                let columns = |node: usize| plan.rows_of_node(node % nodes, k).len();
                steps.extend((1..=nodes).map(|node| part(Role::Main, columns(node))));
                steps.push(part(Role::Product, rows.len()));
            }
        }
        Composition::AllToAll => {
            let slot = slot_bytes(here, n, dtype);
            let sent = (1..=nodes).map(|node| plan.rows_of_node(node % nodes, m).len());
            steps.extend(sent.map(|rows| part(Role::Copy, rows)));
            steps.push(Exchange { kind: Kind::AllToAll, bytes: slots(slot) });
            steps.extend([part(Role::Main, here), Wait(0)]);
            steps.extend((1..nodes).map(|_| part(Role::Main, here)));
        }
        Composition::Broadcast => {
            steps.push(part(Role::Copy, m));
            steps.push(Exchange { kind: Kind::Broadcast, bytes: slot_bytes(m, n, dtype) });
            steps.extend([Wait(0), part(Role::Main, m)]);
        }
        Composition::Barrier => {
            steps.push(part(Role::Main, 0));
            steps.push(Exchange { kind: Kind::AllGather, bytes: 0 });
            steps.extend([Wait(0), part(Role::Main, 0)]);
        }
        Composition::Alone => return None,
    }
    Some(steps)
}

#[cfg(test)]
mod tests {
    use iris_heap::{DType, HeapOptions, SymmetricHeap, World};

    use super::*;
    use crate::args::Matrices;
    use crate::matrix::MatRef;
    use crate::nodes::Composite;
    use crate::op_names::Op;
    use crate::ops::row;
    use crate::options::Request;

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
