//! Jobs: work of all ranks of a world, started as processes or as threads.

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::Stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use iris_heap::{BackendKind, MAX_RANKS, Settings, World};
use iris_testkit::launch::{self, launch};
use iris_testkit::note;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::errors::{Ranks, usage};

/// Work of every rank of a world. It is passed to rank processes as JSON.
pub(crate) trait Job: Serialize + DeserializeOwned + Sync {
    /// Result of the whole job, which rank 0 returns to the starter.
    type Report: Serialize + DeserializeOwned + Send;

    /// Name of the job on the command line of `iris rank`.
    const NAME: &str;

    /// Runs one rank's part; rank 0 returns the report.
    fn run_rank(&self, world: &World) -> Result<Option<Self::Report>>;
}

/// Placement of a job's ranks: their number, the number of nodes, and whether they are threads or
/// processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) ranks: usize,
    pub(crate) threads: bool,
    /// Number of nodes that this host simulates; the ranks are split evenly over them.
    pub(crate) nodes: usize,
    /// Whether nodes get namespaces of their own where possible; not for GPUs.
    namespaces: bool,
    /// Whether the ranks are started by mpirun, and the data between nodes travel over MPI.
    mpi: bool,
}

impl Place {
    /// Checks the number of ranks and the environment, before any rank is started.
    pub(crate) fn new(ranks: usize, threads: bool) -> Result<Place> {
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(usage("--ranks", ranks, format!("1 to {MAX_RANKS}")));
        }
        Settings::from_env()?;
        Ok(Place { ranks, threads, nodes: 1, namespaces: false, mpi: false })
    }

    /// Kind of ranks (threads or processes) and number of nodes in words, for messages.
    pub(crate) fn words(self) -> String {
        let kind = if self.threads { "threads of one process" } else { "processes" };
        match (self.nodes, self.mpi) {
            (1, _) => kind.into(),
            (nodes, false) => format!("{kind} on {nodes} nodes"),
            (nodes, true) => format!("{kind} on {nodes} nodes, over MPI"),
        }
    }

    /// Distributes the ranks, which use `backend`, over `nodes` simulated nodes, equally many on
    /// each.
    pub(crate) fn on_nodes(self, nodes: usize, backend: BackendKind) -> Result<Place> {
        let namespaces = backend == BackendKind::Cpu;
        match nodes {
            1.. if self.ranks.is_multiple_of(nodes) => Ok(Place { nodes, namespaces, ..self }),
            _ => {
                let expected = format!("a divisor of the {} ranks", self.ranks);
                Err(usage("--nodes", nodes, expected))
            }
        }
    }

    /// Sets that the ranks are started by mpirun and that data between nodes travel over MPI, if
    /// `mpi`. Call after [`Place::on_nodes`].
    pub(crate) fn over_mpi(self, mpi: bool, backend: BackendKind) -> Result<Place> {
        match self {
            _ if !mpi => Ok(self),
            _ if cfg!(not(feature = "mpi")) => {
                let expected = "on for --mpi; `cargo xtask run ... --mpi` builds with it";
                Err(usage("feature mpi of this program", "off", expected))
            }
            _ if backend != BackendKind::Cpu => Err(usage("--backend", backend, "cpu for --mpi")),
            Place { nodes: 1, .. } => Err(usage("--nodes", 1, "at least 2 for --mpi")),
            _ => Ok(Place { mpi, namespaces: false, ..self }),
        }
    }

    /// Options of a job and of its placement, to be printed with the result.
    pub(crate) fn options(self, job: &impl Job) -> Result<serde_json::Value> {
        let mut options = serde_json::to_value(job)?;
        options["threads_as_ranks"] = self.threads.into();
        options["mpi"] = self.mpi.into();
        Ok(options)
    }

    /// Runs a job to its end.
    ///
    /// # Errors
    /// First failure of a rank. Rank processes print their errors to stderr.
    pub(crate) fn run<J: Job>(self, job: &J) -> Result<J::Report> {
        self.run_with(job, &Said::default())
    }

    /// Runs a job like [`Place::run`], and collects the stdout of rank 0's process in `said`.
    pub(crate) fn run_with<J: Job>(self, job: &J, said: &Said) -> Result<J::Report> {
        if self.threads {
            let per_node = self.ranks / self.nodes;
            let reports = match self.nodes {
                1 => World::run_threads(self.ranks, |world| job.run_rank(&world))?,
                nodes => World::run_nodes(nodes, per_node, |world| job.run_rank(&world))?,
            };
            return reports.into_iter().flatten().next().context("rank 0 has returned no report");
        }
        let program = std::env::current_exe().context("the path of this program is unknown")?;
        let text = serde_json::to_string(job)?;
        let arguments = ["rank", J::NAME, &text];
        if self.mpi {
            self.run_under_mpirun(&program, &arguments, said)?;
        } else {
            let options = launch::Options::default().stdout(said.clone());
            let options = options.progress(io::stderr().is_terminal());
            let options = options.nodes(self.nodes).namespaces(self.namespaces);
            let outcome = launch(&program, &arguments, self.ranks, options)?;
            if !outcome.ok() {
                note!("{}", outcome.report().to_string().trim_end());
                return Err(Ranks(outcome.exit_code()).into());
            }
        }
        // Libraries may print to stdout too, also at the end of the process, as NCCL does with
        // NCCL_DEBUG.
        let text = said.text();
        let report = text.lines().rev().find_map(|line| serde_json::from_str(line).ok());
        report.with_context(|| format!("rank 0 has returned no report, but printed: {text}"))
    }

    /// Runs `program` as the ranks under mpirun, and collects their stdout in `said`. Stderr is
    /// that of this process.
    fn run_under_mpirun(self, program: &Path, arguments: &[&str], said: &Said) -> Result<()> {
        const LIMIT: Duration = Duration::from_secs(3600);
        let world = (self.nodes, self.ranks / self.nodes);
        let folder = tempfile::tempdir().context("making a folder for the files of mpirun")?;
        let mut command = launch::mpirun(program, arguments, world, (folder.path(), LIMIT))?;
        command.stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = command.output().context("mpirun, of openmpi-bin, did not start")?;
        said.clone().write_all(&output.stdout)?;
        match output.status.code() {
            Some(0) => Ok(()),
            code => Err(Ranks(code.unwrap_or(1)).into()),
        }
    }
}

/// Output of rank 0 so far, to which the rank's process or thread appends.
#[derive(Clone, Default)]
pub(crate) struct Said(Arc<Mutex<Vec<u8>>>);

impl Said {
    pub(crate) fn text(&self) -> String {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl Write for Said {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// All-gather of `mine`, serialised as JSON, between the ranks. Collective.
#[track_caller]
pub(crate) fn gather<T: Serialize + DeserializeOwned>(world: &World, mine: &T) -> Result<Vec<T>> {
    let all = world.allgather(&serde_json::to_vec(mine)?)?;
    all.iter().map(|bytes| Ok(serde_json::from_slice(bytes)?)).collect()
}

/// Serialises f64 as its bits, because JSON has no NaN.
pub(crate) mod bits {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(value.to_bits())
    }

    pub(crate) fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<f64, D::Error> {
        u64::deserialize(from).map(f64::from_bits)
    }

    /// Deserialises a number; null becomes NaN.
    pub(crate) fn or_nan<'d, D: Deserializer<'d>>(from: D) -> Result<f64, D::Error> {
        Option::deserialize(from).map(|value| value.unwrap_or(f64::NAN))
    }
}

/// Serialises values by their names (`Display`), and deserialises names by `FromStr`.
pub(crate) mod text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<T: Display, S: Serializer>(
        value: &T,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(crate) fn deserialize<'d, T, D>(from: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'d>,
    {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}
