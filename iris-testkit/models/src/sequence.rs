//! Comparison of iris-sync with the device headers, operation by operation. Given equal steps and
//! equal answers of the memory, both must request the same operations (address, operation, order,
//! scope, value) in the same order.

#![allow(unsafe_code, reason = "the hooks that let a model run the device headers")]

use iris_sync::ll::Used;
use iris_sync::{
    Aborted, Access, Call, Channel, End, LINE_WORDS, Memory, REFRESH_PERIOD, RESERVED_WORDS,
    Record, Shape, Workgroup, barrier::Members, epoch, ll,
};
use proptest::prelude::*;

use super::ThreadId;
use super::recorder::{Event, Recorder, Script};

macro_rules! kinds {
    ($($kind:ident),* $(,)?) => {
        /// Step of a workgroup: a function of `Workgroup` or `lock`, numbered as in
        /// `cxx/sequence.cpp`.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(u32)]
        #[allow(missing_docs, reason = "the functions of Workgroup and lock")]
        pub enum Kind { $($kind),* }

        impl Kind {
            const ALL: &[Kind] = &[$(Kind::$kind),*];
        }
    };
}

kinds! {
    Enter, Credit, WaitEntry, Direct, Meet, PushSignal,
    PushSignals, PushResults, WaitTile, WaitTiles, WaitResult, RaiseFlag,
    WaitFlag, Locked, Barrier, PublishVersion, WaitVersion, BeginPush,
    PushHead, CountOut, WaitHead, PushPair, WaitPair, PushBatch,
    WaitBatch, LeaveTogether,
}

/// Step with its peer and its tile, unit or phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Step {
    kind: Kind,
    peer: u32,
    tile: u32,
}

/// Steps of one workgroup, and the scripted answers to its requests.
#[derive(Clone, Debug)]
pub struct Case {
    thread: ThreadId,
    extent: (u32, u32),
    channel: Channel,
    record: Record,
    steps: Vec<Step>,
    end: End,
    script: Script,
}

/// Result of a case: recorded requests, number of steps done, answers of these steps, and whether
/// all steps and the end of the call succeeded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    events: Vec<Event>,
    done: u32,
    answers: Vec<bool>,
    through: bool,
}

#[cfg(iris_cxx)]
#[repr(C)]
struct Input<'a> {
    heap: &'a iris_sync::sym::HeapView,
    channel: &'a Channel,
    record: &'a Record,
    steps: *const Step,
    count: u32,
    end: i32,
}

#[cfg(iris_cxx)]
unsafe extern "C-unwind" {
    fn iris_model_sequence(input: &Input<'_>, answers: *mut u32) -> u32;
}

impl Case {
    fn recorder(&self) -> Recorder {
        Recorder::new(self.thread, self.extent, self.script.clone())
    }

    /// Runs the case through iris-sync.
    pub fn in_rust(&self) -> Outcome {
        let recorder = self.recorder();
        let (group, groups) = (self.thread.group, self.extent.1);
        let mut wg = Workgroup::begin(&recorder, &self.channel, (group, groups), &self.record);
        let mut answers = vec![false; self.steps.len()];
        let mut done = 0;
        let mut result = Ok(());
        for (step, answer) in self.steps.iter().zip(&mut answers) {
            result = perform(&mut wg, *step, answer);
            if result.is_err() {
                break;
            }
            done += 1;
        }
        // The call uses `peer * 2` LL pairs of each peer; the other pairs are refreshed if a
        // refresh is due.
        let through =
            wg.finish_push(self.end, result, |peer| Used { pairs: peer * 2, packs: peer }).is_ok();
        Outcome { events: recorder.into_events(), done, answers, through }
    }

    /// Runs the case through the device headers.
    #[cfg(iris_cxx)]
    pub fn in_cxx(&self) -> Outcome {
        let recorder = self.recorder();
        let heap = super::headers::heap(self.thread.rank, self.channel.size);
        let input = Input {
            heap: &heap,
            channel: &self.channel,
            record: &self.record,
            steps: self.steps.as_ptr(),
            count: self.steps.len() as u32,
            end: self.end as i32,
        };
        let mut answers = vec![0; self.steps.len()];
        // SAFETY: `input` has the right number of steps, and `answers` has room for one answer per
        // step.
        let code = recorder.listen(|| unsafe { iris_model_sequence(&input, answers.as_mut_ptr()) });
        Outcome {
            events: recorder.into_events(),
            done: code / 2,
            answers: answers.into_iter().map(|answer| answer != 0).collect(),
            through: code % 2 == 1,
        }
    }
}

fn perform<M: Memory>(
    wg: &mut Workgroup<'_, M>,
    Step { kind, peer, tile }: Step,
    answer: &mut bool,
) -> Result<(), Aborted> {
    let (m, channel, call) = (wg.m, wg.channel, wg.call());
    let me = channel.rank;
    // Members of a barrier step: the ranks `peer` and `tile`, which may be the same rank.
    let some = Members::from_bits(1 << peer | 1 << tile);
    match kind {
        Kind::Enter => wg.enter()?,
        Kind::Credit => wg.credit(peer)?,
        Kind::WaitEntry => wg.wait_entry(peer)?,
        Kind::Direct => *answer = wg.direct(peer)?,
        Kind::Meet => wg.wait_before_push(some)?,
        Kind::PushSignal => wg.push_signal(peer, tile),
        Kind::PushSignals => wg.push_signals(Members::all(channel.size), tile),
        Kind::PushResults => wg.push_results(some, tile),
        Kind::WaitTile => wg.wait_tile(peer, tile)?,
        Kind::WaitTiles => wg.wait_tiles(some, tile)?,
        Kind::WaitResult => wg.wait_result(peer, tile)?,
        Kind::RaiseFlag => wg.raise_flag(tile),
        Kind::WaitFlag => wg.wait_flag(tile, peer)?,
        Kind::Locked => wg.locked(peer, tile, || *answer = true)?,
        Kind::Barrier => wg.barrier(tile & 1, Members::all(channel.size))?,
        Kind::PublishVersion if m.thread() == 0 => {
            epoch::publish(m, channel.signal(peer, me, tile), call);
        }
        Kind::WaitVersion if m.thread() == 0 => {
            epoch::wait(m, channel, channel.signal(me, peer, tile), call, peer)?;
        }
        Kind::PublishVersion | Kind::WaitVersion => {}
        Kind::BeginPush => wg.begin_push(some)?,
        Kind::CountOut => wg.count_out(),
        Kind::PushHead => wg.push_head(some),
        Kind::WaitHead => wg.wait_head(some, ll::SOURCES)?,
        Kind::PushPair => ll::push(m, channel, call, peer, ll::HEAD + tile, [tile, peer]),
        Kind::WaitPair => ll::each(m, channel, call, ll::HEAD + tile, some, |source, data| {
            *answer = *answer || data[0] == source;
            Ok(())
        })?,
        Kind::PushBatch => {
            for &item in wg.batch_of_all(&ROWS, tile & 1).items() {
                ll::push(m, channel, call, peer, ll::HEAD + item, [tile, item]);
            }
        }
        Kind::WaitBatch => {
            let row = wg.share_of_rows(&ROWS).nth(tile as usize).unwrap_or(ROWS.items);
            let batch = wg.batch_of_row(&ROWS, row, peer & 1);
            ll::each_of(m, channel, call, &batch, some, |source, data| {
                *answer = *answer || data.iter().any(|data| data[0] == source);
                Ok(())
            })?;
        }
        Kind::LeaveTogether => wg.leave_together(Ok(()))?,
    }
    Ok(())
}

/// Shape of an LL message of two rows, the second of which has no complete pieces.
const ROWS: ll::Rows = ll::Rows { items: 11, len: 6, piece: 2, at_once: 4, spread: false };

const TILES: u32 = 3;

/// Random cases: call numbers, observed values near them, records that match or differ, deadlines
/// that pass or do not.
pub fn cases() -> impl Strategy<Value = Case> {
    let number = prop_oneof![
        4 => any::<i32>(),
        2 => -3..3,
        1 => Just(REFRESH_PERIOD),
        1 => Just(i32::MIN),
        1 => Just(i32::MAX),
    ];
    let near = prop_oneof![4 => 0..2, 2 => -2..0];
    let kind = proptest::sample::select(Kind::ALL);
    let step = (kind, any::<u32>(), 0..TILES);
    let end = proptest::sample::select(vec![End::Keep, End::Advance, End::Pulled]);
    let host = prop_oneof![12 => Just(0), 1 => 1..5, 1 => 1000..1004];
    let abort = prop_oneof![8 => Just(0), 1 => 1..4];
    let shape = (1..4u32, any::<u32>(), 0..2u32, 1..4u32, any::<u32>(), end);
    let fields = (proptest::array::uniform8(-2..3), prop_oneof![Just(0), Just(64)], 0..12usize);
    let script = (
        number,
        proptest::collection::vec(near, 0..24),
        proptest::collection::vec(any::<bool>(), 0..6),
        proptest::collection::vec(prop_oneof![9 => Just(true), 1 => Just(false)], 0..12),
        proptest::collection::vec(host, 0..8),
        abort,
        proptest::collection::vec(prop_oneof![Just(0), 1..3], 0..3),
    );
    (shape, fields, script, proptest::collection::vec(step, 0..12)).prop_map(
        |(shape, (fields, direct, differs), script, steps)| {
            let (size, rank, thread, groups, group, end) = shape;
            let (rank, group) = (rank % size, group % groups);
            let shape = Shape {
                op: 5,
                size,
                tiles: TILES,
                flags: TILES,
                locks: true,
                pairs: ROWS.items,
                packs: 2,
                sequence: 0,
            };
            let (channel, _) = Channel::lay_out(shape, rank, RESERVED_WORDS, LINE_WORDS);
            let record = Record { fields, direct, c_offset: [4096, 1] };
            let (number, near, expired, votes, host, abort, locks) = script;
            let call = Call::new(number);
            // Entry record of a peer: equal to this rank's record except for one of its eleven
            // fields.
            let mut theirs = fields.to_vec();
            (theirs[0], theirs[1]) = (channel.op as i32, number);
            theirs.extend([direct, 4096, 1]);
            if let Some(field) = theirs.get_mut(differs) {
                *field = field.wrapping_add(i32::from(differs >= 4));
            }
            let words = near.into_iter().map(|n: i32| call.number().wrapping_add(n)).collect();
            let steps = steps.into_iter().filter(|_| size > 1);
            let steps = steps.map(|(kind, peer, tile)| {
                let peer = (rank + 1 + peer % (size - 1).max(1)) % size;
                Step { kind, peer, tile }
            });
            Case {
                thread: ThreadId { rank, group, thread },
                extent: (2, groups),
                channel,
                record,
                steps: steps.collect(),
                end,
                script: Script {
                    number,
                    words,
                    fields: theirs,
                    expired,
                    votes,
                    host,
                    abort,
                    locks,
                    finished: groups as i32 - 1,
                },
            }
        },
    )
}

/// Summary of a comparison of two implementations.
#[derive(Clone, Debug)]
pub struct Compared {
    /// Number of random cases that were compared.
    pub cases: u32,
    /// Number of requests: operations, barriers and reads of the clock.
    pub events: u64,
    /// Number of cases that ended in a fault.
    pub faults: u64,
    /// Accesses that never occurred; empty if there were enough cases.
    pub missing: Vec<Access>,
}

/// Compares `cases_` random cases, the same in every run.
///
/// # Errors
/// The smallest case in which the two implementations differ, and the first difference.
#[cfg(iris_cxx)]
pub fn compare(cases_: u32) -> Result<Compared, String> {
    use std::cell::RefCell;

    use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

    let config = Config { cases: cases_, failure_persistence: None, ..Config::default() };
    let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, random);
    let missing = Access::ALL.to_vec();
    let compared = RefCell::new(Compared { cases: cases_, events: 0, faults: 0, missing });
    let result = runner.run(&cases(), |case| {
        let (rust, cxx) = (case.in_rust(), case.in_cxx());
        let mut compared = compared.borrow_mut();
        for (at, event) in rust.events.iter().enumerate() {
            let theirs = cxx.events.get(at);
            prop_assert_eq!(theirs, Some(event), "event {} of the device headers", at);
            compared.events += 1;
            match event {
                Event::Atomic(access, _) => compared.missing.retain(|missing| missing != access),
                Event::Record(_) => compared.faults += 1,
                _ => {}
            }
        }
        prop_assert_eq!(cxx, rust);
        Ok(())
    });
    result.map_err(|error| error.to_string())?;
    Ok(compared.into_inner())
}
