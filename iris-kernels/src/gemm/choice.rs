//! Choice of a build of the whole-matrix GEMM (tile width, cluster size, stages) by the product's
//! shape and the device.

use crate::gemm_config::CoreConfig as Config;

/// Builds for tiles of C. Each entry has the tile width in columns, the workgroups per cluster, the
/// pipeline stages, and the time per tile column, in percent of that of the widest tile (measured
/// on an H200).
const WIDTHS: [(u32, u32, u32, u64); 6] = [
    (256, 2, 4, 100),
    (224, 2, 4, 105),
    (192, 2, 4, 107),
    (160, 2, 5, 108),
    (128, 2, 6, 115),
    (64, 1, 7, 130),
];

/// Widths, in columns, of wide and of narrow tiles of GEMMs that store to peers.
pub(super) const WIDEST: u32 = 256;
pub(super) const NARROW: u32 = 128;

/// Largest number of rows of C for which builds compute tiles of the transpose of C.
pub(super) const FLIPPED_ROWS: usize = 128;

/// Widths of the tiles in builds that compute the transpose of C: each is a number of rows of C.
const FLIPPED_WIDTHS: [u32; 4] = [16, 32, 64, 128];

/// Numbers of consumer warpgroups in builds in which each workgroup computes one tile of the
/// transpose of C.
const CONSUMERS: [u32; 2] = [1, 2];

/// Number of rows of C up to which the multiprocessors share the tiles of a product in parts of K.
const SHARED_ROWS: usize = 512;

/// Widths of the tiles that multiprocessors share.
const SHARED_WIDTHS: [u32; 5] = [16, 32, 64, 128, 256];

/// Number of ranges of K in a product that splits K.
const K_PARTS: u32 = 8;

/// Number of ranges of K whose products are added in the order of K, in a product with N columns whose
/// rows must have the same bits in every call: it depends on N and K alone. Where N is small, there are
/// fewer tiles than multiprocessors, and several of them share a tile (16 x 1024 x 8192 on an H200: 6.9
/// us in 8 ranges, 23.8 in one; 2026-11-30). All builds then add in the same order, which costs time if C
/// has many rows, so K is split only where N is small and K large.
pub fn k_parts(n: usize, k: usize) -> u32 {
    // With this K no range of slabs is empty. Every row of A and C begins at a multiple of 16 bytes.
    let fits = n.is_multiple_of(8) && k.is_multiple_of(8);
    if fits && (1..=1536).contains(&n) && k >= 4096 { K_PARTS } else { 1 }
}

impl Config {
    /// Configuration for tiles of C with `width` columns. Cluster size and number of stages are
    /// those that were measured to be fastest.
    fn of_width(width: u32) -> Config {
        let known = WIDTHS.iter().find(|it| it.0 == width);
        let &(width, cluster, stages, _) = known.unwrap_or(&WIDTHS[0]);
        Self::wide(width, cluster, stages)
    }

    /// Configuration with the lowest [`Config::cost`] for a product of shape [m, n, k] with row-major A and
    /// B.
    pub fn choose(shape: [usize; 3], multiprocessors: u32) -> Config {
        // This default is never used, because the build with the widest tiles can multiply every
        // shape.
        Self::best(&Self::all(shape[2]), shape, multiprocessors).unwrap_or(Self::wide(256, 2, 4))
    }

    fn best(all: &[Config], shape: [usize; 3], multiprocessors: u32) -> Option<Config> {
        let takes = all.iter().filter(|config| config.takes(shape));
        takes.min_by_key(|config| config.cost(shape, multiprocessors)).copied()
    }

    /// Builds that an operator loads for products of up to `shape[0]` rows, which add the products of
    /// `k_parts` ranges of K.
    pub fn of_plan([most, n, k]: [usize; 3], multiprocessors: u32, k_parts: u32) -> Vec<Config> {
        let all = if k_parts == 1 {
            Self::all(k)
        } else {
            Self::in_parts(k_parts, Self::sharing_consumers(n))
        };
        Self::of_rows(most, |rows| Self::best(&all, [rows, n, k], multiprocessors))
    }

    /// Number of consumers of tiles of 64 and more rows of C that multiprocessors share. With two, half as
    /// many tiles read each row of A from the L2 cache (64 x 1024 x 8192 on an H200: 9.3 us with one, 8.8
    /// with two). With few columns, one occupies more multiprocessors (64 x 512 x 8192: 7.0 and 8.7 us;
    /// 2026-11-30).
    fn sharing_consumers(n: usize) -> u32 {
        if n >= 1024 { 2 } else { 1 }
    }

    /// All builds that add the products of `k_parts` ranges of K, with `consumers` for large tiles.
    fn in_parts(k_parts: u32, consumers: u32) -> Vec<Config> {
        let groups = |width: u32| if width >= 64 { consumers } else { 1 };
        let tiles = SHARED_WIDTHS.into_iter();
        let shared = tiles.filter_map(|width| Self::of_tile(width, groups(width), k_parts));
        shared.chain([Self::whole_tiles(k_parts)]).collect()
    }

    /// Build whose workgroups multiply all ranges of K of a tile, for any number of rows.
    pub(super) fn whole_tiles(k_parts: u32) -> Config {
        Config { hold: false, k_parts, ..Self::of_width(NARROW) }
    }

    /// Builds for calls of up to `most` rows: those that `choose` returns for 16, 64, 128 and `most`
    /// rows, and for the powers of two between 128 and `most`.
    pub(super) fn of_rows(most: usize, choose: impl Fn(usize) -> Option<Config>) -> Vec<Config> {
        let larger = (FLIPPED_ROWS.ilog2()..usize::BITS).map(|bits| 1 << bits);
        let rows = [16, FLIPPED_ROWS / 2].into_iter().chain(larger.take_while(|&it| it < most));
        let rows = rows.chain([most]).map(|it| it.min(most));
        let mut configs: Vec<Config> = Vec::new();
        for config in rows.filter_map(choose) {
            if !configs.contains(&config) {
                configs.push(config);
            }
        }
        configs
    }

    /// Number of consumer warpgroups for a launch in which each workgroup computes one tile of the
    /// transpose of C, for a C of `n` columns. With it the workgroups occupy at least three
    /// quarters of the multiprocessors; fewer would have too few loads of B in flight. `None` if no
    /// number gives three quarters to all of the multiprocessors.
    pub(super) fn consumers_of_tiles(n: usize, multiprocessors: u32) -> Option<u32> {
        let most = multiprocessors as usize;
        let tiles = |groups: &u32| n.div_ceil(64 * *groups as usize);
        CONSUMERS.into_iter().find(|groups| (most * 3 / 4..=most).contains(&tiles(groups)))
    }

    /// Build in which each workgroup has one tile, for products of up to `rows` rows, at most 128;
    /// `None` if there is none. One build serves all numbers of rows, because a product with fewer
    /// rows reads no less of B.
    pub(super) fn of_tiles(rows: usize, cols: usize, multiprocessors: u32) -> Option<Config> {
        let groups = Self::consumers_of_tiles(cols, multiprocessors)?;
        let rows = rows.min(FLIPPED_ROWS);
        let width = FLIPPED_WIDTHS.into_iter().find(|&width| rows <= width as usize)?;
        Self::of_tile(width, groups, 1)
    }

    /// Configuration for tiles of the transpose of C: `width` rows of C and `groups` consumer
    /// warpgroups, with as many stages as fit into shared memory.
    fn of_tile(width: u32, groups: u32, k_parts: u32) -> Option<Config> {
        // Bytes of shared memory that a workgroup can have. Several workgroups that share tiles fit on a
        // multiprocessor, so that a launch begins while the previous one ends (16 x 1280 x 8192 on an
        // H200: 7.1 us, 11.8 if each fills a multiprocessor; 2026-11-30).
        let shared = match (k_parts, groups, width) {
            (1, ..) | (_, 2, _) | (.., 256) => 227 << 10,
            (.., 128) => 113 << 10,
            _ => 75 << 10,
        };
        let fits = |config: &Config| {
            // Both storage orders of A must fit. Slabs of a column-major A are larger, because they
            // consist of blocks of 64 rows.
            let layouts = [false, true].map(|it| config.with_layout((it, false)));
            layouts.iter().all(|config| config.shared_bytes() <= shared)
        };
        let of = |stages| Config { k_parts, ..Self::flipped(width, groups, stages) };
        (2..=8).rev().map(of).find(fits)
    }

    /// All builds that [`Config::of_tiles`] can return.
    pub(super) fn of_any_tile() -> Vec<Config> {
        let of =
            |groups| FLIPPED_WIDTHS.into_iter().filter_map(move |it| Self::of_tile(it, groups, 1));
        CONSUMERS.into_iter().flat_map(of).collect()
    }

    /// Builds for a GEMM that stores its tiles to peers, the preferred build first. Tiles have
    /// `width` columns, and a rank owns `own` rows of C. If one narrow tile has all rows of a rank,
    /// the builds use no cluster, because the second workgroup of a cluster would multiply nothing.
    pub(super) fn storing(width: u32, own: usize) -> [Config; 2] {
        let config = Self::of_width(width);
        let alone = width == NARROW && own <= config.rows() as usize;
        let cluster = if alone { 1 } else { config.cluster };
        [true, false].map(|hold| Config { hold, cluster, ..config })
    }

    /// All builds that [`Config::storing`] can return.
    pub(super) fn storing_any() -> Vec<Config> {
        let all = [(WIDEST, usize::MAX), (NARROW, usize::MAX), (NARROW, 1)];
        all.into_iter().flat_map(|(width, own)| Self::storing(width, own)).collect()
    }

    /// All builds that [`Config::of_plan`] can return for any depth. A build for a small depth can
    /// differ from that for a large depth in `hold` (deferred stores).
    pub(super) fn of_any_depth() -> Vec<Config> {
        let mut configs = Vec::new();
        let in_parts = CONSUMERS.into_iter().flat_map(|it| Self::in_parts(K_PARTS, it));
        for config in Self::all(usize::MAX).into_iter().chain(Self::all(0)).chain(in_parts) {
            if !configs.contains(&config) {
                configs.push(config);
            }
        }
        configs
    }

    /// All builds for depth `k`, for row-major A and B.
    fn all(k: usize) -> Vec<Config> {
        let wide = WIDTHS.iter().map(|&(width, cluster, stages, _)| {
            let config = Self::wide(width, cluster, stages);
            // `hold` (deferred stores) needs a tile with more slabs than chunks, because each chunk
            // of a tile is stored while another slab of the next tile is multiplied.
            let hold = config.hold && k.div_ceil(Self::DEPTH as usize) > config.chunks() as usize;
            Config { hold, ..config }
        });
        let flipped = FLIPPED_WIDTHS.map(|width| Self::flipped(width, 1, 8));
        wide.chain(flipped).collect()
    }

    /// Whether this build can multiply matrices of shape [m, n, k].
    pub fn takes(&self, [m, _, k]: [usize; 3]) -> bool {
        let slabs = k.div_ceil(Self::DEPTH as usize);
        let most = if self.sharers() > 1 { SHARED_ROWS } else { self.width as usize };
        (!self.flipped || m <= most) && (!self.hold || slabs > self.chunks() as usize)
    }

    /// Relative time of a product of shape [m, n, k], to compare builds: number of waves of tiles,
    /// times tile width, times time per column.
    pub fn cost(&self, [m, n, _]: [usize; 3], multiprocessors: u32) -> u64 {
        let (rows, cols) = if self.flipped { (n, m) } else { (m, n) };
        let (units, tiles) = self.tiles(rows as u32, cols as u32);
        let all = u64::from(units) * u64::from(tiles) * u64::from(self.cluster);
        let waves = all.div_ceil(u64::from(multiprocessors));
        if self.flipped {
            // The factor for the time per column is left out, so builds that compute the transpose
            // of C always win. They are the fastest for every shape that they support.
            return match self.sharers() {
                1 => waves * u64::from(self.width),
                // Each tile reads 64 columns of B again.
                _ => u64::from(tiles) * u64::from(64 + self.width),
            };
        }
        let known = WIDTHS.iter().find(|it| it.0 == self.width);
        waves * u64::from(self.width) * known.map_or(130, |it| it.3)
    }

    /// Whether this build may be preferred to the vendor's library: its tiles are among the widest.
    /// The tiles must also fill the device, which `is_preferred_for` checks.
    pub fn is_preferred(&self) -> bool {
        !self.flipped && self.width >= 224 && self.cluster == 2
    }

    /// Whether this build was measured to be faster than the first choice of the vendor's library
    /// for a C of `rows` x `cols` (bench/notes/gemm-sm90.md). It is not if the last wave of tiles
    /// is far from full.
    pub(super) fn is_preferred_for(&self, rows: u32, cols: u32, multiprocessors: u32) -> bool {
        self.is_preferred() && rows >= 1024 && self.filled(rows, cols, multiprocessors) >= 95
    }

    /// Use of the device in percent: number of elements of C, divided by the number of elements
    /// that the same number of full waves of tiles would compute.
    fn filled(&self, rows: u32, cols: u32, multiprocessors: u32) -> u64 {
        let (units, tiles) = self.tiles(rows, cols);
        let all = u64::from(units) * u64::from(tiles) * u64::from(self.cluster);
        let waves = all.div_ceil(u64::from(multiprocessors)) * u64::from(multiprocessors);
        let area = waves * u64::from(self.rows()) * u64::from(self.width);
        u64::from(rows) * u64::from(cols) * 100 / area.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: u32 = 132;

    #[test]
    fn the_choice_is_the_one_that_was_measured() {
        let width = |m, n, k| {
            let config = Config::choose([m, n, k], H200);
            (config.width, config.flipped)
        };
        assert_eq!(width(8192, 8192, 3584), (256, false));
        assert_eq!(width(4096, 3584, 8192), (224, false));
        assert_eq!(width(1024, 7168, 8192), (224, false));
        assert_eq!(width(512, 8192, 3584), (256, false));
        assert_eq!(width(256, 8192, 3584), (128, false));
        assert_eq!(width(128, 8192, 3584), (128, true));
        assert_eq!(width(64, 8192, 3584), (64, true));
        assert_eq!(width(17, 8192, 3584), (32, true));
        assert_eq!(width(1, 8192, 3584), (16, true));
    }

    #[test]
    fn ours_goes_first_where_it_was_faster() {
        let preferred = |m: u32, n: u32, k| {
            Config::choose([m as usize, n as usize, k], H200).is_preferred_for(m, n, H200)
        };
        for (m, n, k) in [(8192, 8192, 1024), (4096, 3584, 8192), (1024, 7168, 8192)] {
            assert!(preferred(m, n, k), "{m} x {n} x {k}");
        }
        for (m, n, k) in [(512, 8192, 3584), (8192, 1280, 8192), (16, 8192, 3584), (3000, 3000, 64)]
        {
            assert!(!preferred(m, n, k), "{m} x {n} x {k}");
        }
    }

    #[test]
    fn a_plan_has_a_build_for_every_number_of_rows() {
        for shape in [
            [1, 8, 8],
            [100, 8192, 3584],
            [8192, 8192, 3584],
            [300, 256, 64],
            [1, 8, 4096],
            [100, 1024, 8192],
            [8192, 1024, 8192],
        ] {
            let [most, n, k] = shape;
            let configs = Config::of_plan(shape, H200, k_parts(n, k));
            for rows in 1..=most {
                let any = configs.iter().any(|config| config.takes([rows, n, k]));
                assert!(any, "{rows} of {shape:?}: {configs:?}");
            }
        }
    }

    #[test]
    fn a_plan_of_a_product_that_splits_k_has_no_other_builds() {
        assert_eq!([k_parts(1536, 4096), k_parts(1544, 4096), k_parts(8, 4088)], [8, 1, 1]);
        assert_eq!([k_parts(1020, 8192), k_parts(1024, 8196), k_parts(0, 8192)], [1; 3]);
        let shape = [8192, 1024, 8192];
        let configs = Config::of_plan(shape, H200, k_parts(1024, 8192));
        assert!(configs.iter().all(|config| config.k_parts == 8), "{configs:?}");
        let best = |rows| {
            let launch = Config::best(&configs, [rows, 1024, 8192], H200).unwrap();
            (launch.width, launch.groups, launch.sharers())
        };
        let taken = [1, 64, 128, 384, 512, 513].map(best);
        assert_eq!(
            taken,
            [(16, 1, 8), (64, 2, 8), (128, 2, 8), (128, 2, 8), (256, 2, 8), (128, 2, 1)]
        );
        let few = Config::of_plan([512, 512, 8192], H200, k_parts(512, 8192));
        assert!(few.iter().all(|config| config.groups == 1 || !config.flipped), "{few:?}");
    }

    #[test]
    fn a_plan_has_the_best_build_of_powers_of_two() {
        let [most, n, k] = [8192, 8192, 3584];
        let configs = Config::of_plan([most, n, k], H200, 1);
        for rows in (7..=13).map(|bits| 1 << bits) {
            let best = Config::choose([rows, n, k], H200).cost([rows, n, k], H200);
            let costs = configs.iter().filter(|it| it.takes([rows, n, k]));
            let least = costs.map(|it| it.cost([rows, n, k], H200)).min();
            assert_eq!(least, Some(best), "{rows} rows");
        }
    }

    #[test]
    fn a_layout_is_that_of_the_factors() {
        for config in [Config::wide(256, 2, 4), Config::flipped(64, 2, 8)] {
            assert_eq!(config.layout(), (false, false));
            for layout in [(false, false), (false, true), (true, false), (true, true)] {
                assert_eq!(config.with_layout(layout).layout(), layout);
            }
        }
    }

    #[test]
    fn every_build_fits_a_multiprocessor() {
        for config in Config::of_any_depth() {
            for layout in [(false, false), (false, true), (true, false), (true, true)] {
                let config = config.with_layout(layout);
                assert!(config.shared_bytes() <= 227 << 10, "{config:?}");
            }
        }
    }
}
