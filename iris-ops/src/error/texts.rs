//! Tests of the texts of all errors. Each text must show the value, the expectation, and an action
//! for the user.

use std::sync::Arc;

use iris_heap::abi::abort;
use iris_heap::{BackendKind, Bytes, SymSlice, SymmetricHeap, World};

use iris_testkit::error_texts::check_texts;
use iris_testkit::variants;

use super::*;
use crate::ops::{all_reduce, broadcast, matmul_all_reduce};
use crate::{
    AllReduce, CollectiveArgs, Comm, HeapReserve, MatRef, MatmulAllReduce, MatmulArgs, Plan,
    Topology, comm, scope,
};

/// User guide, which has a section on troubleshooting by error text.
const GUIDE: &str = include_str!("../../GUIDE.md");

variants! { Error:
    Unknown, Tuning, NoPlan, Invalid, Shape, Dtype, Overlap, TooManyRows, TooManyElements, OtherWorld, OtherNodes, Poisoned, Step, Comm, Scope, Heap,
}

/// Plan of a product of at most 8 rows, and a heap of one rank with room for it.
fn product() -> (Plan, Arc<SymmetricHeap>) {
    let world = World::threads(1).unwrap().remove(0);
    let plan = matmul_all_reduce::Options::new(8, 6, 9).plan(&world).unwrap();
    let heap = Plan::open_heap(&world, &[&plan], Bytes::new(1 << 16)).unwrap();
    (plan, heap)
}

/// Error of a call whose plan and heap come from [`product`]. `f` makes A, B and C of the call from
/// three slices of 100 elements.
fn of_call(f: impl FnOnce(&SymmetricHeap, [SymSlice<f32>; 3]) -> [MatRef; 3]) -> Error {
    let (plan, heap) = product();
    let op = MatmulAllReduce::new(&heap, &plan).unwrap();
    let [a, b, c] = f(&heap, [(); 3].map(|()| heap.zeros(100).unwrap()));
    op.run(&MatmulArgs::new(a, b, c), &heap.stream().unwrap()).unwrap_err()
}

/// A, B and C of a call of `rows` rows.
fn matrices([a, b, c]: [SymSlice<f32>; 3], rows: usize) -> [MatRef; 3] {
    [MatRef::sym(a, rows, 9), MatRef::sym(b, 9, 6), MatRef::sym(c, rows, 6)]
}

/// Errors of calls that fail, each with three pieces of its text: the value, the expectation, and
/// the action. Only the error of a tuning file is constructed here and not caused by a call.
fn examples() -> Vec<(Error, [&'static str; 3])> {
    vec![
        (
            "fast".parse::<crate::Variant>().unwrap_err().into(),
            ["variant fast", "expected one of", "one_shot, two_shot"],
        ),
        (
            Error::Tuning {
                path: "x.toml".into(),
                why: "is for 4 ranks, expected 2: run `iris tune` for 2".into(),
            },
            ["x.toml is for 4 ranks", "expected 2", "run `iris tune`"],
        ),
        (
            Plan::heap_options(&[], HeapReserve::none()).unwrap_err(),
            ["0 plans", "expected at least one", "pass the plans"],
        ),
        (
            broadcast::Options::new(8).root(7).plan(Topology::new(0, 4)).unwrap_err(),
            ["root is 7", "expected", "below 4"],
        ),
        (
            of_call(|_, [a, b, c]| {
                let [a, b, _] = matrices([a, b, c], 8);
                [a, b, MatRef::sym(c, 7, 6)]
            }),
            ["C is 7 x 6", "expected 8 x 6", "pass such a matrix"],
        ),
        (
            of_call(|heap, slices| {
                let [a, b, _] = matrices(slices, 8);
                [a, b, MatRef::sym(heap.zeros::<half::f16>(48).unwrap(), 8, 6)]
            }),
            ["C has element type f16", "expected f32", "pass f32, or plan with"],
        ),
        (
            of_call(|_, [a, b, _]| matrices([a, b, a], 8)),
            ["C and A overlap", "expected memory of its own", "allocate it apart"],
        ),
        (
            of_call(|_, slices| matrices(slices, 9)),
            ["9 rows", "expected at most 8", "pass fewer, or plan for 9"],
        ),
        (
            {
                let (_, heap) = product();
                let plan = all_reduce::Options::new(8).plan(&heap).unwrap();
                let op = AllReduce::new(&heap, &plan).unwrap();
                let [input, output] =
                    [(); 2].map(|()| MatRef::vector(heap.zeros::<f32>(9).unwrap()));
                let args = CollectiveArgs::new(input, output);
                op.run(&args, &heap.stream().unwrap()).unwrap_err()
            },
            ["9 elements", "expected at most 8", "pass fewer, or plan for 9"],
        ),
        (
            {
                let plan = matmul_all_reduce::Options::new(8, 6, 9).plan(Topology::new(1, 4));
                MatmulAllReduce::new(&product().1, &plan.unwrap()).err().unwrap()
            },
            ["rank 1 of 4", "expected rank 0 of 1", "plan on each rank"],
        ),
        (
            {
                let of_rank = |world: World| -> iris_heap::Result<Error> {
                    let ranks = Topology::new(world.rank(), 2).on_nodes(2);
                    let plan = all_reduce::Options::new(8).plan(ranks).unwrap();
                    Ok(Plan::open_heap(&world, &[&plan], HeapReserve::none()).unwrap_err())
                };
                World::run_threads(2, of_rank).unwrap().remove(0)
            },
            ["planned for 2 nodes", "expected 1", "plan from the heap"],
        ),
        (
            of_call(|heap, slices| {
                heap.poison(abort::USER).unwrap();
                matrices(slices, 8)
            }),
            ["(code 3)", "expected one without", "open them anew"],
        ),
        (
            of_call(|heap, slices| {
                heap.control().fail_launch_after(0);
                matrices(slices, 8)
            }),
            ["step ", "a test lets this launch fail", "may be tried again"],
        ),
        (
            Comm::from_rank(BackendKind::Cpu, 2, 2, comm::Id::new().unwrap()).err().unwrap(),
            ["communicator: ", "is 2: expected", "0 to 1"],
        ),
        (
            {
                let (_, heap) = product();
                let stream = heap.stream().unwrap();
                let failing =
                    || Err(iris_heap::Error::GaveUp { rank: 3, host: None, reason: None });
                scope(&heap, &stream, |_| -> Result<()> {
                    stream.call_cpu("print", failing).unwrap();
                    Ok(())
                })
                .unwrap_err()
            },
            ["rank 3 gave up", "expected to finish", "open them anew"],
        ),
        (
            {
                let (plan, heap) = product();
                heap.close().unwrap();
                MatmulAllReduce::new(&heap, &plan).err().unwrap()
            },
            ["the heap is closed", "expected an open one", "open another"],
        ),
    ]
}

#[test]
fn every_error_shows_its_value_what_was_expected_and_what_to_do() {
    check_texts(GUIDE, &examples(), NAMES, name);
}

#[test]
fn an_operator_is_named_by_its_label_and_shape() {
    let ranks = Topology::new(0, 2);
    let options = matmul_all_reduce::Options::new(64, 8, usize::MAX);
    let of = |options: &matmul_all_reduce::Options| options.plan(ranks).unwrap_err().to_string();
    let shape = format!("matmul_all_reduce of 64 x 8 x {} f32", usize::MAX);
    assert!(of(&options).starts_with(&format!("{shape}: k is ")), "{}", of(&options));
    let named = of(&options.name("layer3.down"));
    assert!(named.starts_with(&format!("layer3.down ({shape}): k is ")), "{named}");

    let other = all_reduce::Options::new(8)
        .plan(ranks.on_device(crate::Device::assumed(BackendKind::Cuda)));
    let plan = all_reduce::Options::new(8).plan(ranks).unwrap();
    let error = crate::Plan::heap_options(&[&plan, &other.unwrap()], crate::HeapReserve::none());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("backend is cuda") && error.contains("cpu"), "{error}");
}

#[test]
fn a_label_is_said_once() {
    let label: Arc<str> = "layer3.down (all_reduce of 8 f32)".into();
    let heap =
        |what: &str| Error::Heap { op: Op::AllReduce.into(), cause: Box::new(panicked(what)) };
    for what in ["all_reduce", &label] {
        let text = heap(what).labelled(&label).to_string();
        assert_eq!(text.matches("all_reduce").count(), 1, "{text}");
    }
}

/// Error of the heap whose text begins with the operator name `name`, as the text of a fault does.
fn panicked(name: &str) -> iris_heap::Error {
    iris_heap::Error::Panicked { name: name.into(), group: None, message: "by design".into() }
}
