//! Ranks whose steps are those of a [`Session`], or calls of a communicator of a member.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use iris_heap::abi::abort;
use iris_heap::{BackendKind, Change, Error, ErrorKind, Member, Next, World};
use iris_ops::comm::{Comm, Options, ReduceOp};
use iris_ops::{Session, StepOutcome};
use iris_testkit::launch;

use super::{
    Blow, CALLS, COUNT, DATA, Model, STRUCK, blow, check_retired, is_loss, job, lines, policy,
    print_epoch,
};

/// Makes the calls of all epochs as steps of a session, none of which may return an error of an epoch
/// that has ended.
pub(super) fn run_session(case: &str) -> Result<()> {
    let member = Arc::new(Member::join(&World::from_env()?, policy(case))?);
    let (own, id) = (member.clone(), member.id());
    let build = |world: &World, _: &Change, old: &mut Option<Model>| {
        if (case, id.0) == ("twice", 3) && own.epoch() > 0 {
            launch::kill_myself();
        }
        if let Some(model) = old.take() {
            let slices = model.slices();
            let retired = model.heap.retire()?;
            check_retired(&retired, slices)?;
            retired.release(world)?;
        }
        let is_too_large = case == "no-memory" && own.epoch() == 1;
        Model::build(world, id, if is_too_large { 1 << 44 } else { DATA })
    };
    let mut session = Session::open(member.clone(), build)?;
    let mut call = 0;
    loop {
        let blow = blow(case, member.epoch());
        if blow.is_none() && call == CALLS {
            return session.close().context("closing a session");
        }
        let outcome = session.step(|model| {
            model.start(id, call)?;
            match blow.filter(|&(_, who)| call == STRUCK && who == id.0) {
                Some((Blow::Kill, _)) => launch::kill_myself(),
                Some((Blow::GiveUp, _)) => model.heap.poison(abort::USER)?,
                Some((Blow::Fail, _)) => bail!("a failure of this rank"),
                _ => {}
            }
            model.finish(call)
        });
        match outcome {
            Err(error) if case == "no-memory" => {
                let of_heap = error.downcast_ref::<Error>().context("an error of the heap")?;
                ensure!(of_heap.kind() == ErrorKind::OutOfMemory, "{error:#}");
                eprintln!("NO MEMORY {error:#}");
            }
            Err(error) if error.to_string() == "a failure of this rank" => {
                eprintln!("FAILED");
                return Ok(());
            }
            outcome => match outcome? {
                StepOutcome::Done(()) => call += 1,
                StepOutcome::Rebuilt(change) => {
                    print_epoch(&member, &change);
                    call = 0;
                }
                StepOutcome::Spare => eprintln!("SPARE in epoch {}", member.epoch()),
                other => bail!("{other:?}"),
            },
        }
    }
}

/// Makes the calls of all epochs by communicators of a member.
pub(super) fn run_comm(case: &str) -> Result<()> {
    let member = Arc::new(Member::join(&World::from_env()?, policy(case))?);
    loop {
        let (id, ids) = (member.id(), member.members());
        let options = Options::new().max_bytes(1 << 16);
        let comm = Comm::from_member(BackendKind::Cpu, &member, &options)?;
        let blow = blow(case, member.epoch());
        let last = if blow.is_some() { usize::MAX } else { CALLS };
        let calls = (0..last).try_for_each(|call| -> Result<()> {
            if call == STRUCK && blow == Some((Blow::Kill, id.0)) {
                launch::kill_myself();
            }
            let mut sum = [0.0; COUNT];
            comm.all_reduce(&[(id.0 + call % 7) as f32; COUNT], &mut sum, &ReduceOp::Sum)?;
            let wanted: usize = ids.iter().map(|id| id.0 + call % 7).sum();
            assert_eq!(sum, [wanted as f32; COUNT]);
            Ok(())
        });
        match calls {
            Err(error) if is_loss(&error) => match comm.next()? {
                Next::Epoch(_, change) => print_epoch(&member, &change),
                other => bail!("{other:?}"),
            },
            calls => {
                calls?;
                comm.close()?;
                return Ok(member.world()?.close()?);
            }
        }
        let refused = comm.all_reduce(&[1.0], &mut [0.0], &ReduceOp::Sum).err();
        ensure!(
            refused.is_some_and(|it| it.kind() == ErrorKind::Closed),
            "a call of the old epoch"
        );
    }
}

pub(super) fn a_session_goes_on_and_takes_a_spare() {
    let outcome = job("session spare", 4, &[0, 1]);
    let report = outcome.report();
    let [second, third] = [2, 3].map(|rank| lines(&outcome, rank, "EPOCH "));
    assert_eq!(second[0], "1 rank 1 from [Some(0), Some(2)] lost [MemberId(1)]", "{report}");
    assert_eq!(second[1], "2 rank 0 from [Some(1), None] lost [MemberId(0)]", "{report}");
    assert_eq!(lines(&outcome, 3, "SPARE in epoch "), ["1"], "{report}");
    assert_eq!(third, ["2 rank 1 from [None, None] lost [MemberId(0)]"], "{report}");
}

pub(super) fn a_session_loses_a_rank_while_it_builds() {
    let outcome = job("session twice", 4, &[2, 3]);
    for rank in 0..2 {
        let [line] = lines(&outcome, rank, "EPOCH ")[..] else { panic!("{}", outcome.report()) };
        let expected =
            format!("rank {rank} from [Some(0), Some(1)] lost [MemberId(2), MemberId(3)]");
        assert_eq!(line.split_once(' ').unwrap().1, expected, "{}", outcome.report());
    }
}

pub(super) fn a_session_goes_on_after_a_rank_gave_up() {
    let outcome = job("session give-up", 4, &[]);
    for rank in 0..4 {
        let expected = format!("1 rank {rank} from {:?} lost []", [0, 1, 2, 3].map(Some));
        assert_eq!(lines(&outcome, rank, "EPOCH "), [expected], "{}", outcome.report());
    }
}

pub(super) fn a_session_returns_the_errors_of_its_own_rank() {
    let outcome = job("session fail", 4, &[]);
    assert_eq!(lines(&outcome, 1, "FAILED").len(), 1, "{}", outcome.report());
    for (rank, member) in [0, 2, 3].into_iter().enumerate() {
        let expected = format!("1 rank {rank} from {:?} lost [MemberId(1)]", [0, 2, 3].map(Some));
        assert_eq!(lines(&outcome, member, "EPOCH "), [expected], "{}", outcome.report());
    }
}

pub(super) fn a_session_whose_heap_does_not_fit_builds_a_smaller_one() {
    let outcome = job("session no-memory", 4, &[2]);
    for (rank, member) in [0, 1, 3].into_iter().enumerate() {
        let report = outcome.report();
        let [refusal] = lines(&outcome, member, "NO MEMORY ")[..] else { panic!("{report}") };
        assert!(refusal.contains("on each of 3 ranks, in epoch 1"), "{report}");
        let expected = format!("2 rank {rank} from {:?} lost [MemberId(2)]", [0, 1, 3].map(Some));
        assert_eq!(lines(&outcome, member, "EPOCH "), [expected], "{report}");
    }
}

pub(super) fn a_communicator_goes_on() {
    let outcome = job("comm kill-0", 4, &[0]);
    for (rank, member) in (1..4).enumerate() {
        let expected = format!("1 rank {rank} from {:?} lost [MemberId(0)]", [1, 2, 3].map(Some));
        assert_eq!(lines(&outcome, member, "EPOCH "), [expected], "{}", outcome.report());
    }
}
