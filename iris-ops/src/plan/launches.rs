//! Program of a call, and the size of its launches: workgroups and threads.

use iris_kernels::program::{Norm, Program};

use super::{Choice, Plan};
use crate::ll_items;
use crate::op_row::{self, Form, Memory, Tiles};
use crate::tune;

impl Plan {
    /// Program of the calls for which `choice` is made: the steps that a call enqueues, as
    /// alternatives with conditions. The program can be printed.
    ///
    /// ```
    /// use iris_ops::{Device, Topology, matmul_all_reduce};
    /// let options = matmul_all_reduce::Options::new(512, 8192, 3584).dtype(iris_heap::DType::BF16);
    /// let plan = options.plan(Topology::new(0, 2).on_device(Device::named("h200")?))?;
    /// println!("{}", plan.program(plan.at(512)));
    /// # anyhow::Ok(())
    /// ```
    pub fn program(&self, choice: &Choice) -> Program {
        self.program_of(choice.form)
    }

    /// Program (list of the steps that a call enqueues) of the variant, shape and types that `form`
    /// describes.
    pub(super) fn program_of(&self, form: &Form) -> Program {
        let (alternatives, norm) = match self.alone() {
            true => (self.row().alone, Norm::Last),
            false => (form.program, form.norm),
        };
        let norm = if self.request.rms_norm.is_some() { norm } else { Norm::None };
        Program {
            alternatives,
            norm,
            members: self.members(),
            overlap: tune::overlap(self.ranks, &self.request),
        }
    }

    /// Number of workgroups that have work to do in a call of this shape. In variants in which some
    /// workgroups only fetch, `fetchers` is added.
    pub(crate) fn work(&self, choice: &Choice, (m, n): (usize, usize), fetchers: u32) -> u32 {
        if let Memory::Pairs(collective) = choice.form.memory
            && !self.alone()
        {
            return self.work_on_pairs(choice, collective, (m, n));
        }
        let grid = self.grid_of(choice.form, choice.tile, (m, n));
        let split = self.split_grid(grid);
        let tiles = match self.request.row.tiles {
            _ if self.alone() => grid.tiles(),
            _ if choice.form.gemm == op_row::GemmStage::Gathered => split.part(0).tiles(),
            Tiles::All => grid.tiles(),
            Tiles::Own => split.part(0).tiles(),
            Tiles::Split if choice.form.fetches => split.tiles().saturating_add(fetchers),
            Tiles::Split => split.tiles(),
        };
        let most = if self.is_product(choice) { u32::MAX } else { choice.sizing.most_groups };
        tiles.clamp(1, most)
    }

    /// Whether the operator's kernels multiply tiles in calls of `choice`; otherwise they only move
    /// a message or add it up.
    fn is_product(&self, choice: &Choice) -> bool {
        self.row().multiplies() && (!choice.form.has_whole_gemm() || self.alone())
    }

    /// Number of workgroups, out of `groups`, that only send, while the others receive and add; 0
    /// if all workgroups send, receive and add.
    pub(crate) fn senders(
        &self,
        choice: &Choice,
        shape: (usize, usize),
        groups: impl FnOnce() -> u32,
    ) -> u32 {
        // After a whole-matrix GEMM, a rank sends its rows of C directly from C. Other workgroups
        // that received at the same time could write these rows while they are read, even if the
        // bytes do not change.
        let in_place = choice.form.gemm == op_row::GemmStage::Rows;
        if self.alone() || self.is_product(choice) || in_place {
            return 0;
        }
        match choice.sizing.sending_eighths(tune::message_bytes(&self.request, shape)) {
            0 => 0,
            eighths => groups() * eighths / 8,
        }
    }

    /// Maximum number of threads of a workgroup on a GPU, in a call of `choice` with `m` rows and
    /// `n` columns; `None` for the number for which the kernel is built.
    pub(crate) fn threads(&self, choice: &Choice, (m, n): (usize, usize)) -> Option<u32> {
        let form = choice.form;
        match form.memory {
            _ if self.alone() || self.is_product(choice) || form.is_copied() => None,
            Memory::Pairs(collective) => Some(self.threads_of_pairs(choice, collective, (m, n))),
            _ => choice.sizing.threads(tune::message_bytes(&self.request, (m, n))),
        }
    }

    /// Whether the message of a call by the LL protocol consists of packs (units of 48 bytes).
    pub(crate) fn has_packs(&self, choice: &Choice, shape: (usize, usize)) -> bool {
        let Memory::Pairs(collective) = choice.form.memory else { return false };
        let from = ll_items::packs_from(self.ranks, &self.request, collective);
        from.is_some_and(|from| self.items(collective, shape).most() >= from)
    }

    /// Whether calls of two choices (variant and tile) use the same kernels. Kernels of a message
    /// do not depend on the tile.
    pub(crate) fn share_kernels(&self, one: &Choice, other: &Choice) -> bool {
        one.variant == other.variant && (one.tile == other.tile || !self.row().multiplies())
    }

    /// Size of the largest calls that use the kernels of `choice`.
    pub(crate) fn largest_of_kernels(&self, choice: &Choice) -> usize {
        let sharing = self.choices.iter().filter(|it| self.share_kernels(it, choice));
        sharing.map(|it| it.max_size).max().unwrap_or(choice.max_size)
    }

    /// Whether the kernels of `choice` are also loaded in the build for packs (48-byte units of the
    /// LL protocol). True if calls of `choice` send packs, or calls of another choice of the same
    /// variant, which may share the kernels.
    pub(crate) fn loads_packs(&self, choice: &Choice) -> bool {
        self.choices.iter().any(|it| it.variant == choice.variant && it.needs.packs > 0)
    }

    /// Whether the message of a call of `m` rows consists of packs (units of 48 bytes of the LL
    /// protocol), for tests of the number of bytes sent.
    #[doc(hidden)]
    pub fn has_packs_at(&self, m: usize) -> bool {
        self.has_packs(self.at(m), (m, self.request.n))
    }
}
