//! `iris plan`: what `auto` takes for calls of different sizes, its steps and predicted times. No GPU is needed.

use std::path::PathBuf;

use anyhow::Result;
use comfy_table::Table;
use iris_heap::DType;
use iris_ops::{Device, Plan, Ranks, Shard, Variant, Why};
use iris_testkit::oracle::Meaning;
use iris_testkit::say;
use iris_testkit::suite::{self, Op, Options as OpOptions};

use crate::gpu_bench;
use crate::operator::{dtype, op};
use crate::problem::known_variant;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The operator.
    #[arg(value_parser = op, required_unless_present = "cases")]
    op: Option<Op>,
    /// Number of ranks.
    #[arg(long, default_value_t = 4)]
    ranks: usize,
    /// The device by name, as h200, mi300x or cpu; `this` for the GPU of this machine, or its host if it has none.
    #[arg(long, default_value = "this")]
    device: String,
    /// Rows, as the operator's options take them [default: 4096].
    #[arg(long)]
    m: Option<usize>,
    /// Columns [default: 4096].
    #[arg(long)]
    n: Option<usize>,
    /// Depth of a product; where K is split over the ranks, that of a rank [default: 4096].
    #[arg(long)]
    k: Option<usize>,
    /// Rows of calls, first..last: powers of two from the first to the last [default: those up to M].
    #[arg(long, value_parser = range, conflicts_with = "cases")]
    rows: Option<(usize, usize)>,
    /// Element type: f32, f16 or bf16.
    #[arg(long, default_value = "bf16", value_parser = dtype)]
    dtype: DType,
    /// A is split by columns.
    #[arg(long, conflicts_with = "cases")]
    columns: bool,
    /// Rows of the result are normalised.
    #[arg(long, conflicts_with = "cases")]
    rms_norm: bool,
    /// How it is done, in place of auto.
    #[arg(long, conflicts_with = "cases")]
    variant: Option<String>,
    /// Shapes from a file, in the form of bench/cuda.toml, in place of one operator; without steps.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["op", "m", "n", "k"])]
    cases: Option<PathBuf>,
}

fn range(text: &str) -> Result<(usize, usize), String> {
    let ends = text.split_once("..").and_then(|(first, last)| {
        let (first, last) = (first.parse().ok()?, last.trim_start_matches('=').parse().ok()?);
        (0 < first && first <= last).then_some((first, last))
    });
    ends.ok_or_else(|| "expected first..last, such as 1..16384".into())
}

pub(crate) fn main(options: &Options) -> Result<bool> {
    let device = device(&options.device)?;
    let ranks = Ranks::new(0, options.ranks).on_device(device);
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
    say!("{} ranks on {device}; times {}", options.ranks, source(ranks)?)?;
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
    let of = |m: usize| {
        let of = OpOptions::new(m, n, k).dtype(options.dtype).backend(device.backend).even(true);
        let of = if options.columns { of.shard(Shard::Columns) } else { of };
        if options.rms_norm { of.rms_norm(1e-5) } else { of }
    };
    let plan = suite::plan(op, variant, ranks, &of(last))?;
    let powers = (0..usize::BITS - 1).map(|bits| 1 << bits);
    let sizes = powers.filter(|it| (first..last).contains(it)).chain([last]);
    let sizes: Vec<usize> = if op == Op::Barrier { vec![0] } else { sizes.collect() };
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

/// The device of this name.
fn device(name: &str) -> Result<Device> {
    if name != "this" {
        return Ok(Device::named(name)?);
    }
    use iris_heap::BackendKind::{Cpu, Cuda, Hip};
    let found = [Cuda, Hip].into_iter().find_map(|kind| Device::of_rank(kind, 0).ok());
    Ok(found.map_or_else(|| Device::of_rank(Cpu, 0), Ok)?)
}

/// What times are predicted from.
fn source(ranks: Ranks) -> Result<String> {
    let plan = Op::AllReduce.request(1, 1, 0).plan(ranks)?;
    Ok(match (plan.tuned_by(), plan.figures()) {
        (Some(file), _) => format!("predicted from {file}"),
        (None, Some(of)) => {
            format!("predicted from figures of an {of}: nobody has measured this device")
        }
        (None, None) => "predicted from built-in figures".into(),
    })
}

/// A row of the table: of the largest calls of a plan.
fn cells(of: (Op, &str), options: &OpOptions, ranks: Ranks) -> Result<Vec<String>> {
    let plan = suite::plan(of.0, of.1, ranks, options)?;
    let us = |us: Option<f64>| us.map_or("-".into(), |us| format!("{us:.1} us"));
    let OpOptions { m, n, k, .. } = *options;
    let choice = plan.at(m);
    let because = match choice.why {
        Why::Asked => "asked",
        Why::Tuned if has_other_bits(of, options, ranks, &plan)? => "measured here, other bits",
        Why::Tuned => "measured here",
        Why::Measured => "measured",
        Why::Predicted => "predicted",
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
        us(plan.predicted(m)),
        us(Some(plan.limit(m))),
        next,
        because.into(),
        if plan.has_run(m) { "yes" } else { "no" }.into(),
    ])
}

/// Whether results may differ in bits from those of the choice without this machine's tuning: sums and products are the
/// same bits in one variant with one tile.
fn has_other_bits(of: (Op, &str), options: &OpOptions, ranks: Ranks, plan: &Plan) -> Result<bool> {
    let untuned = suite::plan(of.0, of.1, ranks.untuned(), options)?;
    let [tuned, untuned] = [plan, &untuned].map(|plan| {
        let choice = plan.at(options.m);
        (choice.variant, choice.tile)
    });
    Ok((of.0.multiplies() || Meaning::of(of.0).sums) && tuned != untuned)
}

/// The quickest of the other variants that take any operands and add in one order, whether or not `auto` may take it.
fn runner_up(op: Op, options: &OpOptions, ranks: Ranks, plan: &Plan) -> Option<(String, f64)> {
    let chosen = plan.at(options.m).variant;
    let others = op.variants().into_iter().filter(|&variant| {
        let in_heap = matches!(variant, Variant::Pull | Variant::Staged);
        variant != chosen && !variant.order_varies() && !in_heap
    });
    let timed = others.filter_map(|variant| {
        let plan = suite::plan(op, variant.name(), ranks, options).ok()?;
        let mark = if plan.has_run(options.m) { "" } else { " (not run)" };
        Some((format!("{variant}{mark}"), plan.predicted(options.m)?))
    });
    timed.min_by(|(_, one), (_, other)| one.total_cmp(other))
}
