//! The CUDA device of a heap.

use super::SymmetricHeap;
use crate::backend::cuda::CudaBackend;
use crate::error::Result;
use crate::util::unsupported;

impl SymmetricHeap {
    /// Its CUDA device.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) if the heap is of another kind of device.
    pub fn cuda(&self) -> Result<&CudaBackend> {
        self.backend.as_any().downcast_ref::<CudaBackend>().ok_or_else(|| {
            let kind = self.options().backend;
            unsupported("a CUDA device", &format!("the heap is of {kind}"))
        })
    }
}

impl CudaBackend {
    /// The CUDA device of a heap.
    ///
    /// # Errors
    /// As [`SymmetricHeap::cuda`].
    pub fn of(heap: &SymmetricHeap) -> Result<&CudaBackend> {
        heap.cuda()
    }
}
