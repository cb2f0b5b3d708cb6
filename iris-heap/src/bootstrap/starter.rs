//! Process of the launcher that started this rank, and the other ranks that it has started. Some
//! launchers leave their ranks running when they are killed, or when one rank ends; then the
//! remaining ranks must notice that end themselves.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::ancestors::{Ancestor, ancestors};
use super::launcher_nesting::Surroundings;
use super::launchers::Launcher;
use super::peer::is_readable;
use super::process::{stat, up};
use super::socket::Socket;
use crate::env::read;
use crate::error::Error;

/// Interval between checks of the other ranks' processes.
const LOOK: Duration = Duration::from_millis(400);
/// Age that all running ranks must have before a rank whose process was never seen counts as ended.
/// Until then that rank may still start, because launchers start one rank after the other.
const STARTED: Duration = Duration::from_secs(5);

/// Launcher's process that started this process, directly or through wrappers such as `timeout`.
#[derive(Debug)]
pub(super) struct Starter {
    pid: i32,
    /// Descriptor of the launcher's process; it is readable once the process has ended.
    process: OwnedFd,
    launcher: &'static Launcher,
    /// Error of this rank once the launcher's process has ended.
    lost: Error,
}

impl Starter {
    /// Launcher's process that started this process; `None` if no launcher did, if the launcher's
    /// process has ended, or if this process was started to outlive it.
    pub(super) fn of_this_process() -> Option<&'static Starter> {
        static FOUND: LazyLock<Option<Starter>> = LazyLock::new(Starter::find);
        FOUND.as_ref()
    }

    fn find() -> Option<Starter> {
        let ancestors = ancestors();
        let around = Surroundings { get: &read, ancestors: &ancestors };
        // Shells are excluded, because processes that a person starts in a shell may outlive the
        // shell.
        let (launcher, age) = around.launcher().ok()?.filter(|(it, _)| !it.is_by_hand())?;
        // The launcher's process is found by its name if possible, because a wrapper such as
        // `timeout` has the variables of its rank too.
        let named = around.process_of(launcher);
        let at = if named < ancestors.len() { named } else { age };
        let (below, process) = (&ancestors[..at], ancestors.get(at)?);
        if ancestors[0].has_adopted || outlives(below, process) {
            return None;
        }
        let rank = read(launcher.rank).ok()??.trim().parse().ok()?;
        let lost = Error::LauncherLost {
            rank,
            launcher: format!("{} (process {})", process.program, process.pid),
        };
        let descriptor = pidfd_open(Pid::from_raw(process.pid)?, PidfdFlags::empty()).ok()?;
        Some(Starter { pid: process.pid, process: descriptor, launcher, lost })
    }

    /// Error of this rank if the launcher's process has ended.
    pub(super) fn lost(&self) -> Option<Error> {
        is_readable(self).then(|| self.lost.clone())
    }

    /// Waits until the socket has data or has ended. Returns the error of this rank if the launcher's
    /// process has ended: the ends of other ranks may follow from that.
    pub(super) fn ends_before(&self, socket: &Socket) -> Option<Error> {
        let fds = [socket.as_fd(), self.as_fd()];
        let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        while poll(&mut fds, None) == Err(Errno::INTR) {}
        self.lost()
    }

    /// Running processes of this job that the launcher's process has started, as (rank, age); the
    /// rank is `None` if the process does not have its variables yet.
    fn running(&self) -> Vec<(Option<usize>, Duration)> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid)).into_iter().flatten();
        let children = tasks.flatten().filter_map(|task| {
            let list = fs::read_to_string(task.path().join("children")).ok()?;
            Some(list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<i32>>())
        });
        let runs =
            |pid: &i32| stat(pid).is_some_and(|fields| !["Z", "X"].contains(&fields[0].as_str()));
        let rank = |pid| {
            let process = Ancestor::read(pid)?;
            let age = up().saturating_sub(process.began);
            let vars = process.environment.unwrap_or_default();
            let rank = vars.get(self.launcher.rank).and_then(|rank| rank.trim().parse().ok());
            let is_ours = |name: &&str| read(name).is_ok_and(|own| own.as_ref() == vars.get(*name));
            (rank.is_none() || self.launcher.job.iter().all(is_ours)).then_some((rank, age))
        };
        children.flatten().filter(runs).filter_map(rank).collect()
    }
}

impl AsFd for Starter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }
}

/// Whether this process, which `launcher` has started through the processes `below` it, is meant to
/// outlive the launcher, because `nohup` or `setsid` is between the two.
fn outlives(below: &[Ancestor], launcher: &Ancestor) -> bool {
    let Some(own) = Ancestor::read(std::process::id() as i32) else { return false };
    // Compare with the session of the launcher's child, because launchers themselves may make a
    // session for each process.
    let started = below.last().unwrap_or(&own);
    own.ignores_hangup && !launcher.ignores_hangup || own.session != started.session
}

/// Error of this rank if its launcher has ended.
pub(super) fn lost() -> Option<Error> {
    Starter::of_this_process()?.lost()
}

/// Cause of `error`: the end of this rank's launcher, if it has ended. Other ranks may have ended only
/// because of that.
pub(super) fn cause(error: Error) -> Error {
    lost().unwrap_or(error)
}

/// Ranks that the launcher has started on this host, as a rank that waits for others sees them.
#[derive(Default)]
pub(super) struct Siblings {
    looked: Option<Instant>,
    seen: BTreeSet<usize>,
    /// Ranks that were absent at the last look. A rank counts as ended only if two looks agree,
    /// because the system's list of processes may omit running processes while others end.
    absent: BTreeSet<usize>,
}

impl Siblings {
    /// Returns one of `ranks`, all of which `starter` starts on this host, whose process has ended.
    pub(super) fn ended(&mut self, starter: &Starter, ranks: &[usize]) -> Option<usize> {
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK) {
            return None;
        }
        self.looked = Some(Instant::now());
        self.absent(&starter.running(), ranks)
    }

    /// Returns one of `ranks` that has no process although it had one, or although all other ranks
    /// started long ago. `running` has (rank, age) of each running process.
    fn absent(&mut self, running: &[(Option<usize>, Duration)], ranks: &[usize]) -> Option<usize> {
        let now: BTreeSet<usize> = running.iter().filter_map(|(rank, _)| *rank).collect();
        // If no process is listed, `/proc` does not show the launcher's children, so nothing is
        // known.
        let youngest = running.iter().map(|(_, age)| *age).min()?;
        // A process that does not have its environment variables yet may be any rank.
        let all_known = running.iter().all(|(rank, _)| rank.is_some());
        let is_over = |rank: &&usize| {
            !now.contains(rank) && all_known && (self.seen.contains(rank) || youngest >= STARTED)
        };
        let absent: BTreeSet<usize> = ranks.iter().filter(is_over).copied().collect();
        let over = absent.intersection(&self.absent).next().copied();
        self.seen.extend(now);
        self.absent = absent;
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_has_ended_if_it_ran_or_never_came() {
        let (all, new) = (&[0, 1, 2][..], Duration::ZERO);
        let mut siblings = Siblings::default();
        let mut absent = |running: &[_], ranks: &[usize]| {
            siblings.absent(running, ranks);
            siblings.absent(running, ranks)
        };
        let running = [(Some(0), STARTED), (Some(1), new)];
        assert_eq!(absent(&running, all), None, "rank 2 may come");
        let running = running.map(|(rank, _)| (rank, STARTED));
        assert_eq!(absent(&running, all), Some(2));
        let may_be_any = absent(&[running[0], (None, STARTED)], all);
        assert_eq!(may_be_any, None, "the new process may be rank 1 or 2");
        assert_eq!(absent(&[(Some(0), new)], all), Some(1));
        assert_eq!(absent(&running[..1], &[0]), None);
        assert_eq!(absent(&[], all), None, "the system shows no processes");
    }
}
