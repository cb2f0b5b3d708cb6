//! Tests of sharing on the CPU: an operator that serves calls of all sizes and several threads, a
//! workspace shared by operators, and messages of any number of elements.

use std::sync::Arc;

use iris_heap::{Bytes, Segment, SymSlice, SymmetricHeap, World};
use iris_ops::{
    AllGatherMatmul, AllReduce, AnyOp, CollectiveArgs, HeapReserve, MatRef, MatmulAllReduce,
    MatmulArgs, Op, OpError as Error, Operands, Plan, Variant, Workspace, all_gather_matmul,
    all_reduce, barrier, matmul_all_reduce,
};
use iris_testkit::error_texts::fails;
use iris_testkit::oracle::{Meaning, Rows, Task};
use iris_testkit::rank_setup::Rig;
use iris_testkit::suite::{Case, Options, plan, room_for, run_case};

type Result<T> = anyhow::Result<T>;

/// Element `at` of the input that rank `rank` passes in call number `call`.
fn value(rank: usize, call: usize, at: usize) -> f32 {
    ((at * 7 + rank * 13 + call * 5) % 64) as f32
}

/// Tests that small and large calls of one operator alternate without waits between them. Each call
/// uses the choice for its size in the common memory. Results are compared element by element, and
/// counters with the expected traffic of the variant.
#[test]
fn one_op_serves_small_and_large_calls() {
    for (op, size, m, n, k) in [
        (Op::AllReduce, 3, 400, 64, 0),
        (Op::AllReduce, 4, 600, 40, 0),
        (Op::MatmulAllReduce, 3, 400, 64, 5),
        (Op::MatmulAllReduce, 2, 300, 30, 9),
    ] {
        let mut case = Case::new(op, "auto", Options::new(m, n, k));
        case.rows = vec![m, 1, 256, 3, m, 257, 12, m, m, 8, 0, 64, 65, m];
        World::run_threads(size, |world| -> Result<()> {
            let room = room_for(&Case { burst: true, ..case.clone() }, size)?;
            let made = plan(op, "auto", &world, &case.options)?;
            let options = Plan::heap_options(&[&made], HeapReserve::none())?.threads(2);
            let heap = Rig::open(&world, options, room)?.heap;
            let choices: Vec<_> = made.choices().iter().map(|choice| choice.variant).collect();
            anyhow::ensure!(choices.len() > 1, "{made}");
            anyhow::ensure!(size == 2 || choices.contains(&Variant::TwoShot), "{made}");
            for seed in 0..4 {
                run_case(&heap, &Case { burst: seed % 2 == 0, seed, ..case.clone() })?;
            }
            Ok(heap.close()?)
        })
        .unwrap();
    }
}

/// Opens a heap and allocates an input and an output of `count` elements on each rank.
fn messages(
    world: &World,
    plan: &Plan,
    count: usize,
) -> Result<(Arc<SymmetricHeap>, SymSlice<f32>, SymSlice<f32>)> {
    let most = count * world.size();
    let heap = SymmetricHeap::open(
        world,
        Plan::heap_options(&[plan], Bytes::new((8 * most + 4096) as u64))?,
    )?;
    let (input, output) = (heap.zeros::<f32>(most)?, heap.full::<f32>(most, f32::NAN)?);
    Ok((heap, input, output))
}

/// Tests every collective by elements with odd counts, in calls of the planned count, of fewer
/// elements, of one element and of none; on one node and on several.
#[test]
fn collectives_take_any_number_of_elements() {
    const MOST: usize = 20_011;
    for (nodes, per_node) in [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (2, 3)] {
        let size = nodes * per_node;
        let counts = [MOST, 17, 1, 0, 4096, size, MOST - 1, 7, 5000, 1003, 1000];
        for op in Op::ALL.into_iter().filter(|&op| !op.multiplies() && op != Op::Barrier) {
            World::run_nodes(nodes, per_node, |world| -> Result<()> {
                let (rank, root) = (world.rank(), size - 1);
                let mut request = op.request(0, MOST, 0);
                request.elements = true;
                if op.options().contains(&"root") {
                    request.root = root;
                }
                let plan = request.plan(&world)?;
                // The reference result is computed on rows, so each part of the message is treated
                // as one row.
                let meaning = Meaning::of(op);
                let one = [meaning.gives, meaning.gets]
                    .iter()
                    .all(|it| matches!(it, Rows::All | Rows::Root));
                let options = Options::new(MOST, 1, 0).root(root);
                let task = Task { op, size, nodes, m: if one { 1 } else { size }, options };
                let [(sent, _), _, (got, _)] = task.shapes(rank);
                let (heap, input, output) = messages(&world, &plan, MOST)?;
                let stream = heap.stream()?;
                let made = AnyOp::new(&heap, &plan)?;
                let run = |a: MatRef, c: MatRef| -> Result<()> {
                    made.run(&Operands::new(a, a, c), &stream)?;
                    Ok(stream.sync()?)
                };
                for (call, count) in counts.into_iter().enumerate() {
                    let (sent, got) = (sent * count, got * count);
                    let values: Vec<f32> = (0..sent).map(|at| value(rank, call, at)).collect();
                    heap.write(input.slice(..sent)?, &values)?;
                    heap.write(output, &vec![f32::NAN; size * MOST])?;
                    world.barrier()?;
                    let (from, to) = (input.slice(..sent)?, output.slice(..got)?);
                    run(MatRef::vector(from), MatRef::vector(to))?;
                    let wanted = |at: usize| {
                        let (source, row) = task.source(rank, at / count);
                        let of = |source| value(source, call, row * count + at % count);
                        source.map_or_else(|| (0..size).map(of).sum(), of)
                    };
                    let seen = heap.read(output)?;
                    let wrong = (0..got).find(|&at| seen[at] != wanted(at));
                    let ranks = format!("{nodes} nodes of {per_node} ranks");
                    anyhow::ensure!(wrong.is_none(), "{op} of {count}, {ranks}: {wrong:?}");
                    anyhow::ensure!(seen[got..].iter().all(|it| it.is_nan()), "{op}: too much");
                    world.barrier()?;
                }
                // A call must be refused if it has too many elements, parts of different sizes, or
                // gaps between rows.
                if op == Op::AllReduce && nodes == 1 {
                    let all = |len| MatRef::vector(input.slice(..len).unwrap());
                    let other = |len| MatRef::vector(output.slice(..len).unwrap());
                    fails(run(all(5), other(6)), &["1 x 6 elements"]);
                    let gaps = MatRef::sym(input, 2, 5).with_ld(6);
                    fails(run(gaps, other(10)), &["without gaps"]);
                    if size > 1 {
                        let (all, other) = (all(MOST + 1), other(MOST + 1));
                        fails(run(all, other), &["20012 elements, expected at most 20011"]);
                    }
                }
                Ok(heap.close()?)
            })
            .unwrap();
        }
    }
}

/// Tests that operators of different kinds alternate in one workspace, on two streams, without
/// corrupting each other's data.
#[test]
fn ops_share_a_workspace() {
    const CALLS: usize = 30;
    for size in [1, 2, 3] {
        World::run_threads(size, |world| -> Result<()> {
            let (m, n, k) = (24, 20, 8);
            let sum = matmul_all_reduce::Options::new(m, n, k)
                .variant(matmul_all_reduce::Variant::TwoShot)
                .plan(&world)?;
            let small = all_reduce::Options::rows(m, n)
                .variant(all_reduce::Variant::Spinlock)
                .plan(&world)?;
            let staged = all_gather_matmul::Variant::Staged(Default::default());
            let gather = all_gather_matmul::Options::new(m * size, n, k).variant(staged);
            let gather = gather.plan(&world)?;
            let plans = [&sum, &small, &gather];
            let options = Plan::heap_options(&plans, Bytes::mib(1))?.threads(2);
            let heap = SymmetricHeap::open(&world, options)?;
            let free = || [Segment::Data, Segment::Signal].map(|s| heap.free_bytes(s).0);
            let before = free();
            let workspace = Workspace::for_plans(&heap, &plans)?;
            let shared = before[0] - free()[0];
            let most = plans.iter().map(|plan| plan.data_bytes()).max().unwrap_or(0);
            let all: u64 = plans.iter().map(|plan| plan.data_bytes()).sum();
            anyhow::ensure!(shared >= most && (size == 1 || shared < all), "{shared} of {all}");
            let sum = MatmulAllReduce::in_workspace(&workspace, &sum)?;
            let small = AllReduce::in_workspace(&workspace, &small)?;
            let gather = AllGatherMatmul::in_workspace(&workspace, &gather)?;

            // A workspace that an operator uses must not be freed, and an operator that does not
            // fit must be refused.
            let refused = workspace.free().unwrap_err();
            let (error, workspace) = (refused.to_string(), refused.workspace);
            anyhow::ensure!(error.contains("held by 3 others"), "{error}");
            let large = all_reduce::Options::new(1 << 20);
            let large = large.variant(all_reduce::Variant::OneShot).plan(&world)?;
            if size > 1 {
                let error = AllReduce::in_workspace(&workspace, &large).unwrap_err().to_string();
                anyhow::ensure!(error.contains("workspace is too small"), "{error}");
            }
            let other = all_reduce::Options::rows(1, 1).first_call(7).plan(&world)?;
            let error = AllReduce::in_workspace(&workspace, &other).unwrap_err().to_string();
            anyhow::ensure!(error.contains("first_call is 7"), "{error}");
            let barrier = barrier::Options::new().plan(&world)?;
            let error = Workspace::for_plans(&heap, &[&barrier]).unwrap_err().to_string();
            anyhow::ensure!(error.contains("one of the barrier's own"), "{error}");
            anyhow::ensure!(matches!(Workspace::for_plans(&heap, &[]), Err(Error::NoPlan)));

            let streams = [heap.stream()?, heap.stream()?];
            let ones = |len: usize| heap.ones::<f32>(len);
            let (a, b) = (ones(m * k)?, ones(k * n)?);
            let sums: Vec<_> = (0..CALLS)
                .map(|_| heap.full::<f32>(m * n, f32::NAN))
                .collect::<iris_heap::Result<_>>()?;
            let (seconds, wide) = (ones(m * n)?, heap.full::<f32>(m * size * n, f32::NAN)?);
            for (call, &c) in sums.iter().enumerate() {
                // Successive calls have different numbers of rows and alternate between the
                // streams. The all-reduce reads its result on the other stream.
                let rows = m - call % 5;
                let stream = &streams[call % 2];
                let matrices = [(a, rows, k), (b, k, n), (c, rows, n)];
                let [left, right, c] = matrices.map(|(slice, r, c)| MatRef::sym(slice, r, c));
                sum.run(&MatmulArgs::new(left, right, c), stream)?;
                let twice = CollectiveArgs::new(c, MatRef::sym(seconds, rows, n));
                small.run(&twice, &streams[(call + 1) % 2])?;
                let left = MatRef::sym(a, m, k);
                let wide = MatRef::sym(wide, m * size, n);
                gather.run(&MatmulArgs::new(left, right, wide), stream)?;
            }
            streams.iter().try_for_each(|stream| stream.sync())?;
            for (call, &c) in sums.iter().enumerate() {
                let rows = m - call % 5;
                let seen = heap.read(c)?;
                let right = seen[..rows * n].iter().all(|&it| it == (k * size) as f32);
                anyhow::ensure!(right, "call {call}, {size} ranks: {seen:?}");
            }
            let last = heap.read(seconds)?[..(m - (CALLS - 1) % 5) * n].to_vec();
            anyhow::ensure!(last.iter().all(|&it| it == (k * size * size) as f32), "{last:?}");
            anyhow::ensure!(heap.read(wide)?.iter().all(|&it| it == k as f32));
            anyhow::ensure!(format!("{small:?}").contains("spinlock"), "{small:?}");
            world.barrier()?;
            sum.free()?;
            small.free()?;
            gather.free()?;
            for slice in sums.iter().chain([&a, &b, &seconds, &wide]) {
                heap.free(*slice)?;
            }
            workspace.free()?;
            anyhow::ensure!(free() == before, "all memory came back");
            Ok(heap.close()?)
        })
        .unwrap();
    }
}

/// Tests that an all-reduce whose sums lie in the workspace, where peers read them at the end of the
/// call, loses none of them to the next call there, of another size or another operator.
#[test]
fn sums_in_a_shared_workspace_are_read_before_the_next_call() {
    const CALLS: usize = 40;
    let (m, n, k) = (256, 512, 8);
    let tile = iris_ops::TileShape { m: 4, n };
    for variant in [all_reduce::Variant::Spinlock, all_reduce::Variant::Atomic] {
        let wrong = World::run_threads(2, |world| -> Result<usize> {
            let sums = |m| all_reduce::Options::rows(m, n).tile(tile).variant(variant);
            let (large, small) = (sums(m).plan(&world)?, sums(m / 2).plan(&world)?);
            let product = matmul_all_reduce::Options::new(m, n, k)
                .variant(matmul_all_reduce::Variant::Unfused)
                .plan(&world)?;
            let plans = [&large, &small, &product];
            let options = Plan::heap_options(&plans, Bytes::mib(8))?.threads(2);
            let heap = SymmetricHeap::open(&world, options)?;
            let workspace = Workspace::for_plans(&heap, &plans)?;
            let large = AllReduce::in_workspace(&workspace, &large)?;
            let small = AllReduce::in_workspace(&workspace, &small)?;
            let product = MatmulAllReduce::in_workspace(&workspace, &product)?;
            let stream = heap.stream()?;
            let ones = |count: usize| heap.ones::<f32>(count);
            let (ones, a, b) = (ones(m * n)?, ones(m * k)?, ones(k * n)?);
            let (c, other) = (heap.zeros::<f32>(m * n)?, heap.zeros(m * n)?);
            let mut wrong = 0;
            for call in 0..CALLS {
                // The large calls have both parities, before a small call and before a product.
                if call % 4 < 2 {
                    let half = |slice| MatRef::sym(slice, m / 2, n);
                    small.run(&CollectiveArgs::new(half(ones), half(other)), &stream)?;
                }
                let whole = |slice| MatRef::sym(slice, m, n);
                large.run(&CollectiveArgs::new(whole(ones), whole(c)), &stream)?;
                if call % 2 == 0 {
                    let (a, b) = (MatRef::sym(a, m, k), MatRef::sym(b, k, n));
                    product.run(&MatmulArgs::new(a, b, whole(other)), &stream)?;
                }
                stream.sync()?;
                wrong += usize::from(heap.read(c)?.iter().any(|&it| it != 2.0));
            }
            heap.close()?;
            Ok(wrong)
        });
        assert_eq!(wrong.unwrap(), [0, 0], "{variant:?}: calls with a wrong sum, by rank");
    }
}

/// Tests that threads can issue calls of one operator concurrently. The five launches of a call
/// must not mix with the launches of another call.
#[test]
fn threads_share_an_op() {
    const THREADS: usize = 4;
    const CALLS: usize = 50;
    World::run_threads(2, |world| -> Result<()> {
        let plan = all_reduce::Options::new(100).variant(all_reduce::Variant::Spinlock);
        let plan = plan.plan(&world)?;
        let heap =
            SymmetricHeap::open(&world, Plan::heap_options(&[&plan], Bytes::mib(1))?.threads(1))?;
        let op = AllReduce::new(&heap, &plan)?;
        let input = heap.ones::<f32>(100)?;
        let outputs: Vec<_> = (0..THREADS)
            .map(|_| heap.full::<f32>(100, f32::NAN))
            .collect::<iris_heap::Result<_>>()?;
        std::thread::scope(|scope| {
            let run = |output: SymSlice<f32>| {
                let args = CollectiveArgs::new(MatRef::vector(input), MatRef::vector(output));
                let (op, heap) = (&op, &heap);
                move || -> Result<()> {
                    let stream = heap.stream()?;
                    for _ in 0..CALLS {
                        op.run(&args, &stream)?;
                    }
                    Ok(stream.sync()?)
                }
            };
            let threads: Vec<_> = outputs.iter().map(|&output| scope.spawn(run(output))).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
        })?;
        for output in outputs {
            anyhow::ensure!(heap.read(output)? == [2.0; 100]);
        }
        anyhow::ensure!(op.counters()?.to_string().contains("bytes pushed"), "{}", op.counters()?);
        op.free()?;
        Ok(heap.close()?)
    })
    .unwrap();
}
