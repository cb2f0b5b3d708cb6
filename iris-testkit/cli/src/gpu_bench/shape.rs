//! Measurement of one shape: its matrices, the sides to time (ops and baselines), and the result
//! lines.

use std::rc::Rc;
use std::sync::Arc;

use anyhow::Result;
use bytemuck::Zeroable;
use iris_heap::{DType, HeapOptions, SymSlice, SymmetricHeap, random_unit};
use iris_kernels::args::OpArgs;
use iris_ops::{CollectiveArgs, MatRef, NormArgs, OpRequest, Plan, Shard, TileShape, Topology};
use iris_testkit::matrix::{bytes, matrix, values};
use iris_testkit::oracle::{Meaning, Rows};
use iris_testkit::rank_setup::{Rig, Room};
use iris_testkit::suite::{Case, Op, Operands};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::baseline::{Baseline, Buffers};
use super::called::{Arguments, Called};
use super::matrix_contents::{Noise, Sampled, relative};
use super::message::{self, Message};
use super::norm::{self, Apart};
use super::plans::Plans;
use super::row_kernel::{self, RowKernel};
use super::step::{self, Step, Steps, Sum};
use super::timed_sides::{Clock, Side, Times, Work};
use super::vendor::{self, Multiplier};
use super::{Beside, Rank, Shape};
use crate::job::gather;
use crate::problem::TimedVariant;
use crate::timing::{median, slowest};

impl Shape {
    /// Makes the plan for the variant and tile of `choice`.
    pub(super) fn plan(&self, choice: &TimedVariant, ranks: Topology) -> Result<Plan> {
        let mut options = self.options.clone();
        options.tile = choice.tile.map(|[m, n]| TileShape { m, n });
        self.message.plan(self.op, &choice.variant, ranks, &options)
    }

    /// Fields of a result line that say what was measured: the call that `choice` asks for. A field
    /// that the call does not have is null here.
    pub(super) fn subject(&self, choice: &TimedVariant) -> Value {
        let OpRequest { m, n, k, dtype, shard, workgroups, rms_norm, .. } = *self.options;
        // A decoder step and other plans are timed with the first choice.
        let is_first = self.choices.first() == Some(choice);
        let layers = self.layers.filter(|_| is_first);
        let larger_plan = self.larger_plan.filter(|_| is_first);
        let batch_invariant = (self.batch_invariant && is_first).then_some(true);
        let (list, combine) = match &self.message {
            Message::Plain => (None, None),
            Message::List(list) => (Some(list), None),
            Message::Parts(parts) => (None, Some(parts)),
        };
        json!({
            "op": self.op.name(), "asked": choice.variant, "dtype": dtype.name(),
            "m": m, "n": n, "k": k, "columns": (shard == Shard::Columns).then_some(true),
            "workgroups": workgroups, "rms_norm": rms_norm, "layers": layers,
            "larger_plan": larger_plan, "batch_invariant": batch_invariant,
            "list": list, "combine": combine,
        })
    }
}

/// Shapes (rows, columns) of A, B and C on a rank.
fn shapes(shape: &Shape, ranks: Topology) -> [(usize, usize); 3] {
    let case = Case::new(shape.op, "auto", shape.options.clone());
    let [a, b, c] = case.shapes(ranks, shape.options.m);
    let columns = shape.message.columns(&shape.options, [a.1, c.1]);
    [(a.0, columns[0]), b, (c.0, columns[1])]
}

/// Matrices: A, B, C of the ops, C of the libraries, and the intermediate matrix that libraries
/// gather or scatter. With an RMSNorm the sum goes to the intermediate matrix, and the normalised
/// rows go to the C of the op or of the baseline. The intermediate matrix of weighted parts without an
/// RMSNorm has the combined rows, which the libraries sum.
struct Matrices {
    heap: Arc<SymmetricHeap>,
    a: SymSlice<u8>,
    b: SymSlice<u8>,
    c: SymSlice<u8>,
    other_c: SymSlice<u8>,
    between: SymSlice<u8>,
    workspace: SymSlice<u8>,
    residual: SymSlice<u8>,
    weight: SymSlice<u8>,
    /// Weights of the parts, M x number of parts, f32.
    part_weights: SymSlice<f32>,
}

impl Matrices {
    /// Opens a heap with room for the matrices and for all plans. Collective.
    fn new(rank: &Rank<'_>, shape: &Shape, plans: &Plans) -> Result<Matrices> {
        let OpRequest { m, n, k, dtype, .. } = *shape.options;
        let size = rank.world.size();
        let parts = if let Message::Parts(parts) = shape.message { parts } else { 0 };
        let mut most = [0; 3];
        for rank in 0..size {
            for (most, (rows, cols)) in
                most.iter_mut().zip(shapes(shape, Topology::new(rank, size)))
            {
                *most = rows.saturating_mul(cols).max(*most);
            }
        }
        let between = match shape.op {
            Op::AllGatherMatmul => m * k,
            Op::MatmulReduceScatter => m * n,
            _ if plans.apart.is_some() || parts > 0 => m * n,
            _ => 0,
        };
        let (residual, weight) = if plans.apart.is_some() { (m * n, n) } else { (0, 0) };
        let elements = [most[0], most[1], most[2], most[2], between, residual, weight];
        let room = plans.room().matrices(DType::F32, [m * parts]);
        let Room { data, signal } = room.matrices(dtype, elements);
        // Plans of different ranks may need different amounts of memory, but all ranks must open
        // heaps of the same size.
        let all: Vec<(u64, u64)> = gather(rank.world, &(data, signal))?;
        let all = all.into_iter().map(|(data, signal)| Room { data, signal });
        let workspace = Room { data: Multiplier::WORKSPACE as u64 + 4096, signal: 0 };
        let room = all.fold(Room::default(), Room::or).and(workspace);
        let options = HeapOptions::new().backend(shape.options.backend);
        let heap = Rig::open(rank.world, options, room)?.heap;
        let alloc = |at: usize| heap.alloc::<u8>(elements[at].max(1) * dtype.size());
        let (a, b, c, other_c, between) = (alloc(0)?, alloc(1)?, alloc(2)?, alloc(3)?, alloc(4)?);
        let workspace = heap.alloc::<u8>(Multiplier::WORKSPACE)?;
        let (residual, weight) = (alloc(5)?, alloc(6)?);
        let part_weights = heap.alloc::<f32>((m * parts).max(1))?;
        for (seed, slice) in [(1, a), (2, b), (3, between)] {
            Noise::new(dtype, seed, rank.world.rank())?.fill(&heap, slice)?;
        }
        // Residual and weight are the same on all ranks.
        for (seed, slice) in [(4, residual), (5, weight)] {
            Noise::new(dtype, seed, 0)?.fill(&heap, slice)?;
        }
        let drawn = |at| random_unit(6, rank.world.rank(), at) as f32;
        let factors: Vec<f32> = (0..part_weights.len()).map(drawn).collect();
        heap.write(part_weights, &factors)?;
        if parts > 0 && plans.apart.is_none() {
            let rows = message::combined(&values(dtype, &heap.read(a)?)?, &factors, (parts, n));
            let rows = bytes(dtype, rows.into_iter())?;
            heap.write(between.slice(..rows.len())?, &rows)?;
        }
        Ok(Matrices { heap, a, b, c, other_c, between, workspace, residual, weight, part_weights })
    }

    /// Matrices of a call of the op, with those of its RMSNorm if `normed`.
    fn arguments(&self, shape: &Shape, ranks: Topology, normed: bool) -> Result<Arguments> {
        let OpRequest { m, n, dtype, rms_norm, .. } = *shape.options;
        let [a, b, c] = shapes(shape, ranks);
        let matrix = |slice, shape| matrix(slice, dtype, shape);
        let (c, norm) = match rms_norm {
            None => (matrix(self.c, c)?, None),
            Some(_) => {
                let norm = NormArgs::new(matrix(self.weight, (1, c.1))?, matrix(self.c, c)?);
                (matrix(self.between, c)?, Some(norm.residual(matrix(self.residual, c)?)))
            }
        };
        let norm = norm.filter(|_| normed);
        let mut collective = match &shape.message {
            Message::Plain => {
                let operands = Operands::new(matrix(self.a, a)?, matrix(self.b, b)?, c);
                return Ok(Arguments::Any(operands.norm(norm)));
            }
            Message::List(list) => message::gather([self.a, self.c], [a.0, m], (dtype, n), list)?,
            Message::Parts(parts) => {
                let weights = MatRef::sym(self.part_weights, m, *parts);
                CollectiveArgs::new(matrix(self.a, a)?, c).weights(weights)
            }
        };
        collective.norm = norm;
        Ok(Arguments::Collective(collective))
    }

    /// Makes the two-step baseline of an op with an RMSNorm; `plan` is the op's plan without the
    /// RMSNorm.
    fn apart(&self, shape: &Shape, plan: &Plan, ranks: Topology) -> Result<Apart> {
        let OpRequest { m, n, dtype, rms_norm, .. } = *shape.options;
        let op = Called::new(&self.heap, plan, &self.arguments(shape, ranks, false)?)?;
        let matrix = |slice, rows| row_kernel::matrix(&self.heap, slice, dtype, (rows, n));
        let (c, residual) = (matrix(self.between, m)?, matrix(self.residual, m)?);
        let (weight, normed) = (matrix(self.weight, 1)?, matrix(self.other_c, m)?);
        let (m, n, epsilon) = (m as u32, n as u32, rms_norm.unwrap_or_default());
        let args = OpArgs { m, n, epsilon, a: c, c, residual, weight, normed, ..OpArgs::zeroed() };
        let kernel = RowKernel::new(&self.heap, norm::SOURCE, "add_norm", args)?;
        Ok(Apart { op, kernel })
    }

    /// Data that this rank must send in a call, as a block of memory, and the ranks that receive
    /// it; `None` if nothing must be sent, or if ranks are on other nodes. A broadcast is counted as
    /// a pipeline in which each rank sends to the next one.
    fn crossing(&self, shape: &Shape, of: Topology) -> Result<Option<(SymSlice<u8>, Vec<usize>)>> {
        let OpRequest { m, n, k, dtype, .. } = *shape.options;
        let [_, n] = shape.message.columns(&shape.options, [n; 2]);
        let part = |elements: usize| elements / of.size;
        let others: Vec<usize> = (1..of.size).map(|by| (of.rank + by) % of.size).collect();
        let meaning = Meaning::of(shape.op);
        let (elements, peers) = match (meaning.gives, meaning.gets) {
            _ if !meaning.exchanges() || of.nodes() > 1 => return Ok(None),
            (Rows::Root, _) | (_, Rows::Root) => (m * n, others.into_iter().take(1).collect()),
            (Rows::Shard, _) => (part(m * k), others),
            (_, Rows::All) if meaning.sums => (2 * part(m * n), others),
            _ => (part(m * n), others),
        };
        let bytes = elements * dtype.size();
        let room = [self.other_c, self.between, self.a].into_iter();
        let block = room.map(|slice| slice.slice(..bytes)).find_map(Result::ok);
        Ok(block.filter(|_| of.size > 1 && bytes > 0).map(|block| (block, peers)))
    }

    /// Operands of this rank's GEMM without communication, in the matrices that the libraries use.
    fn operands_alone(&self, shape: &Shape, [m, n, k]: [usize; 3]) -> Result<Operands> {
        let a = if shape.op == Op::AllGatherMatmul { self.between } else { self.a };
        let scattered = shape.op == Op::MatmulReduceScatter;
        let c = if scattered { self.between } else { self.other_c };
        let matrix = |slice, size| matrix(slice, shape.options.dtype, size);
        let (a, b, c) = (matrix(a, (m, k))?, matrix(self.b, (k, n))?, matrix(c, (m, n))?);
        Ok(Operands::new(a, b, c))
    }
}

/// Times and errors of one rank, as sent to rank 0.
#[derive(Serialize, Deserialize)]
struct Seen {
    times: Vec<Times>,
    /// Relative errors of the variants and of the other plans, stored as the bits of f64, because JSON has no NaN.
    errors: Vec<u64>,
}

/// Measures one shape on all ranks. Collective; rank 0 returns the result lines.
pub(super) fn measure(rank: &Rank<'_>, shape: &Shape) -> Result<Vec<Value>> {
    let dtype = shape.options.dtype;
    let world = &rank.world.for_heap(&HeapOptions::new().backend(shape.options.backend))?;
    let ranks = match shape.beside {
        // `iris tune` measures for a tuning file, which may not be there yet.
        Beside::First => Topology::from(world).on(shape.options.backend).untuned(),
        Beside::Libraries => Topology::from(world),
    };
    let plans = Plans::new(shape, ranks)?;
    let matrices = Matrices::new(rank, shape, &plans)?;
    let heap = &matrices.heap;

    // Sides in this order: the ops, the ops of the other plans, this rank's GEMM by the kernel of iris, then the libraries.
    let mut sides = Vec::new();
    let arguments = matrices.arguments(shape, ranks, true)?;
    for plan in &plans.variants {
        sides.push(Side::op(Called::new(heap, plan, &arguments)?));
    }
    let variants = sides.len();
    for (_, plan) in &plans.others {
        sides.push(Side::op(Called::new(heap, plan, &arguments)?));
    }
    let ops = sides.len();
    // Libraries sum the rows that the host has combined.
    let a = match shape.message {
        Message::Parts(_) if plans.apart.is_none() => matrices.between,
        _ => matrices.a,
    };
    let slices = [a, matrices.b, matrices.other_c, matrices.between, matrices.workspace];
    let buffers = Buffers::new(heap, slices)?;
    let nccl = rank.nccl.as_ref().map_err(String::clone);
    let blas = rank.blas.as_ref().map_err(String::clone);
    let (mut own, mut library, mut base, mut note) = (None, None, None, None);
    let (mut transfer, mut windowed) = (None, None);
    if let Some((dimensions, plan)) = &plans.alone {
        let operands = matrices.operands_alone(shape, *dimensions)?;
        own = Some(sides.len());
        sides.push(Side::op(Called::new(heap, plan, &Arguments::Any(operands))?));
        if let Ok(blas) = blas {
            let gathered = shape.op == Op::AllGatherMatmul;
            let product = || Baseline::product(blas, *dimensions, dtype, &buffers, gathered);
            // If the library cannot make this GEMM, it is skipped here; the baseline below fails as
            // well and reports the reason.
            if let Ok(product) = rank.home.current(product) {
                library = Some(sides.len());
                sides.push(Side::libraries(product, "the product by a library"));
            }
        }
    }
    let mut theirs = shape.options.clone();
    [_, theirs.n] = shape.message.columns(&shape.options, [theirs.n; 2]);
    let libraries = |nccl| {
        let with = (nccl, blas.clone());
        rank.home.current(|| Baseline::new(shape.op, &theirs, ranks, with, &buffers))
    };
    // A side for the libraries is added if they are present. If both libraries are missing, a
    // message before the first shape has already said so.
    match libraries(nccl.clone()) {
        _ if shape.beside == Beside::First => base = Some(0),
        // The libraries have no RMSNorm, so there is no vendor baseline.
        _ if plans.apart.is_some() => {}
        Ok(baseline) => {
            base = Some(sides.len());
            sides.push(Side::libraries(baseline, "product and collective by libraries"));
        }
        Err(_) if !rank.has_library => {}
        Err(why) => note = Some(format!("no baseline: {why:#}")),
    }
    if let Some(plan) = plans.apart.as_ref().filter(|_| base.is_none()) {
        base = Some(sides.len());
        let apart = matrices.apart(shape, plan, ranks)?;
        sides.push(Side::of(Work::Apart(Box::new(apart))));
    }
    if let Some((block, peers)) = matrices.crossing(shape, ranks)? {
        transfer = Some(sides.len());
        sides.push(Side::of(Work::Copies { heap: heap.clone(), block, peers }));
    }
    // All data that the libraries access is registered as one window of a second communicator; the
    // first communicator has no window. all_to_all and broadcast are left out because they gain
    // nothing (NCCL 2.28.9, 2 x H200: same times; an all_to_all of 16 MiB hung twice; 2026-11-23).
    let gains = !matches!(shape.op, Op::AllToAll | Op::Broadcast);
    let window = match &rank.windowed {
        Some(of) if base.is_some() && plans.apart.is_none() && gains => {
            Some(rank.home.current(|| vendor::register(of, &buffers.all()))?)
        }
        _ => None,
    };
    if let (Some(of), Some(_)) = (&rank.windowed, &window) {
        windowed = Some(sides.len());
        sides.push(Side::libraries(libraries(Ok(of))?, "the same in windows"));
    }

    let steps = match shape.layers {
        None => None,
        Some(layers) => {
            let library =
                if base.is_some() && plans.apart.is_none() { libraries(nccl).ok() } else { None };
            let op = Called::new(heap, &plans.variants[0], &arguments)?;
            let OpRequest { m, n, .. } = *shape.options;
            let c = row_kernel::matrix(heap, matrices.c, dtype, (m, n))?;
            let args = OpArgs { m: m as u32, n: n as u32, c, ..OpArgs::zeroed() };
            let between = RowKernel::new(heap, step::SOURCE, "touch", args)?;
            Some(add_steps(&mut sides, layers, op, library, between))
        }
    };

    // Each side is first prepared and called once, and its result is kept for the comparison with
    // the baseline. Then all sides are timed in turns.
    let sampled = Sampled::of(shapes(shape, ranks)[2], dtype);
    let clock = Clock::new(rank, heap)?;
    let mut results = Vec::new();
    for (at, side) in sides.iter_mut().enumerate() {
        let to = if at < ops { matrices.c } else { matrices.other_c };
        sampled.poison(heap, to)?;
        clock.prepare(side)?;
        heap.check()?;
        results.push(sampled.read(heap, to)?);
        world.barrier()?;
    }
    clock.sample(&mut sides)?;
    heap.check()?;
    let error = |at: usize| base.map_or(0.0, |base| relative(&results[at], &results[base]));
    let seen = Seen {
        times: sides.iter().map(|side| side.times().clone()).collect(),
        errors: (0..ops).map(|at| error(at).to_bits()).collect(),
    };
    let all: Vec<Seen> = gather(world, &seen)?;
    for side in sides {
        side.free()?;
    }
    if let Some(window) = window {
        rank.home.current(|| Ok(window.close()?))?;
    }
    if let Ok(nccl) = &rank.nccl {
        clock.settle(nccl, &buffers)?;
    }
    heap.close()?;

    let samples = |side: usize, of: fn(&Times) -> &Vec<f64>| {
        slowest(all.iter().map(|seen| &of(&seen.times[side])[..]))
    };
    let calls: fn(&Times) -> &Vec<f64> = |times| &times.calls;
    let eager: fn(&Times) -> &Vec<f64> = |times| &times.eager;
    let time = |side: usize, of| round(median(samples(side, of)), 100.0);
    // Values that all lines of this shape share: the faster of NCCL's two ways (with or without
    // windows), and lower limits of the op's time.
    let better = [base, windowed].into_iter().flatten();
    let better = better.min_by(|&a, &b| time(a, calls).total_cmp(&time(b, calls)));
    let product = [library, own].into_iter().flatten().map(|side| time(side, calls));
    let product = product.reduce(f64::min);
    let transfer = transfer.map(|side| time(side, calls));
    let limit = product.into_iter().chain(transfer).reduce(f64::max);
    let lines = plans.variants.iter().enumerate().map(|(at, plan)| {
        let us = time(at, calls);
        let mut line = shape.subject(&shape.choices[at]);
        line["variant"] = plan.variant().name().into();
        line["tile"] = json!([plan.tile().m, plan.tile().n]);
        line["packs"] = json!(plan.has_packs_at(shape.options.m).then_some(true));
        line["us"] = us.into();
        line.as_object_mut().into_iter().for_each(|it| it.retain(|_, value| !value.is_null()));
        let mut set = |name: &str, value: Option<Value>| {
            if let Some(value) = value {
                line[name] = value;
            }
        };
        let eagerly = |side: usize| {
            let samples = samples(side, eager);
            (!samples.is_empty()).then(|| round(median(samples), 100.0).into())
        };
        set("eager_us", eagerly(at));
        // Host time of a call, on the rank whose host is slowest.
        let runs = all.iter().map(|seen| median(seen.times[at].run.clone()));
        set("run_us", runs.reduce(f64::max).map(|us| round(us, 100.0).into()));
        let bare = all.iter().map(|seen| seen.times[at].bare.clone());
        let bare = bare.filter(|times| !times.is_empty()).map(median).reduce(f64::max);
        set("bare_us", bare.map(|us| round(us, 100.0).into()));
        set("baseline_us", better.map(|side| time(side, calls).into()));
        set("baseline_eager_us", base.and_then(eagerly));
        set("windowed_us", windowed.map(|side| time(side, calls).into()));
        // Each sample is divided by the baseline's sample of the same round, because both ran at
        // nearly the same clock frequencies.
        let paired = |at, base| {
            let both = samples(at, calls).into_iter().zip(samples(base, calls));
            quartiles(both.map(|(time, base)| time / base).collect())
        };
        let [low, middle, high] = better.map_or([None; 3], |base| paired(at, base));
        set("ratio", middle.map(|it| round(it, 1000.0).into()));
        let spread =
            low.zip(high).map(|(low, high)| json!([round(low, 1000.0), round(high, 1000.0)]));
        set("ratio_spread", spread);
        let others = if at == 0 { variants..ops } else { 0..0 };
        for ((name, _), side) in plans.others.iter().zip(others.clone()) {
            set(&format!("{name}_us"), Some(time(side, calls).into()));
            let [_, ratio, _] = paired(side, at);
            set(&format!("{name}_ratio"), ratio.map(|it| round(it, 1000.0).into()));
        }
        set("transfer_us", transfer.map(Value::from));
        set("limit_us", limit.map(Value::from));
        set("of_limit", limit.map(|limit| round(us / limit, 1000.0).into()));
        set("product_us", library.map(|side| time(side, calls).into()));
        set("own_product_us", own.map(|side| time(side, calls).into()));
        let sides = [at].into_iter().chain(others);
        let errors =
            all.iter().flat_map(|it| sides.clone().map(|at| f64::from_bits(it.errors[at])));
        // Larger of two errors, where a NaN counts as larger than any number; `f64::max` would drop
        // it.
        let worse = |worst: f64, e: f64| if e <= worst || worst.is_nan() { worst } else { e };
        let error = errors.fold(0.0, worse);
        let error = if error.is_nan() { "NaN".into() } else { Value::from(error) };
        set("rel_error", base.map(|_| error));
        if let Some(steps) = steps.filter(|_| at == 0) {
            let us = |side: usize| median(samples(side, calls));
            let kernels = steps.marginal(steps.none, us);
            set("marginal_kernel_us", Some(round(kernels, 100.0).into()));
            for (name, sides) in [("", Some(steps.op)), ("_baseline", steps.library)] {
                let marginal = |with: usize| sides.map(|sides| steps.marginal(sides[with], us));
                set(&format!("marginal{name}_us"), marginal(0).map(|us| round(us, 100.0).into()));
                // Time per layer of a step that has kernels between the sums, minus the time of
                // these kernels alone.
                let between = marginal(1).map(|us| round(us - kernels, 100.0).into());
                set(&format!("marginal{name}_between_us"), between);
            }
        }
        set("note", note.clone().map(Value::from));
        line
    });
    Ok(lines.collect())
}

/// Adds the sides of decoder steps: for each kind of step one with all layers and one with half as
/// many.
fn add_steps<'a>(
    sides: &mut Vec<Side<'a>>,
    layers: usize,
    op: Called,
    library: Option<Baseline<'a>>,
    between: RowKernel,
) -> Steps {
    let (op, library, between) = (Rc::new(op), library.map(Rc::new), Rc::new(between));
    let mut add = |sum: &dyn Fn() -> Sum<'a>, with: bool| {
        [layers, layers / 2].map(|layers| {
            let between = with.then(|| between.clone());
            sides.push(Side::of(Work::Step(Step { layers, sum: sum(), between })));
            sides.len() - 1
        })
    };
    let of_op = || Sum::Op(op.clone());
    let op_sides = [false, true].map(|with| add(&of_op, with));
    let library = library.map(|library| {
        let of_library = || Sum::Library(library.clone());
        [false, true].map(|with| add(&of_library, with))
    });
    let none = add(&|| Sum::None, true);
    Steps { layers, op: op_sides, library, none }
}

/// Quartiles of the values; `None` if there are no values.
fn quartiles(mut values: Vec<f64>) -> [Option<f64>; 3] {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    [1, 2, 3].map(|quarter| values.get(last * quarter / 4).copied())
}

fn round(value: f64, parts: f64) -> f64 {
    (value * parts).round() / parts
}
