//! Heaps of epochs that have ended, [`Retired`], of which a rank's own memory stays readable.

use std::sync::Arc;

use super::SymmetricHeap;
use crate::abi::abort;
use crate::backend::{BackendKind, Mapping};
use crate::dtype::Element;
use crate::error::Result;
use crate::slice::{RawSlice, SymSlice};
use crate::util::{lock, unsupported};

/// Heap that takes no further work, whose memory this rank can still read, for example to go on
/// without a lost rank ([`Member`](crate::Member)). Dropping it gives the memory back.
///
/// A rank that was left out because it was stopped may run on at any time. Until its call fails, it
/// stores to the memory of its peers in this heap: results of calls, targets of
/// [`SymmetricHeap::copy_on`], workspaces. So a block that peers write may change; one that was only
/// an input does not.
#[derive(Debug)]
pub struct Retired {
    heap: Arc<SymmetricHeap>,
}

impl SymmetricHeap {
    /// Retires the heap: tells the waiting kernels of all ranks to leave, and waits for this rank's
    /// streams, but for no other rank. Afterwards the heap is closed. Not collective.
    ///
    /// # Errors
    /// [`Error::Closed`](crate::Error::Closed); [`Error::Unsupported`](crate::Error::Unsupported) on
    /// GPUs, on several nodes, and in a forked child;
    /// [`Error::WaitFromWork`](crate::Error::WaitFromWork).
    pub fn retire(self: Arc<Self>) -> Result<Retired> {
        const WHAT: &str = "retiring a heap";
        let step = self.step(WHAT)?;
        if self.options.backend != BackendKind::Cpu || self.nodes.get().is_some() {
            return Err(unsupported(WHAT, "expected a heap of the CPU, on one node"));
        }
        drop(self.open_state()?);
        self.poison(abort::REVOKED)?;
        self.state_mut().closed = true;
        self.backend.refuse_work();
        self.finish_streams();
        lock(&self.watch).take();
        self.backend.shutdown();
        lock(&self.registration).take();
        drop(step);
        Ok(Retired { heap: self })
    }
}

impl Retired {
    /// Reads this rank's part of a slice. A block that peers write may hold old and new words.
    ///
    /// # Errors
    /// [`Error::ForeignSlice`](crate::Error::ForeignSlice),
    /// [`Error::NotAllocated`](crate::Error::NotAllocated).
    pub fn read<T: Element>(&self, slice: SymSlice<T>) -> Result<Vec<T>> {
        let (mapping, offset) = self.locate(&slice.raw())?;
        let mut data = vec![T::zeroed(); slice.len()];
        self.heap.backend.read(&*mapping, offset, bytemuck::cast_slice_mut(&mut data))?;
        Ok(data)
    }

    /// Returns the address of this rank's part of a slice, valid in this process until this object is
    /// dropped, for example to go on using weights. Pass only a block that was an input; copy others
    /// by [`Retired::read`].
    ///
    /// # Errors
    /// Errors of [`Retired::read`].
    pub fn resolve<T: Element>(&self, slice: SymSlice<T>) -> Result<*mut T> {
        let (mapping, offset) = self.locate(&slice.raw())?;
        Ok((mapping.address() + offset) as *mut T)
    }

    fn locate(&self, slice: &RawSlice) -> Result<(Arc<dyn Mapping>, u64)> {
        self.heap.world.check_process("using a retired heap")?;
        self.heap.located(&self.heap.state(), slice, self.heap.local_rank())
    }
}
