//! Element types of kernels and libraries: one [`Row`] for each type.
//!
//! No other file of the workspace decides by type or by size of an element, except
//! `iris_heap::DType` (names and sizes) and `kernels/iris/dtype.h` (the same rows for devices).
//! A type without a [`Role`] is refused wherever it would have to play that role.

use std::ffi::c_int;

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
#[doc(hidden)]
pub use half::{bf16, f16};
use iris_heap::DType;

/// Purpose for which operators take a type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Elements of A and B of a product.
    Factor,
    /// Elements of C, bias and residual, and of what an RMSNorm reads and writes.
    Result,
    /// Elements of messages, and of partial sums that travel between ranks.
    Wire,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 3] = [Role::Factor, Role::Result, Role::Wire];

    /// Types with this role.
    pub fn types(self) -> impl Iterator<Item = DType> {
        types(move |row| row.has(self))
    }

    /// Names of the types with this role, for error texts: `f32, f16 or bf16`.
    pub fn names(self) -> String {
        names(self.types())
    }
}

/// Rounding of a floating-point type.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rounding {
    /// Unit roundoff: largest relative error of one rounding, half the distance from 1 to the next
    /// value.
    pub unit: f64,
    /// Largest absolute error of one rounding near zero: half the smallest positive value.
    pub underflow: f64,
}

/// Conversions between elements and f32. Elements are given as the bytes that they have in memory,
/// and a single element as its bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Values {
    /// Converts elements, which are aligned, to f32.
    pub(crate) widen: fn(&[u8], &mut [f32]),
    /// Rounds values to elements, which are aligned.
    pub(crate) narrow: fn(&[f32], &mut [u8]),
    /// Rounds values in place.
    pub(crate) round: fn(&mut [f32]),
    /// Bits of an element in memory.
    pub(crate) load: fn(&[u8]) -> u32,
    /// Stores the bits of an element.
    pub(crate) store: fn(u32, &mut [u8]),
    /// Value of an element.
    pub(crate) to_f32: fn(u32) -> f32,
    /// Rounds a value to an element.
    pub(crate) from_f32: fn(f32) -> u32,
}

/// Properties of an element type.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The type; its name and size are in [`DType`].
    pub dtype: DType,
    /// Roles that the type may play. An operator refuses a type without the role that it asks for.
    pub roles: &'static [Role],
    /// Code of the type in kernels, which is the place of its row in [`ROWS`]; `None` if kernels do
    /// not have the type.
    pub code: Option<u32>,
    /// Name of the type in tensor-core instructions (wgmma, mma.sync); `None` if it has none and is
    /// multiplied by multiply-add.
    pub mma: Option<&'static str>,
    /// Code of the type in tensor maps of CUDA (`CUtensorMapDataType`).
    pub tma: Option<c_int>,
    /// Code of the type in GEMM libraries: `cudaDataType` of cuBLASLt, which has the same number as
    /// `hipDataType` of hipBLASLt from ROCm 6 on.
    pub blas: Option<c_int>,
    /// Code of the type in collectives (`ncclDataType_t` of NCCL and RCCL).
    pub nccl: Option<c_int>,
    /// Rounding, by which results are judged.
    pub rounding: Option<Rounding>,
    pub(crate) values: Option<Values>,
}

/// Rows of all types, those with a code first. `IRIS_DTYPES` in `kernels/iris/dtype.h` has the same
/// rows for the types with a code.
pub static ROWS: &[Row] = &[
    Row {
        dtype: DType::F32,
        roles: &Role::ALL,
        code: Some(SUM),
        mma: None,
        tma: Some(7),
        blas: Some(0),
        nccl: Some(7),
        rounding: Some(Rounding {
            unit: f32::EPSILON as f64 / 2.0,
            underflow: f32::from_bits(1) as f64 / 2.0,
        }),
        values: Some(Values::of::<f32>()),
    },
    Row {
        dtype: DType::F16,
        roles: &Role::ALL,
        code: Some(1),
        mma: Some("f16"),
        tma: Some(6),
        blas: Some(2),
        nccl: Some(6),
        rounding: Some(Rounding {
            unit: f16::EPSILON.to_f64_const() / 2.0,
            underflow: f16::MIN_POSITIVE_SUBNORMAL.to_f64_const() / 2.0,
        }),
        values: Some(Values::of::<f16>()),
    },
    Row {
        dtype: DType::BF16,
        roles: &Role::ALL,
        code: Some(2),
        mma: Some("bf16"),
        tma: Some(9),
        blas: Some(14),
        nccl: Some(9),
        rounding: Some(Rounding {
            unit: bf16::EPSILON.to_f64_const() / 2.0,
            underflow: bf16::MIN_POSITIVE_SUBNORMAL.to_f64_const() / 2.0,
        }),
        values: Some(Values::of::<bf16>()),
    },
    #[cfg(feature = "test-dtype")]
    Row { code: Some(3), ..Row::without_roles(DType::F8E4M3) },
    Row { nccl: Some(2), ..Row::without_roles(DType::I32) },
];

/// Code of f32, the type in which kernels add and multiply.
pub(crate) const SUM: u32 = 0;

/// Properties of an element type, from [`ROWS`]; `None` if neither kernels nor libraries have the
/// type.
pub fn row(dtype: DType) -> Option<&'static Row> {
    ROWS.iter().find(|row| row.dtype == dtype)
}

/// Types whose rows fulfil a condition, in the order of [`ROWS`].
pub(crate) fn types(of: impl Fn(&Row) -> bool) -> impl Iterator<Item = DType> {
    ROWS.iter().filter(move |row| of(row)).map(|row| row.dtype)
}

/// Names of types, for error texts: `f32, f16 or bf16`.
pub(crate) fn names(types: impl Iterator<Item = DType>) -> String {
    let names: Vec<_> = types.map(DType::name).collect();
    match names.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => names.concat(),
    }
}

/// Whether tensor cores (wgmma, mma.sync) multiply elements of the type.
pub fn has_mma(dtype: DType) -> bool {
    row(dtype).is_some_and(|row| row.mma.is_some())
}

/// Code of the type in GEMM libraries; `None` if iris does not use the type with them.
pub fn blas(dtype: DType) -> Option<c_int> {
    row(dtype)?.blas
}

/// Whether the type has a role.
pub fn has_role(dtype: DType, role: Role) -> bool {
    row(dtype).is_some_and(|row| row.has(role))
}

/// Code of an element type in kernels; `None` if kernels do not have the type.
pub fn dtype_code(dtype: DType) -> Option<u32> {
    row(dtype)?.code
}

/// Size in bytes of an element of the type with code `code`.
pub(crate) fn element_bytes(code: u32) -> usize {
    Row::of(code).dtype.size()
}

/// Conversions of the type with code `code`.
///
/// # Panics
/// If kernels do not compute with the type.
pub(crate) fn values(code: u32) -> &'static Values {
    let row = Row::of(code);
    let values = row.values.as_ref();
    values.unwrap_or_else(|| panic!("kernels do not compute with {}", row.dtype))
}

impl Row {
    /// Row of the type with code `code`.
    pub(crate) fn of(code: u32) -> &'static Row {
        &ROWS[code as usize]
    }

    const fn without_roles(dtype: DType) -> Row {
        Row {
            dtype,
            roles: &[],
            code: None,
            mma: None,
            tma: None,
            blas: None,
            nccl: None,
            rounding: None,
            values: None,
        }
    }

    fn has(&self, role: Role) -> bool {
        self.roles.contains(&role)
    }
}

/// Type whose elements kernels convert to and from f32.
trait Value: Pod {
    fn widen(elements: &[Self], values: &mut [f32]);
    fn narrow(values: &[f32], elements: &mut [Self]);
    fn to_f32(self) -> f32;
    fn from_f32(value: f32) -> Self;
    fn to_bits(self) -> u32;
    fn from_bits(bits: u32) -> Self;
}

impl Value for f32 {
    fn widen(elements: &[f32], values: &mut [f32]) {
        values.copy_from_slice(elements);
    }
    fn narrow(values: &[f32], elements: &mut [f32]) {
        elements.copy_from_slice(values);
    }
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(value: f32) -> f32 {
        value
    }
    fn to_bits(self) -> u32 {
        f32::to_bits(self)
    }
    fn from_bits(bits: u32) -> f32 {
        f32::from_bits(bits)
    }
}

macro_rules! half {
    ($($type:ident),*) => {$(
        impl Value for $type {
            fn widen(elements: &[$type], values: &mut [f32]) {
                elements.convert_to_f32_slice(values);
            }
            fn narrow(values: &[f32], elements: &mut [$type]) {
                elements.convert_from_f32_slice(values);
            }
            fn to_f32(self) -> f32 {
                $type::to_f32(self)
            }
            fn from_f32(value: f32) -> $type {
                $type::from_f32(value)
            }
            fn to_bits(self) -> u32 {
                $type::to_bits(self).into()
            }
            fn from_bits(bits: u32) -> $type {
                $type::from_bits(bits as u16)
            }
        }
    )*};
}
half!(f16, bf16);

impl Values {
    const fn of<T: Value>() -> Values {
        Values {
            widen: |bytes, values| T::widen(bytemuck::cast_slice(bytes), values),
            narrow: |values, bytes| T::narrow(values, bytemuck::cast_slice_mut(bytes)),
            round: |values| values.iter_mut().for_each(|it| *it = T::to_f32(T::from_f32(*it))),
            load: |bytes| bytemuck::pod_read_unaligned::<T>(bytes).to_bits(),
            store: |bits, bytes| bytes.copy_from_slice(bytemuck::bytes_of(&T::from_bits(bits))),
            to_f32: |bits| T::from_bits(bits).to_f32(),
            from_f32: |value| T::from_f32(value).to_bits(),
        }
    }
}

/// Evaluates `$call` with `$type` as the Rust type of the elements of `$dtype`; `$otherwise` if
/// kernels do not compute with the type.
#[macro_export]
macro_rules! with_type {
    ($dtype:expr, $type:ident => $call:expr, $otherwise:expr) => {
        match $dtype {
            iris_heap::DType::F32 => {
                type $type = f32;
                $call
            }
            iris_heap::DType::F16 => {
                type $type = $crate::dtype::f16;
                $call
            }
            iris_heap::DType::BF16 => {
                type $type = $crate::dtype::bf16;
                $call
            }
            _ => $otherwise,
        }
    };
}

/// Calls the macro `$call` with the Rust types of elements that have [`Role::Wire`].
#[macro_export]
macro_rules! wire_types {
    ($call:ident) => {
        $call! { f32, $crate::dtype::f16, $crate::dtype::bf16 }
    };
}

#[cfg(test)]
mod tests {
    use iris_heap::Element;

    use super::*;

    #[test]
    fn rust_types_of_messages_are_those_with_the_role() {
        macro_rules! dtypes {
            ($($type:ty),*) => { [$(<$type>::DTYPE),*] };
        }
        let listed = wire_types!(dtypes);
        assert!(listed.into_iter().eq(Role::Wire.types()));
    }
}
