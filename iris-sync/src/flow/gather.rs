use super::Launch;
use crate::barrier::Members;
use crate::{Aborted, End, Memory, Span};

/// Tile operations of an all-gather before a matrix product. Either the product reads shards from
/// the peers' memory, or each rank pushes its shard to all inboxes before a barrier.
pub trait GatherTiles {
    /// Write `part` of this rank's shard to the inbox of `peer`, or to this rank's own inbox if
    /// `peer` is this rank.
    fn push_part(&mut self, peer: u32, part: u32, parity: u32);
    /// Multiply the part of `tile` that depends on the shard of `source`, and add it to the
    /// accumulator.
    fn multiply(&mut self, tile: u32, source: u32, parity: u32);
    /// Write the finished `tile` to C.
    fn store(&mut self, tile: u32);
}

/// Assignment of staging units (pieces of the gathered matrix) to source ranks, and to the tiles of
/// C that need them. All functions are pure and depend only on values that all ranks agreed on.
pub trait Staging {
    /// Number of units (pieces) of the gathered matrix. Each unit comes from one rank; this rank's
    /// own units are not copied to the staging buffer.
    fn units(&self) -> u32;
    /// Number of the unit that is fetched at `position` in the fetch order.
    fn unit_at(&self, position: u32) -> u32;
    /// Rank that owns the data of `unit`.
    fn source(&self, unit: u32) -> u32;
    /// Number of tiles of C.
    fn tiles(&self) -> u32;
    /// Units (pieces of the gathered matrix) that are needed to compute `tile`, in the order in
    /// which they are multiplied.
    fn needs(&self, tile: u32) -> impl Iterator<Item = u32>;
}

/// Tile operations of a staged all-gather before a matrix product.
pub trait StagedTiles {
    /// Copy `unit` from its source to this device's staging buffer.
    fn fetch(&mut self, unit: u32);
    /// Multiply the part of `tile` that depends on `unit`, and add it to the accumulator.
    fn multiply_unit(&mut self, tile: u32, unit: u32);
    /// Write the finished `tile` to C.
    fn store(&mut self, tile: u32);
}

/// Push all `parts` of this rank's shard to every inbox. A device barrier must follow before
/// [`local`].
pub fn gather<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    parts: u32,
    body: &mut impl GatherTiles,
) -> Result<(), Aborted> {
    launch.run(End::Keep, |wg| {
        wg.enter()?;
        let (parity, me) = (wg.parity(), wg.channel.rank);
        for part in wg.share(parts) {
            wg.m.begin(Span::Fetch, part);
            body.push_part(me, part, parity);
            for peer in wg.channel.peers_in_turn(part) {
                wg.credit(peer)?;
                body.push_part(peer, part, parity);
            }
            wg.m.end(Span::Fetch);
        }
        Ok(())
    })
}

/// Multiply the shards that [`gather`] has pushed. This is the last launch of the call; it runs
/// after the device barrier.
pub fn local<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    tiles: u32,
    body: &mut impl GatherTiles,
) -> Result<(), Aborted> {
    launch.run(End::Advance, |wg| {
        wg.check_not_aborted()?;
        wg.wait_entries(Members::all(wg.channel.size))?;
        let parity = wg.parity();
        for tile in wg.share(tiles) {
            wg.m.begin(Span::Gemm, tile);
            for source in 0..wg.channel.size {
                body.multiply(tile, source, parity);
            }
            body.store(tile);
            wg.m.end(Span::Gemm);
        }
        Ok(())
    })
}

/// Multiply directly from the peers' shards in the peers' memory. No rank ends the call before all
/// peers have read its shard.
pub fn pull<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    tiles: u32,
    body: &mut impl GatherTiles,
) -> Result<(), Aborted> {
    launch.run(End::Pulled, |wg| {
        wg.enter()?;
        let (parity, me) = (wg.parity(), wg.channel.rank);
        for tile in wg.share(tiles) {
            for source in core::iter::once(me).chain(wg.channel.peers_in_turn(tile)) {
                if source != me {
                    wg.wait_entry(source)?;
                }
                wg.m.begin(Span::Gemm, tile);
                body.multiply(tile, source, parity);
                wg.m.end(Span::Gemm);
            }
            body.store(tile);
        }
        Ok(())
    })
}

/// Staged all-gather and product. The first `fetchers` workgroups copy remote units to a staging
/// buffer and raise a flag for each unit. The other workgroups multiply; they wait for the flag of
/// each unit before they read it.
///
/// This rank's own units are read in place. If `fetchers` is 0 or not less than the number of
/// workgroups, every workgroup first fetches its share and then multiplies. This cannot deadlock,
/// because a workgroup that fetches waits only for peers to enter the call.
pub fn staged<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    fetchers: u32,
    staging: &impl Staging,
    body: &mut impl StagedTiles,
) -> Result<(), Aborted> {
    launch.run(End::Pulled, |wg| {
        wg.enter()?;
        let (index, count, me) = (wg.index, wg.count, wg.channel.rank);
        let fetchers = if fetchers >= count { 0 } else { fetchers };
        let (fetches, multiplies) = (fetchers == 0 || index < fetchers, index >= fetchers);
        if fetches {
            let step = if fetchers == 0 { count } else { fetchers };
            for position in (index..staging.units()).step_by(step as usize) {
                let unit = staging.unit_at(position);
                if staging.source(unit) == me {
                    continue;
                }
                wg.wait_entry(staging.source(unit))?;
                wg.m.begin(Span::Fetch, unit);
                body.fetch(unit);
                wg.raise_flag(unit);
                wg.m.end(Span::Fetch);
            }
        }
        if multiplies {
            for tile in (index - fetchers..staging.tiles()).step_by((count - fetchers) as usize) {
                for unit in staging.needs(tile) {
                    if staging.source(unit) != me {
                        wg.wait_flag(unit, staging.source(unit))?;
                    }
                    wg.m.begin(Span::Gemm, tile);
                    body.multiply_unit(tile, unit);
                    wg.m.end(Span::Gemm);
                }
                body.store(tile);
            }
        }
        Ok(())
    })
}
