//! Tests of every operator over several nodes against a reference. The ranks are threads that
//! simulate nodes; those of the shapes and types connect over loopback.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use iris_heap::{DType, HeapOptions, MAX_RANKS, SymmetricHeap, World};
use iris_ops::{
    AllGatherMatmul, AllReduce, Barrier, CollectiveArgs, Epilogue, MatRef, Matmul, MatmulAllReduce,
    MatmulArgs, Plan, Shard, Topology,
};
use iris_testkit::error_texts::fails;
use iris_testkit::harness::rows;
use iris_testkit::rank_setup::Room;
use iris_testkit::suite::{Case, Input, Layout, Op, Options, Residual, room_for_nodes};
use iris_testkit::worlds::over_loopback;

use crate::common::nodes::{TYPES, each, run_cases, shape_cases};
use crate::common::{Change, changed, sampled, taken};

/// Worlds to test: number of nodes, and number of ranks per node.
const WORLDS: [(usize, usize); 4] = [(2, 1), (2, 2), (3, 1), (2, 3)];

/// Runs all cases on ranks that are threads and connect over TCP, authenticated by a secret.
fn run_all((nodes, per_node): (usize, usize), cases: &[Case]) {
    let size = nodes * per_node;
    let cases: Vec<_> = cases.iter().filter(|case| taken(case, size)).collect();
    let rooms = cases.iter().map(|case| room_for_nodes(case, size, nodes).unwrap());
    let room = rooms.fold(Room::default(), Room::or);
    let options = HeapOptions::new().threads(2);
    let names: Vec<_> = (0..size).map(|rank| format!("node {}", rank / per_node)).collect();
    let run = |world: World| run_cases(&world, (&options, room), &cases);
    over_loopback(&names, run).into_iter().for_each(|result| result.unwrap());
}

/// Runs `test` on each rank of a world with a heap, and closes both at the end.
#[track_caller]
fn on_nodes(
    (nodes, per_node): (usize, usize),
    test: impl Fn(&World, Arc<SymmetricHeap>) -> anyhow::Result<()> + Sync,
) {
    World::run_nodes(nodes, per_node, |world| -> anyhow::Result<()> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new())?;
        test(&world, heap.clone())?;
        heap.close()?;
        Ok(world.close()?)
    })
    .unwrap();
}

rows! {
    shapes_and_types_on_2_nodes_of_1_rank: run_all((2, 1), &shape_cases());
    shapes_and_types_on_2_nodes_of_2_ranks: run_all((2, 2), &shape_cases());
    shapes_and_types_on_3_nodes_of_1_rank: run_all((3, 1), &shape_cases());
    shapes_and_types_on_2_nodes_of_3_ranks: run_all((2, 3), &shape_cases());
}

/// Tests layouts, bias, epilogue, other types, other roots and bursts, one feature at a time, with
/// every operator.
#[test]
fn features_of_matrices_and_options() {
    let changes: &[Change] = &[
        |_| {},
        |case| {
            case.a = Layout { transposed: true, pad: 2, before: 1, ..Layout::default() };
            case.b = Layout { transposed: true, pad: 2, before: 3, ..Layout::default() };
        },
        |case| case.c = Layout { transposed: true, pad: 4, ..Layout::default() },
        |case| {
            (case.a.pad, case.a.before, case.b.pad, case.c.pad, case.c.before) = (3, 5, 1, 7, 11)
        },
        |case| (case.a.external, case.b.external, case.c.external) = (true, true, true),
        |case| case.c.skewed = true,
        |case| case.bias = true,
        |case| {
            (case.bias, case.input) = (true, Input::Reals);
            case.options.epilogue = Epilogue::Gelu;
        },
        |case| case.uneven = true,
        |case| case.in_place = true,
        |case| {
            let m = case.options.m;
            (case.burst, case.rows) = (true, vec![m, 1, m, m / 2, m, 0, m, m]);
        },
        |case| case.options.wire = Some(DType::F32),
        |case| case.options.root = 1,
    ];
    for (nodes, per_node) in WORLDS {
        let mut cases = Vec::new();
        for (turn, dtype) in TYPES.into_iter().enumerate() {
            let mut options = Options::new(29, 21, 13).dtype(dtype);
            options.blocks = Some(1 + turn);
            for case in each(&options) {
                cases.extend(changes.iter().map(|&change| changed(&case, change)));
            }
            let mut narrow = Options::new(17, 12, 9).dtype(DType::F32).output(dtype);
            narrow.blocks = Some(2);
            cases.push(Case::new(Op::MatmulAllReduce, "auto", narrow));
        }
        run_all((nodes, per_node), &sampled(cases));
    }
}

/// Tests the RMSNorm after the sum, with a residual and without.
#[test]
fn rows_are_normalised() {
    for (nodes, per_node) in WORLDS {
        let mut cases = Vec::new();
        for dtype in TYPES {
            for op in [Op::AllReduce, Op::MatmulAllReduce] {
                let k = if op.multiplies() { 13 } else { 0 };
                let mut options = Options::new(17, 37, k).dtype(dtype).rms_norm(1e-3);
                options.blocks = Some(2);
                let case = Case::new(op, "auto", options);
                cases.push(case.clone());
                cases.push(Case { residual: Residual::None, ..case.clone() });
                cases.push(Case { residual: Residual::InC, input: Input::Reals, ..case.clone() });
                cases.push(Case { in_place: true, bias: true, ..case });
            }
        }
        run_all((nodes, per_node), &cases);
    }
}

/// Tests that no rank leaves a barrier before the last rank has arrived, on whichever node the last
/// rank is.
#[test]
fn a_barrier_holds_all_nodes() {
    for (nodes, per_node) in WORLDS {
        let come = AtomicUsize::new(0);
        on_nodes((nodes, per_node), |world, heap| {
            let stream = heap.stream()?;
            let plan = iris_ops::barrier::Options::new().plan(&heap)?;
            let barrier = Barrier::new(&heap, &plan)?;
            for call in 1..=20 {
                come.fetch_add(1, Ordering::Relaxed);
                barrier.run(&stream)?;
                stream.sync()?;
                let seen = come.load(Ordering::Relaxed);
                assert!(seen >= call * world.size(), "call {call}: {seen}");
            }
            barrier.free()?;
            Ok(())
        });
    }
}

/// Tests a sum in a world of more ranks than a heap can have.
#[test]
fn a_world_may_have_more_ranks_than_a_heap() {
    const COUNT: usize = 100;
    let (nodes, per_node) = (3, 22);
    assert!(nodes * per_node > MAX_RANKS);
    World::run_nodes(nodes, per_node, |world| -> anyhow::Result<()> {
        let options = HeapOptions::new().data_bytes(1 << 18).threads(1);
        let heap = SymmetricHeap::open(&world, options)?;
        let op = AllReduce::new(&heap, &iris_ops::all_reduce::Options::new(COUNT).plan(&heap)?)?;
        let x = heap.full::<f32>(COUNT, world.rank() as f32)?;
        let stream = heap.stream()?;
        let all = MatRef::sym(x, 1, COUNT);
        op.run(&CollectiveArgs::new(all, all), &stream)?;
        stream.sync()?;
        let sum = (0..world.size()).sum::<usize>() as f32;
        anyhow::ensure!(heap.read(x)? == [sum; COUNT], "the sum of rank {} is wrong", world.rank());
        op.free()?;
        heap.close()?;
        Ok(world.close()?)
    })
    .unwrap();
}

/// Tests that calls on two streams run in the order in which they were issued.
#[test]
fn calls_on_two_streams_are_in_order() {
    on_nodes((2, 2), |_, heap| {
        let op = AllReduce::new(&heap, &iris_ops::all_reduce::Options::new(64).plan(&heap)?)?;
        let (first, second) = (heap.stream()?, heap.stream()?);
        let [x, y, z] = [1.0_f32, 0.0, 0.0].map(|value| heap.full(64, value));
        let [x, y, z] = [x?, y?, z?];
        let sum = |from, to| CollectiveArgs::new(MatRef::vector(from), MatRef::vector(to));
        let (go, gone) = std::sync::mpsc::channel::<()>();
        first.call_cpu("hold", move || gone.recv().map_err(iris_heap::Error::other))?;
        op.run(&sum(x, y), &first)?;
        op.run(&sum(y, z), &second)?;
        go.send(())?;
        second.sync()?;
        assert_eq!(heap.read(z)?, [16.0; 64]);
        Ok(first.sync()?)
    });
}

/// Tests that wrong matrices are refused before anything is enqueued, on one rank alone too, so that
/// the next call is right.
#[test]
fn wrong_matrices_are_refused_and_the_next_call_is_right() {
    for world in [(2, 1), (2, 2)] {
        on_nodes(world, |world, heap| {
            let (rows, columns) = (8, 16);
            let plan = iris_ops::all_reduce::Options::rows(rows, columns).plan(&heap)?;
            let (op, stream) = (AllReduce::new(&heap, &plan)?, heap.stream()?);
            let whole = heap.ones::<f32>(2 * rows * columns)?;
            let matrix = |slice| MatRef::sym(slice, rows, columns);
            let input = matrix(whole.slice(..rows * columns)?);
            let refused = |output: MatRef, part: &str| {
                fails(op.run(&CollectiveArgs::new(input, output), &stream), &[part]);
            };
            if world.rank() == 1 {
                refused(matrix(whole.slice(..7)?), "output");
            }
            refused(matrix(whole.slice(columns..)?), "output and input overlap");
            let output = whole.slice(rows * columns..)?;
            op.run(&CollectiveArgs::new(input, matrix(output)), &stream)?;
            stream.sync()?;
            assert!(heap.read(output)?.iter().all(|&sum| sum == world.size() as f32));
            Ok(())
        });
    }
}

/// Tests that one heap is opened for the plans of a model over several nodes: a product without
/// communication beside operators of all ranks, and columns that the ranks do not divide alike.
#[test]
fn a_heap_is_opened_for_plans_with_a_local_product() {
    World::run_nodes(2, 2, |world| -> anyhow::Result<()> {
        let (m, n, k) = (5, 6, 7);
        let up = iris_ops::matmul::Options::new(m, n, k).plan(&world)?;
        let down = iris_ops::matmul_all_reduce::Options::new(m, n, k).plan(&world)?;
        let options = iris_ops::all_gather_matmul::Options::new(m, n, k);
        let columns = options.shard(Shard::Columns).uniform_shape(true).plan(&world)?;
        let plans = [&down, &up, &columns];
        let heap = Plan::open_heap(&world, &plans, iris_ops::HeapReserve::matrices())?;
        let (up, down) = (Matmul::new(&heap, &up)?, MatmulAllReduce::new(&heap, &down)?);
        let gathered = AllGatherMatmul::new(&heap, &columns)?;
        let (a, b) = (heap.ones::<f32>(m * k)?, heap.ones::<f32>(k * n)?);
        let own = iris_ops::split(k, world.size(), world.rank()).len();
        let part = heap.ones::<f32>(m * k.div_ceil(world.size()))?.slice(..m * own)?;
        let stream = heap.stream()?;
        let [x, y, z] = [(); 3].map(|()| heap.zeros::<f32>(m * n));
        let (x, y, z) = (x?, y?, z?);
        let args = |a, c| MatmulArgs::new(a, MatRef::sym(b, k, n), MatRef::sym(c, m, n));
        up.run(&args(MatRef::sym(a, m, k), x), &stream)?;
        down.run(&args(MatRef::sym(a, m, k), y), &stream)?;
        gathered.run(&args(MatRef::sym(part, m, own), z), &stream)?;
        stream.sync()?;
        for (c, sum) in [(x, k), (y, k * world.size()), (z, k)] {
            anyhow::ensure!(heap.read(c)? == vec![sum as f32; m * n], "a sum is not {sum}");
        }
        heap.close()?;
        Ok(world.close()?)
    })
    .unwrap();
}

/// Tests that an A that peers cannot read in place is refused before a step between nodes, by an
/// error with the operator's name, and that the next call is right.
#[test]
fn a_transposed_matrix_is_refused_before_anything_is_sent() {
    on_nodes((2, 2), |world, heap| {
        let (m, n, k) = (8, 3, 4);
        let options = iris_ops::all_gather_matmul::Options::new(m, n, k).name("up");
        let op = AllGatherMatmul::new(
            &heap,
            &options.variant(iris_ops::all_gather_matmul::Variant::Pull).plan(&heap)?,
        )?;
        let own = m / world.size();
        let (a, b) = (heap.ones::<f32>(own * k)?, heap.ones::<f32>(k * n)?);
        let (c, stream) = (heap.zeros::<f32>(m * n)?, heap.stream()?);
        let args = |a| MatmulArgs::new(a, MatRef::sym(b, k, n), MatRef::sym(c, m, n));
        let turned = MatRef::sym(a, k, own).transposed();
        let error = op.run(&args(turned), &stream).unwrap_err().to_string();
        assert!(
            error.starts_with("up (all_gather_matmul") && error.contains("row-major"),
            "{error}"
        );
        op.run(&args(MatRef::sym(a, own, k)), &stream)?;
        stream.sync()?;
        assert_eq!(heap.read(c)?, vec![k as f32; m * n]);
        Ok(())
    });
}

/// Tests the largest messages of elements: they are padded to a multiple of the ranks of a node.
#[test]
fn the_largest_count_is_a_multiple_of_the_ranks_of_a_node() {
    const MOST: usize = i32::MAX as usize / 2;
    let ranks = Topology::new(0, 4).on_nodes(2);
    let plan = |count| iris_ops::all_reduce::Options::new(count).dtype(DType::BF16).plan(ranks);
    fails(plan(MOST), &[&format!("at most {}", MOST - 1)]);
    fails(plan(MOST - 1), &["bytes of a step"]);
}
