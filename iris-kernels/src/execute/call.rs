//! Enqueueing of one call: chooses one of the alternative lists of steps in the operator's program,
//! and enqueues each step.

use std::cell::OnceCell;
use std::ops::Range;
use std::sync::Arc;

use iris_heap::{Error, Result, Stream, SymmetricHeap};
use iris_sync::barrier::Members;

use super::kernels::Workgroups;
use super::message::{Message, Part};
use super::step_operands::Places;
use super::{Executor, unsupported};
use crate::args::OpArgs;
use crate::kernel::Kernel;
use crate::program::{
    Alternative, At, EarliestStart, Facts, Gemm, Lane, Step, Transfer, Work, walk,
};

/// Call that is being enqueued, with all data that its steps need.
pub(super) struct Call<'a> {
    pub(super) of: &'a Executor,
    pub(super) heap: &'a Arc<SymmetricHeap>,
    pub(super) stream: &'a Stream,
    /// Arguments of the call, from which the arguments of each step are derived. The arguments are
    /// large, so a step that needs no other arguments uses these without a copy.
    pub(super) args: &'a mut OpArgs,
    groups: Workgroups,
    /// Whether copy engines carry out the transfers of this call; determined when first needed.
    engines: OnceCell<bool>,
}

/// State of a call that is being enqueued, from which recovery from a failure follows.
#[derive(Default)]
pub(super) struct Progress {
    /// Whether a peer can see that the call has begun.
    pub(super) visible: bool,
    /// Whether copies were enqueued on the side stream for which the call's stream does not wait
    /// yet.
    pub(super) forked: bool,
}

impl Facts for Call<'_> {
    type Error = Error;

    fn ranks(&self) -> u32 {
        self.args.channel.size
    }

    fn columns(&self) -> u32 {
        self.args.n
    }

    fn is_by_columns(&self) -> bool {
        self.args.shard == 1
    }

    fn parts(&self) -> u32 {
        self.places().parts()
    }

    /// Whether copy engines do the transfers of this call. Workgroups do them instead in these
    /// cases: ranks share the device, because copies of two ranks could block each other in an
    /// engine's queue; elements change their type or storage order; transferred bytes are counted
    /// or delays are injected; the call is in a capture that cannot order a signal after its data.
    fn has_engines(&self) -> Result<bool> {
        if let Some(&known) = self.engines.get() {
            return Ok(known);
        }
        let kept = self.heap.device().kind.traits().host_threads;
        let transfers = self.of.transfers.iter();
        let alike = transfers.map(|&of| self.places().message(of)).all(|it| it.has_same_layout());
        let can = alike && !kept && !self.of.by_workgroups;
        let has = can && self.heap.gpu()?.copies_signal(self.stream)?;
        Ok(*self.engines.get_or_init(|| has))
    }

    fn fits(&self, gemm: &Gemm) -> bool {
        self.of.gemms.as_ref().is_some_and(|gemms| gemms.fit(self, gemm))
    }
}

impl<'a> Call<'a> {
    /// Makes a call with arguments `args`; nothing is enqueued yet.
    ///
    /// # Safety
    /// The conditions of [`Executor::run`] must hold for all work that the call's methods enqueue.
    pub(super) unsafe fn new(
        of: &'a Executor,
        (heap, stream): (&'a Arc<SymmetricHeap>, &'a Stream),
        args: &'a mut OpArgs,
        groups: Workgroups,
    ) -> Self {
        Call { of, heap, stream, args, groups, engines: OnceCell::new() }
    }

    pub(super) fn places(&self) -> Places<'_> {
        let library_bytes = self.of.gemms.as_ref().map_or(0, |it| it.whole.library_bytes());
        Places { args: self.args, areas: self.of.areas, library_bytes }
    }

    /// Returns the first alternative whose conditions the call meets.
    pub(super) fn alternative(&self) -> Result<&'static Alternative> {
        let alternatives = self.of.alternatives.iter().copied();
        self.of.program.first_met(alternatives, self)?.ok_or_else(|| {
            unsupported(
                "this call".into(),
                "no alternative of its program has all its conditions met",
            )
        })
    }

    /// Enqueues a step, or the steps that replace it if the step cannot be done in this call.
    pub(super) fn step<Peers: Iterator<Item = u32>>(
        &self,
        step: &Step,
        at: At,
        bounds: (u32, &impl Fn() -> Peers),
        progress: &mut Progress,
    ) -> Result<(), Box<(Work, Error)>> {
        let work = step.work;
        let effects = work.effects();
        if effects.ends && std::mem::take(&mut progress.forked) {
            let joined = self.heap.gpu().and_then(|gpu| gpu.join_copies(self.stream));
            joined.map_err(|error| Box::new((work, error)))?;
        }
        let done = self.enqueue(work, at);
        // `forked` is set even after an error: if copies fail half-way, some of them may already be
        // enqueued on the side stream.
        progress.forked |= work.lane() == Lane::Side && !matches!(done, Ok(false));
        if done.map_err(|error| Box::new((work, error)))? {
            progress.visible |= effects.are_visible();
            return Ok(());
        }
        let mut visit = |step: &Step, at: At| self.step(step, at, bounds, progress);
        walk(step.or, at, bounds, &mut visit)
    }

    /// Enqueues the work of a step. Returns true if the work was enqueued or there is nothing to
    /// do, false if the work cannot be done in this call.
    fn enqueue(&self, work: Work, at: At) -> Result<bool> {
        let places = self.places();
        let one = Workgroups::from(1);
        let launch = |kernel: Kernel, args: &OpArgs, groups: Workgroups| {
            let on = (self.heap, self.stream);
            // SAFETY: `Call::new` requires the conditions of `Executor::run`, which cover this
            // launch.
            unsafe {
                self.of.kernels.enqueue(on, kernel, args, (groups, self.may_be_early(work)))
            }?;
            Ok(true)
        };
        let message = |of: Transfer| places.message(of).args;
        match work {
            Work::Kernel(kernel, of) => launch(kernel, &places.operands(of), self.groups),
            Work::Gemm(gemm) => self.gemm(&gemm, at),
            Work::Copies(of) => self.copy(of, at),
            Work::Open(of) => launch(Kernel::Open, &message(of), one),
            Work::Close(of) => launch(Kernel::Close, &message(of), one),
            Work::Gate(of) => {
                let message = places.message(of);
                let Some((source, tiles)) = at.peer.zip(self.tiles(&message, at)) else {
                    return Ok(true);
                };
                let (first, parts) = (message.first + tiles.start, tiles.end - tiles.start);
                launch(Kernel::Gate { source, first, parts }, &message.args, one)
            }
            Work::Sums { to } => match places.own_rows(at) {
                Some(rows) => self.spread(places.sums(to, &rows), &launch),
                None => Ok(true),
            },
            Work::CopyReceived(of) => match places.take(of, at) {
                Some(args) => self.spread(args, &launch),
                None => Ok(true),
            },
            Work::Barrier(phase) => {
                let members = Members::all(self.args.channel.size);
                launch(Kernel::Barrier { phase, members, last: false }, self.args, one)
            }
            Work::BarrierCall => {
                let members = self.of.program.members;
                launch(Kernel::Barrier { phase: 0, members, last: true }, self.args, one)
            }
            Work::RmsNorm => {
                let host = self.heap.device().kind.traits().host_threads;
                let rows = Workgroups::of_rows(self.args.m);
                launch(Kernel::Norm, self.args, if host { self.groups } else { rows })
            }
        }
    }

    /// Whether the launch of `work` may begin before the previous launch has ended. It may not if
    /// ranks share the device, or if a step between nodes may be running, because a waiting launch
    /// must leave room for the launches that it waits for.
    pub(super) fn may_be_early(&self, work: Work) -> bool {
        let alone = self.heap.ranks_on_device() == 1 && self.of.program.overlap.is_none();
        work.early() != EarliestStart::No && alone
    }

    /// Numbers of the tiles of `message` that must have arrived from peer `at.peer`, which the
    /// program's loop over peers has reached; `None` if there is nothing to wait for.
    fn tiles(&self, message: &Message, at: At) -> Option<Range<u32>> {
        let peer = at.peer?;
        match at.part {
            None => Some(message.all_received(peer)),
            Some(part) => Some(message.received(peer).nth(part as usize)?.tiles),
        }
    }

    /// Enqueues a kernel that adds up rows that have arrived, with one workgroup per tile; fewer if
    /// not all workgroups would be co-resident.
    fn spread(
        &self,
        args: OpArgs,
        launch: &impl Fn(Kernel, &OpArgs, Workgroups) -> Result<bool>,
    ) -> Result<bool> {
        /// Minimum number of elements of a tile, so that each thread adds several vectors.
        const ENOUGH: u32 = 16 << 10;
        let (rows, tile_n) = (args.a.rows, args.n.clamp(1, ENOUGH));
        let tile_m = (ENOUGH / tile_n).clamp(1, rows.max(1));
        let tiles = rows.div_ceil(tile_m).saturating_mul(args.n.div_ceil(tile_n));
        let groups = tiles.clamp(1, self.of.max_coresident_workgroups());
        launch(Kernel::Sums, &OpArgs { m: rows, tile_m, tile_n, ..args }, groups.into())
    }

    /// Lets copy engines do the transfer `of`; returns false if they cannot. `at` is the position
    /// in the program's loops. In a loop over parts, only the current part is sent, otherwise all
    /// parts. In a loop over peers, the data goes to the current peer, otherwise to all peers.
    fn copy(&self, of: Transfer, at: At) -> Result<bool> {
        if !self.has_engines()? {
            return Ok(false);
        }
        let message = self.places().message(of);
        let rank = self.args.channel.rank;
        let sent = |to: u32| {
            let chosen =
                move |&(number, _): &(u32, Part)| at.part.is_none_or(|part| part == number);
            let parts = (0..).zip(message.sent(to)).filter(chosen);
            parts.map(move |(_, part)| (to, part))
        };
        if at.part.is_some() && sent(at.peer.unwrap_or(rank)).next().is_none() {
            return Ok(true);
        }
        let peers = || self.args.channel.peers();
        let copies = |(to, part): (u32, Part)| message.copies(to, part);
        let (gpu, stream) = (self.heap.gpu()?, self.stream);
        let done = match at.peer {
            // SAFETY: `Call::new` requires the conditions of `Executor::run`, which cover these
            // copies.
            Some(peer) => unsafe { gpu.copy_concurrent(stream, sent(peer).flat_map(copies)) },
            None => {
                // Every peer gets the same parts. Each part is sent to all peers before the next
                // part is sent.
                let parts =
                    sent(rank).flat_map(|(_, part)| peers().map(move |to| (to, part.clone())));
                // SAFETY: `Call::new` requires the conditions of `Executor::run`, which cover these
                // copies.
                unsafe { gpu.copy_concurrent(stream, parts.flat_map(copies)) }
            }
        };
        done.map(|()| true)
    }
}
