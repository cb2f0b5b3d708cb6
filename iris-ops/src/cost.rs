//! Cost model: predicts the time of a call from the steps of its program and the parameters of the
//! machine. A program is the list of launches, copies and waits that execute a call.
//!
//! **Problem.** Which program is fastest depends on shape, number of ranks and machine. Thresholds
//! measured for one machine do not hold for another.
//!
//! **Solution.** A [`CostParameters`] has about twenty parameters with units, which `iris tune`
//! measures. The time of a step is computed from these parameters ([`steps`]). The time of a
//! program is the sum of steps that run one after the other, and the maximum of steps that overlap
//! ([`programs`]). Parameters are fitted to times of GEMMs, barriers and collectives; the times of
//! fused operators are combined from these.
//!
//! **Limits.** The model assumes that ranks are alike and do not share devices. It ignores clocks
//! that drop under load, differing routes between GPUs, and other work on the machine, so errors of
//! 10 % are usual. It compares programs and does not replace a measurement.

pub(crate) mod machine;
pub(crate) mod network;
mod programs;
mod steps;

pub use machine::CostParameters;
pub use network::NetworkRate;
pub(crate) use programs::Problem;

use iris_heap::DType;
use iris_kernels::gemm::GemmCall;
use iris_kernels::program::Program;

use crate::op_names::Op;
use crate::op_row::Part;

impl Problem {
    /// Predicted time in microseconds of a call by this program. `None` if the model has no
    /// prediction for one of the steps, because a program with that step is never the fastest.
    pub(crate) fn predict(&self, machine: &CostParameters, program: &Program) -> Option<f64> {
        self.time(machine, program).filter(|us| us.is_finite())
    }

    /// Expected lower limit in microseconds for any program of the call, from fitted rates: the longer
    /// of the time of the product alone and that of sending the bytes that a rank must send.
    pub(crate) fn limit(&self, machine: &CostParameters) -> f64 {
        let GemmCall { shape, dtypes: [dtype, output, wire], ranks, .. } = self.product;
        let [m, n, k] = shape.map(|it| it as f64);
        let world = ranks as f64;
        let row = self.row;
        let columns = if row.gathers_a() { k } else { n };
        let parts = |dtype: DType| m * columns * dtype.size() as f64 / world;
        let part = parts(if row.gathers_a() { dtype } else { wire });
        // Some programs send sums in the type of C, others in the type of partial sums. The limit
        // counts the smaller type.
        let sums = part.min(parts(output));
        let rows = if row.a == Part::Own { m / world } else { m };
        // The root of a broadcast sends each byte to one rank, which passes it on.
        let (sent, peers) = match row.message {
            Op::AllReduce => ((part + sums) * (world - 1.0), world - 1.0),
            Op::Broadcast if ranks > 1 => (part * world, world - 1.0),
            Op::AllGather | Op::ReduceScatter | Op::AllToAll => (part * (world - 1.0), world - 1.0),
            _ => (0.0, 1.0),
        };
        // Partial products are written in the wire type, in which they are sent; sums are written
        // in the type of C. The limit assumes the smaller type.
        let written = if wire.size() < output.size() { wire } else { output };
        // On the CPU the tile kernels may multiply faster than whole-matrix GEMMs. The limit
        // assumes the faster of the two.
        let times = machine.tile_core.min(1.0);
        let product = if row.multiplies() {
            machine.product([rows, n, k], [dtype, written], times)
        } else {
            0.0
        };
        product.max(machine.sent(sent, peers, machine.link_bytes_per_us))
    }
}
