//! Decoder steps: all-reduces of many layers in one graph, with and without a small kernel between
//! them, to find the cost of an additional layer.

use std::rc::Rc;

use anyhow::Result;
use iris_heap::Stream;
use iris_kernels::rtc::KernelSource;

use super::baseline::Baseline;
use super::called::Called;
use super::row_kernel::RowKernel;

/// Source of the kernel `touch`, which runs between two all-reduces of a step, in place of a layer's
/// computation.
pub(super) const SOURCE: KernelSource<'_> =
    KernelSource { name: "touch.cu", text: include_str!("touch.cu") };

/// Implementation of the all-reduce of a layer.
pub(super) enum Sum<'a> {
    Op(Rc<Called>),
    Library(Rc<Baseline<'a>>),
    /// No all-reduce: the step has only the kernels between, whose time is then subtracted.
    None,
}

/// Decoder step to time: one all-reduce per layer, all in one graph.
pub(super) struct Step<'a> {
    pub(super) layers: usize,
    pub(super) sum: Sum<'a>,
    pub(super) between: Option<Rc<RowKernel>>,
}

impl Step<'_> {
    pub(super) fn name(&self) -> String {
        let sum = match &self.sum {
            Sum::Op(called) => called.name(),
            Sum::Library(_) => "a library's sum".into(),
            Sum::None => "no sum".into(),
        };
        let between = if self.between.is_some() { ", each after a small kernel" } else { "" };
        format!("a step of {} times {sum}{between}", self.layers)
    }

    /// Enqueues one all-reduce for each layer, with the kernels between them if there are any.
    pub(super) fn run(
        &self,
        stream: &Stream,
        library: impl Fn(&Baseline<'_>) -> Result<()>,
    ) -> Result<()> {
        for _ in 0..self.layers {
            if let Some(between) = &self.between {
                between.run(stream)?;
            }
            match &self.sum {
                Sum::Op(called) => called.run(stream)?,
                Sum::Library(baseline) => library(baseline)?,
                Sum::None => {}
            }
        }
        Ok(())
    }

    /// Frees the operator of the step. Collective.
    pub(super) fn free(self) -> Result<()> {
        match self.sum {
            Sum::Op(called) => Rc::into_inner(called).map_or(Ok(()), Called::free),
            Sum::Library(_) | Sum::None => Ok(()),
        }
    }
}

/// Decoder steps among the sides of one shape, given by the sides' indices. A whole step has all
/// layers, a half step has half as many.
#[derive(Clone, Copy)]
pub(super) struct Steps {
    pub(super) layers: usize,
    /// Steps whose all-reduces are done by the op (`op`), by a library (`library`, if there is
    /// one), or left out (`none`). First index: without or with a kernel between the all-reduces.
    /// Second index: whole or half step.
    pub(super) op: [[usize; 2]; 2],
    pub(super) library: Option<[[usize; 2]; 2]>,
    pub(super) none: [usize; 2],
}

impl Steps {
    /// Time in microseconds of an additional layer, from whole and half steps: the fixed costs of a
    /// graph and of its first call cancel.
    pub(super) fn marginal(&self, [whole, half]: [usize; 2], us: impl Fn(usize) -> f64) -> f64 {
        let more = self.layers - self.layers / 2;
        (us(whole) - us(half)) / more as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_further_layer_is_what_is_left_without_the_start() {
        let op = [[0, 1]; 2];
        let steps = Steps { layers: 81, op, library: None, none: [0, 1] };
        // Assumed costs: 20 us per step, and 1.5 us per layer. A whole step has 81 layers; a half
        // step has 40, which is half of 81 rounded down.
        let us = |side: usize| 20.0 + 1.5 * [81.0, 40.0][side];
        assert!((steps.marginal(op[0], us) - 1.5).abs() < 1e-9);
    }
}
