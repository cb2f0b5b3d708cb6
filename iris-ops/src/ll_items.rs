//! Items of the LL protocol: units of 8 bytes of data, sent as two words with data and flag each; and
//! packs, units of 48 bytes in larger messages.

use iris_heap::DType;
use iris_kernels::schedule::{Collective, Items};
use iris_sync::ll::{QUADS, Used};

use crate::options::Request;
use crate::topology::Topology;

/// Number of items in a row of the message of a gather of a list: those of its tensors, each padded
/// to whole items. At most `u32::MAX`.
pub(crate) fn of_list_row(request: &Request) -> u32 {
    let items = |(dtype, n): (DType, usize)| (n.saturating_mul(dtype.size())).div_ceil(8) as u64;
    let all = request.tensors().map(items).fold(0, u64::saturating_add);
    u32::try_from(all).unwrap_or(u32::MAX)
}

/// Computes the items of a call whose message has `m` x `n` elements over all ranks.
pub(crate) fn of(
    ranks: Topology,
    request: &Request,
    collective: Collective,
    (m, n): (usize, usize),
) -> Items {
    let dtype = if collective.reduces() { request.wire_dtype() } else { request.output_dtype() };
    let (size, rows) = (ranks.size as u32, m as u32);
    if !request.more.is_empty() {
        return Items { collective, size, rows, cols: of_list_row(request), per_item: 1 };
    }
    let cols = n as u32;
    Items { collective, size, rows, cols, per_item: 8 / dtype.size() as u32 }
}

/// Smallest number of items (8 bytes of data) per peer from which a message is sent in packs of 48
/// bytes and not in pairs of words; `None` if packs are never used. They are not used with an
/// RMSNorm, because a workgroup needs whole rows, in messages that a GEMM itself sends, for a list of
/// tensors, and for sums of weighted parts.
pub(crate) fn packs_from(
    ranks: Topology,
    request: &Request,
    collective: Collective,
) -> Option<u32> {
    let from = packs_of_message(ranks, request);
    let two_shot = matches!(collective, Collective::TwoShot { .. });
    let by_gemm = request.row.multiplies() && !two_shot;
    from.filter(|_| request.rms_norm.is_none() && !by_gemm && ranks.size > 1)
}

/// Like [`packs_from`], for a message that neither a GEMM nor an RMSNorm is part of.
pub(crate) fn packs_of_message(ranks: Topology, request: &Request) -> Option<u32> {
    let from = ranks.tuning().packs_from(ranks.device, ranks.size);
    from.filter(|_| request.more.is_empty() && !request.row.combines())
}

/// Words of the LL protocol that calls up to the size of `items` need for each peer, without the
/// header.
pub(crate) fn words(ranks: Topology, request: &Request, items: Items) -> Used {
    let most = items.most();
    match packs_from(ranks, request, items.collective).filter(|&from| most >= from) {
        None => Used { pairs: most, packs: 0 },
        // Calls with fewer than `from` items still send pairs.
        Some(from) => Used { pairs: from, packs: items.most_packs() },
    }
}

/// Bytes of the signal segment that `words` occupy in a world of `size` ranks: each source rank has
/// two slots, one for even and one for odd call numbers.
pub(crate) fn signal_bytes(words: Used, size: usize) -> usize {
    let quads = (words.packs as usize).saturating_mul(QUADS as usize);
    (words.pairs as usize).saturating_add(quads).saturating_mul(2 * 16 * size)
}

/// Whether each row consists of whole items. Only an RMSNorm requires this; without an RMSNorm the
/// result is true.
pub(crate) fn are_rows_whole(request: &Request, items: Items) -> bool {
    request.rms_norm.is_none() || request.n.is_multiple_of(items.per_item as usize)
}
