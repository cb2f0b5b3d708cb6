//! Programs that run while a step between nodes occupies a part of the device.

use super::{Alternative, Core, Program, When, Work};

/// Step of a collective between nodes (for example a kernel of NCCL) that may run on the device at
/// the same time as a program.
///
/// The step's thread blocks wait for other nodes, and the program's launches wait for peers. If
/// either fills the device, the other cannot begin, and four ranks can wait for each other in a
/// circle. So launches that wait for peers leave room for the step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Overlap {
    /// Maximum number of thread blocks of the step. A thread block occupies at most one
    /// multiprocessor.
    pub step_blocks: u32,
    /// Number of multiprocessors that launches which wait for peers leave free.
    pub left_free: u32,
}

impl Program {
    /// Whether a call that meets the conditions of alternative `of` may use this alternative. GEMMs
    /// that wait for peers fill the device. So an alternative with such a GEMM is not used if a
    /// step between nodes may be in flight.
    pub fn takes(&self, of: &Alternative) -> bool {
        let fills = |when: &When| matches!(when, When::Exchanges | When::Stores | When::Gated);
        self.overlap.is_none() || !of.when.iter().any(fills)
    }
}

impl Work {
    /// Whether a launch of the work can wait for peers on the device.
    pub fn waits(self) -> bool {
        match self {
            Work::Kernel(..) | Work::Barrier(_) | Work::BarrierCall | Work::Close(_) => {
                self.effects().are_visible()
            }
            Work::Gemm(gemm) => !matches!(gemm.core, Core::Any | Core::Adding),
            Work::Open(_) | Work::Gate(_) => true,
            Work::Copies(_) | Work::Sums { .. } | Work::CopyReceived(_) | Work::RmsNorm => false,
        }
    }
}
