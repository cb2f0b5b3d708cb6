//! Counters and traces that the calls of an operator have written.

use iris_kernels::args::counter;
use iris_kernels::trace::{self, TraceSpan};

use super::Operator;
use crate::counters::Counters;
use crate::error::{Error, InOp, Result};

impl Operator {
    pub(crate) fn counters(&self) -> Result<Counters> {
        self.labelled(self.counted())
    }

    fn counted(&self) -> Result<Counters> {
        let op = self.plan.op();
        if !self.plan.on_cpu() && !self.plan.request().count_traffic {
            let expected = "a plan with Options::count_traffic(true)";
            return Err(Error::invalid(op, "counters of an op on a GPU", "not counted", expected));
        }
        let words = self.heap.read_device_words(self.words).in_op(op)?;
        let value = |which: usize| {
            let half = |index: usize| u64::from(words[index] as u32);
            half(2 * which) | half(2 * which + 1) << 32
        };
        Ok(Counters {
            pushed: value(counter::PUSHED),
            pulled: value(counter::PULLED),
            flags: value(counter::FLAGS),
            waits: value(counter::WAITS),
        })
    }

    pub(crate) fn trace(&self) -> Result<Vec<Vec<TraceSpan>>> {
        let op = self.plan.op();
        let Some(slice) = self.trace else { return Ok(Vec::new()) };
        let bytes = self.heap.read(slice).in_op(op)?;
        let spans = self.plan.request().trace_spans;
        let (groups, dropped) = trace::read_buffer(&bytes[..trace::buffer_bytes(spans)], spans);
        if dropped > 0 {
            tracing::warn!(%op, rank = self.heap.rank(), dropped, "the trace is full: spans were dropped; plan with more trace_spans");
        }
        Ok(groups)
    }
}
