//! `iris plan`: prints the variants that `auto` takes for calls of different sizes, their steps and
//! predicted times. It needs no GPU.

mod nodes;

use std::path::PathBuf;

use anyhow::Result;
use comfy_table::Table;
use iris_heap::{DType, MAX_RANKS};
use iris_ops::{ChoiceReason, Device, OpRequest, Plan, Shard, Topology, Variant};
use iris_testkit::oracle::Meaning;
use iris_testkit::say;
use iris_testkit::suite::{self, Op, Options as OpOptions};

use crate::errors::{unread, usage};
use crate::gpu_bench;
use crate::operator::{dtype, op};
use crate::problem::known_variant;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Operator for which calls are planned; without one, over several nodes, the shapes of `iris
    /// bench` on GPUs.
    #[arg(value_parser = op, required_unless_present_any = ["cases", "write", "nodes"])]
    op: Option<Op>,
    /// Number of ranks in all [default: 4, or 8 for each of several nodes].
    #[arg(long)]
    ranks: Option<usize>,
    /// Number of nodes. With several, prints the predicted time of each call together with that of
    /// a GEMM and one NCCL collective over all ranks. It needs an NVIDIA device by name.
    #[arg(long, default_value_t = 1)]
    nodes: usize,
    /// Line rate in Gbit/s of the network port that each rank has [default: 400, as in a DGX H200].
    #[arg(long, value_name = "GBIT")]
    gbit: Option<f64>,
    /// Device by name, such as h200, mi300x or cpu; `this` for this machine's GPU, or its host if
    /// it has none.
    #[arg(long, default_value = "this")]
    device: String,
    /// Number of rows M, as in the operator's options [default: 4096].
    #[arg(long)]
    m: Option<usize>,
    /// Number of columns N [default: 4096].
    #[arg(long)]
    n: Option<usize>,
    /// Inner dimension of a product; if K is split over the ranks, that of one rank [default:
    /// 4096].
    #[arg(long)]
    k: Option<usize>,
    /// Range first..last of the rows of calls; powers of two in it are planned [default: those up
    /// to M].
    #[arg(long, value_parser = range, conflicts_with = "cases")]
    rows: Option<(usize, usize)>,
    /// Element type: f32, f16 or bf16.
    #[arg(long, default_value = "bf16", value_parser = dtype, conflicts_with = "cases")]
    dtype: DType,
    /// Split A by columns over the ranks.
    #[arg(long, conflicts_with = "cases")]
    columns: bool,
    /// Normalise the rows of the result (RMSNorm).
    #[arg(long, conflicts_with = "cases")]
    rms_norm: bool,
    /// Give a row of the result the same bits in calls of every size.
    #[arg(long, conflicts_with = "cases")]
    batch_invariant: bool,
    /// Variant of the operator, instead of auto.
    #[arg(long, conflicts_with = "cases")]
    variant: Option<String>,
    /// Read shapes from a file in the format of bench/cuda.toml, instead of one operator; steps are
    /// not printed.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["op", "m", "n", "k"])]
    cases: Option<PathBuf>,
    /// Replace the tables of predictions for 2 to 64 nodes between the lines <!-- scaling --> and
    /// <!-- /scaling --> of this file; shapes are those of `iris bench` on GPUs.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["op", "cases", "nodes", "ranks", "gbit", "m", "n", "k"])]
    write: Option<PathBuf>,
}

fn range(text: &str) -> Result<(usize, usize), String> {
    let ends = text.split_once("..").and_then(|(first, last)| {
        let (first, last) = (first.parse().ok()?, last.trim_start_matches('=').parse().ok()?);
        (0 < first && first <= last).then_some((first, last))
    });
    ends.ok_or_else(|| "expected first..last, such as 1..16384".into())
}

pub(crate) fn main(options: &Options) -> Result<bool> {
    options.op.map_or(Ok(()), |op| check_read(options, op))?;
    let device = device(&options.device)?;
    if let Some(file) = &options.write {
        nodes::write(file, device)?;
        return Ok(true);
    }
    let size = options.ranks.unwrap_or(if options.nodes > 1 { 8 * options.nodes } else { 4 });
    let ranks = Topology::new(0, size).on_device(device);
    if options.nodes != 1 {
        return nodes::main(options, ranks);
    }
    if options.op.is_none() && options.cases.is_none() {
        return Err(usage("operator", "missing", "one, for a plan of one node"));
    }
    if !(1..=MAX_RANKS).contains(&size) {
        return Err(usage("--ranks", size, format!("1 to {MAX_RANKS} on one node; see --nodes")));
    }
    unread("a plan for one node", &[("--gbit", options.gbit.map(|it| it.to_string()))])?;
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "operator",
        "M",
        "N",
        "K",
        "variant",
        "tile",
        "predicted",
        "limit",
        "runner-up",
        "because",
        "run",
    ]);
    let invariant = if options.batch_invariant { ", batch invariant" } else { "" };
    say!("{size} ranks on {device}{invariant}; times {}", source(ranks)?)?;
    if let Some(file) = &options.cases {
        for shape in gpu_bench::read(device.backend, Some(file), None)? {
            table.add_row(cells((shape.op, "auto"), &shape.options, ranks)?);
        }
        say!("{table}")?;
        return Ok(true);
    }
    let Some(op) = options.op else { return Ok(true) };
    let variant = options.variant.as_deref().unwrap_or("auto");
    known_variant("--variant", op, variant)?;
    let (first, last) = options.rows.unwrap_or((1, options.m.unwrap_or(4096)));
    let [n, k] = [options.n, options.k].map(|it| it.unwrap_or(4096));
    let of = |m: usize| options.call(m, [n, k], device);
    let plan = suite::plan(op, variant, ranks, &of(last))?;
    let sizes = sizes(op, (first, last));
    for &size in &sizes {
        table.add_row(cells((op, variant), &of(size), ranks)?);
    }
    say!("{table}")?;
    let mut shown: Vec<Variant> = Vec::new();
    for size in sizes {
        let choice = plan.at(size);
        if !shown.contains(&choice.variant) {
            shown.push(choice.variant);
            say!("\n{}:\n{}", choice.variant, plan.program(choice))?;
        }
    }
    Ok(true)
}

/// Numbers of rows to plan for: the powers of two in the range, and its end.
fn sizes(op: Op, (first, last): (usize, usize)) -> Vec<usize> {
    let powers = (0..usize::BITS - 1).map(|bits| 1 << bits);
    let sizes = powers.filter(|it| (first..last).contains(it)).chain([last]);
    if op == Op::Barrier { vec![0] } else { sizes.collect() }
}

impl Options {
    /// Options of the operator for calls of `m` rows on `device`.
    fn call(&self, m: usize, [n, k]: [usize; 2], device: Device) -> OpOptions {
        let of =
            OpOptions::new(m, n, k).dtype(self.dtype).backend(device.backend).uniform_shape(true);
        let of = if self.columns { of.shard(Shard::Columns) } else { of };
        let of = of.batch_invariant(self.batch_invariant);
        if self.rms_norm { of.rms_norm(1e-5) } else { of }
    }
}

/// Refuses options that have a value but that a plan of `op` does not read.
fn check_read(options: &Options, op: Op) -> Result<()> {
    let number = |it: Option<usize>| it.map(|number| number.to_string());
    let rows = options.rows.map(|(first, last)| format!("{first}..{last}"));
    if op == Op::Barrier {
        let sizes =
            [("--m", number(options.m)), ("--n", number(options.n)), ("--rows", rows.clone())];
        unread("barrier", &sizes)?;
    }
    if !op.multiplies() {
        unread(&format!("{op}, which is no product,"), &[("--k", number(options.k))])?;
    }
    if rows.is_some() {
        unread("a plan with --rows", &[("--m", number(options.m))])?;
    }
    if options.columns && !Meaning::of(op).shards().contains(&Shard::Columns) {
        return Err(usage(
            "--columns",
            "given",
            format!("no such option, since {op} is split by rows"),
        ));
    }
    Ok(())
}

/// Device called `name`; `this` stands for this machine's GPU, or its host if there is none.
fn device(name: &str) -> Result<Device> {
    if name != "this" {
        return Ok(Device::named(name)?);
    }
    use iris_heap::BackendKind::{Cpu, Cuda, Hip};
    let found = [Cuda, Hip].into_iter().find_map(|kind| Device::of_rank(kind, 0).ok());
    Ok(found.map_or_else(|| Device::of_rank(Cpu, 0), Ok)?)
}

/// Description of the data from which times are predicted: this machine's tuning file or built-in
/// data.
fn source(ranks: Topology) -> Result<String> {
    let plan = Op::AllReduce.request(1, 1, 0).plan(ranks)?;
    Ok(match (plan.tuned_by(), plan.borrowed_tuning()) {
        (Some(file), _) => format!("predicted from {file}"),
        (None, Some(of)) => {
            format!("predicted from tuning data of an {of}, because there is none of this device")
        }
        (None, None) => "predicted from built-in tuning data".into(),
    })
}

/// Cells of a table row for the largest calls of a plan.
fn cells(of: (Op, &str), options: &OpOptions, ranks: Topology) -> Result<Vec<String>> {
    let plan = suite::plan(of.0, of.1, ranks, options)?;
    let us = |us: Option<f64>| us.map_or("-".into(), |us| format!("{us:.1} us"));
    let OpRequest { m, n, k, .. } = **options;
    let choice = plan.at(m);
    let because = match choice.why {
        ChoiceReason::Requested => "asked",
        ChoiceReason::Tuned if has_other_bits(of, options, ranks, &plan)? => {
            "measured here, other bits"
        }
        ChoiceReason::Tuned => "measured here",
        ChoiceReason::Measured => "measured",
        ChoiceReason::Predicted => "predicted",
    };
    let next = runner_up(of.0, options, ranks, &plan);
    let next = next.map_or("-".into(), |(variant, time)| format!("{variant} {time:.1} us"));
    Ok(vec![
        of.0.to_string(),
        m.to_string(),
        n.to_string(),
        if of.0.multiplies() { k } else { 0 }.to_string(),
        choice.variant.to_string(),
        choice.tile.to_string(),
        us(plan.predicted_us(m)),
        us(Some(plan.lower_bound_us(m))),
        next,
        because.into(),
        if plan.has_run(m) { "yes" } else { "no" }.into(),
    ])
}

/// Whether this machine's tuning may change the last bits of the result: for sums and products, if
/// it changes the variant or the tile.
fn has_other_bits(
    of: (Op, &str),
    options: &OpOptions,
    ranks: Topology,
    plan: &Plan,
) -> Result<bool> {
    let untuned = suite::plan(of.0, of.1, ranks.untuned(), options)?;
    let [tuned, untuned] = [plan, &untuned].map(|plan| {
        let choice = plan.at(options.m);
        (choice.variant, choice.tile)
    });
    Ok((of.0.multiplies() || Meaning::of(of.0).sums) && tuned != untuned)
}

/// Fastest variant other than the chosen one that accepts any operands and adds in a fixed order,
/// with its predicted time. It may be a variant that `auto` never chooses.
fn runner_up(op: Op, options: &OpOptions, ranks: Topology, plan: &Plan) -> Option<(String, f64)> {
    let chosen = plan.at(options.m).variant;
    let others = op.variants().into_iter().filter(|&variant| {
        let in_heap = matches!(variant, Variant::Pull | Variant::Staged);
        variant != chosen && !variant.order_varies() && !in_heap
    });
    let timed = others.filter_map(|variant| {
        let plan = suite::plan(op, variant.name(), ranks, options).ok()?;
        let mark = if plan.has_run(options.m) { "" } else { " (not run)" };
        Some((format!("{variant}{mark}"), plan.predicted_us(options.m)?))
    });
    timed.min_by(|(_, one), (_, other)| one.total_cmp(other))
}
