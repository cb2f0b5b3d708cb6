//! What a launcher says about this process: read from the environment, nothing is linked.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::str::FromStr;

use crate::abi::MAX_RANKS;
use crate::bootstrap::unsupported;
use crate::env::{read, wrong};
use crate::error::{Error, Result};
use crate::world::Place;

/// A number that the processes of one world share, and no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UniqueId(u128);

impl UniqueId {
    /// A new one, from the system's random numbers.
    ///
    /// # Errors
    /// [`Error::System`] if there are none.
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

/// What a launcher says.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Launch {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) place: Place,
    /// What the processes of one job share and those of another do not.
    pub(crate) job: String,
}

/// Looks a variable up.
type Get<'a> = &'a dyn Fn(&str) -> Result<Option<String>>;

/// The variables of one launcher; of several names the first that is set.
struct Names {
    rank: &'static str,
    size: &'static [&'static str],
    local_rank: &'static str,
    local_size: &'static str,
    node: &'static str,
    /// The parts of the job's name that may be there; one must be, or the parent process names it.
    job: &'static [&'static str],
    /// Added to the job's name where set.
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

/// PMIx names no size in the environment; what else may name it is asked.
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
    job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    restart: "SLURM_RESTART_COUNT",
};

impl Launch {
    pub(crate) fn from_env() -> Result<Launch> {
        Launch::detect(&read)
    }

    /// The first launcher whose variables are there. Those that run inside another come first:
    /// torchrun under Slurm sets its own.
    fn detect(get: Get<'_>) -> Result<Launch> {
        let is_set = |name: &str| get(name).map(|v| v.is_some());
        if is_set("RANK")? || (is_set("WORLD_SIZE")? && !is_set("PMIX_RANK")?) {
            return Launch::by(&BY_HAND, get);
        }
        for names in [&OPEN_MPI, &PMI] {
            if is_set(names.rank)? || is_set(names.size[0])? {
                return Launch::by(names, get);
            }
        }
        // The script of a Slurm batch has the variables of a task, too, but is not one of a step.
        let step = is_set("SLURM_STEP_ID")?;
        if step && is_set("SLURM_PROCID")? {
            let hosts = first(get, &["SLURM_STEP_NUM_NODES", "SLURM_NNODES"])?;
            if let Some((name, hosts)) = hosts
                && hosts != "1"
            {
                return Err(several_hosts(&format!("{name}={hosts}")));
            }
            return Launch::by(&SLURM, get);
        }
        if is_set("PMIX_RANK")? {
            return Launch::by(&PMIX, get);
        }
        let place = Place { node: 0, local_rank: 0, local_size: 1 };
        Ok(Launch { rank: 0, size: 1, place, job: String::new() })
    }

    fn by(names: &Names, get: Get<'_>) -> Result<Launch> {
        let sizes = names.size.join(" or ");
        let (size_name, size) = first(get, names.size)?.ok_or_else(|| {
            let expected = format!("the number of ranks, since {} is set", names.rank);
            wrong(&sizes, "(not set)", &expected)
        })?;
        let size = number(size_name, &size, 1, MAX_RANKS, "")?;
        let below = format!(", below {size_name}={size}");
        let rank = get(names.rank)?.ok_or_else(|| {
            wrong(names.rank, "(not set)", &format!("a rank, since {size_name} is set"))
        })?;
        let rank = number(names.rank, &rank, 0, size - 1, &below)?;
        let local_size = match optional(get, names.local_size)? {
            Some(text) => number(names.local_size, &text, 1, size, &format!(" = {size_name}"))?,
            None => size,
        };
        if local_size != size {
            let says = format!("{}={local_size}, {size_name}={size}", names.local_size);
            return Err(several_hosts(&says));
        }
        let local_rank = match optional(get, names.local_rank)? {
            Some(text) => number(names.local_rank, &text, 0, local_size - 1, &below)?,
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
        // An address without a port does not tell two jobs apart.
        if parts.is_empty() || (parts.len() == 1 && parts[0].starts_with("MASTER_ADDR")) {
            parts.push(parent());
        }
        if let Some(count) = optional(get, names.restart)? {
            parts.push(format!("{}={count}", names.restart));
        }
        let place = Place { node, local_rank, local_size };
        Ok(Launch { rank, size, place, job: parts.join(" ") })
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

fn several_hosts(says: &str) -> Error {
    unsupported(
        &format!("a world of several hosts ({says})"),
        "processes meet over a Unix socket: start all ranks on one host",
    )
}

/// The process that started this one, with the time it began: all ranks that one launcher, or one
/// shell, started have the same.
fn parent() -> String {
    let pid = rustix::process::getppid().map_or(0, |p| p.as_raw_nonzero().get());
    // The name, in brackets, may hold anything; the 20th field behind it is the time.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let began = after.split_whitespace().nth(19).unwrap_or("?");
    format!("parent process {pid} of {began}, as nothing such as MASTER_PORT names the job")
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(l.job.contains("MASTER_PORT") && !l.job.contains('?'), "{}", l.job);
        assert_eq!(l.place.local_rank, 1);
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
        let batch: Vec<_> = slurm.into_iter().filter(|v| v.0 != "SLURM_STEP_ID").collect();
        assert_eq!(detect(&batch).unwrap().size, 1, "a batch script is no task");

        let l = detect(&[("PMIX_RANK", "1"), ("WORLD_SIZE", "2"), ("PMIX_NAMESPACE", "n")]);
        assert_eq!((l.as_ref().unwrap().rank, l.unwrap().size), (1, 2));
        assert_eq!(detect(&[]).unwrap().size, 1);
    }

    #[test]
    fn wrong_values_are_named() {
        fails(&[("RANK", "4"), ("WORLD_SIZE", "4")], &["RANK=4", "from 0 to 3", "WORLD_SIZE=4"]);
        fails(&[("RANK", "-1"), ("WORLD_SIZE", "4")], &["RANK=-1"]);
        fails(&[("RANK", "0"), ("WORLD_SIZE", "four")], &["WORLD_SIZE=four", "from 1 to 64"]);
        fails(&[("RANK", "0"), ("WORLD_SIZE", "0")], &["WORLD_SIZE=0"]);
        fails(&[("RANK", "0"), ("WORLD_SIZE", "65")], &["WORLD_SIZE=65", "64"]);
        fails(&[("RANK", "0")], &["WORLD_SIZE=(not set)", "RANK is set"]);
        fails(&[("WORLD_SIZE", "2")], &["RANK=(not set)", "WORLD_SIZE is set"]);
        let local = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "x")];
        fails(&local, &["LOCAL_RANK=x"]);
        let hosts = [("RANK", "0"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")];
        fails(&hosts, &["several hosts", "LOCAL_WORLD_SIZE=2", "WORLD_SIZE=4"]);
        fails(&[("PMIX_RANK", "0")], &["WORLD_SIZE", "(not set)", "PMIX_RANK"]);
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_STEP_ID", "0"), ("SLURM_NNODES", "2")];
        fails(&slurm, &["several hosts", "SLURM_NNODES=2"]);
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
