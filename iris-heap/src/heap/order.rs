//! Check that all ranks issue the calls of a heap in the same order: shares the issue boards (logs
//! of issued calls), and compares them while kernels wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use crate::abi::abort;
use crate::backend::nothing_passed;
use crate::bootstrap::Object;
use crate::bootstrap::notice::{Patience, ToldWaits, notice};
use crate::bootstrap::process::list_processes;
use crate::control::Control;
use crate::error::{Error, Result};
use crate::issue_board::{self, Boards};
use crate::segment::{JointMemory, SharedMemory};
use crate::util::spawn;
use crate::world::World;

/// Interval between two comparisons of the ranks' boards.
const TICK: Duration = Duration::from_secs(1);

/// Creates, on rank 0, the file of all ranks' issue boards; returns `None` on other ranks, and in a
/// world of one rank.
pub(super) fn make_boards(world: &World) -> Result<Option<JointMemory>> {
    let makes = world.rank() == 0 && world.size() > 1;
    makes.then(|| JointMemory::create("iris-issue", &sizes(world))).transpose()
}

fn sizes(world: &World) -> Vec<u64> {
    vec![issue_board::BYTES; world.size()]
}

/// Shares the boards that rank 0 has made with all ranks: collective. Returns `None` in a world of
/// one rank.
#[track_caller]
pub(super) fn share_boards(world: &World, made: Option<JointMemory>) -> Result<Option<Boards>> {
    let broken = |problem: &str| Error::Wire {
        what: "exchange of issue boards".into(),
        problem: problem.into(),
    };
    if world.size() == 1 {
        return Ok(None);
    }
    let all = if world.same_process() {
        // This rank takes part in the exchange even if rank 0 has nothing to pass, because its
        // peers wait for this rank.
        let mapped = made.map_or(Ok(Vec::new()), JointMemory::map);
        let (mine, failure) = match mapped {
            Ok(all) => (all, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        let mut objects: Vec<Object> = world.share_objects(Arc::new(mine))?;
        failure.map_or(Ok(()), Err)?;
        let all = objects.swap_remove(0).downcast::<Vec<SharedMemory>>();
        all.map_err(|_| broken("rank 0 sent something else"))?
    } else {
        let descriptors = made.into_iter().map(JointMemory::into_descriptor).collect();
        let mut passed = world.share_descriptors(descriptors)?;
        let descriptor = passed.swap_remove(0).pop().ok_or_else(|| nothing_passed(0))?;
        Arc::new(JointMemory::import(descriptor, &sizes(world))?.map()?)
    };
    match all.len() == world.size() {
        true => Ok(Some(Boards::new(world.rank(), all))),
        false => Err(broken("rank 0 has none")),
    }
}

/// Watcher thread of a rank, which compares the boards of all ranks every second. If the ranks
/// issue calls in different orders or leave one out, the thread aborts waiting kernels. The thread
/// also logs which ranks this rank's host waits for. Dropping this value ends the thread.
pub(super) struct Watch {
    stop: Arc<AtomicBool>,
    thread: Thread,
}

impl Watch {
    pub(super) fn start(world: &World, control: &Arc<Control>) -> Result<Watch> {
        let stop = Arc::new(AtomicBool::new(false));
        let (rank, allowed) = (world.rank(), world.settings().entry_deadline());
        let (stopped, control) = (stop.clone(), control.clone());
        control.set_processes((0..world.size()).map(|rank| world.process(rank)).collect());
        let run = move || watch(rank, allowed, &control, &stopped);
        let handle = spawn(format!("iris-{rank}-watch"), run)?;
        Ok(Watch { stop, thread: handle.thread().clone() })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// Compares the boards until `stop` is set. `allowed` is the longest time that a kernel waits for a
/// peer to enter a call.
fn watch(rank: usize, allowed: Duration, control: &Control, stop: &AtomicBool) {
    let number = |rank| control.in_whole_world(rank).0;
    let named = |rank| (number(rank), control.process(rank));
    let list = |ranks: &[usize]| list_processes(ranks, named);
    let mut patience: Option<(Instant, Patience)> = None;
    let mut told_waits = ToldWaits::default();
    while !stop.load(Ordering::Acquire) {
        thread::park_timeout(TICK);
        if control.disorder().or_else(|| control.left_out()).is_some() {
            control.set_host_abort(abort::DISORDER);
            return;
        }
        // The intervals between notices start anew with each wait of the host.
        let since = control.waits_since();
        patience = patience.filter(|(began, _)| Some(*began) == since);
        let Some(since) = since else { continue };
        let new = || (since, Patience::new(since, since + allowed));
        let (_, patience) = patience.get_or_insert_with(new);
        if let Some(waited) = patience.is_over()
            && let Some((awaited, call)) = control.awaited()
        {
            let stopped = control.stopped();
            if !told_waits.is_news(format!("{awaited:?} {stopped:?}"), waited) {
                continue;
            }
            match (&awaited[..], &stopped[..]) {
                ([], []) => notice(format_args!(
                    "rank {} waits for its streams: {waited:.1?}; all ranks have issued {call}; {}{}",
                    number(rank),
                    control.completed(),
                    control.steps()
                )),
                ([], stopped) => notice(format_args!(
                    "rank {} waits for its streams: {waited:.1?}, and for rank {}; {}",
                    number(rank),
                    list(stopped),
                    control.completed()
                )),
                (awaited, _) => notice(format_args!(
                    "rank {} waits for rank {} to issue {call}: {waited:.1?} of {allowed:.1?}{}",
                    number(rank),
                    list(awaited),
                    control.host_steps(awaited)
                )),
            }
        }
    }
}
