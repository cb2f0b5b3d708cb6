//! What products are built with, in one place: tiles, threads, bytes of shared memory, the types of the
//! operands, the slab of K in bytes and how many slabs there are in shared memory at a time.
//!
//! **Problem.** Such numbers stand in each core twice, for the host, which launches it, and for the device;
//! and a type of one byte, or another device, changes them all.
//!
//! **Solution.** The host says them, and the headers are built with them: they assert what does not follow.
//! [`TileConfig`] is that of the products of tiles that operators hand out, by any of the [`Core`]s;
//! [`CoreConfig`] is that of products of whole matrices. A slab has bytes, not elements, since lines of
//! shared memory and copies to it do: its depth follows from the type.
//!
//! **Limits.** A and B have the same type.

use crate::args::DTYPES;
use crate::rtc::Options;

/// Threads of a workgroup of the kernels with a product on a device, and of users' kernels.
pub const THREADS: u32 = 256;

/// Threads of a workgroup of the kernels of messages: few workgroups with many bytes under way fill a
/// link, and each signal of a workgroup waits for its stores once.
pub const MESSAGE_THREADS: u32 = 512;

/// Threads of the one workgroup of a barrier.
pub const BARRIER_THREADS: u32 = 32;

/// The largest tile that a build of kernels takes. Plans may use any smaller tile.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs, reason = "as the type says")]
pub struct TileSize {
    pub m: u32,
    pub n: u32,
}

impl TileSize {
    /// Those that there are builds for, largest first.
    pub const ALL: [TileSize; 3] =
        [TileSize { m: 128, n: 128 }, TileSize { m: 64, n: 64 }, TileSize { m: 32, n: 32 }];

    /// The smallest that takes a tile of this size; none if it is too large.
    pub fn fitting(tile_m: u32, tile_n: u32) -> Option<TileSize> {
        Self::ALL.into_iter().rev().find(|size| tile_m <= size.m && tile_n <= size.n)
    }
}

/// The instructions that multiply tiles: each is a header of `kernels/iris/gemm/`, and `product.h` there
/// chooses as [`Core::of`] does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Core {
    /// wgmma, of f16 and bf16 in tiles of 128 x 128.
    Sm90,
    /// The same of tiles of few rows, of 64 x 64.
    Sm90Flipped,
    /// mma.sync, of f16 and bf16.
    Sm80,
    /// MFMA.
    Cdna3,
    /// Multiply-add, which every compiler and type has.
    Fma,
}

impl Core {
    /// That of an architecture (`sm_90a`, `gfx942`), of elements of type `dtype`
    /// ([`crate::args::dtype_code`]).
    pub fn of(arch: &str, dtype: u32, size: TileSize) -> Core {
        let arch = arch_of(arch);
        let short = element_bytes(dtype) == 2;
        match arch {
            "sm_90a" | "compute_90a" if short && size == TileSize::ALL[0] => Core::Sm90,
            "sm_90a" | "compute_90a" if short && size == TileSize::ALL[1] => Core::Sm90Flipped,
            _ if short && (arch.starts_with("sm_") || arch.starts_with("compute_")) => Core::Sm80,
            "gfx90a" | "gfx942" | "gfx950" => Core::Cdna3,
            _ => Core::Fma,
        }
    }
}

/// Of `gfx942:sramecc+` the architecture is what is before the colon.
fn arch_of(arch: &str) -> &str {
    arch.split(':').next().unwrap_or_default()
}

fn element_bytes(dtype: u32) -> u32 {
    DTYPES.get(dtype as usize).map_or(4, |dtype| dtype.size() as u32)
}

/// A build of the product of tiles: the macros of `iris/gemm_config.h`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TileConfig {
    /// The largest tile.
    pub size: TileSize,
    /// Type of A and B: [`crate::args::dtype_code`].
    pub dtype: u32,
    /// What multiplies.
    pub core: Core,
    /// Bytes of a row of A, and of a column of B, in a slab of K.
    pub slab_bytes: u32,
    /// Slabs in shared memory at a time.
    pub stages: u32,
    /// Dies of the device, each with a cache of its own, to which it hands workgroups in turns:
    /// [`crate::schedule::dealt`]. Another number than the device has is slower, and no less right.
    pub dies: u32,
}

/// Dies of MI300X, MI325X and MI355X, as one device.
const DIES_GFX94: u32 = 8;

impl TileConfig {
    /// The build for an architecture.
    pub fn of(arch: &str, dtype: u32, size: TileSize) -> TileConfig {
        let core = Core::of(arch, dtype, size);
        let smallest = size.m <= 32;
        let (slab_bytes, stages) = match core {
            // Lines as long as the swizzle; two workgroups share a multiprocessor.
            Core::Sm90 => (128, 3),
            // Few rows are over when B is read: as many on their way as two workgroups have room for.
            Core::Sm90Flipped => (128, 7),
            Core::Sm80 => (if smallest { 32 } else { 64 }, 2),
            // Two stages of the largest tile leave room for three workgroups on a compute unit; blocks of
            // 16 x 16 take 64 bytes at a time.
            Core::Cdna3 => (if size.m == 128 { 32 } else { 64 }, 2),
            Core::Fma => (element_bytes(dtype) * if smallest { 16 } else { 32 }, 1),
        };
        let dies = match arch_of(arch) {
            "gfx942" | "gfx950" => DIES_GFX94,
            _ => 1,
        };
        TileConfig { size, dtype, core, slab_bytes, stages, dies }
    }

    /// Columns of A and rows of B in a slab.
    pub fn depth(&self) -> u32 {
        self.slab_bytes / element_bytes(self.dtype)
    }

    /// Bytes of dynamic shared memory; 0 if the kernel has what it needs without asking. `product.h`
    /// asserts the number.
    pub fn shared_bytes(&self) -> u32 {
        match self.core {
            // Slabs, and what aligning them costs.
            Core::Sm90 | Core::Sm90Flipped => {
                self.stages * (self.size.m + self.size.n) * self.slab_bytes + 1024
            }
            Core::Sm80 | Core::Cdna3 | Core::Fma => 0,
        }
    }

    /// What kernels are compiled with.
    pub fn options(&self) -> Options {
        Options::new()
            .define("IRIS_DTYPE", self.dtype)
            .define("IRIS_TILE_M", self.size.m)
            .define("IRIS_TILE_N", self.size.n)
            .define("IRIS_SLAB_BYTES", self.slab_bytes)
            .define("IRIS_STAGES", self.stages)
            .define("IRIS_SHARED_BYTES", self.shared_bytes())
            .define("IRIS_DIES", self.dies)
            // One multiplies while the other waits.
            .define("IRIS_TOGETHER", 2)
    }
}

/// A build of the product of whole matrices: the macros of `iris/gemm/core.h`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CoreConfig {
    /// Columns of a tile.
    pub width: u32,
    /// Consumers, each with 64 rows of a tile.
    pub groups: u32,
    /// Workgroups of a cluster.
    pub cluster: u32,
    /// Places of the ring.
    pub stages: u32,
    /// Whether a tile is stored in the shadow of the next.
    pub hold: bool,
    /// Whether tiles are those of C transposed.
    pub flipped: bool,
    /// Whether the depth goes from line to line of the tiles' left factor.
    pub a_across: bool,
    /// The same of the right factor.
    pub b_across: bool,
    /// Rows of clusters that are taken before the next column of tiles.
    pub group: u32,
}

impl CoreConfig {
    /// Bytes of a row of A, and of a column of B, in a slab of K: as long as the swizzle.
    pub const SLAB_BYTES: u32 = 128;

    /// Columns of A and rows of B in a slab: elements have two bytes.
    pub const DEPTH: u32 = Self::SLAB_BYTES / 2;

    /// Tiles of C of this width, of A and B by rows.
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
        }
    }

    /// Tiles of C transposed, for up to `width` rows of C, of A and B by rows. With one consumer there
    /// are more workgroups that load at a time.
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
        }
    }

    /// The same where A and B lie by columns or not.
    #[must_use]
    pub fn with_layout(self, (a_columns, b_columns): (bool, bool)) -> CoreConfig {
        if self.flipped {
            CoreConfig { a_across: !b_columns, b_across: a_columns, ..self }
        } else {
            CoreConfig { a_across: a_columns, b_across: !b_columns, ..self }
        }
    }

    /// Whether A and B lie by columns.
    pub fn layout(&self) -> (bool, bool) {
        if self.flipped { (self.b_across, !self.a_across) } else { (self.a_across, !self.b_across) }
    }

    /// Rows of a tile.
    pub fn rows(&self) -> u32 {
        64 * self.groups
    }

    /// Rows of the tiles of a cluster.
    pub fn unit_rows(&self) -> u32 {
        self.rows() * self.cluster
    }

    /// Threads of a workgroup.
    pub fn threads(&self) -> u32 {
        128 * (self.groups + 1)
    }

    /// Columns that are stored at a time.
    pub(crate) fn chunk_cols(&self) -> u32 {
        match self.width {
            width if self.flipped => width,
            width if width % 64 == 0 => 64,
            _ => 32,
        }
    }

    pub(crate) fn chunks(&self) -> u32 {
        self.width / self.chunk_cols()
    }

    /// Clusters below each other, and tiles beside each other.
    pub(crate) fn tiles(&self, rows: u32, cols: u32) -> (u32, u32) {
        (rows.div_ceil(self.unit_rows()), cols.div_ceil(self.width))
    }

    /// Workgroups of a launch that has so many tiles for a cluster.
    pub(crate) fn workgroups(&self, tiles: u32, multiprocessors: u32) -> u32 {
        let most = multiprocessors / self.cluster;
        // Whole waves without four multiprocessors are faster than more of them that are cut off.
        let whole = 128 / self.cluster;
        let clusters = if most > whole && tiles.is_multiple_of(whole) { whole } else { most };
        clusters.min(tiles) * self.cluster
    }

    /// Bytes of dynamic shared memory: `SHARED_BYTES`.
    pub fn shared_bytes(&self) -> u32 {
        let b_loaded = match self.b_across {
            // In blocks of 64 columns.
            true => self.width.div_ceil(64) * Self::DEPTH * 128,
            false => self.width * Self::SLAB_BYTES,
        };
        let stage = self.rows() * Self::SLAB_BYTES + b_loaded.next_multiple_of(1024);
        let staging = self.groups * 2 * 64 * self.chunk_cols() * 2;
        let barriers = (2 * self.stages + 4 * self.groups) * 8;
        self.stages * stage + staging + barriers + 1024
    }

    /// What it is compiled with, for elements of this type ([`crate::args::dtype_code`]).
    pub fn options(&self, dtype: u32) -> Options {
        let flag = u32::from;
        Options::new()
            .define("IRIS_DTYPE", dtype)
            .define("IRIS_THREADS", self.threads())
            .define("IRIS_GEMM_WIDTH", self.width)
            .define("IRIS_GEMM_GROUPS", self.groups)
            .define("IRIS_GEMM_CLUSTER", self.cluster)
            .define("IRIS_GEMM_STAGES", self.stages)
            .define("IRIS_GEMM_SLAB_BYTES", Self::SLAB_BYTES)
            .define("IRIS_GEMM_HOLD", flag(self.hold))
            .define("IRIS_GEMM_FLIPPED", flag(self.flipped))
            .define("IRIS_GEMM_A_ACROSS", flag(self.a_across))
            .define("IRIS_GEMM_B_ACROSS", flag(self.b_across))
            .define("IRIS_GEMM_SHARED_BYTES", self.shared_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_build_of_tiles_is_whole_instructions() {
        for arch in ["sm_80", "sm_90a", "gfx90a", "gfx942:sramecc+:xnack-", "gfx950", "gfx1100"] {
            for (dtype, size) in
                (0..DTYPES.len() as u32).flat_map(|dtype| TileSize::ALL.map(|it| (dtype, it)))
            {
                let config = TileConfig::of(arch, dtype, size);
                assert!(config.slab_bytes.is_multiple_of(16) && config.depth() > 0, "{config:?}");
                let short = DTYPES[dtype as usize].size() == 2;
                let expected = match arch {
                    "sm_90a" if short && size.n == 128 => Core::Sm90,
                    "sm_90a" if short && size.n == 64 => Core::Sm90Flipped,
                    "sm_80" | "sm_90a" if short => Core::Sm80,
                    "gfx1100" => Core::Fma,
                    _ if arch.starts_with("gfx9") => Core::Cdna3,
                    _ => Core::Fma,
                };
                assert_eq!(config.core, expected, "{arch}");
                let dies = if ["gfx942", "gfx950"].contains(&arch_of(arch)) { 8 } else { 1 };
                assert_eq!(config.dies, dies, "{arch}");
                // Two workgroups on a multiprocessor of 227 KiB.
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
