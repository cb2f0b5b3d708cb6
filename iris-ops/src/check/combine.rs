//! Checks of the weights of parts, and of the matrices that are added to a sum of weighted parts.

use iris_heap::DType;

use super::{Checked, shaped, typed};
use crate::args::{MOST_ADDED, PartArgs};
use crate::error::{Error, Result};
use crate::plan::Plan;

/// Name of the weights in errors.
pub(super) const WEIGHTS: &str = "weights";

/// Checks that the call has weights and added matrices only if the plan has `combine`, and checks
/// their shapes and types.
pub(super) fn call(plan: &Plan, call: &Checked) -> Result<()> {
    let (op, request) = (plan.op(), plan.request());
    let PartArgs { weights, count, .. } = &call.matrices.parts;
    let invalid = |what: &str, value: String, expected: String| {
        Err(Error::invalid(op, what, value, expected))
    };
    let what = "weights of the call";
    match (weights, plan.row().combines()) {
        (None, false) if *count == 0 => return Ok(()),
        (None, false) => {
            let expected = "0, because the plan has no combine".into();
            return invalid("number of matrices added by the call", count.to_string(), expected);
        }
        (Some(_), false) => {
            return invalid(what, "given".into(), "none, because the plan has no combine".into());
        }
        (None, true) => {
            let expected = format!("M x {} f32, because the plan has combine", request.k);
            return invalid(what, "missing".into(), expected);
        }
        (Some(weights), true) => {
            shaped(op, WEIGHTS, weights, (call.m, request.k), "M x K, the number of parts")?;
            typed(op, WEIGHTS, weights, DType::F32)?;
        }
    }
    let residual = call.matrices.norm.is_some_and(|norm| norm.residual.is_some());
    let all = count + usize::from(residual);
    if all > MOST_ADDED {
        let expected = format!("at most {MOST_ADDED}, the residual included");
        return invalid("number of matrices added by the call", all.to_string(), expected);
    }
    let shape = plan.shapes_of(call.m, call.n, call.root).c;
    for (name, matrix) in call.matrices.added() {
        shaped(op, name, matrix, shape, "the shape of the output")?;
        typed(op, name, matrix, request.output_dtype())?;
    }
    Ok(())
}
