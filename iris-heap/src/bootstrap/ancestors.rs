//! Ancestors of this process as `/proc` shows them: its parent, the parent's parent, and so on.
//! They show which of two nested launchers is the inner one, and identify jobs that have no other
//! name.

#![allow(unsafe_code, reason = "a function that runs when the program is loaded")]

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use rustix::process::{getpid, getppid};

use super::launchers::variables;
use super::process::{BY_PARENT, began_of, ignores_hangup, program, stat};

/// Ancestor of this process.
#[derive(Debug)]
pub(super) struct Ancestor {
    pub(super) pid: i32,
    /// Process id of the ancestor's parent; 0 if it has none in this pid namespace.
    parent: i32,
    /// Session id; 0 if the session belongs to another pid namespace.
    pub(super) session: i32,
    /// Whether the ancestor ignores SIGHUP, for example because `nohup` started it.
    pub(super) ignores_hangup: bool,
    /// Start time since boot; together with `pid` it identifies the process uniquely.
    pub(super) began: Duration,
    /// Name of the program, cut to 15 bytes by the system.
    pub(super) program: String,
    /// Variables that describe a job in the environment with which the program was started; `None`
    /// if the system does not show that environment, for example of another user's process.
    pub(super) environment: Option<BTreeMap<String, String>>,
    /// Whether this is the parent of this process by adoption only: the process that started this
    /// process has ended.
    pub(super) has_adopted: bool,
}

impl Ancestor {
    pub(super) fn read(pid: i32) -> Option<Ancestor> {
        let fields = stat(pid)?;
        let (parent, session) = parent_and_session(&fields)?;
        let (began, program) = (began_of(&fields)?, program(pid)?);
        let ignores_hangup = ignores_hangup(&fields);
        let environment = fs::read(format!("/proc/{pid}/environ")).ok().map(|bytes| {
            let pairs = bytes.split(|&byte| byte == 0).filter_map(|pair| {
                let (name, value) = std::str::from_utf8(pair).ok()?.split_once('=')?;
                let mut known = variables().chain(["IRIS_PORT"]);
                known.any(|known| known == name).then(|| (name.into(), value.into()))
            });
            pairs.collect()
        });
        let has_adopted = false;
        Some(Ancestor {
            pid,
            parent,
            session,
            ignores_hangup,
            began,
            program,
            environment,
            has_adopted,
        })
    }

    /// Identity of the job whose ranks this process has started.
    pub(super) fn identity(&self, is_launcher: bool) -> String {
        let kind = if is_launcher { "launcher's process " } else { BY_PARENT };
        format!("{kind}{} of {:.2?}", self.pid, self.began)
    }
}

/// Ancestors of this process, the parent first; empty if the system shows none.
pub(super) fn ancestors() -> Vec<Ancestor> {
    let first = getppid().and_then(|pid| Ancestor::read(pid.as_raw_nonzero().get()));
    // The list ends by itself, because there is no process 0 to read.
    let mut all: Vec<_> = std::iter::successors(first, |it| Ancestor::read(it.parent)).collect();
    if let Some(parent) = all.first_mut() {
        parent.has_adopted = is_adopted_by(parent);
    }
    all
}

/// Whether the process that started this one has ended, so that `parent` has adopted this one. The
/// parent's process id does not show this: the adopter need not be process 1, and process 1 may be
/// a shell that started this process.
fn is_adopted_by(parent: &Ancestor) -> bool {
    let own = getpid().as_raw_nonzero().get();
    let fields = stat("self").unwrap_or_default();
    let is_younger = began_of(&fields).is_some_and(|own| own < parent.began);
    // A forked child keeps its parent's session. So a parent in another session has not forked this
    // process, unless this process has created its own session.
    let is_elsewhere = parent_and_session(&fields)
        .is_some_and(|(_, session)| session != own && session != parent.session);
    let [loaded_by, at_load] = AT_LOAD.each_ref().map(|pid| pid.load(Ordering::Relaxed));
    // The parent at load time counts only if this process loaded the library itself: a forked child
    // did not.
    (loaded_by == own && at_load != parent.pid) || is_younger || is_elsewhere
}

/// Process id of the parent of a process, and the process's session, from the fields of [`stat`].
fn parent_and_session(fields: &[String]) -> Option<(i32, i32)> {
    Some((fields.get(1)?.parse().ok()?, fields.get(3)?.parse().ok()?))
}

/// Process ids of the process that loaded this library and of its parent at that time; 0 before the
/// library is loaded.
static AT_LOAD: [AtomicI32; 2] = [const { AtomicI32::new(0) }; 2];

/// Function that the loader calls before the program starts, to note the parent process early. If
/// the shell that started this process has ended meanwhile, a later look would find the adopter
/// instead.
#[used]
// SAFETY: the section holds addresses of functions without arguments, which the loader calls once;
// this one makes two system calls and stores two numbers.
#[unsafe(link_section = ".init_array")]
static NOTE_PARENT: extern "C" fn() = note_parent;

extern "C" fn note_parent() {
    let parent = getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
    AT_LOAD[0].store(getpid().as_raw_nonzero().get(), Ordering::Relaxed);
    AT_LOAD[1].store(parent, Ordering::Relaxed);
}

#[cfg(test)]
impl Ancestor {
    /// Makes an invented ancestor, for tests of the table of launchers.
    pub(super) fn made_up(program: &str, environment: Option<&[(&str, &str)]>) -> Ancestor {
        let pairs = |vars: &[(&str, &str)]| {
            vars.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
        };
        let began = Duration::from_millis(4500);
        let program = program.into();
        let environment = environment.map(pairs);
        let (ignores_hangup, has_adopted) = (false, false);
        let (pid, parent, session) = (77, 0, 0);
        Ancestor { pid, parent, session, ignores_hangup, began, program, environment, has_adopted }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn every_variable_that_may_name_a_job_is_seen_in_an_ancestor() {
        let names = ["MASTER_PORT", "IRIS_PORT", "IRIS_RENDEZVOUS", "PMI_JOBID"];
        let mut sleep = Command::new("sleep");
        let child = sleep.arg("60").env_clear().envs(names.map(|name| (name, "7"))).spawn();
        let mut child = child.unwrap();
        let seen = Ancestor::read(child.id() as i32).and_then(|it| it.environment);
        child.kill().unwrap();
        child.wait().unwrap();
        let seen = seen.unwrap();
        assert!(names.iter().all(|&name| seen.get(name).is_some_and(|it| it == "7")), "{seen:?}");
    }
}
