//! Test of a rank that forks without exec: the child uses operators and communicators that it
//! inherited, is refused, and disturbs no rank.

#![allow(unsafe_code, reason = "the declaration of fork")]

use std::process::exit;
use std::time::Duration;

use iris_heap::World;
use iris_ops::comm::{self, Comm};
use iris_ops::{
    AllReduce, CollectiveArgs, HeapReserve, MatRef, Plan, Workspace, all_reduce::Options,
};
use rustix::process::{Pid, WaitOptions, waitpid};

unsafe extern "C" {
    /// POSIX fork: returns 0 in the child, which has only the calling thread.
    safe fn fork() -> i32;
}

/// Ranks are threads, of which rank 0 forks. A child that writes the issue board of its parent
/// makes the later calls of both ranks fail by the order of calls.
#[test]
fn a_child_that_uses_inherited_operators_disturbs_nobody() {
    const LEN: usize = 64;
    World::run_threads(2, |world| -> anyhow::Result<()> {
        let plan = Options::new(LEN).plan(&world)?;
        let options = comm::Options::new();
        let reserve = HeapReserve::none()
            .and_elements::<f32>(LEN)
            .and_elements::<f32>(LEN)
            .and(options.footprint(&world)?);
        let heap = Plan::open_heap(&world, &[&plan, &plan, &plan], reserve)?;
        let workspace = Workspace::for_plans(&heap, &[&plan])?;
        let [runs, frees] = [AllReduce::new(&heap, &plan)?, AllReduce::new(&heap, &plan)?];
        let shares = AllReduce::in_workspace(&workspace, &plan)?;
        let stream = heap.stream()?;
        let comm = Comm::in_heap(&stream, &heap, &options)?;
        let (x, sum) = (heap.ones::<f32>(LEN)?, heap.zeros::<f32>(LEN)?);
        let args = CollectiveArgs::new(MatRef::sym(x, 1, LEN), MatRef::sym(sum, 1, LEN));
        if world.rank() == 0 {
            let child = fork();
            if child == 0 {
                let outcomes = [
                    runs.run(&args, &stream),
                    comm.all_reduce_in_place(&mut { sum }, &comm::ReduceOp::Sum),
                    comm.barrier(),
                    shares.free(),
                    comm.close(),
                    frees.free(),
                ];
                let is_told = |outcome: &iris_ops::OpResult<()>| {
                    outcome.as_ref().is_err_and(|error| error.to_string().contains("forked"))
                };
                let wrong = outcomes.iter().position(|outcome| !is_told(outcome));
                exit(wrong.map_or(0, |index| index as i32 + 1));
            }
            let (_, status) =
                waitpid(Pid::from_raw(child), WaitOptions::empty())?.expect("its end");
            let status = status.exit_status();
            assert_eq!(
                status,
                Some(0),
                "number of the use, from 1, that the child was not refused"
            );
        }
        world.barrier()?;
        if world.rank() == 0 {
            // Rank 1 waits in its call meanwhile, and compares the boards every second.
            std::thread::sleep(Duration::from_millis(2500));
        }
        for op in [&frees, &runs, &shares] {
            op.run(&args, &stream)?;
        }
        comm.all_reduce_in_place(&mut { sum }, &comm::ReduceOp::Sum)?;
        stream.sync()?;
        assert_eq!(heap.read(sum)?, [4.0; LEN]);
        frees.free()?;
        shares.free()?;
        comm.close()?;
        heap.close()?;
        Ok(world.close()?)
    })
    .unwrap();
}
