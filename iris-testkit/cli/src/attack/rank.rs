//! One rank of a job that is attacked: a short program, of which a rank may kill itself at any moment.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use iris_heap::{Error, HeapOptions, SymmetricHeap, World};
use iris_ops::{MatRef, Ranks, TileShape};
use iris_testkit::say;
use iris_testkit::suite::Options;
use iris_testkit::suite::{AnyOp, Case, Op, Operands, plan};
use serde::{Deserialize, Serialize};

use super::end::Blow;
use super::{Random, frames};

/// The name that a rank process is started with.
pub(crate) const NAME: &str = "attacked";
/// Begins the line that says which rank an error blames.
pub(super) const BLAMES: &str = "BLAMES ";
/// Begins the line that says how many microseconds each stage took.
pub(super) const TIMES: &str = "TIMES ";
/// Begins the line of a result that is not right.
pub(super) const WRONG: &str = "WRONG ";

/// The stages of a program.
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

/// What the ranks that are not the victim do wrong when they fail, to see that it is found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Plant {
    Hang,
    Signal,
    Result,
    Blame,
}

impl fmt::Display for Plant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Plant::Hang => "hang",
            Plant::Signal => "signal",
            Plant::Result => "result",
            Plant::Blame => "blame",
        })
    }
}

impl FromStr for Plant {
    type Err = String;

    fn from_str(text: &str) -> Result<Plant, String> {
        let all = [Plant::Hang, Plant::Signal, Plant::Result, Plant::Blame];
        let found = all.into_iter().find(|plant| plant.to_string() == text);
        found.ok_or_else(|| "expected hang, signal, result or blame".into())
    }
}

/// What the ranks of one job do.
#[derive(Clone, Default, Debug, Serialize, Deserialize)]
pub(super) struct Part {
    /// The rank that attacks; the number of ranks: none does.
    pub(super) victim: usize,
    /// Kind of blow that the victim gets.
    pub(super) blow: Blow,
    /// Stage in which the victim gets it.
    pub(super) kill: Option<Stage>,
    /// Microseconds from the beginning of the stage; the blow comes at the stage's end at the latest.
    pub(super) delay_us: u64,
    /// Frames it sends, as strangers before it joins, or as the rank that it is.
    pub(super) frames: usize,
    pub(super) hostile: bool,
    pub(super) seed: u64,
    pub(super) plant: Option<Plant>,
}

/// Goes through the stages, and dies in one if this rank is to.
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
            // Without a thread it is struck at the end of the stage.
            let _ = std::thread::Builder::new().spawn(move || {
                std::thread::sleep(delay);
                blow.strike();
            });
        }
    }
}

/// One rank, as the process that the launcher started.
pub(crate) fn main(text: &str) -> Result<bool> {
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
    outcome.map(|()| true)
}

fn program(part: &Part, victim: bool, (rank, size): (usize, usize)) -> Result<()> {
    let mut stages = Stages { part, victim, begun: None, times: Vec::new() };
    let mut random = Random(part.seed);
    stages.begin(Some(Stage::StartUp));
    if victim && part.frames > 0 {
        let folder = PathBuf::from(std::env::var_os("IRIS_RENDEZVOUS").context("no folder")?);
        if part.hostile {
            return frames::by_rank(&folder, (rank, size), part.frames, &mut random);
        }
        frames::by_strangers(&folder, part.frames, &mut random)?;
    }
    let world = World::from_env()?;
    stages.begin(Some(Stage::Planning));
    let options = Options::new(8, 6, 9).tile(TileShape { m: 2, n: 4 }).columns_per_flag(4);
    let case = Case::new(Op::MatmulAllReduce, "auto", options);
    let heap = SymmetricHeap::open(&world, HeapOptions::new().threads(1))?;
    let ranks = Ranks::from(&world);
    let op = AnyOp::new(&heap, &plan(case.op, &case.variant, ranks, &case.options)?)?;
    let shapes = case.shapes(ranks, case.options.m);
    let (a, b) = (heap.zeros::<f32>(4096)?, heap.ones::<f32>(4096)?);
    let c = heap.full::<f32>(4096, f32::NAN)?;
    let matrices = [a, b, c].into_iter().zip(shapes);
    let matrices: Vec<_> = matrices.map(|(it, shape)| MatRef::sym(it, shape.0, shape.1)).collect();
    let [a_matrix, b_matrix, c_matrix] = matrices[..] else { bail!("three matrices") };
    let operands = Operands::new(a_matrix, b_matrix, c_matrix);
    let stream = heap.stream()?;
    stages.begin(Some(Stage::Calls));
    for call in 1..=20u8 {
        // Each call has another result: one that is left from the call before is wrong.
        heap.write(a, &[f32::from(call); 4096])?;
        op.run(&operands, &stream)?;
        stream.sync()?;
        let expected = f32::from(call) * (shapes[0].1 * size) as f32;
        let result = heap.read(c)?;
        if let Some(wrong) = result[..shapes[2].0 * shapes[2].1].iter().find(|&&x| x != expected) {
            say!("{WRONG}{wrong} in call {call}, expected {expected}")?;
            bail!("a wrong result");
        }
    }
    stages.begin(Some(Stage::Closing));
    op.free()?;
    heap.close()?;
    world.close()?;
    stages.begin(None);
    ensure!(stages.times.len() == Stage::ALL.len(), "stages were left out");
    let times: Vec<_> = stages.times.iter().map(u64::to_string).collect();
    Ok(say!("{TIMES}{}", times.join(" "))?)
}

/// The rank that an error blames, if it is one.
fn blamed(error: &anyhow::Error) -> Option<usize> {
    let cause = match error.downcast_ref::<iris_ops::OpError>() {
        Some(iris_ops::OpError::Heap { cause, .. } | iris_ops::OpError::Poisoned { cause, .. }) => {
            Some(&**cause)
        }
        _ => error.downcast_ref::<Error>(),
    };
    match cause? {
        Error::PeerLost { rank } | Error::PeerFailed { rank, .. } | Error::GaveUp { rank } => {
            Some(*rank)
        }
        Error::Absent { ranks, .. } => ranks.first().copied().filter(|_| ranks.len() == 1),
        Error::HubLost => Some(0),
        Error::Fault { fault, .. } => usize::try_from(fault.rank).ok(),
        _ => None,
    }
}
