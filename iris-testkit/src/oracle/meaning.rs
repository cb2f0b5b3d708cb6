//! What an op means, as one row of a table: all that tests and programs know of it by its name.

use iris_ops::{Op, Shard};

/// Which rows of a matrix a rank has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rows {
    /// All.
    All,
    /// Its part of them.
    Own,
    /// As many from each rank as fall to this one.
    Blocks,
    /// All on the root, elsewhere none.
    Root,
    /// Its part of them, or all with its part of the columns, as the options say.
    Shard,
    /// No matrix.
    None,
}

/// Where an op has its product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Product {
    /// Nowhere.
    None,
    /// Ahead of the message.
    First,
    /// Behind it.
    Last,
}

/// What an op means. A row of what a rank gets is the sum of all ranks' rows, or the row of one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Meaning {
    /// Where its product is.
    pub product: Product,
    /// What a rank has of A, or of the message.
    pub gives: Rows,
    /// What it gets of C.
    pub gets: Rows,
    /// Whether that is a sum over ranks; in front of it K is split.
    pub sums: bool,
    /// The same in words, for a program's user: M, N and K are those of the whole.
    pub about: &'static str,
}

impl Meaning {
    /// That of `op`.
    pub const fn of(op: Op) -> Self {
        use Product::{First, Last};
        use Rows::{All, Blocks, Own, Root, Shard};
        const NO: Product = Product::None;
        let (product, gives, gets, sums, about) = match op {
            Op::MatmulAllReduce => {
                (First, All, All, true, "K is split; every rank gets all of C (M x N)")
            }
            Op::MatmulReduceScatter => {
                (First, All, Own, true, "K is split; a rank gets some rows of C")
            }
            Op::AllGatherMatmul => (
                Last,
                Shard,
                All,
                false,
                "A (M x K) is split by --shard, and N is split; a rank gets its columns of C",
            ),
            Op::MatmulAllGather => (First, Own, All, false, "M is split; every rank gets all of C"),
            Op::Matmul => (First, All, All, false, "nothing is split; every rank has its own C"),
            Op::AllReduce => (NO, All, All, true, "every rank has M x N and gets the sum"),
            Op::AllGather => (NO, Own, All, false, "M is split; every rank gets all rows"),
            Op::ReduceScatter => {
                (NO, All, Own, true, "every rank has M x N and gets some rows of the sum")
            }
            Op::AllToAll => {
                (NO, All, Blocks, false, "every rank has M x N and sends some rows to each")
            }
            Op::Broadcast => (NO, Root, All, false, "rank 0 has M x N; every rank gets it"),
            Op::Barrier => (NO, Rows::None, Rows::None, false, "no message"),
        };
        Self { product, gives, gets, sums, about }
    }

    /// Whether K is split over the ranks.
    pub fn splits_k(&self) -> bool {
        self.product == Product::First && self.sums
    }

    /// Whether N is split over the ranks.
    pub fn splits_n(&self) -> bool {
        self.product == Product::Last
    }

    /// The ways in which A can be split.
    pub fn shards(&self) -> &'static [Shard] {
        match self.gives {
            Rows::Shard => &[Shard::Rows, Shard::Columns],
            _ => &[Shard::Rows],
        }
    }

    /// Whether matrices go from rank to rank.
    pub fn exchanges(&self) -> bool {
        self.sums || self.gives != self.gets
    }

    /// Whether each rank sends as many rows to all as it owns: of sums beside what it sends to their owners.
    pub fn spreads(&self) -> bool {
        self.gets == Rows::All
    }

    /// Whether every rank gets the same matrix: not where nothing is exchanged, nor where each multiplies
    /// what it got by a B of its own.
    pub fn replicates(&self) -> bool {
        self.gets == Rows::All && self.exchanges() && self.product != Product::Last
    }

    /// Whether C may be A itself at this rank: where it has all of both, and does not multiply.
    pub fn in_place(&self, is_root: bool) -> bool {
        let whole = |rows| rows == Rows::All || rows == Rows::Root && is_root;
        self.product == Product::None && whole(self.gives) && whole(self.gets)
    }
}
