//! cuBLASLt: products of one device.

#![allow(unsafe_code, reason = "functions of a C library, on memory of the device")]

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use anyhow::{Result, bail, ensure};
use cudarc::driver::CudaStream;
use iris_heap::DType;

use super::{Buffer, Handle, Vendors};

/// A `cublasLtMatmulHeuristicResult_t`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Heuristic {
    algorithm: [u64; 8],
    workspace: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

library! { Table,
    cublasLtGetVersion() -> usize;
    cublasLtCreate(*mut Handle) -> c_int;
    cublasLtDestroy(Handle) -> c_int;
    cublasLtMatmulDescCreate(*mut Handle, c_int, c_int) -> c_int;
    cublasLtMatmulDescDestroy(Handle) -> c_int;
    cublasLtMatrixLayoutCreate(*mut Handle, c_int, u64, u64, i64) -> c_int;
    cublasLtMatrixLayoutDestroy(Handle) -> c_int;
    cublasLtMatmulPreferenceCreate(*mut Handle) -> c_int;
    cublasLtMatmulPreferenceSetAttribute(Handle, c_int, *const c_void, usize) -> c_int;
    cublasLtMatmulPreferenceDestroy(Handle) -> c_int;
    cublasLtMatmulAlgoGetHeuristic(
        Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Heuristic, *mut c_int,
    ) -> c_int;
    cublasLtMatmul(
        Handle, Handle, *const c_void, u64, Handle, u64, Handle, *const c_void, u64, Handle, u64,
        Handle, *const Heuristic, u64, usize, Handle,
    ) -> c_int;
}

impl Table {
    pub(super) fn version(&self) -> String {
        // SAFETY: a function without arguments.
        let version = unsafe { (self.cublasLtGetVersion)() };
        format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
    }
}

/// Products of row-major matrices on one device: f32 sums, the first algorithm of the heuristic.
pub(crate) struct Multiplier<'a> {
    table: &'a Table,
    handle: Handle,
}

/// A product with its algorithm: C (m x n) = A (m x k) * B (k x n), or added to C.
pub(crate) struct Product<'a> {
    of: &'a Multiplier<'a>,
    shape: [usize; 3],
    dtype: DType,
    /// Description of the product; layouts of B, A and C as column-major matrices.
    handles: [Handle; 4],
    algorithm: Heuristic,
    adds: f32,
}

impl<'a> Multiplier<'a> {
    /// Bytes of the workspace that products are given.
    pub(crate) const WORKSPACE: usize = 32 << 20;

    /// Of the device whose context is current.
    pub(crate) fn new(vendors: &'a Vendors) -> Result<Multiplier<'a>> {
        let table = vendors.blas()?;
        let mut handle = null_mut();
        // SAFETY: `handle` is where the answer goes.
        status("cublasLtCreate", unsafe { (table.cublasLtCreate)(&mut handle) })?;
        Ok(Multiplier { table, handle })
    }

    /// Chooses the algorithm.
    pub(crate) fn product(
        &'a self,
        shape: [usize; 3],
        dtype: DType,
        adds: bool,
    ) -> Result<Product<'a>> {
        /// `CUBLAS_COMPUTE_32F`, `CUDA_R_32F`, `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES`.
        const COMPUTE_F32: c_int = 68;
        const F32: c_int = 0;
        const MOST_WORKSPACE: c_int = 1;
        let kind = match dtype {
            DType::F32 => F32,
            DType::F16 => 2,
            DType::BF16 => 14,
            other => bail!("{other} is not timed with cuBLASLt"),
        };
        let [m, n, k] = shape;
        let table = self.table;
        let algorithm =
            Heuristic { algorithm: [0; 8], workspace: 0, state: 0, waves: 0.0, reserved: [0; 4] };
        let adds = if adds { 1.0 } else { 0.0 };
        let handles = [null_mut(); 4];
        let mut product = Product { of: self, shape, dtype, handles, algorithm, adds };
        // SAFETY: the first argument is where the answer goes.
        let code =
            unsafe { (table.cublasLtMatmulDescCreate)(&mut product.handles[0], COMPUTE_F32, F32) };
        status("cublasLtMatmulDescCreate", code)?;
        // A row-major matrix is the transpose of a column-major one: C' = B' A'.
        let layouts = [(n, k, n), (k, m, k), (n, m, n)];
        for (at, (rows, cols, ld)) in layouts.into_iter().enumerate() {
            let (rows, cols, ld) = (rows as u64, cols as u64, ld as i64);
            // SAFETY: the first argument is where the answer goes.
            let code = unsafe {
                let to = &mut product.handles[at + 1];
                (table.cublasLtMatrixLayoutCreate)(to, kind, rows, cols, ld)
            };
            status("cublasLtMatrixLayoutCreate", code)?;
        }
        let mut preference = null_mut();
        // SAFETY: the argument is where the answer goes.
        let code = unsafe { (table.cublasLtMatmulPreferenceCreate)(&mut preference) };
        status("cublasLtMatmulPreferenceCreate", code)?;
        let most = Self::WORKSPACE as u64;
        // SAFETY: the attribute is a number of 8 bytes.
        let set = unsafe {
            let most = (&raw const most).cast();
            (table.cublasLtMatmulPreferenceSetAttribute)(preference, MOST_WORKSPACE, most, 8)
        };
        let [desc, b, a, c] = product.handles;
        let mut found = 0;
        // SAFETY: all handles were made above; there is room for the one answer asked for.
        let code = unsafe {
            (table.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                desc,
                b,
                a,
                c,
                c,
                preference,
                1,
                &mut product.algorithm,
                &mut found,
            )
        };
        // SAFETY: the preference is this function's.
        unsafe { (table.cublasLtMatmulPreferenceDestroy)(preference) };
        status("cublasLtMatmulPreferenceSetAttribute", set)?;
        status("cublasLtMatmulAlgoGetHeuristic", code)?;
        ensure!(found == 1, "cuBLASLt has no algorithm for {m} x {n} x {k}");
        Ok(product)
    }
}

impl Drop for Multiplier<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is this value's, and products borrow it.
        unsafe { (self.table.cublasLtDestroy)(self.handle) };
    }
}

impl Product<'_> {
    /// Enqueues it.
    pub(crate) fn run(
        &self,
        [a, b, c, workspace]: [&Buffer; 4],
        stream: &CudaStream,
    ) -> Result<()> {
        let ([m, n, k], dtype) = (self.shape, self.dtype);
        let a = a.address(m * k, dtype)?;
        let (b, c) = (b.address(k * n, dtype)?, c.address(m * n, dtype)?);
        let room = Multiplier::WORKSPACE;
        let workspace = workspace.address(room, DType::U8)?;
        let (one, adds) = (1.0_f32, self.adds);
        let [desc, layout_b, layout_a, layout_c] = self.handles;
        // SAFETY: the buffers hold the matrices of the layouts and the workspace; the scales are
        // f32 and read before the call returns; handles and stream are alive.
        let code = unsafe {
            (self.of.table.cublasLtMatmul)(
                self.of.handle,
                desc,
                (&raw const one).cast(),
                b,
                layout_b,
                a,
                layout_a,
                (&raw const adds).cast(),
                c,
                layout_c,
                c,
                layout_c,
                &self.algorithm,
                workspace,
                room,
                stream.cu_stream().cast(),
            )
        };
        status("cublasLtMatmul", code)
    }
}

impl Drop for Product<'_> {
    fn drop(&mut self) {
        let table = self.of.table;
        let [desc, layouts @ ..] = self.handles;
        for layout in layouts.into_iter().filter(|it| !it.is_null()) {
            // SAFETY: the handle is this value's.
            unsafe { (table.cublasLtMatrixLayoutDestroy)(layout) };
        }
        if !desc.is_null() {
            // SAFETY: the handle is this value's.
            unsafe { (table.cublasLtMatmulDescDestroy)(desc) };
        }
    }
}

fn status(function: &str, code: c_int) -> Result<()> {
    ensure!(code == 0, "{function}: cublasStatus_t {code}");
    Ok(())
}
