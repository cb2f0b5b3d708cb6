//! What plans of the operators come to.

use iris_heap::{BackendKind, DType};

use super::{all_gather, all_gather_matmul, all_reduce, matmul_all_reduce};
use crate::kind::{Op, Variant};
use crate::options::{Ranks, Shard, TileShape};
use crate::tune::MESSAGE_GROUPS;

#[test]
fn a_message_on_a_gpu_takes_as_many_workgroups_as_it_has_work_for() {
    use all_reduce::Variant::{OneShot, TwoShot};
    let ranks = Ranks::new(0, 4).on(BackendKind::Cuda);
    let tiles = |variant, m, n| {
        let options = all_reduce::Options::rows(m, n).dtype(DType::BF16).variant(variant);
        let plan = options.plan(ranks).unwrap();
        let choice = plan.at(m);
        (plan.grid(choice.form, choice.tile).tiles(), plan.work(choice, (m, n), 0))
    };
    assert_eq!(tiles(OneShot, 1, 4096), (1, 1));
    assert_eq!(tiles(OneShot, 8, 4096), (8, 8));
    assert_eq!(tiles(OneShot, 1, 5000), (2, 2));
    // Each rank owns 32.
    assert_eq!(tiles(TwoShot, 128, 4096), (128, MESSAGE_GROUPS));
    assert_eq!(tiles(TwoShot, 2048, 4096), (128, MESSAGE_GROUPS));
    assert_eq!(tiles(TwoShot, 1, 8 << 20), (128, MESSAGE_GROUPS));
    // Larger ones have tiles of half a MiB.
    assert_eq!(tiles(TwoShot, 16384, 4096).0, 256);
    let options = all_gather::Options::rows(2048, 4096).dtype(DType::BF16);
    let plan = options.plan(ranks).unwrap();
    let work = |m| plan.work(plan.at(m), (m, 4096), 0);
    let choice = plan.at(2048);
    let split = plan.split_grid(plan.grid(choice.form, choice.tile));
    assert_eq!((split.tiles(), work(2048)), (128, 32));
    // A call of fewer rows has less.
    assert_eq!((work(64), work(0)), (1, 1));
}

#[test]
fn an_automatic_plan_serves_small_and_large_calls() {
    let ranks = Ranks::new(1, 4);
    let plan = matmul_all_reduce::Options::new(4096, 512, 64).plan(ranks).unwrap();
    assert_eq!((plan.at(1).variant, plan.at(4096).variant), (Variant::OneShot, Variant::TwoShot));
    assert_eq!((plan.variant(), plan.choices().last().unwrap().upto), (Variant::TwoShot, 4096));
    assert!(plan.choices().windows(2).all(|two| two[0].upto < two[1].upto), "{plan}");
    // Who says how it is to be done says it for all calls.
    let one = matmul_all_reduce::Options::new(4096, 512, 64);
    let one = one.variant(matmul_all_reduce::Variant::TwoShot).plan(ranks).unwrap();
    assert_eq!(one.choices().len(), 1);
    assert!(plan.data_bytes() >= one.data_bytes() && plan.signal_bytes() >= one.signal_bytes());
}

/// What nobody asks anything else of takes products of whole matrices on GPUs.
#[test]
fn on_gpus_products_are_whole_where_nothing_is_observed() {
    use BackendKind::{Cpu, Cuda};
    let sum = |m, size, backend| {
        let options = matmul_all_reduce::Options::new(m, 8192, 3584).dtype(DType::BF16);
        let plan = options.plan(Ranks::new(0, size).on(backend)).unwrap();
        plan.at(m).variant
    };
    // 1 MiB of two ranks, 256 KiB of more.
    assert_eq!(sum(64, 2, Cuda), Variant::UnfusedOneShot);
    assert_eq!(sum(65, 2, Cuda), Variant::Unfused);
    assert_eq!((sum(16, 4, Cuda), sum(17, 4, Cuda)), (Variant::UnfusedOneShot, Variant::Unfused));
    assert_eq!((sum(64, 1, Cuda), sum(4096, 4, Cpu)), (Variant::OneShot, Variant::TwoShot));
    let gather = all_gather_matmul::Options::new(512, 7168, 8192).dtype(DType::BF16);
    let variant = |options: all_gather_matmul::Options| {
        options.plan(Ranks::new(0, 2).on(Cuda)).unwrap().variant()
    };
    assert_eq!(variant(gather.clone()), Variant::Unfused);
    assert_eq!(variant(gather.clone().counted(true)), Variant::Baseline);
    assert_eq!(variant(gather.clone().trace_spans(8)), Variant::Baseline);
    assert_eq!(variant(gather.workgroups(8)), Variant::Baseline);
}

/// Tiles of a gathered A lie in one rank's part, and go along the lines of its memory.
#[test]
fn tiles_of_a_gathered_a_are_pieces_of_its_lines() {
    use all_gather_matmul::{Options, Variant::Unfused};
    for backend in [BackendKind::Cpu, BackendKind::Cuda] {
        let ranks = Ranks::new(0, 4).on(backend);
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
            // Nothing but A and what a library needs: it is gathered where it is multiplied.
            let library = choice.needs.workspace - (m * k * 2) as u64;
            assert_eq!((choice.needs.inbox_half(), library % 8), (0, 0));
            assert!(plan.data_bytes() >= (m * k * 2) as u64);
        }
    }
}

#[test]
fn plans_are_said_in_a_line() {
    let options = all_reduce::Options::new(1000).variant(all_reduce::Variant::OneShot);
    let tile = TileShape { m: 1, n: 500 };
    let plan = options.tile(tile).plan(Ranks::new(2, 3)).unwrap();
    let said = "all_reduce of 1000 f32, rank 2 of 3 on cpu: one_shot by tiles of 1 x 500; \
                24576 bytes of data, 3072 of signals";
    assert_eq!(plan.to_string(), said);
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
        "all_reduce: variant is ring, expected auto, one_shot, two_shot, ll, spinlock, atomic"
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
