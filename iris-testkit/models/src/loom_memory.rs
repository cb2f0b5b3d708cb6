//! Engine over loom: explores executions of the C11 memory model and reports races.
//!
//! A word is a loom atomic; a cell and a field of a record are loom cells. So an order that is too
//! weak shows as a race on the data that the word protects. Threads of a workgroup synchronise by
//! waking each other directly, without a word whose accesses loom would permute. No execution is
//! lost by this, because threads other than 0 access no words, and a barrier has the same effect in
//! any order of arrival.

#![allow(unsafe_code, reason = "the hooks that let a model run the device headers")]

use std::any::Any;
use std::cell::{Cell, RefCell};

use std::panic::{self, AssertUnwindSafe};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Instant;

use iris_sync::{LINE_WORDS, Order};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicI32, AtomicI64};
use rustc_hash::FxHashMap as HashMap;

mod meeting;
mod watch;

use meeting::{Meeting, Sleeper, Token};
use watch::{Watch, Watched, with_watch};

use super::{
    Arena, Failure, Forbidden, Operation, Place, Report, Rules, Scenario, Thread, ThreadId,
};
use crate::search::Observer;

/// Number of failed polls in a row, without a store in between, after which the execution counts as
/// deadlocked. Each of four threads can see each of seven remembered stores at most once before it
/// must see the last.
const IDLE: u32 = 64;

/// Number of failed polls for each thread, without a store in between, after which an execution is
/// followed to its end but not branched further. Otherwise, loom would explore threads that take
/// turns spinning for ever. A failed poll changes nothing, so every outcome also occurs in an
/// execution in which the other thread ran earlier.
const UNFAIR: u32 = 2;

/// Maximum number of scheduling points of one execution.
const BRANCHES: usize = 20_000;

/// Explores the executions of `scenario` under `rules`: all of them, or those with at most
/// `preemptions` switches away from a runnable thread.
///
/// Stops at the first failure. A report without one covers everything within the bound.
pub fn check(scenario: &Scenario, rules: &Rules, preemptions: Option<usize>) -> Report {
    check_with(scenario, rules, preemptions, None)
}

/// Explores as [`check`] does, and tells `observer` of every operation. The executions are those of
/// [`check`], in the same order.
///
/// An operation that is not allowed fails as [`Failure::Rule`].
pub fn check_observed(
    scenario: &Scenario,
    rules: &Rules,
    preemptions: Option<usize>,
    observer: Arc<Mutex<dyn Observer + Send>>,
) -> Report {
    check_with(
        scenario,
        rules,
        preemptions,
        Some(Arc::new(Mutex::new(Watch { observer, is_on: false }))),
    )
}

fn check_with(
    scenario: &Scenario,
    rules: &Rules,
    preemptions: Option<usize>,
    watched: Watched,
) -> Report {
    assert!(scenario.thread_ids().len() <= 4, "{}: loom takes 4 threads", scenario.name());
    let start = Instant::now();
    let executions = Arc::new(AtomicU64::new(0));
    let mut places: Vec<(Place, bool)> = Vec::new();
    let (failure, trace) = loop {
        match explore(scenario, rules, preemptions, &places, (&executions, &watched)) {
            Some(Stop::Undeclared(place, atomic)) => {
                assert!(!places.contains(&(place, atomic)), "{place:?} is already there");
                places.push((place, atomic));
                executions.store(0, Ordering::Relaxed);
                let _ = with_watch(&watched, |watch| {
                    // loom has ended this execution, so the observer is no longer called for it.
                    watch.is_on = false;
                    Ok(())
                });
            }
            Some(Stop::Failed(failure, trace)) => break (Some(failure), trace),
            None => break (with_watch(&watched, Watch::end).err(), Vec::new()),
        }
    };
    let bound = match preemptions {
        None => "loom, exhaustive".into(),
        Some(bound) => format!("loom, {bound} preemptions"),
    };
    Report {
        scenario: scenario.name().into(),
        bound,
        executions: executions.load(Ordering::Relaxed),
        seconds: start.elapsed().as_secs_f64(),
        failure,
        trace,
    }
}

/// Lock under which one search at a time runs in a process.
///
/// loom maps and unmaps a stack for each thread of each execution. Two searches at once would wait
/// for each other in the kernel, and each unmapping would interrupt the core of the other: on two
/// cores, that took longer than one search after the other.
static ALONE: Mutex<()> = Mutex::new(());

enum Stop {
    /// Location for which this run has no loom object; the run is repeated with an object for it.
    Undeclared(Place, bool),
    Failed(Failure, Trace),
}

type Trace = Vec<(ThreadId, Operation)>;

/// Runs loom on an OS thread of its own, because a failed run may leave its coroutines behind.
fn explore(
    scenario: &Scenario,
    rules: &Rules,
    preemptions: Option<usize>,
    places: &[(Place, bool)],
    (executions, watched): (&Arc<AtomicU64>, &Watched),
) -> Option<Stop> {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = BRANCHES;
    builder.max_permutations = None;
    builder.max_duration = None;
    let trace = Arc::new(Mutex::new(Vec::new()));
    let setup = Arc::new(Setup {
        scenario: scenario.clone(),
        rules: rules.clone(),
        places: places.iter().zip(0..).map(|(&(place, _), slot)| (place, slot)).collect(),
        objects: places.to_vec(),
        trace: trace.clone(),
        watched: watched.clone(),
    });
    let executions = executions.clone();
    let run = move || {
        quiet();
        panic::catch_unwind(AssertUnwindSafe(|| {
            builder.check(move || {
                executions.fetch_add(1, Ordering::Relaxed);
                execution(&setup);
            });
        }))
    };
    let result = {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        std::thread::spawn(run).join().unwrap_or_else(Err)
    };
    result.err().map(|payload| classify(payload, &trace))
}

fn classify(payload: Box<dyn Any + Send>, trace: &Mutex<Trace>) -> Stop {
    let payload = match payload.downcast::<Stop>() {
        Ok(stop) => return *stop,
        Err(payload) => payload,
    };
    let trace = trace.lock().map_or_else(|_| Vec::new(), |mut trace| std::mem::take(&mut *trace));
    let message = match payload.downcast::<Failure>() {
        Ok(failure) => return Stop::Failed(*failure, trace),
        Err(payload) => payload.downcast::<String>().map_or_else(
            |payload| {
                payload.downcast::<&str>().map_or_else(|_| "panic".to_string(), |s| s.to_string())
            },
            |message| *message,
        ),
    };
    let plain = |op: &Operation| matches!(op, Operation::Read { .. } | Operation::Write { .. });
    let place = trace.iter().rev().find(|(_, op)| plain(op)).and_then(|(_, op)| op.place());
    let failure = if message.contains("Causality violation") {
        Failure::Race(place)
    } else if message.starts_with("deadlock") || message.contains("maximum number of branches") {
        Failure::Lost(message)
    } else {
        Failure::Other(message)
    };
    Stop::Failed(failure, trace)
}

/// Silences the panic messages of model threads: their panics are results of the search.
fn quiet() {
    static HOOK: Once = Once::new();
    thread_local!(static QUIET: Cell<bool> = const { Cell::new(false) });
    HOOK.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                usual(info);
            }
        }));
    });
    QUIET.set(true);
}

struct Setup {
    scenario: Scenario,
    rules: Rules,
    places: HashMap<Place, usize>,
    objects: Vec<(Place, bool)>,
    /// Operations of this execution so far; the last non-atomic access is the location of a race.
    trace: Arc<Mutex<Trace>>,
    watched: Watched,
}

fn execution(setup: &Arc<Setup>) {
    if let Err(failure) = with_watch(&setup.watched, Watch::begin) {
        failure.raise();
    }
    if let Ok(mut trace) = setup.trace.lock() {
        trace.clear();
    }
    let arena = Rc::new(LoomArena::new(setup.clone()));
    // Threads that access no words are spawned first. loom runs threads with low numbers first, and
    // permutes nothing as long as these threads wait only for their workgroup.
    let mut threads = setup.scenario.thread_ids();
    threads.sort_by_key(|id| id.thread == 0);
    for id in threads {
        let arena = arena.clone();
        // The threads are not joined: loom waits for all of them anyway, and joins would permute
        // their ends.
        loom::thread::spawn(move || {
            *arena.sleepers[&id].thread.borrow_mut() = Some(loom::thread::current());
            Thread::run(id, &arena.setup.scenario, &arena.setup.rules, &*arena);
        });
    }
}

enum Object {
    Word(AtomicI32),
    Wide(AtomicI64),
    Line(UnsafeCell<[i32; LINE_WORDS as usize]>),
    Cell(UnsafeCell<i32>),
}

struct LoomArena {
    setup: Arc<Setup>,
    objects: Vec<Object>,
    unchecked: RefCell<HashMap<Place, i32>>,
    idle: Cell<u32>,
    sleepers: HashMap<ThreadId, Sleeper>,
    votes: HashMap<(u32, u32), Meeting>,
    boundaries: HashMap<u32, Meeting>,
}

impl LoomArena {
    fn new(setup: Arc<Setup>) -> Self {
        let scenario = &setup.scenario;
        let first_of_line = |rank, index| {
            std::array::from_fn(|i| {
                scenario.initial_value(Place::Data { rank, index: index + i as u32 }) as i32
            })
        };
        let objects = setup
            .objects
            .iter()
            .map(|&(place, atomic)| match place {
                Place::Data { rank, index } => {
                    Object::Line(UnsafeCell::new(first_of_line(rank, index)))
                }
                Place::Wide { .. } => Object::Wide(AtomicI64::new(scenario.initial_value(place))),
                _ if atomic => Object::Word(AtomicI32::new(scenario.initial_value(place) as i32)),
                _ => Object::Cell(UnsafeCell::new(scenario.initial_value(place) as i32)),
            })
            .collect();
        let threads = scenario.thread_ids();
        let meeting = || Meeting {
            arrived: RefCell::new(Vec::new()),
            last: Cell::new(ThreadId { rank: 0, group: 0, thread: 0 }),
            ok: Cell::new(true),
            outcome: Cell::new(true),
        };
        let sleeper = || Sleeper { thread: RefCell::new(None), token: Cell::new(Token::Nothing) };
        Self {
            objects,
            unchecked: RefCell::new(HashMap::default()),
            idle: Cell::new(0),
            sleepers: threads.iter().map(|&id| (id, sleeper())).collect(),
            votes: threads.iter().map(|id| ((id.rank, id.group), meeting())).collect(),
            boundaries: threads.iter().map(|id| (id.rank, meeting())).collect(),
            setup,
        }
    }

    fn object(&self, place: Place, atomic: bool) -> &Object {
        let key = match place {
            Place::Data { rank, index } => {
                Place::Data { rank, index: index / LINE_WORDS * LINE_WORDS }
            }
            place => place,
        };
        match self.setup.places.get(&key) {
            Some(&slot) => &self.objects[slot],
            None => panic::resume_unwind(Box::new(Stop::Undeclared(key, atomic))),
        }
    }

    fn word(&self, place: Place) -> &AtomicI32 {
        match self.object(place, true) {
            Object::Word(word) => word,
            _ => Failure::Other(format!("{place:?} is both atomic and plain")).raise(),
        }
    }

    fn wide(&self, place: Place) -> &AtomicI64 {
        match self.object(place, true) {
            Object::Wide(word) => word,
            _ => Failure::Other(format!("{place:?} has 32 bits")).raise(),
        }
    }

    /// Accesses a non-atomic location; loom checks it for races.
    fn plain(&self, place: Place, write: Option<i32>) -> i32 {
        if let Place::Unchecked { .. } = place {
            let mut unchecked = self.unchecked.borrow_mut();
            let value = unchecked
                .entry(place)
                .or_insert_with(|| self.setup.scenario.initial_value(place) as i32);
            return write.map_or(*value, |new| std::mem::replace(value, new));
        }
        let object = self.object(place, false);
        match (object, place) {
            (Object::Cell(cell), _) => match write {
                // SAFETY: loom has just checked that nothing accesses the cell concurrently.
                None => cell.with(|value| unsafe { *value }),
                // SAFETY: loom has just checked that nothing accesses the cell concurrently.
                Some(new) => cell.with_mut(|value| unsafe { std::mem::replace(&mut *value, new) }),
            },
            (Object::Line(line), Place::Data { index, .. }) => {
                let field = (index % LINE_WORDS) as usize;
                match write {
                    // SAFETY: loom checked for concurrent accesses; the array has `LINE_WORDS`
                    // fields.
                    None => line.with(|values| unsafe { (*values)[field] }),
                    // SAFETY: loom has just checked that nothing accesses the cell concurrently.
                    Some(new) => line.with_mut(|values| unsafe {
                        std::mem::replace(&mut (*values)[field], new)
                    }),
                }
            }
            _ => Failure::Other(format!("{place:?} is both atomic and plain")).raise(),
        }
    }

    fn tell(
        &self,
        call: impl FnOnce(&mut (dyn Observer + Send + 'static)) -> Result<(), Forbidden>,
    ) {
        if let Err(failure) = with_watch(&self.setup.watched, |watch| watch.tell(call)) {
            failure.raise();
        }
    }
}

impl Arena for LoomArena {
    fn perform(&self, thread: ThreadId, op: &Operation) -> i64 {
        if let Ok(mut trace) = self.setup.trace.lock() {
            trace.push((thread, *op));
        }
        if !matches!(
            op,
            Operation::Pause | Operation::Load { .. } | Operation::CompareExchange { .. }
        ) {
            self.idle.set(0);
        }
        let result = self.access(thread, op);
        if op.place().is_some() {
            self.tell(|observer| observer.performed(thread, op, result));
        }
        result
    }
}

impl LoomArena {
    fn access(&self, thread: ThreadId, op: &Operation) -> i64 {
        match *op {
            Operation::Load { place: place @ Place::Wide { .. }, order, .. } => {
                self.wide(place).load(load(order))
            }
            Operation::Load { place, order, .. } => self.word(place).load(load(order)).into(),
            Operation::Store { place: place @ Place::Wide { .. }, value, order, .. } => {
                self.wide(place).store(value, store(order));
                value
            }
            Operation::Store { place, value, order, .. } => {
                self.word(place).store(value as i32, store(order));
                value
            }
            Operation::CompareExchange { place, expected, value, order, .. } => {
                let relaxed = loom::sync::atomic::Ordering::Relaxed;
                let word = self.word(place);
                let held = word.compare_exchange(expected, value, both(order), relaxed);
                if held.is_ok() {
                    self.idle.set(0);
                }
                held.unwrap_or_else(|held| held).into()
            }
            Operation::Add { place, value, order, .. } => {
                self.word(place).fetch_add(value, both(order)).into()
            }
            Operation::Read { place } => self.plain(place, None).into(),
            Operation::Write { place, value } => self.plain(place, Some(value)).into(),
            Operation::Vote { .. } => {
                let threads = self.setup.scenario.threads as usize;
                self.meet(thread, &self.votes[&(thread.rank, thread.group)], threads, op).into()
            }
            Operation::Boundary => {
                let Scenario { threads, groups, .. } = &self.setup.scenario;
                let threads = (threads * groups[thread.rank as usize]) as usize;
                self.meet(thread, &self.boundaries[&thread.rank], threads, op).into()
            }
            // Divergence has no effect under loom, because it does not model lockstep: every thread
            // always makes progress.
            Operation::Part | Operation::Join => 0,
            Operation::Pause => {
                self.idle.set(self.idle.get() + 1);
                if self.idle.get() == UNFAIR * self.sleepers.len() as u32 {
                    loom::skip_branch();
                }
                if self.idle.get() > IDLE {
                    Failure::Lost(format!("{thread:?} looks in vain, as do all others")).raise();
                }
                loom::thread::yield_now();
                0
            }
        }
    }
}

fn load(order: Order) -> loom::sync::atomic::Ordering {
    match order {
        Order::Acquire | Order::AcqRel => loom::sync::atomic::Ordering::Acquire,
        Order::Relaxed | Order::Release => loom::sync::atomic::Ordering::Relaxed,
    }
}

fn store(order: Order) -> loom::sync::atomic::Ordering {
    match order {
        Order::Release | Order::AcqRel => loom::sync::atomic::Ordering::Release,
        Order::Relaxed | Order::Acquire => loom::sync::atomic::Ordering::Relaxed,
    }
}

fn both(order: Order) -> loom::sync::atomic::Ordering {
    match order {
        Order::Relaxed => loom::sync::atomic::Ordering::Relaxed,
        Order::Acquire => loom::sync::atomic::Ordering::Acquire,
        Order::Release => loom::sync::atomic::Ordering::Release,
        Order::AcqRel => loom::sync::atomic::Ordering::AcqRel,
    }
}
