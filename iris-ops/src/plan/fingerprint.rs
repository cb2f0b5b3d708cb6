//! Fingerprint of a plan: the properties that ranks compare when they make an operator.

use super::Plan;
use crate::options::Request;

impl Plan {
    /// Name and value of every property that must be equal on all ranks, in the order of
    /// comparison.
    pub(crate) fn fingerprint(&self) -> Vec<(&'static str, String)> {
        let Request { row, m, n, k, .. } = self.request;
        let request = &self.request;
        // World, types and shape come first, because the other properties follow from them and the
        // error names the first difference. `uniform_shape` comes before the shape, because it
        // determines whether N and K are compared.
        let mut items = vec![
            ("op", self.op().to_string()),
            ("name", request.name.as_deref().unwrap_or("none").to_string()),
            ("world", self.size().to_string()),
            ("device", self.ranks.device.deciding()),
            ("tuning", self.tuned_by().unwrap_or("built in").into()),
            ("dtype", request.dtype.to_string()),
            ("output", request.output_dtype().to_string()),
            ("wire", request.wire_dtype().to_string()),
            ("tensors", if request.more.is_empty() { "one".into() } else { request.list() }),
            ("uniform_shape", request.uniform_shape.to_string()),
            ("batch_invariant", request.batch_invariant.to_string()),
            ("m", m.to_string()),
        ];
        if row.common.n || request.uniform_shape {
            items.push((if request.elements { "count" } else { "n" }, n.to_string()));
        }
        if row.common.k || request.uniform_shape {
            items.push(("k", k.to_string()));
        }
        // Ranks of an operator that sends nothing need not multiply in the same way: each chooses
        // for its own N and K.
        let choices = if row.is_local() { &[] } else { &self.choices[..] };
        items.extend(choices.iter().map(|choice| match choices.len() {
            1 => ("variant", choice.variant.to_string()),
            _ => ("variant", format!("{} up to {}", choice.variant, choice.max_size)),
        }));
        items.push(("nodes", self.ranks.nodes().to_string()));
        items.extend(choices.iter().map(|choice| ("tile", choice.tile.to_string())));
        items.extend([
            ("epilogue", format!("{:?}", request.epilogue)),
            ("rms_norm", format!("{:?}", request.rms_norm)),
            ("library", request.library.to_string()),
            ("shard", format!("{:?}", request.shard)),
            ("staging", format!("{:?}", request.staged.layout)),
            ("columns_per_flag", format!("{:?}", request.staged.columns_per_flag)),
            ("root", request.root.to_string()),
            ("members", format!("{:?}", request.members)),
            ("reserve_sms", request.reserve_sms.to_string()),
            ("trace_spans", request.trace_spans.to_string()),
            ("first_call", request.first_call.to_string()),
            ("fault_injection", format!("{:?}", request.fault_injection)),
        ]);
        items
    }
}
