//! This file is long because it implements all accesses of `Memory`, each with the changes that
//! mutants make to it.

#![allow(unsafe_code, reason = "the hooks that let a model run the device headers")]

use std::cell::{Cell, RefCell};
use std::ptr;

use iris_sync::flow::Launch;
use iris_sync::{
    Access, Call, Channel, DevWord, Fault, FaultKind, LINE_WORDS, Limit, LlQuad, LlWord, Memory,
    Record, Scope, SymPair, SymWord, ll,
};

use super::Scenario;
use crate::quads;
use crate::rules::{Change, Compare, Kind, Rules, Site};
use crate::{Arena, Failure, Operation, Place, ThreadId};

mod pairs;

thread_local! {
    static CURRENT: Cell<*const ()> = const { Cell::new(ptr::null()) };
}

/// One thread of a scenario: the [`Memory`] and the cells that its program accesses.
pub struct Thread<'a> {
    id: ThreadId,
    scenario: &'a Scenario,
    rules: &'a Rules,
    arena: &'a dyn Arena,
    channel: Channel,
    /// Whether this is the rank's only thread, so that no other thread accesses the rank's device
    /// words.
    alone: bool,
    votes: Cell<u32>,
    /// State of a wave in lockstep: whether this thread has diverged without an announced end, and
    /// the number of divergent calls that it is in.
    parted: Cell<bool>,
    depth: Cell<u32>,
    fault: Cell<Option<Fault>>,
    published: RefCell<[i32; LINE_WORDS as usize]>,
    pushed_head: RefCell<[u32; 2 * ll::HEAD as usize]>,
    /// Number and sequence of the call that was begun last.
    begun: Cell<(i32, i32)>,
}

impl<'a> Thread<'a> {
    /// Runs the program of `scenario` as thread `id` over `arena`.
    pub fn run(id: ThreadId, scenario: &'a Scenario, rules: &'a Rules, arena: &'a dyn Arena) {
        let thread = Self {
            id,
            scenario,
            rules,
            arena,
            channel: scenario.channel(id.rank),
            alone: scenario.threads * scenario.groups[id.rank as usize] == 1,
            votes: Cell::new(0),
            parted: Cell::new(false),
            depth: Cell::new(0),
            fault: Cell::new(None),
            published: RefCell::new([0; LINE_WORDS as usize]),
            pushed_head: RefCell::default(),
            begun: Cell::default(),
        };
        thread.enter();
        (scenario.program)(&thread);
        CURRENT.set(ptr::null());
    }

    fn enter(&self) {
        CURRENT.set(ptr::from_ref(self).cast());
    }

    /// Runs `f` with the scenario's thread that runs on the current OS thread. Hooks of programs in
    /// another language call it, because they receive addresses but no context.
    ///
    /// # Panics
    /// If no program of a scenario is running.
    pub fn with_current<R>(f: impl FnOnce(&Thread<'_>) -> R) -> R {
        let current = CURRENT.get();
        assert!(!current.is_null(), "no thread of a scenario is running on this thread");
        // SAFETY: `current` is set by `enter` on this thread, to a thread that lives until its
        // program returns. Other threads run only inside `perform`, which calls `enter` again.
        f(unsafe { &*current.cast::<Thread<'_>>() })
    }

    /// Performs one operation and returns its result. Access to a symmetric word at device scope is
    /// a failure.
    pub fn perform(&self, op: Operation) -> i32 {
        self.perform_wide(op) as i32
    }

    /// Performs one operation on a word of 64 bits, with the checks of [`Thread::perform`].
    fn perform_wide(&self, op: Operation) -> i64 {
        if let (Some(place @ (Place::Sym { .. } | Place::Wide { .. })), Some(Scope::Device)) =
            (op.place(), op.scope())
        {
            Failure::Scope(self.id, place).raise();
        }
        let result = self.arena.perform(self.id, &op);
        self.enter();
        result
    }

    /// Identity of this thread.
    pub fn id(&self) -> ThreadId {
        self.id
    }

    /// Rank of this thread.
    pub fn rank(&self) -> u32 {
        self.id.rank
    }

    /// Number of ranks of the scenario.
    pub fn ranks(&self) -> u32 {
        self.scenario.ranks
    }

    /// Number of threads of each workgroup.
    pub fn threads(&self) -> u32 {
        self.scenario.threads
    }

    /// Number of workgroups of this rank.
    pub fn groups(&self) -> u32 {
        self.scenario.groups[self.id.rank as usize]
    }

    /// Number of calls of the scenario.
    pub fn calls(&self) -> u32 {
        self.scenario.calls
    }

    /// Call at `position` in the scenario, with its number.
    pub fn call(&self, position: u32) -> Call {
        Call::new(self.scenario.first.number().wrapping_add(position as i32))
    }

    /// Layout of the words as this rank sees them.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Entry record that this rank publishes in its calls.
    pub fn record(&self) -> &Record {
        &self.scenario.records[self.id.rank as usize]
    }

    /// Launch of an op, as this thread sees it.
    pub fn launch(&self) -> Launch<'_, Self> {
        let (index, count) = (self.id().group, self.groups());
        Launch { m: self, channel: self.channel(), record: self.record(), index, count }
    }

    /// Fault that this thread has recorded, if any.
    pub fn fault(&self) -> Option<Fault> {
        self.fault.get()
    }

    /// Cell `index` of an array at `rank`; an array has up to 256 cells.
    pub fn cell(&self, rank: u32, array: u32, index: u32) -> Place {
        assert!(rank < self.ranks() && index < 256, "cell {index} at rank {rank}");
        Place::Cell { rank, index: array * 256 + index }
    }

    /// Writes `value` to a cell, without atomics.
    pub fn write(&self, place: Place, value: i32) {
        self.perform(Operation::Write { place, value });
    }

    /// Reads a cell, without atomics.
    pub fn read(&self, place: Place) -> i32 {
        self.perform(Operation::Read { place })
    }

    /// Reads a cell and fails unless it holds `wanted`.
    pub fn expect(&self, place: Place, wanted: i32) {
        self.check(place, self.read(place), wanted);
    }

    /// Whether `word` is an abort word of a peer and this thread leaves its call because its host
    /// or another rank told it to.
    fn leaves_untold(&self, word: SymWord) -> bool {
        let told = self.fault.get().is_some_and(|fault| {
            matches!(fault.kind, FaultKind::PeerGaveUp | FaultKind::HostAbort)
        });
        told && word.index == iris_sync::ABORT_WORD && word.rank != self.id.rank
    }

    /// Whether waits of this thread time out.
    pub fn gives_up(&self) -> bool {
        self.scenario.expires.is_some_and(|expires| expires(self.id, Limit::Entry, u32::MAX))
    }

    /// Number of calls that a rank which has given up counts at once; see [`Change::Ages`].
    fn ages(&self) -> Option<i32> {
        self.rules.find(|c| match c {
            Change::Ages(calls) => Some(*calls),
            _ => None,
        })
    }

    /// Fails unless `seen`, which was read from `place`, equals `wanted`. Under [`Change::Ages`],
    /// wrong values are ignored on a thread that has recorded a fault.
    pub fn check(&self, place: Place, seen: i32, wanted: i32) {
        if seen != wanted && !(self.ages().is_some() && self.fault.get().is_some()) {
            Failure::Wrong { thread: self.id, place, seen, wanted }.raise();
        }
    }

    /// Barrier of this thread's workgroup; `site` is its place in the device headers.
    pub(crate) fn vote_at(&self, ok: bool, site: Option<Site>) -> bool {
        let position = self.votes.replace(self.votes.get() + 1);
        let ThreadId { rank, group, .. } = self.id;
        let dropped = self.rules.has(Change::DropVote { rank, group, position })
            || site.is_some_and(|site| self.rules.has(Change::DropSite(site)));
        if self.scenario.threads == 1 || dropped {
            return ok;
        }
        self.together();
        self.perform(Operation::Vote { ok }) == 1
    }

    /// Whether this thread runs in lockstep with others.
    fn in_lockstep(&self) -> bool {
        self.scenario.lockstep && self.scenario.threads > 1
    }

    /// Records that the wave has reconverged, which happens at every barrier.
    fn together(&self) {
        if self.depth.get() != 0 {
            Failure::Other(format!("{:?} is at a barrier in a divergent piece", self.id)).raise();
        }
        self.parted.set(false);
    }

    /// Boundary between two launches, a barrier of all threads of this rank.
    pub fn boundary(&self) {
        if !self.alone {
            self.together();
            self.perform(Operation::Boundary);
        }
    }

    /// Location of a word of symmetric memory under the rules in force.
    fn place_of(&self, word: SymWord) -> SymWord {
        let records = self.channel.entries..self.channel.signals;
        if !records.contains(&word.index) || !self.rules.has(Change::OneRecord) {
            return word;
        }
        let at = word.index - records.start;
        let index = records.start + at / (2 * LINE_WORDS) * (2 * LINE_WORDS) + at % LINE_WORDS;
        SymWord { index, ..word }
    }

    fn dev(&self, word: DevWord) -> Place {
        Place::Dev { rank: self.id.rank, index: word.index }
    }

    /// Whether an access is modelled as non-atomic, so that races are found. This applies to words
    /// that no other thread accesses, and to the call number, whose readers and writer never run
    /// concurrently.
    fn plain(&self, access: Access) -> bool {
        self.alone || matches!(access, Access::CallLoad | Access::CallStore)
    }

    fn data(&self, word: SymWord) -> Place {
        let SymWord { rank, index } = self.place_of(word);
        if self.rules.has(Change::UncheckedRecords) {
            Place::Unchecked { rank, index }
        } else {
            Place::Data { rank, index }
        }
    }

    /// Kind of a refreshed word.
    fn kind(&self, word: SymWord) -> Kind {
        let c = &self.channel;
        match word.index {
            index if index < c.results => Kind::Signal,
            index if index < c.done => Kind::Result,
            index if index < c.barriers => Kind::Done,
            _ => Kind::Barrier,
        }
    }

    /// Counterpart of `word`, which this rank writes at a peer: the word that the peer writes at
    /// this rank for the same purpose.
    fn mirrored(&self, word: SymWord) -> SymWord {
        let c = &self.channel;
        let (first, stride) = match self.kind(word) {
            Kind::Signal => (c.signals, c.tiles),
            Kind::Result => (c.results, c.tiles),
            Kind::Done => (c.done, LINE_WORDS),
            Kind::Barrier => {
                let phase = (word.index - c.barriers) / (c.size * LINE_WORDS);
                (c.barriers + phase * c.size * LINE_WORDS, LINE_WORDS)
            }
        };
        let offset = (word.index - first) % stride;
        SymWord { rank: c.rank, index: first + word.rank * stride + offset }
    }

    /// Whether a word only pads a cache line. No thread waits for such words, so their refresh is
    /// not modelled.
    fn is_padding(&self, word: SymWord) -> bool {
        let c = &self.channel;
        let tiles = c.signals..c.done;
        tiles.contains(&word.index)
            && (word.index - c.signals) % c.tiles >= self.scenario.shape.tiles
    }

    fn value(&self, access: Access, value: i32) -> Option<i32> {
        if self.rules.has(Change::Skip(access)) {
            return None;
        }
        Some(
            self.rules
                .find(|c| match c {
                    Change::Value(a, other) if *a == access => Some(*other),
                    _ => None,
                })
                .unwrap_or(value),
        )
    }
}

impl Thread<'_> {
    fn compares(&self, access: Access, usual: Compare, want: Call, seen: i32) -> bool {
        let compare = self.rules.find(|c| match c {
            Change::Compare(a, compare) if *a == access => Some(*compare),
            _ => None,
        });
        self.rules.has(Change::Skip(access))
            || self.rules.has(Change::SkipAt(access, self.id.rank))
            || match compare.unwrap_or(usual) {
                Compare::Wrapping => want.reached_by(seen),
                Compare::Less => seen >= want.number(),
                Compare::Equal => seen == want.number(),
                Compare::One => seen == 1,
                Compare::Any => true,
            }
    }
}

impl Memory for Thread<'_> {
    fn thread(&self) -> u32 {
        if self.in_lockstep() && self.depth.get() == 0 && !self.parted.replace(true) {
            self.perform(Operation::Part);
        }
        self.id.thread
    }

    fn threads(&self) -> u32 {
        self.scenario.threads
    }

    fn vote(&self, ok: bool) -> bool {
        self.vote_at(ok, None)
    }

    fn diverge(&self) {
        if !self.in_lockstep() {
            return;
        }
        if self.depth.replace(self.depth.get() + 1) == 0 && !self.parted.get() {
            self.perform(Operation::Part);
        }
    }

    fn reconverge(&self) {
        if !self.in_lockstep() {
            return;
        }
        self.depth.set(self.depth.get() - 1);
        if self.depth.get() == 0 && !self.parted.get() {
            self.perform(Operation::Join);
        }
    }

    fn load(&self, word: SymWord, access: Access) -> i32 {
        let unheard = match access {
            Access::AbortLoad => self.scenario.expires.is_none(),
            Access::AbortCheck => {
                self.scenario.expires.is_none() || self.rules.has(Change::Skip(access))
            }
            _ => false,
        };
        if unheard {
            return 0;
        }
        let SymWord { rank, index } = self.place_of(word);
        let place = Place::Sym { rank, index };
        let (order, scope) = (self.rules.order(access), self.rules.scope(access));
        self.perform(Operation::Load { place, order, scope })
    }

    fn store(&self, word: SymWord, value: i32, access: Access) {
        let left_out =
            || self.is_padding(word) || self.rules.has(Change::SkipStamps(self.kind(word)));
        if access == Access::StampStore && left_out() {
            return;
        }
        if self.rules.has(Change::LeaveUntold) && self.leaves_untold(word) {
            return;
        }
        let Some(value) = self.value(access, value) else { return };
        let word = if access == Access::StampStore && self.rules.has(Change::OwnerStamps) {
            self.mirrored(word)
        } else {
            word
        };
        let SymWord { rank, index } = self.place_of(word);
        let place = Place::Sym { rank, index };
        let (order, scope) = (self.rules.order(access), self.rules.scope(access));
        self.perform(Operation::Store { place, value: value.into(), order, scope });
    }

    fn load_pair(&self, pair: SymPair, access: Access) -> [LlWord; 2] {
        [0, 2].map(|half| {
            self.load_wide(SymWord { rank: pair.rank, index: pair.index + half }, access)
        })
    }

    fn store_pair(&self, pair: SymPair, words: [LlWord; 2], access: Access) {
        for (half, word) in [0, 2].into_iter().zip(words) {
            let place = SymWord { rank: pair.rank, index: pair.index + half };
            self.store_wide(place, word, access);
        }
    }

    fn load_quad(&self, place: SymPair, access: Access) -> LlQuad {
        quads::decode(self.load_wide(quads::word(place), access))
    }

    fn store_quad(&self, place: SymPair, word: LlQuad, access: Access) {
        self.store_wide(quads::word(place), quads::encode(word), access);
    }

    fn compare_exchange(&self, word: SymWord, expected: i32, value: i32, access: Access) -> i32 {
        let SymWord { rank, index } = self.place_of(word);
        let place = Place::Sym { rank, index };
        let (order, scope) = (self.rules.order(access), self.rules.scope(access));
        self.perform(Operation::CompareExchange { place, expected, value, order, scope })
    }

    fn get(&self, word: SymWord) -> i32 {
        let seen = self.perform(Operation::Read { place: self.data(word) });
        let field = (word.index % LINE_WORDS) as usize;
        if self.rules.has(Change::BlindRecords) && field < iris_sync::Field::ALL.len() {
            return self.published.borrow()[field];
        }
        seen
    }

    fn put(&self, word: SymWord, value: i32) {
        self.published.borrow_mut()[(word.index % LINE_WORDS) as usize] = value;
        self.perform(Operation::Write { place: self.data(word), value });
    }

    fn dev_load(&self, word: DevWord, access: Access) -> i32 {
        let place = self.dev(word);
        if self.plain(access) {
            let seen = self.perform(Operation::Read { place });
            if access == Access::CallLoad {
                let (call, sequence) = self.begun.get();
                let is_call = word.index == self.channel.call;
                self.begun.set(if is_call { (seen, sequence) } else { (call, seen) });
            }
            return seen;
        }
        let (order, scope) = (self.rules.order(access), self.rules.scope(access));
        self.perform(Operation::Load { place, order, scope })
    }

    fn dev_store(&self, word: DevWord, value: i32, access: Access) {
        let Some(mut value) = self.value(access, value) else { return };
        if word.index == self.channel.call && self.fault.get().is_some() {
            value = value.wrapping_add(self.ages().unwrap_or(0));
        }
        let place = self.dev(word);
        if self.plain(access) {
            self.perform(Operation::Write { place, value });
            return;
        }
        let (order, scope) = (self.rules.order(access), self.rules.scope(access));
        self.perform(Operation::Store { place, value: value.into(), order, scope });
    }

    fn dev_add(&self, word: DevWord, value: i32, access: Access) -> i32 {
        let place = self.dev(word);
        if self.plain(access) {
            let before = self.perform(Operation::Read { place });
            self.perform(Operation::Write { place, value: before.wrapping_add(value) });
            return before;
        }
        let (order, scope) = (self.rules.order(access), self.rules.scope(access));
        self.perform(Operation::Add { place, value, order, scope })
    }

    fn pause(&self, _spins: u32) {
        self.perform(Operation::Pause);
    }

    fn host_abort(&self) -> i32 {
        self.scenario
            .host_stops
            .map_or(0, |(rank, code)| if rank == self.id.rank { code } else { 0 })
    }

    fn expired(&self, limit: Limit, spins: u32) -> bool {
        self.scenario.expires.is_some_and(|expires| expires(self.id, limit, spins))
    }

    fn record(&self, fault: &Fault) {
        if self.scenario.expires.is_none() {
            Failure::Fault(self.id, *fault).raise();
        }
        if self.fault.get().is_none() {
            self.fault.set(Some(*fault));
        }
    }

    fn reached(&self, access: Access, want: Call, seen: i32) -> bool {
        self.compares(access, Compare::Wrapping, want, seen)
    }

    fn is_of(&self, access: Access, want: Call, seen: i32) -> bool {
        self.compares(access, Compare::Equal, want, seen)
    }
}
