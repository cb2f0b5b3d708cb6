//! `iris attack`, in its long form where the level is full, and that it finds what it looks for.

use std::process::{Command, Output};

use iris_testkit::Level;

fn attack(arguments: &[&str]) -> Output {
    // Bounded by itself: every job has a deadline.
    let mut command = Command::new(env!("CARGO_BIN_EXE_iris"));
    command.arg("attack").args(arguments).args(["--seed", "7"]);
    command.output().expect("iris did not start")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn attacked_ranks_end_and_blame_the_right_one() {
    // The long form takes some minutes.
    let full = Level::from_env() == Level::Full;
    let (kills, frames) = if full { ("55", "2200") } else { ("2", "40") };
    let done = attack(&["--kills", kills, "--frames", frames]);
    let (out, err) = (text(&done.stdout), text(&done.stderr));
    assert!(done.status.success(), "{out}\n{err}");
    for word in [
        "kill, at start-up",
        "planning",
        "kill, in calls",
        "closing",
        "fork and kill, in calls",
        "stop, in calls",
        "of strangers",
        "of a rank",
    ] {
        assert!(out.contains(word), "no {word:?} in\n{out}");
    }
}

#[test]
fn what_must_not_be_is_counted() {
    let plants = [
        ("hang", "\"hang\":1"),
        ("signal", "\"signal\":1"),
        ("result", "\"wrong_result\":1"),
        ("blame", "\"wrong_rank_blamed\":1"),
    ];
    for (plant, counted) in plants {
        let arguments = ["--kills", "1", "--frames", "0", "--one-user", "--grace", "2", "--json"];
        let done = attack(&[&arguments[..], &["--plant", plant]].concat());
        let (out, err) = (text(&done.stdout), text(&done.stderr));
        assert_eq!(done.status.code(), Some(1), "{plant}: {out}\n{err}");
        assert_eq!(out.matches(counted).count(), 6, "{plant}, by each blow: {out}\n{err}");
    }
}
