//! Progress that each rank of this node publishes on its board: the call that it is in, and the
//! node that it waits for in a step between nodes.

use iris_sync::FaultKind;

use super::Control;
use crate::board::{AwaitedNode, Boards};

impl Control {
    /// Sets the names of the nodes, by index.
    pub(crate) fn set_nodes(&self, names: Vec<String>) {
        let _ = self.nodes.set(names);
    }

    /// Tells the ranks of this node that this rank waits in a step between nodes, and for which
    /// node, so that kernels that wait for this rank do not blame it. `None` ends the step.
    pub fn publish_step(&self, step: Option<AwaitedNode>) {
        if let Some(boards) = self.boards()
            && let Err(error) = boards.set_step(step)
        {
            tracing::debug!(%error, "a step between nodes is not told to other ranks");
        }
    }

    /// Name of the node that `rank` waits for in a step between nodes; `None` if `rank` is in no
    /// such step.
    pub(super) fn node_awaited_by(&self, rank: usize) -> Option<String> {
        let boards = self.boards().filter(|boards| rank < boards.ranks())?;
        Some(match boards.step(rank).ok()?? {
            AwaitedNode::Unknown => "another node".into(),
            AwaitedNode::Node(node) => {
                let name = self.nodes.get().and_then(|names| names.get(node));
                name.map_or(format!("node {node}"), |name| format!("node {node} (host {name})"))
            }
        })
    }

    /// Text that lists the ranks that wait in a step between nodes, to be appended to another text;
    /// empty if there are none.
    pub(crate) fn steps(&self) -> String {
        let ranks = 0..self.boards().map_or(0, Boards::ranks);
        let steps = ranks.filter_map(|rank| Some((rank, self.node_awaited_by(rank)?)));
        let text = |(rank, node)| format!("; rank {rank} waits for {node} in a step between nodes");
        steps.map(text).collect()
    }

    /// Operator and call that each rank is in, as far as the hosts know, if `fault` concerns calls
    /// of another rank; `None` for other faults.
    pub(super) fn standing(&self, fault: &iris_sync::Fault) -> Option<Vec<String>> {
        use iris_sync::Field;
        let about_calls = match fault.kind {
            FaultKind::NotEntered | FaultKind::NoProgress => true,
            FaultKind::Mismatch => matches!(fault.differing(), Some(Field::Op | Field::Sequence)),
            _ => false,
        };
        let all = self.boards().filter(|_| about_calls)?.standing().ok()??;
        let text = |(rank, (call, operator)): (usize, (u64, Option<u32>))| {
            let place = match operator {
                Some(operator) => {
                    format!("in {}, call {call} of the heap", self.describe(operator))
                }
                None if call == 0 => "in no operator: it has issued no call".into(),
                None => format!("in call {call} of the heap"),
            };
            match self.node_awaited_by(rank) {
                Some(node) => format!("{place}, in a step between nodes, waiting for {node}"),
                None => place,
            }
        };
        Some(all.into_iter().enumerate().map(text).collect())
    }
}
