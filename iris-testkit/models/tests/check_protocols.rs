//! Tests of the output and exit code of `cargo xtask check-protocols`: the fields of its JSON, and
//! failure if any check fails or a required one is missing. The checks themselves are tested
//! elsewhere.

use iris_models::check::replayed::{Replayed, ReplayedMutant};
use iris_models::check::{
    self, Arch, Compiled, Finding, Implementation, Outcome, Summary, catalogue,
};
use iris_models::mutants;
use iris_models::proof::replay::Counts;
use serde_json::Value;

/// Summary in which all checks passed, with one entry of each kind.
fn well() -> Summary {
    let model = catalogue(false).swap_remove(0);
    let mutant = mutants::all().swap_remove(0);
    let (good, caught) = (model.run(), mutant.run());
    let controls = vec![(Implementation::Rust, good.clone())];
    let done = Outcome::Done { compiler: "cc".into(), kernels: 1, probes: 1, twice: 1 };
    let compiled = |outcome| Compiled { arch: check::device_code::ARCHS[0], outcome, seconds: 0.0 };
    Summary {
        models: vec![(model, good)],
        mutants: vec![(Implementation::Rust, mutant, caught)],
        controls,
        compiled: vec![compiled(done)],
        ..Summary::default()
    }
}

#[test]
fn the_json_has_what_is_promised() {
    let mut summary = well();
    assert_eq!((summary.failed(), summary.exit_code()), (Vec::new(), 0));
    summary.skipped.push("gfx942: no clang".into());
    summary.optional.push("gfx950: not known".into());
    let text = summary.json().to_string();
    assert!(!text.contains('\n'), "one line: {text}");
    let json: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(json["ok"], true);
    assert_eq!(json["mutants"], serde_json::json!({ "total": 1, "caught": 1 }));
    let model = json["models"][0].as_object().expect("a model");
    for (field, is) in [
        ("protocol", Value::is_string as fn(&Value) -> bool),
        ("implementation", Value::is_string),
        ("ranks", Value::is_u64),
        ("executions", Value::is_u64),
        ("bound", Value::is_string),
        ("ok", Value::is_boolean),
    ] {
        assert!(is(&model[field]), "{field} of {model:?}");
    }
    assert_eq!(json["architectures"], serde_json::json!(["sm_80"]));
    assert_eq!(json["skipped"], serde_json::json!(["gfx942: no clang"]));
    assert_eq!(json["optional_skipped"], serde_json::json!(["gfx950: not known"]));
    // Skipped checks are no failure if they were not required.
    assert_eq!(summary.exit_code(), 0);
}

#[test]
fn whatever_fails_fails_the_whole() {
    type Break = fn(&mut Summary);
    let breaks: [(&str, Break); 10] = [
        ("a model", |it| it.models[0].1 = it.mutants[0].2.clone()),
        ("a survivor", |it| it.mutants[0].2 = it.models[0].1.clone()),
        ("a control", |it| it.controls[0].1 = it.mutants[0].2.clone()),
        ("another check caught it", |it| it.mutants[0].1.expected = iris_models::Check::Lost),
        ("a replay", |it| {
            let report = it.mutants[0].2.clone();
            let (implementation, counts) = (Implementation::Rust, Counts::default());
            it.replayed.push(Replayed { implementation, report, counts });
        }),
        ("a mutant that keeps to the rules", |it| {
            let (implementation, mutant, _) = it.mutants[0].clone();
            let report = it.models[0].1.clone();
            it.replayed_mutants.push(ReplayedMutant { implementation, mutant, report });
        }),
        ("a part that did not run", |it| it.compiled.clear()),
        ("something else", |it| it.failures.push("sync.h differs".into())),
        ("an architecture", |it| {
            let finding = Finding { by: "type", what: "does not compile".into() };
            it.compiled[0].outcome = Outcome::Failed(vec![finding]);
        }),
        ("a compiler that is missing", |it| {
            it.required = true;
            it.skipped.push("sm_80: NVRTC is not there".into());
        }),
    ];
    for (what, change) in breaks {
        let mut summary = well();
        change(&mut summary);
        assert_eq!((summary.failed().len(), summary.exit_code()), (1, 1), "{what}");
        assert_eq!(summary.json()["ok"], false, "{what}");
        assert!(summary.to_string().contains("FAILED: "), "{what}");
    }
}

/// Tests that exactly four architectures are required.
#[test]
fn four_architectures_are_required() {
    let required = |arch: &Arch| arch.required;
    let names = check::device_code::ARCHS.into_iter().filter(required).map(|arch| arch.name);
    assert_eq!(names.collect::<Vec<_>>(), ["sm_80", "sm_90a", "gfx90a", "gfx942"]);
}
