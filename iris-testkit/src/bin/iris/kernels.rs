//! `iris kernels`: compile the kernels of all ops ahead of time, for a machine without a compiler.

use std::path::PathBuf;
use std::sync::Mutex;

use anyhow::{Result, anyhow};
use iris_kernels::cache::Cache;
use iris_kernels::rtc::{Compiler, KernelSource, Options as Build, TileBuild, key};
use iris_kernels::source::{KERNELS, Text};

/// Compile the kernels of all ops into a folder, with NVRTC; no GPU is needed.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// The folder. A program `iris` beside a folder `kernels` takes its kernels from there.
    #[arg(long)]
    out: PathBuf,
    /// Architectures.
    #[arg(long, default_value = "sm_90a", value_delimiter = ',')]
    arch: Vec<String>,
}

pub(crate) fn main(options: &Options) -> Result<bool> {
    let compiler = Compiler::nvrtc()?;
    let folder = Cache::open(&options.out)?;
    let mut jobs: Vec<(Text, Build, &str)> = Vec::new();
    for arch in &options.arch {
        for &text in KERNELS {
            for build in builds(text) {
                jobs.push((text, build, arch));
            }
        }
    }
    let count = jobs.len();
    let queue = Mutex::new(jobs);
    let next = || queue.lock().ok().and_then(|mut jobs| jobs.pop());
    let work = || -> Result<()> {
        while let Some((text, build, arch)) = next() {
            let source = KernelSource::from(text);
            let code = compiler.compile(source, &build, arch)?;
            folder.put(&key(source, &build, arch, None), &code)?;
        }
        Ok(())
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| {
            worker.join().map_err(|_| anyhow!("a thread that compiled kernels panicked"))?
        })
    })?;
    eprintln!("{count} kernels in {}", folder.folder().display());
    Ok(true)
}

/// Everything that ops ask for: each element type and each size of tile.
fn builds(_: Text) -> Vec<Build> {
    let builds = (0..3).flat_map(|dtype| TileBuild::ALL.map(|tile| Build::op(dtype, tile)));
    builds.collect()
}
