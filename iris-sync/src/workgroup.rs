//! Protocol functions of a workgroup.
//!
//! This file is long because all functions are methods of one type, which records what the
//! workgroup has already seen of its peers.

use crate::wait::{Awaited, has_given_up, raise_signal, stopped, wait_for, wait_signal};
use crate::{
    Aborted, Access, Call, Channel, Limit, Memory, Record, Span, SymWord, barrier, divergent,
    entry,
    ll::{self, Batch, Rows},
    memory::share,
    tile_flags,
};

/// Effect of a launch on the call number, when the last workgroup of the launch finishes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The call number stays as it is, because more launches of this call follow.
    Keep,
    /// The call number advances by one, because the call is over.
    Advance,
    /// The call number advances after an exchange of done words. This rank tells its peers that it
    /// has read the data that it pulls from them, and waits until the peers have read the data that
    /// they pull from this rank.
    Pulled,
}

/// State and protocol functions of one workgroup in one call, as one of its threads sees them. Ops
/// are composed of these functions.
///
/// Unless a function says otherwise, all threads of the workgroup call it together, and an error is
/// returned to all of them.
pub struct Workgroup<'a, M: Memory + ?Sized> {
    /// Memory that holds the synchronisation words.
    pub m: &'a M,
    /// Layout of the synchronisation words of the op.
    pub channel: &'a Channel,
    /// Index of this workgroup in its launch.
    pub index: u32,
    /// Number of workgroups in the launch; all are co-resident.
    pub count: u32,
    call: Call,
    record: Record,
    /// Sets of peers, bit r for rank r. `credited`: peers seen to have entered the previous call
    /// (their credit). `entered`: peers seen to have entered this call. `asked`: peers whose
    /// permission to write their matrix C was read. `directs`: peers that gave this permission.
    credited: u64,
    entered: u64,
    asked: u64,
    directs: u64,
    /// Whether this rank had already given up when the launch began.
    given_up: bool,
    /// Whether `count_out` has already counted this workgroup as finished.
    counted: bool,
}

impl<'a, M: Memory + ?Sized> Workgroup<'a, M> {
    /// Begin a call by reading its number. `record` is this rank's description of the call; its
    /// fields `Op` and `Sequence` are filled in here.
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

    /// Call that this workgroup takes part in.
    pub fn call(&self) -> Call {
        self.call
    }

    /// Half of the inbox (memory of a rank that its peers write), 0 or 1, that this call uses.
    pub fn parity(&self) -> u32 {
        self.call.parity()
    }

    /// Items of 0..`count` on which this workgroup works: item `index`, then every `self.count`-th
    /// item after it.
    pub fn share(&self, count: u32) -> impl Iterator<Item = u32> + use<M> {
        (self.index..count).step_by(self.count as usize)
    }

    /// Check, at the start of a launch that is not the first of its call, that this rank has not
    /// given up. A launch that begins with [`Workgroup::credit`] or [`Workgroup::barrier`] needs no
    /// such check, because these functions check the same.
    pub fn check_not_aborted(&self) -> Result<(), Aborted> {
        if self.m.vote(!self.given_up) {
            return Ok(());
        }
        if self.m.thread() == 0 {
            keep_leaving(self.m, self.channel, self.call);
        }
        Err(Aborted)
    }

    /// Publish this rank's entry record at every peer. Only workgroup 0 publishes, and it does so
    /// before anything else. It publishes even if the rank has nothing to send, because peers wait
    /// for the entry.
    pub fn enter(&mut self) -> Result<(), Aborted> {
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

    /// Wait for the credit of `peers` ([`Workgroup::credit`]) before LL words are pushed to them. A
    /// peer that gave credit no longer reads the LL words of two calls ago, which the new words
    /// replace. The last workgroup waits for the credit of all peers, because it announces this
    /// rank's entry to all of them.
    pub fn begin_push(&mut self, peers: barrier::Members) -> Result<(), Aborted> {
        let announces = self.index == self.count - 1;
        let peers = if announces { self.others() } else { peers.bits() & self.others() };
        // If there are at least two threads per peer, each thread loads one credit word of one
        // peer: the word for even or for odd call numbers. So the loads need no call number, and
        // overlap with the load of the call number.
        if self.m.threads() >= 2 * (self.channel.size - 1) {
            if !self.m.vote(self.look_ahead(peers)) {
                return Err(Aborted);
            }
        } else {
            self.for_peers(peers, |wg, peer| wg.credit_of(peer))?;
        }
        self.credited |= peers;
        Ok(())
    }

    /// Variant of [`Workgroup::begin_push`] between two ranks, for one thread, which may push its items at
    /// once. Both credit words of the peer are loaded, so the loads need no call number.
    pub fn begin_push_of_thread(&self, peers: barrier::Members) -> Result<(), Aborted> {
        let peer = 1 - self.channel.rank;
        let seen = [0, 1].map(|parity| entry::look_at_credit(self.m, self.channel, peer, parity));
        if self.index != self.count - 1 && !peers.contains(peer) {
            return Ok(());
        }
        let want = self.call.previous();
        let seen = seen[want.parity() as usize];
        if !self.given_up && self.m.reached(Access::CreditLoad, want, seen) {
            return Ok(());
        }
        self.credit_of(peer)
    }

    /// Count this workgroup as finished before its end, so that the count overlaps with waits for
    /// data. All threads of the workgroup must have read the call number and passed a barrier.
    /// Counting early is safe, because the next launch reads the advanced call number only after
    /// this launch has ended.
    ///
    /// An LL exchange counts before it pushes items, between two ranks behind its pushes. The release of the counting thread waits until
    /// the thread's pushes have arrived at the peers, so the last thread counts, because it pushes
    /// no items. In workgroup 0 and in the last workgroup, the last thread pushes the header or
    /// announces the entry, so the thread before it counts. In calls that refresh words, this
    /// function does nothing: the last workgroup to finish refreshes the words after all others
    /// have finished, so workgroups are counted at their end.
    pub fn count_out(&mut self) {
        if self.call.refreshes_slot() {
            return;
        }
        self.counted = true;
        let last_thread_sends = self.index == 0 || self.index == self.count - 1;
        let thread = if last_thread_sends { self.carriers() } else { self.m.threads() } - 1;
        if self.m.thread() == thread && self.count_one() {
            self.advance();
        }
    }

    /// Push this rank's header to `peers` and announce its entry to every peer. The last thread of
    /// workgroup 0 pushes the header, and the last thread of the last workgroup announces the
    /// entry.
    ///
    /// These are different workgroups if there are at least two, because the release store of the
    /// entry waits for the arrival of the thread's earlier stores, such as the header. A single
    /// workgroup pushes the header first, because peers wait for the header in this call, but for
    /// the entry only in the next call. No entry record is written, because the release of a record
    /// would wait for the arrival of the data. If a peer makes a call without LL words instead of
    /// this call, it compares its record with this rank's record of an older call, and reports the
    /// difference.
    pub fn push_head(&self, peers: barrier::Members) {
        self.push_header(peers);
        self.announce();
    }

    /// Push this rank's header to `peers`; the first half of [`Workgroup::push_head`].
    pub fn push_header(&self, peers: barrier::Members) {
        if self.is_beside(0) {
            ll::push_head(self.m, self.channel, self.call, &self.record, peers);
        }
    }

    /// Announce this rank's entry to every peer; the second half of [`Workgroup::push_head`].
    pub fn announce(&self) {
        if self.is_beside(self.count - 1) {
            for peer in self.channel.peers() {
                entry::announce(self.m, self.channel, self.call, peer);
            }
        }
    }

    /// Wait for the headers of these peers, `together` of them at a time, and compare them with
    /// this rank's record. Only the last thread of workgroup 0 acts. An error is returned on that
    /// thread alone, so [`Workgroup::leave_together`] must follow.
    pub fn wait_head(&self, sources: barrier::Members, together: usize) -> Result<(), Aborted> {
        if !self.is_beside(0) {
            return Ok(());
        }
        ll::wait_head(self.m, self.channel, self.call, &self.record, (sources, together))
    }

    /// Combine the results of the workgroup's threads: all threads fail if one thread failed.
    pub fn leave_together(&self, result: Result<(), Aborted>) -> Result<(), Aborted> {
        if self.m.vote(result.is_ok()) { Ok(()) } else { Err(Aborted) }
    }

    /// Items of 0..`count` that this thread sends and receives by the LL protocol, in a fixed
    /// order.
    ///
    /// The last thread (in device code, the last wave) gets no items: it pushes the header,
    /// announces the entry, or counts the workgroup as finished. If there are several workgroups,
    /// the last workgroup gets no items either, so that the release store of the entry does not
    /// wait for the arrival of items. A workgroup of one thread, as on the CPU, does this work
    /// first and then pushes the items.
    pub fn share_of_threads(&self, count: u32) -> impl Iterator<Item = u32> + use<M> {
        let (carriers, groups) = (self.carriers(), self.carrying());
        let thread = self.m.thread();
        let count = if thread < carriers && self.index < groups { count } else { 0 };
        (self.place() * carriers + thread..count).step_by((groups * carriers) as usize)
    }

    /// Batch number `number` of the items that this thread pushes if [`Rows::spread`] is true;
    /// empty after the last batch.
    pub fn batch_of_all(&self, rows: &Rows, number: u32) -> Batch {
        let mine = self.share_of_threads(rows.items);
        Batch::below(
            rows.items,
            mine.skip((number * rows.at_once) as usize).take(rows.at_once as usize),
        )
    }

    /// Rows of the message that this workgroup receives: every n-th row, where n is the number of
    /// workgroups that receive items. The first n rows go to these workgroups in descending order
    /// of `index`.
    pub fn share_of_rows(&self, rows: &Rows) -> impl Iterator<Item = u32> + use<M> {
        let groups = self.carrying();
        let count = if self.index < groups { rows.items.div_ceil(rows.len.max(1)) } else { 0 };
        (self.place()..count).step_by(groups as usize)
    }

    /// Batch number `number` of this thread's items in row `row`, which this workgroup receives;
    /// empty after the last batch. On a device the last thread gets no items; see
    /// [`Workgroup::share_of_threads`].
    pub fn batch_of_row(&self, rows: &Rows, row: u32, number: u32) -> Batch {
        let Rows { items, len, piece, at_once, .. } = *rows;
        let (carriers, thread) = (self.carriers(), self.m.thread());
        let (first, last) = (row * len, (row * len + len).min(items));
        let end = if thread < carriers { last } else { first };
        let item = move |k: u32| first + (thread + k / piece * carriers) * piece + k % piece;
        Batch::below(end, (number * at_once..(number + 1) * at_once).map(item))
    }

    /// Wait for the credit of `peers` before this rank writes to their inboxes. A peer that gave
    /// credit no longer reads the data of two calls ago in its inbox. If this rank allows peers to
    /// write its matrix C directly, also wait until `peers` have entered this call.
    pub fn wait_before_push(&mut self, peers: barrier::Members) -> Result<(), Aborted> {
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

    /// Wait until `peer` has entered the previous call. The peer then no longer reads the part of
    /// its memory that this rank overwrites in this call.
    pub fn credit(&mut self, peer: u32) -> Result<(), Aborted> {
        if self.credited >> peer & 1 == 0 {
            self.waiting(|wg| wg.credit_of(peer))?;
            self.credited |= 1 << peer;
        }
        Ok(())
    }

    /// Wait until `peer` has entered this call with equal arguments. This is required before this
    /// rank accesses the peer's memory or uses data that the peer sent.
    pub fn wait_entry(&mut self, peer: u32) -> Result<(), Aborted> {
        if self.entered >> peer & 1 == 0 {
            self.waiting(|wg| wg.entry_of(peer))?;
            self.entered |= 1 << peer;
        }
        Ok(())
    }

    /// Wait for the entries of all peers in `peers`; see [`Workgroup::wait_entry`], which waits for
    /// one peer.
    pub fn wait_entries(&mut self, peers: barrier::Members) -> Result<(), Aborted> {
        let peers = peers.bits() & self.others() & !self.entered;
        self.for_peers(peers, |wg, peer| wg.entry_of(peer))?;
        self.entered |= peers;
        Ok(())
    }

    /// Whether this rank and `peer` write results directly into each other's result matrix C. If
    /// this rank allows direct writes, waits until the peer has entered the call.
    pub fn direct(&mut self, peer: u32) -> Result<bool, Aborted> {
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

    /// Raise the signal of `tile` at `peer`, after the stores of all threads of this workgroup to
    /// that peer's inbox (barrier, then release).
    pub fn push_signal(&self, peer: u32, tile: u32) {
        self.m.vote(true);
        if self.m.thread() == 0 {
            self.raise(self.channel.signal(peer, self.channel.rank, tile));
        }
    }

    /// Raise the signal of `tile` at `peer` with the call number found in staging flag 0. Only
    /// workgroups that copy in place of a copy engine use this function, because like a copy engine
    /// they send the number that [`crate::flow::open`] stored.
    pub fn push_copied(&self, peer: u32, tile: u32) {
        self.m.vote(true);
        if self.m.thread() == 0 {
            let number = self.m.dev_load(self.channel.flag(0), Access::FlagLoad);
            let word = self.channel.signal(peer, self.channel.rank, tile);
            self.m.store(word, number, Access::SignalStore);
        }
    }

    /// Raise the signals of `tile` at these peers, after the stores of all threads to the peers'
    /// inboxes (barrier, then release).
    pub fn push_signals(&self, peers: barrier::Members, tile: u32) {
        self.m.vote(true);
        self.share_of_peers(peers.bits(), |wg, peer| {
            wg.raise(wg.channel.signal(peer, wg.channel.rank, tile));
            true
        });
    }

    /// Tell these peers that the result of `tile`, which this rank owns and has stored at them, has
    /// arrived. The signals follow the stores of all threads of this workgroup.
    pub fn push_results(&self, peers: barrier::Members, tile: u32) {
        self.m.vote(true);
        self.share_of_peers(peers.bits(), |wg, peer| {
            wg.raise(wg.channel.result(peer, wg.channel.rank, tile));
            true
        });
    }

    /// Wait until `source` has entered this call with equal arguments, and until the data of `tile`
    /// from `source` has arrived.
    pub fn wait_tile(&mut self, source: u32, tile: u32) -> Result<(), Aborted> {
        self.wait_entry(source)?;
        let word = self.channel.signal(self.channel.rank, source, tile);
        self.waiting(|wg| wg.signal_of(word, source, tile))
    }

    /// Wait until `source` has entered this call with equal arguments, and until the parts
    /// `first..first + parts` of the data that it sends have arrived. Each thread waits for some of
    /// the parts.
    pub fn wait_parts(&mut self, source: u32, first: u32, parts: u32) -> Result<(), Aborted> {
        self.wait_entry(source)?;
        let passed = divergent(self.m, || {
            share(self.m, first..first + parts).all(|part| {
                let word = self.channel.signal(self.channel.rank, source, part);
                self.signal_of(word, source, part).is_ok()
            })
        });
        if self.m.vote(passed) { Ok(()) } else { Err(Aborted) }
    }

    /// Wait until all these peers have entered this call with equal arguments, and until the data
    /// of `tile` from each has arrived.
    pub fn wait_tiles(&mut self, sources: barrier::Members, tile: u32) -> Result<(), Aborted> {
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

    /// Wait until `owner` has entered this call with equal arguments, and until the finished `tile`
    /// from `owner` has arrived.
    pub fn wait_result(&mut self, owner: u32, tile: u32) -> Result<(), Aborted> {
        self.wait_entry(owner)?;
        let word = self.channel.result(self.channel.rank, owner, tile);
        self.waiting(|wg| wg.signal_of(word, owner, tile))
    }

    /// Tell the workgroups of this device that unit (piece) number `unit` of the staging buffer is
    /// filled. The signal follows the stores of all threads that filled the unit.
    pub fn raise_flag(&self, unit: u32) {
        self.m.vote(true);
        if self.m.thread() == 0 {
            tile_flags::raise(self.m, self.channel, self.call, unit);
        }
    }

    /// Wait until unit (piece) number `unit` of the staging buffer is filled with data of rank
    /// `source`.
    pub fn wait_flag(&mut self, unit: u32, source: u32) -> Result<(), Aborted> {
        self.waiting(|wg| {
            wg.timed(unit, |wg| tile_flags::wait(wg.m, wg.channel, wg.call, unit, source))
        })
    }

    /// Run `critical` while this rank holds the lock of `tile`, which lies at rank `owner`.
    pub fn locked(
        &mut self,
        owner: u32,
        tile: u32,
        critical: impl FnOnce(),
    ) -> Result<(), Aborted> {
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

    /// Barrier of all threads of this workgroup and the calling workgroups of all other members.
    pub fn barrier(&mut self, phase: u32, members: barrier::Members) -> Result<(), Aborted> {
        let limit = if phase == 0 { Limit::Entry } else { Limit::Progress };
        self.check_not_aborted()?;
        let Self { m, channel, call, .. } = *self;
        // All threads make the same function call. If the calls were in separate branches, a
        // lockstep wave could let one thread wait before the other threads have stored.
        let wait = || barrier::arrive_and_wait(m, channel, call, phase, members, limit);
        let passed = self.timed(phase, |_| wait());
        if m.vote(passed.is_ok()) { Ok(()) } else { Err(Aborted) }
    }

    /// Count this workgroup as finished, whether `result` is an error or not. The last workgroup of
    /// the launch then does what `end` requires: it waits for peers that still pull data, refreshes
    /// words if a refresh is due, and advances the call number.
    pub fn finish(self, end: End, result: Result<(), Aborted>) -> Result<(), Aborted> {
        self.finish_push(end, result, |_| ll::Used::default())
    }

    /// End the workgroup's part of a call that used LL words; otherwise like [`Workgroup::finish`].
    /// `used(peer)` are the words that the call used for `peer`. All other LL words are refreshed
    /// if a refresh is due.
    pub fn finish_push(
        self,
        end: End,
        result: Result<(), Aborted>,
        used: impl Fn(u32) -> ll::Used,
    ) -> Result<(), Aborted> {
        let Self { m, channel, call, .. } = self;
        if self.counted {
            return result;
        }
        m.vote(true);
        let last = m.thread() == 0 && self.count_one();
        if end == End::Keep {
            return result;
        }
        let settles = last && end == End::Pulled;
        let result = if settles { settle(m, channel, call, result) } else { result };
        // If the rank has given up, not all signals of the call were raised, and a refresh would
        // raise the missing signals, so nothing is refreshed. All threads share the refresh. Thread
        // 0 may advance the call number before the other threads have finished, because the launch
        // ends after all of them.
        if call.refreshes_slot() && m.vote(m.thread() != 0 || last && !has_given_up(m, channel)) {
            ll::stamp(m, channel, call, used);
            if call.refreshes() {
                self.stamp();
            }
        }
        if last {
            self.advance();
        }
        result
    }

    /// Count this workgroup as finished. Returns true for the last workgroup of the launch.
    fn count_one(&self) -> bool {
        // A launch of a single workgroup needs no count.
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

    /// Advance by one the number of ops that the heap has run (its sequence) and this op's call
    /// number. Plain addition to the values read at the start suffices, because no other workgroup
    /// writes these two words in a call.
    fn advance(&self) {
        let word = |index| crate::DevWord { index };
        let sequence = self.record.fields[crate::Field::Sequence as usize];
        let next = sequence.wrapping_add(1);
        self.m.dev_store(word(self.channel.sequence), next, Access::CallStore);
        self.m.dev_store(word(self.channel.call), self.call.next().number(), Access::CallStore);
    }

    /// Store this call's number into this thread's share of the words that this rank writes, so
    /// that no word becomes too old. All workgroups of the rank have finished; the acquire of the
    /// last count and the barrier after it order the tiles of these workgroups before these release
    /// stores. So a peer that sees a refreshed word instead of a signal still sees the tiles.
    fn stamp(&self) {
        let Self { m, channel, call, .. } = *self;
        let refresh = |word| m.store(word, call.number(), Access::StampStore);
        self.share_of_peers(self.others(), |_, peer| {
            // Done words are refreshed whichever variant the call uses, because an op may read the
            // peers' memory only in some of its calls.
            refresh(channel.done(peer, channel.rank));
            (0..2).for_each(|phase| refresh(channel.barrier(peer, channel.rank, phase)));
            true
        });
        for peer in channel.peers() {
            for tile in share(m, 0..channel.tiles) {
                refresh(channel.signal(peer, channel.rank, tile));
                refresh(channel.result(peer, channel.rank, tile));
            }
        }
        tile_flags::stamp(m, channel, call);
    }

    /// Load a credit word. Threads 2i and 2i + 1 load the two words of the i-th peer, one word for
    /// each parity of call numbers, because the call number may not be known yet. Only one of the
    /// two words counts: the word whose parity is that of the previous call. If it does not show
    /// the credit yet, its thread waits. Returns false if that wait fails.
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

    /// Number of threads of this workgroup that send and receive items of LL messages: all except
    /// the last thread, or 1 if there is only one.
    fn carriers(&self) -> u32 {
        (self.m.threads() - 1).max(1)
    }

    /// Number of workgroups that send and receive items of LL messages: all except the last
    /// workgroup, unless there is only one or workgroups have only one thread.
    fn carrying(&self) -> u32 {
        if self.count > 1 && self.m.threads() > 1 { self.count - 1 } else { self.count }
    }

    /// Position of this workgroup in the order in which the items of an LL message are assigned to
    /// workgroups.
    fn place(&self) -> u32 {
        (self.carrying() - 1).saturating_sub(self.index)
    }

    /// Whether this thread is the last thread of workgroup `at`. That thread sends no items; it
    /// pushes the header of the LL message or announces that the rank has entered the call.
    fn is_beside(&self, at: u32) -> bool {
        self.index == at && self.m.thread() == self.m.threads() - 1
    }

    /// Bit set of all ranks except this one.
    fn others(&self) -> u64 {
        barrier::Members::all(self.channel.size).bits() & !(1 << self.channel.rank)
    }

    /// Call `each` for those peers in the bit set `peers` that are assigned to this thread, until a
    /// call returns false.
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

    fn credit_of(&self, peer: u32) -> Result<(), Aborted> {
        if self.given_up {
            keep_leaving(self.m, self.channel, self.call);
            return Err(Aborted);
        }
        self.timed(peer, |wg| entry::wait_credit(wg.m, wg.channel, wg.call, peer))
    }

    fn entry_of(&self, peer: u32) -> Result<(), Aborted> {
        self.timed(peer, |wg| entry::wait_entry(wg.m, wg.channel, wg.call, &wg.record, peer))
    }

    fn signal_of(&self, word: SymWord, rank: u32, tile: u32) -> Result<(), Aborted> {
        self.timed(tile, |wg| wait_signal(wg.m, wg.channel, wg.call, word, (rank, tile)))
    }

    /// Run `wait`, a wait of this thread, and record it in the trace as a span `Wait`.
    fn timed(
        &self,
        what: u32,
        wait: impl FnOnce(&Self) -> Result<(), Aborted>,
    ) -> Result<(), Aborted> {
        self.m.begin(Span::Wait, what);
        let passed = wait(self);
        self.m.end(Span::Wait);
        passed
    }

    /// Let thread 0 wait, then pass a barrier with all threads, so that all threads see the data
    /// that thread 0 acquired.
    fn waiting(&self, wait: impl FnOnce(&Self) -> Result<(), Aborted>) -> Result<(), Aborted> {
        let passed = self.m.thread() != 0 || wait(self).is_ok();
        if self.m.vote(passed) { Ok(()) } else { Err(Aborted) }
    }

    /// Let each thread process its share of these peers until the first failure, then pass a
    /// barrier with all threads, so that all threads see the data that any thread acquired.
    fn for_peers(
        &self,
        peers: u64,
        each: impl Fn(&Self, u32) -> Result<(), Aborted>,
    ) -> Result<(), Aborted> {
        let passed = self.share_of_peers(peers, |wg, peer| each(wg, peer).is_ok());
        if self.m.vote(passed) { Ok(()) } else { Err(Aborted) }
    }
}

/// Tell all peers that this rank has finished reading their memory, and wait until all peers have
/// told the same to this rank, because a later launch on this stream may overwrite the data that
/// peers read.
fn settle<M: Memory + ?Sized>(
    m: &M,
    channel: &Channel,
    call: Call,
    result: Result<(), Aborted>,
) -> Result<(), Aborted> {
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
        // A peer that gave up may have overwritten its shard before this rank read it, so this
        // rank's result may be wrong.
        keep_leaving(m, channel, call);
        return Err(Aborted);
    }
    Ok(())
}

/// Record a fault which says that this rank or a peer has given up, unless a fault is already
/// recorded.
fn keep_leaving<M: Memory + ?Sized>(m: &M, channel: &Channel, call: Call) {
    let awaited =
        Awaited { call, want: call, rank: channel.rank, tile: -1, limit: Limit::Progress };
    stopped(m, channel, &awaited);
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::collections::HashSet;
    use std::vec::Vec;

    use super::*;
    use crate::memory::tests::Words;
    use crate::sym::abort::REVOKED;
    use crate::{ABORT_WORD, FaultKind, PEER_LOST, RESERVED_WORDS, Shape};

    /// Tests that a rank which leaves a call, told by its host or by the abort word, first tells
    /// all peers except a lost one. It must tell the peers before the call number advances, because
    /// afterwards its stream may overwrite data that peers read.
    #[test]
    fn whoever_leaves_a_call_tells_the_peers_first() {
        const LOST: i32 = PEER_LOST + 2;
        let shape = Shape { op: 0, size: 4, tiles: 1, ..Shape::default() };
        let (channel, _) = Channel::lay_out(shape, 0, RESERVED_WORDS, 0);
        let cases = [
            // Columns: the host's code, this rank's abort word, the abort words of ranks 1 to 3,
            // and the fault.
            (7, 0, [1, 1, 1], FaultKind::HostAbort),
            (LOST, 0, [LOST, 0, LOST], FaultKind::PeerLost),
            (0, 3, [3, 3, 3], FaultKind::PeerGaveUp),
            (0, LOST, [LOST, 0, LOST], FaultKind::PeerLost),
            (REVOKED, 0, [REVOKED; 3], FaultKind::PeerLost),
            (0, REVOKED, [REVOKED; 3], FaultKind::PeerLost),
        ];
        for ((host, word, told, kind), waits) in
            cases.into_iter().flat_map(|it| [(it, false), (it, true)])
        {
            let m = Words { host, ..Words::default() };
            m.put(SymWord { rank: 0, index: ABORT_WORD }, word);
            let mut wg = Workgroup::begin(&m, &channel, (0, 1), &Record::default());
            if waits {
                let result = wg.wait_entries(barrier::Members::all(4));
                assert_eq!(wg.finish(End::Advance, result), Err(Aborted));
            } else {
                assert_eq!(wg.finish(End::Pulled, Ok(())), Err(Aborted));
            }
            assert_eq!([1, 2, 3].map(|rank| m.abort(rank)), told, "host {host}, word {word}");
            let stores = m.stores.borrow();
            let last = stores.iter().rposition(|&access| access == Access::AbortStore);
            assert!(last < stores.iter().position(|&access| access == Access::CallStore));
            assert_eq!(m.fault.get().map(|fault| fault.kind), Some(kind));
        }
    }

    /// Tests that the threads of a workgroup share the words of a refresh evenly, that no word is
    /// refreshed twice, and that thread 0 alone advances the call number.
    #[test]
    fn all_threads_share_a_refresh() {
        const THREADS: [u32; 4] = [0, 1, 2, 3];
        let shape =
            Shape { size: 3, tiles: 64, flags: 8, pairs: 40, packs: 40, ..Shape::default() };
        let (channel, _) = Channel::lay_out(shape, 0, RESERVED_WORDS, 0);
        let mut words = HashSet::new();
        let stores = THREADS.map(|thread| {
            let m = Words { thread, others: 3, ..Words::default() };
            m.device.borrow_mut().insert(channel.call, crate::REFRESH_PERIOD);
            let wg = Workgroup::begin(&m, &channel, (0, 1), &Record::default());
            assert_eq!(wg.finish_push(End::Advance, Ok(()), |_| ll::Used::default()), Ok(()));
            words.extend(m.words.borrow().keys().copied());
            m.stores.into_inner()
        });
        let peers = channel.size - 1;
        let (of_peer, tiles) = (3, 2 * channel.tiles);
        let lines = channel.first_quad() + ll::QUADS * channel.pack_count;
        for (access, of_threads, of_one) in [
            (Access::StampStore, tiles * peers, of_peer * peers),
            (Access::LlStamp, lines * peers, 0),
            (Access::FlagStamp, channel.flag_count, 0),
        ] {
            let of =
                |thread: &Vec<Access>| thread.iter().filter(|it| **it == access).count() as u32;
            let counts = stores.each_ref().map(of);
            let each = of_threads / THREADS.len() as u32;
            assert_eq!(counts.iter().sum::<u32>(), of_threads + of_one, "{access:?}: {counts:?}");
            assert!(counts.iter().all(|&it| (each..=each + of_peer).contains(&it)), "{counts:?}");
        }
        assert_eq!(words.len() as u32, (tiles + of_peer + lines) * peers, "each word once");
        let advances = |it: &Vec<Access>| it.contains(&Access::CallStore);
        assert_eq!(stores.each_ref().map(advances), [true, false, false, false]);
    }

    /// Tests that a rank that has read its peers' memory and ends the call without error sets no
    /// abort word.
    #[test]
    fn a_pulled_call_that_ends_well_tells_nobody() {
        let shape = Shape { op: 0, size: 2, tiles: 1, ..Shape::default() };
        let (channel, _) = Channel::lay_out(shape, 0, RESERVED_WORDS, 0);
        let m = Words::default();
        m.put(channel.done(0, 1), 1);
        let wg = Workgroup::begin(&m, &channel, (0, 1), &Record::default());
        assert_eq!(wg.finish(End::Pulled, Ok(())), Ok(()));
        assert_eq!([0, 1].map(|rank| m.abort(rank)), [0, 0]);
    }
}
