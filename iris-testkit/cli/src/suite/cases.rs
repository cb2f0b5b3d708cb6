//! Cases of `iris test`: each operator, variant and element type, over ragged shapes.

use iris_heap::{BackendKind, DType};
use iris_ops::{Epilogue, Library, StagingLayout, TileShape};
use iris_testkit::Level;
use iris_testkit::stress::Setting;
use iris_testkit::suite::{Case, Input, Layout, Op, Options as OpOptions, Residual, plan};
use serde::{Deserialize, Serialize};

use crate::job::text;
use crate::smoke;

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Shapes M, N, K: ragged shapes, single rows and columns, fewer rows than ranks, K of 0, and empty
/// matrices.
const SHAPES: [(usize, usize, usize); 10] = [
    (33, 65, 17),
    (107, 96, 48),
    (1, 64, 32),
    (64, 1, 5),
    (3, 5, 4),
    (130, 200, 70),
    (7, 3, 0),
    (0, 6, 3),
    (5, 7, 1),
    (200, 33, 130),
];

/// Edge cases of products, tested in every type at every level: one row, one column, both, and
/// values of K that are no multiple of the 8 elements (16 bytes) that kernels load at a time.
const EDGES: [(usize, usize, usize); 4] = [(1, 72, 13), (67, 1, 29), (1, 1, 9), (40, 48, 100)];

/// Shapes of products with few rows, and so many columns that each multiprocessor of a large GPU
/// has a tile; some variants then are a single launch.
const FEW: [(usize, usize, usize); 5] =
    [(1, 6280, 72), (17, 8200, 200), (63, 8192, 136), (128, 12808, 40), (127, 8200, 264)];

/// Tiles to test: the plan's choice, and small ones that cut ragged shapes into several.
const TILES: [Option<(usize, usize)>; 3] = [None, Some((8, 16)), Some((5, 3))];

/// Part of the suite that the command line selects.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Selection {
    #[serde(with = "text")]
    pub(crate) level: Level,
    /// Name of the only operator to test; `None` for all.
    pub(crate) op: Option<String>,
    /// Number of nodes that the ranks are split over.
    pub(crate) nodes: usize,
}

impl Selection {
    /// Cases for a world of `ranks` ranks, in the same order on every rank.
    pub(crate) fn cases(&self, backend: BackendKind, ranks: usize) -> Vec<Case> {
        let mut cases = match self.level {
            Level::Smoke => smoke::cases(backend, ranks),
            level => cases(level, backend),
        };
        cases.retain(|case| self.op.as_ref().is_none_or(|op| op == case.op.name()));
        if self.nodes > 1 {
            // Variants are tested on one node; over several, one case of each operator is left.
            cases.retain(|case| {
                case.op.variants().first().is_some_and(|it| it.name() == case.variant)
            });
            cases.iter_mut().for_each(|case| case.variant = "auto".into());
        }
        cases
    }
}

/// Cases of `level`, which must be a level above smoke.
fn cases(level: Level, backend: BackendKind) -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, (m, n, k)) in EDGES.into_iter().enumerate() {
        for (turn, dtype) in TYPES.into_iter().enumerate() {
            let options = OpOptions::new(m, n, k).dtype(dtype).backend(backend);
            let products = ops(&options.columns_per_flag(8), index + turn);
            cases.extend(products.into_iter().filter(|case| case.op.multiplies()));
        }
    }
    for (index, (m, n, k)) in SHAPES.into_iter().enumerate() {
        for (turn, dtype) in TYPES.into_iter().enumerate() {
            let at = index + turn;
            let tiles = match level {
                Level::Quick if at % 3 != 0 => continue,
                Level::Full => 0..TILES.len(),
                _ => at % 3..at % 3 + 1,
            };
            for tile in tiles.map(|tile| TILES[tile]) {
                let options = OpOptions::new(m, n, k).dtype(dtype).backend(backend);
                let mut options = options.columns_per_flag(8);
                if let Some((m, n)) = tile {
                    options = options.tile(TileShape { m, n });
                }
                cases.extend(ops(&options, at));
            }
        }
    }
    if !backend.traits().host_threads {
        cases.extend(few(backend));
    }
    // Other devices send no packs.
    if backend == BackendKind::Cuda {
        cases.extend(packs());
    }
    cases
}

/// Messages by the LL protocol that consist of packs, with and without gaps between rows, and at
/// addresses that are no multiple of a vector.
fn packs() -> Vec<Case> {
    let mut cases = Vec::new();
    for (turn, dtype) in TYPES.into_iter().enumerate() {
        let (m, n, k) = Setting::PACKS;
        let options = OpOptions::new(m, n, k).dtype(dtype).backend(BackendKind::Cuda);
        for (index, mut case) in Case::each(&options).into_iter().enumerate() {
            if !Setting::has_packs(&case.variant) {
                continue;
            }
            let at = turn + index;
            case.seed = 1 + at as u64;
            case.input = [Input::Integers, Input::Reals][at % 2];
            case.bias = case.op.multiplies();
            case.options = case.options.count_traffic(at % 3 == 0);
            case.c = Layout { before: at % 3, pad: at % 2 * 3, ..Layout::default() };
            case.a = Layout { before: at % 2, ..Layout::default() };
            cases.push(case);
        }
    }
    cases
}

/// Matrix products with an all-reduce, in the shapes [`FEW`] and various layouts. With some of
/// these layouts only rank 0 can use tensor maps for A.
fn few(backend: BackendKind) -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, (m, n, k)) in FEW.into_iter().enumerate() {
        for (turn, dtype) in TYPES[1..].iter().enumerate() {
            for variant in ["unfused_ll", "unfused_one_shot", "one_shot"] {
                let at = 2 * index + turn;
                let options = OpOptions::new(m, n, k).dtype(*dtype).backend(backend);
                let options = options.library([Library::Auto, Library::Ours][turn]);
                let mut case = Case::new(Op::MatmulAllReduce, variant, options);
                let ranks = iris_ops::Topology::new(0, 2).on(backend);
                if plan(case.op, variant, ranks, &case.options).is_err() {
                    continue;
                }
                case.seed = 1 + at as u64;
                case.bias = at % 3 == 1;
                case.input = [Input::Integers, Input::Reals][turn];
                case.uneven = at % 4 == 3;
                let skewed = at % 8 == 0;
                case.a = Layout { transposed: at % 4 == 1, skewed, ..Layout::default() };
                case.b.transposed = at / 2 % 2 == 1;
                case.c = Layout { transposed: at % 5 == 4, pad: at % 3 * 4, ..Layout::default() };
                cases.push(case);
            }
        }
    }
    cases
}

/// Cases for every op, variant and shard with these options; `at` selects further features.
fn ops(options: &OpOptions, at: usize) -> Vec<Case> {
    let in_turns = |mut case: Case| {
        case.seed = 1 + at as u64;
        case.uneven = at % 4 == 1;
        if at.is_multiple_of(2) {
            case.input = Input::Reals;
            case.bias = case.op.multiplies();
            if case.bias && at.is_multiple_of(4) {
                case.options = case.options.epilogue(Epilogue::Gelu);
            }
        }
        // One case in five has counters: on a GPU, kernels that count are separate builds, and the
        // suite compares the counts with the expected ones.
        case.options = case.options.count_traffic(at % 5 == 3);
        if at % 3 == 1 {
            case.options = case.options.staging(StagingLayout::MContiguous);
        }
        case
    };
    let mut cases = Case::each(options);
    cases.extend(Case::each_normed(options).into_iter().map(|mut case| {
        let places = [Residual::Apart, Residual::None, Residual::InC];
        case.residual = places[at % places.len()];
        case
    }));
    cases.into_iter().map(in_turns).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_op_variant_and_type_is_there() {
        for level in [Level::Quick, Level::Normal, Level::Full] {
            let cases = cases(level, BackendKind::Cpu);
            for op in Op::ALL {
                for variant in op.variants() {
                    for dtype in TYPES {
                        let fits = |case: &&Case| {
                            case.op == op
                                && case.variant == variant.name()
                                && case.options.dtype == dtype
                        };
                        let fitting: Vec<_> = cases.iter().filter(fits).collect();
                        assert!(!fitting.is_empty(), "{level:?} {op} {variant}");
                        let edge = |is: fn(&OpOptions) -> bool| {
                            let is = |case: &&Case| {
                                is(&case.options) && !case.options.k.is_multiple_of(8)
                            };
                            fitting.iter().any(|&case| is(&case)) || !op.multiplies()
                        };
                        assert!(edge(|options| options.m == 1), "{level:?} {op} {variant}: M = 1");
                        assert!(edge(|options| options.n == 1), "{level:?} {op} {variant}: N = 1");
                    }
                }
            }
        }
    }

    #[test]
    fn larger_messages_of_the_suite_consist_of_packs() {
        let all = packs();
        let device = iris_ops::Device::named("h100").unwrap();
        for case in &all {
            for size in [2, 4] {
                let ranks = iris_ops::Topology::new(0, size).on_device(device).untuned();
                let plan = plan(case.op, &case.variant, ranks, &case.options).unwrap();
                assert!(plan.has_packs_at(Setting::PACKS.0), "{case:?} of {size}");
            }
        }
        for dtype in TYPES {
            let of_type = |case: &&Case| case.options.dtype == dtype;
            assert_eq!(all.iter().filter(of_type).count(), 8, "{dtype:?}");
        }
    }
}
