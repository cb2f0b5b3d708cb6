//! The product of whole matrices, nothing fused into it: by the vendor's library or by our own core,
//! behind one interface.

use iris_heap::{DType, Error, Gpu, Result, Stream, SymmetricHeap};

use crate::args::{Matrix, OpArgs};
use crate::gemm::Gemm;
use crate::library::{Library, Whole};
use crate::target::library_workspace;
use crate::vendor::{Blas, Multiplier, Prepared};

/// What multiplies whole matrices on the device of a heap.
#[derive(Debug)]
pub struct WholeProduct {
    vendor: Option<Prepared>,
    ours: Option<Gemm>,
    /// Whether ours goes first where it is preferred.
    chooses: bool,
}

impl WholeProduct {
    /// What there is on this heap's device for this product; none if there is neither the vendor's
    /// library nor a build of ours. Where ranks share the device there is no vendor's. It may compile
    /// and load: call it where all ranks make an op.
    ///
    /// # Errors
    /// Those of the device, of the compiler, and of a library that is there and fails.
    pub fn new(heap: &SymmetricHeap, whole: &Whole) -> Result<Option<WholeProduct>> {
        let Whole { library, shape, dtype, output, .. } = *whole;
        let device = heap.device();
        let nobody = library == Library::None || shape.contains(&0);
        if nobody || device.kind.traits().host_threads {
            return Ok(None);
        }
        let gpu = heap.gpu()?;
        let vendor = match library {
            Library::Ours => None,
            _ if library_workspace(device.kind).is_none() => None,
            // It loads a kernel when that is first enqueued, which waits for the device: for a kernel of
            // another rank, too, that waits for this one.
            _ if heap.sharing() > 1 => None,
            _ => vendor(gpu, shape, (dtype, output))?,
        };
        // Beside the vendor's, only the builds that are preferred to it.
        let chooses = library == Library::Auto && vendor.is_some();
        let ours = match library {
            Library::Vendor if vendor.is_some() => None,
            _ => Gemm::of_whole(heap, whole, chooses)?,
        };
        let found = vendor.is_some() || ours.is_some();
        Ok(found.then_some(WholeProduct { vendor, ours, chooses }))
    }

    /// What it is: with the device it decides the bits of results.
    pub fn title(&self) -> String {
        let vendor = self.vendor.as_ref().map(Prepared::library);
        let ours = self.ours.as_ref().map(|_| "gemm_sm90".to_string());
        [vendor, ours].into_iter().flatten().collect::<Vec<_>>().join(" or ")
    }

    /// Whether it does this call. The others are for the kernels of operators.
    pub fn fits(&self, args: &OpArgs) -> bool {
        self.vendor.as_ref().is_some_and(|it| it.fits(args, None))
            || self.ours.as_ref().is_some_and(|it| it.fits(args))
    }

    /// Whether it does this call with an addend, by [`WholeProduct::enqueue_adding`]: only the vendor's
    /// library does, and only of a matrix that is like C (of its shape and type, by rows), if all matrices
    /// are aligned to 16 bytes and, unless C is of f32, columns and depth are multiples of 8.
    pub fn fits_adding(&self, args: &OpArgs, addend: &Matrix) -> bool {
        self.vendor.as_ref().is_some_and(|it| it.fits(args, Some(addend)))
    }

    /// Enqueues the product of a call in the order of the heap's ops, if it does this call; whether it
    /// does. `workspace` is the address of as many bytes as [`Whole::memory`] says.
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::Closed`], those of the library; [`Error::Invalid`] for a stream of
    /// another heap.
    ///
    /// # Safety
    /// The matrices in `args` and the workspace are on the device, and live until the stream has
    /// finished the product, and every replay of a graph that it is captured in.
    #[allow(unsafe_code, reason = "products are given the addresses of matrices")]
    pub unsafe fn enqueue(
        &self,
        heap: &SymmetricHeap,
        stream: &Stream,
        args: &OpArgs,
        workspace: u64,
    ) -> Result<bool> {
        let gpu = heap.gpu()?;
        let prefers = |gemm: &&Gemm| !self.chooses || gemm.is_preferred(args);
        if let Some(gemm) = self.ours.as_ref().filter(prefers)
            // SAFETY: as the caller says.
            && unsafe { gemm.launch(gpu, stream, args) }?
        {
            return Ok(true);
        }
        // SAFETY: as the caller says.
        unsafe { self.enqueue_vendors(gpu, stream, (args, None), workspace) }
    }

    /// As [`WholeProduct::enqueue`], of C = A B + the addend, the call's bias added as well: by the vendor's
    /// library, or not at all. Whoever is told that it is not adds by a kernel of its own.
    ///
    /// # Errors
    /// As [`WholeProduct::enqueue`].
    ///
    /// # Safety
    /// As for [`WholeProduct::enqueue`], of the addend, too, which nowhere overlaps C.
    #[allow(unsafe_code, reason = "products are given the addresses of matrices")]
    pub unsafe fn enqueue_adding(
        &self,
        heap: &SymmetricHeap,
        stream: &Stream,
        args: &OpArgs,
        addend: &Matrix,
        workspace: u64,
    ) -> Result<bool> {
        // SAFETY: as the caller says.
        unsafe { self.enqueue_vendors(heap.gpu()?, stream, (args, Some(addend)), workspace) }
    }

    /// By the vendor's library, if it does this call.
    ///
    /// # Safety
    /// As for [`WholeProduct::enqueue_adding`].
    #[allow(unsafe_code, reason = "products are given the addresses of matrices")]
    unsafe fn enqueue_vendors(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        (args, addend): (&OpArgs, Option<&Matrix>),
        workspace: u64,
    ) -> Result<bool> {
        let Some(prepared) = self.vendor.as_ref().filter(|it| it.fits(args, addend)) else {
            return Ok(false);
        };
        let mut done = false;
        gpu.enqueue(stream, |raw| {
            // SAFETY: as the caller says; the device is current, and the stream of it.
            let outcome = unsafe { prepared.enqueue(args, addend, workspace, raw) };
            done = outcome.map_err(Error::other)?;
            Ok(())
        })?;
        Ok(done)
    }
}

/// The vendor's library on this device, if it is there and multiplies such matrices.
fn vendor(gpu: &Gpu, shape: [usize; 3], types: (DType, DType)) -> Result<Option<Prepared>> {
    use crate::vendor::Error as Missing;
    let made = gpu.apart(|| {
        let made = Blas::get(gpu.kind())
            .and_then(|blas| Multiplier::new(&blas))
            .and_then(|of| Prepared::new(of, shape, types, Prepared::WORKSPACE));
        Ok(made)
    })?;
    match made {
        Ok(prepared) => Ok(Some(prepared)),
        Err(
            why @ (Missing::NotFound { .. } | Missing::TooOld { .. } | Missing::NoAlgorithm { .. }),
        ) => {
            tracing::debug!(%why, "the product is ours");
            Ok(None)
        }
        Err(other) => Err(Error::other(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_known_by_its_name() {
        for library in Library::ALL {
            assert_eq!(library.to_string().parse(), Ok(library));
        }
        let error = "theirs".parse::<Library>().unwrap_err();
        assert_eq!(error, "library is \"theirs\", expected auto, vendor, ours or none");
    }
}
