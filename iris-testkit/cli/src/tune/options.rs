//! Options of `iris tune`.

use std::path::PathBuf;

use iris_heap::BackendKind;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Numbers of ranks: processes on the CPU, threads of this process on GPUs [default: 2,4 on the
    /// CPU; one per GPU on GPUs].
    #[arg(long, value_delimiter = ',')]
    pub(crate) ranks: Vec<usize>,
    /// Number of calls of each choice, on the CPU [default: 30 for the machine, 200 for shapes].
    #[arg(long)]
    pub(crate) iters: Option<usize>,
    /// Backend: cpu, cuda or hip.
    #[arg(long, default_value = "cpu")]
    pub(crate) backend: BackendKind,
    /// File of shapes whose choices are timed, in the format of bench/cuda.toml; without one, the
    /// machine's parameters are measured.
    #[arg(long, value_name = "FILE")]
    pub(crate) cases: Option<PathBuf>,
    /// File of shapes, in the same format, whose products by the vendor's library are compared with the
    /// built-in ones bit by bit; those with the same bits may be used with batch_invariant.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["cases", "limit"])]
    pub(crate) bits: Option<PathBuf>,
    /// Take only ops whose names contain this text, with --cases or --bits.
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Option<String>,
    /// Commit of the measured program, if git is not available.
    #[arg(long, value_name = "COMMIT", env = "IRIS_COMMIT")]
    pub(crate) commit: Option<String>,
    /// Seconds after which the program ends, even if it hangs (GPUs only) [default: 400].
    #[arg(long, value_name = "SECONDS")]
    pub(crate) limit: Option<u64>,
}
