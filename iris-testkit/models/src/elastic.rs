//! Scenarios of going on after a lost rank: ranks agree on the members of the next epoch, by words of
//! a page that outlives every process, and a rank that was stopped stores to memory of the old epoch.
//!
//! **Limits.** Only [`search::exhaust`](crate::search::exhaust) can run these scenarios: flags of the
//! environment, such as a crash, are accessed without atomics, so that a thread reads them in the
//! step before. A process counts as dead once it has made its last store, as a pidfd tells it.

use iris_sync::{Access, Memory, Order, Scope, SymWord, epoch};

use super::ops::value;
use super::{Operation, Place, Scenario, Thread};

/// Rule by which ranks decide who goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decision {
    /// The first compare-and-exchange decides; the word keeps the decision for ever.
    Right,
    /// Mutant: a rank stores its proposal instead of exchanging it.
    ByStore,
    /// Mutant: the lowest member clears the word when all members have met.
    Cleared,
    /// Mutant: a rank counts a living process as a member before that process waits for a decision.
    BeforePhase,
    /// Mutant: a rank leaves itself out of its proposal.
    WithoutSelf,
    /// Mutant: a new process takes the slot of a dead member before the members have met.
    SlotReused,
}

/// Number of slots of the page; each holds the process of one rank.
const SLOTS: u32 = 3;
/// Slot that a new process takes if its process has died.
const TAKEN: u32 = 2;

/// State of the process in a slot, as its peers see it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// The process works in the epoch that has ended.
    Works,
    /// The process waits for a decision.
    Waits,
    /// The process meets the other members of the next epoch.
    Meets,
    /// Another process, which has taken the slot, meets the other members.
    SecondMeets,
    /// The process has ended; it stores nothing after this state.
    Dead,
}

/// State of the process in `slot`.
fn state(slot: u32) -> Place {
    Place::Sym { rank: slot, index: 1 << 20 }
}

/// Members of the next epoch, as a mask of slots; 0 until they are decided.
const DECIDED: Place = Place::Sym { rank: 0, index: (1 << 20) + 1 };
/// Number of decisions that were made; no word of the page, but of the check.
const DECISIONS: Place = Place::Sym { rank: 0, index: (1 << 20) + 2 };

/// Flag by which the environment tells the process of a rank to crash at its next step.
fn crashes(rank: u32) -> Place {
    Place::Dev { rank, index: 1 << 20 }
}

/// Flag by which the environment ends the patience of the process of a rank.
fn impatient(rank: u32) -> Place {
    Place::Dev { rank, index: (1 << 20) + 1 }
}

/// Waits for one slot: polls its state until `ends` maps the state to a result.
fn poll<T>(process: &Process<'_, '_>, slot: u32, ends: impl Fn(i32) -> Option<T>) -> Option<T> {
    loop {
        if let Some(result) = ends(process.load(state(slot))?) {
            return Some(result);
        }
        process.0.perform(Operation::Pause);
    }
}

/// Process of a member. Each of its operations returns `None` if the process has crashed since.
struct Process<'a, 'b>(&'a Thread<'b>);

impl Process<'_, '_> {
    /// Returns `value`, or `None` if the process crashes here.
    fn lives<T>(&self, value: T) -> Option<T> {
        (self.0.read(crashes(self.0.rank())) == 0).then_some(value)
    }

    fn load(&self, place: Place) -> Option<i32> {
        self.lives(load(self.0, place))
    }

    fn store(&self, place: Place, value: i32) -> Option<()> {
        store(self.0, place, value);
        self.lives(())
    }

    /// Proposes `mask` as the members, unless a decision stands; returns the decision.
    fn decide(&self, mask: i32, how: Decision) -> Option<i32> {
        let (thread, order, scope) = (self.0, Order::AcqRel, Scope::System);
        let found = if how == Decision::ByStore {
            store(thread, DECIDED, mask);
            0
        } else {
            let (place, expected, value) = (DECIDED, 0, mask);
            thread.perform(Operation::CompareExchange { place, expected, value, order, scope })
        };
        if found != 0 {
            return self.lives(found);
        }
        let count = Operation::Add { place: DECISIONS, value: 1, order, scope };
        thread.check(DECISIONS, thread.perform(count), 0);
        self.lives(mask)
    }

    /// Proposes the processes that wait, and meets the members that were decided. If all processes
    /// are `patient`, none that lives is left out.
    fn go_on(&self, how: Decision, patient: bool) -> Option<()> {
        let (thread, own) = (self.0, self.0.rank());
        let others = || (0..SLOTS).filter(move |&slot| slot != own);
        self.lives(())?;
        self.store(state(own), State::Waits as i32)?;
        let mut mask = if how == Decision::WithoutSelf { 0 } else { bit(own) };
        for slot in others() {
            let counts = |seen: i32| match seen {
                it if it == State::Dead as i32 => Some(0),
                it if it != State::Works as i32 || how == Decision::BeforePhase => Some(bit(slot)),
                _ => (thread.read(impatient(own)) != 0).then_some(0),
            };
            mask |= poll(self, slot, counts)?;
        }
        let decided = self.decide(mask, how)?;
        if decided & bit(own) == 0 {
            if patient {
                thread.check(DECIDED, decided, decided | bit(own));
            }
            return Some(());
        }
        self.store(state(own), State::Meets as i32)?;
        for slot in others().filter(|&slot| decided & bit(slot) != 0) {
            let met = |seen: i32| match seen {
                it if it == State::Waits as i32 => None,
                it if it == State::Dead as i32 => Some(()),
                it => {
                    thread.check(state(slot), it, State::Meets as i32);
                    Some(())
                }
            };
            poll(self, slot, met)?;
        }
        if how == Decision::Cleared && decided.trailing_zeros() == own {
            self.store(DECIDED, 0)?;
        }
        Some(())
    }
}

fn bit(slot: u32) -> i32 {
    1 << slot
}

fn load(thread: &Thread<'_>, place: Place) -> i32 {
    let (order, scope) = (Order::Acquire, Scope::System);
    thread.perform(Operation::Load { place, order, scope })
}

fn store(thread: &Thread<'_>, place: Place, value: i32) {
    let (value, order, scope) = (value.into(), Order::Release, Scope::System);
    thread.perform(Operation::Store { place, value, order, scope });
}

/// New process that takes the slot [`TAKEN`] of a dead process. A decision that names the slot names
/// the process that was there, so the slot is free only if the decision does not name it.
fn replace(thread: &Thread<'_>, how: Decision) {
    if load(thread, state(TAKEN)) != State::Dead as i32 {
        return;
    }
    let is_member = load(thread, DECIDED) & bit(TAKEN) != 0;
    if is_member && how == Decision::SlotReused {
        store(thread, state(TAKEN), State::SecondMeets as i32);
    }
}

/// Scenario in which the three ranks of a job decide who goes on. Workgroup 0 of a rank is its
/// process. Workgroup 1 crashes the process of each rank of `crashing` at any step, or at none.
/// Workgroup 2 ends the patience of each rank of `hasty` at any step: that rank no longer waits for a
/// living process, so it may propose fewer members. Workgroup 3 of the last rank is a new process.
pub fn decide(how: Decision, crashing: &'static [u32], hasty: &'static [u32]) -> Scenario {
    let name = format!("decide, ranks {crashing:?} crash, {hasty:?} are hasty, {how:?}");
    let flags = (0..SLOTS).flat_map(|rank| [crashes(rank), impatient(rank)]);
    let scenario = flags.fold(Scenario::new(name, SLOTS), |it, place| it.initial(place, 0));
    scenario.groups(&[3, 3, 4]).program(move |thread| {
        let rank = thread.rank();
        match thread.id().group {
            0 => {
                let ended = Process(thread).go_on(how, hasty.is_empty());
                if ended.is_none() {
                    store(thread, state(rank), State::Dead as i32);
                }
            }
            1 if crashing.contains(&rank) => thread.write(crashes(rank), 1),
            2 if hasty.contains(&rank) => thread.write(impatient(rank), 1),
            3 => replace(thread, how),
            _ => {}
        }
    })
}

/// Memory of the old epoch that the new one uses again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reuse {
    /// None: the new epoch has memory of its own.
    Nothing,
    /// Mutant: the signals. The numbers of calls begin anew, so an old signal looks like a new one.
    Signals,
    /// Mutant: the inboxes.
    Inboxes,
    /// Mutant: C, which peers write directly.
    DirectC,
}

/// Rank that is stopped in the old epoch and runs on at any time.
const LATE: u32 = 1;

/// Memory of one epoch, at rank `at`.
#[derive(Clone, Copy)]
struct Epoch {
    signals: u32,
    inboxes: u32,
    c: u32,
}

impl Epoch {
    fn signal(self, thread: &Thread<'_>, at: u32, from: u32) -> SymWord {
        thread.channel().signal(at, from, self.signals)
    }

    fn inbox(self, thread: &Thread<'_>, at: u32, from: u32) -> Place {
        thread.cell(at, self.inboxes, from)
    }

    fn c(self, thread: &Thread<'_>, at: u32) -> Place {
        thread.cell(at, self.c, 0)
    }

    /// Sends `sent` as rank `from` into the inbox of rank `at`, and raises the signal.
    fn send(self, thread: &Thread<'_>, (at, from): (u32, u32), sent: i32) {
        thread.write(self.inbox(thread, at, from), sent);
        epoch::publish(thread, self.signal(thread, at, from), thread.call(0));
    }
}

/// Scenario of a call in which rank 1 is stopped, and of the first call of the next epoch, which has
/// the same number: ranks 0 and 2 go on, as ranks 0 and 1. Workgroup 1 of these ranks ends the old
/// epoch at any step. Rank 1 makes its stores at any time. What is read in the new epoch was stored
/// in the new epoch.
pub fn epochs(reuse: Reuse) -> Scenario {
    let revoked = |rank| Place::Dev { rank, index: 1 << 20 };
    let scenario = Scenario::new(format!("epochs, reuse {reuse:?}"), 3);
    let scenario = (0..3).fold(scenario, |it, rank| it.initial(revoked(rank), 0));
    scenario.groups(&[2, 1, 2]).program(move |thread| {
        let (me, call) = (thread.rank(), thread.call(0));
        if thread.id().group == 1 {
            return thread.write(revoked(me), 1);
        }
        let old = Epoch { signals: 0, inboxes: 0, c: 2 };
        for peer in thread.channel().peers() {
            old.send(thread, (peer, me), value(me, call.number(), 0, 0));
            // Direct store of the result of a tile that this rank owns.
            thread.write(old.c(thread, peer), value(me, call.number(), 1, 0));
        }
        if me == LATE {
            return;
        }
        let signal = old.signal(thread, me, LATE);
        while !call.reached_by(thread.load(signal, Access::VersionLoad))
            && thread.read(revoked(me)) == 0
        {
            thread.pause(0);
        }
        let new = Epoch {
            signals: u32::from(reuse != Reuse::Signals),
            inboxes: u32::from(reuse != Reuse::Inboxes),
            c: if reuse == Reuse::DirectC { old.c } else { 3 },
        };
        // Ranks in the new epoch, and values that no store of the old epoch has.
        let (own, other, peer) = (me / 2, 1 - me / 2, 2 - me);
        let sent = |rank| value(rank, call.number(), 2, 0);
        thread.write(new.c(thread, me), sent(own));
        new.send(thread, (peer, own), sent(own));
        let signal = new.signal(thread, me, other);
        if epoch::wait(thread, thread.channel(), signal, call, other).is_ok() {
            thread.expect(new.inbox(thread, me, other), sent(other));
            thread.expect(new.c(thread, me), sent(own));
        }
    })
}
