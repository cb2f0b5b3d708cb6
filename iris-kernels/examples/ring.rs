//! Ring of ranks: this program's kernel passes messages on until each rank has summed all messages.
//! Exit code 0: sums are right; 1: a sum is wrong or a call failed; 77: no GPU, nothing checked.
#![allow(unsafe_code, reason = "the launch of a kernel of the user's")]
use bytemuck::bytes_of;
use iris_heap::{BackendKind, Error, HeapOptions, SymmetricHeap, World};
use iris_kernels::{UserKernel, gemm_config::THREADS, rtc::Options};

const N: usize = THREADS as usize;
const SOURCE: &str = r#"
#include "iris/sync.h"
using namespace iris;
// Messages in `slots`: to be sent, received, and their sum. Each thread has one element of each.
IRIS_KERNEL ring(IRIS_ARGS HeapView heap, Slice<float> slots, u32 sent, i32 step) {
    const u32 me = heap.rank, next = (me + 1) % heap.size, before = (me + heap.size - 1) % heap.size;
    const u32 taken = sent + LINE_WORDS, i = port::thread();
    const auto out = heap.at(slots, me), in = out.from(THREADS);
    float sum = out.get(i);
    for (u32 passed = 1; passed < heap.size; ++passed) {
        // Wait until the next rank has read the previous message. The words are never reset.
        if (!wait_until(heap, heap.word(me, taken), ReachedBy{}, step++, next)) return;
        put_with_signal(heap, slots.from(THREADS), slots, THREADS, next, heap.word(next, sent), step);
        if (!wait_until(heap, heap.word(me, sent), ReachedBy{}, step, before)) return;
        sum += in.get(i);
        out.put(i, in.get(i));
        port::barrier(Site::Signal);
        if (i == 0) heap.word(before, taken).store<Order::Release>(step);
    }
    in.from(THREADS).put(i, sum);
}"#;

fn rank(world: World) -> Result<(), Error> {
    let heap = SymmetricHeap::open(&world, HeapOptions::new().backend(BackendKind::Cuda))?;
    let (slots, words) = (heap.alloc::<f32>(3 * N)?, heap.alloc_signal(64)?);
    heap.write(words, &[0; 64])?;
    let ring = UserKernel::new(&heap, SOURCE.into(), &Options::new(), "ring", (THREADS, 0))?;
    let stream = heap.stream()?;
    for round in 0..5 {
        heap.write(slots.slice(..N)?, &[(world.rank() + round) as f32; N])?;
        world.barrier()?; // Before the first round all words are zero.
        let (view, slice) = (heap.view(), heap.slice_view(slots)?);
        let numbers = [(words.offset() / 4) as u32, (round * (world.size() - 1)) as u32];
        let [word, step] = numbers.each_ref().map(bytes_of);
        // SAFETY: these are the kernel's parameters; the heap outlives the launch.
        unsafe { ring.launch(&stream, 1, &[bytes_of(&view), bytes_of(&slice), word, step])? };
        stream.sync()?;
        let sum: usize = (0..world.size()).map(|rank| rank + round).sum();
        assert_eq!(heap.read(slots.slice(2 * N..)?)?, [sum as f32; N], "round {round}");
    }
    heap.close().and(world.close())
}

fn main() -> Result<(), Error> {
    let Ok(gpus) = BackendKind::Cuda.device_count().inspect_err(|why| println!("skipped: {why}"))
    else {
        std::process::exit(77);
    };
    World::run_threads(gpus.max(2), rank).map(|_| println!("all sums are right"))
}
