//! Waits of host threads for enqueued work. While they wait, these threads also poll the engine of
//! the steps between nodes.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use iris_sync::Fault;

use super::Control;
use crate::error::{Error, Result};
use crate::util::lock;

/// Engine of the steps between nodes on the streams of a GPU, such as NCCL.
///
/// Host threads that wait for the device, check the heap or close the heap call
/// [`NodeEngine::attend`] repeatedly. Nothing else can end a step whose peer is lost.
pub trait NodeEngine: fmt::Debug + Send + Sync {
    /// Checks the enqueued steps; a failed step becomes an error of the heap. If the heap has
    /// failed, `failed` is true: the engine then ends all of its steps, so that work that is queued
    /// after the steps continues.
    fn attend(&self, failed: bool);

    /// Converts a fault of kind [`FaultKind::StepDiffers`](iris_sync::FaultKind::StepDiffers) into an
    /// error that names both ranks; `None` if the fault names no node or operator.
    fn explain(&self, fault: &Fault) -> Option<Error>;

    /// Releases the engine's resources: collective over the ranks with equal local ranks, after all
    /// steps are over.
    ///
    /// # Errors
    /// Errors of the engine.
    fn close(&self) -> Result<()>;

    /// The engine as its own type, for the crate that made it.
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

impl Control {
    /// Sets the engine of the steps between nodes; later calls have no effect.
    pub(crate) fn set_engine(&self, engine: Arc<dyn NodeEngine>) {
        let _ = self.engine.set(engine);
    }

    /// Engine of the steps between nodes, if they run on streams of a GPU.
    pub(crate) fn engine(&self) -> Option<&Arc<dyn NodeEngine>> {
        self.engine.get()
    }

    /// Polls the engine of the steps between nodes, if there is one.
    pub(super) fn attend(&self) {
        if let Some(engine) = self.engine() {
            engine.attend(self.host_abort() != 0 || self.fault().is_some());
        }
    }

    /// Polls the engine of the steps between nodes until `done`. Returns at once if there is no
    /// engine; the caller then waits in the driver.
    pub(crate) fn attend_until(&self, done: impl Fn() -> bool) {
        const SPINS: u32 = 1000;
        const PAUSE: Duration = Duration::from_micros(50);
        if self.engine().is_none() {
            return;
        }
        let mut looks = 0_u32;
        while !done() {
            self.attend();
            looks = looks.saturating_add(1);
            // Most waits are short: yield the processor first, and sleep only then.
            if looks < SPINS { std::thread::yield_now() } else { std::thread::sleep(PAUSE) }
        }
    }

    /// Records that the host waits for enqueued work, until the guard is dropped.
    pub(crate) fn begin_wait(&self) -> HostWait<'_> {
        let began = Instant::now();
        lock(&self.waits).push(began);
        HostWait { control: self, began }
    }

    /// Start time of the oldest wait in progress of a host thread; `None` if no host thread waits.
    pub(crate) fn waits_since(&self) -> Option<Instant> {
        lock(&self.waits).iter().min().copied()
    }
}

/// Guard of a host wait for enqueued work; see [`Control::begin_wait`].
pub(crate) struct HostWait<'a> {
    control: &'a Control,
    began: Instant,
}

impl Drop for HostWait<'_> {
    fn drop(&mut self) {
        let mut waits = lock(&self.control.waits);
        if let Some(at) = waits.iter().position(|&began| began == self.began) {
            waits.swap_remove(at);
        }
    }
}
