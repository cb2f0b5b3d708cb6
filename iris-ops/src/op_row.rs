//! Description of an operator as one table row: the programs that it launches, the memory that it
//! needs, and the parts of its matrices that a rank has. Plans, the automatic choice, workspaces,
//! argument checks, records and launches read the row, and never test for a specific operator. Each
//! row is defined in the operator's file in `ops/`.

use std::fmt;

use iris_kernels::dtype::Role;
use iris_kernels::program::Alternative;
pub(crate) use iris_kernels::program::Norm;
use iris_kernels::schedule::Collective;

use crate::error::{Error, Result};
use crate::op_names::{Op, Variant};
use crate::programs::MATMUL;

/// Properties of one operator: its collective, shapes, tiles and variants.
pub(crate) struct Row {
    pub(crate) op: Op,
    /// Collective with which the product is combined. It is the operator itself if the operator has
    /// no product or runs on one rank alone.
    pub(crate) message: Op,
    /// Whether N must be equal on all ranks, and whether K must be equal on all ranks.
    pub(crate) common: Common,
    /// Rows of A (or of the input) that each rank passes.
    pub(crate) a: Part,
    /// Rows of C (or of the output) that each rank gets.
    pub(crate) c: Part,
    /// Columns of A and C and the shape of B, as a function of N and K.
    pub(crate) dims: fn(n: usize, k: usize) -> Dims,
    /// Set of tiles of the result on which each rank works.
    pub(crate) tiles: Tiles,
    /// Whether the operator may run in place, with C in the memory of A.
    pub(crate) in_place: bool,
    /// Operators of each node, and steps between nodes, of which a call over several nodes consists.
    pub(crate) composed: Composition,
    /// Program of a call for a world with only one rank.
    pub(crate) alone: &'static [Alternative],
    /// Variants of the operator, with their programs and memory.
    pub(crate) forms: &'static [Form],
}

impl fmt::Debug for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.op)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Common {
    pub(crate) n: bool,
    pub(crate) k: bool,
}

/// Rows of a matrix that each rank has, out of the M rows of the whole matrix. M of a call is read
/// from a matrix that is whole on every rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    /// All M rows, on every rank.
    All,
    /// Rows that this rank owns: `split(m, size, rank)`.
    Own,
    /// One block of rows from each rank; each block has as many rows as `split(m, size, rank)`.
    Blocks,
    /// All M rows on the root, no matrix on other ranks.
    Root,
    /// This rank's rows or columns of A, depending on the option `shard`.
    Shard,
    /// No matrix on any rank.
    None,
}

impl Part {
    /// Description of this part of a matrix, for error texts.
    pub(crate) fn description(self) -> &'static str {
        match self {
            Part::All | Part::Root => "all rows",
            Part::Own => "this rank's part of the rows",
            Part::Blocks => "this rank's part of the rows, from each rank",
            Part::Shard => "this rank's shard",
            Part::None => "none",
        }
    }
}

/// Columns of A and C and the shape of B. Rows of A and C follow from [`Part`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dims {
    /// Number of columns of A, or of the input.
    pub(crate) a: usize,
    /// Rows and columns of B; `None` for an operator without a product.
    pub(crate) b: Option<(usize, usize)>,
    /// Number of columns of C, or of the output.
    pub(crate) c: usize,
}

impl Dims {
    /// Dimensions of a product: C (M x N) = A (M x K) B (K x N).
    pub(crate) fn product(n: usize, k: usize) -> Dims {
        Dims { a: k, b: Some((k, n)), c: n }
    }

    /// Dimensions of a collective whose message is summed from K parts: a row of the input has K
    /// parts of N columns.
    pub(crate) fn parts(n: usize, k: usize) -> Dims {
        Dims { a: n * k, b: None, c: n }
    }

    /// Dimensions of a collective: input and output have N columns.
    pub(crate) fn message(n: usize, _: usize) -> Dims {
        Dims { a: n, b: None, c: n }
    }
}

/// Set of tiles of the result on which a rank works.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Tiles {
    /// All tiles of the whole matrix.
    All,
    /// All tiles of the matrix. They are cut so that no tile crosses the boundary between two
    /// ranks' rows.
    Split,
    /// Tiles of the rank's own rows only.
    Own,
}

/// Operators of each node, and steps between nodes, of which a call over several nodes consists.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Composition {
    /// The operator on each rank alone, without a step between nodes.
    Alone,
    /// Sums over the ranks of a node by the operator `scatter`, all-reduces of the sums between
    /// nodes, and an all-gather of the results within each node.
    AllReduce {
        /// Operator that leaves each rank of the node the sums of its rows.
        scatter: Op,
    },
    /// The operator within the node, run once for the rows of each node, and an exchange of the
    /// sums between nodes.
    ReduceScatter,
    /// An exchange of A (or of the input) between nodes, and the operator within the node, run once
    /// for the rows that come from each node.
    GatherA,
    /// The operator within the node for the node's own rows, an exchange of the results between
    /// nodes, and an all-gather of the received rows within each node.
    GatherC,
    /// An all-to-all between nodes, and then, within each node, one all-to-all for the blocks from
    /// each source node.
    AllToAll,
    /// A broadcast between the ranks that have the root's local rank, then a broadcast within each
    /// node.
    Broadcast,
    /// A barrier within each node, a step between nodes by one rank of each node, and a second
    /// barrier within each node.
    Barrier,
}

/// Variant of an operator: its program, memory and properties.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    pub(crate) variant: Variant,
    /// Steps of a call, as a list of alternatives. A call uses the first alternative whose
    /// conditions it meets.
    pub(crate) program: &'static [Alternative],
    /// Memory and words that the variant needs in the workspace.
    pub(crate) memory: Memory,
    /// Whether a rank sends every tile to each peer; otherwise each peer gets only the part that it
    /// owns.
    pub(crate) sends_all: bool,
    /// Whether peers read A directly in this rank's memory.
    pub(crate) pulls: bool,
    /// Whether peers may write C directly in this rank's memory. If false, a rank pushes to a peer
    /// without waiting until the peer has entered the call.
    pub(crate) direct: bool,
    /// Words that signal the arrival of a peer's tile of C to a kernel that runs at the same time
    /// as the call: a value of [`arrival`](iris_kernels::args::arrival). `None` if C's tiles have
    /// no signals.
    pub(crate) arrival: Option<u32>,
    /// Whether some workgroups only fetch the peers' shards of A while the others multiply.
    pub(crate) fetches: bool,
    /// Position of a whole-matrix GEMM in the variant.
    pub(crate) gemm: GemmStage,
    /// Whether the whole-matrix GEMM stores its tiles at the peers that own them, on devices for
    /// which there is such a GEMM.
    pub(crate) stores: bool,
    /// Step in which the variant can apply an RMSNorm to rows of the result.
    pub(crate) norm: Norm,
}

/// Position of a whole-matrix GEMM in a variant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GemmStage {
    /// No whole-matrix GEMM: the operator's own kernel multiplies tile by tile.
    None,
    /// The variant consists of a GEMM only.
    All,
    /// GEMM before the communication, which then sends this rank's partial sums.
    Partial,
    /// GEMM before the communication, which then sends this rank's rows of C.
    Rows,
    /// GEMM after the communication, which gathers A.
    Gathered,
}

/// Memory that a variant needs in the workspace: inboxes, sums, staging buffers, signals.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Memory {
    /// No memory: the variant needs no workspace.
    None,
    /// Inbox with a slot for each tile of the result, from each source rank.
    AllTiles,
    /// Inbox with a slot for each tile that one rank owns, from each source rank; and a result
    /// inbox, which receives the sum of each tile of the result.
    OwnedAndResults,
    /// Inbox with one slot for each tile of the largest part that a rank owns, from all sources, in
    /// the type of partial results. The owner adds these tiles up.
    PartialParts,
    /// Inbox with one slot for each tile of the largest part that a rank owns, from all sources, in
    /// the output type. These tiles are not added up.
    Parts,
    /// Inbox with a slot for each tile of the message, from a single source rank.
    OneSource,
    /// Sums: one f32 tile for each tile that a rank owns.
    Sums {
        /// Whether each tile has a lock; otherwise ranks add by atomic operations.
        locks: bool,
    },
    /// Words of the LL protocol (data and a flag in one word), for the items (8 bytes of data) that
    /// each rank sends to each other rank.
    Pairs(Collective),
    /// Inbox that holds all of A, M x K.
    Gathered,
    /// Staging buffer for all of A, M x K, outside the inbox, with a flag for each unit of A that
    /// is fetched at once.
    Staged,
    /// One signal for each tile of the largest part of any rank. The data is written to its final
    /// place, without an inbox.
    Signals,
    /// Signals for the tiles that copy engines move, and a flag. There is one signal for each tile
    /// of the largest part of any rank, in each round. The field is the number of rounds (transfers
    /// between all ranks) of a call.
    Copied(u32),
}

impl Form {
    /// Description of the variant that computes a matrix product on one rank, without
    /// communication.
    pub(crate) const PRODUCT: Form =
        Form::push(Variant::Local, MATMUL, Memory::None).gemm(GemmStage::All);

    /// Makes the description of a variant whose peers neither read A nor write C directly. Methods
    /// such as `direct` change the other properties.
    pub(crate) const fn push(
        variant: Variant,
        program: &'static [Alternative],
        memory: Memory,
    ) -> Form {
        Form {
            variant,
            program,
            memory,
            sends_all: false,
            pulls: false,
            direct: false,
            arrival: None,
            fetches: false,
            gemm: GemmStage::None,
            stores: false,
            norm: Norm::None,
        }
    }

    /// Sets the property that the whole-matrix GEMM stores its tiles at the peers that own them.
    pub(crate) const fn stores(self) -> Form {
        Form { stores: true, ..self }
    }

    /// Allows peers to write C directly, and sets [`Form::arrival`].
    pub(crate) const fn direct(self, arrival: Option<u32>) -> Form {
        Form { direct: true, arrival, ..self }
    }

    /// Sets the property that a rank sends every tile to each peer.
    pub(crate) const fn sends_all(self) -> Form {
        Form { sends_all: true, ..self }
    }

    /// Makes the description of another variant, with the given program and otherwise the same
    /// properties.
    pub(crate) const fn renamed(self, variant: Variant, program: &'static [Alternative]) -> Form {
        Form { variant, program, ..self }
    }

    /// Sets the step in which rows of the result are normalised.
    pub(crate) const fn norms(self, norm: Norm) -> Form {
        Form { norm, ..self }
    }

    /// Sets the position of the whole-matrix GEMM.
    pub(crate) const fn gemm(self, gemm: GemmStage) -> Form {
        Form { gemm, ..self }
    }

    /// Whether the variant multiplies by a whole-matrix GEMM instead of tile by tile in the
    /// operator's own kernel.
    pub(crate) fn has_whole_gemm(&self) -> bool {
        matches!(self.gemm, GemmStage::Partial | GemmStage::Rows | GemmStage::Gathered)
    }

    /// Whether copy engines move the message.
    pub(crate) fn is_copied(&self) -> bool {
        matches!(self.memory, Memory::Copied(_))
    }

    /// Sets the property that peers read A directly in this rank's memory.
    pub(crate) const fn pulls(self) -> Form {
        Form { pulls: true, ..self }
    }
}

impl Row {
    /// Returns the operator's variant with this name; in `name`, hyphens are read as underscores.
    /// `None` for the name `auto`, which leaves the choice to the plan. It is an error if the
    /// operator has no variant with this name.
    pub(crate) fn variant(&self, name: &str) -> Result<Option<Variant>> {
        if name == "auto" {
            return Ok(None);
        }
        let found = name.parse().ok().filter(|&variant| self.form(variant).is_some());
        let expected = || format!("auto, {}", self.names(|_| true));
        found.map(Some).ok_or_else(|| Error::invalid(self.op, "variant", name, expected()))
    }

    /// Names of the variants for which `is` returns true, for error texts.
    pub(crate) fn names(&self, is: impl Fn(&Form) -> bool) -> String {
        let forms = self.forms.iter().filter(|form| is(form));
        forms.map(|form| form.variant.name()).collect::<Vec<_>>().join(", ")
    }

    /// Description of a variant; `None` if the operator does not have the variant.
    pub(crate) fn form(&self, variant: Variant) -> Option<&'static Form> {
        self.forms.iter().find(|form| form.variant == variant)
    }

    /// Whether the operator has a matrix product.
    pub(crate) fn multiplies(&self) -> bool {
        (self.dims)(1, 1).b.is_some()
    }

    /// Whether the message is summed from weighted parts of the input.
    pub(crate) fn combines(&self) -> bool {
        let Dims { a, b, c } = (self.dims)(1, 2);
        b.is_none() && a > c
    }

    /// Role of the element type of A, or of the message; the role determines which types are
    /// allowed.
    pub(crate) fn input_role(&self) -> Role {
        if self.multiplies() { Role::Factor } else { Role::Wire }
    }

    /// Role of the element type of C, or of the received message; the role determines which types
    /// are allowed.
    pub(crate) fn output_role(&self) -> Role {
        if self.multiplies() { Role::Result } else { Role::Wire }
    }

    /// Whether the operator gathers A before the product. If false, it may gather C.
    pub(crate) fn gathers_a(&self) -> bool {
        self.a == Part::Shard
    }

    /// Whether the result is the sum of the products of all ranks.
    pub(crate) fn adds_products(&self) -> bool {
        self.forms.iter().any(|form| form.gemm == GemmStage::Partial)
    }

    /// Whether the operator has no communication: its calls involve this rank only.
    pub(crate) fn is_local(&self) -> bool {
        self.forms.iter().all(|form| form.variant == Variant::Local)
    }

    /// Whether the choice of tile and variant may depend on N. True if all ranks have the same N,
    /// or if a call involves only one rank.
    pub(crate) fn n_decides(&self) -> bool {
        self.common.n || self.is_local()
    }
}
