//! The tables: a file of rows that were measured for each architecture in `tuning/`, read once.

use std::collections::HashMap;
use std::sync::LazyLock;

use iris_heap::BackendKind;
use serde::Deserialize;

use crate::kind::{Op, Variant};
use crate::options::{Request, Shard, TileShape};
use crate::ranks::Ranks;

/// A row: the first that fits is taken.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    op: String,
    world: usize,
    dtype: String,
    m: [usize; 2],
    n: usize,
    k: Option<usize>,
    /// Whether A is split by columns.
    #[serde(default)]
    columns: bool,
    /// Whether it is of calls whose N and K are those of the row on all ranks, and told to be.
    #[serde(default)]
    even: bool,
    variant: Option<String>,
    tile: Option<[usize; 2]>,
    /// Where the row was measured: device, commit, date.
    #[allow(dead_code, reason = "kept with the data, for the reader")]
    provenance: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    #[serde(default)]
    row: Vec<Row>,
}

/// A row whose names were understood.
struct Known {
    op: Op,
    variant: Option<Variant>,
    row: Row,
}

/// The table of a backend, of the architecture that was measured: another one of the same backend takes its
/// rows for want of its own. A backend without a table has no rows.
fn text(backend: BackendKind) -> &'static str {
    match backend {
        BackendKind::Cpu => include_str!("../../tuning/cpu.toml"),
        BackendKind::Cuda => include_str!("../../tuning/sm90.toml"),
        BackendKind::Hip => include_str!("../../tuning/gfx942.toml"),
        _ => "",
    }
}

static TABLES: LazyLock<HashMap<BackendKind, Vec<Known>>> = LazyLock::new(|| {
    let rows = |backend| {
        let table = toml::from_str::<Table>(text(backend)).map(|table| table.row);
        table.unwrap_or_default().into_iter().filter_map(known).collect()
    };
    BackendKind::ALL.map(|backend| (backend, rows(backend))).into()
});

fn known(row: Row) -> Option<Known> {
    let variant = row.variant.as_deref().map(str::parse).transpose().ok()?;
    Some(Known { op: row.op.parse().ok()?, variant, row })
}

/// Rows for calls like this one, whatever their size.
fn like(ranks: Ranks, request: &Request) -> impl Iterator<Item = &'static Known> {
    let (op, dtype) = (request.op(), request.dtype.name());
    let (common, n_decides) = (request.row.common, request.row.n_decides());
    let Request { n, k, elements, shard, even, .. } = *request;
    TABLES.get(&ranks.device.backend).into_iter().flatten().filter(
        move |Known { op: of, row, .. }| {
            !elements
            && *of == op
            && row.world == ranks.size
            && row.dtype == dtype
            && row.columns == (shard == Shard::Columns)
            && (even || !row.even)
            // Where N or K is a rank's own, it may not decide: the ranks would choose differently.
            && (row.n == n || !n_decides && !row.even)
            && row.k.is_none_or(|of| of == k || !common.k && !row.even)
        },
    )
}

fn find(ranks: Ranks, request: &Request) -> Option<&'static Known> {
    like(ranks, request).find(|known| (known.row.m[0]..=known.row.m[1]).contains(&request.m))
}

/// The sizes at which rows begin and end.
pub(super) fn ends(ranks: Ranks, request: &Request) -> impl Iterator<Item = usize> {
    like(ranks, request).flat_map(|known| [known.row.m[0].saturating_sub(1), known.row.m[1]])
}

pub(super) fn variant(ranks: Ranks, request: &Request) -> Option<Variant> {
    find(ranks, request)?.variant
}

/// The tile of a call that is done in this way.
pub(super) fn tile(ranks: Ranks, request: &Request, variant: Variant) -> Option<TileShape> {
    let known =
        find(ranks, request).filter(|known| known.variant.is_none_or(|it| it == variant))?;
    known.row.tile.map(|[m, n]| TileShape { m, n })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;

    #[test]
    fn every_row_of_the_tables_is_understood() {
        for backend in BackendKind::ALL {
            let table: Table = toml::from_str(text(backend)).expect("the table parses");
            assert_eq!(table.row.len(), TABLES[&backend].len());
        }
        assert!(!TABLES[&BackendKind::Cpu].is_empty());
    }

    /// What was measured on one kind of device is not taken for another.
    #[test]
    fn rows_are_of_their_own_backend() {
        let rows = |backend| {
            let row = &TABLES[&BackendKind::Cpu][0].row;
            let options = crate::ops::matmul_all_reduce::Options::new(row.m[0], row.n, 512);
            let ranks = Ranks::new(0, row.world).on_device(Device::assumed(backend));
            assert_eq!((row.op.as_str(), row.dtype.as_str()), ("matmul_all_reduce", "f32"));
            like(ranks, &options.request).count()
        };
        assert!(rows(BackendKind::Cpu) > 0);
        assert_eq!((rows(BackendKind::Cuda), rows(BackendKind::Hip)), (0, 0));
    }
}
