//! Items of the LL protocol: units of 8 bytes of data, sent as two words with data and flag each.

use iris_kernels::schedule::{Collective, Items};

use crate::options::Request;
use crate::ranks::Ranks;

/// Computes the items of a call whose message has `m` x `n` elements over all ranks.
pub(crate) fn of(
    ranks: Ranks,
    request: &Request,
    collective: Collective,
    (m, n): (usize, usize),
) -> Items {
    let dtype = if collective.reduces() { request.wire_dtype() } else { request.output_dtype() };
    let (size, rows, cols) = (ranks.size as u32, m as u32, n as u32);
    Items { collective, size, rows, cols, per_item: 8 / dtype.size() as u32 }
}

/// Whether each row consists of whole items. Only an RMSNorm requires this; without an RMSNorm the
/// result is true.
pub(crate) fn are_rows_whole(request: &Request, items: Items) -> bool {
    request.rms_norm.is_none() || request.n.is_multiple_of(items.per_item as usize)
}
