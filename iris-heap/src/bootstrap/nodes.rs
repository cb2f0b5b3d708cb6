//! Bootstrap of ranks on several hosts: one connection between all ranks over TCP, and for each
//! node one connection between its ranks over Unix sockets, which can pass descriptors.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::frames::{error_of_bytes, error_to_bytes};
use super::rendezvous::Place;
use super::threads::Threads;
use super::unique_id::UniqueId;
use super::unix::{Processes, grace};
use super::{Bootstrap, ProcessId, Step, Watcher};
use crate::encoding::{Reader, Writer};
use crate::error::{Error, Result};
use crate::root_error::{Distance, told};
use crate::world::hosts::Hosts;

/// Connections of one rank: to all ranks (`all`) and to the ranks of its own node (`local`), of a
/// world or of a group of its ranks.
pub(crate) struct Nodes {
    all: Arc<dyn Bootstrap>,
    local: Arc<dyn Bootstrap>,
    hosts: Hosts,
}

impl Nodes {
    /// Determines which ranks share a node, and connects the ranks of this node. Collective over
    /// `all`. `identity` is equal exactly for ranks of the same node.
    pub(crate) fn join(
        all: Processes,
        (identity, name): (&str, &str),
        job: &str,
        timeout: Duration,
        step: &Step,
    ) -> Result<(Nodes, Hosts)> {
        // Another job of the same name may meet on this host, so the node's meeting place is named
        // by a unique id of this world.
        let id = UniqueId::new()?.to_string();
        let here = Writer::default().text(identity).text(name).text(&id).finish();
        let (mut ranks, mut ids) = (Vec::with_capacity(all.size()), Vec::new());
        for there in all.allgather(&here, step)? {
            let mut r = Reader::new("place of a rank", &there);
            ranks.push((r.text()?, r.text()?));
            ids.push(r.text()?);
        }
        let job = format!("{job}, unique id {}", ids[0]);
        let hosts = Hosts::of(&ranks);
        hosts.check_order()?;
        let rank = all.rank();
        let all: Arc<dyn Bootstrap> = Arc::new(all);
        let local = Nodes::meet_locally(&all, &hosts, &job, timeout)
            .map_err(|error| in_world(error, &hosts.ranks(hosts.node(rank))));
        if let Err(own) = &local
            && Distance::of(own) == Distance::Root
        {
            // Other ranks of this node may wait for this rank, and there may be no file that tells
            // them of the failure.
            all.give_up(told(rank, MEETING, own));
        }
        // Every rank learns why any rank failed to connect to the ranks of its node.
        let mine = local.as_ref().err().map(|error| told(rank, MEETING, error));
        let mine = mine.map_or(Vec::new(), |error| error_to_bytes(&error));
        // Ranks of other nodes may enter this exchange at once, so the deadline must cover the
        // meeting of this node.
        let deadline = Instant::now() + timeout + 2 * grace(timeout);
        let step = &Step { deadline, ..step.clone() };
        let error = match all.allgather(&mine, step) {
            Ok(told) => {
                let errors = told.iter().filter(|bytes| !bytes.is_empty());
                root(errors.map(|bytes| error_of_bytes(bytes)).collect::<Result<_>>()?)
            }
            // This error comes from the connection of all ranks, which reports the rank that was
            // lost first. Other ranks of that rank's node may have ended since.
            Err(error) => Some(error),
        };
        match (local, error) {
            (Ok(local), None) => Ok((Nodes { all, local, hosts: hosts.clone() }, hosts)),
            (Err(own), _) if Distance::of(&own) == Distance::Root => Err(own),
            (Err(own), error) => Err(hosts.describe(error.unwrap_or(own))),
            (Ok(_), Some(error)) => Err(hosts.describe(error)),
        }
    }

    fn meet_locally(
        all: &Arc<dyn Bootstrap>,
        hosts: &Hosts,
        job: &str,
        timeout: Duration,
    ) -> Result<Arc<dyn Bootstrap>> {
        let place = hosts.place(all.rank());
        if place.local_size == 1 {
            return Ok(Arc::new(Threads::all(1).remove(0)));
        }
        let meeting = Place::new(format!("{job}, node {}", place.node), false)?.within(all.clone());
        let (rank, size) = (place.local_rank, place.local_size);
        Ok(Arc::new(Processes::rendezvous(meeting, rank, size, timeout)?))
    }
}

/// Name that errors give the step in which the ranks of a node meet.
const MEETING: &str = "meeting the ranks of its node";

/// Converts the ranks in an error from numbers on the node to numbers in the world; `ranks` are the
/// node's ranks in the world.
fn in_world(mut error: Error, ranks: &[usize]) -> Error {
    let renumber = |rank: &mut usize| *rank = ranks.get(*rank).copied().unwrap_or(*rank);
    match &mut error {
        Error::PeerLost { rank } | Error::PeerFailed { rank, .. } => renumber(rank),
        Error::Absent { ranks, what, .. } => {
            ranks.iter_mut().for_each(renumber);
            *what = MEETING.into();
        }
        _ => {}
    }
    error
}

/// Root cause among the errors that the ranks have reported: a rank's own failure, else the loss of
/// a rank, else an absence. A failure comes first, because other ranks see the failed rank as
/// absent or lost. [`Distance`] has an absence before a loss, because in calls a rank may end after
/// waiting too long for an absent rank. In a meeting no rank ends before all ranks have reported,
/// so a lost rank has ended by itself, and other ranks may report it as absent.
fn root(errors: Vec<Error>) -> Option<Error> {
    errors.into_iter().min_by_key(|error| match error {
        Error::PeerFailed { .. } => 0,
        Error::PeerLost { .. } | Error::LauncherLost { .. } => 1,
        _ => 2,
    })
}

impl Bootstrap for Nodes {
    fn rank(&self) -> usize {
        self.all.rank()
    }

    fn size(&self) -> usize {
        self.all.size()
    }

    fn allgather(&self, bytes: &[u8], step: &Step) -> Result<Vec<Vec<u8>>> {
        self.all.allgather(bytes, step)
    }

    fn share_descriptors(
        &self,
        descriptors: Vec<OwnedFd>,
        counts: &[usize],
        step: &Step,
    ) -> Result<Vec<Vec<OwnedFd>>> {
        // Descriptors can be passed if all ranks are on one node, even if they have met over the
        // network.
        match (self.hosts.nodes(), self.size()) {
            (1, 1) => Ok(vec![descriptors]),
            (1, _) => self.local.share_descriptors(descriptors, counts, step),
            _ => Err(crate::util::unsupported(
                "passing descriptors between hosts",
                "memory is shared within a node: use World::local",
            )),
        }
    }

    fn process(&self, rank: usize) -> Option<ProcessId> {
        self.all.process(rank)
    }

    /// A group within one node uses that node's own connection; a group over several nodes has both
    /// connections, as the world has.
    fn split(
        &self,
        members: &[usize],
        group: u64,
        step: &Step,
    ) -> Result<Option<Arc<dyn Bootstrap>>> {
        let node = self.hosts.node(self.rank());
        let on_node = members.iter().filter(|&&rank| self.hosts.node(rank) == node);
        let on_node: Vec<_> = on_node.map(|&rank| self.hosts.place(rank).local_rank).collect();
        let local = self.local.split(&on_node, group, step)?;
        if on_node.len() == members.len() {
            return Ok(local);
        }
        let all = self.all.split(members, group, step)?;
        Ok(all.zip(local).map(|(all, local)| -> Arc<dyn Bootstrap> {
            Arc::new(Nodes { all, local, hosts: self.hosts.part(members) })
        }))
    }

    fn watch(&self, watcher: Watcher) {
        self.all.watch(watcher);
    }

    fn lost(&self) -> Option<Error> {
        self.all.lost()
    }

    fn give_up(&self, error: Error) {
        self.all.give_up(error);
    }

    fn leave(&self, clean: bool) {
        // Leave the connection of all ranks first, because it carries the reason: peers must get
        // the reason before the node's connection reports the loss.
        self.all.leave(clean);
        self.local.leave(clean);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_that_failed_is_named_by_its_number_in_the_world() {
        let ranks = [4, 5, 6];
        let absent =
            Error::Absent { ranks: vec![1], what: "rank 0".into(), waited: Duration::ZERO };
        let own = Error::invalid("mode", 755, "700");
        let errors = [(4, Error::PeerLost { rank: 2 }), (5, own), (6, absent)];
        let all = errors.map(|(rank, error)| told(rank, MEETING, &in_world(error, &ranks)));
        let text = root(all.to_vec()).unwrap().to_string();
        assert!(text.starts_with("rank 5 failed in") && text.contains("mode is 755"), "{text}");
        let text = root(vec![all[2].clone(), all[0].clone()]).unwrap().to_string();
        assert!(text.starts_with("rank 6 is lost"), "{text}");
        let text = all[2].to_string();
        assert!(text.contains("for rank 5,") && !text.contains("rank 0"), "{text}");
    }
}
