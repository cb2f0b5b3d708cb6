//! Pinned host memory: control blocks, which kernels can access, and buffers for copies to the host.
//!
//! Control blocks come from a pool that lives until the process ends. So the host can write abort
//! words and read faults without driver calls, even while another thread closes the heap.

use std::ptr::NonNull;
use std::sync::Mutex;

use super::driver::Driver;
use crate::backend::BackendKind;
use crate::control::{Line, PinnedLine};
use crate::error::{Error, Result};
use crate::util::lock;

/// Number of control blocks per allocation from the driver.
const BLOCKS: usize = 512;

/// Unused control blocks, each with the kind of devices that can address it.
static FREE: Mutex<Vec<(BackendKind, &'static Line)>> = Mutex::new(Vec::new());

/// Takes a control block from the pool, zeroed, at an address that kernels of `device` can access.
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

/// Unused pinned buffers for later copies: kind of device, address, size in bytes. They are never
/// returned to the driver, because freeing may wait for the device.
static BUFFERS: Mutex<Vec<(BackendKind, usize, usize)>> = Mutex::new(Vec::new());

/// Pinned host memory to which a device can copy.
pub(crate) struct Buffer {
    kind: BackendKind,
    address: usize,
    bytes: usize,
}

/// Takes a buffer of at least `bytes` bytes from the pool, whose sizes are powers of two, or
/// allocates one.
pub(crate) fn buffer(device: &dyn Driver, bytes: usize) -> Result<Buffer> {
    const LEAST: usize = 4096;
    let (kind, bytes) = (device.kind(), bytes.max(LEAST).next_power_of_two());
    let found = {
        let mut free = lock(&BUFFERS);
        let place = free.iter().rposition(|&(of, _, size)| (of, size) == (kind, bytes));
        place.map(|place| free.swap_remove(place).1)
    };
    let address = match found {
        Some(address) => address,
        None => device.pin(bytes)?.as_ptr() as usize,
    };
    Ok(Buffer { kind, address, bytes })
}

impl Buffer {
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.address as *mut u8
    }

    /// Returns the first `bytes` bytes of the buffer; no copy may be writing them.
    pub(crate) fn read(&self, bytes: usize) -> Vec<u8> {
        assert!(bytes <= self.bytes, "{bytes} of {}", self.bytes);
        let mut data = vec![0; bytes];
        // SAFETY: the buffer has at least `bytes` bytes and no other user, and no copy to it is in
        // progress.
        unsafe { self.pointer().copy_to_nonoverlapping(data.as_mut_ptr(), bytes) };
        data
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        lock(&BUFFERS).push((self.kind, self.address, self.bytes));
    }
}

/// Owner of a control block, which returns the block to the pool on drop.
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
    // SAFETY: the memory has `bytes` bytes, stays allocated until the process ends, and has no
    // other user yet.
    unsafe { base.as_ptr().cast::<u8>().write_bytes(0, bytes) };
    Ok((0..BLOCKS).map(move |index| {
        // SAFETY: the memory has `BLOCKS` lines, and `index` is smaller.
        let line = unsafe { base.add(index) };
        // SAFETY: the line is aligned, initialised above, never freed, and consists of atomic words
        // only, which may change at any time.
        unsafe { line.as_ref() }
    }))
}
