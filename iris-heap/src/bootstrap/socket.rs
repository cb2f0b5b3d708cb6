//! Connected stream socket between two ranks: a Unix socket within a host, or TCP between hosts.

use std::fmt;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
#[cfg(test)]
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use super::held::Held;
use crate::error::Error;
use crate::limits::{explain, is_full};

/// Whether an error of a call on a socket means that the other end, or the network, has ended the
/// connection.
pub(super) fn is_remote(code: Errno) -> bool {
    use Errno as E;
    [
        [E::PIPE, E::CONNRESET, E::CONNABORTED, E::CONNREFUSED, E::TIMEDOUT, E::PROTO],
        [E::HOSTUNREACH, E::HOSTDOWN, E::NETUNREACH, E::NETDOWN, E::NONET, E::NOPROTOOPT],
    ]
    .as_flattened()
    .contains(&code)
}

/// Whether an error of a call on a socket is this process's own: a resource is exhausted, a policy
/// forbids the call, or the call's arguments are wrong.
pub(super) fn is_own(error: &std::io::Error) -> bool {
    let passing = [Errno::AGAIN, Errno::INTR, Errno::INPROGRESS, Errno::ADDRNOTAVAIL];
    let code = Errno::from_io_error(error);
    code.is_some_and(|code| !is_remote(code) && !passing.contains(&code))
}

/// Whether an error of a call on a socket is this process's own and permanent. After another error
/// the call may succeed later.
pub(super) fn is_permanent(error: &std::io::Error) -> bool {
    is_own(error) && !is_full(error)
}

/// Error of `rank`, this process, which cannot meet the other ranks at `place`.
pub(super) fn cannot_meet(rank: usize, place: &dyn fmt::Display, message: String) -> Error {
    Error::PeerFailed { rank, what: format!("rendezvous at {place}"), message }
}

/// Name of a call on a socket that failed, and its error.
pub(super) type FailedCall = (&'static str, std::io::Error);

/// Failure of taking new connections at a listening socket.
#[derive(Debug)]
pub(super) struct Jam {
    since: Instant,
    pub(super) call: &'static str,
    error: std::io::Error,
}

impl Jam {
    /// Updates `jam`, the present failure to take connections, by the outcome `taken` of a new
    /// attempt. A further error keeps the start time of the failure; a success ends it.
    pub(super) fn follow(jam: &mut Option<Jam>, taken: Result<(), FailedCall>) {
        let since = jam.take().map_or_else(Instant::now, |jam| jam.since);
        *jam = taken.err().map(|(call, error)| Jam { since, call, error });
    }

    /// Error of rank `own`, this process, if it cannot take connections at the meeting `place`:
    /// this has failed for the time `patience`, the error is permanent, or no time is left
    /// (`last`).
    pub(super) fn check(
        jam: &Option<Jam>,
        (own, place): (usize, &dyn fmt::Display),
        patience: Duration,
        last: bool,
    ) -> Result<(), Error> {
        let over = |jam: &&Jam| last || is_permanent(&jam.error) || jam.since.elapsed() >= patience;
        let Some(Jam { call, error, .. }) = jam.as_ref().filter(over) else { return Ok(()) };
        let message = format!("accepting another rank: {call}: {}", explain(error));
        Err(cannot_meet(own, place, message))
    }
}

/// Connected stream socket, Unix or TCP.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: Held<OwnedFd>,
}

impl<T: AsFd + Into<OwnedFd>> From<Held<T>> for Socket {
    fn from(stream: Held<T>) -> Socket {
        Socket { fd: stream.cast() }
    }
}

#[cfg(test)]
impl From<UnixStream> for Socket {
    fn from(stream: UnixStream) -> Socket {
        let Ok(held) = Held::new(|| Ok::<_, std::convert::Infallible>(stream));
        held.into()
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Socket {
    pub(super) fn try_clone(&self) -> std::io::Result<Socket> {
        Ok(Socket { fd: Held::new(|| self.fd.try_clone())? })
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
