//! Tests of worlds over several nodes: threads that simulate nodes, and ranks that meet over
//! loopback.

use iris_heap::{Error, HeapOptions, Result, SymmetricHeap, World};
use iris_testkit::error_texts::fails;
use iris_testkit::worlds::over_loopback;

/// Checks sizes and names of a world of two nodes with two ranks each, and the memory of each node.
fn two_by_two(world: World) -> Result<()> {
    let rank = world.rank();
    assert_eq!((world.nodes(), world.node()), (2, rank / 2));
    assert_eq!((world.local_rank(), world.local_size()), (rank % 2, 2));
    let local = world.local()?;
    assert_eq!((local.size(), local.rank(), local.nodes()), (2, rank % 2, 1));
    let across = world.across()?;
    assert_eq!((across.size(), across.rank(), across.nodes()), (2, rank / 2, 2));
    let all = world.allgather(&[rank as u8])?.concat();
    assert_eq!(all, [0, 1, 2, 3]);
    assert_eq!(local.allgather(&[rank as u8])?.concat(), [rank as u8 & 2, rank as u8 | 1]);
    assert_eq!(across.allgather(&[rank as u8])?.concat(), [rank as u8 & 1, rank as u8 & 1 | 2]);
    across.close()?;
    local.close()?;
    // Each node gets a heap of its own.
    let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(1 << 20))?;
    assert_eq!((heap.rank(), heap.size()), (rank, 4));
    assert_eq!((heap.local_rank(), heap.local_size()), (rank % 2, 2));
    assert_eq!(heap.node_ranks(), rank & 2..(rank & 2) + 2);
    assert_eq!((heap.whole_world().size(), heap.across().map(World::size)), (4, Some(2)));
    let x = heap.full::<f32>(8, rank as f32)?;
    heap.local_world().barrier()?;
    let peer = heap.read_from(x.slice(..1)?, rank ^ 1)?[0];
    assert_eq!(peer, (rank ^ 1) as f32);
    heap.local_world().barrier()?;
    assert!(matches!(world.close(), Err(Error::StillOpen { .. })), "the heap is open");
    heap.close()?;
    world.close()
}

#[test]
fn threads_play_several_nodes() {
    World::run_nodes(2, 2, two_by_two).unwrap();
    World::run_nodes(3, 1, |world| {
        assert_eq!((world.nodes(), world.local_size()), (3, 1));
        world.barrier()
    })
    .unwrap();
}

/// Test that functions of a heap over two nodes take numbers of the whole world, and refuse ranks
/// whose memory is on the other node.
#[test]
fn a_heap_over_nodes_counts_ranks_of_the_world() {
    World::run_nodes(2, 2, |world| {
        let (rank, size) = (world.rank(), world.size());
        let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(1 << 20))?;
        assert_eq!((heap.rank(), heap.size()), (rank, size));
        let x = heap.full::<f32>(2, rank as f32)?;
        let y = heap.full::<f32>(2, -1.0)?;
        let stream = heap.stream()?;
        for other in 0..=size {
            let read = heap.read_from(x, other);
            let address = heap.resolve(x, other);
            let copied = heap.copy_on(&stream, (y, rank), (x, other));
            if other / 2 == rank / 2 {
                assert_eq!(read?, [other as f32; 2]);
                address?;
                copied?;
                stream.sync()?;
                assert_eq!(heap.read(y)?, [other as f32; 2]);
                continue;
            }
            let back = heap.copy_on(&stream, (y, other), (x, rank));
            let own = if rank < 2 { "expected 0 to 1" } else { "expected 2 to 3" };
            let instead = if other < size { "all_gather" } else { "" };
            for (call, error) in [
                ("read_from", read.unwrap_err()),
                ("resolve", address.unwrap_err()),
                ("copy_on", copied.unwrap_err()),
                ("copy_on", back.unwrap_err()),
            ] {
                let text = error.to_string();
                let named = format!("rank of {call} is {other}");
                for part in [&named, own, instead] {
                    assert!(text.contains(part), "no {part:?} in {text}");
                }
            }
        }
        world.barrier()?;
        heap.close()?;
        world.close()
    })
    .unwrap();
}

/// Test that errors of a node's collective steps name ranks by their numbers in the whole world.
#[test]
fn errors_of_a_node_name_ranks_of_the_world() {
    World::run_nodes(2, 2, |world| {
        let rank = world.rank();
        let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(1 << 20))?;
        let text = heap.alloc::<f32>(rank + 1).unwrap_err().to_string();
        let first = rank & 2;
        for rank in [first, first + 1] {
            assert!(text.contains(&format!(" on rank {rank}")), "{text}");
        }
        let error = match rank % 2 {
            0 => heap.alloc::<f32>(1).map(drop).unwrap_err(),
            _ => heap.local_world().barrier().unwrap_err(),
        };
        let Error::Mismatch { calls, .. } = &error else { panic!("{error}") };
        assert_eq!([calls[0].0, calls[1].0], [first, first + 1], "{error}");
        let full = heap.alloc::<u8>(2 << 20).unwrap_err();
        assert!(matches!(full, Error::OutOfHeap { rank, .. } if rank == first), "{full}");
        heap.close()?;
        world.close()
    })
    .unwrap();
}

#[test]
fn ranks_on_two_nodes_meet_over_tcp() {
    for result in over_loopback(&["a", "a", "b", "b"], two_by_two) {
        result.unwrap();
    }
}

#[test]
fn round_robin_and_uneven_nodes_are_refused_by_name() {
    for result in over_loopback(&["a", "b", "a", "b"], |world| world.barrier()) {
        fails(result, &["round-robin", "rank 0 and 2 on host"]);
    }
    for result in over_loopback(&["a", "a", "b"], |world| {
        world.barrier()?;
        let error = SymmetricHeap::open(&world, HeapOptions::new()).unwrap_err();
        world.close()?;
        Err::<(), _>(error)
    }) {
        fails(result, &["unequal numbers of ranks (rank 0 and 1 on host"]);
    }
}

#[test]
fn a_lost_rank_is_named_with_its_host_and_ends_waits_of_other_nodes() {
    let results = over_loopback(&["a", "a", "b", "b"], |world| {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(1 << 20))?;
        if world.rank() == 3 {
            // The rank leaves without closing anything, like a process that dies.
            return Ok(());
        }
        let error = world.barrier().unwrap_err();
        // Kernels that wait on other nodes must be aborted, too.
        while heap.control().host_abort() == 0 {
            std::thread::yield_now();
        }
        assert!(heap.control().check().is_err());
        Err(error)
    });
    for (rank, result) in results.into_iter().enumerate() {
        if rank == 3 {
            result.unwrap();
            continue;
        }
        let error = result.unwrap_err();
        assert!(
            matches!(&error, Error::RankLost { rank: 3, host } if host.contains("node b")),
            "{error}"
        );
    }
}

#[test]
fn a_heap_has_at_most_64_ranks_and_a_world_may_have_more() {
    let errors = World::run_threads(65, |world| {
        world.barrier()?;
        let error = SymmetricHeap::open(&world, HeapOptions::new()).unwrap_err();
        world.close()?;
        Ok::<_, Error>(error.to_string())
    });
    for text in errors.unwrap() {
        assert!(text.contains("65") && text.contains("64"), "{text}");
    }
}
