//! Key of a job that has no secret and meets at loopback addresses, to which every user of the host
//! can connect. Rank 0 gives its key, over a Unix socket, only to processes of its own user,
//! because the system tells the user at the other end of a Unix socket. The socket's name is
//! abstract: abstract names belong to a network namespace, as loopback addresses do.

use std::io::{ErrorKind, Read};
use std::net::SocketAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::time::Duration;

use rustix::net::{SendFlags, SocketAddrUnix, send};

use crate::bootstrap::held::Held;
use crate::bootstrap::rendezvous::{check_user, connect};
use crate::bootstrap::socket::{FailedCall, is_own, is_permanent};

/// Maximum number of processes at a socket that get the key before rank 0 polls its port again.
const IN_A_ROW: usize = 64;

/// Sockets at which rank 0 gives its key, one for each of its addresses.
pub(super) struct KeyDesk {
    pub(super) key: [u8; 32],
    pub(super) sockets: Vec<Held<UnixListener>>,
}

impl KeyDesk {
    /// Opens the sockets for rank 0's `addresses`; the error's text has the name of the socket.
    pub(super) fn open(addresses: &[SocketAddr], key: [u8; 32]) -> Result<KeyDesk, String> {
        let open = |address: &SocketAddr| {
            let name = name(address);
            let socket = UnixAddr::from_abstract_name(&name)
                .and_then(|name| Held::new(|| UnixListener::bind_addr(&name)))
                .and_then(|socket| socket.set_nonblocking(true).map(|()| socket));
            socket.map_err(|e| format!("bind of the Unix socket @{name}: {e}"))
        };
        Ok(KeyDesk { key, sockets: addresses.iter().map(open).collect::<Result<_, _>>()? })
    }

    /// Gives the key to the processes of this user that have asked for it. Fails only if a system
    /// call of this process fails; the error has the name of that call.
    pub(super) fn serve(&self) -> Result<(), FailedCall> {
        for socket in &self.sockets {
            for _ in 0..IN_A_ROW {
                let process = match socket.accept() {
                    Ok((process, _)) => process,
                    Err(e) if is_own(&e) => return Err(("accept", e)),
                    Err(_) => break,
                };
                match check_user(&process) {
                    // The send cannot block, because the key fits into the empty buffer. It may
                    // fail for a process that has ended, which needs no key.
                    Ok(()) => drop(send(&process, &self.key, SendFlags::NOSIGNAL)),
                    Err(e) if is_permanent(&e) => return Err(("getsockopt", e)),
                    Err(problem) => tracing::warn!(%problem, "a process gets no key"),
                }
            }
        }
        Ok(())
    }
}

/// Asks the rank 0 that listens at `address` for its key. Returns `None` if nobody offers a key
/// there, or a text if a process of another user does. An error has the name of the call.
pub(super) fn ask(
    address: SocketAddr,
    timeout: Duration,
) -> Result<Result<Option<[u8; 32]>, String>, FailedCall> {
    let name = SocketAddrUnix::new_abstract_name(name(&address).as_bytes());
    let mut socket = match name.map_err(Into::into).and_then(|name| connect(&name)) {
        Ok(socket) => socket,
        Err(e) if e.kind() == ErrorKind::ConnectionRefused => return Ok(Ok(None)),
        Err(e) => return Err(("connect of a Unix socket for the key", e)),
    };
    match check_user(&socket) {
        Ok(()) => {}
        Err(e) if e.raw_os_error().is_some() => return Err(("getsockopt", e)),
        Err(problem) => {
            return Ok(Err(format!("{problem}; ranks of several users need a secret")));
        }
    }
    socket.set_read_timeout(Some(timeout)).map_err(|e| ("setsockopt", e))?;
    let mut key = [0; 32];
    match socket.read_exact(&mut key) {
        Ok(()) => Ok(Ok(Some(key))),
        // Rank 0 closed the connection: it sees another user at this end, or closes its port.
        Err(e) if e.kind() == ErrorKind::UnexpectedEof => Ok(Ok(None)),
        Err(e) => Err(("recv of the key", e)),
    }
}

/// Abstract name of the socket for an address of rank 0.
fn name(address: &SocketAddr) -> String {
    format!("iris key {address}")
}
