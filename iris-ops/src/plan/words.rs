//! Number of words that calls use: limits for signals and flags, and for words of the LL protocol.

use iris_kernels::gemm_config::MESSAGE_THREADS;
use iris_kernels::schedule::{Collective, Items};

use super::{Choice, Plan};
use crate::error::{Error, Result};
use crate::ll_items::{self, are_rows_whole};
use crate::op_row::{self, Form, Memory};
use crate::options::{Request, TileShape};
use crate::tune;

/// Maximum number of threads of a wave on AMD (a warp on NVIDIA has 32). The last wave of a
/// workgroup handles no items of the LL protocol.
const WAVE: u32 = 64;

impl Plan {
    /// Checks that the signals and flags of the largest call can be numbered with 32 bits. There
    /// are signals for each tile, and a flag for each unit of A that a staged gather fetches at
    /// once.
    pub(super) fn check_words(&self, form: &Form, tile: TileShape) -> Result<()> {
        let Request { m, n, k, .. } = self.request;
        // In an all-gather before a GEMM the tiles are those of A, which has K columns.
        let n = if form.gemm == op_row::GemmStage::Gathered { k } else { n };
        // If rows are split over the ranks, each rank can have one additional tile, which is
        // shorter.
        let blocks = |total: usize, each: usize| (total.div_ceil(each) + self.ranks.size) as u64;
        let rows = blocks(m, tile.m);
        let tiles = rows * blocks(n, tile.n);
        let units = rows * blocks(k, self.request.columns_per_flag(self.ranks.device.backend));
        let words = tiles.saturating_mul(2 * self.ranks.size as u64).saturating_add(units);
        let limit = 1 << 30;
        if words <= limit {
            return Ok(());
        }
        let value = format!("{words}, with tiles of {tile}");
        let expected = format!("at most {limit}: choose larger tiles or more columns_per_flag");
        Err(Error::invalid(self.op(), "number of signals and flags", value, expected))
    }

    /// Checks that the message is small enough for the LL protocol. In the signal segment, LL words
    /// occupy twice the bytes of their data.
    pub(super) fn check_pairs(&self, form: &Form) -> Result<()> {
        let Memory::Pairs(collective) = form.memory else { return Ok(()) };
        let items = self.items(collective, (self.request.m, self.request.n));
        if !self.alone() && !are_rows_whole(&self.request, items) {
            let what = format!("n with rms_norm of variant {}", form.variant);
            let of = items.per_item;
            let expected = format!("a multiple of {of}, the elements of an item of 8 bytes");
            return Err(Error::invalid(self.op(), what, self.request.n, expected));
        }
        // With one rank, only a gather of a list and a sum of weighted parts count in items.
        let (instead, most) = (self.request.instead_of_ll(), items.most());
        let fits = match self.alone() {
            true => instead.is_none() || most < u32::MAX,
            false => most <= tune::LL_ITEMS,
        };
        if fits {
            return Ok(());
        }
        let what = format!("message of variant {}", form.variant);
        let value = format!("{} bytes from one rank to another", u64::from(items.most()) * 8);
        let other = instead.map_or_else(String::new, |instead| format!("; {instead}"));
        let expected = format!("at most {}{other}", u64::from(tune::LL_ITEMS) * 8);
        Err(Error::invalid(self.op(), what, value, expected))
    }

    /// Items (8 bytes of data each) that a call of this shape sends by the LL protocol.
    pub(super) fn items(&self, collective: Collective, (m, n): (usize, usize)) -> Items {
        ll_items::of(self.ranks, &self.request, collective, (m, n))
    }

    /// Number of threads of a workgroup in a call by the LL protocol.
    pub(super) fn threads_of_pairs(
        &self,
        choice: &Choice,
        collective: Collective,
        shape: (usize, usize),
    ) -> u32 {
        let items = self.items(collective, shape);
        let threads = match self.has_packs(choice, shape) {
            true => choice.sizing.threads_of_packs(items.shared_packs()),
            false => choice.sizing.threads(items.shared() as usize),
        };
        threads.unwrap_or(MESSAGE_THREADS)
    }

    /// Number of workgroups that have work in a call by the LL protocol: enough for one item or
    /// pack per thread, at most [`tune::LL_GROUPS`]; on GPUs one more, which announces the rank's
    /// entry. With an RMSNorm, each row needs a separate workgroup. Workgroups without a row then
    /// only push.
    pub(super) fn work_on_pairs(
        &self,
        choice: &Choice,
        collective: Collective,
        shape: (usize, usize),
    ) -> u32 {
        let threads = self.threads_of_pairs(choice, collective, shape) - WAVE;
        let items = self.items(collective, shape);
        let shared =
            if self.has_packs(choice, shape) { items.shared_packs() } else { items.shared() };
        let pushing = shared.div_ceil(threads);
        let rows = if self.request.rms_norm.is_some() { shape.0 as u32 } else { 1 };
        let announcing = u32::from(!self.ranks.device.backend.traits().host_threads);
        pushing.max(rows).clamp(1, tune::LL_GROUPS) + announcing
    }
}
