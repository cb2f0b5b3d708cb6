//! Options of `iris bench`, the cases that it reads, and the files that it writes.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use iris_heap::BackendKind;
use serde::de::DeserializeOwned;

use super::origin::commit;
use crate::errors::usage;
use crate::record::kept;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Backend: cpu; cuda, which also times NCCL and cuBLASLt for comparison; or hip, which also
    /// times RCCL and hipBLASLt if they are installed.
    #[arg(long, default_value = "cpu")]
    pub(crate) backend: BackendKind,
    /// Write the results as JSON, one object per line.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Skip the shapes that the file of `--json` has already, measured on as many ranks from this
    /// commit, and append the others: a benchmark that was cut off goes on (GPUs only).
    #[arg(long, requires = "json")]
    pub(crate) resume: bool,
    /// Append the results to a record file [default: bench/record/DEVICE.jsonl, where DEVICE is cpu
    /// or the name of the GPU, as in h200.jsonl].
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    pub(crate) record: Option<Option<PathBuf>>,
    /// Measure the cases of this file, in the format of bench/cpu.toml, or of bench/cuda.toml for
    /// GPUs.
    #[arg(long, value_name = "FILE")]
    pub(crate) cases: Option<PathBuf>,
    /// Measure only ratios whose names contain this text; on GPUs, only such ops.
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Option<String>,
    /// Commit of the measured program, if git is not available.
    #[arg(long, value_name = "COMMIT", env = "IRIS_COMMIT")]
    pub(crate) commit: Option<String>,
    /// Number of ranks on GPUs, as threads of this process [default: the number of GPUs].
    #[arg(long)]
    pub(crate) ranks: Option<usize>,
    /// Number of nodes that the ranks are split over (GPUs only). The nodes are simulated on this
    /// host: NCCL uses its sockets over loopback, within a node as well.
    #[arg(long, default_value_t = 1)]
    pub(crate) nodes: usize,
    /// Also time NCCL or RCCL with its buffers registered as windows, and compare with the faster
    /// one; not for all_to_all and broadcast, which gain nothing by it.
    #[arg(long)]
    pub(crate) windows: bool,
    /// Print the differences between the times measured now and those in this record (GPUs only).
    #[arg(long, value_name = "FILE")]
    pub(crate) compare: Option<PathBuf>,
    /// File with PyTorch's times on this machine, which are recorded together with ours (GPUs
    /// only): a list of {"op", "shape", "who", "us"}.
    #[arg(long, value_name = "FILE")]
    pub(crate) torch: Option<PathBuf>,
    /// Seconds after which the program ends, even if it hangs (GPUs only) [default: 400].
    #[arg(long, value_name = "SECONDS")]
    pub(crate) limit: Option<u64>,
}

impl Options {
    /// Commit of the measured program, recorded with every result: the option `--commit` or,
    /// without it, the commit that git reports.
    pub(crate) fn commit(&self) -> String {
        self.commit.clone().unwrap_or_else(commit)
    }
}

/// Files that results are appended to, one JSON object per line.
pub(crate) struct Sink(Vec<(PathBuf, File)>);

impl Sink {
    pub(crate) fn new(options: &Options) -> Result<Sink> {
        let mut files = Vec::new();
        let mut open = |path: PathBuf, how: &OpenOptions| -> Result<()> {
            let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
            let file = made.and_then(|()| how.open(&path)).map_err(|error| {
                usage(format!("file {}", path.display()), error, "a path that can be written")
            })?;
            files.push((path, file));
            Ok(())
        };
        if let Some(path) = &options.json {
            let mut how = OpenOptions::new();
            how.create(true);
            // A file that is continued keeps its lines.
            if options.resume {
                how.append(true)
            } else {
                how.write(true).truncate(true)
            };
            open(path.clone(), &how)?;
        }
        if let Some(path) = &options.record
            && let Some(path) = path.clone().or_else(|| usual_record(options.backend))
        {
            open(path, OpenOptions::new().create(true).append(true))?;
        }
        Ok(Sink(files))
    }

    /// Appends `line` to each of the files.
    pub(crate) fn add(&mut self, line: serde_json::Value) -> Result<()> {
        for (path, file) in &mut self.0 {
            file.write_all(format!("{line}\n").as_bytes())
                .with_context(|| path.display().to_string())?;
        }
        Ok(())
    }
}

/// Path of the record file that `--record` without a path means for this backend; `None` if there
/// is no GPU.
fn usual_record(backend: BackendKind) -> Option<PathBuf> {
    let name = match backend {
        BackendKind::Cpu => backend.to_string(),
        _ => file_name(&backend.devices().ok()?.first()?.name),
    };
    Some(kept(&format!("{name}.jsonl")))
}

/// Name of the record file for a GPU, without extension: `NVIDIA H200 sm_90` becomes `h200`, `AMD
/// Instinct MI300X gfx942` becomes `mi300x`.
fn file_name(gpu: &str) -> String {
    let name = gpu.split(" sm_").next().unwrap_or_default();
    let name = name.split(" gfx").next().unwrap_or_default();
    let name = name.trim_start_matches("NVIDIA ").trim_start_matches("AMD Instinct ");
    name.to_lowercase().replace([' ', '/'], "-")
}

/// Reads cases from the file `path`, or the built-in cases if it is `None`; `usual` is the name of
/// the built-in cases and `text` their content.
pub(crate) fn read<T: DeserializeOwned>(
    path: Option<&Path>,
    (usual, text): (&str, &str),
) -> Result<T> {
    let (text, name) = match path {
        None => (text.to_owned(), usual.to_owned()),
        Some(path) => {
            let name = path.display().to_string();
            let text = iris_heap::read_file(path);
            (text.map_err(|e| usage(&name, e, "a readable file"))?, name)
        }
    };
    toml::from_str(&text).map_err(|e| usage(name, e, format!("the format of {usual}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_named_by_its_device() {
        assert_eq!(file_name("NVIDIA H200 sm_90"), "h200");
        assert_eq!(file_name("NVIDIA A100-SXM4-80GB sm_80"), "a100-sxm4-80gb");
        assert_eq!(file_name("AMD Instinct MI300X gfx942"), "mi300x");
        let cpu = usual_record(BackendKind::Cpu).unwrap();
        assert!(cpu.ends_with("bench/record/cpu.jsonl") && cpu.exists());
        assert!(kept("h200.jsonl").exists());
    }
}
