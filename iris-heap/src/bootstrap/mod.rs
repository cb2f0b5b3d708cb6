//! How ranks find each other and exchange small things on the host.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::util::unsupported;

mod connection;
mod frames;
mod gather;
mod hub;
pub(crate) mod launcher_env;
mod launcher_hosts;
mod mailbox;
pub(crate) mod nodes;
pub(crate) mod notice;
mod peer;
mod presence;
pub(crate) mod rendezvous;
mod socket;
pub(crate) mod tcp;
pub(crate) mod threads;
pub(crate) mod unix;

/// Called once, from any thread, when the world cannot go on: a peer is lost.
pub type Watcher = Arc<dyn Fn(&Error) + Send + Sync>;

/// An object that ranks of one process hand each other.
pub type Object = Arc<dyn Any + Send + Sync>;

/// One exchange: what to call it in errors, and how long to wait for the others.
#[derive(Clone, Debug)]
pub struct Step {
    /// Kind and call site.
    pub what: String,
    /// When to give up.
    pub deadline: Instant,
}

/// The exchange below a [`World`](crate::World): processes of a host, threads of a process; other
/// transports plug in here.
///
/// All methods but [`watch`](Bootstrap::watch), [`lost`](Bootstrap::lost) and [`leave`](Bootstrap::leave) are collective, in
/// the same order on every rank; the world above sees to that and tags what it sends. After an
/// error of a collective the bootstrap is broken, and every further collective returns that error.
pub trait Bootstrap: Send + Sync {
    /// This rank.
    fn rank(&self) -> usize;

    /// Ranks.
    fn size(&self) -> usize;

    /// Gives every rank the bytes of every rank, by rank.
    ///
    /// # Errors
    /// [`Error::Absent`] with the ranks that have not come by the deadline; [`Error::PeerLost`].
    fn allgather(&self, bytes: &[u8], step: &Step) -> Result<Vec<Vec<u8>>>;

    /// Returns when every rank has come.
    ///
    /// # Errors
    /// As [`Bootstrap::allgather`].
    fn barrier(&self, step: &Step) -> Result<()> {
        self.allgather(&[], step).map(drop)
    }

    /// Gives every rank duplicates of the descriptors of every rank, by rank.
    ///
    /// # Errors
    /// As [`Bootstrap::allgather`]; [`Error::Unsupported`] where descriptors cannot be passed.
    fn share_descriptors(
        &self,
        descriptors: Vec<OwnedFd>,
        step: &Step,
    ) -> Result<Vec<Vec<OwnedFd>>> {
        let _ = (descriptors, step);
        Err(unsupported("passing descriptors", "the ranks are not on one host"))
    }

    /// Gives every rank the object of every rank, by rank.
    ///
    /// # Errors
    /// As [`Bootstrap::allgather`]; [`Error::Unsupported`] unless [`Bootstrap::same_process`].
    fn share_objects(&self, object: Object, step: &Step) -> Result<Vec<Object>> {
        let _ = (object, step);
        Err(unsupported("sharing objects", "the ranks are not threads of one process"))
    }

    /// Whether all ranks are threads of this process.
    fn same_process(&self) -> bool {
        false
    }

    /// A bootstrap of `members`, ranks of this one in the order of their new ranks, this rank among
    /// them. Collective over this bootstrap: every rank calls it, with its own group's members, or
    /// none if it joins no group. `group` is the same on all ranks and used for one call only.
    ///
    /// # Errors
    /// As [`Bootstrap::allgather`].
    fn split(
        &self,
        members: &[usize],
        group: u64,
        step: &Step,
    ) -> Result<Option<Arc<dyn Bootstrap>>>;

    /// Has `watcher` told when a peer is lost, at once if one is lost already.
    fn watch(&self, watcher: Watcher);

    /// The loss that watchers were told about.
    fn lost(&self) -> Option<Error>;

    /// This rank is done: `clean` after a collective close, otherwise its peers are told that it
    /// is lost. Never waits.
    fn leave(&self, clean: bool);
}
