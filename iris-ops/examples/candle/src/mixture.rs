//! Mixture of experts in which each expert is split over the ranks: every rank has some columns of
//! each expert, so that all ranks have equal work, whichever experts the router chooses.

use std::sync::Arc;

use anyhow::Result;
use candle_core::{DType, Tensor};
use iris_ops::comm::Comm;
use iris_ops::{AllGather, AllReduce, CollectiveArgs, Plan, ReduceScatter, Topology};
use iris_ops::{all_gather, all_reduce, reduce_scatter};

use crate::call::{call, like};
use crate::config::Config;
use crate::functions::softmax;
use crate::parallel::Shard;

/// Feed-forward layer of several experts, of which a router chooses some for each token.
pub struct Mixture {
    /// Number of experts x hidden size, on all ranks.
    router: Tensor,
    /// This rank's part of the experts: number of experts x own columns x hidden size.
    gate: Tensor,
    up: Tensor,
    /// Number of experts x hidden size x own columns.
    down: Tensor,
    /// Number of experts of a token.
    chosen: usize,
    exchange: Option<Arc<Exchange>>,
}

/// Operators with which the ranks sum the results of the experts. The mixtures of a model share them.
pub struct Exchange {
    comm: Arc<Comm>,
    shard: Shard,
    sum: AllReduce,
    split: Option<SplitTokens>,
}

/// Operators for tokens that are split over the ranks by rows.
struct SplitTokens {
    /// Gathers the tokens, and the ids and weights of their experts.
    gather: AllGather,
    sum: ReduceScatter,
    /// Gathers the results.
    rows: AllGather,
}

impl Exchange {
    /// Plans of all operators, for up to `rows` tokens.
    pub fn plans(config: &Config, rows: usize, ranks: Topology) -> Result<[Plan; 4]> {
        let Config { hidden, chosen, .. } = *config;
        let (ids, weights) = (iris_heap::DType::U32, iris_heap::DType::F32);
        let gather = all_gather::Options::rows(rows, hidden).and(ids, chosen).and(weights, chosen);
        Ok([
            all_reduce::Options::rows(rows, hidden).combine(chosen).plan(ranks)?,
            gather.plan(ranks)?,
            reduce_scatter::Options::rows(rows, hidden).combine(chosen).plan(ranks)?,
            all_gather::Options::rows(rows, hidden).plan(ranks)?,
        ])
    }

    /// Makes the operators: collective. With `split_tokens` each rank routes its own rows of the
    /// tokens.
    pub fn new(
        comm: &Arc<Comm>,
        shard: Shard,
        plans: &[Plan; 4],
        split_tokens: bool,
    ) -> Result<Self> {
        let [sum, gather, own_sum, rows] = plans;
        let heap = comm.heap();
        let sum = AllReduce::new(heap, sum)?;
        let split = if split_tokens {
            Some(SplitTokens {
                gather: AllGather::new(heap, gather)?,
                sum: ReduceScatter::new(heap, own_sum)?,
                rows: AllGather::new(heap, rows)?,
            })
        } else {
            None
        };
        Ok(Self { comm: comm.clone(), shard, sum, split })
    }
}

impl Mixture {
    /// Reads this rank's part of a layer whose tensors `get` returns. Without `exchange`, which is for
    /// one rank, candle sums the results of the experts.
    pub fn new(
        get: impl Fn(&str) -> Result<Tensor>,
        config: &Config,
        shard: Shard,
        exchange: Option<Arc<Exchange>>,
    ) -> Result<Self> {
        let own = shard.of(config.expert);
        let part = |name, dim| -> Result<Tensor> {
            Ok(get(name)?.narrow(dim, own.start, own.len())?.contiguous()?)
        };
        Ok(Self {
            router: get("router")?,
            gate: part("experts.gate_proj", 1)?,
            up: part("experts.up_proj", 1)?,
            down: part("experts.down_proj", 2)?,
            chosen: config.chosen,
            exchange,
        })
    }

    /// Returns `residual` plus the mixture's results for the tokens `x`, both tokens x hidden size and
    /// on all ranks.
    pub fn forward(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        let Some(exchange) = self.exchange.as_deref() else {
            let (ids, weights) = self.route(x)?;
            let (tokens, hidden) = x.dims2()?;
            let parts = self.experts(x, &ids)?.reshape((tokens, self.chosen, hidden))?;
            return Ok((parts.broadcast_mul(&weights.unsqueeze(2)?)?.sum(1)? + residual)?);
        };
        match &exchange.split {
            // Fewer tokens than ranks, as in the steps of one sequence, are not split: some ranks would
            // have none.
            Some(split) if x.dim(0)? >= exchange.shard.size => {
                self.forward_split(exchange, split, x, residual)
            }
            _ => self.forward_replicated(exchange, x, residual),
        }
    }

    /// Mixture of tokens that all ranks have: nothing is gathered, only the sum is needed.
    fn forward_replicated(
        &self,
        Exchange { comm, sum, .. }: &Exchange,
        x: &Tensor,
        residual: &Tensor,
    ) -> Result<Tensor> {
        let (ids, weights) = self.route(x)?;
        let parts = self.experts(x, &ids)?;
        let inputs = [&parts, &weights, residual];
        let [y] = call(comm, inputs, [like(residual)?], |[parts, weights, residual], [y]| {
            let args = CollectiveArgs::new(parts, y).weights(weights).plus(residual);
            sum.run(&args, comm.stream())
        })?;
        Ok(y)
    }

    /// Mixture of tokens of which each rank has some rows: it routes these, gathers the tokens of all
    /// ranks with their experts, and gets its rows of the sum.
    fn forward_split(
        &self,
        Exchange { comm, shard, .. }: &Exchange,
        split: &SplitTokens,
        x: &Tensor,
        residual: &Tensor,
    ) -> Result<Tensor> {
        let own = shard.of(x.dim(0)?);
        let [own_x, own_residual] = [x, residual].map(|all| all.narrow(0, own.start, own.len()));
        let (own_x, own_residual) = (own_x?, own_residual?);
        let (ids, weights) = self.route(&own_x)?;
        let chosen = (x.dim(0)?, self.chosen);
        let all = [like(x)?, (chosen, DType::U32), (chosen, DType::F32)];
        let [x, ids, weights] = call(comm, [&own_x, &ids, &weights], all, |own, all| {
            let ([x, ids, weights], [all_x, all_ids, all_weights]) = (own, all);
            let args = CollectiveArgs::new(x, all_x).and(ids, all_ids).and(weights, all_weights);
            split.gather.run(&args, comm.stream())
        })?;
        let parts = self.experts(&x, &ids)?;
        let inputs = [&parts, &weights, &own_residual];
        let [y] = call(comm, inputs, [like(&own_residual)?], |[parts, weights, residual], [y]| {
            let args = CollectiveArgs::new(parts, y).weights(weights).plus(residual);
            split.sum.run(&args, comm.stream())
        })?;
        // A model that splits the tokens of all its layers would go on with its rows.
        let [all] = call(comm, [&y], [like(&x)?], |[y], [all]| {
            split.rows.run(&CollectiveArgs::new(y, all), comm.stream())
        })?;
        Ok(all)
    }

    /// Ids of the experts of each token (tokens x chosen, u32), and their weights (f32), whose sum is 1.
    fn route(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let scores = softmax(&x.matmul(&self.router.t()?)?)?;
        let ids = scores.arg_sort_last_dim(false)?.narrow(1, 0, self.chosen)?.contiguous()?;
        let weights = scores.gather(&ids, 1)?;
        let weights = weights.broadcast_div(&weights.sum_keepdim(1)?)?;
        Ok((ids, weights))
    }

    /// Partial results of the experts of each token, from this rank's columns: tokens x (chosen x hidden
    /// size). An engine has a grouped GEMM here, which does not copy the weights.
    fn experts(&self, x: &Tensor, ids: &Tensor) -> Result<Tensor> {
        let ((tokens, hidden), k) = (x.dims2()?, self.chosen);
        let ids = ids.flatten_all()?;
        let x = x.unsqueeze(1)?.expand((tokens, k, hidden))?.reshape((tokens * k, hidden, 1))?;
        let times = |weight: &Tensor, x: &Tensor| weight.index_select(&ids, 0)?.matmul(x);
        let y = (times(&self.gate, &x)?.silu()? * times(&self.up, &x)?)?;
        Ok(times(&self.down, &y)?.reshape((tokens, k * hidden))?)
    }
}
