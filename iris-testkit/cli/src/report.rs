//! `iris report`: collects in one file what developers need to know about a machine.
//!
//! Each step runs this program again as a process with a time limit. A step that hangs or dies
//! becomes a part of the report, and the next step follows.

use std::fs::File;
use std::io::{Seek, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use iris_heap::BackendKind;
use iris_testkit::say;
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, getpid, getppid, kill_process_group, set_parent_process_death_signal,
};

use crate::errors::usage;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Backend to examine: cpu, cuda or hip.
    #[arg(long)]
    backend: BackendKind,
    /// Report file [default: iris-report-BACKEND.txt].
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Time limit of a step, in minutes.
    #[arg(long, default_value_t = 20)]
    minutes: u64,
    /// Number of calls of each op in the stress test.
    #[arg(long, default_value_t = 500)]
    calls: usize,
}

/// Step of the report: the arguments of an `iris` command that is run.
type Step = Vec<String>;

/// Steps of the report for a backend, the fastest and most informative first.
fn steps(backend: BackendKind, calls: usize) -> Vec<Step> {
    let words = |text: &str| text.split(' ').map(String::from).collect::<Step>();
    let on = |task: &str| words(&format!("{task} --backend {backend}"));
    let mut steps = vec![on("doctor"), on("test --level smoke")];
    if backend.traits().host_threads {
        // The stress test needs a GPU, so it is left out on the CPU. Only one ratio of the
        // benchmark is measured on the CPU, because all ratios would take minutes.
        steps.push(["bench", "--only", "crate, 1 thread"].map(String::from).to_vec());
    } else {
        steps.push(on(&format!("stress --calls {calls}")));
        steps.push(on("bench"));
    }
    steps
}

/// Runs all steps, even after one has failed, and writes the report; returns whether all succeeded.
pub(crate) fn main(options: &Options) -> Result<bool> {
    let usual = || format!("iris-report-{}.txt", options.backend).into();
    let path = options.out.clone().unwrap_or_else(usual);
    if options.minutes == 0 {
        return Err(usage("--minutes", 0, "at least 1"));
    }
    let file = File::create(&path);
    let mut file = file.map_err(|error| {
        usage(format!("file {}", path.display()), error, "a path that can be written")
    })?;
    let program = std::env::current_exe().context("the path of this program is unknown")?;
    let limit = Duration::from_secs(60 * options.minutes);
    let mut failed = Vec::new();
    for step in steps(options.backend, options.calls) {
        let line = step.join(" ");
        say!("iris {line}")?;
        let (outcome, ok) = run(&program, &step, &mut file, limit)?;
        say!("  {outcome}")?;
        if !ok {
            failed.push(line);
        }
    }
    let end = match failed.as_slice() {
        [] => "all steps went well".into(),
        failed => format!("FAILED: iris {}", failed.join("; iris ")),
    };
    writeln!(file, "\n=== {end}")?;
    say!("{end}\n{} is the file to send", path.display())?;
    Ok(failed.is_empty())
}

/// Runs one step and appends its output to `file`; returns a description of its end, and whether it
/// succeeded.
fn run(program: &Path, step: &Step, file: &mut File, limit: Duration) -> Result<(String, bool)> {
    writeln!(file, "\n=== iris {}", step.join(" "))?;
    let begun = Instant::now();
    let mut command = Command::new(program);
    let own = getpid();
    // If this program is ended, as by Ctrl-C, the system ends the step, and with it its ranks.
    #[allow(unsafe_code, reason = "system calls between fork and exec")]
    // SAFETY: the closure makes two system calls, which are allowed between fork and exec.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // This program may have ended before the step asked for the signal at its end; then
            // the signal never comes, and the step must not begin.
            if getppid() == Some(own) { Ok(()) } else { Err(Errno::SRCH.into()) }
        });
    }
    let mut child = command
        .args(step)
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file.try_clone()?)
        // The step is a process group of its own, to which its rank processes belong, so killing
        // the group kills them all.
        .process_group(0)
        .spawn()
        .with_context(|| format!("starting {}", program.display()))?;
    let status = wait(&mut child, limit)?;
    let seconds = begun.elapsed().as_secs_f64();
    let (how, ok) = match status {
        Some(status) => (status.to_string(), status.success()),
        None => (format!("ended by this program after {limit:.0?}"), false),
    };
    let outcome = format!("{how}, {seconds:.1} s");
    // The child process has written to the same file, so this process must first move to the end of
    // the file.
    file.seek(std::io::SeekFrom::End(0))?;
    writeln!(file, "=== {outcome}")?;
    Ok((outcome, ok))
}

/// Waits for a step to end; returns `None` if it took longer than `limit` and was killed, with all
/// processes that it started.
fn wait(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if begun.elapsed() >= limit {
            let group = Pid::from_child(child);
            kill_process_group(group, Signal::KILL)
                .context("a step that took too long could not be killed")?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_hangs_is_ended_and_told_of() {
        let mut file = tempfile::tempfile().unwrap();
        let shell = |text: &str| vec!["-c".to_owned(), text.to_owned()];
        let program = Path::new("/bin/sh");
        // Without the time limit this step, and the process that it starts, would run for 10
        // minutes.
        let hangs = shell("echo begun; sleep 600 & wait");
        let (outcome, ok) = run(program, &hangs, &mut file, Duration::from_millis(300)).unwrap();
        assert!(!ok && outcome.contains("ended by this program"), "{outcome}");
        let (outcome, ok) =
            run(program, &shell("echo and on; exit 3"), &mut file, Duration::from_secs(60))
                .unwrap();
        assert!(!ok && outcome.contains("exit status: 3"), "{outcome}");
        let (_, ok) = run(program, &shell("exit 0"), &mut file, Duration::from_secs(60)).unwrap();
        assert!(ok);
        file.rewind().unwrap();
        let text = std::io::read_to_string(file).unwrap();
        let order = ["echo begun", "begun\n", "ended by this", "and on\n", "exit status: 3"];
        let mut rest = text.as_str();
        for part in order {
            let at = rest.find(part).unwrap_or_else(|| panic!("{part} in {text}"));
            rest = &rest[at + part.len()..];
        }
    }

    #[test]
    fn the_report_begins_with_what_is_there() {
        for backend in BackendKind::ALL {
            let steps = steps(backend, 5);
            assert_eq!(steps[0][0], "doctor");
            assert!(steps.iter().any(|step| step.join(" ").contains("test --level smoke")));
        }
        let stress = steps(BackendKind::Hip, 5)[2].join(" ");
        assert_eq!(stress, "stress --calls 5 --backend hip");
    }
}
