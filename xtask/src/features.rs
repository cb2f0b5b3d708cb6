//! Optional features of the workspace, which are enabled where their requirements are installed.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

/// Feature of iris-cli for steps between nodes over MPI, with its package. It enables the feature
/// `mpi` of the other packages.
const MPI: &str = "iris-cli/mpi";

/// Path of HIP's header below the root folder of ROCm, or below `/usr` on Debian.
const HEADER: &str = "include/hip/hip_runtime_api.h";

/// Root folder of HIP's headers; `None` if they are not installed. In CI a missing header is an
/// error, so a root is returned at which the build fails.
pub(crate) fn hip_headers() -> Option<PathBuf> {
    let told = ["HIP_PATH", "ROCM_PATH"].into_iter().filter_map(std::env::var_os);
    let mut places = told.map(PathBuf::from).chain(["/opt/rocm".into(), "/usr".into()]);
    let found = places.find(|place| place.join(HEADER).is_file());
    found.or_else(|| is_ci().then(|| "/usr".into()))
}

/// Whether this process runs in CI, where missing requirements are errors.
pub(crate) fn is_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| value == "true")
}

/// Enables the optional features whose requirements are installed, for a cargo command on the whole
/// workspace. All steps that build programs use this function, so that no step builds the workspace
/// again with other features.
///
/// The element type without roles, which operators must refuse, is always enabled.
pub(crate) fn with_features(mut command: Command) -> Command {
    command.args(["--features", "iris-ops/test-dtype"]);
    with_mpi(with_hip(command))
}

/// Enables iris-heap's feature `hip` for a cargo command if HIP's headers are installed.
fn with_hip(mut command: Command) -> Command {
    if let Some(root) = hip_headers() {
        command.args(["--features", "iris-heap/hip"]).env("HIP_PATH", root);
    }
    command
}

/// Name of Open MPI's compiler on Debian, where `mpicc` may be the compiler of MPICH.
const OPEN_MPICC: &str = "mpicc.openmpi";

/// Variable that names the compiler of MPI for the build of its bindings.
const MPICC: &str = "MPICC";

/// Command that succeeds if MPI's compiler is installed: the one that the variable `MPICC` names,
/// else Open MPI's.
pub(crate) fn mpicc() -> Command {
    let probe = |name: &OsStr| {
        let mut mpicc = Command::new(name);
        mpicc.arg("--version");
        mpicc
    };
    match std::env::var_os(MPICC) {
        Some(name) => probe(&name),
        None if probe(OPEN_MPICC.as_ref()).output().is_ok() => probe(OPEN_MPICC.as_ref()),
        None => probe("mpicc".as_ref()),
    }
}

/// Makes a cargo command build the bindings of MPI with the compiler of [`mpicc`].
pub(crate) fn by_mpicc(mut command: Command) -> Command {
    command.env(MPICC, mpicc().get_program());
    command
}

/// Enables the feature for a cargo command if MPI's compiler and libclang, from which the bindings
/// of MPI are made, are installed. In CI the feature is always enabled, so that the build fails
/// if one of them is missing.
fn with_mpi(mut command: Command) -> Command {
    let compiles = || mpicc().output().is_ok_and(|output| output.status.success());
    if is_ci() || (compiles() && has_libclang()) {
        command.args(["--features", MPI]);
        command = by_mpicc(command);
    }
    command
}

/// Whether libclang lies in one of the folders in which Debian installs it, or in `LIBCLANG_PATH`.
fn has_libclang() -> bool {
    let told = std::env::var_os("LIBCLANG_PATH").map(PathBuf::from);
    let versions = (11..30).map(|version| PathBuf::from(format!("/usr/lib/llvm-{version}/lib")));
    let mut folders = told.into_iter().chain(versions).filter_map(|it| it.read_dir().ok());
    folders.any(|mut files| {
        files.any(|file| {
            let name = file.map(|file| file.file_name()).unwrap_or_default();
            let name = name.to_string_lossy();
            (name.starts_with("libclang.so") || name.starts_with("libclang-"))
                && name.contains(".so")
                && !name.contains("cpp")
        })
    })
}
