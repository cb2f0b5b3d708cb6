//! Timing of sides that are compared: the sides take turns, and a sample is the time of the slowest
//! rank.

use anyhow::Result;
use iris_heap::World;

use crate::job::gather;
use crate::progress::Progress;

/// Function that orders the sides of a turn, given the number of the turn and the number of sides.
type Order = fn(usize, usize) -> Vec<usize>;

/// Order in which `sides` sides are timed in turn number `turn`. Over `2 * sides` turns each side
/// comes directly after each other one equally often (a Williams design), so that all run under the
/// same conditions: a long product is several percent slower or faster behind other work, which
/// leaves a GPU with another temperature and clock.
pub(crate) fn balanced(turn: usize, sides: usize) -> Vec<usize> {
    // 0, the last, 1, the last but one, and so on: all differences of neighbours differ.
    let zigzag = (0..sides).map(|at| if at % 2 == 0 { at / 2 } else { sides - 1 - at / 2 });
    let mut order: Vec<usize> = zigzag.map(|side| (side + turn) % sides).collect();
    if turn / sides % 2 == 1 {
        order.reverse();
    }
    order
}

/// Order of sides of which each reads the result of the one before it.
pub(crate) fn chained(_: usize, sides: usize) -> Vec<usize> {
    (0..sides).collect()
}

/// Calls `time` for each of `sides` sides in each of `turns` turns, after one turn that warms up;
/// `time` returns this rank's time of a side in microseconds. Returns for each side the time of the
/// slowest rank in each turn. Collective.
#[track_caller]
pub(crate) fn in_turns(
    (world, progress): (&World, &Progress),
    turns: usize,
    (sides, order): (usize, Order),
    mut time: impl FnMut(usize) -> Result<f64>,
) -> Result<Vec<Vec<f64>>> {
    let mut times = vec![Vec::new(); sides];
    for turn in 0..=turns {
        for side in order(turn, sides) {
            let us = time(side)?;
            if turn > 0 {
                times[side].push(us);
            }
        }
        if turn > 0 {
            progress.step();
        }
    }
    let all: Vec<Vec<Vec<f64>>> = gather(world, &times)?;
    Ok((0..sides).map(|side| slowest(all.iter().map(|rank| &rank[side][..]))).collect())
}

/// Time of the slowest rank in each turn; `ranks` has the times of each rank by turn.
pub(crate) fn slowest<'a>(mut ranks: impl Iterator<Item = &'a [f64]>) -> Vec<f64> {
    let slower = |all: Vec<f64>, one: &[f64]| all.iter().zip(one).map(|(a, b)| a.max(*b)).collect();
    let first = ranks.next().map_or(Vec::new(), <[f64]>::to_vec);
    ranks.fold(first, slower)
}

/// Median of `values`; the mean of the two middle ones if their number is even, 0 if there are
/// none.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        len if len % 2 == 1 => values[len / 2],
        len => (values[len / 2 - 1] + values[len / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_rank_counts() {
        let times = [vec![1.0, 2.0, 9.0], vec![4.0, 1.0, 1.0]];
        assert_eq!(median(slowest(times.iter().map(Vec::as_slice))), 4.0);
        assert_eq!(median(vec![3.0, 1.0]), 2.0);
        assert_eq!(median(Vec::new()), 0.0);
    }

    #[test]
    fn sides_follow_each_other_equally_often() {
        for sides in 1..10 {
            let mut after = vec![vec![0; sides]; sides];
            for turn in 0..2 * sides {
                let order = balanced(turn, sides);
                let mut sorted = order.clone();
                sorted.sort_unstable();
                assert!(sorted.into_iter().eq(0..sides), "{order:?}");
                order.windows(2).for_each(|pair| after[pair[0]][pair[1]] += 1);
            }
            for (side, followers) in after.iter().enumerate() {
                let others = followers.iter().enumerate().filter(|&(other, _)| other != side);
                assert!(others.map(|(_, times)| times).all(|&times| times == 2), "{after:?}");
            }
        }
    }

    #[test]
    fn the_first_turn_is_not_counted() {
        let samples = World::run_threads(2, |world| -> Result<_> {
            let progress = Progress::new("turns", 1, 2);
            let (mut turns, rank) = ([0.0; 2], world.rank() as f64);
            in_turns((&world, &progress), 2, (2, balanced), |side| {
                turns[side] += 1.0;
                Ok(turns[side] + 10.0 * rank * side as f64)
            })
        });
        assert_eq!(samples.unwrap(), vec![vec![vec![2.0, 3.0], vec![12.0, 13.0]]; 2]);
    }
}
