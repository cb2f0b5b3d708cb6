//! Description of the world that this process belongs to, for programs that show it or start ranks.

use crate::bootstrap::launcher_env::Launch;
use crate::bootstrap::launchers::variables;
use crate::error::Result;

/// Describes the world that the launcher's variables announce, without meeting any rank: `rank 1 of
/// 4, local rank 1 of 2, by Slurm; job SLURM_JOB_ID=7 SLURM_STEP_ID=0`; `None` if no launcher has
/// started this process.
///
/// # Errors
/// Errors of these variables, which [`World::from_env`](crate::World::from_env) returns, too.
pub fn launched() -> Result<Option<String>> {
    Launch::from_env().map(|launch| launch.description())
}

/// Names of the environment variables by which launchers describe ranks. A program that starts
/// ranks removes these variables from the ranks' environment before it sets its own variables,
/// because the program itself may run in a rank of another launcher.
pub fn launcher_variables() -> impl Iterator<Item = &'static str> {
    variables().chain(["MASTER_ADDR", "IRIS_NODE"])
}
