//! Mutual exclusion between copies by the host and CPU kernels that access the same bytes without
//! atomics.
//!
//! A GEMM library and vectorised conversions make plain accesses, so a concurrent copy of their
//! operands would be undefined behaviour even if the copy is atomic. So each launch announces the
//! bytes of its operands while it runs ([`Access::of_kernel`]), and a copy waits for conflicting
//! launches: for launches that write bytes that the copy reads, and for launches that access bytes
//! that the copy writes. Launches end by their own deadlines, so this wait needs no deadline. A
//! program that syncs its stream before it touches operands never waits here.

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

/// Parties that exclude each other. Accesses of one party may overlap: copies are atomic, and the
/// protocols order kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Party {
    Kernel,
    Copy,
}

/// All accesses in progress in this process. The list is global, because ranks that are threads
/// share one mapping of each segment.
struct Active {
    next: u64,
    spans: Vec<(u64, Party, Span)>,
}

static ACTIVE: Mutex<Active> = Mutex::new(Active { next: 0, spans: Vec::new() });
static ENDED: Condvar = Condvar::new();

/// Access in progress; dropping this ends it.
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
        let blocked = |active: &mut Active| {
            let mut others = active.spans.iter().filter(|(_, other, _)| *other != party);
            others.any(|(_, _, other)| spans.iter().any(|span| span.conflicts(other)))
        };
        let waited = ENDED.wait_while(lock(&ACTIVE), blocked);
        let mut active = waited.unwrap_or_else(PoisonError::into_inner);
        let id = active.next;
        active.next += 1;
        active.spans.extend(spans.iter().map(|span| (id, party, span.clone())));
        Access(id)
    }
}

impl Drop for Access {
    fn drop(&mut self) {
        lock(&ACTIVE).spans.retain(|(id, ..)| *id != self.0);
        ENDED.notify_all();
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
                // The second party may start late, but it must never send before the first access
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
