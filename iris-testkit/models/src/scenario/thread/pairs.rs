//! Accesses of a thread to LL words, which hold data and call number together.

use iris_sync::{Access, Field, LlWord, SymWord, ll};

use super::{Change, Operation, Place, Thread};

impl Thread<'_> {
    /// Pack to which the word belongs as the half of a quad that has the flag; `None` for a word of a
    /// pair.
    fn pack_of(&self, word: SymWord) -> Option<u32> {
        let quad = (self.number(word) / 2).checked_sub(self.channel.first_quad())?;
        let block = quad / (ll::QUADS * ll::PACK_LANES);
        Some(block * ll::PACK_LANES + quad % ll::PACK_LANES)
    }

    /// Index of the word among all LL words that its source rank pushes to its receiver. The first
    /// `2 * ll::HEAD` words are the head.
    fn number(&self, word: SymWord) -> u32 {
        let first = self.channel.pair(0, 0, 0, 0).index;
        (word.index - first) / 2 % (2 * self.channel.pair_count)
    }

    /// Whether the word belongs to the head of an LL message, in a scenario that leaves out heads.
    fn is_left_out(&self, word: SymWord) -> bool {
        self.scenario.without_heads && self.number(word) < 2 * ll::HEAD
    }

    /// Location of the word. Under [`Change::OnePairSlot`], words of both parities share the
    /// location of parity 0.
    fn wide_place(&self, word: SymWord) -> SymWord {
        if !self.rules.has(Change::OnePairSlot) {
            return word;
        }
        let first = self.channel.pair(0, 0, 0, 0).index;
        let slot = self.channel.pair(0, 0, 1, 0).index - first;
        SymWord { index: first + (word.index - first) % slot, ..word }
    }

    /// Loads one word of a pair.
    pub(crate) fn load_wide(&self, word: SymWord, access: Access) -> LlWord {
        if self.is_left_out(word) {
            let (call, sequence) = self.begun.get();
            let mut fields = self.record().fields;
            fields[Field::Op as usize] = self.channel.op as i32;
            fields[Field::Sequence as usize] = sequence;
            return LlWord { data: fields[self.number(word) as usize] as u32, call };
        }
        let SymWord { rank, index } = self.wide_place(word);
        let (order, scope) = (self.rules.order(access), self.rules.scope(access));
        let mut seen = if self.rules.has(Change::Torn) {
            let half = |index| {
                self.perform(Operation::Load { place: Place::Sym { rank, index }, order, scope })
            };
            LlWord { data: half(index) as u32, call: half(index + 1) }
        } else {
            let place = Place::Wide { rank, index };
            LlWord::from_bits(self.perform_wide(Operation::Load { place, order, scope }) as u64)
        };
        if self.rules.has(Change::BlindRecords)
            && let Some(&own) = self.pushed_head.borrow().get(self.number(word) as usize)
        {
            seen.data = own;
        }
        seen
    }

    /// Stores one word of a pair.
    pub(crate) fn store_wide(&self, word: SymWord, value: LlWord, access: Access) {
        let number = self.number(word);
        if access == Access::LlStamp
            && let Some(pack) = self.pack_of(word)
        {
            // Packs that only fill up a block are not modelled: no thread waits for them.
            if pack >= self.scenario.shape.packs
                || self.rules.has(Change::SkipPairStamps(value.call as u32 & 1))
            {
                return;
            }
        } else if access == Access::LlStamp {
            let last = 2 * self.channel.first_quad() - 1;
            if self.rules.has(Change::StampUsedPairs) && number == last {
                let first = word.index - 2 * last;
                (0..2 * (ll::HEAD + self.scenario.shape.pairs)).for_each(|number| {
                    self.put_wide(SymWord { index: first + 2 * number, ..word }, value, access);
                });
            }
            // Words that only pad a cache line are not modelled: no thread waits for them.
            if number >= 2 * (ll::HEAD + self.scenario.shape.pairs)
                || self.rules.has(Change::SkipPairStamps(value.call as u32 & 1))
            {
                return;
            }
        } else if let Some(own) = self.pushed_head.borrow_mut().get_mut(number as usize) {
            *own = value.data;
        }
        self.put_wide(word, value, access);
    }

    fn put_wide(&self, word: SymWord, value: LlWord, access: Access) {
        if self.is_left_out(word) {
            return;
        }
        let Some(call) = self.value(access, value.call) else { return };
        let value = LlWord { call, ..value };
        let SymWord { rank, index } = self.wide_place(word);
        let (order, scope) = (self.rules.order(access), self.rules.scope(access));
        if self.rules.has(Change::Torn) {
            for (index, value) in [(index, value.data as i32), (index + 1, value.call)] {
                let place = Place::Sym { rank, index };
                self.perform(Operation::Store { place, value: value.into(), order, scope });
            }
            return;
        }
        let place = Place::Wide { rank, index };
        let value = value.to_bits() as i64;
        self.perform_wide(Operation::Store { place, value, order, scope });
    }
}
