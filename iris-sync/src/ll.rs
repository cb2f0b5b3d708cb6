//! Words that carry their data: 64 bits, of which four bytes are data and four the number of the
//! call (known elsewhere as the LL protocol, for low latency).
//!
//! Whoever sees the number has the data, so that neither a signal nor an order is needed, and a
//! message is one way long. A region `[parity][source][pair]` at the receiver holds nothing else from
//! `new` to the end of the op. A word is awaited by `==`: by the slot rule it holds data of this call,
//! or of an older one of the same parity, and it is refreshed long before an old number comes back.
//!
//! The first [`HEAD`] pairs of a source say what it says about the call: an entry record takes a way
//! there and back, these arrive with the data. Words come in pairs since a device moves 16 bytes at a
//! time; of a pair each word is looked at by itself.

use crate::barrier::Members;
use crate::entry::mismatch;
use crate::wait::{Awaited, Missing, poll};
use crate::{Access, Call, Channel, Field, Limit, LlWord, Memory, Record, Stop};

/// Pairs ahead of the data: the fields of an entry record that ranks must agree on.
pub const HEAD: u32 = Field::ALL.len() as u32 / 2;

/// Sources that one wait is for, at most: a device has registers for so many.
pub const SOURCES: usize = 8;

/// Items of one source that one wait is for, at most: likewise.
pub const AT_ONCE: usize = 8;

/// Sources whose heads are awaited together beside what a thread holds of a row.
pub const HEADS_OF_ROWS: usize = 2;

/// Items in rows, of which a workgroup takes whole ones. Every rank sends all of them to every other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rows {
    /// Items of all rows.
    pub items: u32,
    /// Items of a row; the last may have less.
    pub len: u32,
    /// Items side by side that one thread takes: the elements of a vector.
    pub piece: u32,
    /// Items that a thread waits for together, at most [`AT_ONCE`]: whole pieces.
    pub at_once: u32,
    /// Whether all workgroups share what is pushed evenly, and not as they take it: a link gets it sooner
    /// from several multiprocessors than from the one that takes a row. Then nobody may write what is
    /// pushed before the launch is over.
    pub spread: bool,
}

/// The items of a tile of a message: of each of its rows those that lie side by side from one on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Strip {
    /// Rows of the message.
    pub rows: u32,
    /// Items of a row of the message.
    pub across: u32,
    /// The first item of the first row.
    pub first: u32,
    /// Items of a row of the tile: a divisor of the threads that take them, so that each keeps its columns.
    pub line: u32,
    /// How many of them there are, at the right edge.
    pub there: u32,
    /// Items that a thread waits for together, at most [`AT_ONCE`].
    pub at_once: u32,
}

impl Strip {
    /// Batch number `number` of the items that fall to one of so many threads, empty behind the last.
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
    /// Those of these that are below `end`: the first so many.
    pub(crate) fn below(end: u32, items: impl Iterator<Item = u32>) -> Self {
        let mut batch = Self { items: [0; AT_ONCE], count: 0 };
        for item in items.take_while(|&item| item < end) {
            batch.items[batch.count] = item;
            batch.count += 1;
        }
        batch
    }

    /// Its items.
    pub fn items(&self) -> &[u32] {
        &self.items[..self.count]
    }
}

/// Push `data` to `peer` as pair number `pair`. Needs the credit.
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

/// What was awaited together: the data of some pairs, by source.
pub type Data = [[[u32; 2]; AT_ONCE]; SOURCES];

/// Wait for these pairs, at most [`AT_ONCE`], of each of these sources, at most [`SOURCES`], and put their
/// data into `data`. Any thread.
///
/// All are looked at before one is looked at again: they are under way together.
pub fn wait<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    pairs: &[u32],
    sources: &[u32],
    data: &mut Data,
) -> Result<(), Stop> {
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

/// Push the head of what goes to `peer`.
pub fn push_head<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    record: &Record,
    peer: u32,
) {
    for pair in 0..HEAD {
        let first = pair as usize * 2;
        let data = [record.fields[first] as u32, record.fields[first + 1] as u32];
        push(m, channel, call, peer, pair, data);
    }
}

/// Wait for the heads of what these sources push, of so many together, at most [`SOURCES`], and compare them
/// with this rank's own record.
///
/// A difference is a fault that names the field and both values.
pub fn wait_head<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    record: &Record,
    (sources, together): (Members, usize),
) -> Result<(), Stop> {
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

/// Wait for pair number `pair` of each of these sources, and give them to `take` in ascending order.
/// Any thread.
pub fn each<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    pair: u32,
    sources: Members,
    mut take: impl FnMut(u32, [u32; 2]) -> Result<(), Stop>,
) -> Result<(), Stop> {
    in_groups(m, channel, call, SOURCES, &[pair], sources, |source, data| take(source, data[0]))
}

/// Wait for the pairs of these items, of one source after the other in ascending order, and give what each
/// sent to `take`. Any thread.
pub fn each_of<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    batch: &Batch,
    sources: Members,
    take: impl FnMut(u32, &[[u32; 2]]) -> Result<(), Stop>,
) -> Result<(), Stop> {
    let pairs = batch.items.map(|item| HEAD + item);
    let pairs = &pairs[..batch.count];
    in_groups(m, channel, call, 1, pairs, sources, take)
}

/// The waits of so many sources together.
fn in_groups<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    together: usize,
    pairs: &[u32],
    sources: Members,
    mut take: impl FnMut(u32, &[[u32; 2]]) -> Result<(), Stop>,
) -> Result<(), Stop> {
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

/// Refresh the pairs of this call's slot that it did not use: the first `used(peer)` of those for a
/// peer stay, as their data may not have been taken yet. They get the number of the call before that
/// used the slot, which nobody waits for any more. One thread of the last workgroup, in one call of each
/// parity in a period, whatever its variant.
pub(crate) fn stamp<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    used: impl Fn(u32) -> u32,
) {
    let old = LlWord { data: 0, call: call.of_same_slot_before().number() };
    for peer in channel.peers() {
        for pair in used(peer)..channel.pair_count {
            let place = channel.pair(peer, channel.rank, call.parity(), pair);
            m.store_pair(place, [old; 2], Access::LlStamp);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All that the workgroups of a product have is the message, each item once.
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
