use iris_sync::flow::{Departures, Launch};
use iris_sync::{Aborted, Memory, Span};

use crate::args::{Matrix, OpArgs};
use crate::cpu::body::partial::Partial;
use crate::cpu::view;
use crate::cpu::words::Words;
use crate::schedule::Grid;

/// Adds the parts of all ranks: C = this rank's own part A plus the parts received from the other
/// ranks, in ascending order of ranks. B is the part of rank 0, and the part of each next rank
/// follows `slot` bytes later. If the op has a single source, the root, nothing is added: the
/// root's results are copied to C, unless the root has stored them into C directly.
pub(crate) fn run(
    launch: &Launch<'_, Words<'_>>,
    grid: Grid,
    mut partial: Partial<'_>,
) -> Result<(), Aborted> {
    let OpArgs { a, b, slot, sources, root, channel, .. } = *partial.args;
    if sources == 1 && Departures::begin(launch).is_direct(root) {
        return Ok(());
    }
    let others = (0..sources).filter(|&source| sources > 1 && source != channel.rank);
    for tile in (launch.index..grid.tiles()).step_by(launch.count as usize) {
        launch.m.begin(Span::Reduce, tile);
        let (area, ld) = (grid.tile(tile), partial.ld());
        view::load(&a, area, &mut partial.sum, ld, false);
        for source in others.clone() {
            let from = Matrix { address: b.address + u64::from(source) * slot, ..b };
            view::load(&from, area, &mut partial.sum, ld, true);
        }
        partial.finish(area);
        launch.m.end(Span::Reduce);
    }
    Ok(())
}
