use super::{Operation, Order, Place};

/// Vector clocks: which operations of other threads each thread has seen, derived only from the
/// orders of accesses.
pub(super) struct Clocks {
    threads: Vec<Vec<u32>>,
    /// For each word, by slot: clock that a thread joins when it acquires the word; empty before
    /// the first release of the word.
    words: Vec<Vec<u32>>,
    /// Clocks of memory that is accessed without atomics, by slot.
    cells: Vec<CellClock>,
}

#[derive(Default)]
struct CellClock {
    written: Option<(usize, u32)>,
    read: Vec<(usize, u32)>,
}

impl Clocks {
    pub(super) fn new(threads: usize) -> Self {
        Self { threads: vec![vec![0; threads]; threads], words: Vec::new(), cells: Vec::new() }
    }

    /// Records an operation of `thread`: on the word or cell `slot` or, if it is a barrier, of all
    /// threads in `meeting`. Returns the location of the access if it races with an earlier
    /// operation.
    pub(super) fn perform(
        &mut self,
        thread: usize,
        op: &Operation,
        slot: usize,
        meeting: &[usize],
    ) -> Option<Place> {
        self.threads[thread][thread] += 1;
        match *op {
            Operation::Load { order, .. } => self.acquire(thread, slot, order),
            Operation::Store { order, .. } => {
                if let Some(known) = self.words.get_mut(slot) {
                    known.clear();
                }
                self.release(thread, slot, order);
            }
            // A failed compare-and-exchange is treated as if it had synchronised, because the
            // thread repeats it until it succeeds.
            Operation::Add { order, .. } | Operation::CompareExchange { order, .. } => {
                self.acquire(thread, slot, order);
                self.release(thread, slot, order);
            }
            Operation::Read { place } => return self.plain(thread, place, slot, false),
            Operation::Write { place, .. } => return self.plain(thread, place, slot, true),
            Operation::Vote { .. } | Operation::Boundary => {
                let mut joint = vec![0; self.threads.len()];
                meeting.iter().for_each(|&other| join(&mut joint, &self.threads[other]));
                meeting.iter().for_each(|&other| self.threads[other].clone_from(&joint));
                meeting.iter().for_each(|&other| self.threads[other][other] += 1);
            }
            Operation::Part | Operation::Join | Operation::Pause => {}
        }
        None
    }

    fn acquire(&mut self, thread: usize, slot: usize, order: Order) {
        if matches!(order, Order::Acquire | Order::AcqRel)
            && let Some(known) = self.words.get(slot)
        {
            join(&mut self.threads[thread], known);
        }
    }

    fn release(&mut self, thread: usize, slot: usize, order: Order) {
        if matches!(order, Order::Release | Order::AcqRel) {
            let known = at(&mut self.words, slot);
            known.resize(self.threads.len(), 0);
            join(known, &self.threads[thread]);
        }
    }

    fn plain(&mut self, thread: usize, place: Place, slot: usize, write: bool) -> Option<Place> {
        if matches!(place, Place::Unchecked { .. }) {
            return None;
        }
        let knows = &self.threads[thread];
        let cell = at(&mut self.cells, slot);
        let before = |&(other, time): &(usize, u32)| knows[other] >= time;
        let race = !cell.written.iter().all(before) || write && !cell.read.iter().all(before);
        let now = (thread, knows[thread]);
        if write {
            cell.written = Some(now);
            cell.read.clear();
        } else {
            cell.read.retain(|(other, _)| *other != thread);
            cell.read.push(now);
        }
        race.then_some(place)
    }
}

/// Element `slot` of `all`. If `all` is shorter, default elements are appended first.
fn at<T: Default>(all: &mut Vec<T>, slot: usize) -> &mut T {
    if all.len() <= slot {
        all.resize_with(slot + 1, T::default);
    }
    &mut all[slot]
}

fn join(clock: &mut [u32], other: &[u32]) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}
