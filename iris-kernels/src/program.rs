//! Programs: the steps of a call, as data.
//!
//! **Problem.** A call of an operator is one launch or fifty: a library GEMM and a message, or parts of both that
//! take turns with copies by engines. Who plans a call, who enqueues it, who prints it and who checks it must mean
//! the same steps.
//!
//! **Solution.** A [`Program`] is a list of [`Alternative`]s: the first whose conditions a call meets is taken. An
//! alternative is a list of [`Item`]s, which are [`Step`]s and loops over parts and peers. A step is one piece of
//! [`Work`], and one enqueue. What a step means to other ranks ([`Work::effects`]) and how it may overlap the step
//! before it ([`Work::early`]) follows from its work. [`Program::check`] checks the rules that all programs keep;
//! [`crate::Executor`] runs them.
//!
//! **Limits.** All alternatives of a program use the same words in the same way, so that ranks whose calls meet
//! different conditions (one captures, another does not) take part in the same call.

use std::fmt;

use iris_sync::barrier::Members;

use crate::kernel::Kernel;

pub use crate::kernel::Effects;
pub use areas::{Area, Areas, Sizes};
pub use check::Broken;
pub use walk::At;
pub(crate) use walk::walk;

/// An enum whose values have words, by which programs are printed.
macro_rules! vocabulary {
    ($(#[$doc:meta])* $type:ident { $($(#[$about:meta])* $name:ident = $words:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
        pub enum $type {
            $($(#[$about])* $name,)*
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($type::$name => $words,)* })
            }
        }
    };
}

mod areas;
mod check;
mod show;
mod walk;

/// The steps of a call of one size class.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// In order of preference; the last has no conditions.
    pub alternatives: &'static [Alternative],
    /// Whether and where rows of the result are normalised.
    pub norm: Norm,
    /// Ranks of a barrier that is a call by itself; not read by other programs.
    pub members: Members,
}

/// The place of the RMSNorm in a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Norm {
    /// Rows are not normalised.
    None,
    /// In the kernel of the message, whose workgroups have whole rows. A GEMM that does the message itself has
    /// tiles, so that a step of its own follows it.
    Within,
    /// In a step of its own, the last of the call.
    Last,
}

/// One way to do a call.
#[derive(Clone, Copy, Debug)]
pub struct Alternative {
    /// Conditions, all of which a call must meet.
    pub when: &'static [When],
    /// Steps and loops, in the order of the stream.
    pub items: &'static [Item],
    /// Whether peers may be told that they can store into C, if the call allows it.
    pub direct: bool,
}

vocabulary! {
    /// A condition of an [`Alternative`].
    When {
        /// One GEMM launch can do the message as well: operands fit it, and all of its tiles are resident.
        Exchanges = "one GEMM launch can do the message",
        /// A GEMM can store its tiles to the peers that own them.
        Stores = "a GEMM can store to peers",
        /// Copy engines can move the message: no rank shares the device, nothing is converted or observed, and the
        /// stream takes copies that carry signals.
        Engines = "copy engines can move the message",
        /// Engines can move the message ([`When::Engines`]), and a GEMM can wait for the parts of A that engines bring.
        Gated = "a GEMM can wait for what copy engines bring",
        /// A is split by columns.
        ByColumns = "A is split by columns",
        /// C has so many columns that a row of A takes longer to be multiplied than to come from a peer.
        Wide = "rows of A come faster than they are multiplied",
        /// There is one peer, and the library GEMM adds what came from it.
        Adds = "the library adds the peer's rows",
    }
}

/// A step, or a loop.
#[derive(Clone, Copy, Debug)]
pub enum Item {
    /// One step.
    Do(Step),
    /// For each part of the rows that a rank sends, a row of tiles each.
    Parts(&'static [Item]),
    /// In a loop over parts: steps for the part before, which follow those of this one; after the last part,
    /// for that.
    Late(&'static [Item]),
    /// For each peer, the next rank first.
    Peers(&'static [Item]),
}

/// One piece of work, which is one enqueue.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Work to enqueue.
    pub work: Work,
    /// Steps with the same words and results that take its place if it cannot be done, which may be known only
    /// when it is enqueued (a library refuses an algorithm). Empty if it always can.
    pub or: &'static [Item],
}

/// Work of a step. The loops around it choose its rows: a loop over parts one part, a loop over peers the peer's rows;
/// without loops it works on all rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work {
    /// A kernel of the operator over its tiles.
    Kernel(Kernel, Operands),
    /// A matrix product.
    Gemm(Gemm),
    /// Waits until all peers are in the call; engines and GEMMs may store to them after it.
    Open(Transfer),
    /// Copies by engines, on a stream beside, to the peer of the loop or to all.
    Copies(Transfer),
    /// Waits until rows of the loop's peer have come.
    Gate(Transfer),
    /// Adds up this rank's rows of the partials of all ranks.
    Sums {
        /// Destination.
        to: Target,
    },
    /// Takes the peer's rows to their place in C.
    Take(Transfer),
    /// Ends the call, after copies beside have been joined.
    Close(Transfer),
    /// A barrier of all ranks inside a call; the number tells two of one call apart.
    Barrier(u32),
    /// A barrier of [`Program::members`] that is a call by itself.
    BarrierCall,
    /// The RMSNorm of the rows of C.
    RmsNorm,
}

/// Operands of a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operands {
    /// A, B and C of the call.
    Call,
    /// A matrix in the workspace takes the place of the product of A and B.
    Area(Area),
    /// This rank's rows of C, which are there.
    OwnRows,
    /// Source and destination of a transfer.
    Of(Transfer),
}

vocabulary! {
    /// Rows that go from rank to rank, and the places they go to.
    Transfer {
        /// Each rank's shard of A, to the gathered A of all; where its columns are split, of A's transpose.
        Shards = "shards of A",
        /// The rows of this rank's partial that each rank owns, to their owner.
        Blocks = "partials",
        /// Each rank's rows of the sum, to all; signals follow those of [`Transfer::Blocks`].
        Sums = "sums",
        /// Each rank's rows of C, to all.
        Rows = "rows of C",
    }
}

/// A matrix product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gemm {
    /// Matrix A.
    pub source: Source,
    /// Rows of A, if the loops do not say them.
    pub rows: Rows,
    /// Destination.
    pub to: Target,
    /// Implementation.
    pub core: Core,
}

/// The A of a GEMM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// A of the call, which has all rows.
    Input,
    /// A of the call, which has this rank's rows.
    Shard,
    /// A matrix in the workspace.
    Area(Area),
}

vocabulary! {
    /// Rows of a GEMM.
    Rows {
        /// All.
        All = "all rows",
        /// Rows that this rank owns.
        Own = "own rows",
        /// Rows before [`Rows::Own`]; the step is left out if there are none.
        BeforeOwn = "rows before the own",
        /// Rows after [`Rows::Own`]; the step is left out if there are none.
        AfterOwn = "rows after the own",
        /// The part of the loop: of the loop's peer, or of this rank where no loop over peers is.
        Part = "the part's rows",
    }
}

/// Destination of results.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// C, at the rows' place among all.
    C,
    /// C, which has the rows that this rank owns and no others.
    Own,
    /// The rows of C that this rank owns.
    OwnOfC,
    /// A matrix in the workspace.
    Area(Area),
}

/// GEMM implementation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Core {
    /// The vendor's library, our whole-matrix GEMM, or the tile core, whichever fits and is preferred.
    Any,
    /// The vendor's library, which adds the rows of the one peer.
    Adding,
    /// Our GEMM that waits for parts of A.
    Gated,
    /// Our GEMM that stores its tiles to peers.
    Storing {
        /// Whether tiles of this rank's partial go to their owners ([`Transfer::Blocks`]).
        blocks: bool,
        /// Results that go to all.
        results: Option<Transfer>,
    },
    /// Our GEMM that does the message of this kernel itself.
    Exchanging(Kernel),
}

/// The earliest time at which a launch may begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Early {
    /// When the step before is over.
    No,
    /// While the step before runs: it waits for its end itself, before it does anything.
    AfterTurn,
    /// While the step before opens the call: it multiplies meanwhile, and waits before it touches peers.
    BehindOpen,
}

/// The stream of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lane {
    /// Stream of the call.
    Main,
    /// Stream beside it, from this point of the call on.
    Side,
}

impl Program {
    /// A program without an RMSNorm.
    pub const fn new(alternatives: &'static [Alternative]) -> Self {
        Program { alternatives, norm: Norm::None, members: Members::from_bits(0) }
    }

    /// The items of an alternative, the RMSNorm included.
    pub fn items<'a>(&self, of: &'a Alternative) -> impl Iterator<Item = &'a Item> + use<'a> {
        const NORM: Item = step(Work::RmsNorm);
        let last = match self.norm {
            Norm::None => false,
            Norm::Within => of.when.contains(&When::Exchanges),
            Norm::Last => true,
        };
        of.items.iter().chain(last.then_some(&NORM))
    }

    /// Calls `see` for each step of an alternative once, and for those that take its place.
    pub fn each_step_of(&self, of: &Alternative, see: &mut dyn FnMut(&Step)) {
        fn each<'a>(items: impl IntoIterator<Item = &'a Item>, see: &mut dyn FnMut(&Step)) {
            for item in items {
                match item {
                    Item::Do(step) => {
                        see(step);
                        each(step.or, see);
                    }
                    Item::Parts(items) | Item::Late(items) | Item::Peers(items) => {
                        each(*items, see)
                    }
                }
            }
        }
        each(self.items(of), see);
    }

    /// Calls `see` for each step of all alternatives.
    pub fn each_step(&self, see: &mut dyn FnMut(&Step)) {
        self.alternatives.iter().for_each(|of| self.each_step_of(of, see));
    }

    /// The GEMM of an alternative that does more than a plain product: waits for peers, stores to them, or adds what
    /// they sent.
    pub fn special_gemm(&self, of: &Alternative) -> Option<Gemm> {
        let mut found = None;
        self.each_step_of(of, &mut |step| match step.work {
            Work::Gemm(gemm) if gemm.core != Core::Any => found = found.or(Some(gemm)),
            _ => {}
        });
        found
    }

    /// The operator's kernel that a step launches, if it launches one.
    pub fn kernel_of(&self, work: Work) -> Option<Kernel> {
        let members = self.members;
        Some(match work {
            Work::Kernel(kernel, _) => kernel,
            Work::Open(_) => Kernel::Open,
            Work::Gate(_) => Kernel::Gate { source: 0, first: 0, parts: 0 },
            Work::Sums { .. } | Work::Take(_) => Kernel::Sums,
            Work::Close(_) => Kernel::Close,
            Work::Barrier(phase) => Kernel::Barrier { phase, members, last: false },
            Work::BarrierCall => Kernel::Barrier { phase: 0, members, last: true },
            Work::RmsNorm => Kernel::Norm,
            Work::Gemm(_) | Work::Copies(_) => return None,
        })
    }

    /// Whether it has alternatives with this condition.
    pub fn asks(&self, when: When) -> bool {
        self.alternatives.iter().any(|it| it.when.contains(&when))
    }
}

impl Source {
    /// The matrix in the workspace that it is.
    pub(crate) fn area(self) -> Option<Area> {
        match self {
            Source::Area(area) => Some(area),
            Source::Input | Source::Shard => None,
        }
    }
}

impl Target {
    /// The matrix in the workspace that it is.
    pub(crate) fn area(self) -> Option<Area> {
        match self {
            Target::Area(area) => Some(area),
            Target::C | Target::Own | Target::OwnOfC => None,
        }
    }
}

impl Work {
    /// The transfer that a step is part of, if it is no kernel over tiles.
    pub(crate) fn transfer(self) -> Option<Transfer> {
        match self {
            Work::Open(of)
            | Work::Copies(of)
            | Work::Gate(of)
            | Work::Take(of)
            | Work::Close(of) => Some(of),
            _ => None,
        }
    }

    /// Meaning to other ranks.
    pub fn effects(self) -> Effects {
        let peers = Effects { peers: true, ..Effects::NONE };
        match self {
            Work::Kernel(kernel, _) | Work::Gemm(Gemm { core: Core::Exchanging(kernel), .. }) => {
                kernel.effects()
            }
            Work::Gemm(Gemm { core: Core::Storing { .. }, .. }) | Work::Copies(_) => peers,
            Work::Open(_) => Effects { opens: true, ..Effects::NONE },
            Work::Close(_) => Effects { ends: true, ..Effects::NONE },
            Work::Barrier(_) => peers,
            Work::BarrierCall => Effects::ALL,
            Work::Gemm(_) | Work::Gate(_) | Work::Sums { .. } | Work::Take(_) | Work::RmsNorm => {
                Effects::NONE
            }
        }
    }

    /// The earliest time at which its launch may begin.
    pub fn early(self) -> Early {
        match self {
            Work::Gemm(Gemm { core: Core::Gated | Core::Storing { .. }, .. }) => Early::BehindOpen,
            // Copies of engines, which it follows, are no launches.
            Work::Copies(_) | Work::Close(_) => Early::No,
            _ => Early::AfterTurn,
        }
    }

    /// The stream it is enqueued on.
    pub fn lane(self) -> Lane {
        match self {
            Work::Copies(_) => Lane::Side,
            _ => Lane::Main,
        }
    }
}

/// A step without an alternative.
pub const fn step(work: Work) -> Item {
    Item::Do(Step { work, or: &[] })
}

/// A step, or others that take its place if it cannot be done.
pub const fn or(work: Work, or: &'static [Item]) -> Item {
    Item::Do(Step { work, or })
}

/// A kernel over the operands of the call.
pub const fn kernel(kernel: Kernel) -> Item {
    step(Work::Kernel(kernel, Operands::Call))
}

/// A GEMM by whatever core fits.
pub const fn gemm(source: Source, rows: Rows, to: Target) -> Item {
    step(Work::Gemm(Gemm { source, rows, to, core: Core::Any }))
}

/// An alternative that all calls meet.
pub const fn always(items: &'static [Item]) -> Alternative {
    when(&[], items)
}

/// An alternative for calls that meet these conditions.
pub const fn when(when: &'static [When], items: &'static [Item]) -> Alternative {
    Alternative { when, items, direct: true }
}

impl Alternative {
    /// Forbids peers to store into C.
    pub const fn indirect(self) -> Self {
        Alternative { direct: false, ..self }
    }
}
