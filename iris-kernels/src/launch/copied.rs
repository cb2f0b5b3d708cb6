//! A product behind a gather by copy engines: each rank's own rows are multiplied while those of the
//! others are on their way, and theirs part by part as they come.

use std::ops::Range;
use std::sync::Arc;

use iris_heap::{DeviceCopy, Result, Stream, SymmetricHeap};

use super::{Ahead, Launcher};
use crate::args::{DTYPES, Matrix, OpArgs};
use crate::kernel::Kernel;
use crate::schedule::{Grid, SplitGrid, split};

impl Launcher {
    /// Enqueue one of the steps of such a call: [`Kernel::Open`], [`Kernel::Copies`] with the products,
    /// [`Kernel::Close`].
    ///
    /// # Safety
    /// As for [`Launcher::launch`].
    pub(super) unsafe fn copied(
        &self,
        heap: &Arc<SymmetricHeap>,
        stream: &Stream,
        (op, kernel): (&'static str, Kernel),
        ahead: &Ahead,
        args: &OpArgs,
        groups: u32,
    ) -> Result<()> {
        let message = ahead.gather(args);
        let copies = self.by_engine(heap, ahead, args, &message);
        // SAFETY: as the caller says.
        let enqueue =
            |kernel, groups| unsafe { self.enqueue(heap, stream, (op, kernel), message, groups) };
        if kernel != Kernel::Copies {
            if kernel == Kernel::Close && copies.is_some() {
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
        let products = || self.products(ahead, args, &message, gate, product);
        let Some(copies) = copies else { return enqueue(kernel, groups).and_then(|()| products()) };
        // SAFETY: the caller vouches for A, and for the workspace of all ranks.
        let copied = unsafe { heap.gpu()?.copy_beside(stream, &copies) };
        let done = copied.and_then(|()| products());
        if done.is_err() {
            // The call will never end; a graph that it is captured in still must.
            heap.gpu()?.join_copies(stream)?;
        }
        done
    }

    /// Each product behind the gate of what it multiplies.
    fn products(
        &self,
        ahead: &Ahead,
        args: &OpArgs,
        message: &OpArgs,
        gate: impl Fn(u32, Range<u32>) -> Result<()>,
        product: impl Fn(Matrix, Range<u32>) -> Result<()>,
    ) -> Result<()> {
        let split_grid = split_grid(message);
        let a = ahead.gathered(args);
        let channel = &args.channel;
        if args.shard == 1 {
            // Each row needs all of them.
            for source in channel.peers() {
                gate(source, 0..split_grid.part(source).tiles())?;
            }
            return product(a, 0..args.m);
        }
        let own = split(args.m, channel.size, channel.rank);
        product(args.a, own)?;
        // Of all peers in turns, as they come.
        let blocks = |source| split_grid.part(source).rows.div_ceil(message.tile_m);
        let most = channel.peers().map(blocks).max().unwrap_or(0);
        for (block, source) in (0..most).flat_map(|block| channel.peers().map(move |s| (block, s)))
        {
            let part = split_grid.part(source);
            if block >= blocks(source) {
                continue;
            }
            let across = part.tiles() / blocks(source);
            gate(source, block * across..(block + 1) * across)?;
            let first = split(args.m, channel.size, source).start + block * message.tile_m;
            let rows = first..first + message.tile_m.min(part.rows - block * message.tile_m);
            product(rows_of(a, &rows), rows)?;
        }
        Ok(())
    }

    /// What a copy engine moves: each part of this rank's rows to all peers, each with the word behind it
    /// that says so. None where workgroups must: where ranks share a device, whose engines could stand
    /// behind each other; for rows with gaps; for columns, which are no rows in memory; and where what
    /// is moved is counted or held up.
    fn by_engine(
        &self,
        heap: &SymmetricHeap,
        ahead: &Ahead,
        args: &OpArgs,
        message: &OpArgs,
    ) -> Option<Vec<DeviceCopy>> {
        let (a, c) = (args.a, message.c);
        let line = u64::from(args.k);
        let gaps = a.transposed == 1 || a.ld != line || c.ld != line;
        let kept = heap.device().kind.traits().host_threads || heap.sharing() > 1;
        if kept || gaps || args.shard == 1 || ahead.observed {
            return None;
        }
        let (heap, channel) = (&args.heap, &args.channel);
        let part = split_grid(message).part(channel.rank);
        let blocks = part.rows.div_ceil(message.tile_m);
        let across = part.tiles().checked_div(blocks).unwrap_or(0);
        let bytes = line * dtype_bytes(a.dtype);
        let first = u64::from(split(args.m, channel.size, channel.rank).start);
        let own = heap.data[heap.rank as usize];
        let allowed = heap.device_words + 4 * u64::from(channel.flag(0).index);
        let mut copies = Vec::new();
        for (block, peer) in (0..blocks).flat_map(|block| channel.peers().map(move |p| (block, p)))
        {
            let from = u64::from(block * message.tile_m);
            let rows = u64::from(message.tile_m.min(part.rows - block * message.tile_m));
            copies.push(DeviceCopy {
                to: c.address - own + heap.data[peer as usize] + (first + from) * bytes,
                from: a.address + from * bytes,
                bytes: rows * bytes,
            });
            copies.extend((block * across..(block + 1) * across).map(|tile| {
                let signal = channel.signal(peer, channel.rank, tile);
                let to = heap.signal[peer as usize] + 4 * u64::from(signal.index);
                DeviceCopy { to, from: allowed, bytes: 4 }
            }));
        }
        Some(copies)
    }
}

/// The parts of a gather.
fn split_grid(message: &OpArgs) -> SplitGrid {
    let OpArgs { m, n, tile_m, tile_n, .. } = *message;
    SplitGrid { grid: Grid { rows: m, cols: n, tile_m, tile_n }, size: message.channel.size }
}

/// Bytes of an element.
fn dtype_bytes(dtype: u32) -> u64 {
    DTYPES[dtype as usize].size() as u64
}

/// Some rows of a matrix.
fn rows_of(matrix: Matrix, rows: &Range<u32>) -> Matrix {
    let apart = if matrix.transposed == 0 { matrix.ld } else { 1 };
    let address = matrix.address + u64::from(rows.start) * apart * dtype_bytes(matrix.dtype);
    Matrix { address, rows: rows.end - rows.start, ..matrix }
}

/// The arguments of the product of these rows of A, which are `a`.
fn of_rows(args: &OpArgs, a: Matrix, rows: Range<u32>) -> OpArgs {
    OpArgs { a, c: rows_of(args.c, &rows), m: rows.end - rows.start, ..*args }
}
