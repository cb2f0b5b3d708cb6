//! Baseline for an all-reduce with a fused RMSNorm: the all-reduce without it, then a separate
//! kernel that adds the residual and normalises.

use anyhow::Result;
use iris_heap::Stream;
use iris_kernels::rtc::KernelSource;
use iris_testkit::suite::{AnyOp, Operands};

use super::row_kernel::RowKernel;

/// Source of the kernel `add_norm`, which adds the residual to rows of C and normalises them.
pub(super) const SOURCE: KernelSource<'_> =
    KernelSource { name: "norm.cu", text: include_str!("norm.cu") };

/// Two-step baseline: the op without its RMSNorm, then a kernel that adds the residual and
/// normalises.
pub(super) struct Apart {
    pub(super) op: AnyOp,
    /// Operands of the op without its RMSNorm; the kernel then normalises their C.
    pub(super) operands: Operands,
    pub(super) kernel: RowKernel,
}

impl Apart {
    pub(super) fn run(&self, stream: &Stream) -> Result<()> {
        self.op.run(&self.operands, stream)?;
        self.kernel.run(stream)
    }
}
