//! Sizes of the small Llama.

/// Sizes of the model.
pub struct Config {
    pub vocabulary: usize,
    pub hidden: usize,
    pub layers: usize,
    /// Number of query heads, a multiple of the number of key and value heads.
    pub heads: usize,
    pub kv_heads: usize,
    pub feed_forward: usize,
}

impl Config {
    /// Small model that a debug build runs in seconds.
    pub fn small() -> Self {
        Self { vocabulary: 256, hidden: 64, layers: 2, heads: 8, kv_heads: 4, feed_forward: 172 }
    }

    pub fn head(&self) -> usize {
        self.hidden / self.heads
    }
}
