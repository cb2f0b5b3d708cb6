//! Tests of ranks that issue the operators of a heap in different orders, leave out a call or
//! disagree on a plan. They check the error that the program gets, and the lines that its user sees
//! during the wait.
//!
//! If a test reads stderr, the test program starts itself: [`program`] does nothing unless a test
//! has started it.

#![cfg(target_os = "linux")]

use std::io::Read;
use std::iter;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use iris_heap::{DType, HeapOptions, SymmetricHeap, World};
use iris_ops::{AllReduce, HeapReserve, Plan, Topology};
use iris_testkit::error_texts::fails;
use iris_testkit::suite::{Case, Op, Options, plan};
use iris_testkit::worlds::on_threads;

use crate::common::ready::{Ready, operands};
use crate::common::without_places;

/// Number of runs of each program: a single run may name the right rank by chance.
const RUNS: usize = 10;

/// Errors of [`RUNS`] runs of `f` in worlds of `size` threads, all at the same time.
fn errors(size: usize, f: impl Fn(World) -> anyhow::Result<()> + Sync) -> Vec<String> {
    let run = || World::run_threads(size, &f).unwrap_err().to_string();
    on_threads(0..RUNS, |_| run())
}

/// Makes operators 0, 1 and 2 of a heap. Operator 0 is a broadcast, whose root, rank 0, waits for
/// no other rank.
fn operators(world: &World) -> anyhow::Result<[Ready; 3]> {
    let heap = SymmetricHeap::open(world, HeapOptions::new().threads(1))?;
    let options = Options::new(8, 6, 0);
    let ready = |(op, variant): (Op, &str)| {
        Ready::on(heap.clone(), &Case::new(op, variant, options.clone()))
    };
    Ok([
        ready((Op::Broadcast, "push"))?,
        ready((Op::AllReduce, "one_shot"))?,
        ready((Op::AllGather, "push"))?,
    ])
}

/// Issues one call for each operator number in `order`; waits for each call if `synced`, otherwise
/// only for the last one.
fn issue(world: &World, order: &[usize], synced: bool) -> anyhow::Result<()> {
    let mut operators = operators(world)?;
    for (index, &operator) in order.iter().enumerate() {
        operators[operator].call()?;
        if synced || index + 1 == order.len() {
            operators[operator].sync()?;
        }
    }
    operators[0].heap.close()?;
    Ok(())
}

/// Tests that the error is the same in all runs: it names the first differing call and the operator
/// that each rank issues.
#[test]
fn another_order_is_the_error_of_every_run() {
    let programs: [(&[&[usize]], &str); 4] = [
        (
            &[&[1, 2], &[2, 1]],
            "call 1 of the heap is all_reduce (operator 1) on rank 0; all_gather (operator 2) on rank 1",
        ),
        (
            &[&[0, 1, 2], &[0, 2, 1]],
            "call 2 of the heap is all_reduce (operator 1) on rank 0; all_gather (operator 2) on rank 1",
        ),
        // Program in which rank 1 leaves out the first call.
        (
            &[&[0, 1, 2, 0], &[1, 2, 0]],
            "call 1 of the heap is broadcast (operator 0) on rank 0; all_reduce (operator 1) on rank 1",
        ),
        (
            &[&[1, 2, 0], &[1, 0, 2], &[1, 2, 0]],
            "call 2 of the heap is all_gather (operator 2) on rank 0 and 2; broadcast (operator 0) on rank 1",
        ),
    ];
    let runs = programs.into_iter().flat_map(|program| [(program, false), (program, true)]);
    on_threads(runs, |((orders, expected), synced)| {
        let run = |world: World| issue(&world, orders[world.rank()], synced);
        let all = errors(orders.len(), run);
        let right = |error: &String| {
            without_places(error).contains(expected) && error.contains("same order")
        };
        assert!(all.iter().all(right), "expected {expected}: {all:#?}");
    });
}

/// Tests a call that rank 1 can no longer issue, because it closes the heap or frees the operator.
/// That call is the error of all runs, long before the entry deadline.
#[test]
fn a_call_left_out_before_a_close_or_a_free_is_the_error_of_every_run() {
    let closing: fn(World) -> anyhow::Result<()> = |world| {
        let orders: [&[usize]; 3] = [&[0, 1, 2], &[0, 1], &[0, 1, 2]];
        issue(&world, orders[world.rank()], true)
    };
    let closing_unsynced: fn(World) -> anyhow::Result<()> = |world| {
        let mut operators = operators(&world)?;
        operators[1].call()?;
        if world.rank() != 1 {
            operators[2].call()?;
        }
        operators[0].heap.close()?;
        Ok(())
    };
    let freeing: fn(World) -> anyhow::Result<()> = |world| {
        let [_, mut sum, _] = operators(&world)?;
        for _ in 0..if world.rank() == 1 { 1 } else { 2 } {
            sum.call_and_sync()?;
        }
        Ok(sum.op.free()?)
    };
    let programs = [
        (
            closing,
            "call 3 of the heap is all_gather (operator 2) on rank 0 and 2; left out (close heap at ",
        ),
        (
            closing_unsynced,
            "call 2 of the heap is all_gather (operator 2) on rank 0 and 2; left out (close heap at ",
        ),
        (
            freeing,
            "call 2 of the heap is all_reduce (operator 1) on rank 0 and 2; left out (free at ",
        ),
    ];
    on_threads(programs, |(program, expected)| {
        let all = errors(3, program);
        let right = |error: &String| without_places(error).contains(expected);
        assert!(all.iter().all(right), "expected {expected}: {all:#?}");
    });
}

/// Tests that all ranks get the error about a call that was left out, or issued by one rank only, at
/// the latest from `close`: the rank that is wrong waits for nobody.
#[test]
fn a_call_left_out_is_an_error_of_every_rank() {
    // Numbers of calls of each rank. No rank waits in the broadcast, whose root is rank 0.
    for (operator, calls) in [(1, [2, 1, 2]), (1, [1, 2, 1]), (0, [2, 1, 1])] {
        let run = |world: World| -> anyhow::Result<String> {
            let mut operators = operators(&world)?;
            for _ in 0..calls[world.rank()] {
                operators[operator].call()?;
            }
            let error = operators[0].heap.close().unwrap_err().to_string();
            world.close()?;
            Ok(error)
        };
        let all = World::run_threads(3, run).unwrap();
        let named = |error: &String| error.contains("call 2 of the heap is ");
        assert!(all.iter().all(named), "{calls:?}: {all:#?}");
    }
}

/// Tests that ranks may multiply different numbers of times, such as one expert's rows more than
/// another's, because a local product involves no other rank.
#[test]
fn local_products_are_not_part_of_the_order() {
    let run = |world: World| -> anyhow::Result<()> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
        let ready = |op, variant: &str| {
            Ready::on(heap.clone(), &Case::new(op, variant, Options::new(8, 6, 9)))
        };
        let mut expert = ready(Op::Matmul, "local")?;
        let mut sum = ready(Op::AllReduce, "one_shot")?;
        for _ in 0..2 {
            for _ in 0..world.rank() {
                expert.call()?;
            }
            sum.call_and_sync()?;
        }
        expert.sync()?;
        expert.op.free()?;
        heap.close()?;
        Ok(())
    };
    World::run_threads(3, run).unwrap();
}

/// Tests that all runs return the error of the rank that found the difference. Other ranks learn of
/// the difference from that rank; their errors must not be returned.
#[test]
fn a_difference_is_the_error_of_every_run() {
    let run = |world: World| -> anyhow::Result<()> {
        let case = Case::new(Op::AllReduce, "two_shot", Options::new(8, 6, 0));
        let mut ready = Ready::new(&world, &case)?;
        let m = if world.rank() == 0 { 5 } else { 8 };
        let slices = [ready.heap.rand::<f32>(4096, 3)?, ready.heap.rand(4096, 4)?, ready.c];
        ready.operands = operands(&case, Topology::from(&world), slices, m);
        ready.call_and_sync()?;
        Ok(())
    };
    let all = errors(3, run);
    assert!(all.iter().all(|error| error.contains("entered with M")), "{all:#?}");
}

/// Tests that the program returns a rank's own error. The other ranks learn of that error at once
/// and may fail earlier; their errors must not be returned.
#[test]
fn an_error_of_the_program_is_returned() {
    let failed = AtomicUsize::new(0);
    let run = |world: World| -> anyhow::Result<()> {
        let case = Case::new(Op::AllReduce, "two_shot", Options::new(8, 6, 0));
        let mut ready = Ready::new(&world, &case)?;
        if world.rank() == 1 {
            world.abort();
            while failed.load(Ordering::Relaxed) < 2 {
                thread::yield_now();
            }
            anyhow::bail!("out of paper");
        }
        let told = ready.call().map_err(anyhow::Error::from).and_then(|()| Ok(ready.sync()?));
        failed.fetch_add(1, Ordering::Relaxed);
        told
    };
    let error = World::run_threads(3, run).unwrap_err();
    assert_eq!(error.to_string(), "out of paper");
}

/// Tests that an error names the option that differs, and not a consequence of the difference. Such
/// consequences are the variant that a type implies, or the size of a heap for the plans.
#[test]
fn what_a_program_says_is_compared_before_what_follows() {
    World::run_threads(2, |world| -> anyhow::Result<()> {
        let rank = world.rank();
        let typed = [DType::F32, DType::BF16][rank];
        let shaped = Options::new([8, 1024][rank], 768, 0);
        let differing = [("dtype", Options::new(64, 768, 0).dtype(typed)), ("m", shaped)];
        for (item, options) in differing {
            let plan = plan(Op::AllReduce, "auto", &world, &options)?;
            let sized = Plan::heap_options(&[&plan], HeapReserve::none())?.threads(1);
            fails(SymmetricHeap::open(&world, sized), &[&format!("{item} of plan 0 is ")]);
            let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
            fails(AllReduce::new(&heap, &plan), &[&format!(": {item} is ")]);
            heap.close()?;
        }
        Ok(())
    })
    .unwrap();
}

/// Environment variable that tells the started program its role.
const PART: &str = "ORDER_PROGRAM";

fn start(part: &str, stderr: Stdio) -> Child {
    let program = std::env::current_exe().expect("this program has a path");
    let mut command = Command::new(program);
    command.args(["--exact", "order::program", "--nocapture", "--test-threads=1"]);
    // `IRIS_DEADLINE=0.1` gives a rank 60 s to enter a call, so that the first message about a wait
    // is printed after one second.
    command.env(PART, part).env("IRIS_DEADLINE", "0.1");
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(stderr);
    command.spawn().expect("the program did not start")
}

#[test]
fn program() {
    let Ok(part) = std::env::var(PART) else { return };
    match part.as_str() {
        "late" => World::run_threads(2, late).expect("all calls"),
        "elsewhere" => World::run_threads(2, elsewhere).expect("all calls"),
        "stuck" => {
            let run = |world: World| match world.rank() {
                0 => Err(anyhow::anyhow!("out of luck")),
                _ => Ok(std::io::stdin().read_to_end(&mut Vec::new()).map(|_| ())?),
            };
            let error = World::run_threads(2, run).expect_err("an error");
            assert_eq!(error.to_string(), "out of luck");
            vec![]
        }
        "logged" => {
            let stderr = std::io::stderr;
            tracing_subscriber::fmt().with_ansi(false).with_writer(stderr).init();
            let run = |world: World| issue(&world, [&[1, 2], &[2, 1]][world.rank()], true);
            let error = World::run_threads(2, run).expect_err("another order");
            eprintln!("returned: {error}");
            vec![]
        }
        other => panic!("part {other}"),
    };
}

/// Program in which rank 1 issues its second call only when stdin ends.
fn late(world: World) -> anyhow::Result<()> {
    let mut operators = operators(&world)?;
    let sum = &mut operators[1];
    sum.call_and_sync()?;
    if world.rank() == 1 {
        std::io::stdin().read_to_end(&mut Vec::new())?;
    }
    sum.call_and_sync()?;
    sum.heap.close()?;
    Ok(())
}

/// Program in which rank 0 calls an operator while rank 1 is in a host barrier. A second thread of
/// rank 1 issues its call when stdin ends, so that no rank has made an error.
fn elsewhere(world: World) -> anyhow::Result<()> {
    let mut operators = operators(&world)?;
    let sum = &mut operators[1];
    // The barrier is in a closure, so that its call site is the same on both ranks.
    let meet = || world.barrier();
    if world.rank() == 0 {
        sum.call_and_sync()?;
        meet()?;
    } else {
        thread::scope(|scope| {
            let waiting = scope.spawn(meet);
            std::io::stdin().read_to_end(&mut Vec::new())?;
            sum.call_and_sync()?;
            waiting.join().expect("no panic").map_err(anyhow::Error::from)
        })?;
    }
    sum.heap.close()?;
    Ok(())
}

/// Tests that a waiting rank prints, as one write, which rank it waits for, in which call of which
/// operator. Then the peer comes and the call succeeds.
#[test]
fn a_stream_that_waits_says_for_whom() {
    let said = said_while_waiting("late");
    let expected =
        "iris: rank 0 waits for rank 1 to issue call 2 of the heap, all_reduce (operator 1): ";
    assert!(said.starts_with(expected) && said.ends_with("s of 60.0s\n"), "{said:?}");
}

/// Tests that the message of a waiting rank names the collective step of the host in which its peer
/// is.
#[test]
fn a_stream_that_waits_says_where_its_peer_stands() {
    let said = said_while_waiting("elsewhere");
    let expected =
        "iris: rank 0 waits for rank 1 to issue call 1 of the heap, all_reduce (operator 1): ";
    let place = "; rank 1 waits for all ranks in barrier at ";
    assert!(said.starts_with(expected) && said.contains(place), "{said:?}");
}

/// Tests that the error of a rank is shown while the function of another rank does not return.
#[test]
fn an_error_is_shown_while_another_rank_is_stuck() {
    let said = said_by("stuck", "has failed");
    let expected = "iris: rank 0 has failed, but its error is returned only when rank 1 ends, too: \
                    out of luck\n";
    assert_eq!(said, expected);
}

/// First message about a wait that rank 0 prints in program `part`.
fn said_while_waiting(part: &str) -> String {
    said_by(part, "rank 0 waits for")
}

/// First message with `words` of program `part`, without places of the source. The program's stdin
/// ends after that message, and the program must then succeed.
fn said_by(part: &str, words: &str) -> String {
    // A datagram socket keeps writes separate, so that the test sees that the message is a single
    // write.
    let (ours, theirs) = UnixDatagram::pair().expect("sockets");
    ours.set_read_timeout(Some(Duration::from_secs(100))).expect("a time limit");
    let mut program = start(part, OwnedFd::from(theirs).into());
    let mut buffer = [0; 1 << 12];
    let receive = || {
        let bytes = ours.recv(&mut buffer).expect("a line");
        String::from_utf8_lossy(&buffer[..bytes]).into_owned()
    };
    let said = iter::repeat_with(receive).find(|line| line.contains(words));
    drop(program.stdin.take());
    assert!(program.wait().expect("an end").success());
    without_places(&said.expect("lines without end"))
}

/// Tests that ranks do not log an error that is returned to the caller anyway.
#[test]
fn nothing_is_logged_ahead_of_an_error() {
    let output = start("logged", Stdio::piped()).wait_with_output().expect("an end");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("returned: ") && output.status.success(), "{text}");
    // Warnings about environment variables are ignored: they depend on how the tests are run.
    let warnings = text.lines().filter(|line| line.contains("WARN") && !line.contains("variable"));
    assert_eq!(warnings.count(), 0, "{text}");
}
