//! Thread of a member that watches the other processes of its epoch, and ends the epoch for this
//! process if one of them is lost, stands still, or has ended it.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use super::page::Phase;
use super::policy::{mask, slots};
use super::{Current, Shared};
use crate::util::lock;
use crate::world::World;

/// Interval between two looks at the phases of the other processes. A death shows at once.
pub(super) const TICK: Duration = Duration::from_millis(50);
/// Number of times in a row that a process must be seen stopped to be given up, spread over the
/// patience. If this process was stopped itself, it sees nothing meanwhile, and so blames nobody.
const STOPS: u32 = 4;

/// Watches until the member has left.
pub(super) fn run(shared: &Arc<Shared>) {
    let mut dead: u64 = 0;
    let (mut stops, mut last, mut looked) = (0, None, Instant::now());
    while !shared.left.load(Ordering::Acquire) {
        // No handle of the world is held during the wait: its last one, dropped here, could take seconds.
        let ranks = mask(&lock(&shared.current).ranks);
        dead |= shared.await_death(ranks & !dead);
        let current = shared.current();
        if looked.elapsed() >= shared.policy.patience / STOPS {
            looked = Instant::now();
            let next = shared.next_slot(&current, dead);
            let stopped = next.filter(|&slot| shared.is_stopped(slot));
            stops = match stopped {
                Some(_) if stopped == last => stops + 1,
                Some(_) => 1,
                None => 0,
            };
            last = stopped;
            let given_up = stopped.filter(|_| stops >= STOPS).map_or(0, |slot| 1 << slot);
            shared.given_up.store(given_up, Ordering::Release);
        }
        let is_closed = current.world.as_ref().is_some_and(World::is_closed);
        if shared.page.phase(shared.slot) < Phase::revoked(current.epoch)
            && !is_closed
            && shared.has_ended(&current)
        {
            shared.revoke(&current);
        }
    }
}

impl Shared {
    /// Waits for a tick or until one of the processes in the slots `watched` has ended. Returns the
    /// slots of those that have ended.
    fn await_death(&self, watched: u64) -> u64 {
        let others = slots(watched).filter_map(|slot| Some((slot, self.processes[slot].as_ref()?)));
        let (slots, mut fds): (Vec<_>, Vec<_>) = others
            .map(|(slot, process)| {
                (slot, PollFd::from_borrowed_fd(process.descriptor.as_fd(), PollFlags::IN))
            })
            .unzip();
        let tick = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as i64 };
        if poll(&mut fds, Some(&tick)).is_err() {
            return 0;
        }
        let ended = slots.iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
        ended.fold(0, |mask, (slot, _)| mask | 1 << slot)
    }

    /// Slot whose process this process watches for a stop: the next one, in a circle, that has not
    /// ended. Each process looks at one other process, because a look reads a file.
    fn next_slot(&self, current: &Current, dead: u64) -> Option<usize> {
        let others = mask(&current.ranks) & !dead & !(1 << self.slot);
        let later = others & u64::MAX.checked_shl(self.slot as u32 + 1).unwrap_or(0);
        slots(if later != 0 { later } else { others }).next()
    }

    /// Whether another process shows that the epoch has ended: a rank whose process is lost, stands still,
    /// or has ended the epoch itself, or a spare that has ended it. A spare that is lost ends no epoch.
    /// While this process closes the world, ranks that have closed it may end.
    fn has_ended(&self, current: &Current) -> bool {
        let given_up = self.given_up.load(Ordering::Acquire);
        let is_closing = current.world.as_ref().is_some_and(World::is_closing);
        let has_ended = |slot: usize| {
            let phase = self.page.phase(slot);
            let revoked = phase >= Phase::revoked(current.epoch);
            if !current.ranks.contains(&slot) {
                return revoked && !phase.has_left();
            }
            let is_still = || given_up >> slot & 1 == 1 && self.is_stopped(slot);
            phase != Phase::ENDED && (revoked || !is_closing && self.is_dead(slot) || is_still())
        };
        slots(current.kept).filter(|&slot| slot != self.slot).any(has_ended)
    }
}
