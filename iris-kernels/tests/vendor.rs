//! Products of the vendor's library on a GPU: compared with sums in f64, in every type and layout, with
//! and without a bias, aligned and not, and captured in a graph before anything else was enqueued.
//! Without a GPU or the library the tests are ignored. On any host they run over a library of our own with
//! hipBLASLt's interface, and a runtime with HIP's; that says nothing about AMD's.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use bytemuck::Zeroable;
use cudarc::driver::{CudaContext, sys};
use half::{bf16, f16};
use iris_heap::{BackendKind, DType, Error, HeapOptions, Stream, SymSlice, SymmetricHeap, World};
use iris_kernels::args::{Matrix, OpArgs, dtype_code};
use iris_kernels::vendor::{Addresses, Blas, Layout, Multiplier, Prepared, Problem, Product};
use iris_testkit::harness::{self, Group, named};

#[path = "../../iris-testkit/tests/hip/fake.rs"]
#[allow(dead_code, reason = "other tests need the rest")]
mod fake;
#[path = "host/numbers.rs"]
mod numbers;
use numbers::{the_numbers_are_those_of_the_header, wrong_numbers_are_found};

/// Says to this program that it is a child, over the runtime and the library of our own.
const CHILD: &str = "VENDOR_TEST_CHILD";

fn main() -> ExitCode {
    let products = named![
        products_are_those_of_the_reference,
        what_the_library_does_not_do_is_left_to_others,
        what_the_library_refuses_is_an_error_with_its_name,
    ];
    if std::env::var_os(CHILD).is_some() {
        products.into_iter().for_each(|(_, test)| test());
        return ExitCode::SUCCESS;
    }
    let missing = |kind| {
        harness::no_backend(kind).or_else(|| Blas::get(kind).err().map(|error| error.to_string()))
    };
    let cuda = missing(BackendKind::Cuda);
    let neither =
        cuda.clone().and_then(|cuda| Some(format!("{cuda}; {}", missing(BackendKind::Hip)?)));
    harness::run(vec![
        Group::new(neither, products),
        Group::new(cuda, named![a_first_call_may_be_captured]),
        Group::new(
            harness::no_program("g++"),
            named![products_over_a_library_of_our_own, wrong_numbers_are_found],
        ),
        Group::new(numbers::no_header(), named![the_numbers_are_those_of_the_header]),
    ])
}

fn products_over_a_library_of_our_own() {
    let own = std::env::current_exe().unwrap();
    let (output, calls) = fake::Fake::with_libraries().run(&own, &[], &[(CHILD, "1")]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    // What a test asks for that there is not.
    let refused = ["blaslt Matmul on 0 = 3"];
    assert_eq!(fake::failed(&calls), refused);
    assert!(calls.contains("hipblasLtMatmul 256 x 128 x 64 on 0 = 0"), "{calls}");
}

/// What this machine has.
fn here() -> BackendKind {
    match BackendKind::Cuda.device_count() {
        Ok(1..) => BackendKind::Cuda,
        _ => BackendKind::Hip,
    }
}

/// Runs a test on one rank with a heap on the GPU.
fn on_the_gpu(test: impl Fn(&Arc<SymmetricHeap>) -> Result<(), Error> + Send + Sync) {
    let outcome = World::run_threads(1, |world| {
        let options = HeapOptions::new().backend(here()).data_bytes(256 << 20);
        let heap = SymmetricHeap::open(&world, options)?;
        test(&heap)?;
        heap.close()
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

/// Reals that are exact in all types, both signs, and sums that are not.
fn number(seed: usize) -> f32 {
    let mixed = (seed as u32).wrapping_mul(0x9e37_79b9) ^ 0x5bd1_e995;
    ((mixed >> 13 & 0xff) as f32 - 127.0) / 64.0
}

fn bytes_of(dtype: DType, values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|&value| match dtype {
            DType::F32 => value.to_ne_bytes().to_vec(),
            DType::F16 => f16::from_f32(value).to_ne_bytes().to_vec(),
            _ => bf16::from_f32(value).to_ne_bytes().to_vec(),
        })
        .collect()
}

fn values_of(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let pair = |it: &[u8]| [it[0], it[1]];
    match dtype {
        DType::F32 => {
            bytes.chunks(4).map(|it| f32::from_ne_bytes(it.try_into().unwrap())).collect()
        }
        DType::F16 => bytes.chunks(2).map(|it| f16::from_ne_bytes(pair(it)).to_f32()).collect(),
        _ => bytes.chunks(2).map(|it| bf16::from_ne_bytes(pair(it)).to_f32()).collect(),
    }
}

/// A matrix in the heap.
struct Placed {
    slice: SymSlice<u8>,
    matrix: Matrix,
    dtype: DType,
    shift: usize,
}

impl Placed {
    /// With gaps between its lines, `shift` elements behind an aligned address.
    fn new(
        heap: &SymmetricHeap,
        dtype: DType,
        (rows, cols): (usize, usize),
        (columns, gap, shift): (bool, usize, usize),
    ) -> Result<Placed, Error> {
        let (lines, len) = if columns { (cols, rows) } else { (rows, cols) };
        let ld = len + gap;
        let slice = heap.alloc::<u8>((lines * ld + shift) * dtype.size())?;
        let matrix = Matrix {
            address: heap.view().data[0] + slice.offset() + (shift * dtype.size()) as u64,
            ld: ld as u64,
            rows: rows as u32,
            cols: cols as u32,
            dtype: dtype_code(dtype).unwrap(),
            transposed: u32::from(columns),
        };
        Ok(Placed { slice, matrix, dtype, shift })
    }

    fn layout(&self) -> Layout {
        let Matrix { ld, transposed, .. } = self.matrix;
        Layout { dtype: self.dtype, transposed: transposed == 1, ld }
    }

    fn at(&self, row: usize, col: usize) -> usize {
        let Matrix { ld, transposed, .. } = self.matrix;
        let (line, place) = if transposed == 1 { (col, row) } else { (row, col) };
        self.shift + line * ld as usize + place
    }

    fn fill(&self, heap: &SymmetricHeap, value: impl Fn(usize) -> f32) -> Result<Vec<f32>, Error> {
        let len = self.slice.bytes() as usize / self.dtype.size();
        let values: Vec<f32> = (0..len).map(value).collect();
        heap.write(self.slice, &bytes_of(self.dtype, &values))?;
        Ok(values)
    }

    fn read(&self, heap: &SymmetricHeap) -> Result<Vec<f32>, Error> {
        Ok(values_of(self.dtype, &heap.read(self.slice)?))
    }
}

/// The matrices of a product with what A, B and the bias hold.
struct Sample {
    a: Placed,
    b: Placed,
    c: Placed,
    bias: Option<Placed>,
    shape: [usize; 3],
    held: [Vec<f32>; 3],
}

#[derive(Clone, Copy, Debug)]
struct Case {
    shape: [usize; 3],
    types: (DType, DType),
    a_columns: bool,
    b_columns: bool,
    bias: bool,
    gap: usize,
    shift: usize,
}

const POISON: f32 = 1000.0;

impl Sample {
    fn new(heap: &SymmetricHeap, case: Case) -> Result<Sample, Error> {
        let Case { shape: [m, n, k], types: (dtype, output), gap, shift, .. } = case;
        let a = Placed::new(heap, dtype, (m, k), (case.a_columns, gap, shift))?;
        let b = Placed::new(heap, dtype, (k, n), (case.b_columns, gap, shift))?;
        let c = Placed::new(heap, output, (m, n), (false, gap, shift))?;
        let place = (false, 0, shift);
        let bias = case.bias.then(|| Placed::new(heap, output, (1, n), place)).transpose()?;
        let held = [
            a.fill(heap, number)?,
            b.fill(heap, |at| number(at + 12345))?,
            bias.as_ref()
                .map(|it| it.fill(heap, |at| number(at + 777)))
                .transpose()?
                .unwrap_or_default(),
        ];
        Ok(Sample { a, b, c, bias, shape: [m, n, k], held })
    }

    fn args(&self) -> OpArgs {
        let [m, n, k] = self.shape.map(|it| it as u32);
        let mut args = OpArgs { m, n, k, ..OpArgs::zeroed() };
        (args.a, args.b, args.c) = (self.a.matrix, self.b.matrix, self.c.matrix);
        args.bias = self.bias.as_ref().map_or(Matrix::default(), |it| it.matrix);
        args
    }

    /// Whether all addresses, and lines if there are several, are multiples of 16 bytes.
    fn is_aligned(&self) -> bool {
        let all = [Some(&self.a), Some(&self.b), Some(&self.c), self.bias.as_ref()];
        all.into_iter().flatten().all(|it| {
            let lines = if it.matrix.transposed == 1 { it.matrix.cols } else { it.matrix.rows };
            let step = if lines > 1 { it.matrix.ld * it.dtype.size() as u64 } else { 0 };
            it.matrix.address.is_multiple_of(16) && step.is_multiple_of(16)
        })
    }

    fn poison(&self, heap: &SymmetricHeap) -> Result<(), Error> {
        self.c.fill(heap, |_| POISON).map(drop)
    }

    /// Compares all of C, gaps included.
    fn check(&self, heap: &SymmetricHeap, what: &dyn std::fmt::Debug) -> Result<(), Error> {
        let ([m, n, k], [x, y, z]) = (self.shape, &self.held);
        let mut expected: Vec<Option<f64>> =
            vec![None; self.c.slice.bytes() as usize / self.c.dtype.size()];
        for row in 0..m {
            for col in 0..n {
                let products = (0..k).map(|d| {
                    let (a, b) = (x[self.a.at(row, d)], y[self.b.at(d, col)]);
                    f64::from(a) * f64::from(b)
                });
                let bias = self.bias.as_ref().map_or(0.0, |it| f64::from(z[it.at(0, col)]));
                expected[self.c.at(row, col)] = Some(products.sum::<f64>() + bias);
            }
        }
        // The unit of the result's type, and what k terms of the size of these lose in f32.
        let unit = match self.c.dtype {
            DType::F32 => 0.0,
            DType::F16 => 1.0 / 2048.0,
            _ => 1.0 / 256.0,
        };
        for (at, (value, expected)) in self.c.read(heap)?.into_iter().zip(expected).enumerate() {
            let Some(expected) = expected else {
                assert_eq!(value, POISON, "{what:?}: element {at} is in a gap");
                continue;
            };
            let most = expected.abs() * unit + 1e-6 * k as f64 + 1e-5;
            let off = (f64::from(value) - expected).abs();
            assert!(off <= most, "{what:?}: element {at} is {value}, expected {expected}");
        }
        Ok(())
    }

    fn free(self, heap: &SymmetricHeap) -> Result<(), Error> {
        let slices = [Some(self.a), Some(self.b), Some(self.c), self.bias];
        slices.into_iter().flatten().try_for_each(|it| heap.free(it.slice))
    }
}

/// The library on the GPU of a heap, for products of these shapes, with its workspace.
fn prepared(
    heap: &SymmetricHeap,
    shape: [usize; 3],
    types: (DType, DType),
) -> Result<(Prepared, SymSlice<u8>), Error> {
    let begun = Instant::now();
    let prepared = heap.gpu()?.apart(|| {
        let blas = Blas::get(here()).map_err(Error::other)?;
        let multiplier = Multiplier::new(&blas).map_err(Error::other)?;
        Prepared::new(multiplier, shape, types, Prepared::WORKSPACE).map_err(Error::other)
    })?;
    println!("{} for {shape:?} {types:?} in {:.1?}", prepared.library(), begun.elapsed());
    Ok((prepared, heap.alloc::<u8>(Prepared::WORKSPACE as usize)?))
}

/// Whether the library took the call.
fn enqueue(
    heap: &SymmetricHeap,
    stream: &Stream,
    (prepared, workspace): &(Prepared, SymSlice<u8>),
    args: &OpArgs,
) -> Result<bool, Error> {
    let mut taken = false;
    let workspace = heap.view().data[0] + workspace.offset();
    heap.gpu()?.enqueue(stream, |raw| {
        // SAFETY: the matrices and the workspace are in the heap, which is closed after its streams.
        taken = unsafe { prepared.enqueue(args, workspace, raw) }.map_err(Error::other)?;
        Ok(())
    })?;
    Ok(taken)
}

fn products_are_those_of_the_reference() {
    use DType::{BF16, F16, F32};
    on_the_gpu(|heap| {
        let stream = heap.stream()?;
        for types in [(F32, F32), (F16, F16), (BF16, BF16), (BF16, F32), (F16, F32)] {
            for shape in [[128, 256, 64], [37, 45, 29], [1, 8, 8]] {
                let library = prepared(heap, [200, shape[1], shape[2]], types)?;
                for bits in 0..32 {
                    let bit = |at: usize| bits >> at & 1 == 1;
                    let (odd, shifted) = (usize::from(bit(3)) * 3, usize::from(bit(4)));
                    let case = Case {
                        shape,
                        types,
                        a_columns: bit(0),
                        b_columns: bit(1),
                        bias: bit(2),
                        gap: 8 + odd,
                        shift: shifted,
                    };
                    let sample = Sample::new(heap, case)?;
                    sample.poison(heap)?;
                    let taken = enqueue(heap, &stream, &library, &sample.args())?;
                    // Left to others: a bias where something is not aligned, or is added to sums of 16
                    // bits in lines that are not whole vectors. Of one row that lies by columns the
                    // library need not have everything.
                    let whole = shape[1..].iter().all(|it| it.is_multiple_of(8));
                    let refused = case.bias && !(sample.is_aligned() && (whole || types.1 == F32));
                    let may_be = shape[0] == 1 && case.a_columns;
                    assert!(taken != refused || may_be, "{case:?} was taken: {taken}");
                    stream.sync()?;
                    if taken {
                        sample.check(heap, &case)?;
                    }
                    sample.free(heap)?;
                }
                heap.free(library.1)?;
            }
        }
        Ok(())
    });
}

fn a_first_call_may_be_captured() {
    on_the_gpu(|heap| {
        let context = CudaContext::new(heap.device().index).map_err(Error::other)?;
        let theirs = context.new_stream().map_err(Error::other)?;
        let stream = heap.gpu()?.stream_of(&theirs)?;
        let types = (DType::BF16, DType::BF16);
        let shape = [384, 640, 512];
        let library = prepared(heap, shape, types)?;
        let case =
            Case { shape, types, a_columns: false, b_columns: true, bias: true, gap: 0, shift: 0 };
        let sample = Sample::new(heap, case)?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        theirs.begin_capture(mode).map_err(Error::other)?;
        let taken = enqueue(heap, &stream, &library, &sample.args());
        let graph = theirs.end_capture(sys::CUgraphInstantiate_flags(0)).map_err(Error::other)?;
        assert!(taken?, "{case:?} was not taken");
        let graph = graph.expect("a graph with a product in it");
        for replay in 0..3 {
            sample.poison(heap)?;
            graph.launch().map_err(Error::other)?;
            stream.sync()?;
            sample.check(heap, &(case, replay))?;
        }
        drop(graph);
        Ok(())
    });
}

fn what_the_library_does_not_do_is_left_to_others() {
    on_the_gpu(|heap| {
        let stream = heap.stream()?;
        let types = (DType::BF16, DType::BF16);
        let library = prepared(heap, [64, 64, 64], types)?;
        let case = Case {
            shape: [64, 64, 64],
            types,
            a_columns: false,
            b_columns: false,
            bias: false,
            gap: 0,
            shift: 0,
        };
        let sample = Sample::new(heap, case)?;
        let args = sample.args();
        assert!(library.0.fits(&args));
        let changed = |change: &dyn Fn(&mut OpArgs)| {
            let mut args = args;
            change(&mut args);
            args
        };
        let others = [
            changed(&|it| it.m = 0),
            changed(&|it| it.m = 65),
            changed(&|it| it.n = 63),
            changed(&|it| it.k = 0),
            changed(&|it| it.c.transposed = 1),
            changed(&|it| it.c.dtype = 0),
            changed(&|it| it.epilogue = iris_kernels::args::epilogue::GELU),
            changed(&|it| it.bias = Matrix { dtype: 0, ..it.a }),
        ];
        sample.poison(heap)?;
        for args in others {
            assert!(!library.0.fits(&args) && !enqueue(heap, &stream, &library, &args)?);
        }
        stream.sync()?;
        assert!(sample.c.read(heap)?.iter().all(|&it| it == POISON), "nothing was enqueued");
        Ok(())
    });
}

fn what_the_library_refuses_is_an_error_with_its_name() {
    on_the_gpu(|heap| {
        let stream = heap.stream()?;
        let problem = Problem {
            shape: [64, 64, 64],
            a: Layout::rows(DType::BF16, 64),
            b: Layout::rows(DType::BF16, 64),
            c: Layout::rows(DType::BF16, 64),
            bias: false,
            rounds_once: true,
            accumulates: true,
            alignment: 16,
            workspace: 1 << 20,
        };
        let case = Case {
            shape: problem.shape,
            types: (DType::BF16, DType::BF16),
            a_columns: false,
            b_columns: false,
            bias: false,
            gap: 0,
            shift: 0,
        };
        let sample = Sample::new(heap, case)?;
        assert_eq!(sample.a.layout(), problem.a);
        let product = heap.gpu()?.apart(|| {
            let blas = Blas::get(here()).map_err(Error::other)?;
            let of = Arc::new(Multiplier::new(&blas).map_err(Error::other)?);
            let odd = Problem { a: Layout::rows(DType::F64, 64), ..problem };
            let error = Product::new(&of, odd).expect_err("no f64").to_string();
            assert!(error.contains("no algorithm for 64 x 64 x 64, A f64"), "{error}");
            Product::new(&of, problem).map_err(Error::other)
        })?;
        let workspace = heap.alloc::<u8>(1 << 20)?;
        let data = heap.view().data[0];
        let at = Addresses {
            a: sample.a.matrix.address,
            b: sample.b.matrix.address,
            c: sample.c.matrix.address,
            bias: 0,
            workspace: data + workspace.offset(),
        };
        // Twice: the second adds to the first. A result without an address is refused by name.
        sample.c.fill(heap, |_| 0.0)?;
        let run = |at: Addresses| {
            heap.gpu()?.enqueue(&stream, |raw| {
                // SAFETY: the matrices and the workspace are in the heap, or null, which is refused.
                unsafe { product.enqueue(at, raw) }.map_err(Error::other)
            })
        };
        run(at)?;
        stream.sync()?;
        let once = sample.c.read(heap)?;
        run(at)?;
        stream.sync()?;
        for (once, twice) in once.iter().zip(sample.c.read(heap)?) {
            assert!((2.0 * once - twice).abs() <= once.abs() / 64.0 + 0.05, "{once} and {twice}");
        }
        let error = run(Addresses { c: 0, ..at }).expect_err("no result").to_string();
        let expected = match here() {
            BackendKind::Cuda => "cublasLtMatmul: CUBLAS_STATUS_",
            _ => "hipblasLtMatmul: HIPBLAS_STATUS_INVALID_VALUE (3)",
        };
        assert!(error.contains(expected), "{error}");
        Ok(())
    });
}
