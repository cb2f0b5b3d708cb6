//! All-gather: each rank has a part, and all ranks get all parts.

use iris_heap::DType;
use iris_kernels::Kernel;
use iris_kernels::program::{Alternative, always, kernel};
use iris_kernels::schedule::Collective;

use crate::CollectiveArgs;
use crate::op_names::{self, Op};
use crate::op_row::{Common, Composition, Dims, Form, Memory, Part, Row, Tiles};
use crate::operator_macros::{beside_method, operator, variants};
use crate::ops::matmul_all_gather::FORMS;
use crate::options::options;
use crate::programs::LOCAL;

operator! {
    /// All-gather. Output (on all ranks): the inputs of all ranks, in the order of ranks. Planned
    /// by elements ([`Options::new`]), every input has `count` elements. Planned by rows
    /// ([`Options::rows`]), the output is M x N, and the rows `split(m, size, r)` of the output are
    /// the input of rank r. Each rank pushes its part to all other ranks.
    AllGather(CollectiveArgs)
}
beside_method!(AllGather(CollectiveArgs));

options! { ROW,
    /// Options of [`AllGather`], from which its plan is made.
    {
        /// Options for at most `count` elements of input per rank; the output has `size` times as
        /// many elements.
        message();
        variant, dtype, tile, workgroups, reserve_sms,
    }
}

impl Options {
    /// Adds a tensor of `n` columns to a plan by [`rows`](Options::rows), with as many rows as the
    /// first one and an element type of its own: a call then gathers a list of up to four tensors,
    /// such as tokens, expert ids and router weights, as one message. The tensors are moved bit by
    /// bit, so every [`DType`] is allowed for each, also for the first one.
    ///
    /// The message is sent by the variant `ll`, for at most 2 MiB from one rank to another; a row of
    /// each tensor counts as a multiple of 8 bytes. Planning fails for a larger message, for another
    /// variant, and over several nodes. Matrices of a call are row-major, with any leading dimension.
    ///
    /// ```
    /// use iris_heap::{DType, World};
    /// use iris_ops::{AllGather, CollectiveArgs, HeapReserve, MatRef, Plan, all_gather::Options};
    ///
    /// let all = World::run_threads(2, |world| -> anyhow::Result<_> {
    ///     let plan = Options::rows(4, 3).dtype(DType::F32).and(DType::I32, 1).plan(&world)?;
    ///     let heap = Plan::open_heap(&world, &[&plan], HeapReserve::matrices())?;
    ///     let op = AllGather::new(&heap, &plan)?;
    ///     let tokens = heap.full::<f32>(2 * 3, world.rank() as f32)?;
    ///     let ids = heap.full::<i32>(2, 7 + world.rank() as i32)?;
    ///     let (all_tokens, all_ids) = (heap.zeros::<f32>(4 * 3)?, heap.zeros::<i32>(4)?);
    ///     let args = CollectiveArgs::new(MatRef::sym(tokens, 2, 3), MatRef::sym(all_tokens, 4, 3))
    ///         .and(MatRef::sym(ids, 2, 1), MatRef::sym(all_ids, 4, 1));
    ///     let stream = heap.stream()?;
    ///     op.run(&args, &stream)?;
    ///     stream.sync()?;
    ///     let ids = heap.read(all_ids)?;
    ///     heap.close()?;
    ///     world.close()?;
    ///     Ok(ids)
    /// })?;
    /// assert_eq!(all, [[7, 7, 8, 8]; 2]);
    /// # anyhow::Ok(())
    /// ```
    #[must_use]
    pub fn and(mut self, dtype: DType, n: usize) -> Self {
        self.request.row = &LIST;
        self.request.more.push((dtype, n));
        self
    }
}

variants! { ROW;
    /// Each rank pushes its part to all other ranks, with a signal per tile. For messages of any
    /// size.
    Push,
    /// LL protocol (data and a flag in one word), for small messages: at most 2 MiB from one rank
    /// to another.
    Ll,
}

pub(crate) const ROW: Row = Row {
    op: Op::AllGather,
    message: Op::AllGather,
    common: Common { n: true, k: true },
    a: Part::Own,
    c: Part::All,
    dims: Dims::message,
    tiles: Tiles::Own,
    in_place: false,
    composed: Composition::GatherA,
    alone: LOCAL,
    forms: &[
        FORMS[0],
        Form::push(
            op_names::Variant::Ll,
            &[always(&[kernel(Kernel::AllGatherLl)])],
            Memory::Pairs(Collective::AllGather),
        ),
    ],
};

/// Row of a gather of a list of tensors. With one rank its kernel copies all tensors.
const LIST: Row = Row {
    alone: LIST_LL,
    forms: &[Form::push(op_names::Variant::Ll, LIST_LL, Memory::Pairs(Collective::AllGather))],
    ..ROW
};

const LIST_LL: &[Alternative] = &[always(&[kernel(Kernel::AllGatherListLl)])];
