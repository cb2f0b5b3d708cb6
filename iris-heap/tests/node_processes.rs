//! Tests of ranks that are processes of several simulated nodes, and meet by the launcher's
//! environment variables.

mod job;

use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use iris_heap::{Error, HeapOptions, SymmetricHeap, World};
use job::{CASE, Job, contains, env, launch_until_abort, report, result, wait_for_file};
use rustix::process::{Pid, Signal, kill_process};

#[test]
#[ignore = "the program of one rank, which the other tests start"]
fn rank_program() {
    let case = std::env::var(CASE).expect("the other tests say what to do");
    report(match case.as_str() {
        "heap" => heap(),
        "killed" => killed(),
        "stopped" => stopped(),
        other => panic!("no case {other}"),
    });
}

/// Case that opens one heap per node, then does the same in a second world, which meets at the same
/// port.
fn heap() -> Result<String, Error> {
    let mut said = String::new();
    for _ in 0..2 {
        let world = World::from_env()?;
        let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(1 << 20).threads(1))?;
        let x = heap.full::<f32>(100, world.rank() as f32)?;
        heap.world().barrier()?;
        let theirs = (0..heap.size()).map(|rank| heap.read_from(x.slice(..1)?, rank));
        let theirs = theirs.collect::<Result<Vec<_>, _>>()?.concat();
        heap.world().barrier()?;
        said = format!("{} nodes, node {}: {theirs:?}", world.nodes(), world.node());
        heap.close()?;
        world.close()?;
    }
    Ok(said)
}

/// Case in which some ranks die while the others wait in a kernel on their node.
fn killed() -> Result<String, Error> {
    let world = World::from_env()?;
    let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(1 << 20).threads(1))?;
    let stream = heap.stream()?;
    world.barrier()?;
    if env("VICTIMS").contains(&world.rank().to_string()) {
        std::process::abort();
    }
    launch_until_abort(&heap, &stream)?;
    let in_kernel = stream.sync().unwrap_err();
    let in_barrier = world.barrier().unwrap_err();
    Ok(format!("kernel: {in_kernel}; barrier: {in_barrier}"))
}

/// Case in which a rank is stopped for a while, and then continues.
fn stopped() -> Result<String, Error> {
    let world = World::from_env()?;
    world.barrier()?;
    if world.rank() == 3 {
        std::fs::write(env("READY"), "").unwrap();
        // The rank is stopped either here or in the barrier below.
        std::thread::sleep(Duration::from_millis(500));
    }
    world.barrier()?;
    world.close()?;
    Ok("gone on".into())
}

/// Environment variables that torchrun sets for a rank on two nodes of two ranks; `IRIS_NODE`
/// simulates the hosts.
fn torchrun(rank: usize, port: u16) -> Vec<(&'static str, String)> {
    let pairs = [
        ("LOCAL_RANK", rank % 2),
        ("LOCAL_WORLD_SIZE", 2),
        ("GROUP_RANK", rank / 2),
        ("IRIS_NODE", rank / 2),
        ("MASTER_PORT", usize::from(port) - 1),
    ];
    let mut vars: Vec<_> = pairs.map(|(name, value)| (name, value.to_string())).into();
    vars.push(("MASTER_ADDR", "localhost".into()));
    vars.push(("IRIS_DEADLINE", "0.1".into()));
    vars
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn check_heap(results: Vec<String>) {
    for (rank, text) in results.into_iter().enumerate() {
        let (node, first) = (rank / 2, rank / 2 * 2);
        assert_eq!(text, format!("ok 2 nodes, node {node}: [{first}.0, {}.0]", first + 1));
    }
}

#[test]
fn torchrun_with_a_secret() {
    let (job, port) = (Job::new("heap"), free_port());
    let secret = tempfile::NamedTempFile::new().unwrap().into_temp_path();
    std::fs::remove_file(&secret).unwrap();
    iris_heap::Secret::new().unwrap().save(&secret).unwrap();
    let vars = |rank| {
        let secret = ("IRIS_SECRET_FILE", secret.display().to_string());
        [torchrun(rank, port), vec![secret]].concat()
    };
    check_heap(job.results(job.ranks(4, vars)));
}

#[test]
fn slurm_without_an_address() {
    let (job, port) = (Job::new("heap"), free_port());
    let ranks: Vec<_> = (0..4usize)
        .map(|rank| {
            let (task, node) = (rank.to_string(), (rank / 2).to_string());
            let port = port.to_string();
            job.rank(&[
                ("SLURM_PROCID", &task),
                ("SLURM_STEP_NUM_TASKS", "4"),
                ("SLURM_STEP_ID", "0"),
                ("SLURM_JOB_ID", "77"),
                ("SLURM_STEP_NUM_NODES", "2"),
                ("SLURM_STEP_NODELIST", "localhost,other"),
                ("IRIS_NODE", &node),
                ("IRIS_PORT", &port),
            ])
        })
        .collect();
    check_heap(job.results(ranks));
}

#[test]
fn mpirun_of_open_mpi() {
    let Ok(true) = Command::new("mpirun").arg("--version").output().map(|o| o.status.success())
    else {
        println!("skipped: mpirun, of openmpi-bin, does not start");
        return;
    };
    let program = std::env::current_exe().unwrap();
    let node = "IRIS_NODE=$((OMPI_COMM_WORLD_RANK / 2)) exec \"$0\" \"$@\"";
    let output = Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "4"])
        .args(["-x", "MASTER_ADDR=127.0.0.1", "-x", &format!("IRIS_PORT={}", free_port())])
        .args(["-x", &format!("{CASE}=heap"), "/bin/sh", "-c", node])
        .arg(program)
        .args(["--exact", "rank_program", "--ignored", "--nocapture", "--test-threads=1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    for rank in 0..4 {
        let (node, first) = (rank / 2, rank / 2 * 2);
        let said = format!("ok 2 nodes, node {node}: [{first}.0, {}.0]", first + 1);
        assert!(text.contains(&said), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_killed_rank_and_a_killed_node_are_named_everywhere() {
    for victims in ["3", "1", "2 3"] {
        let (job, port) = (Job::new("killed"), free_port());
        let vars = |rank| [torchrun(rank, port), vec![("VICTIMS", victims.into())]].concat();
        for (rank, child) in job.ranks(4, vars).into_iter().enumerate() {
            let text = result(child);
            if victims.contains(&rank.to_string()) {
                assert!(!text.starts_with("ok "), "{text}");
                continue;
            }
            // If two ranks die, a survivor may notice either of them first, so its error must name
            // one of the two.
            let named = victims.split(' ').any(|victim| {
                let node = victim.parse::<usize>().unwrap() / 2;
                text.contains(&format!("barrier: rank {victim} on host"))
                    && text.contains(&format!("(node {node}) is lost"))
            });
            assert!(
                text.starts_with("ok kernel: ") && named,
                "rank {rank} without {victims}: {text}"
            );
        }
    }
}

#[test]
fn the_end_of_rank_0_ends_all() {
    let (job, port) = (Job::new("killed"), free_port());
    let vars = |rank| [torchrun(rank, port), vec![("VICTIMS", "0".into())]].concat();
    let ranks = job.ranks(4, vars);
    for text in ranks.into_iter().map(result).skip(1) {
        contains(&text, &["ok kernel: ", "barrier: rank 0 on host", "is lost"]);
    }
}

#[test]
fn a_stopped_node_is_late_and_not_lost() {
    let (job, port) = (Job::new("stopped"), free_port());
    let ready = job.temp.path().with_extension("ready");
    let vars = |rank| [torchrun(rank, port), vec![("READY", ready.display().to_string())]].concat();
    let ranks = job.ranks(4, vars);
    wait_for_file(&ready);
    let node = [&ranks[2], &ranks[3]].map(Pid::from_child);
    node.iter().for_each(|&pid| kill_process(pid, Signal::STOP).unwrap());
    // The ranks are stopped for longer than the time after which an unreachable host counts as
    // lost, 3 s here.
    std::thread::sleep(Duration::from_secs(8));
    node.iter().for_each(|&pid| kill_process(pid, Signal::CONT).unwrap());
    std::fs::remove_file(&ready).unwrap();
    for text in job.results(ranks) {
        assert_eq!(text, "ok gone on");
    }
}
