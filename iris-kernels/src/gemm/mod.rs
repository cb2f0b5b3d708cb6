//! Built-in whole-matrix GEMM on sm_90a: choice of a build of `kernels/gemm_sm90.cu` and its
//! launch. Also the GEMMs that are fused with communication: [`Gathering`], [`Scattering`],
//! [`Exchanging`].
//!
//! **Problem.** The GEMM that operators call tile by tile, between their messages, reaches half the
//! rate of the device. A GEMM of the whole matrix can be faster: it copies by tensor maps (TMA),
//! and multiplies the next tile while it stores the previous one.
//!
//! **Solution.** [`Config`] has the parameters of a build. [`GemmCall::launch`] answers which build
//! and grid a call gets, by a measured rule: for plans, predictions and launches alike. [`Gemm`] has
//! the loaded kernels for the calls of one operator. Tensor maps are encoded in each call, from its
//! addresses, and passed to the launch by value, so nothing is allocated and a launch can be
//! captured.
//!
//! **Limits.** A, B and C of the same type, f16 or bf16; C row-major; no GELU; addresses, leading
//! dimensions and rows of C that are multiples of 16 bytes. [`Gemm::fits`] returns false for all
//! other calls, which are left to other kernels.

mod choice;
mod exchanging;
mod fit;
mod gathering;
mod kernels;
mod scattering;
mod tensor_map;

use bytemuck::{Pod, Zeroable};
use iris_heap::abi::HeapView;
use iris_heap::{
    DType, DeviceInfo, Error, Function, Gpu, LaunchShape, Result, Stream, SymmetricHeap,
};

use crate::Target;
use crate::args::{Matrix, OpArgs};
use crate::build::{self, FaultInjection};
use crate::dtype::{self, dtype_code};
use crate::library::GemmRequest;
use crate::rtc::progress::Level;

pub use crate::gemm_config::{CoreConfig as Config, Grid};
pub use choice::k_parts;
pub use exchanging::Exchanging;
pub use fit::{Fusion, GemmCall, GemmLaunch};
pub use gathering::{Gathering, Parts};
pub(crate) use kernels::builds;
use kernels::{GemmKernel, LAYOUTS};
pub use scattering::{Messages, Scattering};
use tensor_map::TensorMap;

/// Longest time that the loading thread of a workgroup waits for the workgroup's multiplying warps,
/// in nanoseconds. These warps do not wait for other ranks, so the time does not depend on peers.
const DEADLINE_NS: u64 = 10_000_000_000;

/// Arguments of the kernels besides tensor maps; same layout as `Arguments` in `gemm/whole.h`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Arguments {
    bias: u64,
    deadline_ns: u64,
    rows: u32,
    cols: u32,
    depth: u32,
    row_units: u32,
    col_tiles: u32,
    group: u32,
}

impl Arguments {
    /// Extends the deadline by the longest wait for peers. While the loading thread of one
    /// workgroup waits for peers, those of the other workgroups in its cluster wait for it.
    fn wait_for_peers(&mut self, heap: &HeapView) {
        let limits = heap.entry_deadline_ns.saturating_add(heap.progress_deadline_ns);
        self.deadline_ns = self.deadline_ns.saturating_add(limits);
    }
}

/// Loaded kernels for products with fixed n and k and up to a maximum number of rows.
#[derive(Debug)]
pub struct Gemm {
    dtype: DType,
    shape: [usize; 3],
    multiprocessors: u32,
    /// Whether launches may begin before the previous launch on the stream has ended. The kernels
    /// then wait for that launch themselves.
    early: bool,
    kernels: Vec<(Config, Function)>,
}

impl Gemm {
    /// Whether this GEMM exists for a target and element type.
    pub fn is_there(target: &Target, dtype: DType) -> bool {
        Self::is_there_for_any(target) && dtype::has_mma(dtype)
    }

    /// Whether this GEMM exists for a target, for any element type.
    pub fn is_there_for_any(target: &Target) -> bool {
        target.arch == "sm_90a"
    }

    /// Whether this GEMM exists for a device, for any element type.
    pub fn is_there_for(device: &DeviceInfo) -> bool {
        Target::of(device).is_ok_and(|target| Self::is_there_for_any(&target))
    }

    /// Loads the builds `configs` for products C = A B, where C has up to `shape[0]` rows and
    /// `shape[1]` columns and the depth is `shape[2]`. Compiles builds that have not been compiled
    /// before.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for another architecture or type; [`Error::Other`] with a
    /// [`crate::rtc::Error`]; [`Error::Device`].
    pub fn of(
        heap: &SymmetricHeap,
        shape: [usize; 3],
        dtype: DType,
        configs: &[Config],
    ) -> Result<Gemm> {
        Self::load(heap, shape, dtype, configs, (GemmKernel::Plain, FaultInjection::default()))
    }

    /// Loads the builds `configs` of a kernel, like [`Gemm::of`].
    fn load(
        heap: &SymmetricHeap,
        shape: [usize; 3],
        dtype: DType,
        configs: &[Config],
        (kernel, fault_injection): (GemmKernel, FaultInjection),
    ) -> Result<Gemm> {
        let target = Target::of(heap.device())?;
        let code = dtype_code(dtype).filter(|_| Self::is_there(&target, dtype));
        let Some(code) = code else {
            return Err(Error::Unsupported {
                what: format!("the whole-matrix GEMM of {dtype} on {}", target.arch),
                why: format!(
                    "expected {}, and sm_90a",
                    dtype::names(dtype::types(|row| row.mma.is_some()))
                ),
            });
        };
        let builds = configs.iter().map(|config| kernel.build(code, config, fault_injection));
        let builds: Vec<_> = builds.map(|build| (build, kernel.name().into())).collect();
        let progress = Level::new("GEMM kernel", configs.len(), heap.rank() == 0);
        let images = build::compile(&builds, &target, heap.size(), || progress.step());
        let images = images.map_err(Error::other)?;
        let load = |(config, image): (&Config, Vec<u8>)| -> Result<_> {
            let function = heap.load(&image)?.function(kernel.name(), config.shared_bytes())?;
            Ok((*config, function))
        };
        let kernels = configs.iter().zip(images).map(load).collect::<Result<_>>()?;
        let (multiprocessors, early) = (heap.workgroups(), heap.ranks_on_device() == 1);
        Ok(Gemm { dtype, shape, multiprocessors, early, kernels })
    }

    /// Loads the builds `configs` of a kernel for a product of an operator, each for both layouts
    /// of B; `None` if there are none for the device and types.
    ///
    /// # Errors
    /// Errors of [`Gemm::of`].
    fn for_whole(
        heap: &SymmetricHeap,
        whole: &GemmRequest,
        configs: impl IntoIterator<Item = Config>,
        kernel: (GemmKernel, FaultInjection),
    ) -> Result<Option<Gemm>> {
        let GemmRequest { shape, dtype, output, .. } = *whole;
        let target = Target::of(heap.device())?;
        if shape.contains(&0) || dtype != output || !Self::is_there(&target, dtype) {
            return Ok(None);
        }
        let configs: Vec<Config> = configs
            .into_iter()
            .flat_map(|config| LAYOUTS.map(|layout| config.with_layout(layout)))
            .collect();
        if configs.is_empty() {
            return Ok(None);
        }
        Self::load(heap, shape, dtype, &configs, kernel).map(Some)
    }

    /// Loads the builds for a product of an operator that sends no message in the same launch;
    /// `None` if there are none. If `preferred`, only builds are loaded that can be faster than the
    /// vendor's library.
    ///
    /// # Errors
    /// Errors of [`Gemm::of`].
    pub(crate) fn of_whole(
        heap: &SymmetricHeap,
        whole: &GemmRequest,
        preferred: bool,
    ) -> Result<Option<Gemm>> {
        let mut configs = Config::of_plan(whole.shape, heap.workgroups(), whole.k_parts);
        if (heap.ranks_on_device() > 1 || whole.beside) && whole.k_parts > 1 {
            // Kernels of other ranks or of the user that wait may leave no eight multiprocessors together to a
            // cluster that shares tiles.
            configs = vec![Config::whole_tiles(whole.k_parts)];
        }
        configs.retain(|config| !preferred || config.is_preferred());
        Self::for_whole(heap, whole, configs, (GemmKernel::Plain, FaultInjection::default()))
    }

    /// Parameters of the loaded builds.
    pub fn configs(&self) -> impl Iterator<Item = &Config> {
        self.kernels.iter().map(|(config, _)| config)
    }

    /// Number of registers and bytes of local memory per thread, for each build.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn resources(&self) -> Result<Vec<(Config, (u32, u32))>> {
        self.kernels.iter().map(|(config, it)| Ok((*config, it.resources()?))).collect()
    }

    /// Whether a build is loaded that can do this call.
    pub fn fits(&self, args: &OpArgs) -> bool {
        self.fitting(args, &Fusion::None).is_some()
    }

    /// Whether the build for this call is preferred to the vendor's library. Builds for few rows are
    /// loaded beside the library only where the library may not split K, without which it is slower.
    pub fn is_preferred(&self, args: &OpArgs) -> bool {
        let OpArgs { m, n, .. } = *args;
        let fitting = self.fitting(args, &Fusion::None);
        fitting.is_some_and(|(GemmLaunch { config, .. }, _)| {
            config.flipped || config.is_preferred_for(m, n, self.multiprocessors)
        })
    }

    /// Build, grid and loaded kernel for a call whose launch also handles the message `fusion`;
    /// `None` if there is no build for the call.
    fn fitting(&self, args: &OpArgs, fusion: &Fusion) -> Option<(GemmLaunch, &Function)> {
        let OpArgs { a, b, c, bias, m, n, k, epilogue, .. } = *args;
        let code = dtype_code(self.dtype)?;
        let [most, of_n, of_k] = self.shape;
        let shape = [m as usize, n as usize, k as usize];
        let has_bias = bias.address != 0;
        let matrices = [&a, &b, &c];
        let fits = matrices.iter().all(|it| it.dtype == code)
            && c.transposed == 0
            && shape[1..] == [of_n, of_k]
            && (!has_bias || bias.dtype == code && (bias.transposed == 0 || bias.ld == 1));
        if !fits {
            return None;
        }
        let call = GemmCall {
            is_there: true,
            shape,
            most,
            dtypes: [self.dtype; 3],
            has_epilogue: epilogue != 0,
            is_aligned: matrices.into_iter().all(is_aligned),
            layout: (a.transposed != 0, b.transposed != 0),
            ranks: args.channel.size as usize,
            multiprocessors: self.multiprocessors,
            k_parts: self.configs().next().map_or(1, |config| config.k_parts),
        };
        let launch = call.launch_of(self.configs().copied(), fusion)?;
        let (_, function) = self.kernels.iter().find(|(config, _)| *config == launch.config)?;
        Some((launch, function))
    }

    /// Enqueues the product of a call; returns false if there is no build for it.
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::Closed`]; [`Error::Invalid`] for a stream of another heap.
    ///
    /// # Safety
    /// The matrices in `args` are on the device. They live until the stream has finished the
    /// launch, and every replay of a graph that captured the launch.
    #[allow(unsafe_code, reason = "the kernel is given the addresses of matrices")]
    pub unsafe fn launch(&self, gpu: &Gpu, stream: &Stream, args: &OpArgs) -> Result<bool> {
        let Some((launch, function)) = self.fitting(args, &Fusion::None) else {
            return Ok(false);
        };
        let OpArgs { a, b, c, .. } = *args;
        // The context is made current, because the driver needs one to encode maps, although it
        // does not access the device.
        let maps = gpu.current(|| launch.config.maps(self.dtype, [&a, &b, &c]))?;
        let (given, shape) = self.given(&launch, args);
        let [a, b, c] = &maps;
        let args = [a.bytes(), b.bytes(), c.bytes(), bytemuck::bytes_of(&given)];
        // SAFETY: the parameters are those of `iris_gemm`; the caller vouches for the matrices;
        // workgroups wait only for others of their cluster, which start together.
        unsafe { function.launch(stream, shape, &args) }.map(|()| true)
    }

    /// Kernel arguments and launch shape of a call.
    fn given(&self, launch: &GemmLaunch, args: &OpArgs) -> (Arguments, LaunchShape) {
        let GemmLaunch { config, grid } = launch;
        let OpArgs { bias, m, n, k, .. } = *args;
        let (rows, cols) = if config.flipped { (n, m) } else { (m, n) };
        let Grid { row_units, col_tiles, groups, .. } = *grid;
        let given = Arguments {
            bias: bias.address,
            deadline_ns: DEADLINE_NS,
            rows,
            cols,
            depth: k,
            row_units,
            col_tiles,
            group: config.group,
        };
        let shape = LaunchShape {
            groups,
            threads: config.threads(),
            shared_bytes: config.shared_bytes(),
            early: self.early,
        };
        (given, shape)
    }
}

/// Whether a tensor map can describe `matrix`: address and stride are multiples of 16 bytes.
pub fn is_aligned(matrix: &Matrix) -> bool {
    let lines = if matrix.transposed == 0 { matrix.rows } else { matrix.cols };
    // The stride is not used if the matrix has only one row (column, if transposed).
    let step = if lines > 1 { matrix.ld * 2 } else { 0 };
    (matrix.address | step).is_multiple_of(16)
}

impl Config {
    /// Tensor maps of the left factor, the right factor and C. In a build that computes the
    /// transpose of C, the left factor is B.
    fn maps(&self, dtype: DType, [a, b, c]: [&Matrix; 3]) -> Result<[TensorMap; 3]> {
        let (left, right) = if self.flipped { (b, a) } else { (a, b) };
        let cluster = self.cluster;
        let right_box = if self.b_across { [64, 64 / cluster] } else { [64, self.width / cluster] };
        Ok([
            self.left_map(dtype, left)?,
            TensorMap::new(dtype, right, right_box)?,
            self.c_map(dtype, c)?,
        ])
    }

    /// Tensor map of the left factor of the tiles: A, or B in a build that computes the transpose
    /// of C.
    fn left_map(&self, dtype: DType, left: &Matrix) -> Result<TensorMap> {
        let left_box = if self.a_across { [64, 64] } else { [64, self.rows()] };
        TensorMap::new(dtype, left, left_box)
    }

    fn c_map(&self, dtype: DType, c: &Matrix) -> Result<TensorMap> {
        let cols = self.chunk_cols();
        let c_box = if self.flipped { [64, cols] } else { [cols, 64] };
        TensorMap::new(dtype, c, c_box)
    }
}

const _: () = assert!(size_of::<Arguments>() == 40);
