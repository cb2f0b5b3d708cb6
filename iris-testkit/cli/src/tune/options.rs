//! Options of `iris tune`.

use std::path::PathBuf;

use iris_heap::BackendKind;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Numbers of ranks: processes on the CPU, threads of this process on GPUs [default: 2,4 on the CPU, one a
    /// GPU else].
    #[arg(long, value_delimiter = ',')]
    pub(crate) ranks: Vec<usize>,
    /// Calls of each choice, on the CPU [default: 30 for the machine, 200 for shapes].
    #[arg(long)]
    pub(crate) iters: Option<usize>,
    /// What computes: cpu, cuda or hip.
    #[arg(long, default_value = "cpu")]
    pub(crate) backend: BackendKind,
    /// Shapes whose choices are timed, in the form of bench/cuda.toml; without, the machine's parameters are measured.
    #[arg(long, value_name = "FILE")]
    pub(crate) cases: Option<PathBuf>,
    /// Only the ops whose names hold this text.
    #[arg(long, value_name = "TEXT", requires = "cases")]
    pub(crate) only: Option<String>,
    /// The commit that is measured, where there is no git to ask.
    #[arg(long, value_name = "COMMIT", env = "IRIS_COMMIT")]
    pub(crate) commit: Option<String>,
    /// Seconds after which the program ends whatever it waits for, of GPUs [default: 400].
    #[arg(long, value_name = "SECONDS")]
    pub(crate) limit: Option<u64>,
}
