//! Worlds whose ranks are threads of a test, in addition to [`World::run_threads`].

use std::sync::Arc;
use std::thread;

use iris_heap::{HeapOptions, Network, Secret, SymmetricHeap, UniqueId, World};

use crate::free_port;

/// Runs `f` on a thread for each item, and returns the results in the order of the items.
///
/// # Panics
/// If `f` panics.
pub fn on_threads<I: Send, T: Send>(
    items: impl IntoIterator<Item = I>,
    f: impl Fn(I) -> T + Sync,
) -> Vec<T> {
    let f = &f;
    thread::scope(|scope| {
        let threads: Vec<_> = items.into_iter().map(|item| scope.spawn(move || f(item))).collect();
        let joined = threads.into_iter().map(thread::ScopedJoinHandle::join);
        joined.map(|it| it.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// Runs `test` on ranks that are threads, each with a heap that is opened with these options.
/// Closes heaps and worlds, and returns the result of each rank.
///
/// # Panics
/// If a rank fails.
#[track_caller]
pub fn on_heaps<T: Send>(
    size: usize,
    options: HeapOptions,
    test: impl Fn(World, Arc<SymmetricHeap>) -> anyhow::Result<T> + Sync,
) -> Vec<T> {
    let rank = |world: World| -> anyhow::Result<T> {
        let heap = SymmetricHeap::open(&world, options.clone())?;
        let result = test(world.clone(), heap.clone())?;
        heap.close()?;
        world.close()?;
        Ok(result)
    };
    World::run_threads(size, rank).unwrap_or_else(|error| panic!("{error:?}"))
}

/// Runs `f` on ranks that meet over loopback and are authenticated by a secret; returns the result
/// of each rank. `nodes` has the name of each rank's node, by rank.
///
/// # Panics
/// If `f` panics, or there is no free port or no randomness.
pub fn over_loopback<T: Send, E: Send + From<iris_heap::Error>>(
    nodes: &[impl AsRef<str> + Sync],
    f: impl Fn(World) -> Result<T, E> + Sync,
) -> Vec<Result<T, E>> {
    let network = || -> anyhow::Result<Network> {
        let port = free_port::on("127.0.0.1")?;
        let network = Network::new(format!("127.0.0.1:{port}"), &UniqueId::new()?);
        Ok(network.secret(Secret::new()?))
    };
    let network = network().unwrap_or_else(|error| panic!("{error}"));
    on_threads(0..nodes.len(), |rank| {
        let network = network.clone().node(nodes[rank].as_ref());
        f(World::over_network(&network, rank, nodes.len())?)
    })
}
