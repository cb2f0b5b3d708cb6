//! Connection of a process to the hub (rank 0's thread that carries the exchanges of all ranks), or
//! to the relay of its node (a thread that forwards messages to the hub). A control thread reads
//! the connection, and keeps the messages that it has read.

use std::collections::HashMap;
use std::net::Shutdown;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::frames::{Frame, Part};
use super::loss::{GroupEnd, Told, loss_of_carrier, tell};
use super::mailbox::{AGAIN, Inbox, Outbox, crowded, explain_crowded};
use super::notice::ToldWaits;
use super::peer::is_readable;
use super::process::ProcessId;
use super::socket::Socket;
use super::starter::{self, Starter, cause};
use crate::error::{Error, Result};
use crate::util::{lock, spawn};

/// Time limit, after a failed send, for reading the hub's message that has the reason of the
/// failure.
pub(super) const REASON: Duration = Duration::from_secs(2);

/// Messages that the hub has sent to this process for one group (a world or split world).
#[derive(Default)]
pub(super) struct Letters {
    /// Members of the group, by their numbers in the world of all launched ranks; `None` for that
    /// world itself.
    pub(super) members: Option<Vec<usize>>,
    /// Number of exchanges that this rank has begun.
    pub(super) number: u64,
    pub(super) arrived: Option<(u64, Vec<Part>)>,
    pub(super) ending: GroupEnd,
    /// Whether the hub has reported the end of the exchanges to all ranks of the group.
    pub(super) hub_reported: bool,
    pub(super) has_left: bool,
    /// Hub's answer about an exchange in progress: number of the exchange, missing ranks, and the
    /// rank that must tell the user.
    pub(super) missing: Option<(u64, Vec<usize>, usize)>,
    pub(super) told_waits: ToldWaits,
}

#[derive(Default)]
pub(super) struct Mail {
    pub(super) groups: HashMap<u64, Letters>,
    /// Hub's answer to this process's hello; `None` until it arrives.
    pub(super) welcome: Option<Result<()>>,
    /// Whether the relay has forwarded this process's hello, or its last question to the hub. If
    /// false, the relay may be stopped.
    pub(super) forwarded: bool,
    /// Whether the hub failed to answer when a group of this process ended its exchanges. If so,
    /// groups that end later do not wait for an answer.
    pub(super) silent: bool,
    /// Whether the hub has said goodbye or this process is closing. The end of the connection then
    /// does not count as the loss of a peer.
    pub(super) over: bool,
}

/// Connection of one process to the hub, or to the relay of its node.
pub(super) struct Connection {
    pub(super) socket: Socket,
    /// Rank whose process is at the other end: rank 0, or the rank whose process runs the relay.
    pub(super) relay: usize,
    /// Frames to be written to the socket; the lock is held while a frame is written.
    pub(super) outbox: Mutex<Outbox>,
    pub(super) mail: Arc<(Mutex<Mail>, Condvar)>,
    pub(super) control: Mutex<Option<JoinHandle<()>>>,
    /// Threads of this process that carry messages of other ranks: the hub's and the relay's
    /// thread.
    pub(super) carriers: Mutex<Vec<JoinHandle<()>>>,
    /// Process of each launched rank, set once all ranks have reported their processes.
    pub(super) processes: OnceLock<Vec<ProcessId>>,
}

/// Deadline of a wait, with a grace period. If this process was stopped during the wait, messages
/// may have arrived during the stop; the control thread reads them before any rank is blamed.
pub(super) struct LastChance {
    pub(super) until: Instant,
    rounds: u32,
}

impl LastChance {
    const ROUND: Duration = Duration::from_millis(20);

    pub(super) fn new(until: Instant) -> LastChance {
        LastChance { until, rounds: 0 }
    }

    /// Whether the wait is over at time `now`. After the deadline the wait continues for one round
    /// (20 ms), or for up to a second while messages are unread.
    pub(super) fn is_over(&mut self, now: Instant, unread: impl FnOnce() -> bool) -> bool {
        if now < self.until {
            return false;
        }
        if self.rounds > 0 && (self.rounds >= 50 || !unread()) {
            return true;
        }
        self.rounds += 1;
        self.until = now + Self::ROUND;
        false
    }
}

impl Connection {
    /// Starts the control thread of a connection to the process of rank `relay`.
    pub(super) fn start(socket: &Socket, relay: usize) -> Result<Arc<Connection>> {
        let system = |e| Error::system("dup of a socket", e);
        let (socket, reading) =
            (socket.try_clone().map_err(system)?, socket.try_clone().map_err(system)?);
        let mail: Arc<(Mutex<Mail>, Condvar)> = Arc::default();
        lock(&mail.0).groups.insert(0, Letters::default());
        let for_control = mail.clone();
        let control = spawn("iris-control", move || read(&reading, &for_control, relay))?;
        Ok(Arc::new(Connection {
            socket,
            relay,
            outbox: Mutex::default(),
            mail,
            control: Mutex::new(Some(control)),
            carriers: Mutex::default(),
            processes: OnceLock::new(),
        }))
    }

    /// Sends a frame. While the system has no room for the frame, or another thread is still
    /// sending, retries until the time `until`.
    pub(super) fn send(&self, frame: Frame, until: Instant) -> Result<()> {
        let mut outbox = loop {
            match self.outbox.try_lock() {
                Ok(outbox) => break outbox,
                Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(TryLockError::WouldBlock) => {
                    let what = format!("message to rank {}", self.relay);
                    let problem =
                        "an earlier message is not sent yet, because its process reads none";
                    return Err(Error::Wire { what, problem: problem.into() });
                }
            }
        };
        outbox.push(frame.pack());
        loop {
            // The timeout is never zero, because zero would mean no timeout.
            let rest = until.saturating_duration_since(Instant::now()).max(AGAIN);
            let limited = self.socket.set_write_timeout(Some(rest)).map_err(|e| ("setsockopt", e));
            let mut flush = || outbox.flush_until(&self.socket, Some(until));
            let sent = limited.and_then(|()| flush().map_err(|e| ("sendmsg", e)));
            let Err((call, error)) = sent else {
                return Ok(());
            };
            let crowded = crowded(&error);
            if crowded && Instant::now() < until {
                std::thread::sleep(AGAIN);
                continue;
            }
            if !(crowded && outbox.take_back()) {
                // After a failed send the connection is closed for writing: a part of the frame may
                // have been sent, so the hub could not understand later frames. This rank can still
                // read the hub's messages.
                outbox.clear();
                let _ = self.socket.shutdown(Shutdown::Write);
            }
            let relay = self.relay;
            return Err(match crowded {
                false => Error::system(call, error),
                true => {
                    let what = format!("message to rank {relay}");
                    Error::Wire { what, problem: explain_crowded(&error) }
                }
            });
        }
    }

    /// Whether threads of this process (hub or relay) carry messages of other ranks.
    pub(super) fn has_carriers(&self) -> bool {
        !lock(&self.carriers).is_empty()
    }

    /// Rank to blame if the hub does not answer: the relay's rank if the relay has not even
    /// forwarded the question, else rank 0.
    pub(super) fn silent_rank(&self, mail: &Mail) -> usize {
        if mail.forwarded { 0 } else { self.relay }
    }

    /// Waits until the control thread has read messages for which `holds` returns true, or until
    /// `until`.
    pub(super) fn wait_until(&self, until: Instant, holds: impl Fn(&Mail) -> bool) {
        let (mail, changed) = &*self.mail;
        let mut mail = lock(mail);
        while !holds(&mail) && Instant::now() < until {
            let rest = until.saturating_duration_since(Instant::now());
            mail = changed.wait_timeout(mail, rest).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether messages have arrived that the control thread has not read.
    pub(super) fn has_unread(&self) -> bool {
        is_readable(&self.socket)
    }

    /// Waits for the hub's answer to this process's hello.
    pub(super) fn welcome(
        &self,
        deadline: Instant,
        started: Instant,
        what: impl FnOnce() -> String,
    ) -> Result<()> {
        let (mail, changed) = &*self.mail;
        let mut chance = LastChance::new(deadline);
        let mut mail = lock(mail);
        loop {
            if let Some(welcome) = mail.welcome.take() {
                return welcome;
            }
            let now = Instant::now();
            if chance.is_over(now, || self.has_unread()) {
                let ranks = vec![self.silent_rank(&mail)];
                return Err(Error::Absent { ranks, what: what(), waited: now - started });
            }
            let wait = changed.wait_timeout(mail, chance.until.saturating_duration_since(now));
            mail = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Connection {
    /// Returns without waiting for peers: the control thread ends when the socket is shut down.
    fn drop(&mut self) {
        lock(&self.mail.0).over = true;
        let _ = self.socket.shutdown(Shutdown::Both);
        if let Some(control) = lock(&self.control).take()
            && control.thread().id() != std::thread::current().id()
            && control.join().is_err()
        {
            tracing::error!("the control thread panicked");
        }
    }
}

/// Main loop of the control thread: reads frames into `mail` until the connection to the process of
/// rank `relay` ends.
fn read(socket: &Socket, mail: &(Mutex<Mail>, Condvar), relay: usize) {
    let (mail, changed) = mail;
    let mut inbox = Inbox::default();
    // Rank that counts as lost when the connection ends, and the reason if a message has told one.
    let (mut lost, mut reason) = (relay, None);
    let mut starter = Starter::of_this_process();
    let outcome = loop {
        match inbox.take() {
            Ok(Some(frame)) => {
                let mut told = Told::new();
                let mut state = lock(mail);
                match frame {
                    Frame::Welcome => state.welcome = Some(Ok(())),
                    Frame::Refuse { error } => {
                        let error = cause(error);
                        reason = Some(error.clone());
                        state.welcome = Some(Err(error));
                    }
                    Frame::All { group, number, parts } => {
                        state.groups.entry(group).or_default().arrived = Some((number, parts));
                    }
                    Frame::Broken { group, error } => {
                        let error = cause(error);
                        let group = state.groups.entry(group).or_default();
                        group.hub_reported = true;
                        told = group.ending.fail(&error);
                    }
                    Frame::Goodbye => state.over = true,
                    Frame::Missing { group, number, ranks, teller } => {
                        let group = state.groups.entry(group).or_default();
                        group.missing = Some((number, ranks, teller));
                    }
                    Frame::Forwarded => state.forwarded = true,
                    // The relay closes the connection next. That end then counts as the loss of
                    // `rank`.
                    Frame::Gone { rank } => lost = rank,
                    other => tracing::warn!(frame = ?other, "an unexpected frame is ignored"),
                }
                drop(state);
                changed.notify_all();
                tell(told);
            }
            Ok(None) => match starter.and_then(|starter| starter.ends_before(socket)) {
                None => match inbox.fill(socket) {
                    Ok(true) => {}
                    Ok(false) => break Ok(()),
                    Err(e) => break Err(e),
                },
                Some(error) => {
                    starter = None;
                    let mut state = lock(mail);
                    let told = state.fail(|_| error.clone());
                    state.welcome.get_or_insert(Err(error));
                    drop(state);
                    changed.notify_all();
                    tell(told);
                }
            },
            Err(e) => break Err(e),
        }
    };
    let mut state = lock(mail);
    if let Err(error) = &outcome
        && !state.over
    {
        tracing::error!(%error, relay, "the connection to the hub is given up");
    }
    let outcome = outcome.and(reason.or_else(starter::lost).map_or(Ok(()), Err));
    let told = state.fail(|members| match (&outcome, members) {
        (Err(error), _) => error.clone(),
        (Ok(()), None) => Error::PeerLost { rank: lost },
        (Ok(()), Some(members)) => loss_of_carrier(members, lost),
    });
    let lost = outcome.err().unwrap_or(Error::PeerLost { rank: lost });
    state.welcome.get_or_insert(Err(lost));
    state.over = true;
    drop(state);
    changed.notify_all();
    tell(told);
}

impl Mail {
    /// Fails each group with the error that `of` returns for the group's members, unless the
    /// connection is over. Returns the watchers (callbacks for a lost peer) to call, with their
    /// errors.
    fn fail(&mut self, of: impl Fn(Option<&[usize]>) -> Error) -> Told {
        let over = self.over;
        let groups = self.groups.values_mut().filter(|_| !over);
        groups.flat_map(|group| group.ending.fail(&of(group.members.as_deref()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Tests that an error of this process's own calls is reported as such, with the name of the
    /// call, and not as the loss of rank 0. A file that is no socket stands for a socket on which
    /// the system forbids calls.
    #[test]
    fn a_call_that_fails_here_is_no_loss_of_rank_0() {
        let (reader, _writer) = std::io::pipe().unwrap();
        let no_socket = UnixStream::from(OwnedFd::from(reader));
        let connection = Connection::start(&no_socket.into(), 0).unwrap();
        let soon = Instant::now() + Duration::from_secs(60);
        let told = connection.send(Frame::Probe, soon).unwrap_err().to_string();
        let code = "Socket operation on non-socket (os error 88)";
        assert_eq!(told, format!("setsockopt: {code}"));
        let file = File::open("/dev/zero").unwrap();
        let connection = Connection::start(&UnixStream::from(OwnedFd::from(file)).into(), 0);
        let told = connection.unwrap().welcome(soon, Instant::now(), String::new).unwrap_err();
        assert_eq!(told.to_string(), format!("recvmsg: {code}"));
    }

    /// Tests that the end of the process at the other end is reported as the loss of a member if
    /// the process is a member of the group.
    #[test]
    fn the_end_of_a_carrier_is_the_loss_of_a_member() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let connection = Connection::start(&ours.into(), 2).unwrap();
        let groups = [(5, vec![0, 2]), (6, vec![0, 1])];
        for (group, members) in groups {
            let letters = Letters { members: Some(members), ..Letters::default() };
            lock(&connection.mail.0).groups.insert(group, letters);
        }
        drop(theirs);
        connection.wait_until(Instant::now() + Duration::from_secs(60), |mail| mail.over);
        let mail = lock(&connection.mail.0);
        let lost = [0, 5, 6].map(|group| mail.groups[&group].ending.lost.clone().expect("a loss"));
        let [Error::PeerLost { rank: 2 }, Error::PeerLost { rank: 1 }, Error::HubLost { rank: 2 }] =
            lost
        else {
            panic!("{lost:?}");
        };
    }

    /// Tests that a frame does not wait beyond its own deadline for a frame of another thread.
    #[test]
    fn a_frame_behind_one_that_is_stuck_is_given_up_in_time() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let connection = Connection::start(&ours.into(), 0).unwrap();
        let stuck = lock(&connection.outbox);
        let frame = Frame::Leave { group: 0, clean: false };
        let error = connection.send(frame, Instant::now() + Duration::from_millis(20));
        assert!(matches!(error, Err(Error::Wire { .. })), "{error:?}");
        drop(stuck);
        let frame = Frame::Leave { group: 0, clean: false };
        connection.send(frame, Instant::now() + REASON).unwrap();
    }
}
