//! Test that kills ranks at every stage of a program and sends rank 0 invalid frames. Hangs,
//! signals, wrong results and wrongly blamed ranks are counted; none may occur.
//!
//! A job runs a short program ([`rank`]) that meets, plans, calls and closes. One of its ranks
//! attacks. The other ranks must end by themselves, long before any deadline, with an error that
//! names the attacker; the launcher must name the attacker, too. If root runs the test, the attacks
//! are repeated twice as an ordinary user, with at most 256 and then 1024 open files.

mod end;
mod frames;
mod rank;
#[path = "../common/ready.rs"]
#[allow(dead_code, unreachable_pub, reason = "other tests need the rest")]
mod ready;

use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use iris_testkit::Level;
use iris_testkit::harness::{self, Group, named};
use iris_testkit::launch::{End, Options as Launch, Outcome, end_with_launcher, launch};
use serde::{Deserialize, Serialize};

use end::Blow;
use rank::{BLAMES, Part, Plant, Stage, TIMES, WRONG};

/// Attacks to make on jobs of `ranks` ranks each.
#[derive(Clone, Serialize, Deserialize)]
struct Attack {
    /// Number of kills per stage, each in a job of its own. Also the number of jobs in which a rank
    /// is stopped during calls, and the number in which a rank forks during calls.
    kills: usize,
    /// Number of frames to send to rank 0: half as a stranger, half as a rank.
    frames: usize,
    ranks: usize,
    seed: u64,
    /// Seconds that the other ranks have to end after an attack.
    grace: u64,
    /// Wrong behaviour of the ranks that are not attacked, to test that it is counted; `None` for
    /// none.
    plant: Option<Plant>,
}

/// First argument of this program when it runs as an ordinary user; the second argument is an
/// [`Attack`] as JSON. The program then writes its rows to stdout as JSON.
const ORDINARY: &str = "ordinary";

/// User id of the ordinary user: nobody.
const NOBODY: u32 = 65534;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().collect();
    let done = match &arguments[1..] {
        [name, part] if name == rank::NAME => {
            end_with_launcher();
            rank::main(part)
        }
        [name, attack] if name == ORDINARY => ordinary(attack),
        _ => {
            let tests =
                named![attacked_ranks_end_and_blame_the_right_one, what_must_not_be_is_counted];
            return harness::run_together(vec![Group::new(None, tests)]);
        }
    };
    if let Err(error) = done {
        eprintln!("{error:#}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn attacked_ranks_end_and_blame_the_right_one() {
    // Numbers of kills and frames; the long form of the test (level full) takes several minutes.
    let full = Level::from_env() == Level::Full;
    let (kills, frames) = if full { (55, 2200) } else { (2, 40) };
    let attack = Attack { kills, frames, ranks: 4, seed: 7, grace: 15, plant: None };
    for row in attack.by_every_user().unwrap() {
        println!("{row:?}");
        assert_eq!(row.faults(), 0, "{row:?}");
        assert!(row.attacks > 0, "{row:?}");
    }
}

/// Tests that wrong behaviour of the other ranks ([`Plant`]) is counted, with each kind of attack.
fn what_must_not_be_is_counted() {
    type Count = fn(&Row) -> usize;
    let plants: [(Plant, Count); 4] = [
        (Plant::Hang, |row| row.hang),
        (Plant::Signal, |row| row.signal),
        (Plant::Result, |row| row.wrong_result),
        (Plant::Blame, |row| row.wrong_rank_blamed),
    ];
    for (plant, count) in plants {
        let attack =
            Attack { kills: 1, frames: 0, ranks: 4, seed: 7, grace: 2, plant: Some(plant) };
        let rows = attack.by_this_user("user").unwrap();
        assert_eq!(rows.iter().filter(|row| count(row) == 1).count(), 6, "{plant:?}: {rows:#?}");
    }
}

/// Makes the attacks `attack` (JSON) in this process, which root has started as an ordinary user,
/// and prints the rows as JSON.
fn ordinary(attack: &str) -> Result<()> {
    let attack: Attack = serde_json::from_str(attack)?;
    println!("{}", serde_json::to_string(&attack.by_this_user("ordinary")?)?);
    Ok(())
}

/// Number of attacks of one kind, and number of their bad results of each sort.
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

impl Row {
    fn faults(&self) -> usize {
        self.hang + self.signal + self.wrong_result + self.wrong_rank_blamed
    }
}

impl Attack {
    fn by_every_user(&self) -> Result<Vec<Row>> {
        let root = rustix::process::geteuid().is_root();
        let mut rows = self.by_this_user(if root { "root" } else { "ordinary" })?;
        for files in [256, 1024].into_iter().filter(|_| root) {
            rows.extend(self.by_an_ordinary_user(files)?);
        }
        Ok(rows)
    }

    /// Starts a process that makes the attacks as an ordinary user, with at most `files` open
    /// files; returns the rows of that process.
    fn by_an_ordinary_user(&self, files: u64) -> Result<Vec<Row>> {
        // A copy of this program is started, because the ordinary user may not be able to read the
        // folder of the original.
        let folder = tempfile::tempdir().context("no temporary folder")?;
        let copy = folder.path().join("attack");
        let program = std::fs::read(std::env::current_exe()?).context("this program")?;
        harness::write_program(&copy, &program).context("the copy of this program")?;
        std::os::unix::fs::chown(folder.path(), Some(NOBODY), Some(NOBODY))?;
        let attack = Attack { seed: self.seed ^ files, ..self.clone() };
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", &format!("ulimit -n {files} && exec \"$0\" \"$@\"")])
            .arg(&copy)
            .args([ORDINARY, &serde_json::to_string(&attack)?])
            .current_dir("/")
            .stdin(Stdio::null())
            .stderr(Stdio::inherit());
        // The ordinary user cannot read root's tuning file.
        command.env("IRIS_TUNING", "off");
        let output = command.uid(NOBODY).gid(NOBODY).output().context("/bin/sh did not start")?;
        let rows: Vec<Row> = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("the ordinary user's attacks ended with {}", output.status))?;
        let named = |row: Row| Row { user: format!("{}, {files} files", row.user), ..row };
        Ok(rows.into_iter().map(named).collect())
    }

    /// Makes attacks of every kind as the user of this process.
    fn by_this_user(&self, user: &str) -> Result<Vec<Row>> {
        let mut random = Random(self.seed);
        let program = std::env::current_exe().context("the path of this program")?;
        let ranks = self.ranks;
        // First a job without an attack runs, to measure how long each stage takes; kills are
        // spread over these times.
        let calm = self.run(&program, &Part { victim: ranks, ..Part::default() })?;
        ensure!(calm.ok(), "without an attack the ranks fail:\n{}", calm.report());
        let times: Vec<u64> = line(&calm.ranks[0].stdout, TIMES)
            .map(|text| text.split(' ').filter_map(|n| n.parse().ok()).collect())
            .unwrap_or_default();
        ensure!(
            times.len() == Stage::ALL.len(),
            "rank 0 has printed no times:\n{}",
            calm.ranks[0].stdout
        );
        let mut rows = Vec::new();
        let kills =
            Stage::ALL.into_iter().zip(times).map(|(stage, time)| (Blow::Kill, stage, time));
        let kills: Vec<_> = kills.collect();
        let calls = kills.iter().filter(|(_, stage, _)| *stage == Stage::Calls);
        let others = calls
            .flat_map(|&(_, stage, time)| [Blow::Fork, Blow::Stop].map(|blow| (blow, stage, time)));
        for (blow, stage, time) in kills.iter().copied().chain(others) {
            let mut row = Row::new(format!("{blow}, {stage}"), user);
            for _ in 0..self.kills {
                let part = Part {
                    victim: random.below(ranks as u64) as usize,
                    blow,
                    kill: Some(stage),
                    delay_us: random.below(time * 5 / 4 + 1),
                    seed: random.next(),
                    plant: self.plant,
                    ..Part::default()
                };
                row.judge(&self.run(&program, &part)?, &part);
            }
            rows.push(row);
        }
        // Number of frames that the attacker of one job sends.
        const AT_ONCE: usize = 50;
        for hostile in [false, true] {
            let who = if hostile { "frames of a rank" } else { "frames of strangers" };
            let mut row = Row::new(who.into(), user);
            let mut rest = self.frames / 2;
            while rest > 0 {
                let frames = rest.min(AT_ONCE);
                rest -= frames;
                // Attacker: any rank except rank 0, which owns the socket.
                let victim = 1 + random.below(ranks as u64 - 1) as usize;
                let plant = self.plant;
                let part =
                    Part { victim, frames, hostile, seed: random.next(), plant, ..Part::default() };
                row.judge(&self.run(&program, &part)?, &part);
            }
            rows.push(row);
        }
        Ok(rows)
    }

    fn run(&self, program: &Path, part: &Part) -> Result<Outcome> {
        let text = serde_json::to_string(part)?;
        let grace = Duration::from_secs(self.grace);
        // Deadlines are longer than the grace period. A rank that notices the attack only by a
        // deadline thus still runs when the grace period ends, and counts as a hang.
        let factor = (self.grace as f64 / 10.0).to_string();
        let launched = Launch::default()
            .grace(grace)
            .deadline(grace + Duration::from_secs(60))
            .env("IRIS_DEADLINE", factor)
            .stdout(io::sink());
        launch(program, &[rank::NAME, &text], self.ranks, launched)
    }
}

/// Text after `word` in the first line that begins with it.
fn line<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(word))
}

impl Row {
    fn new(attack: String, user: &str) -> Row {
        Row { attack, user: user.into(), ..Row::default() }
    }

    /// Counts the results of one attack; each of the four counts grows by at most one.
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
            // A stopped rank is not lost, so the job must succeed.
            (Some(_), _) if part.blow == Blow::Stop => !outcome.ok() && *self == before,
            (Some(stage), _) => {
                let wrong = others().any(|(_, it)| match (it.end, blamed(&it.stdout)) {
                    // A rank may exit with 0 if it had nothing left to exchange with the others.
                    (End::Exited(0), _) => stage != Stage::Closing,
                    (End::Exited(_), blamed) => blamed != Some(true),
                    // Hangs and ranks that a signal ended were counted above.
                    _ => false,
                });
                wrong || (outcome.first_failure(), outcome.exit_code()) != (Some(part.victim), 137)
            }
            // Strangers must not disturb the job. Frames from a connection that said hello as a
            // rank are believed, so the job may fail.
            (None, false) => !outcome.ok() && *self == before,
            (None, true) => false,
        };
        self.wrong_rank_blamed += usize::from(innocent);
        if self.faults() > before.faults() {
            eprintln!("{} as {}: {part:?}\n{}", self.attack, self.user, outcome.report());
        }
    }
}

/// Pseudorandom numbers from a seed that is printed: splitmix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Number below `end`, which must not be 0.
    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}
