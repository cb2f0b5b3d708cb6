//! Predicted time of a call over several nodes, with the network as an input.

use super::steps::{NodeStep, steps};
use crate::cost::network::{Collective, NetworkRate};
use crate::op_row::{Composition, Part};
use crate::plan::Plan;

/// Predicted times of a call over several nodes, in microseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct Forecast {
    /// Time of the whole call. Work within the node and steps between nodes overlap.
    pub total_us: f64,
    /// Time of the call's operators within the node, without waits for other nodes.
    pub node_us: f64,
    /// Time of all steps between nodes, including the time that overlaps with work within the node.
    pub network_us: f64,
    /// Time of the baseline: a GEMM alone, and then one collective by NCCL over all ranks. For an
    /// all-gather before a product, the collective comes first.
    pub unfused_us: f64,
    /// Number of blocks of M into which the call is split: each has a step between nodes.
    pub blocks: usize,
}

impl Plan {
    /// Predicts a call of `m` rows over several nodes. `None` on one node, for messages of
    /// elements, and if the model has no prediction for an operator of the node.
    ///
    /// The predicted time of a step between nodes is that of NCCL's collective, even if the plan's
    /// backend has no such steps. So a plan for GPUs can be predicted before it can be run.
    ///
    /// ```
    /// use iris_ops::{Device, NetworkRate, Topology, matmul_all_reduce};
    /// let ranks = Topology::new(0, 32).on_nodes(4).on_device(Device::named("h200")?);
    /// let plan = matmul_all_reduce::Options::new(8192, 8192, 3584).plan(ranks)?;
    /// let forecast = plan.forecast(&NetworkRate::of_gbit(400.0), 8192).expect("a prediction");
    /// assert!(forecast.total_us < forecast.unfused_us);
    /// # anyhow::Ok(())
    /// ```
    pub fn forecast(&self, network: &NetworkRate, m: usize) -> Option<Forecast> {
        let composed = self.composed()?;
        let nodes = self.ranks.nodes();
        // Times in microseconds at which the caller's stream (`main_us`), and the stream of the
        // exchanges (`lane_us`), will have completed the work so far.
        let (mut main_us, mut lane_us) = (0.0_f64, 0.0_f64);
        let (mut node_us, mut network_us) = (0.0, 0.0);
        let mut ends = Vec::new();
        for step in steps(self, m)? {
            match step {
                NodeStep::Part { role, size } => {
                    let us = composed.parts.get(&role)?.predicted_us(size)?;
                    main_us += us;
                    node_us += us;
                }
                NodeStep::Exchange { kind, bytes } => {
                    let collective = kind.collective(bytes as f64, nodes);
                    let us = network.collective(collective, (nodes, 1), f64::INFINITY);
                    lane_us = lane_us.max(main_us) + us;
                    network_us += us;
                    ends.push(lane_us);
                }
                NodeStep::Wait(index) => main_us = main_us.max(*ends.get(index)?),
            }
        }
        let (total_us, blocks) = (main_us.max(lane_us), composed.blocks);
        let unfused_us = self.unfused(network, m)?;
        Some(Forecast { total_us, node_us, network_us, unfused_us, blocks })
    }

    /// Time of the unfused baseline: a GEMM alone, and then one collective by NCCL over all ranks.
    fn unfused(&self, network: &NetworkRate, m: usize) -> Option<f64> {
        let (request, row, ranks) = (&self.request, self.row(), self.ranks);
        let machine = &ranks.tuning().machine;
        let (rows, n, k) = (m as f64, request.n as f64, request.k as f64);
        let (columns, sent) =
            if row.gathers_a() { (k, request.dtype) } else { (n, request.wire_dtype()) };
        let bytes = rows * columns * sent.size() as f64;
        let collective = match row.composed {
            Composition::AllReduce { .. } => Collective::AllReduce { bytes },
            Composition::GatherA | Composition::GatherC => Collective::AllGather { bytes },
            Composition::ReduceScatter => Collective::ReduceScatter { bytes },
            Composition::AllToAll => Collective::AllToAll { bytes },
            Composition::Broadcast => Collective::Broadcast { bytes },
            // NCCL has no barrier; programs usually use an all-reduce of one word instead.
            Composition::Barrier => Collective::AllReduce { bytes: 4.0 },
            Composition::Alone => return None,
        };
        let product = if row.multiplies() {
            let rows = if row.a == Part::Own { rows / ranks.size as f64 } else { rows };
            let written =
                if row.gathers_a() { request.output_dtype() } else { request.wire_dtype() };
            machine.gemm([rows, n, k], [request.dtype, written])
        } else {
            0.0
        };
        let over = (ranks.nodes(), ranks.local().size);
        Some(product + network.collective(collective, over, machine.link_bytes_per_us))
    }
}
