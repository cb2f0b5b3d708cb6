//! Layers that are split over ranks, with their communication as custom operations of candle.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, ensure};
#[cfg(feature = "cuda")]
use candle_core::DType;
use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Shape, Tensor, WithDType, bail};
use half::{bf16, f16};
use iris_ops::comm::{Comm, ReduceOp, Summand};
use iris_ops::matmul_all_reduce::Options;
use iris_ops::{MatmulAllReduce, MatmulArgs, Plan, Topology, scope, split};

use crate::config::Config;

/// Position of a rank among the ranks over which a layer is split.
#[derive(Clone, Copy)]
pub struct Shard {
    pub rank: usize,
    pub size: usize,
}

impl Shard {
    /// Range of the `items` items (such as heads or columns) that this rank owns.
    pub fn of(self, items: usize) -> Range<usize> {
        split(items, self.size, self.rank)
    }
}

/// Column-parallel linear layer: each rank has some columns of the result (rows of the weight). The
/// layer needs no communication.
pub struct ColumnParallel {
    weight: Tensor,
}

impl ColumnParallel {
    pub fn new(weight: &Tensor, rows: &Range<usize>) -> Result<Self> {
        ensure!(!rows.is_empty(), "fewer parts than ranks");
        Ok(Self { weight: weight.narrow(0, rows.start, rows.len())?.contiguous()? })
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.matmul(&self.weight.t()?)?)
    }
}

/// Row-parallel linear layer: each rank has some columns of the input. The result is the sum over
/// ranks, and all ranks get it.
pub struct RowParallel {
    weight: Tensor,
    sum: Sum,
}

/// Way in which row-parallel layers sum over ranks.
#[derive(Clone)]
enum Sum {
    /// Candle's own GEMM, followed by an all-reduce.
    After(AllReduce),
    /// GEMM and sum fused in one operator.
    Fused(MatmulSum),
}

/// Factory for row-parallel layers that share one all-reduce or one fused operator.
pub struct Maker(Sum);

impl RowParallel {
    /// Plans for the outputs of attention and of the feed-forward layer, for up to `rows` tokens.
    pub fn plans(config: &Config, rows: usize, shard: Shard, ranks: Topology) -> Result<[Plan; 2]> {
        let heads = shard.of(config.kv_heads).len() * (config.heads / config.kv_heads);
        let plan = |k: usize| Options::new(rows, config.hidden, k).plan(ranks);
        Ok([plan(heads * config.head())?, plan(shard.of(config.feed_forward).len())?])
    }

    /// Makes the factory, with a fused operator if there is a plan. Collective if there is a plan.
    pub fn maker(comm: &Arc<Comm>, plan: Option<&Plan>) -> Result<Maker> {
        Ok(Maker(match plan {
            None => Sum::After(AllReduce { comm: comm.clone() }),
            Some(plan) => {
                let op = Arc::new(MatmulAllReduce::new(comm.heap(), plan)?);
                Sum::Fused(MatmulSum { comm: comm.clone(), op })
            }
        }))
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(match &self.sum {
            Sum::After(all_reduce) => x.matmul(&self.weight.t()?)?.apply_op1_no_bwd(all_reduce)?,
            Sum::Fused(fused) => x.contiguous()?.apply_op2_no_bwd(&self.weight, fused)?,
        })
    }
}

impl Maker {
    pub fn layer(&self, weight: &Tensor, columns: &Range<usize>) -> Result<RowParallel> {
        let weight = weight.narrow(1, columns.start, columns.len())?.contiguous()?;
        Ok(RowParallel { weight, sum: self.0.clone() })
    }
}

/// Sum over ranks as a custom operation of candle. Its code differs from that of an engine over
/// NCCL by one `use` line.
#[derive(Clone)]
pub struct AllReduce {
    comm: Arc<Comm>,
}

impl AllReduce {
    fn sum<T: Summand>(&self, input: &[T]) -> candle_core::Result<Vec<T>> {
        let mut output = vec![T::zeroed(); input.len()];
        let done = self.comm.all_reduce(input, &mut output, &ReduceOp::Sum);
        done.map(|()| output).map_err(candle_core::Error::debug)
    }
}

/// Elements of a tensor in host memory, in order; an error if the tensor is not contiguous.
fn elements<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((from, to)) => Ok(&storage.as_slice::<T>()?[from..to]),
        None => bail!("input has to be contiguous"),
    }
}

impl CustomOp1 for AllReduce {
    fn name(&self) -> &'static str {
        "all_reduce"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let sum = match x {
            CpuStorage::F32(_) => CpuStorage::F32(self.sum(elements(x, layout)?)?),
            CpuStorage::F16(_) => CpuStorage::F16(self.sum::<f16>(elements(x, layout)?)?),
            CpuStorage::BF16(_) => CpuStorage::BF16(self.sum::<bf16>(elements(x, layout)?)?),
            _ => bail!("all_reduce is of f32, f16 and bf16"),
        };
        Ok((sum, layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<(candle_core::CudaStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let sum = match x.dtype() {
            DType::F32 => on_cuda::sum::<f32>(&self.comm, x, layout)?,
            DType::F16 => on_cuda::sum::<f16>(&self.comm, x, layout)?,
            DType::BF16 => on_cuda::sum::<bf16>(&self.comm, x, layout)?,
            other => bail!("all_reduce is of f32, f16 and bf16, not {other:?}"),
        };
        Ok((sum, layout.shape().clone()))
    }
}

/// Fused operator for the product of this rank's columns with their weights and the sum over ranks,
/// in f32.
#[derive(Clone)]
pub struct MatmulSum {
    comm: Arc<Comm>,
    op: Arc<MatmulAllReduce>,
}

/// Number of rows of x, and of rows and columns of the weight.
fn sizes(x: &Layout, weight: &Layout) -> candle_core::Result<(usize, usize, usize)> {
    let ((m, k), (n, _)) = (x.shape().dims2()?, weight.shape().dims2()?);
    Ok((m, n, k))
}

impl CustomOp2 for MatmulSum {
    fn name(&self) -> &'static str {
        "matmul_all_reduce"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (m, n, k) = sizes(x_layout, weight_layout)?;
        let (x, weight) = (elements::<f32>(x, x_layout)?, elements::<f32>(weight, weight_layout)?);
        let mut y = vec![0_f32; m * n];
        // The scope waits for the call, so the call no longer uses x, weight and y when the scope
        // returns.
        let done = scope(self.comm.heap(), self.comm.stream(), |scope| {
            let weight = scope.read(weight, n, k).transposed();
            let args = MatmulArgs::new(scope.read(x, m, k), weight, scope.write(&mut y, m, n));
            self.op.run(&args, self.comm.stream())
        });
        done.map_err(candle_core::Error::debug)?;
        Ok((CpuStorage::F32(y), Shape::from((m, n))))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &candle_core::CudaStorage,
        x_layout: &Layout,
        weight: &candle_core::CudaStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<(candle_core::CudaStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        use iris_ops::Operand;
        let (m, n, k) = sizes(x_layout, weight_layout)?;
        let device = x.device().clone();
        let stream = device.cuda_stream();
        let x = on_cuda::view::<f32>(x, x_layout)?;
        let weight = on_cuda::view::<f32>(weight, weight_layout)?;
        let mut y = device.alloc_zeros::<f32>(m * n)?;
        // These operands hold cudarc's guards of the memory until the call is enqueued.
        let weight = Operand::read(&weight, &stream, n, k).transposed();
        let (x, result) = (Operand::read(&x, &stream, m, k), Operand::write(&mut y, &stream, m, n));
        let args = MatmulArgs::new(x, weight, result);
        self.op.run(&args, self.comm.stream()).map_err(candle_core::Error::debug)?;
        drop(args);
        Ok((candle_core::CudaStorage::wrap_cuda_slice(y, device), Shape::from((m, n))))
    }
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use candle_core::backend::BackendStorage;
    use candle_core::cuda_backend::CudaDType;
    use candle_core::{CudaStorage, Layout, bail};
    use cudarc::driver::CudaView;
    use iris_ops::comm::{Comm, ReduceOp, Summand};

    /// Elements of a tensor in device memory, in order; an error if the tensor is not contiguous.
    pub(super) fn view<'a, T: CudaDType>(
        x: &'a CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<CudaView<'a, T>> {
        match layout.contiguous_offsets() {
            Some((from, to)) => Ok(x.as_cuda_slice::<T>()?.slice(from..to)),
            None => bail!("input has to be contiguous"),
        }
    }

    pub(super) fn sum<T: CudaDType + Summand + cudarc::driver::DeviceRepr + cudarc::driver::ValidAsZeroBits>(
        comm: &Comm,
        x: &CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<CudaStorage> {
        let device = x.device().clone();
        let input = view::<T>(x, layout)?;
        let mut output = device.alloc_zeros::<T>(layout.shape().elem_count())?;
        let done = comm.all_reduce(&input, &mut output, &ReduceOp::Sum);
        done.map_err(candle_core::Error::debug)?;
        Ok(CudaStorage::wrap_cuda_slice(output, device))
    }
}
