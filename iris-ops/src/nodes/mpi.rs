//! Steps between nodes over MPI, on the CPU backend, with the feature `mpi`.
//!
//! **Problem.** The sockets of the rendezvous send all data through rank 0. MPI uses whatever
//! network connects the nodes.
//!
//! **Solution.** The ranks compare their descriptions of a step over the sockets, which have
//! deadlines and report lost ranks. Then MPI's collectives move the data, on a separate
//! communicator for each operator. Sums are added in this module, in the order of nodes, so that
//! all ranks get the same bits; MPI promises no order.
//!
//! **Limits.** MPI's calls have no deadline: if a rank dies while other ranks are in such a call,
//! only the launcher can end them, and mpirun does. MPI's own ports are not authenticated. A rank
//! of the world must have the same number in `MPI_COMM_WORLD`.

use std::fmt;
use std::mem::ManuallyDrop;

use iris_heap::{DType, World};
use mpi::Threading;
use mpi::environment::{Universe, is_finalized, is_initialized, threading_support};
use mpi::point_to_point::send_receive_into;
use mpi::topology::{Color, Communicator as _, SimpleCommunicator};
use mpi::traits::{CommunicatorCollectives, Root};

use super::exchange::Exchange;
use super::fabric::{Engine, sum};

/// Reason why MPI cannot be used, with the action that helps.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct MpiError(&'static str);

/// MPI, initialised for this process. Operators over several nodes that are made while this value
/// exists use MPI; keep the value until they have been freed. Its drop finalizes MPI, which all
/// ranks must do.
pub struct Mpi {
    /// Guard that finalizes MPI when it is dropped; `None` if the program itself had initialised
    /// MPI.
    _universe: Option<Universe>,
}

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Mpi")
    }
}

impl Mpi {
    /// Initialises MPI for calls from several threads: collective over all processes that mpirun
    /// started. If the program has already initialised MPI, this function only checks MPI, and a
    /// drop of the result finalizes nothing.
    ///
    /// # Errors
    /// [`MpiError`] if the library does not support calls from several threads, or has been
    /// finalized.
    pub fn init() -> Result<Self, MpiError> {
        if is_finalized() {
            return Err(MpiError(
                "MPI has been finalized, and cannot be initialised again; keep `Mpi` until \
                      the end of the program",
            ));
        }
        let universe = mpi::initialize_with_threading(Threading::Multiple).map(|(it, _)| it);
        match threading_support() {
            Threading::Multiple => Ok(Self { _universe: universe }),
            _ => Err(MpiError(
                "MPI does not support calls from several threads (MPI_THREAD_MULTIPLE); \
                      use an MPI that does, and if the program initialises it, ask for that level",
            )),
        }
    }

    /// Whether MPI carries the steps of `world` between nodes: whether each rank of the world has
    /// the same number in `MPI_COMM_WORLD`. Otherwise the sockets of the rendezvous carry them.
    pub fn carries(&self, world: &World) -> bool {
        is_ready(world)
    }
}

/// Whether MPI can carry the steps of a world: MPI is initialised for several threads, and its
/// ranks are the ranks of the world.
pub(super) fn is_ready(world: &World) -> bool {
    if !is_initialized() || is_finalized() || threading_support() != Threading::Multiple {
        return false;
    }
    let all = SimpleCommunicator::world();
    (all.rank() as usize, all.size() as usize) == (world.rank(), world.size())
}

/// Communicator of the ranks that have the same local rank, in the order of nodes.
pub(super) struct Communicator(ManuallyDrop<SimpleCommunicator>);

#[allow(unsafe_code, reason = "MPI allows calls from all threads at this level of threading")]
// SAFETY: the handle is a number or a pointer that only MPI reads, and `is_ready` has seen
// MPI_THREAD_MULTIPLE, with which MPI is called from any thread.
unsafe impl Send for Communicator {}
#[allow(unsafe_code, reason = "MPI allows calls from all threads at this level of threading")]
// SAFETY: MPI may be called from any thread, as for `Send`; a heap's steps run one after the other
// on one stream, so no two threads are in collectives of this communicator at a time.
unsafe impl Sync for Communicator {}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator(node {} of {})", self.0.rank(), self.0.size())
    }
}

impl Communicator {
    /// Splits MPI's world by local rank: collective over all ranks of the world.
    pub(super) fn new(world: &World) -> Self {
        let color = Color::with_value(world.local_rank() as i32);
        let part = SimpleCommunicator::world().split_by_color(color);
        Self(ManuallyDrop::new(part.expect("a color was given")))
    }

    /// Exchanges slots between nodes: returns each node's slot for this node, in the order of
    /// nodes.
    fn all_to_all(&self, from: &[u8]) -> Vec<u8> {
        let mut to = vec![0; from.len()];
        self.0.all_to_all_into(from, &mut to);
        to
    }

    fn all_gather(&self, from: &[u8], nodes: usize) -> Vec<u8> {
        let mut to = vec![0; nodes * from.len()];
        self.0.all_gather_into(from, &mut to);
        to
    }

    /// Splits `from` into `nodes` equal parts of whole elements, and returns the sum over all nodes
    /// of the part with this node's number.
    fn reduce_scatter(&self, dtype: DType, from: &[u8], nodes: usize) -> Vec<u8> {
        let len = from.len() / nodes;
        let parts = self.all_to_all(from);
        sum(dtype, (0..nodes).map(|node| parts[node * len..][..len].to_vec()))
    }
}

impl Engine for Communicator {
    fn exchange(
        &self,
        exchange: Exchange,
        mut from: Vec<u8>,
        (node, nodes): (usize, usize),
    ) -> iris_heap::Result<Vec<u8>> {
        // A step without data ends when the records have been compared. Open MPI would refuse such
        // a step, because its two empty buffers have the same address.
        if from.is_empty() {
            return Ok(from);
        }
        Ok(match exchange {
            Exchange::AllReduce(dtype) => {
                let len = from.len();
                // Pads the data to equal parts of whole elements for all nodes.
                from.resize(len.next_multiple_of(dtype.size() * nodes), 0);
                let part = self.reduce_scatter(dtype, &from, nodes);
                let mut all = self.all_gather(&part, nodes);
                all.truncate(len);
                all
            }
            Exchange::AllGather => self.all_gather(&from, nodes),
            Exchange::AllToAll => self.all_to_all(&from),
            Exchange::Broadcast { root } => {
                self.0.process_at_rank(root as i32).broadcast_into(&mut from[..]);
                from
            }
            Exchange::Shifts { first, shifts, sent } => {
                let len = sent.bytes(from.len(), (node, nodes)).len();
                let mut got = vec![0; shifts * len];
                let senders = Exchange::senders((first, shifts), (node, nodes));
                let receivers = Exchange::receivers((first, shifts), (node, nodes));
                for ((receiver, sender), to) in receivers.zip(senders).zip(got.chunks_mut(len)) {
                    let bytes = &from[sent.bytes(from.len(), (receiver, nodes))];
                    let [receiver, sender] =
                        [receiver, sender].map(|peer| self.0.process_at_rank(peer as i32));
                    send_receive_into(bytes, &receiver, to, &sender);
                }
                got
            }
        })
    }
}

impl Drop for Communicator {
    #[allow(unsafe_code, reason = "the communicator is freed only while MPI still runs")]
    fn drop(&mut self) {
        if !is_finalized() {
            // SAFETY: this is the only drop, and nothing uses the value afterwards.
            unsafe { ManuallyDrop::drop(&mut self.0) };
        }
    }
}
