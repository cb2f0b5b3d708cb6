//! Texts of the errors of compilers and of vendors' libraries: each shows the value, what was expected, and what to do.

use std::path::PathBuf;

use iris_heap::BackendKind;
use iris_kernels::{rtc, vendor};

fn check(texts: &[(String, [&str; 3])]) {
    for (text, parts) in texts {
        for part in parts {
            assert!(text.contains(part), "no {part:?} in {text:?}");
        }
    }
}

#[test]
fn errors_of_compilers_lead() {
    use rtc::Error;
    let (path, arch) = (|| PathBuf::from("/x"), || "sm_90a".to_string());
    let source = || "matmul.cu".to_string();
    let errors = [
        (
            Error::NotFound { what: "NVRTC", looked: vec!["libnvrtc.so.12".into()] },
            ["NVRTC is not there", "expected it as libnvrtc.so.12", "install it, or name it"],
        ),
        (
            Error::NotCarried {
                source_name: source(),
                arch: arch(),
                options: "-O3".into(),
                folder: path(),
                no_compiler: "no NVRTC".into(),
            },
            ["matmul.cu for sm_90a", "is not in /x", "`iris kernels --arch sm_90a --out FOLDER`"],
        ),
        (
            Error::Call { function: "nvrtcVersion".into(), code: 7, name: "INTERNAL".into() },
            ["INTERNAL (7)", "expected success", "`iris doctor` says"],
        ),
        (
            Error::Compile { source_name: source(), arch: arch(), log: "x.h(3): error".into() },
            ["x.h(3): error", "expected to compile", "mend what the compiler says"],
        ),
        (
            Error::Architecture {
                compiler: "NVRTC 11.2".into(),
                arch: arch(),
                instead: "nothing else is there".into(),
            },
            ["NVRTC 11.2 does not support sm_90a", "expected one that does", "install a later one"],
        ),
        (
            Error::File { path: path(), why: "no space".into() },
            ["/x", "expected to be writable", "set TMPDIR"],
        ),
        (
            Error::ZeroByte { what: "an option".into() },
            ["an option contains a zero byte", "expected none", "take it out"],
        ),
        (
            Error::Cache { path: path(), why: "is a file, expected a folder".into() },
            ["/x: is a file", "expected a folder", "IRIS_CACHE names another"],
        ),
    ];
    check(&errors.map(|(error, parts)| (error.to_string(), parts)));
}

#[test]
fn errors_of_libraries_lead() {
    use vendor::Error;
    let library = || "cuBLASLt 11.3".to_string();
    let errors = [
        (
            Error::NotFound { what: "cuBLASLt", looked: vec!["libcublasLt.so.12".into()] },
            ["cuBLASLt is not there", "expected it as libcublasLt.so.12", "install it, or name it"],
        ),
        (
            Error::None { kind: BackendKind::Cpu },
            ["supported on cpu", "expected cuda or hip", "use Library::None"],
        ),
        (
            Error::TooOld { library: library(), oldest: "11.8".into() },
            ["cuBLASLt 11.3", "older than expected, 11.8", "install a later one"],
        ),
        (
            Error::Call { function: "cublasLtCreate".into(), code: 3, name: "ALLOC".into() },
            ["ALLOC (3)", "expected success", "`iris doctor` says"],
        ),
        (
            Error::NoAlgorithm { library: library(), problem: "3 x 5 x 7".into() },
            ["no algorithm for 3 x 5 x 7", "expected one", "use Library::Ours"],
        ),
    ];
    check(&errors.map(|(error, parts)| (error.to_string(), parts)));
}
