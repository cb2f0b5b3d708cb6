//! Collective exchanges of a world's ranks on the host, each tagged with its number, kind and call
//! site.

use std::os::fd::OwnedFd;
use std::panic::Location;
use std::time::Instant;

use super::World;
use crate::bootstrap::{Object, OnMissing, Step};
use crate::encoding::{Reader, Writer};
use crate::error::{Error, Result, odd_ranks};
use crate::root_error::{self, Distance};
use crate::util::lock;

/// Name of the step that closes a rank's world after the rank's function has returned; it stands
/// for a call site, because the program makes no call.
pub(super) const END_OF_RANK: &str =
    "the close of the world after the rank's function has returned";

impl World {
    /// Waits until every rank has called this function.
    ///
    /// # Errors
    /// Errors of every collective call: [`Error::Absent`], [`Error::Mismatch`],
    /// [`Error::PeerLost`], [`Error::Closed`].
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.collective("barrier", &[]).map(drop)
    }

    /// Exchanges bytes: collective; returns the bytes that each rank passed, indexed by rank. Ranks
    /// may pass different numbers of bytes.
    ///
    /// # Errors
    /// Errors of [`World::barrier`].
    #[track_caller]
    pub fn allgather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.collective("allgather", bytes)
    }

    /// Passes the bytes of rank `root` to every rank: collective. `bytes` of the other ranks are ignored.
    ///
    /// ```
    /// # use iris_heap::{Error, World};
    /// World::run_threads(3, |world| -> Result<(), Error> {
    ///     let id = if world.rank() == 0 { b"an id".to_vec() } else { Vec::new() };
    ///     assert_eq!(world.broadcast(0, &id)?, b"an id");
    ///     Ok(())
    /// })?;
    /// # Ok::<_, Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no rank `root`; [`Error::Mismatch`] if ranks name different
    /// roots; errors of [`World::barrier`].
    #[track_caller]
    pub fn broadcast(&self, root: usize, bytes: &[u8]) -> Result<Vec<u8>> {
        let own = if self.rank() == root { bytes } else { &[] };
        let mut all = self.collective(&format!("broadcast from rank {root}"), own)?;
        // All ranks take part first, so that none waits for one that named a wrong root.
        match all.get_mut(root) {
            Some(bytes) => Ok(std::mem::take(bytes)),
            None => Err(Error::invalid("root", root, format!("below {}", self.size()))),
        }
    }

    /// Exchanges bytes as [`World::allgather`]; `kind` names the exchange in errors and notices,
    /// and must be the same on all ranks. After some seconds, calls `on_missing` from time to time
    /// with the ranks that have not arrived; `on_missing` must not block.
    ///
    /// # Errors
    /// Errors of [`World::barrier`].
    #[track_caller]
    pub fn allgather_watched(
        &self,
        kind: &str,
        bytes: &[u8],
        on_missing: OnMissing,
    ) -> Result<Vec<Vec<u8>>> {
        self.note(self.exchange(kind, bytes, Some(on_missing)))
    }

    /// Checks that every rank passes the same items in the same order: collective. `what` names the
    /// check in errors; an item is a name and a value.
    ///
    /// ```
    /// # use iris_heap::{Error, World};
    /// let error = World::run_threads(2, |world| -> Result<(), Error> {
    ///     let layers = [("layers", (12 + world.rank()).to_string())];
    ///     world.agree("model", &layers)
    /// });
    /// let text = error.unwrap_err().to_string();
    /// assert!(text.contains("layers is 12 on rank 0; 13 on rank 1"), "{text}");
    /// ```
    ///
    /// # Errors
    /// [`Error::Disagreement`] on every rank, with the first item that differs; errors of
    /// [`World::barrier`].
    #[track_caller]
    pub fn agree(&self, what: &str, items: &[(&str, String)]) -> Result<()> {
        self.note(self.agree_with(what, items, &[])).map(drop)
    }

    /// Does [`World::agree`] and gathers `bytes`, which may differ between ranks, in the same
    /// exchange. If this function returns an error, the caller must record it by [`World::note`].
    #[track_caller]
    pub(crate) fn agree_with(
        &self,
        what: &str,
        items: &[(&str, String)],
        bytes: &[u8],
    ) -> Result<Vec<Vec<u8>>> {
        let at = Location::caller();
        let mut message = Writer::default();
        message.u64(items.len() as u64);
        for (name, value) in items {
            message.text(name).text(value);
        }
        message.bytes(bytes);
        let all = self.exchange(what, &message.finish(), None)?;

        let mut lists: Vec<Vec<(String, String)>> = Vec::with_capacity(all.len());
        let mut extra = Vec::with_capacity(all.len());
        for message in &all {
            let mut r = Reader::new("agreement", message);
            let mut list = Vec::new();
            for _ in 0..r.u64()? {
                list.push((r.text()?, r.text()?));
            }
            extra.push(r.bytes()?.to_vec());
            lists.push(list);
        }
        let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
        for i in 0..longest {
            let item = |list: &Vec<(String, String)>| list.get(i).cloned();
            let first = item(&lists[0]);
            if lists.iter().all(|l| item(l) == first) {
                continue;
            }
            let names: Vec<Option<String>> = lists.iter().map(|l| item(l).map(|x| x.0)).collect();
            let same_name = names.iter().all(|n| *n == names[0]);
            let text = |list: &Vec<(String, String)>| match item(list) {
                None => "nothing".into(),
                Some((_, value)) if same_name => value,
                Some((name, value)) => format!("{name} {value}"),
            };
            let values = self.numbered(lists.iter().map(text));
            let name = names.into_iter().flatten().next().filter(|_| same_name);
            return Err(Error::Disagreement {
                what: format!("{what} at {at}"),
                item: name.unwrap_or_else(|| format!("item {i}")),
                ranks: odd_ranks(&values),
                values,
            });
        }
        Ok(extra)
    }

    /// Collective exchange of success or failure: if any rank passes an error, all ranks fail. A
    /// rank that failed gets its own error back, unless its error is a consequence of another
    /// rank's error; all other ranks get [`Error::PeerFailed`]. `what` names the step in that
    /// error.
    ///
    /// ```
    /// # use iris_heap::{Error, World};
    /// let error = World::run_threads(2, |world| -> Result<(), Error> {
    ///     let mine = match world.rank() {
    ///         0 => Ok(vec![1.0, 2.0]),
    ///         _ => Err(Error::other(std::io::Error::other("no such file"))),
    ///     };
    ///     let _weights = world.all_ok("loading the weights", mine)?;
    ///     Ok(())
    /// });
    /// assert_eq!(error.unwrap_err().to_string(), "no such file");
    /// ```
    ///
    /// # Errors
    /// [`Error::PeerFailed`]; this rank's own error; errors of [`World::barrier`].
    #[track_caller]
    pub fn all_ok<T>(&self, what: &str, mine: Result<T>) -> Result<T> {
        self.all_ok_with(what, mine, |_| Vec::new()).map(|(value, _)| value)
    }

    /// Does [`World::all_ok`] and, if no rank failed, gathers the bytes that `told` makes of each
    /// rank's value, in the same exchange.
    #[track_caller]
    pub(crate) fn all_ok_with<T>(
        &self,
        what: &str,
        mine: Result<T>,
        told: impl FnOnce(&T) -> Vec<u8>,
    ) -> Result<(T, Vec<Vec<u8>>)> {
        let distance = mine.as_ref().map_or_else(|e| 1 + Distance::of(e) as u64, |_| 0);
        let mut message = Writer::default();
        message.u64(distance);
        match &mine {
            Ok(value) => message.bytes(&told(value)),
            Err(error) => message.text(&error.to_string()),
        };
        let all = match self.exchange(what, &message.finish(), None) {
            Ok(all) => all,
            // This rank's own error is the nearer one, and peers that have learned of it may have left.
            Err(error) => return self.note(mine.and(Err(error))),
        };
        let mut failed = mine.as_ref().err().map(|error| (distance, error.clone()));
        let mut gathered = Vec::with_capacity(self.size());
        for (rank, message) in all.iter().enumerate() {
            let mut r = Reader::new("outcome", message);
            match r.u64()? {
                0 => gathered.push(r.bytes()?.to_vec()),
                distance if failed.as_ref().is_none_or(|(least, _)| distance < *least) => {
                    let (what, message) = (what.into(), r.text()?);
                    failed = Some((distance, Error::PeerFailed { rank, what, message }));
                }
                _ => {}
            }
        }
        match failed {
            None => Ok((mine?, gathered)),
            Some((_, error)) => self.note_returned(Err(error)),
        }
    }

    /// Exchanges file descriptors: returns duplicates of the descriptors of every rank, indexed by
    /// rank. Ranks may pass different numbers of descriptors.
    ///
    /// # Errors
    /// Errors of [`World::barrier`]; [`Error::Unsupported`] if the ranks are not on one host.
    #[track_caller]
    pub fn share_descriptors(&self, descriptors: Vec<OwnedFd>) -> Result<Vec<Vec<OwnedFd>>> {
        let count = Writer::default().u64(descriptors.len() as u64).finish();
        let counts = self.collective("descriptors", &count)?;
        let counts = counts.iter().map(|it| Ok(Reader::new("descriptors", it).u64()? as usize));
        let counts = counts.collect::<Result<Vec<_>>>()?;
        let step = self.step("descriptors", Location::caller());
        let _sequence = lock(&self.inner.sequence);
        self.note_returned(self.inner.bootstrap.share_descriptors(descriptors, &counts, &step))
    }

    /// Exchanges objects between threads: returns the object of every rank, indexed by rank.
    ///
    /// # Errors
    /// Errors of [`World::barrier`]; [`Error::Unsupported`] unless [`World::same_process`].
    #[track_caller]
    pub fn share_objects(&self, object: Object) -> Result<Vec<Object>> {
        self.collective("objects", &[])?;
        let step = self.step("objects", Location::caller());
        let _sequence = lock(&self.inner.sequence);
        self.note_returned(self.inner.bootstrap.share_objects(object, &step))
    }

    /// Combines an error of a collective step on the host with the fault that a kernel of this rank
    /// left before, because the fault may be the reason why a peer is absent. Returns the error
    /// alone if it is the cause of the fault.
    fn after_fault(&self, then: Error) -> Error {
        let controls = self.inner.controls();
        let mut faults = controls.iter().filter_map(|control| control.fault_error());
        match faults.next().filter(|fault| !root_error::explains(&then, fault)) {
            Some(fault) => Error::AfterFault { fault: Box::new(fault), then: Box::new(then) },
            None => then,
        }
    }

    /// Publishes, on every open heap of this world, the collective step that this rank is in;
    /// `None` ends the step. If kernels of peers wait for this rank, the peers' errors name the
    /// step.
    fn publish_step(&self, step: Option<&str>) {
        self.inner.controls().iter().for_each(|control| control.publish_host_step(step));
    }

    pub(crate) fn step(&self, kind: &str, at: &Location<'_>) -> Step {
        Step {
            what: if kind == END_OF_RANK { kind.into() } else { format!("{kind} at {at}") },
            deadline: Instant::now() + self.inner.settings.host_deadline(),
            on_missing: None,
            numbers: self.hosts().numbers(),
        }
    }

    /// Pairs the value of each rank with the number by which errors name that rank.
    pub(crate) fn numbered(
        &self,
        values: impl IntoIterator<Item = String>,
    ) -> Vec<(usize, String)> {
        let number = |(rank, value)| (self.hosts().number(rank), value);
        values.into_iter().enumerate().map(number).collect()
    }

    /// Does [`World::exchange`] and records its error as returned to the program.
    #[track_caller]
    pub(crate) fn collective(&self, kind: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.note(self.exchange(kind, bytes, None))
    }

    /// Exchanges bytes once, and checks that all ranks sent the same tag (kind, call site and
    /// number of the exchange). Does not record its error: the caller must do so by [`World::note`]
    /// if it returns the error to the program.
    #[track_caller]
    pub(crate) fn exchange(
        &self,
        kind: &str,
        bytes: &[u8],
        on_missing: Option<OnMissing>,
    ) -> Result<Vec<Vec<u8>>> {
        let at = Location::caller();
        self.check_process(kind)?;
        if *lock(&self.inner.closed) {
            return Err(Error::Closed { what: "the world" });
        }
        let mut sequence = lock(&self.inner.sequence);
        *sequence += 1;
        let tag = format!("{kind} at {at} (exchange {sequence})");
        let message = Writer::default().text(&tag).bytes(bytes).finish();
        let step = Step { on_missing, ..self.step(kind, at) };
        self.publish_step(Some(&step.what));
        let all = self.inner.bootstrap.allgather(&message, &step);
        self.publish_step(None);
        let all = all.map_err(|error| self.after_fault(self.describe(error)))?;
        let mut tags = Vec::with_capacity(all.len());
        let mut contents = Vec::with_capacity(all.len());
        for message in &all {
            let mut r = Reader::new("exchange", message);
            tags.push(r.text()?);
            contents.push(r.bytes()?.to_vec());
        }
        if tags.iter().any(|t| *t != tag) {
            let calls = self.numbered(tags);
            return Err(Error::Mismatch { ranks: odd_ranks(&calls), calls });
        }
        Ok(contents)
    }
}
