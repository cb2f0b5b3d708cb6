//! Workspace areas: intermediate matrices that the calls of a program keep in the workspace, after
//! the part that the GEMM library uses.
//!
//! The steps of a program determine its areas: for example, a GEMM that reads the gathered A needs
//! [`Area::Gathered`]. The areas follow one another in the order of [`Area`].

use std::fmt;

use iris_heap::DType;

use super::{Gemm, KernelOperands, Program, Transfer, Work};
use crate::args::{Matrix, OpArgs, dtype_code, element_bytes};

/// Row padding: a row of a workspace matrix occupies a multiple of this number of elements, so that
/// it consists of whole vectors.
const LINE: u64 = 8;

vocabulary! {
    /// Intermediate matrix that a program keeps in the workspace of a call.
    Area {
        /// Matrix A, gathered from the shards of all ranks.
        Gathered = "the gathered A",
        /// This rank's partial product, `m` x `n`, without bias, epilogue and residual.
        Partial = "the partial",
        /// Blocks of partial products, one per rank, with the rows that this rank owns. Each block
        /// has room for the largest share of rows of any rank.
        Blocks = "blocks of partials",
        /// Sums of all rows, each received from the rank that added it up.
        Sums = "the sums of all ranks",
        /// Rows of C received from all ranks.
        Rows = "the rows of C of all ranks",
    }
}

const ALL: [Area; 5] = [Area::Gathered, Area::Partial, Area::Blocks, Area::Sums, Area::Rows];

/// Set of areas that a program uses: one flag per [`Area`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Areas([bool; ALL.len()]);

/// Values from which the sizes of areas are computed.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Rows, columns and depth (m, n, k) of the whole product.
    pub shape: [u32; 3],
    /// Number of ranks.
    pub ranks: u32,
    /// Type codes of A, of transferred partials, and of C.
    dtypes: [u32; 3],
}

impl Sizes {
    /// Makes the sizes for products of shape `shape` (m, n, k) among `ranks` ranks. `dtypes` are
    /// the types of A, of transferred partials, and of C. Returns `None` if kernels do not support
    /// a type.
    pub fn new(shape: [u32; 3], ranks: u32, dtypes: [DType; 3]) -> Option<Self> {
        let [a, wire, c] = dtypes.map(dtype_code);
        Some(Sizes { shape, ranks, dtypes: [a?, wire?, c?] })
    }

    /// Sizes for the call with the arguments `args`.
    pub(crate) fn of(args: &OpArgs) -> Self {
        let OpArgs { m, n, k, ref channel, ref a, ref c, wire, .. } = *args;
        Sizes { shape: [m, n, k], ranks: channel.size, dtypes: [a.dtype, wire, c.dtype] }
    }
}

impl Areas {
    /// Areas that the steps of a program use.
    pub fn of(program: &Program) -> Self {
        let mut areas = Areas::default();
        program.each_step(&mut |step| {
            let used = match step.work {
                Work::Kernel(_, KernelOperands::Area(area)) => [Some(area), None],
                Work::Kernel(_, KernelOperands::Of(of)) => Area::moved(of),
                Work::Gemm(Gemm { source, to, .. }) => [source.area(), to.area()],
                work => work.transfer().map_or([None; 2], Area::moved),
            };
            used.into_iter().flatten().for_each(|area| areas.0[area as usize] = true);
        });
        areas
    }

    /// Size in bytes of all areas for calls of the sizes `of`.
    pub fn bytes(self, of: &Sizes) -> u64 {
        self.before(ALL.len(), of)
    }

    /// Stride, in elements, between rows of a workspace matrix with `cols` columns.
    pub fn line(cols: u32) -> u64 {
        u64::from(cols).next_multiple_of(LINE)
    }

    /// Number of bytes of workspace before area number `end`: the total size of the used areas that
    /// precede it.
    fn before(self, end: usize, of: &Sizes) -> u64 {
        let used = ALL.into_iter().take(end).filter(|&area| self.0[area as usize]);
        used.fold(0, |sum: u64, area| sum.saturating_add(area.bytes(of)))
    }

    /// Area `area` as a matrix, if the first area begins at `address`.
    pub(crate) fn matrix(self, area: Area, of: &Sizes, address: u64) -> Matrix {
        let (rows, cols, dtype) = area.shape(of);
        let address = address + self.before(area as usize, of);
        Matrix { address, ld: Areas::line(cols), rows, cols, dtype, transposed: 0 }
    }
}

impl Area {
    /// Source and destination of a transfer, if they are workspace areas; `None` in place of an
    /// operand of the call.
    fn moved(of: Transfer) -> [Option<Area>; 2] {
        match of {
            Transfer::Shards => [Some(Area::Gathered), None],
            Transfer::Blocks => [Some(Area::Partial), Some(Area::Blocks)],
            Transfer::Sums => [Some(Area::Sums), None],
            Transfer::Rows => [Some(Area::Rows), None],
        }
    }

    /// Shape of the area's matrix: number of rows, number of columns, and type code.
    fn shape(self, of: &Sizes) -> (u32, u32, u32) {
        let Sizes { shape: [m, n, k], ranks, dtypes: [a, wire, c] } = *of;
        match self {
            Area::Gathered => (m, k, a),
            Area::Partial => (m, n, wire),
            Area::Blocks => (m.div_ceil(ranks).saturating_mul(ranks), n, wire),
            Area::Sums | Area::Rows => (m, n, c),
        }
    }

    fn bytes(self, of: &Sizes) -> u64 {
        let (rows, cols, dtype) = self.shape(of);
        let bytes = Areas::line(cols) * element_bytes(dtype) as u64;
        bytes.saturating_mul(u64::from(rows))
    }
}
