//! Sample products in a heap on the GPU, with reference results computed in f64.

use std::sync::Arc;

use bytemuck::Zeroable;
use half::{bf16, f16};
use iris_heap::{BackendKind, DType, Error, HeapOptions, SymSlice, SymmetricHeap, World};
use iris_kernels::args::{Matrix, OpArgs, dtype_code};
use iris_kernels::vendor::Layout;

/// Environment variable that marks a child process of the test, which uses the fake runtime and
/// library.
pub(crate) const CHILD: &str = "VENDOR_TEST_CHILD";

/// Kind of GPU to test: CUDA if there is such a GPU, otherwise HIP. A child process of the test has
/// a HIP GPU through the fake runtime.
pub(crate) fn here() -> BackendKind {
    match BackendKind::Cuda.device_count() {
        Ok(1..) if std::env::var_os(CHILD).is_none() => BackendKind::Cuda,
        _ => BackendKind::Hip,
    }
}

/// Runs `test` on one rank with a heap on the GPU.
pub(crate) fn on_the_gpu(test: impl Fn(&Arc<SymmetricHeap>) -> Result<(), Error> + Send + Sync) {
    let outcome = World::run_threads(1, |world| {
        let options = HeapOptions::new().backend(here()).data_bytes(256 << 20);
        let heap = SymmetricHeap::open(&world, options)?;
        test(&heap)?;
        heap.close()
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

/// Pseudo-random real number of either sign that all types hold exactly; sums of such numbers are
/// not exact.
pub(crate) fn number(seed: usize) -> f32 {
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

/// Matrix in the heap, with its element type and layout.
pub(crate) struct Placed {
    slice: SymSlice<u8>,
    pub(crate) matrix: Matrix,
    dtype: DType,
    shift: usize,
}

impl Placed {
    /// Allocates and writes a matrix with gaps between its rows. The matrix begins `shift` elements
    /// after an aligned address.
    pub(crate) fn new(
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

    pub(crate) fn layout(&self) -> Layout {
        let Matrix { ld, transposed, .. } = self.matrix;
        Layout { dtype: self.dtype, transposed: transposed == 1, ld }
    }

    fn at(&self, row: usize, col: usize) -> usize {
        let Matrix { ld, transposed, .. } = self.matrix;
        let (line, place) = if transposed == 1 { (col, row) } else { (row, col) };
        self.shift + line * ld as usize + place
    }

    pub(crate) fn fill(
        &self,
        heap: &SymmetricHeap,
        value: impl Fn(usize) -> f32,
    ) -> Result<Vec<f32>, Error> {
        let len = self.slice.bytes() as usize / self.dtype.size();
        let values: Vec<f32> = (0..len).map(value).collect();
        heap.write(self.slice, &bytes_of(self.dtype, &values))?;
        Ok(values)
    }

    pub(crate) fn read(&self, heap: &SymmetricHeap) -> Result<Vec<f32>, Error> {
        Ok(values_of(self.dtype, &heap.read(self.slice)?))
    }
}

/// Matrices of a product in the heap, and the values of A, B, bias and addend for the reference.
pub(crate) struct Sample {
    pub(crate) a: Placed,
    pub(crate) b: Placed,
    pub(crate) c: Placed,
    bias: Option<Placed>,
    addend: Option<Placed>,
    shape: [usize; 3],
    held: [Vec<f32>; 4],
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) shape: [usize; 3],
    pub(crate) types: (DType, DType),
    pub(crate) a_columns: bool,
    pub(crate) b_columns: bool,
    pub(crate) bias: bool,
    pub(crate) addend: bool,
    pub(crate) gap: usize,
    pub(crate) shift: usize,
}

impl Case {
    /// Case with row-major matrices without gaps, and without bias and addend.
    pub(crate) fn plain(shape: [usize; 3], types: (DType, DType)) -> Case {
        let (a_columns, b_columns, bias, addend) = (false, false, false, false);
        Case { shape, types, a_columns, b_columns, bias, addend, gap: 0, shift: 0 }
    }
}

pub(crate) const POISON: f32 = 1000.0;

impl Sample {
    pub(crate) fn new(heap: &SymmetricHeap, case: Case) -> Result<Sample, Error> {
        let Case { shape: [m, n, k], types: (dtype, output), gap, shift, .. } = case;
        let a = Placed::new(heap, dtype, (m, k), (case.a_columns, gap, shift))?;
        let b = Placed::new(heap, dtype, (k, n), (case.b_columns, gap, shift))?;
        let c = Placed::new(heap, output, (m, n), (false, gap, shift))?;
        let place = (false, 0, shift);
        let bias = case.bias.then(|| Placed::new(heap, output, (1, n), place)).transpose()?;
        // The addend gets longer rows than C, so that their strides differ.
        let place = (false, gap + 8, shift);
        let addend = case.addend.then(|| Placed::new(heap, output, (m, n), place)).transpose()?;
        let fill = |it: Option<&Placed>, from: usize| {
            it.map_or(Ok(Vec::new()), |it| it.fill(heap, |at| number(at + from)))
        };
        let held = [
            fill(Some(&a), 0)?,
            fill(Some(&b), 12345)?,
            fill(bias.as_ref(), 777)?,
            fill(addend.as_ref(), 54321)?,
        ];
        Ok(Sample { a, b, c, bias, addend, shape: [m, n, k], held })
    }

    pub(crate) fn args(&self) -> OpArgs {
        let [m, n, k] = self.shape.map(|it| it as u32);
        let mut args = OpArgs { m, n, k, ..OpArgs::zeroed() };
        (args.a, args.b, args.c) = (self.a.matrix, self.b.matrix, self.c.matrix);
        args.bias = self.bias.as_ref().map_or(Matrix::default(), |it| it.matrix);
        args
    }

    pub(crate) fn addend(&self) -> Option<&Matrix> {
        self.addend.as_ref().map(|it| &it.matrix)
    }

    /// Whether all addresses are multiples of 16 bytes, and also the strides of all matrices with
    /// several rows.
    pub(crate) fn is_aligned(&self) -> bool {
        let added = [&self.bias, &self.addend].into_iter().flatten();
        [&self.a, &self.b, &self.c].into_iter().chain(added).all(|it| {
            let lines = if it.matrix.transposed == 1 { it.matrix.cols } else { it.matrix.rows };
            let step = if lines > 1 { it.matrix.ld * it.dtype.size() as u64 } else { 0 };
            it.matrix.address.is_multiple_of(16) && step.is_multiple_of(16)
        })
    }

    pub(crate) fn poison(&self, heap: &SymmetricHeap) -> Result<(), Error> {
        self.c.fill(heap, |_| POISON).map(drop)
    }

    /// Compares all elements of C with the reference, and checks that the gaps between rows are
    /// unchanged.
    pub(crate) fn check(
        &self,
        heap: &SymmetricHeap,
        what: &dyn std::fmt::Debug,
    ) -> Result<(), Error> {
        let ([m, n, k], [x, y, z, w]) = (self.shape, &self.held);
        let mut expected: Vec<Option<f64>> =
            vec![None; self.c.slice.bytes() as usize / self.c.dtype.size()];
        for row in 0..m {
            for col in 0..n {
                let products = (0..k).map(|d| {
                    let (a, b) = (x[self.a.at(row, d)], y[self.b.at(d, col)]);
                    f64::from(a) * f64::from(b)
                });
                let bias = self.bias.as_ref().map_or(0.0, |it| f64::from(z[it.at(0, col)]));
                let addend = self.addend.as_ref().map_or(0.0, |it| f64::from(w[it.at(row, col)]));
                expected[self.c.at(row, col)] = Some(products.sum::<f64>() + bias + addend);
            }
        }
        // Relative error of one rounding to C's type. The error of a sum of k such terms in f32 is
        // added to it.
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

    pub(crate) fn free(self, heap: &SymmetricHeap) -> Result<(), Error> {
        let slices = [Some(self.a), Some(self.b), Some(self.c), self.bias, self.addend];
        slices.into_iter().flatten().try_for_each(|it| heap.free(it.slice))
    }
}
