//! Progress bar for waits of two seconds and more, if stderr is a terminal.

use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Wait after which the bar shows.
const PATIENCE: Duration = Duration::from_secs(2);

/// Number of steps done of all, with the time that is left. It shows by itself, also while the first step lasts.
pub(crate) struct Progress {
    bar: ProgressBar,
    /// Thread that shows the bar, and what tells it that there is nothing more to show.
    shows: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// A bar of `total` steps. Only rank 0 has one.
    pub(crate) fn new(what: &'static str, rank: usize, total: usize) -> Progress {
        Progress::on(rank == 0 && std::io::stderr().is_terminal(), what, total)
    }

    fn on(shown: bool, what: &'static str, total: usize) -> Progress {
        let target = ProgressDrawTarget::hidden();
        let bar = ProgressBar::with_draw_target(Some(total as u64), target).with_message(what);
        // Without colours, whatever NO_COLOR says.
        let style = ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len}, {eta} left");
        let bar = style.map_or_else(|_| bar.clone(), |style| bar.clone().with_style(style));
        let shows = shown.then(|| {
            let (end, ended) = channel();
            let shown = bar.clone();
            let show = move || {
                if ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                    shown.set_draw_target(ProgressDrawTarget::stderr());
                    shown.enable_steady_tick(Duration::from_millis(200));
                }
            };
            (end, thread::spawn(show))
        });
        Progress { bar, shows }
    }

    /// One step is done.
    pub(crate) fn step(&self) {
        self.bar.inc(1);
    }

    /// Prints lines by `print`, with the bar erased meanwhile.
    pub(crate) fn suspended<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.shows.take() {
            drop(end);
            let _ = thread.join();
            self.bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_counted_and_nothing_waits_for_the_bar() {
        for shown in [false, true] {
            let begun = std::time::Instant::now();
            let progress = Progress::on(shown, "steps", 5);
            (0..3).for_each(|_| progress.step());
            assert_eq!((progress.bar.position(), progress.bar.length()), (3, Some(5)));
            assert!(progress.bar.is_hidden() || begun.elapsed() >= PATIENCE);
        }
    }
}
