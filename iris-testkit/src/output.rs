//! What programs print. Nobody may be listening (`| head`), and a disk may be full: then printing is
//! an error of the program, or nothing at all, but no panic.

use std::fmt::Arguments;
use std::io::{self, Write};

/// Stdout cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("stdout cannot be written: {0}")]
pub struct Unwritten(io::Error);

impl Unwritten {
    /// Whether whoever read it has gone: that is for nobody to be told.
    pub fn reader_gone(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// The exit code of a program whose reader has gone, as a shell has it of one that SIGPIPE ends.
pub const READER_GONE: u8 = 128 + 13;

/// A line on stdout: [`say!`](crate::say).
///
/// # Errors
/// If it cannot be written.
pub fn line(text: Arguments<'_>) -> Result<(), Unwritten> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(Unwritten)
}

/// A line on stderr, if it can be written: [`note!`](crate::note).
pub fn aside(text: Arguments<'_>) {
    // In one write, so that lines of several ranks do not mix.
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// As `println!`, with an [`Unwritten`](crate::output::Unwritten) in place of a panic.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => { $crate::output::line(::std::format_args!($($text)*)) };
}

/// As `eprintln!`, with silence in place of a panic.
#[macro_export]
macro_rules! note {
    ($($text:tt)*) => { $crate::output::aside(::std::format_args!($($text)*)) };
}
