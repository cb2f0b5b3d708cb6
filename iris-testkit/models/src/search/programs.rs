use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::{
    AssertUnwindSafe, Failure, Operation, Place, Rules, Scenario, Thread, ThreadId, panic,
};
use crate::Arena;

/// Next step of a thread, given the results of all its operations so far.
#[derive(Clone, Debug)]
pub(super) enum Next {
    Operation(Operation),
    /// Failed poll of the words in `watch`. Once one of them has changed, the thread can poll
    /// again, from node `head`.
    Blocked {
        head: u32,
        watch: Box<[(Place, i64)]>,
    },
    Ended,
    Failed(Failure),
}

struct Node {
    thread: usize,
    parent: Option<u32>,
    /// Whether the thread has diverged from its wave.
    parted: bool,
    /// Result of the parent's operation.
    result: i64,
    next: Next,
    /// Steps that one run of the program found, of which the one at this index is `next`. Each step
    /// follows the one before it if that has its [`foretold`] result.
    found: (Rc<[Next]>, usize),
    children: Vec<(i64, u32)>,
}

/// Programs of all threads, as trees of operation results.
pub(super) struct Programs<'a> {
    pub(super) threads: Vec<ThreadId>,
    scenario: &'a Scenario,
    rules: &'a Rules,
    nodes: Vec<Node>,
    roots: Vec<u32>,
}

/// Panic payload that unwinds out of a program at its first operation whose result is not known.
struct Suspended;

struct Replay {
    results: Vec<i64>,
    position: Cell<usize>,
    /// Operations after those with results. Only the result of the last one is not foretold.
    pending: RefCell<Vec<Operation>>,
}

/// Likely result of an operation, for which a run goes on to the next operation; `None` if the result
/// depends on memory. Barriers are expected to succeed on all threads.
fn foretold(op: &Operation) -> Option<i64> {
    match *op {
        Operation::Vote { ok } => Some(ok.into()),
        Operation::Boundary | Operation::Join => Some(1),
        Operation::Store { .. } | Operation::Write { .. } | Operation::Part => Some(0),
        _ => None,
    }
}

/// Whether a program goes on in the same way after `op` has returned `result` as after its
/// [`foretold`] result. Programs ignore the result of a write.
fn is_foretold(op: &Operation, result: i64) -> bool {
    let is_write = matches!(op, Operation::Store { .. } | Operation::Write { .. });
    is_write || foretold(op) == Some(result)
}

impl Arena for Replay {
    fn perform(&self, _thread: ThreadId, op: &Operation) -> i64 {
        let position = self.position.replace(self.position.get() + 1);
        self.results.get(position).copied().unwrap_or_else(|| {
            self.pending.borrow_mut().push(*op);
            foretold(op).unwrap_or_else(|| panic::resume_unwind(Box::new(Suspended)))
        })
    }
}

impl<'a> Programs<'a> {
    pub(super) fn new(scenario: &'a Scenario, rules: &'a Rules) -> Self {
        let threads = scenario.thread_ids();
        let mut programs = Self { threads, scenario, rules, nodes: Vec::new(), roots: Vec::new() };
        for thread in 0..programs.threads.len() {
            let (found, _) = programs.replay(thread, Vec::new());
            let root = programs.add(thread, None, false, 0, (found, 0));
            programs.roots.push(root);
        }
        programs
    }

    /// Adds a node whose next step is the one at the index of `found`.
    fn add(
        &mut self,
        thread: usize,
        parent: Option<u32>,
        parted: bool,
        result: i64,
        found: (Rc<[Next]>, usize),
    ) -> u32 {
        let (next, children) = (found.0[found.1].clone(), Vec::new());
        self.nodes.push(Node { thread, parent, parted, result, next, found, children });
        self.nodes.len() as u32 - 1
    }

    pub(super) fn root(&self, thread: usize) -> u32 {
        self.roots[thread]
    }

    pub(super) fn next(&self, node: u32) -> &Next {
        &self.nodes[node as usize].next
    }

    /// Whether the thread at `node` is inside one side of a branch and not at its end.
    pub(super) fn in_arm(&self, node: u32) -> bool {
        let Node { parted, next, .. } = &self.nodes[node as usize];
        let at_end = matches!(
            next,
            Next::Operation(Operation::Join | Operation::Vote { .. } | Operation::Boundary)
                | Next::Ended
                | Next::Failed(_)
        );
        *parted && !at_end
    }

    /// Node that the thread reaches if its next operation has this result.
    pub(super) fn advance(&mut self, node: u32, result: i64) -> u32 {
        let known = self.nodes[node as usize].children.iter().find(|(value, _)| *value == result);
        if let Some(&(_, child)) = known {
            return child;
        }
        let before = &self.nodes[node as usize];
        let thread = before.thread;
        let (known, at) = &before.found;
        let found = match &before.next {
            Next::Operation(op) if is_foretold(op, result) && at + 1 < known.len() => {
                (Rc::clone(known), at + 1)
            }
            _ => (self.replay(thread, self.results_then(node, result)).0, 0),
        };
        let parted = match before.next {
            Next::Operation(Operation::Part) => true,
            Next::Operation(Operation::Join | Operation::Vote { .. } | Operation::Boundary) => {
                false
            }
            _ => before.parted,
        };
        let child = self.add(thread, Some(node), parted, result, found);
        self.nodes[node as usize].children.push((result, child));
        if let Next::Operation(Operation::Pause) = self.nodes[child as usize].next {
            self.block(child, self.results_then(node, result));
        }
        child
    }

    /// Adds a node at which `thread` has failed.
    pub(super) fn fail(&mut self, thread: usize, failure: Failure) -> u32 {
        self.add(thread, None, false, 0, ([Next::Failed(failure)].into(), 0))
    }

    /// Operations on the path from one node to a descendant.
    pub(super) fn between(&self, from: u32, to: u32) -> Vec<Operation> {
        let mut ops = Vec::new();
        let mut at = to;
        while at != from {
            let Some(parent) = self.nodes[at as usize].parent else { return ops };
            if let Next::Operation(op) = self.nodes[parent as usize].next {
                ops.insert(0, op);
            }
            at = parent;
        }
        ops
    }

    /// Operations on the path from one node to a descendant, with their results.
    pub(super) fn results_between(&self, from: u32, to: u32) -> Vec<(Operation, i64)> {
        let mut ops = Vec::new();
        let mut at = to;
        while at != from {
            let Some(parent) = self.nodes[at as usize].parent else { break };
            if let Next::Operation(op) = self.nodes[parent as usize].next {
                ops.push((op, self.nodes[at as usize].result));
            }
            at = parent;
        }
        ops.reverse();
        ops
    }

    /// Results on the path to a node, and `last`.
    fn results_then(&self, mut node: u32, last: i64) -> Vec<i64> {
        let mut results = vec![last];
        while let Some(parent) = self.nodes[node as usize].parent {
            results.push(self.nodes[node as usize].result);
            node = parent;
        }
        results.reverse();
        results
    }

    /// Runs a program with the results of its first operations, up to an operation whose result is
    /// not foretold. Returns the steps after those with results, at least one, and the results.
    fn replay(&self, thread: usize, results: Vec<i64>) -> (Rc<[Next]>, Vec<i64>) {
        let replay = Replay { results, position: Cell::new(0), pending: RefCell::default() };
        let run = || Thread::run(self.threads[thread], self.scenario, self.rules, &replay);
        let end = match panic::catch_unwind(AssertUnwindSafe(run)) {
            Ok(()) => Some(Next::Ended),
            Err(payload) if payload.is::<Suspended>() => None,
            Err(payload) => Some(Next::Failed(match payload.downcast::<Failure>() {
                Ok(failure) => *failure,
                Err(_) => Failure::Other("the program panicked".into()),
            })),
        };
        let pending = replay.pending.into_inner().into_iter().map(Next::Operation);
        (pending.chain(end).collect(), replay.results)
    }

    /// Handles a failed poll: finds the first poll of the wait by letting the program poll the same
    /// words once more.
    fn block(&mut self, node: u32, mut results: Vec<i64>) {
        let thread = self.nodes[node as usize].thread;
        let mut seen = Looks::new(self, node);
        let mut looks: Vec<(Operation, i64)> = Vec::new();
        results.push(0);
        loop {
            let (next, back) = self.replay(thread, results);
            results = back;
            match &next[0] {
                Next::Operation(Operation::Pause) if !looks.is_empty() => break,
                Next::Operation(op) => match seen.last(op) {
                    Some(value) => {
                        looks.push((*op, value));
                        results.push(value);
                    }
                    None => return,
                },
                _ => return,
            }
        }
        // Walks back over as many operations as the wait polls; the operations must be the same
        // polls.
        let mut head = node;
        for (op, _) in looks.iter().rev() {
            let Some(parent) = self.nodes[head as usize].parent else { return };
            match &self.nodes[parent as usize].next {
                Next::Operation(before) if before == op => head = parent,
                _ => return,
            }
        }
        let watch =
            looks.iter().filter_map(|(op, value)| op.place().map(|p| (p, *value))).collect();
        self.nodes[node as usize].next = Next::Blocked { head, watch };
    }
}

/// Last value that each poll on the path to a node has read.
struct Looks(Vec<(Operation, i64)>);

impl Looks {
    fn new(programs: &Programs<'_>, mut node: u32) -> Self {
        let mut seen = Vec::new();
        while let Some(parent) = programs.nodes[node as usize].parent {
            if let Next::Operation(
                op @ (Operation::Load { .. }
                | Operation::CompareExchange { .. }
                | Operation::Read { .. }),
            ) = programs.nodes[parent as usize].next
            {
                seen.push((op, programs.nodes[node as usize].result));
            }
            node = parent;
        }
        Self(seen)
    }

    fn last(&mut self, op: &Operation) -> Option<i64> {
        self.0.iter().find(|(seen, _)| seen == op).map(|(_, value)| *value)
    }
}
