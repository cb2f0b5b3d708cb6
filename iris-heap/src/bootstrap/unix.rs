//! Ranks as processes of one host: each is connected to rank 0's [`Hub`] by a Unix socket.
//!
//! A control thread a process reads its socket. It learns of a lost peer even while this rank's
//! kernels wait, and sets their abort words; it makes no call of a device's driver.

use std::collections::HashMap;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::frames::{AGAIN, Frame, Inbox, Outbox, Part, crowded, explain_crowded};
use super::hub::Hub;
use super::notice::{Patience, notice};
use super::rendezvous::Place;
use super::{Bootstrap, Step, Watcher};
use crate::error::{Error, Result, list_ranks};
use crate::world::lock;

/// What arrives for one group.
#[derive(Default)]
struct Letters {
    /// Exchanges begun by this rank.
    number: u64,
    arrived: Option<(u64, Vec<Part>)>,
    /// Why no further exchange is possible.
    broken: Option<Error>,
    /// The first loss of a peer, which may come after another reason.
    lost: Option<Error>,
    watchers: Vec<Watcher>,
    left: bool,
    /// The hub's answer in an exchange: the ranks that are missing, and who tells the user.
    missing: Option<(u64, Vec<usize>, usize)>,
}

#[derive(Default)]
struct Mail {
    groups: HashMap<u64, Letters>,
    /// The answer to hello.
    welcome: Option<Result<()>>,
    /// The hub has said goodbye, or this end is being closed: an end of the stream is no loss.
    over: bool,
}

/// One process's connection to the hub.
struct Connection {
    socket: UnixStream,
    /// Held while a frame is written.
    outbox: Mutex<Outbox>,
    mail: Arc<(Mutex<Mail>, Condvar)>,
    control: Mutex<Option<JoinHandle<()>>>,
    hub: Mutex<Option<JoinHandle<()>>>,
}

/// One rank's end of a group of processes.
pub(crate) struct Processes {
    connection: Arc<Connection>,
    group: u64,
    /// Ranks of the launched world.
    members: Vec<usize>,
    rank: usize,
}

/// How many descriptors of one exchange may be on their way to the ranks together. All processes of a
/// user share one limit, that of open files, which may be as low as 256.
const ON_THEIR_WAY: usize = 128;
/// How long the control thread may take to find why nothing can be sent.
const REASON: Duration = Duration::from_secs(2);
/// How long a message may take that nobody waits for.
const PARTING: Duration = Duration::from_secs(2);
/// How long the hub may take to say who is missing, before that is worth a word itself.
const ANSWER: Duration = Duration::from_secs(2);

impl Processes {
    /// Meets the other processes of a job.
    pub(crate) fn meet(
        place: Place,
        rank: usize,
        size: usize,
        timeout: Duration,
    ) -> Result<Processes> {
        let _visit = place.visit();
        let started = Instant::now();
        let deadline = started + timeout;
        let (socket, hub) = if rank == 0 {
            let listener = place.listen()?;
            let pair = UnixStream::pair().map_err(|e| Error::system("socketpair", e));
            let started = pair.and_then(|(mine, own)| {
                let (place, size) = (place.clone(), size);
                let run = move || Hub::run(place, listener, own, size, deadline);
                let thread = std::thread::Builder::new().name("iris-hub".into()).spawn(run);
                Ok((mine, thread.map_err(|e| Error::system("starting thread iris-hub", e))?))
            });
            match started {
                Ok((mine, hub)) => (mine, Some(hub)),
                Err(e) => {
                    place.clear(Some(&failed(0, &e)));
                    return Err(e);
                }
            }
        } else {
            (place.connect(rank, size, deadline)?, None)
        };
        let hello = Frame::Hello { job: place.job.clone(), rank: rank as u64, size: size as u64 };
        let connection = match Connection::start(&socket, hub, rank) {
            Ok(connection) => connection,
            Err(error) => {
                // The others need not wait for this rank.
                let mut outbox = Outbox::default();
                outbox.push(hello.pack());
                outbox.push(Frame::GaveUp { group: 0, error: failed(rank, &error) }.pack());
                let _ = outbox.flush(&socket);
                return Err(error);
            }
        };
        let greeted = connection.send(hello, deadline);
        let what = || format!("rank {rank} of {size} at {place}");
        // The hub's own deadline comes first: it knows who is missing.
        let outcome = connection.welcome(deadline + grace(timeout), started, greeted, what);
        let members = (0..size).collect();
        let processes = Processes { connection, group: 0, members, rank };
        match outcome {
            Ok(()) => Ok(processes),
            Err(error) => {
                processes.explain(&error);
                // Rank 0 may have closed its end before this rank had a word from it.
                Err(match error {
                    Error::PeerLost { rank: 0 } => place.came_to_nothing(None).unwrap_or(error),
                    error => error,
                })
            }
        }
    }

    fn exchange(&self, part: Part, step: &Step) -> Result<Vec<Part>> {
        let outcome = self.wait_for_all(part, step);
        if let Err(error) = &outcome {
            self.explain(error);
        }
        outcome
    }

    fn wait_for_all(&self, part: Part, step: &Step) -> Result<Vec<Part>> {
        let started = Instant::now();
        let (mail, changed) = &*self.connection.mail;
        let number = {
            let mut mail = lock(mail);
            let group = mail.groups.entry(self.group).or_default();
            if let Some(error) = &group.broken {
                return Err(error.clone());
            }
            group.number += 1;
            group.number
        };
        let frame = Frame::Give { group: self.group, number, part };
        let whole = step.deadline.saturating_duration_since(started);
        // Not until the deadline: the others shall hear the reason before they judge for themselves.
        let sent = self.connection.send(frame, started + whole / 10 * 8);
        let what = format!("rank {} in {}", self.rank, step.what);
        let mut patience = Patience::new(started, step.deadline);
        // When the hub should have said who is missing, and when it should have judged.
        let (mut answer, mut verdict): (Option<Instant>, Option<LastChance>) = (None, None);
        let sent_at = Instant::now();
        let mut mail = lock(mail);
        loop {
            // In this order: what is complete stays so, even if a peer has died since.
            let group = mail.groups.entry(self.group).or_default();
            if let Some((n, parts)) = group.arrived.take()
                && n == number
            {
                return Ok(parts);
            }
            if let Some(error) = &group.broken {
                return Err(error.clone());
            }
            let now = Instant::now();
            let mut limit = step.deadline;
            if let Err(error) = &sent {
                limit = sent_at + REASON;
                // One that is of no connection, but of this message, needs no other reason.
                let crowded = matches!(error, Error::Wire { .. });
                if crowded || now >= limit {
                    // The control thread would have found the reason by now.
                    group.broken = Some(error.clone());
                    return Err(error.clone());
                }
            } else if let Some(chance) = &mut verdict {
                match chance.is_over(now, || self.connection.has_unread()) {
                    false => limit = chance.until,
                    true => {
                        // The hub does not answer: rank 0 is stopped or starved.
                        let waited = now - started;
                        let error = match self.members.iter().position(|&m| m == 0) {
                            Some(hub) => Error::Absent { ranks: vec![hub], what, waited },
                            None => Error::HubLost,
                        };
                        group.broken = Some(error.clone());
                        return Err(error);
                    }
                }
            } else if now >= limit {
                verdict = Some(LastChance::new(now + grace(whole)));
                drop(mail);
                let (group, what, waited) = (self.group, what.clone(), now - started);
                let _ = self
                    .connection
                    .send(Frame::Late { group, number, what, waited }, now + PARTING);
                mail = lock(&self.connection.mail.0);
                continue;
            } else if let Some(waited) = patience.is_over() {
                answer = Some(now + ANSWER);
                tracing::debug!(what, ?waited, "asking who is missing");
                drop(mail);
                let ask = Frame::Ask { group: self.group, number };
                let _ = self.connection.send(ask, now + PARTING);
                mail = lock(&self.connection.mail.0);
                continue;
            } else {
                limit = limit.min(patience.until);
                if let Some((n, ranks, teller)) = group.missing.take() {
                    answer = None;
                    if n == number && teller == self.rank {
                        let waited = now - started;
                        notice(format_args!(
                            "{what} waits for rank {}: {waited:.1?} of {whole:.1?}",
                            list_ranks(&ranks)
                        ));
                    }
                } else if let Some(until) = answer {
                    if now >= until {
                        answer = None;
                        let waited = now - started;
                        notice(format_args!(
                            "{what}: {waited:.1?} of {whole:.1?}; the process of rank 0, which \
                             carries the messages, does not answer: is it stopped?"
                        ));
                    } else {
                        limit = limit.min(until);
                    }
                }
            }
            let wait = changed.wait_timeout(mail, limit.saturating_duration_since(now));
            mail = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Tells the others why this rank cannot go on, where the reason is its own: what the hub said
    /// they know.
    fn explain(&self, error: &Error) {
        let error = match error {
            Error::Absent { .. } => error.clone(),
            Error::System { .. } | Error::Wire { .. } => failed(self.rank, error),
            _ => return,
        };
        let frame = Frame::GaveUp { group: self.group, error };
        let _ = self.connection.send(frame, Instant::now() + PARTING);
    }
}

/// What the others are told of an error of this rank.
fn failed(rank: usize, error: &Error) -> Error {
    let what = "talking to the other ranks".into();
    Error::PeerFailed { rank, what, message: error.to_string() }
}

/// How long to wait for the hub's verdict after a deadline.
fn grace(deadline: Duration) -> Duration {
    (deadline / 10).max(Duration::from_secs(2))
}

/// The end of a wait of which this process may have slept through a part: before anybody is blamed,
/// the control thread reads what has come meanwhile.
struct LastChance {
    until: Instant,
    rounds: u32,
}

impl LastChance {
    const ROUND: Duration = Duration::from_millis(20);

    fn new(until: Instant) -> LastChance {
        LastChance { until, rounds: 0 }
    }

    /// Whether the wait is over. At its end it goes on for a round, and, while something has not been
    /// read, for up to a second.
    fn is_over(&mut self, now: Instant, unread: impl FnOnce() -> bool) -> bool {
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
    fn start(
        socket: &UnixStream,
        hub: Option<JoinHandle<()>>,
        rank: usize,
    ) -> Result<Arc<Connection>> {
        let system = |e| Error::system("socket to rank 0", e);
        let (socket, reading) =
            (socket.try_clone().map_err(system)?, socket.try_clone().map_err(system)?);
        let mail: Arc<(Mutex<Mail>, Condvar)> = Arc::default();
        lock(&mail.0).groups.insert(0, Letters::default());
        let (for_control, in_group_0) = (mail.clone(), rank);
        let control = std::thread::Builder::new()
            .name("iris-control".into())
            .spawn(move || read(&reading, &for_control, in_group_0))
            .map_err(|e| Error::system("starting thread iris-control", e))?;
        Ok(Arc::new(Connection {
            socket,
            outbox: Mutex::default(),
            mail,
            control: Mutex::new(Some(control)),
            hub: Mutex::new(hub),
        }))
    }

    /// Sends a frame. What the system has no room for is tried again until `until`.
    fn send(&self, frame: Frame, until: Instant) -> Result<()> {
        let mut outbox = lock(&self.outbox);
        outbox.push(frame.pack());
        loop {
            // Zero would be refused, and mean for ever.
            let rest = until.saturating_duration_since(Instant::now()).max(AGAIN);
            let sent = self.socket.set_write_timeout(Some(rest));
            let Err(error) = sent.and_then(|()| outbox.flush(&self.socket)) else {
                return Ok(());
            };
            let crowded = crowded(&error);
            if crowded && Instant::now() < until {
                std::thread::sleep(AGAIN);
                continue;
            }
            if !(crowded && outbox.take_back()) {
                // Half a frame may be out: nothing after it would be understood. What was sent to
                // this rank can still be read.
                *outbox = Outbox::default();
                let _ = self.socket.shutdown(Shutdown::Write);
            }
            return Err(match crowded {
                false => Error::system("sending to rank 0", error),
                true => {
                    let what = "message to rank 0".into();
                    Error::Wire { what, problem: explain_crowded(&error) }
                }
            });
        }
    }

    /// Whether something has come that the control thread has not read.
    fn has_unread(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(n) if n > 0)
    }

    /// Waits for the hub's answer to a hello that was `greeted`.
    fn welcome(
        &self,
        deadline: Instant,
        started: Instant,
        greeted: Result<()>,
        what: impl FnOnce() -> String,
    ) -> Result<()> {
        let (mail, changed) = &*self.mail;
        // The reason for which a hello cannot be sent may be there to be read.
        let deadline = if greeted.is_err() { Instant::now() + REASON } else { deadline };
        let mut chance = LastChance::new(deadline);
        let mut mail = lock(mail);
        loop {
            if let Some(welcome) = mail.welcome.take() {
                return welcome;
            }
            let now = Instant::now();
            if chance.is_over(now, || self.has_unread()) {
                greeted?;
                return Err(Error::Absent { ranks: vec![0], what: what(), waited: now - started });
            }
            let wait = changed.wait_timeout(mail, chance.until.saturating_duration_since(now));
            mail = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Connection {
    /// Waits for no peer: the control thread ends as soon as the socket is shut.
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

/// The control thread.
fn read(socket: &UnixStream, mail: &(Mutex<Mail>, Condvar), rank: usize) {
    let (mail, changed) = mail;
    let mut inbox = Inbox::default();
    let outcome = loop {
        match inbox.take() {
            Ok(Some(frame)) => {
                let mut told = Vec::new();
                let mut state = lock(mail);
                match frame {
                    Frame::Welcome => state.welcome = Some(Ok(())),
                    Frame::Refuse(error) => state.welcome = Some(Err(error)),
                    Frame::All { group, number, parts } => {
                        state.groups.entry(group).or_default().arrived = Some((number, parts));
                    }
                    Frame::Broken { group, error } => {
                        let group = state.groups.entry(group).or_default();
                        told = group.fail(&error).into_iter().map(|w| (w, error.clone())).collect();
                    }
                    Frame::Goodbye => state.over = true,
                    Frame::Missing { group, number, ranks, teller } => {
                        let ranks = ranks.into_iter().map(|r| r as usize).collect();
                        let group = state.groups.entry(group).or_default();
                        group.missing = Some((number, ranks, teller as usize));
                    }
                    other => tracing::warn!(frame = ?other, "an unexpected frame is ignored"),
                }
                drop(state);
                changed.notify_all();
                for (watcher, error) in told {
                    watcher(&error);
                }
            }
            Ok(None) => match inbox.fill(socket) {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(e) => break Err(e),
            },
            Err(e) => break Err(e),
        }
    };
    let mut state = lock(mail);
    if let Err(error) = &outcome
        && !state.over
    {
        tracing::error!(%error, rank, "the connection to rank 0 is given up");
    }
    let mut told = Vec::new();
    if !state.over {
        for (&id, group) in &mut state.groups {
            let error = match (&outcome, id) {
                (Err(error), _) => error.clone(),
                (Ok(()), 0) => Error::PeerLost { rank: 0 },
                (Ok(()), _) => Error::HubLost,
            };
            told.extend(group.fail(&error).into_iter().map(|w| (w, error.clone())));
        }
    }
    let lost = outcome.err().unwrap_or(Error::PeerLost { rank: 0 });
    state.welcome.get_or_insert(Err(lost));
    drop(state);
    changed.notify_all();
    for (watcher, error) in told {
        watcher(&error);
    }
}

impl Letters {
    /// The group cannot go on; the first reason stays. Returns who is to be told of a loss, which
    /// is any reason but a rank's absence.
    fn fail(&mut self, error: &Error) -> Vec<Watcher> {
        self.broken.get_or_insert_with(|| error.clone());
        if matches!(error, Error::Absent { .. }) {
            return Vec::new();
        }
        self.lost.get_or_insert_with(|| error.clone());
        if self.left { Vec::new() } else { std::mem::take(&mut self.watchers) }
    }
}

impl Bootstrap for Processes {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn allgather(&self, bytes: &[u8], step: &Step) -> Result<Vec<Vec<u8>>> {
        let part = Part { bytes: bytes.to_vec(), descriptors: Vec::new() };
        Ok(self.exchange(part, step)?.into_iter().map(|p| p.bytes).collect())
    }

    fn share_descriptors(
        &self,
        descriptors: Vec<OwnedFd>,
        step: &Step,
    ) -> Result<Vec<Vec<OwnedFd>>> {
        // So few in each exchange that the limit of descriptors on their way is not met: nobody gives
        // the next ones before it has received these.
        let count = (descriptors.len() as u64).to_le_bytes();
        let mut counts = Vec::new();
        for bytes in self.allgather(&count, step)? {
            let count = <[u8; 8]>::try_from(bytes).map_err(|b| Error::Wire {
                what: "descriptors".into(),
                problem: format!("{} bytes where a number should be", b.len()),
            })?;
            counts.push(u64::from_le_bytes(count) as usize);
        }
        let share = (ON_THEIR_WAY / self.size()).max(1);
        let before: usize = counts[..self.rank].iter().sum();
        let mut mine = descriptors.into_iter();
        let mut all: Vec<Vec<OwnedFd>> = counts.iter().map(|_| Vec::new()).collect();
        for first in (0..counts.iter().sum()).step_by(share) {
            let now = (before..before + counts[self.rank])
                .filter(|at| (first..first + share).contains(at))
                .count();
            let part = Part { bytes: Vec::new(), descriptors: mine.by_ref().take(now).collect() };
            for (all, part) in all.iter_mut().zip(self.exchange(part, step)?) {
                all.extend(part.descriptors);
            }
        }
        Ok(all)
    }

    fn split(
        &self,
        members: &[usize],
        group: u64,
        step: &Step,
    ) -> Result<Option<Arc<dyn Bootstrap>>> {
        let Some(rank) = members.iter().position(|&m| m == self.rank) else {
            return Ok(None);
        };
        // A child of a child has another name than a child with the same number.
        let name = [self.group.to_le_bytes(), group.to_le_bytes()].concat();
        let group = (crate::wire::hash(&[&name]) as u64).max(1);
        let members: Vec<usize> = members.iter().map(|&m| self.members[m]).collect();
        lock(&self.connection.mail.0).groups.entry(group).or_default();
        let launched = members.iter().map(|&m| m as u64).collect();
        self.connection.send(Frame::Group { group, members: launched }, step.deadline)?;
        let connection = self.connection.clone();
        Ok(Some(Arc::new(Processes { connection, group, members, rank })))
    }

    fn watch(&self, watcher: Watcher) {
        let mut mail = lock(&self.connection.mail.0);
        let group = mail.groups.entry(self.group).or_default();
        group.watchers.push(watcher.clone());
        drop(mail);
        if let Some(error) = self.lost() {
            watcher(&error);
        }
    }

    fn lost(&self) -> Option<Error> {
        let mail = lock(&self.connection.mail.0);
        mail.groups.get(&self.group).and_then(|g| g.lost.clone())
    }

    fn leave(&self, clean: bool) {
        let mut mail = lock(&self.connection.mail.0);
        let Some(group) = mail.groups.get_mut(&self.group) else {
            return;
        };
        if std::mem::replace(&mut group.left, true) {
            return;
        }
        let reason = group.broken.clone().filter(|_| !clean);
        drop(mail);
        if let Some(error) = reason {
            self.explain(&error);
        }
        // If it cannot be sent, rank 0 has gone, and there is nobody to tell.
        let frame = Frame::Leave { group: self.group, clean };
        let _ = self.connection.send(frame, Instant::now() + PARTING);
        if clean && self.group == 0 && self.rank == 0 {
            // This process may end now, and the hub with it: first it hands its last messages to
            // the system. It waits for no answer, and for a stopped process not long.
            if let Some(hub) = lock(&self.connection.hub).take()
                && hub.join().is_err()
            {
                tracing::error!("the hub's thread panicked");
            }
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        let mut mail = lock(&self.connection.mail.0);
        let done = mail.groups.remove(&self.group);
        drop(mail);
        // Watchers are dropped outside the lock.
        drop(done);
    }
}
