//! Errors that the user of the command line can correct, and exit codes.

use std::fmt::Display;

use anyhow::Error;
use iris_heap::ErrorKind;
use iris_testkit::output::{READER_GONE, Unwritten};

/// Error of an argument or a file that the user can correct.
#[derive(Debug, thiserror::Error)]
#[error("{what} is {value}: expected {expected}")]
struct Usage {
    what: String,
    value: String,
    expected: String,
}

/// Failure of rank processes, which have printed the reason themselves; holds the exit code.
#[derive(Debug, thiserror::Error)]
#[error("the job failed, see above")]
pub(crate) struct Ranks(pub(crate) i32);

/// Makes an error for an invalid value: name of the option or file, the value, and the expected
/// values.
pub(crate) fn usage(what: impl Display, value: impl Display, expected: impl Display) -> Error {
    let (what, value, expected) = (what.to_string(), value.to_string(), expected.to_string());
    Usage { what, value, expected }.into()
}

/// Refuses the first of `options` (name and value) that has a value, because `reader` does not read
/// any of them.
pub(crate) fn unread(reader: &str, options: &[(&str, Option<String>)]) -> Result<(), Error> {
    match options.iter().find_map(|(name, value)| Some((name, value.as_ref()?))) {
        Some((name, value)) => {
            Err(usage(name, value, format!("no such option, because {reader} does not read it")))
        }
        None => Ok(()),
    }
}

/// Whether writing failed because the reader of stdout (such as `head`) has ended.
pub(crate) fn reader_gone(error: &Error) -> bool {
    error.chain().any(|it| it.downcast_ref().is_some_and(Unwritten::reader_gone))
}

/// Exit code for an error: 2 if the caller can correct it, 141 if the reader of stdout is gone,
/// else 1 or the code of the failed rank.
pub(crate) fn code(error: &Error) -> u8 {
    let usage = error.chain().any(|cause| {
        let kind = |kind| kind == ErrorKind::Usage;
        cause.is::<Usage>()
            || cause.is::<iris_ops::UnknownName>()
            || cause.downcast_ref::<iris_heap::Error>().is_some_and(|it| kind(it.kind()))
            || cause.downcast_ref::<iris_ops::OpError>().is_some_and(|it| kind(it.kind()))
    });
    match error.downcast_ref::<Ranks>() {
        _ if reader_gone(error) => READER_GONE,
        Some(Ranks(code)) => u8::try_from(*code).unwrap_or(1),
        None if usage => 2,
        None => 1,
    }
}
