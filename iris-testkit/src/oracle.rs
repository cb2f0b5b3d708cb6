//! Oracle: the expected result of every op, from a naive reference in f64, with bounds for rounding
//! errors.
//!
//! The oracle shares no code with the ops except names. The meaning of an op ([`Meaning`]), splits,
//! products and sums are implemented again, as simply as possible. All other facts that tests and
//! programs need about an op are derived from its meaning.

mod meaning;

use std::ops::Range;

use iris_heap::DType;
use iris_ops::{Epilogue, Op, OpRequest, Shard};

use crate::numeric::{Allowed, rounded, underflow, unit_roundoff};
use crate::options::Options;

pub use meaning::{Meaning, Product, Rows};

/// Row-major, contiguous matrix of f64.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Dense {
    /// Number of rows of the matrix.
    pub rows: usize,
    /// Number of columns of the matrix.
    pub cols: usize,
    /// Elements, row-major: `rows * cols` of them.
    pub data: Vec<f64>,
}

impl Dense {
    /// Makes the `rows` x `cols` matrix whose element (r, c) is `f(r, c)`.
    pub fn from_fn(rows: usize, cols: usize, f: impl Fn(usize, usize) -> f64) -> Self {
        let data = (0..rows * cols).map(|at| f(at / cols, at % cols)).collect();
        Self { rows, cols, data }
    }

    /// Element in row `row` and column `col`.
    pub fn at(&self, row: usize, col: usize) -> f64 {
        self.data[row * self.cols + col]
    }

    /// Copy of the rows in the range `rows`, as a matrix.
    pub fn some_rows(&self, rows: Range<usize>) -> Self {
        let data = self.data[rows.start * self.cols..rows.end * self.cols].to_vec();
        Self { rows: rows.len(), cols: self.cols, data }
    }

    /// Stacks matrices of equal width vertically.
    pub fn stacked<'a>(parts: impl Iterator<Item = &'a Dense>) -> Self {
        let mut all = Self::default();
        for part in parts {
            all.rows += part.rows;
            all.cols = all.cols.max(part.cols);
            all.data.extend_from_slice(&part.data);
        }
        all
    }

    /// Places matrices of equal height side by side.
    pub fn side_by_side(parts: &[&Dense]) -> Self {
        let rows = parts.first().map_or(0, |part| part.rows);
        let cols = parts.iter().map(|part| part.cols).sum();
        let mut data = Vec::with_capacity(rows * cols);
        for row in 0..rows {
            for part in parts {
                data.extend_from_slice(&part.data[row * part.cols..][..part.cols]);
            }
        }
        Self { rows, cols, data }
    }

    fn map(&self, f: impl Fn(f64) -> f64) -> Self {
        Self { data: self.data.iter().map(|&x| f(x)).collect(), ..*self }
    }
}

/// Range of `total` items that `rank` of `size` ranks owns; the first `total % size` ranks own one
/// item more.
pub fn split(total: usize, size: usize, rank: usize) -> Range<usize> {
    let len = |rank: usize| total / size + usize::from(rank < total % size);
    let start = (0..rank).map(len).sum();
    start..start + len(rank)
}

/// Contribution of one rank to an op: the product that it computes, or the data that it sends.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Part {
    /// Values that the rank contributes.
    pub value: Dense,
    /// Contribution computed from absolute values, such as |A| |B|, for error bounds.
    pub magnitude: Dense,
}

/// Parameters of a call on which its result depends.
#[derive(Clone, Debug)]
pub struct Task {
    /// Operator that is called.
    pub op: Op,
    /// Number of ranks that take part in the call.
    pub size: usize,
    /// Number of nodes that the ranks are on; sums between nodes are rounded to the type in which
    /// data is sent.
    pub nodes: usize,
    /// Number of rows of the call.
    pub m: usize,
    /// Options of the plan, with the largest `k` of all ranks.
    pub options: Options,
}

/// Expected output of one rank, with error bounds.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Number of rows of the output.
    pub rows: usize,
    /// Number of columns of the output.
    pub cols: usize,
    /// Elements of the result without any rounding, row-major.
    pub value: Vec<f64>,
    /// Result with each rank's partial rounded to the type in which it is sent, and the sum rounded
    /// to the output type. If all f32 sums are exact, this is the only right result. `None` if
    /// there is an epilogue, or if sums between nodes may be rounded.
    pub exact: Option<Vec<f64>>,
    /// Largest possible rounding error of each element, for any order of additions.
    pub bound: Vec<f64>,
    /// Expected error of each element if rounding errors are random and partly cancel.
    pub typical: Vec<f64>,
}

/// Product A B, with |A| |B| as the magnitude from which error bounds are computed.
pub fn product(a: &Dense, b: &Dense) -> Part {
    let multiply = |a: &Dense, b: &Dense| {
        let mut c = Dense { rows: a.rows, cols: b.cols, data: vec![0.0; a.rows * b.cols] };
        for row in 0..a.rows {
            for depth in 0..a.cols {
                let left = a.at(row, depth);
                let right = &b.data[depth * b.cols..][..b.cols];
                let sums = &mut c.data[row * b.cols..][..b.cols];
                sums.iter_mut().zip(right).for_each(|(sum, right)| *sum += left * right);
            }
        }
        c
    };
    Part { value: multiply(a, b), magnitude: multiply(&a.map(f64::abs), &b.map(f64::abs)) }
}

/// GELU: x / 2 * (1 + erf(x / sqrt 2)).
pub fn gelu(x: f64) -> f64 {
    x * 0.5 * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2))
}

/// Expected RMSNorm, in type `output`, of `rows`, which are already rounded to that type.
pub fn rms_norm(rows: &Dense, weight: &Dense, epsilon: f32, output: DType) -> Expected {
    let (cols, single) = (rows.cols, unit_roundoff(DType::F32));
    // Number of f32 roundings of an element, worst case and typical. Roundings of squares and of
    // their sum count half, because a square root halves a relative error. The constant 7 covers
    // the roundings of mean, root, quotient and two products.
    let (most, few) = (cols as f64 / 2.0 + 7.0, (cols as f64).sqrt() + 7.0);
    let mut all = Expected {
        rows: rows.rows,
        cols,
        value: Vec::new(),
        exact: None,
        bound: Vec::new(),
        typical: Vec::new(),
    };
    for row in 0..rows.rows {
        let squares: f64 = (0..cols).map(|col| rows.at(row, col).powi(2)).sum();
        let root = (squares / cols as f64 + f64::from(epsilon)).sqrt();
        for col in 0..cols {
            let value = rows.at(row, col) / root * weight.at(0, col);
            let error = |steps: f64| {
                1.01 * (steps * single + unit_roundoff(output)) * value.abs() + underflow(output)
            };
            all.value.push(value);
            all.bound.push(error(most));
            all.typical.push(error(few.min(most)));
        }
    }
    all
}

impl Task {
    fn meaning(&self) -> Meaning {
        Meaning::of(self.op)
    }

    /// Number of rows that `rank` has of a matrix whose rows are distributed as `rows` says.
    fn rows(&self, rows: Rows, rank: usize) -> usize {
        let own = split(self.m, self.size, rank).len();
        match rows {
            Rows::All => self.m,
            Rows::Own => own,
            Rows::Blocks => self.size * own,
            Rows::Root if rank == self.options.root => self.m,
            Rows::Shard if self.options.shard == Shard::Columns => self.m,
            Rows::Shard => own,
            Rows::Root | Rows::None => 0,
        }
    }

    /// Shapes (rows, columns) of A (or the message), B and C on `rank`; 0 x 0 for a matrix that the
    /// rank does not have. `self.options` must be the options of that rank.
    pub fn shapes(&self, rank: usize) -> [(usize, usize); 3] {
        let Meaning { product, gives, gets, .. } = self.meaning();
        let OpRequest { n, k, shard, .. } = *self.options;
        let shape = |rows, cols| match rows {
            Rows::None => (0, 0),
            Rows::Shard if shard == Shard::Columns => (self.m, split(k, self.size, rank).len()),
            _ => (self.rows(rows, rank), cols),
        };
        match product {
            Product::None => [shape(gives, n), (0, 0), shape(gets, n)],
            _ => [shape(gives, k), (k, n), shape(gets, n)],
        }
    }

    /// Origin of row `row` of C on `rank`: the rank that contributes the row, and the index of the
    /// row in that contribution. The rank is `None` if the row is a sum over all ranks.
    pub fn source(&self, rank: usize, row: usize) -> (Option<usize>, usize) {
        let Self { m, size, .. } = *self;
        let own = split(m, size, rank);
        match self.meaning() {
            Meaning { sums: true, gets: Rows::Own, .. } => (None, own.start + row),
            Meaning { sums: true, .. } => (None, row),
            Meaning { gets: Rows::Blocks, .. } => {
                (Some(row / own.len()), own.start + row % own.len())
            }
            Meaning { gives: Rows::Own | Rows::Shard, .. } => {
                let owner = (0..size).find(|&source| split(m, size, source).contains(&row));
                let owner = owner.unwrap_or(0);
                (Some(owner), row - split(m, size, owner).start)
            }
            Meaning { gives: Rows::Root, .. } => (Some(self.options.root), row),
            _ => (Some(rank), row),
        }
    }

    /// Number of rows of the contribution of rank `from` that rank `to` needs for its output.
    pub fn sent(&self, from: usize, to: usize) -> usize {
        let needed = |row: &usize| self.source(to, *row).0.is_none_or(|source| source == from);
        (0..self.rows(self.meaning().gets, to)).filter(needed).count()
    }

    /// Contributions of all ranks, in the order of ranks. `a` and `b` are the factors of this rank;
    /// `exchange` is an all-gather of one contribution per rank.
    ///
    /// # Errors
    /// Errors of `exchange`.
    pub fn contributions<E>(
        &self,
        (a, b): (&Dense, &Dense),
        exchange: impl Fn(&Part) -> Result<Vec<Part>, E>,
    ) -> Result<Vec<Part>, E> {
        exchange(&self.contribution(a, Some(b)))
    }

    /// Contribution of a rank whose factors are `a` and `b`. `b` is used only by an op that
    /// multiplies before it communicates.
    pub fn contribution(&self, a: &Dense, b: Option<&Dense>) -> Part {
        match (self.meaning().product, b) {
            (Product::First, Some(b)) => product(a, b),
            _ => Part { value: a.clone(), magnitude: a.map(f64::abs) },
        }
    }

    /// Expected output of `rank`, computed from the contributions of all ranks, `rank`'s B, the
    /// bias and the residual. B is used only if the product comes after the message. The residual
    /// is added after the epilogue.
    pub fn expected(
        &self,
        rank: usize,
        parts: &[Part],
        b: Option<&Dense>,
        bias: Option<&Dense>,
        residual: Option<&Dense>,
    ) -> Expected {
        let meaning = self.meaning();
        let sources: Vec<_> =
            (0..self.rows(meaning.gets, rank)).map(|row| self.source(rank, row)).collect();
        if meaning.sums {
            let rows: Vec<_> = sources.into_iter().map(|(_, row)| row).collect();
            return self.summed(parts, &rows, bias, residual);
        }
        let part = match self.options.shard {
            Shard::Columns if meaning.gives == Rows::Shard => {
                let values: Vec<_> = parts.iter().map(|part| &part.value).collect();
                Part { value: Dense::side_by_side(&values), magnitude: Dense::default() }
            }
            _ => {
                let rows = |of: fn(&Part) -> &Dense| {
                    let row = |&(source, row): &(Option<usize>, usize)| {
                        of(&parts[source.unwrap_or(rank)]).some_rows(row..row + 1)
                    };
                    Dense::stacked(sources.iter().map(row).collect::<Vec<_>>().iter())
                };
                Part { value: rows(|part| &part.value), magnitude: rows(|part| &part.magnitude) }
            }
        };
        let all: Vec<_> = (0..part.value.rows).collect();
        match meaning.product {
            Product::None => {
                let Dense { rows, cols, data } = part.value;
                let none = vec![0.0; data.len()];
                let (bound, typical) = (none.clone(), none);
                Expected { rows, cols, bound, typical, exact: Some(data.clone()), value: data }
            }
            Product::First => self.summed(&[part], &all, bias, residual),
            Product::Last => {
                let none = Dense::default();
                self.summed(&[product(&part.value, b.unwrap_or(&none))], &all, bias, residual)
            }
        }
    }

    /// Sum of the rows `rows` of all contributions, plus bias; then the epilogue; then plus the
    /// residual.
    fn summed(
        &self,
        parts: &[Part],
        rows: &[usize],
        bias: Option<&Dense>,
        residual: Option<&Dense>,
    ) -> Expected {
        let epilogue = self.options.epilogue;
        let (output, wire) = (self.options.output_dtype(), self.options.wire_dtype());
        let cols = parts.iter().map(|part| part.value.cols).max().unwrap_or(0);
        let len = rows.len() * cols;
        let depth = if self.meaning().product == Product::None { 0 } else { self.options.k };
        // Number of f32 roundings of an element: products and sums, the bias, and the last
        // rounding.
        let steps = (depth + parts.len() + 3) as f64;
        let travels = parts.len() > 1;
        // Number of times that a partial sum is rounded to the type in which it is sent: once by
        // its rank and, over several nodes, once after the sum of its node and once after each
        // addition of another node's sum.
        let roundings = if self.nodes > 1 { 1 + self.nodes } else { 1 };
        let single = unit_roundoff(DType::F32);
        let mut all = Expected {
            rows: rows.len(),
            cols,
            value: Vec::with_capacity(len),
            exact: (epilogue == Epilogue::None).then(|| Vec::with_capacity(len)),
            bound: Vec::with_capacity(len),
            typical: Vec::with_capacity(len),
        };
        let places = (0..rows.len()).flat_map(|at| (0..cols).map(move |col| (at, col)));
        for (at, col) in places {
            let row = rows[at];
            let residual = residual.map_or(0.0, |residual| residual.at(at, col));
            let bias = bias.map_or(0.0, |bias| bias.at(0, col));
            let values = parts.iter().map(|part| part.value.at(row, col));
            let sum = values.clone().sum::<f64>() + bias;
            let magnitude =
                parts.iter().map(|part| part.magnitude.at(row, col)).sum::<f64>() + bias.abs();
            let sizes: f64 = values.clone().map(f64::abs).sum();
            // Integer sums that are sent between nodes are not exact if they exceed the integers
            // that the sent type can represent.
            if self.nodes > 1 && sizes * unit_roundoff(wire) > 1.0 {
                all.exact = None;
            }
            let onto_wire = if travels {
                roundings as f64 * unit_roundoff(wire) * sizes
                    + parts.len() as f64 * underflow(wire)
            } else {
                0.0
            };
            let finished = if epilogue == Epilogue::Gelu { gelu(sum) } else { sum };
            let value = finished + residual;
            let error = |steps: f64| {
                // The factor 1.01 covers products of rounding errors, which this sum of first-order
                // terms lacks.
                let mut error = 1.01 * (steps * single * magnitude + onto_wire);
                if epilogue == Epilogue::Gelu {
                    // The slope of GELU is below 1.13; for negative arguments 1 + erf loses digits
                    // by cancellation.
                    error = 1.13 * error + 4.0 * single * sum.abs();
                }
                if residual != 0.0 {
                    error += 1.01 * single * (finished.abs() + residual.abs());
                }
                1.01 * (error + unit_roundoff(output) * (value.abs() + error)) + underflow(output)
            };
            all.value.push(value);
            all.bound.push(error(steps));
            all.typical.push(error(2.0 * steps.sqrt()).min(error(steps)));
            if let Some(exact) = &mut all.exact {
                let onto_wire = |value| if travels { rounded(wire, value) } else { value };
                let sum = values.map(onto_wire).sum::<f64>() + bias + residual;
                exact.push(rounded(output, sum));
            }
        }
        all
    }
}

impl Expected {
    /// Expected values for a comparison, and the allowed deviation. If `exact_sums` is true and
    /// [`Expected::exact`] is known, no deviation is allowed. Otherwise deviations within the
    /// bounds of rounding errors are allowed.
    pub fn allowed(&self, exact_sums: bool) -> (&[f64], Allowed<'_>) {
        match &self.exact {
            Some(exact) if exact_sums => (exact, Allowed::Exact),
            _ => (&self.value, Allowed::Within { bound: &self.bound, typical: &self.typical }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::compare;

    fn random(rows: usize, cols: usize, seed: u64) -> Dense {
        Dense::from_fn(rows, cols, |r, c| iris_heap::random_unit(seed, 0, r * cols + c))
    }

    fn task(op: Op, size: usize, m: usize, options: Options) -> Task {
        Task { op, size, nodes: 1, m, options }
    }

    #[test]
    fn a_product_by_hand() {
        let a = Dense { rows: 2, cols: 2, data: vec![1.0, -2.0, 3.0, 4.0] };
        let b = Dense { rows: 2, cols: 1, data: vec![5.0, 6.0] };
        let c = product(&a, &b);
        assert_eq!((c.value.data, c.magnitude.data), (vec![-7.0, 39.0], vec![17.0, 39.0]));
        assert!((gelu(1.0) - 0.841_344_746_068_542_9).abs() < 1e-15);
    }

    /// Tests an RMSNorm by hand, and that the bounds refuse an RMSNorm with another epsilon, and an
    /// RMSNorm whose squares come from unrounded rows.
    #[test]
    fn a_norm_by_hand_and_the_bounds_of_one() {
        let rows = Dense { rows: 1, cols: 2, data: vec![3.0, -4.0] };
        let weight = Dense { rows: 1, cols: 2, data: vec![1.0, 2.0] };
        let by_hand = rms_norm(&rows, &weight, 0.5, DType::F32);
        let root = 13f64.sqrt();
        assert_eq!(by_hand.value, [3.0 / root, -4.0 / root * 2.0]);
        let high = random(4, 256, 3).map(|x| 5.0 * x + 1.0);
        let rows = high.map(|x| rounded(DType::BF16, x));
        let weight = random(1, 256, 4).map(|x| x + 2.0);
        let expected = rms_norm(&rows, &weight, 1e-2, DType::F32);
        let (wanted, allowed) = expected.allowed(true);
        let verdict = |of: &Dense, epsilon| {
            let seen = rms_norm(of, &weight, epsilon, DType::F32).value;
            let seen: Vec<_> = seen.into_iter().map(|x| rounded(DType::F32, x)).collect();
            compare("normed", (4, 256), &seen, wanted, allowed)
        };
        verdict(&rows, 1e-2).unwrap();
        verdict(&rows, 1e-6).unwrap_err();
        verdict(&high, 1e-2).unwrap_err();
    }

    #[test]
    fn parts_go_where_the_op_says() {
        let parts: Vec<_> = (0..2)
            .map(|rank| {
                let value = Dense::from_fn(3, 1, |r, _| (10 * rank + r) as f64);
                Part { magnitude: value.clone(), value }
            })
            .collect();
        let at = |op, rank| {
            let options = Options::new(3, 1, 0).root(1);
            task(op, 2, 3, options).expected(rank, &parts, None, None, None).exact.unwrap()
        };
        assert_eq!(at(Op::AllReduce, 0), [10.0, 12.0, 14.0]);
        assert_eq!(at(Op::ReduceScatter, 0), [10.0, 12.0]);
        assert_eq!(at(Op::ReduceScatter, 1), [14.0]);
        assert_eq!(at(Op::AllToAll, 0), [0.0, 1.0, 10.0, 11.0]);
        assert_eq!(at(Op::AllToAll, 1), [2.0, 12.0]);
        assert_eq!(at(Op::Broadcast, 0), [10.0, 11.0, 12.0]);
    }

    /// Tests that the bounds refuse sums that are accumulated in the output type, and accept sums
    /// that are accumulated in f32.
    #[test]
    fn the_bounds_tell_accumulating_in_bf16_from_accumulating_in_f32() {
        let (m, n, k) = (16, 16, 256);
        let low = |x: f64| rounded(DType::BF16, x);
        let (a, b) = (random(m, k, 1).map(low), random(k, n, 2).map(low));
        let options = Options::new(m, n, k).dtype(DType::BF16);
        let task = task(Op::Matmul, 1, m, options);
        let expected = task.expected(0, &[task.contribution(&a, Some(&b))], None, None, None);
        let by = |step: fn(f64) -> f64| {
            Dense::from_fn(m, n, |r, c| {
                let sum = (0..k).fold(0.0, |sum, d| step(sum + a.at(r, d) * b.at(d, c)));
                low(sum)
            })
        };
        let (wanted, allowed) = expected.allowed(false);
        let verdict = |c: Dense| compare("c", (m, n), &c.data, wanted, allowed);
        let good = verdict(by(|sum| rounded(DType::F32, sum))).unwrap();
        assert!(good.relative < 4e-3, "{good:?}");
        verdict(by(|sum| rounded(DType::BF16, sum))).unwrap_err();
    }
}
