//! `iris bench --backend hip`: how long operators take on GPUs for which there is no baseline yet. Times are of
//! the host, of twenty calls one behind the other, and of the slowest rank; nothing is compared.

use std::time::SystemTime;

use anyhow::Result;
use iris_heap::DType;
use iris_testkit::suite::OpName;
use iris_testkit::{harness, say};
use serde::Deserialize;
use serde_json::json;

use crate::bench::{self, Options, Sink};
use crate::device::Device;
use crate::errors::usage;
use crate::job::Place;
use crate::problem::{Problem, known_variant};
use crate::tune::TuneJob;

/// What is measured unless another file is given.
const CASES: &str = include_str!("../../../../bench/hip.toml");

/// A table of the file: an op, and the shapes it is measured on.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    op: String,
    variants: Vec<String>,
    dtype: DType,
    /// M, N, K of the whole.
    shapes: Vec<[usize; 3]>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rows {
    row: Vec<Row>,
}

fn rows(options: &Options) -> Result<Vec<Row>> {
    let Rows { mut row } = bench::read(options.cases.as_deref(), ("bench/hip.toml", CASES))?;
    if let Some(only) = &options.only {
        row.retain(|row| row.op.contains(only.as_str()));
        if row.is_empty() {
            return Err(usage("--only", only, "part of the name of an op that is measured"));
        }
    }
    for Row { op, variants, .. } in &row {
        let op: OpName = op.parse()?;
        variants.iter().try_for_each(|name| known_variant("variant", op, name))?;
    }
    Ok(row)
}

/// Measures and prints.
pub(crate) fn main(options: &Options, sink: &mut Sink) -> Result<bool> {
    let (rows, backend) = (rows(options)?, options.backend);
    if let Some(reason) = harness::missing_gpus(backend, 1)? {
        say!("skipped: {reason}")?;
        return Ok(true);
    }
    let devices = backend.devices()?;
    let place = Place::new(options.ranks.unwrap_or(devices.len()), true)?;
    let (name, ranks, count) = (&devices[0].name, place.ranks, devices.len());
    let driver = backend.driver_version()?;
    say!("{ranks} ranks on {count} x {name}; driver {driver}; nothing is compared")?;
    let device = Device::new(backend, None, None)?;
    for Row { op, variants, dtype, shapes } in rows {
        for [m, n, k] in shapes {
            let problem = Problem::new(&op, [m, n, k], dtype, backend);
            let times = place.run(&TuneJob::variants(problem, &variants, device))?;
            let shape = format!("{m} x {n} x {k}");
            for (variant, us) in variants.iter().zip(times) {
                say!("{op:21} {shape:>19} {dtype:>4} {variant:>16} {us:>10.1} us")?;
                sink.add(json!({
                    "op": op, "variant": variant, "m": m, "n": n, "k": k, "dtype": dtype.name(),
                    "us": us, "ranks": ranks, "device": name, "driver": driver,
                    "commit": options.commit(), "date": bench::date(SystemTime::now()),
                }))?;
            }
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use iris_heap::BackendKind;
    use iris_ops::Ranks;

    #[test]
    fn the_cases_are_read_and_planned() {
        let rows: Rows = toml::from_str(CASES).unwrap();
        for Row { op, variants, dtype, shapes } in rows.row {
            for variant in &variants {
                for &shape in &shapes {
                    let mut problem = Problem::new(&op, shape, dtype, BackendKind::Hip);
                    problem.variant = variant.clone();
                    problem.plan(Ranks::new(0, 8)).unwrap();
                }
            }
        }
    }
}
