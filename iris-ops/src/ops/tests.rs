//! Tests of the operators' plans: choices, launch sizes and refusals.
//!
//! This file is long because each operator has different choices to test.

use std::collections::BTreeSet;

use iris_heap::{BackendKind, DType};
use iris_kernels::Library;
use iris_kernels::program::Program;

use super::{
    all_gather, all_gather_matmul, all_reduce, all_to_all, broadcast, matmul_all_gather,
    matmul_all_reduce, matmul_reduce_scatter, reduce_scatter, row,
};
use crate::device::Device;
use crate::op_names::{ChoiceReason, Op, Variant};
use crate::options::{Request, Shard, TileShape};
use crate::topology::Topology;
use crate::tune::{message_groups, table_shapes};

#[test]
fn a_message_on_a_gpu_takes_as_many_workgroups_as_it_has_work_for() {
    use all_reduce::Variant::{OneShot, TwoShot};
    let ranks = Topology::new(0, 4).on_device(Device::assumed(BackendKind::Cuda));
    let tiles = |variant, m, n| {
        let options = all_reduce::Options::rows(m, n).dtype(DType::BF16).variant(variant);
        let plan = options.plan(ranks).unwrap();
        let choice = plan.at(m);
        (plan.grid(choice.form, choice.tile).tiles(), plan.work(choice, (m, n), 0))
    };
    // In small messages a tile has one vector for every other thread of a workgroup of 256 threads;
    // in messages above 64 KiB, one for every thread.
    assert_eq!(tiles(OneShot, 1, 4096), (4, 4));
    assert_eq!(tiles(OneShot, 8, 4096), (32, 32));
    assert_eq!(tiles(OneShot, 1, 5000), (5, 5));
    assert_eq!(tiles(OneShot, 16, 4096), (32, 32));
    // The rows are split over 4 ranks, each of which owns 32 tiles.
    assert_eq!(tiles(TwoShot, 128, 4096), (128, 128));
    // Larger sums are cut into 256 tiles over all ranks, of at most 128 KiB each.
    assert_eq!(tiles(TwoShot, 2048, 4096), (256, message_groups(ranks)));
    assert_eq!(tiles(TwoShot, 1, 8 << 20), (256, message_groups(ranks)));
    assert_eq!(tiles(TwoShot, 16384, 4096).0, 1024);
    let options = all_gather::Options::rows(2048, 4096).dtype(DType::BF16);
    let options = options.variant(all_gather::Variant::Push);
    let plan = options.plan(ranks).unwrap();
    let work = |m| plan.work(plan.at(m), (m, 4096), 0);
    let choice = plan.at(2048);
    let split = plan.split_grid(plan.grid(choice.form, choice.tile));
    assert_eq!((split.tiles(), work(2048)), (512, 128));
    // Calls with fewer rows must launch fewer workgroups, but at least one.
    assert_eq!((work(64), work(0)), (4, 1));
    // The largest tiles of a gather have 128 KiB between two ranks, and half of that between more.
    let rows = [2, 3, 4].map(|size| {
        let options = all_gather::Options::rows(16384, 4096).dtype(DType::BF16);
        let ranks = Topology::new(0, size).on_device(Device::assumed(BackendKind::Cuda));
        options.variant(all_gather::Variant::Push).plan(ranks).unwrap().tile().m
    });
    assert_eq!(rows, [16, 8, 8]);
}

#[test]
fn a_small_message_on_a_gpu_takes_workgroups_of_few_threads() {
    use all_reduce::Variant::{Ll, TwoShot};
    let ranks = Topology::new(0, 2).on_device(Device::assumed(BackendKind::Cuda));
    let taken = |variant, (m, n), norm| {
        let options = all_reduce::Options::rows(m, n).dtype(DType::BF16).variant(variant);
        let options = if norm { options.rms_norm(1e-5) } else { options };
        let plan = options.plan(ranks).unwrap();
        let choice = plan.at(m);
        (plan.work(choice, (m, n), 0), plan.threads(choice, (m, n)))
    };
    // Each thread has one item (8 bytes of data of an LL message), except the threads of a
    // workgroup's last wave and those of the last workgroup, which have none.
    assert_eq!(taken(Ll, (1, 4096), false), (17, Some(128)));
    assert_eq!(taken(Ll, (8, 4096), false), (44, Some(256)));
    assert_eq!(taken(Ll, (24, 4096), false), (56, Some(512)));
    // In larger messages, each thread has one pack (a unit of 48 bytes).
    assert_eq!(taken(Ll, (32, 4096), false), (26, Some(288)));
    assert_eq!(taken(Ll, (256, 4096), false), (99, Some(512)));
    assert_eq!(taken(Ll, (1, 4096), true), (4, Some(512)));
    assert_eq!(taken(TwoShot, (512, 4096), false).1, Some(256));
    // The result `None` means that a workgroup has as many threads as the kernel is built for.
    assert_eq!(taken(TwoShot, (16384, 4096), false).1, None);
    assert_eq!(taken(TwoShot, (512, 4096), true).1, None);
}

#[test]
fn products_of_one_rank_may_have_any_columns_on_each() {
    for (size, total) in (2..5).flat_map(|size| (size..200).map(move |total| (size, total))) {
        let of = |rank| {
            let n = crate::split(total, size, rank).len();
            let plan = crate::matmul::Options::new(16, n, 64).plan(Topology::new(rank, size));
            plan.unwrap().fingerprint()
        };
        assert_eq!(of(0), of(size - 1), "{total} columns over {size} ranks");
    }
}

#[test]
fn plans_of_other_sizes_differ_in_the_size_first() {
    let first = |mine: Vec<(&'static str, String)>, theirs: Vec<(&'static str, String)>| {
        let differing = mine.into_iter().zip(theirs).find(|(mine, theirs)| mine != theirs);
        differing.expect("something differs").0
    };
    let ranks = Topology::new(0, 2);
    // Plans for different sizes must differ first in the size itself, and only then in properties
    // that follow from it.
    for count in [16, 32, 1000, 2048, 4096] {
        let of = |count| all_reduce::Options::new(count).plan(ranks).unwrap().fingerprint();
        assert_eq!(first(of(count), of(count + 1)), ("count", count.to_string()));
        let of = |m| matmul_all_reduce::Options::new(m, 64, 64).plan(ranks).unwrap().fingerprint();
        assert_eq!(first(of(count), of(2 * count)), ("m", count.to_string()));
    }
}

#[test]
fn some_workgroups_of_a_large_message_only_send() {
    use all_reduce::Variant::{OneShot, TwoShot};
    let of = |plan: crate::Plan, m| plan.senders(plan.at(m), (m, 4096), || 131);
    let ranks = |(backend, size)| Topology::new(0, size).on_device(Device::assumed(backend));
    let senders = |world, variant, m, norm| {
        let options = all_reduce::Options::rows(m, 4096).dtype(DType::BF16).variant(variant);
        let options = if norm { options.rms_norm(1e-5) } else { options };
        of(options.plan(ranks(world)).unwrap(), m)
    };
    let two = (BackendKind::Cuda, 2);
    assert_eq!(senders(two, TwoShot, 2048, false), 65);
    // Smaller and larger messages, and cases that were not measured, must have no workgroups that
    // only send.
    assert_eq!(senders(two, TwoShot, 2047, false), 0);
    assert_eq!(senders(two, TwoShot, 16384, false), 0);
    assert_eq!(senders(two, OneShot, 2048, false), 0);
    assert_eq!(senders(two, TwoShot, 2048, true), 0);
    assert_eq!(senders((BackendKind::Cuda, 4), TwoShot, 2048, false), 0);
    assert_eq!(senders((BackendKind::Cpu, 2), TwoShot, 2048, false), 0);
    let options = reduce_scatter::Options::rows(16384, 4096).dtype(DType::BF16);
    let senders = |m| of(options.clone().plan(ranks(two)).unwrap(), m);
    assert_eq!((senders(8191), senders(8192), senders(16384)), (0, 49, 49));
    // Messages of an all-gather are not summed. They get workgroups that only send from other sizes
    // on than sums do.
    let options = all_gather::Options::rows(16384, 4096).dtype(DType::BF16);
    let senders = |world, m| of(options.clone().plan(ranks(world)).unwrap(), m);
    assert_eq!((senders(two, 4095), senders(two, 4096), senders(two, 16384)), (0, 65, 65));
    for world in [(BackendKind::Cuda, 4), (BackendKind::Cpu, 2), (BackendKind::Hip, 2)] {
        assert_eq!(senders(world, 16384), 0, "{world:?}");
    }
    let options = all_to_all::Options::rows(16384, 4096).dtype(DType::BF16);
    assert_eq!(of(options.plan(ranks(two)).unwrap(), 16384), 65);
    // The root of a broadcast receives nothing, so none of its workgroups only receive.
    let options = broadcast::Options::rows(16384, 4096).dtype(DType::BF16);
    assert_eq!(of(options.plan(ranks(two)).unwrap(), 16384), 0);
    // In a fused product, the workgroup that computes a tile also sends it. An unfused all-gather
    // sends rows of C in place, so no other workgroup may write these rows at the same time.
    for variant in [matmul_all_gather::Variant::Push, matmul_all_gather::Variant::Unfused] {
        let options = matmul_all_gather::Options::new(16384, 4096, 64).dtype(DType::BF16);
        let plan = options.variant(variant).plan(ranks(two)).unwrap();
        assert_eq!(of(plan, 16384), 0, "{variant:?}");
    }
    use matmul_reduce_scatter::Variant::{Push, Unfused};
    for (variant, expected) in [(Push, 0), (Unfused, 49)] {
        let options = matmul_reduce_scatter::Options::new(16384, 4096, 64).dtype(DType::BF16);
        let plan = options.variant(variant).plan(ranks(two)).unwrap();
        assert_eq!(of(plan, 16384), expected, "{variant:?}");
    }
}

#[test]
fn an_automatic_plan_serves_small_and_large_calls() {
    let ranks = Topology::new(1, 4);
    let plan = matmul_all_reduce::Options::new(4096, 512, 64).plan(ranks).unwrap();
    assert_eq!((plan.at(1).variant, plan.at(4096).variant), (Variant::OneShot, Variant::TwoShot));
    assert_eq!((plan.variant(), plan.choices().last().unwrap().max_size), (Variant::TwoShot, 4096));
    assert!(plan.choices().windows(2).all(|two| two[0].max_size < two[1].max_size), "{plan}");
    // If the caller asks for a variant, the plan must use it for calls of all sizes.
    let one = matmul_all_reduce::Options::new(4096, 512, 64);
    let one = one.variant(matmul_all_reduce::Variant::TwoShot).plan(ranks).unwrap();
    assert_eq!(one.choices().len(), 1);
    assert!(plan.data_bytes() >= one.data_bytes() && plan.signal_bytes() >= one.signal_bytes());
}

#[test]
fn no_call_is_predicted_faster_than_its_lower_bound() {
    let devices = ["h100", "h200", "mi300x"].map(|name| Device::named(name).unwrap());
    for device in devices.into_iter().chain([Device::assumed(BackendKind::Cpu)]) {
        for (op, world) in Op::ALL.into_iter().flat_map(|op| [2, 4, 8].map(|world| (op, world))) {
            if op == Op::Barrier {
                continue;
            }
            for (n, k) in [(4096, 4096), (8192, 512), (128, 8192)] {
                let mut request = Request::new(row(op), (8192, n, k));
                request.k = if row(op).multiplies() { k } else { 0 };
                let plan = request.plan(Topology::new(0, world).on_device(device)).unwrap();
                for m in (0..14).map(|power| 1 << power) {
                    let (bound, us) = (plan.lower_bound_us(m), plan.predicted_us(m));
                    let what = format!("{plan}, {m} rows, {world} ranks on {device:?}");
                    assert!(us.is_none_or(|us| us >= bound), "{us:?} before {bound}: {what}");
                }
            }
        }
    }
}

/// Tests predictions for all shapes of the tuning tables and all variants, with types of C and of
/// partial results that differ from that of A.
#[test]
fn no_type_is_predicted_faster_than_its_lower_bound() {
    let types = [DType::F32, DType::BF16];
    let mut seen = 0;
    for (device, world) in
        ["h200", "mi300x"].into_iter().flat_map(|it| [2, 4, 8].map(|of| (it, of)))
    {
        let ranks = Topology::new(0, world).on_device(Device::named(device).unwrap());
        for (op, n, k) in table_shapes(ranks) {
            let k = if row(op).multiplies() { k } else { 0 };
            for at in 0..8 * row(op).forms.len() {
                let [dtype, output, wire] = [0, 1, 2].map(|bit| types[at >> bit & 1]);
                let mut request = Request::new(row(op), (8192, n, k));
                (request.dtype, request.variant) = (dtype, Some(row(op).forms[at / 8].variant));
                (request.output, request.wire) = (Some(output), Some(wire));
                // Skips combinations of types that the operator or the variant does not support.
                let Ok(plan) = request.plan(ranks) else { continue };
                for m in (4..14).map(|power| 1 << power) {
                    let (bound, Some(us)) = (plan.lower_bound_us(m), plan.predicted_us(m)) else {
                        continue;
                    };
                    assert!(us >= bound, "{us} before {bound}: {plan}, {m} rows");
                    seen += 1;
                }
            }
        }
    }
    assert!(seen > 1000, "{seen} predictions");
}

/// Tests that predictions count the written bytes of C in the type of C, for a GEMM whose time is
/// the time of its memory traffic.
#[test]
fn a_product_is_written_in_its_own_type() {
    let ranks = Topology::new(0, 2).on_device(Device::named("h200").unwrap());
    let gathered = |output| {
        let options = all_gather_matmul::Options::new(8192, 8192, 16).dtype(DType::BF16);
        let options = options.output(output).variant(all_gather_matmul::Variant::Unfused);
        let plan = options.plan(ranks).unwrap();
        [plan.predicted_us(8192).unwrap(), plan.lower_bound_us(8192)]
    };
    let [wide, narrow] = [DType::F32, DType::BF16].map(gathered);
    assert!(wide[0] > 1.5 * narrow[0] && wide[1] > 1.5 * narrow[1], "{wide:?} {narrow:?}");
}

/// Tests that the predicted baseline over several nodes sends A in A's type and partials in the
/// wire type.
#[test]
fn the_baseline_over_nodes_sends_the_type_that_is_sent() {
    let ranks = Topology::new(0, 16).on_nodes(2).on_device(Device::named("h200").unwrap());
    let network = crate::NetworkRate::of_gbit(400.0);
    let gathered = |output| {
        let options = all_gather_matmul::Options::new(8192, 4096, 8192).dtype(DType::BF16);
        let plan = options.output(output).plan(ranks).unwrap();
        plan.forecast(&network, 8192).unwrap().unfused_us
    };
    assert_eq!(gathered(DType::F32), gathered(DType::BF16));
    let scattered = |wire| {
        let options = matmul_reduce_scatter::Options::new(8192, 8192, 64).dtype(DType::BF16);
        options.wire(wire).plan(ranks).unwrap().forecast(&network, 8192).unwrap().unfused_us
    };
    assert!(scattered(DType::F32) > 1.5 * scattered(DType::BF16));
}

/// Tests that predictions count the bytes of a transfer in the element type that is sent, if A, C
/// and partial results have different types.
#[test]
fn bytes_are_counted_in_the_type_that_is_sent() {
    let ranks = Topology::new(0, 4).on_device(Device::named("h200").unwrap());
    let gathered = |output| {
        let options = all_gather_matmul::Options::new(8192, 128, 8192).dtype(DType::BF16);
        options.output(output).plan(ranks).unwrap().lower_bound_us(8192)
    };
    assert_eq!(gathered(DType::F32), gathered(DType::BF16));
    let scattered = |wire| {
        let options = matmul_reduce_scatter::Options::new(8192, 8192, 64).dtype(DType::BF16);
        let options = options.variant(matmul_reduce_scatter::Variant::CopyEngine).wire(wire);
        options.plan(ranks).unwrap().predicted_us(8192).unwrap()
    };
    assert!(scattered(DType::F32) > 1.5 * scattered(DType::BF16));
    for (output, wire) in [(DType::F32, DType::BF16), (DType::BF16, DType::F32)] {
        for variant in [Variant::OneShot, Variant::TwoShot, Variant::CopyEngine] {
            let mut request = Request::new(row(Op::MatmulAllReduce), (8192, 8192, 64));
            request.dtype = DType::BF16;
            (request.output, request.wire) = (Some(output), Some(wire));
            request.variant = Some(variant);
            let plan = request.plan(ranks).unwrap();
            let (bound, us) = (plan.lower_bound_us(8192), plan.predicted_us(8192).unwrap());
            assert!(us >= bound, "{us} before {bound}: {plan}");
        }
    }
}

#[test]
fn programs_that_no_call_can_take_are_not_priced() {
    let h200 = Device::named("h200").unwrap();
    // For more than eight ranks, no built-in GEMM stores to peers. GEMMs of the vendor's library
    // never store to peers.
    let predicted = |library, ranks: usize| {
        let mut request = Request::new(row(Op::MatmulAllReduce), (8192, 8192, 3584));
        (request.dtype, request.variant) = (DType::BF16, Some(Variant::Epilogue));
        request.library = library;
        let ranks = Topology::new(0, ranks).on_device(h200);
        request.plan(ranks).unwrap().predicted_us(8192).unwrap()
    };
    for (ranks, stores) in [(2, true), (8, true), (9, false), (64, false)] {
        let [auto, vendor] = [Library::Auto, Library::Vendor].map(|of| predicted(of, ranks));
        assert_eq!(auto != vendor, stores, "{ranks} ranks: {auto} {vendor}");
    }
}

/// Tests that plans over several nodes do not count on GEMMs that wait for peers, because steps
/// between nodes exclude such GEMMs. For all products of the tuning table and more, no other
/// variant that `auto` may choose is predicted to be faster.
#[test]
fn auto_prices_over_nodes_what_calls_can_take() {
    let h200 = Device::named("h200").unwrap();
    let (mut all, mut off) = (0, Vec::new());
    for world in [2, 4, 8] {
        let ranks = Topology::new(0, world).on_device(h200);
        let tabled = table_shapes(ranks).into_iter().map(|(_, n, k)| (n, k));
        let more = [(5120, 3072), (8192, 8192), (2048, 8192)];
        let shapes: BTreeSet<_> = tabled.chain(more).collect();
        let ops = [Op::MatmulAllReduce, Op::MatmulReduceScatter, Op::AllGatherMatmul];
        for (op, (n, k)) in ops.into_iter().flat_map(|op| shapes.iter().map(move |&it| (op, it))) {
            let request = |variant| {
                let mut request = Request::new(row(op), (8192, n, k));
                (request.dtype, request.step_blocks) = (DType::BF16, 16);
                (request.variant, request.uniform_shape) = (variant, true);
                request.plan(ranks).unwrap()
            };
            let auto = request(None);
            let others = [Variant::Unfused, Variant::CopyEngine].map(|it| request(Some(it)));
            for m in (8..14).map(|power| 1 << power) {
                // A plan for a requested variant has the tile of its largest call, so `copy_engine`
                // is compared only for that call.
                let others =
                    others.iter().filter(|it| m == 8192 || it.variant() == Variant::Unfused);
                let least =
                    others.filter_map(|it| it.predicted_us(m)).fold(f64::INFINITY, f64::min);
                let us = auto.predicted_us(m).unwrap();
                all += 1;
                if auto.at(m).why == ChoiceReason::Predicted && us > 1.001 * least {
                    off.push((op, world, [m, n, k], us / least));
                }
            }
        }
    }
    assert!(off.is_empty(), "{} of {all} are off: {off:?}", off.len());
}

/// Tests that the time of a GEMM that waits for parts of A is predicted only if the GEMM can use
/// the parts: if each rank has whole tiles of rows, or whole slabs of columns.
#[test]
fn parts_that_do_not_suit_are_not_priced_as_gated() {
    let ranks = Topology::new(0, 4).on_device(Device::named("h200").unwrap());
    for (shard, m, k, gated) in [
        (Shard::Rows, 8192, 8192, true),
        (Shard::Rows, 8190, 8192, false),
        (Shard::Rows, 4000, 8192, false),
        (Shard::Columns, 8192, 8192, true),
        (Shard::Columns, 8192, 4 * 2000, false),
    ] {
        let predicted = |library| {
            let mut request = Request::new(row(Op::AllGatherMatmul), (m, 2048, k));
            (request.dtype, request.shard, request.library) = (DType::BF16, shard, library);
            request.variant = Some(Variant::CopyEngine);
            request.plan(ranks).unwrap().predicted_us(m).unwrap()
        };
        let [ours, vendor] = [Library::Ours, Library::Vendor].map(predicted);
        assert_eq!(ours != vendor, gated, "{shard:?} {m} x {k}: {ours} {vendor}");
    }
}

#[test]
fn columns_that_come_in_parts_are_priced_in_parts() {
    let ranks = Topology::new(0, 4).on_device(Device::named("h200").unwrap());
    let predicted = |rows: usize| {
        let mut request = Request::new(row(Op::AllGatherMatmul), (8192, 2048, 8192));
        (request.dtype, request.shard) = (DType::BF16, Shard::Columns);
        (request.variant, request.library) = (Some(Variant::CopyEngine), Library::Ours);
        request.tile = Some(TileShape { m: rows, n: 2048 });
        request.plan(ranks).unwrap().predicted_us(8192).unwrap()
    };
    assert!(predicted(2048) < 0.95 * predicted(8192), "{} {}", predicted(2048), predicted(8192));
}

/// Tests that the choices for each device follow the tuning data of that device.
#[test]
fn figures_of_one_device_are_not_taken_for_another() {
    use BackendKind::{Cpu, Cuda, Hip};
    use Variant::{Ll, OneShot, TwoShot, TwoShotLl};
    let choice = |backend, bytes: usize| {
        let options = all_reduce::Options::new(bytes / 2).dtype(DType::BF16);
        options.plan(Topology::new(0, 4).on_device(Device::assumed(backend))).unwrap().variant()
    };
    let choices = |bytes| [Cpu, Cuda, Hip].map(|backend| choice(backend, bytes));
    assert_eq!(choices(16 << 10), [OneShot, Ll, OneShot]);
    assert_eq!(choices(512 << 10), [TwoShot, TwoShotLl, OneShot]);
    assert_eq!(choices(4 << 20), [TwoShot, TwoShotLl, TwoShot]);
    assert_eq!(choices(8 << 20), [TwoShot, TwoShot, TwoShot]);
    let groups = [Cuda, Hip]
        .map(|backend| message_groups(Topology::new(0, 4).on_device(Device::assumed(backend))));
    assert!(groups[0] != groups[1], "{groups:?}");
}

/// Tests that a broadcast between more than two GPUs is relayed if the message is large enough.
#[test]
fn large_messages_of_a_root_are_passed_on() {
    use BackendKind::{Cpu, Cuda, Hip};
    use Variant::{Ll, Push, TwoShot, TwoShotLl};
    let plan = |backend, size, bytes: usize| {
        let options = broadcast::Options::new(bytes / 2).dtype(DType::BF16);
        options.plan(Topology::new(0, size).on_device(Device::assumed(backend))).unwrap()
    };
    let choices = |bytes| [2, 3, 4].map(|size| plan(Cuda, size, bytes).variant());
    assert_eq!(choices(256 << 10), [Ll, Ll, Ll]);
    // With three ranks, `Ll` and `TwoShotLl` are predicted to take the same time.
    let [two, _, four] = choices(512 << 10);
    assert_eq!([two, four], [Ll, TwoShotLl]);
    assert_eq!(choices(1 << 20), [Ll, Push, TwoShotLl]);
    assert_eq!(choices(4 << 20), [Push, TwoShot, TwoShotLl]);
    assert_eq!(choices(128 << 20), [Push, TwoShot, TwoShot]);
    let large = |backend, size| plan(backend, size, 128 << 20).variant();
    assert_eq!([large(Hip, 2), large(Hip, 8), large(Cpu, 2)], [Push, TwoShot, Push]);
    // Smaller calls of a plan must get the variant that a plan for their size would have.
    let one = plan(Cuda, 4, 128 << 20);
    let at = [64 << 10, 512 << 10, 1 << 20].map(|elements: usize| one.at(elements).variant);
    assert_eq!(at, [Ll, TwoShotLl, TwoShotLl]);
    assert_eq!(plan(Cpu, 2, 128 << 20).choices().len(), 1);
    // All ranks but the root are relays. So with 4, 6 and 8 ranks the number of workgroups is a
    // multiple of 3, 5 and 7.
    let groups = [4, 6, 8].map(|size| {
        let (plan, elements) = (plan(Cuda, size, 128 << 20), 64 << 20);
        plan.work(plan.at(elements), (1, elements), 0)
    });
    assert_eq!(groups, [108, 105, 105]);
}

/// Tests that products with messages on GPUs use a whole-matrix GEMM, also if they are traced or
/// counted.
#[test]
fn gpu_products_use_whole_matrix_gemms() {
    use BackendKind::{Cpu, Cuda};
    let sum = |m, size, backend| {
        let options = matmul_all_reduce::Options::new(m, 8192, 3584).dtype(DType::BF16);
        let plan =
            options.plan(Topology::new(0, size).on_device(Device::assumed(backend))).unwrap();
        plan.at(m).variant
    };
    // Small results are summed in one hop of the LL protocol, larger ones in two, and the largest by
    // the GEMM that stores to peers.
    let in_two_hops = Variant::UnfusedTwoShotLl;
    assert_eq!((sum(64, 2, Cuda), sum(65, 2, Cuda)), (Variant::UnfusedLl, in_two_hops));
    assert_eq!(
        (sum(256, 2, Cuda), sum(511, 2, Cuda)),
        (Variant::UnfusedOneShot, Variant::Epilogue)
    );
    // For this shape the variant is chosen by a measured row of the tuning table.
    assert_eq!(sum(512, 2, Cuda), Variant::Epilogue);
    let gelu = matmul_all_reduce::Options::new(512, 8192, 3584).dtype(DType::BF16);
    let gelu = gelu
        .epilogue(crate::Epilogue::Gelu)
        .plan(Topology::new(0, 2).on_device(Device::assumed(Cuda)))
        .unwrap();
    assert_eq!(gelu.at(512).variant, Variant::UnfusedOneShot);
    assert_eq!((sum(8, 4, Cuda), sum(64, 4, Cuda)), (Variant::UnfusedLl, in_two_hops));
    assert_eq!((sum(64, 3, Cuda), sum(128, 4, Cuda)), (Variant::UnfusedOneShot, in_two_hops));
    assert_eq!((sum(64, 1, Cuda), sum(4096, 4, Cpu)), (Variant::OneShot, Variant::TwoShot));
    assert_eq!((sum(1024, 2, Cuda), sum(4096, 4, Cuda)), (Variant::Epilogue, Variant::Epilogue));
    // With three ranks the GEMM that stores to peers has not run on GPUs.
    assert_eq!((sum(1024, 3, Cuda), sum(4096, 3, Cuda)), (Variant::Unfused, Variant::CopyEngine));
    assert_eq!((sum(256, 4, Cuda), sum(1024, 4, Cuda)), (Variant::Unfused, Variant::Epilogue));
    assert_eq!(sum(4096, 2, BackendKind::Hip), Variant::Unfused);
    let scattered = |m, size| {
        let options = matmul_reduce_scatter::Options::new(m, 8192, 3584).dtype(DType::BF16);
        options.plan(Topology::new(0, size).on_device(Device::assumed(Cuda))).unwrap().at(m).variant
    };
    assert_eq!((scattered(512, 2), scattered(512, 4)), (Variant::Epilogue, Variant::Epilogue));
    assert_eq!(scattered(512, 3), Variant::Unfused);
    let gather = all_gather_matmul::Options::new(512, 7168, 8192).dtype(DType::BF16);
    let variant = |options: all_gather_matmul::Options| {
        options.plan(Topology::new(0, 2).on_device(Device::assumed(Cuda))).unwrap().variant()
    };
    assert_eq!(variant(gather.clone()), Variant::Unfused);
    assert_eq!(variant(gather.clone().count_traffic(true)), Variant::Unfused);
    assert_eq!(variant(gather.clone().trace_spans(8)), Variant::Unfused);
    assert_eq!(variant(gather.workgroups(8)), Variant::Unfused);
}

/// Tests that sums by the LL protocol in two hops are refused if they would be sent in another type
/// than C's, and that `auto` then does not consider the variant.
#[test]
fn sums_that_are_sent_as_items_have_the_type_of_c() {
    let options = all_reduce::Options::new(4096).dtype(DType::F32).wire(DType::BF16);
    let ranks = Topology::new(0, 4);
    let error = options.clone().variant(all_reduce::Variant::TwoShotLl).plan(ranks).unwrap_err();
    let expected =
        "all_reduce of 4096 f32: wire of variant two_shot_ll is bf16, expected f32, the type of C";
    assert_eq!(error.to_string(), expected);
    assert!(options.plan(ranks).is_ok());
    let alike = all_reduce::Options::new(4096).dtype(DType::BF16);
    let plan = alike.variant(all_reduce::Variant::TwoShotLl).plan(ranks).unwrap();
    // `TwoShotLl` needs two pairs of words for each item (8 bytes) of a rank's part: one for a
    // contribution and one for a sum. `Ll` needs one pair for each item of the whole message.
    let of_ll = all_reduce::Options::new(4096).dtype(DType::BF16).variant(all_reduce::Variant::Ll);
    assert!(2 * plan.signal_bytes() < 3 * of_ll.plan(ranks).unwrap().signal_bytes() / 2);
}

/// Tests that `auto` chooses the same variant if a call is traced, counted, delayed, or given a
/// number of workgroups.
#[test]
fn observing_a_call_does_not_change_the_choice() {
    let delayed = crate::FaultInjection { delay_ns: 1000, ..crate::FaultInjection::default() };
    for op in Op::ALL.into_iter().filter(|op| *op != Op::Barrier) {
        for (backend, size) in [BackendKind::Cpu, BackendKind::Cuda]
            .into_iter()
            .flat_map(|it| [1, 2, 3, 4, 8].map(|size| (it, size)))
        {
            let ranks = Topology::new(0, size).on_device(Device::assumed(backend));
            let mut plain = op.request(8192, 4096, 1024);
            plain.dtype = DType::BF16;
            let choices = |request: &crate::OpRequest| -> Vec<_> {
                let plan = request.plan(ranks).unwrap();
                plan.choices().iter().map(|it| (it.max_size, it.variant, it.tile, it.why)).collect()
            };
            let expected = choices(&plain);
            let mut observed = [plain.clone(), plain.clone(), plain.clone(), plain];
            observed[0].trace_spans = 8;
            observed[1].count_traffic = true;
            observed[2].workgroups = Some(4);
            observed[3].fault_injection = delayed;
            // On the CPU kernels are delayed by an environment variable, not by the option
            // `fault_injection`.
            let observed = if backend == BackendKind::Cpu { &observed[..3] } else { &observed };
            for request in observed {
                assert_eq!(choices(request), expected, "{op} of {size} ranks on {backend}");
            }
        }
    }
}

#[test]
fn rows_belong_to_ranks_of_the_world() {
    let plan = all_reduce::Options::rows(16, 8).plan(Topology::new(0, 4)).unwrap();
    for m in [1, 3, 4, 13, 16] {
        for row in 0..m {
            let owner = plan.owner(row, m).unwrap();
            assert!(owner < 4 && plan.rows_of(owner, m).contains(&row), "{row} of {m}");
        }
        assert_eq!((plan.owner(m, m), plan.owner(usize::MAX, m)), (None, None));
        assert_eq!([4, 5, usize::MAX].map(|rank| plan.rows_of(rank, m).len()), [0; 3]);
    }
    assert_eq!(plan.owner(0, 0), None);
}

/// Tests that a rank's N and K influence the choice only if the caller asserts (by `uniform_shape`)
/// that all ranks have the same N and K.
#[test]
fn rows_of_the_table_go_by_n_and_k_where_all_ranks_have_the_same() {
    let ranks = Topology::new(0, 2).on_device(Device::assumed(BackendKind::Cuda));
    let options = |n, even| {
        let options = all_gather_matmul::Options::new(4096, n, 8192).dtype(DType::BF16);
        options.uniform_shape(even)
    };
    let gathered = |n, even| options(n, even).plan(ranks).unwrap().tile();
    let [tuned, ruled] = [[2048, 2048], [1024, 8192]].map(|[m, n]| TileShape { m, n });
    assert_eq!(
        [gathered(1280, true), gathered(1280, false), gathered(1284, true)],
        [tuned, ruled, ruled]
    );
    // Calls that differ from the measured ones (here in the output type) must get their tile by the
    // rules.
    let wide =
        options(1280, true).variant(all_gather_matmul::Variant::CopyEngine).output(DType::F32);
    assert_eq!(wide.plan(ranks).unwrap().tile(), ruled);
    let scattered = |k, even| {
        let options = matmul_reduce_scatter::Options::new(8192, 8192, k).dtype(DType::BF16);
        options.uniform_shape(even).plan(ranks).unwrap().at(8192).variant
    };
    assert_eq!(scattered(1024, true), Variant::CopyEngine);
    assert_eq!([scattered(1024, false), scattered(3584, false)], [Variant::CopyEngine; 2]);
    assert_eq!(scattered(3584, true), Variant::Epilogue);
}

/// Tests which variants are chosen for products with an RMSNorm after the sum, by size of the
/// message.
#[test]
fn norms_of_large_products_are_behind_what_stores_itself() {
    let ranks = Topology::new(0, 2).on_device(Device::assumed(BackendKind::Cuda));
    let options = |m: usize| {
        let options = matmul_all_reduce::Options::new(m, 8192, 3584).dtype(DType::BF16);
        options.rms_norm(1e-5)
    };
    let variant = |options: matmul_all_reduce::Options| options.plan(ranks).unwrap().variant();
    let by_rows = [16, 384, 512, 4096].map(|m| variant(options(m)));
    let [words, tiles, stores] = [Variant::UnfusedLl, Variant::UnfusedOneShot, Variant::Epilogue];
    assert_eq!(by_rows, [words, tiles, stores, stores]);
    // The number of workgroups must not change the choice. For f32 there is no GEMM that stores to
    // peers.
    assert_eq!(variant(options(512).workgroups(64)), stores);
    assert_eq!(variant(options(4096).dtype(DType::F32)), Variant::Unfused);
}

/// Tests which LL messages consist of packs (units of 48 bytes): those of at least 256 KiB from one
/// rank to another, on devices and with numbers of ranks with which packs have run, unless a
/// workgroup or a GEMM needs the items of a row.
#[test]
fn larger_messages_consist_of_packs() {
    let packs = |op: Op, variant, size, m: usize, norm: bool| {
        let mut request = op.request(128, 4096, 512);
        (request.dtype, request.variant) = (DType::BF16, Some(variant));
        request.rms_norm = norm.then_some(1e-5);
        let ranks = Topology::new(0, size).on_device(Device::assumed(BackendKind::Cuda));
        let plan = request.plan(ranks).unwrap();
        let packs = plan.has_packs(plan.at(m), (m, 4096));
        assert!(!packs || plan.at(128).needs.packs > 0, "{op} {size} {m}");
        packs
    };
    // A plan that counts elements may use one variant in several ranges of sizes, which share
    // kernels.
    let ranks = Topology::new(0, 2).on_device(Device::assumed(BackendKind::Cuda));
    let plan = all_reduce::Options::new(4 << 20).dtype(DType::BF16).plan(ranks).unwrap();
    let in_words: Vec<_> = plan.choices().iter().filter(|it| it.variant == Variant::Ll).collect();
    assert!(in_words[0].needs.packs == 0 && in_words.iter().any(|it| it.needs.packs > 0));
    assert!(in_words.iter().all(|choice| plan.loads_packs(choice)));
    use Variant::{Ll, TwoShotLl, UnfusedLl, UnfusedTwoShotLl};
    let of_sum = |m| packs(Op::AllReduce, Ll, 2, m, false);
    assert_eq!([31, 32, 128].map(of_sum), [false, true, true]);
    for op in [Op::AllGather, Op::ReduceScatter, Op::AllToAll] {
        let of_part = |size: usize, m| packs(op, Ll, size, m, false);
        assert_eq!([62, 63, 64].map(|m| of_part(2, m)), [false, true, true], "{op}");
        assert_eq!([3, 4].map(|size| of_part(size, 128)), [false, true], "{op}");
    }
    assert!(packs(Op::AllReduce, TwoShotLl, 4, 128, false));
    assert!(!packs(Op::AllReduce, Ll, 2, 128, true));
    assert!(!packs(Op::MatmulAllReduce, UnfusedLl, 2, 128, false));
    assert!(packs(Op::MatmulAllReduce, UnfusedTwoShotLl, 4, 128, false));
}

/// Tests the tiles of plans for GEMMs that also communicate. A GEMM that stores to peers raises
/// signals for the tiles of the call, and products of few rows get the tiles of a GEMM that does
/// the all-reduce itself.
#[test]
fn products_signal_the_tiles_of_their_calls() {
    let ranks = Topology::new(0, 2).on_device(Device::assumed(BackendKind::Cuda));
    let options = matmul_reduce_scatter::Options::new(8192, 8192, 3584).dtype(DType::BF16);
    let plan = options.plan(ranks).unwrap();
    let stores: Vec<_> = plan.choices().iter().filter(|it| it.form.stores).collect();
    let tiles: Vec<_> = stores.iter().map(|it| [it.tile.m as u32, it.tile.n as u32]).collect();
    assert_eq!(tiles, [[64, 128], [64, 256]], "one wave of the widest, and more");
    for (choice, tile) in stores.into_iter().zip(tiles) {
        let whole =
            plan.library_gemm(choice.form, (choice.max_size, choice.tile)).expect("a product");
        assert_eq!((whole.signalled, whole.rows), (Some(tile), choice.max_size));
    }
    let few = |m, n, library| {
        let options = matmul_all_reduce::Options::new(m, n, 3584).dtype(DType::BF16);
        let options = options.variant(matmul_all_reduce::Variant::UnfusedOneShot).library(library);
        let tile = options.plan(ranks).unwrap().tile();
        [tile.m, tile.n]
    };
    use iris_kernels::Library::{Auto, Ours, Vendor};
    assert_eq!([few(100, 8192, Auto), few(128, 8448, Ours)], [[104, 64], [128, 64]]);
    assert_eq!([few(128, 12808, Auto), few(128, 16896, Auto)], [[128, 128]; 2]);
    for [m, n] in [few(129, 8192, Auto), few(100, 4096, Auto), few(100, 8192, Vendor)] {
        assert!(n > 128, "{m} x {n}: of a message");
    }
}

/// Tests that a tile of a gathered A lies within one rank's part, and that it is wide along the
/// rows of A in memory.
#[test]
fn tiles_of_a_gathered_a_are_pieces_of_its_lines() {
    use all_gather_matmul::{Options, Variant::Unfused};
    for backend in [BackendKind::Cpu, BackendKind::Cuda] {
        let ranks = Topology::new(0, 4).on_device(Device::assumed(backend));
        let (m, n, k) = (1024, 3584, 8192);
        let options = Options::new(m, n, k).dtype(DType::BF16).variant(Unfused);
        for (options, rows, columns) in
            [(options.clone(), m / 4, k), (options.shard(Shard::Columns), m, k / 4)]
        {
            let plan = options.plan(ranks).unwrap();
            let choice = plan.at(m);
            let TileShape { m: high, n: wide } = choice.tile;
            assert!(high <= rows && wide <= columns && wide >= 2048, "{plan}");
            let part = plan.split_grid(plan.grid(choice.form, choice.tile)).part(0);
            assert_eq!((part.rows * part.cols) as usize, rows * columns);
            assert_eq!(part.tiles() as usize, rows.div_ceil(high) * columns.div_ceil(wide));
            // The workspace must have room for A and for the GEMM library. It needs no inbox,
            // because A is gathered directly into the memory from which the GEMM reads it.
            let library = choice.needs.workspace - (m * k * 2) as u64;
            assert_eq!((choice.needs.inbox_half(), library % 8), (0, 0));
            assert!(plan.data_bytes() >= (m * k * 2) as u64);
        }
    }
}

/// Tests that small messages of 2 to 8 GPU ranks use the LL protocol up to the measured sizes, and
/// that a heap of default size has room for eight such ops.
#[test]
fn small_messages_go_in_words_that_carry_their_data() {
    use BackendKind::{Cpu, Cuda};
    let plan = |m, size, backend| {
        let options = all_reduce::Options::rows(m, 4096).dtype(DType::BF16);
        options.plan(Topology::new(0, size).on_device(Device::assumed(backend))).unwrap()
    };
    let reduces = plan(16384, 2, Cuda);
    let variants = [1, 256, 512].map(|m| reduces.at(m).variant);
    assert_eq!(variants, [Variant::Ll, Variant::Ll, Variant::OneShot]);
    let four = plan(16384, 4, Cuda);
    let variants = [8, 32, 128, 512, 1024].map(|m| four.at(m).variant);
    use Variant::{Ll, TwoShot, TwoShotLl};
    assert_eq!(variants, [Ll, Ll, TwoShotLl, TwoShotLl, TwoShot]);
    assert!((2..=8).all(|size| plan(1, size, Cuda).variant() == Variant::Ll));
    // The LL protocol must not be chosen for nine ranks, because it has not run with nine. It must
    // not be chosen for one rank either.
    for (size, backend) in [(2, Cpu), (9, Cuda), (1, Cuda)] {
        assert_ne!(plan(1, size, backend).variant(), Variant::Ll, "{size} ranks on {backend}");
    }
    let gathers = |m| {
        let options = all_gather::Options::rows(m, 4096).dtype(DType::BF16);
        options.plan(Topology::new(1, 2).on_device(Device::assumed(Cuda))).unwrap()
    };
    assert_eq!((gathers(128).variant(), gathers(512).variant()), (Variant::Ll, Variant::Ll));
    assert_eq!(gathers(512).at(128).variant, Variant::Ll);
    // If the caller chooses a tile, the LL protocol is excluded, because it has no tiles.
    let tiled = all_reduce::Options::rows(1, 4096).tile(TileShape { m: 1, n: 512 });
    let tiled = tiled.plan(Topology::new(0, 2).on_device(Device::assumed(Cuda))).unwrap();
    assert_eq!(tiled.variant(), Variant::OneShot);
    let default = iris_heap::HeapOptions::new().signal_bytes;
    for plan in [&reduces, &gathers(1 << 20), &four] {
        assert!(plan.signal_bytes() < default / 8, "{plan}");
    }
}

#[test]
fn plans_are_said_in_a_line() {
    let options = all_reduce::Options::new(1000).variant(all_reduce::Variant::OneShot);
    let tile = TileShape { m: 1, n: 500 };
    let plan = options.tile(tile).plan(Topology::new(2, 3)).unwrap();
    let said = "all_reduce of 1000 f32, rank 2 of 3 on cpu: one_shot by tiles of 1 x 500; \
                24576 bytes of data, 3072 of signals";
    assert_eq!(plan.to_string(), said);
    // A printed plan must show each choice with its reason.
    let ranks = Topology::new(0, 2).on_device(Device::assumed(BackendKind::Cuda));
    let options = matmul_all_reduce::Options::new(640, 8192, 3584).dtype(DType::BF16);
    let said = options.plan(ranks).unwrap().to_string();
    assert!(said.contains("unfused up to 639 by tiles of 2 x 8192 (predicted), "), "{said}");
    assert!(said.contains("unfused up to 640 by tiles of 4 x 8192 (measured); "), "{said}");
}

#[test]
fn names_are_read_as_they_are_written() {
    for op in Op::ALL {
        assert_eq!(op.name().replace('_', "-").parse(), Ok(op));
        assert!(
            !op.variants().is_empty()
                && op.variants().iter().all(|&it| it.name().parse() == Ok(it))
        );
    }
    let error = "ring".parse::<Op>().unwrap_err().to_string();
    assert!(error.starts_with("op ring: expected one of matmul_all_reduce, "), "{error}");
    let error = "ring".parse::<all_reduce::Variant>().unwrap_err().to_string();
    assert_eq!(
        error,
        "all_reduce: variant is ring, expected auto, one_shot, two_shot, spinlock, atomic, ll, two_shot_ll"
    );
}

#[test]
fn operators_go_to_other_threads() {
    fn shared<T: Send + Sync + std::fmt::Debug>() {}
    shared::<crate::AllReduce>();
    shared::<crate::Barrier>();
    shared::<crate::AnyOp>();
    shared::<crate::Workspace>();
}

/// First variant of the operator that raises a signal for each tile of C.
fn signalled(op: Op) -> Option<Variant> {
    op.variants().into_iter().find(|it| row(op).form(*it).is_some_and(|it| it.arrival.is_some()))
}

/// Tests that the device has room for a kernel that runs at the same time as a call: no variant
/// whose tiles have signals contains a GEMM that needs all multiprocessors. Other variants must be
/// refused, and also a request for more multiprocessors than the device has.
#[test]
fn a_kernel_beside_a_call_has_room() {
    for op in Op::ALL {
        for form in row(op).forms.iter().filter(|form| form.arrival.is_some()) {
            for of in form.program {
                let gemm = Program::new(form.program).special_gemm(of);
                assert_eq!(gemm, None, "{op} {}", form.variant);
            }
        }
    }
    let options = crate::all_reduce::Options::new(4096).reserve_sms(4);
    let h200 = Topology::new(0, 2).on_device(Device::named("h200").unwrap());
    let said = |options: crate::all_reduce::Options| options.plan(h200).unwrap_err().to_string();
    assert_eq!(
        said(options.clone()),
        "all_reduce of 4096 f32: variant with a kernel beside it is ll, expected one whose tiles of C have signals: two_shot"
    );
    let two_shot = options.variant(crate::all_reduce::Variant::TwoShot);
    assert!(two_shot.plan(h200).is_ok());
    assert_eq!(
        said(two_shot.reserve_sms(132)),
        "all_reduce of 4096 f32: reserve_sms is 132, expected at most 131 of 132 multiprocessors"
    );
}

/// Tests that a request made for any operator is refused if it sets an option that the operator
/// does not read.
#[test]
fn a_request_of_any_operator_takes_what_the_operator_reads() {
    use crate::Epilogue;
    use crate::options::Request;
    type Ask = (&'static str, fn(&mut Request));
    let asks: [Ask; 10] = [
        ("dtype", |it| it.dtype = DType::F16),
        ("output", |it| it.output = Some(DType::BF16)),
        ("wire", |it| it.wire = Some(DType::BF16)),
        ("tile", |it| it.tile = Some(TileShape { m: 4, n: 4 })),
        ("epilogue", |it| it.epilogue = Epilogue::Gelu),
        ("shard", |it| it.shard = Shard::Columns),
        ("root", |it| it.root = 1),
        ("members", |it| it.members = Some(vec![0])),
        ("workgroups", |it| it.workgroups = Some(1)),
        ("reserve_sms", |it| (it.reserve_sms, it.variant) = (1, signalled(it.op()))),
    ];
    for op in Op::ALL {
        for (name, ask) in asks {
            let mut request = op.request(8, 6, 4);
            ask(&mut request);
            let plan = request.plan(Topology::new(0, 2)).map_err(|error| error.to_string());
            if op.options().contains(&name) {
                assert!(plan.is_ok(), "{op} {name}: {plan:?}");
            } else {
                let said = plan.expect_err("refused");
                assert!(said.starts_with(&format!("{op}: {name} is ")), "{said}");
            }
        }
        // Only collectives can be planned by a number of elements, and only one variant has a
        // staging layout.
        let mut request = op.request(8, 6, 4);
        request.elements = true;
        let message = !op.multiplies() && op != Op::Barrier;
        assert_eq!(request.plan(Topology::new(0, 2)).is_ok(), message, "{op}");
        let mut request = op.request(8, 6, 4);
        request.staged.fetchers = Some(1);
        assert!(request.plan(Topology::new(0, 2)).is_err(), "{op}");
    }
    let mut request = Op::AllGatherMatmul.request(8, 6, 4);
    (request.variant, request.staged.fetchers) = (Some(Variant::Staged), Some(1));
    assert_eq!(request.plan(Topology::new(0, 2)).unwrap().variant(), Variant::Staged);
}

/// Tests that a plan for one rank refuses the variants that a plan for two ranks refuses.
#[test]
fn one_rank_refuses_what_two_ranks_refuse() {
    let mut refused = 0;
    for op in Op::ALL {
        for variant in op.variants() {
            for rms_norm in [None, Some(1e-6)] {
                let [one, two] = [1, 2].map(|size| {
                    let mut request = op.request(8, 16, 8);
                    (request.variant, request.rms_norm) = (Some(variant), rms_norm);
                    request.plan(Topology::new(0, size)).err().map(|error| error.to_string())
                });
                assert_eq!(one, two, "{op} {variant}");
                refused += usize::from(two.is_some());
            }
        }
    }
    assert!(refused > 0);
}
