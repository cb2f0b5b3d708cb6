//! Decides how the built-in GEMM does a product: whether a build supports it, and the build, tiles,
//! workgroups and waves of the launch.
//!
//! **Problem.** Three pieces of code need the answer: the plan that chooses tiles, the prediction
//! of times, and the launch itself. If each derived builds and grids by itself, they would differ
//! for some numbers of rows, and a plan would be made for a launch that never happens.
//!
//! **Solution.** [`GemmCall::launch`] answers for plan and prediction, from the builds that an
//! operator would load. A launch uses the same code with the builds that are loaded.
//!
//! **Limits.** A [`GemmCall`] has no bias and no residual. A launch also tests those, and how many
//! workgroups are resident at once.

use iris_heap::DType;

use super::kernels::GemmKernel;
use super::{Config, Exchanging, Gathering, Grid, Parts, Scattering};
use crate::dtype::has_mma;

/// Properties of a call's product on which the choice of build and grid depends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GemmCall {
    /// Whether the built-in GEMM exists for the device ([`super::Gemm::is_there_for`]).
    pub is_there: bool,
    /// M, N and K.
    pub shape: [usize; 3],
    /// Number of rows of the operator's largest call. The builds that are loaded are those that
    /// calls of up to this size may need.
    pub most: usize,
    /// Element types of A and B, of C, and of the message that the launch handles; without a
    /// message, the type of C again.
    pub dtypes: [DType; 3],
    /// Whether a function (epilogue, for example GELU) is applied to the elements of C.
    pub has_epilogue: bool,
    /// Whether all rows (columns, if column-major) of A, B and C begin at multiples of 16 bytes.
    pub is_aligned: bool,
    /// Storage orders of A and B, as in [`Config::with_layout`].
    pub layout: (bool, bool),
    /// Number of ranks, among which rows of C are divided.
    pub ranks: usize,
    /// Number of multiprocessors that the launch may use.
    pub multiprocessors: u32,
    /// Number of ranges of K whose products are added in the order of K.
    pub k_parts: u32,
}

/// Message that a GEMM handles in its own launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fusion {
    /// No message.
    None,
    /// The GEMM waits for these parts of A, which arrive from other ranks while it runs
    /// ([`Gathering`]).
    Gated(Parts),
    /// The GEMM stores its tiles directly at the ranks that own or need them ([`Scattering`]).
    Storing {
        /// Number of rows and columns of C that share a signal.
        signalled: [u32; 2],
        /// Number of ranks whose blocks of C this rank multiplies.
        owners: usize,
    },
    /// The GEMM also does the all-reduce of its result, which has few rows ([`Exchanging`]).
    Exchanging {
        /// Rows and columns of a tile of the message; `None` for a message by the LL protocol.
        tile: Option<[u32; 2]>,
        /// Whether an RMSNorm of the rows follows.
        normed: bool,
    },
}

/// Launch of the built-in GEMM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GemmLaunch {
    /// Build.
    pub config: Config,
    /// Tiles and workgroups, if one workgroup can be resident on each multiprocessor.
    pub grid: Grid,
}

impl GemmCall {
    /// Whether the built-in GEMM supports these operands, whatever their number of rows.
    pub fn is_served(&self) -> bool {
        let [factors, result, sent] = self.dtypes;
        let [_, n, k] = self.shape;
        self.is_there
            && has_mma(factors)
            && [result, sent] == [factors; 2]
            && self.is_aligned
            && !self.has_epilogue
            // TMA stores at the edge of C need rows of whole multiples of 16 bytes.
            && n.is_multiple_of(8)
            && n > 0
            && k > 0
    }

    /// Build and grid of the call's launch, chosen from the builds that an operator loads for
    /// `fusion`; `None` if no build can do the call.
    pub fn launch(&self, fusion: &Fusion) -> Option<GemmLaunch> {
        let [_, n, k] = self.shape;
        let (shape, multiprocessors) = ([self.most, n, k], self.multiprocessors);
        if !self.is_served() {
            return None;
        }
        let builds = match *fusion {
            Fusion::None => Config::of_plan(shape, multiprocessors, self.k_parts),
            Fusion::Gated(_) => Gathering::builds(shape, multiprocessors, self.k_parts),
            _ if self.k_parts > 1 => Vec::new(),
            Fusion::Storing { signalled, .. } => Scattering::builds(signalled, shape, self.ranks),
            Fusion::Exchanging { tile, .. } => {
                Exchanging::build(shape, tile, multiprocessors).into_iter().collect()
            }
        };
        let builds = builds.into_iter().map(|config| config.with_layout(self.layout));
        self.launch_of(builds, fusion)
    }

    /// Build and grid of the call's launch: the build of `builds` with the lowest [`Config::cost`]
    /// that can do the call; `None` if no build can.
    pub(super) fn launch_of(
        &self,
        builds: impl Iterator<Item = Config>,
        fusion: &Fusion,
    ) -> Option<GemmLaunch> {
        let Self { shape, multiprocessors, .. } = *self;
        if !self.is_served() || !(1..=self.most).contains(&shape[0]) {
            return None;
        }
        let takes = |config: &Config| {
            config.layout() == self.layout && config.takes(shape) && fusion.suits(config, self)
        };
        let config =
            builds.filter(takes).min_by_key(|config| config.cost(shape, multiprocessors))?;
        let grid = fusion.grid(&config, self);
        // A GEMM that also does the all-reduce needs one workgroup per tile, so all tiles must be
        // in one wave.
        let fits = !matches!(fusion, Fusion::Exchanging { .. }) || grid.waves <= 1;
        fits.then_some(GemmLaunch { config, grid })
    }
}

impl Fusion {
    /// Whether the build `config` can handle the message of `call`.
    fn suits(&self, config: &Config, call: &GemmCall) -> bool {
        let rows = call.shape[0];
        match *self {
            Fusion::None => true,
            Fusion::Gated(parts) => parts.suit(config),
            Fusion::Storing { signalled, .. } => {
                Scattering::build(signalled, call.shape, call.ranks)
                    .is_some_and(|build| *config == build.with_layout(config.layout()))
            }
            Fusion::Exchanging { tile: None, normed } => !normed || rows <= Exchanging::NORMED_ROWS,
            // The tiles of the message must be the tiles of the product.
            Fusion::Exchanging { tile: Some([tile_m, tile_n]), .. } => {
                tile_m as usize >= rows && tile_n == config.rows()
            }
        }
    }

    /// Tiles and workgroups of a launch of the build `config`.
    fn grid(&self, config: &Config, call: &GemmCall) -> Grid {
        let [m, n, _] = call.shape.map(|it| it as u32);
        let (shape, blocks) = match *self {
            // The grid has one block of rows per owner, as large as the largest owner's.
            Fusion::Storing { owners, .. } => ([m.div_ceil(call.ranks as u32), n], owners as u32),
            _ if config.flipped => ([n, m], 1),
            _ => ([m, n], 1),
        };
        config.grid(shape, blocks, call.multiprocessors)
    }

    /// Name of the kernel that multiplies and handles the message.
    pub fn kernel(&self) -> &'static str {
        let kernel = match self {
            Fusion::None => GemmKernel::Plain,
            Fusion::Gated(_) => GemmKernel::Gathering,
            Fusion::Storing { .. } => GemmKernel::Scattering { peers: 1, in_order: false },
            Fusion::Exchanging { tile: None, .. } => GemmKernel::ExchangingLl { pair: true },
            Fusion::Exchanging { tile: Some(_), .. } => GemmKernel::ExchangingTiles,
        };
        kernel.name()
    }
}
