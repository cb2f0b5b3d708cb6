use super::{HashMap, Op, Order, Place};

/// Vector clocks: which operations of others each thread has seen, derived only from the orders of
/// accesses.
pub(super) struct Clocks {
    threads: Vec<Vec<u32>>,
    /// Clock that a thread joins when it acquires the word.
    words: HashMap<Place, Vec<u32>>,
    cells: HashMap<Place, CellClock>,
}

#[derive(Default)]
struct CellClock {
    written: Option<(usize, u32)>,
    read: Vec<(usize, u32)>,
}

impl Clocks {
    pub(super) fn new(threads: usize) -> Self {
        Self {
            threads: vec![vec![0; threads]; threads],
            words: HashMap::default(),
            cells: HashMap::default(),
        }
    }

    /// Records an operation, at a barrier that of all threads in `meeting`; returns its location if
    /// it races with an earlier operation.
    pub(super) fn perform(&mut self, thread: usize, op: &Op, meeting: &[usize]) -> Option<Place> {
        self.threads[thread][thread] += 1;
        match *op {
            Op::Load { place, order, .. } => self.acquire(thread, place, order),
            Op::Store { place, order, .. } => {
                self.words.remove(&place);
                self.release(thread, place, order);
            }
            // A failed exchange counts as if it had synchronised, because it is tried again.
            Op::Add { place, order, .. } | Op::CompareExchange { place, order, .. } => {
                self.acquire(thread, place, order);
                self.release(thread, place, order);
            }
            Op::Read { place } => return self.plain(thread, place, false),
            Op::Write { place, .. } => return self.plain(thread, place, true),
            Op::Vote { .. } | Op::Boundary => {
                let mut joint = vec![0; self.threads.len()];
                meeting.iter().for_each(|&other| join(&mut joint, &self.threads[other]));
                meeting.iter().for_each(|&other| self.threads[other].clone_from(&joint));
                meeting.iter().for_each(|&other| self.threads[other][other] += 1);
            }
            Op::Part | Op::Join | Op::Pause => {}
        }
        None
    }

    fn acquire(&mut self, thread: usize, place: Place, order: Order) {
        if matches!(order, Order::Acquire | Order::AcqRel)
            && let Some(known) = self.words.get(&place)
        {
            join(&mut self.threads[thread], known);
        }
    }

    fn release(&mut self, thread: usize, place: Place, order: Order) {
        if matches!(order, Order::Release | Order::AcqRel) {
            let known = self.words.entry(place).or_insert_with(|| vec![0; self.threads.len()]);
            join(known, &self.threads[thread]);
        }
    }

    fn plain(&mut self, thread: usize, place: Place, write: bool) -> Option<Place> {
        if matches!(place, Place::Unchecked { .. }) {
            return None;
        }
        let knows = &self.threads[thread];
        let cell = self.cells.entry(place).or_default();
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

fn join(clock: &mut [u32], other: &[u32]) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}
