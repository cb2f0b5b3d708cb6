//! NVIDIA: the driver API, through a table of functions of our own; nothing is linked, and nothing is
//! needed where no heap of this kind is opened.
//!
//! Streams and memory of the caller's come as what the driver has for them: a `CUstream` as a number
//! ([`SymmetricHeap::stream_from_raw`](crate::SymmetricHeap::stream_from_raw)), a `CUdeviceptr` as an address
//! ([`SymmetricHeap::import`](crate::SymmetricHeap::import)), whatever made them. With the feature `cudarc-0-19` streams of that
//! version of cudarc come as they are, and are kept alive.
//!
//! Memory that ranks share is virtual memory, exported as POSIX descriptors to ranks that are other
//! processes and mapped for the devices of all ranks; where a device has no such memory, plain
//! memory with legacy handles (processes) or peer access (threads). Several ranks may use one
//! device: as threads they share its primary context and divide what is resident; as processes
//! they are time-sliced, right but slow.
//!
//! Calls that may wait for the whole device (mapping, unmapping, loading modules) are made in
//! collective steps only, so that no rank waits in one for a kernel that waits for that rank.
//!
//! Where ranks are threads of one device, the driver must not let a stream of one rank wait for a
//! kernel of another. It does at the first use of streams, so each is used once when it is made or
//! given to the heap, one at a time; and where memory of its pool that one stream gave back goes to
//! another, which is switched off for a device that ranks share.
//!
//! Set `CUDA_DEVICE_MAX_CONNECTIONS=32` in the environment of programs with several ranks on one
//! device: by default their streams share 8 queues, and work that is queued behind another rank's
//! waiting kernel does not begin. The library does not set it, since changing the environment of a
//! process with threads is not sound, and warns.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use super::{Backend, BackendKind, DeviceInfo, Export, Mapping, Memory, Purpose, StreamBackend};
use crate::abi::abort;
use crate::control::Control;
use crate::error::{Error, Result};
use crate::util::lock;
use crate::util::unsupported;
use crate::wire::{Reader, Writer};
use crate::world::World;

mod api;
#[cfg(feature = "cudarc-0-19")]
mod cudarc;
mod device;
mod library;
mod memory;

pub use super::gpu::{Function, LaunchShape, Module};
use super::gpu::{GpuMapping, GpuStream, HostCopies, Queue, RawStream, Shared, as_gpu, pinned};
use device::Device;
use memory::{Kind, Region};

/// The devices that this process sees.
///
/// # Errors
/// [`Error::Library`] without the driver, [`Error::Device`] if it does not start: without a device,
/// for example.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    (0..device::count()?)
        .map(|index| {
            let device = Device::get(index)?;
            Ok(info(&device, device.multiprocessors))
        })
        .collect()
}

/// How many devices this process sees, at least one.
///
/// # Errors
/// As [`devices`]; [`Error::Unsupported`] if there is none.
pub fn device_count() -> Result<usize> {
    match device::count()? {
        0 => Err(unsupported("the CUDA backend", "no device is visible")),
        count => Ok(count),
    }
}

/// Bytes of memory of device `index` that are free, and all of it.
///
/// # Errors
/// As [`devices`]; [`Error::Invalid`] if there is no such device.
pub fn memory_info(index: usize) -> Result<(u64, u64)> {
    Device::get(index)?.memory_info()
}

fn info(device: &Device, workgroups: u32) -> DeviceInfo {
    DeviceInfo {
        kind: BackendKind::Cuda,
        index: device.ordinal as usize,
        name: device.title(),
        uuid: device.uuid_text(),
        workgroups,
    }
}

/// A CUDA device of one rank.
pub struct CudaBackend {
    shared: Arc<Shared>,
    device: Arc<Device>,
    /// For copies by the host, apart from the streams of ops.
    copies: HostCopies,
    /// Whether ranks are threads of this process.
    same_process: bool,
    legacy: bool,
    /// Ranks that use this device, this one included; known after the first exchange.
    sharing: OnceLock<u32>,
    queues: Mutex<Vec<Weak<Queue>>>,
    /// Everything handed out, to be let go when the heap closes.
    mappings: Mutex<Vec<Weak<GpuMapping>>>,
    closed: AtomicBool,
}

impl CudaBackend {
    /// For a rank of `world`, on the device of this number or by the rank's, with virtual memory or, if
    /// `legacy`, plain memory.
    pub(crate) fn new(world: &World, device: Option<usize>, legacy: bool) -> Result<CudaBackend> {
        let device = Device::choose(world, device)?;
        let control = Arc::new(Control::pinned(pinned::take(&*device)?));
        let shared = Arc::new(Shared::new(device.clone(), control)?);
        Ok(CudaBackend {
            shared,
            copies: HostCopies::new(device.clone())?,
            device,
            same_process: world.same_process(),
            legacy,
            sharing: OnceLock::new(),
            queues: Mutex::default(),
            mappings: Mutex::default(),
            closed: AtomicBool::new(false),
        })
    }

    /// Compute capability, as 90 for 9.0.
    pub fn arch(&self) -> u32 {
        self.device.arch
    }

    /// Ranks of the heap that use this device, this one included.
    pub fn sharing(&self) -> u32 {
        self.sharing.get().copied().unwrap_or(1)
    }

    /// Loads compiled kernels: a cubin of this device's architecture, or PTX that ends with a zero
    /// byte. It may wait for the device, so it belongs into a collective step. Its kernels are launched
    /// on streams of this heap only.
    ///
    /// # Errors
    /// [`Error::Device`]; [`Error::Invalid`] for another image.
    pub fn load(&self, image: &[u8]) -> Result<Module> {
        Module::load(&self.shared, image)
    }

    fn keep(&self, queue: Arc<Queue>) -> Result<Arc<dyn StreamBackend>> {
        let mut queues = lock(&self.queues);
        queues.retain(|q| q.strong_count() > 0);
        queues.push(Arc::downgrade(&queue));
        Ok(Arc::new(GpuStream(queue)))
    }

    fn live_queues(&self) -> Vec<Arc<Queue>> {
        let live: Vec<_> = lock(&self.queues).iter().filter_map(Weak::upgrade).collect();
        live.into_iter().chain(self.shared.kept()).collect()
    }

    fn hand_out(&self, region: Arc<Region>) -> Arc<dyn Mapping> {
        let mapping = Arc::new(region.mapping());
        let mut mappings = lock(&self.mappings);
        mappings.retain(|m| m.strong_count() > 0);
        mappings.push(Arc::downgrade(&mapping));
        mapping
    }

    fn live_mappings(&self) -> Vec<Arc<GpuMapping>> {
        lock(&self.mappings).iter().filter_map(Weak::upgrade).collect()
    }

    /// Virtual memory if the device has it and can share it with these ranks.
    fn make(&self, shared: bool, bytes: u64) -> Result<Region> {
        const REFUSED: [u32; 2] = [api::NOT_PERMITTED, api::NOT_SUPPORTED];
        let device = &self.device;
        let exported = !self.same_process;
        let can = device.virtual_memory && (device.descriptors || !exported);
        if shared && can && !self.legacy {
            match Region::create(device, bytes, exported) {
                Err(Error::Device { code, ref name, .. }) if REFUSED.contains(&code) => {
                    tracing::warn!(%name, "no virtual memory: plain memory is used instead");
                }
                outcome => return outcome,
            }
        }
        Region::plain(device, bytes)
    }
}

impl Backend for CudaBackend {
    fn device(&self) -> DeviceInfo {
        let device = &self.device;
        info(device, (device.multiprocessors / self.sharing()).max(1))
    }

    fn allocate(&self, purpose: Purpose, bytes: u64) -> Result<Arc<dyn Mapping>> {
        let region = self.make(purpose != Purpose::DeviceWords, bytes)?;
        let mapping = self.hand_out(Arc::new(region));
        self.copies.clear(as_gpu(&*mapping)?)?;
        Ok(mapping)
    }

    fn describe(&self, own: &dyn Mapping) -> Result<Vec<u8>> {
        let region = as_gpu(own)?.region::<Region>()?;
        let mut legacy = Vec::new();
        match region.kind() {
            Kind::Virtual { .. } => (),
            Kind::Plain => legacy.extend(region.legacy_handle()?),
            Kind::Legacy | Kind::Foreign => {
                let why = "it is not this process's own allocation";
                return Err(unsupported("sharing memory with other processes", why));
            }
        }
        let mut message = Writer::default();
        message.u64(region.bytes()).bytes(&self.device.uuid).bytes(&legacy);
        Ok(message.finish())
    }

    fn descriptors(
        &self,
        _rank: usize,
        own: &dyn Mapping,
        _described: &[Vec<u8>],
    ) -> Result<Vec<OwnedFd>> {
        let region = as_gpu(own)?.region::<Region>()?;
        match region.kind() {
            Kind::Virtual { .. } => Ok(vec![region.export()?]),
            _ => Ok(Vec::new()),
        }
    }

    fn import(
        &self,
        rank: usize,
        own: Arc<dyn Mapping>,
        all: Vec<Export>,
    ) -> Result<Vec<Arc<dyn Mapping>>> {
        let device = &self.device;
        let mut mappings = Vec::with_capacity(all.len());
        let mut sharing = 0;
        for (from, Export { message, mut descriptors }) in all.into_iter().enumerate() {
            let mut r = Reader::new("exchange of device memory", &message);
            let (bytes, uuid, legacy) = (r.u64()?, r.bytes()?, r.bytes()?);
            sharing += u32::from(uuid == device.uuid);
            if from == rank {
                mappings.push(own.clone());
                continue;
            }
            let peer = match (descriptors.pop(), <[u8; 64]>::try_from(legacy)) {
                (Some(descriptor), _) => Region::import(device, descriptor, bytes)?,
                (None, Ok(handle)) => Region::open_legacy(device, handle, bytes)?,
                (None, Err(_)) => {
                    return Err(Error::Wire {
                        what: format!("memory of rank {from}"),
                        problem: "no handle".into(),
                    });
                }
            };
            mappings.push(self.hand_out(Arc::new(peer)));
        }
        let _ = self.sharing.set(sharing);
        Ok(mappings)
    }

    fn join(&self, own: &dyn Mapping, all: Vec<Arc<dyn Mapping>>) -> Result<Vec<Arc<dyn Mapping>>> {
        let region = |mapping: &dyn Mapping| as_gpu(mapping)?.region();
        let regions: Vec<Arc<Region>> = all.iter().map(|m| region(&**m)).collect::<Result<_>>()?;
        let device = &self.device;
        let same = |r: &&Arc<Region>| r.device.ordinal == device.ordinal;
        let _ = self.sharing.set(regions.iter().filter(same).count() as u32);
        // The owner maps its memory for all devices; whoever accesses plain memory asks for that.
        let mut ordinals: Vec<i32> = regions.iter().map(|r| r.device.ordinal).collect();
        ordinals.sort_unstable();
        ordinals.dedup();
        for peer in &regions {
            if !device.can_access(&peer.device)? {
                return Err(unsupported(
                    &format!("a heap over devices {} and {}", device.ordinal, peer.device.ordinal),
                    "they cannot access each other's memory",
                ));
            }
        }
        region(own)?.grant(&ordinals)?;
        for peer in &regions {
            if !matches!(peer.kind(), Kind::Virtual { .. }) {
                device.enable_access(&peer.device)?;
            }
        }
        Ok(regions.into_iter().map(|r| self.hand_out(r)).collect())
    }

    fn adopt(&self, descriptor: OwnedFd, bytes: u64) -> Result<Arc<dyn Mapping>> {
        let device = &self.device;
        if !(device.virtual_memory && device.descriptors) {
            let why = "the device has no virtual memory with descriptors";
            return Err(unsupported("import of a descriptor", why));
        }
        Ok(self.hand_out(Arc::new(Region::import(device, descriptor, bytes)?)))
    }

    unsafe fn register(&self, address: u64, bytes: u64) -> Result<Arc<dyn Mapping>> {
        Ok(self.hand_out(Arc::new(Region::foreign(&self.device, address, bytes)?)))
    }

    fn control(&self) -> Arc<Control> {
        self.shared.control.clone()
    }

    fn opened(&self, memory: Memory) {
        // A second call would be the heap's mistake, and harmless: the first memory stays.
        let _ = self.shared.memory.set(memory);
        if self.sharing() == 1 || !self.same_process {
            return;
        }
        if let Err(error) = self.device.order_no_streams_by_memory() {
            tracing::warn!(%error, "streams of ranks that share a device may wait for each other");
        }
        if std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() {
            tracing::warn!(
                ranks = self.sharing(),
                "ranks share a device, and CUDA_DEVICE_MAX_CONNECTIONS is not set: set it to 32, \
                 or streams of one rank may wait for kernels of another"
            );
        }
    }

    fn write(&self, to: &dyn Mapping, offset: u64, data: &[u8]) -> Result<()> {
        let to = as_gpu(to)?.at(offset, data.len() as u64)?;
        self.copies.write(to, data)
    }

    fn read(&self, from: &dyn Mapping, offset: u64, data: &mut [u8]) -> Result<()> {
        let from = as_gpu(from)?.at(offset, data.len() as u64)?;
        self.copies.read(from, data)
    }

    fn fill(&self, to: &dyn Mapping, offset: u64, bytes: u64, value: u8) -> Result<()> {
        // By copies: a fill of the driver's is a kernel, which would have to wait for room beside
        // kernels that wait for this rank.
        const CHUNK: u64 = 1 << 20;
        let to = as_gpu(to)?.at(offset, bytes)?;
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
        // SAFETY: the caller vouches for the stream, in the words of the trait.
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

    fn untold(&self) -> Option<Error> {
        // What goes wrong in kernels is in the control block.
        None
    }

    fn refuse_work(&self) {
        self.shared.refuse_work();
    }

    fn shutdown(&self) {
        self.closed.store(true, Ordering::Relaxed);
        self.shared.forget_order();
        let kept = self.shared.untold();
        if kept {
            tracing::warn!("a stream of a heap may still run: its device memory is not freed");
        }
        for mapping in self.live_mappings() {
            match kept {
                true => mapping.leak(),
                false => mapping.release(),
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

impl Drop for CudaBackend {
    /// Waits for nothing: kernels that run are told to leave, and keep their memory for good.
    fn drop(&mut self) {
        if self.closed.load(Ordering::Relaxed) {
            return;
        }
        let alone = self.shared.refuse_work_now();
        let queues = self.live_queues();
        if alone && queues.iter().all(|queue| queue.is_idle()) && self.shared.rest_is_idle() {
            self.shared.forget_order();
            return;
        }
        drop(queues);
        self.shared.control.set_host_abort(abort::CLOSED);
        self.shared.forget_order();
        tracing::warn!("a heap was dropped while its kernels run: its device memory is not freed");
        std::mem::forget(self.shared.control.clone());
        for mapping in self.live_mappings() {
            mapping.leak();
        }
    }
}
