use iris_sync::flow::{Departures, Launch};
use iris_sync::{Aborted, Memory, Span};

use crate::args::{Matrix, OpArgs};
use crate::cpu::body::partial::Partial;
use crate::cpu::view;
use crate::cpu::words::Words;
use crate::schedule::Grid;

/// Adds the contributions of all ranks, in the order of ranks. This rank's own contribution is A.
/// Those of the other ranks are in an inbox: B is the contribution of rank 0, and that of each next
/// rank follows `slot` bytes later. If the op has a single source, the root, nothing is added: the
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
    // A single source's results are in A.
    let parts = if sources == 1 { channel.rank..channel.rank + 1 } else { 0..sources };
    for tile in (launch.index..grid.tiles()).step_by(launch.count as usize) {
        launch.m.begin(Span::Reduce, tile);
        let (area, ld) = (grid.tile(tile), partial.ld());
        for source in parts.clone() {
            let received = Matrix { address: b.address + u64::from(source) * slot, ..b };
            let part = if source == channel.rank { a } else { received };
            view::load(&part, area, &mut partial.sum, ld, source != parts.start);
        }
        partial.finish(area);
        launch.m.end(Span::Reduce);
    }
    Ok(())
}
