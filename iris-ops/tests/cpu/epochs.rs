//! Tests of sessions and of communicators of a member, in jobs of one rank that revokes its epochs.
//! The test program `elastic` of iris-testkit has jobs that lose ranks.

use std::cell::Cell;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use iris_heap::{BackendKind, Change, Error, Member, MemberId, Next, Policy, UniqueId, World};
use iris_ops::comm::{Comm, Options, ReduceOp};
use iris_ops::{Session, StepOutcome};
use iris_testkit::error_texts::fails;

const CPU: BackendKind = BackendKind::Cpu;

fn member() -> Arc<Member> {
    let world = World::from_unique_id(&UniqueId::new().unwrap(), 0, 1).unwrap();
    Arc::new(Member::join(&world, Policy::new()).unwrap())
}

fn small() -> Options {
    Options::new().max_bytes(4096)
}

/// Tests that a step runs in the epoch for which its model was built, that errors of the program are
/// returned, and that a build gets the model before it.
#[test]
fn a_session_builds_a_model_for_each_epoch() {
    let (member, builds) = (member(), Cell::new(0));
    let build = |world: &World, change: &Change, old: &mut Option<(u32, Comm)>| -> Result<_> {
        builds.set(builds.get() + 1);
        if builds.get() == 3 {
            bail!("no weights");
        }
        ensure!(change.members == [MemberId(0)] && change.lost.is_empty(), "{change:?}");
        let number = match old.take() {
            Some((number, _)) => number + 1,
            None => 0,
        };
        ensure!(change.from == [(number > 0).then_some(0)], "{change:?}");
        Ok((number, Comm::from_world(CPU, world, &small())?))
    };
    let mut session = Session::open(member.clone(), build).unwrap();
    let sum = |(number, comm): &mut (u32, Comm)| {
        let mut sum = [0.0];
        comm.all_reduce(&[2.0], &mut sum, &ReduceOp::Sum)?;
        Ok((*number, sum[0]))
    };
    assert!(matches!(session.step(sum).unwrap(), StepOutcome::Done((0, 2.0))));
    let error = session.step::<()>(|_| bail!("a bad request")).unwrap_err();
    assert_eq!(error.to_string(), "a bad request");
    assert!(matches!(session.step(sum).unwrap(), StepOutcome::Done((0, 2.0))), "the same epoch");

    member.revoke();
    let outcome = session.step::<()>(|_| panic!("a step of an epoch that has ended")).unwrap();
    assert!(matches!(outcome, StepOutcome::Rebuilt(Change { from, .. }) if from == [Some(0)]));
    assert!(matches!(session.step(sum).unwrap(), StepOutcome::Done((1, 2.0))));

    let own = member.clone();
    let ends = move |_: &mut (u32, Comm)| -> Result<()> {
        own.revoke();
        bail!("an error of an epoch that has ended")
    };
    fails(session.step(ends), &["no weights"]); // of the build
    let outcome = session.step::<()>(|_| panic!("a step without a model")).unwrap();
    assert!(matches!(outcome, StepOutcome::Rebuilt(_)));
    assert!(matches!(session.step(sum).unwrap(), StepOutcome::Done((2, 2.0))), "the old model");
    assert_eq!(builds.get(), 4);
    session.close().unwrap();
}

#[test]
fn a_session_of_an_epoch_that_has_ended_is_not_closed() {
    let member = member();
    let build = |_: &World, _: &Change, _: &mut Option<()>| Ok::<_, Error>(());
    let session = Session::open(member.clone(), build).unwrap();
    member.revoke();
    fails(session.close(), &["the epoch of this world was revoked"]);
    // The ended epoch is followed by another one before the model is built.
    let session = Session::open(member.clone(), build).unwrap();
    assert_eq!(member.epoch(), 1);
    session.close().unwrap();
}

#[test]
fn a_communicator_goes_on_once_and_only_in_its_epoch() {
    let member = member();
    let of_world = Comm::from_world(CPU, &member.world().unwrap(), &small()).unwrap();
    fails(of_world.next(), &["one without an epoch", "expected one of Comm::from_member"]);
    let [first, stale] = [(); 2].map(|()| Comm::from_member(CPU, &member, &small()).unwrap());
    let Next::Epoch(world, _) = first.next().unwrap() else { panic!("an epoch") };
    fails(first.next(), &["expected one of Comm::from_member that has not gone on"]);
    fails(first.barrier(), &["closed"]);
    fails(stale.next(), &["one of epoch 0", "expected one of epoch 1"]);
    assert!(!member.is_revoked(), "the communicator of an old epoch has ended the new one");
    world.barrier().unwrap();

    member.revoke();
    fails(
        Comm::from_member(CPU, &member, &small()),
        &["communicator: ", "the epoch of this world was revoked"],
    );
}
