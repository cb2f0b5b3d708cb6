//! The root among the errors of several ranks: a failure on one rank makes the others fail, and some of
//! these return first.

use std::sync::Mutex;

use iris_sync::FaultKind;

use crate::error::Error;
use crate::util::lock;

/// Distance of an error from the root of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Distance {
    /// Something is wrong on this rank, or a comparison of ranks found a difference.
    Root,
    /// A rank was waited for in vain, which may have an error of its own.
    Silence,
    /// Another rank failed, gave up or left.
    Consequence,
}

impl Distance {
    fn of(error: &Error) -> Distance {
        match error {
            Error::PeerLost { .. }
            | Error::RankLost { .. }
            | Error::HubLost
            | Error::PeerFailed { .. }
            | Error::GaveUp { .. }
            | Error::Aborted { .. } => Distance::Consequence,
            Error::Absent { .. } => Distance::Silence,
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

/// Whether the loss of a peer is why a kernel left `fault`: it waited for that peer, or another rank gave up. A difference
/// between ranks, or another rank's silence, came before.
pub(crate) fn explains(lost: &Error, fault: &Error) -> bool {
    match (lost, fault, Distance::of(fault)) {
        (Error::PeerLost { rank }, Error::Fault { fault, .. }, Distance::Silence) => {
            fault.rank == *rank as i32
        }
        (Error::PeerLost { .. } | Error::RankLost { .. } | Error::HubLost, _, distance) => {
            distance > Distance::Root
        }
        _ => false,
    }
}

/// The errors that the library has given the program of one rank: the least of their distances.
#[derive(Debug, Default)]
pub(crate) struct Told(Mutex<Option<Distance>>);

impl Told {
    /// Notes an error that the program is given.
    pub(crate) fn note(&self, error: &Error) {
        let (mut least, new) = (lock(&self.0), Distance::of(error));
        *least = Some(least.map_or(new, |least| least.min(new)));
    }

    /// The distance of an error that the program returns: one that the library has not given it is its own.
    pub(crate) fn distance(&self) -> Distance {
        lock(&self.0).unwrap_or(Distance::Root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_error_counts() {
        let told = Told::default();
        assert_eq!(told.distance(), Distance::Root, "an error of the program");
        told.note(&Error::PeerLost { rank: 1 });
        assert_eq!(told.distance(), Distance::Consequence);
        let absent = Error::Absent { ranks: vec![1], what: "a".into(), waited: Default::default() };
        told.note(&absent);
        told.note(&Error::GaveUp { rank: 1 });
        assert_eq!(told.distance(), Distance::Silence);
        let mut words = [0; 8];
        words[0] = FaultKind::Mismatch as i32;
        let fault = iris_sync::Fault::from_words(words).expect("a fault");
        let fault = Box::new(Error::Fault { op: "barrier", fault });
        told.note(&Error::AfterFault { fault, then: Box::new(absent) });
        assert_eq!(told.distance(), Distance::Root);
    }
}
