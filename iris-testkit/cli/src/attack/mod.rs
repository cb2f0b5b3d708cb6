//! `iris attack`: kills ranks at every stage of a program and sends rank 0 frames that no rank would,
//! and counts what must not come of it: a hang, a signal, a wrong result, a wrong rank blamed.
//!
//! A job of ranks is [`rank`], a short program that meets, plans, calls and closes. One of its ranks
//! attacks. The others must end by themselves, long before any deadline, with an error that names
//! that rank; and the launcher must name it, too.

mod end;
mod frames;
pub(crate) mod rank;

use std::fmt;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use iris_testkit::launch::{End, Options as Launch, Outcome, launch};
use iris_testkit::{note, say};
use serde::{Deserialize, Serialize};

use crate::errors::usage;
use end::Blow;
use rank::{BLAMES, Part, Plant, Stage, TIMES, WRONG};

#[derive(clap::Args, Clone)]
pub(crate) struct Options {
    /// Ranks killed at each stage, and stopped and forked in calls, for each user.
    #[arg(long, default_value_t = 20)]
    kills: usize,
    /// Frames sent to rank 0, for each user, half of them by strangers and half by a rank.
    #[arg(long, default_value_t = 200)]
    frames: usize,
    /// Ranks of a world: from 2 on.
    #[arg(long, default_value_t = 4)]
    ranks: usize,
    /// Where the random numbers begin [default: the time].
    #[arg(long)]
    seed: Option<u64>,
    /// Seconds that the other ranks have after an attack.
    #[arg(long, default_value_t = 15)]
    grace: u64,
    /// The table as JSON, on stdout.
    #[arg(long)]
    json: bool,
    /// Attacks as this user only. Otherwise root does it twice more as an ordinary user, who has at
    /// most 256 and then 1024 open files.
    #[arg(long)]
    one_user: bool,
    /// A fault that the other ranks have, which must be found: hang, signal, result or blame.
    #[arg(long, hide = true)]
    plant: Option<Plant>,
}

/// The user that root becomes: nobody.
const ORDINARY: u32 = 65534;

/// What came of the attacks of one kind.
#[derive(Clone, Default, PartialEq, Debug, Serialize, Deserialize)]
struct Row {
    attack: String,
    user: String,
    attacks: usize,
    hang: usize,
    signal: usize,
    wrong_result: usize,
    wrong_rank_blamed: usize,
}

#[derive(Serialize, Deserialize)]
struct Report {
    seed: u64,
    ranks: usize,
    rows: Vec<Row>,
}

impl Row {
    fn faults(&self) -> usize {
        self.hang + self.signal + self.wrong_result + self.wrong_rank_blamed
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_preset(comfy_table::presets::NOTHING);
        let head = ["attack", "user", "attacks", "hang", "signal", "wrong result"];
        table.set_header(head.into_iter().chain(["wrong rank blamed"]));
        for row in &self.rows {
            let counts =
                [row.attacks, row.hang, row.signal, row.wrong_result, row.wrong_rank_blamed];
            let counts = counts.map(|count| count.to_string());
            table.add_row([row.attack.clone(), row.user.clone()].into_iter().chain(counts));
        }
        write!(f, "{table}\nworlds of {} processes, seed {}", self.ranks, self.seed)
    }
}

/// Attacks, and says what came of it. True: nothing that must not.
pub(crate) fn main(options: &Options) -> Result<bool> {
    if !(2..=iris_heap::MAX_RANKS).contains(&options.ranks) {
        return Err(usage("--ranks", options.ranks, format!("2 to {}", iris_heap::MAX_RANKS)));
    }
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    let seed = options.seed.unwrap_or(now.as_nanos() as u64 >> 10);
    let program = std::env::current_exe().context("where this program lies is not known")?;
    let root = rustix::process::geteuid().is_root();
    let user = if root { "root" } else { "ordinary" };
    note!("seed {seed}");
    let mut rows = attack(&program, options, user, seed)?;
    if root && !options.one_user {
        for files in [256, 1024] {
            rows.extend(as_ordinary_user(&program, options, files, seed ^ files)?);
        }
    }
    let report = Report { seed, ranks: options.ranks, rows };
    if options.json {
        say!("{}", serde_json::to_string(&report)?)?;
    } else {
        say!("{report}")?;
    }
    Ok(report.rows.iter().all(|row| row.faults() == 0))
}

/// Attacks again, in a process of an ordinary user who has at most so many open files.
fn as_ordinary_user(program: &Path, options: &Options, files: u64, seed: u64) -> Result<Vec<Row>> {
    // Where this program lies may be closed to others.
    let folder = tempfile::tempdir().context("no temporary folder")?;
    let copy = folder.path().join("iris");
    std::fs::copy(program, &copy).context("this program could not be copied")?;
    std::os::unix::fs::chown(folder.path(), Some(ORDINARY), Some(ORDINARY))?;
    let mut command = Command::new("/bin/sh");
    command
        .args(["-c", &format!("ulimit -n {files} && exec \"$0\" \"$@\"")])
        .arg(&copy)
        .args(["attack", "--one-user", "--json"])
        .args(["--kills", &options.kills.to_string(), "--frames", &options.frames.to_string()])
        .args(["--ranks", &options.ranks.to_string(), "--seed", &seed.to_string()])
        .args(["--grace", &options.grace.to_string()])
        .args(options.plant.iter().flat_map(|plant| ["--plant".into(), plant.to_string()]))
        .current_dir("/")
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    let output = command.uid(ORDINARY).gid(ORDINARY).output().context("/bin/sh did not start")?;
    let report: Report = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("the ordinary user's attacks ended with {}", output.status))?;
    let named = |row: Row| Row { user: format!("{}, {files} files", row.user), ..row };
    Ok(report.rows.into_iter().map(named).collect())
}

/// Attacks of every kind as the user of this process.
fn attack(program: &Path, options: &Options, user: &str, seed: u64) -> Result<Vec<Row>> {
    let mut random = Random(seed);
    let ranks = options.ranks;
    // How long each stage takes where nobody attacks: kills are spread over it.
    let calm = run(program, options, &Part { victim: ranks, ..Part::default() })?;
    ensure!(calm.ok(), "without an attack the ranks fail:\n{}", calm.report());
    let times: Vec<u64> = line(&calm.ranks[0].stdout, TIMES)
        .map(|text| text.split(' ').filter_map(|n| n.parse().ok()).collect())
        .unwrap_or_default();
    ensure!(times.len() == Stage::ALL.len(), "rank 0 said no times:\n{}", calm.ranks[0].stdout);
    let mut rows = Vec::new();
    let kills = Stage::ALL.into_iter().zip(times).map(|(stage, time)| (Blow::Kill, stage, time));
    let kills: Vec<_> = kills.collect();
    let calls = kills.iter().filter(|(_, stage, _)| *stage == Stage::Calls);
    let others = calls
        .flat_map(|&(_, stage, time)| [Blow::Fork, Blow::Stop].map(|blow| (blow, stage, time)));
    for (blow, stage, time) in kills.iter().copied().chain(others) {
        let mut row = Row::new(format!("{blow}, {stage}"), user);
        for _ in 0..options.kills {
            let part = Part {
                victim: random.below(ranks as u64) as usize,
                blow,
                kill: Some(stage),
                delay_us: random.below(time * 5 / 4 + 1),
                seed: random.next(),
                plant: options.plant,
                ..Part::default()
            };
            row.judge(&run(program, options, &part)?, &part);
        }
        rows.push(row);
    }
    // So many frames in a job.
    const AT_ONCE: usize = 50;
    for hostile in [false, true] {
        let who = if hostile { "frames of a rank" } else { "frames of strangers" };
        let mut row = Row::new(who.into(), user);
        let mut rest = options.frames / 2;
        while rest > 0 {
            let frames = rest.min(AT_ONCE);
            rest -= frames;
            // Rank 0 has the socket.
            let victim = 1 + random.below(ranks as u64 - 1) as usize;
            let plant = options.plant;
            let part =
                Part { victim, frames, hostile, seed: random.next(), plant, ..Part::default() };
            row.judge(&run(program, options, &part)?, &part);
        }
        rows.push(row);
    }
    Ok(rows)
}

fn run(program: &Path, options: &Options, part: &Part) -> Result<Outcome> {
    let text = serde_json::to_string(part)?;
    let grace = Duration::from_secs(options.grace);
    // Deadlines are longer than the grace: to notice an end by one is as bad as a hang.
    let factor = (options.grace as f64 / 10.0).to_string();
    let launched = Launch::default()
        .grace(grace)
        .deadline(grace + Duration::from_secs(60))
        .env("IRIS_DEADLINE", factor)
        .stdout(io::sink());
    launch(program, &["rank", rank::NAME, &text], options.ranks, launched)
}

/// What stands behind a word at the beginning of a line.
fn line<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(word))
}

impl Row {
    fn new(attack: String, user: &str) -> Row {
        Row { attack, user: user.into(), ..Row::default() }
    }

    /// Counts what one attack led to: each of the four at most once.
    fn judge(&mut self, outcome: &Outcome, part: &Part) {
        self.attacks += if part.frames > 0 { part.frames } else { 1 };
        let before = self.clone();
        let others = || outcome.ranks.iter().enumerate().filter(|(rank, _)| *rank != part.victim);
        let any = |holds: &dyn Fn(End) -> bool| others().any(|(_, it)| holds(it.end));
        self.hang += usize::from(any(&|end| matches!(end, End::Stopped | End::Late)));
        self.signal += usize::from(any(&|end| matches!(end, End::Signalled(_))));
        let wrong = |text: &str| line(text, WRONG).is_some();
        self.wrong_result += usize::from(outcome.ranks.iter().any(|it| wrong(&it.stdout)));
        let blamed = |text: &str| {
            line(text, BLAMES).map(|it| it.split(':').next() == Some(&part.victim.to_string()))
        };
        let innocent = match (part.kill, part.hostile) {
            // A stop loses nobody, so the job must end well.
            (Some(_), _) if part.blow == Blow::Stop => !outcome.ok() && *self == before,
            (Some(stage), _) => {
                let wrong = others().any(|(_, it)| match (it.end, blamed(&it.stdout)) {
                    // Nothing was left to do for it that needs the others.
                    (End::Exited(0), _) => stage != Stage::Closing,
                    (End::Exited(_), blamed) => blamed != Some(true),
                    // Counted above.
                    _ => false,
                });
                wrong || (outcome.first_failure(), outcome.exit_code()) != (Some(part.victim), 137)
            }
            // Strangers disturb nobody. What a rank says that lies is believed.
            (None, false) => !outcome.ok() && *self == before,
            (None, true) => false,
        };
        self.wrong_rank_blamed += usize::from(innocent);
        if self.faults() > before.faults() {
            note!("{} as {}: {part:?}\n{}", self.attack, self.user, outcome.report());
        }
    }
}

/// Numbers that look random, from a seed that is printed: splitmix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// One below `end`, which is not 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}
