//! A product that begins with what this rank has of A, by rows or by columns, and goes on with that of the
//! others as copy engines bring it: one launch, which waits for each part before it loads it.
//!
//! **Problem.** Products apart, of this rank's rows and of what came, each end with a wave of tiles that is
//! not full, and a launch stands between them that only waits. Where columns are split, no element of C is
//! finished before all of A is there.
//!
//! **Solution.** `kernels/gemm_sm90_gather.cu`: the tiles of one product, and the slabs of a tile, in the
//! order in which they are there. The thread that loads a slab waits for the signal of its part, as
//! `flow::Arrivals` says.
//!
//! **Limits.** Those of [`Gemm`]; besides, what a rank has is whole tiles of a cluster, or whole slabs, and so
//! are parts; and the launch fills the device while it waits: only where an engine brings what it waits for.

use bytemuck::{Pod, Zeroable};
use iris_heap::{Gpu, Result, Stream, SymmetricHeap};

use super::{Config, Gemm, GemmKernel};
use crate::args::{Matrix, OpArgs};
use crate::build::FaultInjection;
use crate::library::GemmRequest;

/// How A comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parts {
    /// Rows and columns that come from each rank: all of the ones, and an equal part of the others.
    pub shard: [u32; 2],
    /// Rows and columns of a part, of which the last have fewer where that is not a divisor.
    pub part: [u32; 2],
    /// The number of the first part's signal.
    pub first: u32,
    /// What is added to it for the part below, and for the one on the right.
    pub step: [u32; 2],
    /// Whether the columns are split over the ranks.
    pub columns: bool,
}

/// The same in rows of tiles of a cluster, and in slabs: `Parts` of `gemm_sm90_gather.cu`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Units {
    rows: u32,
    slabs: u32,
    part_rows: u32,
    part_slabs: u32,
    first: u32,
    down: u32,
    right: u32,
    columns: u32,
}

impl Parts {
    /// Whether tiles and slabs of a build are of one part each.
    fn suit(&self, config: &Config) -> bool {
        let units = [config.unit_rows(), Config::DEPTH];
        // The edge of the whole may cut the last; that of a rank's shard may not, where there is a next.
        let split = usize::from(self.columns);
        self.shard[split].is_multiple_of(units[split])
            && (0..2).all(|it| {
                self.part[it] >= self.shard[it] || self.part[it].is_multiple_of(units[it])
            })
    }

    fn units(&self, config: &Config) -> Units {
        let units = [config.unit_rows(), Config::DEPTH];
        let [rows, slabs] = [0, 1].map(|it| self.shard[it].div_ceil(units[it]));
        let [part_rows, part_slabs] =
            [0, 1].map(|it| self.part[it].min(self.shard[it]).div_ceil(units[it]));
        let [down, right] = self.step;
        let columns = u32::from(self.columns);
        Units { rows, slabs, part_rows, part_slabs, first: self.first, down, right, columns }
    }
}

/// Loaded kernels for such products.
#[derive(Debug)]
pub struct Gathering(Gemm);

impl Gathering {
    /// Loads the builds for a product; none where there are none for the device and types.
    ///
    /// # Errors
    /// As [`Gemm::of`].
    pub fn new(
        heap: &SymmetricHeap,
        whole: &GemmRequest,
        injected: FaultInjection,
    ) -> Result<Option<Gathering>> {
        let mut configs = Config::of_plan(whole.shape, heap.workgroups());
        configs.retain(|config| !config.flipped);
        let kernel = (GemmKernel::Gathering, injected);
        let Some(mut gemm) = Gemm::for_whole(heap, whole, configs, kernel)? else {
            return Ok(None);
        };
        if heap.ranks_on_device() > 1 {
            // What stays on a device is copied by multiprocessors, which no product that waits for it may hold.
            gemm.multiprocessors = gemm.multiprocessors.saturating_sub(2).max(1);
        }
        Ok(Some(Gathering(gemm)))
    }

    /// Whether there is a build for this call.
    pub fn fits(&self, args: &OpArgs, parts: &Parts) -> bool {
        self.0.fitting_of(args, |config| parts.suit(config)).is_some()
    }

    /// Enqueues the product of a call, if there is a build for it; whether there is. `args` are those of the
    /// product, of which A is what this rank has of it; `all` is where that of all ranks comes, and `message` the
    /// arguments of the kernels that would bring them.
    ///
    /// # Errors
    /// As [`Gemm::launch`].
    ///
    /// # Safety
    /// As for [`Gemm::launch`], of `all`, too. The call is open; engines bring the rows, and need no
    /// multiprocessor for that.
    #[allow(unsafe_code, reason = "the kernel is given the addresses of matrices")]
    pub unsafe fn launch(
        &self,
        (gpu, stream): (&Gpu, &Stream),
        args: &OpArgs,
        (all, parts): (&Matrix, &Parts),
        message: &OpArgs,
    ) -> Result<bool> {
        let fitting = self.0.fitting_of(args, |config| parts.suit(config));
        let Some((config, function)) = fitting else { return Ok(false) };
        let dtype = self.0.dtype;
        let (maps, own) = gpu.current(|| {
            let own = config.left_map(dtype, &args.a)?;
            Ok((config.maps(dtype, [all, &args.b, &args.c])?, own))
        })?;
        let parts = parts.units(config);
        let (mut given, shape) = self.0.given(config, args);
        // Groups of rows do not reach beyond a part, whose successor comes later.
        given.group = given.group.min(parts.part_rows);
        given.wait_for_peers(&message.heap);
        let [all, b, c] = &maps;
        let given = [
            own.bytes(),
            all.bytes(),
            b.bytes(),
            c.bytes(),
            bytemuck::bytes_of(&given),
            bytemuck::bytes_of(&parts),
            bytemuck::bytes_of(message),
        ];
        // SAFETY: the parameters are those of `iris_gemm_gather`; the caller vouches for the matrices, and
        // for what is waited for; workgroups wait for others of their cluster, which start together.
        unsafe { function.launch(stream, shape, &given) }.map(|()| true)
    }
}

const _: () = assert!(size_of::<Units>() == 32);
