use super::Launch;
use crate::{Aborted, End, Memory, Span};

/// Tile operations of an all-reduce that adds partial tiles into an f32 workspace at the owner of
/// each tile.
pub trait AccumulateTiles {
    /// Set `tile` of this rank's own workspace to zero.
    fn zero(&mut self, tile: u32);
    /// Compute this rank's partial result of `tile`, in the type that is sent between ranks.
    fn produce(&mut self, tile: u32);
    /// Add this rank's partial result of `tile` to the workspace of `owner`. Either the caller
    /// holds the tile's lock, or the additions are atomic.
    fn add(&mut self, owner: u32, tile: u32);
    /// Read `tile` from the workspace of `owner` and write it to C.
    fn convert(&mut self, owner: u32, tile: u32);
}

/// Set the tiles that this rank owns in its workspace to zero. A device barrier must follow before
/// any rank adds to these tiles.
pub fn zero<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    tiles: u32,
    owner: impl Fn(u32) -> u32,
    body: &mut impl AccumulateTiles,
) -> Result<(), Aborted> {
    launch.run(End::Keep, |wg| {
        wg.enter()?;
        for tile in wg.share(tiles).filter(|&tile| owner(tile) == wg.channel.rank) {
            body.zero(tile);
        }
        Ok(())
    })
}

/// Add this rank's partial results to the workspaces of the tiles' owners; take the tile's lock for
/// each addition if `locked` is true. A device barrier must follow before any rank reads the sums.
pub fn add<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    tiles: u32,
    owner: impl Fn(u32) -> u32,
    locked: bool,
    body: &mut impl AccumulateTiles,
) -> Result<(), Aborted> {
    launch.run(End::Keep, |wg| {
        wg.check_not_aborted()?;
        for tile in wg.share(tiles) {
            wg.m.begin(Span::Gemm, tile);
            body.produce(tile);
            wg.m.end(Span::Gemm);
            let owner = owner(tile);
            if owner != wg.channel.rank {
                wg.wait_entry(owner)?;
            }
            if locked {
                wg.locked(owner, tile, || body.add(owner, tile))?;
            } else {
                body.add(owner, tile);
            }
        }
        Ok(())
    })
}

/// Read all tiles from their owners' workspaces into C. This is the last launch of the call. It
/// ends only when all ranks have read this rank's workspace, because the next call may use the
/// workspace for something else.
pub fn convert<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    tiles: u32,
    owner: impl Fn(u32) -> u32,
    body: &mut impl AccumulateTiles,
) -> Result<(), Aborted> {
    launch.run(End::Pulled, |wg| {
        wg.check_not_aborted()?;
        for tile in wg.share(tiles) {
            let owner = owner(tile);
            if owner != wg.channel.rank {
                wg.wait_entry(owner)?;
            }
            wg.m.begin(Span::Reduce, tile);
            body.convert(owner, tile);
            wg.m.end(Span::Reduce);
        }
        Ok(())
    })
}
