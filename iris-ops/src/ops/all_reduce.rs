//! All-reduce: every rank gets the sum over all ranks' inputs.

use iris_kernels::Kernel;
use iris_kernels::program::{Alternative, always, kernel};

use crate::CollectiveArgs;
use crate::op_names::{self, Op};
use crate::op_row::{Common, Composition, Dims, Norm, Part, Row, Tiles};
use crate::operator_macros::{beside_method, operator, variants};
use crate::ops::matmul_all_reduce::{FORMS, LL, TWO_SHOT_LL};
use crate::options::options;
use crate::programs::LOCAL;

operator! {
    /// All-reduce. Output (on all ranks) = sum over ranks of the input. The call may run in place:
    /// the output may be the input.
    AllReduce(CollectiveArgs)
}
beside_method!(AllReduce(CollectiveArgs));

options! { ROW,
    /// Options of [`AllReduce`].
    {
        /// Options for at most `count` elements.
        message();
        variant, dtype, wire, epilogue, rms_norm, tile, workgroups, reserve_sms,
    }
}

impl Options {
    /// Sums weighted parts: a row of this rank's message is the sum of `parts` parts of a row of the
    /// input, each times a weight. In a mixture of experts whose experts are split over the ranks, the
    /// parts are what this rank's slices of a token's experts computed, and the weights are the
    /// router's. The input is M x (`parts` N), as row-major M x `parts` x N lies in memory;
    /// a call passes the weights by [`CollectiveArgs::weights`], and up to two matrices that are added
    /// to the sum by [`CollectiveArgs::plus`].
    ///
    /// One launch computes everything, an RMSNorm too, in this order: the weighted parts of a row in
    /// their order, each by one multiply-add in f32; rounding to the wire type; the sum over ranks in
    /// their order; GELU; the added matrices in their order; rounding to the output's type; RMSNorm. All
    /// parts are read, those with weight 0 too.
    ///
    /// The message is sent by the variant `ll`, for at most 2 MiB from one rank to another. Planning
    /// fails for a larger message, for another variant, and over several nodes; then sum the parts
    /// before the call. With one rank the size is not limited, and the RMSNorm is a second launch.
    ///
    /// ```
    /// use iris_heap::World;
    /// use iris_ops::{AllReduce, CollectiveArgs, HeapReserve, MatRef, Plan, all_reduce::Options};
    ///
    /// let all = World::run_threads(2, |world| -> anyhow::Result<_> {
    ///     // One token of four elements, with the results of two experts.
    ///     let plan = Options::rows(1, 4).combine(2).plan(&world)?;
    ///     let heap = Plan::open_heap(&world, &[&plan], HeapReserve::matrices())?;
    ///     let op = AllReduce::new(&heap, &plan)?;
    ///     let (parts, weights) = (heap.ones::<f32>(2 * 4)?, heap.alloc::<f32>(2)?);
    ///     heap.write(weights, &[0.75, 0.5])?;
    ///     let (residual, sum) = (heap.full::<f32>(4, 10.0)?, heap.zeros::<f32>(4)?);
    ///     let args = CollectiveArgs::new(MatRef::sym(parts, 1, 2 * 4), MatRef::sym(sum, 1, 4))
    ///         .weights(MatRef::sym(weights, 1, 2))
    ///         .plus(MatRef::sym(residual, 1, 4));
    ///     let stream = heap.stream()?;
    ///     op.run(&args, &stream)?;
    ///     stream.sync()?;
    ///     let sum = heap.read(sum)?;
    ///     heap.close()?;
    ///     world.close()?;
    ///     Ok(sum)
    /// })?;
    /// assert_eq!(all, [[12.5; 4]; 2]); // 2 ranks * (0.75 + 0.5) + 10
    /// # anyhow::Ok(())
    /// ```
    #[must_use]
    pub fn combine(mut self, parts: usize) -> Self {
        self.request.row = &COMBINE;
        self.request.k = parts;
        self
    }
}

variants! { ROW;
    /// Each rank pushes its input to all ranks, and each rank adds all inputs in the order of
    /// ranks, so all ranks get the same bits. Best for small messages.
    OneShot,
    /// One rank, the owner of a tile, adds up the tile's data of all ranks in the order of ranks
    /// and sends the sum to all ranks, with the same bits as `OneShot`.
    TwoShot,
    /// LL protocol (data and a flag in one word); each rank adds all inputs in the same order as
    /// `OneShot`. Only for messages of at most 2 MiB.
    Ll,
    /// Each rank owns a part of the message: it adds up this part of all inputs in the order of
    /// ranks and sends the sum to all ranks, by the LL protocol, with the same bits as `OneShot`.
    /// `wire` must be the type of C. For messages that are too large for `Ll`.
    TwoShotLl,
    /// Ranks add their inputs to an f32 sum at the tile's owner while they hold a spinlock. The
    /// order of additions varies between runs, so the last bits of the result vary too.
    Spinlock,
    /// Ranks add their inputs to an f32 sum at the tile's owner by atomic additions. The order of
    /// additions varies between runs, so the last bits of the result vary too.
    Atomic,
}

pub(crate) const ROW: Row = Row {
    op: Op::AllReduce,
    message: Op::AllReduce,
    common: Common { n: true, k: true },
    a: Part::All,
    c: Part::All,
    dims: Dims::message,
    tiles: Tiles::All,
    in_place: true,
    composed: Composition::AllReduce { scatter: Op::ReduceScatter },
    alone: LOCAL,
    forms: &[
        FORMS[0].norms(Norm::Last),
        FORMS[1].norms(Norm::Last),
        FORMS[2],
        FORMS[3],
        LL.norms(Norm::Within),
        TWO_SHOT_LL,
    ],
};

/// Row of an all-reduce of weighted parts. With one rank its kernel adds without communication.
const COMBINE: Row = Row {
    dims: Dims::parts,
    in_place: false,
    alone: COMBINE_LL,
    forms: &[LL.renamed(op_names::Variant::Ll, COMBINE_LL).norms(Norm::Within)],
    ..ROW
};

const COMBINE_LL: &[Alternative] = &[always(&[kernel(Kernel::OneShotCombineLl)])];
