//! All-gather then GEMM in one launch: the GEMM begins with this rank's own part of A, and goes on
//! with the peers' parts as copy engines deliver them. It waits for each part before it loads it.
//!
//! **Problem.** Separate GEMMs, for this rank's rows and for the rows that arrive, each end with a
//! wave of tiles that is not full, and a launch between them only waits. If A is split by columns,
//! no element of C is finished before all of A has arrived.
//!
//! **Solution.** `kernels/gemm_sm90_gather.cu` takes the tiles of one GEMM, and the slabs of a tile
//! (parts along K that are loaded at a time), in the order of their arrival. The thread that loads
//! a slab waits for the signal of the slab's part of A (`flow::Arrivals`).
//!
//! **Limits.** Those of [`Gemm`], and: each rank's shard of A, and each part, consists of whole
//! cluster tiles or whole slabs. The launch fills the device while it waits, so the data must be
//! delivered by copy engines.

use bytemuck::{Pod, Zeroable};
use iris_heap::{Gpu, Result, Stream, SymmetricHeap};

use super::{Config, Fusion, Gemm, GemmKernel};
use crate::args::{Matrix, OpArgs};
use crate::build::FaultInjection;
use crate::library::GemmRequest;

/// Division of A into the parts that arrive one by one from the ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parts {
    /// Number of rows and columns that come from each rank: an equal share in the dimension that is
    /// split, all rows or columns in the other.
    pub shard: [u32; 2],
    /// Number of rows and columns of a part; the last parts may have fewer.
    pub part: [u32; 2],
    /// Number of the signal of the first part.
    pub first: u32,
    /// Differences of signal numbers: from a part to the part below it, and to the part on its
    /// right.
    pub step: [u32; 2],
    /// Whether A is split over the ranks by columns, not by rows.
    pub columns: bool,
}

/// Division of A into parts, counted in rows of a cluster's tiles and in slabs along K; same layout
/// as `Parts` in `gemm_sm90_gather.cu`.
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
    in_order: u32,
}

impl Parts {
    /// Number of rows and columns of A that come from each of `ranks` ranks, if A is `all` and is
    /// split by columns or by rows; `None` if the ranks' shards have different sizes.
    pub fn shard(all: [u32; 2], ranks: u32, columns: bool) -> Option<[u32; 2]> {
        let mut shard = all;
        let split = &mut shard[usize::from(columns)];
        *split = split.is_multiple_of(ranks).then_some(*split / ranks)?;
        Some(shard)
    }

    /// Whether each unit in which a build loads A (rows of a cluster of workgroups, slab along K)
    /// lies in a single part of A.
    pub(super) fn suit(&self, config: &Config) -> bool {
        let units = [config.unit_rows(), Config::DEPTH];
        // The end of A may lie inside a tile or slab. The border between the shards of two ranks
        // must not, because the tile or slab would then need the data of two ranks.
        let split = usize::from(self.columns);
        self.shard[split].is_multiple_of(units[split])
            && (0..2).all(|it| {
                self.part[it] >= self.shard[it] || self.part[it].is_multiple_of(units[it])
            })
    }

    fn units(&self, config: &Config, in_order: bool) -> Units {
        let units = [config.unit_rows(), Config::DEPTH];
        let [rows, slabs] = [0, 1].map(|it| self.shard[it].div_ceil(units[it]));
        let [part_rows, part_slabs] =
            [0, 1].map(|it| self.part[it].min(self.shard[it]).div_ceil(units[it]));
        let [down, right] = self.step;
        let (first, columns, in_order) = (self.first, self.columns.into(), in_order.into());
        Units { rows, slabs, part_rows, part_slabs, first, down, right, columns, in_order }
    }
}

/// Loaded kernels of GEMMs whose A arrives while it is multiplied.
#[derive(Debug)]
pub struct Gathering {
    gemm: Gemm,
    /// Whether columns of A are multiplied in their order; else those of this rank come first.
    in_order: bool,
}

impl Gathering {
    /// Builds that an operator loads for products of up to `shape[0]` rows. Builds that compute the
    /// transpose of C are left out.
    pub(super) fn builds(shape: [usize; 3], multiprocessors: u32, k_parts: u32) -> Vec<Config> {
        let mut configs = Config::of_plan(shape, multiprocessors, k_parts);
        configs.retain(|config| !config.flipped);
        configs
    }

    /// Loads the builds for a product; `None` if there are none for the device and types.
    ///
    /// # Errors
    /// Errors of [`Gemm::of`].
    pub fn new(
        heap: &SymmetricHeap,
        whole: &GemmRequest,
        fault_injection: FaultInjection,
    ) -> Result<Option<Gathering>> {
        let configs = Self::builds(whole.shape, heap.workgroups(), whole.k_parts);
        let kernel = (GemmKernel::Gathering, fault_injection);
        let Some(mut gemm) = Gemm::for_whole(heap, whole, configs, kernel)? else {
            return Ok(None);
        };
        if heap.ranks_on_device() > 1 {
            // Copies within a device are done by multiprocessors, so a GEMM that waits for the
            // copies must leave some multiprocessors free.
            gemm.multiprocessors = gemm.multiprocessors.saturating_sub(2).max(1);
        }
        Ok(Some(Gathering { gemm, in_order: whole.batch_invariant }))
    }

    /// Whether a build is loaded that can do this call.
    pub fn fits(&self, args: &OpArgs, parts: &Parts) -> bool {
        self.gemm.fitting(args, &Fusion::Gated(*parts)).is_some()
    }

    /// Enqueues the product of a call; returns false if there is no build for it. `args` are the
    /// arguments of the product, whose A is this rank's part. The parts of all ranks arrive in
    /// `all`. `message` has the arguments of the kernels that would copy the parts.
    ///
    /// # Errors
    /// Errors of [`Gemm::launch`].
    ///
    /// # Safety
    /// The conditions of [`Gemm::launch`] hold, also for `all`. An earlier launch has opened the
    /// call. Copy engines deliver the parts and need no multiprocessor for that.
    #[allow(unsafe_code, reason = "the kernel is given the addresses of matrices")]
    pub unsafe fn launch(
        &self,
        (gpu, stream): (&Gpu, &Stream),
        args: &OpArgs,
        (all, parts): (&Matrix, &Parts),
        message: &OpArgs,
    ) -> Result<bool> {
        let fitting = self.gemm.fitting(args, &Fusion::Gated(*parts));
        let Some((launch, function)) = fitting else { return Ok(false) };
        let (dtype, config) = (self.gemm.dtype, &launch.config);
        let (maps, own) = gpu.current(|| {
            let own = config.left_map(dtype, &args.a)?;
            Ok((config.maps(dtype, [all, &args.b, &args.c])?, own))
        })?;
        let parts = parts.units(config, self.in_order);
        let (mut given, shape) = self.gemm.given(&launch, args);
        // A raster group (cluster rows that are processed before the next column of tiles) must not
        // extend beyond a part, because the next part arrives later.
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
        // SAFETY: the parameters are those of `iris_gemm_gather`; the caller vouches for the
        // matrices and for the arrival of the parts; the workgroups of a cluster, which wait for
        // each other, start together.
        unsafe { function.launch(stream, shape, &given) }.map(|()| true)
    }
}

const _: () = assert!(size_of::<Units>() == 36);
