//! Rows of a record with the plans of their calls, to compare predicted with measured times.

use iris_ops::{CostParameters, Plan, Shard, TileShape, Topology, Variant};
use iris_testkit::suite::{Op, Options, plan};

use crate::record::line::Line;

/// Key of a measured call without its variant; calls with equal keys compute the same result.
pub(crate) type Shape = (String, [usize; 3], String, bool, bool);

/// Measured call of a record, and its plan.
#[derive(Debug)]
pub(crate) struct Measured {
    pub(super) shape: Shape,
    pub(super) variant: Variant,
    size: usize,
    pub(super) us: f64,
    /// Whether `auto` chose the variant of this call.
    pub(super) auto: bool,
    /// Spread of the samples: the highest divided by the lowest.
    pub(super) spread: f64,
    plan: Plan,
}

impl Measured {
    pub(crate) fn predicted(&self, machine: &CostParameters) -> Option<f64> {
        self.plan.predicted_us_on(machine, self.size)
    }

    /// Whether the product runs in the tile loop of the fused kernels (tile core), which a single
    /// rate describes badly.
    pub(super) fn is_tile_core(&self) -> bool {
        use Variant::*;
        self.plan.op().multiplies()
            && matches!(self.variant, OneShot | TwoShot | Push | Baseline | Pull | Staged)
    }
}

/// Measured call of `line`, a line of a benchmark; `None` if the line has no operator or no
/// variant.
pub(crate) fn of_line(line: serde_json::Value, ranks: Topology) -> Option<Measured> {
    measured(serde_json::from_value(line).ok()?, ranks.untuned())
}

/// Plans the call of the line `row`; `None` if its variant no longer exists, and for lists of tensors and
/// weighted parts, whose predicted times leave out what the parts cost.
pub(super) fn measured(row: Line, ranks: Topology) -> Option<Measured> {
    if row.has_parts() {
        return None;
    }
    let (op, variant) = (row.op.parse::<Op>().ok()?, row.variant.parse::<Variant>().ok()?);
    let columns = row.columns;
    let mut options =
        Options::new(row.m, row.n, row.k).backend(ranks.device.backend).uniform_shape(true);
    options.dtype = row.dtype.parse().ok()?;
    options.tile = row.tile.map(|[m, n]| TileShape { m, n });
    options.rms_norm = row.rms_norm.map(|it| it as f32);
    options.shard = if columns { Shard::Columns } else { Shard::Rows };
    let ranks = if row.packs { ranks } else { ranks.without_packs() };
    let name = if op.options().contains(&"variant") { variant.name() } else { "auto" };
    let plan = plan(op, name, ranks, &options).ok()?;
    let [low, high] = row.ratio_spread.unwrap_or([1.0; 2]);
    Some(Measured {
        shape: (row.op, [row.m, row.n, row.k], row.dtype, columns, row.rms_norm.is_some()),
        variant,
        size: row.m,
        us: row.us,
        auto: row.asked.as_deref() == Some("auto"),
        spread: high / low,
        plan,
    })
}

#[cfg(test)]
mod tests {
    use iris_heap::BackendKind;
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_and_weighted_parts_tell_nothing_of_a_plain_message() {
        let line = |name: &str, value: serde_json::Value| {
            let mut line = json!({
                "op": "all_gather", "variant": "ll", "dtype": "bf16", "m": 8, "n": 64, "k": 0,
                "ranks": 2, "us": 5.0,
            });
            line[name] = value;
            of_line(line, Topology::new(0, 2).on(BackendKind::Cuda))
        };
        assert!(line("asked", json!("auto")).is_some());
        assert!(line("list", json!([["i32", 8]])).is_none());
        assert!(line("combine", json!(8)).is_none());
    }
}
