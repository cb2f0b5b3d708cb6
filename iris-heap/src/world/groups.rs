//! Division of nodes into groups of ranks whose devices can access each other's memory.

use super::World;
use super::hosts::Hosts;
use crate::encoding::{Reader, Writer};
use crate::error::{Result, list_texts};
use crate::util::host_name;

/// Device of a rank, and devices whose memory it cannot access. The default is the CPU, whose
/// memory all ranks of a node can access.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PeerAccess {
    /// Identifier of the device, equal in all processes; empty for the CPU.
    pub(crate) device: String,
    /// Index of the device among those that the rank's process sees.
    pub(crate) index: usize,
    /// Identifiers of the visible devices whose memory the device cannot access. A device that the
    /// process does not see is not among them, because the driver says nothing about it.
    pub(crate) denied: Vec<String>,
}

impl PeerAccess {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut message = Writer::default();
        message.text(&self.device).u64(self.index as u64).u64(self.denied.len() as u64);
        for device in &self.denied {
            message.text(device);
        }
        message.finish()
    }

    fn decode(message: &[u8]) -> Result<PeerAccess> {
        let mut r = Reader::new("peer access of a device", message);
        let (device, index) = (r.text()?, r.u64()? as usize);
        let denied = (0..r.u64()?).map(|_| r.text()).collect::<Result<_>>()?;
        Ok(PeerAccess { device, index, denied })
    }

    /// Whether both devices can access each other's memory.
    fn is_mutual(&self, other: &PeerAccess) -> bool {
        let denies = |a: &PeerAccess, b: &PeerAccess| a.denied.contains(&b.device);
        self.device == other.device || !(denies(self, other) || denies(other, self))
    }
}

/// Pairs of ranks, in ascending order, that share a node and whose devices cannot access each
/// other's memory in at least one direction.
fn pairs_without_access(hosts: &Hosts, devices: &[PeerAccess]) -> Vec<(usize, usize)> {
    let ranks = 0..devices.len();
    let pairs = ranks.clone().flat_map(|a| (a + 1..ranks.end).map(move |b| (a, b)));
    let lacks = |&(a, b): &(usize, usize)| {
        hosts.node(a) == hosts.node(b) && !devices[a].is_mutual(&devices[b])
    };
    pairs.filter(lacks).collect()
}

/// Largest divisor of `per_node` for which no group of that many consecutive ranks contains a pair
/// of `apart`. All nodes get groups of this size, because all nodes of a world have equally many
/// ranks. The result is at least 1, because a group of one rank contains no pair.
fn ranks_per_group(per_node: usize, apart: &[(usize, usize)]) -> usize {
    let fits = |size: usize| apart.iter().all(|&(a, b)| a / size != b / size);
    (1..=per_node).rev().find(|&size| per_node.is_multiple_of(size) && fits(size)).unwrap_or(1)
}

impl World {
    /// Returns this world with smaller nodes of equal size, so that the devices of each node can
    /// access each other's memory; `None` if this holds for the present nodes. `told` has the
    /// encoded [`PeerAccess`] of each rank, and all ranks compute the same nodes from it. Rank 0
    /// logs which devices lack access.
    pub(crate) fn grouped_by_access(&self, told: &[Vec<u8>]) -> Result<Option<World>> {
        let devices = told.iter().map(|it| PeerAccess::decode(it)).collect::<Result<Vec<_>>>()?;
        let apart = pairs_without_access(self.hosts(), &devices);
        if apart.is_empty() {
            return Ok(None);
        }
        let size = ranks_per_group(self.local_size(), &apart);
        let world = self.with_nodes(self.hosts().divided(size, &host_name()));
        if self.rank() == 0 {
            tracing::warn!(
                nodes = world.nodes(),
                ranks_per_node = size,
                "no peer access between {}: the ranks are grouped into nodes, and data between nodes go over \
                 NCCL or RCCL",
                list_pairs(&devices, &apart)
            );
        }
        Ok(Some(world))
    }
}

/// Lists pairs of devices as text: each pair once, at most eight pairs.
fn list_pairs(devices: &[PeerAccess], pairs: &[(usize, usize)]) -> String {
    const SHOWN: usize = 8;
    let device = |rank: usize| format!("GPU {} (rank {rank})", devices[rank].index);
    let ids = |&(a, b): &(usize, usize)| [&devices[a].device, &devices[b].device];
    let first = |at: usize| !pairs[..at].iter().any(|pair| ids(pair) == ids(&pairs[at]));
    let mut texts: Vec<String> = (0..pairs.len())
        .filter(|&at| first(at))
        .map(|at| format!("{} and {}", device(pairs[at].0), device(pairs[at].1)))
        .collect();
    let more = texts.len().saturating_sub(SHOWN);
    texts.truncate(SHOWN);
    if more > 0 {
        texts.push(format!("{more} more pairs"));
    }
    match &texts[..] {
        [one] => one.clone(),
        _ => list_texts(texts.iter().map(|text| format!("({text})")).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Devices of ranks; `denied` has pairs (device, another device whose memory it cannot access).
    fn devices(of_ranks: &[usize], denied: &[(usize, usize)]) -> Vec<PeerAccess> {
        let name = |device: usize| format!("GPU-{device:02x}");
        let device = |&index: &usize| {
            let peers = denied.iter().filter(|(device, _)| *device == index);
            let denied = peers.map(|&(_, peer)| name(peer)).collect();
            PeerAccess { device: name(index), index, denied }
        };
        of_ranks.iter().map(device).collect()
    }

    /// Divides one node whose ranks have the devices `of_ranks`, and returns the number of ranks
    /// per new node; `None` if the node is not divided. `denied` is passed to [`devices`].
    fn grouped(of_ranks: &[usize], denied: &[(usize, usize)]) -> Option<usize> {
        let apart = pairs_without_access(&Hosts::one(of_ranks.len()), &devices(of_ranks, denied));
        (!apart.is_empty()).then(|| ranks_per_group(of_ranks.len(), &apart))
    }

    #[test]
    fn groups_are_the_largest_equal_blocks_with_access() {
        let across = [(0, 2), (0, 3), (1, 2), (1, 3)];
        assert_eq!(grouped(&[0, 1, 2, 3], &[]), None);
        assert_eq!(grouped(&[0, 1, 2, 3], &across), Some(2));
        // A group is divided even if access is denied in one direction only.
        assert_eq!(grouped(&[0, 1, 2, 3], &across.map(|(a, b)| (b, a))), Some(2));
        assert_eq!(grouped(&[0, 1, 2], &[(0, 2)]), Some(1));
        assert_eq!(grouped(&[0, 1], &[(1, 0)]), Some(1));
        // The groups would have unequal sizes (ranks 0 to 2, and rank 3), or ranks that are not
        // consecutive, so each rank becomes a node.
        assert_eq!(grouped(&[0, 1, 2, 3], &[(0, 3), (1, 3), (2, 3)]), Some(1));
        assert_eq!(grouped(&[0, 2, 1, 3], &across), Some(1));
        // Ranks that share a device have access to each other's memory, even if the driver denies a
        // device access to itself.
        assert_eq!(grouped(&[0, 0, 1, 1], &[(0, 0), (0, 1)]), Some(2));
        assert_eq!(grouped(&[5, 5], &[(5, 5)]), None);
        // Ranks on the CPU.
        let cpu = vec![PeerAccess::default(); 3];
        assert_eq!(pairs_without_access(&Hosts::one(3), &cpu), []);
    }

    #[test]
    fn only_ranks_of_one_node_need_access() {
        let place = |node: &str| (node.to_string(), format!("host {node}"));
        let hosts = Hosts::of(&["a", "a", "a", "a", "b", "b", "b", "b"].map(place));
        // The fifth rank has another host's device 0, with another identifier.
        let told = devices(&[0, 1, 2, 3, 10, 11, 12, 13], &[(0, 2), (1, 3), (0, 10)]);
        let apart = pairs_without_access(&hosts, &told);
        assert_eq!(apart, [(0, 2), (1, 3)]);
        assert_eq!(ranks_per_group(4, &apart), 2);
        let divided = hosts.divided(2, "this machine");
        assert_eq!((divided.nodes(), divided.ranks(3)), (4, vec![6, 7]));
        assert_eq!(divided.name(5), "host b (node 2)");
        let one = Hosts::one(2).divided(1, "this machine");
        assert_eq!((one.nodes(), one.name(1)), (2, "this machine (node 1)"));
    }

    #[test]
    fn messages_name_each_pair_of_devices_once() {
        let told = devices(&[0, 0, 1], &[]);
        let text = list_pairs(&told, &[(0, 2), (1, 2)]);
        assert_eq!(text, "GPU 0 (rank 0) and GPU 1 (rank 2)");
        let told = devices(&[0, 1, 2, 3, 4], &[]);
        let all: Vec<_> = (0..5).flat_map(|a| (a + 1..5).map(move |b| (a, b))).collect();
        let text = list_pairs(&told, &all);
        assert!(text.contains("(GPU 0 (rank 0) and GPU 1 (rank 1)), "), "{text}");
        assert!(text.ends_with(" and (2 more pairs)"), "{text}");
    }

    #[test]
    fn peer_access_is_decoded_as_it_was_encoded() {
        for access in devices(&[3, 4], &[(3, 4), (3, 5)]) {
            assert_eq!(PeerAccess::decode(&access.encode()).unwrap(), access);
        }
    }
}
