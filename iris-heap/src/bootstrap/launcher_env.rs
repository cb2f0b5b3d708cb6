//! Detection of the launcher from its environment variables: rank, size, place and job of this
//! process. No launcher library is linked.
//!
//! This file is long because launchers can be distinguished only by all of their variables
//! together.

use super::ancestors::{Ancestor, ancestors};
use super::launcher_nesting::Surroundings;
pub(crate) use super::launchers::Get;
use super::launchers::{LAUNCHERS, Launcher, PMIX, SLURM, SLURM_STEP, first, proofs};
use crate::env::{read, wrong};
use crate::error::Result;

/// Largest number of ranks of a world. A heap spans one node and has at most
/// [`MAX_RANKS`](crate::MAX_RANKS).
pub const MAX_WORLD: usize = 4096;

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
    /// Launcher that started this process; `None` if no variable names one.
    pub(super) launcher: Option<&'static Launcher>,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) place: Place,
    /// Identity of the job, equal on all processes of the job and different for other jobs that meet
    /// at the same host.
    pub(crate) job: String,
    /// Folder of the job in which its ranks meet: `IRIS_RENDEZVOUS`, unless that is the folder of
    /// an outer job, in one of whose ranks this job runs.
    pub(crate) folder: Option<String>,
    /// Text of the variables that say that the ranks are on several hosts; `None` if no variable
    /// says so.
    pub(crate) several_hosts: Option<String>,
    /// Name and value of the variable that says on which host rank 0 is.
    pub(super) master: Option<(&'static str, String)>,
    /// Values of `MASTER_PORT` and of `IRIS_PORT`.
    pub(super) ports: [Option<u16>; 2],
}

impl Launch {
    pub(crate) fn from_env() -> Result<Launch> {
        Launch::among(&read, &ancestors())
    }

    /// Detects the launcher of a process from its variables, with the parent as the only known
    /// ancestor.
    #[cfg(test)]
    pub(crate) fn detect(get: Get<'_>) -> Result<Launch> {
        Launch::among(get, &[Ancestor::made_up("sh", None)])
    }

    /// Finds the launcher that started this process, given its environment and its ancestors.
    pub(super) fn among(get: Get<'_>, ancestors: &[Ancestor]) -> Result<Launch> {
        let surroundings = Surroundings { get, ancestors };
        match surroundings.launcher()? {
            Some((launcher, age)) => Launch::by(launcher, age, &surroundings),
            None => Launch::without(get),
        }
    }

    /// Describes rank and job as text; `None` without a launcher.
    pub(crate) fn description(&self) -> Option<String> {
        let Launch { rank, size, place, job, .. } = self;
        let (rank_there, ranks_there) = (place.local_rank, place.local_size);
        let launcher = self.launcher?.name;
        let job = if job.is_empty() { String::new() } else { format!("; job {job}") };
        Some(format!(
            "rank {rank} of {size}, local rank {rank_there} of {ranks_there}, by {launcher}{job}"
        ))
    }

    /// Describes a process that no launcher has started. Slurm sets the variables of a task in a
    /// batch script too, and those of the allocation in a shell of `salloc`. If they describe more
    /// than one task or node, it is an error: srun was forgotten, or the environment lost the
    /// variables of the step.
    fn without(get: Get<'_>) -> Result<Launch> {
        let task = get(SLURM.rank)?.map(|task| (SLURM.rank, task));
        if task.is_some() || get(SLURM.job[0])?.is_some() {
            let counts = [first(get, SLURM.size)?, first(get, SLURM.hosts)?].into_iter().flatten();
            let several = counts.filter(|(_, count)| count.trim() != "1");
            let several = several.chain(task.filter(|(_, task)| task.trim() != "0"));
            let several: Vec<_> = several.map(|(name, value)| format!("{name}={value}")).collect();
            if !several.is_empty() {
                return Err(wrong(
                    SLURM_STEP[0],
                    "(not set)",
                    &format!(
                        "the step, since {}: start the ranks with srun, or set RANK=0 and WORLD_SIZE=1 for a \
                         program of one rank in a batch script or a shell of salloc",
                        several.join(" and ")
                    ),
                ));
            }
        }
        for name in proofs() {
            if let Some(value) = get(name)? {
                let expected = "a rank and a number of ranks beside it, since only ranks of a job have it: start \
                                all ranks by a launcher, set RANK and WORLD_SIZE, or unset it (RANK=0 \
                                WORLD_SIZE=1 is a world of one rank)";
                return Err(wrong(name, &value, expected));
            }
        }
        let place = Place { node: 0, local_rank: 0, local_size: 1 };
        let (several_hosts, master, ports) = (None, None, [None; 2]);
        let (launcher, job, folder) = (None, String::new(), None);
        Ok(Launch { launcher, rank: 0, size: 1, place, job, folder, several_hosts, master, ports })
    }

    /// Reads the variables of `launcher`; `age` is the number of ancestors that have the same
    /// variables (see [`Surroundings::age`]).
    fn by(launcher: &'static Launcher, age: usize, around: &Surroundings<'_>) -> Result<Launch> {
        let get = around.get;
        let sizes = launcher.size.join(" or ");
        let (size_name, size) = first(get, launcher.size)?.ok_or_else(|| {
            let cure = match launcher.rank == PMIX.rank {
                true => "; prterun does not tell it: use mpirun",
                false => "",
            };
            let expected = format!("the number of ranks, since {} is set{cure}", launcher.rank);
            wrong(&sizes, "(not set)", &expected)
        })?;
        let size = number(size_name, &size, 1, MAX_WORLD, "")?;
        let below = format!(", below {size_name}={size}");
        let rank = get(launcher.rank)?.ok_or_else(|| {
            wrong(launcher.rank, "(not set)", &format!("a rank, since {size_name} is set"))
        })?;
        let rank = number(launcher.rank, &rank, 0, size - 1, &below)?;
        // A launcher sets all its variables at once. So a job name that is older than the rank's
        // variables comes from an outer job, and this job runs within one of that job's ranks.
        // Variables set by hand may be older than rank and size, but must not come from another
        // launcher.
        let others = LAUNCHERS.iter().filter(|it| *it != launcher).filter_map(|it| it.mark);
        let set_by_hand = around.age(others)?.unwrap_or(usize::MAX);
        let younger = |name: &str, limit: usize| -> Result<Option<String>> {
            Ok(if around.age([name])?.is_some_and(|age| age < limit) { get(name)? } else { None })
        };
        let [limit, limit_of_names] = match launcher.is_by_hand() {
            true => [set_by_hand; 2],
            false => [usize::MAX, age.min(around.process_of(launcher)) + 1],
        };
        let own = |name: &str| younger(name, limit);
        let own_first = |names: &[&'static str]| first(&own, names);

        let node = match own_first(launcher.node)? {
            Some((name, text)) => number(name, &text, 0, usize::MAX, "")?,
            None => 0,
        };
        let local_size = match own_first(launcher.local_size)? {
            // Slurm lists the numbers for all nodes in one variable.
            Some((name, text)) if text.contains(['(', ',']) => {
                tasks_of_node(&text, node).map(|tasks| (name, tasks))
            }
            Some((name, text)) => {
                Some((name, number(name, &text, 1, size, &format!(" = {size_name}"))?))
            }
            None => None,
        };
        let hosts = own_first(launcher.hosts)?.filter(|(_, hosts)| hosts.trim() != "1");
        let several_hosts = match (hosts, local_size) {
            (Some((name, hosts)), _) => Some(format!("{name}={hosts}")),
            (None, Some((name, local))) if local != size => {
                Some(format!("{name}={local}, {size_name}={size}"))
            }
            _ => None,
        };
        let local_below = match local_size {
            Some((name, local)) if local != size => format!(", below {name}={local}"),
            _ => below,
        };
        let local_size = local_size.map_or(size, |(_, local_size)| local_size);
        let local_rank = match own_first(launcher.local_rank)? {
            Some((name, text)) => number(name, &text, 0, local_size - 1, &local_below)?,
            None => rank,
        };
        let place = Place { node, local_rank, local_size };
        let several = several_hosts.is_some() || get("IRIS_NODE")?.is_some();
        let port = |name: &'static str| -> Result<Option<u16>> {
            let text = get(name)?;
            text.map(|text| number(name, &text, 1, 65535, "").map(|port| port as u16)).transpose()
        };
        // `MASTER_PORT` is checked only if ranks meet over TCP; otherwise it need not be a port.
        let ports = if several { [port("MASTER_PORT")?, port("IRIS_PORT")?] } else { [None; 2] };
        let folder = younger("IRIS_RENDEZVOUS", limit_of_names.min(set_by_hand))?;
        let master = first(get, &["MASTER_ADDR", "SLURM_STEP_NODELIST", "SLURM_NODELIST"])?;

        let mut parts = Vec::new();
        for name in launcher.job {
            if let Some(value) = younger(name, limit_of_names)? {
                parts.push(format!("{name}={value}"));
            }
        }
        // Ranks on several hosts have no common ancestor that could identify the job.
        if parts.is_empty() && !several {
            parts.extend(around.starter(launcher));
        }
        if parts.is_empty() {
            for name in ["MASTER_PORT", "IRIS_PORT"] {
                parts.extend(younger(name, set_by_hand)?.map(|port| format!("{name}={port}")));
            }
        }
        if parts.is_empty() && size > 1 && (several || folder.is_none()) {
            return Err(launcher.no_port(several, master.is_some()));
        }
        if let Some((name, count)) = own_first(launcher.restart)? {
            parts.push(format!("{name}={count}"));
        }
        let (launcher, job) = (Some(launcher), parts.join(" "));
        Ok(Launch { launcher, rank, size, place, job, folder, several_hosts, master, ports })
    }
}

/// Number of tasks on a node, from Slurm's list for all nodes: `2(x3),1` is 2 on nodes 0 to 2 and 1
/// on node 3.
fn tasks_of_node(list: &str, node: usize) -> Option<usize> {
    let mut first = 0;
    for part in list.split(',') {
        let (tasks, nodes) = part.trim().split_once("(x").unwrap_or((part.trim(), "1)"));
        first = nodes.strip_suffix(')')?.parse::<usize>().ok()?.checked_add(first)?;
        if node < first {
            return tasks.parse().ok().filter(|&tasks| tasks > 0);
        }
    }
    None
}

fn number(name: &str, text: &str, least: usize, most: usize, because: &str) -> Result<usize> {
    match text.trim().parse::<usize>() {
        Ok(n) if (least..=most).contains(&n) => Ok(n),
        _ if most == usize::MAX => Err(wrong(name, text, "a number")),
        _ => Err(wrong(name, text, &format!("a number from {least} to {most}{because}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::process::parent_command;

    fn detect(vars: &[(&str, &str)]) -> Result<Launch> {
        Launch::detect(&|name| Ok(vars.iter().find(|v| v.0 == name).map(|v| v.1.to_string())))
    }

    /// Detects the launcher of a process whose ancestors have the variables `outer`; the process
    /// itself has `inner` too.
    fn inside(outer: &[(&str, &str)], inner: &[(&str, &str)]) -> Result<Launch> {
        let get = |name: &str| {
            let found = inner.iter().chain(outer).find(|v| v.0 == name);
            Ok(found.map(|v| v.1.to_string()))
        };
        Launch::among(&get, &[Ancestor::made_up("agent", Some(outer))])
    }

    #[track_caller]
    fn fails(vars: &[(&str, &str)], words: &[&str]) {
        let text = detect(vars).unwrap_err().to_string();
        assert!(words.iter().all(|w| text.contains(w)), "{text}");
    }

    #[test]
    fn torchrun() {
        let task = [("SLURM_PROCID", "0"), ("SLURM_STEP_ID", "0")];
        let torchrun = [
            ("RANK", "2"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "2"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("GROUP_RANK", "0"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("TORCHELASTIC_RESTART_COUNT", "1"),
        ];
        let l = inside(&task, &torchrun).unwrap();
        assert_eq!((l.rank, l.size), (2, 4));
        assert_eq!(l.place, Place { node: 0, local_rank: 2, local_size: 4 });
        assert_eq!(
            l.job,
            "MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=1"
        );
    }

    #[test]
    fn by_hand_the_parent_names_the_job() {
        let vars = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "host")];
        let get = |name: &str| Ok(vars.iter().find(|v| v.0 == name).map(|v| v.1.to_string()));
        let l = Launch::among(&get, &ancestors()).unwrap();
        assert!(l.job.contains(&format!("{}", rustix::process::getppid().unwrap())), "{}", l.job);
        assert!(l.job.len() < 50, "{}", l.job);
        assert_eq!(l.place.local_rank, 1);
        // The parent of the test is cargo, a shell or a test runner, so only some name is expected.
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
        // A task whose environment lost the variables of the step looks like a batch script that was
        // started without srun. Both are errors.
        let batch: Vec<_> = slurm.into_iter().filter(|v| v.0 != "SLURM_STEP_ID").collect();
        fails(&batch, &["SLURM_STEP_ID=(not set)", "SLURM_PROCID=3", "SLURM_STEP_NUM_TASKS=4"]);
        fails(&[("SLURM_PROCID", "2")], &["SLURM_PROCID=2", "srun", "RANK"]);
        fails(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")], &["SLURM_NTASKS=8", "srun"]);
        let alone = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")];
        assert_eq!(detect(&alone).unwrap().size, 1, "a batch script of one task");
        assert_eq!(detect(&[("SLURM_PROCID", "0")]).unwrap().size, 1);
        // Programs that were started without srun, in a shell of salloc and in batch scripts of
        // sbatch -n2 and -N2.
        let job = ("SLURM_JOB_ID", "77");
        for (vars, named) in [
            (&[job, ("SLURM_NTASKS", "2"), ("SLURM_NNODES", "1")][..], "SLURM_NTASKS=2"),
            (&[job, ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")], "SLURM_NTASKS=2"),
            (&[job, ("SLURM_PROCID", "0"), ("SLURM_NNODES", "2")], "SLURM_NNODES=2"),
        ] {
            fails(vars, &[named, "start the ranks with srun", "RANK=0 and WORLD_SIZE=1"]);
            let by_hand = [vars, &[("RANK", "0"), ("WORLD_SIZE", "1")]].concat();
            assert_eq!(detect(&by_hand).unwrap().size, 1, "{named}");
        }

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
        // A program may set RANK itself, with the value of its launcher's variable.
        assert_eq!(detect(&with(&[("RANK", "2"), ("WORLD_SIZE", "4")])).unwrap().rank, 2);
        // A launcher or a shell may run in the only task of a step, and torchrun in the only task
        // of mpirun.
        let task = [
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "1"),
            ("SLURM_NTASKS", "1"),
            ("SLURM_STEP_ID", "0"),
        ];
        assert_eq!(inside(&task, &mpirun).unwrap().rank, 2);
        assert_eq!(inside(&task, &alone[..2]).unwrap().size, 2);
        let torchrun = [&alone[..2], &[("TORCHELASTIC_RUN_ID", "none")]].concat();
        assert_eq!(inside(&alone[2..], &torchrun).unwrap().size, 2);
        // Open MPI under Slurm: a task has the variables of both, and Slurm's variables may
        // describe another number of tasks.
        let srun = [("SLURM_PROCID", "2"), ("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_STEP_ID", "0")];
        assert_eq!(detect(&with(&srun)).unwrap().size, 4);
        let stale = [&srun[..], &[("RANK", "0"), ("WORLD_SIZE", "1")]].concat();
        fails(&stale, &["RANK=0 WORLD_SIZE=1", "SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4"]);
    }

    #[test]
    fn a_launcher_without_a_rank_is_an_error() {
        let local = [("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")];
        fails(&local, &["LOCAL_RANK=1", "RANK=0 WORLD_SIZE=1"]);
        for name in ["IRIS_RENDEZVOUS", "IRIS_NODE", "TORCHELASTIC_RUN_ID", "GROUP_RANK"]
            .into_iter()
            .chain(["OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_NAMESPACE", "MPI_LOCALRANKID"])
            .chain(["PMI_JOBID", "I_MPI_HYDRA_UUID", "SLURM_STEP_ID", "LOCAL_WORLD_SIZE"])
        {
            fails(&[(name, "7")], &[&format!("{name}=7"), "RANK=0 WORLD_SIZE=1"]);
        }
        let salloc = [("SLURM_JOB_ID", "7"), ("SLURM_NNODES", "1"), ("SLURM_NTASKS", "1")];
        for ambient in [&salloc[..], &[("MASTER_ADDR", "host"), ("MASTER_PORT", "29500")]] {
            assert_eq!(detect(ambient).unwrap().launcher, None, "{ambient:?}");
        }
    }

    #[test]
    fn jobs_have_names_of_their_own() {
        let (open, hidden) = (Some(&[][..]), None);
        let get = |vars: Vec<(&'static str, &'static str)>| {
            move |name: &str| Ok(vars.iter().find(|v| v.0 == name).map(|v| v.1.to_string()))
        };
        let mpiexec = vec![("PMI_RANK", "0"), ("PMI_SIZE", "2")];
        let above = |names: &[&str], environment: Option<&[(&str, &str)]>| {
            names.iter().map(|name| Ancestor::made_up(name, environment)).collect::<Vec<_>>()
        };
        // MPICH gives jobs no name. The job is identified by MPICH's process on this host, even if
        // other processes run between that process and the rank.
        let job = |vars: &[(&'static str, &'static str)], ancestors: &[Ancestor]| {
            Launch::among(&get(vars.to_vec()), ancestors).map(|launch| launch.job)
        };
        let by_proxy = job(&mpiexec, &above(&["timeout", "hydra_pmi_proxy", "mpiexec"], open));
        assert_eq!(by_proxy.unwrap(), "launcher's process 77 of 4.50s");
        // Two mpiexec in one Slurm step inherit the same PMI_JOBID, so it must not identify a job.
        let step = [("PMI_JOBID", "7.0")];
        let inherited = [&mpiexec[..], &step].concat();
        let by_proxy = job(&inherited, &above(&["hydra_pmi_proxy", "slurmstepd"], Some(&step)));
        assert_eq!(by_proxy.unwrap(), "launcher's process 77 of 4.50s");
        assert_eq!(job(&inherited, &above(&["slurmstepd"], hidden)).unwrap(), "PMI_JOBID=7.0");
        // Over several hosts only a port identifies a job of MPICH.
        let hosts = [&mpiexec[..], &[("MPI_LOCALNRANKS", "1"), ("MPI_LOCALRANKID", "0")]].concat();
        let proxy = above(&["hydra_pmi_proxy"], open);
        let text = job(&hosts, &proxy).unwrap_err().to_string();
        assert!(text.contains("MASTER_PORT=(not set)"), "{text}");
        let command = "mpiexec -genv MASTER_PORT N -genv MASTER_ADDR HOST -genv IRIS_SECRET_FILE FILE PROGRAM";
        assert!(text.contains(command), "{text}");
        let hosts_with = |vars: &[(&'static str, &'static str)]| [&hosts[..], vars].concat();
        let text = job(&hosts_with(&[("MASTER_ADDR", "a")]), &proxy).unwrap_err().to_string();
        assert!(text.contains("mpiexec -genv MASTER_PORT N PROGRAM"), "{text}");
        assert_eq!(job(&hosts_with(&[("IRIS_PORT", "4000")]), &proxy).unwrap(), "IRIS_PORT=4000");
        assert_eq!(
            job(&hosts_with(&[("I_MPI_HYDRA_UUID", "5")]), &proxy).unwrap(),
            "I_MPI_HYDRA_UUID=5"
        );
        // If a rank's shell has ended, its parent is an adopter, which identifies no job.
        let by_hand = [("RANK", "0"), ("WORLD_SIZE", "2")];
        let mut shell = above(&["sh"], open);
        assert_eq!(job(&by_hand, &shell).unwrap(), "parent process 77 of 4.50s");
        shell[0].has_adopted = true;
        for ancestors in [&shell[..], &[]] {
            let text = job(&by_hand, ancestors).unwrap_err().to_string();
            assert!(text.contains("MASTER_PORT=(not set)") && text.contains("has ended"), "{text}");
        }
        let alone = [("RANK", "0"), ("WORLD_SIZE", "1")];
        assert_eq!(job(&alone, &[]).unwrap(), "");
        let folder = [&by_hand[..], &[("IRIS_RENDEZVOUS", "/f")]].concat();
        let launch = Launch::among(&get(folder), &[]).unwrap();
        assert_eq!(launch.folder.as_deref(), Some("/f"));
    }

    #[test]
    fn ranks_are_counted_within_their_host() {
        let srun = [
            ("SLURM_PROCID", "4"),
            ("SLURM_STEP_NUM_TASKS", "5"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_JOB_ID", "7"),
            ("SLURM_NODEID", "2"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_STEP_NUM_NODES", "3"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x2),1"),
        ];
        let l = detect(&srun).unwrap();
        assert_eq!(l.place, Place { node: 2, local_rank: 0, local_size: 1 });
        let text = l.description().unwrap();
        let expected =
            "rank 4 of 5, local rank 0 of 1, by Slurm; job SLURM_JOB_ID=7 SLURM_STEP_ID=0";
        assert_eq!(text, expected);
        for (list, tasks) in
            [("2", Some(2)), ("1,3", Some(1)), ("2(x9)", Some(2)), ("2(x", None), ("", None)]
        {
            assert_eq!(tasks_of_node(list, 0), tasks, "{list}");
        }
        assert_eq!((tasks_of_node("1,3", 1), tasks_of_node("1,3", 2)), (Some(3), None));
        assert_eq!(detect(&[]).unwrap().description(), None);
        let mpirun = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")];
        assert!(detect(&mpirun).unwrap().description().is_some(), "a launcher of one rank");
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
        fails(&[("PMIX_RANK", "0")], &["WORLD_SIZE", "(not set)", "PMIX_RANK", "use mpirun"]);
    }
}
