//! One runner for every op, whatever the backend: a [`Case`] says what to run, [`run_case`] runs it
//! on a heap and checks everything that is promised.
//!
//! All ranks of the heap's world run the same case. Each rank makes its own inputs, poisons its
//! outputs with NaN, and runs some calls with changing inputs and changing numbers of rows, without
//! meeting the others in between. Afterwards the ranks exchange what they contributed, and each
//! compares every element that it has, the gaps between lines too, with [`crate::oracle`].

mod buffer;
mod options;
mod run;
mod traffic;

use iris_ops::{Ranks, Shard, Variant};

pub use buffer::Layout;
pub use iris_ops::{AnyOp, Op, Operands};
pub use options::{Options, plan};
pub use run::{Report, heap_bytes, run_case};
pub use traffic::{Traffic, expected as expected_traffic};

/// What the inputs are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input {
    /// Integers in [-8, 8]: sums of f32 are exact, so results are compared for equality.
    Integers,
    /// Reals in [-1, 1).
    Reals,
}

/// What to run and how.
#[derive(Clone, Debug)]
pub struct Case {
    /// Which op.
    pub op: Op,
    /// Which variant; `auto` leaves it to the plan.
    pub variant: String,
    /// Shape, types and choices.
    pub options: Options,
    /// Rows of each call, none above `options.m`.
    pub rows: Vec<usize>,
    /// What the inputs are.
    pub input: Input,
    /// Whether a bias is added.
    pub bias: bool,
    /// How A lies, or the message.
    pub a: Layout,
    /// How B lies.
    pub b: Layout,
    /// How C lies.
    pub c: Layout,
    /// Whether rank r has r more of K than rank 0, or of N where A is gathered. Only ops that allow
    /// it take notice.
    pub uneven: bool,
    /// Whether the output is the input itself, of an all-reduce or at the root of a broadcast.
    pub in_place: bool,
    /// Whether all calls are enqueued before any is waited for, with buffers of their own.
    pub burst: bool,
    /// Whether the ranks meet before each call, so that its time is that of the call alone.
    pub paced: bool,
    /// Begins the inputs.
    pub seed: u64,
}

impl Case {
    /// The op with these options: integers, three calls, the second with about half of the rows.
    pub fn new(op: Op, variant: impl AsRef<str>, options: Options) -> Self {
        let m = options.m;
        Self {
            op,
            variant: variant.as_ref().into(),
            rows: vec![m, m.div_ceil(2), m],
            options,
            input: Input::Integers,
            bias: false,
            a: Layout::default(),
            b: Layout::default(),
            c: Layout::default(),
            uneven: false,
            in_place: false,
            burst: false,
            paced: false,
            seed: 1,
        }
    }

    /// Each op, variant and shard with these options, as [`Case::new`] has them.
    pub fn each(options: &Options) -> Vec<Self> {
        let mut cases = Vec::new();
        for op in Op::ALL {
            let mut options = options.clone();
            if !op.multiplies() {
                options.k = 0;
            }
            let shards: &[Shard] = match op {
                Op::AllGatherMatmul => &[Shard::Rows, Shard::Columns],
                _ => &[Shard::Rows],
            };
            for &shard in shards {
                let one = |variant| Self::new(op, variant, options.clone().shard(shard));
                cases.extend(op.variants().into_iter().map(one));
            }
        }
        cases
    }

    /// The options of `rank`: they differ between ranks only if the case is uneven.
    pub fn options_of(&self, rank: usize) -> Options {
        let mut options = self.options.clone();
        if self.uneven {
            match self.op {
                Op::MatmulAllReduce | Op::MatmulReduceScatter | Op::Matmul => {
                    options.k += rank;
                }
                Op::AllGatherMatmul => options.n += rank,
                _ => {}
            }
        }
        options
    }

    /// The shapes of A (or the message), B and C of a rank in a call of `m` rows.
    pub fn shapes(&self, ranks: Ranks, m: usize) -> [(usize, usize); 3] {
        let options = self.options_of(ranks.rank);
        let (n, k) = (options.n, options.k);
        let part = |total| crate::oracle::split(total, ranks.size, ranks.rank).len();
        match self.op {
            Op::MatmulAllReduce | Op::Matmul => [(m, k), (k, n), (m, n)],
            Op::MatmulReduceScatter => [(m, k), (k, n), (part(m), n)],
            Op::MatmulAllGather => [(part(m), k), (k, n), (m, n)],
            Op::AllGatherMatmul => match options.shard {
                iris_ops::Shard::Columns => [(m, part(k)), (k, n), (m, n)],
                _ => [(part(m), k), (k, n), (m, n)],
            },
            Op::AllReduce => [(m, n), (0, 0), (m, n)],
            Op::AllGather => [(part(m), n), (0, 0), (m, n)],
            Op::ReduceScatter => [(m, n), (0, 0), (part(m), n)],
            Op::AllToAll => [(m, n), (0, 0), (ranks.size * part(m), n)],
            Op::Broadcast if ranks.rank == options.root => [(m, n), (0, 0), (m, n)],
            Op::Broadcast => [(0, n), (0, 0), (m, n)],
            Op::Barrier => [(0, 0); 3],
        }
    }

    /// Whether all ranks get the same bits.
    pub fn same_on_all_ranks(&self, variant: Variant) -> bool {
        match self.op {
            Op::MatmulAllReduce | Op::AllReduce => !variant.order_varies(),
            Op::MatmulAllGather | Op::AllGather | Op::Broadcast => true,
            _ => false,
        }
    }

    /// Whether the same input gives the same bits in every call.
    pub fn same_in_all_runs(&self, variant: Variant) -> bool {
        !variant.order_varies()
    }
}
