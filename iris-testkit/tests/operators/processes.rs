//! Tests of ops whose ranks are processes: the cases of the other tests, and ranks that are late,
//! skip calls or die.
//!
//! The test program starts itself as the ranks: [`rank_program`] does nothing in other processes.

#![cfg(target_os = "linux")]

use std::io;
use std::time::{Duration, Instant};

use iris_heap::{ErrorKind, HeapOptions, SymmetricHeap, UniqueId, World};
use iris_ops::TileShape;
use iris_testkit::Level;
use iris_testkit::launch::{End, Options as Launch, Outcome, kill_myself, launch};
use iris_testkit::suite::{Case, Input, Op, Options, run_case};
use rustix::process::{Pid, Signal, getpid, kill_process};

use crate::common::ready::{Ready, all_cases, kind_of};
use crate::common::{taken, without_places};

/// Environment variable that tells the rank program its role.
const PART: &str = "RANK_PROGRAM";

fn start(part: &str, ranks: usize) -> Outcome {
    start_with(part, ranks, |options| options)
}

fn start_with(part: &str, ranks: usize, with: impl FnOnce(Launch) -> Launch) -> Outcome {
    let program = std::env::current_exe().expect("this program has a path");
    // The grace period is long, because on a busy machine even an error takes time to be reported.
    let options = Launch::default().env(PART, part).grace(Duration::from_secs(120));
    let options = options.deadline(Duration::from_secs(500)).stdout(io::sink());
    let arguments = ["--exact", "processes::rank_program", "--nocapture", "--test-threads=1"];
    launch(&program, &arguments, ranks, with(options)).expect("the job did not start")
}

#[test]
fn rank_program() {
    let Ok(part) = std::env::var(PART) else { return };
    if part == format!("early-{}", std::env::var("RANK").unwrap_or_default()) {
        kill_myself();
    }
    let world = World::from_env().unwrap();
    let result = match part.as_str() {
        "cases" => cases(&world),
        "skip" => skip(&world),
        "die" => die(&world),
        "late" => late(&world),
        "order" => order(&world),
        "stopped" => stopped(&world),
        early if early.starts_with("early-") => Ok(()),
        other => panic!("part {other}"),
    };
    result.unwrap_or_else(|e| panic!("{e:?}"));
    world.close().unwrap();
}

fn cases(world: &World) -> anyhow::Result<()> {
    let heap = SymmetricHeap::open(world, HeapOptions::new().threads(2))?;
    for (index, (m, n, k)) in [(33, 65, 17), (2, 5, 9), (107, 96, 48)].into_iter().enumerate() {
        let options = Options::new(m, n, k).tile(TileShape { m: 8, n: 32 }).columns_per_flag(16);
        for mut case in Case::each(&options) {
            case.input = [Input::Integers, Input::Reals][index % 2];
            (case.bias, case.burst) = (true, index == 2);
            if taken(&case, world.size()) {
                run_case(&heap, &case)?;
            }
        }
    }
    Ok(heap.close()?)
}

#[test]
fn cases_with_ranks_as_processes() {
    let sizes: &[usize] = if Level::from_env() <= Level::Quick { &[3] } else { &[1, 2, 3, 4, 8] };
    for &ranks in sizes {
        let outcome = start("cases", ranks);
        assert!(outcome.ok(), "{}", outcome.report());
    }
}

/// Program in which rank 1 skips a call: the other ranks name rank 1 within the deadline.
fn skip(world: &World) -> anyhow::Result<()> {
    let mut ready = Ready::new(world, &a_case())?;
    ready.call_unless(world, 1)?;
    if world.rank() != 1 {
        let error = ready.sync().unwrap_err();
        let text = error.to_string();
        let kind = if text.contains("gave up") { ErrorKind::Fault } else { ErrorKind::Timeout };
        assert_eq!(error.kind(), kind, "{error}");
        let named = text.contains("rank 1 has not entered") || text.contains("rank 1 gave up");
        assert!(named && text.contains("matmul_all_reduce") && text.contains("call 2"), "{text}");
        println!("named: {text}");
    }
    Ok(ready.heap.close()?)
}

fn a_case() -> Case {
    Case::new(Op::MatmulAllReduce, "two_shot", Options::new(8, 6, 9))
}

#[test]
fn a_process_that_skips_a_call_is_named() {
    let outcome = start("skip", 3);
    let named = outcome.ranks.iter().filter(|rank| rank.stdout.contains("has not entered"));
    assert!(named.count() > 0, "{}", outcome.report());
    let ends = outcome.ranks.iter().map(|rank| rank.end);
    assert!(ends.clone().all(|end| end == End::Exited(0)), "{}", outcome.report());
}

/// Program in which rank 1 issues the operators of its heap in another order than the other ranks.
fn order(world: &World) -> anyhow::Result<()> {
    let heap = SymmetricHeap::open(world, HeapOptions::new().threads(1))?;
    let options = Options::new(8, 6, 0);
    let ready = |op| Ready::on(heap.clone(), &Case::new(op, "auto", options.clone()));
    let mut operators = [ready(Op::AllReduce)?, ready(Op::AllGather)?];
    operators.rotate_left(usize::from(world.rank() == 1));
    let error = operators.iter_mut().find_map(|it| it.call().err().map(anyhow::Error::from));
    let error =
        error.map_or_else(|| operators[0].sync().unwrap_err().to_string(), |e| e.to_string());
    let expected = "call 1 of the heap is all_reduce (operator 0) on rank 0 and 2; all_gather (operator 1) on rank 1";
    assert!(without_places(&error).contains(expected), "{error}");
    // Exits without closing the heap: the checks are done, and closing would wait for the other
    // ranks.
    std::process::exit(0);
}

#[test]
fn processes_in_another_order_are_all_told() {
    let outcome = start("order", 3);
    assert!(outcome.ok(), "{}", outcome.report());
}

/// Program in which rank 2 is killed in the middle of a call: the other ranks learn of its death
/// long before any deadline.
fn die(world: &World) -> anyhow::Result<()> {
    let mut ready = Ready::new(world, &a_case())?;
    ready.call_and_sync()?;
    if world.rank() == 2 {
        // After this sleep, some of the other ranks wait for this rank.
        std::thread::sleep(Duration::from_millis(300));
        kill_myself();
    }
    let begun = Instant::now();
    let deadline = world.settings().entry_deadline();
    let error = ready.call_and_sync().unwrap_err();
    assert!(begun.elapsed() < deadline, "{error}: after {:?}", begun.elapsed());
    let right = kind_of(&error) == Some(ErrorKind::PeerLost);
    assert!(right || error.to_string().contains("gave up"), "{error:?}");
    println!("heard: {error}");
    // Exits without closing the heap: the checks are done, and closing would wait for the other
    // ranks.
    std::process::exit(0);
}

#[test]
fn a_process_that_is_killed_is_named_at_once() {
    let outcome = start("die", 3);
    let ends: Vec<_> = outcome.ranks.iter().map(|rank| rank.end).collect();
    assert_eq!(ends[..2], [End::Exited(0); 2], "{}", outcome.report());
    assert!(matches!(ends[2], End::Signalled(9)), "{}", outcome.report());
    let heard = outcome.ranks[..2].iter().filter(|rank| rank.stdout.contains("rank 2 is lost"));
    assert!(heard.count() > 0, "{}", outcome.report());
}

/// Tests a rank that dies before it has connected to rank 0, so that only the launcher knows of its
/// end.
#[test]
fn a_process_that_dies_before_it_meets_the_others_is_named_at_once() {
    for victim in [0, 2] {
        let outcome = start(&format!("early-{victim}"), 4);
        let lost = format!("PeerLost {{ rank: {victim} }}");
        for (rank, it) in outcome.ranks.iter().enumerate().filter(|it| it.0 != victim) {
            // Exit code 101 means a panic: the rank ended by itself and was not killed by the
            // launcher.
            assert_eq!(it.end, End::Exited(101), "rank {rank}: {}", outcome.report());
            assert!(it.stderr.contains(&lost), "rank {rank}: {}", outcome.report());
        }
        assert_eq!(outcome.first_failure(), Some(victim), "{}", outcome.report());
        assert_eq!(outcome.exit_code(), 128 + 9);
    }
}

/// Environment variable with the id of the world that the remaining ranks make.
const NEXT: &str = "NEXT_WORLD";

// The guide has this function.
fn leave_and_meet(
    (world, heap): (&World, &SymmetricHeap),
    error: &dyn std::fmt::Display,
    (id, rank, size): (&UniqueId, usize, usize),
) -> iris_heap::Result<World> {
    world.abort_with(error); // the other ranks leave their calls at once, and show the error
    let _ = heap.close(); // waits for this rank's streams, and for no rank
    World::from_unique_id(id, rank, size)
}
// End of the function.

/// Program in which rank 1 is stopped before the second call. The other ranks get the fault of that
/// call, leave as the guide says, and make their next calls in a world of two, while rank 1 is still
/// stopped.
fn stopped(world: &World) -> anyhow::Result<()> {
    let pids = world.allgather(&std::process::id().to_le_bytes())?;
    let mut ready = Ready::new(world, &a_case())?;
    ready.call_and_sync()?;
    if world.rank() == 1 {
        kill_process(getpid(), Signal::STOP)?;
        // Another thread may take the signal, so this one may run on for a moment.
        loop {
            std::thread::park();
        }
    }
    let called = ready.call();
    ready.pass_until_a_fault();
    let error = called.err().map(anyhow::Error::from);
    let error = error.unwrap_or_else(|| ready.sync().unwrap_err().into());
    let id: UniqueId = std::env::var(NEXT)?.parse()?;
    let left = leave_and_meet((world, &ready.heap), &error, (&id, world.rank() / 2, 2))?;
    let mut next = Ready::new(&left, &a_case())?;
    next.call_and_sync()?;
    next.heap.close()?;
    let stopped = world.process(1).expect("the ranks are processes");
    while !stopped.is_stopped() {
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("left: {error:#}");
    left.barrier()?;
    if left.rank() == 0 {
        let pid = i32::from_le_bytes(pids[1][..].try_into()?);
        kill_process(Pid::from_raw(pid).expect("a process"), Signal::KILL)?;
    }
    left.close()?;
    // Exits without closing the first world, which has ended.
    std::process::exit(0);
}

#[test]
fn ranks_that_are_left_leave_a_stopped_one_and_go_on() {
    let id = UniqueId::new().unwrap();
    let outcome = start_with("stopped", 3, |options| options.env(NEXT, id.to_string()));
    let ends: Vec<_> = outcome.ranks.iter().map(|rank| rank.end).collect();
    assert_eq!(ends, [End::Exited(0), End::Signalled(9), End::Exited(0)], "{}", outcome.report());
    let named = |rank: usize| outcome.ranks[rank].stdout.contains("rank 1 has not entered");
    assert!(named(0) || named(2), "{}", outcome.report());
}

/// Tests that the function of the guide is the one that the test above calls.
#[test]
fn the_guide_has_the_function_for_a_stopped_rank() {
    let (_, rest) =
        include_str!("processes.rs").split_once("// The guide has this function.\n").unwrap();
    let (function, _) = rest.split_once("// End of the function.").unwrap();
    assert!(include_str!("../../../iris-ops/GUIDE.md").contains(function), "{function}");
}

/// Program in which rank 1 enters the call after the progress deadline, but before the entry
/// deadline: the other ranks wait for it.
fn late(world: &World) -> anyhow::Result<()> {
    let heap = SymmetricHeap::open(world, HeapOptions::new().threads(1))?;
    for case in all_cases() {
        Ready::on(heap.clone(), &case)?.call_late(world, 1)?;
    }
    Ok(heap.close()?)
}

#[test]
fn a_process_that_is_late_is_waited_for() {
    let outcome = start("late", 3);
    assert!(outcome.ok(), "{}", outcome.report());
}
