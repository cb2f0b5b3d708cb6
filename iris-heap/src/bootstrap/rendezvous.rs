//! Where the processes of a job meet: one Unix socket in a folder that only this user can enter.
//!
//! Its name is made from what the processes of one job share and those of another do not. Rank 0
//! listens, the others connect, and once all have come the socket is unlinked. A socket without a
//! listener is left from a process that died: rank 0 unlinks it, under a lock of the folder, and
//! the others try again until their deadline.

use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::env;
use crate::error::{Error, Result};
use crate::wire::hash;

/// The longest path of a Unix socket, without its end.
const LONGEST: usize = 107;

/// When to say that one still waits: after a hundredth of the time there is, 6 s if nothing else is
/// set, and again whenever the wait has doubled.
pub(crate) struct Patience {
    started: Instant,
    pub(crate) until: Instant,
}

impl Patience {
    pub(crate) fn new(started: Instant, deadline: Instant) -> Patience {
        Patience { started, until: started + (deadline - started) / 100 }
    }

    /// How long it has been, if it is time to say so.
    pub(crate) fn is_over(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let waited = now - self.started;
        (now >= self.until).then(|| {
            self.until = now + waited;
            waited
        })
    }
}

/// A place to meet.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    folder: PathBuf,
    socket: PathBuf,
    /// What the name was made from, for messages and for comparison between ranks.
    pub(crate) job: String,
    /// Whether the folder is ours to remove when it is empty.
    ours: bool,
}

impl Place {
    /// For the job that `job` describes. `IRIS_RENDEZVOUS` gives the folder, otherwise it is one of
    /// the user's in the temporary folder.
    pub(crate) fn new(job: String) -> Result<Place> {
        let (folder, ours) = match env::read("IRIS_RENDEZVOUS")? {
            None => {
                let user = rustix::process::geteuid().as_raw();
                (std::env::temp_dir().join(format!("iris-{user}")), true)
            }
            Some(text) if text.starts_with('/') => (PathBuf::from(text), false),
            Some(text) => return Err(env::wrong("IRIS_RENDEZVOUS", &text, "an absolute path")),
        };
        Ok(Place::at(folder, ours, job))
    }

    fn at(folder: PathBuf, ours: bool, job: String) -> Place {
        let socket = folder.join(format!("{:032x}", hash(&[job.as_bytes()])));
        Place { folder, socket, job, ours }
    }

    pub(crate) fn error(&self, problem: impl Into<String>) -> Error {
        Error::Rendezvous { place: self.to_string(), problem: problem.into() }
    }

    /// Listens: rank 0.
    pub(crate) fn listen(&self) -> Result<UnixListener> {
        let _lock = self.lock()?;
        match UnixStream::connect(self.short()?.as_path()) {
            Ok(_) => {
                return Err(self.error(
                    "another process listens there: is the rank 0 given to two processes, or the \
                     same MASTER_PORT to two jobs?",
                ));
            }
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => {
                tracing::info!(socket = %self.socket.display(), "unlinking a stale socket");
                fs::remove_file(&self.socket)
                    .map_err(|e| self.error(format!("unlinking a stale socket: {e}")))?;
            }
            Err(e) => return Err(self.error(format!("looking for a listener: {e}"))),
        }
        let listener = UnixListener::bind(self.short()?.as_path())
            .map_err(|e| self.error(format!("binding: {e}")))?;
        listener.set_nonblocking(true).map_err(|e| self.error(e.to_string()))?;
        Ok(listener)
    }

    /// Connects: all ranks but 0. Tries until `deadline`.
    pub(crate) fn connect(&self, size: usize, deadline: Instant) -> Result<UnixStream> {
        let started = Instant::now();
        let mut patience = Patience::new(started, deadline);
        let mut pause = Duration::from_millis(1);
        loop {
            match self.try_connect() {
                Ok(Some(socket)) => return Ok(socket),
                Ok(None) => {}
                Err(e) => return Err(e),
            }
            if Instant::now() >= deadline {
                tracing::error!(socket = %self.socket.display(), job = %self.job, "nobody listens");
                return Err(Error::Absent {
                    ranks: vec![0],
                    what: format!("a rank of a world of {size} at {self}"),
                    waited: started.elapsed(),
                });
            }
            if let Some(waited) = patience.is_over() {
                tracing::warn!(missing = 0, size, ?waited, place = %self, "waiting for rank 0");
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    /// `None`: not yet.
    fn try_connect(&self) -> Result<Option<UnixStream>> {
        match self.check_folder() {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(self.error(e.to_string())),
        }
        match UnixStream::connect(self.short()?.as_path()) {
            Ok(socket) => {
                check_user(&socket).map_err(|e| self.error(e))?;
                Ok(Some(socket))
            }
            // No socket yet; a stale one; or one whose queue is full.
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::WouldBlock
                ) =>
            {
                Ok(None)
            }
            Err(e) => Err(self.error(format!("connecting: {e}"))),
        }
    }

    /// Unlinks the socket, and the folder if it is ours and empty. Whoever waits for the lock then
    /// finds that the folder is another one.
    pub(crate) fn clear(&self) {
        let Ok(_lock) = self.lock() else {
            return;
        };
        if let Err(e) = fs::remove_file(&self.socket)
            && e.kind() != ErrorKind::NotFound
        {
            tracing::warn!(socket = %self.socket.display(), error = %e, "cannot unlink the socket");
        }
        if self.ours {
            // It is not empty while other jobs meet there.
            let _ = fs::remove_dir(&self.folder);
        }
    }

    /// Makes the folder if need be and locks it, until the file is dropped.
    fn lock(&self) -> Result<File> {
        loop {
            match DirBuilder::new().mode(0o700).create(&self.folder) {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => {
                    let folder = self.folder.display();
                    return Err(self.error(format!("making the folder {folder}: {e}")));
                }
            }
            let opened = self.check_folder().and_then(|()| File::open(&self.folder));
            let file = match opened {
                Ok(file) => file,
                // Somebody removed it between the two.
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                Err(e) => return Err(self.error(e.to_string())),
            };
            flock(file.as_fd(), FlockOperation::LockExclusive)
                .map_err(|e| self.error(format!("locking the folder: {e}")))?;
            let mine = file.metadata().map_err(|e| self.error(e.to_string()))?;
            match fs::metadata(&self.folder) {
                Ok(there) if (there.dev(), there.ino()) == (mine.dev(), mine.ino()) => {
                    return Ok(file);
                }
                _ => continue,
            }
        }
    }

    /// The folder is a folder, ours, and closed to others.
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
        let text = format!("the folder {} {problem}", self.folder.display());
        Err(std::io::Error::new(ErrorKind::PermissionDenied, text))
    }

    /// The socket's path, by way of an open folder where it is too long for a socket.
    fn short(&self) -> Result<ShortPath> {
        if self.socket.as_os_str().len() <= LONGEST {
            return Ok(ShortPath { path: self.socket.clone(), _folder: None });
        }
        use std::os::fd::AsRawFd;
        let folder = match File::open(&self.folder) {
            Ok(folder) => folder,
            // A path that is not there either way.
            Err(e) if e.kind() == ErrorKind::NotFound => {
                return Ok(ShortPath { path: "/proc/self/fd/none".into(), _folder: None });
            }
            Err(e) => return Err(self.error(e.to_string())),
        };
        let name = self.socket.file_name().unwrap_or_default();
        let path = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
        Ok(ShortPath { path, _folder: Some(folder) })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.socket.display(), self.job)
    }
}

struct ShortPath {
    path: PathBuf,
    _folder: Option<File>,
}

impl ShortPath {
    fn as_path(&self) -> &Path {
        &self.path
    }
}

/// The process at the other end is of this user.
pub(crate) fn check_user(socket: &UnixStream) -> Result<(), String> {
    let peer = rustix::net::sockopt::socket_peercred(socket)
        .map_err(|e| format!("asking who is at the other end: {e}"))?;
    let user = rustix::process::geteuid();
    if peer.uid == user {
        return Ok(());
    }
    Err(format!(
        "the process at the other end is of user {}, expected {}",
        peer.uid.as_raw(),
        user.as_raw()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let temp = tempfile::tempdir().unwrap();
        let place = Place::at(temp.path().join("iris"), true, "job".into());
        assert!(matches!(place.connect(2, soon()), Err(Error::Absent { .. })));
        drop(place.listen().unwrap());
        assert!(place.socket.exists(), "a dead process leaves its socket");
        assert!(place.connect(2, soon()).is_err());
        let listener = place.listen().unwrap();
        assert!(place.connect(2, soon()).is_ok());
        let e = place.listen().unwrap_err().to_string();
        assert!(e.contains("another process listens") && e.contains("job"), "{e}");
        drop(listener);
        let other = Place::at(temp.path().join("iris"), true, "other".into());
        let listener = other.listen().unwrap();
        place.clear();
        assert!(!place.socket.exists() && other.connect(2, soon()).is_ok());
        drop(listener);
        other.clear();
        assert!(!temp.path().join("iris").exists(), "nothing is left");
    }

    #[test]
    fn a_folder_that_others_may_enter_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let place = Place::at(temp.path().into(), false, "job".into());
        fs::set_permissions(temp.path(), fs::Permissions::from_mode(0o755)).unwrap();
        for e in [place.listen().unwrap_err(), place.connect(2, soon()).unwrap_err()] {
            assert!(e.to_string().contains("mode 755, expected 700"), "{e}");
        }
        fs::set_permissions(temp.path(), fs::Permissions::from_mode(0o700)).unwrap();
        place.listen().unwrap();
        place.clear();
        assert!(temp.path().exists(), "a given folder is not ours to remove");
    }

    #[test]
    fn a_long_path_is_no_obstacle() {
        let temp = tempfile::tempdir().unwrap();
        let place = Place::at(temp.path().join("x".repeat(120)), true, "job".into());
        assert!(place.connect(2, soon()).is_err());
        let _listener = place.listen().unwrap();
        assert!(place.connect(2, soon()).is_ok());
        place.clear();
    }
}
