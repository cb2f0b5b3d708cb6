//! `iris tune --bits`: finds the products for which the vendor's library has the bits of the built-in product
//! in every row, whatever the number of rows, so that plans with the option `batch_invariant` may use it.
//!
//! **Problem.** The library chooses an algorithm by the number of rows. Where it splits K, the bits of a row
//! follow from that choice. It does not split K without a workspace, but nothing in its interface says that
//! its bits are then those of another product.
//!
//! **Solution.** The products of all numbers of rows at which the algorithm may change are compared, element
//! by element, with the built-in product: for both storage orders of B, with and without a bias.
//!
//! **Limits.** The matrices are random. What was seen holds for a version of the library and a device. hipBLASLt
//! is never asked without a workspace, because it chooses algorithms without naming them.

#![allow(unsafe_code, reason = "products are given the addresses of matrices in the heap")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use bytemuck::Zeroable;
use half::{bf16, f16};
use iris_heap::{DType, Element, HeapOptions, Stream, SymSlice, SymmetricHeap, World};
use iris_kernels::args::{Matrix, OpArgs, dtype_code};
use iris_kernels::vendor::{Blas, Multiplier, Prepared};
use iris_kernels::{Library, VendorBits};
use iris_ops::{MatRef, Matmul, MatmulArgs, OpRequest, Topology, TuningFile, matmul};
use iris_testkit::say;

use super::machine::file_of;
use super::options::Options;
use crate::bench::origin::provenance;
use crate::gpu_bench;

/// Largest number of rows that is compared.
const MOST: usize = 8192;

/// Compares the products whose shapes are in the file `cases`, and saves what was found in the tuning files
/// of these numbers of ranks.
pub(super) fn compare(options: &Options, cases: &Path, worlds: &[usize]) -> Result<bool> {
    let kind = options.backend;
    let mut products = BTreeMap::<DType, Vec<[usize; 2]>>::new();
    for shape in gpu_bench::read(kind, Some(cases), options.only.as_deref())? {
        let OpRequest { n, k, dtype, .. } = *shape.options;
        let shapes = products.entry(dtype).or_default();
        if shape.op.multiplies() && !shapes.contains(&[n, k]) {
            shapes.push([n, k]);
        }
    }
    if products.values().all(Vec::is_empty) {
        bail!("{} has no operator with a product", cases.display());
    }
    let files = worlds.iter().map(|&ranks| {
        let ranks = Topology::new(0, ranks).on(kind);
        Ok((ranks, file_of(ranks)?))
    });
    let mut files = files.collect::<Result<Vec<(Topology, TuningFile)>>>()?;
    let found = World::run_threads(1, |world| {
        let heap = HeapOptions::new().backend(kind).data_bytes(bytes_of(&products));
        let heap = SymmetricHeap::open(&world, heap)?;
        let of_type = |(&dtype, shapes): (&DType, &Vec<[usize; 2]>)| {
            let (mut alike, mut other) = (Vec::new(), Vec::new());
            for &shape in shapes {
                let is_alike = match dtype {
                    DType::BF16 => has_our_bits::<bf16>(&heap, shape)?,
                    DType::F16 => has_our_bits::<f16>(&heap, shape)?,
                    _ => has_our_bits::<f32>(&heap, shape)?,
                };
                if is_alike { &mut alike } else { &mut other }.push(shape);
            }
            Ok(VendorBits {
                library: Multiplier::new(&Blas::get(kind)?)?.title(),
                device: heap.device().name.clone(),
                dtype,
                rows: MOST,
                shapes: alike,
                other,
                provenance: provenance(kind, options.commit.clone()),
            })
        };
        let found = products.iter().map(of_type).collect::<Result<Vec<_>>>()?;
        heap.close()?;
        Ok::<_, anyhow::Error>(found)
    })?;
    let found = found.concat();
    let some: usize = found.iter().map(|it| it.shapes.len()).sum();
    let all: usize = products.values().map(Vec::len).sum();
    for (ranks, file) in &mut files {
        found.iter().for_each(|found| file.add_vendor_bits(found.clone()));
        let path = file.save(*ranks)?;
        say!("# {some} of {all} products have our bits; saved in {}", path.display())?;
    }
    Ok(true)
}

/// Bytes for the matrices of the largest product and a workspace of the library.
fn bytes_of(products: &BTreeMap<DType, Vec<[usize; 2]>>) -> u64 {
    let of = |(dtype, shapes): (&DType, &Vec<[usize; 2]>)| {
        let elements = shapes.iter().map(|[n, k]| MOST * k + k * n + MOST * n + n);
        elements.max().unwrap_or(0) as u64 * dtype.size() as u64
    };
    products.iter().map(of).max().unwrap_or(0) + Prepared::WORKSPACE + (16 << 20)
}

/// Product whose matrices are in the heap; the rows of A and C are those of the largest call.
struct Product<T: Element> {
    shape: [usize; 2],
    a: SymSlice<T>,
    b: SymSlice<T>,
    c: SymSlice<T>,
    bias: SymSlice<T>,
    /// Whether B is column-major.
    columns: bool,
    adds_bias: bool,
}

/// Whether the vendor's products have the bits of the built-in product for all numbers of rows, both storage
/// orders of B, with and without a bias. Prints for which they differ, without a workspace and with the
/// default one.
fn has_our_bits<T: Element>(heap: &Arc<SymmetricHeap>, shape @ [n, k]: [usize; 2]) -> Result<bool> {
    let (a, b) = (heap.rand::<T>(MOST * k, 1)?, heap.rand::<T>(k * n, 2)?);
    let (c, bias) = (heap.zeros::<T>(MOST * n)?, heap.rand::<T>(n, 3)?);
    let stream = heap.stream()?;
    let mut all = true;
    for (columns, adds_bias) in [(false, false), (false, true), (true, false), (true, true)] {
        let product = Product { shape, a, b, c, bias, columns, adds_bias };
        let ours = product.built_in(heap, &stream)?;
        let [alone, usual] =
            [true, false].map(|alone| product.differing(heap, &stream, &ours, alone));
        let alone = alone?;
        let text = |differing: &[usize]| match differing {
            [] => "our bits".into(),
            rows => format!("other bits, or no product, for {rows:?} rows"),
        };
        let layout = if columns { "N x K" } else { "K x N" };
        let bias = if adds_bias { ", bias" } else { "" };
        say!(
            "{}, N = {n}, K = {k}, B {layout}{bias}: without a workspace {}; with one {}",
            T::DTYPE,
            text(&alone),
            text(&usual?)
        )?;
        all &= alone.is_empty();
    }
    for slice in [a, b, c, bias] {
        heap.free(slice)?;
    }
    Ok(all)
}

impl<T: Element> Product<T> {
    /// Product of the largest number of rows by the built-in tile GEMM.
    fn built_in(&self, heap: &Arc<SymmetricHeap>, stream: &Stream) -> Result<Vec<T>> {
        let [n, k] = self.shape;
        let plan = matmul::Options::new(MOST, n, k).dtype(T::DTYPE).library(Library::None);
        let op = Matmul::new(heap, &plan.batch_invariant(true).plan(heap)?)?;
        let b = match self.columns {
            true => MatRef::sym(self.b, n, k).transposed(),
            false => MatRef::sym(self.b, k, n),
        };
        let (a, c) = (MatRef::sym(self.a, MOST, k), MatRef::sym(self.c, MOST, n));
        let args = MatmulArgs::new(a, b, c);
        let args = if self.adds_bias { args.bias(MatRef::vector(self.bias)) } else { args };
        op.run(&args, stream)?;
        stream.sync()?;
        let product = heap.read(self.c)?;
        op.free()?;
        Ok(product)
    }

    /// Numbers of rows with which elements of the vendor's product differ from `ours`, or with which the
    /// library multiplies nothing: without a workspace if `alone`, else with the default one.
    fn differing(
        &self,
        heap: &Arc<SymmetricHeap>,
        stream: &Stream,
        ours: &[T],
        alone: bool,
    ) -> Result<Vec<usize>> {
        let [n, k] = self.shape;
        let shape = [MOST, n, k];
        let workspace = if alone { 0 } else { Prepared::WORKSPACE };
        let gpu = heap.gpu()?;
        let prepared = gpu.with_relaxed_capture(|| {
            let made = Blas::get(gpu.kind()).and_then(|blas| Multiplier::new(&blas));
            let made = made.and_then(|of| match alone {
                true => Prepared::with_one_set_of_bits(of, shape, T::DTYPE, MOST),
                false => Prepared::new(of, shape, (T::DTYPE, T::DTYPE), workspace),
            });
            made.map_err(iris_heap::Error::other)
        })?;
        let workspace = heap.alloc::<u8>(workspace.max(1) as usize)?;
        let place = heap.view().data[0] + workspace.offset();
        let mut found = Vec::new();
        // The built-in product must not stand in for elements that the library leaves out.
        let nan: T = bytemuck::pod_read_unaligned(&[0xff; 4][..size_of::<T>()]);
        let nothing = vec![nan; MOST * n];
        for m in Prepared::rows_to_compare(MOST) {
            let rows = self.c.slice(..m * n)?;
            heap.write(rows, &nothing[..m * n])?;
            let args = self.args(heap, m);
            let mut done = false;
            gpu.enqueue(stream, |raw| {
                // SAFETY: all matrices and the workspace are in the heap, and nothing is freed before the
                // stream has finished.
                let outcome = unsafe { prepared.enqueue(&args, None, place, raw) };
                done = outcome.map_err(iris_heap::Error::other)?;
                Ok(())
            })?;
            stream.sync()?;
            let theirs = heap.read(rows)?;
            let [theirs, ours] = [&theirs, &ours[..m * n]].map(bytemuck::cast_slice::<T, u8>);
            found.extend((!done || theirs != ours).then_some(m));
        }
        heap.free(workspace)?;
        Ok(found)
    }

    /// Arguments of the product of the first `m` rows.
    fn args(&self, heap: &SymmetricHeap, m: usize) -> OpArgs {
        let [n, k] = self.shape;
        let matrix = |slice: SymSlice<T>, rows: usize, cols: usize| Matrix {
            address: heap.view().data[0] + slice.offset(),
            ld: cols as u64,
            rows: rows as u32,
            cols: cols as u32,
            dtype: dtype_code(T::DTYPE).unwrap_or_default(),
            transposed: 0,
        };
        let b = matrix(self.b, k, n);
        OpArgs {
            a: matrix(self.a, m, k),
            b: if self.columns { Matrix { ld: k as u64, transposed: 1, ..b } } else { b },
            c: matrix(self.c, m, n),
            bias: if self.adds_bias { matrix(self.bias, 1, n) } else { Matrix::default() },
            m: m as u32,
            n: n as u32,
            k: k as u32,
            ..OpArgs::zeroed()
        }
    }
}
