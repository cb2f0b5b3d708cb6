//! Choice of the tile of a call: from a measured row if there is one, otherwise by rules.

use iris_kernels::gemm::{Exchanging, Scattering};
use iris_kernels::gemm_config::{MESSAGE_THREADS, TileSize};

use super::{
    GemmKind, Sizing, has_stores, has_wgmma, is_as_measured, message_bytes, message_groups, table,
    takes_part,
};
use crate::device::Device;
use crate::op_names::Variant;
use crate::op_row::{Form, GemmStage, Memory, Part, Tiles};
use crate::options::{Request, Shard, TileShape, WIDEST};
use crate::topology::Topology;

/// Smallest number of tiles for which a product uses larger tiles: enough for about half of the
/// multiprocessors. The number is rounded down to a multiple of 8, because M and N usually give a
/// multiple of 8 tiles. It is 64 for 132 multiprocessors.
fn enough_tiles(device: Device) -> usize {
    (device.multiprocessors as usize / 2 / 8 * 8).max(1)
}

/// Tile of the product before a message, if no GEMM library multiplies.
pub(crate) fn whole_tile(ranks: Topology, request: &Request) -> TileShape {
    tile(ranks, request, &Form::PRODUCT)
}

/// Tile of a call. Products need large tiles, so that packing their factors is worth the time.
/// Messages need as many tiles as the ranks have workgroups.
pub(crate) fn tile(ranks: Topology, request: &Request, form: &Form) -> TileShape {
    let Request { row, m, n, .. } = *request;
    // In an unfused variant, the tiles are those of the message. With one rank, there is no
    // message.
    let product = row.multiplies() && (!form.has_whole_gemm() || ranks.size == 1);
    if let Some(tile) = table::tile(ranks, request, form.variant)
        && is_as_measured(ranks, request, form)
    {
        return tile;
    }
    if form.stores && !product {
        // Number of rows that this rank multiplies.
        let own = m.div_ceil(ranks.size);
        let rows = if form.gemm == GemmStage::Rows { own } else { m };
        // A host runs all tiles at once, like a device with an unlimited number of multiprocessors.
        let host = ranks.device.backend.traits().host_threads;
        let multiprocessors = if host { u32::MAX } else { ranks.device.multiprocessors };
        let [m, n] = Scattering::signalled(rows, own, n, multiprocessors).map(|it| it as usize);
        return TileShape { m, n };
    }
    // Tile of a GEMM that does the all-reduce itself, without a separate kernel for the message.
    let exchanges = form.variant == Variant::UnfusedOneShot && has_stores(ranks, request);
    let exchanged = || Exchanging::tile(m, n, ranks.device.multiprocessors);
    if let Some([m, n]) = (exchanges && !product).then(exchanged).flatten()
        && takes_part(ranks, request, GemmKind::Exchanging)
    {
        return TileShape { m: m as usize, n: n as usize };
    }
    if form.is_copied() && !product {
        // A call is split into at most four parts if results are sent to all ranks or A is split by
        // columns, otherwise into at most two.
        let sends_back =
            row.c == Part::All && matches!(form.gemm, GemmStage::Partial | GemmStage::Rows);
        let most = if sends_back || request.shard == Shard::Columns { 4 } else { 2 };
        return copied_tile(Message::of(ranks, request, form), request.dtype.size(), (most, ranks));
    }
    if !ranks.device.backend.traits().host_threads {
        return match product {
            true => device_tile(ranks, request, enough_tiles(ranks.device)),
            false => device_message_tile(ranks, request, form),
        };
    }
    if !product {
        // A message of elements is contiguous, so its tiles may take any number of columns.
        let (m, n) = match form.gemm {
            GemmStage::Gathered => {
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

/// Tile of a message on a GPU. It has at least one vector per thread; in small sums, one for every
/// other thread. Each tile costs a signal, which waits until the stores before it have arrived. So
/// there are only as many tiles as the overlap of sending and receiving needs. Large messages have
/// more tiles, because adding begins when the first tiles arrive.
fn device_message_tile(ranks: Topology, request: &Request, form: &Form) -> TileShape {
    /// Numbers of elements: `VECTOR` in one vector, and at most `MOST` in a tile. `TILES` is the
    /// number of tiles wanted in a rank's part.
    const VECTOR: usize = 8;
    const MOST: usize = 64 << 10;
    const TILES: usize = 32;
    /// If tiles would have more than `ENOUGH` elements, the message is cut into more tiles: into
    /// `SUMMED` tiles over all ranks if it is summed, otherwise into four times as many. 4 x H100,
    /// `SUMMED` and twice as many tiles: all_reduce of 8 MiB 50.6 and 58.8 us, of 16 MiB 89.2 and
    /// 95.3, of 32 MiB 168 and 163; reduce_scatter of 16 MiB 62.5 and 64.0, of 32 MiB 104 and 108
    /// (2026-11-27).
    const ENOUGH: usize = 8 << 10;
    const SUMMED: usize = 256;
    let Message { m, n, all, parts } = Message::of(ranks, request, form);
    let few = all / parts / TILES;
    let sums = matches!(form.memory, Memory::OwnedAndResults | Memory::PartialParts);
    let many = if sums { all / SUMMED } else { few / 4 };
    // With more than two ranks, smaller tiles are faster: all_gather of 128 MiB with tiles of `MOST
    // / 2` and `MOST` takes 307 and 313 us on 4 x H100, 204 and 199 us on 2 x H100 (2026-11-27).
    let most = if form.memory == Memory::Parts && parts > 2 { MOST / 2 } else { MOST };
    let bytes = message_bytes(request, (request.m, request.n));
    let in_words = matches!(form.memory, Memory::Pairs(_));
    let threads = Sizing::of(ranks, request, form).threads(bytes).filter(|_| !in_words);
    let vectors = match threads {
        Some(threads) if all <= ranks.tuning().launches.spread_sums => threads / 2,
        threads => threads.unwrap_or(MESSAGE_THREADS),
    };
    let least = vectors as usize * VECTOR;
    let elements = few.min(many.max(ENOUGH)).clamp(least, most);
    let across = n.div_ceil(elements.min(WIDEST)).max(1);
    let n = n.div_ceil(across).max(1).next_multiple_of(8);
    let rows = (elements / n).clamp(1, m.max(1));
    // If some workgroups had a second tile, they would start it only after the first one. With
    // twice the number of rows per tile, every workgroup has at most one tile.
    let tiles = m.div_ceil(rows) * across;
    let groups = message_groups(ranks) as usize;
    let twice = form.sends_all && groups < tiles && tiles <= 2 * groups && 2 * rows * n <= MOST;
    TileShape { m: if twice { 2 * rows } else { rows }, n }
}

/// Part of a message that copy engines move at a time. Parts are large, because each part costs two
/// copies per peer and a launch, and a copy engine reaches its full rate only with megabytes. There
/// are several parts (at most `most`), so that the step after a part overlaps the copies of the
/// next part.
fn copied_tile(
    Message { m, n, .. }: Message,
    bytes: usize,
    (most, ranks): (usize, Topology),
) -> TileShape {
    /// Minimum number of bytes of a part: 8 MiB is fastest on two ranks (2 x H200: all_reduce of
    /// 2048 rows 244 us in two parts of 8 MiB, 264 in one, 278 in four; of 8192 rows 806 us in four
    /// parts of 16 MiB, 917 in one; reduce_scatter of 8192 rows 729 us in two, 744 in four;
    /// 2026-11-22).
    const ENOUGH: usize = 8 << 20;
    // With four ranks, where each rank copies to three peers, 16 MiB is faster (4 x H200:
    // all_reduce of 8192 rows 1021 us in two parts of 16 MiB, 1069 in four of 8; of 4096 rows 569
    // us in one part of 16 MiB, 589 in two).
    let enough = if ranks.size > 2 { 2 * ENOUGH } else { ENOUGH };
    let parts = (m.saturating_mul(n).saturating_mul(bytes) / enough).clamp(1, most);
    TileShape { m: m.div_ceil(parts).clamp(1, WIDEST), n: n.clamp(1, WIDEST) }
}

/// Matrix that a message sends tile by tile.
struct Message {
    /// Maximum numbers of rows and columns of a tile: those of the matrix or, if the matrix is
    /// split, of one rank's part.
    m: usize,
    n: usize,
    /// Number of elements of the whole matrix, and number of parts in which ranks send it.
    all: usize,
    parts: usize,
}

impl Message {
    /// Describes the matrix that a variant sends: A if A is gathered before a product, otherwise C.
    fn of(ranks: Topology, request: &Request, form: &Form) -> Self {
        let Request { row, m, n, k, shard, .. } = *request;
        let parts = if form.sends_all { 1 } else { ranks.size };
        let part = |all: usize| all.div_ceil(parts);
        let (cols, m, n) = match (form.gemm, shard) {
            (GemmStage::Gathered, Shard::Rows) => (k, part(m), k),
            (GemmStage::Gathered, Shard::Columns) => (k, m, part(k)),
            _ if row.tiles == Tiles::All && !form.is_copied() => (n, m, n),
            _ => (n, part(m), n),
        };
        Self { m, n, all: request.m.saturating_mul(cols), parts }
    }
}

/// Tile of a product on a GPU: the largest tile for which kernels are built and with which the
/// product still has `enough` tiles.
fn device_tile(ranks: Topology, request: &Request, enough: usize) -> TileShape {
    let Request { row, m, n, .. } = *request;
    let n = if row.n_decides() { n.max(1) } else { 4096 };
    // If rows are split, a tile must lie within one rank's part.
    let rows = if row.tiles == Tiles::All { m } else { m.div_ceil(ranks.size) };
    let rows = rows.max(1);
    let are_enough =
        |build: &&TileSize| m.div_ceil(build.m as usize) * n.div_ceil(build.n as usize) >= enough;
    let smallest = &TileSize::ALL[TileSize::ALL.len() - 1];
    // Tiles with few rows read memory faster, on devices that have wgmma for them (one_shot of 16 x
    // 8192 x 3584, 2 x H200: 27.6 us, 63.5 with tiles of 128 columns; 2026-11-22).
    let few = &TileSize::ALL[1];
    let flipped = has_wgmma(ranks, request) && rows <= few.m as usize && are_enough(&few);
    let build = match flipped {
        true => few,
        false => TileSize::ALL.iter().find(are_enough).unwrap_or(smallest),
    };
    let (m, wide) = (build.m as usize, build.n as usize);
    TileShape { m: m.min(rows.next_multiple_of(8)), n: wide.min(n.next_multiple_of(8)) }
}
