//! The launches of a call: which kernels, of how many workgroups, of how many threads.

use iris_kernels::Kernel;
use iris_sync::barrier::Members;

use super::{Choice, Plan};
use crate::spec::{self, Memory, Norm, Step, Tiles};
use crate::tune;

impl Plan {
    /// The launches of a call, each with the number of its workgroups if that is fixed.
    pub(crate) fn launches(&self, choice: &Choice) -> Vec<(Kernel, Option<u32>)> {
        // Alone there is nothing but the product, or the copy.
        const LOCAL: &[Step] = &[Step::Tiles(Kernel::Local)];
        let steps = match choice.form.launches {
            barrier @ [Step::Call] => barrier,
            _ if self.alone() => LOCAL,
            steps => steps,
        };
        let all = Members::all(self.size());
        let launches = steps.iter().map(|step| step.launch(all, self.members()));
        let behind = self.alone() || choice.form.norm == Norm::Behind;
        let norm = (self.request.rms_norm.is_some() && behind).then_some((Kernel::Norm, None));
        launches.chain(norm).collect()
    }

    /// Workgroups that have something to do in a call of this shape; of those that fetch there may be
    /// `fetchers` more.
    pub(crate) fn work(&self, choice: &Choice, (m, n): (usize, usize), fetchers: u32) -> u32 {
        if let Memory::Pairs(collective) = choice.form.memory
            && !self.alone()
        {
            return self.work_on_pairs(collective, (m, n));
        }
        let grid = self.grid_of(choice.form, choice.tile, (m, n));
        let split = self.split_grid(grid);
        let tiles = match self.request.row.tiles {
            _ if self.alone() => grid.tiles(),
            _ if choice.form.whole == spec::Whole::Gathered => split.part(0).tiles(),
            Tiles::Whole => grid.tiles(),
            Tiles::Own => split.part(0).tiles(),
            Tiles::Split if choice.form.fetches => split.tiles().saturating_add(fetchers),
            Tiles::Split => split.tiles(),
        };
        let most =
            if self.is_product(choice) { u32::MAX } else { tune::message_groups(self.ranks) };
        tiles.clamp(1, most)
    }

    /// Whether the kernels of such a call multiply tiles, and do not only move or add up a message.
    fn is_product(&self, choice: &Choice) -> bool {
        self.op().multiplies() && (!choice.form.is_unfused() || self.alone())
    }

    /// How many of the workgroups of such a call, of which there are `groups`, only send, while the others take or
    /// add up; none where all do both.
    pub(crate) fn senders(
        &self,
        choice: &Choice,
        shape: (usize, usize),
        groups: impl FnOnce() -> u32,
    ) -> u32 {
        // What a rank sends of its own C is not to be written there by others meanwhile, be it with the same bytes.
        let in_place = choice.form.whole == spec::Whole::Rows;
        if self.alone() || self.is_product(choice) || in_place {
            return 0;
        }
        let eighths = tune::sending_eighths(self.ranks, &self.request, choice.form.memory, shape);
        eighths.map_or(0, |eighths| groups() * eighths / 8)
    }

    /// Threads of a workgroup of such a call on a GPU, at most; none for as many as its kernels are built for.
    pub(crate) fn threads(&self, choice: &Choice, (m, n): (usize, usize)) -> Option<u32> {
        let form = choice.form;
        match form.memory {
            _ if self.alone() || self.is_product(choice) || form.is_copied() => None,
            Memory::Pairs(collective) => Some(self.threads_of_pairs(collective, (m, n))),
            memory => tune::threads_of_sums(self.ranks, &self.request, memory, (m, n)),
        }
    }
}
