//! A product that begins with the rows of A that this rank has, and goes on with those of the others as
//! copy engines bring them: one launch, which waits for each part before it loads it.
//!
//! **Problem.** Products apart, of this rank's rows and of what came, each end with a wave of tiles that is
//! not full, and a launch stands between them that only waits.
//!
//! **Solution.** `kernels/gemm_sm90_gather.cu`: the tiles of one product in the order in which their rows are
//! there. The thread that loads a tile waits for the signal of its part, as `flow::Arrivals` says.
//!
//! **Limits.** Those of [`Gemm`]; besides, the rows of each rank, and of a part, are whole tiles of a cluster,
//! and the launch fills the device while it waits: only where an engine brings what it waits for.

use bytemuck::{Pod, Zeroable};
use iris_heap::{Gpu, Result, Stream, SymmetricHeap};

use super::{Config, Function, Gemm, if_compiled};
use crate::args::{Matrix, OpArgs};
use crate::source;
use crate::whole::Whole;

/// How the rows of A come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Parts {
    /// Rows of each rank.
    pub shard: u32,
    /// Rows of a part, of which the last may have fewer.
    pub part: u32,
    /// The number of the first part's signal.
    pub first: u32,
}

/// The same in rows of tiles of a cluster: `Parts` of `gemm_sm90_gather.cu`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Units {
    shard: u32,
    part: u32,
    first: u32,
    reserved: u32,
}

/// Loaded kernels for such products.
#[derive(Debug)]
pub struct Gathering(Gemm);

impl Gathering {
    /// Loads the builds for a product; none where there are none for the device and types.
    ///
    /// # Errors
    /// As [`Gemm::of`].
    pub fn new(heap: &SymmetricHeap, whole: &Whole) -> Result<Option<Gathering>> {
        let Whole { shape, dtype, output, .. } = *whole;
        let target = crate::Target::of(&heap.device())?;
        if shape.contains(&0) || dtype != output || !Gemm::is_there(&target, dtype) {
            return Ok(None);
        }
        let mut configs = Config::of_plan(shape, heap.gpu()?.multiprocessors());
        configs.retain(|config| !config.flipped);
        let layouts = [(false, false), (false, true)];
        let configs: Vec<Config> = configs
            .into_iter()
            .flat_map(|config| layouts.map(|layout| config.with_layout(layout)))
            .collect();
        let kernel = (&source::GEMMS[1], "iris_gemm_gather");
        Ok(if_compiled(Gemm::load(heap, shape, dtype, &configs, kernel))?.map(Gathering))
    }

    /// Whether there is a build for this call, and for its parts.
    fn fitting(&self, args: &OpArgs, parts: &Parts) -> Option<&(Config, Function)> {
        let whole = |rows: u32, config: &Config| rows.is_multiple_of(config.unit_rows());
        self.0.fitting_of(args, |config| {
            whole(parts.shard, config) && (parts.part >= parts.shard || whole(parts.part, config))
        })
    }

    /// Enqueues the product of a call, if there is a build for it; whether there is. `args` are those of the
    /// product, of which A has this rank's rows; `all` is where those of all ranks come, and `message` the
    /// arguments of the kernels that would bring them.
    ///
    /// # Errors
    /// As [`Gemm::launch`].
    ///
    /// # Safety
    /// As for [`Gemm::launch`], of `all`, too. The call is open; engines bring the rows, and need no
    /// multiprocessor for that.
    #[allow(unsafe_code, reason = "the kernel is given the addresses of matrices")]
    pub unsafe fn launch(
        &self,
        (gpu, stream): (&Gpu, &Stream),
        args: &OpArgs,
        (all, parts): (&Matrix, &Parts),
        message: &OpArgs,
    ) -> Result<bool> {
        let Some((config, function)) = self.fitting(args, parts) else { return Ok(false) };
        let dtype = self.0.dtype;
        let (maps, own) = gpu.current(|| {
            let own = config.maps(dtype, [&args.a, &args.b, &args.c])?[0];
            Ok((config.maps(dtype, [all, &args.b, &args.c])?, own))
        })?;
        let unit = config.unit_rows();
        let part = parts.part.min(parts.shard) / unit;
        let parts = Units { shard: parts.shard / unit, part, first: parts.first, reserved: 0 };
        let (mut given, shape) = self.0.given(config, args);
        // Groups of rows do not reach beyond a part, whose successor comes later.
        given.group = given.group.min(part);
        // A loader waits for peers, and others of its cluster for it.
        let heap = &message.heap;
        given.deadline_ns = given
            .deadline_ns
            .saturating_add(heap.entry_deadline_ns)
            .saturating_add(heap.progress_deadline_ns);
        let [all, b, c] = &maps;
        let given = [
            own.bytes(),
            all.bytes(),
            b.bytes(),
            c.bytes(),
            bytemuck::bytes_of(&given),
            bytemuck::bytes_of(&parts),
            bytemuck::bytes_of(message),
        ];
        // SAFETY: the parameters are those of `iris_gemm_gather`; the caller vouches for the matrices, and
        // for what is waited for; workgroups wait for others of their cluster, which start together.
        unsafe { function.launch(stream, shape, &given) }.map(|()| true)
    }
}

const _: () = assert!(size_of::<Units>() == 16);
