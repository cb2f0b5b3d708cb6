//! Rows of a tuning file: choices that were measured for single shapes.

use super::data::Row;
use crate::op_names::Variant;
use crate::options::{Request, Shard, TileShape};
use crate::topology::Topology;

/// Rows of the tuning table for calls of this operator, type and shape, for any M.
fn like(ranks: Topology, request: &Request) -> impl Iterator<Item = &'static Row> {
    let (op, dtype) = (request.op(), request.dtype.name());
    let (common, n_decides) = (request.row.common, request.row.n_decides());
    let Request { n, k, elements, shard, uniform_shape, .. } = *request;
    ranks.tuning().row.iter().filter(move |row| {
        !elements
            && row.op == op
            && row.world == ranks.size
            && row.dtype == dtype
            && row.columns == (shard == Shard::Columns)
            && (uniform_shape || !row.uniform_shape)
            // N or K must not influence the choice if it may differ between ranks, because ranks
            // would then choose differently.
            && (row.n == n || !n_decides && !row.uniform_shape)
            && row.k.is_none_or(|of| of == k || !common.k && !row.uniform_shape)
    })
}

fn find(ranks: Topology, request: &Request) -> Option<&'static Row> {
    like(ranks, request).find(|known| (known.m[0]..=known.m[1]).contains(&request.m))
}

/// Sizes of calls at which a table row for the operator, type and shape of `request` begins or
/// ends.
pub(super) fn ends(ranks: Topology, request: &Request) -> impl Iterator<Item = usize> {
    like(ranks, request).flat_map(|known| [known.m[0].saturating_sub(1), known.m[1]])
}

/// Whether the table row that applies to this call comes from this machine's own file.
pub(super) fn is_own(ranks: Topology, request: &Request) -> bool {
    let own = &ranks.tuning().row[..ranks.tuning().own_rows];
    find(ranks, request).is_some_and(|found| own.iter().any(|row| std::ptr::eq(row, found)))
}

pub(super) fn variant(ranks: Topology, request: &Request) -> Option<Variant> {
    find(ranks, request)?.variant
}

/// Tile of a call by this variant according to the table; `None` if no row for the call has a tile.
pub(super) fn tile(ranks: Topology, request: &Request, variant: Variant) -> Option<TileShape> {
    let known =
        find(ranks, request).filter(|known| known.variant.is_none_or(|it| it == variant))?;
    known.tile.map(|[m, n]| TileShape { m, n })
}

#[cfg(test)]
mod tests {
    use iris_heap::{BackendKind, DType};

    use super::super::data::Tuning;
    use super::*;
    use crate::device::Device;
    use crate::op_names::Op;

    #[test]
    fn rows_name_types_that_there_are() {
        for backend in BackendKind::ALL {
            for row in &Tuning::of(Device::assumed(backend)).row {
                assert!(row.dtype.parse::<DType>().is_ok(), "{row:?}");
            }
        }
    }

    /// Tests that measurements of one kind of device are not used for another kind.
    #[test]
    fn rows_are_of_their_own_backend() {
        let rows = |backend| {
            let row = &Tuning::of(Device::host()).row[0];
            let options = crate::ops::matmul_all_reduce::Options::new(row.m[0], row.n, 512);
            let ranks = Topology::new(0, row.world).on_device(Device::assumed(backend));
            assert_eq!((row.op, row.dtype.as_str()), (Op::MatmulAllReduce, "f32"));
            like(ranks, &options.request).count()
        };
        assert!(rows(BackendKind::Cpu) > 0);
        assert_eq!((rows(BackendKind::Cuda), rows(BackendKind::Hip)), (0, 0));
    }
}
