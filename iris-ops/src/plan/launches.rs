//! The program of a call, and its launches: of how many workgroups, of how many threads.

use iris_kernels::program::{Norm, Program};

use super::{Choice, Plan};
use crate::spec::{self, Form, Memory, Tiles};
use crate::tune;

impl Plan {
    /// The steps that calls of a choice enqueue: its alternatives with their conditions, as data and, printed, as text.
    ///
    /// ```
    /// use iris_ops::{Device, Ranks, matmul_all_reduce};
    /// let options = matmul_all_reduce::Options::new(512, 8192, 3584).dtype(iris_heap::DType::BF16);
    /// let plan = options.plan(Ranks::new(0, 2).on_device(Device::named("h200")?))?;
    /// println!("{}", plan.program(plan.at(512)));
    /// # anyhow::Ok(())
    /// ```
    pub fn program(&self, choice: &Choice) -> Program {
        self.program_of(choice.form)
    }

    /// The steps of calls of a form.
    pub(super) fn program_of(&self, form: &Form) -> Program {
        let (alternatives, norm) = match self.alone() {
            true => (self.row().alone, Norm::Last),
            false => (form.program, form.norm),
        };
        let norm = if self.request.rms_norm.is_some() { norm } else { Norm::None };
        Program { alternatives, norm, members: self.members() }
    }

    /// Workgroups that have something to do in a call of this shape; of those that fetch there may be
    /// `fetchers` more.
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
            _ if choice.form.whole == spec::Whole::Gathered => split.part(0).tiles(),
            Tiles::Whole => grid.tiles(),
            Tiles::Own => split.part(0).tiles(),
            Tiles::Split if choice.form.fetches => split.tiles().saturating_add(fetchers),
            Tiles::Split => split.tiles(),
        };
        let most = if self.is_product(choice) { u32::MAX } else { choice.sizing.most_groups };
        tiles.clamp(1, most)
    }

    /// Whether the kernels of such a call multiply tiles, and do not only move or add up a message.
    fn is_product(&self, choice: &Choice) -> bool {
        self.row().multiplies() && (!choice.form.is_unfused() || self.alone())
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
        match choice.sizing.sending_eighths(tune::message_bytes(&self.request, shape)) {
            0 => 0,
            eighths => groups() * eighths / 8,
        }
    }

    /// Threads of a workgroup of such a call on a GPU, at most; none for as many as its kernels are built for.
    pub(crate) fn threads(&self, choice: &Choice, (m, n): (usize, usize)) -> Option<u32> {
        let form = choice.form;
        match form.memory {
            _ if self.alone() || self.is_product(choice) || form.is_copied() => None,
            Memory::Pairs(collective) => Some(self.threads_of_pairs(choice, collective, (m, n))),
            _ => choice.sizing.threads(tune::message_bytes(&self.request, (m, n))),
        }
    }

    /// Whether each thread of such a launch has several items of an LL message that is the same both ways between two
    /// ranks. The last wave takes no items.
    pub(crate) fn has_several_items(
        &self,
        choice: &Choice,
        shape: (usize, usize),
        groups: u32,
    ) -> bool {
        const WAVE: u32 = 32;
        let Memory::Pairs(collective) = choice.form.memory else { return false };
        let items = self.items(collective, shape);
        let sent = items.sent(0, 1);
        let alike =
            || [(0, 0), (1, 0), (1, 1)].into_iter().all(|(from, to)| items.sent(from, to) == sent);
        let threads = self.threads_of_pairs(choice, collective, shape);
        self.size() == 2 && alike() && sent > groups.saturating_mul(threads.saturating_sub(WAVE))
    }
}
