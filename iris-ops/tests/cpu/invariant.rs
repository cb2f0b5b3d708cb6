//! Tests of the option `batch_invariant` on the CPU: the bits of a row in calls of any size, by every
//! variant, in worlds of several sizes; and refusals.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use half::{bf16, f16};
use iris_heap::{DType, Element, HeapOptions, SymmetricHeap, World, random_unit};
use iris_ops::comm::Options as CommOptions;
use iris_ops::{
    AnyOp, Device, Epilogue, Library, MatRef, Op, OpRequest, Operands, Shard, Topology, Variant,
};
use iris_testkit::bits::{Case, Rows};

/// Sizes of the worlds; with 2 ranks a sum has the same bits in both orders.
const WORLDS: [usize; 4] = [2, 3, 5, 8];

/// Number of rows of the largest calls, and numbers of rows of calls by each variant: around multiples
/// of tiles and of ranks.
const MOST: usize = 300;
const SOME: [usize; 14] = [1, 2, 3, 4, 7, 8, 9, 16, 31, 64, 65, 129, 256, 300];

const PRODUCTS: [(Op, Shard); 6] = [
    (Op::Matmul, Shard::Rows),
    (Op::MatmulAllReduce, Shard::Rows),
    (Op::MatmulReduceScatter, Shard::Rows),
    (Op::MatmulAllGather, Shard::Rows),
    (Op::AllGatherMatmul, Shard::Rows),
    (Op::AllGatherMatmul, Shard::Columns),
];

/// Runs `check` on a heap of worlds of several sizes.
fn on_worlds(check: fn((&World, &Arc<SymmetricHeap>)) -> Result<()>) {
    for size in WORLDS {
        let outcome = World::run_threads(size, |world| -> Result<()> {
            let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(32 << 20))?;
            check((&world, &heap)).with_context(|| format!("{size} ranks"))?;
            Ok(heap.close()?)
        });
        outcome.unwrap();
    }
}

/// Checks calls of the numbers of rows `rows`, of a plan for [`MOST`] rows, against a call of a plan for
/// one row.
fn check<T: Element, C: Element>(
    on: (&World, &Arc<SymmetricHeap>),
    case: &Case,
    rows: impl IntoIterator<Item = usize>,
) -> Result<()> {
    let one = Rows::<T, C>::new(on, &Case { variant: None, most: 1, ..case.clone() })?;
    let expected = one.alone()?;
    one.free()?;
    let all = Rows::<T, C>::new(on, case)?;
    for m in rows {
        all.check(m, m * 7 / 11, &expected)?;
    }
    all.free()
}

/// Products with the variants that the plan chooses, for every number of rows.
#[test]
fn rows_of_products_have_the_same_bits_in_calls_of_every_size() {
    on_worlds(|on| {
        for (op, shard) in PRODUCTS {
            let case = |n, k| Case { shard, ..Case::new(op, [n, k], MOST) };
            check::<f32, f32>(on, &case(19, 70), 1..=MOST)?;
            // More than one block of K.
            let deep = Case { epilogue: true, across: true, ..case(9, 530) };
            check::<bf16, f32>(on, &deep, 1..=MOST)?;
        }
        Ok(())
    });
}

#[test]
fn rows_of_products_have_the_same_bits_in_every_variant() {
    on_worlds(|on| {
        for (op, shard) in PRODUCTS {
            let case = |n, k| Case { shard, ..Case::new(op, [n, k], MOST) };
            for norm in [false, op == Op::MatmulAllReduce] {
                for case in (Case { norm, ..case(70, 19) }).of_variants::<f32, f32>(on.1) {
                    check::<f32, f32>(on, &case, SOME)?;
                }
            }
            let deep = Case { epilogue: true, ..case(33, 1100) };
            for case in deep.of_variants::<f16, f32>(on.1) {
                check::<f16, f32>(on, &case, SOME)?;
            }
            if op.options().contains(&"wire") {
                let rounded = Case { wire: Some(DType::BF16), ..case(5, 40) };
                for case in rounded.of_variants::<f32, f32>(on.1) {
                    check::<f32, f32>(on, &case, SOME)?;
                }
            }
        }
        Ok(())
    });
}

/// Messages of 1 to 64 rows by every variant; a rank owns one row or none, or several.
#[test]
fn rows_of_sums_have_the_same_bits_in_every_variant() {
    on_worlds(|on| {
        for op in [Op::AllReduce, Op::ReduceScatter] {
            let case = Case::new(op, [21, 0], 64);
            for case in case.of_variants::<f32, f32>(on.1) {
                check::<f32, f32>(on, &case, 1..=64)?;
            }
            let norm = op == Op::AllReduce;
            for case in (Case { norm, ..case }).of_variants::<bf16, bf16>(on.1) {
                check::<bf16, bf16>(on, &case, SOME.into_iter().filter(|&m| m <= 64))?;
            }
        }
        Ok(())
    });
}

/// Messages by their number of elements, around multiples of ranks and of a unit of 8 bytes, of vectors
/// and of tiles. All elements of a rank are equal, so all sums must be.
#[test]
fn sums_of_elements_have_the_same_bits_at_every_place() {
    on_worlds(|(world, heap)| {
        let most = 20_000;
        let counts = (1..=40).chain([64, 255, 256, 4095, 4096, 4097, 8193, 16_383, 16_385, most]);
        let value = random_unit(1, world.rank(), 0) as f32;
        let (a, c) = (heap.alloc::<f32>(most * world.size())?, heap.alloc::<f32>(most)?);
        heap.write(a, &vec![value; most * world.size()])?;
        let expected = world.allgather(&value.to_le_bytes())?.into_iter();
        let expected = expected.map(|it| f32::from_le_bytes(it.try_into().expect("four bytes")));
        let expected = expected.reduce(|sum, part| sum + part).expect("a rank");
        let stream = heap.stream()?;
        for op in [Op::AllReduce, Op::ReduceScatter] {
            let variants = op.variants().into_iter().map(Some).chain([None]);
            for variant in variants.filter(|it| it.is_none_or(|it| !it.order_varies())) {
                let mut request = op.request(0, most, 0);
                (request.elements, request.variant) = (true, variant);
                request.batch_invariant = true;
                // Elements that a call leaves out are then not those of an earlier variant.
                heap.write(c, &vec![f32::NAN; most])?;
                let made = AnyOp::new(heap, &request.plan(heap)?)?;
                for count in counts.clone() {
                    let shapes = made.plan().shapes(count);
                    let matrix = |slice, (rows, cols)| MatRef::sym(slice, rows, cols);
                    let operands =
                        Operands::new(matrix(a, shapes.a), matrix(a, (0, 0)), matrix(c, shapes.c));
                    made.run(&operands, &stream)?;
                    stream.sync()?;
                    let sums = heap.read(c.slice(..shapes.c.0 * shapes.c.1)?)?;
                    let other = sums.iter().position(|sum| sum.to_bits() != expected.to_bits());
                    ensure!(other.is_none(), "{op} {variant:?} of {count}: element {other:?}");
                    world.barrier()?;
                }
                made.free()?;
            }
        }
        Ok(())
    });
}

/// Tests that what cannot be batch invariant is refused by name, with what to use.
#[test]
fn what_is_not_batch_invariant_is_refused() {
    let h200 = Topology::new(0, 2).on_device(Device::named("h200").expect("a device"));
    let refused = |op: Op, ranks: Topology, change: fn(&mut OpRequest)| {
        let mut request = op.request(16, 64, 32);
        request.batch_invariant = true;
        change(&mut request);
        request.plan(ranks).expect_err("refused").to_string()
    };
    for (variant, change) in [
        ("spinlock", (|it| it.variant = Some(Variant::Spinlock)) as fn(&mut OpRequest)),
        ("atomic", |it| it.variant = Some(Variant::Atomic)),
    ] {
        let able = "auto, one_shot, two_shot, unfused, unfused_one_shot, unfused_ll, \
                    unfused_two_shot_ll, copy_engine, epilogue";
        assert_eq!(
            refused(Op::MatmulAllReduce, h200, change),
            format!(
                "matmul_all_reduce of 16 x 64 x 32 f32: variant with batch_invariant is {variant}, \
                 expected {able}"
            )
        );
    }
    assert_eq!(
        refused(Op::AllGatherMatmul, h200, |it| it.variant = Some(Variant::Staged)),
        "all_gather_matmul of 16 x 64 x 32 f32: variant with batch_invariant is staged, expected auto, \
         baseline, pull, unfused, copy_engine"
    );
    let columns = |variant| {
        let mut request = Op::AllGatherMatmul.request(16, 64, 32);
        (request.batch_invariant, request.shard) = (true, Shard::Columns);
        request.variant = Some(variant);
        request.plan(h200).expect_err("refused").to_string()
    };
    for variant in [Variant::Baseline, Variant::Pull, Variant::Staged] {
        assert_eq!(
            columns(variant),
            format!(
                "all_gather_matmul of 16 x 64 x 32 f32: variant with batch_invariant and a split of \
                 columns is {variant}, expected auto, unfused, copy_engine"
            )
        );
    }
    for ranks in [h200, Topology::new(0, 2)] {
        assert_eq!(
            refused(Op::Matmul, ranks, |it| it.library = Library::Vendor),
            "matmul of 16 x 64 x 32 f32: library with batch_invariant is vendor, expected auto, ours or \
             none: the bits of the vendor's product have not been compared with ours for this N, K and \
             types (`iris tune --bits`)"
        );
    }
    // cuBLASLt's bits were compared for this N and K on an H200, for products of one type.
    let mut request = Op::MatmulAllReduce.request(16, 8192, 3584);
    (request.batch_invariant, request.library, request.dtype) =
        (true, Library::Vendor, DType::BF16);
    assert!(request.plan(h200).is_ok());
    let refused_here = |request: &OpRequest, ranks: Topology| {
        let error = request.plan(ranks).expect_err("refused").to_string();
        assert!(error.contains("library with batch_invariant is vendor"), "{error}");
    };
    refused_here(&request, Topology::new(0, 2).on_device(Device::named("a100").expect("a device")));
    request.wire = Some(DType::F32);
    refused_here(&request, h200);
    let mut columns = Op::AllGatherMatmul.request(16, 64, 32);
    (columns.batch_invariant, columns.shard) = (true, Shard::Columns);
    assert!(columns.plan(h200.on_nodes(2)).is_ok());
    columns.library = Library::Vendor;
    refused_here(&columns, h200.on_nodes(2));
    // No other variant is refused.
    for op in Op::ALL {
        let mut request = op.request(16, 64, 32);
        request.batch_invariant = true;
        for variant in op.variants() {
            request.variant = Some(variant);
            let refused = [Variant::Spinlock, Variant::Atomic, Variant::Staged].contains(&variant);
            assert_eq!(request.plan(h200).is_err(), refused, "{op} {variant}");
        }
    }
    let nodes = Topology::new(0, 4).on_nodes(2);
    for op in [Op::MatmulAllReduce, Op::MatmulReduceScatter, Op::AllReduce, Op::ReduceScatter] {
        let error = refused(op, nodes, |_| ());
        let expected = "batch_invariant over several nodes is true, expected false: the order of sums \
                        between nodes depends on the number of rows";
        assert!(error.ends_with(expected), "{error}");
    }
    let error = CommOptions::new().batch_invariant(true).footprint(nodes).expect_err("refused");
    assert!(error.to_string().contains("batch_invariant over several nodes is true"), "{error}");
    assert!(CommOptions::new().batch_invariant(true).footprint(h200).is_ok());
    // Operators without sums between nodes keep the bits.
    for op in [Op::MatmulAllGather, Op::AllGatherMatmul, Op::AllGather, Op::Broadcast] {
        let mut request = op.request(16, 64, 32);
        request.batch_invariant = true;
        assert!(request.plan(nodes).is_ok(), "{op}");
    }
}

/// Tests that a variant that multiplies by tiles is refused where the whole-matrix GEMM, and it alone, adds
/// the products of several ranges of K; where another rank may do so, too.
#[test]
fn variants_by_tiles_are_refused_where_k_is_split() {
    let h200 = Topology::new(0, 2).on_device(Device::named("h200").expect("a device"));
    let refused = |op: Op, [n, k]: [usize; 2], change: fn(&mut OpRequest)| {
        let mut request = op.request(64, n, k);
        (request.batch_invariant, request.dtype) = (true, DType::BF16);
        change(&mut request);
        assert!(request.plan(h200).is_ok(), "{op} of {n} x {k}: auto");
        let mut is_refused = |variant: &Variant| {
            request.variant = Some(*variant);
            let plan = request.plan(h200);
            let error = plan.err().map(|error| error.to_string()).unwrap_or_default();
            error.contains("with batch_invariant and a small N with a large K")
        };
        op.variants().into_iter().filter(|it| is_refused(it)).collect::<Vec<_>>()
    };
    let [sums, gather] = [Op::MatmulAllReduce, Op::AllGatherMatmul];
    let by_tiles = [Variant::OneShot, Variant::TwoShot];
    let pulled = [Variant::Baseline, Variant::Pull, Variant::Staged];
    let split = [1024, 8192];
    assert_eq!(refused(sums, split, |_| ()), by_tiles);
    assert_eq!(refused(gather, split, |_| ()), pulled);
    assert!(refused(Op::Matmul, split, |_| ()).is_empty());
    // K of the sums may differ between ranks, and N of the gather.
    assert_eq!(refused(sums, [1024, 64], |_| ()), by_tiles);
    assert_eq!(refused(gather, [8192, 8192], |_| ()), pulled);
    for (op, shape) in [(sums, [1544, 8192]), (sums, [1020, 8192]), (gather, [1024, 4088])] {
        assert!(refused(op, shape, |_| ()).is_empty(), "{op} of {shape:?}");
    }
    for shape in [[1024, 64], [8192, 8192]] {
        assert!(refused(sums, shape, |it| it.uniform_shape = true).is_empty());
        assert!(refused(gather, shape, |it| it.uniform_shape = true).is_empty());
    }
    // These products are all by tiles.
    assert!(refused(sums, split, |it| it.library = Library::None).is_empty());
    assert!(refused(sums, split, |it| it.dtype = DType::F32).is_empty());
    assert!(refused(sums, split, |it| it.output = Some(DType::F32)).is_empty());
    assert!(refused(sums, split, |it| it.wire = Some(DType::F32)).is_empty());
    assert!(refused(gather, split, |it| it.epilogue = Epilogue::Gelu).is_empty());
    assert_eq!(refused(sums, split, |it| it.epilogue = Epilogue::Gelu), by_tiles);
}
