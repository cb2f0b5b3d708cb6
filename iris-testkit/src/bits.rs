//! Check of the option `batch_invariant`: a row of a result has the same bits whatever its call is.
//!
//! **Problem.** Variant, tile, GEMM and the rank that owns a row depend on the number of rows of a
//! call. Each may change the order in which numbers are added, and so the last bits of the row.
//!
//! **Solution.** One row is computed in a call of one row. Then it is computed in calls of more rows:
//! as every row at once, and as one row among random ones. All results must have the same bits.
//! Elements are random numbers, so that a sum in another order almost always has other bits.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use iris_heap::{DType, Element, Stream, SymSlice, SymmetricHeap, World, random_unit};
use iris_ops::{
    AnyOp, Epilogue, MatRef, NormArgs, Op, OpRequest, Operands, Shapes, Shard, Variant,
};

use crate::oracle::Meaning;

/// Operator, and what its calls do beside the product and the message.
#[derive(Clone, Debug)]
pub struct Case {
    /// Operator.
    pub op: Op,
    /// Variant; `None` for those that the plan chooses.
    pub variant: Option<Variant>,
    /// Numbers of columns of C, and of A on each rank.
    pub shape: [usize; 2],
    /// Number of rows of the plan's largest call.
    pub most: usize,
    /// Whether calls have a bias and a GELU.
    pub epilogue: bool,
    /// Whether calls have a residual and an RMSNorm.
    pub norm: bool,
    /// Type in which parts travel between ranks; `None` for the type of C.
    pub wire: Option<DType>,
    /// Whether B is column-major.
    pub across: bool,
    /// Dimension of A that is split over the ranks, in a gather of A.
    pub shard: Shard,
}

impl Case {
    /// Case of a plain call with the variants that the plan chooses.
    pub fn new(op: Op, shape: [usize; 2], most: usize) -> Self {
        let [epilogue, norm, across] = [false; 3];
        let (variant, wire, shard) = (None, None, Shard::Rows);
        Self { op, variant, shape, most, epilogue, norm, wire, across, shard }
    }

    /// Cases of all variants that planning accepts, `auto` among them.
    pub fn of_variants<T: Element, C: Element>(&self, heap: &SymmetricHeap) -> Vec<Case> {
        let named = self.op.variants().into_iter().map(Some);
        let all = [None].into_iter().chain(named);
        let all = all.map(|variant| Case { variant, ..self.clone() });
        all.filter(|case| case.request::<T, C>().plan(heap).is_ok()).collect()
    }

    fn request<T: Element, C: Element>(&self) -> OpRequest {
        let &Case { op, shape: [n, k], most, .. } = self;
        let mut request = op.request(most, n, k);
        (request.dtype, request.variant, request.shard) = (T::DTYPE, self.variant, self.shard);
        request.output = op.multiplies().then_some(C::DTYPE);
        request.epilogue = if self.epilogue { Epilogue::Gelu } else { Epilogue::None };
        request.rms_norm = self.norm.then_some(1e-5);
        request.wire = self.wire;
        request.batch_invariant = true;
        request
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { op, variant, shape: [n, k], most, epilogue, norm, wire, across, shard } = self;
        let variant = variant.map_or("auto", Variant::name);
        write!(f, "{op} {variant} of up to {most} x {n} x {k}")?;
        for (is, what) in [
            (*epilogue, ", bias and GELU"),
            (*norm, ", residual and norm"),
            (wire.is_some(), ", another wire type"),
            (*across, ", B column-major"),
            (*shard == Shard::Columns, ", columns"),
        ] {
            f.write_str(if is { what } else { "" })?;
        }
        Ok(())
    }
}

/// Result of a row: bytes of its C, and of its normalised C, which are none without a norm.
pub type Row = [Vec<u8>; 2];

/// Operator of a case on this rank, with its matrices.
pub struct Rows<'a, T: Element, C: Element> {
    case: Case,
    on: (&'a World, &'a Arc<SymmetricHeap>),
    made: AnyOp,
    /// Rows of A and of the residual by their numbers; this rank may pass some columns of A only.
    inputs: Vec<T>,
    added: Vec<C>,
    a: SymSlice<T>,
    b: SymSlice<T>,
    results: [SymSlice<C>; 2],
    residual: SymSlice<C>,
    bias: SymSlice<C>,
    weight: SymSlice<C>,
    stream: Stream,
}

/// Number of the row that is checked, by which its elements are made; all other rows have a number of
/// their own.
const ROW: usize = 0;

impl<'a, T: Element, C: Element> Rows<'a, T, C> {
    /// Makes the operator. Collective.
    ///
    /// # Errors
    /// Errors of the plan, of the operator and of the heap.
    pub fn new(on: (&'a World, &'a Arc<SymmetricHeap>), case: &Case) -> Result<Self> {
        let (world, heap) = on;
        let &Case { op, shape: [n, k], most, .. } = case;
        let made = case.request::<T, C>().plan(heap).and_then(|plan| AnyOp::new(heap, &plan));
        let made = made.with_context(|| case.to_string())?;
        // Ranks whose parts are added have matrices of their own.
        let rank = if Meaning::of(op).sums { world.rank() } else { 0 };
        let cols = if op.multiplies() { k } else { n };
        let (b, vector) = (heap.alloc::<T>((k * n).max(1))?, || heap.alloc::<C>(n));
        heap.write(b, &numbers(2, rank, 0..(k * n).max(1)))?;
        let (bias, weight) = (vector()?, vector()?);
        heap.write(bias, &numbers(3, 0, 0..n))?;
        heap.write(weight, &numbers(4, 0, 0..n))?;
        let inputs = numbers(1, rank, 0..(most + 1) * cols);
        let added = numbers(5, 0, 0..if case.norm { (most + 1) * n } else { 0 });
        let (a, result) = (heap.alloc(most * cols)?, || heap.alloc(most * n));
        let (results, residual) = ([result()?, result()?], result()?);
        // Rows that a call leaves out are then not those of an earlier operator in the same memory.
        for slice in results {
            heap.write(slice, &vec![C::from_f64(f64::NAN); most * n])?;
        }
        let stream = heap.stream()?;
        Ok(Self {
            case: case.clone(),
            on,
            made,
            inputs,
            added,
            a,
            b,
            results,
            residual,
            bias,
            weight,
            stream,
        })
    }

    /// Frees the operator and its matrices. Collective.
    ///
    /// # Errors
    /// Errors of the heap.
    pub fn free(self) -> Result<()> {
        let Self {
            on: (_, heap), made, a, b, results: [c, normed], residual, bias, weight, ..
        } = self;
        made.free()?;
        [a, b].into_iter().try_for_each(|it| heap.free(it))?;
        Ok([c, normed, residual, bias, weight].into_iter().try_for_each(|it| heap.free(it))?)
    }

    /// Result of the row in a call of one row, the same on all ranks. Collective.
    ///
    /// # Errors
    /// Errors of the call.
    pub fn alone(&self) -> Result<Row> {
        let mine = self.call(1, &|_| ROW)?;
        let [c, normed] = [0, 1].map(|of| mine.get(&0).map_or(&[][..], |row| &row[of]));
        // Rank 0 owns the only row.
        let first = |all: Vec<Vec<u8>>| all.into_iter().next().unwrap_or_default();
        let (world, _) = self.on;
        Ok([first(world.allgather(c)?), first(world.allgather(normed)?)])
    }

    /// Checks that the row has the bits `expected` in calls of `m` rows: as every row, and at place
    /// `place` among random rows. Collective.
    ///
    /// # Errors
    /// Rows with other bits, and errors of the calls.
    pub fn check(&self, m: usize, place: usize, expected: &Row) -> Result<()> {
        let (case, rank) = (&self.case, self.on.0.rank());
        for (what, number) in [
            ("copies", &(|_| ROW) as &dyn Fn(usize) -> usize),
            ("random rows", &|row| if row == place { ROW } else { row + 1 }),
        ] {
            for (row, found) in self.call(m, number)? {
                let same = number(row) != ROW || found == *expected;
                ensure!(
                    same,
                    "{case}, rank {rank}: row {row} of {m} {what} has other bits than alone"
                );
            }
        }
        Ok(())
    }

    /// Results of a call of `m` rows by their row; `number` is the number of the input of each row.
    fn call(&self, m: usize, number: &dyn Fn(usize) -> usize) -> Result<BTreeMap<usize, Row>> {
        let (world, heap) = self.on;
        let Case { op, shape: [n, k], norm, epilogue, across, .. } = self.case;
        let rank = world.rank();
        let plan = self.made.plan();
        let Shapes { a: of_a, c: of_c, .. } = plan.shapes(m);
        let rows = |(rows, _): (usize, usize)| {
            let first = if rows == m { 0 } else { plan.rows_of(rank, m).start };
            first..first + rows
        };
        // A rank may have some columns of A only; `len` is the length of a whole row.
        let len = if op.multiplies() { k } else { n };
        let first = if of_a.1 == len { 0 } else { plan.rows_of(rank, len).start };
        let of_row = |row| &self.inputs[number(row) * len + first..][..of_a.1];
        let input: Vec<T> = rows(of_a).flat_map(of_row).copied().collect();
        heap.write(self.a.slice(..input.len())?, &input)?;
        let [c, normed] = self.results.map(|it| MatRef::sym(it, of_c.0, of_c.1));
        let a = MatRef::sym(self.a, of_a.0, of_a.1);
        let b = match across {
            true => MatRef::sym(self.b, n, k).transposed(),
            false => MatRef::sym(self.b, k, n),
        };
        let mut operands = Operands::new(a, b, c);
        if epilogue {
            operands = operands.bias(MatRef::vector(self.bias));
        }
        if norm {
            let of_row = |row| &self.added[number(row) * n..][..n];
            let added: Vec<C> = rows(of_c).flat_map(of_row).copied().collect();
            heap.write(self.residual.slice(..added.len())?, &added)?;
            let residual = MatRef::sym(self.residual, of_c.0, of_c.1);
            operands = operands
                .norm(NormArgs::new(MatRef::vector(self.weight), normed).residual(residual));
        }
        self.made.run(&operands, &self.stream)?;
        self.stream.sync()?;
        let lens = [of_c.0 * n, if norm { of_c.0 * n } else { 0 }];
        let [c, normed] = [0, 1].map(|of| heap.read(self.results[of].slice(..lens[of])?));
        let (c, normed) = (c?, normed?);
        let bytes = |all: &[C], row: usize| match all.get(row * n..(row + 1) * n) {
            Some(row) => bytemuck::cast_slice(row).to_vec(),
            None => Vec::new(),
        };
        let found =
            rows(of_c).enumerate().map(|(at, row)| (row, [bytes(&c, at), bytes(&normed, at)]));
        let found = found.collect();
        // A peer may write C once it has begun the next call.
        world.barrier()?;
        Ok(found)
    }
}

/// Random elements `range` of a matrix; `seed` differs between matrices.
fn numbers<T: Element>(seed: u64, rank: usize, range: Range<usize>) -> Vec<T> {
    range.map(|at| T::from_f64(random_unit(seed, rank, at))).collect()
}
