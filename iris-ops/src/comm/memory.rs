//! Memory that a program passes to calls of a communicator: on the symmetric heap, on the host, or
//! allocated by cudarc.

use iris_heap::{BackendKind, Element, IssueGuard, RawSlice, SymSlice, SymmetricHeap};

#[cfg(feature = "cudarc-0-19")]
use cudarc::driver::{
    CudaSlice, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop,
};

use super::stream::CommStream;
use crate::error::{Error, InOp, Result};
use crate::matrix::MatRef;
use crate::op_names::Op;

/// Memory of elements of `T` that a call of a [`Comm`](super::Comm) reads: `[T]`, `Vec<T>` or `[T;
/// N]` on the CPU; [`SymSlice`] of the communicator's heap; with the feature `cudarc-0-19`, also
/// `CudaSlice<T>`, `CudaView<T>` and `CudaViewMut<T>`.
pub trait SendBuffer<T>: sealed::SendBuffer<T> {}

/// Memory of elements of `T` that a call of a [`Comm`](super::Comm) writes: `[T]`, `Vec<T>` or `[T;
/// N]` on the CPU; [`SymSlice`] of the communicator's heap; with the feature `cudarc-0-19`, also
/// `CudaSlice<T>` and `CudaViewMut<T>`.
pub trait RecvBuffer<T>: sealed::RecvBuffer<T> {}

impl<T, S: sealed::SendBuffer<T> + ?Sized> SendBuffer<T> for S {}
impl<T, S: sealed::RecvBuffer<T> + ?Sized> RecvBuffer<T> for S {}

pub(super) mod sealed {
    use super::*;

    pub trait SendBuffer<T> {
        /// Lends the memory to a call on `stream`. The call must be enqueued while the returned
        /// guard lives.
        fn lend<'a>(&'a self, stream: &'a CommStream) -> Lent<'a>;
    }

    pub trait RecvBuffer<T> {
        /// Lends the memory to a call that writes it. The call must be enqueued while the returned
        /// guard lives.
        fn lend_mut<'a>(&'a mut self, stream: &'a CommStream) -> Lent<'a>;
    }
}

/// Location of lent memory: host, GPU or symmetric heap.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// Host memory at this address.
    Host(u64),
    /// Memory that the caller allocated by cudarc, at this address; `None` if the communicator's
    /// stream was not made by cudarc, so that the memory cannot be used on it.
    #[cfg(feature = "cudarc-0-19")]
    Cuda(Option<u64>),
    /// Memory of cudarc on a device other than that of the communicator's stream. The field is the
    /// number of the memory's device.
    #[cfg(feature = "cudarc-0-19")]
    OtherDevice(usize),
    /// Memory of the symmetric heap.
    Sym(RawSlice),
}

/// Borrow of the memory that a call gets as an argument. The borrow lasts until the call is
/// enqueued; for host memory, until the call is complete.
pub struct Lent<'a> {
    place: Place,
    len: usize,
    writable: bool,
    /// Guard of cudarc. Work of cudarc on this memory that is enqueued after the guard is dropped
    /// waits for the call.
    #[cfg(feature = "cudarc-0-19")]
    _until: Option<SyncOnDrop<'a>>,
    _memory: std::marker::PhantomData<&'a ()>,
}

impl Lent<'_> {
    fn new(place: Place, len: usize, writable: bool) -> Self {
        Self {
            place,
            len,
            writable,
            #[cfg(feature = "cudarc-0-19")]
            _until: None,
            _memory: std::marker::PhantomData,
        }
    }

    /// Number of elements of the lent memory.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether the memory is host memory. If so, a method must not return before its
    /// collective call is complete, because only the borrow keeps the memory alive.
    pub(super) fn is_host(&self) -> bool {
        matches!(self.place, Place::Host(_))
    }

    /// Returns the address range of the lent memory, or an error if the device of this heap cannot
    /// access it.
    pub(super) fn bytes(&self, op: Op, heap: &SymmetricHeap, elements: u64) -> Result<Bytes> {
        let backend = heap.options().backend;
        let invalid = |value: &str, expected: String| {
            Error::invalid(op, "memory of a message", value, expected)
        };
        let bytes = (self.len as u64).saturating_mul(elements);
        let (address, sym) = match self.place {
            Place::Sym(slice) => (heap.resolve(slice, heap.rank()).in_op(op)? as u64, Some(slice)),
            Place::Host(address) if backend == BackendKind::Cpu => (address, None),
            Place::Host(_) => {
                let expected =
                    format!("memory of the {backend} device: a slice of cudarc's, or a SymSlice");
                return Err(invalid("of the host", expected));
            }
            #[cfg(feature = "cudarc-0-19")]
            Place::Cuda(Some(address)) => (address, None),
            #[cfg(feature = "cudarc-0-19")]
            Place::OtherDevice(ordinal) => {
                let expected = format!("memory of device {}", heap.device().index);
                return Err(invalid(&format!("of device {ordinal}"), expected));
            }
            #[cfg(feature = "cudarc-0-19")]
            Place::Cuda(None) => {
                let expected = "memory of the host or a SymSlice, unless the communicator is made with a stream of \
                                cudarc's, Arc<CudaStream>";
                return Err(invalid("of cudarc", expected.into()));
            }
        };
        Ok(Bytes { address, bytes, sym, writable: self.writable })
    }
}

/// Range of addresses that the device can access while a [`Lent`] guard is held.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bytes {
    pub(super) address: u64,
    pub(super) bytes: u64,
    sym: Option<RawSlice>,
    writable: bool,
}

impl Bytes {
    /// Returns the address range, on this rank, of a slice of the heap.
    pub(super) fn of(heap: &SymmetricHeap, slice: RawSlice, op: Op) -> Result<Self> {
        let address = heap.resolve(slice, heap.rank()).in_op(op)? as u64;
        Ok(Self { address, bytes: slice.bytes(), sym: Some(slice), writable: true })
    }

    /// Address of byte `from` of the range, for work that is enqueued while `issuing` lives. A slice
    /// of the heap may have been freed since the range was made, so it is looked up again.
    pub(super) fn at(&self, issuing: &IssueGuard<'_>, from: u64, op: Op) -> Result<u64> {
        let start = self.sym.map_or(Ok(self.address), |slice| issuing.resolve(slice).in_op(op));
        Ok(start? + from)
    }

    /// Matrix of `rows` x `cols` elements of `T`, row-major with leading dimension `ld`. It begins
    /// `from` bytes after the start of the range.
    #[allow(unsafe_code, reason = "memory that is lent until the call is enqueued, or done")]
    pub(super) fn matrix<T: Element>(
        &self,
        op: Op,
        from: u64,
        (rows, cols, ld): (usize, usize, usize),
    ) -> Result<MatRef> {
        let len = if rows == 0 { 0 } else { (rows - 1) * ld + cols };
        let end = from + (len * size_of::<T>()) as u64;
        debug_assert!(end <= self.bytes, "{from} to {end} of {self:?}");
        let matrix = match self.sym {
            Some(slice) => {
                let part = slice.slice(from as usize..end as usize).in_op(op)?;
                MatRef::sym(part.cast::<T>().in_op(op)?, rows, cols)
            }
            // SAFETY: the range comes from a `Lent`, which borrows the memory and is held until the
            // call is enqueued. After that, cudarc frees its memory only in the order of the
            // stream. For host memory, the caller waits for the call.
            None if self.writable => unsafe {
                MatRef::external_mut((self.address + from) as *mut T, len, rows, cols)
            },
            // SAFETY: the memory is borrowed like the writable memory above, and the call only
            // reads it.
            None => unsafe { MatRef::external((self.address + from) as *const T, len, rows, cols) },
        };
        Ok(matrix.with_ld(ld))
    }
}

impl<T> sealed::SendBuffer<T> for [T] {
    fn lend<'a>(&'a self, _: &'a CommStream) -> Lent<'a> {
        Lent::new(Place::Host(self.as_ptr() as u64), self.len(), false)
    }
}

impl<T> sealed::RecvBuffer<T> for [T] {
    fn lend_mut<'a>(&'a mut self, _: &'a CommStream) -> Lent<'a> {
        Lent::new(Place::Host(self.as_mut_ptr() as u64), self.len(), true)
    }
}

macro_rules! as_slice {
    ($([$($generic:tt)*] $type:ty),*) => {$(
        impl<$($generic)*> sealed::SendBuffer<T> for $type {
            fn lend<'a>(&'a self, stream: &'a CommStream) -> Lent<'a> {
                sealed::SendBuffer::lend(&self[..], stream)
            }
        }

        impl<$($generic)*> sealed::RecvBuffer<T> for $type {
            fn lend_mut<'a>(&'a mut self, stream: &'a CommStream) -> Lent<'a> {
                sealed::RecvBuffer::lend_mut(&mut self[..], stream)
            }
        }
    )*};
}
as_slice!([T] Vec<T>, [T, const N: usize] [T; N]);

impl<T: Element> sealed::SendBuffer<T> for SymSlice<T> {
    fn lend<'a>(&'a self, _: &'a CommStream) -> Lent<'a> {
        Lent::new(Place::Sym(self.raw()), self.len(), true)
    }
}

impl<T: Element> sealed::RecvBuffer<T> for SymSlice<T> {
    fn lend_mut<'a>(&'a mut self, stream: &'a CommStream) -> Lent<'a> {
        sealed::SendBuffer::lend(self, stream)
    }
}

#[cfg(feature = "cudarc-0-19")]
mod theirs {
    use super::*;

    /// Makes the guard for a cudarc slice. `address` is the slice's address on the stream's device,
    /// and `until` is cudarc's own guard.
    fn lent<'a>(
        (address, until): (Option<u64>, Option<SyncOnDrop<'a>>),
        (allocated, on): (usize, &'a CommStream),
        len: usize,
        writable: bool,
    ) -> Lent<'a> {
        let place = match on.theirs() {
            Some(stream) if stream.context().ordinal() != allocated => {
                Place::OtherDevice(allocated)
            }
            _ => Place::Cuda(address),
        };
        Lent { _until: until, ..Lent::new(place, len, writable) }
    }

    fn ordinal<T>(memory: &impl DeviceSlice<T>) -> usize {
        memory.stream().context().ordinal()
    }

    macro_rules! device_memory {
        (read $($type:ty),*; written $($target:ty),*) => {
            $(impl<T> sealed::SendBuffer<T> for $type {
                fn lend<'a>(&'a self, stream: &'a CommStream) -> Lent<'a> {
                    let pointer = stream.theirs().map(|stream| self.device_ptr(stream)).unzip();
                    lent(pointer, (ordinal(self), stream), DeviceSlice::len(self), false)
                }
            })*
            $(impl<T> sealed::RecvBuffer<T> for $target {
                fn lend_mut<'a>(&'a mut self, stream: &'a CommStream) -> Lent<'a> {
                    let (len, ordinal) = (DeviceSlice::len(self), ordinal(self));
                    let pointer = stream.theirs().map(|stream| self.device_ptr_mut(stream)).unzip();
                    lent(pointer, (ordinal, stream), len, true)
                }
            })*
        };
    }
    device_memory!(
        read CudaSlice<T>, CudaView<'_, T>, CudaViewMut<'_, T>;
        written CudaSlice<T>, CudaViewMut<'_, T>
    );
}
