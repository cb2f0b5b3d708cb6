//! Skeletons of whole ops: the steps of a workgroup in one launch, generic over [`Memory`] and over
//! the tile operations. The CPU kernels and the models run these functions. A device kernel may be
//! structured differently if it uses the same functions of [`Workgroup`].
//!
//! | skeleton | ops |
//! |---|---|
//! | [`one_shot`] | all-reduce, with or without a matrix product before it |
//! | [`two_shot`] | all-reduce in which each tile is reduced by its owner |
//! | [`reduce_scatter`] | reduce-scatter: the first half of [`two_shot`] |
//! | [`deliver`] | all-gather, all-to-all, broadcast, product then all-gather |
//! | [`relay`] | broadcast in which one receiver of each tile forwards it to the others |
//! | [`pull`], [`staged`] | all-gather then product |
//! | [`zero`], [`add`], [`convert`] with [`barrier()`] between | all-reduce by lock or atomic |
//! | [`exchange`], [`exchange_rows`], [`exchange_tile`] | small messages, by the LL protocol (data and flag in one word) |
//! | [`two_shot_ll`] | small all-reduce or broadcast in two hops, by the LL protocol |
//! | [`open`], [`copies`] beside [`gate`] or [`Arrivals`], [`close`] | all-gather by a copy engine, then product |
//! | [`open`], [`Departures`] with [`Arrivals`], [`close`] | product whose epilogue stores tiles at their owners, which add them |
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
pub use ll::{
    Exchange, LlParts, LlRows, LlTile, LlTiles, Parts, exchange, exchange_rows, exchange_tile,
    two_shot_ll,
};
pub use reduce::{Owners, ReduceTiles, Turns, one_shot, reduce_scatter, two_shot};

use std::iter::StepBy;
use std::ops::Range;

use crate::barrier::Members;
use crate::{Aborted, Channel, End, Memory, Record, Workgroup};

/// Arguments of a launch, in the form in which one of its workgroups gets them.
pub struct Launch<'a, M: Memory + ?Sized> {
    /// Memory that holds the synchronisation words.
    pub m: &'a M,
    /// Layout of the synchronisation words of the op.
    pub channel: &'a Channel,
    /// This rank's description of the call, which is compared with the descriptions by its peers.
    pub record: &'a Record,
    /// Index of this workgroup in the launch.
    pub index: u32,
    /// Number of workgroups in the launch.
    pub count: u32,
}

impl<M: Memory + ?Sized> Launch<'_, M> {
    /// Begin the call, run `body`, and count the workgroup as finished even if `body` fails.
    pub fn run(
        &self,
        end: End,
        body: impl FnOnce(&mut Workgroup<'_, M>) -> Result<(), Aborted>,
    ) -> Result<(), Aborted> {
        let mut wg = Workgroup::begin(self.m, self.channel, (self.index, self.count), self.record);
        let result = body(&mut wg);
        wg.finish(end, result)
    }
}

/// Device barrier of the ranks `members`, as a launch of one workgroup that does nothing else.
pub fn barrier<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    phase: u32,
    members: Members,
    end: End,
) -> Result<(), Aborted> {
    launch.run(end, |wg| wg.barrier(phase, members))
}

/// Items `first`, `first + step`, ... below `end`: the items on which one workgroup works.
fn every(first: u32, step: u32, end: u32) -> StepBy<Range<u32>> {
    (first..end).step_by(step as usize)
}
