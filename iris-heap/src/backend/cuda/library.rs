//! Work of vendors' libraries on the heap's device: a library enqueues it itself, on a stream that it
//! is given.

use super::{CudaBackend, GpuStream};
use crate::error::Result;
use crate::stream::Stream;
use crate::util::unsupported;

impl CudaBackend {
    /// Lets `enqueue` put work of a library on a stream of the heap, behind the heap's last op,
    /// whatever stream that was on; the next op waits for it. `enqueue` is given the `CUstream`, with
    /// its context current.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a stream of another device or heap;
    /// [`Error::Closed`](crate::Error::Closed); those of `enqueue`.
    pub fn enqueue(&self, stream: &Stream, enqueue: impl FnOnce(u64) -> Result<()>) -> Result<()> {
        let queue = stream.backend().as_any().downcast_ref::<GpuStream>();
        let queue = queue.filter(|stream| std::sync::Arc::ptr_eq(stream.0.shared(), &self.shared));
        let Some(GpuStream(queue)) = queue else {
            return Err(unsupported("work of a library", "the stream is not one of the heap's"));
        };
        let _bound = self.device.bind()?;
        queue.in_order(|| enqueue(queue.raw().0))
    }

    /// Multiprocessors of the device, whoever shares it.
    pub fn multiprocessors(&self) -> u32 {
        self.device.multiprocessors
    }

    /// Calls `f` with the device's context current.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device); those of `f`.
    pub fn current<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let _bound = self.device.bind()?;
        f()
    }

    /// Calls `f` with the device's context current, such that a capture of another thread is not
    /// broken by what it does: for what a library prepares.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device); those of `f`.
    pub fn apart<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let _bound = self.device.bind_apart()?;
        f()
    }
}
