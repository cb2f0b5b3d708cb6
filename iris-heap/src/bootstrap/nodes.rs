//! Bootstrap of ranks on several hosts: one connection of all ranks over TCP, and one of the ranks
//! of each node over Unix sockets, which can pass descriptors.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::rendezvous::Place;
use super::threads::Threads;
use super::unix::Processes;
use super::{Bootstrap, ProcessId, Step, Watcher};
use crate::error::{Error, Result};
use crate::wire::{Reader, Writer};
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
    /// `all`. `identity` is equal on all ranks of a node and on no others.
    pub(crate) fn join(
        all: Processes,
        (identity, name): (&str, &str),
        job: &str,
        timeout: Duration,
        step: &Step,
    ) -> Result<(Nodes, Hosts)> {
        let here = Writer::default().text(identity).text(name).finish();
        let mut ranks = Vec::with_capacity(all.size());
        for there in all.allgather(&here, step)? {
            let mut r = Reader::new("place of a rank", &there);
            ranks.push((r.text()?, r.text()?));
        }
        let hosts = Hosts::of(&ranks);
        hosts.check_order()?;
        let local = Nodes::meet_locally(&hosts, all.rank(), job, timeout);
        // Every rank learns whether any rank failed to connect to the ranks of its node.
        let mine = local.as_ref().err().map_or(String::new(), Error::to_string);
        let told = all.allgather(mine.as_bytes(), step);
        let local = local?;
        for (rank, message) in told?.iter().enumerate() {
            if !message.is_empty() {
                let message = String::from_utf8_lossy(message).into_owned();
                let what = "meeting the ranks of its node".into();
                return Err(Error::PeerFailed { rank, what, message });
            }
        }
        Ok((Nodes { all: Arc::new(all), local, hosts: hosts.clone() }, hosts))
    }

    fn meet_locally(
        hosts: &Hosts,
        rank: usize,
        job: &str,
        timeout: Duration,
    ) -> Result<Arc<dyn Bootstrap>> {
        let place = hosts.place(rank);
        if place.local_size == 1 {
            return Ok(Arc::new(Threads::all(1).remove(0)));
        }
        let meeting = Place::new(format!("{job}, node {}", place.node), false)?;
        let (rank, size) = (place.local_rank, place.local_size);
        Ok(Arc::new(Processes::rendezvous(meeting, rank, size, timeout)?))
    }
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
        step: &Step,
    ) -> Result<Vec<Vec<OwnedFd>>> {
        // The ranks may have met over the network although all of them are on one host.
        match (self.hosts.nodes(), self.size()) {
            (1, 1) => Ok(vec![descriptors]),
            (1, _) => self.local.share_descriptors(descriptors, step),
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

    fn leave(&self, clean: bool) {
        self.local.leave(clean);
        self.all.leave(clean);
    }
}
