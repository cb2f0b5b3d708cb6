//! Ranks on several hosts: the relay of each node connects to rank 0's hub by TCP and sends the
//! frames of the Unix-socket transport, encrypted.
//!
//! TCP keepalive probes detect a cut network or a lost host. The system answers probes even for a
//! stopped process, so a stopped process counts as late, not as lost, unless its socket's buffers
//! are full and more data waits for it.

pub(crate) mod address;
mod door;
pub(crate) mod seal;
#[cfg(test)]
mod tests;
mod user_key;

use std::fmt;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::connection::Connection;
use super::frames::Frame;
use super::held::{Held, pair};
use super::hub::Hub;
use super::mailbox::{Inbox, Outbox};
use super::notice::MeetingWait;
use super::peer::Peer;
use super::relay::Relay;
use super::rendezvous::{self, Place, Visit, Watch};
use super::socket::{FailedCall, cannot_meet, is_own};
use super::starter;
use super::unix::{Processes, failed};
use crate::error::{Error, Result, list_texts};
use crate::limits::explain;
use crate::util::{lock, spawn};
use address::Address;
use door::Door;
use seal::{Key, Keys, REPLY, Terms};
use user_key::KeyDesk;

/// Time limit of one connection attempt, including rank 0's answer. If rank 0 closes the connection
/// to make room for others, another attempt follows.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Maximum pause between two attempts.
const PAUSE: Duration = Duration::from_millis(100);
/// Time for which a rank that has learned of another rank's loss tries to reach rank 0, to report
/// the loss.
const LOST: Duration = Duration::from_secs(5);
/// Number of refusals after which a rank gives up: another job may use the port, or the secrets
/// differ.
const REFUSALS: u32 = 3;

/// Longest queue of connections that a listening socket has not accepted.
const BACKLOG: i32 = 1024;

/// Address at which the ranks of a job meet, and the parameters that they must agree on.
#[derive(Clone)]
pub(crate) struct Meeting {
    /// Host and port of rank 0, as given by the user.
    pub(crate) address: Address,
    /// Socket addresses at which rank 0 listens and others connect. The addresses have been
    /// checked, so the host is not looked up again.
    pub(crate) addresses: Vec<SocketAddr>,
    /// Whether this rank listens at `addresses`, which messages then show.
    listens: bool,
    pub(crate) terms: Terms,
    /// Time after which an unreachable peer counts as lost.
    pub(crate) silence: Duration,
}

impl fmt::Display for Meeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tcp {} ({}", self.address, self.terms.job)?;
        if self.listens {
            let all = self.addresses.iter().map(ToString::to_string).collect();
            write!(f, "; rank 0 listens at {}", list_texts(all))?;
        }
        f.write_str(")")
    }
}

impl Meeting {
    pub(crate) fn error(&self, problem: impl Into<String>) -> Error {
        Error::Rendezvous { place: self.to_string(), problem: problem.into() }
    }

    /// Makes a meeting with these `terms` at `addresses`: the addresses of the host `address`,
    /// which have been checked.
    pub(crate) fn new(
        address: Address,
        addresses: Vec<SocketAddr>,
        terms: Terms,
        silence: Duration,
    ) -> Meeting {
        Meeting { address, addresses, listens: false, terms, silence }
    }

    /// Listens, on rank 0, at those of the meeting's addresses that belong to this host. Returns
    /// the sockets, and the meeting restricted to their addresses.
    fn listen(&self) -> Result<(Vec<Held<TcpListener>>, Meeting)> {
        let (mut found, mut absent) = (Vec::new(), String::new());
        let hint = "MASTER_ADDR names the host of rank 0, and IRIS_PORT a port that is free there";
        for &address in &self.addresses {
            match listen(address) {
                Ok(listener) => found.push((listener, address)),
                // A name may have addresses that this host lacks (of a forwarder), or of an address
                // family that is switched off.
                Err((Errno::ADDRNOTAVAIL | Errno::AFNOSUPPORT, text)) => absent = text,
                Err((_, text)) => return Err(self.error(format!("{text}; {hint}"))),
            }
        }
        if found.is_empty() {
            return Err(self.error(format!("{absent}; {hint}")));
        }
        let (listeners, addresses) = found.into_iter().unzip();
        let meeting = Meeting { addresses, listens: true, ..self.clone() };
        tracing::info!(at = %meeting, "rank 0 listens");
        Ok((listeners, meeting))
    }

    /// Finds the way to the hub for `rank`, any rank except 0, with retries until `deadline`.
    ///
    /// On node 0 the way is a Unix socket, at which rank 0 listens before it listens at its port.
    /// On any other node, one rank at a time tries to reach rank 0. The first rank that reaches it
    /// becomes the node's relay, and listens at the node's Unix socket.
    fn find(
        &self,
        (place, visit): (&Place, &Visit<'_>),
        rank: usize,
        deadline: Instant,
    ) -> Result<Way> {
        let started = Instant::now();
        let mut meeting = MeetingWait::new(rank, self.terms.size, deadline);
        let (mut pause, mut refusals) = (Duration::from_millis(1), 0);
        let (mut watch, mut lost) = (Watch::new(), None);
        let others: Vec<_> = (0..self.terms.size).filter(|&other| other != rank).collect();
        let mut last = String::from("another rank of this node tries to reach rank 0");
        loop {
            let turn = place.take_turn()?;
            // Try the node's Unix socket (the door) only after taking the turn, because the rank
            // that had the turn before may have opened the door.
            if let Some((socket, relay)) = place.knock(rank, self.terms.size)? {
                return Ok(Way::Through(socket, relay));
            }
            // Rank 0, or the relay of this node, may have failed before this rank reached it.
            let failure = || visit.failure().or_else(starter::lost);
            if let Some(error) = place.note_to_those_who_wait(started).or_else(failure) {
                return Err(error);
            }
            let reached = turn.as_ref().map(|_| self.reach(rank, deadline));
            match reached {
                // This rank has no turn, so there was no attempt; `last` keeps the reason of an
                // earlier attempt.
                None => {}
                Some(Ok((stream, keys))) => match place.bind(rank)? {
                    Some(door) => {
                        let hub = self.greet_hub(stream, &keys, rank);
                        let hub = hub.map_err(|e| Error::system("ioctl", e))?;
                        return Ok(Way::Relay { door, hub: Box::new(hub), thread: None, watch });
                    }
                    // Rank 0 is on this node and has just opened the door, so the next knock
                    // finds it.
                    None => last = format!("a process listens for this node at {place}"),
                },
                Some(Err(Attempt::Refused(text))) => {
                    refusals += 1;
                    last = text;
                }
                Some(Err(Attempt::Failed(text))) => last = text,
                Some(Err(Attempt::Permanent(message))) => {
                    return Err(cannot_meet(rank, self, message));
                }
            }
            drop(turn);
            // Do not fail at once for a lost rank: the relay must report the loss to rank 0, which
            // may still be starting.
            if lost.is_none() {
                lost = place.lost(&others, &mut watch).map(|error| (Instant::now(), error));
            }
            if let Some((since, error)) = &lost
                && (since.elapsed() >= LOST || matches!(error, Error::PeerLost { rank: 0 }))
            {
                return Err(error.clone());
            }
            if refusals >= REFUSALS {
                return Err(self.error(format!(
                    "{last}; give all ranks the same IRIS_SECRET_FILE, or another IRIS_PORT if the port is another \
                     job's"
                )));
            }
            meeting.check(&[0], self, Some(&format!("last: {last}")))?;
            std::thread::sleep(meeting.rest(pause));
            pause = (pause * 2).min(PAUSE);
        }
    }

    /// Connects to one of rank 0's addresses and runs the handshake.
    fn reach(&self, rank: usize, deadline: Instant) -> Result<(Held<TcpStream>, Keys), Attempt> {
        let (mut failed, mut permanent) = (None, None);
        for &address in &self.addresses {
            match self.attempt(address, rank, deadline) {
                Ok(Ok(reached)) => return Ok(reached),
                Ok(Err(why)) => {
                    let why = format!("{address} refuses rank {rank}: {why}");
                    failed = Some(Attempt::Refused(why));
                }
                Err((call, e)) if is_own(&e) => {
                    let zone = match address {
                        // The first ten bits of a link-local address are those of fe80::.
                        SocketAddr::V6(it)
                            if it.ip().is_unicast_link_local() && it.scope_id() == 0 =>
                        {
                            "; a link-local address needs a zone: ADDRESS%INTERFACE"
                        }
                        _ => "",
                    };
                    let text = format!("{call} to {address}: {}{zone}", explain(&e));
                    permanent = Some(Attempt::Permanent(text));
                }
                Err(_) if matches!(failed, Some(Attempt::Refused(_))) => {}
                Err((call, e)) => {
                    failed = Some(Attempt::Failed(format!("{call} to {address}: {e}")));
                }
            }
        }
        // An address that can never be reached (of an address family that is switched off, for
        // example) is no reason to give up if another address may be reached later.
        Err(failed.or(permanent).unwrap_or_else(|| Attempt::Failed("no address".into())))
    }

    /// Connects to an address and runs the handshake. If the other end refuses, the inner result
    /// has the reason. The outer error has the name of the failed call.
    fn attempt(
        &self,
        address: SocketAddr,
        rank: usize,
        deadline: Instant,
    ) -> Result<Result<(Held<TcpStream>, Keys), String>, FailedCall> {
        let of = |call: &'static str| move |error| (call, error);
        let rest = deadline.saturating_duration_since(Instant::now());
        let timeout = rest.clamp(Duration::from_millis(1), ATTEMPT);
        let stream = Held::new(|| socket(address, SocketFlags::empty()));
        let stream = stream.map_err(|code| ("socket", code.into()))?;
        let mut stream: Held<TcpStream> = stream.cast();
        let limited = stream.set_read_timeout(Some(timeout));
        limited.and_then(|()| stream.set_write_timeout(Some(timeout))).map_err(of("setsockopt"))?;
        // The socket's time limit of writes also applies to connect.
        match retry_on_intr(|| rustix::net::connect(&stream, &address)) {
            Ok(()) => {}
            Err(Errno::INPROGRESS | Errno::ALREADY) => {
                return Err(("connect", Errno::TIMEDOUT.into()));
            }
            Err(code) => return Err(("connect", code.into())),
        }
        let mut terms = self.terms.clone();
        if let Key::OfUser(key) = &mut terms.key {
            // Rank 0 offers its key before it listens. If nobody offers a key, this rank uses its
            // own key, which nobody else has, so that rank 0 refuses it with a reason.
            match user_key::ask(address, timeout)? {
                Ok(given) => *key = given.unwrap_or(*key),
                Err(why) => return Ok(Err(why)),
            }
        }
        let sealing = |error| ("sealing", std::io::Error::other(error));
        let (greeting, state) = terms.greet(rank as u32).map_err(sealing)?;
        stream.write_all(&greeting).map_err(of("send"))?;
        // The socket's time limit applies to each single read, so a peer that sends byte by byte
        // could exceed it. This loop limits the total time.
        let (mut reply, mut got, until) = ([0; REPLY], 0, Instant::now() + timeout);
        while got < REPLY {
            let silent = |got: usize| match got {
                // With less time than this, even the right program has no time to answer, so
                // another program is not suspected.
                0 if timeout >= ATTEMPT / 10 => {
                    let text = format!(
                        "connected, but no answer within {:.1}s; another program may listen there",
                        timeout.as_secs_f64()
                    );
                    std::io::Error::new(std::io::ErrorKind::TimedOut, text)
                }
                _ => std::io::ErrorKind::TimedOut.into(),
            };
            match stream.read(&mut reply[got..]) {
                Ok(0) => return Err(of("recv")(std::io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => got += count,
                // The socket's time limit has passed.
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                    return Err(of("recv")(silent(got)));
                }
                Err(e) => return Err(of("recv")(e)),
            }
            if Instant::now() >= until {
                return Err(of("recv")(silent(got)));
            }
        }
        if let Some(why) = self.terms.refused(&reply, rank) {
            return Ok(Err(why));
        }
        let keys = Keys::of_reply(state, &reply).map_err(sealing)?;
        let unlimited = stream.set_read_timeout(None);
        unlimited.and_then(|()| self.prepare(&stream)).map_err(of("setsockopt"))?;
        Ok(Ok((stream, keys)))
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

    /// Connects this rank to the other ranks of the job, through the relay of its node; fails after
    /// `timeout`. The ranks of a node, and no others, meet at `place`.
    pub(crate) fn rendezvous(
        &self,
        place: Place,
        rank: usize,
        timeout: Duration,
    ) -> Result<Processes> {
        let visit = place.visit(rank)?;
        let met = self.meet(&place, &visit, rank, timeout);
        visit.end(met)
    }

    fn meet(
        &self,
        place: &Place,
        visit: &Visit<'_>,
        rank: usize,
        timeout: Duration,
    ) -> Result<Processes> {
        let size = self.terms.size;
        let started = Instant::now();
        let deadline = started + timeout;
        let way = match rank {
            0 => self.start_hub(place, deadline)?,
            _ => self.find((place, visit), rank, deadline)?,
        };
        let mut carriers = Vec::new();
        let (socket, relay) = match way {
            Way::Through(socket, relay) => (socket, relay),
            Way::Relay { door, hub, thread, watch } => {
                carriers.extend(thread);
                let (mine, own) = pair().map_err(|e| Error::system("socketpair", e))?;
                let entrance = (place.clone(), door, watch);
                carriers.push(Relay::start(entrance, (rank, size), own, *hub)?);
                (mine, rank)
            }
        };
        let connection = Connection::start(&socket.into(), relay)?;
        if !carriers.is_empty() {
            // The relay knows the connection of its own process, so this rank sends no hello.
            lock(&connection.mail.0).forwarded = true;
        }
        lock(&connection.carriers).extend(carriers);
        Processes::welcomed(connection, (place, self), (rank, size), (started, timeout))
    }

    /// Starts the hub, on rank 0.
    fn start_hub(&self, place: &Place, deadline: Instant) -> Result<Way> {
        // The door of node 0 (its Unix socket) is opened before the port, so that no other rank of
        // this node becomes a relay.
        let door = place.listen()?;
        let start = || {
            let desk = match self.terms.key {
                Key::OfUser(key) => Some(KeyDesk::open(&self.addresses, key).map_err(|text| {
                    let hint =
                        "set IRIS_PORT to a free port, or give all ranks one IRIS_SECRET_FILE";
                    self.error(format!("{text}; {hint}"))
                })?),
                Key::Open | Key::Secret(_) => None,
            };
            let (listeners, meeting) = self.listen()?;
            let port = Door::new(meeting, desk, listeners);
            let (hub, own) = pair().map_err(|e| Error::system("socketpair", e))?;
            let mut hub = Peer::new(hub).map_err(|e| Error::system("ioctl", e))?;
            hub.inbox.trust();
            let run = move || {
                if let Some(links) = port.gather(own, deadline) {
                    Hub::carry(links);
                }
            };
            Ok((hub, spawn("iris-hub", run)?))
        };
        match start() {
            Ok((hub, thread)) => {
                let (hub, thread) = (Box::new(hub), Some(thread));
                Ok(Way::Relay { door, hub, thread, watch: Watch::new() })
            }
            Err(error) => {
                place.clear(Some(&failed(0, &error)));
                Err(error)
            }
        }
    }

    /// Makes the connection to the hub for the relay in the process of `rank`, and queues its
    /// hello.
    fn greet_hub(
        &self,
        stream: Held<TcpStream>,
        keys: &Keys,
        rank: usize,
    ) -> std::io::Result<Peer> {
        let mut hub = Peer::new(stream)?;
        hub.inbox = Inbox::sealed(keys);
        hub.inbox.trust();
        hub.outbox = Outbox::sealed(keys);
        let (job, size) = (self.terms.job.clone(), self.terms.size);
        hub.send(Frame::Hello { job, rank, size }.pack());
        Ok(hub)
    }
}

/// Listens at exactly this address: an IPv6 socket accepts no IPv4 connections. The error's text
/// has the name of the call.
fn listen(address: SocketAddr) -> Result<Held<TcpListener>, (Errno, String)> {
    let failed = |call: &'static str| move |e| (e, format!("{call} at {address}: {e}"));
    let socket = Held::new(|| socket(address, SocketFlags::NONBLOCK)).map_err(failed("socket"))?;
    // The connections of an earlier job at this port may not have expired yet.
    sockopt::set_socket_reuseaddr(&socket, true).map_err(failed("setsockopt"))?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, true).map_err(failed("setsockopt"))?;
    }
    rustix::net::bind(&socket, &address).map_err(failed("bind"))?;
    rustix::net::listen(&socket, BACKLOG).map_err(failed("listen"))?;
    Ok(socket.cast())
}

/// Makes a TCP socket of the address's family.
fn socket(address: SocketAddr, flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = flags | SocketFlags::CLOEXEC;
    rustix::net::socket_with(family, SocketType::STREAM, flags, None)
}

/// Way by which a rank's messages reach the hub.
enum Way {
    /// Connection to the relay in the process of another rank of the node, and that rank's number.
    Through(Held<UnixStream>, usize),
    /// Relay in this process: ranks of the node connect to it at `door`, and `hub` is its
    /// connection to the hub. `thread` is the hub's thread, on rank 0 only. `watch` has observed
    /// the node's other ranks so far.
    Relay { door: rendezvous::Door, hub: Box<Peer>, thread: Option<JoinHandle<()>>, watch: Watch },
}

/// Failure of a connection attempt, with the reason.
enum Attempt {
    /// Refusal: rank 0 has another secret, or belongs to another user.
    Refused(String),
    Failed(String),
    /// Failure that later attempts cannot overcome.
    Permanent(String),
}
