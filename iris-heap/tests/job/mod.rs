//! The ranks of a test as processes: the test program starts itself, once a rank.
//!
//! A program that uses it has an ignored test `rank_program`, which plays the part named in
//! [`CASE`] and ends with [`report`].

// Not every program that includes this uses all of it.
#![allow(dead_code, unreachable_pub)]

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use iris_heap::Error;

/// The variable that names a rank's part.
pub const CASE: &str = "HEAP_TEST_CASE";

/// What a rank's process says at its end.
pub fn report(result: Result<String, Error>) {
    match result {
        Ok(text) => println!("RESULT ok {text}"),
        Err(e) => println!("RESULT error {e}"),
    }
}

/// A variable of this process, or nothing.
pub fn env(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

/// A case's processes, and the folder they meet in.
pub struct Job {
    pub temp: tempfile::TempDir,
    pub case: &'static str,
    program: PathBuf,
    /// The most open files of a process, and of an ordinary user's where this one is root, who is
    /// above some limits. The variable `LIMIT` of a rank is another limit of its own.
    limit: Option<u32>,
    user: Option<u32>,
}

impl Job {
    pub fn new(case: &'static str) -> Job {
        let program = std::env::current_exe().unwrap();
        Job { temp: tempfile::tempdir().unwrap(), case, program, limit: None, user: None }
    }

    /// With a limit of open files, as an ordinary user of this number if this process is root's.
    pub fn limited(case: &'static str, limit: u32, user: u32) -> Job {
        let mut job = Job::new(case);
        job.limit = Some(limit);
        if rustix::process::geteuid().is_root() {
            // Where the program lies may be closed to others. Another process copies it: a process that a thread of
            // this one forks meanwhile would hold the copy open for writing, and the system runs no such file.
            let copy = job.temp.path().with_extension("program");
            let copied = Command::new("cp").args([&job.program, &copy]).status();
            assert!(copied.unwrap().success());
            std::os::unix::fs::chown(job.temp.path(), Some(user), Some(user)).unwrap();
            (job.program, job.user) = (copy, Some(user));
        }
        job
    }

    pub fn rank(&self, vars: &[(&str, &str)]) -> Child {
        self.start(self.case, vars)
    }

    /// A process of the job that plays another part.
    pub fn start(&self, case: &str, vars: &[(&str, &str)]) -> Child {
        let mut command = Command::new("/bin/sh");
        // `FILE_LIMIT` is in blocks of 512 bytes.
        let text = match self.limit {
            Some(limit) => format!("ulimit -n ${{LIMIT:-{limit}}} && exec \"$0\" \"$@\""),
            None => "ulimit -f ${FILE_LIMIT:-unlimited} && exec \"$0\" \"$@\"".into(),
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

    /// Ranks as a launcher starts them; `vars` for each.
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

    /// The results, by rank; nothing is left in the folder but notes of worlds that came to nothing.
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

    /// The one socket in the folder of this user, once it is there.
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

/// All files below a folder that are no folders.
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

/// What a process said, and how it ended.
#[derive(Debug)]
pub struct Said {
    pub status: ExitStatus,
    pub out: String,
    pub err: String,
}

impl Said {
    /// The line behind `RESULT`, or what there is instead.
    pub fn result(&self) -> String {
        match self.out.split_once("RESULT ") {
            Some((_, text)) => text.lines().next().unwrap_or_default().to_string(),
            None => format!("{}: {}", self.status, self.err),
        }
    }
}

/// Longest wait of a test for an event that must come, on a machine however busy. Shorter than the default
/// deadlines.
const LONG: Duration = Duration::from_secs(500);

/// Waits for a process; one that takes longer than any should is killed.
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

/// The result of a rank; one that takes longer than any should is killed.
#[track_caller]
pub fn result(child: Child) -> String {
    said(child).result()
}

/// Returns what `find` finds, as soon as it does.
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

/// Waits for a file that another process makes.
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

#[track_caller]
pub fn contains(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
}
