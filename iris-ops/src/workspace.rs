//! Workspace: the memory in which operators exchange tiles, and the words that synchronise the
//! exchange. A workspace belongs to one operator, or is shared by several operators whose calls run
//! one after the other.

use std::collections::BTreeMap;
use std::sync::Arc;

use iris_heap::{DevWords, RawSlice, Request as Block, Segment, SymmetricHeap};
use iris_sync::{Call, Channel, LINE_WORDS, PRIVATE_SEQUENCE, RESERVED_WORDS};

use crate::device::Device;
use crate::error::{Error, InOp, Result};
use crate::memory_needs::{Area, Extent};
use crate::op_names::Op;
use crate::plan::Plan;
use crate::plan::composed;

/// Memory and words that several operators of a heap can share, so that each need not have its own.
/// The size of the workspace is the largest that any of the operators needs.
///
/// Calls of the sharing operators are numbered together, like calls of one operator. All ranks
/// issue them in the same order, and they run one after the other, on whatever streams. So the
/// rules that protect a call from the previous call also hold between operators.
///
/// ```
/// # use iris_heap::World;
/// use iris_ops::{AllReduce, HeapReserve, MatmulAllReduce, Plan, Workspace, all_reduce, matmul_all_reduce};
/// # World::run_threads(2, |world| -> anyhow::Result<()> {
/// let layer = matmul_all_reduce::Options::new(64, 32, 16).plan(&world)?;
/// let norm = all_reduce::Options::new(64).plan(&world)?;
/// let heap = Plan::open_heap(&world, &[&layer, &norm], HeapReserve::none())?;
/// let workspace = Workspace::for_plans(&heap, &[&layer, &norm])?; // collective
/// let layer = MatmulAllReduce::in_workspace(&workspace, &layer)?; // collective
/// let norm = AllReduce::in_workspace(&workspace, &norm)?;
/// # drop((layer, norm));
/// # heap.close()?;
/// # Ok(())
/// # })?;
/// # anyhow::Ok(())
/// ```
#[derive(Debug)]
pub struct Workspace {
    heap: Arc<SymmetricHeap>,
    /// Operator of the first plan; error messages name this operator.
    op: Op,
    extent: Extent,
    first_call: i32,
    /// Whether the workspace belongs to a barrier of only some ranks. The heap does not count the
    /// calls of such a barrier.
    private: bool,
    signal: RawSlice,
    data: Vec<(Area, RawSlice)>,
    words: DevWords,
    channel: Channel,
    /// Memory areas for the steps between nodes. Operators can share them, because calls over
    /// several nodes run one after the other.
    between_nodes: BTreeMap<composed::Area, RawSlice>,
}

/// Error of [`Workspace::free`], which returns the workspace. `?` converts it into [`enum@Error`].
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct WorkspaceNotFreed {
    /// Reason why the workspace was not freed.
    pub error: Box<Error>,
    /// Workspace that is still in use, returned so that the caller can try again.
    pub workspace: Arc<Workspace>,
}

impl From<WorkspaceNotFreed> for Error {
    fn from(not_freed: WorkspaceNotFreed) -> Error {
        *not_freed.error
    }
}

impl Workspace {
    /// Makes a workspace for an operator of each of these plans. Collective.
    ///
    /// # Errors
    /// Errors of `new` of an operator; [`Error::NoPlan`] if `plans` is empty; [`Error::Invalid`]
    /// for a barrier, which cannot share a workspace, and for plans whose first calls have
    /// different numbers.
    #[track_caller]
    pub fn for_plans(heap: &Arc<SymmetricHeap>, plans: &[&Plan]) -> Result<Arc<Workspace>> {
        let areas = composed::largest_areas(plans);
        let of_nodes = plans.iter().try_for_each(|plan| check_nodes(heap, plan));
        // An operator over several nodes consists of several operators of this node, each with a
        // separate plan.
        let plans: Vec<&Plan> = plans.iter().flat_map(|plan| plan.parts()).collect();
        let plans = &plans[..];
        let first = *plans.first().ok_or(Error::NoPlan)?;
        heap.check_before_step().in_op(first.op())?;
        let world = heap.local_world();
        let items: Vec<_> = plans.iter().flat_map(|plan| plan.fingerprint()).collect();
        world.agree("workspace", &items).in_op(first.op())?;
        let checked = of_nodes.and_then(|()| {
            plans.iter().try_for_each(|plan| {
                check_plan(heap, plan)?;
                can_share(plan, first.request().first_call)
            })
        });
        let all_ok = world.all_ok("workspace", outcome(&checked)).in_op(first.op());
        checked.and(all_ok)?;
        let mut workspace = Workspace::make(heap, plans, Workspace::prepare_words)?;
        // Avoids a closure, which would hide the caller's location from `#[track_caller]`;
        // collective calls report this location.
        match composed::alloc_areas(heap, first.op(), &areas) {
            Ok(slices) => workspace.between_nodes = slices,
            Err(error) => {
                if let Err(error) = workspace.give_back(&[]) {
                    tracing::warn!(rank = heap.rank(), %error, "the memory of a workspace could not be freed");
                }
                return Err(error);
            }
        }
        Ok(Arc::new(workspace))
    }

    /// Makes a workspace for plans that the ranks have already compared. Collective: either all
    /// ranks get the workspace, or all get an error and no memory stays allocated.
    #[track_caller]
    pub(crate) fn make(
        heap: &Arc<SymmetricHeap>,
        plans: &[&Plan],
        prepare: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<Workspace> {
        let first = *plans.first().ok_or(Error::NoPlan)?;
        let (op, request) = (first.op(), first.request());
        let extent = plans.iter().fold(first.extent(), |all, plan| all.max(plan.extent()));
        // Device words are allocated first. This can fail on one rank alone, which must not happen
        // after a collective allocation.
        let taken = take_words(heap, op, extent.device_words());
        let all_ok = heap.local_world().all_ok(op.name(), outcome(&taken)).in_op(op);
        let (sequence, words) = taken?;
        let slices = all_ok.and_then(|()| {
            let signals = Block::new(Segment::Signal, extent.signal_bytes(), "signals");
            let data = extent.data_blocks().into_iter();
            let data = data.map(|(area, bytes)| Block::new(Segment::Data, bytes, area.name()));
            let blocks: Vec<_> = std::iter::once(signals).chain(data).collect();
            heap.alloc_many(op.name(), &blocks).in_op(op)
        });
        let slices = match slices {
            Ok(slices) => slices,
            Err(error) => {
                give_words_back(heap, op, words);
                return Err(error);
            }
        };
        let areas = extent.data_blocks().into_iter().map(|(area, _)| area);
        let mut workspace = Workspace {
            heap: Arc::clone(heap),
            op,
            extent,
            first_call: request.first_call,
            private: request.members.is_some(),
            signal: slices[0],
            data: areas.zip(slices[1..].iter().copied()).collect(),
            words,
            channel: Channel::default(),
            between_nodes: BTreeMap::new(),
        };
        let prepared = workspace.lay_out(&sequence).and_then(|channel| {
            workspace.channel = channel;
            prepare(&workspace)
        });
        // `all_ok` returns when every rank has prepared its words. No rank may begin a call before
        // that.
        let all_ok = heap.local_world().all_ok(op.name(), outcome(&prepared)).in_op(op);
        match prepared.and(all_ok) {
            Ok(()) => Ok(workspace),
            Err(error) => {
                // The collective `give_back` is safe to call here. Either every rank calls it here,
                // or the world is broken and cannot be used any more.
                if let Err(error) = workspace.give_back(&[]) {
                    tracing::warn!(%op, rank = heap.rank(), %error, "the memory of a workspace could not be freed");
                }
                Err(error)
            }
        }
    }

    /// Computes the indices of the workspace's words. `sequence` is the device word with the number
    /// of calls of the heap.
    fn lay_out(&self, sequence: &DevWords) -> Result<Channel> {
        let index = |what: &str, offset: u64, words: u32| {
            let first = u32::try_from(offset / 4).ok();
            let first = first.filter(|first| first.checked_add(words).is_some());
            first.ok_or_else(|| {
                let what = format!("offset of the {what} of its workspace");
                let value = format!("{offset}, with {words} words there");
                let expected = "word indices below 2^32: use a segment of at most 16 GiB";
                Error::invalid(self.op, what, value, expected)
            })
        };
        let first = index("signals", self.signal.offset(), self.extent.signal_words())?;
        debug_assert!(first >= RESERVED_WORDS && first % LINE_WORDS == 0);
        let device = index("device words", self.words.offset(), self.words.len() as u32)?;
        let sequence = index("call counter", sequence.offset(), 1)?;
        let counted = if self.private { device + PRIVATE_SEQUENCE } else { sequence };
        let (rank, shape) = (self.heap.local_rank() as u32, self.extent.shape(counted));
        Ok(Channel::lay_out(shape, rank, first, device).0)
    }

    /// Sets every word to the number of the call before the first one, and unlocks the locks. No
    /// call may be running.
    pub(crate) fn prepare_words(&self) -> Result<()> {
        let (op, heap, channel) = (self.op, &self.heap, self.channel);
        let first_call = Call::new(self.first_call);
        let before = first_call.previous().number();
        let mut words = vec![before; (self.signal.bytes() / 4) as usize];
        let start = (self.signal.offset() / 4) as u32;
        // Lock words are the last words of the layout. They are set to unlocked.
        words[(channel.locks - start) as usize..].fill(iris_sync::lock::FREE);
        heap.write(self.signal.cast::<i32>().in_op(op)?, &words).in_op(op)?;
        let first = (self.words.offset() / 4) as u32;
        let mut words = vec![before; self.words.len()];
        words[(channel.call - first) as usize] = first_call.number();
        words[(channel.finished - first) as usize] = 0;
        heap.write_device_words(self.words, &words).in_op(op)
    }

    /// Indices of the workspace's words (signals, flags, counters) for the operator with the id
    /// `id`.
    pub(crate) fn channel(&self, id: u32) -> Channel {
        Channel { op: id, ..self.channel }
    }

    /// Byte offset of an area in the data segment; 0 if the workspace has no such area.
    pub(crate) fn place(&self, area: Area) -> u64 {
        let found = self.data.iter().find(|(known, _)| *known == area);
        found.map_or(0, |(_, slice)| slice.offset())
    }

    pub(crate) fn heap(&self) -> &Arc<SymmetricHeap> {
        &self.heap
    }

    pub(crate) fn extent(&self) -> &Extent {
        &self.extent
    }

    /// Checks that an operator of this plan fits into the workspace, and that the number of the
    /// plan's first call is that of the workspace.
    pub(crate) fn check(&self, plan: &Plan) -> Result<()> {
        if !self.extent.holds(plan.extent()) {
            return Err(too_small(plan));
        }
        can_share(plan, self.first_call)
    }

    /// Memory for the steps between nodes of an operator of `plan`. `needed` has the sizes in bytes
    /// of the areas that the operator needs.
    pub(crate) fn areas_for(
        &self,
        plan: &Plan,
        needed: &BTreeMap<composed::Area, u64>,
    ) -> Result<BTreeMap<composed::Area, RawSlice>> {
        let area = |(&area, &bytes): (&composed::Area, &u64)| {
            let found = self.between_nodes.get(&area).filter(|slice| slice.bytes() >= bytes);
            found.map(|&slice| (area, slice)).ok_or_else(|| too_small(plan))
        };
        needed.iter().map(area).collect()
    }

    /// Frees the workspace. Collective; waits for the streams of the heap. Free or drop the
    /// operators that use the workspace first.
    ///
    /// # Errors
    /// [`Error::Invalid`] on all ranks if, on any rank, an operator still uses the workspace;
    /// errors of [`SymmetricHeap::free`]. [`WorkspaceNotFreed`] returns the workspace, for another
    /// attempt.
    #[track_caller]
    pub fn free(self: Arc<Self>) -> Result<(), WorkspaceNotFreed> {
        let used = Arc::strong_count(&self) - 1;
        let unused = match used {
            0 => Ok(()),
            _ => {
                let value = format!("held by {used} others");
                let expected =
                    "a workspace that no operator uses: free or drop its operators first";
                Err(Error::invalid(self.op, "workspace to free", value, expected))
            }
        };
        let all_ok = match self.heap.check_before_step() {
            Ok(()) => self.heap.local_world().all_ok("free a workspace", outcome(&unused)),
            failed => failed,
        };
        let all_ok = all_ok.in_op(self.op);
        // Avoids a closure, which would hide the caller's location from `#[track_caller]`.
        // Collective calls of the ranks are matched by this location.
        let freed = match unused.and(all_ok) {
            Ok(()) => self.give_back(&[]),
            Err(error) => Err(error),
        };
        freed.map_err(|error| WorkspaceNotFreed { error: Box::new(error), workspace: self })
    }

    /// Frees the workspace's memory, and the blocks `others` in the same collective step.
    #[track_caller]
    pub(crate) fn give_back(&self, others: &[RawSlice]) -> Result<()> {
        let own = self.data.iter().map(|&(_, slice)| slice);
        let own = own.chain(self.between_nodes.values().copied());
        let all: Vec<_> =
            std::iter::once(self.signal).chain(own).chain(others.iter().copied()).collect();
        self.heap.free_many(&all).in_op(self.op)?;
        self.heap.free_device_words(self.words).in_op(self.op)
    }
}

/// Makes the error for a workspace that is too small for an operator of this plan.
fn too_small(plan: &Plan) -> Error {
    let expected = "a workspace made for this plan: pass the plan to Workspace::for_plans";
    Error::invalid(plan.op(), "workspace", "too small", expected)
}

/// Checks that calls of this plan may be numbered together with calls of other operators, whose
/// first call has the number `first_call`.
fn can_share(plan: &Plan, first_call: i32) -> Result<()> {
    let (op, own) = (plan.op(), plan.request().first_call);
    if op == Op::Barrier {
        // A barrier writes no entry record, but the next operator in the workspace would wait for
        // such a record.
        let expected = "one of the barrier's own: make it with Barrier::new";
        return Err(Error::invalid(op, "workspace", "shared", expected));
    }
    if own != first_call {
        let expected = format!("{first_call}, as in the other plans of the workspace");
        return Err(Error::invalid(op, "first_call", own, expected));
    }
    Ok(())
}

/// Checks that a plan for all ranks of the heap's whole world was made for the heap's number of
/// nodes. Plans for another world pass.
pub(crate) fn check_nodes(heap: &SymmetricHeap, plan: &Plan) -> Result<()> {
    let (ranks, world) = (plan.topology(), heap.whole_world());
    let (planned, nodes) = (ranks.nodes(), world.nodes());
    if (ranks.rank, ranks.size) != (world.rank(), world.size()) || planned == nodes {
        return Ok(());
    }
    Err(Error::OtherNodes { op: plan.op().into(), planned, nodes })
}

/// Checks that a plan was made for this rank and backend, and that the heap's device can run it.
pub(crate) fn check_plan(heap: &SymmetricHeap, plan: &Plan) -> Result<()> {
    let (op, ranks) = (plan.op(), plan.topology());
    if (ranks.rank, ranks.size) != (heap.local_rank(), heap.local_size()) {
        check_nodes(heap, plan)?;
        return Err(Error::OtherWorld {
            op: op.into(),
            planned_rank: ranks.rank,
            planned_size: ranks.size,
            rank: heap.rank(),
            size: heap.size(),
        });
    }
    let (planned, backend) = (ranks.device.backend, heap.options().backend);
    if planned != backend {
        let expected = format!("{backend}, the device of the heap");
        return Err(Error::invalid(op, "backend of the plan", planned, expected));
    }
    let device = Device::from(heap);
    plan.check_device(device)?;
    plan.log_device(device);
    Ok(())
}

/// Allocates `words` device words. Returns the heap's word with the number of calls, and the new
/// words.
fn take_words(heap: &SymmetricHeap, op: Op, words: usize) -> Result<(DevWords, DevWords)> {
    let sequence = heap.sequence_word().in_op(op)?;
    Ok((sequence, heap.alloc_device_words(words).in_op(op)?))
}

/// Result of this rank's local step, in the form in which `all_ok` sends it to the other ranks.
pub(crate) fn outcome<T>(mine: &Result<T>) -> iris_heap::Result<()> {
    mine.as_ref().map(drop).map_err(|error| iris_heap::Error::other(error.clone()))
}

/// Frees device words in a function that already returns an error. If they cannot be freed, the
/// second error is only logged.
pub(crate) fn give_words_back(heap: &SymmetricHeap, op: Op, words: DevWords) {
    if let Err(error) = heap.free_device_words(words) {
        tracing::warn!(%op, rank = heap.rank(), %error, "device words could not be freed");
    }
}
