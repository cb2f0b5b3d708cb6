//! GPUs of one vendor: driver, devices, compilers, libraries and links.

use std::path::Path;

use iris_heap::{BackendKind, Bytes, DeviceInfo, Error, ErrorKind};
use iris_kernels::gemm::Gemm;
use iris_kernels::rtc::{self, Compiler};

use super::{Finding, Section, State, Verdict, host, links};
use crate::gpu_bench::Vendors;

/// Checks everything that a GPU backend needs. Links are measured if there are several devices.
pub(super) fn section(kind: BackendKind, with_links: bool) -> (Section, Verdict) {
    let title = if kind == BackendKind::Cuda { "NVIDIA GPUs" } else { "AMD GPUs" };
    let mut findings = vec![driver(kind)];
    let has_driver = findings[0].state == State::Ok;
    let devices = if has_driver { kind.devices() } else { Ok(Vec::new()) };
    let count = devices.as_ref().map_or(0, Vec::len);
    let mut obstacle = match count {
        0 if has_driver => Some("no device".to_string()),
        0 => Some("no driver".into()),
        _ => None,
    };
    match &devices {
        Ok(all) => findings.extend(all.iter().map(device)),
        // The driver works if it reports that there are no devices, so this is not a finding about
        // the driver.
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            findings.push(Finding::new(State::None, "devices", "none").details([error]));
        }
        Err(error) => {
            obstacle = Some("the driver does not start".into());
            findings.push(Finding::new(State::Error, "devices", error));
        }
    }
    // If there is no device, missing compilers and libraries are not errors.
    let needed = if count > 0 { State::Error } else { State::None };
    let compilers = compilers(kind, needed);
    let compiles = compilers.iter().any(|finding| finding.state == State::Ok);
    findings.extend(compilers);
    let carried = iris_kernels::cache::carried_folder().is_some_and(|folder| folder.is_dir());
    if count > 0 {
        findings.extend(libraries(kind));
        findings.push(host::locked_memory());
        findings.push(host::tuning(kind, count.max(2)));
    }
    if kind == BackendKind::Hip && has_driver {
        findings.extend(["/dev/kfd", "/dev/dri"].map(|place| access(Path::new(place), needed)));
    }
    if count > 0 && !compiles && !carried {
        obstacle = Some("no compiler of kernels".into());
    }
    if obstacle.is_none() && with_links && count > 1 {
        let measured = links::measured(kind, count);
        if let Some(wrong) = measured.iter().find(|finding| finding.state == State::Error) {
            obstacle = Some(format!("{} {}", wrong.what, wrong.found));
        }
        findings.extend(measured);
    }
    (Section { title, findings }, Verdict { backend: kind.name(), obstacle })
}

fn driver(kind: BackendKind) -> Finding {
    match kind.driver_version() {
        Ok(version) => Finding::new(State::Ok, "driver", version_name(kind, version)),
        Err(Error::Library { library, looked, problem }) => {
            Finding::new(State::None, "driver", format!("{library} is not there"))
                .details([problem, looked])
        }
        Err(error) => Finding::new(State::Error, "driver", error),
    }
}

/// Version in readable form: 12080 is CUDA 12.8, 60443484 is HIP 6.4.43484.
fn version_name(kind: BackendKind, version: u32) -> String {
    match kind {
        BackendKind::Cuda => format!("CUDA {}.{}", version / 1000, version % 1000 / 10),
        _ => {
            let (major, minor) = (version / 10_000_000, version / 100_000 % 100);
            format!("HIP {major}.{minor}.{}", version % 100_000)
        }
    }
}

fn device(device: &DeviceInfo) -> Finding {
    let DeviceInfo { kind, index, name, uuid, multiprocessors, .. } = device;
    let memory = kind
        .memory_info(*index)
        .map(|(free, all)| format!("{} of {} free", Bytes::new(free), Bytes::new(all)));
    let (state, memory) = match memory {
        Ok(memory) => (State::Ok, memory),
        Err(error) => (State::Error, error.to_string()),
    };
    let found = format!("{name}, {multiprocessors} multiprocessors, {memory}");
    let gemm = if Gemm::is_there_for(device) { "built-in GEMM" } else { "tile GEMM" };
    let products = format!("products with batch_invariant: {gemm}");
    Finding::new(state, &format!("device {index}"), found).details([uuid, &products])
}

fn compilers(kind: BackendKind, missing: State) -> Vec<Finding> {
    let found = |name: &str,
                 found: rtc::Result<&'static Compiler>,
                 missing: State,
                 remedy: &str| match found {
        Ok(compiler) => Finding::new(State::Ok, "compiler", compiler.title())
            .details([compiler.path().display()]),
        Err(rtc::Error::NotFound { what, looked }) => {
            let finding =
                Finding::new(missing, "compiler", format!("{what} is not there")).details(looked);
            if missing == State::Error { finding.remedy(remedy) } else { finding }
        }
        Err(error) => Finding::new(State::Error, "compiler", format!("{name}: {error}")),
    };
    match kind {
        BackendKind::Cuda => {
            let remedy =
                "install CUDA 12 or later, or the wheel nvidia-cuda-nvrtc, and set IRIS_NVRTC";
            vec![found("NVRTC", Compiler::nvrtc(), missing, remedy)]
        }
        _ => {
            let hiprtc = Compiler::hiprtc();
            // Either compiler is sufficient: a missing clang matters only if hiprtc is missing too.
            let clang = if hiprtc.is_ok() { State::None } else { missing };
            let remedy = "install ROCm's hiprtc, and set IRIS_HIPRTC, or clang";
            let found_clang = found("clang", Compiler::clang(), clang, remedy);
            let missing = if found_clang.state == State::Ok { State::None } else { missing };
            vec![found("hiprtc", hiprtc, missing, remedy), found_clang]
        }
    }
}

/// Checks the vendor's collective and GEMM libraries, and names the consequence if one is missing.
fn libraries(kind: BackendKind) -> Vec<Finding> {
    let vendors = Vendors::load(kind);
    let costs = ["`iris bench` compares no messages", "GEMMs are kernels of iris's own"];
    let versions = vendors.usable();
    let found = vendors.names().into_iter().zip(vendors.paths()).zip(versions).zip(costs);
    found
        .map(|(((name, path), version), cost)| match (path, version) {
            (Err(why), _) => Finding::new(State::Warning, name, format!("is not there, so {cost}"))
                .remedy(format!("install it, or set IRIS_{}", name.to_uppercase()))
                .details([why]),
            (Ok(path), Ok(version)) => {
                Finding::new(State::Ok, name, version).details([path.display()])
            }
            (Ok(path), Err(why)) => {
                Finding::new(State::Warning, name, format!("cannot be used, so {cost}: {why}"))
                    .details([path.display()])
            }
        })
        .collect()
}

/// Checks whether this user can open a device file (or list a folder of device files). Without this
/// access the driver sees no device.
fn access(place: &Path, missing: State) -> Finding {
    let opened = match place.is_dir() {
        true => std::fs::read_dir(place).map(|files| format!("{} files", files.count())),
        false => {
            let both = std::fs::OpenOptions::new().read(true).write(true).open(place);
            both.map(|_| "can be opened".into())
        }
    };
    let name = place.display().to_string();
    match opened {
        Ok(found) => Finding::new(State::Ok, &name, found),
        Err(error) => {
            // The stand-in driver of tests has devices without device files.
            let is_missing = error.kind() == std::io::ErrorKind::NotFound;
            if is_missing && missing == State::None {
                return Finding::new(State::None, &name, "is not there");
            }
            Finding::new(State::Warning, &name, error)
                .remedy("add this user to the groups render and video")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_shown_as_people_write_them() {
        let shown = [
            version_name(BackendKind::Cuda, 12080),
            version_name(BackendKind::Cuda, 13000),
            version_name(BackendKind::Hip, 60_443_484),
            version_name(BackendKind::Hip, 70_253_211),
        ];
        assert_eq!(shown, ["CUDA 12.8", "CUDA 13.0", "HIP 6.4.43484", "HIP 7.2.53211"]);
    }

    #[test]
    fn a_file_that_is_not_there_is_said_so() {
        let found = access(Path::new("/nowhere/kfd"), State::Error);
        assert!(found.what == "/nowhere/kfd" && found.found.contains("No such file"), "{found:?}");
        assert_eq!(access(Path::new("/dev/null"), State::Error).state, State::Ok);
    }
}
