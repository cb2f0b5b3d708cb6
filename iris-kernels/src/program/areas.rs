//! The areas of a workspace: the matrices that calls of a program keep there, behind what the library needs.
//!
//! A program's steps say which areas it has: a GEMM that reads the gathered A, results that go to the partial, rows
//! that come from peers. The areas follow one another in the order of [`Area`].

use std::fmt;

use iris_heap::DType;

use super::{Gemm, Operands, Program, Transfer, Work};
use crate::args::{Matrix, OpArgs, dtype_code, element_bytes};

/// Lines of a matrix begin at multiples of so many elements: whole vectors.
const LINE: u64 = 8;

vocabulary! {
    /// A matrix in the workspace.
    Area {
        /// The A of all ranks.
        Gathered = "the gathered A",
        /// This rank's partial: without bias, epilogue and residual.
        Partial = "the partial",
        /// What each rank sends of its partial: as many rows from each as the largest part has.
        Blocks = "blocks of partials",
        /// The sums of all ranks, as they come.
        Sums = "the sums of all ranks",
        /// The rows of C of all ranks, as they come.
        Rows = "the rows of C of all ranks",
    }
}

const ALL: [Area; 5] = [Area::Gathered, Area::Partial, Area::Blocks, Area::Sums, Area::Rows];

/// The areas of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Areas([bool; ALL.len()]);

/// What the sizes of areas follow from.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Rows and columns of the whole product, and its depth.
    pub shape: [u32; 3],
    /// Number of ranks.
    pub ranks: u32,
    /// Codes of the types of A, of partials on their way, and of C.
    dtypes: [u32; 3],
}

impl Sizes {
    /// Sizes for products of this shape among so many ranks. `dtypes` are those of A, of partials on their way, and
    /// of C; none if kernels have no such type.
    pub fn new(shape: [u32; 3], ranks: u32, dtypes: [DType; 3]) -> Option<Self> {
        let [a, wire, c] = dtypes.map(dtype_code);
        Some(Sizes { shape, ranks, dtypes: [a?, wire?, c?] })
    }

    /// Those of one call.
    pub(crate) fn of(args: &OpArgs) -> Self {
        let OpArgs { m, n, k, ref channel, ref a, ref c, wire, .. } = *args;
        Sizes { shape: [m, n, k], ranks: channel.size, dtypes: [a.dtype, wire, c.dtype] }
    }
}

impl Areas {
    /// The areas that the steps of a program use.
    pub fn of(program: &Program) -> Self {
        let mut areas = Areas::default();
        program.each_step(&mut |step| {
            let used = match step.work {
                Work::Kernel(_, Operands::Area(area)) => [Some(area), None],
                Work::Kernel(_, Operands::Of(of)) => Area::moved(of),
                Work::Gemm(Gemm { source, to, .. }) => [source.area(), to.area()],
                work => work.transfer().map_or([None; 2], Area::moved),
            };
            used.into_iter().flatten().for_each(|area| areas.0[area as usize] = true);
        });
        areas
    }

    /// Bytes that calls of these sizes keep.
    pub fn bytes(self, of: &Sizes) -> u64 {
        self.before(ALL.len(), of)
    }

    /// Elements from one line of a matrix of so many columns to the next.
    pub fn line(cols: u32) -> u64 {
        u64::from(cols).next_multiple_of(LINE)
    }

    /// Bytes of the areas whose number is less.
    fn before(self, end: usize, of: &Sizes) -> u64 {
        let used = ALL.into_iter().take(end).filter(|&area| self.0[area as usize]);
        used.fold(0, |sum: u64, area| sum.saturating_add(area.bytes(of)))
    }

    /// The matrix of an area, where the first one begins at `address`.
    pub(crate) fn matrix(self, area: Area, of: &Sizes, address: u64) -> Matrix {
        let (rows, cols, dtype) = area.shape(of);
        let address = address + self.before(area as usize, of);
        Matrix { address, ld: Areas::line(cols), rows, cols, dtype, transposed: 0 }
    }
}

impl Area {
    /// Areas that rows of a transfer come from and go to.
    fn moved(of: Transfer) -> [Option<Area>; 2] {
        match of {
            Transfer::Shards => [Some(Area::Gathered), None],
            Transfer::Blocks => [Some(Area::Partial), Some(Area::Blocks)],
            Transfer::Sums => [Some(Area::Sums), None],
            Transfer::Rows => [Some(Area::Rows), None],
        }
    }

    /// Rows, columns, and the code of the type.
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
