//! Interoperation with cudarc 0.19; the only file that uses cudarc. The program chooses how cudarc
//! finds the driver and the CUDA version of its types.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use crate::backend::BackendKind;
use crate::backend::gpu::{Gpu, Queue, RawStream};
use crate::error::Result;
use crate::stream::Stream;
use crate::util::unsupported;

impl Gpu {
    /// Wraps a stream of cudarc. The stream is ordered with the heap's work like the heap's own
    /// streams, and kept alive. Needs the feature `cudarc-0-19`; without it, pass the stream's
    /// handle to [`SymmetricHeap::stream_from_raw`](crate::SymmetricHeap::stream_from_raw).
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a stream of another device;
    /// [`Error::Unsupported`](crate::Error::Unsupported) on a GPU that is not NVIDIA's;
    /// [`Error::Closed`](crate::Error::Closed).
    pub fn stream_of(&self, stream: &Arc<CudaStream>) -> Result<Stream> {
        if self.kind() != BackendKind::Cuda {
            let why = format!("the heap is of {}", self.kind());
            return Err(unsupported("a stream of cudarc's", &why));
        }
        let raw = RawStream(stream.cu_stream() as u64);
        self.check_default(raw)?;
        // SAFETY: cudarc destroys the stream when its last `Arc` is dropped, and `held` keeps a
        // clone.
        let queue = unsafe { Queue::held(&self.shared, raw, stream.clone()) }?;
        self.keep(queue).map(Stream::from_backend)
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use cudarc::driver::sys;

    use crate::backend::cuda::api::{
        self, Access, Attribute, Configuration, Handle, Lines, Location, Properties,
    };
    use crate::backend::gpu::RawStream;

    /// Compares the sizes, alignments and field offsets of structures with cudarc's.
    macro_rules! layouts {
        ($($ours:ty = $theirs:ident { $($($field:ident).+ = $their_field:ident),* $(,)? })*) => {$(
            assert_eq!(size_of::<$ours>(), size_of::<sys::$theirs>(), stringify!($theirs));
            assert_eq!(align_of::<$ours>(), align_of::<sys::$theirs>(), stringify!($theirs));
            $(assert_eq!(
                offset_of!($ours, $($field).+),
                offset_of!(sys::$theirs, $their_field),
                stringify!($their_field)
            );)*
        )*};
    }

    /// Compares the size of each parameter with cudarc's, so that two swapped parameters of
    /// different sizes are noticed.
    #[test]
    fn our_functions_take_what_those_of_cudarc_take() {
        let signatures = api::signatures();
        assert!(signatures.len() > 50);
        for (name, ours, theirs) in signatures {
            assert_eq!(ours, theirs, "{name}");
        }
    }

    /// Compares the constants and structures of this crate with cudarc's; must pass for every CUDA
    /// version for which cudarc has types.
    #[test]
    fn our_numbers_and_structures_are_those_of_cudarc() {
        for (name, ours, theirs) in api::numbers() {
            assert_eq!(ours, theirs, "{name}");
        }
        layouts! {
            Location = CUmemLocation {}
            Properties = CUmemAllocationProp {
                handles = requestedHandleTypes, location = location, meta = win32HandleMetaData,
                flags = allocFlags,
            }
            Access = CUmemAccessDesc { flags = flags }
            Handle = CUipcMemHandle {}
            api::DeviceHandle = CUdevice {}
            api::Address = CUdeviceptr {}
            api::Physical = CUmemGenericAllocationHandle {}
            RawStream = CUstream {}
            Configuration = CUlaunchConfig {
                groups = gridDimX, threads = blockDimX, shared_bytes = sharedMemBytes,
                stream = hStream, attributes = attrs, attribute_count = numAttrs,
            }
            Attribute = CUlaunchAttribute { id = id, value = value }
            Lines = CUDA_MEMCPY2D {
                from.begin = srcXInBytes, from.kind = srcMemoryType, from.host = srcHost,
                from.address = srcDevice, from.array = srcArray, from.pitch = srcPitch,
                to.begin = dstXInBytes, to.kind = dstMemoryType, to.host = dstHost,
                to.address = dstDevice, to.array = dstArray, to.pitch = dstPitch,
                bytes = WidthInBytes, lines = Height,
            }
        }
    }
}
