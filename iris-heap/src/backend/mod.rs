//! What a kind of device must offer: memory that ranks share, copies, streams.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use crate::control::Control;
use crate::error::{Error, Result};
use crate::util::unsupported;

mod cpu;
mod cuda;
mod gpu;
mod hip;
mod kind;
mod open;

pub(crate) use gpu::Current;
pub use gpu::{DeviceCopy, Gpu};
pub use kind::{BackendKind, DeviceTraits};

/// A device in words.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Kind.
    pub kind: BackendKind,
    /// Its number among the devices that this process sees.
    pub index: usize,
    /// Name and architecture, equal on all ranks of a world.
    pub name: String,
    /// Its architecture, as the vendor's tools name it: `sm_90`, `gfx942`; of a host `x86_64`.
    pub arch: String,
    /// Identity of this very device; empty where there is none.
    pub uuid: String,
    /// Workgroups that can run at the same time for this rank.
    pub workgroups: u32,
    /// Number of multiprocessors (NVIDIA) or compute units (AMD), however many ranks share them; 0 for a host.
    pub multiprocessors: u32,
}

/// Memory as one rank sees it: its own or a peer's. It is unmapped when the last `Arc` goes.
pub trait Mapping: Send + Sync {
    /// Where it begins, for host or kernels as the backend has it.
    fn address(&self) -> u64;

    /// Its length.
    fn bytes(&self) -> u64;

    /// The backend's own type.
    fn as_any(&self) -> &dyn Any;
}

/// What a segment is for: devices cache data and signals differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Matrices and messages.
    Data,
    /// Words that peers poll.
    Signal,
    /// Words of this device alone; never shared.
    DeviceWords,
}

/// All memory of an open heap. What may still touch it (streams, enqueued work) holds it by `Arc`.
#[derive(Clone)]
pub struct Memory {
    /// Data segments by rank.
    pub data: Vec<Arc<dyn Mapping>>,
    /// Signal segments by rank.
    pub signal: Vec<Arc<dyn Mapping>>,
    /// Device-local words of this rank.
    pub device_words: Arc<dyn Mapping>,
    /// Abort word and fault record of this rank.
    pub control: Arc<Control>,
    /// The caller's memory, by the number of its segment: what is imported later is held, too.
    pub(crate) registered: Arc<Mutex<Vec<Option<Imported>>>>,
}

/// The caller's memory of all ranks.
#[derive(Clone)]
pub(crate) struct Imported {
    pub(crate) mappings: Vec<Arc<dyn Mapping>>,
    pub(crate) bytes: u64,
    pub(crate) serial: u64,
}

/// What a rank gives other processes so that they can map its memory.
#[derive(Debug, Default)]
pub(crate) struct Export {
    /// What [`Backend::describe`] said of it.
    pub message: Vec<u8>,
    /// Descriptors of it.
    pub descriptors: Vec<OwnedFd>,
}

/// Which workgroup of a launch runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its number, from 0.
    pub index: u32,
    /// Workgroups of the launch. All run at the same time.
    pub count: u32,
}

/// A kernel of the CPU backend: called once a workgroup, each on a thread of its own.
pub type CpuKernel = Arc<dyn Fn(Group) -> Result<(), Error> + Send + Sync>;

/// A function of the host that is enqueued.
pub(crate) type CpuCall = Box<dyn FnOnce() -> Result<()> + Send>;

/// What a backend's stream offers. The GPU's wrap the caller's own streams.
pub(crate) trait StreamBackend: Send + Sync {
    /// See [`crate::Stream::sync`].
    ///
    /// # Errors
    /// The first error of enqueued work.
    fn sync(&self) -> Result<()>;

    /// See [`crate::Stream::record`].
    ///
    /// # Errors
    /// [`Error::Closed`].
    fn record(&self) -> Result<Arc<dyn EventBackend>>;

    /// See [`crate::Stream::wait`].
    ///
    /// # Errors
    /// [`Error::Closed`]; [`Error::Unsupported`] for an event of another kind of device.
    fn wait(&self, event: &dyn EventBackend) -> Result<()>;

    /// Enqueues a copy between mappings of its heap: memory and byte offset of the target, then of
    /// the source.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Closed`].
    fn copy(
        &self,
        to: (Arc<dyn Mapping>, u64),
        from: (Arc<dyn Mapping>, u64),
        bytes: u64,
    ) -> Result<()>;

    /// Enqueues a copy from the host into a mapping of its heap.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Closed`].
    fn write(&self, to: (Arc<dyn Mapping>, u64), data: Vec<u8>) -> Result<()>;

    /// Enqueues a copy from a mapping of its heap to the host.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Closed`], [`Error::Unsupported`] in a capture; those of the device.
    fn read(&self, from: (Arc<dyn Mapping>, u64), bytes: u64) -> Result<Box<dyn HostCopy>>;

    /// Enqueues a copy between two addresses of its device.
    ///
    /// # Errors
    /// [`Error::Closed`]; those of the device.
    ///
    /// # Safety
    /// As for [`crate::SymmetricHeap::copy_raw_on`].
    unsafe fn copy_raw(&self, to: u64, from: u64, bytes: u64) -> Result<()>;

    /// See [`crate::Stream::launch_cpu`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] where workgroups are no threads of the host; those of the method.
    fn launch_cpu(&self, name: &'static str, groups: u32, kernel: CpuKernel) -> Result<()> {
        let _ = (groups, kernel);
        Err(unsupported(&format!("{name} as a CPU kernel"), "this is the stream of another device"))
    }

    /// See [`crate::Stream::call_cpu`].
    ///
    /// # Errors
    /// As [`StreamBackend::launch_cpu`].
    fn call_cpu(&self, name: &'static str, f: CpuCall) -> Result<()> {
        let _ = f;
        Err(unsupported(&format!("{name} as a call"), "this is the stream of another device"))
    }

    /// Enqueues copies of device-local words of its heap, in the order of the heap's ops: (to, from).
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Closed`]; those of the device.
    fn copy_words(&self, copies: &[(u32, u32)]) -> Result<()>;

    /// The device's handle, or a number where there is none.
    fn raw_handle(&self) -> u64;

    /// Whether what is enqueued becomes part of a graph.
    ///
    /// # Errors
    /// Those of the device.
    fn is_captured(&self) -> Result<bool> {
        Ok(false)
    }

    /// Makes the capture that is under way invalid; returns whether one was.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device).
    fn discard_capture(&self) -> Result<bool> {
        Ok(false)
    }

    /// The control block of its heap, by which that is known: a heap has one on each rank.
    fn control(&self) -> &Arc<Control>;

    /// The backend's own type.
    fn as_any(&self) -> &dyn Any;
}

/// Bytes that an enqueued copy brings to the host. Dropped before that, it keeps their memory for the copy.
pub(crate) trait HostCopy: Send {
    /// Event that is done when the bytes are there.
    fn event(&self) -> &dyn EventBackend;

    /// The bytes, once the event is done; none if the copy failed.
    fn bytes(&self) -> Option<Vec<u8>>;
}

/// What a backend's event offers.
pub(crate) trait EventBackend: Send + Sync {
    /// Whether the work before it is done.
    fn is_done(&self) -> bool;

    /// Waits on the host until it is.
    ///
    /// # Errors
    /// Those of the device.
    fn sync(&self) -> Result<()>;

    /// The backend's own type.
    fn as_any(&self) -> &dyn Any;
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Workgroups.
    pub groups: u32,
    /// Threads of a workgroup.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a workgroup.
    pub shared_bytes: u32,
    /// Whether it may begin before the launch ahead of it on the stream is over, on devices that can do that: its
    /// kernel waits for that itself before it touches memory, and, on every way, before it ends, since the launch
    /// behind it waits for it alone.
    pub early: bool,
}

/// How a launch stands to the ops of its heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaunchOrder {
    /// Behind the last op, on whatever stream that was; the next op waits for it.
    Op,
    /// Behind the last op, on another stream; the next op does not wait for it.
    Beside,
}

/// Compiled code that a device has loaded.
pub(crate) trait ModuleBackend: Send + Sync {
    /// See [`crate::Module::function`].
    ///
    /// # Errors
    /// Those of the device.
    fn function(&self, name: &str, shared_bytes: u32) -> Result<Arc<dyn FunctionBackend>>;
}

/// A kernel of such code.
pub(crate) trait FunctionBackend: Send + Sync {
    /// See [`crate::Function::resources`].
    ///
    /// # Errors
    /// Those of the device.
    fn resources(&self) -> Result<(u32, u32)>;

    /// See [`crate::Function::resident`].
    ///
    /// # Errors
    /// Those of the device.
    fn resident(&self, threads: u32, shared_bytes: u32) -> Result<u32>;

    /// See [`crate::Function::resident_clusters`].
    ///
    /// # Errors
    /// Those of the device.
    fn resident_clusters(&self, shape: LaunchShape, cluster: u32) -> Result<u32>;

    /// Enqueues a launch on a stream of the heap that the code was loaded for.
    ///
    /// # Errors
    /// [`Error::Closed`]; those of the device.
    ///
    /// # Safety
    /// As for [`crate::Function::launch`] or [`crate::Function::launch_beside`].
    unsafe fn launch(
        &self,
        stream: &dyn StreamBackend,
        order: LaunchOrder,
        shape: LaunchShape,
        args: &[&[u8]],
    ) -> Result<()>;
}

/// A device of one rank, as its heap uses it.
///
/// Copies are of the host's thread: they return when they are done, and are not ordered with
/// streams. A [`Mapping`] given to a method is one that the same backend made.
pub(crate) trait Backend: Send + Sync {
    /// Kind and name of the device.
    fn device(&self) -> DeviceInfo;

    /// Ranks of the heap that use this device, this one included.
    fn sharing(&self) -> u32 {
        1
    }

    /// Makes the device current on this thread until what is returned is dropped, so that each of several
    /// calls of its driver finds it so; nothing where there is no such thing. Calls that follow see to it
    /// themselves, so that whatever hinders this is told by them.
    fn current(&self) -> Option<Current<'_>> {
        None
    }

    /// New memory of this rank, all zero.
    ///
    /// # Errors
    /// [`Error::System`] if there is none.
    fn allocate(&self, purpose: Purpose, bytes: u64) -> Result<Arc<dyn Mapping>>;

    /// What this rank tells other processes of a mapping that they are to map.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; those of the device.
    fn describe(&self, own: &dyn Mapping) -> Result<Vec<u8>>;

    /// The descriptors that `rank`, which this is, passes to other processes, given what each rank
    /// has said of its mapping.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; those of the system or the device.
    fn descriptors(
        &self,
        rank: usize,
        own: &dyn Mapping,
        described: &[Vec<u8>],
    ) -> Result<Vec<OwnedFd>>;

    /// Maps what all ranks, which are processes, have exported. That of `rank`, which this is, stays as
    /// it is.
    ///
    /// # Errors
    /// [`Error::Wire`]; those of the system or the device.
    fn import(
        &self,
        rank: usize,
        own: Arc<dyn Mapping>,
        all: Vec<Export>,
    ) -> Result<Vec<Arc<dyn Mapping>>>;

    /// Makes the mappings of all ranks, which are threads of this process, good for this one.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; those of the device.
    fn join(&self, own: &dyn Mapping, all: Vec<Arc<dyn Mapping>>) -> Result<Vec<Arc<dyn Mapping>>>;

    /// Makes a mapping of `bytes` bytes of the caller's memory, given as a descriptor.
    ///
    /// # Errors
    /// [`Error::Unsupported`] or [`Error::Invalid`] if it cannot be mapped.
    fn adopt(&self, descriptor: OwnedFd, bytes: u64) -> Result<Arc<dyn Mapping>>;

    /// Makes a mapping of the caller's memory as it is, for ranks of the same process.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; [`Error::Invalid`] for an address that cannot be one.
    ///
    /// # Safety
    /// The bytes stay valid for reads and writes by any thread until the mapping is dropped, and
    /// nobody keeps a reference to them in the meantime.
    unsafe fn register(&self, address: u64, bytes: u64) -> Result<Arc<dyn Mapping>> {
        let _ = (address, bytes);
        Err(crate::util::unsupported("import of memory", "this backend does not offer it"))
    }

    /// The control block of this rank.
    fn control(&self) -> Arc<Control>;

    /// See [`crate::SymmetricHeap::load`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] where kernels are the host's own code; [`Error::Invalid`] for an image
    /// that is none of the device's; those of the device.
    fn load(&self, image: &[u8]) -> Result<Arc<dyn ModuleBackend>> {
        let _ = image;
        Err(unsupported("compiled kernels", "those of this device are the host's own code"))
    }

    /// All memory is mapped: called once, before the first stream.
    fn opened(&self, memory: Memory);

    /// Copies from the host.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    fn write(&self, to: &dyn Mapping, offset: u64, data: &[u8]) -> Result<()>;

    /// Copies to the host.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    fn read(&self, from: &dyn Mapping, offset: u64, data: &mut [u8]) -> Result<()>;

    /// Sets every byte.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    fn fill(&self, to: &dyn Mapping, offset: u64, bytes: u64, value: u8) -> Result<()>;

    /// A new stream.
    ///
    /// # Errors
    /// [`Error::System`], [`Error::Closed`].
    fn stream(&self) -> Result<Arc<dyn StreamBackend>>;

    /// The caller's own stream, by the device's handle of it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where there is none; [`Error::Invalid`] for one of another device;
    /// [`Error::Closed`].
    ///
    /// # Safety
    /// It is a stream, and stays one until the last clone of what is returned is dropped.
    unsafe fn wrap_stream(&self, raw: u64) -> Result<Arc<dyn StreamBackend>> {
        let why = format!("{raw:#x} means nothing to it");
        Err(unsupported("a stream of the caller's on this device", &why))
    }

    /// Whether no stream of the heap is being captured into a graph.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with `what`, if one is.
    fn check_no_capture(&self, what: &str) -> Result<()> {
        let _ = what;
        Ok(())
    }

    /// Whether giving memory back may wait for work of the whole device, so that all ranks must
    /// have done it before one goes on.
    fn waits_for_device(&self) -> bool {
        false
    }

    /// The heap closes: later enqueueing is [`Error::Closed`], and what another thread is about to
    /// enqueue is enqueued when this returns. Comes before [`Backend::finish`], where memory goes
    /// although streams may hold it.
    fn refuse_work(&self) {}

    /// Waits until all streams have done what was enqueued, but not for one that is captured: see
    /// [`Backend::check_no_capture`]. Errors stay with their streams.
    fn finish(&self);

    /// The first error of enqueued work that no wait for its stream has returned. It is returned once.
    fn untold(&self) -> Option<Error>;

    /// Ends streams and threads, which have finished. Later enqueueing is [`Error::Closed`].
    fn shutdown(&self);

    /// The backend's own type.
    fn as_any(&self) -> &dyn Any;
}
