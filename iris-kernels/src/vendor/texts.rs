//! Tests of the texts of all errors of GEMM libraries. Each text shows the value, what was
//! expected, and what to do.

use iris_testkit::error_texts::check_texts;
use iris_testkit::variants;

use super::*;

const GUIDE: &str = include_str!("../../../iris-ops/GUIDE.md");

variants! { Error: NotFound, None, TooOld, Call, Late, NoAlgorithm }

/// Errors, each with three pieces of its text: the value, the expectation, and the action. The errors of
/// calls that fail, where no library is needed for the failure.
fn examples() -> Vec<(Error, [&'static str; 3])> {
    let bare = ["libcublasLt.so.0"];
    let open = |_: &Path| Err::<(), _>(String::from("no such file"));
    let not_found = find(("cuBLASLt", "IRIS_NOT_SET"), &[], ("libcublasLt", &bare), open);
    let library = || String::from("cuBLASLt 11.0");
    vec![
        (
            not_found.unwrap_err(),
            ["cuBLASLt is not there", "expected it as libcublasLt.so.0", "install it, or name"],
        ),
        (
            Blas::get(BackendKind::Cpu).map(drop).expect_err("no library"),
            ["supported on cpu", "expected cuda or hip", "use Library::None"],
        ),
        (
            Error::TooOld { library: library(), oldest: "12.0".into() },
            ["cuBLASLt 11.0 is older than 12.0", "oldest supported", "install a later one"],
        ),
        (
            Error::Call { function: "cublasLtCreate".into(), code: 1, name: "NOT_INIT".into() },
            ["cublasLtCreate: NOT_INIT (code 1)", "expected success", "`iris doctor`"],
        ),
        (
            Error::Late { function: "ncclCommInitRankConfig", seconds: 60 },
            ["did not end within 60 s", "expected all ranks to join", "see whether a rank is lost"],
        ),
        (
            Error::NoAlgorithm { library: library(), problem: "3 x 4 x 5 of f32".into() },
            ["cuBLASLt 11.0 has no algorithm for 3 x 4 x 5", "expected one", "use Library::Ours"],
        ),
    ]
}

#[test]
fn every_error_shows_its_value_what_was_expected_and_what_to_do() {
    check_texts(GUIDE, &examples(), NAMES, name);
}
