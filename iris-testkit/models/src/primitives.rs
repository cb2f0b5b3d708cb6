//! Scenarios of the primitives that ops are made of: locks, barriers, tile flags, entry records and
//! aborts.

use iris_sync::barrier::{Members, arrive_and_wait};
use iris_sync::sym::abort::REVOKED;
use iris_sync::{
    ABORT_WORD, Aborted, Access, End, FaultKind, LINE_WORDS, Limit, Memory, Span, SymWord, epoch,
    lock, tile_flags,
};

use super::headers::programs;
use super::ops::value;
use super::{Failure, Headers, Place, Scenario, Thread};

/// Scenario of the versioned lock: rank 0 hands a cell to rank 1, which signals when the cell may
/// be written again.
pub fn versioned(calls: u32) -> Scenario {
    Scenario::new(format!("versioned lock, {calls} versions"), 2)
        .calls(calls, 7)
        .headers(Headers::new(programs::VERSIONED, 1))
        .program(|thread| {
            let (there, back) =
                (thread.channel().signal(1, 0, 0), thread.channel().signal(0, 1, 0));
            let cell = thread.cell(1, 0, 0);
            for version in (0..thread.calls()).map(|position| thread.call(position)) {
                let wanted = value(0, version.number(), 0, 0);
                if thread.rank() == 0 {
                    thread.write(cell, wanted);
                    epoch::publish(thread, there, version);
                    let _ = epoch::wait(thread, thread.channel(), back, version, 1);
                } else if epoch::wait(thread, thread.channel(), there, version, 0).is_ok() {
                    thread.expect(cell, wanted);
                    epoch::publish(thread, back, version);
                }
            }
        })
}

/// Scenario of the spinlock: every rank adds to one cell, `turns` times.
pub fn spinlock(ranks: u32, turns: u32) -> Scenario {
    let cell = Place::Cell { rank: 0, index: 0 };
    Scenario::new(format!("spinlock, {ranks} ranks, {turns} turns"), ranks)
        .calls(turns, 7)
        .initial(cell, 0)
        .headers(Headers::new(programs::SPINLOCK, 1))
        .program(move |thread| {
            let word = thread.channel().lock(0, 0);
            let mut seen = 0;
            for position in 0..thread.calls() {
                if lock::take(thread, thread.channel(), thread.call(position), word, 0).is_err() {
                    return;
                }
                let now = thread.read(cell);
                // Each rank only adds to the cell, so a smaller value than before would mean a lost
                // update.
                if now < seen {
                    thread.check(cell, now, seen);
                }
                seen = now + 1;
                thread.write(cell, seen);
                lock::give(thread, word);
            }
        })
}

/// Scenario of the device barrier: members read after it what members wrote before it.
///
/// With `twice`, a second barrier protects a cell until all members have read it. Without `twice`,
/// calls alternate between two cells, so that the words of a single barrier are tested alone.
pub fn barrier(ranks: u32, members: Members, calls: u32, twice: bool) -> Scenario {
    let name = format!("barrier, members {:#b} of {ranks}, {calls} calls", members.bits());
    Scenario::new(name, ranks)
        .calls(calls, 7)
        .headers(Headers::new(programs::BARRIER, 1).option(twice.into()).members(members.bits()))
        .program(move |thread| {
            if !members.contains(thread.rank()) {
                return;
            }
            let channel = thread.channel();
            for position in 0..thread.calls() {
                let call = thread.call(position);
                let slot = if twice { 0 } else { position };
                thread.write(
                    thread.cell(thread.rank(), 0, slot),
                    value(thread.rank(), call.number(), 0, 0),
                );
                let _ = arrive_and_wait(thread, channel, call, 0, members, Limit::Entry);
                for peer in (0..ranks).filter(|&peer| members.contains(peer)) {
                    thread.expect(thread.cell(peer, 0, slot), value(peer, call.number(), 0, 0));
                }
                if twice {
                    let _ = arrive_and_wait(thread, channel, call, 1, members, Limit::Progress);
                }
            }
        })
}

/// Scenario of a barrier in the middle of a launch. The threads of a workgroup write data before
/// the barrier; other threads, on another rank, read the data after it.
pub fn barrier_in_launch(ranks: u32) -> Scenario {
    Scenario::new(format!("barrier in a launch, {ranks} ranks"), ranks)
        .headers(Headers::new(programs::BARRIER_IN_LAUNCH, 1))
        .program(move |thread| {
            let (me, threads) = (thread.id().thread, thread.threads());
            let crossed = (me + 1) % threads;
            let wanted = |rank, element| value(rank, thread.call(0).number(), 0, element);
            let _ = thread.launch().run(End::Advance, |wg| {
                thread.write(thread.cell(thread.rank(), 0, me), wanted(thread.rank(), me));
                wg.barrier(0, Members::all(ranks))?;
                for peer in wg.channel.peers() {
                    thread.expect(thread.cell(peer, 0, crossed), wanted(peer, crossed));
                }
                Ok(())
            });
        })
}

/// Scenario of [`barrier_in_launch`] in which thread 0 arrives and waits inside a branch, as a
/// tracing build once did. With waves in lockstep, no other thread of its wave has arrived by then.
pub fn barrier_in_arms(ranks: u32) -> Scenario {
    Scenario::new(format!("barrier in the arms of a branch, {ranks} ranks"), ranks)
        .headers(Headers::new(programs::BARRIER_IN_LAUNCH, 1).option(1))
        .program(move |thread| {
            let _ = thread.launch().run(End::Advance, |wg| {
                wg.check_not_aborted()?;
                let members = Members::all(ranks);
                let wait =
                    || arrive_and_wait(thread, wg.channel, wg.call(), 0, members, Limit::Entry);
                let passed = if Memory::thread(thread) == 0 {
                    let passed = wait();
                    thread.end(Span::Wait);
                    passed
                } else {
                    wait()
                };
                if thread.vote(passed.is_ok()) { Ok(()) } else { Err(Aborted) }
            });
        })
}

/// Scenario of tile flags: one workgroup fills two units and raises their flags; another waits for
/// the flags and reads the units.
pub fn flags(calls: u32) -> Scenario {
    Scenario::new(format!("tile flags, {calls} calls"), 1)
        .calls(calls, 7)
        .groups(&[2])
        .headers(Headers::new(programs::FLAGS, 1))
        .program(|thread| {
            for call in (0..thread.calls()).map(|position| thread.call(position)) {
                for unit in 0..2 {
                    let cell = thread.cell(0, 0, unit);
                    let wanted = value(0, call.number(), unit, 0);
                    if thread.id().group == 0 {
                        thread.write(cell, wanted);
                        tile_flags::raise(thread, thread.channel(), call, unit);
                    } else if tile_flags::wait(thread, thread.channel(), call, unit, 0).is_ok() {
                        thread.expect(cell, wanted);
                    }
                }
                thread.boundary();
            }
        })
}

/// Scenario of entry records and credits alone: every rank enters and reads the records of all.
pub fn entry(ranks: u32, calls: u32) -> Scenario {
    Scenario::new(format!("entry and credit, {ranks} ranks, {calls} calls"), ranks)
        .calls(calls, 7)
        .headers(Headers::new(programs::ENTRY, 1))
        .program(|thread| {
            for _ in 0..thread.calls() {
                let _ = thread.launch().run(End::Advance, |wg| {
                    wg.enter()?;
                    wg.channel.peers().try_for_each(|peer| wg.wait_entry(peer))
                });
            }
        })
}

/// Mutant in which each rank clears its own words first, like a memset that may still run when
/// peers write them.
pub fn late_memset() -> Scenario {
    Scenario::new("entry, words cleared without a barrier", 2)
        .headers(Headers::new(programs::ENTRY, 1).option(1))
        .program(|thread| {
            let (channel, before) = (thread.channel(), thread.call(0).previous());
            for peer in channel.peers() {
                let mut word = channel.entry(thread.rank(), peer, thread.call(0).parity());
                word.index += LINE_WORDS - 1;
                thread.store(word, before.number(), Access::AbortStore);
            }
            let _ = thread.launch().run(End::Advance, |wg| {
                wg.enter()?;
                wg.channel.peers().try_for_each(|peer| wg.wait_entry(peer))
            });
        })
}

/// Scenario of an abort: rank 1 enters and then makes no progress. Rank 0 times out and aborts the
/// call. The abort must end the wait of rank 1, which has no deadline.
pub fn abort() -> Scenario {
    let expect = |thread: &Thread<'_>, through: bool| {
        if through {
            Failure::Other(format!("{:?} got through", thread.id())).raise();
        }
        let kept = thread.fault().map(|fault| (fault.kind, fault.rank));
        let expected = match thread.rank() {
            0 => (FaultKind::NoProgress, 1),
            // The word names the rank that was waited for in vain: this one.
            _ => (FaultKind::PeerGaveUp, 1),
        };
        if kept != Some(expected) {
            Failure::Other(format!("{:?} keeps {kept:?}", thread.id())).raise();
        }
    };
    let scenario = Scenario::new("abort on a fault", 2)
        .expires(|id, limit, _| id.rank == 0 && limit == Limit::Progress);
    waits_in_vain(scenario, expect)
}

/// Scenario of a revoked epoch: the host of rank 0 stops its kernel by [`REVOKED`]. The kernels of all ranks
/// leave with this code, which names no rank.
pub fn revoked() -> Scenario {
    let expect = |thread: &Thread<'_>, _: bool| {
        let seen = thread.fault().map_or(0, |fault| fault.seen);
        let word = SymWord { rank: thread.rank(), index: ABORT_WORD };
        thread.check(word.into(), seen, REVOKED);
    };
    waits_in_vain(Scenario::new("revoked epoch", 2).host_revokes(0), expect)
}

/// Makes the program of `scenario` one in which ranks 0 and 1 enter a call and wait for words that
/// are never set. `expect` checks a thread afterwards; its argument tells whether the wait ended well.
fn waits_in_vain(scenario: Scenario, expect: fn(&Thread<'_>, bool)) -> Scenario {
    scenario.headers(Headers::new(programs::ABORT, 1).after(expect)).program(move |thread| {
        let result = thread.launch().run(End::Advance, |wg| {
            wg.enter()?;
            if thread.rank() == 0 {
                return wg.wait_tile(1, 0);
            }
            let never = thread.channel().result(1, 0, 0);
            epoch::wait(thread, thread.channel(), never, thread.call(0), 0).map(drop)
        });
        expect(thread, result.is_ok());
    })
}
