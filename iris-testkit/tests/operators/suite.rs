//! Tests of every op, variant, element type and number of ranks against a reference, over shapes
//! that are no multiples of tiles.
//!
//! Many cases run in one world. `IRIS_TEST_LEVEL` decides how many cases run.

use std::collections::BTreeSet;

use half::bf16;
use iris_heap::{DType, HeapOptions};
use iris_ops::{AllGatherMatmul, Epilogue, MatRef, MatmulArgs, Shard, StagingLayout, TileShape};
use iris_testkit::Level;
use iris_testkit::harness::rows;
use iris_testkit::suite::{Case, Input, Layout, Op, Options, Residual, plan};
use iris_testkit::worlds::on_heaps;

use crate::common::nodes::TYPES;
use crate::common::{Change, changed, run_all, sampled};

/// Shapes M, N, K: ragged shapes, single rows and columns, K of 0, fewer rows than ranks, and empty
/// matrices.
const SHAPES: [(usize, usize, usize); 12] = [
    (33, 65, 17),
    (1, 64, 32),
    (64, 1, 5),
    (5, 7, 1),
    (7, 3, 0),
    (3, 5, 4),
    (4, 4, 4),
    (0, 6, 3),
    (107, 96, 48),
    (130, 200, 70),
    (200, 33, 130),
    (9, 0, 5),
];

/// Tiles to test: the plan's choice, and small ones that cut ragged shapes into several in each
/// direction.
const TILES: [Option<(usize, usize)>; 3] = [None, Some((8, 16)), Some((5, 3))];

fn shapes_of(size: usize, threads: usize) {
    let mut cases = Vec::new();
    for (index, (m, n, k)) in SHAPES.into_iter().enumerate() {
        for (turn, dtype) in TYPES.into_iter().enumerate() {
            for input in [Input::Integers, Input::Reals] {
                let at = index + turn + usize::from(input == Input::Reals);
                // Only every `every`-th case runs; fewer with many ranks, because these are slow on
                // few cores.
                let every = Level::from_env().pick(2 * size.clamp(2, 6), size.div_ceil(3), 1);
                if !(at + size).is_multiple_of(every) {
                    continue;
                }
                let tiles =
                    if Level::from_env() == Level::Full { 0..3 } else { at % 3..at % 3 + 1 };
                for tile in tiles.map(|tile| TILES[tile]) {
                    let mut options = Options::new(m, n, k).dtype(dtype).columns_per_flag(8);
                    if let Some((m, n)) = tile {
                        options = options.tile(TileShape { m, n });
                    }
                    for mut case in Case::each(&options) {
                        case.input = input;
                        case.seed = 1 + at as u64;
                        cases.push(case);
                    }
                }
            }
        }
    }
    run_all(size, threads, &cases).unwrap();
}

rows! {
    shapes_and_types_1_rank: shapes_of(1, 2);
    shapes_and_types_2_ranks: shapes_of(2, 1);
    shapes_and_types_3_ranks_of_several_workgroups: shapes_of(3, 3);
    shapes_and_types_4_ranks: shapes_of(4, 1);
    shapes_and_types_8_ranks: shapes_of(8, 1);
    shapes_and_types_2_ranks_of_several_workgroups: {
        if Level::from_env() == Level::Full {
            shapes_of(2, 3);
            shapes_of(4, 3);
        }
    };
}

/// Tests every feature of a case alone, for every op and variant.
#[test]
fn features_of_matrices_and_options() {
    let gaps: Change = |case| {
        let pad = |pad, before| Layout { pad, before, ..Layout::default() };
        (case.a, case.b, case.c) = (pad(3, 5), pad(1, 0), pad(7, 11));
    };
    let changes: &[(&str, Change)] = &[
        ("transposed A", |case| {
            case.a = Layout { transposed: true, pad: 2, before: 1, ..Layout::default() }
        }),
        ("transposed B", |case| {
            case.b = Layout { transposed: true, pad: 2, before: 3, ..Layout::default() }
        }),
        ("transposed C", |case| case.c = Layout { transposed: true, pad: 4, ..Layout::default() }),
        ("external A", |case| case.a.external = true),
        ("external B", |case| case.b.external = true),
        ("external C", |case| (case.c.external, case.c.pad) = (true, 2)),
        ("external C on some ranks", |case| case.c.external_on_odd = true),
        ("C elsewhere on each rank", |case| case.c.skewed = true),
        ("bias", |case| case.bias = true),
        ("bias and gelu", |case| {
            (case.bias, case.input) = (true, Input::Reals);
            case.options.epilogue = Epilogue::Gelu;
        }),
        ("uneven", |case| case.uneven = true),
        ("in place", |case| case.in_place = true),
        ("in place, elsewhere on each rank", |case| {
            (case.in_place, case.c.skewed, case.a.skewed) = (true, true, true)
        }),
        ("a burst of calls", |case| {
            let m = case.options.m;
            (case.burst, case.rows) = (true, vec![m, 1, m, m / 2, m, 0, m, m]);
        }),
        ("tiles of one element", |case| {
            case.rows = vec![5];
            case.options.tile = Some(TileShape { m: 1, n: 1 });
            (case.options.m, case.options.n) = (5, 4);
        }),
        ("one tile", |case| case.options.tile = Some(TileShape { m: 512, n: 512 })),
    ];
    for (size, threads) in [(1, 2), (2, 2), (3, 1), (4, 2)] {
        if Level::from_env() <= Level::Quick && size != 3 {
            continue;
        }
        let mut cases = Vec::new();
        for (turn, dtype) in TYPES.into_iter().enumerate() {
            let options = Options::new(29, 21, 13).dtype(dtype).columns_per_flag(4);
            let options = options.tile(TileShape { m: 4 + turn, n: 8 });
            for case in Case::each(&options) {
                cases.push(changed(&case, gaps));
                for (_, change) in changes {
                    let alone = changed(&case, *change);
                    // Each feature is tested a second time together with gaps between the rows of
                    // the matrices.
                    let with_gaps = changed(&alone, |case| {
                        case.c.pad += 2;
                        case.c.before += 1;
                        (case.a.pad, case.a.before) = (case.c.pad, case.c.before);
                    });
                    cases.extend([alone, with_gaps]);
                }
            }
        }
        run_all(size, threads, &sampled(cases)).unwrap();
    }
}

/// Tests the RMSNorm, with and without a residual, for each variant that supports it.
#[test]
fn rows_are_normalised() {
    let changes: &[Change] = &[
        |_| {},
        |case| case.residual = Residual::None,
        |case| (case.residual, case.input) = (Residual::InC, Input::Reals),
        |case| (case.in_place, case.bias) = (true, true),
        |case| (case.c.transposed, case.c.pad) = (true, 3),
        |case| {
            (case.c.pad, case.c.before, case.a.pad) = (5, 3, 1);
            (case.residual, case.c.skewed) = (Residual::InC, true);
        },
        |case| (case.c.external, case.uneven) = (true, true),
        |case| {
            let m = case.options.m;
            (case.bias, case.input, case.burst) = (true, Input::Reals, true);
            (case.options.epilogue, case.rows) = (Epilogue::Gelu, vec![m, 1, m, 0, m, m]);
        },
        |case| case.options.wire = Some(DType::F32),
        |case| (case.options.tile, case.input) = (Some(TileShape { m: 3, n: 80 }), Input::Reals),
    ];
    let (mut cases, mut variants) = (Vec::new(), BTreeSet::new());
    for dtype in TYPES {
        for (m, n) in [(1, 40), (17, 37), (9, 1), (33, 72)] {
            let mut each = Case::each_normed(&Options::new(m, n, 13).dtype(dtype));
            for op in [Op::AllReduce, Op::MatmulAllReduce] {
                each.push(Case::new(op, "auto", each[0].options.clone()));
            }
            for case in each {
                variants.insert(format!("{} by {}", case.op, case.variant));
                cases.extend(changes.iter().map(|&change| changed(&case, change)));
            }
        }
    }
    assert_eq!(variants.into_iter().collect::<Vec<_>>(), NORMED);
    let cases = sampled(cases);
    for (size, threads) in [(1, 2), (2, 2), (3, 1), (4, 2)] {
        run_all(size, threads, &cases).unwrap();
    }
}

const NORMED: [&str; 10] = [
    "all_reduce by auto",
    "all_reduce by ll",
    "all_reduce by one_shot",
    "all_reduce by two_shot",
    "matmul_all_reduce by auto",
    "matmul_all_reduce by copy_engine",
    "matmul_all_reduce by epilogue",
    "matmul_all_reduce by unfused",
    "matmul_all_reduce by unfused_ll",
    "matmul_all_reduce by unfused_one_shot",
];

/// Tests output and wire types that differ from the input's.
#[test]
fn types_of_output_and_wire() {
    let mut cases = Vec::new();
    for dtype in TYPES {
        for output in TYPES {
            for wire in TYPES {
                for input in [Input::Integers, Input::Reals] {
                    let options = Options::new(19, 23, 31).dtype(dtype).output(output).wire(wire);
                    let options = options.tile(TileShape { m: 7, n: 9 }).columns_per_flag(5);
                    for mut case in Case::each(&options) {
                        if !case.op.multiplies() && dtype != output {
                            continue;
                        }
                        case.input = input;
                        cases.push(case);
                    }
                }
            }
        }
    }
    run_all(3, 1, &cases).unwrap();
    if Level::from_env() > Level::Quick {
        run_all(1, 1, &cases).unwrap();
        run_all(4, 1, &cases).unwrap();
    }
}

/// Tests options that choose the root, fetchers, workgroups, columns per flag, and the layout of
/// the staging buffer.
#[test]
fn choices_of_the_plan() {
    let mut cases = Vec::new();
    let options = Options::new(37, 26, 43).tile(TileShape { m: 6, n: 11 });
    for op in Op::ALL.into_iter().filter(|op| op.options().contains(&"root")) {
        for variant in op.variants() {
            let with = |root| Case::new(op, variant, options.clone().root(root));
            cases.extend((0..3).map(with));
        }
    }
    for shard in [Shard::Rows, Shard::Columns] {
        for staging in [StagingLayout::KContiguous, StagingLayout::MContiguous] {
            for columns_per_flag in [1, 6, 256, 500, 43, 7] {
                for fetchers in [0, 1, 2, 3, 100] {
                    for workgroups in [1, 2, 3] {
                        let options = options.clone().shard(shard).staging(staging);
                        let options = options.columns_per_flag(columns_per_flag);
                        let options = options.fetchers(fetchers).workgroups(workgroups);
                        cases.push(Case::new(Op::AllGatherMatmul, "staged", options));
                    }
                }
            }
        }
    }
    for workgroups in [1, 2] {
        for case in Case::each(&options.clone().workgroups(workgroups)) {
            cases.push(case);
        }
    }
    run_all(3, 3, &cases).unwrap();
}

/// Tests that the variant that `auto` chooses works, for small and for large results.
#[test]
fn the_automatic_choice_works() {
    for size in [1, 2, 4] {
        let mut cases = Vec::new();
        for (m, n, k) in [(8, 16, 16), (256, 300, 20)] {
            for op in Op::ALL {
                let k = if op.multiplies() { k } else { 0 };
                cases.push(Case::new(op, "auto", Options::new(m, n, k)));
            }
        }
        run_all(size, 1, &cases).unwrap();
    }
}

/// Tests that the columns of A that the ranks hold are concatenated along K in the order of ranks.
/// This is the smallest case in which another order changes the result.
#[test]
fn columns_m4_k_local2_w2() {
    let results = on_heaps(2, HeapOptions::new(), |world, heap| {
        let rank = world.rank();
        let (a, b) = (heap.alloc::<bf16>(8)?, heap.alloc::<bf16>(8)?);
        let c = heap.alloc::<f32>(8)?;
        // A has the elements 0..16, row-major; rank r has the columns 2r and 2r + 1.
        let shard = |at: usize| (at / 2 * 4 + 2 * rank + at % 2) as f32;
        heap.write(a, &(0..8).map(|at| bf16::from_f32(shard(at))).collect::<Vec<_>>())?;
        let right = [1.0, 0.0, 10.0, 1.0, 100.0, 2.0, -7.0, 3.0].map(bf16::from_f32);
        heap.write(b, &right)?;
        let mut results = Vec::new();
        for variant in ["baseline", "pull", "staged"] {
            let options = Options::new(4, 2, 4).dtype(DType::BF16).output(DType::F32);
            let options = options.shard(Shard::Columns).tile(TileShape { m: 2, n: 2 });
            let plan = plan(Op::AllGatherMatmul, variant, &world, &options)?;
            let op = AllGatherMatmul::new(&heap, &plan)?;
            let stream = heap.stream()?;
            heap.write(c, &[f32::NAN; 8])?;
            let (a, b) = (MatRef::sym(a, 4, 2), MatRef::sym(b, 4, 2));
            op.run(&MatmulArgs::new(a, b, MatRef::sym(c, 4, 2)), &stream)?;
            stream.sync()?;
            results.push(heap.read(c)?);
            op.free()?;
        }
        Ok(results)
    });
    let rows = [[189.0, 14.0], [605.0, 38.0], [1021.0, 62.0], [1437.0, 86.0]];
    for result in results.into_iter().flatten() {
        assert_eq!(result, rows.concat());
    }
}
