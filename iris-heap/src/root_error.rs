//! Selection of the root error among several ranks' errors. A failure on one rank makes other ranks
//! fail, and their errors may be returned first.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use iris_sync::FaultKind;

use crate::abi::abort;
use crate::error::{Error, ErrorKind};
use crate::util::lock;

/// Distance of an error from the root cause of a failure; the error with the smallest distance is
/// reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Distance {
    /// Failure of the rank itself, or a difference that was found by comparing ranks.
    Root,
    /// Timeout while waiting for another rank, which may have an error of its own.
    Silence,
    /// Consequence of another rank's failure or exit, or of another rank that gave up.
    Consequence,
}

impl Distance {
    pub(crate) fn of(error: &Error) -> Distance {
        match error {
            Error::PeerLost { .. }
            | Error::RankLost { .. }
            | Error::HubLost { .. }
            | Error::LauncherLost { .. }
            | Error::PeerFailed { .. }
            | Error::PeerAborted { .. }
            | Error::GaveUp { .. }
            | Error::Revoked
            | Error::Aborted { .. } => Distance::Consequence,
            Error::Absent { .. } | Error::NodeSilent { .. } => Distance::Silence,
            Error::Fault { fault, .. } => match fault.kind {
                FaultKind::NotEntered | FaultKind::NoProgress => Distance::Silence,
                FaultKind::PeerGaveUp | FaultKind::PeerLost | FaultKind::HostAbort => {
                    Distance::Consequence
                }
                _ => Distance::Root,
            },
            Error::AfterFault { fault, then } => Distance::of(fault).min(Distance::of(then)),
            _ => Distance::Root,
        }
    }
}

/// Error that the other ranks get if `rank` fails with `error` in the step `what`.
pub(crate) fn told(rank: usize, what: &str, error: &Error) -> Error {
    match Distance::of(error) {
        Distance::Root => Error::PeerFailed { rank, what: what.into(), message: error.to_string() },
        // The error is about another rank than `rank`, so all ranks can return it unchanged.
        _ => error.clone(),
    }
}

/// Whether the host's error `lost` explains the `fault` that a kernel left.
///
/// The loss of a peer explains a fault if the kernel waited for that peer, or if the fault is that
/// another rank gave up. A difference between ranks, or the silence of a third rank, has another
/// cause. If the host told the kernel to leave because of an error of a step between nodes, of
/// another node or of the connection to the world, any error of the host explains the fault.
pub(crate) fn explains(lost: &Error, fault: &Error) -> bool {
    match (lost, fault, Distance::of(fault)) {
        (_, Error::Fault { fault, .. }, _)
            if fault.kind == FaultKind::HostAbort
                && [abort::ELSEWHERE, abort::HUB_LOST].contains(&fault.seen) =>
        {
            true
        }
        (
            Error::PeerLost { rank } | Error::PeerAborted { rank, .. },
            Error::Fault { fault, .. },
            Distance::Silence,
        ) => fault.rank == *rank as i32,
        (
            Error::PeerLost { .. }
            | Error::RankLost { .. }
            | Error::HubLost { .. }
            | Error::LauncherLost { .. }
            | Error::PeerFailed { .. }
            | Error::PeerAborted { .. }
            | Error::Revoked,
            _,
            distance,
        ) => distance > Distance::Root,
        _ => false,
    }
}

/// Record of the errors that the library has returned to the program of one rank. Keeps the error
/// that is nearest to the root cause; of several equally near errors, the first.
#[derive(Debug, Default)]
pub(crate) struct ReturnedErrors {
    nearest: Mutex<Option<Error>>,
    /// Whether an error was returned after which no call with the other ranks can succeed, and of which
    /// they are the cause.
    has_ended: AtomicBool,
}

impl ReturnedErrors {
    /// Records an error that is returned to the program.
    pub(crate) fn note(&self, error: &Error) {
        let ends =
            matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Timeout | ErrorKind::Fault);
        if ends && Distance::of(error) > Distance::Root {
            self.has_ended.store(true, Ordering::Release);
        }
        let mut nearest = lock(&self.nearest);
        if nearest.as_ref().is_none_or(|old| Distance::of(error) < Distance::of(old)) {
            *nearest = Some(error.clone());
        }
    }

    /// Whether the library has returned an error after which the ranks can only go on in another world,
    /// and which is no failure of this rank itself.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Whether the library has returned an error.
    pub(crate) fn any(&self) -> bool {
        lock(&self.nearest).is_some()
    }

    /// Smallest distance among the recorded errors. If there is none, a failure of the rank is the
    /// program's own failure, so the distance is [`Distance::Root`].
    pub(crate) fn distance(&self) -> Distance {
        lock(&self.nearest).as_ref().map_or(Distance::Root, Distance::of)
    }

    /// Recorded error, if other ranks are its cause.
    pub(crate) fn about_others(&self) -> Option<Error> {
        lock(&self.nearest).clone().filter(|error| Distance::of(error) > Distance::Root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_elsewhere_explains_only_the_abort_that_it_caused() {
        let step = Error::other(std::io::Error::other("a step did not end"));
        let fault = |kind: FaultKind, seen: i32| {
            let words = [kind as i32, 0, 1, -1, 0, seen, 0, -1];
            let fault = iris_sync::Fault::from_words(words).expect("a fault");
            Error::Fault { op: "barrier".into(), fault, host: None, standing: Vec::new() }
        };
        assert!(explains(&step, &fault(FaultKind::HostAbort, abort::ELSEWHERE)));
        assert!(!explains(&step, &fault(FaultKind::HostAbort, abort::USER)));
        assert!(!explains(&step, &fault(FaultKind::Mismatch, abort::ELSEWHERE)));
    }

    #[test]
    fn errors_that_other_ranks_cause_end_the_exchanges() {
        let told = ReturnedErrors::default();
        let (name, message) = ("gelu".into(), String::new());
        told.note(&Error::Panicked { name, group: None, message: message.clone() });
        told.note(&Error::PeerFailed { rank: 1, what: "alloc".into(), message });
        assert!(!told.has_ended(), "a failure of this rank, and a step that a rank refused");
        told.note(&Error::GaveUp { rank: 1, host: None, reason: None });
        assert!(told.has_ended());
    }

    #[test]
    fn the_nearest_error_counts() {
        let told = ReturnedErrors::default();
        assert_eq!(told.distance(), Distance::Root, "an error of the program");
        told.note(&Error::PeerLost { rank: 1 });
        assert_eq!(told.distance(), Distance::Consequence);
        let absent = Error::Absent { ranks: vec![1], what: "a".into(), waited: Default::default() };
        told.note(&absent);
        told.note(&Error::GaveUp { rank: 1, host: None, reason: None });
        assert_eq!(told.distance(), Distance::Silence);
        let mut words = [0; 8];
        words[0] = FaultKind::Mismatch as i32;
        let fault = iris_sync::Fault::from_words(words).expect("a fault");
        let (op, host) = ("barrier".into(), None);
        let fault = Box::new(Error::Fault { op, fault, host, standing: Vec::new() });
        told.note(&Error::AfterFault { fault, then: Box::new(absent) });
        assert_eq!(told.distance(), Distance::Root);
    }
}
