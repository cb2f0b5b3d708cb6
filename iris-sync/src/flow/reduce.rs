use super::{Launch, every};
use crate::barrier::Members;
use crate::{Aborted, End, Memory, Span, Workgroup};

/// Tile operations of an all-reduce or reduce-scatter, for the threads of one workgroup.
///
/// `parity` is the half of the inbox that the call uses, 0 or 1.
pub trait ReduceTiles {
    /// Whether a workgroup reduces a tile while it still has other tiles to push. False for matrix
    /// products, whose accumulators already fill the registers of a device.
    fn at_once(&self) -> bool {
        true
    }
    /// Compute this rank's partial result of `tile`, in the type that is sent between ranks.
    fn produce(&mut self, tile: u32);
    /// Write this rank's partial result of `tile` into the inbox of `peer` (memory for received
    /// data), at the place for data of this rank.
    fn push(&mut self, peer: u32, tile: u32, parity: u32);
    /// Store this rank's own partial result of `tile` in its own inbox, beside the partial results
    /// that its peers write there.
    fn keep(&mut self, tile: u32, parity: u32);
    /// Add up all ranks' partial results of `tile`, in an order of ranks that is fixed for the op,
    /// and write the sum to C.
    fn reduce(&mut self, tile: u32, parity: u32);
    /// Write the result of `tile` to `peer`: into its C if `direct` is true, else into its inbox.
    fn push_result(&mut self, peer: u32, tile: u32, parity: u32, direct: bool);
    /// Copy the result of `tile` from the inbox to C.
    fn take_result(&mut self, tile: u32, parity: u32);
}

/// Assignment of tiles to owners, the ranks that reduce them.
pub trait Owners {
    /// Maximum number of tiles that one rank owns.
    fn most(&self) -> u32;
    /// Number of the tile at position `place` among the tiles of `owner`; `None` if `owner` has no
    /// tile at that position.
    fn owned(&self, owner: u32, place: u32) -> Option<u32>;
}

/// Round-robin ownership: tile t belongs to rank t mod `owners`.
#[derive(Clone, Copy, Debug)]
pub struct Turns {
    /// Number of tiles of all owners.
    pub tiles: u32,
    /// Number of ranks that own tiles: the ranks 0 to `owners` - 1.
    pub owners: u32,
}

impl Owners for Turns {
    fn most(&self) -> u32 {
        self.tiles.div_ceil(self.owners)
    }

    fn owned(&self, owner: u32, place: u32) -> Option<u32> {
        let tile = place * self.owners + owner;
        (owner < self.owners && tile < self.tiles).then_some(tile)
    }
}

/// One-shot all-reduce: each rank pushes its partial result of every tile to all inboxes, and
/// reduces every tile itself. A workgroup pushes its next tile before it reduces the current one,
/// so that links and memory are busy at the same time.
pub fn one_shot<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    tiles: u32,
    body: &mut impl ReduceTiles,
) -> Result<(), Aborted> {
    launch.run(End::Advance, |wg| {
        wg.enter()?;
        let (parity, all) = (wg.parity(), Members::all(wg.channel.size));
        let at_once = body.at_once();
        for next in wg.share(tiles + launch.count) {
            if next < tiles {
                wg.m.begin(Span::Gemm, next);
                body.produce(next);
                body.keep(next, parity);
                wg.m.end(Span::Gemm);
                wg.wait_before_push(all)?;
                wg.m.begin(Span::Signal, next);
                for peer in wg.channel.peers_in_turn(next) {
                    body.push(peer, next, parity);
                }
                wg.push_signals(all, next);
                wg.m.end(Span::Signal);
            }
            // In its first round a workgroup has no earlier tile to reduce.
            let Some(tile) = next.checked_sub(launch.count).filter(|_| at_once) else {
                continue;
            };
            add_up(wg, body, tile, false)?;
        }
        for tile in wg.share(tiles).filter(|_| !at_once) {
            add_up(wg, body, tile, false)?;
        }
        Ok(())
    })
}

/// Wait for all ranks' partial results of a tile and reduce them. Send the result to all ranks if
/// `to_all` is true.
fn add_up<M: Memory + ?Sized>(
    wg: &mut Workgroup<'_, M>,
    body: &mut impl ReduceTiles,
    tile: u32,
    to_all: bool,
) -> Result<(), Aborted> {
    let (parity, all) = (wg.parity(), Members::all(wg.channel.size));
    wg.wait_tiles(all, tile)?;
    wg.m.begin(Span::Reduce, tile);
    body.reduce(tile, parity);
    wg.m.end(Span::Reduce);
    if !to_all {
        return Ok(());
    }
    wg.wait_before_push(all)?;
    wg.m.begin(Span::Signal, tile);
    for peer in wg.channel.peers_in_turn(tile) {
        let direct = wg.direct(peer)?;
        body.push_result(peer, tile, parity, direct);
    }
    wg.push_results(all, tile);
    wg.m.end(Span::Signal);
    Ok(())
}

/// Two-shot all-reduce: each tile has an owner. All ranks push their partial results to the owner,
/// which reduces them and sends the result to all ranks.
///
/// The first `senders` workgroups push tiles that other ranks own, and then wait for the results of
/// these tiles; the rest reduce. If `senders` is 0 or not less than the number of workgroups, every
/// workgroup does both. Until its last push a sender waits only for credits, which peers give when
/// they enter a call, so the waits form no cycle.
pub fn two_shot<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    owners: &impl Owners,
    senders: u32,
    body: &mut impl ReduceTiles,
) -> Result<(), Aborted> {
    reduce_at_owners(launch, owners, senders, body, true)
}

/// Reduce-scatter: each tile has an owner. All ranks push their partial results to the owner, which
/// reduces them. `senders` has the same meaning as in [`two_shot`].
pub fn reduce_scatter<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    owners: &impl Owners,
    senders: u32,
    body: &mut impl ReduceTiles,
) -> Result<(), Aborted> {
    reduce_at_owners(launch, owners, senders, body, false)
}

fn reduce_at_owners<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    owners: &impl Owners,
    senders: u32,
    body: &mut impl ReduceTiles,
    to_all: bool,
) -> Result<(), Aborted> {
    launch.run(End::Advance, |wg| {
        wg.enter()?;
        let (parity, me, at_once) = (wg.parity(), wg.channel.rank, body.at_once());
        // Work items of this rank are numbered: first the tiles that this rank owns, then the tiles
        // that peers own, round-robin over the peers. The items are not processed in this order.
        let (most, size) = (owners.most(), wg.channel.size);
        let items = most * size;
        let theirs = |item: u32| {
            let (place, step) = ((item - most) / (size - 1), (item - most) % (size - 1));
            ((me + 1 + step) % size, place)
        };
        let Launch { index, count, .. } = *launch;
        let (owns, others, step) = match senders {
            1.. if index < senders && senders < count => {
                (every(0, 1, 0), every(most + index, senders, items), 1)
            }
            1.. if senders < count => {
                let adders = count - senders;
                (every(index - senders, adders, most), every(0, 1, 0), adders)
            }
            _ => {
                let ahead = most.saturating_sub(index).div_ceil(count) * count;
                (every(index, count, most), every(index + ahead, count, items), count)
            }
        };
        let mut own = owns.clone().peekable();
        let mut other = others.clone().map(theirs).peekable();
        // A workgroup pushes tiles to peers before it reduces tiles of its own, because peers wait
        // for the pushed tiles. Pushes and reductions are interleaved, so that links and memory are
        // busy at the same time.
        loop {
            let ahead = |&(_, place): &(u32, u32)| {
                own.peek().is_none_or(|own| !at_once || place <= own + step)
            };
            let (owner, place) = match other.next_if(ahead) {
                Some(theirs) => theirs,
                None => match own.next() {
                    Some(place) => (me, place),
                    None => break,
                },
            };
            let Some(tile) = owners.owned(owner, place) else { continue };
            wg.m.begin(Span::Gemm, tile);
            body.produce(tile);
            wg.m.end(Span::Gemm);
            if owner != me {
                wg.credit(owner)?;
                wg.m.begin(Span::Signal, tile);
                body.push(owner, tile, parity);
                wg.push_signal(owner, tile);
                wg.m.end(Span::Signal);
                continue;
            }
            body.keep(tile, parity);
            if at_once {
                add_up(wg, body, tile, to_all)?;
            }
        }
        for place in owns.filter(|_| !at_once) {
            if let Some(tile) = owners.owned(me, place) {
                add_up(wg, body, tile, to_all)?;
            }
        }
        for (owner, place) in others.filter(|_| to_all).map(theirs) {
            let Some(tile) = owners.owned(owner, place) else { continue };
            wg.wait_result(owner, tile)?;
            if !wg.direct(owner)? {
                wg.m.begin(Span::Reduce, tile);
                body.take_result(tile, parity);
                wg.m.end(Span::Reduce);
            }
        }
        Ok(())
    })
}
