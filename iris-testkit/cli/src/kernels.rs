//! `iris kernels`: compiles the kernels of all ops ahead of time, for a machine without a compiler.

use std::path::PathBuf;

use anyhow::Result;
use iris_testkit::note;

use crate::errors::usage;
use crate::progress::Progress;

/// Compile the kernels of all ops into a folder; no GPU is needed.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Folder for the compiled kernels. A program `iris` loads kernels from a folder `kernels` in
    /// its own folder.
    #[arg(long)]
    out: PathBuf,
    /// Architectures, separated by commas: sm_90a and the like with NVRTC; gfx942 and the like with
    /// hiprtc, or with clang if hiprtc is missing or older than the architecture.
    #[arg(long, default_value = "sm_90a", value_delimiter = ',')]
    arch: Vec<String>,
}

pub(crate) fn main(options: &Options) -> Result<bool> {
    let arches: Vec<&str> = options.arch.iter().map(String::as_str).collect();
    let is_known = |arch: &str| {
        let number = ["sm_", "compute_", "gfx"].iter().find_map(|it| arch.strip_prefix(it));
        number.is_some_and(|it| it.starts_with(|digit: char| digit.is_ascii_digit()))
    };
    if let Some(other) = arches.iter().find(|arch| !is_known(arch)) {
        return Err(usage("--arch", other, "names such as sm_90a, compute_90a and gfx942"));
    }
    let total = arches.iter().map(|arch| iris_kernels::ahead_of_time::builds(arch).len()).sum();
    let progress = Progress::new("kernels", 0, total);
    let count =
        iris_kernels::ahead_of_time::precompile(&options.out, &arches, |_, _| progress.step())?;
    drop(progress);
    note!("{count} kernels in {}", options.out.display());
    Ok(true)
}
