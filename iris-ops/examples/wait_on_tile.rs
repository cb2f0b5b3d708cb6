//! Example: a kernel of the caller that adds up each tile of C while `matmul_all_reduce` still runs.
//! Exit code 0: the sums are right; 1: wrong, or a call failed; 77: no GPU, nothing was checked.
#![allow(unsafe_code, reason = "the launch of a kernel of the user's")]
use bytemuck::bytes_of;
use iris_heap::{BackendKind, HeapOptions, SymmetricHeap, World};
use iris_kernels::{UserKernel, gemm_config::THREADS};
use iris_ops::matmul_all_reduce::{Options, Variant};
use iris_ops::{MatRef, MatmulAllReduce, MatmulArgs};
const M: usize = 500;
const SOURCE: &str = r#"
#include "iris/tiles.h"
using namespace iris;
// Adds up the peers' tiles as they arrive (`behind` 0), or this rank's tiles after the op (1).
IRIS_KERNEL add(IRIS_ARGS TileView view, Slice<float> c, Slice<float> sums, u32 behind) {
    Tiles tiles(view);
    const auto from = view.heap.at(c, view.heap.rank), to = view.heap.at(sums, view.heap.rank);
    for (u32 tile = port::workgroup(); tile < tiles.count(); tile += port::workgroups()) {
        if (tiles.own(tile) != (behind == 1)) continue;
        if (behind == 0 && !tiles.wait(tile)) return;
        const Tile at = tiles.area(tile);
        for (u32 i = port::thread(); i < at.rows * at.cols; i += port::threads()) {
            to.add(tile, from.get(u64(at.row + i / at.cols) * view.cols + at.col + i % at.cols));
        }
    }
}"#;
fn rank(world: World) -> anyhow::Result<()> {
    let heap = SymmetricHeap::open(&world, HeapOptions::new().backend(BackendKind::Cuda))?;
    let each = heap.workgroups() / 2; // A multiprocessor for each workgroup of both kernels.
    let options = Options::new(M, M, 8).variant(Variant::TwoShot).reserve_sms(each as usize);
    let op = MatmulAllReduce::new(&heap, &options.plan(&heap)?)?;
    let kernel = UserKernel::new(&heap, SOURCE.into(), &Default::default(), "add", (THREADS, 0))?;
    let (b, c) = (heap.ones::<f32>(8 * M)?, heap.alloc::<f32>(M * M)?);
    let (stream, side) = (heap.stream()?, heap.stream()?);
    for call in 1..=3 {
        let (a, sums) = (heap.full::<f32>(M * 8, call as f32)?, heap.zeros::<f32>(M * M)?);
        let matrices = (MatRef::sym(a, M, 8), MatRef::sym(b, 8, M), MatRef::sym(c, M, M));
        let args = MatmulArgs::new(matrices.0, matrices.1, matrices.2);
        let views = [heap.slice_view(c)?, heap.slice_view(sums)?];
        let [from, to] = views.each_ref().map(bytes_of);
        let view = op.beside(&args, &stream)?;
        // SAFETY: the arguments match the parameters; C is not written before both launches end.
        unsafe { kernel.launch_concurrent(&side, each, &view, &[from, to, &[0; 4]])? };
        op.run(&args, &stream)?;
        // SAFETY: the arguments match the parameters; C is not written before both launches end.
        unsafe { kernel.launch(&stream, each, &[bytes_of(&view), from, to, bytes_of(&1_u32)])? };
        stream.wait(&side.record()?)?;
        stream.sync()?;
        let sum: f64 = heap.read(sums)?.into_iter().map(f64::from).sum();
        anyhow::ensure!(sum == (call * 8 * world.size() * M * M) as f64, "call {call}: {sum}");
    }
    Ok(heap.close()?)
}
fn main() -> anyhow::Result<()> {
    let Ok(gpus) = BackendKind::Cuda.device_count().inspect_err(|why| println!("skipped: {why}"))
    else {
        std::process::exit(77);
    };
    World::run_threads(gpus.max(2), rank).map(|_| println!("all sums are right"))
}
