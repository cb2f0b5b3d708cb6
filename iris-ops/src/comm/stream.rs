//! Stream on which a communicator enqueues its calls.

use std::fmt;

use iris_heap::{BackendKind, Stream, SymmetricHeap};

#[cfg(feature = "cudarc-0-19")]
use cudarc::driver::CudaStream;
#[cfg(feature = "cudarc-0-19")]
use std::sync::Arc;

use crate::error::{Error, Result};

/// Stream on which a communicator enqueues its calls. The stream also determines the device.
///
/// An `OnStream` is made from a [`BackendKind`], for a new stream of the heap; from a [`Stream`] of
/// the heap; and, with the feature `cudarc-0-19`, from an `Arc<CudaStream>`, whose device is the
/// communicator's. A separate stream (`CudaContext::new_stream`, `CudaDevice::new_with_stream` of
/// candle) is best. The legacy default stream is accepted, except if ranks that are threads share a
/// device. The per-thread default stream, which `CudaDevice::new` of candle 0.11 has, is accepted,
/// but costs two events per call, because the calls then run on a separate stream of the
/// communicator.
#[derive(Clone)]
#[non_exhaustive]
pub enum OnStream {
    /// New stream of the communicator's heap, on a device of this kind.
    New(BackendKind),
    /// Stream of the heap in which the communicator is made.
    Heap(Stream),
    /// The program's own cudarc stream.
    #[cfg(feature = "cudarc-0-19")]
    Cudarc(Arc<CudaStream>),
}

impl fmt::Debug for OnStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OnStream::New(backend) => write!(f, "OnStream::New({backend})"),
            OnStream::Heap(stream) => write!(f, "OnStream::Heap({stream:?})"),
            #[cfg(feature = "cudarc-0-19")]
            OnStream::Cudarc(stream) => write!(f, "OnStream::Cudarc({:p})", stream.cu_stream()),
        }
    }
}

impl From<BackendKind> for OnStream {
    fn from(backend: BackendKind) -> Self {
        OnStream::New(backend)
    }
}

impl From<Stream> for OnStream {
    fn from(stream: Stream) -> Self {
        OnStream::Heap(stream)
    }
}

impl From<&Stream> for OnStream {
    fn from(stream: &Stream) -> Self {
        OnStream::Heap(stream.clone())
    }
}

#[cfg(feature = "cudarc-0-19")]
impl From<Arc<CudaStream>> for OnStream {
    fn from(stream: Arc<CudaStream>) -> Self {
        OnStream::Cudarc(stream)
    }
}

#[cfg(feature = "cudarc-0-19")]
impl From<&Arc<CudaStream>> for OnStream {
    fn from(stream: &Arc<CudaStream>) -> Self {
        OnStream::Cudarc(stream.clone())
    }
}

impl OnStream {
    /// Returns the kind of device for a communicator that opens a heap. Also returns the device's
    /// number if the stream determines it.
    pub(super) fn device(&self) -> Result<(BackendKind, Option<usize>)> {
        match self {
            OnStream::New(backend) => Ok((*backend, None)),
            OnStream::Heap(_) => Err(Error::comm(iris_heap::Error::Invalid {
                what: "stream".into(),
                value: "one of a heap".into(),
                expected: "a BackendKind or a stream of cudarc's; a communicator in a heap that is open is made by \
                           Comm::in_heap"
                    .into(),
            })),
            #[cfg(feature = "cudarc-0-19")]
            OnStream::Cudarc(stream) => Ok((BackendKind::Cuda, Some(stream.context().ordinal()))),
        }
    }

    pub(super) fn open(self, heap: &SymmetricHeap) -> Result<CommStream> {
        let ours = match &self {
            OnStream::New(_) => heap.stream(),
            OnStream::Heap(stream) => {
                heap.check_stream("a communicator", stream).map(|()| stream.clone())
            }
            #[cfg(feature = "cudarc-0-19")]
            OnStream::Cudarc(stream) => return CommStream::of(stream.clone(), heap),
        };
        Ok(CommStream {
            ours: ours.map_err(Error::comm)?,
            #[cfg(feature = "cudarc-0-19")]
            theirs: None,
            #[cfg(feature = "cudarc-0-19")]
            apart: None,
        })
    }
}

/// Stream of an open communicator.
pub struct CommStream {
    /// Stream of the heap on which the communicator enqueues its calls.
    pub(super) ours: Stream,
    /// Stream that the program passed, if it is a cudarc stream.
    #[cfg(feature = "cudarc-0-19")]
    theirs: Option<Arc<CudaStream>>,
    /// Cudarc's view of `ours` if the communicator has a separate stream; `None` if calls run on
    /// the stream that the program passed.
    #[cfg(feature = "cudarc-0-19")]
    apart: Option<Arc<CudaStream>>,
}

#[cfg(not(feature = "cudarc-0-19"))]
impl CommStream {
    /// Enqueues a call on the communicator's stream.
    pub(super) fn enqueue(&self, call: impl FnOnce() -> Result<()>) -> Result<()> {
        call()
    }
}

#[cfg(feature = "cudarc-0-19")]
impl CommStream {
    /// Prepares the program's stream `theirs` for calls. The per-thread default stream is a
    /// different stream in each thread. For this stream, calls run on a separate stream of the
    /// communicator, after the earlier and before the later work of the calling thread.
    fn of(theirs: Arc<CudaStream>, heap: &SymmetricHeap) -> Result<Self> {
        const PER_THREAD: u64 = 2;
        let apart = match theirs.cu_stream() as u64 {
            PER_THREAD => Some(theirs.context().new_stream().map_err(driver)?),
            _ => None,
        };
        let ours = heap.gpu().and_then(|gpu| gpu.stream_of(apart.as_ref().unwrap_or(&theirs)));
        Ok(Self { ours: ours.map_err(Error::comm)?, theirs: Some(theirs), apart })
    }

    pub(super) fn theirs(&self) -> Option<&CudaStream> {
        self.theirs.as_deref()
    }

    /// Enqueues a call so that it runs after the work that is already enqueued on the program's
    /// stream, and before later work on that stream.
    pub(super) fn enqueue(&self, call: impl FnOnce() -> Result<()>) -> Result<()> {
        let (Some(theirs), Some(apart)) = (&self.theirs, &self.apart) else { return call() };
        apart.join(theirs).map_err(driver)?;
        let outcome = call();
        // The program's stream must wait for a failed call too, because some of the call's steps
        // may have been enqueued.
        let joined = theirs.join(apart).map_err(driver);
        outcome.and(joined)
    }
}

#[cfg(feature = "cudarc-0-19")]
fn driver(error: cudarc::driver::DriverError) -> Error {
    Error::comm(iris_heap::Error::other(error))
}
