//! Rule: unsafe code stands only in the files of a table, and in files that give a reason by
//! `allow(unsafe_code, reason = ...)`, which the compiler demands if the crate denies unsafe code.

use super::Finding;
use super::tree::Tree;

/// Files, or folders (ending in `/`), that may contain unsafe code without the attribute `SAYS`,
/// each with the purpose of that code.
const ALLOWED: &[(&str, &str)] = &[
    ("iris-heap/src/segment.rs", "mappings of own and peers' memory"),
    ("iris-heap/src/atomic_copy.rs", "atomic access to memory that the caller vouches for"),
    ("iris-heap/src/backend/", "the calls of the devices' drivers"),
    ("iris-heap/src/module.rs", "kernels get addresses"),
    ("iris-kernels/src/cpu/", "kernels over memory that other ranks write"),
    ("iris-heap/src/heap/import.rs", "the caller's memory, whose life the caller vouches for"),
    ("iris-heap/tests/", "reads through the addresses that the heap gave"),
    ("iris-kernels/tests/gemm.rs", "products over memory of the heap"),
    ("iris-kernels/src/execute.rs", "calls get addresses"),
    ("iris-kernels/src/execute/call.rs", "kernels and copy engines get addresses"),
    ("iris-kernels/src/execute/gemm.rs", "GEMMs get addresses"),
    ("iris-kernels/src/execute/kernels.rs", "kernels get addresses"),
    ("iris-kernels/src/user_kernel.rs", "kernels of users get addresses"),
    ("iris-kernels/tests/user_kernels.rs", "the launch of a kernel of the user's"),
    ("iris-kernels/examples/ring.rs", "the launch of a kernel of the user's"),
    ("iris-ops/examples/02_two_layers.rs", "matrices in memory of the program"),
    ("iris-ops/examples/wait_on_tile.rs", "the launch of a kernel of the user's"),
    ("iris-ops/examples/cudarc.rs", "what cudarc leaves to a program that captures"),
    ("iris-ops/src/operator.rs", "the one place where ops hand addresses to kernels"),
    ("iris-ops/tests/external.rs", "memory of the test"),
    ("iris-ops/tests/cuda/", "kernels and memory of the user's"),
    (
        "iris-ops/src/operand.rs",
        "memory that is lent to calls, and kept by cudarc's guards or a scope",
    ),
    ("iris-ops/src/comm/memory.rs", "memory that is lent to calls of a communicator"),
    ("iris-ops/src/comm/calls.rs", "copies of memory that is lent to calls of a communicator"),
    (
        "iris-kernels/tests/host/messages.rs",
        "the device source as host code, through raw addresses",
    ),
    ("iris-kernels/tests/device_host.rs", "the device source as host code, through raw addresses"),
    ("iris-kernels/tests/vendor.rs", "products over memory of the heap"),
    ("iris-kernels/tests/host/numbers.rs", "products over memory of the test"),
    ("iris-kernels/tests/host/described.rs", "the same, and counts of a library of our own"),
    ("iris-kernels/src/rtc/", "the run-time compilers, loaded by path"),
];

/// Attribute by which a file outside of [`ALLOWED`] gives the reason for its unsafe code.
const SAYS: &str = "allow(unsafe_code, reason = ";

/// Crates without unsafe code: their roots forbid it, so the compiler checks them.
const FORBIDDING: &[&str] = &["iris-sync/src/lib.rs", "xtask/src/main.rs"];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.files().iter().filter(|file| file.extension() == "rs") {
        if !allowed(&file.path) && !file.text.contains(SAYS) {
            let found = file.identifiers().into_iter().filter(|(_, word)| word == "unsafe");
            findings.extend(found.map(|(line, _)| {
                Finding::new(&file.path, line, "unsafe code in a file that does not say why")
            }));
        }
        let forbids = |file: &super::tree::File| {
            file.text.lines().any(|line| line.trim() == "#![forbid(unsafe_code)]")
        };
        if FORBIDDING.contains(&file.path.as_str()) && !forbids(file) {
            findings.push(Finding::new(&file.path, 0, "#![forbid(unsafe_code)] is missing"));
        }
    }
    findings
}

fn allowed(path: &str) -> bool {
    ALLOWED.iter().any(|(place, _)| match place.strip_suffix('/') {
        Some(_) => path.starts_with(place),
        None => path == *place,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::tests::found;

    #[test]
    fn unsafe_is_found_outside_the_table() {
        let text = "// unsafe\nfn f() { \"unsafe\"; }\nunsafe { g() }";
        let files = [
            ("iris-heap/src/heap.rs", text),
            ("iris-heap/src/segment.rs", text),
            ("iris-heap/src/segment.rs.rs", text),
            ("iris-kernels/src/cpu/gemm.rs", text),
        ];
        let says = format!("#![allow(unsafe_code, reason = \"why\")]\n{text}");
        assert_eq!(found(check, &[("iris-ops/src/matrix.rs", &says)]), [""; 0]);
        let expected = ["iris-heap/src/heap.rs:3", "iris-heap/src/segment.rs.rs:3"];
        assert_eq!(found(check, &files), expected);
    }

    #[test]
    fn the_compiler_must_be_told() {
        assert_eq!(
            found(check, &[("iris-sync/src/lib.rs", "//! Sync.")]),
            ["iris-sync/src/lib.rs:0"]
        );
        assert!(found(check, &[("iris-sync/src/lib.rs", "#![forbid(unsafe_code)]")]).is_empty());
    }
}
