//! Cases of operators: every operator and variant, over shapes, types, layouts and options.

use iris_heap::{BackendKind, DType};
use iris_ops::{Epilogue, Library, Op, Shard, TileShape};
use iris_testkit::suite::{Case, Layout, Options, Residual};

/// Number of cases to list for a backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Extent {
    /// A few cases of each variant.
    Few,
    /// All shapes, and each option by itself, for each variant.
    All,
}

/// N and K of one rank, and the numbers of rows of its calls; the last of these is the plan's
/// maximum M.
type Shape = (usize, usize, &'static [usize]);

const LARGE: Shape = (8192, 3584, &[1, 8, 16, 128, 512, 2048, 8192]);
const MIDDLE: Shape = (8192, 3584, &[16, 512, 2048]);
/// Shape small enough for the LL protocol.
const SMALL: Shape = (8192, 3584, &[1, 8, 16, 128]);
const RAGGED: Shape = (1000, 333, &[3, 17, 130]);
const UNEVEN: Shape = (3000, 520, &[1000, 3001]);
const ODD: Shape = (1001, 331, &[1, 64, 129]);
const TINY: Shape = (5, 4, &[1, 3]);
const DEEP: Shape = (1024, 8192, &[1, 64, 4096]);
const EMPTY: Shape = (8, 0, &[0, 2]);
const FLAT: Shape = (0, 8, &[2]);

/// Plan of an operator, and the calls that are made with it.
pub(crate) struct Planned {
    pub(crate) what: String,
    pub(crate) case: Case,
    pub(crate) calls: Vec<Call>,
}

/// Matrices of a call, for any number of rows: their layouts, bias and residual.
pub(crate) struct Call {
    pub(crate) what: String,
    /// Copy of the plan's case with the layouts, bias and residual of this call.
    pub(crate) case: Case,
    /// Element type of the bias; used only if `case.bias` is set.
    pub(crate) bias: DType,
}

/// All plans for a backend: every operator with `auto` and with each variant.
pub(crate) fn all(backend: BackendKind, extent: Extent) -> Vec<Planned> {
    let mut all = Vec::new();
    for op in Op::ALL {
        let names = op.variants().into_iter().map(|it| it.name().to_owned());
        for variant in ["auto".to_owned()].into_iter().chain(names) {
            of_variant((backend, extent), op, &variant, &mut all);
        }
    }
    all
}

type Change<'a> = &'a dyn Fn(&mut Case);

/// Whether the operator has all options that the case sets. Every variant would refuse other cases
/// in the same way.
fn is_asked_well(case: &Case) -> bool {
    let options = &case.options;
    let asked = [
        (options.epilogue != Epilogue::None, "epilogue"),
        (options.rms_norm.is_some(), "rms_norm"),
        (options.shard != Shard::Rows, "shard"),
        (options.wire.is_some(), "wire"),
        (options.library != Library::default(), "library"),
        (options.root != 0, "root"),
        (options.members.is_some(), "members"),
        (options.uniform_shape, "uniform_shape"),
        (options.output.is_some(), "output"),
    ];
    asked.into_iter().all(|(asked, name)| !asked || case.op.options().contains(&name))
}

fn of_variant(
    (backend, extent): (BackendKind, Extent),
    op: Op,
    variant: &str,
    all: &mut Vec<Planned>,
) {
    let multiplies = op.multiplies();
    let mut add = |shape: Shape, what: &str, changed: Change<'_>, how: fn(&Case) -> Vec<Call>| {
        let (n, k, rows) = shape;
        let most = rows.last().copied().unwrap_or_default();
        let options = Options::new(most, n, if multiplies { k } else { 0 });
        let options = options.dtype(DType::BF16).backend(backend);
        let mut case = Case::new(op, variant, options);
        case.rows = rows.to_vec();
        changed(&mut case);
        if is_asked_well(&case) {
            all.push(Planned { what: what.to_owned(), calls: how(&case), case });
        }
    };
    let plain = |_: &mut Case| {};
    if op == Op::Barrier {
        add((0, 0, &[0, 0]), "plain", &plain, once);
        add((0, 0, &[0]), "rank 0 alone", &|case| case.options.members = Some(vec![0]), once);
        return;
    }
    let norm = |case: &mut Case| case.options.rms_norm = Some(1e-5);
    let columns = |case: &mut Case| case.options.shard = Shard::Columns;
    let many = if extent == Extent::All { each_layout } else { once };
    add(MIDDLE, "plain", &plain, many);
    add(SMALL, "small", &plain, many);
    add(ODD, "plain", &plain, once);
    add(MIDDLE, "columns", &columns, many);
    add(MIDDLE, "norm", &norm, each_residual);
    if extent == Extent::Few {
        return;
    }
    add(RAGGED, "ragged", &plain, each_layout);
    for (shape, what) in [
        (LARGE, "large"),
        (UNEVEN, "uneven rows"),
        (TINY, "tiny"),
        (DEEP, "deep"),
        (EMPTY, "empty"),
        (FLAT, "flat"),
    ] {
        add(shape, what, &plain, once);
    }
    add(RAGGED, "columns", &columns, once);
    for shape in [SMALL, RAGGED] {
        add(shape, "norm", &norm, each_residual);
    }
    for shape in [SMALL, MIDDLE, RAGGED] {
        add(shape, "f16", &|case| case.options.dtype = DType::F16, once);
        add(shape, "f32", &|case| case.options.dtype = DType::F32, once);
        add(shape, "output f32", &|case| case.options.output = Some(DType::F32), once);
        add(shape, "wire f32", &|case| case.options.wire = Some(DType::F32), once);
        add(shape, "uniform_shape", &|case| case.options.uniform_shape = true, once);
        add(shape, "uneven", &|case| case.uneven = true, once);
        add(shape, "gelu", &|case| case.options.epilogue = Epilogue::Gelu, each_residual);
        for library in [Library::Vendor, Library::Ours, Library::None] {
            let asked = |case: &mut Case| case.options.library = library;
            let how = if shape == RAGGED { once } else { each_layout };
            add(shape, &format!("library {library}"), &asked, how);
        }
    }
    for library in [Library::Vendor, Library::Ours] {
        let asked = |case: &mut Case| {
            norm(case);
            case.options.library = library;
        };
        for shape in [SMALL, MIDDLE] {
            add(shape, &format!("library {library}, norm"), &asked, each_residual);
        }
    }
    for shape in [SMALL, MIDDLE] {
        add(shape, "count_traffic", &|case| case.options.count_traffic = true, once);
        add(shape, "traced", &|case| case.options.trace_spans = 64, once);
        add(shape, "8 workgroups", &|case| case.options.workgroups = Some(8), once);
        let tile = TileShape { m: 64, n: 64 };
        add(shape, "tile", &|case| case.options.tile = Some(tile), once);
        add(shape, "root 1", &|case| case.options.root = 1, once);
    }
}

fn call(of: &Case, what: &str, change: Change<'_>) -> Call {
    let mut case = of.clone();
    case.residual = Residual::None;
    change(&mut case);
    Call { what: what.to_owned(), bias: case.options.output_dtype(), case }
}

/// One call with contiguous matrices, without bias.
fn once(of: &Case) -> Vec<Call> {
    vec![call(of, "plain", &|_| {})]
}

/// Calls in which one matrix at a time has another layout, and calls with a bias.
fn each_layout(of: &Case) -> Vec<Call> {
    let mut calls = each_residual(of);
    type Lay = fn(&mut Case) -> &mut Layout;
    let matrices: [(&str, Lay); 3] =
        [("A", |case| &mut case.a), ("B", |case| &mut case.b), ("C", |case| &mut case.c)];
    for (name, lies) in matrices {
        if name == "B" && !of.op.multiplies() {
            continue;
        }
        type Change = fn(&mut Layout);
        let layouts: [(&str, Change); 6] = [
            ("one element on", |it| it.before = 1),
            ("an odd ld", |it| it.pad = 1),
            ("an even ld", |it| it.pad = 8),
            ("transposed", |it| it.transposed = true),
            ("external", |it| it.external = true),
            ("elsewhere on each rank", |it| it.skewed = true),
        ];
        for (how, change) in layouts {
            calls.push(call(of, &format!("{name} {how}"), &|case| change(lies(case))));
        }
    }
    calls.push(call(of, "C is A", &|case| case.in_place = true));
    calls
}

/// Calls with and without a bias and, for an RMSNorm, with each kind of residual.
fn each_residual(of: &Case) -> Vec<Call> {
    let mut calls = once(of);
    if of.options.rms_norm.is_some() {
        calls.push(call(of, "residual", &|case| case.residual = Residual::Apart));
        calls.push(call(of, "residual in C", &|case| case.residual = Residual::InC));
    }
    if of.op.multiplies() {
        calls.push(call(of, "bias", &|case| case.bias = true));
        let wide = call(of, "f32 bias", &|case| case.bias = true);
        calls.push(Call { bias: DType::F32, ..wide });
        calls.push(call(of, "bias, residual", &|case| {
            (case.bias, case.residual) = (true, Residual::Apart);
        }));
    }
    calls
}
