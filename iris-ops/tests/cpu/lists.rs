//! Tests of gathers of a list of tensors: results bit by bit against concatenation, and errors.

use half::bf16;
use iris_heap::{DType, Element, HeapOptions, Stream, SymSlice, SymmetricHeap, World};
use iris_ops::{
    AllGather, AllReduce, AnyOp, CollectiveArgs, Device, HeapReserve, MatRef, OpError, Plan,
    Topology, Variant, all_gather, all_reduce,
};
use iris_testkit::error_texts::fails;

/// Tensor of a test: `n` columns, and the gaps between the rows of input and output, in elements.
#[derive(Clone, Copy)]
struct Tensor {
    n: usize,
    gaps: [usize; 2],
}

/// Tensor on one rank, with the expected contents of its output, which include the gaps.
struct Placed<T: Element> {
    tensor: Tensor,
    input: SymSlice<T>,
    output: SymSlice<T>,
    expected: Vec<T>,
}

impl Tensor {
    /// Places the tensor in the heap for a call of `m` rows. Element `at` of the rows of all ranks
    /// is `value(at)`.
    fn place<T: Element>(
        self,
        heap: &SymmetricHeap,
        (plan, m): (&Plan, usize),
        value: impl Fn(usize) -> T,
    ) -> anyhow::Result<Placed<T>> {
        let Tensor { n, gaps } = self;
        let own = plan.rows_of(heap.rank(), m);
        let largest = plan.rows_of(0, m).len();
        let untouched = value(usize::MAX);
        let contents = |rows: std::ops::Range<usize>, gap: usize, room: usize| {
            let mut all = vec![untouched; room * (n + gap) + 1];
            for (at, row) in rows.enumerate() {
                for col in 0..n {
                    all[at * (n + gap) + col] = value(row * n + col);
                }
            }
            all
        };
        let given = contents(own, gaps[0], largest);
        let expected = contents(0..m, gaps[1], m);
        let input = heap.full(given.len(), untouched)?;
        let output = heap.full(expected.len(), untouched)?;
        heap.write(input, &given)?;
        Ok(Placed { tensor: self, input, output, expected })
    }
}

impl<T: Element> Placed<T> {
    fn matrices(&self, own: usize, m: usize) -> [MatRef; 2] {
        let Tensor { n, gaps } = self.tensor;
        [
            MatRef::sym(self.input, own, n).with_ld(n + gaps[0]),
            MatRef::sym(self.output, m, n).with_ld(n + gaps[1]),
        ]
    }

    /// Checks every byte of the output, gaps included.
    fn check(&self, heap: &SymmetricHeap, what: &str) -> anyhow::Result<()> {
        let seen = heap.read(self.output)?;
        let [seen, expected] = [&seen, &self.expected].map(|it| bytemuck::cast_slice::<T, u8>(it));
        let differs = seen.iter().zip(expected).position(|(a, b)| a != b);
        anyhow::ensure!(differs.is_none(), "{what}, rank {}: byte {differs:?}", heap.rank());
        Ok(())
    }
}

/// Bits of elements that look like floats, signalling NaNs and other NaNs with payloads included.
fn bits(at: usize, seed: u32) -> u32 {
    let mixed = (at as u32 ^ seed).wrapping_mul(0x9e37_79b9);
    match at % 5 {
        0 => 0x7f80_0001 | mixed >> 12,
        1 => 0xffc0_0000 | mixed >> 11,
        2 => 0x3f80_0000 + (mixed >> 9),
        _ => mixed,
    }
}

const LIST: [(Tensor, Tensor, Tensor, Tensor); 4] = {
    const fn of(n: usize, gaps: [usize; 2]) -> Tensor {
        Tensor { n, gaps }
    }
    [
        // Whole items only.
        (of(16, [0, 0]), of(8, [0, 0]), of(2, [0, 0]), of(8, [0, 0])),
        // Parts that are no multiples of 8 bytes, with gaps of every kind.
        (of(7, [2, 0]), of(3, [0, 3]), of(1, [0, 0]), of(5, [1, 4])),
        (of(1, [0, 0]), of(1, [4, 1]), of(3, [1, 1]), of(11, [0, 0])),
        // A tensor without columns in the middle.
        (of(33, [7, 31]), of(0, [0, 0]), of(9, [0, 0]), of(3, [0, 0])),
    ]
};

/// Tests lists of bf16, i32, f32 and u8 with 1, 2, 3, 5 and 8 ranks, in calls whose rows are split
/// unevenly, and in which some ranks or all have none.
#[test]
fn lists_are_gathered_bit_by_bit() {
    const M: usize = 19;
    for (size, threads) in [(1, 2), (2, 1), (3, 2), (5, 1), (8, 1)] {
        World::run_threads(size, |world| -> anyhow::Result<()> {
            for list in LIST {
                let plan = all_gather::Options::rows(M, list.0.n)
                    .dtype(DType::BF16)
                    .and(DType::I32, list.1.n)
                    .and(DType::F32, list.2.n)
                    .and(DType::U8, list.3.n)
                    .plan(&world)?;
                let options = Plan::heap_options(&[&plan], iris_heap::Bytes::new(1 << 20))?;
                let heap = SymmetricHeap::open(&world, options.threads(threads))?;
                let op = AllGather::new(&heap, &plan)?;
                let stream = heap.stream()?;
                for (call, m) in [M, 1, size + 1, M - 1, 0, 7, size].into_iter().enumerate() {
                    let seed = call as u32 * 77;
                    let at = (&plan, m);
                    let tokens = list
                        .0
                        .place(&heap, at, |at| bf16::from_bits((bits(at, seed) >> 16) as u16))?;
                    let ids = list.1.place(&heap, at, |at| bits(at, seed + 1) as i32)?;
                    let weights =
                        list.2.place(&heap, at, |at| f32::from_bits(bits(at, seed + 2)))?;
                    let marks = list.3.place(&heap, at, |at| bits(at, seed + 3) as u8)?;
                    let own = plan.rows_of(world.rank(), m).len();
                    let [a, c] = tokens.matrices(own, m);
                    let args =
                        [ids.matrices(own, m), weights.matrices(own, m), marks.matrices(own, m)]
                            .into_iter()
                            .fold(CollectiveArgs::new(a, c), |args, [a, c]| args.and(a, c));
                    op.run(&args, &stream)?;
                    stream.sync()?;
                    let what = format!("{plan}, call of {m} rows");
                    tokens.check(&heap, &format!("tokens of {what}"))?;
                    ids.check(&heap, &format!("ids of {what}"))?;
                    weights.check(&heap, &format!("weights of {what}"))?;
                    marks.check(&heap, &format!("marks of {what}"))?;
                }
                heap.close()?;
            }
            Ok(world.close()?)
        })
        .unwrap();
    }
}

/// Tests types of 8 bytes, a list whose first tensor is of integers, and that the heap of a plan has
/// room for all its tensors.
#[test]
fn heaps_have_room_for_all_tensors() {
    World::run_threads(3, |world| -> anyhow::Result<()> {
        let list = all_gather::Options::rows(7, 2).dtype(DType::I64).and(DType::F64, 4097);
        let plan = list.and(DType::BF16, 1).plan(&world)?;
        let heap = Plan::open_heap(&world, &[&plan], HeapReserve::matrices())?;
        let op = AllGather::new(&heap, &plan)?;
        let own = plan.rows_of(world.rank(), 7).len();
        let input = heap.full(3 * 2, -(world.rank() as i64))?;
        let wide = heap.full(3 * 4097, world.rank() as f64)?;
        let narrow = heap.full(3, bf16::from_f32(world.rank() as f32))?;
        let (all, all_wide, all_narrow) =
            (heap.zeros::<i64>(14)?, heap.zeros::<f64>(7 * 4097)?, heap.zeros::<bf16>(7)?);
        let args = CollectiveArgs::new(MatRef::sym(input, own, 2), MatRef::sym(all, 7, 2))
            .and(MatRef::sym(wide, own, 4097), MatRef::sym(all_wide, 7, 4097))
            .and(MatRef::sym(narrow, own, 1), MatRef::sym(all_narrow, 7, 1));
        let stream = heap.stream()?;
        op.run(&args, &stream)?;
        stream.sync()?;
        let owner = |row| plan.owner(row, 7).expect("a row");
        let expected: Vec<i64> = (0..14).map(|at| -(owner(at / 2) as i64)).collect();
        assert_eq!(heap.read(all)?, expected);
        let seen = heap.read(all_wide)?;
        assert!(seen.iter().enumerate().all(|(at, &it)| it == owner(at / 4097) as f64));
        let seen = heap.read(all_narrow)?;
        assert!(seen.iter().enumerate().all(|(at, it)| it.to_f32() == owner(at) as f32));
        heap.close()?;
        Ok(world.close()?)
    })
    .unwrap();
}

/// Tests that planning refuses what a list cannot be, with the value and what to use instead.
#[test]
fn plans_of_lists_name_what_they_refuse() {
    let list = || all_gather::Options::rows(64, 7168).dtype(DType::BF16).and(DType::I32, 8);
    let four = || Topology::new(0, 4);
    let text = list().and(DType::F32, 8).plan(four()).unwrap().to_string();
    assert!(
        text.starts_with("all_gather of 64 x (7168 bf16, 8 i32, 8 f32), rank 0 of 4"),
        "{text}"
    );
    assert!(text.contains(": ll by tiles"), "{text}");
    let push = list().variant(all_gather::Variant::Push);
    fails(push.plan(four()), &["variant of a list is push", "auto or ll", "a plan of its own"]);
    let five = (0..3).fold(list(), |list, _| list.and(DType::F32, 1));
    fails(five.plan(four()), &["number of tensors is 5", "at most 4"]);
    let elements = all_gather::Options::new(64).and(DType::I32, 8);
    fails(elements.plan(four()), &["message of a list is 64 elements", "Options::rows"]);
    let wide = list().and(DType::F32, usize::MAX);
    fails(wide.plan(four()), &["n of tensor 3 is 18446744073709551615", "at most"]);
    // A rank's part of 293 rows has 293 * (14336 + 32) bytes.
    let large = all_gather::Options::rows(4 * 293, 7168).dtype(DType::BF16).and(DType::I32, 8);
    let parts = ["4209824 bytes from one rank to another", "at most 2097152", "a plan of its own"];
    fails(large.plan(four()), &parts);
    assert_eq!(large.plan(Topology::new(0, 1)).unwrap().variant(), Variant::Ll);
    fails(list().reserve_sms(2).plan(four()), &["reserve_sms is 2", "0 for a list"]);
    fails(list().plan(four().on_nodes(2)), &["number of nodes is 2", "a plan of its own"]);
    // A type without a role stays refused where elements are not just moved.
    fails(all_gather::Options::rows(4, 4).dtype(DType::I32).plan(four()), &["dtype is i32"]);
    // On a GPU the time of the message is predicted from all bytes of a row.
    let h200 = || four().on_device(Device::named("h200").unwrap());
    let us = |n| {
        let plan = all_gather::Options::rows(64, 8).dtype(DType::I32).and(DType::BF16, n);
        plan.plan(h200()).unwrap().predicted_us(64).unwrap()
    };
    assert!(us(7168) > us(8), "{} {}", us(7168), us(8));
}

fn refused(op: &AllGather, args: &CollectiveArgs, stream: &Stream, parts: &[&str]) {
    let error = op.run(args, stream).unwrap_err();
    let text = fails::<()>(Err(&error), parts);
    assert!(text.starts_with("all_gather of 6 x (4 f32, 3 i32) at "), "{text}");
}

/// Tests that wrong calls are refused before anything is launched, and that the next call is right.
#[test]
fn wrong_calls_of_lists_are_refused() {
    World::run_threads(2, |world| -> anyhow::Result<()> {
        let plan = all_gather::Options::rows(6, 4).and(DType::I32, 3).plan(&world)?;
        let heap = Plan::open_heap(&world, &[&plan], iris_heap::Bytes::new(1 << 16))?;
        let op = AllGather::new(&heap, &plan)?;
        fails(AnyOp::new(&heap, &plan), &["number of tensors of the plan is 2", "`AllGather`"]);
        let stream = heap.stream()?;
        let (x, y) = (heap.full::<f32>(100, 1.0)?, heap.zeros::<f32>(100)?);
        let (ids, all_ids) = (heap.full::<i32>(100, 7)?, heap.zeros::<i32>(100)?);
        let first = CollectiveArgs::new(MatRef::sym(x, 3, 4), MatRef::sym(y, 6, 4));
        let (input, output) = (MatRef::sym(ids, 3, 3), MatRef::sym(all_ids, 6, 3));
        let right = first.and(input, output);
        let floats = MatRef::sym(x, 3, 3);
        let four = right.and(input, output).and(input, output).and(input, output);
        let mistakes: [(CollectiveArgs, &[&str]); 12] = [
            (first, &["number of tensors of the call is 1", "2, as in the plan"]),
            (right.and(input, output), &["number of tensors of the call is 3", "2, as"]),
            (four, &["number of tensors of the call is 5", "2, as in the plan"]),
            (first.and(floats, output), &["input of tensor 2 has element type f32", "i32"]),
            (first.and(MatRef::sym(ids, 2, 3), output), &["input of tensor 2 is 2 x 3", "3 x 3"]),
            (
                first.and(input, MatRef::sym(all_ids, 6, 2)),
                &["output of tensor 2 is 6 x 2", "6 x 3"],
            ),
            (
                first.and(input, MatRef::sym(ids, 6, 3)),
                &["output of tensor 2 and input of tensor 2 overlap"],
            ),
            (
                CollectiveArgs::new(MatRef::sym(x, 3, 4), MatRef::sym(x, 6, 4)).and(input, output),
                &["output and input overlap"],
            ),
            (
                first.and(MatRef::sym(ids, 3, 3), MatRef::sym(ids.slice(8..)?, 6, 3)),
                &["output of tensor 2 and input of tensor 2 overlap"],
            ),
            (first.and(input.with_ld(2), output), &["leading dimension of input of tensor 2 is 2"]),
            (first.and(input, output.with_ld(1000)), &["bytes of output of tensor 2 is 400"]),
            (
                first.and(MatRef::sym(ids, 3, 3).transposed(), output),
                &["storage order of input of tensor 2 is column-major", "row-major"],
            ),
        ];
        for (mistake, parts) in &mistakes {
            refused(&op, mistake, &stream, parts);
        }
        // SAFETY: the call is refused, so nothing accesses the memory.
        #[allow(unsafe_code, reason = "a matrix that must not be written")]
        let read_only = unsafe { MatRef::external([0i32; 18].as_ptr(), 18, 6, 3) };
        refused(&op, &first.and(input, read_only), &stream, &["memory of output of tensor 2"]);
        op.run(&right, &stream)?;
        stream.sync()?;
        assert_eq!((heap.read(y)?[23], heap.read(all_ids)?[17]), (1.0, 7));
        // An operator without a list takes none.
        let plan = all_reduce::Options::rows(6, 4).plan(&world)?;
        let sums = AllReduce::new(&heap, &plan)?;
        let args = CollectiveArgs::new(MatRef::sym(x, 6, 4), MatRef::sym(y, 6, 4));
        let parts = ["number of tensors of the call is 2", "expected 1, as in the plan"];
        fails(sums.run(&args.and(input, output), &stream), &parts);
        heap.close()?;
        Ok(world.close()?)
    })
    .unwrap();
}

/// Tests that ranks with different lists get an error when they make the operator.
#[test]
fn ranks_with_different_lists_get_an_error() {
    let made = World::run_threads(2, |world| -> anyhow::Result<String> {
        let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
        let dtype = [DType::I32, DType::F32][world.rank()];
        let plan = all_gather::Options::rows(6, 4).and(dtype, 3).plan(&heap)?;
        let error: OpError = AllGather::new(&heap, &plan).map(drop).unwrap_err();
        heap.close()?;
        world.close()?;
        Ok(error.to_string())
    });
    for text in made.unwrap() {
        fails::<()>(Err(text), &["tensors", "4 f32, 3 i32", "4 f32, 3 f32"]);
    }
}
