//! Predicted times of single steps: transfers over links, memory traffic, waits for peers.

use iris_heap::DType;
use iris_kernels::Kernel;
use iris_kernels::dtype::has_mma;

use super::CostParameters;

/// Time of a message: the sum of a fixed time and of a time that is proportional to the number of
/// its bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    pub(super) fixed_us: f64,
    pub(super) moving_us: f64,
}

impl CostParameters {
    /// Time of a whole-matrix GEMM, in microseconds; `types` is as for [`CostParameters::product`].
    pub(crate) fn gemm(&self, shape: [f64; 3], types: [DType; 2]) -> f64 {
        self.product(shape, types, 1.0)
    }

    /// Time of a product whose arithmetic takes `times` as long as that of a library GEMM. It is
    /// the longer of the times for arithmetic and memory traffic, plus the fixed time. `dtype` is the
    /// type of A and B, `result` the type in which the product is written.
    pub(super) fn product(
        &self,
        [m, n, k]: [f64; 3],
        [dtype, result]: [DType; 2],
        times: f64,
    ) -> f64 {
        if m <= 0.0 {
            return 0.0;
        }
        let bytes = (m * k + k * n) * dtype.size() as f64 + m * n * result.size() as f64;
        let (operations, memory) = (2.0 * m * n * k * times, bytes / self.memory_bytes_per_us);
        self.gemm_us + (operations / self.rate(dtype)).max(memory)
    }

    /// Rate of GEMMs of this element type, in floating-point operations per microsecond.
    pub(super) fn rate(&self, dtype: DType) -> f64 {
        if has_mma(dtype) { self.flops_per_us } else { self.flops_f32_per_us }
    }

    /// Time of a message of `bytes` bytes in total, among `world` ranks; `None` for kernels that
    /// send no message or are never the fastest. `packed_bytes` is the smallest number of bytes per
    /// peer with which a message by the LL protocol consists of packs (units of 48 bytes).
    pub(super) fn message(
        &self,
        kernel: Kernel,
        world: f64,
        bytes: f64,
        packed_bytes: Option<f64>,
    ) -> Option<Message> {
        use Kernel::*;
        let (peers, others) = (world - 1.0, world - 2.0);
        let entry = self.push_us + self.peer_us * others;
        let sums = entry + self.sum_us;
        // Number of bytes that a rank sends to all peers together: `all` if each peer gets the
        // whole message, `parts` if each peer gets only its part.
        let (all, parts) = (peers * bytes, peers * bytes / world);
        let pushed = |sent: f64| self.sent(sent, peers, self.link_bytes_per_us);
        // The rank that computes a sum reads the data that has arrived, and writes the result once.
        let summed = |sent: f64, read: f64| pushed(sent) + read / self.sum_bytes_per_us;
        let words = |others: f64, sent: f64, to_one: f64| {
            // Bytes sent, including flags. Data in pairs (a word and its flag) is doubled. In
            // packs, 12 bytes of data take 16 bytes.
            let packed = packed_bytes.is_some_and(|from| to_one >= from);
            let bytes = if packed { sent * 4.0 / 3.0 } else { sent * 2.0 };
            let fixed_us = self.ll_us + self.ll_peer_us * others;
            Message { fixed_us, moving_us: self.sent(bytes, peers, self.ll_bytes_per_us) }
        };
        // In a broadcast a rank waits for one peer only, so the time per peer is halved. The root
        // receives nothing, so it stores four LL words in the time in which a rank that also receives
        // stores three.
        let (from_root, by_root) = (others / 2.0, 0.75);
        let message = |fixed_us, moving_us| Some(Message { fixed_us, moving_us });
        match kernel {
            OneShotLl | OneShotCombineLl => Some(words(others, all, bytes)),
            ReduceScatterLl
            | ReduceScatterCombineLl
            | AllGatherLl
            | AllGatherListLl
            | AllToAllLl => Some(words(others, parts, bytes / world)),
            BroadcastLl => Some(words(from_root, all * by_root, bytes)),
            TwoShotLl => {
                let Message { fixed_us, moving_us } =
                    words(others, 2.0 * parts, 2.0 * bytes / world);
                message(fixed_us + self.ll_hop_us, moving_us)
            }
            // With two ranks there is no second hop, and the predicted time equals that of
            // `BroadcastLl`. Of two equal times the first in the list of variants is chosen, so the
            // choice is `BroadcastLl`.
            RelayLl => {
                let Message { fixed_us, moving_us } =
                    words(from_root, 2.0 * parts * by_root, 2.0 * bytes / world);
                message(fixed_us + if others > 0.0 { self.ll_hop_us } else { 0.0 }, moving_us)
            }
            OneShot => message(sums, summed(all, (world + 1.0) * bytes)),
            ReduceScatter => message(sums, summed(parts, (1.0 + 1.0 / world) * bytes)),
            // The rank that sums a tile sends the sum while other tiles are still arriving.
            TwoShot => {
                let second = self.hop_us + self.peer_us * others;
                message(sums + second, summed(2.0 * parts, bytes))
            }
            AllGather | AllToAll | Gather => message(entry, pushed(parts)),
            Broadcast => message(self.push_us + self.peer_us * from_root, pushed(all)),
            // The root sends each part once, and the receiver forwards it to the other ranks.
            Relay => {
                let hop = if others > 0.0 { self.hop_us } else { 0.0 };
                message(entry + hop, pushed(bytes + bytes * others / world))
            }
            Local => message(self.launch_us, 2.0 * bytes / self.memory_bytes_per_us),
            _ => None,
        }
    }

    /// Time to send bytes to `peers` peers together. It is limited by the total rate, or by the
    /// rate of each peer's link.
    pub(super) fn sent(&self, bytes: f64, peers: f64, rate: f64) -> f64 {
        (bytes / rate).max(bytes / peers.max(1.0) / self.peer_link_bytes_per_us)
    }

    /// Time of an RMSNorm over rows of `bytes` bytes: it reads the rows and the residual, and
    /// writes the result.
    pub(super) fn norm(&self, bytes: f64) -> f64 {
        self.launch_us + 3.0 * bytes / self.memory_bytes_per_us
    }
}
