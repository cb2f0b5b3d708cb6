//! LL protocol for small messages: each 64-bit word has four bytes of data and, as its flag, the
//! number of the call in the other four (known from NCCL as LL, low latency).
//!
//! A receiver that sees the flag has the data too. So neither a signal nor a memory order is
//! needed, and a message costs one one-way latency. The receiver's region `[parity][source][pair]`
//! holds nothing but LL words while the op exists. A flag is compared by `==`: no rank is more than
//! one call ahead of another, so a word holds data of this call or of an older call of the same
//! parity. Unused words are refreshed long before call numbers wrap around to the number that such
//! a word holds.
//!
//! The first [`HEAD`] pairs of a source are its header: the fields of the entry record that must be
//! equal on all ranks. The header arrives with the data, whereas an entry record would cost a round
//! trip. Words are stored and loaded in pairs because a device moves 16 bytes at a time; the two
//! flags of a pair are checked separately.
//!
//! On devices that access 128 bits as a whole, larger messages can consist of packs instead of
//! pairs: an [`Ll128`] of 48 bytes is sent as four quads, words of 128 bits with twelve bytes of
//! data and a flag. So a message takes 4/3 of its bytes in memory, and not twice its bytes. Pairs
//! and packs have separate places, because the data of a quad could be taken for the flag of a
//! pair's first word.

use crate::barrier::Members;
use crate::entry::mismatch;
use crate::memory::share;
use crate::wait::{Awaited, Missing, poll};
use crate::{Aborted, Access, Call, Channel, Field, Limit, LlQuad, LlWord, Memory, Record};

pub use crate::channel::{HEAD, PACK_LANES, QUADS};

/// Largest number of source ranks that one wait polls. The number is bounded because a thread holds
/// the data of all these sources in registers.
pub const SOURCES: usize = 8;

/// Largest number of items (8 bytes of data each) per source rank that one wait polls. The number
/// is bounded because a thread holds the data of all these items in registers.
pub const AT_ONCE: usize = 8;

/// Number of source ranks whose headers [`wait_head`] polls together if a message is divided into
/// [`Rows`]. The number is small because a thread also holds part of a row in registers.
pub const HEADS_OF_ROWS: usize = 2;

/// Division of an LL message into rows of items (8 bytes of data each). One workgroup receives all
/// items of a row. Every rank sends all its items to every other rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rows {
    /// Number of items in all rows together.
    pub items: u32,
    /// Number of items in a row; the last row may be shorter.
    pub len: u32,
    /// Number of adjacent items that one thread receives: as many items as a vector access covers.
    pub piece: u32,
    /// Number of items that a thread waits for together: a multiple of `piece`, at most
    /// [`AT_ONCE`].
    pub at_once: u32,
    /// Whether the workgroups share the pushes evenly, because several multiprocessors together
    /// fill a link sooner than a single one. If false, each workgroup pushes the rows that it will
    /// receive. If true, the pushed buffer must not be overwritten before the launch has ended.
    pub spread: bool,
}

/// Position of a tile in an LL message, which consists of rows of items (8 bytes of data each). The
/// tile covers a run of adjacent items in each row of the message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Strip {
    /// Number of rows of the message.
    pub rows: u32,
    /// Number of items in a whole row of the message.
    pub across: u32,
    /// Position of the tile's first item in its row of the message.
    pub first: u32,
    /// Number of items in a row of the tile. It must divide the number of threads, so that all
    /// items of a thread are in one column.
    pub line: u32,
    /// Number of items in a row of the tile that lie within the message; less than `line` at the
    /// right edge of the message.
    pub there: u32,
    /// Number of items that a thread waits for in one poll, at most [`AT_ONCE`].
    pub at_once: u32,
}

impl Strip {
    /// Returns batch number `number` of the items that `thread`, one of `threads` threads,
    /// exchanges. The batch is empty after the last one.
    pub fn batch(&self, thread: u32, threads: u32, number: u32) -> Batch {
        let Self { rows, across, first, line, there, at_once } = *self;
        let (at, step) = (thread % line, threads / line);
        let begin = thread / line + number * at_once * step;
        let end = if at < there { rows } else { 0 };
        let lines = (0..at_once).map(|k| begin + k * step).take_while(|&row| row < end);
        Batch::below(rows * across, lines.map(|row| row * across + first + at))
    }
}

/// Items that a thread pushes or waits for together, in ascending order.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    items: [u32; AT_ONCE],
    count: usize,
}

impl Batch {
    /// Makes a batch of the items that are less than `end`. `items` must be in ascending order,
    /// because they are read only up to the first item that is not less than `end`.
    pub(crate) fn below(end: u32, items: impl Iterator<Item = u32>) -> Self {
        let mut batch = Self { items: [0; AT_ONCE], count: 0 };
        for item in items.take_while(|&item| item < end) {
            batch.items[batch.count] = item;
            batch.count += 1;
        }
        batch
    }

    /// Item numbers of the batch.
    pub fn items(&self) -> &[u32] {
        &self.items[..self.count]
    }
}

/// Push `data` to `peer` as pair number `pair` of the peer's receive region. Allowed only after the
/// credit of `peer` was seen: the peer has then entered the previous call, so it no longer reads
/// the pair of two calls ago, which this push replaces.
pub fn push<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    peer: u32,
    pair: u32,
    data: [u32; 2],
) {
    let place = channel.pair(peer, channel.rank, call.parity(), pair);
    let words = data.map(|data| LlWord { data, call: call.number() });
    m.store_pair(place, words, Access::LlStore);
}

/// Data that one wait has received, `[source][pair][2]`: the four data bytes of each LL word.
pub type Data = [[[u32; 2]; AT_ONCE]; SOURCES];

/// Wait for the LL words of these pairs (at most [`AT_ONCE`]) from each of these sources (at most
/// [`SOURCES`]), and put their data into `data`. Any thread may call this function.
///
/// Each round polls all words once before the next round begins, so that their loads are in flight
/// together.
pub fn wait<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    pairs: &[u32],
    sources: &[u32],
    data: &mut Data,
) -> Result<(), Aborted> {
    let (Some(&pair), Some(&rank)) = (pairs.first(), sources.first()) else { return Ok(()) };
    let tile = pair as i32;
    let awaited = Awaited { call, want: call, rank, tile, limit: Limit::Progress };
    poll(m, channel, awaited, || {
        let mut words = [[[LlWord { data: 0, call: 0 }; 2]; AT_ONCE]; SOURCES];
        for (k, &pair) in pairs.iter().enumerate() {
            for (&source, words) in sources.iter().zip(&mut words) {
                let place = channel.pair(channel.rank, source, call.parity(), pair);
                words[k] = m.load_pair(place, Access::LlLoad);
            }
        }
        let mut missing = None;
        for (k, &pair) in pairs.iter().enumerate() {
            for (&rank, (words, data)) in sources.iter().zip(words.iter().zip(data.iter_mut())) {
                for (word, data) in words[k].iter().zip(&mut data[k]) {
                    *data = word.data;
                    if !m.is_of(Access::LlLoad, call, word.call) && missing.is_none() {
                        missing = Some(Missing { rank, tile: pair as i32, seen: word.call });
                    }
                }
            }
        }
        missing
    })
}

/// Unit of an LL message, called item, that a thread pushes or waits for at once: 8 bytes
/// ([`Ll64`]) or 48 bytes ([`Ll128`]).
pub trait LlUnit {
    /// Data of an item.
    type Data: Copy;

    /// Push item number `item` to `peer`. Allowed only after the credit of `peer` was seen; the
    /// function [`push`] says why.
    fn push<M: Memory + ?Sized>(
        m: &M,
        channel: &Channel,
        call: Call,
        to: (u32, u32),
        data: Self::Data,
    );

    /// Wait for item number `item` of each of these sources, and pass the data to `take` in
    /// ascending order of sources. Any thread may call this function.
    fn each<M: Memory + ?Sized>(
        m: &M,
        channel: &Channel,
        call: Call,
        item: u32,
        sources: Members,
        take: impl FnMut(u32, Self::Data) -> Result<(), Aborted>,
    ) -> Result<(), Aborted>;

    /// Numbers of LL words that a call writes at a peer to which it sends a header and `items`
    /// items.
    fn used(items: u32) -> Used;
}

/// Item of 8 bytes of data, sent as two LL words of 64 bits.
#[derive(Clone, Copy, Debug)]
pub struct Ll64;

impl LlUnit for Ll64 {
    type Data = [u32; 2];

    fn push<M: Memory + ?Sized>(
        m: &M,
        channel: &Channel,
        call: Call,
        (peer, item): (u32, u32),
        data: [u32; 2],
    ) {
        push(m, channel, call, peer, HEAD + item, data);
    }

    fn each<M: Memory + ?Sized>(
        m: &M,
        channel: &Channel,
        call: Call,
        item: u32,
        sources: Members,
        take: impl FnMut(u32, [u32; 2]) -> Result<(), Aborted>,
    ) -> Result<(), Aborted> {
        each(m, channel, call, HEAD + item, sources, take)
    }

    fn used(items: u32) -> Used {
        Used { pairs: HEAD + items, packs: 0 }
    }
}

/// Item of 48 bytes of data (three vectors of 16 bytes), sent as four quads: LL words of 128 bits
/// with three 4-byte words of data each. Quads 0 to 2 have the first three words of the three
/// vectors; quad 3 has the last word of each vector.
#[derive(Clone, Copy, Debug)]
pub struct Ll128;

impl LlUnit for Ll128 {
    /// Data of the four quads, three 4-byte words each.
    type Data = [[u32; 3]; QUADS as usize];

    fn push<M: Memory + ?Sized>(
        m: &M,
        channel: &Channel,
        call: Call,
        (peer, pack): (u32, u32),
        data: Self::Data,
    ) {
        for (quad, data) in (0..).zip(data) {
            let place = channel.quad(peer, channel.rank, call.parity(), (pack, quad));
            m.store_quad(place, LlQuad { data, call: call.number() }, Access::LlStore);
        }
    }

    fn each<M: Memory + ?Sized>(
        m: &M,
        channel: &Channel,
        call: Call,
        pack: u32,
        sources: Members,
        mut take: impl FnMut(u32, Self::Data) -> Result<(), Aborted>,
    ) -> Result<(), Aborted> {
        let others = |rank: &u32| *rank != channel.rank && sources.contains(*rank);
        for rank in (0..channel.size).filter(others) {
            let tile = pack as i32;
            let awaited = Awaited { call, want: call, rank, tile, limit: Limit::Progress };
            let mut data = Self::Data::default();
            poll(m, channel, awaited, || {
                let words = [0, 1, 2, 3].map(|quad| {
                    let place = channel.quad(channel.rank, rank, call.parity(), (pack, quad));
                    m.load_quad(place, Access::LlLoad)
                });
                data = words.map(|word| word.data);
                let other = |word: &&LlQuad| !m.is_of(Access::LlLoad, call, word.call);
                words.iter().find(other).map(|word| Missing { rank, tile, seen: word.call })
            })?;
            take(rank, data)?;
        }
        Ok(())
    }

    fn used(items: u32) -> Used {
        Used { pairs: HEAD, packs: items }
    }
}

/// LL words that a call writes at one peer: the first `pairs` pairs of 64-bit words, and the first
/// `packs` packs of 128-bit words.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Used {
    /// Number of pairs, header included.
    pub pairs: u32,
    /// Number of packs.
    pub packs: u32,
}

/// Push the header of this call to the peers `to`. The header holds the fields of the entry record
/// that must be equal on all ranks.
pub fn push_head<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    record: &Record,
    to: Members,
) {
    for pair in 0..HEAD {
        let first = pair as usize * 2;
        let data = [record.fields[first] as u32, record.fields[first + 1] as u32];
        for peer in channel.peers().filter(|&peer| to.contains(peer)) {
            push(m, channel, call, peer, pair, data);
        }
    }
}

/// Wait for the headers of these sources and compare them with this rank's record. Each wait polls
/// `together` sources, at most [`SOURCES`].
///
/// Fails with a fault that names the first differing field and both values.
pub fn wait_head<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    record: &Record,
    (sources, together): (Members, usize),
) -> Result<(), Aborted> {
    for pair in 0..HEAD {
        in_groups(m, channel, call, together, &[pair], sources, |source, data| {
            let first = pair as usize * 2;
            let fields = Field::ALL[first..].iter().zip(&record.fields[first..]).zip(data[0]);
            for ((&field, &wanted), seen) in fields {
                let seen = seen as i32;
                if seen != wanted {
                    return Err(mismatch(m, channel, call, source, (field, seen, wanted)));
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Wait for pair number `pair` of each of these sources, and pass the data to `take` in ascending
/// order of sources. Any thread may call this function.
pub fn each<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    pair: u32,
    sources: Members,
    mut take: impl FnMut(u32, [u32; 2]) -> Result<(), Aborted>,
) -> Result<(), Aborted> {
    in_groups(m, channel, call, SOURCES, &[pair], sources, |source, data| take(source, data[0]))
}

/// Wait for the items of `batch` from one source after the other, in ascending order of sources,
/// and pass the data of each source to `take`. Any thread may call this function.
pub fn each_of<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    batch: &Batch,
    sources: Members,
    take: impl FnMut(u32, &[[u32; 2]]) -> Result<(), Aborted>,
) -> Result<(), Aborted> {
    let pairs = batch.items.map(|item| HEAD + item);
    let pairs = &pairs[..batch.count];
    in_groups(m, channel, call, 1, pairs, sources, take)
}

/// Wait for the given pairs of LL words from all `sources`, polling `together` sources at a time.
fn in_groups<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    together: usize,
    pairs: &[u32],
    sources: Members,
    mut take: impl FnMut(u32, &[[u32; 2]]) -> Result<(), Aborted>,
) -> Result<(), Aborted> {
    let others = |rank: &u32| *rank != channel.rank && sources.contains(*rank);
    for first in (0..channel.size).step_by(together) {
        let mut group = [0; SOURCES];
        let mut count = 0;
        let end = (first + together as u32).min(channel.size);
        for source in (first..end).filter(others) {
            group[count] = source;
            count += 1;
        }
        let mut data = [[[0; 2]; AT_ONCE]; SOURCES];
        wait(m, channel, call, pairs, &group[..count], &mut data)?;
        for (&source, data) in group[..count].iter().zip(&data) {
            take(source, &data[..pairs.len()])?;
        }
    }
    Ok(())
}

/// Refresh the LL words of this call's parity that the call did not use, so that no flag becomes
/// too old. The words `used(peer)` are left alone, because the peer may not have read them yet. All
/// other words get the number of the previous call of this parity, for which no rank waits any
/// more. All threads of the last workgroup call this function and share the words, whichever
/// variant the call uses, in one call of each parity per refresh period.
pub(crate) fn stamp<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    used: impl Fn(u32) -> Used,
) {
    let old = call.of_same_slot_before().number();
    for peer in channel.peers() {
        let used = used(peer);
        for pair in share(m, used.pairs..channel.first_quad()) {
            let place = channel.pair(peer, channel.rank, call.parity(), pair);
            m.store_pair(place, [LlWord { data: 0, call: old }; 2], Access::LlStamp);
        }
        for pack in share(m, used.packs..channel.pack_count) {
            for quad in 0..QUADS {
                let place = channel.quad(peer, channel.rank, call.parity(), (pack, quad));
                m.store_quad(place, LlQuad { data: [0; 3], call: old }, Access::LlStamp);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests that adjacent strips, divided among threads, cover each item of the message exactly
    /// once.
    #[test]
    fn strips_cover_the_rows_of_a_message() {
        for (threads, line) in [(256, 16), (384, 32), (8, 4), (4, 4)] {
            for (rows, across) in [(1, 64), (17, 33), (128, 70), (64, 32), (3, 5)] {
                let mut seen = vec![0; (rows * across) as usize];
                for first in (0..across).step_by(line as usize) {
                    let there = line.min(across - first);
                    let strip = Strip { rows, across, first, line, there, at_once: 8 };
                    for thread in 0..threads {
                        let batches = (0..).map(|number| strip.batch(thread, threads, number));
                        for batch in batches.take_while(|batch| !batch.items().is_empty()) {
                            for &item in batch.items() {
                                assert!((first..first + there).contains(&(item % across)));
                                seen[item as usize] += 1;
                            }
                        }
                    }
                }
                assert!(seen.iter().all(|&times| times == 1), "{rows} x {across} by {line}");
            }
        }
    }
}
