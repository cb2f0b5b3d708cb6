//! Ends of a rank: the ways in which an attack kills or stops a rank at some moment of its program.

use std::fmt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};

/// Way in which the attacked rank is ended or stopped.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Blow {
    /// SIGKILL: the rank's process ends at once.
    #[default]
    Kill,
    /// The rank forks without exec; then its process is killed while the child lives on.
    Fork,
    /// SIGSTOP stops the rank and SIGCONT continues it after a while: the job must go on.
    Stop,
}

impl fmt::Display for Blow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Blow::Kill => "kill",
            Blow::Fork => "fork and kill",
            Blow::Stop => "stop",
        })
    }
}

#[allow(unsafe_code, reason = "no safe interface forks without exec, as a program may")]
mod system {
    unsafe extern "C" {
        /// POSIX fork; returns 0 in the child, which has only the calling thread.
        pub(super) safe fn fork() -> i32;
    }
}

impl Blow {
    pub(super) fn strike(self) {
        let signal = match self {
            Blow::Kill => Signal::KILL,
            Blow::Fork => {
                if system::fork() == 0 {
                    // The child only sleeps; the launcher kills it when the job ends.
                    std::thread::sleep(Duration::from_secs(600));
                }
                Signal::KILL
            }
            Blow::Stop => {
                // A rank is stopped only once. After a second stop, both SIGCONTs might already
                // have been sent, and the rank would stay stopped.
                static STRUCK: AtomicBool = AtomicBool::new(false);
                if STRUCK.swap(true, Ordering::Relaxed) {
                    return;
                }
                let text = format!("sleep 0.3; kill -CONT {}", getpid().as_raw_nonzero());
                let mut later = Command::new("/bin/sh");
                later.args(["-c", &text]).stdin(Stdio::null()).stdout(Stdio::null());
                if later.stderr(Stdio::null()).spawn().is_err() {
                    return;
                }
                Signal::STOP
            }
        };
        let _ = kill_process(getpid(), signal);
    }
}
