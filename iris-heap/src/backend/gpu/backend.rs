//! Vendor-independent device of one rank, with the streams and memory of its heap.

use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::beside::CopyStreams;
use super::copies::HostCopies;
use super::driver::{Current, RawStream};
use super::mapping::{GpuMapping, as_gpu};
use super::memory::{MemoryDriver, Origin, PlainRegion, Region, Wanted};
use super::module::GpuModule;
use super::pinned;
use super::sharing::{self, Joined};
use super::stream::{self, GpuStream, Queue, Shared};
use super::vendor::info;
use crate::abi::abort;
use crate::backend::{
    Backend, BackendKind, DeviceInfo, Export, Mapping, Memory, Purpose, StreamBackend,
};
use crate::control::Control;
use crate::error::{Error, Result};
use crate::util::{lock, unsupported};

/// GPU of one rank, for libraries that enqueue work of their own on a stream of the heap.
///
/// [`SymmetricHeap::gpu`](crate::SymmetricHeap::gpu) returns it. Streams and memory of the caller
/// are passed as the driver's handles, and any library may have made them: a `CUstream` or
/// `hipStream_t` as a number
/// ([`SymmetricHeap::stream_from_raw`](crate::SymmetricHeap::stream_from_raw)), and a `CUdeviceptr`
/// or the like as an address ([`SymmetricHeap::import`](crate::SymmetricHeap::import)). With the
/// feature `cudarc-0-19`, streams of that version of cudarc are accepted directly and kept alive.
///
/// Set `CUDA_DEVICE_MAX_CONNECTIONS=32` in the environment of programs with several ranks on one
/// device. By default their streams share 8 hardware queues, and work queued after a waiting kernel
/// of another rank in the same hardware queue does not begin. The library only warns and does not
/// set it, because changing the environment of a process with threads is unsound.
pub struct Gpu {
    pub(in crate::backend) shared: Arc<Shared>,
    pub(super) device: Arc<dyn MemoryDriver>,
    /// Stream for synchronous copies between host and device, separate from the streams of ops.
    copies: HostCopies,
    /// Whether the ranks are threads of this process.
    same_process: bool,
    legacy: bool,
    /// Number of ranks that use this device, this rank included; set when the ranks have exchanged
    /// their memory.
    sharing: OnceLock<u32>,
    queues: Mutex<Vec<Weak<Queue>>>,
    /// Streams for copies that run concurrently with ops on other streams.
    pub(super) copy_streams: CopyStreams,
    /// All mappings that this backend has returned, to be released when the heap closes.
    mappings: Mutex<Vec<Weak<GpuMapping>>>,
    closed: AtomicBool,
}

/// Device of a heap, without the heap's memory and streams; see [`Gpu::device_handle`].
#[derive(Clone)]
pub struct DeviceHandle(Arc<dyn MemoryDriver>);

impl fmt::Debug for DeviceHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceHandle({:?})", self.0.kind())
    }
}

impl DeviceHandle {
    /// Like [`Gpu::with_relaxed_capture`].
    ///
    /// # Errors
    /// [`Error::Device`]; errors of `f`.
    pub fn with_relaxed_capture<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let _current = Current::new(&*self.0, true)?;
        f()
    }
}

impl Gpu {
    /// Makes the device of a rank. Peers are threads of this process if `same_process`, else other
    /// processes; memory is virtual memory, or plain memory if `legacy`.
    pub(crate) fn new(
        device: Arc<dyn MemoryDriver>,
        same_process: bool,
        legacy: bool,
    ) -> Result<Gpu> {
        let control = Arc::new(Control::pinned(pinned::take(&*device)?));
        Ok(Gpu {
            shared: Arc::new(Shared::new(device.clone(), control)?),
            copies: HostCopies::new(device.clone())?,
            device,
            same_process,
            legacy,
            sharing: OnceLock::new(),
            queues: Mutex::default(),
            copy_streams: CopyStreams::default(),
            mappings: Mutex::default(),
            closed: AtomicBool::new(false),
        })
    }

    /// See [`crate::SymmetricHeap::load`].
    pub(crate) fn load(&self, image: &[u8]) -> Result<GpuModule> {
        GpuModule::load(&self.shared.device, image)
    }

    /// Kind of device: CUDA or HIP.
    pub fn kind(&self) -> BackendKind {
        self.device.kind()
    }

    /// Number of ranks of the heap that use this device, this rank included.
    pub fn ranks_on_device(&self) -> u32 {
        self.sharing.get().copied().unwrap_or(1)
    }

    /// Returns an error if `stream` is a default stream of the driver that the heap cannot use.
    ///
    /// The legacy default stream (0 or 1) is one stream for all threads. If ranks that are threads
    /// share a device, one rank's work could be queued in it behind work of another rank that waits
    /// for the first rank. The per-thread default stream (2) is a different stream in each thread,
    /// so a wait in another thread would not wait for the work.
    pub(crate) fn check_default(&self, stream: RawStream) -> Result<()> {
        const LEGACY: [u64; 2] = [0, 1];
        const PER_THREAD: u64 = 2;
        let invalid = |value: &str, expected: &str| {
            Err(Error::invalid("the caller's stream", value, expected))
        };
        match stream.0 {
            PER_THREAD => invalid(
                "2, the per-thread default stream",
                "a stream with a handle of its own, which all threads name alike: of cudarc CudaContext::new_stream, of \
                 candle CudaDevice::new_with_stream",
            ),
            raw if LEGACY.contains(&raw) && self.same_process && self.ranks_on_device() > 1 => {
                invalid(
                    &format!(
                        "{raw}, the legacy default stream, of {} ranks of this process",
                        self.ranks_on_device()
                    ),
                    "a stream of each rank's own, as CudaContext::new_stream of cudarc: in one stream a rank's call would \
                 wait for that of another behind it",
                )
            }
            _ => Ok(()),
        }
    }

    /// Number of multiprocessors of the device, not divided among the ranks that share it.
    pub fn multiprocessors(&self) -> u32 {
        self.device.multiprocessors()
    }

    /// Calls `f` with the device current on this thread.
    ///
    /// # Errors
    /// [`Error::Device`]; errors of `f`.
    pub fn current<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let _current = Current::new(&*self.device, false)?;
        f()
    }

    /// Calls `f` with the device current and with this thread's capture mode relaxed, so that the
    /// driver calls in `f` do not break a capture of another thread. Used to initialise libraries.
    ///
    /// # Errors
    /// [`Error::Device`]; errors of `f`.
    pub fn with_relaxed_capture<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        self.device_handle().with_relaxed_capture(f)
    }

    /// Handle of the device for threads that may outlive the heap.
    pub fn device_handle(&self) -> DeviceHandle {
        DeviceHandle(self.device.clone())
    }

    pub(in crate::backend) fn keep(&self, queue: Arc<Queue>) -> Result<Arc<dyn StreamBackend>> {
        let mut queues = lock(&self.queues);
        queues.retain(|q| q.strong_count() > 0);
        queues.push(Arc::downgrade(&queue));
        Ok(Arc::new(GpuStream(queue)))
    }

    fn live_queues(&self) -> Vec<Arc<Queue>> {
        let live: Vec<_> = lock(&self.queues).iter().filter_map(Weak::upgrade).collect();
        live.into_iter().chain(self.shared.kept()).collect()
    }

    fn hand_out(&self, region: Arc<dyn Region>) -> Arc<dyn Mapping> {
        let mapping = Arc::new(GpuMapping::new(region));
        let mut mappings = lock(&self.mappings);
        mappings.retain(|m| m.strong_count() > 0);
        mappings.push(Arc::downgrade(&mapping));
        mapping
    }

    fn live_mappings(&self) -> Vec<Arc<GpuMapping>> {
        lock(&self.mappings).iter().filter_map(Weak::upgrade).collect()
    }
}

impl Backend for Gpu {
    fn device(&self) -> DeviceInfo {
        info(&*self.device, (self.device.multiprocessors() / self.ranks_on_device()).max(1))
    }

    fn ranks_on_device(&self) -> u32 {
        Gpu::ranks_on_device(self)
    }

    fn current(&self) -> Option<Current<'_>> {
        Current::new(&*self.device, false).ok()
    }

    fn end_call(&self) {
        stream::end_call();
    }

    fn allocate(&self, purpose: Purpose, bytes: u64) -> Result<Arc<dyn Mapping>> {
        let exported = purpose != Purpose::DeviceWords && !self.same_process;
        let wanted = Wanted { purpose, exported, legacy: self.legacy };
        let mapping = self.hand_out(self.device.clone().allocate(bytes, wanted)?);
        self.copies.clear(as_gpu(&*mapping)?)?;
        Ok(mapping)
    }

    fn describe(&self, own: &dyn Mapping) -> Result<Vec<u8>> {
        sharing::describe(&*self.device, own)
    }

    fn descriptors(
        &self,
        _rank: usize,
        own: &dyn Mapping,
        _described: &[Vec<u8>],
    ) -> Result<Vec<OwnedFd>> {
        Ok(as_gpu(own)?.region()?.descriptor()?.into_iter().collect())
    }

    fn import(
        &self,
        rank: usize,
        own: Arc<dyn Mapping>,
        all: Vec<Export>,
    ) -> Result<Vec<Arc<dyn Mapping>>> {
        let Joined { regions, sharing } = sharing::import(&self.device, rank, &*own, all)?;
        let _ = self.sharing.set(sharing);
        let mut mappings: Vec<_> = regions.into_iter().map(|r| self.hand_out(r)).collect();
        mappings[rank] = own;
        Ok(mappings)
    }

    fn join(&self, own: &dyn Mapping, all: Vec<Arc<dyn Mapping>>) -> Result<Vec<Arc<dyn Mapping>>> {
        let Joined { regions, sharing } = sharing::join(&*self.device, own, &all)?;
        let _ = self.sharing.set(sharing);
        Ok(regions.into_iter().map(|region| self.hand_out(region)).collect())
    }

    fn adopt(&self, descriptor: OwnedFd, bytes: u64) -> Result<Arc<dyn Mapping>> {
        Ok(self.hand_out(self.device.clone().import(descriptor, bytes)?))
    }

    unsafe fn register(&self, address: u64, bytes: u64) -> Result<Arc<dyn Mapping>> {
        self.device.check_foreign(address, bytes)?;
        let memory = (address, bytes);
        Ok(self.hand_out(PlainRegion::of(self.device.clone(), memory, Origin::Foreign)))
    }

    fn control(&self) -> Arc<Control> {
        self.shared.control.clone()
    }

    fn opened(&self, memory: Memory) {
        // `set` fails only on a second call, which would be a bug of the heap and would keep the
        // first memory. So the result is ignored.
        let _ = self.shared.memory.set(memory);
        if self.ranks_on_device() > 1 && self.same_process {
            self.device.shared_by(self.ranks_on_device());
        }
    }

    fn write(&self, to: &dyn Mapping, offset: u64, data: &[u8]) -> Result<()> {
        // `_region` keeps the memory mapped during the copy, even if another thread closes the heap
        // meanwhile.
        let (to, _region) = mapped(to, offset, data.len() as u64)?;
        self.copies.write(to, data)
    }

    fn read(&self, from: &dyn Mapping, offset: u64, data: &mut [u8]) -> Result<()> {
        let (from, _region) = mapped(from, offset, data.len() as u64)?;
        self.copies.read(from, data)
    }

    fn fill(&self, to: &dyn Mapping, offset: u64, bytes: u64, value: u8) -> Result<()> {
        // Fill by copies, because the driver's fill is a kernel, for which waiting kernels of other
        // ranks may leave no free multiprocessor.
        const CHUNK: u64 = 1 << 20;
        let (to, _region) = mapped(to, offset, bytes)?;
        let chunk = vec![value; bytes.min(CHUNK) as usize];
        let mut done = 0;
        while done < bytes {
            let count = (bytes - done).min(CHUNK);
            self.copies.write(to + done, &chunk[..count as usize])?;
            done += count;
        }
        Ok(())
    }

    fn stream(&self) -> Result<Arc<dyn StreamBackend>> {
        self.keep(Queue::create(&self.shared)?)
    }

    unsafe fn wrap_stream(&self, raw: u64) -> Result<Arc<dyn StreamBackend>> {
        self.check_default(RawStream(raw))?;
        // SAFETY: the caller guarantees that the stream is alive, as `Queue::caller` requires.
        self.keep(unsafe { Queue::caller(&self.shared, RawStream(raw))? })
    }

    fn check_no_capture(&self, what: &str) -> Result<()> {
        for queue in self.live_queues() {
            if queue.is_captured()? {
                return Err(unsupported(
                    what,
                    "a stream of the heap is being captured: do it before the capture begins",
                ));
            }
        }
        Ok(())
    }

    fn finish(&self) {
        for queue in self.live_queues() {
            if let Err(error) = queue.finish_apart() {
                tracing::debug!(%error, "a stream finished with an error");
            }
        }
        if let Err(error) = self.shared.finish_rest() {
            tracing::debug!(%error, "a stream that was let go finished with an error");
        }
    }

    fn take_unreported(&self) -> Option<Error> {
        // A GPU has no unreported errors, because its kernels report errors in the control block.
        None
    }

    fn refuse_work(&self) {
        self.shared.refuse_work();
    }

    fn shutdown(&self) {
        self.closed.store(true, Ordering::Relaxed);
        self.shared.forget_order();
        if self.shared.has_unknown_end() {
            tracing::warn!("a stream of a heap may still run: its device memory is not freed");
            for mapping in self.live_mappings() {
                mapping.leak();
            }
        }
        for mapping in self.live_mappings() {
            if mapping.region().is_ok_and(|region| region.is_opened()) {
                mapping.release();
            }
        }
    }

    fn unmap(&self, met: bool) {
        // Memory is released only if no peer can still use it. This holds once all ranks have shut
        // down (`met`). It also holds for virtual memory, which exists until each process has
        // unmapped it, and for regions that ranks of one process share. For memory passed by IPC
        // handles, no vendor documents whether a process that has it open may access it after a
        // free.
        let is_safe = |region: Arc<dyn Region>| Ok(region.descriptor()?.is_some());
        for mapping in self.live_mappings() {
            match met || self.same_process || mapping.region().and_then(is_safe).unwrap_or(false) {
                true => mapping.release(),
                false => mapping.leak(),
            }
        }
    }

    fn waits_for_device(&self) -> bool {
        true
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Device address of `bytes` bytes from `offset` on, and the region, which keeps them mapped.
fn mapped(memory: &dyn Mapping, offset: u64, bytes: u64) -> Result<(u64, Arc<dyn Region>)> {
    let memory = as_gpu(memory)?;
    Ok((memory.at(offset, bytes)?, memory.region()?))
}

impl Drop for Gpu {
    /// Tells running kernels to stop, but does not wait for them; memory that they may still access
    /// is never freed.
    fn drop(&mut self) {
        if self.closed.load(Ordering::Relaxed) {
            return;
        }
        let alone = self.shared.refuse_work_now();
        let queues = self.live_queues();
        if alone && queues.iter().all(|queue| queue.is_idle()) && self.shared.rest_is_idle() {
            // This poll lets the engine that exchanges data between nodes drop exchanges that have
            // ended, because their events keep the control block alive.
            self.shared.control.attend();
            self.shared.forget_order();
            return;
        }
        drop(queues);
        self.shared.control.set_host_abort(abort::CLOSED);
        // Kernels see the abort word themselves. Exchanges between nodes end only if their engine
        // aborts them, which this poll lets it do.
        self.shared.control.attend();
        self.shared.forget_order();
        tracing::warn!("a heap was dropped while its kernels run: its device memory is not freed");
        std::mem::forget(self.shared.control.clone());
        for mapping in self.live_mappings() {
            mapping.leak();
        }
    }
}
