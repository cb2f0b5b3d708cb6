//! Tests of the texts of all errors: each text must contain the value, what was expected, and what
//! to do.

use std::io::ErrorKind::PermissionDenied;
use std::time::Duration;

use iris_sync::{Fault, FaultKind, Field};

use iris_testkit::error_texts::check_texts;
use iris_testkit::variants;

use super::*;
use crate::abi::{FAULT_WORDS, abort};
use crate::bootstrap::launcher_env::Launch;
use crate::control::{Control, waits_for_rank_1};
use crate::encoding::Reader;
use crate::issue_board::{AwaitedNode, Pulled};
use crate::world::hosts::Hosts;
use crate::{
    Group, HeapOptions, Member, Network, Next, Policy, Settings, Stream, SymmetricHeap, UniqueId,
    World,
};

/// User guide, whose troubleshooting section must have an entry for the text of each error.
const GUIDE: &str = include_str!("../../../iris-ops/GUIDE.md");

variants! { Error:
    Env, Invalid, Disagreement, Mismatch, Order, Absent, PeerLost, RankLost, PeerFailed, PeerAborted, HubLost, LauncherLost, Revoked, Evicted, Rendezvous, OutOfHeap, OutOfMemory, Closed,
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

/// Error of rank 0 of two ranks that run `f`.
fn of_ranks(f: impl Fn(World) -> Result<()> + Sync) -> Error {
    World::run_threads_each(2, &Settings::default(), f).unwrap().remove(0).unwrap_err()
}

/// Error of rank 0 of two nodes with a rank each that run `f`.
fn of_nodes(f: impl Fn(World) -> Result<()> + Sync) -> Error {
    World::run_nodes_each((2, 1), &Settings::default(), f).unwrap().remove(0).unwrap_err()
}

/// Waits for all ranks, unless this is rank 1, which calls `end` instead.
fn unless_rank_1(world: &World, end: impl FnOnce(&World)) -> Result<()> {
    if world.rank() != 1 {
        return world.barrier();
    }
    end(world);
    Ok(())
}

fn open(world: &World) -> Result<Arc<SymmetricHeap>> {
    SymmetricHeap::open(world, HeapOptions::new().data_bytes(1 << 16).threads(2))
}

/// Error of `f` on a heap of one rank.
fn of_heap(f: impl FnOnce(&World, &Arc<SymmetricHeap>) -> Result<()>) -> Error {
    let world = World::threads(1).unwrap().remove(0);
    f(&world, &open(&world).unwrap()).unwrap_err()
}

/// Error of work on a heap of one rank, which `f` enqueues.
fn of_work(f: impl FnOnce(&Stream, &Arc<SymmetricHeap>) -> Result<()>) -> Error {
    of_heap(|_, heap| {
        let stream = heap.stream()?;
        f(&stream, heap)?;
        stream.sync()
    })
}

/// Error for the variables `RANK` and, if there is one, `WORLD_SIZE`.
fn of_variables(rank: &str, size: Option<&str>) -> Error {
    let get = |name: &str| {
        Ok(match name {
            "RANK" => Some(rank.into()),
            "WORLD_SIZE" => size.map(String::from),
            _ => None,
        })
    };
    let Err(error) = Launch::detect(&get) else { panic!("RANK={rank} is accepted") };
    error
}

/// Words of a fault in call 5 about rank 1, for which the kernel has seen 100 and wanted 107.
fn record(kind: FaultKind, field: i32) -> [i32; FAULT_WORDS] {
    let words = [kind as i32, 0, 5, -1, 1, 100, 107, field];
    std::array::from_fn(|at| words.get(at).copied().unwrap_or(0))
}

/// Error of a fault that a kernel has left; if `standing`, ranks 0 and 1 stand in different calls.
fn of_fault(kind: FaultKind, field: i32, standing: bool) -> Error {
    let control = match standing {
        true => waits_for_rank_1().into_iter().next().unwrap(),
        false => Control::default(),
    };
    control.record_fault(&record(kind, field));
    control.fault_error().unwrap()
}

/// Control blocks of the two ranks of node 1 of the nodes `a` and `b`.
fn on_node_1() -> [Control; 2] {
    let ranks = waits_for_rank_1();
    ranks.iter().for_each(|control| control.set_nodes(vec!["a".into(), "b".into()], 1));
    ranks
}

/// Errors of calls that fail, each with the three parts that its text must contain: value,
/// expectation and action. A few errors are written out, because no call here can cause them: those
/// of a process that ends, of a driver, and of files of another user.
fn examples() -> Vec<(Error, [&'static str; 3])> {
    let order = "all ranks must issue all calls of a heap, in the same order";
    vec![
        (
            of_variables("soon", Some("2")),
            ["RANK=soon", "expected a number", "correct it, or unset it"],
        ),
        (
            of_variables("1", None),
            ["WORLD_SIZE=(not set)", "expected the number of ranks", "; set it"],
        ),
        (World::threads(0).err().unwrap(), ["size of the world is 0", "expected", "1 to 4096"]),
        (
            of_ranks(|w| w.agree("open", &[("data_bytes", (4096 << w.rank()).to_string())])),
            ["data_bytes is 4096 on rank 0; 8192 on rank 1", "the same", "give all ranks"],
        ),
        (
            of_ranks(|w| if w.rank() == 0 { w.barrier() } else { w.allgather(&[]).map(drop) }),
            ["(exchange 1) on rank 0; allgather at", "must make the same", "in one order"],
        ),
        (
            of_ranks(|w| {
                let heap = open(&w)?;
                for name in ["up", "down"] {
                    heap.control().name_op(name);
                }
                heap.issue()?.announce(&heap.stream()?, w.rank() as u32, Pulled::default())?;
                w.barrier()?;
                heap.control().disorder().map_or(Ok(()), Err)
            }),
            [
                "call 1 of the heap is up (operator 0) on rank 0; down (operator 1) on rank 1",
                "in the same order",
                "all ranks must issue",
            ],
        ),
        (
            World::threads_with(2, &Settings::default().deadline(1e-6)).unwrap()[0]
                .barrier()
                .unwrap_err(),
            ["s for rank 1", "should have come", "see whether it runs"],
        ),
        (
            of_ranks(|w| unless_rank_1(&w, World::abort)),
            ["rank 1 is lost", "before all ranks had closed", "see what rank 1 printed"],
        ),
        (
            of_nodes(|w| unless_rank_1(&w, World::abort)),
            [
                "rank 1 on host node 1 of this process is lost",
                "network to it is cut",
                "see what rank 1 printed",
            ],
        ),
        (
            of_ranks(|w| {
                let refused = Error::invalid("memory", "none", "some");
                w.all_ok("open", if w.rank() == 0 { Ok(()) } else { Err(refused) })
            }),
            ["rank 1 failed in open", "which all ranks must do", "mend that on rank 1"],
        ),
        (
            of_nodes(|w| unless_rank_1(&w, |w| w.abort_with("vocab.txt has 7 lines, expected 8"))),
            [
                "rank 1 on host node 1 of this process gave up: vocab.txt has 7 lines",
                "expected 8",
                "mend that, then start all ranks anew",
            ],
        ),
        (Error::HubLost { rank: 2 }, ["rank 2", "must outlive it", "start all ranks anew"]),
        (
            {
                let world = World::from_unique_id(&UniqueId::new().unwrap(), 0, 1).unwrap();
                let member = Member::join(&world, Policy::new()).unwrap();
                let Next::Epoch(world, _) = member.next().unwrap() else { panic!("no epoch") };
                let options = HeapOptions::new().data_bytes(1 << 50);
                SymmetricHeap::open(&world, options).unwrap_err()
            },
            ["on each of 1 ranks, in epoch 1", "expected at most", "release or drop heaps"],
        ),
        (Error::Evicted { epoch: 3 }, ["to epoch 3", "expected it to run", "see what stopped it"]),
        (Error::Revoked, ["was revoked", "expected a world of the current epoch", "Member::next"]),
        (
            Error::LauncherLost { rank: 1, launcher: "mpirun (process 42)".into() },
            [
                "rank 1 is lost to its job",
                "expected to end after its ranks",
                "start all ranks anew",
            ],
        ),
        (
            {
                let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
                let address = taken.local_addr().unwrap().to_string();
                let network = Network::new(address, &UniqueId::new().unwrap());
                World::over_network_with(&network, 0, 2, Settings::default()).err().unwrap()
            },
            ["Address already in use", "a port that is free there", "MASTER_ADDR names the host"],
        ),
        (
            of_heap(|_, heap| heap.alloc::<f32>(1 << 20).map(drop)),
            [
                "asked 4194304 bytes, free 65536 of 65536, largest block 65536",
                "needs 4194304",
                "open the heap with more (pass all plans and a larger room",
            ],
        ),
        (
            of_heap(|_, heap| heap.close().and_then(|()| heap.close())),
            ["the heap is closed", "expected an open one", "open another"],
        ),
        (
            of_heap(|world, _| world.close()),
            ["rank 0 still has 1 heaps", "expected none", "close them on all ranks"],
        ),
        (
            of_heap(|world, heap| open(world)?.free(heap.alloc::<f32>(8)?)),
            ["heap 0x", "expected one of heap 0x", "use it with the heap that allocated it"],
        ),
        (
            of_heap(|_, heap| heap.free(heap.alloc::<f32>(8)?.slice(2..4)?)),
            [
                "8..16",
                "the block 0..32, which is expected",
                "give back the slice that the allocation returned",
            ],
        ),
        (
            of_heap(|_, heap| {
                let block = heap.alloc::<f32>(2)?;
                heap.free(block)?;
                heap.free(block)
            }),
            ["data bytes 0..8", "expected one that has not been freed", "allocate again"],
        ),
        (
            of_heap(|_, heap| heap.alloc::<f32>(8)?.slice(3..9).map(drop)),
            ["3..9", "expected an end of at most 8", "use a smaller range"],
        ),
        (
            of_work(|stream, _| stream.launch_cpu("kernel", 3, Arc::new(|_| Ok(())))),
            ["3 workgroups", "expected at most 2", "HeapOptions::threads"],
        ),
        (
            of_work(|stream, heap| {
                let heap = heap.clone();
                stream.call_cpu("work", move || heap.close())
            }),
            ["closing a heap", "expected on a thread of the program's", "move it there"],
        ),
        (
            of_work(|stream, _| {
                let kernel = |group: Group| match group.index {
                    0 => Ok(()),
                    _ => panic!("index 3"),
                };
                stream.launch_cpu("kernel", 2, Arc::new(kernel))
            }),
            ["kernel, workgroup 1: panicked: index 3", "expected it to return", "mend the panic"],
        ),
        (
            of_fault(FaultKind::NotEntered, -1, true),
            ["sum: rank 1 has not entered call 107", order, "see what that rank printed"],
        ),
        (
            of_fault(FaultKind::NoProgress, -1, false),
            ["saw 100, wanted 107", "made no progress", "open the heap and its world anew"],
        ),
        (
            of_fault(FaultKind::Mismatch, Field::M as i32, false),
            ["rank 1 entered with M 100", "this rank has 107", "give all ranks the same call"],
        ),
        (
            of_fault(FaultKind::Mismatch, Field::Op as i32, true),
            [
                "rank 0 is in sum (operator 0), call 2 of the heap",
                order,
                "give all ranks the same call",
            ],
        ),
        (
            of_fault(FaultKind::PeerGaveUp, -1, false),
            ["rank 1 gave up", "the error of rank 1 says why", "open the heap and its world anew"],
        ),
        (
            of_fault(FaultKind::PeerLost, -1, false),
            [
                "rank 1 is lost",
                "call 5 of operator 0 cannot end",
                "open the heap and its world anew",
            ],
        ),
        (
            of_fault(FaultKind::HostAbort, -1, false),
            ["code 100", "told it to leave call 5", "open the heap and its world anew"],
        ),
        (
            of_ranks(|w| {
                let heap = open(&w)?;
                if w.rank() == 1 {
                    heap.poison(abort::USER)?;
                }
                w.barrier()?;
                if w.rank() == 0 { heap.check() } else { Ok(()) }
            }),
            ["rank 1 gave up", "expected to finish", "close the heap and its world"],
        ),
        (
            {
                let [own, late] = on_node_1();
                late.fail_elsewhere(Error::other(std::io::Error::other("no ink")));
                own.told_by_peer(2)
            },
            ["rank 3 on host b gave up", ": no ink;", "close the heap and its world"],
        ),
        (
            of_ranks(|w| {
                let heap = open(&w)?;
                if w.rank() == 1 {
                    heap.control().set_host_abort(abort::USER);
                    return heap.close();
                }
                heap.control().record_fault(&record(FaultKind::NotEntered, -1));
                w.barrier()
            }),
            ["rank 1 gave up", "has not entered call 107", "open the heap and its world anew"],
        ),
        (
            of_heap(|_, heap| heap.poison(abort::USER).and_then(|()| heap.check())),
            ["(code 3)", "before it could end", "close the heap and its world"],
        ),
        (
            {
                let node = |name: &str| (name.to_string(), name.to_string());
                Hosts::of(&["a", "a", "b"].map(node)).check_even("a heap").unwrap_err()
            },
            ["rank 0 and 1 on host a; rank 2", "is not supported", "start as many ranks on each"],
        ),
        (
            Reader::new("open", &[1, 2, 3]).u64().unwrap_err(),
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
            {
                let [own, late] = on_node_1();
                late.publish_step(Some(AwaitedNode::Node(0)));
                own.record_fault(&record(FaultKind::NoProgress, -1));
                own.fault_error().unwrap()
            },
            [
                "rank 3 on host b waits for node 0 (rank 1 on host a)",
                "expected every node",
                "see what the ranks",
            ],
        ),
        (
            of_work(|stream, _| {
                stream.call_cpu("work", || Err(Error::other(Error::invalid("rank", 4, "0 to 3"))))
            }),
            ["rank is 4", "expected", "0 to 3"],
        ),
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
