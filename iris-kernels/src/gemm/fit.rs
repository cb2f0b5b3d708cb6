//! Answer to how the built-in GEMM does a product: whether there is a build for it, and the build,
//! tiles, workgroups and waves of its launch.
//!
//! **Problem.** A plan chooses tiles, a prediction adds up waves, and a launch takes one of the
//! loaded builds. If each derives builds and grids by itself, they differ for some rows, and a plan
//! is then made for a launch that never happens.
//!
//! **Solution.** [`GemmCall::launch`] answers for all of them. A prediction offers it the builds
//! that an operator would load, a launch the builds that are loaded.
//!
//! **Limits.** A [`GemmCall`] has no bias and no residual. A launch also tests those, and how many
//! workgroups are resident at once.

use iris_heap::DType;

use super::kernels::GemmKernel;
use super::{Config, Exchanging, Gathering, Grid, Parts, Scattering};
use crate::dtype::has_mma;

/// Product of a call, as far as the choice of a launch depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GemmCall {
    /// Whether the device has the built-in GEMM ([`super::Gemm::is_there_for`]).
    pub is_there: bool,
    /// M, N and K.
    pub shape: [usize; 3],
    /// Number of rows of the largest call, for which builds are loaded.
    pub most: usize,
    /// Element types of A and B, of C, and of the message that the launch handles; without a
    /// message, the type of C again.
    pub dtypes: [DType; 3],
    /// Whether elements of C are results of a function, the epilogue.
    pub has_epilogue: bool,
    /// Whether lines of A, B and C begin at multiples of 16 bytes.
    pub is_aligned: bool,
    /// Storage orders of A and B, as in [`Config::with_layout`].
    pub layout: (bool, bool),
    /// Number of ranks, among which rows of C are divided.
    pub ranks: usize,
    /// Number of multiprocessors that the launch may use.
    pub multiprocessors: u32,
}

/// Message that a GEMM handles in its own launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fusion {
    /// No message.
    None,
    /// Wait for these parts of A ([`Gathering`]).
    Gated(Parts),
    /// Stores of tiles at the ranks that own or need them ([`Scattering`]).
    Storing {
        /// Number of rows and columns of C that share a signal.
        signalled: [u32; 2],
        /// Number of ranks whose blocks of C this rank multiplies.
        owners: usize,
    },
    /// All-reduce of few rows ([`Exchanging`]).
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
    /// Tiles and workgroups, if as many workgroups are resident as the device has multiprocessors.
    pub grid: Grid,
}

impl GemmCall {
    /// Whether the built-in GEMM multiplies such operands, for some number of rows.
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

    /// Launch of an operator that has loaded its builds for `fusion`; `None` if no build can do the
    /// call.
    pub fn launch(&self, fusion: &Fusion) -> Option<GemmLaunch> {
        let [_, n, k] = self.shape;
        let (shape, multiprocessors) = ([self.most, n, k], self.multiprocessors);
        if !self.is_served() {
            return None;
        }
        let builds = match *fusion {
            Fusion::None => Config::of_plan(shape, multiprocessors),
            Fusion::Gated(_) => Gathering::builds(shape, multiprocessors),
            Fusion::Storing { signalled, .. } => Scattering::builds(signalled, shape, self.ranks),
            Fusion::Exchanging { tile, .. } => {
                Exchanging::build(shape, tile, multiprocessors).into_iter().collect()
            }
        };
        let builds = builds.into_iter().map(|config| config.with_layout(self.layout));
        self.launch_of(builds, fusion)
    }

    /// Launch of the build with the lowest [`Config::cost`] among those of `builds` that can do the
    /// call; `None` if none can.
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
        // Each workgroup of an exchange has one tile.
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
            // The message must have the tiles of the product.
            Fusion::Exchanging { tile: Some([tile_m, tile_n]), .. } => {
                tile_m as usize >= rows && tile_n == config.rows()
            }
        }
    }

    /// Tiles and workgroups of a launch of the build `config`.
    fn grid(&self, config: &Config, call: &GemmCall) -> Grid {
        let [m, n, _] = call.shape.map(|it| it as u32);
        let (shape, blocks) = match *self {
            // A block has the rows of the largest owner.
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
            Fusion::Storing { .. } => GemmKernel::Scattering { peers: 1 },
            Fusion::Exchanging { tile: None, .. } => GemmKernel::ExchangingLl { pair: true },
            Fusion::Exchanging { tile: Some(_), .. } => GemmKernel::ExchangingTiles,
        };
        kernel.name()
    }
}
