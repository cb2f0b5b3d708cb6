//! `iris tune --backend cuda`: times what an op could choose beside what is predicted to be the quickest, in turns in one run on
//! all ranks, and makes the rows of a tuning file that say what was faster; or times cases from which a machine is fitted.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use iris_heap::BackendKind;
use iris_ops::{Ranks, Shard, TileShape, Variant};
use iris_testkit::suite::{Op, Options as OpOptions};
use iris_testkit::{harness, note, say};
use serde_json::Value;

use super::{Beside, Choice, Shape, Vendors, each_shape, is_wrong, read, skipped, watch};
use crate::bench::provenance;
use crate::tune::Options;

/// A choice takes the place of the rule's if the median of its samples, each by that of the rule beside it, is at
/// most this, and three quarters of them are below one.
const WORTH_IT: f64 = 0.97;

/// Measures, for a world of so many ranks, and calls `found` with each row; whether nothing failed.
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
    let planned = Ranks::new(0, ranks).on(kind).untuned();
    for shape in &mut shapes {
        shape.choices = choices(shape, planned);
        shape.beside = Beside::First;
    }
    // One choice has nothing to be chosen from.
    shapes.retain(|shape| shape.choices.len() > 1);
    watch(options.limit)?;
    let vendors = Vendors::load(kind, &[]);
    let (faster, wrong) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let from = provenance(kind, options.commit.clone());
    let failed = each_shape(ranks, (&vendors, false), &shapes, &|shape, lines| {
        wrong.fetch_add(lines.iter().filter(|line| is_wrong(line)).count(), Ordering::Relaxed);
        let rule = lines.first().context("the rule was timed")?;
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
    say!("# of {all} shapes of {ranks} ranks {faster} faster, {wrong} wrong, {failed} failed")?;
    Ok(failed == 0 && wrong == 0)
}

/// Times cases, an operator with its shape and the names of variants each, among so many ranks; the lines of all.
pub(crate) fn timed(
    kind: BackendKind,
    ranks: usize,
    cases: &[(Op, OpOptions, Vec<String>)],
) -> Result<Vec<Value>> {
    let shape = |(op, options, variants): &(Op, OpOptions, Vec<String>)| {
        let choice = |variant: &String| Choice { variant: variant.clone(), tile: None };
        let (choices, options) = (variants.iter().map(choice).collect(), options.clone());
        Shape { op: *op, choices, options, beside: Beside::First }
    };
    let shapes: Vec<_> = cases.iter().map(shape).collect();
    let lines = Mutex::new(Vec::new());
    each_shape(ranks, (&Vendors::load(kind, &[]), false), &shapes, &|_, timed| {
        lines.lock().unwrap_or_else(PoisonError::into_inner).extend(timed);
        Ok(())
    })?;
    Ok(lines.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// The row that says so.
fn row(shape: &Shape, (rule, best): (&Value, &Value), ranks: usize, from: &str) -> String {
    let (m, n, k) = (&rule["m"], &rule["n"], &rule["k"]);
    let depth = if shape.op.multiplies() { format!("k = {k}\n") } else { String::new() };
    // Where N or K is a rank's own, it decides where all have the same.
    let even = if shape.op.options().contains(&"even") { "even = true\n" } else { "" };
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

/// What the rules choose, and then all that differs from it: each variant that is not slower on principle, with
/// the tile that the rules have for it, and with its halves and doubles.
fn choices(shape: &Shape, ranks: Ranks) -> Vec<Choice> {
    let (mut choices, mut seen) = (Vec::new(), Vec::new());
    let mut add = |variant: &str, tile| {
        let choice = Choice { variant: variant.to_owned(), tile };
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
            add(variant.name(), Some(TileShape { m, n }));
        }
    }
    choices
}

/// Sums under locks add what others add, one after the other; and what is fused tile by tile multiplies at half of
/// the rate of a product of whole matrices.
fn is_worth_it(op: Op, variant: Variant) -> bool {
    use Variant::*;
    match variant {
        Spinlock | Atomic | Pull | Staged | Baseline => false,
        OneShot | TwoShot | Push => !op.multiplies(),
        _ => true,
    }
}
