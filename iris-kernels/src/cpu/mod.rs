//! CPU kernels: the protocols of [`iris_sync::flow`], run on the synchronisation words of a mapped
//! heap, with the `gemm-f32` crate for matrix products. Sums are f32 for every element type.

#![allow(unsafe_code, reason = "kernels over memory that other ranks write")]

mod body;
mod delay;
pub(crate) use delay::longest as longest_delay;
mod view;
mod words;

use iris_sync::flow::{self, Launch};
use iris_sync::{Aborted, End};

use crate::args::{OpArgs, producer};
use crate::kernel::Kernel;
use crate::schedule::{Grid, Shard, SplitGrid, Units, owner};
use body::partial::Partial;
use body::{accumulate, deliver, gather, ll, ll_list, norm, reduce, sums};
use words::Words;

/// Current time in nanoseconds, on the clock of trace spans, which all processes of a host share.
pub fn now() -> u64 {
    words::now()
}

/// Runs `kernel` as workgroup `index` of the `count` workgroups of a launch.
///
/// # Errors
/// [`Aborted`] if the call cannot be finished; the reason is then in the control block of the heap.
///
/// # Safety
/// Every address in `args` refers to live memory of the size that `args` gives: segments, control
/// block and device words of the heap, matrices, trace and counters. A matrix that is written must
/// not overlap another matrix. While the call runs, no other code of this process accesses the
/// matrices, except peers in the same call, because the kernels' accesses are plain.
pub unsafe fn run(kernel: Kernel, args: &OpArgs, index: u32, count: u32) -> Result<(), Aborted> {
    // SAFETY: the caller guarantees that the addresses in `args` are valid, as `Words::new`
    // requires.
    let words = unsafe { Words::new(args, index) };
    let launch = Launch { m: &words, channel: &args.channel, record: &args.record, index, count };
    let partial = Partial::new(args);
    let size = args.channel.size;
    let grid = Grid { rows: args.m, cols: args.n, tile_m: args.tile_m, tile_n: args.tile_n };
    let split = SplitGrid { grid, size };
    let reduce = |partial, plan| reduce::Reduce { partial, words: &words, plan };
    let deliver = |partial, plan| {
        let mut body = deliver::Deliver { partial, words: &words, plan };
        // Number of dedicated senders: none for a product, because a workgroup pushes the tiles
        // that it has itself multiplied.
        let loads = args.producer == producer::LOAD;
        let senders = if loads { args.dedicated_workgroups } else { 0 };
        flow::deliver(&launch, &deliver::Sent(plan, args.channel.rank), senders, &mut body)
    };
    let copies = |partial, plan, first| {
        deliver::Deliver { partial, words: &words, plan }.copies(&launch, first)
    };
    let owners = |tile| owner(tile, size);
    let accumulate =
        |partial, atomic| accumulate::Accumulate { partial, words: &words, grid, atomic };
    let gather = |partial, pulls| {
        let shard = if args.shard == 0 { Shard::Rows } else { Shard::Columns };
        let OpArgs { m, k, tile_m, k_group, .. } = *args;
        let units =
            Units { shard, size, m, k, tile_m, k_group, m_contiguous: args.m_contiguous == 1 };
        gather::Gather { partial, words: &words, units, pulls, begun: false }
    };
    match kernel {
        Kernel::Local => local(&launch, grid, partial),
        Kernel::OneShot => {
            let plan = reduce::TileOwners::OneShot(grid);
            flow::one_shot(&launch, grid.tiles(), &mut reduce(partial, plan))
        }
        Kernel::TwoShot => {
            let plan = reduce::TileOwners::TwoShot(grid, size);
            flow::two_shot(&launch, &plan, args.dedicated_workgroups, &mut reduce(partial, plan))
        }
        Kernel::ReduceScatter => {
            let plan = reduce::TileOwners::Scatter(split);
            flow::reduce_scatter(
                &launch,
                &plan,
                args.dedicated_workgroups,
                &mut reduce(partial, plan),
            )
        }
        Kernel::Zero => flow::zero(&launch, grid.tiles(), owners, &mut accumulate(partial, false)),
        Kernel::AddLocked => {
            flow::add(&launch, grid.tiles(), owners, true, &mut accumulate(partial, false))
        }
        Kernel::AddAtomic => {
            flow::add(&launch, grid.tiles(), owners, false, &mut accumulate(partial, true))
        }
        Kernel::Convert => {
            flow::convert(&launch, grid.tiles(), owners, &mut accumulate(partial, false))
        }
        Kernel::Gather => {
            let mut body = gather(partial, false);
            let (rows, _) = body.units.blocks(args.channel.rank);
            flow::gather(&launch, rows, &mut body)
        }
        Kernel::Gathered => {
            let mut body = gather(partial, false);
            flow::local(&launch, body.tiles(), &mut body)
        }
        Kernel::Pull => {
            let mut body = gather(partial, true);
            flow::pull(&launch, body.tiles(), &mut body)
        }
        Kernel::Staged => {
            let mut body = gather(partial, true);
            let (units, across) = (body.units, body.across());
            let staging = gather::StagedUnits { units, rank: args.channel.rank, across };
            flow::staged(&launch, args.dedicated_workgroups, &staging, &mut body)
        }
        Kernel::AllGather => deliver(partial, deliver::TileRoutes::AllGather(split)),
        Kernel::AllToAll => deliver(partial, deliver::TileRoutes::AllToAll(split)),
        Kernel::Broadcast => {
            deliver(partial, deliver::TileRoutes::Broadcast { grid, root: args.root })
        }
        Kernel::Relay => {
            let root = args.root;
            let plan = deliver::TileRoutes::Broadcast { grid, root };
            let relays = flow::Relays { tiles: grid.tiles(), root, size };
            flow::relay(&launch, &relays, &mut deliver::Deliver { partial, words: &words, plan })
        }
        Kernel::Open => flow::open(&launch),
        Kernel::Copies => copies(partial, deliver::TileRoutes::AllGather(split), 0),
        Kernel::Blocks => copies(partial, deliver::TileRoutes::AllToAll(split), 0),
        Kernel::Results => {
            // Signals of the results are numbered after the signals of Kernel::Blocks, which uses
            // one signal per tile of the largest rank's part.
            copies(partial, deliver::TileRoutes::AllGather(split), split.part(0).tiles())
        }
        Kernel::Sums => sums::run(&launch, grid, partial),
        Kernel::Gate { source, first, parts } => flow::gate(&launch, source, (first, parts)),
        Kernel::Close => flow::close(&launch),
        // CPU kernels trace their own spans, so no time stamp is written.
        Kernel::Stamp { .. } => Ok(()),
        Kernel::Norm => {
            norm::run(args, index, count);
            Ok(())
        }
        Kernel::AllGatherListLl => ll_list::run(&launch, args),
        Kernel::OneShotLl
        | Kernel::ReduceScatterLl
        | Kernel::OneShotCombineLl
        | Kernel::ReduceScatterCombineLl
        | Kernel::AllGatherLl
        | Kernel::AllToAllLl
        | Kernel::BroadcastLl
        | Kernel::TwoShotLl
        | Kernel::RelayLl => ll::run(&launch, kernel, args),
        Kernel::Barrier { phase, members, last } => {
            let end = if last { End::Advance } else { End::Keep };
            flow::barrier(&launch, phase, members, end)
        }
    }
}

/// Matrix product of this rank alone, which needs neither synchronisation words nor a call number.
fn local(
    launch: &Launch<'_, Words<'_>>,
    grid: Grid,
    mut partial: Partial<'_>,
) -> Result<(), Aborted> {
    use iris_sync::{Memory, Span};
    for tile in (launch.index..grid.tiles()).step_by(launch.count as usize) {
        launch.m.begin(Span::Gemm, tile);
        let area = grid.tile(tile);
        if partial.is_copy() {
            let args = partial.args;
            view::copy(&args.a, area, &args.c, area, &mut partial.scratch);
        } else {
            partial.produce(area);
            partial.finish(area);
        }
        launch.m.end(Span::Gemm);
    }
    Ok(())
}
