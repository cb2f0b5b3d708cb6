//! Op with its matrices, ready to run, for tests in which calls fail or wait.

use std::sync::Arc;
use std::time::{Duration, Instant};

use iris_heap::{ErrorKind, HeapOptions, Stream, SymSlice, SymmetricHeap, World};
use iris_ops::{MatRef, OpError, TileShape, Topology};
use iris_testkit::suite::{AnyOp, Case, Operands, Options, plan};

/// Op with its matrices, in the same small shapes for all ops.
pub struct Ready {
    pub op: AnyOp,
    pub operands: Operands,
    pub stream: Stream,
    pub heap: Arc<SymmetricHeap>,
    pub a: SymSlice<f32>,
    pub b: SymSlice<f32>,
    pub c: SymSlice<f32>,
}

impl Ready {
    pub fn new(world: &World, case: &Case) -> anyhow::Result<Self> {
        let heap = SymmetricHeap::open(world, HeapOptions::new().threads(1))?;
        Self::on(heap, case)
    }

    pub fn on(heap: Arc<SymmetricHeap>, case: &Case) -> anyhow::Result<Self> {
        let ranks = Topology::from(&heap);
        let plan = plan(case.op, &case.variant, ranks, &case.options)?;
        let op = AnyOp::new(&heap, &plan)?;
        let room = 4096;
        let (a, b) = (heap.rand::<f32>(room, 1)?, heap.rand::<f32>(room, 2)?);
        let c = heap.full::<f32>(room, f32::NAN)?;
        let operands = operands(case, ranks, [a, b, c], case.options.m);
        let stream = heap.stream()?;
        Ok(Self { op, operands, stream, heap, a, b, c })
    }

    pub fn call(&mut self) -> iris_ops::OpResult<()> {
        self.op.run(&self.operands, &self.stream)
    }

    pub fn call_and_sync(&mut self) -> anyhow::Result<()> {
        self.call()?;
        Ok(self.sync()?)
    }

    /// Makes a call, which rank `late` issues after the progress deadline of the others.
    pub fn call_late(&mut self, world: &World, late: usize) -> anyhow::Result<()> {
        if world.rank() != late {
            self.call()?;
            self.pass_progress_deadline()?;
        }
        world.barrier()?;
        if world.rank() == late {
            self.call()?;
        }
        Ok(self.sync()?)
    }

    /// Makes a good call, and another one that rank `skips` leaves out; returns how long this rank has
    /// waited when all ranks know that the call has failed.
    pub fn call_unless(&mut self, world: &World, skips: usize) -> anyhow::Result<Duration> {
        self.call_and_sync()?;
        let begun = Instant::now();
        let mut passed = Duration::ZERO;
        if world.rank() != skips {
            self.call()?;
            passed += self.pass_progress_deadline()?;
        }
        // The barrier ensures that all other ranks have entered the call before the entry deadline
        // passes.
        world.barrier()?;
        if world.rank() != skips {
            passed += self.pass_until_a_fault();
        }
        // No rank returns before all ranks have given up: a rank that had returned would count as
        // lost, which is another fault.
        while self.heap.check().is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
        world.barrier()?;
        Ok(passed + begun.elapsed())
    }

    /// Advances the heap's clock past the progress deadline, which is a tenth of the entry deadline,
    /// and waits until the kernel of this rank's enqueued call has noticed or the call has ended.
    /// Returns the added time.
    pub fn pass_progress_deadline(&self) -> iris_heap::Result<Duration> {
        let call = self.stream.record()?;
        let control = self.heap.control();
        let mut passed = 2 * self.heap.local_world().settings().progress_deadline();
        control.advance_test_clock(passed);
        while !control.has_seen_time_pass() && !call.is_done() {
            std::thread::sleep(Duration::from_millis(1));
            // The kernel may have begun to wait after the clock was advanced, so the clock is
            // advanced again.
            if !control.has_seen_time_pass() {
                control.advance_test_clock(Duration::from_millis(1));
                passed += Duration::from_millis(1);
            }
        }
        Ok(passed)
    }

    /// Advances the heap's clock until a call has failed on this rank, or this rank has learned of
    /// a failure on another one; returns the time that was added.
    pub fn pass_until_a_fault(&self) -> Duration {
        let mut passed = Duration::ZERO;
        let step = self.heap.local_world().settings().progress_deadline();
        while self.heap.check().is_ok() {
            self.heap.control().advance_test_clock(step);
            passed += step;
            std::thread::sleep(Duration::from_millis(1));
        }
        passed
    }

    pub fn sync(&self) -> iris_heap::Result<()> {
        self.stream.sync()
    }
}

/// Kind of an error of an operator or of the heap.
pub fn kind_of(error: &anyhow::Error) -> Option<ErrorKind> {
    let kind = error.downcast_ref::<OpError>().map(OpError::kind);
    kind.or_else(|| error.downcast_ref::<iris_heap::Error>().map(iris_heap::Error::kind))
}

pub fn operands(case: &Case, ranks: Topology, slices: [SymSlice<f32>; 3], m: usize) -> Operands {
    let shapes = case.shapes(ranks, m);
    let [a, b, c] = [0, 1, 2].map(|at| MatRef::sym(slices[at], shapes[at].0, shapes[at].1));
    Operands::new(a, b, c)
}

/// One small case of every op and variant.
pub fn all_cases() -> Vec<Case> {
    Case::each(&Options::new(8, 6, 9).tile(TileShape { m: 2, n: 4 }).columns_per_flag(4))
}
