//! Sequentially consistent engine for scenarios with more ranks than loom supports.
//!
//! A program is a function of the values that it has read, so the engine needs no OS threads: to
//! learn a thread's next operation, it reruns the program with the results so far and leaves it at
//! the first operation without a result. Each such prefix runs once and becomes a node of a tree,
//! so a step of the search is a look-up. A failed poll returns the thread to the node where its
//! wait began and blocks it until one of the polled words changes. Waiting therefore adds no
//! states, and a state in which no thread can run is a lost signal.
//!
//! [`exhaust`] visits every state once. [`random`] draws schedules from a seed and tracks the order
//! of accesses with vector clocks, so it also finds races.

use std::panic::{self, AssertUnwindSafe};
use std::rc::Rc;
use std::time::Instant;

use iris_sync::Order;
use rustc_hash::{FxHashMap as HashMap, FxHashSet as HashSet};

use super::{Failure, Forbidden, Operation, Place, Report, Rules, Scenario, Thread, ThreadId};

mod clocks;
mod observer;
mod programs;
mod random_numbers;
mod state;

use clocks::Clocks;
use observer::NoExplorer;
pub use observer::{Explorer, Observer, observe};
use programs::{Next, Programs};
use random_numbers::Random;
use state::State;

/// Visits every reachable state of `scenario` under `rules`.
///
/// More than `limit` states count as a failure of the model, not as a pass.
pub fn exhaust(scenario: &Scenario, rules: &Rules, limit: u64) -> Report {
    exhaust_to_ends(scenario, rules, limit).0
}

/// Runs [`exhaust`], and also returns the memory contents of every distinct final state.
pub fn exhaust_to_ends(
    scenario: &Scenario,
    rules: &Rules,
    limit: u64,
) -> (Report, Vec<HashMap<Place, i64>>) {
    explore::<NoExplorer>(scenario, rules, limit, None)
}

/// Visits every reachable state as [`exhaust`] does, and tells `explorer` of every transition. If
/// several paths lead to a state, `explorer` knows the history of the first path only.
///
/// A transition that is not allowed fails as [`Failure::Rule`].
pub fn exhaust_observed<E: Explorer>(
    scenario: &Scenario,
    rules: &Rules,
    limit: u64,
    explorer: &mut E,
) -> Report {
    explore(scenario, rules, limit, Some(explorer)).0
}

fn explore<E: Explorer>(
    scenario: &Scenario,
    rules: &Rules,
    limit: u64,
    mut explorer: Option<&mut E>,
) -> (Report, Vec<HashMap<Place, i64>>) {
    let start = Instant::now();
    let mut machine = Machine::new(scenario, rules);
    let mut states = HashSet::default();
    let mut ends: HashMap<u128, HashMap<Place, i64>> = HashMap::default();
    let first = machine.first();
    states.insert(first.hash());
    let mut failure = None;
    let saved = explorer.as_deref_mut().map(|explorer| {
        explorer.begin();
        explorer.save()
    });
    let mut path =
        vec![Frame { choices: machine.choices(&first).collect(), state: first, taken: 0, saved }];
    let mut trace = Vec::new();
    // States and choices that are no longer needed; later ones reuse their allocations.
    let mut spare: Vec<(State, Vec<usize>)> = Vec::new();
    while let Some(frame) = path.last_mut() {
        if frame.taken == 0 {
            failure = machine.failure(&frame.state, &frame.choices);
            if failure.is_none()
                && frame.choices.is_empty()
                && let Some(explorer) = explorer.as_deref_mut()
            {
                failure = explorer.end().err().map(Failure::Rule);
            }
            if failure.is_some() {
                trace = machine.trace(path.iter().map(|frame| &frame.state));
                break;
            }
            if frame.choices.is_empty() {
                let end = machine.memory(&frame.state);
                ends.insert(frame.state.hash_of_memory(), end);
            }
        }
        let Some(&thread) = frame.choices.get(frame.taken) else {
            spare.extend(path.pop().map(|frame| (frame.state, frame.choices)));
            continue;
        };
        if let (Some(explorer), Some(saved)) = (explorer.as_deref_mut(), &frame.saved)
            && frame.taken > 0
        {
            explorer.restore(saved);
        }
        frame.taken += 1;
        let (mut state, mut choices) = spare.pop().unwrap_or_default();
        state.copy_from(&frame.state);
        machine.step(&mut state, thread, None);
        if let Some(explorer) = explorer.as_deref_mut()
            && let Err(why) = machine.tell(&frame.state, &state, thread, explorer)
        {
            failure = Some(Failure::Rule(why));
            trace = machine.trace(path.iter().map(|frame| &frame.state).chain([&state]));
            break;
        }
        if states.insert(state.hash()) {
            if states.len() as u64 > limit {
                failure = Some(Failure::Other(format!("not finished after {limit} states")));
                break;
            }
            let saved = explorer.as_deref().map(Explorer::save);
            choices.clear();
            choices.extend(machine.choices(&state));
            path.push(Frame { choices, state, taken: 0, saved });
        } else {
            spare.push((state, choices));
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

/// Runs `runs` random schedules. Run i is drawn from `seed` + i, and the report names the seed of a
/// failed run.
pub fn random(scenario: &Scenario, rules: &Rules, seed: u64, runs: u64) -> Report {
    let start = Instant::now();
    let mut machine = Machine::new(scenario, rules);
    let mut report = Report::new(scenario.name(), format!("random, seeds {seed}.."));
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

/// Function that is called after each step of a schedule; it may forbid the step.
type Stepped<'s, M> = dyn FnMut(&M, &State, &State, usize) -> Result<(), Forbidden> + 's;

struct Frame<Saved> {
    state: State,
    choices: Vec<usize>,
    taken: usize,
    saved: Option<Saved>,
}

struct Machine<'a> {
    scenario: &'a Scenario,
    programs: Programs<'a>,
    /// For each thread, the threads that it meets at barriers.
    peers: Vec<Peers>,
    slots: HashMap<Place, u32>,
    /// Slot of the place that each node's operation accesses; `None` if it is not known yet.
    slot_of_node: Vec<Option<u32>>,
    places: Vec<(Place, i64)>,
}

/// Threads that a thread meets at barriers, itself included, in ascending order.
struct Peers {
    of_group: Rc<[usize]>,
    of_rank: Rc<[usize]>,
}

impl<'a> Machine<'a> {
    fn new(scenario: &'a Scenario, rules: &'a Rules) -> Self {
        let programs = Programs::new(scenario, rules);
        let threads = &programs.threads;
        let those = |same: &dyn Fn(&ThreadId) -> bool| {
            (0..threads.len()).filter(|&other| same(&threads[other])).collect()
        };
        let peers = threads.iter().map(|own| Peers {
            of_group: those(&|it| (it.rank, it.group) == (own.rank, own.group)),
            of_rank: those(&|it| it.rank == own.rank),
        });
        Self {
            scenario,
            peers: peers.collect(),
            programs,
            slots: HashMap::default(),
            slot_of_node: Vec::new(),
            places: Vec::new(),
        }
    }

    fn first(&mut self) -> State {
        let at =
            (0..self.programs.threads.len()).map(|thread| self.programs.root(thread)).collect();
        State::new(at)
    }

    /// Slot of `place`, which the next operation of a thread accesses.
    fn slot(&mut self, state: &mut State, thread: usize, place: Place) -> usize {
        let node = state.at()[thread] as usize;
        if self.slot_of_node.len() <= node {
            self.slot_of_node.resize(node + 1, None);
        }
        let slot = *self.slot_of_node[node].get_or_insert_with(|| {
            *self.slots.entry(place).or_insert_with(|| {
                self.places.push((place, self.scenario.initial_value(place)));
                self.places.len() as u32 - 1
            })
        }) as usize;
        let known = state.memory().len();
        if known < self.places.len() {
            state.extend(self.places[known..].iter().map(|&(_, initial)| initial));
        }
        slot
    }

    fn look(&self, state: &State, place: Place) -> i64 {
        let known = self.slots.get(&place).and_then(|&slot| state.memory().get(slot as usize));
        known.copied().unwrap_or_else(|| self.scenario.initial_value(place))
    }

    fn memory(&self, state: &State) -> HashMap<Place, i64> {
        self.places.iter().zip(state.memory()).map(|(&(place, _), &value)| (place, value)).collect()
    }

    /// Indices of the threads that can make a step.
    fn choices(&self, state: &State) -> impl Iterator<Item = usize> {
        (0..state.at().len()).filter(|&thread| self.can_step(state, thread))
    }

    /// Whether this thread must wait for another thread of its wave that is inside one side of a
    /// branch. In lockstep, the other thread first runs to the end of its side, or until it waits.
    fn is_held(&self, state: &State, thread: usize) -> bool {
        let threads = &self.programs.threads;
        let wave = |id: &ThreadId| (id.rank, id.group);
        self.scenario.lockstep
            && (0..threads.len()).any(|other| {
                other != thread
                    && wave(&threads[other]) == wave(&threads[thread])
                    && self.programs.in_arm(state.at()[other])
            })
    }

    fn can_step(&self, state: &State, thread: usize) -> bool {
        if self.is_held(state, thread) {
            return false;
        }
        match self.programs.next(state.at()[thread]) {
            Next::Ended | Next::Failed(_) => false,
            Next::Blocked { watch, .. } => {
                watch.iter().any(|&(place, seen)| self.look(state, place) != seen)
            }
            // At a barrier, the first of the waiting threads takes the step for all of them.
            Next::Operation(
                op @ (Operation::Vote { .. } | Operation::Boundary | Operation::Join),
            ) => {
                let all = self.meeting(thread, op);
                all.first() == Some(&thread)
                    && all.iter().all(|&other| match self.programs.next(state.at()[other]) {
                        Next::Operation(theirs) => {
                            std::mem::discriminant(theirs) == std::mem::discriminant(op)
                        }
                        _ => false,
                    })
            }
            Next::Operation(_) => true,
        }
    }

    /// Threads that meet at the barrier `op` of a thread.
    fn meeting(&self, thread: usize, op: &Operation) -> &Rc<[usize]> {
        match op {
            Operation::Boundary => &self.peers[thread].of_rank,
            _ => &self.peers[thread].of_group,
        }
    }

    fn failure(&self, state: &State, choices: &[usize]) -> Option<Failure> {
        let nexts = || state.at().iter().map(|&node| self.programs.next(node));
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

    /// Performs one operation of `thread`, together with the local operations that follow. Accesses
    /// to the device's own words affect no other rank, and a run of non-atomic accesses counts as
    /// one step.
    fn step(&mut self, state: &mut State, thread: usize, mut clocks: Option<&mut Clocks>) {
        if let &Next::Blocked { head, .. } = self.programs.next(state.at()[thread]) {
            state.go(thread, head);
        }
        let mut before = None;
        while let &Next::Operation(op) = self.programs.next(state.at()[thread]) {
            if op == Operation::Part {
                // Stops at the end of one side of a branch, because the search chooses which side
                // runs next.
                if before.is_some() {
                    break;
                }
                self.perform(state, thread, op);
                if matches!(
                    self.programs.next(state.at()[thread]),
                    Next::Operation(Operation::Vote { .. } | Operation::Boundary | Operation::Join)
                ) {
                    break;
                }
                continue;
            }
            let plain = matches!(op, Operation::Read { .. } | Operation::Write { .. });
            let private = plain && matches!(op.place(), Some(Place::Dev { .. }));
            match before {
                Some(was_plain) if !(private || was_plain && plain) => break,
                _ => before = Some(plain && !private || before == Some(true)),
            }
            if let Some(clocks) = clocks.as_deref_mut() {
                let slot = op.place().map_or(0, |place| self.slot(state, thread, place));
                let raced = clocks.perform(thread, &op, slot, self.meeting(thread, &op));
                if let Some(place) = raced {
                    let raced = Failure::Race(Some(place));
                    state.go(thread, self.programs.fail(thread, raced));
                    return;
                }
            }
            self.perform(state, thread, op);
        }
    }

    fn perform(&mut self, state: &mut State, thread: usize, op: Operation) {
        if let Operation::Vote { .. } | Operation::Boundary | Operation::Join = op {
            let all = Rc::clone(self.meeting(thread, &op));
            let said = |&other: &usize| match self.programs.next(state.at()[other]) {
                Next::Operation(Operation::Vote { ok }) => *ok,
                _ => true,
            };
            let result = all.iter().all(said).into();
            for &other in all.iter() {
                state.go(other, self.programs.advance(state.at()[other], result));
            }
            return;
        }
        let mut result = 0;
        if let Some(place) = op.place() {
            let slot = self.slot(state, thread, place);
            result = state.memory()[slot];
            let written = match op {
                Operation::Store { value, .. } => value,
                Operation::Write { value, .. } => value.into(),
                Operation::Add { value, .. } => (result as i32).wrapping_add(value).into(),
                Operation::CompareExchange { expected, value, .. }
                    if result == i64::from(expected) =>
                {
                    value.into()
                }
                _ => result,
            };
            if written != result {
                state.set(slot, written, self.places[slot].1);
            }
        }
        state.go(thread, self.programs.advance(state.at()[thread], result));
    }

    /// Runs one random schedule. If it fails, runs it again to record the trace.
    fn run(&mut self, seed: u64) -> (Option<Failure>, Vec<(ThreadId, Operation)>) {
        let failure = self.schedule(seed, true, None);
        let mut visited = Vec::new();
        if failure.is_some() {
            visited.push(self.first());
            let mut visit = |_: &Self, _: &State, after: &State, _| {
                visited.push(after.clone());
                Ok(())
            };
            self.schedule(seed, true, Some(&mut visit));
        }
        (failure, self.trace(visited.iter()))
    }

    /// Runs one random schedule, and looks for races if `races`. Calls `stepped` after each step,
    /// with the states before and after it and the thread that made it.
    fn schedule(
        &mut self,
        seed: u64,
        races: bool,
        mut stepped: Option<&mut Stepped<'_, Self>>,
    ) -> Option<Failure> {
        let mut random = Random(seed);
        let mut state = self.first();
        let mut clocks = races.then(|| Clocks::new(state.at().len()));
        // Some runs switch threads at every step, others let one thread run for long.
        let stickiness = [0, 50, 80, 95][(random.next() % 4) as usize];
        let mut last = 0;
        let mut choices = Vec::new();
        loop {
            choices.clear();
            choices.extend(self.choices(&state));
            let failure = self.failure(&state, &choices);
            if failure.is_some() || choices.is_empty() {
                return failure;
            }
            if !(choices.contains(&last) && random.next() % 100 < stickiness) {
                last = choices[(random.next() % choices.len() as u64) as usize];
            }
            let before = stepped.is_some().then(|| state.clone());
            self.step(&mut state, last, clocks.as_mut());
            if let (Some(stepped), Some(before)) = (&mut stepped, before)
                && let Err(why) = stepped(self, &before, &state, last)
            {
                return Some(Failure::Rule(why));
            }
        }
    }

    /// Reports to `observer` the operations of `thread` between the states `before` and `after`.
    fn tell(
        &self,
        before: &State,
        after: &State,
        thread: usize,
        observer: &mut (impl Observer + ?Sized),
    ) -> Result<(), Forbidden> {
        let id = self.programs.threads[thread];
        let from = match *self.programs.next(before.at()[thread]) {
            Next::Blocked { head, .. } => head,
            _ => before.at()[thread],
        };
        for (op, result) in self.programs.results_between(from, after.at()[thread]) {
            if let Operation::Vote { .. } | Operation::Boundary = op {
                let all: Vec<ThreadId> = self
                    .meeting(thread, &op)
                    .iter()
                    .map(|&other| self.programs.threads[other])
                    .collect();
                observer.met(&all, &op)?;
            } else {
                observer.performed(id, &op, result)?;
            }
        }
        Ok(())
    }

    /// Operations between consecutive states; those whose nodes the tree no longer holds are
    /// missing.
    fn trace<'s>(&self, states: impl Iterator<Item = &'s State>) -> Vec<(ThreadId, Operation)> {
        let mut trace = Vec::new();
        let mut before: Option<&State> = None;
        for state in states {
            if let Some(before) = before {
                for (thread, (&from, &to)) in before.at().iter().zip(state.at()).enumerate() {
                    let id = self.programs.threads[thread];
                    trace.extend(self.programs.between(from, to).into_iter().map(|op| (id, op)));
                }
            }
            before = Some(state);
        }
        trace
    }
}
