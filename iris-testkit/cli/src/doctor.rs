//! `iris doctor`: what is there on this machine, and what is missing, in the words of whoever looked for it.

use std::fmt::Display;
use std::path::Path;
use std::process::Command;

use anyhow::Result;
use iris_heap::BackendKind;
use iris_kernels::cache::Cache;
use iris_kernels::rtc::{self, Compiler};
use iris_testkit::say;

use crate::bench::{date, provenance};
use crate::gpu_bench::Vendors;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only what this backend needs; it is a failure if the backend cannot be used: cpu, cuda or hip.
    #[arg(long)]
    backend: Option<BackendKind>,
}

/// Variables of libraries that decide how ranks run, beside our own.
const PREFIXES: [&str; 15] = [
    "IRIS_",
    "CUDA_",
    "NVIDIA_",
    "NCCL_",
    "RCCL_",
    "HIPBLASLT_",
    "HIP_",
    "HSA_",
    "ROCR_",
    "ROCM_",
    "ROC_",
    "GPU_",
    "AMD_",
    "LD_LIBRARY_PATH",
    "RANK",
];

/// Looks and prints; whether the backend that was asked for can be used.
pub(crate) fn main(options: &Options) -> Result<bool> {
    row("iris", format!("{}; {}", env!("CARGO_PKG_VERSION"), provenance(BackendKind::Cpu, None)))?;
    row("day", date(std::time::SystemTime::now()))?;
    row("system", system())?;
    row("memory", memory())?;
    for (name, value) in variables() {
        row("variable", format!("{name}={value}"))?;
    }
    row("kernels", carried())?;
    row("cache", or_why(Cache::of_user().map(|cache| cache.folder().display().to_string())))?;
    let asked = options.backend;
    let mut usable = asked.is_none_or(|kind| kind.traits().host_threads);
    for kind in BackendKind::ALL.into_iter().filter(|kind| !kind.traits().host_threads) {
        if asked.is_none_or(|asked| asked == kind) {
            usable |= gpus(kind)?;
        }
    }
    Ok(usable)
}

fn row(what: &str, found: impl Display) -> Result<()> {
    // Messages of several lines stay in their column.
    let found = found.to_string().replace('\n', "\n          ");
    Ok(say!("{what:9} {found}")?)
}

/// What was found, or why it was not.
fn or_why<E: Display>(found: Result<String, E>) -> String {
    found.unwrap_or_else(|error| format!("none: {error}"))
}

/// What a backend of GPUs needs; whether it has a device.
fn gpus(kind: BackendKind) -> Result<bool> {
    let name = kind.name();
    match kind.driver_version() {
        Ok(version) => row(name, format!("driver {version}"))?,
        Err(error) => row(name, format!("no driver: {error}"))?,
    }
    let devices = kind.devices();
    let usable = devices.as_ref().is_ok_and(|devices| !devices.is_empty());
    match devices {
        Ok(devices) => {
            for device in devices {
                let memory = kind.memory_info(device.index).map(|(free, all)| {
                    format!("{:.1} of {:.1} GiB free", gibibytes(free), gibibytes(all))
                });
                let (index, workgroups) = (device.index, device.workgroups);
                let memory = memory.unwrap_or_else(|error| error.to_string());
                let what = format!("{} {}", device.name, device.uuid);
                row(name, format!("device {index}: {what}, {workgroups} units, {memory}"))?;
            }
        }
        Err(error) => row(name, error)?,
    }
    match kind {
        BackendKind::Cuda => row("compiler", compiler(Compiler::nvrtc()))?,
        _ => {
            row("compiler", compiler(Compiler::hiprtc()))?;
            row("compiler", compiler(Compiler::clang()))?;
            for place in ["/dev/kfd", "/dev/dri"] {
                row("device", access(Path::new(place)))?;
            }
        }
    }
    libraries(kind, usable)?;
    Ok(usable)
}

/// The vendor's libraries, and what it costs if they are missing. Where there is no device they are only
/// loaded: AMD's would end the process.
fn libraries(kind: BackendKind, usable: bool) -> Result<()> {
    let vendors = Vendors::load(kind, &[]);
    let versions = if usable { vendors.usable().map(Some) } else { [None, None] };
    let costs =
        ["iris bench compares no messages", "products of whole matrices are by kernels of ours"];
    let found = vendors.names().into_iter().zip(vendors.paths()).zip(versions).zip(costs);
    for (((name, path), version), cost) in found {
        let found = match (path, version) {
            (Err(why), _) => format!("no {name}, so that {cost}: {why}"),
            (Ok(path), None) => format!("{name}: {}", path.display()),
            (Ok(path), Some(Ok(version))) => format!("{name} {version}: {}", path.display()),
            (Ok(path), Some(Err(why))) => {
                format!("{name} of {}, so that {cost}: {why}", path.display())
            }
        };
        row("library", found)?;
    }
    Ok(())
}

fn compiler(found: rtc::Result<&'static Compiler>) -> String {
    or_why(found.map(|compiler| format!("{}: {}", compiler.title(), compiler.path().display())))
}

/// Whether this user can open a device's file, without which the driver sees no device.
fn access(place: &Path) -> String {
    let opened = match place.is_dir() {
        true => std::fs::read_dir(place).map(|files| format!("{} files", files.count())),
        false => {
            let both = std::fs::OpenOptions::new().read(true).write(true).open(place);
            both.map(|_| "can be opened".into())
        }
    };
    format!("{}: {}", place.display(), opened.unwrap_or_else(|error| error.to_string()))
}

fn gibibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// The system's name and release.
fn system() -> String {
    let uname = Command::new("uname").args(["-srm"]).output();
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let pretty = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    let kernel = uname.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    format!("{}; {}", or_why(kernel), pretty.unwrap_or("of no name").trim_matches('"'))
}

/// What the host has free.
fn memory() -> String {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let lines =
        info.lines().filter(|line| line.starts_with("MemTotal") || line.starts_with("MemAv"));
    let words = lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    words.collect::<Vec<_>>().join(", ")
}

fn variables() -> Vec<(String, String)> {
    let all = std::env::vars_os().map(|(name, value)| {
        (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())
    });
    let mut known: Vec<_> =
        all.filter(|(name, _)| PREFIXES.iter().any(|prefix| name.starts_with(prefix))).collect();
    known.sort();
    known
}

/// The compiled kernels that came with the program, by architecture.
fn carried() -> String {
    let Some(folder) = iris_kernels::cache::carried_folder() else {
        return "none".into();
    };
    let Ok(files) = std::fs::read_dir(&folder) else {
        return format!("none beside the program, in {}", folder.display());
    };
    format!("{} in {}", files.count(), folder.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_there_is_said_so() {
        let text = access(Path::new("/nowhere/kfd"));
        assert!(text.contains("/nowhere/kfd") && text.contains("No such file"), "{text}");
        assert!(access(Path::new("/dev/null")).contains("can be opened"));
    }
}
