//! Attack on jobs: ranks are struck at every stage of a program in many ways, and rank 0 gets invalid
//! frames. Hangs, signals, wrong results and wrong or missing names are counted; none may occur.
//!
//! A job runs a short program ([`rank`]) that meets, plans, calls and closes. One of its ranks is
//! struck ([`blow`]). The other ranks must end by themselves, long before any deadline, with an error
//! that names the victim ([`judge`]). If root makes the attack, it is repeated as an ordinary user
//! with few open files.
//!
//! Run as a test, this program makes a small fixed sample. `attack --seed S` makes all cases, and
//! `--case NAME` repeats one.

mod blow;
mod case;
mod environment;
mod frames;
mod judge;
mod rank;
#[path = "../common/ready.rs"]
#[allow(dead_code, unreachable_pub, reason = "other tests need the rest")]
mod ready;
mod refuse;

use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use iris_testkit::Level;
use iris_testkit::harness::{self, Group, named};
use iris_testkit::launch::{Options as Launch, Outcome, end_with_launcher, launch};
use rustix::io::Errno;
use rustix::process::geteuid;

use blow::Blow;
use case::{Case, Ranks};
use judge::Row;
use rank::{CALLS, Plant, ROUNDS, Stage, TIMES};
use refuse::Refusal;

/// First argument of this program when it makes the whole attack.
const ATTACK: &str = "attack";
/// User id of the ordinary user: nobody.
const NOBODY: u32 = 65534;
/// Time that the other ranks have to end after a blow.
const GRACE: Duration = Duration::from_secs(15);
/// Waits for work, for a step of a call and for a meeting in a world whose fault only a deadline can
/// find.
const SHORT: [Duration; 3] =
    [Duration::from_secs(3), Duration::from_secs(2), Duration::from_secs(4)];

/// Factor on deadlines for a job with so many ranks.
fn slower(ranks: Ranks) -> u32 {
    if ranks.number() > 8 { 4 } else { 1 }
}

/// Attack on jobs of many shapes; prints a table, and the name of each case with a fault.
#[derive(Parser, Clone)]
#[command(name = "cargo xtask attack")]
struct Attack {
    /// Seed from which all cases follow.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of cases per user; by default each combination once.
    #[arg(long)]
    cases: Option<usize>,
    /// Ranks of the jobs: a number, NODESxNUMBER for simulated nodes, or NUMBER-untold for ranks
    /// that their launcher tells of no ended rank.
    #[arg(long, value_delimiter = ',', default_value = "2,3,8,64,2x2,3-untold")]
    ranks: Vec<Ranks>,
    /// Only cases whose name contains one of these texts, such as `in-call,kill`.
    #[arg(long)]
    only: Vec<String>,
    /// Cases to make instead, by the names that a run has printed.
    #[arg(long = "case")]
    named: Vec<Case>,
    /// Number of ranks that run at once.
    #[arg(long, default_value_t = 16)]
    at_once: usize,
    /// Number of open files of the ordinary user.
    #[arg(long, default_value_t = 256)]
    files: u64,
    /// Name of the user in the table; set for the program that root starts as an ordinary user,
    /// which prints its rows as JSON.
    #[arg(long, hide = true)]
    user: Option<String>,
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().collect();
    let done = match &arguments[1..] {
        [name, arguments @ ..] if name == rank::NAME => {
            end_with_launcher();
            rank::main(arguments)
        }
        [name, ..] if name == ATTACK => Attack::parse_from(&arguments[1..]).main(),
        _ => {
            let tests = named![
                attacked_ranks_end_and_blame_the_right_one,
                refused_calls_are_told_with_call_and_rank,
                what_must_not_be_is_counted,
                blows_come_in_every_call,
                a_refused_call_is_told_with_call_and_rank,
                ranks_are_read_from_an_error,
                names_are_read_back,
            ];
            return harness::run_together(vec![Group::new(None, tests)]);
        }
    };
    if let Err(error) = done {
        eprintln!("{}{error:#}", rank::ERROR);
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// Four ranks, as in most of the jobs of the tests.
const FOUR: Ranks = Ranks::new(1, 4);

/// Blows of the tests, each with the stage in which it is struck.
fn sampled() -> impl Iterator<Item = (Blow, Stage)> {
    let others = [Blow::ForkAndKill, Blow::Pause].map(|blow| (blow, Stage::InCall));
    Stage::ALL.map(|stage| (Blow::Kill, stage)).into_iter().chain(others)
}

fn attacked_ranks_end_and_blame_the_right_one() {
    // Numbers of kills per stage and of frames; the long form of the test (level full) takes several
    // minutes.
    let full = Level::from_env() == Level::Full;
    let (kills, frames) = if full { (55, 2200) } else { (2, 40) };
    for (files, seed) in [(None, 7), (Some(256), 8), (Some(1024), 9)] {
        let mut random = Random(seed);
        let mut cases = Vec::new();
        for (blow, stage) in sampled() {
            for _ in 0..kills {
                let (victim, seed) = (random.below(4) as usize, random.below(1 << 32));
                let blow = blow.clone();
                let case = Case { ranks: FOUR, stage, blow, victim, seed, ..Case::default() };
                cases.push(case.delayed(&mut random));
            }
        }
        cases.extend(case::frames(FOUR, frames / 2, &mut random));
        let attack = Attack { named: cases, files: files.unwrap_or(0), ..Attack::parse_from([""]) };
        let rows = match files {
            None => attack.by_this_user().unwrap(),
            Some(_) if geteuid().is_root() => attack.by_an_ordinary_user().unwrap(),
            Some(_) => continue,
        };
        assert_eq!(rows.len(), Stage::ALL.len() + 4, "{}", judge::table(&rows));
        assert!(rows.iter().all(|row| row.faults() == 0), "{}", judge::table(&rows));
    }
}

/// Tests that a rank to which a system call is refused, of whatever sort, goes on or names the call and
/// itself, and that the other ranks name it, too. On two nodes only the calls by which a rank reaches
/// the other node are refused.
fn refused_calls_are_told_with_call_and_rank() {
    let reaching =
        ["getpeername", "mkdir", "recvmsg", "sendmsg"].map(|it| format!(",refuse={it}:"));
    for (ranks, only, calls) in
        [(Ranks::new(1, 2), vec![",refuse=".into()], 20), (Ranks::new(2, 2), reaching.into(), 4)]
    {
        let attack = Attack { ranks: vec![ranks], only, ..Attack::parse_from([""]) };
        let rows = attack.by_this_user().unwrap();
        assert!(rows.len() >= calls, "only {} calls were refused", rows.len());
        assert!(rows.iter().all(|row| row.faults() == 0), "{}", judge::table(&rows));
    }
}

/// Tests that wrong behaviour of the other ranks ([`Plant`]) is counted, in each stage.
fn what_must_not_be_is_counted() {
    type Count = fn(&Row) -> usize;
    let plants: [(Plant, Count); 5] = [
        (Plant::Hang, |row| row.hang),
        (Plant::Signal, |row| row.signal),
        (Plant::Result, |row| row.wrong_result),
        (Plant::Blame, |row| row.wrong_name),
        // If no rank is lost, as in a pause, there is no name to miss: each error is wrong.
        (Plant::Silent, |row| row.missing_name.max(row.wrong_name)),
    ];
    for (plant, count) in plants {
        let case = |(blow, stage)| {
            let plant = Some(plant);
            Case { ranks: FOUR, stage, blow, victim: 1, seed: 7, plant, ..Case::default() }
        };
        let named: Vec<_> = sampled().map(case).collect();
        // All jobs run at once, because a planted hang takes the whole time that it is given.
        let attack = Attack { at_once: 4 * named.len(), named, ..Attack::parse_from([""]) };
        let rows = attack.by_this_user().unwrap();
        assert!(rows.iter().all(|row| count(row) == 1), "{plant}:\n{}", judge::table(&rows));
        assert_eq!(rows.len(), Stage::ALL.len() + 2);
    }
}

/// Tests that each later call is struck both at its start and with a delay.
fn blows_come_in_every_call() {
    let mut cases = case::strikes(&[FOUR; 16], &mut Random(7));
    cases.retain(|case| case.stage == Stage::InCall);
    for is_delayed in [false, true] {
        let cases = cases.iter().filter(|case| (case.delay > 0) == is_delayed);
        let calls: BTreeSet<_> = cases.map(Case::call).collect();
        assert!(calls.iter().copied().eq(2..ROUNDS), "delayed: {is_delayed}, calls {calls:?}");
    }
}

/// Tests that a rank to which a call was refused must name the call, its error and the rank.
fn a_refused_call_is_told_with_call_and_rank() {
    let refusal = Refusal { call: "openat".into(), nth: 1, error: Errno::PERM };
    let case = Case { ranks: Ranks::new(1, 1), blow: Blow::Refuse(refusal), ..Case::default() };
    for (error, missing_name, missing_own) in [
        ("rank 0: openat: os error 1", 0, 0),
        ("openat: os error 1", 0, 1),
        ("rank 1: openat: os error 1", 0, 1),
        ("rank 0: openat: os error 24", 1, 0),
        ("rank 0: bind: os error 1", 1, 0),
    ] {
        let fail = format!("echo '{}{error}' >&2; exit 1", rank::ERROR);
        let options = Launch::default().stdout(io::sink());
        let outcome = launch(Path::new("/bin/sh"), &["-c", &fail], 1, options).unwrap();
        let row = judge::judge(&case, &outcome, "user");
        let counted = (row.missing_name, row.missing_own, row.faults());
        assert_eq!(counted, (missing_name, missing_own, missing_name + missing_own), "{error}");
    }
}

fn ranks_are_read_from_an_error() {
    let error = "ranks 1, 2 and 5 have not come: rank 7 on host a gave up after 30 s";
    assert_eq!(judge::named(error), [1, 2, 5, 7]);
    assert_eq!(judge::named("no rank is named on 3 hosts"), [0; 0]);
}

/// Tests that the name of a case is the case.
fn names_are_read_back() {
    let ranks = ["2", "64", "2x4", "3-untold"].map(|text| text.parse::<Ranks>().unwrap());
    let mut random = Random(1);
    let mut cases = case::strikes(&ranks, &mut random);
    cases.extend(case::frames(FOUR, 70, &mut random));
    cases.extend(case::odd_environments(FOUR, &mut random));
    for (_, error) in refuse::ERRORS {
        let blow = Blow::Refuse(Refusal { call: "openat".into(), nth: 7, error });
        cases.push(Case { blow, ..cases[0].clone() });
    }
    cases.push(Case { plant: Some(Plant::Blame), ..cases[0].clone() });
    for case in cases {
        assert_eq!(case.to_string().parse::<Case>().unwrap(), case, "{case}");
    }
}

impl Attack {
    fn main(&self) -> Result<()> {
        let mut rows = self.by_this_user()?;
        if self.user.is_some() {
            println!("{}", serde_json::to_string(&rows)?);
            return Ok(());
        }
        if geteuid().is_root() {
            rows.extend(self.by_an_ordinary_user()?);
        }
        ensure!(!rows.is_empty(), "no case has a name with one of {:?}", self.only);
        print!("{}", judge::table(&rows));
        ensure!(rows.iter().all(|row| row.faults() == 0), "faults with --seed {}", self.seed);
        Ok(())
    }

    /// Starts a process that makes the attack as an ordinary user, with at most `files` open files;
    /// returns the rows of that process.
    fn by_an_ordinary_user(&self) -> Result<Vec<Row>> {
        // A copy of this program is started, because the ordinary user may not be able to read the
        // folder of the original.
        let folder = tempfile::tempdir().context("no temporary folder")?;
        let copy = folder.path().join("attack");
        let program = std::fs::read(std::env::current_exe()?).context("this program")?;
        harness::write_program(&copy, &program).context("the copy of this program")?;
        std::os::unix::fs::chown(folder.path(), Some(NOBODY), Some(NOBODY))?;
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", &format!("ulimit -n {} && exec \"$0\" \"$@\"", self.files)])
            .arg(&copy)
            .args([ATTACK, "--user", &format!("ordinary, {} files", self.files)])
            .args(["--seed", &(self.seed ^ self.files).to_string()])
            .args(["--at-once", &self.at_once.to_string()])
            .args(self.cases.iter().map(|cases| format!("--cases={cases}")))
            .args(self.ranks.iter().map(|ranks| format!("--ranks={ranks}")))
            .args(self.only.iter().map(|only| format!("--only={only}")))
            .args(self.named.iter().map(|case| format!("--case={case}")))
            .current_dir("/")
            .stdin(Stdio::null())
            .stderr(Stdio::inherit());
        // The ordinary user cannot read root's tuning file.
        command.env("IRIS_TUNING", "off");
        let output = command.uid(NOBODY).gid(NOBODY).output().context("/bin/sh did not start")?;
        serde_json::from_slice(&output.stdout)
            .with_context(|| format!("the ordinary user's attacks ended with {}", output.status))
    }

    /// Makes the attack as the user of this process.
    fn by_this_user(&self) -> Result<Vec<Row>> {
        let user = if geteuid().is_root() { "root" } else { "ordinary" };
        let user = self.user.as_deref().unwrap_or(user);
        let program = std::env::current_exe().context("the path of this program")?;
        let mut random = Random(self.seed);
        let mut cases = self.named.clone();
        if cases.is_empty() {
            cases = case::strikes(&self.ranks, &mut random);
            for &ranks in &self.ranks {
                cases.extend(case::frames(ranks, 1000, &mut random));
                if !ranks.untold && ranks.number() <= 8 {
                    cases.extend(case::odd_environments(ranks, &mut random));
                    cases.extend(refusals(&program, ranks, &mut random)?);
                }
            }
            cases.retain(|case| {
                let name = case.to_string();
                self.only.is_empty() || self.only.iter().any(|only| name.contains(only))
            });
            random.shuffle(&mut cases);
            cases.truncate(self.cases.unwrap_or(usize::MAX));
        }
        // First a job without a blow runs for each number of ranks, to measure how long each stage
        // takes.
        let mut times = BTreeMap::new();
        for ranks in cases.iter().map(|case| case.ranks) {
            if let Entry::Vacant(unknown) = times.entry(ranks) {
                unknown.insert(measure(&program, ranks)?);
            }
        }
        let (rows, next) = (Mutex::new(Vec::new()), Mutex::new(cases.iter()));
        let room = Room { free: Mutex::new(self.at_once), changed: Condvar::new() };
        let worker = || -> Result<()> {
            loop {
                let case = next.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(case) = case else { return Ok(()) };
                let delay = times[&case.ranks][case.stage as usize] * case.delay / 100;
                let ranks = case.ranks.number().min(self.at_once);
                let outcome = room.during(ranks, || run(&program, case, delay))?;
                let row = judge::judge(case, &outcome, user);
                if row.faults() > 0 {
                    eprintln!("--case {case} as {user}: {row:?}\n{}", outcome.report());
                }
                judge::collect(&mut rows.lock().unwrap_or_else(PoisonError::into_inner), row);
            }
        };
        std::thread::scope(|scope| -> Result<()> {
            let workers: Vec<_> =
                (0..self.at_once.div_ceil(2)).map(|_| scope.spawn(worker)).collect();
            workers.into_iter().try_for_each(|it| match it.join() {
                Ok(done) => done,
                Err(_) => bail!("a thread of the attack panicked"),
            })
        })?;
        let mut rows = rows.into_inner().unwrap_or_else(PoisonError::into_inner);
        let stage = |row: &Row| row.stage.parse().map(|stage: Stage| stage as usize).ok();
        rows.sort_by_key(|row: &Row| (row.blow.clone(), stage(row), row.stage.clone()));
        Ok(rows)
    }
}

/// Number of ranks that may still be started at once.
struct Room {
    free: Mutex<usize>,
    changed: Condvar,
}

impl Room {
    /// Runs `job` with `ranks` ranks as soon as there is room for it.
    fn during<T>(&self, ranks: usize, job: impl FnOnce() -> T) -> T {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let free = self.changed.wait_while(free, |free| *free < ranks);
        *free.unwrap_or_else(PoisonError::into_inner) -= ranks;
        let done = job();
        *self.free.lock().unwrap_or_else(PoisonError::into_inner) += ranks;
        self.changed.notify_all();
        done
    }
}

/// Runs a job without a blow; returns the number of microseconds that each stage takes.
fn measure(program: &Path, ranks: Ranks) -> Result<Vec<u64>> {
    let calm = run(program, &Case { ranks, victim: ranks.number(), ..Case::default() }, 0)?;
    ensure!(calm.ok(), "without a blow the ranks fail:\n{}", calm.report());
    let times = line(&calm.ranks[0].stdout, TIMES).unwrap_or_default();
    let mut times: Vec<u64> = times.split(' ').filter_map(|n| n.parse().ok()).collect();
    ensure!(times.len() == Stage::ALL.len(), "rank 0 printed no times:\n{}", calm.ranks[0].stdout);
    times[Stage::Meeting as usize] = rank::LATE.as_micros() as u64;
    Ok(times)
}

/// Refusals of each system call that ranks make, its first and its last use, with each error, on
/// each of up to three ranks, else on rank 0 and another one. A call that one rank makes is refused to
/// each of them, because which rank of a node makes it may differ from run to run.
fn refusals(program: &Path, ranks: Ranks, random: &mut Random) -> Result<Vec<Case>> {
    let count = Case { ranks, blow: Blow::Count, victim: ranks.number(), ..Case::default() };
    let counted = run(program, &count, 0)?;
    ensure!(counted.ok(), "with a filter that refuses nothing ranks fail:\n{}", counted.report());
    let mut most = BTreeMap::new();
    for rank in &counted.ranks {
        let calls = line(&rank.stdout, CALLS).context("no calls were counted")?;
        for (call, uses) in calls.split(' ').filter_map(|word| word.split_once('=')) {
            let last = most.entry(call).or_insert(0);
            *last = uses.parse::<u32>()?.max(*last);
        }
    }
    let mut cases = Vec::new();
    for victim in case::victims(ranks, random) {
        for (&call, &last) in &most {
            for nth in [1, last].into_iter().take(last.min(2) as usize) {
                for (_, error) in refuse::ERRORS {
                    let blow = Blow::Refuse(Refusal { call: call.into(), nth, error });
                    cases.push(Case { ranks, blow, victim, ..Case::default() });
                }
            }
        }
    }
    Ok(cases)
}

/// Runs the job of `case`, in which a delayed blow comes `delay_us` microseconds after the start of
/// its stage.
fn run(program: &Path, case: &Case, delay_us: u64) -> Result<Outcome> {
    let ranks = case.ranks;
    let (grace, most) = match (case.plant, &case.blow) {
        (Some(Plant::Hang), _) => (Duration::from_secs(2), Duration::from_secs(5)),
        // A stopped rank is ended only when the others' time is over, which are all ended by their
        // short deadlines at about the same time.
        (_, Blow::Stop) => (GRACE / 2 * slower(ranks), 2 * GRACE * slower(ranks)),
        _ => (GRACE * slower(ranks), 2 * GRACE * slower(ranks)),
    };
    let mut options =
        Launch::default().nodes(ranks.nodes).grace(grace).deadline(most).stdout(io::sink());
    let private = PermissionsExt::from_mode(0o700);
    let folder = || tempfile::Builder::new().prefix("iris-").permissions(private).tempdir();
    let untold = ranks.untold.then(folder).transpose().context("no temporary folder")?;
    if let Some(folder) = &untold {
        options = options.env("IRIS_RENDEZVOUS", folder.path());
    }
    launch(
        program,
        &[rank::NAME, &case.to_string(), &delay_us.to_string()],
        ranks.number(),
        options,
    )
}

/// Text after `word` in the first line that begins with it.
fn line<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(word))
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

    /// Puts `items` into a random order: Fisher-Yates.
    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}
