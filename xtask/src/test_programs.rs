//! Test programs of the workspace, several at once.
//!
//! `cargo test` runs the programs one after the other, and many of them leave cores idle: they wait
//! for deadlines or for other ranks, or have fewer tests than the machine has cores. The searches
//! and compilations of the models fill these gaps.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::level::Level;

/// Device files whose presence means that the machine has a GPU.
const GPUS: [&str; 2] = ["/dev/nvidiactl", "/dev/kfd"];

/// Folder of the package whose tests only compute. These tests run at the same time as all others,
/// at a low priority, so that they hardly delay other tests, whose ranks wait for each other.
const COMPUTES: &str = "models";

/// Priority of the tests of [`COMPUTES`], as an argument of `nice`; `check-protocols` has a lower
/// one.
const NICE: &str = "10";

/// Job of the test step: a test program, or the tests in the documentation.
struct Job {
    name: String,
    command: Command,
    /// Whether the job has no deadlines or waits between processes; such a job runs at low priority.
    computes: bool,
}

/// Jobs that wait for a thread that runs them.
type Queue = Mutex<VecDeque<Job>>;

/// Results of jobs that have ended.
#[derive(Default)]
struct Results {
    /// Names of the jobs that have failed.
    failed: Vec<String>,
    /// Duration in seconds of each job that has passed, by name.
    seconds: BTreeMap<String, f64>,
}

/// Environment variables that a command sets.
type Environment = Vec<(OsString, OsString)>;

/// Builds the tests that the cargo command `build` names, and runs their programs with the
/// environment variables of `build`. Also runs `doc`, which tests the documentation's examples.
/// Prints the result of each program when it ends. At [`Level::Full`] the programs also run ignored
/// tests.
///
/// # Errors
/// Names of the programs with failed tests, after their output has been printed.
pub(crate) fn run(root: &Path, mut build: Command, doc: Command, level: Level) -> Result<()> {
    build.args(["--no-run", "--message-format=json-render-diagnostics"]);
    let built = build.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let built = built.context("cargo did not start")?;
    if !built.status.success() {
        bail!("the tests are not built: {}", built.status);
    }
    let environment =
        build.get_envs().filter_map(|(name, value)| Some((name.into(), value?.into())));
    let messages = String::from_utf8_lossy(&built.stdout);
    let mut jobs = programs(&messages, &environment.collect(), level)?;
    if jobs.is_empty() {
        bail!("cargo built no test program");
    }
    jobs.push(Job { name: "documentation".into(), command: doc, computes: false });
    run_jobs(jobs, at_once(), &root.join("target/test-output"))
}

/// Number of programs that run at once, in addition to one that only computes. It is 1 on a machine
/// with a GPU, because tests there compare the free memory of the device; elsewhere it is one more
/// than the number of cores, because programs that wait for deadlines leave their core idle.
fn at_once() -> usize {
    let has_gpu = GPUS.iter().any(|file| Path::new(file).exists());
    let cores = thread::available_parallelism().map_or(1, usize::from);
    if has_gpu { 1 } else { cores + 1 }
}

/// Jobs for the test programs that cargo names in `messages`, one JSON message per line.
fn programs(messages: &str, environment: &Environment, level: Level) -> Result<Vec<Job>> {
    let mut jobs = Vec::new();
    for line in messages.lines() {
        let message: Value =
            serde_json::from_str(line).with_context(|| format!("message of cargo: {line}"))?;
        let is_test = message["profile"]["test"] == true;
        let (Some(program), true) = (message["executable"].as_str(), is_test) else { continue };
        let manifest = Path::new(message["manifest_path"].as_str().unwrap_or_default());
        let package = manifest.parent().context("a manifest without a folder")?;
        let folder = package.file_name().unwrap_or_default();
        let target = message["target"]["name"].as_str().unwrap_or_default();
        let name = format!("{} {target}", folder.to_string_lossy());
        let computes = folder == COMPUTES;
        let mut command = match computes {
            true => Command::new("nice"),
            false => Command::new(program),
        };
        if computes {
            command.args(["-n", NICE, program]);
        }
        // Folder and variable that `cargo test` sets.
        command
            .current_dir(package)
            .env("CARGO_MANIFEST_DIR", package)
            .envs(environment.iter().cloned());
        if level == Level::Full {
            command.arg("--include-ignored");
        }
        jobs.push(Job { name, command, computes });
    }
    Ok(jobs)
}

/// Runs all jobs: one job at a time of the jobs that only compute, and at the same time up to
/// `at_once` of the others. Those start first that took longest the last time, because a long job at
/// the end would leave cores idle. The output of each job, and their durations, go to files in
/// `folder`.
fn run_jobs(mut jobs: Vec<Job>, at_once: usize, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let record = folder.join("seconds.json");
    // Without a record, or with a damaged one, jobs run in their order.
    let before = fs::read(&record).ok().and_then(|text| serde_json::from_slice(&text).ok());
    let before: BTreeMap<String, f64> = before.unwrap_or_default();
    let expected = |job: &Job| before.get(&job.name).copied().unwrap_or(f64::INFINITY);
    jobs.sort_by(|one, other| expected(other).total_cmp(&expected(one)));
    let (compute, wait): (Vec<_>, Vec<_>) = jobs.into_iter().partition(|job| job.computes);
    let queues = [(compute, 1), (wait, at_once)]
        .map(|(jobs, at_once)| (Mutex::new(VecDeque::from(jobs)), at_once));
    let results = Mutex::new(Results { seconds: before, ..Results::default() });
    thread::scope(|scope| {
        for (queue, at_once) in &queues {
            for _ in 0..*at_once {
                scope.spawn(|| run_queue(queue, folder, &results));
            }
        }
    });
    let Results { failed, seconds } = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    let recorded = fs::write(&record, serde_json::to_vec_pretty(&seconds)?);
    if !failed.is_empty() {
        bail!("failed tests in {}", failed.join(", "));
    }
    recorded.with_context(|| record.display().to_string())
}

/// Runs the jobs of a queue until it is empty, prints the result of each, and adds it to `results`.
fn run_queue(queue: &Queue, folder: &Path, results: &Mutex<Results>) {
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    while let Some(Job { name, command, .. }) = next() {
        let start = Instant::now();
        let log = folder.join(name.replace(' ', "-")).with_extension("log");
        let outcome = run_to_file(command, &log);
        // The lock is held while the result is printed, so that results are not mixed.
        let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
        let took = start.elapsed();
        if print_result(&name, outcome, took) {
            results.seconds.insert(name, took.as_secs_f64());
        } else {
            results.failed.push(name);
        }
    }
}

/// Runs a command whose output goes to the file `log`; returns its status and output. The output
/// does not go to a pipe, because processes that the command leaves running would keep a pipe open.
fn run_to_file(mut command: Command, log: &Path) -> Result<(ExitStatus, String)> {
    let file = File::create(log).with_context(|| log.display().to_string())?;
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let status = command.status().context("it did not start")?;
    let output = fs::read(log).with_context(|| log.display().to_string())?;
    Ok((status, String::from_utf8_lossy(&output).into_owned()))
}

/// Prints the result of a job, with all of its output if it has failed; returns whether it has
/// passed.
fn print_result(name: &str, outcome: Result<(ExitStatus, String)>, took: Duration) -> bool {
    let (passed, text) = match outcome {
        Ok((status, output)) if status.success() => (true, summary(&output)),
        Ok((status, output)) => (false, format!("{status}\n{output}")),
        Err(error) => (false, format!("{error:#}")),
    };
    // A closed stdout must not hide the result of the tests.
    let _ = writeln!(std::io::stdout(), "{name} ({:.1} s): {text}", took.as_secs_f64());
    passed
}

/// Summary of the output of a program that has passed: the numbers of passed and ignored tests, and
/// a line for each test that was ignored for a reason.
fn summary(output: &str) -> String {
    let results = output.lines().filter_map(|line| line.strip_prefix("test result: ok. "));
    let count = |what: &str| -> usize {
        let of = |line: &str| {
            let (before, _) = line.split_once(what)?;
            before.rsplit([' ', ';']).next()?.parse::<usize>().ok()
        };
        results.clone().filter_map(of).sum()
    };
    let mut text = format!("{} passed", count(" passed"));
    match count(" ignored") {
        0 => {}
        ignored => text.push_str(&format!(", {ignored} ignored")),
    }
    // Rust's harness prints `ignored, REASON`, the harness of iris-testkit `ignored (REASON)`.
    let has_reason = |line: &&str| {
        line.split_once(" ... ignored")
            .is_some_and(|(_, reason)| !matches!(reason, "" | " (as above)"))
    };
    output.lines().filter(has_reason).for_each(|line| text.push_str(&format!("\n  {line}")));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(name: &str, text: &str) -> Job {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", text]);
        Job { name: name.into(), command, computes: false }
    }

    /// Program that creates the file `own` and ends with `status` once the file `other` exists, or
    /// with 9 after a minute.
    fn meet(own: &Path, other: &Path, status: i32) -> String {
        let (own, other) = (own.display(), other.display());
        format!(
            "touch {own}; for i in $(seq 6000); do [ -e {other} ] && exit {status}; sleep 0.01; done; exit 9"
        )
    }

    #[test]
    fn programs_run_at_the_same_time_and_failed_ones_are_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        let jobs = || {
            vec![
                shell("good", &meet(&one, &two, 0)),
                shell("bad", &meet(&two, &one, 3)),
                shell("absent", "exec /nonexistent"),
            ]
        };
        let error = run_jobs(jobs(), 2, folder.path()).expect_err("a program failed").to_string();
        assert!(error.contains("bad") && error.contains("absent"), "{error}");
        assert!(!error.contains("good"), "{error}");
        run_jobs(jobs().drain(..1).collect(), 1, folder.path()).expect("no program failed");
    }

    #[test]
    fn programs_that_took_longest_start_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let note = folder.path().join("order");
        let jobs = || {
            ["short", "long", "new"]
                .map(|name| shell(name, &format!("echo {name} >> {}", note.display())))
        };
        let record = folder.path().join("seconds.json");
        fs::write(&record, r#"{"short": 1.5, "long": 20, "gone": 7}"#).expect("room");
        run_jobs(jobs().into(), 1, folder.path()).expect("no program failed");
        assert_eq!(fs::read_to_string(&note).expect("notes"), "new\nlong\nshort\n");
        let text = fs::read(&record).expect("a record");
        let seconds: BTreeMap<String, f64> = serde_json::from_slice(&text).expect("numbers");
        assert!(seconds["long"] < 20.0 && seconds.len() == 4, "{seconds:?}");
        fs::write(&record, "damaged").expect("room");
        run_jobs(jobs().into(), 1, folder.path()).expect("no program failed");
    }

    #[test]
    fn a_program_that_computes_runs_beside_the_others() {
        let folder = tempfile::tempdir().expect("a folder");
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        let mut jobs =
            vec![shell("waits", &meet(&one, &two, 0)), shell("computes", &meet(&two, &one, 0))];
        jobs[1].computes = true;
        run_jobs(jobs, 1, folder.path()).expect("no program failed");
    }

    #[test]
    fn only_the_tests_among_the_messages_of_cargo_are_run() {
        let artifact = |package: &str, test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/{package}/Cargo.toml","target":{{"name":"b"}},"profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let messages = [
            artifact("iris-a", false, r#""/t/example""#),
            artifact("iris-a", true, r#""/t/b-1""#),
            artifact("models", true, r#""/t/b-2""#),
            artifact("iris-a", false, "null"),
            r#"{"reason":"build-finished","success":true}"#.into(),
        ];
        let variables = vec![("IRIS_TUNING".into(), "off".into())];
        let jobs = programs(&messages.join("\n"), &variables, Level::Full).expect("messages");
        let names: Vec<_> = jobs.iter().map(|job| (&*job.name, job.computes)).collect();
        assert_eq!(names, [("iris-a b", false), ("models b", true)]);
        assert_eq!(jobs[1].command.get_program(), "nice");
        let said = format!("{:?}", jobs[0].command);
        for part in ["/w/iris-a", "IRIS_TUNING=\"off\"", "/t/b-1", "--include-ignored"] {
            assert!(said.contains(part), "no {part} in {said}");
        }
        assert!(programs("warning: not JSON", &variables, Level::Normal).is_err());
    }

    #[test]
    fn the_summary_counts_tests_and_names_why_some_are_ignored() {
        let output = "test a ... ok\ntest b ... ignored, no GPU\ntest c ... ignored\n\
                      test d ... ignored (no mpirun)\ntest e ... ignored (as above)\n\n\
                      test result: ok. 12 passed; 0 failed; 5 ignored; 0 measured; finished in 1s\n\
                      test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; finished in 1s\n";
        let reasons = "\n  test b ... ignored, no GPU\n  test d ... ignored (no mpirun)";
        assert_eq!(summary(output), format!("14 passed, 5 ignored{reasons}"));
    }

    #[test]
    fn what_cargo_builds_is_run_and_what_it_leaves_running_is_not_waited_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let program = folder.path().join("program");
        let text = "#!/bin/sh\n(sleep 60; touch $0.ended) &\necho \"test result: ok. $COUNT passed; \"; exit $STATUS\n";
        // Another process writes the program: a file that this one has open for writing is open for
        // a moment in each process that another test starts, and cannot be executed then.
        let write = ["-c", "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\""];
        let written = Command::new("/bin/sh").args(write).arg(&program).arg(text).status();
        assert!(written.expect("a shell").success());
        let message = format!(
            r#"{{"manifest_path":"{0}/models/Cargo.toml","target":{{"name":"b"}},"profile":{{"test":true}},"executable":"{0}/program"}}"#,
            folder.path().display()
        );
        fs::create_dir(folder.path().join("models")).expect("a folder");
        let run_with = |status: &str| {
            let mut build = Command::new("/bin/sh");
            build
                .args(["-c", &format!("echo '{message}'")])
                .env("STATUS", status)
                .env("COUNT", "7");
            run(folder.path(), build, Command::new("true"), Level::Normal)
        };
        run_with("0").expect("a program that passes");
        let log = folder.path().join("target/test-output/models-b.log");
        assert_eq!(fs::read_to_string(log).expect("its output"), "test result: ok. 7 passed; \n");
        let error = run_with("4").expect_err("a program that fails").to_string();
        assert_eq!(error, "failed tests in models b");
        let ended = folder.path().join("program.ended");
        assert!(!ended.exists(), "the end of what the program left was waited for");
    }
}
