//! Tests of the numbers by which the GEMM libraries are called. A fake library accepts only the
//! right numbers, and each number is made wrong once. The fake library is compared with AMD's
//! header.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use bytemuck::Zeroable;
use half::{bf16, f16};
use iris_heap::DType;
use iris_kernels::args::{Matrix, OpArgs, dtype_code};
use iris_kernels::dtype::blas;
use iris_kernels::vendor::{
    Addresses, Blas, Dialect, Error, Layout, Multiplier, Prepared, Problem, Product,
};
use iris_testkit::harness;
use tempfile::TempDir;

use super::fake;

/// Builds the fake GEMM library, with the function names and numbers of `dialect`.
pub(crate) fn built(dialect: &Dialect) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let (file, options): (_, &[&str]) = match dialect.name {
        "cuBLASLt" => ("libcublasLt.so.13", &["-DFAKE_CUBLASLT"]),
        _ => ("libhipblaslt.so.1", &[]),
    };
    fake::compile("blaslt.cpp", options, &folder.path().join(file));
    folder
}

/// Matrix in host memory, aligned to 16 bytes, with rows that consist of whole vectors.
pub(crate) struct Held {
    layout: Layout,
    shape: (usize, usize),
    words: Vec<u128>,
}

impl Held {
    pub(crate) fn new(dtype: DType, shape: (usize, usize), columns: bool) -> Held {
        let (rows, cols) = shape;
        let (lines, len) = if columns { (cols, rows) } else { (rows, cols) };
        let ld = len.next_multiple_of(8);
        let layout = Layout { dtype, transposed: columns, ld: ld as u64 };
        Held { layout, shape, words: vec![0; (lines * ld * dtype.size()).div_ceil(16)] }
    }

    fn address(&self) -> u64 {
        self.words.as_ptr() as u64
    }

    fn place(&self, row: usize, col: usize) -> usize {
        let ld = self.layout.ld as usize;
        let at = if self.layout.transposed { col * ld + row } else { row * ld + col };
        at * self.layout.dtype.size()
    }

    /// Fills the matrix with small integers that depend on `by`, so that all sums are exact.
    pub(crate) fn fill(mut self, by: usize) -> Held {
        for row in 0..self.shape.0 {
            for col in 0..self.shape.1 {
                let value = ((row * self.shape.1 + col) * by % 7) as f32 - 3.0;
                let place = self.place(row, col);
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
                match self.layout.dtype {
                    DType::F32 => bytes[place..][..4].copy_from_slice(&value.to_ne_bytes()),
                    DType::F16 => {
                        bytes[place..][..2].copy_from_slice(&f16::from_f32(value).to_ne_bytes());
                    }
                    _ => bytes[place..][..2].copy_from_slice(&bf16::from_f32(value).to_ne_bytes()),
                }
            }
        }
        self
    }

    pub(crate) fn at(&self, row: usize, col: usize) -> f32 {
        let bytes: &[u8] = &bytemuck::cast_slice(&self.words)[self.place(row, col)..];
        match self.layout.dtype {
            DType::F32 => f32::from_ne_bytes(bytes[..4].try_into().unwrap()),
            DType::F16 => f16::from_ne_bytes(bytes[..2].try_into().unwrap()).to_f32(),
            _ => bf16::from_ne_bytes(bytes[..2].try_into().unwrap()).to_f32(),
        }
    }

    pub(crate) fn matrix(&self) -> Matrix {
        Matrix {
            address: self.address(),
            ld: self.layout.ld,
            rows: self.shape.0 as u32,
            cols: self.shape.1 as u32,
            dtype: dtype_code(self.layout.dtype).unwrap(),
            transposed: u32::from(self.layout.transposed),
        }
    }
}

/// Size in bytes of the workspace for the fake library's products.
pub(crate) const WORKSPACE: u64 = 1 << 16;

/// Multiplies by the fake library with the numbers of `dialect`, in all layouts and types, both
/// directly and in the way that an operator does. The error describes which result or call was
/// wrong.
fn right(dialect: &Dialect, folder: &TempDir) -> Result<(), String> {
    let told = |error: Error| error.to_string();
    let blas = Blas::load(dialect, &[PathBuf::from(folder.path())]).map_err(told)?;
    let of = Arc::new(Multiplier::new(&Arc::new(blas)).map_err(told)?);
    let ([m, n, k], most) = ([5, 8, 16], 40);
    let workspace = vec![0_u128; WORKSPACE as usize / 16];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let alone = Multiplier::new(of.blas()).map_err(told)?;
        let prepared =
            Prepared::new(alone, [most, n, k], (dtype, dtype), WORKSPACE).map_err(told)?;
        for bits in 0..24 {
            let bit = |at: usize| bits >> at & 1 == 1;
            let (a, b) = (Held::new(dtype, (m, k), bit(0)), Held::new(dtype, (k, n), bit(1)));
            let (a, b, c) = (a.fill(5), b.fill(3), Held::new(dtype, (m, n), false).fill(2));
            let bias = bit(2).then(|| Held::new(dtype, (1, n), false).fill(4));
            let (apart, in_place) = (bit(3), bit(4));
            let addend = apart.then(|| Held::new(dtype, (m, n), false).fill(6));
            let at = Addresses {
                a: a.address(),
                b: b.address(),
                c: c.address(),
                bias: bias.as_ref().map_or(0, Held::address),
                addend: c.address(),
                workspace: workspace.as_ptr() as u64,
            };
            let before: Vec<f32> = (0..m * n).map(|at| c.at(at / n, at % n)).collect();
            let taken = if in_place {
                let problem = Problem {
                    shape: [m, n, k],
                    a: a.layout,
                    b: b.layout,
                    c: c.layout,
                    bias: bias.is_some(),
                    rounds_once: true,
                    addend: Some(c.layout.ld),
                    alignment: 16,
                    workspace: WORKSPACE,
                };
                let product = Product::new(&of, problem).map_err(told)?;
                // SAFETY: all memory is on the host, and the fake library multiplies synchronously.
                unsafe { product.enqueue(at, 0) }.map(|()| true)
            } else {
                let mut args = OpArgs { m: m as u32, n: n as u32, k: k as u32, ..OpArgs::zeroed() };
                (args.a, args.b, args.c) = (a.matrix(), b.matrix(), c.matrix());
                args.bias = bias.as_ref().map_or(Matrix::default(), Held::matrix);
                // SAFETY: all memory is on the host, and the fake library multiplies synchronously.
                unsafe {
                    let addend = addend.as_ref().map(Held::matrix);
                    prepared.enqueue(&args, addend.as_ref(), at.workspace, 0)
                }
            };
            if !taken.map_err(told)? {
                return Err(format!("{dtype} {bits:b} was not taken"));
            }
            for (index, before) in before.into_iter().enumerate() {
                let (row, col) = (index / n, index % n);
                let sum: f32 = (0..k).map(|at| a.at(row, at) * b.at(at, col)).sum();
                let apart = addend.as_ref().map_or(0.0, |addend| addend.at(row, col));
                let more = if in_place { before } else { apart };
                let expected = sum + more + bias.as_ref().map_or(0.0, |bias| bias.at(0, col));
                if c.at(row, col) != expected {
                    let value = c.at(row, col);
                    return Err(format!("{dtype} {bits:b}: {value}, expected {expected}"));
                }
            }
        }
    }
    // No product above leads to the status code "not supported". The library must return it for
    // this unsupported problem, so that the problem is not reported as a failure.
    let odd = Layout::rows(DType::F32, 16);
    let problem = Problem {
        shape: [16, 16, 13],
        a: odd,
        b: odd,
        c: odd,
        bias: false,
        rounds_once: true,
        addend: None,
        alignment: 16,
        workspace: WORKSPACE,
    };
    match Product::new(&of, problem) {
        Err(Error::NoAlgorithm { .. }) => Ok(()),
        other => Err(format!("{other:?} for a depth of 13")),
    }
}

/// Number of the type `of`, which is `number` for the type `wrong`.
fn planted(of: DType, wrong: DType, number: i32) -> Option<i32> {
    if of == wrong { Some(number) } else { blas(of) }
}

pub(crate) fn wrong_numbers_are_found() {
    type Plant = (&'static str, fn(&mut Dialect));
    let plants: [Plant; 16] = [
        ("sums", |it| it.compute_f32 += 1),
        ("f32", |it| it.kind = |of| planted(of, DType::F32, 1)),
        ("f16", |it| it.kind = |of| planted(of, DType::F16, 14)),
        ("bf16", |it| it.kind = |of| planted(of, DType::BF16, 2)),
        ("a type of other releases", |it| it.kind = |of| planted(of, DType::BF16, 168)),
        ("transpose", |it| it.transpose -= 1),
        ("conjugate", |it| it.transpose += 100),
        ("factors swapped", |it| it.desc_transposes.reverse()),
        ("left twice", |it| it.desc_transposes[1] = it.desc_transposes[0]),
        ("epilogue", |it| it.desc_epilogue += 10),
        ("bias in the place of the epilogue", |it| it.desc_bias = it.desc_epilogue),
        ("no bias", |it| it.epilogue_bias = 1),
        ("workspace", |it| it.pref_workspace -= 1),
        ("a longer algorithm", |it| it.algorithm_words += 1),
        ("another scale", |it| it.kind = |of| planted(of, DType::F32, 2)),
        ("the other vendor's way with algorithms", |it| it.refuses = !it.refuses),
    ];
    for dialect in [&Dialect::CUBLASLT, &Dialect::HIPBLASLT] {
        let folder = built(dialect);
        right(dialect, &folder).unwrap();
        for (name, plant) in plants {
            // With cuBLASLt these two changes are harmless: an algorithm may also be queried for
            // each problem, and the size of an algorithm must only be large enough.
            let harmless =
                dialect.refuses && ["a longer", "the other"].iter().any(|it| name.starts_with(it));
            let mut wrong = *dialect;
            plant(&mut wrong);
            if !harmless {
                let found = right(&wrong, &folder);
                assert!(found.is_err(), "{}: {name} was not found", dialect.name);
            }
        }
        let mut wrong = *dialect;
        wrong.not_supported += 1;
        // With hipBLASLt the code for "not supported" is unused, because hipBLASLt reports zero
        // algorithms instead of an error.
        assert_eq!(right(&wrong, &folder).is_err(), dialect.refuses, "not supported");
    }
    let mut bias = Dialect::HIPBLASLT;
    bias.desc_bias_type = Some(5);
    assert!(right(&bias, &built(&bias)).is_err(), "the type of a bias");
    let mut alignment = Dialect::CUBLASLT;
    alignment.pref_alignment = Some([15, 16, 17, 18]);
    assert!(right(&alignment, &built(&alignment)).is_err(), "alignment");
    alignment = Dialect::CUBLASLT;
    alignment.pref_reduction = Some((33, 2));
    assert!(right(&alignment, &built(&alignment)).is_err(), "how parts are added up");
}

/// Reason why AMD's header cannot be checked (no g++, or no header); `None` if it can be checked.
pub(crate) fn no_header() -> Option<String> {
    harness::no_program("g++").or_else(|| {
        let found = with_header(&["-E"]).output().ok()?.status.success();
        (!found).then(|| "g++ finds no hipblaslt/hipblaslt.h".into())
    })
}

fn with_header(options: &[&str]) -> Command {
    let mut command = Command::new("g++");
    command.args(["-std=c++20", "-x", "c++", "-include", "hipblaslt/hipblaslt.h"]);
    // ROCm's packages install the header in this folder. If the header is in another folder,
    // CPLUS_INCLUDE_PATH names that folder.
    command.args(["-isystem", "/opt/rocm/include", "-D__HIP_PLATFORM_AMD__", "-DHEADER"]);
    command.args(options).args(["-o", "/dev/null"]);
    command.arg(format!("{}/blaslt.cpp", fake::SOURCES));
    command
}

pub(crate) fn the_numbers_are_those_of_the_header() {
    let output = with_header(&["-fsyntax-only"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
