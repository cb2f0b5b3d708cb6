//! Nodes of a world: which ranks share a node, and the host names.

use std::sync::Arc;

use super::Place;
use crate::error::{Error, Result, list_ranks};
use crate::util::unsupported;

/// Name of the only host of a world that does not know its hosts' names.
const THIS_HOST: &str = "this host";

/// Node of each rank, and host name of each node. Nodes are numbered in the order of their lowest
/// ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hosts {
    node_of: Vec<usize>,
    names: Vec<String>,
    /// Number by which errors name each rank, by rank; `None` if errors use the ranks' numbers in
    /// this world.
    numbers: Option<Arc<[usize]>>,
}

impl Hosts {
    /// Makes a single node with `size` ranks.
    pub(crate) fn one(size: usize) -> Hosts {
        Hosts { node_of: vec![0; size], names: vec![THIS_HOST.into()], numbers: None }
    }

    /// Groups ranks into nodes; `ranks` has (identity of the node, name of its host) for each rank.
    pub(crate) fn of(ranks: &[(String, String)]) -> Hosts {
        let mut identities: Vec<&str> = Vec::new();
        let mut names = Vec::new();
        let mut node_of = Vec::with_capacity(ranks.len());
        for (identity, name) in ranks {
            let known = identities.iter().position(|known| known == identity);
            node_of.push(known.unwrap_or_else(|| {
                identities.push(identity);
                names.push(name.clone());
                identities.len() - 1
            }));
        }
        Hosts { node_of, names, numbers: None }
    }

    /// Sets the numbers by which errors name the ranks.
    pub(crate) fn numbered(self, numbers: Vec<usize>) -> Hosts {
        Hosts { numbers: Some(numbers.into()), ..self }
    }

    /// Numbers by which errors name the ranks; `None` if errors use the ranks' numbers in this
    /// world.
    pub(crate) fn numbers(&self) -> Option<Arc<[usize]>> {
        self.numbers.clone()
    }

    /// Number by which errors name `rank`.
    pub(crate) fn number(&self, rank: usize) -> usize {
        self.numbers.as_ref().and_then(|all| all.get(rank)).copied().unwrap_or(rank)
    }

    /// Nodes of the ranks in `members`, renumbered from 0.
    pub(crate) fn part(&self, members: &[usize]) -> Hosts {
        let node = |&rank: &usize| (self.node_of[rank].to_string(), self.name(rank).to_string());
        Hosts::of(&members.iter().map(node).collect::<Vec<_>>())
    }

    /// Divides each node into nodes of `per_node` consecutive ranks; `per_node` must divide the
    /// number of ranks of a node. Names of divided nodes get the new node's number appended;
    /// `this_host` replaces [`THIS_HOST`] in names.
    pub(crate) fn divided(&self, per_node: usize, this_host: &str) -> Hosts {
        let node_of: Vec<usize> = (0..self.node_of.len()).map(|rank| rank / per_node).collect();
        let nodes = node_of.last().map_or(0, |last| last + 1);
        let name = |node: usize| {
            let rank = node * per_node;
            let whole = self.place(rank).local_size == per_node;
            let name = match self.name(rank) {
                THIS_HOST => this_host,
                name => name,
            };
            if whole { name.to_owned() } else { format!("{name} (node {node})") }
        };
        Hosts { node_of, names: (0..nodes).map(name).collect(), numbers: self.numbers.clone() }
    }

    pub(crate) fn nodes(&self) -> usize {
        self.names.len()
    }

    /// Name of the host of `rank`.
    pub(crate) fn name(&self, rank: usize) -> &str {
        &self.names[self.node_of[rank]]
    }

    /// Name of the host of `node`.
    pub(crate) fn node_name(&self, node: usize) -> &str {
        &self.names[node]
    }

    /// Index of the node of `rank`.
    pub(crate) fn node(&self, rank: usize) -> usize {
        self.node_of[rank]
    }

    /// Ranks of the node `node` in ascending order.
    pub(crate) fn ranks(&self, node: usize) -> Vec<usize> {
        (0..self.node_of.len()).filter(|&rank| self.node_of[rank] == node).collect()
    }

    /// Position of `rank`: its node, its local rank (number within the node), and the number of
    /// ranks of the node.
    pub(crate) fn place(&self, rank: usize) -> Place {
        let node = self.node_of[rank];
        let ranks = self.ranks(node);
        let local_rank = ranks.iter().position(|&other| other == rank).unwrap_or_default();
        Place { node, local_rank, local_size: ranks.len() }
    }

    /// Checks that ranks are numbered node by node: first all ranks of node 0, then all ranks of
    /// node 1, and so on.
    ///
    /// # Errors
    /// [`Error::Unsupported`] that names two nodes whose ranks are interleaved.
    pub(crate) fn check_order(&self) -> Result<()> {
        let Some(rank) = (1..self.node_of.len()).find(|&r| self.node_of[r] < self.node_of[r - 1])
        else {
            return Ok(());
        };
        let (node, before) = (self.list(self.node_of[rank]), self.list(self.node_of[rank - 1]));
        Err(unsupported(
            &format!("numbering ranks round-robin over nodes ({node}; {before})"),
            "ranks are numbered node by node: start them with `mpirun --map-by slot`, `srun \
             --distribution=block`, or RANK = GROUP_RANK * LOCAL_WORLD_SIZE + LOCAL_RANK",
        ))
    }

    /// Ranks of a node and the name of its host, as text.
    fn list(&self, node: usize) -> String {
        let ranks: Vec<_> = self.ranks(node).into_iter().map(|rank| self.number(rank)).collect();
        format!("rank {} on host {}", list_ranks(&ranks), self.names[node])
    }

    /// Checks that ranks are numbered node by node and that all nodes have equal numbers of ranks.
    ///
    /// # Errors
    /// Errors of [`Hosts::check_order`]; [`Error::Unsupported`] that names two nodes of different
    /// sizes.
    pub(crate) fn check_even(&self, what: &str) -> Result<()> {
        self.check_order()?;
        let size = |node: usize| self.ranks(node).len();
        let Some(odd) = (1..self.nodes()).find(|&node| size(node) != size(0)) else {
            return Ok(());
        };
        let (first, odd) = (self.list(0), self.list(odd));
        Err(unsupported(
            &format!("{what} over nodes with unequal numbers of ranks ({first}; {odd})"),
            "start as many ranks on each node, and let IRIS_NODE, where it is set, be equal on all ranks of a node",
        ))
    }

    /// Adds host names to an error about ranks, if this world, or the world that it is a part of,
    /// has several nodes.
    pub(crate) fn describe(&self, mut error: Error) -> Error {
        if self.nodes() <= 1 && self.numbers.is_none() {
            return error;
        }
        let is_known = |rank: &usize| *rank < self.node_of.len();
        let place = |rank: &usize| (self.number(*rank), self.name(*rank).to_owned());
        match &mut error {
            Error::PeerLost { rank } if is_known(rank) => {
                let (rank, host) = place(rank);
                return Error::RankLost { rank, host };
            }
            Error::Absent { ranks, what, .. } => {
                let text = |(rank, host)| format!("rank {rank} is on host {host}");
                let places: Vec<_> =
                    ranks.iter().filter(|it| is_known(it)).map(|it| text(place(it))).collect();
                what.push_str(&format!(" ({})", places.join(", ")));
                ranks.iter_mut().for_each(|rank| *rank = self.number(*rank));
            }
            Error::PeerFailed { rank, what, .. } if is_known(rank) => {
                what.push_str(&format!(" on host {}", self.name(*rank)));
                *rank = self.number(*rank);
            }
            Error::PeerAborted { rank, host: host @ None, .. }
            | Error::GaveUp { rank, host: host @ None, .. }
                if is_known(rank) =>
            {
                let (number, name) = place(rank);
                (*rank, *host) = (number, Some(name));
            }
            _ => {}
        }
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn hosts(names: &[&str]) -> Hosts {
        let identity = |name: &&str| (format!("id of {name}"), name.to_string());
        Hosts::of(&names.iter().map(identity).collect::<Vec<_>>())
    }

    #[test]
    fn ranks_are_grouped_by_identity() {
        let two = hosts(&["a", "a", "b", "b"]);
        assert_eq!((two.nodes(), two.node(2), two.ranks(1)), (2, 1, vec![2, 3]));
        assert_eq!(two.place(3), Place { node: 1, local_rank: 1, local_size: 2 });
        two.check_even("a test").unwrap();
        let across = two.part(&[1, 3]);
        assert_eq!((across.nodes(), across.place(1).local_size), (2, 1));
        let second = two.part(&[2, 3]);
        assert_eq!((second.nodes(), second.node(0), second.name(0)), (1, 0, "b"));
    }

    #[test]
    fn other_numberings_are_refused_by_name() {
        let text = hosts(&["a", "b", "a", "b"]).check_order().unwrap_err().to_string();
        for part in ["round-robin", "rank 0 and 2 on host a; rank 1 and 3 on host b", "srun"] {
            assert!(text.contains(part), "{text}");
        }
        let uneven = hosts(&["a", "a", "b"]);
        uneven.check_order().unwrap();
        let text = uneven.check_even("a heap").unwrap_err().to_string();
        assert!(text.contains("rank 0 and 1 on host a; rank 2 on host b"), "{text}");
    }

    #[test]
    fn errors_name_hosts_where_there_are_several() {
        let lost = || Error::PeerLost { rank: 2 };
        let text = hosts(&["a", "a", "b"]).describe(lost()).to_string();
        assert!(text.contains("rank 2 on host b is lost"), "{text}");
        assert!(matches!(Hosts::one(3).describe(lost()), Error::PeerLost { rank: 2 }));
        let waited = Duration::from_secs(1);
        let absent = Error::Absent { ranks: vec![2], what: "barrier".into(), waited };
        let text = hosts(&["a", "a", "b"]).describe(absent.clone()).to_string();
        assert!(text.contains("rank 2 is on host b"), "{text}");
        // Two worlds: ranks 1, 3 and 5, each on a node of its own, and ranks 3 to 5 on one node.
        let across = hosts(&["a", "b", "c"]).numbered(vec![1, 3, 5]);
        let local = hosts(&["b", "b", "b"]).numbered(vec![3, 4, 5]);
        for (hosts, host) in [(across, "c"), (local, "b")] {
            let text = hosts.describe(lost()).to_string();
            assert!(text.contains(&format!("rank 5 on host {host} is lost")), "{text}");
            let text = hosts.describe(absent.clone()).to_string();
            assert!(text.contains(&format!("rank 5 is on host {host}")), "{text}");
            assert!(!text.contains("rank 2"), "{text}");
            let aborted = Error::PeerAborted { rank: 2, host: None, reason: "no room".into() };
            let text = hosts.describe(aborted).to_string();
            assert!(text.starts_with(&format!("rank 5 on host {host} gave up: no room")), "{text}");
            let (what, message) = ("alloc".into(), "no room".into());
            let text = hosts.describe(Error::PeerFailed { rank: 2, what, message }).to_string();
            assert!(text.starts_with(&format!("rank 5 failed in alloc on host {host}")), "{text}");
            assert!(!text.contains("rank 2"), "{text}");
        }
    }
}
