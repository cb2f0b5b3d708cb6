//! Choice of a GEMM library's algorithms for the calls of one operator, ahead of the calls. Calls
//! differ in the number of rows, in layouts and alignment, and in whether a matrix is added to the
//! product.

#![allow(unsafe_code, reason = "a product is enqueued on addresses that the caller vouches for")]

use std::sync::{Arc, Mutex, PoisonError};

use iris_heap::DType;

use super::blas::{Algorithm, Multiplier, Product};
use super::problem::{Addresses, Layout, Problem};
use super::{Error, Result};
use crate::args::{Matrix, OpArgs, dtype_code};
use crate::lru_cache::LruCache;

/// Products by the vendor's library for all calls of an operator with up to `most` rows.
///
/// The heuristic is queried once, when this value is made: for each power of two of rows, for A and
/// B row-major and column-major, for alignment to 16 bytes or to an element only, and, if aligned,
/// with and without a bias and an addend. With a library that rejects unsuitable algorithms, a call
/// uses the algorithm of the next higher power of two, so the bits of its result also depend on the
/// plan. With another library (hipBLASLt) the heuristic is queried for the maximum number of rows
/// only, to learn whether such products are supported. The first call of a problem then queries the
/// heuristic for that problem, and later calls reuse the answer.
///
/// The first call of a problem describes it to the library. Calls of the [`Prepared::PRODUCTS`]
/// most recent problems reuse description and algorithm, and allocate nothing.
#[derive(Debug)]
pub struct Prepared {
    of: Arc<Multiplier>,
    most: usize,
    shape: [usize; 2],
    dtype: DType,
    output: DType,
    workspace: u64,
    algorithms: Vec<Option<Algorithm>>,
    /// Products of recently called problems; the value `None` marks a problem that the library does
    /// not support.
    products: Mutex<LruCache<Problem, Option<Product>>>,
}

/// Calls are grouped into buckets by their number of rows. The first bucket has calls of one row;
/// this is the maximum number of rows of the second bucket.
const LEAST_ROWS: usize = 16;

/// Properties of a call, apart from its number of rows, on which the algorithm depends: whether A
/// and B are column-major (`a`, `b`), whether a bias or an addend is added to the product, and
/// whether all matrices are aligned to 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct CallForm {
    a: bool,
    b: bool,
    bias: bool,
    addend: bool,
    aligned: bool,
}

impl CallForm {
    const COUNT: usize = 32;

    fn of(index: usize) -> CallForm {
        let bit = |bit: usize| index >> bit & 1 == 1;
        CallForm { a: bit(0), b: bit(1), bias: bit(2), addend: bit(3), aligned: bit(4) }
    }

    fn index(self) -> usize {
        let bits = [self.a, self.b, self.bias, self.addend, self.aligned];
        bits.into_iter().rev().fold(0, |all, bit| all << 1 | usize::from(bit))
    }
}

impl Prepared {
    /// Bytes of workspace that the library's products may use; 32 MiB are enough on GPUs of compute
    /// capability 9.0.
    pub const WORKSPACE: u64 = 32 << 20;

    /// Numbers of rows, up to `most`, that stand for all: the smallest and the largest number of rows
    /// for each algorithm.
    pub fn rows_to_compare(most: usize) -> Vec<usize> {
        let ends = |bucket: usize| {
            let before = bucket.checked_sub(1).map_or(0, |it| rows_of(it, usize::MAX));
            [before + 1, rows_of(bucket, usize::MAX)]
        };
        let mut rows: Vec<_> = (0..=bucket_of(most, most)).flat_map(ends).collect();
        rows.dedup();
        rows.retain(|&it| it <= most);
        rows
    }

    /// Number of problems whose descriptions and algorithms are kept. The least recently called
    /// problem is evicted.
    pub const PRODUCTS: usize = 64;

    /// Prepares C = A B. C has up to `shape[0]` rows, `shape[1]` columns and type `output`; the
    /// depth is `shape[2]`; A and B have type `dtype`. The device must be current.
    ///
    /// # Errors
    /// [`Error::NoAlgorithm`] if the library has no algorithm even for aligned matrices;
    /// [`Error::Call`].
    pub fn new(
        of: Multiplier,
        shape: [usize; 3],
        (dtype, output): (DType, DType),
        workspace: u64,
    ) -> Result<Prepared> {
        Self::of_calls(of, shape, (dtype, output), workspace, (shape[0], &|_, _| true))
    }

    /// Prepares C = A B, of one type, without a workspace and without addends, for calls whose algorithm
    /// was chosen for at most `rows` rows. The algorithm does not depend on `shape[0]`. If the library
    /// does not reject unsuitable algorithms, it can do no call.
    ///
    /// # Errors
    /// Errors of [`Prepared::new`].
    pub fn with_one_set_of_bits(
        of: Multiplier,
        shape: [usize; 3],
        dtype: DType,
        rows: usize,
    ) -> Result<Prepared> {
        let refuses = of.dialect().refuses;
        let is_wanted = |form: CallForm, asked: usize| {
            refuses && form.aligned && !form.a && !form.addend && asked <= rows
        };
        Self::of_calls(of, shape, (dtype, dtype), 0, (usize::MAX, &is_wanted))
    }

    /// Prepares the calls for whose form and number of rows `is_wanted` is true. The heuristic is
    /// queried for at most `most_asked` rows.
    fn of_calls(
        of: Multiplier,
        shape: [usize; 3],
        (dtype, output): (DType, DType),
        workspace: u64,
        (most_asked, is_wanted): (usize, &dyn Fn(CallForm, usize) -> bool),
    ) -> Result<Prepared> {
        let [most, n, k] = shape;
        let mut new = Prepared {
            of: Arc::new(of),
            most,
            shape: [n, k],
            dtype,
            output,
            workspace,
            algorithms: Vec::new(),
            products: Mutex::new(LruCache::new(Prepared::PRODUCTS)),
        };
        let mut refused = None;
        let last = bucket_of(most, most);
        let first = if new.of.dialect().refuses { 0 } else { last };
        for bucket in first..=last {
            for form in (0..CallForm::COUNT).map(CallForm::of) {
                // If rows are not whole vectors of 8 elements, the library's algorithms round the
                // product before they add the bias. This was seen with unaligned rows, and with 45
                // columns of bf16. For an addend the same is assumed.
                let whole = [n, k].iter().all(|it| it.is_multiple_of(8));
                let adds = form.bias || form.addend;
                let rows = rows_of(bucket, most_asked);
                if adds && !(form.aligned && (whole || output == DType::F32))
                    || !is_wanted(form, rows)
                {
                    new.algorithms.push(None);
                    continue;
                }
                let problem = new.problem(rows, form);
                let algorithm = match new.of.algorithms(&problem, 1) {
                    Ok(found) => found.first().copied(),
                    Err(error @ Error::NoAlgorithm { .. }) => {
                        refused = refused.or(Some(error));
                        None
                    }
                    Err(error) => return Err(error),
                };
                new.algorithms.push(algorithm);
            }
        }
        match refused {
            Some(error) if new.algorithms.iter().all(Option::is_none) => Err(error),
            _ => Ok(new),
        }
    }

    /// Name and version of the library. Together with the device, they determine the bits of
    /// results.
    pub fn library(&self) -> String {
        self.of.title()
    }

    /// Returns the description of the product of a call with `m` rows and the properties `form`.
    /// Leading dimensions are those of contiguous matrices, rounded up to 16 bytes if
    /// `form.aligned`.
    fn problem(&self, m: usize, form: CallForm) -> Problem {
        let [n, k] = self.shape;
        let size = self.dtype.size();
        let ld = |len: usize, size: usize| match form.aligned {
            true => len.next_multiple_of(16 / size),
            false => len,
        };
        let factor = |columns: bool, rows: usize, cols: usize| Layout {
            dtype: self.dtype,
            transposed: columns,
            ld: ld(if columns { rows } else { cols }, size) as u64,
        };
        let c = Layout::rows(self.output, ld(n, self.output.size()));
        Problem {
            shape: [m, n, k],
            a: factor(form.a, m, k),
            b: factor(form.b, k, n),
            c,
            bias: form.bias,
            rounds_once: true,
            addend: form.addend.then_some(c.ld),
            alignment: if form.aligned { 16 } else { size.min(self.output.size()) as u32 },
            workspace: self.workspace,
        }
    }

    /// Returns the description of a call's product and an algorithm for it; `None` if the library
    /// cannot do the call. It cannot if there is an empty matrix, an epilogue, a column-major C, or
    /// an addend whose shape or type differs from C's.
    fn fitting(&self, args: &OpArgs, addend: Option<&Matrix>) -> Option<(Problem, &Algorithm)> {
        let OpArgs { a, b, c, bias, m, n, k, epilogue, .. } = *args;
        let (rows, [of_n, of_k]) = (m as usize, self.shape);
        let code = |dtype| dtype_code(dtype).unwrap_or(u32::MAX);
        let (factor, result) = (code(self.dtype), code(self.output));
        let known = a.dtype == factor && b.dtype == factor && c.dtype == result;
        let fits = known
            && epilogue == 0
            && (1..=self.most).contains(&rows)
            && [n as usize, k as usize] == [of_n, of_k]
            && of_n > 0
            && of_k > 0
            && c.transposed == 0;
        let has_bias = bias.address != 0;
        let plain_bias = bias.dtype == result && (bias.transposed == 0 || bias.ld == 1);
        let like_c = |it: &Matrix| {
            it.address != 0
                && [it.rows, it.cols, it.dtype, it.transposed] == [m, n, result, 0]
                && (rows == 1 || it.ld >= u64::from(n))
        };
        if !fits || has_bias && !plain_bias || !addend.is_none_or(like_c) {
            return None;
        }
        // For a matrix with a single row (or column) the leading dimension is irrelevant.
        let apart = |matrix: &Matrix| match matrix.transposed {
            0 => (matrix.rows > 1).then_some(matrix.ld),
            _ => (matrix.cols > 1).then_some(matrix.ld),
        };
        let aligned = |matrix: &Matrix, dtype: DType| {
            let step = apart(matrix).unwrap_or(0) * dtype.size() as u64;
            (matrix.address | step).is_multiple_of(16)
        };
        let form = CallForm {
            a: a.transposed != 0,
            b: b.transposed != 0,
            bias: has_bias,
            addend: addend.is_some(),
            aligned: aligned(&a, self.dtype)
                && aligned(&b, self.dtype)
                && aligned(&c, self.output)
                && (!has_bias || bias.address.is_multiple_of(16))
                && addend.is_none_or(|it| aligned(it, self.output)),
        };
        let bucket = if self.of.dialect().refuses { bucket_of(rows, self.most) } else { 0 };
        let at = bucket * CallForm::COUNT + form.index();
        let algorithm = self.algorithms.get(at)?.as_ref()?;
        let mut problem = self.problem(rows, form);
        for (layout, matrix) in [(&mut problem.a, &a), (&mut problem.b, &b), (&mut problem.c, &c)] {
            layout.ld = apart(matrix).unwrap_or(layout.ld);
        }
        problem.addend = addend.and_then(apart).or(problem.addend);
        Some((problem, algorithm))
    }

    /// Whether the library can do this call, as far as the heuristic was queried. If `addend` is
    /// given: whether the library can also add that matrix to the product.
    pub fn fits(&self, args: &OpArgs, addend: Option<&Matrix>) -> bool {
        self.fitting(args, addend).is_some()
    }

    /// Enqueues the product of a call, and adds `addend` if given. Returns false if the library
    /// cannot do the call.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// The matrices in `args`, the addend and the workspace are on the device. They live until the
    /// stream has finished the product, and every replay of a graph that captured the product.
    pub unsafe fn enqueue(
        &self,
        args: &OpArgs,
        addend: Option<&Matrix>,
        workspace: u64,
        stream: u64,
    ) -> Result<bool> {
        let Some((problem, named)) = self.fitting(args, addend) else { return Ok(false) };
        let OpArgs { a, b, c, bias, .. } = args;
        let [a, b, c, bias] = [a, b, c, bias].map(|it| it.address);
        let addend = addend.map_or(0, |it| it.address);
        let at = Addresses { a, b, c, bias, addend, workspace };
        let mut products = self.products.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = products.get_or_make(problem, || self.product(problem, *named))?;
        let Some(product) = kept else { return Ok(false) };
        let dialect = self.of.dialect();
        // SAFETY: the caller guarantees that the addresses are valid and the stream is alive, as
        // `Product::enqueue` requires.
        match unsafe { product.enqueue(at, stream) } {
            // The library refuses the call: the algorithm was chosen for more rows and does not fit
            // this number of rows.
            Err(Error::Call { code, .. }) if dialect.refuses && code == dialect.not_supported => {
                *kept = None;
                Ok(false)
            }
            outcome => outcome.map(|()| true),
        }
    }

    /// Describes a product to the library and chooses its algorithm; `None` if the library cannot
    /// do it. If the library rejects unsuitable algorithms, the product uses `named`, the algorithm
    /// chosen for its bucket of rows. Otherwise the heuristic chooses an algorithm for this
    /// product.
    fn product(&self, problem: Problem, named: Algorithm) -> Result<Option<Product>> {
        let made = match self.of.dialect().refuses {
            true => Product::by(named, &self.of, problem),
            false => Product::new(&self.of, problem),
        };
        match made {
            Err(Error::NoAlgorithm { .. }) => Ok(None),
            made => made.map(Some),
        }
    }
}

/// Returns the bucket of a number of rows. Bucket 0 has 1 row, which libraries multiply
/// differently. Bucket 1 has up to `LEAST_ROWS` rows. Each further bucket has up to twice as many
/// rows as the previous bucket, limited by `most`.
fn bucket_of(rows: usize, most: usize) -> usize {
    match rows.min(most) {
        0 | 1 => 0,
        rows => 1 + rows.div_ceil(LEAST_ROWS).next_power_of_two().trailing_zeros() as usize,
    }
}

/// Maximum number of rows of the calls in bucket number `bucket`.
fn rows_of(bucket: usize, most: usize) -> usize {
    match bucket {
        0 => 1,
        _ => (LEAST_ROWS << (bucket - 1)).min(most),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_has_rows_up_to_its_most() {
        for most in [1, 15, 16, 17, 100, 128, 8191] {
            let last = bucket_of(most, most);
            assert_eq!(rows_of(last, most), most);
            for rows in 1..=most {
                let bucket = bucket_of(rows, most);
                assert!(bucket <= last && rows <= rows_of(bucket, most), "{rows} of {most}");
                assert!(bucket == 0 || rows > rows_of(bucket - 1, most), "{rows} of {most}");
            }
        }
    }

    #[test]
    fn the_ends_of_each_bucket_are_compared() {
        assert_eq!(Prepared::rows_to_compare(64), [1, 2, 16, 17, 32, 33, 64]);
        assert_eq!(Prepared::rows_to_compare(60), [1, 2, 16, 17, 32, 33]);
    }

    #[test]
    fn a_call_form_has_an_index_of_its_own() {
        for index in 0..CallForm::COUNT {
            assert_eq!(CallForm::of(index).index(), index);
        }
    }
}
