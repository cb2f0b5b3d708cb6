//! Windows of NCCL: memory of all ranks that kernels of the library access directly.

use std::ffi::c_int;
use std::ptr::null_mut;

use super::{Communicator, Error, Handle, Nccl, Result, library};

library! { WindowTable,
    ncclCommWindowRegister(Handle, u64, usize, *mut Handle, c_int) -> c_int;
    ncclCommWindowDeregister(Handle, Handle) -> c_int;
}

/// Flag `NCCL_WIN_COLL_SYMMETRIC`: all ranks register the same offset of their memory.
const SYMMETRIC: c_int = 1;

/// Memory of all ranks that is registered with a communicator, so that kernels of the library access
/// peers directly; see [`Communicator::register`].
#[derive(Debug)]
pub struct Window<'a> {
    of: &'a Communicator,
    handle: Handle,
}

impl Nccl {
    fn windows(&self) -> Result<&WindowTable> {
        self.windows.as_ref().map_err(|why| Error::Call {
            function: "ncclCommWindowRegister".into(),
            code: 0,
            name: format!("{why}, expected a release with windows"),
        })
    }
}

impl Communicator {
    /// Registers memory of all ranks as a window: collective over the ranks. `memory` is the address
    /// of this rank's memory and its size in bytes, equal on all ranks.
    ///
    /// # Errors
    /// [`Error::Call`]; also for a release without windows.
    ///
    /// # Safety
    /// The memory is memory of the device that stays allocated until the window is closed.
    pub unsafe fn register(&self, (address, bytes): (u64, usize)) -> Result<Window<'_>> {
        const REGISTER: &str = "ncclCommWindowRegister";
        let live = self.live(REGISTER)?;
        let windows = self.nccl.windows()?;
        let mut handle = null_mut();
        // SAFETY: the caller guarantees the memory; the communicator is alive, and the function writes
        // the window to `handle`, a local of the right type.
        let code = unsafe {
            (windows.ncclCommWindowRegister)(live.0, address, bytes, &mut handle, SYMMETRIC)
        };
        self.taken(live, REGISTER, code, || false)?;
        Ok(Window { of: self, handle })
    }
}

impl Window<'_> {
    /// Deregisters the window after the collectives that are enqueued on it are done: collective over
    /// the ranks.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn close(self) -> Result<()> {
        const DEREGISTER: &str = "ncclCommWindowDeregister";
        let live = self.of.live(DEREGISTER)?;
        let windows = self.of.nccl.windows()?;
        // SAFETY: the window's communicator is alive, and the handle is not used again.
        let code = unsafe { (windows.ncclCommWindowDeregister)(live.0, self.handle) };
        self.of.taken(live, DEREGISTER, code, || false)
    }
}
