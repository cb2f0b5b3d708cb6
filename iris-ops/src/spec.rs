//! What an operator is, as one row of a table: what it launches, what it needs, which parts of its
//! matrices a rank has. Plans, the automatic choice, workspaces, checks, records and launches read
//! the row and know no operator by name; each row stands with its operator, in `ops/`.

use iris_kernels::program::Alternative;
pub(crate) use iris_kernels::program::Norm;
use iris_kernels::schedule::Collective;

use crate::error::{Error, Result};
use crate::kind::{Op, Variant};

/// One operator.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) op: Op,
    /// The collective that its product is fused with; itself without a product, or with no other rank.
    pub(crate) message: Op,
    /// Whether N, and K, are the same on all ranks; else they are the rank's own.
    pub(crate) common: Common,
    /// The part of A, or of the input, that a rank has.
    pub(crate) a: Part,
    /// The part of C, or of the output, that a rank gets.
    pub(crate) c: Part,
    /// What the shapes of its matrices are beside that.
    pub(crate) dims: fn(n: usize, k: usize) -> Dims,
    /// Which tiles a rank works on.
    pub(crate) tiles: Tiles,
    /// Whether C may be A itself.
    pub(crate) in_place: bool,
    /// Steps of a call of a rank that is alone.
    pub(crate) alone: &'static [Alternative],
    /// How it can be done.
    pub(crate) forms: &'static [Form],
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Common {
    pub(crate) n: bool,
    pub(crate) k: bool,
}

/// What a rank has of a matrix whose rows are M: the calls' M is that of the one that it has all of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    /// All rows.
    All,
    /// The rows `split(m, size, rank)`.
    Own,
    /// As many rows from each rank as fall to this one.
    Blocks,
    /// All rows on the root, no matrix elsewhere.
    Root,
    /// The rows or the columns that fall to it, as the options say.
    Shard,
    /// No matrix.
    None,
}

impl Part {
    /// The part in words.
    pub(crate) fn about(self) -> &'static str {
        match self {
            Part::All | Part::Root => "all rows",
            Part::Own => "this rank's part of the rows",
            Part::Blocks => "this rank's part of the rows, from each rank",
            Part::Shard => "this rank's shard",
            Part::None => "none",
        }
    }
}

/// Shapes of matrices, but for the rows that [`Part`] says, by N and K of a plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dims {
    /// Columns of A, or of the input.
    pub(crate) a: usize,
    /// Rows and columns of B; none without a product.
    pub(crate) b: Option<(usize, usize)>,
    /// Columns of C, or of the output.
    pub(crate) c: usize,
}

impl Dims {
    /// C (M x N) = A (M x K) B (K x N).
    pub(crate) fn product(n: usize, k: usize) -> Dims {
        Dims { a: k, b: Some((k, n)), c: n }
    }

    /// Rows of N.
    pub(crate) fn message(n: usize, _: usize) -> Dims {
        Dims { a: n, b: None, c: n }
    }
}

/// Which tiles a rank works on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Tiles {
    /// Those of the whole matrix.
    Whole,
    /// Those of the whole, of which none crosses the boundary between two ranks' rows.
    Split,
    /// Those of its own rows.
    Own,
}

/// One way to do it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    pub(crate) variant: Variant,
    /// Steps of a call, as alternatives.
    pub(crate) program: &'static [Alternative],
    /// The memory that it takes.
    pub(crate) memory: Memory,
    /// Whether one rank sends all tiles, and not a part of them.
    pub(crate) sends_all: bool,
    /// Whether peers read A where it lies.
    pub(crate) pulls: bool,
    /// Whether peers may write C where it lies. Where they do not, nobody need wait for a peer's entry
    /// before it pushes.
    pub(crate) direct: bool,
    /// Which words say that a tile of C has come from a peer, for a kernel beside the call.
    pub(crate) arrival: Option<u32>,
    /// Whether some of its workgroups fetch and do nothing else.
    pub(crate) fetches: bool,
    /// Where a product of whole matrices has its place: a library may have it.
    pub(crate) whole: Whole,
    /// Whether that product stores to others what they own, where there is one that does.
    pub(crate) stores: bool,
    /// Where rows of the result can be normalised.
    pub(crate) norm: Norm,
}

/// Where in a form a product of whole matrices is multiplied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Whole {
    /// Nowhere: tiles are multiplied where they are needed.
    None,
    /// It is all of the form.
    All,
    /// Ahead of the kernel, which sends this rank's partial.
    Partial,
    /// Ahead of the kernel, which sends this rank's rows of C.
    Rows,
    /// Behind the kernel, which gathers A.
    Gathered,
}

/// What the inbox and the other memory of a workspace hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Memory {
    /// Nothing.
    None,
    /// All tiles of all sources.
    AllTiles,
    /// The tiles of an owner from all sources, and all results.
    OwnedAndResults,
    /// The tiles of the largest part from all sources, which are added up there.
    PartialParts,
    /// The tiles of the largest part from all sources, as they are.
    Parts,
    /// All tiles from one source.
    OneSource,
    /// An f32 tile for each tile of an owner, and a lock each if the form takes them.
    Sums {
        /// Whether it does.
        locks: bool,
    },
    /// Words that carry data: what one rank sends to another, from all sources.
    Pairs(Collective),
    /// All of A.
    Gathered,
    /// All of A, outside of the inbox, and a flag for each unit of it.
    Staged,
    /// A signal for each tile of the largest part, which goes where it is wanted.
    Signals,
    /// The same, and a flag: what copy engines move in a call, in so many rounds.
    Copied(u32),
}

impl Form {
    /// A form of this program, whose peers neither read A nor write C.
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
            whole: Whole::None,
            stores: false,
            norm: Norm::None,
        }
    }

    /// The same, whose product of whole matrices stores to others what they own.
    pub(crate) const fn stores(self) -> Form {
        Form { stores: true, ..self }
    }

    /// The same, whose peers may write C; `arrival` as in [`Form::arrival`].
    pub(crate) const fn direct(self, arrival: Option<u32>) -> Form {
        Form { direct: true, arrival, ..self }
    }

    /// The same, where one rank sends all tiles.
    pub(crate) const fn sends_all(self) -> Form {
        Form { sends_all: true, ..self }
    }

    /// A form with the same memory, for another variant and its program.
    pub(crate) const fn of(self, variant: Variant, program: &'static [Alternative]) -> Form {
        Form { variant, program, ..self }
    }

    /// The same, which normalises rows in this place.
    pub(crate) const fn norms(self, norm: Norm) -> Form {
        Form { norm, ..self }
    }

    /// The same with a product of whole matrices.
    pub(crate) const fn whole(self, whole: Whole) -> Form {
        Form { whole, ..self }
    }

    /// Whether the product is multiplied ahead of a message, or behind one.
    pub(crate) fn is_unfused(&self) -> bool {
        matches!(self.whole, Whole::Partial | Whole::Rows | Whole::Gathered)
    }

    /// Whether copy engines move the message.
    pub(crate) fn is_copied(&self) -> bool {
        matches!(self.memory, Memory::Copied(_))
    }

    /// The same, whose peers read A.
    pub(crate) const fn pulls(self) -> Form {
        Form { pulls: true, ..self }
    }
}

impl Row {
    /// The variant of this name, where hyphens are as good as underscores; none for `auto`, which leaves the choice
    /// to the plan.
    pub(crate) fn variant(&self, name: &str) -> Result<Option<Variant>> {
        if name == "auto" {
            return Ok(None);
        }
        let found = name.parse().ok().filter(|&variant| self.form(variant).is_some());
        let names: Vec<_> = self.forms.iter().map(|form| form.variant.name()).collect();
        found.map(Some).ok_or_else(|| Error::Invalid {
            op: self.op.into(),
            what: "variant".into(),
            value: name.into(),
            expected: format!("auto, {}", names.join(", ")),
        })
    }

    /// The form of a variant, if the operator has it.
    pub(crate) fn form(&self, variant: Variant) -> Option<&'static Form> {
        self.forms.iter().find(|form| form.variant == variant)
    }

    /// Whether it has a product.
    pub(crate) fn multiplies(&self) -> bool {
        (self.dims)(1, 1).b.is_some()
    }

    /// Whether A is gathered, and not C.
    pub(crate) fn gathers_a(&self) -> bool {
        self.a == Part::Shard
    }

    /// Whether nobody else takes part in a call.
    pub(crate) fn is_local(&self) -> bool {
        self.forms.iter().all(|form| form.variant == Variant::Local)
    }

    /// Whether N may decide what all ranks must have the same.
    pub(crate) fn n_decides(&self) -> bool {
        self.common.n || self.is_local()
    }
}
