//! Ranks on several hosts: each connects to rank 0's hub by TCP and sends the frames of the
//! Unix-socket transport, encrypted.
//!
//! TCP keepalive probes detect a cut network or a lost host. The system answers probes also for a
//! stopped process, so a stopped process counts as late, not as lost.

mod door;
pub(crate) mod seal;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use super::connection::Connection;
use super::frames::Frame;
use super::hub::Hub;
use super::notice::{Patience, notice};
use super::socket::Socket;
use super::unix::{Processes, failed, grace};
use crate::error::{Error, Result};
use crate::util::lock;
use door::Door;
use seal::{Keys, REFUSAL, REPLY, Terms};

/// Time limit of one connection attempt, including rank 0's answer. Rank 0 may close a connection
/// to make room for others; then another attempt follows.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Maximum pause between two attempts.
const PAUSE: Duration = Duration::from_millis(100);
/// Number of refusals after which a rank gives up: another job may use the port, or the secrets
/// differ.
const REFUSALS: u32 = 3;

/// Address at which the ranks of a job meet, and the parameters that they must agree on.
#[derive(Clone)]
pub(crate) struct Meeting {
    /// Host and port in the form `host:port`, as given by the user.
    pub(crate) address: String,
    pub(crate) terms: Terms,
    /// Time after which an unreachable peer counts as lost.
    pub(crate) silence: Duration,
}

impl fmt::Display for Meeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcp {} ({})", self.address, self.terms.job)
    }
}

impl Meeting {
    pub(crate) fn error(&self, problem: impl Into<String>) -> Error {
        Error::Rendezvous { place: self.to_string(), problem: problem.into() }
    }

    /// Socket addresses of the host, IPv4 and IPv6.
    pub(crate) fn addresses(&self) -> Result<Vec<SocketAddr>> {
        let found: Vec<_> = match self.address.to_socket_addrs() {
            Ok(found) => found.collect(),
            Err(e) => return Err(self.error(format!("looking the host up: {e}"))),
        };
        match found.is_empty() {
            true => Err(self.error("the host has no address")),
            false => Ok(found),
        }
    }

    /// Listens only on the network interface that has the address; called on rank 0.
    fn listen(&self) -> Result<TcpListener> {
        let mut last = String::new();
        for address in self.addresses()? {
            match TcpListener::bind(address) {
                Ok(listener) => {
                    let ready = listener.set_nonblocking(true);
                    return ready.map(|()| listener).map_err(|e| self.error(e.to_string()));
                }
                Err(e) => last = format!("listening on {address}: {e}"),
            }
        }
        let hint = "MASTER_ADDR names the host of rank 0, and IRIS_PORT a port that is free there";
        Err(self.error(format!("{last}; {hint}")))
    }

    /// Connects and runs the handshake, with retries until `deadline`; called on all ranks except
    /// 0.
    fn connect(&self, rank: usize, deadline: Instant) -> Result<(Socket, Keys)> {
        let started = Instant::now();
        let mut patience = Patience::new(started, deadline);
        let mut pause = Duration::from_millis(1);
        let (mut refusals, mut last) = (0, String::from("no attempt"));
        loop {
            // The host name is resolved for each attempt, because it may become known to the
            // resolver only after this process has started.
            match self.addresses() {
                Err(error) => last = error.to_string(),
                Ok(addresses) => {
                    for address in addresses {
                        match self.attempt(address, rank, deadline) {
                            Ok((stream, keys)) => return Ok((stream.into(), keys)),
                            Err(Attempt::Refused) => {
                                refusals += 1;
                                last = format!("{address} refuses rank {rank}");
                            }
                            Err(Attempt::Failed(e)) => last = format!("{address}: {e}"),
                        }
                    }
                }
            }
            if refusals >= REFUSALS {
                return Err(self.error(format!(
                    "{last}: rank 0 there has another secret, job or number of ranks; give all ranks the same \
                     IRIS_SECRET_FILE, or another IRIS_PORT if the port is another job's"
                )));
            }
            let now = Instant::now();
            if now >= deadline {
                let (size, waited) = (self.terms.size, now - started);
                let what = format!("rank {rank} of {size} at {self} (last: {last})");
                return Err(Error::Absent { ranks: vec![0], what, waited });
            }
            if let Some(waited) = patience.is_over() {
                let most = deadline - started;
                let size = self.terms.size;
                notice(format_args!(
                    "rank {rank} of {size} waits for rank 0 at {self}: {waited:.1?} of {most:.1?}; last: {last}"
                ));
            }
            std::thread::sleep(pause.min(deadline - now));
            pause = (pause * 2).min(PAUSE);
        }
    }

    fn attempt(
        &self,
        address: SocketAddr,
        rank: usize,
        deadline: Instant,
    ) -> Result<(TcpStream, Keys), Attempt> {
        let rest = deadline.saturating_duration_since(Instant::now());
        let timeout = rest.clamp(Duration::from_millis(1), ATTEMPT);
        let mut stream = TcpStream::connect_timeout(&address, timeout)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        let (greeting, state) = self.terms.greet(rank as u32).map_err(Attempt::from_error)?;
        stream.write_all(&greeting)?;
        // The socket's time limit applies to each single read, so a peer that sends byte by byte
        // could exceed it. This loop limits the total time.
        let (mut reply, mut got, until) = ([0; REPLY], 0, Instant::now() + timeout);
        while got < REPLY {
            match stream.read(&mut reply[got..])? {
                0 => return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into()),
                count => got += count,
            }
            if Instant::now() >= until {
                return Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into());
            }
        }
        if reply == REFUSAL {
            return Err(Attempt::Refused);
        }
        let keys = Keys::of_reply(state, &reply).map_err(Attempt::from_error)?;
        stream.set_read_timeout(None)?;
        self.prepare(&stream)?;
        Ok((stream, keys))
    }

    /// Enables TCP keepalive, so that the system detects an unreachable peer within `silence`.
    fn prepare(&self, stream: &TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let third = (self.silence / 3).max(Duration::from_secs(1));
        sockopt::set_socket_keepalive(stream, true)?;
        sockopt::set_tcp_keepidle(stream, third)?;
        sockopt::set_tcp_keepintvl(stream, (third / 2).max(Duration::from_secs(1)))?;
        sockopt::set_tcp_keepcnt(stream, 4)?;
        let millis = u32::try_from(self.silence.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(stream, millis)?;
        Ok(())
    }

    /// Connects this rank to the other ranks of the job; fails after `timeout`.
    pub(crate) fn rendezvous(&self, rank: usize, timeout: Duration) -> Result<Processes> {
        let size = self.terms.size;
        let started = Instant::now();
        let deadline = started + timeout;
        let (socket, keys, hub) = if rank == 0 {
            let door = Door::new(self.clone(), self.listen()?);
            let (mine, own) = UnixStream::pair().map_err(|e| Error::system("socketpair", e))?;
            let run = move || {
                if let Some(peers) = door.gather(own, deadline) {
                    Hub::carry(peers);
                }
            };
            let thread = std::thread::Builder::new().name("iris-hub".into()).spawn(run);
            let thread = thread.map_err(|e| Error::system("starting thread iris-hub", e))?;
            (Socket::from(mine), None, Some(thread))
        } else {
            let (socket, keys) = self.connect(rank, deadline)?;
            (socket, Some(keys), None)
        };
        let connection = Connection::start(&socket, keys.as_ref(), rank)?;
        *lock(&connection.hub) = hub;
        // The hub knows the connection of its own process, so rank 0 sends no hello.
        let greeted = if rank == 0 {
            Ok(())
        } else {
            let job = self.terms.job.clone();
            let hello = Frame::Hello { job, rank: rank as u64, size: size as u64 };
            connection.send(hello, deadline)
        };
        let what = || format!("rank {rank} of {size} at {self}");
        let outcome = connection.welcome(deadline + grace(timeout), started, greeted, what);
        let members = (0..size).collect();
        let processes = Processes { connection, group: 0, members, rank };
        match outcome {
            Ok(()) => Ok(processes),
            Err(error) => {
                let told = match &error {
                    Error::System { .. } => failed(rank, &error),
                    error => error.clone(),
                };
                processes.explain(&told);
                Err(error)
            }
        }
    }
}

/// Failure of a connection attempt.
enum Attempt {
    /// Refusal: rank 0 runs another job or has another secret.
    Refused,
    Failed(std::io::Error),
}

impl Attempt {
    fn from_error(error: Error) -> Attempt {
        Attempt::Failed(std::io::Error::other(error))
    }
}

impl From<std::io::Error> for Attempt {
    fn from(error: std::io::Error) -> Attempt {
        Attempt::Failed(error)
    }
}

impl From<rustix::io::Errno> for Attempt {
    fn from(error: rustix::io::Errno) -> Attempt {
        Attempt::Failed(error.into())
    }
}
