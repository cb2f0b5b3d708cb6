//! Llama model with grouped-query attention, rotary position embeddings, a KV cache, and a mixture of
//! experts in all layers but the first.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::{DType, Device, IndexOp, Tensor, safetensors};
use iris_ops::Plan;
use iris_ops::comm::Comm;

use crate::config::Config;
use crate::functions::{norm, softmax};
use crate::mixture::{Exchange, Mixture};
use crate::parallel::{ColumnParallel, RowParallel, Shard};

/// Writes the weights of a model, generated from a fixed seed, with Llama's tensor names and layout
/// (N x K; experts one after the other).
pub fn make_weights(config: &Config, file: &Path) -> Result<()> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut uniform = || {
        // xorshift64* generator, so that the weights are the same on every machine.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let mut tensors = HashMap::new();
    let mut add = |name: String, shape: &[usize]| -> Result<()> {
        let scale = 3.0 / (shape[shape.len() - 1] as f32).sqrt();
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|_| uniform() * scale).collect();
        tensors.insert(name, Tensor::from_vec(values, shape, &Device::Cpu)?);
        Ok(())
    };
    let Config { vocabulary, hidden, kv_heads, feed_forward, experts, expert, .. } = *config;
    let kv = kv_heads * config.head();
    add("embed_tokens".into(), &[vocabulary, hidden])?;
    for layer in 0..config.layers {
        let attention = [
            ("q_proj", &[hidden, hidden][..]),
            ("k_proj", &[kv, hidden]),
            ("v_proj", &[kv, hidden]),
            ("o_proj", &[hidden, hidden]),
        ];
        let dense = [
            ("gate_proj", &[feed_forward, hidden][..]),
            ("up_proj", &[feed_forward, hidden]),
            ("down_proj", &[hidden, feed_forward]),
        ];
        let mixture = [
            ("router", &[experts, hidden][..]),
            ("experts.gate_proj", &[experts, expert, hidden]),
            ("experts.up_proj", &[experts, expert, hidden]),
            ("experts.down_proj", &[experts, hidden, expert]),
        ];
        let feed_forward = if layer == 0 { &dense[..] } else { &mixture };
        for (name, shape) in attention.iter().chain(feed_forward) {
            add(format!("layers.{layer}.{name}"), shape)?;
        }
    }
    add("lm_head".into(), &[vocabulary, hidden])?;
    Ok(safetensors::save(&tensors, file)?)
}

struct Attention {
    query: ColumnParallel,
    key: ColumnParallel,
    value: ColumnParallel,
    output: RowParallel,
    /// Cached keys and values of the tokens so far: heads of this rank x tokens x head size.
    cache: Option<(Tensor, Tensor)>,
    /// Number of query heads that share a key and value head.
    group: usize,
    head: usize,
}

struct Layer {
    attention: Attention,
    feed_forward: FeedForward,
}

enum FeedForward {
    Dense { gate: ColumnParallel, up: ColumnParallel, down: RowParallel },
    Mixture(Mixture),
}

/// Part of the model that one rank holds.
pub struct Llama {
    embedding: Tensor,
    layers: Vec<Layer>,
    lm_head: Tensor,
    /// Number of tokens whose keys and values are cached.
    seen: usize,
}

impl Llama {
    /// Reads this rank's part of the weights: collective. With `plans`, a row-parallel layer fuses
    /// its GEMM and its sum in one operator. Without `exchange`, which is for one rank, candle sums the
    /// results of the experts.
    pub fn load(
        config: &Config,
        file: &Path,
        device: &Device,
        shard: Shard,
        comm: &Arc<Comm>,
        plans: Option<&[Plan; 2]>,
        exchange: Option<Arc<Exchange>>,
    ) -> Result<Self> {
        let tensors = safetensors::load(file, device)?;
        let get = |name: &str| tensors.get(name).cloned().with_context(|| name.to_string());
        let head = config.head();
        let group = config.heads / config.kv_heads;
        // A rank has whole key and value heads with the query heads that use these heads, and some
        // columns of the feed-forward layer.
        let kv = shard.of(config.kv_heads);
        let (kv, queries) = (scaled(&kv, head), scaled(&kv, group * head));
        let middle = shard.of(config.feed_forward);
        let [output, down] = [0, 1].map(|which| plans.map(|plans| &plans[which]));
        let output = RowParallel::maker(comm, output)?;
        let down = RowParallel::maker(comm, down)?;
        let layers = (0..config.layers).map(|layer| {
            let get = |name: &str| get(&format!("layers.{layer}.{name}"));
            Ok(Layer {
                attention: Attention {
                    query: ColumnParallel::new(&get("q_proj")?, &queries)?,
                    key: ColumnParallel::new(&get("k_proj")?, &kv)?,
                    value: ColumnParallel::new(&get("v_proj")?, &kv)?,
                    output: output.layer(&get("o_proj")?, &queries)?,
                    cache: None,
                    group,
                    head,
                },
                feed_forward: if layer == 0 {
                    FeedForward::Dense {
                        gate: ColumnParallel::new(&get("gate_proj")?, &middle)?,
                        up: ColumnParallel::new(&get("up_proj")?, &middle)?,
                        down: down.layer(&get("down_proj")?, &middle)?,
                    }
                } else {
                    FeedForward::Mixture(Mixture::new(get, config, shard, exchange.clone())?)
                },
            })
        });
        Ok(Self {
            embedding: get("embed_tokens")?,
            layers: layers.collect::<Result<_>>()?,
            lm_head: get("lm_head")?,
            seen: 0,
        })
    }

    /// Number of tokens that the cache holds.
    pub fn seen(&self) -> usize {
        self.seen
    }

    /// Returns the logits of the token that follows `tokens`; `tokens` follow the cached tokens.
    pub fn forward(&mut self, tokens: &Tensor) -> Result<Tensor> {
        let mut x = self.embedding.index_select(tokens, 0)?;
        for layer in &mut self.layers {
            x = (&x + layer.attention.forward(&norm(&x)?, self.seen)?)?;
            let y = norm(&x)?;
            x = match &layer.feed_forward {
                FeedForward::Dense { gate, up, down } => {
                    let gate = gate.forward(&y)?.silu()?;
                    (&x + down.forward(&(gate * up.forward(&y)?)?)?)?
                }
                FeedForward::Mixture(mixture) => mixture.forward(&y, &x)?,
            };
        }
        self.seen += tokens.elem_count();
        let last = norm(&x.i(x.dim(0)? - 1..)?)?;
        Ok(last.matmul(&self.lm_head.t()?)?.squeeze(0)?)
    }
}

impl Attention {
    fn forward(&mut self, x: &Tensor, seen: usize) -> Result<Tensor> {
        let (count, head) = (x.dim(0)?, self.head);
        // Reshapes tokens x columns to heads x tokens x head size.
        let heads = |x: Tensor| -> Result<Tensor> {
            let heads = x.dim(1)? / head;
            Ok(x.reshape((count, heads, head))?.transpose(0, 1)?.contiguous()?)
        };
        let query = rotated(&heads(self.query.forward(x)?)?, seen)?;
        let mut key = rotated(&heads(self.key.forward(x)?)?, seen)?;
        let mut value = heads(self.value.forward(x)?)?;
        if let Some((keys, values)) = &self.cache {
            key = Tensor::cat(&[keys, &key], 1)?;
            value = Tensor::cat(&[values, &value], 1)?;
        }
        self.cache = Some((key.clone(), value.clone()));
        // The queries of a group share a key head. So the tokens of all heads of the group are
        // placed one after the other.
        let (kv_heads, all) = (key.dim(0)?, key.dim(1)?);
        let query = query.reshape((kv_heads, self.group * count, head))?;
        let scores = (query.matmul(&key.t()?.contiguous()?)? / (head as f64).sqrt())?;
        let scores = scores.reshape((kv_heads * self.group, count, all))?;
        let scores = scores.broadcast_add(&mask(count, seen, x.device())?)?;
        let weights = softmax(&scores)?.reshape((kv_heads, self.group * count, all))?;
        let y = weights.matmul(&value.contiguous()?)?;
        let y = y.reshape((kv_heads * self.group, count, head))?.transpose(0, 1)?.contiguous()?;
        self.output.forward(&y.reshape((count, kv_heads * self.group * head))?)
    }
}

/// Range of elements that the items `range` occupy, if each item has `by` elements.
fn scaled(range: &std::ops::Range<usize>, by: usize) -> std::ops::Range<usize> {
    range.start * by..range.end * by
}

/// Attention mask: 0 in the columns to which row i (token `seen + i`) may attend, which are the
/// tokens up to token `seen + i`; minus infinity in the other columns.
fn mask(count: usize, seen: usize, device: &Device) -> Result<Tensor> {
    let all = seen + count;
    let sees = |i: usize, j: usize| if j <= seen + i { 0.0 } else { f32::NEG_INFINITY };
    let values = (0..count).flat_map(|i| (0..all).map(move |j| sees(i, j)));
    Ok(Tensor::from_vec(values.collect::<Vec<f32>>(), (count, all), device)?)
}

/// Rotates the embedding of each token by an angle that grows with its position; the first token
/// has position `seen`.
fn rotated(x: &Tensor, seen: usize) -> Result<Tensor> {
    let (_, count, head) = x.dims3()?;
    let half = head / 2;
    let angle = |i: usize, j: usize| (seen + i) as f32 / 10_000_f32.powf(j as f32 / half as f32);
    let angles: Vec<f32> = (0..count).flat_map(|i| (0..half).map(move |j| angle(i, j))).collect();
    let angles = Tensor::from_vec(angles, (1, count, half), x.device())?;
    let (sin, cos) = (angles.sin()?, angles.cos()?);
    let (a, b) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
    debug_assert_eq!(x.dtype(), DType::F32);
    Ok(Tensor::cat(&[first, second], 2)?)
}
