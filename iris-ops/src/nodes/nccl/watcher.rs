//! Errors of NCCL or RCCL: the text that is reported for them, and the thread that looks for them.

use std::sync::Weak;
use std::time::{Duration, Instant};

use iris_heap::SymmetricHeap;
use iris_kernels::vendor::{self, Communicator};

use super::super::fabric::{StepError, fail};

/// Error to report in place of an error of the library, which does not say which of the ranks
/// `others` of this rank's steps has failed. If a rank is lost, the world learns the rank's number,
/// but perhaps later than the library sees the rank's connection close. So this function waits a
/// while for an error of the heap, which `outcome` returns.
pub(super) fn named(
    outcome: impl Fn() -> iris_heap::Result<()>,
    others: String,
    error: vendor::Error,
) -> iris_heap::Error {
    const GRACE: Duration = Duration::from_secs(2);
    let begun = Instant::now();
    while begun.elapsed() < GRACE {
        if let Err(known) = outcome() {
            return known;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    iris_heap::Error::other(StepError::Engine { others, error })
}

/// Thread that fails the heap if the library reports an error. The program's own thread may be
/// waiting in the driver and see no error. The watcher keeps neither the heap nor the communicator
/// alive, and ends soon after the communicator.
pub(super) struct Watcher {
    pub(super) heap: Weak<SymmetricHeap>,
    pub(super) communicator: Weak<Communicator>,
    pub(super) others: String,
}

impl Watcher {
    const PERIOD: Duration = Duration::from_millis(100);

    pub(super) fn start(self) -> iris_heap::Result<()> {
        let thread = std::thread::Builder::new().name("iris-nccl-watch".into());
        let started = thread.spawn(move || self.watch());
        started.map(drop).map_err(iris_heap::Error::other)
    }

    fn watch(self) {
        while let Some(communicator) = self.communicator.upgrade() {
            if let Err(error) = communicator.check() {
                let Some(heap) = self.heap.upgrade() else { return };
                let control = heap.control();
                fail(&heap, named(|| control.outcome(), self.others, error));
                // Aborts the communicator, as every check of a failed heap does.
                let _ = heap.check();
                return;
            }
            drop(communicator);
            std::thread::sleep(Self::PERIOD);
        }
    }
}
