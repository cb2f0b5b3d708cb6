//! Sizes of the example's small Llama model.

/// Sizes of the model's layers.
pub struct Config {
    pub vocabulary: usize,
    pub hidden: usize,
    pub layers: usize,
    /// Number of query heads, a multiple of `kv_heads`.
    pub heads: usize,
    pub kv_heads: usize,
    /// Columns of the feed-forward layer of the first layer. The other layers have a mixture of experts.
    pub feed_forward: usize,
    /// Number of experts of a mixture.
    pub experts: usize,
    /// Number of experts that the router chooses for a token.
    pub chosen: usize,
    /// Columns of an expert.
    pub expert: usize,
}

impl Config {
    /// Model so small that even a debug build runs it in seconds.
    pub fn small() -> Self {
        Self {
            vocabulary: 256,
            hidden: 64,
            layers: 3,
            heads: 8,
            kv_heads: 4,
            feed_forward: 172,
            experts: 6,
            chosen: 2,
            expert: 86,
        }
    }

    pub fn head(&self) -> usize {
        self.hidden / self.heads
    }
}
