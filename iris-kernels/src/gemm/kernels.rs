//! Kernels of the built-in whole-matrix GEMMs, and all their builds. Compilation at run time and
//! ahead of time both use [`GemmKernel::build`], so that the options are the same.

use iris_heap::DType;

use super::{Config, Gemm};
use crate::Target;
use crate::build::{Build, FaultInjection};
use crate::dtype::{Role, dtype_code};
use crate::rtc::{Options, Vendor};
use crate::source::{GEMMS, Text};

/// Numbers of peers for which [`GemmKernel::Scattering`] is built; a launch takes the smallest that is enough.
/// With seven, the kernel's parameters need more than 4 KiB, which compilers support since CUDA 12.1.
pub(super) const PEERS: [usize; 2] = [1, 7];

/// Layouts of A and B in operators, as in [`Config::with_layout`]: A row-major, B row-major or
/// column-major.
pub(super) const LAYOUTS: [(bool, bool); 2] = [(false, false), (false, true)];

/// Kernel of a whole-matrix GEMM, with the macros that it takes besides those of a [`Config`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum GemmKernel {
    /// GEMM without a message.
    Plain,
    /// GEMM that waits for the rows or columns of A that copy engines deliver.
    Gathering,
    /// GEMM that stores to up to `peers` peers, one of [`PEERS`].
    Scattering {
        peers: usize,
        /// Whether the parts of ranks are added in the order of ranks.
        in_order: bool,
    },
    /// GEMM of few rows with its all-reduce by the LL protocol.
    ExchangingLl {
        /// Whether there are two ranks.
        pair: bool,
    },
    /// GEMM of few rows with its all-reduce, which sends whole tiles, each followed by a signal.
    ExchangingTiles,
}

impl GemmKernel {
    fn all() -> impl Iterator<Item = GemmKernel> {
        use GemmKernel::*;
        let stores = PEERS
            .into_iter()
            .flat_map(|peers| [false, true].map(|in_order| Scattering { peers, in_order }));
        let exchanges = [false, true].map(|pair| ExchangingLl { pair });
        [Plain, Gathering, ExchangingTiles].into_iter().chain(stores).chain(exchanges)
    }

    /// Source of the kernel, and name of the kernel in the source.
    fn source(self) -> (Text, &'static str) {
        match self {
            GemmKernel::Plain => (GEMMS[0], "iris_gemm"),
            GemmKernel::Gathering => (GEMMS[1], "iris_gemm_gather"),
            GemmKernel::Scattering { .. } => (GEMMS[2], "iris_gemm_scatter"),
            GemmKernel::ExchangingLl { .. } => (GEMMS[3], "iris_gemm_exchange"),
            GemmKernel::ExchangingTiles => (GEMMS[4], "iris_gemm_one_shot"),
        }
    }

    /// Name of the kernel in its source.
    pub(super) fn name(self) -> &'static str {
        self.source().1
    }

    /// Configurations with which the kernel may be built, for row-major A and B.
    fn configs(self) -> Vec<Config> {
        match self {
            GemmKernel::Plain => Config::of_any_depth(),
            GemmKernel::Gathering => {
                Config::of_any_depth().into_iter().filter(|it| !it.flipped).collect()
            }
            GemmKernel::Scattering { .. } => Config::storing_any(),
            GemmKernel::ExchangingLl { .. } | GemmKernel::ExchangingTiles => Config::of_any_tile(),
        }
    }

    /// Source and compile options of this GEMM for elements of type `dtype`, a
    /// [`crate::args::dtype_code`].
    pub(super) fn build(
        self,
        dtype: u32,
        config: &Config,
        fault_injection: FaultInjection,
    ) -> Build {
        let options = config.options([dtype; 2]);
        let with = |options: Options| fault_injection.options_of_products(options);
        let options = match self {
            GemmKernel::Plain => options,
            GemmKernel::Gathering | GemmKernel::ExchangingTiles => with(options),
            GemmKernel::Scattering { peers, in_order } => with(options)
                .define("IRIS_GEMM_PEERS", peers)
                .define("IRIS_GEMM_IN_ORDER", u32::from(in_order)),
            GemmKernel::ExchangingLl { pair } => {
                with(options.define("IRIS_GEMM_PAIR", u32::from(pair)))
            }
        };
        Build { source: self.source().0, options, threads: config.threads(), tile: None }
    }
}

/// All builds of whole-matrix GEMMs for an architecture that operators may request; empty if the
/// architecture has no such GEMM.
pub(crate) fn builds(arch: &str) -> Vec<Build> {
    let target = Target { vendor: Vendor::of(arch), arch: arch.into() };
    let is_there = |dtype: &DType| Gemm::is_there(&target, *dtype);
    let codes: Vec<u32> = Role::Factor.types().filter(is_there).filter_map(dtype_code).collect();
    let mut builds = Vec::new();
    for kernel in GemmKernel::all() {
        for config in kernel.configs() {
            for layout in LAYOUTS {
                let config = config.with_layout(layout);
                let build = |&code| kernel.build(code, &config, FaultInjection::default());
                builds.extend(codes.iter().map(build));
            }
        }
    }
    builds
}
