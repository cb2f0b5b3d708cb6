//! The programs of operators that consist of more than one kernel. Those of one kernel stand in the operator's row.

#[cfg(test)]
mod tests;

use iris_kernels::Kernel;
use iris_kernels::program::{
    Alternative, Area, Core, Gemm, Item, Operands, Rows, Source, Target, Transfer, When, Work,
    always, gemm, kernel, or, step, when,
};

/// The message of a rank that is alone: a copy.
pub(crate) const LOCAL: &[Alternative] = &[always(&[kernel(Kernel::Local)])];

/// A product without a message, or of a rank that is alone.
pub(crate) const MATMUL: &[Alternative] = &[always(&[or(
    Work::Gemm(Gemm { source: Source::Input, rows: Rows::All, to: Target::C, core: Core::Any }),
    &[kernel(Kernel::Local)],
)])];

/// A barrier that is a call by itself.
pub(crate) const BARRIER: &[Alternative] = &[always(&[step(Work::BarrierCall)])];

/// An accumulating all-reduce: clear the sums, add to them, read them, with a barrier between.
pub(crate) const ADD_LOCKED: &[Alternative] = &[always(&[
    kernel(Kernel::Zero),
    step(Work::Barrier(0)),
    kernel(Kernel::AddLocked),
    step(Work::Barrier(1)),
    kernel(Kernel::Convert),
])];

/// An accumulating all-reduce as [`ADD_LOCKED`], by atomic additions.
pub(crate) const ADD_ATOMIC: &[Alternative] = &[always(&[
    kernel(Kernel::Zero),
    step(Work::Barrier(0)),
    kernel(Kernel::AddAtomic),
    step(Work::Barrier(1)),
    kernel(Kernel::Convert),
])];

/// All-gather of A into an inbox, then the product of tiles.
pub(crate) const GATHER: &[Alternative] =
    &[always(&[kernel(Kernel::Gather), step(Work::Barrier(0)), kernel(Kernel::Gathered)])];

/// The GEMM of this rank's partial.
const PARTIAL: Item = gemm(Source::Input, Rows::All, Target::Area(Area::Partial));

/// The GEMM of this rank's rows of C, from its rows of A.
const OWN_ROWS: Item = gemm(Source::Shard, Rows::Own, Target::C);

/// A GEMM that does the message of a kernel itself.
const fn exchange(kernel: Kernel) -> Item {
    let (source, rows, to) = (Source::Input, Rows::All, Target::Area(Area::Partial));
    step(Work::Gemm(Gemm { source, rows, to, core: Core::Exchanging(kernel) }))
}

/// A kernel over this rank's partial.
const fn of_partial(kernel: Kernel) -> Item {
    step(Work::Kernel(kernel, Operands::Area(Area::Partial)))
}

/// GEMM, then `two_shot` of the partial.
pub(crate) const UNFUSED: &[Alternative] = &[always(&[PARTIAL, of_partial(Kernel::TwoShot)])];

/// GEMM, then `one_shot` of the partial; or both in one launch.
pub(crate) const UNFUSED_ONE_SHOT: &[Alternative] = &[
    when(&[When::Exchanges], &[exchange(Kernel::OneShot)]),
    always(&[PARTIAL, of_partial(Kernel::OneShot)]),
];

/// GEMM, then the all-reduce of the partial by the LL protocol; or both in one launch.
pub(crate) const UNFUSED_LL: &[Alternative] = &[
    when(&[When::Exchanges], &[exchange(Kernel::OneShotLl)]),
    always(&[PARTIAL, of_partial(Kernel::OneShotLl)]),
];

/// GEMM, then the reduce-scatter of the partial.
pub(crate) const UNFUSED_SCATTER: &[Alternative] =
    &[always(&[PARTIAL, of_partial(Kernel::ReduceScatter)])];

/// GEMM of this rank's rows of C, then their all-gather.
pub(crate) const UNFUSED_ROWS: &[Alternative] =
    &[always(&[OWN_ROWS, step(Work::Kernel(Kernel::AllGather, Operands::OwnRows))])];

/// All-gather of A, then the GEMM.
pub(crate) const UNFUSED_GATHER: &[Alternative] = &[always(&[
    step(Work::Kernel(Kernel::AllGather, Operands::Of(Transfer::Shards))),
    gemm(Source::Area(Area::Gathered), Rows::All, Target::C),
])];

/// Waits for all rows of a transfer, from all peers.
macro_rules! arrive {
    ($transfer:ident) => {
        Item::Peers(&[step(Work::Gate(Transfer::$transfer))])
    };
}

/// Takes rows of a transfer to C, part by part as they come from all peers.
macro_rules! take_parts {
    ($transfer:ident) => {
        Item::Parts(&[Item::Peers(&[
            step(Work::Gate(Transfer::$transfer)),
            step(Work::Take(Transfer::$transfer)),
        ])])
    };
}

/// Takes rows of a transfer to C once all have come.
macro_rules! take_all {
    ($transfer:ident) => {
        Item::Peers(&[step(Work::Take(Transfer::$transfer))])
    };
}

const OPEN_SHARDS: Item = step(Work::Open(Transfer::Shards));
const CLOSE_SHARDS: Item = step(Work::Close(Transfer::Shards));
const PUSH_SHARDS: Item = step(Work::Kernel(Kernel::Copies, Operands::Of(Transfer::Shards)));

/// Shards of A by engines if they can move them, else by workgroups.
const SHARDS: Item = or(Work::Copies(Transfer::Shards), &[PUSH_SHARDS]);

/// Copies of A beside its product. This rank's own rows are multiplied while the others are on their way, and those
/// as they come: by one GEMM that waits for each part itself, by two GEMMs once all have come, or by one for each
/// part. Columns are multiplied when all are there, since each element of C needs all of them.
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
const PUSH_BLOCKS: Item = step(Work::Kernel(Kernel::Blocks, Operands::Of(Transfer::Blocks)));

/// The GEMM of a part of the partial.
const PART: Item = gemm(Source::Input, Rows::Part, Target::Area(Area::Partial));

/// For each part and peer, the GEMM of what the peer owns, and its copy to the peer.
const SEND_BLOCKS: Item = Item::Peers(&[PART, step(Work::Copies(Transfer::Blocks))]);

/// The library GEMM of a part of this rank's rows, which adds what the one peer sent.
const fn add(to: Target, or_sum: &'static [Item]) -> Item {
    let work = Gemm { source: Source::Input, rows: Rows::Part, to, core: Core::Adding };
    or(Work::Gemm(work), or_sum)
}

const SUMS: Item = step(Work::Sums { to: Target::Own });
const SUMS_OF_C: Item = step(Work::Sums { to: Target::OwnOfC });

/// Partials by workgroups, which are added up when all have come.
macro_rules! scatter_by_workgroups {
    ($sums:expr, $($then:expr),*) => {
        &[OPEN_BLOCKS, PARTIAL, PUSH_BLOCKS, arrive!(Blocks), $sums, $($then,)* CLOSE_BLOCKS]
    };
}

/// Copies of partials to their owners beside the GEMMs of those that follow; then what this rank owns, to which those
/// of the peers are added.
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
const PUSH_SUMS: Item = step(Work::Kernel(Kernel::Results, Operands::Of(Transfer::Sums)));

/// Copies of partials as in [`SCATTER_COPIED`]; each part of the sums goes to all: a part that this rank owns follows the next of the
/// others, so that theirs has come by then, and the sums leave beside what follows.
pub(crate) const SUM_COPIED: &[Alternative] = &[
    when(
        &[When::Engines, When::Adds],
        &[
            OPEN_BLOCKS,
            Item::Parts(&[
                SEND_BLOCKS,
                Item::Late(&[arrive!(Blocks), add(Target::OwnOfC, &[PART, SUMS_OF_C]), COPY_SUMS]),
            ]),
            take_parts!(Sums),
            CLOSE_BLOCKS,
        ],
    ),
    when(
        &[When::Engines],
        &[
            OPEN_BLOCKS,
            Item::Parts(&[SEND_BLOCKS, Item::Late(&[PART, arrive!(Blocks), SUMS_OF_C, COPY_SUMS])]),
            take_parts!(Sums),
            CLOSE_BLOCKS,
        ],
    ),
    always(scatter_by_workgroups!(SUMS_OF_C, PUSH_SUMS, take_parts!(Sums))),
];

const OPEN_ROWS: Item = step(Work::Open(Transfer::Rows));
const CLOSE_ROWS: Item = step(Work::Close(Transfer::Rows));
const PUSH_ROWS: Item = step(Work::Kernel(Kernel::Copies, Operands::Of(Transfer::Rows)));

/// GEMMs of parts of this rank's rows of C, each of which a copy takes to all beside the next.
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

/// The GEMM that stores to peers.
const fn store(source: Source, to: Target, blocks: bool, results: Option<Transfer>) -> Item {
    let core = Core::Storing { blocks, results };
    step(Work::Gemm(Gemm { source, rows: Rows::All, to, core }))
}

/// One GEMM that stores tiles to their owners, and adds theirs to its own.
pub(crate) const SCATTER_STORED: &[Alternative] = &[
    when(
        &[When::Stores],
        &[OPEN_BLOCKS, store(Source::Input, Target::Own, true, None), CLOSE_BLOCKS],
    ),
    always(scatter_by_workgroups!(SUMS,)).indirect(),
];

/// One GEMM as in [`SCATTER_STORED`], which also stores each tile of the sums to all. There are many parts, and they have
/// come when the GEMM is over, so they are taken at once.
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

/// One GEMM of this rank's rows of C, which stores them to all.
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
