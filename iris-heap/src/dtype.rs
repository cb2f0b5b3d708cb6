//! Element types: [`DType`] at run time, [`Element`] at compile time.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Defines [`DType`] from a row for each type: documentation, variant, name, size in bytes, and
/// kind. A row that ends with `if` exists only under that condition.
macro_rules! dtypes {
    ($($(#[$meta:meta])* $variant:ident, $name:literal, $size:literal, $kind:ident
       $(, if $cfg:meta)?;)*) => {
        /// Type of one element of a matrix or message.
        ///
        /// The names `f8e4m3` and `f8e5m2` are reserved for 8-bit floats, which no operator takes
        /// yet; the enum is non-exhaustive so that these types can be added.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(rename_all = "lowercase")]
        #[non_exhaustive]
        pub enum DType {
            $($(#[$meta])* $(#[cfg($cfg)])? $variant,)*
        }

        impl DType {
            /// All element types, in the order of the enum.
            pub const ALL: [DType; [$($(#[cfg($cfg)])? $name),*].len()] =
                [$($(#[cfg($cfg)])? DType::$variant),*];

            /// Size of one element in bytes.
            pub const fn size(self) -> usize {
                match self {
                    $($(#[cfg($cfg)])? DType::$variant => $size,)*
                }
            }

            /// Name of the type, such as `bf16`, as [`FromStr`] parses it.
            pub const fn name(self) -> &'static str {
                match self {
                    $($(#[cfg($cfg)])? DType::$variant => $name,)*
                }
            }

            const fn kind(self) -> Kind {
                match self {
                    $($(#[cfg($cfg)])? DType::$variant => Kind::$kind,)*
                }
            }
        }
    };
}

/// Kind of the values of an element type.
enum Kind {
    Float,
    Signed,
    Unsigned,
}

dtypes! {
    /// IEEE single precision, 4 bytes.
    F32, "f32", 4, Float;
    /// IEEE half precision, 2 bytes.
    F16, "f16", 2, Float;
    /// Type bfloat16: 2 bytes.
    BF16, "bf16", 2, Float;
    /// IEEE double precision, 8 bytes.
    F64, "f64", 8, Float;
    /// Signed integer of 1 byte.
    I8, "i8", 1, Signed;
    /// Signed integer of 4 bytes.
    I32, "i32", 4, Signed;
    /// Signed integer of 8 bytes.
    I64, "i64", 8, Signed;
    /// Unsigned integer of 1 byte.
    U8, "u8", 1, Unsigned;
    /// Unsigned integer of 4 bytes.
    U32, "u32", 4, Unsigned;
    /// Unsigned integer of 8 bytes.
    U64, "u64", 8, Unsigned;
    /// 8-bit float with 4 bits of exponent, for tests that no operator takes it.
    F8E4M3, "f8e4m3", 1, Float, if feature = "test-dtype";
}

impl DType {
    /// Whether the type is a floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self.kind(), Kind::Float)
    }

    /// Whether the type has negative values: floats and signed integers.
    pub const fn is_signed(self) -> bool {
        !matches!(self.kind(), Kind::Unsigned)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    fn from_str(text: &str) -> Result<DType> {
        DType::ALL.into_iter().find(|d| d.name() == text).ok_or_else(|| Error::Invalid {
            what: "element type".into(),
            value: text.into(),
            expected: DType::ALL.map(DType::name).join(", "),
        })
    }
}

/// Rust type whose values can be stored in symmetric memory.
pub trait Element: bytemuck::Pod + Send + Sync + 'static {
    /// The [`DType`] of this Rust type.
    const DTYPE: DType;

    /// Converts from f64, rounding as a Rust cast or the type's own conversion does.
    fn from_f64(value: f64) -> Self;

    /// Converts to f64; exact for all types except the 64-bit integers.
    fn to_f64(self) -> f64;
}

macro_rules! number {
    ($($type:ty => $dtype:ident),*) => {$(
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
            fn from_f64(value: f64) -> Self { value as $type }
            fn to_f64(self) -> f64 { self as f64 }
        }
    )*};
}
number!(f32 => F32, f64 => F64, i8 => I8, i32 => I32, i64 => I64, u8 => U8, u32 => U32, u64 => U64);

impl Element for f16 {
    const DTYPE: DType = DType::F16;
    fn from_f64(value: f64) -> Self {
        f16::from_f64(value)
    }
    fn to_f64(self) -> f64 {
        f16::to_f64(self)
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
    fn from_f64(value: f64) -> Self {
        bf16::from_f64(value)
    }
    fn to_f64(self) -> f64 {
        bf16::to_f64(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes() {
        for d in DType::ALL {
            assert_eq!(d.name().parse::<DType>().unwrap(), d);
        }
        assert_eq!(size_of::<bf16>(), DType::BF16.size());
        assert_eq!(size_of::<f64>(), DType::F64.size());
        let e = "fp32".parse::<DType>().unwrap_err().to_string();
        assert!(e.contains("fp32") && e.contains("bf16"), "{e}");
    }

    #[test]
    fn half_types_round_to_nearest_even() {
        assert_eq!(bf16::from_f64(1.0 + 1.0 / 256.0).to_f64(), 1.0);
        assert_eq!(f16::from_f64(1.0 + 3.0 / 2048.0).to_f64(), 1.0 + 2.0 / 1024.0);
    }
}
