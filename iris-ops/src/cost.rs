//! Cost of a call: its predicted time, from the steps of its program and a few parameters of the machine.
//!
//! **Problem.** Which of several programs is the quickest depends on the shape, the number of ranks and the machine.
//! Thresholds for one of them say nothing of another.
//!
//! **Solution.** A [`Machine`] is some twenty parameters with units, which `iris tune` measures. The time of a step
//! follows from them ([`steps`]); a program adds up what is one after the other and takes the longer of what overlaps
//! ([`programs`]). Parameters are fitted to GEMMs, barriers and messages; products with messages are put together of
//! these.
//!
//! **Limits.** Ranks are alike and alone on their devices. Clocks that fall under load, routes between GPUs that
//! differ, and what else runs on the machine are not in it: errors of a tenth are usual. It compares programs; it
//! does not replace a measurement.

mod machine;
mod programs;
mod steps;

pub use machine::Machine;
pub(crate) use programs::Problem;

use iris_kernels::program::Program;

use crate::kind::Op;
use crate::spec::Part;

impl Problem {
    /// Predicted time of a call by a program with this tile, in microseconds; none for a program with a step that
    /// nobody prefers and so has no prediction.
    pub(crate) fn predict(
        &self,
        machine: &Machine,
        program: &Program,
        tile: [usize; 2],
    ) -> Option<f64> {
        self.time(machine, program, tile).filter(|us| us.is_finite())
    }

    /// Time in microseconds that no program is below: of the product, or of the bytes that a rank must send at least.
    pub(crate) fn limit(&self, machine: &Machine) -> f64 {
        let [m, n, k] = self.shape.map(|it| it as f64);
        let world = self.world as f64;
        let row = self.row;
        let columns = if row.gathers_a() { k } else { n };
        let part = m * columns * self.wire.size() as f64 / world;
        let rows = if row.a == Part::Own { m / world } else { m };
        // What one rank has all of goes to the next rank, as if each passed it on while it comes.
        let (sent, peers) = match row.message {
            Op::AllReduce => (2.0 * part * (world - 1.0), world - 1.0),
            Op::Broadcast if self.world > 1 => (part * world, 1.0),
            Op::AllGather | Op::ReduceScatter | Op::AllToAll => (part * (world - 1.0), world - 1.0),
            _ => (0.0, 1.0),
        };
        let product = if row.multiplies() { machine.gemm([rows, n, k], self.dtype) } else { 0.0 };
        product.max(machine.sent(sent, peers, machine.link_bytes_per_us))
    }
}
