//! Loading of NCCL, or of RCCL, which has the same functions, and the communicator of one rank.

#![allow(unsafe_code, reason = "functions of a C library, on memory of the device")]

use std::ffi::{CStr, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use iris_heap::{BackendKind, DType};

use super::dialect::Handle;
use super::{Error, Result, cuda_folders, find, hip_folders, library, open};
use crate::dtype;
use window::WindowTable;

pub use call::NcclCall;
pub use window::Window;

mod call;
mod window;

/// Id of a new communicator (C type `ncclUniqueId`). One rank makes the id and sends it to the
/// others.
pub type CommunicatorId = [u8; 128];

#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId(CommunicatorId);

/// C type `ncclConfig_t` as of release 2.18. Later releases have further fields; the library uses
/// default values for fields beyond the first `size` bytes.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

/// Value that leaves a field of [`Config`] to the library's default.
const UNSET: c_int = c_int::MIN;

library! { Table,
    ncclGetVersion(*mut c_int) -> c_int;
    ncclGetErrorString(c_int) -> *const c_char;
    ncclGetLastError(Handle) -> *const c_char;
    ncclGetUniqueId(*mut UniqueId) -> c_int;
    ncclCommInitRankConfig(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> c_int;
    ncclCommFinalize(Handle) -> c_int;
    ncclCommDestroy(Handle) -> c_int;
    ncclCommAbort(Handle) -> c_int;
    ncclCommGetAsyncError(Handle, *mut c_int) -> c_int;
    ncclAllReduce(u64, u64, usize, c_int, c_int, Handle, Handle) -> c_int;
    ncclReduceScatter(u64, u64, usize, c_int, c_int, Handle, Handle) -> c_int;
    ncclAllGather(u64, u64, usize, c_int, Handle, Handle) -> c_int;
    ncclBroadcast(u64, u64, usize, c_int, c_int, Handle, Handle) -> c_int;
    ncclSend(u64, usize, c_int, c_int, Handle, Handle) -> c_int;
    ncclRecv(u64, usize, c_int, c_int, Handle, Handle) -> c_int;
    ncclGroupStart() -> c_int;
    ncclGroupEnd() -> c_int;
}

/// Status `ncclInProgress` of a call on a non-blocking communicator.
const IN_PROGRESS: c_int = 7;
/// Code of the reduction `ncclSum`.
const SUM: c_int = 0;
/// Code of the element type `ncclUint8`.
const BYTE: c_int = 1;

/// NCCL or RCCL, loaded into this process.
pub struct Nccl {
    table: Table,
    /// Functions for windows, or the reason why the release lacks them.
    windows: std::result::Result<WindowTable, String>,
    path: PathBuf,
    /// Name and value of an environment variable without which the library refuses some devices;
    /// `None` if there is no such variable.
    needs: Option<(&'static str, &'static str)>,
}

impl std::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Nccl({}, {})", self.version(), self.path.display())
    }
}

impl Nccl {
    /// Name of the library for this kind of device.
    pub fn name(kind: BackendKind) -> &'static str {
        if kind == BackendKind::Cuda { "NCCL" } else { "RCCL" }
    }

    /// Name and value of an environment variable that RCCL needs on gfx942 and gfx950, unless
    /// firmware and HIP runtime are recent; `None` for NCCL. Without the variable, RCCL refuses
    /// these devices.
    pub fn needs(kind: BackendKind) -> Option<(&'static str, &'static str)> {
        (kind == BackendKind::Hip).then_some(("HSA_NO_SCRATCH_RECLAIM", "1"))
    }

    fn load(kind: BackendKind) -> Result<Arc<Nccl>> {
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
        find(names, &usual, (file, &bare), |path| {
            let table = Table::of(open(path)?, "")?;
            let windows = WindowTable::of(open(path)?, "");
            Ok(Arc::new(Nccl { table, windows, path: path.into(), needs: Nccl::needs(kind) }))
        })
    }

    /// Returns the library for this kind of device, release 2.18 or later. It is loaded at the first
    /// call.
    ///
    /// # Errors
    /// [`Error::NotFound`] with the places that were searched; every call returns the same error.
    pub fn get(kind: BackendKind) -> Result<Arc<Nccl>> {
        static LOADED: [OnceLock<Result<Arc<Nccl>>>; 2] = [const { OnceLock::new() }; 2];
        let loaded = &LOADED[usize::from(kind == BackendKind::Hip)];
        loaded.get_or_init(|| Nccl::load(kind)).clone()
    }

    /// Path of the library's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version of the library, such as `2.28.3`.
    pub fn version(&self) -> String {
        let mut version = 0;
        // SAFETY: `ncclGetVersion` only writes to `version`, a local of the right type.
        unsafe { (self.table.ncclGetVersion)(&mut version) };
        format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
    }

    /// Makes the id of a new communicator.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn new_id(&self) -> Result<CommunicatorId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: `ncclGetUniqueId` only writes to `id`, a local of the right type.
        self.check("ncclGetUniqueId", unsafe { (self.table.ncclGetUniqueId)(&mut id) })?;
        Ok(id.0)
    }

    /// Converts the return code of `function` into an error with the library's texts. If a needed
    /// environment variable is missing, the error also names it.
    fn check(&self, function: &'static str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: `ncclGetErrorString` accepts any number and returns a constant string that ends
        // with zero.
        let text = unsafe { CStr::from_ptr((self.table.ncclGetErrorString)(code)) };
        let mut name = text.to_string_lossy().into_owned();
        // SAFETY: `ncclGetLastError` accepts a null communicator.
        let last = unsafe { (self.table.ncclGetLastError)(null_mut()) };
        if !last.is_null() {
            // SAFETY: the text is the library's own and ends with zero.
            let last = unsafe { CStr::from_ptr(last) }.to_string_lossy();
            if !last.trim().is_empty() {
                name += &format!(": {}", last.trim());
            }
        }
        if let Some((variable, value)) = self.needs {
            let set = std::env::var(variable).ok();
            if set.as_deref() != Some(value) {
                let is = set.as_deref().unwrap_or("not set");
                name += &format!(
                    "; {variable} is {is}, and RCCL refuses some devices without it: set it to {value}"
                );
            }
        }
        Err(Error::Call { function: function.into(), code, name })
    }
}

/// Options of a communicator.
#[derive(Clone, Copy, Default, Debug)]
pub struct CommunicatorOptions {
    /// Largest number of thread blocks of a collective; `None` leaves it to the library.
    pub most_blocks: Option<u32>,
    /// Maximum time for which a call of the library is polled until the library has accepted it.
    /// `None` makes the communicator blocking: a call returns when the library has accepted it,
    /// however long that takes.
    pub deadline: Option<Duration>,
}

/// Communicator of one rank. With a deadline it is non-blocking: each call is polled until the
/// library has accepted it, or the deadline has passed.
pub struct Communicator {
    nccl: Arc<Nccl>,
    /// The library's handle; null after [`Communicator::abort`] or [`Communicator::close`].
    handle: Mutex<Live>,
    rank: usize,
    ranks: usize,
    deadline: Option<Duration>,
}

struct Live(Handle);

// SAFETY: a communicator may be used by any thread; the mutex lets one thread use it at a time.
unsafe impl Send for Live {}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Communicator(rank {} of {}, {:?})", self.rank, self.ranks, self.nccl)
    }
}

impl Communicator {
    /// Creates this rank's communicator on the current device. All ranks must call this function.
    /// If the communicator is non-blocking, the wait for the other ranks calls `is_hopeless`
    /// repeatedly and ends when it returns true, for example because a rank is lost.
    ///
    /// # Errors
    /// [`Error::Call`]; [`Error::Late`] if other ranks have not joined within the deadline, or the wait
    /// is hopeless.
    pub fn new(
        nccl: &Arc<Nccl>,
        id: &CommunicatorId,
        (rank, ranks): (usize, usize),
        options: CommunicatorOptions,
        is_hopeless: impl Fn() -> bool,
    ) -> Result<Communicator> {
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 2_18_00,
            blocking: c_int::from(options.deadline.is_none()),
            cga_cluster_size: UNSET,
            min_ctas: UNSET,
            max_ctas: options.most_blocks.map_or(UNSET, |blocks| blocks as c_int),
            net_name: null(),
            split_share: UNSET,
        };
        let mut handle = null_mut();
        // SAFETY: the function writes the new communicator to `handle`, a local variable of the
        // right type, and reads `config`; the id is passed by value.
        let code = unsafe {
            (nccl.table.ncclCommInitRankConfig)(
                &mut handle,
                ranks as c_int,
                UniqueId(*id),
                rank as c_int,
                &mut config,
            )
        };
        let (nccl, deadline) = (nccl.clone(), options.deadline);
        let new = Communicator { nccl, handle: Mutex::new(Live(handle)), rank, ranks, deadline };
        let taken = new.taken(new.lock(), "ncclCommInitRankConfig", code, is_hopeless);
        if taken.is_err() && !handle.is_null() {
            let aborted = new.abort().map_or(Ok(()), Release::run);
            aborted.unwrap_or_else(|error| tracing::debug!(%error, "a communicator was not freed"));
        }
        taken.map(|()| new)
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    fn lock(&self) -> MutexGuard<'_, Live> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Handle of the live communicator; an error if the communicator was aborted or closed.
    fn live(&self, function: &'static str) -> Result<MutexGuard<'_, Live>> {
        let live = self.lock();
        match live.0.is_null() {
            false => Ok(live),
            true => Err(Error::Call {
                function: function.into(),
                code: 0,
                name: "the communicator has been aborted or closed".into(),
            }),
        }
    }

    /// Waits until the library has accepted a call of `function`, which returned `code`, or
    /// `is_hopeless` returns true. The lock is free between polls, so that another thread can abort the
    /// communicator.
    fn taken<'a>(
        &'a self,
        mut live: MutexGuard<'a, Live>,
        function: &'static str,
        mut code: c_int,
        is_hopeless: impl Fn() -> bool,
    ) -> Result<()> {
        // Number of polls before the thread sleeps between polls. Most waits are short; a rank that
        // waits for others to connect must not keep a core busy.
        const SPINS: u32 = 1000;
        const PAUSE: Duration = Duration::from_micros(50);
        let begun = Instant::now();
        let mut polls = 0_u32;
        while code == IN_PROGRESS {
            let waited = begun.elapsed();
            if self.deadline.is_some_and(|deadline| waited > deadline) || is_hopeless() {
                return Err(Error::Late { function, seconds: waited.as_secs() });
            }
            polls = polls.saturating_add(1);
            drop(live);
            if polls < SPINS {
                std::thread::yield_now()
            } else {
                std::thread::sleep(PAUSE)
            }
            live = self.live(function)?;
            let mut state = 0;
            // SAFETY: the communicator is alive; the function only writes to `state`.
            let asked = unsafe { (self.nccl.table.ncclCommGetAsyncError)(live.0, &mut state) };
            code = if asked == 0 { state } else { asked };
        }
        self.nccl.check(function, code)
    }

    /// Enqueues a collective on a stream of the current device. `count` is the number of elements
    /// of one rank's part, as in [`NcclCall`]. `None` as the element type means bytes.
    ///
    /// # Errors
    /// [`Error::Call`] and [`Error::Late`]. [`Error::Call`] also for an element type without a sum
    /// here.
    ///
    /// # Safety
    /// `from` and `to` are memory of the device that has room for the elements, until the stream
    /// has finished the collective. `stream` is a live stream of the device.
    pub unsafe fn enqueue(
        &self,
        call: NcclCall,
        (from, to): (u64, u64),
        (count, dtype): (usize, Option<DType>),
        stream: u64,
    ) -> Result<()> {
        let live = self.live("a collective")?;
        let (handle, table) = (live.0, &self.nccl.table);
        let (code, stream) = (type_code(dtype)?, stream as usize as Handle);
        let bytes = count * dtype.map_or(1, DType::size);
        // SAFETY: the caller guarantees the memory and the stream; the communicator is alive.
        let (function, code) = unsafe {
            match call {
                NcclCall::AllReduce => (
                    "ncclAllReduce",
                    (table.ncclAllReduce)(from, to, count, code, SUM, handle, stream),
                ),
                NcclCall::ReduceScatter => (
                    "ncclReduceScatter",
                    (table.ncclReduceScatter)(from, to, count, code, SUM, handle, stream),
                ),
                NcclCall::AllGather => {
                    ("ncclAllGather", (table.ncclAllGather)(from, to, count, code, handle, stream))
                }
                NcclCall::Broadcast { root } => (
                    "ncclBroadcast",
                    (table.ncclBroadcast)(from, to, count, code, root as c_int, handle, stream),
                ),
                NcclCall::AllToAll | NcclCall::Shifts { .. } => {
                    self.nccl.check("ncclGroupStart", (table.ncclGroupStart)())?;
                    let mut made = Ok(());
                    for message in call.messages(self.rank, self.ranks) {
                        let [to_rank, from_rank] = message.peers.map(|peer| peer as c_int);
                        let [out, into] = message.parts.map(|part| (part * bytes) as u64);
                        let (out, into) = (from + out, to + into);
                        let sent = (table.ncclSend)(out, count, code, to_rank, handle, stream);
                        let got = (table.ncclRecv)(into, count, code, from_rank, handle, stream);
                        for (function, code) in [("ncclSend", sent), ("ncclRecv", got)] {
                            let code = if code == IN_PROGRESS { 0 } else { code };
                            made = made.and(self.nccl.check(function, code));
                        }
                    }
                    // The group is ended even after an error, because later calls would otherwise
                    // join it.
                    let ended = (table.ncclGroupEnd)();
                    made?;
                    ("ncclGroupEnd", ended)
                }
            }
        };
        self.taken(live, function, code, || false)
    }

    /// Returns an error if a collective has failed since it was enqueued, for example by a lost
    /// connection.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn check(&self) -> Result<()> {
        let live = self.lock();
        if live.0.is_null() {
            return Ok(());
        }
        let mut state = 0;
        // SAFETY: the communicator is alive; the function only writes to `state`.
        let asked = unsafe { (self.nccl.table.ncclCommGetAsyncError)(live.0, &mut state) };
        self.nccl.check("ncclCommGetAsyncError", asked)?;
        let state = if state == IN_PROGRESS { 0 } else { state };
        self.nccl.check("a collective that was enqueued", state)
    }

    /// Takes the communicator out of use, and returns the call that aborts it; `None` if it has been
    /// aborted or closed. The call ends all enqueued collectives at once, and then frees the
    /// communicator like every [`Release`].
    pub fn abort(&self) -> Option<Release> {
        self.take("ncclCommAbort", self.nccl.table.ncclCommAbort)
    }

    /// Waits until the enqueued collectives of all ranks have finished, takes the communicator out
    /// of use, and returns the call that destroys it; `None` if it has been aborted or closed. All
    /// ranks must call this function.
    ///
    /// # Errors
    /// [`Error::Call`] and [`Error::Late`]; the communicator should then be aborted.
    pub fn close(&self) -> Result<Option<Release>> {
        let live = self.lock();
        let handle = live.0;
        if handle.is_null() {
            return Ok(None);
        }
        // SAFETY: the communicator is alive.
        let code = unsafe { (self.nccl.table.ncclCommFinalize)(handle) };
        self.taken(live, "ncclCommFinalize", code, || false)?;
        Ok(self.take("ncclCommDestroy", self.nccl.table.ncclCommDestroy))
    }

    fn take(
        &self,
        name: &'static str,
        function: unsafe extern "C" fn(Handle) -> c_int,
    ) -> Option<Release> {
        let mut live = self.lock();
        let handle = Live(std::mem::replace(&mut live.0, null_mut()));
        let nccl = self.nccl.clone();
        (!handle.0.is_null()).then_some(Release { nccl, handle, name, function })
    }
}

/// Call that frees a communicator. NCCL waits in this call until all graphs that captured
/// collectives of the communicator have been destroyed, for ever if the caller owns them. The wait
/// is not documented; it was seen with NCCL 2.28.9.
#[must_use]
pub struct Release {
    nccl: Arc<Nccl>,
    handle: Live,
    name: &'static str,
    function: unsafe extern "C" fn(Handle) -> c_int,
}

impl std::fmt::Debug for Release {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Release by {}", self.name)
    }
}

impl Release {
    /// Makes the call.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn run(self) -> Result<()> {
        // SAFETY: the handle is alive, and this value is its only owner. A communicator that is
        // destroyed has been finalized.
        let code = unsafe { (self.function)(self.handle.0) };
        self.nccl.check(self.name, code)
    }
}

/// Code of an element type for which sums are defined. `None` stands for bytes, which can only be
/// copied.
fn type_code(dtype: Option<DType>) -> Result<c_int> {
    let Some(dtype) = dtype else { return Ok(BYTE) };
    dtype::row(dtype).and_then(|row| row.nccl).ok_or_else(|| {
        let expected = dtype::names(dtype::types(|row| row.nccl.is_some()));
        let name = format!("element type {dtype}, expected {expected}");
        Error::Call { function: "a collective".into(), code: 0, name }
    })
}
