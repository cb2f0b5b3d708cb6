//! Small kernels of the benchmark that read and write rows of matrices.

use std::sync::Arc;

use anyhow::Result;
use iris_heap::{DType, Stream, SymSlice, SymmetricHeap};
use iris_kernels::UserKernel;
use iris_kernels::args::{Matrix, OpArgs, dtype_code};
use iris_kernels::gemm_config::MESSAGE_THREADS;
use iris_kernels::rtc::{KernelSource, Options};

/// Kernel that takes one parameter, an [`OpArgs`] whose matrices are in the heap.
pub(super) struct RowKernel {
    kernel: UserKernel,
    args: OpArgs,
}

/// Argument for the row-major matrix in `slice`.
pub(super) fn matrix(
    heap: &SymmetricHeap,
    slice: SymSlice<u8>,
    dtype: DType,
    (rows, cols): (usize, usize),
) -> Result<Matrix> {
    let address = heap.resolve(slice, heap.rank())? as u64;
    let (rows, dtype) = (rows as u32, dtype_code(dtype).unwrap_or_default());
    Ok(Matrix { address, ld: cols as u64, rows, cols: cols as u32, dtype, transposed: 0 })
}

impl RowKernel {
    /// Compiles the function `name` of `source`; a launch has at most one workgroup for each of
    /// the `args.m` rows.
    pub(super) fn new(
        heap: &Arc<SymmetricHeap>,
        source: KernelSource<'_>,
        name: &str,
        args: OpArgs,
    ) -> Result<RowKernel> {
        let options = Options::new().define("IRIS_THREADS", MESSAGE_THREADS);
        let kernel = UserKernel::new(heap, source, &options, name, (MESSAGE_THREADS, 0))?;
        Ok(RowKernel { kernel, args })
    }

    #[allow(unsafe_code, reason = "a kernel is given the addresses of matrices")]
    pub(super) fn run(&self, stream: &Stream) -> Result<()> {
        let groups = self.args.m.clamp(1, self.kernel.max_coresident_workgroups());
        // SAFETY: `add_norm` and `touch` take one parameter of the type of `args`; its matrices are
        // in the heap and live until the heap is closed, after the stream has finished.
        unsafe { self.kernel.launch(stream, groups, &[bytemuck::bytes_of(&self.args)]) }?;
        Ok(())
    }
}
