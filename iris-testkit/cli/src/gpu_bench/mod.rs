//! `iris bench --backend cuda`: times every op and, for comparison, NCCL and cuBLASLt, in one
//! process with a thread per GPU. Times are the device's, by events around replays of a graph of
//! several calls; the host time of `run` is measured, too.
//!
//! With `--backend hip` the baselines are RCCL and hipBLASLt, if installed. Times are then the
//! host's, for several calls in a row, because graphs and events of AMD's runtime are not used.

use std::fmt::Display;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result};
use iris_heap::{BackendKind, DType, World};
use iris_ops::{Shard, Topology};
use iris_testkit::launch::{NETWORK_ALONE, with_environment};
use iris_testkit::suite::{Op, Options as OpOptions};
use iris_testkit::{harness, note, say};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::bench::options::{self, Options, Sink};
use crate::bench::origin::date;
use crate::errors::usage;
use crate::job::Place;
use crate::problem::{TimedVariant, known_variant};
use crate::progress::Progress;
use crate::record;
use crate::watch::give_up;
use message::Message;
use print::{is_wrong, line, print_line};
use rank::{Rank, all_shapes};

pub(crate) use tuned::{timed, tune};
pub(crate) use vendor::{NO_MULTICAST, Vendors};

mod baseline;
mod bench_device;
mod called;
mod driver_loop;
mod matrix_contents;
mod message;
mod norm;
mod plans;
mod print;
mod rank;
mod row_kernel;
mod shape;
mod step;
mod timed_sides;
mod torch;
mod tuned;
mod vendor;

/// Cases to measure if the command line names no file: name of the file, and its built-in content.
const CUDA: (&str, &str) = ("bench/cuda.toml", include_str!("../../../../bench/cuda.toml"));
const HIP: (&str, &str) = ("bench/hip.toml", include_str!("../../../../bench/hip.toml"));

/// Entry of the case file: an op, its options, and the shapes to measure.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    op: String,
    #[serde(default = "auto")]
    variants: Vec<String>,
    #[serde(default = "bf16")]
    dtype: DType,
    /// Shapes [M, N, K] to measure; M, N and K mean the same as in the op's options.
    shapes: Vec<[usize; 3]>,
    /// Whether A is split over the ranks by columns instead of rows.
    #[serde(default)]
    columns: bool,
    /// Rows and columns of the tile; `None` if the plan chooses.
    tile: Option<[usize; 2]>,
    workgroups: Option<usize>,
    /// Epsilon of an RMSNorm with residual that is fused into the op.
    rms_norm: Option<f32>,
    /// Further tensors that an all_gather gathers in the same message: element type and number of
    /// columns of each.
    #[serde(default)]
    list: Vec<(DType, usize)>,
    /// Number of weighted parts of each row of an all_reduce or reduce_scatter.
    combine: Option<usize>,
    /// Number of layers in a decoder step. If set, graphs of `layers` calls, and of half as many,
    /// are timed as well, to find the cost of one more layer.
    layers: Option<usize>,
    /// M of another plan, with which calls of fewer rows are timed as well, by the first variant.
    larger_plan: Option<usize>,
    /// Whether a plan with the option `batch_invariant` is timed as well, by the first variant.
    #[serde(default)]
    batch_invariant: bool,
}

fn auto() -> Vec<String> {
    vec!["auto".into()]
}

fn bf16() -> DType {
    DType::BF16
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rows {
    row: Vec<Row>,
}

/// One shape of a [`Row`], with the variants and tiles to time.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) op: Op,
    choices: Vec<TimedVariant>,
    /// Options of the op's plan, except variant and tile, which each choice sets.
    pub(crate) options: OpOptions,
    /// Input of the calls.
    message: Message,
    beside: Beside,
    /// Number of layers of a decoder step that is timed in addition to the op; `None` for no step.
    layers: Option<usize>,
    /// M of another plan with which the call is timed, by the first choice; `None` for no such plan.
    larger_plan: Option<usize>,
    /// Whether the first choice is timed with the option `batch_invariant` as well.
    batch_invariant: bool,
}

/// Baseline that each choice of variant and tile is compared with.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Beside {
    /// NCCL and cuBLASLt (RCCL and hipBLASLt on AMD); for an op with an RMSNorm, our own op
    /// followed by a separate RMSNorm kernel.
    Libraries,
    /// The first choice of variant and tile; the other choices are compared with it.
    First,
}

/// Measures the cases, prints the results, and returns whether nothing failed.
pub(crate) fn main(options: &Options) -> Result<bool> {
    let kind = options.backend;
    let shapes = read(kind, options.cases.as_deref(), options.only.as_deref())?;
    if let Some(reason) = harness::missing_gpus(kind, 1)? {
        return skipped(&reason);
    }
    // A file of earlier results is replaced only if there is something to measure.
    let mut sink = Sink::new(options)?;
    let devices = kind.devices()?;
    let ranks = options.ranks.unwrap_or(devices.len());
    let place = Place::new(ranks, true)?.on_nodes(options.nodes, kind)?;
    if place.nodes > 1 {
        if ranks > devices.len() {
            let expected =
                format!("at most the {} GPUs, for ranks on several nodes", devices.len());
            return Err(usage("--ranks", ranks, expected));
        }
        with_environment(&NETWORK_ALONE);
    }
    let vendors = Vendors::load(kind);
    let [collectives, products] = vendors.names();
    let missing = |why| format!("none: {why}");
    let [nccl, blas] = vendors.versions().map(|found| found.unwrap_or_else(missing));
    let name = devices[0].name.split([" sm_", " gfx"][usize::from(kind != BackendKind::Cuda)]);
    let name = name.into_iter().next().unwrap_or_default().to_owned();
    say!("{ranks} ranks on {} x {name}; {collectives} {nccl}; {products} {blas}", devices.len())?;
    say!(
        "{}",
        line([
            "op",
            "m x n x k",
            "variant",
            "tile",
            "us",
            "eager",
            "run",
            "bare",
            "base",
            "ratio",
            "product",
            "larger",
            "invar."
        ])
    )?;
    let mut about = json!({
        "device": format!("{} x {name}", devices.len().min(ranks)), "driver": driver(kind)?,
        collectives.to_lowercase(): nccl, products.to_lowercase(): blas, "commit": options.commit(),
        "date": date(SystemTime::now()), "ranks": ranks,
    });
    if kind != BackendKind::Cuda {
        about["clock"] = "host".into();
    }
    if place.nodes > 1 {
        about["nodes"] = place.nodes.into();
    }
    let shapes = match options.json.as_deref().filter(|_| options.resume) {
        Some(path) => left(shapes, path, &about)?,
        None => shapes,
    };
    let torch = torch::Torch::read(options.torch.as_deref())?;
    let old = options.compare.as_deref().map(record::read).transpose()?;
    let begun = watch(options.limit)?;
    // Record and result lines so far, and for each operator the time at which its measurement
    // ended.
    let measured = Mutex::new((&mut sink, Vec::new(), Vec::<(String, Instant)>::new()));
    let wrong = AtomicUsize::new(0);
    let failed = each_shape(place, (&vendors, options.windows), &shapes, &|_, lines| {
        for mut line in lines {
            let pytorch = torch.us(&line, ranks);
            if let Some(us) = pytorch {
                line["torch_us"] = us.into();
            }
            print_line(&line)?;
            wrong.fetch_add(usize::from(is_wrong(&line)), Ordering::Relaxed);
            merge(&mut line, &about);
            let mut measured = measured.lock().unwrap_or_else(PoisonError::into_inner);
            let op = line["op"].as_str().unwrap_or_default().to_owned();
            measured.2.retain(|known| known.0 != op);
            measured.2.push((op, Instant::now()));
            measured.1.push(line.clone());
            measured.0.add(line)?;
        }
        Ok(())
    })?;
    let wrong = wrong.into_inner();
    let (_, lines, ends) = measured.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(old) = &old {
        record::compare(old, &record::of_values(lines))?;
    }
    let mut from = begun;
    for (op, end) in ends {
        say!("{:5.1} min  --only {op}", (end - from).as_secs_f64() / 60.0)?;
        from = end;
    }
    say!("{} shapes, {failed} failed, {wrong} wrong, {:.0?}", shapes.len(), begun.elapsed())?;
    Ok(failed == 0 && wrong == 0)
}

/// Measures the shapes one by one and passes the result lines of each to `tell`; returns the number
/// of shapes that failed. After a failure, the remaining shapes run in a new world.
fn each_shape(
    place: Place,
    beside: (&Vendors, bool),
    shapes: &[Shape],
    tell: &(dyn Fn(&Shape, Vec<Value>) -> Result<()> + Sync),
) -> Result<usize> {
    let (done, mut failed) = (AtomicUsize::new(0), 0);
    let progress = Progress::new("shapes", 0, shapes.len());
    loop {
        let first = done.load(Ordering::Relaxed);
        if first >= shapes.len() {
            return Ok(failed);
        }
        let rank = |world: World| {
            all_shapes(&world, beside, &shapes[first..], &mut |lines| {
                let shape = &shapes[done.fetch_add(1, Ordering::Relaxed)];
                progress.step();
                progress.suspended(|| tell(shape, lines))
            })
        };
        let outcome = match place.nodes {
            1 => World::run_threads(place.ranks, rank),
            nodes => World::run_nodes(nodes, place.ranks / nodes, rank),
        };
        let Err(error) = outcome else { continue };
        let Some(shape) = shapes.get(done.fetch_add(1, Ordering::Relaxed)) else {
            return Err(error);
        };
        progress.step();
        progress.suspended(|| {
            say!("{} {:?}: FAILED: {error:#}", shape.op, dimensions(&shape.options))
        })?;
        failed += 1;
    }
}

/// Shapes of which the file `path` has not all lines yet. Lines count if they are right, and if they
/// have the commit and the number of ranks of `about`, the fields of the lines measured now. A shape
/// with a given tile is always left, because a line has the tile of the plan, not the given one.
fn left(mut shapes: Vec<Shape>, path: &Path, about: &Value) -> Result<Vec<Shape>> {
    let name = path.display();
    let unreadable = |error: &dyn Display| usage(&name, error, "a JSON object per line");
    let text = iris_heap::read_file(path).map_err(|error| unreadable(&error))?;
    let lines = serde_json::Deserializer::from_str(&text).into_iter();
    let lines = lines.collect::<Result<Vec<Value>, _>>().map_err(|error| unreadable(&error))?;
    let all = shapes.len();
    shapes.retain(|shape| {
        !shape.choices.iter().all(|choice| {
            let mut subject = shape.subject(choice);
            ["commit", "ranks"].into_iter().for_each(|name| subject[name] = about[name].clone());
            let is_it = |line: &Value| !is_wrong(line) && agree(line, &subject);
            choice.tile.is_none() && lines.iter().any(is_it)
        })
    });
    note!("{} of {all} shapes are left: {name} has the others", shapes.len());
    Ok(shapes)
}

/// Whether `line` has all fields of `subject` with the same values, and lacks those that are null.
fn agree(line: &Value, subject: &Value) -> bool {
    subject.as_object().into_iter().flatten().all(|(name, value)| line[name] == *value)
}

fn skipped(reason: &str) -> Result<bool> {
    say!("skipped: {reason}")?;
    Ok(true)
}

/// Reads the shapes from the file `cases` or the built-in ones, without variants that this
/// machine's GPU has no kernels for.
pub(crate) fn read(
    kind: BackendKind,
    cases: Option<&Path>,
    only: Option<&str>,
) -> Result<Vec<Shape>> {
    let device = Topology::new(0, 2).on(kind).device;
    let usual = if kind == BackendKind::Hip { HIP } else { CUDA };
    let rows: Rows = options::read(cases, usual)?;
    let mut shapes = Vec::new();
    for row in rows.row {
        let op: Op = row.op.parse()?;
        if only.is_some_and(|only| !row.op.contains(only)) {
            continue;
        }
        let able = op.variants_on(device);
        let mut variants = Vec::new();
        for name in &row.variants {
            match known_variant("variant", op, name)? {
                Some(variant) if !able.contains(&variant) => {
                    note!("{op} {name} is left out: {device} has no kernels for it");
                }
                _ => variants.push(name.clone()),
            }
        }
        if variants.is_empty() {
            continue;
        }
        let message = Message::new(&row, op)?;
        for [m, n, k] in row.shapes {
            // Options of the plan; `uniform_shape` is set because all ranks have the same M, N and
            // K in the benchmark.
            let mut options =
                OpOptions::new(m, n, k).dtype(row.dtype).backend(kind).uniform_shape(true);
            options.workgroups = row.workgroups;
            options.rms_norm = row.rms_norm;
            if row.columns {
                options = options.shard(Shard::Columns);
            }
            let choices = TimedVariant::each(&variants, row.tile);
            let (beside, layers) = (Beside::Libraries, row.layers);
            let larger_plan = row.larger_plan.filter(|&most| m < most);
            let batch_invariant = row.batch_invariant;
            shapes.push(Shape {
                op,
                choices,
                options,
                message: message.clone(),
                beside,
                layers,
                larger_plan,
                batch_invariant,
            });
        }
    }
    if shapes.is_empty() {
        return Err(usage(
            "--only",
            only.unwrap_or_default(),
            "part of the name of an op that is measured",
        ));
    }
    Ok(shapes)
}

/// Starts a thread that ends the program after `limit` seconds, because a hanging kernel cannot be
/// stopped.
pub(crate) fn watch(limit: Option<u64>) -> Result<Instant> {
    let limit = limit.unwrap_or(400);
    let end = move || {
        std::thread::sleep(Duration::from_secs(limit));
        note!("iris: the benchmark took longer than {limit} s (--limit), so it is ended");
        give_up();
    };
    let started = std::thread::Builder::new().name("iris-limit".into()).spawn(end);
    started.context("the thread that ends the benchmark did not start")?;
    Ok(Instant::now())
}

/// Version of NVIDIA's kernel module, or of AMD's HIP runtime, for the record.
fn driver(kind: BackendKind) -> Result<String> {
    if kind != BackendKind::Cuda {
        return Ok(kind.driver_version()?.to_string());
    }
    let version = std::fs::read_to_string("/sys/module/nvidia/version");
    Ok(version.map_or("unknown".into(), |text| text.trim().to_owned()))
}

fn dimensions(options: &OpOptions) -> String {
    format!("{} x {} x {}", options.m, options.n, options.k)
}

/// Copies the fields of the JSON object `more` into `line`.
fn merge(line: &mut Value, more: &Value) {
    for (name, value) in more.as_object().into_iter().flatten() {
        line[name] = value.clone();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cases_are_read_and_planned() {
        let messages = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/messages.toml");
        let cuda = read(BackendKind::Cuda, None, None).unwrap();
        let hip = read(BackendKind::Hip, None, None).unwrap();
        for shapes in [&cuda, &hip] {
            for op in Op::ALL {
                assert!(shapes.iter().any(|shape| shape.op == op), "{op} is not measured");
            }
        }
        let more = read(BackendKind::Cuda, Some(Path::new(messages)), None).unwrap();
        let norms = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/norm.toml");
        let norms = read(BackendKind::Cuda, Some(Path::new(norms)), None).unwrap();
        assert!(norms.iter().all(|shape| shape.options.rms_norm.is_some()));
        let experts = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/experts.toml");
        let experts = read(BackendKind::Cuda, Some(Path::new(experts)), None).unwrap();
        assert!(experts.iter().all(|shape| shape.message != Message::Plain));
        let steps = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/decode.toml");
        let steps = read(BackendKind::Cuda, Some(Path::new(steps)), None).unwrap();
        let bytes = |shape: &Shape| shape.options.m * shape.options.n * shape.options.dtype.size();
        assert_eq!((bytes(&steps[0]), bytes(&steps[steps.len() - 1])), (8 << 10, 128 << 10));
        assert!(steps.iter().all(|shape| shape.layers == Some(80) && shape.op == Op::AllReduce));
        let large = concat!(env!("CARGO_MANIFEST_DIR"), "/../../bench/large.toml");
        let large = read(BackendKind::Cuda, Some(Path::new(large)), None).unwrap();
        let more = more.iter().chain(&norms).chain(&experts).chain(&steps).chain(&large);
        for shape in cuda.iter().chain(&hip).chain(more) {
            shape.choices.iter().for_each(|choice| {
                shape.plan(choice, Topology::new(0, 4)).unwrap();
            });
        }
    }
}
