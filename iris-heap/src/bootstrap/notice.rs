//! What a user should see while a rank waits for others: a line on stderr, not long after it began.

use std::fmt;
use std::io::Write;
use std::time::{Duration, Instant};

/// Says something to the user, once: to `tracing` if the program listens to it, and else on stderr,
/// since a program that waits for minutes and says nothing looks as if it hung.
pub(crate) fn notice(text: fmt::Arguments<'_>) {
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{text}");
    } else {
        // In one write, so that lines of several ranks do not mix. Nobody may be listening there any more.
        let _ = std::io::stderr().write_all(format!("iris: {text}\n").as_bytes());
    }
}

/// When to say that one still waits: after a hundredth of the time there is, 6 s if nothing else is
/// set and at least one, and again whenever the wait has doubled.
pub(crate) struct Patience {
    started: Instant,
    pub(crate) until: Instant,
}

impl Patience {
    pub(crate) fn new(started: Instant, deadline: Instant) -> Patience {
        let hundredth = deadline.saturating_duration_since(started) / 100;
        Patience { started, until: started + hundredth.max(Duration::from_secs(1)) }
    }

    /// How long it has been, if it is time to say so.
    pub(crate) fn is_over(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let waited = now - self.started;
        (now >= self.until).then(|| {
            self.until = now + waited;
            waited
        })
    }
}
