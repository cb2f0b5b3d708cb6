//! Tests of ranks whose launcher ends before them, and of ranks that end before they meet the others.
//! A shell stands in for the launcher.

mod job;

use std::path::Path;
use std::process::{Child, Command, Stdio};

use iris_heap::{Error, World};
use job::{CASE, Job, contains, env, files, wait_for, wait_for_file};

/// Program of one rank, started by the tests below.
#[test]
#[ignore = "the program of one rank, which the other tests start"]
fn rank_program() {
    let result = match std::env::var(CASE).expect("the other tests say what to do").as_str() {
        "work" => work(),
        "meet" => World::from_env().and_then(|world| world.close()).map(|()| "met".into()),
        other => panic!("no case {other}"),
    };
    let part = format!("{}.part", env("OUT"));
    std::fs::write(&part, format!("{result:?}")).unwrap();
    std::fs::rename(part, env("OUT")).unwrap();
}

/// Meets the others, and works until the job ends or the file STOP exists on rank 0. Ends with the
/// folder of a test that has failed, too.
fn work() -> Result<String, Error> {
    let world = World::from_env()?;
    std::fs::write(env("MET"), "").unwrap();
    loop {
        assert!(Path::new(&env("MET")).exists(), "the test has ended");
        let stop = u8::from(world.rank() == 0 && Path::new(&env("STOP")).exists());
        if world.allgather(&[stop])?[0] == [1] {
            world.close()?;
            return Ok("worked".into());
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Starts a shell that, as a launcher does, starts ranks 0 and 1 of `case`, each by the shell
/// command `wrapper`, with the variable `name` for the number of the rank.
fn launcher(job: &Job, (name, size): (&str, &str), wrapper: &str) -> Child {
    let text = format!(
        "for r in 0 1; do
            export {name}=$r {size}=2 TORCHELASTIC_RUN_ID=a MASTER_PORT=7 PMIX_NAMESPACE=a PMI_JOBID=a
            export OUT=$TMPDIR/out.$r MET=$TMPDIR/met.$r
            ({wrapper}) &
        done; unset {name} {size}; wait"
    );
    // These tests may run under `nohup`, which ranks would inherit and not get from their own wrapper.
    start(job, Command::new("env").args(["--default-signal=HUP", "sh", "-c", &text]))
}

/// Starts a real launcher, by its command line, of ranks that each run the shell command `wrapper`;
/// `None` if it is not installed.
fn real(job: &Job, command: &str, name: &str, wrapper: &str) -> Option<Child> {
    let mut words = command.split(' ');
    let program = words.next()?;
    if Command::new(program).arg("--version").output().is_err() {
        println!("skipped: {program} does not start");
        return None;
    }
    let text = format!("export OUT=$TMPDIR/out.${name} MET=$TMPDIR/met.${name}; {wrapper}");
    Some(start(job, Command::new(program).args(words).args(["sh", "-c", &text])))
}

fn start(job: &Job, command: &mut Command) -> Child {
    let arguments = "--exact rank_program --ignored --nocapture --test-threads=1";
    command
        .env_clear()
        .env("PATH", env("PATH"))
        .env("PROGRAM", format!("{} {arguments}", std::env::current_exe().unwrap().display()))
        .env(CASE, job.case)
        .env("TMPDIR", job.temp.path())
        .env("STOP", job.temp.path().join("stop"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

const OPEN_MPI: (&str, &str) = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
const HYDRA: (&str, &str) = ("PMI_RANK", "PMI_SIZE");
const TORCHRUN: (&str, &str) = ("RANK", "WORLD_SIZE");

fn out(job: &Job, rank: usize) -> String {
    let file = job.temp.path().join(format!("out.{rank}"));
    wait_for_file(&file);
    std::fs::read_to_string(file).unwrap()
}

/// Kills the launcher of a job of two ranks that work, and returns what the ranks say.
fn killed(variables: (&str, &str), wrapper: &str, stop: bool) -> [String; 2] {
    let job = Job::new("work");
    let launcher = launcher(&job, variables, wrapper);
    kill(&job, launcher, stop)
}

/// Kills the launcher of a job once its ranks have met, and returns what they say.
fn kill(job: &Job, mut launcher: Child, stop: bool) -> [String; 2] {
    (0..2).for_each(|rank| wait_for_file(job.temp.path().join(format!("met.{rank}"))));
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    if stop {
        std::fs::write(job.temp.path().join("stop"), "").unwrap();
    }
    [0, 1].map(|rank| out(job, rank))
}

#[test]
fn a_world_ends_with_its_launcher() {
    for (variables, wrapper) in [
        (OPEN_MPI, "exec $PROGRAM"),
        (HYDRA, "exec $PROGRAM"),
        (TORCHRUN, "exec $PROGRAM"),
        // A wrapper stays as the parent of its rank, with the variables of that rank.
        (OPEN_MPI, "exec sh -c '$PROGRAM; exit'"),
        // Launchers make sessions, too.
        (TORCHRUN, "exec setsid $PROGRAM"),
    ] {
        for (rank, said) in killed(variables, wrapper, false).iter().enumerate() {
            contains(said, &[&format!("LauncherLost {{ rank: {rank}, launcher: \"sh (process ")]);
        }
    }
}

/// Tests that the launcher's end is noticed where a process other than 1 adopts the ranks.
#[test]
fn a_world_ends_with_its_launcher_under_a_subreaper() {
    rustix::process::set_child_subreaper(rustix::process::Pid::from_raw(1)).unwrap();
    for said in killed(OPEN_MPI, "exec $PROGRAM", false) {
        contains(&said, &["LauncherLost"]);
    }
}

#[test]
fn a_rank_that_was_started_to_outlive_its_launcher_does() {
    for wrapper in ["exec nohup $PROGRAM", "exec sh -c 'setsid --wait $PROGRAM; exit'"] {
        assert_eq!(killed(OPEN_MPI, wrapper, true), ["Ok(\"worked\")"; 2], "{wrapper}");
    }
}

/// Tests a launcher that is process 1 of its namespace, whose ranks end with it.
#[test]
fn a_launcher_may_be_process_1() {
    let unshare = ["--pid", "--fork", "--mount-proc", "--kill-child"];
    if !Command::new("unshare").args(unshare).arg("true").status().is_ok_and(|it| it.success()) {
        println!("skipped: `unshare {}` is not allowed here", unshare.join(" "));
        return;
    }
    let job = Job::new("work");
    std::fs::write(job.temp.path().join("stop"), "").unwrap();
    let text = "for r in 0 1; do
        OMPI_COMM_WORLD_RANK=$r OMPI_COMM_WORLD_SIZE=2 OUT=$TMPDIR/out.$r MET=$TMPDIR/met.$r \"$0\" \"$@\" &
    done; wait";
    let status = Command::new("unshare")
        .args(unshare)
        .args(["sh", "-c", text])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "rank_program", "--ignored", "--nocapture", "--test-threads=1"])
        .env(CASE, job.case)
        .env("TMPDIR", job.temp.path())
        .env("STOP", job.temp.path().join("stop"))
        .stdout(Stdio::null())
        .status();
    assert!(status.unwrap().success());
    assert_eq!([0, 1].map(|rank| out(&job, rank)), ["Ok(\"worked\")"; 2]);
}

/// Tests that ranks which wait for rank 0 notice the launcher's end.
#[test]
fn a_rank_that_waits_for_rank_0_notices_the_end_of_its_launcher() {
    let job = Job::new("meet");
    let mut launcher = launcher(&job, OPEN_MPI, "[ $OMPI_COMM_WORLD_RANK = 0 ] || exec $PROGRAM");
    wait_for("rank 1 waits", || files(job.temp.path()).pop());
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    contains(&out(&job, 1), &["LauncherLost { rank: 1"]);
}

/// Tests that a rank that ends before it comes to meet the others is lost to them, under launchers
/// that let the others run on.
#[test]
fn a_rank_that_ends_before_it_meets_the_others_is_lost() {
    for (waits, ends) in [(0, 1), (1, 0)] {
        let job = Job::new("meet");
        // It ends once the other rank waits and has seen it, with a second for that.
        let wrapper = format!(
            "if [ $PMI_RANK = {waits} ]; then exec $PROGRAM; fi
             exec sh -c 'until ls $TMPDIR/iris-*/*.rank{waits}; do sleep 0.1; done; sleep 1; exit 3' 2>/dev/null"
        );
        let mut launcher = launcher(&job, HYDRA, &wrapper);
        contains(&out(&job, waits), &[&format!("PeerLost {{ rank: {ends} }}")]);
        launcher.wait().unwrap();
    }
}

/// Command line of Open MPI for two ranks, also as root and on one core.
const MPIRUN: &str = "mpirun.openmpi --allow-run-as-root --oversubscribe --bind-to none -n 2";

#[test]
fn a_world_ends_with_mpirun() {
    for wrapper in ["exec $PROGRAM", "timeout 600 $PROGRAM; exit"] {
        let job = Job::new("work");
        let mpirun = real(&job, MPIRUN, OPEN_MPI.0, wrapper);
        let Some(mpirun) = mpirun else { return };
        for said in kill(&job, mpirun, false) {
            contains(&said, &["LauncherLost", "launcher: \"mpirun.openmpi (process "]);
        }
    }
}

/// Tests that ranks of a launcher that names no job meet, although a wrapper is the parent of each.
#[test]
fn ranks_of_mpich_below_a_wrapper_meet() {
    let job = Job::new("meet");
    let wrapper = "timeout 600 $PROGRAM; exit";
    let Some(mut mpirun) = real(&job, "mpirun.mpich -n 2", HYDRA.0, wrapper) else { return };
    assert_eq!([0, 1].map(|rank| out(&job, rank)), ["Ok(\"met\")"; 2]);
    mpirun.wait().unwrap();
}

#[test]
fn a_rank_of_mpich_that_ends_before_it_meets_the_others_is_lost() {
    let job = Job::new("meet");
    let wrapper = "if [ $PMI_RANK = 0 ]; then exec $PROGRAM; fi
        until ls $TMPDIR/iris-*/*.rank0; do sleep 0.1; done 2>/dev/null >&2; sleep 1; exit 3";
    let Some(mut mpirun) = real(&job, "mpirun.mpich -n 2", HYDRA.0, wrapper) else { return };
    contains(&out(&job, 0), &["PeerLost { rank: 1 }"]);
    mpirun.wait().unwrap();
}
