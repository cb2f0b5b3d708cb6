//! Sequence of steps of a task: each step prints its wall time, the first failure ends the
//! sequence, and a table of results follows.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Named step of a task, such as `clippy` of `cargo xtask test`.
pub(crate) struct Step {
    name: &'static str,
    /// Shell command that runs this step alone, shown if the step fails.
    rerun: String,
    /// Program without which the step is skipped: its name, and a command that fails if the program
    /// is missing.
    needs: Option<(&'static str, Command)>,
    action: Box<dyn FnOnce() -> Result<()>>,
}

/// Program that runs in the background while other steps run, with the file that receives its
/// output.
struct Running {
    child: Child,
    log: PathBuf,
}

impl Drop for Running {
    fn drop(&mut self) {
        // This destructor runs if the program has ended, or if another step has failed. In the
        // second case the program's result is not needed. So the program is killed in both cases.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Step {
    /// Makes a step that calls a function.
    pub(crate) fn function(
        name: &'static str,
        rerun: &str,
        action: impl FnOnce() -> Result<()> + 'static,
    ) -> Step {
        Step { name, rerun: rerun.to_owned(), needs: None, action: Box::new(action) }
    }

    /// Makes a step that runs a command, without standard input.
    pub(crate) fn command(name: &'static str, mut command: Command) -> Step {
        let rerun = shown(&command);
        let action = move || {
            let status = command.stdin(Stdio::null()).status();
            let status = status.with_context(|| format!("{} did not start", shown(&command)))?;
            if !status.success() {
                bail!("ended with {status}");
            }
            Ok(())
        };
        Step { name, rerun, needs: None, action: Box::new(action) }
    }

    /// Makes two steps from a program: the first starts it at the lowest priority, so that it runs
    /// at the same time as the steps in between; the second, with the name `name`, waits for its
    /// end and prints its output. If a step in between fails, the program is killed. `rerun` is the
    /// shell command that runs the program alone.
    pub(crate) fn beside(
        name: &'static str,
        rerun: &str,
        command: Command,
        log: PathBuf,
    ) -> [Step; 2] {
        let running: Rc<RefCell<Option<Running>>> = Rc::default();
        let begun = running.clone();
        let begin = move || {
            let output = File::create(&log).with_context(|| format!("{}", log.display()))?;
            let mut niced = Command::new("nice");
            niced.args(["-n", "19"]).arg(command.get_program()).args(command.get_args());
            niced.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
            if let Some(folder) = command.get_current_dir() {
                niced.current_dir(folder);
            }
            niced.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
            let child =
                niced.spawn().with_context(|| format!("{} did not start", shown(&niced)))?;
            *begun.borrow_mut() = Some(Running { child, log });
            Ok(())
        };
        let end = move || {
            let mut running = running.take().context("it was not begun")?;
            let status = running.child.wait()?;
            print!("{}", fs::read_to_string(&running.log)?);
            if !status.success() {
                bail!("ended with {status}");
            }
            Ok(())
        };
        [Step::function("beside", rerun, begin), Step::function(name, rerun, end)]
    }

    /// Skips the step, with a notice, if `program` is not installed, that is, if `probe` fails.
    ///
    /// It is not enough that PATH has a program of this name, because rustup puts stand-ins on PATH
    /// for components that are not installed.
    pub(crate) fn needs(mut self, program: &'static str, probe: Command) -> Step {
        self.needs = Some((program, probe));
        self
    }

    /// Runs the step; returns the text of its result for the table.
    fn run(self) -> Result<String> {
        if let Some((program, mut probe)) = self.needs {
            let quiet = probe.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            if !quiet.status().is_ok_and(|status| status.success()) {
                return Ok(format!("skipped: {program} not installed"));
            }
        }
        (self.action)().map(|()| "ok".to_owned())
    }
}

/// Runs the steps in order, up to the first failure.
///
/// # Errors
/// Name of the failed step, and the command that runs it alone.
pub(crate) fn run(steps: Vec<Step>) -> Result<()> {
    let mut rows = Vec::new();
    let mut failure = None;
    let total = steps.len();
    for (index, step) in steps.into_iter().enumerate() {
        let (name, rerun) = (step.name, step.rerun.clone());
        if failure.is_some() {
            rows.push((name, "not run".to_owned(), Duration::ZERO));
            continue;
        }
        println!("==> {}/{total} {name}: {rerun}", index + 1);
        // Flush stdout, so that the program's output follows this line even if stdout is a pipe.
        std::io::stdout().flush().context("stdout is closed")?;
        let start = Instant::now();
        let result = step.run().unwrap_or_else(|error| {
            failure = Some(format!("{name}: {error:#}\nto run it alone: {rerun}"));
            "FAILED".to_owned()
        });
        let took = start.elapsed();
        println!("<== {name}: {result} in {:.1} s", took.as_secs_f64());
        rows.push((name, result, took));
    }
    print!("\n{}", table(&rows));
    failure.map_or(Ok(()), |failure| bail!(failure))
}

fn table(rows: &[(&str, String, Duration)]) -> String {
    let total = ("total", String::new(), rows.iter().map(|row| row.2).sum());
    let width = rows.iter().map(|row| row.1.len()).chain([6]).max().unwrap_or(0);
    let mut text = format!("{:<8}  {:<width$}  {:>8}\n", "step", "result", "seconds");
    for (name, result, took) in rows.iter().chain([&total]) {
        // Writing to a String can not fail.
        let _ = writeln!(text, "{name:<8}  {result:<width$}  {:>8.1}", took.as_secs_f64());
    }
    text
}

/// Text of a command as a shell accepts it, with the environment variables that it sets first.
pub(crate) fn shown(command: &Command) -> String {
    let set = command.get_envs().filter_map(|(name, value)| {
        value.map(|value| format!("{}={}", name.to_string_lossy(), quoted(value)))
    });
    // The program is shown by its name, not by its full path.
    let program = Path::new(command.get_program()).file_name();
    let words = program.into_iter().chain(command.get_args()).map(quoted);
    set.chain(words).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &OsStr) -> String {
    let word = word.to_string_lossy();
    if word.contains(char::is_whitespace) { format!("'{word}'") } else { word.into_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn shell(text: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", text]);
        command
    }

    #[test]
    fn the_first_failure_ends_the_row_and_says_how_to_run_it_alone() {
        let ran = Rc::new(Cell::new(false));
        let seen = Rc::clone(&ran);
        let after = move || {
            seen.set(true);
            Ok(())
        };
        let steps = vec![
            Step::command("good", shell("true")),
            Step::command("bad", shell("exit 3")),
            Step::function("after", "after", after),
        ];
        let error = run(steps).expect_err("a failing step passed").to_string();
        assert!(error.contains("bad: ended with exit status: 3"), "{error}");
        assert!(error.contains("sh -c 'exit 3'"), "{error}");
        assert!(!ran.get(), "a step ran after the failure");
    }

    #[test]
    fn a_program_beside_others_is_waited_for_and_its_failure_is_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let (log, told) = (folder.path().join("log"), folder.path().join("told"));
        let waits =
            format!("while [ ! -e {} ]; do sleep 0.01; done; echo seen; exit 4", told.display());
        let [begin, end] = Step::beside("slow", "", shell(&waits), log.clone());
        let tell = move || Ok(fs::write(told, "")?);
        let error =
            run(vec![begin, Step::function("tell", "tell", tell), end]).expect_err("exit 4");
        assert!(error.to_string().contains("slow: ended with exit status: 4"), "{error}");
        assert_eq!(fs::read_to_string(log).expect("what it wrote"), "seen\n");
    }

    #[test]
    fn a_program_beside_a_step_that_fails_is_ended() {
        let folder = tempfile::tempdir().expect("a folder");
        let log = folder.path().join("log");
        let [begin, end] =
            Step::beside("endless", "", shell("echo $$; exec sleep 600"), log.clone());
        let fails = format!("while [ ! -s {} ]; do sleep 0.01; done; exit 3", log.display());
        let error = run(vec![begin, Step::command("bad", shell(&fails)), end]);
        assert!(error.expect_err("exit 3").to_string().contains("bad: "));
        let process = fs::read_to_string(log).expect("its number");
        assert!(!Path::new("/proc").join(process.trim()).exists(), "{process} was left running");
    }

    #[test]
    fn a_missing_program_skips_its_step_only() {
        let absent =
            Step::command("a", shell("exit 1")).needs("it", Command::new("no-such-program"));
        assert_eq!(absent.run().expect("it ran"), "skipped: it not installed");
        let stand_in = Step::command("a", shell("exit 1")).needs("it", shell("exit 1"));
        assert_eq!(stand_in.run().expect("it ran"), "skipped: it not installed");
        let present = Step::command("a", shell("exit 1")).needs("it", shell("true"));
        present.run().expect_err("a step with its program was skipped");
    }

    #[test]
    fn the_shown_command_carries_its_variables() {
        let mut command = shell("true");
        command.env("RUSTDOCFLAGS", "-D warnings").env_remove("IRIS_TEST_LEVEL");
        assert_eq!(shown(&command), "RUSTDOCFLAGS='-D warnings' sh -c true");
    }
}
