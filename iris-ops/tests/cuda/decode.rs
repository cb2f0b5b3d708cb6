//! Tests of a decode step in a CUDA graph. The step takes its token from the previous step, so that
//! thousands of steps are enqueued without a wait of the host. The tests have ranks that are late,
//! and a rank that is killed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytemuck::bytes_of;
use iris_heap::{Stream, SymSlice, SymmetricHeap, World};
use iris_kernels::UserKernel;
use iris_kernels::rtc::{Compiler, Options};
use iris_ops::matmul_all_reduce::Variant;
use iris_ops::{
    AllReduce, CollectiveArgs, MatRef, MatmulAllReduce, MatmulArgs, all_reduce, matmul_all_reduce,
};
use iris_testkit::launch::{self, End};

use crate::graphs::{callers, captured, drop_graph};
use crate::{numbers, open};

const SOURCE: &str = r#"
#include "iris/tiles.h"
using namespace iris;
// The slice `state` holds the last token and the number of steps so far.

// Computes this rank's part of the step's input: small integers that depend on the last token and
// on the step, so that tokens do not repeat in a cycle.
IRIS_KERNEL embed(IRIS_ARGS HeapView heap, Slice<u32> state, Slice<float> x) {
    const auto own = heap.at(state, heap.rank);
    const u32 seed = own.get(0) * 31 + own.get(1) * 13;
    for (u32 i = port::thread(); i < x.len; i += port::threads()) {
        const u32 column = u32(x.len) * heap.rank + i;
        heap.at(x, heap.rank).put(i, float((seed + column * 7) % 9) - 4);
    }
}

// Computes the input of the second sum of a step from the result of the first sum. The input
// differs between ranks.
IRIS_KERNEL mix(IRIS_ARGS HeapView heap, Slice<float> y, Slice<float> z) {
    for (u32 i = port::thread(); i < y.len; i += port::threads()) {
        const u32 value = u32(i32(heap.at(y, heap.rank).get(i)));
        heap.at(z, heap.rank).put(i, float((value * (heap.rank + 1) + i) % 16));
    }
}

// Chooses the next token, by one thread. The token is appended to `tokens`, and is the input of the
// next step.
IRIS_KERNEL choose(IRIS_ARGS HeapView heap, Slice<float> sums, Slice<u32> state, Slice<u32> tokens) {
    if (port::thread() != 0) return;
    u32 total = 0;
    for (u32 i = 0; i < sums.len; i++) {
        total += u32(heap.at(sums, heap.rank).get(i)) * (i % 5 + 1);
    }
    const auto own = heap.at(state, heap.rank);
    const u32 steps = own.get(1), token = (total + steps) % 1009;
    heap.at(tokens, heap.rank).put(steps, token);
    own.put(0, token);
    own.put(1, steps + 1);
}"#;

/// Command-line argument that makes this program one rank of a decode test; the next argument is
/// [`LATE`] or [`KILLED`].
pub(crate) const DECODE_RANK: &str = "decode-rank";
const LATE: &str = "late";
const KILLED: &str = "killed";

/// Number of steps that each rank enqueues.
const STEPS: usize = 10_000;

/// Number of the step before which the last rank kills itself.
const LAST_STEP: usize = 3_000;

/// Number of threads per workgroup of each kernel that runs between the operators.
const THREADS: u32 = 256;

/// Number of columns of A on each rank (K), and number of columns of C (N).
const K: usize = 256;
const N: usize = 512;

/// Operators and kernels of a decode step, with their memory.
struct Step {
    heap: Arc<SymmetricHeap>,
    matmul: MatmulAllReduce,
    sum: AllReduce,
    kernels: [UserKernel; 3],
    /// Input and result of the product, and of the sum over ranks.
    x: SymSlice<f32>,
    w: SymSlice<f32>,
    y: SymSlice<f32>,
    z: SymSlice<f32>,
    sums: SymSlice<f32>,
    /// State of the decode loop: the last token and the number of steps.
    state: SymSlice<u32>,
    tokens: SymSlice<u32>,
}

impl Step {
    fn new(heap: &Arc<SymmetricHeap>) -> Result<Step> {
        let kernel =
            |name: &str| UserKernel::new(heap, SOURCE.into(), &options(), name, (THREADS, 0));
        let kernels = [kernel("embed")?, kernel("mix")?, kernel("choose")?];
        let matmul = matmul_all_reduce::Options::new(1, N, K).plan(heap)?;
        let matmul = MatmulAllReduce::new(heap, &matmul)?;
        let sum = AllReduce::new(heap, &all_reduce::Options::new(N).plan(heap)?)?;
        let w = heap.alloc(K * N)?;
        heap.write(w, &weights(heap.rank()))?;
        let (state, tokens) = (heap.zeros(2)?, heap.full(STEPS, u32::MAX)?);
        let (x, y, z, sums) = (heap.alloc(K)?, heap.alloc(N)?, heap.alloc(N)?, heap.alloc(N)?);
        Ok(Step { heap: heap.clone(), matmul, sum, kernels, x, w, y, z, sums, state, tokens })
    }

    /// Enqueues one decode step.
    fn run(&self, stream: &Stream) -> Result<()> {
        let heap = &self.heap;
        let view = heap.view();
        let [state, tokens] = [heap.slice_view(self.state)?, heap.slice_view(self.tokens)?];
        let [x, y, z, sums] = [self.x, self.y, self.z, self.sums].map(|s| heap.slice_view(s));
        let [x, y, z, sums] = [x?, y?, z?, sums?];
        let [embed, mix, choose] = &self.kernels;
        let launch = |kernel: &UserKernel, args: &[&[u8]]| {
            // SAFETY: the arguments match the kernels' parameters, and the slices lie in the heap,
            // which is closed only after the stream has finished.
            unsafe { kernel.launch(stream, 1, args) }
        };
        launch(embed, &[bytes_of(&view), bytes_of(&state), bytes_of(&x)])?;
        let [a, b] = [MatRef::sym(self.x, 1, K), MatRef::sym(self.w, K, N)];
        self.matmul.run(&MatmulArgs::new(a, b, MatRef::sym(self.y, 1, N)), stream)?;
        launch(mix, &[bytes_of(&view), bytes_of(&y), bytes_of(&z)])?;
        let [z, sum] = [self.z, self.sums].map(|slice| MatRef::sym(slice, 1, N));
        self.sum.run(&CollectiveArgs::new(z, sum), stream)?;
        let last = [bytes_of(&view), bytes_of(&sums), bytes_of(&state), bytes_of(&tokens)];
        Ok(launch(choose, &last)?)
    }
}

fn options() -> Options {
    Options::new().define("IRIS_THREADS", THREADS)
}

pub(crate) fn the_kernels_of_a_decode_step_compile() {
    let code = Compiler::nvrtc().unwrap().compile(SOURCE.into(), &options(), "sm_90a");
    assert!(code.unwrap_or_else(|error| panic!("{error}")).starts_with(b"\x7fELF"));
}

/// Weights of a rank: small integers, so that every sum is exact.
fn weights(rank: usize) -> Vec<f32> {
    numbers(K * N, rank, 5)
}

/// Expected tokens of all steps, computed by one thread in integers.
fn expected(ranks: usize) -> Vec<u32> {
    let whole: Vec<Vec<i32>> =
        (0..ranks).map(|r| weights(r).into_iter().map(|v| v as i32).collect()).collect();
    let mut token = 0_u32;
    let step = |steps| {
        let seed = token * 31 + steps * 13;
        let mut y = vec![0_i32; N];
        for (rank, w) in whole.iter().enumerate() {
            for (i, row) in w.chunks(N).enumerate() {
                let x = ((seed + (rank * K + i) as u32 * 7) % 9) as i32 - 4;
                y.iter_mut().zip(row).for_each(|(sum, w)| *sum += x * w);
            }
        }
        let sum = |(i, y): (usize, &i32)| {
            let i = i as u32;
            let mixed = |rank| ((*y as u32).wrapping_mul(rank + 1).wrapping_add(i)) % 16;
            (0..ranks as u32).map(mixed).sum::<u32>() * (i % 5 + 1)
        };
        token = (y.iter().enumerate().map(sum).sum::<u32>() + steps) % 1009;
        token
    };
    (0..STEPS as u32).map(step).collect()
}

/// Runs one rank of the test `which` in this process.
pub(crate) fn decode_rank(which: &str) -> Result<()> {
    let world = World::from_env()?;
    let heap = open(&world)?;
    let (rank, size) = (world.rank(), world.size());
    let step = Step::new(&heap)?;
    let (theirs, stream) = callers(&heap)?;
    let graph = captured(&theirs, || step.run(&stream))?;
    world.barrier()?;
    let mut random = 12_345 + rank as u64;
    let begun = Instant::now();
    for done in 0..STEPS {
        if which == KILLED && done == LAST_STEP && rank == size - 1 {
            stream.sync()?;
            launch::kill_myself();
        }
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        if (random >> 33).is_multiple_of(50) {
            std::thread::sleep(Duration::from_micros((random >> 40) % 2_000));
        }
        graph.launch()?;
    }
    let enqueued = begun.elapsed();
    let outcome = stream.sync();
    let (tokens, expected) = (heap.read(step.tokens)?, expected(size));
    let right = tokens.iter().zip(&expected).take_while(|(token, right)| token == right).count();
    println!(
        "{right} of {STEPS} tokens right; enqueued in {enqueued:.1?}, {:.1?}",
        begun.elapsed()
    );
    drop_graph(graph);
    if which == LATE {
        outcome?;
        ensure!(right == STEPS, "token {right} of rank {rank} is {}", tokens[right]);
        drop(step);
        heap.close()?;
        return Ok(world.close()?);
    }
    let error = outcome.expect_err("the last rank was killed").to_string();
    ensure!(error.contains(&format!("rank {}", size - 1)), "{error}");
    ensure!(
        (LAST_STEP..STEPS).contains(&right),
        "{right} tokens with a rank killed at {LAST_STEP}"
    );
    println!("{error}");
    drop((step, heap));
    // The device must still work in this process, in another world.
    World::run_threads(1, |world| crate::matmul_all_reduce(world, Variant::OneShot))?;
    Ok(())
}

fn launched(which: &str) -> launch::Outcome {
    let program = std::env::current_exe().unwrap();
    let options = launch::Options::default().deadline(Duration::from_secs(300));
    let options = options.grace(Duration::from_secs(120));
    launch::launch(&program, &[DECODE_RANK, which], 2, options).unwrap()
}

pub(crate) fn ten_thousand_captured_steps_with_late_ranks_give_the_same_tokens() {
    let outcome = launched(LATE);
    assert!(outcome.ok(), "{}", outcome.report());
}

pub(crate) fn a_rank_killed_between_captured_steps_is_named_and_the_tokens_before_are_right() {
    let outcome = launched(KILLED);
    let ends = outcome.ranks.iter().map(|rank| rank.end).collect::<Vec<_>>();
    assert!(
        matches!(ends[..], [End::Exited(0), End::Signalled(9)]),
        "{ends:?}: {}",
        outcome.report()
    );
}
