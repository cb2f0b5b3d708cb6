//! NCCL, or RCCL, which has its interface: the collectives of one rank.

#![allow(unsafe_code, reason = "functions of a C library, on memory of the device")]

use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use anyhow::{Result, bail};
use iris_heap::{BackendKind, DType};
use iris_kernels::vendor::{cuda_folders, find, hip_folders, library, open};

use super::{Buffer, Handle, Vendors};

/// An `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([u8; 128]);

library! { Table,
    ncclGetVersion(*mut c_int) -> c_int;
    ncclGetErrorString(c_int) -> *const c_char;
    ncclGetUniqueId(*mut UniqueId) -> c_int;
    ncclCommInitRank(*mut Handle, c_int, UniqueId, c_int) -> c_int;
    ncclCommDestroy(Handle) -> c_int;
    ncclAllReduce(u64, u64, usize, c_int, c_int, Handle, Handle) -> c_int;
    ncclReduceScatter(u64, u64, usize, c_int, c_int, Handle, Handle) -> c_int;
    ncclAllGather(u64, u64, usize, c_int, Handle, Handle) -> c_int;
    ncclBroadcast(u64, u64, usize, c_int, c_int, Handle, Handle) -> c_int;
    ncclSend(u64, usize, c_int, c_int, Handle, Handle) -> c_int;
    ncclRecv(u64, usize, c_int, c_int, Handle, Handle) -> c_int;
    ncclGroupStart() -> c_int;
    ncclGroupEnd() -> c_int;
}

library! { WindowTable,
    ncclCommWindowRegister(Handle, u64, usize, *mut Handle, c_int) -> c_int;
    ncclCommWindowDeregister(Handle, Handle) -> c_int;
}

library! { ErrorTable,
    ncclGetLastError(Handle) -> *const c_char;
}

/// `NCCL_WIN_COLL_SYMMETRIC`: all ranks have it at the same offset of theirs.
const SYMMETRIC: c_int = 1;

/// The library, and what releases of old have not.
pub(super) struct Nccl {
    table: Table,
    windows: Result<WindowTable, String>,
    errors: Option<ErrorTable>,
    /// A variable without which the library refuses some devices, and the value it must have.
    needs: Option<(&'static str, &'static str)>,
    pub(super) path: PathBuf,
}

impl std::ops::Deref for Nccl {
    type Target = Table;

    fn deref(&self) -> &Table {
        &self.table
    }
}

impl Table {
    pub(super) fn version(&self) -> String {
        let mut version = 0;
        // SAFETY: `version` is where the answer goes.
        unsafe { (self.ncclGetVersion)(&mut version) };
        format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
    }
}

/// The library for this kind of device.
pub(super) fn name(kind: BackendKind) -> &'static str {
    if kind == BackendKind::Cuda { "NCCL" } else { "RCCL" }
}

/// The library of this machine, first looked for in `folders`.
pub(super) fn load(kind: BackendKind, folders: &[PathBuf]) -> Result<Nccl> {
    // RCCL refuses gfx942 and gfx950 without it, unless their firmware and HIP are recent.
    let needs = (kind == BackendKind::Hip).then_some(("HSA_NO_SCRATCH_RECLAIM", "1"));
    let load = |file: &Path| {
        let table = Table::of(open(file)?, "")?;
        let windows = WindowTable::of(open(file)?, "");
        let errors = ErrorTable::of(open(file)?, "").ok();
        Ok(Nccl { table, windows, errors, needs, path: file.to_owned() })
    };
    let (names, file, bare, usual) = match kind {
        BackendKind::Cuda => {
            let wheels = ["nvidia/nccl/lib", "nvidia/cu13/lib"];
            let bare = ["libnccl.so.2", "libnccl.so"];
            (("NCCL (libnccl.so)", "IRIS_NCCL"), "libnccl.so", bare, cuda_folders(&wheels))
        }
        _ => {
            let bare = ["librccl.so.1", "librccl.so"];
            (("RCCL (librccl.so)", "IRIS_RCCL"), "librccl.so", bare, hip_folders())
        }
    };
    Ok(find(names, &[folders, &usual].concat(), (file, &bare), load)?)
}

/// A rank's communicator.
pub(crate) struct Communicator<'a> {
    table: &'a Nccl,
    handle: Handle,
    ranks: usize,
    rank: usize,
}

impl<'a> Communicator<'a> {
    /// The id that all ranks of a communicator are given, from one of them.
    pub(crate) fn id(vendors: &Vendors) -> Result<Vec<u8>> {
        let table = vendors.nccl()?;
        let mut id = UniqueId([0; 128]);
        // SAFETY: `id` is where the answer goes.
        check(table, "ncclGetUniqueId", unsafe { (table.ncclGetUniqueId)(&mut id) })?;
        Ok(id.0.to_vec())
    }

    /// This rank's, on the device that is current: returns when all ranks are there.
    pub(crate) fn new(
        vendors: &'a Vendors,
        id: &[u8],
        (rank, ranks): (usize, usize),
    ) -> Result<Communicator<'a>> {
        let table = vendors.nccl()?;
        let Ok(id) = id.try_into() else { bail!("an id of {} bytes, not 128", id.len()) };
        let mut handle = null_mut();
        // SAFETY: `handle` is where the answer goes.
        let code = unsafe {
            (table.ncclCommInitRank)(&mut handle, ranks as c_int, UniqueId(id), rank as c_int)
        };
        check(table, "ncclCommInitRank", code)?;
        Ok(Communicator { table, handle, ranks, rank })
    }

    /// Lets the library treat this memory of all ranks as one window, by which its kernels may reach
    /// peers as ours do: collective, and returns when all ranks have told of theirs.
    pub(crate) fn register(&self, memory: &Buffer) -> Result<Window<'_>> {
        let windows =
            self.table.windows.as_ref().map_err(|e| anyhow::anyhow!("no windows: {e}"))?;
        let mut handle = null_mut();
        let (address, bytes) = (memory.address(0, DType::U8)?, memory.bytes as usize);
        // SAFETY: the memory is of this rank, and the buffer keeps it; `handle` is where the answer goes.
        let code = unsafe {
            (windows.ncclCommWindowRegister)(self.handle, address, bytes, &mut handle, SYMMETRIC)
        };
        check(self.table, "ncclCommWindowRegister", code)?;
        Ok(Window { of: self, windows, handle, _memory: memory.clone() })
    }

    /// Gives it back, once what was enqueued is done. It is not a destructor: after a failure its
    /// kernels may never end, and this would wait for them.
    pub(crate) fn close(self) -> Result<()> {
        // SAFETY: the handle is this value's.
        let code = unsafe { (self.table.ncclCommDestroy)(self.handle) };
        check(self.table, "ncclCommDestroy", code)
    }

    pub(crate) fn all_reduce(
        &self,
        (from, to): (&Buffer, &Buffer),
        count: usize,
        dtype: DType,
        stream: u64,
    ) -> Result<()> {
        let (from, to) = (from.address(count, dtype)?, to.address(count, dtype)?);
        let (code, stream) = (nccl_type(dtype)?, stream as usize as Handle);
        // SAFETY: the buffers hold so many elements; communicator and stream are alive.
        let code =
            unsafe { (self.table.ncclAllReduce)(from, to, count, code, SUM, self.handle, stream) };
        check(self.table, "ncclAllReduce", code)
    }

    /// `count` elements for each rank.
    pub(crate) fn reduce_scatter(
        &self,
        (from, to): (&Buffer, &Buffer),
        count: usize,
        dtype: DType,
        stream: u64,
    ) -> Result<()> {
        let from = from.address(count * self.ranks, dtype)?;
        let to = to.address(count, dtype)?;
        let (code, stream) = (nccl_type(dtype)?, stream as usize as Handle);
        // SAFETY: as in `all_reduce`.
        let code = unsafe {
            (self.table.ncclReduceScatter)(from, to, count, code, SUM, self.handle, stream)
        };
        check(self.table, "ncclReduceScatter", code)
    }

    /// `count` elements of each rank.
    pub(crate) fn all_gather(
        &self,
        (from, to): (&Buffer, &Buffer),
        count: usize,
        dtype: DType,
        stream: u64,
    ) -> Result<()> {
        let from = from.address(count, dtype)?;
        let to = to.address(count * self.ranks, dtype)?;
        let (code, stream) = (nccl_type(dtype)?, stream as usize as Handle);
        // SAFETY: as in `all_reduce`.
        let code =
            unsafe { (self.table.ncclAllGather)(from, to, count, code, self.handle, stream) };
        check(self.table, "ncclAllGather", code)
    }

    /// From rank 0.
    pub(crate) fn broadcast(
        &self,
        (from, to): (&Buffer, &Buffer),
        count: usize,
        dtype: DType,
        stream: u64,
    ) -> Result<()> {
        let to = to.address(count, dtype)?;
        // Only the root's is read.
        let from = if self.rank == 0 { from.address(count, dtype)? } else { to };
        let (code, stream) = (nccl_type(dtype)?, stream as usize as Handle);
        // SAFETY: as in `all_reduce`.
        let code =
            unsafe { (self.table.ncclBroadcast)(from, to, count, code, 0, self.handle, stream) };
        check(self.table, "ncclBroadcast", code)
    }

    /// `count` elements to and from each rank, by sends and receives.
    pub(crate) fn all_to_all(
        &self,
        (from, to): (&Buffer, &Buffer),
        count: usize,
        dtype: DType,
        stream: u64,
    ) -> Result<()> {
        let from = from.address(count * self.ranks, dtype)?;
        let to = to.address(count * self.ranks, dtype)?;
        let (code, stream) = (nccl_type(dtype)?, stream as usize as Handle);
        let table = self.table;
        // SAFETY: a function without arguments.
        check(table, "ncclGroupStart", unsafe { (table.ncclGroupStart)() })?;
        for peer in 0..self.ranks {
            let at = (peer * count * dtype.size()) as u64;
            let rank = peer as c_int;
            // SAFETY: as in `all_reduce`: the part of this peer is within the buffer.
            let sent =
                unsafe { (table.ncclSend)(from + at, count, code, rank, self.handle, stream) };
            check(table, "ncclSend", sent)?;
            // SAFETY: as above.
            let received =
                unsafe { (table.ncclRecv)(to + at, count, code, rank, self.handle, stream) };
            check(table, "ncclRecv", received)?;
        }
        // SAFETY: a function without arguments.
        check(table, "ncclGroupEnd", unsafe { (table.ncclGroupEnd)() })
    }
}

/// `ncclSum`.
const SUM: c_int = 0;

fn nccl_type(dtype: DType) -> Result<c_int> {
    Ok(match dtype {
        DType::I32 => 2,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::BF16 => 9,
        other => bail!("{other} is not timed with it"),
    })
}

/// Memory that a communicator treats as one window.
pub(crate) struct Window<'a> {
    of: &'a Communicator<'a>,
    windows: &'a WindowTable,
    handle: Handle,
    _memory: Buffer,
}

impl Window<'_> {
    /// Gives it back, once what was enqueued is done: collective.
    pub(crate) fn close(self) -> Result<()> {
        // SAFETY: the handle is this value's, and the communicator is alive.
        let code = unsafe { (self.windows.ncclCommWindowDeregister)(self.of.handle, self.handle) };
        check(self.of.table, "ncclCommWindowDeregister", code)
    }
}

/// Turns an outcome into an error, with all that the library says of it, and what to set if a variable is missing.
fn check(nccl: &Nccl, function: &str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the function takes any number and returns a constant that ends with zero.
    let text = unsafe { CStr::from_ptr((nccl.ncclGetErrorString)(code)) };
    let mut why = format!("{function}: {} ({code})", text.to_string_lossy());
    if let Some(errors) = &nccl.errors {
        // SAFETY: the communicator may be null.
        let last = unsafe { (errors.ncclGetLastError)(null_mut()) };
        // SAFETY: the text is the library's own and ends with zero.
        let last = (!last.is_null()).then(|| unsafe { CStr::from_ptr(last) }.to_string_lossy());
        if let Some(last) = last.filter(|last| !last.trim().is_empty()) {
            why += &format!(": {}", last.trim());
        }
    }
    if let Some((variable, value)) = nccl.needs {
        let set = std::env::var(variable).ok();
        if set.as_deref() != Some(value) {
            let is = set.as_deref().unwrap_or("not set");
            why += &format!(
                "; {variable} is {is}, and RCCL refuses some devices without it: set it to {value}"
            );
        }
    }
    bail!(why)
}
