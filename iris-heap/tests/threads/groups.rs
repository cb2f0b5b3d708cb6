//! Tests of worlds that are split into groups.

use std::sync::Barrier;
use std::time::Duration;

use iris_heap::{Error, Settings, World};
use iris_testkit::worlds::on_threads;

use super::each;

#[test]
fn split_by_color_and_key() {
    let r = World::run_threads(5, |w| {
        let color = [Some(1), Some(0), Some(1), None, Some(0)][w.rank()];
        let part = w.split(color, -(w.rank() as i64))?;
        let got = match part {
            None => vec![],
            Some(part) => {
                let all = part.allgather(&[w.rank() as u8])?;
                assert_eq!(part.local_rank(), part.rank());
                assert_eq!(part.local_size(), 2);
                let again = part.split(Some(7), 0)?.unwrap();
                assert_eq!(again.rank(), part.rank());
                again.close()?;
                part.close()?;
                all.concat()
            }
        };
        w.barrier()?;
        Ok::<_, Error>(got)
    });
    assert_eq!(r.unwrap(), [vec![2, 0], vec![4, 1], vec![2, 0], vec![], vec![4, 1]]);
}

/// Tests that a rank that aborts its world ends waits in groups of it, and in groups of these.
#[test]
fn an_abort_ends_waits_in_groups() {
    let turn = Barrier::new(3);
    let results = each(3, |world| {
        let group = world.split(Some(0), 0)?.unwrap();
        let inner = group.split(Some(0), 0)?.unwrap();
        turn.wait();
        let outcome = match world.rank() {
            0 => {
                world.abort();
                Ok(())
            }
            1 => group.barrier(),
            _ => inner.barrier(),
        };
        // Rank 0 keeps its groups until the others have their errors.
        turn.wait();
        outcome
    });
    let [_, in_group, in_inner] = results.try_into().unwrap();
    for error in [in_group.unwrap_err(), in_inner.unwrap_err()] {
        assert!(matches!(error, Error::PeerLost { rank: 0 }), "{error}");
    }
}

/// Tests the reason that a rank tells which leaves the world because a group of it has lost another rank:
/// the other rank's loss, although the world learns of that later.
#[test]
fn a_rank_that_leaves_for_the_loss_of_a_group_does_not_hide_it() {
    let turn = Barrier::new(2);
    let worlds = World::threads_with(3, &Settings::default().deadline(0.02)).unwrap();
    let run = |world: World| -> Result<(), Error> {
        let group = world.split((world.rank() > 0).then_some(0), 0)?;
        match world.rank() {
            0 => return world.barrier(),
            1 => {
                let lost = group.unwrap().barrier().unwrap_err();
                assert!(matches!(lost, Error::PeerLost { rank: 1 }), "{lost}");
                turn.wait();
            }
            _ => {
                drop(group);
                turn.wait();
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        Ok(())
    };
    let error = on_threads(worlds, run).swap_remove(0).unwrap_err();
    assert!(matches!(error, Error::PeerLost { rank: 2 }), "{error}");
}
