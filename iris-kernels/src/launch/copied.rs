//! Products beside messages that copy engines move. Ahead of a product its A is gathered: each rank's own
//! rows are multiplied while those of the others are on their way, and theirs part by part as they come.
//! Behind a product its rows leave part by part as they are finished: each rank's rows of the partial to it,
//! which adds them up, and its sums, or its rows of C, to all.
//!
//! Long because a call that gathers, one that scatters and one that gives rows to all are made of the same steps.

mod message;

use std::ops::Range;
use std::sync::Arc;

use iris_heap::{DeviceCopy, Result, Stream, SymmetricHeap};
use iris_sync::Record;

use super::{Ahead, Launcher, Role};
use crate::args::{Matrix, OpArgs, producer, rows_of};
use crate::gemm::{Gathering, Messages, Parts};
use crate::kernel::Kernel;
use crate::schedule::split;
use crate::whole::WholeProduct;
use message::{Message, Part};

/// Columns of a product from which on a row of A takes longer to be multiplied than to come from a peer: on
/// an H200, at 7.5e14 flop/s and 3.85e11 B/s of two-byte elements, 1950.
const COLUMNS: u32 = 2048;

/// One call, as far as its steps are enqueued by it.
struct Call<'a> {
    launcher: &'a Launcher,
    ahead: &'a Ahead,
    heap: &'a Arc<SymmetricHeap>,
    stream: &'a Stream,
    op: &'static str,
    args: &'a OpArgs,
    /// What travels first: the shards of A, the blocks of partials, or the rows of C.
    message: Message,
    /// The sums of blocks, which travel then.
    results: Option<Message>,
    /// Whether one product does these messages itself.
    stores: bool,
}

impl Launcher {
    /// Enqueue one of the steps of such a call: [`Kernel::Open`]; [`Kernel::Copies`] or [`Kernel::Blocks`],
    /// with all that is multiplied and added up; [`Kernel::Close`].
    ///
    /// # Safety
    /// As for [`Launcher::launch`].
    pub(super) unsafe fn copied(
        &self,
        heap: &Arc<SymmetricHeap>,
        stream: &Stream,
        (op, kernel): (&'static str, Kernel),
        (ahead, args): (&Ahead, &OpArgs),
        groups: u32,
    ) -> Result<()> {
        let nothing = || super::unsupported(format!("copies of {op}"), "it sends nothing");
        let of = |args| -> Result<Call<'_>> {
            let [message, results] = ahead.messages(args);
            let message = message.ok_or_else(nothing)?;
            let stores = false;
            Ok(Call { launcher: self, ahead, heap, stream, op, args, message, results, stores })
        };
        let mut call = of(args)?;
        call.stores = call.stores_itself()?;
        // Only such a product writes into C of peers; what it says of C has to be the same in all launches.
        let indirect;
        if ahead.whole.signalled.is_some() && !call.stores {
            indirect = OpArgs { record: Record { direct: 0, ..args.record }, ..*args };
            call = of(&indirect)?;
        }
        let by_engine = kernel != Kernel::Open && call.goes_by_engine()?;
        match kernel {
            Kernel::Open => call.enqueue(kernel, 1),
            Kernel::Close => {
                if by_engine {
                    heap.gpu()?.join_copies(stream)?;
                }
                call.enqueue(kernel, 1)
            }
            _ => {
                let done = match ahead.role {
                    Role::Gather => call.gather(kernel, groups, by_engine),
                    Role::Scatter | Role::Sum => call.scatter(kernel, groups, by_engine),
                    Role::Rows => call.rows(kernel, groups, by_engine),
                    Role::None => Ok(()),
                };
                if done.is_err() && by_engine {
                    // The call will never end; a graph that it is captured in still must.
                    heap.gpu()?.join_copies(stream)?;
                }
                done
            }
        }
    }
}

/// All of it is as safe as [`Launcher::copied`] was called: the caller vouches for the matrices, and for the
/// workspace of all ranks.
impl Call<'_> {
    /// Shards of A, then the products of what has come.
    fn gather(&self, kernel: Kernel, groups: u32, by_engine: bool) -> Result<()> {
        let (args, message) = (self.args, &self.message);
        let gathering = self.gathering().filter(|_| by_engine);
        // Of columns all go to where A is gathered, this rank's own, too, but for a product that finds them.
        if by_engine && (args.shard == 0 || gathering.is_some()) {
            self.copy(message, message.sent(args.channel.rank))?;
        } else {
            self.enqueue(kernel, groups)?;
        }
        let a = self.ahead.gathered(args);
        if let Some((gathering, parts)) = gathering {
            let (on, to) = ((self.heap.gpu()?, self.stream), (&a, &parts));
            // SAFETY: as the caller of `copied` says: the call is open, and engines copy.
            unsafe { gathering.launch(on, args, to, &message.args) }?;
            return Ok(());
        }
        if args.shard == 1 {
            // Each row needs all of them.
            self.arrive(message, |source| message.all(source))?;
            return self.product(a, 0..args.m, args);
        }
        let own = message.own();
        self.product(args.a, own.clone(), args)?;
        if args.n >= COLUMNS * (args.channel.size - 1) {
            // They come in the time of the product above; few products lose less than many.
            self.arrive(message, |source| message.all(source))?;
            for rows in [0..own.start, own.end..args.m].into_iter().filter(|rows| !rows.is_empty())
            {
                self.product(rows_of(a, &rows), rows, args)?;
            }
            return Ok(());
        }
        // Of all peers in turns, as they come.
        for at in 0..message.most() {
            for source in args.channel.peers() {
                let Some(part) = message.comes(source).nth(at) else { continue };
                self.gate(message, source, part.tiles)?;
                let rows = message.placed(source, &part.rows);
                self.product(rows_of(a, &rows), rows, args)?;
            }
        }
        Ok(())
    }

    /// The product that waits for what comes from others itself, and how that comes, if there is a build for
    /// it.
    fn gathering(&self) -> Option<(&Gathering, Parts)> {
        let Self { args, message, .. } = self;
        let gathering = self.ahead.gathering.as_ref()?;
        let (size, columns) = (args.channel.size, args.shard == 1);
        let split = usize::from(columns);
        let mut shard = [args.m, args.k];
        // As much of each rank.
        if !shard[split].is_multiple_of(size) {
            return None;
        }
        shard[split] /= size;
        let (mut part, mut step) =
            ([message.args.tile_m, message.args.tile_n], [message.across(), 1]);
        if columns {
            // The message's rows are columns here.
            part.reverse();
            step.reverse();
        }
        let parts = Parts { shard, part, first: message.first, step, columns };
        gathering.fits(args, &parts).then_some((gathering, parts))
    }

    /// The products of what others own, which leaves for them; then of what this rank owns, to which theirs
    /// is added. Where the sums go to all, that is part by part: a part that this rank owns comes behind
    /// the next of the others, so that theirs has come by then, and the sums leave among what follows.
    fn scatter(&self, kernel: Kernel, groups: u32, by_engine: bool) -> Result<()> {
        let (args, message) = (self.args, &self.message);
        if self.stores {
            self.stored()?;
            return self.results.as_ref().map_or(Ok(()), |results| self.take(results));
        }
        let by_engine = by_engine && self.ahead.whole.signalled.is_none();
        let partial = self.ahead.partial(args);
        let own = message.own();
        let product = |rows: Range<u32>| self.product(rows_of(args.a, &rows), rows, &partial);
        if !by_engine {
            product(0..args.m)?;
            self.enqueue(kernel, groups)?;
            self.arrive(message, |source| message.all(source))?;
            self.sum(0..own.end - own.start)?;
            let Some(results) = &self.results else { return Ok(()) };
            self.enqueue(Kernel::Results, groups)?;
            return self.take(results);
        }
        let adds = self.adds();
        let own_part = |part: Part| {
            if adds {
                self.arrive(message, |_| part.tiles.clone())?;
                self.add(&part.rows)?;
            } else {
                product(message.taken(args.channel.rank, &part.rows))?;
                self.arrive(message, |_| part.tiles.clone())?;
                self.sum(part.rows.clone())?;
            }
            match &self.results {
                Some(results) => self.copy(results, std::iter::once(part)),
                None => Ok(()),
            }
        };
        let mut parts = message.sent(args.channel.rank);
        for at in 0..message.most() {
            for peer in args.channel.peers() {
                if let Some(part) = message.sent(peer).nth(at) {
                    product(message.taken(peer, &part.rows))?;
                    self.send(message.copies(peer, &part))?;
                }
            }
            if at > 0 && self.results.is_some() {
                parts.next().map_or(Ok(()), own_part)?;
            }
        }
        if !adds && self.results.is_none() {
            // Nothing is done with a part before all are there.
            product(own.clone())?;
            self.arrive(message, |source| message.all(source))?;
            return self.sum(0..own.end - own.start);
        }
        parts.try_for_each(own_part)?;
        self.results.as_ref().map_or(Ok(()), |results| self.take(results))
    }

    /// What a product stores itself, and its arguments.
    fn to_store(&self) -> (OpArgs, Messages<'_>) {
        let first = Some((&self.message.args, self.message.first));
        let then = self.results.as_ref().map(|it| (&it.args, it.first));
        let (messages, c) = match self.ahead.role {
            Role::Rows => {
                let own = rows_of(self.args.c, &self.message.own());
                (Messages { blocks: None, results: first }, own)
            }
            _ => (Messages { blocks: first, results: then }, self.own_c()),
        };
        (OpArgs { c, residual: self.own_residual(), ..*self.args }, messages)
    }

    /// Whether one product does the messages itself: there is a build for it, and no rank shares the device.
    fn stores_itself(&self) -> Result<bool> {
        let (args, messages) = self.to_store();
        let scattering = self.ahead.scattering.as_ref();
        let fits = scattering.is_some_and(|it| it.fits(&args, &messages));
        Ok(fits && self.goes_by_engine()?)
    }

    /// That product.
    fn stored(&self) -> Result<()> {
        let (args, messages) = self.to_store();
        let Some(scattering) = &self.ahead.scattering else { return Ok(()) };
        let on = (self.heap.gpu()?, self.stream);
        // SAFETY: as the caller of `copied` says: the call is open. No rank shares the device.
        unsafe { scattering.launch(on, &args, &messages) }.map(drop)
    }

    /// The products of this rank's rows of C, which leave for all.
    fn rows(&self, kernel: Kernel, groups: u32, by_engine: bool) -> Result<()> {
        let (args, message) = (self.args, &self.message);
        let own = message.own();
        if self.stores {
            self.stored()?;
            return self.take(message);
        }
        let by_engine = by_engine && self.ahead.whole.signalled.is_none();
        let product = |rows: Range<u32>| {
            let within = rows.start - own.start..rows.end - own.start;
            self.product(rows_of(args.a, &within), rows, args)
        };
        if !by_engine {
            product(own.clone())?;
            self.enqueue(kernel, groups)?;
            return self.take(message);
        }
        for part in message.sent(args.channel.rank) {
            product(message.placed(args.channel.rank, &part.rows))?;
            self.copy(message, std::iter::once(part))?;
        }
        self.take(message)
    }

    /// Enqueue a kernel of the message.
    fn enqueue(&self, kernel: Kernel, groups: u32) -> Result<()> {
        let args = match (&self.results, kernel) {
            (Some(results), Kernel::Results) => results.args,
            _ => self.message.args,
        };
        self.launch(kernel, args, groups)
    }

    fn launch(&self, kernel: Kernel, args: OpArgs, groups: u32) -> Result<()> {
        // SAFETY: as the caller of `copied` says.
        unsafe {
            self.launcher.enqueue(self.heap, self.stream, (self.op, kernel), args, groups.into())
        }
    }

    /// The product of some rows: `a` are those of A, `rows` their place in C of `args`.
    fn product(&self, a: Matrix, rows: Range<u32>, args: &OpArgs) -> Result<()> {
        let c = rows_of(args.c, &rows);
        let args = OpArgs { a, c, m: rows.end - rows.start, ..*args };
        // SAFETY: as the caller of `copied` says.
        unsafe { self.ahead.product(self.heap, self.stream, args) }.map(drop)
    }

    /// Let the engine copy these parts to all, from what is enqueued by now on.
    fn copy(&self, message: &Message, parts: impl Iterator<Item = Part>) -> Result<()> {
        let peers = || self.args.channel.peers();
        let copies = parts.flat_map(|part| peers().flat_map(move |to| message.copies(to, &part)));
        self.send(copies.collect())
    }

    fn send(&self, copies: Vec<DeviceCopy>) -> Result<()> {
        // SAFETY: as the caller of `copied` says.
        unsafe { self.heap.gpu()?.copy_beside(self.stream, &copies) }
    }

    /// Wait for these tiles of a source, on the device.
    fn gate(&self, message: &Message, source: u32, tiles: Range<u32>) -> Result<()> {
        let (first, parts) = (message.first + tiles.start, tiles.end - tiles.start);
        self.enqueue(Kernel::Gate { source, first, parts }, 1)
    }

    /// The same of all peers.
    fn arrive(&self, message: &Message, tiles: impl Fn(u32) -> Range<u32>) -> Result<()> {
        self.args.channel.peers().try_for_each(|source| self.gate(message, source, tiles(source)))
    }

    /// What this rank owns of C.
    fn own_c(&self) -> Matrix {
        self.owned(self.args.c)
    }

    /// What is added to that, once, by its owner.
    fn own_residual(&self) -> Matrix {
        self.owned(self.args.residual)
    }

    fn owned(&self, matrix: Matrix) -> Matrix {
        match self.results {
            Some(_) if matrix.address != 0 => rows_of(matrix, &self.message.own()),
            _ => matrix,
        }
    }

    /// The product of these rows of what this rank owns, to which what has come from the one peer is added
    /// while it is multiplied.
    fn adding(&self, rows: &Range<u32>) -> (OpArgs, Matrix) {
        let taken = self.message.taken(self.args.channel.rank, rows);
        let (a, c) = (rows_of(self.args.a, &taken), rows_of(self.own_c(), rows));
        // A block from each source, this rank's own, too.
        let own = self.message.own();
        let peer = (1 - self.args.channel.rank) * (own.end - own.start);
        let addend = rows_of(self.message.args.c, &(peer + rows.start..peer + rows.end));
        (OpArgs { a, c, m: rows.end - rows.start, ..*self.args }, addend)
    }

    /// Whether there is one peer, and the library adds: asked of all rows at once. Not where there is one
    /// part: it would wait for the peer's before it is multiplied, which takes longer than a sum (106 and 130
    /// us for 1024 rows on 2 x H200, 2026-11-22; of 8192 rows in four parts an all-reduce took 791 with it,
    /// 806 without).
    fn adds(&self) -> bool {
        let own = self.message.own();
        let alone = self.args.residual.address == 0;
        self.args.channel.size == 2 && alone && self.message.most() > 1 && !own.is_empty() && {
            let (args, addend) = self.adding(&(0..own.end - own.start));
            self.ahead.product.as_ref().is_some_and(|it| it.fits_adding(&args, &addend))
        }
    }

    fn add(&self, rows: &Range<u32>) -> Result<()> {
        let (args, addend) = self.adding(rows);
        let workspace = args.heap.data[args.heap.rank as usize] + args.workspace;
        let product = self.ahead.product.as_ref();
        // SAFETY: as the caller of `copied` says; the addend lies in the workspace, and C does not.
        let add = |it: &WholeProduct| unsafe {
            it.enqueue_adding(self.heap, self.stream, &args, &addend, workspace)
        };
        if product.map(add).transpose()? == Some(true) {
            return Ok(());
        }
        // The library has found only now that it does not.
        let taken = self.message.taken(args.channel.rank, rows);
        self.product(args.a, taken, &self.ahead.partial(self.args))?;
        self.sum(rows.clone())
    }

    /// Add up these rows of what this rank owns.
    fn sum(&self, rows: Range<u32>) -> Result<()> {
        let Message { args: message, .. } = &self.message;
        let own = self.message.own();
        let apart = u64::from(own.end - own.start) * message.c.ld * message.c.element_bytes();
        let args = OpArgs {
            a: rows_of(rows_of(message.a, &own), &rows),
            b: rows_of(message.c, &rows),
            c: rows_of(self.own_c(), &rows),
            bias: self.args.bias,
            residual: match self.own_residual() {
                it if it.address == 0 => it,
                it => rows_of(it, &rows),
            },
            epilogue: self.args.epilogue,
            slot: apart,
            sources: self.args.channel.size,
            ..*message
        };
        self.spread(args)
    }

    /// What has come from all, to its place in C.
    fn take(&self, message: &Message) -> Result<()> {
        if self.ahead.whole.signalled.is_some() {
            // All at once: there are many parts, and they have come when the product is over.
            self.arrive(message, |source| message.all(source))?;
            return self.args.channel.peers().try_for_each(|source| {
                let rows = split(self.args.m, self.args.channel.size, source);
                self.take_rows(message, source, &rows)
            });
        }
        for at in 0..message.most() {
            for source in self.args.channel.peers() {
                let Some(part) = message.comes(source).nth(at) else { continue };
                self.gate(message, source, part.tiles)?;
                self.take_rows(message, source, &message.placed(source, &part.rows))?;
            }
        }
        Ok(())
    }

    fn take_rows(&self, message: &Message, root: u32, rows: &Range<u32>) -> Result<()> {
        let (a, c) = (rows_of(message.args.c, rows), rows_of(self.args.c, rows));
        self.spread(OpArgs { a, c, sources: 1, root, ..message.args })
    }

    /// A sum of rows that are there, by all workgroups.
    fn spread(&self, args: OpArgs) -> Result<()> {
        /// Elements of a tile, at least: several vectors for each thread.
        const ENOUGH: u32 = 16 << 10;
        let (rows, tile_n) = (args.a.rows, args.n.clamp(1, ENOUGH));
        let tile_m = (ENOUGH / tile_n).clamp(1, rows.max(1));
        let tiles = rows.div_ceil(tile_m).saturating_mul(args.n.div_ceil(tile_n));
        let groups = tiles.clamp(1, self.launcher.resident());
        self.launch(Kernel::Sums, OpArgs { m: rows, tile_m, tile_n, ..args }, groups)
    }

    /// Whether copies of the driver move the rows, and not workgroups: these must where ranks share a device,
    /// whose engines could stand behind each other; where elements change their type or order; where what
    /// is moved is counted or held up; and in a capture that cannot order a signal behind its data.
    fn goes_by_engine(&self) -> Result<bool> {
        let kept = self.heap.device().kind.traits().host_threads || self.heap.sharing() > 1;
        let messages = std::iter::once(&self.message).chain(&self.results);
        let alike = messages.into_iter().all(Message::is_alike);
        Ok(alike && !kept && !self.ahead.observed && self.heap.gpu()?.copies_signal(self.stream)?)
    }
}

impl Ahead {
    /// What travels in a call: first, and then.
    fn messages(&self, args: &OpArgs) -> [Option<Message>; 2] {
        let OpArgs { n, .. } = *args;
        let size = args.channel.size;
        let own = split(args.m, size, args.channel.rank);
        let message = |a: Matrix, c: Matrix| OpArgs {
            a,
            c,
            b: Matrix::default(),
            bias: Matrix::default(),
            residual: Matrix::default(),
            k: 0,
            epilogue: 0,
            producer: producer::LOAD,
            ..*args
        };
        match self.role {
            Role::None => [None, None],
            Role::Gather => [Some(Message::gather(self.gather(args))), None],
            Role::Rows => {
                let rows =
                    message(rows_of(args.c, &own), self.kept(args, (args.m, n), args.c.dtype));
                [Some(Message::gather(rows)), None]
            }
            Role::Scatter | Role::Sum => {
                let partial = self.partial(args).c;
                // Of every rank as many rows as the largest part, so that what follows lies at the same
                // place on all ranks.
                let rows = split(args.m, size, 0).end;
                let inbox = Matrix {
                    address: partial.end(),
                    rows: size * (own.end - own.start),
                    ..partial
                };
                let blocks = Message::scatter(message(partial, inbox));
                let end = Matrix { rows: size * rows, ..inbox }.end();
                let sums = Matrix { address: end, ..self.kept(args, (args.m, n), args.c.dtype) };
                let results = Message::gather(message(rows_of(args.c, &own), sums));
                let results = results.behind(&blocks);
                [Some(blocks), (self.role == Role::Sum).then_some(results)]
            }
        }
    }

    /// The arguments of the product of this rank's partial, which is kept. What is done to results is done
    /// once they are added up.
    fn partial(&self, args: &OpArgs) -> OpArgs {
        let c = self.kept(args, (args.m, args.n), args.wire);
        let (bias, residual) = (Matrix::default(), Matrix::default());
        OpArgs { c, bias, residual, epilogue: 0, ..*args }
    }
}
