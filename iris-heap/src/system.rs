//! System calls whose rustix wrappers cannot represent all results: the process at the other end of
//! a socket may be in another PID namespace, and a sandbox may forbid reading a limit.

#![allow(unsafe_code, reason = "libc's functions take pointers")]

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::process::Pid;

/// Process at the other end of a Unix socket.
pub(crate) struct PeerProcess {
    /// Id of the process; `None` if it is in a PID namespace that this process cannot see, for
    /// example in another container.
    pub(crate) process: Option<Pid>,
    /// Effective user of the process.
    pub(crate) user: u32,
}

/// Returns the peer process of `socket`: the process that connected it, or the listener that it is
/// connected to.
pub(crate) fn peer_of(socket: impl AsFd) -> io::Result<PeerProcess> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: `peer` has `length` bytes, and any value of them is valid.
    let failed = unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    match failed {
        0 => Ok(PeerProcess { process: Pid::from_raw(peer.pid), user: peer.uid }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Limit of this process that the system enforces.
#[derive(Clone, Copy, Debug)]
pub enum Limit {
    /// Number of open files.
    OpenFiles,
    /// Size of a file in bytes.
    FileSize,
    /// Size of all mapped addresses in bytes.
    AddressSpace,
    /// Locked memory in bytes.
    LockedMemory,
}

impl Limit {
    /// Value of the limit; `None` if there is no limit, or if it may not be read.
    pub fn value(self) -> Option<u64> {
        let which = match self {
            Limit::OpenFiles => libc::RLIMIT_NOFILE,
            Limit::FileSize => libc::RLIMIT_FSIZE,
            Limit::AddressSpace => libc::RLIMIT_AS,
            Limit::LockedMemory => libc::RLIMIT_MEMLOCK,
        };
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: `limit` is a structure of the type that the call fills.
        let failed = unsafe { libc::getrlimit(which, &raw mut limit) };
        (failed == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
    }
}
