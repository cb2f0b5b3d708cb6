//! Control blocks: pinned host memory that kernels see.
//!
//! A block is taken from a pool that lives until the process ends: the host writes abort words and
//! reads faults without any call of the driver, also when a heap goes while another thread looks at
//! its block.

use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::Mutex;

use super::api::check;
use super::device::Device;
use crate::control::{Line, PinnedLine};
use crate::error::{Error, Result};
use crate::world::lock;

/// Blocks that are taken from the driver at a time.
const BLOCKS: usize = 512;

/// Blocks that nobody uses.
static FREE: Mutex<Vec<&'static Line>> = Mutex::new(Vec::new());

/// A block, all zero, that the kernels of `device` can address.
pub(super) fn take(device: &Device) -> Result<PinnedLine> {
    let _bound = device.bind_apart()?;
    let line = {
        let mut free = lock(&FREE);
        if free.is_empty() {
            free.extend(allocate(device)?);
        }
        free.pop().ok_or(Error::Closed { what: "the pool of control blocks" })?
    };
    // From here on dropping gives it back.
    let mut block = PinnedLine::new(line, give_back);
    block.clear();
    let mut address = 0;
    let host = std::ptr::from_ref(line).cast_mut().cast::<c_void>();
    // SAFETY: `address` is where the answer goes; the block is in memory that was allocated mapped.
    let code = unsafe { (device.driver.cuMemHostGetDevicePointer_v2)(&mut address, host, 0) };
    check("cuMemHostGetDevicePointer", code)?;
    block.address = address;
    Ok(block)
}

fn give_back(line: &'static Line) {
    lock(&FREE).push(line);
}

fn allocate(device: &Device) -> Result<impl Iterator<Item = &'static Line>> {
    /// For all contexts, and mapped into the device's addresses.
    const FLAGS: u32 = 1 | 2;
    let mut memory = null_mut();
    let bytes = BLOCKS * size_of::<Line>();
    // SAFETY: `memory` is where the answer goes.
    let code = unsafe { (device.driver.cuMemHostAlloc)(&mut memory, bytes, FLAGS) };
    check("cuMemHostAlloc", code)?;
    let base = NonNull::new(memory.cast::<Line>());
    let base = base.filter(|b| b.is_aligned()).ok_or_else(|| {
        Error::invalid("address of pinned memory", format!("{memory:p}"), "a page's")
    })?;
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
