//! The scenarios of the primitives that ops are made of.

use iris_sync::barrier::{Members, arrive_and_wait};
use iris_sync::{
    Access, End, FaultKind, LINE_WORDS, Limit, Memory, Span, Stop, epoch, lock, tile_flags,
};

use super::headers::programs;
use super::ops::value;
use super::{Failure, Headers, Lane, Place, Scenario};

/// The versioned lock: rank 0 hands a cell to rank 1, which says when it may be written again.
pub fn versioned(calls: u32) -> Scenario {
    Scenario::new(format!("versioned lock, {calls} versions"), 2)
        .calls(calls, 7)
        .headers(Headers::new(programs::VERSIONED, 1))
        .program(|lane| {
            let (there, back) = (lane.channel().signal(1, 0, 0), lane.channel().signal(0, 1, 0));
            let cell = lane.cell(1, 0, 0);
            for version in (0..lane.calls()).map(|position| lane.call(position)) {
                let wanted = value(0, version.number(), 0, 0);
                if lane.rank() == 0 {
                    lane.write(cell, wanted);
                    epoch::publish(lane, there, version);
                    let _ = epoch::wait(lane, lane.channel(), back, version, 1);
                } else if epoch::wait(lane, lane.channel(), there, version, 0).is_ok() {
                    lane.expect(cell, wanted);
                    epoch::publish(lane, back, version);
                }
            }
        })
}

/// The spinlock: every rank adds to one cell, several times.
pub fn spinlock(ranks: u32, turns: u32) -> Scenario {
    let cell = Place::Cell { rank: 0, index: 0 };
    Scenario::new(format!("spinlock, {ranks} ranks, {turns} turns"), ranks)
        .calls(turns, 7)
        .initial(cell, 0)
        .headers(Headers::new(programs::SPINLOCK, 1))
        .program(move |lane| {
            let word = lane.channel().lock(0, 0);
            let mut seen = 0;
            for position in 0..lane.calls() {
                if lock::take(lane, lane.channel(), lane.call(position), word, 0).is_err() {
                    return;
                }
                let now = lane.read(cell);
                // Nobody's turn is lost: what we added is still there.
                if now < seen {
                    lane.check(cell, now, seen);
                }
                seen = now + 1;
                lane.write(cell, seen);
                lock::give(lane, word);
            }
        })
}

/// The device barrier: what members wrote before it, members read after it.
///
/// With `twice`, a second barrier keeps a cell until all have read it; else cells alternate, as
/// the words of a single barrier must stand by themselves.
pub fn barrier(ranks: u32, members: Members, calls: u32, twice: bool) -> Scenario {
    let name = format!("barrier, members {:#b} of {ranks}, {calls} calls", members.bits());
    Scenario::new(name, ranks)
        .calls(calls, 7)
        .headers(Headers::new(programs::BARRIER, 1).option(twice.into()).members(members.bits()))
        .program(move |lane| {
            if !members.contains(lane.rank()) {
                return;
            }
            let channel = lane.channel();
            for position in 0..lane.calls() {
                let call = lane.call(position);
                let slot = if twice { 0 } else { position };
                lane.write(
                    lane.cell(lane.rank(), 0, slot),
                    value(lane.rank(), call.number(), 0, 0),
                );
                let _ = arrive_and_wait(lane, channel, call, 0, members, Limit::Entry);
                for peer in (0..ranks).filter(|&peer| members.contains(peer)) {
                    lane.expect(lane.cell(peer, 0, slot), value(peer, call.number(), 0, 0));
                }
                if twice {
                    let _ = arrive_and_wait(lane, channel, call, 1, members, Limit::Progress);
                }
            }
        })
}

/// The barrier in the middle of a launch: what the lanes of one workgroup wrote before it, other
/// lanes of another rank read after it.
pub fn barrier_in_launch(ranks: u32) -> Scenario {
    Scenario::new(format!("barrier in a launch, {ranks} ranks"), ranks)
        .headers(Headers::new(programs::BARRIER_IN_LAUNCH, 1))
        .program(move |lane| {
            let (me, lanes) = (lane.id().lane, lane.lanes());
            let crossed = (me + 1) % lanes;
            let wanted = |rank, element| value(rank, lane.call(0).number(), 0, element);
            let _ = lane.launch().run(End::Advance, |wg| {
                lane.write(lane.cell(lane.rank(), 0, me), wanted(lane.rank(), me));
                wg.barrier(0, Members::all(ranks))?;
                for peer in wg.channel.peers() {
                    lane.expect(lane.cell(peer, 0, crossed), wanted(peer, crossed));
                }
                Ok(())
            });
        })
}

/// As [`barrier_in_launch`], but lane 0 arrives and waits in an arm of its own, as it did to be traced:
/// where waves run in lockstep, nobody else of its wave has arrived then.
pub fn barrier_in_arms(ranks: u32) -> Scenario {
    Scenario::new(format!("barrier in the arms of a branch, {ranks} ranks"), ranks)
        .headers(Headers::new(programs::BARRIER_IN_LAUNCH, 1).option(1))
        .program(move |lane| {
            let _ = lane.launch().run(End::Advance, |wg| {
                wg.go_on()?;
                let members = Members::all(ranks);
                let wait =
                    || arrive_and_wait(lane, wg.channel, wg.call(), 0, members, Limit::Entry);
                let passed = if Memory::lane(lane) == 0 {
                    let passed = wait();
                    lane.end(Span::Wait);
                    passed
                } else {
                    wait()
                };
                if lane.vote(passed.is_ok()) { Ok(()) } else { Err(Stop) }
            });
        })
}

/// Tile flags: a workgroup fills two units, another reads them.
pub fn flags(calls: u32) -> Scenario {
    Scenario::new(format!("tile flags, {calls} calls"), 1)
        .calls(calls, 7)
        .groups(&[2])
        .headers(Headers::new(programs::FLAGS, 1))
        .program(|lane| {
            for call in (0..lane.calls()).map(|position| lane.call(position)) {
                for unit in 0..2 {
                    let cell = lane.cell(0, 0, unit);
                    let wanted = value(0, call.number(), unit, 0);
                    if lane.id().group == 0 {
                        lane.write(cell, wanted);
                        tile_flags::raise(lane, lane.channel(), call, unit);
                    } else if tile_flags::wait(lane, lane.channel(), call, unit, 0).is_ok() {
                        lane.expect(cell, wanted);
                    }
                }
                lane.boundary();
            }
        })
}

/// Entry records and credits alone: everybody enters and reads everybody's record.
pub fn entry(ranks: u32, calls: u32) -> Scenario {
    Scenario::new(format!("entry and credit, {ranks} ranks, {calls} calls"), ranks)
        .calls(calls, 7)
        .headers(Headers::new(programs::ENTRY, 1))
        .program(|lane| {
            for _ in 0..lane.calls() {
                let _ = lane.launch().run(End::Advance, |wg| {
                    wg.enter()?;
                    wg.channel.peers().try_for_each(|peer| wg.wait_entry(peer))
                });
            }
        })
}

/// Ranks clear their own words at first, as a late memset would: nobody knows when.
pub fn late_memset() -> Scenario {
    Scenario::new("entry, words cleared without a barrier", 2)
        .headers(Headers::new(programs::ENTRY, 1).option(1))
        .program(|lane| {
            let (channel, before) = (lane.channel(), lane.call(0).previous());
            for peer in channel.peers() {
                let mut word = channel.entry(lane.rank(), peer, lane.call(0).parity());
                word.index += LINE_WORDS - 1;
                lane.store(word, before.number(), Access::AbortStore);
            }
            let _ = lane.launch().run(End::Advance, |wg| {
                wg.enter()?;
                wg.channel.peers().try_for_each(|peer| wg.wait_entry(peer))
            });
        })
}

/// Rank 1 enters and then makes no progress; rank 0 finds out, and rank 1, which waits for
/// something else without a deadline, is told.
pub fn abort() -> Scenario {
    let expect = |lane: &Lane<'_>, through: bool| {
        if through {
            Failure::Other(format!("{:?} got through", lane.id())).raise();
        }
        let kept = lane.fault().map(|fault| (fault.kind, fault.rank));
        let expected = match lane.rank() {
            0 => (FaultKind::NoProgress, 1),
            _ => (FaultKind::PeerGaveUp, 0),
        };
        if kept != Some(expected) {
            Failure::Other(format!("{:?} keeps {kept:?}", lane.id())).raise();
        }
    };
    Scenario::new("abort on a fault", 2)
        .expires(|id, limit, _| id.rank == 0 && limit == Limit::Progress)
        .headers(Headers::new(programs::ABORT, 1).after(expect))
        .program(move |lane| {
            let result = lane.launch().run(End::Advance, |wg| {
                wg.enter()?;
                if lane.rank() == 0 {
                    return wg.wait_tile(1, 0);
                }
                let never = lane.channel().result(1, 0, 0);
                epoch::wait(lane, lane.channel(), never, lane.call(0), 0).map(drop)
            });
            expect(lane, result.is_ok());
        })
}
