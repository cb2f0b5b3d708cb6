//! Program of the ranks of an attacked job: short, so that an attack can come at any moment of it.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use iris_heap::{Error, Settings, World};
use iris_ops::{AllReduce, CollectiveArgs, MatRef, TileShape, all_reduce};
use iris_testkit::say;
use iris_testkit::suite::{self, Op, Options};

use super::blow::{Blow, Forked};
use super::case::Case;
use super::ready::Ready;
use super::{frames, refuse};

/// Job name with which a rank process is started.
pub(super) const NAME: &str = "attacked";
/// Start of an output line with the number of the rank that an error blames.
pub(super) const BLAMES: &str = "BLAMES ";
/// Start of the error that ends a rank's program, on stderr.
pub(super) const ERROR: &str = "ERROR ";
/// Start of an output line with the duration of each stage, in microseconds.
pub(super) const TIMES: &str = "TIMES ";
/// Start of an output line with the number of uses of each system call.
pub(super) const CALLS: &str = "CALLS ";
/// Start of an output line that reports a wrong result.
pub(super) const WRONG: &str = "WRONG ";

/// Stages of the ranks' program, in order.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Before the rank meets the others.
    #[default]
    Before,
    /// While the rank waits for the others; one of them comes late.
    Meeting,
    /// After the meeting, before a heap is opened.
    Met,
    /// While the heap is opened and operators are made.
    Allocation,
    /// Between the launch of the first call and its end.
    FirstCall,
    /// Between the launch of a later call and its end.
    InCall,
    /// Between the end of a call and the launch of the next one.
    BetweenCalls,
    /// Before or while operators and memory are given back.
    Free,
    /// Before or while heap and world are closed.
    Close,
}

impl Stage {
    pub(super) const ALL: [Stage; 9] = [
        Stage::Before,
        Stage::Meeting,
        Stage::Met,
        Stage::Allocation,
        Stage::FirstCall,
        Stage::InCall,
        Stage::BetweenCalls,
        Stage::Free,
        Stage::Close,
    ];
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Stage::Before => "before",
            Stage::Meeting => "meeting",
            Stage::Met => "met",
            Stage::Allocation => "allocation",
            Stage::FirstCall => "first-call",
            Stage::InCall => "in-call",
            Stage::BetweenCalls => "between-calls",
            Stage::Free => "free",
            Stage::Close => "close",
        })
    }
}

impl FromStr for Stage {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Stage> {
        let found = Stage::ALL.into_iter().find(|stage| stage.to_string() == text);
        found.with_context(|| format!("stage {text}: expected one of {:?}", Stage::ALL))
    }
}

/// Wrong behaviour that ranks other than the victim show on purpose, to test that the attack counts
/// it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Plant {
    Hang,
    Signal,
    Result,
    Blame,
    Silent,
}

impl Plant {
    const ALL: [Plant; 5] =
        [Plant::Hang, Plant::Signal, Plant::Result, Plant::Blame, Plant::Silent];
}

impl fmt::Display for Plant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl FromStr for Plant {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Plant> {
        let found = Plant::ALL.into_iter().find(|plant| plant.to_string() == text);
        found.with_context(|| format!("plant {text}: expected one of {:?}", Plant::ALL))
    }
}

/// Whether this process is a child that [`Blow::Fork`] has made.
static CHILD: AtomicBool = AtomicBool::new(false);

/// Runs the stages of the program. If this rank is the victim, strikes it in one of the stages.
struct Stages<'a> {
    case: &'a Case,
    victim: bool,
    /// Time from the start of the stage until a delayed blow.
    delay: Duration,
    begun: Option<Instant>,
    times: Vec<u64>,
}

impl Stages<'_> {
    fn begin(&mut self, stage: Option<Stage>) -> Result<()> {
        let Case { stage: struck, blow, delay: percent, .. } = self.case;
        let strikes = |stage| self.victim && stage == Some(*struck);
        let ended = self.begun.take().map(|begun| begun.elapsed().as_micros() as u64);
        let ended_stage = ended.and_then(|_| Stage::ALL.get(self.times.len()).copied());
        self.times.extend(ended);
        // A blow whose delay was longer than the stage comes at the stage's end.
        if strikes(ended_stage) && *percent > 0 {
            blow.strike()?;
        }
        self.begun = stage.map(|_| Instant::now());
        if !strikes(stage) {
            return Ok(());
        }
        if *percent == 0 {
            if matches!(blow.strike()?, Forked::Child) {
                CHILD.store(true, Ordering::Relaxed);
            }
            return Ok(());
        }
        let (delay, blow) = (self.delay, blow.clone());
        // An error of starting the thread is ignored: the blow then comes at the end of the stage.
        let _ = std::thread::Builder::new().spawn(move || {
            std::thread::sleep(delay);
            blow.strike()
        });
        Ok(())
    }
}

/// Main function of a rank process. `arguments` are the case, the microseconds of a delayed blow,
/// and rank and number of ranks if the environment is odd by now.
pub(super) fn main(arguments: &[String]) -> Result<()> {
    let [case, delay, odd @ ..] = arguments else { bail!("a rank has two arguments or more") };
    let case: Case = case.parse()?;
    let number = |name: &str| -> Result<usize> { Ok(std::env::var(name)?.parse()?) };
    let (rank, size) = match odd {
        [rank, size] => (rank.parse()?, size.parse()?),
        _ => (number("RANK")?, number("WORLD_SIZE")?),
    };
    let victim = rank == case.victim;
    match &case.blow {
        Blow::Set(change) if victim && odd.is_empty() => {
            change.execute(&[rank.to_string(), size.to_string()])?;
        }
        Blow::Refuse(refusal) if victim => refuse::install(Some(refusal))?,
        Blow::Count => refuse::install(None)?,
        _ => {}
    }
    let delay = Duration::from_micros(delay.parse()?);
    let outcome = program(&case, delay, victim, (rank, size));
    if case.blow == Blow::Count {
        say!("{CALLS}{}", refuse::counts())?;
    }
    if CHILD.load(Ordering::Relaxed) {
        return child(outcome);
    }
    if !victim && let Some(plant) = case.plant {
        match plant {
            Plant::Hang => std::thread::sleep(Duration::from_secs(600)),
            Plant::Signal => std::process::abort(),
            Plant::Result => say!("{WRONG}as planted")?,
            Plant::Blame => {
                say!("{BLAMES}{size}")?;
                bail!("rank {size} is blamed as planted");
            }
            Plant::Silent => bail!("an error that names nobody, as planted"),
        }
    }
    if let Err(error) = &outcome
        && let Some(blamed) = blamed(error)
    {
        // An error is ignored, because the call that writes may be the one that is refused.
        let _ = say!("{BLAMES}{blamed}");
    }
    outcome
}

/// Checks the outcome of a forked child that went on with the program: a function must have refused
/// what the child inherited.
fn child(outcome: Result<()>) -> Result<()> {
    let text = outcome.err().map(|error| format!("{error:#}")).unwrap_or_default();
    if !text.contains("was forked from process") {
        say!("{WRONG}the forked child went on with the rank's objects: {text}")?;
    }
    Ok(())
}

/// Number of elements of the vector that is summed.
const COUNT: usize = 1000;
/// Number of calls of each operator.
pub(super) const ROUNDS: u8 = 8;
/// Time by which a rank is late for a meeting in which another one is struck.
pub(super) const LATE: Duration = Duration::from_millis(200);

/// Settings of the environment, which may be odd, with deadlines of the case: so long that a rank
/// which notices a blow only by them counts as a hang, unless only a deadline can find the fault. It
/// alone finds a victim that is stopped, that has no announced place yet and ends untold, or that
/// meets at another place.
fn settings(case: &Case) -> Result<Settings> {
    let (settings, slower) = (Settings::from_env()?, super::slower(case.ranks));
    let loses = case.blow.loses_the_rank();
    let untold = loses && case.ranks.untold && case.stage == Stage::Before;
    if !untold && !matches!(case.blow, Blow::Stop | Blow::Set(_)) {
        let step = settings.step * slower;
        return Ok(settings.step(step));
    }
    let [work, step, meeting] = super::SHORT.map(|wait| wait * slower);
    Ok(settings.work(work).step(step).meeting(meeting))
}

fn program(case: &Case, delay: Duration, victim: bool, (rank, size): (usize, usize)) -> Result<()> {
    let mut stages = Stages { case, victim, delay, begun: None, times: Vec::new() };
    let mut random = case.random();
    stages.begin(Some(Stage::Before))?;
    if victim {
        let folder = || std::env::var_os("IRIS_RENDEZVOUS").context("IRIS_RENDEZVOUS is not set");
        match &case.blow {
            Blow::Frames(count) => {
                return frames::by_rank(folder()?.as_ref(), (rank, size), *count, &mut random);
            }
            Blow::Strangers(count) => {
                let nodes = case.ranks.nodes;
                frames::by_strangers(folder()?.as_ref(), nodes, *count, &mut random)?;
            }
            _ => {}
        }
    }
    if case.stage == Stage::Meeting && rank == (case.victim + 1) % size {
        std::thread::sleep(LATE);
    }
    stages.begin(Some(Stage::Meeting))?;
    let world = World::from_env_with(&settings(case)?)?;
    stages.begin(Some(Stage::Met))?;
    let options = Options::new(8, 6, 9).tile(TileShape { m: 2, n: 4 }).columns_per_flag(4);
    let product = suite::Case::new(Op::MatmulAllReduce, "auto", options);
    stages.begin(Some(Stage::Allocation))?;
    let mut ready = Ready::new(&world, &product)?;
    let sum = AllReduce::new(&ready.heap, &all_reduce::Options::new(COUNT).plan(&ready.heap)?)?;
    let vector = ready.heap.full::<f32>(COUNT, 0.0)?;
    ready.heap.write(ready.b, &[1.0; 4096])?;
    let [a, _, c] = product.shapes(iris_ops::Topology::from(&world), product.options.m);
    let chosen = case.call();
    for call in 1..=ROUNDS {
        // Each call has another expected result, so that data left from the previous call would be
        // found.
        let value = f32::from(call);
        ready.heap.write(ready.a, &[value; 4096])?;
        ready.heap.write(vector, &[value; COUNT])?;
        ready.call()?;
        let matrix = MatRef::vector(vector);
        sum.run(&CollectiveArgs::new(matrix, matrix), &ready.stream)?;
        match call {
            1 => stages.begin(Some(Stage::FirstCall))?,
            call if call == chosen => stages.begin(Some(Stage::InCall))?,
            _ => {}
        }
        ready.sync()?;
        for (what, result, expected) in [
            ("product", &ready.heap.read(ready.c)?[..c.0 * c.1], value * (a.1 * size) as f32),
            ("sum", &ready.heap.read(vector)?[..], value * size as f32),
        ] {
            if let Some(wrong) = result.iter().find(|&&x| x != expected) {
                say!("{WRONG}{wrong} in the {what} of call {call}, expected {expected}")?;
                bail!("a wrong result");
            }
        }
        if call == chosen {
            stages.begin(Some(Stage::BetweenCalls))?;
        }
    }
    stages.begin(Some(Stage::Free))?;
    sum.free()?;
    ready.op.free()?;
    ready.heap.free(vector)?;
    stages.begin(Some(Stage::Close))?;
    ready.heap.close()?;
    world.close()?;
    stages.begin(None)?;
    ensure!(stages.times.len() == Stage::ALL.len(), "stages were left out");
    let times: Vec<_> = stages.times.iter().map(u64::to_string).collect();
    // An error is ignored, because the call that writes may be the one that is refused.
    let _ = say!("{TIMES}{}", times.join(" "));
    Ok(())
}

/// Rank that `error` blames; `None` if it blames no rank.
fn blamed(error: &anyhow::Error) -> Option<usize> {
    let cause = match error.downcast_ref::<iris_ops::OpError>() {
        Some(iris_ops::OpError::Heap { cause, .. } | iris_ops::OpError::Poisoned { cause, .. }) => {
            Some(&**cause)
        }
        _ => error.downcast_ref::<Error>(),
    };
    match cause? {
        Error::PeerLost { rank } | Error::PeerFailed { rank, .. } | Error::GaveUp { rank, .. } => {
            Some(*rank)
        }
        Error::Absent { ranks, .. } => ranks.first().copied().filter(|_| ranks.len() == 1),
        Error::HubLost { rank } => Some(*rank),
        Error::Fault { fault, .. } => usize::try_from(fault.rank).ok(),
        _ => None,
    }
}
