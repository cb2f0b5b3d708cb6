//! Expected traffic of each variant, in bytes and signals, derived from the meaning of the op.

use iris_ops::{OpRequest as Request, Plan, TileShape, Variant};

use iris_kernels::schedule::packs;

use super::Case;
use crate::oracle::{Meaning, Product, Rows, split};

/// Numbers of bytes that one rank moves in one call, and of flags that it raises.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traffic {
    /// Number of bytes written to peers.
    pub pushed: u64,
    /// Number of bytes read from peers.
    pub pulled: u64,
    /// Number of signals and flags that this rank raises.
    pub flags: u64,
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.pushed += other.pushed;
        self.pulled += other.pulled;
        self.flags += other.flags;
    }
}

fn traffic(pushed: usize, pulled: usize, flags: usize) -> Traffic {
    Traffic { pushed: pushed as u64, pulled: pulled as u64, flags: flags as u64 }
}

/// Number of tiles of shape `tile` that a matrix of `rows` x `cols` is cut into.
fn tiles((rows, cols): (usize, usize), tile: TileShape) -> usize {
    rows.div_ceil(tile.m) * cols.div_ceil(tile.n)
}

/// Expected traffic of this rank in a call of `m` rows; zero for a barrier.
pub fn expected(case: &Case, plan: &Plan, m: usize) -> Traffic {
    let (rank, size) = (plan.topology().rank, plan.topology().size);
    let options = plan.request();
    let n = options.n;
    let (tile, variant) = (plan.at(m).tile, plan.at(m).variant);
    let peers = size - 1;
    if peers == 0 {
        return Traffic::default();
    }
    let wire = options.wire_dtype().size();
    let output = options.output_dtype().size();
    let meaning = Meaning::of(case.op);
    let task = case.task(plan.topology(), m);
    // Number of rows that this rank sends to each peer (`sent`), and the size of an element on the
    // wire (`bytes`).
    let sent = (0..size).filter(|&peer| peer != rank).map(|peer| task.sent(rank, peer));
    let bytes = if meaning.sums { wire } else { output };
    // Closure for tiles that are assigned round-robin to `owners` ranks (their owners). It returns
    // the number of tiles of owner number `first`, and the number of elements of these tiles.
    let in_turn = |first: usize, owners: usize| {
        let (mut own, mut elements) = (0, 0);
        let across = n.div_ceil(tile.n).max(1);
        for number in (first..tiles((m, n), tile)).step_by(owners) {
            let rows = (m - number / across * tile.m).min(tile.m);
            let cols = (n - number % across * tile.n).min(tile.n);
            own += 1;
            elements += rows * cols;
        }
        (own, elements)
    };
    // LL messages consist of items (8 bytes of data) or of packs (48 bytes of data). `words(count)`
    // is the number of bytes that `count` items or packs take with their flags. `counted(items)` is
    // the number of packs, or of items, in a message of `items` items.
    let packed = plan.has_packs_at(m);
    let words = |count: usize| if packed { 64 * count } else { 16 * count };
    let counted = |items: usize| if packed { packs(items as u32) as usize } else { items };
    match variant {
        _ if meaning.product == Product::Last => gathered(case, plan, m),
        // The LL protocol writes two words of 8 bytes per item (8 bytes of data), or four words of
        // 16 bytes per pack (48 bytes of data), and raises no signals.
        Variant::Ll | Variant::UnfusedLl => {
            let items = sent.map(|rows| counted((rows * n * bytes).div_ceil(8)));
            traffic(items.map(words).sum(), 0, 0)
        }
        // Each rank owns a part of the message. Ranks that contribute (in a broadcast the root
        // alone) send each part to its owner; each owner sends its finished part to all ranks that
        // lack it.
        Variant::TwoShotLl | Variant::UnfusedTwoShotLl => {
            let items = counted((m * n * bytes).div_ceil(8));
            let own = split(items, size, rank).len();
            let (others, lacking) = match meaning.sums || rank == options.root {
                true => (items - own, peers),
                false => (0, peers - 1),
            };
            traffic(words(others + own * lacking), 0, 0)
        }
        // Each rank owns some rows of the sum. Partial sums go to the owners of their rows; if
        // every rank needs all sums, the owners then send them to all ranks. Each rank also raises
        // one flag in its own memory.
        Variant::CopyEngine | Variant::Epilogue if meaning.sums => {
            let part = |rank| split(m, size, rank).len();
            let others = (0..size).filter(|&other| other != rank);
            let flags: usize = others.map(|other| tiles((part(other), n), tile)).sum();
            let (to_all, own) = if meaning.spreads() {
                (part(rank) * n * output * peers, tiles((part(rank), n), tile) * peers)
            } else {
                (0, 0)
            };
            traffic((m - part(rank)) * n * wire + to_all, 0, flags + own + 1)
        }
        // Each tile has an owner. Each rank sends its partial of the tile to the owner. Then the
        // owner sends the sum to all ranks or, in the variants with a lock or atomics, the other
        // ranks read it.
        Variant::TwoShot | Variant::Spinlock | Variant::Atomic | Variant::Unfused
            if meaning.sums && meaning.gets == Rows::All =>
        {
            let (own, elements) = in_turn(rank, size);
            let others = m * n - elements;
            if matches!(variant, Variant::TwoShot | Variant::Unfused) {
                let flags = tiles((m, n), tile) - own + own * peers;
                traffic(others * wire + elements * output * peers, 0, flags)
            } else {
                traffic(others * 4, others * 4, 0)
            }
        }
        // Tiles go from the root to the other ranks round-robin, starting with the rank after the
        // root; each of these ranks forwards its tiles to the remaining ranks.
        Variant::TwoShot if meaning.gives == Rows::Root => {
            let first = (rank + peers - options.root) % size;
            let (own, elements) = in_turn(first, peers);
            match rank == options.root {
                true => traffic(m * n * output, 0, tiles((m, n), tile)),
                false => traffic(elements * output * (peers - 1), 0, own * (peers - 1)),
            }
        }
        // Each peer gets the rows that it needs, with a signal per tile. With copy engines, or if a
        // GEMM sends its tiles itself, this rank also raises one flag in its own memory.
        _ => {
            let own = usize::from(matches!(variant, Variant::CopyEngine | Variant::Epilogue));
            sent.fold(traffic(0, 0, own), |mut all, rows| {
                all += traffic(rows * n * bytes, 0, tiles((rows, n), tile));
                all
            })
        }
    }
}

/// Expected traffic of this rank when A is gathered before a product.
fn gathered(case: &Case, plan: &Plan, m: usize) -> Traffic {
    let (rank, size) = (plan.topology().rank, plan.topology().size);
    let options = plan.request();
    let Request { n, k, .. } = *options;
    let (tile, variant) = (plan.at(m).tile, plan.at(m).variant);
    let (peers, bytes) = (size - 1, options.dtype.size());
    let task = case.task(plan.topology(), m);
    let shard = |rank: usize| task.shapes(rank)[0];
    let area = |(rows, cols): (usize, usize)| rows * cols;
    let remote = m * k - area(shard(rank));
    match variant {
        Variant::Baseline => traffic(area(shard(rank)) * bytes * peers, 0, 0),
        // Each peer gets a signal per tile of A. With copy engines, or if a GEMM sends its tiles
        // itself, this rank also raises one flag in its own memory.
        Variant::Unfused | Variant::CopyEngine | Variant::Epilogue => {
            let own = usize::from(matches!(variant, Variant::CopyEngine | Variant::Epilogue));
            let flags = tiles(shard(rank), tile) * peers + own;
            traffic(area(shard(rank)) * bytes * peers, 0, flags)
        }
        Variant::Pull => traffic(0, remote * bytes * n.div_ceil(tile.n), 0),
        _ => {
            let group = options.columns_per_flag(plan.device().backend).min(k.max(1));
            let units = |(rows, cols): (usize, usize)| rows.div_ceil(tile.m) * cols.div_ceil(group);
            let others = (0..size).filter(|&other| other != rank);
            traffic(0, remote * bytes, others.map(|other| units(shard(other))).sum())
        }
    }
}
