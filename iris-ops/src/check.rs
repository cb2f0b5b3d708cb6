//! What ops check of plans and matrices before anything is launched.

use iris_heap::DType;
use iris_kernels::schedule::split;

use crate::config::Epilogue;
use crate::error::{Error, Result};
use crate::matrix::MatRef;
use crate::plan::Plan;
use crate::{CopyArgs, MatmulArgs};

/// Check the shape of a matrix; `why` says where the numbers come from.
pub(crate) fn shaped(
    op: &'static str,
    name: &'static str,
    matrix: &MatRef,
    (rows, cols): (usize, usize),
    why: &str,
) -> Result<()> {
    if (matrix.rows(), matrix.cols()) == (rows, cols) {
        return Ok(());
    }
    Err(Error::Shape {
        op,
        matrix: name,
        rows: matrix.rows(),
        cols: matrix.cols(),
        expected: format!("{rows} x {cols} ({why})"),
    })
}

/// Check the element type of a matrix.
pub(crate) fn typed(
    op: &'static str,
    name: &'static str,
    matrix: &MatRef,
    expected: DType,
) -> Result<()> {
    if matrix.dtype() == expected {
        return Ok(());
    }
    Err(Error::Dtype { op, matrix: name, dtype: matrix.dtype(), expected })
}

/// Check B, the bias and all element types of a product; K and N are those of the plan.
pub(crate) fn check_product(plan: &Plan, args: &MatmulArgs) -> Result<()> {
    let (op, options) = (plan.op, &plan.options);
    typed(op, "A", &args.a, options.dtype)?;
    typed(op, "B", &args.b, options.dtype)?;
    typed(op, "C", &args.c, options.output_dtype())?;
    shaped(op, "B", &args.b, (options.k, options.n), "K x N of the plan")?;
    if let Some(bias) = &args.bias {
        shaped(op, "bias", bias, (1, options.n), "1 x N of the plan")?;
    }
    Ok(())
}

/// Check the element types of an op without a product: input and output have the plan's.
pub(crate) fn check_copy(plan: &Plan, args: &CopyArgs) -> Result<()> {
    let (op, options) = (plan.op, &plan.options);
    if let Some(input) = &args.input {
        typed(op, "input", input, options.dtype)?;
    }
    typed(op, "output", &args.output, options.dtype)
}

/// Rows of the part of `m` that falls to the plan's rank.
pub(crate) fn part(plan: &Plan, m: usize) -> usize {
    // More rows than a plan can have are refused behind this, whatever their part is.
    let m = u32::try_from(m).unwrap_or(u32::MAX);
    let range = split(m, plan.size(), plan.ranks.rank as u32);
    (range.end - range.start) as usize
}

/// The input of an op in which every rank sends.
pub(crate) fn input<'a>(op: &'static str, args: &'a CopyArgs) -> Result<&'a MatRef> {
    args.input.as_ref().ok_or_else(|| Error::Invalid {
        op,
        what: "input".into(),
        value: "missing".into(),
        expected: "a matrix: every rank sends".into(),
    })
}

/// Nothing is done to the elements of an op that only moves them.
pub(crate) fn no_epilogue(plan: &Plan) -> Result<()> {
    if plan.options.epilogue == Epilogue::None {
        return Ok(());
    }
    Err(Error::Invalid {
        op: plan.op,
        what: "epilogue".into(),
        value: format!("{:?}", plan.options.epilogue),
        expected: "none: the op moves elements as they are".into(),
    })
}

/// No output other than the message's own type.
pub(crate) fn same_output(plan: &Plan) -> Result<()> {
    let options = &plan.options;
    if options.output_dtype() == options.dtype {
        return Ok(());
    }
    Err(Error::Invalid {
        op: plan.op,
        what: "output".into(),
        value: options.output_dtype().to_string(),
        expected: format!("{}, the type of the message", options.dtype),
    })
}
