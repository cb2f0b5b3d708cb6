//! `iris stress`: thousands of calls on GPUs with random delays, compared on the device. Then each
//! wait of the protocols is left out in turn, while workgroups are stalled: wrong results must show
//! within a few calls, and with the wait the same stalls must cause no error. The kernels are
//! special builds, so the vendor's compiler is needed.

use anyhow::{Context, Result};
use iris_heap::{BackendKind, MAX_RANKS, World};
use iris_kernels::build::OmittedWait;
use iris_ops::FaultInjection;
use iris_sync::REFRESH_PERIOD;
use iris_testkit::stress::{
    HELD_CALLS, HOLD_NS, MORE_WAITS, Outcome, Setting, Subject, WAITS, run,
};
use iris_testkit::{harness, say};

use crate::errors::usage;
use crate::job::Place;
use crate::progress::Progress;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Backend of the GPUs: cuda or hip.
    #[arg(long, default_value = "cuda")]
    backend: BackendKind,
    /// Number of ranks, as threads of one process that are assigned to the GPUs round-robin
    /// [default: one per GPU, at least 2].
    #[arg(long)]
    ranks: Option<usize>,
    /// Number of calls of each op and variant; a twentieth for those with large matrices.
    #[arg(long, default_value_t = 10_000)]
    calls: usize,
    /// Longest random delay before each access of the protocols, in nanoseconds.
    #[arg(long, value_name = "NS", default_value_t = 20_000)]
    delay: u32,
    /// Run only subjects whose names contain this text; waits are left out only with --waits.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Run only the tests that leave out each wait.
    #[arg(long)]
    waits: bool,
    /// Run two calls each with matrices and messages above 2 GiB instead, without delays.
    #[arg(long, conflicts_with = "waits")]
    large: bool,
}

/// Runs all tests; returns whether results were right with all waits, and wrong without any one of
/// them.
pub(crate) fn main(options: &Options) -> Result<bool> {
    Place::new(options.ranks.unwrap_or(2), true)?;
    let backend = options.backend;
    if backend.traits().host_threads {
        return Err(usage("--backend", backend, "a GPU backend: cuda or hip"));
    }
    if let Some(ranks) = options.ranks.filter(|&ranks| ranks < 2) {
        return Err(usage("--ranks", ranks, "at least 2, so that ranks wait for each other"));
    }
    if options.calls == 0 || options.calls > 1 << 24 {
        return Err(usage("--calls", options.calls, "1 to 16777216"));
    }
    let asked = |subject: &Subject| {
        options.only.as_ref().is_none_or(|text| subject.to_string().contains(text.as_str()))
    };
    let subjects: Vec<_> = Subject::all()
        .into_iter()
        .filter(|subject| !options.waits && asked(subject))
        .filter(|subject| !options.large || subject.moves_matrices())
        .collect();
    let more = MORE_WAITS.map(|(access, whole, subject, place)| (access, subject, place, whole));
    let waits = WAITS.into_iter().map(|(access, subject, place)| (access, subject, place, None));
    let left_out = options.waits || options.only.is_none() && !options.large;
    let waits = waits.chain(more).filter(|(_, subject, ..)| left_out && asked(subject));
    let waits: Vec<_> = waits.collect();
    if subjects.is_empty() && waits.is_empty() {
        let only = options.only.as_deref().unwrap_or_default();
        return Err(usage("--only", only, "a part of a name such as `all_reduce two_shot`"));
    }
    let types = if options.large { 1 } else { 2 };
    let count = types * subjects.len() + waits.len();
    if let Some(reason) = harness::missing_gpus(backend, 1)? {
        say!("{count} runs skipped: {reason}\n0 passed, 0 failed, {count} skipped")?;
        return Ok(true);
    }
    let ranks = match options.ranks {
        Some(ranks) => ranks,
        None => backend.device_count()?.clamp(2, MAX_RANKS),
    };
    let sharing = ranks.div_ceil(backend.device_count()?.max(1));
    let (mut failed, mut skipped) = (0, 0);
    let progress = Progress::new("runs", 0, count);
    let tell = |line: std::fmt::Arguments<'_>| progress.suspended(|| say!("{line}"));
    for &subject in &subjects {
        // First call numbers, chosen so that the calls pass the largest i32 and some calls refresh
        // all words.
        let [first, second] = subject.types();
        let calls = subject.calls(options.calls);
        let half = calls as i32 / 2;
        let ends = [(first, i32::MAX - half), (second, REFRESH_PERIOD - half)];
        let ends = if options.large { &ends[1..] } else { &ends[..] };
        if let Some(reason) = subject.missing(backend, ranks)? {
            skipped += ends.len();
            ends.iter().for_each(|_| progress.step());
            tell(format_args!("{subject:40} skipped: {reason}"))?;
            continue;
        }
        for &(dtype, first_call) in ends {
            let fault_injection =
                FaultInjection { delay_ns: options.delay, ..FaultInjection::default() };
            let setting = match options.large {
                true => Setting::large(dtype),
                false => {
                    let setting =
                        Setting::of(subject, ranks, sharing, dtype, calls, fault_injection);
                    setting.first_call(first_call)
                }
            };
            let outcome = worst(ranks, subject, &setting.on(backend))?;
            failed += usize::from(!outcome.ok());
            let (calls, compared) = (outcome.calls, outcome.compared);
            let seconds = outcome.time.as_secs_f64();
            progress.step();
            tell(format_args!(
                "{subject:40} {dtype:>4} from {:>10}: {calls} calls, {compared} compared, \
                 {seconds:.1} s: {}",
                setting.first_call,
                if outcome.ok() { "ok".into() } else { format!("FAILED: {}", words(&outcome)) },
            ))?;
        }
    }
    for (access, subject, place, whole) in waits {
        if let Some(reason) = subject.missing(backend, ranks)? {
            skipped += 1;
            progress.step();
            tell(format_args!("{subject:40} without {} skipped: {reason}", access.name()))?;
            continue;
        }
        let [dtype, _] = subject.types();
        let hold = Some((place, HOLD_NS));
        let held = |without, calls| {
            let fault_injection = FaultInjection { delay_ns: 0, without, hold, whole };
            let setting = Setting::of(subject, ranks, sharing, dtype, calls, fault_injection);
            worst(ranks, subject, &setting.on(backend))
        };
        let waiting = held(None, HELD_CALLS / 4)?;
        let without = held(Some(access), HELD_CALLS)?;
        // A missing wait counts as found only by a wrong result of a call that succeeded, because a
        // fault may have another cause.
        let found = without.wrong > 0;
        failed += usize::from(!waiting.ok() || !found);
        progress.step();
        tell(format_args!(
            "{subject:40} held {place:?}: {}; without {}{}: {}",
            match waiting.ok() {
                true => format!("{} calls ok", waiting.calls),
                false => format!("FAILED WITH ALL WAITS: {}", words(&waiting)),
            },
            access.name(),
            match whole {
                Some(OmittedWait::Products) => " of the product",
                Some(OmittedWait::Others) => " of the gates",
                None => "",
            },
            match found {
                true => format!("found: {}", words(&without)),
                false => format!("NOT FOUND in {} calls: {}", without.calls, words(&without)),
            },
        ))?;
    }
    drop(progress);
    let left_out = if skipped > 0 { format!(", {skipped} skipped") } else { String::new() };
    say!("{} passed, {failed} failed{left_out}", count - failed - skipped)?;
    Ok(failed == 0)
}

/// Runs a subject on all ranks and returns the outcome of the worst rank: one with wrong elements
/// if there is any, else one with a fault.
fn worst(ranks: usize, subject: Subject, setting: &Setting) -> Result<Outcome> {
    let outcomes = World::run_threads(ranks, |world| run(&world, subject, setting))
        .with_context(|| format!("{subject} in {}", setting.dtype))?;
    let wrong = outcomes.iter().position(|outcome| outcome.wrong > 0);
    let at = wrong.or_else(|| outcomes.iter().position(|outcome| !outcome.ok())).unwrap_or(0);
    outcomes.into_iter().nth(at).context("a world of no ranks")
}

/// Describes an outcome in words: number of wrong elements, the first of them, and the fault.
fn words(outcome: &Outcome) -> String {
    let mut words = match &outcome.first {
        Some(first) => format!(
            "{} of {} wrong; first call {}, ({}, {}): {}, not {}",
            outcome.wrong,
            outcome.compared,
            first.call,
            first.row,
            first.col,
            first.seen,
            first.wanted
        ),
        None if outcome.fault.is_some() => String::new(),
        None => format!("nothing among {}", outcome.compared),
    };
    if let Some(fault) = &outcome.fault {
        words.push_str(if words.is_empty() { "" } else { "; " });
        words.push_str(fault);
    }
    words
}
