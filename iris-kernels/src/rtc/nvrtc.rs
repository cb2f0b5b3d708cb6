//! NVRTC: search paths, and the options for every compilation.

use super::api::{Api, Names};
use super::{Compiler, Result, Tool, Vendor, search};

pub(super) const NAMES: Names =
    Names { what: "NVRTC (libnvrtc.so)", prefix: "nvrtc", code: "GetCUBIN", text: Some("GetPTX") };

/// Folders below Python's package folders that may contain the NVRTC library.
const WHEELS: [&str; 3] = ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "nvidia/cu12/lib"];

fn is_library(name: &str) -> bool {
    name.starts_with("libnvrtc.so")
}

pub(super) fn load() -> Result<Compiler> {
    let bare = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
    // NVRTC's library of built-in functions must be loaded first: NVRTC later loads it by its bare
    // name, which only succeeds if it is already in the process.
    let before = |name: &str| name.starts_with("libnvrtc-builtins.so");
    let api =
        Api::find(&NAMES, "IRIS_NVRTC", &search::cuda_folders(&WHEELS), &bare, is_library, before)?;
    let version = api.version()?;
    Ok(Compiler::new(Vendor::Nvidia, Tool::Library(api), version))
}

/// Option that makes a compilation faster and does not change the code: all cores optimise the
/// functions of a source. `None` before release 13, with which the option was not tried.
pub(super) fn parallel(version: (i32, i32)) -> Option<String> {
    (version >= (13, 0)).then(|| "--split-compile=0".into())
}

pub(super) fn fixed_options(arch: &str) -> Vec<String> {
    vec![format!("--gpu-architecture={arch}"), "--std=c++17".into()]
}
