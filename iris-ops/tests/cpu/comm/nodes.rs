//! Tests of communicators over several nodes. The ranks are threads that simulate nodes, or they
//! connect over loopback.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::Result;
use iris_heap::{Settings, World};
use iris_kernels::Recovery;
use iris_ops::comm::{Comm, ReduceOp};
use iris_ops::{OpError, OpResult};
use iris_testkit::worlds::over_loopback;

use super::{CPU, all_calls, small};

/// Worlds over several nodes to test: number of nodes, and number of ranks per node.
pub(crate) const WORLDS: [(usize, usize); 4] = [(2, 1), (2, 2), (3, 1), (2, 3)];

#[test]
fn calls_over_several_nodes_are_right() {
    for (nodes, per_node) in WORLDS {
        let rank = |world: World| -> Result<()> {
            let comm = Comm::from_world(CPU, &world, &small())?;
            assert_eq!((comm.rank(), comm.world_size()), (world.rank(), nodes * per_node));
            for count in [0, 1, 2, 5, 341, 1025, 2500] {
                all_calls(&comm, count)?;
            }
            comm.close()?;
            Ok(world.close()?)
        };
        World::run_nodes(nodes, per_node, rank).unwrap();
    }
}

/// Tests the calls with ranks that connect over TCP and are authenticated by a secret, in the world
/// and in groups of it. The network's settings name each rank's node.
#[test]
fn calls_over_sockets_are_right() {
    for names in [&["a", "a"][..], &["a", "b"], &["a", "a", "b", "b"], &["a", "b", "c"]] {
        let rank = |world: World| -> Result<()> {
            let in_world = |world: &World| -> Result<()> {
                let comm = Comm::from_world(CPU, world, &small())?;
                for count in [1, 341, 1025] {
                    all_calls(&comm, count)?;
                }
                Ok(comm.close()?)
            };
            in_world(&world)?;
            let group = world.split(Some(world.rank() as u32 % 2), 0)?.unwrap();
            in_world(&group)?;
            group.close()?;
            Ok(world.close()?)
        };
        over_loopback(names, rank).into_iter().for_each(Result::unwrap);
    }
}

/// Tests that no rank passes a barrier before the last rank has arrived, on whichever node the last
/// rank is.
#[test]
fn a_barrier_holds_the_ranks_of_all_nodes() {
    for (nodes, per_node) in WORLDS {
        let arrived = AtomicUsize::new(0);
        let rank = |world: World| -> Result<()> {
            let comm = Comm::from_world(CPU, &world, &small())?;
            for call in 1..=20 {
                arrived.fetch_add(1, Ordering::Relaxed);
                comm.barrier()?;
                comm.stream().sync()?;
                let seen = arrived.load(Ordering::Relaxed);
                assert!(seen >= call * world.size(), "call {call}: {seen}");
            }
            comm.close()?;
            Ok(world.close()?)
        };
        World::run_nodes(nodes, per_node, rank).unwrap();
    }
}

/// Tests that a difference between the calls of two nodes is an error on all ranks, and that the
/// error names the difference.
#[test]
fn calls_that_differ_between_nodes_are_named() {
    for (what, call) in [
        ("N is", (|comm, node| sum_of(comm, 8 + node)) as fn(&Comm, usize) -> OpResult<()>),
        ("operator is", |comm, node| match node {
            0 => sum_of(comm, 8),
            _ => comm.broadcast_in_place(&mut [1.0_f32; 8], 1),
        }),
    ] {
        let rank = |world: World| -> Result<String> {
            let comm = Comm::from_world(CPU, &world, &small())?;
            let node = world.node();
            let outcome = call(&comm, node);
            // The ranks wait here for each other, because a rank that returned would be treated as
            // lost.
            world.barrier()?;
            let error = outcome.and_then(|()| comm.close()).expect_err("nodes differ");
            Ok(error.to_string())
        };
        let errors = World::run_nodes(2, 2, rank).unwrap();
        let named =
            |error: &String| error.contains(what) && error.contains("node 1 of this process");
        assert!(errors.iter().any(named), "{what} in {errors:#?}");
    }
}

fn sum_of(comm: &Comm, count: usize) -> OpResult<()> {
    comm.all_reduce_in_place(&mut vec![1.0_f32; count], &ReduceOp::Sum)
}

/// Tests launches that fail in a call of several ranges: the call may be tried again, or the rank
/// of the other node is told while it waits.
#[test]
fn a_call_that_fails_halfway_is_told_to_all_nodes() {
    let settings = Settings::default().deadline(0.05);
    let mut outcomes = [0; 3];
    for launches in 0..15 {
        let (both_ended, gave_up) = (Barrier::new(2), AtomicBool::new(false));
        let rank = |world: World| -> Result<(OpResult<()>, bool)> {
            let comm = Comm::from_world(CPU, &world, &small())?;
            let call = || comm.all_gather(&[1.0_f32; 2048], &mut [0.0_f32; 4096]);
            if world.rank() == 0 {
                comm.heap().control().fail_launch_after(launches);
            }
            let first = call();
            let failed = first.is_err();
            let last = match first {
                Err(OpError::Step { recovery: Recovery::Retry, .. }) => call(),
                other => other,
            };
            gave_up.fetch_or(last.is_err(), Ordering::Relaxed);
            both_ended.wait();
            // A call whose last launch fails on rank 0 may have ended well on rank 1. Then the next
            // call is told.
            let told = match gave_up.load(Ordering::Relaxed) {
                true => last.and_then(|()| call()),
                false => last,
            };
            Ok((told, failed))
        };
        let results = World::run_nodes_each((2, 1), &settings, rank).unwrap();
        let [(mine, failed), (theirs, _)] =
            results.try_into().map(|all: [_; 2]| all.map(Result::unwrap)).unwrap();
        let outcome = match (failed, mine, theirs) {
            (false, Ok(()), Ok(())) => 0,
            (true, Ok(()), Ok(())) => 1,
            (true, Err(OpError::Step { recovery: Recovery::Close, .. }), Err(told)) => {
                let text = told.to_string();
                assert!(
                    text.contains("rank 0 on host node 0") && !text.contains("waited"),
                    "{text}"
                );
                2
            }
            other => panic!("after {launches} launches: {other:?}"),
        };
        outcomes[outcome] += 1;
    }
    assert!(outcomes.iter().all(|&count| count > 0), "no failure, a retry, a loss: {outcomes:?}");
}

/// Tests a rank that ends in the middle of a call: the call must end on all nodes, with an error
/// that names the rank.
#[test]
fn a_rank_that_ends_is_named_on_all_nodes() {
    let rank = |world: World| -> Result<()> {
        let comm = Comm::from_world(CPU, &world, &small())?;
        if world.rank() == 3 {
            world.abort();
            return Ok(());
        }
        Ok(sum_of(&comm, 5000)?)
    };
    let results = World::run_nodes_each((2, 2), &Default::default(), rank).unwrap();
    for (rank, result) in results.into_iter().enumerate().take(3) {
        let text = format!("{:#}", result.unwrap_err());
        assert!(text.contains("rank 3 on host node 1"), "rank {rank}: {text}");
    }
}
