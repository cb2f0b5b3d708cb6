//! hiprtc: where it is, and the options it always gets.

use std::path::PathBuf;

use super::api::{Api, Names};
use super::{Compiler, Result, Vendor, search};

const NAMES: Names = Names {
    what: "hiprtc (libhiprtc.so)",
    create: "hiprtcCreateProgram",
    destroy: "hiprtcDestroyProgram",
    compile: "hiprtcCompileProgram",
    log_size: "hiprtcGetProgramLogSize",
    log: "hiprtcGetProgramLog",
    code_size: "hiprtcGetCodeSize",
    code: "hiprtcGetCode",
    text_size: None,
    text: None,
    version: "hiprtcVersion",
    error: "hiprtcGetErrorString",
};

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

pub(super) fn load() -> Result<Compiler> {
    let bare = ["libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so"];
    let is_library = |name: &str| name.starts_with("libhiprtc.so");
    let api = Api::find(&NAMES, "IRIS_HIPRTC", &folders(), &bare, is_library, |_| false)?;
    Compiler::new(Vendor::Amd, api)
}

pub(super) fn fixed(arch: &str) -> Vec<String> {
    vec![format!("--offload-arch={arch}"), "-std=c++17".into(), "-O3".into()]
}
