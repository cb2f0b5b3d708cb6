//! Predictions compared with a record: their errors, and the cost of choosing by them (regret).
//!
//! The regret of a choice is a quotient of two measured times: the time of the variant that is
//! predicted to be the fastest, divided by the time of the variant that was the fastest. If a shape
//! was timed several times, the median is used.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use iris_ops::{CostParameters, Device, Topology, Variant};
use iris_testkit::say;

use super::fit::fitted;
use super::measured::{Measured, Shape, measured};
use crate::errors::usage;
use crate::record::line::Line;

/// Rows of a record that belong to one commit and one number of ranks.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) name: String,
    pub(super) rows: Vec<Measured>,
}

/// Groups the rows of a file by commit and number of ranks, oldest first; commits that measured no
/// variants by name are left out.
pub(super) fn records(path: &Path) -> Result<Vec<Record>> {
    let name = path.display().to_string();
    let text = iris_heap::read_file(path).map_err(|e| usage(&name, e, "a readable record"))?;
    let mut found: Vec<Record> = Vec::new();
    for line in text.lines() {
        let Ok(row) = serde_json::from_str::<Line>(line) else { continue };
        let name = format!("{}, {} ranks", row.commit, row.ranks);
        let Ok(device) = Device::named("h200") else { continue };
        let ranks = Topology::new(0, row.ranks).on_device(device);
        let Some(measured) = measured(row, ranks) else { continue };
        match found.iter_mut().find(|record| record.name == name) {
            Some(record) => record.rows.push(measured),
            None => found.push(Record { name, rows: vec![measured] }),
        }
    }
    found.retain(|record| record.groups().values().any(|group| group.len() > 1));
    Ok(found)
}

/// Variant with its median time and its predicted time for one shape.
#[derive(Clone, Copy, Debug)]
struct Timed {
    variant: Variant,
    us: f64,
    predicted_us: f64,
    auto: bool,
    spread: f64,
}

impl Record {
    fn groups(&self) -> BTreeMap<&Shape, Vec<(Variant, Vec<&Measured>)>> {
        let mut groups: BTreeMap<_, Vec<(Variant, Vec<&Measured>)>> = BTreeMap::new();
        for row in &self.rows {
            let group = groups.entry(&row.shape).or_default();
            match group.iter_mut().find(|(variant, _)| *variant == row.variant) {
                Some((_, rows)) => rows.push(row),
                None => group.push((row.variant, vec![row])),
            }
        }
        groups
    }

    /// Variants of each shape, with measured times and the predictions of `machine`.
    fn timed(&self, machine: &CostParameters) -> Vec<(&Shape, Vec<Timed>)> {
        let timed = |(variant, rows): (Variant, Vec<&Measured>)| {
            let mut times: Vec<f64> = rows.iter().map(|row| row.us).collect();
            times.sort_by(f64::total_cmp);
            let last = rows.last()?;
            Some(Timed {
                variant,
                us: times[times.len() / 2],
                predicted_us: last.predicted(machine)?,
                auto: rows.iter().any(|row| row.auto),
                spread: rows.iter().map(|row| row.spread).fold(1.0, f64::max),
            })
        };
        let of =
            |(shape, group): (_, Vec<_>)| (shape, group.into_iter().filter_map(timed).collect());
        self.groups().into_iter().map(of).collect()
    }

    /// Regret of each shape that has several variants: the chosen variant's time compared with the
    /// fastest one's.
    pub(super) fn regrets(&self, machine: &CostParameters) -> Vec<Regret> {
        let chosen = |(shape, group): (&Shape, Vec<Timed>)| {
            if group.len() < 2 {
                return None;
            }
            // Variants that need A in the heap are excluded, because `auto` never chooses them for
            // these plans.
            let any =
                group.iter().filter(|it| !matches!(it.variant, Variant::Pull | Variant::Staged));
            let chosen = any.min_by(|a, b| a.predicted_us.total_cmp(&b.predicted_us))?;
            let best = group.iter().min_by(|a, b| a.us.total_cmp(&b.us))?;
            let ruled = group.iter().find(|it| it.auto).map(|it| (it.us, it.spread));
            Some(Regret {
                shape: shape.clone(),
                chosen: (chosen.variant, chosen.us, chosen.spread),
                best: (best.variant, best.us),
                ruled,
            })
        };
        self.timed(machine).into_iter().filter_map(chosen).collect()
    }
}

/// Relative errors of the predicted times for these rows, sorted. Products on the tile core are left
/// out; they count only in the regret.
pub(crate) fn errors(rows: &[Measured], machine: &CostParameters) -> Vec<f64> {
    let counted = rows.iter().filter(|row| !row.is_tile_core());
    let errors = counted.filter_map(|row| Some((row.predicted(machine)? / row.us - 1.0).abs()));
    let mut errors: Vec<f64> = errors.collect();
    errors.sort_by(f64::total_cmp);
    errors
}

/// Variant that predictions choose for one shape, and the fastest variant.
#[derive(Debug)]
pub(super) struct Regret {
    pub(super) shape: Shape,
    /// Variant with the least predicted time, its measured time, and its highest sample divided by
    /// the lowest.
    pub(super) chosen: (Variant, f64, f64),
    pub(super) best: (Variant, f64),
    /// Time of the variant that `auto` chose when the record was made, and its spread (highest
    /// sample divided by the lowest); `None` if `auto` was not timed.
    pub(super) ruled: Option<(f64, f64)>,
}

impl Regret {
    pub(super) fn times(&self) -> f64 {
        self.chosen.1 / self.best.1
    }
}

/// Geometric mean and maximum of regrets; 1 if there are none.
pub(super) fn summary(regrets: impl IntoIterator<Item = f64>) -> (f64, f64) {
    let all: Vec<f64> = regrets.into_iter().collect();
    let mean = all.iter().map(|it| it.ln()).sum::<f64>() / all.len().max(1) as f64;
    (mean.exp(), all.iter().copied().fold(1.0, f64::max))
}

/// Quantile of `sorted`: the value below which the fraction `part` of the values lies.
pub(crate) fn quantile(sorted: &[f64], part: f64) -> f64 {
    let at = (sorted.len() as f64 * part) as usize;
    sorted.get(at.min(sorted.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

/// Prints prediction errors and regret for each group of rows. The machine is the built-in one, or
/// is fitted to the groups whose names begin with `fit`.
pub(crate) fn print(path: &Path, fit: Option<&str>) -> Result<()> {
    let all = records(path)?;
    let h200 = CostParameters::of(Device::named("h200")?);
    let machine = match fit {
        None => h200,
        Some(names) => {
            let wanted = |record: &&Record| names.split(',').any(|it| record.name.starts_with(it));
            let rows: Vec<_> = all.iter().filter(wanted).flat_map(|it| &it.rows).collect();
            if rows.is_empty() {
                let known: Vec<_> = all.iter().map(|record| record.name.as_str()).collect();
                return Err(usage("--fit", names, format!("commits of: {}", known.join("; "))));
            }
            let machine = fitted(&rows, &h200);
            say!("{}", toml::to_string(&machine)?)?;
            machine
        }
    };
    for record in &all {
        let (errors, regrets) = (errors(&record.rows, &machine), record.regrets(&machine));
        let (mean, worst) = summary(regrets.iter().map(Regret::times));
        say!(
            "{}: {} rows, error {:.1} % (median), {:.1} % (p90); {} shapes, regret {mean:.4} (mean), {worst:.3} (worst)",
            record.name,
            errors.len(),
            100.0 * quantile(&errors, 0.5),
            100.0 * quantile(&errors, 0.9),
            regrets.len(),
        )?;
        let mut by_variant: BTreeMap<_, Vec<f64>> = BTreeMap::new();
        for row in &record.rows {
            if let Some(us) = row.predicted(&machine) {
                by_variant.entry((&row.shape.0, row.variant)).or_default().push(us / row.us - 1.0);
            }
        }
        for ((op, variant), mut errors) in by_variant {
            errors.sort_by(f64::total_cmp);
            let [low, middle, high] = [0.0, 0.5, 1.0].map(|part| 100.0 * quantile(&errors, part));
            say!(
                "    {op} {variant}: {middle:+.1} % ({low:+.1} to {high:+.1}) of {}",
                errors.len()
            )?;
        }
        for regret in regrets.iter().filter(|regret| regret.times() > 1.01) {
            let Regret { shape: (op, [m, n, k], dtype, ..), chosen, best, ruled } = regret;
            let ruled = ruled.map(|(us, _)| format!(", then taken {us:.1} us")).unwrap_or_default();
            say!(
                "  {op} {m} x {n} x {k} {dtype}: {} {:.1} us, best {} {:.1} us{ruled}",
                chosen.0,
                chosen.1,
                best.0,
                best.1
            )?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str) -> Record {
        let path = crate::record::kept("h200.jsonl");
        let found = records(&path).expect("a record").into_iter().find(|it| it.name == name);
        found.unwrap_or_else(|| panic!("no record {name}"))
    }

    fn h200() -> CostParameters {
        CostParameters::of(Device::named("h200").expect("a device"))
    }

    #[test]
    fn what_is_fitted_to_two_gpus_chooses_among_four() {
        let (two, four) = (record("1e41d4f, 2 ranks"), record("5270d58, 4 ranks"));
        let rows: Vec<_> = two.rows.iter().collect();
        let machine = fitted(&rows, &h200());
        let error = quantile(&errors(&four.rows, &machine), 0.5);
        let (mean, worst) = summary(four.regrets(&machine).iter().map(Regret::times));
        assert!(error <= 0.10 && mean <= 1.02 && worst <= 1.10, "{error} {mean} {worst}");
    }

    #[test]
    fn a_shape_that_was_left_out_is_chosen_well() {
        let record = record("e64434f, 2 ranks");
        let start = fitted(&record.rows.iter().collect::<Vec<_>>(), &h200());
        let regret = |all: Regret| {
            let others: Vec<_> = record.rows.iter().filter(|row| row.shape != all.shape).collect();
            let machine = fitted(&others, &start);
            let again = record.regrets(&machine);
            let own = again.iter().find(|it| it.shape == all.shape);
            own.map_or(f64::INFINITY, Regret::times)
        };
        let (mean, worst) = summary(record.regrets(&start).into_iter().map(regret));
        assert!(mean <= 1.01 && worst <= 1.10, "{mean} {worst}");
    }

    /// Tests that predictions with the built-in machine parameters choose as well as the thresholds
    /// by which `auto` chose in earlier versions.
    #[test]
    fn predictions_choose_as_well_as_thresholds_did() {
        let record = record("e64434f, 2 ranks");
        let ratios = record.regrets(&h200()).into_iter().filter_map(|it| {
            let (ruled, spread) = it.ruled?;
            let ratio = it.chosen.1 / ruled;
            assert!(ratio <= spread.max(it.chosen.2), "{it:?}");
            Some(ratio)
        });
        let (mean, _) = summary(ratios);
        assert!(mean <= 1.005, "{mean}");
    }
}
