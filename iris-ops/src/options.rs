//! Options with which operators are planned. The `Options` struct of each operator has only the
//! options that the operator reads.
//!
//! This file is long because each option and its documentation are defined here once, for all
//! operators that read it.

use std::panic::Location;
use std::sync::Arc;

use iris_heap::{BackendKind, DType};
use iris_kernels::args::MOST_TENSORS;
use iris_kernels::build::FaultInjection;
use iris_kernels::dtype::{Role, has_mma, has_role};
use iris_kernels::gemm;
use iris_kernels::gemm_config::TileSize;
use iris_kernels::schedule::Collective;
pub(crate) use iris_kernels::schedule::Shard;
use iris_kernels::{Library, VendorBits};

use crate::error::{Error, Result};
use crate::op_names::{Op, Variant};
use crate::op_row::{Form, GemmStage, Memory, Norm, Part, Row};
use crate::topology::Topology;

/// Maximum number of rows, and maximum number of columns, of a tile.
pub(crate) const WIDEST: usize = 65536;

/// Largest M, N and K, and largest number of elements of a message.
pub(crate) const MOST_ELEMENTS: usize = i32::MAX as usize / 2;

/// Shape of a tile, in elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TileShape {
    /// Number of rows of a tile.
    pub m: usize,
    /// Number of columns of a tile.
    pub n: usize,
}

impl std::fmt::Display for TileShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} x {}", self.m, self.n)
    }
}

/// Layout of the staging buffer of `all_gather_matmul` (variant `staged`), and the order in which
/// the buffer is filled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum StagingLayout {
    /// Row-major, `[m][k]`, filled along K first.
    #[default]
    KContiguous,
    /// Column-major, `[k][m]`, filled along M first.
    MContiguous,
}

/// Function that is applied to each element of the result, after the bias and after the sum over
/// ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Epilogue {
    /// No function: elements stay as they are.
    #[default]
    None,
    /// GELU: x / 2 * (1 + erf(x / sqrt 2)).
    Gelu,
}

/// Options that only the variant `staged` of `all_gather_matmul` reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Staged {
    /// Number of columns of A that are fetched together and have one flag (the last flag of a shard
    /// may cover fewer columns). Default: 256 on a CPU, 2048 on a GPU, where short products have
    /// too much overhead.
    pub columns_per_flag: Option<usize>,
    /// Number of workgroups that only fetch peers' shards; default: a quarter of the launch's
    /// workgroups, at least one.
    pub fetchers: Option<usize>,
    /// Layout of the staging buffer, and the order in which the buffer is filled.
    pub layout: StagingLayout,
}

impl Staged {
    /// Default options: the plan chooses the number of columns per flag and the number of fetchers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the number of columns of A that are fetched together and have one flag.
    #[must_use]
    pub fn columns_per_flag(self, columns: usize) -> Self {
        Self { columns_per_flag: Some(columns), ..self }
    }

    /// Sets the number of workgroups that only fetch the peers' shards of A.
    #[must_use]
    pub fn fetchers(self, fetchers: usize) -> Self {
        Self { fetchers: Some(fetchers), ..self }
    }

    /// Sets the layout of the staging buffer.
    #[must_use]
    pub fn layout(self, layout: StagingLayout) -> Self {
        Self { layout, ..self }
    }
}

/// Options of a plan of any operator. The `Options` of a single operator are translated into this
/// struct, which [`Plan::request`](crate::Plan::request) returns. A program that chooses the
/// operator at run time makes a request by [`Op::request`] and sets its fields.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Request {
    pub(crate) row: &'static Row,
    /// Name of the operator in errors, equal on all ranks. If `None`, errors show the place where
    /// the program makes the operator.
    pub name: Option<Arc<str>>,
    /// Variant that the caller requests; `None` if the plan chooses.
    pub variant: Option<Variant>,
    /// Maximum number of rows of a call. If `elements` is set: number of parts of the message, such
    /// as one for each rank.
    pub m: usize,
    /// Number of columns. If `elements` is set: maximum number of elements of each part.
    pub n: usize,
    /// Inner dimension K of the matrix product, or number of parts of which a message is the weighted
    /// sum; else 0.
    pub k: usize,
    /// Whether the message is planned by its number of elements; otherwise it is planned by rows
    /// and columns.
    pub elements: bool,
    /// Element type of A and B, or of the message.
    pub dtype: DType,
    /// Further tensors of a gather of a list: element type and number of columns of each.
    pub(crate) more: Vec<(DType, usize)>,
    /// Element type of C; `None` for the type of A.
    pub output: Option<DType>,
    /// Element type in which partial results are sent between ranks; `None` for the type of C.
    pub wire: Option<DType>,
    /// Shape of a tile; `None` if the plan chooses.
    pub tile: Option<TileShape>,
    /// Function applied to each element of the result.
    pub epilogue: Epilogue,
    /// Epsilon of the RMSNorm of the result's rows; `None` for no RMSNorm.
    pub rms_norm: Option<f32>,
    /// Dimension of A that is split over the ranks: rows or columns.
    pub shard: Shard,
    /// Options of the variant `staged`.
    pub staged: Staged,
    /// Root rank of a broadcast.
    pub root: usize,
    /// Ranks that take part in a barrier; `None` for all.
    pub members: Option<Vec<usize>>,
    /// Number of workgroups of a launch; `None` for as many as can be resident at once.
    pub workgroups: Option<usize>,
    /// Number of multiprocessors that calls leave free for a kernel of the caller that runs at the
    /// same time; 0 if there is no such kernel.
    pub reserve_sms: usize,
    /// Maximum number of thread blocks of a step between nodes that may be in flight on the device
    /// during a call; 0 if there is no such step. Launches that wait for peers leave one
    /// multiprocessor free for each of these thread blocks.
    pub step_blocks: u32,
    /// GEMM implementation for whole-matrix products: the vendor's, the built-in one, or the faster
    /// of the two.
    pub library: Library,
    /// Whether N and K are equal on all ranks, so that the plan may choose the variant by N and K.
    pub uniform_shape: bool,
    /// Whether a row of the result has the same bits in every call, whatever other rows the call has.
    pub batch_invariant: bool,
    /// Number of trace spans per workgroup; 0 for no trace.
    pub trace_spans: u32,
    /// Whether GPU kernels count the bytes that they move, and the signals and flags that they use.
    pub count_traffic: bool,
    /// Number of blocks into which a call over several nodes is cut. If `None`, it is derived from
    /// the number of bytes of the call.
    #[doc(hidden)]
    pub blocks: Option<usize>,
    /// Number of the first call: 1, except in tests of call numbers that wrap around.
    #[doc(hidden)]
    pub first_call: i32,
    /// Faults and delays that a test injects into the kernels.
    #[doc(hidden)]
    pub fault_injection: FaultInjection,
}

impl Form {
    /// Whether the variant supports the request. Some variants cannot apply an RMSNorm. Variants
    /// that send sums as items of the LL protocol need a wire type that equals the type of C. Some
    /// variants are not batch invariant.
    pub(crate) fn serves(&self, ranks: Topology, request: &Request) -> bool {
        let normed = self.norm != Norm::None || request.rms_norm.is_none();
        normed
            && (!self.sends_sums_as_items() || request.wire_dtype() == request.output_dtype())
            && (!request.batch_invariant || self.is_batch_invariant(ranks, request))
    }

    /// Whether a row of the result has the same bits in every call, and those of every other variant
    /// for which this is true. False if ranks add in any order. Also false if a tile is the sum of
    /// products of parts of K that other variants do not have: either the variant splits K, or the
    /// built-in whole-matrix GEMM does.
    fn is_batch_invariant(&self, ranks: Topology, request: &Request) -> bool {
        let by_shards = self.pulls || self.memory == Memory::Gathered;
        let in_parts =
            self.memory == Memory::Staged || by_shards && request.shard == Shard::Columns;
        let by_tiles = request.row.multiplies() && self.gemm == GemmStage::None;
        let in_others = by_tiles && request.may_split_k(ranks);
        !self.variant.order_varies() && !in_parts && !in_others
    }

    /// Whether finished sums are sent as items of the LL protocol, like the data that is added up.
    pub(crate) fn sends_sums_as_items(&self) -> bool {
        matches!(self.memory, Memory::Pairs(Collective::TwoShot { root: None }))
    }
}

impl Request {
    pub(crate) fn new(row: &'static Row, (m, n, k): (usize, usize, usize)) -> Self {
        Self {
            row,
            name: None,
            variant: None,
            m,
            n,
            k,
            elements: false,
            dtype: DType::F32,
            more: Vec::new(),
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
            reserve_sms: 0,
            step_blocks: 0,
            library: Library::default(),
            uniform_shape: false,
            batch_invariant: false,
            trace_spans: 0,
            count_traffic: false,
            blocks: None,
            first_call: 1,
            fault_injection: FaultInjection::default(),
        }
    }

    /// Operator for which the request is made.
    pub fn op(&self) -> Op {
        self.row.op
    }

    /// Text for the operator with its shape. If the operator has no name of its own, the text also
    /// has the place where the program makes it.
    pub(crate) fn label(&self, place: Option<&Location<'_>>) -> Arc<str> {
        let what = self.shape();
        match (&self.name, place) {
            (Some(name), _) => format!("{name} ({what})"),
            (None, Some(place)) => format!("{what} at {place}"),
            (None, None) => what,
        }
        .into()
    }

    /// Text for the operator with its shape and element type: `matmul_all_reduce of 64 x 256 x 128
    /// f32`.
    pub(crate) fn shape(&self) -> String {
        let Request { m, n, k, dtype, elements, .. } = *self;
        match (self.op(), elements) {
            (op, _) if self.row.c == Part::None => op.to_string(),
            (op, _) if op.multiplies() => format!("{op} of {m} x {n} x {k} {dtype}"),
            (op, true) => format!("{op} of {n} {dtype}"),
            (op, false) if !self.more.is_empty() => format!("{op} of {m} x ({})", self.list()),
            (op, false) if self.row.combines() => {
                format!("{op} of {m} x {n} {dtype} from {k} parts")
            }
            (op, false) => format!("{op} of {m} x {n} {dtype}"),
        }
    }

    /// Element type and number of columns of each tensor of a gather of a list.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (DType, usize)> {
        std::iter::once((self.dtype, self.n)).chain(self.more.iter().copied())
    }

    /// Text for the tensors of a list: `7168 bf16, 8 i32`.
    pub(crate) fn list(&self) -> String {
        let tensors = self.tensors().map(|(dtype, n)| format!("{n} {dtype}"));
        tensors.collect::<Vec<_>>().join(", ")
    }

    /// Whether GPU kernels of the plan are built with counters or with tracing.
    pub fn is_observed(&self) -> bool {
        self.count_traffic || self.trace_spans > 0
    }

    /// Element type of C: the type that the request sets, otherwise the type of A.
    pub fn output_dtype(&self) -> DType {
        self.output.unwrap_or(self.dtype)
    }

    /// [`Form`] (program, memory, properties) of the variant that the request names; `None` if the
    /// plan chooses, or if the operator has no such variant.
    fn form(&self) -> Option<&'static Form> {
        self.row.form(self.variant?)
    }

    /// Element type in which partial results are sent between ranks: the type that the request
    /// sets, otherwise the type of C.
    pub fn wire_dtype(&self) -> DType {
        self.wire.unwrap_or(self.output_dtype())
    }

    /// Number of columns of A that a staged gather fetches together, with one flag: the requested
    /// number, or the default of this backend.
    pub fn columns_per_flag(&self, backend: BackendKind) -> usize {
        let default = if backend.traits().host_threads { 256 } else { 2048 };
        self.staged.columns_per_flag.unwrap_or(default)
    }

    /// Checks the range of each option separately, so that no value that is computed from several
    /// options overflows.
    pub(crate) fn check(&self, ranks: Topology) -> Result<()> {
        let op = self.op();
        let invalid = |what: &str, value: &dyn ToString, expected: &str| {
            Err(Error::invalid(op, what, value.to_string(), expected))
        };
        let most = format!("at most {MOST_ELEMENTS}");
        if ranks.size == 0 || ranks.size / ranks.nodes() > iris_heap::MAX_RANKS {
            return invalid("size of the world", &ranks.size, "from 1 to 64 on each node");
        }
        if ranks.rank >= ranks.size {
            return invalid("rank", &ranks.rank, &format!("below {}", ranks.size));
        }
        let n = if self.elements { "count" } else { "n" };
        for (name, value) in [("m", self.m), (n, self.n), ("k", self.k)] {
            if value > MOST_ELEMENTS {
                return invalid(name, &value, &most);
            }
        }
        for (name, dtype, role) in [
            ("dtype", self.dtype, self.row.input_role()),
            ("output", self.output_dtype(), self.row.output_role()),
            ("wire", self.wire_dtype(), Role::Wire),
        ] {
            // A list is moved as bytes, so its tensors may have any type.
            if !has_role(dtype, role) && self.more.is_empty() {
                return invalid(name, &dtype, &role.names());
            }
        }
        if let Some(tile @ TileShape { m, n }) = self.tile {
            if m.min(n) == 0 || m.max(n) > WIDEST {
                return invalid("tile", &tile, &format!("from 1 to {WIDEST} rows and columns"));
            }
            if !ranks.device.backend.traits().host_threads
                && self.row.multiplies()
                && !self.form().is_some_and(Form::has_whole_gemm)
                && TileSize::fitting(m as u32, n as u32).is_none()
            {
                let TileSize { m: most_m, n: most_n } = TileSize::ALL[0];
                let expected = format!("at most {most_m} x {most_n} on {}", ranks.device.backend);
                return invalid("tile", &tile, &expected);
            }
        }
        self.check_norm()?;
        self.check_ll_only(ranks)?;
        if let Some(columns) = self.staged.columns_per_flag
            && (columns == 0 || columns > MOST_ELEMENTS)
        {
            return invalid("columns_per_flag", &columns, &format!("from 1 to {MOST_ELEMENTS}"));
        }
        if let Some(fetchers) = self.staged.fetchers
            && fetchers > MOST_ELEMENTS
        {
            return invalid("fetchers", &fetchers, &most);
        }
        if self.fault_injection != FaultInjection::default()
            && ranks.device.backend.traits().host_threads
        {
            return invalid(
                "fault_injection",
                &format!("{:?}", self.fault_injection),
                "the default on the CPU: only device kernels inject faults",
            );
        }
        if self.workgroups == Some(0) {
            return invalid("workgroups", &0, "at least 1");
        }
        let multiprocessors = ranks.device.multiprocessors as usize;
        let most = multiprocessors.saturating_sub(self.workgroups.unwrap_or(1));
        if self.reserve_sms > most && !ranks.device.backend.traits().host_threads {
            let expected = format!("at most {most} of {multiprocessors} multiprocessors");
            return invalid("reserve_sms", &self.reserve_sms, &expected);
        }
        if self.root >= ranks.size {
            return invalid("root", &self.root, &format!("below {}", ranks.size));
        }
        if let Some(members) = &self.members
            && (members.is_empty()
                || members.iter().any(|&rank| rank >= ranks.size)
                || members.iter().enumerate().any(|(at, rank)| members[..at].contains(rank)))
        {
            let expected = format!("different ranks below {}, at least one", ranks.size);
            return invalid("members", &format!("{members:?}"), &expected);
        }
        Ok(())
    }

    /// Checks that tiles of C have signals in this variant, if a kernel of the caller runs at the
    /// same time as calls.
    pub(crate) fn check_arrival(&self, form: &Form) -> Result<()> {
        if self.reserve_sms > 0 && form.arrival.is_none() {
            let able = self.row.names(|form| form.arrival.is_some());
            let expected = format!("one whose tiles of C have signals: {able}");
            let what = "variant with a kernel beside it";
            return Err(Error::invalid(self.op(), what, form.variant, expected));
        }
        Ok(())
    }

    /// Checks that a variant supports the requested RMSNorm, wire type and batch invariance.
    pub(crate) fn check_form(&self, ranks: Topology, form: &Form) -> Result<()> {
        let (wire, output) = (self.wire_dtype(), self.output_dtype());
        if form.sends_sums_as_items() && wire != output {
            let what = format!("wire of variant {}", form.variant);
            let expected = format!("{output}, the type of C");
            return Err(Error::invalid(self.op(), what, wire, expected));
        }
        if self.batch_invariant && self.row.multiplies() && self.library == Library::Vendor {
            let (shape, dtype) = ([self.n, self.k], self.dtype);
            let device = format!("{} {}", ranks.device.name, ranks.device.arch);
            let known = |it: &VendorBits| {
                it.device == device && it.dtype == dtype && it.shapes.contains(&shape)
            };
            let one_type = [self.output_dtype(), self.wire_dtype()] == [dtype; 2];
            if !one_type || !ranks.tuning().vendor_bits.iter().any(known) {
                let expected = "auto, ours or none: the bits of the vendor's product have not been \
                                compared with ours for this N, K and types (`iris tune --bits`)";
                let what = "library with batch_invariant";
                return Err(Error::invalid(self.op(), what, self.library, expected));
            }
        }
        if self.batch_invariant && !form.is_batch_invariant(ranks, self) {
            let able = self.row.names(|form| form.is_batch_invariant(ranks, self));
            let what = match self.shard {
                _ if self.may_split_k(ranks) && !form.variant.order_varies() => {
                    "variant with batch_invariant and a small N with a large K"
                }
                Shard::Columns => "variant with batch_invariant and a split of columns",
                _ => "variant with batch_invariant",
            };
            let expected = format!("auto, {able}");
            return Err(Error::invalid(self.op(), what, form.variant, expected));
        }
        if form.serves(ranks, self) {
            return Ok(());
        }
        let expected = format!("auto, {}", self.row.names(|form| form.norm != Norm::None));
        Err(Error::invalid(self.op(), "variant with rms_norm", form.variant, expected))
    }

    /// Number of ranges of K whose products this rank adds in the order of K.
    pub(crate) fn k_parts(&self, ranks: Topology) -> u32 {
        let built_in = matches!(self.library, Library::Auto | Library::Ours);
        let alike = [self.output_dtype(), self.wire_dtype()] == [self.dtype; 2];
        // Where the product itself applies GELU, the tile GEMM multiplies. Sums apply it afterwards.
        // Over several nodes a gather of columns multiplies a column-major A, by the tile GEMM.
        let by_columns = self.shard == Shard::Columns && ranks.nodes() > 1;
        let splits = self.batch_invariant
            && self.row.multiplies()
            && ranks.device.has_wgmma()
            && has_mma(self.dtype)
            && built_in
            && alike
            && (self.row.adds_products() || self.epilogue == Epilogue::None)
            && !by_columns
            && !self.fault_injection.is_by_messages();
        if splits { gemm::k_parts(self.n, self.k) } else { 1 }
    }

    /// Whether a rank may add the products of several ranges of K. Ranks that do not know each
    /// other's N and K answer alike.
    pub(crate) fn may_split_k(&self, ranks: Topology) -> bool {
        let of = |own: usize, common: bool, least: usize| match common || self.uniform_shape {
            true => own,
            false => least,
        };
        // Another rank may have the smallest N or a large K.
        let (n, k) = (of(self.n, self.row.common.n, 8), of(self.k, self.row.common.k, 1 << 20));
        Self { n, k, ..self.clone() }.k_parts(ranks) > 1
    }

    /// Advice for a request that only a message by the LL protocol can serve, but that such a message
    /// cannot serve either; `None` for any other request.
    pub(crate) fn instead_of_ll(&self) -> Option<&'static str> {
        match (self.more.is_empty(), self.row.combines()) {
            (false, _) => Some("gather each tensor by a plan of its own"),
            (true, true) => {
                Some("sum the parts of each row before the call, and plan without combine")
            }
            (true, false) => None,
        }
    }

    /// Checks the conditions on a list of tensors and on a sum of weighted parts, each of which is one
    /// message by the LL protocol.
    fn check_ll_only(&self, ranks: Topology) -> Result<()> {
        let Some(instead) = self.instead_of_ll() else { return Ok(()) };
        let (of, with) = match self.row.combines() {
            true => ("with combine", "with combine"),
            false => ("of a list", "for a list"),
        };
        let invalid = |what: &str, value: &dyn ToString, expected: &str| {
            Err(Error::invalid(self.op(), what, value.to_string(), expected))
        };
        let count = 1 + self.more.len();
        if count > MOST_TENSORS {
            let expected = format!("at most {MOST_TENSORS}; gather the others by another plan");
            return invalid("number of tensors", &count, &expected);
        }
        for (index, (_, n)) in self.tensors().enumerate() {
            if n > MOST_ELEMENTS {
                let what = format!("n of tensor {}", index + 1);
                return invalid(&what, &n, &format!("at most {MOST_ELEMENTS}"));
            }
        }
        if self.row.combines() && (self.k == 0 || self.n * self.k > MOST_ELEMENTS) {
            let most = MOST_ELEMENTS / self.n.max(1);
            return invalid("number of parts", &self.k, &format!("from 1 to {most}"));
        }
        if self.elements {
            let expected = "a plan by rows, from Options::rows: rows are sent";
            return invalid(&format!("message {of}"), &format!("{} elements", self.n), expected);
        }
        if ranks.nodes() > 1 {
            let expected = format!("1 {with}; {instead}");
            return invalid("number of nodes", &ranks.nodes(), &expected);
        }
        if let Some(variant) = self.variant.filter(|&variant| variant != Variant::Ll) {
            let expected = format!(
                "auto or ll: the call is one message by the LL protocol; for another variant {instead}"
            );
            return invalid(&format!("variant {of}"), &variant, &expected);
        }
        if self.reserve_sms > 0 {
            let expected =
                format!("0 {with}: a message by the LL protocol has no signals for tiles");
            return invalid("reserve_sms", &self.reserve_sms, &expected);
        }
        Ok(())
    }

    /// Checks the conditions on the requested RMSNorm that hold for every variant.
    fn check_norm(&self) -> Result<()> {
        let Some(epsilon) = self.rms_norm else { return Ok(()) };
        let invalid = |what: &str, value: String, expected: String| {
            Err(Error::invalid(self.op(), what, value, expected))
        };
        if !(epsilon.is_finite() && epsilon > 0.0) {
            let expected = "a finite number above 0".into();
            return invalid("epsilon of rms_norm", epsilon.to_string(), expected);
        }
        if self.elements {
            let expected = "a plan by rows, from Options::rows: an RMSNorm normalises rows".into();
            return invalid("message with rms_norm", format!("{} elements", self.n), expected);
        }
        if self.n > WIDEST {
            let expected = format!("at most {WIDEST}, because a workgroup normalises whole rows");
            return invalid("n with rms_norm", self.n.to_string(), expected);
        }
        Ok(())
    }
}

/// Defines the `Options` struct of an operator over a [`Request`], with a constructor and the
/// listed setters.
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
            // Setters that the `Options` of every operator have.
            $crate::options::setter!(name);
            $crate::options::setter!(batch_invariant);
            $crate::options::setter!(trace_spans);
            $crate::options::setter!(count_traffic);
            $crate::options::setter!(first_call);
            $crate::options::setter!(fault_injection);
        }

        /// Names of the options that the operator reads, except the options that all operators
        /// read.
        pub(crate) const READS: &[&str] = &[$(stringify!($setter)),*];

        impl AsRef<$crate::options::Request> for Options {
            fn as_ref(&self) -> &$crate::options::Request {
                &self.request
            }
        }
    };
}

/// Defines the constructors of an `Options` struct: `new(m, n, k)` for a product; `new(count)` and
/// `rows(m, n)` for a message by elements or by rows; `new()` for a barrier.
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

        /// Options for messages of at most `m` rows with `n` elements each. A message that is split
        /// over the ranks is split by whole rows, as evenly as possible; the first ranks get one
        /// row more if there is a remainder. A call may have fewer rows, and its matrices may have
        /// leading dimensions.
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

/// Defines the macro `setter_of`, which defines the setter of an option by the option's name.
macro_rules! setters {
    ($request:ident => $($(#[$doc:meta])* $name:ident($value:ident: $type:ty) $set:block)*) => {
        macro_rules! setter_of {
            $(($name) => {
                $(#[$doc])*
                #[must_use]
                pub fn $name(mut self, $value: $type) -> Self {
                    let $request = &mut self.request;
                    $set
                    self
                }
            };)*
        }
    };
}

setters! { request =>
    /// Sets the element type of A and B, or of the message: f32 (default), f16 or bf16.
    dtype(dtype: iris_heap::DType) { request.dtype = dtype }

    /// Sets the element type of C: f32, f16 or bf16. Default: the type of A.
    output(output: iris_heap::DType) { request.output = Some(output) }

    /// Sets the element type in which partial results travel between ranks: f32, f16 or bf16.
    /// Default: the type of the result. Over several nodes, sums between nodes are rounded to this
    /// type as well; NCCL rounds after each addition.
    wire(wire: iris_heap::DType) { request.wire = Some(wire) }

    /// Sets the shape of a tile. By default the plan chooses the tile by the shape of the call
    /// and by the device.
    tile(tile: crate::TileShape) { request.tile = Some(tile) }

    /// Sets the function that is applied to each element of the result. Default:
    /// [`Epilogue::None`](crate::Epilogue::None).
    epilogue(epilogue: crate::Epilogue) { request.epilogue = epilogue }

    /// Adds an RMSNorm: each call also writes the RMSNorm of its result's rows, and may add a
    /// residual first ([`NormArgs`](crate::NormArgs) has the formulas). `epsilon` is added to
    /// the mean of squares; it must be finite and above 0. Planning fails for variants without
    /// an RMSNorm.
    rms_norm(epsilon: f32) { request.rms_norm = Some(epsilon) }

    /// Sets the dimension of A that is split over the ranks. Default:
    /// [`Shard::Rows`](crate::Shard::Rows).
    shard(shard: crate::Shard) { request.shard = shard }

    /// Sets the variant that all calls run. By default the plan chooses a variant for each size
    /// of call.
    variant(variant: Variant) { variant.write_to(request) }

    /// Sets the root of the broadcast. Default: rank 0.
    root(root: usize) { request.root = root }

    /// Sets the ranks that take part in the barrier. Default: all ranks of the heap.
    members(members: Vec<usize>) { request.members = Some(members) }

    /// Sets the number of workgroups of a launch of the operator's kernels. Default and maximum: as
    /// many as can be resident at once. On a GPU, the last of several workgroups gets no data of a
    /// message by the LL protocol. The option changes neither the variant nor the launches of
    /// GEMMs, which may fill the device.
    workgroups(workgroups: usize) { request.workgroups = Some(workgroups) }

    /// Leaves this number of multiprocessors free during a call, for a kernel of the caller
    /// that runs at the same time and waits for the call's tiles. Default: 0, which allows no
    /// such kernel. Planning fails if a variant has no signals for its tiles of C. If `auto`
    /// chooses such a variant, choose another variant by name.
    reserve_sms(multiprocessors: usize) { request.reserve_sms = multiprocessors }

    /// Sets the implementation of whole-matrix GEMMs on GPUs, for variants that contain such a
    /// GEMM: the product of one rank, `unfused*`, `copy_engine` and `epilogue`. Default: the
    /// vendor's library or the built-in GEMM, whichever was measured to be faster.
    library(library: iris_kernels::Library) { request.library = library }

    /// Asserts that N and K are equal on all ranks, even if the operator allows different
    /// values. The plan may then use measurements for that shape. Default: false, because each
    /// rank plans by itself, and ranks with different shapes would choose differently. `new` of
    /// the operator fails if ranks pass different values.
    uniform_shape(uniform_shape: bool) { request.uniform_shape = uniform_shape }

    /// Sets the name of the operator in errors and faults, such as `layer3.down`; it must be
    /// the same on all ranks. Without a name, errors show the place where the program makes the
    /// operator.
    name(name: impl Into<std::sync::Arc<str>>) { request.name = Some(name.into()) }

    /// Makes the bits of a row of the result independent of its call: for a world of a given size
    /// they are the same whatever M and the plan's largest M are, whichever rows stand beside the
    /// row, at whichever place, by whichever variant that planning accepts. Default: false. Then
    /// the variant, the tile and the GEMM library of a call depend on its M, and with them the last
    /// bits of a row. With `true`, products are the built-in ones, and those of the vendor's library
    /// whose bits were compared with them. Planning fails for what has other bits: the variants
    /// `spinlock`, `atomic` and `staged`, and with a split of columns `baseline` and `pull`; variants
    /// that multiply by tiles where N is small and K large; `Library::Vendor` where nothing was
    /// compared; and sums between nodes. A call fails if N is small and K large and a matrix has a
    /// layout that the whole-matrix GEMM does not support.
    batch_invariant(batch_invariant: bool) { request.batch_invariant = batch_invariant }

    /// Sets the number of trace spans per workgroup; the default 0 means no trace. Tracing does
    /// not change the variant, nor whether workgroups or copy engines move the message. A
    /// library GEMM, or a built-in GEMM that also communicates, is traced as one span of the
    /// first workgroup.
    trace_spans(trace_spans: u32) { request.trace_spans = trace_spans }

    /// Makes GPU kernels count the bytes that they move and the signals that they use. Counting
    /// takes time; CPU kernels always count. The variant is the same as without counting, but
    /// workgroups do the work of copy engines and of GEMMs that store to peers.
    count_traffic(count_traffic: bool) { request.count_traffic = count_traffic }

    #[doc(hidden)]
    /// Sets the number of the first call, so that a test can reach the wrap-around of the call
    /// number.
    first_call(first_call: i32) { request.first_call = first_call }

    #[doc(hidden)]
    /// Injects delays or faults into the device kernels, for stress tests.
    fault_injection(fault_injection: crate::FaultInjection) { request.fault_injection = fault_injection }
}

pub(crate) use {constructor, options, setter_of as setter};
