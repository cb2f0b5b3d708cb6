//! Long because a workgroup is one type, whose functions share what it has seen of its peers.

use crate::wait::{Awaited, has_given_up, raise_signal, stopped, wait_for, wait_signal};
use crate::{
    Access, Call, Channel, Limit, Memory, Record, Span, Stop, SymWord, barrier, divergent, entry,
    ll::{self, Batch, Rows},
    tile_flags,
};

/// How a launch ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// More launches of the same call follow: the call number stays.
    Keep,
    /// The call is over.
    Advance,
    /// As `Advance`, but first tell the peers that we have read what we pull from them, and wait
    /// until they have read what they pull from us.
    Pulled,
}

/// One workgroup in one call, as its thread sees it: the protocol functions of which ops are made.
///
/// All threads call every function here together; those that fail do so on all threads alike.
pub struct Workgroup<'a, M: Memory + ?Sized> {
    /// The words.
    pub m: &'a M,
    /// Where they lie.
    pub channel: &'a Channel,
    /// Index of this workgroup in its launch.
    pub index: u32,
    /// Workgroups in the launch: all of them resident.
    pub count: u32,
    call: Call,
    record: Record,
    /// Peers whose credit, or entry, was seen, and whose answer about C is known: one bit each.
    credited: u64,
    entered: u64,
    asked: u64,
    directs: u64,
    /// Whether the rank had given up when this launch began.
    given_up: bool,
    /// Whether this workgroup has been counted out before its end.
    counted: bool,
}

impl<'a, M: Memory + ?Sized> Workgroup<'a, M> {
    /// Read the number of the call. `record` is what this rank says about it; op and sequence are
    /// filled in here.
    pub fn begin(
        m: &'a M,
        channel: &'a Channel,
        (index, count): (u32, u32),
        record: &Record,
    ) -> Self {
        let word = |index| crate::DevWord { index };
        let call = Call::new(m.dev_load(word(channel.call), Access::CallLoad));
        let mut record = *record;
        record.fields[crate::Field::Op as usize] = channel.op as i32;
        record.fields[crate::Field::Sequence as usize] =
            m.dev_load(word(channel.sequence), Access::CallLoad);
        Self {
            m,
            channel,
            index,
            count,
            call,
            record,
            credited: 0,
            entered: 0,
            asked: 0,
            directs: 0,
            given_up: has_given_up(m, channel),
            counted: false,
        }
    }

    /// The call this workgroup is in.
    pub fn call(&self) -> Call {
        self.call
    }

    /// Which of the two slots this call uses.
    pub fn parity(&self) -> u32 {
        self.call.parity()
    }

    /// The items of 0..`count` that fall to this workgroup: every so many, in a fixed order.
    pub fn share(&self, count: u32) -> impl Iterator<Item = u32> + use<M> {
        (self.index..count).step_by(self.count as usize)
    }

    /// Before a launch that is not the first of its call does anything: fails if the rank has given
    /// up, as [`Workgroup::credit`] and [`Workgroup::barrier`] do.
    pub fn go_on(&self) -> Result<(), Stop> {
        if self.m.vote(!self.given_up) {
            return Ok(());
        }
        if self.m.thread() == 0 {
            keep_leaving(self.m, self.channel, self.call);
        }
        Err(Stop)
    }

    /// Tell every peer that this rank is in the call. The first workgroup does it, before anything
    /// else, even when the rank has nothing to send.
    pub fn enter(&mut self) -> Result<(), Stop> {
        if self.index != 0 {
            return Ok(());
        }
        let all = self.others();
        self.for_peers(all, |wg, peer| {
            wg.credit_of(peer)?;
            entry::publish(wg.m, wg.channel, wg.call, &wg.record, peer);
            Ok(())
        })?;
        self.credited |= all;
        Ok(())
    }

    /// Before pushing words that carry data: [`Workgroup::credit`] of these peers, and, in the first
    /// workgroup, of all, since it is to tell all of them that this rank has entered.
    pub fn begin_push(&mut self, peers: barrier::Members) -> Result<(), Stop> {
        let peers = if self.index == 0 { self.others() } else { peers.bits() & self.others() };
        // Where there are threads enough, each looks at one word of one peer, before it is known which of
        // the two counts in this call: so their way is gone together with that of the number.
        if self.m.threads() >= 2 * (self.channel.size - 1) {
            if !self.m.vote(self.look_ahead(peers)) {
                return Err(Stop);
            }
        } else {
            self.for_peers(peers, |wg, peer| wg.credit_of(peer))?;
        }
        self.credited |= peers;
        Ok(())
    }

    /// Count this workgroup out before its end: all of its threads have read the number of the call, and
    /// passed a barrier since. A release at the end would wait until what its thread has pushed is there;
    /// so the last thread does it now, and in the first workgroup, where that one has more to do, the one
    /// before, which the last items fall to. Not in calls that refresh words: that is for the last
    /// workgroup, when all is over.
    pub fn count_out(&mut self) {
        if self.call.restamps_slot() {
            return;
        }
        self.counted = true;
        let thread = if self.index == 0 { self.carriers() } else { self.m.threads() } - 1;
        if self.m.thread() == thread && self.count_one() {
            self.advance();
        }
    }

    /// In the last thread of the first workgroup: tell every peer that this rank is in the call, and say
    /// to these peers what it says about it, in words that carry their data. These go first, since they are
    /// awaited in this call, and an entry, whose release takes a way there and back, in the next. No record is
    /// written, since its release would wait until it is there: who enters otherwise finds that of an older call.
    pub fn push_head(&self, peers: barrier::Members) {
        if self.is_beside() {
            for peer in self.channel.peers().filter(|&peer| peers.contains(peer)) {
                ll::push_head(self.m, self.channel, self.call, &self.record, peer);
            }
            for peer in self.channel.peers() {
                entry::announce(self.m, self.channel, self.call, peer);
            }
        }
    }

    /// In the last thread of the first workgroup: wait for what these peers say about the call, and
    /// compare it, of so many together. It fails if it finds a difference: [`Workgroup::leave_together`]
    /// must follow.
    pub fn wait_head(&self, sources: barrier::Members, together: usize) -> Result<(), Stop> {
        if !self.is_beside() {
            return Ok(());
        }
        ll::wait_head(self.m, self.channel, self.call, &self.record, (sources, together))
    }

    /// After waits of single threads: fails on all threads if it failed on one.
    pub fn leave_together(&self, result: Result<(), Stop>) -> Result<(), Stop> {
        if self.m.vote(result.is_ok()) { Ok(()) } else { Err(Stop) }
    }

    /// The items of 0..`count`, of words that carry their data, that fall to this thread of this
    /// workgroup, in a fixed order.
    ///
    /// The last thread gets none: it does what is to be done beside them, by the functions around this
    /// one, and the others do not wait until an entry, whose release takes a way there and back, is at
    /// the peers. A thread that is alone does first the one and then the other. On a device it is the
    /// last wave.
    pub fn share_of_threads(&self, count: u32) -> impl Iterator<Item = u32> + use<M> {
        let carriers = self.carriers();
        let thread = self.m.thread();
        let count = if thread < carriers { count } else { 0 };
        ((self.count - 1 - self.index) * carriers + thread..count)
            .step_by((self.count * carriers) as usize)
    }

    /// Where all workgroups share the pushes of items in rows: batch number `number` of those that fall to
    /// this thread, empty behind the last.
    pub fn batch_of_all(&self, rows: &Rows, number: u32) -> Batch {
        let mine = self.share_of_threads(rows.items);
        Batch::below(
            rows.items,
            mine.skip((number * rows.at_once) as usize).take(rows.at_once as usize),
        )
    }

    /// The rows that this workgroup takes whole: every so many of them.
    pub fn share_of_rows(&self, rows: &Rows) -> impl Iterator<Item = u32> + use<M> {
        let count = rows.items.div_ceil(rows.len.max(1));
        (self.count - 1 - self.index..count).step_by(self.count as usize)
    }

    /// Batch number `number` of the items of this workgroup's `row` that fall to this thread, empty behind
    /// the last. As in [`Workgroup::share_of_threads`], the last thread gets none.
    pub fn batch_of_row(&self, rows: &Rows, row: u32, number: u32) -> Batch {
        let Rows { items, len, piece, at_once, .. } = *rows;
        let (carriers, thread) = (self.carriers(), self.m.thread());
        let (first, last) = (row * len, (row * len + len).min(items));
        let end = if thread < carriers { last } else { first };
        let item = move |k: u32| first + (thread + k / piece * carriers) * piece + k % piece;
        Batch::below(end, (number * at_once..(number + 1) * at_once).map(item))
    }

    /// Before writing slots at these peers: as [`Workgroup::credit`] of each; where this rank allows
    /// results to go straight into C, also as [`Workgroup::wait_entry`].
    pub fn meet(&mut self, peers: barrier::Members) -> Result<(), Stop> {
        let peers = peers.bits() & self.others();
        let credits = peers & !self.credited;
        let entries = if self.record.direct == 0 { 0 } else { peers & !self.entered };
        if credits | entries == 0 {
            return Ok(());
        }
        self.for_peers(credits | entries, |wg, peer| {
            if credits >> peer & 1 == 1 {
                wg.credit_of(peer)?;
            }
            if entries >> peer & 1 == 1 {
                wg.entry_of(peer)?;
            }
            Ok(())
        })?;
        self.credited |= credits;
        self.entered |= entries;
        Ok(())
    }

    /// Before writing a slot at `peer`: wait until its last reader of that slot is done.
    pub fn credit(&mut self, peer: u32) -> Result<(), Stop> {
        if self.credited >> peer & 1 == 0 {
            self.waiting(|wg| wg.credit_of(peer))?;
            self.credited |= 1 << peer;
        }
        Ok(())
    }

    /// Before touching a peer's own memory or consuming what it sent: wait until it is in this
    /// call, with the same arguments.
    pub fn wait_entry(&mut self, peer: u32) -> Result<(), Stop> {
        if self.entered >> peer & 1 == 0 {
            self.waiting(|wg| wg.entry_of(peer))?;
            self.entered |= 1 << peer;
        }
        Ok(())
    }

    /// The same of each of these peers.
    pub fn wait_entries(&mut self, peers: barrier::Members) -> Result<(), Stop> {
        let peers = peers.bits() & self.others() & !self.entered;
        self.for_peers(peers, |wg, peer| wg.entry_of(peer))?;
        self.entered |= peers;
        Ok(())
    }

    /// Whether results go straight into C between this rank and `peer`. If this rank allows it at
    /// all, waits until the peer has entered.
    pub fn direct(&mut self, peer: u32) -> Result<bool, Stop> {
        if self.record.direct == 0 {
            return Ok(false);
        }
        self.wait_entry(peer)?;
        if self.asked >> peer & 1 == 0 {
            let answer = entry::is_direct(self.m, self.channel, self.call, &self.record, peer);
            self.asked |= 1 << peer;
            self.directs |= u64::from(answer) << peer;
        }
        Ok(self.directs >> peer & 1 == 1)
    }

    /// Say that the threads' stores to `peer`'s slot of `tile` are done.
    pub fn push_signal(&self, peer: u32, tile: u32) {
        self.m.vote(true);
        if self.m.thread() == 0 {
            self.raise(self.channel.signal(peer, self.channel.rank, tile));
        }
    }

    /// As [`Workgroup::push_signal`], with the number that is in flag 0: for who copies for a call without being
    /// able to look at anything else.
    pub fn push_copied(&self, peer: u32, tile: u32) {
        self.m.vote(true);
        if self.m.thread() == 0 {
            let number = self.m.dev_load(self.channel.flag(0), Access::FlagLoad);
            let word = self.channel.signal(peer, self.channel.rank, tile);
            self.m.store(word, number, Access::SignalStore);
        }
    }

    /// Say that the threads' stores to the slots of `tile` at these peers are done.
    pub fn push_signals(&self, peers: barrier::Members, tile: u32) {
        self.m.vote(true);
        self.share_of_peers(peers.bits(), |wg, peer| {
            wg.raise(wg.channel.signal(peer, wg.channel.rank, tile));
            true
        });
    }

    /// Say that the result of `tile`, which this rank owns, is at these peers.
    pub fn push_results(&self, peers: barrier::Members, tile: u32) {
        self.m.vote(true);
        self.share_of_peers(peers.bits(), |wg, peer| {
            wg.raise(wg.channel.result(peer, wg.channel.rank, tile));
            true
        });
    }

    /// Wait for `tile` of `source`, and for agreement with it.
    pub fn wait_tile(&mut self, source: u32, tile: u32) -> Result<(), Stop> {
        self.wait_entry(source)?;
        let word = self.channel.signal(self.channel.rank, source, tile);
        self.waiting(|wg| wg.signal_of(word, source, tile))
    }

    /// Wait for so many tiles of `source`, from `first` on, and for agreement with it: each thread for some.
    pub fn wait_parts(&mut self, source: u32, first: u32, parts: u32) -> Result<(), Stop> {
        self.wait_entry(source)?;
        let passed = divergent(self.m, || {
            let (thread, threads) = (self.m.thread() as usize, self.m.threads() as usize);
            (first..first + parts).skip(thread).step_by(threads).all(|part| {
                let word = self.channel.signal(self.channel.rank, source, part);
                self.signal_of(word, source, part).is_ok()
            })
        });
        if self.m.vote(passed) { Ok(()) } else { Err(Stop) }
    }

    /// Wait for `tile` of each of these peers, and for agreement with all.
    pub fn wait_tiles(&mut self, sources: barrier::Members, tile: u32) -> Result<(), Stop> {
        let sources = sources.bits() & self.others();
        self.for_peers(sources, |wg, source| {
            if wg.entered >> source & 1 == 0 {
                wg.entry_of(source)?;
            }
            let word = wg.channel.signal(wg.channel.rank, source, tile);
            wg.signal_of(word, source, tile)
        })?;
        self.entered |= sources;
        Ok(())
    }

    /// Wait for the result of `tile` from its owner, and for agreement with it.
    pub fn wait_result(&mut self, owner: u32, tile: u32) -> Result<(), Stop> {
        self.wait_entry(owner)?;
        let word = self.channel.result(self.channel.rank, owner, tile);
        self.waiting(|wg| wg.signal_of(word, owner, tile))
    }

    /// Say that the threads have filled `unit` of this device's staging buffer.
    pub fn raise_flag(&self, unit: u32) {
        self.m.vote(true);
        if self.m.thread() == 0 {
            tile_flags::raise(self.m, self.channel, self.call, unit);
        }
    }

    /// Wait until `unit`, which comes from `source`, is in the staging buffer.
    pub fn wait_flag(&mut self, unit: u32, source: u32) -> Result<(), Stop> {
        self.waiting(|wg| {
            wg.timed(unit, |wg| tile_flags::wait(wg.m, wg.channel, wg.call, unit, source))
        })
    }

    /// Run `critical` under the lock of `tile` at `owner`.
    pub fn locked(&mut self, owner: u32, tile: u32, critical: impl FnOnce()) -> Result<(), Stop> {
        let word = self.channel.lock(owner, tile);
        self.waiting(|wg| {
            wg.timed(tile, |wg| crate::lock::take(wg.m, wg.channel, wg.call, word, tile))
        })?;
        critical();
        self.m.vote(true);
        if self.m.thread() == 0 {
            crate::lock::give(self.m, word);
        }
        Ok(())
    }

    /// A barrier of all threads here and of the first workgroups of all members.
    pub fn barrier(&mut self, phase: u32, members: barrier::Members) -> Result<(), Stop> {
        let limit = if phase == 0 { Limit::Entry } else { Limit::Progress };
        self.go_on()?;
        let Self { m, channel, call, .. } = *self;
        // One call for all threads: in an arm of its own one would wait before the others have stored.
        let wait = || barrier::arrive_and_wait(m, channel, call, phase, members, limit);
        let passed = self.timed(phase, |_| wait());
        if m.vote(passed.is_ok()) { Ok(()) } else { Err(Stop) }
    }

    /// Count this workgroup out, whether it got through or not. The last one ends the call: it
    /// refreshes words where that is due, settles pulls, and advances the number.
    pub fn finish(self, end: End, result: Result<(), Stop>) -> Result<(), Stop> {
        self.finish_push(end, result, |_| 0)
    }

    /// As [`Workgroup::finish`], of a call that has used so many pairs of words that carry data, from
    /// the first on, of those for each peer: the others are refreshed where that is due.
    pub fn finish_push(
        self,
        end: End,
        result: Result<(), Stop>,
        used: impl Fn(u32) -> u32,
    ) -> Result<(), Stop> {
        let Self { m, channel, call, .. } = self;
        if self.counted {
            return result;
        }
        m.vote(true);
        if m.thread() != 0 || !self.count_one() {
            return result;
        }
        if end == End::Keep {
            return result;
        }
        let settled = if end == End::Pulled { settle(m, channel, call, result) } else { Ok(()) };
        // Signals of a call that was given up are not all raised: a refresh would raise them.
        if call.restamps_slot() && !has_given_up(m, channel) {
            ll::stamp(m, channel, call, used);
            if call.restamps() {
                stamp(m, channel, call);
            }
        }
        self.advance();
        result.and(settled)
    }

    /// Count this workgroup. True for the last one of the launch.
    fn count_one(&self) -> bool {
        // One that is alone need not count.
        if self.count == 1 {
            return true;
        }
        let finished = crate::DevWord { index: self.channel.finished };
        let before = self.m.dev_add(finished, 1, Access::FinishAdd);
        if before + 1 != self.count as i32 {
            return false;
        }
        self.m.dev_store(finished, 0, Access::FinishStore);
        true
    }

    /// The call is over. Nobody else has ended one since this one read the number.
    fn advance(&self) {
        let word = |index| crate::DevWord { index };
        let sequence = self.record.fields[crate::Field::Sequence as usize];
        let next = sequence.wrapping_add(1);
        self.m.dev_store(word(self.channel.sequence), next, Access::CallStore);
        self.m.dev_store(word(self.channel.call), self.call.next().number(), Access::CallStore);
    }

    /// The credit of the peer that this thread is for, if it is for the word that counts in this call.
    fn look_ahead(&self, peers: u64) -> bool {
        divergent(self.m, || {
            let (step, half) = (self.m.thread() / 2, self.m.thread() % 2);
            let Some(peer) = self.channel.peers().nth(step as usize) else { return true };
            let seen = entry::look_at_credit(self.m, self.channel, peer, half);
            let want = self.call.previous();
            if half != want.parity() || peers >> peer & 1 == 0 {
                return true;
            }
            !self.given_up && self.m.reached(Access::CreditLoad, want, seen)
                || self.credit_of(peer).is_ok()
        })
    }

    /// Threads that items fall to.
    fn carriers(&self) -> u32 {
        (self.m.threads() - 1).max(1)
    }

    /// Whether this thread does what is to be done beside the items.
    fn is_beside(&self) -> bool {
        self.index == 0 && self.m.thread() == self.m.threads() - 1
    }

    /// All ranks but this one.
    fn others(&self) -> u64 {
        barrier::Members::all(self.channel.size).bits() & !(1 << self.channel.rank)
    }

    /// Call `each` for those of these peers that fall to this thread, up to the first that fails.
    fn share_of_peers(&self, peers: u64, each: impl Fn(&Self, u32) -> bool) -> bool {
        divergent(self.m, || {
            let (thread, threads) = (self.m.thread() as usize, self.m.threads() as usize);
            let mut own = self.channel.peers().skip(thread).step_by(threads);
            own.all(|peer| peers >> peer & 1 == 0 || each(self, peer))
        })
    }

    fn raise(&self, word: SymWord) {
        raise_signal(self.m, self.call, word);
    }

    fn credit_of(&self, peer: u32) -> Result<(), Stop> {
        if self.given_up {
            keep_leaving(self.m, self.channel, self.call);
            return Err(Stop);
        }
        self.timed(peer, |wg| entry::wait_credit(wg.m, wg.channel, wg.call, peer))
    }

    fn entry_of(&self, peer: u32) -> Result<(), Stop> {
        self.timed(peer, |wg| entry::wait_entry(wg.m, wg.channel, wg.call, &wg.record, peer))
    }

    fn signal_of(&self, word: SymWord, rank: u32, tile: u32) -> Result<(), Stop> {
        self.timed(tile, |wg| wait_signal(wg.m, wg.channel, wg.call, word, (rank, tile)))
    }

    /// One wait of one thread.
    fn timed(&self, what: u32, wait: impl FnOnce(&Self) -> Result<(), Stop>) -> Result<(), Stop> {
        self.m.begin(Span::Wait, what);
        let passed = wait(self);
        self.m.end(Span::Wait);
        passed
    }

    /// Let thread 0 wait, then take all threads past the barrier: what it acquired, they have.
    fn waiting(&self, wait: impl FnOnce(&Self) -> Result<(), Stop>) -> Result<(), Stop> {
        let passed = self.m.thread() != 0 || wait(self).is_ok();
        if self.m.vote(passed) { Ok(()) } else { Err(Stop) }
    }

    /// Let each thread do its share of these peers, up to the first that fails; then take all threads
    /// past the barrier: what one of them acquired, they all have.
    fn for_peers(
        &self,
        peers: u64,
        each: impl Fn(&Self, u32) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let passed = self.share_of_peers(peers, |wg, peer| each(wg, peer).is_ok());
        if self.m.vote(passed) { Ok(()) } else { Err(Stop) }
    }
}

/// Tell all peers that this rank has read what it pulls from them, and wait for the same from them:
/// the next launch on this stream may overwrite what they pull.
fn settle<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    result: Result<(), Stop>,
) -> Result<(), Stop> {
    result?;
    for peer in channel.peers() {
        m.store(channel.done(peer, channel.rank), call.number(), Access::DoneStore);
    }
    for peer in channel.peers() {
        let awaited = Awaited { call, want: call, rank: peer, tile: -1, limit: Limit::Progress };
        let look = || m.load(channel.done(channel.rank, peer), Access::DoneLoad);
        wait_for(m, channel, Access::DoneLoad, awaited, look)?;
    }
    if has_given_up(m, channel) {
        // A peer that gave up may have changed its shard before it was read here.
        keep_leaving(m, channel, call);
        return Err(Stop);
    }
    Ok(())
}

/// Keep a record that the rank, or a peer, gave up, unless there is one.
fn keep_leaving<M: Memory + ?Sized>(m: &M, channel: &Channel, call: Call) {
    let awaited =
        Awaited { call, want: call, rank: channel.rank, tile: -1, limit: Limit::Progress };
    stopped(m, channel, &awaited);
}

/// Refresh every word this rank writes. All of its workgroups have been counted out, so this store
/// carries what their signals carried, and it does not matter that words in use are among them.
fn stamp<M: Memory + ?Sized>(m: &M, channel: &Channel, call: Call) {
    for peer in channel.peers() {
        for tile in 0..channel.tiles {
            for word in
                [channel.signal(peer, channel.rank, tile), channel.result(peer, channel.rank, tile)]
            {
                m.store(word, call.number(), Access::StampStore);
            }
        }
        // Ops of one channel may pull in some calls and not in others.
        m.store(channel.done(peer, channel.rank), call.number(), Access::StampStore);
        for phase in 0..2 {
            m.store(channel.barrier(peer, channel.rank, phase), call.number(), Access::StampStore);
        }
    }
    tile_flags::stamp(m, channel, call);
}
