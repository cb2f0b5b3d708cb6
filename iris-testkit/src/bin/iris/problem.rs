//! One op on random input: what each rank has, and what it should get.

use std::ops::Range;

use anyhow::Result;
use iris_heap::{BackendKind, DType, random_unit};
use iris_ops::{Plan, Ranks, Shard, StagingLayout, TileShape, Variant};
use iris_testkit::numeric::rounded;
use iris_testkit::oracle::{Dense, Expected, Part, Task, product, split};
use iris_testkit::suite::{self, Op, Options};
use serde::{Deserialize, Serialize};

use crate::errors::usage;
use crate::matrices::room;

/// Columns of A that are multiplied at a time by the reference.
const DEPTH: usize = 256;

/// Elements of a slab of rows that is checked at once, over all ranks' partials.
const SLAB: usize = 1 << 22;

/// An op with its shape. `m`, `n`, `k` are those of the whole, of which the ranks have parts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Problem {
    pub(crate) op: String,
    pub(crate) variant: String,
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) dtype: DType,
    /// Whether A is split by columns.
    pub(crate) columns: bool,
    /// Whether the staging buffer is filled along M first.
    pub(crate) m_contiguous: bool,
    pub(crate) k_per_flag: Option<usize>,
    pub(crate) fetchers: Option<usize>,
    /// Whose product of whole matrices, if not the default.
    pub(crate) library: Option<String>,
    pub(crate) seed: u64,
    pub(crate) backend: BackendKind,
    pub(crate) trace: bool,
    /// Rows and columns of a tile, if not the plan's own.
    pub(crate) tile: Option<[usize; 2]>,
}

/// Shapes of A (or the message), B and C of one rank; 0 x 0 where there is none.
pub(crate) type Shapes = [(usize, usize); 3];

/// Refuses what is no variant of this op, by the op's own name.
pub(crate) fn known_variant(what: &str, op: Op, name: &str) -> Result<()> {
    let variants: Vec<_> = op.variants().into_iter().map(Variant::name).collect();
    if name == "auto" || variants.contains(&name) {
        return Ok(());
    }
    Err(usage(format!("{what} of {op}"), name, format!("auto, {}", variants.join(", "))))
}

/// Rows of `cols` columns that are checked at once, over all ranks' partials.
pub(crate) fn rows_at_once(cols: usize, size: usize) -> usize {
    (SLAB / cols.saturating_mul(size).max(1)).max(1)
}

impl Problem {
    /// Of this shape, everything else chosen by the plan.
    pub(crate) fn new(op: &str, [m, n, k]: [usize; 3], dtype: DType, backend: BackendKind) -> Self {
        Problem {
            op: op.into(),
            variant: "auto".into(),
            m,
            n,
            k,
            dtype,
            columns: false,
            m_contiguous: false,
            k_per_flag: None,
            fetchers: None,
            library: None,
            seed: 1,
            backend,
            trace: false,
            tile: None,
        }
    }

    pub(crate) fn op(&self) -> Result<Op> {
        Ok(self.op.parse()?)
    }

    /// Whether K is split over the ranks.
    fn splits_k(op: Op) -> bool {
        matches!(op, Op::MatmulAllReduce | Op::MatmulReduceScatter)
    }

    /// The part of M, N or K of one rank.
    fn part(total: usize, ranks: Ranks) -> Range<usize> {
        split(total, ranks.size, ranks.rank)
    }

    /// What the op is planned with on one rank.
    pub(crate) fn options(&self, op: Op, ranks: Ranks) -> Options {
        let k = if Self::splits_k(op) { Self::part(self.k, ranks).len() } else { self.k };
        let gathers = op == Op::AllGatherMatmul;
        let n = if gathers { Self::part(self.n, ranks).len() } else { self.n };
        let mut options = Options::new(self.m, n, k).dtype(self.dtype).backend(self.backend);
        if self.columns {
            options = options.shard(Shard::Columns);
        }
        if self.m_contiguous {
            options = options.staging(StagingLayout::MContiguous);
        }
        options.columns_per_flag = self.k_per_flag.map(|blocks| blocks.saturating_mul(64));
        options.fetchers = self.fetchers;
        let library = self.library.as_deref().and_then(|name| name.parse().ok());
        options.library = library.unwrap_or_default();
        options.tile = self.tile.map(|[m, n]| TileShape { m, n });
        if self.trace {
            options = options.trace_spans(crate::trace::SPANS);
        }
        options
    }

    pub(crate) fn plan(&self, ranks: Ranks) -> Result<Plan> {
        let op = self.op()?;
        known_variant("--variant", op, &self.variant)?;
        suite::plan(op, &self.variant, ranks, &self.options(op, ranks))
    }

    pub(crate) fn shapes(&self, ranks: Ranks) -> Result<Shapes> {
        let op = self.op()?;
        let (m, n) = (self.m, self.n);
        let Options { n: own_n, k, .. } = self.options(op, ranks);
        let rows = Self::part(m, ranks).len();
        Ok(match op {
            Op::Matmul | Op::MatmulAllReduce => [(m, k), (k, n), (m, n)],
            Op::MatmulReduceScatter => [(m, k), (k, n), (rows, n)],
            Op::MatmulAllGather => [(rows, k), (k, n), (m, n)],
            Op::AllGatherMatmul if self.columns => {
                [(m, Self::part(k, ranks).len()), (k, own_n), (m, own_n)]
            }
            Op::AllGatherMatmul => [(rows, k), (k, own_n), (m, own_n)],
            Op::AllReduce => [(m, n), (0, 0), (m, n)],
            Op::Broadcast if ranks.rank == 0 => [(m, n), (0, 0), (m, n)],
            Op::Broadcast => [(0, n), (0, 0), (m, n)],
            Op::AllGather => [(rows, n), (0, 0), (m, n)],
            Op::ReduceScatter => [(m, n), (0, 0), (rows, n)],
            Op::AllToAll => [(m, n), (0, 0), (ranks.size * rows, n)],
            Op::Barrier => [(0, 0); 3],
        })
    }

    /// Most elements that A, B and C have on any rank.
    pub(crate) fn most(&self, size: usize) -> Result<[usize; 3]> {
        let mut most = [0; 3];
        for rank in 0..size {
            let shapes = self.shapes(Ranks::new(rank, size))?;
            for (most, (rows, cols)) in most.iter_mut().zip(shapes) {
                *most = rows.saturating_mul(cols).max(*most);
            }
        }
        Ok(most)
    }

    /// Bytes of the data and the signal segment that every rank needs.
    pub(crate) fn heap_bytes(&self, size: usize) -> Result<(u64, u64)> {
        let (mut data, mut signal) = (0, 0);
        for rank in 0..size {
            let plan = self.plan(Ranks::new(rank, size))?;
            (data, signal) = (plan.data_bytes().max(data), plan.signal_bytes().max(signal));
        }
        let matrices = self.most(size)?.map(|elements| room(self.dtype, elements));
        // A word for a barrier.
        let all = matrices.into_iter().chain([room(DType::I32, 1)]);
        // The signal segment begins with 4096 bytes that the heap keeps for itself.
        Ok((all.fold(data, u64::saturating_add), signal.saturating_add(4096)))
    }

    /// Bytes that a rank needs beside its heap: a row as it is filled in, and the reference of as many
    /// rows as are checked at a time.
    pub(crate) fn check_bytes(&self, size: usize) -> Result<u64> {
        let op = self.op()?;
        let mut most = 0;
        for rank in 0..size {
            let shapes = self.shapes(Ranks::new(rank, size))?;
            let widest = shapes.iter().map(|&(_, cols)| cols as u64).max().unwrap_or(0);
            let (rows, cols) = shapes[2];
            let rows = rows_at_once(cols, size).min(rows) as u64;
            let depth = if op.multiplies() { DEPTH.min(self.k) as u64 } else { 0 };
            // Each rank's part with its magnitudes, their sums, and their bounds.
            let parts = rows.saturating_mul(cols as u64).saturating_mul(2 * size as u64 + 8);
            let factors = depth.saturating_mul(rows.saturating_add(cols as u64));
            let numbers = [parts, factors, widest].into_iter().fold(0, u64::saturating_add);
            most = numbers.saturating_mul(size_of::<f64>() as u64).max(most);
        }
        Ok(most)
    }

    fn element(&self, stream: usize, index: usize) -> f64 {
        rounded(self.dtype, random_unit(self.seed, stream, index))
    }

    /// Element of the whole A, the same for all ranks.
    fn a(&self, row: usize, col: usize) -> f64 {
        self.element(0, row * self.k + col)
    }

    /// Element of the whole B.
    fn b(&self, row: usize, col: usize) -> f64 {
        self.element(1, row * self.n + col)
    }

    /// Element of what a rank sends.
    fn sent(&self, rank: usize, row: usize, col: usize) -> f64 {
        self.element(2 + rank, row * self.n + col)
    }

    /// Element of a rank's own A, or of what it sends.
    pub(crate) fn own_a(&self, op: Op, ranks: Ranks, row: usize, col: usize) -> f64 {
        let rows = Self::part(self.m, ranks).start;
        let depth = Self::part(self.k, ranks).start;
        match op {
            _ if Self::splits_k(op) => self.a(row, depth + col),
            Op::AllGatherMatmul if self.columns => self.a(row, depth + col),
            Op::AllGatherMatmul | Op::MatmulAllGather => self.a(rows + row, col),
            Op::Matmul => self.a(row, col),
            _ => self.sent(ranks.rank, row, col),
        }
    }

    /// Element of a rank's own B.
    pub(crate) fn own_b(&self, op: Op, ranks: Ranks, row: usize, col: usize) -> f64 {
        match op {
            _ if Self::splits_k(op) => self.b(Self::part(self.k, ranks).start + row, col),
            Op::AllGatherMatmul => self.b(row, Self::part(self.n, ranks).start + col),
            _ => self.b(row, col),
        }
    }

    /// Whether every rank gets the same matrix.
    pub(crate) fn replicates(op: Op) -> bool {
        use Op::{AllGather, AllReduce, Broadcast, MatmulAllGather, MatmulAllReduce};
        matches!(op, AllGather | AllReduce | Broadcast | MatmulAllGather | MatmulAllReduce)
    }

    /// What `rank` should have in these rows of its C.
    pub(crate) fn expected(&self, op: Op, ranks: Ranks, rows: &[usize]) -> Expected {
        let first = Self::part(self.m, ranks).start;
        let size = ranks.size;
        let all = 0..self.n;
        let mut options = self.options(op, ranks);
        let task = |op, size, options| Task { op, size, m: rows.len(), options };
        let whole = |parts: &[Part], op, options: Options| {
            task(op, parts.len(), options).expected(0, parts, None, None)
        };
        let sent = |source: usize, first: usize| {
            let value =
                Dense::from_fn(rows.len(), self.n, |r, c| self.sent(source, first + rows[r], c));
            let magnitude = Dense { data: value.data.iter().map(|x| x.abs()).collect(), ..value };
            Part { value: Dense { data: value.data, ..magnitude }, magnitude }
        };
        let moved = |value: Dense| {
            let part = Part { magnitude: value.clone(), value };
            whole(&[part], Op::AllGather, options.clone())
        };
        match op {
            Op::MatmulAllReduce | Op::MatmulReduceScatter => {
                let first = if op == Op::MatmulReduceScatter { first } else { 0 };
                let depth = |rank| split(self.k, size, rank);
                options.k = depth(0).len();
                let part = |rank| self.product(rows, first, depth(rank), all.clone());
                whole(&(0..size).map(part).collect::<Vec<_>>(), Op::MatmulAllReduce, options)
            }
            Op::AllGatherMatmul => {
                let cols = Self::part(self.n, ranks);
                whole(&[self.product(rows, 0, 0..self.k, cols)], Op::Matmul, options)
            }
            Op::MatmulAllGather | Op::Matmul => {
                whole(&[self.product(rows, 0, 0..self.k, all)], Op::Matmul, options)
            }
            Op::AllReduce | Op::ReduceScatter => {
                let first = if op == Op::ReduceScatter { first } else { 0 };
                let parts: Vec<_> = (0..size).map(|rank| sent(rank, first)).collect();
                whole(&parts, Op::AllReduce, options)
            }
            Op::AllGather => {
                let owner = |row| (0..size).find(|&rank| split(self.m, size, rank).contains(&row));
                moved(Dense::from_fn(rows.len(), self.n, |r, c| {
                    let rank = owner(rows[r]).unwrap_or(0);
                    self.sent(rank, rows[r] - split(self.m, size, rank).start, c)
                }))
            }
            Op::AllToAll => {
                let block = Self::part(self.m, ranks).len().max(1);
                moved(Dense::from_fn(rows.len(), self.n, |r, c| {
                    self.sent(rows[r] / block, first + rows[r] % block, c)
                }))
            }
            Op::Broadcast => {
                moved(Dense::from_fn(rows.len(), self.n, |r, c| self.sent(0, rows[r], c)))
            }
            Op::Barrier => moved(Dense::default()),
        }
    }

    /// Some rows (counted from `first`) of the whole A, with the columns `depth`, by those rows of
    /// B with the columns `cols`.
    fn product(
        &self,
        rows: &[usize],
        first: usize,
        depth: Range<usize>,
        cols: Range<usize>,
    ) -> Part {
        let zero = Dense::from_fn(rows.len(), cols.len(), |_, _| 0.0);
        let mut sum = Part { value: zero.clone(), magnitude: zero };
        for begin in depth.clone().step_by(DEPTH) {
            let len = DEPTH.min(depth.end - begin);
            let a = Dense::from_fn(rows.len(), len, |r, c| self.a(first + rows[r], begin + c));
            let b = Dense::from_fn(len, cols.len(), |r, c| self.b(begin + r, cols.start + c));
            let more = product(&a, &b);
            let add = |sum: &mut Dense, more: &Dense| {
                sum.data.iter_mut().zip(&more.data).for_each(|(sum, more)| *sum += more);
            };
            add(&mut sum.value, &more.value);
            add(&mut sum.magnitude, &more.magnitude);
        }
        sum
    }
}
