//! A product behind a gather by copy engines: each rank's own rows are multiplied while those of the
//! others are on their way, and theirs part by part as they come.

use std::ops::Range;
use std::sync::Arc;

use iris_heap::{DeviceCopy, Result, Stream, SymmetricHeap};

use super::{Ahead, Launcher, rows_of};
use crate::args::{Matrix, OpArgs, element_bytes};
use crate::kernel::Kernel;
use crate::schedule::{Grid, SplitGrid, split};

impl Launcher {
    /// Enqueue one of the steps of such a call: [`Kernel::Open`], [`Kernel::Copies`] with the products,
    /// [`Kernel::Close`]. `message` is what gathers A.
    ///
    /// # Safety
    /// As for [`Launcher::launch`].
    pub(super) unsafe fn copied(
        &self,
        heap: &Arc<SymmetricHeap>,
        stream: &Stream,
        (op, kernel): (&'static str, Kernel),
        (ahead, args, message): (&Ahead, &OpArgs, &OpArgs),
        groups: u32,
    ) -> Result<()> {
        // SAFETY: as the caller says.
        let enqueue =
            |kernel, groups| unsafe { self.enqueue(heap, stream, (op, kernel), *message, groups) };
        let by_engine = kernel != Kernel::Open && goes_by_engine(heap, ahead, args, message);
        if kernel != Kernel::Copies {
            if kernel == Kernel::Close && by_engine {
                heap.gpu()?.join_copies(stream)?;
            }
            return enqueue(kernel, 1);
        }
        let gate = |source, parts: Range<u32>| {
            let (first, parts) = (parts.start, parts.end - parts.start);
            enqueue(Kernel::Gate { source, first, parts }, 1)
        };
        // SAFETY: the caller vouches for the matrices and the workspace, where A has room.
        let product = |a: Matrix, rows: Range<u32>| unsafe {
            ahead.product(heap, stream, of_rows(args, a, rows)).map(drop)
        };
        let products = || ahead.products(args, message, gate, product);
        if !by_engine {
            return enqueue(kernel, groups).and_then(|()| products());
        }
        // SAFETY: the caller vouches for A, and for the workspace of all ranks.
        let copied = unsafe { heap.gpu()?.copy_beside(stream, &copies(args, message)) };
        let done = copied.and_then(|()| products());
        if done.is_err() {
            // The call will never end; a graph that it is captured in still must.
            heap.gpu()?.join_copies(stream)?;
        }
        done
    }
}

impl Ahead {
    /// Each product behind the gate of what it multiplies.
    fn products(
        &self,
        args: &OpArgs,
        message: &OpArgs,
        gate: impl Fn(u32, Range<u32>) -> Result<()>,
        product: impl Fn(Matrix, Range<u32>) -> Result<()>,
    ) -> Result<()> {
        let split_grid = split_grid(message);
        let a = self.gathered(args);
        let channel = &args.channel;
        if args.shard == 1 {
            // Each row needs all of them.
            for source in channel.peers() {
                gate(source, 0..split_grid.part(source).tiles())?;
            }
            return product(a, 0..args.m);
        }
        product(args.a, split(args.m, channel.size, channel.rank))?;
        // Of all peers in turns, as they come.
        let most = channel.peers().map(|source| blocks(&split_grid, source).count()).max();
        for at in 0..most.unwrap_or(0) {
            for source in channel.peers() {
                let Some((tiles, rows)) = blocks(&split_grid, source).nth(at) else { continue };
                gate(source, tiles)?;
                product(rows_of(a, &rows), rows)?;
            }
        }
        Ok(())
    }
}

/// Whether a copy engine moves the rows, and not workgroups: these must where ranks share a device, whose
/// engines could stand behind each other; for rows with gaps; for columns, which are no rows in memory;
/// and where what is moved is counted or held up.
fn goes_by_engine(heap: &SymmetricHeap, ahead: &Ahead, args: &OpArgs, message: &OpArgs) -> bool {
    let line = u64::from(args.k);
    let gaps = args.a.transposed == 1 || args.a.ld != line || message.c.ld != line;
    let kept = heap.device().kind.traits().host_threads || heap.sharing() > 1;
    !(kept || gaps || args.shard == 1 || ahead.observed)
}

/// What it moves: each part of this rank's rows to all peers, each with the word behind it that says so.
fn copies(args: &OpArgs, message: &OpArgs) -> Vec<DeviceCopy> {
    let (heap, channel, c) = (&args.heap, &args.channel, message.c);
    let own = heap.data[heap.rank as usize];
    let allowed = heap.device_words + 4 * u64::from(channel.flag(0).index);
    let line = u64::from(args.k) * element_bytes(args.a.dtype) as u64;
    let first = split(args.m, channel.size, channel.rank).start;
    let mut copies = Vec::new();
    for (tiles, rows) in blocks(&split_grid(message), channel.rank) {
        for peer in channel.peers() {
            copies.push(DeviceCopy {
                to: c.address - own + heap.data[peer as usize] + u64::from(rows.start) * line,
                from: args.a.address + u64::from(rows.start - first) * line,
                bytes: u64::from(rows.end - rows.start) * line,
            });
            copies.extend(tiles.clone().map(|tile| {
                let signal = channel.signal(peer, channel.rank, tile);
                let to = heap.signal[peer as usize] + 4 * u64::from(signal.index);
                DeviceCopy { to, from: allowed, bytes: 4 }
            }));
        }
    }
    copies
}

/// The parts of a gather.
fn split_grid(message: &OpArgs) -> SplitGrid {
    let OpArgs { m, n, tile_m, tile_n, .. } = *message;
    SplitGrid { grid: Grid { rows: m, cols: n, tile_m, tile_n }, size: message.channel.size }
}

/// What `source` sends, a row of tiles at a time: their numbers, and the rows of the whole matrix.
fn blocks(grid: &SplitGrid, source: u32) -> impl Iterator<Item = (Range<u32>, Range<u32>)> + use<> {
    let (part, first) = (grid.part(source), split(grid.grid.rows, grid.size, source).start);
    let across = part.across();
    (0..part.rows.div_ceil(part.tile_m)).map(move |block| {
        // Without columns there are rows still, and no tile.
        let row = block * part.tile_m;
        let rows = first + row..first + part.rows.min(row + part.tile_m);
        (block * across..(block + 1) * across, rows)
    })
}

/// The arguments of the product of these rows of A, which are `a`.
fn of_rows(args: &OpArgs, a: Matrix, rows: Range<u32>) -> OpArgs {
    OpArgs { a, c: rows_of(args.c, &rows), m: rows.end - rows.start, ..*args }
}
