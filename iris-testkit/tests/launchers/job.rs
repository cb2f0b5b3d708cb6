//! Job under a launcher: its start, its end, and the notes of its ranks.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use iris_testkit::launch::keep_files_in;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::slurm::Slurm;

/// Limit for a launcher, and for ranks that it leaves behind; each case takes seconds.
const LIMIT: Duration = Duration::from_secs(60);

/// Notes of ranks by name: the job and the process id, with a dot in between.
pub(crate) type Notes = BTreeMap<String, String>;

/// Launcher that runs, and the notes that its ranks leave in a folder.
pub(crate) struct Job {
    pub(crate) child: Child,
    folder: PathBuf,
    name: String,
    output: PathBuf,
}

impl Job {
    /// Starts the launcher `words`, whose ranks write notes that begin with `name` into `folder`.
    pub(crate) fn start(
        words: &[OsString],
        folder: &Path,
        name: &str,
        slurm: Option<&Slurm>,
    ) -> Result<Job> {
        let output = folder.join(format!("output-{name}"));
        let file = File::create(&output)?;
        let of_launcher = folder.join(format!("launcher-{name}"));
        fs::create_dir(&of_launcher)?;
        let mut command = Command::new(&words[0]);
        keep_files_in(&mut command, &of_launcher).args(&words[1..]).process_group(0);
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        if let Some(slurm) = slurm {
            command.env("SLURM_CONF", slurm.conf());
        }
        let child = command.spawn().with_context(|| format!("{words:?} did not start"))?;
        Ok(Job { child, folder: folder.into(), name: name.into(), output })
    }

    /// Reads the notes of the ranks.
    pub(crate) fn notes(&self) -> Notes {
        let files = self.folder.read_dir().into_iter().flatten().flatten();
        let notes = files.filter_map(|file| {
            let name = file.file_name().into_string().ok()?;
            let is_note = name.starts_with(&self.name) && name.contains('.');
            is_note.then(|| Some((name, fs::read_to_string(file.path()).ok()?)))?
        });
        notes.collect()
    }

    /// Process ids of the ranks that have not ended.
    fn running(&self) -> Vec<Pid> {
        let pids = self.notes().into_keys().filter_map(|name| {
            let pid = name.rsplit('.').next()?.parse().ok()?;
            // A process that has ended has the state Z until its parent waits for it.
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            Pid::from_raw(pid).filter(|_| !stat.contains(") Z "))
        });
        pids.collect()
    }

    /// Waits until the launcher and the ranks have ended, and checks the launcher's status and the
    /// ranks' notes; returns what `check` returns. An error is followed by the notes and the
    /// launcher's output.
    pub(crate) fn end<T>(
        &mut self,
        check: impl FnOnce(ExitStatus, Notes) -> Result<T>,
    ) -> Result<T> {
        let result = self.wait().and_then(|status| check(status, self.notes()));
        result.map_err(|error| anyhow!("{error:#}\n{}", self.report()))
    }

    /// Waits until the launcher and the ranks have ended; returns the launcher's status.
    fn wait(&mut self) -> Result<ExitStatus> {
        let mut status = None;
        within_limit(|| {
            status = self.child.try_wait().ok().flatten();
            status.is_some()
        });
        let status = status.context("the launcher has not ended")?;
        let ended = within_limit(|| self.running().is_empty());
        ensure!(ended, "the launcher has ended with {status}, but ranks run on");
        Ok(status)
    }

    /// Notes of the ranks and output of the launcher, for an error.
    pub(crate) fn report(&self) -> String {
        let notes = self.notes().into_iter().map(|(name, note)| format!("  {name}: {note}\n"));
        let output = fs::read(&self.output).unwrap_or_default();
        let output = String::from_utf8_lossy(&output).replace('\n', "\n  | ");
        format!("{}  | {}", notes.collect::<String>(), output.trim_end_matches(['\n', ' ', '|']))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // Errors are ignored: the processes have ended.
        for pid in self.running() {
            let _ = kill_process(pid, Signal::KILL);
        }
        if let Ok(None) = self.child.try_wait() {
            let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
            let _ = self.child.wait();
        }
    }
}

/// Polls `done` until it returns true; returns false after [`LIMIT`].
pub(crate) fn within_limit(mut done: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + LIMIT;
    loop {
        if done() {
            return true;
        }
        if Instant::now() > until {
            return false;
        }
        thread::sleep(Duration::from_millis(10));
    }
}
