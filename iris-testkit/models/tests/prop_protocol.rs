//! Property tests of call numbers and of the layout of words.

use std::collections::HashMap;

use iris_sync::{Call, Channel, LINE_WORDS, REFRESH_PERIOD, Shape};
use proptest::prelude::*;

proptest! {
    /// Tests that two calls compare by their distance, whatever their numbers.
    #[test]
    fn calls_compare_by_distance(start: i32, ahead in 0..i32::MAX, behind in 1..=i32::MAX) {
        let call = Call::new(start);
        prop_assert!(call.reached_by(start.wrapping_add(ahead)));
        prop_assert!(!call.reached_by(start.wrapping_sub(behind)));
        prop_assert_eq!(call.next().previous(), call);
        prop_assert_ne!(call.parity(), call.next().parity());
    }

    /// Tests that a word that was last refreshed on time compares as earlier in any call, so no
    /// later call mistakes the word for one of its own.
    #[test]
    fn a_refreshed_word_stays_behind(start: i32) {
        let due = Call::new(start & -REFRESH_PERIOD);
        prop_assert!(due.refreshes());
        let age = start.wrapping_sub(due.number());
        prop_assert!((0..REFRESH_PERIOD).contains(&age));
        prop_assert!(due.reached_by(start));
        prop_assert!(!Call::new(start).next().reached_by(due.number()));
    }

    /// Tests that words of an op do not overlap, lie at their planned positions, and share no cache
    /// line with words of another writer.
    #[test]
    fn words_lie_apart(
        size in 1u32..9,
        tiles in 0u32..70,
        flags in 0u32..70,
        locks: bool,
        pairs in 0u32..40,
        first_line in 0u32..50,
    ) {
        let shape = Shape { op: 3, size, tiles, flags, locks, sequence: 0, pairs, packs: 0 };
        let signal = first_line * LINE_WORDS;
        let (channel, words) = Channel::lay_out(shape, 0, signal, 64);
        // Words laid out so far: first word, number of words from there, and rank that writes them.
        let mut taken = Vec::new();
        for source in 0..size {
            for parity in 0..2 {
                taken.push((channel.entry(0, source, parity).index, LINE_WORDS, source));
            }
            for phase in 0..2 {
                taken.push((channel.barrier(0, source, phase).index, 1, source));
            }
            taken.push((channel.done(0, source).index, 1, source));
            for tile in 0..tiles {
                taken.push((channel.signal(0, source, tile).index, 1, source));
                taken.push((channel.result(0, source, tile).index, 1, source));
            }
        }
        if pairs > 0 {
            for (source, parity) in (0..size).flat_map(|source| [(source, 0), (source, 1)]) {
                for pair in 0..iris_sync::ll::HEAD + pairs {
                    let index = channel.pair(0, source, parity, pair).index;
                    prop_assert_eq!(index % 4, 0, "a pair is aligned to its size");
                    taken.push((index, 4, source));
                }
            }
        }
        if locks {
            taken.extend((0..tiles).map(|tile| (channel.lock(0, tile).index, 1, u32::MAX)));
        }
        let mut lines = HashMap::new();
        for &(index, _, writer) in &taken {
            let other = *lines.entry(index / LINE_WORDS).or_insert(writer);
            prop_assert_eq!(other, writer, "line of word {}", index);
        }
        taken.sort_unstable();
        for pair in taken.windows(2) {
            prop_assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{:?} overlap", pair);
        }
        let ends = taken.iter().map(|&(index, count, _)| index + count).max().unwrap_or(signal);
        prop_assert!(taken.iter().all(|&(index, ..)| index >= signal));
        prop_assert!(ends <= signal + words.signal, "{} words, said {}", ends - signal, words.signal);
        let device = [channel.call, channel.finished, 64 + iris_sync::PRIVATE_SEQUENCE];
        prop_assert!((0..flags).all(|unit| !device.contains(&channel.flag(unit).index)));
        prop_assert!((0..flags).all(|unit| channel.flag(unit).index < 64 + words.device));
        prop_assert!(channel.call != channel.finished);
    }
}
