//! Check of sums of weighted parts (`combine` of `all_reduce` and `reduce_scatter`).
//!
//! A result is compared bit by bit with the steps that the operator documents, done here one after the
//! other, and with a call of the plain operator on rows that were combined before; and with the oracle
//! in f64, within its bounds.

use std::sync::Arc;

use anyhow::{Result, ensure};
use half::{bf16, f16};
use iris_heap::{DType, Element, Stream, SymSlice, SymmetricHeap, random_unit};
use iris_ops::{
    AllReduce, CollectiveArgs, Epilogue, MatRef, NormArgs, Op, Plan, ReduceScatter, all_reduce,
    reduce_scatter,
};

use crate::numeric::compare;
use crate::options::Options;
use crate::oracle::{Dense, Part, Task, product, rms_norm};

/// Epsilon of the RMSNorm.
const EPSILON: f32 = 1e-3;

/// Operator and shape of calls, and what they do beside the sum.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// `AllReduce` or `ReduceScatter`.
    pub op: Op,
    /// Numbers of rows of the largest call, of columns, and of parts of a row.
    pub shape: [usize; 3],
    /// Type in which parts travel between ranks; `None` for the type of the output.
    pub wire: Option<DType>,
    /// Whether GELU is applied.
    pub gelu: bool,
    /// Whether an RMSNorm follows.
    pub norm: bool,
    /// Number of matrices that are added. With an RMSNorm the first one is its residual.
    pub added: usize,
    /// Whether the output lies in the memory of the first added matrix.
    pub in_place: bool,
    /// Number of elements between the rows of each matrix.
    pub gap: usize,
    /// Whether some parts and weights are infinite, NaN or zeros of both signs.
    pub special: bool,
    /// Whether the plan is batch invariant.
    pub invariant: bool,
}

impl Case {
    /// Case of calls that only sum weighted parts.
    pub fn new(op: Op, shape: [usize; 3]) -> Self {
        let [gelu, norm, in_place, special, invariant] = [false; 5];
        Self { op, shape, wire: None, gelu, norm, added: 0, in_place, gap: 0, special, invariant }
    }

    /// Plan of the case, with `combine` if `combines`.
    fn plan<T: Element>(&self, heap: &SymmetricHeap, combines: bool) -> Result<Plan> {
        let [m, n, parts] = self.shape;
        macro_rules! plan {
            ($op:ident) => {{
                let options = $op::Options::rows(m, n).dtype(T::DTYPE).variant($op::Variant::Ll);
                let options = options.batch_invariant(self.invariant);
                let options = self.wire.map_or(options.clone(), |wire| options.wire(wire));
                let options = if self.gelu { options.epilogue(Epilogue::Gelu) } else { options };
                if combines { options.combine(parts) } else { options }
            }};
        }
        Ok(match self.op {
            Op::ReduceScatter => plan!(reduce_scatter).plan(heap)?,
            _ if self.norm => plan!(all_reduce).rms_norm(EPSILON).plan(heap)?,
            _ => plan!(all_reduce).plan(heap)?,
        })
    }
}

/// Operator of a case.
enum Summing {
    All(AllReduce),
    Scattered(ReduceScatter),
}

impl Summing {
    fn new(heap: &Arc<SymmetricHeap>, plan: &Plan, op: Op) -> Result<Self> {
        Ok(match op {
            Op::ReduceScatter => Self::Scattered(ReduceScatter::new(heap, plan)?),
            _ => Self::All(AllReduce::new(heap, plan)?),
        })
    }

    fn run(&self, args: &CollectiveArgs, stream: &Stream) -> Result<()> {
        match self {
            Self::All(op) => op.run(args, stream)?,
            Self::Scattered(op) => op.run(args, stream)?,
        }
        Ok(())
    }
}

/// Operator and matrices of a case on one rank.
pub struct Combined<T: Element> {
    case: Case,
    heap: Arc<SymmetricHeap>,
    plan: Plan,
    op: Summing,
    plain: Summing,
    /// Input of the plain operator.
    whole: SymSlice<T>,
    parts: SymSlice<T>,
    weights: SymSlice<f32>,
    added: [SymSlice<T>; 2],
    output: SymSlice<T>,
    norm_weight: SymSlice<T>,
    normed: SymSlice<T>,
}

/// Rounds to an element of type `dtype`. Conversions of `half` from f64 ignore the last bits.
fn rounded(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::BF16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Bits of an element; all NaNs have one value.
fn bits<T: Element>(value: T) -> u64 {
    match value.to_f64() {
        value if value.is_nan() => u64::MAX,
        value => value.to_bits(),
    }
}

impl<T: Element> Combined<T> {
    /// Makes operator and memory; collective.
    ///
    /// # Errors
    /// Errors of planning, of making the operators and of allocation.
    pub fn new(heap: &Arc<SymmetricHeap>, case: Case) -> Result<Self> {
        let [m, n, parts] = case.shape;
        let (plan, plain) = (case.plan::<T>(heap, true)?, case.plan::<T>(heap, false)?);
        let rows = |cols: usize| heap.alloc::<T>(m * (cols + case.gap) + 1);
        Ok(Self {
            case,
            op: Summing::new(heap, &plan, case.op)?,
            plain: Summing::new(heap, &plain, case.op)?,
            whole: rows(n)?,
            parts: rows(parts * n)?,
            weights: heap.alloc(m * (parts + case.gap) + 1)?,
            added: [rows(n)?, rows(n)?],
            output: rows(n)?,
            norm_weight: rows(n)?,
            normed: rows(n)?,
            heap: heap.clone(),
            plan,
        })
    }

    fn matrix<E: Element>(&self, slice: SymSlice<E>, rows: usize, cols: usize) -> MatRef {
        MatRef::sym(slice, rows, cols).with_ld(cols + self.case.gap)
    }

    /// Number of rows of this rank's output in a call of `m` rows.
    fn own(&self, m: usize) -> std::ops::Range<usize> {
        match self.case.op {
            Op::ReduceScatter => self.plan.rows_of(self.heap.rank(), m),
            _ => 0..m,
        }
    }

    fn args_of(&self, m: usize, input: MatRef, added: &[MatRef]) -> CollectiveArgs {
        let n = self.case.shape[1];
        let mut added = added.iter().copied();
        let args = CollectiveArgs::new(input, self.matrix(self.place(), self.own(m).len(), n));
        let args = match self.case.norm {
            true => {
                let weight = self.matrix(self.norm_weight, 1, n);
                let norm = NormArgs::new(weight, self.matrix(self.normed, m, n));
                args.norm(added.next().map_or(norm, |residual| norm.residual(residual)))
            }
            false => args,
        };
        added.fold(args, |args, matrix| args.plus(matrix))
    }

    /// Memory of the output.
    fn place(&self) -> SymSlice<T> {
        if self.case.in_place { self.added[0] } else { self.output }
    }

    /// Arguments of a call of `m` rows.
    pub fn args(&self, m: usize) -> CollectiveArgs {
        let [_, n, parts] = self.case.shape;
        let added = self.added.map(|slice| self.matrix(slice, self.own(m).len(), n));
        self.args_of(m, self.matrix(self.parts, m, parts * n), &added[..self.case.added])
            .weights(self.matrix(self.weights, m, parts))
    }

    /// Enqueues a call.
    ///
    /// # Errors
    /// Errors of the operator.
    pub fn run(&self, args: &CollectiveArgs, stream: &Stream) -> Result<()> {
        self.op.run(args, stream)
    }

    /// Element of a rank's parts, and a rank's weight, in the call number `seed`.
    fn part(&self, seed: u64, rank: usize, at: usize) -> f32 {
        let value = T::from_f64(random_unit(seed, rank, at) * [1.0, 40.0, 900.0][at % 3]);
        match (at + rank) % 211 {
            3 if self.case.special => f32::INFINITY,
            5 if self.case.special => f32::NAN,
            7 if self.case.special => f32::NEG_INFINITY,
            11 if self.case.special => -0.0,
            _ => value.to_f64() as f32,
        }
    }
    fn weight(&self, seed: u64, rank: usize, at: usize) -> f32 {
        match (at + rank) % 37 {
            2 if self.case.special => f32::INFINITY,
            4 if self.case.special => 0.0,
            6 if self.case.special => -0.0,
            _ => random_unit(!seed, rank, at) as f32,
        }
    }
    /// Element of the added matrix `which`; rows are those of all ranks.
    fn summand(&self, seed: u64, which: usize, at: usize) -> f32 {
        T::from_f64(random_unit(seed ^ 0xadd, which, at) * 77.0).to_f64() as f32
    }

    /// Rows with gaps, whose element (row, col) is `value`; all else is NaN.
    fn write<E: Element>(
        &self,
        to: SymSlice<E>,
        (rows, cols): (usize, usize),
        value: impl Fn(usize, usize) -> f32,
    ) -> Result<()> {
        let mut all = vec![E::from_f64(f64::NAN); to.len()];
        for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
            all[row * (cols + self.case.gap) + col] = E::from_f64(value(row, col).into());
        }
        Ok(self.heap.write(to, &all)?)
    }

    /// Writes the operands of a call of `m` rows, whose numbers depend on `seed`.
    ///
    /// # Errors
    /// Errors of the copies.
    pub fn fill(&self, m: usize, seed: u64) -> Result<()> {
        let ([_, n, parts], rank, own) = (self.case.shape, self.heap.rank(), self.own(m));
        let at = |row, col| row * parts * n + col;
        self.write(self.parts, (m, parts * n), |row, col| self.part(seed, rank, at(row, col)))?;
        let weight = |row, part| self.weight(seed, rank, row * parts + part);
        self.write(self.weights, (m, parts), weight)?;
        self.write(self.output, (0, n), |_, _| 0.0)?;
        self.write(self.normed, (0, n), |_, _| 0.0)?;
        for (which, &slice) in self.added.iter().enumerate() {
            let value = |row, col| self.summand(seed, which, (own.start + row) * n + col);
            self.write(slice, (own.len(), n), value)?;
        }
        self.write(self.norm_weight, (1, n), |_, col| random_unit(9, 0, col) as f32)
    }

    /// Checks the results of a call of `m` rows with the operands of [`Self::fill`], which they may
    /// have replaced; collective.
    ///
    /// # Errors
    /// The first element that is wrong.
    pub fn check(&self, m: usize, seed: u64, stream: &Stream) -> Result<()> {
        let Case { gelu, norm, added, gap, special, wire, .. } = self.case;
        let ([_, n, parts], size, own) = (self.case.shape, self.heap.size(), self.own(m));
        let wire = wire.unwrap_or(T::DTYPE);
        let sent = |rank: usize, row: usize, col: usize| {
            let sum = (0..parts).fold(-0.0, |sum, part| {
                let value = self.part(seed, rank, (row * parts + part) * n + col);
                self.weight(seed, rank, row * parts + part).mul_add(value, sum)
            });
            rounded(wire, sum)
        };
        let expected = |row: usize, col: usize| {
            let sum = (0..size).fold(-0.0, |sum, rank| sum + sent(rank, row, col));
            let add = |sum, which| sum + self.summand(seed, which, row * n + col);
            T::from_f64(rounded(T::DTYPE, (0..added).fold(sum, add)).into())
        };
        let what = |what: &str| format!("{what} of {m} rows, {:?}, {size} ranks", self.case);
        let same = |name: &str, seen: &[T], wanted: &dyn Fn(usize, usize) -> T| {
            for (at, &value) in seen.iter().enumerate() {
                let (row, col) = (at / (n + gap), at % (n + gap));
                let inside = row < own.len() && col < n;
                let wanted = if inside { wanted(row, col) } else { T::from_f64(f64::NAN) };
                ensure!(
                    bits(value) == bits(wanted),
                    "{}: {} in ({row}, {col}) at {}, expected {}",
                    what(name),
                    value.to_f64(),
                    self.heap.rank(),
                    wanted.to_f64()
                );
            }
            Ok(())
        };
        let output = self.heap.read(self.place())?;
        let normed = self.heap.read(self.normed)?;
        let dense = |seen: &[T]| {
            Dense::from_fn(own.len(), n, |row, col| seen[row * (n + gap) + col].to_f64())
        };
        if !gelu {
            same("sum", &output, &|row, col| expected(own.start + row, col))?;
        }
        // The oracle rounds nothing to the wire type if there is one rank.
        if !special && size > 1 {
            let parts_of = |rank| self.contribution(m, seed, rank);
            let all: Vec<_> = (0..size).map(parts_of).collect();
            let options = Options::new(m, n, 0).dtype(T::DTYPE).wire(wire);
            let options = if gelu { options.epilogue(Epilogue::Gelu) } else { options };
            let task = Task { op: self.case.op, size, nodes: 1, m, options };
            let sum = Dense::from_fn(own.len(), n, |row, col| {
                let at = (own.start + row) * n + col;
                (0..added).map(|which| f64::from(self.summand(seed, which, at))).sum()
            });
            let rank = self.heap.rank();
            let expected = task.expected(rank, &all, None, None, (added > 0).then_some(&sum));
            let (wanted, allowed) = expected.allowed(false);
            compare(&what("sum"), (own.len(), n), &dense(&output).data, wanted, allowed)?;
            if norm {
                let weight =
                    Dense::from_fn(1, n, |_, col| T::from_f64(random_unit(9, 0, col)).to_f64());
                let expected = rms_norm(&dense(&output), &weight, EPSILON, T::DTYPE);
                let (wanted, allowed) = expected.allowed(false);
                compare(&what("norm"), (m, n), &dense(&normed).data, wanted, allowed)?;
            }
        }
        // Call of the plain operator on rows that were combined before. It adds one matrix at most, so
        // with two its input is the finished sum on rank 0, and -0.0 on the others.
        if gelu || wire != T::DTYPE || !norm && added > 0 {
            return Ok(());
        }
        self.fill(m, seed)?;
        let rank = self.heap.rank();
        let given = |row, col| match (added, rank) {
            (2, 0) => expected(row, col).to_f64() as f32,
            (2, _) => -0.0,
            _ => sent(rank, row, col),
        };
        self.write(self.whole, (m, n), given)?;
        let residual = self.matrix(self.added[0], m, n);
        let residual = if added == 1 { &[residual][..] } else { &[] };
        self.plain.run(&self.args_of(m, self.matrix(self.whole, m, n), residual), stream)?;
        stream.sync()?;
        let [sum, norms] = [self.place(), self.normed].map(|slice| self.heap.read(slice));
        let at = |row: usize, col: usize| row * (n + gap) + col;
        let sum = sum?;
        same("sum beside the plain operator", &output, &|row, col| sum[at(row, col)])?;
        let norms = norms?;
        same("norm beside the plain operator", &normed, &|row, col| norms[at(row, col)])
    }

    /// Sum of the weighted parts of a rank in f64. The magnitude covers the additional roundings: one
    /// for each part, and two of the added matrices.
    fn contribution(&self, m: usize, seed: u64, rank: usize) -> Part {
        let Case { shape: [_, n, parts], added, .. } = self.case;
        let rows = (0..m).map(|row| {
            let weight = |_, part| f64::from(self.weight(seed, rank, row * parts + part));
            let value =
                |part, col| f64::from(self.part(seed, rank, (row * parts + part) * n + col));
            product(&Dense::from_fn(1, parts, weight), &Dense::from_fn(parts, n, value))
        });
        let rows: Vec<_> = rows.collect();
        let value = Dense::stacked(rows.iter().map(|row| &row.value));
        let mut magnitude = Dense::stacked(rows.iter().map(|row| &row.magnitude));
        for (at, magnitude) in magnitude.data.iter_mut().enumerate() {
            let summands = (0..added).map(|which| self.summand(seed, which, at).abs());
            *magnitude = *magnitude * (1 + parts) as f64 + f64::from(summands.sum::<f32>());
        }
        Part { value, magnitude }
    }

    /// Calls of these numbers of rows, each checked; collective.
    ///
    /// # Errors
    /// The first element that is wrong, and errors of the calls.
    pub fn check_calls(&self, calls: &[usize]) -> Result<()> {
        let stream = self.heap.stream()?;
        for (seed, &m) in calls.iter().enumerate() {
            self.fill(m, seed as u64)?;
            self.run(&self.args(m), &stream)?;
            stream.sync()?;
            self.check(m, seed as u64, &stream)?;
        }
        Ok(())
    }
}
