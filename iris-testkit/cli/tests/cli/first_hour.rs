//! Tests of a new user's first steps: the doctor, and variables that do not exist.

use std::io::{Read as _, Write as _};
use std::process::{Command, Stdio};

use super::{command, ended, text};

/// Number of lines and columns of a screen, which the doctor's output must fit.
const SCREEN: (usize, usize) = (40, 100);

/// Runs `iris` with these variables, outside the workspace; returns exit code, stdout and stderr.
fn iris(arguments: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let mut command = command(arguments);
    command.current_dir(std::env::temp_dir());
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"] {
        command.env_remove(name);
    }
    ended(command.envs(variables.iter().copied()))
}

/// Tests that values which stop or change programs are named: by the doctor, and where they are
/// read.
#[test]
fn wrong_values_of_variables_are_named() {
    let (code, out, _) = iris(&["doctor", "--no-links"], &[("IRIS_TUNING", "/no/such/file")]);
    assert!(out.contains("/no/such/file is not there"), "{out}");
    assert!(code == Some(1) && out.contains("no CPU: see ERROR tuning"), "{out}");
    let run = ["run", "barrier", "--ranks", "1"];
    for wrong in ["x", "20us", "-5", "1000001"] {
        let (code, _, error) = iris(&run, &[("IRIS_DELAY", wrong)]);
        let named = error.contains(&format!("IRIS_DELAY={wrong}: expected a number"));
        assert!(code == Some(2) && named, "{error}");
    }
}

/// Tests that a cache folder which cannot be made, which only GPUs need, does not count against the
/// CPU.
#[test]
fn a_wrong_cache_is_no_obstacle_on_the_cpu() {
    let place = ("IRIS_CACHE", "/dev/null/cache");
    let (code, out, error) = iris(&["doctor", "--no-links"], &[place]);
    assert!(out.contains("/dev/null/cache") && out.contains("CPU works"), "{out}");
    assert_eq!(code, Some(0), "{out}{error}");
    let run = ["run", "all-reduce", "--ranks", "2", "--m", "8", "--n", "8"];
    let (code, _, error) = iris(&run, &[place]);
    assert_eq!(code, Some(0), "{error}");
}

/// Tests the output of the doctor: one line per check and a verdict, all of which fit a screen, and
/// no text twice.
#[test]
fn a_doctor_fits_the_screen_and_ends_with_a_verdict() {
    let (code, out, error) = iris(&["doctor", "--no-links"], &[]);
    assert_eq!(code, Some(0), "{out}{error}");
    let lines: Vec<_> = out.lines().collect();
    assert!(lines.len() <= SCREEN.0, "{} lines: {out}", lines.len());
    assert!(lines.iter().all(|line| line.chars().count() <= SCREEN.1), "{out}");
    assert!(lines.last().unwrap().starts_with("CPU works; "), "{out}");
    let (mut once, mut all) = (lines.clone(), lines);
    all.retain(|line| !line.is_empty());
    once.retain(|line| !line.is_empty());
    once.sort_unstable();
    once.dedup();
    assert_eq!(once.len(), all.len(), "{out}");
}

#[test]
fn a_doctor_tells_more_on_request() {
    let (_, verbose, _) = iris(&["doctor", "--no-links", "--verbose"], &[]);
    assert!(verbose.contains("IRIS_DEADLINE: ") && verbose.contains("IRIS_NVRTC: "), "{verbose}");
    let (_, out, _) = iris(&["doctor", "--no-links", "--json"], &[]);
    let object: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(object["verdicts"][0]["backend"], "cpu");
    assert_eq!(object["verdicts"][0]["works"], true);
    assert!(object["sections"][0]["findings"].as_array().is_some_and(|all| all.len() > 5));
}

#[test]
fn a_doctor_shows_the_launchers_world_and_wrong_variables() {
    let launched = [("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1")];
    let said = |variables: &[_]| iris(&["doctor", "--backend", "cpu"], variables).1;
    let out = said(&launched);
    assert!(out.contains("rank 1 of 4"), "{out}");
    let out = said(&[("RANK", "x"), ("WORLD_SIZE", "2")]);
    assert!(out.contains("ERROR world") && out.contains("RANK=x"), "{out}");
    // Variables of a launcher that name no rank would otherwise look like a world of one.
    let nameless = [("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")];
    let out = said(&nameless);
    assert!(out.contains("ERROR world") && out.contains("RANK=0 WORLD_SIZE=1"), "{out}");
    let out = said(&[("IRIS_DEADLIN", "2")]);
    assert!(out.contains("warn  variable") && out.contains("expected IRIS_DEADLINE?"), "{out}");
}

/// Tests that HIP and CUDA cannot run without a driver; on a machine with a driver nothing is
/// tested.
#[test]
fn a_backend_that_cannot_run_here_is_a_failure() {
    for kind in [iris_heap::BackendKind::Cuda, iris_heap::BackendKind::Hip] {
        let (code, out, _) = iris(&["doctor", "--no-links", "--backend", kind.name()], &[]);
        if kind.device_count().is_err() {
            assert_eq!(code, Some(1), "{out}");
            let name = kind.name().to_uppercase();
            let why = ["driver", "device"].map(|what| format!("no {name}: no {what}"));
            assert!(why.iter().any(|why| out.contains(why)), "{out}");
        }
    }
}

#[test]
fn a_program_names_variables_that_do_not_exist_once() {
    let wrong = [("IRIS_DEADLIN", "2"), ("NO_COLOR", "1")];
    let arguments = ["run", "all-reduce", "--ranks", "2", "--iters", "1", "--threads-as-ranks"];
    let (code, _, error) = iris(&arguments, &wrong);
    assert_eq!(code, Some(0), "{error}");
    assert_eq!(error.matches("IRIS_DEADLIN is no variable").count(), 1, "{error}");
    assert!(error.contains("expected IRIS_DEADLINE?") && !error.contains('\u{1b}'), "{error}");
}

/// Tests that a long run shows its progress on a terminal, without colours. The run of a million
/// calls, which would take minutes, is started by `script` on a pseudo-terminal and then ended.
#[test]
fn a_long_run_shows_its_progress_on_a_terminal() {
    const CALLS: usize = 1_000_000;
    let program = env!("CARGO_BIN_EXE_iris");
    let run = "run all-reduce --ranks 2 --m 1024 --n 1024 --threads-as-ranks";
    // Shells start background jobs with SIGINT ignored, and processes inherit that.
    let command = format!("exec env --default-signal=INT '{program}' {run} --iters {CALLS}");
    let mut script = Command::new("script")
        .args(["-qefc", &command, "/dev/null"])
        .env("TERM", "xterm-256color")
        .env_remove("NO_COLOR")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut keyboard = script.stdin.take().unwrap();
    let mut output = script.stdout.take().unwrap();
    let (mut shown, mut part) = (String::new(), [0; 4096]);
    let total = format!("/{CALLS}, ");
    while !shown.contains(&total) {
        let len = output.read(&mut part).unwrap();
        assert!(len > 0, "the program ended: {shown:?}");
        shown += &text(&part[..len]);
    }
    // Ctrl-C ends the program; if only `script` were killed, the program would go on.
    keyboard.write_all(b"\x03").unwrap();
    script.wait().unwrap();
    // The progress bar must be the first output.
    let first = shown.trim_start_matches("\x1b[2K").trim_start();
    assert!(first.starts_with("calls ["), "{shown:?}");
    // A colour is a sequence that ends with m.
    let colour = |sequence: &str| {
        sequence.trim_start_matches(|c: char| c.is_ascii_digit() || c == ';').starts_with('m')
    };
    assert!(!shown.split("\x1b[").skip(1).any(colour), "{shown:?}");
}
