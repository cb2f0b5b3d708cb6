//! Odd environments: a rank in whose environment one variable is missing, doubled, not a number, or
//! huge.

use std::ffi::{CString, OsString};
use std::fmt;
use std::os::unix::ffi::OsStringExt;
use std::str::FromStr;

use anyhow::{Context, Error, Result};

/// Variables of launchers, of this library, and of the system that a rank may read.
pub(super) const VARIABLES: [&str; 20] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "PMI_RANK",
    "OMPI_COMM_WORLD_RANK",
    "TORCHELASTIC_RUN_ID",
    "IRIS_RENDEZVOUS",
    "IRIS_DEADLINE",
    "IRIS_PORT",
    "IRIS_SECRET_FILE",
    "IRIS_NODE",
    "IRIS_THREADS",
    "IRIS_NETWORK_GBIT",
    "IRIS_TUNING",
    "TMPDIR",
    "HOME",
];

/// Change of one variable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Oddity {
    Missing,
    Empty,
    Text,
    Negative,
    /// Number that no type holds.
    Large,
    /// Text of 100,000 bytes.
    Long,
    /// The variable stands twice in the environment, first with another value.
    Doubled,
    /// Bytes that are no UTF-8.
    Bytes,
    /// Number 1, which another rank may have.
    One,
}

impl Oddity {
    pub(super) const ALL: [Oddity; 9] = [
        Oddity::Missing,
        Oddity::Empty,
        Oddity::Text,
        Oddity::Negative,
        Oddity::Large,
        Oddity::Long,
        Oddity::Doubled,
        Oddity::Bytes,
        Oddity::One,
    ];

    fn value(self) -> Option<Vec<u8>> {
        Some(match self {
            Oddity::Missing => return None,
            Oddity::Empty => Vec::new(),
            Oddity::Text => b"abc".to_vec(),
            Oddity::Negative => b"-1".to_vec(),
            Oddity::Large => b"99999999999999999999999".to_vec(),
            Oddity::Long => vec![b'x'; 100_000],
            Oddity::Doubled | Oddity::One => b"1".to_vec(),
            Oddity::Bytes => vec![b'/', 0xff, 0xfe],
        })
    }
}

/// Variable of the victim that is changed, and how.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Odd {
    pub(super) variable: String,
    pub(super) oddity: Oddity,
}

impl fmt::Display for Odd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{:?}", self.variable, self.oddity)
    }
}

impl FromStr for Odd {
    type Err = Error;

    fn from_str(text: &str) -> Result<Odd> {
        let (variable, oddity) = text.split_once(':').context("expected VARIABLE:ODDITY")?;
        let found = Oddity::ALL.into_iter().find(|it| format!("{it:?}") == oddity);
        let oddity = found.with_context(|| format!("{text}: expected one of {:?}", Oddity::ALL))?;
        Ok(Odd { variable: variable.into(), oddity })
    }
}

#[allow(unsafe_code, reason = "Command cannot start a program with a variable twice")]
fn execute(arguments: &[CString], environment: &[CString]) -> std::io::Error {
    let ended = |texts: &[CString]| {
        texts.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect::<Vec<_>>()
    };
    let (arguments, environment) = (ended(arguments), ended(environment));
    // SAFETY: both lists end with a null pointer, and they and their texts live until the call
    // returns, if it does.
    unsafe { libc::execve(c"/proc/self/exe".as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
    std::io::Error::last_os_error()
}

impl Odd {
    /// Starts this program anew in the odd environment, with `more` after its arguments.
    pub(super) fn execute(&self, more: &[String]) -> Result<()> {
        let text = |text: OsString| CString::new(text.into_vec());
        let arguments = std::env::args_os().chain(more.iter().map(OsString::from)).map(text);
        let arguments = arguments.collect::<Result<Vec<_>, _>>()?;
        let mut environment = Vec::new();
        if let Some(value) = self.oddity.value() {
            environment.push([self.variable.as_bytes(), b"=", &value].concat());
        }
        for (name, value) in std::env::vars_os() {
            if self.oddity == Oddity::Doubled || name != *self.variable {
                environment.push([&name.into_vec()[..], b"=", &value.into_vec()].concat());
            }
        }
        let environment: Result<Vec<_>, _> = environment.into_iter().map(CString::new).collect();
        Err(execute(&arguments, &environment?)).context("execve")
    }
}
