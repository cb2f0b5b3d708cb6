//! Which variant and which tile: a table first, then a rule. Both depend only on values that all
//! ranks have in common.

mod figures;
mod table;

use std::ops::Range;

use iris_heap::DType;
use iris_kernels::Library;
use iris_kernels::gemm::{Exchanging, Scattering};
use iris_kernels::gemm_config::{MESSAGE_THREADS, TileSize};

use crate::device::Device;
use crate::items;
use crate::kind::{Op, Variant, Why};
use crate::options::{Epilogue, Request, Shard, TileShape, WIDEST};
use crate::ranks::Ranks;
use crate::spec::{Form, Memory, Rule, Tiles, Whole};

/// Most items, of eight bytes, that one rank sends another in words that carry their data: 2 MiB. Of two
/// ranks such a message takes 16 MiB of the signal segment.
pub(crate) const LL_ITEMS: u32 = 1 << 18;

/// Most workgroups of such a message on a GPU.
pub(crate) const LL_GROUPS: u32 = 128;

/// Bytes of the signal segment that such words of an op take at most where nobody asked for them: an
/// eighth of what a heap has by default, and a quarter for rows that are normalised.
const LL_SIGNAL_BYTES: usize = 8 << 20;

/// The GPU whose figures choose for a device, if it is another: `H200` or `MI300X`.
pub(crate) fn figures_of(device: Device) -> Option<&'static str> {
    let figures = figures::of(device).filter(|figures| figures.stand_in_for(device));
    figures.map(|figures| figures.of)
}

/// The largest message from one rank to another that goes in words that carry their data, in bytes.
pub(crate) fn most_in_words(ranks: Ranks, request: &Request) -> usize {
    let world = match ranks.size {
        2 => 0,
        4 => 1,
        _ => return 0,
    };
    let Some(figures) = figures::of(ranks.device) else { return 0 };
    let row = figures.words.iter().find(|(of, _)| *of == request.op());
    let most = row.map_or(0, |(_, by_world)| by_world[world]);
    let times = if request.rms_norm.is_some() { figures.words_of_norms[world] } else { 1 };
    // Two slots of each source, and twice the bytes.
    times * most.min(LL_SIGNAL_BYTES / (4 * ranks.size))
}

/// Elements of a sum up to which its tiles have a vector for every other thread.
fn spread_sums(ranks: Ranks) -> usize {
    figures::of(ranks.device).map_or(0, |figures| figures.spread_sums)
}

/// Most workgroups of a message: an odd number on GPUs, as [`figures::Figures::message_groups`] says.
pub(crate) fn message_groups(ranks: Ranks) -> u32 {
    let odd = |multiprocessors: u32| (multiprocessors.max(1) - 1) | 1;
    let each = || odd(ranks.device.multiprocessors);
    figures::of(ranks.device)
        .map_or(u32::MAX, |figures| figures.message_groups.unwrap_or_else(each))
}

/// Number of tiles of a product from which on larger tiles are taken: half of the device's multiprocessors have one.
/// Tiles come in eights where M and N do, so that 64 are enough for 132 multiprocessors.
fn enough_tiles(device: Device) -> usize {
    (device.multiprocessors as usize / 2 / 8 * 8).max(1)
}

/// Figures by which the calls of a choice size their launches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizing {
    /// Most workgroups of a message.
    pub(crate) most_groups: u32,
    /// Threads of a workgroup for messages up to a size, the smallest first; larger ones have as many as kernels are
    /// built for. A size is a number of items of the LL protocol, or of bytes that are summed. None for other messages
    /// and for rows that are normalised, which a workgroup holds in as many threads as there are.
    threads: Option<&'static [(usize, u32)]>,
    /// Sizes of messages, in bytes, of which some workgroups only send, and how many eighths of them do.
    senders: Option<&'static (Range<usize>, u32)>,
}

impl Sizing {
    /// Figures of a form of this request.
    pub(crate) fn of(ranks: Ranks, request: &Request, form: &Form) -> Self {
        let figures = figures::of(ranks.device).filter(|_| request.rms_norm.is_none());
        // Few threads for few items, since a workgroup meets sooner, and its items are spread over more
        // multiprocessors.
        let threads = match form.memory {
            Memory::Pairs(_) => figures.map(|it| it.threads_of_words),
            Memory::AllTiles | Memory::OwnedAndResults | Memory::PartialParts => {
                figures.map(|it| it.threads_of_sums)
            }
            _ => None,
        };
        let measured = figures.filter(|_| ranks.size == 2);
        let senders = measured.and_then(|it| match form.memory {
            Memory::OwnedAndResults => Some(&it.senders_to_all),
            Memory::PartialParts => Some(&it.senders_to_owners),
            Memory::Parts => Some(&it.senders_of_parts),
            _ => None,
        });
        Sizing { most_groups: message_groups(ranks), threads, senders }
    }

    /// Threads of a workgroup of a message of this size; none for as many as its kernels are built for.
    pub(crate) fn threads(&self, size: usize) -> Option<u32> {
        let step = self.threads?.iter().find(|(most, _)| size <= *most);
        step.map(|&(_, threads)| threads)
    }

    /// Number of eighths of the workgroups that only send in a message of so many bytes; 0 if all send, and take or add
    /// up.
    pub(crate) fn sending_eighths(&self, bytes: usize) -> u32 {
        self.senders.filter(|(range, _)| range.contains(&bytes)).map_or(0, |&(_, eighths)| eighths)
    }
}

/// Bytes of the whole message, as it travels.
pub(crate) fn message_bytes(request: &Request, (m, n): (usize, usize)) -> usize {
    m.saturating_mul(n).saturating_mul(request.wire_dtype().size())
}

/// Results up to this many bytes are pushed to everybody rather than reduced by an owner: below it the
/// second hop costs more than the extra bytes.
fn one_shot_bytes(ranks: Ranks) -> usize {
    match (figures::of(ranks.device), ranks.size) {
        (None, 0..=2) => usize::MAX,
        (None, _) => 64 << 10,
        (Some(figures), 0..=2) => figures.one_shot_bytes_of_two,
        (Some(figures), _) => figures.one_shot_bytes,
    }
}

/// Messages of a root of so many bytes and more are passed on by those that get them.
fn relayed_bytes(ranks: Ranks) -> usize {
    match figures::of(ranks.device) {
        Some(figures) if ranks.size > 2 => figures.relayed_bytes,
        _ => usize::MAX,
    }
}

/// Whether the rule may choose differently for calls of different sizes.
pub(crate) fn varies(ranks: Ranks, request: &Request) -> bool {
    let row = request.row;
    let ruled = match row.rule {
        Rule::Only => false,
        Rule::Sum | Rule::Gather => true,
        Rule::Broadcast => relayed_bytes(ranks) < usize::MAX,
    };
    ruled
        || most_in_words(ranks, request) > 0
        || least_bytes(ranks, request, Variant::CopyEngine).is_some()
}

/// Sizes of calls at which the choice may change: powers of two, and the ends of the table's rows.
pub(crate) fn sizes(ranks: Ranks, request: &Request) -> Vec<usize> {
    let powers = (3..usize::BITS - 1).map(|bits| 1 << bits);
    powers.chain(table::ends(ranks, request)).collect()
}

/// The variant of a call of this size, and why.
pub(crate) fn variant(ranks: Ranks, request: &Request) -> (Variant, Why) {
    let row = request.row;
    let known = table::variant(ranks, request).and_then(|variant| row.form(variant));
    // Peers read A where it lies, which must be in the heap: a plan does not know where it will be.
    let known = known.filter(|form| !form.pulls && is_as_measured(ranks, request, form));
    match known.filter(|form| form.serves(request)) {
        Some(form) => (form.variant, Why::Measured),
        None => (ruled(ranks, request), Why::Ruled),
    }
}

/// What the rules say.
fn ruled(ranks: Ranks, request: &Request) -> Variant {
    let Request { row, m, n, .. } = *request;
    let cpu = ranks.device.backend.traits().host_threads;
    let bytes = m.saturating_mul(n).saturating_mul(request.wire_dtype().size());
    // On 2 x H200 the product of whole matrices and then the message took 0.35 to 0.95 of the time of
    // the fused kernels in each row of bench/cuda.toml (commit acbe146, 2026-11-21), an all-gather and then
    // the product 0.4 to 0.6 of what all_gather_matmul took (9665f85, 2026-11-22). On AMD's
    // GPUs nobody has measured. What is normalised are rows of a message, whoever has multiplied.
    let unfused = !cpu && ranks.size > 1 || request.rms_norm.is_some();
    if unfused && row.form(Variant::Unfused).is_some() {
        if let Some(variant) = in_words(ranks, request, Variant::UnfusedLl) {
            return variant;
        }
        for variant in [Variant::Epilogue, Variant::CopyEngine] {
            if by_size(ranks, request, variant) {
                return variant;
            }
        }
        return match row.form(Variant::UnfusedOneShot) {
            Some(form) if bytes <= one_shot_bytes(ranks) => form.variant,
            _ => Variant::Unfused,
        };
    }
    if let Some(variant) = in_words(ranks, request, Variant::Ll) {
        return variant;
    }
    match row.rule {
        Rule::Only => row.forms[0].variant,
        Rule::Broadcast if bytes < relayed_bytes(ranks) => Variant::Push,
        Rule::Broadcast => Variant::TwoShot,
        // On 4 x H200, 1 to 64 x 8192 x 3584 took 59 to 71 us by two_shot, 75 to 88 by one_shot,
        // which multiplies no less and pushes every tile to everybody (commit 4d18965, 2026-11-21).
        Rule::Sum if !cpu && ranks.size > 2 && row.op.multiplies() => Variant::TwoShot,
        Rule::Sum => {
            // Of two ranks it pushes no more than two_shot, and a fused product is multiplied as often.
            let always = ranks.size <= 2 && row.op.multiplies();
            let one_shot = always || bytes <= one_shot_bytes(ranks);
            if one_shot { Variant::OneShot } else { Variant::TwoShot }
        }
        // On 4 x H200 pull took 3 to 6 times as long, staged 2 to 3 times: a row of A crosses the
        // links once a tile of columns, or is multiplied in pieces (commit 4d18965, 2026-11-21).
        Rule::Gather => Variant::Baseline,
    }
}

/// What one rank must send another for a product with a message to be done in this way, in bytes: by copy
/// engines, or by a product that stores to others itself.
fn least_bytes(ranks: Ranks, request: &Request, variant: Variant) -> Option<usize> {
    let figures = figures::of(ranks.device)?;
    let sizes = match (variant, request.rms_norm) {
        (Variant::Epilogue, Some(_)) => figures.stored_of_norms,
        (Variant::Epilogue, None) => figures.stored,
        // Nobody has measured copies behind which rows are normalised.
        (_, Some(_)) => &[],
        (_, None) => figures.copied,
    };
    let (_, by_world) = sizes.iter().find(|(of, _)| *of == request.op())?;
    Some(by_world[usize::from(ranks.size > 2)])
}

/// Whether what one rank sends another is large enough for that, and the operands are what it takes.
fn by_size(ranks: Ranks, request: &Request, variant: Variant) -> bool {
    let form = request.row.form(variant).filter(|form| form.serves(request));
    let Some(form) = form else { return false };
    let Some(least) = least_bytes(ranks, request, variant) else { return false };
    let Message { m, n, .. } = Message::of(ranks, request, form);
    let bytes = m.saturating_mul(n).saturating_mul(request.dtype.size());
    let rows = request.shard == Shard::Rows;
    let takes = match variant {
        Variant::Epilogue => has_stores(ranks, request),
        // Columns that come are multiplied before all are there, or not sooner than without engines.
        _ => rows || has_stores(ranks, request),
    };
    bytes >= least && request.tile.is_none() && takes
}

/// Whether the device multiplies such operands by wgmma.
fn has_wgmma(ranks: Ranks, request: &Request) -> bool {
    ranks.device.has_wgmma() && matches!(request.dtype, DType::F16 | DType::BF16)
}

/// Whether a call is done as the rows of its table were measured. On GPUs nothing is asked for besides the product and
/// the message, and what stores to others does so. What is traced, counted or held up, and the number of workgroups,
/// are no part of the choice: whoever observes a call observes what is done without that.
fn is_as_measured(ranks: Ranks, request: &Request, form: &Form) -> bool {
    if ranks.device.backend.traits().host_threads {
        return true;
    }
    let Request { dtype, epilogue, library, rms_norm, tile, .. } = *request;
    let alike = request.output_dtype() == dtype && request.wire_dtype() == dtype;
    let plain = epilogue == Epilogue::None && rms_norm.is_none();
    let by_rule = library == Library::Auto && tile.is_none();
    alike && plain && by_rule && (!form.stores || has_stores(ranks, request))
}

/// Whether there is a product of whole matrices, of such operands, that waits for peers and stores to them.
fn has_stores(ranks: Ranks, request: &Request) -> bool {
    let Request { dtype, n, epilogue, library, .. } = *request;
    let alike = request.output_dtype() == dtype && request.wire_dtype() == dtype;
    has_wgmma(ranks, request)
        && alike
        && epilogue == Epilogue::None
        && n.is_multiple_of(8)
        && matches!(library, Library::Auto | Library::Ours)
}

/// This variant, if the operator has it and the call is small enough for words that carry their data.
fn in_words(ranks: Ranks, request: &Request, variant: Variant) -> Option<Variant> {
    let Request { row, m, n, .. } = *request;
    let form = row.form(variant).filter(|form| form.serves(request))?;
    let Memory::Pairs(collective) = form.memory else { return None };
    let items = items::of(ranks, request, collective, (m, n));
    let most = most_in_words(ranks, request);
    let fits = most > 0 && (items.most() as usize).saturating_mul(8) <= most;
    let fits = fits && items::are_rows_whole(request, items);
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
        && (ranks.size == 2 || request.library == Library::Ours)
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
        Some(threads) if all <= spread_sums(ranks) => threads / 2,
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
