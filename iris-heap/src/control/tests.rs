//! Tests of control blocks: the errors that aborts and faults are converted into.

use super::*;
use crate::abi::ControlBlock;

#[test]
fn the_words_are_a_control_block() {
    assert_eq!(size_of::<ControlBlock>(), WORDS * size_of::<i32>());
    assert_eq!(Control::default().address() % 128, 0);
}

#[test]
fn the_first_reason_and_the_first_fault_stay() {
    let c = Control::default();
    assert!(c.check().is_ok() && c.fault().is_none());
    assert_eq!((c.name_op("all_reduce"), c.name_op("barrier")), (0, 1));
    let mut words = [0; FAULT_WORDS];
    words[..5].copy_from_slice(&[FaultKind::NoProgress as i32, 1, -5, 9, 2]);
    assert!(c.record_fault(&words));
    assert!(!c.record_fault(&[1; FAULT_WORDS]));
    assert!(
        matches!(c.check(), Err(Error::Fault { op, fault, .. }) if op == "barrier" && fault.tile == 9)
    );
    c.set_host_abort(abort::PEER_LOST + 2);
    c.set_host_abort(abort::USER);
    assert!(matches!(c.check(), Err(Error::PeerLost { rank: 2 })));
}

/// Tests that results that were complete before a peer was lost or the heap closed stay usable.
#[test]
fn only_what_may_leave_results_undefined_is_an_error_of_a_wait() {
    let outcome = |code: i32| {
        let c = Control::default();
        c.set_host_abort(code);
        c.check_results()
    };
    for code in [0, abort::CLOSED, abort::HUB_LOST, abort::PEER_LOST + 2] {
        assert!(outcome(code).is_ok(), "{code}");
    }
    for code in [abort::USER, abort::FAILED, abort::INCOMPLETE, i32::MIN] {
        assert!(matches!(outcome(code), Err(Error::Aborted { .. })), "{code}");
    }
    let c = Control::default();
    c.set_host_abort(abort::PEER_LOST + 2);
    assert!(c.record_fault(&[FaultKind::PeerLost as i32; FAULT_WORDS]));
    assert!(c.check_results().is_err());
    let c = Control::default();
    c.set_host_abort(abort::PEER_LOST + 2);
    c.fail_elsewhere(Error::Closed { what: "a test" });
    assert!(c.check_results().is_err());
}

#[test]
fn a_lost_peer_explains_waits_for_it_and_no_difference() {
    let outcome = |kind: FaultKind, rank: i32| {
        let c = Control::default();
        let mut words = [0; FAULT_WORDS];
        (words[0], words[4]) = (kind as i32, rank);
        assert!(c.record_fault(&words));
        c.set_host_abort(abort::PEER_LOST + 2);
        c.outcome().unwrap_err()
    };
    let lost = |error| matches!(error, Error::PeerLost { rank: 2 });
    assert!(lost(outcome(FaultKind::NotEntered, 2)) && lost(outcome(FaultKind::PeerGaveUp, 1)));
    for (kind, rank) in [(FaultKind::Mismatch, 2), (FaultKind::NotEntered, 1)] {
        let error = outcome(kind, rank);
        assert!(matches!(&error, Error::Fault { fault, .. } if fault.kind == kind), "{error}");
    }
}

#[test]
fn every_abort_word_is_an_error_that_shows_it() {
    for code in [i32::MIN, -1, 999, abort::PEER_LOST + MAX_RANKS as i32, i32::MAX] {
        let c = Control::default();
        c.set_host_abort(code);
        let error = c.check().unwrap_err();
        assert!(matches!(error, Error::Aborted { code: shown, .. } if shown == code), "{error}");
    }
    let c = Control::default();
    c.set_host_abort(abort::PEER_LOST + MAX_RANKS as i32 - 1);
    assert!(matches!(c.check(), Err(Error::PeerLost { rank: 63 })));
}

#[test]
fn a_rank_that_is_cut_off_has_the_error_of_its_world() {
    let outcome = |lost: &Error, fault: Option<FaultKind>| {
        let c = Control::default();
        c.lose(crate::bootstrap::lost_rank(lost), lost.clone());
        let mut words = [0; FAULT_WORDS];
        if let Some(kind) = fault {
            words[..6].copy_from_slice(&[kind as i32, 0, 1, -1, 0, c.host_abort()]);
            assert!(c.record_fault(&words));
        }
        c.outcome().unwrap_err()
    };
    let hub = Error::HubLost { rank: 6 };
    let wire = Error::Wire { what: "world".into(), problem: "a broken frame".into() };
    for fault in [None, Some(FaultKind::PeerLost)] {
        assert!(matches!(outcome(&hub, fault), Error::HubLost { rank: 6 }));
    }
    for fault in [None, Some(FaultKind::HostAbort)] {
        assert!(matches!(outcome(&wire, fault), Error::Wire { .. }));
    }
    assert!(matches!(outcome(&wire, Some(FaultKind::Mismatch)), Error::Fault { .. }));
    assert!(matches!(outcome(&Error::PeerLost { rank: 2 }, None), Error::PeerLost { rank: 2 }));
}

/// Tests that a revoked epoch is one error on every rank, however the rank learns of it: from its
/// host, from a peer's word, or from the fault of a kernel.
#[test]
fn a_revoked_epoch_is_one_error_on_every_rank() {
    let told_by_host = Control::default();
    told_by_host.lose(None, Error::Revoked);
    assert_eq!(told_by_host.word_for_peers(1), abort::REVOKED);
    assert!(told_by_host.check_results().is_ok(), "no call was stopped");
    let stopped = Control::default();
    let mut words = [0; FAULT_WORDS];
    words[..6].copy_from_slice(&[FaultKind::PeerLost as i32, 0, 1, -1, 65, abort::REVOKED]);
    assert!(stopped.record_fault(&words));
    stopped.set_host_abort(abort::REVOKED);
    let by_peer = Control::default().told_by_peer(abort::REVOKED);
    for error in [told_by_host.check().unwrap_err(), stopped.check().unwrap_err(), by_peer] {
        assert!(matches!(error, Error::Revoked), "{error:?}");
        assert_eq!(error.kind(), ErrorKind::PeerLost);
    }
}

#[test]
fn a_fault_counts_as_returned_after_check() {
    let c = Control::default();
    let mut words = [0; FAULT_WORDS];
    words[0] = iris_sync::FaultKind::NoProgress as i32;
    assert!(c.record_fault(&words) && c.outcome().is_err() && !c.is_fault_returned());
    assert!(matches!(c.fault_error(), Some(Error::Fault { .. })));
    assert!(c.check().is_err() && c.is_fault_returned());
}
