//! Test of bench/record.sh, with programs in place of `iris` and Python that do nothing.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use iris_testkit::harness::write_program;

/// Stand-in for `iris`: notes its arguments in the file `calls` beside it, and fails if a file
/// `fails` there has a word of them.
const IRIS: &str = "#!/bin/sh
here=$(dirname \"$0\")
echo \"$IRIS_TUNING $*\" >>\"$here/calls\"
for word in \"$@\"; do grep -qx -- \"$word\" \"$here/fails\" && exit 3; done
echo done
";

#[test]
fn steps_that_have_passed_are_not_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    write_program(&at("iris"), IRIS.as_bytes()).unwrap();
    write_program(&at("python3"), b"#!/bin/sh\necho [] >\"$3\"\n").unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let script = |variables: &[(&str, &str)], seconds: &str| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/record.sh");
        let mut command = Command::new(script);
        command.arg(at("out")).arg(seconds).env("PATH", &path).env("TORCH", "torch.py");
        command.envs([("IRIS", at("iris").to_str().unwrap()), ("GPUS", "4")]);
        command.envs(variables.iter().copied()).output().unwrap()
    };
    for wrong in [("IRIS", "/nowhere/iris"), ("GPUS", "1")] {
        let output = script(&[wrong], "600");
        let error = String::from_utf8_lossy(&output.stderr);
        let named = error.contains(&format!("{} is {}: expected", wrong.0, wrong.1));
        assert!(output.status.code() == Some(2) && named, "{error}");
    }
    let run = |seconds: &str, fails: &str| -> (Output, Vec<String>) {
        fs::write(at("fails"), fails).unwrap();
        let output = script(&[], seconds);
        let calls = fs::read_to_string(at("calls")).unwrap_or_default();
        let _ = fs::remove_file(at("calls"));
        let calls = calls.replace(&format!("{}/", folder.path().display()), "");
        let steps = calls.lines().filter(|call| !call.contains(" doctor "));
        (output, steps.map(str::to_owned).collect())
    };
    let left = |output: &Output| {
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code(), out.lines().last().unwrap_or_default().to_owned())
    };

    // Without a GPU all steps would be skipped, and pass.
    let (output, calls) = run("600", "doctor\n");
    assert_eq!((output.status.code(), calls.len()), (Some(1), 0));

    // No time: nothing is started.
    let (output, calls) = run("0", "");
    let all = "left: test-4 stress-4 tune-4 torch-4 bench-4 decode-4 \
               test-2 stress-2 tune-2 torch-2 bench-2 decode-2 processes waits";
    assert_eq!((left(&output), calls.len()), ((Some(1), all.into()), 0));

    // A failed step ends no other.
    let (output, calls) = run("600", "--windows\nquick\n");
    let failed = "left: test-4 bench-4 test-2 bench-2 processes";
    assert_eq!((left(&output), calls.len()), ((Some(1), failed.into()), 12));
    assert!(calls.contains(&"out/tuned-4.toml tune --backend cuda --ranks 4".into()), "{calls:?}");
    // An empty `--only`, in which no wait is left out.
    let stress = "off stress --backend cuda --calls 600 --only  --ranks 4";
    assert!(calls.contains(&stress.into()), "{calls:?}");

    // Only what had failed is repeated, and is told PyTorch's times.
    let (output, calls) = run("600", "");
    assert_eq!(left(&output), (Some(0), "nothing is left".into()));
    let measured = |ranks: usize| {
        format!(
            "off bench --backend cuda --ranks {ranks} --limit 86400 --resume \
             --json out/bench-{ranks}.jsonl --windows --torch out/torch-{ranks}.json"
        )
    };
    let tested = |more: &str| format!("off test --backend cuda --level quick{more}");
    let expected =
        [tested(" --ranks 4"), measured(4), tested(" --ranks 2"), measured(2), tested("")];
    assert_eq!(calls, expected);

    let (output, calls) = run("600", "");
    assert_eq!((left(&output), calls.len()), ((Some(0), "nothing is left".into()), 0));
}
