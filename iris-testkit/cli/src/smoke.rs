//! Cases of `iris test --level smoke`: each operator and variant at least once, in few and small
//! calls, so that a device that takes a second per call finishes in minutes.

use iris_heap::{BackendKind, DType};
use iris_ops::{Epilogue, TileShape};
use iris_testkit::suite::{Case, Input, Op, Options};

/// Number of workgroups of a launch; small enough to be resident on any device.
const WORKGROUPS: usize = 8;

/// Worlds: number of ranks, threads of each rank on the CPU, and whether ranks are threads. Two
/// ranks run all cases; three run barriers between launches, the LL protocol, and relays; four are
/// processes that access each other's memory.
pub(super) const WORLDS: [(usize, usize, bool); 3] =
    [(2, WORKGROUPS, true), (3, WORKGROUPS, true), (4, WORKGROUPS, false)];

/// Smallest tile that has kernels: small matrices have several such tiles, and its kernels compile
/// fastest.
const TILE: TileShape = TileShape { m: 32, n: 32 };

/// Variants that contain a device barrier, which worlds of three ranks test as well.
const WITH_BARRIERS: [&str; 4] = ["flat", "spinlock", "atomic", "baseline"];

/// Cases for ranks that are processes: each way of accessing a peer's memory, once.
const AS_PROCESSES: [(Op, &str); 6] = [
    (Op::Barrier, "flat"),
    (Op::MatmulAllReduce, "one_shot"),
    (Op::AllReduce, "two_shot"),
    (Op::AllGatherMatmul, "pull"),
    (Op::AllGatherMatmul, "staged"),
    (Op::AllToAll, "push"),
];

/// Cases for a world of `ranks` ranks, one of [`WORLDS`].
pub(super) fn cases(backend: BackendKind, ranks: usize) -> Vec<Case> {
    match ranks {
        2 => ragged(backend).into_iter().chain(even(backend)).collect(),
        3 => {
            let mut cases = ragged(backend);
            cases.retain(|case| {
                WITH_BARRIERS.contains(&case.variant.as_str()) || is_passed_on(case)
            });
            let some = Options::new(1, 1, 0).backend(backend).members(vec![0, 2]);
            cases.push(Case::new(Op::Barrier, "flat", some));
            // Cases of the LL protocol. With three ranks, words come from several peers, for which
            // the kernels have other code than for one peer; 16-bit types have other code than f32.
            cases.extend(even(backend).into_iter().filter(in_words));
            cases
        }
        _ => {
            let mut cases = ragged(backend);
            cases.retain(|case| {
                AS_PROCESSES.iter().any(|&(op, v)| (op, v) == (case.op, &case.variant))
            });
            cases
        }
    }
}

/// Whether ranks relay data to each other in this case, which needs at least three ranks.
fn is_passed_on(case: &Case) -> bool {
    (case.op, case.variant.as_str()) == (Op::Broadcast, "two_shot")
}

/// Whether the case uses the LL protocol.
fn in_words(case: &Case) -> bool {
    ["ll", "two_shot_ll", "unfused_ll", "unfused_two_shot_ll"].contains(&case.variant.as_str())
}

/// Cases for each operator and variant on a shape that is no multiple of a tile, with real numbers,
/// alternating between f32 and f16.
fn ragged(backend: BackendKind) -> Vec<Case> {
    let all = each(&Options::new(33, 65, 17).backend(backend).columns_per_flag(8));
    let reals = |(turn, mut case): (usize, Case)| {
        let dtype = [DType::F32, DType::F16][turn % 2];
        let epilogue = if turn % 4 < 2 { Epilogue::None } else { Epilogue::Gelu };
        case.options = case.options.dtype(dtype);
        case.input = Input::Reals;
        case.bias = case.op.multiplies();
        if case.bias {
            case.options = case.options.epilogue(epilogue);
        }
        case
    };
    all.into_iter().enumerate().map(reals).collect()
}

/// Cases for each operator and variant on whole tiles, with integers in bf16, for which sums are
/// exact.
fn even(backend: BackendKind) -> Vec<Case> {
    let mut cases = each(&Options::new(64, 64, 64).backend(backend).dtype(DType::BF16));
    // The barrier has no shape, so it is tested only once, among the ragged cases.
    cases.retain(|case| case.op != Op::Barrier);
    cases
}

/// Cases for each operator, variant and shard with these options, with the tile that compiles
/// fastest.
fn each(options: &Options) -> Vec<Case> {
    let options = options.clone().tile(TILE).workgroups(WORKGROUPS);
    let mut cases = Case::each(&options);
    cases.extend(Case::each_normed(&options));
    cases
}

#[cfg(test)]
mod tests {

    use super::*;

    #[test]
    fn every_op_and_variant_is_there_and_they_are_few() {
        let all: Vec<_> = WORLDS.iter().map(|world| cases(BackendKind::Cpu, world.0)).collect();
        for op in Op::ALL {
            for variant in op.variants() {
                let is = |case: &&Case| (case.op, case.variant.as_str()) == (op, variant.name());
                let two: Vec<_> = all[0].iter().filter(is).collect();
                assert!(!two.is_empty(), "{op} {variant}");
                let even = |case: &&&Case| case.options.dtype == DType::BF16;
                assert_eq!(two.iter().any(|case| even(&case)), op != Op::Barrier, "{op}");
            }
        }
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            assert!(all[0].iter().any(|case| case.op.multiplies() && case.options.dtype == dtype));
        }
        let count: usize = all.iter().map(Vec::len).sum();
        let ways = Case::each(&Options::new(1, 1, 1)).len();
        assert!((50..=3 * ways).contains(&count), "{count} of {ways}");
    }

    #[test]
    fn three_ranks_have_every_barrier_and_four_each_of_theirs() {
        let three = cases(BackendKind::Cpu, 3);
        for word in WITH_BARRIERS {
            assert!(three.iter().any(|case| case.variant == word), "{word}");
        }
        assert!(three.iter().any(|case| case.options.members.is_some()));
        let variants = Op::ALL.into_iter().flat_map(Op::variants);
        let words = variants.filter(|it| it.name() == "ll" || it.name().ends_with("_ll")).count();
        let plain = |case: &&Case| case.options.rms_norm.is_none();
        let in_words = three.iter().filter(plain).filter(|case| in_words(case));
        assert_eq!(in_words.count(), words);
        assert_eq!(three.iter().filter(|case| is_passed_on(case)).count(), 1);
        let four = cases(BackendKind::Cpu, 4);
        for (op, variant) in AS_PROCESSES {
            assert!(
                four.iter().any(|case| case.op == op && case.variant == variant),
                "{op} {variant}"
            );
        }
    }
}
