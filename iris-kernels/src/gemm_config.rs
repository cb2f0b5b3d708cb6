//! Compile-time parameters of all GEMMs: tile sizes, threads, shared memory, element types, bytes
//! of K per slab, and pipeline stages.
//!
//! **Problem.** Host code needs these numbers to launch a kernel, and device code needs them to be
//! compiled. A new element size or device changes many of them at once.
//!
//! **Solution.** The host defines the numbers and passes them to the headers as macros; the headers
//! assert the numbers that they can derive. [`TileConfig`] is for the GEMM by tiles, with any
//! instruction set in [`Core`]; [`CoreConfig`] is for the whole-matrix GEMM. A slab is the part of
//! A and B along K that is loaded at a time. Its depth is given in bytes, because shared-memory
//! lines and copies have a fixed number of bytes; the depth in elements follows from the type.
//!
//! **Limits.** A and B have the same type.

use crate::dtype::{self, Row};
use crate::rtc::Options;

/// Number of threads per workgroup of device kernels that contain a tile GEMM, and of users'
/// kernels.
pub const THREADS: u32 = 256;

/// Number of threads per workgroup of message kernels, which only exchange data between ranks. Few
/// workgroups suffice to fill a link if each of them is large and has many bytes in flight. More
/// workgroups would send more signals, and each signal's release waits until all stores of its
/// workgroup are done.
pub const MESSAGE_THREADS: u32 = 512;

/// Number of threads of the single workgroup of a barrier.
pub const BARRIER_THREADS: u32 = 32;

/// Largest tile that a build of a kernel can process. An operator may use any smaller tile with the
/// same build.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs, reason = "as the type says")]
pub struct TileSize {
    pub m: u32,
    pub n: u32,
}

impl TileSize {
    /// All tile sizes that kernels are built for, largest first.
    pub const ALL: [TileSize; 3] =
        [TileSize { m: 128, n: 128 }, TileSize { m: 64, n: 64 }, TileSize { m: 32, n: 32 }];

    /// Smallest size of a build into which a tile fits; `None` if the tile is too large for every
    /// build.
    pub fn fitting(tile_m: u32, tile_n: u32) -> Option<TileSize> {
        Self::ALL.into_iter().rev().find(|size| tile_m <= size.m && tile_n <= size.n)
    }
}

/// Instruction set of a tile GEMM. Each variant has a header in `kernels/iris/gemm/`; `product.h`
/// in that folder selects one of the headers by the same conditions as [`Core::of`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Core {
    /// Instruction wgmma, for f16 and bf16 in tiles of 128 x 128.
    Sm90,
    /// Instruction wgmma with operands swapped, for f16 and bf16 in tiles of 64 x 64 with few rows.
    Sm90Flipped,
    /// Instruction mma.sync, for f16 and bf16.
    Sm80,
    /// Instruction MFMA, for every type, on CDNA GPUs (gfx90a, gfx942, gfx950).
    Cdna3,
    /// Ordinary multiply-add, for every architecture and type.
    Fma,
}

impl Core {
    /// Returns the instruction set for an architecture (`sm_90a`, `gfx942`), element type (a
    /// [`crate::args::dtype_code`]) and tile size.
    pub fn of(arch: &str, dtype: u32, size: TileSize) -> Core {
        let arch = arch_of(arch);
        let mma = Row::of(dtype).mma.is_some();
        match arch {
            "sm_90a" | "compute_90a" if mma && size == TileSize::ALL[0] => Core::Sm90,
            "sm_90a" | "compute_90a" if mma && size == TileSize::ALL[1] => Core::Sm90Flipped,
            _ if mma && (arch.starts_with("sm_") || arch.starts_with("compute_")) => Core::Sm80,
            "gfx90a" | "gfx942" | "gfx950" => Core::Cdna3,
            _ => Core::Fma,
        }
    }
}

/// Strips the feature suffixes of an architecture's name: `gfx942:sramecc+` becomes `gfx942`.
fn arch_of(arch: &str) -> &str {
    arch.split(':').next().unwrap_or_default()
}

fn element_bytes(dtype: u32) -> u32 {
    dtype::element_bytes(dtype) as u32
}

/// Compile-time parameters of a tile GEMM, which a kernel calls tile by tile: the macros of
/// `iris/gemm_config.h`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TileConfig {
    /// Largest tile that the build can process.
    pub size: TileSize,
    /// Element type of A and B, as a [`crate::args::dtype_code`].
    pub dtype: u32,
    /// Instruction set by which the GEMM multiplies.
    pub core: Core,
    /// Bytes of one row of A, and of one column of B, in a slab along K.
    pub slab_bytes: u32,
    /// Number of slabs that shared memory holds at a time.
    pub stages: u32,
    /// Number of dies of the device, each with its own L2 cache. The device distributes workgroups
    /// over the dies round-robin; see [`crate::schedule::die_swizzle`]. A wrong number makes the
    /// GEMM slower, but its results stay right.
    pub dies: u32,
}

/// Number of dies of an MI300X, MI325X or MI355X that is used as one device.
const DIES_GFX94: u32 = 8;

impl TileConfig {
    /// Parameters of the tile GEMM for an architecture, element type code and tile size.
    pub fn of(arch: &str, dtype: u32, size: TileSize) -> TileConfig {
        let core = Core::of(arch, dtype, size);
        let smallest = size.m <= 32;
        let (slab_bytes, stages) = match core {
            // A slab row of 128 bytes matches the 128-byte swizzle of shared memory. With three
            // stages, two workgroups fit on a multiprocessor.
            Core::Sm90 => (128, 3),
            // If the tile has few rows, loads of B take most of the time. So there are as many
            // stages as fit into shared memory with two workgroups on a multiprocessor.
            Core::Sm90Flipped => (128, 7),
            Core::Sm80 => (if smallest { 32 } else { 64 }, 2),
            // For tiles of 128 rows, two stages of 32 bytes let three workgroups fit on a compute
            // unit. For smaller tiles, MFMA blocks of 16 x 16 consume 64 bytes at a time.
            Core::Cdna3 => (if size.m == 128 { 32 } else { 64 }, 2),
            Core::Fma => (element_bytes(dtype) * if smallest { 16 } else { 32 }, 1),
        };
        let dies = match arch_of(arch) {
            "gfx942" | "gfx950" => DIES_GFX94,
            _ => 1,
        };
        TileConfig { size, dtype, core, slab_bytes, stages, dies }
    }

    /// Number of columns of A, and of rows of B, in a slab.
    pub fn depth(&self) -> u32 {
        self.slab_bytes / element_bytes(self.dtype)
    }

    /// Bytes of dynamic shared memory per workgroup; 0 if the kernel declares its shared memory
    /// statically. `product.h` asserts this number.
    pub fn shared_bytes(&self) -> u32 {
        match self.core {
            // Shared memory contains the slabs of A and B for all stages. 1024 bytes are added to
            // align them.
            Core::Sm90 | Core::Sm90Flipped => {
                self.stages * (self.size.m + self.size.n) * self.slab_bytes + 1024
            }
            Core::Sm80 | Core::Cdna3 | Core::Fma => 0,
        }
    }

    /// Compile options: the macros that define these parameters.
    pub fn options(&self) -> Options {
        Options::new()
            .define("IRIS_FACTOR", self.dtype)
            .define("IRIS_TILE_M", self.size.m)
            .define("IRIS_TILE_N", self.size.n)
            .define("IRIS_SLAB_BYTES", self.slab_bytes)
            .define("IRIS_STAGES", self.stages)
            .define("IRIS_SHARED_BYTES", self.shared_bytes())
            .define("IRIS_DIES", self.dies)
            // The kernel is built for two workgroups per multiprocessor: one multiplies while the
            // other waits.
            .define("IRIS_TOGETHER", 2)
    }
}

/// Tiles and workgroups of a launch of the whole-matrix GEMM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grid {
    /// Number of clusters of workgroups, one above the other, that cover the rows of C or of a
    /// block of C.
    pub(crate) row_units: u32,
    /// Number of tiles in a row of C.
    pub(crate) col_tiles: u32,
    /// Number of workgroups.
    pub groups: u32,
    /// Largest number of tiles that a workgroup multiplies.
    pub waves: u32,
}

/// Compile-time parameters of the whole-matrix GEMM kernel, passed as macros of `iris/gemm/core.h`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CoreConfig {
    /// Number of columns of a tile.
    pub width: u32,
    /// Number of consumer warpgroups; each multiplies 64 rows of a tile.
    pub groups: u32,
    /// Number of workgroups per cluster.
    pub cluster: u32,
    /// Number of stages (slabs of A and B) in the shared-memory ring.
    pub stages: u32,
    /// Whether the kernel stores a tile while it multiplies the next tile (deferred store).
    pub hold: bool,
    /// Whether the kernel computes tiles of the transpose of C instead of tiles of C.
    pub flipped: bool,
    /// Whether K is the strided dimension of the left factor of a tile; otherwise K is contiguous.
    pub a_across: bool,
    /// Whether K is the strided dimension of the right factor of a tile; otherwise K is contiguous.
    pub b_across: bool,
    /// Number of cluster rows that the kernel processes before it goes on to the next column of
    /// tiles.
    pub group: u32,
    /// Number of ranges of K whose products are added in the order of K; 1 for one sum over all of K.
    pub k_parts: u32,
}

impl CoreConfig {
    /// Bytes of each row of A, and of each column of B, in one slab of K: the width of the 128-byte
    /// swizzle.
    pub const SLAB_BYTES: u32 = 128;

    /// Number of columns of A, and of rows of B, in a slab of two-byte elements.
    pub const DEPTH: u32 = Self::SLAB_BYTES / 2;

    /// Parameters for tiles of C that are `width` columns wide, for row-major A and B.
    pub fn wide(width: u32, cluster: u32, stages: u32) -> CoreConfig {
        CoreConfig {
            width,
            groups: 2,
            cluster,
            stages,
            hold: width > 64,
            flipped: false,
            a_across: false,
            b_across: true,
            group: 8,
            k_parts: 1,
        }
    }

    /// Parameters for tiles of the transpose of C, for up to `width` rows of C, with row-major A
    /// and B. If there is only one consumer warpgroup, more workgroups load at the same time.
    pub fn flipped(width: u32, groups: u32, stages: u32) -> CoreConfig {
        CoreConfig {
            width,
            groups,
            cluster: 1,
            stages,
            hold: false,
            flipped: true,
            a_across: true,
            b_across: false,
            group: 8,
            k_parts: 1,
        }
    }

    /// Returns the same parameters for other storage orders of A and B. In the pair, true is
    /// column-major and false is row-major.
    #[must_use]
    pub fn with_layout(self, (a_columns, b_columns): (bool, bool)) -> CoreConfig {
        if self.flipped {
            CoreConfig { a_across: !b_columns, b_across: a_columns, ..self }
        } else {
            CoreConfig { a_across: a_columns, b_across: !b_columns, ..self }
        }
    }

    /// Storage orders of A and B as a pair: true is column-major, false is row-major.
    pub fn layout(&self) -> (bool, bool) {
        if self.flipped { (self.b_across, !self.a_across) } else { (self.a_across, !self.b_across) }
    }

    /// Number of rows of a tile.
    pub fn rows(&self) -> u32 {
        64 * self.groups
    }

    /// Number of rows that the tiles of one cluster cover.
    pub fn unit_rows(&self) -> u32 {
        self.rows() * self.cluster
    }

    /// Number of workgroups that multiply a tile together, each a range of K.
    pub(crate) fn sharers(&self) -> u32 {
        if self.flipped { self.k_parts } else { 1 }
    }

    /// Number of threads per workgroup.
    pub fn threads(&self) -> u32 {
        128 * (self.groups + 1)
    }

    /// Number of columns of a tile that are staged and stored at a time.
    pub(crate) fn chunk_cols(&self) -> u32 {
        match self.width {
            _ if self.sharers() > 1 => 16,
            width if self.flipped => width,
            width if width % 64 == 0 => 64,
            _ => 32,
        }
    }

    pub(crate) fn chunks(&self) -> u32 {
        self.width / self.chunk_cols()
    }

    /// Number of clusters in a column of C, and number of tiles in a row of C, for a C of shape
    /// `rows` x `cols`.
    pub(crate) fn tiles(&self, rows: u32, cols: u32) -> (u32, u32) {
        (rows.div_ceil(self.unit_rows()), cols.div_ceil(self.width))
    }

    /// Tiles and workgroups of a launch that multiplies `blocks` blocks of `rows` x `cols`. A
    /// block's last tile may be partly empty, so there may be more tiles than in a matrix with the
    /// rows of all blocks.
    pub(crate) fn grid(&self, [rows, cols]: [u32; 2], blocks: u32, multiprocessors: u32) -> Grid {
        let (row_units, col_tiles) = self.tiles(rows, cols);
        let tiles = blocks * row_units * col_tiles;
        if self.sharers() > 1 {
            // A cluster multiplies one tile.
            let groups = tiles * self.sharers();
            return Grid { row_units, col_tiles, groups, waves: groups.div_ceil(multiprocessors) };
        }
        let most = multiprocessors / self.cluster;
        // If the tiles fill whole waves of 128 workgroups, a grid of 128 workgroups is faster than
        // a larger grid whose last wave is partial.
        let whole = 128 / self.cluster;
        let clusters = if most > whole && tiles.is_multiple_of(whole) { whole } else { most };
        let clusters = clusters.min(tiles);
        let waves = tiles.div_ceil(clusters.max(1));
        Grid { row_units, col_tiles, groups: clusters * self.cluster, waves }
    }

    /// Bytes of dynamic shared memory; the macro `IRIS_GEMM_SHARED_BYTES`.
    pub fn shared_bytes(&self) -> u32 {
        let b_loaded = match self.b_across {
            // A row-major B is loaded in blocks of 64 columns.
            true => self.width.div_ceil(64) * Self::DEPTH * 128,
            false => self.width * Self::SLAB_BYTES,
        };
        let stage = self.rows() * Self::SLAB_BYTES + b_loaded.next_multiple_of(1024);
        let staging = self.groups * 2 * 64 * self.chunk_cols() * 2;
        let barriers = (2 * self.stages + 4 * self.groups) * 8;
        self.stages * stage + staging + barriers + 1024
    }

    /// Compile options: the macros that define these parameters, for A and B of type `factor` and C of
    /// type `result` (each a [`crate::args::dtype_code`]).
    pub fn options(&self, [factor, result]: [u32; 2]) -> Options {
        let flag = u32::from;
        Options::new()
            .define("IRIS_FACTOR", factor)
            .define("IRIS_RESULT", result)
            .define("IRIS_THREADS", self.threads())
            .define("IRIS_GEMM_WIDTH", self.width)
            .define("IRIS_GEMM_GROUPS", self.groups)
            .define("IRIS_GEMM_CLUSTER", self.cluster)
            .define("IRIS_GEMM_STAGES", self.stages)
            .define("IRIS_GEMM_SLAB_BYTES", Self::SLAB_BYTES)
            .define("IRIS_GEMM_HOLD", flag(self.hold))
            .define("IRIS_GEMM_FLIPPED", flag(self.flipped))
            .define("IRIS_GEMM_PARTS", self.k_parts)
            .define("IRIS_GEMM_A_ACROSS", flag(self.a_across))
            .define("IRIS_GEMM_B_ACROSS", flag(self.b_across))
            .define("IRIS_GEMM_SHARED_BYTES", self.shared_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::{Role, dtype_code};

    #[test]
    fn every_build_of_tiles_is_whole_instructions() {
        for arch in ["sm_80", "sm_90a", "gfx90a", "gfx942:sramecc+:xnack-", "gfx950", "gfx1100"] {
            let factors = Role::Factor.types().filter_map(|it| Some((it, dtype_code(it)?)));
            for ((dtype, code), size) in factors.flat_map(|it| TileSize::ALL.map(|size| (it, size)))
            {
                let config = TileConfig::of(arch, code, size);
                assert!(config.slab_bytes.is_multiple_of(16) && config.depth() > 0, "{config:?}");
                let mma = dtype.size() == 2;
                let expected = match arch {
                    "sm_90a" if mma && size.n == 128 => Core::Sm90,
                    "sm_90a" if mma && size.n == 64 => Core::Sm90Flipped,
                    "sm_80" | "sm_90a" if mma => Core::Sm80,
                    "gfx1100" => Core::Fma,
                    _ if arch.starts_with("gfx9") => Core::Cdna3,
                    _ => Core::Fma,
                };
                assert_eq!(config.core, expected, "{arch}");
                let dies = if ["gfx942", "gfx950"].contains(&arch_of(arch)) { 8 } else { 1 };
                assert_eq!(config.dies, dies, "{arch}");
                // Checks that a workgroup uses at most half of the 227 KiB of shared memory of a
                // multiprocessor, so that two workgroups fit.
                assert!(config.shared_bytes() <= 227 * 512, "{config:?}");
            }
        }
    }

    #[test]
    fn the_smallest_tile_that_is_large_enough_is_taken() {
        let m = |rows, cols| TileSize::fitting(rows, cols).map(|size| size.m);
        assert_eq!(
            [m(1, 8), m(33, 8), m(64, 128), m(128, 129)],
            [Some(32), Some(64), Some(128), None]
        );
    }
}
