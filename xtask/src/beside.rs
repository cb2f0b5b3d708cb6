//! `cargo xtask beside`: checks that iris compiles in a program that has chosen its own CUDA
//! version for cudarc.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::program::cargo;

/// Features of cudarc that the crate candle-core 0.11.1 requests with its feature `cuda`.
const CANDLE: &str = r#"["std", "cublas", "cublaslt", "curand", "driver", "nvrtc", "f16", "f8", "cuda-version-from-build-system", "dynamic-linking"]"#;

/// Oldest and newest CUDA version that programs choose for cudarc's bindings, as values of the
/// variable CUDARC_CUDA_VERSION. If it is set, cudarc's build script does not ask nvcc.
const VERSIONS: [&str; 2] = ["12000", "13000"];

/// Source of the checked program: it uses every function that takes or returns cudarc's types, and
/// the functions that take handles as numbers.
const SOURCE: &str = "//! Made by `cargo xtask beside`.

use std::sync::Arc;

use iris_heap::{Result, Stream, SymSlice, SymmetricHeap};

/// Makes a stream of the heap from a stream of cudarc, which the heap keeps alive.
pub fn theirs(heap: &SymmetricHeap, stream: &Arc<cudarc::driver::CudaStream>) -> Result<Stream> {
    heap.gpu()?.stream_of(stream)
}

/// Sums slices by a communicator on a stream, all made by cudarc.
pub fn sum(
    stream: &Arc<cudarc::driver::CudaStream>,
    (rank, world_size, id): (usize, usize, iris_ops::comm::Id),
    data: &mut cudarc::driver::CudaSlice<f32>,
) -> iris_ops::OpResult<()> {
    let comm = iris_ops::Comm::from_rank(stream, rank, world_size, id)?;
    comm.all_reduce_in_place(data, &iris_ops::comm::ReduceOp::Sum)?;
    comm.all_gather(&data.slice(..2), &mut data.clone())
}

/// Passes a stream and memory of another library to the heap, by handle and address.
///
/// # Safety
/// Contracts of the two methods called.
pub unsafe fn raw(
    heap: &SymmetricHeap,
    stream: cudarc::driver::sys::CUstream,
    (address, len): (cudarc::driver::sys::CUdeviceptr, usize),
) -> Result<(Stream, SymSlice<f32>)> {
    let stream = unsafe { heap.stream_from_raw(stream as u64) }?;
    Ok((stream, unsafe { heap.import(address as *mut f32, len) }?))
}
";

/// Type-checks a crate that depends on iris and, as candle-core does, on cudarc, with the bindings
/// of several CUDA versions; none of them needs to be installed.
pub(crate) fn run(root: &Path) -> Result<()> {
    let folder = root.join("target/beside");
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::write(&path, text).with_context(|| path.display().to_string())
    };
    fs::create_dir_all(folder.join("src")).context("target/beside")?;
    let path = |member: &str| root.join(member).display().to_string();
    write(
        "Cargo.toml",
        &format!(
            "[package]\nname = \"beside\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n[workspace]\n\n\
             [dependencies]\n\
             iris-heap = {{ path = {:?} }}\n\
             iris-ops = {{ path = {:?}, features = [\"cudarc-0-19\"] }}\n\
             cudarc = {{ version = \"0.19\", default-features = false, features = {CANDLE} }}\n",
            path("iris-heap"),
            path("iris-ops"),
        ),
    )?;
    write("src/lib.rs", SOURCE)?;
    // This uses the dependency versions of the workspace's lock file; cargo adds the packages that
    // candle's features need.
    fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock")).context("Cargo.lock")?;
    for version in VERSIONS {
        println!("iris beside cudarc as candle-core has it, CUDA {version}");
        // Clippy leaves most dependencies in the workspace's target folder, so that folder is used
        // here.
        let mut command = cargo(&folder, &["check", "--release", "--target-dir"]);
        command.arg(root.join("target")).env("CUDARC_CUDA_VERSION", version);
        let status = command.status();
        let status = status.context("cargo did not start")?;
        if !status.success() {
            bail!("with the types of CUDA {version}: {status}");
        }
    }
    Ok(())
}
