//! Builds of an operator's kernels: source text and compile options.

use std::borrow::Cow;
use std::num::NonZero;
use std::sync::OnceLock;
use std::thread;

use iris_heap::DType;
use iris_sync::Access;

use crate::cache;
use crate::dtype::{Role, dtype_code, has_role};
use crate::gemm_config::{BARRIER_THREADS, MESSAGE_THREADS, THREADS, TileConfig, TileSize};
use crate::rtc::{self, Error, KernelSource, Options, Vendor};
use crate::source::{self, SourceKind, Text};
use crate::{Kernel, Target, cpu, parallel};

/// Faults that a stress test compiles into device kernels; the default injects none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FaultInjection {
    /// Maximum random delay before each access of the protocols, in nanoseconds. If `IRIS_DELAY`
    /// specifies a longer delay, the longer one is used.
    pub delay_ns: u32,
    /// Kind of access whose waits are removed from the kernels, so that results become wrong and a
    /// stress test must find the error. If it is [`Access::EntryLoad`], kernels also stop comparing
    /// the call parameters that ranks publish when they enter a call. Without the wait, these would
    /// belong to other calls, and every run would end in a mismatch fault.
    pub without: Option<Access>,
    /// Location in the kernels at which workgroups are delayed, with the delay in nanoseconds. If
    /// the wait that protects this location is removed, the delay makes the result wrong reliably.
    pub hold: Option<(Hold, u32)>,
    /// Kernels from which the wait is removed, for tests of copy engines and fused whole-matrix
    /// GEMMs. Calls then use copy engines and these GEMMs as they do without injection, even if
    /// ranks share a device. If `None`, kernels that send tiles themselves replace copy engines and
    /// these GEMMs, because kernels can be delayed, and can leave out waits, at more locations.
    pub whole: Option<OmittedWait>,
}

/// Kernels from which the wait is removed in a call with a fused whole-matrix GEMM. All other
/// kernels of the call keep their waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OmittedWait {
    /// The whole-matrix GEMM leaves out the wait; the kernels around it keep their waits.
    Products,
    /// All kernels of the call except the GEMM leave out the wait. These kernels are the first and
    /// the last launch of the call, and the small kernels (gates) that wait for received data
    /// before a step reads it.
    Others,
}

/// Location in the kernels at which workgroups can be delayed; `Hold` in memory.h has the same
/// values. Only rank 0 is delayed, so that the other ranks continue meanwhile. At `Adding` all
/// ranks are delayed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hold {
    /// Delay before the kernel that precedes an op accesses the op's operands.
    Filling,
    /// Delay after the rank has entered a call, before it sends, reads or fetches data.
    Entered,
    /// Delay after the signals of a tile have been seen, before the tile is read.
    Received,
    /// Delay after the source rank of a unit (a piece of the gathered matrix) has entered the call,
    /// before the unit is copied to the staging buffer.
    Fetching,
    /// Delay between the read and the write of an addition under a lock.
    Adding,
    /// Delay before a whole-matrix GEMM stores a tile of its result at the peers.
    Storing,
}

impl FaultInjection {
    /// Adds the compile options for these faults to the options of any kernel except whole-matrix
    /// GEMMs.
    pub fn options(self, options: Options) -> Options {
        self.with(options, self.whole != Some(OmittedWait::Products))
    }

    /// Adds the compile options for these faults to the options of a whole-matrix GEMM.
    pub fn options_of_products(self, options: Options) -> Options {
        self.with(options, self.whole == Some(OmittedWait::Products))
    }

    /// Whether the faults are for kernels that multiply and send tile by tile. Then these kernels do
    /// the work that copy engines and whole-matrix GEMMs would do otherwise.
    pub fn is_by_messages(self) -> bool {
        self != Self::default() && self.whole.is_none()
    }

    fn with(self, options: Options, goes_without: bool) -> Options {
        let from_environment = cpu::longest_delay().saturating_mul(1000).min(1_000_000) as u32;
        let options = match self.delay_ns.max(from_environment) {
            0 => options,
            ns => options.define("IRIS_TEST_DELAY_NS", ns),
        };
        let options = match self.without.filter(|_| goes_without) {
            None => options,
            Some(access) => options.define("IRIS_TEST_NO_WAIT", access as i32),
        };
        match self.hold {
            None => options,
            Some((place, ns)) => {
                options.define("IRIS_TEST_HOLD", place as i32).define("IRIS_TEST_HOLD_NS", ns)
            }
        }
    }
}

/// Properties of an op that determine the builds of its kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpBuild {
    /// Name of the op, by which its kernel source is found.
    pub op: &'static str,
    /// Whether the op contains a matrix product.
    pub product: bool,
    /// Whether an RMSNorm of the result's rows follows the op.
    pub norm: bool,
    /// Whether messages by the LL protocol (data and flag in one word) may consist of packs of 48
    /// bytes.
    pub packs: bool,
    /// Element type of A and B, or of the message.
    pub dtype: DType,
    /// Number of rows of a tile.
    pub tile_m: u32,
    /// Number of columns of a tile.
    pub tile_n: u32,
    /// Faults that a test injects into the kernels.
    pub fault_injection: FaultInjection,
    /// Whether the kernels write traces and count transferred bytes.
    pub observed: bool,
}

/// Device source with its compile options, which one compilation turns into machine code.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Build {
    /// Text of the source to be compiled.
    pub source: Text,
    /// Options with which the source is compiled.
    pub options: Options,
    /// Number of threads per workgroup.
    pub threads: u32,
    /// Tile configuration; `None` for a source without a product.
    pub tile: Option<TileConfig>,
}

impl Build {
    /// Build of a source without a matrix product.
    pub(crate) fn message(source: Text) -> Self {
        let threads =
            if source.kind == SourceKind::Barrier { BARRIER_THREADS } else { MESSAGE_THREADS };
        let options = Options::new().define("IRIS_THREADS", threads);
        // The kernels of this source are built for two workgroups per multiprocessor, so that one
        // reads while the other reduces.
        let options = match source.kind {
            SourceKind::Local => options.define("IRIS_TOGETHER", 2),
            _ => options,
        };
        Self { source, options, threads, tile: None }
    }

    pub(crate) fn product(source: Text, tile: TileConfig) -> Self {
        Self { source, options: tile.options(), threads: THREADS, tile: Some(tile) }
    }

    /// Bytes of dynamic shared memory per workgroup of `kernel`, one of the kernels of this build.
    pub fn shared_bytes(&self, kernel: Kernel) -> u32 {
        match self.tile {
            Some(tile) if kernel.multiplies() => tile.shared_bytes(),
            _ => 0,
        }
    }

    /// Adds the options for injected faults, and for tracing and counting. Builds with any of these
    /// options are not compiled ahead of time.
    fn with(self, op: &OpBuild) -> Self {
        let options = op.fault_injection.options(self.options);
        let options = if op.observed { options.define("IRIS_OBSERVED", 1) } else { options };
        Self { options, ..self }
    }
}

impl OpBuild {
    /// Returns the build that contains `kernel` for an architecture (`sm_90a`); other kernels of
    /// the op may be in other builds.
    ///
    /// # Errors
    /// Name of the property that no device kernel supports: a source, a type, or a tile that is too
    /// large.
    pub fn of(&self, kernel: Kernel, arch: &str) -> Result<Build, String> {
        let name = match kernel {
            Kernel::Barrier { .. } => "barrier",
            Kernel::Local if self.product => "matmul",
            Kernel::Local | Kernel::Norm | Kernel::Stamp { .. } => "copy",
            Kernel::Open
            | Kernel::Copies
            | Kernel::Blocks
            | Kernel::Results
            | Kernel::Gate { .. }
            | Kernel::Close => "copied",
            Kernel::Sums if !self.norm => "copied",
            _ if self.norm => &format!("{}_norm", self.op),
            _ => self.op,
        };
        let source = source::kernel(name).ok_or_else(|| format!("kernel {name}"))?;
        if source.kind != SourceKind::TileGemm {
            return Ok(Build::message(source).with(self));
        }
        let code = dtype_code(self.dtype).filter(|_| has_role(self.dtype, Role::Factor));
        let code = code.ok_or_else(|| format!("matrix products of {}", self.dtype))?;
        let Self { tile_m, tile_n, .. } = *self;
        let size = TileSize::fitting(tile_m, tile_n).ok_or_else(|| {
            let TileSize { m, n } = TileSize::ALL[0];
            format!("a tile of {tile_m} x {tile_n} (the largest is {m} x {n})")
        })?;
        Ok(Build::product(source, TileConfig::of(arch, code, size)).with(self))
    }
}

/// Compiles kernels to machine code for a target on all cores, or takes the code from a cache. Each kernel
/// is given by its build and the name of its function. Returns an image for each, in the same order: that of
/// the whole source on AMD or if it is shipped with the program, else one with this kernel only, because a
/// program needs few of the kernels of a source (NVRTC 13.0 on two cores: 10 s for the ten kernels of
/// `all_reduce.cu`, 0.3 to 1.9 s for one). The cores are divided among `ranks`, each of which may compile.
/// Calls `done` after each.
///
/// # Errors
/// Errors of [`rtc::compile`]. [`Error::NotCarried`] if there is no compiler and the folder of
/// kernels that is shipped with the program does not contain a build.
pub(crate) fn compile(
    kernels: &[(Build, String)],
    target: &Target,
    ranks: usize,
    done: impl Fn() + Sync,
) -> rtc::Result<Vec<Vec<u8>>> {
    let images: Vec<OnceLock<Vec<u8>>> = kernels.iter().map(|_| OnceLock::new()).collect();
    let jobs: Vec<_> = kernels.iter().zip(&images).collect();
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    parallel::for_each(&jobs, (cores / ranks).max(1), |&((build, function), image)| {
        let code = compile_one(build, function, target)?;
        image.get_or_init(|| code);
        done();
        Ok(())
    })?;
    Ok(images.into_iter().filter_map(OnceLock::into_inner).collect())
}

fn compile_one(build: &Build, function: &str, target: &Target) -> rtc::Result<Vec<u8>> {
    let Build { source, options, .. } = build;
    if let Some(code) = rtc::carried((*source).into(), options, &target.arch) {
        return Ok(code);
    }
    // The compilers of AMD were not timed.
    let text = match target.vendor {
        Vendor::Nvidia => source.only(function).into(),
        Vendor::Amd => Cow::Borrowed(source.text),
    };
    let alone = KernelSource { name: source.name, text: &text };
    let compiled = rtc::compile(target.vendor, alone, options, &target.arch);
    compiled.map_err(|error| match error {
        Error::NotFound { .. } | Error::Architecture { .. } => Error::NotCarried {
            source_name: source.name.into(),
            arch: target.arch.clone(),
            options: options.words().join(" "),
            folder: cache::carried_folder().unwrap_or("kernels".into()),
            no_compiler: error.to_string(),
        },
        other => other,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const ARCH: &str = "sm_90a";

    pub(crate) const OP: OpBuild = OpBuild {
        op: "matmul_all_reduce",
        product: true,
        norm: false,
        packs: true,
        dtype: DType::BF16,
        tile_m: 64,
        tile_n: 96,
        fault_injection: FaultInjection { delay_ns: 0, without: None, hold: None, whole: None },
        observed: false,
    };

    #[test]
    fn injection_and_tracing_change_the_build() {
        let fault_injection = FaultInjection {
            delay_ns: 500,
            without: Some(Access::SignalLoad),
            hold: Some((Hold::Fetching, 2000)),
            whole: None,
        };
        let op = OpBuild { fault_injection, observed: true, ..OP };
        let build = op.of(Kernel::OneShot, ARCH).expect("a build");
        let plain = OP.of(Kernel::OneShot, ARCH).expect("a build");
        let more = &build.options.defines[plain.options.defines.len()..];
        let pair = |name: &str, value: &str| (name.to_string(), value.to_string());
        // The value of IRIS_TEST_NO_WAIT is the index of `Access::SignalLoad` in the table of
        // accesses, 4.
        let expected = [
            pair("IRIS_TEST_DELAY_NS", "500"),
            pair("IRIS_TEST_NO_WAIT", "4"),
            pair("IRIS_TEST_HOLD", "3"),
            pair("IRIS_TEST_HOLD_NS", "2000"),
            pair("IRIS_OBSERVED", "1"),
        ];
        assert_eq!(more, expected);
    }

    #[test]
    fn a_wait_is_omitted_in_gemms_or_in_other_kernels() {
        let none = rtc::Options::new;
        let (without, hold) = (Some(Access::SignalLoad), Some((Hold::Entered, 2000)));
        for (whole, product, others) in [
            (None, false, true),
            (Some(OmittedWait::Products), true, false),
            (Some(OmittedWait::Others), false, true),
        ] {
            let fault_injection = FaultInjection { delay_ns: 0, without, hold, whole };
            let goes_without = |options: &Options| {
                options.defines.iter().any(|(name, _)| name == "IRIS_TEST_NO_WAIT")
            };
            let [products, rest] =
                [fault_injection.options_of_products(none()), fault_injection.options(none())];
            assert_eq!(goes_without(&products), product, "{whole:?}");
            assert_eq!(goes_without(&rest), others, "{whole:?}");
            // Options of whole-matrix GEMMs and options of other kernels must both contain the
            // delay.
            assert!([&products, &rest].iter().all(|it| it.defines.len() >= 2), "{whole:?}");
            assert_eq!(fault_injection.is_by_messages(), whole.is_none());
        }
        assert!(!FaultInjection::default().is_by_messages());
    }

    #[test]
    fn shared_memory_is_asked_for_where_a_kernel_multiplies() {
        let op = OpBuild { tile_n: 128, tile_m: 128, ..OP };
        let bytes =
            |op: &OpBuild, kernel, arch| op.of(kernel, arch).expect("a build").shared_bytes(kernel);
        assert_eq!(bytes(&op, Kernel::OneShot, "sm_90a"), 99328);
        assert_eq!(bytes(&op, Kernel::Zero, "sm_90a"), 0);
        assert_eq!(bytes(&op, Kernel::OneShot, "sm_80"), 0);
        assert_eq!(bytes(&op, Kernel::OneShot, "gfx942"), 0);
        assert_eq!(bytes(&OpBuild { dtype: DType::F32, ..op }, Kernel::OneShot, "sm_90a"), 0);
        assert_eq!(bytes(&OP, Kernel::OneShot, "sm_90a"), 99328);
    }

    #[test]
    fn errors_name_what_has_no_kernel() {
        let large = OpBuild { tile_m: 256, ..OP }.of(Kernel::OneShot, ARCH).unwrap_err();
        assert!(large.contains("256 x 96") && large.contains("128 x 128"), "{large}");
        let odd = OpBuild { dtype: DType::I32, ..OP }.of(Kernel::OneShot, ARCH).unwrap_err();
        assert!(odd.contains("i32"), "{odd}");
    }

    /// Tests only the kernels that the executor adds to a call if copy engines do the transfers.
    /// Other tests check the kernels that the operators' programs name.
    #[test]
    fn copy_engine_kernels_are_in_the_source_of_the_message() {
        use Kernel::{Gate, Results, Sums};
        const GATE: Kernel = Gate { source: 0, first: 0, parts: 0 };
        let table: [(&str, &[Kernel]); 3] = [
            ("all_gather", &[GATE, Sums]),
            ("reduce_scatter", &[GATE, Sums]),
            ("all_reduce", &[GATE, Results, Sums]),
        ];
        for (op, kernels) in table {
            for &kernel in kernels {
                let build = OpBuild { op, product: false, ..OP }.of(kernel, ARCH).expect("a build");
                let entry = format!("IRIS_KERNEL iris_{}(", kernel.name());
                assert!(build.source.text.contains(&entry), "{entry} in {}", build.source.name);
            }
        }
    }
}
