//! Tests that count the library objects and memory allocations of calls, with a fake GEMM library.

use std::ffi::c_int;
use std::path::PathBuf;
use std::sync::Arc;

use bytemuck::Zeroable;
use iris_heap::DType;
use iris_kernels::args::OpArgs;
use iris_kernels::vendor::{Blas, Dialect, Multiplier, Prepared};
use iris_testkit::allocations::Counting;
use libloading::Library;

use super::numbers::{Held, WORKSPACE, built};

/// Counters of the objects that the fake GEMM library has made.
struct Counts(Library);

impl Counts {
    fn ask(&self, name: &str) -> u64 {
        // SAFETY: blaslt.cpp defines the function `name` with this type.
        let count = unsafe { self.0.get::<extern "C" fn() -> u64>(name.as_bytes()) };
        count.unwrap()()
    }

    /// Number of objects made since the library was loaded.
    fn made(&self) -> u64 {
        self.ask("fake_made")
    }

    /// Number of objects that were made and not yet destroyed.
    fn live(&self) -> u64 {
        self.ask("fake_live")
    }

    /// Makes the fake library reject products with `rows` rows.
    fn refuse(&self, rows: u64) {
        // SAFETY: blaslt.cpp defines `fake_refuse` with this type.
        let refuse = unsafe { self.0.get::<extern "C" fn(u64) -> c_int>(b"fake_refuse") };
        assert_eq!(refuse.unwrap()(rows), 0);
    }
}

pub(crate) fn a_problem_is_described_once() {
    for dialect in [&Dialect::CUBLASLT, &Dialect::HIPBLASLT] {
        let folder = built(dialect);
        let blas = Arc::new(Blas::load(dialect, &[PathBuf::from(folder.path())]).unwrap());
        // SAFETY: loading the fake library has no preconditions, and the library is loaded already.
        let counts = Counts(unsafe { Library::new(blas.path()) }.unwrap());
        let [most, n, k] = [200, 8, 16];
        let kept = Prepared::PRODUCTS;
        let dtype = DType::F32;
        let (a, b) = (Held::new(dtype, (most, k), false), Held::new(dtype, (k, n), false));
        let (a, b) = (a.fill(5), b.fill(3));
        let biases = [4, 6].map(|by| Held::new(dtype, (1, n), false).fill(by));
        let workspace = vec![0_u128; WORKSPACE as usize / 16];
        let multiplier = Multiplier::new(&blas).unwrap();
        let prepared = Prepared::new(multiplier, [most, n, k], (dtype, dtype), WORKSPACE).unwrap();
        // Makes a call of `rows` rows. Returns whether the library accepted the call, and how many
        // objects and memory allocations the call made.
        let call = |rows: usize, bias: &Held| {
            let c = Held::new(dtype, (rows, n), false);
            let mut args = OpArgs { m: rows as u32, n: n as u32, k: k as u32, ..OpArgs::zeroed() };
            (args.a, args.b, args.c) = (a.matrix(), b.matrix(), c.matrix());
            (args.a.rows, args.bias) = (rows as u32, bias.matrix());
            let before = counts.made();
            // SAFETY: all memory is on the host, and the fake library multiplies synchronously.
            let enqueue = || unsafe { prepared.enqueue(&args, None, workspace.as_ptr() as u64, 0) };
            let (allocated, taken) = Counting::during(enqueue);
            let taken = taken.unwrap();
            for (row, col) in (0..rows).flat_map(|row| (0..n).map(move |col| (row, col))) {
                let sum: f32 = (0..k).map(|at| a.at(row, at) * b.at(at, col)).sum();
                let expected = if taken { sum + bias.at(0, col) } else { 0.0 };
                assert_eq!(c.at(row, col), expected, "({row}, {col}) of {rows} rows");
            }
            (taken, counts.made() - before, allocated)
        };
        let before = counts.live();
        for rows in 1..=most {
            let (taken, made, _) = call(rows, &biases[0]);
            assert!(taken && made > 0, "{} of {rows} rows", dialect.name);
            // A second call of the same problem, with the bias at another address, must make no
            // objects.
            assert_eq!(call(rows, &biases[1]), (true, 0, 0), "{} of {rows} rows", dialect.name);
        }
        // For each problem that was kept, the fake library must have one live descriptor and three
        // live layouts.
        assert_eq!(counts.live() - before, 4 * kept as u64, "{}", dialect.name);
        assert_eq!(call(most - kept + 1, &biases[0]), (true, 0, 0), "{}", dialect.name);
        assert!(call(most - kept, &biases[0]).1 > 0, "{} kept too many", dialect.name);
        if dialect.refuses {
            counts.refuse(7);
            assert!(!call(7, &biases[0]).0);
            assert_eq!(call(7, &biases[0]), (false, 0, 0), "it is not asked again");
        }
        drop(prepared);
        assert_eq!(counts.live(), 0, "{}", dialect.name);
    }
}
