use super::{Launch, every};
use crate::barrier::Members;
use crate::{Channel, End, Memory, Span, Stop, Workgroup};

/// The tiles of an op that moves data without adding: all-gather, all-to-all, broadcast.
pub trait DeliverTiles {
    /// Compute or load `tile` of what this rank sends, and put it where this rank itself wants it.
    fn produce(&mut self, tile: u32);
    /// Write `tile` of what this rank sends to `peer`, or passes on from its own C, into the peer's C if
    /// `direct`, else into its inbox.
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

/// Each rank pushes its tiles to whom they are for, and takes what others pushed.
///
/// The first `senders` workgroups push, and the rest take; with none, or as many as there are, all push first and
/// then take. Who pushes waits for credit, and for entries where it writes C, but never for a signal, so that nobody waits
/// in a circle. With senders `push` must not read what `produce` writes: another workgroup writes it, at another time.
pub fn deliver<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    delivery: &impl Delivery,
    senders: u32,
    body: &mut impl DeliverTiles,
) -> Result<(), Stop> {
    let Launch { index, count, .. } = *launch;
    launch.run(End::Advance, |wg| {
        wg.enter()?;
        let (me, produced) = (wg.channel.rank, delivery.produced());
        let apart = (1..count).contains(&senders);
        let sends = !apart || index < senders;
        let takes = !apart || index >= senders;
        let (first, step) = match (sends, takes) {
            (true, true) => (index, count),
            (true, false) => (index, senders),
            (false, _) => (index - senders, count - senders),
        };
        for tile in every(first, step, if sends { produced } else { 0 }) {
            let to = of(wg.channel, |peer| tile < delivery.sent(me, peer));
            if takes {
                produce(wg, body, tile);
            }
            send(wg, body, to, tile)?;
        }
        // Who only takes has nothing else to do until the first have come.
        let left = if sends { 0 } else { produced };
        let sent = wg.channel.peers().map(|source| delivery.sent(source, me));
        let most = sent.chain([left]).max().filter(|_| takes);
        for tile in every(first, step, most.unwrap_or(0)) {
            let from = of(wg.channel, |source| tile < delivery.sent(source, me));
            if tile < left {
                produce(wg, body, tile);
            }
            receive(wg, body, from, tile)?;
        }
        Ok(())
    })
}

/// Who passes on which tiles of a root: the other ranks take turns.
#[derive(Clone, Copy, Debug)]
pub struct Relays {
    /// How many tiles there are.
    pub tiles: u32,
    /// The rank that has them.
    pub root: u32,
    /// How many ranks there are: two at least.
    pub size: u32,
}

impl Relays {
    /// The rank that gets `tile` from the root and passes it on.
    pub fn relay(&self, tile: u32) -> u32 {
        (self.root + 1 + tile % (self.size - 1)) % self.size
    }

    /// Which tile is number `place` of those that `rank`, which is not the root, passes on; if it has
    /// not so many, a number behind the last.
    pub fn relayed(&self, rank: u32, place: u32) -> u32 {
        place * (self.size - 1) + (rank + self.size - 1 - self.root) % self.size
    }
}

/// The root sends each tile to one rank alone, which passes it on to the others when it has come.
pub fn relay<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    relays: &Relays,
    body: &mut impl DeliverTiles,
) -> Result<(), Stop> {
    launch.run(End::Advance, |wg| {
        wg.enter()?;
        let &Relays { tiles, root, .. } = relays;
        let me = wg.channel.rank;
        let one = |rank: u32| Members::from_bits(1 << rank);
        if me == root {
            for tile in wg.share(tiles) {
                produce(wg, body, tile);
                send(wg, body, one(relays.relay(tile)), tile)?;
            }
            return Ok(());
        }
        let others = of(wg.channel, |peer| peer != root);
        // What others wait for comes first: for these tiles we wait for the root alone.
        let own = wg.share(tiles).map(|place| relays.relayed(me, place));
        for tile in own.take_while(|&tile| tile < tiles) {
            receive(wg, body, one(root), tile)?;
            send(wg, body, others, tile)?;
        }
        for tile in wg.share(tiles).filter(|&tile| relays.relay(tile) != me) {
            receive(wg, body, one(relays.relay(tile)), tile)?;
        }
        Ok(())
    })
}

fn produce<M: Memory + ?Sized>(wg: &Workgroup<'_, M>, body: &mut impl DeliverTiles, tile: u32) {
    wg.m.begin(Span::Gemm, tile);
    body.produce(tile);
    wg.m.end(Span::Gemm);
}

/// Write `tile` at these peers, and say so.
fn send<M: Memory + ?Sized>(
    wg: &mut Workgroup<'_, M>,
    body: &mut impl DeliverTiles,
    to: Members,
    tile: u32,
) -> Result<(), Stop> {
    let parity = wg.parity();
    wg.meet(to)?;
    wg.m.begin(Span::Signal, tile);
    for peer in wg.channel.peers_in_turn(tile).filter(|&peer| to.contains(peer)) {
        let direct = wg.direct(peer)?;
        body.push(peer, tile, parity, direct);
    }
    wg.push_signals(to, tile);
    wg.m.end(Span::Signal);
    Ok(())
}

/// Wait for `tile` of each of these peers, and copy it to C where they have not written it there.
fn receive<M: Memory + ?Sized>(
    wg: &mut Workgroup<'_, M>,
    body: &mut impl DeliverTiles,
    from: Members,
    tile: u32,
) -> Result<(), Stop> {
    let parity = wg.parity();
    wg.wait_tiles(from, tile)?;
    for source in wg.channel.peers().filter(|&source| from.contains(source)) {
        if !wg.direct(source)? {
            wg.m.begin(Span::Reduce, tile);
            body.take(source, tile, parity);
            wg.m.end(Span::Reduce);
        }
    }
    Ok(())
}

/// The peers that `which` says.
fn of(channel: &Channel, which: impl Fn(u32) -> bool) -> Members {
    let bits = |bits, peer| bits | u64::from(which(peer)) << peer;
    Members::from_bits(channel.peers().fold(0, bits))
}
