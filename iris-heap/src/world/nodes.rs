//! Worlds over several nodes: the world of one node's ranks, the world across nodes, and simulated
//! nodes for tests (ranks are threads of one process).

use std::fmt::Display;
use std::sync::Arc;

use super::hosts::Hosts;
use super::{World, check_size};
use crate::bootstrap::threads::Threads;
use crate::env::Settings;
use crate::error::{Error, Result};

impl World {
    /// Number of nodes: groups of ranks that can map each other's memory.
    pub fn nodes(&self) -> usize {
        self.hosts().nodes()
    }

    /// Name of the host on which `rank` runs; `this host` in a world of one node. If a host counts
    /// as several nodes, the node is appended to the name.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a rank that does not exist.
    pub fn host_of(&self, rank: usize) -> Result<&str> {
        match rank < self.size() {
            true => Ok(self.hosts().name(rank)),
            false => {
                Err(Error::invalid("rank of host_of", rank, format!("0 to {}", self.size() - 1)))
            }
        }
    }

    /// Host name of each node, by index.
    pub(crate) fn node_names(&self) -> Vec<String> {
        (0..self.nodes()).map(|node| self.hosts().node_name(node).to_owned()).collect()
    }

    /// Returns the world of the ranks on this rank's node, which can have a symmetric heap:
    /// collective. Close it before this world. Its errors name ranks by their numbers in this world.
    ///
    /// # Errors
    /// The errors of [`World::split`].
    #[track_caller]
    pub fn local(&self) -> Result<World> {
        self.part(self.node())
    }

    /// Returns the world of the ranks with this rank's local rank, one per node, in the order of
    /// nodes: collective. Close it before this world. Its errors name ranks by their numbers in this
    /// world.
    ///
    /// # Errors
    /// The errors of [`World::split`]; [`Error::Unsupported`], on all ranks, if ranks are not
    /// numbered node by node or nodes have unequal numbers of ranks.
    #[track_caller]
    pub fn across(&self) -> Result<World> {
        self.hosts().check_even("a world across nodes")?;
        self.part(self.local_rank())
    }

    /// Splits the world by `color`, and returns the part to which this rank belongs.
    #[track_caller]
    fn part(&self, color: usize) -> Result<World> {
        let part = self.split_by(Some(color as u32), self.rank() as i64, self.nodes() > 1)?;
        let with_rank = || format!("one with rank {}", self.rank());
        part.ok_or_else(|| Error::invalid("part of the world", color, with_rank()))
    }

    /// Checks that operators can run over the nodes of this world: all nodes have equally many
    /// ranks, and ranks are numbered node by node.
    pub(crate) fn check_nodes(&self, what: &str) -> Result<()> {
        self.hosts().check_even(what)
    }

    /// Creates a world of `nodes` simulated nodes with `per_node` ranks each, all of them threads
    /// of this process, to test programs for several hosts.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a size of 0, or above the largest size of a world.
    pub fn threads_on_nodes(
        nodes: usize,
        per_node: usize,
        settings: &Settings,
    ) -> Result<Vec<World>> {
        let size = nodes.saturating_mul(per_node);
        check_size("size of the world", size)?;
        settings.check()?;
        let identity = |rank: usize| {
            let node = rank / per_node;
            (node.to_string(), format!("node {node} of this process"))
        };
        let hosts = Hosts::of(&(0..size).map(identity).collect::<Vec<_>>());
        let world = |threads: Threads| {
            World::on_nodes(Arc::new(threads), settings.clone(), hosts.clone(), None)
        };
        Ok(Threads::all(size).into_iter().map(world).collect())
    }

    /// Runs `f` on the ranks of several simulated nodes, one thread each; otherwise like
    /// [`World::run_threads_each`].
    ///
    /// # Errors
    /// The errors of [`World::threads_on_nodes`].
    pub fn run_nodes_each<T, E, F>(
        (nodes, per_node): (usize, usize),
        settings: &Settings,
        f: F,
    ) -> Result<Vec<Result<T, E>>>
    where
        T: Send,
        E: Send + From<Error> + Display,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        let worlds = World::threads_on_nodes(nodes, per_node, settings)?;
        Ok(World::run_worlds(worlds, f))
    }

    /// Runs `f` on the ranks of several simulated nodes; otherwise like [`World::run_threads`].
    ///
    /// # Errors
    /// The errors of [`World::run_threads`].
    pub fn run_nodes<T, E, F>(nodes: usize, per_node: usize, f: F) -> Result<Vec<T>, E>
    where
        T: Send,
        E: Send + From<Error> + Display,
        F: Fn(World) -> Result<T, E> + Sync,
    {
        let settings = Settings::from_env()?;
        World::run_to_root(World::threads_on_nodes(nodes, per_node, &settings)?, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::util::lock;
    use crate::{HeapOptions, SymmetricHeap};

    /// Tests that waits in a part of a world name ranks by their numbers in the whole world.
    #[test]
    fn steps_of_a_part_of_a_world_have_numbers_of_the_world() {
        World::run_nodes(2, 2, |world| -> Result<()> {
            let (rank, local, across) = (world.rank(), world.local()?, world.across()?);
            for (part, numbers) in [
                (&world, vec![0, 1, 2, 3]),
                (&local, vec![rank & 2, rank | 1]),
                (&across, vec![rank & 1, rank | 2]),
            ] {
                let step = part.step("test", std::panic::Location::caller());
                let seen: Vec<_> = (0..part.size()).map(|rank| step.number(rank)).collect();
                assert_eq!(seen, numbers);
            }
            assert_eq!(local.numbered(["a".into(), "b".into()])[1], (rank | 1, "b".into()));
            across.close()?;
            local.close()?;
            world.close()
        })
        .unwrap();
    }

    #[test]
    fn a_world_over_nodes_forgets_heaps_that_are_closed() {
        World::run_nodes(2, 1, |world| -> Result<()> {
            for _ in 0..5 {
                let options = HeapOptions::new().data_bytes(1 << 12).threads(1);
                SymmetricHeap::open(&world, options)?.close()?;
                assert_eq!(lock(&world.inner.open).len(), 1, "the heap that was just closed");
            }
            world.close()
        })
        .unwrap();
    }
}
