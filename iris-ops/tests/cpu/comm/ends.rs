//! Tests of communicators that end on one rank before the others.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use iris_heap::abi::abort;
use iris_heap::{HeapOptions, Settings, SymmetricHeap, World};
use iris_ops::comm::{Comm, Id, ReduceOp};
use iris_testkit::error_texts::fails;
use iris_testkit::worlds::on_threads;

use super::{CPU, small, sums};

/// Tests the steps by which a server survives a lost rank: the remaining ranks close their
/// communicators, and open another communicator with a new id.
#[test]
fn a_communicator_that_has_lost_a_rank_is_followed_by_another() {
    let ids = [Id::new().unwrap(), Id::new().unwrap()];
    let lost = Barrier::new(2);
    let rank = |rank: usize| -> Result<()> {
        let comm = Comm::from_rank_with(CPU, rank, 2, ids[0], &small())?;
        let first = || -> Result<bool> {
            sums::<f32>(&comm, 10)?;
            if rank == 1 {
                return Ok(true);
            }
            // Rank 1 does not make this call, so it must fail on rank 0.
            let call = comm.all_reduce_in_place(&mut [1.0_f32; 4], &ReduceOp::Sum);
            let error = call.err().context("a sum without rank 1")?;
            ensure!(error.to_string().contains("rank 1") && comm.check().is_err(), "{error}");
            let error = comm.all_gather(&[1_u32], &mut [0_u32; 2]).err().context("a call")?;
            ensure!(error.to_string().contains("takes no calls after a fault"), "{error}");
            let without_elements = comm.all_reduce_in_place(&mut [0.0_f32; 0], &ReduceOp::Sum);
            let error = comm.close().err().context("a close")?;
            ensure!(error.to_string().contains("rank 1"), "{error}");
            Ok(without_elements.is_err())
        };
        let first = first();
        drop(comm);
        lost.wait();
        let comm = Comm::from_rank_with(CPU, rank, 2, ids[1], &small())?;
        sums::<f32>(&comm, 10)?;
        comm.close()?;
        // This comes last, so that no rank waits for one that has failed here.
        ensure!(first?, "a call without elements is a call");
        Ok(())
    };
    on_threads(0..2, rank).into_iter().for_each(Result::unwrap);
}

/// Tests that a communicator whose heap has failed closes, and then its world, while the other rank is
/// stuck: it begins to close only after this rank has done so.
#[test]
fn a_failed_communicator_closes_while_a_rank_is_stuck() {
    let settings = Settings::default().deadline(0.02);
    for in_heap in [false, true] {
        let closed = Barrier::new(2);
        let rank = |world: World| -> Result<Option<String>> {
            let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
            let comm = match in_heap {
                true => Comm::in_heap(CPU, &heap, &small())?,
                false => Comm::from_world(CPU, &world, &small())?,
            };
            if world.rank() == 1 {
                closed.wait();
                return Ok(None);
            }
            comm.heap().poison(abort::USER)?;
            let told = format!("{:?}", comm.close().map_err(|error| error.to_string()));
            // The program's own heap has not failed unless the communicator is in it.
            drop(comm);
            let rest = if in_heap {
                heap.close()
            } else {
                drop(heap);
                Ok(())
            };
            let ended = rest.and_then(|()| world.close());
            closed.wait();
            ended?;
            Ok(Some(told))
        };
        let told = World::run_threads_each(2, &settings, rank).unwrap().remove(0).unwrap().unwrap();
        let expected = if in_heap { "the caller asked for it" } else { "Ok(())" };
        assert!(told.contains(expected), "in a heap: {in_heap}: {told}");
    }
}

/// Tests that a rank that drops its communicator, while its world goes on, is named by the ranks
/// that wait for it in a call.
#[test]
fn a_rank_that_drops_its_communicator_is_named() {
    let settings = Settings::default().deadline(0.05);
    let ended = Barrier::new(2);
    let rank = |world: World| -> Result<Option<String>> {
        let comm = Comm::from_world(CPU, &world, &small().name("tp"))?;
        if world.rank() == 1 {
            drop(comm);
            ended.wait();
            return Ok(None);
        }
        let error = comm.all_reduce_in_place(&mut [1.0_f32; 4], &ReduceOp::Sum).unwrap_err();
        ended.wait();
        Ok(Some(error.to_string()))
    };
    let told = World::run_threads_each(2, &settings, rank).unwrap().remove(0).unwrap().unwrap();
    assert!(told.contains("left out") && told.contains("on rank 1"), "{told}");
    assert!(told.contains("tp (all_reduce of"), "{told}");
}

/// Tests a communicator that is dropped while an operator of the program keeps its heap: the world
/// that the communicator opened ends nevertheless.
#[test]
fn a_dropped_communicator_ends_its_world_though_its_heap_is_used() {
    let id = Id::new().unwrap();
    let ended = Barrier::new(2);
    let rank = |rank: usize| -> Result<Option<String>> {
        let comm = Comm::from_rank_with(CPU, rank, 2, id, &small())?;
        let heap = comm.heap().clone();
        if rank == 1 {
            drop(comm);
            ended.wait();
            drop(heap);
            return Ok(None);
        }
        // A call would wait for rank 1 until its deadline if the world went on.
        let until = Instant::now() + Duration::from_secs(60);
        while comm.check().is_ok() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let lost = comm.check().is_err();
        let error = lost.then(|| comm.all_reduce_in_place(&mut [1.0_f32; 4], &ReduceOp::Sum));
        ended.wait();
        Ok(error.map(|it| it.unwrap_err().to_string()))
    };
    let told = on_threads(0..2, rank).into_iter().collect::<Result<Vec<_>>>().unwrap();
    let told = told[0].as_deref().unwrap();
    assert!(told.contains("rank 1 is lost"), "{told}");
}

/// Tests that a communicator is closed with an error that has the kind by which the close of a captured
/// heap, which stays open, is refused.
#[test]
fn a_communicator_is_closed_whatever_the_error_of_its_heap() {
    let id = Id::new().unwrap();
    let rank = |rank: usize| -> Result<[String; 2]> {
        let comm = Comm::from_rank_with(CPU, rank, 2, id, &small())?;
        sums::<f32>(&comm, 10)?;
        let (what, message) = ("a step".into(), "no paper".into());
        let failed = iris_heap::Error::PeerFailed { rank: 1, what, message };
        comm.heap().stream()?.call_cpu("print", move || Err(failed))?;
        let close = || comm.close().err().map_or(String::new(), |error| error.to_string());
        Ok([close(), close()])
    };
    for told in on_threads(0..2, rank) {
        let [first, second] = told.unwrap();
        assert!(first.contains("no paper"), "{first}");
        assert!(second.contains("the communicator") && second.contains("closed"), "{second}");
    }
}

/// Tests the abort of a communicator that has made its own world: peers are told, with the reason if
/// there is one, and both ranks then refuse calls.
#[test]
fn an_aborted_communicator_ends_on_all_ranks() {
    for (reason, expected) in [
        (None, "rank 1 is lost"),
        (Some("the tokenizer has no file"), "rank 1 gave up: the tokenizer has no file;"),
    ] {
        let (id, ended) = (Id::new().unwrap(), Barrier::new(2));
        let rank = |rank: usize| -> Result<String> {
            let comm = Comm::from_rank_with(CPU, rank, 2, id, &small())?;
            sums::<f32>(&comm, 10)?;
            match reason {
                _ if rank == 0 => {}
                None => comm.abort(),
                Some(reason) => comm.abort_with(reason),
            }
            // A call would wait for rank 1 until its deadline if the abort were not told.
            let until = Instant::now() + Duration::from_secs(60);
            while comm.check().is_ok() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
            let told = comm.check().err().map(|error| error.to_string());
            let refused = told.is_some().then(|| comm.all_gather(&[1_u32], &mut [0_u32; 2]));
            ended.wait();
            ensure!(refused.is_none_or(|refused| refused.is_err()), "a call of rank {rank}");
            told.context("no error after an abort")
        };
        let told = on_threads(0..2, rank).into_iter().collect::<Result<Vec<_>>>().unwrap();
        assert!(told[0].contains(expected), "{told:?}");
        assert!(!told[1].contains("rank 1 is lost"), "{told:?}");
    }
}

/// Tests that a communicator can be dropped while one of its calls waits for the peer. The call
/// must end, and the peer's next call must name the rank that is gone.
#[test]
fn a_communicator_may_be_dropped_while_a_call_runs() {
    let id = Id::new().unwrap();
    let (enqueued, dropped) = (Barrier::new(2), Barrier::new(2));
    let rank = |rank: usize| -> Result<()> {
        let comm = Comm::from_rank_with(CPU, rank, 2, id, &small())?;
        sums::<f32>(&comm, 10)?;
        let (x, mut y) = (comm.heap().full::<f32>(900, 1.0)?, comm.heap().zeros::<f32>(900)?);
        if rank == 0 {
            comm.all_reduce(&x, &mut y, &ReduceOp::Sum)?;
            enqueued.wait();
            drop(comm);
            dropped.wait();
            return Ok(());
        }
        enqueued.wait();
        dropped.wait();
        let call = comm.all_reduce(&x, &mut y, &ReduceOp::Sum);
        let error = call.and_then(|()| comm.close()).unwrap_err().to_string();
        // The error must report the lost rank, not a wait that timed out.
        assert!(error.contains("rank 0") && !error.contains("waited"), "{error}");
        Ok(())
    };
    on_threads(0..2, rank).into_iter().for_each(Result::unwrap);
}

/// Tests that a communicator made from an id has the deadlines of its options.
#[test]
fn a_communicator_waits_as_its_options_say() {
    let settings = Settings::default().meeting(Duration::from_millis(50));
    let alone = Comm::from_rank_with(CPU, 0, 2, Id::new().unwrap(), &small().settings(settings));
    fails(alone, &["waited", "for rank 1"]);
}
