//! Sides of a measurement: ops, library calls or copies that are compared; and the method by which
//! they are timed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use cudarc::driver::{CudaGraph, sys};
use iris_heap::{Stream, SymSlice, SymmetricHeap};
use iris_kernels::vendor::Communicator;
use iris_testkit::note;
use serde::{Deserialize, Serialize};

use super::Rank;
use super::baseline::{Baseline, Buffers};
use super::bench_device::Events;
use super::called::Called;
use super::driver_loop::Bare;
use super::norm::Apart;
use super::step::Step;
use crate::job::gather;
use crate::timing::balanced;
use crate::watch::give_up;

/// Number of samples of each side, for graph replays (`SAMPLES`) and for calls without a graph
/// (`EAGER_SAMPLES`).
const SAMPLES: usize = 20;
const EAGER_SAMPLES: usize = 5;
/// Minimum number of samples of each side, even if its calls are long.
const LEAST: usize = 5;
/// Number of calls in a graph, unless the calls are long (`CALLS`); number of consecutive calls if
/// the host's clock is used (`HOST_CALLS`).
const CALLS: usize = 10;
const HOST_CALLS: usize = 20;
/// Number of consecutive `run` calls whose host time is measured, few enough to fit the driver's
/// queue (`QUEUED_CALLS`), and number of such series (`QUEUES`).
const QUEUED_CALLS: usize = 20;
const QUEUES: usize = 10;
/// Maximum device time of the calls whose enqueue time is measured together, in microseconds.
const QUEUE_US: f64 = 20_000.0;
/// Maximum time in microseconds of a graph with more than one call (`GRAPH_US`), and of all samples
/// of a side (`SIDE_US`).
const GRAPH_US: f64 = 3000.0;
const SIDE_US: f64 = 600_000.0;

/// Longest wait for the end of timed work; the program then assumes that the device hangs, and
/// ends.
const MOST: Duration = Duration::from_secs(60);

/// Work that one side of a measurement repeats in each of its calls.
pub(super) enum Work<'a> {
    Op(Box<Called>),
    /// Op, followed by a separate RMSNorm kernel.
    Apart(Box<Apart>),
    /// Library calls, and their name in messages.
    Libraries(Baseline<'a>, &'static str),
    /// Decoder step: all-reduces of many layers, one after the other.
    Step(Step<'a>),
    /// Copies of `block`, the data that the links must carry, to each peer by the copy engines.
    Copies {
        heap: Arc<SymmetricHeap>,
        block: SymSlice<u8>,
        peers: Vec<usize>,
    },
}

/// One side of a measurement: the work to time, its graph, and its times so far.
pub(super) struct Side<'a> {
    work: Work<'a>,
    /// Number of calls in the graph, and estimated microseconds per call.
    calls: usize,
    estimate: f64,
    graph: Option<CudaGraph>,
    bare: Option<Bare>,
    times: Times,
}

/// Microseconds per call, one value per sample.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(super) struct Times {
    /// Times in graph replays or, without graphs, by the host's clock.
    pub(super) calls: Vec<f64>,
    /// Times of calls that are enqueued one by one, without a graph.
    pub(super) eager: Vec<f64>,
    /// Host time of one `run` call, while the device is still busy with earlier ones.
    pub(super) run: Vec<f64>,
    /// Host time of the same driver calls in a loop without iris.
    pub(super) bare: Vec<f64>,
}

impl<'a> Side<'a> {
    pub(super) fn op(called: Called) -> Self {
        Self::of(Work::Op(Box::new(called)))
    }

    pub(super) fn libraries(baseline: Baseline<'a>, name: &'static str) -> Self {
        Self::of(Work::Libraries(baseline, name))
    }

    pub(super) fn of(work: Work<'a>) -> Self {
        Side { work, calls: 1, estimate: 0.0, graph: None, bare: None, times: Times::default() }
    }

    pub(super) fn times(&self) -> &Times {
        &self.times
    }

    fn name(&self) -> String {
        match &self.work {
            Work::Op(called) => called.name(),
            Work::Apart(apart) => format!("{}, and its norm", apart.op.name()),
            Work::Libraries(_, name) => (*name).into(),
            Work::Step(step) => step.name(),
            Work::Copies { .. } => "copies by engines".into(),
        }
    }

    /// Frees the op of the side. Collective. The graph is dropped first, because it refers to the
    /// op's kernels.
    pub(super) fn free(self) -> Result<()> {
        drop((self.bare, self.graph));
        match self.work {
            Work::Op(called) => called.free()?,
            Work::Apart(apart) => apart.op.free()?,
            Work::Step(step) => step.free()?,
            Work::Libraries(..) | Work::Copies { .. } => {}
        }
        Ok(())
    }
}

/// Clock of a rank. If it has device events, it times graph replays by these events; otherwise it
/// times calls by the host's clock.
pub(super) struct Clock<'a> {
    rank: &'a Rank<'a>,
    /// Stream of the ops, and the driver's handle of it for libraries.
    stream: Stream,
    raw: u64,
    events: Option<Events>,
}

impl<'a> Clock<'a> {
    pub(super) fn new(rank: &'a Rank<'a>, heap: &SymmetricHeap) -> Result<Self> {
        let (stream, raw) = rank.home.stream(heap)?;
        Ok(Clock { rank, stream, raw, events: rank.home.events()? })
    }

    /// Calls NCCL once after graphs have been freed, before the memory that they used is. NCCL
    /// registers the buffers of calls that are captured, and may release them only in its next call,
    /// when another heap has these addresses (NCCL 2.28.9: illegal addresses in 5 of 10 runs of a
    /// broadcast after an all_to_all of the same size).
    pub(super) fn settle(&self, nccl: &Communicator, buffers: &Buffers) -> Result<()> {
        self.stream.sync()?;
        self.rank.world.barrier()?;
        self.rank.home.current(|| buffers.sum_one(nccl, self.raw))?;
        self.stream.sync()?;
        Ok(())
    }

    fn enqueue(&self, side: &mut Side<'_>, calls: usize) -> Result<()> {
        for _ in 0..calls {
            match &mut side.work {
                Work::Op(called) => called.run(&self.stream)?,
                Work::Apart(apart) => apart.run(&self.stream)?,
                Work::Step(step) => {
                    let library = |it: &Baseline<'_>| self.rank.home.current(|| it.run(self.raw));
                    step.run(&self.stream, library)?;
                }
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

    /// Waits for the end event with a time limit; if the device hangs, the program ends. Returns
    /// microseconds since the begin event.
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

    /// Time of a call in microseconds, if `calls` calls are enqueued one by one.
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

    /// Time of a call in a graph replay, in microseconds. An untimed replay before the timed one
    /// synchronises the ranks.
    fn replay(&self, side: &Side<'_>, events: &Events) -> Result<f64> {
        let graph = side.graph.as_ref().context("the side has no graph")?;
        self.rank.world.barrier()?;
        graph.launch()?;
        events.begin.record(&events.stream)?;
        graph.launch()?;
        events.end.record(&events.stream)?;
        Ok(self.finish(side, events)? / side.calls as f64)
    }

    /// Warms up `side`, estimates its time per call, and captures its graph; the number of calls in
    /// the graph is the same on all ranks.
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
        let graph = graph?.context("the capture is empty")?;
        graph.upload()?;
        if let Work::Op(_) = &side.work {
            side.bare = Bare::new(&graph, stream)?;
        }
        side.graph = Some(graph);
        Ok(())
    }

    /// Measures host times: of each `run` call, without waiting for the device in between, and of
    /// the bare loop that repeats the graph's enqueues.
    fn queue(&self, side: &mut Side<'_>) -> Result<()> {
        let Work::Op(called) = &side.work else { return Ok(()) };
        // Number of calls, which is the same on all ranks because `estimate` is.
        let calls = ((QUEUE_US / side.estimate) as usize).clamp(1, QUEUED_CALLS);
        let queues = if calls == QUEUED_CALLS { QUEUES } else { LEAST };
        for _ in 0..queues {
            self.rank.world.barrier()?;
            for _ in 0..calls {
                let begun = Instant::now();
                called.run(&self.stream)?;
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

    /// Takes all samples; the sides take turns.
    pub(super) fn sample(&self, sides: &mut [Side<'_>]) -> Result<()> {
        sides.iter_mut().try_for_each(|side| self.queue(side))?;
        for sample in 0..SAMPLES {
            for at in balanced(sample, sides.len()) {
                let side = &mut sides[at];
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
        for sample in 0..EAGER_SAMPLES {
            for at in balanced(sample, sides.len()) {
                let side = &mut sides[at];
                let time = self.eager(side, side.calls)?;
                side.times.eager.push(time);
            }
        }
        Ok(())
    }
}
