//! Meaning of every op, as a table with one row per op: all facts about ops that tests and programs
//! use.

use iris_ops::{Op, Shard};

/// Distribution of a matrix's rows over the ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rows {
    /// All rows are on every rank.
    All,
    /// Each rank has its own part of the rows.
    Own,
    /// One block of rows from each rank, stacked; each block is as large as this rank's part of the
    /// rows.
    Blocks,
    /// All rows are on the root; other ranks have none.
    Root,
    /// Each rank has its own part of the rows or, with the option `shard`, all rows of its own part
    /// of the columns.
    Shard,
    /// No rows: the op has no such matrix.
    None,
}

/// Position of an op's product relative to its communication.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Product {
    /// No product: the op only moves or sums data.
    None,
    /// The GEMM comes before the collective.
    First,
    /// The GEMM comes after the collective.
    Last,
}

/// Meaning of an op. A row of its output is either the sum of one row from each rank, or a row of
/// one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Meaning {
    /// Position of the op's matrix product, if it has one: before or after the communication.
    pub product: Product,
    /// Distribution of A, or of the message: the rows that a rank contributes.
    pub gives: Rows,
    /// Distribution of C: the rows that a rank gets.
    pub gets: Rows,
    /// Whether C is a sum over ranks; if a product comes first, K is split over the ranks.
    pub sums: bool,
    /// Description for help texts; in it M, N and K are the dimensions of the whole problem.
    pub about: &'static str,
}

impl Meaning {
    /// Looks up the meaning of `op`.
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

    /// Whether each rank has only a part of K, because its product is a partial sum.
    pub fn splits_k(&self) -> bool {
        self.product == Product::First && self.sums
    }

    /// Whether each rank has only a part of N, because it multiplies the gathered A by its own B.
    pub fn splits_n(&self) -> bool {
        self.product == Product::Last
    }

    /// Dimensions along which the option `shard` may split A; only rows if the op does not have
    /// this option.
    pub fn shards(&self) -> &'static [Shard] {
        match self.gives {
            Rows::Shard => &[Shard::Rows, Shard::Columns],
            _ => &[Shard::Rows],
        }
    }

    /// Whether ranks send data to each other.
    pub fn exchanges(&self) -> bool {
        self.sums || self.gives != self.gets
    }

    /// Whether each rank sends the rows that it owns to all ranks. If the op sums, these rows are
    /// sums that the owner computes from the partials of all ranks.
    pub fn spreads(&self) -> bool {
        self.gets == Rows::All
    }

    /// Whether every rank gets the same matrix. False for operators without an exchange, and if the
    /// ranks multiply by different matrices B.
    pub fn replicates(&self) -> bool {
        self.gets == Rows::All && self.exchanges() && self.product != Product::Last
    }

    /// Whether the call may run in place (C is A) on this rank: the op has no product, and the rank
    /// has all rows of A and of C.
    pub fn in_place(&self, is_root: bool) -> bool {
        let whole = |rows| rows == Rows::All || rows == Rows::Root && is_root;
        self.product == Product::None && whole(self.gives) && whole(self.gets)
    }
}
