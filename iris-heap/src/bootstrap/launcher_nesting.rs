//! Choice between launchers, one of which runs inside another: from the variables of both, and from
//! the processes above this one.

use super::ancestors::Ancestor;
use super::launchers::{Get, LAUNCHERS, Launcher, PMIX, SLURM, SLURM_STEP, first};
use crate::env::wrong;
use crate::error::Result;

/// Environment of this process, and its ancestors with theirs.
pub(super) struct Surroundings<'a> {
    pub(super) get: Get<'a>,
    pub(super) ancestors: &'a [Ancestor],
}

impl Surroundings<'_> {
    /// Number of ancestors, from the parent on, that had these variables as this process has them:
    /// the process above them set one of them, or nobody knows who did. `None` if no variable is set.
    pub(super) fn age<'n>(
        &self,
        names: impl IntoIterator<Item = &'n str>,
    ) -> Result<Option<usize>> {
        let mut youngest = None;
        for name in names {
            let Some(value) = (self.get)(name)? else { continue };
            let had_it = |ancestor: &&Ancestor| {
                ancestor.environment.as_ref().is_some_and(|vars| vars.get(name) == Some(&value))
            };
            let age = self.ancestors.iter().take_while(had_it).count();
            youngest = Some(youngest.map_or(age, |other: usize| other.min(age)));
        }
        Ok(youngest)
    }

    /// Number of ancestors below the nearest process of this launcher; of all without such a process.
    pub(super) fn process_of(&self, launcher: &Launcher) -> usize {
        let is_its = |it: &Ancestor| launcher.programs.contains(&it.program.as_str());
        self.ancestors.iter().position(is_its).unwrap_or(self.ancestors.len())
    }

    /// Identity of a job by the process that started its ranks on this host: the launcher's, or else the
    /// parent. `None` if there is no such process any more.
    pub(super) fn starter(&self, launcher: &Launcher) -> Option<String> {
        let process = self.ancestors.get(self.process_of(launcher));
        let parent = || self.ancestors.first().filter(|parent| !parent.has_adopted);
        process.map(|it| it.identity(true)).or_else(|| parent().map(|it| it.identity(false)))
    }

    /// Age of the rank and size that this launcher's variables announce; `None` without them.
    fn age_of(&self, launcher: &Launcher) -> Result<Option<usize>> {
        let is_set = |name: &str| (self.get)(name).map(|value| value.is_some());
        let named = match launcher.rank {
            rank if rank == SLURM.rank => is_set(rank)? && first(self.get, SLURM_STEP)?.is_some(),
            rank if rank == PMIX.rank => is_set(rank)?,
            rank => is_set(rank)? || (is_set(launcher.size[0])? && !is_set(PMIX.rank)?),
        };
        // A launcher sets all its variables at once. Rank and size alone may by chance be those of an outer
        // one; a person may change others within a rank.
        let age = match launcher.is_by_hand() {
            true => self.age([launcher.rank].into_iter().chain(launcher.size.iter().copied()))?,
            false => self.age(launcher.variables())?,
        };
        let Some(age) = age.filter(|_| named) else { return Ok(None) };
        match launcher.mark {
            None => Ok(Some(age)),
            // A mark that is older than the rank is another job's, in one of whose ranks this one runs.
            Some(mark) => Ok(self.age([mark])?.filter(|&mark| mark <= age)),
        }
    }

    /// Finds the launcher that started this process: the innermost one, if one runs inside another.
    /// Variables are inherited, so those of the inner launcher are the ones that the nearest ancestors
    /// lack. Where two launchers' are equally old, the nearest ancestor that is a launcher decides.
    pub(super) fn launcher(&self) -> Result<Option<(&'static Launcher, usize)>> {
        let mut found: Vec<(usize, &'static Launcher)> = Vec::new();
        for launcher in LAUNCHERS {
            // `RANK` has one launcher only.
            if found.iter().all(|(_, other)| other.rank != launcher.rank)
                && let Some(age) = self.age_of(launcher)?
            {
                found.push((age, launcher));
            }
        }
        let Some(age) = found.iter().map(|(age, _)| *age).min() else { return Ok(None) };
        found.retain(|it| it.0 == age);
        // Several launchers set PMIx variables beside their own, which include the size.
        if found.len() > 1 {
            found.retain(|(_, it)| it.rank != PMIX.rank);
        }
        let started = self.ancestors[age..].iter().find_map(|ancestor| {
            let is_its = |it: &&Launcher| it.programs.contains(&ancestor.program.as_str());
            found.iter().map(|(_, it)| *it).find(is_its)
        });
        let chosen = started.unwrap_or(found[0].1);
        for (_, other) in &found {
            // No ancestor shows who has set `RANK` by hand.
            if started.is_none() || other.is_by_hand() {
                self.check_agreement(chosen, other)?;
            }
        }
        Ok(Some((chosen, age)))
    }

    /// Checks that two launchers announce the same rank and size. If they do not, a world of the wrong
    /// size would otherwise go unnoticed.
    fn check_agreement(&self, chosen: &Launcher, other: &Launcher) -> Result<()> {
        let words = |it: &Launcher| -> Result<_> {
            let rank = (self.get)(it.rank)?.unwrap_or_else(|| "(not set)".into());
            let (name, size) =
                first(self.get, it.size)?.unwrap_or((it.size[0], "(not set)".into()));
            Ok((rank.trim().to_owned(), name, size.trim().to_owned()))
        };
        let (ours, theirs) = (words(chosen)?, words(other)?);
        if (&ours.0, &ours.2) == (&theirs.0, &theirs.2) {
            return Ok(());
        }
        Err(wrong(
            &format!("{}={} {}={} and {}", other.rank, theirs.0, theirs.1, theirs.2, chosen.rank),
            &format!("{} {}={}", ours.0, ours.1, ours.2),
            "launchers that agree, since no process above this one tells which is the inner one: unset the \
             variables that are left from another one",
        ))
    }
}
