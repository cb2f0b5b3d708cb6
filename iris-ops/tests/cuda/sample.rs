//! Sample calls of every operator on small integers, for which every result is known exactly.

use std::sync::Arc;

use anyhow::{Result, ensure};
use iris_heap::{BackendKind, HeapOptions, SymSlice, SymmetricHeap, World, random_unit};
use iris_ops::{MatRef, Shard, TileShape, Topology};
use iris_testkit::oracle::{Dense, Task};
use iris_testkit::suite::{AnyOp, Case, Op, Operands, Options, plan};

/// M, N and K of a call. None is a multiple of the tile, and there are several tiles of 8 x 16 in
/// each direction.
const SHAPE: (usize, usize, usize) = (37, 44, 30);

/// Number of workgroups of a launch. It is small, so that launches of several operators fit on a
/// device together.
const GROUPS: usize = 8;

pub(crate) struct Sample {
    pub(crate) case: Case,
    ranks: Topology,
}

/// Symmetric memory for A, B and C, large enough for the shapes of any rank.
#[derive(Clone, Copy)]
pub(crate) struct Room {
    pub(crate) a: SymSlice<f32>,
    pub(crate) b: SymSlice<f32>,
    pub(crate) c: SymSlice<f32>,
}

impl Sample {
    pub(crate) fn new(op: Op, variant: impl AsRef<str>, shard: Shard, ranks: Topology) -> Sample {
        let (m, n, k) = SHAPE;
        let options = Options::new(m, n, if op.multiplies() { k } else { 0 });
        let options = options.backend(BackendKind::Cuda).shard(shard).workgroups(GROUPS);
        let options = options.tile(TileShape { m: 8, n: 16 }).columns_per_flag(8);
        Sample { case: Case::new(op, variant, options), ranks }
    }

    /// Sets the number of multiprocessors that each call leaves free for a kernel of the caller.
    pub(crate) fn leaving(mut self, multiprocessors: u32) -> Sample {
        self.case.options = self.case.options.reserve_sms(multiprocessors as usize);
        self
    }

    /// Moves the sample to another backend, with this number of workgroups.
    pub(crate) fn on(mut self, backend: BackendKind, groups: usize) -> Sample {
        self.case.options = self.case.options.backend(backend).workgroups(groups);
        self
    }

    /// Samples of every operator and variant for which the GPU has kernels, including the barrier.
    pub(crate) fn all(ranks: Topology) -> Vec<Sample> {
        let device = ranks.on(BackendKind::Cuda).device;
        let mut all = Vec::new();
        for op in Op::ALL {
            let shards: &[Shard] = match op {
                Op::AllGatherMatmul => &[Shard::Rows, Shard::Columns],
                _ => &[Shard::Rows],
            };
            let variants = op.variants_on(device);
            for (&shard, &variant) in
                shards.iter().flat_map(|s| variants.iter().map(move |v| (s, v)))
            {
                all.push(Sample::new(op, variant, shard, ranks));
            }
        }
        all
    }

    pub(crate) fn name(&self) -> String {
        let Case { op, variant, options, .. } = &self.case;
        format!("{op} {variant} {:?}, {} ranks", options.shard, self.ranks.size)
    }

    pub(crate) fn make(&self, heap: &Arc<SymmetricHeap>) -> Result<AnyOp> {
        let plan = plan(self.case.op, &self.case.variant, self.ranks, &self.case.options)?;
        Ok(AnyOp::new(heap, &plan)?)
    }

    pub(crate) fn room(&self, heap: &SymmetricHeap) -> Result<Room> {
        let ((m, n, k), size) = (SHAPE, self.ranks.size);
        // The output of an all-to-all is larger than M x N, because it has one block from each
        // rank.
        let (a, b, c) = (m * n.max(k), n * k, (m + size) * n);
        Ok(Room { a: heap.alloc(a)?, b: heap.alloc(b)?, c: heap.alloc(c)? })
    }

    /// Rows and columns of A, B and C on this rank.
    pub(crate) fn shapes(&self) -> [(usize, usize); 3] {
        self.case.shapes(self.ranks, SHAPE.0)
    }

    pub(crate) fn operands(&self, room: &Room) -> Operands {
        let [a, b, c] = self.shapes();
        let matrix = |slice, (rows, cols)| MatRef::sym(slice, rows, cols);
        let (a, b, c) = (matrix(room.a, a), matrix(room.b, b), matrix(room.c, c));
        Operands::new(a, b, c)
    }

    /// Input of rank `rank` in call number `call`: A if `which` is 0, B if it is 1. Elements are
    /// integers in [-8, 8].
    fn input(&self, which: usize, rank: usize, call: usize) -> Dense {
        let (rows, cols) = self.case.shapes(Topology::new(rank, self.ranks.size), SHAPE.0)[which];
        let seed = (2 * call + which) as u64;
        Dense::from_fn(rows, cols, |row, col| {
            (random_unit(seed, rank, row * cols + col) * 8.5).round()
        })
    }

    /// Elements of this rank's A (if `which` is 0) or B (if it is 1), as f32 values for the heap.
    pub(crate) fn elements(&self, which: usize, call: usize) -> Vec<f32> {
        self.input(which, self.ranks.rank, call).data.into_iter().map(|x| x as f32).collect()
    }

    /// Writes the inputs of call number `call`, and NaN to C. So an element that the call does not
    /// write is found.
    pub(crate) fn fill(&self, heap: &SymmetricHeap, room: &Room, call: usize) -> Result<()> {
        for (which, slice) in [room.a, room.b].into_iter().enumerate() {
            let values = self.elements(which, call);
            heap.write(slice.slice(..values.len())?, &values)?;
        }
        Ok(heap.write(room.c, &vec![f32::NAN; room.c.len()])?)
    }

    /// Expected elements of this rank's C after call number `call`.
    pub(crate) fn expected(&self, call: usize) -> Vec<f32> {
        let Topology { rank, size, .. } = self.ranks;
        let task = Task {
            op: self.case.op,
            size,
            nodes: 1,
            m: SHAPE.0,
            options: self.case.options.clone(),
        };
        let part = |rank| {
            let (a, b) = (self.input(0, rank, call), self.input(1, rank, call));
            task.contribution(&a, Some(&b))
        };
        let parts: Vec<_> = (0..size).map(part).collect();
        let expected = task.expected(rank, &parts, Some(&self.input(1, rank, call)), None, None);
        expected.value.into_iter().map(|x| x as f32).collect()
    }

    /// Compares `got`, the elements of C after call number `call`, with the expected elements.
    pub(crate) fn check(&self, got: &[f32], call: usize) -> Result<()> {
        let expected = self.expected(call);
        let wrong = got.iter().zip(&expected).position(|(got, expected)| got != expected);
        ensure!(
            wrong.is_none() && got.len() >= expected.len(),
            "{}, call {call}, rank {}: element {wrong:?} is {:?}, expected {:?}",
            self.name(),
            self.ranks.rank,
            wrong.map(|at| got[at]),
            wrong.map(|at| expected[at])
        );
        Ok(())
    }
}

/// Tests on the CPU that the samples' expected values are right, so that GPU tests can rely on
/// them.
pub(crate) fn samples_are_right_on_the_cpu() {
    let outcome = World::run_threads(3, |world| -> Result<()> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(GROUPS))?;
        let stream = heap.stream()?;
        for sample in Sample::all(Topology::from(&world)) {
            let sample = sample.on(BackendKind::Cpu, GROUPS);
            let (op, room) = (sample.make(&heap)?, sample.room(&heap)?);
            for call in 0..3 {
                sample.fill(&heap, &room, call)?;
                op.run(&sample.operands(&room), &stream)?;
                stream.sync()?;
                let barrier = sample.case.op == Op::Barrier;
                ensure!(barrier || sample.check(&heap.read(room.c)?, call + 1).is_err());
                ensure!(barrier || !sample.expected(call).is_empty(), "{}", sample.name());
                sample.check(&heap.read(room.c)?, call)?;
            }
            op.free()?;
        }
        Ok(heap.close()?)
    });
    outcome.unwrap();
}
