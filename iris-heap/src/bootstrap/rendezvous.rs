//! Rendezvous of a job's processes: one Unix socket in a folder that only this user can enter.
//!
//! The socket's name is derived from the job's identity, which its processes share and other jobs
//! do not have. Rank 0 listens, the others connect, and when all have arrived the socket is
//! unlinked. A socket without a listener was left by a process that died. Rank 0 unlinks such a
//! socket, under a lock of the folder. The other ranks keep trying until their deadline, unless the
//! dead process is rank 0 of their own run.
//!
//! Files, and `/proc`, tell a rank before its deadline that waiting is useless:
//!
//! - If its world cannot be formed, rank 0 leaves a note beside the socket. The note applies to
//!   processes that already exist. A process that starts within two seconds after the note may
//!   belong to the same run or to the next; it applies the note to itself if no rank 0 appears for
//!   five seconds.
//! - Each rank has a file, which it keeps locked until it has met the others. The system releases
//!   the lock when the process ends. A rank that gives up releases the lock itself, and leaves its
//!   reason in the file.
//! - A launcher's children in `/proc` show which of a job's processes have ended.
//! - If the process of a rank has ended, a launcher of this library leaves `lost-RANK` in the folder
//!   that it made for the job.
//!
//! This file is long because all of its code concerns one folder and the files in it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{FlockOperation, flock};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::Bootstrap;
use super::frames::{Frame, JOB_NAME, error_of_bytes, error_to_bytes};
use super::held::Held;
use super::launcher_env::Get;
use super::mailbox::{Outbox, crowded};
use super::notice::MeetingWait;
use super::presence::{Presence, is_at};
use super::process::{own_began, parent_command, up};
use super::starter::{self, Siblings, Starter};
use crate::encoding::hash;
use crate::env;
use crate::error::{Error, Result};
use crate::limits::explain;
use crate::root_error::told;
use crate::system::peer_of;
use crate::util::{check_file_size, lock};

/// Largest length of a Unix socket's path, without the terminating zero.
const LONGEST: usize = 107;

/// Time limit for taking the folder's lock, which its holder keeps only briefly unless it is
/// stopped.
const LOCKED: Duration = Duration::from_secs(10);
/// Age at which a note file, which tells why a world failed, is removed from the folder.
const NOTE: Duration = Duration::from_secs(3600);
/// Interval between checks for a rank whose process has ended.
pub(super) const LOOK: Duration = Duration::from_millis(50);
/// Maximum time for which a rank waits for the end of the rank that failed, before it ends itself.
const TURN: Duration = Duration::from_secs(1);
/// Time that starting all ranks of a run may take, because they are started one after the other. An
/// event up to this long before the start of this process may still concern its run.
const STARTS: Duration = Duration::from_secs(2);
/// Name that errors give the step in which the ranks meet.
const MEETING: &str = "meeting the other ranks";
/// Waiting time after which this process attributes an event from shortly before its own start
/// ([`STARTS`]) to its own run. Until then the event may belong to an earlier run, and rank 0 of
/// this run may still appear.
const ANOTHER: Duration = Duration::from_secs(5);
/// Resolution of file times and process start times, used as tolerance when they are compared.
const TICK: Duration = Duration::from_millis(10);

/// Meeting place of a job: folder and socket.
#[derive(Clone)]
pub(crate) struct Place {
    folder: PathBuf,
    socket: PathBuf,
    /// Identity of the job, from which the socket's name is derived; used in messages and compared
    /// between ranks.
    pub(crate) job: String,
    /// Whether the folder was made by this library, which then removes it when it is empty.
    ours: bool,
    /// Whether a launcher of this library may have made the folder; such a launcher reports ended
    /// ranks in it.
    launched: bool,
    /// Launcher that starts all ranks on this host; `None` if none does.
    starter: Option<&'static Starter>,
    /// World of which the ranks at this place are a part; it may report a lost rank earlier than
    /// files do.
    world: Option<Arc<dyn Bootstrap>>,
    /// Hint for the user if a rank waits at this place although the other ranks may be on other
    /// hosts.
    hint: Option<String>,
}

impl Place {
    /// Makes the meeting place of the job with identity `job`. The folder is `IRIS_RENDEZVOUS` if
    /// that is set, else a folder of the user within the system's temporary folder. `launched`
    /// tells whether a launcher of this library may have made that folder for the ranks.
    ///
    /// # Errors
    /// [`Error::Env`]; [`Error::Invalid`] for a name that no hello can carry.
    pub(crate) fn new(job: String, launched: bool) -> Result<Place> {
        if job.len() > JOB_NAME {
            let start: String = job.chars().take(40).collect();
            let found = format!("{} bytes ({start}...)", job.len());
            let expected = format!(
                "at most {JOB_NAME} bytes: it is made of the launcher's variables or IRIS_RENDEZVOUS, and of \
                 IRIS_NODE where ranks meet over the network"
            );
            return Err(Error::invalid("length of the job's name", found, expected));
        }
        let (folder, ours) = match env::read("IRIS_RENDEZVOUS")? {
            None => {
                let user = rustix::process::geteuid().as_raw();
                (std::env::temp_dir().join(format!("iris-{user}")), true)
            }
            Some(text) if text.starts_with('/') => (PathBuf::from(text), false),
            Some(text) => return Err(env::wrong("IRIS_RENDEZVOUS", &text, "an absolute path")),
        };
        Ok(Place { launched: launched && !ours, ..Place::at(folder, ours, job) })
    }

    /// Makes this the meeting place of all ranks that a launcher has started. If `other_host` is
    /// true (a variable that was set by hand names another host as rank 0's), the text of this
    /// place gets a hint.
    pub(crate) fn of_launched(self, other_host: bool) -> Result<Place> {
        let hint = if other_host { hosts_hint(&env::read)? } else { None };
        Ok(Place { starter: Starter::of_this_process(), hint, ..self })
    }

    /// Makes this the meeting place of some ranks of a world whose ranks have all met already.
    pub(super) fn within(self, world: Arc<dyn Bootstrap>) -> Place {
        Place { world: Some(world), ..self }
    }

    pub(super) fn at(folder: PathBuf, ours: bool, job: String) -> Place {
        let socket = folder.join(format!("{:032x}", hash(&[job.as_bytes()])));
        Place { folder, socket, job, ours, launched: false, starter: None, world: None, hint: None }
    }

    pub(crate) fn error(&self, problem: impl Into<String>) -> Error {
        Error::Rendezvous { place: self.to_string(), problem: problem.into() }
    }

    /// Makes the folder, and in it a file that shows the other ranks that this process is waiting
    /// for them. Dropping the returned guard removes the file, and records in this process the time
    /// of the visit.
    ///
    /// Every rank makes the folder if it is missing, and a file in it, so that every rank reports an
    /// error if that is impossible.
    pub(crate) fn visit(&self, rank: usize) -> Result<Visit<'_>> {
        // Look for the launcher's process now, because the launcher may end as soon as other ranks
        // see this process.
        Starter::of_this_process();
        self.make_folder()?;
        // Check the owner first: nothing is written into a folder of another user, who could have
        // put links there.
        let presence = match self.has_folder()? {
            true => Presence::show(self.presence(rank)),
            // Another process has removed the empty folder meanwhile.
            false => Err(ErrorKind::NotFound.into()),
        };
        use ErrorKind::{PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
        let (presence, no_room) = match presence {
            Ok(presence) => (Some(presence), None),
            Err(e) => match e.kind() {
                PermissionDenied | QuotaExceeded | ReadOnlyFilesystem | StorageFull => {
                    let error = self.folder_error("making a file in the folder", &e);
                    // Rank 0 must fail, because in a folder without room or permission for a file it can
                    // neither listen nor leave a note that it cannot listen.
                    if rank == 0 {
                        return Err(error);
                    }
                    (None, Some(error))
                }
                _ => {
                    tracing::debug!(error = %e, "the others cannot see whether this process lives");
                    (None, None)
                }
            },
        };
        Ok(Visit { place: self, rank, presence, no_room, started: Instant::now() })
    }

    /// Path of the file that `rank` keeps locked until it has met the other ranks.
    fn presence(&self, rank: usize) -> PathBuf {
        self.socket.with_extension(format!("rank{rank}"))
    }

    fn make_folder(&self) -> Result<()> {
        match DirBuilder::new().mode(0o700).create(&self.folder) {
            Ok(()) => Ok(()),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(()),
            Err(e) => Err(self.folder_error("making the folder", &e)),
        }
    }

    /// Error of `step` in the folder; the text names the variables by which the user can choose
    /// another folder.
    fn folder_error(&self, step: &str, error: &std::io::Error) -> Error {
        let (folder, why, variables) = (self.folder.display(), explain(error), self.variables());
        self.error(format!("{step} {folder}: {why}; or set {variables} to another folder"))
    }

    /// Variables by which the user can choose another folder.
    fn variables(&self) -> &'static str {
        match self.ours {
            true => "TMPDIR or IRIS_RENDEZVOUS",
            false => "IRIS_RENDEZVOUS, or TMPDIR of the launcher that set it,",
        }
    }

    /// Removes the folder if this library made it and it is empty, that is, if no other job meets
    /// there.
    fn remove_folder(&self) {
        if self.ours {
            let _ = fs::remove_dir(&self.folder);
        }
    }

    /// Removes the folder as [`Place::remove_folder`] does, unless another process has locked it to
    /// make a file there.
    fn leave_folder(&self) {
        if let Ok(folder) = Held::new(|| File::open(&self.folder))
            && flock(&folder, FlockOperation::NonBlockingLockExclusive).is_ok()
            && is_at(&folder, &self.folder)
        {
            self.remove_folder();
        }
    }

    /// Whether an event at time `at` (since boot) concerns the run of this process, which has
    /// waited since `started`.
    fn concerns(&self, at: Duration, started: Instant) -> bool {
        let visited = lock(&VISITED).get(&self.socket).copied();
        let began = own_began();
        // If this process has met others here before, it has handled all events before that
        // meeting.
        visited.is_none_or(|visited| at > visited)
            && (at > began + TICK || at + STARTS > began && started.elapsed() >= ANOTHER)
    }

    /// Listens, as rank 0. On failure a note tells the other ranks the reason. No note is written
    /// if another process listens at this meeting place, because the ranks of that process would
    /// read the note.
    pub(crate) fn listen(&self) -> Result<Door> {
        match self.bind(0) {
            Ok(Some(door)) => Ok(door),
            Ok(None) => Err(self.error(
                "another process listens there: is the rank 0 given to two processes, or the same id or \
                 MASTER_PORT to two jobs?",
            )),
            Err(error) => {
                self.note_or_warn(&told(0, MEETING, &error));
                Err(error)
            }
        }
    }

    /// Returns `outcome`, the result of a step that `rank` takes before it waits at this meeting
    /// place. If the step has failed, tells the other ranks the reason, unless another process
    /// listens here as rank 0.
    pub(crate) fn prepared<T>(&self, rank: usize, outcome: Result<T>) -> Result<T> {
        match &outcome {
            Err(_) if rank > 0 => match self.visit(rank) {
                Ok(visit) => visit.end(outcome),
                Err(_) => outcome,
            },
            Err(error) => {
                if let Ok(Some(_door)) = self.bind(0) {
                    self.clear(Some(&told(0, MEETING, error)));
                }
                outcome
            }
            Ok(_) => outcome,
        }
    }

    /// Binds the socket and listens, as `rank`; `None` if another process is listening there.
    pub(super) fn bind(&self, rank: usize) -> Result<Option<Door>> {
        let _lock = self.lock()?;
        match self.short(&self.socket)?.connect() {
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
                self.unlink_stale()?;
            }
            // A listener whose queue is full (`WouldBlock`) counts as listening, too.
            Err(e) if e.kind() != ErrorKind::WouldBlock => {
                return Err(self.error(format!("looking for a listener: {}", explain(&e))));
            }
            _ => return Ok(None),
        }
        // Remove the note that an earlier world may have left.
        let _ = fs::remove_file(self.note());
        let failed = |e| self.error(format!("listening: {}", explain(&e)));
        let spare = || File::open(&self.folder).map_err(failed);
        let reserve = vec![spare()?, spare()?];
        // The socket gets its final name only when it listens, because a socket that refuses
        // connections means a dead process. Processes that connect still see the first name, which
        // contains the rank ([`listener_rank`]).
        let part = self.socket.with_extension(format!("part{rank}"));
        let _ = fs::remove_file(&part);
        let path = self.short(&part)?;
        let listener = Held::new(|| UnixListener::bind(path.as_path())).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        fs::rename(&part, &self.socket).map_err(failed)?;
        Ok(Some(Door { listener, reserve }))
    }

    /// Removes a file at the socket's path: a socket of a dead process, or a dangling link, which
    /// occupies the name although its target does not exist.
    fn unlink_stale(&self) -> Result<()> {
        if fs::symlink_metadata(&self.socket).is_err() {
            return Ok(());
        }
        tracing::info!(socket = %self.socket.display(), "unlinking a stale socket");
        fs::remove_file(&self.socket)
            .map_err(|e| self.error(format!("unlinking a stale socket: {e}")))
    }

    /// Connects to rank 0 and says hello, as a rank other than 0. Tries until `deadline`. If
    /// `visit` is given, it also fails once a world has met without this process.
    pub(crate) fn connect(
        &self,
        rank: usize,
        size: usize,
        deadline: Instant,
        visit: Option<&Visit<'_>>,
    ) -> Result<Held<UnixStream>> {
        let mut watch = Watch::new();
        let started = watch.started;
        let mut meeting = MeetingWait::new(rank, size, deadline);
        let mut pause = Duration::from_millis(1);
        loop {
            // The socket's time is read before the attempt to connect, because rank 0 of this run
            // may meanwhile replace the socket of an earlier run.
            let bound = self.bound();
            let died = match self.try_connect(rank, size)? {
                Tried::Connected(socket) => return Ok(socket),
                Tried::Absent => false,
                // A socket that refuses connections had a listener before, whose process has ended.
                // If the socket is of this run, rank 0 is lost.
                Tried::Refused => bound.is_some_and(|at| self.concerns(at, started)),
            };
            let failure = || visit.and_then(Visit::failure).or_else(starter::lost);
            if let Some(error) = self.came_to_nothing(Some(started)).or_else(failure) {
                return Err(error);
            }
            if died {
                return Err(Error::PeerLost { rank: 0 });
            }
            let others: Vec<_> = (0..size).filter(|&r| r != rank).collect();
            if let Some(error) = self.lost(&others, &mut watch) {
                // Rank 0 may have ended because another rank ended; then its note names that rank.
                return Err(self.note_to_those_who_wait(started).unwrap_or(error));
            }
            meeting.check(&[0], self, None).inspect_err(|_| {
                tracing::error!(socket = %self.socket.display(), job = %self.job, "nobody listens");
            })?;
            std::thread::sleep(pause);
            pause = (pause * 2).min(LOOK);
        }
    }

    /// Connects to the rank that listens here, if one does, and says hello as `rank` of `size`;
    /// returns the connection and the listener's rank.
    pub(super) fn knock(
        &self,
        rank: usize,
        size: usize,
    ) -> Result<Option<(Held<UnixStream>, usize)>> {
        Ok(match self.try_connect(rank, size)? {
            Tried::Connected(socket) => {
                let failed = |e| self.error(format!("getpeername: {}", explain(&e)));
                listener_rank(&socket).map_err(failed)?.map(|rank| (socket, rank))
            }
            Tried::Absent | Tried::Refused => None,
        })
    }

    /// Takes the turn: a lock file of this place that one process at a time can hold. Only its
    /// holder tries to reach rank 0 for its node. `None` if another process holds the turn.
    pub(super) fn take_turn(&self) -> Result<Option<Turn<'_>>> {
        let failed = |e| self.error(format!("taking turns: {}", explain(&e)));
        self.make_folder()?;
        let path = self.turn();
        let file = match self.check_folder().and_then(|()| Held::new(|| File::create(&path))) {
            Ok(file) => file,
            // Another process has removed the empty folder meanwhile.
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(failed(e)),
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // The previous holder removes the file when its turn ends, so this process may have
            // locked a removed file.
            Ok(()) if is_at(&file, &path) => Ok(Some(Turn { place: self, _file: file })),
            Ok(()) | Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(failed(e.into())),
        }
    }

    /// Path of the lock file that [`Place::take_turn`] takes.
    fn turn(&self) -> PathBuf {
        self.socket.with_extension("turn")
    }

    /// Connects and says hello.
    fn try_connect(&self, rank: usize, size: usize) -> Result<Tried> {
        if !self.has_folder()? {
            return Ok(Tried::Absent);
        }
        let _greeting = lock(&GREETING);
        match self.short(&self.socket)?.connect() {
            Ok(socket) => {
                check_user(&socket).map_err(|e| {
                    self.error(match e.raw_os_error() {
                        Some(_) => format!("getsockopt: {}", explain(&e)),
                        None => e.to_string(),
                    })
                })?;
                let hello = Frame::Hello { job: self.job.clone(), rank, size };
                let mut outbox = Outbox::default();
                outbox.push(hello.pack());
                let limited = socket.set_write_timeout(Some(LOCKED));
                let failed = |e| self.error(format!("setsockopt: {}", explain(&e)));
                limited.map_err(failed)?;
                match outbox.flush(&socket) {
                    // The system has no room for the message at this moment.
                    Err(e) if crowded(&e) => Ok(Tried::Absent),
                    // The listener has closed its end, and may have sent the reason before.
                    Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(Tried::Connected(socket)),
                    Err(e) => Err(self.error(format!("sendmsg: {}", explain(&e)))),
                    Ok(()) => Ok(Tried::Connected(socket)),
                }
            }
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => Ok(Tried::Refused),
            // The attempt failed because there is no socket yet, or because the queue of its
            // listener is full.
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::WouldBlock) => {
                Ok(Tried::Absent)
            }
            Err(e) => Err(self.error(format!("connecting: {}", explain(&e)))),
        }
    }

    /// Error of the first of `ranks` that has ended or given up, as reported by the launcher, by
    /// the rank's own file or by `/proc`. If the ranks are a part of a world that has lost a rank,
    /// the error of that world, with the world's numbers.
    pub(crate) fn lost(&self, ranks: &[usize], watch: &mut Watch) -> Option<Error> {
        if let Some(error) = self.world.as_ref().and_then(|world| world.lost()) {
            return Some(error);
        }
        let mut ended = Vec::new();
        for rank in self.shown_ranks().into_iter().filter(|rank| ranks.contains(rank)) {
            let file = self.presence(rank);
            match Presence::is_alive(&file) {
                Some(true) => drop(watch.alive.insert(rank)),
                Some(false)
                    if watch.alive.contains(&rank)
                        || since_boot(&file).is_some_and(|at| self.concerns(at, watch.started)) =>
                {
                    ended.push(rank)
                }
                _ => {}
            }
        }
        let named = self.named_by_launcher(ranks).or_else(|| ended.into_iter().min());
        let rank = named.or_else(|| {
            let unseen: Vec<_> =
                ranks.iter().filter(|it| !watch.alive.contains(it)).copied().collect();
            watch.siblings.ended(self.starter?, &unseen)
        })?;
        let reason = fs::read(self.presence(rank)).ok().and_then(|text| error_of_bytes(&text).ok());
        Some(reason.unwrap_or(Error::PeerLost { rank }))
    }

    /// Ranks that have a file at this place.
    fn shown_ranks(&self) -> Vec<usize> {
        let rank = |entry: fs::DirEntry| {
            let path = entry.path();
            let end = path.extension()?.to_str()?.strip_prefix("rank")?;
            (path.file_stem() == self.socket.file_name()).then(|| end.parse().ok())?
        };
        fs::read_dir(&self.folder).into_iter().flatten().flatten().filter_map(rank).collect()
    }

    /// Returns the rank of `ranks` whose process ended first, as reported by the launcher: a rank's
    /// report contains its position in the order of ends.
    fn named_by_launcher(&self, ranks: &[usize]) -> Option<usize> {
        if !self.launched {
            return None;
        }
        let entries = fs::read_dir(&self.folder).ok()?.flatten();
        let lost = |entry: fs::DirEntry| -> Option<(u64, usize)> {
            let rank = entry.file_name().to_str()?.strip_prefix("lost-")?.parse().ok()?;
            let order = fs::read_to_string(entry.path()).ok()?;
            Some((order.trim().parse().unwrap_or(u64::MAX), rank))
        };
        let first = entries.filter_map(lost).filter(|(_, rank)| ranks.contains(rank)).min();
        first.map(|(_, rank)| rank)
    }

    /// Time since boot at which a rank 0, of this run or an earlier one, made the socket; `None` if
    /// there is no socket.
    fn bound(&self) -> Option<Duration> {
        let is_socket = fs::symlink_metadata(&self.socket).is_ok_and(|m| m.file_type().is_socket());
        since_boot(&self.socket).filter(|_| is_socket)
    }

    /// Reason why the world of this run's rank 0 could not be formed; `None` if there is no note of
    /// this run. `started` is the time at which this process began to wait, or `None` if it was
    /// connected to rank 0, in which case any note belongs to this run.
    pub(crate) fn came_to_nothing(&self, started: Option<Instant>) -> Option<Error> {
        let note = fs::read(self.note()).ok()?;
        let (at, error) = note.split_first_chunk::<8>()?;
        let at = Duration::from_nanos(u64::from_le_bytes(*at));
        let ours = started.is_none_or(|started| self.concerns(at, started));
        ours.then(|| error_of_bytes(error).ok()).flatten()
    }

    /// Reason in the note of this run's rank 0, for a process that has waited here since `started`.
    /// In a launcher's folder every note belongs to this run.
    pub(super) fn note_to_those_who_wait(&self, started: Instant) -> Option<Error> {
        self.came_to_nothing((!self.launched).then_some(started))
    }

    /// Replaces the `error` of a rank that was connected by its cause, if the note has it: rank 0
    /// may have closed its end before this rank received a message with the cause.
    pub(super) fn explained(&self, error: Error) -> Error {
        match error {
            Error::PeerLost { rank: 0 } => self.came_to_nothing(None).unwrap_or(error),
            error => error,
        }
    }

    /// Path of the note of a failed world.
    fn note(&self) -> PathBuf {
        self.socket.with_extension("over")
    }

    fn note_or_warn(&self, error: &Error) {
        if let Err(error) = self.leave_note(error) {
            tracing::warn!(note = %self.note().display(), %error, "cannot leave a note");
        }
    }

    fn leave_note(&self, error: &Error) -> std::io::Result<()> {
        let now = u64::try_from(up().as_nanos()).unwrap_or(u64::MAX);
        let text = [&now.to_le_bytes()[..], &error_to_bytes(error)].concat();
        check_file_size("the note", text.len() as u64).map_err(std::io::Error::other)?;
        // Write the note under another name first, so that a reader never sees a part of it.
        let part = self.socket.with_extension("part");
        self.check_folder()?;
        fs::write(&part, text)?;
        fs::rename(part, self.note())
    }

    /// Removes the files of this world's ranks, expired notes, and old files of killed processes.
    /// The caller holds the lock of the folder, so the folder has been checked.
    fn sweep(&self) {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            let path = entry.path();
            // Skip other files: the folder may be one that the program has named.
            let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
            if stem.len() != 32 || !stem.bytes().all(|b| b.is_ascii_hexdigit()) {
                continue;
            }
            let is = |start: &str| {
                path.extension().is_some_and(|e| e.to_string_lossy().starts_with(start))
            };
            let old = |m: fs::Metadata| Some(m.modified().ok()?.elapsed().ok()? >= NOTE);
            let is_old = || entry.metadata().ok().and_then(old).unwrap_or(false);
            let ours = path.file_stem() == self.socket.file_name();
            let of_a_rank = is("rank") || is("part");
            // Socket of a rank 0 that was killed.
            let is_dead = || {
                let is_socket = entry.file_type().is_ok_and(|kind| kind.is_socket());
                let refused = |short: ShortPath| {
                    let error = short.connect().err();
                    error.is_some_and(|e| e.kind() == ErrorKind::ConnectionRefused)
                };
                path.extension().is_none()
                    && is_socket
                    && is_old()
                    && self.short(&path).is_ok_and(refused)
            };
            // An old file of a rank is kept while it is locked, because its rank may still wait and
            // watches the file. A turn file in use is never old, because each attempt to take the
            // turn truncates it.
            let is_left = of_a_rank && is_old() && Presence::is_alive(&path) != Some(true);
            let is_past = (is("over") || is("turn")) && is_old();
            if of_a_rank && ours || is_left || is_past || is_dead() {
                let _ = fs::remove_file(path);
            }
        }
    }

    /// Unlinks the socket. Also removes the folder if this library made it and it is empty; a
    /// process that waits for the folder's lock then notices that the folder was removed. If the
    /// world failed with `error`, leaves a note.
    pub(crate) fn clear(&self, error: Option<&Error>) {
        let Ok(_lock) = self.lock() else {
            return;
        };
        if let Some(error) = error {
            self.note_or_warn(error);
        }
        if let Err(e) = fs::remove_file(&self.socket)
            && e.kind() != ErrorKind::NotFound
        {
            tracing::warn!(socket = %self.socket.display(), error = %e, "cannot unlink the socket");
        }
        self.sweep();
        self.remove_folder();
    }

    /// Makes the folder if necessary and locks it until the returned file is dropped.
    fn lock(&self) -> Result<Held<File>> {
        let until = Instant::now() + LOCKED;
        loop {
            self.make_folder()?;
            let opened = self.check_folder().and_then(|()| Held::new(|| File::open(&self.folder)));
            let file = match opened {
                Ok(file) => file,
                // Another process has removed the folder since this process made it, so make it
                // again.
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                Err(e) => return Err(self.error(explain(&e))),
            };
            match flock(file.as_fd(), FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(2));
                    continue;
                }
                Err(e) => return Err(self.error(format!("locking the folder: {e}"))),
            }
            if is_at(&file, &self.folder) {
                return Ok(file);
            }
        }
    }

    /// Whether the folder exists; an error if it is not private to this user.
    fn has_folder(&self) -> Result<bool> {
        match self.check_folder() {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
            Err(e) => Err(self.error(e.to_string())),
        }
    }

    /// Checks that the folder is a directory, belongs to this user, and cannot be accessed by other
    /// users.
    fn check_folder(&self) -> std::io::Result<()> {
        let found = fs::symlink_metadata(&self.folder)?;
        let user = rustix::process::geteuid().as_raw();
        let problem = if !found.is_dir() {
            "is no folder".into()
        } else if found.uid() != user {
            format!("belongs to user {}, expected {user}", found.uid())
        } else if found.mode() & 0o077 != 0 {
            format!("has mode {:o}, expected 700", found.mode() & 0o7777)
        } else {
            return Ok(());
        };
        let (folder, variables) = (self.folder.display(), self.variables());
        let text = format!("the folder {folder} {problem}; set {variables} to another folder");
        Err(std::io::Error::new(ErrorKind::PermissionDenied, text))
    }

    /// Path of a socket in the folder; goes through `/proc/self/fd` if the path is too long for a
    /// socket.
    fn short(&self, socket: &Path) -> Result<ShortPath> {
        if socket.as_os_str().len() <= LONGEST {
            return Ok(ShortPath { path: socket.into(), _folder: None });
        }
        use std::os::fd::AsRawFd;
        let folder = match File::open(&self.folder) {
            Ok(folder) => folder,
            // If the folder does not exist, the returned path must not exist, either.
            Err(e) if e.kind() == ErrorKind::NotFound => {
                return Ok(ShortPath { path: "/proc/self/fd/none".into(), _folder: None });
            }
            Err(e) => return Err(self.error(e.to_string())),
        };
        let name = socket.file_name().unwrap_or_default();
        let path = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
        Ok(ShortPath { path, _folder: Some(folder) })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}", self.socket.display(), self.job)?;
        if let Some(command) = parent_command(&self.job) {
            write!(
                f,
                "; the parent is `{command}`: where the ranks of a job are not started by one process, set \
                 MASTER_PORT to the same number for all"
            )?;
        }
        if let Some(hint) = &self.hint {
            write!(f, "; {hint}")?;
        }
        f.write_str(")")
    }
}

/// Hint for ranks whose variables were set by hand and name another host as that of rank 0: such a
/// variable alone does not say that there are several hosts.
fn hosts_hint(get: Get<'_>) -> Result<Option<String>> {
    let (Some(host), Some(_), None) = (get("MASTER_ADDR")?, get("RANK")?, get("LOCAL_WORLD_SIZE")?)
    else {
        return Ok(None);
    };
    Ok(Some(format!(
        "on this host: if rank 0 is on another one, {host}, set LOCAL_WORLD_SIZE to the number of \
         ranks on this one"
    )))
}

struct ShortPath {
    path: PathBuf,
    _folder: Option<File>,
}

impl ShortPath {
    fn as_path(&self) -> &Path {
        &self.path
    }

    fn connect(&self) -> std::io::Result<Held<UnixStream>> {
        connect(&SocketAddrUnix::new(&self.path)?)
    }
}

/// Lock that a thread holds from its connection to its hello, so that a process has at most one
/// connection that has not said hello. An entrance may drop further connections of the process.
static GREETING: Mutex<()> = Mutex::new(());

/// Time since boot at which this process last ended its wait at a meeting place, successful or not,
/// by socket path. Only places with files are kept, because a place without files has no event from
/// before that time.
static VISITED: Mutex<BTreeMap<PathBuf, Duration>> = Mutex::new(BTreeMap::new());

/// Removes from `visited` the meeting places that have no file.
fn forget(visited: &mut BTreeMap<PathBuf, Duration>) {
    // Names of the files of each folder, without extensions; `None` if they cannot be read now.
    let mut folders: BTreeMap<PathBuf, Option<BTreeSet<OsString>>> = BTreeMap::new();
    visited.retain(|socket, _| {
        let folder = socket.parent().unwrap_or(Path::new("/"));
        let names = folders.entry(folder.into()).or_insert_with(|| match fs::read_dir(folder) {
            Ok(files) => {
                let name = |file: fs::DirEntry| Some(file.path().file_stem()?.to_owned());
                Some(files.flatten().filter_map(name).collect())
            }
            Err(e) => (e.kind() == ErrorKind::NotFound).then(BTreeSet::new),
        });
        names.as_ref().zip(socket.file_stem()).is_none_or(|(names, name)| names.contains(name))
    });
}

/// Observations of a process that waits for other ranks.
pub(crate) struct Watch {
    started: Instant,
    /// Ranks that were alive during the wait, so that their end concerns this process.
    alive: BTreeSet<usize>,
    siblings: Siblings,
}

impl Watch {
    /// Begins to wait.
    pub(crate) fn new() -> Watch {
        Watch { started: Instant::now(), alive: BTreeSet::new(), siblings: Siblings::default() }
    }
}

/// Guard of a meeting in progress; see [`Place::visit`].
pub(crate) struct Visit<'a> {
    place: &'a Place,
    rank: usize,
    presence: Option<Presence>,
    /// Error of making the rank's file, if the folder had no room for it.
    no_room: Option<Error>,
    started: Instant,
}

impl Visit<'_> {
    /// Error because of which this rank must not wait longer. Either a world has met or failed
    /// without it, or rank 0 has not appeared soon and this rank has no file by which others could
    /// notice its end. Another process with the same rank is no error here, because rank 0 reports
    /// the two to all ranks.
    pub(super) fn failure(&self) -> Option<Error> {
        if let Some(error) = &self.no_room {
            return (self.started.elapsed() >= STARTS).then(|| error.clone());
        }
        self.presence.as_ref().filter(|presence| presence.is_removed())?;
        // A world that failed has left its note before it removed the files of its ranks.
        Some(self.place.came_to_nothing(None).unwrap_or_else(|| {
            let rank = self.rank;
            self.place.error(format!(
                "a world has met or failed there while this process waited as rank {rank}, and has removed its \
                 file: another process may have taken its place"
            ))
        }))
    }

    /// Ends this rank's wait at the meeting place with its `outcome`. An error is told to the other
    /// ranks by this rank's file; rank 0's errors are told by a note instead.
    pub(crate) fn end<T>(mut self, outcome: Result<T>) -> Result<T> {
        let outcome = outcome.map_err(starter::cause);
        if let Err(error) = &outcome
            && self.rank > 0
            && let Some(presence) = self.presence.take()
        {
            let text = error_to_bytes(&told(self.rank, MEETING, error));
            let fits = check_file_size("the reason", text.len() as u64).is_ok();
            presence.leave(if fits { &text } else { &[] });
            // Rank 0, or the relay of the node, leaves a note and then removes the ranks' files. If
            // there is a note, that removal may have come before this file was written, so remove
            // the file here.
            if self.place.came_to_nothing(Some(self.started)).is_some() {
                presence.remove();
            }
        }
        // A launcher reports ranks in the order in which they end, so this rank waits for the end
        // of the rank that failed or was lost.
        if let Err(Error::PeerFailed { rank, .. } | Error::PeerLost { rank }) = &outcome
            && self.place.launched
            && *rank != self.rank
        {
            let since = Instant::now();
            while self.place.named_by_launcher(&[*rank]).is_none() && since.elapsed() < TURN {
                std::thread::sleep(LOOK);
            }
        }
        outcome
    }
}

impl Drop for Visit<'_> {
    fn drop(&mut self) {
        if let Some(presence) = self.presence.take() {
            presence.remove();
        }
        let mut visited = lock(&VISITED);
        visited.insert(self.place.socket.clone(), up());
        forget(&mut visited);
        drop(visited);
        self.place.leave_folder();
    }
}

/// Turn that a process has taken with [`Place::take_turn`]; ends when this guard is dropped.
pub(super) struct Turn<'a> {
    place: &'a Place,
    _file: Held<File>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.place.turn());
        self.place.leave_folder();
    }
}

/// Listening socket of rank 0, or of a relay.
#[derive(Debug)]
pub(crate) struct Door {
    pub(super) listener: Held<UnixListener>,
    /// Descriptors held in reserve for writing the note and locking the folder, in case the process
    /// runs out of descriptors.
    reserve: Vec<File>,
}

impl Door {
    /// Accepts a connection; does not wait.
    pub(super) fn accept(&self) -> std::io::Result<Held<UnixStream>> {
        Held::new(|| Ok(self.listener.accept()?.0))
    }

    /// Closes the reserved descriptors, so that a note can be written although the process has no
    /// other descriptor left.
    pub(super) fn make_room(&mut self) {
        self.reserve.clear();
    }
}

/// Result of an attempt to connect.
enum Tried {
    Connected(Held<UnixStream>),
    /// No socket exists yet.
    Absent,
    /// A socket exists, but no process listens.
    Refused,
}

/// Connects without blocking. If the listener's queue is full, returns `WouldBlock`; a blocking
/// call would wait for a stopped rank 0.
pub(crate) fn connect(address: &SocketAddrUnix) -> std::io::Result<Held<UnixStream>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (unix, stream) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = Held::new(|| rustix::net::socket_with(unix, stream, flags, None))?;
    rustix::net::connect(&socket, address)?;
    let socket: Held<UnixStream> = socket.cast();
    socket.set_nonblocking(false)?;
    Ok(socket)
}

/// Rank that listened at the other end when `socket` was connected, from the name that the
/// listening socket had when it was bound.
fn listener_rank(socket: &UnixStream) -> std::io::Result<Option<usize>> {
    let address = socket.peer_addr()?;
    let name = address.as_pathname().and_then(|path| path.extension()?.to_str());
    Ok(name.and_then(|name| name.strip_prefix("part")?.parse().ok()))
}

/// Time of a file's last change, since boot; `None` if there is no such file.
fn since_boot(path: &Path) -> Option<Duration> {
    let changed = fs::symlink_metadata(path).and_then(|m| m.modified()).ok()?;
    Some(up().saturating_sub(SystemTime::now().duration_since(changed).ok()?))
}

/// Checks that the process at the other end belongs to this user. The error has an OS error code
/// only if the system cannot tell the user.
pub(crate) fn check_user(socket: &UnixStream) -> std::io::Result<()> {
    let peer = peer_of(socket)?;
    let user = rustix::process::geteuid().as_raw();
    match peer.user == user {
        true => Ok(()),
        false => {
            let text =
                format!("the process at the other end is of user {}, expected {user}", peer.user);
            Err(std::io::Error::other(text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tcp::address::Address;
    use super::*;
    use crate::util::host_name;
    use std::os::unix::fs::PermissionsExt;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    /// Sets the time of a file's last change to a second after 1970.
    fn make_old(path: &Path) {
        use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};
        let time = Timespec { tv_sec: 1, tv_nsec: 0 };
        let times = Timestamps { last_access: time, last_modification: time };
        utimensat(CWD, path, &times, AtFlags::empty()).unwrap();
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let temp = tempfile::tempdir().unwrap();
        let place = Place::at(temp.path().join("iris"), true, "job".into());
        assert!(matches!(place.connect(1, 2, soon(), None), Err(Error::Absent { .. })));
        drop(place.listen().unwrap());
        assert!(place.socket.exists(), "a dead process leaves its socket");
        let lost = place.connect(1, 2, soon(), None).unwrap_err();
        assert!(matches!(lost, Error::PeerLost { rank: 0 }), "{lost}");
        // A socket of an earlier run does not concern this run.
        make_old(&place.socket);
        assert!(matches!(place.connect(1, 2, soon(), None), Err(Error::Absent { .. })));
        let listener = place.listen().unwrap();
        assert!(place.connect(1, 2, soon(), None).is_ok());
        let e = place.listen().unwrap_err().to_string();
        assert!(e.contains("another process listens") && e.contains("job"), "{e}");
        drop(listener);
        let other = Place::at(temp.path().join("iris"), true, "other".into());
        let listener = other.listen().unwrap();
        place.clear(None);
        assert!(!place.socket.exists() && other.connect(1, 2, soon(), None).is_ok());
        drop(listener);
        other.clear(None);
        assert!(!temp.path().join("iris").exists(), "nothing is left");
    }

    /// Tests that the next world removes old sockets of killed processes, and no socket that is in use
    /// or new.
    #[test]
    fn old_sockets_of_killed_processes_are_removed() {
        let temp = tempfile::tempdir().unwrap();
        let place = |job: &str| Place::at(temp.path().join("iris"), true, job.into());
        let [old, new, used] = ["old", "new", "used"].map(place);
        drop(old.listen().unwrap());
        drop(new.listen().unwrap());
        let listener = used.listen().unwrap();
        // Files of the program; one of them has a name like a socket's.
        let folder = temp.path().join("iris");
        let files =
            ["notes", "lost-1", "0123456789abcdef0123456789abcdef"].map(|it| folder.join(it));
        files.iter().for_each(|file| fs::write(file, "mine").unwrap());
        files.iter().chain([&old.socket, &used.socket]).for_each(|path| make_old(path));
        place("next").clear(None);
        assert_eq!([&old, &new, &used].map(|place| place.socket.exists()), [false, true, true]);
        assert!(files.iter().all(|file| file.exists()));
        drop(listener);
    }

    #[test]
    fn a_folder_that_others_may_enter_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let place = Place::at(temp.path().into(), false, "job".into());
        fs::set_permissions(temp.path(), fs::Permissions::from_mode(0o755)).unwrap();
        // Links to a file of this user, under the names that would be written.
        let file = temp.path().join("file");
        fs::write(&file, "mine").unwrap();
        let names = ["part".to_owned(), format!("part-rank0-{}", std::process::id())];
        let links = names.map(|name| place.socket.with_extension(name));
        links.iter().for_each(|link| std::os::unix::fs::symlink(&file, link).unwrap());
        let refused = [
            place.listen().unwrap_err(),
            place.connect(1, 2, soon(), None).unwrap_err(),
            place.visit(0).map(drop).unwrap_err(),
        ];
        let told = "mode 755, expected 700; set IRIS_RENDEZVOUS, or TMPDIR of the launcher that set it, to another folder";
        for e in refused {
            assert!(e.to_string().contains(told), "{e}");
        }
        place.clear(Some(&Error::PeerLost { rank: 1 }));
        assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
        assert!(links.iter().all(|link| link.is_symlink()));
        links.iter().for_each(|link| fs::remove_file(link).unwrap());
        fs::set_permissions(temp.path(), fs::Permissions::from_mode(0o700)).unwrap();
        place.listen().unwrap();
        place.clear(None);
        assert!(temp.path().exists(), "a given folder is not ours to remove");
    }

    #[test]
    fn of_several_that_ended_the_first_is_lost() {
        let temp = tempfile::tempdir().unwrap();
        fs::set_permissions(temp.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let place = Place::at(temp.path().into(), false, "job".into());
        let place = Place { launched: true, ..place };
        let soon = || Instant::now() + Duration::from_secs(20);
        // Rank 2 ended first, then rank 0. While there is no note, the error must name the first of
        // the awaited ranks that ended. When there is a note, the error must name the rank in the
        // note.
        fs::write(temp.path().join("lost-2"), "0").unwrap();
        fs::write(temp.path().join("lost-0"), "1").unwrap();
        fs::write(temp.path().join("lost-3.part"), "").unwrap();
        let lost = place.connect(1, 4, soon(), None).unwrap_err();
        assert!(matches!(lost, Error::PeerLost { rank: 2 }), "{lost}");
        let lost = |ranks: &[usize]| place.lost(ranks, &mut Watch::new());
        assert!(matches!(lost(&[0, 3]), Some(Error::PeerLost { rank: 0 })) && lost(&[3]).is_none());
        place.clear(Some(&Error::PeerLost { rank: 3 }));
        let lost = place.connect(1, 4, soon(), None).unwrap_err();
        assert!(matches!(lost, Error::PeerLost { rank: 3 }), "{lost}");
    }

    #[test]
    fn one_of_several_has_the_turn_and_a_listener_is_known_by_its_rank() {
        let temp = tempfile::tempdir().unwrap();
        for name in ["iris".into(), "x".repeat(120)] {
            let place = Place::at(temp.path().join(name), true, "job".into());
            let turn = place.take_turn().unwrap().expect("nobody has it");
            assert!(place.take_turn().unwrap().is_none(), "a second holder");
            assert!(place.knock(1, 2).unwrap().is_none());
            let door = place.bind(7).unwrap().expect("nobody listens");
            assert!(place.bind(8).unwrap().is_none(), "a second listener");
            let (_socket, rank) = place.knock(1, 2).unwrap().expect("a listener");
            assert_eq!(rank, 7);
            drop(turn);
            drop(place.take_turn().unwrap().expect("the turn is free"));
            drop(door);
            place.clear(None);
            assert!(!place.folder.exists(), "nothing is left");
        }
    }

    #[test]
    fn old_files_of_killed_processes_are_removed() {
        let temp = tempfile::tempdir().unwrap();
        let [place, other] =
            ["job", "other"].map(|job| Place::at(temp.path().join("iris"), true, job.to_string()));
        std::mem::forget(other.take_turn().unwrap().expect("nobody has it"));
        place.listen().unwrap();
        place.clear(None);
        assert!(other.turn().exists(), "a new turn file is kept");
        let old = SystemTime::now() - 2 * NOTE;
        File::options().write(true).open(other.turn()).unwrap().set_modified(old).unwrap();
        // Another rank asks for the turn while a living process holds it. The attempt truncates the
        // turn file, so the file is not old any more.
        assert!(other.take_turn().unwrap().is_none());
        place.clear(None);
        assert!(other.turn().exists(), "a turn file in use is kept");
        File::options().write(true).open(other.turn()).unwrap().set_modified(old).unwrap();
        place.clear(None);
        assert!(!place.folder.exists(), "nothing is left");
    }

    /// Tests that files of other programs, even with names like a meeting's files, stay in a folder
    /// that the program has named.
    #[test]
    fn old_files_of_other_programs_stay() {
        let temp = tempfile::tempdir().unwrap();
        let place = Place::at(temp.path().join("iris"), false, "job".into());
        place.make_folder().unwrap();
        let files = ["film.part", "game.over", "my.turn", "chess.rank1"];
        for name in files {
            let file = File::create(place.folder.join(name)).unwrap();
            file.set_modified(SystemTime::now() - 2 * NOTE).unwrap();
        }
        place.listen().unwrap();
        place.clear(None);
        let gone: Vec<_> = files.iter().filter(|name| !place.folder.join(name).exists()).collect();
        assert!(gone.is_empty(), "{gone:?}");
    }

    #[test]
    fn a_long_path_is_no_obstacle() {
        let temp = tempfile::tempdir().unwrap();
        let place = Place::at(temp.path().join("x".repeat(120)), true, "job".into());
        assert!(place.connect(1, 2, soon(), None).is_err());
        let _listener = place.listen().unwrap();
        assert!(place.connect(1, 2, soon(), None).is_ok());
        place.clear(None);
    }

    /// Tests that a rank whose peer has ended is not told the reason of an earlier run.
    #[test]
    fn a_note_of_an_earlier_run_explains_no_loss() {
        let temp = tempfile::tempdir().unwrap();
        let place = Place::at(temp.path().join("iris"), true, "job".into());
        place.clear(Some(&place.error("an earlier run")));
        // Ending a visit makes this process treat the note as older than its run.
        drop(place.visit(1).unwrap());
        std::thread::sleep(2 * TICK);
        fs::write(place.presence(2), "").unwrap();
        let told = place.connect(1, 3, Instant::now() + Duration::from_secs(60), None).unwrap_err();
        assert!(matches!(told, Error::PeerLost { rank: 2 }), "{told}");
    }

    /// Tests that the end of a rank which was seen alive is noticed although its file is older than
    /// this process, and that a rank which gives up is named with its reason.
    #[test]
    fn a_rank_that_was_seen_alive_is_lost_when_it_ends() {
        let temp = tempfile::tempdir().unwrap();
        let place = Place::at(temp.path().join("iris"), true, "job".into());
        let [crashed, failed] = [1, 2].map(|rank| place.visit(rank).unwrap());
        let mut watch = Watch::new();
        [1, 2].iter().for_each(|&rank| make_old(&place.presence(rank)));
        assert!(place.lost(&[1, 2], &mut watch).is_none());
        // The system releases the lock in the same way when the process ends.
        crashed.presence.as_ref().unwrap().leave(&[]);
        make_old(&place.presence(1));
        assert!(matches!(place.lost(&[1, 2], &mut watch), Some(Error::PeerLost { rank: 1 })));
        assert!(place.lost(&[1, 2], &mut Watch::new()).is_none(), "the file of an earlier run");
        assert!(failed.end(Err::<(), _>(place.error("no more"))).is_err());
        let told = place.lost(&[2], &mut watch).unwrap().to_string();
        assert!(told.contains("rank 2 failed in meeting") && told.contains("no more"), "{told}");
        place.clear(None);
        drop(crashed);
        assert!(!place.folder.exists(), "nothing is left");
    }

    /// Tests that a process remembers that it was at a meeting place only while the place has
    /// files.
    #[test]
    fn a_place_without_files_is_forgotten() {
        let temp = tempfile::tempdir().unwrap();
        let place = |job: &str| Place::at(temp.path().join("iris"), true, job.into());
        let is_known = |place: &Place| lock(&VISITED).contains_key(&place.socket);
        let [met, failed, next] = ["met", "failed", "next"].map(place);
        failed.clear(Some(&failed.error("too late")));
        [&met, &failed].iter().for_each(|place| drop(place.visit(1).unwrap()));
        assert_eq!([&met, &failed].map(is_known), [false, true]);
        fs::remove_file(failed.note()).unwrap();
        drop(next.visit(1).unwrap());
        assert_eq!([&met, &failed, &next].map(is_known), [false; 3]);
    }

    /// Tests that a rank which waits is told of a world that has met without it.
    #[test]
    fn a_world_that_met_without_a_waiting_rank_is_told_to_it() {
        let temp = tempfile::tempdir().unwrap();
        let [place, other] =
            ["job", "other"].map(|job| Place::at(temp.path().join("iris"), true, job.to_string()));
        let [visit, waits_long] = [place.visit(1).unwrap(), other.visit(1).unwrap()];
        make_old(&other.presence(1));
        drop(place.listen().unwrap());
        place.clear(None);
        let told = place.connect(1, 2, soon(), Some(&visit)).unwrap_err().to_string();
        assert!(
            told.contains("a world has met or failed there") && told.contains("as rank 1"),
            "{told}"
        );
        assert!(waits_long.failure().is_none(), "only files of ended processes are old");
    }

    #[test]
    fn another_host_of_rank_0_is_hinted_at() {
        let hint = |host: &str, local_size: Option<&str>| {
            let get = |name: &str| {
                Ok(match name {
                    "RANK" => Some("1".into()),
                    "MASTER_ADDR" => Some(host.into()),
                    _ => local_size.map(String::from),
                })
            };
            let other = Address::of_variable("MASTER_ADDR", host, 0).unwrap().other_host();
            other.and_then(|_| hosts_hint(&get).unwrap())
        };
        assert!(hint("10.1.2.3", None).unwrap().contains("10.1.2.3, set LOCAL_WORLD_SIZE"));
        for (host, local_size) in [("10.1.2.3", Some("1")), ("127.0.0.1", None), ("::1", None)] {
            assert_eq!(hint(host, local_size), None);
        }
        assert_eq!(hint(&host_name(), None), None);
    }
}
