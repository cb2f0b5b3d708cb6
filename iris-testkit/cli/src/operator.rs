//! `iris run`: one op on random input, checked and timed; without an op, the transformer layer.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use comfy_table::Table;
use iris_heap::{BackendKind, DType, Settings, Stream, SymSlice, SymmetricHeap, World};
use iris_ops::{Ranks, Shard, Variant};
use iris_testkit::oracle::Meaning;
use iris_testkit::suite::{AnyOp, Op, Operands};
use iris_testkit::{note, say};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::check::{Found, check};
use crate::device::{Device, Devices};
use crate::errors::{unread, usage};
use crate::job::{Job, Place, gather, median_of_slowest};
use crate::layer;
use crate::matrices::Matrix;
use crate::memory;
use crate::problem::{Problem, known_variant};
use crate::progress::Progress;
use crate::trace::{self, RankTrace, TraceFile};

/// What all runs have in common, and the shape of one op.
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = what_they_do()
)]
pub(crate) struct Options {
    /// The operator; without one, a transformer layer is run.
    #[arg(value_parser = op)]
    op: Option<Op>,
    /// Number of ranks, 1 to 64.
    #[arg(long, default_value_t = 4)]
    ranks: usize,
    /// Number of nodes that the ranks are split over, which this host plays: as many ranks on each.
    #[arg(long, default_value_t = 1)]
    nodes: usize,
    /// What computes: cpu, cuda or hip.
    #[arg(long, default_value = "cpu")]
    backend: BackendKind,
    /// The GPUs that the ranks take in turns: how many, or a list of their numbers such as 0,2
    /// [default: all].
    #[arg(long, value_name = "D")]
    devices: Option<Devices>,
    /// Rows [default: 512].
    #[arg(long, requires = "op")]
    m: Option<usize>,
    /// Columns [default: 512].
    #[arg(long, requires = "op")]
    n: Option<usize>,
    /// Depth of the product [default: 512].
    #[arg(long, requires = "op")]
    k: Option<usize>,
    /// Element type: f32, f16 or bf16 [default: f32].
    #[arg(long, requires = "op", value_parser = dtype)]
    dtype: Option<DType>,
    /// How it is done: auto, or as in the table of the README [default: auto].
    #[arg(long, requires = "op")]
    variant: Option<String>,
    /// How A is split, of all-gather-matmul [default: rows].
    #[arg(long, requires = "op", value_parser = ["rows", "columns"])]
    shard: Option<String>,
    /// How the buffer of the variant staged is laid out and filled [default: k_contiguous].
    #[arg(long, requires = "op", value_parser = ["k_contiguous", "m_contiguous"])]
    staging: Option<String>,
    /// Blocks of 64 columns of A that one flag of the variant staged stands for.
    #[arg(long, requires = "op")]
    k_per_flag: Option<usize>,
    /// Workgroups that fetch, of the variant staged.
    #[arg(long, requires = "op")]
    fetchers: Option<usize>,
    /// Whose product of whole matrices is used on a GPU, where nothing is fused into it: auto, vendor,
    /// ours or none [default: auto].
    #[arg(long, requires = "op", value_parser = ["auto", "vendor", "ours", "none"])]
    library: Option<String>,
    /// Timed calls.
    #[arg(long, default_value_t = 10)]
    iters: usize,
    /// Begins the random input [default: 1].
    #[arg(long, requires = "op")]
    seed: Option<u64>,
    /// Threads of a rank for its workgroups [default: cores / ranks, at least 1].
    #[arg(long)]
    threads: Option<usize>,
    /// Ranks are threads of one process instead of processes.
    #[arg(long)]
    threads_as_ranks: bool,
    /// Prints the result as one JSON object.
    #[arg(long)]
    json: bool,
    /// Writes a trace of all ranks and workgroups: where FILE ends in .svg a chart of the last timed call,
    /// else all calls, for Perfetto or Chrome's tracing page.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Another safetensors file of the form of the embedded one, for the transformer layer.
    #[arg(long, value_name = "FILE", conflicts_with = "op")]
    weights: Option<PathBuf>,
    /// What its tensors' names begin with: P.input, P.up.weight and so on [default: ffn].
    #[arg(long, value_name = "P", conflicts_with = "op")]
    layer_prefix: Option<String>,
}

/// What M, N and K mean to each operator, behind the help.
fn what_they_do() -> String {
    let line = |op: Op| {
        let name = op.name().replace('_', "-");
        format!("  {name:22} {}\n", Meaning::of(op).about)
    };
    format!(
        "M, N and K are those of the whole, of which the ranks have parts (evenly, the remainder first):\n\
         {}\n\
         Calls are timed on one input. A further call, on another input, is compared with a reference in f64,\n\
         element by element; of products above 2^29 multiply-adds a rank, some evenly spread rows are.",
        Op::ALL.map(line).concat()
    )
}

pub(crate) fn op(text: &str) -> Result<Op, String> {
    text.parse().map_err(|_| {
        let all = Op::ALL.map(|op| op.name().replace('_', "-")).join(", ");
        format!("expected one of {all}")
    })
}

pub(crate) fn dtype(text: &str) -> Result<DType, String> {
    match text.parse() {
        Ok(dtype @ (DType::F32 | DType::F16 | DType::BF16)) => Ok(dtype),
        _ => Err("expected f32, f16 or bf16".into()),
    }
}

/// Calls that are timed at most: their times are kept.
const MOST_CALLS: usize = 1_000_000;

/// Runs and prints; whether all was right.
pub(crate) fn main(options: Options) -> Result<bool> {
    let place = Place::new(options.ranks, options.threads_as_ranks)?.on_nodes(options.nodes)?;
    if !(1..=MOST_CALLS).contains(&options.iters) {
        let expected = format!("at least 1 and at most {MOST_CALLS}");
        return Err(usage("--iters", options.iters, expected));
    }
    let device = Device::new(options.backend, options.threads, options.devices)?;
    let Some(op) = options.op else {
        let weights = (options.weights, options.layer_prefix);
        let run = (place, device, options.iters);
        return layer::main(run, weights, options.json, options.trace.as_deref());
    };
    let columns = options.shard.as_deref() == Some("columns");
    if columns && !Meaning::of(op).shards().contains(&Shard::Columns) {
        return Err(usage("--shard", "columns", format!("rows, which {op} is split by")));
    }
    check_read(&options, op, place)?;
    let dimension = |given: Option<usize>, used: bool| given.unwrap_or(if used { 512 } else { 0 });
    let message = op != Op::Barrier;
    let problem = Problem {
        op: op.name().into(),
        variant: options.variant.unwrap_or_else(|| "auto".into()),
        m: dimension(options.m, message),
        n: dimension(options.n, message),
        k: dimension(options.k, op.multiplies()),
        dtype: options.dtype.unwrap_or(DType::F32),
        columns,
        m_contiguous: options.staging.as_deref() == Some("m_contiguous"),
        k_per_flag: options.k_per_flag,
        fetchers: options.fetchers,
        library: options.library,
        seed: options.seed.unwrap_or(1),
        backend: options.backend,
        trace: options.trace.is_some(),
        tile: None,
        untuned: false,
        nodes: options.nodes,
    };
    // Planning is pure: what is wrong with the options shows before a rank is started.
    let heap_bytes = problem.heap_bytes(place.ranks)?;
    let heap_on_host = if options.backend.traits().host_memory { heap_bytes.0 } else { 0 };
    let host_bytes = heap_on_host.saturating_add(problem.check_bytes(place.ranks)?);
    memory::fits(place.ranks, host_bytes)?;
    let trace_file = options.trace.as_deref().map(TraceFile::open).transpose()?;
    let chart = options.trace.as_deref().is_some_and(trace::is_chart);
    let job = OperatorJob { problem, device, heap_bytes, iterations: options.iters, chart };
    let report = place.run(&job)?;
    print(&job, place, &report, options.json)?;
    let text = || match chart {
        true => report.chart(&job.problem, place),
        false => Ok(trace::document(&report.traces).to_string()),
    };
    trace::finish(trace_file, text, report.wrong.is_none())
}

/// Refuses what a run of this op does not read.
fn check_read(options: &Options, op: Op, place: Place) -> Result<()> {
    let variant = options.variant.as_deref().unwrap_or("auto");
    let host = options.backend.traits().host_threads;
    let number = |it: Option<usize>| it.map(|number| number.to_string());
    if op == Op::Barrier {
        unread("barrier", &[("--m", number(options.m)), ("--n", number(options.n))])?;
    }
    if !op.multiplies() {
        let library = ("--library", options.library.clone());
        unread(&format!("{op}, which is no product,"), &[("--k", number(options.k)), library])?;
    }
    if known_variant("--variant", op, variant)? != Some(Variant::Staged) {
        unread(
            &format!("{op} by {variant}"),
            &[
                ("--fetchers", number(options.fetchers)),
                ("--k-per-flag", number(options.k_per_flag)),
                ("--staging", options.staging.clone()),
            ],
        )?;
    }
    if host {
        unread("a run on the CPU", &[("--library", options.library.clone())])?;
    }
    // With as many fetchers as workgroups, or more, all of these fetch and multiply, as with none.
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = options.threads.or(Settings::from_env()?.threads);
    let groups = threads.unwrap_or_else(|| (cores() / place.ranks).max(1));
    match options.fetchers {
        Some(fetchers) if host && fetchers >= groups => {
            let expected = format!("fewer than the {groups} workgroups of a rank (--threads)");
            Err(usage("--fetchers", fetchers, expected))
        }
        _ => Ok(()),
    }
}

fn print(job: &OperatorJob, place: Place, report: &Report, as_json: bool) -> Result<()> {
    let Problem { op, m, n, k, dtype, backend, .. } = &job.problem;
    let found = &report.found;
    let (error, difference) = (found.relative(), found.difference());
    if let Some(wrong) = &report.wrong {
        note!("iris: {wrong}");
    }
    if as_json {
        let object = json!({
            "op": op, "variant": report.variant, "m": m, "n": n, "k": k, "dtype": dtype.name(),
            "ranks": place.ranks, "backend": backend.name(), "rel_error": error,
            "max_rank_difference": difference, "median_us": report.median_us,
            "ok": report.wrong.is_none(), "options": place.options(job)?,
        });
        return Ok(say!("{object}")?);
    }
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::NOTHING);
    table.set_header([
        "op",
        "variant",
        "m x n x k",
        "dtype",
        "ranks",
        "backend",
        "rel. error",
        "rank difference",
        "median",
        "",
    ]);
    table.add_row([
        op.clone(),
        report.variant.clone(),
        format!("{m} x {n} x {k}"),
        dtype.to_string(),
        place.ranks.to_string(),
        backend.to_string(),
        format!("{error:.1e}"),
        format!("{difference:.1e}"),
        format!("{:.1} us", report.median_us),
        if report.wrong.is_none() { "ok".into() } else { "FAILED".into() },
    ]);
    say!("{table}")?;
    let (checked, rows) = found.rows;
    if checked < rows {
        say!("{checked} of {rows} rows were checked")?;
    }
    Ok(())
}

/// One op on every rank.
#[derive(Serialize, Deserialize)]
pub(crate) struct OperatorJob {
    problem: Problem,
    device: Device,
    heap_bytes: (u64, u64),
    iterations: usize,
    /// Whether the trace is of the last timed call alone.
    chart: bool,
}

/// What came of it, over all ranks.
#[derive(Serialize, Deserialize)]
pub(crate) struct Report {
    variant: String,
    median_us: f64,
    found: Found,
    wrong: Option<String>,
    traces: Vec<RankTrace>,
}

impl Report {
    fn chart(&self, problem: &Problem, place: Place) -> Result<String> {
        let Problem { op, m, n, k, dtype, backend, .. } = problem;
        let sizes = [("M", m), ("N", n), ("K", k)].into_iter().filter(|(_, size)| **size > 0);
        let shape: String = sizes.map(|(name, size)| format!("{name} {size}, ")).collect();
        let (ranks, words) = (place.ranks, place.words());
        let about = format!("{shape}{dtype}; {ranks} ranks as {words}, {backend}");
        trace::chart(&self.traces, &format!("{op}, {}", self.variant), &about)
    }
}

impl Job for OperatorJob {
    type Report = Report;

    const NAME: &str = "operator";

    fn run_rank(&self, world: &World) -> Result<Option<Report>> {
        let (problem, ranks) = (&self.problem, Ranks::from(world));
        let op = problem.op()?;
        let (data, signal) = self.heap_bytes;
        let heap = SymmetricHeap::open(world, self.device.heap(world, data, signal))?;
        let plan = problem.plan(ranks)?;
        let made = AnyOp::new(&heap, &plan)?;
        let (most, shapes) = (problem.most(ranks.size)?, problem.shapes(ranks)?);
        let matrix = |which: usize| Matrix::new(&heap, problem.dtype, most[which], shapes[which]);
        let [a, b, c] = [matrix(0)?, matrix(1)?, matrix(2)?];
        let fill = |problem: &Problem| -> Result<()> {
            a.fill(&heap, |row, col| problem.own_a(op, ranks, row, col))?;
            b.fill(&heap, |row, col| problem.own_b(op, ranks, row, col))?;
            c.poison(&heap)
        };
        let (a, b, c) = (&a, &b, &c);
        let operands = Operands::new(a.matrix()?, b.matrix()?, c.matrix()?);
        let stream = heap.stream()?;
        let mut crossed = Crossed::new(&heap, op)?;
        let mut call = |late: bool| -> Result<f64> {
            crossed.before(&heap, &stream, late)?;
            world.barrier()?;
            let begun = Instant::now();
            made.run(&operands, &stream)?;
            stream.sync()?;
            let time = begun.elapsed().as_secs_f64() * 1e6;
            crossed.after(&heap)?;
            Ok(time)
        };
        fill(problem)?;
        call(false)?;
        let mut progress = Progress::new("calls", ranks.rank, self.iterations);
        let (mut times, mut before) = (Vec::new(), Vec::new());
        for left in (0..self.iterations).rev() {
            // The last is drawn, as the first ones touch memory that nobody has touched.
            if self.chart && left == 0 {
                before = made.trace()?;
            }
            times.push(call(false)?);
            progress.step();
        }
        let drawn = if self.chart { Some(trace::since(&before, made.trace()?)) } else { None };
        drop(progress);
        // Another input: what is left of the timed calls would be wrong now.
        let other = Problem { seed: problem.seed.wrapping_add(0x9e37_79b9), ..problem.clone() };
        fill(&other)?;
        call(true)?;
        world.barrier()?;
        let mut found = check(&heap, &other, op, c)?;
        found.refused = found.refused.or(crossed.wrong);
        let spans = drawn.map_or_else(|| made.trace(), Ok)?;
        let spans = RankTrace::new(&problem.op, ranks.rank, &spans);
        let all = gather(world, &(times, found, spans))?;
        made.free()?;
        heap.close()?;
        let promised = Meaning::of(op).replicates() && !plan.variant().order_varies();
        let (mut times, mut found, mut traces) = (Vec::new(), Vec::new(), Vec::new());
        for (time, one, spans) in all {
            times.push(time);
            found.push(one);
            traces.push(spans);
        }
        let found = Found::merged(found);
        Ok((ranks.rank == 0).then(|| Report {
            variant: plan.variant().to_string(),
            median_us: median_of_slowest(&times),
            wrong: found.wrong(promised),
            traces: if problem.trace { traces } else { Vec::new() },
            found,
        }))
    }
}

/// Whether a barrier is one: what every rank's stream writes before it is seen by all after it.
struct Crossed {
    word: Option<SymSlice<i32>>,
    calls: i32,
    wrong: Option<String>,
}

impl Crossed {
    /// Collective. Of another op there is nothing to see.
    #[track_caller]
    fn new(heap: &SymmetricHeap, op: Op) -> Result<Crossed> {
        let word = if op == Op::Barrier { Some(heap.zeros(1)?) } else { None };
        Ok(Crossed { word, calls: 0, wrong: None })
    }

    /// Of a late rank the others must wait for the word.
    fn before(&mut self, heap: &SymmetricHeap, stream: &Stream, late: bool) -> Result<()> {
        self.calls += 1;
        if let Some(word) = self.word {
            if late && heap.rank() + 1 == heap.size() {
                std::thread::sleep(Duration::from_millis(5));
            }
            heap.write_on(stream, word, &[self.calls])?;
        }
        Ok(())
    }

    fn after(&mut self, heap: &SymmetricHeap) -> Result<()> {
        let Some(word) = self.word else { return Ok(()) };
        for rank in 0..heap.size() {
            let seen = heap.read_from(word, rank)?[0];
            // A rank may already be on its way to the next barrier.
            if !(self.calls..=self.calls + 1).contains(&seen) {
                let calls = self.calls;
                let wrong = format!("after barrier {calls}, rank {rank} was seen before {seen}");
                self.wrong.get_or_insert(wrong);
            }
        }
        Ok(())
    }
}
