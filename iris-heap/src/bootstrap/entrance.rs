//! Entrance of rank 0 or of a relay: accepts connections of other ranks at a listening Unix socket,
//! and refuses connections that do not belong to the world.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::process::Pid;

use super::frames::Frame;
use super::peer::Peer;
use super::rendezvous::{Door, Place, check_user};
use super::socket::{FailedCall, Jam, cannot_meet, is_own};
use crate::error::{Error, Result};
use crate::system::peer_of;

/// Largest number of connections that have not said hello. This limit also bounds the memory of
/// these connections in the accepting process: 64 times 8 KiB.
const STRANGERS: usize = 64;
/// Largest number of connections that are accepted in a row before messages of accepted connections
/// are read.
const IN_A_ROW: usize = 256;
/// Time after which a connection that has sent no hello may be dropped to make room for another
/// connection.
const SILENCE: Duration = Duration::from_secs(1);
/// Time for which the accepting process may lack file descriptors for new connections before it
/// gives up.
const NO_DESCRIPTOR: Duration = Duration::from_secs(2);

/// Listening socket of a world that is being formed, and the connections that have not said hello.
pub(super) struct Entrance {
    pub(super) place: Place,
    door: Door,
    /// Rank of this process.
    own: usize,
    /// Whether each rank is known, by rank: it has said hello, or it is this process's own.
    known: Vec<bool>,
    /// Connections that have not said hello, oldest first.
    strangers: Vec<Peer>,
    /// Failure of accepting connections; `None` after a success.
    jam: Option<Jam>,
}

/// Result of reading the first frame of a connection.
enum Greeting {
    Rank(usize),
    Stranger(Error),
    Wrong(Error),
}

impl Entrance {
    /// Makes the entrance to a world of `size` ranks; `own` is the rank of this process, which
    /// sends no hello.
    pub(super) fn new(place: Place, door: Door, size: usize, own: usize) -> Entrance {
        let known = (0..size).map(|rank| rank == own).collect();
        Entrance { place, door, own, known, strangers: Vec::new(), jam: None }
    }

    pub(super) fn accept(&mut self) {
        if self.is_crowded() {
            self.make_room();
        }
        let taken = self.try_accept();
        Jam::follow(&mut self.jam, taken);
    }

    /// Accepts new connections. Fails only if a system call of this process fails; the error has
    /// the name of that call.
    fn try_accept(&mut self) -> Result<(), FailedCall> {
        for _ in 0..IN_A_ROW {
            if self.is_crowded() {
                return Ok(());
            }
            let socket = match self.door.accept() {
                Ok(socket) => socket,
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if is_own(&e) => return Err(("accept", e)),
                // The connection was aborted by its peer.
                Err(_) => continue,
            };
            match check_user(&socket) {
                Ok(()) => self.strangers.push(Peer::new(socket).map_err(|e| ("ioctl", e))?),
                Err(e) if is_own(&e) => return Err(("getsockopt", e)),
                Err(problem) => tracing::warn!(%problem, "a connection is refused"),
            }
            if self.is_crowded() {
                self.make_room();
            }
        }
        Ok(())
    }

    /// Drops silent connections, to make room for others. A process of this library has at most one
    /// connection without a hello. So if processes have several silent connections, the process
    /// with the most of them keeps only its newest one. If no process has several, connections are
    /// dropped that have been silent for [`SILENCE`].
    fn make_room(&mut self) {
        let mut silent: HashMap<Pid, Vec<usize>> = HashMap::new();
        for (at, stranger) in self.strangers.iter().enumerate() {
            // A connection whose hello has arrived but has not been read is not silent.
            if !stranger.is_ready()
                && let Some(process) = peer_of(&stranger.socket).ok().and_then(|it| it.process)
            {
                silent.entry(process).or_default().push(at);
            }
        }
        let most = silent.into_values().max_by_key(Vec::len).unwrap_or_default();
        if let [older @ .., _] = &most[..]
            && !older.is_empty()
        {
            let mut at = 0..;
            self.strangers.retain(|_| at.next().is_none_or(|at| !older.contains(&at)));
        } else {
            self.strangers.retain(|it| it.is_ready() || it.since.elapsed() < SILENCE);
        }
    }

    /// Ranks of the world that have not said hello here. In a world over several hosts, these ranks
    /// may be on other nodes.
    pub(super) fn missing(&self) -> Vec<usize> {
        (0..self.known.len()).filter(|&rank| !self.known[rank]).collect()
    }

    pub(super) fn size(&self) -> usize {
        self.known.len()
    }

    /// Whether the number of connections without a hello has reached its limit.
    pub(super) fn is_crowded(&self) -> bool {
        self.strangers.len() >= STRANGERS
    }

    /// Whether this process currently cannot accept a new connection, for example because it has no
    /// file descriptor.
    pub(super) fn is_full(&self) -> bool {
        self.jam.is_some()
    }

    /// Returns an error if this process cannot accept connections and waiting does not help: the
    /// cause is permanent, has lasted too long, or no time is left (`last`).
    pub(super) fn check_full(&self, last: bool) -> Result<()> {
        // If a call after accept failed, the connection was closed and its rank is lost, so waiting
        // does not help.
        let last = last || self.jam.as_ref().is_some_and(|jam| jam.call != "accept");
        Jam::check(&self.jam, (self.own, &self.place), NO_DESCRIPTOR, last)
    }

    /// Reads messages of connections without a hello, and calls `arrived` for each rank that says
    /// hello, with its connection and further messages. If a message makes the world impossible,
    /// the remaining connections are still read and kept, so that they can be sent the reason.
    pub(super) fn hear(
        &mut self,
        mut arrived: impl FnMut(usize, Peer, Vec<Frame>) -> Result<()>,
    ) -> Result<()> {
        let mut outcome = Ok(());
        for mut stranger in std::mem::take(&mut self.strangers) {
            let mut frames = stranger.read_if_ready().into_iter();
            match frames.next() {
                None if stranger.gone => {
                    if let Some(fault @ Error::System { .. }) = &stranger.fault {
                        let error = cannot_meet(self.own, &self.place, fault.to_string());
                        outcome = outcome.and(Err(error));
                    }
                }
                None => self.strangers.push(stranger),
                Some(frame) => match self.greet(frame) {
                    Greeting::Rank(rank) => {
                        stranger.inbox.trust();
                        let heard = arrived(rank, stranger, frames.collect());
                        outcome = outcome.and(heard);
                    }
                    Greeting::Stranger(error) => {
                        tracing::warn!(%error, "a connection is refused");
                        stranger.send(Frame::Refuse { error }.pack());
                    }
                    Greeting::Wrong(error) => {
                        self.strangers.push(stranger);
                        outcome = outcome.and(Err(error));
                    }
                },
            }
        }
        outcome
    }

    /// Decides whether the sender of `frame` belongs to this world, and as which rank. If the
    /// process belongs to another job, or its first frame is no hello, only this process is
    /// refused. If a process of this job contradicts the world in its hello, the whole world is
    /// impossible.
    fn greet(&mut self, frame: Frame) -> Greeting {
        let Frame::Hello { job, rank, size } = frame else {
            return Greeting::Stranger(
                self.place.error("a process says something else than hello"),
            );
        };
        let all = self.known.len();
        let differing = || differing((self.own, &self.place.job, all), (rank, &job, size));
        if job != self.place.job {
            return Greeting::Stranger(self.place.error(differing()));
        }
        let problem = match size == all {
            true => match arrive(&mut self.known, rank) {
                Ok(()) => return Greeting::Rank(rank),
                Err(problem) => problem,
            },
            false => differing(),
        };
        Greeting::Wrong(self.place.error(problem))
    }

    /// Listening socket, if a new connection can be accepted now.
    pub(super) fn listener(&self) -> Option<BorrowedFd<'_>> {
        let can_accept = !self.is_full() && !self.is_crowded();
        can_accept.then(|| self.door.listener.as_fd())
    }

    /// Connections that have not said hello.
    pub(super) fn strangers(&self) -> impl Iterator<Item = &Peer> {
        self.strangers.iter()
    }

    /// Sends the reason `error` to all connections without a hello, including connections not yet
    /// accepted.
    fn refuse(&mut self, error: &Error) {
        let refusal = Frame::Refuse { error: error.clone() }.pack();
        for mut stranger in self.strangers.drain(..) {
            stranger.send(refusal.clone());
        }
        // Further connections may be waiting in the listener's queue.
        for _ in 0..2 * STRANGERS {
            let Ok(socket) = self.door.accept() else { break };
            if check_user(&socket).is_ok()
                && let Ok(mut stranger) = Peer::new(socket)
            {
                stranger.send(refusal.clone());
            }
        }
    }

    /// Closes the entrance to a world that is complete.
    pub(super) fn close(mut self) {
        self.place.clear(None);
        let size = self.known.len();
        let complete = format!(
            "the world of {size} ranks is complete without this process: another process may have \
             taken its place"
        );
        let complete = self.place.error(complete);
        self.refuse(&complete);
    }

    /// Closes the entrance to a world that cannot be formed because of `error`, and leaves `error`
    /// in a note file for processes that come later.
    pub(super) fn give_up(mut self, error: &Error) {
        self.refuse(error);
        self.door.make_room();
        self.place.clear(Some(error));
        // Processes that connected before the socket was unlinked, and were not accepted, are
        // refused here.
        self.refuse(error);
    }
}

/// Marks `rank` as arrived, in the list `known` of a world's ranks. Fails, with a text of the
/// problem, if the rank has arrived before or does not exist.
pub(super) fn arrive(known: &mut [bool], rank: usize) -> Result<(), String> {
    let last = known.len() - 1;
    match known.get_mut(rank) {
        Some(known) if !*known => {
            *known = true;
            Ok(())
        }
        Some(_) => Err(format!("two processes have rank {rank}")),
        None => Err(format!("a process has rank {rank}, expected 0 to {last}")),
    }
}

/// Lists the differences between the job and number of ranks of this process, rank `own`, and those
/// in the hello of `rank`, each with both values.
pub(super) fn differing(
    (own, job, size): (usize, &str, usize),
    (rank, their_job, their_size): (usize, &str, usize),
) -> String {
    let pair = |term: &str, ours: &str, theirs: &str| {
        format!("{term} is {ours} on rank {own}, {theirs} on rank {rank}")
    };
    let [ours, theirs] = [job, their_job].map(|job| job.split([' ', ',']).collect::<Vec<_>>());
    let mut words: Vec<_> = ours.iter().zip(&theirs).filter(|(a, b)| a != b).collect();
    let variable = |word: &str| word.split_once('=').map(|(name, _)| name.to_owned());
    let named = |(a, b): &(&&str, &&str)| variable(a).is_some() && variable(a) == variable(b);
    // Single variables are shown only if every differing word is a variable with the same name on
    // both ranks. Otherwise (the parent process differs, for example) both identities are shown
    // whole.
    if ours.len() != theirs.len() || !words.iter().all(named) {
        words = vec![(&job, &their_job)];
    }
    let mut terms: Vec<_> = words.into_iter().map(|(a, b)| pair("the job", a, b)).collect();
    if size != their_size {
        terms.push(pair("the size of the world", &size.to_string(), &their_size.to_string()));
    }
    format!("{}: expected one job and one size, on all ranks", terms.join("; "))
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    use super::super::gather::tests::refusal;
    use super::*;

    /// Tests that a process whose hello has not been read when the world is complete is told the
    /// likely cause.
    #[test]
    fn a_process_that_a_complete_world_does_not_know_is_told() {
        let temp = tempfile::tempdir().unwrap();
        let place = Place::at(temp.path().join("iris"), true, "job".into());
        let entrance = Entrance::new(place.clone(), place.listen().unwrap(), 1, 0);
        let deadline = Instant::now() + Duration::from_secs(60);
        let late = place.connect(1, 2, deadline, None).unwrap();
        entrance.close();
        let told = refusal(&late).unwrap().to_string();
        assert!(told.contains("another process may have taken its place"), "{told}");
    }

    /// Tests that a rank at once returns an error of its own if its listening socket can accept no
    /// connection. A socket that does not listen stands for a socket on which the system forbids
    /// the call.
    #[test]
    fn a_socket_that_never_accepts_is_named_with_the_call_and_the_rank() {
        let temp = tempfile::tempdir().unwrap();
        let place = Place::at(temp.path().join("iris"), true, "job".into());
        let mut door = place.listen().unwrap();
        door.listener = super::super::held::pair().unwrap().0.cast::<OwnedFd>().cast();
        let mut entrance = Entrance::new(place, door, 4, 3);
        entrance.accept();
        let told = entrance.check_full(false).unwrap_err().to_string();
        assert!(told.starts_with("rank 3 failed in rendezvous at "), "{told}");
        assert!(told.contains("accept: Invalid argument (os error 22)"), "{told}");
    }

    #[test]
    fn each_term_that_differs_is_shown_with_both_values() {
        let text = |job: &str, size| differing((2, "A=1 B=2 C=3, world 0", 4), (1, job, size));
        assert_eq!(
            text("A=1 B=7 C=8, world 0", 3),
            "the job is B=2 on rank 2, B=7 on rank 1; the job is C=3 on rank 2, C=8 on rank 1; the size of \
             the world is 4 on rank 2, 3 on rank 1: expected one job and one size, on all ranks"
        );
        for job in ["A=1 B=2 C=3, world 1", "A=1 B=2", "unique id 7"] {
            let whole = format!("the job is A=1 B=2 C=3, world 0 on rank 2, {job} on rank 1: ");
            assert!(text(job, 4).starts_with(&whole), "{}", text(job, 4));
        }
    }

    /// Tests that a rank is heard although a process holds more silent connections than the
    /// entrance keeps. The test limits the number of passes and not the time.
    #[test]
    fn silent_connections_of_one_process_keep_no_rank_out() {
        let temp = tempfile::tempdir().unwrap();
        let place = Place::at(temp.path().join("iris"), true, "job".into());
        let mut entrance = Entrance::new(place.clone(), place.listen().unwrap(), 2, 0);
        let socket = std::fs::read_dir(temp.path().join("iris")).unwrap().next().unwrap();
        let connect = || UnixStream::connect(socket.as_ref().unwrap().path()).unwrap();
        let mut silent: Vec<UnixStream> = Vec::new();
        let mut arrived = Vec::new();
        for _ in 0..16 {
            silent.extend((0..STRANGERS).map(|_| connect()));
            entrance.accept();
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        let rank = place.connect(1, 2, deadline, None).unwrap();
        for _ in 0..3 {
            entrance.accept();
            let heard = entrance.hear(|rank, peer, _| {
                arrived.push((rank, peer));
                Ok(())
            });
            heard.unwrap();
        }
        assert_eq!(arrived.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [1]);
        drop((silent, rank));
    }
}
