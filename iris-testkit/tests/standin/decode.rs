//! Test of a decode step of a model: between the first and the last launch of the step, the host
//! must not wait for the device, on a stream or in a capture.

use anyhow::{Result, ensure};
use half::bf16;
use iris_heap::{DType, Stream, SymSlice, SymmetricHeap, World};
use iris_ops::comm::{Comm, Options, ReduceOp};
use iris_ops::{
    AllGather, AllReduce, CollectiveArgs, MatRef, MatmulAllReduce, MatmulArgs, NormArgs, Plan,
    ReduceScatter, Topology, all_gather, all_reduce, matmul_all_reduce, reduce_scatter,
};

use crate::calls::Captured;
use crate::library::{Machine, Standin};
use crate::logs::captures;

const HIDDEN: usize = 1024;
const LAYERS: usize = 4;
/// Number of tokens of a step, one for each sequence of the batch.
const ROWS: usize = 8;
/// Number of experts that the router of a mixture chooses for a token.
const CHOSEN: usize = 4;

/// Model reduced to the communication between ranks: row-parallel layers with residual and norm, a
/// sum, mixtures of experts, all logits, and a token.
struct Model {
    comm: Comm,
    layer: MatmulAllReduce,
    mixture: Mixture,
    x: SymSlice<bf16>,
    weight: SymSlice<bf16>,
    residual: SymSlice<bf16>,
    scale: SymSlice<bf16>,
    logits: SymSlice<bf16>,
    all_logits: SymSlice<bf16>,
    tokens: SymSlice<u32>,
}

/// Mixture of experts that are split over the ranks. Arrays have what belongs to this rank's tokens,
/// then the same for all tokens.
struct Mixture {
    gather: AllGather,
    own_sum: ReduceScatter,
    sum: AllReduce,
    own_rows: usize,
    tokens: [SymSlice<bf16>; 2],
    ids: [SymSlice<i32>; 2],
    weights: [SymSlice<f32>; 2],
    /// Results of this rank's part of the experts, for all tokens.
    parts: SymSlice<bf16>,
}

impl Mixture {
    fn plans(ranks: Topology) -> Result<[Plan; 3]> {
        let gather = all_gather::Options::rows(ROWS, HIDDEN).dtype(DType::BF16);
        let own_sum = reduce_scatter::Options::rows(ROWS, HIDDEN).dtype(DType::BF16);
        let sum = all_reduce::Options::rows(ROWS, HIDDEN).dtype(DType::BF16);
        Ok([
            gather.and(DType::I32, CHOSEN).and(DType::F32, CHOSEN).plan(ranks)?,
            own_sum.combine(CHOSEN).plan(ranks)?,
            sum.combine(CHOSEN).rms_norm(1e-5).plan(ranks)?,
        ])
    }

    /// Makes the operators. Collective.
    fn new(heap: &std::sync::Arc<SymmetricHeap>, plans: &[Plan; 3]) -> Result<Mixture> {
        let [gather, own_sum, sum] = plans;
        Ok(Mixture {
            own_rows: gather.rows_of(heap.rank(), ROWS).len(),
            gather: AllGather::new(heap, gather)?,
            own_sum: ReduceScatter::new(heap, own_sum)?,
            sum: AllReduce::new(heap, sum)?,
            tokens: [heap.alloc(ROWS * HIDDEN)?, heap.alloc(ROWS * HIDDEN)?],
            ids: [heap.alloc(ROWS * CHOSEN)?, heap.alloc(ROWS * CHOSEN)?],
            weights: [heap.alloc(ROWS * CHOSEN)?, heap.alloc(ROWS * CHOSEN)?],
            parts: heap.alloc(ROWS * CHOSEN * HIDDEN)?,
        })
    }

    /// Enqueues the exchanges of a mixture whose tokens are split over the ranks, and the sum of one
    /// whose tokens are replicated.
    fn run(&self, residual: MatRef, norm: NormArgs, stream: &Stream) -> Result<()> {
        let m = [self.own_rows, ROWS];
        let [own, all] = [0, 1].map(|at| {
            let (ids, weights) = (self.ids[at], self.weights[at]);
            let chosen = (MatRef::sym(ids, m[at], CHOSEN), MatRef::sym(weights, m[at], CHOSEN));
            (MatRef::sym(self.tokens[at], m[at], HIDDEN), chosen.0, chosen.1)
        });
        let list = CollectiveArgs::new(own.0, all.0).and(own.1, all.1).and(own.2, all.2);
        self.gather.run(&list, stream)?;
        let parts = MatRef::sym(self.parts, ROWS, CHOSEN * HIDDEN);
        self.own_sum.run(&CollectiveArgs::new(parts, own.0).weights(all.2).plus(own.0), stream)?;
        let sum = CollectiveArgs::new(parts, residual).weights(all.2);
        Ok(self.sum.run(&sum.norm(norm.residual(residual)), stream)?)
    }
}

impl Model {
    /// Makes the operators of the model. Collective.
    fn new(
        heap: &std::sync::Arc<SymmetricHeap>,
        stream: &Stream,
        plan: &Plan,
        mixture: &[Plan; 3],
    ) -> Result<Model> {
        let size = heap.size();
        Ok(Model {
            comm: Comm::in_heap(stream, heap, &Options::new().max_bytes(1 << 20))?,
            layer: MatmulAllReduce::new(heap, plan)?,
            mixture: Mixture::new(heap, mixture)?,
            x: heap.alloc(ROWS * HIDDEN)?,
            weight: heap.alloc(HIDDEN * HIDDEN)?,
            residual: heap.alloc(ROWS * HIDDEN)?,
            scale: heap.alloc(HIDDEN)?,
            logits: heap.alloc(ROWS * HIDDEN)?,
            all_logits: heap.alloc(size * ROWS * HIDDEN)?,
            tokens: heap.alloc(ROWS)?,
        })
    }

    /// Enqueues a decode step; `between` is called in the middle of it.
    fn step(&mut self, stream: &Stream, between: impl Fn() -> Result<()>) -> Result<()> {
        for layer in 0..LAYERS {
            let rows = |slice| MatRef::sym(slice, ROWS, HIDDEN);
            let weight = MatRef::sym(self.weight, HIDDEN, HIDDEN).transposed();
            let norm = NormArgs::new(MatRef::vector(self.scale), rows(self.logits));
            let args = MatmulArgs::new(rows(self.x), weight, rows(self.residual));
            self.layer.run(&args.norm(norm.residual(rows(self.residual))), stream)?;
            self.comm.all_reduce_in_place(&mut self.x, &ReduceOp::Sum)?;
            self.mixture.run(rows(self.residual), norm, stream)?;
            if layer == LAYERS / 2 {
                between()?;
            }
        }
        self.comm.all_gather(&self.logits, &mut self.all_logits)?;
        self.comm.broadcast_in_place(&mut self.tokens, 0)?;
        Ok(self.comm.barrier()?)
    }
}

/// Host waits that `log` has between its first launch and its last; an error if it has no launches.
fn waits(log: &str) -> Result<Vec<&str>> {
    let lines: Vec<&str> = log.lines().collect();
    let launches = || lines.iter().enumerate().filter(|(_, line)| line.contains("Launch"));
    let (first, last) = (launches().next(), launches().next_back());
    let (Some((first, _)), Some((last, _))) = (first, last) else {
        anyhow::bail!("no launch: {log}")
    };
    ensure!(launches().count() > 5 * LAYERS, "few launches: {log}");
    Ok(lines[first..last].iter().copied().filter(|line| line.starts_with("HOST")).collect())
}

fn rank(world: &World, machine: &Machine) -> Result<()> {
    let standin = Standin::get(machine.backend());
    standin.rank(world.rank());
    let options = matmul_all_reduce::Options::new(ROWS, HIDDEN, HIDDEN).dtype(DType::BF16);
    let ranks = Topology::from(world).on(machine.backend());
    let plan = options.rms_norm(1e-5).plan(ranks)?;
    let mixture = Mixture::plans(ranks)?;
    let plans: Vec<_> = [&plan].into_iter().chain(&mixture).collect();
    let device = world.rank() % machine.devices;
    let heap = SymmetricHeap::open(
        world,
        Plan::heap_options(&plans, iris_heap::Bytes::mib(64))?.device(device),
    )?;
    let captured = Captured::new(&heap, machine)?;
    let mut outcome = Ok(());
    let mut model = captured.with(|stream| Model::new(&heap, stream, &plan, &mixture))?;
    standin.log_waits(true);
    // Two steps are run: the first also prepares the GEMM algorithms of each problem; the second is
    // like all later steps of a server.
    for _ in 0..2 {
        standin.take();
        captured.with(|stream| model.step(stream, || Ok(())))?;
        let log = standin.take();
        ensure!(waits(&log)?.is_empty(), "the host waits: {:?}", waits(&log)?);
    }
    // Check of the test itself: a wait that is placed between the launches on purpose must be found
    // in the log.
    captured.with(|stream| model.step(stream, || Ok(stream.sync()?)))?;
    let log = standin.take();
    ensure!(waits(&log)?.len() == 1, "not one wait but {:?}", waits(&log)?);
    let ended = captured.capture(|stream| outcome = model.step(stream, || Ok(())));
    outcome?;
    ensure!(ended == Ok(()), "the capture ends with {ended:?}");
    let log = standin.take();
    ensure!(waits(&log)?.is_empty(), "the host waits in a capture: {:?}", waits(&log)?);
    let log = captures(&log);
    ensure!(!log.contains("NOT CAPTURED"), "{log}");
    standin.log_waits(false);
    model.comm.close()?;
    drop((model, captured));
    Ok(heap.close()?)
}

/// Runs decode steps with several numbers of ranks, in a child process.
pub(crate) fn run(machine: &Machine) {
    for size in [1, 2, 4] {
        World::run_threads(size, |world| rank(&world, machine)).unwrap();
    }
}
