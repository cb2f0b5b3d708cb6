//! The engine of our own: interleavings of more ranks than loom takes, sequentially consistent.
//!
//! A program is a function of the values it has read. So a thread needs no thread: to learn its next
//! operation, its program is run again with the results so far, and left at the first operation
//! that has none. Each such prefix is run once and kept as a node of a tree, which makes a step of
//! the search a look-up. A wait that looks in vain goes back to the node of its first look and is
//! blocked until one of the words it looked at has changed; so waiting adds no states, and a state
//! in which nobody can go on is a lost signal.
//!
//! [`exhaust`] visits every state once. [`random`] draws schedules from a seed, remembers with
//! vector clocks what orders what, and so finds races too.

use std::collections::{HashMap, HashSet};
use std::panic::{self, AssertUnwindSafe};
use std::time::Instant;

use iris_sync::Order;

use super::{Failure, Op, Place, Report, Rules, Scenario, Thread, ThreadId};

mod clocks;
mod programs;

use clocks::Clocks;
use programs::{Next, Programs};

/// Visit every reachable state of `scenario` under `rules`.
///
/// More than `limit` states are a failure of the model, not a pass.
pub fn exhaust(scenario: &Scenario, rules: &Rules, limit: u64) -> Report {
    exhaust_to_ends(scenario, rules, limit).0
}

/// As [`exhaust`]; also what memory holds at the end, for every different end.
pub fn exhaust_to_ends(
    scenario: &Scenario,
    rules: &Rules,
    limit: u64,
) -> (Report, Vec<HashMap<Place, i64>>) {
    let start = Instant::now();
    let mut machine = Machine::new(scenario, rules);
    let mut states = HashSet::new();
    let mut ends: HashMap<u128, HashMap<Place, i64>> = HashMap::new();
    let first = machine.first();
    states.insert(machine.fingerprint(&first));
    let mut failure = None;
    let mut path = vec![Frame { choices: machine.choices(&first), state: first, taken: 0 }];
    let mut trace = Vec::new();
    while let Some(frame) = path.last_mut() {
        if frame.taken == 0 {
            failure = machine.failure(&frame.state, &frame.choices);
            if failure.is_some() {
                trace = machine.trace(path.iter().map(|frame| &frame.state));
                break;
            }
            if frame.choices.is_empty() {
                let end = machine.memory(&frame.state);
                let memory = State { at: Vec::new(), ..frame.state.clone() };
                ends.insert(machine.fingerprint(&memory), end);
            }
        }
        let Some(&thread) = frame.choices.get(frame.taken) else {
            path.pop();
            continue;
        };
        frame.taken += 1;
        let mut state = frame.state.clone();
        machine.step(&mut state, thread, None);
        if states.insert(machine.fingerprint(&state)) {
            if states.len() as u64 > limit {
                failure = Some(Failure::Other(format!("not finished after {limit} states")));
                break;
            }
            path.push(Frame { choices: machine.choices(&state), state, taken: 0 });
        }
    }
    let report = Report {
        scenario: scenario.name().into(),
        bound: "interleavings, all states".into(),
        executions: states.len() as u64,
        seconds: start.elapsed().as_secs_f64(),
        failure,
        trace,
    };
    (report, ends.into_values().collect())
}

/// Run `runs` random schedules; run i is drawn from `seed` + i, and the report names the seed of a
/// run that failed.
pub fn random(scenario: &Scenario, rules: &Rules, seed: u64, runs: u64) -> Report {
    let start = Instant::now();
    let mut machine = Machine::new(scenario, rules);
    let mut report = Report {
        scenario: scenario.name().into(),
        bound: format!("random, seeds {seed}.."),
        executions: 0,
        seconds: 0.0,
        failure: None,
        trace: Vec::new(),
    };
    for seed in seed..seed + runs {
        report.executions += 1;
        let (failure, trace) = machine.run(seed);
        if failure.is_some() {
            (report.failure, report.trace) = (failure, trace);
            report.bound = format!("random, seed {seed}");
            break;
        }
    }
    report.seconds = start.elapsed().as_secs_f64();
    report
}

struct Frame {
    state: State,
    choices: Vec<usize>,
    taken: usize,
}

/// Memory, and where each thread is.
#[derive(Clone)]
struct State {
    memory: Vec<i64>,
    at: Vec<u32>,
}

struct Machine<'a> {
    scenario: &'a Scenario,
    programs: Programs<'a>,
    slots: HashMap<Place, usize>,
    places: Vec<(Place, i64)>,
}

impl<'a> Machine<'a> {
    fn new(scenario: &'a Scenario, rules: &'a Rules) -> Self {
        Self {
            scenario,
            programs: Programs::new(scenario, rules),
            slots: HashMap::new(),
            places: Vec::new(),
        }
    }

    fn first(&mut self) -> State {
        let at =
            (0..self.programs.threads.len()).map(|thread| self.programs.root(thread)).collect();
        State { memory: Vec::new(), at }
    }

    fn slot(&mut self, state: &mut State, place: Place) -> usize {
        let slot = *self.slots.entry(place).or_insert_with(|| {
            self.places.push((place, self.scenario.initial_value(place)));
            self.places.len() - 1
        });
        let known = state.memory.len();
        state.memory.extend(self.places[known..].iter().map(|&(_, initial)| initial));
        slot
    }

    fn look(&self, state: &State, place: Place) -> i64 {
        let known = self.slots.get(&place).and_then(|&slot| state.memory.get(slot));
        known.copied().unwrap_or_else(|| self.scenario.initial_value(place))
    }

    fn memory(&self, state: &State) -> HashMap<Place, i64> {
        self.places.iter().zip(&state.memory).map(|(&(place, _), &value)| (place, value)).collect()
    }

    fn fingerprint(&self, state: &State) -> u128 {
        let mut sum = [0x243f_6a88_85a3_08d3_u64, 0x1319_8a2e_0370_7344];
        let mut add = |value: u64| {
            for (half, odd) in
                sum.iter_mut().zip([0x9e37_79b9_7f4a_7c15_u64, 0xc2b2_ae3d_27d4_eb4f])
            {
                *half = (*half ^ value).wrapping_mul(odd);
                *half ^= *half >> 29;
            }
        };
        state.at.iter().for_each(|&node| add(u64::from(node)));
        for (slot, (&value, &(_, initial))) in state.memory.iter().zip(&self.places).enumerate() {
            if value != initial {
                add(slot as u64 + 1);
                add(value as u64);
            }
        }
        u128::from(sum[0]) << 64 | u128::from(sum[1])
    }

    /// The threads that can make a step.
    fn choices(&self, state: &State) -> Vec<usize> {
        (0..state.at.len()).filter(|&thread| self.can_step(state, thread)).collect()
    }

    /// Whether another thread of the wave is under way in an arm of its own: in lockstep it goes on to
    /// its end, or waits in it, before this one runs.
    fn is_held(&self, state: &State, thread: usize) -> bool {
        let threads = &self.programs.threads;
        let wave = |id: &ThreadId| (id.rank, id.group);
        self.scenario.lockstep
            && (0..threads.len()).any(|other| {
                other != thread
                    && wave(&threads[other]) == wave(&threads[thread])
                    && self.programs.in_arm(state.at[other])
            })
    }

    fn can_step(&self, state: &State, thread: usize) -> bool {
        if self.is_held(state, thread) {
            return false;
        }
        match self.programs.next(state.at[thread]) {
            Next::Ended | Next::Failed(_) => false,
            Next::Blocked { watch, .. } => {
                watch.iter().any(|&(place, seen)| self.look(state, place) != seen)
            }
            // The first of those who meet takes the step for all.
            Next::Op(op @ (Op::Vote { .. } | Op::Boundary | Op::Join)) => {
                let all = self.meeting(thread, op);
                all.first() == Some(&thread)
                    && all.iter().all(|&other| match self.programs.next(state.at[other]) {
                        Next::Op(theirs) => {
                            std::mem::discriminant(theirs) == std::mem::discriminant(op)
                        }
                        _ => false,
                    })
            }
            Next::Op(_) => true,
        }
    }

    fn meeting(&self, thread: usize, op: &Op) -> Vec<usize> {
        let threads = &self.programs.threads;
        let same = |other: &ThreadId| match op {
            Op::Boundary => other.rank == threads[thread].rank,
            _ => (other.rank, other.group) == (threads[thread].rank, threads[thread].group),
        };
        (0..threads.len()).filter(|&other| same(&threads[other])).collect()
    }

    fn failure(&self, state: &State, choices: &[usize]) -> Option<Failure> {
        let nexts = || state.at.iter().map(|&node| self.programs.next(node));
        let failed = nexts().find_map(|next| match next {
            Next::Failed(failure) => Some(failure.clone()),
            _ => None,
        });
        let stuck = choices.is_empty() && !nexts().all(|next| matches!(next, Next::Ended));
        failed.or_else(|| {
            stuck.then(|| {
                let waits =
                    nexts().zip(&self.programs.threads).filter_map(|(next, thread)| match next {
                        Next::Ended => None,
                        Next::Blocked { watch, .. } => {
                            Some(format!("{thread:?} waits for {watch:?}"))
                        }
                        next => Some(format!("{thread:?} is at {next:?}")),
                    });
                Failure::Lost(waits.collect::<Vec<_>>().join("; "))
            })
        })
    }

    /// One operation of a thread and the plain ones that belong to it: words of the device alone
    /// matter to nobody else, and a run of plain accesses is taken as one.
    fn step(&mut self, state: &mut State, thread: usize, mut clocks: Option<&mut Clocks>) {
        if let &Next::Blocked { head, .. } = self.programs.next(state.at[thread]) {
            state.at[thread] = head;
        }
        let mut before = None;
        while let &Next::Op(op) = self.programs.next(state.at[thread]) {
            if op == Op::Part {
                // Who goes first is a choice of its own; it may go straight to where all meet.
                if before.is_some() {
                    break;
                }
                self.perform(state, thread, op);
                if matches!(
                    self.programs.next(state.at[thread]),
                    Next::Op(Op::Vote { .. } | Op::Boundary | Op::Join)
                ) {
                    break;
                }
                continue;
            }
            let plain = matches!(op, Op::Read { .. } | Op::Write { .. });
            let private = plain && matches!(op.place(), Some(Place::Dev { .. }));
            match before {
                Some(was_plain) if !(private || was_plain && plain) => break,
                _ => before = Some(plain && !private || before == Some(true)),
            }
            if let Some(clocks) = clocks.as_deref_mut()
                && let Some(place) = clocks.perform(thread, &op, || self.meeting(thread, &op))
            {
                let raced = Failure::Race(Some(place));
                state.at[thread] = self.programs.fail(thread, raced);
                return;
            }
            self.perform(state, thread, op);
        }
    }

    fn perform(&mut self, state: &mut State, thread: usize, op: Op) {
        if let Op::Vote { .. } | Op::Boundary | Op::Join = op {
            let all = self.meeting(thread, &op);
            let said = |&other: &usize| match self.programs.next(state.at[other]) {
                Next::Op(Op::Vote { ok }) => *ok,
                _ => true,
            };
            let result = all.iter().all(said).into();
            for other in all {
                state.at[other] = self.programs.advance(state.at[other], result);
            }
            return;
        }
        let mut result = 0;
        if let Some(place) = op.place() {
            let slot = self.slot(state, place);
            let held = &mut state.memory[slot];
            result = *held;
            match op {
                Op::Store { value, .. } => *held = value,
                Op::Write { value, .. } => *held = value.into(),
                Op::Add { value, .. } => *held = (*held as i32).wrapping_add(value).into(),
                Op::CompareExchange { expected, value, .. } if *held == i64::from(expected) => {
                    *held = value.into();
                }
                _ => {}
            }
        }
        state.at[thread] = self.programs.advance(state.at[thread], result);
    }

    /// One random schedule.
    fn run(&mut self, seed: u64) -> (Option<Failure>, Vec<(ThreadId, Op)>) {
        let mut random = Random(seed);
        let mut state = self.first();
        let mut clocks = Clocks::new(state.at.len());
        let mut visited = vec![state.clone()];
        // Some runs switch at every step, some let a thread go on for long.
        let stickiness = [0, 50, 80, 95][(random.next() % 4) as usize];
        let mut last = 0;
        loop {
            let choices = self.choices(&state);
            let failure = self.failure(&state, &choices);
            if failure.is_some() {
                return (failure, self.trace(visited.iter()));
            }
            if choices.is_empty() {
                return (None, Vec::new());
            }
            if !(choices.contains(&last) && random.next() % 100 < stickiness) {
                last = choices[(random.next() % choices.len() as u64) as usize];
            }
            self.step(&mut state, last, Some(&mut clocks));
            visited.push(state.clone());
        }
    }

    /// What was done between states that follow each other, as far as the tree still knows it.
    fn trace<'s>(&self, states: impl Iterator<Item = &'s State>) -> Vec<(ThreadId, Op)> {
        let mut trace = Vec::new();
        let mut before: Option<&State> = None;
        for state in states {
            if let Some(before) = before {
                for (thread, (&from, &to)) in before.at.iter().zip(&state.at).enumerate() {
                    let id = self.programs.threads[thread];
                    trace.extend(self.programs.between(from, to).into_iter().map(|op| (id, op)));
                }
            }
            before = Some(state);
        }
        trace
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}
