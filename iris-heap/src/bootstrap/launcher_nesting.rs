//! Choice of the inner one of nested launchers, from the variables of both and from the ancestors
//! of this process.

use super::ancestors::Ancestor;
use super::launchers::{Get, LAUNCHERS, Launcher, PMIX, SLURM, SLURM_STEP, first};
use crate::env::wrong;
use crate::error::Result;

/// Environment of this process, and its ancestors with their environments.
pub(super) struct Surroundings<'a> {
    pub(super) get: Get<'a>,
    pub(super) ancestors: &'a [Ancestor],
}

impl Surroundings<'_> {
    /// Age of variables: number of ancestors, from the parent upwards, in whose environment these
    /// variables have the same values as in this process. The next ancestor set one of the
    /// variables, or it is unknown who did. `None` if no variable is set.
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

    /// Number of ancestors between this process and the nearest process of this launcher; number of
    /// all ancestors if there is no such process.
    pub(super) fn process_of(&self, launcher: &Launcher) -> usize {
        let is_its = |it: &Ancestor| launcher.programs.contains(&it.program.as_str());
        self.ancestors.iter().position(is_its).unwrap_or(self.ancestors.len())
    }

    /// Identity of a job, made from the process that started its ranks on this host: the launcher's
    /// process, or else the parent. `None` if that process has ended.
    pub(super) fn starter(&self, launcher: &Launcher) -> Option<String> {
        let process = self.ancestors.get(self.process_of(launcher));
        let parent = || self.ancestors.first().filter(|parent| !parent.has_adopted);
        process.map(|it| it.identity(true)).or_else(|| parent().map(|it| it.identity(false)))
    }

    /// Age (see [`Surroundings::age`]) of this launcher's variables; `None` if they describe no
    /// rank of this launcher.
    fn age_of(&self, launcher: &Launcher) -> Result<Option<usize>> {
        let is_set = |name: &str| (self.get)(name).map(|value| value.is_some());
        let named = match launcher.rank {
            rank if rank == SLURM.rank => is_set(rank)? && first(self.get, SLURM_STEP)?.is_some(),
            rank if rank == PMIX.rank => is_set(rank)?,
            rank => is_set(rank)? || (is_set(launcher.size[0])? && !is_set(PMIX.rank)?),
        };
        // A launcher sets all its variables at once, so all are compared: rank and size alone may
        // by chance equal those of an outer rank. Of variables set by hand only rank and size are
        // compared, because a person may change the others within a rank.
        let age = match launcher.is_by_hand() {
            true => self.age([launcher.rank].into_iter().chain(launcher.size.iter().copied()))?,
            false => self.age(launcher.variables())?,
        };
        let Some(age) = age.filter(|_| named) else { return Ok(None) };
        match launcher.mark {
            None => Ok(Some(age)),
            // A `mark` variable that is older than the rank's variables belongs to an outer job,
            // and this job runs in one of that job's ranks.
            Some(mark) => Ok(self.age([mark])?.filter(|&mark| mark <= age)),
        }
    }

    /// Finds the launcher that started this process: the innermost one, if one runs inside another.
    /// Variables are inherited, so the inner launcher is the one whose variables the fewest
    /// ancestors have. If the variables of two launchers have the same age, the nearest ancestor
    /// that is a launcher's process decides.
    pub(super) fn launcher(&self) -> Result<Option<(&'static Launcher, usize)>> {
        let mut found: Vec<(usize, &'static Launcher)> = Vec::new();
        for launcher in LAUNCHERS {
            // If several launchers have the same rank variable, only the first in the table counts.
            if found.iter().all(|(_, other)| other.rank != launcher.rank)
                && let Some(age) = self.age_of(launcher)?
            {
                found.push((age, launcher));
            }
        }
        let Some(age) = found.iter().map(|(age, _)| *age).min() else { return Ok(None) };
        found.retain(|it| it.0 == age);
        // Several launchers set PMIx variables in addition to their own. The launcher's own
        // variables are preferred, because PMIx has none for the number of ranks.
        if found.len() > 1 {
            found.retain(|(_, it)| it.rank != PMIX.rank);
        }
        let started = self.ancestors[age..].iter().find_map(|ancestor| {
            let is_its = |it: &&Launcher| it.programs.contains(&ancestor.program.as_str());
            found.iter().map(|(_, it)| *it).find(is_its)
        });
        let chosen = started.unwrap_or(found[0].1);
        for (_, other) in &found {
            // Ancestors do not show who has set `RANK` by hand, so rank and size set by hand must
            // agree with the launcher's.
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
