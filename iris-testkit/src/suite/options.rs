//! What a case asks of any op, as one struct: what tests and programs vary, whichever op it is for.

use anyhow::bail;
use iris_heap::{BackendKind, DType};
use iris_ops::{
    Epilogue, Injected, Library, Op, Plan, Ranks, Shard, Staged, StagingLayout, TileShape, Variant,
};

/// Shapes, types and choices. An op that has no use for one of the first group refuses it; those of the
/// second group are for the ops that read them, and are nothing to the others.
#[derive(Clone, Debug)]
pub struct Options {
    /// Most rows of a call.
    pub m: usize,
    /// Columns.
    pub n: usize,
    /// Depth; not read by an op without a product.
    pub k: usize,
    /// Element type of A and B, or of the message.
    pub dtype: DType,
    /// Element type of C.
    pub output: Option<DType>,
    /// What is done to a finished element.
    pub epilogue: Epilogue,
    /// The epsilon of the RMSNorm of the result's rows.
    pub rms_norm: Option<f32>,
    /// Ranks of a barrier; by default all.
    pub members: Option<Vec<usize>>,

    /// Kind of device that the op will run on.
    pub backend: BackendKind,
    /// Element type that partials travel in.
    pub wire: Option<DType>,
    /// Shape of a tile.
    pub tile: Option<TileShape>,
    /// Dimension of A that is split.
    pub shard: Shard,
    /// Layout of the staging buffer.
    pub staging: StagingLayout,
    /// Columns of A that one flag of a staged gather stands for.
    pub columns_per_flag: Option<usize>,
    /// Workgroups that fetch.
    pub fetchers: Option<usize>,
    /// Workgroups of a launch.
    pub workgroups: Option<usize>,
    /// Multiprocessors that calls leave to a kernel beside them.
    pub beside: usize,
    /// Whose products of whole matrices are used.
    pub library: Library,
    /// Whether all ranks have the same N and K, which may decide then.
    pub even: bool,
    /// Rank that broadcasts.
    pub root: usize,
    /// Spans that each workgroup has room for in a trace.
    pub trace_spans: u32,
    /// Whether kernels on GPUs count what they move.
    pub counted: bool,
    /// Number of blocks of a call over several nodes.
    pub blocks: Option<usize>,
    /// Number of the first call.
    pub first_call: i32,
    /// What a test has the kernels do worse than they should.
    pub injected: Injected,
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
    /// For at most `m` rows, `n` columns and depth `k`, in f32.
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
            injected: Injected::default(),
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
        injected: Injected => injected;
    }

    /// Element type of C.
    pub fn output_dtype(&self) -> DType {
        self.output.unwrap_or(self.dtype)
    }

    /// Element type that partials travel in.
    pub fn wire_dtype(&self) -> DType {
        self.wire.unwrap_or(self.output_dtype())
    }

    fn staged(&self) -> Staged {
        let mut staged = Staged::new().layout(self.staging);
        (staged.columns_per_flag, staged.fetchers) = (self.columns_per_flag, self.fetchers);
        staged
    }
}

/// Plan an op by name; `auto` leaves the variant to the plan.
///
/// # Errors
/// Those of the plan; an option that the op does not have.
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
    // A barrier has no elements: what is asked of them is nothing to it.
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
            // Asked above, whether the op reads them or not.
            "variant" | "output" | "epilogue" | "rms_norm" | "members" => {}
            other => bail!("{op}: no test asks for its option {other}"),
        }
    }
    (request.trace_spans, request.counted) = (options.trace_spans, options.counted);
    (request.first_call, request.injected) = (options.first_call, options.injected);
    Ok(request.plan(ranks.into().on(options.backend))?)
}
