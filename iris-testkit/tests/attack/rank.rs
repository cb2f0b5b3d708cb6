//! Program of the ranks of an attacked job: short, so that an attack can come at any moment of it.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use iris_heap::{Error, World};
use iris_ops::{Ranks, TileShape};
use iris_testkit::say;
use iris_testkit::suite::{Case, Op, Options};
use serde::{Deserialize, Serialize};

use super::end::Blow;
use super::ready::Ready;
use super::{Random, frames};

/// Job name with which a rank process is started.
pub(super) const NAME: &str = "attacked";
/// Start of an output line that names the rank that an error blames.
pub(super) const BLAMES: &str = "BLAMES ";
/// Start of an output line with the duration of each stage, in microseconds.
pub(super) const TIMES: &str = "TIMES ";
/// Start of an output line that reports a wrong result.
pub(super) const WRONG: &str = "WRONG ";

/// Stages of the ranks' program, in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Stage {
    StartUp,
    Planning,
    Calls,
    Closing,
}

impl Stage {
    pub(super) const ALL: [Stage; 4] =
        [Stage::StartUp, Stage::Planning, Stage::Calls, Stage::Closing];
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stage::StartUp => "at start-up",
            Stage::Planning => "planning",
            Stage::Calls => "in calls",
            Stage::Closing => "closing",
        })
    }
}

/// Wrong behaviour that ranks other than the victim show on purpose, to test that the attack counts
/// it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Plant {
    Hang,
    Signal,
    Result,
    Blame,
}

/// Behaviour of the ranks of one job, passed to the rank processes as JSON.
#[derive(Clone, Default, Debug, Serialize, Deserialize)]
pub(super) struct Part {
    /// Rank that attacks; equal to the number of ranks if none does.
    pub(super) victim: usize,
    /// Way in which the victim is ended or stopped.
    pub(super) blow: Blow,
    /// Stage in which the victim is ended or stopped; `None` if it only sends frames.
    pub(super) kill: Option<Stage>,
    /// Microseconds from the start of the stage until the victim is ended or stopped; at the latest
    /// this happens at the end of the stage.
    pub(super) delay_us: u64,
    /// Number of frames that the victim sends: as a stranger before it joins or, if `hostile`, as a
    /// rank.
    pub(super) frames: usize,
    pub(super) hostile: bool,
    pub(super) seed: u64,
    pub(super) plant: Option<Plant>,
}

/// Runs the stages of the program. If this rank is the victim, ends or stops it in one of the
/// stages.
struct Stages<'a> {
    part: &'a Part,
    victim: bool,
    begun: Option<(Stage, Instant)>,
    times: Vec<u64>,
}

impl Stages<'_> {
    fn begin(&mut self, stage: Option<Stage>) {
        if let Some((stage, begun)) = self.begun.take() {
            self.times.push(begun.elapsed().as_micros() as u64);
            if self.victim && self.part.kill == Some(stage) {
                self.part.blow.strike();
            }
        }
        self.begun = stage.map(|stage| (stage, Instant::now()));
        if self.victim && stage.is_some() && self.part.kill == stage {
            let (delay, blow) = (Duration::from_micros(self.part.delay_us), self.part.blow);
            // An error of starting the thread is ignored: the blow then comes at the end of the
            // stage.
            let _ = std::thread::Builder::new().spawn(move || {
                std::thread::sleep(delay);
                blow.strike();
            });
        }
    }
}

/// Main function of a rank process.
pub(super) fn main(text: &str) -> Result<()> {
    let part: Part = serde_json::from_str(text)?;
    let number = |name: &str| -> Result<usize> { Ok(std::env::var(name)?.parse()?) };
    let (rank, size) = (number("RANK")?, number("WORLD_SIZE")?);
    let victim = rank == part.victim;
    let outcome = program(&part, victim, (rank, size));
    if !victim
        && part.victim < size
        && let Some(plant) = part.plant
    {
        match plant {
            Plant::Hang => std::thread::sleep(Duration::from_secs(600)),
            Plant::Signal => std::process::abort(),
            Plant::Result => say!("{WRONG}as planted")?,
            Plant::Blame => {
                say!("{BLAMES}{}: as planted", size)?;
                bail!("as planted");
            }
        }
    }
    if let Err(error) = &outcome {
        let blamed = blamed(error).map_or("nobody".into(), |rank| rank.to_string());
        say!("{BLAMES}{blamed}: {error:#}")?;
    }
    outcome
}

fn program(part: &Part, victim: bool, (rank, size): (usize, usize)) -> Result<()> {
    let mut stages = Stages { part, victim, begun: None, times: Vec::new() };
    let mut random = Random(part.seed);
    stages.begin(Some(Stage::StartUp));
    if victim && part.frames > 0 {
        let folder = PathBuf::from(
            std::env::var_os("IRIS_RENDEZVOUS").context("IRIS_RENDEZVOUS is not set")?,
        );
        if part.hostile {
            return frames::by_rank(&folder, (rank, size), part.frames, &mut random);
        }
        frames::by_strangers(&folder, part.frames, &mut random)?;
    }
    let world = World::from_env()?;
    stages.begin(Some(Stage::Planning));
    let options = Options::new(8, 6, 9).tile(TileShape { m: 2, n: 4 }).columns_per_flag(4);
    let case = Case::new(Op::MatmulAllReduce, "auto", options);
    let mut ready = Ready::new(&world, &case)?;
    ready.heap.write(ready.b, &[1.0; 4096])?;
    let [a, _, c] = case.shapes(Ranks::from(&world), case.options.m);
    stages.begin(Some(Stage::Calls));
    for call in 1..=20u8 {
        // Each call has another expected result, so that data left from the previous call would be
        // found.
        ready.heap.write(ready.a, &[f32::from(call); 4096])?;
        ready.call()?;
        ready.sync()?;
        let expected = f32::from(call) * (a.1 * size) as f32;
        let result = ready.heap.read(ready.c)?;
        if let Some(wrong) = result[..c.0 * c.1].iter().find(|&&x| x != expected) {
            say!("{WRONG}{wrong} in call {call}, expected {expected}")?;
            bail!("a wrong result");
        }
    }
    stages.begin(Some(Stage::Closing));
    ready.op.free()?;
    ready.heap.close()?;
    world.close()?;
    stages.begin(None);
    ensure!(stages.times.len() == Stage::ALL.len(), "stages were left out");
    let times: Vec<_> = stages.times.iter().map(u64::to_string).collect();
    Ok(say!("{TIMES}{}", times.join(" "))?)
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
