//! Plans of the operators that are timed for one shape.

use anyhow::Result;
use iris_ops::{OpRequest, Plan, Topology};
use iris_testkit::oracle::{Meaning, Rows, split};
use iris_testkit::rank_setup::Room;
use iris_testkit::suite::{self, Op, Options as OpOptions};

use super::Shape;

/// Plans that a rank makes for one shape.
pub(super) struct Plans {
    pub(super) variants: Vec<Plan>,
    /// Other plans of the first variant, with the name of their fields in a line: one for more rows
    /// than the call has, one that is batch invariant.
    pub(super) others: Vec<(&'static str, Plan)>,
    /// Whether the op of the first variant is made a second time, for timing decoder steps.
    pub(super) steps: bool,
    /// M, N, K and plan of this rank's own GEMM without communication; `None` if the op has no
    /// product.
    pub(super) alone: Option<([usize; 3], Plan)>,
    /// Plan of the op without its RMSNorm; `None` if the op has no RMSNorm.
    pub(super) apart: Option<Plan>,
}

impl Plans {
    pub(super) fn new(shape: &Shape, ranks: Topology) -> Result<Plans> {
        let variants = shape.choices.iter().map(|choice| shape.plan(choice, ranks));
        let variants = variants.collect::<Result<_>>()?;
        let larger = shape.larger_plan.map(|m| ("larger_plan", shape.options.clone().rows(m)));
        let invariant = ("batch_invariant", shape.options.clone().batch_invariant(true));
        let invariant = shape.batch_invariant.then_some(invariant);
        let other = |(name, options)| -> Result<_> {
            Ok((name, Shape { options, ..shape.clone() }.plan(&shape.choices[0], ranks)?))
        };
        let others = larger.into_iter().chain(invariant).map(other).collect::<Result<_>>()?;
        let OpRequest { m, n, k, dtype, rms_norm, .. } = *shape.options;
        let mut plain = shape.options.clone();
        plain.rms_norm = None;
        let apart = || shape.message.plan(shape.op, "auto", ranks, &plain);
        let apart = rms_norm.map(|_| apart()).transpose()?;
        if !shape.op.multiplies() {
            let steps = shape.layers.is_some();
            return Ok(Plans { variants, others, steps, alone: None, apart });
        }
        let m = match Meaning::of(shape.op).gives {
            Rows::Own => split(m, ranks.size, ranks.rank).len(),
            _ => m,
        };
        let options = OpOptions::new(m, n, k).dtype(dtype).backend(shape.options.backend);
        let alone = suite::plan(Op::Matmul, "auto", ranks, &options)?;
        Ok(Plans {
            variants,
            others,
            steps: shape.layers.is_some(),
            alone: Some(([m, n, k], alone)),
            apart,
        })
    }

    pub(super) fn room(&self) -> Room {
        let others = self.others.iter().map(|(_, plan)| plan);
        let others = self.alone.iter().map(|(_, plan)| plan).chain(&self.apart).chain(others);
        let again = self.variants.iter().take(usize::from(self.steps));
        let all = self.variants.iter().chain(again).chain(others);
        let words = Room { data: 0, signal: 60 << 10 };
        all.fold(words, |room, plan| room.and(plan.into()))
    }
}
