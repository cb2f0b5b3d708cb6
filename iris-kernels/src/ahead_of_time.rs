//! Ahead-of-time compilation of every kernel that operators use, into a folder that is shipped with
//! a program.

use std::num::NonZero;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::build::Build;
use crate::cache::Cache;
use crate::dtype::{Role, dtype_code};
use crate::gemm_config::{TileConfig, TileSize};
use crate::rtc::{self, Compiler, Vendor};
use crate::source::{self, SourceKind};
use crate::{gemm, parallel};

/// All builds that operators may use on an architecture (`sm_90a`, `gfx942`), except builds with
/// tracing, with counters, or with delays for stress tests.
pub fn builds(arch: &str) -> Vec<Build> {
    let mut builds = gemm::builds(arch);
    for &source in source::KERNELS {
        if source.kind != SourceKind::TileGemm {
            builds.push(Build::message(source));
            continue;
        }
        for code in Role::Factor.types().filter_map(dtype_code) {
            let product = |size| Build::product(source, TileConfig::of(arch, code, size));
            builds.extend(TileSize::ALL.map(product));
        }
    }
    builds
}

/// Compiles every build for the architectures `arches` (`sm_90a`, `gfx942`; both vendors' may be
/// mixed) into `folder`, on all cores. [`crate::cache`] describes how a program finds the folder.
/// Calls `done` after each build, from one thread at a time. Returns the number of builds.
///
/// # Errors
/// Errors of [`rtc::compile`]; [`rtc::Error::Cache`] for a folder that other users may access.
pub fn precompile<'a>(
    folder: &Path,
    arches: &[&'a str],
    done: impl FnMut(&Build, &str) + Send,
) -> rtc::Result<usize> {
    // All compilers are found first, so that a missing one is reported before work begins.
    let of = |&arch: &&'a str| Ok((Compiler::of(Vendor::of(arch), arch)?, arch));
    let arches: Vec<_> = arches.iter().map(of).collect::<rtc::Result<_>>()?;
    let cache = Cache::open(folder)?;
    let builds_of = |&of: &(_, &'a str)| builds(of.1).into_iter().map(move |build| (build, of));
    let mut jobs: Vec<(Build, (_, &str))> = arches.iter().flat_map(builds_of).collect();
    // The longest compilations come first. Otherwise a long one could start last and keep one core
    // busy while the other cores have nothing left to do.
    let area = |tile: TileConfig| -i64::from(tile.size.m * tile.size.n);
    jobs.sort_by_key(|(build, _)| build.tile.map_or(0, area));
    let done = Mutex::new(done);
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    parallel::for_each(&jobs, threads, |&(ref build, (compiler, arch))| {
        let source = build.source.into();
        let key = rtc::key(source, &build.options, arch, None);
        if cache.get(&key).is_none() {
            cache.put(&key, &compiler.compile(source, &build.options, arch)?)?;
        }
        done.lock().unwrap_or_else(PoisonError::into_inner)(build, arch);
        Ok(())
    })?;
    Ok(jobs.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kernel;
    use crate::build::OpBuild;
    use crate::build::tests::OP;

    const ARCH: &str = "sm_90a";

    #[test]
    fn builds_of_an_operator_are_built_ahead() {
        let all = builds(ARCH);
        for kernel in [Kernel::OneShot, Kernel::Local] {
            for dtype in Role::Factor.types() {
                let build = OpBuild { dtype, ..OP }.of(kernel, ARCH).expect("a build");
                assert!(all.contains(&build), "{build:?}");
            }
        }
        let message = OpBuild { op: "all_gather", product: false, tile_n: 4096, ..OP };
        assert!(all.contains(&message.of(Kernel::AllGather, ARCH).expect("a build")));
        assert!(all.contains(&message.of(Kernel::Local, ARCH).expect("a build")));
    }

    #[test]
    fn each_build_is_there_once() {
        let builds = builds(ARCH);
        let keys: std::collections::HashSet<_> = builds
            .iter()
            .map(|build| rtc::key(build.source.into(), &build.options, ARCH, None))
            .collect();
        assert_eq!(keys.len(), builds.len());
    }
}
