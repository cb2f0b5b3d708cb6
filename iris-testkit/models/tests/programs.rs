//! Comparison of `Program::check` in iris-kernels with the proved rules of programs.

use iris_kernels::Kernel;
use iris_kernels::program::{
    Alternative, Core, EarliestStart, Gemm, Item, KernelOperands, Lane, Program, Rows, Source,
    Target, Transfer, When, Work, always, step, when,
};
use iris_models::proof::concrete::{Machine, Refusal, Universe};
use iris_models::proof::program::{Kind, programs};
use iris_models::proof::rule::Numbers;

const STORING: Work = Work::Gemm(Gemm {
    source: Source::Input,
    rows: Rows::All,
    to: Target::C,
    core: Core::Storing { blocks: true, results: None },
});
const GATED: Work =
    Work::Gemm(Gemm { source: Source::Input, rows: Rows::All, to: Target::C, core: Core::Gated });

/// One piece of work for each kind of step.
const WORKS: [Work; 10] = [
    Work::RmsNorm,
    Work::Open(Transfer::Shards),
    Work::Kernel(Kernel::Gather, KernelOperands::Call),
    Work::Barrier(0),
    Work::Kernel(Kernel::Gathered, KernelOperands::Call),
    Work::Kernel(Kernel::OneShot, KernelOperands::Call),
    Work::Copies(Transfer::Shards),
    GATED,
    STORING,
    Work::Close(Transfer::Shards),
];

/// Kind of the step that a piece of work makes, by the effects that `Program::check` looks at.
fn kind(work: Work) -> &'static Kind {
    let effects = work.effects();
    let is = |kind: &&Kind| {
        (kind.opens, kind.peers, kind.ends) == (effects.opens, effects.peers, effects.ends)
            && kind.is_open == matches!(work, Work::Open(_))
            && kind.joins == matches!(work, Work::Close(_))
            && kind.side == (work.lane() == Lane::Side)
            && kind.early == (work.early() == EarliestStart::AfterOpen)
    };
    Kind::ALL.iter().find(is).unwrap_or_else(|| panic!("{work} is of no kind"))
}

/// Text of the error with which `Program::check` reports a clause.
fn error(clause: &str) -> &'static str {
    match clause {
        "open: the call is not open yet" => "the call is already open",
        "visible: the call has not ended" => "the call has already ended",
        "visible: the call is open" => "visible to peers before the call is open",
        "end: no copies are to be joined" => "copies on the side stream are not joined",
        "early: directly after the step that opens" => "does not follow the step that opens",
        "next: an open call has ended" => "no step ends the call",
        _ => panic!("no check for \"{clause}\""),
    }
}

/// Tests that the proved rules and `Program::check` accept the same programs, among all programs of
/// up to five steps of every kind, and that both name the same clause for the first forbidden step.
#[test]
fn the_check_of_programs_is_what_is_proved() {
    const ENGINES: &[When] = &[When::Engines];
    const LAST: Alternative = always(&[step(Work::Kernel(Kernel::OneShot, KernelOperands::Call))]);
    let universe =
        Universe { ranks: 1, agents: 0, words: 0, tiles: 0, first: 0, calls: WORKS.len() as i64 };
    let machine = Machine::new(&programs(Numbers::REAL, None), universe, |_, _| 0);
    let (mut allowed, mut reported) = (0, std::collections::BTreeMap::new());
    for length in 1..=5 {
        for number in 0..WORKS.len().pow(length) {
            let works = (0..length).map(|at| WORKS[number / WORKS.len().pow(at) % WORKS.len()]);
            let works: Vec<Work> = works.collect();
            let items: Vec<Item> = works.iter().map(|&work| step(work)).collect();
            let alternatives = vec![when(ENGINES, items.leak()), LAST];
            let checked = Program::new(alternatives.leak()).check(3, 2);
            let mut state = machine.initial();
            let names = works.iter().map(|&work| kind(work).name).chain(["next"]);
            let forbidden = names.into_iter().find_map(|name| {
                let action = machine.named(name);
                let refused = machine.permits(&state, action, &[0]).err();
                machine.perform(&mut state, action, &[0]);
                refused
            });
            match (checked, forbidden) {
                (Ok(()), None) => allowed += 1,
                (Err(broken), Some(Refusal::Guard(clause))) => {
                    assert!(broken.what.contains(error(clause)), "{works:?}: {broken}; {clause}");
                    *reported.entry(clause).or_insert(0) += 1;
                }
                (checked, forbidden) => panic!("{works:?}: {checked:?}, but {forbidden:?}"),
            }
        }
    }
    assert!(allowed > 50 && reported.len() == 6, "{allowed} allowed, {reported:?}");
    println!("{allowed} programs are allowed, others are forbidden by {reported:?}");
}
