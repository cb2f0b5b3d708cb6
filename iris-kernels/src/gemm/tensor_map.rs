//! Tensor maps: descriptions of matrices for the device's TMA copies. The driver encodes them on
//! the host, without access to the device.

#![allow(unsafe_code, reason = "a function of the driver, found by name")]

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use bytemuck::{Pod, Zeroable};
use iris_heap::{DType, Error, Result};
use libloading::Library;

use crate::args::Matrix;
use crate::dtype;

/// Encoded `CUtensorMap`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct TensorMap([u64; 16]);

/// Type of `cuTensorMapEncodeTiled`. Arguments: map, element type, number of dimensions, address,
/// sizes, strides, box, steps, interleave, swizzle, promotion, fill.
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

// Values of the driver's CUtensorMapSwizzle and CUtensorMapL2promotion.
const SWIZZLE_64B: c_int = 2;
const SWIZZLE_128B: c_int = 3;
const PROMOTION_256B: c_int = 3;

fn encode() -> Result<Encode> {
    static ENCODE: OnceLock<std::result::Result<Encode, String>> = OnceLock::new();
    let found = ENCODE.get_or_init(|| {
        // SAFETY: any program may load the driver's library; a heap on the device has already
        // loaded it.
        let library = unsafe { Library::new("libcuda.so.1") }.map_err(|e| e.to_string())?;
        // SAFETY: the type is that of the driver's header.
        let encode = *unsafe { library.get::<Encode>(b"cuTensorMapEncodeTiled\0") }
            .map_err(|e| e.to_string())?;
        // The library must stay loaded, because the function is called until the process ends.
        std::mem::forget(library);
        Ok(encode)
    });
    found.clone().map_err(|problem| Error::Unsupported {
        what: "tensor maps".into(),
        why: format!("the driver has no cuTensorMapEncodeTiled: {problem}"),
    })
}

/// All inputs of a tensor map. A map contains the address and layout of a matrix, not its elements,
/// so equal keys have equal maps.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key {
    kind: c_int,
    address: u64,
    sizes: [u64; 2],
    stride: u64,
    boxed: [u32; 2],
}

/// Cache of the maps that a thread made last, because consecutive calls use the same maps.
struct Known {
    maps: Vec<(Key, TensorMap)>,
    next: usize,
}

impl Known {
    /// Capacity. It exceeds the largest number of maps of one launch: 26, for a GEMM that stores to
    /// seven peers.
    const MOST: usize = 32;

    fn get(&self, key: &Key) -> Option<TensorMap> {
        self.maps.iter().find(|(known, _)| known == key).map(|&(_, map)| map)
    }

    fn put(&mut self, key: Key, map: TensorMap) {
        match self.maps.get_mut(self.next) {
            Some(oldest) => *oldest = (key, map),
            None => self.maps.push((key, map)),
        }
        self.next = (self.next + 1) % Self::MOST;
    }
}

thread_local! {
    static KNOWN: RefCell<Known> = const { RefCell::new(Known { maps: Vec::new(), next: 0 }) };
}

impl TensorMap {
    /// Map of a matrix of 16-bit elements. Each copy moves a box of `lines` lines with `len`
    /// elements; a line of the box has 128 or 64 bytes, the width of the swizzle. Elements beyond
    /// an edge of the matrix are read as 0. Stores stop at the edge only if the lines of the matrix
    /// are multiples of 16 bytes.
    pub(super) fn new(dtype: DType, matrix: &Matrix, [len, lines]: [u32; 2]) -> Result<TensorMap> {
        let sizes = match matrix.transposed {
            0 => [matrix.cols, matrix.rows],
            _ => [matrix.rows, matrix.cols],
        };
        // The stride of a single line is not used, but the driver requires a valid one.
        let ld = if sizes[1] > 1 { matrix.ld } else { u64::from(sizes[0]).next_multiple_of(8) };
        let kind = dtype::row(dtype).and_then(|row| row.tma);
        let kind = kind.ok_or_else(|| Error::Unsupported {
            what: format!("tensor maps of {dtype}"),
            why: format!("expected {}", dtype::names(dtype::types(|row| row.tma.is_some()))),
        })?;
        let (address, sizes) = (matrix.address, sizes.map(u64::from));
        let key = Key { kind, address, sizes, stride: ld * 2, boxed: [len, lines] };
        if let Some(known) = KNOWN.with_borrow(|known| known.get(&key)) {
            return Ok(known);
        }
        let map = Self::encoded(&key, matrix)?;
        KNOWN.with_borrow_mut(|known| known.put(key, map));
        Ok(map)
    }

    /// Lets the driver encode the map of `key`; `matrix` is for the error text.
    fn encoded(key: &Key, matrix: &Matrix) -> Result<TensorMap> {
        let &Key { kind, address, sizes, stride, boxed } = key;
        let ([len, lines], strides) = (boxed, [stride]);
        let swizzle = if len * 2 == 128 { SWIZZLE_128B } else { SWIZZLE_64B };
        let (at, steps) = (address as usize as *mut c_void, [1, 1]);
        let mut map = TensorMap([0; 16]);
        // SAFETY: the arrays have one size, box and step for each of the two dimensions, and one
        // stride; the map has the required alignment. The matrix is not accessed.
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
            name: "the driver refused the tensor map".into(),
        })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        bytemuck::bytes_of(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_maps_of_the_last_calls_are_known_and_no_others() {
        let mut known = Known { maps: Vec::new(), next: 0 };
        let key = |address| Key { kind: 9, address, sizes: [64, 8], stride: 128, boxed: [64, 8] };
        let map = |value| TensorMap([value; 16]);
        let value = |known: &Known, key| known.get(&key).map(|map| map.0[0]);
        for at in 0..40 {
            known.put(key(16 * at), map(at));
        }
        assert_eq!(known.maps.len(), Known::MOST);
        assert_eq!(value(&known, key(0)), None);
        assert_eq!(value(&known, key(16 * 7)), None);
        assert_eq!(value(&known, key(16 * 8)), Some(8));
        assert_eq!(value(&known, key(16 * 39)), Some(39));
        // Keys that differ in one field are not found.
        for other in [
            Key { kind: 6, ..key(640 - 16) },
            Key { sizes: [64, 9], ..key(640 - 16) },
            Key { stride: 256, ..key(640 - 16) },
            Key { boxed: [64, 4], ..key(640 - 16) },
        ] {
            assert_eq!(value(&known, other), None);
        }
    }
}
