//! Splitting a world into worlds of some of its ranks.

use std::collections::BTreeMap;
use std::panic::Location;

use super::World;
use crate::encoding::{Reader, Writer, hash};
use crate::error::Result;
use crate::util::lock;

impl World {
    /// Splits the world: returns the world of all ranks that pass the same `color`, ordered by
    /// `key` and then by their rank in this world. Ranks that pass `None` get `None`. Close split
    /// worlds before this world. Errors of the new world, and of heaps in it, use the ranks'
    /// numbers in the new world.
    ///
    /// Two groups, of the even and of the odd ranks:
    ///
    /// ```
    /// # use iris_heap::{Error, World};
    /// World::run_threads(4, |world| -> Result<(), Error> {
    ///     let color = world.rank() as u32 % 2;
    ///     let group = world.split(Some(color), 0)?.expect("every rank has a color");
    ///     assert_eq!((group.size(), group.rank()), (2, world.rank() / 2));
    ///     group.close()
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of [`World::barrier`].
    #[track_caller]
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<World>> {
        self.split_by(color, key, false)
    }

    /// Splits the world like [`World::split`]. If `numbered`, errors of the new world use the
    /// ranks' numbers in this world.
    #[track_caller]
    pub(super) fn split_by(
        &self,
        color: Option<u32>,
        key: i64,
        numbered: bool,
    ) -> Result<Option<World>> {
        let at = Location::caller();
        let mut m = Writer::default();
        m.u64(color.map_or(u64::MAX, u64::from)).u64(key as u64);
        let all = self.collective("split", &m.finish())?;
        let mut groups: BTreeMap<u64, Vec<(i64, usize)>> = BTreeMap::new();
        for (rank, message) in all.iter().enumerate() {
            let mut r = Reader::new("split", message);
            let (color, key) = (r.u64()?, r.u64()? as i64);
            if color != u64::MAX {
                groups.entry(color).or_default().push((key, rank));
            }
        }
        let mut members = Vec::new();
        let mut id = 0;
        if let Some(color) = color {
            let mut group = groups.remove(&u64::from(color)).unwrap_or_default();
            group.sort_unstable();
            members = group.into_iter().map(|(_, rank)| rank).collect();
            id = color;
        }
        let sequence = lock(&self.inner.sequence);
        let group = hash(&[&sequence.to_le_bytes(), &id.to_le_bytes()]) as u64;
        let step = self.step("split", at);
        let Some(bootstrap) =
            self.note_returned(self.inner.bootstrap.split(&members, group, &step))?
        else {
            return Ok(None);
        };
        drop(sequence);
        let settings = self.inner.settings.clone();
        let hosts = self.hosts().part(&members);
        let numbers = || members.iter().map(|&rank| self.hosts().number(rank)).collect();
        let hosts = if numbered { hosts.numbered(numbers()) } else { hosts };
        Ok(Some(World::on_nodes(bootstrap, settings, hosts, Some(self.clone()))))
    }
}
