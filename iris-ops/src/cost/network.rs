//! Predicted times of collectives over several nodes, as NCCL executes them.
//!
//! **Problem.** An operator over several nodes overlaps its steps between nodes with work in the
//! node. Its time depends on a network that is usually not available when a plan is made.
//!
//! **Solution.** Each collective costs a fixed time, a latency per hop, and the time for its bytes
//! at the rate of the network. NCCL itself chooses its algorithms by this model
//! (`src/graph/tuning.cc`). The constants are NCCL's, and the rate is an input ([`NetworkRate`]).
//! None of these numbers was fitted here.
//!
//! **Limits.** All ranks are alike, and each rank has a separate port. Congestion, switches with
//! in-network sums, NCCL's LL128 protocol and its algorithms NVLS, PAT and CollNet are left out.

/// Collective between nodes, with the number of bytes from which its time is predicted.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Collective {
    /// Sum of `bytes` of each rank; all ranks get the sum.
    AllReduce { bytes: f64 },
    /// Gather of equal parts of all ranks into `bytes`, which all ranks get.
    AllGather { bytes: f64 },
    /// Sum of `bytes` of each rank; each rank gets an equal part of the sum.
    ReduceScatter { bytes: f64 },
    /// Exchange of `bytes` of each rank: an equal part goes to each rank, including itself.
    AllToAll { bytes: f64 },
    /// Copy of `bytes` of the root to all ranks.
    Broadcast { bytes: f64 },
}

/// Network between nodes, as an input of predictions. Each rank has a separate port to the network.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NetworkRate {
    /// Rate of a port in each direction, in bytes per microsecond. A port sends and receives at the
    /// same time.
    pub bytes_per_us: f64,
}

/// Constants of one of NCCL's algorithms with one of its protocols. Times are in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Algorithm {
    /// Time of a collective without data, except for the latency of its hops.
    pub(crate) fixed_us: f64,
    /// Latency of a hop between two nodes with several ranks each.
    hop_us: f64,
    /// Latency of a hop between two nodes with one rank each. NCCL uses the latency of the tree
    /// here, because no hop within a node hides this latency.
    alone_us: f64,
    /// Latency of a hop between two ranks of one node.
    near_us: f64,
    /// Rate at which data moves, as a fraction of the line rate of the links.
    share: f64,
    /// Whether hops form a binary tree of the nodes; otherwise they form a ring.
    pub(crate) is_tree: bool,
}

/// Ring and tree with NCCL's Simple protocol, then ring and tree with its LL protocol. The
/// constants are from NCCL 2.30.7, `ncclTunerConstantsDefaults`: base latencies, and hardware
/// latencies of the rows NVLINK and NET. A tree reaches 0.92 of the links' rate. With LL, a ring
/// reaches half of the rate and a tree 1/3.8 of it.
pub(crate) const ALGORITHMS: [Algorithm; 4] = [
    Algorithm {
        fixed_us: 8.4,
        hop_us: 14.0,
        alone_us: 14.0,
        near_us: 3.4,
        share: 1.0,
        is_tree: false,
    },
    Algorithm {
        fixed_us: 8.4,
        hop_us: 14.0,
        alone_us: 14.0,
        near_us: 4.0,
        share: 0.92,
        is_tree: true,
    },
    Algorithm {
        fixed_us: 6.6,
        hop_us: 2.7,
        alone_us: 5.0,
        near_us: 0.6,
        share: 0.5,
        is_tree: false,
    },
    Algorithm {
        fixed_us: 6.8,
        hop_us: 5.0,
        alone_us: 5.0,
        near_us: 0.6,
        share: 0.92 / 3.8,
        is_tree: true,
    },
];

impl Algorithm {
    /// Rate in bytes per microsecond at which the algorithm moves data over links with the line
    /// rate `rate`.
    pub(crate) fn rate(&self, rate: f64) -> f64 {
        rate * self.share
    }

    /// Latency in microseconds of a hop between nodes that have `local` ranks each.
    pub(crate) fn far_us(&self, local: usize) -> f64 {
        if local == 1 { self.alone_us } else { self.hop_us }
    }
}

impl NetworkRate {
    /// Makes a network whose ports each have a line rate of `gbit` Gbit/s.
    pub fn of_gbit(gbit: f64) -> Self {
        Self { bytes_per_us: gbit * 1e3 / 8.0 }
    }

    /// Time of a collective over `nodes` nodes of `local` ranks each, in microseconds, by NCCL's
    /// fastest algorithm. `link` is the rate in bytes per microsecond at which a rank sends to the
    /// ranks of its node.
    pub(crate) fn collective(
        &self,
        collective: Collective,
        (nodes, local): (usize, usize),
        link: f64,
    ) -> f64 {
        let times = ALGORITHMS
            .iter()
            .filter_map(|algorithm| self.time(algorithm, collective, (nodes, local), link));
        times.fold(f64::INFINITY, f64::min)
    }

    /// Predicted time of a collective by this algorithm, in microseconds; `None` if NCCL does not
    /// implement the collective by this algorithm.
    pub(crate) fn time(
        &self,
        algorithm: &Algorithm,
        collective: Collective,
        (nodes, local): (usize, usize),
        link: f64,
    ) -> Option<f64> {
        let ranks = (nodes * local) as f64;
        // The rings or trees of NCCL use all ports of a node together, and pass through the links
        // of each rank.
        let rate = algorithm.rate((self.bytes_per_us * local as f64).min(link));
        let (far, near) = (algorithm.far_us(local), algorithm.near_us);
        let depth = f64::from(nodes.max(1).ilog2());
        // In a ring, each rank forwards data to the next rank, and the data goes around `times`
        // times. `between` is the number of hops between nodes.
        let ring = |times: f64, moved: f64| {
            let (hops, between) = (times * (ranks - 1.0), times * (nodes as f64 - 1.0));
            algorithm.fixed_us + (hops - between) * near + between * far + moved / rate
        };
        let part = (ranks - 1.0) / ranks;
        Some(match collective {
            Collective::AllReduce { bytes } if algorithm.is_tree => {
                let hops = 2.0 * ((local as f64 - 1.0) * near + depth * far);
                algorithm.fixed_us + hops + 2.0 * bytes / rate
            }
            _ if algorithm.is_tree => return None,
            Collective::AllReduce { bytes } => ring(2.0, 2.0 * part * bytes),
            Collective::AllGather { bytes } | Collective::ReduceScatter { bytes } => {
                ring(1.0, part * bytes)
            }
            Collective::Broadcast { bytes } => ring(1.0, bytes),
            // In an all-to-all, each rank sends to all other ranks at once, through its own port
            // and its own links.
            Collective::AllToAll { bytes } => {
                let away = bytes * (ranks - local as f64) / ranks;
                let near = bytes * (local as f64 - 1.0) / ranks / link;
                let rate = algorithm.rate(self.bytes_per_us);
                algorithm.fixed_us + far + (away / rate).max(near)
            }
        })
    }
}
