//! What each variant moves, by its name alone.

use iris_ops::{Plan, Request, Shard, TileShape, Variant};

use super::{Case, Op};
use crate::oracle::split;

/// Bytes and flags of one rank in one call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traffic {
    /// Bytes written to peers.
    pub pushed: u64,
    /// Bytes read from peers.
    pub pulled: u64,
    /// Signals and flags raised.
    pub flags: u64,
}

impl std::ops::AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.pushed += other.pushed;
        self.pulled += other.pulled;
        self.flags += other.flags;
    }
}

/// Tiles that rows and columns are cut into.
fn tiles((rows, cols): (usize, usize), tile: TileShape) -> usize {
    rows.div_ceil(tile.m) * cols.div_ceil(tile.n)
}

/// What `rank` moves in a call of `m` rows. None for a barrier.
pub fn expected(case: &Case, plan: &Plan, m: usize) -> Traffic {
    let (rank, size) = (plan.ranks().rank, plan.ranks().size);
    let options = plan.request();
    let Request { n, k, .. } = *options;
    let (tile, variant) = (plan.at(m).tile, plan.at(m).variant);
    let peers = size - 1;
    if peers == 0 {
        return Traffic::default();
    }
    let wire = options.wire_dtype().size();
    let output = options.output_dtype().size();
    let part = |rank| split(m, size, rank).len();
    let traffic = |pushed: usize, pulled: usize, flags: usize| Traffic {
        pushed: pushed as u64,
        pulled: pulled as u64,
        flags: flags as u64,
    };
    // Tiles whose owners take turns, one of `owners`: how many are this one's, and their elements.
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
    match (case.op, variant) {
        // Two words of eight bytes for each eight bytes, with no flag besides.
        (op, Variant::Ll | Variant::UnfusedLl) => {
            let sums = matches!(op, Op::AllReduce | Op::MatmulAllReduce);
            let elements = |peer: usize| match op {
                _ if sums => m * n,
                Op::AllGather => part(rank) * n,
                Op::Broadcast if rank != options.root => 0,
                Op::Broadcast => m * n,
                _ => part(peer) * n,
            };
            let reduces = sums || op == Op::ReduceScatter;
            let bytes = if reduces { wire } else { output };
            let items = |peer| (elements(peer) * bytes).div_ceil(8);
            let others = (0..size).filter(|&other| other != rank);
            traffic(others.map(|peer| 16 * items(peer)).sum(), 0, 0)
        }
        (Op::MatmulAllReduce | Op::AllReduce, Variant::OneShot | Variant::UnfusedOneShot) => {
            traffic(m * n * wire * peers, 0, tiles((m, n), tile) * peers)
        }
        (op @ (Op::MatmulAllReduce | Op::MatmulReduceScatter), Variant::CopyEngine) => {
            // Parts of rows to their owners, and those of the sums from there; and a flag of its own.
            let others = (0..size).filter(|&other| other != rank);
            let flags: usize = others.map(|other| tiles((part(other), n), tile)).sum();
            let (to_all, own) = if op == Op::MatmulAllReduce {
                (part(rank) * n * output * peers, tiles((part(rank), n), tile) * peers)
            } else {
                (0, 0)
            };
            traffic((m - part(rank)) * n * wire + to_all, 0, flags + own + 1)
        }
        (Op::MatmulAllReduce | Op::AllReduce, variant) => {
            let (own, elements) = in_turn(rank, size);
            let others = m * n - elements;
            if matches!(variant, Variant::TwoShot | Variant::Unfused) {
                let flags = tiles((m, n), tile) - own + own * peers;
                traffic(others * wire + elements * output * peers, 0, flags)
            } else {
                traffic(others * 4, others * 4, 0)
            }
        }
        (Op::MatmulReduceScatter | Op::ReduceScatter, _) => {
            let others = (0..size).filter(|&other| other != rank);
            let flags = others.map(|other| tiles((part(other), n), tile)).sum();
            traffic((m - part(rank)) * n * wire, 0, flags)
        }
        (Op::MatmulAllGather | Op::AllGather, variant) => {
            let own = usize::from(variant == Variant::CopyEngine);
            let flags = tiles((part(rank), n), tile) * peers + own;
            traffic(part(rank) * n * output * peers, 0, flags)
        }
        (Op::AllToAll, _) => {
            let others = (0..size).filter(|&other| other != rank);
            let flags = others.map(|other| tiles((part(other), n), tile)).sum();
            traffic((m - part(rank)) * n * output, 0, flags)
        }
        (Op::Broadcast, Variant::TwoShot) if rank == options.root => {
            traffic(m * n * output, 0, tiles((m, n), tile))
        }
        (Op::Broadcast, Variant::TwoShot) => {
            // The others take turns, the rank behind the root first.
            let first = (rank + peers - options.root) % size;
            let (own, elements) = in_turn(first, peers);
            traffic(elements * output * (peers - 1), 0, own * (peers - 1))
        }
        (Op::Broadcast, _) if rank == options.root => {
            traffic(m * n * output * peers, 0, tiles((m, n), tile) * peers)
        }
        (Op::AllGatherMatmul, variant) => {
            let bytes = options.dtype.size();
            let shard = |rank: usize| match options.shard {
                Shard::Columns => (m, split(k, size, rank).len()),
                _ => (part(rank), k),
            };
            let area = |(rows, cols): (usize, usize)| rows * cols;
            let remote = m * k - area(shard(rank));
            match variant {
                Variant::Baseline => traffic(area(shard(rank)) * bytes * peers, 0, 0),
                // Tiles of A, signalled to each peer; a copy engine's has a flag of its own besides.
                Variant::Unfused | Variant::CopyEngine => {
                    let own = usize::from(variant == Variant::CopyEngine);
                    let flags = tiles(shard(rank), tile) * peers + own;
                    traffic(area(shard(rank)) * bytes * peers, 0, flags)
                }
                Variant::Pull => traffic(0, remote * bytes * n.div_ceil(tile.n), 0),
                _ => {
                    let group = options.columns_per_flag(plan.ranks().backend).min(k.max(1));
                    let units =
                        |(rows, cols): (usize, usize)| rows.div_ceil(tile.m) * cols.div_ceil(group);
                    let others = (0..size).filter(|&other| other != rank);
                    traffic(0, remote * bytes, others.map(|other| units(shard(other))).sum())
                }
            }
        }
        _ => Traffic::default(),
    }
}
