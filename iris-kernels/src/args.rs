//! What a kernel is given by value, laid out alike in Rust and in `kernels/iris/args.h`.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use iris_heap::DType;
use iris_heap::abi::HeapView;
use iris_heap::plain_access::Span;
use iris_sync::{Channel, Record};

/// A matrix in memory that this rank's kernels can address.
///
/// Element (r, c) lies `r * ld + c` elements from `address`, or `c * ld + r` if `transposed` is 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Matrix {
    /// Address of element (0, 0); 0 for no matrix.
    pub address: u64,
    /// Leading dimension, in elements.
    pub ld: u64,
    /// Rows as the op sees them.
    pub rows: u32,
    /// Columns as the op sees them.
    pub cols: u32,
    /// Element type: [`dtype_code`].
    pub dtype: u32,
    /// 1 if stored column by column.
    pub transposed: u32,
}

impl Matrix {
    /// Bytes of an element.
    pub(crate) fn element_bytes(&self) -> u64 {
        element_bytes(self.dtype) as u64
    }

    /// Addresses from the first element to the last, with gaps between lines; empty for no matrix.
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

/// The element types of kernels: the code of each is its place. `IRIS_DTYPES` of `args.h` has the same
/// rows, and the bytes of an element.
pub const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Code of an element type in kernels: its place in [`DTYPES`].
pub fn dtype_code(dtype: DType) -> Option<u32> {
    DTYPES.iter().position(|&known| known == dtype).map(|place| place as u32)
}

/// Bytes of one element of this code.
pub(crate) fn element_bytes(dtype: u32) -> usize {
    DTYPES[dtype as usize].size()
}

/// What is done to the final value of an element, once over all ranks: bit of `epilogue`.
pub mod epilogue {
    /// x = x / 2 * (1 + erf(x / sqrt 2)), after the bias.
    pub const GELU: u32 = 1;
}

/// Where the partial of a tile comes from: value of `producer`.
pub mod producer {
    /// The product of A and B.
    pub const GEMM: u32 = 0;
    /// The elements of A themselves.
    pub const LOAD: u32 = 1;
}

/// The arguments of every op kernel.
///
/// Offsets are bytes from the start of a rank's data segment, the same on all ranks. The inbox is
/// `[parity][sources][max_tiles][slot]` (of a broadcast one source, whoever sends a tile), where a tile's place is its number among those that go to
/// the same rank: of two_shot and the accumulating variants `tile / size`, of a reduce-scatter its
/// number in its owner's part. The result inbox is `[parity][tile][result_slot]`, the workspace
/// `[parity][max_tiles][tile_m * tile_n]` of f32 with the same places; in a slot a tile lies row by row, `tile_n` elements
/// apart, whatever its real size. The gathered A of the baseline lies in the inbox as
/// `[parity][m][k]`; the staging buffer is `[m][k]`, or `[k][m]` if `m_contiguous` is 1.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct OpArgs {
    /// The heap as this rank sees it.
    pub heap: HeapView,
    /// The words of the op.
    pub channel: Channel,
    /// What this rank says about the call.
    pub record: Record,
    /// What the mean of squares is never below, in an RMSNorm; 0 without one.
    pub epsilon: f32,
    /// Left factor, or the message.
    pub a: Matrix,
    /// Right factor.
    pub b: Matrix,
    /// Result.
    pub c: Matrix,
    /// A row of N elements added to every row of the result; address 0 for none.
    pub bias: Matrix,
    /// Added to the result, element by element, before it is rounded; address 0 for none.
    pub residual: Matrix,
    /// A row of N factors of the RMSNorm.
    pub weight: Matrix,
    /// The RMSNorm of the rows of C; address 0 for none.
    pub normed: Matrix,
    /// Offset of the inbox.
    pub inbox: u64,
    /// Bytes of one tile in the inbox.
    pub slot: u64,
    /// Offset of the result inbox.
    pub results: u64,
    /// Bytes of one tile in the result inbox.
    pub result_slot: u64,
    /// Offset of the f32 workspace or of the staging buffer.
    pub workspace: u64,
    /// Offset of a peer's A, where kernels pull it; the same on all ranks.
    pub pulled: u64,
    /// Leading dimension of a peer's A, in elements, the same on all ranks; 0 if it has no gaps.
    pub pulled_ld: u64,
    /// Address of this rank's [`crate::trace`] buffer; 0 for no trace.
    pub trace: u64,
    /// Address of this rank's counters; 0 for none.
    pub counters: u64,
    /// Rows of the whole product or message.
    pub m: u32,
    /// Columns of this rank's product or message.
    pub n: u32,
    /// Depth: of this rank's factors, or of the gathered A.
    pub k: u32,
    /// Rows of a tile.
    pub tile_m: u32,
    /// Columns of a tile.
    pub tile_n: u32,
    /// Columns of A in one unit of a staged gather.
    pub k_group: u32,
    /// Places for tiles in the inbox, of the largest plan.
    pub max_tiles: u32,
    /// Places for tiles in the result inbox, of the largest plan.
    pub max_results: u32,
    /// Type in which partials travel: [`dtype_code`].
    pub wire: u32,
    /// Bits of [`epilogue`].
    pub epilogue: u32,
    /// One of [`producer`].
    pub producer: u32,
    /// The rank that broadcasts.
    pub root: u32,
    /// Workgroups with one task: that fetch, of a staged gather; that only send, of a sum at owners, an all-gather
    /// or an all-to-all, where 0 says that all send, and take or add up.
    pub movers: u32,
    /// 0 if A is split by rows, 1 by columns.
    pub shard: u32,
    /// 1 if the staging buffer is stored column by column, and its units are fetched along M first.
    pub m_contiguous: u32,
    /// Spans a workgroup has room for in the trace.
    pub trace_spans: u32,
    /// Sources that the inbox has places for.
    pub sources: u32,
    /// Fills the last 8 bytes; 0.
    pub padding: u32,
}

impl OpArgs {
    /// Bytes of the matrices of a call, in this rank's memory. Peers access them only while this rank
    /// is in the call.
    pub(crate) fn operands(&self) -> [Span; 7] {
        let OpArgs { a, b, c, bias, residual, weight, normed, .. } = self;
        let read = |matrix: &Matrix| Span { bytes: matrix.bytes(), written: false };
        let written = |matrix: &Matrix| Span { bytes: matrix.bytes(), written: true };
        [read(a), read(b), read(bias), read(residual), read(weight), written(c), written(normed)]
    }
}

/// Which words say that a tile of C has come: value of [`TileView::arrival`].
pub mod arrival {
    /// Tile t is the result of its owner, t mod size.
    pub const RESULTS: u32 = 0;
    /// The rows of C are split over the ranks, and each sends its own.
    pub const PARTS: u32 = 1;
    /// All tiles come from the root.
    pub const ROOT: u32 = 2;
    /// Tiles come from the root, or by one of the other ranks: `Relays` of iris-sync says whom.
    pub const RELAYS: u32 = 3;
}

/// One call of an op as a user's kernel beside it is given it, to wait for tiles of C: `Tiles` of
/// `iris/tiles.h` reads it. Its channel numbers the call by copies of the op's own words.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct TileView {
    /// The heap as this rank sees it.
    pub heap: HeapView,
    /// The words of the op; `call` and `sequence` are the copies.
    pub channel: Channel,
    /// What this rank says about the call.
    pub record: Record,
    /// Rows of C.
    pub rows: u32,
    /// Columns of C.
    pub cols: u32,
    /// Rows of a tile.
    pub tile_m: u32,
    /// Columns of a tile.
    pub tile_n: u32,
    /// One of [`arrival`].
    pub arrival: u32,
    /// The rank that broadcasts.
    pub root: u32,
    /// Workgroups of the op.
    pub groups: u32,
}

/// How many counters a rank has, and which is which.
pub mod counter {
    /// Bytes written to peers.
    pub const PUSHED: usize = 0;
    /// Bytes read from peers.
    pub const PULLED: usize = 1;
    /// Signals and flags raised.
    pub const FLAGS: usize = 2;
    /// Waits begun.
    pub const WAITS: usize = 3;
    /// How many there are.
    pub const COUNT: usize = 8;
}

const _: () = {
    assert!(size_of::<Matrix>() == 32);
    assert!(std::mem::offset_of!(OpArgs, a) % 8 == 0);
    assert!(size_of::<OpArgs>() <= 4096 - 256, "kernel parameters are at most 4 KiB");
    assert!(std::mem::offset_of!(TileView, record) == 1128);
    assert!(std::mem::offset_of!(TileView, rows) == 1172);
    assert!(size_of::<TileView>() == 1200);
};
/// Some rows of a matrix.
pub(crate) fn rows_of(matrix: Matrix, rows: &Range<u32>) -> Matrix {
    let apart = if matrix.transposed == 0 { matrix.ld } else { 1 };
    let address =
        matrix.address + u64::from(rows.start) * apart * element_bytes(matrix.dtype) as u64;
    Matrix { address, rows: rows.end - rows.start, ..matrix }
}
