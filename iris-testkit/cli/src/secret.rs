//! `iris secret`: creates a secret for jobs on several hosts.

use std::path::PathBuf;

use anyhow::Result;
use iris_heap::Secret;

/// Command-line options of `iris secret`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// File to make, which this user alone can read. Copy it to the other hosts, and set IRIS_SECRET_FILE to its path
    /// on all ranks.
    file: PathBuf,
}

/// Writes a new secret to the file; the secret itself is not printed.
pub(crate) fn main(options: &Options) -> Result<bool> {
    Secret::new()?.save(&options.file)?;
    iris_testkit::say!(
        "{} holds a new secret; set IRIS_SECRET_FILE to its path on all ranks",
        options.file.display()
    )?;
    Ok(true)
}
