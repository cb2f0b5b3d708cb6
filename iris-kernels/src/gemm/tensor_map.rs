//! Tensor maps: how a matrix lies, as the device's copies want it said. The driver encodes them; nothing
//! of the device is asked.

#![allow(unsafe_code, reason = "a function of the driver, found by name")]

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use bytemuck::{Pod, Zeroable};
use iris_heap::{DType, Error, Result};
use libloading::Library;

use crate::args::Matrix;

/// A `CUtensorMap`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct TensorMap([u64; 16]);

/// `cuTensorMapEncodeTiled`: map, type, dimensions, address, sizes, strides, box, steps, interleave,
/// swizzle, promotion, fill.
type Encode = unsafe extern "C" fn(
    *mut TensorMap,
    c_int,
    u32,
    *mut c_void,
    *const u64,
    *const u64,
    *const u32,
    *const u32,
    c_int,
    c_int,
    c_int,
    c_int,
) -> u32;

const FLOAT16: c_int = 6;
const BFLOAT16: c_int = 9;
const SWIZZLE_64B: c_int = 2;
const SWIZZLE_128B: c_int = 3;
const PROMOTION_256B: c_int = 3;

fn encode() -> Result<Encode> {
    static ENCODE: OnceLock<std::result::Result<Encode, String>> = OnceLock::new();
    let found = ENCODE.get_or_init(|| {
        // SAFETY: the driver's library is made to be loaded by any program; a heap on the device has
        // it loaded already.
        let library = unsafe { Library::new("libcuda.so.1") }.map_err(|e| e.to_string())?;
        // SAFETY: the type is that of the driver's header.
        let encode = *unsafe { library.get::<Encode>(b"cuTensorMapEncodeTiled\0") }
            .map_err(|e| e.to_string())?;
        // The function is used until the process ends.
        std::mem::forget(library);
        Ok(encode)
    });
    found.clone().map_err(|problem| Error::Unsupported {
        what: "tensor maps".into(),
        why: format!("the driver has no cuTensorMapEncodeTiled: {problem}"),
    })
}

impl TensorMap {
    /// Of a matrix of 16-bit elements, in boxes of so many elements of a line and so many lines, of 128
    /// or 64 bytes, swizzled. What is beyond an edge is read as 0. Stores end at the edge only where lines
    /// are whole multiples of 16 bytes.
    pub(super) fn new(dtype: DType, matrix: &Matrix, [len, lines]: [u32; 2]) -> Result<TensorMap> {
        let sizes = match matrix.transposed {
            0 => [matrix.cols, matrix.rows],
            _ => [matrix.rows, matrix.cols],
        };
        // Of a single line it is not looked at, but has to be right.
        let ld = if sizes[1] > 1 { matrix.ld } else { u64::from(sizes[0]).next_multiple_of(8) };
        let (sizes, strides) = (sizes.map(u64::from), [ld * 2]);
        let kind = if dtype == DType::F16 { FLOAT16 } else { BFLOAT16 };
        let swizzle = if len * 2 == 128 { SWIZZLE_128B } else { SWIZZLE_64B };
        let (at, boxed, steps) = (matrix.address as usize as *mut c_void, [len, lines], [1, 1]);
        let mut map = TensorMap([0; 16]);
        // SAFETY: two dimensions, with a size, a box and a step of each and one stride; the map is
        // aligned as it must be. The matrix is not accessed.
        let code = unsafe {
            encode()?(
                &mut map,
                kind,
                2,
                at,
                sizes.as_ptr(),
                strides.as_ptr(),
                boxed.as_ptr(),
                steps.as_ptr(),
                0,
                swizzle,
                PROMOTION_256B,
                0,
            )
        };
        if code == 0 {
            return Ok(map);
        }
        Err(Error::Device {
            api: format!("cuTensorMapEncodeTiled of {matrix:?} in boxes of {len} x {lines}"),
            code,
            name: "the driver does not take it".into(),
        })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        bytemuck::bytes_of(&self.0)
    }
}
