//! The memory in which ops of a heap exchange tiles, with the words that order it: of one op, or of
//! several that take turns.

use std::sync::Arc;

use iris_heap::{DevWords, RawSlice, Request as Block, Segment, SymmetricHeap};
use iris_sync::{Call, Channel, LINE_WORDS, PRIVATE_SEQUENCE, RESERVED_WORDS};

use crate::device::Device;
use crate::error::{Error, InOp, Result};
use crate::kind::Op;
use crate::needs::{Area, Extent};
use crate::plan::Plan;

/// Memory and words that several operators of a heap can share, instead of having their own each:
/// it is as large as the largest of them needs.
///
/// Their calls are counted together, as if they were calls of one operator: the ranks issue them in
/// the same order, and they run one after the other, whatever streams they are issued on. So whatever
/// keeps a call of an operator from the one before it keeps calls of two operators apart, too.
///
/// ```
/// # use iris_heap::{SymmetricHeap, World};
/// use iris_ops::{AllReduce, MatmulAllReduce, Plan, Workspace, all_reduce, matmul_all_reduce};
/// # World::run_threads(2, |world| -> anyhow::Result<()> {
/// let layer = matmul_all_reduce::Options::new(64, 32, 16).plan(&world)?;
/// let norm = all_reduce::Options::new(64).plan(&world)?;
/// let heap = SymmetricHeap::open(&world, Plan::heap_options(&[&layer, &norm], 0)?)?;
/// let workspace = Workspace::for_plans(&heap, &[&layer, &norm])?; // collective
/// let layer = MatmulAllReduce::in_workspace(&workspace, &layer)?; // collective
/// let norm = AllReduce::in_workspace(&workspace, &norm)?;
/// # layer.free()?;
/// # norm.free()?;
/// # workspace.free()?;
/// # heap.close()?;
/// # Ok(())
/// # })?;
/// # anyhow::Ok(())
/// ```
#[derive(Debug)]
pub struct Workspace {
    heap: Arc<SymmetricHeap>,
    /// The op that errors name: the first.
    op: Op,
    extent: Extent,
    first_call: i32,
    /// Whether it is of a barrier of some ranks, which is no call that all ranks count.
    private: bool,
    signal: RawSlice,
    data: Vec<(Area, RawSlice)>,
    words: DevWords,
    channel: Channel,
}

/// The error of [`Workspace::free`], with the workspace. `?` turns it into an [`enum@Error`].
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct WorkspaceNotFreed {
    /// Why it was not given back.
    pub error: Box<Error>,
    /// The workspace.
    pub workspace: Arc<Workspace>,
}

impl From<WorkspaceNotFreed> for Error {
    fn from(not_freed: WorkspaceNotFreed) -> Error {
        *not_freed.error
    }
}

impl Workspace {
    /// A workspace for operators of these plans: collective.
    ///
    /// # Errors
    /// As `new` of an operator; [`Error::NoPlan`]; [`Error::Invalid`] for a barrier, which needs none,
    /// and for plans that begin with different numbers of calls.
    #[track_caller]
    pub fn for_plans(heap: &Arc<SymmetricHeap>, plans: &[&Plan]) -> Result<Arc<Workspace>> {
        // An operator over several nodes is several operators of this one.
        let plans: Vec<&Plan> = plans.iter().flat_map(|plan| plan.parts()).collect();
        let plans = &plans[..];
        let first = *plans.first().ok_or(Error::NoPlan)?;
        let world = heap.world();
        let items: Vec<_> = plans.iter().flat_map(|plan| plan.fingerprint()).collect();
        world.agree("workspace", &items).in_op(first.op())?;
        let checked = plans.iter().try_for_each(|plan| {
            check_plan(heap, plan)?;
            can_share(plan, first.request().first_call)
        });
        let told = world.all_ok("workspace", outcome(&checked)).in_op(first.op());
        checked.and(told)?;
        Workspace::make(heap, plans, Workspace::prepare_words).map(Arc::new)
    }

    /// The same for plans that are known to agree. Every rank ends it with the workspace, or every
    /// rank with an error, with nothing taken.
    #[track_caller]
    pub(crate) fn make(
        heap: &Arc<SymmetricHeap>,
        plans: &[&Plan],
        prepare: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<Workspace> {
        let first = *plans.first().ok_or(Error::NoPlan)?;
        let (op, request) = (first.op(), first.request());
        let extent = plans.iter().fold(first.extent(), |all, plan| all.max(plan.extent()));
        // What can fail on one rank alone is done before memory is taken together.
        let taken = take_words(heap, op, extent.device_words());
        let told = heap.world().all_ok(op.name(), outcome(&taken)).in_op(op);
        let (sequence, words) = taken?;
        let slices = told.and_then(|()| {
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
        };
        let prepared = workspace.lay_out(&sequence).and_then(|channel| {
            workspace.channel = channel;
            prepare(&workspace)
        });
        // Nobody begins a call before all have prepared their words: this returns when all have told.
        let told = heap.world().all_ok(op.name(), outcome(&prepared)).in_op(op);
        match prepared.and(told) {
            Ok(()) => Ok(workspace),
            Err(error) => {
                // All ranks have come here, or the world is of no further use.
                if let Err(error) = workspace.give_back(&[]) {
                    tracing::warn!(%op, rank = heap.rank(), %error, "its memory is not given back");
                }
                Err(error)
            }
        }
    }

    /// Where its words lie; the id is that of the op whose call it is.
    fn lay_out(&self, sequence: &DevWords) -> Result<Channel> {
        let index = |what: &str, offset: u64, words: u32| {
            let first = u32::try_from(offset / 4).ok();
            let first = first.filter(|first| first.checked_add(words).is_some());
            first.ok_or_else(|| Error::Invalid {
                op: self.op,
                what: format!("offset of its {what}"),
                value: format!("{offset}, with {words} words there"),
                expected: "words that 32 bits number: a segment of at most 16 GiB".into(),
            })
        };
        let first = index("signals", self.signal.offset(), self.extent.signal_words())?;
        debug_assert!(first >= RESERVED_WORDS && first % LINE_WORDS == 0);
        let device = index("device words", self.words.offset(), self.words.len() as u32)?;
        let sequence = index("call counter", sequence.offset(), 1)?;
        let counted = if self.private { device + PRIVATE_SEQUENCE } else { sequence };
        let (rank, shape) = (self.heap.rank() as u32, self.extent.shape(counted));
        Ok(Channel::lay_out(shape, rank, first, device).0)
    }

    /// Every word says "the call before the first"; locks are free. Nobody has a call under way.
    pub(crate) fn prepare_words(&self) -> Result<()> {
        let (op, heap, channel) = (self.op, &self.heap, self.channel);
        let first_call = Call::new(self.first_call);
        let before = first_call.previous().number();
        let mut words = vec![before; (self.signal.bytes() / 4) as usize];
        let start = (self.signal.offset() / 4) as u32;
        // The locks come last.
        words[(channel.locks - start) as usize..].fill(iris_sync::lock::FREE);
        heap.write(self.signal.cast::<i32>().in_op(op)?, &words).in_op(op)?;
        let first = (self.words.offset() / 4) as u32;
        let mut words = vec![before; self.words.len()];
        words[(channel.call - first) as usize] = first_call.number();
        words[(channel.finished - first) as usize] = 0;
        heap.write_device_words(self.words, &words).in_op(op)
    }

    /// Its words, for calls of the op with this id.
    pub(crate) fn channel(&self, id: u32) -> Channel {
        Channel { op: id, ..self.channel }
    }

    /// Where a block of the data segment begins; 0 if there is none.
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

    /// Whether an op of this plan finds room, and calls of the number that it begins with.
    pub(crate) fn check(&self, plan: &Plan) -> Result<()> {
        if !self.extent.holds(plan.extent()) {
            return Err(Error::Invalid {
                op: plan.op(),
                what: "workspace".into(),
                value: "too small".into(),
                expected: "one that was made for this plan".into(),
            });
        }
        can_share(plan, self.first_call)
    }

    /// Give it back. Collective; waits for the streams of the heap. Free, or drop, its operators
    /// before.
    ///
    /// # Errors
    /// [`Error::Invalid`] while an operator has it, on all ranks if it is so on one; those of
    /// [`SymmetricHeap::free`]. [`WorkspaceNotFreed`] gives the workspace back, to try again.
    #[track_caller]
    pub fn free(self: Arc<Self>) -> Result<(), WorkspaceNotFreed> {
        let used = Arc::strong_count(&self) - 1;
        let unused = match used {
            0 => Ok(()),
            _ => Err(Error::Invalid {
                op: self.op,
                what: "workspace to give back".into(),
                value: format!("held by {used} others"),
                expected: "one that no operator has any more".into(),
            }),
        };
        let told = self.heap.world().all_ok("free a workspace", outcome(&unused)).in_op(self.op);
        // No closure: its calls would have a place of their own, which is not the caller's.
        let freed = match unused.and(told) {
            Ok(()) => self.give_back(&[]),
            Err(error) => Err(error),
        };
        freed.map_err(|error| WorkspaceNotFreed { error: Box::new(error), workspace: self })
    }

    /// Give its memory back, with other blocks. Collective.
    #[track_caller]
    pub(crate) fn give_back(&self, others: &[RawSlice]) -> Result<()> {
        let own = self.data.iter().map(|&(_, slice)| slice);
        let all: Vec<_> =
            std::iter::once(self.signal).chain(own).chain(others.iter().copied()).collect();
        self.heap.free_many(&all).in_op(self.op)?;
        self.heap.free_device_words(self.words).in_op(self.op)
    }
}

/// Whether calls of this plan can be counted together with others that begin with this number.
fn can_share(plan: &Plan, first_call: i32) -> Result<()> {
    let invalid = |what: &str, value: String, expected: String| {
        Err(Error::Invalid { op: plan.op(), what: what.into(), value, expected })
    };
    let own = plan.request().first_call;
    if plan.op() == Op::Barrier {
        // It enters no call, for which the next op of the workspace would wait.
        return invalid("workspace", "shared".into(), "one of the barrier's own".into());
    }
    if own != first_call {
        let expected = format!("{first_call}, that of the workspace");
        return invalid("first_call", own.to_string(), expected);
    }
    Ok(())
}

/// Checks that a plan was made for this rank and kind of device, and that the device can run it.
pub(crate) fn check_plan(heap: &SymmetricHeap, plan: &Plan) -> Result<()> {
    let (op, ranks) = (plan.op(), plan.ranks());
    if (ranks.rank, ranks.size) != (heap.rank(), heap.size()) {
        return Err(Error::OtherWorld {
            op,
            planned_rank: ranks.rank,
            planned_size: ranks.size,
            rank: heap.rank(),
            size: heap.size(),
        });
    }
    let (planned, backend) = (ranks.device.backend, heap.options().backend);
    if planned != backend {
        return Err(Error::Invalid {
            op,
            what: "backend of the plan".into(),
            value: planned.to_string(),
            expected: format!("{backend}, the device of the heap"),
        });
    }
    let device = Device::from(heap);
    plan.check_device(device)?;
    plan.tell_device(device);
    Ok(())
}

/// The word that counts calls, and device-local words.
fn take_words(heap: &SymmetricHeap, op: Op, words: usize) -> Result<(DevWords, DevWords)> {
    let sequence = heap.sequence_word().in_op(op)?;
    Ok((sequence, heap.alloc_device_words(words).in_op(op)?))
}

/// What the other ranks are told of a step that only this rank does.
pub(crate) fn outcome<T>(mine: &Result<T>) -> iris_heap::Result<()> {
    mine.as_ref().map(drop).map_err(|error| iris_heap::Error::other(error.clone()))
}

/// Give words back where an error is returned already.
pub(crate) fn give_words_back(heap: &SymmetricHeap, op: Op, words: DevWords) {
    if let Err(error) = heap.free_device_words(words) {
        tracing::warn!(%op, rank = heap.rank(), %error, "device words are not given back");
    }
}
