//! Tests of ranks that are processes of several simulated nodes, and meet by the launcher's
//! environment variables.
//!
//! This file is long because each test has a case, which its ranks run.

use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::Child;
use std::time::Duration;

use iris_heap::{Error, HeapOptions, SymmetricHeap, World};
use iris_testkit::free_port;
use iris_testkit::launch::{keep_files_in, open_mpi};
use rustix::process::{Pid, Signal, kill_process};

use crate::job::{
    CASE, Case, Job, all_contain, contains, env, files, kill, launch_until_abort, result, wait_for,
    wait_for_file,
};

pub(crate) const CASES: &[Case] = &[
    ("heap on each node", heap),
    ("groups", groups),
    ("killed on a node", killed),
    ("gives up", gives_up),
    ("stopped for a while", stopped),
    ("connections", connections),
    ("fails", fails),
    ("meets", meets),
];

/// Case that opens one heap per node, then does the same in a second world, which meets at the same
/// port.
fn heap() -> Result<String, Error> {
    let mut said = String::new();
    for _ in 0..2 {
        let world = World::from_env()?;
        said = in_a_heap(&world)?;
        world.close()?;
    }
    Ok(said)
}

/// Opens one heap per node of a world, and returns the rank numbers that a rank reads there.
fn in_a_heap(world: &World) -> Result<String, Error> {
    let heap = SymmetricHeap::open(world, HeapOptions::new().data_bytes(1 << 20).threads(1))?;
    let x = heap.full::<f32>(100, world.rank() as f32)?;
    heap.local_world().barrier()?;
    let theirs = heap.node_ranks().map(|rank| heap.read_from(x.slice(..1)?, rank));
    let theirs = theirs.collect::<Result<Vec<_>, _>>()?.concat();
    heap.local_world().barrier()?;
    heap.close()?;
    Ok(format!("{} nodes, node {}: {theirs:?}", world.nodes(), world.node()))
}

/// Case that opens heaps in groups: of all ranks, of one rank of each node, of the ranks of a node.
fn groups() -> Result<String, Error> {
    let world = World::from_env()?;
    let rank = world.rank() as u32;
    let mut said = Vec::new();
    for color in [0, rank % 2, rank / 2] {
        let group = world.split(Some(color), 0)?.expect("every rank has a color");
        said.push(in_a_heap(&group)?);
        group.close()?;
    }
    world.close()?;
    Ok(said.join("; "))
}

/// Case in which the ranks for which `leave` returns true end, while the others wait in a kernel on
/// their node.
fn told_in_kernel_and_barrier(leave: impl Fn(&World) -> bool) -> Result<String, Error> {
    let world = World::from_env()?;
    let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(1 << 20).threads(1))?;
    let stream = heap.stream()?;
    world.barrier()?;
    if leave(&world) {
        return Ok("gone".into());
    }
    launch_until_abort(&heap, &stream)?;
    let in_kernel = stream.sync().unwrap_err();
    let in_barrier = world.barrier().unwrap_err();
    Ok(format!("kernel: {in_kernel}; barrier: {in_barrier}"))
}

/// Case in which some ranks die.
fn killed() -> Result<String, Error> {
    told_in_kernel_and_barrier(|world| {
        env("VICTIMS").contains(&world.rank().to_string()) && std::process::abort()
    })
}

/// Case in which rank 3 gives its reason.
fn gives_up() -> Result<String, Error> {
    told_in_kernel_and_barrier(|world| {
        if world.rank() == 3 {
            world.abort_with("the tokenizer has no file");
        }
        world.rank() == 3
    })
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

/// Lines of the system's table of established TCP connections, with inode, in which the field `at`
/// (1 for the local address, 2 for the remote one) has the port of the job's rank 0.
fn connections_at_port(at: usize) -> Vec<String> {
    let port: u16 = env("MASTER_PORT").parse().unwrap();
    let end = format!(":{:04X}", port + 1);
    let files = ["/proc/net/tcp", "/proc/net/tcp6"].map(std::fs::read_to_string);
    let text = files.into_iter().flatten().collect::<String>();
    let fields = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let found = fields.filter(|f| f.get(at).is_some_and(|f| f.ends_with(&end)) && f[3] == "01");
    found.map(|f| f[9].to_string()).collect()
}

/// Whether this process has a connection to the port of rank 0: that of the relay of its node.
fn has_relay() -> bool {
    let inodes = connections_at_port(2).into_iter().map(|inode| format!("socket:[{inode}]"));
    let inodes: Vec<_> = inodes.collect();
    let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let open = open.filter_map(|fd| std::fs::read_link(fd.path()).ok());
    open.into_iter().any(|link| inodes.iter().any(|inode| link.as_os_str() == inode.as_str()))
}

/// Case that counts the connections at rank 0, and those that each rank has to it.
fn connections() -> Result<String, Error> {
    let world = World::from_env()?;
    let own = world.allgather(&[u8::from(has_relay())])?.concat();
    let at_rank_0 = connections_at_port(1).len();
    world.close()?;
    let relays: Vec<usize> =
        own.chunks(3).map(|node| node.iter().map(|&n| n as usize).sum()).collect();
    Ok(format!("{at_rank_0} at rank 0, {relays:?} by node"))
}

/// Case in which one rank of node 1 fails: the one with the relay, or the last one without it. It
/// is killed or stopped.
fn fails() -> Result<String, Error> {
    let world = World::from_env()?;
    let across = world.across()?;
    let relays = world.allgather(&[u8::from(has_relay())])?.concat();
    let node = world.size() / world.nodes()..2 * world.size() / world.nodes();
    let relay = u8::from(env("VICTIM") == "relay");
    let victim = node.rev().find(|&rank| relays[rank] == relay).expect("a rank of node 1");
    if world.rank() == victim {
        match env("HOW").as_str() {
            // Another thread may take the signal, so this one must not go on meanwhile.
            "stop" => {
                kill_process(rustix::process::getpid(), Signal::STOP).unwrap();
                loop {
                    std::thread::park();
                }
            }
            _ => std::process::abort(),
        }
    }
    let error = world.barrier().unwrap_err();
    let across = match env("HOW").as_str() {
        "kill" => across.barrier().err().map(|error| error.to_string()).unwrap_or_default(),
        _ => String::new(),
    };
    // The end of a rank also ends the worlds of others, so all ranks first see their errors.
    let told = std::env::temp_dir().join("told");
    std::fs::create_dir_all(&told).unwrap();
    std::fs::write(told.join(world.rank().to_string()), "").unwrap();
    wait_for("all errors", || (files(&told).len() == world.size() - 1).then_some(()));
    Ok(format!("victim {victim}: {error}; across: {across}"))
}

/// Case in which ranks only meet.
fn meets() -> Result<String, Error> {
    World::from_env()?.close().map(|()| "met".into())
}

/// Environment variables that torchrun sets for a rank on nodes of `per_node` ranks; `IRIS_NODE`
/// simulates the hosts.
fn torchrun_on(rank: usize, per_node: usize, port: u16) -> Vec<(&'static str, String)> {
    let pairs = [
        ("LOCAL_RANK", rank % per_node),
        ("LOCAL_WORLD_SIZE", per_node),
        ("GROUP_RANK", rank / per_node),
        ("IRIS_NODE", rank / per_node),
        ("MASTER_PORT", usize::from(port) - 1),
    ];
    let mut vars: Vec<_> = pairs.map(|(name, value)| (name, value.to_string())).into();
    vars.push(("MASTER_ADDR", "localhost".into()));
    vars.push(("IRIS_DEADLINE", "0.1".into()));
    vars
}

/// Starts `size` ranks as torchrun does, on nodes of `per_node` ranks, with the variables `more`.
fn start(
    case: &'static str,
    (size, per_node): (usize, usize),
    more: &[(&'static str, &str)],
) -> (Job, Vec<Child>) {
    let (job, port) = (Job::new(case), free_port());
    let more: Vec<_> = more.iter().map(|(name, value)| (*name, value.to_string())).collect();
    let ranks = job.ranks(size, |rank| [torchrun_on(rank, per_node, port), more.clone()].concat());
    (job, ranks)
}

/// Environment variables of a rank that meets its node in `folder`; rank 0 has a node of its own.
fn meeting_in(
    folder: &Path,
    rank: usize,
    port: u16,
    deadline: &str,
) -> Vec<(&'static str, String)> {
    let more = [
        ("IRIS_NODE", rank.min(1).to_string()),
        ("IRIS_RENDEZVOUS", folder.display().to_string()),
        ("IRIS_DEADLINE", deadline.into()),
    ];
    [&torchrun_on(rank, 1, port)[..], &more].concat()
}

fn free_port() -> u16 {
    free_port::on("127.0.0.1").unwrap()
}

fn check_heap(results: Vec<String>) {
    for (rank, text) in results.into_iter().enumerate() {
        let (node, first) = (rank / 2, rank / 2 * 2);
        assert_eq!(text, format!("ok 2 nodes, node {node}: [{first}.0, {}.0]", first + 1));
    }
}

#[test]
fn torchrun_with_a_secret() {
    let secret = tempfile::NamedTempFile::new().unwrap().into_temp_path();
    std::fs::remove_file(&secret).unwrap();
    iris_heap::Secret::new().unwrap().save(&secret).unwrap();
    let file = [("IRIS_SECRET_FILE", secret.to_str().unwrap())];
    let (job, ranks) = start("heap on each node", (4, 2), &file);
    check_heap(job.results(ranks));
}

#[test]
fn groups_over_nodes_have_heaps() {
    let (job, ranks) = start("groups", (4, 2), &[]);
    for (rank, text) in job.results(ranks).into_iter().enumerate() {
        let (node, first) = (rank / 2, rank / 2 * 2);
        let all = format!("2 nodes, node {node}: [{first}.0, {}.0]", first + 1);
        let of_each = format!("2 nodes, node {node}: [{node}.0]");
        assert_eq!(text, format!("ok {all}; {of_each}; 1 nodes, node 0: [0.0, 1.0]"));
    }
}

/// Tests ranks that meet over the network, as their launcher names two hosts, and are on one.
#[test]
fn hosts_that_are_one_have_a_heap() {
    for (size, per_node) in [(1, 1), (2, 1), (4, 2)] {
        let same = [("IRIS_NODE", "same")];
        let (job, ranks) = start("heap on each node", (size, per_node), &same);
        let all: Vec<_> = (0..size).map(|rank| rank as f32).collect();
        for text in job.results(ranks) {
            assert_eq!(text, format!("ok 1 nodes, node 0: {all:?}"));
        }
    }
}

#[test]
fn slurm_without_an_address() {
    let (job, port) = (Job::new("heap on each node"), free_port());
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
    let version = open_mpi().arg("--version").output();
    // `mpirun` says Open MPI, and Debian's `mpirun.openmpi` OpenRTE, which is Open MPI's launcher.
    let is_open_mpi = version.is_ok_and(|it| {
        let text = String::from_utf8_lossy(&it.stdout).into_owned();
        text.contains("Open MPI") || text.contains("OpenRTE")
    });
    if !is_open_mpi {
        println!("skipped: mpirun of Open MPI, of openmpi-bin, does not start");
        return;
    }
    let program = std::env::current_exe().unwrap();
    let node = "IRIS_NODE=$((OMPI_COMM_WORLD_RANK / 2)) exec \"$0\" \"$@\"";
    let folder = tempfile::tempdir().unwrap();
    let output = keep_files_in(&mut open_mpi(), folder.path())
        .args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "4"])
        .args(["-x", "MASTER_ADDR=127.0.0.1", "-x", &format!("IRIS_PORT={}", free_port())])
        .args(["-x", &format!("{CASE}=heap on each node"), "/bin/sh", "-c", node])
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

/// Tests that a process of another user does not join a job that has no secret.
#[test]
fn a_process_of_another_user_needs_a_secret() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root starts ranks of several users");
        return;
    }
    let (job, other) = (Job::new("meets"), Job::limited("meets", 1024, 4));
    let port = free_port().to_string();
    let start = |job: &Job, rank: &str| {
        let shared = [("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "7")];
        let own = [("RANK", rank), ("IRIS_NODE", rank), ("IRIS_PORT", &port)];
        job.rank(&[&shared[..], &own].concat())
    };
    let zero = start(&job, "0");
    let expected = format!("is of user 0, expected {}", other.user());
    contains(&result(start(&other, "1")), &["error ", &expected, "IRIS_SECRET_FILE"]);
    let one = start(&job, "1");
    for text in job.results(vec![zero, one]) {
        assert!(text.starts_with("ok "), "{text}");
    }
}

#[test]
fn a_killed_rank_and_a_killed_node_are_named_everywhere() {
    for victims in ["3", "1", "2 3"] {
        let (_job, ranks) = start("killed on a node", (4, 2), &[("VICTIMS", victims)]);
        for (rank, child) in ranks.into_iter().enumerate() {
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
fn the_reason_of_a_rank_is_shown_on_all_nodes() {
    let (_job, ranks) = start("gives up", (4, 2), &[]);
    for text in ranks.into_iter().map(result).take(3) {
        contains(&text, &["kernel: rank 3 on", "barrier: rank 3 on"]);
        let reason = "(node 1) gave up: the tokenizer has no file;";
        assert_eq!(text.matches(reason).count(), 2, "{text}");
    }
}

#[test]
fn the_end_of_rank_0_ends_all() {
    let (_job, ranks) = start("killed on a node", (4, 2), &[("VICTIMS", "0")]);
    all_contain(
        ranks.into_iter().map(result).skip(1),
        &["ok kernel: ", "barrier: rank 0 on host", "is lost"],
    );
}

#[test]
fn a_stopped_node_is_late_and_not_lost() {
    let notes = tempfile::tempdir().unwrap();
    let ready = notes.path().join("ready");
    let (job, ranks) = start("stopped for a while", (4, 2), &[("READY", ready.to_str().unwrap())]);
    wait_for_file(&ready);
    let node = [&ranks[2], &ranks[3]].map(Pid::from_child);
    node.iter().for_each(|&pid| kill_process(pid, Signal::STOP).unwrap());
    // The ranks are stopped for longer than the time after which an unreachable host counts as
    // lost, 3 s here.
    std::thread::sleep(Duration::from_secs(8));
    node.iter().for_each(|&pid| kill_process(pid, Signal::CONT).unwrap());
    for text in job.results(ranks) {
        assert_eq!(text, "ok gone on");
    }
}

#[test]
fn each_node_has_one_connection_to_rank_0() {
    let (job, ranks) = start("connections", (9, 3), &[]);
    for text in job.results(ranks) {
        assert_eq!(text, "ok 2 at rank 0, [0, 1, 1] by node");
    }
}

/// Runs `fails` on three nodes of three ranks. Returns the number of the rank that fails, and what
/// each of the others says.
fn failing(victim: &'static str, how: &'static str, deadline: &str) -> (usize, Vec<String>) {
    let more = [("VICTIM", victim), ("HOW", how), ("IRIS_DEADLINE", deadline)];
    let (_job, ranks) = start("fails", (9, 3), &more);
    let mut ranks: Vec<_> = ranks.into_iter().map(Some).collect();
    let told_by = |child| {
        let text = result(child);
        let victim = text.strip_prefix("ok victim ").and_then(|rest| rest.split_once(": "));
        let victim: Option<usize> = victim.and_then(|(victim, _)| victim.parse().ok());
        (victim.unwrap_or_else(|| panic!("{text}")), text)
    };
    let (victim, text) = told_by(ranks[0].take().unwrap());
    let mut told = vec![text];
    let mut stopped = ranks[victim].take().unwrap();
    for child in ranks.into_iter().flatten() {
        let (named, text) = told_by(child);
        assert_eq!(named, victim, "{text}");
        told.push(text);
    }
    // A stopped process is killed only after the others have told their errors.
    kill(&mut stopped);
    (victim, told)
}

#[test]
fn a_killed_process_is_named_by_all_with_and_without_the_relay() {
    for role in ["relay", "other"] {
        let (victim, told) = failing(role, "kill", "0.1");
        for text in told {
            contains(&text, &[&format!(": rank {victim} on host"), "is lost"]);
            // The end of the relay also ends worlds to which its rank does not belong.
            let (_, across) = text.split_once("across: ").unwrap();
            let named = across.starts_with(&format!("rank {victim} o"));
            assert!(named || role == "other" && across.is_empty(), "{text}");
        }
    }
}

#[test]
fn a_stopped_process_is_absent_with_and_without_the_relay() {
    let check = |role| {
        let (victim, told) = failing(role, "stop", "0.02");
        for text in told {
            let absent = format!("for rank {victim}, which should have come");
            assert!(text.contains(&absent) && !text.contains("is lost"), "{text}");
        }
    };
    std::thread::scope(|scope| {
        ["relay", "other"].map(|role| scope.spawn(move || check(role))).map(drop)
    });
}

/// Tests the loss of a rank after the world has met and before its node has. Rank 3 looks for its
/// node in another folder, so ranks 1 and 2 wait there for it.
#[test]
fn a_rank_lost_while_its_node_meets_is_named_by_its_number_in_the_world() {
    let (job, port) = (Job::new("meets"), free_port());
    let [folder, other] = ["one", "other"].map(|name| job.temp.path().join(name));
    let vars = |rank| {
        let folder = if rank == 3 { &other } else { &folder };
        meeting_in(folder, rank, port, "1")
    };
    let mut ranks = job.ranks(4, vars);
    // The files of ranks that wait at one place have one name, and end with the ranks' numbers: 1 and
    // 2 while the world meets, 0 and 1 on the node.
    wait_for("the node's meeting", || {
        let first =
            files(&folder).into_iter().find(|file| file.with_extension("rank1").exists())?;
        first.with_extension("rank0").exists().then_some(())
    });
    ranks[2].kill().unwrap();
    let mut waiting = ranks.pop().unwrap();
    ranks.truncate(2);
    all_contain(ranks.into_iter().map(result), &["error rank 2 on host", "(node 1) is lost"]);
    kill(&mut waiting);
}

/// Tests a rank of another node than rank 0's that fails before it meets the others, while rank 0 has not
/// started: the rank beside it learns the reason, and does not wait for its deadline. No host has the
/// address of rank 0, which is reserved for documentation.
#[test]
fn a_rank_on_another_node_that_cannot_begin_is_told_there() {
    let start = |(name, value)| {
        let (job, port) = (Job::new("meets"), free_port().to_string());
        let all = [
            ("WORLD_SIZE", "3"),
            ("LOCAL_RANK", "0"),
            ("IRIS_NODE", "1"),
            ("MASTER_ADDR", "192.0.2.1"),
            ("IRIS_PORT", &port),
            ("IRIS_TRUST_NETWORK", "1"),
        ];
        let told = job.rank(&[&all[..], &[("RANK", "1")]].concat());
        let own = job.rank(&[&all[..], &[("RANK", "2"), (name, value)]].concat());
        (job, [name, value], told, own)
    };
    let cases = [("IRIS_DEADLINE", "-1"), ("IRIS_SECRET_FILE", "/nowhere")].map(start);
    for (_job, words, told, own) in cases {
        contains(&result(own), &words);
        contains(&result(told), &[&["error rank 2 failed in meeting"], &words[..]].concat());
    }
}

/// Tests a rank that ends before it meets the others, as the launcher's word in its folder says: the
/// ranks of both nodes name it, and do not wait for their deadline.
#[test]
fn a_rank_that_never_comes_is_named_on_all_nodes_by_the_launchers_word() {
    let start = |victim: usize| {
        let (job, port) = (Job::new("meets"), free_port());
        let folder = job.temp.path().join("launcher");
        std::fs::DirBuilder::new().mode(0o700).create(&folder).unwrap();
        std::fs::write(folder.join(format!("lost-{victim}")), "0").unwrap();
        let come = |rank: usize| {
            let mut vars = torchrun_on(rank, 2, port);
            vars.push(("IRIS_RENDEZVOUS", folder.display().to_string()));
            vars.extend([("RANK", rank.to_string()), ("WORLD_SIZE", "4".into())]);
            let vars: Vec<_> = vars.iter().map(|(name, value)| (*name, value.as_str())).collect();
            job.rank(&vars)
        };
        let ranks: Vec<_> = (0..4).filter(|&rank| rank != victim).map(come).collect();
        (job, victim, ranks)
    };
    for (_job, victim, ranks) in [0, 1, 3].map(start) {
        all_contain(ranks.into_iter().map(result), &[&format!("error rank {victim} is lost")]);
    }
}

/// Tests that the other nodes wait for the meeting of a node, and are told why it came to nothing.
/// Rank 2 looks for its node in another folder than rank 1.
#[test]
fn a_node_that_does_not_meet_is_told_to_the_others() {
    let (job, port) = (Job::new("meets"), free_port());
    let folder = |rank: usize| job.temp.path().join(rank.to_string());
    let vars = |rank| meeting_in(&folder(rank), rank, port, "0.002");
    all_contain(
        job.ranks(3, vars).into_iter().map(result),
        &["waited", "meeting the ranks of its node"],
    );
}
