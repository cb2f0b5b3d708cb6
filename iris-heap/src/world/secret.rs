//! Secret by which the ranks of a job authenticate each other when they meet over a network.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::util::open_regular;

/// Secret of 256 bits that only the ranks of one job share. With it the ranks authenticate each
/// other and encrypt their messages between hosts. Neither `Debug` nor `Display` shows the secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub(super) [u8; 32]);

impl Secret {
    /// Creates a secret from the system's random numbers.
    ///
    /// # Errors
    /// [`Error::System`] if the system provides no random numbers.
    pub fn new() -> Result<Secret> {
        let mut bytes = [0; 32];
        let read = File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut bytes));
        read.map_err(|e| Error::system("reading /dev/urandom", e))?;
        Ok(Secret(bytes))
    }

    /// Writes the secret to a new file with mode 0600: 64 hexadecimal digits.
    ///
    /// # Errors
    /// [`Error::System`] if the file exists already or cannot be created.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let text: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let written = file.and_then(|mut file| file.write_all(format!("{text}\n").as_bytes()));
        written.map_err(|e| Error::system(format!("writing {}", path.display()), e))
    }

    /// Reads a file that [`Secret::save`] wrote.
    ///
    /// # Errors
    /// [`Error::System`]; [`Error::Invalid`] for a file of another user, a file that others may
    /// read or write, or a file with other content.
    pub fn load(path: impl AsRef<Path>) -> Result<Secret> {
        let path = path.as_ref();
        let system = |e| Error::system(format!("reading {}", path.display()), e);
        let file = open_regular(path).map_err(system)?;
        let found = file.metadata().map_err(system)?;
        let what = |of: &str| format!("{of} of the secret file {}", path.display());
        let (mode, user) = (found.mode() & 0o7777, rustix::process::geteuid().as_raw());
        if mode & 0o077 != 0 {
            let expected = "600, readable by this user alone: chmod 600 it";
            return Err(Error::invalid(what("mode"), format!("{mode:o}"), expected));
        }
        if found.uid() != user {
            return Err(Error::invalid(what("owner"), found.uid(), format!("user {user}")));
        }
        let mut text = String::new();
        file.take(1024).read_to_string(&mut text).map_err(system)?;
        let expected = "64 hexadecimal digits, as `iris secret` writes them";
        text.trim().parse().map_err(|_| {
            Error::invalid(
                what("content"),
                format!("{} bytes of something else", text.len()),
                expected,
            )
        })
    }
}

impl FromStr for Secret {
    type Err = Error;

    fn from_str(text: &str) -> Result<Secret> {
        let mut bytes = [0; 32];
        let digits = text.len() == 64 && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        for (at, byte) in bytes.iter_mut().enumerate().filter(|_| digits) {
            *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap_or_default();
        }
        match digits {
            true => Ok(Secret(bytes)),
            // The error does not show the value, because it may be a mistyped secret.
            false => Err(Error::invalid("secret", "(not shown)", "64 hexadecimal digits")),
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{Network, UniqueId};

    #[test]
    fn a_secret_is_shown_nowhere_and_kept_from_others() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let secret = Secret::new().unwrap();
        secret.save(&path).unwrap();
        assert!(secret.save(&path).is_err(), "a second secret would lock ranks out");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(Secret::load(&path).unwrap() == secret);
        let text = fs::read_to_string(&path).unwrap();
        let network = Network::new("127.0.0.1:1", &UniqueId::new().unwrap()).secret(secret.clone());
        for shown in [format!("{secret:?} {secret}"), format!("{network:?}")] {
            assert!(!shown.contains(&text[..8]), "{shown}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let error = Secret::load(&path).unwrap_err().to_string();
        assert!(error.contains("640") && error.contains("600"), "{error}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let pipe = folder.path().join("pipe");
        let owner = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, owner, 0).unwrap();
        let error = Secret::load(&pipe).unwrap_err().to_string();
        assert!(error.contains("no regular file"), "{error}");
        fs::write(&path, &text[..63]).unwrap();
        let error = Secret::load(&path).unwrap_err().to_string();
        assert!(error.contains("64 hexadecimal") && !error.contains(&text[..8]), "{error}");
    }
}
