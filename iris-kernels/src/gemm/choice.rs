//! Choice of the build of the whole-matrix GEMM by shape and device.

use crate::gemm_config::CoreConfig as Config;

/// Width of a tile, size of a cluster, number of stages, and time per column of a tile in percent of
/// that of the widest tile, measured on an H200.
const WIDTHS: [(u32, u32, u32, u64); 6] = [
    (256, 2, 4, 100),
    (224, 2, 4, 105),
    (192, 2, 4, 107),
    (160, 2, 5, 108),
    (128, 2, 6, 115),
    (64, 1, 7, 130),
];

/// Widths of the tiles that a GEMM stores to peers.
pub(super) const WIDEST: u32 = 256;
pub(super) const NARROW: u32 = 128;

/// The most rows of C for tiles of C transposed.
pub(super) const FLIPPED_ROWS: usize = 128;

/// Widths of tiles of C transposed.
const FLIPPED_WIDTHS: [u32; 4] = [16, 32, 64, 128];

/// Numbers of consumers of tiles of C transposed of which each workgroup has one.
const CONSUMERS: [u32; 2] = [1, 2];

impl Config {
    /// The build of tiles of C of so many columns, as measured.
    fn of_width(width: u32) -> Config {
        let known = WIDTHS.iter().find(|it| it.0 == width);
        let &(width, cluster, stages, _) = known.unwrap_or(&WIDTHS[0]);
        Self::wide(width, cluster, stages)
    }

    /// The build for a product of this shape, of A and B by rows.
    pub fn choose(shape: [usize; 3], multiprocessors: u32) -> Config {
        let all = Self::all(shape[2]).into_iter().filter(|config| config.takes(shape));
        let best = all.min_by_key(|config| config.cost(shape, multiprocessors));
        // The widest takes everything.
        best.unwrap_or(Self::wide(256, 2, 4))
    }

    /// The builds for products of up to so many rows: those for a few, and that for the most.
    pub fn of_plan(shape: [usize; 3], multiprocessors: u32) -> Vec<Config> {
        let [most, n, k] = shape;
        let rows = [16, FLIPPED_ROWS / 2, FLIPPED_ROWS, most].map(|it| it.min(most));
        let mut configs: Vec<Config> = Vec::new();
        for rows in rows {
            let config = Self::choose([rows, n, k], multiprocessors);
            if !configs.contains(&config) {
                configs.push(config);
            }
        }
        configs
    }

    /// Consumers of the tiles of C transposed of which each multiprocessor has one, or nearly each: with fewer, what
    /// they read of B at a time is too little.
    pub(super) fn consumers_of_tiles(n: usize, multiprocessors: u32) -> Option<u32> {
        let most = multiprocessors as usize;
        let tiles = |groups: &u32| n.div_ceil(64 * *groups as usize);
        CONSUMERS.into_iter().find(|groups| (most * 3 / 4..=most).contains(&tiles(groups)))
    }

    /// The build for products of up to so many rows, or of a few, of which each workgroup has a tile. With fewer rows
    /// less is multiplied, but not less read: one is enough.
    pub(super) fn of_tiles(rows: usize, cols: usize, multiprocessors: u32) -> Option<Config> {
        let groups = Self::consumers_of_tiles(cols, multiprocessors)?;
        let rows = rows.min(FLIPPED_ROWS);
        let width = FLIPPED_WIDTHS.into_iter().find(|&width| rows <= width as usize)?;
        Self::of_tile(width, groups)
    }

    /// The build of tiles of C transposed with this width and number of consumers, with as many stages as fit.
    fn of_tile(width: u32, groups: u32) -> Option<Config> {
        /// Bytes of shared memory of a workgroup.
        const SHARED: u32 = 227 << 10;
        let fits = |config: &Config| {
            // Of A by columns the slabs have whole blocks.
            let layouts = [false, true].map(|it| config.with_layout((it, false)));
            layouts.iter().all(|config| config.shared_bytes() <= SHARED)
        };
        (2..=8).rev().map(|stages| Self::flipped(width, groups, stages)).find(fits)
    }

    /// Every build that [`Config::of_tiles`] returns.
    pub(super) fn of_any_tile() -> Vec<Config> {
        let of =
            |groups| FLIPPED_WIDTHS.into_iter().filter_map(move |it| Self::of_tile(it, groups));
        CONSUMERS.into_iter().flat_map(of).collect()
    }

    /// Builds of tiles of this width for a GEMM that stores to peers and in which a rank owns `own` rows of C, by
    /// preference. If all these rows are in one tile, that is narrow and has no cluster, whose second workgroup would
    /// multiply nothing.
    pub(super) fn storing(width: u32, own: usize) -> [Config; 2] {
        let config = Self::of_width(width);
        let alone = width == NARROW && own <= config.rows() as usize;
        let cluster = if alone { 1 } else { config.cluster };
        [true, false].map(|hold| Config { hold, cluster, ..config })
    }

    /// All builds for GEMMs that store to peers.
    pub(super) fn storing_any() -> Vec<Config> {
        let all = [(WIDEST, usize::MAX), (NARROW, usize::MAX), (NARROW, 1)];
        all.into_iter().flat_map(|(width, own)| Self::storing(width, own)).collect()
    }

    /// Every build that [`Config::of_plan`] returns: they differ in `hold`, for small depths and large ones.
    pub(super) fn of_any_depth() -> Vec<Config> {
        let mut configs = Self::all(usize::MAX);
        let more = Self::all(0).into_iter().filter(|it| !configs.contains(it));
        configs.extend(more.collect::<Vec<_>>());
        configs
    }

    /// Every build for a depth.
    fn all(k: usize) -> Vec<Config> {
        let wide = WIDTHS.iter().map(|&(width, cluster, stages, _)| {
            let config = Self::wide(width, cluster, stages);
            // The chunks of a tile go into the shadow of as many slabs of the next, and one more.
            let hold = config.hold && k.div_ceil(Self::DEPTH as usize) > config.chunks() as usize;
            Config { hold, ..config }
        });
        let flipped = FLIPPED_WIDTHS.map(|width| Self::flipped(width, 1, 8));
        wide.chain(flipped).collect()
    }

    /// Whether it multiplies matrices of this shape.
    pub fn takes(&self, [m, _, k]: [usize; 3]) -> bool {
        let slabs = k.div_ceil(Self::DEPTH as usize);
        (!self.flipped || m <= self.width as usize)
            && (!self.hold || slabs > self.chunks() as usize)
    }

    /// What a product costs, to compare builds: the waves of its tiles, each as wide as it is.
    pub fn cost(&self, [m, n, _]: [usize; 3], multiprocessors: u32) -> u64 {
        let (rows, cols) = if self.flipped { (n, m) } else { (m, n) };
        let (units, tiles) = self.tiles(rows as u32, cols as u32);
        let all = u64::from(units) * u64::from(tiles) * u64::from(self.cluster);
        let waves = all.div_ceil(u64::from(multiprocessors));
        if self.flipped {
            // Nothing else is as fast where it is enough.
            return waves * u64::from(self.width);
        }
        let known = WIDTHS.iter().find(|it| it.0 == self.width);
        waves * u64::from(self.width) * known.map_or(130, |it| it.3)
    }

    /// Whether it is one of the widest builds, which go before the vendor's where their tiles fill the
    /// device.
    pub fn is_preferred(&self) -> bool {
        !self.flipped && self.width >= 224 && self.cluster == 2
    }

    /// Whether this build was measured to be faster for so many rows and columns than what the vendor's library
    /// chooses at once (bench/notes/gemm-sm90.md): not where the last wave of tiles is far from full.
    pub(super) fn is_preferred_for(&self, rows: u32, cols: u32, multiprocessors: u32) -> bool {
        self.is_preferred() && rows >= 1024 && self.filled(rows, cols, multiprocessors) >= 95
    }

    /// How much of the waves of tiles is in C, in percent.
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
        for shape in [[1, 8, 8], [100, 8192, 3584], [8192, 8192, 3584], [300, 256, 64]] {
            let configs = Config::of_plan(shape, H200);
            let [most, n, k] = shape;
            for rows in 1..=most {
                let any = configs.iter().any(|config| config.takes([rows, n, k]));
                assert!(any, "{rows} of {shape:?}: {configs:?}");
            }
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
        for config in Config::all(8192) {
            for layout in [(false, false), (false, true), (true, false), (true, true)] {
                let config = config.with_layout(layout);
                assert!(config.shared_bytes() <= 227 << 10, "{config:?}");
            }
        }
    }
}
