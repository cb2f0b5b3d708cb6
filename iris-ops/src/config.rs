//! What an op is planned with.

use iris_heap::{BackendKind, DType, World};
use iris_kernels::build::Injected;
use iris_kernels::rtc::TileBuild;

use crate::error::{Error, Result};

/// A rank among others: all that planning needs of a world.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ranks {
    /// This rank.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
}

impl Ranks {
    /// Rank `rank` of `size`.
    pub fn new(rank: usize, size: usize) -> Self {
        Self { rank, size }
    }
}

impl From<&World> for Ranks {
    fn from(world: &World) -> Self {
        Self { rank: world.rank(), size: world.size() }
    }
}

/// Rows and columns of a tile.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TileShape {
    /// Rows.
    pub m: usize,
    /// Columns.
    pub n: usize,
}

/// Which dimension of A is split over the ranks in front of an all-gather.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Shard {
    /// Rank r has the rows `split(m, size, r)` of A.
    #[default]
    Rows,
    /// Rank r has the columns `split(k, size, r)` of A, and its own part of K is multiplied first.
    Columns,
}

/// How the staging buffer of `all_gather_matmul` lies, and in which order it is filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum StagingLayout {
    /// `[m][k]`, filled along K first.
    #[default]
    KContiguous,
    /// `[k][m]`, filled along M first.
    MContiguous,
}

/// What is done to a finished element, once over all ranks, after the bias.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Epilogue {
    /// Nothing.
    #[default]
    None,
    /// x / 2 * (1 + erf(x / sqrt 2)).
    Gelu,
}

/// What an op is planned for: shapes, types and choices. Which of `m`, `n`, `k` is a whole and
/// which a rank's own is said by each op.
///
/// ```
/// use iris_heap::DType;
/// use iris_ops::Options;
/// let options = Options::new(107, 384, 96).dtype(DType::BF16).wire(DType::F32);
/// assert_eq!((options.m, options.n, options.k), (107, 384, 96));
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Most rows of a call.
    pub m: usize,
    /// Columns.
    pub n: usize,
    /// Depth; 0 for an op without a product.
    pub k: usize,
    /// Element type of A and B, or of the message.
    pub dtype: DType,
    /// Element type of C.
    pub output: Option<DType>,
    /// Element type that partials travel in.
    pub wire: Option<DType>,
    /// Kind of device that the op will run on.
    pub backend: BackendKind,
    /// Shape of a tile.
    pub tile: Option<TileShape>,
    /// What is done to a finished element.
    pub epilogue: Epilogue,
    /// Dimension of A that is split.
    pub shard: Shard,
    /// Layout of the staging buffer.
    pub staging: StagingLayout,
    /// Blocks of [`Options::k_block`] columns of A that one flag stands for; by default 4, on a GPU
    /// 32.
    pub k_per_flag: Option<usize>,
    /// Columns of A in a block.
    pub k_block: usize,
    /// Workgroups that fetch; by default a quarter, at least one.
    pub fetchers: Option<usize>,
    /// Workgroups of a launch; by default as many as can be resident.
    pub workgroups: Option<usize>,
    /// Rank that broadcasts.
    pub root: usize,
    /// Ranks of a barrier; by default all.
    pub members: Option<Vec<usize>>,
    /// Spans that each workgroup has room for in a trace; 0 for no trace.
    pub trace_spans: u32,
    /// Whether kernels on GPUs count what they move. On the CPU they always do, and on GPUs where they
    /// leave a trace.
    pub counted: bool,
    /// Number of the first call.
    pub first_call: i32,
    /// What a test has the kernels do worse than they should.
    pub injected: Injected,
}

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $type:ty => $value:expr;)*) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $name: $type) -> Self {
            self.$name = $value;
            self
        }
    )*};
}

impl Options {
    /// Whether kernels on GPUs are those that trace and count.
    pub fn is_observed(&self) -> bool {
        self.counted || self.trace_spans > 0
    }

    /// For at most `m` rows, `n` columns and depth `k`, in f32.
    pub fn new(m: usize, n: usize, k: usize) -> Self {
        Self {
            m,
            n,
            k,
            dtype: DType::F32,
            output: None,
            wire: None,
            backend: BackendKind::Cpu,
            tile: None,
            epilogue: Epilogue::None,
            shard: Shard::Rows,
            staging: StagingLayout::KContiguous,
            k_per_flag: None,
            k_block: 64,
            fetchers: None,
            workgroups: None,
            root: 0,
            members: None,
            trace_spans: 0,
            counted: false,
            first_call: 1,
            injected: Injected::default(),
        }
    }

    setters! {
        /// Element type of A and B, or of the message: f32, f16 or bf16.
        dtype: DType => dtype;
        /// Element type of C; by default that of A.
        output: DType => Some(output);
        /// Element type that partials travel in; by default that of C.
        wire: DType => Some(wire);
        /// Kind of device that the op will run on: that of its heap.
        backend: BackendKind => backend;
        /// Shape of a tile; by default chosen by the shape and the device.
        tile: TileShape => Some(tile);
        /// What is done to a finished element.
        epilogue: Epilogue => epilogue;
        /// Dimension of A that is split, of an all-gather in front of a product.
        shard: Shard => shard;
        /// Layout of the staging buffer.
        staging: StagingLayout => staging;
        /// Blocks of K that one flag of a staged gather stands for; the last may have fewer.
        k_per_flag: usize => Some(k_per_flag);
        /// Columns of A in such a block.
        k_block: usize => k_block;
        /// Workgroups that fetch, of a staged gather.
        fetchers: usize => Some(fetchers);
        /// Workgroups of a launch: at most what can be resident.
        workgroups: usize => Some(workgroups);
        /// Rank that broadcasts.
        root: usize => root;
        /// Ranks of a barrier.
        members: Vec<usize> => Some(members);
        /// Spans that each workgroup has room for in a trace.
        trace_spans: u32 => trace_spans;
        /// Whether kernels on GPUs count what they move, which takes time.
        counted: bool => counted;
        /// Number of the first call: for tests near the ends of the range.
        first_call: i32 => first_call;
        /// What a stress test has device kernels do worse than they should: late, or wrong.
        injected: Injected => injected;
    }

    /// Element type of C.
    pub fn output_dtype(&self) -> DType {
        self.output.unwrap_or(self.dtype)
    }

    /// Columns of A that one flag of a staged gather stands for.
    pub fn columns_per_flag(&self) -> usize {
        // A product of fewer columns begins and ends more often than it pays on a GPU.
        let default = if self.backend == BackendKind::Cpu { 4 } else { 32 };
        self.k_per_flag.unwrap_or(default).saturating_mul(self.k_block)
    }

    /// Element type that partials travel in.
    pub fn wire_dtype(&self) -> DType {
        self.wire.unwrap_or(self.output_dtype())
    }

    /// Check every number by itself, before anything is computed from it.
    pub(crate) fn check(&self, op: &'static str, ranks: Ranks) -> Result<()> {
        let invalid = |what: &str, value: &dyn ToString, expected: &str| {
            Err(Error::Invalid {
                op,
                what: what.into(),
                value: value.to_string(),
                expected: expected.into(),
            })
        };
        let limit = i32::MAX as usize / 2;
        let most = format!("at most {limit}");
        if ranks.size == 0 || ranks.size > iris_heap::MAX_RANKS {
            return invalid("size of the world", &ranks.size, "from 1 to 64");
        }
        if ranks.rank >= ranks.size {
            return invalid("rank", &ranks.rank, &format!("below {}", ranks.size));
        }
        for (name, value) in [("m", self.m), ("n", self.n), ("k", self.k)] {
            if value > limit {
                return invalid(name, &value, &most);
            }
        }
        for (name, dtype) in
            [("dtype", self.dtype), ("output", self.output_dtype()), ("wire", self.wire_dtype())]
        {
            if iris_kernels::args::dtype_code(dtype).is_none() {
                return invalid(name, &dtype, "f32, f16 or bf16");
            }
        }
        if let Some(TileShape { m, n }) = self.tile
            && (m.min(n) == 0 || m.max(n) > 65536)
        {
            return invalid("tile", &format!("{m} x {n}"), "from 1 to 65536 either way");
        }
        if self.backend == BackendKind::Cuda
            && op.contains("matmul")
            && let Some(TileShape { m, n }) = self.tile
            && TileBuild::fitting(m as u32, n as u32).is_none()
        {
            let TileBuild { m: most_m, n: most_n, .. } = TileBuild::ALL[0];
            let expected = format!("at most {most_m} x {most_n} on {}", self.backend);
            return invalid("tile", &format!("{m} x {n}"), &expected);
        }
        for (name, value) in
            [("k_per_flag", self.k_per_flag.unwrap_or(1)), ("k_block", self.k_block)]
        {
            if value == 0 || value > limit {
                return invalid(name, &value, &format!("from 1 to {limit}"));
            }
        }
        if let Some(fetchers) = self.fetchers
            && fetchers > limit
        {
            return invalid("fetchers", &fetchers, &most);
        }
        if self.injected != Injected::default() && self.backend == BackendKind::Cpu {
            return invalid("injected", &format!("{:?}", self.injected), "nothing on the CPU");
        }
        if self.workgroups == Some(0) {
            return invalid("workgroups", &0, "at least 1");
        }
        if self.root >= ranks.size {
            return invalid("root", &self.root, &format!("below {}", ranks.size));
        }
        if let Some(members) = &self.members {
            if op != "barrier" {
                return invalid("members", &format!("{members:?}"), "none: all ranks take part");
            }
            if members.is_empty() || members.iter().any(|&rank| rank >= ranks.size) {
                let expected = format!("ranks below {}, at least one", ranks.size);
                return invalid("members", &format!("{members:?}"), &expected);
            }
        }
        Ok(())
    }
}
