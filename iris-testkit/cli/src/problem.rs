//! One op on random input: the input of each rank, and its expected output.

use std::ops::Range;

use anyhow::Result;
use iris_heap::{BackendKind, DType, random_unit};
use iris_ops::{Plan, Shard, StagingLayout, TileShape, Topology, Variant};
use iris_testkit::matrix::Matrix;
use iris_testkit::numeric::rounded;
use iris_testkit::oracle::{Dense, Expected, Meaning, Part, Product, Rows, Task, product, split};
use iris_testkit::rank_setup::{Rig, Room};
use iris_testkit::suite::{self, Op, Options};
use serde::{Deserialize, Serialize};

use crate::errors::usage;

/// Number of columns of A (part of K) that the reference multiplies at a time, to bound its memory.
const DEPTH: usize = 256;

/// Number of elements, summed over all ranks' partials, that are checked at a time, to bound
/// memory.
const SLAB: usize = 1 << 22;

/// Op with its shape. `m`, `n` and `k` are those of the whole problem, before it is split over the
/// ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Problem {
    pub(crate) op: String,
    pub(crate) variant: String,
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) dtype: DType,
    /// Whether A is split over the ranks by columns.
    pub(crate) columns: bool,
    /// Whether the staging buffer is column-major and filled along M first.
    pub(crate) m_contiguous: bool,
    pub(crate) columns_per_flag: Option<usize>,
    pub(crate) fetchers: Option<usize>,
    /// Name of the implementation of whole-matrix GEMMs; `None` for the default.
    pub(crate) library: Option<String>,
    /// Whether the bits of a row must not depend on the other rows of its call.
    pub(crate) batch_invariant: bool,
    pub(crate) seed: u64,
    pub(crate) backend: BackendKind,
    pub(crate) trace: bool,
    /// Rows and columns of a tile; `None` if the plan chooses.
    pub(crate) tile: Option<[usize; 2]>,
    /// Whether plans ignore this machine's tuning file and use the built-in data.
    pub(crate) untuned: bool,
}

/// Variant and tile of one timed op.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TimedVariant {
    pub(crate) variant: String,
    /// Rows and columns of a tile; `None` if the plan chooses.
    pub(crate) tile: Option<[usize; 2]>,
}

impl TimedVariant {
    /// Choices of these variants, all with the same tile.
    pub(crate) fn each(variants: &[String], tile: Option<[usize; 2]>) -> Vec<TimedVariant> {
        variants.iter().map(|variant| TimedVariant { variant: variant.clone(), tile }).collect()
    }
}

/// Shapes (rows, columns) of A (or the message), B and C of one rank; 0 x 0 if the rank has no such
/// matrix.
pub(crate) type MatrixShapes = [(usize, usize); 3];

/// Variant called `name`, `None` for `auto`; the error for an unknown name lists the variants of
/// `op`.
pub(crate) fn known_variant(what: &str, op: Op, name: &str) -> Result<Option<Variant>> {
    let all = || op.variants().into_iter().map(Variant::name).collect::<Vec<_>>().join(", ");
    op.variant(name).map_err(|_| usage(format!("{what} of {op}"), name, format!("auto, {}", all())))
}

/// Number of rows with `cols` columns that are checked at a time; it limits the elements of all
/// ranks' partials to [`SLAB`].
pub(crate) fn rows_at_once(cols: usize, size: usize) -> usize {
    (SLAB / cols.saturating_mul(size).max(1)).max(1)
}

impl Problem {
    /// Problem for the op `op` of the whole shape `[m, n, k]`; the plan chooses variant, tile and
    /// everything else.
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
            columns_per_flag: None,
            fetchers: None,
            library: None,
            batch_invariant: false,
            seed: 1,
            backend,
            trace: false,
            tile: None,
            untuned: false,
        }
    }

    pub(crate) fn op(&self) -> Result<Op> {
        Ok(self.op.parse()?)
    }

    /// Range of M, N or K, of length `total` over all ranks, that this rank holds.
    fn part(total: usize, ranks: Topology) -> Range<usize> {
        split(total, ranks.size, ranks.rank)
    }

    /// Options of the op's plan on one rank.
    pub(crate) fn options(&self, op: Op, ranks: Topology) -> Options {
        let meaning = Meaning::of(op);
        let k = if meaning.splits_k() { Self::part(self.k, ranks).len() } else { self.k };
        let n = if meaning.splits_n() { Self::part(self.n, ranks).len() } else { self.n };
        let mut options = Options::new(self.m, n, k).dtype(self.dtype).backend(self.backend);
        let splits = |is: bool, all: usize| !is || all.is_multiple_of(ranks.size);
        options.uniform_shape =
            splits(meaning.splits_k(), self.k) && splits(meaning.splits_n(), self.n);
        if self.columns {
            options = options.shard(Shard::Columns);
        }
        if self.m_contiguous {
            options = options.staging(StagingLayout::MContiguous);
        }
        options.staged.columns_per_flag = self.columns_per_flag;
        options.staged.fetchers = self.fetchers;
        let library = self.library.as_deref().and_then(|name| name.parse().ok());
        options.library = library.unwrap_or_default();
        options.batch_invariant = self.batch_invariant;
        options.tile = self.tile.map(|[m, n]| TileShape { m, n });
        if self.trace {
            options = options.trace_spans(crate::trace::SPANS);
        }
        options
    }

    pub(crate) fn plan(&self, ranks: Topology) -> Result<Plan> {
        let op = self.op()?;
        known_variant("--variant", op, &self.variant)?;
        let ranks = if self.untuned { ranks.untuned() } else { ranks };
        suite::plan(op, &self.variant, ranks, &self.options(op, ranks))
    }

    pub(crate) fn shapes(&self, ranks: Topology) -> Result<MatrixShapes> {
        Ok(self.task(self.op()?, ranks).shapes(ranks.rank))
    }

    fn task(&self, op: Op, ranks: Topology) -> Task {
        Task {
            op,
            size: ranks.size,
            nodes: ranks.nodes(),
            m: self.m,
            options: self.options(op, ranks),
        }
    }

    /// Largest number of elements of A, of B and of C on any rank.
    fn most(&self, size: usize) -> Result<[usize; 3]> {
        let mut most = [0; 3];
        for rank in 0..size {
            let shapes = self.shapes(Topology::new(rank, size))?;
            for (most, (rows, cols)) in most.iter_mut().zip(shapes) {
                *most = rows.saturating_mul(cols).max(*most);
            }
        }
        Ok(most)
    }

    /// Room in the heap that every rank of `size` ranks on `nodes` nodes needs for its plan, its
    /// matrices and the word that tests a barrier.
    pub(crate) fn room(&self, size: usize, nodes: usize) -> Result<Room> {
        let plans = Room::of(size, |ranks| self.plan(ranks.on_nodes(nodes)))?;
        Ok(plans.matrices(self.dtype, self.most(size)?).matrices(DType::I32, [1]))
    }

    /// Allocates this rank's A, B and C; fills A and B with their values and C with NaN.
    /// Collective.
    #[track_caller]
    pub(crate) fn matrices(&self, rig: &Rig) -> Result<[Matrix; 3]> {
        let ranks = Topology::from(&rig.heap);
        let matrices = rig.matrices(self.dtype, self.most(ranks.size)?, self.shapes(ranks)?)?;
        self.fill(rig, &matrices)?;
        Ok(matrices)
    }

    /// Fills this rank's A and B with their values, and C with NaN, so that elements that are not
    /// written are found.
    pub(crate) fn fill(&self, rig: &Rig, [a, b, c]: &[Matrix; 3]) -> Result<()> {
        let (op, ranks, heap) = (self.op()?, Topology::from(&rig.heap), &rig.heap);
        a.fill(heap, |row, col| self.own_a(op, ranks, row, col))?;
        b.fill(heap, |row, col| self.own_b(op, ranks, row, col))?;
        c.poison(heap)
    }

    /// Bytes that a rank needs outside its heap: a row while matrices are filled, and the reference
    /// for the rows that are checked at a time.
    pub(crate) fn check_bytes(&self, size: usize) -> Result<u64> {
        let op = self.op()?;
        let mut most = 0;
        for rank in 0..size {
            let shapes = self.shapes(Topology::new(rank, size))?;
            let widest = shapes.iter().map(|&(_, cols)| cols as u64).max().unwrap_or(0);
            let (rows, cols) = shapes[2];
            let rows = rows_at_once(cols, size).min(rows) as u64;
            let depth = if op.multiplies() { DEPTH.min(self.k) as u64 } else { 0 };
            // Number of f64 values of the reference: each rank's part with its magnitudes, their
            // sums, and the error bounds.
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

    /// Element of A before A is split over the ranks.
    fn a(&self, row: usize, col: usize) -> f64 {
        self.element(0, row * self.k + col)
    }

    /// Element of B before B is split over the ranks.
    fn b(&self, row: usize, col: usize) -> f64 {
        self.element(1, row * self.n + col)
    }

    /// Element of the message that `rank` sends.
    fn sent(&self, rank: usize, row: usize, col: usize) -> f64 {
        self.element(2 + rank, row * self.n + col)
    }

    /// Element of the A that a rank holds, or of the message that it sends.
    fn own_a(&self, op: Op, ranks: Topology, row: usize, col: usize) -> f64 {
        let meaning = Meaning::of(op);
        let first = |total| Self::part(total, ranks).start;
        match meaning.gives {
            _ if meaning.product == Product::None => self.sent(ranks.rank, row, col),
            Rows::Shard if self.columns => self.a(row, first(self.k) + col),
            Rows::Shard | Rows::Own => self.a(first(self.m) + row, col),
            _ if meaning.splits_k() => self.a(row, first(self.k) + col),
            _ => self.a(row, col),
        }
    }

    /// Element of the B that a rank holds.
    fn own_b(&self, op: Op, ranks: Topology, row: usize, col: usize) -> f64 {
        let meaning = Meaning::of(op);
        let first = |splits, total| if splits { Self::part(total, ranks).start } else { 0 };
        self.b(first(meaning.splits_k(), self.k) + row, first(meaning.splits_n(), self.n) + col)
    }

    /// Expected values of the given rows of `rank`'s C, with error bounds.
    pub(crate) fn expected(&self, op: Op, ranks: Topology, rows: &[usize]) -> Expected {
        let (meaning, task) = (Meaning::of(op), self.task(op, ranks));
        let sources: Vec<_> = rows.iter().map(|&row| task.source(ranks.rank, row)).collect();
        let mut options = task.options;
        // Expected rows as the result of a smaller call that has only these rows.
        let call = |op, parts: &[Part], options| {
            let (size, nodes) = (parts.len(), ranks.nodes());
            let task = Task { op, size, nodes, m: rows.len(), options };
            task.expected(0, parts, None, None, None)
        };
        // Message of `rank` for the given rows; a row that only one rank contributes is taken from
        // that rank.
        let sent = |rank: usize| {
            let element = |r: usize, c| {
                let (source, row) = sources[r];
                self.sent(source.unwrap_or(rank), row, c)
            };
            let value = Dense::from_fn(rows.len(), self.n, element);
            let magnitude = value.data.iter().map(|x| x.abs()).collect();
            Part { magnitude: Dense { data: magnitude, ..value }, value }
        };
        let all = 0..ranks.size;
        match (meaning.product, meaning.sums) {
            (Product::None, true) => {
                call(Op::AllReduce, &all.map(sent).collect::<Vec<_>>(), options)
            }
            (Product::None, false) => call(Op::AllGather, &[sent(ranks.rank)], options),
            (_, true) => {
                let rows: Vec<_> = sources.iter().map(|&(_, row)| row).collect();
                let depth = |rank| split(self.k, ranks.size, rank);
                options.k = depth(0).len();
                let part = |rank| self.product(&rows, depth(rank), 0..self.n);
                call(Op::MatmulAllReduce, &all.map(part).collect::<Vec<_>>(), options)
            }
            (_, false) => {
                let own = Self::part(self.n, ranks);
                let cols = if meaning.splits_n() { own } else { 0..self.n };
                call(Op::Matmul, &[self.product(rows, 0..self.k, cols)], options)
            }
        }
    }

    /// Product of the rows `rows` of A and the columns `cols` of B, restricted to the range `depth`
    /// of K.
    fn product(&self, rows: &[usize], depth: Range<usize>, cols: Range<usize>) -> Part {
        let zero = Dense::from_fn(rows.len(), cols.len(), |_, _| 0.0);
        let mut sum = Part { value: zero.clone(), magnitude: zero };
        for begin in depth.clone().step_by(DEPTH) {
            let len = DEPTH.min(depth.end - begin);
            let a = Dense::from_fn(rows.len(), len, |r, c| self.a(rows[r], begin + c));
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
