//! Tensor maps: how a matrix lies, as the device's copies want it said. The driver encodes them; nothing
//! of the device is asked.

#![allow(unsafe_code, reason = "a function of the driver, found by name")]

use std::cell::RefCell;
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

/// What a map is made of, all of it: it says how a matrix lies, and nothing of what is there.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key {
    kind: c_int,
    address: u64,
    sizes: [u64; 2],
    stride: u64,
    boxed: [u32; 2],
}

/// The maps that a thread has made last: call after call has the same.
struct Known {
    maps: Vec<(Key, TensorMap)>,
    next: usize,
}

impl Known {
    /// More than a launch has: that of eight ranks which stores to others has 26.
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
        let kind = if dtype == DType::F16 { FLOAT16 } else { BFLOAT16 };
        let (address, sizes) = (matrix.address, sizes.map(u64::from));
        let key = Key { kind, address, sizes, stride: ld * 2, boxed: [len, lines] };
        if let Some(known) = KNOWN.with_borrow(|known| known.get(&key)) {
            return Ok(known);
        }
        let map = Self::encoded(&key, matrix)?;
        KNOWN.with_borrow_mut(|known| known.put(key, map));
        Ok(map)
    }

    /// As the driver encodes it.
    fn encoded(key: &Key, matrix: &Matrix) -> Result<TensorMap> {
        let &Key { kind, address, sizes, stride, boxed } = key;
        let ([len, lines], strides) = (boxed, [stride]);
        let swizzle = if len * 2 == 128 { SWIZZLE_128B } else { SWIZZLE_64B };
        let (at, steps) = (address as usize as *mut c_void, [1, 1]);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_maps_of_the_last_calls_are_known_and_no_others() {
        let mut known = Known { maps: Vec::new(), next: 0 };
        let key =
            |address| Key { kind: BFLOAT16, address, sizes: [64, 8], stride: 128, boxed: [64, 8] };
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
        // Whatever differs, it is another.
        for other in [
            Key { kind: FLOAT16, ..key(640 - 16) },
            Key { sizes: [64, 9], ..key(640 - 16) },
            Key { stride: 256, ..key(640 - 16) },
            Key { boxed: [64, 4], ..key(640 - 16) },
        ] {
            assert_eq!(value(&known, other), None);
        }
    }
}
