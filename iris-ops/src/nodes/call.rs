//! Calls over several nodes. Operators within the node are enqueued on the caller's stream, and
//! steps between nodes on another stream, where they run at the same time.
//!
//! This file is long because it has the parts and steps of every operator, in the order in which
//! they are enqueued.

use std::cell::Cell;
use std::ops::Range;

use bytemuck::Zeroable;
use iris_heap::abi::abort;
use iris_heap::{DType, Event, NodeStream, RawSlice, Stream, SymmetricHeap};
use iris_kernels::Recovery;
use iris_kernels::args::OpArgs;

use super::Composite;
use super::exchange::{Exchange, Kind, Sent, shift_steps};
use super::fabric::{CallRecord, Step};
use crate::args::{Matrices, NormArgs};
use crate::check::{self, Checked};
use crate::error::{Error, InOp, Result};
use crate::matrix::MatRef;
use crate::op_names::Op;
use crate::op_row::Composition;
use crate::options::Shard;
use crate::plan::Plan;
use crate::plan::composed::{Area, Role, slot_bytes};
use crate::split::split;

/// Receiver of the work of a call over several nodes: streams that execute the work, or a list of
/// steps from which its time is predicted.
pub(super) trait Target {
    /// Memory of a step between nodes.
    type Block: Copy;
    /// End of a step between nodes, for which later work can wait.
    type End;

    /// Adds a call of the operator within the node that has the role `role`, such as the main
    /// product or a copy.
    fn part(&self, role: Role, matrices: Matrices) -> Result<()>;

    /// Adds a step between nodes after the work that was added before. Returns the end of the step.
    fn step(&self, exchange: Exchange, from: Self::Block, to: Self::Block) -> Result<Self::End>;

    /// Makes later work wait until the step whose end is `end` is complete.
    fn wait(&self, end: &Self::End) -> Result<()>;

    /// Adds the sum over the slots of `block`: one slot of elements of type `wire` for each node.
    fn sum(&self, block: Self::Block, wire: DType) -> Result<()>;

    /// Slice of the operator's memory `area`: the bytes `bytes` of that area.
    fn area(&self, area: Area, bytes: Range<u64>) -> Result<Self::Block>;

    /// Matrix at the start of `block`.
    fn matrix(block: Self::Block, dtype: DType, shape: (usize, usize)) -> MatRef;
}

/// Step that a call over several nodes enqueues; steps are listed in the order of enqueueing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NodeStep {
    /// Call of an operator within the node: with `size` rows or, if the plan counts elements, with
    /// parts of `size` elements.
    Part { role: Role, size: usize },
    /// Exchange between nodes that starts on a separate stream after the steps before it. `bytes`
    /// is the length of the exchange's input.
    Exchange { kind: Kind, bytes: u64 },
    /// Wait of the caller's stream for the exchange with this index in the list of steps.
    Wait(usize),
}

/// Call over several nodes, with the [`Target`] that receives its work.
pub(super) struct Calling<'a, T> {
    pub(super) plan: &'a Plan,
    pub(super) call: &'a Checked,
    pub(super) target: &'a T,
}

/// Streams on which a call over several nodes is enqueued.
struct Streams<'a> {
    op: &'a Composite,
    /// Stream on which the caller issued the call.
    stream: &'a Stream,
    /// Stream of the heap on which the steps between nodes are enqueued, one after the other.
    lane: Stream,
    record: Cell<CallRecord>,
    /// Number of the graph capture that the call is part of; `None` outside of captures.
    capture: Option<u64>,
    /// Whether any part of the call has been enqueued. If so, the call can no longer be cancelled.
    begun: Cell<bool>,
}

/// Steps of a gather between nodes. For each step: its end, the smallest distance (difference of
/// node numbers) between sender and receiver, and the number of such distances.
type Arrivals<End> = Vec<(End, (usize, usize))>;

impl Composite {
    /// Checks the matrices of a call. Then enqueues its operators within the node and its steps
    /// between nodes.
    pub(super) fn run(&self, stream: &Stream, matrices: &Matrices) -> Result<()> {
        self.issue(stream, matrices).map_err(|error| error.labelled(&self.label))
    }

    fn issue(&self, stream: &Stream, matrices: &Matrices) -> Result<()> {
        let (op, heap) = (self.plan.op(), &self.heap);
        let call = check::call(&self.plan, matrices)?;
        // Memory is checked here before anything is enqueued. The operators within the node check
        // it again, but an error there could come after other operators have been enqueued.
        call.write(&self.plan, &heap.issue().in_op(op)?, &mut OpArgs::zeroed())?;
        let main = self.parts[&Role::Main].plan();
        let pulls = main.choices().iter().map(|choice| choice.form).find(|form| form.pulls);
        if let Some(form) = pulls.filter(|_| !main.alone()) {
            check::pulled(main, form, call.matrices.a.as_ref())?;
        }
        heap.check_stream(op.name(), stream).in_op(op)?;
        check::no_fault(op, heap)?;
        let Some(mut lane) = heap.node_stream() else {
            return Err(super::other_world(op, heap, &self.plan));
        };
        let mut begun = false;
        self.enqueue(stream, &call, &mut lane, &mut begun).map_err(|error| {
            if begun {
                return give_up(op, heap, stream, error);
            }
            lane.call -= 1;
            error
        })
    }

    fn enqueue(
        &self,
        stream: &Stream,
        call: &Checked,
        lane: &mut NodeStream,
        begun: &mut bool,
    ) -> Result<()> {
        let op = self.plan.op();
        lane.call += 1;
        // Calls run one after the other, on whatever streams they are issued, so this call waits
        // for the previous one. It does not wait if the two are not in the same graph, because the
        // program that launches a graph orders the graph with other work.
        let capture = stream.capture().in_op(op)?;
        if let Some((last, of)) = &lane.last
            && *of == capture
        {
            stream.wait(last).in_op(op)?;
        }
        let n = if self.plan.row().common.n { call.n } else { 0 };
        let plan = CallRecord::plan_of(self.digest, call.matrices.options());
        let (m, n) = (call.m as u64, n as u64);
        let record = CallRecord { op, call: lane.call, step: 0, m, n, plan };
        let target = Streams {
            op: self,
            stream,
            lane: lane.stream.clone(),
            record: Cell::new(record),
            capture,
            begun: Cell::new(false),
        };
        let done = Calling { plan: &self.plan, call, target: &target }.all();
        *begun = target.begun.get();
        done?;
        lane.last = Some((stream.record().in_op(op)?, capture));
        Ok(())
    }
}

/// Ends a call that this rank will not complete, and of which a part was enqueued on `stream`. Tells
/// all ranks, those of other nodes too, which may wait in the call. In a capture no peer has seen
/// anything, so only the graph is discarded. Returns `error` as the error of a step, which says what
/// the caller must do.
pub(crate) fn give_up(op: Op, heap: &SymmetricHeap, stream: &Stream, error: Error) -> Error {
    if matches!(error, Error::Step { recovery: Recovery::Discard, .. })
        || heap.issue().and_then(|issuing| issuing.discard_capture(stream)).unwrap_or(false)
    {
        return of_step(op, error, Recovery::Discard);
    }
    // The call's own error is returned, even if the other ranks cannot be told.
    let _ = heap.poison(abort::INCOMPLETE);
    if let Some(across) = heap.across() {
        across.abort();
    }
    of_step(op, error, Recovery::Close)
}

/// Makes the error for a call of which only a part was enqueued. `recovery` says what the caller
/// must do.
fn of_step(op: Op, error: Error, recovery: Recovery) -> Error {
    let (op, step, cause) = match error {
        Error::Step { op, step, cause, recovery: Recovery::Retry } => (op, step, cause),
        Error::Heap { op, cause } => (op, "after the first one".into(), cause),
        Error::Step { .. } | Error::Poisoned { .. } => return error,
        error => (op.into(), "after the first one".into(), iris_heap::Error::other(error).into()),
    };
    Error::Step { op, step, cause, recovery }
}

impl Streams<'_> {
    #[cfg(test)]
    fn log(&self, step: NodeStep) {
        self.op.log.lock().unwrap().push(step);
    }
}

impl Target for Streams<'_> {
    type Block = RawSlice;
    type End = Event;

    fn part(&self, role: Role, matrices: Matrices) -> Result<()> {
        #[cfg(test)]
        {
            let plan = self.op.parts[&role].plan();
            let size = check::call(plan, &matrices)?.size(plan);
            self.log(NodeStep::Part { role, size });
        }
        let done = self.op.parts[&role].run(self.stream, &matrices);
        // An operator with several launches may fail after one of them has become visible to peers.
        let is_seen =
            |error: &Error| matches!(error, Error::Step { recovery: Recovery::Close, .. });
        self.begun.set(self.begun.get() || done.as_ref().map_or_else(is_seen, |()| true));
        done
    }

    fn step(&self, exchange: Exchange, from: RawSlice, to: RawSlice) -> Result<Event> {
        #[cfg(test)]
        self.log(NodeStep::Exchange { kind: exchange.kind(), bytes: from.len() as u64 });
        let last = self.record.get();
        let record = CallRecord { step: last.step + 1, ..last };
        self.record.set(record);
        let op = record.op;
        let ready = self.stream.record().in_op(op)?;
        if self.capture.is_some() || from.is_empty() {
            // Joins the lane (the stream of the steps between nodes) to the capture of the caller's
            // stream, before any work is enqueued on the lane. A step without data, such as that of
            // a barrier, consists only of the comparison of records, so the comparison itself must
            // wait for the caller's stream.
            self.lane.wait(&ready).in_op(op)?;
        }
        // Ranks compare their records (descriptions of the call) while the caller's stream computes
        // the step's data.
        let records = self.op.areas.get(&Area::Records).copied();
        self.op.fabric.announce(&self.lane, record, records).in_op(op)?;
        self.lane.wait(&ready).in_op(op)?;
        let step = Step { exchange, from, to };
        self.op.fabric.enqueue(&self.lane, step, record).in_op(op)?;
        self.lane.record().in_op(op)
    }

    fn wait(&self, end: &Event) -> Result<()> {
        let op = self.op.plan.op();
        self.stream.wait(end).in_op(op)?;
        if !self.op.fabric.uses_host() {
            // Steps that run on the device need no check here, because kernels themselves check
            // whether the heap has failed.
            return Ok(());
        }
        let control = self.op.heap.control().clone();
        self.stream.call_cpu("end of a step between nodes", move || control.outcome()).in_op(op)
    }

    fn area(&self, area: Area, bytes: Range<u64>) -> Result<RawSlice> {
        let range = bytes.start as usize..bytes.end as usize;
        self.op.areas[&area].slice(range).in_op(self.op.plan.op())
    }

    fn sum(&self, block: RawSlice, wire: DType) -> Result<()> {
        self.op.fabric.sum(self.stream, block, wire).in_op(self.op.plan.op())
    }

    fn matrix(block: RawSlice, dtype: DType, shape: (usize, usize)) -> MatRef {
        MatRef::in_block(block, dtype, shape)
    }
}

impl<T: Target> Calling<'_, T> {
    /// Enqueues the whole call over several nodes.
    pub(super) fn all(&self) -> Result<()> {
        match self.plan.row().composed {
            Composition::AllReduce { .. } => self.all_reduce(),
            Composition::ReduceScatter => self.reduce_scatter(),
            Composition::GatherC => self.gather_c(),
            Composition::GatherA => match self.plan.request().shard {
                Shard::Rows => self.gather_rows(),
                Shard::Columns => self.gather_columns(),
            },
            Composition::AllToAll => self.all_to_all(),
            Composition::Broadcast => self.broadcast(),
            Composition::Barrier => self.barrier(),
            Composition::Alone => Ok(()),
        }
    }

    /// Enqueues a copy from `from` to `to` within this rank's memory, by this node's operator for
    /// `role`.
    fn copy(&self, role: Role, from: MatRef, to: MatRef) -> Result<()> {
        self.target.part(role, Matrices { a: Some(from), c: Some(to), ..Matrices::default() })
    }

    /// Matrix at the start of slot number `at` of the area `area`, which consists of slots of
    /// `slot` bytes.
    fn slot(
        &self,
        area: Area,
        (at, slot): (usize, u64),
        dtype: DType,
        shape: (usize, usize),
    ) -> Result<MatRef> {
        let start = at as u64 * slot;
        Ok(T::matrix(self.target.area(area, start..start + slot)?, dtype, shape))
    }

    fn nodes(&self) -> usize {
        self.plan.topology().nodes()
    }

    fn blocks(&self) -> usize {
        self.plan.composed().map_or(1, |composed| composed.blocks)
    }

    /// Indices of all nodes, with this node last, so that data for which other nodes wait is
    /// computed first.
    fn others_first(&self) -> impl Iterator<Item = usize> {
        let (nodes, node) = (self.nodes(), self.plan.topology().node());
        (1..=nodes).map(move |step| (node + step) % nodes)
    }

    fn input(&self) -> Result<MatRef> {
        self.matrix(self.call.matrices.a, "input")
    }

    fn output(&self) -> Result<MatRef> {
        self.matrix(self.call.matrices.c, "output")
    }

    fn matrix(&self, matrix: Option<MatRef>, what: &str) -> Result<MatRef> {
        let expected = || format!("a matrix of rank {}", self.plan.topology().rank);
        matrix.ok_or_else(|| Error::invalid(self.plan.op(), what, "missing", expected()))
    }

    /// Rows (or parts) of the call that node `node` owns, and the rows among them that this rank's
    /// counterpart on that node owns: the rank with the same local rank.
    fn rows(&self, node: usize) -> (Range<usize>, Range<usize>) {
        let (plan, m) = (self.plan, self.call.m);
        let rank = node * plan.topology().local().size + self.plan.topology().local().rank;
        (plan.rows_of_node(node, m), plan.rows_of(rank, m))
    }

    /// Sums A over the ranks of this node; each rank gets the sums of the rows that it owns. `to`
    /// receives these sums in the wire type, in which partial sums are sent.
    fn scatter(&self, a: MatRef, to: MatRef) -> Result<()> {
        let b = self.call.matrices.b;
        self.target.part(Role::Main, Matrices { a: Some(a), b, c: Some(to), ..Matrices::default() })
    }

    fn all_reduce(&self) -> Result<()> {
        let request = self.plan.request();
        let (elements, output, wire) =
            (request.elements, request.output_dtype(), request.wire_dtype());
        let local = self.plan.topology().local().size;
        let (a, c) = (self.input()?, self.output()?);
        // Shape of the matrix whose rows are split into blocks. If the plan counts elements, the
        // matrix has one row for each rank of the node.
        let (m, n) = match elements {
            true => (local, self.call.n.div_ceil(local)),
            false => (self.call.m, self.call.n),
        };
        let padded = elements && !self.call.n.is_multiple_of(local);
        let (whole_a, whole_c) = match (elements, padded) {
            (false, _) => (a, c),
            (true, false) => (a.in_rows(m, n), c.in_rows(m, n)),
            (true, true) => {
                let block = |area, dtype| {
                    let bytes = slot_bytes(m, n, dtype);
                    Ok::<_, Error>(T::matrix(self.target.area(area, 0..bytes)?, dtype, (m, n)))
                };
                let whole = block(Area::Padded, request.dtype)?;
                self.copy(Role::Copy, a, whole.in_rows(1, self.call.n))?;
                (whole, block(Area::PaddedOut, output)?)
            }
        };
        let blocks = self.blocks().min(m.max(1));
        let rank = self.plan.topology().local().rank;
        // Rows of the block with the number `block`, and the rows among them that this rank owns.
        let rows_of = |block: usize| {
            let all = split(m, blocks, block);
            let own = split(all.len(), local, rank);
            (all.clone(), all.start + own.start..all.start + own.end)
        };
        let own = m.div_ceil(blocks).div_ceil(local);
        let [sums, results] = [wire, output].map(|dtype| slot_bytes(own, n, dtype));
        let mut ends = Vec::new();
        for block in 0..blocks {
            let (all, rows) = rows_of(block);
            let to = self.slot(Area::Send, (block, sums), wire, (rows.len(), n))?;
            self.scatter(whole_a.some_rows(all), to)?;
            let start = block as u64 * sums;
            let bytes = self.target.area(Area::Send, start..start + sums)?;
            ends.push(self.target.step(Exchange::AllReduce(wire), bytes, bytes)?);
        }
        for (block, end) in ends.iter().enumerate() {
            let (all, rows) = rows_of(block);
            self.target.wait(end)?;
            let shape = (rows.len(), n);
            let sum = self.slot(Area::Send, (block, sums), wire, shape)?;
            let result = self.slot(Area::Result, (block, results), output, shape)?;
            let norm = self.call.matrices.norm;
            let normed = norm.map(|_| self.slot(Area::Normed, (block, results), output, shape));
            let normed = normed.transpose()?;
            let norm = norm.map(|norm| NormArgs {
                residual: norm.residual.map(|residual| residual.some_rows(rows.clone())),
                weight: norm.weight,
                normed: normed.unwrap_or(norm.normed),
            });
            let bias = self.call.matrices.bias;
            let finish =
                Matrices { a: Some(sum), c: Some(result), bias, norm, ..Matrices::default() };
            self.target.part(Role::Finish, finish)?;
            self.copy(Role::Gather, result, whole_c.some_rows(all.clone()))?;
            if let (Some(normed), Some(norm)) = (normed, self.call.matrices.norm) {
                self.copy(Role::Gather, normed, norm.normed.some_rows(all))?;
            }
        }
        if padded {
            self.copy(Role::CopyOut, whole_c.in_rows(1, self.call.n), c)?;
        }
        Ok(())
    }

    fn reduce_scatter(&self) -> Result<()> {
        let (a, c, n) = (self.input()?, self.output()?, self.call.n);
        let (node, nodes) = (self.plan.topology().node(), self.nodes());
        let own = self.plan.rows_of(0, self.call.m).len();
        let wire = self.plan.request().wire_dtype();
        let slot = slot_bytes(own, n, wire);
        let bytes = nodes as u64 * slot;
        let (from, to) =
            (self.target.area(Area::Send, 0..bytes)?, self.target.area(Area::Receive, 0..bytes)?);
        // Sums the rows of node `other` over this node's ranks; each rank gets a part of these
        // sums.
        let scatter = |calling: &Self, area: Area, other: usize| {
            let (all, rows) = calling.rows(other);
            let to = calling.slot(area, (other, slot), wire, (rows.len(), n))?;
            calling.scatter(a.some_rows(all), to)
        };
        let mut last = None;
        for (exchange, shifts) in shift_steps(self.blocks(), nodes, Sent::Slot) {
            for other in Exchange::receivers(shifts, (node, nodes)) {
                scatter(self, Area::Send, other)?;
            }
            last = Some(self.target.step(exchange, from, to)?);
        }
        // The last step between nodes runs while the node computes its own rows.
        scatter(self, Area::Receive, node)?;
        // Steps run one after the other, so it is enough to wait for the last one.
        last.iter().try_for_each(|end| self.target.wait(end))?;
        self.target.sum(to, wire)?;
        let sum = T::matrix(to, wire, (self.rows(node).1.len(), n));
        let bias = self.call.matrices.bias;
        self.target
            .part(Role::Finish, Matrices { a: Some(sum), c: Some(c), bias, ..Matrices::default() })
    }

    /// Enqueues the steps that send this rank's matrix to all nodes. Returns the size of a slot in
    /// bytes and, for each step, its end and the distances between the nodes whose
    /// matrices it moves.
    fn gather(&self, own: MatRef, longest: (usize, usize)) -> Result<(u64, Arrivals<T::End>)> {
        let slot = slot_bytes(longest.0, longest.1, own.dtype());
        let from = self.target.area(Area::Send, 0..slot)?;
        let shape = (own.rows(), own.cols());
        self.copy(Role::Copy, own, T::matrix(from, own.dtype(), shape))?;
        let to = self.target.area(Area::Receive, 0..self.nodes() as u64 * slot)?;
        let steps = shift_steps(self.blocks(), self.nodes(), Sent::Block);
        let ends =
            steps.map(|(exchange, shifts)| Ok((self.target.step(exchange, from, to)?, shifts)));
        Ok((slot, ends.collect::<Result<_>>()?))
    }

    /// Waits for each step of a gather. For each matrix that the step has brought, calls `each`
    /// with the matrix and with the rows that the sender's node owns.
    fn gathered(
        &self,
        (slot, steps): (u64, Arrivals<T::End>),
        (dtype, cols): (DType, usize),
        each: impl Fn(MatRef, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let node = self.plan.topology().node();
        for (end, shifts) in &steps {
            self.target.wait(end)?;
            for other in Exchange::senders(*shifts, (node, self.nodes())) {
                let (all, rows) = self.rows(other);
                each(self.slot(Area::Receive, (other, slot), dtype, (rows.len(), cols))?, all)?;
            }
        }
        Ok(())
    }

    fn gather_c(&self) -> Result<()> {
        let c = self.output()?;
        let (all, rows) = self.rows(self.plan.topology().node());
        self.target
            .part(Role::Main, Matrices { c: Some(c.some_rows(all)), ..self.call.matrices })?;
        let longest = (self.plan.rows_of(0, self.call.m).len(), self.call.n);
        let arrivals = self.gather(c.some_rows(rows), longest)?;
        self.gathered(arrivals, (c.dtype(), self.call.n), |from, all| {
            self.copy(Role::Gather, from, c.some_rows(all))
        })
    }

    fn gather_rows(&self) -> Result<()> {
        let (a, c) = (self.input()?, self.output()?);
        let longest = (self.plan.rows_of(0, self.call.m).len(), a.cols());
        let arrivals = self.gather(a, longest)?;
        // While the first step between nodes runs, the node multiplies its own rows. Then it
        // multiplies the rows that have arrived, while further rows are on their way.
        let product =
            |a, rows| Matrices { a: Some(a), c: Some(c.some_rows(rows)), ..self.call.matrices };
        let own = self.rows(self.plan.topology().node()).0;
        self.target.part(Role::Main, product(a, own))?;
        self.gathered(arrivals, (a.dtype(), a.cols()), |from, all| {
            self.target.part(Role::Main, product(from, all))
        })
    }

    /// Sends columns of A as rows of A's transpose, in blocks of the rows of A: the node multiplies
    /// a block while the next block is sent. The leading dimension of a block's transpose is the
    /// number of rows of a full block.
    fn gather_columns(&self) -> Result<()> {
        let (a, c) = (self.input()?, self.output()?);
        let Some(composed) = self.plan.composed().cloned() else { return Ok(()) };
        let plan = self.plan;
        let (k, nodes, ranks) = (plan.request().k, self.nodes(), plan.topology());
        let (local, dtype) = (ranks.local().size, a.dtype());
        let most = composed.rows_of_block(plan.request().m);
        let blocks = || composed.row_blocks(plan.request().m, self.call.m);
        let slot = slot_bytes(k.div_ceil(ranks.size), most, dtype);
        let mut ends = Vec::new();
        for (block, rows) in blocks().enumerate() {
            let bytes =
                |slots: usize| (block * slots) as u64 * slot..((block + 1) * slots) as u64 * slot;
            let (from, to) = (
                self.target.area(Area::Send, bytes(1))?,
                self.target.area(Area::Receive, bytes(nodes))?,
            );
            let own = T::matrix(from, dtype, (a.cols(), most));
            let to_send = own.transposed().some_rows(0..rows.len());
            self.copy(Role::Copy, a.some_rows(rows), to_send)?;
            ends.push(self.target.step(Exchange::AllGather, from, to)?);
        }
        let whole = self.target.area(Area::Whole, 0..slot_bytes(k, most, dtype))?;
        let whole = T::matrix(whole, dtype, (k, most));
        for ((block, rows), end) in blocks().enumerate().zip(&ends) {
            self.target.wait(end)?;
            for node in self.others_first() {
                let columns =
                    split(k, ranks.size, node * local + self.plan.topology().local().rank).len();
                let at = block * nodes + node;
                let from = self.slot(Area::Receive, (at, slot), dtype, (columns, most))?;
                self.copy(Role::Main, from, whole.some_rows(self.plan.rows_of_node(node, k)))?;
            }
            let a = Some(whole.transposed().some_rows(0..rows.len()));
            let c = Some(c.some_rows(rows));
            self.target.part(Role::Product, Matrices { a, c, ..self.call.matrices })?;
        }
        Ok(())
    }

    fn all_to_all(&self) -> Result<()> {
        let (a, c, n) = (self.input()?, self.output()?, self.call.n);
        let (plan, dtype) = (self.plan, a.dtype());
        let node = plan.topology().node();
        let (local, elements) = (plan.topology().local().size, plan.request().elements);
        let own = plan.rows_of(plan.topology().rank, self.call.m).len();
        let longest = plan.rows_of_node(0, self.call.m).len();
        let slot = slot_bytes(longest, n, dtype);
        for other in self.others_first() {
            let rows = plan.rows_of_node(other, self.call.m);
            let to = self.slot(Area::Send, (other, slot), dtype, (rows.len(), n))?;
            let from = a.some_rows(rows.clone());
            if !elements {
                self.copy(Role::Copy, from, to)?;
                continue;
            }
            // If the plan counts elements, each part of the message is copied separately, because
            // there may be gaps between parts.
            for part in 0..rows.len() {
                let part = |matrix: MatRef| matrix.some_rows(part..part + 1).in_rows(1, n);
                self.copy(Role::Copy, part(from), part(to))?;
            }
        }
        let bytes = self.nodes() as u64 * slot;
        let (from, to) =
            (self.target.area(Area::Send, 0..bytes)?, self.target.area(Area::Receive, 0..bytes)?);
        let end = self.target.step(Exchange::AllToAll, from, to)?;
        let blocks = |source: usize| c.some_rows(source * local * own..(source + 1) * local * own);
        let here = plan.rows_of_node(node, self.call.m);
        self.copy(Role::Main, a.some_rows(here.clone()), blocks(node))?;
        self.target.wait(&end)?;
        for other in self.others_first().take(self.nodes() - 1) {
            let from = self.slot(Area::Receive, (other, slot), dtype, (here.len(), n))?;
            self.copy(Role::Main, from, blocks(other))?;
        }
        Ok(())
    }

    fn broadcast(&self) -> Result<()> {
        let (c, plan) = (self.output()?, self.plan);
        let local = plan.topology().local().size;
        let (root, from_node) = (self.call.root % local, self.call.root / local);
        let shape = (c.rows(), c.cols());
        let block = self.target.area(Area::Receive, 0..slot_bytes(shape.0, shape.1, c.dtype()))?;
        let staged = T::matrix(block, c.dtype(), shape);
        // All ranks of the node must issue the same calls, so all of them enqueue this copy. It is
        // empty on all ranks except the root.
        self.copy(Role::Copy, self.call.matrices.a.unwrap_or(staged), staged)?;
        // Only the root exchanges data. The other ranks take part in the step to compare their
        // calls with those of the other nodes.
        let has = self.plan.topology().local().rank == root;
        let block = if has { block } else { self.target.area(Area::Receive, 0..0)? };
        let end = self.target.step(Exchange::Broadcast { root: from_node }, block, block)?;
        self.target.wait(&end)?;
        let a = has.then_some(staged);
        self.target
            .part(Role::Main, Matrices { a, c: Some(c), root: Some(root), ..Matrices::default() })
    }

    fn barrier(&self) -> Result<()> {
        self.target.part(Role::Main, Matrices::default())?;
        // Rank 0 of each node takes part in the exchange between nodes, for all ranks of its node.
        if self.plan.topology().local().rank == 0 {
            let nothing = self.target.area(Area::Send, 0..0)?;
            let end = self.target.step(Exchange::AllGather, nothing, nothing)?;
            self.target.wait(&end)?;
        }
        self.target.part(Role::Main, Matrices::default())
    }
}
