//! State that the CPU kernels of all operators use: the current tile of this rank's contribution to
//! the sum (its partial), and the slots of inboxes as matrices. Also the last steps of a sum: bias,
//! epilogue and residual.

use crate::args::{Matrix, OpArgs, element_bytes, producer};
use crate::cpu::body::epilogue::{add_matrix, finish_values};
use crate::cpu::view::{self, Scratch};
use crate::schedule::Tile;

/// Current tile of a workgroup as f32 values, with the arguments of the launch.
pub(crate) struct Partial<'a> {
    pub(crate) args: &'a OpArgs,
    pub(crate) scratch: Scratch,
    pub(crate) sum: Vec<f32>,
}

impl<'a> Partial<'a> {
    pub(crate) fn new(args: &'a OpArgs) -> Self {
        let len = args.tile_m as usize * args.tile_n as usize;
        let scratch = Scratch::new(args.producer == producer::INVARIANT_GEMM);
        Self { args, scratch, sum: vec![0.0; len] }
    }

    /// Stride between rows of `sum`, in elements.
    pub(crate) fn ld(&self) -> usize {
        self.args.tile_n as usize
    }

    /// Whether the result is A unchanged. Elements are then copied as bit patterns, because a
    /// conversion to f32 changes the bits of some NaNs.
    pub(crate) fn is_copy(&self) -> bool {
        let OpArgs { producer, a, c, bias, epilogue, residual, .. } = self.args;
        *producer == producer::LOAD
            && a.dtype == c.dtype
            && (bias.address, *epilogue, residual.address) == (0, 0, 0)
    }

    /// Computes this rank's partial of `tile` into the current tile: multiplies A by B, or loads
    /// the tile from A.
    pub(crate) fn produce(&mut self, tile: Tile) {
        let (args, ld) = (self.args, self.ld());
        if args.producer == producer::LOAD {
            view::load(&args.a, tile, &mut self.sum, ld, false);
            return;
        }
        let left = Tile { col: 0, cols: args.k, ..tile };
        let right = Tile { row: 0, rows: args.k, ..tile };
        let scratch = &mut self.scratch;
        view::multiply((&args.a, left), (&args.b, right), &mut self.sum, ld, true, scratch);
    }

    /// Add the bias, apply the epilogue, add the residual, and write the result to `tile` of C.
    pub(crate) fn finish(&mut self, tile: Tile) {
        self.epilogue(tile);
        let ld = self.ld();
        add_matrix(&self.args.residual, tile, &mut self.sum, ld);
        view::store(&self.args.c, tile, &self.sum, self.ld());
    }

    /// Add the bias to the sum of `tile`, and apply the epilogue.
    pub(crate) fn epilogue(&mut self, tile: Tile) {
        let ld = self.ld();
        finish_values(self.args, tile, &mut self.sum, ld);
    }

    /// Slot number `place` for tiles from `source` in the inbox of rank `at`, as a matrix.
    pub(crate) fn slot(&self, at: u32, source: u32, place: u32, parity: u32, dtype: u32) -> Matrix {
        let OpArgs { max_tiles, inbox, slot, sources, .. } = *self.args;
        assert!(source < sources, "source {source} of {sources} in an inbox");
        let index = (u64::from(parity) * u64::from(sources) + u64::from(source))
            * u64::from(max_tiles)
            + u64::from(place);
        assert!(place < max_tiles, "place {place} of {max_tiles} in an inbox");
        self.tile_at(at, inbox + index * slot, dtype)
    }

    /// Slot of `tile` in the result inbox of rank `at`, as a matrix.
    pub(crate) fn result(&self, at: u32, tile: u32, parity: u32) -> Matrix {
        let OpArgs { max_results, results, result_slot, .. } = *self.args;
        assert!(tile < max_results, "tile {tile} of {max_results} in a result inbox");
        let index = u64::from(parity) * u64::from(max_results) + u64::from(tile);
        self.tile_at(at, results + index * result_slot, self.args.c.dtype)
    }

    /// C of rank `at` with `rows` rows, at the same offset and with the same leading dimension as
    /// this rank's C.
    pub(crate) fn peers_c(&self, at: u32, rows: u32) -> Matrix {
        let heap = &self.args.heap;
        let offset = self.args.c.address - heap.data[heap.rank as usize];
        Matrix { address: heap.data[at as usize] + offset, rows, ..self.args.c }
    }

    /// Tile with elements of type `dtype`, as a matrix at byte `offset` of the data segment of rank
    /// `at`.
    pub(crate) fn tile_at(&self, at: u32, offset: u64, dtype: u32) -> Matrix {
        let address = self.args.heap.data[at as usize] + offset;
        let (rows, cols) = (self.args.tile_m, self.args.tile_n);
        Matrix { address, ld: u64::from(cols), rows, cols, dtype, transposed: 0 }
    }
}

/// Position of a tile in its slot: row 0, column 0, because a slot has one tile.
pub(crate) fn in_slot(tile: Tile) -> Tile {
    Tile { row: 0, col: 0, ..tile }
}

/// Size of a tile with elements of type `dtype`, in bytes.
pub(crate) fn bytes(tile: Tile, dtype: u32) -> u64 {
    u64::from(tile.rows) * u64::from(tile.cols) * element_bytes(dtype) as u64
}
