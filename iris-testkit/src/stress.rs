//! Thousands of calls on a GPU without a host between them, late on purpose, every bit compared.
//!
//! **Problem.** The models show that the protocols are right for C11's memory, with few ranks and
//! calls. What a device adds (caches, links, clocks, hundreds of workgroups) only running shows.
//!
//! **Solution.** Around each call of an op stand two kernels: one fills the inputs with integers that
//! follow from call, rank and place, and C with NaN; the other works out what C must be and compares
//! all of it. Ranks run as far ahead of each other as the protocol lets them. The kernels of the op
//! are built with random delays before each access of the protocols, counters begin near the ends of
//! their range, and rows change from call to call.
//!
//! **Running.** `iris stress`, or [`run`] for one [`Subject`].
//!
//! **Showing that it can fail.** Kernels built without one of the waits
//! ([`Injected::without`]) must be found wrong, within [`HELD_CALLS`]: [`WAITS`] has a subject for
//! each wait there is, and a place where workgroups are held up, so that it does not take luck. With
//! the wait, and held up at the same place, they must be right. [`MORE_WAITS`] does the same for the waits
//! of gates and of products of whole matrices.
//!
//! **Limits.** GPUs only: on the CPU `IRIS_DELAY` and the tests of counters do the same.

mod subject;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use anyhow::Context;
use bytemuck::{Pod, Zeroable};
use iris_heap::abi::HeapView;
use iris_heap::{BackendKind, DType, Element, HeapOptions, MAX_RANKS, Stream, SymSlice, World};
use iris_kernels::UserKernel;
use iris_kernels::build::Without;
use iris_kernels::gemm_config::THREADS;
use iris_kernels::rtc::{self, KernelSource};
use iris_ops::{Injected, MatRef, Ranks, TileShape};
use iris_sync::LINE_WORDS;

use crate::oracle::{Meaning, split};
use crate::rig::{Rig, Room};
use crate::suite::{AnyOp, Case, Op, Operands};

pub use subject::{MORE_WAITS, Place, Subject, WAITS};

/// How a subject is run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setting {
    /// Most rows, columns and depth: M, N, K as an op's options have them. Rows change from call to
    /// call, the first has them all.
    pub shape: (usize, usize, usize),
    /// By how many rows, or a multiple, calls differ.
    pub step: usize,
    /// Shape of a tile; by default chosen by the plan.
    pub tile: Option<TileShape>,
    /// Whose GPUs.
    pub backend: BackendKind,
    /// Element type of the matrices: f32, f16 or bf16.
    pub dtype: DType,
    /// Calls.
    pub calls: usize,
    /// The number of the first.
    pub first_call: i32,
    /// What the kernels do worse than they should. With a wait left out the ranks meet now and then
    /// and stop when something was found.
    pub injected: Injected,
}

/// Calls within which a wait that is left out must be found.
pub const HELD_CALLS: usize = 32;

/// How long workgroups are held up for that, in nanoseconds: many times what a call takes.
pub const HOLD_NS: u32 = 5_000_000;

/// The first element that was wrong.
#[derive(Clone, Copy, PartialEq, Debug)]
#[allow(missing_docs, reason = "as the names say")]
pub struct Wrong {
    pub call: i32,
    pub row: i32,
    pub col: i32,
    pub seen: f32,
    pub wanted: f32,
}

/// What one rank saw.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Outcome {
    /// Calls that were made.
    pub calls: usize,
    /// Elements that were compared; modulo 2^32.
    pub compared: u32,
    /// Those that were wrong.
    pub wrong: u32,
    /// The first of them.
    pub first: Option<Wrong>,
    /// The fault that ended it, if one did.
    pub fault: Option<String>,
    /// How long it took.
    pub time: Duration,
}

impl Outcome {
    /// Whether nothing was wrong, and something was compared.
    pub fn ok(&self) -> bool {
        self.wrong == 0 && self.fault.is_none() && self.compared > 0
    }
}

impl Setting {
    const SMALL: (usize, usize, usize) = (61, 92, 21);

    /// Small matrices of some tiles, of which no side is a multiple of a tile's or of eight.
    pub fn new(dtype: DType, calls: usize, injected: Injected) -> Self {
        let tile = Some(TileShape { m: 16, n: 32 });
        let backend = BackendKind::Cuda;
        Self { shape: Self::SMALL, step: 1, tile, backend, dtype, calls, first_call: 1, injected }
    }

    /// The same, or, where products of whole matrices take part in the subject, matrices that these multiply,
    /// on the tiles of the plan. `sharing` ranks have a device in common.
    pub fn of(
        subject: Subject,
        ranks: usize,
        sharing: usize,
        dtype: DType,
        calls: usize,
        injected: Injected,
    ) -> Self {
        let setting = Self::new(dtype, calls, injected);
        let Some((shape, step)) = subject.whole_shape(ranks, sharing) else { return setting };
        // Where nothing is left out it does not matter in which kernels.
        let whole = injected.whole.or(Some(Without::Others));
        let (tile, injected) = (subject.exchanged_tile(), Injected { whole, ..injected });
        Self { shape, step, tile, injected, ..setting }
    }

    /// Two calls with matrices of more than 2 GiB of a 16-bit type, on the tiles of the plan.
    pub fn large(dtype: DType) -> Self {
        let shape = (2_200_003, 520, 512);
        Self { shape, tile: None, ..Self::new(dtype, 2, Injected::default()) }
    }

    /// On GPUs of this kind instead of NVIDIA's.
    #[must_use]
    pub fn on(mut self, backend: BackendKind) -> Self {
        self.backend = backend;
        self
    }

    /// The number of the first call.
    #[must_use]
    pub fn first_call(mut self, first_call: i32) -> Self {
        self.first_call = first_call;
        self
    }
}

/// Calls between two looks at the result: few enough that their launches fit the driver's queue.
const BATCH: usize = 64;
const CARGO: usize = 5000;

/// What the kernels are given; as in stress.cu.
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

/// Run a subject on this rank: collective. All ranks have devices of the setting's kind.
///
/// # Errors
/// What goes wrong before the first call; a fault of a call is part of the outcome.
pub fn run(world: &World, subject: Subject, setting: &Setting) -> anyhow::Result<Outcome> {
    match setting.dtype {
        DType::F32 => run_as::<f32>(world, subject, setting),
        DType::F16 => run_as::<half::f16>(world, subject, setting),
        DType::BF16 => run_as::<half::bf16>(world, subject, setting),
        other => anyhow::bail!("stress in {other}: expected f32, f16 or bf16"),
    }
}

fn run_as<T: Element>(
    world: &World,
    subject: Subject,
    setting: &Setting,
) -> anyhow::Result<Outcome> {
    let room = room::<T>(subject, setting, world.size());
    let mut needs = Room { data: 1 << 20, signal: 1 << 20 }.matrices(T::DTYPE, [room; 4]);
    if subject.plan::<T>(Ranks::new(0, world.size()), setting)?.is_some() {
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
        // What stopped the kernels says more than what then could not be issued.
        let done = synced.and(issued);
        outcome.calls += calls;
        outcome.fault = done.err().map(|error| error.to_string());
        bench.read(&mut outcome)?;
        let mut over = !outcome.ok();
        if setting.injected.without.is_some() {
            // Who stops takes the others along.
            over = world.allgather(&[u8::from(over)])?.concat().contains(&1);
        }
        if over {
            break;
        }
    }
    outcome.time = begun.elapsed();
    // After a fault the heap goes with its owner. Closing is collective: all ranks do it, or none.
    let faulty = outcome.fault.is_some() || bench.rig.heap.check().is_err();
    if !world.allgather(&[u8::from(faulty)])?.concat().contains(&1) {
        if let Some((op, _)) = bench.op {
            op.free()?;
        }
        bench.rig.heap.close()?;
    } else if setting.injected.without.is_some() {
        // What is built wrong is expected to end like this.
        quietly(|| drop(bench));
    }
    Ok(outcome)
}

/// Do something without a word in the log of this thread.
fn quietly<T>(work: impl FnOnce() -> T) -> T {
    tracing::subscriber::with_default(tracing::subscriber::NoSubscriber::default(), work)
}

/// Elements of the largest matrix of any rank.
fn room<T: Element>(subject: Subject, setting: &Setting, size: usize) -> usize {
    let Ok(Some((_, case))) = subject.plan::<T>(Ranks::new(0, size), setting) else { return 1 };
    let shapes = case.shapes(Ranks::new(case.options.root, size), case.options.m);
    let first = case.shapes(Ranks::new(0, size), case.options.m);
    shapes.iter().chain(&first).map(|(rows, cols)| rows * cols).max().unwrap_or(1).max(1)
}

/// One rank at its work.
struct Bench<T> {
    rig: Rig,
    /// The kernels that stand around an op, or the ring.
    kernels: Vec<UserKernel>,
    op: Option<(AnyOp, Case)>,
    matrices: (SymSlice<T>, SymSlice<T>, SymSlice<T>),
    /// Whether C is given as memory of the caller's own.
    own: bool,
    report: SymSlice<i32>,
    given: Given,
    first_call: i32,
    step: usize,
}

impl<T: Element> Bench<T> {
    /// With matrices of `room` elements.
    fn new(rig: Rig, subject: Subject, setting: &Setting, room: usize) -> anyhow::Result<Self> {
        let heap = &rig.heap;
        let ranks = Ranks::from(heap);
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
        // Two places for C: where it lies apart, every other rank takes the second.
        let (a, b) = (heap.alloc::<T>(room)?, heap.alloc::<T>(room)?);
        let places = [heap.alloc::<T>(room)?, heap.alloc::<T>(room)?];
        let (mut c, mut own, mut op) = (places[0], false, None);
        if let Some((plan, case)) = subject.plan::<T>(ranks, setting)? {
            let meaning = Meaning::of(case.op);
            (given.gives, given.gets) = (meaning.gives as u32, meaning.gets as u32);
            (given.product, given.sums) = (meaning.product as u32, meaning.sums.into());
            given.root = case.options.root as u32;
            // Where a rank has fewer rows of C than others, or none, nobody may write more.
            let rows = |rank| case.shapes(Ranks::new(rank, ranks.size), case.options.m)[2].0;
            given.room = (0..ranks.size).map(rows).max().unwrap_or(0) as u32;
            if let Subject::Op { place, .. } = subject {
                c = places[if place == Place::Apart { ranks.rank % 2 } else { 0 }];
                own = place == Place::Own;
            }
            op = Some((AnyOp::new(heap, &plan)?, case));
        }
        let options = setting.injected.options(rtc::Options::new());
        let names: &[&str] = match subject {
            Subject::Ring => &["iris_stress_ring"],
            Subject::Op { .. } => &["iris_stress_fill", "iris_stress_compare"],
        };
        let kernel = |name: &&str| UserKernel::new(heap, SOURCE, &options, name, (THREADS, 0));
        let kernels = names.iter().map(kernel).collect::<Result<_, _>>()?;
        let address = |slice| heap.resolve(slice, ranks.rank).map(|pointer| pointer as u64);
        (given.a, given.b, given.c) = (address(a)?, address(b)?, address(c)?);
        let Setting { first_call, step, .. } = *setting;
        // No rank begins before all have made their words.
        heap.world().barrier()?;
        let matrices = (a, b, c);
        Ok(Self { rig, kernels, op, matrices, own, report, given, first_call, step })
    }

    /// Enqueue one call, with other rows than the one before.
    fn call(&mut self, index: usize) -> anyhow::Result<()> {
        let Some((op, case)) = &mut self.op else {
            self.given.call = self.first_call.wrapping_add(index as i32) as u32;
            return launch(&self.kernels[0], &self.rig.stream, 1, &self.given);
        };
        let ranks = Ranks::from(&self.rig.heap);
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
        let resident = self.kernels.iter().map(UserKernel::resident).min().unwrap_or(1);
        let groups = shapes.map(|(rows, cols)| (rows * cols).div_ceil(THREADS as usize));
        let groups = groups.into_iter().max().unwrap_or(1).clamp(1, resident as usize) as u32;
        launch(&self.kernels[0], &self.rig.stream, groups, given)?;
        op.run(&Operands::new(a, b, c), &self.rig.stream)?;
        launch(&self.kernels[1], &self.rig.stream, groups, given)?;
        if case.op == Op::Barrier {
            // Nobody writes the next call's words before all have compared this one's.
            op.run(&Operands::new(a, b, c), &self.rig.stream)?;
        }
        Ok(())
    }

    /// What the kernels reported so far.
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

/// A matrix in a block of the heap, as if it were not.
#[allow(unsafe_code, reason = "the caller's own memory is given by its address")]
fn external<T: Element>(pointer: *mut T, len: usize, (rows, cols): (usize, usize)) -> MatRef {
    // SAFETY: the block has `len` elements, and the bench holds its heap until all calls are done.
    unsafe { MatRef::external_mut(pointer, len, rows, cols) }
}

/// Enqueue a kernel of stress.cu.
#[allow(unsafe_code, reason = "kernels are given the addresses of memory in the heap")]
fn launch(kernel: &UserKernel, stream: &Stream, groups: u32, given: &Given) -> anyhow::Result<()> {
    // SAFETY: the one parameter of these kernels is what `Given` mirrors; all addresses in it are of
    // blocks of the heap, which the bench holds, and large enough for the shapes beside them.
    Ok(unsafe { kernel.launch(stream, groups, &[bytemuck::bytes_of(given)]) }?)
}
