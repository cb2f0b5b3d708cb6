//! Whole-matrix GEMM without fused communication: one interface for the vendor's library and the
//! built-in GEMM.

use iris_heap::{Error, Gpu, Result, Stream, SymmetricHeap};

use crate::args::{Matrix, OpArgs};
use crate::gemm::Gemm;
use crate::library::{GemmRequest, Library, VendorBits};
use crate::target::library_workspace;
use crate::vendor::{Blas, Multiplier, Prepared};

/// Whole-matrix GEMM implementations on the device of a heap.
#[derive(Debug)]
pub struct LibraryGemm {
    vendor: Option<Prepared>,
    ours: Option<Gemm>,
    /// Implementation that is preferred where both can do a call. By [`Library::Auto`] it is the
    /// vendor's, and the built-in GEMM for the shapes for which that was measured to be faster.
    preferred: Library,
}

impl LibraryGemm {
    /// Loads the GEMM implementations for this product on the heap's device. `None` if there is
    /// neither the vendor's library nor a build of the built-in GEMM. The vendor's library is not
    /// used if ranks share the device, unless `CUDA_MODULE_LOADING` is `EAGER`. This function may
    /// compile and load kernels, so call it where all ranks make an op.
    ///
    /// # Errors
    /// Errors of the device, of the compiler, and of an installed library that fails.
    pub fn new(heap: &SymmetricHeap, whole: &GemmRequest) -> Result<Option<LibraryGemm>> {
        let GemmRequest { library, shape, batch_invariant, .. } = *whole;
        let device = heap.device();
        let disabled = library == Library::None || shape.contains(&0);
        if disabled || device.kind.traits().host_threads {
            return Ok(None);
        }
        let gpu = heap.gpu()?;
        let vendor = match library {
            Library::Ours => None,
            _ if library_workspace(device.kind).is_none() => None,
            // The vendor's library loads a kernel when it is first enqueued, and loading waits
            // until the whole device is idle. If ranks share the device, loading would wait for a
            // kernel of another rank, which may wait for this rank: a deadlock. A driver that loads
            // eagerly has loaded all kernels before.
            _ if heap.ranks_on_device() > 1 && !loads_eagerly() => None,
            _ => vendor(gpu, &device.name, whole)?,
        };
        // If the vendor's library can do all calls, only builds of the built-in GEMM that are faster
        // than the library for some shape are loaded.
        let chooses_by_shape = library == Library::Auto && vendor.is_some();
        let ours = match library {
            Library::Vendor if vendor.is_some() && !batch_invariant => None,
            _ => Gemm::of_whole(heap, whole, chooses_by_shape && !batch_invariant)?,
        };
        let found = vendor.is_some() || ours.is_some();
        Ok(found.then_some(LibraryGemm { vendor, ours, preferred: library }))
    }

    /// Names and versions of the GEMM implementations. Together with the device, they determine the
    /// bits of results.
    pub fn title(&self) -> String {
        let vendor = self.vendor.as_ref().map(Prepared::library);
        let ours = self.ours.as_ref().map(|_| "gemm_sm90".to_string());
        [vendor, ours].into_iter().flatten().collect::<Vec<_>>().join(" or ")
    }

    /// Whether a whole-matrix GEMM can do this call; otherwise the operator uses its tile GEMM.
    pub fn fits(&self, args: &OpArgs) -> bool {
        self.vendor.as_ref().is_some_and(|it| it.fits(args, None))
            || self.ours.as_ref().is_some_and(|it| it.fits(args))
    }

    /// Returns whether [`LibraryGemm::enqueue_adding`] supports the call with this addend. Only the
    /// vendor's library can add, and only a row-major matrix of C's shape and type. All matrices
    /// must be aligned to 16 bytes. Unless C is f32, columns and depth must be multiples of 8.
    pub fn fits_adding(&self, args: &OpArgs, addend: &Matrix) -> bool {
        self.vendor.as_ref().is_some_and(|it| it.fits(args, Some(addend)))
    }

    /// Enqueues the product of a call in the order of the heap's ops, by the preferred
    /// implementation or, if that implementation refuses the call, by the other one. Returns false
    /// if no implementation can do the call. `workspace` is the address of a workspace of
    /// [`GemmRequest::library_bytes`] bytes.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Closed`]; errors of the library; [`Error::Invalid`] for a stream
    /// of another heap.
    ///
    /// # Safety
    /// The matrices in `args` and the workspace are on the device. They live until the stream has
    /// finished the product, and every replay of a graph that captured the product.
    #[allow(unsafe_code, reason = "products are given the addresses of matrices")]
    pub unsafe fn enqueue(
        &self,
        heap: &SymmetricHeap,
        stream: &Stream,
        args: &OpArgs,
        workspace: u64,
    ) -> Result<bool> {
        let gpu = heap.gpu()?;
        let ours = || match &self.ours {
            // SAFETY: the caller keeps this function's contract, which covers that of `launch`.
            Some(gemm) => unsafe { gemm.launch(gpu, stream, args) },
            None => Ok(false),
        };
        let prefers = |gemm: &Gemm| match (self.preferred, &self.vendor) {
            (Library::Auto, Some(_)) => gemm.is_preferred(args),
            (preferred, _) => preferred != Library::Vendor,
        };
        let ours_first = self.ours.as_ref().is_some_and(prefers);
        if ours_first && ours()? {
            return Ok(true);
        }
        // SAFETY: the caller keeps this function's contract, which covers that of `enqueue_vendors`
        // without an addend.
        let done = unsafe { self.enqueue_vendors(gpu, stream, (args, None), workspace) }?;
        // The vendor's library may refuse a product as late as here. The built-in GEMM is then
        // tried, unless it was tried first.
        Ok(done || !ours_first && ours()?)
    }

    /// Enqueues C = A B + addend, plus the call's bias, by the vendor's library. Returns false if
    /// the library cannot do this; the caller must then add the addend by a kernel of its own.
    ///
    /// # Errors
    /// Errors of [`LibraryGemm::enqueue`].
    ///
    /// # Safety
    /// The contract of [`LibraryGemm::enqueue`] applies, also to the addend. The addend does not
    /// overlap C.
    #[allow(unsafe_code, reason = "products are given the addresses of matrices")]
    pub unsafe fn enqueue_adding(
        &self,
        heap: &SymmetricHeap,
        stream: &Stream,
        args: &OpArgs,
        addend: &Matrix,
        workspace: u64,
    ) -> Result<bool> {
        // SAFETY: the caller keeps this function's contract, which equals that of
        // `enqueue_vendors`.
        unsafe { self.enqueue_vendors(heap.gpu()?, stream, (args, Some(addend)), workspace) }
    }

    /// Enqueues the product by the vendor's library; returns false if the library cannot do it.
    ///
    /// # Safety
    /// The contract of [`LibraryGemm::enqueue_adding`] applies.
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
            // SAFETY: the caller keeps this function's contract; the device is current, and the
            // stream belongs to it.
            let outcome = unsafe { prepared.enqueue(args, addend, workspace, raw) };
            done = outcome.map_err(Error::other)?;
            Ok(())
        })?;
        Ok(done)
    }
}

/// Whether CUDA's driver loads all kernels of a library at once.
fn loads_eagerly() -> bool {
    std::env::var_os("CUDA_MODULE_LOADING").is_some_and(|it| it == "EAGER")
}

/// Prepares the vendor's library on this device, whose name is `device`, for a product. `None` if the
/// library is missing or may not do such products.
fn vendor(gpu: &Gpu, device: &str, whole: &GemmRequest) -> Result<Option<Prepared>> {
    use crate::vendor::Error as Missing;
    let GemmRequest { shape: shape @ [_, n, k], dtype, output, .. } = *whole;
    let prepare = |of: Multiplier| {
        if !whole.batch_invariant {
            return Prepared::new(of, shape, (dtype, output), Prepared::WORKSPACE).map(Some);
        }
        let title = of.title();
        let known = |it: &&VendorBits| {
            let here = it.library == title && it.device == device;
            here && [dtype, output] == [it.dtype; 2]
                && it.shapes.contains(&[n, k])
                && whole.k_parts == 1
        };
        match whole.vendor_bits.iter().find(known) {
            None => Ok(None),
            Some(known) => Prepared::with_one_set_of_bits(of, shape, dtype, known.rows).map(Some),
        }
    };
    let made = gpu.with_relaxed_capture(|| {
        Ok(Blas::get(gpu.kind()).and_then(|blas| Multiplier::new(&blas)).and_then(prepare))
    })?;
    match made {
        Ok(prepared) => Ok(prepared),
        Err(
            why @ (Missing::NotFound { .. } | Missing::TooOld { .. } | Missing::NoAlgorithm { .. }),
        ) => {
            tracing::debug!(%why, "the vendor's library is not used");
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
