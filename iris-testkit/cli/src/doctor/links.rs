//! Checks of links between devices: sends known bytes over every path, compares them, and measures
//! bandwidth and latency.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use iris_heap::{
    BackendKind, Bytes, HeapOptions, Settings, Stream, SymSlice, SymmetricHeap, World,
};
use iris_ops::{AllGather, Barrier, CollectiveArgs, MatRef, Topology, all_gather, barrier};

use super::{Finding, State};

/// Number of 4-byte words that each rank copies to each other rank in the bandwidth test.
const WORDS: usize = 4 << 20;

/// Number of 4-byte words of a message that kernels send, small enough for the LL protocol.
const MESSAGE: usize = 16 << 10;

/// Number of barrier calls that are enqueued and timed together to measure latency.
const CALLS: usize = 100;

/// Measurements of one rank by peer: copy bandwidth in GB/s, and one-way latency in us. A path with
/// wrong data is reported as an error text.
#[derive(Default)]
struct Row {
    rate: Vec<f64>,
    latency: Vec<f64>,
    wrong: Vec<String>,
    /// Nodes into which a heap groups the devices, as text, if not all of them have access to each
    /// other. Nothing is measured then.
    grouped: Option<String>,
}

/// Moves known bytes between all pairs of devices, and measures the links; returns a finding for
/// each device and one for each faulty path.
pub(super) fn measured(kind: BackendKind, count: usize) -> Vec<Finding> {
    // The deadline is short, so that a transport that moves nothing does not block the doctor for
    // minutes.
    let settings = Settings::default().deadline(0.2);
    let outcome = World::run_threads_each(count, &settings, |world| rank(&world, kind, |_, _| ()));
    let rows: Result<Vec<Row>> = match outcome {
        Ok(rows) => rows.into_iter().collect(),
        Err(error) => Err(error.into()),
    };
    match rows {
        Ok(rows) => findings(&rows),
        Err(error) => vec![
            Finding::new(State::Error, "links", format!("{error:#}"))
                .remedy("`iris test --level smoke` says more"),
        ],
    }
}

fn findings(rows: &[Row]) -> Vec<Finding> {
    if let Some(grouped) = rows.iter().find_map(|row| row.grouped.as_ref()) {
        return vec![Finding::new(State::Warning, "links", grouped)];
    }
    let mut findings = Vec::new();
    for (from, row) in rows.iter().enumerate() {
        let all = row.rate.iter().zip(&row.latency).enumerate().filter(|(to, _)| *to != from);
        let texts =
            all.map(|(to, (rate, latency))| format!("to {to} {rate:.0} GB/s {latency:.1} us"));
        let text = texts.collect::<Vec<_>>().join(", ");
        findings.push(Finding::new(State::Ok, &format!("link {from}"), text));
    }
    let wrong = rows.iter().flat_map(|row| &row.wrong);
    let lead = "reset the devices, or see whether peer access is switched off";
    findings.extend(wrong.map(|wrong| Finding::new(State::Error, "path", wrong).remedy(lead)));
    findings
}

/// Value of the word at index `at` of the data that rank `from` sends to rank `to`.
fn word(from: usize, to: usize, at: usize) -> u32 {
    (from as u32 + 1) << 24 ^ (to as u32) << 16 ^ (at as u32).wrapping_mul(0x9e37_79b9)
}

/// Runs one rank's part of the link check. `disturb` lets a test change the received data before
/// they are compared.
fn rank(
    world: &World,
    kind: BackendKind,
    disturb: impl Fn(&SymmetricHeap, SymSlice<u32>),
) -> Result<Row> {
    let (me, size) = (world.rank(), world.size());
    let room = Bytes::of::<u32>(2 * size * WORDS) + Bytes::mib(256);
    let heap = SymmetricHeap::open(world, HeapOptions::new().backend(kind).data(room))?;
    let (nodes, ranks) = (heap.whole_world().nodes(), heap.local_size());
    if nodes > 1 {
        heap.close()?;
        world.close()?;
        let grouped = format!(
            "not all GPUs can access each other's memory: a heap groups them into {nodes} nodes of {ranks}, and data \
             between nodes go over NCCL or RCCL"
        );
        return Ok(Row { grouped: Some(grouped), ..Row::default() });
    }
    let stream = heap.stream()?;
    let mut row = Row::default();
    copies(&heap, &stream, &mut row, disturb)?;
    for variant in [all_gather::Variant::Push, all_gather::Variant::Ll] {
        kernels(&heap, &stream, variant, &mut row)?;
    }
    for first in 0..size {
        for second in first + 1..size {
            let us = round(&heap, &stream, [first, second])?;
            if [first, second].contains(&me) {
                // Pairs come in row-major order, so the latencies of a rank are pushed in ascending
                // order of its peers.
                row.latency.push(us);
            }
        }
    }
    row.latency.insert(me, 0.0);
    heap.close()?;
    world.close()?;
    Ok(row)
}

/// Checks and times copies by the driver from this rank to each peer; only one pair of ranks copies
/// at a time.
fn copies(
    heap: &Arc<SymmetricHeap>,
    stream: &Stream,
    row: &mut Row,
    disturb: impl Fn(&SymmetricHeap, SymSlice<u32>),
) -> Result<()> {
    let (me, size, world) = (heap.rank(), heap.size(), heap.local_world());
    let (gives, gets) = (heap.alloc::<u32>(size * WORDS)?, heap.zeros::<u32>(size * WORDS)?);
    let part = |slice: SymSlice<u32>, rank: usize| slice.slice(rank * WORDS..(rank + 1) * WORDS);
    for to in 0..size {
        let words: Vec<_> = (0..WORDS).map(|at| word(me, to, at)).collect();
        heap.write(part(gives, to)?, &words)?;
    }
    world.barrier()?;
    for from in 0..size {
        for to in 0..size {
            let mut rate = 0.0;
            if from == me && to != me {
                let mut best = Duration::MAX;
                for _ in 0..3 {
                    let begun = Instant::now();
                    heap.copy_on(stream, (part(gets, me)?, to), (part(gives, to)?, me))?;
                    stream.sync()?;
                    best = best.min(begun.elapsed());
                }
                rate = Bytes::of::<u32>(WORDS).get() as f64 / best.as_secs_f64() / 1e9;
            }
            if from == me {
                row.rate.push(rate);
            }
            world.barrier()?;
        }
    }
    disturb(heap, gets);
    for from in (0..size).filter(|from| *from != me) {
        let got = heap.read(part(gets, from)?)?;
        if let Some(at) = (0..WORDS).find(|&at| got[at] != word(from, me, at)) {
            let (got, expected) = (got[at], word(from, me, at));
            row.wrong.push(format!(
                "a copy from {from} to {me} has {got:#x} in word {at}, expected {expected:#x}"
            ));
        }
    }
    world.barrier()?;
    heap.free(gets)?;
    Ok(heap.free(gives)?)
}

/// Checks stores by kernels to peers, with an all-gather of known numbers.
fn kernels(
    heap: &Arc<SymmetricHeap>,
    stream: &Stream,
    variant: all_gather::Variant,
    row: &mut Row,
) -> Result<()> {
    let (me, size) = (heap.rank(), heap.size());
    let plan =
        all_gather::Options::new(MESSAGE).variant(variant).plan(Topology::from(heap).untuned())?;
    let op = AllGather::new(heap, &plan)?;
    let value = |rank: usize, at: usize| ((at * 7 + rank * 13) % 2048) as f32;
    let (x, y) = (heap.alloc::<f32>(MESSAGE)?, heap.zeros::<f32>(size * MESSAGE)?);
    heap.write(x, &(0..MESSAGE).map(|at| value(me, at)).collect::<Vec<_>>())?;
    op.run(&CollectiveArgs::new(MatRef::vector(x), MatRef::vector(y)), stream)?;
    stream.sync()?;
    let got = heap.read(y)?;
    for from in 0..size {
        let wrong = |at: &usize| got[from * MESSAGE + at] != value(from, *at);
        if let Some(at) = (0..MESSAGE).find(wrong) {
            let got = got[from * MESSAGE + at];
            row.wrong.push(format!(
                "a message of {from} to {me} by all_gather {variant:?} has {got} in element {at}, expected {}",
                value(from, at)
            ));
        }
    }
    op.free()?;
    heap.free(x)?;
    Ok(heap.free(y)?)
}

/// Duration in us of a barrier of the two ranks of `pair`, which is one one-way latency; 0 on all
/// other ranks. Collective over all ranks.
fn round(heap: &Arc<SymmetricHeap>, stream: &Stream, pair: [usize; 2]) -> Result<f64> {
    let options = barrier::Options::new().members(pair.to_vec());
    let op = Barrier::new(heap, &options.plan(Topology::from(heap).untuned())?)?;
    let mut best = Duration::ZERO;
    if pair.contains(&heap.rank()) {
        best = Duration::MAX;
        for _ in 0..3 {
            let begun = Instant::now();
            for _ in 0..CALLS {
                op.run(stream)?;
            }
            stream.sync()?;
            best = best.min(begun.elapsed());
        }
    }
    op.free()?;
    ensure!(best < Duration::MAX, "no barrier was timed");
    Ok(best.as_secs_f64() * 1e6 / CALLS as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(disturb: impl Fn(&SymmetricHeap, SymSlice<u32>) + Sync) -> Vec<Row> {
        let run = |world: World| rank(&world, BackendKind::Cpu, &disturb);
        World::run_threads(2, run).unwrap()
    }

    #[test]
    fn paths_that_carry_what_they_should_are_measured() {
        let rows = rows(|_, _| ());
        let lines = findings(&rows);
        assert!(lines.iter().all(|line| line.state == State::Ok), "{lines:?}");
        assert!(rows[0].rate[1] > 0.0 && rows[1].rate[0] > 0.0 && rows[0].latency[1] > 0.0);
    }

    /// Test of a copy to rank 1 that moves nothing and reports success: the doctor must name the
    /// path.
    #[test]
    fn a_path_that_silently_does_nothing_is_reported() {
        let rows = rows(|heap, gets| {
            if heap.rank() == 1 {
                heap.write(gets.slice(..WORDS).unwrap(), &vec![0; WORDS]).unwrap();
            }
        });
        let lines = findings(&rows);
        let wrong = lines.iter().find(|line| line.state == State::Error).expect("an error");
        assert!(wrong.found.starts_with("a copy from 0 to 1 has 0x0 in word"), "{wrong:?}");
    }
}
