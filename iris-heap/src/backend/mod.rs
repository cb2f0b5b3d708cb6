//! Traits that a kind of device must implement: memory shared by ranks, copies, streams.
//!
//! This file is long because the traits document a contract per call.

#![allow(unsafe_code, reason = "the calls of the devices' drivers")]

use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use crate::control::Control;
use crate::error::{Error, Result};
use crate::util::unsupported;

pub(crate) mod cpu;
mod cuda;
mod gpu;
mod hip;
mod kind;
mod open;

pub(crate) use gpu::{Current, GpuFunction, GpuModule};
pub use gpu::{DeviceCopy, DeviceHandle, Gpu};
pub use kind::{BackendKind, DeviceTraits};

/// Description of a device by its driver.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Kind of device.
    pub kind: BackendKind,
    /// Index among the devices visible to this process.
    pub index: usize,
    /// Name and architecture; must be equal on all ranks of a world.
    pub name: String,
    /// Architecture in the notation of the vendor's tools: `sm_90`, `gfx942`; `x86_64` for an x86
    /// host.
    pub arch: String,
    /// Unique id of the device; empty if it has none.
    pub uuid: String,
    /// Number of this rank's workgroups that can be co-resident on the device.
    pub workgroups: u32,
    /// Number of multiprocessors (NVIDIA) or compute units (AMD), not divided among the ranks that
    /// share the device; 0 for a host.
    pub multiprocessors: u32,
}

/// Mapped memory, of this rank or of a peer. It is unmapped when the last `Arc` is dropped.
pub trait Mapping: Send + Sync {
    /// Start address; a host or device address, depending on the backend.
    fn address(&self) -> u64;

    /// Length of the memory region in bytes.
    fn bytes(&self) -> u64;

    /// This object as `Any`, to downcast it to the backend's own type.
    fn as_any(&self) -> &dyn Any;
}

/// Use of a memory segment; devices cache data and signals differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Memory for matrices and messages.
    Data,
    /// Memory for words that peers poll.
    Signal,
    /// Device-local words, which only this device accesses; never shared.
    DeviceWords,
}

/// All memory of an open heap. Streams and enqueued work, which may still access it, hold it by
/// `Arc`.
#[derive(Clone)]
pub struct Memory {
    /// Data segments, indexed by rank.
    pub data: Vec<Arc<dyn Mapping>>,
    /// Signal segments, indexed by rank.
    pub signal: Vec<Arc<dyn Mapping>>,
    /// Device-local words of this rank.
    pub device_words: Arc<dyn Mapping>,
    /// Control block of this rank: abort word and fault record.
    pub control: Arc<Control>,
    /// Imported memory of the caller, indexed by segment number. The table is shared, so that
    /// streams and enqueued work that hold it also keep memory alive that is imported later.
    pub(crate) registered: Arc<Mutex<Vec<Option<Imported>>>>,
}

/// Memory that the caller allocated on each rank and the heap maps on all ranks.
#[derive(Clone)]
pub(crate) struct Imported {
    pub(crate) mappings: Vec<Arc<dyn Mapping>>,
    pub(crate) bytes: u64,
    pub(crate) serial: u64,
}

/// Message and file descriptors by which other processes can map a rank's memory.
#[derive(Debug, Default)]
pub(crate) struct Export {
    /// Message of another rank, made by [`Backend::describe`] there.
    pub message: Vec<u8>,
    /// File descriptors by which the memory can be mapped; empty if the message suffices.
    pub descriptors: Vec<OwnedFd>,
}

/// Error that this rank returns if `rank` passed it no memory. That rank has failed, and its own
/// error follows in the ranks' next exchange.
pub(crate) fn nothing_passed(rank: usize) -> Error {
    Error::PeerFailed { rank, what: "open".into(), message: "it passed no memory".into() }
}

/// Position of a running workgroup in its launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// Index of the workgroup, from 0.
    pub index: u32,
    /// Number of workgroups of the launch; all are co-resident.
    pub count: u32,
}

/// Kernel of the CPU backend: called once per workgroup of a launch, each time on another thread.
pub type CpuKernel = Arc<dyn Fn(Group) -> Result<(), Error> + Send + Sync>;

/// Host function that a CPU stream's worker thread calls in the order of the stream.
pub(crate) type CpuCall = Box<dyn FnOnce() -> Result<()> + Send>;

/// Stream of a backend. On a GPU it may wrap a stream that the caller has made.
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

    /// Enqueues a copy of `bytes` bytes between two mappings of the stream's heap; `to` and `from`
    /// are each a mapping and a byte offset in it.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Closed`].
    fn copy(
        &self,
        to: (Arc<dyn Mapping>, u64),
        from: (Arc<dyn Mapping>, u64),
        bytes: u64,
    ) -> Result<()>;

    /// Enqueues a copy of `data` from host memory into a mapping of the stream's heap, at a byte
    /// offset.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Closed`].
    fn write(&self, to: (Arc<dyn Mapping>, u64), data: Vec<u8>) -> Result<()>;

    /// Enqueues a copy of `bytes` bytes to the host, from a mapping of the stream's heap at a byte
    /// offset.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Closed`], [`Error::Unsupported`] in a capture; errors of
    /// the device.
    fn read(&self, from: (Arc<dyn Mapping>, u64), bytes: u64) -> Result<Box<dyn HostCopy>>;

    /// Enqueues a copy of `bytes` bytes between two addresses of the stream's device.
    ///
    /// # Errors
    /// [`Error::Closed`]; errors of the device.
    ///
    /// # Safety
    /// Contract of [`crate::SymmetricHeap::copy_raw_on`].
    unsafe fn copy_raw(&self, to: u64, from: u64, bytes: u64) -> Result<()>;

    /// See [`crate::Stream::launch_cpu`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] if workgroups are not host threads; errors of
    /// [`crate::Stream::launch_cpu`].
    fn launch_cpu(&self, name: &'static str, groups: u32, kernel: CpuKernel) -> Result<()> {
        let _ = (groups, kernel);
        Err(unsupported(&format!("{name} as a CPU kernel"), "this is the stream of another device"))
    }

    /// See [`crate::Stream::call_cpu`].
    ///
    /// # Errors
    /// Errors of [`StreamBackend::launch_cpu`].
    fn call_cpu(&self, name: &'static str, f: CpuCall) -> Result<()> {
        let _ = f;
        Err(unsupported(&format!("{name} as a call"), "this is the stream of another device"))
    }

    /// Enqueues copies of device-local words of the stream's heap, ordered with the heap's ops;
    /// each pair is (target, source), as word indices.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::Closed`]; errors of the device.
    fn copy_words(&self, copies: &[(u32, u32)]) -> Result<()>;

    /// The driver's handle of the stream; on the CPU, the stream's number.
    fn raw_handle(&self) -> u64;

    /// Number of the capture in progress on the stream; `None` if there is none.
    ///
    /// # Errors
    /// Errors of the device.
    fn capture(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Whether the stream is being captured into a graph. The answer is stored, and used for
    /// everything that the calling thread enqueues on the stream until [`Backend::end_call`].
    ///
    /// # Errors
    /// Errors of the device.
    fn is_captured(&self) -> Result<bool> {
        Ok(false)
    }

    /// Invalidates the capture in progress; returns whether there was one.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device).
    fn discard_capture(&self) -> Result<bool> {
        Ok(false)
    }

    /// Control block of the stream's heap. The block identifies the heap, because each heap has
    /// exactly one control block on each rank.
    fn control(&self) -> &Arc<Control>;

    /// This object as `Any`, to downcast it to the backend's own type.
    fn as_any(&self) -> &dyn Any;
}

/// Target in host memory of an enqueued copy. If it is dropped before the copy is complete, the
/// memory stays allocated for the copy.
pub(crate) trait HostCopy: Send {
    /// Event that is done when the copy is complete.
    fn event(&self) -> &dyn EventBackend;

    /// The copied bytes if the event is done; `None` before, or if the copy failed.
    fn bytes(&self) -> Option<Vec<u8>>;
}

/// Point in a stream of a backend; the event is done when all work enqueued before it is done.
pub(crate) trait EventBackend: Send + Sync {
    /// Whether the work that was enqueued before the event is done.
    fn is_done(&self) -> bool;

    /// Waits on the host until the event is done.
    ///
    /// # Errors
    /// Errors of the device.
    fn sync(&self) -> Result<()>;

    /// This object as `Any`, to downcast it to the backend's own type.
    fn as_any(&self) -> &dyn Any;
}

/// Shape of a kernel launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    /// Number of workgroups of the launch.
    pub groups: u32,
    /// Number of threads per workgroup.
    pub threads: u32,
    /// Bytes of dynamic shared memory per workgroup.
    pub shared_bytes: u32,
    /// Whether the launch may begin before the previous launch on the stream has ended, on devices
    /// that support it (programmatic stream serialization). The kernel must then itself wait for
    /// the previous launch before it accesses memory. A kernel path without memory accesses must
    /// wait too before it ends, because the next launch waits only for this launch.
    pub early: bool,
}

/// Order of a launch relative to the ops (operator calls) of its heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaunchOrder {
    /// Launch in the order of ops: after the heap's last op, on whichever stream that op is; the
    /// next op waits for this launch.
    Op,
    /// Launch that runs at the same time as ops: after the heap's last op, on another stream; the
    /// next op does not wait for this launch.
    Beside,
    /// Launch ordered by its stream alone: it neither waits for the heap's ops, nor do ops wait for
    /// it.
    Stream,
}

/// Device of one rank, as its heap uses it.
///
/// Copies of the backend are made by the calling thread: they are synchronous and not ordered with
/// streams. A [`Mapping`] passed to a method must have been made by the same backend.
pub(crate) trait Backend: Send + Sync {
    /// Description of the device that the backend uses.
    fn device(&self) -> DeviceInfo;

    /// Number of ranks of the heap that use this device, this rank included.
    fn ranks_on_device(&self) -> u32 {
        1
    }

    /// Makes the device current on this thread until the guard is dropped, so that later driver
    /// calls need not make it current. `None` on the CPU, or if the driver returns an error; each
    /// later driver call then makes the device current itself and reports the error.
    fn current(&self) -> Option<Current<'_>> {
        None
    }

    /// Ends the operator call that this thread is enqueuing: drops the stored answer of
    /// [`StreamBackend::is_captured`].
    fn end_call(&self) {}

    /// Allocates zeroed memory of this rank.
    ///
    /// # Errors
    /// [`Error::System`] if there is not enough memory.
    fn allocate(&self, purpose: Purpose, bytes: u64) -> Result<Arc<dyn Mapping>>;

    /// Describes a mapping of this rank, so that other processes can map it.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; errors of the device.
    fn describe(&self, own: &dyn Mapping) -> Result<Vec<u8>>;

    /// Opens the file descriptors that this rank, number `rank`, passes to other processes.
    /// `described` has every rank's description of its mapping.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; errors of the system or the device.
    fn descriptors(
        &self,
        rank: usize,
        own: &dyn Mapping,
        described: &[Vec<u8>],
    ) -> Result<Vec<OwnedFd>>;

    /// Maps the exported memory of all other ranks, which are other processes, and returns the
    /// mappings of all ranks. The mapping at index `rank` is `own`.
    ///
    /// # Errors
    /// [`Error::Wire`]; errors of the system or the device.
    fn import(
        &self,
        rank: usize,
        own: Arc<dyn Mapping>,
        all: Vec<Export>,
    ) -> Result<Vec<Arc<dyn Mapping>>>;

    /// Makes the mappings of all ranks accessible to this rank's device, for ranks that are threads
    /// of this process.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; errors of the device.
    fn join(&self, own: &dyn Mapping, all: Vec<Arc<dyn Mapping>>) -> Result<Vec<Arc<dyn Mapping>>>;

    /// Maps `bytes` bytes of the caller's memory, given as a descriptor.
    ///
    /// # Errors
    /// [`Error::Unsupported`] or [`Error::Invalid`] if the memory cannot be mapped.
    fn adopt(&self, descriptor: OwnedFd, bytes: u64) -> Result<Arc<dyn Mapping>>;

    /// Makes a mapping of the caller's memory at `address`, for ranks of the same process.
    ///
    /// # Errors
    /// [`Error::Unsupported`]; [`Error::Invalid`] for an impossible address.
    ///
    /// # Safety
    /// The bytes stay valid for reads and writes by any thread until the mapping is dropped, and no
    /// reference to them exists in the meantime.
    unsafe fn register(&self, address: u64, bytes: u64) -> Result<Arc<dyn Mapping>> {
        let _ = (address, bytes);
        Err(crate::util::unsupported("import of memory", "this backend does not offer it"))
    }

    /// Control block of this rank: abort word and fault record.
    fn control(&self) -> Arc<Control>;

    /// Passes all memory of the heap to the backend once it is mapped; called once, before the
    /// first stream is made.
    fn opened(&self, memory: Memory);

    /// Copies from host memory into a mapping; synchronous.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    fn write(&self, to: &dyn Mapping, offset: u64, data: &[u8]) -> Result<()>;

    /// Copies from a mapping to host memory; synchronous.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    fn read(&self, from: &dyn Mapping, offset: u64, data: &mut [u8]) -> Result<()>;

    /// Sets every byte of a range to `value`; synchronous.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    fn fill(&self, to: &dyn Mapping, offset: u64, bytes: u64, value: u8) -> Result<()>;

    /// Makes a new stream on the backend's device.
    ///
    /// # Errors
    /// [`Error::System`], [`Error::Closed`].
    fn stream(&self) -> Result<Arc<dyn StreamBackend>>;

    /// Wraps the caller's own stream, given as the device's handle.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device has no such streams; [`Error::Invalid`] for a stream of
    /// another device; [`Error::Closed`].
    ///
    /// # Safety
    /// `raw` is a live stream, and stays one until the last clone of the returned stream is
    /// dropped.
    unsafe fn wrap_stream(&self, raw: u64) -> Result<Arc<dyn StreamBackend>> {
        let why = format!("{raw:#x} means nothing to it");
        Err(unsupported("a stream of the caller's on this device", &why))
    }

    /// Checks that no stream of the heap is being captured into a graph.
    ///
    /// # Errors
    /// [`Error::Unsupported`], which names `what`, if a stream is being captured.
    fn check_no_capture(&self, what: &str) -> Result<()> {
        let _ = what;
        Ok(())
    }

    /// Whether freeing memory may wait for work of the whole device. If so, all ranks must have
    /// freed their memory before any rank continues.
    fn waits_for_device(&self) -> bool {
        false
    }

    /// Starts closing the heap: later enqueueing fails with [`Error::Closed`], and calls that are
    /// enqueueing on other threads have finished when this function returns. Called before the last
    /// [`Backend::finish`], so that no work is enqueued after the work for which `finish` waits.
    fn refuse_work(&self);

    /// Waits until all streams have finished their enqueued work, except streams that are being
    /// captured (see [`Backend::check_no_capture`]). Errors of the work are returned by waits for
    /// the streams, not here.
    fn finish(&self);

    /// First error of enqueued work that no wait for its stream has returned; each error is
    /// returned once.
    fn take_unreported(&self) -> Option<Error>;

    /// Ends the heap's streams and threads, whose work has all finished. Also unmaps memory that
    /// this process has opened from other processes, which they must not free before. Later
    /// enqueueing fails with [`Error::Closed`].
    fn shutdown(&self);

    /// Unmaps the remaining memory. `met` is true if all ranks have called [`Backend::shutdown`]; if
    /// it is false, memory that another process may still access stays mapped.
    fn unmap(&self, met: bool);

    /// This object as `Any`, to downcast it to the backend's own type.
    fn as_any(&self) -> &dyn Any;
}
