//! Sizes of the example's small Llama model.

/// Sizes of the model's layers.
pub struct Config {
    pub vocabulary: usize,
    pub hidden: usize,
    pub layers: usize,
    /// Number of query heads, a multiple of `kv_heads`.
    pub heads: usize,
    pub kv_heads: usize,
    pub feed_forward: usize,
}

impl Config {
    /// Model so small that even a debug build runs it in seconds.
    pub fn small() -> Self {
        Self { vocabulary: 256, hidden: 64, layers: 2, heads: 8, kv_heads: 4, feed_forward: 172 }
    }

    pub fn head(&self) -> usize {
        self.hidden / self.heads
    }
}
