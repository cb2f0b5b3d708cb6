//! Waits of host threads for enqueued work. Waiting threads also poll the engine that exchanges
//! data between nodes.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, MutexGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use iris_sync::Fault;

use super::Control;
use crate::error::{Error, Result};
use crate::util::lock;

/// Engine that runs the steps between nodes (exchanges of data with other nodes) on the streams of
/// a GPU, such as NCCL.
///
/// Host threads that wait for the device, check the heap or close the heap call
/// [`NodeEngine::attend`] repeatedly. If a rank is lost, a dedicated thread calls it too, because
/// the program may be waiting in the driver.
pub trait NodeEngine: fmt::Debug + Send + Sync {
    /// Checks the enqueued steps; a failed step becomes an error of the heap. If the heap has
    /// failed, `failed` is true: the engine then aborts all of its steps, so that work that is
    /// queued after them can run.
    fn attend(&self, failed: bool);

    /// Converts a fault of kind [`FaultKind::StepDiffers`](iris_sync::FaultKind::StepDiffers) into an
    /// error that names both ranks; `None` if the fault names no node or operator.
    fn explain(&self, fault: &Fault) -> Option<Error>;

    /// Releases the engine's resources: collective over the ranks with equal local ranks, after all
    /// steps have ended.
    ///
    /// # Errors
    /// Errors of the engine.
    fn close(&self) -> Result<()>;

    /// Returns the engine as `Any`, so that the crate that made it can downcast it to its own type.
    fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync>;
}

impl Control {
    /// Sets the engine that runs the steps between nodes; later calls have no effect.
    pub(crate) fn set_engine(&self, engine: Arc<dyn NodeEngine>) {
        let _ = self.engine.set(engine);
    }

    /// Engine that runs the steps between nodes, if they run on streams of a GPU.
    pub(crate) fn engine(&self) -> Option<&Arc<dyn NodeEngine>> {
        self.engine.get()
    }

    /// Polls the engine that runs the steps between nodes, if there is one. If the heap has failed
    /// while the program launches a graph, leaves the engine to a later poll.
    pub(crate) fn attend(&self) {
        let Some(engine) = self.engine() else { return };
        if !self.has_failed() {
            return engine.attend(false);
        }
        let _ending = match self.launching.try_lock() {
            Ok(ending) => ending,
            Err(TryLockError::Poisoned(ending)) => ending.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        engine.attend(true);
    }

    /// Starts a thread that aborts the steps between nodes of a failed heap. The program may wait
    /// for a step inside the driver, where it does not poll the engine, and only the end of the
    /// step ends that wait.
    pub(crate) fn end_steps(self: &Arc<Self>) {
        let Some(engine) = self.engine().cloned() else { return };
        let control = self.clone();
        let end = move || {
            let _ending = control.launching();
            engine.attend(true);
        };
        if let Err(error) = thread::Builder::new().name("iris-steps-end".into()).spawn(end) {
            tracing::warn!(%error, "no thread could be started that ends the steps between nodes");
        }
    }

    /// Locks so that launching a graph and ending the engine's steps exclude each other.
    pub(crate) fn launching(&self) -> MutexGuard<'_, ()> {
        lock(&self.launching)
    }

    /// Whether the heap has failed, on this rank or on a peer that reported it.
    pub(crate) fn has_failed(&self) -> bool {
        self.host_abort() != 0 || self.fault().is_some()
    }

    /// Polls the engine that runs the steps between nodes until `done` returns true. Returns at
    /// once if there is no engine; the caller then waits in the driver.
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
            // Most waits are short, so yield the processor for the first polls, and sleep only
            // after them.
            if looks < SPINS { thread::yield_now() } else { thread::sleep(PAUSE) }
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::abi::abort;
    use crate::{HeapOptions, SymmetricHeap, UniqueId, World};

    /// Stand-in for the library that runs steps between nodes ([`NodeEngine`]). It records whether the
    /// code under test has ended its steps.
    #[derive(Debug, Default)]
    struct Recorder {
        ended: AtomicBool,
    }

    impl Recorder {
        fn has_ended(&self) -> bool {
            self.ended.load(Ordering::SeqCst)
        }
    }

    impl NodeEngine for Recorder {
        fn attend(&self, failed: bool) {
            self.ended.fetch_or(failed, Ordering::SeqCst);
        }

        fn explain(&self, _: &Fault) -> Option<Error> {
            None
        }

        fn close(&self) -> Result<()> {
            Ok(())
        }

        fn as_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
            self
        }
    }

    fn heap_with_engine() -> Result<(Arc<SymmetricHeap>, Arc<Recorder>)> {
        let heap = SymmetricHeap::open(
            &World::from_unique_id(&UniqueId::new()?, 0, 1)?,
            HeapOptions::new(),
        )?;
        let engine = Arc::new(Recorder::default());
        heap.set_node_engine(engine.clone());
        Ok((heap, engine))
    }

    #[test]
    fn the_oldest_wait_counts_until_it_ends() {
        let control = Control::default();
        assert_eq!(control.waits_since(), None);
        let first = control.begin_wait();
        let second = control.begin_wait();
        assert_eq!(control.waits_since(), Some(first.began));
        let began = second.began;
        drop(first);
        assert_eq!(control.waits_since(), Some(began));
        drop(second);
        assert_eq!(control.waits_since(), None);
    }

    #[test]
    fn a_failed_engine_is_not_ended_while_a_graph_is_launched() -> Result<()> {
        let (heap, engine) = heap_with_engine()?;
        let launched = heap.launch_graph(|| {
            heap.control().set_host_abort(abort::USER);
            // The thread that notices the failure must not wait for the launch either.
            thread::scope(|scope| scope.spawn(|| heap.check()).join()).expect("no panic").is_err()
        })?;
        assert!(launched && !engine.has_ended());
        assert!(heap.check().is_err() && engine.has_ended());
        Ok(())
    }

    #[test]
    fn a_graph_of_a_failed_or_closed_heap_is_refused() -> Result<()> {
        let (heap, engine) = heap_with_engine()?;
        assert_eq!(heap.launch_graph(|| 7)?, 7);
        heap.control().set_host_abort(abort::USER);
        let refused = heap.launch_graph(|| panic!("launched"));
        assert!(matches!(refused, Err(Error::Aborted { .. })), "{refused:?}");
        assert!(engine.has_ended());

        let (heap, _) = heap_with_engine()?;
        heap.close()?;
        let refused = heap.launch_graph(|| panic!("launched"));
        assert!(matches!(refused, Err(Error::Closed { .. })), "{refused:?}");
        Ok(())
    }

    /// Tests that, with an engine, waits return a loss even if no kernel left a fault, because the
    /// loss may have ended an exchange.
    #[test]
    fn waits_beside_an_engine_return_a_loss() -> Result<()> {
        let (heap, _engine) = heap_with_engine()?;
        let (stream, x) = (heap.stream()?, heap.zeros::<f32>(4)?);
        let read = heap.read_on(&stream, x)?;
        heap.control().set_host_abort(abort::PEER_LOST);
        assert!(matches!(read.wait(), Err(Error::PeerLost { rank: 0 })));
        assert!(matches!(stream.sync(), Err(Error::PeerLost { rank: 0 })));
        Ok(())
    }

    #[test]
    fn a_launch_that_panics_does_not_keep_the_engine() -> Result<()> {
        let (heap, engine) = heap_with_engine()?;
        let launch = std::panic::AssertUnwindSafe(|| heap.launch_graph(|| panic!("a test")));
        assert!(std::panic::catch_unwind(launch).is_err());
        heap.control().set_host_abort(abort::USER);
        assert!(heap.check().is_err() && engine.has_ended());
        Ok(())
    }
}
