use super::Launch;
use crate::barrier::Members;
use crate::{Channel, End, Memory, Span, Stop};

/// The tiles of an op that moves data without adding: all-gather, all-to-all, broadcast.
pub trait DeliverTiles {
    /// Compute or load `tile` of what this rank sends, and put it where this rank itself wants it.
    fn produce(&mut self, tile: u32);
    /// Write `tile` of what this rank sends to `peer`: into its C if `direct`, else its inbox.
    fn push(&mut self, peer: u32, tile: u32, parity: u32, direct: bool);
    /// Copy `tile` of what `source` sent from the inbox to C.
    fn take(&mut self, source: u32, tile: u32, parity: u32);
}

/// How many tiles go where: pure functions of values that all ranks agreed on.
pub trait Delivery {
    /// Tiles that this rank produces.
    fn produced(&self) -> u32;
    /// Tiles that `from` sends to `to`: the first so many of those it produces.
    fn sent(&self, from: u32, to: u32) -> u32;
}

/// Each rank pushes its tiles to whom they are for, then takes what others pushed.
pub fn deliver<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    delivery: &impl Delivery,
    body: &mut impl DeliverTiles,
) -> Result<(), Stop> {
    launch.run(End::Advance, |wg| {
        wg.enter()?;
        let (parity, me) = (wg.parity(), wg.channel.rank);
        for tile in wg.share(delivery.produced()) {
            wg.m.begin(Span::Gemm, tile);
            body.produce(tile);
            wg.m.end(Span::Gemm);
            let to = of(wg.channel, |peer| tile < delivery.sent(me, peer));
            wg.meet(to)?;
            wg.m.begin(Span::Signal, tile);
            for peer in wg.channel.peers_in_turn(tile).filter(|&peer| to.contains(peer)) {
                let direct = wg.direct(peer)?;
                body.push(peer, tile, parity, direct);
            }
            wg.push_signals(to, tile);
            wg.m.end(Span::Signal);
        }
        let most = wg.channel.peers().map(|source| delivery.sent(source, me)).max();
        for tile in wg.share(most.unwrap_or(0)) {
            let from = of(wg.channel, |source| tile < delivery.sent(source, me));
            wg.wait_tiles(from, tile)?;
            for source in wg.channel.peers().filter(|&source| from.contains(source)) {
                if !wg.direct(source)? {
                    wg.m.begin(Span::Reduce, tile);
                    body.take(source, tile, parity);
                    wg.m.end(Span::Reduce);
                }
            }
        }
        Ok(())
    })
}

/// The peers that `which` says.
fn of(channel: &Channel, which: impl Fn(u32) -> bool) -> Members {
    let bits = |bits, peer| bits | u64::from(which(peer)) << peer;
    Members::from_bits(channel.peers().fold(0, bits))
}
