//! Checks of a call's matrices against the plan, before anything is launched.

mod combine;
mod list;

use iris_heap::{DType, IssueGuard, SymmetricHeap};
use iris_kernels::args::{Matrix, OpArgs};
use iris_kernels::dtype::Role;
use iris_kernels::gemm;

use crate::args::{Matrices, NormArgs};
use crate::error::{Error, Result};
use crate::matrix::MatRef;
use crate::op_names::Op;
use crate::op_row::{Form, Part, Row};
use crate::options::Request;
use crate::plan::Plan;

/// Call whose matrices were checked: they have the plan's element types and consistent shapes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checked {
    /// M and N of the whole product or message; M is the number of rows of all ranks together.
    pub(crate) m: usize,
    pub(crate) n: usize,
    /// Rank that is the root of a broadcast.
    pub(crate) root: usize,
    pub(crate) matrices: Matrices,
}

impl Checked {
    /// Size of this call, by which the plan chooses variant and tile: the number of rows M or, if
    /// the plan counts elements, the number of elements of a part. A part is the data of one rank;
    /// in an all-reduce and a broadcast it is the whole message.
    pub(crate) fn size(&self, plan: &Plan) -> usize {
        if plan.request().elements { self.n } else { self.m }
    }

    /// Looks up the memory of the call's matrices, checks that what the call writes overlaps nothing
    /// else, and writes matrices, M, N and root into `args`. A matrix that the call does not have
    /// becomes empty.
    pub(crate) fn write(
        &self,
        plan: &Plan,
        issuing: &IssueGuard<'_>,
        args: &mut OpArgs,
    ) -> Result<()> {
        let (op, row) = (plan.op(), plan.row());
        if !plan.request().more.is_empty() {
            (args.m, args.n) = (self.m as u32, self.n as u32);
            return list::write(op, &self.matrices, issuing, args);
        }
        let Matrices { a, b, c, bias, norm, .. } = &self.matrices;
        let [a, b, c, bias] = [a, b, c, bias].map(Option::as_ref);
        let norm = norm.as_ref();
        let mut added = self.matrices.added();
        let [residual, addend] = [added.next(), added.next()].map(Option::unzip);
        let factors = self.matrices.parts.weights.as_ref();
        let (weight, normed) = (norm.map(|norm| &norm.weight), norm.map(|norm| &norm.normed));
        let resolve = |name, matrix: Option<&MatRef>, role| match matrix {
            Some(matrix) => matrix.resolve(op, (name, role), issuing),
            None => Ok(Matrix::default()),
        };
        let [input, output] = names(row);
        args.a = resolve(input, a, row.input_role())?;
        args.b = resolve("B", b, Role::Factor)?;
        args.c = resolve(output, c, row.output_role())?;
        args.bias = resolve("bias", bias, Role::Result)?;
        args.residual = resolve(residual.0.unwrap_or_default(), residual.1, Role::Result)?;
        args.addend = resolve(addend.0.unwrap_or_default(), addend.1, Role::Result)?;
        args.factors = resolve(combine::WEIGHTS, factors, Role::Result)?;
        args.weight = resolve("weight", weight, Role::Result)?;
        args.normed = resolve("normed", normed, Role::Result)?;
        (args.m, args.n, args.root) = (self.m as u32, self.n as u32, self.root as u32);
        if plan.request().k_parts(plan.topology()) > 1 {
            is_multiplied_in_parts(op, "B", &args.b)?;
            // Between ranks, the product reads a gathered A in the workspace, and writes parts of sums
            // there.
            if plan.alone() || !row.gathers_a() {
                is_multiplied_in_parts(op, input, &args.a)?;
            }
            if plan.alone() || !row.adds_products() {
                is_multiplied_in_parts(op, output, &args.c)?;
            }
        }
        let read = [
            (input, a, &args.a),
            ("B", b, &args.b),
            ("bias", bias, &args.bias),
            (residual.0.unwrap_or_default(), residual.1, &args.residual),
            (addend.0.unwrap_or_default(), addend.1, &args.addend),
            (combine::WEIGHTS, factors, &args.factors),
            ("weight", weight, &args.weight),
            (output, c, &args.c),
        ];
        // The RMSNorm reads C after the call has written C. So its output `normed` must overlap
        // neither the inputs nor C.
        let written =
            [(output, c, &args.c, &read[..7]), ("normed", normed, &args.normed, &read[..])];
        for (first, written, own, others) in written {
            let Some(written) = written else { continue };
            for &(second, other, theirs) in others {
                let Some(other) = other else { continue };
                // A call may run in place if C is exactly the input or a matrix that is added: the
                // thread that writes an element has read the element before.
                let is_added = [residual.0, addend.0].contains(&Some(second));
                let may = is_added || second == input && row.in_place;
                let same = first == output && may && own == theirs;
                if !same && written.overlaps(own, other, theirs) {
                    return Err(Error::Overlap { op: op.into(), first, second });
                }
            }
        }
        Ok(())
    }
}

/// Returns an error if the built-in GEMM, which adds the products of several ranges of K, cannot multiply
/// the matrix: another product would add in another order.
fn is_multiplied_in_parts(op: Op, name: &str, matrix: &Matrix) -> Result<()> {
    let (what, value, expected) = if matrix.transposed != 0 && name != "B" {
        ("storage order", "column-major".into(), "row-major")
    } else if gemm::is_aligned(matrix) {
        return Ok(());
    } else if matrix.address.is_multiple_of(16) {
        ("leading dimension", matrix.ld.to_string(), "a multiple of 16 bytes")
    } else {
        ("address", format!("{:#x}", matrix.address), "a multiple of 16 bytes")
    };
    let expected = format!("{expected}, with batch_invariant and this N and K");
    Err(Error::invalid(op, format!("{what} of {name}"), value, expected))
}

/// Returns an error if an earlier call has left a fault in `heap`, which then takes no more calls.
pub(crate) fn no_fault(op: Op, heap: &SymmetricHeap) -> Result<()> {
    let poisoned = |cause| Error::Poisoned { op: op.into(), cause: Box::new(cause) };
    heap.control().check().map_err(poisoned)
}

/// Checks the matrices of a call, and returns the call with its values of M and N.
pub(crate) fn call(plan: &Plan, matrices: &Matrices) -> Result<Checked> {
    let (request, row) = (plan.request(), plan.row());
    let op = plan.op();
    let root = matrices.root.unwrap_or(request.root);
    if row.c == Part::None {
        return member(plan).map(|()| Checked { m: 0, n: 0, root, matrices: Matrices::default() });
    }
    let mut call = Checked { m: request.m, n: request.n, root, matrices: *matrices };
    let missing = |what: &str| {
        let expected = format!("a matrix: rank {} takes part with one", plan.topology().rank);
        Error::invalid(op, what, "missing", expected)
    };
    let names = names(row);
    let Matrices { a, c, .. } = &mut call.matrices;
    for (name, matrix, part) in [(names[0], &mut *a, row.a), (names[1], &mut *c, row.c)] {
        if part == Part::Root && root != plan.topology().rank {
            // A rank other than the root may pass a matrix that only the root needs. The matrix is
            // ignored.
            *matrix = None;
        } else if matrix.is_none() {
            return Err(missing(name));
        }
    }
    if request.elements {
        call.n = elements(plan, names, (a, c))?;
    } else {
        call.m = rows(row, &call.matrices);
    }
    let (size, planned) = (call.size(plan), plan.largest());
    if size > planned {
        return Err(match request.elements {
            true => Error::TooManyElements { op: op.into(), elements: size, planned },
            false => Error::TooManyRows { op: op.into(), rows: size, planned },
        });
    }
    let Matrices { a, b, c, bias, norm, .. } = &call.matrices;
    let shapes = plan.shapes_of(call.m, call.n, root);
    for (name, matrix, shape, part) in
        [(names[0], a, shapes.a, row.a), (names[1], c, shapes.c, row.c)]
    {
        let Some(matrix) = matrix else { continue };
        shaped(op, name, matrix, shape, part.description())?;
    }
    let Request { n, dtype, .. } = *request;
    for (name, matrix, dtype) in
        [(names[0], a, dtype), ("B", b, dtype), (names[1], c, request.output_dtype())]
    {
        matrix.as_ref().map_or(Ok(()), |matrix| typed(op, name, matrix, dtype))?;
    }
    if let Some(shape) = shapes.b {
        let b = b.as_ref().ok_or_else(|| missing("B"))?;
        shaped(op, "B", b, shape, "K x N of the plan")?;
        if let Some(bias) = bias {
            shaped(op, "bias", bias, (1, n), "1 x N of the plan")?;
        }
    }
    normed(plan, norm.as_ref(), (call.m, n))?;
    let outputs = [(names[1], c.as_ref()), ("normed", norm.as_ref().map(|it| &it.normed))];
    for (name, matrix) in outputs {
        matrix.map_or(Ok(()), |matrix| written(op, name, matrix))?;
    }
    list::call(plan, &call)?;
    combine::call(plan, &call)?;
    Ok(call)
}

/// Number of rows M of a call with these matrices, for a plan that counts rows and not elements.
pub(crate) fn rows(row: &Row, matrices: &Matrices) -> usize {
    match (row.a, &matrices.a, &matrices.c) {
        _ if row.c == Part::None => 0,
        (Part::All, Some(a), _) | (_, Some(a), None) => a.rows(),
        (_, _, Some(c)) => c.rows(),
        (_, None, None) => 0,
    }
}

/// Offset of A in the heap, for a variant in which peers read A in place.
pub(crate) fn pulled(plan: &Plan, form: &Form, a: Option<&MatRef>) -> Result<u64> {
    let place = a.filter(|a| !a.is_transposed()).and_then(MatRef::sym_offset);
    place.ok_or_else(|| {
        let what = format!("A of variant {}", form.variant);
        let expected = format!(
            "a row-major A in the symmetric heap, because peers read it in place; any A with variant {}",
            plan.row().names(|form| !form.pulls)
        );
        Error::invalid(plan.op(), what, "external or transposed", expected)
    })
}

/// Names that error messages give to the input and the output.
pub(crate) fn names(row: &Row) -> [&'static str; 2] {
    if row.multiplies() { ["A", "C"] } else { ["input", "output"] }
}

/// Checks that the call has RMSNorm matrices exactly if the plan has `rms_norm`, and checks the
/// shapes and types of these matrices.
fn normed(plan: &Plan, norm: Option<&NormArgs>, shape: (usize, usize)) -> Result<()> {
    let op = plan.op();
    let invalid =
        |value: &str, expected: &str| Err(Error::invalid(op, "norm of the call", value, expected));
    let NormArgs { residual, weight, normed } = match (norm, plan.request().rms_norm) {
        (Some(norm), Some(_)) => norm,
        (None, None) => return Ok(()),
        (None, Some(_)) => {
            return invalid("missing", "weight and normed, because the plan has rms_norm");
        }
        (Some(_), None) => return invalid("given", "none, because the plan has no rms_norm"),
    };
    let output = plan.request().output_dtype();
    for (name, matrix) in [("residual", residual.as_ref()), ("normed", Some(normed))] {
        let Some(matrix) = matrix else { continue };
        shaped(op, name, matrix, shape, "M x N, the shape of C")?;
        typed(op, name, matrix, output)?;
    }
    shaped(op, "weight", weight, (1, shape.1), "1 x N of the plan")
}

/// Reshapes input and output of a collective whose plan counts elements: each matrix gets one row
/// per part of the message, such as the data of one rank. Returns the number of elements of a part.
fn elements(
    plan: &Plan,
    names: [&'static str; 2],
    (a, c): (&mut Option<MatRef>, &mut Option<MatRef>),
) -> Result<usize> {
    let (op, row, size) = (plan.op(), plan.row(), plan.topology().size);
    let parts = |part: Part| match part {
        Part::Own => 1,
        Part::Blocks => size,
        _ => plan.request().m,
    };
    let refused = |name: &'static str, matrix: &MatRef, expected: String| Error::Shape {
        op: op.into(),
        matrix: name,
        rows: matrix.rows(),
        cols: matrix.cols(),
        expected,
    };
    // If each part of the message is a row of the matrix, there may be gaps between the rows.
    // Otherwise the matrix must be contiguous.
    let are_rows = |matrix: &MatRef, parts| matrix.rows() == parts && !matrix.is_transposed();
    let len = |name: &'static str, matrix: &MatRef| {
        let gaps =
            || refused(name, matrix, "a contiguous matrix, without gaps between rows".into());
        matrix.elements().ok_or_else(gaps)
    };
    let part = |name: &'static str, matrix: &MatRef, parts| -> Result<usize> {
        Ok(if are_rows(matrix, parts) { matrix.cols() } else { len(name, matrix)? / parts })
    };
    let (parts_a, parts_c) = (parts(row.a), parts(row.c));
    // The length of a part is taken from the input or the output, whichever consists of fewer
    // parts.
    let count = match (&*a, &*c) {
        (Some(a), Some(_)) if parts_a < parts_c => part(names[0], a, parts_a)?,
        (_, Some(c)) => part(names[1], c, parts_c)?,
        (Some(a), None) => part(names[0], a, parts_a)?,
        (None, None) => 0,
    };
    for (name, matrix, parts) in [(names[0], a, parts_a), (names[1], c, parts_c)] {
        let Some(matrix) = matrix else { continue };
        if are_rows(matrix, parts) && matrix.cols() == count {
            continue;
        }
        if Some(len(name, matrix)?) != parts.checked_mul(count) {
            let expected = format!("{parts} x {count} elements, to match the other matrix");
            return Err(refused(name, matrix, expected));
        }
        *matrix = matrix.in_rows(parts, count);
    }
    Ok(count)
}

/// Checks that this rank is a member of the barrier.
fn member(plan: &Plan) -> Result<()> {
    let rank = plan.topology().rank;
    if plan.members().contains(rank as u32) {
        return Ok(());
    }
    let members = plan.request().members.as_deref().unwrap_or_default();
    let expected = format!("a member of the barrier: one of {members:?}");
    Err(Error::invalid(plan.op(), "rank", rank, expected))
}

/// Checks that `matrix` has `rows` x `cols` elements. `why` states in the error text from where
/// that shape follows.
fn shaped(
    op: Op,
    name: &'static str,
    matrix: &MatRef,
    (rows, cols): (usize, usize),
    why: &str,
) -> Result<()> {
    if (matrix.rows(), matrix.cols()) == (rows, cols) {
        return Ok(());
    }
    Err(Error::Shape {
        op: op.into(),
        matrix: name,
        rows: matrix.rows(),
        cols: matrix.cols(),
        expected: format!("{rows} x {cols} ({why})"),
    })
}

/// Checks that the call may write `matrix`. It may not write a matrix that was made by
/// `MatRef::external`.
fn written(op: Op, name: &'static str, matrix: &MatRef) -> Result<()> {
    if matrix.is_writable() {
        return Ok(());
    }
    let value = "MatRef::external, which is only read";
    let expected = "MatRef::external_mut, MatRef::sym, or in a scope what scope.write returns";
    Err(Error::invalid(op, format!("memory of {name}"), value, expected))
}

/// Checks that the elements of `matrix` have the type `expected`.
fn typed(op: Op, name: &'static str, matrix: &MatRef, expected: DType) -> Result<()> {
    if matrix.dtype() == expected {
        return Ok(());
    }
    Err(Error::Dtype { op: op.into(), matrix: name, dtype: matrix.dtype(), expected })
}

#[cfg(test)]
mod tests {
    use iris_heap::{HeapOptions, SymmetricHeap, World};

    use super::*;
    use crate::op_row::Row;
    use crate::ops::broadcast;
    use crate::options::Request;
    use crate::topology::Topology;

    /// Operator that exists only in tests: all ranks have an input, and only the root has an
    /// output, like a reduce to one rank.
    static TO_ROOT: Row = Row { a: Part::All, c: Part::Root, ..broadcast::ROW };

    #[test]
    fn matrices_of_the_root_are_optional_on_other_ranks() {
        let world = World::threads(1).unwrap().remove(0);
        let heap = SymmetricHeap::open(&world, HeapOptions::new().data_bytes(1 << 20)).unwrap();
        let matrix = MatRef::sym(heap.zeros::<f32>(12).unwrap(), 3, 4);
        for rank in [0, 1] {
            for elements in [false, true] {
                let (m, n) = if elements { (0, 12) } else { (3, 4) };
                let mut request = Request::new(&TO_ROOT, (m, n, 0));
                (request.root, request.elements) = (1, elements);
                let plan = Plan::new(Topology::new(rank, 2), &request).unwrap();
                let of = |c| call(&plan, &Matrices { a: Some(matrix), c, ..Matrices::default() });
                let made = of(Some(matrix)).unwrap();
                assert_eq!(made.matrices.c.is_some(), rank == 1);
                assert_eq!(made.size(&plan), if elements { 12 } else { 3 });
                // A call without an output must be an error on the root, and on no other rank.
                assert_eq!(of(None).is_ok(), rank == 0);
            }
        }
        heap.close().unwrap();
        world.close().unwrap();
    }
}
