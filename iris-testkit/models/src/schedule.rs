//! Comparison of the schedules of `schedule.h` with those of [`iris_kernels::schedule`]: all
//! results must be equal.

#![allow(unsafe_code, reason = "the hooks that let a model run the device headers")]

use iris_kernels::schedule::{
    Arriving, Collective, Grid, Items, Rounds, Shard, SplitGrid, Tile, Units, die_swizzle, owner,
    part_of, split,
};
use proptest::prelude::*;

/// Arguments of one schedule function, whose results are compared.
#[derive(Clone, Copy, Debug)]
pub enum Shape {
    /// Split of a number of items into a number of parts.
    Split(u32, u32),
    /// Number of workgroups, dealt to a number of dies.
    Dies(u32, u32),
    /// Tiles of a matrix, distributed over a number of ranks.
    Tiles(Grid, u32),
    /// Units of a staged gather.
    Units(Units),
    /// Items of a small message.
    Items(Items),
    /// Tiles of a GEMM whose rows are owned by ranks, in rounds.
    Rounds(Rounds),
    /// Rows that are multiplied as they arrive.
    Arriving(Arriving),
}

fn put(out: &mut Vec<u32>, tile: Tile) {
    out.extend([tile.row, tile.col, tile.rows, tile.cols]);
}

impl Shape {
    /// Concatenated results of all Rust functions for this shape.
    pub fn in_rust(&self) -> Vec<u32> {
        let mut out = Vec::new();
        match *self {
            Shape::Split(total, parts) => {
                for part in 0..parts {
                    let range = split(total, parts, part);
                    out.extend([range.start, range.end]);
                }
                out.extend((0..total).map(|at| part_of(total, parts, at)));
            }
            Shape::Dies(count, dies) => {
                out.extend((0..count).map(|workgroup| die_swizzle(workgroup, count, dies)));
            }
            Shape::Tiles(grid, size) => {
                for tile in 0..grid.tiles() {
                    put(&mut out, grid.tile(tile));
                    out.push(owner(tile, size));
                }
                let all = SplitGrid { grid, size };
                out.extend((0..=size).map(|rank| all.first(rank)));
                for tile in 0..all.tiles() {
                    out.push(all.owner(tile));
                    put(&mut out, all.tile(tile));
                }
            }
            Shape::Items(items) => {
                for (from, to) in
                    (0..items.size).flat_map(|from| (0..items.size).map(move |to| (from, to)))
                {
                    out.extend([items.rows_sent(from, to), items.sent(from, to)]);
                    out.extend([items.source_row(to), items.target_row(from, to)]);
                }
            }
            Shape::Rounds(rounds) => {
                for position in 0..rounds.tiles * rounds.ranks {
                    let (rank, tile) = rounds.at(position);
                    out.extend([rank, tile]);
                }
            }
            Shape::Arriving(arriving) => {
                out.extend((0..arriving.rows * arriving.size).map(|turn| arriving.row(turn)));
            }
            Shape::Units(units) => {
                for unit in 0..units.units() {
                    out.push(units.source(unit));
                    put(&mut out, units.area(unit));
                }
                let blocks = units.row_blocks();
                for block in 0..blocks {
                    let (row, rows, source, within) = units.row_block(block);
                    out.extend([row, rows, source, within]);
                }
                for rank in 0..units.size {
                    out.extend((0..units.units()).map(|at| units.unit_at(at, rank)));
                    out.extend((0..blocks).map(|at| units.row_block_at(at, rank)));
                    for block in 0..blocks {
                        let needs: Vec<u32> = units.needs(block, rank).collect();
                        out.push(needs.len() as u32);
                        out.extend(needs);
                    }
                }
            }
        }
        out
    }

    /// Position of the shape in the list of shapes, and its numbers.
    #[cfg(iris_cxx)]
    fn numbers(&self) -> (u32, Vec<u32>) {
        match *self {
            Shape::Split(total, parts) => (0, vec![total, parts]),
            Shape::Dies(count, dies) => (1, vec![count, dies]),
            Shape::Tiles(Grid { rows, cols, tile_m, tile_n }, size) => {
                (2, vec![rows, cols, tile_m, tile_n, size])
            }
            Shape::Units(Units { shard, size, m, k, tile_m, k_group, m_contiguous }) => {
                let by_columns = (shard == Shard::Columns).into();
                (3, vec![by_columns, size, m, k, tile_m, k_group, m_contiguous.into()])
            }
            Shape::Items(Items { collective, size, rows, cols, per_item }) => {
                let (number, root) = match collective {
                    Collective::AllReduce => (0, 0),
                    Collective::ReduceScatter => (1, 0),
                    Collective::AllGather => (2, 0),
                    Collective::AllToAll => (3, 0),
                    Collective::Broadcast { root } => (4, root),
                    // On the device `flow::Parts` divides these messages; scenarios compare it.
                    Collective::TwoShot { .. } => unreachable!("not a shape of these tests"),
                };
                (4, vec![number, size, rows, cols, per_item, root])
            }
            Shape::Rounds(Rounds { tiles, span, ranks }) => (5, vec![tiles, span, ranks]),
            Shape::Arriving(Arriving { rows, part, size, rank }) => {
                (6, vec![rows, part, size, rank])
            }
        }
    }

    /// Concatenated results of the functions in schedule.h; `room` is the expected number of
    /// values.
    #[cfg(iris_cxx)]
    pub fn in_cxx(&self, room: usize) -> Vec<u32> {
        // The buffer is larger than needed, so that a program that writes too many values is
        // noticed.
        let mut out = vec![0; room + 16];
        let (kind, numbers) = self.numbers();
        let (values, room) = (out.as_mut_ptr(), out.len() as u32);
        // SAFETY: `numbers` has all numbers of a shape of this kind, and `values` has room for
        // `room` values.
        let count = unsafe { iris_schedule(kind, numbers.as_ptr(), values, room) };
        out.truncate(count as usize);
        out
    }
}

#[cfg(iris_cxx)]
unsafe extern "C-unwind" {
    fn iris_schedule(kind: u32, numbers: *const u32, values: *mut u32, room: u32) -> u32;
}

/// Random grids of tiles.
pub fn grids() -> impl Strategy<Value = Grid> {
    (0..120u32, 0..120u32, 1..50u32, 1..50u32).prop_map(|(rows, cols, tile_m, tile_n)| Grid {
        rows,
        cols,
        tile_m,
        tile_n,
    })
}

/// Random staged gathers.
pub fn units() -> impl Strategy<Value = Units> {
    let shard = prop_oneof![Just(Shard::Rows), Just(Shard::Columns)];
    let shape = (0..90u32, 0..90u32, 1..40u32, 1..40u32);
    (shard, 1..9u32, shape, any::<bool>()).prop_map(|(shard, size, shape, m_contiguous)| {
        let (m, k, tile_m, k_group) = shape;
        Units { shard, size, m, k, tile_m, k_group, m_contiguous }
    })
}

/// Random shapes.
pub fn shapes() -> impl Strategy<Value = Shape> {
    let collective = prop_oneof![
        Just(Collective::AllReduce),
        Just(Collective::ReduceScatter),
        Just(Collective::AllGather),
        Just(Collective::AllToAll),
        (0..8u32).prop_map(|root| Collective::Broadcast { root }),
    ];
    let per_item = prop_oneof![Just(2u32), Just(4u32)];
    let items = (collective, 1..9u32, 0..2000u32, 0..2000u32, per_item).prop_map(
        |(collective, size, rows, cols, per_item)| Items { collective, size, rows, cols, per_item },
    );
    let rounds = (1..90u32, 1..40u32, 1..9u32).prop_map(|(tiles, span, ranks)| Rounds {
        tiles,
        span,
        ranks,
    });
    let arriving = (1..40u32, 1..40u32, 2..9u32, 0..8u32).prop_map(|(rows, part, size, rank)| {
        Arriving { rows, part: part.min(rows), size, rank: rank % size }
    });
    prop_oneof![
        rounds.prop_map(Shape::Rounds),
        arriving.prop_map(Shape::Arriving),
        items.prop_map(Shape::Items),
        (0..2000u32, 1..70u32).prop_map(|(total, parts)| Shape::Split(total, parts)),
        (1..400u32, 1..10u32).prop_map(|(count, dies)| Shape::Dies(count, dies)),
        (grids(), 1..9u32).prop_map(|(grid, size)| Shape::Tiles(grid, size)),
        units().prop_map(Shape::Units),
    ]
}

/// Compares the given shapes and `random` random ones; returns the number of equal results.
///
/// # Errors
/// The smallest shape in which the two differ.
#[cfg(iris_cxx)]
pub fn compare(given: &[Shape], random: u32) -> Result<u64, String> {
    use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

    let answers = std::cell::Cell::new(0);
    let equal = |shape: Shape| {
        let rust = shape.in_rust();
        let cxx = shape.in_cxx(rust.len());
        answers.set(answers.get() + rust.len() as u64);
        prop_assert!(cxx == rust, "{shape:?}: schedule.h says {cxx:?}, schedule.rs {rust:?}");
        Ok(())
    };
    for &shape in given {
        equal(shape).map_err(|error| error.to_string())?;
    }
    let config = Config { cases: random, failure_persistence: None, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    TestRunner::new_with_rng(config, rng)
        .run(&shapes(), equal)
        .map_err(|error| error.to_string())?;
    Ok(answers.get())
}
