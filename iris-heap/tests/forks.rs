//! Tests of a rank that forks without exec: the parent stays the rank, and the child can disturb no
//! rank.
//!
//! This test program starts itself once per rank.

#![allow(unsafe_code, reason = "forks, and sets variables in a child that has one thread")]

mod job;

use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::{Arc, mpsc};

use iris_heap::abi::abort;
use iris_heap::{Error, HeapOptions, SymmetricHeap, World};
use iris_testkit::free_port;
use job::{Job, contains, env, files, no_vars, result, wait_for, wait_for_file};
use rustix::process::{Pid, WaitOptions, waitpid};

unsafe extern "C" {
    /// POSIX fork: returns 0 in the child, which has only the calling thread.
    safe fn fork() -> i32;
}

/// Program of one rank, started by the tests below.
#[test]
#[ignore = "the program of one rank, which the other tests start"]
fn rank_program() {
    job::run(&[("meeting", meeting), ("outlived", outlived), ("used", used), ("forked", forked)]);
}

fn open(world: &World) -> Result<Arc<SymmetricHeap>, Error> {
    SymmetricHeap::open(
        world,
        HeapOptions::new().data_bytes(1 << 16).signal_bytes(1 << 16).threads(2),
    )
}

/// Case in which rank `VICTIM` dies, but its forked child lives on until the file `GO` exists.
fn outlived() -> Result<String, Error> {
    let world = World::from_env()?;
    let _heap = open(&world)?;
    world.barrier()?;
    if is_victim() {
        die_before_a_child();
    }
    world.barrier().map(|()| "not lost".into())
}

/// Case in which rank `VICTIM` dies while it meets the others, after the file `NOW` exists, but its
/// forked child lives on.
fn meeting() -> Result<String, Error> {
    if is_victim() {
        std::thread::spawn(World::from_env);
        wait_for_file(env("NOW"));
        die_before_a_child();
    }
    World::from_env().map(|_| "not lost".into())
}

fn is_victim() -> bool {
    env("VICTIM") == env("RANK")
}

/// Forks, and ends this process while the child lives on until the file `GO` exists.
fn die_before_a_child() -> ! {
    let forked = format!("{}.forked", env("GO"));
    if fork() == 0 {
        std::fs::write(forked, "").unwrap();
        wait_for_file(env("GO"));
        std::process::exit(0);
    }
    wait_for_file(forked);
    std::process::abort()
}

/// Case in which the forked child of each rank uses and drops the objects that it inherited; the
/// ranks continue.
fn used() -> Result<String, Error> {
    let world = World::from_env()?;
    let heap = open(&world)?;
    let (stream, slice) = (heap.stream()?, heap.alloc::<f32>(4)?);
    stream.sync()?;
    // Work that has not ended: a child that waited for it would wait for ever, because it has no
    // thread that does the work.
    let (go, held) = mpsc::channel::<()>();
    let busy = heap.stream()?;
    busy.call_cpu("held", move || {
        let _ = held.recv();
        Ok(())
    })?;
    let event = busy.record()?;
    drop(busy);
    let child = fork();
    if child == 0 {
        let is_told = |outcome: &Result<(), Error>| matches!(outcome, Err(Error::Unsupported { why, .. }) if why.contains("forked"));
        let uses: [&dyn Fn() -> Result<(), Error>; 11] = [
            &|| world.barrier(),
            &|| world.close(),
            &|| heap.close(),
            &|| heap.poison(abort::INCOMPLETE),
            &|| heap.write(slice, &[0.0; 4]),
            &|| heap.alloc_device_words(1).map(drop),
            &|| heap.launch_graph(|| ()),
            &|| heap.free(slice),
            &|| heap.finish(),
            &|| stream.sync(),
            &|| event.sync(),
        ];
        let wrong = uses.iter().position(|apply| !is_told(&apply()));
        world.abort();
        drop((stream, heap, world));
        std::process::exit(wrong.map_or(0, |index| index as i32 + 1));
    }
    let child = Pid::from_raw(child).expect("a child");
    let (_, status) = wait_for("its end", || waitpid(Some(child), WaitOptions::NOHANG).unwrap());
    let status = status.exit_status();
    assert_eq!(status, Some(0), "number of the use, from 1, that the child was not refused");
    drop(go);
    let all = heap.full(4, world.rank() as i32)?;
    for rank in 0..world.size() {
        assert_eq!(heap.read_from(all, rank)?, [rank as i32; 4]);
    }
    stream.sync()?;
    heap.close()?;
    world.close()?;
    Ok("used".into())
}

/// Case in which the ranks are forked children of this process, which nothing but their parent names.
fn forked() -> Result<String, Error> {
    let children = [0, 1].map(|rank: usize| {
        let child = fork();
        if child == 0 {
            let vars = [("RANK", rank.to_string()), ("WORLD_SIZE", "2".into())];
            // SAFETY: the child has no other thread.
            vars.iter().for_each(|(name, value)| unsafe { std::env::set_var(name, value) });
            let met = World::from_env().and_then(|world| {
                world.barrier()?;
                world.close()
            });
            if let Err(error) = &met {
                eprintln!("{error}");
            }
            std::process::exit(i32::from(met.is_err()));
        }
        Pid::from_raw(child).expect("a child")
    });
    for child in children {
        let (_, status) =
            wait_for("its end", || waitpid(Some(child), WaitOptions::NOHANG).unwrap());
        assert_eq!(status.exit_status(), Some(0));
    }
    Ok("forked".into())
}

#[test]
fn forked_ranks_are_a_job_of_their_parent() {
    let job = Job::new("forked");
    assert_eq!(job.results(vec![job.rank(&[])]), ["ok forked"]);
}

/// Starts rank `rank` of 3 of a case with this victim; with `port`, each rank is on another node.
fn start(job: &Job, rank: usize, victim: usize, port: Option<u16>) -> Child {
    let file = |name: &str| job.temp.path().join(name).display().to_string();
    let (rank, port) = (rank.to_string(), port.map(|port| port.to_string()));
    let (victim, now, go) = (victim.to_string(), file("now"), file("go"));
    let mut vars = vec![
        ("RANK", rank.as_str()),
        ("WORLD_SIZE", "3"),
        ("VICTIM", &victim),
        ("NOW", &now),
        ("GO", &go),
        ("IRIS_DEADLINE", "0.1"),
    ];
    if let Some(port) = &port {
        vars.extend([("IRIS_NODE", rank.as_str()), ("IRIS_PORT", port)]);
        vars.push(("MASTER_ADDR", "127.0.0.1"));
    }
    job.rank(&vars)
}

/// Waits until `count` files in the job's folder have this extension, or none.
fn wait_for_files(job: &Job, count: usize, extension: Option<&str>) {
    let is = |file: &std::path::PathBuf| file.extension().and_then(|it| it.to_str()) == extension;
    let found = || files(job.temp.path()).into_iter().filter(is).count();
    wait_for("files of ranks", || (found() == count).then_some(()));
}

/// Ends the child of the victim, and checks the victim's own end. The child holds its parent's
/// stdout open.
fn end(job: &Job, victim: Child) {
    std::fs::write(job.temp.path().join("go"), "").unwrap();
    contains(&result(victim), &["signal"]);
}

fn check_lost(victim: usize, rank: usize, child: Child) {
    let text = result(child);
    let is_told = text.starts_with(&format!("error rank {victim} ")) && text.contains(" is lost");
    assert!(is_told, "rank {rank}: {text}");
}

#[test]
fn a_rank_that_its_child_outlives_is_lost() {
    let tcp = || Some(free_port::on("127.0.0.1").unwrap());
    for (victim, port) in [(0, None), (1, None), (0, tcp()), (1, tcp())] {
        let job = Job::new("outlived");
        let ranks = [0, 1, 2].map(|rank| (rank, start(&job, rank, victim, port)));
        let (dead, others): (Vec<_>, Vec<_>) =
            ranks.into_iter().partition(|(rank, _)| *rank == victim);
        others.into_iter().for_each(|(rank, child)| check_lost(victim, rank, child));
        dead.into_iter().for_each(|(_, child)| end(&job, child));
    }
}

#[test]
fn a_rank_that_its_child_outlives_holds_no_file_while_it_meets() {
    let job = Job::new("meeting");
    // Rank 0 is yet to come, so only their files tell the others of each other.
    let other = start(&job, 1, 2, None);
    wait_for_files(&job, 1, Some("rank1"));
    let victim = start(&job, 2, 2, None);
    wait_for_files(&job, 1, Some("rank2"));
    std::fs::write(job.temp.path().join("now"), "").unwrap();
    check_lost(2, 1, other);
    end(&job, victim);
}

#[test]
fn a_rank_that_its_child_outlives_does_not_listen_while_it_meets() {
    let job = Job::new("meeting");
    let mut victim = start(&job, 0, 0, None);
    let socket = job.socket();
    std::fs::write(job.temp.path().join("now"), "").unwrap();
    victim.wait().unwrap();
    let refused = UnixStream::connect(&socket).expect_err("nobody listens");
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    end(&job, victim);
}

#[test]
fn a_rank_that_its_child_outlives_is_lost_while_nodes_meet() {
    let (job, port) = (Job::new("meeting"), free_port::on("127.0.0.1").unwrap());
    // Rank 2 is yet to come.
    let [victim, other] = [0, 1].map(|rank| start(&job, rank, 0, Some(port)));
    // Rank 1 listens for the ranks of its node once it has reached rank 0.
    wait_for_files(&job, 2, None);
    std::fs::write(job.temp.path().join("now"), "").unwrap();
    check_lost(0, 1, other);
    end(&job, victim);
}

#[test]
fn a_child_that_uses_what_it_inherited_disturbs_nobody() {
    let job = Job::new("used");
    for text in job.results(job.ranks(3, no_vars)) {
        assert_eq!(text, "ok used");
    }
}
