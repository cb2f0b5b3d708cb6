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

use super::frames::{Frame, Inbox, Outbox, Part};
use super::hub::Hub;
use super::rendezvous::Place;
use super::{Bootstrap, Step, Watcher};
use crate::error::{Error, Result};
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

impl Processes {
    /// Meets the other processes of a job.
    pub(crate) fn meet(
        place: Place,
        rank: usize,
        size: usize,
        timeout: Duration,
    ) -> Result<Processes> {
        let started = Instant::now();
        let deadline = started + timeout;
        let job = place.job.clone();
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
                    place.clear();
                    return Err(e);
                }
            }
        } else {
            (place.connect(size, deadline)?, None)
        };
        let connection = Connection::start(socket, hub, rank, timeout)?;
        connection.send(Frame::Hello { job, rank: rank as u64, size: size as u64 })?;
        // The hub's own deadline comes first: it knows who is missing.
        connection.welcome(deadline + grace(timeout), started)?;
        let members = (0..size).collect();
        Ok(Processes { connection, group: 0, members, rank })
    }

    fn exchange(&self, part: Part, step: &Step) -> Result<Vec<Part>> {
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
        let sent = self.connection.send(frame);
        let mut limit = step.deadline;
        let mut asked = false;
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
            if let Err(error) = &sent
                && now >= started + Duration::from_secs(2)
            {
                // The control thread would have found the reason by now.
                group.broken = Some(error.clone());
                return Err(error.clone());
            }
            if sent.is_err() {
                limit = started + Duration::from_secs(2);
            } else if now >= limit {
                let what = format!("rank {} in {}", self.rank, step.what);
                let waited = now - started;
                if asked {
                    // The hub does not answer: rank 0 is stopped or starved.
                    let ranks = vec![0];
                    let error = Error::Absent { ranks, what, waited };
                    group.broken = Some(error.clone());
                    return Err(error);
                }
                asked = true;
                limit = now + grace(step.deadline - started);
                drop(mail);
                let late = Frame::Late { group: self.group, number, what, waited };
                let _ = self.connection.send(late);
                mail = lock(&self.connection.mail.0);
                continue;
            }
            let wait = changed.wait_timeout(mail, limit.saturating_duration_since(now));
            mail = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// How long to wait for the hub's verdict after a deadline.
fn grace(deadline: Duration) -> Duration {
    (deadline / 10).max(Duration::from_secs(2))
}

impl Connection {
    fn start(
        socket: UnixStream,
        hub: Option<JoinHandle<()>>,
        rank: usize,
        timeout: Duration,
    ) -> Result<Arc<Connection>> {
        let system = |e| Error::system("socket to rank 0", e);
        // Zero would be refused, and mean for ever.
        socket.set_write_timeout(Some(timeout.max(Duration::from_secs(1)))).map_err(system)?;
        let reading = socket.try_clone().map_err(system)?;
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

    fn send(&self, frame: Frame) -> Result<()> {
        let mut outbox = lock(&self.outbox);
        outbox.push(frame.pack());
        let sent = outbox.flush(&self.socket);
        if sent.is_err() {
            // Half a frame may be out: nothing after it would be understood.
            *outbox = Outbox::default();
            let _ = self.socket.shutdown(Shutdown::Both);
        }
        sent.map_err(|e| Error::system("sending to rank 0", e))
    }

    fn welcome(&self, deadline: Instant, started: Instant) -> Result<()> {
        let (mail, changed) = &*self.mail;
        let mut mail = lock(mail);
        loop {
            if let Some(welcome) = mail.welcome.take() {
                return welcome;
            }
            let now = Instant::now();
            if now >= deadline {
                let (ranks, what) = (vec![0], "rendezvous".into());
                return Err(Error::Absent { ranks, what, waited: now - started });
            }
            let wait = changed.wait_timeout(mail, deadline - now);
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
    let gone = "rank 0 has gone, or its world came to nothing".into();
    state
        .welcome
        .get_or_insert(Err(Error::Rendezvous { place: "its socket".into(), problem: gone }));
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
        let part = Part { bytes: Vec::new(), descriptors };
        Ok(self.exchange(part, step)?.into_iter().map(|p| p.descriptors).collect())
    }

    fn split(
        &self,
        members: &[usize],
        group: u64,
        _step: &Step,
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
        self.connection.send(Frame::Group { group, members: launched })?;
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
        drop(mail);
        // If it cannot be sent, rank 0 has gone, and there is nobody to tell.
        let _ = self.connection.send(Frame::Leave { group: self.group, clean });
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
