//! Output of programs without panics: if the output cannot be written, because its reader is gone
//! (`| head`) or a disk is full, [`say!`](crate::say) returns an error, and [`note!`](crate::note)
//! does nothing.

use std::fmt::Arguments;
use std::io::{self, Write};

/// Error that [`say!`](crate::say) returns if stdout cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("stdout cannot be written: {0}")]
pub struct Unwritten(io::Error);

impl Unwritten {
    /// Whether writing failed because the reader of stdout is gone; then there is nobody to report
    /// the error to.
    pub fn reader_gone(&self) -> bool {
        self.0.kind() == io::ErrorKind::BrokenPipe
    }
}

/// Exit code of a program whose reader of stdout is gone: the code that a shell reports for a
/// process that SIGPIPE ended.
pub const READER_GONE: u8 = 128 + 13;

/// Prints a line to stdout; used by [`say!`](crate::say).
///
/// # Errors
/// If stdout cannot be written.
pub fn line(text: Arguments<'_>) -> Result<(), Unwritten> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{text}").and_then(|()| stdout.flush()).map_err(Unwritten)
}

/// Prints a line to stderr and ignores errors; the macro [`note!`](crate::note) calls it.
pub fn aside(text: Arguments<'_>) {
    // Each line is one write, so that lines of several ranks do not mix.
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Prints like `println!`, but returns [`Unwritten`](crate::output::Unwritten) instead of
/// panicking.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => { $crate::output::line(::std::format_args!($($text)*)) };
}

/// Prints like `eprintln!`, but ignores errors instead of panicking.
#[macro_export]
macro_rules! note {
    ($($text:tt)*) => { $crate::output::aside(::std::format_args!($($text)*)) };
}
