//! Checks that only the first call of each problem allocates: later calls, on a stream and in a
//! capture, must allocate nothing on their own thread.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use iris_heap::World;
use iris_testkit::allocations::Counting;

use crate::calls::{Calls, Captured, heap};
use crate::cases::{Extent, all};
use crate::library::{Machine, Standin};
use crate::logs::title;

/// Runs all cases with `size` ranks.
///
/// # Errors
/// The calls that allocate although they are not the first of their problem, with the number of
/// their allocations.
pub(crate) fn check(machine: &Machine, size: usize) -> Result<()> {
    let mut counted = 0;
    let mut wrong = BTreeMap::new();
    for planned in all(machine.backend(), Extent::Few) {
        let of_ranks = World::run_threads(size, |world| {
            Standin::get(machine.backend()).rank(world.rank());
            let heap = heap(&world, machine, &planned)?;
            let seen = match Calls::new(&planned, &heap) {
                Ok(calls) if calls.takes_part() => of_rank(&calls, machine)?,
                _ => Vec::new(),
            };
            heap.close()?;
            Ok::<_, anyhow::Error>(seen)
        })?;
        for (call, allocations) in of_ranks.into_iter().flatten() {
            counted += 1;
            if allocations > 0 {
                wrong.insert(format!("{}, {call}", title(&planned)), allocations);
            }
        }
    }
    println!("{counted} calls counted");
    ensure!(wrong.is_empty(), "calls that allocate: {wrong:#?}");
    ensure!(counted > 1000, "only {counted} calls were counted");
    Ok(())
}

/// Counts the allocations of each call on one rank; calls that the operator refuses are left out.
fn of_rank(calls: &Calls<'_>, machine: &Machine) -> Result<Vec<(String, u64)>> {
    let standin = Standin::get(machine.backend());
    let planned = calls.planned();
    let all =
        || planned.calls.iter().flat_map(|way| planned.case.rows.iter().map(move |&m| (way, m)));
    let stream = calls.heap().stream()?;
    let captured = Captured::new(calls.heap(), machine)?;
    let mut seen = Vec::new();
    let capture = |seen: &mut Vec<_>| {
        let ended = captured.capture(|stream| {
            for (way, m) in all() {
                let (allocations, outcome) = Counting::during(|| calls.run(way, m, stream));
                if outcome.is_ok() {
                    seen.push((format!("{}, m={m}, captured", way.what), allocations));
                }
            }
        });
        ended.map_err(|code| anyhow::anyhow!("the capture ends with {code}"))
    };
    for (way, m) in all() {
        // The first call of a problem may allocate, so only the second is counted.
        let first = calls.run(way, m, &stream);
        let (allocations, _) = Counting::during(|| calls.run(way, m, &stream));
        if first.is_ok() {
            seen.push((format!("{}, m={m}", way.what), allocations));
        }
    }
    capture(&mut Vec::new())?;
    capture(&mut seen)?;
    standin.take();
    Ok(seen)
}
