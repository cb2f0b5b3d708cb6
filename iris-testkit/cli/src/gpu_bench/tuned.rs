//! `iris tune --backend cuda`: times the variants and tiles of an op and the predicted choice, in
//! turns in one run on all ranks, and makes tuning rows for choices that are faster than the
//! predicted one. Without a file of shapes it times the cases from which machine parameters are
//! fitted.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use iris_heap::BackendKind;
use iris_ops::{Shard, TileShape, Topology, Variant};
use iris_testkit::suite::{Op, Options as OpOptions};
use iris_testkit::{harness, note, say};
use serde_json::Value;

use super::{Beside, Message, Shape, Vendors, each_shape, is_wrong, read, skipped, watch};
use crate::bench::origin::provenance;
use crate::job::Place;
use crate::problem::TimedVariant;
use crate::tune::options::Options;

/// Maximum ratio for which a tuning row is made. Each sample of a choice is divided by the sample
/// of the predicted choice that was taken next to it. The median of these quotients must be at most
/// this ratio, and three quarters of the quotients must be below 1.
const WORTH_IT: f64 = 0.97;

/// Times the choices with `ranks` ranks and calls `found` with each new tuning row; returns whether
/// nothing failed.
pub(crate) fn tune(
    options: &Options,
    ranks: usize,
    found: &(dyn Fn(String) -> Result<()> + Sync),
) -> Result<bool> {
    let kind = options.backend;
    let mut shapes = read(kind, options.cases.as_deref(), options.only.as_deref())?;
    if let Some(reason) = harness::missing_gpus(kind, ranks)? {
        return skipped(&reason);
    }
    let planned = Topology::new(0, ranks).on(kind).untuned();
    for shape in &mut shapes {
        shape.choices = choices(shape, planned);
        shape.beside = Beside::First;
        (shape.larger_plan, shape.batch_invariant) = (None, false);
    }
    // A shape with only one choice is not timed, because there is nothing to choose; tuning rows are
    // not for lists and weighted parts.
    shapes.retain(|shape| shape.choices.len() > 1 && shape.message == Message::Plain);
    watch(options.limit)?;
    let vendors = Vendors::load(kind);
    let (faster, wrong) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let from = provenance(kind, options.commit.clone());
    let failed =
        each_shape(Place::new(ranks, true)?, (&vendors, false), &shapes, &|shape, lines| {
            wrong.fetch_add(lines.iter().filter(|line| is_wrong(line)).count(), Ordering::Relaxed);
            let rule = lines.first().context("the predicted choice was not timed")?;
            let ratio = |line: &Value| line["ratio"].as_f64().unwrap_or(f64::NAN);
            let best = lines.iter().filter(|line| !is_wrong(line));
            let best = best.min_by(|a, b| ratio(a).total_cmp(&ratio(b))).unwrap_or(rule);
            let what = format!("{} {} x {} x {}", shape.op, rule["m"], rule["n"], rule["k"]);
            let said =
                |line: &Value| format!("{} {} in {} us", line["variant"], line["tile"], line["us"]);
            note!("{what}: {} of {} choices: {}", said(best), lines.len(), said(rule));
            let high = best["ratio_spread"][1].as_f64().unwrap_or(f64::NAN);
            if ratio(best) <= WORTH_IT && high < 1.0 {
                faster.fetch_add(1, Ordering::Relaxed);
                found(row(shape, (rule, best), ranks, &from))?;
            }
            Ok(())
        })?;
    let (faster, wrong) = (faster.into_inner(), wrong.into_inner());
    let all = shapes.len();
    say!(
        "# {all} shapes with {ranks} ranks: {faster} with a faster choice, {wrong} wrong, {failed} failed"
    )?;
    Ok(failed == 0 && wrong == 0)
}

/// Times cases (an operator, its options, and names of variants) with `ranks` ranks; returns the
/// result lines of all cases.
pub(crate) fn timed(
    kind: BackendKind,
    ranks: usize,
    cases: &[(Op, OpOptions, Vec<String>)],
) -> Result<Vec<Value>> {
    let shape = |(op, options, variants): &(Op, OpOptions, Vec<String>)| {
        let (choices, options) = (TimedVariant::each(variants, None), options.clone());
        Shape {
            op: *op,
            choices,
            options,
            message: Message::Plain,
            beside: Beside::First,
            layers: None,
            larger_plan: None,
            batch_invariant: false,
        }
    };
    let shapes: Vec<_> = cases.iter().map(shape).collect();
    let lines = Mutex::new(Vec::new());
    each_shape(Place::new(ranks, true)?, (&Vendors::load(kind), false), &shapes, &|_, timed| {
        lines.lock().unwrap_or_else(PoisonError::into_inner).extend(timed);
        Ok(())
    })?;
    Ok(lines.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Makes a tuning row from `best`, the result line of a choice that was faster than the predicted
/// choice, whose line is `rule`.
fn row(shape: &Shape, (rule, best): (&Value, &Value), ranks: usize, from: &str) -> String {
    let (m, n, k) = (&rule["m"], &rule["n"], &rule["k"]);
    let depth = if shape.op.multiplies() { format!("k = {k}\n") } else { String::new() };
    // If the op lets N or K differ between ranks, the row holds only for calls with the option
    // `uniform_shape`.
    let even = if shape.op.options().contains(&"uniform_shape") { "even = true\n" } else { "" };
    let columns = if shape.options.shard == Shard::Columns { "columns = true\n" } else { "" };
    format!(
        "\n[[row]]\nop = \"{}\"\nworld = {ranks}\ndtype = {}\nm = [{m}, {m}]\nn = {n}\n{depth}{columns}{even}\
         variant = {}\ntile = {}\nprovenance = \"{from}; {:.1} us, the rule {:.1} us\"",
        shape.op,
        best["dtype"],
        best["variant"],
        best["tile"],
        best["us"].as_f64().unwrap_or_default(),
        rule["us"].as_f64().unwrap_or_default(),
    )
}

/// Choices to time: first the predicted one, then each variant that is not slow by design, with the
/// predicted tile and with tiles of half and double its size.
fn choices(shape: &Shape, ranks: Topology) -> Vec<TimedVariant> {
    let (mut choices, mut seen) = (Vec::new(), Vec::new());
    let mut add = |variant: &str, tile| {
        let choice = TimedVariant { variant: variant.to_owned(), tile };
        let plan = shape.plan(&choice, ranks).ok()?;
        let comes_to = (plan.variant(), plan.tile());
        if !seen.contains(&comes_to) {
            seen.push(comes_to);
            choices.push(choice);
        }
        Some(comes_to.1)
    };
    add("auto", None);
    for variant in shape.op.variants().into_iter().filter(|&variant| is_worth_it(shape.op, variant))
    {
        let Some(TileShape { m, n }) = add(variant.name(), None) else { continue };
        let others = [(2 * m, n), (m / 2, n), (m, n / 2), (2 * m, n / 2)];
        for (m, n) in others.into_iter().filter(|&(m, n)| m.min(n) > 0) {
            add(variant.name(), Some([m, n]));
        }
    }
    choices
}

/// Whether a variant may be the fastest. Sums under locks are serialised, and fused products run at
/// half the rate of whole-matrix GEMMs.
fn is_worth_it(op: Op, variant: Variant) -> bool {
    use Variant::*;
    match variant {
        Spinlock | Atomic | Pull | Staged | Baseline => false,
        OneShot | TwoShot | Push => !op.multiplies(),
        _ => true,
    }
}
