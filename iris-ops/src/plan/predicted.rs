//! Predicted times of a plan's calls, and what there is to hold against them.

use super::Plan;
use crate::cost::{Machine, Problem};
use crate::options::TileShape;

impl Plan {
    /// Predicted time of a call of so many rows, or elements of a part, in microseconds: by the parameters of the
    /// device, or of the one that stands in for it. `None` for a variant that is never chosen by its time.
    ///
    /// ```
    /// use iris_ops::{Device, Ranks, all_reduce};
    /// let plan = all_reduce::Options::new(1 << 20).plan(Ranks::new(0, 8).on_device(Device::named("h200")?))?;
    /// let us = plan.predicted(1 << 20).expect("a time");
    /// assert!(plan.limit(1 << 20) < us && us < 1000.0);
    /// # anyhow::Ok(())
    /// ```
    pub fn predicted(&self, size: usize) -> Option<f64> {
        self.predicted_on(&self.ranks.tuning().machine, size)
    }

    /// The same on another machine.
    pub fn predicted_on(&self, machine: &Machine, size: usize) -> Option<f64> {
        let choice = self.at(size);
        let TileShape { m, n } = choice.tile;
        self.problem(size).predict(machine, &self.program(choice), [m, n])
    }

    /// Time in microseconds that no program is below, on the same machine: of the product, or of the bytes that a rank
    /// must send at least.
    pub fn limit(&self, size: usize) -> f64 {
        self.problem(size).limit(&self.ranks.tuning().machine)
    }

    /// Whether the program of such calls has run on this architecture among so many ranks, in the test suite and the
    /// stress test: `auto` takes no other.
    pub fn has_run(&self, size: usize) -> bool {
        let (device, variant) = (self.ranks.device, self.at(size).variant);
        self.alone() || self.ranks.tuning().has_run(variant, device, self.ranks.size)
    }

    /// The tuning file of this machine that times and choices come from, and its digest; `None` for what is built in.
    pub fn tuned_by(&self) -> Option<&'static str> {
        self.ranks.tuning().file.as_deref()
    }

    /// A call of this size.
    fn problem(&self, size: usize) -> Problem {
        let mut request = self.request.clone();
        *if request.elements { &mut request.n } else { &mut request.m } = size;
        Problem::of(self.ranks, &request)
    }
}
