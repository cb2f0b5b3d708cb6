//! The shape of a tile: a measured row first, then a rule.

use iris_kernels::gemm::{Exchanging, Scattering};
use iris_kernels::gemm_config::{MESSAGE_THREADS, TileSize};

use super::{
    GemmKind, Sizing, has_stores, has_wgmma, is_as_measured, message_bytes, message_groups, table,
    takes_part,
};
use crate::device::Device;
use crate::kind::{Op, Variant};
use crate::options::{Request, Shard, TileShape, WIDEST};
use crate::ranks::Ranks;
use crate::spec::{Form, Memory, Tiles, Whole};

/// Number of tiles of a product from which on larger tiles are taken: half of the device's multiprocessors have one.
/// Tiles come in eights where M and N do, so that 64 are enough for 132 multiprocessors.
fn enough_tiles(device: Device) -> usize {
    (device.multiprocessors as usize / 2 / 8 * 8).max(1)
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
    let product = row.multiplies() && (!form.is_unfused() || ranks.size == 1);
    if let Some(tile) = table::tile(ranks, request, form.variant)
        && is_as_measured(ranks, request, form)
    {
        return tile;
    }
    if form.stores && !product {
        // Of what a rank multiplies.
        let rows = if form.whole == Whole::Rows { m.div_ceil(ranks.size) } else { m };
        // On a host all tiles are one wave: its cores have no others beside them.
        let host = ranks.device.backend.traits().host_threads;
        let multiprocessors = if host { u32::MAX } else { ranks.device.multiprocessors };
        let [m, n] = Scattering::signalled(rows, n, multiprocessors).map(|it| it as usize);
        return TileShape { m, n };
    }
    // Those of a product that does the message itself.
    let exchanges = form.variant == Variant::UnfusedOneShot && has_stores(ranks, request);
    let exchanged = || Exchanging::tile(m, n, ranks.device.multiprocessors);
    if let Some([m, n]) = (exchanges && !product).then(exchanged).flatten()
        && takes_part(ranks, request, GemmKind::Exchanging)
    {
        return TileShape { m: m as usize, n: n as usize };
    }
    if form.is_copied() && !product {
        let most = match (request.op(), request.shard) {
            (Op::MatmulAllReduce | Op::MatmulAllGather, _) | (_, Shard::Columns) => 4,
            _ => 2,
        };
        return copied_tile(Message::of(ranks, request, form), request.dtype.size(), (most, ranks));
    }
    if !ranks.device.backend.traits().host_threads {
        return match product {
            true => device_tile(ranks, request, enough_tiles(ranks.device)),
            false => device_message_tile(ranks, request, form),
        };
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

/// The shape of a tile of a message on a GPU: a vector for each thread at least, of small sums for every
/// other, and at most as many tiles as let the parts of the op overlap. Each tile costs a signal, and each
/// signal waits until the stores before it have arrived; but sums begin when the first tiles are there, so
/// that large messages have more of them.
fn device_message_tile(ranks: Ranks, request: &Request, form: &Form) -> TileShape {
    /// Elements of a vector, of a tile, and tiles of what one rank sends or owns.
    const VECTOR: usize = 8;
    const MOST: usize = 64 << 10;
    const TILES: usize = 32;
    /// Elements of a tile from which on there are four times as many.
    const ENOUGH: usize = 8 << 10;
    let Message { m, n, all, parts } = Message::of(ranks, request, form);
    let few = all / parts / TILES;
    let bytes = message_bytes(request, (request.m, request.n));
    let in_words = matches!(form.memory, Memory::Pairs(_));
    let threads = Sizing::of(ranks, request, form).threads(bytes).filter(|_| !in_words);
    let vectors = match threads {
        Some(threads) if all <= ranks.tuning().launches.spread_sums => threads / 2,
        threads => threads.unwrap_or(MESSAGE_THREADS),
    };
    let least = vectors as usize * VECTOR;
    let elements = few.min((few / 4).max(ENOUGH)).clamp(least, MOST);
    let across = n.div_ceil(elements.min(WIDEST)).max(1);
    let n = n.div_ceil(across).max(1).next_multiple_of(8);
    let rows = (elements / n).clamp(1, m.max(1));
    // A second tile of some workgroups is not begun before the first is over: then all have one of twice the rows.
    let tiles = m.div_ceil(rows) * across;
    let groups = message_groups(ranks) as usize;
    let twice = form.sends_all && groups < tiles && tiles <= 2 * groups && 2 * rows * n <= MOST;
    TileShape { m: if twice { 2 * rows } else { rows }, n }
}

/// A part of the rows that a copy engine moves: few, since each costs two copies a peer and a launch, and
/// an engine takes megabytes to reach its rate; but some, `most` at most, so that what stands behind one
/// begins while the others are on their way.
fn copied_tile(
    Message { m, n, .. }: Message,
    bytes: usize,
    (most, ranks): (usize, Ranks),
) -> TileShape {
    /// Bytes of a part. On 2 x H200 (2026-11-22) an all-reduce of 2048 rows took 244 us in two parts of 8
    /// MiB, 264 in one and 278 in four; of 8192 rows 806 in four of 16 MiB, 917 in one; a reduce-scatter of
    /// 8192 rows 729 in two and 744 in four.
    const ENOUGH: usize = 8 << 20;
    // On four, of which each copies to three, an all-reduce of 8192 rows took 1021 us in two of 16 MiB, 1069
    // in four of 8; of 4096 rows 569 in one of 16 MiB, 589 in two.
    let enough = if ranks.size > 2 { 2 * ENOUGH } else { ENOUGH };
    let parts = (m.saturating_mul(n).saturating_mul(bytes) / enough).clamp(1, most);
    TileShape { m: m.div_ceil(parts).clamp(1, WIDEST), n: n.clamp(1, WIDEST) }
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
            _ if row.tiles == Tiles::Whole && !form.is_copied() => (n, m, n),
            _ => (n, part(m), n),
        };
        Self { m, n, all: request.m.saturating_mul(cols), parts }
    }
}

/// The shape of a tile of a product on a GPU: the largest that the kernels are built for and that
/// still makes `enough` tiles.
fn device_tile(ranks: Ranks, request: &Request, enough: usize) -> TileShape {
    let Request { row, m, n, .. } = *request;
    let n = if row.n_decides() { n.max(1) } else { 4096 };
    // Where rows are split, a tile lies in one rank's part.
    let rows = if row.tiles == Tiles::Whole { m } else { m.div_ceil(ranks.size) };
    let rows = rows.max(1);
    let are_enough =
        |build: &&TileSize| m.div_ceil(build.m as usize) * n.div_ceil(build.n as usize) >= enough;
    let smallest = &TileSize::ALL[TileSize::ALL.len() - 1];
    // Those of few rows read memory faster, where there are such: on 2 x H200 one_shot of 16 x 8192 x 3584 took
    // 27.6 us with them, 63.5 with tiles of 128 columns (2026-11-22).
    let few = &TileSize::ALL[1];
    let flipped = has_wgmma(ranks, request) && rows <= few.m as usize && are_enough(&few);
    let build = match flipped {
        true => few,
        false => TileSize::ALL.iter().find(are_enough).unwrap_or(smallest),
    };
    let (m, wide) = (build.m as usize, build.n as usize);
    TileShape { m: m.min(rows.next_multiple_of(8)), n: wide.min(n.next_multiple_of(8)) }
}
