//! Calls of operators on tensors of candle. A custom operation of candle has one result; a call may have
//! several.

use anyhow::{Context, Result, bail};
use candle_core::backend::BackendDevice;
use candle_core::cpu_backend::CpuDevice;
#[cfg(feature = "cuda")]
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Device, Storage, Tensor};
use iris_ops::comm::Comm;
use iris_ops::{OpResult, Operand, scope};

/// Shape and element type (f32 or u32) of a result.
pub type Sizes = ((usize, usize), DType);

/// Shape and element type of `x`.
pub fn like(x: &Tensor) -> Result<Sizes> {
    Ok((x.dims2()?, x.dtype()))
}

/// Runs a call of an operator that reads the matrices `inputs`, of f32 or u32, and returns its results.
/// `run` gets the operands of the inputs and of the results, and enqueues the call.
pub fn call<const I: usize, const O: usize>(
    comm: &Comm,
    inputs: [&Tensor; I],
    results: [Sizes; O],
    run: impl for<'a> FnOnce([Operand<'a>; I], [Operand<'a>; O]) -> OpResult<()>,
) -> Result<[Tensor; O]> {
    // An operand is a whole storage, and a tensor may be a part of one.
    let copies = inputs.map(Tensor::force_contiguous).into_iter();
    let copies = copies.collect::<candle_core::Result<Vec<_>>>()?;
    let sizes = copies.iter().map(Tensor::dims2).collect::<candle_core::Result<Vec<_>>>()?;
    let storages: Vec<_> = copies.iter().map(|copy| copy.storage_and_layout().0).collect();
    let storages = storages.iter().zip(sizes);
    let outputs: Vec<Storage> = match inputs[0].device() {
        Device::Cpu => {
            let zeros = |(shape, dtype): Sizes| CpuDevice.zeros_impl(&shape.into(), dtype);
            let mut outputs = results.map(zeros).into_iter().collect::<Result<Vec<_>, _>>()?;
            scope(comm.heap(), comm.stream(), |scope| {
                let reads = storages.map(|(storage, (m, n))| match &**storage {
                    Storage::Cpu(CpuStorage::F32(x)) => Ok(scope.read(x, m, n)),
                    Storage::Cpu(CpuStorage::U32(x)) => Ok(scope.read(x, m, n)),
                    _ => bail!("inputs are of f32 or u32, on one device"),
                });
                let writes = outputs.iter_mut().zip(results).map(|(y, ((m, n), _))| match y {
                    CpuStorage::F32(y) => Ok(scope.write(y, m, n)),
                    CpuStorage::U32(y) => Ok(scope.write(y, m, n)),
                    _ => bail!("results are of f32 or u32"),
                });
                Ok::<_, anyhow::Error>(run(array(reads)?, array(writes)?)?)
            })?;
            outputs.into_iter().map(Storage::Cpu).collect()
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            let stream = device.cuda_stream();
            let zeros = |(shape, dtype): Sizes| device.zeros_impl(&shape.into(), dtype);
            let mut outputs = results.map(zeros).into_iter().collect::<Result<Vec<_>, _>>()?;
            let reads = storages.map(|(storage, (m, n))| match &**storage {
                Storage::Cuda(x) => match &x.slice {
                    CudaStorageSlice::F32(x) => Ok(Operand::read(x, &stream, m, n)),
                    CudaStorageSlice::U32(x) => Ok(Operand::read(x, &stream, m, n)),
                    _ => bail!("inputs are of f32 or u32"),
                },
                _ => bail!("inputs are on one device"),
            });
            let writes =
                outputs.iter_mut().zip(results).map(|(y, ((m, n), _))| match &mut y.slice {
                    CudaStorageSlice::F32(y) => Ok(Operand::write(y, &stream, m, n)),
                    CudaStorageSlice::U32(y) => Ok(Operand::write(y, &stream, m, n)),
                    _ => bail!("results are of f32 or u32"),
                });
            run(array(reads)?, array(writes)?)?;
            outputs.into_iter().map(Storage::Cuda).collect()
        }
        other => bail!("no operators on {other:?}"),
    };
    let tensors = outputs.into_iter().zip(results).map(|(storage, (shape, _))| {
        Ok(Tensor::from_storage(storage, shape, BackpropOp::none(), false))
    });
    array(tensors)
}

/// Array of the `N` items of an iterator, or the first error among them.
fn array<T, const N: usize>(items: impl Iterator<Item = Result<T>>) -> Result<[T; N]> {
    let items = items.collect::<Result<Vec<T>>>()?;
    items.try_into().ok().context("another number of tensors")
}
