//! Property tests of the allocator, compared with a simple map of allocated units.

use iris_heap::layout::{Block, Layout};
use proptest::prelude::*;

/// Operation on an allocator.
#[derive(Clone, Debug)]
enum Step {
    Alloc(u64),
    /// Frees the live block with this number, modulo the number of live blocks.
    Free(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let size = prop_oneof![0u64..200, 0u64..5000, Just(u64::MAX), Just(1u64 << 40)];
    let step = prop_oneof![
        3 => size.prop_map(Step::Alloc),
        2 => any::<usize>().prop_map(Step::Free),
    ];
    prop::collection::vec(step, 0..200)
}

fn geometry() -> impl Strategy<Value = (u64, u64, u64)> {
    (0u64..70_000, 0u64..5000, prop::sample::select(vec![1u64, 16, 128, 1024]))
}

/// Length of the longest run of free units, and the number of free units.
fn free_runs(map: &[bool]) -> (usize, usize) {
    let (mut longest, mut run, mut free) = (0, 0, 0);
    for &taken in map {
        run = if taken { 0 } else { run + 1 };
        free += usize::from(!taken);
        longest = longest.max(run);
    }
    (longest, free)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn blocks_are_as_the_map_says((capacity, reserved, unit) in geometry(), steps in steps()) {
        let mut layout = Layout::new(capacity, reserved, unit);
        let mut twin = layout.clone();
        let start = reserved.div_ceil(unit);
        let units = (capacity / unit).saturating_sub(start) as usize;
        // Model that the allocator is compared with: for each unit, whether it is allocated.
        let mut map = vec![false; units];
        let mut live: Vec<Block> = Vec::new();
        let fresh = layout.clone();
        for step in steps {
            match step {
                Step::Alloc(bytes) => {
                    let wanted = bytes.max(1).div_ceil(unit);
                    let before = layout.clone();
                    let got = layout.alloc(bytes);
                    prop_assert_eq!(got, twin.alloc(bytes), "the same on every rank");
                    let (longest, free) = free_runs(&map);
                    match got {
                        Ok(block) => {
                            prop_assert!(wanted as usize <= longest);
                            prop_assert_eq!(block.offset % unit, 0);
                            prop_assert_eq!(block.bytes, wanted * unit);
                            prop_assert!(block.offset >= reserved);
                            prop_assert!(block.offset + block.bytes <= capacity);
                            let first = (block.offset / unit - start) as usize;
                            for taken in &mut map[first..first + wanted as usize] {
                                prop_assert!(!*taken, "an overlap");
                                *taken = true;
                            }
                            prop_assert!(live.iter().all(|b| b.serial != block.serial));
                            live.push(block);
                        }
                        Err(full) => {
                            prop_assert!(longest < wanted as usize, "there was room");
                            prop_assert_eq!(full.asked, wanted.saturating_mul(unit).max(
                                if wanted.checked_mul(unit).is_none() { u64::MAX } else { 0 }));
                            prop_assert_eq!(full.free, free as u64 * unit);
                            prop_assert_eq!(full.largest, longest as u64 * unit);
                            prop_assert_eq!(&layout, &before, "an error changes nothing");
                        }
                    }
                }
                Step::Free(number) if !live.is_empty() => {
                    let block = live.swap_remove(number % live.len());
                    prop_assert_eq!(layout.free(block.offset, block.serial), Some(block));
                    prop_assert!(twin.free(block.offset, block.serial).is_some());
                    prop_assert_eq!(layout.free(block.offset, block.serial), None);
                    let first = (block.offset / unit - start) as usize;
                    map[first..first + (block.bytes / unit) as usize].fill(false);
                }
                Step::Free(_) => {}
            }
            let (longest, free) = free_runs(&map);
            prop_assert_eq!(layout.free_bytes(), free as u64 * unit);
            prop_assert_eq!(layout.largest(), longest as u64 * unit, "neighbours are one block");
            for block in &live {
                prop_assert_eq!(layout.find(block.offset, block.bytes), Some(*block));
                prop_assert_eq!(layout.find(block.offset + block.bytes - 1, 1), Some(*block));
                prop_assert_eq!(layout.find(block.offset, block.bytes + 1), None);
            }
        }
        let mut sorted = live.clone();
        sorted.sort_by_key(|b| b.offset);
        prop_assert_eq!(layout.blocks().collect::<Vec<_>>(), sorted);
        for block in live {
            prop_assert!(layout.free(block.offset, block.serial).is_some());
        }
        prop_assert_eq!(layout.free_bytes(), fresh.capacity(), "nothing is lost");
        prop_assert_eq!(layout.largest(), fresh.capacity());
        prop_assert_eq!(layout.blocks().count(), 0);
    }
}
