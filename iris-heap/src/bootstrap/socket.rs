//! Connected stream socket between two ranks: a Unix socket within a host, or TCP between hosts.

use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};

/// Connected stream socket, Unix or TCP.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: OwnedFd,
    /// Whether it is a Unix socket, which can pass descriptors and identify the process at its
    /// other end.
    pub(super) is_unix: bool,
}

impl From<UnixStream> for Socket {
    fn from(stream: UnixStream) -> Socket {
        Socket { fd: stream.into(), is_unix: true }
    }
}

impl From<TcpStream> for Socket {
    fn from(stream: TcpStream) -> Socket {
        Socket { fd: stream.into(), is_unix: false }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Socket {
    pub(super) fn try_clone(&self) -> std::io::Result<Socket> {
        Ok(Socket { fd: self.fd.try_clone()?, is_unix: self.is_unix })
    }

    pub(super) fn set_nonblocking(&self, nonblocking: bool) -> std::io::Result<()> {
        Ok(rustix::io::ioctl_fionbio(&self.fd, nonblocking)?)
    }

    /// Limits the time for which a write may block; `None` for no limit.
    pub(super) fn set_write_timeout(&self, timeout: Option<Duration>) -> std::io::Result<()> {
        Ok(set_socket_timeout(&self.fd, Timeout::Send, timeout)?)
    }

    pub(super) fn shutdown(&self, how: Shutdown) -> std::io::Result<()> {
        let how = match how {
            Shutdown::Read => rustix::net::Shutdown::Read,
            Shutdown::Write => rustix::net::Shutdown::Write,
            Shutdown::Both => rustix::net::Shutdown::Both,
        };
        Ok(rustix::net::shutdown(&self.fd, how)?)
    }
}
