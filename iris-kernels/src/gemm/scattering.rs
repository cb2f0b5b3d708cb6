//! A product of which each rank owns some rows of the sum over all ranks: one launch, which stores to others
//! what they own, and adds what they have stored here.
//!
//! **Problem.** A product that is finished before its message leaves costs the time of both; in parts, each
//! part costs a wave of tiles that is not full, copies, launches that only wait, and sums apart.
//!
//! **Solution.** `kernels/gemm_sm90_scatter.cu`: what others own is multiplied first, and stored by tensor
//! maps of their inboxes; the thread that stored a consumer's part of a tile waits until it is there and
//! signals it, as `flow::Departures` says. This rank's own tiles come last; the thread that loads waits for
//! what the others have stored of a tile, and brings it as further slabs of the ring.
//!
//! **Limits.** Those of [`Gemm`]; besides, each rank owns as many rows, which are whole tiles of a cluster;
//! partials have the type of A; up to eight ranks. All workgroups of the launch are resident.

use bytemuck::{Pod, Zeroable};
use iris_heap::{Function, Gpu, Result, Stream, SymmetricHeap};

use super::{Config, Gemm, TensorMap, if_compiled};
use crate::args::{Matrix, OpArgs};
use crate::source;
use crate::whole::Whole;

/// Most peers: `PEERS` of `gemm_sm90_scatter.cu`.
const PEERS: usize = 7;

/// Rows and columns that have a signal.
pub(crate) const SIGNALLED: [u32; 2] = [64, 256];

/// Rows in those of the tiles of a cluster, and numbers of signals: `Blocks` of `gemm_sm90_scatter.cu`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Blocks {
    rows: u32,
    first: u32,
    across: u32,
    reserved: u32,
}

/// Loaded kernels for such products.
#[derive(Debug)]
pub struct Scattering(Gemm);

impl Scattering {
    /// Loads the builds for a product; none where there are none for the device and types.
    ///
    /// # Errors
    /// As [`Gemm::of`].
    pub fn new(heap: &SymmetricHeap, whole: &Whole) -> Result<Option<Scattering>> {
        let Whole { shape, dtype, output, .. } = *whole;
        let target = crate::Target::of(&heap.device())?;
        if shape.contains(&0) || dtype != output || !Gemm::is_there(&target, dtype) {
            return Ok(None);
        }
        let config = Config::wide(SIGNALLED[1], 2, 4);
        let held = [true, false].map(|hold| Config { hold, ..config });
        let layouts = [(false, false), (false, true)];
        let configs: Vec<Config> = held
            .into_iter()
            .filter(|config| config.takes(shape))
            .take(1)
            .flat_map(|config| layouts.map(|layout| config.with_layout(layout)))
            .collect();
        let kernel = (&source::GEMMS[2], "iris_gemm_scatter");
        Ok(if_compiled(Gemm::load(heap, shape, dtype, &configs, kernel))?.map(Scattering))
    }

    /// The build for this call, if there is one.
    fn fitting(&self, args: &OpArgs, message: &OpArgs) -> Option<&(Config, Function)> {
        let size = message.channel.size;
        let tile = [message.tile_m, message.tile_n];
        let alike = message.c.dtype == args.c.dtype && tile == SIGNALLED;
        if !alike || size as usize > PEERS + 1 || !args.m.is_multiple_of(size) {
            return None;
        }
        self.0.fitting_of(args, |config| (args.m / size).is_multiple_of(config.unit_rows()))
    }

    /// Enqueues the product of a call, if there is a build for it; whether there is. `args` are those of the
    /// product, of which C has this rank's rows; `message` are the arguments of the kernels that would
    /// bring partials, to its C on all ranks, with signals from number `first` on.
    ///
    /// # Errors
    /// As [`Gemm::launch`].
    ///
    /// # Safety
    /// As for [`Gemm::launch`], of the message's matrices, too, on all ranks. The call is open; no other rank
    /// has workgroups on this device.
    #[allow(unsafe_code, reason = "the kernel is given the addresses of matrices")]
    pub unsafe fn launch(
        &self,
        (gpu, stream): (&Gpu, &Stream),
        args: &OpArgs,
        (message, first): (&OpArgs, u32),
    ) -> Result<bool> {
        let Some((config, function)) = self.fitting(args, message) else { return Ok(false) };
        let OpArgs { ref heap, ref channel, c: inbox, .. } = *message;
        let (dtype, size, rank) = (self.0.dtype, channel.size, channel.rank);
        let rows = args.m / size;
        let of_rank = |address: u64| Matrix { address, rows, ..inbox };
        let (maps, inbox_map, owners) = gpu.current(|| {
            let mut owners = [TensorMap::zeroed(); PEERS];
            for (map, peer) in owners.iter_mut().zip(channel.peers()) {
                let block = u64::from(rank * rows) * inbox.ld * inbox.element_bytes();
                let [here, there] = [heap.rank, peer].map(|it| heap.data[it as usize]);
                let to = of_rank(inbox.address - here + there + block);
                *map = config.maps(dtype, [&args.a, &args.b, &to])?[2];
            }
            let added = [config.chunk_cols(), config.rows()];
            let inbox = TensorMap::new(dtype, &inbox, added)?;
            Ok((config.maps(dtype, [&args.a, &args.b, &args.c])?, inbox, owners))
        })?;
        let across = args.n.div_ceil(config.width);
        let rows = rows / config.unit_rows();
        let blocks = Blocks { rows, first, across, reserved: 0 };
        let (mut given, shape) = self.0.given(config, args);
        given.group = given.group.min(rows);
        given.wait_for_peers(heap);
        debug_assert!(rank < size);
        let [a, b, c] = &maps;
        let given = [
            a.bytes(),
            b.bytes(),
            c.bytes(),
            inbox_map.bytes(),
            bytemuck::bytes_of(&owners),
            bytemuck::bytes_of(&given),
            bytemuck::bytes_of(&blocks),
            bytemuck::bytes_of(message),
        ];
        // SAFETY: the parameters are those of `iris_gemm_scatter`; the caller vouches for the matrices, and
        // that peers are there; workgroups wait for others of their cluster, which start together, and for
        // tiles of peers, which these store before they wait.
        unsafe { function.launch(stream, shape, &given) }.map(|()| true)
    }
}

const _: () = assert!(size_of::<Blocks>() == 16);
