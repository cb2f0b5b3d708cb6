//! A progress bar for what takes longer than a second, where stderr is a terminal.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

pub(crate) struct Progress {
    what: &'static str,
    begun: Instant,
    total: u64,
    done: u64,
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Shown for rank 0 only.
    pub(crate) fn new(what: &'static str, rank: usize, total: usize) -> Progress {
        let total = if rank == 0 { total as u64 } else { 0 };
        Progress { what, begun: Instant::now(), total, done: 0, bar: None }
    }

    /// One step is done. Draws nothing where stderr is no terminal.
    pub(crate) fn step(&mut self) {
        self.done += 1;
        if self.total == 0 || self.begun.elapsed() < Duration::from_secs(1) {
            return;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::new(self.total).with_message(self.what);
            match ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len}, {eta} left") {
                Ok(style) => bar.with_style(style),
                Err(_) => bar,
            }
        });
        bar.set_position(self.done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
