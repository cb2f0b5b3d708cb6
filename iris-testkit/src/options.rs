//! Options of any operator as one struct, and plans made from them, for tests and programs that
//! vary everything.

use std::ops::{Deref, DerefMut};

use anyhow::bail;
use iris_heap::{BackendKind, DType};
use iris_ops::{
    Epilogue, FaultInjection, Library, Op, OpRequest, Plan, Shard, StagingLayout, TileShape,
    Topology, Variant,
};

/// Options of any operator's plan: the fields of a request, and the backend. The operator is an
/// argument of [`plan`]. The fields `output`, `epilogue`, `rms_norm`, `members` and `blocks` are
/// always passed to the plan, which returns an error if the op does not have the option. Other
/// fields are ignored if the op does not have the option.
#[derive(Clone, Debug)]
pub struct Options {
    /// Backend that the op runs on.
    pub backend: BackendKind,
    /// Request with all other options; the request's operator is ignored.
    request: OpRequest,
}

impl Deref for Options {
    type Target = OpRequest;

    fn deref(&self) -> &OpRequest {
        &self.request
    }
}

impl DerefMut for Options {
    fn deref_mut(&mut self) -> &mut OpRequest {
        &mut self.request
    }
}

macro_rules! setters {
    ($($name:ident: $type:ty => $($field:ident).+ = $value:expr;)*) => {$(
        #[doc = concat!("Sets the field `", stringify!($($field).+), "`.")]
        #[must_use]
        pub fn $name(mut self, $name: $type) -> Self {
            self.$($field).+ = $value;
            self
        }
    )*};
}

impl Options {
    /// Options for at most `m` rows, `n` columns and inner dimension `k`, in f32.
    pub fn new(m: usize, n: usize, k: usize) -> Self {
        Self { backend: BackendKind::Cpu, request: Op::Matmul.request(m, n, k) }
    }

    setters! {
        dtype: DType => dtype = dtype;
        output: DType => output = Some(output);
        epilogue: Epilogue => epilogue = epilogue;
        rms_norm: f32 => rms_norm = Some(rms_norm);
        members: Vec<usize> => members = Some(members);
        backend: BackendKind => backend = backend;
        rows: usize => m = rows;
        wire: DType => wire = Some(wire);
        tile: TileShape => tile = Some(tile);
        shard: Shard => shard = shard;
        staging: StagingLayout => staged.layout = staging;
        columns_per_flag: usize => staged.columns_per_flag = Some(columns_per_flag);
        fetchers: usize => staged.fetchers = Some(fetchers);
        workgroups: usize => workgroups = Some(workgroups);
        reserve_sms: usize => reserve_sms = reserve_sms;
        library: Library => library = library;
        uniform_shape: bool => uniform_shape = uniform_shape;
        batch_invariant: bool => batch_invariant = batch_invariant;
        root: usize => root = root;
        trace_spans: u32 => trace_spans = trace_spans;
        count_traffic: bool => count_traffic = count_traffic;
        blocks: usize => blocks = Some(blocks);
        first_call: i32 => first_call = first_call;
        fault_injection: FaultInjection => fault_injection = fault_injection;
    }
}

/// Plans a call of `op` with the variant of this name; for `auto` the plan chooses the variant.
///
/// # Errors
/// Errors of the plan; a test option that the op does not have.
pub fn plan(
    op: Op,
    variant: impl AsRef<str>,
    ranks: impl Into<Topology>,
    options: &Options,
) -> anyhow::Result<Plan> {
    let mut request = op.request(options.m, options.n, options.k);
    request.variant = op.variant(variant.as_ref())?;
    macro_rules! pass {
        ($($field:ident),*) => {{ $(request.$field = options.$field.clone();)* }};
    }
    pass!(
        batch_invariant,
        blocks,
        members,
        trace_spans,
        count_traffic,
        first_call,
        fault_injection
    );
    // A barrier has no elements, so options about elements are not passed to its plan.
    if op != Op::Barrier {
        pass!(epilogue, rms_norm);
        let same = |&output: &DType| !op.multiplies() && output == options.dtype;
        request.output = options.output.filter(|it| !same(it));
    }
    if request.variant == Some(Variant::Staged) {
        pass!(staged);
    }
    for &name in op.options() {
        match name {
            "dtype" => pass!(dtype),
            "wire" => pass!(wire),
            "tile" => pass!(tile),
            "shard" => pass!(shard),
            "workgroups" => pass!(workgroups),
            "reserve_sms" => pass!(reserve_sms),
            "library" => pass!(library),
            "uniform_shape" => pass!(uniform_shape),
            "root" => pass!(root),
            // The code above has passed these options on already.
            "variant" | "output" | "epilogue" | "rms_norm" | "members" => {}
            other => {
                bail!("{op}: its option {other} is unknown to the tests: add it to suite::Options")
            }
        }
    }
    Ok(request.plan(ranks.into().on(options.backend))?)
}
