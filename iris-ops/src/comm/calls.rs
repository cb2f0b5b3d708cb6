//! Collectives of a communicator, split into launches that fit the workspace.

use std::cell::Cell;

use bytemuck::Pod;
use half::f16;
use iris_heap::{DType, Element};

use super::memory::{Lent, RecvBuffer, SendBuffer};
use super::message::{Message, find};
use super::{Comm, Operators, ReduceOp, Summand};
use crate::args::Matrices;
use crate::check;
use crate::error::{Error, Result};
use crate::nodes::{Operator, give_up};
use crate::op_names::Op;
use crate::operand::lending;

/// Argument for the result of a call, in errors of a root without it: name, and what it must be.
const RESULT: (&str, &str) = ("output", "memory for the result");

impl Comm {
    /// Sums `input` over ranks into `output` on all ranks, with the same bits on every rank.
    /// `input` and `output` have the same number of elements.
    ///
    /// # Errors
    /// [`Error::Invalid`] for unequal lengths, an operation other than [`ReduceOp::Sum`], a type
    /// that [`Options::sums`](super::Options::sums) leaves out, or memory of another device;
    /// [`Error::Overlap`] if input and output share elements; [`Error::Poisoned`] after a fault.
    /// With host memory on the CPU, also the errors of the call itself.
    pub fn all_reduce<T: Summand, S: SendBuffer<T> + ?Sized, R: RecvBuffer<T> + ?Sized>(
        &self,
        input: &S,
        output: &mut R,
        operation: &ReduceOp,
    ) -> Result<()> {
        let (input, output) = (input.lend(&self.stream), output.lend_mut(&self.stream));
        self.sum::<T>(Op::AllReduce, Some(input), output, *operation)
    }

    /// Sums `data` over ranks in place, on all ranks, with the same bits on every rank.
    ///
    /// # Errors
    /// The errors of [`Comm::all_reduce`].
    pub fn all_reduce_in_place<T: Summand, R: RecvBuffer<T> + ?Sized>(
        &self,
        data: &mut R,
        operation: &ReduceOp,
    ) -> Result<()> {
        self.sum::<T>(Op::AllReduce, None, data.lend_mut(&self.stream), *operation)
    }

    /// Sums `input` over ranks and stores part r of the sum on rank r. `input` has
    /// [`Comm::world_size`] times as many elements as `output`.
    ///
    /// # Errors
    /// The errors of [`Comm::all_reduce`].
    pub fn reduce_scatter<T: Summand, S: SendBuffer<T> + ?Sized, R: RecvBuffer<T> + ?Sized>(
        &self,
        input: &S,
        output: &mut R,
        operation: &ReduceOp,
    ) -> Result<()> {
        let (input, output) = (input.lend(&self.stream), output.lend_mut(&self.stream));
        self.sum::<T>(Op::ReduceScatter, Some(input), output, *operation)
    }

    /// Concatenates the `input` of every rank, in the order of ranks, into `output` on all ranks.
    /// `output` has [`Comm::world_size`] times as many elements as `input`.
    ///
    /// # Errors
    /// The errors of [`Comm::all_reduce`].
    pub fn all_gather<T: Pod, S: SendBuffer<T> + ?Sized, R: RecvBuffer<T> + ?Sized>(
        &self,
        input: &S,
        output: &mut R,
    ) -> Result<()> {
        let (input, output) = (input.lend(&self.stream), output.lend_mut(&self.stream));
        self.travel::<T>(Op::AllGather, Some(input), output, 0)
    }

    /// Sends part r of `input` to rank r. The receiver stores the part in its `output`, as the part
    /// with the sender's rank number. Both buffers have the same number of elements, a multiple of
    /// [`Comm::world_size`].
    ///
    /// # Errors
    /// The errors of [`Comm::all_reduce`].
    pub fn all_to_all<T: Pod, S: SendBuffer<T> + ?Sized, R: RecvBuffer<T> + ?Sized>(
        &self,
        input: &S,
        output: &mut R,
    ) -> Result<()> {
        let (input, output) = (input.lend(&self.stream), output.lend_mut(&self.stream));
        self.travel::<T>(Op::AllToAll, Some(input), output, 0)
    }

    /// Copies `input` of rank `root` to `output` on all ranks, the root included. The input of
    /// other ranks may be `None` and is not read.
    ///
    /// All ranks must pass the same `root`. In a small message the root waits for nobody, so two
    /// ranks that both act as the root do not always get an error.
    ///
    /// # Errors
    /// The errors of [`Comm::all_reduce`]; [`Error::Invalid`] for a root that is no rank, and for a
    /// root without input.
    pub fn broadcast<T: Pod, S: SendBuffer<T> + ?Sized, R: RecvBuffer<T> + ?Sized>(
        &self,
        input: Option<&S>,
        output: &mut R,
        root: i32,
    ) -> Result<()> {
        let needed = ("input", "memory to send; Comm::broadcast_in_place sends what it gets");
        let input = self.at_root(Op::Broadcast, needed, input, root)?;
        let (input, output) =
            (input.map(|input| input.lend(&self.stream)), output.lend_mut(&self.stream));
        self.travel::<T>(Op::Broadcast, input, output, self.root(Op::Broadcast, root)?)
    }

    /// Copies `data` of rank `root` to `data` on all ranks.
    ///
    /// # Errors
    /// The errors of [`Comm::broadcast`].
    pub fn broadcast_in_place<T: Pod, R: RecvBuffer<T> + ?Sized>(
        &self,
        data: &mut R,
        root: i32,
    ) -> Result<()> {
        let root = self.root(Op::Broadcast, root)?;
        self.travel::<T>(Op::Broadcast, None, data.lend_mut(&self.stream), root)
    }

    /// Sums `input` over ranks into `output` of rank `root`. The output of other ranks may be `None`
    /// and is not written. `input` and `output` have the same number of elements.
    ///
    /// The sum travels as an all-reduce, in launches of up to 1 MiB, through the communicator's own
    /// buffers, so it is not faster than [`Comm::all_reduce`]. It saves the memory for the result on the
    /// other ranks. Errors name `all_reduce`.
    ///
    /// # Errors
    /// The errors of [`Comm::all_reduce`]; [`Error::Invalid`] for a root that is no rank, and for a
    /// root without output.
    pub fn reduce<T: Summand, S: SendBuffer<T> + ?Sized, R: RecvBuffer<T> + ?Sized>(
        &self,
        input: &S,
        output: Option<&mut R>,
        operation: &ReduceOp,
        root: i32,
    ) -> Result<()> {
        is_sum(Op::AllReduce, *operation)?;
        let output = self.at_root(Op::AllReduce, RESULT, output, root)?;
        let output = output.map(|output| output.lend_mut(&self.stream));
        self.to_root::<T>(Op::AllReduce, size_of::<T>(), input.lend(&self.stream), output, root)
    }

    /// Sums `data` over ranks in place on rank `root`. `data` of other ranks is only read.
    ///
    /// # Errors
    /// The errors of [`Comm::reduce`].
    pub fn reduce_in_place<T: Summand, R: RecvBuffer<T> + ?Sized>(
        &self,
        data: &mut R,
        operation: &ReduceOp,
        root: i32,
    ) -> Result<()> {
        is_sum(Op::AllReduce, *operation)?;
        let data = data.lend_mut(&self.stream);
        self.to_root::<T>(Op::AllReduce, size_of::<T>(), data, None, root)
    }

    /// Concatenates the `input` of every rank, in the order of ranks, into `output` of rank `root`.
    /// The output of other ranks may be `None` and is not written. `output` has
    /// [`Comm::world_size`] times as many elements as `input`.
    ///
    /// The data travels as an all-gather, as the sum of [`Comm::reduce`] does as an all-reduce.
    ///
    /// # Errors
    /// The errors of [`Comm::reduce`], except for sums; they name `all_gather`.
    pub fn gather<T: Pod, S: SendBuffer<T> + ?Sized, R: RecvBuffer<T> + ?Sized>(
        &self,
        input: &S,
        output: Option<&mut R>,
        root: i32,
    ) -> Result<()> {
        let output = self.at_root(Op::AllGather, RESULT, output, root)?;
        let output = output.map(|output| output.lend_mut(&self.stream));
        self.to_root::<f32>(Op::AllGather, size_of::<T>(), input.lend(&self.stream), output, root)
    }

    /// Copies part r of `input` of rank `root` to `output` of rank r. The input of other ranks may be
    /// `None` and is not read. `input` has [`Comm::world_size`] times as many elements as `output`.
    ///
    /// All ranks must pass the same `root`. The data travels as a broadcast of the whole input, as the
    /// sum of [`Comm::reduce`] does as an all-reduce.
    ///
    /// # Errors
    /// The errors of [`Comm::broadcast`], which they name.
    pub fn scatter<T: Pod, S: SendBuffer<T> + ?Sized, R: RecvBuffer<T> + ?Sized>(
        &self,
        input: Option<&S>,
        output: &mut R,
        root: i32,
    ) -> Result<()> {
        let (op, size, rank) = (Op::Broadcast, self.world_size(), self.rank());
        let input = self.at_root(op, ("input", "memory to send"), input, root)?;
        let (input, output) =
            (input.map(|input| input.lend(&self.stream)), output.lend_mut(&self.stream));
        let operators = self.lock();
        let all = open(&operators)?;
        let message = self.message(op, (input.as_ref(), size), (&output, 1), size_of::<T>())?;
        let message = Message { got: size, ..message };
        let root = Some(self.root(op, root)?);
        self.lend(&[input.as_ref(), Some(&output)], || {
            message.by_stage::<f32>(self, all, root, rank..rank + 1)
        })
    }

    /// Enqueues a barrier over all ranks' streams. Work after the barrier on any rank's stream sees
    /// the results of all work before it. The host does not wait.
    ///
    /// # Errors
    /// [`Error::Poisoned`] after a fault.
    pub fn barrier(&self) -> Result<()> {
        let operators = self.lock();
        let mut barrier = open(&operators)?.family(Op::Barrier);
        let run = |barrier: &Operator| barrier.run(&self.stream.ours, &Matrices::default());
        self.stream.enqueue(|| barrier.try_for_each(run))
    }

    fn root(&self, op: Op, root: i32) -> Result<usize> {
        let found = usize::try_from(root).ok().filter(|&root| root < self.world_size());
        found.ok_or_else(|| {
            let expected = format!("a rank, from 0 to {}", self.world_size() - 1);
            Error::invalid(op, "root", root, expected)
        })
    }

    /// Returns `memory` on rank `root`, which must pass it, and `None` on all other ranks. Errors have
    /// the argument's name and what it must be.
    fn at_root<M>(
        &self,
        op: Op,
        (what, needed): (&str, &str),
        memory: Option<M>,
        root: i32,
    ) -> Result<Option<M>> {
        let is_root = self.root(op, root)? == self.rank();
        if is_root && memory.is_none() {
            let expected = format!("on rank {root}, which is the root, {needed}");
            return Err(Error::invalid(op, what, "None", expected));
        }
        Ok(memory.filter(|_| is_root))
    }

    /// Enqueues a collective that sums, such as an all-reduce. Without `input`, the call is in
    /// place: `output` also contains the input.
    fn sum<T: Summand>(
        &self,
        op: Op,
        input: Option<Lent<'_>>,
        output: Lent<'_>,
        operation: ReduceOp,
    ) -> Result<()> {
        is_sum(op, operation)?;
        let parts = if op == Op::ReduceScatter { self.world_size() } else { 1 };
        // Addresses are looked up under the lock. So a call is refused if another thread has freed
        // its slices while the call waited for the lock.
        let operators = self.lock();
        let all = open(&operators)?;
        let message = self.message(op, (input.as_ref(), parts), (&output, 1), size_of::<T>())?;
        let operator = find(all, op, T::DTYPE)?;
        self.lend(&[input.as_ref(), Some(&output)], || message.in_words::<T>(self, operator, None))
    }

    /// Enqueues a collective whose result only rank `root` keeps: `op` with elements of type `W`,
    /// through the communicator's own buffers. Elements of the message have `element` bytes. If the
    /// root passes no `output`, the call is in place.
    fn to_root<W: Element>(
        &self,
        op: Op,
        element: usize,
        input: Lent<'_>,
        output: Option<Lent<'_>>,
        root: i32,
    ) -> Result<()> {
        let is_root = self.root(op, root)? == self.rank();
        let parts = if op == Op::AllGather { self.world_size() } else { 1 };
        let operators = self.lock();
        let all = open(&operators)?;
        let message = match &output {
            Some(output) => self.message(op, (Some(&input), 1), (output, parts), element)?,
            None => self.message(op, (None, 1), (&input, 1), element)?,
        };
        let message = Message { got: parts, ..message };
        let kept = 0..if is_root { parts } else { 0 };
        self.lend(&[Some(&input), output.as_ref()], || message.by_stage::<W>(self, all, None, kept))
    }

    /// Enqueues a collective that only moves data. If the root passes no input, its `output`
    /// contains the data to be sent.
    fn travel<T: Pod>(
        &self,
        op: Op,
        input: Option<Lent<'_>>,
        output: Lent<'_>,
        root: usize,
    ) -> Result<()> {
        let size = self.world_size();
        let (sent, got) = match op {
            Op::AllGather => (1, size),
            Op::AllToAll => (size, size),
            _ => (1, 1),
        };
        let operators = self.lock();
        let all = open(&operators)?;
        let message = self.message(op, (input.as_ref(), sent), (&output, got), size_of::<T>())?;
        let root = (op == Op::Broadcast).then_some(root);
        // The alignment of `T` alone determines which operator runs the call, so that all ranks use
        // the same operator.
        self.lend(&[input.as_ref(), Some(&output)], || match align_of::<T>() {
            _ if size == 1 => message.copy(self),
            1 => message.by_stage::<f32>(self, all, root, 0..got),
            2 => message.in_words::<f16>(self, find(all, op, DType::F16)?, root),
            _ => message.in_words::<f32>(self, find(all, op, DType::F32)?, root),
        })
    }

    /// Checks the heap, input and output, and returns the address ranges of input and output. The
    /// input consists of `sent` parts and the output of `got` parts; all parts have the same length.
    fn message(
        &self,
        op: Op,
        (input, sent): (Option<&Lent<'_>>, usize),
        (output, got): (&Lent<'_>, usize),
        element: usize,
    ) -> Result<Message> {
        // A launch would check for an earlier fault, but a call without elements has no launch.
        check::no_fault(op, &self.heap)?;
        let (rank, size) = (self.rank(), self.world_size());
        let count = output.len() / got;
        let expected = |parts: usize| match parts {
            1 => format!("{count} elements, since the output has {}", output.len()),
            _ => format!("{count} elements for each of {size} ranks"),
        };
        if count * got != output.len() {
            let expected = format!("a multiple of {size}, a part from each rank");
            return Err(Error::invalid(op, "length of the output", output.len(), expected));
        }
        if let Some(input) = input
            && Some(input.len()) != count.checked_mul(sent)
        {
            return Err(Error::invalid(op, "length of the input", input.len(), expected(sent)));
        }
        let bytes = |lent: &Lent<'_>| lent.bytes(op, &self.heap, element as u64);
        let (own, output) = (input.map(bytes).transpose()?, bytes(output)?);
        if let Some(own) = own {
            let apart = own.address + own.bytes <= output.address
                || output.address + output.bytes <= own.address;
            let same = (own.address, own.bytes) == (output.address, output.bytes);
            let in_place = same && matches!(op, Op::AllReduce | Op::Broadcast);
            if !(apart || in_place) {
                return Err(Error::Overlap { op: op.into(), first: "output", second: "input" });
            }
        }
        // A call without an input is in place: `output` of a sum, or of the root, is also the
        // input.
        let input = own.unwrap_or(output);
        Ok(Message { op, rank, input, sent, output, got, part: (count * element) as u64 })
    }

    /// Enqueues a call with the arguments `lent`. Host memory is borrowed only until `lend`
    /// returns. So if an argument is host memory, `lend` waits for the call, even if the call
    /// failed after some of its launches were enqueued.
    fn lend(&self, lent: &[Option<&Lent<'_>>], call: impl FnOnce() -> Result<()>) -> Result<()> {
        if !lent.iter().flatten().any(|lent| lent.is_host()) {
            return self.stream.enqueue(call);
        }
        let sync = || self.stream.ours.sync().map_err(Error::comm);
        lending(sync, || self.stream.enqueue(call))
    }

    /// Splits the parts of the message into ranges of at most `most` bytes, and runs `launch` with
    /// the offset and the length of each range. `launch` sets its flag when it has launched
    /// something that peers see. A failure after that is reported to all ranks of all nodes,
    /// because the call can then be neither repeated nor abandoned.
    pub(super) fn in_ranges(
        &self,
        message: &Message,
        most: u64,
        launch: impl Fn(u64, u64, &Cell<bool>) -> Result<()>,
    ) -> Result<()> {
        let begun = Cell::new(false);
        for from in (0..message.part).step_by(most as usize) {
            let launched = launch(from, most.min(message.part - from), &begun);
            launched.map_err(|error| match begun.get() {
                true => give_up(message.op, &self.heap, &self.stream.ours, error),
                false => error,
            })?;
        }
        Ok(())
    }
}

fn open(operators: &Option<Operators>) -> Result<&Operators> {
    let closed = || Error::comm(iris_heap::Error::Closed { what: "the communicator" });
    operators.as_ref().ok_or_else(closed)
}

fn is_sum(op: Op, operation: ReduceOp) -> Result<()> {
    if operation == ReduceOp::Sum {
        return Ok(());
    }
    let (value, expected) =
        (format!("{operation:?}"), "Sum, the one operation of this communicator");
    Err(Error::invalid(op, "operation of a reduction", value, expected))
}
