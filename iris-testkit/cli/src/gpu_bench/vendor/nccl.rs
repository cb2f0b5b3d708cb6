//! NCCL, or RCCL with the same interface: communicator and collectives of one rank.

#![allow(unsafe_code, reason = "functions of a C library, on memory of the device")]

use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use anyhow::{Result, bail};
use iris_heap::{BackendKind, DType};
use iris_kernels::vendor::{self, library, open};

use super::{Buffer, Handle, Vendors};

/// C type `ncclUniqueId`.
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

/// Flag `NCCL_WIN_COLL_SYMMETRIC`: all ranks register the same offset of their memory.
const SYMMETRIC: c_int = 1;

/// Library with its function tables; functions that old releases lack are optional.
pub(super) struct Nccl {
    table: Table,
    windows: Result<WindowTable, String>,
    errors: Option<ErrorTable>,
    /// Environment variable (name and value) without which the library refuses some devices.
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
        // SAFETY: `ncclGetVersion` only writes to `version`, a local of the right type.
        unsafe { (self.ncclGetVersion)(&mut version) };
        format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
    }
}

/// Loads the library; `folders` are searched before the usual places.
pub(super) fn load(kind: BackendKind, folders: &[PathBuf]) -> Result<Nccl> {
    let load = |file: &Path| {
        let table = Table::of(open(file)?, "")?;
        let windows = WindowTable::of(open(file)?, "");
        let errors = ErrorTable::of(open(file)?, "").ok();
        Ok(Nccl { table, windows, errors, needs: vendor::Nccl::needs(kind), path: file.to_owned() })
    };
    Ok(vendor::Nccl::find(kind, folders, load)?)
}

/// NCCL communicator of one rank.
pub(crate) struct Communicator<'a> {
    table: &'a Nccl,
    handle: Handle,
    ranks: usize,
    rank: usize,
}

impl<'a> Communicator<'a> {
    /// Makes the unique id of a new communicator; one rank makes it and sends it to all others.
    pub(crate) fn id(vendors: &Vendors) -> Result<Vec<u8>> {
        let table = vendors.nccl()?;
        let mut id = UniqueId([0; 128]);
        // SAFETY: `ncclGetUniqueId` only writes to `id`, a local of the right type.
        check(table, "ncclGetUniqueId", unsafe { (table.ncclGetUniqueId)(&mut id) })?;
        Ok(id.0.to_vec())
    }

    /// Creates this rank's communicator on the current device; returns when all ranks have joined.
    pub(crate) fn new(
        vendors: &'a Vendors,
        id: &[u8],
        (rank, ranks): (usize, usize),
    ) -> Result<Communicator<'a>> {
        let table = vendors.nccl()?;
        let Ok(id) = id.try_into() else { bail!("the id has {} bytes: expected 128", id.len()) };
        let mut handle = null_mut();
        // SAFETY: `ncclCommInitRank` writes the new communicator to `handle`, a local of the right
        // type; the id is passed by value.
        let code = unsafe {
            (table.ncclCommInitRank)(&mut handle, ranks as c_int, UniqueId(id), rank as c_int)
        };
        check(table, "ncclCommInitRank", code)?;
        Ok(Communicator { table, handle, ranks, rank })
    }

    /// Registers `memory` of all ranks as one window, so that the library's kernels may access
    /// peers directly. Collective; returns when all ranks have registered their memory.
    pub(crate) fn register(&self, memory: &Buffer) -> Result<Window<'_>> {
        let windows =
            self.table.windows.as_ref().map_err(|e| anyhow::anyhow!("no windows: {e}"))?;
        let mut handle = null_mut();
        let (address, bytes) = (memory.address(0, DType::U8)?, memory.bytes as usize);
        // SAFETY: the memory is this rank's, and `Buffer` keeps it alive; the function writes the
        // window to `handle`, a local of the right type.
        let code = unsafe {
            (windows.ncclCommWindowRegister)(self.handle, address, bytes, &mut handle, SYMMETRIC)
        };
        check(self.table, "ncclCommWindowRegister", code)?;
        Ok(Window { of: self, windows, handle, _memory: memory.clone() })
    }

    /// Destroys the communicator after enqueued work is done. It is not a destructor, because after
    /// a failure its kernels may never end and it would wait for them.
    pub(crate) fn close(self) -> Result<()> {
        // SAFETY: this value owns the handle and is consumed, so the handle is not used again.
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
        // SAFETY: the buffers hold `count` elements; communicator and stream are alive.
        let code =
            unsafe { (self.table.ncclAllReduce)(from, to, count, code, SUM, self.handle, stream) };
        check(self.table, "ncclAllReduce", code)
    }

    /// Enqueues a reduce-scatter; each rank gets `count` elements.
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
        // SAFETY: `address` checked that the buffers hold the elements; communicator and stream are
        // alive.
        let code = unsafe {
            (self.table.ncclReduceScatter)(from, to, count, code, SUM, self.handle, stream)
        };
        check(self.table, "ncclReduceScatter", code)
    }

    /// Enqueues an all-gather of `count` elements from each rank.
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
        // SAFETY: the buffers hold the elements; communicator and stream are alive.
        let code =
            unsafe { (self.table.ncclAllGather)(from, to, count, code, self.handle, stream) };
        check(self.table, "ncclAllGather", code)
    }

    /// Enqueues a broadcast of `count` elements from rank 0.
    pub(crate) fn broadcast(
        &self,
        (from, to): (&Buffer, &Buffer),
        count: usize,
        dtype: DType,
        stream: u64,
    ) -> Result<()> {
        let to = to.address(count, dtype)?;
        // NCCL reads only the root's input, so other ranks pass their output as input.
        let from = if self.rank == 0 { from.address(count, dtype)? } else { to };
        let (code, stream) = (nccl_type(dtype)?, stream as usize as Handle);
        // SAFETY: the buffers hold the elements; communicator and stream are alive.
        let code =
            unsafe { (self.table.ncclBroadcast)(from, to, count, code, 0, self.handle, stream) };
        check(self.table, "ncclBroadcast", code)
    }

    /// Enqueues an all-to-all of `count` elements to and from each rank, as a group of sends and
    /// receives.
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
        // SAFETY: `ncclGroupStart` takes no arguments.
        check(table, "ncclGroupStart", unsafe { (table.ncclGroupStart)() })?;
        for peer in 0..self.ranks {
            let at = (peer * count * dtype.size()) as u64;
            let rank = peer as c_int;
            // SAFETY: the peer's part is within the buffer; communicator and stream are alive.
            let sent =
                unsafe { (table.ncclSend)(from + at, count, code, rank, self.handle, stream) };
            check(table, "ncclSend", sent)?;
            // SAFETY: the peer's part is within the buffer; communicator and stream are alive.
            let received =
                unsafe { (table.ncclRecv)(to + at, count, code, rank, self.handle, stream) };
            check(table, "ncclRecv", received)?;
        }
        // SAFETY: `ncclGroupEnd` takes no arguments.
        check(table, "ncclGroupEnd", unsafe { (table.ncclGroupEnd)() })
    }
}

/// Code of the reduction `ncclSum`.
const SUM: c_int = 0;

fn nccl_type(dtype: DType) -> Result<c_int> {
    Ok(match dtype {
        DType::I32 => 2,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::BF16 => 9,
        other => bail!("element type {other} is not supported with NCCL here"),
    })
}

/// Memory of all ranks that is registered as a window of a communicator.
pub(crate) struct Window<'a> {
    of: &'a Communicator<'a>,
    windows: &'a WindowTable,
    handle: Handle,
    _memory: Buffer,
}

impl Window<'_> {
    /// Deregisters the window after enqueued work is done. Collective.
    pub(crate) fn close(self) -> Result<()> {
        // SAFETY: this value owns the window's handle, and the borrowed communicator is alive.
        let code = unsafe { (self.windows.ncclCommWindowDeregister)(self.of.handle, self.handle) };
        check(self.of.table, "ncclCommWindowDeregister", code)
    }
}

/// Converts the return code of `function` into an error with the library's texts, which also names
/// the environment variable to set if a needed one is missing.
fn check(nccl: &Nccl, function: &str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: `ncclGetErrorString` accepts any number and returns a constant string that ends with
    // zero.
    let text = unsafe { CStr::from_ptr((nccl.ncclGetErrorString)(code)) };
    let mut why = format!("{function}: {} ({code})", text.to_string_lossy());
    if let Some(errors) = &nccl.errors {
        // SAFETY: `ncclGetLastError` accepts a null communicator.
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
