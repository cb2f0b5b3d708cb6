//! Tests of the device source compiled by a host compiler. It must compile without warnings, have
//! the same definitions as the Rust code, and compute correctly.

#![allow(unsafe_code, reason = "the device source as host code, through raw addresses")]

use std::ffi::{CStr, c_char, c_int};
use std::mem::offset_of;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use iris_kernels::args::{ListTensor, Matrix, OpArgs, TileView, epilogue};
use iris_kernels::dtype::ROWS;
use iris_kernels::source::{KERNELS, SourceKind};
use iris_sync::{Access, Order, Scope};
use iris_testkit::harness::{self, Group, named};
use libloading::os::unix::{Library, RTLD_NOW};
use tempfile::TempDir;

#[path = "host/combines.rs"]
mod combines;
#[path = "host/forms.rs"]
mod forms;
#[path = "host/lists.rs"]
mod lists;
#[path = "host/messages.rs"]
mod messages;
use combines::weighted_parts_are_summed_in_rust_and_as_device_source;
use lists::lists_are_right_in_rust_and_as_device_source;
use messages::messages_are_right_in_rust_and_as_device_source;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn main() -> ExitCode {
    harness::run_together(vec![Group::new(
        harness::no_program("g++"),
        named![
            every_kernel_compiles_without_warnings,
            headers_and_rust_say_the_same,
            device_source_refuses_a_type_without_roles,
            a_product_is_right_with_four_threads,
            a_product_is_right_with_emulated_matrix_instructions,
            messages_are_right_in_rust_and_as_device_source,
            lists_are_right_in_rust_and_as_device_source,
            weighted_parts_are_summed_in_rust_and_as_device_source,
        ],
    )])
}

/// Builds a shared library from the device sources `sources`. The returned folder must outlive the
/// library.
fn library(sources: &[&str], options: &[&str]) -> (Library, TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("kernels.so");
    compile(sources, options, &["-shared"], &file);
    // SAFETY: the library was built just now from this crate's sources, and has no initialisers.
    let library = unsafe { Library::open(Some(&file), RTLD_NOW) }.expect("it loads");
    (library, folder)
}

fn compile(sources: &[&str], options: &[&str], form: &[&str], to: &Path) {
    let sources = sources.iter().map(|source| format!("{ROOT}/{source}"));
    let options = form.iter().chain(options).map(ToString::to_string);
    harness::compile_for_host(options.chain(sources), to);
}

fn symbol<T: Copy>(library: &Library, name: &str) -> T {
    // SAFETY: the callers use the types that mirror.cpp and hooks.cpp declare for these names.
    *unsafe { library.get::<T>(name.as_bytes()) }.expect("the function")
}

/// Deterministic generator of pseudo-random numbers. The field is its state, which starts with the
/// seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as u32) % bound
    }
}

fn every_kernel_compiles_without_warnings() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for text in KERNELS {
        // Message kernels do not depend on the element type, so one type suffices for them.
        let types = if text.kind == SourceKind::TileGemm { 0..3 } else { 0..1 };
        for dtype in types.step_by(2).map(|dtype| format!("-DIRIS_FACTOR={dtype}")) {
            let source = format!("kernels/{}", text.name);
            let to = folder.path().join("kernel.o");
            compile(&[&source], &["-std=c++17", &dtype], &["-c"], &to);
        }
    }
}

fn headers_and_rust_say_the_same() {
    let sources = ["tests/host/mirror.cpp", "tests/host/hooks.cpp"];
    let types = if cfg!(feature = "test-dtype") { TEST_DTYPE } else { "-UIRIS_TEST_DTYPE" };
    let (library, _folder) = library(&sources, &["-std=c++20", types]);
    accesses(&library);
    dtypes(&library);
    offsets(&library);
    values(&library);
}

/// Adds the row of a type of one byte without roles to `kernels/iris/dtype.h`.
const TEST_DTYPE: &str = "-DIRIS_TEST_DTYPE=1";

fn device_source_refuses_a_type_without_roles() {
    let checked = |define: &str| {
        let mut command = Command::new("g++");
        command.args(["-std=c++17", "-fsyntax-only", "-x", "c++", TEST_DTYPE, define]);
        command.arg(format!("-I{ROOT}/kernels")).arg(format!("{ROOT}/kernels/matmul.cu"));
        let output = command.output().expect("g++");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (compiles, log) = checked("-DIRIS_FACTOR=2");
    assert!(compiles, "{log}");
    for (define, role) in [("-DIRIS_FACTOR=3", "factors"), ("-DIRIS_RESULT=3", "results")] {
        let (compiles, log) = checked(define);
        assert!(!compiles && log.contains(&format!("f8e4m3 is no type of {role}")), "{log}");
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let program = folder.path().join("roles");
    let sources = ["tests/host/roles.cpp", "tests/host/hooks.cpp"];
    compile(&sources, &["-std=c++20", TEST_DTYPE], &[], &program);
    let ended = |function: u32, dtype: u32| {
        let arguments = [function, dtype].map(|number| number.to_string());
        let status = Command::new(&program).args(arguments).status().expect("the program starts");
        (status.code(), status.signal())
    };
    let functions = (0..).take_while(|&function| ended(function, 0) == (Some(0), None));
    let functions: Vec<u32> = functions.collect();
    assert_eq!((functions.len(), ended(13, 0)), (13, (Some(2), None)));
    for function in functions {
        for dtype in 0..3 {
            assert_eq!(
                ended(function, dtype),
                (Some(0), None),
                "function {function}, code {dtype}"
            );
        }
        let (code, signal) = ended(function, 3);
        assert!(code.is_none() && signal.is_some(), "function {function} returned for code 3");
    }
}

fn accesses(library: &Library) {
    type Row = unsafe extern "C" fn(u32, *mut *const c_char, *mut c_int, *mut c_int) -> u32;
    let row: Row = symbol(library, "mirror_access");
    for (index, access) in Access::ALL.iter().enumerate() {
        let (mut name, mut order, mut scope) = (std::ptr::null(), -1, -1);
        // SAFETY: `name`, `order` and `scope` are valid places into which `row` writes.
        let count = unsafe { row(index as u32, &mut name, &mut order, &mut scope) };
        assert_eq!(count as usize, Access::ALL.len());
        // SAFETY: the name is a string literal of the library.
        let name = unsafe { CStr::from_ptr(name) }.to_str().expect("utf-8");
        assert_eq!(name, access.name());
        let orders = [Order::Relaxed, Order::Acquire, Order::Release, Order::AcqRel];
        assert_eq!(orders[order as usize], access.order(), "{name}");
        assert_eq!([Scope::Device, Scope::System][scope as usize], access.scope(), "{name}");
    }
}

fn dtypes(library: &Library) {
    type Row = unsafe extern "C" fn(u32, *mut *const c_char, *mut u32, *mut u32, *mut u32) -> u32;
    let row: Row = symbol(library, "mirror_dtype");
    let ours: Vec<_> = ROWS.iter().filter(|row| row.code.is_some()).collect();
    for (place, row_of) in ours.iter().enumerate() {
        let dtype = row_of.dtype;
        let (mut name, [mut code, mut bytes, mut roles]) = (std::ptr::null(), [0; 3]);
        // SAFETY: all pointers are valid places into which `row` writes.
        let count = unsafe { row(place as u32, &mut name, &mut code, &mut bytes, &mut roles) };
        // SAFETY: the row exists, so the name is a string literal of the library.
        let name = unsafe { CStr::from_ptr(name) }.to_str().expect("utf-8");
        assert_eq!((count as usize, name.to_lowercase().as_str()), (ours.len(), dtype.name()));
        assert_eq!((Some(code), bytes as usize), (row_of.code, dtype.size()), "{dtype}");
        assert_eq!(roles, row_of.roles.iter().map(|&role| 1 << role as u32).sum(), "{dtype}");
    }
}

fn offsets(library: &Library) {
    let offset: unsafe extern "C" fn(u32) -> u64 = symbol(library, "mirror_offset");
    let ours = [
        offset_of!(OpArgs, channel),
        offset_of!(OpArgs, record),
        offset_of!(OpArgs, a),
        offset_of!(OpArgs, epsilon),
        offset_of!(OpArgs, bias),
        offset_of!(OpArgs, residual),
        offset_of!(OpArgs, weight),
        offset_of!(OpArgs, normed),
        offset_of!(OpArgs, inbox),
        offset_of!(OpArgs, slot),
        offset_of!(OpArgs, results),
        offset_of!(OpArgs, result_slot),
        offset_of!(OpArgs, workspace),
        offset_of!(OpArgs, pulled),
        offset_of!(OpArgs, pulled_ld),
        offset_of!(OpArgs, trace),
        offset_of!(OpArgs, counters),
        offset_of!(OpArgs, m),
        offset_of!(OpArgs, tile_m),
        offset_of!(OpArgs, k_group),
        offset_of!(OpArgs, max_tiles),
        offset_of!(OpArgs, max_results),
        offset_of!(OpArgs, wire),
        offset_of!(OpArgs, epilogue),
        offset_of!(OpArgs, producer),
        offset_of!(OpArgs, root),
        offset_of!(OpArgs, dedicated_workgroups),
        offset_of!(OpArgs, shard),
        offset_of!(OpArgs, m_contiguous),
        offset_of!(OpArgs, trace_spans),
        offset_of!(OpArgs, sources),
        offset_of!(OpArgs, list) + offset_of!(ListTensor, from_pitch),
        offset_of!(OpArgs, list) + offset_of!(ListTensor, to),
        offset_of!(OpArgs, list) + offset_of!(ListTensor, to_pitch),
        offset_of!(OpArgs, list) + offset_of!(ListTensor, row),
        size_of::<ListTensor>(),
        offset_of!(OpArgs, factors),
        offset_of!(OpArgs, addend),
        size_of::<OpArgs>(),
        offset_of!(TileView, channel),
        offset_of!(TileView, record),
        offset_of!(TileView, rows),
        offset_of!(TileView, tile_m),
        offset_of!(TileView, arrival),
        offset_of!(TileView, root),
        offset_of!(TileView, groups),
        size_of::<TileView>(),
    ];
    for (field, ours) in ours.into_iter().enumerate() {
        // SAFETY: `offset` has no preconditions; it accepts any number of a field.
        assert_eq!(unsafe { offset(field as u32) }, ours as u64, "field {field}");
    }
}

fn values(library: &Library) {
    let narrow: unsafe extern "C" fn(u32, f32) -> u16 = symbol(library, "mirror_narrow");
    let widen: unsafe extern "C" fn(u32, u16) -> f32 = symbol(library, "mirror_widen");
    let erf: unsafe extern "C" fn(f32) -> f32 = symbol(library, "mirror_erf");
    for bits in 0..=u16::MAX {
        let (half, brain) = (half::f16::from_bits(bits), half::bf16::from_bits(bits));
        // SAFETY: `widen` has no preconditions; it accepts any bit pattern.
        let theirs = unsafe { [widen(1, bits), widen(2, bits)] };
        for (theirs, ours) in theirs.into_iter().zip([half.to_f32(), brain.to_f32()]) {
            assert!(theirs == ours || theirs.is_nan() && ours.is_nan(), "{bits:x}");
        }
    }
    let mut numbers = Numbers(3);
    for _ in 0..2_000_000 {
        // Values with any exponent, as bits; half of the values are ties between two rounded
        // results, or next to a tie.
        let high = numbers.below(1 << 16) << 16;
        let low = [0, 1 << 15, (1 << 15) + 1, numbers.below(1 << 16)][numbers.below(4) as usize];
        let tie = if numbers.below(2) == 0 { 1 << 12 } else { 0 };
        let value = f32::from_bits(high | (low ^ tie));
        if value.is_nan() {
            continue;
        }
        // SAFETY: `narrow` has no preconditions; it accepts any value.
        let theirs = unsafe { [narrow(1, value), narrow(2, value)] };
        let ours = [half::f16::from_f32(value).to_bits(), half::bf16::from_f32(value).to_bits()];
        assert_eq!(theirs, ours, "{value:e} ({:x})", value.to_bits());
    }
    for i in -60_000..60_000 {
        let x = i as f32 / 10_007.0;
        // SAFETY: both functions have no preconditions; they accept any value.
        let (theirs, ours) = unsafe { (erf(x), libm::erff(x)) };
        assert!((theirs - ours).abs() <= 3e-7 * ours.abs(), "erf({x}) = {ours}, not {theirs}");
    }
    // SAFETY: `erf` has no preconditions; it accepts any value.
    let ends = unsafe { [erf(f32::INFINITY), erf(f32::NEG_INFINITY), erf(f32::NAN)] };
    assert!(ends[0] == 1.0 && ends[1] == -1.0 && ends[2].is_nan(), "{ends:?}");
}

fn a_product_is_right_with_four_threads() {
    let options = ["-DIRIS_FACTOR=0", "-DIRIS_THREADS=4"];
    let whole = |value: f32| value.to_le_bytes().to_vec();
    products(&options, (32, 64), (1, 70), 24, 0, whole);
}

/// Tests the MFMA core of the tile GEMM with AMD's matrix instructions emulated by
/// tests/host/hooks.cpp. The core is correct if the emulated layouts of fragments are those of the
/// hardware; the test shows nothing about a device.
fn a_product_is_right_with_emulated_matrix_instructions() {
    let brain = |value: f32| half::bf16::from_f32(value).to_le_bytes().to_vec();
    let half = |value: f32| half::f16::from_f32(value).to_le_bytes().to_vec();
    let with = |dtype: &'static str| ["-DIRIS_HAS_MFMA=1", "-DIRIS_THREADS=256", dtype];
    products(&with("-DIRIS_FACTOR=2"), (32, 64), (19, 70), 8, 2, brain);
    products(&with("-DIRIS_FACTOR=1"), (64, 64), (50, 90), 4, 1, half);
    products(&with("-DIRIS_FACTOR=2"), (128, 32), (128, 140), 1, 2, brain);
    let whole = |value: f32| value.to_le_bytes().to_vec();
    products(&with("-DIRIS_FACTOR=0"), (32, 64), (19, 70), 4, 0, whole);
    products(&with("-DIRIS_FACTOR=0"), (64, 64), (50, 90), 1, 0, whole);
    // Products with matrix instructions that take 16 bytes per thread: gfx950 has them, gfx942 does
    // not.
    let wide = |dtype| [&with(dtype)[..], &["-DIRIS_HAS_MFMA_16=1"]].concat();
    products(&wide("-DIRIS_FACTOR=1"), (32, 64), (19, 70), 4, 1, half);
    products(&wide("-DIRIS_FACTOR=2"), (64, 64), (50, 90), 1, 2, brain);
}

/// Checks products of `rounds` random shapes and layouts, for a build whose largest tile and slab
/// have the sizes `tile` and `slab`. Tile sizes are at least `smallest`, and shapes at most
/// `largest`. `bytes` encodes an element of A, B or the bias. C is f32.
fn products(
    options: &[&str],
    (tile, slab): (u32, u32),
    (smallest, largest): (u32, u32),
    rounds: u32,
    dtype: u32,
    bytes: impl Fn(f32) -> Vec<u8>,
) {
    let sources = ["kernels/matmul.cu", "tests/host/hooks.cpp"];
    let tiles = [("TILE_M", tile), ("TILE_N", tile), ("SLAB_BYTES", slab)];
    let tiles = tiles.map(|(which, size)| format!("-DIRIS_{which}={size}"));
    let tiles = tiles.iter().map(String::as_str);
    let options: Vec<&str> =
        ["-std=c++20"].into_iter().chain(tiles).chain(options.iter().copied()).collect();
    let (library, _folder) = library(&sources, &options);
    type Run = unsafe extern "C" fn(usize, *const OpArgs, u32, u32, c_int, u32, u64, u32);
    let run: Run = symbol(&library, "iris_host_run");
    let kernel: usize = symbol(&library, "iris_local");
    let mut numbers = Numbers(4);
    for round in 0..rounds {
        let mut below = |most: u32| numbers.below(most);
        let [m, n, k] = [1 + below(largest), 1 + below(largest), below(50)];
        let mut values =
            |len: u32| -> Vec<f32> { (0..len).map(|_| numbers.below(17) as f32 - 8.0).collect() };
        let (a, b, bias) = (values(m * k), values(k * n), values(n));
        let given = [&a, &b, &bias]
            .map(|values| -> Vec<u8> { values.iter().flat_map(|&value| bytes(value)).collect() });
        let mut c = vec![f32::NAN; (m * n) as usize];
        let matrix = |address: u64, dtype, rows, cols, transposed: bool| Matrix {
            address,
            ld: u64::from(if transposed { rows } else { cols }),
            rows,
            cols,
            dtype,
            transposed: u32::from(transposed),
        };
        let [across_a, across_b, across_c] = [1, 2, 4].map(|bit| round & bit != 0);
        let [at_a, at_b, at_bias] = given.each_ref().map(|bytes| bytes.as_ptr() as u64);
        let mut args = OpArgs {
            a: matrix(at_a, dtype, m, k, across_a),
            b: matrix(at_b, dtype, k, n, across_b),
            c: matrix(c.as_mut_ptr() as u64, 0, m, n, across_c),
            bias: matrix(at_bias, dtype, 1, n, false),
            tile_m: smallest + round * (tile - smallest) / rounds,
            tile_n: tile - round * (tile - smallest.max(8)) / rounds,
            ..bytemuck::Zeroable::zeroed()
        };
        let gelu = round >= rounds * 2 / 3;
        (args.m, args.n, args.k) = (m, n, k);
        args.epilogue = if gelu { epilogue::GELU } else { 0 };
        for group in 0..2 {
            // SAFETY: `kernel` is from this library; all matrices are live and have the declared
            // sizes.
            unsafe { run(kernel, &args, group, 2, 0, 0, 0, 0) };
        }
        let at = |data: &[f32], across: bool, rows: u32, cols: u32, row: u32, col: u32| {
            data[(if across { col * rows + row } else { row * cols + col }) as usize]
        };
        for (row, col) in (0..m).flat_map(|row| (0..n).map(move |col| (row, col))) {
            let product = |i| at(&a, across_a, m, k, row, i) * at(&b, across_b, k, n, i, col);
            let sum: f32 = (0..k).map(product).sum::<f32>() + bias[col as usize];
            let curved = sum * 0.5 * (1.0 + libm::erff(sum * std::f32::consts::FRAC_1_SQRT_2));
            let expected = if gelu { curved } else { sum };
            let seen = at(&c, across_c, m, n, row, col);
            // Sums of products of small integers are exact, so only GELU may round.
            let allowed = if gelu { 1e-6 * expected.abs().max(1.0) } else { 0.0 };
            assert!(
                (seen - expected).abs() <= allowed,
                "({row}, {col}) of {m} x {n} x {k}: {seen}, expected {expected}"
            );
        }
    }
}
