//! State of the search, with a hash that follows each change.

use super::random_numbers::mixed;

/// Memory, and position of each thread in its program.
///
/// The hash of a state is the exclusive or of one hash per thread position and one hash per word
/// that does not have its initial value. So the cost of an update depends only on what a step
/// changes, not on the size of the memory.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct State {
    memory: Vec<i64>,
    at: Vec<u32>,
    hash_of_memory: u128,
    hash_of_positions: u128,
}

impl State {
    /// Makes a state without memory whose threads are at these nodes of their programs. A node
    /// belongs to one thread only, so the hash of a node also identifies the thread.
    pub(super) fn new(at: Vec<u32>) -> Self {
        let hash_of_positions = at.iter().fold(0, |sum, &node| sum ^ hash_of_node(node));
        Self { at, hash_of_positions, ..Self::default() }
    }

    /// Becomes a copy of `other`; reuses the allocations of `self`.
    pub(super) fn copy_from(&mut self, other: &Self) {
        self.memory.clone_from(&other.memory);
        self.at.clone_from(&other.at);
        self.hash_of_memory = other.hash_of_memory;
        self.hash_of_positions = other.hash_of_positions;
    }

    /// Values of the words, by slot.
    pub(super) fn memory(&self) -> &[i64] {
        &self.memory
    }

    /// Nodes of the programs at which the threads are.
    pub(super) fn at(&self) -> &[u32] {
        &self.at
    }

    /// Moves a thread to a node of its program.
    pub(super) fn go(&mut self, thread: usize, node: u32) {
        self.hash_of_positions ^= hash_of_node(self.at[thread]) ^ hash_of_node(node);
        self.at[thread] = node;
    }

    /// Adds words with their initial values.
    pub(super) fn extend(&mut self, initial: impl Iterator<Item = i64>) {
        self.memory.extend(initial);
    }

    /// Sets a word, whose initial value is `initial`.
    pub(super) fn set(&mut self, slot: usize, value: i64, initial: i64) {
        let before = std::mem::replace(&mut self.memory[slot], value);
        for value in [before, value] {
            if value != initial {
                self.hash_of_memory ^= hash_of_word(slot, value);
            }
        }
    }

    /// Hash of the memory.
    pub(super) fn hash_of_memory(&self) -> u128 {
        self.hash_of_memory
    }

    /// Hash of the whole state, which identifies the state.
    pub(super) fn hash(&self) -> u128 {
        self.hash_of_memory ^ self.hash_of_positions
    }
}

fn hash_of_node(node: u32) -> u128 {
    hash(u64::from(node), 0x243f_6a88_85a3_08d3)
}

fn hash_of_word(slot: usize, value: i64) -> u128 {
    hash(value as u64, mixed(slot as u64 ^ 0x1319_8a2e_0370_7344))
}

/// Hash of 128 bits, from two runs of the finalizer of SplitMix64.
fn hash(value: u64, seed: u64) -> u128 {
    let low = mixed(value ^ seed);
    let high = mixed(low.wrapping_add(0x9e37_79b9_7f4a_7c15));
    u128::from(high) << 64 | u128::from(low)
}

#[cfg(test)]
mod tests {
    use rustc_hash::FxHashMap as HashMap;

    use super::super::{Machine, Random};
    use super::State;
    use crate::{Place, Rules, ops};

    /// State with the same memory and positions as `state`, reached by other changes.
    fn rebuilt(machine: &Machine<'_>, state: &State) -> State {
        let mut new = State::new(vec![u32::MAX; state.at().len()]);
        new.extend(machine.places[..state.memory().len()].iter().map(|&(_, initial)| initial));
        for (slot, &value) in state.memory().iter().enumerate().rev() {
            let initial = machine.places[slot].1;
            // Sets the word to another value in between, which must not change the hash.
            new.set(slot, value.wrapping_add(1), initial);
            new.set(slot, value, initial);
        }
        for (thread, &node) in state.at().iter().enumerate() {
            new.go(thread, node);
        }
        new
    }

    /// Tests that the hash depends on memory and positions alone, and that different states have
    /// different ones.
    #[test]
    fn the_hash_of_a_state_does_not_depend_on_how_it_was_reached() {
        let (scenario, rules) = (ops::one_shot(3, 1, 2).threads(2), Rules::default());
        let mut machine = Machine::new(&scenario, &rules);
        let mut positions: HashMap<u128, Vec<u32>> = HashMap::default();
        let mut memories: HashMap<u128, HashMap<Place, i64>> = HashMap::default();
        for seed in 0..20 {
            let mut random = Random(seed);
            let mut state = machine.first();
            loop {
                let same = rebuilt(&machine, &state);
                let whole = (state.at().to_vec(), state.memory().to_vec());
                assert_eq!((same.at().to_vec(), same.memory().to_vec()), whole);
                assert_eq!(same.hash(), state.hash());
                assert_eq!(same.hash_of_memory(), state.hash_of_memory());
                let mut memory = machine.memory(&state);
                memory.retain(|&place, value| *value != scenario.initial_value(place));
                let known = positions.entry(state.hash_of_positions).or_insert(whole.0.clone());
                assert_eq!(*known, whole.0, "two sets of positions of one hash");
                let known = memories.entry(state.hash_of_memory).or_insert(memory.clone());
                assert_eq!(*known, memory, "two memories of one hash");
                let choices: Vec<usize> = machine.choices(&state).collect();
                if choices.is_empty() {
                    break;
                }
                let thread = choices[(random.next() % choices.len() as u64) as usize];
                machine.step(&mut state, thread, None);
            }
        }
        assert!(positions.len() > 500, "{} sets of positions", positions.len());
        assert!(memories.len() > 500, "{} memories", memories.len());
    }
}
