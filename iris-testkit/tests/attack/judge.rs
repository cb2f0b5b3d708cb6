//! Judgement of an attacked job: bad results of each sort are counted, in rows of a table.

use std::fmt::Write as _;

use iris_testkit::launch::{End, Outcome, RankOutcome};
use serde::{Deserialize, Serialize};

use super::blow::Blow;
use super::case::Case;
use super::line;
use super::rank::{BLAMES, ERROR, WRONG};

/// Number of attacks of one kind, and number of their bad results of each sort.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) blow: String,
    pub(super) stage: String,
    pub(super) user: String,
    pub(super) attacks: usize,
    pub(super) hang: usize,
    pub(super) signal: usize,
    pub(super) wrong_result: usize,
    /// Ranks that blamed another rank than the victim.
    pub(super) wrong_name: usize,
    /// Ranks that blamed no rank, or did not name the call that was refused to them.
    pub(super) missing_name: usize,
    /// Ranks that named the call that was refused to them, but not their own number.
    pub(super) missing_own: usize,
}

/// Names of a row's numbers in the table.
const HEADS: [&str; 7] = [
    "attacks",
    "hangs",
    "signals",
    "wrong results",
    "wrong names",
    "missing names",
    "own rank missing",
];

impl Row {
    /// Number of attacks, then the numbers of bad results, in the order of [`HEADS`].
    fn numbers(&self) -> [usize; 7] {
        [
            self.attacks,
            self.hang,
            self.signal,
            self.wrong_result,
            self.wrong_name,
            self.missing_name,
            self.missing_own,
        ]
    }

    pub(super) fn faults(&self) -> usize {
        self.numbers()[1..].iter().sum()
    }

    fn add(&mut self, other: &Row) {
        self.attacks += other.attacks;
        self.hang += other.hang;
        self.signal += other.signal;
        self.wrong_result += other.wrong_result;
        self.wrong_name += other.wrong_name;
        self.missing_name += other.missing_name;
        self.missing_own += other.missing_own;
    }
}

/// Adds `row` to the row of its kind, or appends it.
pub(super) fn collect(rows: &mut Vec<Row>, row: Row) {
    let alike =
        |it: &&mut Row| (&it.user, &it.blow, &it.stage) == (&row.user, &row.blow, &row.stage);
    match rows.iter_mut().find(alike) {
        Some(found) => found.add(&row),
        None => rows.push(row),
    }
}

/// Table of the rows as text, with a sum.
pub(super) fn table(rows: &[Row]) -> String {
    let mut sum = Row { blow: "all".into(), ..Row::default() };
    rows.iter().for_each(|row| sum.add(row));
    let mut text = format!("{:<14} {:<20} {:<20} {}", "blow", "stage", "user", HEADS.join(" "));
    for row in rows.iter().chain([&sum]) {
        let _ = write!(text, "\n{:<14} {:<20} {:<20}", row.blow, row.stage, row.user);
        for (head, number) in HEADS.iter().zip(row.numbers()) {
            let _ = write!(text, " {number:>width$}", width = head.len());
        }
    }
    text + "\n"
}

/// Numbers of the ranks that `text` names, such as 1, 2 and 5 in `ranks 1, 2 and 5`.
pub(super) fn named(text: &str) -> Vec<usize> {
    let mut found = Vec::new();
    for part in text.split("rank").skip(1) {
        let mut rest = part.strip_prefix('s').unwrap_or(part);
        let mut before = " ";
        while let Some(number) = rest.strip_prefix(before) {
            let end = number.find(|c: char| !c.is_ascii_digit()).unwrap_or(number.len());
            let Ok(rank) = number[..end].parse() else { break };
            found.push(rank);
            rest = &number[end..];
            before = if rest.starts_with(", ") { ", " } else { " and " };
        }
    }
    found
}

/// Error that the rank's program printed at its end; empty if there is none.
fn error(it: &RankOutcome) -> &str {
    it.stderr.rfind(ERROR).map_or("", |at| &it.stderr[at + ERROR.len()..])
}

/// Naming of the cause by an error.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Naming {
    Right,
    /// The error names another rank.
    Wrong,
    /// The error names no rank, or not the call that was refused.
    Missing,
    /// The error names the call that was refused, and not the rank.
    MissingOwn,
}

/// Naming of the cause by the error of `rank`, whose program failed; `all` are the ends of all ranks.
fn naming(case: &Case, rank: usize, all: &[RankOutcome]) -> Naming {
    let it = &all[rank];
    let error = error(it);
    let ranks = named(error);
    let blamed = line(&it.stdout, BLAMES).and_then(|text| text.parse().ok());
    let other = if blamed.is_none() && ranks.is_empty() { Naming::Missing } else { Naming::Wrong };
    let victim = blamed == Some(case.victim) || ranks.contains(&case.victim);
    match &case.blow {
        // Frames from a connection that said hello as a rank are believed, so the job may fail.
        Blow::Frames(_) => Naming::Right,
        blow if blow.loses_the_rank() && victim => Naming::Right,
        blow if blow.loses_the_rank() => other,
        // A variable may make this rank another one's double, or lead it to another meeting place.
        Blow::Set(odd) if error.contains(&odd.variable) => Naming::Right,
        Blow::Set(_) if rank == case.victim => {
            if ranks.is_empty() {
                Naming::Missing
            } else {
                Naming::Right
            }
        }
        Blow::Set(_) if victim || ranks.contains(&1) => Naming::Right,
        // The error refers to that of another rank, which names the variable.
        Blow::Set(odd)
            if ranks
                .iter()
                .filter_map(|&at| all.get(at))
                .any(|it| self::error(it).contains(&odd.variable)) =>
        {
            Naming::Right
        }
        Blow::Set(_) => other,
        // A panic in the standard library, on a thread that runs enqueued work or carries messages.
        Blow::Refuse(refusal)
            if rank == case.victim
                && refusal.ends_the_process()
                && it.stderr.contains("panicked") =>
        {
            Naming::Right
        }
        Blow::Refuse(refusal) if rank == case.victim => {
            match (refusal.is_told_by(error), ranks.contains(&rank)) {
                (true, true) => Naming::Right,
                (true, false) => Naming::MissingOwn,
                (false, _) => Naming::Missing,
            }
        }
        Blow::Refuse(_) if victim => Naming::Right,
        Blow::Refuse(_) => other,
        // No rank is lost, so none should fail.
        _ => Naming::Wrong,
    }
}

/// Ends of the victim that the blow explains.
fn is_planned(case: &Case, end: End) -> bool {
    match (&case.blow, end) {
        (Blow::Kill | Blow::ForkAndKill, end) => end == End::Signalled(9),
        (Blow::Stop, End::Stopped) => true,
        // The launcher does not end a rank that stands still if all others ended well.
        (Blow::Stop, End::Late) => case.may_succeed(),
        (Blow::Exit(code), end) => end == End::Exited(i32::from(*code)),
        (Blow::Panic, end) => end == End::Exited(101),
        (Blow::Error, end) => end == End::Exited(1),
        (Blow::Refuse(refusal), End::Signalled(6 | 11) | End::Exited(101)) => {
            refusal.ends_the_process()
        }
        (_, end) => matches!(end, End::Exited(0 | 1)),
    }
}

/// Bad results of the job that `case` attacked.
///
/// Each of the counts is at most one. A job with frames counts as so many attacks.
pub(super) fn judge(case: &Case, outcome: &Outcome, user: &str) -> Row {
    let (attacks, stage) = match &case.blow {
        Blow::Strangers(frames) | Blow::Frames(frames) => (*frames, case.stage.to_string()),
        Blow::Set(odd) => (1, odd.variable.clone()),
        Blow::Refuse(refusal) => (1, refusal.call.clone()),
        _ => (1, case.stage.to_string()),
    };
    let blow = match &case.blow {
        Blow::Exit(_) => case.blow.to_string(),
        blow => blow.kind().into(),
    };
    let mut row = Row { blow, stage, user: user.into(), attacks, ..Row::default() };
    let loses = case.blow.loses_the_rank();
    for (rank, it) in outcome.ranks.iter().enumerate() {
        row.wrong_result |= usize::from(line(&it.stdout, WRONG).is_some());
        let victim = rank == case.victim;
        match it.end {
            End::Exited(_) if victim && loses => {
                row.wrong_result |= usize::from(!is_planned(case, it.end));
            }
            end if victim && is_planned(case, end) && !matches!(end, End::Exited(1)) => {}
            End::Stopped | End::Late => row.hang = 1,
            End::Signalled(_) => row.signal = 1,
            End::Exited(0) if loses && !case.may_succeed() => row.missing_name = 1,
            End::Exited(0) => {}
            _ => match naming(case, rank, &outcome.ranks) {
                Naming::Right => {}
                Naming::Wrong => row.wrong_name = 1,
                Naming::Missing => row.missing_name = 1,
                Naming::MissingOwn => row.missing_own = 1,
            },
        }
    }
    if matches!(case.blow, Blow::Kill | Blow::ForkAndKill)
        && (outcome.first_failure(), outcome.exit_code()) != (Some(case.victim), 137)
    {
        row.wrong_name = 1;
    }
    row
}
