//! The words of calls: how many there may be, and what those that carry data take.

use iris_kernels::gemm_config::MESSAGE_THREADS;
use iris_kernels::schedule::{Collective, Items};

use super::{Choice, Plan};
use crate::error::{Error, Result};
use crate::items::{self, are_rows_whole};
use crate::options::{Request, TileShape};
use crate::spec::{self, Form, Memory};
use crate::tune;

/// Threads of a wave, at most. The last wave of a workgroup takes no items of words that carry data.
const WAVE: u32 = 64;

impl Plan {
    /// Words are numbered with 32 bits: so many tiles and units there may be.
    pub(super) fn check_words(&self, form: &Form, tile: TileShape) -> Result<()> {
        let Request { m, n, k, .. } = self.request;
        // Of a gathered A the tiles are A's.
        let n = if form.whole == spec::Whole::Gathered { k } else { n };
        // A split may add a short tile for each rank.
        let blocks = |total: usize, each: usize| (total.div_ceil(each) + self.ranks.size) as u64;
        let rows = blocks(m, tile.m);
        let tiles = rows * blocks(n, tile.n);
        let units = rows * blocks(k, self.request.columns_per_flag(self.ranks.device.backend));
        let words = tiles.saturating_mul(2 * self.ranks.size as u64).saturating_add(units);
        let limit = 1 << 30;
        if words <= limit {
            return Ok(());
        }
        Err(Error::Invalid {
            op: self.op().into(),
            what: "signals and flags".into(),
            value: format!("{words}, with tiles of {tile}"),
            expected: format!("at most {limit}: larger tiles or groups of K"),
        })
    }

    /// Words that carry data are for small messages: they take twice the room, of the signal segment.
    pub(super) fn check_pairs(&self, form: &Form) -> Result<()> {
        let Memory::Pairs(collective) = form.memory else { return Ok(()) };
        let items = self.items(collective, (self.request.m, self.request.n));
        if !self.alone() && !are_rows_whole(&self.request, items) {
            return Err(Error::Invalid {
                op: self.op().into(),
                what: format!("n with rms_norm of variant {}", form.variant),
                value: self.request.n.to_string(),
                expected: format!("a multiple of {}, the elements of a word", items.per_item),
            });
        }
        if self.alone() || items.most() <= tune::LL_ITEMS {
            return Ok(());
        }
        Err(Error::Invalid {
            op: self.op().into(),
            what: format!("message of variant {}", form.variant),
            value: format!("{} bytes from one rank to another", u64::from(items.most()) * 8),
            expected: format!("at most {}", u64::from(tune::LL_ITEMS) * 8),
        })
    }

    /// The items of a call of this shape, in words that carry their data.
    pub(super) fn items(&self, collective: Collective, (m, n): (usize, usize)) -> Items {
        items::of(self.ranks, &self.request, collective, (m, n))
    }

    /// Threads of a workgroup of such a call.
    pub(super) fn threads_of_pairs(
        &self,
        choice: &Choice,
        collective: Collective,
        shape: (usize, usize),
    ) -> u32 {
        let items = self.items(collective, shape).most();
        choice.sizing.threads(items as usize).unwrap_or(MESSAGE_THREADS)
    }

    /// Workgroups that have something to do in such a call: an item a thread, as far as there are workgroups.
    /// A row that is normalised has its workgroup; the others push.
    pub(super) fn work_on_pairs(
        &self,
        choice: &Choice,
        collective: Collective,
        shape: (usize, usize),
    ) -> u32 {
        let threads = self.threads_of_pairs(choice, collective, shape) - WAVE;
        let pushing = self.items(collective, shape).most().div_ceil(threads);
        let rows = if self.request.rms_norm.is_some() { shape.0 as u32 } else { 1 };
        pushing.max(rows).clamp(1, tune::LL_GROUPS)
    }
}
