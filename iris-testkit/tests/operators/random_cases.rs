//! Tests of random shapes, tiles, layouts and options of every op against a reference.

use iris_heap::DType;
use iris_ops::{Epilogue, Shard, StagingLayout, TileShape};
use iris_testkit::Level;
use iris_testkit::harness::rows;
use iris_testkit::suite::{Case, Input, Layout, Op, Options};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};

use crate::common::{run_all, taken};

fn dtype() -> impl Strategy<Value = DType> {
    select(vec![DType::F32, DType::F16, DType::BF16])
}

fn layout() -> impl Strategy<Value = Layout> {
    let flag = || prop::bool::weighted(0.2);
    (flag(), 0..5usize, 0..9usize, flag(), flag(), flag()).prop_map(
        |(transposed, pad, before, skewed, external, external_on_odd)| Layout {
            transposed,
            pad,
            before,
            skewed,
            external,
            external_on_odd,
            ..Layout::default()
        },
    )
}

fn options() -> impl Strategy<Value = Options> {
    let shape = (1..90usize, 0..90usize, 0..90usize);
    let types = (dtype(), prop::option::of(dtype()), prop::option::of(dtype()));
    let tile = prop::option::of((1..40usize, 1..40usize));
    let staged = (1..100usize, prop::option::of(0..4usize), any::<bool>());
    let rest = (any::<bool>(), prop::bool::weighted(0.2), any::<i32>());
    (shape, types, tile, staged, rest).prop_map(
        |((m, n, k), (dtype, output, wire), tile, staged, (columns, gelu, first_call))| {
            let (columns_per_flag, fetchers, m_contiguous) = staged;
            let mut options = Options::new(m, n, k).dtype(dtype).first_call(first_call);
            (options.output, options.wire, options.staged.fetchers) = (output, wire, fetchers);
            options.tile = tile.map(|(m, n)| TileShape { m, n });
            options = options.columns_per_flag(columns_per_flag);
            if m_contiguous {
                options = options.staging(StagingLayout::MContiguous);
            }
            if columns {
                options = options.shard(Shard::Columns);
            }
            if gelu {
                options = options.epilogue(Epilogue::Gelu);
            }
            options
        },
    )
}

fn case() -> impl Strategy<Value = Case> {
    let op = select(Op::ALL.to_vec()).prop_flat_map(|op| (Just(op), select(op.variants())));
    let rows = prop::collection::vec(0..1000usize, 1..6);
    let flags = [any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()];
    let layouts = [layout().boxed(), layout().boxed(), layout().boxed()];
    (op, options(), rows, flags, layouts, 0..1000u64).prop_map(
        |(
            (op, variant),
            mut options,
            rows,
            [bias, uneven, in_place, burst, reals],
            layouts,
            seed,
        )| {
            if !op.multiplies() {
                (options.k, options.output) = (0, None);
            }
            if Case::sends_sums_as_items(op, variant) {
                options.wire = None;
            }
            let most = options.m + 1;
            let mut case = Case::new(op, variant, options);
            case.rows = rows.into_iter().map(|m| m % most).collect();
            (case.bias, case.uneven, case.in_place, case.burst) = (bias, uneven, in_place, burst);
            [case.a, case.b, case.c] = layouts;
            case.seed = seed;
            if reals {
                case.input = Input::Reals;
            }
            case
        },
    )
}

/// Runs random lists of cases in `worlds` worlds; a failure prints the smallest list that fails.
fn random_cases(size: usize, threads: usize, worlds: u32) {
    let cases = prop::collection::vec(case(), 40);
    let mut runner =
        TestRunner::new(Config { cases: worlds, failure_persistence: None, ..Config::default() });
    let verdict = runner.run(&cases, |cases| {
        let cases: Vec<_> = cases.into_iter().filter(|case| taken(case, size)).collect();
        run_all(size, threads, &cases).map_err(|e| TestCaseError::fail(format!("{e:?}")))
    });
    verdict.unwrap_or_else(|e| panic!("{e}"));
}

fn worlds() -> u32 {
    Level::from_env().pick(2, 25, 200)
}

rows! {
    random_cases_1_rank_2_threads: random_cases(1, 2, worlds());
    random_cases_2_ranks_3_threads: random_cases(2, 3, worlds());
    random_cases_3_ranks_1_thread: random_cases(3, 1, worlds());
    random_cases_5_ranks_2_threads: random_cases(5, 2, worlds());
}
