//! `iris run`: runs one op on random input, checked and timed; without an op, the transformer
//! layer.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use comfy_table::Table;
use iris_heap::{BackendKind, DType, MAX_RANKS, Settings, World};
use iris_kernels::dtype::{Role, has_role};
use iris_ops::{Shard, Topology, Variant};
use iris_testkit::oracle::Meaning;
use iris_testkit::rank_setup::{Crossing, Rig};
use iris_testkit::suite::{AnyOp, Op, Operands};
use iris_testkit::{note, say};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::check::{Found, check};
use crate::device::{DeviceOptions, Devices};
use crate::errors::{unread, usage};
use crate::job::{Job, Place, gather};
use crate::layer;
use crate::memory;
use crate::problem::{Problem, known_variant};
use crate::progress::Progress;
use crate::timing::{chained, in_turns, median};
use crate::trace::{self, RankTrace, TraceFile};

/// Options of all runs, and the shape of one op.
#[derive(clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = what_they_do()
)]
pub(crate) struct Options {
    /// Operator; without one, a transformer layer is run.
    #[arg(value_parser = op)]
    op: Option<Op>,
    /// Number of ranks, 1 to 64 [default: 4, or the next multiple of the number of nodes].
    #[arg(long)]
    ranks: Option<usize>,
    /// Number of nodes that this host simulates; the ranks are split evenly over them. On the CPU each
    /// node has a network namespace and a host name of its own, where this process may make them.
    #[arg(long, default_value_t = 1)]
    nodes: usize,
    /// Start the ranks with mpirun, and send data between nodes over MPI instead of sockets. Needs
    /// --nodes, the backend cpu, and Open MPI.
    #[arg(long, conflicts_with = "threads_as_ranks")]
    mpi: bool,
    /// Backend: cpu, cuda or hip.
    #[arg(long, default_value = "cpu")]
    backend: BackendKind,
    /// GPUs to which the ranks are assigned round-robin: their number, or a list such as 0,2
    /// [default: all].
    #[arg(long, value_name = "D")]
    devices: Option<Devices>,
    /// Number of rows M [default: 512].
    #[arg(long, requires = "op")]
    m: Option<usize>,
    /// Number of columns N [default: 512].
    #[arg(long, requires = "op")]
    n: Option<usize>,
    /// Inner dimension K of the product [default: 512].
    #[arg(long, requires = "op")]
    k: Option<usize>,
    /// Element type: f32, f16 or bf16 [default: f32].
    #[arg(long, requires = "op", value_parser = dtype)]
    dtype: Option<DType>,
    /// Variant: auto, or a name that `iris plan OP` or docs/operators.md lists [default: auto].
    #[arg(long, requires = "op")]
    variant: Option<String>,
    /// Dimension of A that is split over the ranks, for all-gather-matmul [default: rows].
    #[arg(long, requires = "op", value_parser = ["rows", "columns"])]
    shard: Option<String>,
    /// Layout of the staging buffer of the variant staged [default: k_contiguous].
    #[arg(long, requires = "op", value_parser = ["k_contiguous", "m_contiguous"])]
    staging: Option<String>,
    /// Number of columns of A per flag, for the variant staged [default: 256 on the CPU, else 2048].
    #[arg(long, requires = "op")]
    columns_per_flag: Option<usize>,
    /// Number of workgroups that only fetch, for the variant staged.
    #[arg(long, requires = "op")]
    fetchers: Option<usize>,
    /// Implementation of whole-matrix GEMMs on a GPU, for variants that contain one: auto, vendor,
    /// ours or none [default: auto].
    #[arg(long, requires = "op", value_parser = ["auto", "vendor", "ours", "none"])]
    library: Option<String>,
    /// Give a row of the result the same bits in calls of every size.
    #[arg(long, requires = "op")]
    batch_invariant: bool,
    /// Number of timed calls.
    #[arg(long, default_value_t = 10)]
    iters: usize,
    /// Seed of the random input [default: 1].
    #[arg(long, requires = "op")]
    seed: Option<u64>,
    /// Number of threads of a rank for its workgroups [default: cores / ranks, at least 1].
    #[arg(long)]
    threads: Option<usize>,
    /// Run ranks as threads of one process instead of processes.
    #[arg(long)]
    threads_as_ranks: bool,
    /// Print the result as one JSON object.
    #[arg(long)]
    json: bool,
    /// Write a trace of all ranks and workgroups: if FILE ends in .svg, a chart of the last timed
    /// call, else all calls, for Perfetto or Chrome's tracing page.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Safetensors file with another transformer layer, with tensors named as in the embedded one: ffn.input,
    /// ffn.up.weight, ffn.up.bias, ffn.down.weight, ffn.down.bias and ffn.output.
    #[arg(long, value_name = "FILE", conflicts_with = "op")]
    weights: Option<PathBuf>,
}

/// Help text that gives the meaning of M, N and K for each operator.
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
    let known = text.parse().ok().filter(|&dtype| has_role(dtype, Role::Wire));
    known.ok_or_else(|| format!("expected {}", Role::Wire.names()))
}

/// Maximum number of timed calls, because all their times are kept in memory.
pub(crate) const MOST_CALLS: usize = 1_000_000;

/// Runs the operator or the layer, prints the result, and returns whether all checks passed.
pub(crate) fn main(options: Options) -> Result<bool> {
    let ranks = 4_usize.next_multiple_of(options.nodes.max(1)).min(MAX_RANKS);
    let ranks = options.ranks.unwrap_or(ranks);
    let place = Place::new(ranks, options.threads_as_ranks)?
        .on_nodes(options.nodes, options.backend)?
        .over_mpi(options.mpi, options.backend)?;
    if !(1..=MOST_CALLS).contains(&options.iters) {
        let expected = format!("at least 1 and at most {MOST_CALLS}");
        return Err(usage("--iters", options.iters, expected));
    }
    let device = DeviceOptions::new(options.backend, options.threads, options.devices)?;
    let Some(op) = options.op else {
        let run = (place, device, options.iters);
        return layer::main(run, options.weights, options.json, options.trace.as_deref());
    };
    let columns = options.shard.as_deref() == Some("columns");
    if columns && !Meaning::of(op).shards().contains(&Shard::Columns) {
        return Err(usage("--shard", "columns", format!("rows: {op} does not split columns")));
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
        columns_per_flag: options.columns_per_flag,
        fetchers: options.fetchers,
        library: options.library,
        batch_invariant: options.batch_invariant,
        seed: options.seed.unwrap_or(1),
        backend: options.backend,
        trace: options.trace.is_some(),
        tile: None,
        untuned: false,
    };
    // Plans the op for every rank. This needs no running rank, so errors of the options are
    // reported before any rank is started.
    let room = problem.room(place.ranks, place.nodes)?;
    let heap_on_host = if options.backend.traits().host_memory { room.data } else { 0 };
    let host_bytes = heap_on_host.saturating_add(problem.check_bytes(place.ranks)?);
    memory::fits(place.ranks, host_bytes)?;
    let trace_file = options.trace.as_deref().map(TraceFile::open).transpose()?;
    let chart = options.trace.as_deref().is_some_and(trace::is_chart);
    let job = OperatorJob { problem, device, iterations: options.iters, chart };
    let report = place.run(&job)?;
    print(&job, place, &report, options.json)?;
    let text = || match chart {
        true => report.chart(&job.problem, place),
        false => Ok(trace::document(&report.traces).to_string()),
    };
    trace::finish(trace_file, text, report.wrong.is_none())
}

/// Refuses options that have a value but that a run of `op` does not read.
fn check_read(options: &Options, op: Op, place: Place) -> Result<()> {
    let variant = options.variant.as_deref().unwrap_or("auto");
    let host = options.backend.traits().host_threads;
    let number = |it: Option<usize>| it.map(|number| number.to_string());
    if op == Op::Barrier {
        unread("barrier", &[("--m", number(options.m)), ("--n", number(options.n))])?;
    }
    if !op.multiplies() {
        let library = ("--library", options.library.clone());
        unread(&format!("{op}, which has no product,"), &[("--k", number(options.k)), library])?;
    }
    if known_variant("--variant", op, variant)? != Some(Variant::Staged) {
        unread(
            &format!("{op} by {variant}"),
            &[
                ("--fetchers", number(options.fetchers)),
                ("--columns-per-flag", number(options.columns_per_flag)),
                ("--staging", options.staging.clone()),
            ],
        )?;
    }
    if host {
        unread("a run on the CPU", &[("--library", options.library.clone())])?;
    }
    // If all workgroups were fetchers, all would fetch and multiply, as without fetchers. So a
    // number of fetchers that is not below the number of workgroups is refused.
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

/// Job that runs one op on every rank.
#[derive(Serialize, Deserialize)]
pub(crate) struct OperatorJob {
    problem: Problem,
    device: DeviceOptions,
    iterations: usize,
    /// Whether the trace covers only the last timed call, to be drawn as a chart.
    chart: bool,
}

/// Result of the job, combined over all ranks.
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
        let options = self.device.heap(world);
        let world = &world.for_heap(&options)?;
        let (problem, ranks) = (&self.problem, Topology::from(world));
        let op = problem.op()?;
        let rig = Rig::open(world, options, problem.room(ranks.size, ranks.nodes())?)?;
        let heap = &rig.heap;
        let plan = problem.plan(ranks)?;
        let made = AnyOp::new(heap, &plan)?;
        let matrices = problem.matrices(&rig)?;
        let [a, b, c] = &matrices;
        let operands = Operands::new(a.matrix()?, b.matrix()?, c.matrix()?);
        let mut crossing = (op == Op::Barrier).then(|| Crossing::new(heap)).transpose()?;
        let mut wrong = None;
        let mut call = |late: bool| -> Result<f64> {
            if let Some(crossing) = &mut crossing {
                // Last rank of a call with `late`: it writes its word late, and the barrier under
                // test must make the other ranks wait for the write.
                let late = late && ranks.rank + 1 == ranks.size;
                crossing.before(
                    heap,
                    &rig.stream,
                    Duration::from_millis(if late { 5 } else { 0 }),
                )?;
            }
            let time = rig.time(|stream| Ok(made.run(&operands, stream)?))?;
            if let Some(Err(error)) = crossing.as_ref().map(|it| it.after(heap, heap.node_ranks()))
            {
                wrong.get_or_insert(error.to_string());
            }
            Ok(time)
        };
        let progress = Progress::new("calls", ranks.rank, self.iterations);
        let (mut before, mut left) = (Vec::new(), self.iterations);
        let times = in_turns((world, &progress), self.iterations, (1, chained), |_| {
            // The chart shows the last call, because first calls are slower: they touch memory for
            // the first time.
            if self.chart && left == 0 {
                before = made.trace()?;
            }
            left = left.saturating_sub(1);
            call(false)
        })?;
        let drawn = if self.chart { Some(trace::since(&before, made.trace()?)) } else { None };
        drop(progress);
        // The checked call gets input of another seed, so that results left by the timed calls
        // would be wrong.
        let other = Problem { seed: problem.seed.wrapping_add(0x9e37_79b9), ..problem.clone() };
        other.fill(&rig, &matrices)?;
        call(true)?;
        world.barrier()?;
        let mut found = check(heap, &other, op, c)?;
        found.refused = found.refused.or(wrong);
        let spans = drawn.map_or_else(|| made.trace(), Ok)?;
        let spans = RankTrace::new(&problem.op, ranks.rank, &spans);
        let all: Vec<(Found, RankTrace)> = gather(world, &(found, spans))?;
        made.free()?;
        heap.close()?;
        let promised = Meaning::of(op).replicates() && !plan.variant().order_varies();
        let (found, traces): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        let found = Found::merged(found);
        Ok((ranks.rank == 0).then(|| Report {
            variant: plan.variant().to_string(),
            median_us: times.into_iter().map(median).sum(),
            wrong: found.wrong(promised),
            traces: if problem.trace { traces } else { Vec::new() },
            found,
        }))
    }
}
