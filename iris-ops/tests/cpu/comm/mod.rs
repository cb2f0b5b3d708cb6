//! Tests of communicators on the CPU: every collective, with any count and type. Communicators are
//! opened by threads of a world and by an id.

mod ends;
mod nodes;
mod options;

use std::fmt;
use std::sync::{Arc, Barrier, Condvar, Mutex};

use anyhow::Result;
use bytemuck::Pod;
use half::{bf16, f16};
use iris_heap::{BackendKind, DType, SymSlice, World};
use iris_ops::comm::{Comm, Id, Options, ReduceOp, Summand};
use iris_ops::{OpResult, Topology};
use iris_testkit::error_texts::fails;
use iris_testkit::worlds::on_threads;

const CPU: BackendKind = BackendKind::Cpu;

/// Options of a communicator that splits calls of more than 4096 bytes into several launches.
fn small() -> Options {
    Options::new().max_bytes(4096).room(1 << 16)
}

fn ranks(size: usize, f: impl Fn(&Comm) -> Result<()> + Sync) {
    let rank = |world: World| -> Result<()> {
        let comm = Comm::from_world(CPU, &world, &small())?;
        f(&comm)?;
        comm.close()?;
        Ok(world.close()?)
    };
    World::run_threads(size, rank).unwrap();
}

/// Element `index` of the input of rank `rank`: a small integer, so that sums over ranks are exact
/// in all types.
fn value(rank: usize, index: usize) -> f64 {
    ((index * 7 + rank * 3) % 16) as f64
}

fn sums<T: Summand + PartialEq + fmt::Debug>(comm: &Comm, count: usize) -> Result<()> {
    let (rank, size) = (comm.rank(), comm.world_size());
    let own: Vec<T> = (0..count).map(|index| T::from_f64(value(rank, index))).collect();
    let sum = |index| T::from_f64((0..size).map(|rank| value(rank, index)).sum());
    let expected: Vec<T> = (0..count).map(sum).collect();
    let mut all = vec![T::from_f64(-1.0); count];
    comm.all_reduce(&own, &mut all, &ReduceOp::Sum)?;
    assert_eq!(all, expected, "all_reduce of {count} {}", T::DTYPE);
    let mut own = own;
    comm.all_reduce_in_place(&mut own, &ReduceOp::Sum)?;
    assert_eq!(own, expected, "in place");
    let parts: Vec<T> = (0..count * size).map(|index| T::from_f64(value(rank, index))).collect();
    let mut part = vec![T::from_f64(-1.0); count];
    comm.reduce_scatter(&parts, &mut part, &ReduceOp::Sum)?;
    let expected_part: Vec<T> = (rank * count..(rank + 1) * count).map(sum).collect();
    assert_eq!(part, expected_part, "reduce_scatter of {count} {}", T::DTYPE);
    let unwritten = vec![T::from_f64(-1.0); count];
    for root in 0..size {
        let (mut got, mut data) = (unwritten.clone(), parts[..count].to_vec());
        comm.reduce(&data, Some(&mut got), &ReduceOp::Sum, root as i32)?;
        comm.reduce_in_place(&mut data, &ReduceOp::Sum, root as i32)?;
        let is_root = rank == root;
        let [kept, in_place] = [&unwritten[..], &parts[..count]].map(|before| match is_root {
            true => &expected[..],
            false => before,
        });
        assert_eq!(got, kept, "reduce of {count} {} to {root}", T::DTYPE);
        assert_eq!(data, in_place, "reduce in place of {count} {} to {root}", T::DTYPE);
    }
    Ok(())
}

/// Tests that every bit pattern arrives unchanged, even bit patterns that are NaN in the types in
/// which words are moved.
fn moves<T: Pod + PartialEq + fmt::Debug>(comm: &Comm, count: usize) -> Result<()> {
    let (rank, size) = (comm.rank(), comm.world_size());
    let elements = |rank: usize, from: usize, count: usize| -> Vec<T> {
        let bytes = |index: usize| {
            let bytes = (0..size_of::<T>()).map(move |byte| {
                let all = (index + rank * 1000).wrapping_mul(0x9E37_79B9).wrapping_add(byte << 20);
                (all >> 12) as u8
            });
            bytemuck::pod_read_unaligned(&bytes.collect::<Vec<u8>>())
        };
        (from..from + count).map(bytes).collect()
    };
    let zero = T::zeroed();
    let own = elements(rank, 0, count);
    let mut all = vec![zero; count * size];
    comm.all_gather(&own, &mut all)?;
    let expected: Vec<T> = (0..size).flat_map(|rank| elements(rank, 0, count)).collect();
    assert_eq!(all, expected, "all_gather of {count} elements of {} bytes", size_of::<T>());
    let parts = elements(rank, 0, count * size);
    let mut got = vec![zero; count * size];
    comm.all_to_all(&parts, &mut got)?;
    let expected: Vec<T> = (0..size).flat_map(|from| elements(from, rank * count, count)).collect();
    assert_eq!(got, expected, "all_to_all of {count} elements of {} bytes", size_of::<T>());
    for root in 0..size {
        let mut got = vec![zero; count];
        comm.broadcast(Some(&own), &mut got, root as i32)?;
        assert_eq!(got, elements(root, 0, count), "broadcast of {count} from {root}");
        let mut data = own.clone();
        comm.broadcast_in_place(&mut data, root as i32)?;
        assert_eq!(data, elements(root, 0, count), "broadcast in place of {count} from {root}");
        // Only the root has memory for the parts of all ranks.
        let mut all = vec![zero; count * size];
        comm.gather(&own, (rank == root).then_some(&mut all), root as i32)?;
        let expected: Vec<T> = (0..size).flat_map(|rank| elements(rank, 0, count)).collect();
        assert!(rank != root || all == expected, "gather of {count} to {root}: {all:?}");
        let mut part = vec![zero; count];
        comm.scatter((rank == root).then_some(&parts), &mut part, root as i32)?;
        let expected = elements(root, rank * count, count);
        assert_eq!(part, expected, "scatter of {count} from {root}");
    }
    Ok(())
}

fn all_calls(comm: &Comm, count: usize) -> Result<()> {
    sums::<f32>(comm, count)?;
    sums::<f16>(comm, count)?;
    sums::<bf16>(comm, count)?;
    moves::<u32>(comm, count)?;
    moves::<u64>(comm, count)?;
    moves::<u16>(comm, count)?;
    moves::<u8>(comm, count)?;
    moves::<[u8; 3]>(comm, count)?;
    moves::<[u16; 3]>(comm, count)?;
    Ok(comm.barrier()?)
}

#[test]
fn calls_of_any_count_and_type_are_right() {
    for size in [1, 2, 3, 4] {
        ranks(size, |comm| {
            let counts = [0, 1, 2, 5, 341, 1024, 1025, 5000];
            counts.into_iter().try_for_each(|count| all_calls(comm, count))
        });
    }
}

/// Tests calls that follow each other without a wait of the host. Each call has another length than
/// the previous call, so that peers write to memory that another call has written.
#[test]
fn calls_follow_each_other_without_waits_of_the_host_in_the_heap() {
    ranks(3, |comm| {
        let heap = comm.heap().clone();
        let (rank, len) = (comm.rank(), 500);
        let slices = [heap.alloc::<f32>(len), heap.alloc(len), heap.alloc(len)];
        let [x, mut y, mut z] = slices.map(|slice| slice.unwrap());
        let values: Vec<f32> = (0..len).map(|index| value(rank, index) as f32).collect();
        heap.write(x, &values)?;
        for len in (1..len).step_by(37) {
            let part = |slice: SymSlice<f32>| slice.slice(..len).unwrap();
            comm.all_reduce(&part(x), &mut part(y), &ReduceOp::Sum)?;
            comm.broadcast(Some(&part(y)), &mut part(z), (len % 3) as i32)?;
        }
        comm.all_reduce(&x, &mut y, &ReduceOp::Sum)?;
        comm.broadcast(Some(&y), &mut z, 1)?;
        comm.stream().sync()?;
        let sum = |index: usize| (0..3).map(|rank| value(rank, index) as f32).sum::<f32>();
        let expected: Vec<f32> = (0..len).map(sum).collect();
        assert_eq!(heap.read(z)?, expected);
        Ok(())
    });
}

/// Tests that a call with host memory that fails has returned the memory: nothing that is enqueued
/// writes to it later.
#[test]
fn a_failed_call_leaves_host_memory_alone() {
    const COUNT: usize = 1500;
    let turn = Barrier::new(2);
    World::run_threads(2, |world| -> Result<()> {
        let comm = Arc::new(Comm::from_world(CPU, &world, &small())?);
        // Enqueued work must not wait for a stream.
        let (tell, told) = std::sync::mpsc::channel();
        let inner = comm.clone();
        comm.stream().call_cpu("a call from enqueued work", move || {
            let mut data = vec![1.0f32; COUNT];
            let refused = inner.all_reduce_in_place(&mut data, &ReduceOp::Sum).unwrap_err();
            tell.send((refused.to_string(), data)).unwrap();
            Ok(())
        })?;
        let (refused, data) = told.recv()?;
        comm.stream().sync()?;
        assert!(refused.contains("waiting") && data == [1.0; COUNT], "{refused}");
        // The second of the two launches of rank 0 is refused; only then rank 1 makes its call.
        let mut data = vec![1.0f32; COUNT];
        if comm.rank() == 1 {
            turn.wait();
            comm.all_reduce_in_place(&mut data, &ReduceOp::Sum).unwrap_err();
            turn.wait();
            return Ok(());
        }
        comm.heap().control().fail_launch_after(1);
        fails(comm.all_reduce_in_place(&mut data, &ReduceOp::Sum), &["poisoned on all ranks"]);
        let returned = data.clone();
        turn.wait();
        turn.wait();
        assert!(data == returned, "memory was written after the call had returned");
        Ok(())
    })
    .unwrap();
}

#[test]
fn wrong_calls_are_refused_by_name_and_harm_nobody() {
    ranks(2, |comm| {
        let (x, mut y) = ([1.0_f32; 4], [0.0_f32; 4]);
        for operation in [ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min, ReduceOp::Avg] {
            let outcome = comm.all_reduce(&x, &mut y, &operation);
            fails(outcome, &["all_reduce", &format!("{operation:?}"), "Sum"]);
        }
        fails(comm.all_reduce(&x, &mut y[..3], &ReduceOp::Sum), &["length of the input is 4", "3"]);
        fails(
            comm.all_gather(&x, &mut y),
            &["length of the input is 4", "2 elements, since the output has 4"],
        );
        fails(comm.all_gather(&x, &mut [0.0; 7]), &["length of the output is 7", "multiple of 2"]);
        fails(comm.reduce_scatter(&x, &mut y, &ReduceOp::Sum), &["input is 4", "each of 2 ranks"]);
        fails(comm.all_to_all(&x[..3], &mut y[..3]), &["length of the output is 3"]);
        for root in [-1, 2] {
            fails(comm.broadcast(Some(&x), &mut y, root), &["root is", "from 0 to 1"]);
        }
        if comm.rank() == 1 {
            fails(comm.broadcast(None::<&[f32]>, &mut y, 1), &["broadcast: input is None", "root"]);
            fails(comm.scatter(None::<&[f32]>, &mut y, 1), &["input is None", "root, memory"]);
            fails(comm.gather(&x, None::<&mut [f32]>, 1), &["output is None", "root, memory"]);
        }
        fails(comm.reduce(&x, Some(&mut y), &ReduceOp::Max, 0), &["Max", "Sum"]);
        fails(comm.reduce_in_place(&mut y, &ReduceOp::Sum, 2), &["root is 2", "from 0 to 1"]);
        if comm.rank() == 0 {
            fails(comm.gather(&x, Some(&mut y), 0), &["input is 4", "2 elements"]);
            fails(comm.scatter(Some(&x), &mut y, 0), &["input is 4", "4 elements for each"]);
        }
        let slice = comm.heap().zeros::<f32>(8)?;
        let (head, mut tail) = (slice.slice(..5).unwrap(), slice.slice(3..).unwrap());
        fails(comm.all_reduce(&head, &mut tail, &ReduceOp::Sum), &["output and input overlap"]);
        sums::<f32>(comm, 9)
    });
    let of_f32 = |world: World| -> Result<()> {
        let options = small().sums(&[DType::F32]);
        let comm = Comm::from_world(CPU, &world, &options)?;
        sums::<f32>(&comm, 9)?;
        let mut data = [bf16::ONE; 3];
        fails(comm.all_reduce_in_place(&mut data, &ReduceOp::Sum), &["bf16", "Options::sums"]);
        comm.close()?;
        fails(comm.all_reduce_in_place(&mut data, &ReduceOp::Sum), &["communicator is closed"]);
        Ok(())
    };
    World::run_threads(2, of_f32).unwrap();
    let (two, many) = (Topology::new(0, 2), Topology::new(0, 1024).on_nodes(128));
    let most = (1 << 31) - 128;
    for (ranks, bytes) in [(two, 4096), (two, most), (many, 65536)] {
        small().max_bytes(bytes).footprint(ranks).unwrap();
    }
    for (ranks, bytes, least) in [(two, 4095, 4096), (two, most + 1, 4096), (many, 4096, 65536)] {
        let error = small().max_bytes(bytes).footprint(ranks).unwrap_err().to_string();
        let expected =
            format!("max_bytes of a communicator is {bytes}: expected {least} to {most}");
        assert!(error.contains(&expected), "{error}");
    }
}

/// Tests that ranks that share only an id, here as threads of a process, form a communicator.
#[test]
fn ranks_meet_by_an_id() {
    let id = Id::new().unwrap();
    let rank = |rank: usize| -> Result<()> {
        let comm = Comm::from_rank_with(CPU, rank, 3, Id::uninit(*id.internal()), &small())?;
        assert_eq!((comm.rank(), comm.world_size()), (rank, 3));
        sums::<f32>(&comm, 5000)?;
        moves::<u8>(&comm, 3)?;
        Ok(comm.close()?)
    };
    on_threads(0..3, rank).into_iter().for_each(Result::unwrap);
    fails(Comm::from_rank(CPU, 3, 3, id), &["rank of from_unique_id is 3: expected 0 to 2"]);
    fails(Comm::from_rank(CPU, 0, 65, Id::new().unwrap()), &["is 65: expected 1 to 64"]);
}

/// Tests that calls of several threads run in the order of the program. The threads take turns, and
/// each enqueues calls of several parts.
#[test]
fn threads_share_a_communicator() {
    ranks(2, |comm| {
        let turn = (Mutex::new(0), Condvar::new());
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let turn = &turn;
                scope.spawn(move || {
                    for round in 0..4 {
                        let mine = |now: &mut usize| *now != round * 3 + thread;
                        let waited = turn.1.wait_while(turn.0.lock().unwrap(), mine).unwrap();
                        sums::<f32>(comm, 3000 + thread).unwrap();
                        moves::<u32>(comm, 100 * thread).unwrap();
                        let mut now = waited;
                        *now += 1;
                        turn.1.notify_all();
                    }
                });
            }
        });
        Ok(())
    });
}

/// Tests that the parts of a call do not mix with the parts of another thread's call. All calls are
/// equal, so their order does not matter.
#[test]
fn threads_may_race_for_calls_that_are_alike() {
    ranks(2, |comm| {
        let together = std::sync::Barrier::new(3);
        let race = || {
            for _ in 0..20 {
                together.wait();
                alike(comm).unwrap();
            }
        };
        std::thread::scope(|scope| (0..3).for_each(|_| drop(scope.spawn(race))));
        Ok(())
    });
}

/// Sums some 400 parts in one call; the elements differ from part to part.
fn alike(comm: &Comm) -> Result<()> {
    let mut data: Vec<f32> = (0..400_000).map(|index| (index + comm.rank()) as f32).collect();
    comm.all_reduce_in_place(&mut data, &ReduceOp::Sum)?;
    assert!(data.iter().enumerate().all(|(index, &sum)| sum == (2 * index + 1) as f32));
    Ok(())
}

/// Tests that input and output may be the same slice of the heap in calls that work in place, and
/// only in such calls.
#[test]
fn calls_in_place_by_two_names_of_one_slice() {
    ranks(2, |comm| {
        let (heap, rank) = (comm.heap().clone(), comm.rank());
        let (x, mut same) = {
            let slice = heap.full::<f32>(8, 1.0 + rank as f32)?;
            (slice, slice)
        };
        comm.all_reduce(&x, &mut same, &ReduceOp::Sum)?;
        comm.stream().sync()?;
        assert_eq!(heap.read(x)?, [3.0; 8]);
        comm.barrier()?;
        comm.stream().sync()?;
        heap.write(x, &[rank as f32; 8])?;
        comm.broadcast(Some(&x), &mut same, 1)?;
        comm.stream().sync()?;
        assert_eq!(heap.read(x)?, [1.0; 8]);
        let overlap = |outcome: OpResult<()>| drop(fails(outcome, &["output and input overlap"]));
        overlap(comm.all_to_all(&x, &mut same));
        // Neighbours do not overlap.
        comm.all_to_all(&x.slice(..4)?, &mut x.slice(4..)?)?;
        // A call must be refused if its input is a part of its output, or its output a part of its
        // input.
        let mut half = x.slice(4 * rank..4 * (rank + 1))?;
        overlap(comm.all_gather(&half.clone(), &mut same));
        overlap(comm.reduce_scatter(&x, &mut half, &ReduceOp::Sum));
        // Overlaps must also be refused for types that pass through the communicator's buffers.
        // Operators do not see the program's memory of such types.
        let bytes = heap.zeros::<u8>(64)?;
        overlap(comm.all_to_all(&bytes, &mut bytes.clone()));
        overlap(comm.all_to_all(&bytes.slice(..40)?, &mut bytes.slice(24..)?));
        Ok(())
    });
}

/// Runs `call` on each of two ranks, and checks that the error of at least one rank contains
/// `words`.
fn differ(call: impl Fn(&Comm) -> OpResult<()> + Sync, words: &[&str]) {
    let errors = Mutex::new(Vec::new());
    let rank = |world: World| -> Result<()> {
        let comm = Comm::from_world(CPU, &world, &small())?;
        // The root of a broadcast waits for no rank, so it may learn of the fault only when it
        // closes the communicator.
        let outcome = call(&comm).and_then(|()| comm.close());
        let error = outcome.expect_err("ranks differ").to_string();
        errors.lock().unwrap().push(error);
        Ok(())
    };
    World::run_threads(2, rank).unwrap();
    let errors = errors.into_inner().unwrap();
    let named = |error: &String| words.iter().all(|word| error.contains(word));
    assert!(errors.len() == 2 && errors.iter().any(named), "{words:?} in {errors:#?}");
}

#[test]
fn counts_and_calls_that_differ_between_ranks_are_named() {
    differ(
        |comm| {
            let mut data = vec![1.0_f32; 8 + comm.rank()];
            comm.all_reduce_in_place(&mut data, &ReduceOp::Sum)
        },
        &["all_reduce", "entered with", "8", "9"],
    );
    differ(
        |comm| match comm.rank() {
            0 => comm.all_reduce_in_place(&mut [1.0_f32; 8], &ReduceOp::Sum),
            _ => comm.broadcast_in_place(&mut [1.0_f32; 8], 1),
        },
        &["all_reduce", "broadcast"],
    );
    differ(
        |comm| match comm.rank() {
            0 => comm.all_reduce_in_place(&mut [1.0_f32; 8], &ReduceOp::Sum),
            _ => comm.all_reduce_in_place(&mut [bf16::ONE; 8], &ReduceOp::Sum),
        },
        &["f32", "bf16"],
    );
}
