//! Tests that every operator refuses an element type that does not have the role that the operator
//! asks for, by the type's name, and before it launches anything. With the feature `test-dtype` one of
//! these types has a code in kernels.

use iris_heap::{BackendKind, DType, Element, Error, HeapOptions, SymmetricHeap, World};
use iris_kernels::dtype::{ROWS, Role, has_role};
use iris_ops::comm::{Comm, Options as CommOptions};
use iris_ops::{AnyOp, MatRef, NormArgs, Op, Operands, Shapes, Topology, all_reduce};
use iris_testkit::error_texts::fails;

#[cfg(feature = "test-dtype")]
#[derive(Clone, Copy, PartialEq, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
struct Byte(u8);

#[cfg(feature = "test-dtype")]
impl Element for Byte {
    const DTYPE: DType = DType::F8E4M3;
    fn from_f64(value: f64) -> Self {
        Byte(value as u8)
    }
    fn to_f64(self) -> f64 {
        self.0.into()
    }
}
#[cfg(not(feature = "test-dtype"))]
type Byte = u8;

const SHAPE: [usize; 3] = [4, 8, 8];
const ELEMENTS: usize = 8 * 8;

fn without_roles() -> Vec<DType> {
    let none = |dtype: &DType| Role::ALL.iter().all(|&role| !has_role(*dtype, role));
    DType::ALL.into_iter().filter(none).collect()
}

#[test]
fn plans_refuse_types_without_the_role() {
    let types = without_roles();
    let with_code = ROWS.iter().filter(|row| row.code.is_some() && types.contains(&row.dtype));
    assert_eq!(with_code.count(), usize::from(cfg!(feature = "test-dtype")));
    for (op, dtype) in Op::ALL.into_iter().flat_map(|op| types.iter().map(move |it| (op, *it))) {
        if op == Op::Barrier {
            continue;
        }
        let [m, n, k] = SHAPE;
        let variants = op.variants().into_iter().map(Some).chain([None]);
        let by: &[bool] = if op.multiplies() { &[false] } else { &[false, true] };
        for (variant, &elements) in variants.flat_map(|it| by.iter().map(move |by| (it, by))) {
            for size in [1, 2] {
                let refused = |what: &str, set: fn(&mut iris_ops::OpRequest, DType)| {
                    let mut request = op.request(if elements { 0 } else { m }, n, k);
                    (request.variant, request.elements) = (variant, elements);
                    set(&mut request, dtype);
                    let outcome = request.plan(Topology::new(0, size));
                    fails(outcome, &[op.name(), what, dtype.name()]);
                };
                refused("dtype", |request, dtype| request.dtype = dtype);
                refused("output", |request, dtype| request.output = Some(dtype));
                refused("wire", |request, dtype| request.wire = Some(dtype));
            }
        }
    }
}

#[test]
fn calls_refuse_matrices_of_types_without_the_role() {
    let [m, n, k] = SHAPE;
    for (op, variant) in Op::ALL.into_iter().flat_map(|op| {
        op.variants().into_iter().filter(move |_| op != Op::Barrier).map(move |it| (op, it))
    }) {
        let checked = World::run_threads(2, |world| {
            let mut request = op.request(m, n, k);
            request.variant = Some(variant);
            let plan = request.plan(&world).map_err(Error::other)?;
            let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(2))?;
            let made = AnyOp::new(&heap, &plan).map_err(Error::other)?;
            let stream = heap.stream()?;
            let Shapes { a, b, c, .. } = plan.shapes(m);
            let (ones, bytes) = (heap.ones::<f32>(ELEMENTS)?, heap.zeros::<Byte>(ELEMENTS)?);
            let out = heap.zeros::<f32>(ELEMENTS)?;
            let right = |(rows, cols)| MatRef::sym(ones, rows, cols);
            let wrong = |(rows, cols)| MatRef::sym(bytes, rows, cols);
            let b = b.unwrap_or_default();
            let operands = Operands::new(right(a), right(b), MatRef::sym(out, c.0, c.1));
            let of = Operands::new;
            let mut refused = vec![of(operands.a, operands.b, wrong(c))];
            // A rank other than the root of a broadcast ignores its input.
            if op != Op::Broadcast || world.rank() == 0 {
                refused.push(of(wrong(a), operands.b, operands.c));
            }
            if op.multiplies() {
                refused.push(of(operands.a, wrong(b), operands.c));
                refused.push(operands.bias(wrong((1, n))));
            }
            for operands in refused {
                fails(made.run(&operands, &stream), &[op.name(), Byte::DTYPE.name()]);
            }
            assert_eq!(heap.read(out)?, [0.0; ELEMENTS], "{op} {variant}: a refused call ran");
            made.run(&operands, &stream).map_err(Error::other)?;
            stream.sync()?;
            assert!(heap.read(out)?.iter().any(|&sum| sum > 0.0), "{op} {variant}");
            drop(made);
            heap.close()
        });
        checked.unwrap();
    }
}

#[test]
fn a_norm_refuses_matrices_of_types_without_the_role() {
    let (m, n) = (4, 8);
    let checked = World::run_threads(2, |world| {
        let plan = all_reduce::Options::rows(m, n).rms_norm(1e-5).plan(&world);
        let plan = plan.map_err(Error::other)?;
        let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(2))?;
        let made = AnyOp::new(&heap, &plan).map_err(Error::other)?;
        let stream = heap.stream()?;
        let bytes = heap.zeros::<Byte>(m * n)?;
        let matrix = || Ok::<_, Error>(MatRef::sym(heap.ones::<f32>(m * n)?, m, n));
        let (input, output, residual, normed) = (matrix()?, matrix()?, matrix()?, matrix()?);
        let weight = MatRef::vector(heap.ones::<f32>(n)?);
        let call = |norm| made.run(&Operands::new(input, input, output).norm(norm), &stream);
        let (wrong, wrong_row) = (MatRef::sym(bytes, m, n), MatRef::sym(bytes, 1, n));
        let right = NormArgs::new(weight, normed).residual(residual);
        let name = Byte::DTYPE.name();
        fails(call(NormArgs::new(wrong_row, normed)), &["weight", name, "f32, f16 or bf16"]);
        fails(call(NormArgs::new(weight, wrong)), &["normed", name, "f32"]);
        fails(call(right.residual(wrong)), &["residual", name, "f32"]);
        call(right).map_err(Error::other)?;
        stream.sync()?;
        drop(made);
        heap.close()
    });
    checked.unwrap();
}

#[test]
fn a_communicator_refuses_sums_of_types_without_the_role() {
    for dtype in without_roles() {
        let checked = World::run_threads(2, |world| {
            let opened =
                Comm::from_world(BackendKind::Cpu, &world, &CommOptions::new().sums(&[dtype]));
            fails(opened, &[dtype.name(), "f32, f16 or bf16"]);
            world.close()
        });
        checked.unwrap();
    }
}
