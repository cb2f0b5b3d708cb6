//! `iris doctor`: what this machine can run, what is missing, and what to do about it.

mod gpus;
mod host;
mod links;
mod print;

use anyhow::Result;
use iris_heap::BackendKind;
use iris_testkit::say;
use serde::Serialize;

use print::{json, lines};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only this backend: cpu, cuda or hip. Exit status 1 if it cannot run here.
    #[arg(long)]
    backend: Option<BackendKind>,
    /// Prints folders, files and variables, too.
    #[arg(long)]
    verbose: bool,
    /// Prints everything as one JSON object.
    #[arg(long, conflicts_with = "verbose")]
    json: bool,
    /// Leaves out what takes time on GPUs: memory that is moved, bandwidth and latency of links.
    #[arg(long)]
    no_links: bool,
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// Works, or is present as needed.
    Ok,
    /// Missing or unset, but nothing on this machine needs it.
    None,
    /// Usable, with a drawback that the line names.
    Warning,
    /// Does not work, although it is present or was asked for on the command line.
    Error,
}

/// Result of one check, printed as one line.
#[derive(Debug, Serialize)]
struct Finding {
    state: State,
    /// Name of the checked item, at the start of its line.
    what: String,
    /// Value that was found, in words.
    found: String,
    /// Action that solves the problem; empty if there is nothing to do.
    remedy: String,
    /// Folders, files and other details, for `--verbose`.
    details: Vec<String>,
}

impl Finding {
    fn new(state: State, what: &str, found: impl ToString) -> Finding {
        let (what, found) = (what.into(), found.to_string());
        Finding { state, what, found, remedy: String::new(), details: Vec::new() }
    }

    fn remedy(mut self, remedy: impl ToString) -> Finding {
        self.remedy = remedy.to_string();
        self
    }

    fn details(mut self, details: impl IntoIterator<Item = impl ToString>) -> Finding {
        self.details.extend(details.into_iter().map(|detail| detail.to_string()));
        self
    }
}

/// Findings about one subject, such as the host or the GPUs of one vendor.
#[derive(Debug, Serialize)]
struct Section {
    title: &'static str,
    findings: Vec<Finding>,
}

/// Result for one backend: whether it can run on this machine.
#[derive(Debug)]
struct Verdict {
    backend: &'static str,
    /// Reason, in a few words, why the backend cannot run; `None` if it can.
    obstacle: Option<String>,
}

impl Verdict {
    fn works(&self) -> bool {
        self.obstacle.is_none()
    }
}

/// Runs the checks, prints the results, and returns whether the requested backend (by default cpu)
/// can run.
pub(crate) fn main(options: &Options) -> Result<bool> {
    let asked = |kind: BackendKind| options.backend.is_none_or(|asked| asked == kind);
    let mut sections = vec![host::section()];
    let mut verdicts = Vec::new();
    for kind in BackendKind::ALL.into_iter().filter(|kind| asked(*kind)) {
        let (section, verdict) = match kind.traits().host_threads {
            true => host::cpu(),
            false => gpus::section(kind, !options.no_links),
        };
        sections.push(section);
        verdicts.push(verdict);
    }
    // An error about the host, such as a wrong variable, stops programs on all backends, and a wrong
    // tuning file those on its backend. Kernels of the CPU are not compiled at run
    // time, so a wrong cache does not stop the CPU backend.
    for (at, verdict) in verdicts.iter_mut().enumerate().filter(|(_, verdict)| verdict.works()) {
        let is_cpu = verdict.backend == BackendKind::Cpu.name();
        let of_host = sections[0].findings.iter().filter(|it| !(is_cpu && it.what == "cache"));
        let own = sections[at + 1].findings.iter().filter(|finding| finding.what == "tuning");
        let wrong = of_host.chain(own).find(|finding| finding.state == State::Error);
        verdict.obstacle = wrong.map(|finding| format!("see ERROR {}", finding.what));
    }
    if options.json {
        say!("{}", json(&sections, &verdicts)?)?;
    } else {
        for line in lines(&sections, &verdicts, options.verbose) {
            say!("{line}")?;
        }
    }
    // If the user names no backend, the result is whether the CPU backend can run.
    let needed = options.backend.unwrap_or(BackendKind::Cpu);
    Ok(verdicts.iter().all(|verdict| verdict.works() || verdict.backend != needed.name()))
}
