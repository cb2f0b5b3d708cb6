//! Typical code of an inference engine around its communicator, here NCCL: exchanging the id
//! through a file, opening the communicator, and the sum after a layer.

use std::path::Path;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream};
use cudarc::nccl::safe::{Comm, Id, ReduceOp};
use half::bf16;

/// Opens the communicator of this process: rank 0 makes the id and writes it to `file`, the others
/// read it.
pub fn open(stream: Arc<CudaStream>, rank: usize, size: usize, file: &Path) -> Result<Comm, String> {
    let id = if rank == 0 {
        let id = Id::new().map_err(|error| format!("{error:?}"))?;
        let bytes: Vec<u8> = id.internal().iter().map(|&byte| byte as u8).collect();
        let written = file.with_extension("new");
        std::fs::write(&written, bytes).map_err(|error| error.to_string())?;
        std::fs::rename(&written, file).map_err(|error| error.to_string())?;
        id
    } else {
        while !file.exists() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let bytes = std::fs::read(file).map_err(|error| error.to_string())?;
        let bytes: Vec<_> = bytes.into_iter().map(|byte| byte as std::ffi::c_char).collect();
        Id::uninit(bytes.try_into().map_err(|_| "an identity has 128 bytes")?)
    };
    Comm::from_rank(stream, rank, size, id).map_err(|error| format!("{error:?}"))
}

/// Returns the sum over ranks of their partial results of a layer.
pub fn sum(
    comm: &Comm,
    stream: &Arc<CudaStream>,
    partial: &CudaSlice<bf16>,
) -> Result<CudaSlice<bf16>, String> {
    let mut sum = stream.alloc_zeros(partial.len()).map_err(|error| error.to_string())?;
    comm.all_reduce(partial, &mut sum, &ReduceOp::Sum).map_err(|error| format!("{error:?}"))?;
    Ok(sum)
}
