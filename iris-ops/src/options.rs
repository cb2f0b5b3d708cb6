//! What an operator is planned with: each has a struct of its own, with the options that it reads.
//!
//! Long because every option stands here once, with its documentation, for the operators that read it.

use iris_heap::{BackendKind, DType};
use iris_kernels::Library;
use iris_kernels::build::Injected;
use iris_kernels::gemm_config::TileSize;

use crate::error::{Error, Result};
use crate::kind::{Op, Variant};
use crate::ranks::Ranks;
use crate::spec::{Form, Norm, Row};

/// Rows, and columns, that a tile may have.
pub(crate) const WIDEST: usize = 65536;

/// Rows and columns of a tile.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TileShape {
    /// Rows.
    pub m: usize,
    /// Columns.
    pub n: usize,
}

impl std::fmt::Display for TileShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} x {}", self.m, self.n)
    }
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

/// The options of the variant `staged`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Staged {
    /// Columns of A that one flag stands for; the last of a shard may stand for fewer. By default 256,
    /// on a GPU 2048, as a product of fewer columns begins and ends more often than it pays there.
    pub columns_per_flag: Option<usize>,
    /// Workgroups that fetch; by default a quarter, at least one.
    pub fetchers: Option<usize>,
    /// Layout of the staging buffer.
    pub layout: StagingLayout,
}

impl Staged {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Columns of A that one flag stands for.
    #[must_use]
    pub fn columns_per_flag(self, columns: usize) -> Self {
        Self { columns_per_flag: Some(columns), ..self }
    }

    /// Workgroups that fetch.
    #[must_use]
    pub fn fetchers(self, fetchers: usize) -> Self {
        Self { fetchers: Some(fetchers), ..self }
    }

    /// Layout of the staging buffer.
    #[must_use]
    pub fn layout(self, layout: StagingLayout) -> Self {
        Self { layout, ..self }
    }
}

/// All that was asked of a plan, whatever its operator: what the operators' own options come to. It
/// can be read in the [`Plan`](crate::Plan); [`Op::request`] makes one for programs that know only at
/// run time which operator it is for.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Request {
    pub(crate) row: &'static Row,
    /// The variant; none where the choice is left to the plan.
    pub variant: Option<Variant>,
    /// Most rows of a call; of a message of elements, how many parts it has.
    pub m: usize,
    /// Columns; of a message of elements, most elements of a part.
    pub n: usize,
    /// Depth; 0 for an op without a product.
    pub k: usize,
    /// Whether the message is a number of elements, and not rows.
    pub elements: bool,
    /// Element type of A and B, or of the message.
    pub dtype: DType,
    /// Element type of C.
    pub output: Option<DType>,
    /// Element type that partials travel in.
    pub wire: Option<DType>,
    /// Shape of a tile.
    pub tile: Option<TileShape>,
    /// What is done to a finished element.
    pub epilogue: Epilogue,
    /// The epsilon of the RMSNorm of the result's rows; none for no norm.
    pub rms_norm: Option<f32>,
    /// Dimension of A that is split.
    pub shard: Shard,
    /// Of the variant `staged`.
    pub staged: Staged,
    /// Rank that broadcasts.
    pub root: usize,
    /// Ranks of a barrier; by default all.
    pub members: Option<Vec<usize>>,
    /// Workgroups of a launch; by default as many as can be resident.
    pub workgroups: Option<usize>,
    /// Multiprocessors that calls leave to a kernel beside them; 0 for no such kernel.
    pub beside: usize,
    /// Whose products of whole matrices are used.
    pub library: Library,
    /// Whether all ranks have the same N and K, so that these decide how calls are done.
    pub even: bool,
    /// Spans that each workgroup has room for in a trace; 0 for no trace.
    pub trace_spans: u32,
    /// Whether kernels on GPUs count what they move.
    pub counted: bool,
    /// Number of blocks of a call over several nodes; by default by their size.
    #[doc(hidden)]
    pub blocks: Option<usize>,
    /// Number of the first call.
    #[doc(hidden)]
    pub first_call: i32,
    /// What a test has the kernels do worse than they should.
    #[doc(hidden)]
    pub injected: Injected,
}

impl Form {
    /// Whether it does all that is asked for.
    pub(crate) fn serves(&self, request: &Request) -> bool {
        self.norm != Norm::None || request.rms_norm.is_none()
    }
}

impl Request {
    pub(crate) fn new(row: &'static Row, (m, n, k): (usize, usize, usize)) -> Self {
        Self {
            row,
            variant: None,
            m,
            n,
            k,
            elements: false,
            dtype: DType::F32,
            output: None,
            wire: None,
            tile: None,
            epilogue: Epilogue::None,
            rms_norm: None,
            shard: Shard::Rows,
            staged: Staged::default(),
            root: 0,
            members: None,
            workgroups: None,
            beside: 0,
            library: Library::default(),
            even: false,
            trace_spans: 0,
            counted: false,
            blocks: None,
            first_call: 1,
            injected: Injected::default(),
        }
    }

    /// The operator.
    pub fn op(&self) -> Op {
        self.row.op
    }

    /// Whether kernels on GPUs are those that trace and count.
    pub fn is_observed(&self) -> bool {
        self.counted || self.trace_spans > 0
    }

    /// Element type of C.
    pub fn output_dtype(&self) -> DType {
        self.output.unwrap_or(self.dtype)
    }

    /// How it is done, if somebody asked for a variant that there is.
    fn form(&self) -> Option<&'static Form> {
        self.row.form(self.variant?)
    }

    /// Element type that partials travel in.
    pub fn wire_dtype(&self) -> DType {
        self.wire.unwrap_or(self.output_dtype())
    }

    /// Columns of A that one flag of a staged gather stands for.
    pub fn columns_per_flag(&self, backend: BackendKind) -> usize {
        let default = if backend.traits().host_threads { 256 } else { 2048 };
        self.staged.columns_per_flag.unwrap_or(default)
    }

    /// Check every number by itself, before anything is computed from it.
    pub(crate) fn check(&self, ranks: Ranks) -> Result<()> {
        let op = self.op();
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
        if ranks.size == 0 || ranks.size / ranks.nodes() > iris_heap::MAX_RANKS {
            return invalid("size of the world", &ranks.size, "from 1 to 64 on each node");
        }
        if ranks.rank >= ranks.size {
            return invalid("rank", &ranks.rank, &format!("below {}", ranks.size));
        }
        let n = if self.elements { "count" } else { "n" };
        for (name, value) in [("m", self.m), (n, self.n), ("k", self.k)] {
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
        if let Some(tile @ TileShape { m, n }) = self.tile {
            if m.min(n) == 0 || m.max(n) > WIDEST {
                return invalid("tile", &tile, &format!("from 1 to {WIDEST} either way"));
            }
            if !ranks.device.backend.traits().host_threads
                && self.row.multiplies()
                && !self.form().is_some_and(Form::is_unfused)
                && TileSize::fitting(m as u32, n as u32).is_none()
            {
                let TileSize { m: most_m, n: most_n } = TileSize::ALL[0];
                let expected = format!("at most {most_m} x {most_n} on {}", ranks.device.backend);
                return invalid("tile", &tile, &expected);
            }
        }
        self.check_norm()?;
        if let Some(columns) = self.staged.columns_per_flag
            && (columns == 0 || columns > limit)
        {
            return invalid("columns_per_flag", &columns, &format!("from 1 to {limit}"));
        }
        if let Some(fetchers) = self.staged.fetchers
            && fetchers > limit
        {
            return invalid("fetchers", &fetchers, &most);
        }
        if self.injected != Injected::default() && ranks.device.backend.traits().host_threads {
            return invalid("injected", &format!("{:?}", self.injected), "nothing on the CPU");
        }
        if self.workgroups == Some(0) {
            return invalid("workgroups", &0, "at least 1");
        }
        let multiprocessors = ranks.device.multiprocessors as usize;
        let most = multiprocessors.saturating_sub(self.workgroups.unwrap_or(1));
        if self.beside > most && !ranks.device.backend.traits().host_threads {
            let expected = format!("at most {most} of {multiprocessors} multiprocessors");
            return invalid("beside", &self.beside, &expected);
        }
        if self.root >= ranks.size {
            return invalid("root", &self.root, &format!("below {}", ranks.size));
        }
        if let Some(members) = &self.members
            && (members.is_empty() || members.iter().any(|&rank| rank >= ranks.size))
        {
            let expected = format!("ranks below {}, at least one", ranks.size);
            return invalid("members", &format!("{members:?}"), &expected);
        }
        Ok(())
    }

    /// Whether it can be done so.
    pub(crate) fn check_form(&self, form: &Form) -> Result<()> {
        if self.beside > 0 && form.arrival.is_none() {
            let able = self.row.forms.iter().filter(|form| form.arrival.is_some());
            let names: Vec<_> = able.map(|form| form.variant.name()).collect();
            return Err(Error::Invalid {
                op: self.op(),
                what: "variant with a kernel beside it".into(),
                value: form.variant.to_string(),
                expected: format!("one whose tiles of C have signals: {}", names.join(", ")),
            });
        }
        if form.serves(self) {
            return Ok(());
        }
        let able = self.row.forms.iter().filter(|form| form.norm != Norm::None);
        let names: Vec<_> = able.map(|form| form.variant.name()).collect();
        Err(Error::Invalid {
            op: self.op(),
            what: "variant with rms_norm".into(),
            value: form.variant.to_string(),
            expected: format!("auto, {}", names.join(", ")),
        })
    }

    /// What can be said of an RMSNorm before it is known how a call is done.
    fn check_norm(&self) -> Result<()> {
        let Some(epsilon) = self.rms_norm else { return Ok(()) };
        let invalid = |what: &str, value: String, expected: String| {
            Err(Error::Invalid { op: self.op(), what: what.into(), value, expected })
        };
        if !(epsilon.is_finite() && epsilon > 0.0) {
            let expected = "a finite number above 0".into();
            return invalid("epsilon of rms_norm", epsilon.to_string(), expected);
        }
        if self.elements {
            let expected = "rows, as of Options::rows: it is rows that are normalised".into();
            return invalid("message with rms_norm", format!("{} elements", self.n), expected);
        }
        if self.n > WIDEST {
            let expected = format!("at most {WIDEST}: a workgroup normalises whole rows");
            return invalid("n with rms_norm", self.n.to_string(), expected);
        }
        Ok(())
    }
}

/// The struct of options of one operator, over a [`Request`], with the setters that are named.
macro_rules! options {
    ($row:expr, $(#[$doc:meta])* {
        $(#[$new:meta])* $by:ident($($dimension:ident),*);
        $($setter:ident,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct Options {
            pub(crate) request: $crate::options::Request,
        }

        impl Options {
            $crate::options::constructor!($row, $(#[$new])* $by($($dimension),*));
            $($crate::options::setter!($setter);)*
            // Every operator has these.
            $crate::options::setter!(trace_spans);
            $crate::options::setter!(counted);
            $crate::options::setter!(first_call);
            $crate::options::setter!(injected);
        }

        /// What the operator reads, beside what every operator does.
        pub(crate) const READS: &[&str] = &[$(stringify!($setter)),*];

        impl AsRef<$crate::options::Request> for Options {
            fn as_ref(&self) -> &$crate::options::Request {
                &self.request
            }
        }
    };
}

/// How options begin: a product by its three dimensions, a message by rows or by elements, which
/// come in one part or in one for each rank.
macro_rules! constructor {
    ($row:expr, $(#[$new:meta])* product($($dimension:ident),*)) => {
        $(#[$new])*
        pub fn new(m: usize, n: usize, k: usize) -> Self {
            Self { request: $crate::options::Request::new(&$row, (m, n, k)) }
        }
    };
    ($row:expr, $(#[$new:meta])* message()) => {
        $(#[$new])*
        pub fn new(count: usize) -> Self {
            let mut request = $crate::options::Request::new(&$row, (0, count, 0));
            request.elements = true;
            Self { request }
        }

        /// For at most `m` rows of `n` elements. What is split over the ranks are whole rows, evenly,
        /// the remainder to the first; a call may have fewer rows, and matrices with leading dimensions.
        pub fn rows(m: usize, n: usize) -> Self {
            Self { request: $crate::options::Request::new(&$row, (m, n, 0)) }
        }
    };
    ($row:expr, $(#[$new:meta])* nothing()) => {
        $(#[$new])*
        pub fn new() -> Self {
            Self { request: $crate::options::Request::new(&$row, (0, 0, 0)) }
        }
    };
}

macro_rules! setter {
    (dtype) => {
        /// Element type of A and B, or of the message: f32, f16 or bf16; by default f32.
        #[must_use]
        pub fn dtype(mut self, dtype: iris_heap::DType) -> Self {
            self.request.dtype = dtype;
            self
        }
    };
    (output) => {
        /// Element type of C; by default that of A.
        #[must_use]
        pub fn output(mut self, output: iris_heap::DType) -> Self {
            self.request.output = Some(output);
            self
        }
    };
    (wire) => {
        /// Element type that partials travel in; by default that of the result.
        #[must_use]
        pub fn wire(mut self, wire: iris_heap::DType) -> Self {
            self.request.wire = Some(wire);
            self
        }
    };
    (tile) => {
        /// Shape of a tile; by default chosen by the shape and the device.
        #[must_use]
        pub fn tile(mut self, tile: $crate::TileShape) -> Self {
            self.request.tile = Some(tile);
            self
        }
    };
    (epilogue) => {
        /// What is done to a finished element.
        #[must_use]
        pub fn epilogue(mut self, epilogue: $crate::Epilogue) -> Self {
            self.request.epilogue = epilogue;
            self
        }
    };
    (rms_norm) => {
        /// Beside the result each call writes the RMSNorm of its rows, and it may add a residual:
        /// [`NormArgs`](crate::NormArgs) says what is what. `epsilon` is added to the mean of squares.
        /// Only some variants do it; the others are refused.
        #[must_use]
        pub fn rms_norm(mut self, epsilon: f32) -> Self {
            self.request.rms_norm = Some(epsilon);
            self
        }
    };
    (shard) => {
        /// Dimension of A that is split.
        #[must_use]
        pub fn shard(mut self, shard: $crate::Shard) -> Self {
            self.request.shard = shard;
            self
        }
    };
    (variant) => {
        /// How it is done; by default the plan chooses.
        #[must_use]
        pub fn variant(mut self, variant: Variant) -> Self {
            variant.ask(&mut self.request);
            self
        }
    };
    (root) => {
        /// Rank that broadcasts; by default 0.
        #[must_use]
        pub fn root(mut self, root: usize) -> Self {
            self.request.root = root;
            self
        }
    };
    (members) => {
        /// Ranks that take part; by default all.
        #[must_use]
        pub fn members(mut self, members: Vec<usize>) -> Self {
            self.request.members = Some(members);
            self
        }
    };
    (workgroups) => {
        /// Number of workgroups of a launch of the operator's kernels: at most what can be resident, which is the
        /// default. It changes neither the variant nor the launches of GEMMs, which may fill the device.
        #[must_use]
        pub fn workgroups(mut self, workgroups: usize) -> Self {
            self.request.workgroups = Some(workgroups);
            self
        }
    };
    (beside) => {
        /// Multiprocessors that the workgroups of a call leave to a kernel of the caller's beside it, which keeps its
        /// place while it waits for tiles; by default none, and no kernel may run beside a call. Variants whose tiles
        /// have no signals are refused: where `auto` takes one for some size, name another.
        #[must_use]
        pub fn beside(mut self, multiprocessors: usize) -> Self {
            self.request.beside = multiprocessors;
            self
        }
    };
    (library) => {
        /// Whose product of whole matrices is used, on a GPU and where nothing is fused into it; by
        /// default that which was measured to be faster.
        #[must_use]
        pub fn library(mut self, library: iris_kernels::Library) -> Self {
            self.request.library = library;
            self
        }
    };
    (even) => {
        /// Whether all ranks have the same N and K, also what of these is a rank's own: then it may decide
        /// how calls are done, by what was measured for it. By default it does not, since each rank plans
        /// for itself. Ranks of which one has others are told so when they make the operator.
        #[must_use]
        pub fn even(mut self, even: bool) -> Self {
            self.request.even = even;
            self
        }
    };
    (trace_spans) => {
        /// Number of spans that each workgroup has room for in a trace; 0, the default, for no trace. The variant and
        /// what moves the message are those of calls without a trace. A GEMM of a library, or of ours that does more
        /// than a product, is one span of the first workgroup's.
        #[must_use]
        pub fn trace_spans(mut self, trace_spans: u32) -> Self {
            self.request.trace_spans = trace_spans;
            self
        }
    };
    (counted) => {
        /// Whether kernels on GPUs count what they move, which takes time; on the CPU they always do. The variant is
        /// that of calls that are not counted, but workgroups move what copy engines and GEMMs would.
        #[must_use]
        pub fn counted(mut self, counted: bool) -> Self {
            self.request.counted = counted;
            self
        }
    };
    (first_call) => {
        #[doc(hidden)]
        /// Number of the first call: for tests near the ends of the range.
        #[must_use]
        pub fn first_call(mut self, first_call: i32) -> Self {
            self.request.first_call = first_call;
            self
        }
    };
    (injected) => {
        #[doc(hidden)]
        /// What a stress test has device kernels do worse than they should: late, or wrong.
        #[must_use]
        pub fn injected(mut self, injected: $crate::Injected) -> Self {
            self.request.injected = injected;
            self
        }
    };
}

pub(crate) use {constructor, options, setter};
