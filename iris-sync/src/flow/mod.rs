//! Skeletons of whole ops: what a workgroup does in one launch, generic over [`Memory`] and over
//! the tiles it moves. The CPU kernels and the models run the same code; a device kernel may be
//! shaped otherwise, as long as it uses the same functions of [`Workgroup`].
//!
//! | skeleton | ops |
//! |---|---|
//! | [`one_shot`] | all-reduce with or without a product in front |
//! | [`two_shot`] | the same, each tile reduced by its owner |
//! | [`reduce_scatter`] | its first half |
//! | [`deliver`] | all-gather, all-to-all, broadcast, product then all-gather |
//! | [`relay`] | broadcast, each tile passed on by one of those that get it |
//! | [`pull`], [`staged`] | all-gather then product |
//! | [`zero`], [`add`], [`convert`] with [`barrier()`] between | all-reduce by lock or atomic |
//! | [`exchange`] | the collectives without a product, of small messages: words that carry their data |
//! | [`open`], [`copies`] beside [`gate`] or [`Arrivals`], [`close`] | all-gather by a copy engine, then product |
//! | [`open`], [`Departures`] with [`Arrivals`], [`close`] | product stored to owners, who add, from its epilogue |
//! | [`gather`] then [`barrier()`] then [`local`] | all-gather, barrier, product |

mod accumulate;
mod copied;
mod deliver;
mod gather;
mod ll;
mod reduce;

pub use accumulate::{AccumulateTiles, add, convert, zero};
pub use copied::{Arrivals, CopiedTiles, Departures, close, copies, gate, open};
pub use deliver::{DeliverTiles, Delivery, Relays, deliver, relay};
pub use gather::{GatherTiles, StagedTiles, Staging, gather, local, pull, staged};
pub use ll::{Exchange, LlRows, LlTile, LlTiles, exchange, exchange_rows, exchange_tile};
pub use reduce::{Owners, ReduceTiles, Turns, one_shot, reduce_scatter, two_shot};

use std::iter::StepBy;
use std::ops::Range;

use crate::barrier::Members;
use crate::{Channel, End, Memory, Record, Stop, Workgroup};

/// What every launch is given: the words, where they lie, what this rank says about the call, and
/// which of how many workgroups this is.
pub struct Launch<'a, M: Memory + ?Sized> {
    /// The words.
    pub m: &'a M,
    /// Where they lie.
    pub channel: &'a Channel,
    /// What this rank says about the call.
    pub record: &'a Record,
    /// Index of this workgroup.
    pub index: u32,
    /// Workgroups in the launch.
    pub count: u32,
}

impl<M: Memory + ?Sized> Launch<'_, M> {
    /// Begin, run `body`, and count the workgroup out on every path.
    pub fn run(
        &self,
        end: End,
        body: impl FnOnce(&mut Workgroup<'_, M>) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let mut wg = Workgroup::begin(self.m, self.channel, (self.index, self.count), self.record);
        let result = body(&mut wg);
        wg.finish(end, result)
    }
}

/// A launch that is a barrier of `members` and nothing else: one workgroup.
pub fn barrier<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    phase: u32,
    members: Members,
    end: End,
) -> Result<(), Stop> {
    launch.run(end, |wg| wg.barrier(phase, members))
}

/// Of the items in front of `end` those of a workgroup: number `first`, and every so many behind it.
fn every(first: u32, step: u32, end: u32) -> StepBy<Range<u32>> {
    (first..end).step_by(step as usize)
}
