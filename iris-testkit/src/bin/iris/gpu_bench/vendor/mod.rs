//! NCCL and cuBLASLt, loaded at run time: the few functions that are called, each through one place.
//!
//! cudarc has them too, but looks for neither by the names that CUDA 13 gives them, and panics where
//! one is missing.

#![allow(unsafe_code, reason = "libraries are loaded, and functions found by name")]

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, ensure};
use iris_heap::{DType, SymSlice, SymmetricHeap};
use libloading::Library;

/// The variable that keeps NCCL away from NVLink multicast, and the value it must have: multicast
/// can put the GPUs of a host that others share out of service.
pub(crate) const NO_MULTICAST: (&str, &str) = ("NCCL_NVLS_ENABLE", "0");

macro_rules! library {
    ($table:ident, $($name:ident($($arg:ty),* $(,)?) -> $ret:ty;)*) => {
        #[allow(non_snake_case)]
        pub(super) struct $table {
            $($name: unsafe extern "C" fn($($arg),*) -> $ret,)*
            /// Never called: keeps the functions.
            _library: libloading::Library,
        }

        impl $table {
            #[allow(non_snake_case)]
            pub(super) fn of(library: libloading::Library) -> Result<$table, String> {
                $(
                    let name = concat!(stringify!($name), "\0");
                    // SAFETY: the type is that of the vendor's header.
                    let symbol = unsafe {
                        library.get::<unsafe extern "C" fn($($arg),*) -> $ret>(name.as_bytes())
                    };
                    let $name = *symbol.map_err(|e| e.to_string())?;
                )*
                Ok($table { $($name,)* _library: library })
            }
        }
    };
}

pub(super) use blas::{Multiplier, Product};
pub(super) use nccl::Communicator;

mod blas;
mod nccl;

/// What the libraries call an object of theirs, or the driver a stream.
type Handle = *mut c_void;

/// The libraries of this machine; of one that is missing, why.
pub(crate) struct Vendors {
    nccl: Result<nccl::Table, String>,
    blas: Result<blas::Table, String>,
}

impl Vendors {
    /// Looks in `folders`, then where the loader does, then among CUDA's and Python's packages.
    pub(crate) fn load(folders: &[PathBuf]) -> Vendors {
        let (variable, value) = NO_MULTICAST;
        let nccl = match std::env::var(variable) {
            Ok(set) if set == value => open(&["libnccl.so.2", "libnccl.so"], folders),
            _ => Err(format!("{variable} is not {value} in the environment")),
        };
        let names = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
        Vendors {
            nccl: nccl.and_then(nccl::Table::of),
            blas: open(&names, folders).and_then(blas::Table::of),
        }
    }

    /// What is there, by version, for the record.
    pub(crate) fn versions(&self) -> (String, String) {
        let nccl = self.nccl.as_ref().map(nccl::Table::version);
        let blas = self.blas.as_ref().map(blas::Table::version);
        let text = |found: Result<String, &String>| found.unwrap_or_else(|e| format!("none: {e}"));
        (text(nccl), text(blas))
    }

    fn nccl(&self) -> Result<&nccl::Table> {
        self.nccl.as_ref().map_err(|e| anyhow::anyhow!("no NCCL: {e}"))
    }

    fn blas(&self) -> Result<&blas::Table> {
        self.blas.as_ref().map_err(|e| anyhow::anyhow!("no cuBLASLt: {e}"))
    }
}

/// The first of these names that loads.
fn open(names: &[&str], folders: &[PathBuf]) -> Result<Library, String> {
    let mut folders = folders.to_vec();
    let given = folders.len();
    folders.push("/usr/local/cuda/lib64".into());
    folders.extend(packages());
    let place = |folder: &PathBuf| names.iter().map(|name| folder.join(name)).collect::<Vec<_>>();
    let by_name = names.iter().map(PathBuf::from);
    let places: Vec<PathBuf> = folders[..given].iter().flat_map(place).collect();
    let known = folders[given..].iter().flat_map(place);
    let mut problem = format!("{} was not found", names[0]);
    for path in places.into_iter().chain(by_name).chain(known) {
        if path.components().count() > 1 && !path.exists() {
            continue;
        }
        // SAFETY: the vendors' libraries are made to be loaded by any program.
        match unsafe { Library::new(&path) } {
            Ok(library) => return Ok(library),
            Err(e) if path.components().count() > 1 => problem = e.to_string(),
            Err(_) => {}
        }
    }
    Err(problem)
}

/// The folders of libraries among the Python packages of the interpreters on the path.
fn packages() -> Vec<PathBuf> {
    let entries = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut found = Vec::new();
    for folder in std::env::split_paths(&path) {
        if !folder.join("python3").exists() {
            continue;
        }
        let Some(root) = folder.parent() else { continue };
        for lib in entries(&root.join("lib")) {
            for packages in ["site-packages", "dist-packages"] {
                let vendor = entries(&lib.join(packages).join("nvidia"));
                found.extend(vendor.into_iter().map(|it| it.join("lib")).filter(|it| it.is_dir()));
            }
        }
    }
    found
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
