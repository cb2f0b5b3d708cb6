//! Tests of plans that must be refused, and of extreme numbers. Plans are made without a world.

use iris_heap::{BackendKind, DType};
use iris_ops::{Epilogue, TileShape, Topology, Variant, all_reduce};
use iris_testkit::error_texts::fails;
use iris_testkit::suite::{Op, Options, plan};

#[test]
fn plans_that_make_no_sense_are_refused() {
    let ranks = Topology::new(0, 2);
    let base = || Options::new(8, 6, 4);
    let tile = |m, n| base().tile(TileShape { m, n });
    let refused = |op: Op, options: Options, message: &str| {
        for variant in op.variants() {
            let text = fails(plan(op, variant, ranks, &options), &[message]);
            assert!(text.starts_with(op.name()), "{text}");
        }
    };
    for op in Op::ALL {
        if op != Op::Barrier {
            refused(op, tile(0, 4), "tile is 0 x 4");
            refused(op, tile(4, 65537), "tile is 4 x 65537");
            refused(op, base().dtype(DType::I32), "dtype is i32");
            if op.options().contains(&"wire") {
                refused(op, base().wire(DType::U8), "wire is u8");
            }
            refused(op, Options::new(1 << 30, 4, 4), "m is 1073741824");
            refused(
                op,
                Options::new(1 << 29, 1 << 29, 4).tile(TileShape { m: 1, n: 1 }),
                "signals",
            );
        }
        if op != Op::Barrier {
            refused(op, base().workgroups(0), "workgroups is 0");
        }
        if !op.multiplies() && op != Op::Barrier {
            refused(op, base().output(DType::F16), "output is f16");
        }
    }
    refused(Op::Broadcast, base().root(2), "root is 2");
    let staged = base().columns_per_flag(0);
    let error = plan(Op::AllGatherMatmul, "staged", ranks, &staged).unwrap_err().to_string();
    assert!(error.contains("columns_per_flag is 0"), "{error}");
    let finishes = |op: &Op| op.options().contains(&"epilogue") || *op == Op::Barrier;
    for op in Op::ALL.into_iter().filter(|op| !finishes(op)) {
        refused(op, base().epilogue(Epilogue::Gelu), "epilogue is Gelu");
    }
    for (ranks, message) in [
        (Topology::new(0, 0), "world"),
        (Topology::new(0, 65), "world"),
        (Topology::new(2, 2), "rank is 2"),
    ] {
        fails(plan(Op::AllReduce, "auto", ranks, &base()), &[message]);
    }
    fails(plan(Op::AllReduce, "ring", ranks, &base()), &["ring", "two_shot"]);
}

/// Tests that invalid plans with an RMSNorm are refused, and that the error lists the variants that
/// support one.
#[test]
fn norms_that_make_no_sense_are_refused() {
    let ranks = Topology::new(0, 2);
    let base = || Options::new(8, 6, 4).rms_norm(1e-5);
    let refused = |op: Op, variant: &str, options: &Options, message: &str| {
        let text = fails(plan(op, variant, ranks, options), &[message]);
        assert!(text.starts_with(op.name()), "{text}");
    };
    for epsilon in [0.0, -1e-5, f32::NAN, f32::INFINITY] {
        let expected =
            format!("epsilon of rms_norm is {epsilon}, expected a finite number above 0");
        refused(Op::AllReduce, "auto", &base().rms_norm(epsilon), &expected);
    }
    // A plan with an RMSNorm is accepted even if its tiles are narrower than a row.
    plan(Op::AllReduce, "one_shot", ranks, &base().tile(TileShape { m: 2, n: 5 })).unwrap();
    let wide = Options::new(1, 65537, 4).rms_norm(1e-5);
    refused(
        Op::MatmulAllReduce,
        "unfused",
        &wide,
        "n with rms_norm is 65537, expected at most 65536",
    );
    for (op, able) in [
        (Op::AllReduce, "auto, one_shot, two_shot, ll"),
        (Op::MatmulAllReduce, "auto, unfused, unfused_one_shot, unfused_ll, copy_engine, epilogue"),
    ] {
        for variant in op.variants() {
            if able.split(", ").any(|name| name == variant.name()) {
                plan(op, variant, ranks, &base()).unwrap();
                continue;
            }
            let expected = format!("variant with rms_norm is {variant}, expected {able}");
            refused(op, variant.name(), &base(), &expected);
        }
    }
    let odd = Options::new(8, 7, 4).rms_norm(1e-5);
    let expected = "n with rms_norm of variant ll is 7, expected a multiple of 2";
    refused(Op::AllReduce, "ll", &odd, expected);
    for op in Op::ALL.into_iter().filter(|op| !op.options().contains(&"rms_norm")) {
        let what =
            if op == Op::Barrier { continue } else { "rms_norm is 0.00001, expected the default" };
        refused(op, "auto", &base(), what);
    }
    // A message given by its number of elements has no rows, so it cannot have an RMSNorm.
    fails(
        all_reduce::Options::new(48).rms_norm(1e-5).plan(ranks),
        &["message with rms_norm is 48 elements, expected a plan by rows"],
    );
}

/// Tests that numbers are checked before anything is computed from them: every number leads to a
/// plan or to an error, and no computation overflows.
#[test]
fn no_number_is_too_large_to_be_refused() {
    let sizes =
        [0, 1, (1 << 29) + 1, 1 << 30, 1 << 31, 1 << 32, (1 << 32) + 8, 1 << 63, usize::MAX];
    let refused = |op: Op, variant: &str, backend, options: &Options| {
        let options = options.clone().backend(backend);
        let planned = plan(op, variant, Topology::new(1, 3), &options);
        planned.map(|plan| (plan.data_bytes(), plan.signal_bytes())).is_err()
    };
    for op in Op::ALL {
        let dimensions = match op {
            Op::Barrier => 0,
            _ if op.multiplies() => 3,
            _ => 2,
        };
        for variant in ["auto"].into_iter().chain(op.variants().into_iter().map(Variant::name)) {
            for backend in [BackendKind::Cpu, BackendKind::Cuda] {
                let refused = |options: &Options| refused(op, variant, backend, options);
                for (m, n, k) in sizes
                    .iter()
                    .flat_map(|&m| sizes.iter().flat_map(move |&n| sizes.map(|k| (m, n, k))))
                {
                    let options = Options::new(m, n, k);
                    let large = [m, n, k].iter().take(dimensions).any(|&size| size >= 1 << 30);
                    assert!(refused(&options) || !large, "{op} {variant}: {m} x {n} x {k}");
                    refused(&options.tile(TileShape { m: 65536, n: 65536 }));
                }
                let options = || Options::new(8, 6, 4);
                assert!(!refused(&options()), "{op} {variant}");
                for size in sizes.into_iter().filter(|&size| size >= 1 << 31) {
                    let [staged, fetchers] =
                        [options().columns_per_flag(size), options().fetchers(size)];
                    let root = options().root(size);
                    let staged = refused(&staged) && refused(&fetchers);
                    assert_eq!(staged, variant == "staged", "{op}: {size} columns, fetchers");
                    let read = op.options().contains(&"root");
                    assert_eq!(refused(&root), read, "{op}: root {size}");
                    assert!(refused(&options().members(vec![0, size])), "{op}: member {size}");
                    refused(&options().workgroups(size));
                }
                refused(&options().trace_spans(u32::MAX));
                refused(&options().columns_per_flag(1 << 29));
                // The option `members` is an error for every op except the barrier.
                assert!(refused(&options().members(vec![70])), "{op} {variant}");
                let some = refused(&options().members(vec![0, 1]));
                assert_eq!(some, op != Op::Barrier, "{op} {variant}");
            }
        }
    }
}
