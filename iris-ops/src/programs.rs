//! Programs (sequences of steps) of the variants that need more than one kernel. Programs of a
//! single kernel are in the rows of the operator table.

#[cfg(test)]
mod tests;

use iris_kernels::Kernel;
use iris_kernels::program::{
    Alternative, Area, Core, Gemm, Item, KernelOperands, Rows, Source, Target, Transfer, When,
    Work, always, gemm, kernel, or, step, when,
};

/// Program of a collective with a single rank: copies the input to the output.
pub(crate) const LOCAL: &[Alternative] = &[always(&[kernel(Kernel::Local)])];

/// Program of a product without communication: a GEMM of any implementation, or the tile kernel if
/// no GEMM can do the product.
pub(crate) const MATMUL: &[Alternative] = &[always(&[or(
    Work::Gemm(Gemm { source: Source::Input, rows: Rows::All, to: Target::C, core: Core::Any }),
    &[kernel(Kernel::Local)],
)])];

/// Program of the operator `barrier`: a single step.
pub(crate) const BARRIER: &[Alternative] = &[always(&[step(Work::BarrierCall)])];

/// All-reduce by additions under a lock: set the sums to zero, barrier, add, barrier, convert the
/// sums to the type of C.
pub(crate) const ADD_LOCKED: &[Alternative] = &[always(&[
    kernel(Kernel::Zero),
    step(Work::Barrier(0)),
    kernel(Kernel::AddLocked),
    step(Work::Barrier(1)),
    kernel(Kernel::Convert),
])];

/// All-reduce by the steps of [`ADD_LOCKED`], with atomic additions in place of the lock.
pub(crate) const ADD_ATOMIC: &[Alternative] = &[always(&[
    kernel(Kernel::Zero),
    step(Work::Barrier(0)),
    kernel(Kernel::AddAtomic),
    step(Work::Barrier(1)),
    kernel(Kernel::Convert),
])];

/// All-gather of A into the inbox, barrier, then the product tile by tile.
pub(crate) const GATHER: &[Alternative] =
    &[always(&[kernel(Kernel::Gather), step(Work::Barrier(0)), kernel(Kernel::Gathered)])];

/// Step that computes this rank's partial product, M x N, in the workspace.
const PARTIAL: Item = gemm(Source::Input, Rows::All, Target::Area(Area::Partial));

/// Step that multiplies this rank's rows of A and writes this rank's rows of C.
const OWN_ROWS: Item = gemm(Source::Shard, Rows::Own, Target::C);

/// GEMM that also does the all-reduce of `kernel`, in the same launch.
const fn exchange(kernel: Kernel) -> Item {
    let (source, rows, to) = (Source::Input, Rows::All, Target::Area(Area::Partial));
    step(Work::Gemm(Gemm { source, rows, to, core: Core::Exchanging(kernel) }))
}

/// Step in which `kernel` sends this rank's partial product from the workspace.
const fn of_partial(kernel: Kernel) -> Item {
    step(Work::Kernel(kernel, KernelOperands::Area(Area::Partial)))
}

/// GEMM, then the all-reduce of the partial products by `two_shot`.
pub(crate) const UNFUSED: &[Alternative] = &[always(&[PARTIAL, of_partial(Kernel::TwoShot)])];

/// GEMM and the all-reduce of the partial products by `one_shot`: in one launch if possible,
/// otherwise one after the other.
pub(crate) const UNFUSED_ONE_SHOT: &[Alternative] = &[
    when(&[When::Exchanges], &[exchange(Kernel::OneShot)]),
    always(&[PARTIAL, of_partial(Kernel::OneShot)]),
];

/// GEMM and the all-reduce of the partial products by the LL protocol: in one launch if possible,
/// otherwise one after the other.
pub(crate) const UNFUSED_LL: &[Alternative] = &[
    when(&[When::Exchanges], &[exchange(Kernel::OneShotLl)]),
    always(&[PARTIAL, of_partial(Kernel::OneShotLl)]),
];

/// GEMM, then the all-reduce of the partial products in two hops by the LL protocol.
pub(crate) const UNFUSED_TWO_SHOT_LL: &[Alternative] =
    &[always(&[PARTIAL, of_partial(Kernel::TwoShotLl)])];

/// GEMM, then the reduce-scatter of the partial products.
pub(crate) const UNFUSED_SCATTER: &[Alternative] =
    &[always(&[PARTIAL, of_partial(Kernel::ReduceScatter)])];

/// GEMM of this rank's rows of C, then the all-gather of C.
pub(crate) const UNFUSED_ROWS: &[Alternative] =
    &[always(&[OWN_ROWS, step(Work::Kernel(Kernel::AllGather, KernelOperands::OwnRows))])];

/// All-gather of A, then the GEMM of the gathered A.
pub(crate) const UNFUSED_GATHER: &[Alternative] = &[always(&[
    step(Work::Kernel(Kernel::AllGather, KernelOperands::Of(Transfer::Shards))),
    gemm(Source::Area(Area::Gathered), Rows::All, Target::C),
])];

/// Steps that wait until all rows of a transfer have arrived from all peers.
macro_rules! arrive {
    ($transfer:ident) => {
        Item::Peers(&[step(Work::Gate(Transfer::$transfer))])
    };
}

/// Steps that wait, for each part, until the part has arrived from all peers, and then copy the
/// part to C.
macro_rules! take_parts {
    ($transfer:ident) => {
        Item::Parts(&[Item::Peers(&[
            step(Work::Gate(Transfer::$transfer)),
            step(Work::CopyReceived(Transfer::$transfer)),
        ])])
    };
}

/// Step that copies all rows of a transfer to C. It must come after the wait for these rows.
macro_rules! take_all {
    ($transfer:ident) => {
        Item::Peers(&[step(Work::CopyReceived(Transfer::$transfer))])
    };
}

const OPEN_SHARDS: Item = step(Work::Open(Transfer::Shards));
const CLOSE_SHARDS: Item = step(Work::Close(Transfer::Shards));
const PUSH_SHARDS: Item = step(Work::Kernel(Kernel::Copies, KernelOperands::Of(Transfer::Shards)));

/// Step in which copy engines send shards of A; workgroups send them if copy engines cannot.
const SHARDS: Item = or(Work::Copies(Transfer::Shards), &[PUSH_SHARDS]);

/// All-gather of A by copies that overlap the product. This rank's own rows are multiplied while
/// the other ranks' rows are sent. The other ranks' rows are multiplied in one of three ways: in
/// one GEMM that itself waits for each part, in two GEMMs after all rows have arrived, or in one
/// GEMM per part when the part has arrived. If A is split by columns, the first way starts with this
/// rank's columns; without it the product starts when all of A has arrived.
pub(crate) const GATHER_COPIED: &[Alternative] = &[
    when(
        &[When::Gated],
        &[
            OPEN_SHARDS,
            step(Work::Copies(Transfer::Shards)),
            step(Work::Gemm(Gemm {
                source: Source::Area(Area::Gathered),
                rows: Rows::All,
                to: Target::C,
                core: Core::Gated,
            })),
            CLOSE_SHARDS,
        ],
    ),
    when(
        &[When::ByColumns],
        &[
            OPEN_SHARDS,
            PUSH_SHARDS,
            arrive!(Shards),
            gemm(Source::Area(Area::Gathered), Rows::All, Target::C),
            CLOSE_SHARDS,
        ],
    ),
    when(
        &[When::Wide],
        &[
            OPEN_SHARDS,
            SHARDS,
            OWN_ROWS,
            arrive!(Shards),
            gemm(Source::Area(Area::Gathered), Rows::BeforeOwn, Target::C),
            gemm(Source::Area(Area::Gathered), Rows::AfterOwn, Target::C),
            CLOSE_SHARDS,
        ],
    ),
    always(&[
        OPEN_SHARDS,
        SHARDS,
        OWN_ROWS,
        Item::Parts(&[Item::Peers(&[
            step(Work::Gate(Transfer::Shards)),
            gemm(Source::Area(Area::Gathered), Rows::Part, Target::C),
        ])]),
        CLOSE_SHARDS,
    ]),
];

const OPEN_BLOCKS: Item = step(Work::Open(Transfer::Blocks));
const CLOSE_BLOCKS: Item = step(Work::Close(Transfer::Blocks));
const PUSH_BLOCKS: Item = step(Work::Kernel(Kernel::Blocks, KernelOperands::Of(Transfer::Blocks)));

/// Step that computes one part of this rank's partial product in the workspace.
const PART: Item = gemm(Source::Input, Rows::Part, Target::Area(Area::Partial));

/// Steps for one part of a reduce-scatter. For each peer: a GEMM of the part's rows that the peer
/// owns, then the copy of the result to the peer.
const SEND_BLOCKS: Item = Item::Peers(&[PART, step(Work::Copies(Transfer::Blocks))]);

/// Step of the library's GEMM that multiplies one part of this rank's rows, and also adds the rows
/// that the only peer has sent. `or_sum` replaces the step if the library cannot do this.
const fn add(to: Target, or_sum: &'static [Item]) -> Item {
    let work = Gemm { source: Source::Input, rows: Rows::Part, to, core: Core::Adding };
    or(Work::Gemm(work), or_sum)
}

const SUMS: Item = step(Work::Sums { to: Target::Own });
const SUMS_OF_C: Item = step(Work::Sums { to: Target::OwnOfC });

/// Reduce-scatter in which workgroups send the partial products. Each rank adds up the partial
/// products of its own rows when all have arrived.
macro_rules! scatter_by_workgroups {
    ($sums:expr, $($then:expr),*) => {
        &[OPEN_BLOCKS, PARTIAL, PUSH_BLOCKS, arrive!(Blocks), $sums, $($then,)* CLOSE_BLOCKS]
    };
}

/// Reduce-scatter in which copy engines send partial products to their owners while the GEMMs of
/// later parts run. The rows that this rank owns are multiplied last, and the peers' partial
/// products are added to them.
pub(crate) const SCATTER_COPIED: &[Alternative] = &[
    when(
        &[When::Engines, When::Adds],
        &[
            OPEN_BLOCKS,
            Item::Parts(&[SEND_BLOCKS]),
            Item::Parts(&[arrive!(Blocks), add(Target::Own, &[PART, SUMS])]),
            CLOSE_BLOCKS,
        ],
    ),
    when(
        &[When::Engines],
        &[
            OPEN_BLOCKS,
            Item::Parts(&[SEND_BLOCKS]),
            gemm(Source::Input, Rows::Own, Target::Area(Area::Partial)),
            arrive!(Blocks),
            SUMS,
            CLOSE_BLOCKS,
        ],
    ),
    always(scatter_by_workgroups!(SUMS,)),
];

const COPY_SUMS: Item = step(Work::Copies(Transfer::Sums));
const PUSH_SUMS: Item = step(Work::Kernel(Kernel::Results, KernelOperands::Of(Transfer::Sums)));

/// All-reduce that starts like [`SCATTER_COPIED`], and then copies each part of the sums to all
/// ranks. A part that this rank owns is multiplied only after the next part has been sent to the
/// peers, so that the peers' partial products have had time to arrive. The copies of the sums overlap
/// later parts.
pub(crate) const SUM_COPIED: &[Alternative] = &[
    when(
        &[When::Engines, When::Adds],
        &[
            OPEN_BLOCKS,
            Item::Parts(&[
                SEND_BLOCKS,
                Item::PreviousPart(&[
                    arrive!(Blocks),
                    add(Target::OwnOfC, &[PART, SUMS_OF_C]),
                    COPY_SUMS,
                ]),
            ]),
            take_parts!(Sums),
            CLOSE_BLOCKS,
        ],
    ),
    when(
        &[When::Engines],
        &[
            OPEN_BLOCKS,
            Item::Parts(&[
                SEND_BLOCKS,
                Item::PreviousPart(&[PART, arrive!(Blocks), SUMS_OF_C, COPY_SUMS]),
            ]),
            take_parts!(Sums),
            CLOSE_BLOCKS,
        ],
    ),
    always(scatter_by_workgroups!(SUMS_OF_C, PUSH_SUMS, take_parts!(Sums))),
];

const OPEN_ROWS: Item = step(Work::Open(Transfer::Rows));
const CLOSE_ROWS: Item = step(Work::Close(Transfer::Rows));
const PUSH_ROWS: Item = step(Work::Kernel(Kernel::Copies, KernelOperands::Of(Transfer::Rows)));

/// All-gather of C in which copy engines send each part of this rank's rows while the GEMM of the
/// next part runs.
pub(crate) const ROWS_COPIED: &[Alternative] = &[
    when(
        &[When::Engines],
        &[
            OPEN_ROWS,
            Item::Parts(&[
                gemm(Source::Shard, Rows::Part, Target::C),
                step(Work::Copies(Transfer::Rows)),
            ]),
            take_parts!(Rows),
            CLOSE_ROWS,
        ],
    ),
    always(&[OPEN_ROWS, OWN_ROWS, PUSH_ROWS, take_parts!(Rows), CLOSE_ROWS]),
];

/// GEMM whose epilogue stores the finished tiles to peers.
const fn store(source: Source, to: Target, blocks: bool, results: Option<Transfer>) -> Item {
    let core = Core::Storing { blocks, results };
    step(Work::Gemm(Gemm { source, rows: Rows::All, to, core }))
}

/// Reduce-scatter in one GEMM. Its epilogue stores each tile in the memory of the rank that owns
/// it, and adds the tiles that peers have stored to this rank's own tiles.
pub(crate) const SCATTER_STORED: &[Alternative] = &[
    when(
        &[When::Stores],
        &[OPEN_BLOCKS, store(Source::Input, Target::Own, true, None), CLOSE_BLOCKS],
    ),
    always(scatter_by_workgroups!(SUMS,)).indirect(),
];

/// All-reduce in one GEMM that works like [`SCATTER_STORED`]; its epilogue also stores each tile of
/// the sums to all ranks. After the GEMM, one step per peer waits for all of the peer's sums, so
/// that a single step can copy them to C.
pub(crate) const SUM_STORED: &[Alternative] = &[
    when(
        &[When::Stores],
        &[
            OPEN_BLOCKS,
            store(Source::Input, Target::OwnOfC, true, Some(Transfer::Sums)),
            arrive!(Sums),
            take_all!(Sums),
            CLOSE_BLOCKS,
        ],
    ),
    always(scatter_by_workgroups!(SUMS_OF_C, PUSH_SUMS, arrive!(Sums), take_all!(Sums))).indirect(),
];

/// All-gather of C in one GEMM of this rank's rows, whose epilogue stores tiles to all ranks.
pub(crate) const ROWS_STORED: &[Alternative] = &[
    when(
        &[When::Stores],
        &[
            OPEN_ROWS,
            store(Source::Shard, Target::OwnOfC, false, Some(Transfer::Rows)),
            arrive!(Rows),
            take_all!(Rows),
            CLOSE_ROWS,
        ],
    ),
    always(&[OPEN_ROWS, OWN_ROWS, PUSH_ROWS, arrive!(Rows), take_all!(Rows), CLOSE_ROWS])
        .indirect(),
];
