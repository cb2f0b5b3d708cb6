use super::Launch;
use crate::barrier::Members;
use crate::{End, Memory, Span, Stop};

/// The tiles of an all-reduce or reduce-scatter, as the lanes of a workgroup move them.
///
/// `parity` names which half of the inbox a call uses.
pub trait ReduceTiles {
    /// Compute this rank's partial of `tile`, in the format it travels in.
    fn produce(&mut self, tile: u32);
    /// Write it to `peer`'s inbox, at this rank's place.
    fn push(&mut self, peer: u32, tile: u32, parity: u32);
    /// Keep it at this rank's own place in its own inbox.
    fn keep(&mut self, tile: u32, parity: u32);
    /// Add up the partials of `tile` in the fixed order of the op and write the result to C.
    fn reduce(&mut self, tile: u32, parity: u32);
    /// Write the result of `tile` to `peer`: into its C if `direct`, else into its inbox.
    fn push_result(&mut self, peer: u32, tile: u32, parity: u32, direct: bool);
    /// Copy the result of `tile` from the inbox to C.
    fn take_result(&mut self, tile: u32, parity: u32);
}

/// Each rank pushes its partial of every tile to all inboxes, and adds up all of them itself.
pub fn one_shot<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    tiles: u32,
    body: &mut impl ReduceTiles,
) -> Result<(), Stop> {
    launch.run(End::Advance, |wg| {
        wg.enter()?;
        let (parity, all) = (wg.parity(), Members::all(wg.channel.size));
        for tile in wg.share(tiles) {
            wg.m.begin(Span::Gemm, tile);
            body.produce(tile);
            body.keep(tile, parity);
            wg.m.end(Span::Gemm);
            wg.meet(all)?;
            wg.m.begin(Span::Signal, tile);
            for peer in wg.channel.peers() {
                body.push(peer, tile, parity);
            }
            wg.push_signals(all, tile);
            wg.m.end(Span::Signal);
        }
        for tile in wg.share(tiles) {
            wg.wait_tiles(all, tile)?;
            wg.m.begin(Span::Reduce, tile);
            body.reduce(tile, parity);
            wg.m.end(Span::Reduce);
        }
        Ok(())
    })
}

/// Each tile has an owner: sources push to it, it adds up and sends the one result to all.
pub fn two_shot<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    tiles: u32,
    owner: impl Fn(u32) -> u32,
    body: &mut impl ReduceTiles,
) -> Result<(), Stop> {
    reduce_at_owners(launch, tiles, owner, body, true)
}

/// Each tile has an owner: sources push to it, and it adds up.
pub fn reduce_scatter<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    tiles: u32,
    owner: impl Fn(u32) -> u32,
    body: &mut impl ReduceTiles,
) -> Result<(), Stop> {
    reduce_at_owners(launch, tiles, owner, body, false)
}

fn reduce_at_owners<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    tiles: u32,
    owner: impl Fn(u32) -> u32,
    body: &mut impl ReduceTiles,
    to_all: bool,
) -> Result<(), Stop> {
    launch.run(End::Advance, |wg| {
        wg.enter()?;
        let (parity, me) = (wg.parity(), wg.channel.rank);
        let all = Members::all(wg.channel.size);
        // First what others wait for, then our own.
        for mine in [false, true] {
            for tile in wg.share(tiles).filter(|&tile| (owner(tile) == me) == mine) {
                wg.m.begin(Span::Gemm, tile);
                body.produce(tile);
                wg.m.end(Span::Gemm);
                if mine {
                    body.keep(tile, parity);
                    continue;
                }
                let peer = owner(tile);
                wg.credit(peer)?;
                wg.m.begin(Span::Signal, tile);
                body.push(peer, tile, parity);
                wg.push_signal(peer, tile);
                wg.m.end(Span::Signal);
            }
        }
        for tile in wg.share(tiles).filter(|&tile| owner(tile) == me) {
            wg.wait_tiles(all, tile)?;
            wg.m.begin(Span::Reduce, tile);
            body.reduce(tile, parity);
            wg.m.end(Span::Reduce);
            if !to_all {
                continue;
            }
            wg.meet(all)?;
            wg.m.begin(Span::Signal, tile);
            for peer in wg.channel.peers() {
                let direct = wg.direct(peer)?;
                body.push_result(peer, tile, parity, direct);
            }
            wg.push_results(all, tile);
            wg.m.end(Span::Signal);
        }
        for tile in wg.share(tiles).filter(|&tile| to_all && owner(tile) != me) {
            wg.wait_result(owner(tile), tile)?;
            if !wg.direct(owner(tile))? {
                wg.m.begin(Span::Reduce, tile);
                body.take_result(tile, parity);
                wg.m.end(Span::Reduce);
            }
        }
        Ok(())
    })
}
