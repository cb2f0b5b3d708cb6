//! Ids of worlds, [`UniqueId`], for programs with their own launcher, which passes the id to the
//! ranks.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::str::FromStr;

use crate::error::{Error, Result};

/// Random 128-bit number that the processes of one world share, and no other processes have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UniqueId(u128);

impl UniqueId {
    /// Makes a new id from the system's random numbers.
    ///
    /// # Errors
    /// [`Error::System`] if random numbers are unavailable.
    pub fn new() -> Result<UniqueId> {
        let mut bytes = [0; 16];
        File::open("/dev/urandom")
            .and_then(|mut f| f.read_exact(&mut bytes))
            .map_err(|e| Error::system("reading /dev/urandom", e))?;
        Ok(UniqueId(u128::from_le_bytes(bytes)))
    }
}

impl fmt::Display for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl FromStr for UniqueId {
    type Err = Error;

    fn from_str(text: &str) -> Result<UniqueId> {
        let number = u128::from_str_radix(text, 16).ok().filter(|_| text.len() == 32);
        number
            .map(UniqueId)
            .ok_or_else(|| Error::invalid("unique id", text, "32 hexadecimal digits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_texts() {
        let id = UniqueId::new().unwrap();
        assert_eq!(id.to_string().parse::<UniqueId>().unwrap(), id);
        assert_ne!(id, UniqueId::new().unwrap());
        for wrong in ["", "12", "zz345678901234567890123456789012"] {
            assert!(wrong.parse::<UniqueId>().is_err());
        }
    }
}
