//! Tests of the texts of all errors of compilations. Each text shows the value, what was expected,
//! and what to do.

use iris_testkit::error_texts::check_texts;
use iris_testkit::variants;

use super::*;

const GUIDE: &str = include_str!("../../../../iris-ops/GUIDE.md");

variants! { Error: NotFound, NotCarried, Call, Compile, Architecture, File, ZeroByte, Cache }

fn examples() -> Vec<(Error, [&'static str; 3])> {
    let (source_name, arch) = (String::from("gemm.cu"), String::from("sm_90a"));
    vec![
        (
            Error::NotFound { what: "NVRTC", looked: vec!["libnvrtc.so.13".into()] },
            ["NVRTC is not there", "expected it as libnvrtc.so.13", "install it, or name it"],
        ),
        (
            Error::NotCarried {
                source_name: source_name.clone(),
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
            Error::Compile { source_name, arch: arch.clone(), log: "line 3: no type".into() },
            ["gemm.cu for sm_90a", "expected to compile", "mend what the compiler says:\nline 3"],
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
            Error::File { path: "/tmp/x".into(), why: "no space".into() },
            ["/tmp/x", "expected to be writable", "set TMPDIR"],
        ),
        (
            Error::ZeroByte { what: "the option -D".into() },
            ["the option -D contains a zero byte", "expected none", "take it out"],
        ),
        (
            Error::Cache {
                path: "/cache".into(),
                why: "others may write it, expected its owner alone".into(),
            },
            ["cache of kernels /cache", "expected its owner alone", "another folder (IRIS_CACHE"],
        ),
    ]
}

#[test]
fn every_error_shows_its_value_what_was_expected_and_what_to_do() {
    check_texts(GUIDE, &examples(), NAMES, name);
}
