//! Test suite for every op and backend: a [`Case`] describes calls, and [`run_case`] runs them on a
//! heap and checks everything that the op guarantees.
//!
//! All ranks of the heap's world run the same case. Each rank makes its own inputs and fills its
//! outputs with NaN. Then it runs several calls with changing inputs and numbers of rows, without
//! synchronising with the other ranks. Afterwards the ranks exchange their contributions, and each
//! rank compares every element of its outputs with [`crate::oracle`], and checks that gaps between
//! rows were not written.

mod buffer;
mod run;
mod traffic;

use iris_ops::{Topology, Variant};

use crate::oracle::{Meaning, Product, Rows, Task};

pub use crate::options::{Options, plan};
pub use buffer::Layout;
pub use iris_ops::{AnyOp, Op, Operands};
pub use run::{Report, open, room_for, room_for_nodes, run_case};
pub use traffic::{Traffic, expected as expected_traffic};

/// Kind of input values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input {
    /// Integers in [-8, 8], for which f32 sums are exact, so results are compared for equality.
    Integers,
    /// Real numbers in [-1, 1).
    Reals,
}

/// Location of the residual that is added to a result before an RMSNorm.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Residual {
    /// No residual is added.
    None,
    /// Separate memory with the layout of C.
    Apart,
    /// C itself: the call replaces the old residual by the new one.
    InC,
}

/// Test case: an op, its options, the matrices' layouts, and the calls to run.
#[derive(Clone, Debug)]
pub struct Case {
    /// Operator to test.
    pub op: Op,
    /// Name of the operator's variant; `auto` leaves the choice to the plan.
    pub variant: String,
    /// Options of the operator's plan.
    pub options: Options,
    /// Number of rows of each call, at most `options.m`.
    pub rows: Vec<usize>,
    /// Kind of the inputs' values.
    pub input: Input,
    /// Whether a bias is added.
    pub bias: bool,
    /// Location of the residual, for cases with an RMSNorm.
    pub residual: Residual,
    /// Memory layout of A, or of the message.
    pub a: Layout,
    /// Memory layout of matrix B.
    pub b: Layout,
    /// Memory layout of C, of the residual and of the normalised rows.
    pub c: Layout,
    /// Whether rank r's K (or N, if A is gathered) is larger by r than rank 0's. Ignored for ops
    /// that do not allow it.
    pub uneven: bool,
    /// Whether calls run in place (C is A) on ranks that have all rows of A and of C.
    pub in_place: bool,
    /// Whether all calls are enqueued before the host waits for the first one; each call then has
    /// its own buffers.
    pub burst: bool,
    /// Whether the ranks synchronise before each call, so that the call's time includes no waiting
    /// for late ranks.
    pub paced: bool,
    /// Seed of the random inputs.
    pub seed: u64,
}

impl Case {
    /// Case for an op with these options: integer inputs, and three calls; the second call has half
    /// as many rows as the first and the third.
    pub fn new(op: Op, variant: impl AsRef<str>, options: Options) -> Self {
        let m = options.m;
        Self {
            op,
            variant: variant.as_ref().into(),
            rows: vec![m, m.div_ceil(2), m],
            options,
            input: Input::Integers,
            bias: false,
            residual: Residual::Apart,
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

    /// Cases of [`Case::new`] for each op, each of its variants and each dimension along which the
    /// op can split A (`shard`). Variants are left out if this machine's device has no kernels for
    /// them, or if they do not support the type in which data is sent.
    pub fn each(options: &Options) -> Vec<Self> {
        let device = Topology::new(0, 2).on(options.backend).device;
        let mut cases = Vec::new();
        for op in Op::ALL {
            let mut options = options.clone();
            if !op.multiplies() {
                options.k = 0;
            }
            for &shard in Meaning::of(op).shards() {
                let one = |variant| Self::new(op, variant, options.clone().shard(shard));
                let able = |&variant: &Variant| {
                    !Self::sends_sums_as_items(op, variant)
                        || options.wire_dtype() == options.output_dtype()
                };
                cases.extend(op.variants_on(device).into_iter().filter(able).map(one));
            }
        }
        cases
    }

    /// Whether, in this variant, each rank sends the sums that it has computed by the LL protocol.
    /// These sums are sent in the type of C, not in the type in which partial sums are sent.
    pub fn sends_sums_as_items(op: Op, variant: Variant) -> bool {
        matches!(
            (op, variant),
            (Op::AllReduce, Variant::TwoShotLl) | (_, Variant::UnfusedTwoShotLl)
        )
    }

    /// Cases of [`Case::new`] with an RMSNorm, one for each op and variant that supports it.
    pub fn each_normed(options: &Options) -> Vec<Self> {
        let options = options.clone().rms_norm(1e-3);
        let is_able = |case: &Self| {
            let ranks = Topology::new(0, 2);
            case.op.options().contains(&"rms_norm")
                && plan(case.op, &case.variant, ranks, &case.options).is_ok()
        };
        Self::each(&options).into_iter().filter(is_able).collect()
    }

    /// Options of `rank`; options differ between ranks only if `uneven` is true.
    pub fn options_of(&self, rank: usize) -> Options {
        let mut options = self.options.clone();
        if self.uneven {
            match Meaning::of(self.op) {
                Meaning { product: Product::First, gives: Rows::All, .. } => options.k += rank,
                Meaning { product: Product::Last, .. } => options.n += rank,
                _ => {}
            }
        }
        options
    }

    /// Shapes (rows, columns) of A (or the message), B and C of a rank in a call of `m` rows.
    pub fn shapes(&self, ranks: Topology, m: usize) -> [(usize, usize); 3] {
        self.task(ranks, m).shapes(ranks.rank)
    }

    /// Task for the oracle: a call of `m` rows, with the options of this rank.
    pub fn task(&self, ranks: Topology, m: usize) -> Task {
        Task {
            op: self.op,
            size: ranks.size,
            nodes: ranks.nodes(),
            m,
            options: self.options_of(ranks.rank),
        }
    }

    /// Whether all ranks must get results with the same bits.
    pub fn same_on_all_ranks(&self, variant: Variant) -> bool {
        Meaning::of(self.op).replicates() && !variant.order_varies()
    }

    /// Whether repeated calls with the same input must give the same bits.
    pub fn same_in_all_runs(&self, variant: Variant) -> bool {
        !variant.order_varies()
    }
}
