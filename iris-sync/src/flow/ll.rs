use std::ops::Range;

use super::Launch;
use crate::barrier::Members;
use crate::ll::{self, Batch, HEAD, Ll64, LlUnit, Rows, Strip, Used};
use crate::{Aborted, Channel, End, Memory, Span, Workgroup, divergent};

/// Numbers of items that ranks send each other. An item is 8 bytes of data (in a pair of LL words)
/// or 48 bytes (in a pack); the last item of a message may be padded. All functions are pure and
/// depend only on values that all ranks agreed on.
pub trait Exchange {
    /// Number of items that rank `from` sends to rank `to`. If `from` equals `to`, the number of
    /// items that the rank keeps for itself.
    fn sent(&self, from: u32, to: u32) -> u32;
}

/// Operations on items (8 or 48 bytes of a message) that one thread performs in an exchange by the
/// LL protocol. A thread uses only received data for which it has itself waited.
pub trait LlTiles<I: LlUnit = Ll64> {
    /// Data of item number `item` that this rank sends to `peer`.
    fn give(&mut self, peer: u32, item: u32) -> I::Data;
    /// Begin item `item`. An op that moves data stores this rank's own data at its destination. An
    /// op that adds clears its accumulator; `take` later adds this rank's data too, in the order of
    /// ranks.
    fn begin(&mut self, item: u32);
    /// Use the data of `item` that rank `source` has sent. The exchange calls this in ascending
    /// order of sources.
    fn take(&mut self, source: u32, item: u32, data: I::Data);
    /// Finish `item`, after `take` has been called for all sources.
    fn end(&mut self, item: u32);
}

/// Operations on items that one thread performs in [`exchange_rows`]. The thread calls `begin` for
/// all items of a batch, waits for the batch, and then calls `end` for all of its items.
pub trait LlRows: LlTiles {
    /// Callback that runs when all threads of this workgroup have received and finished their items
    /// of `row`.
    fn row(&mut self, row: u32);
}

/// Operations on items that one thread performs in [`exchange_tile`].
pub trait LlTile: LlTiles {
    /// Compute the matrix product of the workgroup's tile; all threads call this together. After
    /// this call, `give` can return the items of the tile.
    fn multiply(&mut self);
}

/// Exchange by LL words (data and a flag in one word): each rank pushes its items to their
/// receivers, then receives the items that other ranks pushed.
///
/// A thread first pushes all of its items; some threads also announce that the rank has entered the
/// call. Only then does the thread wait for items, so the waits form no cycle.
pub fn exchange<I: LlUnit, M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    exchange: &impl Exchange,
    body: &mut impl LlTiles<I>,
) -> Result<(), Aborted> {
    let me = launch.channel.rank;
    let heads = Heads::new(launch.channel, |from, to| exchange.sent(from, to));
    let mut wg =
        Workgroup::begin(launch.m, launch.channel, (launch.index, launch.count), launch.record);
    let result = steps(&mut wg, exchange, &heads, body);
    let used = |peer| heads.used::<I>(peer, exchange.sent(me, peer));
    wg.finish_push(End::Advance, result, used)
}

fn steps<I: LlUnit, M: Memory + ?Sized>(
    wg: &mut Workgroup<'_, M>,
    exchange: &impl Exchange,
    heads: &Heads,
    body: &mut impl LlTiles<I>,
) -> Result<(), Aborted> {
    let (channel, me) = (wg.channel, wg.channel.rank);
    let most = channel.peers().map(|peer| exchange.sent(me, peer)).max().unwrap_or(0);
    let sent = |peer| exchange.sent(me, peer);
    push_items::<I, _>(wg, (heads.to, channel.size == 2), most, sent, |peer, item| {
        body.give(peer, item)
    })?;
    let taken = divergent(wg.m, || {
        wg.wait_head(heads.from, ll::SOURCES)?;
        let most = (0..channel.size).map(|source| exchange.sent(source, me)).max();
        wg.share_of_threads(most.unwrap_or(0)).try_for_each(|item| {
            body.begin(item);
            let sends = |source| item < exchange.sent(source, me);
            take_item::<I, _>(wg, (item, item), sends, |source, data| {
                body.take(source, item, data);
            })?;
            body.end(item);
            Ok(())
        })
    });
    wg.leave_together(taken)
}

/// Exchange like [`exchange`], but for a message that is divided into rows. One workgroup receives
/// all items of a row; a thread waits for several items at once. The body's `row` is called when
/// all threads have finished their items of a row.
pub fn exchange_rows<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    rows: &Rows,
    body: &mut impl LlRows,
) -> Result<(), Aborted> {
    let heads = Heads::all(launch.channel);
    let mut wg =
        Workgroup::begin(launch.m, launch.channel, (launch.index, launch.count), launch.record);
    let result = row_steps(&mut wg, rows, body);
    wg.finish_push(End::Advance, result, |peer| heads.used::<Ll64>(peer, rows.items))
}

fn row_steps<M: Memory + ?Sized>(
    wg: &mut Workgroup<'_, M>,
    rows: &Rows,
    body: &mut impl LlRows,
) -> Result<(), Aborted> {
    let m = wg.m;
    let all = Heads::all(wg.channel).to;
    wg.begin_push(all)?;
    m.begin(Span::Signal, 0);
    wg.count_out();
    // All threads of a wave push before any of these threads waits. Otherwise, in a wave that runs
    // in lockstep, a waiting thread could hold up pushes for which peers wait.
    divergent(m, || {
        wg.push_head(all);
        if rows.spread {
            push_batch(wg, |number| wg.batch_of_all(rows, number), body);
        } else {
            for row in wg.share_of_rows(rows) {
                push_batch(wg, |number| wg.batch_of_row(rows, row, number), body);
            }
        }
    });
    m.end(Span::Signal);
    // Workgroup 0 waits for the peers' headers, which show whether all ranks made the same call. It
    // does so even if it receives no row.
    let mut mine = wg.share_of_rows(rows);
    let (mut at, mut heads) = (mine.next(), all);
    loop {
        let taken = divergent(m, || {
            wg.wait_head(heads, ll::HEADS_OF_ROWS)?;
            let of_row = |number| at.map(|row| wg.batch_of_row(rows, row, number));
            batches(of_row).try_for_each(|batch| take_batch(wg, &batch, body))
        });
        wg.leave_together(taken)?;
        let Some(row) = at else { return Ok(()) };
        body.row(row);
        (at, heads) = (mine.next(), Members::from_bits(0));
        if at.is_none() {
            return Ok(());
        }
    }
}

/// Exchange like [`exchange`], but for the tiles of a matrix product, one tile per workgroup. The
/// workgroup multiplies, pushes the items of its tile, and then receives the items of the same tile
/// from all ranks. The tiles of a rank together cover the message.
pub fn exchange_tile<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    strip: &Strip,
    body: &mut impl LlTile,
) -> Result<(), Aborted> {
    let mut wg =
        Workgroup::begin(launch.m, launch.channel, (launch.index, launch.count), launch.record);
    let result = tile_steps(&mut wg, strip, body);
    wg.finish_push(End::Advance, result, |_| Ll64::used(strip.rows * strip.across))
}

fn tile_steps<M: Memory + ?Sized>(
    wg: &mut Workgroup<'_, M>,
    strip: &Strip,
    body: &mut impl LlTile,
) -> Result<(), Aborted> {
    let (m, all) = (wg.m, Members::all(wg.channel.size));
    let begun = wg.begin_push(all);
    if begun.is_ok() {
        wg.count_out();
        // The header of the message, and the word which says that this rank has entered the call,
        // are pushed before the product. So the round trip of that word's release store overlaps
        // with the product.
        divergent(m, || wg.push_head(all));
    }
    // Multiply even if the call has failed: `multiply` waits for asynchronous copies to shared
    // memory, which must complete before the workgroup ends.
    body.multiply();
    begun?;
    m.begin(Span::Signal, 0);
    let (thread, threads) = (m.thread(), m.threads());
    // All threads of a wave push before any of these threads waits. Otherwise, in a wave that runs
    // in lockstep, a waiting thread could hold up pushes for which peers wait.
    divergent(m, || push_batch(wg, |number| strip.batch(thread, threads, number), body));
    m.end(Span::Signal);
    let taken = divergent(m, || {
        wg.wait_head(all, ll::SOURCES)?;
        let mut each = batches(|number| Some(strip.batch(thread, threads, number)));
        each.try_for_each(|batch| take_batch(wg, &batch, body))
    });
    wg.leave_together(taken)
}

/// Division of a message into parts for [`two_shot_ll`]: each part has an owner, which receives the
/// contributions to the part, finishes the part (adds or copies), and sends it to the other ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parts {
    /// Number of ranks.
    pub size: u32,
    /// Number of items in the message.
    pub items: u32,
    /// For a broadcast the root: the only rank that contributes, which gets no finished parts.
    /// `None` for an all-reduce, to which every rank contributes.
    pub root: Option<u32>,
}

impl Parts {
    /// Items that `owner` finishes. If the items cannot be divided evenly, the parts of the first
    /// ranks are one item longer.
    pub fn part(&self, owner: u32) -> Range<u32> {
        let (each, more) = (self.items / self.size, self.items % self.size);
        let first = owner * each + owner.min(more);
        first..first + each + u32::from(owner < more)
    }

    /// Number of items of the longest part.
    pub fn longest(&self) -> u32 {
        self.items.div_ceil(self.size)
    }

    fn contributes(&self, rank: u32) -> bool {
        self.root.is_none_or(|root| root == rank)
    }

    /// Number of items that rank `from` contributes to the part of the message that rank `to` owns.
    pub fn contributed(&self, from: u32, to: u32) -> u32 {
        if self.contributes(from) { self.part(to).len() as u32 } else { 0 }
    }

    /// Number of finished items that `from` sends to `to`.
    pub fn finished(&self, from: u32, to: u32) -> u32 {
        if self.root == Some(to) { 0 } else { self.part(from).len() as u32 }
    }

    /// Number of items that `from` sends to another rank `to`: first the contributions, then the
    /// finished items; `u32::MAX` if the sum overflows.
    pub fn sent(&self, from: u32, to: u32) -> u32 {
        self.contributed(from, to).saturating_add(self.finished(from, to))
    }
}

/// Operations on items that one thread performs in [`two_shot_ll`]. Items are numbered within the
/// whole message.
pub trait LlParts<I: LlUnit = Ll64> {
    /// Data of `item` that this rank contributes.
    fn give(&mut self, item: u32) -> I::Data;
    /// Begin `item`, which this rank owns.
    fn begin(&mut self, item: u32);
    /// Use the contribution to `item` that rank `source` has sent. The exchange calls this in
    /// ascending order of sources.
    fn take(&mut self, source: u32, item: u32, data: I::Data);
    /// Finish and store `item`, after `take` has been called for all sources; returns its data for
    /// the other ranks.
    fn end(&mut self, item: u32) -> I::Data;
    /// Store `item`, which `owner` has finished.
    fn keep(&mut self, owner: u32, item: u32, data: I::Data);
}

/// Exchange by LL words in two hops: each rank pushes its contributions to the owners of the parts.
/// Each owner finishes its part and pushes it to the other ranks. So a rank sends about twice the
/// message's size in total, and not the whole message to each peer.
///
/// A thread first pushes all of its contributions, then receives, finishes and pushes all items
/// that its rank owns, then receives finished items. The first step waits for no items, the second
/// step for the first steps of other ranks, and the third step for their second steps, so the waits
/// form no cycle. Each thread handles the same item numbers in all parts, so a call may run in
/// place.
pub fn two_shot_ll<I: LlUnit, M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    parts: &Parts,
    body: &mut impl LlParts<I>,
) -> Result<(), Aborted> {
    let me = launch.channel.rank;
    let heads = Heads::new(launch.channel, |from, to| parts.sent(from, to));
    let mut wg =
        Workgroup::begin(launch.m, launch.channel, (launch.index, launch.count), launch.record);
    let result = two_shot_steps(&mut wg, parts, &heads, body);
    wg.finish_push(End::Advance, result, |peer| heads.used::<I>(peer, parts.sent(me, peer)))
}

fn two_shot_steps<I: LlUnit, M: Memory + ?Sized>(
    wg: &mut Workgroup<'_, M>,
    parts: &Parts,
    heads: &Heads,
    body: &mut impl LlParts<I>,
) -> Result<(), Aborted> {
    let (m, channel, call, me) = (wg.m, wg.channel, wg.call(), wg.channel.rank);
    let (own, longest) = (parts.part(me), parts.longest());
    let sent = |peer| parts.contributed(me, peer);
    push_items::<I, _>(wg, (heads.to, false), longest, sent, |peer, item| {
        body.give(parts.part(peer).start + item)
    })?;
    // A thread pushes its contributions, then finishes the items that its rank owns, then receives
    // finished items. All threads of a wave complete one of these steps before any of them begins
    // the next, because in a lockstep wave a waiting thread could hold up pushes for which peers
    // wait.
    let finished = divergent(m, || {
        wg.wait_head(heads.from, ll::SOURCES)?;
        wg.share_of_threads(own.len() as u32).try_for_each(|item| {
            let at = own.start + item;
            body.begin(at);
            let sends = |source| item < parts.contributed(source, me);
            take_item::<I, _>(wg, (item, at), sends, |source, data| body.take(source, at, data))?;
            let data = body.end(at);
            for peer in channel.peers().filter(|&peer| item < parts.finished(me, peer)) {
                I::push(m, channel, call, (peer, sent(peer) + item), data);
            }
            Ok(())
        })
    });
    let kept = divergent(m, || {
        finished?;
        wg.share_of_threads(longest).try_for_each(|item| {
            // LL words from a rank hold first its contributions, then its finished items. A rank
            // that does not contribute (in a broadcast any rank but the root) sends only finished
            // items, so they come first.
            for (contributes, before) in [(true, own.len() as u32), (false, 0)] {
                let sends = |owner| {
                    parts.contributes(owner) == contributes && item < parts.finished(owner, me)
                };
                take_item::<I, _>(wg, (before + item, item), sends, |owner, data| {
                    body.keep(owner, parts.part(owner).start + item, data);
                })?;
            }
            Ok(())
        })
    });
    wg.leave_together(kept)
}

/// Peers with which a rank exchanges headers: peers to which it sends items (`to`), and peers from
/// which it receives items (`from`). If its message is empty, it exchanges headers with all peers,
/// so that a peer whose message is not empty notices the difference.
struct Heads {
    to: Members,
    from: Members,
}

impl Heads {
    fn new(channel: &Channel, sent: impl Fn(u32, u32) -> u32) -> Heads {
        let (me, size) = (channel.rank, channel.size);
        let to = members(size, |peer| peer != me && sent(me, peer) > 0);
        let from = members(size, |peer| peer != me && sent(peer, me) > 0);
        match (to.bits() | from.bits()) == 0 {
            true => Heads::all(channel),
            false => Heads { to, from },
        }
    }

    /// Exchange of headers with all ranks, or with no rank if the channel has no room for headers.
    fn all(channel: &Channel) -> Heads {
        let all = members(channel.size, |_| channel.pair_count > 0);
        Heads { to: all, from: all }
    }

    /// LL words that the call writes at `peer`, to which it sends `items` items; none if `peer`
    /// gets no header.
    fn used<I: LlUnit>(&self, peer: u32, items: u32) -> Used {
        if self.to.contains(peer) { I::used(items) } else { Used::default() }
    }
}

/// Announce that this rank has entered the call, push the headers, and push the items of this
/// thread: item after item, each to all peers. `most` is the largest number of items for any peer,
/// `sent(peer)` the number of items for `peer`. If `alone`, no thread waits for others before it pushes.
fn push_items<I: LlUnit, M: Memory + ?Sized>(
    wg: &mut Workgroup<'_, M>,
    (heads, alone): (Members, bool),
    most: u32,
    sent: impl Fn(u32) -> u32,
    mut give: impl FnMut(u32, u32) -> I::Data,
) -> Result<(), Aborted> {
    let (m, channel, call) = (wg.m, wg.channel, wg.call());
    let mut push = |wg: &Workgroup<'_, M>| {
        for item in wg.share_of_threads(most) {
            for peer in channel.peers().filter(|&peer| item < sent(peer)) {
                I::push(m, channel, call, (peer, item), give(peer, item));
            }
        }
    };
    // All threads of a wave push before any of these threads waits for items. Otherwise, in a wave that
    // runs in lockstep, a waiting thread could hold up pushes for which peers wait.
    if alone {
        let pushed = divergent(m, || {
            wg.begin_push_of_thread(heads)?;
            m.begin(Span::Signal, 0);
            wg.push_header(heads);
            push(wg);
            Ok(())
        });
        wg.leave_together(pushed)?;
        wg.count_out();
        divergent(m, || wg.announce());
    } else {
        wg.begin_push(heads)?;
        m.begin(Span::Signal, 0);
        wg.count_out();
        divergent(m, || {
            wg.push_head(heads);
            push(wg);
        });
    }
    m.end(Span::Signal);
    Ok(())
}

/// Wait for item `item` of each rank for which `sends` returns true, and pass the data to `take`,
/// in ascending order of ranks. `shown` is the number of the wait in a trace.
fn take_item<I: LlUnit, M: Memory + ?Sized>(
    wg: &Workgroup<'_, M>,
    (item, shown): (u32, u32),
    sends: impl Fn(u32) -> bool,
    mut take: impl FnMut(u32, I::Data),
) -> Result<(), Aborted> {
    let (m, sources) = (wg.m, members(wg.channel.size, sends));
    m.begin(Span::Wait, shown);
    let taken = I::each(m, wg.channel, wg.call(), item, sources, |source, data| {
        take(source, data);
        Ok(())
    });
    m.end(Span::Wait);
    taken
}

/// Wait until all ranks have sent the items of `batch`, and pass the items to `body` in the order
/// of ranks.
fn take_batch<M: Memory + ?Sized>(
    wg: &Workgroup<'_, M>,
    batch: &Batch,
    body: &mut impl LlTiles,
) -> Result<(), Aborted> {
    let (m, channel, call) = (wg.m, wg.channel, wg.call());
    batch.items().iter().for_each(|&item| body.begin(item));
    m.begin(Span::Wait, batch.items()[0]);
    let taken = ll::each_of(m, channel, call, batch, Members::all(channel.size), |source, data| {
        for (&item, &data) in batch.items().iter().zip(data) {
            body.take(source, item, data);
        }
        Ok(())
    });
    m.end(Span::Wait);
    taken?;
    batch.items().iter().for_each(|&item| body.end(item));
    Ok(())
}

/// Push this thread's batches of items: all items of a batch to one peer, then the same items to
/// the next peer.
fn push_batch<M: Memory + ?Sized>(
    wg: &Workgroup<'_, M>,
    of: impl Fn(u32) -> Batch,
    body: &mut impl LlTiles,
) {
    let (m, channel, call) = (wg.m, wg.channel, wg.call());
    for batch in batches(|number| Some(of(number))) {
        for peer in channel.peers() {
            for &item in batch.items() {
                ll::push(m, channel, call, peer, HEAD + item, body.give(peer, item));
            }
        }
    }
}

/// Batches that the function `of` returns for the numbers 0, 1, 2, ..., up to the first `None` or
/// empty batch.
fn batches(of: impl Fn(u32) -> Option<Batch>) -> impl Iterator<Item = Batch> {
    (0..).map_while(of).take_while(|batch| !batch.items().is_empty())
}

fn members(size: u32, which: impl Fn(u32) -> bool) -> Members {
    Members::from_bits((0..size).fold(0, |bits, rank| bits | u64::from(which(rank)) << rank))
}
