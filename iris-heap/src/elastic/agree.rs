//! Agreement of the processes that are left on the members of the next epoch, and their meeting.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::page::{LAST_EPOCH, Phase};
use super::policy::slots;
use super::{Change, Current, MemberId, Next, Shared, watch};
use crate::abi::MAX_RANKS;
use crate::error::{Error, Result};
use crate::root_error::Distance;
use crate::util::{lock, unsupported};
use crate::world::World;

/// Interval between two looks while this process waits for others to come to a decision.
const LOOK: Duration = Duration::from_millis(1);
/// Longest time that one look counts for. If this process was stopped during it, the others may not
/// be late.
const LONGEST_LOOK: Duration = Duration::from_millis(100);

/// Number of attempts to meet that may fail for a reason of this process, before it leaves the job. A
/// single one may still follow from the death of another process.
const FAILURES: u32 = 3;

impl Shared {
    /// Does [`Member::next`].
    pub(super) fn next(&self) -> Result<Next> {
        let old = self.current();
        self.check_in_job()?;
        if let Some(epoch) = old.evicted {
            return Err(Error::Evicted { epoch });
        }
        if old.ranks.is_empty() {
            return Ok(Next::TooFew { alive: old.kept.count_ones() as usize });
        }
        if old.world.is_none() && !self.is_needed(&old) {
            return Ok(Next::Over);
        }
        self.revoke(&old);
        let (mut at, mut own_failures) = (old.clone(), 0);
        let mut attempt = 0;
        loop {
            attempt += 1;
            let (before, epoch) = (at.epoch, at.epoch + 1);
            at.kept = self.agree(&at)?;
            if at.kept >> self.slot & 1 == 0 {
                lock(&self.current).evicted = Some(epoch);
                return Err(Error::Evicted { epoch });
            }
            (at.epoch, at.ranks, at.world) = (epoch, self.policy.choose(at.kept), None);
            tracing::info!(epoch, before, ranks = ?at.ranks, "the job goes on");
            let Some(rank) = at.ranks.iter().position(|&slot| slot == self.slot) else {
                let alive = at.kept.count_ones() as usize;
                let too_few = at.ranks.is_empty();
                *lock(&self.current) = at;
                return Ok(if too_few { Next::TooFew { alive } } else { Next::Spare });
            };
            let job = format!("unique id {}, epoch {epoch}", self.job);
            let limit = self.policy.patience * attempt;
            let (size, settings) = (at.ranks.len(), self.settings.clone());
            match World::of_job(job, rank, size, Ok(settings), Some(limit)) {
                Ok(world) => {
                    world.set_epoch(epoch);
                    at.world = Some(world.clone());
                    let change = change(&old, &at);
                    *lock(&self.current) = at;
                    return Ok(Next::Epoch(world, change));
                }
                Err(error) => {
                    tracing::info!(epoch, %error, "the ranks have not met");
                    own_failures += u32::from(Distance::of(&error) == Distance::Root);
                    let is_over = matches!(error, Error::LauncherLost { .. });
                    if own_failures == FAILURES || is_over {
                        return Err(error);
                    }
                }
            }
            *lock(&self.current) = at.clone();
            self.revoke(&at);
        }
    }

    /// Waits, as a spare of the epoch `current`, until another process has ended the epoch. Returns
    /// false if the job is over.
    fn is_needed(&self, current: &Current) -> bool {
        let is_over = || slots(current.kept).any(|slot| self.page.phase(slot) == Phase::ENDED);
        loop {
            // The end of the job is looked at first: a rank whose process ends after it ends no epoch.
            if is_over() {
                return false;
            }
            if self.page.phase(self.slot) >= Phase::revoked(current.epoch) {
                return true;
            }
            std::thread::sleep(watch::TICK);
        }
    }

    /// Agrees with the other processes of the epoch `at` on those who go on in the next epoch. Returns
    /// their slots as a mask.
    fn agree(&self, at: &Current) -> Result<u64> {
        let next = at.epoch + 1;
        if next > LAST_EPOCH {
            let why = format!("a job has at most {LAST_EPOCH}; start all ranks anew");
            return Err(unsupported("another epoch", &why));
        }
        self.page.enter(self.slot, Phase::waits(at.epoch));
        let (mut waited, mut look) = (Duration::ZERO, Duration::ZERO);
        // For how long each process has been seen stopped without a break.
        let mut still = [Duration::ZERO; MAX_RANKS];
        loop {
            let begun = Instant::now();
            match self.page.decided(next) {
                0 => {}
                decided => return Ok(decided),
            }
            let (mut proposed, mut is_awaited) = (1 << self.slot, false);
            for slot in slots(at.kept).filter(|&slot| slot != self.slot) {
                // Whether the process has ended is looked at first: a process that has ended after
                // it began to wait is left out.
                let is_dead = self.is_dead(slot);
                let phase = self.page.phase(slot);
                if is_dead || phase.has_left() {
                    continue;
                }
                if phase >= Phase::waits(at.epoch) {
                    proposed |= 1 << slot;
                } else {
                    still[slot] = match self.is_stopped(slot) {
                        true => still[slot] + look,
                        false => Duration::ZERO,
                    };
                    is_awaited |= self.is_awaited(at, slot, phase, (waited, still[slot]));
                }
            }
            if !is_awaited {
                return Ok(self.page.decide(next, proposed));
            }
            // Processes that run are left to do so.
            std::thread::sleep(if waited < self.policy.patience { LOOK } else { watch::TICK });
            look = begun.elapsed().min(LONGEST_LOOK);
            waited += look;
        }
    }

    /// Whether a living process in `slot` that does not wait for the next epoch yet is awaited any
    /// longer, if this process has waited for the time `waited`, and has seen that one stopped for the
    /// time `still`.
    fn is_awaited(
        &self,
        at: &Current,
        slot: usize,
        phase: Phase,
        (waited, still): (Duration, Duration),
    ) -> bool {
        let given_up = self.given_up.load(Ordering::Acquire) >> slot & 1 == 1;
        if given_up && !still.is_zero() {
            return false;
        }
        // A process whose thread has ended the epoch runs, and its program will come. A spare has
        // nothing to do but wait.
        let will_come = phase >= Phase::revoked(at.epoch) && at.ranks.contains(&slot);
        waited < self.policy.patience
            || will_come
                && waited < self.settings.meeting_deadline()
                && still < self.policy.patience
    }
}

/// Difference between the epochs `old` and `new` of this process.
fn change(old: &Current, new: &Current) -> Change {
    let rank_of = |slot: &usize| old.ranks.iter().position(|was| was == slot);
    Change {
        members: new.ranks.iter().copied().map(MemberId).collect(),
        from: new.ranks.iter().map(rank_of).collect(),
        lost: slots(old.kept & !new.kept).map(MemberId).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_names_ranks_by_the_world_before() {
        let at = |kept, ranks: &[usize]| {
            let (epoch, ranks) = (0, ranks.to_vec());
            Current { epoch, kept, ranks, world: None, evicted: None }
        };
        let change = change(&at(0b11110, &[1, 3]), &at(0b11000, &[3, 4]));
        let lost = vec![MemberId(1), MemberId(2)];
        let members = vec![MemberId(3), MemberId(4)];
        assert_eq!(change, Change { members, from: vec![Some(1), None], lost });
    }
}
