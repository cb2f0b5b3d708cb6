//! Order in which a call visits the steps and loops of a program.

use std::ops::Range;

use super::{Alternative, Item, Program, Rows, Step};
use crate::schedule::{SplitGrid, split};

/// Position in the loops over parts and peers that surround a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct At {
    /// Index of the part; `None` outside of a loop over parts.
    pub part: Option<u32>,
    /// Rank of the peer; `None` outside of a loop over peers.
    pub peer: Option<u32>,
}

impl Program {
    /// Calls `visit` for each step of an alternative, including the RMSNorm, in the order of a
    /// call. `bounds` is a pair: the number of parts, and a function that lists the calling rank's
    /// peers.
    ///
    /// # Errors
    /// The first error of `visit`; no later step is visited.
    pub fn walk<Peers: Iterator<Item = u32>, E>(
        &self,
        of: &'static Alternative,
        bounds: (u32, &impl Fn() -> Peers),
        visit: &mut dyn FnMut(&Step, At) -> Result<(), E>,
    ) -> Result<(), E> {
        walk(self.items(of), At::default(), bounds, visit)
    }
}

impl Rows {
    /// Rows that a GEMM of `rank` multiplies, counted from row 0 of the whole matrix; `None` if
    /// there are none. `grid` has the tiles of the call.
    pub fn of(self, grid: &SplitGrid, rank: u32, at: At) -> Option<Range<u32>> {
        let owned_by = |rank| split(grid.grid.rows, grid.size, rank);
        let (own, all) = (owned_by(rank), 0..grid.grid.rows);
        match self {
            Rows::All => Some(all),
            Rows::Own => Some(own),
            Rows::BeforeOwn => Some(all.start..own.start).filter(|rows| !rows.is_empty()),
            Rows::AfterOwn => Some(own.end..all.end).filter(|rows| !rows.is_empty()),
            Rows::Part => {
                let rank = at.peer.unwrap_or(rank);
                let (first, part) =
                    (owned_by(rank).start, grid.parts(rank).nth(at.part? as usize)?);
                Some(first + part.start..first + part.end)
            }
        }
    }
}

/// Calls `visit` for each step in `items`, in the order of a call with `parts` parts; `peers` lists
/// the calling rank's peers.
pub(crate) fn walk<'a, Peers: Iterator<Item = u32>, E>(
    items: impl IntoIterator<Item = &'a Item>,
    at: At,
    (parts, peers): (u32, &impl Fn() -> Peers),
    visit: &mut dyn FnMut(&'a Step, At) -> Result<(), E>,
) -> Result<(), E> {
    for item in items {
        match *item {
            Item::Do(ref step) => visit(step, at)?,
            Item::Parts(items) => {
                for part in 0..=parts {
                    for item in items {
                        let (items, part) = match *item {
                            Item::PreviousPart(items) if part > 0 => (items, part - 1),
                            Item::PreviousPart(_) => continue,
                            _ if part < parts => (std::slice::from_ref(item), part),
                            _ => continue,
                        };
                        walk(items, At { part: Some(part), ..at }, (parts, peers), visit)?;
                    }
                }
            }
            // Steps for the previous part are run by the loop over parts (`Item::Parts` above).
            // Elsewhere they are skipped, and `check` rejects programs that have them there.
            Item::PreviousPart(_) => {}
            Item::Peers(items) => {
                for peer in peers() {
                    walk(items, At { peer: Some(peer), ..at }, (parts, peers), visit)?;
                }
            }
        }
    }
    Ok(())
}
