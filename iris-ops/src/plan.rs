//! Plans: what an op will do and what it needs, computed by each rank for itself.

pub(crate) mod composed;
mod fingerprint;
mod launches;
pub(crate) mod on_device;
mod predicted;
mod shapes;
pub(crate) mod words;

pub use shapes::Shapes;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Once};

use iris_heap::{ALIGNMENT, DType, HeapOptions, Request as Block, Segment};
use iris_kernels::program::{Areas, Sizes};
use iris_kernels::schedule::{self, Grid, SplitGrid, Units, part_of};
use iris_kernels::{Library, Whole};
use iris_sync::LINE_WORDS;
use iris_sync::barrier::Members;

use crate::error::{Error, Result};
use crate::kind::{Op, Variant, Why};
use crate::needs::{Extent, Needs, OWN_WORDS, SLOT_ALIGNMENT};
use crate::options::{Request, Shard, StagingLayout, TileShape};
use crate::ranks::Ranks;
use crate::spec::{self, Form, Memory, Part, Row, Tiles};
use crate::split::split;
use crate::tune::{self, GemmKind};

/// What an op will do and what it needs of the heap. Pure: making one talks to nobody.
///
/// A call takes the first [`Choice`] that is for so many rows, or elements, as it has. The workspace is
/// the largest that any of them needs, so that one op serves calls of all sizes.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) ranks: Ranks,
    pub(crate) request: Request,
    /// By size; at least one, and the last is for the largest call.
    choices: Vec<Choice>,
    /// Whether it was logged whose figures chose.
    told: Arc<Once>,
    /// Plans of its parts, where the ranks are on several nodes.
    composed: Option<Arc<composed::Composed>>,
}

/// How calls up to a size are done.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Choice {
    /// Most rows, or elements of a part, of such a call.
    pub upto: usize,
    /// The variant.
    pub variant: Variant,
    /// The shape of a tile.
    pub tile: TileShape,
    /// Why it is done so.
    pub why: Why,
    pub(crate) form: &'static Form,
    pub(crate) needs: Needs,
    pub(crate) sizing: tune::Sizing,
}

impl Plan {
    /// Check what is asked, and choose.
    pub(crate) fn new(ranks: Ranks, request: &Request) -> Result<Self> {
        let mut request = request.clone();
        if request.elements {
            request.m = if request.row.tiles == Tiles::Whole { 1 } else { ranks.size };
        }
        request.check(ranks)?;
        if ranks.nodes() > 1 {
            return Self::composed_of(ranks, request);
        }
        let ranks = tune::user::tuned(ranks)?;
        let told = Arc::new(Once::new());
        let mut plan = Self { ranks, request, choices: Vec::new(), told, composed: None };
        for upto in plan.sizes() {
            let choice = plan.choose(upto)?;
            // The larger of two that are done alike is for both.
            let alike =
                |last: &mut Choice| (last.variant, last.tile) == (choice.variant, choice.tile);
            if plan.choices.last_mut().is_some_and(alike) {
                plan.choices.pop();
            }
            plan.choices.push(choice);
        }
        // Where one variant is for all sizes, its tiles are those of the largest.
        let alike = |choice: &Choice| {
            choice.variant == plan.choices[0].variant
                && !matches!(choice.why, Why::Measured | Why::Tuned)
        };
        if plan.choices.iter().all(alike) {
            plan.choices.drain(..plan.choices.len() - 1);
        }
        Ok(plan)
    }

    /// Sizes up to which calls may be done in different ways, the plan's own last. Who says how it is
    /// to be done says it for all calls.
    fn sizes(&self) -> Vec<usize> {
        let largest = self.largest();
        let mut sizes = Vec::new();
        let row = self.request.row;
        if self.request.variant.is_none() && row.forms.len() > 1 && !self.alone() {
            sizes = tune::sizes(self.ranks, &self.request);
            sizes.retain(|&size| size < largest);
            sizes.sort_unstable();
            sizes.dedup();
        }
        sizes.push(largest);
        sizes
    }

    /// How calls up to this size are done.
    fn choose(&self, upto: usize) -> Result<Choice> {
        let mut sized = self.request.clone();
        *if sized.elements { &mut sized.n } else { &mut sized.m } = upto;
        let (variant, why) = match sized.variant {
            Some(variant) => (variant, Why::Asked),
            None => tune::variant(self.ranks, &sized),
        };
        let form = sized.row.form(variant).ok_or_else(|| Error::Invalid {
            op: self.op(),
            what: "variant".into(),
            value: variant.to_string(),
            expected: sized
                .row
                .forms
                .iter()
                .map(|form| form.variant.name())
                .collect::<Vec<_>>()
                .join(", "),
        })?;
        if !self.alone() {
            sized.check_form(form)?;
            on_device::check_form(self.row(), form, self.ranks.device)?;
        }
        let tile = sized.tile.unwrap_or_else(|| tune::tile(self.ranks, &sized, form));
        let sized = Self { request: sized, ..self.clone() };
        sized.check_words(form, tile)?;
        sized.check_pairs(form)?;
        let needs = if self.alone() { Needs::default() } else { sized.needs(form, tile) };
        let workspace = sized
            .whole(form, (upto, tile))
            .map_or(0, |whole| whole.library_bytes().saturating_add(sized.area_bytes(form)));
        let needs = Needs { workspace: needs.workspace.max(workspace), ..needs };
        let sizing = tune::Sizing::of(self.ranks, &sized.request, form);
        Ok(Choice { upto, variant, tile, why, form, needs, sizing })
    }

    /// Bytes of the matrices that the largest call of a form keeps in the workspace.
    fn area_bytes(&self, form: &Form) -> u64 {
        let request = &self.request;
        let shape = [request.m, request.n, request.k].map(|it| it as u32);
        let dtypes = [request.dtype, request.wire_dtype(), request.output_dtype()];
        let sizes = Sizes::new(shape, self.size(), dtypes);
        sizes.map_or(0, |sizes| Areas::of(&self.program_of(form)).bytes(&sizes))
    }

    /// What a form of this plan's largest call needs.
    fn needs(&self, form: &Form, tile: TileShape) -> Needs {
        let (request, size) = (&self.request, self.size());
        let grid = self.grid(form, tile);
        let split = self.split_grid(grid);
        let slot = |dtype: DType| {
            ((tile.m * tile.n * dtype.size()) as u64).next_multiple_of(SLOT_ALIGNMENT)
        };
        let (wire, output) = (slot(request.wire_dtype()), slot(request.output_dtype()));
        let (all, part) = (grid.tiles(), split.part(0).tiles());
        let owned = all.div_ceil(size);
        let a_bytes = (request.m * request.k * request.dtype.size()) as u64;
        // Places for tiles that partials travel in, or that results do.
        let places = |tiles, places, sources, slot| Needs {
            tiles,
            places,
            sources,
            slot,
            ..Needs::default()
        };
        let needs = match form.memory {
            Memory::None => Needs::default(),
            Memory::AllTiles => places(all, all, size, wire),
            Memory::OwnedAndResults => {
                let needs = places(all, owned, size, wire);
                Needs { results: all, result_slot: output, ..needs }
            }
            Memory::PartialParts => places(split.tiles(), part, size, wire),
            Memory::Parts => places(part, part, size, output),
            Memory::OneSource => places(all, all, 1, output),
            Memory::Sums { locks } => {
                let bytes = (tile.m * tile.n * size_of::<f32>()) as u64;
                let workspace = (2 * u64::from(owned)).saturating_mul(bytes);
                Needs { tiles: all, places: owned, locks, workspace, ..Needs::default() }
            }
            Memory::Signals => Needs { tiles: part, ..Needs::default() },
            Memory::Copied(rounds) => {
                Needs { tiles: rounds.saturating_mul(part), flags: 1, ..Needs::default() }
            }
            Memory::Pairs(collective) => {
                let pairs = self.items(collective, (request.m, request.n)).most();
                Needs { pairs, ..Needs::default() }
            }
            Memory::Gathered => places(0, 1, 1, a_bytes.next_multiple_of(SLOT_ALIGNMENT)),
            Memory::Staged => {
                let flags = self.units(tile).units();
                Needs { flags, workspace: a_bytes, ..Needs::default() }
            }
        };
        let k_group = if request.row.a == Part::Shard { self.k_group() } else { 0 };
        Needs { k_group, ..needs }
    }

    /// The product of whole matrices of a form of this plan's largest call, for calls of up to so many rows with
    /// this tile. A test that holds up the kernels of messages has the tile core multiply, which it holds up, too.
    pub(crate) fn whole(&self, form: &Form, (rows, tile): (usize, TileShape)) -> Option<Whole> {
        let Request { m, n, k, dtype, library, .. } = self.request;
        let request = &self.request;
        let output = match form.whole {
            spec::Whole::None => return None,
            spec::Whole::Partial if !self.alone() => request.wire_dtype(),
            _ => request.output_dtype(),
        };
        let held_up = request.injected.is_by_messages();
        if held_up && (!form.is_unfused() || self.alone()) {
            return None;
        }
        let signalled = form.stores.then_some([tile.m as u32, tile.n as u32]);
        let tile = tune::whole_tile(self.ranks, request);
        let library = if held_up { Library::None } else { library };
        let (backend, tile) = (self.ranks.device.backend, (tile.m as u32, tile.n as u32));
        let [gated, exchanges] = [GemmKind::Gated, GemmKind::Exchanging]
            .map(|kind| !held_up && tune::takes_part(self.ranks, request, kind));
        let shape = [m, n, k];
        Some(Whole {
            library,
            backend,
            shape,
            rows,
            dtype,
            output,
            tile,
            signalled,
            gated,
            exchanges,
        })
    }

    /// Columns of A in a unit of a gather.
    fn k_group(&self) -> u32 {
        let columns = self.request.columns_per_flag(self.ranks.device.backend);
        columns.min(self.request.k.max(1)) as u32
    }

    /// The units of a staged gather in the largest call.
    fn units(&self, tile: TileShape) -> Units {
        let request = &self.request;
        Units {
            shard: match request.shard {
                Shard::Rows => schedule::Shard::Rows,
                Shard::Columns => schedule::Shard::Columns,
            },
            size: self.size(),
            m: request.m as u32,
            k: request.k as u32,
            tile_m: tile.m as u32,
            k_group: self.k_group(),
            m_contiguous: request.staged.layout == StagingLayout::MContiguous,
        }
    }

    /// The op.
    pub fn op(&self) -> Op {
        self.request.op()
    }

    /// The ranks it was made for.
    pub fn ranks(&self) -> Ranks {
        self.ranks
    }

    /// What was asked.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// How calls are done, by size.
    pub fn choices(&self) -> &[Choice] {
        &self.choices
    }

    /// How a call of so many rows (of a message of elements: so many elements of a part) is done.
    pub fn at(&self, size: usize) -> &Choice {
        &self.choices[self.index_at(size)]
    }

    pub(crate) fn index_at(&self, size: usize) -> usize {
        let after = self.choices.iter().position(|choice| size <= choice.upto);
        after.unwrap_or(self.choices.len() - 1)
    }

    /// The variant of the largest call.
    pub fn variant(&self) -> Variant {
        self.at(self.largest()).variant
    }

    /// The shape of a tile in the largest call.
    pub fn tile(&self) -> TileShape {
        self.at(self.largest()).tile
    }

    /// The size of the largest call.
    pub(crate) fn largest(&self) -> usize {
        if self.request.elements { self.request.n } else { self.request.m }
    }

    /// The rows that `rank` owns, where the rows of a call of `m` are split over the ranks.
    pub fn rows_of(&self, rank: usize, m: usize) -> Range<usize> {
        split(m, self.ranks.size, rank)
    }

    /// The rank that owns row `row` in a call of `m` rows, where they are split over the ranks.
    pub fn owner(&self, row: usize, m: usize) -> usize {
        let within = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        part_of(within(m), self.size(), within(row)) as usize
    }

    /// Bytes of the data segment that the op takes on every rank, gaps for alignment included.
    pub fn data_bytes(&self) -> u64 {
        if let Some(composed) = &self.composed {
            return composed.data_bytes();
        }
        let blocks = self.extent().data_blocks().into_iter().map(|(_, bytes)| bytes);
        blocks.chain(self.trace_block().map(|block| block.bytes)).fold(0, |sum, bytes| {
            sum.saturating_add(bytes.div_ceil(ALIGNMENT).saturating_mul(ALIGNMENT))
        })
    }

    /// Bytes of the signal segment that the op takes on every rank.
    pub fn signal_bytes(&self) -> u64 {
        if let Some(composed) = &self.composed {
            return composed.sum(Plan::signal_bytes);
        }
        self.extent().signal_bytes().next_multiple_of(ALIGNMENT)
    }

    /// Device-local words that the op takes, gaps for alignment included.
    pub fn device_words(&self) -> u64 {
        if let Some(composed) = &self.composed {
            return composed.sum(Plan::device_words);
        }
        let line = u64::from(LINE_WORDS);
        let words = self.extent().device_words() as u64;
        words.next_multiple_of(line) + (OWN_WORDS as u64).next_multiple_of(line)
    }

    /// A heap on the device that these plans are for, with room for the ops of all of them (a shared
    /// workspace takes less) and for `more` bytes of data besides, the same on all ranks. Opening it compares the
    /// plans of all ranks.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they are for different devices; [`Error::NoPlan`].
    pub fn heap_options(plans: &[&Plan], more: u64) -> Result<HeapOptions> {
        let first = plans.first().ok_or(Error::NoPlan)?;
        let backend = first.ranks.device.backend;
        if let Some(other) = plans.iter().find(|plan| plan.ranks.device.backend != backend) {
            return Err(Error::Invalid {
                op: other.op(),
                what: "backend".into(),
                value: other.ranks.device.backend.to_string(),
                expected: format!("{backend}, that of {}", first.op()),
            });
        }
        let sum = |of: fn(&Plan) -> u64| {
            plans.iter().fold(0, |sum: u64, plan| sum.saturating_add(of(plan)))
        };
        // Before the sizes, which follow from them.
        let items = plans.iter().enumerate().flat_map(|(index, plan)| {
            let named = move |(name, value)| (format!("{name} of plan {index}"), value);
            plan.fingerprint().into_iter().map(named)
        });
        let options = HeapOptions::new().backend(backend).agreed(items);
        let (signal, words) = (options.signal_bytes, options.device_words);
        let reserved = iris_heap::abi::SIGNAL_RESERVED;
        // The word that counts calls has a line of its own.
        let line = u64::from(LINE_WORDS);
        Ok(options
            .data_bytes(sum(Plan::data_bytes).saturating_add(more))
            .signal_bytes(sum(Plan::signal_bytes).saturating_add(reserved).max(signal))
            .device_words(sum(Plan::device_words).saturating_add(line).max(words)))
    }

    /// The largest that any choice needs.
    pub(crate) fn extent(&self) -> Extent {
        let none = Extent::new(self.size());
        self.choices.iter().fold(none, |extent, choice| extent.with(&choice.needs))
    }

    /// The block that holds the trace.
    pub(crate) fn trace_block(&self) -> Option<Block> {
        let spans = self.request.trace_spans;
        let bytes = iris_kernels::trace::buffer_bytes(spans) as u64;
        (spans > 0).then(|| Block::new(Segment::Data, bytes, "trace"))
    }

    /// The largest product or message of a form as a grid of tiles.
    pub(crate) fn grid(&self, form: &Form, tile: TileShape) -> Grid {
        self.grid_of(form, tile, (self.request.m, self.request.n))
    }

    /// The same of a call. Of an A that is gathered ahead of a product it is A; its transpose, where its
    /// columns are split, so that what is split are always rows.
    fn grid_of(&self, form: &Form, tile: TileShape, (m, n): (usize, usize)) -> Grid {
        let Request { k, shard, .. } = self.request;
        let gathered = form.whole == spec::Whole::Gathered && !self.alone();
        let (rows, cols, tile) = match shard {
            _ if !gathered => (m, n, tile),
            Shard::Rows => (m, k, tile),
            Shard::Columns => (k, m, TileShape { m: tile.n, n: tile.m }),
        };
        let [rows, cols, tile_m, tile_n] = [rows, cols, tile.m, tile.n].map(|it| it as u32);
        Grid { rows, cols, tile_m, tile_n }
    }

    /// The same with rows split over the ranks.
    pub(crate) fn split_grid(&self, grid: Grid) -> SplitGrid {
        SplitGrid { grid, size: self.size() }
    }

    pub(crate) fn size(&self) -> u32 {
        self.ranks.size as u32
    }

    pub(crate) fn row(&self) -> &'static Row {
        self.request.row
    }

    /// The ranks of a barrier.
    pub(crate) fn members(&self) -> Members {
        match &self.request.members {
            None => Members::all(self.size()),
            Some(ranks) => Members::from_bits(ranks.iter().fold(0, |bits, rank| bits | 1 << rank)),
        }
    }

    /// Whether there is nobody to talk to.
    pub(crate) fn alone(&self) -> bool {
        self.ranks.size == 1
    }

    /// Whether it runs on the host's cores.
    pub(crate) fn on_cpu(&self) -> bool {
        self.ranks.device.backend.traits().host_threads
    }
}

impl fmt::Display for Plan {
    /// One line: what was asked, the device, whose figures stand in for the device's own, how calls are done, and the
    /// memory that this takes: `all_reduce of f32, rank 0 of 4 on cpu: two_shot up to 512 by tiles of 4 x 4096 (predicted);
    /// 8192 bytes of data, 20480 of signals`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ranks { rank, size, device, .. } = self.ranks;
        let Request { m, n, k, dtype, elements, .. } = self.request;
        write!(f, "{}", self.op())?;
        match (self.op(), elements) {
            (Op::Barrier, _) => {}
            (op, _) if op.multiplies() => write!(f, " of {m} x {n} x {k} {dtype}")?,
            (_, true) => write!(f, " of {n} {dtype}")?,
            (_, false) => write!(f, " of {m} x {n} {dtype}")?,
        }
        write!(f, ", rank {rank} of {size} on {device}")?;
        if self.ranks.nodes() > 1 {
            write!(f, " of {} nodes, in each", self.ranks.nodes())?;
        }
        if let Some(gpu) = self.figures() {
            write!(f, ", figures of an {gpu}")?;
        }
        f.write_str(": ")?;
        for (index, Choice { upto, variant, tile, why, .. }) in self.choices.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            match self.op() {
                Op::Barrier => write!(f, "{comma}{variant}")?,
                _ if self.choices.len() == 1 => write!(f, "{variant} by tiles of {tile}")?,
                _ => write!(f, "{comma}{variant} up to {upto} by tiles of {tile}")?,
            }
            match why {
                Why::Asked => {}
                Why::Tuned => f.write_str(" (measured here)")?,
                Why::Measured => f.write_str(" (measured)")?,
                Why::Predicted => f.write_str(" (predicted)")?,
            }
        }
        write!(f, "; {} bytes of data, {} of signals", self.data_bytes(), self.signal_bytes())
    }
}
