//! Which variant and which tile: a table first, then a rule. Both depend only on values that all
//! ranks have in common.

use iris_heap::BackendKind;
use iris_kernels::rtc::{MESSAGE_LANES, TileBuild};

use crate::config::{Options, Ranks, TileShape};
use crate::{all_gather_matmul, matmul_all_reduce};

/// Results up to this many bytes are pushed to everybody rather than reduced by an owner: below it
/// the second hop costs more than the extra bytes.
const ONE_SHOT_BYTES: usize = 64 << 10;

/// The same on GPUs. On 4 x H200 an all-reduce of 256 KiB took 12.4 us by one_shot, and two_shot
/// takes more than that for a fourth of the bytes (commit 27eded4, 2026-11-21).
const ONE_SHOT_BYTES_GPU: usize = 256 << 10;

/// Most workgroups of a message on a GPU, which fill its links; odd, so that tiles whose owners take
/// turns fall to all workgroups alike.
pub(crate) const MESSAGE_GROUPS: u32 = 65;

/// The variant of an all-reduce.
pub(crate) fn all_reduce(
    op: &'static str,
    ranks: Ranks,
    options: &Options,
) -> matmul_all_reduce::Variant {
    use matmul_all_reduce::Variant;
    if let Some(variant) = table::variant(op, ranks, options).and_then(|name| name.parse().ok()) {
        return variant;
    }
    let bytes = options.m * options.n * options.wire_dtype().size();
    let cpu = options.backend == BackendKind::Cpu;
    if !cpu && ranks.size > 2 && op == "matmul_all_reduce" {
        // On 4 x H200, 1 to 64 x 8192 x 3584 took 59 to 71 us by two_shot, 75 to 88 by one_shot,
        // which multiplies no less and pushes every tile to everybody (commit 4d18965, 2026-11-21).
        return Variant::TwoShot;
    }
    let most = if cpu { ONE_SHOT_BYTES } else { ONE_SHOT_BYTES_GPU };
    if ranks.size <= 2 || bytes <= most { Variant::OneShot } else { Variant::TwoShot }
}

/// The variant of an all-gather in front of a product.
pub(crate) fn all_gather_matmul(ranks: Ranks, options: &Options) -> all_gather_matmul::Variant {
    use all_gather_matmul::Variant;
    table::variant("all_gather_matmul", ranks, options)
        .and_then(|name| name.parse().ok())
        .unwrap_or(match options.backend {
            BackendKind::Cpu => Variant::Pull,
            // On 4 x H200 pull took 3 to 6 times as long, staged 2 to 3 times: a row of A crosses
            // the links once a tile of columns, or is multiplied in pieces (commit 4d18965, 2026-11-21).
            _ => Variant::Baseline,
        })
}

/// The shape of a tile. A product wants large tiles, so that packing its factors is paid back; a
/// message wants as many tiles as there are workgroups anywhere.
pub(crate) fn tile(
    (op, variant): (&'static str, &'static str),
    ranks: Ranks,
    options: &Options,
) -> TileShape {
    if options.backend != BackendKind::Cpu {
        return match op.contains("matmul") {
            true => device_tile(op, ranks, options),
            false => device_message_tile((op, variant), ranks, options),
        };
    }
    if let Some(tile) = table::tile(op, ranks, options) {
        return tile;
    }
    let product = op.contains("matmul");
    if !product {
        let n = options.n.clamp(1, 4096);
        return TileShape { m: (16384 / n).clamp(1, options.m.max(1)), n };
    }
    let clamp = |wanted: usize, have: usize| wanted.min(have.max(1).next_multiple_of(8));
    // N of an all-gather in front of a product is a rank's own and must not count.
    let n = if op == "all_gather_matmul" { 256 } else { clamp(256, options.n) };
    TileShape { m: clamp(256, options.m.div_ceil(ranks.size)).max(8), n }
}

/// The shape of a tile of a message on a GPU: a vector for each lane at least, and at most as many
/// tiles as let the parts of the op overlap. Each tile costs a signal, and each signal waits until
/// the stores before it have arrived.
fn device_message_tile(
    (op, variant): (&'static str, &'static str),
    ranks: Ranks,
    options: &Options,
) -> TileShape {
    /// Elements of a tile, and tiles of what one rank sends or owns.
    const LEAST: usize = MESSAGE_LANES as usize * 8;
    const MOST: usize = 256 << 10;
    const TILES: usize = 32;
    /// Columns that a tile may have.
    const WIDEST: usize = 65536;
    let whole = matches!((op, variant), ("all_reduce", "one_shot") | ("broadcast", _));
    let parts = if whole { 1 } else { ranks.size };
    // Where rows are split, a tile lies in one rank's part.
    let rows = if op == "all_reduce" || whole { options.m } else { options.m.div_ceil(parts) };
    let all = options.m.saturating_mul(options.n);
    let elements = (all / parts / TILES).clamp(LEAST, MOST);
    let across = options.n.div_ceil(elements.min(WIDEST)).max(1);
    let n = options.n.div_ceil(across).max(1).next_multiple_of(8);
    TileShape { m: (elements / n).clamp(1, rows.max(1)), n }
}

/// The shape of a tile of a product on a GPU: the largest that the kernels are built for and that
/// still gives most multiprocessors one.
fn device_tile(op: &'static str, ranks: Ranks, options: &Options) -> TileShape {
    /// Tiles below which a smaller shape is taken.
    const ENOUGH: usize = 64;
    // N of an all-gather in front of a product is a rank's own and must not count.
    let n = if op == "all_gather_matmul" { 4096 } else { options.n.max(1) };
    // Where rows are split, a tile lies in one rank's part.
    let rows = match op {
        "matmul" | "matmul_all_reduce" => options.m,
        _ => options.m.div_ceil(ranks.size),
    };
    let rows = rows.max(1);
    let enough = |build: &&TileBuild| {
        options.m.div_ceil(build.m as usize) * n.div_ceil(build.n as usize) >= ENOUGH
    };
    let smallest = &TileBuild::ALL[TileBuild::ALL.len() - 1];
    let build = TileBuild::ALL.iter().find(enough).unwrap_or(smallest);
    let (m, wide) = (build.m as usize, build.n as usize);
    TileShape { m: m.min(rows.next_multiple_of(8)), n: wide.min(n.next_multiple_of(8)) }
}

/// The table: `tuning/cpu.toml`, read once.
mod table {
    use std::sync::LazyLock;

    use serde::Deserialize;

    use crate::config::{Options, Ranks, TileShape};

    /// A row: the first that fits is taken.
    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(super) struct Row {
        op: String,
        world: usize,
        dtype: String,
        m: [usize; 2],
        n: usize,
        k: Option<usize>,
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

    static ROWS: LazyLock<Vec<Row>> = LazyLock::new(|| {
        let text = include_str!("../tuning/cpu.toml");
        toml::from_str::<Table>(text).map(|table| table.row).unwrap_or_default()
    });

    /// Where K is a rank's own, it may not decide: the ranks would choose differently.
    fn k_in_common(op: &str) -> bool {
        matches!(op, "all_gather_matmul" | "matmul_all_gather")
    }

    fn find(op: &str, ranks: Ranks, options: &Options) -> Option<&'static Row> {
        if options.backend != iris_heap::BackendKind::Cpu {
            return None;
        }
        ROWS.iter().find(|row| {
            row.op == op
                && row.world == ranks.size
                && row.dtype == options.dtype.name()
                && (row.m[0]..=row.m[1]).contains(&options.m)
                && (op == "all_gather_matmul" || row.n == options.n)
                && row.k.is_none_or(|k| k == options.k || !k_in_common(op))
        })
    }

    pub(super) fn variant(op: &str, ranks: Ranks, options: &Options) -> Option<&'static str> {
        find(op, ranks, options)?.variant.as_deref()
    }

    pub(super) fn tile(op: &str, ranks: Ranks, options: &Options) -> Option<TileShape> {
        find(op, ranks, options)?.tile.map(|[m, n]| TileShape { m, n })
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn every_row_of_the_table_is_read_and_names_a_variant() {
            let text = include_str!("../tuning/cpu.toml");
            let table: Table = toml::from_str(text).expect("the table parses");
            assert_eq!(table.row.len(), ROWS.len());
            for row in &table.row {
                let Some(name) = &row.variant else { continue };
                let known = name.parse::<crate::matmul_all_reduce::Variant>().is_ok()
                    || name.parse::<crate::all_gather_matmul::Variant>().is_ok();
                assert!(known, "{row:?}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AllGather, AllReduce, all_gather};
    use iris_heap::DType;

    fn options(m: usize, n: usize) -> Options {
        Options::new(m, n, 0).dtype(DType::BF16).backend(BackendKind::Cuda)
    }

    #[test]
    fn a_message_on_a_gpu_takes_as_many_workgroups_as_it_has_work_for() {
        use matmul_all_reduce::Variant;
        let ranks = Ranks::new(0, 4);
        let tiles = |variant, m, n| {
            let plan = AllReduce::plan(ranks, &options(m, n), variant).unwrap();
            (plan.grid().tiles(), plan.work(m, 0))
        };
        assert_eq!(tiles(Variant::OneShot, 1, 4096), (1, 1));
        assert_eq!(tiles(Variant::OneShot, 8, 4096), (8, 8));
        assert_eq!(tiles(Variant::OneShot, 1, 5000), (2, 2));
        // Each rank owns 32.
        assert_eq!(tiles(Variant::TwoShot, 128, 4096), (128, MESSAGE_GROUPS));
        assert_eq!(tiles(Variant::TwoShot, 2048, 4096), (128, MESSAGE_GROUPS));
        assert_eq!(tiles(Variant::TwoShot, 1, 8 << 20), (128, MESSAGE_GROUPS));
        // Larger ones have tiles of half a MiB.
        assert_eq!(tiles(Variant::TwoShot, 16384, 4096).0, 256);
        let plan = AllGather::plan(ranks, &options(2048, 4096), all_gather::Variant::Auto).unwrap();
        assert_eq!((plan.split_grid().tiles(), plan.work(2048, 0)), (128, 32));
        // A call of fewer rows has less.
        assert_eq!((plan.work(64, 0), plan.work(0, 0)), (1, 1));
    }
}
