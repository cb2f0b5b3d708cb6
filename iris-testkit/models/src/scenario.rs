use std::fmt;
use std::sync::Arc;

use iris_sync::sym::abort::REVOKED;
use iris_sync::{
    ABORT_WORD, Call, Channel, LINE_WORDS, Limit, LlWord, RESERVED_WORDS, Record, Shape, SymPair,
};

use crate::{Place, ThreadId};

pub mod headers;
mod thread;

pub use headers::Headers;
pub use thread::Thread;

type Program = dyn Fn(&Thread<'_>) + Send + Sync;

/// Small program over a [`Memory`](iris_sync::Memory) whose executions an engine explores.
///
/// By default, a scenario has one thread and one workgroup per rank, one call, and four tiles. An
/// engine runs the program from its start for every execution, so the program must be a function of
/// the values that it reads.
#[derive(Clone)]
pub struct Scenario {
    pub(super) name: String,
    pub(super) ranks: u32,
    pub(super) threads: u32,
    pub(super) lockstep: bool,
    pub(super) groups: Vec<u32>,
    pub(super) first: Call,
    pub(super) calls: u32,
    pub(super) shape: Shape,
    pub(super) records: Vec<Record>,
    pub(super) words: Option<i32>,
    pub(super) initial: Vec<(Place, i64)>,
    pub(super) expires: Option<fn(ThreadId, Limit, u32) -> bool>,
    pub(super) host_stops: Option<(u32, i32)>,
    pub(super) program: Arc<Program>,
    pub(super) headers: Option<Headers>,
    pub(super) without_heads: bool,
    pub(super) sound: Option<Arc<Scenario>>,
    on_headers: bool,
}

/// Initial value of cells, unless the scenario sets another one.
pub const POISON: i32 = -0x0bad_cafe;

impl Scenario {
    /// Makes a scenario of `ranks` ranks with an empty program.
    pub fn new(name: impl Into<String>, ranks: u32) -> Self {
        let shape =
            Shape { op: 1, size: ranks, tiles: 4, flags: 4, locks: true, ..Shape::default() };
        Self {
            name: name.into(),
            ranks,
            threads: 1,
            lockstep: false,
            groups: vec![1; ranks as usize],
            first: Call::new(7),
            calls: 1,
            shape,
            records: vec![Record::default(); ranks as usize],
            words: None,
            initial: Vec::new(),
            expires: None,
            host_stops: None,
            program: Arc::new(|_| ()),
            headers: None,
            without_heads: false,
            sound: None,
            on_headers: false,
        }
    }

    /// Sets the program that every thread of every rank runs.
    #[must_use]
    pub fn program(self, program: impl Fn(&Thread<'_>) + Send + Sync + 'static) -> Self {
        Self { program: Arc::new(program), ..self }
    }

    /// Sets the C++ program over the device headers that does the same as the Rust program.
    #[must_use]
    pub fn headers(self, headers: Headers) -> Self {
        Self { headers: Some(headers), ..self }
    }

    /// Turns the program over the device headers into the mutant that uses one buffer instead of
    /// two.
    #[must_use]
    pub fn one_buffer(self) -> Self {
        Self { headers: self.headers.map(Headers::one_buffer), ..self }
    }

    /// Declares that this scenario is a mutant of `sound`: replays learn the mutant's plan from
    /// `sound`. Both must have the same ranks, threads and calls.
    #[must_use]
    pub fn mutant_of(self, sound: Scenario) -> Self {
        Self { sound: Some(Arc::new(sound)), ..self }
    }

    /// Returns this scenario with another program: the C++ protocols of the device headers, compiled
    /// for the host, in place of the Rust protocols. Returns `None` if the scenario has no such
    /// program, or if the headers could not be compiled.
    pub fn on_headers(&self) -> Option<Self> {
        let headers = self.headers.filter(|_| headers::AVAILABLE)?;
        let scenario = self.clone().program(move |thread| headers.run(thread));
        let sound = match &self.sound {
            Some(sound) => Some(Arc::new(sound.on_headers()?)),
            None => None,
        };
        Some(Self { on_headers: true, sound, ..scenario })
    }

    /// Whether this scenario runs its program over the device headers instead of the Rust program.
    pub(super) fn is_on_headers(&self) -> bool {
        self.on_headers
    }

    /// Sets the number of threads of each workgroup.
    #[must_use]
    pub fn threads(self, threads: u32) -> Self {
        Self { name: format!("{}, {threads} threads", self.name), threads, ..self }
    }

    /// Makes the threads of a workgroup a wave that runs in lockstep: one side of a branch runs to
    /// its end before the other side begins, and either side may be the first. The loom engine
    /// ignores lockstep.
    ///
    /// Threads diverge where a program reads its own thread index or calls
    /// [`divergent`](iris_sync::divergent). They reconverge at the next barrier of the workgroup,
    /// or at the end of the divergent call unless they had diverged before that call. A thread that
    /// waits on one side of a branch keeps the other threads of its wave from running.
    #[must_use]
    pub fn lockstep(self) -> Self {
        Self { name: format!("{}, lockstep", self.name), lockstep: true, ..self }
    }

    /// Sets the number of workgroups of each rank.
    #[must_use]
    pub fn groups(self, groups: &[u32]) -> Self {
        assert_eq!(groups.len(), self.ranks as usize, "one number of workgroups a rank");
        let name = format!("{}, workgroups {groups:?}", self.name);
        Self { name, groups: groups.to_vec(), ..self }
    }

    /// Sets the number of calls and the number of the first call.
    #[must_use]
    pub fn calls(self, calls: u32, first: i32) -> Self {
        Self { calls, first: Call::new(first), ..self }
    }

    /// Sets the entry record that rank `rank` publishes in its calls.
    #[must_use]
    pub fn record(mut self, rank: u32, record: Record) -> Self {
        self.records[rank as usize] = record;
        self
    }

    /// Sets the number of tiles of the largest plan, and the number of flags.
    #[must_use]
    pub fn tiles(mut self, tiles: u32, flags: u32) -> Self {
        (self.shape.tiles, self.shape.flags) = (tiles, flags);
        self
    }

    /// Sets the number of LL word pairs from one rank to another.
    #[must_use]
    pub fn pairs(mut self, pairs: u32) -> Self {
        self.shape.pairs = pairs;
        self
    }

    /// Sets the number of packs from one rank to another.
    #[must_use]
    pub fn packs(mut self, packs: u32) -> Self {
        self.shape.packs = packs;
        self
    }

    /// Leaves out the heads of LL messages and assumes that they are correct. Heads take eight
    /// words per rank, too many for the larger searches.
    #[must_use]
    pub fn without_heads(self) -> Self {
        Self { name: format!("{}, no heads", self.name), without_heads: true, ..self }
    }

    /// Fills the LL words that the call at `position` will use with words of the same call number,
    /// as if an earlier op whose calls had the same numbers had left them.
    #[must_use]
    pub fn recycled(mut self, position: u32) -> Self {
        let call = self.first.number().wrapping_add(position as i32);
        let (channel, ranks) = (self.channel(0), 0..self.ranks);
        for (rank, source) in ranks.clone().flat_map(|rank| ranks.clone().map(move |s| (rank, s))) {
            // Heads are not filled, because a head left by another op would be a different fault.
            for pair in iris_sync::ll::HEAD..channel.first_quad() {
                let SymPair { rank, index } =
                    channel.pair(rank, source, Call::new(call).parity(), pair);
                let value = LlWord { data: POISON as u32, call }.to_bits() as i64;
                for index in [index, index + 2] {
                    self.initial.push((Place::Wide { rank, index }, value));
                }
            }
        }
        self
    }

    /// Sets the initial value of all words; default: the number of the call before the first one.
    #[must_use]
    pub fn words(self, value: i32) -> Self {
        Self { words: Some(value), ..self }
    }

    /// Sets the initial value of one location.
    #[must_use]
    pub fn initial(mut self, place: Place, value: i32) -> Self {
        self.initial.push((place, value.into()));
        self
    }

    /// Lets waits time out, so that faults are part of the scenario. `expires(thread, limit,
    /// spins)` returns whether a wait of the thread ends after this number of failed polls.
    ///
    /// By default no wait times out, abort words are not modelled, and a fault is a failure.
    #[must_use]
    pub fn expires(self, expires: fn(ThreadId, Limit, u32) -> bool) -> Self {
        Self { expires: Some(expires), ..self }
    }

    /// Lets the host of `rank` stop its kernels: each wait of the rank that would poll again ends,
    /// and the rank gives up. Waits of the other ranks time out at their first failed poll.
    #[must_use]
    pub fn host_stops(self, rank: u32) -> Self {
        Self { host_stops: Some((rank, 1)), ..self.expires(|_, _, _| true) }
    }

    /// Lets the host of `rank` stop its kernels by [`REVOKED`]; no wait times out.
    #[must_use]
    pub fn host_revokes(self, rank: u32) -> Self {
        Self { host_stops: Some((rank, REVOKED)), ..self.expires(|_, _, _| false) }
    }

    /// Name of the scenario.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Layout of the words as `rank` sees them.
    pub fn channel(&self, rank: u32) -> Channel {
        Channel::lay_out(self.shape, rank, RESERVED_WORDS, LINE_WORDS).0
    }

    /// Identities of all threads of all ranks.
    pub fn thread_ids(&self) -> Vec<ThreadId> {
        let mut ids = Vec::new();
        for (rank, &groups) in (0..).zip(&self.groups) {
            for group in 0..groups {
                ids.extend((0..self.threads).map(|thread| ThreadId { rank, group, thread }));
            }
        }
        ids
    }

    /// Value of `place` before the first access.
    pub fn initial_value(&self, place: Place) -> i64 {
        if let Some(&(_, value)) = self.initial.iter().rev().find(|(at, _)| *at == place) {
            return value;
        }
        let channel = self.channel(0);
        let unset = self.words.unwrap_or(self.first.previous().number());
        if let Place::Wide { .. } = place {
            return LlWord { data: unset as u32, call: unset }.to_bits() as i64;
        }
        i64::from(match place {
            Place::Sym { index: ABORT_WORD, .. } => 0,
            Place::Sym { index, .. } if index >= channel.locks => 0,
            Place::Sym { .. } => unset,
            Place::Dev { index, .. } if index == channel.call => self.first.number(),
            Place::Dev { index, .. } if index >= channel.flags => unset,
            Place::Dev { .. }
            | Place::Data { .. }
            | Place::Unchecked { .. }
            | Place::Wide { .. } => 0,
            Place::Cell { .. } => POISON,
        })
    }
}

impl fmt::Debug for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scenario").field("name", &self.name).finish_non_exhaustive()
    }
}
