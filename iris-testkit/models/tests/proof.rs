//! Tests of the proof of the six protocol rules. `cargo xtask check-protocols` also
//! switches off each clause of all rules in turn.

use iris_models::proof::barrier::barrier;
use iris_models::proof::beside::beside;
use iris_models::proof::conditions::{self, Goal, SEEDS};
use iris_models::proof::engine::engines;
use iris_models::proof::mutants::{clauses, first_open, weaken};
use iris_models::proof::report::{self, Extent, Proof, SYSTEMS};
use iris_models::proof::rule::{Numbers, slot_rule};
use iris_models::proof::staging::staging;
use iris_models::proof::system::System;
use iris_models::proof::term::{Node, Sort};
use iris_models::proof::{bounded, smt};
use iris_testkit::Level;

/// Whether z3 is installed. It may be missing on a person's machine, but not in CI.
fn solver() -> bool {
    let there = smt::version().is_some();
    let ci = std::env::var_os("CI").is_some_and(|value| value == "true");
    assert!(there || !ci, "CI needs z3");
    if !there {
        eprintln!("skipped: no program z3; Debian's package z3 has it");
    }
    there
}

/// Tests that every condition is proved. The level quick leaves it out; `cargo xtask prove` does the
/// same.
#[test]
fn everything_is_proved() {
    if !solver() || Level::from_env() <= Level::Quick {
        return;
    }
    let proof = report::run(Extent::Conditions);
    assert_eq!(proof.failures, Vec::<String>::new());
    assert!(proof.conditions() > 900 && proof.open() == 0, "{proof}");
}

#[test]
fn the_text_is_consistent() {
    for make in SYSTEMS {
        assert_eq!(make(Numbers::REAL, None).faults(), Vec::<String>::new());
    }
}

/// Tests that the slot rule proves or demands everything on which other rules rely.
#[test]
fn the_slot_rule_gives_what_others_take() {
    let slots = slot_rule(Numbers::REAL, None);
    let takers = SYSTEMS.map(|make| make(Numbers::REAL, None));
    assert!(takers.iter().filter(|it| !it.takes.is_empty()).count() == 3);
    takers.iter().for_each(|it| assert!(it.not_given_by(&slots).is_empty(), "{}", it.name));
    let mut less = slots;
    less.actions.retain(|action| action.name != "entry");
    let without: Vec<_> = takers.iter().flat_map(|it| it.not_given_by(&less)).collect();
    assert_eq!(without, ["the peer is in this call, or a later one"]);
}

/// Tests that a seed and a limit with which nothing can be proved cause a failure that names the
/// goal.
#[test]
fn unknown_is_a_failure_that_names_the_goal() {
    if !solver() {
        return;
    }
    let system = slot_rule(Numbers::REAL, None);
    let outcome = conditions::prove(&system, &SEEDS[..1], 1);
    assert_eq!(outcome.open.len(), outcome.asked);
    let goal = Goal::Property("read", "the tile is of this call");
    assert!(outcome.open.iter().any(|(open, _)| *open == goal));
    assert_eq!(goal.to_string(), "read: \"the tile is of this call\"");
}

#[test]
fn a_weakened_rule_is_not_proved() {
    if !solver() {
        return;
    }
    let whole = slot_rule(Numbers::REAL, None);
    assert!(clauses(&whole).len() > 50);
    let weak = slot_rule(Numbers::REAL, Some("enter: with the peer's credit"));
    let open = first_open(&whole, &weak).expect("a condition fails");
    assert!(matches!(open, Goal::Property("enter", _)), "{open}");
}

/// Tests that the smaller rules need each of their clauses: if a clause is switched off, a
/// condition is not proved, and a property is violated in a small world.
#[test]
fn every_clause_of_the_smaller_rules_is_needed() {
    if !solver() {
        return;
    }
    type Make = fn(Numbers, Option<&str>) -> System;
    for (make, count) in [(staging as Make, 10), (engines, 8), (beside, 6)] {
        let whole = make(Numbers::REAL, None);
        let weak: Vec<_> =
            clauses(&whole).into_iter().map(|clause| weaken(make, &whole, clause, true)).collect();
        let needless: Vec<_> =
            weak.iter().filter(|it| it.open.is_none() || it.violated.is_none()).collect();
        assert!(needless.is_empty() && weak.len() == count, "{needless:?} of {}", weak.len());
    }
}

/// Functions by which a rule could tell one thread of a rank from another, with the actions that
/// use them.
fn tells_threads_apart(system: &System) -> Vec<(&'static str, &'static str)> {
    let is_fixed = |name: &str| system.fixed.iter().any(|it| it.name == name);
    let all = system.fixed.iter().chain(system.state);
    let apart: Vec<&str> = all
        .filter(|it| {
            let of_threads = it.arguments.contains(&Sort::Agent) && it.name != "rank";
            is_fixed(it.name) && of_threads || it.value == Sort::Agent
        })
        .map(|it| it.name)
        .collect();
    let mut found = Vec::new();
    for action in &system.actions {
        let named = action.guards.iter().chain(&action.properties).map(|(_, term)| term);
        let effects =
            action.effects.iter().flat_map(|it| it.at.iter().chain([&it.only, &it.value]));
        for term in action.given.iter().chain(named).chain(effects) {
            let uses = |name: &str| term.any(&|it| matches!(it, Node::Apply(of, _) if *of == name));
            found.extend(apart.iter().filter(|name| uses(name)).map(|&name| (action.name, name)));
        }
    }
    found
}

/// Tests that the slot rule treats all threads of a rank alike. So the proof also covers senders,
/// gates and later launches, which are threads like all others.
#[test]
fn the_slot_rule_tells_no_thread_of_a_rank_from_another() {
    assert_eq!(tells_threads_apart(&slot_rule(Numbers::REAL, None)), []);
    // Control: the rule of staging flags does tell threads apart, because a unit has a fetcher.
    let apart = tells_threads_apart(&staging(Numbers::REAL, None));
    assert!(apart.contains(&("fetch", "fetcher")), "{apart:?}");
}

/// Tests in small worlds that the rules are usable: every action occurs, no property is violated,
/// and the invariant holds.
#[test]
fn small_worlds_keep_the_invariant() {
    let system = slot_rule(bounded::SMALL, None);
    for world in bounded::worlds(system.name) {
        let found = bounded::search(&system, &world, 2_000, true);
        assert_eq!(
            (found.violated, found.broken),
            (None, None),
            "{}: {:?}",
            world.name,
            found.trace
        );
    }
    let weak = slot_rule(bounded::SMALL, Some("read: after the word that stands for it"));
    let violated = bounded::worlds(weak.name)
        .iter()
        .find_map(|world| bounded::search(&weak, world, 2_000, false).violated);
    assert_eq!(violated, Some("the tile is of this call"));
}

/// Tests in small worlds that every action happens, and that every guard holds in some state and
/// not in another. An action that can never happen is reported by name, and so is a guard that
/// always holds.
#[test]
fn every_action_happens_and_every_guard_can_refuse() {
    for make in SYSTEMS {
        let mut proof = Proof::default();
        proof.explore_worlds(&make(bounded::SMALL, None));
        assert_eq!(proof.failures, Vec::<String>::new());
    }
    let mut planted = barrier(bounded::SMALL, None);
    for action in &mut planted.actions {
        match action.name {
            "pass" => action.given.push(false.into()),
            "look" => action.guards.push(("planted", true.into())),
            _ => {}
        }
    }
    let mut proof = Proof::default();
    proof.explore_worlds(&planted);
    let found = |what| proof.failures.iter().any(|failure| failure == what);
    assert!(found("device barrier: pass never happens"), "{:?}", proof.failures);
    assert!(found("device barrier: look: \"planted\" always holds"), "{:?}", proof.failures);
}
