//! Bits of a row on a GPU, for every number of rows around it, and for every variant.

use std::sync::Arc;

use anyhow::{Result, ensure};
use half::{bf16, f16};
use iris_heap::{BackendKind, DType, Element, HeapOptions, SymmetricHeap, World};
use iris_ops::matmul::Options;
use iris_ops::{
    Epilogue, Library, MatRef, Matmul, MatmulAllReduce, MatmulArgs, Op, Shard, matmul_all_reduce,
};
use iris_testkit::bits::{Case, Rows};
use iris_testkit::harness;

use crate::graphs::{callers, captured, drop_graph};

/// N and K of the products. The vendor's library splits K in some of them.
const SHAPES: [(usize, usize); 4] = [(8192, 3584), (3584, 8192), (1280, 8192), (512, 7168)];

/// N and K of products that split K in the mode: workgroups share the tiles of few rows. With the last,
/// ranges of K are unequal, and the last tile is not full.
const SPLIT: [(usize, usize); 4] = [(1280, 8192), (1024, 8192), (512, 7168), (1000, 4168)];

/// Largest number of rows of a call, and numbers of rows around multiples of tiles.
const MOST: usize = 2048;
const ROWS: [usize; 18] =
    [1, 2, 3, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 300, 511, 777, 1025];

/// Ways to call a product, which may change the code that runs it.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Way {
    Plain,
    Bias,
    /// A bias of f32, which the whole-matrix GEMM does not take.
    OtherBias,
    Gelu,
    /// B is stored as N x K.
    Across,
    /// Rows of A and C begin at odd elements.
    Odd,
}

const WAYS: [Way; 6] = [Way::Plain, Way::Bias, Way::OtherBias, Way::Gelu, Way::Across, Way::Odd];

/// Products of the same rows in calls of [`ROWS`] and [`MOST`] rows: the largest product, and for each
/// other call the number of elements that differ from it.
fn product<T: Element + PartialEq>(
    heap: &Arc<SymmetricHeap>,
    (n, k): (usize, usize),
    way: Way,
    (library, invariant): (Library, bool),
) -> Result<(Vec<T>, Vec<usize>)> {
    let epilogue = if way == Way::Gelu { Epilogue::Gelu } else { Epilogue::None };
    let plan = Options::new(MOST, n, k).dtype(T::DTYPE).epilogue(epilogue).library(library);
    let plan = plan.batch_invariant(invariant);
    let op = Matmul::new(heap, &plan.plan(heap)?)?;
    let (lda, ldc) = if way == Way::Odd { (k + 1, n + 1) } else { (k, n) };
    let a = heap.rand::<T>(MOST * lda, 1)?;
    let (b, bias) = (heap.rand::<T>(k * n, 2)?, heap.rand::<T>(n, 3)?);
    let other_bias = heap.rand::<f32>(n, 3)?;
    let c = heap.zeros::<T>(MOST * ldc)?;
    let stream = heap.stream()?;
    let of = |m: usize| -> Result<Vec<T>> {
        let right = match way {
            Way::Across => MatRef::sym(b, n, k).transposed(),
            _ => MatRef::sym(b, k, n),
        };
        let left = MatRef::sym(a, m, k).with_ld(lda);
        let mut args = MatmulArgs::new(left, right, MatRef::sym(c, m, n).with_ld(ldc));
        match way {
            Way::Bias => args = args.bias(MatRef::vector(bias)),
            Way::OtherBias => args = args.bias(MatRef::vector(other_bias)),
            _ => (),
        }
        op.run(&args, &stream)?;
        stream.sync()?;
        let all = heap.read(c)?;
        Ok(all.chunks(ldc).take(m).flat_map(|row| &row[..n]).copied().collect())
    };
    let products = || -> Result<_> {
        let all = of(MOST)?;
        let differ = |some: Vec<T>| some.iter().zip(&all).filter(|(x, y)| x != y).count();
        let differing = ROWS.iter().map(|&m| Ok(differ(of(m)?))).collect::<Result<_>>()?;
        Ok((all, differing))
    };
    let products = products();
    op.free()?;
    for slice in [a, b, c, bias] {
        heap.free(slice)?;
    }
    heap.free(other_bias)?;
    products
}

fn products<T: Element + PartialEq>(heap: &Arc<SymmetricHeap>) -> Result<()> {
    for shape in SHAPES {
        for way in WAYS {
            let (ours, differing) = product::<T>(heap, shape, way, (Library::Ours, false))?;
            let what = format!("{:?}, (N, K) = {shape:?}, {way:?}", T::DTYPE);
            ensure!(
                differing.iter().all(|&count| count == 0),
                "{what}: elements that differ with {ROWS:?} rows: {differing:?}"
            );
            let (tiles, differing) = product::<T>(heap, shape, way, (Library::None, false))?;
            let other = tiles.iter().zip(&ours).filter(|(x, y)| x != y).count();
            println!(
                "TILES {what}: {other} elements of tiles differ from ours; by rows {differing:?}"
            );
            let (theirs, differing) = product::<T>(heap, shape, way, (Library::Vendor, false))?;
            let other = theirs.iter().zip(&ours).filter(|(x, y)| x != y).count();
            println!(
                "{what}: {other} elements of the vendor's product of {MOST} rows differ from ours,"
            );
            println!("  and with fewer rows from its own with {MOST}: {differing:?}");
        }
    }
    for (shape, way) in SPLIT.into_iter().flat_map(|shape| WAYS.map(|way| (shape, way))) {
        let what = format!("{:?}, (N, K) = {shape:?}, {way:?}, batch invariant", T::DTYPE);
        if way == Way::Odd {
            let done = product::<T>(heap, shape, way, (Library::Auto, true));
            let text = done.err().map(|error| error.to_string()).unwrap_or_default();
            ensure!(text.contains("expected a multiple of 16 bytes"), "{what}: {text}");
            continue;
        }
        let (split, differing) = product::<T>(heap, shape, way, (Library::Auto, true))?;
        ensure!(
            differing.iter().all(|&count| count == 0),
            "{what}: elements that differ with {ROWS:?} rows: {differing:?}"
        );
        let (whole, _) = product::<T>(heap, shape, way, (Library::None, false))?;
        let pairs = || split.iter().zip(&whole).map(|(x, y)| (x.to_f64(), y.to_f64()));
        let far = pairs().filter(|(x, y)| (x - y).abs() > 0.01 * y.abs() + 0.02).count();
        let other = pairs().filter(|(x, y)| x != y).count();
        println!("{what}: {other} elements differ from a product that does not split K");
        ensure!(far == 0, "{what}: {far} elements are far from the product that does not split K");
        // The tile GEMM, which does not split K, applies GELU and adds a bias of another type.
        let by_tiles = [Way::OtherBias, Way::Gelu].contains(&way);
        ensure!((other > 0) != by_tiles, "{what}: {other} elements differ");
    }
    Ok(())
}

/// Tests that the built-in products, whole and by tiles, have one set of bits for every number of rows;
/// prints where the vendor's differs from it.
pub(crate) fn rows_of_a_product_have_one_set_of_bits() {
    let outcome = World::run_threads(1, |world| -> Result<()> {
        let options = HeapOptions::new().backend(BackendKind::Cuda).data_bytes(512 << 20);
        let heap = SymmetricHeap::open(&world, options)?;
        products::<bf16>(&heap)?;
        products::<f16>(&heap)?;
        Ok(heap.close()?)
    });
    outcome.unwrap();
}

/// Numbers of rows of calls, around multiples of tiles; the last one is that of the largest call.
const FEW: [usize; 9] = [1, 2, 3, 16, 65, 128, 129, 300, 777];

/// N and K. With the first, a GEMM of few rows sends its result itself; with the second, rows are no whole
/// vectors, and tile kernels multiply.
const WHOLE: [usize; 2] = [8192, 512];
const RAGGED: [usize; 2] = [777, 1030];
/// N and K for which a product splits K.
const IN_PARTS: [usize; 2] = [520, 4160];

/// Checks every operator that adds, with `auto` and with each variant that may be batch invariant, against
/// `auto` in a call of one row.
fn invariant<T: Element>(on: (&World, &Arc<SymmetricHeap>), shapes: &[[usize; 2]]) -> Result<()> {
    let most = FEW[FEW.len() - 1];
    for (op, &shape) in Op::ALL.into_iter().flat_map(|op| shapes.iter().map(move |it| (op, it))) {
        let reads = |option: &str| op.options().contains(&option);
        if !op.multiplies() && !reads("wire") {
            continue;
        }
        let plain = Case::new(op, shape, most);
        let mut ways = vec![plain.clone()];
        ways.extend(op.multiplies().then(|| Case { epilogue: true, ..plain.clone() }));
        ways.extend(reads("rms_norm").then(|| Case { norm: true, ..plain.clone() }));
        let by_columns = Case { shard: Shard::Columns, ..plain.clone() };
        ways.extend(reads("shard").then_some(by_columns));
        for case in ways {
            let one = Rows::<T, T>::new(on, &Case { most: 1, ..case.clone() })?;
            let expected = one.alone()?;
            one.free()?;
            for case in case.of_variants::<T, T>(on.1) {
                let rows = Rows::<T, T>::new(on, &case)?;
                for m in FEW {
                    rows.check(m, m * 7 / 11, &expected)?;
                }
                rows.free()?;
            }
        }
    }
    Ok(())
}

/// Tests the option `batch_invariant` with ranks that share one GPU. With `CUDA_MODULE_LOADING=EAGER` in the
/// environment, the vendor's products are among those of the calls.
pub(crate) fn rows_have_one_set_of_bits_on_one_gpu() {
    for size in [1, 3] {
        rows_have_one_set_of_bits(size);
    }
}

/// Tests the option `batch_invariant` with a GPU for each rank, where GEMMs send their results
/// themselves.
pub(crate) fn rows_have_one_set_of_bits_on_all_gpus() {
    let gpus = (2..=8).rev().find(|&count| harness::fewer_gpus_than(count).is_none());
    rows_have_one_set_of_bits(gpus.unwrap_or(2));
}

fn rows_have_one_set_of_bits(ranks: usize) {
    let outcome = World::run_threads(ranks, |world| -> Result<()> {
        let options = HeapOptions::new().backend(BackendKind::Cuda).data_bytes(1 << 30);
        let heap = SymmetricHeap::open(&world, options)?;
        invariant::<bf16>((&world, &heap), &[WHOLE, RAGGED, IN_PARTS])?;
        invariant::<f16>((&world, &heap), &[WHOLE])?;
        Ok(heap.close()?)
    });
    outcome.unwrap();
}

/// Tests that a graph of a padded batch gives its rows the bits that they have in eager calls of the batch
/// alone and of one row. The product splits K.
pub(crate) fn rows_of_a_padded_graph_have_the_bits_of_eager_calls() {
    let [batch, padded] = [40, 64];
    let [n, k] = IN_PARTS;
    let outcome = World::run_threads(2, |world| -> Result<()> {
        let options = HeapOptions::new().backend(BackendKind::Cuda).data_bytes(64 << 20);
        let heap = SymmetricHeap::open(&world, options)?;
        let (theirs, stream) = callers(&heap)?;
        let plan = matmul_all_reduce::Options::new(padded, n, k).dtype(DType::BF16);
        let op = MatmulAllReduce::new(&heap, &plan.batch_invariant(true).plan(&heap)?)?;
        let seed = world.rank() as u64;
        let (a, b) = (heap.rand::<bf16>(padded * k, seed)?, heap.rand::<bf16>(k * n, 2 + seed)?);
        let c = heap.zeros::<bf16>(padded * n)?;
        let run = |row: usize, rows: usize| {
            let left = MatRef::sym(a.slice(row * k..)?, rows, k);
            let result = MatRef::sym(c.slice(row * n..)?, rows, n);
            op.run(&MatmulArgs::new(left, MatRef::sym(b, k, n), result), &stream)?;
            Ok::<_, anyhow::Error>(())
        };
        let read = |rows: usize| {
            stream.sync()?;
            let found = heap.read(c.slice(..rows * n)?)?;
            heap.write(c, &vec![bf16::NAN; padded * n])?;
            world.barrier()?;
            Ok::<_, anyhow::Error>(found)
        };
        run(0, batch)?;
        let expected = read(batch)?;
        for row in [0, 1, batch - 1] {
            run(row, 1)?;
            let found = read(batch)?;
            let at = row * n..(row + 1) * n;
            ensure!(found[at.clone()] == expected[at], "row {row} in a call of its own");
        }
        let graph = captured(&theirs, || run(0, padded))?;
        world.barrier()?;
        // Each replay has other rows beside the batch.
        for replay in 0..3 {
            let padding = vec![bf16::from_f32(replay as f32); (padded - batch) * k];
            heap.write(a.slice(batch * k..)?, &padding)?;
            graph.launch()?;
            ensure!(read(batch)? == expected, "replay {replay}");
        }
        drop_graph(graph);
        drop(op);
        Ok(heap.close()?)
    });
    outcome.unwrap();
}
