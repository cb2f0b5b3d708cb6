//! `iris rank`: one rank of a job, in a process that the launcher started.

use anyhow::{Result, bail};
use iris_heap::World;
use iris_testkit::launch::end_with_launcher;
use iris_testkit::say;

use crate::job::Job;
use crate::layer::LayerJob;
use crate::operator::OperatorJob;
use crate::ratios::RatioJob;
use crate::suite::SuiteJob;
use crate::tune::TuneJob;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Name of the job, [`Job::NAME`].
    name: String,
    /// Description of the job as JSON.
    job: String,
}

/// Runs this rank's part of the job. Rank 0 prints the report as one line of JSON.
pub(crate) fn main(options: &Options) -> Result<bool> {
    end_with_launcher();
    match options.name.as_str() {
        LayerJob::NAME => part::<LayerJob>(&options.job)?,
        OperatorJob::NAME => part::<OperatorJob>(&options.job)?,
        RatioJob::NAME => part::<RatioJob>(&options.job)?,
        TuneJob::NAME => part::<TuneJob>(&options.job)?,
        SuiteJob::NAME => part::<SuiteJob>(&options.job)?,
        other => bail!("job {other} is unknown"),
    }
    Ok(true)
}

fn part<J: Job>(job: &str) -> Result<()> {
    let job: J = serde_json::from_str(job)?;
    #[cfg(feature = "mpi")]
    let mpi =
        std::env::var_os("OMPI_COMM_WORLD_SIZE").map(|_| iris_ops::Mpi::init()).transpose()?;
    let world = World::from_env()?;
    #[cfg(feature = "mpi")]
    if let Some(mpi) = &mpi {
        anyhow::ensure!(mpi.carries(&world), "ranks of MPI_COMM_WORLD differ from {world:?}");
    }
    let report =
        job.run_rank(&world).inspect_err(|error| world.abort_with(format_args!("{error:#}")))?;
    world.close()?;
    if let Some(report) = report {
        say!("{}", serde_json::to_string(&report)?)?;
    }
    Ok(())
}
