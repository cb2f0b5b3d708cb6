//! Benchmark of the built-in whole-matrix GEMM against the vendor's library: time per call in
//! microseconds, in replays of a graph of ten calls, with random inputs. The two sides are timed in
//! turns.
//!
//! `gemm_rates [bf16|f16] M,N,K[:NN|NT|TN|TT][:BUILD..] ...`: a BUILD is `256`, `224`, `128c1`,
//! `f64` or `f16/1/10/1` (flipped: width, consumers, stages, cluster); `h0` disables deferred
//! stores, `@16` sets another group of rows. Without a BUILD, `Config::choose` selects one.

#![allow(unsafe_code, reason = "products over memory of the heap")]

use std::sync::Arc;
use std::time::Duration;

use bytemuck::Zeroable;
use cudarc::driver::{CudaContext, CudaEvent, CudaGraph, CudaStream, sys};
use half::{bf16, f16};
use iris_heap::{BackendKind, DType, HeapOptions, SymSlice, SymmetricHeap, World};
use iris_kernels::args::{Matrix, OpArgs, dtype_code};
use iris_kernels::gemm::{Config, Gemm};
use iris_kernels::vendor::{Addresses, Blas, Layout, Multiplier, Prepared, Problem, Product};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const CALLS: usize = 10;
const REST: Duration = Duration::from_millis(12);

fn main() -> Outcome<()> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let dtype = match arguments.first().map(String::as_str) {
        Some("f16") => DType::F16,
        _ => DType::BF16,
    };
    arguments.retain(|it| it != "bf16" && it != "f16");
    World::run_threads(1, |world| -> Result<(), iris_heap::Error> {
        for argument in &arguments {
            if let Err(error) = measure(&world, argument, dtype) {
                println!("{argument}: FAILED: {error}");
            }
        }
        Ok(())
    })?;
    Ok(())
}

struct Place {
    slice: SymSlice<u8>,
    matrix: Matrix,
}

fn place(
    heap: &SymmetricHeap,
    dtype: DType,
    (rows, cols): (usize, usize),
    columns: bool,
    seed: u64,
) -> Outcome<Place> {
    let len = rows * cols;
    let slice = heap.alloc::<u8>(len * 2)?;
    // Random inputs: the sum of four uniform numbers approximates a normal distribution.
    let mut state = seed;
    let mut uniform = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let block: Vec<u16> = (0..len.min(1_000_003))
        .map(|_| {
            let value = (uniform() + uniform() + uniform() + uniform()) * 1.7;
            if dtype == DType::F16 {
                f16::from_f32(value).to_bits()
            } else {
                bf16::from_f32(value).to_bits()
            }
        })
        .collect();
    let all: Vec<u16> = block.iter().copied().cycle().take(len).collect();
    heap.write(slice, bytemuck::cast_slice(&all))?;
    let matrix = Matrix {
        address: heap.view().data[0] + slice.offset(),
        ld: if columns { rows } else { cols } as u64,
        rows: rows as u32,
        cols: cols as u32,
        dtype: dtype_code(dtype).unwrap_or_default(),
        transposed: u32::from(columns),
    };
    Ok(Place { slice, matrix })
}

fn build(text: &str) -> Option<Config> {
    let (text, group) = match text.split_once('@') {
        Some((text, group)) => (text, group.parse().ok()?),
        None => (text, 8),
    };
    let (text, hold) = match text.strip_suffix("h0") {
        Some(text) => (text, false),
        None => (text, true),
    };
    if let Some(flipped) = text.strip_prefix('f') {
        let mut parts = flipped.split('/').map(|it| it.parse::<u32>().ok());
        let width = parts.next()??;
        let groups = parts.next().flatten().unwrap_or(1);
        let stages = parts.next().flatten().unwrap_or(8);
        let cluster = parts.next().flatten().unwrap_or(1);
        return Some(Config { cluster, ..Config::flipped(width, groups, stages) });
    }
    let mut parts = text.split('/');
    let first = parts.next()?;
    let (width, cluster) = match first.split_once('c') {
        Some((width, cluster)) => (width, cluster.parse().ok()?),
        None => (first, if first == "64" { 1 } else { 2 }),
    };
    let width: u32 = width.parse().ok()?;
    let usual = match width {
        160 => 5,
        128 => 6,
        64 => 7,
        _ => 4,
    };
    let stages = parts.next().and_then(|it| it.parse().ok()).unwrap_or(usual);
    let config = Config::wide(width, cluster, stages);
    Some(Config { hold: config.hold && hold, group, ..config })
}

struct Clock {
    stream: Arc<CudaStream>,
    begin: CudaEvent,
    end: CudaEvent,
}

impl Clock {
    fn captured(&self, mut enqueue: impl FnMut() -> Outcome<()>) -> Outcome<CudaGraph> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        self.stream.begin_capture(mode)?;
        let done = (0..CALLS).try_for_each(|_| enqueue());
        let graph = self.stream.end_capture(sys::CUgraphInstantiate_flags(0))?;
        done?;
        Ok(graph.ok_or("an empty graph")?)
    }

    /// Returns the time per call in microseconds; pauses and replays the graph once before it
    /// measures.
    fn replay(&self, graph: &CudaGraph) -> Outcome<f64> {
        std::thread::sleep(REST);
        self.begin.record(&self.stream)?;
        graph.launch()?;
        self.end.record(&self.stream)?;
        self.end.synchronize()?;
        Ok(f64::from(self.begin.elapsed_ms(&self.end)?) * 1e3 / CALLS as f64)
    }
}

fn words(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|it| u16::from_ne_bytes([it[0], it[1]])).collect()
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

fn measure(world: &World, argument: &str, dtype: DType) -> Outcome<()> {
    let mut parts = argument.split(':');
    let shape: Vec<usize> =
        parts.next().unwrap_or_default().split(',').map(str::parse).collect::<Result<_, _>>()?;
    let [m, n, k] = shape[..] else { return Err("M,N,K".into()) };
    let mut layout = "NN";
    let mut builds = Vec::new();
    for part in parts {
        match part {
            "NN" | "NT" | "TN" | "TT" => layout = part,
            _ => builds.push((part.to_string(), build(part).ok_or("not a build")?)),
        }
    }
    let columns = (layout.starts_with('T'), layout.ends_with('T'));
    let bytes = 2 * (m * k + k * n + 2 * m * n) as u64 + Prepared::WORKSPACE * 2 + (64 << 10);
    let heap = SymmetricHeap::open(
        world,
        HeapOptions::new().backend(BackendKind::Cuda).data_bytes(bytes),
    )?;
    let gpu = heap.gpu()?;
    if builds.is_empty() {
        let config = Config::choose([m, n, k], gpu.multiprocessors());
        builds
            .push((format!("={}{}", if config.flipped { "f" } else { "" }, config.width), config));
    }
    let context = CudaContext::new(heap.device().index)?;
    let theirs = context.new_stream()?;
    let stream = gpu.stream_of(&theirs)?;
    let event = || context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
    let clock = Clock { stream: theirs.clone(), begin: event()?, end: event()? };

    let a = place(&heap, dtype, (m, k), columns.0, 1)?;
    let b = place(&heap, dtype, (k, n), columns.1, 2)?;
    let (c, d) = (place(&heap, dtype, (m, n), false, 3)?, place(&heap, dtype, (m, n), false, 4)?);
    let workspace = heap.alloc::<u8>(2 * Prepared::WORKSPACE as usize)?;
    let lay =
        |it: &Place| Layout { dtype, transposed: it.matrix.transposed == 1, ld: it.matrix.ld };
    let problem = Problem {
        shape: [m, n, k],
        a: lay(&a),
        b: lay(&b),
        c: lay(&d),
        bias: false,
        rounds_once: false,
        addend: None,
        alignment: 256,
        workspace: 2 * Prepared::WORKSPACE,
    };
    let products = gpu.with_relaxed_capture(|| {
        let blas = Blas::get(BackendKind::Cuda).map_err(iris_heap::Error::other)?;
        let of = Arc::new(Multiplier::new(&blas).map_err(iris_heap::Error::other)?);
        Product::all(&of, problem, 8).map_err(iris_heap::Error::other)
    })?;
    let at = Addresses {
        a: a.matrix.address,
        b: b.matrix.address,
        c: d.matrix.address,
        bias: 0,
        addend: 0,
        workspace: heap.view().data[0] + workspace.offset(),
    };
    // Fastest algorithm of the vendor's library, selected by a few samples of each.
    let mut vendor = Vec::new();
    for product in &products {
        let graph = clock.captured(|| {
            gpu.enqueue(&stream, |raw| {
                // SAFETY: the matrices are in the heap, which is closed after its streams.
                unsafe { product.enqueue(at, raw) }.map_err(iris_heap::Error::other)
            })?;
            Ok(())
        })?;
        clock.replay(&graph)?;
        let times = (0..3).map(|_| clock.replay(&graph)).collect::<Outcome<Vec<_>>>()?;
        vendor.push((median(times), graph));
    }
    let first = vendor[0].0;
    let best = (0..vendor.len()).min_by(|&x, &y| vendor[x].0.total_cmp(&vendor[y].0)).unwrap_or(0);
    let (_, theirs_graph) = &vendor[best];
    stream.sync()?;
    let expected: Vec<u16> = words(&heap.read(d.slice)?);

    for (name, config) in builds {
        let config = config.with_layout(columns);
        if !config.takes([m, n, k]) {
            println!("{m}x{n}x{k} {layout} {name}: does not take it");
            continue;
        }
        let gemm = Gemm::of(&heap, [m, n, k], dtype, &[config])?;
        let args = OpArgs {
            a: a.matrix,
            b: b.matrix,
            c: c.matrix,
            m: m as u32,
            n: n as u32,
            k: k as u32,
            ..OpArgs::zeroed()
        };
        // Checks the result of the built-in GEMM before the GEMM is timed.
        heap.write(c.slice, &vec![0xff; m * n * 2])?;
        // SAFETY: the matrices are in the heap, which is closed after its streams.
        let launched = unsafe { gemm.launch(gpu, &stream, &args) }?;
        stream.sync()?;
        let result: Vec<u16> = words(&heap.read(c.slice)?);
        let value = |bits: u16| match dtype {
            DType::F16 => f16::from_bits(bits).to_f64(),
            _ => bf16::from_bits(bits).to_f64(),
        };
        let (mut off, mut all) = (0.0, 0.0);
        for (&got, &expected) in result.iter().zip(&expected) {
            let (got, expected) = (value(got), value(expected));
            off += (got - expected) * (got - expected);
            all += expected * expected;
        }
        let error = (off / all).sqrt();
        if !launched || error.is_nan() || error > 3e-3 {
            println!("{m}x{n}x{k} {layout} {name}: WRONG: off by {error:.2e}, launched {launched}");
            continue;
        }
        let graph = clock.captured(|| {
            // SAFETY: the matrices are in the heap, which is closed after its streams.
            unsafe { gemm.launch(gpu, &stream, &args) }?;
            Ok(())
        })?;
        clock.replay(&graph)?;
        let mut pairs = Vec::new();
        for _ in 0..13 {
            pairs.push((clock.replay(theirs_graph)?, clock.replay(&graph)?));
        }
        let lt = median(pairs.iter().map(|it| it.0).collect());
        let own = median(pairs.iter().map(|it| it.1).collect());
        let ratio = median(pairs.iter().map(|it| it.0 / it.1).collect());
        println!(
            "{m}x{n}x{k} {layout} {name:8} Lt best {lt:8.1} (first {first:8.1}) own {own:8.1} speed {ratio:.3} error {error:.1e}"
        );
        drop(graph);
    }
    drop(vendor);
    drop(stream);
    heap.close()?;
    Ok(())
}
