//! Order of the ops (operator calls) of a heap across its streams.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;

use super::driver::{Driver, RawStream};
use super::event::GpuEvent;
use crate::error::{Error, Result};
use crate::util::unsupported;

/// Number of captures whose last op is remembered. A program rarely has even two captures in
/// progress at once.
const CAPTURES: usize = 64;

/// Last op of a heap, for which the next op on another stream must wait.
pub(super) struct Order {
    /// Last op that was issued outside of captures; `None` if there is none.
    live: Option<Last>,
    /// Newest captures with ops, at most [`CAPTURES`], newest first: number of the capture, and
    /// number of the stream of its last op. The event `captured_event` has been recorded after the
    /// last op of the newest capture. Captured ops run only when their graph is launched, so they
    /// are ordered only among each other.
    captured: VecDeque<(u64, u64)>,
    /// Whether ops have been issued on more than one stream. From then on, an event is recorded
    /// after each op.
    several: bool,
    live_event: GpuEvent,
    captured_event: GpuEvent,
    device: Arc<dyn Driver>,
}

/// Reference that keeps a stream alive.
pub(super) type Keeper = Arc<dyn Any + Send + Sync>;

enum Last {
    /// Last op's stream, which `_keeper` keeps alive; no event has been recorded after the op yet.
    Unrecorded { raw: RawStream, number: u64, _keeper: Keeper },
    /// Number of the last op's stream; `live_event` has been recorded after the op.
    Recorded(u64),
    /// Number of the last op's stream, which may have been destroyed. Recording the event after the
    /// op failed with this error.
    Lost(u64, Error),
}

impl Last {
    fn number(&self) -> u64 {
        match *self {
            Last::Unrecorded { number, .. } | Last::Recorded(number) | Last::Lost(number, _) => {
                number
            }
        }
    }
}

/// Stream on which work is about to be enqueued; it stays alive until the work is enqueued.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) raw: RawStream,
    /// Number of the stream, unique among all streams of the heap.
    pub(super) number: u64,
    /// Number of the capture in progress on the stream; `None` if there is none.
    pub(super) capture: Option<u64>,
}

impl Order {
    pub(super) fn new(device: Arc<dyn Driver>) -> Result<Order> {
        Ok(Order {
            live: None,
            captured: VecDeque::new(),
            several: false,
            live_event: GpuEvent::new(&device)?,
            captured_event: GpuEvent::new(&device)?,
            device,
        })
    }

    /// Forgets the last op, so that no later op waits for it. The caller must drop the returned
    /// value after releasing all locks that the destruction of a stream takes.
    #[must_use]
    pub(super) fn forget(&mut self) -> impl Sized + use<> {
        self.live.take()
    }

    /// Enqueues an op by calling `f`, ordered after the last op of the heap, on whichever stream
    /// that op is. `keeper` keeps the op's stream alive; `None` if the caller's stream cannot be
    /// kept alive.
    ///
    /// Ops in a capture are ordered among themselves. An op on a second stream of a capture is
    /// refused if an op of another capture was issued after the last op of this capture, because
    /// there is one event for all captures. The caller who launches the graph must order the graph
    /// with other work of the heap.
    ///
    /// Outside captures an error means that `f` was not called or has failed; an op that was
    /// enqueued never returns an error. If recording the event after the op fails and the op's
    /// stream may be destroyed, the next op on another stream fails before it is enqueued.
    pub(super) fn op(
        &mut self,
        place: Place,
        keeper: Option<Keeper>,
        f: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let Place { raw, number, capture } = place;
        self.behind_last(place)?;
        f()?;
        if let Some(id) = capture {
            // Recording an event in a capture enqueues no work, so the event is recorded after
            // every op.
            self.captured_event.record(raw)?;
            self.captured.retain(|&(capture, _)| capture != id);
            self.captured.truncate(CAPTURES - 1);
            self.captured.push_front((id, number));
            return Ok(());
        }
        let records = keeper.is_none() || self.several;
        let recorded = if records { self.live_event.record(raw) } else { Ok(()) };
        self.live = Some(match (recorded, keeper) {
            (Ok(()), _) if records => Last::Recorded(number),
            (_, Some(keeper)) => Last::Unrecorded { raw, number, _keeper: keeper },
            (Ok(()), None) => Last::Recorded(number),
            (Err(error), None) => Last::Lost(number, error),
        });
        Ok(())
    }

    /// Enqueues work by calling `f`, ordered after the last op of the heap, on another stream than
    /// the last op's. The next op does not wait for this work.
    pub(super) fn beside(&mut self, place: Place, f: impl FnOnce() -> Result<()>) -> Result<()> {
        let last = match place.capture {
            Some(id) => self.last_of(id).map(|(_, number)| number),
            None => self.live.as_ref().map(Last::number),
        };
        if last == Some(place.number) {
            let expected =
                "another stream, since the next op on this one would wait for the kernel";
            return Err(Error::invalid("stream of a kernel beside ops", "that of an op", expected));
        }
        self.behind_last(place)?;
        f()
    }

    /// Last op in capture number `id`: number of captures with later ops, and number of the op's
    /// stream; `None` if the capture has no op yet.
    fn last_of(&self, id: u64) -> Option<(usize, u64)> {
        let at = self.captured.iter().position(|&(capture, _)| capture == id)?;
        Some((at, self.captured[at].1))
    }

    /// Lets the stream `place` wait for the last op of the heap before it runs work that is enqueued
    /// after this call.
    fn behind_last(&mut self, place: Place) -> Result<()> {
        if let Some(id) = place.capture {
            return match self.last_of(id) {
                Some((age, last)) if last != place.number && age > 0 => Err(unsupported(
                    "an op on a second stream of a capture",
                    "an op of another capture was issued since the last op of this one, so that \
                     this one cannot be ordered behind it: capture one graph after the other",
                )),
                Some((_, last)) if last != place.number => {
                    self.captured_event.before(&*self.device, place.raw)
                }
                _ => Ok(()),
            };
        }
        let Some(last) = &self.live else { return Ok(()) };
        if last.number() == place.number {
            return Ok(());
        }
        if let Last::Lost(_, error) = last {
            return Err(error.clone());
        }
        if let Last::Unrecorded { raw, .. } = last {
            // SAFETY: `_keeper` keeps the stream alive.
            if unsafe { self.device.capture_of(*raw) }?.is_some() {
                return Err(unsupported(
                    "an op on a second stream of the heap",
                    "the stream of the op before is being captured, so that this one cannot \
                     be ordered behind it: end the capture first",
                ));
            }
            self.live_event.record(*raw)?;
            self.several = true;
        }
        self.live_event.before(&*self.device, place.raw)
    }
}
