//! Shapes of one rank's matrices in a call.

use super::Plan;
use crate::op_row::{Dims, Part};
use crate::options::Shard;

/// Numbers of rows and columns of one rank's matrices in a call; 0 x 0 for a matrix that the rank
/// does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Shapes {
    /// Shape of A, or of the input.
    pub a: (usize, usize),
    /// Shape of B; `None` for an operator without a matrix product.
    pub b: Option<(usize, usize)>,
    /// Shape of C, or of the output.
    pub c: (usize, usize),
}

impl Plan {
    /// Shapes of this rank's matrices in a call of `size` rows. For a message of elements, `size`
    /// is the number of elements of a part, and each part is a row of the result.
    ///
    /// ```
    /// use iris_ops::{Topology, matmul_reduce_scatter};
    /// let plan = matmul_reduce_scatter::Options::new(512, 8192, 3584).plan(Topology::new(0, 2))?;
    /// let shapes = plan.shapes(101); // of which rank 0 owns 51
    /// assert_eq!((shapes.a, shapes.b), ((101, 3584), Some((3584, 8192))));
    /// assert_eq!(shapes.c, (51, 8192));
    /// # anyhow::Ok(())
    /// ```
    pub fn shapes(&self, size: usize) -> Shapes {
        match self.request.elements {
            true => self.shapes_of(self.request.m, size, self.request.root),
            false => self.shapes_of(size, self.request.n, self.request.root),
        }
    }

    /// Shapes of this rank's matrices in a call whose whole product or message is `m` x `n`, with
    /// root `root`.
    pub(crate) fn shapes_of(&self, m: usize, n: usize, root: usize) -> Shapes {
        let (rank, k) = (self.ranks.rank, self.request.k);
        let Dims { a, b, c } = (self.row().dims)(n, k);
        let own = |len: usize| self.rows_of(rank, len).len();
        let shape = |part: Part, cols: usize| match part {
            Part::All => (m, cols),
            Part::Root if root == rank => (m, cols),
            Part::Own => (own(m), cols),
            Part::Blocks => (self.ranks.size * own(m), cols),
            Part::Shard => match self.request.shard {
                Shard::Rows => (own(m), cols),
                Shard::Columns => (m, own(cols)),
            },
            Part::Root | Part::None => (0, 0),
        };
        Shapes { a: shape(self.row().a, a), b, c: shape(self.row().c, c) }
    }
}
