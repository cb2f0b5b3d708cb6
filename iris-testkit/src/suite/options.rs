//! What a case asks of any op, as one struct: what tests and programs vary, whichever op it is for.

use anyhow::ensure;
use iris_heap::{BackendKind, DType};
use iris_ops::{
    Epilogue, Injected, Library, Op, Plan, Ranks, Shard, Staged, StagingLayout, TileShape,
    all_gather, all_gather_matmul, all_reduce, all_to_all, barrier, broadcast, matmul,
    matmul_all_gather, matmul_all_reduce, matmul_reduce_scatter, reduce_scatter,
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
    /// Whose products of whole matrices are used.
    pub library: Library,
    /// Rank that broadcasts.
    pub root: usize,
    /// Spans that each workgroup has room for in a trace.
    pub trace_spans: u32,
    /// Whether kernels on GPUs count what they move.
    pub counted: bool,
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
            members: None,
            backend: BackendKind::Cpu,
            wire: None,
            tile: None,
            shard: Shard::Rows,
            staging: StagingLayout::KContiguous,
            columns_per_flag: None,
            fetchers: None,
            workgroups: None,
            library: Library::default(),
            root: 0,
            trace_spans: 0,
            counted: false,
            first_call: 1,
            injected: Injected::default(),
        }
    }

    setters! {
        dtype: DType => dtype;
        output: DType => Some(output);
        epilogue: Epilogue => epilogue;
        members: Vec<usize> => Some(members);
        backend: BackendKind => backend;
        wire: DType => Some(wire);
        tile: TileShape => Some(tile);
        shard: Shard => shard;
        staging: StagingLayout => staging;
        columns_per_flag: usize => Some(columns_per_flag);
        fetchers: usize => Some(fetchers);
        workgroups: usize => Some(workgroups);
        library: Library => library;
        root: usize => root;
        trace_spans: u32 => trace_spans;
        counted: bool => counted;
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

    /// Whether kernels on GPUs are those that trace and count.
    pub fn is_observed(&self) -> bool {
        self.counted || self.trace_spans > 0
    }

    fn staged(&self) -> Staged {
        let mut staged = Staged::new().layout(self.staging);
        (staged.columns_per_flag, staged.fetchers) = (self.columns_per_flag, self.fetchers);
        staged
    }
}

/// The same options for each op's own struct: first those that all have, then those that are named.
macro_rules! ask {
    ($from:ident, $options:expr $(, $setter:ident)*) => {{
        let mut options = $options
            .trace_spans($from.trace_spans)
            .counted($from.counted)
            .first_call($from.first_call)
            .injected($from.injected);
        $(ask!(@ $from, options, $setter);)*
        options
    }};
    (@ $from:ident, $to:ident, dtype) => { $to = $to.dtype($from.dtype); };
    (@ $from:ident, $to:ident, shard) => { $to = $to.shard($from.shard); };
    (@ $from:ident, $to:ident, epilogue) => { $to = $to.epilogue($from.epilogue); };
    (@ $from:ident, $to:ident, library) => { $to = $to.library($from.library); };
    (@ $from:ident, $to:ident, root) => { $to = $to.root($from.root); };
    (@ $from:ident, $to:ident, $setter:ident) => {
        if let Some(value) = $from.$setter.clone() {
            $to = $to.$setter(value);
        }
    };
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
    let variant = variant.as_ref();
    let Options { m, n, k, output, epilogue, members, .. } = options;
    let (m, n, k, ranks) = (*m, *n, *k, ranks.into().on(options.backend));
    if !op.multiplies() {
        let output = output.filter(|&output| output != options.dtype && op != Op::Barrier);
        ensure!(output.is_none(), "{op}: output is {}", options.output_dtype());
        let moves = matches!(op, Op::AllGather | Op::AllToAll | Op::Broadcast);
        ensure!(!moves || *epilogue == Epilogue::None, "{op}: epilogue is {epilogue:?}");
    }
    ensure!(
        members.is_none() || op == Op::Barrier,
        "{op}: members are {members:?}, of which only a barrier has some"
    );
    // Its file in iris-ops has the options that an op reads.
    let only = || {
        let own = op.variants()[0];
        ensure!(["auto", own.name()].contains(&variant), "{op}: variant {variant}, not {own}");
        Ok(())
    };
    Ok(match op {
        Op::MatmulAllReduce => {
            let new = matmul_all_reduce::Options::new(m, n, k).variant(variant.parse()?);
            ask!(options, new, dtype, output, wire, epilogue, tile, workgroups, library)
                .plan(ranks)?
        }
        Op::MatmulReduceScatter => {
            let new = matmul_reduce_scatter::Options::new(m, n, k).variant(variant.parse()?);
            ask!(options, new, dtype, output, wire, epilogue, tile, workgroups, library)
                .plan(ranks)?
        }
        Op::AllGatherMatmul => {
            use all_gather_matmul::Variant;
            let variant = match variant.parse()? {
                Variant::Staged(_) => Variant::Staged(options.staged()),
                other => other,
            };
            let new = all_gather_matmul::Options::new(m, n, k).variant(variant);
            ask!(options, new, dtype, output, shard, epilogue, tile, workgroups).plan(ranks)?
        }
        Op::MatmulAllGather => {
            let new = matmul_all_gather::Options::new(m, n, k).variant(variant.parse()?);
            ask!(options, new, dtype, output, epilogue, tile, workgroups, library).plan(ranks)?
        }
        Op::Matmul => {
            only()?;
            let new = matmul::Options::new(m, n, k);
            ask!(options, new, dtype, output, epilogue, tile, workgroups, library).plan(ranks)?
        }
        Op::AllReduce => {
            let new = all_reduce::Options::rows(m, n).variant(variant.parse()?);
            ask!(options, new, dtype, wire, epilogue, tile, workgroups).plan(ranks)?
        }
        Op::AllGather => {
            let new = all_gather::Options::rows(m, n).variant(variant.parse()?);
            ask!(options, new, dtype, tile, workgroups).plan(ranks)?
        }
        Op::ReduceScatter => {
            let new = reduce_scatter::Options::rows(m, n).variant(variant.parse()?);
            ask!(options, new, dtype, wire, epilogue, tile, workgroups).plan(ranks)?
        }
        Op::AllToAll => {
            let new = all_to_all::Options::rows(m, n).variant(variant.parse()?);
            ask!(options, new, dtype, tile, workgroups).plan(ranks)?
        }
        Op::Broadcast => {
            let new = broadcast::Options::rows(m, n).variant(variant.parse()?);
            ask!(options, new, dtype, root, tile, workgroups).plan(ranks)?
        }
        Op::Barrier => {
            only()?;
            ask!(options, barrier::Options::new(), members).plan(ranks)?
        }
    })
}
