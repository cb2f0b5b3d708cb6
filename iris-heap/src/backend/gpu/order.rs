//! The order of the ops of a heap over several streams.

use std::any::Any;
use std::sync::Arc;

use super::driver::{Driver, RawStream};
use super::event::GpuEvent;
use crate::error::{Error, Result};
use crate::util::unsupported;

/// Which op was issued last: the next one on another stream waits for it.
pub(super) struct Order {
    /// Ops that run.
    live: Option<Last>,
    /// Ops that are captured, and the number of the capture: they run when their graph does, so
    /// that they are ordered among themselves only.
    captured: Option<(u64, u64)>,
    /// Whether ops are issued on more than one stream: from then on each leaves an event.
    several: bool,
    live_event: GpuEvent,
    captured_event: GpuEvent,
    device: Arc<dyn Driver>,
}

/// What keeps a stream alive.
pub(super) type Keeper = Arc<dyn Any + Send + Sync>;

enum Last {
    /// Of this stream, which is kept alive; nothing is recorded behind the op yet.
    Unrecorded { raw: RawStream, number: u64, _keeper: Keeper },
    /// Of the stream of this number; the event is recorded behind it.
    Recorded(u64),
    /// An op on the stream of this number, which may be gone, behind which the event could not be recorded, with the
    /// error.
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

/// A stream on which something is about to be enqueued, and which is alive meanwhile.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) raw: RawStream,
    /// What no other stream of the heap has had.
    pub(super) number: u64,
    /// The number of the capture that is under way on it.
    pub(super) capture: Option<u64>,
}

impl Order {
    pub(super) fn new(device: Arc<dyn Driver>) -> Result<Order> {
        Ok(Order {
            live: None,
            captured: None,
            several: false,
            live_event: GpuEvent::new(&device)?,
            captured_event: GpuEvent::new(&device)?,
            device,
        })
    }

    /// No op waits for an earlier one any more. The caller drops what is returned once it holds no lock
    /// that a stream's end takes.
    #[must_use]
    pub(super) fn forget(&mut self) -> impl Sized + use<> {
        self.live.take()
    }

    /// Enqueues an op by `f` behind the last op of the heap, on whatever stream that was. `keeper` keeps
    /// the op's stream alive, if anything can.
    ///
    /// Ops of a capture are ordered among themselves; how their graph is ordered with other work of
    /// the heap is for the caller to see to, who launches it.
    ///
    /// Except in a capture, an error says that `f` was not called or has failed: an op that was enqueued is never
    /// told as an error. If its event cannot be recorded and its stream may be gone, the next op on another stream fails
    /// before it is enqueued.
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
            // In a capture this enqueues nothing.
            self.captured_event.record(raw)?;
            self.captured = Some((id, number));
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

    /// Enqueues what `f` does behind the last op of the heap, on a stream other than that op's. The
    /// next op does not wait for it.
    pub(super) fn beside(&mut self, place: Place, f: impl FnOnce() -> Result<()>) -> Result<()> {
        let last = match (self.captured, place.capture) {
            (Some((id, number)), Some(capture)) if capture == id => Some(number),
            (_, Some(_)) => None,
            (_, None) => self.live.as_ref().map(Last::number),
        };
        if last == Some(place.number) {
            let expected = "another: the next op there would wait for the kernel";
            return Err(Error::invalid("stream of a kernel beside ops", "that of an op", expected));
        }
        self.behind_last(place)?;
        f()
    }

    /// Lets what is enqueued here next begin after the last op of the heap.
    fn behind_last(&mut self, place: Place) -> Result<()> {
        if let Some(id) = place.capture {
            return match self.captured {
                Some((capture, last)) if capture == id && last != place.number => {
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
            // SAFETY: the stream is kept alive.
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
