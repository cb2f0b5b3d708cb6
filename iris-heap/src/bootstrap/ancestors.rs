//! Ancestors of this process as `/proc` shows them: the process that started it, that one's parent,
//! and so on. They tell which launcher is the inner one, and identify jobs that have no other name.

#![allow(unsafe_code, reason = "a function that runs when the program is loaded")]

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use rustix::process::{getpid, getppid};

use super::launchers::variables;
use super::process::{BY_PARENT, began};

/// Process above this one.
#[derive(Clone, Debug)]
pub(super) struct Ancestor {
    pid: i32,
    /// Session; 0 if it is one of another pid namespace.
    session: i32,
    /// Start time since boot; with it, `pid` names one process for good.
    began: Duration,
    /// Name of the program, cut to 15 bytes by the system.
    pub(super) program: String,
    /// Launchers' variables in the environment with which the program was started; `None` if the
    /// system does not show it, as for a process of another user.
    pub(super) environment: Option<BTreeMap<String, String>>,
    /// Whether this is the parent and has not started this process: the one that did has ended.
    pub(super) has_adopted: bool,
}

impl Ancestor {
    fn read(pid: i32) -> Option<Ancestor> {
        let (_, session) = parent_and_session(pid)?;
        let began = began(&pid.to_string())?;
        let program = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim_end().into();
        let environment = fs::read(format!("/proc/{pid}/environ")).ok().map(|bytes| {
            let pairs = bytes.split(|&byte| byte == 0).filter_map(|pair| {
                let (name, value) = std::str::from_utf8(pair).ok()?.split_once('=')?;
                variables().any(|known| known == name).then(|| (name.into(), value.into()))
            });
            pairs.collect()
        });
        Some(Ancestor { pid, session, began, program, environment, has_adopted: false })
    }

    /// Identity of the job whose ranks this process has started.
    pub(super) fn identity(&self, is_launcher: bool) -> String {
        let kind = if is_launcher { "launcher's process " } else { BY_PARENT };
        format!("{kind}{} of {:.2?}", self.pid, self.began)
    }
}

/// Ancestors of this process, its parent first; empty if the system shows none.
pub(super) fn ancestors() -> Vec<Ancestor> {
    let first = getppid().map(|pid| pid.as_raw_nonzero().get());
    let pids = std::iter::successors(first, |&pid| {
        parent_and_session(pid).map(|(parent, _)| parent).filter(|&parent| parent > 0)
    });
    let mut all: Vec<_> = pids.map_while(Ancestor::read).collect();
    if let Some(parent) = all.first_mut() {
        parent.has_adopted = is_adopted_by(parent);
    }
    all
}

/// Whether the process that started this one has ended, so that `parent` has adopted this one. The
/// adopter need not be process 1, and process 1 may be a shell that started it.
fn is_adopted_by(parent: &Ancestor) -> bool {
    let at_load = PARENT_AT_LOAD.load(Ordering::Relaxed);
    let is_younger = began("self").is_some_and(|own| own < parent.began);
    // A fork keeps the session, so a parent in another session has not forked this process, unless
    // this process has made a session of its own.
    let own = getpid().as_raw_nonzero().get();
    let is_elsewhere = parent_and_session(own)
        .is_some_and(|(_, session)| session != own && session != parent.session);
    (at_load != 0 && at_load != parent.pid) || is_younger || is_elsewhere
}

/// Process id of the parent of a process, and the process's session.
fn parent_and_session(pid: i32) -> Option<(i32, i32)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything; after it come state, parent, group and session.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some((fields.nth(1)?.parse().ok()?, fields.nth(1)?.parse().ok()?))
}

/// Process id of the parent when this library was loaded.
static PARENT_AT_LOAD: AtomicI32 = AtomicI32::new(0);

/// Function that the loader calls before the program starts. A later look would find the adopter of
/// a process whose shell ended meanwhile.
#[used]
// SAFETY: the section holds addresses of functions without arguments, which the loader calls once;
// this one makes one system call and stores a number.
#[unsafe(link_section = ".init_array")]
static NOTE_PARENT: extern "C" fn() = note_parent;

extern "C" fn note_parent() {
    let parent = getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
    PARENT_AT_LOAD.store(parent, Ordering::Relaxed);
}

#[cfg(test)]
impl Ancestor {
    /// Makes an ancestor that no process has, for tests of the table of launchers.
    pub(super) fn made_up(program: &str, environment: Option<&[(&str, &str)]>) -> Ancestor {
        let pairs = |vars: &[(&str, &str)]| {
            vars.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
        };
        let began = Duration::from_millis(4500);
        let program = program.into();
        let environment = environment.map(pairs);
        Ancestor { pid: 77, session: 0, began, program, environment, has_adopted: false }
    }
}
