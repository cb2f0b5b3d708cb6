//! Processes of ranks: ids, start times, and whether a process is stopped.

use std::fmt;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::{ClockId, clock_gettime};

use crate::error::{Error, Result, list_texts};
use crate::util::unsupported;

/// Process of a rank on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessId {
    /// Process id, valid in the pid namespace `namespace`.
    pid: u32,
    /// Inode of the pid namespace, because a process id is unique only within its namespace.
    namespace: u64,
}

impl ProcessId {
    pub(crate) fn own() -> ProcessId {
        let namespace = std::fs::metadata("/proc/self/ns/pid").map_or(0, |file| file.ino());
        ProcessId { pid: std::process::id(), namespace }
    }

    /// Encodes the id in bytes, which [`ProcessId::from_bytes`] decodes.
    pub(crate) fn to_bytes(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[..4].copy_from_slice(&self.pid.to_le_bytes());
        bytes[4..].copy_from_slice(&self.namespace.to_le_bytes());
        bytes
    }

    /// Decodes the bytes that another rank has sent; `None` if their number is wrong.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<ProcessId> {
        let (pid, namespace) = bytes.split_first_chunk::<4>()?;
        let namespace = u64::from_le_bytes(namespace.try_into().ok()?);
        Some(ProcessId { pid: u32::from_le_bytes(*pid), namespace })
    }

    /// Descriptor of the process, which is readable once the process has ended and its files are
    /// closed. The process must be alive.
    pub(crate) fn open(&self) -> Result<OwnedFd> {
        if self.namespace != ProcessId::own().namespace {
            let why =
                format!("process {} is in another PID namespace; expected one for all", self.pid);
            return Err(unsupported("watching a process", &why));
        }
        let failed = |e| Error::system(format!("pidfd_open({})", self.pid), e);
        let pid = Pid::from_raw(self.pid as i32).ok_or_else(|| failed(Errno::SRCH))?;
        pidfd_open(pid, PidfdFlags::empty()).map_err(failed)
    }

    /// Whether the process is stopped by a signal or a debugger; false if that cannot be
    /// determined.
    pub fn is_stopped(&self) -> bool {
        if self.namespace != ProcessId::own().namespace {
            return false;
        }
        stat(self.pid).is_some_and(|fields| ["T", "t"].contains(&fields[0].as_str()))
    }
}

/// Prefix of a job's identity if the ranks' common parent process identifies the job.
pub(super) const BY_PARENT: &str = "parent process ";

/// Name of the parent process's command, such as `bash` or `timeout`, for messages about a job that
/// is identified by its parent process; `None` for other jobs, or if the system does not show the
/// name. The name is no part of the job's identity, because a process may change its name between
/// the starts of two ranks.
pub(super) fn parent_command(job: &str) -> Option<String> {
    let pid = rustix::process::getppid().filter(|_| job.contains(BY_PARENT))?;
    program(pid.as_raw_nonzero())
}

impl fmt::Display for ProcessId {
    /// Writes `process 4242` and, for a stopped process, the command that continues it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pid = self.pid;
        write!(f, "process {pid}")?;
        if self.is_stopped() {
            write!(f, ", which is stopped: `kill -CONT {pid}` continues it")?;
        }
        Ok(())
    }
}

/// Lists ranks as text, such as `1 (process 4242) and 3 (process 4244)`; `named` returns each
/// rank's number and, if known, its process.
pub(crate) fn list_processes(
    ranks: &[usize],
    named: impl Fn(usize) -> (usize, Option<ProcessId>),
) -> String {
    let text = |&rank: &usize| match named(rank) {
        (number, Some(process)) => format!("{number} ({process})"),
        (number, None) => number.to_string(),
    };
    list_texts(ranks.iter().map(text).collect())
}

/// Start time of a process since boot; `pid` is a number or `self`. `None` if there is no such
/// process.
pub(crate) fn began(pid: &str) -> Option<Duration> {
    began_of(&stat(pid)?)
}

/// Start time since boot, from the fields of [`stat`].
pub(super) fn began_of(fields: &[String]) -> Option<Duration> {
    let ticks: u64 = fields.get(19)?.parse().ok()?;
    let second = rustix::param::clock_ticks_per_second();
    Some(Duration::from_secs(ticks / second) + Duration::from_secs(ticks % second) / second as u32)
}

/// Whether a process ignores SIGHUP, from the fields of [`stat`].
pub(super) fn ignores_hangup(fields: &[String]) -> bool {
    let ignored = fields.get(30).and_then(|signals| signals.parse::<u64>().ok());
    ignored.is_some_and(|signals| signals & 1 != 0)
}

/// Fields of `/proc/PID/stat` after the program's name: state, parent, group, session and so on;
/// `None` if there is no such process.
pub(super) fn stat(pid: impl fmt::Display) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name, in parentheses, may contain any characters, so fields are read after the
    // last parenthesis.
    let fields: Vec<_> = text.rsplit_once(')')?.1.split_whitespace().map(String::from).collect();
    (!fields.is_empty()).then_some(fields)
}

/// Name of the program of a process, cut to 15 bytes by the system.
pub(super) fn program(pid: impl fmt::Display) -> Option<String> {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(name.trim_end().into())
}

/// Start time of this process since boot. If the system does not show it, the time of the first
/// call of this function.
pub(super) fn own_began() -> Duration {
    static BEGAN: OnceLock<Duration> = OnceLock::new();
    // Ask the system each time, because a forked child has a later start time than its parent.
    began("self").unwrap_or_else(|| *BEGAN.get_or_init(up))
}

/// Time since boot, on the clock that process start times use.
pub(super) fn up() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::process::{Child, Command};
    use std::time::Instant;

    use super::*;

    /// Sleeping process that tests stop and continue; killed when this object is dropped.
    pub(crate) struct Sleeper(Child);

    impl Sleeper {
        pub(crate) fn spawn() -> Sleeper {
            Sleeper(Command::new("sleep").arg("60").spawn().unwrap())
        }

        pub(crate) fn process(&self) -> ProcessId {
            ProcessId { pid: self.0.id(), ..ProcessId::own() }
        }

        /// Stops or continues the process, and waits until the new state shows, because a signal
        /// may take effect only after `kill` has returned.
        pub(crate) fn set_stopped(&self, stopped: bool) {
            let signal = if stopped { "-STOP" } else { "-CONT" };
            let id = self.0.id().to_string();
            assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
            let limit = Instant::now() + Duration::from_secs(60);
            while self.process().is_stopped() != stopped {
                assert!(Instant::now() < limit, "after kill {signal}");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_process_survives_the_trip_through_bytes() {
        let own = ProcessId::own();
        assert_eq!(ProcessId::from_bytes(&own.to_bytes()), Some(own));
        assert_eq!(ProcessId::from_bytes(&[1; 11]), None);
        assert!(!own.is_stopped());
    }

    #[test]
    fn a_stopped_process_is_told_from_one_that_runs() {
        let sleeper = Sleeper::spawn();
        let process = sleeper.process();
        assert!(!process.is_stopped());
        sleeper.set_stopped(true);
        let text = list_processes(&[0, 1], |rank| (rank, (rank == 1).then_some(process)));
        let expected = format!("`kill -CONT {}` continues it)", process.pid);
        assert!(text.starts_with("0 and 1 (process ") && text.ends_with(&expected), "{text}");
        sleeper.set_stopped(false);
    }

    #[test]
    fn ids_of_another_namespace_name_nobody() {
        let other = ProcessId { pid: 1, namespace: 0 };
        assert_eq!(other.to_string(), "process 1");
        let error = other.open().unwrap_err();
        assert!(error.to_string().contains("process 1 is in another PID namespace"), "{error}");
    }
}
