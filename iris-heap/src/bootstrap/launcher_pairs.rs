//! Test of two launchers, one inside the other: every pair, in both nestings.

use super::ancestors::Ancestor;
use super::launcher_env::Launch;
use super::launchers::variables;
use crate::error::Result;

type Vars = Vec<(&'static str, String)>;

/// Launcher as the process of a rank sees it.
struct Case {
    /// Name in the table of launchers.
    name: &'static str,
    /// Name of the process that starts ranks.
    program: &'static str,
    /// Whether `program` is a child of the process that ran the launcher's command, and so inherits
    /// its environment. Otherwise a system daemon starts it, and its environment cannot be read.
    is_child: bool,
    /// Whether the launcher removes other launchers' variables.
    clears: bool,
    /// Variables of a rank; `#` is its number, `%` the number of ranks, and `$` a name of the job.
    vars: &'static str,
}

const fn child(name: &'static str, program: &'static str, vars: &'static str) -> Case {
    Case { name, program, is_child: true, clears: false, vars }
}

const fn srun(vars: &'static str) -> Case {
    Case { name: "Slurm", program: "slurmstepd", is_child: false, clears: false, vars }
}

const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=# OMPI_COMM_WORLD_SIZE=% OMPI_COMM_WORLD_LOCAL_RANK=# \
OMPI_COMM_WORLD_LOCAL_SIZE=% PMIX_RANK=# PMIX_NAMESPACE=$";
/// Variables of a task of srun, and variables that an MPI plugin of Slurm adds.
macro_rules! slurm {
    ($plugin:literal) => {
        concat!(
            "SLURM_PROCID=# SLURM_NTASKS=% SLURM_STEP_NUM_TASKS=% SLURM_LOCALID=# SLURM_NODEID=0 ",
            "SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=% SLURM_JOB_ID=7 SLURM_STEP_ID=$ ",
            "SLURM_STEPID=$ ",
            $plugin
        )
    };
}

const CASES: [Case; 10] = [
    Case {
        clears: true,
        ..child(
            "iris",
            "iris",
            "RANK=# WORLD_SIZE=% LOCAL_RANK=# LOCAL_WORLD_SIZE=% IRIS_RENDEZVOUS=/$ LAUNCHER_PID=$",
        )
    },
    child(
        "torchrun",
        "pt_elastic",
        "RANK=# WORLD_SIZE=% LOCAL_RANK=# LOCAL_WORLD_SIZE=% GROUP_RANK=0 MASTER_ADDR=localhost \
     MASTER_PORT=$ TORCHELASTIC_RUN_ID=$ TORCHELASTIC_RESTART_COUNT=0",
    ),
    child("hand", "bash", "RANK=# WORLD_SIZE=% MASTER_PORT=$"),
    child("Open MPI", "mpirun", OPEN_MPI),
    child("Open MPI", "prterun", OPEN_MPI),
    child(
        "Hydra (MPICH, Intel MPI)",
        "hydra_pmi_proxy",
        "PMI_RANK=# PMI_SIZE=% MPI_LOCALRANKID=# MPI_LOCALNRANKS=%",
    ),
    child(
        "Hydra (MPICH, Intel MPI)",
        "hydra_pmi_proxy",
        "PMI_RANK=# PMI_SIZE=% MPI_LOCALRANKID=# MPI_LOCALNRANKS=% I_MPI_HYDRA_UUID=$",
    ),
    srun(slurm!("")),
    srun(slurm!("PMI_RANK=# PMI_SIZE=% PMI_JOBID=7.$")),
    srun(slurm!("PMIX_RANK=# PMIX_NAMESPACE=slurm.pmix.7.$")),
];

impl Case {
    fn vars(&self, rank: usize, size: usize, job: &str) -> Vars {
        let [rank, size] = [rank, size].map(|number| number.to_string());
        let value = |text: &str| text.replace('#', &rank).replace('%', &size).replace('$', job);
        let pairs = self.vars.split_whitespace().filter_map(|pair| pair.split_once('='));
        pairs.map(|(name, text)| (name, value(text))).collect()
    }

    /// Environment of a rank with the variables `own`, if the launcher's command had the variables
    /// `outer`.
    fn inside(&self, outer: &Vars, own: &Vars) -> Vars {
        let stay = |name: &str| !self.clears || !variables().any(|known| known == name);
        let left =
            outer.iter().filter(|(name, _)| stay(name) && own.iter().all(|it| it.0 != *name));
        own.iter().chain(left).cloned().collect()
    }

    /// Process that starts the ranks, if the launcher's command had the variables `outer`.
    fn starter(&self, outer: &Vars) -> Ancestor {
        let vars: Vec<_> = outer.iter().map(|(name, value)| (*name, value.as_str())).collect();
        Ancestor::made_up(self.program, self.is_child.then_some(&vars))
    }
}

fn detect(vars: &Vars, ancestors: &[Ancestor]) -> Result<Launch> {
    let get = |name: &str| Ok(vars.iter().find(|var| var.0 == name).map(|var| var.1.clone()));
    Launch::among(&get, ancestors)
}

/// Rank 1 of 2 of `inner`, started within a rank of `outer`: its environment, and its ancestors up to
/// the process that started the outer rank.
fn nested(outer: &Case, (rank, size): (usize, usize), inner: &Case) -> (Vars, Vec<Ancestor>) {
    let around = outer.vars(rank, size, "11");
    let env = inner.inside(&around, &inner.vars(1, 2, "22"));
    let mut ancestors = vec![inner.starter(&around)];
    if inner.is_child {
        let shell = around.iter().map(|(name, value)| (*name, value.as_str())).collect::<Vec<_>>();
        ancestors.extend([Ancestor::made_up("sh", Some(&shell)), outer.starter(&Vec::new())]);
    }
    (env, ancestors)
}

/// Checks that `inner` is found as launcher, and that the job's identity contains no name of the
/// outer job.
fn check(outer: &Case, place: (usize, usize), inner: &Case) {
    let (env, ancestors) = nested(outer, place, inner);
    let pair = format!("{} in {} {place:?}: {env:?}", inner.program, outer.program);
    let found = detect(&env, &ancestors).unwrap_or_else(|error| panic!("{pair}: {error}"));
    assert_eq!((found.rank, found.size), (1, 2), "{pair}");
    assert_eq!((found.place.local_rank, found.place.local_size), (1, 2), "{pair}");
    assert_eq!(found.launcher.map(|it| it.name), Some(inner.name), "{pair}");
    let job = found.folder.unwrap_or(found.job);
    assert!(!job.is_empty() && !job.contains("11"), "{pair}: job {job}");
}

#[test]
fn of_two_launchers_the_inner_one_counts() {
    for outer in &CASES {
        for inner in &CASES {
            // A `RANK` that was set before srun cannot be distinguished from a `RANK` that was set
            // in srun's task.
            if outer.program == "bash" && !inner.is_child {
                let (env, ancestors) = nested(outer, (2, 4), inner);
                let text = detect(&env, &ancestors).unwrap_err().to_string();
                assert!(text.contains("RANK=2 WORLD_SIZE=4"), "{text}");
                assert!(text.contains("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2"), "{text}");
            } else {
                check(outer, (2, 4), inner);
            }
            // Rank and size are by chance equal to those of the outer rank. A `RANK` that was set
            // by hand then cannot be distinguished from the outer `RANK`.
            if inner.program != "bash" {
                check(outer, (1, 2), inner);
            }
        }
    }
}

#[test]
fn ranks_on_another_host_count_by_their_launchers_daemon() {
    let daemons = CASES.iter().filter(|it| it.program != "bash" && it.name != "torchrun");
    for inner in daemons.filter(|it| !it.clears) {
        for outer in CASES.iter().filter(|it| it.program != "bash") {
            // ssh starts the launcher's daemon without these variables; the launcher sends the
            // daemon the variables for the ranks.
            let env = inner.inside(&outer.vars(2, 4, "11"), &inner.vars(1, 2, "22"));
            let program = if inner.program == "mpirun" { "orted" } else { inner.program };
            let above = ["timeout", program, "sshd"];
            let ancestors = above.map(|name| Ancestor::made_up(name, Some(&[])));
            let found = detect(&env, &ancestors).unwrap();
            let pair = format!("{program} {env:?}");
            assert_eq!((found.rank, found.size), (1, 2), "{pair}");
            assert_eq!(found.launcher.map(|it| it.name), Some(inner.name), "{pair}");
        }
    }
}

#[test]
fn launchers_without_visible_ancestors_must_agree() {
    for outer in &CASES {
        for inner in CASES.iter().filter(|it| it.vars != outer.vars && !it.clears) {
            let env =
                |rank, size| inner.inside(&outer.vars(2, 4, "11"), &inner.vars(rank, size, "22"));
            match detect(&env(2, 4), &[]) {
                Ok(agreeing) => assert_eq!((agreeing.rank, agreeing.size), (2, 4)),
                Err(error) => {
                    assert!(error.to_string().contains("nothing else identifies"), "{error}")
                }
            }
            let disagreeing = env(1, 2);
            let ranks = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];
            let says =
                |name: &str, rank: &str| disagreeing.iter().any(|it| it.0 == name && it.1 == rank);
            let contradicts = ranks.iter().any(|name| says(name, "2"));
            match detect(&disagreeing, &[]) {
                Ok(found) => {
                    assert!(!contradicts && (found.rank, found.size) == (1, 2), "{disagreeing:?}")
                }
                Err(error) if contradicts => {
                    assert!(error.to_string().contains("launchers that agree"), "{error}");
                }
                Err(_) => {}
            }
        }
    }
}
