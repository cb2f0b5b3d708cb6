//! Tests in which each enqueue of a call fails in turn, on one rank. They check the error of the
//! call, the ranks whose heaps are poisoned, and the result of a second attempt.
//!
//! A failed call must either leave nothing that a peer can see, so that it can be retried, or
//! poison the heap on all ranks. A call that fails in a capture poisons nothing: the capture is
//! discarded.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Barrier;

use anyhow::{Result, ensure};
use iris_heap::World;

use crate::calls::{Calls, Captured, heap, in_line};
use crate::cases::{Extent, Planned, all};
use crate::library::{Machine, Standin};
use crate::logs::{captures, title};

/// Rank on which a test makes an enqueue fail.
const FAILING: usize = 0;

/// Way in which the failing call is issued.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum How {
    /// Call on the stream of the previous call.
    Eager,
    /// Call on another stream than the previous call, so that events order the two.
    OtherStream,
    /// Call in a graph capture of its own.
    Captured,
}

/// Call of a case, one of whose enqueues is made to fail.
#[derive(Clone, Copy)]
struct Attempt {
    m: usize,
    how: How,
    /// Position of the enqueue that fails, from 1; 0 if none is to fail.
    number: u64,
}

/// Logs and errors of an attempt on one rank.
#[derive(Default, Debug)]
struct Seen {
    /// Log of the call's enqueues, and the call's error.
    log: String,
    error: Option<String>,
    /// Fault that the heap reports after the call; `None` if the heap has no fault.
    poisoned: Option<String>,
    /// Log of the enqueues of a second attempt, and the error of that attempt.
    again: String,
    again_error: Option<String>,
}

/// State in which a failed call leaves the ranks and their heaps.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Verdict {
    /// Nothing is visible to peers, and the call can be retried.
    Again,
    /// The heap is poisoned on all ranks, which thus learn of the failure.
    Poisoned,
    /// All enqueues of the call succeed, except the record of the event that orders the next call
    /// after this call.
    Enqueued,
    /// Wrong outcome: peers see part of a call that will not be completed, and no rank learns of
    /// it.
    Kept,
    /// Wrong: the heap is poisoned although peers cannot see any part of the call.
    PoisonedUnseen,
    /// Wrong: a failure in a capture poisons the heap.
    PoisonedByCapture,
    /// Wrong: the heap is poisoned on some ranks only.
    PoisonedInPart,
    /// Wrong: a second attempt enqueues other work than an undisturbed call, or fails again.
    Otherwise,
    /// Wrong: the call reports success although one of its enqueues failed.
    Unsaid,
}

impl Verdict {
    pub(crate) fn is_good(self) -> bool {
        matches!(self, Verdict::Again | Verdict::Poisoned | Verdict::Enqueued)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::Again => "again",
            Verdict::Poisoned => "poisoned",
            Verdict::Enqueued => "enqueued",
            Verdict::Kept => "KEPT",
            Verdict::PoisonedUnseen => "POISONED, THOUGH UNSEEN",
            Verdict::PoisonedByCapture => "POISONED BY A CAPTURE",
            Verdict::PoisonedInPart => "POISONED IN PART",
            Verdict::Otherwise => "OTHERWISE",
            Verdict::Unsaid => "UNSAID",
        })
    }
}

/// Prints a row for each call with the state after a failure of each enqueue; then the wrong states
/// by variant, and the errors.
///
/// # Errors
/// The cases in which a failed call leaves a wrong state.
pub(crate) fn table(machine: &Machine, size: usize) -> Result<()> {
    let mut counts: BTreeMap<Verdict, u32> = BTreeMap::new();
    let mut wrong: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut errors: BTreeMap<String, usize> = BTreeMap::new();
    for planned in all(machine.backend(), Extent::Few) {
        for &m in planned.case.rows.iter().take(1) {
            for how in [How::Eager, How::OtherStream, How::Captured] {
                let whole = Attempt { m, how, number: 0 };
                let Some(clean) = attempt(&planned, machine, size, whole)? else { continue };
                if let Some(error) = &clean[FAILING].error {
                    println!("{}, m={m}, {how:?}: refused: {error}", title(&planned));
                    continue;
                }
                let lines: Vec<String> = clean[FAILING].log.lines().map(step).collect();
                let mut outcomes = Vec::new();
                for (step, number) in lines.iter().zip(1..) {
                    let number = Attempt { number, ..whole };
                    let Some(seen) = attempt(&planned, machine, size, number)? else { continue };
                    let verdict = verdict(&seen, &clean[FAILING].log, how);
                    *counts.entry(verdict).or_default() += 1;
                    outcomes.push(format!("{step}={verdict}"));
                    if !verdict.is_good() {
                        let row = format!("{verdict}: {how:?}, {step}");
                        let variant = format!("{} {}", planned.case.op, planned.case.variant);
                        let variants = wrong.entry(row).or_default();
                        if !variants.contains(&variant) {
                            variants.push(variant);
                        }
                    }
                    for (rank, seen) in seen.iter().enumerate() {
                        let who = if rank == FAILING { "the rank" } else { "a peer" };
                        if let Some(poisoned) = &seen.poisoned {
                            *errors.entry(format!("{who}: {poisoned}")).or_default() += 1;
                        }
                    }
                }
                println!("{}, m={m}, {how:?}: {}", title(&planned), outcomes.join(", "));
            }
        }
    }
    println!("\nWhat heaps say afterwards:");
    errors.iter().for_each(|(error, count)| println!("  {count} times {error}"));
    println!("\nWhat is wrong:");
    wrong.iter().for_each(|(row, variants)| println!("  {row}: {}", variants.join(", ")));
    println!("\nIn all:");
    counts.iter().for_each(|(verdict, count)| println!("  {count} {verdict}"));
    ensure!(wrong.is_empty(), "half-issued calls: {wrong:#?}");
    ensure!(counts.len() == 3, "not all of retry, poison and success were seen: {counts:?}");
    Ok(())
}

/// Issues the call of `attempt` on all ranks; returns the outcome on each rank, or `None` if the
/// case is refused.
fn attempt(
    planned: &Planned,
    machine: &Machine,
    size: usize,
    attempt: Attempt,
) -> Result<Option<Vec<Seen>>> {
    // Barriers of the standard library, because the world may refuse collectives after an error.
    let (called, checked) = (Barrier::new(size), Barrier::new(size));
    let of_rank = |world: World| -> Result<Option<Seen>> {
        let standin = Standin::get(machine.backend());
        let rank = world.rank();
        standin.rank(rank);
        let heap = heap(&world, machine, planned)?;
        let Ok(calls) = Calls::new(planned, &heap) else { return Ok(None) };
        let (way, m) = (&calls.planned().calls[0], attempt.m);
        let mut seen = Seen::default();
        if !calls.takes_part() {
            called.wait();
            checked.wait();
            return Ok(Some(seen));
        }
        let streams = [heap.stream()?, heap.stream()?];
        let captured = Captured::new(&heap, machine)?;
        let run = |stream: usize, log: &mut String| {
            let mut outcome = Ok(());
            if attempt.how == How::Captured {
                // The capture's result is ignored: the failure may have broken the capture, and it
                // is discarded anyway.
                let _ = captured.capture(|stream| outcome = calls.run(way, m, stream));
                *log = captures(&standin.take());
            } else {
                outcome = calls.run(way, m, &streams[stream]);
                *log = standin.take();
            }
            outcome.err().map(|error| in_line(&error))
        };
        standin.take();
        // Calls before the attempt, on each stream that it uses: an operator creates objects in its
        // first call that later calls reuse.
        let others = usize::from(attempt.how == How::OtherStream);
        for stream in [others, 0, others] {
            run(stream, &mut seen.log);
        }
        if rank == FAILING {
            standin.fail("", attempt.number);
        }
        seen.error = run(0, &mut seen.log);
        let failed = standin.failed().is_some();
        assert_eq!(failed, rank == FAILING && attempt.number > 0, "{}", seen.log);
        standin.fail("", 0);
        called.wait();
        seen.poisoned = heap.check().err().map(|error| error.to_string());
        standin.take();
        checked.wait();
        seen.again_error = run(0, &mut seen.again);
        Ok(Some(seen))
    };
    let seen = World::run_threads(size, of_rank)?;
    Ok(seen.into_iter().collect())
}

/// Short name of the operation that a log line describes.
fn step(line: &str) -> String {
    let words: Vec<&str> = line.split(' ').collect();
    if line.contains("Launch") { words[2].to_owned() } else { words[0].to_owned() }
}

/// Kernels that write no memory that peers can see, and no word of a protocol.
const PRIVATE: [&str; 4] = ["iris_local", "iris_gemm", "iris_norm", "iris_sums"];

/// Whether peers can see the effect of the operation in the log line `line`.
fn is_visible(line: &str) -> bool {
    let words: Vec<&str> = line.split(' ').collect();
    let of_own =
        |place: &str| place.starts_with(&format!("{FAILING}.")) || place.starts_with("scratch");
    match words[0] {
        copy if copy.contains("Memcpy") => words.get(2).is_some_and(|to| !of_own(to)),
        launch if launch.contains("Launch") => !PRIVATE.contains(&words[2]),
        _ => false,
    }
}

/// Judges a failed call by the logs and errors of all ranks, `seen`; `clean` is the log of an
/// undisturbed call.
fn verdict(seen: &[Seen], clean: &str, how: How) -> Verdict {
    let own = &seen[FAILING];
    let poisoned = seen.iter().filter(|rank| rank.poisoned.is_some()).count();
    let mut before = own.log.lines().take_while(|line| !line.contains("FAILED"));
    let (captured, visible) = (how == How::Captured, before.any(is_visible));
    let alike = match how {
        // Only the kernels of the logs are compared, because the events that order calls depend on
        // the previous call.
        How::OtherStream => kernels(&own.again) == kernels(clean),
        _ => own.again == clean,
    };
    match poisoned {
        _ if own.error.is_none() && kernels(&own.log) == kernels(clean) => Verdict::Enqueued,
        _ if own.error.is_none() => Verdict::Unsaid,
        0 if visible && !captured => Verdict::Kept,
        0 if own.again_error.is_none() && alike => Verdict::Again,
        0 => Verdict::Otherwise,
        _ if captured => Verdict::PoisonedByCapture,
        all if all < seen.len() => Verdict::PoisonedInPart,
        _ if visible => Verdict::Poisoned,
        _ => Verdict::PoisonedUnseen,
    }
}

fn kernels(log: &str) -> Vec<&str> {
    log.lines()
        .filter(|line| line.contains("Launch"))
        .map(|line| line.split_once(" iris_").map_or(line, |it| it.1))
        .collect()
}
