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
    /// Wraps a stream of cudarc. It is ordered with the heap's work like the heap's own streams,
    /// and kept alive. Needs the feature `cudarc-0-19`; without it, pass the stream's handle to
    /// [`SymmetricHeap::stream_from_raw`](crate::SymmetricHeap::stream_from_raw).
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
    use cudarc::driver::sys;

    use crate::backend::cuda::api::{
        self, Access, Attribute, Configuration, LegacyHandle, Lines, Location, Properties, Side,
    };
    use crate::backend::gpu::RawStream;

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
        let ours = [
            size_of::<Location>(),
            size_of::<Properties>(),
            size_of::<Access>(),
            size_of::<LegacyHandle>(),
            size_of::<api::Device>(),
            size_of::<api::Address>(),
            size_of::<api::Physical>(),
            align_of::<Properties>(),
            align_of::<Access>(),
            align_of::<LegacyHandle>(),
            std::mem::offset_of!(Properties, handles),
            std::mem::offset_of!(Properties, location),
            std::mem::offset_of!(Properties, meta),
            std::mem::offset_of!(Properties, flags),
            std::mem::offset_of!(Access, flags),
            size_of::<RawStream>(),
            size_of::<Configuration>(),
            align_of::<Configuration>(),
            std::mem::offset_of!(Configuration, groups),
            std::mem::offset_of!(Configuration, threads),
            std::mem::offset_of!(Configuration, shared_bytes),
            std::mem::offset_of!(Configuration, stream),
            std::mem::offset_of!(Configuration, attributes),
            std::mem::offset_of!(Configuration, attribute_count),
            size_of::<Attribute>(),
            align_of::<Attribute>(),
            std::mem::offset_of!(Attribute, id),
            std::mem::offset_of!(Attribute, value),
            size_of::<Lines>(),
            align_of::<Lines>(),
            std::mem::offset_of!(Lines, from) + std::mem::offset_of!(Side, begin),
            std::mem::offset_of!(Lines, from) + std::mem::offset_of!(Side, kind),
            std::mem::offset_of!(Lines, from) + std::mem::offset_of!(Side, host),
            std::mem::offset_of!(Lines, from) + std::mem::offset_of!(Side, address),
            std::mem::offset_of!(Lines, from) + std::mem::offset_of!(Side, array),
            std::mem::offset_of!(Lines, from) + std::mem::offset_of!(Side, pitch),
            std::mem::offset_of!(Lines, to) + std::mem::offset_of!(Side, begin),
            std::mem::offset_of!(Lines, to) + std::mem::offset_of!(Side, kind),
            std::mem::offset_of!(Lines, to) + std::mem::offset_of!(Side, host),
            std::mem::offset_of!(Lines, to) + std::mem::offset_of!(Side, address),
            std::mem::offset_of!(Lines, to) + std::mem::offset_of!(Side, array),
            std::mem::offset_of!(Lines, to) + std::mem::offset_of!(Side, pitch),
            std::mem::offset_of!(Lines, bytes),
            std::mem::offset_of!(Lines, lines),
        ];
        let theirs = [
            size_of::<sys::CUmemLocation>(),
            size_of::<sys::CUmemAllocationProp>(),
            size_of::<sys::CUmemAccessDesc>(),
            size_of::<sys::CUipcMemHandle>(),
            size_of::<sys::CUdevice>(),
            size_of::<sys::CUdeviceptr>(),
            size_of::<sys::CUmemGenericAllocationHandle>(),
            align_of::<sys::CUmemAllocationProp>(),
            align_of::<sys::CUmemAccessDesc>(),
            align_of::<sys::CUipcMemHandle>(),
            std::mem::offset_of!(sys::CUmemAllocationProp, requestedHandleTypes),
            std::mem::offset_of!(sys::CUmemAllocationProp, location),
            std::mem::offset_of!(sys::CUmemAllocationProp, win32HandleMetaData),
            std::mem::offset_of!(sys::CUmemAllocationProp, allocFlags),
            std::mem::offset_of!(sys::CUmemAccessDesc, flags),
            size_of::<sys::CUstream>(),
            size_of::<sys::CUlaunchConfig>(),
            align_of::<sys::CUlaunchConfig>(),
            std::mem::offset_of!(sys::CUlaunchConfig, gridDimX),
            std::mem::offset_of!(sys::CUlaunchConfig, blockDimX),
            std::mem::offset_of!(sys::CUlaunchConfig, sharedMemBytes),
            std::mem::offset_of!(sys::CUlaunchConfig, hStream),
            std::mem::offset_of!(sys::CUlaunchConfig, attrs),
            std::mem::offset_of!(sys::CUlaunchConfig, numAttrs),
            size_of::<sys::CUlaunchAttribute>(),
            align_of::<sys::CUlaunchAttribute>(),
            std::mem::offset_of!(sys::CUlaunchAttribute, id),
            std::mem::offset_of!(sys::CUlaunchAttribute, value),
            size_of::<sys::CUDA_MEMCPY2D>(),
            align_of::<sys::CUDA_MEMCPY2D>(),
            std::mem::offset_of!(sys::CUDA_MEMCPY2D, srcXInBytes),
            std::mem::offset_of!(sys::CUDA_MEMCPY2D, srcMemoryType),
            std::mem::offset_of!(sys::CUDA_MEMCPY2D, srcHost),
            std::mem::offset_of!(sys::CUDA_MEMCPY2D, srcDevice),
            std::mem::offset_of!(sys::CUDA_MEMCPY2D, srcArray),
            std::mem::offset_of!(sys::CUDA_MEMCPY2D, srcPitch),
            std::mem::offset_of!(sys::CUDA_MEMCPY2D, dstXInBytes),
            std::mem::offset_of!(sys::CUDA_MEMCPY2D, dstMemoryType),
            std::mem::offset_of!(sys::CUDA_MEMCPY2D, dstHost),
            std::mem::offset_of!(sys::CUDA_MEMCPY2D, dstDevice),
            std::mem::offset_of!(sys::CUDA_MEMCPY2D, dstArray),
            std::mem::offset_of!(sys::CUDA_MEMCPY2D, dstPitch),
            std::mem::offset_of!(sys::CUDA_MEMCPY2D, WidthInBytes),
            std::mem::offset_of!(sys::CUDA_MEMCPY2D, Height),
        ];
        assert_eq!(ours, theirs);
    }
}
