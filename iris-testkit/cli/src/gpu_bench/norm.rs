//! Baseline for an all-reduce with a fused RMSNorm: the all-reduce without it, then a separate
//! kernel that adds the residual and normalises.

use anyhow::Result;
use iris_heap::Stream;
use iris_kernels::rtc::KernelSource;

use super::called::Called;
use super::row_kernel::RowKernel;

/// Source of the kernel `add_norm`, which adds the residual to rows of C and normalises them.
pub(super) const SOURCE: KernelSource<'_> =
    KernelSource { name: "norm.cu", text: include_str!("norm.cu") };

/// Two-step baseline: the op without its RMSNorm, then a kernel that adds the residual and
/// normalises.
pub(super) struct Apart {
    /// Op without its RMSNorm; the kernel normalises the C of its calls.
    pub(super) op: Called,
    pub(super) kernel: RowKernel,
}

impl Apart {
    pub(super) fn run(&self, stream: &Stream) -> Result<()> {
        self.op.run(stream)?;
        self.kernel.run(stream)
    }
}
