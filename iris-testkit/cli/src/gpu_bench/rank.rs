//! Rank of the benchmark, with what lasts for all shapes: device, communicators and libraries.

use anyhow::Result;
use iris_heap::World;
use iris_kernels::vendor::Communicator;
use serde_json::Value;

use super::bench_device::Home;
use super::vendor::{Multiplier, Vendors};
use super::{Beside, Shape, shape};

/// State of a rank that lasts for all shapes: device, communicators and libraries.
pub(super) struct Rank<'a> {
    pub(super) world: &'a World,
    pub(super) home: Home,
    pub(super) nccl: Result<Communicator, String>,
    /// Second communicator, for memory registered as a window; `None` without the option
    /// `--windows`.
    pub(super) windowed: Option<Communicator>,
    pub(super) blas: Result<Multiplier, String>,
    /// Whether the collective or the GEMM library was found, even if it cannot be used.
    pub(super) has_library: bool,
}

/// Measures all shapes on one rank; on rank 0 passes the lines of each shape on.
pub(super) fn all_shapes(
    world: &World,
    (vendors, windows): (&Vendors, bool),
    shapes: &[Shape],
    report: &mut dyn FnMut(Vec<Value>) -> Result<()>,
) -> Result<()> {
    let kind = shapes[0].options.backend;
    let devices = kind.device_count()?;
    let home = Home::new(kind, world)?;
    let place = (world.rank(), world.size());
    // Id of a new communicator, made by rank 0 for all ranks, or the reason why rank 0 could not make
    // it.
    let id = || -> Result<Result<Vec<u8>, String>> {
        let own = match world.rank() {
            0 => home
                .current(|| Ok(vendors.nccl()?.new_id()?.to_vec()))
                .map_err(|error| error.to_string()),
            _ => Ok(Vec::new()),
        };
        Ok(serde_json::from_slice(&world.broadcast(0, &serde_json::to_vec(&own)?)?)?)
    };
    let nccl = if shapes[0].beside != Beside::Libraries {
        Err("left out".into())
    } else if world.size() > devices {
        let [name, _] = vendors.names();
        Err(format!("{name} wants a GPU a rank: {} for {devices}", world.size()))
    } else {
        // `Vendors::join` waits for all ranks. All ranks use the same library, so it fails on
        // all or on none, and no rank waits for one that failed.
        let new = |id: Vec<u8>| home.current(|| vendors.join(&id, place));
        id()?.and_then(|id| new(id).map_err(|e| e.to_string()))
    };
    let windowed = match &nccl {
        Ok(_) if windows => {
            let id = id()?.map_err(anyhow::Error::msg)?;
            Some(home.current(|| vendors.join(&id, place))?)
        }
        _ => None,
    };
    let blas = match shapes[0].beside {
        Beside::Libraries => home.current(|| Multiplier::new(vendors)).map_err(|e| e.to_string()),
        Beside::First => Err("left out".into()),
    };
    let has_library = vendors.paths().iter().any(Result::is_ok);
    let rank = Rank { world, home, nccl, windowed, blas, has_library };
    for shape in shapes {
        let lines = shape::measure(&rank, shape)?;
        if world.rank() == 0 {
            report(lines)?;
        }
        // After this barrier all ranks start the next shape together, even if rank 0 failed to
        // report.
        world.barrier()?;
    }
    let Rank { home, nccl, windowed, blas, .. } = rank;
    home.current(|| {
        windowed.as_ref().map(Communicator::close).transpose()?;
        nccl.as_ref().ok().map(Communicator::close).transpose()?;
        drop(blas);
        Ok(())
    })?;
    home.close()
}
