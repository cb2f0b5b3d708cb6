//! What is timed, and how.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use cudarc::driver::{CudaGraph, sys};
use iris_heap::{Stream, SymSlice, SymmetricHeap};
use iris_testkit::note;
use iris_testkit::suite::{AnyOp, Operands};
use serde::{Deserialize, Serialize};

use super::Rank;
use super::bare::Bare;
use super::baseline::Baseline;
use super::home::Events;
use super::norm::Apart;
use crate::job::gather;
use crate::watch::give_up;

/// Samples of each side, of replays and of eager calls.
const SAMPLES: usize = 20;
const EAGER_SAMPLES: usize = 5;
/// Of these many no long call is spared.
const LEAST: usize = 5;
/// Calls in a graph, unless they are long; and one behind the other, where the clock is the host's.
const CALLS: usize = 10;
const HOST_CALLS: usize = 20;
/// Calls whose enqueueing is timed, one behind the other, so few that the driver's queue has room for them
/// all; and how often.
const QUEUED_CALLS: usize = 20;
const QUEUES: usize = 10;
/// How long such a queue may take on the device, in microseconds.
const QUEUE_US: f64 = 20_000.0;
/// How long a graph may take that has more than one call, and all samples of a side, in
/// microseconds.
const GRAPH_US: f64 = 3000.0;
const SIDE_US: f64 = 600_000.0;

/// How long a device may take for what it is given at once.
const MOST: Duration = Duration::from_secs(60);

/// What a side does.
pub(super) enum Work<'a> {
    Op(Box<(AnyOp, Operands)>),
    /// An op, and a norm behind it.
    Apart(Box<Apart>),
    /// What libraries do, and what that is.
    Libraries(Baseline<'a>, &'static str),
    /// What the links have to carry, by the copy engines: to each of these peers so much.
    Copies {
        heap: Arc<SymmetricHeap>,
        block: SymSlice<u8>,
        peers: Vec<usize>,
    },
}

/// Something that is timed, with its graph and its times.
pub(super) struct Side<'a> {
    work: Work<'a>,
    /// In the graph, and about how long one takes.
    calls: usize,
    estimate: f64,
    graph: Option<CudaGraph>,
    bare: Option<Bare>,
    times: Times,
}

/// Microseconds of one call, a sample each.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(super) struct Times {
    /// In replays of graphs, or in calls by the host's clock.
    pub(super) calls: Vec<f64>,
    /// Beside replays, those without.
    pub(super) eager: Vec<f64>,
    /// Of the host, from the begin to the end of `run`, while the device has work enough.
    pub(super) run: Vec<f64>,
    /// Time of the host for the same enqueues from a bare loop.
    pub(super) bare: Vec<f64>,
}

impl<'a> Side<'a> {
    pub(super) fn op(op: AnyOp, operands: Operands) -> Self {
        Self::of(Work::Op(Box::new((op, operands))))
    }

    pub(super) fn apart(apart: Apart) -> Self {
        Self::of(Work::Apart(Box::new(apart)))
    }

    pub(super) fn libraries(baseline: Baseline<'a>, name: &'static str) -> Self {
        Self::of(Work::Libraries(baseline, name))
    }

    pub(super) fn copies(
        heap: &Arc<SymmetricHeap>,
        block: SymSlice<u8>,
        peers: Vec<usize>,
    ) -> Self {
        Self::of(Work::Copies { heap: heap.clone(), block, peers })
    }

    fn of(work: Work<'a>) -> Self {
        Side { work, calls: 1, estimate: 0.0, graph: None, bare: None, times: Times::default() }
    }

    pub(super) fn times(&self) -> &Times {
        &self.times
    }

    fn name(&self) -> String {
        match &self.work {
            Work::Op(called) => format!("{:?}", called.0),
            Work::Apart(apart) => format!("{:?}, and its norm", apart.op),
            Work::Libraries(_, name) => (*name).into(),
            Work::Copies { .. } => "copies by engines".into(),
        }
    }

    /// Gives back what the op has: collective. The graph goes before what it launches.
    pub(super) fn free(self) -> Result<()> {
        drop((self.bare, self.graph));
        match self.work {
            Work::Op(called) => called.0.free()?,
            Work::Apart(apart) => apart.op.free()?,
            Work::Libraries(..) | Work::Copies { .. } => {}
        }
        Ok(())
    }
}

/// Times what is enqueued on a rank's stream: by the device's clock and with graphs, or, where there are no
/// events, by the host's and call by call.
pub(super) struct Clock<'a> {
    rank: &'a Rank<'a>,
    /// The stream of the ops, and the same for libraries.
    stream: Stream,
    raw: u64,
    events: Option<Events>,
}

impl<'a> Clock<'a> {
    pub(super) fn new(rank: &'a Rank<'a>, heap: &SymmetricHeap) -> Result<Self> {
        let (stream, raw) = rank.home.stream(heap)?;
        Ok(Clock { rank, stream, raw, events: rank.home.events()? })
    }

    fn enqueue(&self, side: &mut Side<'_>, calls: usize) -> Result<()> {
        for _ in 0..calls {
            match &mut side.work {
                Work::Op(called) => called.0.run(&called.1, &self.stream)?,
                Work::Apart(apart) => apart.run(&self.stream)?,
                Work::Libraries(baseline, _) => {
                    self.rank.home.current(|| baseline.run(self.raw))?
                }
                Work::Copies { heap, block, peers } => {
                    for &peer in &*peers {
                        heap.copy_on(&self.stream, (*block, peer), (*block, heap.rank()))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits for the end event, but not for ever: what a device never ends nobody can, and the program ends
    /// instead. Returns microseconds since the first.
    fn finish(&self, side: &Side<'_>, events: &Events) -> Result<f64> {
        let begun = Instant::now();
        while !events.end.try_is_complete()? {
            if begun.elapsed() > MOST {
                let (rank, what) = (self.rank.world.rank(), side.name());
                note!(
                    "iris: the device of rank {rank} has not ended in {MOST:?}: given up. {what}"
                );
                give_up();
            }
            std::hint::spin_loop();
        }
        Ok(f64::from(events.begin.elapsed_ms(&events.end)?) * 1e3)
    }

    /// Microseconds of one of `calls` calls, enqueued one by one.
    fn eager(&self, side: &mut Side<'_>, calls: usize) -> Result<f64> {
        self.rank.world.barrier()?;
        let us = if let Some(events) = &self.events {
            events.begin.record(&events.stream)?;
            self.enqueue(side, calls)?;
            events.end.record(&events.stream)?;
            self.finish(side, events)?
        } else {
            let begun = Instant::now();
            self.enqueue(side, calls)?;
            self.stream.sync()?;
            begun.elapsed().as_secs_f64() * 1e6
        };
        Ok(us / calls as f64)
    }

    /// Microseconds of one call in a replay that follows another: that one makes the ranks meet.
    fn replay(&self, side: &Side<'_>, events: &Events) -> Result<f64> {
        let graph = side.graph.as_ref().context("the side has no graph")?;
        self.rank.world.barrier()?;
        graph.launch()?;
        events.begin.record(&events.stream)?;
        graph.launch()?;
        events.end.record(&events.stream)?;
        Ok(self.finish(side, events)? / side.calls as f64)
    }

    /// Warms up, and captures as many calls as are worth it: the same number on all ranks.
    pub(super) fn prepare(&self, side: &mut Side<'_>) -> Result<()> {
        self.eager(side, 1)?;
        let time = self.eager(side, 2)?;
        let all: Vec<f64> = gather(self.rank.world, &time)?;
        side.estimate = all.into_iter().fold(1.0, f64::max);
        let Some(Events { stream, .. }) = &self.events else {
            side.calls = HOST_CALLS;
            return Ok(());
        };
        side.calls = ((GRAPH_US / side.estimate) as usize).clamp(1, CALLS);
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode)?;
        let captured = self.enqueue(side, side.calls);
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        captured?;
        let graph = graph?.context("nothing was captured")?;
        graph.upload()?;
        if let Work::Op(_) = &side.work {
            side.bare = Bare::new(&graph, stream)?;
        }
        side.graph = Some(graph);
        Ok(())
    }

    /// Times what `run` takes of the host: of each call by itself, without waiting for the device between. And what
    /// the same enqueues take from a bare loop, of those of the graph.
    fn queue(&self, side: &mut Side<'_>) -> Result<()> {
        let Work::Op(called) = &side.work else { return Ok(()) };
        // The same number on all ranks, as the estimate is.
        let calls = ((QUEUE_US / side.estimate) as usize).clamp(1, QUEUED_CALLS);
        let queues = if calls == QUEUED_CALLS { QUEUES } else { LEAST };
        for _ in 0..queues {
            self.rank.world.barrier()?;
            for _ in 0..calls {
                let begun = Instant::now();
                called.0.run(&called.1, &self.stream)?;
                side.times.run.push(begun.elapsed().as_secs_f64() * 1e6);
            }
            self.stream.sync()?;
            let Some(bare) = &side.bare else { continue };
            self.rank.world.barrier()?;
            let begun = Instant::now();
            bare.enqueue()?;
            side.times.bare.push(begun.elapsed().as_secs_f64() * 1e6 / side.calls as f64);
            bare.sync()?;
        }
        Ok(())
    }

    /// Takes all samples, of the sides in turns.
    pub(super) fn sample(&self, sides: &mut [Side<'_>]) -> Result<()> {
        sides.iter_mut().try_for_each(|side| self.queue(side))?;
        for sample in 0..SAMPLES {
            for side in &mut *sides {
                let spent = (2 * side.calls * sample) as f64 * side.estimate;
                if sample < LEAST || spent < SIDE_US {
                    let time = match &self.events {
                        Some(events) => self.replay(side, events)?,
                        None => self.eager(side, side.calls)?,
                    };
                    side.times.calls.push(time);
                }
            }
        }
        if self.events.is_none() {
            return Ok(());
        }
        for _ in 0..EAGER_SAMPLES {
            for side in &mut *sides {
                let time = self.eager(side, side.calls)?;
                side.times.eager.push(time);
            }
        }
        Ok(())
    }
}
