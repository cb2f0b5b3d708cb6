//! Table of launchers: for each launcher, the variables by which it describes a rank, the names of
//! its processes, and the command that passes variables to its ranks.

use crate::env::wrong;
use crate::error::{Error, Result};

/// Function that looks up an environment variable.
pub(crate) type Get<'a> = &'a dyn Fn(&str) -> Result<Option<String>>;

/// Launcher of ranks. If a field lists several variables, the first one that is set is used.
#[derive(Debug, PartialEq)]
pub(super) struct Launcher {
    /// Name of the launcher in messages.
    pub(super) name: &'static str,
    /// Names of the processes that start the launcher's ranks on each host. Empty if no names are
    /// needed, because the processes' environments show that they lack the variables of a rank.
    pub(super) programs: &'static [&'static str],
    /// Variable that distinguishes this launcher from other launchers with the same `rank`
    /// variable.
    pub(super) mark: Option<&'static str>,
    pub(super) rank: &'static str,
    pub(super) size: &'static [&'static str],
    pub(super) local_rank: &'static [&'static str],
    pub(super) local_size: &'static [&'static str],
    pub(super) node: &'static [&'static str],
    /// Variables with the number of hosts.
    pub(super) hosts: &'static [&'static str],
    /// Variables that together identify the job. If none is set, the process that has started the
    /// ranks identifies the job, on one host only.
    pub(super) job: &'static [&'static str],
    /// Variable with the number of restarts, which is appended to the job's identity if set.
    pub(super) restart: &'static [&'static str],
    /// Command that passes variables to all ranks, as four texts: start of the command, text before
    /// each name, text between name and value, and end.
    pub(super) passing: [&'static str; 4],
}

/// Variables that a person sets, for example in a shell loop; every process with `RANK` set is a
/// rank.
const BY_HAND: Launcher = Launcher {
    name: "hand",
    programs: &[],
    mark: None,
    rank: "RANK",
    size: &["WORLD_SIZE"],
    local_rank: &["LOCAL_RANK"],
    local_size: &["LOCAL_WORLD_SIZE"],
    node: &["GROUP_RANK"],
    hosts: &[],
    job: &["MASTER_PORT"],
    restart: &[],
    passing: ["", " ", "=", " PROGRAM on all ranks"],
};

/// Variables of PMIx launchers, among them `prterun`. PMIx has no variable for the number of ranks,
/// so variables of other launchers are tried.
pub(super) const PMIX: Launcher = Launcher {
    name: "PMIx",
    rank: "PMIX_RANK",
    size: &["WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"],
    local_rank: SLURM.local_rank,
    local_size: &[],
    node: SLURM.node,
    hosts: SLURM.hosts,
    job: &["PMIX_NAMESPACE"],
    restart: SLURM.restart,
    ..OPEN_MPI
};

const OPEN_MPI: Launcher = Launcher {
    name: "Open MPI",
    programs: &[
        "mpirun",
        "mpiexec",
        "orterun",
        "prterun",
        "orted",
        "prted",
        "prte",
        "mpirun.openmpi",
        "mpiexec.openmpi",
    ],
    mark: None,
    rank: "OMPI_COMM_WORLD_RANK",
    size: &["OMPI_COMM_WORLD_SIZE"],
    local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
    local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
    node: &[],
    hosts: &[],
    job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    restart: &[],
    passing: ["mpirun", " -x ", "=", " PROGRAM"],
};

pub(super) const SLURM: Launcher = Launcher {
    name: "Slurm",
    programs: &["slurmstepd"],
    mark: None,
    rank: "SLURM_PROCID",
    size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_rank: &["SLURM_LOCALID"],
    local_size: &["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"],
    node: &["SLURM_NODEID"],
    hosts: &["SLURM_STEP_NUM_NODES", "SLURM_NNODES"],
    job: &["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID"],
    restart: &["SLURM_RESTART_COUNT"],
    passing: ["srun --export=ALL", ",", "=", " PROGRAM"],
};

/// All launchers. A row with a `mark` stands before the row with the same `rank` and no `mark`,
/// because of several rows with the same `rank` the first that fits counts.
pub(super) const LAUNCHERS: &[Launcher] = &[
    Launcher {
        name: "torchrun",
        mark: Some("TORCHELASTIC_RUN_ID"),
        job: &["MASTER_PORT", "TORCHELASTIC_RUN_ID"],
        restart: &["TORCHELASTIC_RESTART_COUNT"],
        ..BY_HAND
    },
    Launcher { name: "iris", mark: Some("LAUNCHER_PID"), job: &["IRIS_RENDEZVOUS"], ..BY_HAND },
    OPEN_MPI,
    Launcher {
        name: "Hydra (MPICH, Intel MPI)",
        programs: &["hydra_pmi_proxy"],
        rank: "PMI_RANK",
        size: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID"],
        local_size: &["MPI_LOCALNRANKS"],
        job: &["I_MPI_HYDRA_UUID", "PMI_JOBID"],
        passing: ["mpiexec", " -genv ", " ", " PROGRAM"],
        ..OPEN_MPI
    },
    SLURM,
    PMIX,
    BY_HAND,
];

/// Variables that exist in a Slurm task but not in a batch script; the second name is the older
/// one.
pub(super) const SLURM_STEP: &[&str] = &["SLURM_STEP_ID", "SLURM_STEPID"];

/// Whether a variable may be set although no launcher has started this process: Slurm sets its
/// variables in batch scripts too, and users set some variables for later launches.
fn is_ambient(name: &str) -> bool {
    ["MASTER_PORT", "LAUNCHER_PID"].contains(&name)
        || SLURM.variables().any(|it| it == name) && !SLURM_STEP.contains(&name)
}

/// Variables that ranks on several hosts need, with placeholders for their values.
pub(super) const FOR_SEVERAL_HOSTS: [(&str, &str); 2] =
    [("MASTER_ADDR", "HOST"), ("IRIS_SECRET_FILE", "FILE")];

impl Launcher {
    /// Whether this is the row of [`BY_HAND`].
    pub(super) fn is_by_hand(&self) -> bool {
        self.rank == BY_HAND.rank && self.mark.is_none()
    }

    pub(super) fn variables(&self) -> impl Iterator<Item = &'static str> {
        let lists = [
            self.size,
            self.local_rank,
            self.local_size,
            self.node,
            self.hosts,
            self.job,
            self.restart,
        ];
        [self.rank].into_iter().chain(self.mark).chain(lists.into_iter().flatten().copied())
    }

    /// Command that passes these variables to all ranks.
    pub(super) fn passing(&self, variables: &[(&str, &str)]) -> String {
        let [start, option, between, end] = self.passing;
        let pairs = variables.iter().map(|(name, value)| format!("{option}{name}{between}{value}"));
        format!("{start}{}{end}", pairs.collect::<String>()).trim_start().into()
    }

    /// Error of a rank whose job is identified by no variable or process. If ranks are on several
    /// hosts (`several`) and no variable names rank 0's host (`has_master` is false), the error
    /// names all variables that such ranks need.
    pub(super) fn no_port(&self, several: bool, has_master: bool) -> Error {
        let why = match several {
            true => "ranks are on several hosts",
            false => "the process that started this one has ended or is not visible",
        };
        let mut pass = vec![("MASTER_PORT", "N")];
        if several && !has_master {
            pass.extend(FOR_SEVERAL_HOSTS);
        }
        let expected = format!(
            "a port number that no other job has, since nothing else identifies this job ({why}): {}",
            self.passing(&pass)
        );
        wrong("MASTER_PORT", "(not set)", &expected)
    }
}

/// Variables by which launchers describe ranks; some occur twice.
pub(crate) fn variables() -> impl Iterator<Item = &'static str> {
    LAUNCHERS.iter().flat_map(Launcher::variables)
}

/// Variables that are set only in processes that a launcher has started.
pub(super) fn proofs() -> impl Iterator<Item = &'static str> {
    variables().chain(["IRIS_NODE"]).filter(|name| !is_ambient(name))
}

/// First of the variables that is set, with its value.
pub(super) fn first<'a>(get: Get<'_>, names: &[&'a str]) -> Result<Option<(&'a str, String)>> {
    for name in names {
        if let Some(value) = get(name)? {
            return Ok(Some((name, value)));
        }
    }
    Ok(None)
}
