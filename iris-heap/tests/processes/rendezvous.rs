//! Tests of the rendezvous of processes, and of events that can prevent it: system limits, ranks
//! that die, stop or are late, and connections of strangers.
//!
//! This file is long because each failure needs a case for its rank and a test.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use iris_heap::{Error, HeapOptions, Network, SymmetricHeap, UniqueId, World};
use iris_testkit::free_port;
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, Signal, kill_process};

use crate::job::{
    Case, Job, all_contain, contains, env, files, kill, no_vars, result, said, wait_for,
    wait_for_file,
};

pub(crate) const CASES: &[Case] = &[
    ("read", read),
    ("descriptors", descriptors),
    ("hog", hog),
    ("barrier", barrier),
    ("busy", busy),
    ("skip-until-go", skip_until_go),
    ("idle", idle),
    ("stopped-before-barrier", stopped_before_barrier),
    ("stopped-in-barrier", stopped_in_barrier),
];

/// Case in which each rank reads the data that every other rank wrote.
fn read() -> Result<String, Error> {
    let world = World::from_env()?;
    let options = HeapOptions::new().data_bytes(1 << 16).signal_bytes(1 << 16).threads(1);
    let heap = SymmetricHeap::open(&world, options)?;
    let mine = heap.full(4, world.rank() as i32)?;
    for rank in 0..world.size() {
        assert_eq!(heap.read_from(mine, rank)?, [rank as i32; 4]);
    }
    world.barrier()?;
    heap.close()?;
    world.close()?;
    Ok("read".into())
}

/// Case that shares descriptors as a GPU backend does: each rank passes descriptors, some ranks
/// more than others; or only rank `GIVER` passes one.
fn descriptors() -> Result<String, Error> {
    let world = World::from_env()?;
    let giver = env("GIVER").parse::<usize>().ok();
    let count = |rank: usize| match giver {
        Some(giver) => usize::from(rank == giver),
        None if rank.is_multiple_of(5) => 3,
        None => 1,
    };
    let file = |at: usize| {
        let file = rustix::fs::memfd_create("iris-test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, (1000 * world.rank() + at) as u64).unwrap();
        file
    };
    for _ in 0..2 {
        let mine = (0..count(world.rank())).map(file).collect();
        for (rank, theirs) in world.share_descriptors(mine)?.iter().enumerate() {
            let size = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_size as usize;
            let sizes: Vec<_> = theirs.iter().map(size).collect();
            let expected: Vec<_> = (0..count(rank)).map(|at| 1000 * rank + at).collect();
            assert_eq!(sizes, expected, "of rank {rank}");
        }
    }
    world.close()?;
    Ok("shared".into())
}

/// Case of a process that keeps 200 unreceived descriptors in transit until the file `GO` exists.
fn hog() -> Result<String, Error> {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let (from, _to) = UnixStream::pair().unwrap();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(100))];
    for _ in 0..2 {
        let mut control = SendAncillaryBuffer::new(&mut space);
        let many = [from.as_fd(); 100];
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        let byte = [std::io::IoSlice::new(b"x")];
        sendmsg(&from, &byte, &mut control, SendFlags::empty()).unwrap();
    }
    std::fs::write(env("HELD"), "").unwrap();
    wait_for_file(env("GO"));
    Ok("gone".into())
}

/// Case that opens a world and runs a barrier, once the file `GO` exists.
pub(crate) fn barrier() -> Result<String, Error> {
    let go = env("GO");
    if !go.is_empty() {
        wait_for_file(&go);
    }
    let world = World::from_env()?;
    world.barrier()?;
    let job = world.allgather(env("MASTER_PORT").as_bytes())?;
    assert!(job.iter().all(|port| *port == job[0]), "another job's process");
    world.close()?;
    Ok("met".into())
}

/// Case that runs a barrier, and checks that the process used little CPU time while waiting.
fn busy() -> Result<String, Error> {
    let started = Instant::now();
    let met = barrier();
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: f64 = fields[11..13].iter().map(|f| f.parse::<f64>().unwrap()).sum();
    let part = ticks / 100.0 / started.elapsed().as_secs_f64();
    println!("computed for {:.0} % of the time", 100.0 * part);
    assert!(part < 0.5, "a busy loop: {part}");
    met
}

fn skip_until_go() -> Result<String, Error> {
    let world = World::from_env()?;
    if world.rank() == 1 {
        wait_for_file(env("GO"));
    }
    world.barrier()?;
    world.close()?;
    Ok("met".into())
}

/// Case of a server that is idle three times: rank 0 comes late to the same barrier.
fn idle() -> Result<String, Error> {
    let world = World::from_env()?;
    for _ in 0..3 {
        if world.rank() == 0 {
            std::thread::sleep(Duration::from_millis(1500));
        }
        world.barrier()?;
    }
    world.close()?;
    Ok("met".into())
}

/// Case in which rank 0 is stopped before a barrier, until the others have given up.
fn stopped_before_barrier() -> Result<String, Error> {
    let world = World::from_env()?;
    world.barrier()?;
    if world.rank() == 0 {
        std::fs::write(env("READY"), "").unwrap();
        wait_for_file(env("GO"));
    }
    let first = world.barrier();
    world.barrier()?;
    first.map(|()| "met".into())
}

/// Case in which rank 0 is stopped while it waits in a barrier for rank 2, until the others have
/// given up.
fn stopped_in_barrier() -> Result<String, Error> {
    let world = World::from_env()?;
    world.barrier()?;
    if world.rank() == 0 {
        std::fs::write(env("READY"), "").unwrap();
    } else if world.rank() == 2 {
        wait_for_file(env("STOPPED"));
    }
    world.barrier()?;
    world.barrier().map(|()| "met".into())
}

#[track_caller]
fn all_are(expected: &str, texts: &[String]) {
    for (rank, text) in texts.iter().enumerate() {
        assert!(text == expected, "rank {rank} of {}: {text}", texts.len());
    }
}

#[test]
fn an_ordinary_users_limits_suffice() {
    // Limits of the two cases: number of open files, and number of descriptors in transit from all
    // processes of the user.
    for (ranks, limit) in [(64, 1024), (16, 256)] {
        for (case, expected) in [("read", "ok read"), ("descriptors", "ok shared")] {
            let job = Job::limited(case, limit, 0);
            let vars = |_| vec![("IRIS_DEADLINE", "0.05".to_string())];
            all_are(expected, &job.results(job.ranks(ranks, vars)));
        }
    }
}

#[test]
fn descriptors_that_do_not_get_through_are_tried_again_or_named() {
    let start = |factor: &str, giver: usize| {
        let job = Job::limited("descriptors", 64, 1);
        let (held, go) = (job.temp.path().join("held"), job.temp.path().join("go"));
        let path = |it: &Path| it.to_str().unwrap().to_string();
        let hog = Job::limited("hog", 1024, 1);
        let hog = hog.start("hog", &[("HELD", &path(&held)), ("GO", &path(&go))]);
        wait_for_file(&held);
        let ranks = job.ranks(3, |rank| {
            // Rank 0 may open only few files, so the hub cannot forward the descriptor that another
            // rank passes.
            let limit = if rank == 0 { 64 } else { 1024 };
            vec![
                ("IRIS_DEADLINE", factor.to_string()),
                ("GIVER", giver.to_string()),
                ("LIMIT", limit.to_string()),
            ]
        });
        (job, hog, ranks, go)
    };
    for giver in [0, 1] {
        // With a long deadline, the ranks try again until the descriptors in transit have been
        // received.
        let (job, hog, ranks, go) = start("1", giver);
        std::thread::sleep(Duration::from_millis(500));
        std::fs::write(&go, "").unwrap();
        assert_eq!(result(hog), "ok gone");
        all_are("ok shared", &ranks.into_iter().map(result).collect::<Vec<_>>());
        drop(job);
        let (job, hog, ranks, go) = start("0.01", giver);
        all_contain(
            ranks.into_iter().map(result),
            &["rank 0", "oo many references", "limit of open files, 64"],
        );
        std::fs::write(&go, "").unwrap();
        assert_eq!(result(hog), "ok gone");
        drop(job);
    }
}

/// Tests ranks that see no id of each other's process, as in containers that share the folder in
/// which ranks meet. Skipped where this user may make no such namespaces.
#[test]
fn ranks_in_namespaces_of_their_own_meet() {
    // The wrapper ends with the process that it starts.
    let mut wrapper = "unshare --pid --fork --kill-child".to_owned();
    if !rustix::process::geteuid().is_root() {
        wrapper += " --user --map-current-user";
    }
    let mut words = wrapper.split_whitespace();
    let tried = Command::new(words.next().unwrap()).args(words).arg("true").output();
    if !tried.is_ok_and(|output| output.status.success()) {
        println!("skipped: `{wrapper}` is not allowed here");
        return;
    }
    let job = Job::new("read");
    let folder = job.temp.path().join("meeting");
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o700)).unwrap();
    for (name, value) in [("MASTER_PORT", "29700"), ("IRIS_RENDEZVOUS", folder.to_str().unwrap())] {
        let vars = |rank| {
            // Rank 1 is in the namespace of this test.
            let wrapper = if rank == 1 { "" } else { wrapper.as_str() };
            vec![("WRAPPER", wrapper.to_owned()), ("PATH", env("PATH")), (name, value.to_owned())]
        };
        all_are("ok read", &job.results(job.ranks(3, vars)));
    }
}

/// Tests a folder that exists but admits no file: no rank waits for another.
#[test]
fn a_folder_without_room_for_a_file_is_an_error_of_every_rank() {
    let job = Job::limited("barrier", 1024, 4);
    let folder = job.temp.path().join("meeting");
    std::fs::create_dir(&folder).unwrap();
    std::os::unix::fs::chown(&folder, Some(job.user()), None).unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o500)).unwrap();
    let place = folder.to_str().unwrap().to_owned();
    let vars = |_| vec![("IRIS_RENDEZVOUS", place.clone()), ("IRIS_DEADLINE", "0.05".to_owned())];
    all_contain(
        job.ranks(3, vars).into_iter().map(result),
        &["error", "making a file in the folder", &place, "set IRIS_RENDEZVOUS"],
    );
}

#[test]
fn a_rank_0_without_descriptors_is_named() {
    let job = Job::limited("busy", 12, 2);
    let texts: Vec<_> = job.ranks(12, no_vars).into_iter().map(result).collect();
    all_contain(&texts, &["error", "rank 0", "oo many open files", "the limit is 12"]);
    job.check_left();
}

#[test]
fn a_rank_0_with_few_descriptors_names_the_limit() {
    let started: Vec<_> = (5..=16)
        .map(|limit| {
            let job = Job::limited("barrier", 1024, 3);
            let vars = |rank| vec![("LIMIT", if rank == 0 { limit } else { 1024 }.to_string())];
            let ranks = job.ranks(3, vars);
            (limit, job, ranks)
        })
        .collect();
    for (limit, _job, ranks) in started {
        let texts: Vec<_> = ranks.into_iter().map(result).collect();
        let limit = format!("limit is {limit}");
        let met = texts.iter().all(|text| text == "ok met");
        assert!(met || texts.iter().all(|text| text.contains(&limit)), "{limit}: {texts:?}");
    }
}

/// Kills rank 0 after it has begun to listen, removes its socket, and returns the socket's path.
fn remove_socket(job: &Job, mut zero: Child) -> PathBuf {
    let socket = job.socket();
    kill(&mut zero);
    std::fs::remove_file(&socket).unwrap();
    socket
}

#[test]
fn where_no_folder_can_be_made_every_rank_says_so() {
    let job = Job::new("barrier");
    let texts = job.ranks(3, |_| vec![("TMPDIR", "/nowhere/at/all".into())]);
    all_contain(
        texts.into_iter().map(result),
        &["error", "making the folder /nowhere/at/all/iris-", "No such file"],
    );
}

#[test]
fn a_rank_0_that_cannot_listen_tells_the_others() {
    let job = Job::new("barrier");
    let with = |rank| job.rank(&[("RANK", rank), ("WORLD_SIZE", "3"), ("MASTER_PORT", "29514")]);
    let socket = remove_socket(&job, with("0"));
    std::fs::create_dir(&socket).unwrap();
    // Rank 0 of this run starts after the other ranks.
    let mut ranks = vec![with("1"), with("2")];
    for rank in ["rank1", "rank2"] {
        let file = socket.with_extension(rank);
        wait_for_file(&file);
    }
    ranks.push(with("0"));
    all_contain(ranks.into_iter().map(result), &["error", "unlinking a stale socket", "directory"]);
}

/// Variables of ranks that meet over the network: rank 0 is on a node of its own.
fn two_nodes(rank: &str) -> Vec<(&'static str, &'static str)> {
    let node = if rank == "0" { "a" } else { "b" };
    vec![("IRIS_NODE", node), ("MASTER_ADDR", "127.0.0.1"), ("IRIS_DEADLINE", "0.05")]
}

/// Value of `MASTER_PORT` by which ranks meet at a port that is free, the next one.
fn master_port() -> String {
    (free_port::on("127.0.0.1").unwrap() - 1).to_string()
}

/// Waits for the file by which the others see the process of `rank`, other than the file `not` of
/// another process, and returns the number of the file.
fn wait_for_rank(job: &Job, rank: &str, not: Option<u64>) -> u64 {
    let is = |it: &PathBuf| it.extension().is_some_and(|end| *end == *format!("rank{rank}"));
    wait_for("the file of a rank", || {
        let file = files(job.temp.path()).into_iter().find(is)?;
        Some(file.metadata().ok()?.ino()).filter(|&number| Some(number) != not)
    })
}

/// Kills rank 1 before it has connected, and checks that the others name it. `vars` has variables of
/// each rank.
fn kill_before_connecting(job: &Job, vars: impl Fn(&str) -> Vec<(&'static str, &'static str)>) {
    let port = master_port();
    let with = |rank| {
        let all = [("RANK", rank), ("WORLD_SIZE", "3"), ("MASTER_PORT", &*port)];
        job.rank(&[&all[..], &vars(rank)].concat())
    };
    // Rank 2 already waits when rank 1 dies; rank 0 starts only later.
    let early = with("2");
    wait_for_rank(job, "2", None);
    let mut dead = with("1");
    wait_for_rank(job, "1", None);
    kill(&mut dead);
    all_contain([early, with("0")].map(result), &["error", "rank 1 is lost"]);
    job.check_left();
}

#[test]
fn a_rank_that_dies_before_it_has_connected_is_lost() {
    kill_before_connecting(&Job::new("barrier"), |_| Vec::new());
}

#[test]
fn a_rank_of_another_node_that_dies_before_it_has_connected_is_lost() {
    kill_before_connecting(&Job::new("barrier"), two_nodes);
}

/// Command that starts a program in a mount namespace of its own; `None`, with a line that says so,
/// where this user may make none.
fn mount_namespace() -> Option<String> {
    let mut wrapper = "unshare --mount".to_owned();
    if !rustix::process::geteuid().is_root() {
        wrapper += " --user --map-root-user";
    }
    let mount = format!("{wrapper} mount -t tmpfs none /mnt");
    let tried = Command::new("sh").args(["-c", &mount]).output();
    if tried.is_ok_and(|output| output.status.success()) {
        return Some(wrapper);
    }
    println!("skipped: `{wrapper}` with a mount is not allowed here");
    None
}

/// Writes a program for the variable `WRAPPER`, and returns its path.
fn script(job: &Job, text: &str) -> &'static str {
    let path = job.temp.path().with_extension("sh");
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
    String::leak(path.to_str().unwrap().to_owned())
}

/// Tests that the end of a rank is noticed where the system does not show when processes began.
#[test]
fn without_proc_a_rank_that_dies_is_lost() {
    let Some(namespace) = mount_namespace() else { return };
    let job = Job::new("barrier");
    let hide = "mount -t tmpfs none /proc && exec \"$@\"";
    let wrapper = script(&job, &format!("exec {namespace} sh -c '{hide}' sh \"$@\""));
    kill_before_connecting(&job, |_| {
        vec![("WRAPPER", wrapper), ("PATH", "/usr/bin:/bin"), ("IRIS_DEADLINE", "0.05")]
    });
    std::fs::remove_file(wrapper).unwrap();
}

/// Tests that a rank for which the folder has no room meets the others, if rank 0 listens there.
#[test]
fn a_rank_without_room_for_its_file_meets_the_others() {
    let Some(namespace) = mount_namespace() else { return };
    let job = Job::new("barrier");
    let folder = job.temp.path().join("meeting");
    std::fs::create_dir(&folder).unwrap();
    // Inodes for the folder, and for the file and the socket of rank 0.
    let mount = format!("mount -t tmpfs -o nr_inodes=3,mode=700 none {}", folder.display());
    let hold = format!("exec {namespace} sh -c '{mount} && echo held && exec sleep 600'");
    let mut holder = Command::new("sh").args(["-c", &hold]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(holder.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "held\n");
    let user = if namespace.contains("--user") { "--user --preserve-credentials" } else { "" };
    let enter = format!("nsenter {user} --mount --target {}", holder.id());
    let with = |rank| {
        let all = [("RANK", rank), ("WORLD_SIZE", "2"), ("IRIS_DEADLINE", "0.05")];
        let place = [("IRIS_RENDEZVOUS", folder.to_str().unwrap()), ("WRAPPER", &enter)];
        job.rank(&[&all[..], &place, &[("PATH", "/usr/bin:/bin")]].concat())
    };
    let zero = with("0");
    let inside = PathBuf::from(format!("/proc/{}/root{}", holder.id(), folder.display()));
    wait_for("a socket", || files(&inside).into_iter().find(|file| file.extension().is_none()));
    let texts = [zero, with("1")].map(result);
    kill(&mut holder);
    assert_eq!(texts, ["ok met"; 2]);
}

/// Tests that a rank which ends with an error while ranks meet is noticed at once, with its reason:
/// by its settings, and by its deadline before rank 0 has come.
#[test]
fn a_rank_that_gives_up_while_ranks_meet_tells_the_others() {
    let one_node = |_: &str| vec![("IRIS_DEADLINE", "0.05")];
    for vars in [one_node as fn(&str) -> _, two_nodes] {
        for (deadline, words) in [
            ("soon", ["rank 1 failed in meeting the other ranks", "IRIS_DEADLINE=soon"]),
            ("0.002", ["rank 1 of 3 at", "s for rank 0, which should have come"]),
        ] {
            let job = Job::new("barrier");
            let go = job.temp.path().join("go");
            let port = master_port();
            let with = |rank, more: &[(&str, &str)]| {
                let all = [("RANK", rank), ("WORLD_SIZE", "3"), ("MASTER_PORT", &*port)];
                job.rank(&[&all[..], &vars(rank), more].concat())
            };
            let zero = with("0", &[("GO", go.to_str().unwrap())]);
            let two = with("2", &[]);
            wait_for_rank(&job, "2", None);
            let one = result(with("1", &[("IRIS_DEADLINE", deadline)]));
            std::fs::write(&go, "").unwrap();
            for text in [result(zero), one.clone(), result(two)] {
                contains(&text, &["error", words[1]]);
                if text != one {
                    contains(&text, &words);
                }
            }
            std::fs::remove_file(go).unwrap();
            job.check_left();
        }
    }
}

#[test]
fn a_reason_reaches_all_however_late_they_are() {
    let job = Job::new("barrier");
    let go = job.temp.path().join("go");
    let late = |go: &str| job.rank(&[("RANK", "3"), ("WORLD_SIZE", "4"), ("GO", go)]);
    let late = late(go.to_str().unwrap());
    // The late rank's process must have started before the world fails: a process that starts later
    // is no member of the failed world and does not get the reason.
    std::thread::sleep(Duration::from_millis(200));
    let size = |rank: usize| if rank == 1 { "3" } else { "4" };
    let ranks =
        (0..3).map(|rank| job.rank(&[("RANK", &rank.to_string()), ("WORLD_SIZE", size(rank))]));
    let mut texts: Vec<_> = ranks.collect::<Vec<_>>().into_iter().map(result).collect();
    std::fs::write(&go, "").unwrap();
    texts.push(result(late));
    all_contain(&texts, &["error", "the size of the world is 4 on rank 0, 3 on rank 1"]);
    std::fs::remove_file(go).unwrap();
    // The failed run must not affect the next run, whichever rank of the next run starts first.
    let one = job.rank(&[("RANK", "1"), ("WORLD_SIZE", "2")]);
    std::thread::sleep(Duration::from_millis(200));
    let zero = job.rank(&[("RANK", "0"), ("WORLD_SIZE", "2")]);
    assert_eq!([result(zero), result(one)], ["ok met"; 2]);
    job.check_left();
}

#[test]
fn a_rank_0_that_gave_up_or_died_is_not_waited_for() {
    let vars = [("WORLD_SIZE", "3"), ("MASTER_PORT", "29511")];
    let with = |job: &Job, more: &[(&str, &str)]| job.rank(&[&vars[..], more].concat());
    for killed in [false, true] {
        let job = Job::new("barrier");
        let go = job.temp.path().join("go");
        let late = with(&job, &[("RANK", "2"), ("GO", go.to_str().unwrap())]);
        std::thread::sleep(Duration::from_millis(200));
        let mut zero = with(&job, &[("RANK", "0"), ("IRIS_DEADLINE", "0.002")]);
        if killed {
            job.socket();
            zero.kill().unwrap();
        }
        let zero = result(zero);
        std::fs::write(&go, "").unwrap();
        let late = result(late);
        if killed {
            contains(&zero, &["signal"]);
            contains(&late, &["error", "rank 0 is lost"]);
        } else {
            contains(&zero, &["error", "waited", "for rank 1 and 2"]);
            contains(&late, &["error", "waited", "for rank 1 and 2"]);
        }
    }
}

/// Stops a process, and returns when all of its threads are stopped.
fn stop(child: &Child) {
    kill_process(Pid::from_child(child), Signal::STOP).unwrap();
    let threads = format!("/proc/{}/task", child.id());
    wait_for("all threads are stopped", || {
        let stands = |thread: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(thread.unwrap().path().join("stat"));
            stat.is_ok_and(|stat| stat.contains(") T "))
        };
        std::fs::read_dir(&threads).unwrap().all(stands).then_some(())
    });
}

#[test]
fn a_rank_0_that_was_stopped_blames_nobody_else() {
    let factor = ("IRIS_DEADLINE", "0.01");
    // Rank 0 is stopped before the others have arrived: its socket listens, so they can connect.
    let gathering = std::thread::spawn(move || {
        let job = Job::new("barrier");
        let with = |rank| job.rank(&[("RANK", rank), ("WORLD_SIZE", "4"), factor]);
        let zero = with("0");
        job.socket();
        stop(&zero);
        let others = ["1", "2", "3"].map(with).map(result);
        kill_process(Pid::from_child(&zero), Signal::CONT).unwrap();
        (others.to_vec(), result(zero))
    });
    let serving = ["stopped-before-barrier", "stopped-in-barrier"].map(|case| {
        std::thread::spawn(move || {
            let job = Job::new(case);
            let notes = tempfile::tempdir().unwrap();
            let note = |name: &str| notes.path().join(name).to_str().unwrap().to_string();
            let mut ranks = job.ranks(4, |_| {
                let notes = ["READY", "STOPPED", "GO"].map(|name| (name, note(name)));
                notes.into_iter().chain([(factor.0, factor.1.into())]).collect()
            });
            let zero = ranks.remove(0);
            wait_for_file(note("READY"));
            // Rank 0 gets time to enter the barrier, if that is its next step.
            std::thread::sleep(Duration::from_millis(100));
            stop(&zero);
            std::fs::write(note("STOPPED"), "").unwrap();
            let others: Vec<_> = ranks.into_iter().map(result).collect();
            std::fs::write(note("GO"), "").unwrap();
            kill_process(Pid::from_child(&zero), Signal::CONT).unwrap();
            (others, result(zero))
        })
    });
    for played in [gathering].into_iter().chain(serving) {
        let (others, zero) = played.join().unwrap();
        all_contain(&others, &["error", "for rank 0"]);
        contains(&zero, &["error", "for rank 0"]);
    }
}

/// Reads a rank's stderr up to a line that contains all of `words`.
fn hear(rank: &mut Child, words: &[&str]) -> BufReader<ChildStderr> {
    let mut said = BufReader::new(rank.stderr.take().unwrap());
    let mut all = String::new();
    loop {
        let before = all.len();
        let more = said.read_line(&mut all).unwrap();
        assert!(more > 0, "no line with {words:?} in: {all}");
        if words.iter().all(|word| all[before..].contains(word)) {
            return said;
        }
    }
}

#[test]
fn who_is_missing_is_said_on_stderr() {
    let factor = ("IRIS_DEADLINE", "0.1");
    let end = |mut rank: Child| {
        kill(&mut rank);
    };
    let job = Job::new("barrier");
    let with = |rank| job.rank(&[("RANK", rank), ("WORLD_SIZE", "4"), factor]);
    let [three, mut zero] = ["3", "0"].map(with);
    // The notice may say 71 s, because a part of the 72 s passes before the wait begins.
    hear(&mut zero, &["iris: rank 0 of 4 waits for rank 1 and 2", "s of 7"]);
    end(three);
    end(zero);
    let job = Job::new("barrier");
    let mut alone = job.rank(&[("RANK", "1"), ("WORLD_SIZE", "2"), factor]);
    hear(&mut alone, &["iris: rank 1 of 2 waits for rank 0", "set MASTER_PORT"]);
    end(alone);
    let job = Job::new("skip-until-go");
    let go = job.temp.path().join("go");
    let vars = |_| vec![(factor.0, factor.1.into()), ("GO", go.to_str().unwrap().into())];
    let mut ranks = job.ranks(3, vars);
    let rest = hear(
        &mut ranks[0],
        &["rank 0 in barrier at", "rendezvous.rs", "waits for rank 1 (process"],
    );
    std::fs::write(&go, "").unwrap();
    ranks[0].stderr = Some(rest.into_inner());
    let texts: Vec<_> = ranks.into_iter().map(said).collect();
    assert!(texts.iter().all(|said| said.result() == "ok met"), "{texts:?}");
    assert_eq!(texts[2].err.matches("waits for").count(), 0, "one rank says it for all");
}

/// Encodes a frame: length of the body, kind, number of descriptors, body.
fn frame(kind: u32, body: &[u8]) -> Vec<u8> {
    [&(body.len() as u64).to_le_bytes()[..], &kind.to_le_bytes(), &[0; 4], body].concat()
}

#[test]
fn strangers_hurt_nobody() {
    let job = Job::new("barrier");
    let zero = job.rank(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "29512")]);
    let socket = job.socket();
    let connect = || {
        let stream = UnixStream::connect(&socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    };
    // Body of a hello from a process of another job.
    let mut hello = Vec::new();
    let job_name = b"another job";
    hello.extend((job_name.len() as u64).to_le_bytes());
    hello.extend(job_name);
    hello.extend([1u64.to_le_bytes(), 2u64.to_le_bytes()].concat());
    let wrong = [
        vec![0xff; 64],
        frame(2, &[]),
        frame(5, &[0; 24]),
        frame(10, &[]),
        frame(11, &[0; 64]),
        frame(1, b"no hello"),
        frame(1, &hello),
        frame(77, &[]),
        (2u64 << 20).to_le_bytes().into_iter().chain([1, 0, 0, 0, 0, 0, 0, 0]).collect(),
    ];
    for bytes in wrong {
        let mut stream = connect();
        stream.write_all(&bytes).unwrap();
        // The connection must be closed, whether or not a message comes before.
        let mut rest = Vec::new();
        let closed = stream.read_to_end(&mut rest);
        let reset = |e: &std::io::Error| e.kind() == std::io::ErrorKind::ConnectionReset;
        assert!(closed.as_ref().map_or_else(reset, |_| true), "{bytes:?}: {closed:?}");
    }
    // Rank 0 must not store the beginning of a frame that is too long.
    let mut stream = connect();
    let mut header = frame(1, &[]);
    header[..8].copy_from_slice(&(64u64 << 20).to_le_bytes());
    let chunk = vec![0; 1 << 16];
    let mut taken = stream.write(&header).unwrap();
    while taken < 64 << 20
        && let Ok(more) = stream.write(&chunk)
    {
        taken += more;
    }
    assert!(taken < 1 << 20, "{taken} bytes were taken of a stranger");
    // More silent connections are opened than rank 0 keeps.
    let silent: Vec<_> = (0..100).map(|_| connect()).collect();
    let one = job.rank(&[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "29512")]);
    assert_eq!([result(zero), result(one)], ["ok met"; 2]);
    drop(silent);
    job.check_left();
}

#[test]
fn a_link_that_leads_nowhere_is_replaced() {
    let job = Job::new("barrier");
    let with = |rank| job.rank(&[("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_PORT", "29513")]);
    let socket = remove_socket(&job, with("0"));
    std::os::unix::fs::symlink("/nowhere/at/all", &socket).unwrap();
    assert_eq!(["0", "1"].map(with).map(result), ["ok met"; 2]);
    job.check_left();
}

/// Tests that the length of a job's name is checked wherever the name comes from.
#[test]
fn a_job_name_longer_than_a_hello_is_refused_by_every_rank() {
    let job = Job::new("barrier");
    let (port, id) = ("9".repeat(9000), "9".repeat(4095));
    all_contain(
        job.ranks(2, |_| vec![("MASTER_PORT", port.clone())]).into_iter().map(result),
        &["MASTER_PORT=9", ".. (9000 bytes): expected at most 4095 bytes"],
    );
    for rank in ["0", "1"] {
        let task = [("SLURM_PROCID", rank), ("SLURM_LOCALID", rank), ("SLURM_STEP_NUM_TASKS", "2")];
        let step = [("SLURM_JOB_ID", &*id), ("SLURM_STEP_ID", &*id), ("SLURM_STEP_NUM_NODES", "1")];
        let text = result(job.rank(&[task, step].concat()));
        contains(&text, &["error", "length of the job's name is 8", "at most 8168 bytes"]);
    }
    let network = Network::new("127.0.0.1:1", &UniqueId::new().unwrap()).node("n".repeat(9000));
    for rank in 0..2 {
        let text = World::over_network(&network, rank, 2).unwrap_err().to_string();
        contains(&text, &["length of the job's name is 9", "at most 8168 bytes"]);
    }
    job.check_left();
}

/// Tests that ranks that wait learn why rank 0 failed before it listened, on one host and where
/// ranks meet over the network.
#[test]
fn a_rank_0_that_fails_before_it_listens_tells_the_others() {
    let network = [("IRIS_NODE", "a"), ("MASTER_ADDR", "127.0.0.1")];
    for (vars, wrong) in [
        (&[][..], ("IRIS_DEADLINE", "soon")),
        (&network, ("IRIS_DEADLINE", "soon")),
        (&network, ("IRIS_SECRET_FILE", "/nowhere/at/all")),
        (&network, ("MASTER_ADDR", "tcp://127.0.0.1")),
        (&network, ("MASTER_ADDR", "fe80::1%none")),
    ] {
        let (job, port) = (Job::new("barrier"), master_port());
        let with = |rank, more: &[(&str, &str)]| {
            let all = [("RANK", rank), ("WORLD_SIZE", "3"), ("MASTER_PORT", &*port)];
            job.rank(&[&all[..], vars, more].concat())
        };
        let mut ranks = vec![with("1", &[]), with("2", &[])];
        for rank in ["1", "2"] {
            wait_for_rank(&job, rank, None);
        }
        ranks.push(with("0", &[wrong]));
        let texts: Vec<_> = ranks.into_iter().map(result).collect();
        all_contain(&texts, &["error", wrong.1]);
        all_contain(&texts[..2], &["rank 0 failed in meeting the other ranks"]);
        job.check_left();
    }
}

/// Tests that of two processes with one rank none waits for its deadline: rank 0 tells all of the
/// two, or meets one of them, and the other is told that a world met without it.
#[test]
fn a_rank_whose_place_another_process_takes_is_told() {
    for vars in [&[][..], &[("IRIS_NODE", "a"), ("MASTER_ADDR", "127.0.0.1")]] {
        let (job, port) = (Job::new("barrier"), master_port());
        let with = |rank| {
            let all = [("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_PORT", &*port)];
            job.rank(&[&all[..], vars].concat())
        };
        // Rank 0 starts when both wait: a twin that comes after the others have met is a rank of the
        // next job, and waits for its rank 0.
        let mut file = None;
        let twins = [0, 1].map(|_| {
            let twin = with("1");
            file = Some(wait_for_rank(&job, "1", file));
            twin
        });
        let zero = with("0");
        let told =
            twins.map(result).into_iter().filter(|text| text != "ok met").collect::<Vec<_>>();
        assert!(!told.is_empty(), "both have met");
        for text in told {
            let named = ["two processes have rank 1", "another process", "is lost"];
            assert!(named.iter().any(|name| text.contains(name)), "{text}");
        }
        result(zero);
        job.check_left();
    }
}

/// Tests that a later wait for the same rank is told of only if it is twice as long as the one told of
/// before. The first notice comes after a second.
#[test]
fn an_idle_server_tells_of_no_wait_that_is_usual() {
    let job = Job::new("idle");
    let texts = job.ranks(2, |_| vec![("IRIS_DEADLINE", "0.1".into())]);
    let [zero, one] = <[Child; 2]>::try_from(texts).unwrap().map(said);
    assert_eq!([zero.result(), one.result()], ["ok met"; 2]);
    let waited = |line: &str| -> Option<f64> {
        let (_, told) = line.split_once("waits for rank 0")?;
        told.rsplit_once("s of ")?.0.rsplit_once(' ')?.1.parse().ok()
    };
    let waits: Vec<f64> = one.err.lines().filter_map(waited).collect();
    assert!(!waits.is_empty(), "{}", one.err);
    // Times are shown with one digit after the point.
    assert!(waits.windows(2).all(|two| two[1] >= 1.8 * two[0]), "{waits:?}: {}", one.err);
}
