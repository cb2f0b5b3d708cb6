//! Times of single steps: what crosses the links, what is read and written, what waits for whom.

use iris_heap::DType;
use iris_kernels::Kernel;

use super::Machine;

/// Time of a message: what any takes, and what its bytes do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    pub(super) fixed_us: f64,
    pub(super) moving_us: f64,
}

impl Machine {
    /// A GEMM of whole matrices.
    pub(super) fn gemm(&self, shape: [f64; 3], dtype: DType) -> f64 {
        self.product(shape, dtype, 1.0)
    }

    /// A product whose operations take so many times as long as a GEMM's: whichever takes longer, these or its memory.
    pub(super) fn product(&self, [m, n, k]: [f64; 3], dtype: DType, times: f64) -> f64 {
        if m <= 0.0 {
            return 0.0;
        }
        let bytes = (m * k + k * n + m * n) * dtype.size() as f64;
        let (operations, memory) = (2.0 * m * n * k * times, bytes / self.memory_bytes_per_us);
        self.gemm_us + (operations / self.rate(dtype)).max(memory)
    }

    /// Operations a microsecond.
    pub(super) fn rate(&self, dtype: DType) -> f64 {
        if dtype == DType::F32 { self.flops_f32_per_us } else { self.flops_per_us }
    }

    /// A message of so many bytes, as the whole travels, among `world` ranks; none for a kernel that is no message, or
    /// none that is ever preferred.
    pub(super) fn message(&self, kernel: Kernel, world: f64, bytes: f64) -> Option<Message> {
        use Kernel::*;
        let (peers, others) = (world - 1.0, world - 2.0);
        let entry = self.push_us + self.peer_us * others;
        let sums = entry + self.sum_us;
        // Each rank sends all of it to each peer, or each peer's part of it.
        let (all, parts) = (peers * bytes, peers * bytes / world);
        let pushed = |sent: f64| self.sent(sent, peers, self.link_bytes_per_us);
        // Sums read what came and write it once.
        let summed = |sent: f64, read: f64| pushed(sent) + read / self.sum_bytes_per_us;
        let words = |others: f64, sent: f64| Message {
            fixed_us: self.ll_us + self.peer_us * others,
            moving_us: self.sent(2.0 * sent, peers, self.ll_bytes_per_us),
        };
        // Each rank meets the others and takes from each; of a root's message it takes from one.
        let from_root = others / 2.0;
        let message = |fixed_us, moving_us| Some(Message { fixed_us, moving_us });
        match kernel {
            OneShotLl => Some(words(others, all)),
            ReduceScatterLl | AllGatherLl | AllToAllLl => Some(words(others, parts)),
            // A root has nothing to take, and so stores three words where others store two.
            BroadcastLl => Some(words(from_root, all * 0.75)),
            OneShot => message(sums, summed(all, (world + 1.0) * bytes)),
            ReduceScatter => message(sums, summed(parts, (1.0 + 1.0 / world) * bytes)),
            // The owners' sums leave while others come.
            TwoShot => {
                let second = self.hop_us + self.peer_us * others;
                message(sums + second, summed(2.0 * parts, bytes))
            }
            AllGather | AllToAll | Gather => message(entry, pushed(parts)),
            Broadcast => message(self.push_us + self.peer_us * from_root, pushed(all)),
            // The root sends each part once, and those that get it pass it on.
            Relay => {
                let hop = if others > 0.0 { self.hop_us } else { 0.0 };
                message(entry + hop, pushed(bytes + bytes * others / world))
            }
            Local => message(self.launch_us, 2.0 * bytes / self.memory_bytes_per_us),
            _ => None,
        }
    }

    /// Time of so many bytes to so many peers together, at this rate, or at that of each peer's link.
    pub(super) fn sent(&self, bytes: f64, peers: f64, rate: f64) -> f64 {
        (bytes / rate).max(bytes / peers.max(1.0) / self.peer_link_bytes_per_us)
    }

    /// RMSNorm of rows of so many bytes: read with a residual, and written.
    pub(super) fn norm(&self, bytes: f64) -> f64 {
        self.launch_us + 3.0 * bytes / self.memory_bytes_per_us
    }
}
