//! GEMMs of an operator's program: the implementations that are available on a device, and their
//! launches.

use std::sync::Arc;

use iris_heap::{Error, Result, SymmetricHeap};

use super::call::Call;
use super::kernels::{KernelSet, Workgroups};
use super::message::Message;
use crate::args::OpArgs;
use crate::build::OpBuild;
use crate::gemm::{Exchanging, Gathering, Messages, Parts, Scattering};
use crate::kernel::Kernel;
use crate::library::GemmRequest;
use crate::library_gemm::LibraryGemm;
use crate::program::{Alternative, Area, At, Core, Gemm, Program, Step, Transfer, When, Work};

/// GEMM implementations that a program can use on a device.
#[derive(Debug)]
pub(super) struct Gemms {
    pub(super) whole: GemmRequest,
    /// Plain whole-matrix GEMM, of the vendor's library or built in; `None` if neither supports
    /// the matrices.
    library: Option<Arc<LibraryGemm>>,
    /// Kernels of the tile GEMM (the product of the fused kernels), for products that no
    /// whole-matrix GEMM can do. `None` if the program has replacement steps for such products.
    tiles: Option<KernelSet>,
    fused: Fused,
}

/// GEMM fused with communication: it waits for data from peers, or stores its result at peers. A
/// program uses at most one kind.
#[derive(Debug)]
enum Fused {
    None,
    Gated(Gathering),
    Storing(Scattering),
    Exchanging(Exchanging),
}

impl Gemms {
    /// Loads the GEMMs for a program on the heap's device. `op` describes the builds of the message
    /// kernels, which only exchange data.
    ///
    /// # Errors
    /// Errors of [`KernelSet::new`] and [`LibraryGemm::new`].
    pub(super) fn new(
        heap: &SymmetricHeap,
        op: &OpBuild,
        program: &Program,
        whole: &GemmRequest,
        by_workgroups: bool,
    ) -> Result<Self> {
        let (tile_m, tile_n) = whole.tile;
        let matmul = OpBuild { op: "matmul", product: true, norm: false, tile_m, tile_n, ..*op };
        let tiles = needs_tiles(program).then(|| KernelSet::new(heap, &matmul, &[Kernel::Local]));
        let tiles = tiles.transpose()?;
        let library = LibraryGemm::new(heap, whole)?.map(Arc::new);
        Ok(Gemms {
            whole: *whole,
            library,
            tiles,
            fused: fused(heap, op, program, whole, by_workgroups)?,
        })
    }

    /// Returns a copy that has neither the library's nor the built-in whole-matrix GEMMs, only the
    /// tile GEMM. It is needed if not all ranks of the world have the other GEMMs. Where the bits of
    /// a product must not depend on its call, the copy lacks only the fused GEMM, because the tile
    /// GEMM may have other bits than the whole-matrix GEMM.
    pub(super) fn without_library(&self) -> Self {
        let library = self.library.clone().filter(|_| self.whole.batch_invariant);
        Gemms { whole: self.whole, library, tiles: self.tiles.clone(), fused: Fused::None }
    }

    /// Returns name and version of the GEMM libraries, which ranks compare; `None` if there are
    /// none. The GEMM that exchanges its result itself ([`Fused::Exchanging`]) is not named,
    /// because ranks need not agree on it: a rank without it does the same call in two launches.
    pub(super) fn library(&self) -> Option<String> {
        let fused = match self.fused {
            Fused::Gated(_) => " or gemm_sm90_gather",
            Fused::Storing(_) => " or gemm_sm90_scatter",
            Fused::None | Fused::Exchanging(_) => "",
        };
        let library = self.library.as_ref()?;
        // With one set of bits, it does not matter which implementation a rank has.
        let title = if self.whole.batch_invariant { String::new() } else { library.title() };
        Some(title + fused)
    }

    /// Whether any call can meet the condition `when`.
    pub(super) fn may_meet(&self, when: When) -> bool {
        match when {
            When::Exchanges => matches!(self.fused, Fused::Exchanging(_)),
            When::Stores => matches!(self.fused, Fused::Storing(_)),
            When::Gated => matches!(self.fused, Fused::Gated(_)),
            // The library begins with the product of this rank, which is not the order of ranks.
            When::Adds => self.library.is_some() && !self.whole.batch_invariant,
            When::Engines | When::ByColumns | When::Wide => true,
        }
    }

    /// Whether the GEMM implementation that `gemm` requires, its core, can do this call.
    pub(super) fn fit(&self, call: &Call<'_>, gemm: &Gemm) -> bool {
        let places = call.places();
        match (gemm.core, &self.fused) {
            (Core::Adding, _) => {
                let rows = places.own_rows(At::default()).filter(|rows| !rows.is_empty());
                let library = self.library.as_ref().filter(|_| call.args.residual.address == 0);
                library.zip(rows).is_some_and(|(library, rows)| {
                    let (args, addend) = places.adding(gemm.to, &rows);
                    library.fits_adding(&args, &addend)
                })
            }
            (Core::Gated, Fused::Gated(gated)) => {
                call.parts_of_shards().is_some_and(|parts| gated.fits(call.args, &parts))
            }
            (Core::Storing { blocks, results }, Fused::Storing(storing)) => {
                storing.fits(&places.storing(gemm.to), &call.stored(blocks, results).of())
            }
            (Core::Exchanging(kernel), Fused::Exchanging(exchanging)) => {
                let product = places.product(gemm, At::default());
                product.is_some_and(|it| exchanging.fits(kernel, (&it, call.args)))
            }
            _ => false,
        }
    }
}

impl Call<'_> {
    /// Enqueues `gemm`. Returns true if the GEMM was enqueued or there is nothing to do, false if
    /// no GEMM implementation can do it in this call.
    pub(super) fn gemm(&self, gemm: &Gemm, at: At) -> Result<bool> {
        let Some(gemms) = &self.of.gemms else { return Ok(false) };
        let places = self.places();
        let gpu = || Ok::<_, Error>((self.heap.gpu()?, self.stream));
        match (gemm.core, &gemms.fused) {
            (Core::Any, _) => match places.product(gemm, at) {
                Some(args) => self.product(gemms, args, self.may_be_early(Work::Gemm(*gemm))),
                None => Ok(true),
            },
            (Core::Adding, _) => {
                let Some(library) = &gemms.library else { return Ok(false) };
                let Some(rows) = places.own_rows(at) else { return Ok(true) };
                let (args, addend) = places.adding(gemm.to, &rows);
                // SAFETY: `Call::new` requires live operands; the addend lies in the workspace, and
                // C does not.
                self.stamped(args.m, || unsafe {
                    library.enqueue_adding(self.heap, self.stream, &args, &addend, workspace(&args))
                })
            }
            (Core::Gated, Fused::Gated(gated)) => {
                let Some(parts) = self.parts_of_shards() else { return Ok(false) };
                let (all, message) =
                    (places.area(Area::Gathered), places.message(Transfer::Shards).args);
                // SAFETY: `Call::new` requires live operands; an earlier step has opened the call,
                // and copy engines deliver the parts of A.
                self.stamped(self.args.m, || unsafe {
                    gated.launch(gpu()?, self.args, (&all, &parts), &message)
                })
            }
            (Core::Storing { blocks, results }, Fused::Storing(storing)) => {
                let (args, messages) = (places.storing(gemm.to), self.stored(blocks, results));
                // SAFETY: `Call::new` requires live operands; an earlier step has opened the call,
                // and no other rank shares the device.
                self.stamped(args.m, || unsafe { storing.launch(gpu()?, &args, &messages.of()) })
            }
            (Core::Exchanging(kernel), Fused::Exchanging(exchanging)) => {
                let Some(product) = places.product(gemm, at) else { return Ok(true) };
                // SAFETY: `Call::new` requires live operands; `self.args` are the arguments of this
                // call.
                self.stamped(product.m, || unsafe {
                    exchanging.launch(gpu()?, kernel, (&product, self.args))
                })
            }
            _ => Ok(false),
        }
    }

    /// Enqueues, by calling `enqueue`, a GEMM that writes no trace itself. In a traced call, a
    /// small launch before the GEMM and one after it record the GEMM as one span of the first
    /// workgroup.
    fn stamped(&self, rows: u32, enqueue: impl FnOnce() -> Result<bool>) -> Result<bool> {
        if self.args.trace == 0 {
            return enqueue();
        }
        let stamp = |after| {
            let (on, kernel) = ((self.heap, self.stream), Kernel::Stamp { after, rows });
            // SAFETY: `Call::new` requires the conditions of `Executor::run`, which cover this
            // launch.
            unsafe { self.of.kernels.enqueue(on, kernel, self.args, (1.into(), false)) }
        };
        stamp(false)?;
        let done = enqueue()?;
        if done && let Err(error) = stamp(true) {
            // An error of the second stamp is only logged: the GEMM has been enqueued, and may be
            // the whole call.
            tracing::warn!(%error, "a GEMM is missing from the trace");
        }
        Ok(done)
    }

    /// Enqueues a plain product; returns false if neither the library nor the tile GEMM can do it.
    fn product(&self, gemms: &Gemms, mut args: OpArgs, early: bool) -> Result<bool> {
        // The library is not used for a product with a residual: only the tile GEMM can add a
        // residual.
        let library = gemms.library.as_ref().filter(|_| args.residual.address == 0);
        if let Some(library) = library.filter(|it| it.fits(&args)) {
            // SAFETY: `Call::new` requires live operands, including the workspace.
            let done = self.stamped(args.m, || unsafe {
                library.enqueue(self.heap, self.stream, &args, workspace(&args))
            })?;
            if done {
                return Ok(true);
            }
        }
        let Some(tiles) = &gemms.tiles else { return Ok(false) };
        (args.tile_m, args.tile_n) = gemms.whole.tile;
        let count = |len: u32, tile: u32| u64::from(len.div_ceil(tile));
        let work = count(args.m, args.tile_m) * count(args.n, args.tile_n);
        let groups =
            Workgroups::from(work.clamp(1, u64::from(tiles.max_coresident_workgroups())) as u32);
        let on = (self.heap, self.stream);
        // SAFETY: `Call::new` requires the conditions of `Executor::run`, which cover this launch.
        unsafe { tiles.enqueue(on, Kernel::Local, &args, (groups, early)) }?;
        Ok(true)
    }

    /// Parts in which the shards of A arrive, for a GEMM that waits for these parts; `None` if the
    /// ranks' shards have different sizes.
    fn parts_of_shards(&self) -> Option<Parts> {
        let OpArgs { ref channel, m, k, shard, .. } = *self.args;
        let message = self.places().message(Transfer::Shards);
        let columns = shard == 1;
        let shard = Parts::shard([m, k], channel.size, columns)?;
        let (mut part, mut step) =
            ([message.args.tile_m, message.args.tile_n], [message.across(), 1]);
        if columns {
            // If A is split by columns, the message is transposed: its rows are the columns of A.
            part.reverse();
            step.reverse();
        }
        Some(Parts { shard, part, first: message.first, step, columns })
    }

    /// Messages that need not be sent, because the GEMM itself stores their tiles at the peers.
    fn stored(&self, blocks: bool, results: Option<Transfer>) -> Stored {
        let places = self.places();
        Stored {
            blocks: blocks.then(|| places.message(Transfer::Blocks)),
            results: results.map(|of| places.message(of)),
        }
    }
}

/// Messages whose tiles a GEMM itself stores at the peers, kept alive while the GEMM is enqueued.
struct Stored {
    blocks: Option<Message>,
    results: Option<Message>,
}

impl Stored {
    fn of(&self) -> Messages<'_> {
        fn of(message: &Option<Message>) -> Option<(&OpArgs, u32)> {
            message.as_ref().map(|it| (&it.args, it.first))
        }
        Messages { blocks: of(&self.blocks), results: of(&self.results) }
    }
}

/// Address of the call's workspace. The GEMM library uses the first part of the workspace.
fn workspace(args: &OpArgs) -> u64 {
    args.heap.data[args.heap.rank as usize] + args.workspace
}

/// Whether a program has a product by [`Core::Any`] without replacement steps, so that the tile
/// GEMM must be loaded.
fn needs_tiles(program: &Program) -> bool {
    let mut found = false;
    program.each_step(&mut |Step { work, or }| {
        found |= matches!(work, Work::Gemm(Gemm { core: Core::Any, .. })) && or.is_empty();
    });
    found
}

/// Loads the fused GEMM that the program needs, if the device has a build of it.
fn fused(
    heap: &SymmetricHeap,
    op: &OpBuild,
    program: &Program,
    whole: &GemmRequest,
    by_workgroups: bool,
) -> Result<Fused> {
    if heap.device().kind.traits().host_threads {
        return Ok(Fused::None);
    }
    if program.asks(When::Gated) && whole.gated {
        let gated = Gathering::new(heap, whole, op.fault_injection)?;
        return Ok(gated.map_or(Fused::None, Fused::Gated));
    }
    // Other fused GEMMs have no builds that add the products of several ranges of K.
    if whole.k_parts > 1 {
        return Ok(Fused::None);
    }
    if program.asks(When::Stores) && whole.signalled.is_some() && whole.library.may_fuse() {
        let storing = Scattering::new(heap, whole, op.fault_injection)?;
        return Ok(storing.map_or(Fused::None, Fused::Storing));
    }
    if whole.exchanges && !by_workgroups {
        let exchanges = |of: &&Alternative| program.takes(of) && of.when.contains(&When::Exchanges);
        let exchanging = program.alternatives.iter().find(exchanges);
        let kernel = match exchanging.and_then(|of| program.special_gemm(of)) {
            Some(Gemm { core: Core::Exchanging(kernel), .. }) => Some(kernel),
            _ => None,
        };
        let new = |kernel| Exchanging::new(heap, whole, op, kernel);
        let exchanging = kernel.map(new).transpose()?.flatten();
        return Ok(exchanging.map_or(Fused::None, Fused::Exchanging));
    }
    Ok(Fused::None)
}
