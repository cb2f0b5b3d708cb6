//! GEMMs of cuBLASLt or hipBLASLt on one device, for the benchmark.

#![allow(unsafe_code, reason = "products over memory of the device")]

use std::sync::Arc;

use anyhow::Result;
use iris_heap::DType;
use iris_kernels::vendor::{self, Addresses, Layout, Problem};

use super::{Buffer, Vendors};

/// Products of row-major matrices on one device, with f32 sums and the heuristic's first algorithm.
pub(crate) struct Multiplier(Arc<vendor::Multiplier>);

/// GEMM of one shape with its chosen algorithm: C (m x n) = A (m x k) * B (k x n), or C += A * B.
pub(crate) struct Product(Box<vendor::Product>);

impl Multiplier {
    /// Bytes of the workspace for products.
    pub(crate) const WORKSPACE: usize = vendor::Prepared::WORKSPACE as usize;

    /// Opens the library's handle for the device that is current.
    pub(crate) fn new(vendors: &Vendors) -> Result<Multiplier> {
        Ok(Multiplier(Arc::new(vendor::Multiplier::new(vendors.blas()?)?)))
    }

    /// Chooses the algorithm of a GEMM of `shape`; if `adds`, the product is added to C.
    pub(crate) fn product(&self, shape: [usize; 3], dtype: DType, adds: bool) -> Result<Product> {
        let [_, n, k] = shape;
        let problem = Problem {
            shape,
            a: Layout::rows(dtype, k),
            b: Layout::rows(dtype, n),
            c: Layout::rows(dtype, n),
            bias: false,
            rounds_once: false,
            addend: adds.then_some(n as u64),
            // Every operand is aligned to 16 bytes: blocks of the heap are aligned to more, and
            // parts of them begin at rows.
            alignment: 16,
            workspace: Self::WORKSPACE as u64,
        };
        Ok(Product(Box::new(vendor::Product::new(&self.0, problem)?)))
    }
}

impl Product {
    /// Enqueues the GEMM on the driver's stream `stream`.
    pub(crate) fn run(&self, [a, b, c, workspace]: [&Buffer; 4], stream: u64) -> Result<()> {
        let Problem { shape: [m, n, k], a: Layout { dtype, .. }, .. } = *self.0.problem();
        let c = c.address(m * n, dtype)?;
        let at = Addresses {
            a: a.address(m * k, dtype)?,
            b: b.address(k * n, dtype)?,
            c,
            bias: 0,
            addend: c,
            workspace: workspace.address(Multiplier::WORKSPACE, DType::U8)?,
        };
        // SAFETY: the buffers hold the problem's matrices and its workspace, on the current device,
        // which is the stream's; the caller waits before the heap is closed.
        unsafe { self.0.enqueue(at, stream) }.map_err(Into::into)
    }
}
