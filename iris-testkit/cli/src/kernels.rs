//! `iris kernels`: compile the kernels of all ops ahead of time, for a machine without a compiler.

use std::path::PathBuf;

use anyhow::Result;
use iris_testkit::note;

/// Compile the kernels of all ops into a folder; no GPU is needed.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The folder. A program `iris` beside a folder `kernels` takes its kernels from there.
    #[arg(long)]
    out: PathBuf,
    /// Architectures, with commas between: sm_90a and the like with NVRTC, gfx942 and the like with hiprtc, or
    /// with clang where that is missing or older than the architecture.
    #[arg(long, default_value = "sm_90a", value_delimiter = ',')]
    arch: Vec<String>,
}

pub(crate) fn main(options: &Options) -> Result<bool> {
    let arches: Vec<&str> = options.arch.iter().map(String::as_str).collect();
    let count = iris_kernels::ahead::precompile(&options.out, &arches, |_, _| ())?;
    note!("{count} kernels in {}", options.out.display());
    Ok(true)
}
