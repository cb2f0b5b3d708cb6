//! Lines that the benchmark of GPUs prints.

use anyhow::Result;
use iris_testkit::say;
use serde_json::Value;

/// Whether the op's result differs from the baseline's by more than rounding to 16-bit types can
/// explain.
pub(super) fn is_wrong(line: &Value) -> bool {
    const MOST: f64 = 0.02;
    let error = line.get("rel_error");
    error.is_some_and(|error| error.as_f64().is_none_or(|error| error > MOST))
}

/// Joins the columns of a line, padded to their widths.
pub(super) fn line(columns: [&str; 13]) -> String {
    let [op, shape, variant, tile, us, eager, run, bare, base, ratio, product, others @ ..] =
        columns;
    let [larger, invariant] = others;
    let what = format!("{op:21} {shape:>22} {variant:>11} {tile:>13}");
    format!(
        "{what} {us:>8} {eager:>8} {run:>6} {bare:>6} {base:>8} {ratio:>6} {product:>8} {larger:>6} {invariant:>6}"
    )
}

pub(super) fn print_line(value: &Value) -> Result<()> {
    let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
    let time = |name: &str, digits| match value[name].as_f64() {
        Some(number) => format!("{number:.digits$}"),
        None => "-".into(),
    };
    let normed = if value["rms_norm"].is_number() { " n" } else { "" };
    let columns = if value["columns"].is_boolean() { " c" } else { normed };
    let other = value["dtype"].as_str().filter(|&dtype| dtype != "bf16");
    let other = other.map(|dtype| format!(" {dtype}")).unwrap_or_default();
    let parts = value["combine"].as_u64().map(|parts| format!(" {parts} parts"));
    let message = if value["list"].is_array() { " list" } else { &parts.unwrap_or_default() };
    let [m, n, k] = ["m", "n", "k"].map(|name| &value[name]);
    let shape = format!("{m} x {n} x {k}{message}{columns}{other}");
    let groups = value["workgroups"].as_u64().map(|groups| format!(" /{groups}"));
    let tile = &value["tile"];
    let tile = format!("{}x{}{}", tile[0], tile[1], groups.unwrap_or_default());
    let printed = line([
        &text("op"),
        &shape,
        &text("variant"),
        &tile,
        &time("us", 1),
        &time("eager_us", 1),
        &time("run_us", 1),
        &time("bare_us", 1),
        &time("baseline_us", 1),
        &time("ratio", 2),
        &time("product_us", 1),
        &time("larger_plan_ratio", 2),
        &time("batch_invariant_ratio", 3),
    ]);
    let note = value["note"].as_str().map(|note| format!("  {note}")).unwrap_or_default();
    let marginal = |name: &str| value[format!("marginal{name}_us")].as_f64();
    let layer = |name: &str| {
        let [plain, between] = [name.to_owned(), format!("{name}_between")].map(|it| marginal(&it));
        Some(format!("{:.2} us, {:.2} behind a small kernel", plain?, between?))
    };
    let steps = layer("").map(|own| {
        let theirs = layer("_baseline").map(|theirs| format!("; baseline {theirs}"));
        format!("  a further layer: {own}{}", theirs.unwrap_or_default())
    });
    let note = note + &steps.unwrap_or_default();
    let error = is_wrong(value).then(|| format!("  WRONG: off by {}", value["rel_error"]));
    say!("{printed}{note}{}", error.unwrap_or_default())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_result_that_is_not_the_libraries_is_wrong() {
        let wrong = |error: Value| is_wrong(&json!({ "rel_error": error }));
        assert!(wrong("NaN".into()) && wrong(0.5.into()) && wrong(f64::INFINITY.into()));
        assert!(!wrong(0.002.into()) && !is_wrong(&json!({ "note": "no baseline" })));
    }
}
