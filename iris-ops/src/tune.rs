//! Which variant a call takes: a measured row first, then the one with the shortest predicted time. Both depend only on
//! values that all ranks have in common.

pub(crate) mod data;
mod table;
mod tiles;
pub(crate) mod user;

use iris_heap::DType;
use iris_kernels::Library;
use iris_kernels::program::Program;

pub(crate) use data::GemmKind;
pub(crate) use tiles::{tile, whole_tile};

use crate::cost::Problem;
use crate::items;
use crate::kind::{Variant, Why};
use crate::options::{Epilogue, Request, Shard, TileShape};
use crate::ranks::Ranks;
use crate::spec::{Form, Memory, Norm};
use data::Senders;

/// Most items, of eight bytes, that one rank sends another in words that carry their data: 2 MiB. Of two
/// ranks such a message takes 16 MiB of the signal segment.
pub(crate) const LL_ITEMS: u32 = 1 << 18;

/// Most workgroups of such a message on a GPU.
pub(crate) const LL_GROUPS: u32 = 128;

/// Bytes of the signal segment that such words of an op take at most where nobody asked for them: an
/// eighth of what a heap has by default, and a quarter for rows that are normalised.
const LL_SIGNAL_BYTES: usize = 8 << 20;

/// N or K of a prediction where it is a rank's own, so that ranks with other values choose alike.
const COMMON: usize = 4096;

/// The GPU whose figures choose for a device, if it is another: `H200` or `MI300X`.
pub(crate) fn figures_of(ranks: Ranks) -> Option<&'static str> {
    let tuning = ranks.tuning();
    tuning.stands_in_for(ranks.device).then_some(tuning.of.as_str())
}

/// Most workgroups of a message: an odd number on GPUs, as [`data::Launches`] says.
pub(crate) fn message_groups(ranks: Ranks) -> u32 {
    if ranks.device.backend.traits().host_threads {
        return u32::MAX;
    }
    let odd = (ranks.device.multiprocessors.max(1) - 1) | 1;
    ranks.tuning().launches.message_groups.unwrap_or(odd)
}

/// Figures by which the calls of a choice size their launches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizing {
    /// Most workgroups of a message.
    pub(crate) most_groups: u32,
    /// Threads of a workgroup for messages up to a size, the smallest first; larger ones have as many as kernels are
    /// built for. A size is a number of items of the LL protocol, or of bytes that are summed. None for other messages
    /// and for rows that are normalised, which a workgroup holds in as many threads as there are.
    threads: &'static [(usize, u32)],
    /// Workgroups that only send.
    senders: Option<Senders>,
}

impl Sizing {
    /// Figures of a form of this request.
    pub(crate) fn of(ranks: Ranks, request: &Request, form: &Form) -> Self {
        let launches = &ranks.tuning().launches;
        let plain = request.rms_norm.is_none();
        // Few threads for few items, since a workgroup meets sooner, and its items are spread over more
        // multiprocessors.
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
        Sizing { most_groups: message_groups(ranks), threads, senders }
    }

    /// Threads of a workgroup of a message of this size; none for as many as its kernels are built for.
    pub(crate) fn threads(&self, size: usize) -> Option<u32> {
        let step = self.threads.iter().find(|(most, _)| size <= *most);
        step.map(|&(_, threads)| threads)
    }

    /// Number of eighths of the workgroups that only send in a message of so many bytes; 0 if all send, and take or add
    /// up.
    pub(crate) fn sending_eighths(&self, bytes: usize) -> u32 {
        self.senders.filter(|it| it.bytes().contains(&bytes)).map_or(0, |it| it.eighths)
    }
}

/// Bytes of the whole message, as it travels.
pub(crate) fn message_bytes(request: &Request, (m, n): (usize, usize)) -> usize {
    m.saturating_mul(n).saturating_mul(request.wire_dtype().size())
}

/// Sizes of calls at which the choice may change: powers of two, and the ends of the table's rows.
pub(crate) fn sizes(ranks: Ranks, request: &Request) -> Vec<usize> {
    let powers = (3..usize::BITS - 1).map(|bits| 1 << bits);
    powers.chain(table::ends(ranks, request)).collect()
}

/// The variant of a call of this size, and why.
pub(crate) fn variant(ranks: Ranks, request: &Request) -> (Variant, Why) {
    let row = request.row;
    let known = table::variant(ranks, request).and_then(|variant| row.form(variant));
    // Peers read A where it lies, which must be in the heap: a plan does not know where it will be.
    let known = known.filter(|form| !form.pulls && is_as_measured(ranks, request, form));
    match known.filter(|form| form.serves(request)) {
        Some(form) if table::is_own(ranks, request) => (form.variant, Why::Tuned),
        Some(form) => (form.variant, Why::Measured),
        None => (quickest(ranks, request), Why::Predicted),
    }
}

/// The variant with the shortest predicted time, from what all ranks have in common, of those that may be taken; the
/// first that serves where a rank is alone, or nothing is predicted.
fn quickest(ranks: Ranks, request: &Request) -> Variant {
    let forms = || request.row.forms.iter().filter(|form| form.serves(request));
    let mut request = request.clone();
    let common = request.row.common;
    for (value, common) in [(&mut request.n, common.n), (&mut request.k, common.k)] {
        if !common && !request.even {
            *value = COMMON;
        }
    }
    let timed = forms().filter(|form| ranks.size > 1 && may_take(ranks, &request, form));
    let timed = timed.filter_map(|form| Some((form, predicted(ranks, &request, form)?)));
    let best = timed.min_by(|(_, one), (_, other)| one.total_cmp(other)).map(|(form, _)| form);
    best.or_else(|| forms().next()).map_or(request.row.forms[0].variant, |form| form.variant)
}

/// Predicted time of a call that is done so, in microseconds.
fn predicted(ranks: Ranks, request: &Request, form: &'static Form) -> Option<f64> {
    let norm = if request.rms_norm.is_some() { form.norm } else { Norm::None };
    let program = Program { norm, ..Program::new(form.program) };
    let problem = Problem::of(ranks, request);
    let TileShape { m, n } = tile(ranks, request, form);
    problem.predict(&ranks.tuning().machine, &program, [m, n])
}

impl Problem {
    /// A call of the largest size of a request.
    pub(crate) fn of(ranks: Ranks, request: &Request) -> Problem {
        let Request { row, m, n, k, .. } = *request;
        Problem {
            row,
            world: ranks.size,
            multiprocessors: ranks.device.multiprocessors,
            shape: [m, n, k],
            dtype: request.dtype,
            wire: request.wire_dtype(),
            output: request.output_dtype(),
            columns: request.shard == Shard::Columns,
            has_stores: has_stores(ranks, request),
            gated: takes_part(ranks, request, GemmKind::Gated),
            has_engines: !ranks.device.backend.traits().host_threads,
        }
    }
}

/// Whether `auto` may take a form: it has run on such a device among so many ranks, takes any A, adds in one order, and
/// has what it needs.
fn may_take(ranks: Ranks, request: &Request, form: &Form) -> bool {
    let ran = ranks.tuning().has_run(form.variant, ranks.device, ranks.size);
    let by_workgroups = !form.stores && !form.is_copied();
    // What is copied or stored in parts has parts of its own, and its rows need no second pass.
    let parts = by_workgroups || request.tile.is_none();
    // Columns that come are multiplied before all are there, or not sooner than without engines; and nobody has
    // measured copies behind which rows are normalised.
    let copies = !form.is_copied()
        || form.stores
        || request.rms_norm.is_none()
            && (request.shard == Shard::Rows || has_stores(ranks, request));
    let stores = !form.stores || has_stores(ranks, request);
    let in_order = !form.variant.order_varies() && !form.pulls;
    ran && in_order && parts && copies && stores && fits_words(ranks, request, form)
}

/// Whether a message is small enough for words that carry their data, if the form has any.
fn fits_words(ranks: Ranks, request: &Request, form: &Form) -> bool {
    let Memory::Pairs(collective) = form.memory else { return true };
    let items = items::of(ranks, request, collective, (request.m, request.n));
    let times = if request.rms_norm.is_some() { 2 } else { 1 };
    // Two slots of each source, and twice the bytes.
    let most = times * (LL_SIGNAL_BYTES / (4 * ranks.size));
    (items.most() as usize).saturating_mul(8) <= most
        && items.most() <= LL_ITEMS
        && items::are_rows_whole(request, items)
        && request.tile.is_none()
}

/// Whether a GEMM of ours of this kind takes part in calls for which the library is chosen so: it was asked for, or it
/// has run among so many ranks.
pub(crate) fn takes_part(ranks: Ranks, request: &Request, kind: GemmKind) -> bool {
    match request.library {
        Library::Ours => true,
        Library::Auto => ranks.tuning().has_run_gemm(kind, ranks.device, ranks.size),
        Library::Vendor | Library::None => false,
    }
}

/// Whether the device multiplies such operands by wgmma.
fn has_wgmma(ranks: Ranks, request: &Request) -> bool {
    ranks.device.has_wgmma() && matches!(request.dtype, DType::F16 | DType::BF16)
}

/// Whether a call is done as the rows of its table were measured. On GPUs nothing is asked for besides the product and
/// the message, and what stores to others does so. What is traced, counted or held up, and the number of workgroups,
/// are no part of the choice: whoever observes a call observes what is done without that.
fn is_as_measured(ranks: Ranks, request: &Request, form: &Form) -> bool {
    if ranks.device.backend.traits().host_threads {
        return true;
    }
    let Request { dtype, epilogue, library, rms_norm, tile, .. } = *request;
    let alike = request.output_dtype() == dtype && request.wire_dtype() == dtype;
    let plain = epilogue == Epilogue::None && rms_norm.is_none();
    let by_rule = library == Library::Auto && tile.is_none();
    alike && plain && by_rule && (!form.stores || has_stores(ranks, request))
}

/// Whether there is a product of whole matrices, of such operands, that waits for peers and stores to them.
fn has_stores(ranks: Ranks, request: &Request) -> bool {
    let Request { dtype, n, epilogue, library, .. } = *request;
    let alike = request.output_dtype() == dtype && request.wire_dtype() == dtype;
    has_wgmma(ranks, request)
        && alike
        && epilogue == Epilogue::None
        && n.is_multiple_of(8)
        && matches!(library, Library::Auto | Library::Ours)
}
