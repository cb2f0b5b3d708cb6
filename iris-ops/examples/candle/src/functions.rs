//! Functions of rows that candle-core lacks.

use anyhow::Result;
use candle_core::{D, Tensor};

/// RMSNorm with all weights equal to one.
pub fn norm(x: &Tensor) -> Result<Tensor> {
    let mean = (x.sqr()?.sum_keepdim(D::Minus1)? / x.dim(D::Minus1)? as f64)?;
    Ok(x.broadcast_div(&(mean + 1e-5)?.sqrt()?)?)
}

/// Softmax over the last dimension.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    let x = x.broadcast_sub(&x.max_keepdim(D::Minus1)?)?.exp()?;
    Ok(x.broadcast_div(&x.sum_keepdim(D::Minus1)?)?)
}
