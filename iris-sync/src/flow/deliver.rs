use super::{Launch, every};
use crate::barrier::Members;
use crate::{Aborted, Channel, End, Memory, Span, Workgroup};

/// Tile operations of an op that moves data without adding: all-gather, all-to-all or broadcast.
pub trait DeliverTiles {
    /// Compute or load `tile` of this rank's data, and store it at its destination on this rank.
    fn produce(&mut self, tile: u32);
    /// Write `tile` to `peer`: into the peer's C if `direct` is true, else into its inbox. The data
    /// is this rank's own data or, in [`relay`], data that has arrived in this rank's C.
    fn push(&mut self, peer: u32, tile: u32, parity: u32, direct: bool);
    /// Copy tile `tile`, which rank `source` has sent, to C from half `parity` (0 or 1) of this
    /// rank's inbox.
    fn take(&mut self, source: u32, tile: u32, parity: u32);
}

/// Number of tiles that each rank produces, and sends to each other rank. All ranks must return the
/// same values.
pub trait Delivery {
    /// Number of tiles that this rank produces.
    fn produced(&self) -> u32;
    /// Number of tiles that rank `from` sends to rank `to`: the first tiles that `from` produces.
    fn sent(&self, from: u32, to: u32) -> u32;
}

/// Each rank pushes its tiles to their receivers, and receives the tiles that other ranks pushed.
///
/// The first `senders` workgroups push tiles, and the rest receive tiles. If `senders` is 0 or not
/// less than the number of workgroups, every workgroup pushes first and then receives. A pushing
/// workgroup waits until its peers have entered the previous call, or this call if it writes into
/// their C. It never waits for a signal of this call, so the waits form no cycle. Workgroups are
/// counted as finished before they receive tiles.
///
/// With dedicated senders, [`DeliverTiles::push`] must not read data that [`DeliverTiles::produce`]
/// writes: another workgroup produces the tile, perhaps later than it is pushed.
pub fn deliver<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    delivery: &impl Delivery,
    senders: u32,
    body: &mut impl DeliverTiles,
) -> Result<(), Aborted> {
    let Launch { index, count, .. } = *launch;
    launch.run(End::Advance, |wg| {
        wg.enter()?;
        let (me, produced) = (wg.channel.rank, delivery.produced());
        let dedicated = (1..count).contains(&senders);
        let sends = !dedicated || index < senders;
        let takes = !dedicated || index >= senders;
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
        // A workgroup must pass a barrier of its threads before it is counted as finished. A
        // workgroup that sent nothing has not passed one yet.
        wg.m.vote(true);
        wg.count_out();
        // If some workgroups only send, the other workgroups produce this rank's own tiles: each
        // tile before they wait for the peers' tiles of the same number.
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

/// Assignment of a root's tiles to relays, round-robin over the other ranks. Each relay forwards
/// its tiles to the remaining ranks.
#[derive(Clone, Copy, Debug)]
pub struct Relays {
    /// Number of tiles that the root sends.
    pub tiles: u32,
    /// Rank that has the data and sends the tiles.
    pub root: u32,
    /// Number of ranks of the world, at least two.
    pub size: u32,
}

impl Relays {
    /// Rank that receives `tile` from the root and forwards it.
    pub fn relay(&self, tile: u32) -> u32 {
        (self.root + 1 + tile % (self.size - 1)) % self.size
    }

    /// Number of the tile that `rank` forwards at position `place` of its order; `rank` must not be
    /// the root. The result is at least `tiles` if `rank` forwards fewer tiles.
    pub fn relayed(&self, rank: u32, place: u32) -> u32 {
        place * (self.size - 1) + (rank + self.size - 1 - self.root) % self.size
    }
}

/// Broadcast: the root sends each tile to one relay. When the tile has arrived, the relay forwards
/// it to the remaining ranks.
pub fn relay<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    relays: &Relays,
    body: &mut impl DeliverTiles,
) -> Result<(), Aborted> {
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
        // A rank first receives, from the root, the tiles that it must forward, because other ranks
        // wait for them.
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

/// Write `tile` to each peer in `to`, and raise the tile's signal there.
fn send<M: Memory + ?Sized>(
    wg: &mut Workgroup<'_, M>,
    body: &mut impl DeliverTiles,
    to: Members,
    tile: u32,
) -> Result<(), Aborted> {
    let parity = wg.parity();
    wg.wait_before_push(to)?;
    wg.m.begin(Span::Signal, tile);
    for peer in wg.channel.peers_in_turn(tile).filter(|&peer| to.contains(peer)) {
        let direct = wg.direct(peer)?;
        body.push(peer, tile, parity, direct);
    }
    wg.push_signals(to, tile);
    wg.m.end(Span::Signal);
    Ok(())
}

/// Wait for `tile` from each peer in `from`. Then copy the tile from the inbox to C, unless the
/// peer has written into C directly.
fn receive<M: Memory + ?Sized>(
    wg: &mut Workgroup<'_, M>,
    body: &mut impl DeliverTiles,
    from: Members,
    tile: u32,
) -> Result<(), Aborted> {
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

/// Set of the peers for which `which` returns true.
fn of(channel: &Channel, which: impl Fn(u32) -> bool) -> Members {
    let bits = |bits, peer| bits | u64::from(which(peer)) << peer;
    Members::from_bits(channel.peers().fold(0, bits))
}
