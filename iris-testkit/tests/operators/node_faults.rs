//! Tests of errors over several nodes: every rank learns of them, and they name the rank or node that
//! is wrong, late or lost. The ranks are threads that simulate nodes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use iris_heap::{HeapOptions, Settings, Stream, SymSlice, SymmetricHeap, World};
use iris_ops::{AllReduce, Barrier, CollectiveArgs, MatRef, MatmulAllReduce, MatmulArgs};

/// Sum of 8 x 16 f32 in place, on one rank.
struct Sum {
    heap: Arc<SymmetricHeap>,
    op: AllReduce,
    stream: Stream,
    x: SymSlice<f32>,
}

impl Sum {
    fn call(&self, rows: usize) -> anyhow::Result<()> {
        let matrix = MatRef::sym(self.x.slice(..rows * 16)?, rows, 16);
        Ok(self.op.run(&CollectiveArgs::new(matrix, matrix), &self.stream)?)
    }
}

/// Makes a sum in a world of so many nodes and ranks per node, runs `test` on each rank, and returns
/// what each rank tells: its text, or the text of its error.
#[track_caller]
fn told_of_sums<T: Send>(
    world: (usize, usize),
    deadline: f64,
    test: impl Fn(&World, &Sum) -> anyhow::Result<T> + Sync,
) -> Vec<Result<T, String>> {
    let settings = Settings::default().deadline(deadline);
    let results = World::run_nodes_each(world, &settings, |world| {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(1 << 20))?;
        let op = AllReduce::new(&heap, &iris_ops::all_reduce::Options::rows(8, 16).plan(&heap)?)?;
        let (stream, x) = (heap.stream()?, heap.ones(8 * 16)?);
        test(&world, &Sum { heap, op, stream, x })
    });
    let text = |result: anyhow::Result<T>| result.map_err(|error| format!("{error:#}"));
    results.unwrap().into_iter().map(text).collect()
}

/// Tests plans that differ between nodes: making the operator fails on all ranks, with an error
/// that names the difference.
#[test]
fn plans_that_differ_between_nodes_are_named() {
    let results = World::run_nodes(2, 2, |world| -> anyhow::Result<String> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(1 << 20))?;
        let options = iris_ops::all_reduce::Options::rows(8, 16 + world.node());
        let error = AllReduce::new(&heap, &options.plan(&heap)?).unwrap_err();
        heap.close()?;
        world.close()?;
        Ok(error.to_string())
    });
    for text in results.unwrap() {
        assert!(text.contains("n is 16 on rank 0 and 1; 17 on rank 2 and 3"), "{text}");
    }
}

/// Tests calls that differ between nodes: they fail on all ranks, with an error that names both
/// ranks and the difference.
#[test]
fn calls_that_differ_between_nodes_are_named() {
    let told = told_of_sums((2, 2), 1.0, |world, sum| {
        // The nodes call with different numbers of rows: 8 minus the node's number.
        let rows = 8 - world.node();
        sum.call(rows)?;
        let outcome = sum.stream.sync();
        // Ranks wait here for each other, because a rank that returned would count as lost.
        world.barrier()?;
        assert!(sum.call(rows).is_err(), "the heap is of no further use");
        Ok(outcome?)
    });
    for (rank, told) in told.into_iter().enumerate() {
        let text = told.expect_err("all ranks fail");
        let named = text.contains("M is") && text.contains("(host node 1 of this process)");
        assert!(named, "rank {rank}: {text}");
    }
}

/// Tests that a bias on one node only is an error of all ranks.
#[test]
fn a_bias_on_one_node_is_named() {
    let all =
        World::run_nodes_each((2, 1), &Default::default(), |world| -> anyhow::Result<String> {
            let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
            let plan = iris_ops::matmul_all_reduce::Options::new(8, 16, 4).plan(&heap)?;
            let op = MatmulAllReduce::new(&heap, &plan)?;
            let matrix = |rows, cols| {
                Ok::<_, anyhow::Error>(MatRef::sym(heap.ones::<f32>(rows * cols)?, rows, cols))
            };
            let args = MatmulArgs::new(matrix(8, 4)?, matrix(4, 16)?, matrix(8, 16)?);
            let args = if world.node() == 1 { args.bias(matrix(1, 16)?) } else { args };
            let stream = heap.stream()?;
            let outcome = op.run(&args, &stream).map_err(anyhow::Error::from);
            let error = outcome.and_then(|()| Ok(stream.sync()?)).unwrap_err().to_string();
            world.barrier()?;
            Ok(error)
        });
    for told in all.unwrap().into_iter().map(Result::unwrap) {
        assert!(told.contains(" a bias (plan"), "{told}");
        assert!(told.contains("no bias and no residual (plan"), "{told}");
    }
}

/// Tests that a rank whose heap has failed before a step between nodes tells all ranks of all nodes why:
/// none must go on with the data of that rank.
#[test]
fn a_rank_that_has_failed_before_a_step_tells_the_other_nodes() {
    let told = told_of_sums((2, 2), 1.0, |world, sum| {
        let (go, gone) = std::sync::mpsc::channel::<()>();
        sum.stream.call_cpu("hold", move || gone.recv().map_err(iris_heap::Error::other))?;
        sum.call(8)?;
        if world.rank() == 2 {
            let failed = iris_heap::Error::other(std::io::Error::other("out of paper"));
            sum.heap.control().fail_elsewhere(failed);
        }
        go.send(())?;
        let outcome = sum.stream.sync();
        world.barrier()?;
        Ok(outcome?)
    });
    for told in told {
        let text = told.expect_err("all ranks fail");
        assert!(text.contains("out of paper"), "{text}");
    }
}

/// Tests a rank that leaves out the last call: no rank waits in a close for another one.
#[test]
fn a_rank_that_leaves_out_a_call_keeps_nobody_in_a_close() {
    for nodes in [(2, 1), (2, 2)] {
        let all = told_of_sums(nodes, 0.05, |world, sum| {
            let mut told = Vec::new();
            if world.rank() + 1 < world.size() {
                told.extend(sum.call(8).err().map(|e| e.to_string()));
                told.extend(sum.stream.sync().err().map(|e| e.to_string()));
            }
            told.extend(sum.heap.close().err().map(|e| e.to_string()));
            // The heap is still there, as it is in a program that closes before it drops.
            told.extend(world.close().err().map(|e| e.to_string()));
            Ok(told.join("; "))
        });
        for told in all.into_iter().map(Result::unwrap) {
            assert!(!told.is_empty() && !told.contains("waited"), "{nodes:?}: {told}");
        }
    }
}

/// Tests that a rank that dies in the middle of a call ends the call on all nodes.
#[test]
fn a_rank_that_ends_is_named_on_all_nodes() {
    let told = told_of_sums((2, 2), 1.0, |world, sum| {
        if world.rank() == 3 {
            world.abort();
            return Ok(());
        }
        sum.call(8)?;
        Ok(sum.stream.sync()?)
    });
    for (rank, told) in told.into_iter().enumerate().take(3) {
        let text = told.expect_err("ranks 0 to 2 fail");
        let named = text.contains("rank 3 on host node 1 of this process is lost");
        assert!(named, "rank {rank}: {text}");
    }
}

/// Tests that a late node is blamed by all ranks of the other nodes. A healthy rank that itself
/// waits for the late node delays the other rank of its node, but must not be blamed.
#[test]
fn a_late_node_is_blamed_and_not_the_rank_that_waits_for_it() {
    let late = 2;
    let settings = Settings::default().deadline(0.01);
    let finished = AtomicUsize::new(0);
    let results = World::run_nodes_each((3, 2), &settings, |world| -> anyhow::Result<()> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(1 << 20))?;
        let barrier = Barrier::new(&heap, &iris_ops::barrier::Options::new().plan(&heap)?)?;
        let stream = heap.stream()?;
        if world.node() == late {
            while finished.load(Ordering::Relaxed) < 4 {
                std::thread::sleep(Duration::from_millis(10));
            }
            return Ok(());
        }
        barrier.run(&stream)?;
        let outcome = stream.sync();
        finished.fetch_add(1, Ordering::Relaxed);
        // Ranks wait until all four have finished, because a rank that returned would count as
        // lost.
        while finished.load(Ordering::Relaxed) < 4 {
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(outcome?)
    });
    let results = results.unwrap();
    for (rank, named) in [(1, "rank 0 on host node 0"), (3, "rank 2 on host node 1")] {
        let text = format!("{:#}", results[rank].as_ref().unwrap_err());
        let named = format!(
            "{named} of this process waits for node 2 (rank 4 on host node 2 of this process)"
        );
        assert!(text.contains(&named), "rank {rank}: {text}");
    }
    for rank in [0, 2] {
        let text = format!("{:#}", results[rank].as_ref().unwrap_err());
        assert!(text.contains("node 2"), "rank {rank}: {text}");
    }
}
