//! Predicted times of a plan's calls, and a lower limit for comparison.

use std::convert::Infallible;

use iris_kernels::Library;
use iris_kernels::gemm::GemmLaunch;
use iris_kernels::program::{At, Source, Step, Work};
use iris_kernels::schedule::{Grid, split};

use super::Plan;
use crate::cost::{CostParameters, Problem};
use crate::op_row::Part;
use crate::options::TileShape;
use crate::topology::Topology;

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
        self.problem(size).predict(machine, &self.program(self.at(size)))
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

    /// Launches of the built-in GEMM in a call of `size` rows, each with the name of its kernel;
    /// for tests. Assumes that the vendor's library is not installed, that ranks share no device,
    /// and that the matrices are aligned and contiguous.
    #[doc(hidden)]
    pub fn gemms_at(&self, size: usize) -> Vec<(&'static str, GemmLaunch)> {
        let choice = self.at(size);
        let whole = self.library_gemm(choice.form, (self.largest_of_kernels(choice), choice.tile));
        let Some(whole) = whole.filter(|it| it.library != Library::None) else { return Vec::new() };
        let has_engines = !self.on_cpu() && !self.request.count_traffic;
        let (gated, exchanges) = (whole.gated, whole.exchanges && has_engines);
        let Topology { rank, size: ranks, .. } = self.ranks;
        let (rank, TileShape { m, n }) = (rank as u32, choice.tile);
        let [rows, cols, tile_m, tile_n] = [size, self.request.n, m, n].map(|it| it as u32);
        let grid = self.split_grid(Grid { rows, cols, tile_m, tile_n });
        let own = split(rows, grid.size, rank);
        let mut problem =
            Problem { has_library: false, has_engines, gated, exchanges, ..self.problem(size) };
        // The stride between rows does not matter if A has a single row.
        let has_own = matches!(self.row().a, Part::Own | Part::Shard) && !problem.columns;
        problem.product.is_aligned |= has_own && own.len() == 1;
        let program = self.program(choice);
        let Some(of) = problem.alternative(&program) else { return Vec::new() };
        let peers = || (1..ranks as u32).map(|it| (rank + it) % ranks as u32);
        let mut launches = Vec::new();
        let mut visit = |step: &Step, at: At| {
            if let Work::Gemm(gemm) = step.work
                && let Some(rows) = gemm.rows.of(&grid, rank, at)
            {
                let first =
                    if gemm.source == Source::Shard { own.start.min(rows.start) } else { 0 };
                let rows = rows.start - first..rows.end - first;
                launches.extend(problem.of_rows(&gemm, &rows).launch(&gemm));
            }
            Ok::<_, Infallible>(())
        };
        let Ok(()) = program.walk(of, (grid.parts(0).count() as u32, &peers), &mut visit);
        launches
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
        let choice = self.at(size);
        let rows = (self.request.m, self.largest_of_kernels(choice));
        Problem::of(self.ranks, &request, rows, choice.tile)
    }
}
