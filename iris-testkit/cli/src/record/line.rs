//! Line of a record of benchmarks.

use serde::Deserialize;

/// Measured operator: one line of a record. Other lines have no `op` or no `us` and are skipped.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Line {
    pub(crate) op: String,
    pub(crate) variant: String,
    /// Variant that the benchmark asked for, possibly `auto`; `None` in old records.
    pub(crate) asked: Option<String>,
    #[serde(default)]
    pub(crate) dtype: String,
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    #[serde(default)]
    pub(crate) columns: bool,
    pub(crate) workgroups: Option<usize>,
    /// Whether the message consisted of packs. No message did in earlier versions.
    #[serde(default)]
    pub(crate) packs: bool,
    pub(crate) tile: Option<[usize; 2]>,
    pub(crate) ranks: usize,
    #[serde(default)]
    pub(crate) device: String,
    #[serde(default)]
    pub(crate) commit: String,
    pub(crate) us: f64,
    pub(crate) baseline_us: Option<f64>,
    /// Time of the library with its buffers registered as windows, if measured; `baseline_us` is
    /// the faster of both.
    pub(crate) windowed_us: Option<f64>,
    /// Version of RCCL, in records of AMD devices.
    pub(crate) rccl: Option<String>,
    /// Ratio to the baseline: each sample is divided by the baseline's sample next to it, and this
    /// is the median; `None` in old records.
    pub(crate) ratio: Option<f64>,
    /// First and third quartile of the samples' ratios.
    pub(crate) ratio_spread: Option<[f64; 2]>,
    /// Lower limit of the time: the GEMM alone or the transfer alone, whichever takes longer.
    pub(crate) limit_us: Option<f64>,
    /// Time of PyTorch's own operators on the same machine.
    pub(crate) torch_us: Option<f64>,
    /// Epsilon of an RMSNorm, for which the baseline is not a library.
    pub(crate) rms_norm: Option<f64>,
    /// Further tensors of a gather of a list: element type and number of columns of each.
    pub(crate) list: Option<Vec<(String, usize)>>,
    /// Number of weighted parts of each row of a sum.
    pub(crate) combine: Option<usize>,
}

impl Line {
    /// Whether the call sends a list of tensors or weighted parts, and not one matrix.
    pub(crate) fn has_parts(&self) -> bool {
        self.list.is_some() || self.combine.is_some()
    }
}
