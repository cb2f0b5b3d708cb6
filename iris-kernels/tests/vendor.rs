//! Tests of the vendor's GEMM library on a GPU: compared with sums in f64, in every type and
//! layout, with and without a bias and an addend, aligned and not, and captured in a graph before
//! anything else was enqueued. The tests are ignored without a GPU or the library. On any host they
//! also run over a fake library with hipBLASLt's interface and a fake HIP runtime; this shows
//! nothing about AMD's libraries.

#![allow(unsafe_code, reason = "products over memory of the heap")]

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaContext, sys};
use iris_heap::{BackendKind, DType, Error, Stream, SymSlice, SymmetricHeap};
use iris_kernels::args::{Matrix, OpArgs, epilogue};
use iris_kernels::vendor::{Addresses, Blas, Layout, Multiplier, Prepared, Problem, Product};
use iris_kernels::{GemmRequest, Library, LibraryGemm};
use iris_testkit::allocations::Counting;
use iris_testkit::fake_hip as fake;
use iris_testkit::harness::{self, Group, named};

#[path = "host/described.rs"]
mod described;
#[path = "host/numbers.rs"]
mod numbers;
#[path = "vendor/sample.rs"]
mod sample;
use described::a_problem_is_described_once;
use numbers::{the_numbers_are_those_of_the_header, wrong_numbers_are_found};
use sample::{CHILD, Case, POISON, Sample, here, on_the_gpu};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() -> ExitCode {
    let products = named![
        products_are_those_of_the_reference,
        what_the_library_does_not_do_is_left_to_others,
        a_whole_product_adds_what_is_like_its_result,
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
            named![
                products_over_a_library_of_our_own,
                wrong_numbers_are_found,
                a_problem_is_described_once,
            ],
        ),
        Group::new(numbers::no_header(), named![the_numbers_are_those_of_the_header]),
    ])
}

fn products_over_a_library_of_our_own() {
    let own = std::env::current_exe().unwrap();
    let (output, calls) = fake::Fake::with_libraries().run(&own, &[], &[(CHILD, "1")]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    // Exactly one call of the library must have failed: the product that was given no address for
    // its result.
    let refused = ["blaslt Matmul on 0 = 3"];
    assert_eq!(fake::failed(&calls), refused);
    for product in ["256 x 128 x 64", "256 x 128 x 64 and C"] {
        assert!(calls.contains(&format!("hipblasLtMatmul {product} on 0 = 0")), "{calls}");
    }
}

/// Prepares the vendor's library on the GPU of a heap for products of `shape` and `types`, with a
/// workspace for them.
fn prepared(
    heap: &SymmetricHeap,
    shape: [usize; 3],
    types: (DType, DType),
) -> Result<(Prepared, SymSlice<u8>), Error> {
    let begun = Instant::now();
    let prepared = heap.gpu()?.with_relaxed_capture(|| {
        let blas = Blas::get(here()).map_err(Error::other)?;
        let multiplier = Multiplier::new(&blas).map_err(Error::other)?;
        Prepared::new(multiplier, shape, types, Prepared::WORKSPACE).map_err(Error::other)
    })?;
    println!("{} for {shape:?} {types:?} in {:.1?}", prepared.library(), begun.elapsed());
    Ok((prepared, heap.alloc::<u8>(Prepared::WORKSPACE as usize)?))
}

/// Enqueues a product on `stream`; returns false if the vendor's library refused it.
fn enqueue(
    heap: &SymmetricHeap,
    stream: &Stream,
    (prepared, workspace): &(Prepared, SymSlice<u8>),
    (args, addend): (&OpArgs, Option<&Matrix>),
) -> Result<bool, Error> {
    let mut taken = false;
    let workspace = heap.view().data[0] + workspace.offset();
    heap.gpu()?.enqueue(stream, |raw| {
        // SAFETY: the matrices and the workspace are in the heap, which is closed only after its
        // streams have finished.
        taken = unsafe { prepared.enqueue(args, addend, workspace, raw) }.map_err(Error::other)?;
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
                for bits in 0..64 {
                    let bit = |at: usize| bits >> at & 1 == 1;
                    let (odd, shifted) = (usize::from(bit(3)) * 3, usize::from(bit(4)));
                    let case = Case {
                        shape,
                        types,
                        a_columns: bit(0),
                        b_columns: bit(1),
                        bias: bit(2),
                        addend: bit(5),
                        gap: 8 + odd,
                        shift: shifted,
                    };
                    let sample = Sample::new(heap, case)?;
                    sample.poison(heap)?;
                    let call = (&sample.args(), sample.addend());
                    let taken = enqueue(heap, &stream, &library, call)?;
                    // The library may decline a bias or an addend for unaligned matrices, and for
                    // 16-bit results whose rows are not whole vectors. It may decline further calls
                    // with a single row that is stored column-major.
                    let whole = shape[1..].iter().all(|it| it.is_multiple_of(8));
                    let adds = case.bias || case.addend;
                    let refused = adds && !(sample.is_aligned() && (whole || types.1 == F32));
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
        let case = Case { b_columns: true, bias: true, addend: true, ..Case::plain(shape, types) };
        let sample = Sample::new(heap, case)?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        theirs.begin_capture(mode).map_err(Error::other)?;
        let taken = enqueue(heap, &stream, &library, (&sample.args(), sample.addend()));
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
        let sample = Sample::new(heap, Case::plain([64, 64, 64], types))?;
        let args = sample.args();
        assert!(library.0.fits(&args, None));
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
            changed(&|it| it.epilogue = epilogue::GELU),
            changed(&|it| it.bias = Matrix { dtype: 0, ..it.a }),
        ];
        sample.poison(heap)?;
        for args in others {
            assert!(!library.0.fits(&args, None));
            assert!(!enqueue(heap, &stream, &library, (&args, None))?);
        }
        stream.sync()?;
        assert!(sample.c.read(heap)?.iter().all(|&it| it == POISON), "nothing was enqueued");
        Ok(())
    });
}

fn a_whole_product_adds_what_is_like_its_result() {
    on_the_gpu(|heap| {
        let stream = heap.stream()?;
        let (shape, dtype) = ([64, 64, 64], DType::BF16);
        let case = Case { bias: true, addend: true, gap: 8, ..Case::plain(shape, (dtype, dtype)) };
        let sample = Sample::new(heap, case)?;
        let (args, addend) = (sample.args(), *sample.addend().expect("the case has one"));
        let (library, backend, tile) = (Library::Vendor, here(), (64, 64));
        let whole = GemmRequest {
            library,
            backend,
            shape,
            rows: shape[0],
            dtype,
            output: dtype,
            tile,
            signalled: None,
            gated: false,
            exchanges: false,
            batch_invariant: false,
            vendor_bits: &[],
            k_parts: 1,
            beside: false,
        };
        let product = LibraryGemm::new(heap, &whole)?.expect("the library is there");
        let workspace = heap.alloc::<u8>(whole.library_bytes() as usize)?;
        let at = heap.view().data[0] + workspace.offset();
        let adding = |args: &OpArgs, addend: &Matrix| {
            // SAFETY: the matrices and the workspace are in the heap, which is closed only after
            // its streams have finished.
            unsafe { product.enqueue_adding(heap, &stream, args, addend, at) }
        };
        type Change = fn(&mut Matrix);
        let others: [(&str, Change); 10] = [
            ("no address", |it| it.address = 0),
            ("an address that is not aligned", |it| it.address += 2),
            ("lines that are not aligned", |it| it.ld += 1),
            ("lines shorter than C's", |it| it.ld = 56),
            ("fewer rows", |it| it.rows -= 1),
            ("more rows", |it| it.rows += 1),
            ("fewer columns", |it| it.cols -= 1),
            ("more columns", |it| it.cols += 1),
            ("another type", |it| it.dtype = 0),
            ("columns", |it| it.transposed = 1),
        ];
        sample.poison(heap)?;
        for (what, change) in others {
            let mut addend = addend;
            change(&mut addend);
            assert!(!product.fits_adding(&args, &addend), "{what} fits");
            assert!(!adding(&args, &addend)?, "{what} was taken");
        }
        let gelu = OpArgs { epilogue: epilogue::GELU, ..args };
        assert!(!product.fits_adding(&gelu, &addend) && !adding(&gelu, &addend)?);
        stream.sync()?;
        assert!(sample.c.read(heap)?.iter().all(|&it| it == POISON), "nothing was enqueued");
        assert!(product.fits_adding(&args, &addend) && adding(&args, &addend)?);
        stream.sync()?;
        sample.check(heap, &case)?;
        // The built-in GEMM, which runs only on some GPUs, must multiply but refuse to add a
        // matrix.
        let ours = GemmRequest { library: Library::Ours, ..whole };
        if let Some(ours) = LibraryGemm::new(heap, &ours)? {
            assert!(ours.fits(&args) && !ours.fits_adding(&args, &addend));
        }
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
            addend: Some(64),
            alignment: 16,
            workspace: 1 << 20,
        };
        let case = Case::plain(problem.shape, (DType::BF16, DType::BF16));
        let sample = Sample::new(heap, case)?;
        assert_eq!(sample.a.layout(), problem.a);
        let product = heap.gpu()?.with_relaxed_capture(|| {
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
            addend: sample.c.matrix.address,
            workspace: data + workspace.offset(),
        };
        // The product is run twice, so that the second run adds to the result of the first. Then a
        // call without the address of the result must be refused, with the library's name for the
        // status.
        sample.c.fill(heap, |_| 0.0)?;
        let run = |at: Addresses| {
            heap.gpu()?.enqueue(&stream, |raw| {
                // SAFETY: the matrices and the workspace are in the heap, or null, which is
                // refused.
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
            _ => "hipblasLtMatmul: HIPBLAS_STATUS_INVALID_VALUE (code 3)",
        };
        assert!(error.contains(expected), "{error}");
        Ok(())
    });
}
