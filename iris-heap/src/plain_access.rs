//! Mutual exclusion between copies by the host and CPU kernels that access the same bytes without
//! atomics.
//!
//! A GEMM library and vectorised conversions make plain accesses, so a concurrent copy of their
//! operands would be undefined behaviour even if the copy is atomic. So each launch announces the
//! bytes of its operands while it runs ([`Access::of_kernel`]), and a copy waits for conflicting
//! launches: for launches that write bytes that the copy reads, and for launches that access bytes
//! that the copy writes. Launches end by their own deadlines, so this wait needs no deadline. A
//! program that syncs its stream before it touches operands never waits here.
//!
//! Launches and copies take turns, so that neither can keep the other out by following one another.
//! A copy also waits for launches that were already waiting when the copy arrived. When an access
//! ends, it marks the accesses that waited for it as begun, so no later access can overtake them. A
//! launch does not wait for waiting copies, because such a copy may wait for another rank's launch,
//! whose kernels may wait for this launch.

use std::ops::Range;
use std::sync::{Condvar, Mutex, PoisonError};

use crate::util::lock;

/// Range of addresses that is read or written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Address range in this process.
    pub bytes: Range<u64>,
    /// Whether the bytes are written; otherwise they are only read.
    pub written: bool,
}

impl Span {
    fn conflicts(&self, other: &Span) -> bool {
        let overlap = self.bytes.start.max(other.bytes.start) < self.bytes.end.min(other.bytes.end);
        overlap && (self.written || other.written)
    }
}

/// Kinds of access that exclude each other. Accesses of one kind may overlap, because copies are
/// atomic and kernels are ordered by their protocols.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Party {
    Kernel,
    Copy,
}

/// All accesses of this process that have begun or wait, in the order of their numbers. The list is
/// global, because ranks that are threads share one mapping of each segment.
struct Active {
    next: u64,
    spans: Vec<Entry>,
}

/// One address range (span) of an access, in the list of all spans.
struct Entry {
    /// Number of the access.
    access: u64,
    party: Party,
    span: Span,
    /// Whether the access has begun; otherwise it waits.
    begun: bool,
}

impl Entry {
    /// Whether the access of this span, which has not begun, must wait for the access of `other`.
    fn waits_for(&self, other: &Entry) -> bool {
        let turn = match self.party {
            Party::Kernel => other.begun,
            Party::Copy => other.begun || other.access < self.access,
        };
        self.party != other.party && turn && self.span.conflicts(&other.span)
    }
}

impl Active {
    /// Begins all accesses that need not wait any more, the oldest first.
    fn begin_next(&mut self) {
        let mut start = 0;
        while let Some(&Entry { access, begun, .. }) = self.spans.get(start) {
            let len = self.spans[start..].iter().take_while(|entry| entry.access == access).count();
            let own = start..start + len;
            let waits = |entry: &Entry| self.spans.iter().any(|other| entry.waits_for(other));
            if !begun && !self.spans[own.clone()].iter().any(waits) {
                self.spans[own].iter_mut().for_each(|entry| entry.begun = true);
            }
            start += len;
        }
    }
}

static ACTIVE: Mutex<Active> = Mutex::new(Active { next: 0, spans: Vec::new() });
static BEGUN: Condvar = Condvar::new();

/// Guard of an access in progress, by the access's number; the access ends when the guard is
/// dropped.
#[derive(Debug)]
pub struct Access(u64);

impl Access {
    /// Announces the operands of a launch that is about to run, and waits for copies in progress on
    /// them.
    pub fn of_kernel(operands: &[Span]) -> Access {
        Access::begin(Party::Kernel, operands)
    }

    /// Begins a copy, after waiting for launches that conflict with the copy: launches that write
    /// bytes that the copy reads, or access bytes that the copy writes.
    pub(crate) fn of_copy(spans: &[Span]) -> Access {
        Access::begin(Party::Copy, spans)
    }

    fn begin(party: Party, spans: &[Span]) -> Access {
        let mut active = lock(&ACTIVE);
        let access = active.next;
        active.next += 1;
        let entry = |span: &Span| Entry { access, party, span: span.clone(), begun: false };
        active.spans.extend(spans.iter().filter(|span| !span.bytes.is_empty()).map(entry));
        active.begin_next();
        let waits = |active: &mut Active| {
            active.spans.iter().any(|entry| entry.access == access && !entry.begun)
        };
        drop(BEGUN.wait_while(active, waits).unwrap_or_else(PoisonError::into_inner));
        Access(access)
    }
}

impl Drop for Access {
    fn drop(&mut self) {
        let mut active = lock(&ACTIVE);
        active.spans.retain(|entry| entry.access != self.0);
        active.begin_next();
        BEGUN.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    fn span(bytes: Range<u64>, written: bool) -> [Span; 1] {
        [Span { bytes, written }]
    }

    /// Start of the address range of this test, which no mapping of another test contains.
    const BASE: u64 = 1;

    #[test]
    fn what_excludes_nobody_does_not_wait() {
        let _reader = Access::of_kernel(&span(BASE..BASE + 8, false));
        let _writer = Access::of_kernel(&span(BASE + 8..BASE + 16, true));
        drop(Access::of_copy(&span(BASE..BASE + 8, false)));
        drop(Access::of_copy(&span(BASE + 16..BASE + 20, true)));
        drop(Access::of_copy(&span(BASE + 8..BASE + 8, true)));
        drop(Access::of_kernel(&span(BASE..BASE + 16, true)));
    }

    /// Waits until `count` accesses to bytes of `span` are waiting or in progress, or `order` has
    /// an entry.
    fn until_come(span: &Span, count: usize, order: &Mutex<Vec<&str>>) {
        let is_there = |entry: &&Entry| entry.span.bytes == span.bytes;
        while lock(&ACTIVE).spans.iter().filter(is_there).count() < count && lock(order).is_empty()
        {
            std::thread::yield_now();
        }
    }

    /// Tests the turns: if a copy arrives while a launch waits for another copy, the new copy
    /// begins after that launch, and the next launch begins after the new copy.
    #[test]
    fn launches_and_copies_take_turns() {
        let own = &span(BASE + 200..BASE + 208, true);
        let order = Mutex::new(Vec::new());
        let first = Access::of_copy(own);
        std::thread::scope(|scope| {
            let access =
                |name, begin: fn(&[Span]) -> Access, next: fn(&[Span]) -> Option<Access>| {
                    let order = &order;
                    scope.spawn(move || {
                        let access = begin(own);
                        lock(order).push(name);
                        drop(access);
                        if next(own).is_some() {
                            lock(order).push("next launch");
                        }
                    });
                };
            access("launch", Access::of_kernel, |own| Some(Access::of_kernel(own)));
            until_come(&own[0], 2, &order);
            access("copy", Access::of_copy, |_| None);
            until_come(&own[0], 3, &order);
            drop(first);
        });
        assert_eq!(order.into_inner().unwrap(), ["launch", "copy", "next launch"]);
    }

    #[test]
    fn a_copy_waits_for_a_launch_that_writes_and_the_reverse() {
        let bytes = BASE + 100..BASE + 108;
        for copy_first in [false, true] {
            let begin = |copy: bool| match copy {
                true => Access::of_copy(&span(bytes.clone(), false)),
                false => Access::of_kernel(&span(bytes.clone(), true)),
            };
            let (say, said) = channel();
            let first = begin(copy_first);
            std::thread::scope(|scope| {
                let say_second = say.clone();
                scope.spawn(move || {
                    let _second = begin(!copy_first);
                    say_second.send("second").unwrap();
                });
                // The second thread may start late, but it must never send before the first access
                // has ended.
                for _ in 0..100 {
                    std::thread::yield_now();
                }
                say.send("first").unwrap();
                drop(first);
            });
            assert_eq!(said.iter().take(2).collect::<Vec<_>>(), ["first", "second"]);
        }
    }
}
