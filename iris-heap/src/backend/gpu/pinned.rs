//! Control blocks in pinned host memory, which kernels can access.
//!
//! Blocks come from a pool that lives until the process ends. So the host can write abort words and
//! read faults without driver calls, even while another thread closes the heap.

use std::ptr::NonNull;
use std::sync::Mutex;

use super::driver::Driver;
use crate::backend::BackendKind;
use crate::control::{Line, PinnedLine};
use crate::error::{Error, Result};
use crate::util::lock;

/// Number of blocks allocated from the driver at a time.
const BLOCKS: usize = 512;

/// Unused blocks, with the kind of the devices that can address them.
static FREE: Mutex<Vec<(BackendKind, &'static Line)>> = Mutex::new(Vec::new());

/// Takes a zeroed block that the kernels of `device` can address.
pub(crate) fn take(device: &dyn Driver) -> Result<PinnedLine> {
    let kind = device.kind();
    let line = {
        let mut free = lock(&FREE);
        let place = match free.iter().rposition(|&(of, _)| of == kind) {
            Some(place) => place,
            None => {
                free.extend(allocate(device)?.map(|line| (kind, line)));
                free.len() - 1
            }
        };
        free.swap_remove(place).1
    };
    // From here on, dropping `block` returns the line to the pool.
    let mut block = PinnedLine::new(line, Box::new(Lease(kind, line)));
    block.clear();
    // SAFETY: the block is in memory that `allocate` pinned.
    block.address = unsafe { device.pinned_address(NonNull::from(line).cast()) }?;
    Ok(block)
}

/// Returns a block to the pool on drop.
struct Lease(BackendKind, &'static Line);

impl Drop for Lease {
    fn drop(&mut self) {
        lock(&FREE).push((self.0, self.1));
    }
}

fn allocate(device: &dyn Driver) -> Result<impl Iterator<Item = &'static Line>> {
    let bytes = BLOCKS * size_of::<Line>();
    let base = device.pin(bytes)?.cast::<Line>();
    if !base.is_aligned() {
        return Err(Error::invalid("address of pinned memory", format!("{base:p}"), "a page's"));
    }
    // SAFETY: the memory has this length, stays allocated until the process ends, and has no other
    // user.
    unsafe { base.as_ptr().cast::<u8>().write_bytes(0, bytes) };
    Ok((0..BLOCKS).map(move |index| {
        // SAFETY: the index is inside the memory.
        let line = unsafe { base.add(index) };
        // SAFETY: the line is aligned, initialised above, never freed, and consists of atomic words
        // only, which may change at any time.
        unsafe { line.as_ref() }
    }))
}
