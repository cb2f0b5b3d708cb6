//! Identity of a communicator, as bytes that a program passes from rank 0 to the other ranks.

use std::ffi::c_char;
use std::fmt;

use iris_heap::UniqueId;

use crate::error::{Error, Result};

/// Size of an [`Id`] in bytes, equal to the size of NCCL's id.
const BYTES: usize = 128;

/// First bytes of every [`Id`], which distinguish it from other data.
const MAGIC: &[u8; 8] = b"iris-id1";

/// Identity of a communicator. One rank makes the identity, and all ranks pass it to
/// [`Comm::from_rank`](crate::comm::Comm::from_rank).
///
/// It has the size and the methods of `cudarc::nccl::Id`, so that a program can pass it on in the
/// same way: by a file, a pipe or MPI.
///
/// ```
/// use iris_ops::comm::Id;
/// let id = Id::new()?;
/// let bytes: Vec<u8> = id.internal().iter().map(|&byte| byte as u8).collect(); // 128, for the other ranks
/// let same = Id::uninit(std::array::from_fn(|index| bytes[index] as std::ffi::c_char));
/// assert_eq!(same, id);
/// # iris_ops::OpResult::<()>::Ok(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Id {
    internal: [c_char; BYTES],
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.unique() {
            Ok(unique) => write!(f, "Id({unique})"),
            Err(_) => f.write_str("Id(not of iris)"),
        }
    }
}

impl Id {
    /// Makes a new identity from the system's random numbers.
    ///
    /// # Errors
    /// [`Error::Comm`] if the system has no random numbers.
    pub fn new() -> Result<Self> {
        let unique = UniqueId::new().map_err(Error::comm)?.to_string();
        let mut bytes = MAGIC.iter().chain(unique.as_bytes()).map(|&byte| byte as c_char);
        Ok(Self { internal: std::array::from_fn(|_| bytes.next().unwrap_or_default()) })
    }

    /// Makes an identity from the bytes that rank 0 has passed on, without a check.
    /// [`Comm::from_rank`](crate::comm::Comm::from_rank) refuses bytes that are not an identity.
    pub fn uninit(internal: [c_char; BYTES]) -> Self {
        Self { internal }
    }

    /// Bytes of the identity, to be passed to the other ranks.
    pub fn internal(&self) -> &[c_char; BYTES] {
        &self.internal
    }

    /// Identifier of the world that the ranks with this identity form; an error if the bytes are
    /// not an identity.
    pub(super) fn unique(&self) -> Result<UniqueId> {
        let bytes = self.internal.map(|byte| byte as u8);
        let digits = bytes.strip_prefix(MAGIC).and_then(|rest| rest.get(..32));
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        digits.and_then(|digits| digits.parse().ok()).ok_or_else(|| {
            Error::comm(iris_heap::Error::Invalid {
                what: "Id".into(),
                value: format!("{:02x?}...", &bytes[..MAGIC.len()]),
                expected: "the 128 bytes of iris_ops::comm::Id::new of another rank; an Id of NCCL is none".into(),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_its_bytes() {
        let (id, other) = (Id::new().unwrap(), Id::new().unwrap());
        assert_ne!(id, other);
        let same = Id::uninit(*id.internal());
        assert_eq!(same.unique().unwrap(), id.unique().unwrap());
        let error = Id::uninit([7; 128]).unique().unwrap_err().to_string();
        assert!(error.contains("[07, 07") && error.contains("NCCL"), "{error}");
    }
}
