//! Tests of the built-in whole-matrix GEMM. Every build must compile without local memory. On a
//! GPU, small and odd shapes are compared in every element with sums in f64, in both types and all
//! layouts. Large shapes are compared with sums in f64 in samples; if the vendor's library is
//! installed, all their elements are compared with its results, with a tolerance.

#![allow(unsafe_code, reason = "products over memory of the heap")]

use std::process::ExitCode;
use std::sync::Arc;

use bytemuck::Zeroable;
use half::{bf16, f16};
use iris_heap::{BackendKind, DType, Error, HeapOptions, SymSlice, SymmetricHeap, World};
use iris_kernels::args::{Matrix, OpArgs, dtype_code};
use iris_kernels::gemm::{Config, Gemm};
use iris_kernels::rtc::{self, Compiler};
use iris_kernels::source::Text;
use iris_kernels::{GemmRequest, Library, LibraryGemm, Target, source};
use iris_testkit::harness::{self, Group, named};

const LAYOUTS: [(bool, bool); 4] = [(false, false), (false, true), (true, false), (true, true)];

fn main() -> ExitCode {
    let no_compiler = match Compiler::nvrtc() {
        Err(error @ rtc::Error::NotFound { .. }) => Some(error.to_string()),
        _ => None,
    };
    let missing = harness::no_gpu().or_else(|| no_compiler.clone());
    harness::run(vec![
        Group::new(no_compiler.clone(), named![a_build_of_each_kind_compiles]),
        Group::new(no_compiler, named![every_build_compiles]).slow(),
        Group::new(
            missing,
            named![
                kernels_have_no_local_memory,
                odd_shapes_are_right_in_every_element,
                integers_are_exact,
                large_shapes_are_right_where_sampled,
                what_does_not_fit_is_left_to_others,
                a_whole_product_is_that_of_whichever_library,
            ],
        ),
    ])
}

/// Builds of the GEMM, which together vary every parameter: width, cluster, deferred store, and
/// operands flipped or not.
fn builds() -> Vec<Config> {
    let wide = [(256, 2, 4), (224, 2, 4), (192, 2, 4), (160, 2, 5), (128, 2, 6), (64, 1, 7)];
    let wide = wide.map(|(width, cluster, stages)| Config::wide(width, cluster, stages));
    let not_held = wide.map(|config| Config { hold: false, ..config });
    let flipped = [(16, 1, 8), (32, 2, 8), (64, 2, 6), (64, 1, 8)];
    let flipped = flipped.map(|(width, groups, stages)| Config::flipped(width, groups, stages));
    let alone = Config { cluster: 1, ..wide[4] };
    let pair = Config { cluster: 2, ..Config::flipped(128, 1, 8) };
    wide.into_iter().chain(not_held).chain(flipped).chain([alone, pair]).collect()
}

fn compile(source: &Text, config: &Config, dtype: DType) {
    let options = config.options([dtype_code(dtype).unwrap(); 2]);
    let begun = std::time::Instant::now();
    let code = Compiler::nvrtc()
        .and_then(|it| harness::compiled_by(it, (*source).into(), &options, "sm_90a"))
        .unwrap_or_else(|error| panic!("{}: {config:?}: {error}", source.name));
    assert!(code.starts_with(b"\x7fELF"), "{config:?}");
    println!("{:.1} s: {dtype} {config:?}", begun.elapsed().as_secs_f64());
}

fn a_build_of_each_kind_compiles() {
    let [plain, gather, scatter, exchange, one_shot] = source::GEMMS else {
        panic!("five sources")
    };
    compile(plain, &Config::wide(256, 2, 4), DType::BF16);
    compile(plain, &Config::wide(64, 1, 7).with_layout((true, true)), DType::F16);
    compile(plain, &Config::flipped(32, 2, 8), DType::BF16);
    compile(gather, &Config::wide(224, 2, 4), DType::F16);
    compile(scatter, &Config::wide(256, 2, 4).with_layout((false, true)), DType::F16);
    compile(exchange, &Config::flipped(16, 1, 8), DType::F16);
    compile(one_shot, &Config::flipped(128, 2, 4).with_layout((false, true)), DType::BF16);
}

fn every_build_compiles() {
    for config in builds() {
        for layout in LAYOUTS {
            for dtype in [DType::F16, DType::BF16] {
                compile(&source::GEMMS[0], &config.with_layout(layout), dtype);
                if !config.flipped && !layout.0 {
                    compile(&source::GEMMS[1], &config.with_layout(layout), dtype);
                }
                if [128, 256].contains(&config.width)
                    && config.cluster == 2
                    && !config.flipped
                    && !layout.0
                {
                    compile(&source::GEMMS[2], &config.with_layout(layout), dtype);
                }
                if config.flipped && config.cluster == 1 && !layout.0 {
                    compile(&source::GEMMS[3], &config.with_layout(layout), dtype);
                    compile(&source::GEMMS[4], &config.with_layout(layout), dtype);
                }
            }
        }
    }
}

/// Runs `test` on one rank with a heap on the GPU. If the GPU does not support the built-in GEMM,
/// checks instead that the error names the architecture.
fn on_the_gpu(test: impl Fn(&Arc<SymmetricHeap>) -> Result<(), Error> + Send + Sync) {
    let outcome = World::run_threads(1, |world| {
        let options = HeapOptions::new().backend(BackendKind::Cuda).data_bytes(600 << 20);
        let heap = SymmetricHeap::open(&world, options)?;
        let target = Target::of(heap.device())?;
        if Gemm::is_there(&target, DType::BF16) {
            test(&heap)?;
        } else {
            let outcome = Gemm::of(&heap, [1; 3], DType::BF16, &[]);
            let error = outcome.map(drop).unwrap_err().to_string();
            assert!(error.contains(&target.arch), "{error}");
        }
        heap.close()
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

fn kernels_have_no_local_memory() {
    on_the_gpu(|heap| {
        for dtype in [DType::F16, DType::BF16] {
            for config in builds() {
                let gemm = Gemm::of(heap, [64, 64, 1024], dtype, &[config])?;
                for (config, (registers, local)) in gemm.resources()? {
                    assert_eq!(local, 0, "{registers} registers and {local} bytes in {config:?}");
                }
            }
        }
        Ok(())
    });
}

fn mixed(seed: usize) -> u32 {
    let mixed = (seed as u32).wrapping_mul(0x9e37_79b9) ^ 0x5bd1_e995;
    (mixed ^ mixed >> 15).wrapping_mul(0x85eb_ca6b) >> 8
}

/// Pseudo-random real number that f16 and bf16 hold exactly.
fn real(seed: usize) -> f32 {
    ((mixed(seed) & 0xff) as f32 - 127.0) / 64.0
}

/// Pseudo-random small integer. Sums of such numbers are exact, so a wrong element cannot be
/// explained by rounding.
fn integer(seed: usize) -> f32 {
    (mixed(seed) % 3) as f32 - 1.0
}

fn bits_of(dtype: DType, value: f32) -> u16 {
    match dtype {
        DType::F16 => f16::from_f32(value).to_bits(),
        _ => bf16::from_f32(value).to_bits(),
    }
}

fn value_of(dtype: DType, bits: u16) -> f32 {
    match dtype {
        DType::F16 => f16::from_bits(bits).to_f32(),
        _ => bf16::from_bits(bits).to_f32(),
    }
}

/// Matrix in the heap, with a copy of the bits that were written to it.
struct Placed {
    slice: SymSlice<u8>,
    matrix: Matrix,
    held: Vec<u16>,
}

impl Placed {
    fn new(
        heap: &SymmetricHeap,
        dtype: DType,
        (rows, cols): (usize, usize),
        (columns, gap): (bool, usize),
        value: &dyn Fn(usize) -> f32,
    ) -> Result<Placed, Error> {
        let (lines, len) = if columns { (cols, rows) } else { (rows, cols) };
        let ld = (len + gap).next_multiple_of(8);
        let held: Vec<u16> = (0..lines * ld).map(|at| bits_of(dtype, value(at))).collect();
        let slice = heap.alloc::<u8>(held.len() * 2)?;
        heap.write(slice, bytemuck::cast_slice(&held))?;
        let matrix = Matrix {
            address: heap.view().data[0] + slice.offset(),
            ld: ld as u64,
            rows: rows as u32,
            cols: cols as u32,
            dtype: dtype_code(dtype).unwrap(),
            transposed: u32::from(columns),
        };
        Ok(Placed { slice, matrix, held })
    }

    fn at(&self, row: usize, col: usize) -> usize {
        match self.matrix.transposed {
            0 => row * self.matrix.ld as usize + col,
            _ => col * self.matrix.ld as usize + row,
        }
    }
}

const POISON: f32 = 1000.0;

/// Multiplies A by B once with each GEMM build in `configs` and each storage order in `layouts`.
/// Compares C with the reference (all elements, or `samples` random ones), and checks that the gaps
/// between the rows of C are unchanged.
fn compare(
    heap: &SymmetricHeap,
    [m, n, k]: [usize; 3],
    dtype: DType,
    (configs, layouts): (&[Config], &[(bool, bool)]),
    (value, samples): (&dyn Fn(usize) -> f32, Option<usize>),
) -> Result<(), Error> {
    let stream = heap.stream()?;
    for &layout in layouts {
        let a = Placed::new(heap, dtype, (m, k), (layout.0, 8), value)?;
        let b = Placed::new(heap, dtype, (k, n), (layout.1, 0), &|at| value(at + 54321))?;
        let bias = Placed::new(heap, dtype, (1, n), (false, 0), &|at| value(at + 999))?;
        let c = Placed::new(heap, dtype, (m, n), (false, 8), &|_| POISON)?;
        let points: Vec<(usize, usize)> = match samples {
            None => (0..m).flat_map(|row| (0..n).map(move |col| (row, col))).collect(),
            Some(count) => {
                let random =
                    (0..count).map(|i| (mixed(i) as usize % m, mixed(i + count) as usize % n));
                // The sample contains elements of the last row and of the last column in each tile,
                // because tiles are cut off there.
                let bottom = (0..n).step_by(16).chain([n - 1]).map(|col| (m - 1, col));
                let right = (0..m).step_by(64).map(|row| (row, n - 1));
                random.chain(bottom).chain(right).collect()
            }
        };
        let expected: Vec<f64> = points
            .iter()
            .map(|&(row, col)| {
                let terms = (0..k).map(|d| {
                    let (x, y) = (a.held[a.at(row, d)], b.held[b.at(d, col)]);
                    f64::from(value_of(dtype, x)) * f64::from(value_of(dtype, y))
                });
                terms.sum()
            })
            .collect();
        for (number, config) in configs.iter().enumerate() {
            let config = config.with_layout(layout);
            if !config.takes([m, n, k]) {
                continue;
            }
            let gemm = Gemm::of(heap, [m, n, k], dtype, &[config])?;
            heap.write(c.slice, bytemuck::cast_slice(&c.held))?;
            let has_bias = number % 2 == 1;
            let args = OpArgs {
                a: a.matrix,
                b: b.matrix,
                c: c.matrix,
                bias: if has_bias { bias.matrix } else { Matrix::default() },
                m: m as u32,
                n: n as u32,
                k: k as u32,
                ..OpArgs::zeroed()
            };
            // SAFETY: the matrices are in the heap, which is closed only after its streams have
            // finished.
            let launched = unsafe { gemm.launch(heap.gpu()?, &stream, &args) }?;
            assert!(launched, "{m} x {n} x {k} of {dtype} by {config:?}");
            stream.sync()?;
            let bytes = heap.read(c.slice)?;
            let result: Vec<u16> =
                bytes.chunks_exact(2).map(|it| u16::from_ne_bytes([it[0], it[1]])).collect();
            let unit = if dtype == DType::F16 { 1.0 / 2048.0 } else { 1.0 / 256.0 };
            for (&(row, col), &product) in points.iter().zip(&expected) {
                let with = if has_bias { value_of(dtype, bias.held[col]) } else { 0.0 };
                let expected = product + f64::from(with);
                let got = f64::from(value_of(dtype, result[c.at(row, col)]));
                let most = expected.abs() * unit + 1e-6 * k as f64 + 1e-4;
                assert!(
                    (got - expected).abs() <= most,
                    "{m} x {n} x {k} of {dtype} by {config:?}: ({row}, {col}) is {got}, expected {expected}"
                );
            }
            let ld = c.matrix.ld as usize;
            for (at, &bits) in result.iter().enumerate() {
                let poisoned = bits == c.held[at];
                // After the product, only the gaps between rows may still contain the poison value,
                // which no sum equals.
                assert_eq!(poisoned, at % ld >= n, "{config:?}: element {at} of lines of {ld}");
            }
        }
        for placed in [a, b, bias, c] {
            heap.free(placed.slice)?;
        }
    }
    Ok(())
}

fn odd_shapes_are_right_in_every_element() {
    on_the_gpu(|heap| {
        let shapes =
            [[1, 8, 8], [3, 24, 13], [64, 64, 64], [65, 136, 77], [130, 304, 136], [257, 520, 329]];
        for dtype in [DType::F16, DType::BF16] {
            for shape in shapes {
                compare(heap, shape, dtype, (&builds(), &LAYOUTS), (&real, None))?;
            }
        }
        Ok(())
    });
}

fn integers_are_exact() {
    on_the_gpu(|heap| {
        // Every sum is at most 200 (200 products of ones), which f16 and bf16 hold exactly.
        for dtype in [DType::F16, DType::BF16] {
            compare(heap, [200, 264, 200], dtype, (&builds(), &LAYOUTS), (&integer, None))?;
        }
        Ok(())
    });
}

fn large_shapes_are_right_where_sampled() {
    on_the_gpu(|heap| {
        // With these shapes a workgroup has several tiles. Its last tiles are cut off by the edges
        // of C in all directions.
        let shapes = [[4100, 4104, 520], [2048, 1288, 4096], [33, 8200, 3592]];
        for (at, shape) in shapes.into_iter().enumerate() {
            let dtype = if at == 1 { DType::F16 } else { DType::BF16 };
            let layouts = &LAYOUTS[at..at + 2];
            compare(heap, shape, dtype, (&builds(), layouts), (&real, Some(500)))?;
        }
        Ok(())
    });
}

fn what_does_not_fit_is_left_to_others() {
    on_the_gpu(|heap| {
        let shape = [64, 256, 128];
        let configs = Config::of_plan(shape, heap.gpu()?.multiprocessors(), 1);
        let gemm = Gemm::of(heap, shape, DType::BF16, &configs)?;
        let matrix = |rows: u32, cols: u32| Matrix {
            address: heap.view().data[0],
            ld: u64::from(cols),
            rows,
            cols,
            dtype: 2,
            transposed: 0,
        };
        let args = OpArgs {
            a: matrix(64, 128),
            b: matrix(128, 256),
            c: matrix(64, 256),
            m: 64,
            n: 256,
            k: 128,
            ..OpArgs::zeroed()
        };
        assert!(gemm.fits(&args));
        let odd = Gemm::of(heap, [64, 254, 128], DType::BF16, &configs)?;
        assert!(!odd.fits(&OpArgs { n: 254, ..args }), "its stores would end behind the row");
        let others: [fn(&mut OpArgs); 10] = [
            |it| it.m = 0,
            |it| it.m = 65,
            |it| it.k = 127,
            |it| it.a.ld = 129,
            |it| it.b.address += 2,
            |it| it.b.transposed = 1,
            |it| it.c.transposed = 1,
            |it| it.c.dtype = 0,
            |it| it.epilogue = 1,
            |it| it.bias = Matrix { dtype: 0, ..it.a },
        ];
        for (at, change) in others.into_iter().enumerate() {
            let mut args = args;
            change(&mut args);
            assert!(!gemm.fits(&args), "change {at}");
        }
        Ok(())
    });
}

fn a_whole_product_is_that_of_whichever_library() {
    on_the_gpu(|heap| {
        let (m, n, k) = (100, 512, 264);
        let stream = heap.stream()?;
        let dtype = DType::BF16;
        let a = Placed::new(heap, dtype, (m, k), (false, 0), &integer)?;
        let b = Placed::new(heap, dtype, (k, n), (false, 0), &|at| integer(at + 5))?;
        let c = Placed::new(heap, dtype, (m, n), (false, 0), &|_| POISON)?;
        let args = OpArgs {
            a: a.matrix,
            b: b.matrix,
            c: c.matrix,
            m: m as u32,
            n: n as u32,
            k: k as u32,
            ..OpArgs::zeroed()
        };
        let mut results = Vec::new();
        for library in [Library::Auto, Library::Vendor, Library::Ours] {
            let shape = [128, n, k];
            let (backend, tile) = (BackendKind::Cuda, (128, 128));
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
            let product = LibraryGemm::new(heap, &whole)?.expect("ours is there");
            println!("{library}: {}", product.title());
            let bytes = whole.library_bytes().max(1);
            let workspace = heap.alloc::<u8>(bytes as usize)?;
            let at = heap.view().data[0] + workspace.offset();
            heap.write(c.slice, bytemuck::cast_slice(&c.held))?;
            // SAFETY: the matrices are in the heap, which is closed only after its streams have
            // finished.
            assert!(unsafe { product.enqueue(heap, &stream, &args, at) }?);
            let gelu = OpArgs { epilogue: 1, ..args };
            // SAFETY: the matrices are in the heap, which is closed only after its streams have
            // finished.
            assert!(!unsafe { product.enqueue(heap, &stream, &gelu, at) }?);
            stream.sync()?;
            results.push(heap.read(c.slice)?);
            heap.free(workspace)?;
        }
        // Sums of small integers are exact, so the results of all libraries must be equal bit by
        // bit.
        assert!(results.iter().all(|it| *it == results[0]), "the products differ");
        assert!(results[0] != bytemuck::cast_slice::<u16, u8>(&c.held));
        Ok(())
    });
}
