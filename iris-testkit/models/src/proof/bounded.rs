//! Searches of a rule's states with small constants. They show that every action can happen, that
//! no property is violated, and that without any one clause of the rule a property is violated.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};

use super::concrete::{Machine, Refusal, State, Universe};
use super::rule::Numbers;
use super::system::{Action, System};
use super::term::Name;

/// Small world that a search explores: its ranks and threads, its calls, and the actions that are
/// allowed.
pub struct World {
    /// Name of the world.
    pub name: &'static str,
    /// Number of ranks, threads, words and tiles in the world, and its number of calls.
    pub universe: Universe,
    /// Values of the functions that never change, in this world.
    pub fixed: fn(&Universe, Name, &[i64]) -> i64,
    /// Actions that the search takes in this world.
    pub with: Vec<Name>,
}

/// Result of a search of one world.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Number of distinct states that the search saw.
    pub states: usize,
    /// Actions that happened, so that all of their guards held.
    pub happened: HashSet<Name>,
    /// Guards that did not hold in some state, each with its action.
    pub refused: HashSet<(Name, Name)>,
    /// Property that was violated; `None` if none was.
    pub violated: Option<Name>,
    /// Clause of the invariant that was found broken; `None` if none was, or if the search did not
    /// check the invariant.
    pub broken: Option<Name>,
    /// Actions that led to the violation, in order.
    pub trace: Vec<String>,
    /// Whether the search saw all reachable states.
    pub complete: bool,
}

/// Constants of small worlds: with them, a word that no rank writes for nine calls would look new.
pub const SMALL: Numbers = Numbers { range: 16, period: 4 };

/// Constants that are smaller still: with them, numbers of ranks that run four calls apart are too
/// far apart to be compared.
pub const TINY: Numbers = Numbers { range: 8, period: 2 };

struct Seen {
    state: Box<[i8]>,
    parent: u32,
    action: u16,
    parameters: Box<[i64]>,
}

/// Searches the states of a world in breadth-first order, until `limit` states were seen or a
/// property is violated.
pub fn search(system: &System, world: &World, limit: usize, invariant: bool) -> Found {
    let universe = world.universe.clone();
    let machine =
        Machine::new(system, universe, |name, values| (world.fixed)(&world.universe, name, values));
    let last = world.universe.first + world.universe.calls;
    // Name of the function that counts the calls or steps of a rank.
    let clock = if system.function("call").is_some() { "call" } else { "at" };
    let hasher = RandomState::new();
    let pack = |state: &State| state.0.iter().map(|&it| it as i8).collect::<Box<[i8]>>();
    let mut known = HashSet::new();
    let first = pack(&machine.initial());
    known.insert(hasher.hash_one(&first));
    let mut all = vec![Seen { state: first, parent: 0, action: 0, parameters: Box::default() }];
    let mut found = Found { complete: true, ..Found::default() };
    let mut at = 0;
    while at < all.len() {
        let state = State(all[at].state.iter().map(|&it| i64::from(it)).collect());
        let trace = |all: &[Seen], end: Option<String>| {
            let mut steps: Vec<String> = end.into_iter().collect();
            let mut at = at;
            while at != 0 {
                steps.push(machine.show(all[at].action.into(), &all[at].parameters));
                at = all[at].parent as usize;
            }
            steps.reverse();
            steps
        };
        if invariant && let Some((name, values)) = machine.broken(&state) {
            found.broken = Some(name);
            found.trace = trace(&all, Some(format!("{values:?}")));
            break;
        }
        let over =
            (0..world.universe.ranks).any(|rank| machine.get(&state, clock, &[rank]) >= last);
        for action in (0..machine.actions()).filter(|_| !over) {
            let name = machine.name(action);
            if !world.with.contains(&name) {
                continue;
            }
            for parameters in machine.choices(&state, action) {
                match machine.permits(&state, action, &parameters) {
                    Ok(()) => {}
                    Err(Refusal::Property(property)) => {
                        found.violated = Some(property);
                        found.trace = trace(&all, Some(machine.show(action, &parameters)));
                        found.states = all.len();
                        found.happened.insert(name);
                        found.complete = false;
                        return found;
                    }
                    Err(_) => {
                        let unmet = machine.unmet(&state, action, &parameters);
                        found.refused.extend(unmet.into_iter().map(|guard| (name, guard)));
                        continue;
                    }
                }
                let mut next = state.clone();
                machine.perform(&mut next, action, &parameters);
                found.happened.insert(name);
                let next = pack(&next);
                if known.insert(hasher.hash_one(&next)) {
                    all.push(Seen {
                        state: next,
                        parent: at as u32,
                        action: action as u16,
                        parameters: parameters.into(),
                    });
                }
            }
        }
        if all.len() > limit {
            found.complete = false;
            break;
        }
        at += 1;
    }
    found.states = all.len();
    found
}

/// Default values of the functions that never change, in worlds of two ranks.
fn base(universe: &Universe, name: Name, values: &[i64]) -> i64 {
    match name {
        "rank" => values[0] * universe.ranks / universe.agents,
        "one" => values[0] * universe.agents / universe.ranks,
        // There are two slots: tile 0 belongs to even calls, tile 1 to odd calls.
        "odd" => values[0] % 2,
        "theirs" => 1,
        _ => 0,
    }
}

fn sends(values: &[i64]) -> bool {
    values[1] == 0 && values[2] == 1
}

fn own_slot(values: &[i64]) -> bool {
    values[3] % 2 == values[0].rem_euclid(2)
}

macro_rules! world {
    ($(#[$doc:meta])* $name:literal, $universe:expr, $with:expr, |$f:ident, $v:ident, $u:ident| { $($function:pat => $value:expr,)* }) => {
        World {
            name: $name,
            universe: $universe,
            fixed: |$u, $f, $v| match $f { $($function => i64::from($value),)* _ => base($u, $f, $v) },
            with: $with.concat(),
        }
    };
}

/// World of two ranks with one thread each and `calls` calls from number `first` on. Call numbers
/// of such worlds soon wrap around.
const fn two(first: i64, calls: i64) -> Universe {
    Universe { ranks: 2, agents: 2, words: 1, tiles: 2, first, calls }
}

/// Number of a call that reads words which were not written for half the range of numbers.
const LATE: i64 = 14;

const CALLS: &[Name] = &["load", "credit", "enter", "count", "advance", "finish"];
const RECORDS: &[Name] = &["entry", "compare"];
const SLOTS: &[Name] = &["push", "raise", "see", "read"];
const DIRECT: &[Name] = &["push_direct", "raise", "see", "read", "use"];
const NUMBERED: &[Name] = &["push_numbered", "take", "stamp_numbered"];
const PULLS: &[Name] = &["pull", "say_done", "see_done", "use"];
const GIVES_UP: &[Name] = &["quit", "die"];
const STAMPS: &[Name] = &["stamp"];
const REFRESH: &[Name] = &["stamp", "say_done", "stamp_numbered"];

/// Worlds in which the system called `system` is searched.
pub fn worlds(system: &str) -> Vec<World> {
    match system {
        "slot rule" => slot_worlds(),
        "programs" => program_worlds(),
        "staging flags" => staging_worlds(),
        "copy engines" => engine_worlds(),
        "kernel beside a call" => beside_worlds(),
        _ => barrier_worlds(),
    }
}

/// Worlds of one rank that enqueues up to six steps of any kind, with the ends of calls between
/// them.
fn program_worlds() -> Vec<World> {
    let one = Universe { ranks: 1, agents: 1, words: 1, tiles: 1, first: 0, calls: 6 };
    let steps: Vec<Name> = super::program::Kind::ALL.iter().map(|kind| kind.name).collect();
    vec![world!("programs", one, &[steps, vec!["next"]], |f, v, u| {})]
}

/// Worlds of one device with two workgroups and one unit. In the first world, the first workgroup
/// copies the unit in each call; in the second, no workgroup ever copies it.
fn staging_worlds() -> Vec<World> {
    const WAITS: &[Name] = &["await", "multiply", "count", "finish", "stamp"];
    let device = |calls| Universe { ranks: 1, agents: 2, words: 1, tiles: 1, first: 6, calls };
    vec![
        world!("a staged unit", device(3), &[WAITS, &["fetch", "raise"]], |f, v, u| {}),
        world!("a flag left alone", device(9), &[WAITS, GIVES_UP], |f, v, u| {}),
    ]
}

/// Worlds of two ranks, in which copy engines of rank 0 send one part to rank 1 in each call.
fn engine_worlds() -> Vec<World> {
    const STEPS: &[Name] = &["arrive", "open", "copy", "signal", "stamp", "next"];
    const LEAVES: &[Name] = &["quit", "tell", "fail"];
    vec![
        world!("copies", two(6, 3), &[STEPS], |f, v, u| { "plan" => sends(v), }),
        world!("copies of a rank that gives up", two(6, 3), &[STEPS, LEAVES], |f, v, u| {
            "plan" => sends(v),
        }),
    ]
}

/// Worlds of two ranks that send each other one tile in each call.
fn beside_worlds() -> Vec<World> {
    const STEPS: &[Name] = &["note", "begin", "write", "raise", "finish"];
    const KERNEL: &[Name] = &["start", "look", "use", "end"];
    vec![world!("a kernel beside", two(6, 2), &[STEPS, KERNEL], |f, v, u| {})]
}

/// Worlds of a barrier between two members. In some, a member may give up; in the last, a second
/// barrier is used only in one late call.
fn barrier_worlds() -> Vec<World> {
    const STEPS: &[Name] = &["begin", "work", "arrive", "look", "pass", "finish"];
    const APART: &[Name] = &["begin", "work", "arrive", "look", "finish"];
    let phases = Universe { words: 2, ..two(6, 9) };
    vec![
        world!("barriers", two(6, 4), &[STEPS], |f, v, u| { "used" => true, }),
        world!("refresh", two(8, 1), &[STEPS, STAMPS, GIVES_UP], |f, v, u| { "used" => true, }),
        world!("a member gives up", two(6, 2), &[STEPS, GIVES_UP], |f, v, u| { "used" => true, }),
        world!("members apart", two(6, 9), &[APART], |f, v, u| {
            "used" => true,
        }),
        world!("a phase left alone", phases, &[STEPS, STAMPS], |f, v, u| {
            "used" => v[1] == 0 || v[0] == LATE,
        }),
    ]
}

/// Whether an action of the weakened rule differs from the action of the same name in the whole
/// rule.
fn differs(numbers: Numbers, make: fn(Numbers, Option<&str>) -> System, action: &Action) -> bool {
    let whole = make(numbers, None);
    whole.action(action.name).is_none_or(|it| format!("{it:?}") != format!("{action:?}"))
}

/// Worlds in which the slot rule is searched.
fn slot_worlds() -> Vec<World> {
    vec![
        world!("entries", two(7, 4), &[CALLS, RECORDS, REFRESH], |f, v, u| {}),
        world!("slots", two(6, 3), &[CALLS, RECORDS, SLOTS],
        |f, v, u| {
            "plan" => sends(v) && own_slot(v),
            "awaited" => sends(v),
        }),
        world!("one slot", two(6, 3), &[CALLS, RECORDS, SLOTS],
        |f, v, u| {
            "plan" => sends(v) && v[3] == 0,
            "awaited" => sends(v),
        }),
        world!("slots, every other call", two(6, 3), &[CALLS, RECORDS, SLOTS, STAMPS],
        |f, v, u| {
            "plan" => sends(v) && own_slot(v) && v[0] % 2 == 0,
            "awaited" => sends(v) && v[0] % 2 == 0,
        }),
        world!("direct", two(6, 3), &[CALLS, RECORDS, DIRECT], |f, v, u| {
            "plan" => sends(v) && v[3] == 0,
            "awaited" => sends(v),
            "direct" => true,
        }),
        world!("direct, in the first call", two(6, 3), &[CALLS, RECORDS, DIRECT],
        |f, v, u| {
            "plan" => sends(v) && v[3] == 0 && v[0] == 6,
            "awaited" => sends(v) && v[0] == 6,
            "direct" => true,
        }),
        world!("refresh", two(8, 2), &[CALLS, RECORDS, SLOTS, GIVES_UP, STAMPS], |f, v, u| {
            "plan" => sends(v) && own_slot(v),
            "awaited" => sends(v),
        }),
        world!("numbered", two(6, 3), &[CALLS, NUMBERED], |f, v, u| {
            "plan" => sends(v) && own_slot(v),
            "numbered" | "light" => true,
        }),
        world!("numbered, one slot", two(6, 3), &[CALLS, NUMBERED], |f, v, u| {
            "plan" => sends(v) && v[3] == 0,
            "numbered" | "light" => true,
        }),
        world!("numbered, a rank gives up", two(6, 3), &[CALLS, GIVES_UP, &["stamp_numbered"]], |f, v, u| {
            "numbered" | "light" => true,
        }),
        world!("numbered, in odd calls", two(6, 4), &[CALLS, NUMBERED, GIVES_UP],
        |f, v, u| {
            "plan" => sends(v) && own_slot(v) && v[0] % 2 == 1,
            "numbered" | "light" => true,
        }),
        world!("pulls", two(6, 3), &[CALLS, RECORDS, PULLS], |f, v, u| { "pulled" => true, }),
        world!("pulls, in the first call", two(6, 3), &[CALLS, RECORDS, PULLS],
            |f, v, u| { "pulled" => v[0] == 6, }),
        world!("pulls, a rank gives up", two(6, 2), &[CALLS, RECORDS, PULLS, GIVES_UP],
            |f, v, u| { "pulled" => true, }),
        world!("slots, a rank gives up", two(6, 3), &[CALLS, RECORDS, SLOTS, GIVES_UP],
        |f, v, u| {
            "plan" => sends(v) && own_slot(v),
            "awaited" => sends(v),
        }),
        world!("a word left alone", two(6, 9), &[CALLS, SLOTS, REFRESH], |f, v, u| {
            "plan" => sends(v) && own_slot(v) && v[0] == LATE,
            "awaited" => sends(v) && v[0] == LATE,
        }),
        world!("a done word left alone", two(6, 9), &[CALLS, &["see_done"], REFRESH], |f, v, u| { "pulled" => v[0] == LATE, }),
        world!("a numbered tile left alone", two(6, 17), &[CALLS, NUMBERED, REFRESH], |f, v, u| {
            "plan" => sends(v) && own_slot(v) && v[0] == 5 + 16,
            "numbered" | "light" => true,
        }),
        world!("done words that no rank refreshes", Universe { words: 0, ..two(6, 9) }, &[CALLS, &["see_done"]],
        |f, v, u| {
            "pulled" => v[0] == LATE,
            "light" => true,
        }),
        world!("numbered tiles that no rank refreshes", Universe { words: 0, ..two(6, 17) },
        &[CALLS, &["take", "say_done"]], |f, v, u| {
            "plan" => sends(v) && own_slot(v) && v[0] == 5 + 16,
            "numbered" | "light" => true,
        }),
        world!("a thread that takes over", bare(2), &[CALLS, &["turn"]], |f, v, u| { "light" => true, }),
        world!("a thread that waits for nobody", bare(9), &[CALLS, &["say_done"]], |f, v, u| { "light" => true, }),
        world!("two threads", Universe { agents: 3, ..two(6, 9) }, &[CALLS, &["raise", "see"], REFRESH], |f, v, u| {
            "plan" => receives(v) && own_slot(v) && v[0] == LATE,
            "awaited" => receives(v) && v[0] == LATE,
        }),
    ]
}

/// World of two ranks in which rank 0 has two threads, without words and tiles.
const fn bare(calls: i64) -> Universe {
    Universe { agents: 3, words: 0, tiles: 0, ..two(6, calls) }
}

/// Whether these arguments of `plan` stand for a tile from rank 1 to rank 0, the rank with two
/// threads.
fn receives(values: &[i64]) -> bool {
    values[1] == 1 && values[2] == 0
}

/// Maximum number of states that are searched in a world for the violation of a clause.
pub const SEARCHED: usize = 40_000;

/// Violation that a rule shows in small worlds if one clause is switched off: the property, the
/// world, and the length of the run. `None` if no run within [`SEARCHED`] states shows one.
pub fn violation(
    make: fn(Numbers, Option<&str>) -> System,
    clause: Name,
) -> Option<(Name, Name, usize)> {
    [SMALL, TINY].into_iter().find_map(|numbers| violation_with(numbers, make, clause))
}

/// Violation as [`violation`] finds it, but with the constants `numbers`.
fn violation_with(
    numbers: Numbers,
    make: fn(Numbers, Option<&str>) -> System,
    clause: Name,
) -> Option<(Name, Name, usize)> {
    let weak = make(numbers, Some(clause));
    let worlds = worlds(weak.name);
    // Worlds that allow no action which the clause changes are left out: they cannot show a
    // violation.
    let about: Vec<Name> = weak
        .actions
        .iter()
        .filter(|action| differs(numbers, make, action))
        .map(|action| action.name)
        .collect();
    let relevant =
        worlds.iter().filter(|world| about.iter().any(|action| world.with.contains(action)));
    relevant
        .map(|world| (world.name, search(&weak, world, SEARCHED, false)))
        .find_map(|(name, found)| Some((found.violated?, name, found.trace.len())))
}
