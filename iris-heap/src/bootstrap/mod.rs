//! Bootstrap: the ways in which the ranks of a world meet and exchange small messages on the host.

use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::util::unsupported;

pub(crate) use loss::lost_rank;
pub(crate) use peer::is_readable;
pub use process::ProcessId;

mod ancestors;
mod connection;
mod entrance;
mod frames;
mod gather;
mod held;
mod hub;
pub(crate) mod launcher_env;
mod launcher_hosts;
mod launcher_nesting;
#[cfg(test)]
mod launcher_pairs;
pub(crate) mod launchers;
mod link;
mod loss;
mod mailbox;
pub(crate) mod nodes;
pub(crate) mod notice;
mod peer;
mod presence;
pub(crate) mod process;
mod relay;
pub(crate) mod rendezvous;
mod socket;
mod starter;
pub(crate) mod tcp;
pub(crate) mod threads;
pub(crate) mod unique_id;
pub(crate) mod unix;

/// Callback for the loss of a peer; called once, from any thread, when the world cannot continue.
pub type Watcher = Arc<dyn Fn(&Error) + Send + Sync>;

/// Rust object that ranks which are threads of one process can exchange.
pub type Object = Arc<dyn Any + Send + Sync>;

/// Function called with the ranks that have not arrived in an exchange.
pub type Missing = dyn Fn(&[usize]) + Send + Sync;

/// Callback during a wait in an exchange, called with the missing ranks each time they are
/// determined. It runs on the waiting thread while locks are held, so it must not block.
#[derive(Clone)]
pub struct OnMissing(pub Arc<Missing>);

impl fmt::Debug for OnMissing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnMissing")
    }
}

/// Name and deadline of one exchange between the ranks.
#[derive(Clone, Debug)]
pub struct Step {
    /// Kind and call site of the exchange, for errors.
    pub what: String,
    /// Time at which the exchange fails if ranks are missing.
    pub deadline: Instant,
    /// Callback during the wait, called with the ranks that are missing.
    pub on_missing: Option<OnMissing>,
    /// Number by which notices and errors name each rank; `None` if they use the ranks' numbers in
    /// this world.
    pub numbers: Option<Arc<[usize]>>,
}

impl Step {
    /// Number by which notices and errors name `rank`.
    pub(crate) fn number(&self, rank: usize) -> usize {
        self.numbers.as_ref().and_then(|all| all.get(rank)).copied().unwrap_or(rank)
    }
}

/// Transport of a [`World`](crate::World)'s exchanges. Implemented for threads of a process, for
/// processes of one host and for several hosts; other transports can be added.
///
/// All methods except [`watch`](Bootstrap::watch), [`lost`](Bootstrap::lost),
/// [`give_up`](Bootstrap::give_up) and [`leave`](Bootstrap::leave) are collective and must be
/// called in the same order on every rank; the world ensures this and tags its messages. After an
/// error of a collective method the bootstrap is broken, and every further call of a collective
/// method returns that error.
pub trait Bootstrap: Send + Sync {
    /// Number of this rank in the world.
    fn rank(&self) -> usize;

    /// Number of ranks of the world.
    fn size(&self) -> usize;

    /// Exchanges bytes: returns the bytes of every rank, indexed by rank.
    ///
    /// # Errors
    /// [`Error::Absent`] with the ranks that did not arrive by the deadline; [`Error::PeerLost`].
    fn allgather(&self, bytes: &[u8], step: &Step) -> Result<Vec<Vec<u8>>>;

    /// Waits until every rank has called this method.
    ///
    /// # Errors
    /// Errors of [`Bootstrap::allgather`].
    fn barrier(&self, step: &Step) -> Result<()> {
        self.allgather(&[], step).map(drop)
    }

    /// Exchanges file descriptors: returns duplicates of every rank's descriptors, indexed by rank.
    /// `counts` are the numbers of the ranks' descriptors.
    ///
    /// # Errors
    /// Errors of [`Bootstrap::allgather`]; [`Error::Unsupported`] if the transport cannot pass
    /// descriptors.
    fn share_descriptors(
        &self,
        descriptors: Vec<OwnedFd>,
        counts: &[usize],
        step: &Step,
    ) -> Result<Vec<Vec<OwnedFd>>> {
        let _ = (descriptors, counts, step);
        Err(unsupported("passing descriptors", "the ranks are not on one host"))
    }

    /// Exchanges objects: returns every rank's object, indexed by rank.
    ///
    /// # Errors
    /// Errors of [`Bootstrap::allgather`]; [`Error::Unsupported`] unless
    /// [`Bootstrap::same_process`].
    fn share_objects(&self, object: Object, step: &Step) -> Result<Vec<Object>> {
        let _ = (object, step);
        Err(unsupported("sharing objects", "the ranks are not threads of one process"))
    }

    /// Process of a rank; `None` for a thread of this process, or if the process is unknown.
    fn process(&self, rank: usize) -> Option<ProcessId> {
        let _ = rank;
        None
    }

    /// Whether all ranks are threads of this process.
    fn same_process(&self) -> bool {
        false
    }

    /// Makes the bootstrap of a subset of the ranks. `members` are ranks of this bootstrap in the
    /// order of their new ranks, and include this rank; an empty list means that this rank joins no
    /// group. Collective over this bootstrap: every rank calls it with the members of its own
    /// group. `group` is a number that is equal on all ranks, and different in each call.
    ///
    /// # Errors
    /// Errors of [`Bootstrap::allgather`].
    fn split(
        &self,
        members: &[usize],
        group: u64,
        step: &Step,
    ) -> Result<Option<Arc<dyn Bootstrap>>>;

    /// Registers `watcher` for the loss of a peer; it is called at once if a peer is lost already.
    fn watch(&self, watcher: Watcher);

    /// Error about a lost peer, with which the watchers were called; `None` if no peer is lost.
    fn lost(&self) -> Option<Error>;

    /// Tells the peers that this rank takes part in no further exchange because of `error`. The
    /// exchanges of all ranks fail with this error, unless they have failed before. Watchers are
    /// called, except for [`Error::GaveUp`]. Never waits for another rank.
    fn give_up(&self, error: Error);

    /// Ends this rank's participation. `clean` is true after a collective close; if it is false,
    /// the peers get the error that this rank is lost. Never waits for another rank.
    fn leave(&self, clean: bool);
}
