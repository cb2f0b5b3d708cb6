//! A product of few rows whose sum over all ranks every rank gets: one launch, which multiplies, pushes and adds
//! up.
//!
//! **Problem.** Of few rows a product takes as long as reading B, some 15 us, and its message in words that carry
//! their data 5 us more, most of which is the launch, and the way through memory from the product to the message.
//!
//! **Solution.** Each workgroup multiplies one tile of all rows and some columns, which stays in shared memory, and
//! the message begins there. `kernels/gemm_sm90_exchange.cu` pushes it in words that carry their data, as the items
//! of the message that it is (`flow::exchange_tile`); `kernels/gemm_sm90_one_shot.cu` as a tile with a signal
//! (`flow::one_shot`). Words, numbers and bits are those of the message alone: ranks that do it in two launches take
//! part.
//!
//! **Limits.** Those of [`Gemm`]; besides, up to 128 rows, as many tiles as the device has multiprocessors, or not
//! many fewer, partials of the type of A. No other rank has workgroups on the device; and since a workgroup takes
//! most of a multiprocessor's shared memory, such calls of two heaps on the same devices must not overlap.

use iris_heap::{Function, Gpu, LaunchShape, Result, Stream, SymmetricHeap};

use super::choice::FLIPPED_ROWS;
use super::{Arguments, Config, Gemm, GemmKernel};
use crate::args::OpArgs;
use crate::build::OpBuild;
use crate::kernel::Kernel;
use crate::library::GemmRequest;

/// Rows up to which this launch and one that normalises take less than a product and the message that normalises: on
/// 2 x H200, 8192 x 3584, 16 rows 25.0 and 25.6 us, 64 rows 32.1 and 31.4 (2026-11-23).
const NORMED_ROWS: u32 = 16;

/// Loaded kernels for such products.
#[derive(Debug)]
pub struct Exchanging {
    gemm: Gemm,
    /// The kernel that does the message alone.
    kernel: Kernel,
    /// Workgroups that run at the same time: a tile that is not under way would be awaited by those that are.
    resident: u32,
}

impl Exchanging {
    /// Rows and columns of a tile of such a GEMM, for messages by tiles, on a device with this many multiprocessors;
    /// `None` if there are more than 128 rows, or too many or too few tiles for one on each multiprocessor.
    pub fn tile(rows: usize, cols: usize, multiprocessors: u32) -> Option<[u32; 2]> {
        let groups = Config::consumers_of_tiles(cols, multiprocessors);
        let groups = groups.filter(|_| rows <= FLIPPED_ROWS)?;
        Some([rows.next_multiple_of(8) as u32, 64 * groups])
    }

    /// Loads the builds for a product with the message of [`Kernel::OneShot`] or [`Kernel::OneShotLl`]; none for
    /// another, or where there are none for the device, types and shape.
    ///
    /// # Errors
    /// As [`Gemm::of`].
    pub fn new(
        heap: &SymmetricHeap,
        whole: &GemmRequest,
        op: &OpBuild,
        kernel: Kernel,
    ) -> Result<Option<Exchanging>> {
        let pair = heap.size() == 2;
        let gemm_kernel = match kernel {
            Kernel::OneShotLl => GemmKernel::ExchangingLl { pair },
            Kernel::OneShot => GemmKernel::ExchangingTiles { pair },
            _ => return Ok(None),
        };
        let [_, cols, _] = whole.shape;
        let config = Config::of_tiles(whole.rows, cols, heap.workgroups());
        let config = config.filter(|config| {
            let most = whole.rows.min(FLIPPED_ROWS) as u32;
            kernel == Kernel::OneShotLl || op.tile_m >= most && op.tile_n == config.rows()
        });
        let gemm = Gemm::for_whole(heap, whole, config, (gemm_kernel, op.injected))?;
        let Some(gemm) = gemm else { return Ok(None) };
        let mut resident = u32::MAX;
        for (config, function) in &gemm.kernels {
            let all = function.resident(config.threads(), config.shared_bytes())?;
            resident = resident.min(all / heap.ranks_on_device());
        }
        Ok(Some(Exchanging { gemm, kernel, resident }))
    }

    /// Whether there is a build for this call. `product` is what is multiplied, with a C that is not written, and
    /// `message` what is to be done with it, whose A is not read.
    pub fn fits(&self, kernel: Kernel, of: (&OpArgs, &OpArgs)) -> bool {
        self.fitting(kernel, of).is_some()
    }

    /// The build for this call, if there is one, and its launch.
    fn fitting(
        &self,
        kernel: Kernel,
        (product, message): (&OpArgs, &OpArgs),
    ) -> Option<(&(Config, Function), Arguments, LaunchShape)> {
        let fitting = self.gemm.fitting(product).filter(|_| kernel == self.kernel)?;
        let (config, _) = fitting;
        // Of more rows the message that normalises them within is faster.
        if message.normed.address != 0 && message.m > NORMED_ROWS && kernel == Kernel::OneShotLl {
            return None;
        }
        // A message by tiles has those of the product.
        let alike = kernel == Kernel::OneShotLl
            || message.tile_m >= product.m && message.tile_n == config.rows();
        let (given, shape) = self.gemm.given(config, product);
        // A tile each.
        let tiles = given.row_units * given.col_tiles;
        let fits = alike && shape.groups == tiles && tiles <= self.resident;
        fits.then_some((fitting, given, shape))
    }

    /// Enqueues a call, if there is a build for it; returns whether there is. `of` is as for [`Exchanging::fits`].
    ///
    /// # Errors
    /// Errors of [`Gemm::launch`].
    ///
    /// # Safety
    /// The conditions of [`Gemm::launch`] hold, for the C of the message.
    #[allow(unsafe_code, reason = "the kernel is given the addresses of matrices")]
    pub unsafe fn launch(
        &self,
        (gpu, stream): (&Gpu, &Stream),
        kernel: Kernel,
        of: (&OpArgs, &OpArgs),
    ) -> Result<bool> {
        let Some(((config, function), given, shape)) = self.fitting(kernel, of) else {
            return Ok(false);
        };
        let (product, message) = of;
        let [b, a, _] =
            gpu.current(|| config.maps(self.gemm.dtype, [&product.a, &product.b, &product.c]))?;
        let given = [b.bytes(), a.bytes(), bytemuck::bytes_of(&given), bytemuck::bytes_of(message)];
        // SAFETY: the parameters are those of both kernels; the caller vouches for the matrices;
        // workgroups wait for what peers push before they wait.
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
        // 128 tiles of 64 columns are too many for 114, 64 of 128 too few.
        assert_eq!(Exchanging::tile(100, 8192, 114), None);
        assert_eq!(Exchanging::tile(100, 7168, 114), Some([104, 64]));
    }
}
