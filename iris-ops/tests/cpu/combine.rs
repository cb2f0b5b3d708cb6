//! Tests of sums of weighted parts: results bit by bit against the same steps apart, and errors.

use half::{bf16, f16};
use iris_heap::{Bytes, DType, Element, HeapOptions, Stream, SymmetricHeap, World};
use iris_ops::{
    AllReduce, AnyOp, CollectiveArgs, Device, HeapReserve, MatRef, NormArgs, Op, OpError, Plan,
    ReduceScatter, Topology, Variant, all_reduce, reduce_scatter,
};
use iris_testkit::combine::{Case, Combined};
use iris_testkit::error_texts::fails;

/// Runs calls of each case on `size` ranks.
fn check<T: Element>(size: usize, cases: &[Case], calls: &[usize]) {
    World::run_threads(size, |world| -> anyhow::Result<()> {
        let options = HeapOptions::new().data_bytes(4 << 20).signal_bytes(8 << 20).threads(2);
        let heap = SymmetricHeap::open(&world, options)?;
        for &case in cases {
            Combined::<T>::new(&heap, case)?.check_calls(calls)?;
        }
        heap.close()?;
        Ok(world.close()?)
    })
    .unwrap();
}

/// Cases of one operator: 1 to 8 parts, rows of whole vectors and of odd lengths, added matrices, and
/// an RMSNorm if the operator has one.
fn cases(op: Op, parts: usize) -> Vec<Case> {
    let of = |n| Case::new(op, [9, n, parts]);
    let mut all = vec![
        of(16),
        Case { added: 2, ..of(7) },
        Case { added: 1, gap: 5, in_place: true, ..of(12) },
        Case { added: 2, gap: 8, invariant: true, ..of(24) },
        Case { gelu: true, added: 2, ..of(8) },
        Case { special: true, added: 1, ..of(20) },
        Case { wire: Some(DType::BF16), added: 2, ..of(10) },
    ];
    if op == Op::AllReduce {
        all.extend([
            Case { norm: true, ..of(16) },
            Case { norm: true, added: 1, in_place: true, ..of(20) },
            Case { norm: true, added: 2, gap: 8, ..of(264) },
            Case { norm: true, added: 2, gelu: true, wire: Some(DType::F32), ..of(36) },
        ]);
    }
    all
}

/// Tests both operators with all types and 1, 2, 3, 5 and 8 ranks, in calls whose rows are split
/// unevenly, and in which some ranks or all have none.
#[test]
fn weighted_parts_are_summed_like_the_same_steps_apart() {
    for (at, size) in [1, 2, 3, 5, 8].into_iter().enumerate() {
        for op in [Op::AllReduce, Op::ReduceScatter] {
            let calls = [9, 1, 0, size.min(9), 4];
            check::<f32>(size, &cases(op, 1 + at), &calls);
            check::<bf16>(size, &cases(op, 8 - at), &calls);
            check::<f16>(size, &cases(op, 1 + (at + 5) % 8), &calls);
        }
    }
}

/// Tests that a row has the same bits in calls of other sizes and at other places, with and without the
/// option, because its sums have one order.
#[test]
fn rows_of_weighted_parts_have_the_same_bits_in_every_batch() {
    const N: usize = 40;
    const PARTS: usize = 3;
    for size in [2, 3, 5] {
        World::run_threads(size, |world| -> anyhow::Result<()> {
            let plan = all_reduce::Options::rows(7, N).dtype(DType::BF16).rms_norm(1e-5);
            let plan = plan.combine(PARTS).batch_invariant(true).plan(&world)?;
            let heap = Plan::open_heap(&world, &[&plan], HeapReserve::matrices())?;
            let op = AllReduce::new(&heap, &plan)?;
            let (parts, sum) = (heap.alloc(7 * PARTS * N)?, heap.alloc::<bf16>(7 * N)?);
            let (weights, scale) = (heap.alloc(7 * PARTS)?, heap.ones::<bf16>(N)?);
            let normed = heap.alloc::<bf16>(7 * N)?;
            let stream = heap.stream()?;
            let mut seen: Option<[Vec<u16>; 2]> = None;
            for (m, at) in [(1, 0), (7, 6), (7, 0), (4, 2), (2, 1)] {
                // All other rows differ from call to call.
                let other = |row: usize| if row == at { 1 } else { 10 * m + row };
                let number = |row: usize, col: usize| {
                    iris_heap::random_unit(other(row) as u64, world.rank(), col)
                };
                let rows = |cols: usize| {
                    (0..7 * cols).map(move |at| number(at / cols, at % cols)).collect::<Vec<_>>()
                };
                let values: Vec<_> = rows(PARTS * N).into_iter().map(bf16::from_f64).collect();
                heap.write(parts, &values)?;
                let factors: Vec<_> = rows(PARTS).into_iter().map(|it| it as f32).collect();
                heap.write(weights, &factors)?;
                let norm = NormArgs::new(MatRef::sym(scale, 1, N), MatRef::sym(normed, m, N));
                let args =
                    CollectiveArgs::new(MatRef::sym(parts, m, PARTS * N), MatRef::sym(sum, m, N));
                let args = args.weights(MatRef::sym(weights, m, PARTS)).norm(norm);
                op.run(&args, &stream)?;
                stream.sync()?;
                let row = |slice| -> anyhow::Result<Vec<u16>> {
                    let all = heap.read::<bf16>(slice)?;
                    Ok(all[at * N..(at + 1) * N].iter().map(|it| it.to_bits()).collect())
                };
                let rows = [row(sum)?, row(normed)?];
                let first = seen.get_or_insert(rows.clone());
                anyhow::ensure!(*first == rows, "row {at} of {m} at rank {}", world.rank());
            }
            heap.close()?;
            Ok(world.close()?)
        })
        .unwrap();
    }
}

/// Tests that planning refuses what a sum of weighted parts cannot be, with the value and what to use
/// instead.
#[test]
fn plans_of_weighted_parts_name_what_they_refuse() {
    let rows = |m, n| all_reduce::Options::rows(m, n).dtype(DType::BF16);
    let four = || Topology::new(0, 4);
    let plan = rows(8, 7168).combine(8).plan(four()).unwrap();
    let text = plan.to_string();
    assert!(text.starts_with("all_reduce of 8 x 7168 bf16 from 8 parts, rank 0 of 4"), "{text}");
    assert!(text.contains(": ll by tiles"), "{text}");
    assert_eq!((plan.shapes(3).a, plan.shapes(3).c), ((3, 8 * 7168), (3, 7168)));
    let scatter = |m| reduce_scatter::Options::rows(m, 7168).dtype(DType::BF16).combine(8);
    let plan = scatter(10).plan(Topology::new(1, 4)).unwrap();
    assert_eq!((plan.shapes(10).a, plan.shapes(10).c), ((10, 8 * 7168), (3, 7168)));
    fails(rows(8, 7168).combine(0).plan(four()), &["number of parts is 0", "from 1 to 149796"]);
    let parts = ["number of parts is 149797", "from 1 to 149796"];
    fails(rows(8, 7168).combine(149_797).plan(four()), &parts);
    let elements = all_reduce::Options::new(64).combine(2);
    fails(elements.plan(four()), &["message with combine is 64 elements", "Options::rows"]);
    let push = rows(8, 64).variant(all_reduce::Variant::TwoShot).combine(2);
    let instead = "sum the parts of each row before the call, and plan without combine";
    fails(push.plan(four()), &["variant with combine is two_shot", "auto or ll", instead]);
    fails(rows(8, 64).combine(2).plan(four().on_nodes(2)), &["number of nodes is 2", instead]);
    fails(rows(8, 64).reserve_sms(2).combine(2).plan(four()), &["reserve_sms is 2", "0 with"]);
    // 147 rows have 2107392 bytes, and so has a rank's part of 4 * 147 rows.
    let parts = ["2107392 bytes from one rank to another", "at most 2097152", instead];
    fails(rows(147, 7168).combine(8).plan(four()), &parts);
    fails(scatter(4 * 147).plan(four()), &parts);
    assert_eq!(scatter(4 * 146).plan(four()).unwrap().variant(), Variant::Ll);
    assert_eq!(scatter(4 * 147).plan(Topology::new(0, 1)).unwrap().variant(), Variant::Ll);
    let odd = rows(8, 66).rms_norm(1e-5).combine(2);
    fails(odd.plan(four()), &["n with rms_norm of variant ll is 66", "a multiple of 4"]);
    let h200 = four().on_device(Device::named("h200").unwrap());
    assert!(rows(8, 7168).combine(8).plan(h200).unwrap().predicted_us(8).is_some());
}

fn refused(outcome: Result<(), OpError>, parts: &[&str]) {
    let text = fails(outcome, parts);
    assert!(text.contains("of 6 x 4 f32 from 2 parts at "), "{text}");
}

/// Tests that wrong calls are refused before anything is launched, and that the next call is right.
#[test]
fn wrong_calls_of_weighted_parts_are_refused() {
    World::run_threads(2, |world| -> anyhow::Result<()> {
        let plan = all_reduce::Options::rows(6, 4).combine(2).plan(&world)?;
        let normed = all_reduce::Options::rows(6, 4).combine(2).rms_norm(1e-5).plan(&world)?;
        let scatter = reduce_scatter::Options::rows(6, 4).combine(2).plan(&world)?;
        let plain = all_reduce::Options::rows(6, 4).plan(&world)?;
        let plans = [&plan, &normed, &scatter, &plain];
        let heap = Plan::open_heap(&world, &plans, Bytes::new(1 << 16))?;
        let op = AllReduce::new(&heap, &plan)?;
        let stream = heap.stream()?;
        let (x, w) = (heap.full::<f32>(60, 1.0)?, heap.full::<f32>(20, 0.5)?);
        let (y, z) = (heap.zeros::<f32>(60)?, heap.full::<f32>(60, 3.0)?);
        let halves = heap.zeros::<f16>(60)?;
        let [input, output] = [MatRef::sym(x, 6, 8), MatRef::sym(y, 6, 4)];
        let (weights, third) = (MatRef::sym(w, 6, 2), MatRef::sym(z, 6, 4));
        let bare = CollectiveArgs::new(input, output);
        let right = bare.weights(weights);
        let overlap = |first: &'static str| format!("output and {first} overlap");
        let mistakes: [(CollectiveArgs, &[&str]); 11] = [
            (bare, &["weights of the call is missing", "M x 2 f32, because the plan has combine"]),
            (bare.weights(MatRef::sym(w, 6, 3)), &["weights is 6 x 3", "6 x 2"]),
            (bare.weights(MatRef::sym(halves, 6, 2)), &["weights has element type f16", "f32"]),
            (
                CollectiveArgs::new(MatRef::sym(x, 6, 4), output).weights(weights),
                &["input is 6 x 4", "6 x 8"],
            ),
            (
                right.plus(third).plus(third).plus(third),
                &["number of matrices added by the call is 3", "at most 2, the residual included"],
            ),
            (right.plus(MatRef::sym(z, 5, 4)), &["added matrix 1 is 5 x 4", "6 x 4"]),
            (
                right.plus(third).plus(MatRef::sym(halves, 6, 4)),
                &["added matrix 2 has element type f16", "f32"],
            ),
            (
                right.plus(third).plus(MatRef::sym(y.slice(4..)?, 6, 4)),
                &[&overlap("added matrix 2")],
            ),
            (
                CollectiveArgs::new(MatRef::sym(y, 6, 8), output).weights(weights),
                &[&overlap("input")],
            ),
            (bare.weights(MatRef::sym(y, 6, 2)), &[&overlap("weights")]),
            (right.norm(NormArgs::new(output, third)), &["norm of the call is given", "none"]),
        ];
        for (mistake, parts) in &mistakes {
            refused(op.run(mistake, &stream), parts);
        }
        // The output may be a matrix that is added.
        op.run(&right.plus(third).plus(output), &stream)?;
        stream.sync()?;
        assert_eq!(heap.read(y)?[..24], [5.0; 24]); // 2 ranks * 2 parts * 0.5 + 3 + 0
        let norms = AllReduce::new(&heap, &normed)?;
        let norm = NormArgs::new(MatRef::sym(w, 1, 4), MatRef::sym(x.slice(48..)?, 3, 4));
        let rows = |slice| MatRef::sym(slice, 3, 4);
        let three = CollectiveArgs::new(MatRef::sym(x, 3, 8), rows(y))
            .weights(MatRef::sym(w.slice(8..)?, 3, 2))
            .norm(norm.residual(rows(z)));
        let parts = ["number of matrices added by the call is 3", "the residual included"];
        refused(norms.run(&three.plus(rows(z)).plus(rows(z)), &stream), &parts);
        // A reduce-scatter adds matrices with the rows that this rank gets.
        let scattering = ReduceScatter::new(&heap, &scatter)?;
        let args = CollectiveArgs::new(input, rows(y)).weights(weights);
        refused(scattering.run(&args.plus(third), &stream), &["added matrix 1 is 6 x 4", "3 x 4"]);
        scattering.run(&args.plus(rows(z)), &stream)?;
        stream.sync()?;
        assert_eq!(heap.read(y)?[..12], [5.0; 12]);
        // A plan without `combine` takes neither weights nor matrices to add.
        let sums = AllReduce::new(&heap, &plain)?;
        let args = CollectiveArgs::new(third, output);
        let parts = ["weights of the call is given", "none, because the plan has no combine"];
        fails(sums.run(&args.weights(weights), &stream), &parts);
        let parts = ["matrices added by the call is 1", "0, because the plan has no combine"];
        fails(sums.run(&args.plus(output), &stream), &parts);
        fails(AnyOp::new(&heap, &plan).map(drop), &["combine of the plan is 2", "none"]);
        heap.close()?;
        Ok(world.close()?)
    })
    .unwrap();
}

/// Tests that ranks with different numbers of parts, or of added matrices, get an error.
#[test]
fn ranks_that_combine_differently_get_an_error() {
    let made = World::run_threads(2, |world| -> anyhow::Result<String> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
        let plan = all_reduce::Options::rows(6, 4).combine(2 + world.rank()).plan(&heap)?;
        let error: OpError = AllReduce::new(&heap, &plan).map(drop).unwrap_err();
        heap.close()?;
        world.close()?;
        Ok(error.to_string())
    });
    for text in made.unwrap() {
        fails::<()>(Err(text), &["k", "2", "3"]);
    }
    let run = |added: [usize; 2]| {
        let outcome = World::run_threads(2, |world| -> anyhow::Result<()> {
            let plan = all_reduce::Options::rows(1, 4).combine(1).plan(&world)?;
            let heap = Plan::open_heap(&world, &[&plan], Bytes::new(1 << 16))?;
            let op = AllReduce::new(&heap, &plan)?;
            let (x, w) = (heap.ones::<f32>(4)?, heap.ones::<f32>(1)?);
            let (y, z) = (heap.zeros::<f32>(4)?, heap.zeros::<f32>(4)?);
            let [x, y, z] = [x, y, z].map(|slice| MatRef::sym(slice, 1, 4));
            let args = CollectiveArgs::new(x, y).weights(MatRef::sym(w, 1, 1));
            let args = (0..added[world.rank()]).fold(args, |args, _| args.plus(z));
            let stream: Stream = heap.stream()?;
            op.run(&args, &stream)?;
            Ok(stream.sync()?)
        });
        format!("{:#}", outcome.unwrap_err())
    };
    fails::<()>(Err(run([0, 1])), &["residual"]);
    fails::<()>(Err(run([1, 2])), &["2 added matrices", "1 added matrices"]);
}
