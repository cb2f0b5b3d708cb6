//! Calls of an [`Observer`] for the executions that loom runs.

use std::sync::{Arc, Mutex};

use crate::search::Observer;
use crate::{Failure, Forbidden};

/// Observer of the executions of loom, and whether it may be called now.
pub(super) struct Watch {
    pub(super) observer: Arc<Mutex<dyn Observer + Send>>,
    /// Whether an execution is under way, so that the observer may be called.
    pub(super) is_on: bool,
}

impl Watch {
    /// Calls the observer, if an execution is under way.
    pub(super) fn tell(
        &self,
        call: impl FnOnce(&mut (dyn Observer + Send + 'static)) -> Result<(), Forbidden>,
    ) -> Result<(), Failure> {
        if !self.is_on {
            return Ok(());
        }
        match self.observer.lock() {
            Ok(mut observer) => call(&mut *observer).map_err(Failure::Rule),
            Err(_) => Err(Failure::Other("the observer panicked".into())),
        }
    }

    /// Reports the end of the current execution to the observer, if an execution is under way. loom
    /// shows the end of an execution only when it begins the next one.
    pub(super) fn end(&mut self) -> Result<(), Failure> {
        let ended = self.tell(|observer| observer.end());
        self.is_on = false;
        ended
    }

    pub(super) fn begin(&mut self) -> Result<(), Failure> {
        self.end()?;
        self.is_on = true;
        self.tell(|observer| {
            observer.begin();
            Ok(())
        })
    }
}

pub(super) type Watched = Option<Arc<Mutex<Watch>>>;

pub(super) fn with_watch(
    watched: &Watched,
    call: impl FnOnce(&mut Watch) -> Result<(), Failure>,
) -> Result<(), Failure> {
    match watched.as_ref().map(|watch| watch.lock()) {
        None => Ok(()),
        Some(Ok(mut watch)) => call(&mut watch),
        Some(Err(_)) => Err(Failure::Other("the observer panicked".into())),
    }
}
