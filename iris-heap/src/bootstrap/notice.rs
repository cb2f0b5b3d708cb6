//! Messages to the user while a rank waits for others.

use std::fmt;
use std::io::Write;
use std::time::{Duration, Instant};

/// Shows the user a line, because a program that waits silently for minutes looks hung. The line
/// goes to `tracing` if the program has set up a subscriber, else to stderr.
pub(crate) fn notice(text: fmt::Arguments<'_>) {
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{text}");
    } else {
        // The line is a single write, so that lines of several ranks do not mix. Errors are
        // ignored, because stderr may be closed.
        let _ = std::io::stderr().write_all(format!("iris: {text}\n").as_bytes());
    }
}

/// Schedule of messages to the user during a wait: the first after a hundredth of the deadline, at
/// least one second, and then each time the waiting time has doubled.
pub(crate) struct Patience {
    started: Instant,
    pub(crate) until: Instant,
}

impl Patience {
    pub(crate) fn new(started: Instant, deadline: Instant) -> Patience {
        let hundredth = deadline.saturating_duration_since(started) / 100;
        Patience { started, until: started + hundredth.max(Duration::from_secs(1)) }
    }

    /// Time waited so far, if a notice is due; `None` otherwise.
    pub(crate) fn is_over(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let waited = now - self.started;
        (now >= self.until).then(|| {
            self.until = now + waited;
            waited
        })
    }
}
