//! Catalogue of models: each protocol in Rust and in the device headers, with an engine that suits
//! its size.

use std::path::Path;

use iris_kernels::schedule::{Grid, Shard, Units};
use iris_sync::REFRESH_PERIOD;
use iris_sync::barrier::Members;

use crate::elastic::{self, Decision, Reuse};
use crate::ll::{self, Pattern};
use crate::mutants::{Engine, run};
use crate::nodes::{self, Handover, Room};
use crate::ops::{self, Accumulate, Beside};
use crate::schedule::Shape;
use crate::{Report, Rules, Scenario, primitives};

/// Implementation of the protocols that a model runs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Implementation {
    /// Protocol in Rust, from the crate iris-sync.
    Rust,
    /// Protocol in C++, from the device headers.
    Headers,
}

impl Implementation {
    /// Name of the implementation in tables: `rust` or `c++`.
    pub fn name(self) -> &'static str {
        match self {
            Implementation::Rust => "rust",
            Implementation::Headers => "c++",
        }
    }
}

/// Protocol in one implementation, with the scenario to run and the engine that explores it.
#[derive(Clone, Debug)]
pub struct Model {
    /// Name of the protocol.
    pub protocol: &'static str,
    /// Implementation of the protocol that is run.
    pub implementation: Implementation,
    /// Number of ranks of the scenario.
    pub ranks: u32,
    /// Scenario that the engine explores.
    pub scenario: Scenario,
    /// Engine that explores the scenario.
    pub engine: Engine,
}

impl Model {
    /// Explores the model and reports the result.
    pub fn run(&self) -> Report {
        run(&self.scenario, &Rules::default(), self.engine)
    }
}

/// Returns all models; `full` adds the long searches.
pub fn catalogue(full: bool) -> Vec<Model> {
    let mut all = Vec::new();
    let mut add = |protocol, ranks, scenario: Scenario, engine| {
        let on_headers = scenario.on_headers();
        let model =
            |implementation, scenario| Model { protocol, implementation, ranks, scenario, engine };
        all.push(model(Implementation::Rust, scenario));
        all.extend(on_headers.map(|scenario| model(Implementation::Headers, scenario)));
    };
    let exhaustive = Engine::Loom(None);
    add("versioned lock", 2, primitives::versioned(2), exhaustive);
    add("spinlock", 2, primitives::spinlock(2, 2), exhaustive);
    add("device barrier", 2, primitives::barrier(2, Members::all(2), 1, true), exhaustive);
    add(
        "device barrier",
        3,
        primitives::barrier(3, Members::all(3), 1, false),
        Engine::Loom(Some(2)),
    );
    add(
        "device barrier",
        3,
        primitives::barrier_in_launch(3).threads(2).lockstep(),
        Engine::Search,
    );
    add("barrier, group", 3, primitives::barrier(3, Members::from_bits(5), 1, true), exhaustive);
    add("staged flags", 1, primitives::flags(2), exhaustive);
    add("entry signals", 2, primitives::entry(2, 2), exhaustive);
    add("abort on a fault", 2, primitives::abort(), exhaustive);
    add("revoked epoch", 2, primitives::revoked(), exhaustive);
    let plain = Accumulate { atomic: false, first_barrier: true, second_barrier: true };
    let atomic = Accumulate { atomic: true, ..plain };
    type Build = (&'static str, fn(u32, u32) -> Scenario);
    let ops: [Build; 18] = [
        ("one_shot", |ranks, calls| ops::one_shot(ranks, 1, calls)),
        ("two_shot", |ranks, calls| ops::two_shot(ranks, 1, calls, false)),
        ("two_shot, direct", |ranks, calls| ops::two_shot(ranks, 1, calls, true)),
        ("reduce_scatter", |ranks, calls| ops::reduce_scatter(ranks, 1, calls)),
        ("matmul_reduce_scatter", |ranks, calls| ops::matmul_reduce_scatter(ranks, 1, calls)),
        ("deliver, broadcast", |ranks, calls| ops::deliver(ranks, 1, calls, true, false)),
        ("deliver, all_gather", |ranks, calls| ops::deliver(ranks, 1, calls, false, false)),
        ("deliver, direct", |ranks, calls| ops::deliver(ranks, 1, calls, false, true)),
        ("relay", |ranks, calls| ops::relay(ranks, 1, calls, false)),
        ("relay, direct", |ranks, calls| ops::relay(ranks, 2, calls, true)),
        ("pull", |ranks, calls| ops::pull(ranks, 1, calls)),
        ("staged", |ranks, calls| ops::staged(&vec![1; ranks as usize], 1, calls)),
        ("gather, barrier", |ranks, calls| ops::gather(ranks, 1, calls, true)),
        ("copied", |ranks, calls| ops::copied(ranks, 1, calls, true)),
        ("copied on", |ranks, calls| ops::copied_on(ranks, 1, calls)),
        ("copied beside", |ranks, calls| ops::copied_beside(ranks, 1, calls)),
        ("stored", |ranks, calls| ops::stored(ranks, 1, calls, ops::Stored::Right)),
        ("accumulate", |ranks, calls| {
            let how = Accumulate { atomic: false, first_barrier: true, second_barrier: true };
            ops::accumulate(ranks, 1, calls, how)
        }),
    ];
    let (calls, preemptions, runs) = if full { (3, 3, 20_000) } else { (2, 2, 3_000) };
    for (name, scenario) in ops {
        add(name, 2, scenario(2, calls), Engine::Loom(Some(preemptions)));
        add(name, 3, scenario(3, 1), Engine::Search);
        // This scenario covers workgroup barriers, signals by single threads, several workgroups
        // and consecutive calls.
        let wide = scenario(3, 3).threads(2).groups(&[2, 1, 2]);
        // Scenarios with several launches per call take several times as long.
        let runs = if matches!(
            name,
            "accumulate" | "gather, barrier" | "copied" | "copied on" | "copied beside"
        ) {
            runs / 4
        } else {
            runs
        };
        add(name, 3, wide, Engine::Random(runs));
        add(name, 3, scenario(3, 1).threads(2).lockstep(), Engine::Search);
        // Ops whose peers read this rank's memory are left out: after a rank gives up, its next
        // kernel rewrites memory that a peer may still read. The models would report a race or a
        // wrong value, although the peer notices before its call ends. The scenarios
        // `pull_of_leavers` and `copied_of_leavers` take their place: they check the values read
        // only if the call succeeded.
        if !matches!(name, "pull" | "staged" | "copied" | "copied on" | "copied beside") {
            add(name, 2, ops::given_up(scenario(2, 3)), Engine::Search);
        }
        if full {
            for (ranks, calls) in [(3, 2), (4, 1), (2, 4)] {
                add(name, ranks, scenario(ranks, calls), Engine::Search);
            }
        }
    }
    for (ranks, by_host) in [(2, false), (2, true), (3, false)] {
        add("pull, a rank leaves", ranks, ops::pull_of_leavers(ranks, by_host), Engine::Search);
    }
    for by_host in [false, true] {
        add("copied, a rank leaves", 2, ops::copied_of_leavers(2, by_host), Engine::Search);
    }
    for (name, pattern) in Pattern::NAMED {
        let name = match name {
            "all" => "ll, all to all",
            "parts" => "ll, parts",
            "root" => "ll, root",
            "relay" => "ll, relay",
            "packs" => "ll, packs",
            "packs in two hops" => "ll, packs in two hops",
            _ => "ll, two hops",
        };
        let scenario = |ranks, calls| ll::exchange(pattern, ranks, calls).without_heads();
        // Several calls in two hops, or with the four words of a pack, have a million executions.
        let few = pattern.in_two_hops() || pattern.in_packs();
        let of_loom = if few { 1 } else { calls };
        // Two hops of packs have 760,000 executions with two preemptions, which take a minute.
        let preemptions = if pattern == Pattern::TwoShotPacks && !full { 1 } else { 2 };
        add(name, 2, scenario(2, of_loom), Engine::Loom(Some(preemptions)));
        add(name, 2, ll::exchange(pattern, 2, calls), Engine::Search);
        add(name, 3, scenario(3, 1), Engine::Search);
        let wide = ll::exchange_two(pattern, 3, 3).threads(3).groups(&[3, 1, 3]);
        add(name, 3, wide, Engine::Random(runs));
        add(name, 2, ops::given_up(scenario(2, 3)), Engine::Search);
    }
    for (name, spread) in [("ll, rows", false), ("ll, spread rows", true)] {
        let rows = ll::exchange_rows(2, 3, true, spread).threads(2).groups(&[3, 1]);
        add(name, 2, rows, Engine::Random(runs));
    }
    add("nodes, composition", 2, nodes::composition(2, 3, Handover::Right), Engine::Search);
    add("nodes, composition", 3, nodes::composition(3, 3, Handover::Right), Engine::Random(runs));
    for room in [Room::Left, Room::InTurn] {
        add("nodes, residency", 4, nodes::residency(room), Engine::Search);
    }
    let mut blows: Vec<(&[u32], &[u32])> = vec![(&[0, 1, 2], &[]), (&[2], &[0, 1])];
    if full {
        blows.extend::<[(&[u32], &[u32]); 2]>([(&[0, 2], &[1]), (&[0, 1, 2], &[0])]);
    }
    for (crashing, hasty) in blows {
        add("decide", 3, elastic::decide(Decision::Right, crashing, hasty), Engine::Search);
    }
    add("epochs", 3, elastic::epochs(Reuse::Nothing), Engine::Search);
    let tiles = |calls| ll::exchange_tiles(2, calls, 3).threads(2).groups(&[2, 2]);
    add("ll, tiles", 2, tiles(3), Engine::Random(runs));
    let given_up = ops::given_up(ll::exchange_tiles(2, 3, 3).threads(4).groups(&[2, 1]));
    add("ll, tiles", 2, given_up, Engine::Random(runs));
    let beside = |ranks, calls| ops::beside(ranks, 1, calls, Beside::Right);
    add("a kernel beside", 2, beside(2, 3), Engine::Random(runs / 4));
    add("a kernel beside", 3, beside(3, 2), Engine::Random(runs / 4));
    add("accumulate, atomic", 2, ops::accumulate(2, 1, 2, atomic), Engine::Loom(Some(2)));
    add("staged, fetchers", 2, ops::staged(&[2, 1], 1, 1), Engine::Loom(Some(2)));
    // This scenario has one call, so that no later kernel rewrites a shard that a peer still reads.
    let given_up = ops::given_up(ops::staged(&[2, 1], 1, 1).threads(2));
    add("staged, fetchers", 2, given_up, Engine::Random(runs / 4));
    // With two workgroups per rank the first only sends; a single workgroup does both.
    let by_senders: [Build; 4] = [
        ("two_shot, senders", |ranks, calls| ops::two_shot_by_senders(ranks, 2, calls)),
        ("reduce_scatter, senders", |ranks, calls| ops::reduce_scatter_by_senders(ranks, 2, calls)),
        ("deliver, senders", |ranks, calls| ops::deliver_by_senders(ranks, 2, calls, false)),
        ("deliver, senders, direct", |ranks, calls| ops::deliver_by_senders(ranks, 2, calls, true)),
    ];
    for (name, scenario) in by_senders {
        add(name, 2, scenario(2, 2), Engine::Search);
        add(name, 2, scenario(2, 1).threads(2).lockstep(), Engine::Search);
        add(name, 3, scenario(3, 3).threads(2).groups(&[2, 1, 2]), Engine::Random(runs));
        add(name, 2, ops::given_up(scenario(2, 3).groups(&[2, 1])), Engine::Search);
    }
    let senders = ops::reduce_scatter_by_senders(2, 2, 1);
    add("reduce_scatter, senders", 2, senders, Engine::Loom(Some(2)));
    add("one_shot, 2 threads", 2, ops::one_shot(2, 1, 1).threads(2), Engine::Loom(Some(2)));
    if full {
        add("one_shot", 2, ops::one_shot(2, 1, 2), exhaustive);
        add("two_shot, direct", 2, ops::two_shot(2, 1, 2, true), exhaustive);
        add("pull", 2, ops::pull(2, 1, 2), exhaustive);
        add("accumulate", 2, ops::accumulate(2, 1, 1, plain), exhaustive);
    }
    all
}

/// Scenarios whose first or second call refreshes all words, for the Rust protocols and for the
/// device headers.
pub(super) fn refreshing() -> Vec<(Implementation, Scenario)> {
    let before = REFRESH_PERIOD - 1;
    in_both([
        ops::partial(2, 1, REFRESH_PERIOD, &[1, 1]),
        // Two threads share the words, of two tiles.
        ops::partial(2, 2, REFRESH_PERIOD, &[1, 2]).threads(2).groups(&[2, 1]),
        ops::one_shot(3, 1, 3).calls(3, before),
        ops::two_shot(2, 2, 3, true).calls(3, before).threads(2).groups(&[2, 1]),
        ops::pull(2, 1, 3).calls(3, before),
        // A rank that has settled its pulls learns at the refresh that a peer gave up.
        ops::pull_of_leavers(3, false).calls(1, REFRESH_PERIOD),
        // A rank that has done everything else in its call learns at the refresh that a peer gave
        // up.
        ops::given_up(ops::two_shot(3, 1, 1, false)).calls(1, REFRESH_PERIOD),
        ops::gather(2, 1, 3, true).calls(3, before),
        ll::partial(Pattern::All, 2, before - 1, &[2, 2, 1, 1]),
        // The calls use one of two items, then both, so the unused item is refreshed before its
        // first use. Its number then differs from the initial one.
        ll::partial(Pattern::All, 2, before - 1, &[1, 1, 1, 1, 2, 2]),
        // Two threads share both items, of which the second call uses none.
        ll::partial(Pattern::All, 2, before, &[1, 0, 2]).threads(2).groups(&[3, 1]),
        ll::exchange(Pattern::Parts, 3, 3).calls(3, before),
        ll::exchange(Pattern::All, 2, 3).calls(3, before).threads(2).groups(&[3, 1]),
        ops::copied(2, 1, 3, true).calls(3, before).groups(&[2, 1]),
        // Threads share the words of their peers.
        ops::gather(3, 1, 2, true).calls(2, before).threads(2),
        ops::copied(3, 1, 2, true).calls(2, before).groups(&[2, 1, 1]).threads(2),
        // The second call has the number `i32::MIN`, and refreshes flags.
        ops::staged(&[2, 1], 1, 3).calls(3, i32::MAX).threads(2),
    ])
}

/// Scenarios in which rank 0 gives up and then makes later calls, in both implementations.
pub(super) fn of_leavers() -> Vec<(Implementation, Scenario)> {
    let barriers = Accumulate { atomic: false, first_barrier: true, second_barrier: true };
    in_both([
        ops::given_up(ops::one_shot(3, 1, 3)),
        ops::given_up(ops::two_shot(2, 1, 3, true)),
        ops::given_up(ops::deliver(2, 1, 3, true, true)),
        ops::given_up(ops::gather(2, 1, 3, true)),
        ops::given_up(ops::stored(2, 1, 3, ops::Stored::Right)),
        ops::given_up(ops::accumulate(2, 1, 3, barriers)),
        ops::given_up(ll::exchange(Pattern::All, 2, 3)),
        ops::copied_of_leavers(2, false),
        ops::copied_of_leavers(2, true),
    ])
}

fn in_both<const N: usize>(scenarios: [Scenario; N]) -> Vec<(Implementation, Scenario)> {
    let both = |scenario: Scenario| {
        let on_headers = scenario.on_headers();
        let on_headers = on_headers.map(|scenario| (Implementation::Headers, scenario));
        [(Implementation::Rust, scenario)].into_iter().chain(on_headers)
    };
    scenarios.into_iter().flat_map(both).collect()
}

/// Shapes of the tuning tables; [`super::tuned_shapes`] documents them.
pub(super) fn tuned_shapes() -> Result<Vec<Shape>, String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../iris-ops/tuning");
    let mut shapes = Vec::new();
    let unread = |error: std::io::Error| format!("{}: {error}", folder.display());
    for entry in std::fs::read_dir(&folder).map_err(unread)? {
        let path = entry.map_err(unread)?.path();
        let text = std::fs::read_to_string(&path).map_err(unread)?;
        let table: toml::Table =
            text.parse().map_err(|error| format!("{}: {error}", path.display()))?;
        let rows = table.get("row").and_then(toml::Value::as_array);
        for row in rows.into_iter().flatten() {
            let said = |name: &str| {
                let value = row.get(name).and_then(toml::Value::as_integer);
                value.and_then(|value| u32::try_from(value).ok())
            };
            let pair = |name: &str| {
                let pair = row.get(name)?.as_array()?;
                let number = |at: usize| pair.get(at)?.as_integer()?.try_into().ok();
                Some((number(0)?, number(1)?))
            };
            let (Some(size), Some((low, high)), Some(n)) = (said("world"), pair("m"), said("n"))
            else {
                return Err(format!("{}: no world, m or n in {row}", path.display()));
            };
            let (tile_m, tile_n) = pair("tile").unwrap_or((64, 64));
            for m in [low, high] {
                shapes.push(Shape::Tiles(Grid { rows: m, cols: n, tile_m, tile_n }, size));
                let k = said("k").unwrap_or(4096);
                for shard in [Shard::Rows, Shard::Columns] {
                    let units =
                        Units { shard, size, m, k, tile_m, k_group: 256, m_contiguous: false };
                    shapes.push(Shape::Units(units));
                }
            }
        }
    }
    Ok(shapes)
}
