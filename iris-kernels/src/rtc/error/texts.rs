//! Tests of the texts of all errors of compilations. Each text shows the value, what was expected,
//! and what to do.

use iris_testkit::error_texts::check_texts;
use iris_testkit::variants;

use super::*;
use crate::cache::Cache;
use crate::rtc::KernelSource;
use crate::rtc::api::{Api, c_string};
use crate::rtc::clang::Clang;
use crate::rtc::nvrtc;

const GUIDE: &str = include_str!("../../../../iris-ops/GUIDE.md");

variants! { Error: NotFound, NotCarried, Call, Compile, Architecture, File, ZeroByte, Cache }

/// Error of a compilation of the source `name` by the program false in place of clang.
fn compiled(name: &str) -> Error {
    let source = KernelSource { name, text: "" };
    Clang::at("false").compile(source, &[], &[], "sm_90a").unwrap_err()
}

/// Errors of calls that fail, each with three pieces of its text: the value, the expectation, and the
/// action. Three rows are written out, whose calls need a compiler that is broken, old or missing.
fn examples() -> Vec<(Error, [&'static str; 3])> {
    let (source_name, arch) = (String::from("gemm.cu"), String::from("sm_90a"));
    let none = |_: &str| false;
    let found = Api::find(&nvrtc::NAMES, "IRIS_NOT_SET", &[], &["libnvrtc.so.0"], none, none);
    let not_found = found.unwrap_err();
    vec![
        (
            not_found,
            [
                "NVRTC (libnvrtc.so) is not there",
                "expected it as libnvrtc.so.0",
                "install it, or name it",
            ],
        ),
        (
            Error::NotCarried {
                source_name,
                arch: arch.clone(),
                options: "-DX=1".into(),
                folder: "/kernels".into(),
                no_compiler: "NVRTC is not there".into(),
            },
            ["gemm.cu for sm_90a (-DX=1)", "is not in /kernels", "iris kernels --arch sm_90a"],
        ),
        (
            Error::Call { function: "nvrtcVersion".into(), code: 4, name: "INVALID".into() },
            ["nvrtcVersion: INVALID (code 4)", "expected success", "`iris doctor`"],
        ),
        (
            compiled("gemm.cu"),
            ["gemm.cu for sm_90a", "expected to compile", "mend what the compiler says:\nfalse"],
        ),
        (
            Error::Architecture {
                compiler: "hiprtc of ROCm 6.0.0".into(),
                arch,
                instead: "clang is not there".into(),
            },
            ["hiprtc of ROCm 6.0.0 does not support sm_90a", "expected one that does", "install"],
        ),
        (
            compiled(&"x".repeat(300)),
            ["xxx, expected to be writable", "File name too long", "set TMPDIR"],
        ),
        (
            c_string("-D\0", "the option -D").unwrap_err(),
            ["the option -D contains a zero byte", "expected none", "take it out"],
        ),
        (
            Cache::open("/dev/null/kernels".as_ref()).unwrap_err(),
            [
                "cache of kernels /dev/null",
                "expected a folder that this",
                "another folder (IRIS_CACHE",
            ],
        ),
    ]
}

#[test]
fn every_error_shows_its_value_what_was_expected_and_what_to_do() {
    check_texts(GUIDE, &examples(), NAMES, name);
}
