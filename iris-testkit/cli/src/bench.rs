//! `iris bench`: ratios of times, taken in turns in one run, against what is asked of them.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use comfy_table::Table;
use iris_heap::BackendKind;
use iris_testkit::say;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::errors::{unread, usage};
use crate::gpu_bench;
use crate::job::Place;
use crate::ratios::{Kind, Ratio, RatioJob, Times};
use crate::record::kept;

/// What is measured unless another file is given.
const CASES: &str = include_str!("../../../bench/cpu.toml");

#[derive(clap::Args)]
pub(crate) struct Options {
    /// What computes: cpu; cuda, where every op is timed beside NCCL and cuBLASLt; or hip, beside RCCL and
    /// hipBLASLt, or alone where these are missing.
    #[arg(long, default_value = "cpu")]
    pub(crate) backend: BackendKind,
    /// Writes the results as JSON, one object a line.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Appends them to a record that is kept [default file: bench/record/DEVICE.jsonl, where DEVICE is
    /// cpu or the name of the GPU, as in h200.jsonl].
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    record: Option<Option<PathBuf>>,
    /// What to measure instead, in the form of bench/cpu.toml, or of bench/cuda.toml on GPUs.
    #[arg(long, value_name = "FILE")]
    pub(crate) cases: Option<PathBuf>,
    /// Only the ratios whose names hold this text; of GPUs, only the ops.
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Option<String>,
    /// The commit that the results are of, where there is no git to ask.
    #[arg(long, value_name = "COMMIT", env = "IRIS_COMMIT")]
    commit: Option<String>,
    /// Ranks, of GPUs: threads of this process [default: the GPUs].
    #[arg(long)]
    pub(crate) ranks: Option<usize>,
    /// Folders with NCCL and cuBLASLt, or RCCL and hipBLASLt, before those where they usually are.
    #[arg(long, value_name = "FOLDER")]
    pub(crate) libraries: Vec<PathBuf>,
    /// Times NCCL or RCCL with its buffers registered as windows, too, and compares with the better: but for an
    /// all_to_all and a broadcast, which gain nothing by it.
    #[arg(long)]
    pub(crate) windows: bool,
    /// Prints how the times differ from those of this record, of GPUs.
    #[arg(long, value_name = "FILE")]
    pub(crate) compare: Option<PathBuf>,
    /// Times of PyTorch on this machine, of GPUs: a list of {"op", "shape", "who", "us"}, which is
    /// recorded beside ours.
    #[arg(long, value_name = "FILE")]
    pub(crate) torch: Option<PathBuf>,
    /// Seconds after which the program ends whatever it waits for, of GPUs [default: 400].
    #[arg(long, value_name = "SECONDS")]
    pub(crate) limit: Option<u64>,
}

impl Options {
    /// A number without a commit is no number.
    pub(crate) fn commit(&self) -> String {
        self.commit.clone().unwrap_or_else(commit)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Cases {
    ratio: Vec<Ratio>,
}

/// A ratio that was measured. A number without device and commit is no number.
#[derive(Serialize)]
struct Measured<'a> {
    #[serde(flatten)]
    ratio: &'a Ratio,
    time_us: f64,
    base_us: f64,
    value: f64,
    ok: bool,
}

/// Where results go, each when it is there.
pub(crate) struct Sink(Vec<(PathBuf, File)>);

impl Sink {
    fn new(options: &Options) -> Result<Sink> {
        let mut files = Vec::new();
        let mut open = |path: PathBuf, how: &OpenOptions| -> Result<()> {
            let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
            let file = made.and_then(|()| how.open(&path)).map_err(|error| {
                usage(format!("file {}", path.display()), error, "one that can be written")
            })?;
            files.push((path, file));
            Ok(())
        };
        if let Some(path) = &options.json {
            open(path.clone(), OpenOptions::new().write(true).create(true).truncate(true))?;
        }
        if let Some(path) = &options.record
            && let Some(path) = path.clone().or_else(|| usual_record(options.backend))
        {
            open(path, OpenOptions::new().create(true).append(true))?;
        }
        Ok(Sink(files))
    }

    /// One line more.
    pub(crate) fn add(&mut self, line: serde_json::Value) -> Result<()> {
        for (path, file) in &mut self.0 {
            file.write_all(format!("{line}\n").as_bytes())
                .with_context(|| path.display().to_string())?;
        }
        Ok(())
    }
}

/// The record of this kind of device; none where there is no GPU, and nothing to record.
fn usual_record(backend: BackendKind) -> Option<PathBuf> {
    let name = match backend {
        BackendKind::Cpu => backend.to_string(),
        _ => file_name(&backend.devices().ok()?.first()?.name),
    };
    Some(kept(&format!("{name}.jsonl")))
}

/// `NVIDIA H200 sm_90` as `h200`, `AMD Instinct MI300X gfx942` as `mi300x`.
fn file_name(gpu: &str) -> String {
    let name = gpu.split(" sm_").next().unwrap_or_default();
    let name = name.split(" gfx").next().unwrap_or_default();
    let name = name.trim_start_matches("NVIDIA ").trim_start_matches("AMD Instinct ");
    name.to_lowercase().replace([' ', '/'], "-")
}

/// Measures and prints; whether all ratios are as asked.
pub(crate) fn main(options: &Options) -> Result<bool> {
    match options.backend {
        BackendKind::Cpu => on_cpu(options),
        _ => gpu_bench::main(options, &mut Sink::new(options)?),
    }
}

fn on_cpu(options: &Options) -> Result<bool> {
    let path = |path: &PathBuf| path.display().to_string();
    unread(
        "the benchmark of the CPU",
        &[
            ("--ranks", options.ranks.map(|ranks| ranks.to_string())),
            ("--libraries", options.libraries.first().map(path)),
            ("--windows", options.windows.then(|| "given".into())),
            ("--compare", options.compare.as_ref().map(path)),
            ("--torch", options.torch.as_ref().map(path)),
            ("--limit", options.limit.map(|seconds| seconds.to_string())),
        ],
    )?;
    let mut sink = Sink::new(options)?;
    let cases = cases(options)?;
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::NOTHING);
    table.set_header(["ratio", "shape", "time", "base", "ratio", "at most", ""]);
    let mut all_ok = true;
    let device = device();
    for ratio in &cases.ratio {
        let job = RatioJob::new(ratio)?;
        let place = Place::new(ratio.ranks, ratio.kind == Kind::Gemm)?;
        let Times { time: time_us, base: base_us, ratio: value } = place.run(&job)?;
        let ok = value <= ratio.at_most;
        all_ok &= ok;
        table.add_row([
            ratio.name.clone(),
            format!("{} x {} x {}", ratio.m, ratio.n, ratio.k),
            format!("{time_us:.0} us"),
            format!("{base_us:.0} us"),
            format!("{value:.3}"),
            format!("{:.3}", ratio.at_most),
            if ok { "ok".into() } else { "MISSED".into() },
        ]);
        let measured = Measured { ratio, time_us, base_us, value, ok };
        let mut line = serde_json::to_value(&measured)?;
        line["device"] = device.clone();
        line["commit"] = options.commit().into();
        line["date"] = date(SystemTime::now()).into();
        sink.add(line)?;
    }
    say!("{table}")?;
    Ok(all_ok)
}

fn cases(options: &Options) -> Result<Cases> {
    let mut cases: Cases = read(options.cases.as_deref(), ("bench/cpu.toml", CASES))?;
    if let Some(only) = &options.only {
        cases.ratio.retain(|ratio| ratio.name.contains(only.as_str()));
        if cases.ratio.is_empty() {
            return Err(usage("--only", only, "part of the name of a ratio"));
        }
    }
    Ok(cases)
}

/// What to measure, from a file or as built in: its name and text.
pub(crate) fn read<T: DeserializeOwned>(
    path: Option<&Path>,
    (usual, text): (&str, &str),
) -> Result<T> {
    let (text, name) = match path {
        None => (text.to_owned(), usual.to_owned()),
        Some(path) => {
            let name = path.display().to_string();
            let text = std::fs::read_to_string(path);
            (text.map_err(|e| usage(&name, e, "a readable file"))?, name)
        }
    };
    toml::from_str(&text).map_err(|e| usage(name, e, format!("the form of {usual}")))
}

/// The machine: model and number of its cores.
fn device() -> serde_json::Value {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let model = field("model name").unwrap_or_else(|| std::env::consts::ARCH.into());
    json!({"cpu": model, "family": field("cpu family"), "model": field("model"), "cores": cores})
}

/// What has computed, the commit, which git is asked for unless it is given, and the day, in words.
pub(crate) fn provenance(backend: BackendKind, given: Option<String>) -> String {
    let gpu = match backend {
        kind if kind.traits().host_threads => None,
        kind => kind.devices().ok().and_then(|all| all.into_iter().next()),
    };
    let machine = gpu.map(|device| device.name).unwrap_or_else(|| {
        let host = device();
        format!("{}, {} cores", host["cpu"].as_str().unwrap_or_default(), host["cores"])
    });
    let commit = given.unwrap_or_else(commit);
    let short = commit.get(..8).unwrap_or(&commit);
    let changed = if commit.ends_with('+') { "+" } else { "" };
    format!("{machine}; {short}{changed}; {}", date(SystemTime::now()))
}

/// The commit of the working folder, with `+` if it has changes; else that nobody knows it.
fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        output.status.success().then_some(text)
    };
    let Some(commit) = git(&["rev-parse", "HEAD"]) else { return "unknown".into() };
    let changes = git(&["status", "--porcelain", "--untracked-files=no"]);
    if changes.is_some_and(|text| text.is_empty()) { commit } else { format!("{commit}+") }
}

/// The day, in UTC.
pub(crate) fn date(time: SystemTime) -> String {
    let days = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 86400) as i64;
    // Howard Hinnant's civil_from_days, for days since 1970.
    let z = days + 719_468;
    let era = z / 146_097;
    let day_of_era = z % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn days_have_names() {
        let at = |seconds| date(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01");
        assert_eq!(at(951_782_400), "2000-02-29");
        assert_eq!(at(4_107_542_399), "2100-02-28");
        assert_eq!(at(4_107_542_400), "2100-03-01");
    }

    #[test]
    fn a_record_is_named_by_its_device() {
        assert_eq!(file_name("NVIDIA H200 sm_90"), "h200");
        assert_eq!(file_name("NVIDIA A100-SXM4-80GB sm_80"), "a100-sxm4-80gb");
        assert_eq!(file_name("AMD Instinct MI300X gfx942"), "mi300x");
        let cpu = usual_record(BackendKind::Cpu).unwrap();
        assert!(cpu.ends_with("bench/record/cpu.jsonl") && cpu.exists());
        assert!(kept("h200.jsonl").exists());
    }

    #[test]
    fn the_cases_are_read() {
        let cases: Cases = toml::from_str(CASES).unwrap();
        assert!(cases.ratio.len() >= 4);
        for ratio in &cases.ratio {
            RatioJob::new(ratio).unwrap();
        }
    }
}
