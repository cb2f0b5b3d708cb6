//! The items of messages in words that carry their data.

use iris_kernels::schedule::{Collective, Items};

use crate::options::Request;
use crate::ranks::Ranks;

/// The items of a call of a shape, in words that carry their data.
pub(crate) fn of(
    ranks: Ranks,
    request: &Request,
    collective: Collective,
    (m, n): (usize, usize),
) -> Items {
    let dtype = match collective {
        Collective::AllReduce | Collective::ReduceScatter => request.wire_dtype(),
        _ => request.output_dtype(),
    };
    let (size, rows, cols) = (ranks.size as u32, m as u32, n as u32);
    Items { collective, size, rows, cols, per_item: 8 / dtype.size() as u32 }
}

/// Whether a row that is normalised is whole items, as it must be.
pub(crate) fn are_rows_whole(request: &Request, items: Items) -> bool {
    request.rms_norm.is_none() || request.n.is_multiple_of(items.per_item as usize)
}
