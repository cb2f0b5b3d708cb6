//! Job of `iris run` without an op: the feed-forward block of a transformer layer, tensor-parallel
//! in two ways, compared with the output that the weights file has.
//!
//! Column-parallel: every rank has all tokens and multiplies by its columns of the up weights; the
//! ranks add their products with the down weights (`matmul_all_reduce`). Sequence-parallel: every
//! rank has some of the tokens. They are gathered before the up weights (`all_gather_matmul`) and
//! scattered after the down weights (`matmul_reduce_scatter`).

use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use comfy_table::Table;
use iris_heap::{DType, World};
use iris_ops::{Epilogue, Plan, Topology};
use iris_testkit::matrix::Matrix;
use iris_testkit::numeric::{relative, rounded, unit_roundoff};
use iris_testkit::oracle::{Dense, gelu, product, split};
use iris_testkit::rank_setup::{Rig, Room};
use iris_testkit::suite::{self, AnyOp, Op, Operands, Options};
use iris_testkit::{note, say};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::device::DeviceOptions;
use crate::errors::usage;
use crate::job::{Job, Place, bits, gather};
use crate::memory;
use crate::progress::Progress;
use crate::timing::{chained, in_turns, median};
use crate::trace::{self, RankTrace, TraceFile};
use weights::Block;

mod weights;

/// Ways of splitting the weights over the ranks, each with the op before the GELU and the op after
/// it.
const WAYS: [(&str, [Op; 2]); 2] = [
    ("column-parallel", [Op::Matmul, Op::MatmulAllReduce]),
    ("sequence-parallel", [Op::AllGatherMatmul, Op::MatmulReduceScatter]),
];

/// Largest relative error (Frobenius norm of the errors divided by that of the expected matrix)
/// that passes. Rounding alone causes about a fifth of this bound; GELU by tanh instead of erf, a
/// bias added twice, or one wrong element of the embedded layer cause a larger error.
fn bound(dtype: DType) -> f64 {
    (4.096 * unit_roundoff(dtype)).max(2e-6)
}

/// Runs the transformer layer and prints the table of its results; returns whether all errors are
/// within [`bound`].
pub(crate) fn main(
    (place, device, iterations): (Place, DeviceOptions, usize),
    weights: Option<PathBuf>,
    as_json: bool,
    trace_file: Option<&Path>,
) -> Result<bool> {
    if let Some(path) = trace_file.filter(|path| trace::is_chart(path)) {
        let of = format!("trace {}", path.display());
        return Err(usage(of, "a chart", "a JSON file, because a chart shows one operator"));
    }
    // The file is read here so that errors in it are reported before a rank is started.
    let block = Block::read(weights.as_ref())?;
    let job = LayerJob { weights, device, iterations, trace: trace_file.is_some() };
    let room = job.room(&block, place.ranks, place.nodes)?;
    if device.backend().traits().host_memory {
        memory::fits(place.ranks, room.data)?;
    }
    let trace_file = trace_file.map(TraceFile::open).transpose()?;
    let report = place.run(&job)?;
    let ok = report.rows.iter().all(|row| row.wrong.is_none());
    if as_json {
        let options = place.options(&job)?;
        let rows = report.rows;
        say!("{}", json!({"ranks": place.ranks, "rows": rows, "ok": ok, "options": options}))?;
    } else {
        print(&job, &block, place, &report.rows, ok)?;
    }
    trace::finish(trace_file, || Ok(trace::document(&report.traces).to_string()), ok)
}

/// Prints the heading, the table, and whether the layer is right.
fn print(job: &LayerJob, block: &Block, place: Place, rows: &[Row], ok: bool) -> Result<()> {
    let source = match &job.weights {
        Some(path) => path.display().to_string(),
        None => "all-MiniLM-L6-v2, encoder layer 0".into(),
    };
    say!(
        "Feed-forward block of {source}: {} tokens, {} hidden, {} inner; {} ranks as {}.\n",
        block.input.rows,
        block.input.cols,
        block.up.rows,
        place.ranks,
        place.words()
    )?;
    say!("{}\n", table(rows))?;
    say!("Errors of `up` are against the same step in f64, those of `down` against the file's")?;
    say!("output: Frobenius norms, the worst of all calls and ranks. Times: the slowest rank,")?;
    say!(
        "median of {} calls. m x n x k, where /{} is split over the ranks.",
        job.iterations,
        place.ranks
    )?;
    for row in rows {
        if let Some(wrong) = &row.wrong {
            note!("iris: {} {} {} in {}: {wrong}", row.way, row.step, row.op, row.dtype);
        }
    }
    say!("{}", if ok { "All within the bounds." } else { "FAILED." })?;
    Ok(())
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::NOTHING);
    let header = ["", "step", "op", "variant", "shape", "dtype", "ranks", "time", "rel. error"];
    table.set_header(header.into_iter().chain(["bound", ""]));
    for row in rows {
        let verdict = if row.wrong.is_none() { "ok" } else { "FAILED" };
        table.add_row([
            row.way.clone(),
            row.step.clone(),
            row.op.clone(),
            row.variant.clone(),
            row.shape.clone(),
            row.dtype.to_string(),
            row.ranks.to_string(),
            format!("{:.0} us", row.median_us),
            format!("{:.1e}", row.rel_error),
            format!("{:.1e}", row.bound),
            verdict.into(),
        ]);
    }
    table
}

/// Job that runs the transformer layer on every rank, in each way of [`WAYS`].
#[derive(Serialize, Deserialize)]
pub(crate) struct LayerJob {
    weights: Option<PathBuf>,
    device: DeviceOptions,
    iterations: usize,
    trace: bool,
}

/// Row of the table: one product of the layer in one way and one element type, over all ranks.
#[derive(Serialize, Deserialize)]
pub(crate) struct Row {
    way: String,
    step: String,
    op: String,
    variant: String,
    shape: String,
    dtype: DType,
    ranks: usize,
    median_us: f64,
    #[serde(deserialize_with = "bits::or_nan")]
    rel_error: f64,
    bound: f64,
    wrong: Option<String>,
}

/// Rows of the table that rank 0 reports.
#[derive(Serialize, Deserialize)]
pub(crate) struct Report {
    rows: Vec<Row>,
    traces: Vec<RankTrace>,
}

/// Errors of one product of the layer on one rank, and its time.
#[derive(Serialize, Deserialize)]
struct Step {
    /// Median time of the slowest rank.
    median_us: f64,
    /// Sum of the squared errors of one call; of all calls, the one with the largest sum.
    #[serde(with = "bits")]
    errors: f64,
    /// Sum of the squared expected values of this rank's result.
    #[serde(with = "bits")]
    wanted: f64,
    /// Hash of each call's result, to compare calls and ranks bit by bit.
    hashes: Vec<u64>,
    variant: String,
    trace: RankTrace,
}

/// Rank's view of the block in one element type, with the rank's heap and stream.
struct Part<'a> {
    block: &'a Block,
    rig: &'a Rig,
    ranks: Topology,
    dtype: DType,
}

impl LayerJob {
    /// Element types to run the layer in: f32, and the weights' type if it is another one.
    fn dtypes(block: &Block) -> Vec<DType> {
        let own = (block.dtype != DType::F32).then_some(block.dtype);
        [DType::F32].into_iter().chain(own).collect()
    }

    /// Plan of `op` for one product of the block: `step` is 0 for the up product, 1 for the down
    /// product.
    fn plan(
        &self,
        block: &Block,
        op: Op,
        step: usize,
        ranks: Topology,
        dtype: DType,
    ) -> Result<Plan> {
        let (tokens, hidden) = (block.input.rows, block.input.cols);
        let inner = split(block.up.rows, ranks.size, ranks.rank).len();
        let options = match step {
            0 => Options::new(tokens, inner, hidden).epilogue(Epilogue::Gelu),
            _ => Options::new(tokens, hidden, inner),
        };
        let spans = if self.trace { trace::SPANS } else { 0 };
        suite::plan(
            op,
            "auto",
            ranks,
            &options.dtype(dtype).trace_spans(spans).backend(self.device.backend()),
        )
    }

    /// Room in the heap for the matrices and the plans. The ways run one after the other, so the
    /// room for the way that needs more suffices.
    fn room(&self, block: &Block, size: usize, nodes: usize) -> Result<Room> {
        let mut largest = Room::default();
        for dtype in Self::dtypes(block) {
            for (_, ops) in WAYS {
                let step = |step: usize| {
                    Room::of(size, |ranks| {
                        self.plan(block, ops[step], step, ranks.on_nodes(nodes), dtype)
                    })
                };
                largest = largest.or(step(0)?.and(step(1)?));
            }
        }
        Ok(largest.matrices(DType::F32, rooms(block, size)))
    }
}

/// Number of elements that each rank needs for x, up weights, up bias, h, down weights, down bias
/// and y.
fn rooms(block: &Block, size: usize) -> [usize; 7] {
    let (tokens, hidden) = (block.input.rows, block.input.cols);
    let inner = split(block.up.rows, size, 0).len();
    let weights = inner * hidden;
    [tokens * hidden, weights, inner, tokens * inner, weights, hidden, tokens * hidden]
}

impl Job for LayerJob {
    type Report = Report;

    const NAME: &str = "layer";

    fn run_rank(&self, world: &World) -> Result<Option<Report>> {
        let options = self.device.heap(world);
        let world = &world.for_heap(&options)?;
        let ranks = Topology::from(world);
        let block = Block::read(self.weights.as_ref())?;
        let room = self.room(&block, ranks.size, ranks.nodes())?;
        let rig = Rig::open(world, options, room)?;
        let dtypes = Self::dtypes(&block);
        let calls = dtypes.len() * WAYS.len() * self.iterations;
        let progress = Progress::new("calls", ranks.rank, calls);
        let (mut rows, mut traces) = (Vec::new(), Vec::new());
        for dtype in dtypes {
            for (way, ops) in WAYS {
                let part = Part { block: &block, rig: &rig, ranks, dtype };
                let steps = self.run_way(&part, ops, &progress)?;
                for (which, (step, op)) in steps.into_iter().zip(ops).enumerate() {
                    let mut all: Vec<Step> = gather(world, &step)?;
                    traces.extend(all.iter_mut().map(|step| step.trace.clone()));
                    rows.push(row((way, op, which), &part, &all));
                }
            }
        }
        drop(progress);
        rig.heap.close()?;
        traces.retain(|_| self.trace);
        Ok((ranks.rank == 0).then_some(Report { rows, traces }))
    }
}

impl LayerJob {
    /// Runs the up and the down product `iterations` times in one way of [`WAYS`], after one
    /// warm-up run.
    fn run_way(&self, part: &Part<'_>, ops: [Op; 2], progress: &Progress) -> Result<[Step; 2]> {
        let Part { block, rig, ranks, dtype } = *part;
        let heap = &rig.heap;
        let sequence = ops[0] == Op::AllGatherMatmul;
        let (tokens, hidden) = (block.input.rows, block.input.cols);
        let inner = split(block.up.rows, ranks.size, ranks.rank);
        let rows = if sequence { split(tokens, ranks.size, ranks.rank) } else { 0..tokens };

        let rooms = rooms(block, ranks.size);
        let matrix = |which: usize, dtype, shape| Matrix::new(heap, dtype, rooms[which], shape);
        let x = matrix(0, dtype, (rows.len(), hidden))?;
        x.fill(heap, |r, c| block.input.at(rows.start + r, c))?;
        let up = matrix(1, dtype, (inner.len(), hidden))?;
        up.fill(heap, |r, c| block.up.at(inner.start + r, c))?;
        let up_bias = matrix(2, DType::F32, (1, inner.len()))?;
        up_bias.fill(heap, |_, c| block.up_bias.at(0, inner.start + c))?;
        let h = matrix(3, dtype, (tokens, inner.len()))?;
        let down = matrix(4, dtype, (hidden, inner.len()))?;
        down.fill(heap, |r, c| block.down.at(r, inner.start + c))?;
        let down_bias = matrix(5, DType::F32, (1, hidden))?;
        down_bias.fill(heap, |_, c| block.down_bias.at(0, c))?;
        let y = matrix(6, dtype, (rows.len(), hidden))?;

        let hidden_wanted = part.up_in_f64(&inner);
        let output_wanted = block.output.some_rows(rows);
        // The file stores weights as (out, in), so right factors are their transposes.
        let operands = [
            Operands::new(x.matrix()?, up.matrix()?.transposed(), h.matrix()?)
                .bias(up_bias.matrix()?),
            Operands::new(h.matrix()?, down.matrix()?.transposed(), y.matrix()?)
                .bias(down_bias.matrix()?),
        ];
        let results = [(&h, &hidden_wanted), (&y, &output_wanted)];
        let mut made = Vec::new();
        let mut steps = Vec::new();
        for ((step, op), (_, wanted)) in ops.into_iter().enumerate().zip(results) {
            let plan = self.plan(block, op, step, ranks, dtype)?;
            steps.push(Step {
                median_us: 0.0,
                errors: 0.0,
                wanted: wanted.data.iter().map(|x| x * x).sum(),
                hashes: Vec::new(),
                variant: plan.variant().to_string(),
                trace: RankTrace::new(op.name(), ranks.rank, &[]),
            });
            made.push(AnyOp::new(heap, &plan)?);
        }
        let turns = (rig.heap.whole_world(), progress);
        let times = in_turns(turns, self.iterations, (2, chained), |at| {
            let ((result, wanted), step) = (results[at], &mut steps[at]);
            result.poison(heap)?;
            let time = rig.time(|stream| Ok(made[at].run(&operands[at], stream)?))?;
            let values = result.read(heap)?;
            let pairs = values.iter().zip(&wanted.data);
            let errors: f64 = pairs.map(|(seen, wanted)| (seen - wanted).powi(2)).sum();
            // A NaN counts as larger than all errors and is kept.
            if errors.is_nan() || errors > step.errors {
                step.errors = errors;
            }
            step.hashes.push(hash(&values));
            Ok(time)
        })?;
        steps.iter_mut().zip(times).for_each(|(step, times)| step.median_us = median(times));
        for (op, step) in made.into_iter().zip(&mut steps) {
            step.trace = RankTrace::new(&step.trace.op, ranks.rank, &op.trace()?);
            op.free()?;
        }
        for matrix in [x, up, up_bias, h, down, down_bias, y] {
            matrix.free(heap)?;
        }
        steps.try_into().ok().context("the layer has not run two steps")
    }
}

impl Part<'_> {
    /// Reference for this rank's values after the up product and the GELU, computed in f64.
    fn up_in_f64(&self, inner: &std::ops::Range<usize>) -> Dense {
        let Block { input, up, up_bias, .. } = self.block;
        let low = |x: f64| rounded(self.dtype, x);
        let a = Dense::from_fn(input.rows, input.cols, |r, c| low(input.at(r, c)));
        let b = Dense::from_fn(up.cols, inner.len(), |r, c| low(up.at(inner.start + c, r)));
        let sum = product(&a, &b).value;
        Dense::from_fn(sum.rows, sum.cols, |r, c| {
            gelu(sum.at(r, c) + up_bias.at(0, inner.start + c))
        })
    }
}

/// Hash of the values' bits, to be compared with the hashes of other ranks, which run the same
/// program.
fn hash(values: &[f64]) -> u64 {
    let mut hasher = DefaultHasher::new();
    values.iter().for_each(|value| hasher.write_u64(value.to_bits()));
    hasher.finish()
}

/// Makes one row of the table from the results of all ranks.
fn row((way, op, which): (&str, Op, usize), part: &Part<'_>, all: &[Step]) -> Row {
    let Part { block, ranks, dtype, .. } = *part;
    let (tokens, hidden, inner) = (block.input.rows, block.input.cols, block.up.rows);
    let size = ranks.size;
    let split = |total: usize| if size > 1 { format!("{total}/{size}") } else { total.to_string() };
    let sum = |f: fn(&Step) -> f64| all.iter().map(f).sum::<f64>();
    let error = if op == Op::MatmulAllReduce {
        // Error of the worst rank, because every rank has the whole result.
        let each = all.iter().map(|step| relative(step.errors.sqrt(), step.wanted.sqrt()));
        each.fold(0.0, |worst, one| if one.is_nan() || one > worst { one } else { worst })
    } else {
        relative(sum(|step| step.errors).sqrt(), sum(|step| step.wanted).sqrt())
    };
    let limit = bound(dtype);
    let mut wrong = None;
    if error.is_nan() || error > limit {
        wrong = Some(format!("relative error {error:.2e}, the bound is {limit:.1e}"));
    }
    let steady = all.iter().all(|step| step.hashes.iter().all(|&hash| hash == step.hashes[0]));
    if !steady {
        wrong = wrong.or(Some("calls with the same input gave other bits".into()));
    }
    if op == Op::MatmulAllReduce && all.iter().any(|step| step.hashes != all[0].hashes) {
        wrong = wrong.or(Some("ranks have other bits".into()));
    }
    Row {
        way: way.into(),
        step: ["up", "down"][which].into(),
        op: op.name().into(),
        variant: all[0].variant.clone(),
        shape: match which {
            0 => format!("{tokens} x {} x {hidden}", split(inner)),
            _ => format!("{tokens} x {hidden} x {}", split(inner)),
        },
        dtype,
        ranks: size,
        median_us: all[0].median_us,
        rel_error: error,
        bound: limit,
        wrong,
    }
}
