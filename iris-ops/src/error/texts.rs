//! Tests of the texts of all errors. Each text must show the value, the expectation, and an action
//! for the user.

use iris_heap::BackendKind;

use iris_testkit::error_texts::check_texts;
use iris_testkit::variants;

use super::*;
use crate::ops::{all_reduce, matmul_all_reduce};
use crate::topology::Topology;

/// User guide, which has a section on troubleshooting by error text.
const GUIDE: &str = include_str!("../../GUIDE.md");

variants! { Error:
    Unknown, Tuning, NoPlan, Invalid, Shape, Dtype, Overlap, TooManyRows, TooManyElements, OtherWorld, OtherNodes, Poisoned, Step, Comm, Scope, Heap,
}

/// Example of each error, with three pieces of its text: the value, the expectation, and the
/// action.
fn examples() -> Vec<(Error, [&'static str; 3])> {
    let op = || OpLabel::from(Op::AllReduce);
    let cause = || Box::new(iris_heap::Error::GaveUp { rank: 3, host: None, reason: None });
    vec![
        (
            "fast".parse::<crate::Variant>().unwrap_err().into(),
            ["variant fast", "expected one of", "one_shot, two_shot"],
        ),
        (
            Error::Tuning {
                path: "x.toml".into(),
                why: "is for 4 ranks, expected 2: run `iris tune` for 2".into(),
            },
            ["x.toml is for 4 ranks", "expected 2", "run `iris tune`"],
        ),
        (Error::NoPlan, ["0 plans", "expected at least one", "pass the plans"]),
        (Error::invalid(Op::AllReduce, "root", 7, "below 4"), ["root is 7", "expected", "below 4"]),
        (
            Error::Shape { op: op(), matrix: "C", rows: 3, cols: 4, expected: "3 x 5".into() },
            ["C is 3 x 4", "expected 3 x 5", "pass such a matrix"],
        ),
        (
            Error::Dtype { op: op(), matrix: "C", dtype: DType::F16, expected: DType::F32 },
            ["C has element type f16", "expected f32", "pass f32, or plan with"],
        ),
        (
            Error::Overlap { op: op(), first: "C", second: "A" },
            ["C and A overlap", "expected memory of its own", "allocate it apart"],
        ),
        (
            Error::TooManyRows { op: op(), rows: 9, planned: 8 },
            ["9 rows", "expected at most 8", "pass fewer, or plan for 9"],
        ),
        (
            Error::TooManyElements { op: op(), elements: 9, planned: 8 },
            ["9 elements", "expected at most 8", "pass fewer, or plan for 9"],
        ),
        (
            Error::OtherWorld { op: op(), planned_rank: 1, planned_size: 4, rank: 1, size: 2 },
            ["rank 1 of 4", "expected rank 1 of 2", "plan on each rank"],
        ),
        (
            Error::OtherNodes { op: op(), planned: 1, nodes: 2 },
            ["planned for 1 nodes", "expected 2", "plan from the heap"],
        ),
        (
            Error::Poisoned { op: op(), cause: cause() },
            ["rank 3 gave up", "expected one without", "open them anew"],
        ),
        (
            Error::Step {
                op: op(),
                step: "kernel two_shot".into(),
                cause: cause(),
                recovery: Recovery::Close,
            },
            ["step kernel two_shot", "expected to finish", "close it"],
        ),
        (
            Error::Comm { cause: cause() },
            ["communicator: rank 3 gave up", "expected to finish", "open them anew"],
        ),
        (
            Error::Scope { cause: cause() },
            ["rank 3 gave up", "expected to finish", "open them anew"],
        ),
        (
            Error::Heap { op: op(), cause: cause() },
            ["all_reduce: rank 3 gave up", "expected to finish", "open them anew"],
        ),
    ]
}

#[test]
fn every_error_shows_its_value_what_was_expected_and_what_to_do() {
    check_texts(GUIDE, &examples(), NAMES, name);
}

#[test]
fn an_operator_is_named_by_its_label_and_shape() {
    let ranks = Topology::new(0, 2);
    let options = matmul_all_reduce::Options::new(64, 8, usize::MAX);
    let of = |options: &matmul_all_reduce::Options| options.plan(ranks).unwrap_err().to_string();
    let shape = format!("matmul_all_reduce of 64 x 8 x {} f32", usize::MAX);
    assert!(of(&options).starts_with(&format!("{shape}: k is ")), "{}", of(&options));
    let named = of(&options.name("layer3.down"));
    assert!(named.starts_with(&format!("layer3.down ({shape}): k is ")), "{named}");

    let other = all_reduce::Options::new(8)
        .plan(ranks.on_device(crate::Device::assumed(BackendKind::Cuda)));
    let plan = all_reduce::Options::new(8).plan(ranks).unwrap();
    let error = crate::Plan::heap_options(&[&plan, &other.unwrap()], crate::HeapReserve::none());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("backend is cuda") && error.contains("cpu"), "{error}");
}

#[test]
fn a_label_is_said_once() {
    let label: Arc<str> = "layer3.down (all_reduce of 8 f32)".into();
    let heap =
        |what: &str| Error::Heap { op: Op::AllReduce.into(), cause: Box::new(panicked(what)) };
    for what in ["all_reduce", &label] {
        let text = heap(what).labelled(&label).to_string();
        assert_eq!(text.matches("all_reduce").count(), 1, "{text}");
    }
}

/// Error of the heap whose text begins with the operator name `name`, as the text of a fault does.
fn panicked(name: &str) -> iris_heap::Error {
    iris_heap::Error::Panicked { name: name.into(), group: None, message: "by design".into() }
}
