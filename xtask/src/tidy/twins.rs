//! Rule: protocols and kernel bodies must exist both in Rust and in device headers, in files with
//! the same stem.

use super::Finding;
use super::tree::Tree;

const HEADERS: &str = "iris-kernels/kernels/iris/";
const CRATE: &str = "iris-sync/src/lib.rs";

/// Folders of Rust files that must all have a device header, with the folder of the header in
/// `kernels/iris/`.
const FOLDERS: [(&str, &str); 3] = [
    ("iris-sync/src/flow/", "flow/"),
    ("iris-sync/src/", ""),
    ("iris-kernels/src/cpu/body/", "body/"),
];

/// Folders of device headers that must all have a Rust file. `kernels/iris/` has further headers,
/// which only devices need.
const OF_HEADERS: [&str; 2] = ["flow/", "body/"];

/// Header without a file of its own in Rust: `flow/mod.rs` contains its declarations.
const SHARED: &str = "flow/launch.h";

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    // Test trees that contain only the device source have nothing to compare.
    if tree.file(CRATE).is_none() {
        return findings;
    }
    for file in tree.files() {
        let path = file.path.as_str();
        let other = match path.strip_prefix(HEADERS) {
            Some(header) => OF_HEADERS.iter().any(|it| header.starts_with(it)).then(|| {
                let stem = header.trim_end_matches(".h");
                let found = FOLDERS.iter().find(|(_, to)| !to.is_empty() && stem.starts_with(to));
                found.map(|(from, to)| format!("{from}{}.rs", &stem[to.len()..]))
            }),
            None => FOLDERS.iter().find_map(|(from, to)| {
                let stem = path.strip_prefix(from)?.strip_suffix(".rs")?;
                let is_root =
                    ["lib", "mod"].iter().any(|root| stem.rsplit('/').next() == Some(root));
                Some((!is_root).then(|| format!("{HEADERS}{to}{stem}.h")))
            }),
        };
        let Some(other) = other.flatten() else { continue };
        if path != format!("{HEADERS}{SHARED}") && tree.file(&other).is_none() {
            findings.push(Finding::new(path, 0, format!("has no twin: {other} is missing")));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests;

    /// Paths with findings, for a tree that consists of these files and the root file of iris-sync.
    fn found(paths: &[&str]) -> Vec<String> {
        let files: Vec<_> = paths.iter().chain(&[CRATE]).map(|&path| (path, "")).collect();
        tests::found(check, &files)
    }

    #[test]
    fn a_file_without_its_twin_is_found() {
        for path in [
            "iris-sync/src/team.rs",
            "iris-sync/src/flow/team.rs",
            "iris-kernels/src/cpu/body/team.rs",
            "iris-kernels/kernels/iris/flow/team.h",
            "iris-kernels/kernels/iris/body/team.h",
        ] {
            assert_eq!(found(&[path]), [format!("{path}:0")]);
        }
    }

    #[test]
    fn files_of_one_stem_are_twins() {
        for (rust, header) in [
            ("iris-sync/src/lock.rs", "lock.h"),
            ("iris-sync/src/flow/ll.rs", "flow/ll.h"),
            ("iris-kernels/src/cpu/body/sums.rs", "body/sums.h"),
        ] {
            assert_eq!(found(&[rust, &format!("{HEADERS}{header}")]), [""; 0]);
        }
    }

    #[test]
    fn roots_and_what_only_devices_need_stand_alone() {
        let headers = ["port_cuda.h", "gemm/sm90.h", "copy.h", SHARED];
        let headers = headers.map(|name| format!("{HEADERS}{name}"));
        let roots =
            ["iris-sync/src/lib.rs", "iris-sync/src/flow/mod.rs", "iris-kernels/src/trace.rs"];
        let all = headers.iter().map(String::as_str).chain(roots);
        assert_eq!(found(&all.collect::<Vec<_>>()), [""; 0]);
    }

    #[test]
    fn device_source_alone_has_no_twins() {
        let header = format!("{HEADERS}flow/team.h");
        assert_eq!(tests::found(check, &[(&header, "")]), [""; 0]);
    }
}
