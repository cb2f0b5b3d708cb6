use super::Launch;
use crate::barrier::Members;
use crate::ll::{self, HEAD};
use crate::{End, Memory, Span, Stop, Workgroup, divergent};

/// How many items go where: pure functions of values that all ranks agreed on. An item is what a
/// pair of words carries, eight bytes, of which the last may be padding.
pub trait Exchange {
    /// Items that `from` sends to `to`; with `from` and `to` the same, those that a rank has for
    /// itself.
    fn sent(&self, from: u32, to: u32) -> u32;
}

/// The items of a message, as one thread moves them: it takes what it has waited for itself.
pub trait LlTiles {
    /// What goes to `peer` as its item number `item`.
    fn give(&mut self, peer: u32, item: u32) -> [u32; 2];
    /// Item number `item` is about to be taken from those that send it: what this rank has itself
    /// goes where it belongs.
    fn begin(&mut self, item: u32);
    /// Take what `source` sent as `item`. Sources come in ascending order.
    fn take(&mut self, source: u32, item: u32, data: [u32; 2]);
    /// All have been taken.
    fn end(&mut self, item: u32);
}

/// Each rank pushes its items to whom they are for, in words that carry their data, then takes what
/// others pushed.
///
/// All that a thread pushes comes before all that it waits for, and so does the entry: so nobody waits
/// for a peer that waits for it.
pub fn exchange<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    exchange: &impl Exchange,
    body: &mut impl LlTiles,
) -> Result<(), Stop> {
    exchange_by(launch, exchange, None, body)
}

/// The same of items in rows of `len`, of which a workgroup takes whole ones: when it has passed, all of
/// them are there.
pub fn exchange_rows<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    exchange: &impl Exchange,
    len: u32,
    body: &mut impl LlTiles,
) -> Result<(), Stop> {
    exchange_by(launch, exchange, Some(len), body)
}

fn exchange_by<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    exchange: &impl Exchange,
    row: Option<u32>,
    body: &mut impl LlTiles,
) -> Result<(), Stop> {
    let me = launch.channel.rank;
    // The head goes along wherever there is data.
    let used = |peer| match exchange.sent(me, peer) {
        0 => 0,
        items => HEAD + items,
    };
    let mut wg =
        Workgroup::begin(launch.m, launch.channel, (launch.index, launch.count), launch.record);
    let result = steps(&mut wg, exchange, row, body);
    wg.finish_push(End::Advance, result, used)
}

fn steps<M: Memory + ?Sized>(
    wg: &mut Workgroup<'_, M>,
    exchange: &impl Exchange,
    row: Option<u32>,
    body: &mut impl LlTiles,
) -> Result<(), Stop> {
    // One of the two has them all.
    let share = |wg: &Workgroup<'_, M>, count: u32| {
        let (single, in_rows) = if row.is_some() { (0, count) } else { (count, 0) };
        wg.share_of_threads(single).chain(wg.share_of_rows(in_rows, row.unwrap_or(1)))
    };
    let (m, channel, call, me) = (wg.m, wg.channel, wg.call(), wg.channel.rank);
    let to = members(channel.size, |peer| exchange.sent(me, peer) > 0);
    let from = members(channel.size, |source| exchange.sent(source, me) > 0);
    wg.begin_push(to)?;
    m.begin(Span::Signal, 0);
    wg.count_out();
    // All threads of a wave have pushed before one of them waits.
    divergent(m, || {
        wg.push_head(to);
        let most = channel.peers().map(|peer| exchange.sent(me, peer)).max();
        for item in share(wg, most.unwrap_or(0)) {
            for peer in channel.peers().filter(|&peer| item < exchange.sent(me, peer)) {
                ll::push(m, channel, call, peer, HEAD + item, body.give(peer, item));
            }
        }
    });
    m.end(Span::Signal);
    let taken = divergent(m, || {
        wg.wait_head(from)?;
        let most = (0..channel.size).map(|source| exchange.sent(source, me)).max();
        share(wg, most.unwrap_or(0)).try_for_each(|item| {
            body.begin(item);
            let from = members(channel.size, |source| item < exchange.sent(source, me));
            m.begin(Span::Wait, item);
            let taken = ll::each(m, channel, call, HEAD + item, from, |source, data| {
                body.take(source, item, data);
                Ok(())
            });
            m.end(Span::Wait);
            taken?;
            body.end(item);
            Ok(())
        })
    });
    wg.leave_together(taken)
}

fn members(size: u32, which: impl Fn(u32) -> bool) -> Members {
    Members::from_bits((0..size).fold(0, |bits, rank| bits | u64::from(which(rank)) << rank))
}
