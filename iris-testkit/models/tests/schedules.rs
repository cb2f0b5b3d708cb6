//! Tests of properties of schedules, which are pure functions, over random shapes.
//!
//! The last test runs the control flow of each op, workgroup by workgroup, over words on which no
//! wait blocks. It records which workgroup sets and awaits which word. Then it plays the records of
//! all ranks against each other: every awaited word must be set exactly once, and every wait must
//! end.
//!
//! This file is long because the bodies of all ops are of no use elsewhere.

use std::collections::{HashMap, HashSet};

use iris_kernels::schedule::{Grid, SplitGrid, Tile, Units, die_swizzle, owner, part_of, split};
use iris_models::recorder::{Event, Recorder, Script};
use iris_models::schedule::{Shape as Tuned, grids, units};
use iris_models::{Operation, Place, ThreadId};
use iris_sync::barrier::Members;
use iris_sync::flow::{
    self, AccumulateTiles, DeliverTiles, Delivery, Exchange, GatherTiles, Launch, LlRows, LlTiles,
    Owners, ReduceTiles, StagedTiles, Staging, Turns,
};
use iris_sync::ll::Rows;
use iris_sync::{Aborted, Access, Channel, End, Field, LINE_WORDS, Record, Shape};
use iris_testkit::Level;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

/// Whether the numbers that `number` gives to `count` workgroups are a permutation. It must keep 0
/// in place and give consecutive numbers to the workgroups of a die.
fn deals(number: impl Fn(u32, u32, u32) -> u32, count: u32, dies: u32) -> bool {
    let all: HashSet<u32> = (0..count).map(|workgroup| number(workgroup, count, dies)).collect();
    let whole = all.len() == count as usize && all.iter().all(|&it| it < count);
    let side_by_side = (0..count.saturating_sub(dies)).all(|workgroup| {
        number(workgroup + dies, count, dies) == number(workgroup, count, dies) + 1
    });
    whole && side_by_side && number(0, count, dies) == 0
}

#[test]
fn dealing_workgroups_to_dies_is_a_permutation() {
    for (count, dies) in (1..700).flat_map(|count| (1..10).map(move |dies| (count, dies))) {
        assert!(deals(die_swizzle, count, dies), "{count} workgroups, {dies} dies");
    }
    // Check of `deals` itself: it must refuse a permutation that forgets the remainder, and the
    // identity.
    let even = |workgroup, count, dies| workgroup % dies * (count / dies) + workgroup / dies;
    assert!(deals(even, 304, 8) && !deals(even, 301, 8));
    assert!(!deals(|workgroup, _, _| workgroup, 304, 8));
}

fn config() -> ProptestConfig {
    let cases = Level::from_env().pick(100, 1000, 20_000);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Whether the tiles cover `rows` x `cols` without overlap.
fn covers(tiles: impl Iterator<Item = Tile>, rows: u32, cols: u32) -> bool {
    let mut seen = vec![false; (rows * cols) as usize];
    for tile in tiles {
        for row in tile.row..tile.row + tile.rows {
            for col in tile.col..tile.col + tile.cols {
                if std::mem::replace(&mut seen[(row * cols + col) as usize], true) {
                    return false;
                }
            }
        }
    }
    seen.into_iter().all(|seen| seen)
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_split_is_even_and_part_of_is_its_inverse(total in 0..5000u32, parts in 1..70u32) {
        let mut next = 0;
        for part in 0..parts {
            let range = split(total, parts, part);
            prop_assert_eq!(range.start, next);
            prop_assert!(range.len() as u32 - total / parts <= 1);
            prop_assert!(range.clone().all(|at| part_of(total, parts, at) == part));
            next = range.end;
        }
        prop_assert_eq!(next, total);
    }

    #[test]
    fn tiles_cover_a_matrix_once(grid in grids()) {
        let tiles = (0..grid.tiles()).map(|tile| grid.tile(tile));
        prop_assert!(covers(tiles, grid.rows, grid.cols));
    }

    #[test]
    fn tiles_of_split_rows_cover_it_once_and_cross_no_boundary(grid in grids(), size in 1..9u32) {
        let all = SplitGrid { grid, size };
        let tiles = (0..all.tiles()).map(|tile| all.tile(tile));
        prop_assert!(covers(tiles, grid.rows, grid.cols));
        let mut places = HashSet::new();
        for tile in 0..all.tiles() {
            let (owner, area) = (all.owner(tile), all.tile(tile));
            let rows = split(grid.rows, size, owner);
            prop_assert!(rows.start <= area.row && area.row + area.rows <= rows.end);
            // Slot of a tile in its owner's inbox: it must be unique, and below the number of slots
            // for the largest part.
            let place = tile - all.first(owner);
            prop_assert!(places.insert((owner, place)) && place < all.part(0).tiles());
        }
    }

    #[test]
    fn owners_take_turns_and_places_are_unique(tiles in 0..300u32, size in 1..65u32) {
        let mut places = HashSet::new();
        for tile in 0..tiles {
            let (owner, place) = (owner(tile, size), tile / size);
            prop_assert!(owner < size && place < tiles.div_ceil(size));
            prop_assert!(places.insert((owner, place)));
        }
    }

    /// Tests that a call with fewer rows needs no more words or slots than the plan has.
    #[test]
    fn smaller_calls_fit(grid in grids(), units in units(), fewer in 0..90u32) {
        let size = units.size;
        let less = Grid { rows: grid.rows.min(fewer), ..grid };
        prop_assert!(less.tiles() <= grid.tiles());
        let (small, large) = (SplitGrid { grid: less, size }, SplitGrid { grid, size });
        prop_assert!(small.tiles() <= large.tiles());
        prop_assert!((0..size).all(|rank| small.part(rank).tiles() <= large.part(0).tiles()));
        let small = Units { m: units.m.min(fewer), ..units };
        prop_assert!(small.units() <= units.units());
    }

    #[test]
    fn units_cover_every_shard_once(units in units()) {
        let area = |unit| units.area(unit);
        prop_assert!(covers((0..units.units()).map(area), units.m, units.k));
        for source in 0..units.size {
            let (rows, cols) = units.shard_of(source);
            let (blocks, groups) = units.blocks(source);
            for (row, group) in (0..blocks).flat_map(|row| (0..groups).map(move |g| (row, g))) {
                let unit = units.unit(source, row, group);
                let area = units.area(unit);
                prop_assert_eq!(units.source(unit), source);
                prop_assert_eq!(area.row, rows.start + row * units.tile_m);
                prop_assert_eq!(area.col, cols.start + group * units.k_group);
                prop_assert!(area.row + area.rows <= rows.end && area.col + area.cols <= cols.end);
            }
        }
    }

    #[test]
    fn every_rank_fetches_every_unit_once_and_works_on_every_block_once(units in units()) {
        for rank in 0..units.size {
            let fetched: HashSet<_> =
                (0..units.units()).map(|position| units.unit_at(position, rank)).collect();
            prop_assert_eq!(fetched.len() as u32, units.units());
            let blocks = units.row_blocks();
            let worked: HashSet<_> = (0..blocks).map(|at| units.row_block_at(at, rank)).collect();
            prop_assert_eq!(worked.len() as u32, blocks);
            let whole = Tile { row: 0, col: 0, rows: 0, cols: 1 };
            let strip = |block| {
                let (row, rows, _, _) = units.row_block(block);
                Tile { row, rows, ..whole }
            };
            prop_assert!(covers(worked.into_iter().map(strip), units.m, 1));
        }
    }

    /// Tests that consecutive fetches of a rank read from different peers, so that all links are
    /// busy while every peer has data left.
    #[test]
    fn neighbouring_fetches_are_from_all_peers(units in units(), rank in 0u32..8) {
        prop_assume!(rank < units.size);
        let others = units.size - 1;
        let of = |source| units.first(source + 1) - units.first(source);
        let least = (0..units.size).filter(|&it| it != rank).map(of).min().unwrap_or(0);
        for round in 0..least {
            let fetched = (round * others..(round + 1) * others).map(|at| units.unit_at(at, rank));
            let sources: HashSet<_> = fetched.map(|unit| units.source(unit)).collect();
            prop_assert!(sources.len() as u32 == others && !sources.contains(&rank));
        }
    }

    #[test]
    fn neighbouring_turns_begin_with_different_peers(size in 1u32..9, turn in 0u32..1000) {
        let channel = Channel { rank: turn % size, size, ..Channel::default() };
        let all: HashSet<_> = channel.peers().collect();
        let firsts = (turn..turn + size - 1).filter_map(|turn| {
            let peers: Vec<_> = channel.peers_in_turn(turn).collect();
            assert_eq!(peers.iter().copied().collect::<HashSet<_>>(), all);
            peers.first().copied()
        });
        prop_assert_eq!(firsts.collect::<HashSet<_>>(), all);
    }

    /// Tests that a block of rows waits for exactly the data that its GEMM needs: its rows, all of
    /// K, once.
    #[test]
    fn blocks_need_their_rows_and_all_of_k_once(units in units()) {
        for (rank, block) in
            (0..units.size).flat_map(|rank| (0..units.row_blocks()).map(move |b| (rank, b)))
        {
            let (row, rows, _, _) = units.row_block(block);
            let mut groups = Vec::new();
            for unit in units.needs(block, rank) {
                let area = units.area(unit);
                prop_assert_eq!((area.row, area.rows), (row, rows));
                groups.push(Tile { row: 0, rows: 1, ..area });
            }
            prop_assert!(covers(groups.into_iter(), 1, units.k));
        }
    }
}

/// Word that one workgroup sets and other workgroups await.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Token {
    At(Place),
    /// End of a launch for a workgroup: rank, launch and workgroup.
    Out(u32, u32, u32),
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Set(Token),
    Await(Token),
}

/// Number of the only call, which every word holds, so that no wait blocks.
const CALL: i32 = 1;

/// Answers to workgroup `group`, before which as many workgroups have finished. Entry records and
/// received heads equal those that this rank sends, except that peers write C directly if `direct`.
fn script(group: u32, direct: bool) -> Script {
    let mut fields = vec![0; LINE_WORDS as usize];
    fields[Field::Sequence as usize] = CALL;
    fields[Field::Direct as usize] = direct.into();
    Script { number: CALL, fields, finished: group as i32, ..Script::default() }
}

/// Steps of workgroup `id` of a launch with `groups` workgroups, by the requests that it made.
fn steps(events: &[Event], id: ThreadId, launch: u32, groups: u32) -> Vec<Step> {
    let mut steps = Vec::new();
    for event in events {
        match *event {
            Event::Record(fault) => panic!("{fault}"),
            Event::Atomic(Access::FinishAdd, _) => {
                steps.push(Step::Set(Token::Out(id.rank, launch, id.group)));
                if id.group + 1 == groups {
                    // The workgroup that ends the call must have seen all others finish.
                    let all = (0..groups).map(|group| Token::Out(id.rank, launch, group));
                    steps.extend(all.map(Step::Await));
                }
            }
            // No step waits for a credit here, because every rank has entered the previous call
            // before the first call begins.
            Event::Atomic(
                Access::AbortLoad | Access::AbortCheck | Access::CreditLoad | Access::LockGive,
                _,
            ) => {}
            Event::Atomic(access, op) => {
                let is_flag = matches!(access, Access::FlagLoad | Access::FlagStore);
                match (op, op.place()) {
                    (_, Some(Place::Dev { .. })) if !is_flag => {}
                    (Operation::Load { .. }, Some(place)) => {
                        steps.push(Step::Await(Token::At(place)))
                    }
                    (Operation::Store { .. }, Some(place)) => {
                        steps.push(Step::Set(Token::At(place)))
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }
    steps
}

/// Calls of the body of an op by one workgroup, in order: name, tile and peer.
struct Body {
    rank: u32,
    direct: bool,
    done: Vec<(&'static str, u32, u32)>,
}

impl Body {
    fn did(&mut self, what: &'static str, tile: u32, peer: u32) {
        self.done.push((what, tile, peer));
    }
}

impl ReduceTiles for Body {
    /// Whether partial results are added as they arrive. Both answers occur in the tests, as in the
    /// ops: collectives add at once, GEMMs only for some numbers of ranks.
    fn at_once(&self) -> bool {
        self.direct || self.rank.is_multiple_of(2)
    }
    fn produce(&mut self, tile: u32) {
        self.did("produce", tile, 0);
    }
    fn push(&mut self, peer: u32, tile: u32, _: u32) {
        self.did("push", tile, peer);
    }
    fn keep(&mut self, tile: u32, _: u32) {
        self.did("keep", tile, 0);
    }
    fn reduce(&mut self, tile: u32, _: u32) {
        self.did("result", tile, 0);
    }
    fn push_result(&mut self, peer: u32, tile: u32, _: u32, _: bool) {
        self.did("push_result", tile, peer);
    }
    fn take_result(&mut self, tile: u32, _: u32) {
        self.did("result", tile, 0);
    }
}

impl AccumulateTiles for Body {
    fn zero(&mut self, tile: u32) {
        self.did("zero", tile, 0);
    }
    fn produce(&mut self, tile: u32) {
        self.did("produce", tile, 0);
    }
    fn add(&mut self, owner: u32, tile: u32) {
        self.did("add", tile, owner);
    }
    fn convert(&mut self, _: u32, tile: u32) {
        self.did("result", tile, 0);
    }
}

impl DeliverTiles for Body {
    fn produce(&mut self, tile: u32) {
        self.did("produce", tile, 0);
    }
    fn push(&mut self, peer: u32, tile: u32, _: u32, _: bool) {
        self.did("push", tile, peer);
    }
    fn take(&mut self, source: u32, tile: u32, _: u32) {
        self.did("take", tile, source);
    }
}

impl GatherTiles for Body {
    fn push_part(&mut self, peer: u32, part: u32, _: u32) {
        self.did("push", part, peer);
    }
    fn multiply(&mut self, tile: u32, source: u32, _: u32) {
        self.did("multiply", tile, source);
    }
    fn store(&mut self, tile: u32) {
        self.did("result", tile, 0);
    }
}

impl StagedTiles for Body {
    fn fetch(&mut self, unit: u32) {
        self.did("fetch", unit, 0);
    }
    fn multiply_unit(&mut self, tile: u32, unit: u32) {
        self.did("multiply", tile, unit);
    }
    fn store(&mut self, tile: u32) {
        self.did("result", tile, 0);
    }
}

struct UnitOrder(Units, u32, u32);

impl Staging for UnitOrder {
    fn units(&self) -> u32 {
        self.0.units()
    }
    fn unit_at(&self, position: u32) -> u32 {
        self.0.unit_at(position, self.1)
    }
    fn source(&self, unit: u32) -> u32 {
        self.0.source(unit)
    }
    fn tiles(&self) -> u32 {
        self.0.row_blocks() * self.2
    }
    fn needs(&self, tile: u32) -> impl Iterator<Item = u32> {
        self.0.needs(self.0.row_block_at(tile / self.2, self.1), self.1)
    }
}

struct ToAll(SplitGrid, u32);

impl Delivery for ToAll {
    fn produced(&self) -> u32 {
        self.0.part(self.1).tiles()
    }
    fn sent(&self, from: u32, _: u32) -> u32 {
        self.0.part(from).tiles()
    }
}

/// LL exchange in which each rank sends as many items as it has tiles.
impl Exchange for ToAll {
    fn sent(&self, from: u32, _: u32) -> u32 {
        self.0.part(from).tiles()
    }
}

/// Owners of tiles: rank r owns the tiles of its part of the rows.
struct Parts(SplitGrid);

impl Owners for Parts {
    fn most(&self) -> u32 {
        self.0.part(0).tiles()
    }
    fn owned(&self, owner: u32, place: u32) -> Option<u32> {
        (place < self.0.part(owner).tiles()).then(|| self.0.first(owner) + place)
    }
}

impl LlTiles for Body {
    fn give(&mut self, _: u32, _: u32) -> [u32; 2] {
        [0; 2]
    }
    fn begin(&mut self, _: u32) {}
    fn take(&mut self, _: u32, _: u32, _: [u32; 2]) {}
    fn end(&mut self, _: u32) {}
}

impl LlRows for Body {
    fn row(&mut self, _: u32) {}
}

const SKELETONS: [&str; 12] = [
    "exchange",
    "exchange_rows",
    "exchange_spread_rows",
    "one_shot",
    "two_shot",
    "scatter",
    "deliver",
    "pull",
    "staged",
    "locked",
    "atomic",
    "baseline",
];

/// Runs one workgroup of launch number `launch` of the op `name`; each op has a few launches per
/// call.
fn launch_of(
    name: &str,
    launch: u32,
    at: &Launch<'_, Recorder>,
    body: &mut Body,
    units: Units,
    split: SplitGrid,
    fetchers: u32,
) -> Option<Result<(), Aborted>> {
    let (size, me) = (at.channel.size, at.channel.rank);
    let tiles = split.grid.tiles();
    let across = split.grid.across();
    let owner = |tile| owner(tile, size);
    let barrier = |phase| flow::barrier(at, phase, Members::all(size), End::Keep);
    Some(match (name, launch) {
        ("one_shot", 0) => flow::one_shot(at, tiles, body),
        ("two_shot", 0) => flow::two_shot(at, &Turns { tiles, owners: size }, fetchers, body),
        ("scatter", 0) => flow::reduce_scatter(at, &Parts(split), fetchers, body),
        ("deliver", 0) => flow::deliver(at, &ToAll(split, me), fetchers, body),
        ("exchange", 0) => flow::exchange(at, &ToAll(split, me), body),
        ("exchange_rows" | "exchange_spread_rows", 0) => {
            let spread = name == "exchange_spread_rows";
            // With spread rows, a thread polls its items one by one.
            let at_once = if spread { 1 } else { 4 };
            let rows =
                Rows { items: tiles, len: across.max(1), piece: at_once.min(2), at_once, spread };
            flow::exchange_rows(at, &rows, body)
        }
        ("pull", 0) => flow::pull(at, units.row_blocks() * across, body),
        ("staged", 0) => flow::staged(at, fetchers, &UnitOrder(units, me, across), body),
        ("locked" | "atomic", 0) => flow::zero(at, tiles, owner, body),
        ("locked" | "atomic", 1) => barrier(0),
        ("locked" | "atomic", 2) => flow::add(at, tiles, owner, name == "locked", body),
        ("locked" | "atomic", 3) => barrier(1),
        ("locked" | "atomic", 4) => flow::convert(at, tiles, owner, body),
        ("baseline", 0) => flow::gather(at, units.blocks(me).0, body),
        ("baseline", 1) => barrier(0),
        ("baseline", 2) => flow::local(at, units.row_blocks() * across, body),
        _ => return None,
    })
}

/// Number of results, in tiles, that `rank` must have after the op `name`.
fn results(name: &str, units: Units, split: SplitGrid, rank: u32) -> u32 {
    match name {
        "scatter" => split.part(rank).tiles(),
        "deliver" | "exchange" | "exchange_rows" | "exchange_spread_rows" => 0,
        "pull" | "staged" | "baseline" => units.row_blocks() * split.grid.across(),
        _ => split.grid.tiles(),
    }
}

/// Calls of the body, as in `Body::done`, that `rank` must make to get the tiles of all ranks.
fn delivered(split: SplitGrid, rank: u32, direct: bool) -> HashSet<(&'static str, u32, u32)> {
    let tiles = |of| 0..split.part(of).tiles();
    let peers = || (0..split.size).filter(|&peer| peer != rank);
    let produced = tiles(rank).map(|tile| ("produce", tile, 0));
    let pushed = tiles(rank).flat_map(|tile| peers().map(move |peer| ("push", tile, peer)));
    let from = |source| tiles(source).map(move |tile| ("take", tile, source));
    let taken = peers().filter(|_| !direct).flat_map(from);
    produced.chain(pushed).chain(taken).collect()
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn every_awaited_word_is_set_once_and_nobody_waits_for_ever(
        name in prop::sample::select(&SKELETONS[..]),
        units in units(),
        cols in (0..60u32, 8..40u32),
        groups in prop::collection::vec((1..5u32, 0..6u32), 9),
        direct in any::<bool>(),
    ) {
        play(name, units, cols, &groups, direct)?;
    }
}

#[test]
fn nor_in_any_row_of_a_tuning_table() {
    let shapes = iris_models::check::tuned_shapes().expect("tuning tables");
    let mut played = 0;
    let mut cols = (0, 1);
    for shape in &shapes {
        match *shape {
            Tuned::Tiles(grid, _) => cols = (grid.cols, grid.tile_n),
            Tuned::Units(units) => {
                for (name, direct) in
                    SKELETONS.iter().flat_map(|name| [(name, false), (name, true)])
                {
                    play(name, units, cols, &[(3, 1); 9], direct).unwrap_or_else(|why| {
                        panic!("{name} in {units:?}, N and its tile {cols:?}: {why}")
                    });
                    played += 1;
                }
            }
            Tuned::Split(..) | Tuned::Dies(..) | Tuned::Items(..) => {}
            Tuned::Rounds(..) | Tuned::Arriving(..) => {}
        }
    }
    assert!(played >= 10 * SKELETONS.len(), "only {played} schedules");
}

/// Runs an op on all ranks, with A split as `units` says and `n` columns in tiles of `tile_n`. Then
/// plays the records of set and awaited words against each other. `groups` holds, for each rank,
/// its number of workgroups and the number of those that fetch.
fn play(
    name: &str,
    units: Units,
    (n, tile_n): (u32, u32),
    groups: &[(u32, u32)],
    direct: bool,
) -> Result<(), TestCaseError> {
    let grid = Grid { rows: units.m, cols: n, tile_m: units.tile_m, tile_n };
    let (size, split) = (units.size, SplitGrid { grid, size: units.size });
    let tiles = grid.tiles().max(split.tiles());
    let shape = Shape {
        op: 0,
        size,
        tiles,
        flags: units.units(),
        locks: true,
        sequence: 1 << 30,
        pairs: tiles,
        packs: 0,
    };
    let record = Record { direct: i32::from(direct), ..Record::default() };
    let mut lists = Vec::new();
    for rank in 0..size {
        let (channel, _) = Channel::lay_out(shape, rank, 1024, 0);
        let (count, fetchers) = groups[rank as usize];
        let mut done = Vec::new();
        // Number of workgroups of the previous launch, all of which must end before this launch
        // begins.
        let mut before = 0;
        for launch in 0.. {
            let is_barrier =
                matches!((name, launch), ("locked" | "atomic", 1 | 3) | ("baseline", 1));
            let count = if is_barrier { 1 } else { count };
            let mut ended = false;
            for group in 0..count {
                let id = ThreadId { rank, group, thread: 0 };
                let m = Recorder::new(id, (1, count), script(group, direct));
                let mut body = Body { rank, direct, done: Vec::new() };
                let at = Launch { m: &m, channel: &channel, record: &record, index: group, count };
                match launch_of(name, launch, &at, &mut body, units, split, fetchers) {
                    Some(result) => prop_assert!(result.is_ok()),
                    None => ended = true,
                }
                let waits = (0..before).map(|group| Token::Out(rank, launch - 1, group));
                let mut list: Vec<_> = waits.map(Step::Await).collect();
                list.extend(steps(&m.into_events(), id, launch, count));
                // A single workgroup counts itself as finished when it ends the call.
                if count == 1 {
                    list.push(Step::Set(Token::Out(rank, launch, group)));
                }
                done.extend(body.done);
                lists.push(list);
            }
            if ended {
                break;
            }
            before = count;
        }
        let once: HashSet<_> = done.iter().collect();
        prop_assert_eq!(once.len(), done.len(), "something was done twice");
        let made = done.iter().filter(|(what, _, _)| *what == "result").count() as u32;
        let wanted = results(name, units, split, rank);
        // Number of results that are this rank's own work. In two_shot, peers write the other tiles
        // directly into C, so these are not counted.
        let own = (0..wanted).filter(|&tile| owner(tile, size) == rank).count() as u32;
        let wanted = if name == "two_shot" && direct { own } else { wanted };
        prop_assert_eq!(made, wanted);
        if name == "deliver" {
            let wanted = delivered(split, rank, direct);
            prop_assert_eq!(once, wanted.iter().collect());
        }
    }

    let mut set = HashMap::new();
    for step in lists.iter().flatten() {
        if let Step::Set(token) = step {
            *set.entry(*token).or_insert(0) += 1;
        }
    }
    for step in lists.iter().flatten() {
        if let Step::Await(token) = step {
            prop_assert_eq!(set.get(token), Some(&1), "{:?}", token);
        }
    }
    let mut reached = HashSet::new();
    let mut at = vec![0; lists.len()];
    loop {
        let mut moved = false;
        for (list, at) in lists.iter().zip(&mut at) {
            while let Some(step) = list.get(*at) {
                match step {
                    Step::Set(token) => drop(reached.insert(*token)),
                    Step::Await(token) if !reached.contains(token) => break,
                    Step::Await(_) => {}
                }
                (*at, moved) = (*at + 1, true);
            }
        }
        if !moved {
            break;
        }
    }
    for (list, at) in lists.iter().zip(at) {
        prop_assert!(at == list.len(), "waits for ever: {:?}", list[at]);
    }
    Ok(())
}
