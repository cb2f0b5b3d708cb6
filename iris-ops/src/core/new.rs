//! Making an op: the one collective step.

use std::sync::Arc;

use iris_heap::{DevWords, SymmetricHeap};
use iris_kernels::build::OpBuild;
use iris_kernels::{Launcher, trace};
use iris_sync::{Channel, LINE_WORDS, RESERVED_WORDS};

use super::{BESIDE_WORDS, COUNTER_WORDS, Core};
use crate::error::{Error, InOp, Result};
use crate::plan::Plan;

/// What a rank has for an op by itself.
struct Own {
    launcher: Launcher,
    groups: u32,
    sequence: DevWords,
    device: DevWords,
    channel_words: usize,
}

impl Own {
    fn prepare(op: &'static str, heap: &SymmetricHeap, plan: &Plan) -> Result<Self> {
        let invalid = |what: &str, value: String, expected: String| {
            Err(Error::Invalid { op, what: what.into(), value, expected })
        };
        if plan.op != op {
            return invalid("plan", format!("one of {}", plan.op), format!("one of {op}"));
        }
        if (plan.ranks.rank, plan.ranks.size) != (heap.rank(), heap.size()) {
            return Err(Error::OtherWorld {
                op,
                planned_rank: plan.ranks.rank,
                planned_size: plan.ranks.size,
                rank: heap.rank(),
                size: heap.size(),
            });
        }
        let (planned, backend) = (plan.options.backend, heap.options().backend);
        if planned != backend {
            let expected = format!("{backend}, the device of the heap");
            return invalid("backend of the plan", planned.to_string(), expected);
        }
        let build = OpBuild {
            op,
            product: plan.product,
            dtype: plan.options.dtype,
            tile_m: plan.tile.m as u32,
            tile_n: plan.tile.n as u32,
            injected: plan.options.injected,
            observed: plan.options.is_observed(),
        };
        let launcher = Launcher::new(heap, &build, &plan.kernels()).in_op(op)?;
        let resident = launcher.resident();
        let groups = plan.options.workgroups.unwrap_or(resident as usize);
        if groups > resident as usize {
            let expected = format!("at most {resident}, which can be resident");
            return invalid("workgroups", groups.to_string(), expected);
        }
        let sequence = heap.sequence_word().in_op(op)?;
        let (_, words) = Channel::lay_out(plan.channel_shape(0, 0), 0, 0, 0);
        let channel_words = words.device as usize;
        let device =
            heap.alloc_device_words(channel_words + COUNTER_WORDS + BESIDE_WORDS).in_op(op)?;
        Ok(Self { launcher, groups: groups as u32, sequence, device, channel_words })
    }
}

impl Core {
    /// The one collective step: agree on the plan, take the workspace, prepare the words.
    ///
    /// Every rank ends it with the op, or every rank with an error: whoever cannot do its part tells
    /// the others, and what was taken until then is given back on all.
    #[track_caller]
    pub(crate) fn new(op: &'static str, heap: &Arc<SymmetricHeap>, plan: &Plan) -> Result<Self> {
        Self::make(op, heap, plan, Self::prepare_words)
    }

    #[track_caller]
    pub(super) fn make(
        op: &'static str,
        heap: &Arc<SymmetricHeap>,
        plan: &Plan,
        prepare: impl FnOnce(&Self, Channel) -> Result<()>,
    ) -> Result<Self> {
        let _site = iris_heap::CallSite::enter();
        let world = heap.world();
        world.agree(op, &plan.fingerprint()).in_op(op)?;
        // What can fail on one rank alone is done before memory is taken together.
        let own = Own::prepare(op, heap, plan);
        let told = world.all_ok(op, outcome(&own)).in_op(op);
        let Own { launcher, groups, sequence, device, channel_words } = own?;
        let slices = told.and_then(|()| {
            let requests = plan.all_requests();
            heap.alloc_many(op, &requests).in_op(op)
        });
        let mut slices = match slices {
            Ok(slices) => slices.into_iter(),
            Err(error) => {
                give_words_back(heap, op, device);
                return Err(error);
            }
        };
        let signal = slices.next();
        let names = plan.requests().into_iter().map(|(name, _)| name);
        let mut core = Self {
            heap: Arc::clone(heap),
            plan: plan.clone(),
            args: bytemuck::Zeroable::zeroed(),
            signal,
            data: names.zip(slices).collect(),
            words: device,
            channel_words,
            launcher,
            groups,
        };
        let prepared =
            core.channel(&sequence).and_then(|channel| prepare(&core, channel).map(|()| channel));
        // Nobody begins a call before all have prepared their words: this returns when all have told.
        let told = world.all_ok(op, outcome(&prepared)).in_op(op);
        match prepared.and_then(|channel| told.map(|()| channel)) {
            Ok(channel) => {
                // Named when it is certain that all ranks have it, so that they count alike.
                let id = heap.control().name_op(op);
                core.args = core.template(Channel { op: id, ..channel });
                Ok(core)
            }
            Err(error) => {
                // All ranks have come here, or the world is of no further use.
                if let Err(error) = core.free() {
                    tracing::warn!(op, rank = heap.rank(), %error, "its memory is not given back");
                }
                Err(error)
            }
        }
    }

    /// Where its words lie; it has no id yet.
    fn channel(&self, sequence: &DevWords) -> Result<Channel> {
        let shape = self.plan.channel_shape(0, 0);
        let (_, words) = Channel::lay_out(shape, 0, 0, 0);
        let index = |what: &str, offset: u64, words: u32| {
            let first =
                u32::try_from(offset / 4).ok().filter(|first| first.checked_add(words).is_some());
            first.ok_or_else(|| Error::Invalid {
                op: self.plan.op,
                what: format!("offset of its {what}"),
                value: format!("{offset}, with {words} words there"),
                expected: "words that 32 bits number: a segment of at most 16 GiB".into(),
            })
        };
        let signal = self.signal.map_or(0, |slice| slice.offset());
        let first = index("signals", signal, words.signal)?;
        debug_assert!(first >= RESERVED_WORDS && first % LINE_WORDS == 0);
        let device = index("device words", self.words.offset(), self.words.len() as u32)?;
        let sequence = index("call counter", sequence.offset(), 1)?;
        // A barrier of some ranks is no call that all ranks count.
        let counted = match self.plan.options.members {
            Some(_) => device + iris_sync::PRIVATE_SEQUENCE,
            None => sequence,
        };
        let shape = self.plan.channel_shape(0, counted);
        Ok(Channel::lay_out(shape, self.heap.rank() as u32, first, device).0)
    }

    /// Every word says "the call before the first"; locks are free. Nobody has a call under way,
    /// and the barrier that follows lets nobody begin before all are done.
    pub(super) fn prepare_words(&self, channel: Channel) -> Result<()> {
        let (op, heap) = (self.plan.op, &self.heap);
        let first_call = iris_sync::Call::new(self.plan.options.first_call);
        let before = first_call.previous().number();
        if let Some(slice) = self.signal {
            let mut words = vec![before; (slice.bytes() / 4) as usize];
            let start = (slice.offset() / 4) as u32;
            if self.plan.needs.locks {
                words[(channel.locks - start) as usize..][..channel.tiles as usize]
                    .fill(iris_sync::lock::FREE);
            }
            heap.write(slice.cast::<i32>().in_op(op)?, &words).in_op(op)?;
        }
        if let Some(trace) = self.trace_slice() {
            let counts = trace.slice(..trace::MAX_GROUPS * 4).in_op(op)?;
            heap.write(counts, &[0; trace::MAX_GROUPS * 4]).in_op(op)?;
        }
        let first = (self.words.offset() / 4) as u32;
        let mut words = vec![before; self.words.len()];
        words[(channel.call - first) as usize] = first_call.number();
        words[(channel.finished - first) as usize] = 0;
        words[self.channel_words..].fill(0);
        heap.write_device_words(self.words, &words).in_op(op)
    }
}

/// What the other ranks are told of a step that only this rank does.
fn outcome<T>(mine: &Result<T>) -> iris_heap::Result<()> {
    mine.as_ref().map(drop).map_err(|error| iris_heap::Error::other(error.clone()))
}

fn give_words_back(heap: &SymmetricHeap, op: &'static str, words: DevWords) {
    if let Err(error) = heap.free_device_words(words) {
        tracing::warn!(op, rank = heap.rank(), %error, "device words are not given back");
    }
}
