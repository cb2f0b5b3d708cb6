//! hiprtc: search paths, supported architectures, and the options for every compilation.

use std::path::{Path, PathBuf};

use iris_heap::BackendKind;

use super::api::{Api, Names};
use super::{Compiler, Error, Result, Tool, Vendor, search};

const NAMES: Names =
    Names { what: "hiprtc (libhiprtc.so)", prefix: "hiprtc", code: "GetCode", text: None };

fn folders() -> Vec<PathBuf> {
    let roots =
        ["ROCM_PATH", "HIP_PATH", "ROCM_HOME"].iter().filter_map(|name| search::variable(name));
    let installed = search::named("/opt".as_ref(), |name| name.starts_with("rocm"));
    let mut folders: Vec<PathBuf> = roots.chain(installed).map(|root| root.join("lib")).collect();
    for packages in search::python_packages() {
        folders.push(packages.join("_rocm_sdk_core/lib"));
        folders.push(packages.join("torch/lib"));
    }
    folders
}

/// Loads `libhiprtc`, or else the HIP runtime `libamdhip64`, which contains the same functions in
/// releases before 7 (Debian 12 has no separate `libhiprtc`).
pub(super) fn load() -> Result<Compiler> {
    let folders = folders();
    let find = |name: &'static str, bare: &[&str]| {
        let is_library = |file: &str| file.starts_with(name);
        Api::find(&NAMES, "IRIS_HIPRTC", &folders, bare, is_library, |_| false)
    };
    let own = ["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so.5", "libhiprtc.so"];
    let runtime = ["libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"];
    let api = match find("libhiprtc.so", &own) {
        Err(Error::NotFound { what, mut looked }) => {
            find("libamdhip64.so", &runtime).map_err(|error| match error {
                Error::NotFound { looked: more, .. } => {
                    looked.extend(more);
                    Error::NotFound { what, looked }
                }
                error => error,
            })
        }
        found => found,
    }?;
    let version = version(&api)?;
    Ok(Compiler::new(Vendor::Amd, Tool::Library(api), version))
}

/// Version of ROCm. The HIP runtime reports it, because hiprtc reports 9.0 in every release.
/// Without the runtime, the version is parsed from the library's file name, for example
/// `libhiprtc.so.6.4.43484`.
fn version(api: &Api) -> Result<(i32, i32)> {
    const MAJOR: u32 = 10_000_000;
    match BackendKind::Hip.driver_version() {
        Ok(version) => Ok(((version / MAJOR) as i32, (version % MAJOR) as i32)),
        Err(_) => in_name(api.path()).map_or_else(|| api.version(), Ok),
    }
}

fn in_name(library: &Path) -> Option<(i32, i32)> {
    const MINOR: i32 = 100_000;
    let file = std::fs::canonicalize(library).unwrap_or(library.to_path_buf());
    let mut parts = file.file_name()?.to_str()?.split_once(".so.")?.1.split('.');
    let mut number = || parts.next()?.parse::<i32>().ok();
    let (major, minor) = (number()?, number()?);
    Some((major, minor.checked_mul(MINOR)?.checked_add(number()?)?))
}

/// Whether hiprtc of this release of ROCm can compile the kernels for an architecture. Call it
/// before a compilation, because hiprtc aborts the process without an error if it does not know an
/// architecture. Release 5.2, which Debian 12 has, also lacks a function that the kernels call.
pub(super) fn knows(release: (i32, i32), arch: &str) -> bool {
    let since = match arch {
        "gfx90a" => (5, 300_000),
        "gfx942" => (6, 0),
        _ => (7, 0),
    };
    release >= since
}

pub(super) fn fixed_options(arch: &str) -> Vec<String> {
    vec![format!("--offload-arch={arch}"), "-std=c++17".into(), "-O3".into()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_in_the_names_of_files() {
        let of = |name: &str| in_name(Path::new(name));
        assert_eq!(of("/nowhere/libhiprtc.so.6.4.43484"), Some((6, 443_484)));
        assert_eq!(of("libamdhip64.so.5.2.21153"), Some((5, 221_153)));
        assert_eq!(of("/opt/rocm/lib/libhiprtc.so"), None);
        assert_eq!(of("libhiprtc.so.7"), None);
    }

    #[test]
    fn releases_know_the_architectures_of_their_time() {
        let known = |release| ["gfx90a", "gfx942", "gfx950"].map(|arch| knows(release, arch));
        assert_eq!(known((5, 221_153)), [false; 3]);
        assert_eq!(known((5, 422_804)), [true, false, false]);
        assert_eq!(known((6, 443_484)), [true, true, false]);
        assert_eq!(known((7, 253_211)), [true, true, true]);
    }
}
