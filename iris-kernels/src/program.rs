//! Programs: the steps of a call, as data.
//!
//! **Problem.** A call of an operator consists of one launch or of fifty: a library GEMM and a
//! message, or parts of both that alternate with copies by engines. The code that plans a call,
//! enqueues it, prints it and checks it must agree on the steps.
//!
//! **Solution.** A [`Program`] is a list of [`Alternative`]s; a call uses the first one whose
//! conditions it meets. An alternative is a list of [`Item`]s: [`Step`]s, and loops over parts and
//! peers. A step is one piece of [`Work`] and is enqueued as a whole. The effects of a step on
//! other ranks ([`Work::effects`]) and its overlap with the step before it ([`Work::early`]) follow
//! from its work. [`Program::check`] checks the rules that all programs must keep;
//! [`crate::Executor`] runs programs.
//!
//! **Limits.** All alternatives of a program use the same synchronisation words in the same way. So
//! ranks whose calls meet different conditions (one captures, another does not) can take part in
//! the same call.

use std::fmt;

use iris_sync::barrier::Members;

use crate::kernel::Kernel;

pub use crate::kernel::Effects;
pub use check::Broken;
pub use facts::Facts;
pub use overlap::Overlap;
pub use step_order::At;
pub(crate) use step_order::walk;
pub use workspace_areas::{Area, Areas, Sizes};

/// Defines an enum whose values implement `Display`, with the words that a printed program shows.
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

mod check;
mod facts;
mod overlap;
mod show;
mod step_order;
mod workspace_areas;

/// Steps of an operator's call, as data. A plan has one program for each class of message sizes.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// Alternatives, most preferred first; the last one has no conditions.
    pub alternatives: &'static [Alternative],
    /// Where the RMSNorm of the result is computed, if the operator has one.
    pub norm: Norm,
    /// Ranks that take part in the call of a `Barrier` operator; only programs with
    /// [`Work::BarrierCall`] read it.
    pub members: Members,
    /// Step of a collective between nodes (for example a kernel of NCCL) that may run on the device
    /// at the same time as the program; `None` if there is none.
    pub overlap: Option<Overlap>,
}

/// Where a program computes the RMSNorm of the result, if the operator has one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Norm {
    /// The call has no RMSNorm.
    None,
    /// RMSNorm inside the kernel of the message, whose workgroups process whole rows. If a GEMM
    /// exchanges the message itself, its workgroups process tiles, so the RMSNorm is a separate
    /// step after the GEMM.
    Within,
    /// RMSNorm as a separate step, which is the last step of the call.
    Last,
}

/// One way to perform a call: the steps to enqueue, and the conditions that the call must meet.
#[derive(Clone, Copy, Debug)]
pub struct Alternative {
    /// Conditions; a call must meet all of them.
    pub when: &'static [When],
    /// Steps and loops, in the order in which they are enqueued.
    pub items: &'static [Item],
    /// Whether peers may store directly into this rank's C, if the call allows it.
    pub direct: bool,
}

vocabulary! {
    /// Condition that a call must meet to use an [`Alternative`], one of a program's step lists.
    When {
        /// One GEMM launch can also exchange the message: there is a build for the operands, and
        /// all tiles of the GEMM are resident on the device at once.
        Exchanges = "one GEMM launch can do the message",
        /// The built-in GEMM supports this call in its variant that stores tiles directly at the
        /// peers that own them.
        Stores = "a GEMM can store to peers",
        /// Copy engines can do the transfers: ranks do not share the device, elements need no
        /// conversion, nothing is counted or delayed, and the stream allows copies that carry
        /// signals.
        Engines = "copy engines can move the message",
        /// Copy engines can do the transfers ([`When::Engines`]), and a GEMM can wait for parts of
        /// A that copy engines deliver.
        Gated = "a GEMM can wait for what copy engines bring",
        /// A is split by columns.
        ByColumns = "A is split by columns",
        /// C has so many columns that multiplying a row of A takes longer than receiving it from a
        /// peer.
        Wide = "rows of A come faster than they are multiplied",
        /// This rank has only one peer, and the library's GEMM can add the rows received from it to
        /// the product.
        Adds = "the library adds the peer's rows",
    }
}

/// Step or loop of a program.
#[derive(Clone, Copy, Debug)]
pub enum Item {
    /// One step, enqueued once in each iteration of the surrounding loops.
    Do(Step),
    /// Loop over the parts of the rows that a rank sends; each part is one row of tiles.
    Parts(&'static [Item]),
    /// Steps, in a loop over parts, that process the previous part. They follow the steps for the
    /// current part, and run once more after the loop, for the last part.
    PreviousPart(&'static [Item]),
    /// Loop over the peers, starting with the rank after this one.
    Peers(&'static [Item]),
}

/// Step of a call: one piece of work, enqueued as a whole.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Work that the step enqueues.
    pub work: Work,
    /// Steps that replace the work if it cannot be done; empty if it always can be done. They use
    /// the same synchronisation words and give the same results. Whether they are needed may be
    /// known only when the work is enqueued, for example if a library refuses an algorithm.
    pub or: &'static [Item],
}

/// Work of a step. The loops around the step select its rows: a loop over parts selects one part,
/// and a loop over peers selects the peer's rows. Without a loop, the step works on all rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work {
    /// Launch of a kernel of the operator, over all tiles of the operands.
    Kernel(Kernel, KernelOperands),
    /// Matrix product of one rank.
    Gemm(Gemm),
    /// Wait until all peers have entered the call. Later steps (copy engines, GEMMs) may then store
    /// to the peers.
    Open(Transfer),
    /// Copies by copy engines on a side stream. They go to the peer of the surrounding loop, or to
    /// all peers if there is no loop over peers.
    Copies(Transfer),
    /// Wait until rows have arrived from the peer of the surrounding loop.
    Gate(Transfer),
    /// Sum over ranks: adds up the partials of the rows that this rank owns, which all ranks have
    /// sent.
    Sums {
        /// Destination of the sums.
        to: Target,
    },
    /// Copy, to their position in C, of the rows received from the peer of the surrounding loop.
    CopyReceived(Transfer),
    /// End of the call. Before it, the call's stream waits for the copies on the side stream.
    Close(Transfer),
    /// Barrier of all ranks inside a call; its number, 0 or 1, distinguishes the two barriers of a
    /// call.
    Barrier(u32),
    /// Whole call of a `Barrier` operator: one barrier of the ranks in [`Program::members`].
    BarrierCall,
    /// RMSNorm of the rows of C.
    RmsNorm,
}

/// Operands of an operator's kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KernelOperands {
    /// Matrices A, B and C of the call itself.
    Call,
    /// Matrix in the workspace, which the kernel reads in place of multiplying A and B.
    Area(Area),
    /// Rows of C that this rank owns and that an earlier step has computed.
    OwnRows,
    /// Source and destination of a transfer, in place of A and C.
    Of(Transfer),
}

vocabulary! {
    /// Transfer of rows between ranks, with its source and destination.
    Transfer {
        /// All-gather of A: each rank's shard of A (or of A's transpose, if A is split by columns)
        /// goes to the gathered A of all ranks.
        Shards = "shards of A",
        /// Reduce-scatter of partial products: each rank sends to every other rank the rows of its
        /// partial product that the receiver owns.
        Blocks = "partials",
        /// All-gather of the sums: each rank sends to all ranks the rows that it has added up. The
        /// signals of this transfer are numbered after the signals of [`Transfer::Blocks`].
        Sums = "sums",
        /// All-gather of the result: each rank sends its rows of C to all ranks.
        Rows = "rows of C",
    }
}

/// Matrix product as a step of a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gemm {
    /// Factor A of the product.
    pub source: Source,
    /// Rows of A that the GEMM multiplies. A loop over parts or peers around the step overrides
    /// them.
    pub rows: Rows,
    /// Destination of the product.
    pub to: Target,
    /// Implementation of the product.
    pub core: Core,
}

/// Factor A of a GEMM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// Matrix A of the call, which has all rows.
    Input,
    /// Matrix A of the call, which has only this rank's rows.
    Shard,
    /// Workspace area that holds factor A.
    Area(Area),
}

vocabulary! {
    /// Rows that a GEMM multiplies.
    Rows {
        /// All rows of A.
        All = "all rows",
        /// Rows that this rank owns.
        Own = "own rows",
        /// Rows of all ranks before this one: the rows before [`Rows::Own`]. The GEMM is not
        /// enqueued if there are no such rows.
        BeforeOwn = "rows before the own",
        /// Rows of all ranks after this one: the rows after [`Rows::Own`]. The GEMM is not enqueued
        /// if there are no such rows.
        AfterOwn = "rows after the own",
        /// Rows of the current part of the loop over parts. It is a part of the peer's rows inside
        /// a loop over peers, otherwise of this rank's rows.
        Part = "the part's rows",
    }
}

/// Destination of a step's results.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Target {
    /// Matrix C of the call, which has all rows. A row is stored at its position among all rows.
    C,
    /// Matrix C of the call, which has only the rows that this rank owns.
    Own,
    /// Rows of the call's matrix C that this rank owns; C has all rows.
    OwnOfC,
    /// Workspace area that receives the results.
    Area(Area),
}

/// GEMM implementation that a step requires.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Core {
    /// GEMM of the vendor's library, built-in whole-matrix GEMM or tile GEMM: the most preferred
    /// one that supports the operands.
    Any,
    /// GEMM of the vendor's library that also adds the rows received from the only peer to the
    /// product.
    Adding,
    /// Built-in GEMM that waits, while it runs, for parts of A that copy engines deliver.
    Gated,
    /// Built-in GEMM that stores its tiles directly at the peers that own or need them.
    Storing {
        /// Whether tiles of this rank's partial product are stored at the ranks that own their rows
        /// ([`Transfer::Blocks`]).
        blocks: bool,
        /// Transfer of the results to all ranks; `None` if results stay on this rank.
        results: Option<Transfer>,
    },
    /// Built-in GEMM that also does the collective that the given kernel would do after a GEMM, so
    /// that the whole call is one launch.
    Exchanging(Kernel),
}

/// Earliest time at which the device may begin a launch, relative to the previous step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EarliestStart {
    /// The launch begins after the previous step has ended.
    No,
    /// The launch may begin during the previous step, but its kernel waits for that step's end
    /// before it accesses memory.
    AfterTurn,
    /// The launch may begin during the previous step, which opens the call. Its kernel multiplies
    /// meanwhile, and waits for the end of that step before it accesses peers.
    AfterOpen,
}

/// Stream on which a step is enqueued.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lane {
    /// Stream of the call, on which kernels and GEMMs run.
    Main,
    /// Side stream for copies. The copies begin when the work that was enqueued earlier on the
    /// call's stream has ended.
    Side,
}

impl Program {
    /// Makes a program without an RMSNorm.
    pub const fn new(alternatives: &'static [Alternative]) -> Self {
        let members = Members::from_bits(0);
        Program { alternatives, norm: Norm::None, members, overlap: None }
    }

    /// Steps and loops of an alternative, followed by the RMSNorm if it is a separate step.
    pub fn items<'a>(&self, of: &'a Alternative) -> impl Iterator<Item = &'a Item> + use<'a> {
        const NORM: Item = step(Work::RmsNorm);
        let last = match self.norm {
            Norm::None => false,
            Norm::Within => of.when.contains(&When::Exchanges),
            Norm::Last => true,
        };
        of.items.iter().chain(last.then_some(&NORM))
    }

    /// Calls `see` once for each step of an alternative, and once for each step in the `or` lists
    /// of these steps.
    pub fn each_step_of(&self, of: &Alternative, see: &mut dyn FnMut(&Step)) {
        fn each<'a>(items: impl IntoIterator<Item = &'a Item>, see: &mut dyn FnMut(&Step)) {
            for item in items {
                match item {
                    Item::Do(step) => {
                        see(step);
                        each(step.or, see);
                    }
                    Item::Parts(items) | Item::PreviousPart(items) | Item::Peers(items) => {
                        each(*items, see)
                    }
                }
            }
        }
        each(self.items(of), see);
    }

    /// Calls `see` once for each step of each alternative, and once for each step in the `or` lists
    /// of these steps.
    pub fn each_step(&self, see: &mut dyn FnMut(&Step)) {
        self.alternatives.iter().for_each(|of| self.each_step_of(of, see));
    }

    /// Returns the GEMM of an alternative that does more than multiply: it waits for peers, stores
    /// to peers, or adds rows of peers. `None` if the alternative has no such GEMM.
    pub fn special_gemm(&self, of: &Alternative) -> Option<Gemm> {
        let mut found = None;
        self.each_step_of(of, &mut |step| match step.work {
            Work::Gemm(gemm) if gemm.core != Core::Any => found = found.or(Some(gemm)),
            _ => {}
        });
        found
    }

    /// Kernel of the operator that this work launches; `None` if it launches none.
    pub fn kernel_of(&self, work: Work) -> Option<Kernel> {
        let members = self.members;
        Some(match work {
            Work::Kernel(kernel, _) => kernel,
            Work::Open(_) => Kernel::Open,
            Work::Gate(_) => Kernel::Gate { source: 0, first: 0, parts: 0 },
            Work::Sums { .. } | Work::CopyReceived(_) => Kernel::Sums,
            Work::Close(_) => Kernel::Close,
            Work::Barrier(phase) => Kernel::Barrier { phase, members, last: false },
            Work::BarrierCall => Kernel::Barrier { phase: 0, members, last: true },
            Work::RmsNorm => Kernel::Norm,
            Work::Gemm(_) | Work::Copies(_) => return None,
        })
    }
}

impl Source {
    /// Workspace area from which the GEMM reads factor A; `None` if that is the call's A.
    pub(crate) fn area(self) -> Option<Area> {
        match self {
            Source::Area(area) => Some(area),
            Source::Input | Source::Shard => None,
        }
    }
}

impl Target {
    /// Workspace area that receives the result; `None` if the result goes to the call's C.
    pub(crate) fn area(self) -> Option<Area> {
        match self {
            Target::Area(area) => Some(area),
            Target::C | Target::Own | Target::OwnOfC => None,
        }
    }
}

impl Work {
    /// Transfer of rows between ranks to which the work belongs; `None` for kernels over tiles and
    /// for GEMMs.
    pub(crate) fn transfer(self) -> Option<Transfer> {
        match self {
            Work::Open(of)
            | Work::Copies(of)
            | Work::Gate(of)
            | Work::CopyReceived(of)
            | Work::Close(of) => Some(of),
            _ => None,
        }
    }

    /// Effects of the work on other ranks.
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
            Work::Gemm(_)
            | Work::Gate(_)
            | Work::Sums { .. }
            | Work::CopyReceived(_)
            | Work::RmsNorm => Effects::NONE,
        }
    }

    /// Earliest time at which the work's launch may begin, relative to the previous step.
    pub fn early(self) -> EarliestStart {
        match self {
            Work::Gemm(Gemm { core: Core::Gated | Core::Storing { .. }, .. }) => {
                EarliestStart::AfterOpen
            }
            // Only a kernel that follows a kernel can begin early. Copies are no kernel launches,
            // and the step that closes the call follows copies.
            Work::Copies(_) | Work::Close(_) => EarliestStart::No,
            _ => EarliestStart::AfterTurn,
        }
    }

    /// Stream on which the work is enqueued: the call's, or the side stream.
    pub fn lane(self) -> Lane {
        match self {
            Work::Copies(_) => Lane::Side,
            _ => Lane::Main,
        }
    }
}

/// Makes a step with an empty `or` list, whose work always can be done.
pub const fn step(work: Work) -> Item {
    Item::Do(Step { work, or: &[] })
}

/// Makes a step for `work`, with the items `or` that replace the work if it cannot be done.
pub const fn or(work: Work, or: &'static [Item]) -> Item {
    Item::Do(Step { work, or })
}

/// Makes a step that launches a kernel over the operands of the call.
pub const fn kernel(kernel: Kernel) -> Item {
    step(Work::Kernel(kernel, KernelOperands::Call))
}

/// Makes a GEMM step for which any implementation may be used that supports the operands.
pub const fn gemm(source: Source, rows: Rows, to: Target) -> Item {
    step(Work::Gemm(Gemm { source, rows, to, core: Core::Any }))
}

/// Makes an alternative without conditions.
pub const fn always(items: &'static [Item]) -> Alternative {
    when(&[], items)
}

/// Makes an alternative for calls that meet all conditions in `when`.
pub const fn when(when: &'static [When], items: &'static [Item]) -> Alternative {
    Alternative { when, items, direct: true }
}

impl Alternative {
    /// Forbids peers to store directly into C in this alternative.
    pub const fn indirect(self) -> Self {
        Alternative { direct: false, ..self }
    }
}
