//! NCCL and cuBLASLt, or RCCL and hipBLASLt, loaded at run time: the few functions that are used.
//!
//! cudarc is not used for them, because it does not search for the file names of CUDA 13 and panics
//! if a library is missing.

#![allow(unsafe_code, reason = "the collective library gets addresses of the device")]

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use iris_heap::{BackendKind, DType, SymSlice, SymmetricHeap};
use iris_kernels::vendor::{
    Blas, Communicator, CommunicatorOptions, Dialect, Nccl, NcclCall, Window,
};

/// Environment variable and value that keep NCCL from using NVLink multicast, which can put GPUs
/// that others share out of service.
pub(crate) const NO_MULTICAST: (&str, &str) = ("NCCL_NVLS_ENABLE", "0");

pub(super) use blas::{Multiplier, Product};

mod blas;

/// Collective library and GEMM library of this machine, or the reasons why they are missing.
pub(crate) struct Vendors {
    kind: BackendKind,
    nccl: Result<Arc<Nccl>, String>,
    blas: Result<Arc<Blas>, String>,
}

impl Vendors {
    /// Loads both libraries, from the places where operators find them.
    pub(crate) fn load(kind: BackendKind) -> Vendors {
        let nccl = Nccl::get(kind).map_err(|error| error.to_string());
        let blas = Blas::load(dialect(kind), &[]).map_err(|error| error.to_string());
        Vendors { kind, nccl, blas: blas.map(Arc::new) }
    }

    /// Names of the collective library and of the GEMM library.
    pub(crate) fn names(&self) -> [&'static str; 2] {
        [Nccl::name(self.kind), dialect(self.kind).name]
    }

    /// Versions of both libraries, for the record. A device must be current.
    pub(crate) fn versions(&self) -> [Result<String, String>; 2] {
        let nccl = self.nccl.as_ref().map(|nccl| nccl.version()).map_err(Clone::clone);
        let blas = self.blas.clone().and_then(|it| it.version().map_err(|e| e.to_string()));
        [nccl, blas]
    }

    /// Versions of the libraries that work on the current device (hipBLASLt may lack kernels for
    /// it); for a library that does not work, the reason.
    pub(crate) fn usable(&self) -> [Result<String, String>; 2] {
        let [nccl, blas] = self.versions();
        let tried = || Multiplier::new(self)?.product([256; 3], DType::BF16, false).map(drop);
        let blas = blas.and_then(|it| tried().map(|()| it).map_err(|why| why.to_string()));
        [nccl, blas]
    }

    /// Paths of the libraries' files.
    pub(crate) fn paths(&self) -> [Result<&Path, &str>; 2] {
        let nccl = self.nccl.as_ref().map(|nccl| nccl.path());
        [nccl.map_err(|e| &**e), self.blas.as_ref().map(|blas| blas.path()).map_err(|e| &**e)]
    }

    /// Returns the collective library to make communicators with; fails unless NVLink multicast is
    /// disabled by [`NO_MULTICAST`].
    pub(super) fn nccl(&self) -> Result<&Arc<Nccl>> {
        let (variable, value) = NO_MULTICAST;
        let set = std::env::var(variable).is_ok_and(|set| set == value);
        ensure!(
            set || self.kind != BackendKind::Cuda,
            "environment variable {variable} must be {value}"
        );
        let name = Nccl::name(self.kind);
        self.nccl.as_ref().map_err(|e| anyhow::anyhow!("no {name}: {e}"))
    }

    /// Creates this rank's communicator on the current device, with the library's own defaults;
    /// returns when all ranks have joined.
    pub(super) fn join(&self, id: &[u8], place: (usize, usize)) -> Result<Communicator> {
        let bytes = id.len();
        let id =
            id.try_into().with_context(|| format!("the id has {bytes} bytes: expected 128"))?;
        Ok(Communicator::new(self.nccl()?, id, place, CommunicatorOptions::default(), || false)?)
    }

    fn blas(&self) -> Result<&Arc<Blas>> {
        let name = dialect(self.kind).name;
        self.blas.as_ref().map_err(|e| anyhow::anyhow!("no {name}: {e}"))
    }
}

fn dialect(kind: BackendKind) -> &'static Dialect {
    if kind == BackendKind::Cuda { &Dialect::CUBLASLT } else { &Dialect::HIPBLASLT }
}

/// Range of this rank's data segment that libraries work on. It keeps the heap alive; wait for the
/// work that is enqueued on a buffer before closing the heap.
#[derive(Clone)]
pub(crate) struct Buffer {
    heap: Arc<SymmetricHeap>,
    offset: u64,
    bytes: u64,
}

impl Buffer {
    /// Makes a buffer of `slice`, an allocation of `heap`.
    pub(crate) fn of(heap: &Arc<SymmetricHeap>, slice: SymSlice<u8>) -> Result<Buffer> {
        heap.resolve(slice, heap.rank())?;
        Ok(Buffer { heap: heap.clone(), offset: slice.offset(), bytes: slice.bytes() })
    }

    /// Memory range from the first of the buffers, all in one heap, to the end of the last.
    pub(crate) fn around(all: &[&Buffer]) -> Buffer {
        let offset = all.iter().map(|buffer| buffer.offset).min().unwrap_or_default();
        let end = all.iter().map(|buffer| buffer.offset + buffer.bytes).max().unwrap_or_default();
        Buffer { heap: all[0].heap.clone(), offset, bytes: end - offset }
    }

    /// Part of the buffer from byte `first` to its end.
    pub(crate) fn from(&self, first: usize) -> Result<Buffer> {
        let first = first as u64;
        ensure!(
            first <= self.bytes,
            "byte {first} is beyond the end of a buffer of {} bytes",
            self.bytes
        );
        Ok(Buffer { offset: self.offset + first, bytes: self.bytes - first, ..self.clone() })
    }

    /// Whether the buffer has room for `count` elements of type `dtype`.
    pub(crate) fn holds(&self, count: usize, dtype: DType) -> bool {
        (count * dtype.size()) as u64 <= self.bytes
    }

    /// Address of the buffer; an error if it has no room for `count` elements of type `dtype`.
    fn address(&self, count: usize, dtype: DType) -> Result<u64> {
        let bytes = count * dtype.size();
        ensure!(
            self.holds(count, dtype),
            "{bytes} bytes do not fit a buffer of {} bytes",
            self.bytes
        );
        Ok(self.heap.view().data[self.heap.local_rank()] + self.offset)
    }
}

/// Enqueues a collective of `count` elements per part; an error if a buffer has no room for its
/// parts.
pub(super) fn collective(
    of: &Communicator,
    call: NcclCall,
    (from, to): (&Buffer, &Buffer),
    (count, dtype): (usize, DType),
    stream: u64,
) -> Result<()> {
    let (reads, writes) = call.parts(of.ranks());
    let places = (from.address(reads * count, dtype)?, to.address(writes * count, dtype)?);
    // SAFETY: the buffers hold the elements, on the stream's device, which is current; the caller
    // waits for the stream before the heap is closed.
    unsafe { of.enqueue(call, places, (count, Some(dtype)), stream) }.map_err(Into::into)
}

/// Registers `memory` of all ranks as one window: collective over the ranks. Close the window before
/// the heap.
pub(super) fn register<'a>(of: &'a Communicator, memory: &Buffer) -> Result<Window<'a>> {
    let place = (memory.address(0, DType::U8)?, memory.bytes as usize);
    // SAFETY: the memory belongs to this rank's heap, which the caller closes after the window.
    unsafe { of.register(place) }.map_err(Into::into)
}
