//! Ranks that are struck at a random time, in whatever they do then: while they open a heap, in a call,
//! or in the recovery from another strike.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use iris_heap::{Change, Error, Member, MemberId, World};
use iris_ops::{Session, StepOutcome};
use iris_testkit::launch;
use rustix::process::{Pid, Signal, getpid, kill_process};

use super::{CALLS, DATA, Model, job, lines, pids_of, policy};

/// Longest time from the start of a job to its first strike in microseconds. Heap and operator of 3
/// ranks take about 5 ms, a call takes less than 1 ms.
const FIRST: u64 = 30_000;
/// Longest time from the first strike to the second one in microseconds.
const SECOND: u64 = 12_000;

/// Process that stops or ends at a time after the start of its job.
#[derive(Clone, Copy, Debug)]
struct Strike {
    victim: usize,
    /// Whether the process is stopped, and continued later, instead of killed.
    stops: bool,
    after: Duration,
}

/// Strikes of a job, at one or two of its `ranks` ranks. Ranks and test compute the same ones.
fn strikes(seed: u64, ranks: usize) -> Vec<Strike> {
    // SplitMix64.
    let mut state = seed;
    let mut below = |limit: u64| {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (mixed ^ mixed >> 31) % limit
    };
    // The rank that passes messages on, another one, or the last one.
    let first = [0, 1, ranks - 1][below(3) as usize];
    let second = (first + 1 + below(ranks as u64 - 1) as usize) % ranks;
    let victims = [first, second].into_iter().take(1 + below(2) as usize);
    let mut after = below(FIRST);
    victims
        .map(|victim| {
            let strike =
                Strike { victim, stops: below(3) == 0, after: Duration::from_micros(after) };
            after += below(SECOND);
            strike
        })
        .collect()
}

/// Makes the calls of a session until the ranks that are not struck have made enough of them alone.
pub(super) fn run(seed: &str) -> Result<()> {
    let world = World::from_env()?;
    let (pids, strikes) = (pids_of(&world)?, strikes(seed.parse()?, world.size()));
    let left = world.size() - strikes.len();
    let member = Arc::new(Member::join(&world, policy("strike"))?);
    let id = member.id();
    // The strikes come after all have joined.
    world.barrier()?;
    if let Some(strike) = strikes.iter().copied().find(|it| it.victim == id.0) {
        std::thread::spawn(move || {
            std::thread::sleep(strike.after);
            match strike.stops {
                true => kill_process(getpid(), Signal::STOP).expect("a signal to itself"),
                false => launch::kill_myself(),
            }
        });
    }
    drop(world);
    let build = |world: &World, _: &Change, _: &mut Option<Model>| Model::build(world, id, DATA);
    let outcome = Session::open(member.clone(), build).and_then(|mut session| {
        let mut call = 0;
        loop {
            let is_last_epoch = member.members().len() == left;
            if is_last_epoch && call == CALLS {
                eprintln!("MEMBERS {:?}", member.members());
                return session.close().context("closing a session");
            }
            match session.step(|model| model.start(id, call).and_then(|()| model.finish(call)))? {
                StepOutcome::Done(()) => call += 1,
                StepOutcome::Rebuilt(_) => call = 0,
                other => bail!("{other:?}"),
            }
            // Stopped processes go on in the middle of the epoch, and store what they had not.
            if is_last_epoch && call == CALLS / 3 && member.members()[0] == id {
                for it in strikes.iter().filter(|it| it.stops) {
                    let pid = Pid::from_raw(pids[it.victim] as i32).expect("a process");
                    kill_process(pid, Signal::CONT).expect("a signal to a stopped process");
                }
            }
        }
    });
    let is_stopped = strikes.iter().any(|it| it.victim == id.0 && it.stops);
    match outcome {
        Err(error) if is_stopped => {
            let of_heap = error.downcast_ref::<Error>();
            ensure!(matches!(of_heap, Some(Error::Evicted { .. })), "{error:#}");
            eprintln!("EVICTED");
            Ok(())
        }
        outcome => outcome,
    }
}

pub(super) fn ranks_that_are_struck_at_any_time_are_survived() {
    for (ranks, seeds) in [(3, 0..12), (8, 100..106)] {
        for seed in seeds {
            let strikes = strikes(seed, ranks);
            let killed: Vec<_> =
                strikes.iter().filter(|it| !it.stops).map(|it| it.victim).collect();
            let outcome = job(&format!("strike {seed}"), ranks, &killed);
            let is_left = |rank: &usize| strikes.iter().all(|it| it.victim != *rank);
            let left: Vec<_> = (0..ranks).filter(is_left).map(MemberId).collect();
            for rank in 0..ranks {
                let report = outcome.report();
                if is_left(&rank) {
                    let members = lines(&outcome, rank, "MEMBERS ");
                    assert_eq!(members, [format!("{left:?}")], "{strikes:?}\n{report}");
                } else if !killed.contains(&rank) {
                    assert_eq!(lines(&outcome, rank, "EVICTED"), [""], "{strikes:?}\n{report}");
                }
            }
        }
    }
}
