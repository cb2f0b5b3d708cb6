//! Call numbers at the ends of their range, and the traffic of each variant, measured by counters
//! and traces.

use iris_heap::HeapOptions;
use iris_ops::{
    AllGatherMatmul, AllReduce, CollectiveArgs, MatRef, MatmulArgs, Shard, TileShape, TraceSpan,
};
use iris_sync::Span;
use iris_testkit::Level;
use iris_testkit::suite::{Case, Op, Options, Report, plan, run_case};
use iris_testkit::worlds::on_heaps;

use crate::common::run_all;

/// Tests calls near the two places in the range of call numbers that are special: where the number
/// changes sign, and where all words are refreshed. Most calls use only some of the tiles.
#[test]
fn counters_at_the_ends_of_their_range() {
    let mut firsts = vec![i32::MAX - 3, i32::MIN, -2];
    firsts.extend((-3..=3).map(|multiple: i32| (multiple << 29) - 3));
    for (at, first_call) in firsts.into_iter().enumerate() {
        if Level::from_env() <= Level::Quick && at > 3 {
            break;
        }
        let options = Options::new(30, 20, 12).tile(TileShape { m: 4, n: 8 }).columns_per_flag(12);
        let cases = Case::each(&options.first_call(first_call));
        let with = |rows: &[usize], burst| {
            let change = move |case: &Case| {
                let mut case = case.clone();
                (case.rows, case.burst) = (rows.to_vec(), burst);
                case
            };
            cases.iter().map(change).collect::<Vec<_>>()
        };
        let few = with(&[30, 1, 5, 0, 2, 30, 7], false);
        let burst = with(&[3, 30, 1, 1, 4, 1, 30], true);
        run_all(3, 2, &[few, burst].concat()).unwrap();
        run_all(2, 1, &with(&[1, 1, 1, 1, 1, 1, 30], true)).unwrap();
    }
}

/// Runs one case in a world of `size` ranks and returns the reports of all ranks.
fn reports(size: usize, case: &Case) -> Vec<Report> {
    on_heaps(size, HeapOptions::new().threads(1), |_, heap| run_case(&heap, case))
}

/// Tests that the numbers of bytes that variants move have the ratios that the variants'
/// definitions imply. In addition, every case compares the bytes of each rank with the expected
/// number.
#[test]
fn variants_move_what_their_names_say() {
    const SIZE: usize = 4;
    let options = Options::new(32, 64, 16).tile(TileShape { m: 8, n: 16 });
    let message = (32 * 64 * 4) as f64;
    let report = |op, variant| {
        let mut case = Case::new(op, variant, options.clone());
        case.rows = vec![32];
        reports(SIZE, &case)
    };
    let mean = |reports: &[Report], f: fn(&Report) -> u64| {
        reports.iter().map(|report| f(report) as f64).sum::<f64>() / SIZE as f64
    };
    let peers = (SIZE - 1) as f64;
    for (variant, factor) in [("one_shot", peers), ("two_shot", 2.0 * peers / SIZE as f64)] {
        let reports = report(Op::MatmulAllReduce, variant);
        let pushed = mean(&reports, |report| report.counters.unwrap().pushed);
        assert_eq!(pushed, message * factor, "{variant}");
        assert!(reports.iter().all(|report| report.counters.unwrap().pulled == 0), "{reports:?}");
    }
    let reports = report(Op::MatmulReduceScatter, "push");
    assert_eq!(mean(&reports, |r| r.counters.unwrap().pushed), message * peers / SIZE as f64);
    let a = (32 * 16 * 4) as f64;
    for variant in ["baseline", "pull", "staged"] {
        let reports = report(Op::AllGatherMatmul, variant);
        let [pushed, pulled, flags] = [
            mean(&reports, |r| r.counters.unwrap().pushed),
            mean(&reports, |r| r.counters.unwrap().pulled),
            mean(&reports, |r| r.counters.unwrap().flags),
        ];
        let remote = a * peers / SIZE as f64;
        match variant {
            // A tile has 256 columns, so C has four columns of tiles, and each remote row is read
            // once for each of them.
            "pull" => assert_eq!((pushed, pulled, flags), (0.0, 4.0 * remote, 0.0)),
            "staged" => assert_eq!((pushed, pulled, flags), (0.0, remote, peers)),
            _ => assert_eq!((pushed, pulled, flags), (remote, 0.0, 0.0)),
        }
    }
}

/// Trace spans of one kind, of all workgroups.
fn of_kind(trace: &[Vec<TraceSpan>], kind: Span) -> Vec<TraceSpan> {
    trace.iter().flatten().filter(|span| span.kind == kind as u32).copied().collect()
}

/// Traces of `calls` operators, each of which makes one call; the indices are operator, workgroup
/// and span.
fn traces(variant: &str, calls: usize) -> Vec<Vec<Vec<TraceSpan>>> {
    let results = on_heaps(2, HeapOptions::new().threads(2), |world, heap| {
        let (m, n, k) = (256, 64, 256);
        // Fills the block that the trace will use with other data, which must not appear as trace
        // spans.
        let used = heap.full::<f32>(1 << 20, f32::NAN)?;
        heap.free(used)?;
        let options = Options::new(m, n, k).tile(TileShape { m: 16, n: 64 }).trace_spans(4096);
        let options = options.columns_per_flag(32).shard(Shard::Rows);
        let plan = plan(Op::AllGatherMatmul, variant, &world, &options)?;
        let a = heap.rand::<f32>(m * k, 1)?;
        let b = heap.rand::<f32>(k * n, 2)?;
        let c = heap.zeros::<f32>(m * n)?;
        let stream = heap.stream()?;
        let args =
            MatmulArgs::new(MatRef::sym(a, m / 2, k), MatRef::sym(b, k, n), MatRef::sym(c, m, n));
        let mut traces = Vec::new();
        for _ in 0..calls {
            let op = AllGatherMatmul::new(&heap, &plan)?;
            op.run(&args, &stream)?;
            stream.sync()?;
            traces.push(op.trace()?);
            op.free()?;
        }
        Ok(traces)
    });
    results.concat()
}

/// Tests that the staged variant multiplies while it fetches. The system's scheduler decides which
/// workgroup runs, so it is enough if one of ten calls shows the overlap. No call of the baseline
/// may show it.
#[test]
fn staged_multiplies_before_the_last_fetch_ends_and_baseline_does_not() {
    let overlaps = |trace: &Vec<Vec<TraceSpan>>| {
        let (fetches, products) = (of_kind(trace, Span::Fetch), of_kind(trace, Span::Gemm));
        assert!(!fetches.is_empty() && !products.is_empty(), "{} spans", trace.concat().len());
        let last = fetches.iter().map(|span| span.end).max();
        let first = products.iter().map(|span| span.begin).min();
        first < last
    };
    let staged = traces("staged", 10);
    for trace in &staged {
        let mut units: Vec<_> = of_kind(trace, Span::Fetch).iter().map(|span| span.what).collect();
        units.sort_unstable();
        let before = units.len();
        units.dedup();
        assert_eq!((before, units.len()), (64, 64), "each remote unit is fetched once");
    }
    assert!(staged.iter().any(overlaps));
    assert!(!traces("baseline", 10).iter().any(overlaps));
}

/// Tests that an operator without room for spans has no trace, and that an operator with too little
/// room has a truncated trace.
#[test]
fn traces_take_the_room_they_are_given() {
    let trace_of = |spans: u32| {
        on_heaps(2, HeapOptions::new().threads(1), |world, heap| {
            let options = Options::new(16, 16, 0).tile(TileShape { m: 4, n: 4 }).trace_spans(spans);
            let plan = plan(Op::AllReduce, "one_shot", &world, &options)?;
            let op = AllReduce::new(&heap, &plan)?;
            let a = heap.ones::<f32>(256)?;
            let stream = heap.stream()?;
            op.run(&CollectiveArgs::new(MatRef::sym(a, 16, 16), MatRef::sym(a, 16, 16)), &stream)?;
            stream.sync()?;
            Ok(op.trace()?)
        })
    };
    assert!(trace_of(0).iter().all(Vec::is_empty));
    assert!(trace_of(3).iter().all(|groups| groups.concat().len() == 3));
    for groups in trace_of(1000) {
        let spans = groups.concat();
        for (kind, least) in [(Span::Gemm, 16), (Span::Signal, 16), (Span::Reduce, 16)] {
            assert_eq!(of_kind(&groups, kind).len(), least, "{kind:?}");
        }
        assert!(spans.iter().all(|span| span.begin <= span.end && span.begin > 0));
    }
}
