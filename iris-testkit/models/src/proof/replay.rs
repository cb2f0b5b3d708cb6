//! Executions of the code, replayed against the slot rule: each operation must be a step that the rule allows.
//!
//! Long because what an operation means to the rule is one table of cases, and its two readers keep to the same layout.
//!
//! The rule is about tiles and words, the code about cells and addresses. A `Plan` is what links them: which rank
//! writes which cell at which other one in which call, and which word it raises for it. It is learned from one
//! execution of the unbroken code; all others, of Rust and of the device headers, must keep to it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use iris_sync::{ABORT_WORD, Channel, LINE_WORDS, LlWord, Order};

use super::concrete::{Machine, Refusal, State, Universe};
use super::rule::{Numbers, slot_rule};
use super::term::Name;
use crate::ops::array;
use crate::search::{self, Observer};
use crate::{Op, Place, Report, Rules, Scenario, ThreadId};

/// Words that ranks have for each other, by where they lie.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Word {
    /// The entry word of a source, for calls of a parity.
    Entry { source: i64, odd: bool },
    /// A field of the record of a source.
    Record { source: i64 },
    /// A signal, a result or the word of a barrier, of a source.
    Signal { source: i64 },
    /// The done word of a reader.
    Done { reader: i64 },
    /// The abort word.
    Abort,
    /// A lock, or memory of the scenario's own.
    Other,
}

fn word(channel: &Channel, index: u32) -> Word {
    let c = channel;
    if index == ABORT_WORD {
        return Word::Abort;
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

/// What the words of all sources for one thing have in common: which kind, and of which tile or phase.
fn meaning(channel: &Channel, index: u32) -> (u32, u32) {
    let c = channel;
    match index {
        at if at < c.results => (0, (at - c.signals) % c.tiles),
        at if at < c.done => (1, (at - c.results) % c.tiles),
        at => (2, (at - c.barriers) / LINE_WORDS / c.size),
    }
}

/// The rank that writes a word that carries its data.
fn writer(channel: &Channel, index: u32) -> i64 {
    let first = channel.pair(0, 0, 0, 0).index;
    let source = channel.pair(0, 1, 0, 0).index - first;
    i64::from((index - first) / source % channel.size)
}

/// The array that a cell belongs to.
fn array_of(index: u32) -> u32 {
    index / 256
}

/// Whether the rule speaks of an array: what is added under locks, or stays on one device, it leaves to the models.
fn is_spoken_of(index: u32) -> bool {
    !matches!(array_of(index), array::WORK | array::STAGE)
}

/// What calls of a scenario do, as all ranks agree on it. Calls are numbered from 0.
#[derive(Clone, Debug, Default)]
struct Plan {
    /// Call, writer, place.
    tiles: BTreeSet<(i64, i64, Place)>,
    /// The word that stands for each.
    words: HashMap<(i64, i64, Place), u32>,
    /// Call, writer, receiver, word.
    raised: BTreeSet<(i64, i64, i64, u32)>,
    pulled: BTreeSet<i64>,
    /// Calls that write records.
    recorded: BTreeSet<i64>,
    enters: bool,
}

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

/// Learns a plan from an execution.
struct Learner {
    channel: Channel,
    first: i64,
    plan: Plan,
    /// The call that each rank is in.
    calls: HashMap<u32, i64>,
    launches: HashMap<u32, u32>,
    /// Barriers of each workgroup so far.
    votes: HashMap<(u32, u32), u32>,
    /// Tiles whose word has not been raised: call, writer, place, thread, launch, and barriers of its workgroup.
    open: Vec<(i64, i64, Place, ThreadId, u32, u32)>,
}

impl Observer for Learner {
    fn begin(&mut self) {}

    fn performed(&mut self, thread: ThreadId, op: &Op, result: i64) -> Result<(), String> {
        let Some(place) = op.place() else { return Ok(()) };
        let me = i64::from(thread.rank);
        let call = self.calls.get(&thread.rank).copied().unwrap_or_default();
        let launch = *self.launches.entry(thread.rank).or_default();
        let peer = owner(place);
        let votes = self.votes.get(&(thread.rank, thread.group)).copied().unwrap_or_default();
        match (*op, place) {
            (Op::Read { .. } | Op::Load { .. }, Place::Dev { index, .. })
                if index == self.channel.call =>
            {
                self.calls.insert(thread.rank, result - self.first);
            }
            (Op::Write { .. }, Place::Cell { index, .. }) if peer != me && is_spoken_of(index) => {
                self.plan.tiles.insert((call, me, place));
                self.open.push((call, me, place, thread, launch, votes));
            }
            (Op::Store { .. }, Place::Wide { .. }) => {
                self.plan.tiles.insert((call, me, place));
            }
            (Op::Read { .. }, Place::Cell { index, .. }) if peer != me && is_spoken_of(index) => {
                self.plan.pulled.insert(call);
            }
            (Op::Write { .. }, Place::Data { .. } | Place::Unchecked { .. }) => {
                self.plan.recorded.insert(call);
            }
            (Op::Store { .. }, Place::Sym { index, .. }) => match word(&self.channel, index) {
                Word::Entry { .. } => self.plan.enters = true,
                Word::Signal { .. } => {
                    self.plan.raised.insert((call, me, peer, index));
                    let words = &mut self.plan.words;
                    self.open.retain(|&(of, writer, tile, by, at, voted)| {
                        let stands = writer == me
                            && owner(tile) == peer
                            && (by == thread
                                || by.group == thread.group && voted < votes
                                || at < launch);
                        if stands {
                            words.insert((of, writer, tile), index);
                        }
                        !stands
                    });
                }
                _ => {}
            },
            _ => {}
        }
        Ok(())
    }

    fn met(&mut self, threads: &[ThreadId], op: &Op) -> Result<(), String> {
        if let Some(thread) = threads.first() {
            *match op {
                Op::Boundary => self.launches.entry(thread.rank).or_default(),
                _ => self.votes.entry((thread.rank, thread.group)).or_default(),
            } += 1;
        }
        Ok(())
    }

    fn end(&mut self) -> Result<(), String> {
        Ok(())
    }
}

/// A scenario's rule over concrete values, and the state that an execution has reached.
pub struct Replay {
    channel: Channel,
    first: i64,
    machine: Machine,
    state: State,
    threads: HashMap<ThreadId, i64>,
    tiles: HashMap<Place, i64>,
    words: HashMap<(u32, u32), i64>,
    plan: Plan,
    direct: HashSet<Place>,
    /// Threads of a launch that have been counted out, by rank.
    counted_out: HashMap<i64, Vec<i64>>,
    /// Steps that were replayed, by the name of the action.
    pub steps: BTreeMap<Name, u64>,
    /// Executions that were replayed.
    pub executions: u64,
}

impl Replay {
    /// Learns the plan of a scenario; none if it has no entries, so that the slot rule has no part in it, or begins in a
    /// state that other calls have left.
    ///
    /// # Errors
    /// What the execution that should be learned from does wrong.
    pub fn new(scenario: &Scenario) -> Result<Option<Self>, String> {
        if scenario.words.is_some() || !scenario.initial.is_empty() {
            return Ok(None);
        }
        let mut reference = scenario.clone();
        reference.expires = None;
        let learned = scenario.calls.max(2);
        // The same slots, and no refresh.
        let first = 8 - (scenario.first.number() & 1);
        reference = reference.calls(learned, first);
        let channel = scenario.channel(0);
        let mut learner = Learner {
            channel,
            first: first.into(),
            plan: Plan::default(),
            calls: HashMap::new(),
            launches: HashMap::new(),
            votes: HashMap::new(),
            open: Vec::new(),
        };
        let report = search::observe(&reference, &Rules::default(), (1, 1), &mut learner);
        if let Some(failure) = report.failure {
            // Of a scenario that is about waits which end, and whose calls cannot.
            if scenario.expires.is_some() {
                return Ok(None);
            }
            return Err(format!("{}: {failure:?}", scenario.name()));
        }
        let plan = learner.plan;
        if !plan.enters {
            return Ok(None);
        }
        Ok(Some(Self::over(scenario, channel, plan)))
    }

    fn over(scenario: &Scenario, channel: Channel, plan: Plan) -> Self {
        let places: BTreeSet<Place> = plan.tiles.iter().map(|&(_, _, place)| place).collect();
        let indices: BTreeSet<(u32, u32)> =
            plan.raised.iter().map(|&(_, _, _, index)| meaning(&channel, index)).collect();
        let raised: BTreeSet<(i64, i64, i64, (u32, u32))> = plan
            .raised
            .iter()
            .map(|&(call, from, to, index)| (call, from, to, meaning(&channel, index)))
            .collect();
        let tiles: HashMap<Place, i64> = places.iter().copied().zip(0..).collect();
        let words: HashMap<(u32, u32), i64> = indices.iter().copied().zip(0..).collect();
        let by_index: Vec<Place> = places.iter().copied().collect();
        let word_index: Vec<(u32, u32)> = indices.iter().copied().collect();
        let first = i64::from(scenario.first.number());
        // The first call of each place, and whether calls of both parities use it.
        let mut odd = HashMap::new();
        let mut direct = HashSet::new();
        for &(call, _, place) in &plan.tiles {
            let parity = (call + first).rem_euclid(2) == 1;
            let is_c = matches!(place, Place::Cell { index, .. } if array_of(index) == array::OUT);
            if is_c || *odd.entry(place).or_insert(parity) != parity {
                direct.insert(place);
            }
        }
        let threads: HashMap<ThreadId, i64> = scenario.thread_ids().into_iter().zip(0..).collect();
        let mut ranks = vec![0; threads.len()];
        for (thread, &at) in &threads {
            ranks[at as usize] = i64::from(thread.rank);
        }
        let universe = Universe {
            ranks: scenario.ranks.into(),
            agents: threads.len() as i64,
            words: words.len() as i64,
            tiles: tiles.len() as i64,
            first,
            calls: i64::from(scenario.calls) + 1,
        };
        let fixed = |name: Name, values: &[i64]| -> i64 {
            let call = |value: i64| value - first;
            let tile = |at: i64| by_index[at as usize];
            i64::from(match name {
                "rank" => return ranks[values[0] as usize],
                "one" => {
                    return ranks.iter().position(|&rank| rank == values[0]).unwrap_or_default()
                        as i64;
                }
                "plan" => {
                    let place = tile(values[3]);
                    owner(place) == values[2]
                        && plan.tiles.contains(&(call(values[0]), values[1], place))
                }
                "direct" => direct.contains(&tile(values[0])),
                "numbered" => matches!(tile(values[0]), Place::Wide { .. }),
                "word" => {
                    let key = (call(values[0]), values[1], tile(values[3]));
                    let index = plan.words.get(&key);
                    let index = index.and_then(|&it| words.get(&meaning(&channel, it)));
                    return index.copied().unwrap_or_default();
                }
                "awaited" => {
                    let index = word_index[values[3] as usize];
                    raised.contains(&(call(values[0]), values[1], values[2], index))
                }
                "odd" => odd.get(&tile(values[0])).copied().unwrap_or_default(),
                "theirs" => match tile(values[2]) {
                    place @ Place::Wide { index, .. } => {
                        owner(place) == values[1] && writer(&channel, index) == values[0]
                    }
                    _ => false,
                },
                "pulled" => plan.pulled.contains(&call(values[0])),
                "light" => !plan.recorded.contains(&call(values[0])),
                _ => false,
            })
        };
        let machine = Machine::new(&slot_rule(Numbers::REAL, None), universe, fixed);
        let state = machine.initial();
        Self {
            channel,
            first,
            machine,
            state,
            threads,
            tiles,
            words,
            plan,
            direct,
            counted_out: HashMap::new(),
            steps: BTreeMap::new(),
            executions: 0,
        }
    }

    fn get(&self, name: &str, arguments: &[i64]) -> i64 {
        self.machine.get(&self.state, name, arguments)
    }

    fn is(&self, name: &str, arguments: &[i64]) -> bool {
        self.get(name, arguments) != 0
    }

    /// A step of the rule.
    fn step(&mut self, name: Name, parameters: &[i64]) -> Result<(), String> {
        let action = self.machine.named(name);
        let shown = |what: &str| format!("{} {what}", self.machine.show(action, parameters));
        match self.machine.permits(&self.state, action, parameters) {
            Ok(()) => {}
            Err(Refusal::Given) => return Err(shown("is no step of the rule")),
            Err(Refusal::Guard(guard)) => {
                return Err(shown(&format!("is forbidden by \"{guard}\"")));
            }
            Err(Refusal::Property(it)) => return Err(shown(&format!("violates \"{it}\""))),
        }
        self.machine.perform(&mut self.state, action, parameters);
        *self.steps.entry(name).or_default() += 1;
        Ok(())
    }

    /// All of these threads learn what the others know.
    fn join(&mut self, agents: &[i64]) -> Result<(), String> {
        for &to in agents {
            for &from in agents.iter().filter(|&&from| from != to) {
                self.step("turn", &[to, from])?;
            }
        }
        Ok(())
    }

    fn agents(&self, rank: i64) -> Vec<i64> {
        let mut all: Vec<i64> = self
            .threads
            .iter()
            .filter(|(id, _)| i64::from(id.rank) == rank)
            .map(|(_, &at)| at)
            .collect();
        all.sort_unstable();
        all
    }

    /// The number of a call that a word holds: the one nearest to the rank's call.
    fn ghost(&self, rank: i64, value: i64) -> i64 {
        let call = self.get("call", &[rank]);
        call + i64::from((value as i32).wrapping_sub(call as i32))
    }

    /// All threads of the call have been counted out: the last one goes on for all.
    fn count(&mut self, rank: i64) -> Result<(), String> {
        if self.is("counted", &[rank]) {
            return Ok(());
        }
        self.join(&self.agents(rank))?;
        self.step("count", &[rank])
    }

    /// The call is over, and so is its last launch.
    fn close(&mut self, rank: i64) -> Result<(), String> {
        if !self.is("advanced", &[rank]) || self.is("dead", &[rank]) {
            return Ok(());
        }
        self.count(rank)?;
        let how = if self.is("quit", &[rank]) { "die" } else { "finish" };
        self.step(how, &[rank])
    }

    fn quits(&mut self, rank: i64) -> Result<(), String> {
        if self.is("quit", &[rank]) || self.is("idle", &[rank]) {
            return Ok(());
        }
        self.step("quit", &[rank])
    }

    fn order(op: &Op, wanted: Order) -> Result<(), String> {
        match op.order() {
            Some(order) if order != wanted => {
                Err(format!("{op:?}: the rule has {wanted:?} for this access"))
            }
            _ => Ok(()),
        }
    }

    fn load(&mut self, me: i64, agent: i64, op: &Op, index: u32, seen: i64) -> Result<(), String> {
        let call = self.get("call", &[me]);
        let v = self.ghost(me, seen);
        match word(&self.channel, index) {
            Word::Abort if seen != 0 => self.quits(me),
            Word::Entry { source, odd } if source != me => {
                Self::order(op, Order::Acquire)?;
                let of_call = odd == (call.rem_euclid(2) == 1);
                match of_call {
                    true if v >= call => self.step("entry", &[agent, source, v]),
                    false if v >= call - 1 => self.step("credit", &[agent, source, v]),
                    _ => Ok(()),
                }
            }
            Word::Signal { source } if source != me => {
                Self::order(op, Order::Acquire)?;
                let Some(&w) = self.words.get(&meaning(&self.channel, index)) else {
                    return Ok(());
                };
                if v >= call && self.plan.raised.contains(&(call - self.first, source, me, index)) {
                    self.step("see", &[agent, source, w, v])?;
                }
                Ok(())
            }
            Word::Done { reader } if reader != me => {
                Self::order(op, Order::Acquire)?;
                if v >= call {
                    self.count(me)?;
                    self.step("see_done", &[agent, reader, v])?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn store(
        &mut self,
        (me, agent): (i64, i64),
        op: &Op,
        (peer, index): (i64, u32),
        value: i64,
    ) -> Result<(), String> {
        let call = self.get("call", &[me]);
        let kind = word(&self.channel, index);
        if kind == Word::Abort {
            return self.quits(me);
        }
        if matches!(kind, Word::Other | Word::Record { .. }) || peer == me {
            return Ok(());
        }
        if self.is("dead", &[me]) {
            return Err(format!("{op:?} by a rank that has given up"));
        }
        Self::order(op, Order::Release)?;
        if self.ghost(me, value) != call {
            return Err(format!("{op:?} in call {call}"));
        }
        let due = call.rem_euclid(Numbers::REAL.period) == 0;
        match kind {
            Word::Entry { odd, .. } if odd == (call.rem_euclid(2) == 1) => {
                self.step("enter", &[agent, peer])
            }
            Word::Entry { .. } => Err(format!("{op:?} into the record of the other parity")),
            Word::Done { .. } => {
                self.count(me)?;
                self.step("say_done", &[agent, peer])
            }
            _ => {
                let Some(&w) = self.words.get(&meaning(&self.channel, index)) else {
                    return if due { Ok(()) } else { Err(format!("{op:?}: no word of the plan")) };
                };
                let planned = self.plan.raised.contains(&(call - self.first, me, peer, index));
                if due && (!planned || self.is("stored", &[me, peer, w, call])) {
                    self.count(me)?;
                    return self.step("stamp", &[agent, peer, w]);
                }
                self.step("raise", &[agent, peer, w])
            }
        }
    }

    fn wide(
        &mut self,
        (me, agent): (i64, i64),
        op: &Op,
        place: Place,
        bits: i64,
    ) -> Result<(), String> {
        let call = self.get("call", &[me]);
        let v = self.ghost(me, LlWord::from_bits(bits as u64).call.into());
        let Some(&k) = self.tiles.get(&place) else { return Ok(()) };
        if matches!(op, Op::Load { .. }) {
            let writers = (0..i64::from(self.channel.size)).filter(|&peer| peer != me);
            let source = writers
                .into_iter()
                .find(|&peer| self.plan.tiles.contains(&(call - self.first, peer, place)));
            return match source {
                Some(source) if v == call => self.step("take", &[agent, source, k, v]),
                _ => Ok(()),
            };
        }
        if self.is("dead", &[me]) {
            return Err(format!("{op:?} by a rank that has given up"));
        }
        match call - v {
            0 => self.step("push_numbered", &[agent, owner(place), k]),
            2 => {
                self.count(me)?;
                self.step("stamp_numbered", &[agent, owner(place), k])
            }
            _ => Err(format!("{op:?} in call {call}")),
        }
    }

    /// A plain access to a cell.
    fn cell(
        &mut self,
        (me, agent): (i64, i64),
        op: &Op,
        place: Place,
        index: u32,
    ) -> Result<(), String> {
        if !is_spoken_of(index) {
            return Ok(());
        }
        let call = self.get("call", &[me]) - self.first;
        let (peer, idle) = (owner(place), self.is("idle", &[me]));
        let tile = self.tiles.get(&place).copied();
        match (op, peer == me, tile) {
            (Op::Write { .. }, false, Some(k)) => {
                if self.is("dead", &[me]) {
                    return Err(format!("{op:?} by a rank that has given up"));
                }
                let how = if self.direct.contains(&place) { "push_direct" } else { "push" };
                self.step(how, &[agent, peer, k])
            }
            (Op::Write { .. }, false, None) => Err(format!("{op:?}: no tile of the plan")),
            _ if self.is("dead", &[me]) => Ok(()),
            (Op::Read { .. }, false, _) => self.step("pull", &[agent, peer]),
            (Op::Read { .. }, true, Some(k)) if !idle => {
                let ranks = 0..i64::from(self.channel.size);
                let source = ranks
                    .into_iter()
                    .find(|&source| self.plan.tiles.contains(&(call, source, place)));
                source.map_or(Ok(()), |source| self.step("read", &[agent, source, k]))
            }
            (_, true, _) if idle && matches!(array_of(index), array::OUT | array::SHARD) => {
                self.step("use", &[me])
            }
            _ => Ok(()),
        }
    }
}

impl Observer for Replay {
    fn begin(&mut self) {
        self.state = self.machine.initial();
        self.counted_out.clear();
        self.executions += 1;
    }

    fn performed(&mut self, thread: ThreadId, op: &Op, result: i64) -> Result<(), String> {
        let Some(place) = op.place() else { return Ok(()) };
        let me = i64::from(thread.rank);
        let agent = self.threads[&thread];
        match (*op, place) {
            (Op::Read { .. } | Op::Load { .. }, Place::Dev { index, .. })
                if index == self.channel.call =>
            {
                if self.agents(me).len() == 1 {
                    self.close(me)?;
                }
                if self.is("dead", &[me]) {
                    return Ok(());
                }
                let v = self.ghost(me, result);
                self.step("load", &[agent, v])
            }
            (Op::Write { .. } | Op::Store { .. }, Place::Dev { index, .. })
                if index == self.channel.call =>
            {
                if self.is("dead", &[me]) {
                    Ok(())
                } else {
                    self.step("advance", &[me])
                }
            }
            (Op::Add { .. }, Place::Dev { index, .. }) if index == self.channel.finished => {
                Self::order(op, Order::AcqRel)?;
                for other in self.counted_out.get(&me).cloned().unwrap_or_default() {
                    self.step("turn", &[agent, other])?;
                }
                self.counted_out.entry(me).or_default().push(agent);
                Ok(())
            }
            (Op::Write { .. } | Op::Store { .. }, Place::Dev { index, .. })
                if index == self.channel.finished =>
            {
                self.counted_out.remove(&me);
                Ok(())
            }
            (Op::Load { .. }, Place::Sym { index, .. }) if !self.is("dead", &[me]) => {
                self.load(me, agent, op, index, result)
            }
            (Op::Store { value, .. }, Place::Sym { rank, index }) => {
                self.store((me, agent), op, (rank.into(), index), value)
            }
            (Op::Load { .. }, Place::Wide { .. }) if !self.is("dead", &[me]) => {
                self.wide((me, agent), op, place, result)
            }
            (Op::Store { value, .. }, Place::Wide { .. }) => {
                self.wide((me, agent), op, place, value)
            }
            (Op::Read { .. }, Place::Data { rank, index } | Place::Unchecked { rank, index })
                if i64::from(rank) == me && !self.is("dead", &[me]) =>
            {
                match word(&self.channel, index) {
                    Word::Record { source }
                        if source != me && !self.is("agreed", &[agent, source]) =>
                    {
                        self.step("compare", &[agent, source])
                    }
                    _ => Ok(()),
                }
            }
            (Op::Read { .. } | Op::Write { .. }, Place::Cell { index, .. }) => {
                self.cell((me, agent), op, place, index)
            }
            _ => Ok(()),
        }
    }

    fn met(&mut self, threads: &[ThreadId], op: &Op) -> Result<(), String> {
        let agents: Vec<i64> = threads.iter().map(|thread| self.threads[thread]).collect();
        let Some(rank) = threads.first().map(|thread| i64::from(thread.rank)) else {
            return Ok(());
        };
        if !self.is("dead", &[rank]) {
            self.join(&agents)?;
        }
        if matches!(op, Op::Boundary) { self.close(rank) } else { Ok(()) }
    }

    fn end(&mut self) -> Result<(), String> {
        match self.machine.broken(&self.state) {
            Some((clause, values)) => Err(format!("\"{clause}\" does not hold of {values:?}")),
            None => Ok(()),
        }
    }
}

/// Replays so many random executions of a scenario; none if the slot rule has no part in it.
pub fn replay(
    scenario: &Scenario,
    rules: &Rules,
    runs: u64,
) -> Option<(Report, BTreeMap<Name, u64>)> {
    match Replay::new(scenario) {
        Ok(None) => None,
        Ok(Some(mut replay)) => {
            let report = search::observe(scenario, rules, (1, runs), &mut replay);
            Some((report, replay.steps))
        }
        Err(why) => {
            let report = search::observe(scenario, rules, (1, 0), &mut Nobody);
            Some((Report { failure: Some(crate::Failure::Other(why)), ..report }, BTreeMap::new()))
        }
    }
}

struct Nobody;

impl Observer for Nobody {
    fn begin(&mut self) {}
    fn performed(&mut self, _: ThreadId, _: &Op, _: i64) -> Result<(), String> {
        Ok(())
    }
    fn met(&mut self, _: &[ThreadId], _: &Op) -> Result<(), String> {
        Ok(())
    }
    fn end(&mut self) -> Result<(), String> {
        Ok(())
    }
}
