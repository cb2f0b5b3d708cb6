//! Progress lines of rank 0 of a suite, and a watchdog: if no line comes for too long, the program
//! ends, because a hanging kernel may be impossible to stop.

use std::fmt;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::job::Said;

/// Progress line that rank 0 of a suite prints, and that the watchdog reads.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Line {
    /// All kernels are compiled; the number is the seconds that this took.
    Ready(f64),
    /// The case with this index begins.
    Begun(usize),
    /// The case with this index has succeeded; the second number is the seconds that it took.
    Done(usize, f64),
}

impl Line {
    /// Progress lines in `text`, in order; other lines are skipped.
    pub(crate) fn all(text: &str) -> impl DoubleEndedIterator<Item = Line> {
        text.lines().filter_map(Line::read)
    }

    fn read(text: &str) -> Option<Line> {
        let mut words = text.split(' ');
        match (words.next()?, words.next()?, words.next()) {
            ("ready", seconds, None) => Some(Line::Ready(seconds.parse().ok()?)),
            ("case", at, None) => Some(Line::Begun(at.parse().ok()?)),
            ("done", at, Some(seconds)) => {
                Some(Line::Done(at.parse().ok()?, seconds.parse().ok()?))
            }
            _ => None,
        }
    }

    /// Index of the case that begins; `None` for other progress lines.
    pub(crate) fn begun(self) -> Option<usize> {
        if let Line::Begun(at) = self { Some(at) } else { None }
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Line::Ready(seconds) => write!(f, "ready {seconds}"),
            Line::Begun(at) => write!(f, "case {at}"),
            Line::Done(at, seconds) => write!(f, "done {at} {seconds}"),
        }
    }
}

/// Interval at which the watchdog checks for new output.
const LOOK: Duration = Duration::from_millis(50);

/// Runs `work`, and meanwhile passes each progress line in `said` to `tell`. If a case has begun
/// and no line has come for `limit`, `late` is called once with the case's index.
pub(crate) fn watched<T>(
    said: &Said,
    limit: Option<Duration>,
    tell: impl Fn(Line) + Sync,
    late: impl Fn(usize) + Sync,
    work: impl FnOnce() -> T,
) -> T {
    let ended = Ended::default();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut told, mut case) = (0, None);
            loop {
                // Lines that were written before the work ended are passed on after its end, too.
                let last = ended.wait(LOOK);
                for line in Line::all(&said.text()).skip(told) {
                    told += 1;
                    case = line.begun().map(|at| (at, Instant::now()));
                    tell(line);
                }
                match (case, limit) {
                    _ if last => break,
                    (Some((at, since)), Some(limit)) if since.elapsed() > limit => {
                        case = None;
                        late(at);
                    }
                    _ => {}
                }
            }
        });
        // Dropping the guard stops the watchdog, even if `work` panics.
        let _end = End(&ended);
        work()
    })
}

#[derive(Default)]
struct Ended {
    flag: Mutex<bool>,
    change: Condvar,
}

impl Ended {
    /// Waits at most `time` for the end of the work; returns whether it has ended.
    fn wait(&self, time: Duration) -> bool {
        let flag = self.flag.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.change.wait_timeout_while(flag, time, |ended| !*ended);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

struct End<'a>(&'a Ended);

impl Drop for End<'_> {
    fn drop(&mut self) {
        *self.0.flag.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.change.notify_all();
    }
}

/// Ends the program at once with exit code 1, as [`end`].
pub(crate) fn give_up() -> ! {
    end(1)
}

/// Ends the program at once with this exit code, without exit handlers of libraries: a vendor's
/// handler may wait for a hanging kernel, or destroy objects that another thread is about to use.
/// The caller must have flushed stdout.
#[allow(unsafe_code, reason = "a function of the C library")]
pub(crate) fn end(code: u8) -> ! {
    unsafe extern "C" {
        safe fn _exit(status: std::ffi::c_int) -> !;
    }
    _exit(code.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::mpsc::channel;

    #[test]
    fn lines_are_read_as_they_are_written() {
        let lines = [Line::Ready(0.5), Line::Begun(7), Line::Done(7, 1.25)];
        let text: String = lines.iter().map(|line| format!("{line}\nsomething else\n")).collect();
        assert_eq!(Line::all(&text).collect::<Vec<_>>(), lines);
    }

    #[test]
    fn a_case_that_hangs_is_given_up_and_one_that_ends_is_not() {
        for (ends, expected) in [(true, None), (false, Some(3))] {
            let (said, (sender, receiver)) = (Said::default(), channel());
            let limit = Some(Duration::from_millis(100));
            let late = |at| sender.send(at).unwrap();
            let seen = watched(
                &said,
                limit,
                |_| (),
                late,
                || {
                    let mut to = said.clone();
                    writeln!(to, "{}", Line::Begun(3)).unwrap();
                    if ends {
                        writeln!(to, "{}", Line::Done(3, 0.0)).unwrap();
                    }
                    // A case that ends in time returns at once; if it did not, 1 s would be long
                    // enough for the watchdog to call `late`.
                    receiver.recv_timeout(Duration::from_secs(if ends { 1 } else { 60 })).ok()
                },
            );
            assert_eq!(seen, expected);
        }
    }

    #[test]
    fn what_was_said_last_is_told() {
        let said = Said::default();
        let told = Mutex::new(Vec::new());
        let tell = |line| told.lock().unwrap().push(line);
        watched(
            &said,
            None,
            tell,
            |_| (),
            || {
                writeln!(said.clone(), "{}", Line::Done(1, 2.0)).unwrap();
            },
        );
        assert_eq!(*told.lock().unwrap(), [Line::Done(1, 2.0)]);
    }
}
