//! Tests of the texts of all errors: each text must contain the value, what was expected, and what
//! to do.

use std::io::ErrorKind::PermissionDenied;
use std::time::Duration;

use iris_sync::{Fault, FaultKind, Field};

use iris_testkit::error_texts::check_texts;
use iris_testkit::variants;

use super::*;

/// User guide, whose troubleshooting section must have an entry for the text of each error.
const GUIDE: &str = include_str!("../../../iris-ops/GUIDE.md");

variants! { Error:
    Env, Invalid, Disagreement, Mismatch, Order, Absent, PeerLost, RankLost, PeerFailed, PeerAborted, HubLost, LauncherLost, Rendezvous, OutOfHeap, Closed,
    StillOpen, ForeignSlice, PartOfBlock, NotAllocated, OutOfBounds, TooManyGroups, WaitFromWork, Panicked, Fault, NodeSilent, GaveUp,
    AfterFault, Aborted, Unsupported, Wire, System, Library, Device, Other,
}

fn fault(kind: FaultKind, field: i32) -> Fault {
    Fault { kind, op: 1, call: 5, tile: -1, rank: 2, seen: 100, wanted: 107, field }
}

fn faulty(kind: FaultKind, field: i32, standing: &[&str]) -> Error {
    let standing = standing.iter().map(ToString::to_string).enumerate().collect();
    Error::Fault {
        op: "layer3.down (all_reduce of 64 f32)".into(),
        fault: fault(kind, field),
        host: None,
        standing,
    }
}

/// Errors, each with the three parts that its text must contain: value, expectation and action.
fn examples() -> Vec<(Error, [&'static str; 3])> {
    let texts =
        |texts: &[&str]| texts.iter().map(ToString::to_string).enumerate().collect::<Vec<_>>();
    let order = "all ranks must issue all calls of a heap, in the same order";
    let segment = || "data".to_string();
    vec![
        (
            Error::Env {
                variable: "IRIS_DEADLINE".into(),
                value: "soon".into(),
                expected: "a factor above 0".into(),
            },
            ["IRIS_DEADLINE=soon", "expected a factor above 0", "correct it, or unset it"],
        ),
        (
            Error::Env {
                variable: "WORLD_SIZE".into(),
                value: "(not set)".into(),
                expected: "a number, as RANK is set".into(),
            },
            ["WORLD_SIZE=(not set)", "expected a number", "; set it"],
        ),
        (Error::invalid("rank", 4, "0 to 3"), ["rank is 4", "expected", "0 to 3"]),
        (
            Error::Disagreement {
                what: "open at src/main.rs:7:9".into(),
                item: "data_bytes".into(),
                ranks: vec![1],
                values: texts(&["4096", "8192"]),
            },
            ["data_bytes is 4096 on rank 0; 8192 on rank 1", "the same", "give all ranks"],
        ),
        (
            Error::Mismatch {
                ranks: vec![1],
                calls: texts(&["alloc at a.rs:1", "close at a.rs:2"]),
            },
            [
                "alloc at a.rs:1 on rank 0; close at a.rs:2 on rank 1",
                "must make the same",
                "in one order",
            ],
        ),
        (
            Error::Order { call: 3, ranks: vec![1], operators: texts(&["up", "down"]) },
            [
                "call 3 of the heap is up on rank 0; down on rank 1",
                "in the same order",
                "all ranks must issue",
            ],
        ),
        (
            Error::Absent {
                ranks: vec![1, 2],
                what: "rank 0 in close at src/main.rs:9:10".into(),
                waited: Duration::from_secs(720),
            },
            ["waited 720.0s for rank 1 and 2", "should have come", "see whether it runs"],
        ),
        (
            Error::PeerLost { rank: 3 },
            ["rank 3 is lost", "before all ranks had closed", "see what rank 3 printed"],
        ),
        (
            Error::RankLost { rank: 3, host: "node-b".into() },
            ["rank 3 on host node-b is lost", "network to it is cut", "see what rank 3 printed"],
        ),
        (
            Error::PeerFailed { rank: 2, what: "open".into(), message: "no memory".into() },
            ["rank 2 failed in open", "which all ranks must do", "mend that on rank 2"],
        ),
        (
            Error::PeerAborted {
                rank: 3,
                host: Some("b".into()),
                reason: "vocab.txt has 7 lines, expected 8".into(),
            },
            [
                "rank 3 on host b gave up: vocab.txt has 7 lines",
                "expected 8",
                "mend that, then start all ranks anew",
            ],
        ),
        (Error::HubLost { rank: 2 }, ["rank 2", "must outlive it", "start all ranks anew"]),
        (
            Error::LauncherLost { rank: 1, launcher: "mpirun (process 42)".into() },
            [
                "rank 1 is lost to its job",
                "expected to end after its ranks",
                "start all ranks anew",
            ],
        ),
        (
            Error::Rendezvous {
                place: "/tmp/x".into(),
                problem:
                    "rank 1 is there already, expected one process of each rank: start each once"
                        .into(),
            },
            ["/tmp/x", "expected", "start each once"],
        ),
        (
            Error::OutOfHeap {
                what: "alloc".into(),
                name: "f32 x 3000".into(),
                segment: segment(),
                rank: 1,
                asked: 12288,
                free: 8192,
                size: 65536,
                largest: 4096,
                total: 12288,
            },
            [
                "asked 12288 bytes, free 8192 of 65536, largest block 4096",
                "needs 12288",
                "open the heap with more (pass all plans and a larger room",
            ],
        ),
        (
            Error::Closed { what: "the heap" },
            ["the heap is closed", "expected an open one", "open another"],
        ),
        (
            Error::StillOpen { rank: 1, heaps: 2, worlds: 0 },
            ["rank 1 still has 2 heaps", "expected none", "close them on all ranks"],
        ),
        (
            Error::ForeignSlice { slice: 0xa, heap: 0xb },
            ["heap 0xa", "expected one of heap 0xb", "use it with the heap that allocated it"],
        ),
        (
            Error::PartOfBlock { segment: segment(), offset: 8, end: 16, start: 0, whole_end: 32 },
            [
                "8..16",
                "the block 0..32, which is expected",
                "give back the slice that the allocation returned",
            ],
        ),
        (
            Error::NotAllocated { segment: segment(), offset: 8, end: 16 },
            ["data bytes 8..16", "expected one that has not been freed", "allocate again"],
        ),
        (
            Error::OutOfBounds { what: "read".into(), start: 3, end: 9, len: 8 },
            ["3..9", "expected an end of at most 8", "use a smaller range"],
        ),
        (
            Error::TooManyGroups { name: "kernel".into(), groups: 9, threads: 8 },
            ["9 workgroups", "expected at most 8", "HeapOptions::threads"],
        ),
        (
            Error::WaitFromWork { what: "closing a heap".into() },
            ["closing a heap", "expected on a thread of the program's", "move it there"],
        ),
        (
            Error::Panicked { name: "kernel".into(), group: Some(4), message: "index 3".into() },
            ["kernel, workgroup 4: panicked: index 3", "expected it to return", "mend the panic"],
        ),
        (
            faulty(
                FaultKind::NotEntered,
                -1,
                &["in up, call 3 of the heap", "in down, call 2 of the heap"],
            ),
            [
                "layer3.down (all_reduce of 64 f32): rank 2 has not entered call 107",
                order,
                "see what that rank printed",
            ],
        ),
        (
            faulty(FaultKind::NoProgress, -1, &[]),
            ["saw 100, wanted 107", "made no progress", "open the heap and its world anew"],
        ),
        (
            faulty(FaultKind::Mismatch, Field::M as i32, &[]),
            ["rank 2 entered with M 100", "this rank has 107", "give all ranks the same call"],
        ),
        (
            faulty(FaultKind::Mismatch, Field::Op as i32, &["in up, call 3 of the heap"]),
            ["rank 0 is in up, call 3 of the heap", order, "give all ranks the same call"],
        ),
        (
            faulty(FaultKind::PeerGaveUp, -1, &[]),
            ["rank 2 gave up", "the error of rank 2 says why", "open the heap and its world anew"],
        ),
        (
            faulty(FaultKind::PeerLost, -1, &[]),
            [
                "rank 2 is lost",
                "call 5 of operator 1 cannot end",
                "open the heap and its world anew",
            ],
        ),
        (
            faulty(FaultKind::HostAbort, -1, &[]),
            ["code 100", "told it to leave call 5", "open the heap and its world anew"],
        ),
        (
            Error::GaveUp { rank: 3, host: None, reason: None },
            ["rank 3 gave up", "expected to finish", "close the heap and its world"],
        ),
        (
            Error::GaveUp { rank: 3, host: Some("b".into()), reason: Some("no ink".into()) },
            ["rank 3 on host b gave up", ": no ink;", "close the heap and its world"],
        ),
        (
            Error::AfterFault {
                fault: Box::new(faulty(FaultKind::NotEntered, -1, &[])),
                then: Box::new(Error::GaveUp { rank: 3, host: Some("b".into()), reason: None }),
            },
            [
                "rank 3 on host b gave up",
                "has not entered call 107",
                "open the heap and its world anew",
            ],
        ),
        (
            Error::Aborted { code: 17, reason: "the caller asked for it".into() },
            ["code 17", "before it could end", "close the heap and its world"],
        ),
        (
            Error::Unsupported {
                what: "a capture".into(),
                why: "the CPU has no graphs: run the calls".into(),
            },
            ["a capture", "is not supported", "run the calls"],
        ),
        (
            Error::Wire { what: "open".into(), problem: "3 bytes where a number should be".into() },
            ["3 bytes", "expected one of this version", "run the same build on all ranks"],
        ),
        (
            Error::system("opening /dev/shm/x", std::io::Error::from(PermissionDenied)),
            ["opening /dev/shm/x", "permission denied", "see who owns it"],
        ),
        (
            Error::Library {
                library: "NVRTC".into(),
                looked: "libnvrtc.so.12".into(),
                problem: "no such file".into(),
            },
            [
                "no such file",
                "expected it in libnvrtc.so.12",
                "install it, or name it by its variable",
            ],
        ),
        (
            Error::Device {
                api: "cuMemAlloc of 4096 bytes".into(),
                code: 2,
                name: "OUT_OF_MEMORY".into(),
            },
            ["OUT_OF_MEMORY (code 2)", "expected success", "open a smaller heap"],
        ),
        (
            Error::Device { api: "cuInit".into(), code: 999, name: "UNKNOWN".into() },
            ["UNKNOWN (code 999)", "expected success", "`iris doctor` says"],
        ),
        (
            Error::NodeSilent {
                op: "layer3.down (all_reduce of 64 f32)".into(),
                fault: fault(FaultKind::NotEntered, 0),
                host: "a".into(),
                node: "node 1 (rank 5 on host b)".into(),
            },
            [
                "rank 2 on host a waits for node 1 (rank 5 on host b)",
                "expected every node",
                "see what the ranks",
            ],
        ),
        (Error::other(Error::invalid("rank", 4, "0 to 3")), ["rank is 4", "expected", "0 to 3"]),
    ]
}

#[test]
fn every_error_shows_its_value_what_was_expected_and_what_to_do() {
    check_texts(GUIDE, &examples(), NAMES, name);
}

#[test]
fn a_cause_is_the_same_kind_of_error_for_a_kernel_and_for_the_host() {
    let absent = || Error::Absent { ranks: vec![2], what: "free".into(), waited: Duration::ZERO };
    let mismatch = || Error::Mismatch { ranks: vec![2], calls: Vec::new() };
    for (fault, host) in [
        (FaultKind::PeerLost, Error::PeerLost { rank: 2 }),
        (FaultKind::PeerGaveUp, Error::GaveUp { rank: 2, host: None, reason: None }),
        (FaultKind::NotEntered, absent()),
        (FaultKind::NoProgress, absent()),
        (FaultKind::Mismatch, mismatch()),
        (FaultKind::StepDiffers, mismatch()),
        (FaultKind::HostAbort, Error::Aborted { code: 1, reason: "a test".into() }),
    ] {
        assert_eq!(faulty(fault, -1, &[]).kind(), host.kind(), "{fault:?}");
    }
}

#[test]
fn a_fault_tells_each_place_once() {
    let places = ["in up, call 3 of the heap", "in down, call 2 of the heap"];
    let standing: Vec<_> = (0..64).map(|rank| places[usize::from(rank == 2)]).collect();
    let text = faulty(FaultKind::NotEntered, -1, &standing).to_string();
    for place in places {
        assert_eq!(text.matches(place).count(), 1, "{text}");
    }
    assert!(text.contains("63 are in up") && text.contains("rank 2 is in down"), "{text}");
}

#[test]
fn a_long_value_is_shown_by_its_start_and_its_length() {
    let value = "x".repeat(100_000);
    let values = vec![(0, "1".into()), (1, value.clone())];
    let expected = "a number".into();
    for error in [
        Error::Env { variable: "RANK".into(), value, expected },
        Error::Disagreement { what: "open".into(), item: "A".into(), ranks: vec![1], values },
    ] {
        let text = error.to_string();
        assert!(text.len() < 200 && text.contains("xxx.. (100000 bytes)"), "{text}");
    }
}
