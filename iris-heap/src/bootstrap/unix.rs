//! Bootstrap of ranks that are processes of one host: each is connected to rank 0's [`Hub`] by a
//! Unix socket.
//!
//! A control thread per process reads the socket. The thread notices a lost peer even while this
//! rank's kernels wait, and sets the abort word of these kernels. The thread makes no driver call.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::connection::{Connection, LastChance, Mail, REASON};
use super::frames::{Frame, Part, check_exchanged};
use super::held::pair;
use super::hub::Hub;
use super::loss::tell;
use super::mailbox::Outbox;
use super::notice::{Patience, notice};
use super::process::{ProcessId, list_processes};
use super::rendezvous::{Door, Place, Visit};
use super::socket::{Socket, is_own};
use super::starter::cause;
use super::{Bootstrap, Step, Watcher};
use crate::error::{Error, Result};
use crate::root_error::told;
use crate::util::{lock, spawn};

/// Membership of one rank in a group of processes.
pub(crate) struct Processes {
    pub(super) connection: Arc<Connection>,
    pub(super) group: u64,
    /// Members of the group, by their numbers in the world of all launched ranks.
    pub(super) members: Vec<usize>,
    pub(super) rank: usize,
}

/// Largest number of descriptors of one exchange that are in transit to all ranks together. The
/// number is small, because the limit of open files, which may be as low as 256, applies to all
/// descriptors in transit of a user together.
const ON_THEIR_WAY: usize = 128;
/// Time limit for sending a last message to which no answer is awaited.
const PARTING: Duration = Duration::from_secs(2);
/// Time in which the hub must answer which ranks are missing; after that, the user is told that the
/// hub does not answer.
const ANSWER: Duration = Duration::from_secs(2);

impl Processes {
    /// Connects this rank to the other processes of a job; fails after a timeout.
    pub(crate) fn rendezvous(
        place: Place,
        rank: usize,
        size: usize,
        timeout: Duration,
    ) -> Result<Processes> {
        let visit = place.visit(rank)?;
        let met = Processes::meet(&place, &visit, (rank, size), timeout);
        visit.end(met)
    }

    fn meet(
        place: &Place,
        visit: &Visit<'_>,
        (rank, size): (usize, usize),
        timeout: Duration,
    ) -> Result<Processes> {
        let started = Instant::now();
        let deadline = started + timeout;
        let (socket, hub): (Socket, _) = if rank == 0 {
            let door = Arc::new(Mutex::new(Some(place.listen()?)));
            let pair = pair().map_err(|e| Error::system("socketpair", e));
            let started = pair.and_then(|(mine, own)| {
                let (place, door, size) = (place.clone(), door.clone(), size);
                let run = move || {
                    let door = lock(&door).take();
                    if let Some(door) = door {
                        Hub::run(place, door, own, size, deadline);
                    }
                };
                Ok((mine, spawn("iris-hub", run)?))
            });
            match started {
                Ok((mine, hub)) => (mine.into(), Some(hub)),
                Err(e) => {
                    // Closing the door (the listening socket) makes ranks that have connected read
                    // the note with the reason.
                    let mut door = lock(&door).take();
                    door.iter_mut().for_each(Door::make_room);
                    place.clear(Some(&failed(0, &e)));
                    return Err(e);
                }
            }
        } else {
            (place.connect(rank, size, deadline, Some(visit))?.into(), None)
        };
        let connection = match Connection::start(&socket, 0) {
            Ok(connection) => connection,
            Err(error) => {
                withdraw(&socket, failed(rank, &error));
                // The hub first tells all ranks the reason, because this process, and with it the
                // hub's thread, may end when this function returns.
                hub.map(JoinHandle::join);
                return Err(error);
            }
        };
        lock(&connection.carriers).extend(hub);
        Processes::welcomed(connection, (place, place), (rank, size), (started, timeout))
    }

    /// Waits until all `size` ranks have met at `place`; this rank has waited since `started`. `at`
    /// is the name of the place in errors.
    pub(super) fn welcomed(
        connection: Arc<Connection>,
        (place, at): (&Place, &dyn fmt::Display),
        (rank, size): (usize, usize),
        (started, timeout): (Instant, Duration),
    ) -> Result<Processes> {
        let what = || format!("rank {rank} of {size} at {at}");
        // This rank waits longer than the hub, whose wait began before this rank connected. So the
        // hub, which knows the missing ranks, reports them first.
        let outcome = connection.welcome(Instant::now() + timeout + grace(timeout), started, what);
        let members = (0..size).collect();
        let processes = Processes { connection, group: 0, members, rank };
        match outcome {
            Ok(()) => Ok(processes),
            Err(error) => {
                processes.explain(&error);
                Err(place.explained(error))
            }
        }
    }

    /// Exchanges the process ids of all ranks, so that notices and errors name the process of a
    /// missing rank. Collective.
    pub(crate) fn share_processes(&self, step: &Step) -> Result<()> {
        let all = self.allgather(&ProcessId::own().to_bytes(), step)?;
        let all = all.iter().map(|bytes| ProcessId::from_bytes(bytes));
        let all: Option<Vec<_>> = all.collect();
        let broken = || Error::Wire {
            what: "exchange of process ids".into(),
            problem: "a rank sent something else".into(),
        };
        let _ = self.connection.processes.set(all.ok_or_else(broken)?);
        Ok(())
    }

    fn exchange(&self, part: Part, step: &Step) -> Result<Vec<Part>> {
        let outcome = self.wait_for_all(part, step);
        if let Err(error) = &outcome {
            self.explain(error);
        }
        outcome
    }

    fn wait_for_all(&self, part: Part, step: &Step) -> Result<Vec<Part>> {
        check_exchanged([&part])?;
        let started = Instant::now();
        let (mail, changed) = &*self.connection.mail;
        let number = {
            let mut mail = lock(mail);
            let group = mail.groups.entry(self.group).or_default();
            if let Some(error) = &group.ending.broken {
                return Err(error.clone());
            }
            group.number += 1;
            group.number
        };
        let frame = Frame::Give { group: self.group, number, part };
        let whole = step.deadline.saturating_duration_since(started);
        // Sending may take eight tenths of the deadline; in the remaining time the reason of a
        // failure can be sent to the other ranks.
        let sent = self.connection.send(frame, started + whole / 10 * 8);
        let what = format!("rank {} in {}", step.number(self.rank), step.what);
        let mut patience = Patience::new(started, step.deadline);
        // Deadline for the hub's answer about missing ranks (`answer`), and for its decision which
        // rank is late (`verdict`).
        let (mut answer, mut verdict): (Option<Instant>, Option<LastChance>) = (None, None);
        let sent_at = Instant::now();
        let mut mail = lock(mail);
        if let Err(own @ Error::System { error, .. }) = &sent
            && is_own(error)
        {
            // The hub would report only the loss of this rank, so the reason is stored here.
            mail.groups.entry(self.group).or_default().ending.broken = Some(own.clone());
            return Err(own.clone());
        }
        loop {
            // A completed exchange stays valid even if a peer has died since, so it is returned
            // before errors are checked.
            let group = mail.groups.entry(self.group).or_default();
            if let Some((n, parts)) = group.arrived.take()
                && n == number
            {
                return Ok(parts);
            }
            if let Some(error) = &group.ending.broken {
                return Err(error.clone());
            }
            let now = Instant::now();
            let mut limit = step.deadline;
            if let Err(error) = &sent {
                limit = sent_at + REASON;
                // An error that concerns only this message, and not the connection, is returned at
                // once. After any other error the hub's messages may contain the reason.
                let crowded = matches!(error, Error::Wire { .. });
                if crowded || now >= limit {
                    // No other reason has been read by now, so the failed send itself is the
                    // reason.
                    group.ending.broken = Some(error.clone());
                    return Err(error.clone());
                }
            } else if let Some(chance) = &mut verdict {
                match chance.is_over(now, || self.connection.has_unread()) {
                    false => limit = chance.until,
                    true => {
                        // No answer from the hub means that rank 0, or the process of the relay, is
                        // stopped or gets no processor time.
                        let waited = now - started;
                        let rank = self.connection.silent_rank(&mail);
                        let error = match self.members.iter().position(|&m| m == rank) {
                            Some(silent) => Error::Absent { ranks: vec![silent], what, waited },
                            None => Error::HubLost { rank },
                        };
                        let group = mail.groups.entry(self.group).or_default();
                        group.ending.broken = Some(error.clone());
                        return Err(error);
                    }
                }
            } else if now >= limit {
                verdict = Some(LastChance::new(now + grace(whole)));
                mail.forwarded = false;
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
                mail.forwarded = false;
                drop(mail);
                let ask = Frame::Ask { group: self.group, number };
                let _ = self.connection.send(ask, now + PARTING);
                mail = lock(&self.connection.mail.0);
                continue;
            } else {
                limit = limit.min(patience.until);
                if let Some((n, ranks, teller)) = group.missing.take() {
                    answer = None;
                    if n == number
                        && let Some(on_missing) = &step.on_missing
                    {
                        on_missing.0(&ranks);
                    }
                    let waited = now - started;
                    if n == number
                        && teller == self.rank
                        && group.told_waits.is_news(format!("{ranks:?} in {}", step.what), waited)
                    {
                        notice(format_args!(
                            "{what} waits for rank {}: {waited:.1?} of {whole:.1?}",
                            list_processes(&ranks, |rank| (step.number(rank), self.process(rank)))
                        ));
                    }
                } else if let Some(until) = answer {
                    if now >= until {
                        answer = None;
                        let waited = now - started;
                        let silent = self.connection.silent_rank(&mail);
                        let process = self.connection.processes.get().and_then(|p| p.get(silent));
                        let process = process.map_or(String::new(), |it| format!(" ({it})"));
                        let member = self.members.iter().position(|&member| member == silent);
                        let silent = member.map_or(silent, |rank| step.number(rank));
                        notice(format_args!(
                            "{what}: {waited:.1?} of {whole:.1?}; rank {silent}{process}, which carries \
                             the messages, does not answer: is it stopped?"
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

    /// Tells the other ranks why this rank cannot continue, if the reason originates on this rank.
    /// The other ranks already know reasons that the hub sent.
    pub(super) fn explain(&self, error: &Error) {
        let error = match error {
            Error::Absent { .. } | Error::LauncherLost { .. } => error.clone(),
            Error::System { .. } | Error::Wire { .. } | Error::Invalid { .. } => {
                failed(self.rank, error)
            }
            _ => return,
        };
        self.part(Frame::GaveUp { group: self.group, error });
    }

    /// Sends the hub a frame that ends the exchanges of the group.
    ///
    /// If the hub or a relay is a thread of this process, waits until the hub has reported to this
    /// rank that the group has ended. By then all ranks that the thread serves have been told.
    /// Without this wait the process, and with it the thread, could end before.
    fn part(&self, frame: Frame) {
        let until = Instant::now() + PARTING;
        // An error is ignored, because sending fails only if the hub or relay is gone.
        if self.connection.send(frame, until).is_ok() && self.connection.has_carriers() {
            let told = |mail: &Mail| {
                mail.over || mail.groups.get(&self.group).is_none_or(|group| group.hub_reported)
            };
            self.connection.wait_until(until, |mail| mail.silent || told(mail));
            let mut mail = lock(&self.connection.mail.0);
            mail.silent |= !told(&mail);
        }
    }
}

/// Converts an error of `rank` into the error that the other ranks receive.
pub(super) fn failed(rank: usize, error: &Error) -> Error {
    told(rank, "talking to the other ranks", error)
}

/// Time for the hub to report which ranks are missing after a rank's deadline has passed.
pub(super) fn grace(deadline: Duration) -> Duration {
    (deadline / 10).max(Duration::from_secs(2))
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
        counts: &[usize],
        step: &Step,
    ) -> Result<Vec<Vec<OwnedFd>>> {
        // The descriptors are divided among several exchanges, each so small that the limit of
        // descriptors in transit is not reached. A rank begins an exchange only after it has
        // received all descriptors of the previous one.
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

    fn process(&self, rank: usize) -> Option<ProcessId> {
        let launched = *self.members.get(rank)?;
        self.connection.processes.get()?.get(launched).copied()
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
        // The id is a hash of the parent group and the number, so that splits of different groups
        // get different ids.
        let name = [self.group.to_le_bytes(), group.to_le_bytes()].concat();
        let group = (crate::encoding::hash(&[&name]) as u64).max(1);
        let members: Vec<usize> = members.iter().map(|&m| self.members[m]).collect();
        lock(&self.connection.mail.0).groups.entry(group).or_default().members =
            Some(members.clone());
        self.connection.send(Frame::Group { group, members: members.clone() }, step.deadline)?;
        let connection = self.connection.clone();
        Ok(Some(Arc::new(Processes { connection, group, members, rank })))
    }

    fn watch(&self, watcher: Watcher) {
        let mut mail = lock(&self.connection.mail.0);
        let told = mail.groups.entry(self.group).or_default().ending.watch(watcher);
        drop(mail);
        tell(told);
    }

    fn lost(&self) -> Option<Error> {
        lock(&self.connection.mail.0).groups.get(&self.group)?.ending.lost.clone()
    }

    fn give_up(&self, error: Error) {
        let error = cause(error);
        if !matches!(error, Error::PeerAborted { .. }) {
            // Fail the group here at once, because the hub's process may be stopped, so that its
            // answer comes late or never.
            let mut mail = lock(&self.connection.mail.0);
            let told = mail.groups.entry(self.group).or_default().ending.fail(&error);
            drop(mail);
            self.connection.mail.1.notify_all();
            tell(told);
        }
        // An error is ignored, because sending fails only if the hub or relay is gone.
        let frame = Frame::GaveUp { group: self.group, error };
        let _ = self.connection.send(frame, Instant::now() + PARTING);
    }

    fn leave(&self, clean: bool) {
        let mut mail = lock(&self.connection.mail.0);
        let Some(group) = mail.groups.get_mut(&self.group) else {
            return;
        };
        if std::mem::replace(&mut group.has_left, true) {
            return;
        }
        // Watchers of a rank that has left are not called. They are kept here, to be dropped after
        // the lock is released.
        let _watchers = group.ending.dismiss();
        let reason = group.ending.broken.clone().filter(|_| !clean);
        if !clean {
            // The hub sends this rank no further message, so end the waits of this rank's other
            // threads here.
            group.ending.fail(&Error::PeerLost { rank: self.rank });
        }
        drop(mail);
        self.connection.mail.1.notify_all();
        if let Some(error) = reason {
            self.explain(&error);
        }
        let frame = Frame::Leave { group: self.group, clean };
        if !clean {
            return self.part(frame);
        }
        // An error is ignored, because sending fails only if the hub or relay is gone.
        let sent = self.connection.send(frame, Instant::now() + PARTING);
        if sent.is_ok() && self.group == 0 {
            // The threads of hub and relay send their last messages before this process may end.
            // These threads wait for no answers, and wait only briefly for a stopped process.
            for carrier in std::mem::take(&mut *lock(&self.connection.carriers)) {
                if carrier.join().is_err() {
                    tracing::error!("the thread of the hub or relay panicked");
                }
            }
        }
    }
}

/// Tells the hub at once why this rank gives up, so that other ranks need not wait for it. If all ranks
/// have met already, the hub serves the world until rank 0 leaves; so this rank also leaves.
pub(super) fn withdraw(socket: &Socket, error: Error) {
    let mut outbox = Outbox::default();
    outbox.push(Frame::GaveUp { group: 0, error }.pack());
    outbox.push(Frame::Leave { group: 0, clean: true }.pack());
    let _ = outbox.flush(socket);
}

impl Drop for Processes {
    fn drop(&mut self) {
        let mut mail = lock(&self.connection.mail.0);
        let done = mail.groups.remove(&self.group);
        drop(mail);
        // The watchers are dropped only after the lock is released.
        drop(done);
    }
}
