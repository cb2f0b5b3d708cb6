//! Progress bar that appears on stderr, if it is a terminal, when work lasts two seconds or more.

use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Time after which the bar appears.
const PATIENCE: Duration = Duration::from_secs(2);

/// Bar with the number of steps done, the number of all steps, and the estimated time left. A
/// thread shows it, so it appears even while the first step lasts.
pub(crate) struct Progress {
    bar: ProgressBar,
    /// Thread that shows the bar, and the channel that tells it to stop.
    shows: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Progress {
    /// Makes a bar of `total` steps on rank 0; other ranks get a bar that never shows.
    pub(crate) fn new(what: &'static str, rank: usize, total: usize) -> Progress {
        let shown = rank == 0 && std::io::stderr().is_terminal();
        Progress::on(shown.then(ProgressDrawTarget::stderr), PATIENCE, what, total)
    }

    /// Makes a bar that never shows.
    pub(crate) fn hidden() -> Progress {
        Progress::on(None, PATIENCE, "", 0)
    }

    /// Makes a bar that appears on `target` after `patience`; without a target it never appears.
    fn on(
        target: Option<ProgressDrawTarget>,
        patience: Duration,
        what: &'static str,
        total: usize,
    ) -> Progress {
        let hidden = ProgressDrawTarget::hidden();
        let bar = ProgressBar::with_draw_target(Some(total as u64), hidden).with_message(what);
        // The style names no colours, so NO_COLOR does not matter.
        let style = ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len}, {eta} left");
        let bar = style.map_or_else(|_| bar.clone(), |style| bar.clone().with_style(style));
        let shows = target.map(|target| {
            let (end, ended) = channel();
            let shown = bar.clone();
            let show = move || {
                if ended.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
                    shown.set_draw_target(target);
                    shown.enable_steady_tick(Duration::from_millis(200));
                }
            };
            (end, thread::spawn(show))
        });
        Progress { bar, shows }
    }

    /// Counts one more step as done.
    pub(crate) fn step(&self) {
        self.bar.inc(1);
    }

    /// Calls `print`, which prints lines, while the bar is erased.
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
    use std::io;
    use std::sync::{Arc, Mutex};

    use indicatif::TermLike;

    use super::*;

    /// Terminal for tests that keeps the text that is drawn on it; `|` marks each erased line.
    #[derive(Clone, Debug, Default)]
    struct Screen(Arc<Mutex<String>>);

    impl Screen {
        fn text(&self) -> String {
            self.0.lock().unwrap().clone()
        }

        fn put(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }
    }

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            100
        }

        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn write_line(&self, line: &str) -> io::Result<()> {
            self.put(line)
        }

        fn write_str(&self, text: &str) -> io::Result<()> {
            self.put(text)
        }

        fn clear_line(&self) -> io::Result<()> {
            self.put("|")
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    fn on(screen: &Screen, patience: Duration) -> Progress {
        let target = ProgressDrawTarget::term_like(Box::new(screen.clone()));
        Progress::on(Some(target), patience, "steps", 5)
    }

    #[test]
    fn a_long_wait_shows_the_steps_of_all_and_erases_the_bar() {
        let screen = Screen::default();
        let progress = on(&screen, Duration::ZERO);
        (0..3).for_each(|_| progress.step());
        for _ in 0..20_000 {
            if screen.text().contains("] 3/5, ") {
                break;
            }
            thread::sleep(Duration::from_millis(1));
        }
        drop(progress);
        let text = screen.text();
        assert!(text.contains("steps [") && text.contains("] 3/5, "), "{text:?}");
        assert!(text.trim_end().ends_with('|'), "{text:?}");
    }

    #[test]
    fn short_waits_and_waits_without_a_terminal_show_nothing_and_end_at_once() {
        let (screen, patience) = (Screen::default(), Duration::from_secs(3600));
        for progress in [on(&screen, patience), Progress::on(None, Duration::ZERO, "steps", 5)] {
            (0..3).for_each(|_| progress.step());
            assert_eq!((progress.bar.position(), progress.bar.length()), (3, Some(5)));
            // A bar that did not wait for its patience would show within this time.
            thread::sleep(Duration::from_millis(50));
            assert!(progress.bar.is_hidden());
        }
        assert_eq!(screen.text(), "");
    }
}
