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

use iris_ops::{Ranks, Variant};

use crate::oracle::{Meaning, Product, Rows, Task};

pub use buffer::Layout;
pub use iris_ops::{AnyOp, Op, Operands};
pub use options::{Options, plan};
pub use run::{Report, heap_bytes, heap_bytes_on, run_case};
pub use traffic::{Traffic, expected as expected_traffic};

/// What the inputs are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input {
    /// Integers in [-8, 8]: sums of f32 are exact, so results are compared for equality.
    Integers,
    /// Reals in [-1, 1).
    Reals,
}

/// Where the residual lies that is added to a result whose rows are normalised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Residual {
    /// There is none.
    None,
    /// In memory of its own, laid out as C is.
    Apart,
    /// In C, where the new one takes its place.
    InC,
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
    /// What is added to a result whose rows are normalised.
    pub residual: Residual,
    /// How A lies, or the message.
    pub a: Layout,
    /// How B lies.
    pub b: Layout,
    /// How C lies, and so do the residual and what is normalised.
    pub c: Layout,
    /// Whether rank r has r more of K than rank 0, or of N where A is gathered. Only ops that allow
    /// it take notice.
    pub uneven: bool,
    /// Whether the output is the input itself, at ranks that have all of both.
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

    /// Each op, variant and shard with these options, as [`Case::new`] has them, except variants that the device of
    /// this machine has no kernels for.
    pub fn each(options: &Options) -> Vec<Self> {
        let device = Ranks::new(0, 2).on(options.backend).device;
        let mut cases = Vec::new();
        for op in Op::ALL {
            let mut options = options.clone();
            if !op.multiplies() {
                options.k = 0;
            }
            for &shard in Meaning::of(op).shards() {
                let one = |variant| Self::new(op, variant, options.clone().shard(shard));
                cases.extend(op.variants_on(device).into_iter().map(one));
            }
        }
        cases
    }

    /// Each op and variant that normalises rows, with these options.
    pub fn each_normed(options: &Options) -> Vec<Self> {
        let options = options.clone().rms_norm(1e-3);
        let is_able = |case: &Self| {
            let ranks = Ranks::new(0, 2);
            case.op.options().contains(&"rms_norm")
                && plan(case.op, &case.variant, ranks, &case.options).is_ok()
        };
        Self::each(&options).into_iter().filter(is_able).collect()
    }

    /// The options of `rank`: they differ between ranks only if the case is uneven.
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

    /// The shapes of A (or the message), B and C of a rank in a call of `m` rows.
    pub fn shapes(&self, ranks: Ranks, m: usize) -> [(usize, usize); 3] {
        self.task(ranks, m).shapes(ranks.rank)
    }

    /// A call of `m` rows, as the oracle has it, with the options of a rank.
    pub fn task(&self, ranks: Ranks, m: usize) -> Task {
        Task { op: self.op, size: ranks.size, m, options: self.options_of(ranks.rank) }
    }

    /// Whether all ranks get the same bits.
    pub fn same_on_all_ranks(&self, variant: Variant) -> bool {
        Meaning::of(self.op).replicates() && !variant.order_varies()
    }

    /// Whether the same input gives the same bits in every call.
    pub fn same_in_all_runs(&self, variant: Variant) -> bool {
        !variant.order_varies()
    }
}
