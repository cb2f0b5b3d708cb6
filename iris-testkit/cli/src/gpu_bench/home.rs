//! Where a rank measures: its device, and the stream and the clock that it has there.

use std::sync::Arc;

use anyhow::{Context, Result};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, sys};
use iris_heap::{BackendKind, HeapOptions, Stream, SymmetricHeap, World};

/// A rank's device.
pub(super) enum Home {
    /// With one stream for all shapes, and the device's clock.
    Cuda { context: Arc<CudaContext>, stream: Arc<CudaStream> },
    /// By a heap of its own, which makes it current. Times are the host's.
    Other(Arc<SymmetricHeap>),
}

/// Events around what is timed, on the stream that it is on.
pub(super) struct Events {
    pub(super) stream: Arc<CudaStream>,
    pub(super) begin: CudaEvent,
    pub(super) end: CudaEvent,
}

impl Home {
    /// Collective.
    pub(super) fn new(kind: BackendKind, world: &World) -> Result<Home> {
        if kind != BackendKind::Cuda {
            // Nothing is taken from it.
            let options = HeapOptions::new().backend(kind).data_bytes(64 << 10);
            return Ok(Home::Other(SymmetricHeap::open(world, options.signal_bytes(64 << 10))?));
        }
        let context = CudaContext::new(world.local_rank() % kind.device_count()?)?;
        context.bind_to_thread()?;
        let stream = context.new_stream()?;
        Ok(Home::Cuda { context, stream })
    }

    /// Collective.
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
        heap.gpu()?.apart(|| {
            outcome = Some(f());
            Ok(())
        })?;
        outcome.context("the device was not made current")?
    }

    /// A stream for the ops of this heap, and the same as the driver has it, for libraries.
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

    /// The device's clock, if it is read.
    pub(super) fn events(&self) -> Result<Option<Events>> {
        let Home::Cuda { context, stream } = self else { return Ok(None) };
        let event = || context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
        Ok(Some(Events { stream: stream.clone(), begin: event()?, end: event()? }))
    }
}
