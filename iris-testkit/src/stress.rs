//! Stress test: thousands of calls on a GPU without a host synchronisation between them, with
//! random delays, in which every bit of the results is compared.
//!
//! **Problem.** The models show that the protocols are right in the C11 memory model, with few
//! ranks and calls. Effects of a device (caches, links, clocks, hundreds of workgroups) show only
//! when kernels run on it.
//!
//! **Solution.** Two kernels surround each call of an op. One fills the inputs with integers that
//! are computed from call, rank and position, and C with NaN. The other computes the expected C and
//! compares all of it. Ranks run as far ahead of each other as the protocol allows. The op's
//! kernels are built with random delays before each access of the protocols; call numbers can start
//! near the ends of their range; the number of rows changes from call to call.
//!
//! **Running.** `iris stress`, or [`run`] for one [`Subject`].
//!
//! **Checks of the test itself.** Kernels are also built without one of the waits
//! ([`FaultInjection::without`]); the test must find wrong results within [`HELD_CALLS`] calls. For
//! each wait, [`WAITS`] has a subject and a place at which workgroups are stalled, so that the
//! failure is certain. With the wait, results must be right in spite of the stall. [`MORE_WAITS`]
//! lists the waits of gates and of whole-matrix GEMMs in the same form.
//!
//! **Limits.** GPUs only; on the CPU, `IRIS_DELAY` and the tests of counters do the same.

mod subject;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use anyhow::Context;
use bytemuck::{Pod, Zeroable};
use iris_heap::abi::HeapView;
use iris_heap::{BackendKind, DType, Element, HeapOptions, MAX_RANKS, Stream, SymSlice, World};
use iris_kernels::UserKernel;
use iris_kernels::build::OmittedWait;
use iris_kernels::gemm_config::THREADS;
use iris_kernels::rtc::{self, KernelSource};
use iris_ops::{FaultInjection, MatRef, TileShape, Topology};
use iris_sync::LINE_WORDS;

use crate::matrix::with_type;
use crate::oracle::{Meaning, split};
use crate::rank_setup::{Rig, Room};
use crate::suite::{AnyOp, Case, Op, Operands};

pub use subject::{MORE_WAITS, Place, Subject, WAITS};

/// Parameters of one run of the stress test with one subject (an op, or the ring of ranks).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setting {
    /// Maximum M, N and K, as in an op's options. The first call has M rows; later calls have
    /// fewer.
    pub shape: (usize, usize, usize),
    /// Granularity of the numbers of rows: the row counts of any two calls differ by a multiple of
    /// `step`.
    pub step: usize,
    /// Rows and columns of a tile; `None` if the plan chooses.
    pub tile: Option<TileShape>,
    /// Backend of the GPUs.
    pub backend: BackendKind,
    /// Element type of the matrices: f32, f16 or bf16.
    pub dtype: DType,
    /// Number of calls of the run.
    pub calls: usize,
    /// Number of the run's first call; tests let it begin near the ends of the range of call
    /// numbers.
    pub first_call: i32,
    /// Delays and faults injected into the kernels. If a wait is left out, the ranks synchronise
    /// from time to time, and stop when a rank has found an error.
    pub fault_injection: FaultInjection,
}

/// Number of calls within which wrong results must show if a wait is left out of the kernels.
pub const HELD_CALLS: usize = 32;

/// Duration of the stall that exposes a missing wait, in nanoseconds: many times the duration of a
/// call.
pub const HOLD_NS: u32 = 5_000_000;

/// First wrong element of a run.
#[derive(Clone, Copy, PartialEq, Debug)]
#[allow(missing_docs, reason = "as the names say")]
pub struct Wrong {
    pub call: i32,
    pub row: i32,
    pub col: i32,
    pub seen: f32,
    pub wanted: f32,
}

/// Outcome of a run on one rank.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Outcome {
    /// Number of calls that were made.
    pub calls: usize,
    /// Number of elements that were compared, modulo 2^32.
    pub compared: u32,
    /// Number of compared elements that were wrong.
    pub wrong: u32,
    /// First wrong element; `None` if all were right.
    pub first: Option<Wrong>,
    /// Text of the fault that ended the run; `None` if there was none.
    pub fault: Option<String>,
    /// Duration of the run.
    pub time: Duration,
}

impl Outcome {
    /// Whether elements were compared, all of them were right, and there was no fault.
    pub fn ok(&self) -> bool {
        self.wrong == 0 && self.fault.is_none() && self.compared > 0
    }
}

impl Setting {
    const SMALL: (usize, usize, usize) = (61, 92, 21);

    /// Shape of a message that is large enough to be sent as packs (48 bytes of data in four
    /// 128-bit LL words) with up to four ranks, in every type and operator, and small enough for
    /// the LL protocol. Its rows have an odd number of elements.
    pub const PACKS: (usize, usize, usize) = (1014, 517, 24);

    /// Whether the variant of this name sends larger messages as packs ([`Setting::PACKS`]).
    pub fn has_packs(variant: &str) -> bool {
        variant == "ll" || variant.ends_with("two_shot_ll")
    }

    /// Setting with small matrices of several tiles; no dimension is a multiple of a tile's
    /// dimension or of eight.
    pub fn new(dtype: DType, calls: usize, fault_injection: FaultInjection) -> Self {
        let tile = Some(TileShape { m: 16, n: 32 });
        let backend = BackendKind::Cuda;
        Self {
            shape: Self::SMALL,
            step: 1,
            tile,
            backend,
            dtype,
            calls,
            first_call: 1,
            fault_injection,
        }
    }

    /// Shape and tiles of the calls of `subject`. Matrices are small, except for whole-matrix GEMMs,
    /// which accept only larger ones. `sharing` is the number of ranks per device.
    pub fn of(
        subject: Subject,
        ranks: usize,
        sharing: usize,
        dtype: DType,
        calls: usize,
        fault_injection: FaultInjection,
    ) -> Self {
        let setting = Self::new(dtype, calls, fault_injection);
        // Test both forms of LL messages: pairs in one element type, packs in the other (bf16).
        if subject.has_packs() && dtype == DType::BF16 {
            return Self { shape: Self::PACKS, ..setting };
        }
        let Some((shape, step)) = subject.whole_shape(ranks, sharing) else { return setting };
        // Calls use fused whole-matrix GEMMs only if `whole` is set. Its value says which kernels
        // leave out a wait; if no wait is left out, every value has the same effect.
        let whole = fault_injection.whole.or(Some(OmittedWait::Others));
        let (tile, fault_injection) =
            (subject.exchanged_tile(), FaultInjection { whole, ..fault_injection });
        Self { shape, step, tile, fault_injection, ..setting }
    }

    /// Setting with two calls on matrices larger than 2 GiB in a 16-bit type, with the plan's
    /// tiles.
    pub fn large(dtype: DType) -> Self {
        let shape = (2_200_003, 520, 512);
        Self { shape, tile: None, ..Self::new(dtype, 2, FaultInjection::default()) }
    }

    /// Sets the backend of the run's GPUs; the default is CUDA.
    #[must_use]
    pub fn on(mut self, backend: BackendKind) -> Self {
        self.backend = backend;
        // Only CUDA devices send packs, so other backends use small matrices.
        if backend != BackendKind::Cuda && self.shape == Self::PACKS {
            self.shape = Self::SMALL;
        }
        self
    }

    /// Sets the number of the first call.
    #[must_use]
    pub fn first_call(mut self, first_call: i32) -> Self {
        self.first_call = first_call;
        self
    }
}

/// Number of calls between two checks of the result, so small that the launches of these calls fit
/// into the driver's queue.
const BATCH: usize = 64;
const CARGO: usize = 5000;

/// Argument of the kernels in stress.cu, which must have the same layout there.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Given {
    heap: HeapView,
    a: u64,
    b: u64,
    c: u64,
    report: [u64; 2],
    words: [u64; 2],
    cargo: [u64; 2],
    call: u32,
    dtype: u32,
    root: u32,
    product: u32,
    gives: u32,
    gets: u32,
    sums: u32,
    a_shape: [u32; 2],
    b_shape: [u32; 2],
    rows: u32,
    room: u32,
    cols: u32,
    first_row: [u32; MAX_RANKS],
    first_col: [u32; MAX_RANKS],
}

const SOURCE: KernelSource<'static> =
    KernelSource { name: "stress.cu", text: include_str!("stress/stress.cu") };

/// Runs a subject of the stress test (an op, or the ring of ranks) on this rank. Collective; all
/// ranks must have GPUs of the setting's backend.
///
/// # Errors
/// Errors before the first call. A fault of a call is part of the outcome, not an error.
pub fn run(world: &World, subject: Subject, setting: &Setting) -> anyhow::Result<Outcome> {
    with_type!(setting.dtype, T => run_as::<T>(world, subject, setting))
}

fn run_as<T: Element>(
    world: &World,
    subject: Subject,
    setting: &Setting,
) -> anyhow::Result<Outcome> {
    let room = room::<T>(subject, setting, world.size());
    let mut needs = Room { data: 1 << 20, signal: 1 << 20 }.matrices(T::DTYPE, [room; 4]);
    if subject.plan::<T>(Topology::new(0, world.size()), setting)?.is_some() {
        needs = needs.and(Room::of(world.size(), |ranks| {
            Ok(subject
                .plan::<T>(ranks, setting)?
                .context("a subject that is no op on some rank")?
                .0)
        })?);
    }
    let rig = Rig::open(world, HeapOptions::new().backend(setting.backend), needs)?;
    let mut bench = Bench::<T>::new(rig, subject, setting, room)?;
    let begun = Instant::now();
    let mut outcome = Outcome::default();
    while outcome.calls < setting.calls {
        let calls = BATCH.min(setting.calls - outcome.calls);
        let issued = (outcome.calls..outcome.calls + calls).try_for_each(|call| bench.call(call));
        let synced = bench.rig.stream.sync().map_err(anyhow::Error::from);
        // If issuing and synchronising both failed, the fault of the kernels is reported, because
        // it explains more than the error of issuing later calls.
        let done = synced.and(issued);
        outcome.calls += calls;
        outcome.fault = done.err().map(|error| error.to_string());
        bench.read(&mut outcome)?;
        let mut over = !outcome.ok();
        if setting.fault_injection.without.is_some() {
            // All ranks stop the run if any rank has found an error.
            over = world.allgather(&[u8::from(over)])?.concat().contains(&1);
        }
        if over {
            break;
        }
    }
    outcome.time = begun.elapsed();
    // A heap with a fault is dropped without `close`. Closing is collective, so all ranks drop
    // their heaps if one of them has a fault.
    let faulty = outcome.fault.is_some() || bench.rig.heap.check().is_err();
    if !world.allgather(&[u8::from(faulty)])?.concat().contains(&1) {
        if let Some((op, _)) = bench.op {
            op.free()?;
        }
        bench.rig.heap.close()?;
    } else if setting.fault_injection.without.is_some() {
        // Kernels with a missing wait are expected to end with a fault, so the warning about the
        // dropped heap is suppressed.
        quietly(|| drop(bench));
    }
    Ok(outcome)
}

/// Runs `work` without the log messages of the current thread.
fn quietly<T>(work: impl FnOnce() -> T) -> T {
    tracing::subscriber::with_default(tracing::subscriber::NoSubscriber::default(), work)
}

/// Number of elements of the largest matrix that any rank uses in the run.
fn room<T: Element>(subject: Subject, setting: &Setting, size: usize) -> usize {
    let Ok(Some((_, case))) = subject.plan::<T>(Topology::new(0, size), setting) else { return 1 };
    let shapes = case.shapes(Topology::new(case.options.root, size), case.options.m);
    let first = case.shapes(Topology::new(0, size), case.options.m);
    shapes.iter().chain(&first).map(|(rows, cols)| rows * cols).max().unwrap_or(1).max(1)
}

/// State of one rank during a run: heap, kernels, op and matrices.
struct Bench<T> {
    rig: Rig,
    /// Kernels that the test adds: for an op the two that fill its inputs before the call and
    /// compare its output after it; for [`Subject::Ring`] the kernel of the ring.
    kernels: Vec<UserKernel>,
    op: Option<(AnyOp, Case)>,
    matrices: (SymSlice<T>, SymSlice<T>, SymSlice<T>),
    /// Whether C is passed as external memory, which peers cannot write ([`Place::Own`]).
    own: bool,
    report: SymSlice<i32>,
    given: Given,
    first_call: i32,
    step: usize,
}

impl<T: Element> Bench<T> {
    /// Prepares a run with matrices of `room` elements each. Collective.
    fn new(rig: Rig, subject: Subject, setting: &Setting, room: usize) -> anyhow::Result<Self> {
        let heap = &rig.heap;
        let ranks = Topology::from(heap);
        let report = heap.zeros::<i32>(8)?;
        let lines = ranks.size.max(2) * LINE_WORDS as usize;
        let words = heap.full::<i32>(lines, setting.first_call.wrapping_sub(1))?;
        let cargo = heap.zeros::<i32>(CARGO)?;
        let place = |slice: SymSlice<i32>| [slice.offset(), slice.len() as u64];
        let mut given = Given {
            heap: heap.view(),
            report: place(report),
            words: place(words),
            cargo: place(cargo),
            dtype: iris_kernels::args::dtype_code(T::DTYPE).unwrap_or_default(),
            ..Given::zeroed()
        };
        // There are two blocks for C; with [`Place::Apart`] every second rank uses the second
        // block.
        let (a, b) = (heap.alloc::<T>(room)?, heap.alloc::<T>(room)?);
        let places = [heap.alloc::<T>(room)?, heap.alloc::<T>(room)?];
        let (mut c, mut own, mut op) = (places[0], false, None);
        if let Some((plan, case)) = subject.plan::<T>(ranks, setting)? {
            let meaning = Meaning::of(case.op);
            (given.gives, given.gets) = (meaning.gives as u32, meaning.gets as u32);
            (given.product, given.sums) = (meaning.product as u32, meaning.sums.into());
            given.root = case.options.root as u32;
            // Every rank allocates as many rows of C as the rank with the most rows needs. On a
            // rank with fewer rows, the comparison then also covers memory after C, and detects
            // peers that write more rows than C has.
            let rows = |rank| case.shapes(Topology::new(rank, ranks.size), case.options.m)[2].0;
            given.room = (0..ranks.size).map(rows).max().unwrap_or(0) as u32;
            if let Subject::Op { place, .. } = subject {
                c = places[if place == Place::Apart { ranks.rank % 2 } else { 0 }];
                own = place == Place::Own;
            }
            op = Some((AnyOp::new(heap, &plan)?, case));
        }
        let options = setting.fault_injection.options(rtc::Options::new());
        let names: &[&str] = match subject {
            Subject::Ring => &["iris_stress_ring"],
            Subject::Op { .. } => &["iris_stress_fill", "iris_stress_compare"],
        };
        let kernel = |name: &&str| UserKernel::new(heap, SOURCE, &options, name, (THREADS, 0));
        let kernels = names.iter().map(kernel).collect::<Result<_, _>>()?;
        let address = |slice| heap.resolve(slice, ranks.rank).map(|pointer| pointer as u64);
        (given.a, given.b, given.c) = (address(a)?, address(b)?, address(c)?);
        let Setting { first_call, step, .. } = *setting;
        // No rank may run the first call before all ranks have prepared the memory that peers
        // write.
        heap.local_world().barrier()?;
        let matrices = (a, b, c);
        Ok(Self { rig, kernels, op, matrices, own, report, given, first_call, step })
    }

    /// Enqueues call `index`; the number of rows changes from call to call.
    fn call(&mut self, index: usize) -> anyhow::Result<()> {
        let Some((op, case)) = &mut self.op else {
            self.given.call = self.first_call.wrapping_add(index as i32) as u32;
            return launch(&self.kernels[0], &self.rig.stream, 1, &self.given);
        };
        let ranks = Topology::from(&self.rig.heap);
        let most = case.options.m / self.step;
        let m = case.options.m - (index * 5 + index / 7) % (most + 1) * self.step;
        let shapes = case.shapes(ranks, m);
        let [a, b, c] = shapes.map(|(rows, cols)| [rows as u32, cols as u32]);
        let given = &mut self.given;
        given.call = index as u32;
        (given.a_shape, given.b_shape) = (a, b);
        (given.rows, given.cols) = (c[0], c[1]);
        for at in 0..ranks.size {
            let start = |total| split(total, ranks.size, at).start as u32;
            (given.first_row[at], given.first_col[at]) = (start(m), start(case.options.k));
        }
        let (a, b, c) = self.matrices;
        let place = |slice, (rows, cols)| MatRef::sym(slice, rows, cols);
        let [a, b, c] = [
            place(a, shapes[0]),
            place(b, shapes[1]),
            match self.own {
                false => place(c, shapes[2]),
                true => external(self.rig.heap.resolve(c, ranks.rank)?, c.len(), shapes[2]),
            },
        ];
        let resident =
            self.kernels.iter().map(UserKernel::max_coresident_workgroups).min().unwrap_or(1);
        let groups = shapes.map(|(rows, cols)| (rows * cols).div_ceil(THREADS as usize));
        let groups = groups.into_iter().max().unwrap_or(1).clamp(1, resident as usize) as u32;
        launch(&self.kernels[0], &self.rig.stream, groups, given)?;
        op.run(&Operands::new(a, b, c), &self.rig.stream)?;
        launch(&self.kernels[1], &self.rig.stream, groups, given)?;
        if case.op == Op::Barrier {
            // A second barrier follows the comparison: no rank may write the words for the next
            // call before all ranks have compared the words of this call.
            op.run(&Operands::new(a, b, c), &self.rig.stream)?;
        }
        Ok(())
    }

    /// Copies the words of the report, which the kernels have written, to the outcome.
    fn read(&self, outcome: &mut Outcome) -> anyhow::Result<()> {
        let words = self.rig.heap.read(self.report)?;
        outcome.wrong = words[0] as u32;
        outcome.compared = words[7] as u32;
        let value = |word: i32| f32::from_bits(word as u32);
        outcome.first = (words[0] != 0).then(|| Wrong {
            call: words[2],
            row: words[3],
            col: words[4],
            seen: value(words[5]),
            wanted: value(words[6]),
        });
        Ok(())
    }
}

/// Matrix of `rows` x `cols` at `pointer` in the heap, passed to ops as external memory.
#[allow(unsafe_code, reason = "the caller's own memory is given by its address")]
fn external<T: Element>(pointer: *mut T, len: usize, (rows, cols): (usize, usize)) -> MatRef {
    // SAFETY: the block at `pointer` has `len` elements, and the bench holds its heap until all
    // calls are done.
    unsafe { MatRef::external_mut(pointer, len, rows, cols) }
}

/// Enqueues a kernel of stress.cu with `groups` workgroups.
#[allow(unsafe_code, reason = "kernels are given the addresses of memory in the heap")]
fn launch(kernel: &UserKernel, stream: &Stream, groups: u32, given: &Given) -> anyhow::Result<()> {
    // SAFETY: `Given` has the layout of the kernels' only parameter; all addresses in it are of
    // blocks of the heap, which the bench holds, and the blocks are large enough for the shapes in
    // `Given`.
    Ok(unsafe { kernel.launch(stream, groups, &[bytemuck::bytes_of(given)]) }?)
}
