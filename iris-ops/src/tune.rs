//! Which variant and which tile: a table first, then a rule. Both depend only on values that all
//! ranks have in common.

use iris_kernels::gemm_config::{MESSAGE_THREADS, TileSize};

use crate::kind::{Op, Variant};
use crate::options::{Ranks, Request, Shard, TileShape};
use crate::plan::words;
use crate::spec::{Form, Memory, Rule, Tiles, Whole};

/// Results up to this many bytes are pushed to everybody rather than reduced by an owner: below it
/// the second hop costs more than the extra bytes.
const ONE_SHOT_BYTES: usize = 64 << 10;

/// The same on GPUs. On 4 x H200 an all-reduce of 1 MiB took 19.2 us by one_shot, 20.1 by two_shot; of 4
/// MiB 47.1 and 32.5; behind a product 39.6 and 40.0 for 1 MiB, 50.7 and 44.8 for 2 MiB (commit
/// 5270d58, 2026-11-22).
const ONE_SHOT_BYTES_GPU: usize = 1 << 20;

/// The same of two ranks, of which each has one peer: one_shot sends no byte twice. On 2 x H200 it took
/// 21.9 us for 4 MiB, two_shot 25.4; 66.5 and 65.1 for 16 MiB, 430 and 397 for 128 MiB; behind a product,
/// 76.2 and 79.4 for 8 MiB, 287 and 274 for 32 MiB (commit 780ce29, 2026-11-22).
const ONE_SHOT_BYTES_OF_TWO: usize = 8 << 20;

/// Most workgroups of a message on a GPU, which fill its links; odd, so that tiles whose owners take
/// turns fall to all workgroups alike. On 2 x H200 a reduce-scatter of 128 MiB took 241 us on 131
/// workgroups and 289 on 65, an all-gather 202 and 215 with larger tiles (2026-11-22).
pub(crate) const MESSAGE_GROUPS: u32 = 131;

/// Most items, of eight bytes, that one rank sends another in words that carry their data: 1 MiB. Of
/// four ranks such a message takes 16 MiB of the signal segment.
pub(crate) const LL_ITEMS: u32 = 1 << 17;

/// Most workgroups of such a message on a GPU.
pub(crate) const LL_GROUPS: u32 = 128;

/// Messages of up to so many bytes from one rank to another go in such words on a GPU, by operator, in a
/// world of two ranks and in one of four; in others nobody has measured them. Where they are the
/// quickest, by `iris bench --backend cuda`, write the largest size here, with device, commit and date.
///
/// On 2 x H200 (commit 780ce29, 2026-11-22) they were the quickest of ours at all sizes from 8 KiB to 1 MiB
/// of the whole message: an all_reduce took 5.3 to 12.2 us where `one_shot` took 8.8 to 11.8 and NCCL 6.9
/// to 14.1; behind a product 5 us less than `one_shot` for 16 and 256 KiB, 1 us for 1 MiB. On 4 x H200
/// (5270d58) an all_reduce of 256 KiB took 10.8 us by them and 12.0 by `one_shot`, of 1 MiB 27.7 and 19.2.
const LL_BYTES_GPU: [(Op, [usize; 2]); 6] = [
    (Op::MatmulAllReduce, [1 << 20, 256 << 10]),
    (Op::AllReduce, [1 << 20, 256 << 10]),
    (Op::AllGather, [512 << 10, 256 << 10]),
    (Op::ReduceScatter, [512 << 10, 256 << 10]),
    (Op::AllToAll, [512 << 10, 256 << 10]),
    (Op::Broadcast, [1 << 20, 256 << 10]),
];

/// Bytes of the signal segment that such words of an op take at most where nobody asked for them: an
/// eighth of what a heap has by default.
const LL_SIGNAL_BYTES: usize = 8 << 20;

/// The largest message from one rank to another that goes in words that carry their data, in bytes.
pub(crate) fn most_in_words(ranks: Ranks, op: Op) -> usize {
    let world = match ranks.size {
        _ if ranks.backend.traits().host_threads => return 0,
        2 => 0,
        4 => 1,
        _ => return 0,
    };
    let row = LL_BYTES_GPU.iter().find(|(of, _)| *of == op);
    let most = row.map_or(0, |(_, by_world)| by_world[world]);
    // Two slots of each source, and twice the bytes.
    most.min(LL_SIGNAL_BYTES / (4 * ranks.size))
}

/// Sizes of calls at which the choice may change: powers of two, and the ends of the table's rows.
pub(crate) fn sizes(ranks: Ranks, request: &Request) -> Vec<usize> {
    let powers = (3..usize::BITS - 1).map(|bits| 1 << bits);
    powers.chain(table::ends(ranks, request)).collect()
}

/// The variant of a call of this size.
pub(crate) fn variant(ranks: Ranks, request: &Request) -> Variant {
    let Request { row, m, n, .. } = *request;
    let known = table::variant(ranks, request);
    if let Some(form) = known.and_then(|variant| row.form(variant)) {
        return form.variant;
    }
    let cpu = ranks.backend.traits().host_threads;
    // On 2 x H200 the product of whole matrices and then the message took 0.35 to 0.95 of the time of
    // the fused kernels in each row of bench/cuda.toml (commit acbe146, 2026-11-21), an all-gather and then
    // the product 0.4 to 0.6 of what all_gather_matmul took (9665f85, 2026-11-22). What is traced,
    // counted or held up, or told its workgroups, are the fused kernels.
    if !cpu && ranks.size > 1 && request.is_plain() && row.form(Variant::Unfused).is_some() {
        if let Some(variant) = in_words(ranks, request, Variant::UnfusedLl) {
            return variant;
        }
        let bytes = m.saturating_mul(n).saturating_mul(request.wire_dtype().size());
        let most = if ranks.size == 2 { ONE_SHOT_BYTES_OF_TWO } else { ONE_SHOT_BYTES_GPU };
        return match row.form(Variant::UnfusedOneShot) {
            Some(form) if bytes <= most => form.variant,
            _ => Variant::Unfused,
        };
    }
    if let Some(variant) = in_words(ranks, request, Variant::Ll) {
        return variant;
    }
    match row.rule {
        Rule::Only => row.forms[0].variant,
        // On 4 x H200, 1 to 64 x 8192 x 3584 took 59 to 71 us by two_shot, 75 to 88 by one_shot,
        // which multiplies no less and pushes every tile to everybody (commit 4d18965, 2026-11-21).
        Rule::Sum if !cpu && ranks.size > 2 && row.op.multiplies() => Variant::TwoShot,
        Rule::Sum => {
            let bytes = m.saturating_mul(n).saturating_mul(request.wire_dtype().size());
            let most = match (cpu, ranks.size) {
                (true, 0..=2) => usize::MAX,
                (true, _) => ONE_SHOT_BYTES,
                // It pushes no more than two_shot, and a fused product is multiplied as often.
                (false, 0..=2) if row.op.multiplies() => usize::MAX,
                (false, 0..=2) => ONE_SHOT_BYTES_OF_TWO,
                (false, _) => ONE_SHOT_BYTES_GPU,
            };
            if bytes <= most { Variant::OneShot } else { Variant::TwoShot }
        }
        Rule::Gather if cpu => Variant::Pull,
        // On 4 x H200 pull took 3 to 6 times as long, staged 2 to 3 times: a row of A crosses the
        // links once a tile of columns, or is multiplied in pieces (commit 4d18965, 2026-11-21).
        Rule::Gather => Variant::Baseline,
    }
}

/// This variant, if the operator has it and the call is small enough for words that carry their data.
fn in_words(ranks: Ranks, request: &Request, variant: Variant) -> Option<Variant> {
    let Request { row, m, n, .. } = *request;
    let Memory::Pairs(collective) = row.form(variant)?.memory else { return None };
    let items = words::items(ranks, request, collective, (m, n));
    let most = most_in_words(ranks, row.op);
    let fits = most > 0 && (items.most() as usize).saturating_mul(8) <= most;
    (fits && request.tile.is_none()).then_some(variant)
}

/// The shape of a tile of a product ahead of a message, for calls that no library does.
pub(crate) fn whole_tile(ranks: Ranks, request: &Request) -> TileShape {
    tile(ranks, request, &crate::ops::matmul::ROW.forms[0])
}

/// The shape of a tile. A product wants large tiles, so that packing its factors is paid back; a
/// message wants as many tiles as there are workgroups anywhere.
pub(crate) fn tile(ranks: Ranks, request: &Request, form: &Form) -> TileShape {
    let Request { row, m, n, .. } = *request;
    // Of what is unfused the message has tiles; alone there is none.
    let product = row.op.multiplies() && (!form.is_unfused() || ranks.size == 1);
    if !ranks.backend.traits().host_threads {
        return match product {
            true => device_tile(ranks, request),
            false => device_message_tile(ranks, request, form),
        };
    }
    let unfused = product != row.op.multiplies();
    if !unfused && let Some(tile) = table::tile(ranks, request) {
        return tile;
    }
    if !product {
        // Elements lie one behind the other, however many there are.
        let (m, n) = match form.whole {
            Whole::Gathered => {
                let Message { m, n, .. } = Message::of(ranks, request, form);
                (m, n)
            }
            _ => (m, n),
        };
        let n = n.clamp(1, if request.elements { 16384 } else { 4096 });
        return TileShape { m: (16384 / n).clamp(1, m.max(1)), n };
    }
    let clamp = |wanted: usize, have: usize| wanted.min(have.max(1).next_multiple_of(8));
    let n = if row.n_decides() { clamp(256, n) } else { 256 };
    TileShape { m: clamp(256, m.div_ceil(ranks.size)).max(8), n }
}

/// The shape of a tile of a message on a GPU: a vector for each lane at least, and at most as many
/// tiles as let the parts of the op overlap. Each tile costs a signal, and each signal waits until
/// the stores before it have arrived; but sums begin when the first tiles are there, so that large
/// messages have more of them.
fn device_message_tile(ranks: Ranks, request: &Request, form: &Form) -> TileShape {
    /// Elements of a tile, and tiles of what one rank sends or owns.
    const LEAST: usize = MESSAGE_THREADS as usize * 8;
    const MOST: usize = 64 << 10;
    const TILES: usize = 32;
    /// Elements of a tile from which on there are four times as many.
    const ENOUGH: usize = 8 << 10;
    /// Columns that a tile may have.
    const WIDEST: usize = 65536;
    let Message { m, n, all, parts } = Message::of(ranks, request, form);
    let few = all / parts / TILES;
    let elements = few.min((few / 4).max(ENOUGH)).clamp(LEAST, MOST);
    let across = n.div_ceil(elements.min(WIDEST)).max(1);
    let n = n.div_ceil(across).max(1).next_multiple_of(8);
    TileShape { m: (elements / n).clamp(1, m.max(1)), n }
}

/// What a tile of a message is a tile of.
struct Message {
    /// Rows and columns that a tile may have: where they are split, those of one rank's part.
    m: usize,
    n: usize,
    /// Elements of the whole, and in how many parts ranks send them.
    all: usize,
    parts: usize,
}

impl Message {
    /// C, or the A that is gathered ahead of a product.
    fn of(ranks: Ranks, request: &Request, form: &Form) -> Self {
        let Request { row, m, n, k, shard, .. } = *request;
        let parts = if form.sends_all { 1 } else { ranks.size };
        let part = |all: usize| all.div_ceil(parts);
        let (cols, m, n) = match (form.whole, shard) {
            (Whole::Gathered, Shard::Rows) => (k, part(m), k),
            (Whole::Gathered, Shard::Columns) => (k, m, part(k)),
            _ if row.tiles == Tiles::Whole => (n, m, n),
            _ => (n, part(m), n),
        };
        Self { m, n, all: request.m.saturating_mul(cols), parts }
    }
}

/// The shape of a tile of a product on a GPU: the largest that the kernels are built for and that
/// still gives most multiprocessors one.
fn device_tile(ranks: Ranks, request: &Request) -> TileShape {
    /// Tiles below which a smaller shape is taken.
    const ENOUGH: usize = 64;
    let Request { row, m, n, .. } = *request;
    let n = if row.n_decides() { n.max(1) } else { 4096 };
    // Where rows are split, a tile lies in one rank's part.
    let rows = if row.tiles == Tiles::Whole { m } else { m.div_ceil(ranks.size) };
    let rows = rows.max(1);
    let enough =
        |build: &&TileSize| m.div_ceil(build.m as usize) * n.div_ceil(build.n as usize) >= ENOUGH;
    let smallest = &TileSize::ALL[TileSize::ALL.len() - 1];
    let build = TileSize::ALL.iter().find(enough).unwrap_or(smallest);
    let (m, wide) = (build.m as usize, build.n as usize);
    TileShape { m: m.min(rows.next_multiple_of(8)), n: wide.min(n.next_multiple_of(8)) }
}

/// The table: `tuning/cpu.toml`, read once.
mod table {
    use std::sync::LazyLock;

    use serde::Deserialize;

    use crate::kind::{Op, Variant};
    use crate::options::{Ranks, Request, TileShape};

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

    static ROWS: LazyLock<Vec<Known>> = LazyLock::new(|| {
        let text = include_str!("../tuning/cpu.toml");
        let rows = toml::from_str::<Table>(text).map(|table| table.row).unwrap_or_default();
        rows.into_iter().filter_map(known).collect()
    });

    fn known(row: Row) -> Option<Known> {
        let variant = row.variant.as_deref().map(str::parse).transpose().ok()?;
        Some(Known { op: row.op.parse().ok()?, variant, row })
    }

    /// Rows for calls like this one, whatever their size.
    fn like(ranks: Ranks, request: &Request) -> impl Iterator<Item = &'static Known> {
        let (op, dtype) = (request.op(), request.dtype.name());
        let (common, n_decides) = (request.row.common, request.row.n_decides());
        let Request { n, k, elements, .. } = *request;
        let cpu = ranks.backend.traits().host_threads;
        ROWS.iter().filter(move |Known { op: of, row, .. }| {
            cpu && !elements
                && *of == op
                && row.world == ranks.size
                && row.dtype == dtype
                && (!n_decides || row.n == n)
                // Where K is a rank's own, it may not decide: the ranks would choose differently.
                && row.k.is_none_or(|of| of == k || !common.k)
        })
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

    pub(super) fn tile(ranks: Ranks, request: &Request) -> Option<TileShape> {
        find(ranks, request)?.row.tile.map(|[m, n]| TileShape { m, n })
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn every_row_of_the_table_is_understood() {
            let text = include_str!("../tuning/cpu.toml");
            let table: Table = toml::from_str(text).expect("the table parses");
            assert_eq!(table.row.len(), ROWS.len());
            assert!(!ROWS.is_empty());
        }
    }
}
