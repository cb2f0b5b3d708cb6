//! NCCL and cuBLASLt, loaded at run time: the few functions that are called, each through one place.
//!
//! cudarc has them too, but looks for neither by the names that CUDA 13 gives them, and panics where
//! one is missing.

#![allow(unsafe_code, reason = "libraries are loaded, and functions found by name")]

use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, ensure};
use iris_heap::{DType, SymSlice, SymmetricHeap};
use iris_kernels::vendor::{Blas, Dialect};

/// The variable that keeps NCCL away from NVLink multicast, and the value it must have: multicast
/// can put the GPUs of a host that others share out of service.
pub(crate) const NO_MULTICAST: (&str, &str) = ("NCCL_NVLS_ENABLE", "0");

pub(super) use blas::{Multiplier, Product};
pub(super) use nccl::{Communicator, Window};

mod blas;
mod nccl;

/// What the libraries call an object of theirs, or the driver a stream.
type Handle = *mut c_void;

/// The libraries of this machine; of one that is missing, why.
pub(crate) struct Vendors {
    nccl: Result<nccl::Nccl, String>,
    blas: Result<Arc<Blas>, String>,
}

impl Vendors {
    /// Looks in `folders`, then among CUDA's and Python's packages, then where the loader does.
    pub(crate) fn load(folders: &[PathBuf]) -> Vendors {
        let (variable, value) = NO_MULTICAST;
        let nccl = match std::env::var(variable) {
            Ok(set) if set == value => nccl::load(folders).map_err(|e| e.to_string()),
            _ => Err(format!("{variable} is not {value} in the environment")),
        };
        let blas = Blas::load(&Dialect::CUBLASLT, folders).map_err(|e| e.to_string());
        Vendors { nccl, blas: blas.map(Arc::new) }
    }

    /// What is there, by version, for the record.
    pub(crate) fn versions(&self) -> (String, String) {
        let nccl = self.nccl.as_ref().map(|nccl| nccl.version());
        let blas = self.blas.clone().and_then(|blas| blas.version().map_err(|e| e.to_string()));
        let text = |found: Result<String, String>| found.unwrap_or_else(|e| format!("none: {e}"));
        (text(nccl.map_err(Clone::clone)), text(blas))
    }

    fn nccl(&self) -> Result<&nccl::Nccl> {
        self.nccl.as_ref().map_err(|e| anyhow::anyhow!("no NCCL: {e}"))
    }

    fn blas(&self) -> Result<&Arc<Blas>> {
        self.blas.as_ref().map_err(|e| anyhow::anyhow!("no cuBLASLt: {e}"))
    }
}

/// A part of this rank's data segment. The heap is held, and whoever enqueues work on a buffer
/// waits for it before the heap is closed.
#[derive(Clone)]
pub(crate) struct Buffer {
    heap: Arc<SymmetricHeap>,
    offset: u64,
    bytes: u64,
}

impl Buffer {
    /// Of a slice of this heap.
    pub(crate) fn of(heap: &Arc<SymmetricHeap>, slice: SymSlice<u8>) -> Result<Buffer> {
        heap.resolve(slice, heap.rank())?;
        Ok(Buffer { heap: heap.clone(), offset: slice.offset(), bytes: slice.bytes() })
    }

    /// From the first of these, which are of one heap, to the end of the last.
    pub(crate) fn around(all: &[&Buffer]) -> Buffer {
        let offset = all.iter().map(|buffer| buffer.offset).min().unwrap_or_default();
        let end = all.iter().map(|buffer| buffer.offset + buffer.bytes).max().unwrap_or_default();
        Buffer { heap: all[0].heap.clone(), offset, bytes: end - offset }
    }

    /// From byte `first` on.
    pub(crate) fn from(&self, first: usize) -> Result<Buffer> {
        let first = first as u64;
        ensure!(first <= self.bytes, "byte {first} of a buffer of {}", self.bytes);
        Ok(Buffer { offset: self.offset + first, bytes: self.bytes - first, ..self.clone() })
    }

    /// Whether there is room for so many elements.
    pub(crate) fn holds(&self, count: usize, dtype: DType) -> bool {
        (count * dtype.size()) as u64 <= self.bytes
    }

    /// The address of so many elements.
    fn address(&self, count: usize, dtype: DType) -> Result<u64> {
        let bytes = count * dtype.size();
        ensure!(self.holds(count, dtype), "{bytes} bytes of a buffer of {}", self.bytes);
        Ok(self.heap.view().data[self.heap.rank()] + self.offset)
    }
}
