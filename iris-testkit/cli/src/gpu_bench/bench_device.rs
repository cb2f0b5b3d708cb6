//! Device that a rank measures on, with its stream and clock.

use std::sync::Arc;

use anyhow::{Context, Result};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, sys};
use iris_heap::{BackendKind, HeapOptions, Stream, SymmetricHeap, World};

/// Device on which a rank measures, with the clock that times its work.
pub(super) enum Home {
    /// CUDA device: one stream for all shapes, timed by events of the device.
    Cuda { context: Arc<CudaContext>, stream: Arc<CudaStream> },
    /// Device of another backend: a heap makes it current, and the host's clock times the work.
    Other(Arc<SymmetricHeap>),
}

/// Stream of the timed work, and the events recorded on it before and after the work.
pub(super) struct Events {
    pub(super) stream: Arc<CudaStream>,
    pub(super) begin: CudaEvent,
    pub(super) end: CudaEvent,
}

impl Home {
    /// Opens the rank's device; for another backend than CUDA also a heap. Collective.
    pub(super) fn new(kind: BackendKind, world: &World) -> Result<Home> {
        if kind != BackendKind::Cuda {
            // This heap only serves to make the device current; matrices are in other heaps.
            let options = HeapOptions::new().backend(kind).data_bytes(64 << 10);
            return Ok(Home::Other(SymmetricHeap::open(world, options.signal_bytes(64 << 10))?));
        }
        let context = CudaContext::new(world.rank() % kind.device_count()?)?;
        context.bind_to_thread()?;
        let stream = context.new_stream()?;
        Ok(Home::Cuda { context, stream })
    }

    /// Closes the heap that makes the device current, if there is one. Collective.
    pub(super) fn close(self) -> Result<()> {
        match self {
            Home::Cuda { .. } => Ok(()),
            Home::Other(heap) => Ok(heap.close()?),
        }
    }

    /// Calls `f` with the device current on this thread.
    pub(super) fn current<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let Home::Other(heap) = self else { return f() };
        let mut outcome = None;
        heap.gpu()?.with_relaxed_capture(|| {
            outcome = Some(f());
            Ok(())
        })?;
        outcome.context("the device was not made current")?
    }

    /// Stream for the ops of `heap`, and the driver's handle of the same stream, for library calls.
    pub(super) fn stream(&self, heap: &SymmetricHeap) -> Result<(Stream, u64)> {
        let gpu = heap.gpu()?;
        if let Home::Cuda { stream, .. } = self {
            return Ok((gpu.stream_of(stream)?, stream.cu_stream() as u64));
        }
        let (stream, mut raw) = (heap.stream()?, 0);
        gpu.enqueue(&stream, |number| {
            raw = number;
            Ok(())
        })?;
        Ok((stream, raw))
    }

    /// Makes the events for timing on the device; `None` if the host's clock is used.
    pub(super) fn events(&self) -> Result<Option<Events>> {
        let Home::Cuda { context, stream } = self else { return Ok(None) };
        let event = || context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
        Ok(Some(Events { stream: stream.clone(), begin: event()?, end: event()? }))
    }
}
