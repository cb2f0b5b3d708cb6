//! Description of a matrix product for a GEMM library, and the library's column-major view of it.

use std::fmt;

use iris_heap::DType;

/// Layout of a matrix in memory: element type, storage order and stride.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Layout {
    /// Type of a matrix element.
    pub dtype: DType,
    /// Whether the matrix is column-major: element (r, c) is `c * ld + r` elements after element
    /// (0, 0). Otherwise the matrix is row-major: `r * ld + c` elements.
    pub transposed: bool,
    /// Leading dimension in elements: the stride between rows, or between columns if column-major.
    pub ld: u64,
}

/// GEMM problem: C (m x n) = A (m x k) B (k x n), optionally plus an addend (m x n), with sums in
/// f32.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Problem {
    /// Values of m, n and k.
    pub shape: [usize; 3],
    /// Layout of A (m x k).
    pub a: Layout,
    /// Layout of B (k x n).
    pub b: Layout,
    /// Layout of C (m x n).
    pub c: Layout,
    /// Whether a bias, n elements of C's type, is added to every row.
    pub bias: bool,
    /// Whether sums stay f32 until they are rounded once to C's type. Otherwise a library may split
    /// the depth and add partial results that are already rounded.
    pub rounds_once: bool,
    /// Leading dimension of the addend; `None` if the problem has no addend. The addend has C's
    /// type and storage order, and may be C itself.
    pub addend: Option<u64>,
    /// Minimum alignment in bytes of all addresses of a call.
    pub alignment: u32,
    /// Maximum number of bytes of workspace that an algorithm may use.
    pub workspace: u64,
}

/// Device addresses of the matrices and of the workspace of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Addresses {
    /// Address of matrix A.
    pub a: u64,
    /// Address of matrix B.
    pub b: u64,
    /// Address of matrix C.
    pub c: u64,
    /// Address of the bias, if the problem has one.
    pub bias: u64,
    /// Address of the addend, if the problem has one.
    pub addend: u64,
    /// Address of the workspace, aligned to 256 bytes; its size is [`Problem::workspace`].
    pub workspace: u64,
}

/// Matrix as the column-major library sees it in memory: `rows` x `cols` elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stored {
    pub(super) dtype: DType,
    /// Whether the factor of the product is the transpose of the matrix in memory.
    pub(super) transpose: bool,
    pub(super) rows: u64,
    pub(super) cols: u64,
    pub(super) ld: u64,
}

/// Problem as a column-major library sees it: `result` = `left` x `right`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ByColumns {
    pub(super) left: Stored,
    pub(super) right: Stored,
    pub(super) result: Stored,
    /// Matrix that is added to the result; `None` if there is none.
    pub(super) addend: Option<Stored>,
    /// Whether `left` is B and `right` is A. This is so for a row-major C, because it is the
    /// transpose of a column-major matrix, and (A B)' = B' A'.
    pub(super) swapped: bool,
}

impl Layout {
    /// Row-major layout with leading dimension `ld` in elements.
    pub fn rows(dtype: DType, ld: usize) -> Layout {
        Layout { dtype, transposed: false, ld: ld as u64 }
    }

    /// Column-major layout with leading dimension `ld` in elements.
    pub fn columns(dtype: DType, ld: usize) -> Layout {
        Layout { dtype, transposed: true, ld: ld as u64 }
    }

    /// Column-major view of this `rows` x `cols` matrix, or of its transpose if `flipped`.
    fn stored(self, rows: usize, cols: usize, flipped: bool) -> Stored {
        // In memory, a row-major matrix equals the transpose of a column-major matrix.
        let (rows, cols) = if self.transposed { (rows, cols) } else { (cols, rows) };
        Stored {
            dtype: self.dtype,
            transpose: self.transposed == flipped,
            rows: rows as u64,
            cols: cols as u64,
            // For a matrix with a single column the stride is never used, but the library requires
            // a stride of at least the number of rows.
            ld: self.ld.max(rows as u64),
        }
    }
}

impl Problem {
    pub(super) fn by_columns(&self) -> ByColumns {
        let [m, n, k] = self.shape;
        let swapped = !self.c.transposed;
        let (a, b) = (self.a.stored(m, k, swapped), self.b.stored(k, n, swapped));
        let (left, right) = if swapped { (b, a) } else { (a, b) };
        let result = Stored { transpose: false, ..self.c.stored(m, n, swapped) };
        let addend = self.addend.map(|ld| Stored { ld: ld.max(result.rows), ..result });
        ByColumns { left, right, result, addend, swapped }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [m, n, k] = self.shape;
        write!(f, "{m} x {n} x {k}")?;
        for (name, layout) in [("A", self.a), ("B", self.b), ("C", self.c)] {
            let order = if layout.transposed { "column" } else { "row" };
            write!(f, ", {name} {} {order}-major, ld {}", layout.dtype, layout.ld)?;
        }
        if self.bias {
            write!(f, ", bias")?;
        }
        if let Some(ld) = self.addend {
            write!(f, ", addend with ld {ld}")?;
        }
        let Problem { alignment, workspace, .. } = self;
        write!(f, ", aligned to {alignment} bytes, workspace of {workspace} bytes")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reference product over matrices as a column-major GEMM library sees them.
    fn multiply(seen: &ByColumns, [left, right, addend]: [&[i64]; 3], result: &mut [i64]) {
        let at = |s: &Stored, from: &[i64], row: u64, col: u64| {
            let (row, col) = if s.transpose { (col, row) } else { (row, col) };
            assert!(row < s.rows && col < s.cols && s.rows <= s.ld);
            from[(col * s.ld + row) as usize]
        };
        let depth = if seen.left.transpose { seen.left.rows } else { seen.left.cols };
        for row in 0..seen.result.rows {
            for col in 0..seen.result.cols {
                let terms = (0..depth)
                    .map(|d| at(&seen.left, left, row, d) * at(&seen.right, right, d, col));
                let more = seen.addend.map_or(0, |it| at(&it, addend, row, col));
                result[(col * seen.result.ld + row) as usize] = terms.sum::<i64>() + more;
            }
        }
    }

    #[test]
    fn a_library_of_columns_finds_the_product_in_every_layout() {
        let [m, n, k] = [3, 4, 5];
        for bits in 0..16 {
            let layout = |bit: u32, rows: usize, cols: usize| match bits >> bit & 1 {
                0 => Layout::rows(DType::F32, cols + 2),
                _ => Layout::columns(DType::F32, rows + 3),
            };
            let at = |l: &Layout, r: usize, c: usize| match l.transposed {
                true => c * l.ld as usize + r,
                false => r * l.ld as usize + c,
            };
            let (a, b, c) = (layout(0, m, k), layout(1, k, n), layout(2, m, n));
            let fill = |l: &Layout, rows: usize, cols: usize, by: i64| {
                let mut all = vec![1 << 40; 64];
                for row in 0..rows {
                    for col in 0..cols {
                        all[at(l, row, col)] = (row * cols + col) as i64 * by % 11 - 5;
                    }
                }
                all
            };
            let (x, y, mut z) = (fill(&a, m, k, 7), fill(&b, k, n, 3), vec![i64::MAX; 64]);
            let adds = bits >> 3 & 1 == 1;
            let addend = Layout { ld: c.ld + 2, ..c };
            let w = fill(&addend, m, n, 2);
            let problem = Problem {
                shape: [m, n, k],
                a,
                b,
                c,
                bias: false,
                rounds_once: true,
                addend: adds.then_some(addend.ld),
                alignment: 16,
                workspace: 0,
            };
            let seen = problem.by_columns();
            let (left, right) = if seen.swapped { (&y, &x) } else { (&x, &y) };
            multiply(&seen, [left, right, &w], &mut z);
            for row in 0..m {
                for col in 0..n {
                    let sum: i64 = (0..k).map(|d| x[at(&a, row, d)] * y[at(&b, d, col)]).sum();
                    let more = if adds { w[at(&addend, row, col)] } else { 0 };
                    assert_eq!(z[at(&c, row, col)], sum + more, "({row}, {col}) of {problem}");
                }
            }
            assert_eq!(z.iter().filter(|&&it| it != i64::MAX).count(), m * n, "{problem}");
        }
    }

    #[test]
    fn a_problem_says_what_it_is() {
        let problem = Problem {
            shape: [8, 16, 24],
            a: Layout::rows(DType::BF16, 32),
            b: Layout::columns(DType::BF16, 24),
            c: Layout::rows(DType::F32, 16),
            bias: true,
            rounds_once: true,
            addend: Some(24),
            alignment: 16,
            workspace: 1024,
        };
        let expected = "8 x 16 x 24, A bf16 row-major, ld 32, B bf16 column-major, ld 24, C f32 row-major, \
                        ld 16, bias, addend with ld 24, aligned to 16 bytes, workspace of 1024 bytes";
        assert_eq!(problem.to_string(), expected);
    }
}
