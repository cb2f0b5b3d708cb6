//! Heaps of epochs that have ended, [`Retired`], of which a rank's own memory stays readable.

use std::sync::Arc;

use super::SymmetricHeap;
use crate::abi::abort;
use crate::backend::{BackendKind, Mapping, cpu};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::slice::{RawSlice, SymSlice};
use crate::util::{lock, unsupported};
use crate::world::World;

/// Heap that takes no further work, whose memory this rank can still read, for example to go on
/// without a lost rank ([`Member`](crate::Member)). [`Retired::release`] gives the memory back to the
/// system. Dropping it gives only this process's mapping back: the pages stay as long as another process maps
/// them, such as one that is stopped.
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
    /// dropped or released, for example to go on using weights. Refuses a block that was the result of a
    /// call, or the target of a [`SymmetricHeap::copy_on`] to a peer, because peers may still write it:
    /// copy it by [`Retired::read`]. Blocks that a kernel of the program's own has written at peers are not
    /// known.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a block that peers may write; errors of [`Retired::read`].
    pub fn resolve<T: Element>(&self, slice: SymSlice<T>) -> Result<*mut T> {
        let (mapping, offset) = self.locate(&slice.raw())?;
        if lock(&self.heap.written_by_peers).contains(&(slice.segment(), slice.serial())) {
            let value = format!(
                "offset {} (allocation {}), which peers may still write",
                slice.offset(),
                slice.serial()
            );
            let expected = "a block that calls only read; copy this one by Retired::read";
            return Err(Error::invalid("slice of Retired::resolve", value, expected));
        }
        Ok((mapping.address() + offset) as *mut T)
    }

    /// Gives the pages of this rank's part back to the system at once, although other processes may map
    /// them: ranks that have not dropped the heap, and one that is stopped, whose later stores change nothing
    /// that anybody reads. `world` is that of a later epoch; because all its ranks have ended the epoch of
    /// the heap, none of them needs this part. Not collective.
    ///
    /// # Errors
    /// [`Error::Invalid`] for the heap's own world, one of an epoch before, and one that no member has
    /// joined; [`Error::System`]. The heap is dropped in any case.
    pub fn release(self, world: &World) -> Result<()> {
        self.heap.world.check_process("releasing a heap")?;
        let name =
            |epoch: Option<u64>| epoch.map_or("of no Member".into(), |it| format!("epoch {it}"));
        match (self.heap.world.epoch(), world.epoch()) {
            (Some(own), Some(later)) if later > own => {
                let (memory, rank) = (&self.heap.memory, self.heap.local_rank());
                let own = [&memory.data[rank], &memory.signal[rank]];
                own.into_iter().try_for_each(|part| cpu::own(&**part)?.give_pages_back())
            }
            (own, other) => {
                let expected = format!("a later one than the heap's, {}", name(own));
                Err(Error::invalid("world of Retired::release", name(other), expected))
            }
        }
    }

    fn locate(&self, slice: &RawSlice) -> Result<(Arc<dyn Mapping>, u64)> {
        self.heap.world.check_process("using a retired heap")?;
        self.heap.located(&self.heap.state(), slice, self.heap.local_rank())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HeapOptions, Member, Next, Policy, Settings};

    #[test]
    fn a_retired_heap_gives_its_pages_back_in_the_next_epoch() {
        let world = World::of_job("alone".into(), 0, 1, Ok(Settings::default()), None).unwrap();
        let member = Member::join(&world, Policy::new()).unwrap();
        let heap = SymmetricHeap::open(&world, HeapOptions::new()).unwrap();
        let input = heap.full::<f32>(1 << 20, 2.0).unwrap();
        let mapped = heap.memory().data.swap_remove(0);
        let retire = |heap: Arc<SymmetricHeap>| heap.retire().unwrap();
        let other = World::of_job("other".into(), 0, 1, Ok(Settings::default()), None).unwrap();
        let second = SymmetricHeap::open(&world, HeapOptions::new()).unwrap();
        let error = retire(second).release(&other).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("is of no Member: expected a later one than the heap's, epoch 0"),
            "{error}"
        );
        let second = SymmetricHeap::open(&world, HeapOptions::new()).unwrap();
        let error = retire(second).release(&world).unwrap_err();
        assert!(error.to_string().contains("is epoch 0: expected a later one"), "{error}");
        let retired = retire(heap);
        let Next::Epoch(next, _) = member.next().unwrap() else { panic!("no epoch") };
        assert_eq!(retired.read(input.slice(5..7).unwrap()).unwrap(), [2.0; 2]);
        retired.release(&next).unwrap();
        // Another mapping, such as that of a process that is stopped.
        let mut data = [1; 4];
        cpu::own(&*mapped).unwrap().read(input.offset() + 8, &mut data).unwrap();
        assert_eq!(data, [0; 4], "the pages are still there");
        let second = retire(SymmetricHeap::open(&next, HeapOptions::new()).unwrap());
        let Next::Epoch(..) = member.next().unwrap() else { panic!("no epoch") };
        let error = second.release(&world).unwrap_err();
        assert!(
            error.to_string().contains("is epoch 0: expected a later one than the heap's, epoch 1"),
            "{error}"
        );
    }
}
