//! Losses of ranks: which errors are losses, whom they name, and what ends the exchanges of a group.

use super::Watcher;
use crate::error::Error;

/// Whether `error`, which ended the exchanges, also ends the calls of waiting kernels. False for an
/// absence, because the rank may only be late, and for a rank that gave up, because that rank has
/// told the kernels itself.
pub(super) fn is_loss(error: &Error) -> bool {
    !matches!(error, Error::Absent { .. } | Error::GaveUp { .. })
}

/// Error that a group of `members` gets if the process that carries the group's messages has ended.
/// `rank` is the rank of that process, and all numbers are those of the world of all launched
/// ranks. The error is the loss of a member if `rank` is one.
pub(super) fn loss_of_carrier(members: &[usize], rank: usize) -> Error {
    match members.iter().position(|&member| member == rank) {
        Some(rank) => Error::PeerLost { rank },
        None => Error::HubLost { rank },
    }
}

/// Rank that `error` names as lost; `None` for other errors.
pub(crate) fn lost_rank(error: &Error) -> Option<usize> {
    match error {
        Error::PeerLost { rank } | Error::PeerAborted { rank, .. } => Some(*rank),
        _ => None,
    }
}

/// Watchers (callbacks for a lost peer) to be called without a lock, each with its error.
pub(super) type Told = Vec<(Watcher, Error)>;

/// Calls the watchers.
pub(super) fn tell(told: Told) {
    told.into_iter().for_each(|(watcher, error)| watcher(&error));
}

/// End of a group's exchanges.
#[derive(Default)]
pub(super) struct GroupEnd {
    /// Reason why the group can make no further exchange; `None` while it can.
    pub(super) broken: Option<Error>,
    /// First loss of a peer; differs from `broken` if the group broke earlier for another reason.
    pub(super) lost: Option<Error>,
    watchers: Vec<Watcher>,
}

impl GroupEnd {
    /// Ends the exchanges with `error`. If they have ended already, the earlier error is kept, because
    /// this one may be a consequence. Returns the watchers to call if `error` is a loss.
    pub(super) fn fail(&mut self, error: &Error) -> Told {
        self.broken.get_or_insert_with(|| error.clone());
        if !is_loss(error) {
            return Told::new();
        }
        self.lost.get_or_insert_with(|| error.clone());
        self.dismiss().into_iter().map(|watcher| (watcher, error.clone())).collect()
    }

    /// Removes the watchers.
    pub(super) fn dismiss(&mut self) -> Vec<Watcher> {
        std::mem::take(&mut self.watchers)
    }

    /// Adds a watcher, or returns it to be called if a peer is lost already.
    pub(super) fn watch(&mut self, watcher: Watcher) -> Told {
        match &self.lost {
            Some(error) => vec![(watcher, error.clone())],
            None => {
                self.watchers.push(watcher);
                Told::new()
            }
        }
    }
}
