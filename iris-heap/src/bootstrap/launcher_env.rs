//! Detection of the launcher from its environment variables: rank, size, place and job of this
//! process. No launcher library is linked.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::str::FromStr;

use super::process::{BY_PARENT, began};
use crate::env::{read, wrong};
use crate::error::{Error, Result};

/// Largest number of ranks of a world. A heap spans one node and has at most
/// [`MAX_RANKS`](crate::MAX_RANKS).
pub const MAX_WORLD: usize = 4096;

/// Random 128-bit number that the processes of one world share, and no other processes have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UniqueId(u128);

impl UniqueId {
    /// Makes a new id from the system's random numbers.
    ///
    /// # Errors
    /// [`Error::System`] if random numbers are unavailable.
    pub fn new() -> Result<UniqueId> {
        let mut bytes = [0; 16];
        File::open("/dev/urandom")
            .and_then(|mut f| f.read_exact(&mut bytes))
            .map_err(|e| Error::system("reading /dev/urandom", e))?;
        Ok(UniqueId(u128::from_le_bytes(bytes)))
    }
}

impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for UniqueId {
    type Err = Error;

    fn from_str(text: &str) -> Result<UniqueId> {
        let number = u128::from_str_radix(text, 16).ok().filter(|_| text.len() == 32);
        number
            .map(UniqueId)
            .ok_or_else(|| Error::invalid("unique id", text, "32 hexadecimal digits"))
    }
}

/// Position of a rank: index of its node, number of the rank within the node, and number of ranks
/// of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) node: usize,
    pub(crate) local_rank: usize,
    pub(crate) local_size: usize,
}

/// Position of this process in its job, as the launcher's environment variables describe it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Launch {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) place: Place,
    /// Identity of the job, equal on all processes of the job and different for other jobs.
    pub(crate) job: String,
    /// Text of the variables that say that the ranks are on several hosts; `None` if no variable
    /// says so.
    pub(crate) several_hosts: Option<String>,
    /// Name and value of the variable that says on which host rank 0 is.
    pub(super) master: Option<(&'static str, String)>,
    /// Values of `MASTER_PORT` and of `IRIS_PORT`.
    pub(super) ports: [Option<u16>; 2],
    /// Whether Slurm started the ranks.
    pub(super) slurm: bool,
}

/// Function that looks up an environment variable.
pub(crate) type Get<'a> = &'a dyn Fn(&str) -> Result<Option<String>>;

/// Names of one launcher's variables; in a list, the first variable that is set is used.
struct Names {
    rank: &'static str,
    size: &'static [&'static str],
    local_rank: &'static str,
    local_size: &'static str,
    node: &'static str,
    /// Variables that identify the job. If none is set, the parent process identifies it.
    job: &'static [&'static str],
    /// Variable with the number of restarts, which is appended to the job's identity if set.
    restart: &'static str,
}

const BY_HAND: Names = Names {
    rank: "RANK",
    size: &["WORLD_SIZE"],
    local_rank: "LOCAL_RANK",
    local_size: "LOCAL_WORLD_SIZE",
    node: "GROUP_RANK",
    job: &["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"],
    restart: "TORCHELASTIC_RESTART_COUNT",
};

const OPEN_MPI: Names = Names {
    rank: "OMPI_COMM_WORLD_RANK",
    size: &["OMPI_COMM_WORLD_SIZE"],
    local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    node: "",
    job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    restart: "",
};

const PMI: Names = Names {
    rank: "PMI_RANK",
    size: &["PMI_SIZE"],
    local_rank: "MPI_LOCALRANKID",
    local_size: "MPI_LOCALNRANKS",
    node: "",
    job: &["PMI_JOBID"],
    restart: "",
};

/// Variables of PMIx launchers. PMIx has no variable for the size, so the size variables of other
/// launchers are tried.
const PMIX: Names = Names {
    rank: "PMIX_RANK",
    size: &["WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"],
    local_rank: "SLURM_LOCALID",
    local_size: "",
    node: "SLURM_NODEID",
    job: &["PMIX_NAMESPACE"],
    restart: "SLURM_RESTART_COUNT",
};

const SLURM: Names = Names {
    rank: "SLURM_PROCID",
    size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_rank: "SLURM_LOCALID",
    local_size: "",
    node: "SLURM_NODEID",
    job: &["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEPID"],
    restart: "SLURM_RESTART_COUNT",
};

/// Variables that exist in a Slurm task but not in a batch script; the second is the older name.
const SLURM_STEP: &[&str] = &["SLURM_STEP_ID", "SLURM_STEPID"];

impl Launch {
    pub(crate) fn from_env() -> Result<Launch> {
        Launch::detect(&read)
    }

    /// Finds the launcher that started this process. An inner launcher precedes an outer one:
    /// torchrun under Slurm sets its own variables. Contradicting variables of two launchers are an
    /// error, because a world of the wrong size would otherwise go unnoticed.
    pub(crate) fn detect(get: Get<'_>) -> Result<Launch> {
        let is_set = |name: &str| get(name).map(|v| v.is_some());
        let step = first(get, SLURM_STEP)?.is_some();
        let mut found = Vec::new();
        if is_set("RANK")? || (is_set("WORLD_SIZE")? && !is_set("PMIX_RANK")?) {
            found.push(&BY_HAND);
        }
        for names in [&OPEN_MPI, &PMI] {
            if is_set(names.rank)? || is_set(names.size[0])? {
                found.push(names);
            }
        }
        if step && is_set("SLURM_PROCID")? {
            found.push(&SLURM);
        }
        // PMIx variables are tried last, because several launchers set them, and they do not
        // include the size.
        if found.is_empty() && is_set("PMIX_RANK")? {
            found.push(&PMIX);
        }
        let Some((&names, others)) = found.split_first() else {
            return Launch::without(get);
        };
        let mut launch = Launch::by(names, get)?;
        let hosts = first(get, &["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])?;
        launch.slurm = [SLURM.rank, PMIX.rank].contains(&names.rank) && step;
        if launch.slurm
            && let Some((name, hosts)) = hosts
            && hosts.trim() != "1"
        {
            launch.several_hosts = Some(format!("{name}={hosts}"));
        }
        let torchrun = names.rank == BY_HAND.rank && is_set("TORCHELASTIC_RUN_ID")?;
        for other in others {
            let Some((size_name, size)) = first(get, other.size)? else { continue };
            let rank = get(other.rank)?.unwrap_or_else(|| "(not set)".into());
            if (rank.trim(), size.trim()) == (&launch.rank.to_string(), &launch.size.to_string()) {
                continue;
            }
            // A launcher that started a single task is skipped: inside that task another launcher
            // or a shell has started the ranks.
            if size.trim() == "1" && (step || torchrun) {
                continue;
            }
            let (ours, _) = first(get, names.size)?.unwrap_or((names.size[0], String::new()));
            return Err(wrong(
                &format!(
                    "{}={} {ours}={} and {}",
                    names.rank, launch.rank, launch.size, other.rank
                ),
                &format!("{rank} {size_name}={size}"),
                "launchers that agree: unset the variables that are left from another one",
            ));
        }
        Ok(launch)
    }

    /// Handles the absence of a launcher. A Slurm batch script has a task's variables although it
    /// is no task. A task whose environment lost the step's variables looks like such a script, so
    /// more than one task is an error.
    fn without(get: Get<'_>) -> Result<Launch> {
        if let Some(task) = get(SLURM.rank)? {
            let tasks = first(get, SLURM.size)?;
            let several = tasks.as_ref().is_some_and(|(_, tasks)| tasks.trim() != "1");
            if several || task.trim() != "0" {
                let and =
                    tasks.map_or(String::new(), |(name, tasks)| format!(" and {name}={tasks}"));
                return Err(wrong(
                    SLURM_STEP[0],
                    "(not set)",
                    &format!(
                        "the step, since SLURM_PROCID={task}{and}: start the ranks with srun, or set \
                         RANK and WORLD_SIZE (0 and 1 for a program of one rank in a batch script)"
                    ),
                ));
            }
        }
        let place = Place { node: 0, local_rank: 0, local_size: 1 };
        let job = String::new();
        let (several_hosts, master, ports) = (None, None, [None; 2]);
        Ok(Launch { rank: 0, size: 1, place, job, several_hosts, master, ports, slurm: false })
    }

    fn by(names: &Names, get: Get<'_>) -> Result<Launch> {
        let sizes = names.size.join(" or ");
        let (size_name, size) = first(get, names.size)?.ok_or_else(|| {
            let expected = format!("the number of ranks, since {} is set", names.rank);
            wrong(&sizes, "(not set)", &expected)
        })?;
        let size = number(size_name, &size, 1, MAX_WORLD, "")?;
        let below = format!(", below {size_name}={size}");
        let rank = get(names.rank)?.ok_or_else(|| {
            wrong(names.rank, "(not set)", &format!("a rank, since {size_name} is set"))
        })?;
        let rank = number(names.rank, &rank, 0, size - 1, &below)?;
        let local_size = match optional(get, names.local_size)? {
            Some(text) => number(names.local_size, &text, 1, size, &format!(" = {size_name}"))?,
            None => size,
        };
        let several_hosts = (local_size != size)
            .then(|| format!("{}={local_size}, {size_name}={size}", names.local_size));
        let local_below = if local_size == size {
            below
        } else {
            format!(", below {}={local_size}", names.local_size)
        };
        let local_rank = match optional(get, names.local_rank)? {
            Some(text) => number(names.local_rank, &text, 0, local_size - 1, &local_below)?,
            None => rank,
        };
        let node = match optional(get, names.node)? {
            Some(text) => number(names.node, &text, 0, usize::MAX, "")?,
            None => 0,
        };
        let mut parts = Vec::new();
        for name in names.job {
            if let Some(value) = get(name)? {
                parts.push(format!("{name}={value}"));
            }
        }
        // Without a port, an address does not distinguish two jobs of a host, so the parent process
        // is added to the identity.
        let several = several_hosts.is_some() || get("IRIS_NODE")?.is_some();
        if parts.is_empty() || (parts.len() == 1 && parts[0].starts_with("MASTER_ADDR")) {
            // Ranks on several hosts have no common parent process; there the port distinguishes
            // jobs.
            parts.push(if several { "no name".into() } else { parent() });
        }
        if let Some(count) = optional(get, names.restart)? {
            parts.push(format!("{}={count}", names.restart));
        }
        let place = Place { node, local_rank, local_size };
        let master = first(get, &["MASTER_ADDR", "SLURM_STEP_NODELIST", "SLURM_NODELIST"])?;
        let port = |name: &'static str| -> Result<Option<u16>> {
            let text = get(name)?;
            text.map(|text| number(name, &text, 1, 65535, "").map(|port| port as u16)).transpose()
        };
        // `MASTER_PORT` is checked only if ranks meet over TCP; otherwise it need not be a port.
        let ports = if several { [port("MASTER_PORT")?, port("IRIS_PORT")?] } else { [None; 2] };
        let (job, slurm) = (parts.join(" "), false);
        Ok(Launch { rank, size, place, job, several_hosts, master, ports, slurm })
    }
}

fn first<'a>(get: Get<'_>, names: &[&'a str]) -> Result<Option<(&'a str, String)>> {
    for name in names {
        if let Some(value) = get(name)? {
            return Ok(Some((name, value)));
        }
    }
    Ok(None)
}

fn optional(get: Get<'_>, name: &str) -> Result<Option<String>> {
    if name.is_empty() { Ok(None) } else { get(name) }
}

fn number(name: &str, text: &str, least: usize, most: usize, because: &str) -> Result<usize> {
    match text.trim().parse::<usize>() {
        Ok(n) if (least..=most).contains(&n) => Ok(n),
        _ if most == usize::MAX => Err(wrong(name, text, "a number")),
        _ => Err(wrong(name, text, &format!("a number from {least} to {most}{because}"))),
    }
}

/// Identity of the process that started this one: its id and start time. All ranks started by one
/// launcher or one shell have the same parent.
fn parent() -> String {
    let pid = rustix::process::getppid().map_or(0, |p| p.as_raw_nonzero().get());
    let began = began(&pid.to_string()).map_or("?".into(), |began| format!("{began:.2?}"));
    format!(
        "{BY_PARENT}{pid} of {began}, since MASTER_PORT is not set: where the ranks of a job are \
         not started by one process, set MASTER_PORT to the same number for all"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::process::parent_command;

    fn detect(vars: &[(&str, &str)]) -> Result<Launch> {
        Launch::detect(&|name| Ok(vars.iter().find(|v| v.0 == name).map(|v| v.1.to_string())))
    }

    #[track_caller]
    fn fails(vars: &[(&str, &str)], words: &[&str]) {
        let text = detect(vars).unwrap_err().to_string();
        assert!(words.iter().all(|w| text.contains(w)), "{text}");
    }

    #[test]
    fn torchrun() {
        let l = detect(&[
            ("RANK", "2"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "2"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("GROUP_RANK", "0"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("TORCHELASTIC_RESTART_COUNT", "1"),
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_ID", "0"),
        ])
        .unwrap();
        assert_eq!((l.rank, l.size), (2, 4));
        assert_eq!(l.place, Place { node: 0, local_rank: 2, local_size: 4 });
        assert_eq!(
            l.job,
            "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none \
             TORCHELASTIC_RESTART_COUNT=1"
        );
    }

    #[test]
    fn by_hand_the_parent_names_the_job() {
        let l = detect(&[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "host")]).unwrap();
        assert!(l.job.contains(&format!("{}", rustix::process::getppid().unwrap())), "{}", l.job);
        assert!(l.job.contains("set MASTER_PORT") && !l.job.contains('?'), "{}", l.job);
        assert_eq!(l.place.local_rank, 1);
        // The command of the test's parent: cargo, a shell, or a runner of tests.
        assert!(parent_command(&l.job).is_some_and(|command| !command.is_empty()), "{}", l.job);
        assert_eq!(parent_command("MASTER_PORT=29500"), None);
    }

    #[test]
    fn other_launchers() {
        let l = detect(&[
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "3"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "3"),
            ("PMIX_NAMESPACE", "prterun-7"),
            ("PMIX_RANK", "1"),
        ])
        .unwrap();
        assert_eq!((l.rank, l.size, l.job.as_str()), (1, 3, "PMIX_NAMESPACE=prterun-7"));

        let l = detect(&[
            ("PMI_RANK", "0"),
            ("PMI_SIZE", "2"),
            ("MPI_LOCALRANKID", "0"),
            ("MPI_LOCALNRANKS", "2"),
        ]);
        assert_eq!(l.unwrap().size, 2);

        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_NTASKS", "8"),
            ("SLURM_LOCALID", "3"),
            ("SLURM_NODEID", "0"),
            ("SLURM_JOB_ID", "77"),
            ("SLURM_STEP_ID", "2"),
            ("SLURM_NNODES", "1"),
        ];
        let l = detect(&slurm).unwrap();
        assert_eq!((l.rank, l.size, l.job.as_str()), (3, 4, "SLURM_JOB_ID=77 SLURM_STEP_ID=2"));
        let older = slurm.map(|v| if v.0 == "SLURM_STEP_ID" { ("SLURM_STEPID", v.1) } else { v });
        assert_eq!(detect(&older).unwrap().size, 4);
        // A task whose environment lost the step's variables looks like a batch script without
        // srun, and is an error.
        let batch: Vec<_> = slurm.into_iter().filter(|v| v.0 != "SLURM_STEP_ID").collect();
        fails(&batch, &["SLURM_STEP_ID=(not set)", "SLURM_PROCID=3", "SLURM_STEP_NUM_TASKS=4"]);
        fails(&[("SLURM_PROCID", "2")], &["SLURM_PROCID=2", "srun", "RANK"]);
        fails(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")], &["SLURM_NTASKS=8", "srun"]);
        let alone = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")];
        assert_eq!(detect(&alone).unwrap().size, 1, "a batch script of one task");
        assert_eq!(detect(&[("SLURM_PROCID", "0")]).unwrap().size, 1);

        let l = detect(&[("PMIX_RANK", "1"), ("WORLD_SIZE", "2"), ("PMIX_NAMESPACE", "n")]);
        assert_eq!((l.as_ref().unwrap().rank, l.unwrap().size), (1, 2));
        assert_eq!(detect(&[]).unwrap().size, 1);
    }

    #[test]
    fn launchers_that_disagree_are_named() {
        let mpirun = [("OMPI_COMM_WORLD_RANK", "2"), ("OMPI_COMM_WORLD_SIZE", "4")];
        let with = |more: &[(&'static str, &'static str)]| [&mpirun[..], more].concat();
        // Variables that an earlier run left in the shell contradict the launcher's variables,
        // which is an error.
        fails(
            &with(&[("RANK", "0"), ("WORLD_SIZE", "1")]),
            &["RANK=0 WORLD_SIZE=1", "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4", "unset"],
        );
        fails(&with(&[("RANK", "2"), ("WORLD_SIZE", "8")]), &["WORLD_SIZE=8", "SIZE=4"]);
        fails(&with(&[("RANK", "1"), ("WORLD_SIZE", "4")]), &["RANK=1", "RANK=2"]);
        fails(&with(&[("PMI_RANK", "2"), ("PMI_SIZE", "3")]), &["PMI_RANK=2 PMI_SIZE=3"]);
        let alone = [("RANK", "1"), ("WORLD_SIZE", "2"), ("PMI_RANK", "0"), ("PMI_SIZE", "1")];
        fails(&alone, &["RANK=1 WORLD_SIZE=2", "PMI_RANK=0 PMI_SIZE=1"]);
        // A program may set RANK from its launcher's variable.
        assert_eq!(detect(&with(&[("RANK", "2"), ("WORLD_SIZE", "4")])).unwrap().rank, 2);
        // A launcher or a shell may run in the only task of a step, and torchrun in the only task
        // of mpirun.
        let task = [
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "1"),
            ("SLURM_NTASKS", "1"),
            ("SLURM_STEP_ID", "0"),
        ];
        assert_eq!(detect(&with(&task)).unwrap().rank, 2);
        let by_hand = [&task[..], &[("RANK", "1"), ("WORLD_SIZE", "2")]].concat();
        assert_eq!(detect(&by_hand).unwrap().size, 2);
        let torchrun = [&alone[..], &[("TORCHELASTIC_RUN_ID", "none")]].concat();
        assert_eq!(detect(&torchrun).unwrap().size, 2);
        // Open MPI under Slurm: a task has the variables of both, and Slurm's variables may
        // describe another number of tasks.
        let srun = [("SLURM_PROCID", "2"), ("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_STEP_ID", "0")];
        assert_eq!(detect(&with(&srun)).unwrap().size, 4);
        let stale = [&srun[..], &[("RANK", "0"), ("WORLD_SIZE", "1")]].concat();
        fails(&stale, &["RANK=0 WORLD_SIZE=1", "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4"]);
    }

    #[test]
    fn wrong_values_are_named() {
        fails(&[("RANK", "4"), ("WORLD_SIZE", "4")], &["RANK=4", "from 0 to 3", "WORLD_SIZE=4"]);
        fails(&[("RANK", "-1"), ("WORLD_SIZE", "4")], &["RANK=-1"]);
        fails(&[("RANK", "0"), ("WORLD_SIZE", "four")], &["WORLD_SIZE=four", "from 1 to 4096"]);
        fails(&[("RANK", "0"), ("WORLD_SIZE", "0")], &["WORLD_SIZE=0"]);
        fails(&[("RANK", "0"), ("WORLD_SIZE", "4097")], &["WORLD_SIZE=4097", "4096"]);
        fails(&[("RANK", "0")], &["WORLD_SIZE=(not set)", "RANK is set"]);
        fails(&[("WORLD_SIZE", "2")], &["RANK=(not set)", "WORLD_SIZE is set"]);
        let local = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "x")];
        fails(&local, &["LOCAL_RANK=x"]);
        let local =
            [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "1")];
        fails(&local, &["LOCAL_RANK=1", "0 to 0, below LOCAL_WORLD_SIZE=1"]);
        fails(&[("PMIX_RANK", "0")], &["WORLD_SIZE", "(not set)", "PMIX_RANK"]);
    }

    #[test]
    fn ids_are_texts() {
        let id = UniqueId::new().unwrap();
        assert_eq!(id.to_string().parse::<UniqueId>().unwrap(), id);
        assert_ne!(id, UniqueId::new().unwrap());
        for wrong in ["", "12", "zz345678901234567890123456789012"] {
            assert!(wrong.parse::<UniqueId>().is_err());
        }
    }
}
