//! Cases of the attack: which rank of how many is struck, when, and how. A case is written as one
//! word, by which it can be repeated alone.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Error, Result, bail, ensure};

use super::Random;
use super::blow::Blow;
use super::environment::{Odd, Oddity, VARIABLES};
use super::rank::{Plant, ROUNDS, Stage};

/// Ranks of a job, and the way in which they are started.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(super) struct Ranks {
    /// Number of simulated nodes, which meet over TCP; 1 for ranks that meet over a Unix socket.
    pub(super) nodes: usize,
    pub(super) per_node: usize,
    /// Whether the ranks' folder is one in which the launcher announces no ended ranks, as under a
    /// launcher that is not ours.
    pub(super) untold: bool,
}

impl Ranks {
    pub(super) const fn new(nodes: usize, per_node: usize) -> Ranks {
        Ranks { nodes, per_node, untold: false }
    }

    pub(super) fn number(self) -> usize {
        self.nodes * self.per_node
    }
}

impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nodes > 1 {
            write!(f, "{}x", self.nodes)?;
        }
        write!(f, "{}{}", self.per_node, if self.untold { "-untold" } else { "" })
    }
}

impl FromStr for Ranks {
    type Err = Error;

    fn from_str(text: &str) -> Result<Ranks> {
        let (number, untold) = match text.strip_suffix("-untold") {
            Some(number) => (number, true),
            None => (text, false),
        };
        let (nodes, per_node) = number.split_once('x').unwrap_or(("1", number));
        Ok(Ranks { nodes: nodes.parse()?, per_node: per_node.parse()?, untold })
    }
}

/// One attack on one job. All that a case does at random follows from its seed.
#[derive(Clone, PartialEq, Default, Debug)]
pub(super) struct Case {
    pub(super) ranks: Ranks,
    pub(super) stage: Stage,
    pub(super) blow: Blow,
    /// Rank that is struck, or that attacks the others; the number of ranks if there is none.
    pub(super) victim: usize,
    /// Time from the start of the stage until the blow, which another thread strikes, in percent of
    /// the stage; 0 for a blow at the start of the stage, by the thread that runs the rank's program.
    pub(super) delay: u64,
    pub(super) seed: u64,
    /// Wrong behaviour of the ranks that are not struck, to test that it is counted; `None` for
    /// none.
    pub(super) plant: Option<Plant>,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { ranks, stage, blow, victim, delay, seed, plant } = self;
        write!(f, "{ranks},{stage},{blow},{victim},{delay},{seed}")?;
        plant.map_or(Ok(()), |plant| write!(f, ",{plant}"))
    }
}

impl FromStr for Case {
    type Err = Error;

    fn from_str(text: &str) -> Result<Case> {
        let expected = "expected RANKS,STAGE,BLOW,VICTIM,DELAY,SEED";
        let parts: Vec<_> = text.split(',').collect();
        let [ranks, stage, blow, victim, delay, seed, plant @ ..] = &parts[..] else {
            bail!("case {text}: {expected}");
        };
        let case = Case {
            ranks: ranks.parse().with_context(|| format!("ranks {ranks}"))?,
            stage: stage.parse()?,
            blow: blow.parse()?,
            victim: victim.parse().with_context(|| format!("victim {victim}"))?,
            delay: delay.parse().with_context(|| format!("delay {delay}"))?,
            seed: seed.parse().with_context(|| format!("seed {seed}"))?,
            plant: plant.first().map(|plant| plant.parse()).transpose()?,
        };
        ensure!(plant.len() <= 1 && case.ranks.number() > 0, "case {text}: {expected}");
        Ok(case)
    }
}

impl Case {
    pub(super) fn random(&self) -> Random {
        Random(self.seed)
    }

    /// Draws the delay: half of the blows that another thread can strike come at the start of the
    /// stage, the others within it or shortly after it.
    pub(super) fn delayed(mut self, random: &mut Random) -> Case {
        if self.blow.by_other_thread() && (self.stage == Stage::Meeting || random.below(2) == 0) {
            self.delay = 1 + random.below(125);
        }
        self
    }

    /// Number of the later call in or after which the victim is struck; the first call is 1.
    pub(super) fn call(&self) -> u8 {
        2 + self.random().below(u64::from(ROUNDS) - 2) as u8
    }

    /// Whether ranks other than the victim may end with success, although the victim was struck so
    /// that it is lost: only if there was nothing left to exchange with it.
    pub(super) fn may_succeed(&self) -> bool {
        self.stage == Stage::Close && self.delay > 0
    }
}

/// Ranks that are struck in turn in jobs of these ranks: each of up to three ranks, else rank 0 and
/// another one, or one of 64.
pub(super) fn victims(ranks: Ranks, random: &mut Random) -> Vec<usize> {
    let number = ranks.number();
    match number {
        0..4 => (0..number).collect(),
        4..64 => vec![0, 1 + random.below(number as u64 - 1) as usize],
        _ => vec![random.below(number as u64) as usize],
    }
}

/// Every combination of stage, blow and victim with the numbers of ranks `ranks`.
pub(super) fn strikes(ranks: &[Ranks], random: &mut Random) -> Vec<Case> {
    let mut cases = Vec::new();
    for &ranks in ranks {
        let victims = victims(ranks, random);
        for blow in Blow::STRIKES {
            for stage in Stage::ALL.into_iter().filter(|stage| blow.is_possible(*stage)) {
                for &victim in &victims {
                    let (blow, seed) = (blow.clone(), random.below(1 << 32));
                    let case = Case { ranks, stage, blow, victim, seed, ..Case::default() };
                    cases.push(case.delayed(random));
                }
            }
        }
    }
    cases
}

/// Every odd environment of rank 0 and of another rank.
pub(super) fn odd_environments(ranks: Ranks, random: &mut Random) -> Vec<Case> {
    let other = 1 + random.below(ranks.number() as u64 - 1) as usize;
    let odd =
        |variable: &&str| Oddity::ALL.map(|oddity| Odd { variable: (*variable).into(), oddity });
    let odd: Vec<_> = VARIABLES.iter().flat_map(odd).collect();
    let case = |(odd, victim)| Case { ranks, blow: Blow::Set(odd), victim, ..Case::default() };
    odd.into_iter().flat_map(|odd| [(odd.clone(), 0), (odd, other)]).map(case).collect()
}

/// Jobs in which rank 0 gets `frames` invalid frames: half from strangers, half from a rank. Over the
/// network all are from strangers, because the frames of a rank are enciphered.
pub(super) fn frames(ranks: Ranks, frames: usize, random: &mut Random) -> Vec<Case> {
    // Number of frames that the attacker of one job sends.
    const AT_ONCE: usize = 50;
    let mut cases = Vec::new();
    let as_rank = if ranks.nodes > 1 { Blow::Strangers } else { Blow::Frames };
    for blow in [Blow::Strangers, as_rank] {
        let mut rest = frames / 2;
        while rest > 0 {
            let blow = blow(rest.min(AT_ONCE));
            rest = rest.saturating_sub(AT_ONCE);
            // Attacker: any rank except rank 0, which owns the socket.
            let victim = 1 + random.below(ranks.number() as u64 - 1) as usize;
            let seed = random.below(1 << 32);
            cases.push(Case { ranks, blow, victim, seed, ..Case::default() });
        }
    }
    cases
}
