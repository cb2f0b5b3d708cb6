//! GEMM of few rows with its all-reduce in one launch: multiply, push to all ranks, add up.
//!
//! **Problem.** A GEMM of few rows takes as long as reading B, about 15 us. A separate message by
//! the LL protocol (data and flag in one word) takes 5 us more, mostly for the launch and for the
//! product's way through memory.
//!
//! **Solution.** Each workgroup multiplies one tile, which has all rows and some columns, keeps it
//! in shared memory and sends it from there. `kernels/gemm_sm90_exchange.cu` sends the items of the
//! message by the LL protocol (`flow::exchange_tile`); `kernels/gemm_sm90_one_shot.cu` sends the
//! tile with a signal (`flow::one_shot`). The launch uses the same words, and computes the same
//! bits, as a GEMM followed by a separate message. So ranks that do the same call in two launches
//! can take part.
//!
//! **Limits.** Those of [`Gemm`], and: at most 128 rows; at least three quarters as many tiles as
//! the device has multiprocessors, and not more; partials of the type of A. Ranks that share the
//! device divide its multiprocessors. A workgroup takes most of a multiprocessor's shared memory,
//! so such calls of two heaps on the same devices must not overlap.

use iris_heap::{Function, Gpu, Result, Stream, SymmetricHeap};

use super::choice::FLIPPED_ROWS;
use super::{Config, Fusion, Gemm, GemmKernel, GemmLaunch};
use crate::args::OpArgs;
use crate::build::OpBuild;
use crate::kernel::Kernel;
use crate::library::GemmRequest;

/// Loaded kernels of GEMMs that also do the all-reduce of their result.
#[derive(Debug)]
pub struct Exchanging {
    gemm: Gemm,
    /// Kernel that would do the all-reduce after a separate GEMM, and that this launch replaces.
    kernel: Kernel,
    /// Number of workgroups that can be resident at once. A launch with more could deadlock:
    /// resident workgroups of the peers would wait for tiles of workgroups that cannot start.
    resident: u32,
}

impl Exchanging {
    /// Largest number of rows for which this launch and a launch of the RMSNorm are faster than a
    /// GEMM and an LL message that includes the RMSNorm (2 x H200, N x K = 8192 x 3584: 16 rows 25.0
    /// vs 25.6 us, 64 rows 32.1 vs 31.4; 2026-11-23).
    pub(super) const NORMED_ROWS: usize = 16;

    /// Rows and columns of the tiles in which this GEMM sends a message of `rows` x `cols`. `None`
    /// if there are more than 128 rows, or too many or too few tiles for one tile per
    /// multiprocessor.
    pub fn tile(rows: usize, cols: usize, multiprocessors: u32) -> Option<[u32; 2]> {
        let groups = Config::consumers_of_tiles(cols, multiprocessors);
        let groups = groups.filter(|_| rows <= FLIPPED_ROWS)?;
        Some([rows.next_multiple_of(8) as u32, 64 * groups])
    }

    /// Build for calls of up to `shape[0]` rows with row-major A and B; `None` if there is none.
    /// `tile` has the rows and columns of a tile of the message, or is `None` for a message by the
    /// LL protocol.
    pub(super) fn build(
        [most, cols, _]: [usize; 3],
        tile: Option<[u32; 2]>,
        multiprocessors: u32,
    ) -> Option<Config> {
        Config::of_tiles(most, cols, multiprocessors).filter(|config| {
            let most = most.min(FLIPPED_ROWS) as u32;
            tile.is_none_or(|[tile_m, tile_n]| tile_m >= most && tile_n == config.rows())
        })
    }

    /// Returns `tile` if `kernel` sends its message tile by tile; `None` if it uses the LL
    /// protocol.
    pub fn tile_of(kernel: Kernel, tile: [u32; 2]) -> Option<[u32; 2]> {
        (kernel != Kernel::OneShotLl).then_some(tile)
    }

    /// Loads the builds that replace `kernel`, which is [`Kernel::OneShot`] or
    /// [`Kernel::OneShotLl`]. `None` for any other kernel, or if there are no builds for the
    /// device, types and shape.
    ///
    /// # Errors
    /// Errors of [`Gemm::of`].
    pub fn new(
        heap: &SymmetricHeap,
        whole: &GemmRequest,
        op: &OpBuild,
        kernel: Kernel,
    ) -> Result<Option<Exchanging>> {
        let gemm_kernel = match kernel {
            Kernel::OneShotLl => GemmKernel::ExchangingLl { pair: heap.local_size() == 2 },
            Kernel::OneShot => GemmKernel::ExchangingTiles,
            _ => return Ok(None),
        };
        let [_, cols, depth] = whole.shape;
        let whole = &GemmRequest { shape: [whole.rows, cols, depth], ..*whole };
        let tile = Self::tile_of(kernel, [op.tile_m, op.tile_n]);
        let config = Self::build(whole.shape, tile, heap.workgroups());
        let gemm = Gemm::for_whole(heap, whole, config, (gemm_kernel, op.fault_injection))?;
        let Some(gemm) = gemm else { return Ok(None) };
        let mut resident = u32::MAX;
        for (config, function) in &gemm.kernels {
            let all =
                function.max_coresident_workgroups(config.threads(), config.shared_bytes())?;
            resident = resident.min(all / heap.ranks_on_device());
        }
        Ok(Some(Exchanging { gemm, kernel, resident }))
    }

    /// Whether a build is loaded that can do this call. `of` has the arguments of the product,
    /// whose C is not written, and the arguments of the message, whose A is not read.
    pub fn fits(&self, kernel: Kernel, of: (&OpArgs, &OpArgs)) -> bool {
        self.fitting(kernel, of).is_some()
    }

    /// Build, grid and kernel for the launch of this call; `None` if no loaded build can do the
    /// call.
    fn fitting(
        &self,
        kernel: Kernel,
        (product, message): (&OpArgs, &OpArgs),
    ) -> Option<(GemmLaunch, &Function)> {
        let tile = Self::tile_of(kernel, [message.tile_m, message.tile_n]);
        let fusion = Fusion::Exchanging { tile, normed: message.normed.address != 0 };
        let fitting = self.gemm.fitting(product, &fusion).filter(|_| kernel == self.kernel);
        fitting.filter(|(launch, _)| launch.grid.groups <= self.resident)
    }

    /// Enqueues a call; returns false if there is no build for it. `of` is as for
    /// [`Exchanging::fits`].
    ///
    /// # Errors
    /// Errors of [`Gemm::launch`].
    ///
    /// # Safety
    /// The conditions of [`Gemm::launch`] hold, also for the C of the message.
    #[allow(unsafe_code, reason = "the kernel is given the addresses of matrices")]
    pub unsafe fn launch(
        &self,
        (gpu, stream): (&Gpu, &Stream),
        kernel: Kernel,
        of: (&OpArgs, &OpArgs),
    ) -> Result<bool> {
        let Some((launch, function)) = self.fitting(kernel, of) else { return Ok(false) };
        let (product, message) = of;
        let factors = [&product.a, &product.b, &product.c];
        let [b, a, _] = gpu.current(|| launch.config.maps(self.gemm.dtype, factors))?;
        let (given, shape) = self.gemm.given(&launch, product);
        let given = [b.bytes(), a.bytes(), bytemuck::bytes_of(&given), bytemuck::bytes_of(message)];
        // SAFETY: the parameters are those of both kernels; the caller vouches for the matrices;
        // workgroups wait only for data that peers push before they wait themselves.
        unsafe { function.launch(stream, shape, &given) }.map(|()| true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_multiprocessor_has_a_tile_or_nearly_each() {
        assert_eq!(Exchanging::tile(100, 8192, 132), Some([104, 64]));
        assert_eq!(Exchanging::tile(128, 16896, 132), Some([128, 128]));
        assert_eq!([Exchanging::tile(129, 8192, 132), Exchanging::tile(100, 4096, 132)], [None; 2]);
        // 128 tiles of 64 columns are too many for 114 multiprocessors, 64 tiles of 128 columns too
        // few.
        assert_eq!(Exchanging::tile(100, 8192, 114), None);
        assert_eq!(Exchanging::tile(100, 7168, 114), Some([104, 64]));
    }
}
