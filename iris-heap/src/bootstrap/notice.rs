//! Waits of a rank for others: messages to the user, and the deadline of a meeting.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::time::{Duration, Instant};

use crate::error::{Error, Result, list_ranks};

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

/// Wait of a rank for others at a meeting.
pub(super) struct MeetingWait {
    rank: usize,
    size: usize,
    started: Instant,
    deadline: Instant,
    patience: Patience,
}

impl MeetingWait {
    /// Begins the wait of `rank`, in a world of `size` ranks.
    pub(super) fn new(rank: usize, size: usize, deadline: Instant) -> MeetingWait {
        let started = Instant::now();
        MeetingWait { rank, size, started, deadline, patience: Patience::new(started, deadline) }
    }

    /// Tells the user now and then that this rank waits for the ranks `missing` at the place `at`.
    /// The text `more` is added to the message and to the error.
    ///
    /// # Errors
    /// [`Error::Absent`] at the deadline.
    pub(super) fn check(
        &mut self,
        missing: &[usize],
        at: &dyn fmt::Display,
        more: Option<&str>,
    ) -> Result<()> {
        let MeetingWait { rank, size, started, deadline, patience } = self;
        let now = Instant::now();
        if now >= *deadline {
            let more = more.map_or(String::new(), |more| format!(" ({more})"));
            let what = format!("rank {rank} of {size} at {at}{more}");
            return Err(Error::Absent { ranks: missing.to_vec(), what, waited: now - *started });
        }
        if let Some(waited) = patience.is_over() {
            let (missing, most) = (list_ranks(missing), *deadline - *started);
            let more = more.map_or(String::new(), |more| format!("; {more}"));
            notice(format_args!(
                "rank {rank} of {size} waits for rank {missing} at {at}: {waited:.1?} of {most:.1?}{more}"
            ));
        }
        Ok(())
    }

    /// Time until the deadline or the next message to the user, at most `limit`.
    pub(super) fn rest(&self, limit: Duration) -> Duration {
        let until = self.deadline.min(self.patience.until);
        until.saturating_duration_since(Instant::now()).min(limit)
    }
}

/// Longest wait of which the user was told, for each awaited thing. A later wait for the same thing
/// is told only when it takes twice as long, because the ranks of an idle server wait for rank 0
/// again and again.
#[derive(Debug, Default)]
pub(crate) struct ToldWaits(BTreeMap<String, Duration>);

impl ToldWaits {
    /// Whether to tell the user of a wait for `awaited` that has lasted `waited`. If true, the wait
    /// counts as told.
    pub(crate) fn is_news(&mut self, awaited: String, waited: Duration) -> bool {
        let longest = self.0.entry(awaited).or_default();
        let is_news = waited >= longest.saturating_mul(2);
        if is_news {
            *longest = waited;
        }
        is_news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_waits_are_told_of_until_they_are_usual() {
        let mut told = ToldWaits::default();
        let mut notices = |awaited: &str, seconds: u64| {
            // Seconds of a single wait at which notices are due.
            let due = (0..).map(|at| 7 << at).take_while(|&due| due <= seconds);
            due.filter(|&due| told.is_news(awaited.into(), Duration::from_secs(due))).count()
        };
        let idle: usize = (0..1000).map(|_| notices("rank 0", 30)).sum();
        assert_eq!(idle, 3, "after 7, 14 and 28 s of the first wait");
        assert_eq!([notices("rank 0", 120), notices("rank 1", 30)], [2, 3]);
    }
}
