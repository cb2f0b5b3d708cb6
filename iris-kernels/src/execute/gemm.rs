//! The GEMMs of a program: which cores a device has for it, and one launch of one of them.

use iris_heap::{Error, Result, SymmetricHeap};

use super::call::Call;
use super::kernels::{KernelSet, Workgroups};
use super::message::Message;
use crate::args::{Matrix, OpArgs};
use crate::build::OpBuild;
use crate::gemm::{Exchanging, Gathering, Messages, Parts, Scattering};
use crate::kernel::Kernel;
use crate::library::{Library, Whole};
use crate::program::{Area, At, Core, Gemm, Program, Step, Transfer, When, Work};
use crate::whole::WholeProduct;

/// The cores that GEMMs of a program can take on a device.
#[derive(Debug)]
pub(super) struct Gemms {
    pub(super) whole: Whole,
    /// A library's GEMM, or ours that does nothing else.
    library: Option<WholeProduct>,
    /// The tile core, for what the library does not take; none where the program has steps in its place.
    tiles: Option<KernelSet>,
    fused: Fused,
}

/// The GEMM that waits for peers or stores to them: a program has one kind at most.
#[derive(Debug)]
enum Fused {
    None,
    Gated(Gathering),
    Storing(Scattering),
    Exchanging(Exchanging),
}

impl Gemms {
    /// Loads what there is on the heap's device for a program. `op` is the build of the message's kernels.
    ///
    /// # Errors
    /// Errors of [`KernelSet::new`] and [`WholeProduct::new`].
    pub(super) fn new(
        heap: &SymmetricHeap,
        op: &OpBuild,
        program: &Program,
        whole: &Whole,
        by_workgroups: bool,
    ) -> Result<Self> {
        let (tile_m, tile_n) = whole.tile;
        let matmul = OpBuild { op: "matmul", product: true, norm: false, tile_m, tile_n, ..*op };
        let tiles = needs_tiles(program).then(|| KernelSet::new(heap, &matmul, &[Kernel::Local]));
        let tiles = tiles.transpose()?;
        let library = WholeProduct::new(heap, whole)?;
        Ok(Gemms {
            whole: *whole,
            library,
            tiles,
            fused: fused(heap, op, program, whole, by_workgroups)?,
        })
    }

    /// Removes library GEMMs and ours: for worlds in which not all ranks have them.
    pub(super) fn without_library(&self) -> Self {
        Gemms { whole: self.whole, library: None, tiles: self.tiles.clone(), fused: Fused::None }
    }

    /// The libraries whose GEMMs it has, if it has any. A GEMM with its message for few rows need not be all
    /// ranks': whoever has none does the same call in two launches.
    pub(super) fn library(&self) -> Option<String> {
        let fused = match self.fused {
            Fused::Gated(_) => " or gemm_sm90_gather",
            Fused::Storing(_) => " or gemm_sm90_scatter",
            Fused::None | Fused::Exchanging(_) => "",
        };
        Some(self.library.as_ref()?.title() + fused)
    }

    /// Whether an alternative with this condition can ever be taken.
    pub(super) fn may_meet(&self, when: When) -> bool {
        match when {
            When::Exchanges => matches!(self.fused, Fused::Exchanging(_)),
            When::Stores => matches!(self.fused, Fused::Storing(_)),
            When::Gated => matches!(self.fused, Fused::Gated(_)),
            When::Adds => self.library.is_some(),
            When::Engines | When::ByColumns | When::Wide => true,
        }
    }

    /// Whether the library adds this matrix to a product.
    pub(super) fn adds(&self, args: &OpArgs, addend: &Matrix) -> bool {
        self.library.as_ref().is_some_and(|it| it.fits_adding(args, addend))
    }
}

impl Call<'_> {
    /// Whether the GEMM that does more than a plain product takes this call.
    pub(super) fn fits(&self, gemm: &Gemm) -> bool {
        let places = self.places();
        let Some(gemms) = &self.of.gemms else { return false };
        match (gemm.core, &gemms.fused) {
            (Core::Gated, Fused::Gated(gated)) => {
                self.parts_of_shards().is_some_and(|parts| gated.fits(&self.args, &parts))
            }
            (Core::Storing { blocks, results }, Fused::Storing(storing)) => {
                storing.fits(&places.storing(gemm.to), &self.stored(blocks, results).of())
            }
            (Core::Exchanging(kernel), Fused::Exchanging(exchanging)) => {
                let product = places.product(gemm, At::default());
                product.is_some_and(|it| exchanging.fits(kernel, (&it, &self.args)))
            }
            _ => false,
        }
    }

    /// Enqueues a GEMM; returns whether it was, or need not be.
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
                // SAFETY: as `Call::new` says; the addend lies in the workspace, and C does not.
                self.stamped(args.m, || unsafe {
                    library.enqueue_adding(self.heap, self.stream, &args, &addend, workspace(&args))
                })
            }
            (Core::Gated, Fused::Gated(gated)) => {
                let Some(parts) = self.parts_of_shards() else { return Ok(false) };
                let (all, message) =
                    (places.area(Area::Gathered), places.message(Transfer::Shards).args);
                // SAFETY: as `Call::new` says; the call is open, and engines copy.
                self.stamped(self.args.m, || unsafe {
                    gated.launch(gpu()?, &self.args, (&all, &parts), &message)
                })
            }
            (Core::Storing { blocks, results }, Fused::Storing(storing)) => {
                let (args, messages) = (places.storing(gemm.to), self.stored(blocks, results));
                // SAFETY: as `Call::new` says; the call is open, and no rank shares the device.
                self.stamped(args.m, || unsafe { storing.launch(gpu()?, &args, &messages.of()) })
            }
            (Core::Exchanging(kernel), Fused::Exchanging(exchanging)) => {
                let Some(product) = places.product(gemm, at) else { return Ok(true) };
                // SAFETY: as `Call::new` says.
                self.stamped(product.m, || unsafe {
                    exchanging.launch(gpu()?, kernel, (&product, &self.args))
                })
            }
            _ => Ok(false),
        }
    }

    /// Enqueues a GEMM that writes no trace itself; in a traced call, between two launches that make it one span of
    /// the first workgroup's.
    fn stamped(&self, rows: u32, enqueue: impl FnOnce() -> Result<bool>) -> Result<bool> {
        if self.args.trace == 0 {
            return enqueue();
        }
        let stamp = |after| {
            let (on, kernel) = ((self.heap, self.stream), Kernel::Stamp { after, rows });
            // SAFETY: as `Call::new` says.
            unsafe { self.of.kernels.enqueue(on, kernel, self.args, (1.into(), false)) }
        };
        stamp(false)?;
        let done = enqueue()?;
        if done && let Err(error) = stamp(true) {
            // The GEMM is out, which may be all of the call.
            tracing::warn!(%error, "a GEMM is missing from the trace");
        }
        Ok(done)
    }

    /// Enqueues a plain product; returns whether it was.
    fn product(&self, gemms: &Gemms, mut args: OpArgs, early: bool) -> Result<bool> {
        // Only the tile core adds a residual.
        let library = gemms.library.as_ref().filter(|_| args.residual.address == 0);
        if let Some(library) = library.filter(|it| it.fits(&args)) {
            // SAFETY: as `Call::new` says, for the workspace, too.
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
        let groups = Workgroups::from(work.clamp(1, u64::from(tiles.resident())) as u32);
        let on = (self.heap, self.stream);
        // SAFETY: as above.
        unsafe { tiles.enqueue(on, Kernel::Local, args, (groups, early)) }?;
        Ok(true)
    }

    /// The parts that shards of A come in, for a GEMM that waits for them; none if ranks have unequal shards.
    fn parts_of_shards(&self) -> Option<Parts> {
        let OpArgs { ref channel, m, k, shard, .. } = self.args;
        let message = self.places().message(Transfer::Shards);
        let columns = shard == 1;
        let split = usize::from(columns);
        let mut shard = [m, k];
        if !shard[split].is_multiple_of(channel.size) {
            return None;
        }
        shard[split] /= channel.size;
        let (mut part, mut step) =
            ([message.args.tile_m, message.args.tile_n], [message.across(), 1]);
        if columns {
            // The message's rows are columns here.
            part.reverse();
            step.reverse();
        }
        Some(Parts { shard, part, first: message.first, step, columns })
    }

    /// The messages of a GEMM that stores to peers.
    fn stored(&self, blocks: bool, results: Option<Transfer>) -> Stored {
        let places = self.places();
        Stored {
            blocks: blocks.then(|| places.message(Transfer::Blocks)),
            results: results.map(|of| places.message(of)),
        }
    }
}

/// The messages of a GEMM that stores to peers, while it is enqueued.
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

/// The address of the library's workspace.
fn workspace(args: &OpArgs) -> u64 {
    args.heap.data[args.heap.rank as usize] + args.workspace
}

/// Whether a program has a plain product without steps in its place.
fn needs_tiles(program: &Program) -> bool {
    let mut found = false;
    program.each_step(&mut |Step { work, or }| {
        found |= matches!(work, Work::Gemm(Gemm { core: Core::Any, .. })) && or.is_empty();
    });
    found
}

/// The GEMM that waits for peers or stores to them, if the program asks for one and the device has a build.
fn fused(
    heap: &SymmetricHeap,
    op: &OpBuild,
    program: &Program,
    whole: &Whole,
    by_workgroups: bool,
) -> Result<Fused> {
    if heap.device().kind.traits().host_threads {
        return Ok(Fused::None);
    }
    if program.asks(When::Gated) && whole.gated {
        let gated = Gathering::new(heap, whole, op.injected)?;
        return Ok(gated.map_or(Fused::None, Fused::Gated));
    }
    if program.asks(When::Stores)
        && whole.signalled.is_some()
        && matches!(whole.library, Library::Auto | Library::Ours)
    {
        let storing = Scattering::new(heap, whole, op.injected)?;
        return Ok(storing.map_or(Fused::None, Fused::Storing));
    }
    if whole.exchanges && !by_workgroups {
        let exchanging = program.alternatives.iter().find(|of| of.when.contains(&When::Exchanges));
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
