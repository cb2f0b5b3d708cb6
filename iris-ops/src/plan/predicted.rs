//! Predicted times of a plan's calls, and a lower limit for comparison.

use super::Plan;
use crate::cost::{CostParameters, Problem};
use crate::options::TileShape;

impl Plan {
    /// Predicted time in microseconds of a call of `size` rows (or elements of a part). It is
    /// computed from the tuning data of the device or, if there is none, of a similar device.
    /// `None` for variants without a prediction, which `auto` never chooses, and over several nodes
    /// (see [`Plan::forecast`]).
    ///
    /// ```
    /// use iris_ops::{Device, Topology, all_reduce};
    /// let plan = all_reduce::Options::new(1 << 20).plan(Topology::new(0, 8).on_device(Device::named("h200")?))?;
    /// let us = plan.predicted_us(1 << 20).expect("a time");
    /// assert!(plan.lower_bound_us(1 << 20) < us && us < 1000.0);
    /// # anyhow::Ok(())
    /// ```
    pub fn predicted_us(&self, size: usize) -> Option<f64> {
        self.predicted_us_on(&self.ranks.tuning().machine, size)
    }

    /// Predicted time in microseconds of a call on a machine with these parameters; otherwise like
    /// [`Plan::predicted_us`].
    pub fn predicted_us_on(&self, machine: &CostParameters, size: usize) -> Option<f64> {
        if self.composed.is_some() {
            return None;
        }
        let choice = self.at(size);
        let TileShape { m, n } = choice.tile;
        self.problem(size).predict(machine, &self.program(choice), [m, n])
    }

    /// Expected lower limit in microseconds for the time of a call by any program, from fitted
    /// rates: the longer of the time of the product alone and that of sending the bytes that a rank
    /// must send. Single calls were measured up to 8 % below this limit.
    pub fn lower_bound_us(&self, size: usize) -> f64 {
        self.problem(size).limit(&self.ranks.tuning().machine)
    }

    /// Whether the variant for calls of this size has passed the test suite and the stress test on
    /// this architecture with this number of ranks. `auto` chooses only such variants. If no
    /// variant has passed, `auto` chooses among the variants in which nothing depends on the
    /// architecture or on the number of ranks.
    pub fn has_run(&self, size: usize) -> bool {
        let (device, world, tuning) = (self.ranks.device, self.ranks.size, self.ranks.tuning());
        let here = tuning.has_run_any(device, world);
        self.alone() || here && tuning.allows(self.at(size).variant, device, world)
    }

    /// Path and digest of the tuning file of this machine that the plan used; `None` for built-in
    /// tuning data.
    pub fn tuned_by(&self) -> Option<&'static str> {
        self.ranks.tuning().file.as_deref()
    }

    /// Input of the cost model for a call of `size` rows, or elements of a part.
    fn problem(&self, size: usize) -> Problem {
        let mut request = self.request.clone();
        *if request.elements { &mut request.n } else { &mut request.m } = size;
        Problem::of(self.ranks, &request)
    }
}
