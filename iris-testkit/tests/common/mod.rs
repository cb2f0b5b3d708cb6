//! Common parts of the tests of ops: backend, cases and their runner.

#![allow(dead_code, unreachable_pub, reason = "each test program uses some of it")]

pub mod nodes;
pub mod ready;

use iris_heap::{BackendKind, HeapOptions, World};
use iris_ops::Epilogue;
use iris_testkit::Level;
use iris_testkit::suite::{Case, Op, open, run_case};

/// Text of an error without shapes and places of operators: `all_reduce of 8 x 6 f32 at FILE:1:2 (operator 0)`
/// becomes `all_reduce (operator 0)`.
pub fn without_places(text: &str) -> String {
    let mut parts = text.split(" of 8 x 6 f32 at ");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        plain += part.find(" (operator").map_or(part, |end| &part[end..]);
    }
    plain
}

/// Backend that long tests run on, from `IRIS_TEST_BACKEND`; by default the CPU.
pub fn backend() -> BackendKind {
    let asked = std::env::var("IRIS_TEST_BACKEND").unwrap_or_default();
    if asked.is_empty() { BackendKind::Cpu } else { asked.parse().unwrap() }
}

/// Whether the op accepts the matrices of the case. Other tests check that the op refuses all other
/// cases.
pub fn taken(case: &Case, size: usize) -> bool {
    let pulls = case.op == Op::AllGatherMatmul && case.variant != "baseline" && size > 1;
    let finishes = case.op.options().contains(&"epilogue") || case.op == Op::Barrier;
    // Variants that pull need A row-major and at the same offset in the heap on all ranks, because
    // peers read A in place.
    (finishes || case.options.epilogue == Epilogue::None)
        && !(pulls
            && (case.a.external || case.a.external_on_odd || case.a.transposed || case.a.skewed))
}

/// Change of one feature of a case.
pub type Change = fn(&mut Case);

pub fn changed(case: &Case, change: Change) -> Case {
    let mut case = case.clone();
    change(&mut case);
    case
}

/// Returns the cases of a long list that run at this level: all, or every seventh at the level
/// quick. The lists have 10, 13 or 33 cases of each operator, one per feature; seven shares no
/// factor with these numbers, so a sample has every feature.
pub fn sampled(cases: Vec<Case>) -> Vec<Case> {
    cases.into_iter().step_by(if Level::from_env() <= Level::Quick { 7 } else { 1 }).collect()
}

/// Runs all cases in one world of `size` ranks, whose heaps have `threads` worker threads each.
pub fn run_all(size: usize, threads: usize, cases: &[Case]) -> anyhow::Result<()> {
    let cases: Vec<_> = cases.iter().filter(|case| taken(case, size)).collect();
    assert!(!cases.is_empty());
    let begun = std::time::Instant::now();
    World::run_threads(size, |world| -> anyhow::Result<()> {
        let options = HeapOptions::new().threads(threads);
        let rig = open(&world, options, cases.iter().copied())?;
        for case in &cases {
            run_case(&rig.heap, case)?;
        }
        rig.heap.close()?;
        world.close()?;
        Ok(())
    })?;
    println!("{} cases, {size} ranks of {threads} threads: {:.1?}", cases.len(), begun.elapsed());
    Ok(())
}
