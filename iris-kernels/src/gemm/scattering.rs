//! GEMM that also exchanges its result, in one launch; each rank owns some rows of C. The launch
//! stores tiles of other ranks' rows at these ranks, and adds the partials that peers have stored
//! at this rank. If the operator requires it, it also sends this rank's finished rows to all ranks.
//!
//! **Problem.** If the GEMM ends before its message starts, a call takes the time of both. If it is
//! done in parts, each part costs a wave of tiles that is not full, copies, launches that only
//! wait, and separate additions.
//!
//! **Solution.** `kernels/gemm_sm90_scatter.cu` multiplies the tiles of other owners first, and
//! stores them by tensor maps of the owners' inboxes. The thread that stored a consumer's part of a
//! tile waits until the store is complete and then signals (`flow::Departures`). This rank's own
//! tiles come last. The loader waits for the peers' partials of a tile and loads them, like slabs
//! of A and B, into the ring in shared memory. Tiles are taken in rounds; `Rounds` in
//! [`crate::schedule`] says why no waits form a cycle.
//!
//! **Limits.** Those of [`Gemm`], and: each rank owns at least one row; partials have the type of
//! A; at most eight ranks, and CUDA 12.1 for more than two. All workgroups of the launch are
//! resident.

use bytemuck::{Pod, Zeroable};
use iris_heap::{Function, Gpu, LaunchShape, Result, Stream, SymmetricHeap};

use super::choice::{NARROW, WIDEST};
use super::kernels::PEERS;
use super::{Config, Fusion, Gemm, GemmKernel, GemmLaunch, TensorMap, is_aligned};
use crate::args::{Matrix, OpArgs, rows_of};
use crate::build::FaultInjection;
use crate::library::GemmRequest;
use crate::schedule::split;

const MOST_PEERS: usize = PEERS[PEERS.len() - 1];

/// Division of C into one block of rows per rank, counted in rows of a cluster's tiles, and the
/// numbers of signals; same layout as `Blocks` in `gemm_sm90_scatter.cu`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Blocks {
    rows: u32,
    span: u32,
    first: u32,
    results: u32,
    across: u32,
    adds: u32,
    sends: u32,
}

/// Messages that the launch sends itself. Each has the arguments of the kernel that would send it
/// otherwise, and the number of its first signal; `None` if the call has no such message.
#[derive(Clone, Copy, Debug)]
pub struct Messages<'a> {
    /// Message that sends partials (rows of the sender's product) to the ranks that own these rows.
    pub blocks: Option<(&'a OpArgs, u32)>,
    /// Message that sends finished rows from the rank that owns them to all ranks.
    pub results: Option<(&'a OpArgs, u32)>,
}

/// Loaded kernels of GEMMs that store each tile at the rank that owns its rows.
#[derive(Debug)]
pub struct Scattering {
    gemm: Gemm,
    /// Number of rows and columns of C that share a signal.
    signalled: [u32; 2],
    /// Number of peers for which the kernels are built.
    peers: usize,
    /// Number of workgroups that can be resident at once. A launch with more could deadlock:
    /// resident workgroups of the peers would wait for tiles of workgroups that cannot start.
    resident: u32,
}

impl Scattering {
    /// Largest number of ranks for which there are builds.
    pub const RANKS: usize = MOST_PEERS + 1;

    /// Number of rows and columns of C that share a signal: the rows that a consumer warpgroup
    /// multiplies, and the columns of a tile. A rank multiplies up to `rows` rows and `cols`
    /// columns and owns up to `own` rows of C.
    ///
    /// Tiles are narrow in two cases. If the widest tiles made only one wave on the device, all
    /// data for peers would be sent at its end; narrow tiles make two waves, and the first is sent
    /// during the second (2 x H200, 128 vs 256 columns: all-reduce of 512 rows, one wave of wide
    /// tiles, 73.7 vs 81.3 us; reduce-scatter of 1024 rows, two waves, 112 vs 100 us; 2026-11-22).
    /// And if one tile has all rows that a rank owns, narrow tiles have no cluster, because the
    /// second workgroup of a cluster would multiply nothing.
    pub fn signalled(rows: usize, own: usize, cols: usize, multiprocessors: u32) -> [u32; 2] {
        const TALL: usize = 128;
        let widest = rows.div_ceil(TALL) * cols.div_ceil(WIDEST as usize);
        let narrow = own <= TALL || widest <= multiprocessors as usize;
        [TALL as u32 / 2, if narrow { NARROW } else { WIDEST }]
    }

    /// Build, for row-major A and B, for a C of `shape[0]` x `shape[1]` that is divided among
    /// `ranks` ranks, and a depth of `shape[2]`. `signalled` is the number of rows and columns that
    /// share a signal. `None` if no build can do it.
    pub(super) fn build(
        signalled: [u32; 2],
        shape @ [m, ..]: [usize; 3],
        ranks: usize,
    ) -> Option<Config> {
        let [64, width @ (NARROW | WIDEST)] = signalled else { return None };
        // Each rank owns at least one row.
        if ranks > Self::RANKS || m < ranks {
            return None;
        }
        let own = m.div_ceil(ranks.max(1));
        Config::storing(width, own).into_iter().find(|it| it.takes(shape))
    }

    /// Builds that an operator loads for calls of up to `most` rows.
    pub(super) fn builds(
        signalled: [u32; 2],
        [most, n, k]: [usize; 3],
        ranks: usize,
    ) -> Vec<Config> {
        Config::of_rows(most, |rows| Self::build(signalled, [rows, n, k], ranks))
    }

    /// Loads the builds for a product; `None` if there are none for the device and types.
    ///
    /// # Errors
    /// Errors of [`Gemm::of`].
    pub fn new(
        heap: &SymmetricHeap,
        whole: &GemmRequest,
        fault_injection: FaultInjection,
    ) -> Result<Option<Scattering>> {
        let Some(signalled) = whole.signalled else { return Ok(None) };
        let size = heap.local_size();
        let configs = Self::builds(signalled, whole.shape, size);
        let Some(peers) = PEERS.into_iter().find(|&peers| size <= peers + 1) else {
            return Ok(None);
        };
        let in_order = whole.batch_invariant;
        let kernel = (GemmKernel::Scattering { peers, in_order }, fault_injection);
        let Some(gemm) = Gemm::for_whole(heap, whole, configs, kernel)? else {
            return Ok(None);
        };
        let mut resident = u32::MAX;
        for (config, function) in &gemm.kernels {
            let shape = LaunchShape {
                groups: gemm.multiprocessors / config.cluster * config.cluster,
                threads: config.threads(),
                shared_bytes: config.shared_bytes(),
                early: false,
            };
            let clusters = function.resident_clusters(shape, config.cluster)?;
            resident = resident.min(clusters / heap.ranks_on_device() * config.cluster);
        }
        Ok((resident > 0).then_some(Scattering { gemm, signalled, peers, resident }))
    }

    /// Build, grid and kernel for the launch of this call; `None` if no loaded build can do the
    /// call.
    fn fitting(&self, args: &OpArgs, messages: &Messages<'_>) -> Option<(GemmLaunch, &Function)> {
        let Messages { blocks, results } = *messages;
        let alike = [blocks, results].into_iter().flatten().all(|(message, _)| {
            message.c.dtype == args.c.dtype && [message.tile_m, message.tile_n] == self.signalled
        });
        let residual = &args.residual;
        let alike = alike
            && (residual.address == 0
                || residual.dtype == args.c.dtype
                    && residual.transposed == 0
                    && is_aligned(residual));
        let owners = if blocks.is_some() { args.channel.size as usize } else { 1 };
        let fusion = Fusion::Storing { signalled: self.signalled, owners };
        alike.then(|| self.gemm.fitting(args, &fusion)).flatten()
    }

    /// Whether a build is loaded that can do this call.
    pub fn fits(&self, args: &OpArgs, messages: &Messages<'_>) -> bool {
        self.fitting(args, messages).is_some()
    }

    /// Enqueues the product of a call; returns false if there is no build for it. `args` are the
    /// arguments of the product: C and the residual have this rank's rows; A has the rows of all
    /// ranks if there is a message of partials, else this rank's rows.
    ///
    /// # Errors
    /// Errors of [`Gemm::launch`].
    ///
    /// # Safety
    /// The conditions of [`Gemm::launch`] hold, also for the matrices of the messages on all ranks.
    /// An earlier launch has opened the call.
    #[allow(unsafe_code, reason = "the kernel is given the addresses of matrices")]
    pub unsafe fn launch(
        &self,
        (gpu, stream): (&Gpu, &Stream),
        args: &OpArgs,
        messages: &Messages<'_>,
    ) -> Result<bool> {
        let Some((launch, function)) = self.fitting(args, messages) else {
            return Ok(false);
        };
        let config = &launch.config;
        let OpArgs { ref heap, ref channel, .. } = *args;
        let (dtype, size, rank) = (self.gemm.dtype, channel.size, channel.rank);
        let owned = |rank| split(args.m, size, rank);
        let at_peer = |rows: Matrix, peer: u32| {
            let [here, there] = [heap.rank, peer].map(|it| heap.data[it as usize]);
            Matrix { address: rows.address - here + there, ..rows }
        };
        // Matrices at a peer to which this rank stores. `block`: the peer's inbox for partials, at
        // the block for this rank. `result`: the peer's workspace for results, at the rows that
        // this rank owns. `direct`: the peer's C itself, if it has the same offset in the heap.
        let block = |peer| {
            let len = owned(peer).end - owned(peer).start;
            messages.blocks.map(|(it, _)| rows_of(it.c, &(rank * len..(rank + 1) * len)))
        };
        let result = |_| messages.results.map(|(it, _)| rows_of(it.c, &owned(rank)));
        let sends = messages.results.is_some() && args.record.direct != 0;
        let direct = |_| sends.then_some(args.c);
        let maps_of = |of: &dyn Fn(u32) -> Option<Matrix>| -> Result<[TensorMap; MOST_PEERS]> {
            let mut maps = [TensorMap::zeroed(); MOST_PEERS];
            for (map, peer) in maps.iter_mut().zip(channel.peers()) {
                if let Some(rows) = of(peer) {
                    *map = config.c_map(dtype, &at_peer(rows, peer))?;
                }
            }
            Ok(maps)
        };
        let added = |matrix: Option<&Matrix>| match matrix {
            Some(it) => TensorMap::new(dtype, it, [config.chunk_cols(), config.rows()]),
            None => Ok(TensorMap::zeroed()),
        };
        let residual = Some(&args.residual).filter(|it| it.address != 0);
        let (maps, inbox, residual, at) = gpu.current(|| {
            let inbox = added(messages.blocks.map(|(it, _)| &it.c))?;
            let maps = config.maps(dtype, [&args.a, &args.b, &args.c])?;
            let at = [maps_of(&block)?, maps_of(&result)?, maps_of(&direct)?];
            Ok((maps, inbox, added(residual)?, at))
        })?;
        let [owners, all, direct] = at;
        let (mut given, mut shape) = self.gemm.given(&launch, args);
        shape.groups = shape.groups.min(self.resident);
        given.group = given.group.min(given.row_units);
        given.wait_for_peers(heap);
        let tiles = given.row_units * given.col_tiles;
        let first = |message: Option<(&OpArgs, u32)>| message.map_or(0, |(_, first)| first);
        let blocks = Blocks {
            rows: given.row_units,
            span: span(shape.groups / config.cluster, messages.results.map(|_| size)).min(tiles),
            first: first(messages.blocks),
            results: first(messages.results),
            across: given.col_tiles,
            adds: messages.blocks.is_some().into(),
            sends: messages.results.is_some().into(),
        };
        let [a, b, c] = &maps;
        let given = [
            a.bytes(),
            b.bytes(),
            c.bytes(),
            inbox.bytes(),
            residual.bytes(),
            bytemuck::cast_slice(&owners[..self.peers]),
            bytemuck::cast_slice(&all[..self.peers]),
            bytemuck::cast_slice(&direct[..self.peers]),
            bytemuck::bytes_of(&given),
            bytemuck::bytes_of(&blocks),
            bytemuck::bytes_of(args),
        ];
        // SAFETY: the parameters are those of `iris_gemm_scatter`; the caller vouches for the
        // matrices and for the peers; workgroups wait for others of their cluster, which start
        // together, and for tiles of peers, which these store before they wait.
        unsafe { function.launch(stream, shape, &given) }.map(|()| true)
    }
}

/// Number of cluster tiles (one tile for each workgroup of a cluster) that each owning rank has in
/// a round of the order `Rounds`. By default it is `clusters`, the number of clusters that run at
/// once. If `senders` ranks send their own tiles to all others, it is smaller, so that a round has
/// as many tiles of other ranks as there are clusters. Then at any time some clusters send own
/// tiles to all ranks and the others do not, so the links are loaded evenly, and all clusters have
/// equally many own tiles. All-reduce of 8192 x 8192 x 3584 on 4 x H100 with 66, 24, 22, 20 and 16
/// tiles for 66 clusters: 866, 822, 807, 843 and 920 us; reduce-scatters gain nothing (2026-11-27).
fn span(clusters: u32, senders: Option<u32>) -> u32 {
    let others = senders.map_or(1, |size| (size - 1).max(1));
    (clusters / others).max(1)
}

const _: () = assert!(size_of::<Blocks>() == 28);

#[cfg(test)]
mod tests {
    use iris_heap::DType;

    use super::*;
    use crate::gemm::GemmCall;

    #[test]
    fn a_round_of_other_ranks_tiles_is_one_for_each_cluster_if_results_are_sent() {
        assert_eq!([None, Some(2), Some(4)].map(|senders| span(66, senders)), [66, 66, 22]);
        assert_eq!(span(2, Some(8)), 1);
    }

    #[test]
    fn tiles_are_narrow_while_the_widest_make_one_wave_of_the_device() {
        // The three products would have 4 x 32, 4 x 33 and 4 x 34 of the widest tiles (128 x 256),
        // of which the device multiplies 132 at once.
        let columns =
            |cols, multiprocessors| Scattering::signalled(512, 256, cols, multiprocessors)[1];
        assert_eq!([columns(8192, 132), columns(8448, 132), columns(8449, 132)], [128, 128, 256]);
        assert_eq!([columns(8192, 114), columns(7168, 114)], [256, 128]);
    }

    #[test]
    fn a_plan_of_many_rows_has_the_build_of_calls_with_few() {
        let builds = |width, rows, size| Scattering::builds([64, width], [rows, 8192, 3584], size);
        for own in [1, 128, 129, 4096] {
            let [build, _] = Config::storing(NARROW, own);
            assert!(builds(NARROW, 8192, 2).contains(&build), "{own} rows of a rank");
        }
        assert_eq!([builds(NARROW, 256, 2).len(), builds(NARROW, 8192, 2).len()], [1, 2]);
        assert_eq!(builds(WIDEST, 8192, 2).len(), 1);
        assert_eq!(builds(NARROW, 8192, Scattering::RANKS + 1), []);
    }

    #[test]
    fn a_call_of_few_rows_is_launched_in_one_wave() {
        let of = |rows, ranks| {
            let call = GemmCall {
                is_there: true,
                shape: [rows, 8192, 3584],
                most: 8192,
                dtypes: [DType::BF16; 3],
                has_epilogue: false,
                is_aligned: true,
                layout: (false, false),
                ranks,
                multiprocessors: 132,
                k_parts: 1,
            };
            let fusion = Fusion::Storing { signalled: [64, NARROW], owners: ranks };
            let launch = call.launch(&fusion)?;
            Some((launch.config.cluster, launch.grid.groups, launch.grid.waves))
        };
        assert_eq!([of(256, 2), of(257, 2)], [Some((1, 128, 1)), Some((2, 128, 2))]);
        // Each rank owns at least one row, and there are builds for eight ranks.
        assert_eq!([of(1, 2), of(8, 9)], [None; 2]);
    }

    #[test]
    fn a_grid_has_a_workgroup_for_each_tile_of_every_owner() {
        // Eight ranks that own 38 rows each need 64 tiles; a matrix of 300 rows would need only 24.
        let [build, _] = Config::storing(NARROW, 38);
        let grid = build.grid([38, 1024], 8, 132);
        assert_eq!((grid.row_units, grid.groups), (1, 64));
        assert_eq!(build.grid([300, 1024], 1, 132).groups, 24);
    }

    #[test]
    fn a_rank_that_owns_one_tile_of_rows_multiplies_no_second() {
        for (rows, own, cluster) in [(1024, 128, 1), (1024, 129, 2), (2048, 256, 2), (4, 1, 1)] {
            let [_, width] = Scattering::signalled(rows, own, 8192, 132);
            assert!(Config::storing(width, own).iter().all(|it| it.cluster == cluster), "{own}");
        }
    }
}
