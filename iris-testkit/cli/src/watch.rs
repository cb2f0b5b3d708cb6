//! What rank 0 of a suite says of its cases, and somebody who listens: one that says nothing for too
//! long is given up, since a kernel that hangs may be one that nobody can end.

use std::fmt;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::job::Said;

/// A line of rank 0.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Line {
    /// The kernels were ready after so many seconds.
    Ready(f64),
    /// The case of this number begins.
    Begun(usize),
    /// It has ended well, after so many seconds.
    Done(usize, f64),
}

impl Line {
    /// The lines of a text, without what others wrote there.
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

    /// The number of the case that begins.
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

/// How often it is looked whether something was said.
const LOOK: Duration = Duration::from_millis(50);

/// Does `work`, and meanwhile passes each line of `said` on to `tell`. When a case has begun and no
/// line has come for `limit` after that, `late` is called once with its number.
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
                // What was said before the end is still told after it.
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
        // Also if the work panics, or its listener would listen for ever.
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
    /// Waits so long at most; whether it has ended.
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

/// Ends the program with exit code 1, whatever its other threads do. What libraries do at the end of a program is
/// left out: a vendor's may wait for a kernel that hangs, or take away what another thread is about to use.
#[allow(unsafe_code, reason = "a function of the C library")]
pub(crate) fn give_up() -> ! {
    unsafe extern "C" {
        safe fn _exit(status: std::ffi::c_int) -> !;
    }
    _exit(1)
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
                    // Long enough for one that listens to find nothing; at once where it finds something.
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
