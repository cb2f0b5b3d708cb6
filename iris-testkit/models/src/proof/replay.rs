//! Replay of executions against the rules: each operation must be a step that the rules allow.
//!
//! Every rule has a file that maps operations to steps of the rule. Facts about a scenario that a
//! rule needs, such as which word signals which tile, are learned from a log of one execution
//! of the unbroken code.

use std::any::Any;
use std::sync::{Arc, Mutex};

use iris_sync::{ABORT_WORD, Access, Channel, LINE_WORDS};

use super::barrier::barrier;
use super::beside::beside;
use super::concrete::Universe;
use super::engine::engines;
use super::rule::{Numbers, slot_rule};
use super::staging::staging;
use super::term::Name;
use crate::mutants::STATES;
use crate::ops::{SHARD_WORD, array};
use crate::search::{self, Explorer, Observer};
use crate::{Failure, Forbidden, Operation, Place, Report, Rules, Scenario, ThreadId, loom_memory};
use engines::Engines;
use kernels::Kernels;
use log::{Event, Log, loads, stores};
use members::Members;
use slots::{CallContents, Slots};
use stages::Stages;
use track::Track;

mod engines;
mod kernels;
mod log;
mod members;
mod slots;
mod stages;
mod track;

pub use track::Counts;

/// Kind of a word that peers access, by its position in a channel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Word {
    /// Entry word of a source rank, for calls of one parity.
    Entry { source: i64, odd: bool },
    /// Any field of the entry record of a source rank.
    Record { source: i64 },
    /// Signal word, result word or barrier word that a source rank sets.
    Signal { source: i64 },
    /// Done word of a reader rank.
    Done { reader: i64 },
    /// Abort word of the rank in whose memory it lies.
    Abort,
    /// Shard that the scenario keeps in words.
    Shard,
    /// Lock word, or memory that only the scenario uses.
    Other,
}

fn word(channel: &Channel, index: u32) -> Word {
    let c = channel;
    if index == ABORT_WORD {
        return Word::Abort;
    }
    if index >= SHARD_WORD {
        return Word::Shard;
    }
    let pairs = c.barriers + 2 * c.size * LINE_WORDS;
    match index {
        at if at < c.entries || at >= pairs => Word::Other,
        at if at < c.signals => {
            let (record, field) = ((at - c.entries) / LINE_WORDS, (at - c.entries) % LINE_WORDS);
            let source = i64::from(record / 2);
            if field == LINE_WORDS - 1 {
                Word::Entry { source, odd: record % 2 == 1 }
            } else {
                Word::Record { source }
            }
        }
        at if at < c.results => Word::Signal { source: ((at - c.signals) / c.tiles).into() },
        at if at < c.done => Word::Signal { source: ((at - c.results) / c.tiles).into() },
        at if at < c.barriers => Word::Done { reader: ((at - c.done) / LINE_WORDS).into() },
        at => Word::Signal { source: ((at - c.barriers) / LINE_WORDS % c.size).into() },
    }
}

/// Key of a signal, result or barrier word, without its source rank: the kind of word, and the tile
/// or phase.
fn meaning(channel: &Channel, index: u32) -> (u32, u32) {
    let c = channel;
    match index {
        at if at < c.results => (0, (at - c.signals) % c.tiles),
        at if at < c.done => (1, (at - c.results) % c.tiles),
        at => (2, (at - c.barriers) / LINE_WORDS / c.size),
    }
}
/// Index of the array that contains a cell.
fn array_of(index: u32) -> u32 {
    index / 256
}

/// Whether the slot rule covers an array. Only the models explore arrays to which ranks add under
/// locks, and arrays that only one device accesses.
fn is_spoken_of(index: u32) -> bool {
    !matches!(array_of(index), array::WORK | array::STAGE)
}
/// Rule that every word holds the number of a call of its writer.
const NUMBER: Name = "words hold the number of the call";

/// Rule that calls use the tiles and words that ranks agreed on.
const PLAN: Name = "tiles and words are those of the plan";

/// Rule about a barrier inside a call that ranks enter: the barrier's word is also a word of the
/// slot rule. Arriving at the barrier is the step `raise`, and a load of the word is the step
/// `see`.
const JOINED: Name = "a barrier inside a call is a word of the slot rule";
fn owner(place: Place) -> i64 {
    match place {
        Place::Sym { rank, .. }
        | Place::Wide { rank, .. }
        | Place::Dev { rank, .. }
        | Place::Data { rank, .. }
        | Place::Cell { rank, .. }
        | Place::Unchecked { rank, .. } => rank.into(),
    }
}

/// Whether calls with this number refresh words.
fn refreshes(call: i64) -> bool {
    call.rem_euclid(Numbers::REAL.period) == 0
}

/// Maximum number of ranks in a scenario that is replayed.
const RANKS: usize = 8;

/// Number of ranks and calls of a scenario, with one agent, word and tile.
fn universe(scenario: &Scenario) -> Universe {
    Universe {
        ranks: scenario.ranks.into(),
        agents: 1,
        words: 1,
        tiles: 1,
        first: scenario.first.number().into(),
        calls: i64::from(scenario.calls) + 1,
    }
}

/// Comparison of an execution with one rule, one operation after the other.
struct Replay<R, P> {
    channel: Channel,
    /// Number of the first call.
    first: i64,
    track: Track,
    /// Scenario in terms of the rule.
    rule: R,
    /// Progress of the execution that is not part of the rule's state. It is small, because a
    /// search saves a copy of it for each state.
    progress: P,
}

impl<R, P> Replay<R, P> {
    fn get(&self, name: &str, arguments: &[i64]) -> i64 {
        self.track.get(name, arguments)
    }

    fn is(&self, name: &str, arguments: &[i64]) -> bool {
        self.track.get(name, arguments) != 0
    }

    fn step(&mut self, name: Name, parameters: &[i64]) -> Result<(), Forbidden> {
        self.track.step(name, parameters)
    }

    fn ghost(&self, rank: i64, value: i64) -> i64 {
        self.track.ghost(rank, value)
    }
}

/// Steps of a rule that the operations of an execution stand for.
trait Follows {
    /// Takes the steps that an operation stands for.
    fn performed(
        &mut self,
        thread: ThreadId,
        op: &Operation,
        place: Place,
        result: i64,
    ) -> Result<(), Forbidden>;

    /// Takes the steps that a barrier stands for.
    fn met(&mut self, threads: &[ThreadId], op: &Operation) -> Result<(), Forbidden> {
        let _ = (threads, op);
        Ok(())
    }

    /// Takes the steps that the end of the execution stands for.
    fn ended(&mut self) -> Result<(), Forbidden> {
        Ok(())
    }
}

/// State of a replay that a search saves: number of changes, and progress.
type Saved = (usize, Box<dyn Any + Send>);

/// Replay of any rule.
trait Follower: Follows + Any + Send {
    fn track(&self) -> &Track;
    fn end(&mut self) -> Result<(), Forbidden>;
    fn save(&self) -> Saved;
    fn restore(&mut self, saved: &Saved);
}

impl<R: Send + 'static, P: Clone + Send + 'static> Follower for Replay<R, P>
where
    Self: Follows,
{
    fn track(&self) -> &Track {
        &self.track
    }

    fn end(&mut self) -> Result<(), Forbidden> {
        self.ended()?;
        self.track.holds()
    }

    fn save(&self) -> Saved {
        (self.track.changes(), Box::new(self.progress.clone()))
    }

    fn restore(&mut self, (changes, progress): &Saved) {
        self.track.undo_to(*changes);
        if let Some(progress) = progress.downcast_ref() {
            self.progress.clone_from(progress);
        }
    }
}

/// Replay of an execution against all rules that apply to its scenario.
struct All {
    channel: Channel,
    rules: Vec<Box<dyn Follower>>,
    /// State before the first operation.
    start: Vec<Saved>,
}

impl All {
    /// Learns the plan of a scenario. Returns `None` if no rule applies, because no rank enters a
    /// call and not every call has a barrier. Also returns `None` if the scenario begins in a state
    /// that other calls have left.
    ///
    /// # Errors
    /// The failure of the execution from which the plan should be learned.
    fn new(scenario: &Scenario) -> Result<Option<Self>, String> {
        let Some((log, failure)) = Log::learn(scenario) else { return Ok(None) };
        let plan = CallContents::learn(&log);
        let enters = match failure {
            None => plan.enters,
            // The scenario is about waits that time out; its calls never end in the reference
            // execution, which has no deadlines.
            Some(_) if scenario.expires.is_some() => false,
            Some(failure) => return Err(format!("{}: {failure:?}", scenario.name())),
        };
        let members = Replay::<Members, _>::new(scenario, &log);
        if !enters && members.is_none() {
            return Ok(None);
        }
        let kernels = Replay::<Kernels, _>::new(scenario, &log);
        let groups = kernels.as_ref().map(|it| it.rule.groups.clone()).unwrap_or_default();
        let mut rules: Vec<Box<dyn Follower>> = Vec::new();
        // Units are staged, and engines copy, only in calls that ranks enter.
        if enters {
            rules.extend(Replay::<Engines, _>::new(scenario, &log).map(boxed));
            rules.push(Box::new(Replay::<Slots, _>::new(scenario, plan, &groups)));
        }
        rules.extend(members.map(boxed));
        if enters {
            rules.extend(Replay::<Stages, _>::new(scenario, &log).map(boxed));
        }
        rules.extend(kernels.map(boxed));
        let start = rules.iter().map(|it| it.save()).collect();
        Ok(Some(Self { channel: log.channel, rules, start }))
    }

    fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        self.rules.iter().for_each(|it| counts.add(&it.track().counts()));
        counts
    }

    /// Numbers of steps taken so far for accesses to barrier words: `raise` of the slot rule and
    /// `arrive` of the barrier, then `see` and `look`. Returns `None` if `op` does not access a
    /// barrier word, or if one of the two rules does not apply to the scenario.
    fn joined(&self, op: &Operation) -> Option<[(u64, u64); 2]> {
        let Some(Place::Sym { index, .. }) = op.place() else { return None };
        members::phase(&self.channel, index)?;
        let of = |system| self.rules.iter().map(|it| it.track()).find(|it| it.system == system);
        let (slots, members) = (of("slot rule")?, of("device barrier")?);
        let pair = |of_slots, of_members| (slots.taken(of_slots), members.taken(of_members));
        Some([pair("raise", "arrive"), pair("see", "look")])
    }
}

fn boxed(rule: impl Follower) -> Box<dyn Follower> {
    Box::new(rule)
}

impl Observer for All {
    fn begin(&mut self) {
        let start = std::mem::take(&mut self.start);
        self.restore(&start);
        self.start = start;
    }

    fn performed(
        &mut self,
        thread: ThreadId,
        op: &Operation,
        result: i64,
    ) -> Result<(), Forbidden> {
        let Some(place) = op.place() else { return Ok(()) };
        let before = self.joined(op);
        self.rules.iter_mut().try_for_each(|it| it.performed(thread, op, place, result))?;
        let (Some(before), Some(after)) = (before, self.joined(op)) else { return Ok(()) };
        let differ = before.iter().zip(&after).any(|(was, is)| is.0 - was.0 != is.1 - was.1);
        if differ { Err(Forbidden::new(JOINED, format!("{op:?}"))) } else { Ok(()) }
    }

    fn met(&mut self, threads: &[ThreadId], op: &Operation) -> Result<(), Forbidden> {
        self.rules.iter_mut().try_for_each(|it| it.met(threads, op))
    }

    fn end(&mut self) -> Result<(), Forbidden> {
        self.rules.iter_mut().try_for_each(|it| it.end())
    }
}

impl Explorer for All {
    type Saved = Vec<Saved>;

    fn save(&self) -> Self::Saved {
        self.rules.iter().map(|it| it.save()).collect()
    }

    fn restore(&mut self, saved: &Self::Saved) {
        self.rules.iter_mut().zip(saved).for_each(|(rule, saved)| rule.restore(saved));
    }
}

/// Executions by one engine that are replayed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Extent {
    /// Executions by this number of random schedules.
    Random(u64),
    /// Every transition of the exhaustive search of schedules.
    Search,
    /// Every execution of loom with this number of preemptions; all executions if `None`.
    Loom(Option<usize>),
}

/// Replays executions of a scenario against the rules. Returns `None` if no rule applies to the
/// scenario.
pub fn replay(scenario: &Scenario, rules: &Rules, extent: Extent) -> Option<(Report, Counts)> {
    let mut all = match All::new(scenario) {
        Ok(all) => all?,
        Err(why) => {
            let failure = Some(Failure::Other(why));
            let report = search::random(scenario, rules, 1, 0);
            return Some((Report { failure, ..report }, Counts::default()));
        }
    };
    Some(match extent {
        Extent::Random(runs) => {
            let report = search::observe(scenario, rules, (1, runs), &mut all);
            (report, all.counts())
        }
        Extent::Search => {
            let report = search::exhaust_observed(scenario, rules, STATES, &mut all);
            (report, all.counts())
        }
        Extent::Loom(preemptions) => {
            let all = Arc::new(Mutex::new(all));
            let report = loom_memory::check_observed(scenario, rules, preemptions, all.clone());
            let counts = all.lock().map_or_else(|_| Counts::default(), |all| all.counts());
            (report, counts)
        }
    })
}

/// Whether a row of the access table belongs to a rule that is replayed. Other rows are explored by
/// the models only.
pub fn is_replayed(access: Access) -> bool {
    use Access::*;
    match access {
        EntryStore | CreditLoad | EntryLoad | SignalStore | SignalLoad | DoneStore | DoneLoad
        | BarrierStore | BarrierLoad | StampStore | CallLoad | CallStore | FinishAdd
        | FinishStore | LlStore | LlLoad | LlStamp | FlagStore | FlagLoad | FlagStamp => true,
        VersionStore | VersionLoad | LockTake | LockGive | AbortStore | AbortLoad | AbortCheck => {
            false
        }
    }
}

/// Names of those actions of the replayed rules, and of those rows of the access table, that do not
/// occur in `counts`.
pub fn never_replayed(counts: &Counts) -> Vec<String> {
    let systems = [slot_rule, barrier, staging, engines, beside];
    let systems = systems.map(|make| make(Numbers::REAL, None));
    let actions = systems.iter().flat_map(|it| it.actions.iter().map(|of| (it.name, of.name)));
    let missing = actions
        .filter(|name| !counts.steps.contains_key(name))
        .map(|(system, action)| format!("action {action} of the {system}"));
    let rows = Access::ALL.iter().filter(|&&access| is_replayed(access));
    let rows = rows.filter(|access| !counts.accesses.contains_key(access.name()));
    missing.chain(rows.map(|access| format!("access {}", access.name()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops;

    /// Tests that a barrier word which is missing in the plan of the slot rule is refused.
    #[test]
    fn a_barrier_that_is_no_word_of_the_slot_rule_is_refused() {
        let scenario = ops::gather(2, 1, 2, true);
        let by = |forgets: bool| {
            let mut all = All::new(&scenario).expect("a plan").expect("rules");
            let barriers = all.channel.barriers;
            let mut rules = all.rules.iter_mut().map(|it| &mut **it as &mut dyn Any);
            let slots = rules.find_map(|it| it.downcast_mut::<Replay<Slots, slots::Progress>>());
            slots.expect("the slot rule").rule.plan.raised.retain(|it| !forgets || it.3 < barriers);
            let report = search::observe(&scenario, &Rules::default(), (1, 20), &mut all);
            match report.failure {
                Some(Failure::Rule(forbidden)) => Some(forbidden.by),
                _ => None,
            }
        };
        assert_eq!((by(false), by(true)), (None, Some(JOINED)));
    }
}
