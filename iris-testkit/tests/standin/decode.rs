//! Test of a decode step of a model: between the first and the last launch of the step, the host
//! must not wait for the device, on a stream or in a capture.

use anyhow::{Result, ensure};
use half::bf16;
use iris_heap::{DType, Stream, SymSlice, SymmetricHeap, World};
use iris_ops::comm::{Comm, Options, ReduceOp};
use iris_ops::{MatRef, MatmulAllReduce, MatmulArgs, NormArgs, Plan, Topology, matmul_all_reduce};

use crate::calls::Captured;
use crate::library::{Machine, Standin};
use crate::logs::captures;

const HIDDEN: usize = 1024;
const LAYERS: usize = 4;
/// Number of tokens of a step, one for each sequence of the batch.
const ROWS: usize = 8;

/// Model reduced to the communication between ranks: row-parallel layers with residual and norm, a
/// sum, all logits, and a token.
struct Model {
    comm: Comm,
    layer: MatmulAllReduce,
    x: SymSlice<bf16>,
    weight: SymSlice<bf16>,
    residual: SymSlice<bf16>,
    scale: SymSlice<bf16>,
    logits: SymSlice<bf16>,
    all_logits: SymSlice<bf16>,
    tokens: SymSlice<u32>,
}

impl Model {
    /// Makes the operators of the model. Collective.
    fn new(heap: &std::sync::Arc<SymmetricHeap>, stream: &Stream, plan: &Plan) -> Result<Model> {
        let size = heap.size();
        Ok(Model {
            comm: Comm::in_heap(stream, heap, &Options::new().max_bytes(1 << 20))?,
            layer: MatmulAllReduce::new(heap, plan)?,
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
    ensure!(launches().count() > 2 * LAYERS, "few launches: {log}");
    Ok(lines[first..last].iter().copied().filter(|line| line.starts_with("HOST")).collect())
}

fn rank(world: &World, machine: &Machine) -> Result<()> {
    let standin = Standin::get(machine.backend());
    standin.rank(world.rank());
    let options = matmul_all_reduce::Options::new(ROWS, HIDDEN, HIDDEN).dtype(DType::BF16);
    let plan = options.rms_norm(1e-5).plan(Topology::from(world).on(machine.backend()))?;
    let device = world.rank() % machine.devices;
    let heap = SymmetricHeap::open(
        world,
        Plan::heap_options(&[&plan], iris_heap::Bytes::mib(64))?.device(device),
    )?;
    let captured = Captured::new(&heap, machine)?;
    let mut outcome = Ok(());
    let mut model = captured.with(|stream| Model::new(&heap, stream, &plan))?;
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
