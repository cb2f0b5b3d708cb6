//! Sizes of a communicator: the limits for which its operators are planned, and the memory that
//! these operators need.

use std::sync::Arc;

use iris_heap::{ALIGNMENT, Bytes, DType, HeapOptions, Settings};
use iris_kernels::dtype::Role;
use iris_sync::LINE_WORDS;

use crate::error::{Error, Result};
use crate::memory_needs::{Extent, OWN_WORDS};
use crate::op_names::Op;
use crate::ops;
use crate::options::Request;
use crate::plan::Plan;
use crate::plan::composed::{area_bytes, largest_areas};
use crate::topology::Topology;

/// Types in whose units data is moved unchanged: f32 for words of four bytes, f16 for words of two.
pub(super) const WORDS: [DType; 2] = [DType::F32, DType::F16];

/// Maximum number of bytes that one launch moves through the communicator's own buffers: data of
/// elements with an alignment of one byte, such as `u8`, and of `reduce`, `gather` and `scatter`.
const STAGE_BYTES: u64 = 1 << 20;

/// Largest value that [`Options::max_bytes`] accepts. A launch has at most 2^30 - 1 elements, of at
/// least two bytes each. Over several nodes the number of elements is rounded up to a multiple of
/// the number of ranks of a node, which is at most 64.
const MOST_BYTES: u64 = 2 * (i32::MAX as u64 / 2 / 64 * 64);

/// Smallest value that [`Options::max_bytes`] accepts.
const LEAST_BYTES: u64 = 4096;

/// Smallest value that [`Options::max_bytes`] accepts per rank of the world. With a smaller value,
/// a part of a message could be shorter than a few words.
const LEAST_BYTES_OF_RANK: u64 = 64;

/// Sizes of a [`Comm`](super::Comm).
///
/// The workspace is symmetric memory into which peers write their parts of a message. A call with
/// more bytes than [`max_bytes`](Options::max_bytes) is done in parts, one launch after the other.
/// So a smaller workspace saves memory, and large messages take longer.
///
/// # Workspace
/// Number of bytes of each rank's heap that a communicator uses, with sums of f32, f16 and bf16.
/// [`Options::footprint`] computes the number for other options:
///
#[doc = include_str!("footprint.md")]
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Name of the communicator in errors; `None` to show the place where it is opened.
    name: Option<Arc<str>>,
    max_bytes: u64,
    sums: Vec<DType>,
    batch_invariant: bool,
    /// Room for other allocations of the program, in a heap that the communicator itself opens.
    beside: Footprint,
    /// Settings of a world that the communicator itself makes; `None` to use the settings of the
    /// environment.
    pub(super) settings: Option<Settings>,
}

/// Memory of each rank's heap that a [`Comm`](super::Comm) uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Footprint {
    /// Number of bytes that the operator takes of the data segment.
    pub data_bytes: u64,
    /// Number of bytes that the operator takes of the signal segment, through which small messages
    /// travel.
    pub signal_bytes: u64,
    /// Number of four-byte words that are local to the device.
    pub device_words: u64,
}

impl Footprint {
    /// Memory of the operator of `plan`.
    pub(crate) fn of(plan: &Plan) -> Self {
        Self {
            data_bytes: plan.data_bytes(),
            signal_bytes: plan.signal_bytes(),
            device_words: plan.device_words(),
        }
    }

    /// Memory in the data segment only.
    pub(crate) fn data(bytes: Bytes) -> Self {
        Self { data_bytes: bytes.get(), ..Self::default() }
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self {
            data_bytes: self.data_bytes.saturating_add(other.data_bytes),
            signal_bytes: self.signal_bytes.saturating_add(other.signal_bytes),
            device_words: self.device_words.saturating_add(other.device_words),
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        let (sums, beside) = (Role::Wire.types().collect(), Footprint::default());
        Self {
            name: None,
            max_bytes: 8 << 20,
            sums,
            batch_invariant: false,
            beside,
            settings: None,
        }
    }
}

impl Options {
    /// Default options: at most 8 MiB per launch; sums of f32, f16 and bf16; no room for other
    /// allocations of the program.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the name of the communicator, which errors show in place of the call site that opened
    /// it. A program with several communicators names them, such as `tp` and `dp`.
    #[must_use]
    pub fn name(self, name: impl Into<Arc<str>>) -> Self {
        Self { name: Some(name.into()), ..self }
    }

    /// Sets the maximum message size of one launch in bytes: at least 4096, at least 64 for each
    /// rank, and less than 2 GiB. The size of a message is the larger of a rank's input and output.
    #[must_use]
    pub fn max_bytes(self, bytes: u64) -> Self {
        Self { max_bytes: bytes, ..self }
    }

    /// Sets the element types that can be summed, a subset of f32, f16 and bf16. A communicator
    /// with fewer types opens faster.
    #[must_use]
    pub fn sums(self, dtypes: &[DType]) -> Self {
        Self { sums: dtypes.to_vec(), ..self }
    }

    /// Makes the bits of a sum independent of the number of elements and of an element's place in
    /// the message. Within one node they are so without this option, too; over several nodes,
    /// opening a communicator with it fails. Default: false.
    #[must_use]
    pub fn batch_invariant(self, batch_invariant: bool) -> Self {
        Self { batch_invariant, ..self }
    }

    /// Sets the settings, deadlines among them, of the world that
    /// [`Comm::from_rank_with`](super::Comm::from_rank_with) makes, in place of the environment's.
    /// A world that the program makes has its own settings.
    #[must_use]
    pub fn settings(self, settings: Settings) -> Self {
        Self { settings: Some(settings), ..self }
    }

    /// Adds `bytes` bytes for the program's own allocations to the heap, if the communicator opens
    /// the heap.
    #[must_use]
    pub fn room(mut self, bytes: u64) -> Self {
        self.beside.data_bytes = self.beside.data_bytes.saturating_add(bytes);
        self
    }

    /// Adds room for the operators of these plans to the heap, if the communicator opens the heap.
    #[must_use]
    pub fn operators(mut self, plans: &[&Plan]) -> Self {
        let operators = plans.iter().map(|plan| Footprint::of(plan));
        self.beside = operators.fold(self.beside, Footprint::plus);
        self
    }

    /// Memory that a communicator with these options takes of its heap on each rank.
    ///
    /// ```
    /// use iris_ops::{Device, Topology, comm};
    /// let ranks = Topology::new(0, 8).on_device(Device::named("h200")?);
    /// println!("{:?}", comm::Options::new().max_bytes(64 << 20).footprint(ranks)?);
    /// # iris_ops::OpResult::<()>::Ok(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Comm`] for a `max_bytes` out of bounds; [`Error::Invalid`] for other options that no
    /// communicator can have.
    pub fn footprint(&self, ranks: impl Into<Topology>) -> Result<Footprint> {
        Ok(self.plans(ranks.into())?.footprint())
    }

    /// Options that must be equal on all ranks, with their names.
    pub(super) fn items(&self) -> [(&'static str, String); 5] {
        let sums: Vec<_> = self.sums.iter().map(|dtype| dtype.name()).collect();
        let beside = self.beside.data_bytes;
        [
            ("name", self.name.as_deref().unwrap_or("none").into()),
            ("max_bytes", self.max_bytes.to_string()),
            ("sums", sums.join(", ")),
            ("batch_invariant", self.batch_invariant.to_string()),
            ("room, with that of operators, in bytes,", beside.to_string()),
        ]
    }

    /// Options for opening a heap with room for the communicator of these plans and for the
    /// program's own allocations.
    pub(super) fn heap_options(&self, plans: &Plans) -> HeapOptions {
        let (own, beside) = (plans.footprint(), self.beside);
        let options = HeapOptions::new().backend(plans.barrier.topology().device.backend);
        let reserved = iris_heap::abi::SIGNAL_RESERVED;
        let words = own.device_words.saturating_add(beside.device_words).max(options.device_words);
        options
            .data_bytes(own.data_bytes.saturating_add(beside.data_bytes))
            .signal_bytes(
                own.signal_bytes.saturating_add(beside.signal_bytes).saturating_add(reserved),
            )
            .device_words(words)
    }

    /// Makes the plans of the communicator's operators, without communication between ranks.
    pub(super) fn plans(&self, ranks: Topology) -> Result<Plans> {
        let &Self { max_bytes, ref sums, .. } = self;
        let least = LEAST_BYTES.max(LEAST_BYTES_OF_RANK * ranks.size as u64);
        if !(least..=MOST_BYTES).contains(&max_bytes) {
            let (value, expected) = (max_bytes.to_string(), format!("{least} to {MOST_BYTES}"));
            let what = "max_bytes of a communicator".into();
            return Err(Error::comm(iris_heap::Error::Invalid { what, value, expected }));
        }
        let size = ranks.size as u64;
        let whole = |dtype: DType| (max_bytes / dtype.size() as u64) as usize;
        let part = |dtype: DType| whole(dtype) / ranks.size.max(1);
        let request = |op: Op, count: usize| {
            let mut request = Request::new(ops::row(op), (0, count, 0));
            request.name = self.name.clone();
            request.batch_invariant = self.batch_invariant;
            request
        };
        let of = |op: Op, dtype: DType, count: usize| {
            let mut request = request(op, count);
            (request.elements, request.dtype) = (true, dtype);
            Plan::new(ranks, &request)
        };
        let mut sharing = Vec::new();
        for &dtype in sums {
            sharing.push(of(Op::AllReduce, dtype, whole(dtype))?);
            sharing.push(of(Op::ReduceScatter, dtype, part(dtype))?);
        }
        for dtype in WORDS {
            sharing.push(of(Op::AllGather, dtype, part(dtype))?);
            sharing.push(of(Op::AllToAll, dtype, part(dtype))?);
            sharing.push(of(Op::Broadcast, dtype, whole(dtype))?);
        }
        Ok(Plans {
            sharing,
            barrier: Plan::new(ranks, &request(Op::Barrier, 0))?,
            stage: STAGE_BYTES.min(max_bytes) / size / 4 * 4 * size,
        })
    }
}

#[derive(Clone, Debug)]
pub(super) struct Plans {
    /// Plans of the operators that share a workspace: one for each collective and element type.
    pub(super) sharing: Vec<Plan>,
    pub(super) barrier: Plan,
    /// Size in bytes of the communicator's send buffer, and of its receive buffer. It is a whole
    /// number of words for each rank.
    pub(super) stage: u64,
}

impl Plans {
    fn footprint(&self) -> Footprint {
        let (sharing, barrier) = (self.sharing.iter().collect::<Vec<_>>(), &self.barrier);
        let areas = area_bytes(&largest_areas(&sharing));
        let sharing: Vec<&Plan> = sharing.into_iter().flat_map(Plan::parts).collect();
        let extent = sharing.iter().map(|plan| plan.extent()).reduce(Extent::max);
        let extent = extent.unwrap_or_default();
        let aligned = |bytes: u64| bytes.next_multiple_of(ALIGNMENT);
        let line = u64::from(LINE_WORDS);
        let words = |words: usize| (words as u64).next_multiple_of(line);
        let data = extent.data_blocks().into_iter().map(|(_, bytes)| aligned(bytes)).sum::<u64>();
        Footprint {
            data_bytes: data + areas + barrier.data_bytes() + 2 * aligned(self.stage),
            signal_bytes: aligned(extent.signal_bytes()) + barrier.signal_bytes(),
            // Device words: those of each operator, and one cache line for the word with the number
            // of calls.
            device_words: words(extent.device_words())
                + sharing.len() as u64 * words(OWN_WORDS)
                + barrier.device_words()
                + line,
        }
    }
}
