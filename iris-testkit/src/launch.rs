//! Launcher: starts the ranks of a job as processes of this host, and makes sure that they end.
//!
//! [`launch`] starts the same program once per rank, with the variables that `World::from_env`
//! reads: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, and `IRIS_RENDEZVOUS` with a
//! private folder of the job. Rank 0's stdout is forwarded as it comes. Stdout of the other ranks
//! and stderr of all ranks are kept for the report of a failure.
//!
//! When a rank ends, a file `lost-RANK` in the job's folder tells the ranks that still wait for
//! that rank at the rendezvous. When a rank fails, the other ranks have a grace period to notice
//! and report the failure; then they are killed. When the launcher itself ends, even by SIGKILL,
//! its ranks end and the folder is removed. To this end all ranks are in the process group of a
//! small shell, the keeper. The keeper reads from a pipe that only the launcher holds open, and
//! kills the group when the system closes the pipe at the launcher's end. If the keeper is killed
//! too, ranks that called [`end_with_launcher`] still end, and the next launcher removes the
//! folder.
//!
//! This file is long because the start of a job and its end in all cases share the state of the
//! job.
//!
//! ```no_run
//! # use iris_testkit::launch::{Options, launch};
//! # use std::time::Duration;
//! # fn main() -> anyhow::Result<()> {
//! let program = std::env::current_exe()?;
//! let options = Options::default().deadline(Duration::from_secs(60));
//! let outcome = launch(&program, &["rank"], 4, options)?;
//! if !outcome.ok() {
//!     eprint!("{}", outcome.report());
//! }
//! std::process::exit(outcome.exit_code());
//! # }
//! ```

mod folder;
mod mpirun;
mod namespaces;

use std::ffi::{OsStr, OsString};
use std::fmt::{self, Write as _};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use iris_heap::{check_file_size, launcher_variables};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, getpid, getppid, kill_process, kill_process_group, pidfd_open,
    set_parent_process_death_signal,
};
use tempfile::TempDir;

use crate::free_port;

pub use self::mpirun::{keep_files_in, mpirun, open_mpi};
pub use self::namespaces::Namespaces;

/// Delay between the end of a rank and its announcement to the other ranks. If the rank ended
/// because another rank had ended, the system reports the end of that other rank within this delay,
/// so that the launcher announces the other rank first.
const SETTLE: Duration = Duration::from_millis(50);
/// Number of bytes of each rank's stdout and stderr that are kept; earlier output is dropped.
const KEPT: usize = 64 << 10;

/// Environment variable that gives each stream its own hardware queue if ranks share a GPU (32
/// queues are the maximum). The CUDA driver reads it when it is initialised.
pub const QUEUES: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");

/// Environment variables for AMD's runtime: a hardware queue for each stream, and no kernels for
/// copies by the host, because waiting kernels may leave no compute units for a copy kernel.
pub const HIP: &[(&str, &str)] = &[("GPU_MAX_HW_QUEUES", "32"), ("GPU_FORCE_BLIT_COPY_SIZE", "0")];

/// Environment variable with the file to which NCCL writes its log, by default stdout.
const NCCL_LOG: &str = "NCCL_DEBUG_FILE";

/// Environment variable that passes the launcher's process id to the rank processes.
const LAUNCHER: &str = "LAUNCHER_PID";

/// Kills this process as `kill -KILL` does, without a destructor or a message to other ranks, for
/// tests of what other ranks do then.
pub fn kill_myself() -> ! {
    let killed = kill_process(getpid(), Signal::KILL);
    panic!("still here: {killed:?}");
}

/// Makes the system kill this rank when the launcher that started it ends, even if the keeper (the
/// shell that kills the ranks when the launcher ends) is gone. Does nothing in a process that
/// [`launch`] did not start.
pub fn end_with_launcher() {
    let launcher = std::env::var(LAUNCHER).ok().and_then(|pid| Pid::from_raw(pid.parse().ok()?));
    if let Some(launcher) = launcher {
        let asked = set_parent_process_death_signal(Some(Signal::KILL));
        // If the launcher ended before this rank asked for a signal at the launcher's end, the
        // signal never comes, so check for that.
        if asked.is_ok() && getppid() != Some(launcher) {
            std::process::exit(1);
        }
    }
}

/// Ensures that these environment variables have these values. If a variable has another value,
/// this program executes itself again with all of these values, because libraries may read
/// variables only when they are initialised.
pub fn with_environment(variables: &[(&str, &str)]) {
    if variables.iter().all(|(name, value)| std::env::var_os(name).is_some_and(|v| v == **value)) {
        return;
    }
    let mut arguments = std::env::args_os();
    if let (Some(program), Ok(own)) = (arguments.next(), std::env::current_exe()) {
        let mut again = Command::new(own);
        let error = again.arg0(program).args(arguments).envs(variables.iter().copied()).exec();
        eprintln!("{variables:?} could not be set: {error}");
    }
}

/// Options of a job that [`launch`] starts.
#[non_exhaustive]
pub struct Options {
    deadline: Duration,
    grace: Duration,
    environment: Vec<(OsString, OsString)>,
    stdout: Box<dyn Write + Send>,
    progress: bool,
    nodes: usize,
    namespaces: bool,
}

impl Default for Options {
    /// Defaults: an hour for the job, 10 s of grace after a failure, rank 0's stdout to stdout.
    fn default() -> Self {
        Options {
            deadline: Duration::from_secs(3600),
            grace: Duration::from_secs(10),
            environment: Vec::new(),
            stdout: Box::new(io::stdout()),
            progress: false,
            nodes: 1,
            namespaces: false,
        }
    }
}

impl Options {
    /// Sets the maximum duration of the job, after which all ranks are killed.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets the time that the other ranks have to end by themselves after the first rank has
    /// failed.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Simulates `nodes` nodes on this host, with equal numbers of ranks. All ranks meet over
    /// loopback and authenticate each other by a secret that the launcher makes for the job.
    pub fn nodes(mut self, nodes: usize) -> Self {
        self.nodes = nodes;
        self
    }

    /// Gives each simulated node its own network and host name by Linux namespaces, if this process
    /// may create them; otherwise the variable `IRIS_NODE` tells the nodes apart. Not for GPUs:
    /// only node 0 can be reached from all nodes, whereas NCCL and RCCL connect all ranks.
    pub fn namespaces(mut self, namespaces: bool) -> Self {
        self.namespaces = namespaces;
        self
    }

    /// Sets an environment variable for every rank.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Sets the writer to which rank 0's stdout is forwarded immediately.
    pub fn stdout(mut self, stdout: impl Write + Send + 'static) -> Self {
        self.stdout = Box::new(stdout);
        self
    }

    /// Sets whether rank 0 inherits the launcher's stderr, so that it can draw a progress bar.
    pub fn progress(mut self, progress: bool) -> Self {
        self.progress = progress;
        self
    }
}

/// Way in which a rank's process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// Exit of the process itself, with this exit code.
    Exited(i32),
    /// Ended by this signal, which did not come from the launcher.
    Signalled(i32),
    /// Killed by the launcher: at the end of the grace period after another rank had failed.
    Stopped,
    /// Killed by the launcher because it still ran at the job's deadline.
    Late,
}

impl End {
    /// Likelihood that a rank that ended in this way failed because of another rank: from 0
    /// (unlikely) to 2 (likely). Signals give 0, except SIGABRT, by which a program may react to an
    /// error.
    fn follows(self) -> u8 {
        match self {
            End::Signalled(signal) => u8::from(signal == Signal::ABORT.as_raw()),
            _ => 2,
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Exited(0) => write!(out, "ok"),
            End::Exited(code) => write!(out, "exit code {code}"),
            End::Signalled(signal) => write!(out, "ended by signal {signal}"),
            End::Stopped => write!(out, "stopped after another rank's failure"),
            End::Late => write!(out, "stopped at the job's deadline"),
        }
    }
}

/// Outcome of one rank of a job.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RankOutcome {
    /// Way in which the rank's process ended.
    pub end: End,
    /// Time from the start of the job to the end of the process.
    pub after: Duration,
    /// Last 64 KiB of the process's stdout.
    pub stdout: String,
    /// Last 64 KiB of the process's stderr; empty for rank 0 with [`Options::progress`].
    pub stderr: String,
}

/// Outcome of a job, one entry per rank.
#[derive(Clone, Debug)]
#[must_use]
#[non_exhaustive]
pub struct Outcome {
    /// Outcome of each rank, indexed by rank.
    pub ranks: Vec<RankOutcome>,
}

impl Outcome {
    /// Whether every rank exited with code 0.
    pub fn ok(&self) -> bool {
        self.first_failure().is_none()
    }

    /// Rank that failed first; `None` if none failed. Of ranks that failed within half a second of
    /// each other, a rank that was ended by a signal counts as first: the system closes a dead
    /// process's sockets before it reports the death, so other ranks may fail before the launcher
    /// learns of the death.
    pub fn first_failure(&self) -> Option<usize> {
        const TOGETHER: Duration = Duration::from_millis(500);
        let failed = || self.ranks.iter().enumerate().filter(|(_, it)| it.end != End::Exited(0));
        let first = failed().map(|(_, it)| it.after).min()?;
        let together = failed().filter(|(_, it)| it.after <= first + TOGETHER);
        together.min_by_key(|(_, it)| (it.end.follows(), it.after)).map(|(rank, _)| rank)
    }

    /// Exit code for the whole job, as a shell would report it; 0 if all ranks succeeded. For the
    /// rank that failed first, it is the rank's exit code, 128 + the signal that ended the rank, or
    /// 124 if the rank ran until the deadline.
    pub fn exit_code(&self) -> i32 {
        match self.first_failure().map(|rank| self.ranks[rank].end) {
            None => 0,
            Some(End::Exited(code)) => code,
            Some(End::Signalled(signal)) => 128 + signal,
            Some(End::Stopped | End::Late) => 124,
        }
    }

    /// Report of a failed job for the user: all output that was not forwarded, each line preceded
    /// by its rank, then one line per rank that says how it ended.
    pub fn report(&self) -> String {
        let mut text = String::new();
        for (rank, it) in self.ranks.iter().enumerate() {
            let printed = if rank == 0 { "" } else { &it.stdout };
            for line in printed.lines().chain(it.stderr.lines()) {
                // Writing to a String cannot fail.
                let _ = writeln!(text, "[rank {rank}] {line}");
            }
        }
        let first = self.first_failure();
        for (rank, RankOutcome { end, after, .. }) in self.ranks.iter().enumerate() {
            let note = if first == Some(rank) { " (the first to fail)" } else { "" };
            let _ = writeln!(text, "rank {rank}: {end} after {:.2} s{note}", after.as_secs_f64());
        }
        text
    }
}

/// Runs `program` with `arguments` as `ranks` processes, and waits until all have ended.
///
/// The ranks have no standard input. A failed rank is not an error of this function; the
/// [`Outcome`] reports it.
///
/// # Errors
/// `ranks` is 0, or a folder or process cannot be created; processes already started are killed.
pub fn launch(
    program: &Path,
    arguments: &[impl AsRef<OsStr>],
    ranks: usize,
    options: Options,
) -> Result<Outcome> {
    ensure!(ranks > 0, "number of ranks is 0: expected at least 1");
    let start = Instant::now();
    let mut job = Job::open()?;
    let mut passed = Some(options.stdout);
    let mut streams = Vec::new();
    let nodes = options.nodes.max(1);
    ensure!(
        ranks.is_multiple_of(nodes),
        "{ranks} ranks on {nodes} nodes, expected as many on each"
    );
    let per_node = ranks / nodes;
    let namespaces = (options.namespaces && nodes > 1).then(|| Namespaces::new(nodes));
    let namespaces = namespaces.and_then(|made| {
        let why = |error: &_| tracing::info!("nodes are simulated by IRIS_NODE alone: {error:#}");
        made.inspect_err(why).ok()
    });
    let place = namespaces.as_ref().map_or("127.0.0.1", |_| namespaces::FIRST);
    let network = if nodes > 1 { network(job.folder.path(), place)? } else { Vec::new() };
    for rank in 0..ranks {
        let own_stderr = rank == 0 && options.progress;
        let node = rank / per_node;
        let mut command = match &namespaces {
            Some(namespaces) => namespaces.command(node, program),
            None => Command::new(program),
        };
        let simulated = if namespaces.is_some() { 1 } else { nodes };
        // This launcher may itself run in a rank of another launcher, whose variables the new ranks
        // must not see.
        for name in launcher_variables() {
            command.env_remove(name);
        }
        command
            .args(arguments)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("LOCAL_RANK", (rank % per_node).to_string())
            .env("LOCAL_WORLD_SIZE", per_node.to_string())
            .env("IRIS_RENDEZVOUS", job.folder.path())
            .env(LAUNCHER, std::process::id().to_string())
            // On stdout, NCCL's log would be mixed with the program's output.
            .envs(std::env::var_os(NCCL_LOG).is_none().then_some((NCCL_LOG, "/dev/stderr")))
            .envs(network.iter().map(|(name, value)| (name, value)))
            .envs(simulated_node(simulated, node))
            .envs(options.environment.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped())
            .stderr(if own_stderr { Stdio::inherit() } else { Stdio::piped() });
        let child = job.spawn(command).with_context(|| format!("rank {rank} did not start"))?;
        let stdout = collect(child.stdout.take(), passed.take())?;
        streams.push((stdout, collect(child.stderr.take(), None)?));
    }
    let ends = job.wait(start, &options.deadline, &options.grace)?;
    // Dropping the job kills processes that the ranks started and left running. This comes first,
    // because such processes hold the output pipes open, and the threads joined below read the
    // pipes to their end.
    drop(job);
    let kept = |stream: JoinHandle<String>| stream.join().unwrap_or_default();
    let ranks = ends.into_iter().zip(streams).map(|((end, after), (stdout, stderr))| RankOutcome {
        end,
        after,
        stdout: kept(stdout),
        stderr: kept(stderr),
    });
    Ok(Outcome { ranks: ranks.collect() })
}

/// Environment variables of a rank on node `node` of `nodes` simulated nodes. They hide from NCCL
/// that the nodes are one host, so that it uses sockets over loopback.
fn simulated_node(nodes: usize, node: usize) -> Vec<(&'static str, String)> {
    if nodes <= 1 {
        return Vec::new();
    }
    let own = [("IRIS_NODE", node.to_string()), ("NCCL_HOSTID", format!("node{node}"))];
    own.into_iter().chain(NETWORK_ALONE.map(|(name, value)| (name, value.into()))).collect()
}

/// Environment variables that make NCCL use sockets over loopback between all ranks.
pub const NETWORK_ALONE: [(&str, &str); 4] = [
    ("NCCL_P2P_DISABLE", "1"),
    ("NCCL_SHM_DISABLE", "1"),
    ("NCCL_NET", "Socket"),
    ("NCCL_SOCKET_IFNAME", "lo"),
];

/// Environment variables by which ranks on simulated nodes find each other at `place`, the IPv4
/// address of node 0.
fn network(folder: &Path, place: &str) -> Result<Vec<(&'static str, OsString)>> {
    let port = free_port::on("127.0.0.1").context("opening a port at 127.0.0.1")?.to_string();
    let secret = folder.join("secret");
    iris_heap::Secret::new()?.save(&secret)?;
    Ok(vec![
        ("MASTER_ADDR", place.into()),
        ("IRIS_PORT", port.into()),
        ("IRIS_SECRET_FILE", secret.into()),
    ])
}

/// Running job: its private folder, the ranks' processes, and the keeper process that removes the
/// folder and kills the ranks when the launcher ends.
struct Job {
    folder: TempDir,
    /// Lock file in the job's folder; the launcher keeps it locked for as long as it lives.
    _lock: File,
    /// Keeper process, leader of the process group; reaped last, so that the group's id is not
    /// reused while the group is killed.
    keeper: Child,
    ranks: Vec<Child>,
}

impl Job {
    /// Shell program of the keeper: waits until its stdin is closed, which the launcher's end does,
    /// then kills the process group including itself. It ignores signals of the terminal.
    const KEEPER: &str = "trap '' HUP INT TERM; read -r _; \
        kill -TERM 0; sleep 0.2; rm -rf -- \"$1\"; kill -KILL 0";

    fn open() -> Result<Job> {
        let private = PermissionsExt::from_mode(0o700);
        let folder = tempfile::Builder::new().prefix("iris-").permissions(private).tempdir();
        let folder = folder.context("the job's private folder cannot be created")?;
        folder::sweep(folder.path());
        let lock = folder::hold(folder.path()).context("the job's folder cannot be locked")?;
        let keeper = Command::new("/bin/sh")
            .args(["-c", Job::KEEPER, "iris-keeper"])
            .arg(folder.path())
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        let keeper = keeper.context("/bin/sh did not start")?;
        Ok(Job { folder, _lock: lock, keeper, ranks: Vec::new() })
    }

    /// Id of the job's process group, which is the keeper's process id, because the keeper leads
    /// the group.
    fn group(&self) -> Pid {
        Pid::from_child(&self.keeper)
    }

    fn spawn(&mut self, mut command: Command) -> Result<&mut Child> {
        command.stdin(Stdio::null()).process_group(self.group().as_raw_nonzero().get());
        let child = command.spawn();
        self.ranks.push(child.with_context(|| format!("{:?}", command.get_program()))?);
        self.ranks.last_mut().context("no rank was started")
    }

    /// Waits until every rank has ended; kills ranks that still run at the deadline, or when the
    /// time `grace` has passed since the first failure.
    fn wait(
        &mut self,
        start: Instant,
        deadline: &Duration,
        grace: &Duration,
    ) -> Result<Vec<(End, Duration)>> {
        let lost = "a rank cannot be waited for";
        let mut ends = vec![None; self.ranks.len()];
        let mut first_failure = None;
        let (mut together, mut settled, mut order) = (Vec::new(), None, 0);
        loop {
            let now = start.elapsed();
            let given_up = if now >= *deadline {
                Some(End::Late)
            } else {
                first_failure.filter(|failure| now >= *failure + *grace).map(|_| End::Stopped)
            };
            let running = self.ranks.iter_mut().zip(&mut ends).enumerate();
            for (rank, (child, end)) in running.filter(|(_, it)| it.1.is_none()) {
                let status = match given_up {
                    None => child.try_wait().context(lost)?,
                    Some(_) => {
                        child.kill().context("a rank cannot be killed")?;
                        Some(child.wait().context(lost)?)
                    }
                };
                let Some(status) = status else { continue };
                if !status.success() {
                    first_failure.get_or_insert(now);
                }
                let how = ended(status, given_up);
                *end = Some((how, now));
                together.push((how.follows(), rank));
            }
            // Announces ended ranks to the ranks that wait for them. A waiting rank blames the rank
            // whose end is announced first. The announcement is delayed because the system may
            // report the end of a rank before the end of the rank whose end was the cause.
            if !together.is_empty() {
                let until = *settled.get_or_insert(now + SETTLE);
                if now >= until || together.iter().any(|(follows, _)| *follows == 0) {
                    together.sort_unstable();
                    for (_, rank) in together.drain(..) {
                        self.leave_word(rank, order);
                        order += 1;
                    }
                    settled = None;
                }
            }
            if let Some(ends) = ends.iter().copied().collect() {
                return Ok(ends);
            }
            let until = first_failure
                .map_or(*deadline, |failure| deadline.min(&(failure + *grace)).to_owned());
            let until = settled.map_or(until, |settled: Duration| settled.min(until));
            self.sleep(&ends, until.saturating_sub(start.elapsed()))?;
        }
    }

    /// Writes a file that announces the end of `rank` to the other ranks. The file contains
    /// `order`, the number of ranks that ended before. If the file cannot be written, the other
    /// ranks wait until their deadline.
    fn leave_word(&self, rank: usize, order: usize) {
        let word = self.folder.path().join(format!("lost-{rank}"));
        // The file is written under another name and then renamed, so that readers see complete
        // content.
        let part = word.with_extension("part");
        if check_file_size("the word of a rank's end", 20).is_ok() {
            let _ = fs::write(&part, order.to_string()).and_then(|()| fs::rename(part, word));
        }
    }

    /// Sleeps until one of the running ranks ends, but at most for `most`.
    fn sleep(&self, ends: &[Option<(End, Duration)>], most: Duration) -> Result<()> {
        let running = self.ranks.iter().zip(ends).filter(|(_, end)| end.is_none());
        let open =
            |(child, _): (&Child, _)| pidfd_open(Pid::from_child(child), PidfdFlags::empty());
        let Ok(running) = running.map(open).collect::<Result<Vec<_>, _>>() else {
            // Without pidfds (old kernel, or no file descriptors left), sleep a short time without
            // watching the ranks.
            thread::sleep(most.min(Duration::from_millis(20)));
            return Ok(());
        };
        let mut fds: Vec<_> = running.iter().map(|it| PollFd::new(it, PollFlags::IN)).collect();
        let most = Timespec {
            tv_sec: i64::try_from(most.as_secs()).unwrap_or(i64::MAX),
            // At least 1 ns, so that the clock has passed the deadline when the sleep ends.
            tv_nsec: i64::from(most.subsec_nanos().max(1)),
        };
        match poll(&mut fds, Some(&most)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error).context("the ranks cannot be waited for"),
        }
    }
}

impl Drop for Job {
    /// Kills the remaining processes of the job at once. Errors are ignored, because nothing more
    /// can be done.
    fn drop(&mut self) {
        let _ = kill_process_group(self.group(), Signal::KILL);
        for child in self.ranks.iter_mut().chain([&mut self.keeper]) {
            let _ = child.wait();
        }
    }
}

fn ended(status: ExitStatus, given_up: Option<End>) -> End {
    match (status.code(), status.signal(), given_up) {
        (Some(code), _, _) => End::Exited(code),
        (None, Some(signal), Some(by_us)) if signal == Signal::KILL.as_raw() => by_us,
        (None, signal, _) => End::Signalled(signal.unwrap_or_default()),
    }
}

/// Starts a thread that reads a rank's output to its end, forwards it to `passed` as it comes, and
/// returns its last bytes.
fn collect(
    stream: Option<impl Read + Send + 'static>,
    mut passed: Option<Box<dyn Write + Send>>,
) -> Result<JoinHandle<String>> {
    let collect = move || {
        let mut kept = Vec::new();
        let mut chunk = [0; 8 << 10];
        let Some(mut stream) = stream else { return String::new() };
        loop {
            let read = match stream.read(&mut chunk) {
                Ok(0) => break,
                Ok(read) => &chunk[..read],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            // If the reader of the forwarded output is gone (`| head`), output is no longer
            // forwarded but still read, so that the rank does not block.
            let gone = |to: &mut Box<dyn Write + Send>| {
                to.write_all(read).and_then(|()| to.flush()).is_err()
            };
            if passed.as_mut().is_some_and(gone) {
                passed = None;
            }
            kept.extend_from_slice(read);
            if kept.len() > 2 * KEPT {
                kept.drain(..kept.len() - KEPT);
            }
        }
        kept.drain(..kept.len().saturating_sub(KEPT));
        String::from_utf8_lossy(&kept).into_owned()
    };
    let reader = thread::Builder::new().name("iris-output".into()).spawn(collect);
    reader.context("the thread that reads the output of a rank did not start")
}

#[cfg(test)]
mod tests;
