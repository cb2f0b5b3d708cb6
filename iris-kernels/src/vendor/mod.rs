//! Vendors' libraries, loaded at run time: GEMMs (cuBLASLt, hipBLASLt) for products without fused
//! communication, and collectives (NCCL, RCCL) for steps between nodes.
//!
//! **Problem.** A vendor's GEMM is tuned for every shape and is the baseline for this crate's
//! kernels. If the library is installed, it can compute each product that is not fused with
//! communication, unless a built-in GEMM was measured to be faster for the shape.
//!
//! **Solution.** The library is loaded when it is first needed, and its functions are called by
//! name: [`Blas`]. When a product is prepared, the library's heuristic chooses an algorithm that
//! fits into a given workspace; nothing is timed. The first call of a problem describes it to the
//! library. Later calls only enqueue and allocate nothing; all calls may be captured in a graph.
//!
//! **Running.** A [`Product`] solves one [`Problem`]. [`Prepared`] has the algorithms of an
//! operator whose rows, layouts and alignment change from call to call. A product may add a bias (a
//! row) and an addend (a matrix of the result's shape).
//!
//! cuBLASLt and hipBLASLt have the same functions under different names and with different numbers.
//! One implementation calls both; a [`Dialect`] has the names and numbers.
//!
//! **Limits.** The library does not compute GELU here, because it approximates GELU by tanh, while
//! this crate uses erf. It also computes no column-major results with a bias. hipBLASLt has never
//! been called on a device, only by tests over a fake library with its interface.

mod blas;
mod dialect;
mod nccl;
mod prepared;
mod problem;
#[cfg(test)]
mod texts;

use std::path::{Path, PathBuf};

use iris_heap::BackendKind;

use crate::rtc::search::{self, library};

pub use blas::{Algorithm, Blas, Multiplier, Product};
pub use dialect::Dialect;
pub use nccl::{
    Communicator, CommunicatorId, CommunicatorOptions, Nccl, NcclCall, Release, Window,
};
pub use prepared::Prepared;
pub use problem::{Addresses, Layout, Problem};

/// Error of a vendor's library.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The library was not found.
    #[error(
        "{what} is not there; expected it as {}: install it, or name it by its variable (`iris doctor --verbose`)",
        crate::rtc::error::places(looked)
    )]
    NotFound {
        /// Name of the library.
        what: &'static str,
        /// Places that were searched, in order, each with the reason why the library there was not
        /// used.
        looked: Vec<String>,
    },
    /// No GEMM library is supported for this kind of device.
    #[error("no GEMM library is supported on {kind}, expected cuda or hip: use Library::None")]
    None {
        /// Kind of device for which no GEMM library is supported.
        kind: BackendKind,
    },
    /// The release of the library is older than the oldest supported one.
    #[error(
        "{library} is older than {oldest}, the oldest supported version: install a later one, or use \
         Library::Ours"
    )]
    TooOld {
        /// Name and version of the library.
        library: String,
        /// Oldest version of the library that is supported.
        oldest: String,
    },
    /// A function of the library failed.
    #[error(
        "{function}: {name} (code {code}), expected success; `iris doctor` says which library is there"
    )]
    Call {
        /// Name of the function.
        function: String,
        /// Status code that the library's function returned.
        code: i32,
        /// Name that the library gives the status code.
        name: String,
    },
    /// A call of the library that runs in the background did not end within the deadline.
    #[error(
        "{function} did not end within {seconds} s, expected all ranks to join it: see whether a rank is lost or \
         the network between the nodes is cut"
    )]
    Late {
        /// Name of the function.
        function: &'static str,
        /// Time in seconds after which the wait was given up.
        seconds: u64,
    },
    /// The library has no algorithm for the problem.
    #[error(
        "{library} has no algorithm for {problem}, expected one: use Library::Ours or a variant that multiplies itself"
    )]
    NoAlgorithm {
        /// Name and version of the library.
        library: String,
        /// Description of the problem: its shape, types and layouts.
        problem: String,
    },
}

/// Result with the error type of GEMM libraries.
pub type Result<T> = std::result::Result<T, Error>;

/// Opens the first usable file of a library whose files are called `name` plus a version: at the
/// path that the environment variable `variable` gives, otherwise in `folders`, otherwise as `bare`
/// on the loader's path.
///
/// # Errors
/// [`Error::NotFound`] with the places that were searched.
fn find<T>(
    (what, variable): (&'static str, &str),
    folders: &[PathBuf],
    (name, bare): (&str, &[&str]),
    open: impl Fn(&Path) -> std::result::Result<T, String>,
) -> Result<T> {
    search::first(variable, folders, bare, |file| file.starts_with(name), open)
        .map_err(|looked| Error::NotFound { what, looked })
}

/// Folders with CUDA's libraries: folders of CUDA toolkits, and the folders `wheels` inside
/// Python's package folders.
fn cuda_folders(wheels: &[&str]) -> Vec<PathBuf> {
    search::cuda_folders(wheels)
}

/// Folders of the HIP runtimes that this process has loaded. A library in such a folder uses the
/// runtime in the same folder.
fn hip_folders() -> Vec<PathBuf> {
    search::loaded(HIP_RUNTIME).iter().filter_map(|file| Some(file.parent()?.into())).collect()
}

/// Prefix of the file name of HIP's runtime.
const HIP_RUNTIME: &str = "libamdhip64.so";

/// Loads a vendor's library.
///
/// # Errors
/// The loader's error. Also an error if the library brings a second HIP runtime, as Python packages
/// do: streams and memory of the runtime that is already loaded would be invalid in the second one.
#[allow(unsafe_code, reason = "a library is loaded")]
fn open(file: &Path) -> std::result::Result<libloading::Library, String> {
    let before = search::loaded(HIP_RUNTIME);
    // SAFETY: a vendor's library may be loaded by any program; its initialisers have no
    // preconditions.
    let library = unsafe { libloading::Library::new(file) }.map_err(|error| error.to_string())?;
    let mut more = search::loaded(HIP_RUNTIME).into_iter();
    match more.find(|runtime| !before.is_empty() && !before.contains(runtime)) {
        Some(other) => Err(format!("it loads a second HIP runtime, {}", other.display())),
        None => Ok(library),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_with_the_searched_places() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("libnothing.so.1");
        std::fs::write(&file, "no library").expect("room");
        let names = ("nothing (libnothing.so)", "IRIS_NO_SUCH_VARIABLE");
        let open = |_: &Path| Err::<(), _>("it does not open".to_string());
        let folders = [folder.path().to_path_buf()];
        let error = find(names, &folders, ("libnothing.so", &["libnothing.so"]), open);
        let text = error.expect_err("there is none").to_string();
        assert!(text.starts_with("nothing (libnothing.so) is not there"), "{text}");
        assert!(text.contains(&format!("{} (it does not open)", file.display())), "{text}");
        assert!(
            text.contains("libnothing.so (it does not open) (places searched: 3): install"),
            "{text}"
        );
    }
}
