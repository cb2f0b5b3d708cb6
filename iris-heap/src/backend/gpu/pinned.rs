//! Control blocks: pinned host memory that kernels see.
//!
//! A block is taken from a pool that lives until the process ends: the host writes abort words and
//! reads faults without any call of the driver, also when a heap goes while another thread looks at
//! its block.

use std::ptr::NonNull;
use std::sync::Mutex;

use super::driver::Driver;
use crate::backend::BackendKind;
use crate::control::{Line, PinnedLine};
use crate::error::{Error, Result};
use crate::util::lock;

/// Blocks that are taken from the driver at a time.
const BLOCKS: usize = 512;

/// Blocks that nobody uses, and whose devices can address them.
static FREE: Mutex<Vec<(BackendKind, &'static Line)>> = Mutex::new(Vec::new());

/// A block, all zero, that the kernels of `device` can address.
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
    // From here on dropping gives it back.
    let mut block = PinnedLine::new(line, Box::new(Lease(kind, line)));
    block.clear();
    // SAFETY: the block is in memory that `allocate` pinned.
    block.address = unsafe { device.pinned_address(NonNull::from(line).cast()) }?;
    Ok(block)
}

/// Gives a block back to the pool.
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
    // SAFETY: the memory is as long as that, of this process until it ends, and nobody else's.
    unsafe { base.as_ptr().cast::<u8>().write_bytes(0, bytes) };
    Ok((0..BLOCKS).map(move |index| {
        // SAFETY: the index is inside the memory.
        let line = unsafe { base.add(index) };
        // SAFETY: the line is aligned, written above, never given back to the driver, and made of
        // atomic words alone, which others may change at any time.
        unsafe { line.as_ref() }
    }))
}
