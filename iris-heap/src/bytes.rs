//! Type [`Bytes`]: a size in bytes, printed and parsed with a unit such as MiB.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul};
use std::str::FromStr;

use crate::dtype::Element;
use crate::error::Error;
use crate::layout::{ALIGNMENT, rounded};

/// Size in bytes. Arithmetic saturates, so an overflow gives the largest size instead of wrapping
/// to a small one.
///
/// ```
/// use iris_heap::Bytes;
/// let size = Bytes::mib(64) + Bytes::of::<f32>(1024) * 2;
/// assert_eq!(size.get(), (64 << 20) + 8192);
/// assert_eq!(Bytes::gib(2).to_string(), "2 GiB");
/// assert_eq!("1.5 GiB".parse::<Bytes>()?, Bytes::mib(1536));
/// # Ok::<(), iris_heap::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Bytes(u64);

/// Names of the units and their sizes in bytes, the largest unit first.
const UNITS: [(&str, u64); 4] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl Bytes {
    /// Size of 0 bytes.
    pub const ZERO: Bytes = Bytes(0);

    /// Makes a size of `bytes` bytes.
    pub const fn new(bytes: u64) -> Bytes {
        Bytes(bytes)
    }

    /// Makes a size of `kib` KiB, 1024 bytes each.
    pub const fn kib(kib: u64) -> Bytes {
        Bytes(kib.saturating_mul(1 << 10))
    }

    /// Makes a size of `mib` MiB, 1024 KiB each.
    pub const fn mib(mib: u64) -> Bytes {
        Bytes(mib.saturating_mul(1 << 20))
    }

    /// Makes a size of `gib` GiB, 1024 MiB each.
    pub const fn gib(gib: u64) -> Bytes {
        Bytes(gib.saturating_mul(1 << 30))
    }

    /// Size of `len` elements of type `T`.
    pub const fn of<T: Element>(len: usize) -> Bytes {
        Bytes((len as u64).saturating_mul(size_of::<T>() as u64))
    }

    /// Returns the size as a number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Size that an allocation of this size takes from a heap: rounded up to a multiple of
    /// [`ALIGNMENT`].
    pub fn allocated(self) -> Bytes {
        Bytes(rounded(self.0, ALIGNMENT))
    }
}

impl Add for Bytes {
    type Output = Bytes;

    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Bytes) {
        *self = *self + other;
    }
}

impl Mul<u64> for Bytes {
    type Output = Bytes;

    fn mul(self, times: u64) -> Bytes {
        Bytes(self.0.saturating_mul(times))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(sizes: I) -> Bytes {
        sizes.fold(Bytes::ZERO, Bytes::add)
    }
}

impl fmt::Display for Bytes {
    /// Writes `2 GiB`, `1.5 MiB` or `17 bytes`; a fraction is rounded to one digit.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.into_iter().find(|&(_, unit)| self.0 >= unit) {
            None if self.0 == 1 => f.write_str("1 byte"),
            None => write!(f, "{} bytes", self.0),
            Some((name, unit)) if self.0.is_multiple_of(unit) => {
                write!(f, "{} {name}", self.0 / unit)
            }
            Some((name, unit)) => write!(f, "{:.1} {name}", self.0 as f64 / unit as f64),
        }
    }
}

impl FromStr for Bytes {
    type Err = Error;

    /// Reads a number with a unit: `64MiB`, `1.5 GiB`, `4096 bytes`; a number without a unit is an
    /// error.
    fn from_str(text: &str) -> Result<Bytes, Error> {
        let wrong =
            || Error::invalid("size", text, "a number with a unit: bytes, KiB, MiB, GiB or TiB");
        let text = text.trim();
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
        let (number, unit) = (&text[..end], text[end..].trim());
        let known = UNITS.into_iter().find(|(name, _)| name.eq_ignore_ascii_case(unit));
        let unit = match known {
            Some((_, unit)) => unit,
            None if ["byte", "bytes"].contains(&unit) => 1,
            None => return Err(wrong()),
        };
        if let Ok(number) = number.parse::<u64>() {
            return number.checked_mul(unit).map(Bytes).ok_or_else(wrong);
        }
        let bytes = number.parse::<f64>().map_err(|_| wrong())? * unit as f64;
        if bytes < u64::MAX as f64 { Ok(Bytes(bytes as u64)) } else { Err(wrong()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_they_are_shown() {
        for size in [0, 1, 17, 1 << 10, 3 << 20, 5 << 30, 7 << 40] {
            let size = Bytes::new(size);
            assert_eq!(size.to_string().parse::<Bytes>().ok(), Some(size), "{size}");
        }
        assert_eq!(Bytes::new(1536).to_string(), "1.5 KiB");
        for text in ["", "5", "MiB", "5 MB", "-1 KiB", "1.2.3 KiB", "99999999 TiB"] {
            let error = text.parse::<Bytes>().unwrap_err().to_string();
            assert!(error.contains("with a unit"), "{error}");
        }
    }

    #[test]
    fn sizes_saturate() {
        let most = Bytes::new(u64::MAX);
        assert_eq!((most + Bytes::kib(1), Bytes::gib(u64::MAX), most * 2), (most, most, most));
        assert_eq!([most, Bytes::kib(1)].into_iter().sum::<Bytes>(), most);
        assert_eq!(Bytes::of::<f32>(3).allocated(), Bytes::kib(1));
    }
}
