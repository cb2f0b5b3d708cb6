use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use iris_heap::{DType, HeapOptions, Request, Segment, Stream, SymmetricHeap, World, random_unit};
use iris_ops::{AnyOp, Counters, MatRef, NormArgs, Operands, Plan, Shard, Topology, Variant};

use super::buffer::Buffer;
use super::traffic::{self, Traffic};
use super::{Case, Input, Layout, Op, Residual};
use crate::matrix::values;
use crate::numeric::{Measured, compare, rounded};
use crate::options::plan;
use crate::oracle::{Dense, Meaning, Part, Rows, Task, rms_norm};
use crate::rank_setup::{Crossing, Rig, Room};

/// Result of a case on one rank.
#[derive(Clone, PartialEq, Debug)]
pub struct Report {
    /// Variant that the case named, or that the plan chose. If a case has several calls, this is the
    /// variant of the call with the most rows.
    pub variant: Variant,
    /// Largest errors over all calls.
    pub measured: Measured,
    /// Largest difference between the results of two ranks; 0 if the ranks have different matrices.
    pub max_rank_difference: f64,
    /// Counters of the calls on this rank; `None` if nothing was counted.
    pub counters: Option<Counters>,
    /// Duration of each call, from `run` to the end of `sync`; for a burst, one duration for all
    /// calls.
    pub times: Vec<Duration>,
}

/// Matrices in the heap for one call, which may still be running.
struct Set {
    a: Buffer,
    b: Buffer,
    c: Buffer,
    bias: Buffer,
    residual: Buffer,
    weight: Buffer,
    normed: Buffer,
}

/// One call of a case: its inputs and, once it has been read, its output.
struct Called {
    m: usize,
    a: Dense,
    b: Dense,
    bias: Option<Dense>,
    residual: Option<Dense>,
    weight: Option<Dense>,
    output: Option<Output>,
}

/// Output of a call: C and, if the case has an RMSNorm, the normalised rows.
struct Output {
    c: Dense,
    normed: Option<Dense>,
    /// Bytes of C and of the normalised rows, to compare calls and ranks bit by bit.
    bits: Vec<u8>,
}

/// Bytes that the case needs on every rank of a world of `size` ranks.
///
/// # Errors
/// Errors of the plan.
pub fn room_for(case: &Case, size: usize) -> anyhow::Result<Room> {
    room_for_nodes(case, size, 1)
}

/// Bytes that the case needs on every rank of a world of `size` ranks on `nodes` nodes.
///
/// # Errors
/// Errors of the plan.
pub fn room_for_nodes(case: &Case, size: usize, nodes: usize) -> anyhow::Result<Room> {
    let plans = Room::of(size, |ranks| {
        plan(case.op, &case.variant, ranks.on_nodes(nodes), &case.options_of(ranks.rank))
    })?;
    let sets = if case.burst { case.rows.len() } else { 1 };
    let set: usize =
        rooms(case, size).map(|(elements, dtype, _)| elements * dtype.size() + 1024).iter().sum();
    Ok(Room { data: plans.data + (sets * set) as u64 + 4096, signal: plans.signal + 4096 })
}

/// Opens a heap that is large enough for each of these cases if they run one after the other.
/// Collective.
///
/// # Errors
/// Errors of the plans and of the heap.
#[track_caller]
pub fn open<'a>(
    world: &World,
    options: HeapOptions,
    cases: impl IntoIterator<Item = &'a Case>,
) -> anyhow::Result<Rig> {
    let world = &world.for_heap(&options)?;
    let mut room = Room::default();
    for case in cases {
        room = room.or(room_for_nodes(case, world.size(), world.nodes())?);
    }
    Rig::open(world, options, room)
}

/// Number of elements, type and layout of A, B, C, bias, residual, weight and normalised rows;
/// equal on all ranks.
fn rooms(case: &Case, size: usize) -> [(usize, DType, Layout); 7] {
    let options = &case.options;
    let room = |which: usize, layout: Layout| {
        let ranks = (0..size).map(|rank| Topology::new(rank, size));
        let calls = |ranks| case.rows.iter().map(move |&m| case.shapes(ranks, m)[which]);
        ranks.flat_map(calls).map(|shape| layout.room(shape, size)).max().unwrap_or(1)
    };
    let (input, output) = (options.dtype, options.output_dtype());
    let bias = options.n + size;
    let mut a = case.a;
    let sharded = Meaning::of(case.op).gives == Rows::Shard;
    if sharded && options.shard == Shard::Columns && a.pad > 0 {
        // Every rank's rows of A are as long as the rows of the rank with the most columns, because
        // the leading dimension must be equal on all ranks.
        a.line = options.k.div_ceil(size);
    }
    // Calls without an RMSNorm have no residual, weight or normalised rows.
    let normed = |elements, layout| match options.rms_norm {
        Some(_) => (elements, output, layout),
        None => (1, output, Layout::default()),
    };
    [
        (room(0, a), input, a),
        (room(1, case.b), input, case.b),
        (room(2, case.c), output, case.c),
        // The bias is f32 for every type of C.
        (bias, DType::F32, Layout::default()),
        normed(room(2, case.c), case.c),
        normed(bias, Layout::default()),
        normed(room(2, case.c), case.c),
    ]
}

/// Runs a case on this rank's heap and checks everything. Collective: every rank of the heap's
/// world runs the same case.
///
/// # Errors
/// Errors of the op, and wrong results, with the call and the element.
pub fn run_case(heap: &Arc<SymmetricHeap>, case: &Case) -> anyhow::Result<Report> {
    let world = heap.whole_world();
    let what = || format!("rank {} of {}: {case:?}", world.rank(), world.size());
    run(heap, case).with_context(what)
}

fn run(heap: &Arc<SymmetricHeap>, case: &Case) -> anyhow::Result<Report> {
    let ranks = Topology::from(heap);
    let plan = plan(case.op, &case.variant, ranks, &case.options_of(ranks.rank))?;
    let op = AnyOp::new(heap, &plan)?;
    let stream = heap.stream()?;
    let (calls, times) = if case.op == Op::Barrier {
        (Vec::new(), barriers(heap, case, &op, &stream)?)
    } else {
        calls(heap, case, &op, &stream)?
    };
    op.check()?;
    let counts = case.options.backend.traits().host_threads || case.options.count_traffic;
    let counters = counts.then(|| op.counters()).transpose()?;
    // Over several nodes the counters are not checked, because no traffic is specified for the
    // operators of one node that are parts of an operator over several nodes.
    if let Some(Counters { pushed, pulled, flags, .. }) = counters
        && ranks.nodes() == 1
    {
        let mut promised = Traffic::default();
        case.rows.iter().for_each(|&m| promised += traffic::expected(case, &plan, m));
        let moved = Traffic { pushed, pulled, flags };
        ensure!(
            moved == promised,
            "the calls moved {moved:?}, but variant {} should move {promised:?}",
            plan.variant()
        );
    }
    op.free()?;
    let (measured, max_rank_difference) = verify(heap, case, &plan, &calls)?;
    Ok(Report { variant: plan.variant(), measured, max_rank_difference, counters, times })
}

/// Random matrix of the kind `input`; equal for equal seeds.
fn random(
    input: Input,
    dtype: DType,
    seed: u64,
    rank: usize,
    (rows, cols): (usize, usize),
) -> Dense {
    Dense::from_fn(rows, cols, |row, col| {
        let unit = random_unit(seed, rank, row * cols + col);
        match input {
            Input::Integers => (unit * 8.5).round(),
            Input::Reals => rounded(dtype, unit),
        }
    })
}

/// Runs all calls of the case and reads their outputs.
fn calls(
    heap: &Arc<SymmetricHeap>,
    case: &Case,
    op: &AnyOp,
    stream: &Stream,
) -> anyhow::Result<(Vec<Called>, Vec<Duration>)> {
    let ranks = Topology::from(heap);
    let dtype = case.options.dtype;
    let count = if case.burst { case.rows.len() } else { 1 };
    let rooms = rooms(case, ranks.size);
    let request = |&(elements, dtype, _): &(usize, DType, Layout)| {
        Request::new(Segment::Data, (elements * dtype.size()) as u64, "matrix")
    };
    let requests: Vec<_> = (0..count).flat_map(|_| rooms.iter().map(request)).collect();
    let slices = heap.alloc_many("matrices of a case", &requests)?;
    let sets: Vec<_> = slices
        .chunks_exact(rooms.len())
        .map(|slices| {
            let buffer = |at: usize| Buffer::new(slices[at], rooms[at].1, rooms[at].2);
            let [a, b, c, bias, residual, weight, normed] = std::array::from_fn(buffer);
            Set { a, b, c, bias, residual, weight, normed }
        })
        .collect();
    let root = ranks.rank == case.options.root;
    let in_place = case.in_place && Meaning::of(case.op).in_place(root);
    let normed = case.options.rms_norm.is_some();
    let (mut called, mut times, mut begun) = (Vec::new(), Vec::new(), Instant::now());
    for (index, &m) in case.rows.iter().enumerate() {
        let set = &sets[index % count];
        let [a, b, c] = case.shapes(ranks, m);
        // A call with the same number of rows as the first call gets the same input, so its result
        // must have the same bits.
        let seed = case.seed * 1000 + if m == case.rows[0] { 0 } else { 10 * index as u64 };
        let input =
            |add: u64, dtype, rank, shape| random(case.input, dtype, seed + add, rank, shape);
        let call = Called {
            m,
            a: input(1, dtype, ranks.rank, a),
            b: input(2, dtype, ranks.rank, b),
            // The bias is the same on all ranks, except that ranks with more columns have more bias
            // elements.
            bias: (case.bias && case.op.multiplies()).then(|| input(3, DType::F32, 0, (1, c.1))),
            residual: (normed && case.residual != Residual::None)
                .then(|| input(4, case.options.output_dtype(), 0, c)),
            weight: normed.then(|| input(5, case.options.output_dtype(), 0, (1, c.1))),
            output: None,
        };
        // If the call runs in place, C holds the input, so it cannot hold the residual.
        let in_c = case.residual == Residual::InC && !in_place;
        set.residual.fill(heap, call.residual.as_ref().filter(|_| !in_c))?;
        set.weight.fill(heap, call.weight.as_ref())?;
        set.normed.fill(heap, None)?;
        set.b.fill(heap, Some(&call.b))?;
        let residual_in_c = call.residual.as_ref().filter(|_| in_c);
        set.c.fill(heap, if in_place { Some(&call.a) } else { residual_in_c })?;
        set.bias.fill(heap, call.bias.as_ref())?;
        set.a.fill(heap, Some(&call.a))?;
        let c_matrix = set.c.matrix(heap, c)?;
        let bias = call.bias.as_ref().map(|_| set.bias.matrix(heap, (1, c.1))).transpose()?;
        let norm = match normed {
            false => None,
            true => {
                let weight = set.weight.matrix(heap, (1, c.1))?;
                let norm = NormArgs::new(weight, set.normed.matrix(heap, c)?);
                Some(match call.residual {
                    Some(_) if in_c => norm.residual(c_matrix),
                    Some(_) => norm.residual(set.residual.matrix(heap, c)?),
                    None => norm,
                })
            }
        };
        let a = if in_place { c_matrix } else { set.a.matrix(heap, a)? };
        let operands = Operands::new(a, set.b.matrix(heap, b)?, c_matrix).bias(bias).norm(norm);
        called.push(call);
        if case.paced {
            heap.local_world().barrier()?;
        }
        if !case.burst || index == 0 {
            begun = Instant::now();
        }
        op.run(&operands, stream)?;
        if !case.burst {
            stream.sync()?;
            times.push(begun.elapsed());
            called[index].output = Some(read(heap, set, c, normed)?);
        }
    }
    if case.burst {
        stream.sync()?;
        times.push(begun.elapsed());
        for (call, set) in called.iter_mut().zip(&sets) {
            call.output = Some(read(heap, set, case.shapes(ranks, call.m)[2], normed)?);
        }
    }
    heap.free_many(&slices)?;
    Ok((called, times))
}

/// Reads the output of one call from the buffers `set`.
fn read(
    heap: &SymmetricHeap,
    set: &Set,
    shape: (usize, usize),
    normed: bool,
) -> anyhow::Result<Output> {
    let (c, mut bits) = set.c.read(heap, shape)?;
    let normed = normed.then(|| set.normed.read(heap, shape)).transpose()?;
    let normed = normed.map(|(normed, more)| {
        bits.extend(more);
        normed
    });
    Ok(Output { c, normed, bits })
}

/// Runs barriers, and checks that data that members store before a barrier is visible to every
/// member after the barrier.
fn barriers(
    heap: &Arc<SymmetricHeap>,
    case: &Case,
    op: &AnyOp,
    stream: &Stream,
) -> anyhow::Result<Vec<Duration>> {
    let members = case.options.members.clone().unwrap_or(heap.node_ranks().collect());
    let mut crossing = Crossing::new(heap)?;
    let empty = heap.alloc::<i32>(1)?;
    let nothing = MatRef::sym(empty, 0, 0);
    let none = Operands::new(nothing, nothing, nothing);
    let mut times = Vec::new();
    for _ in 0..case.rows.len() {
        if !members.contains(&heap.rank()) {
            break;
        }
        // In a world of several nodes, where [`Crossing`] compares times, one rank arrives late.
        let world = heap.whole_world();
        let late = world.nodes() > 1 && world.rank() + 1 == world.size();
        crossing.before(heap, stream, Duration::from_millis(if late { 2 } else { 0 }))?;
        let begun = Instant::now();
        op.run(&none, stream)?;
        stream.sync()?;
        times.push(begun.elapsed());
        crossing.after(heap, members.iter().copied())?;
    }
    heap.free(empty)?;
    crossing.free(heap)?;
    Ok(times)
}

/// Compares all outputs with the oracle, with the outputs of other ranks, and, for calls with equal
/// inputs, with each other.
fn verify(
    heap: &SymmetricHeap,
    case: &Case,
    plan: &Plan,
    calls: &[Called],
) -> anyhow::Result<(Measured, f64)> {
    let ranks = Topology::from(heap);
    let (rank, size) = (ranks.rank, ranks.size);
    let mut options = case.options_of(rank);
    options.k = case.options_of(size - 1).k;
    let (mut worst, mut difference) = (Measured::default(), 0.0f64);
    for (index, call) in calls.iter().enumerate() {
        let (nodes, m) = (ranks.nodes(), call.m);
        let task = Task { op: case.op, size, nodes, m, options: options.clone() };
        let parts = task.contributions((&call.a, &call.b), |part| exchange(heap, part))?;
        let (bias, residual) = (call.bias.as_ref(), call.residual.as_ref());
        let expected = task.expected(rank, &parts, Some(&call.b), bias, residual);
        let Output { c: seen, normed, bits } = call.output.as_ref().context("no output")?;
        let (wanted, allowed) = expected.allowed(case.input == Input::Integers);
        let what = format!("call {index} of {}", case.op);
        let variant = plan.at(call.m).variant;
        let shape = (expected.rows, expected.cols);
        let shape = if shape.0 * shape.1 == 0 { (seen.rows, seen.cols) } else { shape };
        let measured = compare(&what, shape, &seen.data, wanted, allowed)?;
        worst.relative = worst.relative.max(measured.relative);
        worst.worst = worst.worst.max(measured.worst);
        if let (Some(normed), Some(weight), Some(epsilon)) =
            (normed, &call.weight, case.options.rms_norm)
        {
            // The expected RMSNorm is computed from this rank's rows of C, which have just been
            // compared.
            let expected = rms_norm(seen, weight, epsilon, case.options.output_dtype());
            let (wanted, allowed) = expected.allowed(false);
            let what = format!("RMSNorm of {what}");
            let measured = compare(&what, (seen.rows, seen.cols), &normed.data, wanted, allowed)?;
            worst.worst = worst.worst.max(measured.worst);
        }
        if Meaning::of(case.op).replicates() {
            for (peer, theirs) in heap.whole_world().allgather(bits)?.iter().enumerate() {
                difference = difference.max(differing(case.options.output_dtype(), bits, theirs)?);
                let same = bits == theirs || !case.same_on_all_ranks(variant);
                ensure!(same, "{what}: ranks {rank} and {peer} have different bits");
            }
        }
        let (first, first_bits) = (&calls[0], calls[0].output.as_ref().map(|output| &output.bits));
        if call.m == first.m && case.same_in_all_runs(variant) {
            ensure!(
                Some(bits) == first_bits,
                "{what}: bits differ from call 0, which had the same input"
            );
        }
    }
    Ok((worst, difference))
}

/// Largest difference between the elements of two results of type `dtype`, given as bytes.
fn differing(dtype: DType, ours: &[u8], theirs: &[u8]) -> anyhow::Result<f64> {
    let pairs = values(dtype, ours)?.into_iter().zip(values(dtype, theirs)?);
    Ok(pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max))
}

/// All-gather of each rank's contribution through the hosts. Collective.
fn exchange(heap: &SymmetricHeap, part: &Part) -> anyhow::Result<Vec<Part>> {
    let mut numbers = Vec::with_capacity(4 + 2 * part.value.data.len());
    for matrix in [&part.value, &part.magnitude] {
        numbers.extend([matrix.rows as f64, matrix.cols as f64]);
        numbers.extend_from_slice(&matrix.data);
    }
    let all = heap.whole_world().allgather(bytemuck::cast_slice(&numbers))?;
    all.iter()
        .map(|bytes| {
            let numbers: Vec<f64> =
                bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned::<f64>).collect();
            let mut rest = &numbers[..];
            let mut matrix = || -> anyhow::Result<Dense> {
                let [rows, cols, after @ ..] = rest else {
                    anyhow::bail!("a contribution of a rank cannot be decoded")
                };
                let (rows, cols) = (*rows as usize, *cols as usize);
                let (data, after) = after.split_at(rows * cols);
                rest = after;
                Ok(Dense { rows, cols, data: data.to_vec() })
            };
            Ok(Part { value: matrix()?, magnitude: matrix()? })
        })
        .collect()
}
