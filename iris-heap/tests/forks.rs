//! Tests of a rank that forks without exec: the parent stays the rank, and the child can disturb no
//! rank.
//!
//! This test program starts itself once per rank.

#![allow(unsafe_code, reason = "forks, and sets variables in a child that has one thread")]

mod job;

use std::sync::{Arc, mpsc};

use iris_heap::abi::abort;
use iris_heap::{Error, HeapOptions, SymmetricHeap, World};
use job::{CASE, Job, contains, env, no_vars, report, result, wait_for, wait_for_file};
use rustix::process::{Pid, WaitOptions, waitpid};

unsafe extern "C" {
    /// POSIX fork: returns 0 in the child, which has only the calling thread.
    safe fn fork() -> i32;
}

/// Program of one rank, started by the tests below.
#[test]
#[ignore = "the program of one rank, which the other tests start"]
fn rank_program() {
    let case = std::env::var(CASE).expect("the other tests say what to do");
    report(match case.as_str() {
        "outlived" => outlived(),
        "used" => used(),
        "forked" => forked(),
        other => panic!("no case {other}"),
    });
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
    if env("VICTIM") == world.rank().to_string() {
        if fork() == 0 {
            wait_for_file(env("GO"));
            std::process::exit(0);
        }
        std::process::abort();
    }
    world.barrier().map(|()| "not lost".into())
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

#[test]
fn a_rank_that_its_child_outlives_is_lost() {
    for victim in [0, 1] {
        let job = Job::new("outlived");
        let go = job.temp.path().join("go");
        let go_text = go.to_str().unwrap().to_string();
        let ranks = job.ranks(3, |_| vec![("VICTIM", victim.to_string()), ("GO", go_text.clone())]);
        let mut ranks: Vec<_> = ranks.into_iter().enumerate().collect();
        let (_, dead) = ranks.remove(victim);
        for (rank, child) in ranks {
            let text = result(child);
            assert!(text.contains(&format!("error rank {victim} is lost")), "rank {rank}: {text}");
        }
        // The child must end before the rank's result is read, because it holds its parent's stdout
        // open.
        std::fs::write(&go, "").unwrap();
        contains(&result(dead), &["signal"]);
    }
}

#[test]
fn a_child_that_uses_what_it_inherited_disturbs_nobody() {
    let job = Job::new("used");
    for text in job.results(job.ranks(3, no_vars)) {
        assert_eq!(text, "ok used");
    }
}
