//! `iris bench`: measures ratios of times and compares them with their limits. The two sides of a
//! ratio run in turns.

use std::time::SystemTime;

use anyhow::Result;
use comfy_table::Table;
use iris_heap::BackendKind;
use iris_testkit::say;
use serde::{Deserialize, Serialize};

use crate::errors::{unread, usage};
use crate::gpu_bench;
use crate::job::Place;
use crate::progress::Progress;
use crate::ratios::{Kind, Ratio, RatioJob, Times};
use options::{Options, Sink, read};
use origin::{date, device};

pub(crate) mod options;
pub(crate) mod origin;

/// Cases to measure on the CPU if the command line names no file of cases.
const CASES: &str = include_str!("../../../bench/cpu.toml");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Cases {
    ratio: Vec<Ratio>,
}

/// Measured ratio, as written to a record file, together with the device and the commit.
#[derive(Serialize)]
struct Measured<'a> {
    #[serde(flatten)]
    ratio: &'a Ratio,
    time_us: f64,
    base_us: f64,
    value: f64,
    ok: bool,
}

/// Measures the ratios and prints them; returns whether all are within their limits.
pub(crate) fn main(options: &Options) -> Result<bool> {
    match options.backend {
        BackendKind::Cpu => on_cpu(options),
        _ => gpu_bench::main(options),
    }
}

fn on_cpu(options: &Options) -> Result<bool> {
    let path = |path: &std::path::PathBuf| path.display().to_string();
    unread(
        "the benchmark of the CPU",
        &[
            ("--ranks", options.ranks.map(|ranks| ranks.to_string())),
            ("--nodes", (options.nodes != 1).then(|| options.nodes.to_string())),
            ("--resume", options.resume.then(|| "given".into())),
            ("--windows", options.windows.then(|| "given".into())),
            ("--compare", options.compare.as_ref().map(path)),
            ("--torch", options.torch.as_ref().map(path)),
            ("--limit", options.limit.map(|seconds| seconds.to_string())),
        ],
    )?;
    let mut sink = Sink::new(options)?;
    let cases = cases(options)?;
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::NOTHING);
    table.set_header(["ratio", "shape", "time", "base", "ratio", "at most", ""]);
    let mut all_ok = true;
    let device = device();
    let progress = Progress::new("ratios", 0, cases.ratio.len());
    for ratio in &cases.ratio {
        let job = RatioJob::new(ratio)?;
        let place = Place::new(ratio.ranks, ratio.kind == Kind::Gemm)?;
        let Times { time: time_us, base: base_us, ratio: value } = place.run(&job)?;
        let ok = value <= ratio.at_most;
        all_ok &= ok;
        table.add_row([
            ratio.name.clone(),
            format!("{} x {} x {}", ratio.m, ratio.n, ratio.k),
            format!("{time_us:.0} us"),
            format!("{base_us:.0} us"),
            format!("{value:.3}"),
            format!("{:.3}", ratio.at_most),
            if ok { "ok".into() } else { "MISSED".into() },
        ]);
        let measured = Measured { ratio, time_us, base_us, value, ok };
        let mut line = serde_json::to_value(&measured)?;
        line["device"] = device.clone();
        line["commit"] = options.commit().into();
        line["date"] = date(SystemTime::now()).into();
        sink.add(line)?;
        progress.step();
    }
    drop(progress);
    say!("{table}")?;
    Ok(all_ok)
}

fn cases(options: &Options) -> Result<Cases> {
    let mut cases: Cases = read(options.cases.as_deref(), ("bench/cpu.toml", CASES))?;
    if let Some(only) = &options.only {
        let is_meant = |ratio: &Ratio| ratio.name.contains(only.as_str());
        if !cases.ratio.iter().any(is_meant) {
            let names: Vec<_> = cases.ratio.iter().map(|ratio| ratio.name.as_str()).collect();
            let expected = format!("part of the name of a ratio: {}", names.join("; "));
            return Err(usage("--only", only, expected));
        }
        cases.ratio.retain(is_meant);
    }
    Ok(cases)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cases_are_read() {
        let cases: Cases = toml::from_str(CASES).unwrap();
        assert!(cases.ratio.len() >= 4);
        for ratio in &cases.ratio {
            RatioJob::new(ratio).unwrap();
        }
    }
}
