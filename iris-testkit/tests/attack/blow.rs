//! Blows: the ways in which an attack ends, stops or disturbs a rank at some moment of its program.

use std::fmt;
use std::process::{Command, Stdio};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Error, Result, bail};
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, waitpid};

use super::environment::Odd;
use super::rank::Stage;
use super::refuse::Refusal;

/// Way in which the attacked rank is ended, stopped or disturbed, or in which it attacks.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub(super) enum Blow {
    /// Nothing; for the jobs that are measured.
    #[default]
    None,
    /// SIGKILL: the rank's process ends at once.
    Kill,
    /// The rank forks without exec; then its process is killed while the child lives on.
    ForkAndKill,
    /// SIGSTOP stops the rank, and nothing continues it: the others must find it by their deadlines.
    Stop,
    /// SIGSTOP stops the rank and SIGCONT continues it after a while: the job must go on.
    Pause,
    /// The rank's process exits with this code, without a word to the others.
    Exit(u8),
    /// The rank's program panics.
    Panic,
    /// The rank's program returns an error.
    Error,
    /// The rank forks without exec; the child goes on with what it inherited, which must be refused.
    Fork,
    /// The rank sends rank 0 this number of frames as a stranger, before it joins.
    Strangers(usize),
    /// The attacker joins as a rank, then sends this number of frames that no honest rank would send.
    Frames(usize),
    /// A variable of the rank's environment is odd.
    Set(Odd),
    /// One use of one system call of the rank is refused.
    Refuse(Refusal),
    /// No system call is refused, but all uses are counted on each rank.
    Count,
}

impl fmt::Display for Blow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Blow::Exit(code) => write!(f, "exit={code}"),
            Blow::Strangers(frames) => write!(f, "strangers={frames}"),
            Blow::Frames(frames) => write!(f, "frames={frames}"),
            Blow::Set(odd) => write!(f, "set={odd}"),
            Blow::Refuse(refusal) => write!(f, "refuse={refusal}"),
            plain => f.write_str(plain.kind()),
        }
    }
}

impl FromStr for Blow {
    type Err = Error;

    fn from_str(text: &str) -> Result<Blow> {
        let (kind, value) = text.split_once('=').unwrap_or((text, ""));
        let number = || value.parse::<usize>().with_context(|| format!("blow {text}"));
        Ok(match kind {
            "exit" => Blow::Exit(u8::try_from(number()?)?),
            "strangers" => Blow::Strangers(number()?),
            "frames" => Blow::Frames(number()?),
            "set" => Blow::Set(value.parse()?),
            "refuse" => Blow::Refuse(value.parse()?),
            _ => match Blow::PLAIN.iter().find(|blow| blow.kind() == text) {
                Some(blow) => blow.clone(),
                None => bail!("blow {text}: not known"),
            },
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

/// Process that a blow has just split off, or the process that goes on as the rank.
pub(super) enum Forked {
    Child,
    Parent,
}

impl Blow {
    const PLAIN: [Blow; 9] = [
        Blow::None,
        Blow::Count,
        Blow::Kill,
        Blow::ForkAndKill,
        Blow::Stop,
        Blow::Pause,
        Blow::Panic,
        Blow::Error,
        Blow::Fork,
    ];

    /// Blows that can be struck in any stage.
    pub(super) const STRIKES: [Blow; 9] = [
        Blow::Kill,
        Blow::ForkAndKill,
        Blow::Stop,
        Blow::Pause,
        Blow::Exit(0),
        Blow::Exit(3),
        Blow::Panic,
        Blow::Error,
        Blow::Fork,
    ];

    /// Name of the kind of blow, without its numbers.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Blow::None => "none",
            Blow::Kill => "kill",
            Blow::ForkAndKill => "fork-and-kill",
            Blow::Stop => "stop",
            Blow::Pause => "pause",
            Blow::Exit(_) => "exit",
            Blow::Panic => "panic",
            Blow::Error => "error",
            Blow::Fork => "fork",
            Blow::Strangers(_) => "strangers",
            Blow::Frames(_) => "frames",
            Blow::Set(_) => "set",
            Blow::Refuse(_) => "refuse",
            Blow::Count => "count",
        }
    }

    /// Whether a thread other than the one that runs the rank's program can strike.
    pub(super) fn by_other_thread(&self) -> bool {
        !matches!(self, Blow::Panic | Blow::Error | Blow::Fork)
    }

    /// Whether the blow can be struck in `stage`. The thread that meets cannot strike meanwhile, and
    /// before the world exists a child inherits nothing.
    pub(super) fn is_possible(&self, stage: Stage) -> bool {
        match stage {
            Stage::Before => *self != Blow::Fork,
            Stage::Meeting => self.by_other_thread(),
            _ => true,
        }
    }

    /// Whether the rank that was struck is lost for the others, so that the job must fail.
    pub(super) fn loses_the_rank(&self) -> bool {
        let loses = [Blow::Kill, Blow::ForkAndKill, Blow::Stop, Blow::Panic, Blow::Error];
        loses.contains(self) || matches!(self, Blow::Exit(_))
    }

    /// Strikes this process.
    ///
    /// # Errors
    /// For [`Blow::Error`], which ends the rank's program with this error.
    pub(super) fn strike(&self) -> Result<Forked> {
        match self {
            Blow::None
            | Blow::Strangers(_)
            | Blow::Frames(_)
            | Blow::Set(_)
            | Blow::Refuse(_)
            | Blow::Count => {}
            Blow::Kill => drop(kill_process(getpid(), Signal::KILL)),
            Blow::ForkAndKill => {
                if system::fork() == 0 {
                    // The child only sleeps; the launcher kills it when the job ends.
                    std::thread::sleep(Duration::from_secs(600));
                }
                let _ = kill_process(getpid(), Signal::KILL);
            }
            Blow::Stop => drop(kill_process(getpid(), Signal::STOP)),
            Blow::Pause => pause(),
            Blow::Exit(code) => std::process::exit(i32::from(*code)),
            Blow::Panic => panic!("a panic as planned"),
            Blow::Error => bail!("an error of the program's own, as planned"),
            Blow::Fork => match system::fork() {
                0 => return Ok(Forked::Child),
                child => {
                    let child = Pid::from_raw(child).context("fork failed")?;
                    let status = waitpid(Some(child), WaitOptions::empty())?;
                    let code = status.and_then(|(_, status)| status.exit_status());
                    if code != Some(0) {
                        bail!("the forked child ended with {status:?}");
                    }
                }
            },
        }
        Ok(Forked::Parent)
    }
}

/// Stops this process, and continues it after 0.3 s.
fn pause() {
    // A rank is stopped only once. After a second stop, both SIGCONTs might already have been sent,
    // and the rank would stay stopped.
    static STRUCK: AtomicBool = AtomicBool::new(false);
    if STRUCK.swap(true, Ordering::Relaxed) {
        return;
    }
    let text = format!("sleep 0.3; kill -CONT {}", getpid().as_raw_nonzero());
    let mut later = Command::new("/bin/sh");
    later.args(["-c", &text]).stdin(Stdio::null()).stdout(Stdio::null());
    if later.stderr(Stdio::null()).spawn().is_ok() {
        let _ = kill_process(getpid(), Signal::STOP);
    }
}
