use super::*;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::mpsc;

/// Runs a shell program as `ranks` ranks and returns the outcome of the job.
fn shell(text: &str, ranks: usize, options: Options) -> Outcome {
    launch(Path::new("/bin/sh"), &["-c", text], ranks, options).expect("the job did not start")
}

fn quiet() -> Options {
    Options::default().stdout(io::sink()).deadline(Duration::from_secs(60))
}

/// Writer that sends each piece of output over a channel, so that a test sees it while the job
/// runs.
struct Channel(mpsc::Sender<Vec<u8>>);

impl Write for Channel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(bytes.to_vec()).map_err(io::Error::other)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn ends(outcome: &Outcome) -> Vec<End> {
    outcome.ranks.iter().map(|it| it.end).collect()
}

#[test]
fn every_rank_knows_its_place() {
    let text = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE; echo $MORE >&2";
    let outcome = shell(text, 3, quiet().env("MORE", "more"));
    assert!(outcome.ok(), "{}", outcome.report());
    assert_eq!(outcome.exit_code(), 0);
    for (rank, it) in outcome.ranks.iter().enumerate() {
        assert_eq!(it.stdout, format!("{rank} of 3, {rank} of 3\n"));
        assert_eq!(it.stderr, "more\n");
    }
}

#[test]
fn the_folder_is_one_and_private_and_goes() {
    let folders = |outcome: Outcome| {
        let lines = outcome.ranks.into_iter().map(|it| it.stdout);
        lines.collect::<BTreeSet<_>>()
    };
    let text = "echo $(stat -c %a $IRIS_RENDEZVOUS) $IRIS_RENDEZVOUS; touch $IRIS_RENDEZVOUS/$RANK";
    let (first, second) = (folders(shell(text, 3, quiet())), folders(shell(text, 3, quiet())));
    assert_eq!((first.len(), second.len()), (1, 1), "{first:?} {second:?}");
    assert_ne!(first, second, "two jobs met");
    for line in first.iter().chain(&second) {
        let (mode, folder) = line.trim().split_once(' ').expect("two words");
        assert_eq!(mode, "700");
        assert!(!Path::new(folder).exists(), "{folder} is left");
    }
}

#[test]
fn output_of_rank_0_is_passed_on_as_it_comes() {
    let (sender, receiver) = mpsc::channel();
    let folder = tempfile::tempdir().expect("no temporary folder");
    let gate = folder.path().join("gate");
    // Rank 0 prints a line and ends only when the file GATE exists. The test makes that file after
    // it has received the line, so output must be forwarded while the rank runs.
    let text = "echo first $RANK; while [ $RANK = 0 ] && ! [ -e $GATE ]; do sleep 0.01; done";
    let options = quiet().env("GATE", &gate).stdout(Channel(sender));
    let job = thread::spawn(move || shell(text, 2, options));
    assert_eq!(receiver.recv_timeout(Duration::from_secs(30)).expect("nothing came"), b"first 0\n");
    fs::write(gate, "").expect("write");
    assert!(job.join().expect("no panic").ok());
    assert!(receiver.recv().is_err(), "another rank's output was passed on");
}

#[test]
fn a_listener_that_leaves_holds_nobody_up() {
    let (sender, _) = mpsc::channel();
    let text = "i=0; while [ $i -lt 5000 ]; do echo 0123456789012345678901234567890123456789; i=$((i+1)); done";
    let outcome = shell(text, 1, quiet().stdout(Channel(sender)));
    assert!(outcome.ok());
    assert_eq!(outcome.ranks[0].stdout.len(), KEPT, "the end of the output is kept");
}

#[test]
fn the_others_report_before_they_are_stopped() {
    let text = "case $RANK in
        0) exec sleep 60;;
        1) echo broken >&2; exit 3;;
        2) sleep 0.3; echo lost rank 1; exit 4;;
        3) kill -SEGV $$;;
    esac";
    let outcome = shell(text, 4, quiet().grace(Duration::from_secs(3)));
    let expected = [End::Stopped, End::Exited(3), End::Exited(4), End::Signalled(11)];
    assert_eq!(ends(&outcome), expected);
    let after: Vec<_> = outcome.ranks.iter().map(|it| it.after).collect();
    assert!(after[0] >= Duration::from_secs(3) && after[0] < Duration::from_secs(30), "{after:?}");
    let report = outcome.report();
    for line in ["[rank 1] broken", "[rank 2] lost rank 1", "rank 2: exit code 4 after"] {
        assert!(report.contains(line), "no {line:?} in\n{report}");
    }
    assert_eq!(report.matches("the first to fail").count(), 1, "{report}");
}

#[test]
fn the_first_failure_gives_the_exit_code() {
    assert_eq!(shell("sleep 0.$RANK; exit $((7 - RANK))", 4, quiet()).exit_code(), 7);
    assert_eq!(shell("kill -TERM $$", 1, quiet()).exit_code(), 128 + 15);
}

#[test]
fn of_ranks_that_end_together_the_killed_one_failed_first() {
    // Rank 2 is killed. The other shell programs end because of it as real ranks do: they notice
    // that its file descriptors were closed.
    let text = "cd $FIFOS; case $RANK in
        2) exec 5>0 6>1 7>3; sleep 0.05; kill -KILL $$;;
        3) cat $RANK; kill -ABRT $$;;
        *) cat $RANK; exit 1;;
    esac";
    for _ in 0..5 {
        let fifos = tempfile::tempdir().expect("no temporary folder");
        for rank in ["0", "1", "3"] {
            let made = Command::new("mkfifo").arg(fifos.path().join(rank)).status();
            assert!(made.expect("mkfifo did not start").success());
        }
        let outcome = shell(text, 4, quiet().env("FIFOS", fifos.path()));
        assert_eq!((outcome.first_failure(), outcome.exit_code()), (Some(2), 128 + 9));
        assert!(outcome.report().contains("rank 2: ended by signal 9"), "{}", outcome.report());
    }
}

#[test]
fn a_rank_that_ended_leaves_word_in_the_folder() {
    // Rank 0 waits for the two files by which the launcher announces the ends of ranks 1 and 2.
    let text = "case $RANK in
        0) while ! [ -e $IRIS_RENDEZVOUS/lost-1 ] || ! [ -e $IRIS_RENDEZVOUS/lost-2 ]; do
               sleep 0.01; done; ls $IRIS_RENDEZVOUS;;
        1) ;;
        2) kill -KILL $$;;
    esac";
    let outcome = shell(text, 3, quiet());
    assert_eq!(outcome.ranks[0].stdout, "launcher\nlost-1\nlost-2\n");
}

#[test]
fn a_job_ends_at_its_deadline() {
    let start = Instant::now();
    // `sleep` is a child of the shell. The launcher must kill it too; otherwise it would outlive
    // the shell and hold the output pipes open.
    let outcome = shell("sleep 50; true", 2, quiet().deadline(Duration::from_millis(300)));
    assert_eq!(ends(&outcome), [End::Late; 2]);
    assert_eq!(outcome.exit_code(), 124);
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[test]
fn what_can_not_start_is_an_error_that_names_it() {
    let error =
        launch(Path::new("/no/such/program"), &[""; 0], 2, quiet()).expect_err("it started");
    let text = format!("{error:#}");
    assert!(text.contains("rank 0") && text.contains("/no/such/program"), "{text}");
    launch(Path::new("/bin/sh"), &[""; 0], 0, quiet()).expect_err("a job of no rank");
}

/// Whether the process `pid` still runs; a zombie (ended but not reaped) does not count.
fn alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

fn within_30_s(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(30), "not within 30 s: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Environment variable with the folder in which ranks note their process ids; set in a launcher
/// process that a test kills, and in that launcher's ranks.
const NOTES: &str = "IRIS_LAUNCH_TEST_NOTES";

/// Launcher of two ranks, which a test started as a separate process to kill it.
struct Started {
    launcher: Child,
    /// Process ids of the launcher's ranks.
    ranks: [String; 2],
    /// Temporary folder in which the launcher makes the job's folder.
    temporary: PathBuf,
    _folder: TempDir,
}

/// Starts this program as the launcher of a test; returns when both ranks run.
fn start_launcher(test: &str) -> Started {
    let folder = tempfile::tempdir().expect("no temporary folder");
    let (notes, temporary) = (folder.path().join("notes"), folder.path().join("tmp"));
    fs::create_dir(&notes).and_then(|()| fs::create_dir(&temporary)).expect("mkdir");
    let launcher = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", &format!("launch::tests::{test}")])
        .env(NOTES, &notes)
        .env("TMPDIR", &temporary)
        .stdout(Stdio::null())
        .spawn()
        .expect("the launcher did not start");
    let files = ["0", "1"].map(|rank| notes.join(rank));
    within_30_s("both ranks run", || files.iter().all(|it| it.exists()));
    let ranks = files.map(|it| fs::read_to_string(it).expect("a rank's number"));
    Started { launcher, ranks, temporary, _folder: folder }
}

#[test]
fn ranks_end_with_a_launcher_that_is_killed_with_its_keeper() {
    const NAME: &str = "ranks_end_with_a_launcher_that_is_killed_with_its_keeper";
    if let Some(notes) = std::env::var_os(NOTES) {
        let notes = PathBuf::from(notes);
        if let Ok(rank) = std::env::var("RANK") {
            end_with_launcher();
            let part = notes.join(format!("{rank}.part"));
            let written = fs::write(&part, std::process::id().to_string());
            written.and_then(|()| fs::rename(part, notes.join(rank))).expect("room");
            thread::sleep(Duration::from_secs(600));
        } else {
            let program = std::env::current_exe().expect("this program");
            let _ = launch(&program, &["--exact", &format!("launch::tests::{NAME}")], 2, quiet());
        }
        return;
    }
    let Started { mut launcher, ranks, temporary, _folder } = start_launcher(NAME);
    let rank = ranks[0].trim().parse().ok().and_then(Pid::from_raw);
    let keeper = rustix::process::getpgid(rank).expect("the keeper leads the ranks' group");
    rustix::process::kill_process(keeper, Signal::KILL).expect("kill");
    launcher.kill().and_then(|()| launcher.wait()).expect("kill");
    within_30_s("the ranks end", || !ranks.iter().any(|it| alive(it)));
    let left = || fs::read_dir(&temporary).expect("readable").count();
    assert_eq!(left(), 1, "the folder of a launcher without a keeper");
    folder::sweep(&temporary.join("own"));
    assert_eq!(left(), 0, "the next launcher removes it");
}

#[test]
fn a_folder_that_no_launcher_of_this_user_made_stays() {
    let temporary = tempfile::tempdir().expect("no temporary folder");
    let make = |name: &str, mode: u32, content: Option<&str>| {
        let folder = temporary.path().join(name);
        fs::create_dir(&folder).expect("mkdir");
        // Dropping the file that `hold` returns ends the lock, as a launcher's end does.
        match content {
            Some(content) => fs::write(folder.join("launcher"), content).expect("room"),
            None => drop(folder::hold(&folder).expect("room")),
        }
        fs::set_permissions(&folder, PermissionsExt::from_mode(mode)).expect("chmod");
        folder
    };
    let left = make("iris-left", 0o700, None);
    let kept = [
        make("iris-program", 0o700, Some("#!/bin/sh\n")),
        make("iris-copy", 0o700, Some(&left.to_string_lossy())),
        make("iris-shared", 0o770, None),
        make("other-name", 0o700, None),
    ];
    let linked = temporary.path().join("iris-link");
    std::os::unix::fs::symlink(&kept[3], &linked).expect("symlink");
    let strange = make("iris-strange", 0o700, None);
    let is_root = rustix::process::geteuid().is_root();
    match is_root {
        true => std::os::unix::fs::chown(&strange, Some(65534), None).expect("chown"),
        false => eprintln!("skipped: a folder of another user, which only root can make"),
    }
    folder::sweep(&temporary.path().join("own"));
    assert!(!left.exists(), "the next launcher removes a job's folder");
    for folder in kept.iter().chain([&linked]).chain(is_root.then_some(&strange)) {
        assert!(folder.join("launcher").exists(), "{} is gone", folder.display());
    }
    // The launcher must not open a pipe that it finds in the folder: opening a pipe that nobody
    // writes to would never return.
    let pipe = make("iris-pipe", 0o700, Some("")).join("launcher");
    fs::remove_file(&pipe).expect("rm");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    folder::sweep(&temporary.path().join("own"));
    assert!(pipe.exists(), "{} is gone", pipe.display());
}

#[test]
fn a_launcher_that_is_killed_takes_its_ranks_along() {
    const NAME: &str = "a_launcher_that_is_killed_takes_its_ranks_along";
    if let Some(notes) = std::env::var_os(NOTES) {
        // Part of the test that runs in the launcher process, which the test kills. Rank 1 ignores
        // SIGTERM.
        let text = "[ $RANK = 1 ] && trap '' TERM; echo $$ > $NOTES/$RANK.part; \
            mv $NOTES/$RANK.part $NOTES/$RANK; while :; do sleep 1; done";
        let _ = shell(text, 2, quiet().env("NOTES", notes));
        return;
    }
    for signal in [Signal::INT, Signal::KILL] {
        let Started { mut launcher, ranks, temporary, _folder } = start_launcher(NAME);
        assert!(ranks.iter().all(|it| alive(it)), "{ranks:?}");
        assert_eq!(fs::read_dir(&temporary).expect("readable").count(), 1);
        rustix::process::kill_process(Pid::from_child(&launcher), signal).expect("kill");
        launcher.wait().expect("wait");
        within_30_s("the ranks end", || !ranks.iter().any(|it| alive(it)));
        within_30_s("the folder goes", || {
            fs::read_dir(&temporary).expect("readable").next().is_none()
        });
    }
}
