//! Progress of compilations, shown on stderr as one line that is redrawn, if stderr is a terminal.
//!
//! Levels of progress nest: the variants of an operator are one level, and the kernels of a variant
//! are a level inside it. The line shows the current number and the total of each level. It appears
//! after `PATIENCE`, has no colours, and is erased at the end.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

/// Duration of a compilation after which the progress line is first shown.
const PATIENCE: Duration = Duration::from_secs(2);

/// Interval between two drawings of the line.
const INTERVAL: Duration = Duration::from_millis(250);

/// Terminal sequence that erases the line at the cursor.
const ERASE: &str = "\r\x1b[2K";

/// Progress line of the process. It shows the levels of only one thread at a time, because ranks
/// that are threads of one process compile the same kernels. Levels of other threads are ignored
/// until that thread's levels have ended.
struct Gauge {
    patience: Duration,
    interval: Duration,
    /// Function that opens the output for the line; returns `None` if the line must not be shown.
    open: fn() -> Option<Box<dyn Write + Send>>,
    state: Mutex<State>,
}

struct State {
    /// Thread whose levels the line shows; `None` if no level is open.
    owner: Option<ThreadId>,
    /// Open levels, nested, the outermost first.
    levels: Vec<Count>,
    /// Name of the source that is being compiled, and its architecture.
    source: String,
    begun: Instant,
    drawing: Option<(Sender<()>, JoinHandle<()>)>,
}

/// Progress of a level: number of the current step, from 1, and number of all its steps.
struct Count {
    unit: &'static str,
    current: usize,
    total: usize,
}

/// Progress line (gauge) that all threads of the process share.
static GAUGE: Mutex<Option<Arc<Gauge>>> = Mutex::new(None);

fn gauge() -> Arc<Gauge> {
    let open = || {
        let stderr = io::stderr();
        stderr.is_terminal().then(|| Box::new(stderr) as Box<dyn Write + Send>)
    };
    let mut gauge = GAUGE.lock().unwrap_or_else(PoisonError::into_inner);
    gauge.get_or_insert_with(|| Gauge::new(PATIENCE, INTERVAL, open)).clone()
}

/// Count of steps on the progress line, which shows several counts at a time, one inside the other.
/// The count ends when this value is dropped. When the last count ends, the line is erased.
#[must_use = "the level ends when it is dropped"]
pub struct Level {
    /// Progress line that shows this count; `None` if this count is not shown.
    gauge: Option<Arc<Gauge>>,
}

impl Level {
    /// Begins a level of `total` steps, such as 3 steps of the unit "kernel". The line is shown if
    /// the level lasts longer than two seconds and stderr is a terminal. If `shown` is false,
    /// nothing is shown: only one of several processes should show a line.
    pub fn new(unit: &'static str, total: usize, shown: bool) -> Level {
        match shown {
            true => gauge().begin(unit, total),
            false => Level { gauge: None },
        }
    }

    /// Begins the next step of the level.
    pub fn step(&self) {
        let Some(gauge) = &self.gauge else { return };
        if let Some(count) = gauge.lock().levels.last_mut() {
            count.current += 1;
        }
    }
}

impl Drop for Level {
    fn drop(&mut self) {
        if let Some(gauge) = &self.gauge {
            gauge.end();
        }
    }
}

/// Runs `compile` and meanwhile shows `what`, the name of the source: in the line of the current
/// level, or in a new line if no level has begun.
pub(super) fn compiling<T>(what: &str, compile: impl FnOnce() -> T) -> T {
    gauge().naming(what, compile)
}

impl Gauge {
    fn new(
        patience: Duration,
        interval: Duration,
        open: fn() -> Option<Box<dyn Write + Send>>,
    ) -> Arc<Gauge> {
        let (owner, levels, source) = (None, Vec::new(), String::new());
        let state = State { owner, levels, source, begun: Instant::now(), drawing: None };
        Arc::new(Gauge { patience, interval, open, state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(self: &Arc<Self>, unit: &'static str, total: usize) -> Level {
        let this = thread::current().id();
        let mut state = self.lock();
        if *state.owner.get_or_insert(this) != this {
            return Level { gauge: None };
        }
        state.levels.push(Count { unit, current: 0, total });
        if state.levels.len() == 1 {
            state.begun = Instant::now();
            state.drawing = self.draw();
        }
        Level { gauge: Some(self.clone()) }
    }

    fn end(&self) {
        let mut state = self.lock();
        state.levels.pop();
        if !state.levels.is_empty() {
            return;
        }
        let drawing = state.drawing.take();
        drop(state);
        // The line must be erased before another thread may begin a line.
        if let Some((end, thread)) = drawing {
            drop(end);
            let _ = thread.join();
        }
        self.lock().owner = None;
    }

    /// Starts the thread that draws the line; `None` if the line is hidden or the thread cannot be
    /// started.
    fn draw(self: &Arc<Self>) -> Option<(Sender<()>, JoinHandle<()>)> {
        let mut output = (self.open)()?;
        let (end, ended) = channel();
        let gauge = self.clone();
        let draw = move || {
            let mut wait = gauge.patience;
            while ended.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                // Erase and draw in a single write, so that no other output comes between the two.
                let _ = output.write_all(format!("{ERASE}{}", gauge.lock().line()).as_bytes());
                let _ = output.flush();
                wait = gauge.interval;
            }
            if wait == gauge.interval {
                let _ = output.write_all(ERASE.as_bytes());
            }
        };
        let thread = thread::Builder::new().name("iris-progress".into()).spawn(draw).ok()?;
        Some((end, thread))
    }

    fn naming<T>(self: &Arc<Self>, what: &str, compile: impl FnOnce() -> T) -> T {
        let owned = self.lock().owner == Some(thread::current().id());
        let level = (!owned).then(|| self.begin("kernel", 1));
        if owned || level.as_ref().is_some_and(|level| level.gauge.is_some()) {
            self.lock().source = what.into();
        }
        if let Some(level) = &level {
            level.step();
        }
        compile()
    }
}

impl State {
    /// Line to be drawn, such as `iris: compiling gemm.cu for sm_90a: variant 1/2, kernel 3/7, 12 s`.
    fn line(&self) -> String {
        let mut line = format!("iris: compiling {}: ", self.source);
        for Count { unit, current, total } in &self.levels {
            // While a library is loaded, no step has begun yet. The line then shows the first step.
            let _ = write!(line, "{unit} {}/{total}, ", (*current).clamp(1, *total.max(&1)));
        }
        let _ = write!(line, "{} s", self.begun.elapsed().as_secs());
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text that the progress line (gauge) under test has drawn so far.
    static DRAWN: Mutex<String> = Mutex::new(String::new());

    /// Lock that makes the tests run one after the other, because they share [`DRAWN`].
    static ONE: Mutex<()> = Mutex::new(());

    struct Sink;

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            DRAWN.lock().expect("no panic").push_str(&String::from_utf8_lossy(bytes));
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn gauge(patience: Duration) -> Arc<Gauge> {
        DRAWN.lock().expect("no panic").clear();
        Gauge::new(patience, Duration::from_millis(1), || Some(Box::new(Sink)))
    }

    /// Waits until the progress line (gauge) under test has shown a text that contains `part`.
    fn await_drawn(part: &str) {
        for _ in 0..20_000 {
            if DRAWN.lock().expect("no panic").contains(part) {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
        panic!("no {part:?} in {:?}", DRAWN.lock());
    }

    #[test]
    fn slow_work_shows_each_level_with_its_total_and_erases_the_line() {
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let gauge = gauge(Duration::from_millis(1));
        let variants = gauge.begin("variant", 2);
        variants.step();
        let kernels = gauge.begin("kernel", 7);
        kernels.step();
        kernels.step();
        gauge.naming("gemm.cu for sm_90a", || {
            await_drawn("iris: compiling gemm.cu for sm_90a: variant 1/2, kernel 2/7, 0 s");
        });
        // Levels that another thread begins while this thread has the line are not shown.
        let other = gauge.clone();
        let ignored = thread::spawn(move || other.begin("other", 9).gauge.is_none());
        assert!(ignored.join().expect("no panic"));
        drop(kernels);
        variants.step();
        await_drawn(": variant 2/2, ");
        drop(variants);
        let drawn = DRAWN.lock().expect("no panic").clone();
        assert!(drawn.ends_with(ERASE) && !drawn.contains("other"), "{drawn:?}");
        // The line must contain no colour codes and no line breaks.
        assert!(!drawn.replace(ERASE, "").contains(['\x1b', '\n']), "{drawn:?}");
    }

    #[test]
    fn a_kernel_outside_of_all_levels_has_a_line_of_its_own() {
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let gauge = gauge(Duration::from_millis(1));
        gauge.naming("own.cu for sm_80", || await_drawn("own.cu for sm_80: kernel 1/1, "));
        assert!(gauge.lock().owner.is_none());
    }

    #[test]
    fn quick_work_and_work_without_a_terminal_show_nothing_even_after_a_panic() {
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let quick = gauge(Duration::from_secs(3600));
        assert_eq!(quick.naming("quick.cu", || 7), 7);
        let panicking = || quick.naming("panics.cu", || panic!("on purpose"));
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(panicking)).unwrap_err();
        assert!(quick.lock().owner.is_none());
        let silent = Gauge::new(Duration::ZERO, Duration::ZERO, || None);
        silent.naming("silent.cu", || assert!(silent.lock().drawing.is_none()));
        assert_eq!(*DRAWN.lock().expect("no panic"), "");
    }
}
