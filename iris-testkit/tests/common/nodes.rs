//! Cases of operators over several nodes, and the runner of these cases on one rank.

use iris_heap::{BackendKind, DType, HeapOptions, SymmetricHeap, World};
use iris_ops::{AllReduce, Shard, TileShape};
use iris_testkit::Level;
use iris_testkit::rank_setup::{Rig, Room};
use iris_testkit::suite::{Case, Input, Op, Options, room_for_nodes, run_case};

use super::taken;

pub const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Shapes M, N, K: ragged shapes, single rows and columns, K of 0, fewer rows than ranks, and empty
/// matrices.
const SHAPES: [(usize, usize, usize); 9] = [
    (33, 65, 17),
    (1, 64, 32),
    (64, 1, 5),
    (7, 3, 0),
    (3, 5, 4),
    (0, 6, 3),
    (107, 96, 48),
    (130, 40, 70),
    (9, 0, 5),
];

/// Case of each operator with the automatic choice; all-gather-matmul has one for each way to split A.
pub fn each(options: &Options) -> Vec<Case> {
    let mut cases = Vec::new();
    for op in Op::ALL {
        let mut options = options.clone();
        if !op.multiplies() {
            options.k = 0;
        }
        cases.push(Case::new(op, "auto", options.clone()));
        if op == Op::AllGatherMatmul {
            cases.push(Case::new(op, "auto", options.shard(Shard::Columns)));
        }
    }
    cases
}

/// Runs all cases in one heap on this rank. Collective.
pub fn run_cases(
    world: &World,
    (options, room): (&HeapOptions, Room),
    cases: &[&Case],
) -> anyhow::Result<()> {
    let heap = Rig::open(world, options.clone(), room)?.heap;
    for case in cases {
        run_case(&heap, case)?;
    }
    heap.close()?;
    world.close()?;
    Ok(())
}

/// Runs all cases that operators take on `backend`, on this rank of a world of several nodes.
/// Collective; closes the world.
pub fn run_on_nodes(world: &World, backend: BackendKind, cases: Vec<Case>) -> anyhow::Result<()> {
    run_in_heap_on_nodes(world, world.nodes(), backend, cases)
}

/// Runs cases as [`run_on_nodes`] does in a heap that has `nodes` nodes, of a world that may have
/// fewer.
pub fn run_in_heap_on_nodes(
    world: &World,
    nodes: usize,
    backend: BackendKind,
    mut cases: Vec<Case>,
) -> anyhow::Result<()> {
    let size = world.size();
    anyhow::ensure!(nodes > 1, "{nodes} node, expected several");
    cases.retain(|case| taken(case, size));
    cases.iter_mut().for_each(|case| case.options.backend = backend);
    let rooms = cases.iter().map(|case| room_for_nodes(case, size, nodes));
    let room =
        rooms.collect::<anyhow::Result<Vec<_>>>()?.into_iter().fold(Room::default(), Room::or);
    let options = HeapOptions::new().threads(1).backend(backend);
    run_cases(world, (&options, room), &cases.iter().collect::<Vec<_>>())
}

/// Description of the fabric over which operators of `world` run steps between nodes. Cases would
/// also pass over another fabric than a test expects. Collective.
pub fn fabric_of(world: &World, backend: BackendKind) -> anyhow::Result<String> {
    let options = HeapOptions::new().data_bytes(1 << 20).threads(1).backend(backend);
    let heap = SymmetricHeap::open(world, options)?;
    let op = AllReduce::new(&heap, &iris_ops::all_reduce::Options::rows(8, 16).plan(&heap)?)?;
    let text = format!("{op:?}");
    op.free()?;
    heap.close()?;
    let fabric = text.split("fabric: ").nth(1);
    Ok(fabric.unwrap_or_default().split_inclusive(", digest").next().unwrap_or_default().into())
}

/// Cases of all operators in one shape for each element type.
pub fn type_cases() -> Vec<Case> {
    TYPES.into_iter().flat_map(|dtype| each(&Options::new(37, 21, 13).dtype(dtype))).collect()
}

/// Cases of all operators, with every shape in [`SHAPES`] and every element type.
pub fn shape_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (index, (m, n, k)) in SHAPES.into_iter().enumerate() {
        for (turn, dtype) in TYPES.into_iter().enumerate() {
            for input in [Input::Integers, Input::Reals] {
                let at = index + turn + usize::from(input == Input::Reals);
                let blocks = [None, Some(1), Some(3)][at % 3];
                if Level::from_env() <= Level::Quick && !at.is_multiple_of(4) {
                    continue;
                }
                let mut options = Options::new(m, n, k).dtype(dtype);
                options.blocks = blocks;
                if at % 2 == 1 {
                    options = options.tile(TileShape { m: 8, n: 16 });
                }
                for mut case in each(&options) {
                    (case.input, case.seed) = (input, 1 + at as u64);
                    cases.push(case);
                }
            }
        }
    }
    cases
}
