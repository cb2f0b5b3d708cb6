//! Choice of the variant of a call: by a measured row of the tuning table if there is one,
//! otherwise by the shortest predicted time. Table rows and predictions depend only on values that
//! are equal on all ranks, so all ranks choose the same variant.

pub(crate) mod data;
mod table;
mod tiles;
pub(crate) mod user;

use iris_kernels::Library;
use iris_kernels::dtype::has_mma;
use iris_kernels::gemm::GemmCall;
use iris_kernels::program::{Overlap, Program};

pub(crate) use data::GemmKind;
pub(crate) use tiles::{tile, whole_tile};

use crate::cost::Problem;
use crate::ll_items;
#[cfg(test)]
use crate::op_names::Op;
use crate::op_names::{ChoiceReason, Variant};
use crate::op_row::{Form, Memory, Norm};
use crate::options::{Epilogue, Request, Shard, TileShape};
use crate::topology::Topology;
use data::Senders;

/// Maximum number of items (8 bytes of data each) that one rank sends to another by the LL
/// protocol: 2 MiB. With two ranks, a message of this size occupies 16 MiB of the signal segment,
/// or 11 MiB if it is sent in packs (48-byte units); with four ranks, its packs occupy 21 MiB.
pub(crate) const LL_ITEMS: u32 = 1 << 18;

/// Maximum number of workgroups on a GPU that process items of a message by the LL protocol.
pub(crate) const LL_GROUPS: u32 = 128;

/// Maximum number of bytes of the signal segment that an operator's LL words occupy if the caller
/// did not request the LL protocol. Twice as many are allowed with an RMSNorm, or for packs
/// (48-byte units of the LL protocol) after a GEMM. Four times as many, an eighth of the default
/// size of a heap's signal segment, are allowed for other packs.
const LL_SIGNAL_BYTES: usize = 8 << 20;

/// Value that predictions use for N or K if these may differ between ranks, so that all ranks
/// predict the same times and choose the same variant.
const COMMON: usize = 4096;

/// Name of the GPU whose tuning data is used for a device without its own data: `H200` or `MI300X`.
/// `None` if the device has its own data.
pub(crate) fn figures_of(ranks: Topology) -> Option<&'static str> {
    let tuning = ranks.tuning();
    tuning.stands_in_for(ranks.device).then_some(tuning.of.as_str())
}

/// Maximum number of workgroups of a message. It is odd on GPUs; [`data::Launches`] gives the
/// reason.
pub(crate) fn message_groups(ranks: Topology) -> u32 {
    if ranks.device.backend.traits().host_threads {
        return u32::MAX;
    }
    let odd = (ranks.device.multiprocessors.max(1) - 1) | 1;
    ranks.tuning().launches.message_groups.unwrap_or(odd)
}

/// Maximum number of workgroups of a broadcast by relays (ranks that forward tiles of the root): a
/// multiple of the number of relays, so that each workgroup of the root sends to one relay.
fn relay_groups(ranks: Topology) -> u32 {
    let most = message_groups(ranks);
    let most = ranks.tuning().launches.relay_groups.map_or(most, |groups| groups.min(most));
    let relays = (ranks.size as u32).saturating_sub(1).max(1);
    (most / relays * relays).max(1)
}

/// Numbers of workgroups and threads in the launches of calls with one choice of variant and tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizing {
    /// Maximum number of workgroups that a message uses.
    pub(crate) most_groups: u32,
    /// Threads of a workgroup by size of the message, ascending: pairs of maximum size and threads.
    /// For the LL protocol the size is a number of items; for messages that are summed, it is a
    /// number of bytes. Larger messages, other messages and messages with an RMSNorm (where a
    /// workgroup processes whole rows) use the number of threads for which the kernel is built.
    threads: &'static [(usize, u32)],
    /// Threads of a workgroup of a message that consists of packs (48-byte units), by its number of
    /// packs.
    threads_of_packs: &'static [(usize, u32)],
    /// Share of workgroups that only send, and the message sizes to which it applies; `None` if all
    /// workgroups send and receive.
    senders: Option<Senders>,
}

impl Sizing {
    /// Returns the sizes of the launches of the variant `form` for this request.
    pub(crate) fn of(ranks: Topology, request: &Request, form: &Form) -> Self {
        let launches = &ranks.tuning().launches;
        let plain = request.rms_norm.is_none();
        // Small messages use small workgroups. A barrier of a small workgroup is faster, and the
        // work is then spread over more multiprocessors.
        let threads: &[_] = match form.memory {
            Memory::Pairs(_) if plain => &launches.threads_of_words,
            Memory::AllTiles | Memory::OwnedAndResults | Memory::PartialParts if plain => {
                &launches.threads_of_sums
            }
            _ => &[],
        };
        let senders = match form.memory {
            Memory::OwnedAndResults => launches.senders_to_all,
            Memory::PartialParts => launches.senders_to_owners,
            Memory::Parts => launches.senders_of_parts,
            _ => None,
        };
        let senders = senders.filter(|_| plain && ranks.size == 2);
        let relayed = form.memory == Memory::OneSource && !form.sends_all;
        let groups = if relayed { relay_groups } else { message_groups };
        let threads_of_packs = &launches.threads_of_packs;
        Sizing { most_groups: groups(ranks), threads, threads_of_packs, senders }
    }

    /// Number of threads of a workgroup for a message of this size; `None` for the number for which
    /// the kernel is built.
    pub(crate) fn threads(&self, size: usize) -> Option<u32> {
        threads_in(self.threads, size)
    }

    /// Number of threads of a workgroup for a message of this number of packs.
    pub(crate) fn threads_of_packs(&self, packs: u32) -> Option<u32> {
        threads_in(self.threads_of_packs, packs as usize)
    }

    /// Share of the workgroups that only send in a message of `bytes` bytes, in eighths of all
    /// workgroups; 0 if all workgroups send and receive.
    pub(crate) fn sending_eighths(&self, bytes: usize) -> u32 {
        self.senders.filter(|it| it.bytes().contains(&bytes)).map_or(0, |it| it.eighths)
    }
}

fn threads_in(steps: &[(usize, u32)], size: usize) -> Option<u32> {
    steps.iter().find(|(most, _)| size <= *most).map(|&(_, threads)| threads)
}

/// Number of bytes of the whole message, in the element type that is sent between ranks.
pub(crate) fn message_bytes(request: &Request, (m, n): (usize, usize)) -> usize {
    let row = match request.more.is_empty() {
        true => n.saturating_mul(request.wire_dtype().size()),
        false => ll_items::of_list_row(request) as usize * 8,
    };
    m.saturating_mul(row)
}

/// Sizes of calls at which the choice of variant and tile may change: powers of two, and the limits
/// of the rows of the tuning table.
pub(crate) fn sizes(ranks: Topology, request: &Request) -> Vec<usize> {
    let powers = (3..usize::BITS - 1).map(|bits| 1 << bits);
    powers.chain(table::ends(ranks, request)).collect()
}

/// Operators, N and K of all rows of the tuning table, each once.
#[cfg(test)]
pub(crate) fn table_shapes(ranks: Topology) -> Vec<(Op, usize, usize)> {
    let of = |row: &data::Row| (row.op, row.n, row.k.unwrap_or(COMMON));
    let all: std::collections::BTreeSet<_> = ranks.tuning().row.iter().map(of).collect();
    all.into_iter().collect()
}

/// Variant for calls of the request's size, with the reason for the choice.
/// `most` is the size of the plan's largest call.
pub(crate) fn variant(ranks: Topology, request: &Request, most: usize) -> (Variant, ChoiceReason) {
    let row = request.row;
    let known = table::variant(ranks, request).and_then(|variant| row.form(variant));
    // Variants that pull are excluded: peers read A in place, so A must be in the heap. A plan does
    // not know where A will be.
    let known = known.filter(|form| !form.pulls && is_as_measured(ranks, request, form));
    match known.filter(|form| form.serves(ranks, request)) {
        Some(form) if table::is_own(ranks, request) => (form.variant, ChoiceReason::Tuned),
        Some(form) => (form.variant, ChoiceReason::Measured),
        None => (quickest(ranks, request, most), ChoiceReason::Predicted),
    }
}

/// Variant with the shortest predicted time of all variants that `auto` may choose. The prediction
/// uses only values that are equal on all ranks. With one rank, or without any prediction, the
/// result is the first variant that supports the request.
fn quickest(ranks: Topology, request: &Request, most: usize) -> Variant {
    let forms = || request.row.forms.iter().filter(|form| form.serves(ranks, request));
    let mut request = request.clone();
    let common = request.row.common;
    for (value, common) in [(&mut request.n, common.n), (&mut request.k, common.k)] {
        if !common && !request.uniform_shape {
            *value = COMMON;
        }
    }
    let timed = forms().filter(|form| ranks.size > 1 && may_take(ranks, &request, form));
    let timed = timed.filter_map(|form| Some((form, predicted(ranks, &request, (form, most))?)));
    let best = timed.min_by(|(_, one), (_, other)| one.total_cmp(other)).map(|(form, _)| form);
    best.or_else(|| forms().next()).map_or(request.row.forms[0].variant, |form| form.variant)
}

/// Step between nodes that may be in flight on the device during a call, and the number of
/// multiprocessors that the call's launches leave free for this step; `None` if there is no such
/// step.
pub(crate) fn overlap(ranks: Topology, request: &Request) -> Option<Overlap> {
    let step_blocks = request.step_blocks;
    let all = ranks.device.multiprocessors;
    // Launches have at most as many workgroups as there are multiprocessors that the step between
    // nodes does not use.
    let most = all.saturating_sub(step_blocks).max(1);
    let groups = request.workgroups.map_or(most, |groups| groups as u32);
    let left_free = all.saturating_sub(groups);
    (step_blocks > 0).then_some(Overlap { step_blocks, left_free })
}

/// Predicted time in microseconds of the largest call by this variant; `None` if a step has no
/// prediction.
fn predicted(
    ranks: Topology,
    request: &Request,
    (form, most): (&'static Form, usize),
) -> Option<f64> {
    let norm = if request.rms_norm.is_some() { form.norm } else { Norm::None };
    let program = Program { norm, overlap: overlap(ranks, request), ..Program::new(form.program) };
    let tile = tile(ranks, request, form);
    Problem::of(ranks, request, (most, request.m), tile).predict(&ranks.tuning().machine, &program)
}

impl Problem {
    /// Input of the cost model for the largest call of a request with this tile. `most` is the
    /// number of rows of the plan's largest call, and `rows` that of the largest call that uses the
    /// same kernels as the request's call.
    pub(crate) fn of(
        ranks: Topology,
        request: &Request,
        (most, rows): (usize, usize),
        tile: TileShape,
    ) -> Problem {
        let takes = |kind| takes_part(ranks, request, kind);
        Problem {
            row: request.row,
            product: GemmCall { most, ..product(ranks, request, request.k) },
            rows,
            tile: [tile.m, tile.n].map(|it| it as u32),
            columns: request.shard == Shard::Columns,
            normed: request.rms_norm.is_some(),
            stores: request.library.may_fuse(),
            gated: takes(GemmKind::Gated),
            exchanges: takes(GemmKind::Exchanging),
            has_library: !request.batch_invariant,
            packs_from: ll_items::packs_of_message(ranks, request),
            has_engines: !ranks.device.backend.traits().host_threads,
        }
    }
}

/// Product of the largest call of a request, described for the built-in GEMMs. Matrices are taken
/// as contiguous, and `k` replaces the request's K.
fn product(ranks: Topology, request: &Request, k: usize) -> GemmCall {
    let Request { m, dtype, epilogue, .. } = *request;
    // A row of a list has the bytes of all its tensors.
    let n = match request.more.is_empty() {
        true => request.n,
        false => message_bytes(request, (1, request.n)) / dtype.size(),
    };
    GemmCall {
        is_there: ranks.device.has_wgmma(),
        shape: [m, n, k],
        most: m,
        dtypes: [dtype, request.output_dtype(), request.wire_dtype()],
        has_epilogue: epilogue != Epilogue::None,
        is_aligned: k.is_multiple_of(8) || m == 1,
        layout: (false, false),
        ranks: ranks.size,
        multiprocessors: ranks.device.multiprocessors,
        k_parts: request.k_parts(ranks),
    }
}

/// Whether `auto` may choose a variant. The variant must have run on such a device with this number
/// of ranks, accept A in any memory, and add in a fixed order; and the device must support it.
fn may_take(ranks: Topology, request: &Request, form: &Form) -> bool {
    let ran = ranks.tuning().allows(form.variant, ranks.device, ranks.size);
    let by_workgroups = !form.stores && !form.is_copied();
    // A tile that the caller chose would change the parts of a message that copy engines send or a
    // GEMM stores. For such parts there are no measurements.
    let parts = by_workgroups || request.tile.is_none();
    // Copy engines are excluded in two cases. If A is split by columns and no GEMM waits for the
    // copies, they would not be faster. If the call has an RMSNorm, they have not been measured.
    let copies = !form.is_copied()
        || form.stores
        || request.rms_norm.is_none()
            && (request.shard == Shard::Rows || has_stores(ranks, request));
    let stores = !form.stores || has_stores(ranks, request);
    let in_order = !form.variant.order_varies() && !form.pulls;
    ran && in_order && parts && copies && stores && fits_words(ranks, request, form)
}

/// Whether the message is small enough for the LL words that the variant may use. True for a
/// variant without LL words.
fn fits_words(ranks: Topology, request: &Request, form: &Form) -> bool {
    let Memory::Pairs(collective) = form.memory else { return true };
    let items = ll_items::of(ranks, request, collective, (request.m, request.n));
    let words = ll_items::words(ranks, request, items);
    let times = match (words.packs > 0, request.rms_norm.is_some()) {
        (true, _) if !request.row.multiplies() => 4,
        (true, _) | (false, true) => 2,
        (false, false) => 1,
    };
    ll_items::signal_bytes(words, ranks.size) <= times * LL_SIGNAL_BYTES
        && items.most() <= LL_ITEMS
        && ll_items::are_rows_whole(request, items)
        && request.tile.is_none()
}

/// Whether the built-in GEMM of this kind may be used in the calls. Either the caller requested
/// built-in GEMMs, or the caller left the choice open and the kind has run with this number of
/// ranks.
pub(crate) fn takes_part(ranks: Topology, request: &Request, kind: GemmKind) -> bool {
    match request.library {
        Library::Ours => true,
        Library::Auto => ranks.tuning().has_run_gemm(kind, ranks.device, ranks.size),
        Library::Vendor | Library::None => false,
    }
}

/// Whether the built-in GEMMs can multiply operands of this type by wgmma instructions of the
/// device.
fn has_wgmma(ranks: Topology, request: &Request) -> bool {
    ranks.device.has_wgmma() && has_mma(request.dtype)
}

/// Whether a call resembles the calls for which table rows were measured. On GPUs these are plain
/// products and messages without epilogue, RMSNorm or chosen tile. Tracing, counting, test delays
/// and the number of workgroups are ignored, so that they do not change the variant of a call.
fn is_as_measured(ranks: Topology, request: &Request, form: &Form) -> bool {
    if ranks.device.backend.traits().host_threads {
        return true;
    }
    let Request { dtype, epilogue, library, rms_norm, tile, .. } = *request;
    let alike = request.output_dtype() == dtype && request.wire_dtype() == dtype;
    let plain = epilogue == Epilogue::None && rms_norm.is_none();
    let by_rule = library == Library::Auto && tile.is_none();
    alike && plain && by_rule && (!form.stores || has_stores(ranks, request))
}

/// Whether, for these operands, there is a whole-matrix GEMM that can wait for peers and store to
/// peers.
fn has_stores(ranks: Topology, request: &Request) -> bool {
    // The rank's own K is used only if all ranks have the same K, because all ranks must get the
    // same result.
    let is_common = request.row.common.k || request.uniform_shape;
    let k = if is_common { request.k } else { COMMON };
    request.library.may_fuse() && product(ranks, request, k).is_served()
}
