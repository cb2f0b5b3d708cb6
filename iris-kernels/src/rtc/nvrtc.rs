//! NVRTC: where it is, and the options it always gets.

use std::path::PathBuf;

use super::api::{Api, Names};
use super::{Compiler, Result, Vendor, search};

const NAMES: Names = Names {
    what: "NVRTC (libnvrtc.so)",
    create: "nvrtcCreateProgram",
    destroy: "nvrtcDestroyProgram",
    compile: "nvrtcCompileProgram",
    log_size: "nvrtcGetProgramLogSize",
    log: "nvrtcGetProgramLog",
    code_size: "nvrtcGetCUBINSize",
    code: "nvrtcGetCUBIN",
    text_size: Some("nvrtcGetPTXSize"),
    text: Some("nvrtcGetPTX"),
    version: "nvrtcVersion",
    error: "nvrtcGetErrorString",
};

/// The folders to look in, in order.
fn folders() -> Vec<PathBuf> {
    let inside = ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"];
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| search::variable(name));
    let installed = search::named("/usr/local".as_ref(), |name| name.starts_with("cuda"));
    let mut folders: Vec<PathBuf> =
        toolkits.chain(installed).flat_map(|root| inside.map(|folder| root.join(folder))).collect();
    let wheels = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cu12/lib"];
    for packages in search::python_packages() {
        folders.extend(wheels.map(|wheel| packages.join(wheel)));
    }
    folders
}

fn is_library(name: &str) -> bool {
    name.starts_with("libnvrtc.so")
}

pub(super) fn load() -> Result<Compiler> {
    let bare = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
    // The builtins are loaded by their bare name later on, which is found only if they are in the
    // process already.
    let before = |name: &str| name.starts_with("libnvrtc-builtins.so");
    let api = Api::find(&NAMES, "IRIS_NVRTC", &folders(), &bare, is_library, before)?;
    Compiler::new(Vendor::Nvidia, api)
}

pub(super) fn fixed(arch: &str) -> Vec<String> {
    vec![format!("--gpu-architecture={arch}"), "--std=c++17".into()]
}
