//! Options of any operator as one struct, and plans made from them, for tests and programs that
//! vary everything.

use anyhow::bail;
use iris_heap::{BackendKind, DType};
use iris_ops::{
    Epilogue, FaultInjection, Library, Op, Plan, Ranks, Shard, Staged, StagingLayout, TileShape,
    Variant,
};

/// Shapes, types and choices of any operator's plan. Fields up to `members` are always passed to
/// the plan, which returns an error if the op does not have the option. Later fields are ignored if
/// the op does not have the option.
#[derive(Clone, Debug)]
pub struct Options {
    /// Maximum number of rows of a call, M.
    pub m: usize,
    /// Number of columns of C or of the message, N.
    pub n: usize,
    /// Inner dimension of the product, K; ignored by an op without a product.
    pub k: usize,
    /// Element type of A and B, or of the message.
    pub dtype: DType,
    /// Element type of C; `None` for that of A.
    pub output: Option<DType>,
    /// Function applied to each element of the result, such as GELU.
    pub epilogue: Epilogue,
    /// Epsilon of the RMSNorm of the result's rows; `None` for no RMSNorm.
    pub rms_norm: Option<f32>,
    /// Ranks that take part in a barrier; `None` for all.
    pub members: Option<Vec<usize>>,

    /// Backend that the op runs on.
    pub backend: BackendKind,
    /// Element type in which partials travel between ranks; `None` for that of C.
    pub wire: Option<DType>,
    /// Rows and columns of a tile; `None` if the plan chooses.
    pub tile: Option<TileShape>,
    /// Dimension along which A is split over the ranks.
    pub shard: Shard,
    /// Layout of the staging buffer into which A is gathered.
    pub staging: StagingLayout,
    /// Number of columns of A per flag of the staging buffer into which A is gathered.
    pub columns_per_flag: Option<usize>,
    /// Number of workgroups that only fetch A from peers into the staging buffer.
    pub fetchers: Option<usize>,
    /// Number of workgroups of a launch; `None` if the plan chooses.
    pub workgroups: Option<usize>,
    /// Number of multiprocessors that calls leave free for a kernel that runs at the same time.
    pub beside: usize,
    /// Implementation of whole-matrix GEMMs: a vendor's library or our own.
    pub library: Library,
    /// Whether all ranks have the same N and K. If so, the choice of a variant may depend on N and
    /// K.
    pub even: bool,
    /// Root rank of a broadcast.
    pub root: usize,
    /// Number of trace spans that each workgroup has room for; 0 for no trace.
    pub trace_spans: u32,
    /// Whether GPU kernels count the bytes that they move.
    pub counted: bool,
    /// Number of blocks into which a call over several nodes is cut; `None` if the plan chooses.
    pub blocks: Option<usize>,
    /// Number of the first call; tests choose numbers near the ends of the range of call numbers.
    pub first_call: i32,
    /// Delays and faults that a test injects into the kernels.
    pub injected: FaultInjection,
}

macro_rules! setters {
    ($($name:ident: $type:ty => $value:expr;)*) => {$(
        #[doc = concat!("See the field `", stringify!($name), "`.")]
        #[must_use]
        pub fn $name(mut self, $name: $type) -> Self {
            self.$name = $value;
            self
        }
    )*};
}

impl Options {
    /// Options for at most `m` rows, `n` columns and inner dimension `k`, in f32.
    pub fn new(m: usize, n: usize, k: usize) -> Self {
        Self {
            m,
            n,
            k,
            dtype: DType::F32,
            output: None,
            epilogue: Epilogue::None,
            rms_norm: None,
            members: None,
            backend: BackendKind::Cpu,
            wire: None,
            tile: None,
            shard: Shard::Rows,
            staging: StagingLayout::KContiguous,
            columns_per_flag: None,
            fetchers: None,
            workgroups: None,
            beside: 0,
            library: Library::default(),
            even: false,
            root: 0,
            trace_spans: 0,
            counted: false,
            blocks: None,
            first_call: 1,
            injected: FaultInjection::default(),
        }
    }

    setters! {
        dtype: DType => dtype;
        output: DType => Some(output);
        epilogue: Epilogue => epilogue;
        rms_norm: f32 => Some(rms_norm);
        members: Vec<usize> => Some(members);
        backend: BackendKind => backend;
        wire: DType => Some(wire);
        tile: TileShape => Some(tile);
        shard: Shard => shard;
        staging: StagingLayout => staging;
        columns_per_flag: usize => Some(columns_per_flag);
        fetchers: usize => Some(fetchers);
        workgroups: usize => Some(workgroups);
        beside: usize => beside;
        library: Library => library;
        even: bool => even;
        root: usize => root;
        trace_spans: u32 => trace_spans;
        counted: bool => counted;
        blocks: usize => Some(blocks);
        first_call: i32 => first_call;
        injected: FaultInjection => injected;
    }

    /// Element type of C: that of A if `output` is not set.
    pub fn output_dtype(&self) -> DType {
        self.output.unwrap_or(self.dtype)
    }

    /// Element type in which partials travel between ranks: that of C if `wire` is not set.
    pub fn wire_dtype(&self) -> DType {
        self.wire.unwrap_or(self.output_dtype())
    }

    fn staged(&self) -> Staged {
        let mut staged = Staged::new().layout(self.staging);
        (staged.columns_per_flag, staged.fetchers) = (self.columns_per_flag, self.fetchers);
        staged
    }
}

/// Plans a call of `op` with the variant of this name; `auto` leaves the variant to the plan.
///
/// # Errors
/// Errors of the plan; a test option that the op does not have.
pub fn plan(
    op: Op,
    variant: impl AsRef<str>,
    ranks: impl Into<Ranks>,
    options: &Options,
) -> anyhow::Result<Plan> {
    let variant = op.variant(variant.as_ref())?;
    let Options { m, n, k, epilogue, ref members, .. } = *options;
    let mut request = op.request(m, n, k);
    request.variant = variant;
    request.blocks = options.blocks;
    request.members = members.clone();
    // A barrier has no elements, so options about elements are not passed to its plan.
    if op != Op::Barrier {
        let same = |&output: &DType| !op.multiplies() && output == options.dtype;
        (request.output, request.epilogue) = (options.output.filter(|it| !same(it)), epilogue);
        request.rms_norm = options.rms_norm;
    }
    if variant == Some(Variant::Staged) {
        request.staged = options.staged();
    }
    for &name in op.options() {
        match name {
            "dtype" => request.dtype = options.dtype,
            "wire" => request.wire = options.wire,
            "tile" => request.tile = options.tile,
            "shard" => request.shard = options.shard,
            "workgroups" => request.workgroups = options.workgroups,
            "beside" => request.beside = options.beside,
            "library" => request.library = options.library,
            "even" => request.even = options.even,
            "root" => request.root = options.root,
            // Options that the code above has passed on, whether or not the op reads them.
            "variant" | "output" | "epilogue" | "rms_norm" | "members" => {}
            other => {
                bail!("{op}: its option {other} is unknown to the tests: add it to suite::Options")
            }
        }
    }
    (request.trace_spans, request.counted) = (options.trace_spans, options.counted);
    (request.first_call, request.injected) = (options.first_call, options.injected);
    Ok(request.plan(ranks.into().on(options.backend))?)
}
