//! Description of the world that this process belongs to, as a text for programs that show it.

use crate::bootstrap::launcher_env::{Launch, Place};
use crate::error::Result;

/// Describes the world that the launcher's variables announce, without meeting any rank: `rank 1 of
/// 4, local rank 1 of 4`; `None` without variables of a launcher.
///
/// # Errors
/// Errors of these variables, which [`World::from_env`](crate::World::from_env) returns, too.
pub fn launched() -> Result<Option<String>> {
    let Launch { rank, size, place, job, .. } = Launch::from_env()?;
    let Place { node, local_rank, local_size } = place;
    let is_launched = size > 1 || std::env::var_os("RANK").is_some();
    Ok(is_launched.then(|| {
        format!(
            "rank {rank} of {size}; on host {node} rank {local_rank} of {local_size}; job {job}"
        )
    }))
}
