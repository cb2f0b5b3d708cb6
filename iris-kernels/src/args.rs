//! Kernel arguments that are passed by value; `kernels/iris/args.h` has the same layout.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use iris_heap::abi::HeapView;
use iris_heap::plain_access::Span;
use iris_sync::{Channel, Record};

pub use crate::dtype::dtype_code;
pub(crate) use crate::dtype::element_bytes;
use crate::schedule::split;

/// Matrix in memory that this rank's kernels can address.
///
/// Element (r, c) is at `address + (r * ld + c) * size`, or `address + (c * ld + r) * size` if
/// `transposed` is 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Matrix {
    /// Address of element (0, 0); 0 if there is no matrix.
    pub address: u64,
    /// Leading dimension in elements: the stride between rows, or between columns if `transposed`
    /// is 1.
    pub ld: u64,
    /// Number of rows of the matrix.
    pub rows: u32,
    /// Number of columns of the matrix.
    pub cols: u32,
    /// Element type, by its [`dtype_code`].
    pub dtype: u32,
    /// Storage order: 0 for row-major, 1 for column-major.
    pub transposed: u32,
}

impl Matrix {
    /// Size of an element in bytes.
    pub(crate) fn element_bytes(&self) -> u64 {
        element_bytes(self.dtype) as u64
    }

    /// Address range from the first element to the last, including the gaps between rows or
    /// columns; empty if there is no matrix.
    fn bytes(&self) -> Range<u64> {
        let (lines, len) = match self.transposed {
            1 => (self.cols, self.rows),
            _ => (self.rows, self.cols),
        };
        let elements = match (lines, len) {
            (0, _) | (_, 0) => 0,
            _ => u64::from(lines - 1) * self.ld + u64::from(len),
        };
        self.address..self.address + elements * self.element_bytes()
    }
}

/// Largest number of tensors that a gather of a list moves in one message.
pub const MOST_TENSORS: usize = 4;

/// Tensor of a gather of a list: the rows of this rank, and their destination among the rows of all
/// ranks. Kernels copy its bytes, so they need no element type. If `row` is 0, there is no tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct ListTensor {
    /// Address of this rank's first row.
    pub from: u64,
    /// Distance between the starts of two of this rank's rows, in bytes.
    pub from_pitch: u64,
    /// Address of the first row of all ranks' rows.
    pub to: u64,
    /// Distance between the starts of two rows of all ranks' rows, in bytes.
    pub to_pitch: u64,
    /// Number of bytes of a row.
    pub row: u64,
}

impl ListTensor {
    /// Number of items of 8 bytes in a row; the last one may have fewer bytes of data.
    pub(crate) fn items(&self) -> u64 {
        self.row.div_ceil(8)
    }
}

/// Bits of [`OpArgs::epilogue`]: functions applied once to the sum over all ranks.
pub mod epilogue {
    /// GELU by erf: x = x / 2 * (1 + erf(x / sqrt 2)), after the bias.
    pub const GELU: u32 = 1;
}

/// Values of [`OpArgs::producer`]: source of a rank's partial tiles, that is, of its contributions
/// to a sum over ranks.
pub mod producer {
    /// Partial tiles are tiles of the matrix product of A and B.
    pub const GEMM: u32 = 0;
    /// Partial tiles are tiles of A, because A is the message.
    pub const LOAD: u32 = 1;
    /// Like `GEMM`, and the bits of a row do not depend on the number of rows, nor on the row's
    /// place among them. On a GPU the host chooses kernels with this property.
    pub const INVARIANT_GEMM: u32 = 2;
}

/// Arguments of every operator kernel.
///
/// Offsets are bytes from the start of a rank's data segment (its part of the symmetric heap for
/// matrices and messages), equal on all ranks. They point to these regions, in which parity is the
/// call number modulo 2:
///
/// - inbox: `[parity][sources][max_tiles][slot]`. A broadcast has one source. The index of a tile
///   depends on the variant. In two_shot, spinlock and atomic it is `tile / size`, in a
///   reduce-scatter the number of the tile within its owner's part, and otherwise the number of the
///   tile among the tiles that go to the same rank. Within a slot, a tile is row-major with stride `tile_n`, even if it is
///   smaller.
/// - result inbox: `[parity][tile][result_slot]`.
/// - workspace of accumulating variants: f32, `[max_tiles][tile_m * tile_n]`, with the tile index of the
///   inbox.
/// - gathered A of the `baseline` variant: in the inbox, `[parity][m][k]`.
/// - staging buffer: `[m][k]`, or `[k][m]` if `m_contiguous` is 1.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct OpArgs {
    /// Addresses of the heap's memory as this rank has mapped it.
    pub heap: HeapView,
    /// Layout of the op's synchronisation words.
    pub channel: Channel,
    /// Record of the call's parameters, which peers compare with their own records.
    pub record: Record,
    /// Epsilon of the RMSNorm, added to the mean of squares; 0 without an RMSNorm.
    pub epsilon: f32,
    /// Number of source ranks for which the inbox (receive buffer) has slots.
    pub sources: u32,
    /// Left factor A of the product, or the message.
    pub a: Matrix,
    /// Right factor B of the product.
    pub b: Matrix,
    /// Result matrix C of the call.
    pub c: Matrix,
    /// Bias: one row of N elements that is added to every row of the result; address 0 for none.
    pub bias: Matrix,
    /// Residual: matrix that is added to the result before rounding; address 0 for none.
    pub residual: Matrix,
    /// Weights of the RMSNorm: one row of N factors.
    pub weight: Matrix,
    /// Output of the RMSNorm: the normalised rows of C; address 0 for none.
    pub normed: Matrix,
    /// Byte offset, in the data segment, of the inbox to which peers push tiles.
    pub inbox: u64,
    /// Size of one tile's slot in the inbox, in bytes.
    pub slot: u64,
    /// Byte offset, in the data segment, of the inbox for reduced tiles, which the ranks that own
    /// (reduce) these tiles push to all ranks.
    pub results: u64,
    /// Size of one tile's slot in the result inbox, in bytes.
    pub result_slot: u64,
    /// Byte offset, in the data segment, of the workspace: f32 sums of an accumulating variant, the
    /// staging buffer of a staged gather, or intermediate matrices of a program.
    pub workspace: u64,
    /// Byte offset of A in each peer's data segment, for kernels that read A from the peers; equal
    /// on all ranks.
    pub pulled: u64,
    /// Leading dimension of a peer's A in elements, equal on all ranks; 0 if the rows are
    /// contiguous.
    pub pulled_ld: u64,
    /// Address of this rank's [`crate::trace`] buffer; 0 for no trace.
    pub trace: u64,
    /// Address of this rank's counters; 0 for none.
    pub counters: u64,
    /// Number of rows of the whole product or message.
    pub m: u32,
    /// Number of columns of this rank's product or message.
    pub n: u32,
    /// Inner dimension K of the product: of this rank's own A and B, or of the gathered A.
    pub k: u32,
    /// Number of rows of a tile.
    pub tile_m: u32,
    /// Number of columns of a tile.
    pub tile_n: u32,
    /// Number of columns of A in one unit of a staged gather (a unit is the piece of A that is
    /// copied and signalled as a whole).
    pub k_group: u32,
    /// Number of tile slots in the inbox per parity and source: the largest number that any plan of
    /// the op needs.
    pub max_tiles: u32,
    /// Number of tile slots in the result inbox per parity: the largest number that any plan of the
    /// op needs.
    pub max_results: u32,
    /// Type in which partial tiles are transferred, by its [`dtype_code`].
    pub wire: u32,
    /// Functions applied to the result: bits of [`epilogue`].
    pub epilogue: u32,
    /// Source of partial tiles: a value of [`producer`].
    pub producer: u32,
    /// Root rank of a broadcast.
    pub root: u32,
    /// Number of workgroups with a dedicated task. The task is to fetch in a staged gather, and to
    /// send in a reduction at owners, an all-gather or an all-to-all. 0 means that every workgroup
    /// does both that task and the rest of the work.
    pub dedicated_workgroups: u32,
    /// Dimension in which A is split across ranks: 0 for rows, 1 for columns.
    pub shard: u32,
    /// Storage order of the staging buffer: 1 for column-major, 0 for row-major. If it is 1, the
    /// units (pieces of A) are fetched along M first.
    pub m_contiguous: u32,
    /// Maximum number of spans per workgroup in the trace buffer.
    pub trace_spans: u32,
    /// Tensors of a gather of a list, which uses neither `a` nor any other matrix. A row of its
    /// message is a row of each tensor, one after the other, each padded to a multiple of 8 bytes.
    pub list: [ListTensor; MOST_TENSORS],
    /// Weights (f32) of the parts of each row of the message, M x K; address 0 if A is the message. A
    /// row of A then has the K parts of a row, one after the other.
    pub factors: Matrix,
    /// Matrix that is added to the result after the residual; address 0 for none. Only kernels of
    /// weighted sums read it.
    pub addend: Matrix,
}

impl OpArgs {
    /// Address ranges of the call's matrices in this rank's memory. Peers access these ranges only
    /// while this rank is in the call.
    pub(crate) fn operands(&self) -> [Span; 9 + 2 * MOST_TENSORS] {
        let OpArgs { a, b, c, bias, residual, weight, normed, list, m, channel, .. } = self;
        let OpArgs { factors, addend, .. } = self;
        let own = split(*m, channel.size.max(1), channel.rank).len() as u64;
        std::array::from_fn(|at| {
            let (bytes, written) = match at.checked_sub(9) {
                None => {
                    let all = [a, b, bias, residual, weight, factors, addend, c, normed];
                    (all[at].bytes(), at >= 7)
                }
                Some(at) => {
                    let ListTensor { from, from_pitch, to, to_pitch, row } = list[at / 2];
                    match at % 2 {
                        0 => (rows_at(from, (own, from_pitch), row), false),
                        _ => (rows_at(to, ((*m).into(), to_pitch), row), true),
                    }
                }
            };
            Span { bytes, written }
        })
    }

    /// Number of items of 8 bytes in a row of the message of a gather of a list.
    pub(crate) fn list_items(&self) -> u32 {
        let items: u64 = self.list.iter().map(ListTensor::items).sum();
        u32::try_from(items).unwrap_or(u32::MAX)
    }
}

/// Address range of `rows` rows of `row` bytes each, whose starts are `pitch` bytes apart.
fn rows_at(address: u64, (rows, pitch): (u64, u64), row: u64) -> Range<u64> {
    let bytes = if rows == 0 || row == 0 { 0 } else { (rows - 1) * pitch + row };
    address..address + bytes
}

/// Values of [`TileView::arrival`]: kinds of words that signal the arrival of a tile of C.
pub mod arrival {
    /// Words that signal a reduced tile in a two-shot all-reduce. Rank t mod size reduces tile t
    /// and signals it.
    pub const RESULTS: u32 = 0;
    /// Signal words of the ranks' own rows: the rows of C are split over the ranks, and each rank
    /// sends its part.
    pub const PARTS: u32 = 1;
    /// Signal words of the root, which sends all tiles of a broadcast.
    pub const ROOT: u32 = 2;
    /// Signal words of the root, or of the rank that relays the tile, in a broadcast with relays;
    /// `Relays` of iris-sync assigns the relay of each tile.
    pub const RELAYS: u32 = 3;
}

/// View of one call of an op, for a user's kernel that runs at the same time as the op and waits
/// for tiles of C; `Tiles` of `iris/tiles.h` reads it. The view reads the call number from copies
/// of the op's words, because the op advances the words themselves when the call ends.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct TileView {
    /// Addresses of the heap's memory as this rank has mapped it.
    pub heap: HeapView,
    /// Layout of the op's synchronisation words. `call` and `sequence` refer to copies of the op's
    /// words; the copies do not change when the op ends the call.
    pub channel: Channel,
    /// This rank's record of the call's parameters, which peers compare with their own records.
    pub record: Record,
    /// Number of rows of C.
    pub rows: u32,
    /// Number of columns of C.
    pub cols: u32,
    /// Number of rows of a tile.
    pub tile_m: u32,
    /// Number of columns of a tile.
    pub tile_n: u32,
    /// Kind of arrival: a value of [`arrival`].
    pub arrival: u32,
    /// Root rank of a broadcast.
    pub root: u32,
    /// Number of workgroups of the op's launch.
    pub groups: u32,
    /// Padding to a multiple of 8 bytes; always 0.
    pub padding: u32,
}

/// Indices of counters in the array of counters that a rank keeps for an op.
pub mod counter {
    /// Index of the counter of bytes written to peers.
    pub const PUSHED: usize = 0;
    /// Index of the counter of bytes read from peers.
    pub const PULLED: usize = 1;
    /// Index of the counter of signals and flags raised.
    pub const FLAGS: usize = 2;
    /// Index of the counter of waits begun.
    pub const WAITS: usize = 3;
    /// Number of counters in the array.
    pub const COUNT: usize = 8;
}

const _: () = {
    assert!(size_of::<Matrix>() == 32);
    assert!(size_of::<ListTensor>() == 40);
    assert!(std::mem::offset_of!(OpArgs, a) % 8 == 0);
    assert!(size_of::<OpArgs>() <= 4096 - 256, "kernel parameters are at most 4 KiB");
    assert!(std::mem::offset_of!(TileView, record) == 1132);
    assert!(std::mem::offset_of!(TileView, rows) == 1176);
    assert!(size_of::<TileView>() == 1208);
};
/// Matrix that consists of the rows `rows` of `matrix`, in the same memory.
pub(crate) fn rows_of(matrix: Matrix, rows: &Range<u32>) -> Matrix {
    let apart = if matrix.transposed == 0 { matrix.ld } else { 1 };
    let address =
        matrix.address + u64::from(rows.start) * apart * element_bytes(matrix.dtype) as u64;
    Matrix { address, rows: rows.end - rows.start, ..matrix }
}
