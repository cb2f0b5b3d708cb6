//! Checks of the tensors of a gather of a list.

use iris_heap::IssueGuard;
use iris_kernels::args::{ListTensor, MOST_TENSORS, Matrix, OpArgs};

use super::{Checked, shaped, typed, written};
use crate::args::{Matrices, More};
use crate::error::{Error, Result};
use crate::matrix::MatRef;
use crate::op_names::Op;
use crate::plan::Plan;

/// Names of input and output of each tensor in errors.
const NAMES: [[&str; 2]; MOST_TENSORS] = [
    ["input", "output"],
    ["input of tensor 2", "output of tensor 2"],
    ["input of tensor 3", "output of tensor 3"],
    ["input of tensor 4", "output of tensor 4"],
];

/// Checks the tensors after the first one, whose checks are those of any input and output.
pub(super) fn call(plan: &Plan, call: &Checked) -> Result<()> {
    let (op, planned) = (plan.op(), &plan.request().more);
    let More { count, tensors } = &call.matrices.more;
    if *count != planned.len() {
        let expected = format!("{}, as in the plan", 1 + planned.len());
        return Err(Error::invalid(op, "number of tensors of the call", 1 + count, expected));
    }
    let own = plan.rows_of(plan.topology().rank, call.m).len();
    for ((pair, names), &(dtype, n)) in tensors.iter().flatten().zip(&NAMES[1..]).zip(planned) {
        let [input, output] = pair;
        shaped(op, names[0], input, (own, n), "this rank's part of the rows")?;
        shaped(op, names[1], output, (call.m, n), "all rows")?;
        for (name, matrix) in names.iter().zip(pair) {
            typed(op, name, matrix, dtype)?;
        }
        written(op, names[1], output)?;
    }
    Ok(())
}

/// Looks up the memory of all tensors, checks that no output overlaps another matrix, and writes the
/// list into `args`, without any other matrix.
pub(super) fn write(
    op: Op,
    matrices: &Matrices,
    issuing: &IssueGuard<'_>,
    args: &mut OpArgs,
) -> Result<()> {
    let Matrices { a, c, more, .. } = matrices;
    let pairs = [a.zip(*c).map(|(a, c)| [a, c])].into_iter().chain(more.tensors).flatten();
    // Name, matrix, place and whether it is written.
    let mut seen: [Option<(&str, MatRef, Matrix, bool)>; 2 * MOST_TENSORS] = Default::default();
    for (tensor, (pair, names)) in pairs.zip(NAMES).enumerate() {
        let mut addresses = [0; 2];
        for (at, (name, matrix)) in names.into_iter().zip(pair).enumerate() {
            if matrix.is_transposed() {
                let what = format!("storage order of {name}");
                let expected = "row-major: a list is sent by rows";
                return Err(Error::invalid(op, what, "column-major", expected));
            }
            let address = matrix.address(op, name, issuing)?;
            let place = Matrix { address, ..Matrix::default() };
            let is_written = at == 1;
            for (other, theirs, their_place, other_is_written) in seen.iter().flatten() {
                let matters = is_written || *other_is_written;
                if matters && matrix.overlaps(&place, theirs, their_place) {
                    let (first, second) = if is_written { (name, *other) } else { (*other, name) };
                    return Err(Error::Overlap { op: op.into(), first, second });
                }
            }
            seen[2 * tensor + at] = Some((name, matrix, place, is_written));
            addresses[at] = address;
        }
        let size = pair[0].dtype().size() as u64;
        let [from_pitch, to_pitch] = pair.map(|matrix| (matrix.ld() as u64).saturating_mul(size));
        let [from, to] = addresses;
        let row = pair[0].cols() as u64 * size;
        args.list[tensor] = ListTensor { from, from_pitch, to, to_pitch, row };
    }
    Ok(())
}
