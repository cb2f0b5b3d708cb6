//! Baseline for an all-reduce with a fused RMSNorm: the all-reduce without it, then a separate
//! kernel that adds the residual and normalises.

use std::sync::Arc;

use anyhow::Result;
use bytemuck::Zeroable;
use iris_heap::{DType, Stream, SymSlice, SymmetricHeap};
use iris_kernels::UserKernel;
use iris_kernels::args::{Matrix, OpArgs, dtype_code};
use iris_kernels::gemm_config::MESSAGE_THREADS;
use iris_kernels::rtc::{KernelSource, Options};
use iris_testkit::suite::{AnyOp, Operands};

const SOURCE: KernelSource<'_> = KernelSource { name: "norm.cu", text: include_str!("norm.cu") };

/// Two-step baseline: the op without its RMSNorm, then a kernel that adds the residual and
/// normalises.
pub(super) struct Apart {
    pub(super) op: AnyOp,
    operands: Operands,
    kernel: UserKernel,
    args: OpArgs,
}

/// Location, shape and type of the matrices that the kernel reads and writes.
pub(super) struct Rows {
    pub(super) shape: (usize, usize),
    pub(super) dtype: DType,
    pub(super) epsilon: f32,
    pub(super) c: SymSlice<u8>,
    pub(super) residual: SymSlice<u8>,
    pub(super) weight: SymSlice<u8>,
    pub(super) normed: SymSlice<u8>,
}

impl Apart {
    /// Makes the baseline. `operands` are the operands of the op without its RMSNorm. The kernel
    /// that `rows` describes then normalises their C.
    pub(super) fn new(
        heap: &Arc<SymmetricHeap>,
        (op, operands): (AnyOp, Operands),
        rows: &Rows,
    ) -> Result<Apart> {
        let options = Options::new().define("IRIS_THREADS", MESSAGE_THREADS);
        let kernel = UserKernel::new(heap, SOURCE, &options, "add_norm", (MESSAGE_THREADS, 0))?;
        let (m, n) = (rows.shape.0 as u32, rows.shape.1 as u32);
        let matrix = |slice, rows_of| -> Result<Matrix> {
            let address = heap.resolve(slice, heap.rank())? as u64;
            let dtype = dtype_code(rows.dtype).unwrap_or_default();
            Ok(Matrix { address, ld: u64::from(n), rows: rows_of, cols: n, dtype, transposed: 0 })
        };
        let mut args = OpArgs { m, n, epsilon: rows.epsilon, ..OpArgs::zeroed() };
        (args.c, args.residual) = (matrix(rows.c, m)?, matrix(rows.residual, m)?);
        (args.weight, args.normed) = (matrix(rows.weight, 1)?, matrix(rows.normed, m)?);
        args.a = args.c;
        Ok(Apart { op, operands, kernel, args })
    }

    #[allow(unsafe_code, reason = "a kernel is given the addresses of matrices")]
    pub(super) fn run(&self, stream: &Stream) -> Result<()> {
        self.op.run(&self.operands, stream)?;
        let groups = self.args.m.clamp(1, self.kernel.resident());
        // SAFETY: `add_norm` takes one parameter of the type of `args`; its matrices are in the
        // heap and live until the heap is closed, after the stream has finished.
        unsafe { self.kernel.launch(stream, groups, &[bytemuck::bytes_of(&self.args)]) }?;
        Ok(())
    }
}
