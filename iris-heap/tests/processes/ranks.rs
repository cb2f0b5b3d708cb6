//! Tests of the ranks of one host: worlds, heaps, and ranks that are wrong, late, lost or stopped.
//!
//! This file is long because each test has a case, which its ranks run.

#![allow(unsafe_code, reason = "reads through the addresses that the heap gave")]

use std::process::Child;
use std::sync::Arc;
use std::time::Duration;

use iris_heap::{Error, ErrorKind, Group, HeapOptions, SymmetricHeap, UniqueId, World, abi};
use iris_sync::FaultKind;
use iris_testkit::error_texts::fails;
use iris_testkit::harness::rows;
use rustix::process::{Signal, getpid, kill_process};

use crate::job::{
    Case, Job, all_contain, all_ok, all_say, contains, env, kill, launch_until_abort, no_vars,
    result, wait_for, wait_for_file,
};
use crate::rendezvous::barrier;

fn options() -> HeapOptions {
    HeapOptions::new().data_bytes(1 << 20).signal_bytes(1 << 16).threads(1)
}

pub(crate) const CASES: &[Case] = &[
    ("heap", heap),
    ("twice", twice),
    ("split", split),
    ("skip", skip),
    ("sites", sites),
    ("late", late),
    ("killed", || killed(2)),
    ("killed-rank-0", || killed(0)),
    ("killed-in-collective", killed_in_collective),
    ("unclosed", unclosed),
    ("open", open),
    ("sizes", sizes),
    ("import", import),
    ("unique-id", unique_id),
    ("many", many),
    ("stopped", stopped),
    ("adopted", adopted),
];

fn heap() -> Result<String, Error> {
    let w = World::from_env()?;
    assert_eq!((w.local_rank(), w.local_size(), w.node()), (w.rank(), w.size(), 0));
    assert_eq!(w.same_process(), w.size() == 1);
    let heap = SymmetricHeap::open(&w, options())?;
    let ids = w.allgather(&heap.id().to_le_bytes())?;
    assert!(ids.iter().all(|id| *id == ids[0]));
    for round in 0..20 {
        let x = heap.rand::<f32>(1000 + round, round as u64)?;
        let y = heap.full(10, w.rank() as i32)?;
        for rank in 0..w.size() {
            let want: Vec<f32> = (0..x.len())
                .map(|i| iris_heap::random_unit(round as u64, rank, i) as f32)
                .collect();
            assert_eq!(heap.read_from(x, rank)?, want);
            assert_eq!(heap.read_from(y, rank)?, [rank as i32; 10]);
        }
        heap.free(x)?;
        heap.free(y)?;
    }
    // Exchange of signals: each rank sets a word of the next rank, which waits for the word in a
    // kernel.
    let s = heap.alloc_signal(32)?;
    heap.write(s, &[0; 32])?;
    w.barrier()?;
    let next = heap.resolve(s, (w.rank() + 1) % w.size())? as usize;
    let mine = heap.resolve(s, w.rank())? as usize;
    let stream = heap.stream()?;
    let kernel = move |_: Group| {
        use std::sync::atomic::{AtomicI32, Ordering};
        // SAFETY: the address is a signal word of an open heap, which the stream keeps mapped.
        let word = |p: usize| unsafe { AtomicI32::from_ptr(p as *mut i32) };
        word(next).store(1, Ordering::Release);
        while word(mine).load(Ordering::Acquire) == 0 {
            std::thread::yield_now();
        }
        Ok(())
    };
    stream.launch_cpu("ring", 1, Arc::new(kernel))?;
    stream.sync()?;
    heap.close()?;
    w.close()?;
    Ok("heap".into())
}

fn twice() -> Result<String, Error> {
    for _ in 0..3 {
        barrier()?;
    }
    let (a, b) = (World::from_env()?, World::from_env()?);
    b.barrier()?;
    a.barrier()?;
    a.close()?;
    b.close()?;
    Ok("five worlds".into())
}

fn split() -> Result<String, Error> {
    let w = World::from_env()?;
    let color = [Some(1), Some(0), Some(1), None][w.rank()];
    if let Some(part) = w.split(color, -(w.rank() as i64))? {
        let all = part.allgather(&[w.rank() as u8])?.concat();
        assert_eq!(all, [vec![2, 0], vec![1], vec![2, 0]][w.rank()]);
        let again = part.split(Some(0), 0)?.expect("a color was given");
        assert_eq!(again.allgather(&[w.rank() as u8])?.concat(), all);
        let heap = SymmetricHeap::open(&again, options())?;
        let x = heap.full(4, w.rank() as i32)?;
        assert_eq!(heap.read_from(x, 0)?, [i32::from(all[0]); 4]);
        heap.close()?;
        again.close()?;
        part.close()?;
    }
    w.barrier()?;
    w.close()?;
    Ok("split".into())
}

fn skip() -> Result<String, Error> {
    let w = World::from_env()?;
    let gave_up = |rank: usize| format!("{}/{rank}", env("NOTES"));
    if w.rank() == 1 {
        // Rank 1 arrives only when the other ranks have given up.
        [0, 2].map(gave_up).iter().for_each(wait_for_file);
    }
    let met = w.barrier();
    std::fs::write(gave_up(w.rank()), "").unwrap();
    met.map(|()| "barrier".into())
}

fn sites() -> Result<String, Error> {
    let w = World::from_env()?;
    if w.rank() == 2 { w.allgather(b"x").map(drop) } else { w.barrier() }?;
    Ok("no difference".into())
}

fn late() -> Result<String, Error> {
    let w = World::from_env()?;
    if w.rank() == 1 {
        std::thread::sleep(Duration::from_millis(600));
    }
    let heap = SymmetricHeap::open(&w, options())?;
    heap.close()?;
    w.close()?;
    Ok("late".into())
}

/// Case in which rank `victim` dies while the others wait for it in a kernel.
fn killed(victim: usize) -> Result<String, Error> {
    let w = World::from_env()?;
    let part = w.split(Some(0), 0)?.expect("a color was given");
    let heap = SymmetricHeap::open(&w, options())?;
    let stream = heap.stream()?;
    w.barrier()?;
    if w.rank() == victim {
        std::process::abort();
    }
    launch_until_abort(&heap, &stream)?;
    let in_kernel = stream.sync().unwrap_err().to_string();
    assert_eq!(in_kernel, heap.check().unwrap_err().to_string());
    let in_collective = w.barrier().unwrap_err().to_string();
    assert_eq!(in_kernel, in_collective);
    assert_eq!(heap.check().unwrap_err().kind(), ErrorKind::PeerLost);
    assert_eq!(w.lost(), Some(victim));
    assert_eq!(wait_for("the loss in a group", || part.lost()), victim);
    assert_eq!(part.close().unwrap_err().kind(), ErrorKind::PeerLost);
    assert_eq!(heap.close().unwrap_err().to_string(), in_kernel);
    w.close().map(|()| "not lost".into())
}

fn killed_in_collective() -> Result<String, Error> {
    let w = World::from_env()?;
    w.barrier()?;
    if w.rank() == 1 {
        std::thread::sleep(Duration::from_millis(100));
        std::process::abort();
    }
    w.barrier().map(|()| "not lost".into())
}

fn unclosed() -> Result<String, Error> {
    let w = World::from_env()?;
    w.barrier()?;
    if w.rank() == 1 {
        return Ok("gone".into());
    }
    w.barrier().map(|()| "not lost".into())
}

fn open() -> Result<String, Error> {
    let w = World::from_env()?;
    let heap =
        SymmetricHeap::open(&w, options().device_words(env("DEVICE_WORDS").parse().unwrap_or(32)))?;
    heap.close()?;
    w.close()?;
    Ok("open".into())
}

fn sizes() -> Result<String, Error> {
    let w = World::from_env()?;
    let heap = SymmetricHeap::open(&w, options())?;
    let before = heap.free_bytes(iris_heap::Segment::Data);
    let e = heap.alloc::<f32>(10 + w.rank()).unwrap_err();
    assert_eq!(heap.free_bytes(iris_heap::Segment::Data), before);
    // The world must still be usable, because the failed calls changed nothing.
    let x = heap.alloc::<f32>(10)?;
    assert_eq!(x.offset(), 0);
    heap.close()?;
    w.close()?;
    Err(e)
}

fn import() -> Result<String, Error> {
    use rustix::fs::{MemfdFlags, SealFlags};
    let w = World::from_env()?;
    let heap = SymmetricHeap::open(&w, options())?;
    let mut own = [0f32; 4];
    // SAFETY: the import fails before the memory is accessed.
    fails(unsafe { heap.import(own.as_mut_ptr(), 4) }, &["import_descriptor"]);
    let fd = rustix::fs::memfd_create("iris-test", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, 4096).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    let copy = fd.try_clone().unwrap();
    let x = heap.import_descriptor::<i32>(fd, 100)?;
    heap.write(x, &[w.rank() as i32; 100])?;
    w.barrier()?;
    for rank in 0..w.size() {
        assert_eq!(heap.read_from(x, rank)?, [rank as i32; 100]);
    }
    let mut word = [0; 4];
    rustix::io::pread(&copy, &mut word, 0).unwrap();
    assert_eq!(i32::from_ne_bytes(word), w.rank() as i32);
    heap.free(x)?;
    let short = heap.import_descriptor::<i32>(copy, 100 + 2000 * w.rank().min(1)).unwrap_err();
    assert!(matches!(short, Error::Disagreement { .. }), "{short}");
    heap.close()?;
    w.close()?;
    Ok("import".into())
}

fn unique_id() -> Result<String, Error> {
    let rank = env("MY_RANK").parse().expect("a rank");
    let w = World::from_unique_id(&env("MY_ID").parse()?, rank, 2)?;
    assert_eq!(w.allgather(&[rank as u8])?.concat(), [0, 1]);
    w.close()?;
    Ok("met".into())
}

fn many() -> Result<String, Error> {
    let count = |folder: &str| std::fs::read_dir(folder).unwrap().count();
    let state = || (count("/proc/self/fd"), count("/proc/self/task"));
    let mut before = state();
    for round in 0..100 {
        if round == 2 {
            before = state();
        }
        let w = World::from_env()?;
        let heap = SymmetricHeap::open(&w, options().threads(2))?;
        let x = heap.ones::<f32>(10)?;
        assert_eq!(heap.read_from(x, 1 - w.rank())?, [1.0; 10]);
        let stream = heap.stream()?;
        stream.sync()?;
        heap.close()?;
        w.close()?;
    }
    // The counts are polled, for two reasons. A joined thread stays in the process's list of tasks
    // for a moment, now or when `before` was counted. The watcher thread of a heap is not joined,
    // and keeps the issue boards mapped until it ends.
    let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
    let mapped = || maps().contains("memfd:iris");
    let more = || state().0 > before.0 || state().1 > before.1 || mapped();
    (0..1000).take_while(|_| more()).for_each(|_| std::thread::sleep(Duration::from_millis(10)));
    assert!(!more(), "descriptors and threads: {before:?}, then {:?}; {}", state(), maps());
    Ok("many".into())
}

#[test]
fn a_heap_of_processes() {
    for size in [1, 2, 4] {
        all_ok("heap", size);
    }
}

rows! {
    several_worlds_of_one_process: all_ok("twice", 3);
    worlds_of_a_part: all_ok("split", 4);
    memory_of_the_caller: all_ok("import", 3);
    a_hundred_worlds_leave_nothing: all_ok("many", 2);
    a_late_rank_is_waited_for: all_ok("late", 3);
}

#[test]
fn two_jobs_at_once_do_not_meet() {
    let job = Job::new("barrier");
    let port = |p: &'static str| {
        move |_: usize| vec![("MASTER_ADDR", "localhost".into()), ("MASTER_PORT", p.to_string())]
    };
    let mut all = Vec::new();
    for _ in 0..5 {
        let a = job.ranks(3, port("29501"));
        let b = job.ranks(3, port("29502"));
        all.extend(a.into_iter().chain(b).map(result));
    }
    assert!(all.iter().all(|t| t == "ok met"), "{all:?}");
    assert!(job.results(vec![]).is_empty());
}

/// Tests that ranks meet whatever name of their host each is given, and that jobs stay apart which
/// have one port and different hosts of rank 0.
#[test]
fn names_of_one_host_are_one_meeting_place() {
    let job = Job::new("barrier");
    let port = || ("MASTER_PORT", "29505".to_string());
    let names = [None, Some("localhost"), Some("127.0.0.1"), Some("[::1]")];
    let vars = |rank: usize| {
        let name = names[rank].map(|name| ("MASTER_ADDR", name.to_string()));
        name.into_iter().chain([port()]).collect()
    };
    assert_eq!(job.results(job.ranks(4, vars)), ["ok met"; 4]);
    let master = |host: &'static str| move |_: usize| vec![("MASTER_ADDR", host.into()), port()];
    let ranks = ["192.0.2.1", "192.0.2.2"].map(|host| job.ranks(2, master(host)));
    assert_eq!(job.results(ranks.into_iter().flatten().collect()), ["ok met"; 4]);
    all_contain(
        job.results(job.ranks(2, master("tcp://192.0.2.1:29505"))),
        &["error", "expected", "MASTER_ADDR=192.0.2.1", "MASTER_PORT=29505"],
    );
}

#[test]
fn a_given_folder_is_the_meeting_place() {
    let job = Job::new("barrier");
    let folder = job.temp.path().join("here").to_str().unwrap().to_string();
    let ranks = job.ranks(2, |r| {
        vec![("IRIS_RENDEZVOUS", folder.clone()), ("MASTER_PORT", "1".into()), ("X", r.to_string())]
    });
    let all: Vec<_> = ranks.into_iter().map(result).collect();
    assert_eq!(all, ["ok met"; 2]);
    assert!(std::fs::read_dir(&folder).unwrap().next().is_none());
    let ranks = job.ranks(2, |_| vec![("IRIS_RENDEZVOUS", "here".into())]);
    all_contain(ranks.into_iter().map(result), &["IRIS_RENDEZVOUS=here", "an absolute path"]);
}

#[test]
fn a_unique_id_is_enough() {
    let job = Job::new("unique-id");
    let id = UniqueId::new().unwrap().to_string();
    let ranks = ["0", "1"].map(|r| job.rank(&[("MY_ID", &id), ("MY_RANK", r)]));
    assert_eq!(job.results(ranks.into()), ["ok met"; 2]);
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let job = Job::new("barrier");
    let with = |rank| [("RANK", rank), ("WORLD_SIZE", "4"), ("IRIS_DEADLINE", "0.005")];
    let ranks = ["0", "1", "3"].map(|rank| job.rank(&with(rank)));
    all_contain(job.results(ranks.into()), &["error", "rank 2", "waited"]);
    // Rank 1 must give up if rank 0 is absent and so no process listens.
    let job = Job::new("barrier");
    let vars = [("RANK", "1"), ("WORLD_SIZE", "2"), ("IRIS_DEADLINE", "0.0005")];
    let text = result(job.rank(&vars));
    contains(&text, &["error", "for rank 0"]);
}

#[test]
fn a_rank_that_skips_a_collective_is_named() {
    let job = Job::new("skip");
    let notes = tempfile::tempdir().unwrap();
    let notes = notes.path().to_str().unwrap();
    let vars = |_| vec![("NOTES", notes.to_string()), ("IRIS_DEADLINE", "0.01".into())];
    let texts = job.results(job.ranks(3, vars));
    all_contain([&texts[0], &texts[2]], &["error", "barrier at", "ranks.rs", "for rank 1"]);
    // A rank that arrives too late gets the reason for which the others gave up, so its barrier
    // must fail, too.
    contains(&texts[1], &["error"]);
}

rows! {
    different_calls_are_named: all_say(
        "sites",
        3,
        no_vars,
        &["error", "barrier at", "on rank 0 and 1", "allgather at", "on rank 2"],
    );
    different_sizes_are_named_and_change_nothing: all_say(
        "sizes",
        2,
        no_vars,
        &["error", "40 bytes", "44 bytes", "on rank 0", "ranks.rs"],
    );
    a_killed_rank_is_lost_to_waiting_kernels: {
        is_lost("killed", 4, (2, "signal"));
        is_lost("killed-rank-0", 3, (0, "signal"));
    };
    a_rank_killed_between_collectives_is_lost: {
        is_lost("killed-in-collective", 3, (1, "signal"));
        is_lost("unclosed", 3, (1, "ok gone"));
    };
}

/// Runs a case whose rank `victim` ends in this way, and checks that the others name it.
#[track_caller]
fn is_lost(case: &'static str, size: usize, (victim, end): (usize, &str)) {
    let job = Job::new(case);
    let mut texts = job.results(job.ranks(size, no_vars));
    contains(&texts.remove(victim), &[end]);
    all_contain(texts, &[&format!("error rank {victim} is lost")]);
}

#[test]
fn a_stale_socket_is_harmless() {
    let job = Job::new("barrier");
    let vars = [("MASTER_ADDR", "localhost"), ("MASTER_PORT", "29503"), ("WORLD_SIZE", "2")];
    let with = |rank: &'static str| {
        let mut all = vars.to_vec();
        all.push(("RANK", rank));
        job.rank(&all)
    };
    let mut dead = with("0");
    let socket = job.socket();
    kill(&mut dead);
    assert!(socket.exists(), "a killed process leaves its socket");
    // Rank 1 starts first and finds the socket of a dead process.
    let one = with("1");
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(job.results(vec![with("0"), one]), ["ok met"; 2]);
}

#[test]
fn wrong_ranks_and_sizes_are_named() {
    let job = Job::new("barrier");
    let port = ("MASTER_PORT", "29504");
    let sizes = ["3", "2"].into_iter().zip(["0", "1"]);
    let ranks = sizes.map(|(size, rank)| job.rank(&[("WORLD_SIZE", size), ("RANK", rank), port]));
    all_contain(
        job.results(ranks.collect()),
        &["error", "size of the world is 3 on rank 0, 2 on rank 1"],
    );
    let ranks = ["0", "1", "1"].map(|r| job.rank(&[("WORLD_SIZE", "3"), ("RANK", r), port]));
    all_contain(job.results(ranks.into()), &["error", "two processes have rank 1"]);
    let text = result(job.rank(&[("RANK", "2"), ("WORLD_SIZE", "2")]));
    contains(&text, &["error RANK=2", "from 0 to 1"]);
    // Two processes claim to be rank 0: the second one finds that the first listens, and the world
    // of the first never becomes complete.
    let factor = ("IRIS_DEADLINE", "0.005");
    let ranks = ["0", "0"].map(|r| job.rank(&[("WORLD_SIZE", "2"), ("RANK", r), port, factor]));
    let texts = job.results(ranks.into());
    assert!(texts.iter().any(|t| t.contains("another process listens")), "{texts:?}");
    assert!(texts.iter().any(|t| t.contains("for rank 1")), "{texts:?}");
}

#[test]
fn a_difference_at_open_is_named() {
    let words = |rank: usize| vec![("DEVICE_WORDS", ["32", "32", "64"][rank].into())];
    all_say("open", 3, words, &["error", "device_words is 32 on rank 0 and 1; 64 on rank 2"]);
    let factor = |rank: usize| vec![("IRIS_DEADLINE", ["3", "2"][rank].into())];
    all_say("open", 2, factor, &["error", "deadline factor is 3 on rank 0; 2 on rank 1"]);
    let one = |rank| match rank {
        1 => vec![("IRIS_DEADLINE", "1.0".into())],
        _ => vec![],
    };
    all_say("open", 2, one, &["error", "IRIS_DEADLINE is (not set) on rank 0; 1.0 on rank 1"]);
}

#[test]
fn a_limit_on_file_sizes_is_named() {
    // The limit on file sizes also applies to shared memory, and to the note of a world that could
    // not be formed.
    let limit = |_| vec![("FILE_LIMIT", "8".into())];
    all_say("open", 2, limit, &["error", "iris-", "4096, the limit on file sizes", "ulimit -f"]);
    let job = Job::new("open");
    let size = |rank| if rank == 0 { "2" } else { "3" };
    let ranks = job.ranks(2, |r| vec![("WORLD_SIZE", size(r).into()), ("FILE_LIMIT", "0".into())]);
    all_contain(
        ranks.into_iter().map(result),
        &["error", "the size of the world is 2 on rank 0, 3 on rank 1"],
    );
}

/// Program of a rank whose heap fails because the rank named by `STOPPED` has stopped.
fn stopped() -> Result<String, Error> {
    let w = World::from_env()?;
    let heap = SymmetricHeap::open(&w, options())?;
    let slice = heap.alloc::<f32>(1)?;
    w.barrier()?;
    if w.rank().to_string() == env("STOPPED") {
        kill_process(getpid(), Signal::STOP).unwrap();
        // Another thread may take the signal, so this one may run on for a moment.
        loop {
            std::thread::park();
        }
    }
    let (stream, control) = (heap.stream()?, heap.control().clone());
    let kernel = move |_: Group| {
        while control.host_abort() == 0 {
            std::thread::yield_now();
        }
        Ok(())
    };
    stream.launch_cpu("wait", 1, Arc::new(kernel))?;
    // Rank 2 leaves a fault as its kernels do; the other rank learns that rank 2 gave up.
    if w.rank() == 2 {
        let mut fault = [0; abi::FAULT_WORDS];
        fault[0] = FaultKind::NotEntered as i32;
        heap.control().record_fault(&fault);
        heap.poison(abi::abort::USER)?;
    }
    while heap.check().is_ok() {
        std::thread::yield_now();
    }
    // Collective steps return the heap's error, and do not change it.
    let steps = [heap.free(slice), heap.free_many(&[slice.raw()]), heap.alloc::<f32>(1).map(drop)];
    for step in steps {
        let [step, heap] = [step.unwrap_err(), heap.check().unwrap_err()];
        assert_eq!(std::mem::discriminant(&step), std::mem::discriminant(&heap), "{step}, {heap}");
    }
    heap.close()?;
    w.close()?;
    Ok("closed".into())
}

/// Tests that the collective steps of a heap that has failed, its close, and the close of its world
/// wait for no stopped rank.
#[test]
fn a_failed_heap_is_closed_while_a_rank_is_stopped() {
    for victim in [0, 1] {
        let job = Job::new("stopped");
        let vars = |_| vec![("STOPPED", victim.to_string()), ("IRIS_DEADLINE", "0.1".into())];
        let mut ranks = job.ranks(3, vars);
        let mut stopped = ranks.remove(victim);
        for (at, rank) in ranks.into_iter().enumerate() {
            assert_eq!(result(rank), "ok closed", "rank {victim} is stopped: survivor {at}");
        }
        // The stopped rank was of no help: it never gets further than its stop.
        wait_for("the stop", || is_stopped(&stopped).then_some(()));
        kill(&mut stopped);
    }
}

/// Whether a process is stopped by a signal.
fn is_stopped(process: &Child) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    status.lines().any(|line| line.starts_with("State:\tT"))
}

/// Case of a rank that meets the others only after the shell that started it has ended.
fn adopted() -> Result<String, Error> {
    std::fs::write(env("READY"), "").expect("room for a file");
    wait_for_file(env("GO"));
    barrier()
}

/// Tests that ranks started by hand, each by a shell that has ended, do not take the process that has
/// adopted them for the one that started the job.
#[test]
fn ranks_whose_shell_has_ended_need_a_port() {
    let run = |port: Option<&str>| {
        let job = Job::new("adopted");
        let note = |name: &str| job.temp.path().join(name).to_str().unwrap().to_owned();
        let (script, go, path) = (note("start.over"), note("go.over"), env("PATH"));
        let text = "\"$@\" & while ! [ -e \"$READY\" ]; do sleep 0.01; done";
        std::fs::write(&script, text).unwrap();
        let (wrapper, port) = (format!("/bin/sh {script}"), port.map(|port| ("MASTER_PORT", port)));
        let mut ranks = ["0", "1"].map(|rank| {
            let ready = note(&format!("{rank}.over"));
            let mut vars = vec![("RANK", rank), ("WORLD_SIZE", "2"), ("WRAPPER", &wrapper)];
            vars.extend([("PATH", path.as_str()), ("READY", &ready), ("GO", &go)]);
            vars.extend(port);
            job.rank(&vars)
        });
        for shell in &mut ranks {
            assert!(shell.wait().unwrap().success());
        }
        std::fs::write(&go, "").unwrap();
        ranks.map(result)
    };
    all_contain(run(None), &["error MASTER_PORT=(not set)", "has ended"]);
    for text in run(Some("29519")) {
        assert!(text.starts_with("ok "), "{text}");
    }
}
