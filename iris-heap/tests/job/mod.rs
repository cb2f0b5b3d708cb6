//! Harness for tests whose ranks are processes: the test program starts itself once per rank.
//!
//! A test program that uses this harness has an ignored test `rank_program`, which calls [`run`] with
//! its cases.

#![allow(dead_code, unreachable_pub, reason = "each test program uses only a part")]

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use iris_heap::{Error, Group, Stream, SymmetricHeap};

/// Name of the environment variable that selects the case that a rank runs.
pub const CASE: &str = "HEAP_TEST_CASE";

/// Name of a case, and the function that a rank runs.
pub type Case = (&'static str, fn() -> Result<String, Error>);

/// Runs the case that [`CASE`] selects, and prints its result for the test that started this process.
pub fn run(cases: &[Case]) {
    let name = std::env::var(CASE).expect("the other tests say what to do");
    let case = cases.iter().find(|case| case.0 == name);
    match case.unwrap_or_else(|| panic!("no case {name}")).1() {
        Ok(text) => println!("RESULT ok {text}"),
        Err(e) => println!("RESULT error {e}"),
    }
}

/// Launches a kernel that waits until the host aborts it.
pub fn launch_until_abort(heap: &SymmetricHeap, stream: &Stream) -> Result<(), Error> {
    let control = heap.memory().control;
    let kernel = move |_: Group| {
        while control.host_abort() == 0 {
            std::thread::yield_now();
        }
        control.check()
    };
    stream.launch_cpu("wait", 1, Arc::new(kernel))
}

/// Value of an environment variable; empty if it is not set.
pub fn env(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

/// Processes of one case, and the folder in which they meet each other.
pub struct Job {
    pub temp: tempfile::TempDir,
    pub case: &'static str,
    program: PathBuf,
    /// Limit of open files per process, and the user id under which the ranks run. The user id is
    /// needed if this process is root, which is exempt from some limits. The variable `LIMIT` of a
    /// rank overrides the limit for that rank.
    limit: Option<u32>,
    user: Option<u32>,
}

impl Job {
    pub fn new(case: &'static str) -> Job {
        let program = std::env::current_exe().unwrap();
        Job { temp: tempfile::tempdir().unwrap(), case, program, limit: None, user: None }
    }

    /// Makes a job with a limit of open files. If this process is root, its ranks run as an ordinary
    /// user: number `user`, 0 to 4, of five users of this process. Runs of the tests at the same time
    /// have different users, because descriptors in transit are limited per user.
    pub fn limited(case: &'static str, limit: u32, user: u32) -> Job {
        let mut job = Job::new(case);
        job.limit = Some(limit);
        let user = 30_000 + std::process::id() % 7000 * 5 + user;
        if rustix::process::geteuid().is_root() {
            // The program is copied, because its folder may be closed to other users. A separate
            // process makes the copy. If this process made it, a child that another thread forks at
            // the same time would hold the copy open for writing, and the system would refuse to
            // execute it.
            let copy = job.temp.path().with_extension("program");
            let copied = Command::new("cp").args([&job.program, &copy]).status();
            assert!(copied.unwrap().success());
            std::os::unix::fs::chown(job.temp.path(), Some(user), Some(user)).unwrap();
            (job.program, job.user) = (copy, Some(user));
        }
        job
    }

    /// User as whom the ranks run.
    pub fn user(&self) -> u32 {
        self.user.unwrap_or_else(|| rustix::process::geteuid().as_raw())
    }

    pub fn rank(&self, vars: &[(&str, &str)]) -> Child {
        self.start(self.case, vars)
    }

    /// Starts a process of the job that runs `case`, with the environment variables `vars`.
    pub fn start(&self, case: &str, vars: &[(&str, &str)]) -> Child {
        let mut command = Command::new("/bin/sh");
        // Limits are set by the shell. `FILE_LIMIT` counts blocks of 512 bytes; `WRAPPER` is a
        // command that starts the program, in jobs without a limit of open files.
        let text = match self.limit {
            Some(limit) => format!("ulimit -n ${{LIMIT:-{limit}}} && exec \"$0\" \"$@\""),
            None => "ulimit -f ${FILE_LIMIT:-unlimited} && exec ${WRAPPER:-} \"$0\" \"$@\"".into(),
        };
        command
            .args(["-c", &text])
            .arg(&self.program)
            .args(["--exact", "rank_program", "--ignored", "--nocapture", "--test-threads=1"])
            .env_clear()
            .env(CASE, case)
            .env("TMPDIR", self.temp.path())
            .envs(vars.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(user) = self.user {
            std::os::unix::process::CommandExt::uid(&mut command, user);
            std::os::unix::process::CommandExt::gid(&mut command, user);
        }
        command.spawn().unwrap()
    }

    /// Starts ranks as a launcher does; `vars` returns the environment variables of a rank.
    pub fn ranks(
        &self,
        size: usize,
        vars: impl Fn(usize) -> Vec<(&'static str, String)>,
    ) -> Vec<Child> {
        (0..size)
            .map(|r| {
                let (rank, size) = (r.to_string(), size.to_string());
                let extra = vars(r);
                let mut all = vec![("RANK", rank.as_str()), ("WORLD_SIZE", &size)];
                all.extend(extra.iter().map(|(n, v)| (*n, v.as_str())));
                self.rank(&all)
            })
            .collect()
    }

    /// Waits for the ranks, and returns their results by rank. Checks that the folder is empty
    /// except for notes of worlds that could not be formed.
    #[track_caller]
    pub fn results(&self, ranks: Vec<Child>) -> Vec<String> {
        let results = ranks.into_iter().map(result).collect();
        self.check_left();
        results
    }

    #[track_caller]
    pub fn check_left(&self) {
        let mut left = files(self.temp.path());
        left.retain(|file| file.extension().is_none_or(|e| e != "over"));
        assert!(left.is_empty(), "left behind: {left:?}");
    }

    /// Waits until there is a socket in the job's folder, and returns its path.
    #[track_caller]
    pub fn socket(&self) -> PathBuf {
        wait_for("a socket", || {
            files(self.temp.path()).into_iter().find(|file| file.extension().is_none())
        })
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.user.is_some() {
            let _ = std::fs::remove_file(&self.program);
        }
    }
}

/// All files below a folder, without the folders themselves.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => found.extend(files(&entry.path())),
            _ => found.push(entry.path()),
        }
    }
    found
}

/// Output and exit status of a process after its end.
#[derive(Debug)]
pub struct Said {
    pub status: ExitStatus,
    pub out: String,
    pub err: String,
}

impl Said {
    /// Text after `RESULT` in the output, or else the exit status and stderr.
    pub fn result(&self) -> String {
        match self.out.split_once("RESULT ") {
            Some((_, text)) => text.lines().next().unwrap_or_default().to_string(),
            None => format!("{}: {}", self.status, self.err),
        }
    }
}

/// Time limit for an event that must happen, even on a busy machine; shorter than the default
/// deadlines.
const LONG: Duration = Duration::from_secs(500);

/// Waits for a process and returns its output; kills it after [`LONG`].
#[track_caller]
pub fn said(mut child: Child) -> Said {
    let until = Instant::now() + LONG;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > until {
            child.kill().unwrap();
            break child.wait().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let (mut out, mut err) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    Said { status, out, err }
}

pub fn kill(child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Waits for a rank and returns its result; kills it after [`LONG`].
#[track_caller]
pub fn result(child: Child) -> String {
    said(child).result()
}

/// Polls `find` until it returns a value; panics after [`LONG`].
#[track_caller]
pub fn wait_for<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + LONG;
    loop {
        if let Some(found) = find() {
            return found;
        }
        assert!(Instant::now() < until, "not within {LONG:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until another process has created a file.
#[track_caller]
pub fn wait_for_file(path: impl AsRef<Path>) {
    let path = path.as_ref();
    wait_for(&path.to_string_lossy(), || path.exists().then_some(()));
}

pub fn no_vars(_: usize) -> Vec<(&'static str, String)> {
    Vec::new()
}

#[track_caller]
pub fn all_ok(case: &'static str, size: usize) {
    let job = Job::new(case);
    for (rank, text) in job.results(job.ranks(size, no_vars)).into_iter().enumerate() {
        assert!(text.starts_with("ok "), "rank {rank}: {text}");
    }
}

/// Runs ranks of a case with the variables of each, and checks that each result contains `words`.
#[track_caller]
pub fn all_say(
    case: &'static str,
    size: usize,
    vars: impl Fn(usize) -> Vec<(&'static str, String)>,
    words: &[&str],
) {
    let job = Job::new(case);
    all_contain(job.results(job.ranks(size, vars)), words);
}

#[track_caller]
pub fn all_contain(texts: impl IntoIterator<Item = impl AsRef<str>>, words: &[&str]) {
    for text in texts {
        contains(text.as_ref(), words);
    }
}

#[track_caller]
pub fn contains(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
}
