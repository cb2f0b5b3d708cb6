use super::Launch;
use crate::barrier::Members;
use crate::ll::{self, Batch, HEAD, Rows, Strip};
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

/// The items of a message in rows, as one thread moves them: those that it has waited for together it
/// begins before it waits, and ends behind.
pub trait LlRows: LlTiles {
    /// All threads of this workgroup have taken what falls to them of `row`.
    fn row(&mut self, row: u32);
}

/// The items of a product's tile, as one thread moves them.
pub trait LlTile: LlTiles {
    /// All threads of the workgroup end the product of its tile: what it gives is there.
    fn multiply(&mut self);
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
    let me = launch.channel.rank;
    // The head goes along wherever there is data.
    let used = |peer| match exchange.sent(me, peer) {
        0 => 0,
        items => HEAD + items,
    };
    let mut wg =
        Workgroup::begin(launch.m, launch.channel, (launch.index, launch.count), launch.record);
    let result = steps(&mut wg, exchange, body);
    wg.finish_push(End::Advance, result, used)
}

fn steps<M: Memory + ?Sized>(
    wg: &mut Workgroup<'_, M>,
    exchange: &impl Exchange,
    body: &mut impl LlTiles,
) -> Result<(), Stop> {
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
        for item in wg.share_of_threads(most.unwrap_or(0)) {
            for peer in channel.peers().filter(|&peer| item < exchange.sent(me, peer)) {
                ll::push(m, channel, call, peer, HEAD + item, body.give(peer, item));
            }
        }
    });
    m.end(Span::Signal);
    let taken = divergent(m, || {
        wg.wait_head(from, ll::SOURCES)?;
        let most = (0..channel.size).map(|source| exchange.sent(source, me)).max();
        wg.share_of_threads(most.unwrap_or(0)).try_for_each(|item| {
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

/// The same of items in rows, of which a workgroup takes whole ones: each thread waits for several items at
/// once, and when all threads have taken theirs of a row, the body gets it.
pub fn exchange_rows<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    rows: &Rows,
    body: &mut impl LlRows,
) -> Result<(), Stop> {
    let used = if rows.items == 0 { 0 } else { HEAD + rows.items };
    let mut wg =
        Workgroup::begin(launch.m, launch.channel, (launch.index, launch.count), launch.record);
    let result = row_steps(&mut wg, rows, body);
    wg.finish_push(End::Advance, result, |_| used)
}

fn row_steps<M: Memory + ?Sized>(
    wg: &mut Workgroup<'_, M>,
    rows: &Rows,
    body: &mut impl LlRows,
) -> Result<(), Stop> {
    let m = wg.m;
    let all = members(wg.channel.size, |_| rows.items > 0);
    wg.begin_push(all)?;
    m.begin(Span::Signal, 0);
    wg.count_out();
    // All threads of a wave have pushed before one of them waits.
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
    // A workgroup without a row waits for heads, too.
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

/// The same of a product's tiles, one a workgroup, whose items it pushes when it has multiplied them, and takes.
/// All that a rank's workgroups have are the rows of the message.
pub fn exchange_tile<M: Memory + ?Sized>(
    launch: &Launch<'_, M>,
    strip: &Strip,
    body: &mut impl LlTile,
) -> Result<(), Stop> {
    let mut wg =
        Workgroup::begin(launch.m, launch.channel, (launch.index, launch.count), launch.record);
    let result = tile_steps(&mut wg, strip, body);
    wg.finish_push(End::Advance, result, |_| HEAD + strip.rows * strip.across)
}

fn tile_steps<M: Memory + ?Sized>(
    wg: &mut Workgroup<'_, M>,
    strip: &Strip,
    body: &mut impl LlTile,
) -> Result<(), Stop> {
    let (m, all) = (wg.m, Members::all(wg.channel.size));
    let begun = wg.begin_push(all);
    if begun.is_ok() {
        wg.count_out();
        // Beside the product, since a release takes a way there and back.
        divergent(m, || wg.push_head(all));
    }
    // Of a call that was given up as well: what is on its way to shared memory must have come.
    body.multiply();
    begun?;
    m.begin(Span::Signal, 0);
    let (thread, threads) = (m.thread(), m.threads());
    // All threads of a wave have pushed before one of them waits.
    divergent(m, || push_batch(wg, |number| strip.batch(thread, threads, number), body));
    m.end(Span::Signal);
    let taken = divergent(m, || {
        wg.wait_head(all, ll::SOURCES)?;
        let mut each = batches(|number| Some(strip.batch(thread, threads, number)));
        each.try_for_each(|batch| take_batch(wg, &batch, body))
    });
    wg.leave_together(taken)
}

/// Wait for items of all ranks together, and take them.
fn take_batch<M: Memory + ?Sized>(
    wg: &Workgroup<'_, M>,
    batch: &Batch,
    body: &mut impl LlTiles,
) -> Result<(), Stop> {
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

/// Push the items of a thread, several to one peer before those to the next.
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

/// Batches by number, up to the first that is empty.
fn batches(of: impl Fn(u32) -> Option<Batch>) -> impl Iterator<Item = Batch> {
    (0..).map_while(of).take_while(|batch| !batch.items().is_empty())
}

fn members(size: u32, which: impl Fn(u32) -> bool) -> Members {
    Members::from_bits((0..size).fold(0, |bits, rank| bits | u64::from(which(rank)) << rank))
}
