//! Bootstrap of ranks that are threads of this process: they exchange messages through a table
//! under a lock.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::loss::{GroupEnd, tell};
use super::notice::{Patience, ToldWaits, notice};
use super::{Bootstrap, Object, Step, Watcher};
use crate::error::{Error, Result, list_ranks};

/// Contribution of one rank to an exchange.
#[derive(Clone, Default)]
struct Given {
    bytes: Vec<u8>,
    descriptors: Arc<Vec<OwnedFd>>,
    object: Option<Object>,
}

#[derive(Default)]
struct Table {
    /// Number of exchanges of the group that are complete.
    generation: u64,
    coming: Vec<Option<Given>>,
    /// Contributions of the last completed exchange, kept until the next exchange completes. By
    /// then every rank has fetched them.
    complete: Arc<Vec<Given>>,
    ending: GroupEnd,
    has_left: Vec<bool>,
    told_waits: ToldWaits,
}

struct Hub {
    table: Mutex<Table>,
    changed: Condvar,
}

impl Hub {
    fn new(size: usize) -> Arc<Hub> {
        let table =
            Table { coming: vec![None; size], has_left: vec![false; size], ..Table::default() };
        Arc::new(Hub { table: Mutex::new(table), changed: Condvar::new() })
    }

    /// Locks the table and ignores poisoning, because the table is consistent between any two
    /// statements.
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the exchanges because a rank has failed; if the rank is lost, calls the watchers.
    fn fail(&self, error: &Error) {
        let told = self.lock().ending.fail(error);
        self.changed.notify_all();
        tell(told);
    }
}

/// Bootstrap of one rank, connected to the other ranks by a [`Hub`].
pub(crate) struct Threads {
    hub: Arc<Hub>,
    rank: usize,
    size: usize,
}

impl Threads {
    pub(crate) fn all(size: usize) -> Vec<Threads> {
        let hub = Hub::new(size);
        (0..size).map(|rank| Threads { hub: hub.clone(), rank, size }).collect()
    }

    fn exchange(&self, given: Given, step: &Step) -> Result<Arc<Vec<Given>>> {
        let started = Instant::now();
        let mut table = self.hub.lock();
        if let Some(error) = &table.ending.broken {
            return Err(error.clone());
        }
        let mine = table.generation;
        table.coming[self.rank] = Some(given);
        if table.coming.iter().all(Option::is_some) {
            let complete = table.coming.iter_mut().filter_map(Option::take).collect();
            table.complete = Arc::new(complete);
            table.generation += 1;
            self.hub.changed.notify_all();
            return Ok(table.complete.clone());
        }
        let mut deadline = step.deadline;
        let mut patience = Patience::new(started, deadline);
        let missing = |table: &Table| -> Vec<usize> {
            (0..self.size).filter(|&r| table.coming[r].is_none()).collect()
        };
        loop {
            // A completed exchange stays valid even if a peer has died since, so it is returned
            // before errors are checked.
            if table.generation != mine {
                return Ok(table.complete.clone());
            }
            if let Some(error) = &table.ending.broken {
                return Err(error.clone());
            }
            let now = Instant::now();
            if now >= deadline {
                let error = Error::Absent {
                    ranks: missing(&table),
                    what: format!("rank {} in {}", step.number(self.rank), step.what),
                    waited: now - started,
                };
                table.ending.broken = Some(error.clone());
                self.hub.changed.notify_all();
                return Err(error);
            }
            if let Some(waited) = patience.is_over() {
                let ranks = missing(&table);
                if let Some(on_missing) = &step.on_missing {
                    on_missing.0(&ranks);
                }
                // Only the lowest waiting rank prints the notice, for all waiting ranks.
                if (0..self.rank).all(|r| ranks.contains(&r))
                    && table.told_waits.is_news(format!("{ranks:?} in {}", step.what), waited)
                {
                    let ranks: Vec<_> = ranks.iter().map(|&rank| step.number(rank)).collect();
                    notice(format_args!(
                        "rank {} in {} waits for rank {}: {waited:.1?} of {:.1?}",
                        step.number(self.rank),
                        step.what,
                        list_ranks(&ranks),
                        step.deadline.saturating_duration_since(started)
                    ));
                }
            }
            let until = deadline.min(patience.until);
            let wait = self.hub.changed.wait_timeout(table, until.saturating_duration_since(now));
            table = wait.unwrap_or_else(PoisonError::into_inner).0;
            // If the process with all of its ranks was stopped while this rank waited, the time of
            // the stop does not count as waiting.
            let overslept = until.elapsed();
            if overslept > Duration::from_secs(1) {
                deadline += overslept;
            }
        }
    }
}

impl Bootstrap for Threads {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn allgather(&self, bytes: &[u8], step: &Step) -> Result<Vec<Vec<u8>>> {
        let given = Given { bytes: bytes.to_vec(), ..Given::default() };
        let all = self.exchange(given, step)?;
        Ok(all.iter().map(|g| g.bytes.clone()).collect())
    }

    fn share_descriptors(
        &self,
        descriptors: Vec<OwnedFd>,
        _: &[usize],
        step: &Step,
    ) -> Result<Vec<Vec<OwnedFd>>> {
        let given = Given { descriptors: Arc::new(descriptors), ..Given::default() };
        let all = self.exchange(given, step)?;
        let copy =
            |fd: &OwnedFd| fd.try_clone().map_err(|e| Error::system("duplicating a descriptor", e));
        all.iter().map(|g| g.descriptors.iter().map(copy).collect()).collect()
    }

    fn share_objects(&self, object: Object, step: &Step) -> Result<Vec<Object>> {
        let all = self.exchange(Given { object: Some(object), ..Given::default() }, step)?;
        let missing = || Error::Wire {
            what: "exchange of objects".into(),
            problem: "a rank is in another exchange".into(),
        };
        all.iter().map(|g| g.object.clone().ok_or_else(missing)).collect()
    }

    fn same_process(&self) -> bool {
        true
    }

    fn split(
        &self,
        members: &[usize],
        _group: u64,
        step: &Step,
    ) -> Result<Option<Arc<dyn Bootstrap>>> {
        // The first member of each group provides the hub (the table for messages) for its group.
        let hub: Object = Hub::new(members.len());
        let all = self.share_objects(hub, step)?;
        let Some(rank) = members.iter().position(|&m| m == self.rank) else {
            return Ok(None);
        };
        match all[members[0]].clone().downcast::<Hub>() {
            Ok(hub) => Ok(Some(Arc::new(Threads { hub, rank, size: members.len() }))),
            Err(_) => Err(Error::Wire {
                what: "split".into(),
                problem: format!("rank {} is in another exchange", members[0]),
            }),
        }
    }

    fn watch(&self, watcher: Watcher) {
        let told = self.hub.lock().ending.watch(watcher);
        tell(told);
    }

    fn lost(&self) -> Option<Error> {
        self.hub.lock().ending.lost.clone()
    }

    fn give_up(&self, error: Error) {
        self.hub.fail(&error);
    }

    fn leave(&self, clean: bool) {
        let mut table = self.hub.lock();
        if std::mem::replace(&mut table.has_left[self.rank], true) || clean {
            return;
        }
        drop(table);
        self.hub.fail(&Error::PeerLost { rank: self.rank });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_rank_is_named_by_its_number() {
        let step = Step {
            what: "test".into(),
            deadline: Instant::now(),
            on_missing: None,
            numbers: Some([2, 3].into()),
        };
        match Threads::all(2)[0].allgather(&[], &step).unwrap_err() {
            Error::Absent { what, .. } => assert_eq!(what, "rank 2 in test"),
            error => panic!("{error}"),
        }
    }
}
