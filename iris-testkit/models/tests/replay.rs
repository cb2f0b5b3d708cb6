//! Tests that replay executions of the protocols, in Rust and in device headers, against the proved
//! rules. `cargo xtask check-protocols` also replays all executions that the models explore.

use iris_models::check::{self, Implementation, compositions, replayed};
use iris_models::mutants::{self, Engine};
use iris_models::proof::replay::{Extent, replay};
use iris_models::{Change, Failure, Rules, Scenario, ops};
use iris_sync::Access;

/// Tests that random schedules of every scenario keep to the rules, and that together they perform
/// every action and access.
#[test]
fn executions_keep_to_the_rules() {
    let all = replayed::random(false);
    let failed: Vec<String> = all
        .iter()
        .filter_map(|it| {
            let failure = it.report.failure.as_ref()?;
            Some(format!("{} ({}): {failure:?}", it.report.scenario, it.implementation.name()))
        })
        .collect();
    assert!(failed.is_empty(), "{} failed:\n{}", failed.len(), failed.join("\n"));
    let missing = |all: &[_]| {
        let mut missing = replayed::missing(all);
        // The number of steps is not checked here, because the required number includes the steps
        // of the models.
        missing.retain(|it| it.starts_with("never replayed"));
        missing
    };
    assert_eq!(missing(&all), Vec::<String>::new());
    assert_eq!(compositions::missing(&all), Vec::<String>::new());
    // An action and an access that no execution of the Rust code performs any more must be named.
    let mut less = all;
    for of_rust in less.iter_mut().filter(|it| it.implementation == Implementation::Rust) {
        of_rust.counts.steps.remove(&("slot rule", "see_done"));
        of_rust.counts.accesses.remove("LlStamp");
    }
    let without = |name: &str| {
        let all = less.iter().filter(|it| !it.report.scenario.starts_with(name));
        compositions::missing(&all.cloned().collect::<Vec<_>>())
    };
    let gone = "copy engines (rust): no step open of the copy engines";
    assert!(without("copied").iter().any(|it| it == gone), "{:?}", without("copied"));
    let named = ["action see_done of the slot rule", "access LlStamp"];
    assert_eq!(missing(&less), named.map(|it| format!("never replayed (rust): {it}")));
    assert!(replayed::missing(&less[..1]).iter().any(|it| it.contains("expected at least")));
}

/// Tests that the executions of mutants break the rules.
#[test]
fn mutants_leave_the_rules() {
    let replayed = replayed::mutants(check::all_mutants());
    let faults: Vec<_> = replayed.iter().filter_map(|it| it.fault()).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert_eq!(compositions::unlinked(&replayed), Vec::<String>::new());
    let mut less = replayed.clone();
    less.retain(|it| it.mutant.name != "no-gate");
    assert!(compositions::unlinked(&less)[0].contains("mutant no-gate stops at {}"));
    assert!(replayed.len() >= 70, "{} mutants", replayed.len());
    // A mutant whose fault has been removed keeps to the rules, and this must be reported.
    let mut sound = mutants::all().swap_remove(0);
    sound.rules = Rules::default();
    let replayed = replayed::mutants(vec![(Implementation::Rust, sound)]);
    let fault = replayed[0].fault().expect("a fault");
    assert!(fault.contains("keeps to the rules"), "{fault}");
}

/// Tests that the observers of all three engines see the step at which a mutant breaks the rules.
/// Also tests that an engine runs the same number of executions with and without an observer.
#[test]
fn every_engine_is_observed() {
    let all = mutants::all();
    let mutant = all.iter().find(|it| it.name == "no-credit-before-record").expect("the mutant");
    let sound = Rules::default();
    for (extent, engine) in [
        (Extent::Random(10), Engine::Random(10)),
        (Extent::Search, Engine::Search),
        (Extent::Loom(Some(1)), Engine::Loom(Some(1))),
    ] {
        let (report, _) = replay(&mutant.scenario, &mutant.rules, extent).expect("a replay");
        let Some(Failure::Rule(forbidden)) = &report.failure else { panic!("{report}") };
        assert_eq!(forbidden.by, "enter: with the peer's credit", "{extent:?}");
        let (report, counts) = replay(&mutant.scenario, &sound, extent).expect("a replay");
        let plain = mutants::run(&mutant.scenario, &sound, engine);
        assert_eq!((report.failure, report.executions), (None, plain.executions), "{extent:?}");
        assert!(counts.total() > 0, "{extent:?}");
    }
}

/// Tests that a rank that gave up takes no step that a peer could mistake for a step of a call,
/// even if its call number is so far ahead that old words look new to it. Without the checks of its
/// abort word, the rank does take such a step.
#[test]
fn a_rank_that_gave_up_is_mute_for_ever() {
    assert_eq!(replayed::aged_under(&[]), Vec::<&str>::new());
    let by = replayed::aged_under(&[Change::Skip(Access::AbortCheck)]);
    assert!(by.contains(&"die: no call after one that was given up"), "{by:?}");
}

/// Tests that a rank tells its peers before it leaves a call that pulls, and that a rank that found
/// all done words checks its abort word before it relies on them.
#[test]
fn ranks_that_leave_a_pulled_call_keep_to_the_rules() {
    let by = |scenario: &Scenario, rules: &Rules, extent| {
        let (report, counts) = replay(scenario, rules, extent).expect("a replay");
        let by = report.failure.as_ref().map(|it| match it {
            Failure::Rule(forbidden) => forbidden.by,
            other => panic!("{other:?}"),
        });
        (by, counts)
    };
    let all = mutants::all();
    for name in ["leaves-untold", "leaves-untold-by-host"] {
        let mutant = all.iter().find(|it| it.name == name).expect("the mutant");
        let (forbidden, _) = by(&mutant.scenario, &mutant.rules, Extent::Random(10));
        assert_eq!(forbidden, Some("die: peers of a call that pulls are told"), "{name}");
    }
    for by_host in [false, true] {
        let scenario = ops::pull_of_leavers(2, by_host);
        let (forbidden, counts) = by(&scenario, &Rules::default(), Extent::Search);
        assert_eq!(forbidden, None);
        for step in ["pull", "see_done", "finish", "die"] {
            assert!(counts.steps.contains_key(&("slot rule", step)), "{step}");
        }
    }
    // In a call that refreshes words, a rank checks its abort word once more after it has settled
    // its pulls. If it was told to leave by then, it skips the refresh. No peer reads its shard any
    // more.
    for (ranks, by_host, extent) in
        [(2, false, Extent::Search), (2, true, Extent::Search), (3, false, Extent::Random(300))]
    {
        let scenario = ops::pull_of_leavers(ranks, by_host);
        let scenario = scenario.calls(1, iris_sync::REFRESH_PERIOD);
        let (forbidden, _) = by(&scenario, &Rules::default(), extent);
        assert_eq!(forbidden, None, "{ranks} ranks, by host: {by_host}");
        let untold = Rules::from(Change::LeaveUntold);
        let (forbidden, _) = by(&scenario, &untold, Extent::Random(300));
        let is_caught = forbidden == Some("die: peers of a call that pulls are told");
        assert!(is_caught || ranks == 2 && !by_host, "{forbidden:?}");
    }
    let unchecked = Rules::from(Change::Skip(Access::AbortCheck));
    let (forbidden, _) = by(&ops::pull_of_leavers(2, false), &unchecked, Extent::Search);
    assert_eq!(forbidden, Some("see_done: the peer has not told that it gave up"));
}
