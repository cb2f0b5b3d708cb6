//! Plans over several nodes: operators within each node, and steps between nodes. A step is a
//! collective over the ranks that have the same number within their nodes.
//!
//! Ranks are numbered node by node, with the same number of ranks on each node, so splits nest: the
//! rows of a node's ranks are contiguous, and a split of these rows over the node's ranks gives the
//! same parts as the split over all ranks. So a call is first split by node, an operator of the
//! node does the rest, and each rank owns the same rows as if all ranks were on one node. Sums
//! between nodes travel in the wire type.
//!
//! This file is long because it lists the parts of every operator, each with the memory that the
//! part needs.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Once};

use iris_heap::{ALIGNMENT, DType, RawSlice, Request as Block, Segment, SymmetricHeap};
use iris_kernels::Library;

use super::Plan;
use crate::error::{Error, InOp, Result};
use crate::nodes::exchange::{Kind, Sent, shift_steps};
use crate::op_names::{Op, Variant};
use crate::op_row::{Common, Composition, Dims, Form, Memory, Norm, Part, Row, Tiles};
use crate::options::{Epilogue, MOST_ELEMENTS, Request, Shard, TileShape};
use crate::programs::LOCAL;
use crate::split::split;
use crate::topology::Topology;

/// Role of an operator within this node, as a part of an operator over several nodes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Role {
    /// Operator that does the main work: the fused operator or the collective itself.
    Main,
    /// All-gather of the rows within the node.
    Gather,
    /// Copying of the data that this rank sends to other nodes into the send buffer.
    Copy,
    /// Final step that turns this rank's sums into results: bias, epilogue, RMSNorm, rounding.
    Finish,
    /// Copy of the results out of the padded output message.
    CopyOut,
    /// GEMM on each rank of the node, after the whole of A has been gathered.
    Product,
}

/// Memory area of an operator over several nodes, in the data segment of each rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Area {
    /// Input of the steps between nodes.
    Send,
    /// Output of the steps between nodes.
    Receive,
    /// Results of this rank's rows.
    Result,
    /// Normalised rows of this rank.
    Normed,
    /// Input message, padded to equal parts for all ranks.
    Padded,
    PaddedOut,
    /// Whole matrix A, transposed.
    Whole,
    /// Records (descriptions of a step that ranks compare) for steps between GPUs of different
    /// nodes: this rank's record, and the records of all nodes.
    Records,
}

impl Area {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Area::Send => "sent between nodes",
            Area::Receive => "received between nodes",
            Area::Result => "results before they are gathered",
            Area::Normed => "normalised rows before they are gathered",
            Area::Padded => "padded message",
            Area::PaddedOut => "padded result",
            Area::Whole => "gathered A",
            Area::Records => "records of steps between nodes",
        }
    }
}

/// Parts of an operator over several nodes: the operators of this node, and memory for the steps
/// between nodes.
#[derive(Debug)]
pub(crate) struct Composed {
    pub(crate) parts: BTreeMap<Role, Plan>,
    /// Size of each area in bytes.
    pub(crate) areas: BTreeMap<Area, u64>,
    /// Number of blocks into which the rows of a call are split, with one step between nodes for
    /// each. An all-reduce splits its rows evenly. If A is split by columns, a block has as many
    /// rows as in the largest call. In other operators a block has the rows that some of the nodes
    /// own.
    pub(crate) blocks: usize,
}

/// Operator that copies data within this rank. It also applies the epilogue to finished elements.
static COPY: Row = Row {
    op: Op::AllReduce,
    message: Op::AllReduce,
    common: Common { n: false, k: false },
    a: Part::All,
    c: Part::All,
    dims: Dims::message,
    tiles: Tiles::All,
    in_place: true,
    composed: Composition::Alone,
    alone: LOCAL,
    forms: &[Form::push(Variant::Local, LOCAL, Memory::None).norms(Norm::Last)],
};

/// Maximum number of blocks into which the rows of a call are split.
const MOST_BLOCKS: usize = 16;

/// Number of blocks, at most `most`, with the shortest predicted time. `step(b)` is the time of one
/// of `b` steps between nodes, and `work(b)` the time of the node's work on one of `b` blocks. If
/// the work has no prediction, the work on all blocks is assumed to take as long as a single step
/// for all rows. Steps and work overlap, except for one step and the work on one block.
fn blocks_of(
    most: usize,
    step: impl Fn(usize) -> f64,
    work: impl Fn(usize) -> Option<f64>,
) -> usize {
    let time = |blocks: usize| {
        let (step, alike) = (step(blocks), step(1) / blocks as f64);
        let work = work(blocks).unwrap_or(alike);
        step + work + (blocks - 1) as f64 * step.max(work)
    };
    let all = 1..=most.clamp(1, MOST_BLOCKS);
    all.min_by(|&one, &other| time(one).total_cmp(&time(other))).unwrap_or(1)
}

/// Maximum number of thread blocks of a step between nodes on a GPU. It is passed to an engine such
/// as NCCL as a limit (`maxCTAs`). A thread block occupies at most one multiprocessor.
pub(crate) const STEP_BLOCKS: u32 = 8;

/// Size in bytes of the record of a step in device memory.
pub(crate) const RECORD_BYTES: u64 = 64;

/// Maximum number of bytes of a step between nodes, because one message on the connections between
/// ranks has at most 1 GiB.
const MOST_BYTES: u64 = (1 << 30) - (1 << 20);

/// Alignment in bytes of the slots that are sent in steps between nodes.
const SLOT: u64 = 256;

/// Size in bytes of a slot that holds a matrix of `rows` x `cols`, rounded up to [`SLOT`].
pub(crate) fn slot_bytes(rows: usize, cols: usize, dtype: DType) -> u64 {
    let bytes = (rows as u64).saturating_mul(cols as u64).saturating_mul(dtype.size() as u64);
    bytes.max(1).next_multiple_of(SLOT)
}

impl Composed {
    /// Sum over the plans of all parts; `of` returns the value of one plan, such as its number of
    /// data bytes.
    pub(super) fn sum(&self, of: impl Fn(&Plan) -> u64) -> u64 {
        self.parts.values().fold(0, |sum: u64, part| sum.saturating_add(of(part)))
    }

    /// Number of rows of each block in a call of `most` rows; the last block may have fewer.
    pub(crate) fn rows_of_block(&self, most: usize) -> usize {
        most.div_ceil(self.blocks).max(1)
    }

    /// Rows of each block of a call of `m` rows. Each block except the last one has as many rows as
    /// a block in a call of `most` rows. A call without rows has one block.
    pub(crate) fn row_blocks(&self, most: usize, m: usize) -> impl Iterator<Item = Range<usize>> {
        let rows = self.rows_of_block(most);
        (0..m.max(1)).step_by(rows).map(move |start| start..(start + rows).min(m))
    }

    pub(super) fn data_bytes(&self) -> u64 {
        self.sum(Plan::data_bytes).saturating_add(area_bytes(&self.areas))
    }
}

/// Size in bytes of each area that at least one of these plans has. The size is the maximum over
/// the plans.
pub(crate) fn largest_areas(plans: &[&Plan]) -> BTreeMap<Area, u64> {
    let mut largest = BTreeMap::new();
    let areas = plans.iter().filter_map(|plan| plan.composed()).flat_map(|it| &it.areas);
    for (&area, &bytes) in areas {
        let size: &mut u64 = largest.entry(area).or_default();
        *size = bytes.max(*size);
    }
    largest
}

/// Number of bytes of the data segment that these areas occupy, padding included.
pub(crate) fn area_bytes(areas: &BTreeMap<Area, u64>) -> u64 {
    let padded = areas.values().map(|bytes| bytes.next_multiple_of(ALIGNMENT));
    padded.fold(0, u64::saturating_add)
}

/// Allocates areas with these sizes in bytes. Collective over the ranks of this node.
#[track_caller]
pub(crate) fn alloc_areas(
    heap: &SymmetricHeap,
    op: Op,
    areas: &BTreeMap<Area, u64>,
) -> Result<BTreeMap<Area, RawSlice>> {
    if areas.is_empty() {
        return Ok(BTreeMap::new());
    }
    let block = |(area, &bytes): (&Area, &u64)| Block::new(Segment::Data, bytes, area.name());
    let blocks: Vec<_> = areas.iter().map(block).collect();
    let slices = heap.alloc_many(op.name(), &blocks).in_op(op)?;
    Ok(areas.keys().copied().zip(slices).collect())
}

/// Builder of the parts of an operator over several nodes.
struct Maker<'a> {
    ranks: Topology,
    request: &'a Request,
    composed: Composed,
}

impl Maker<'_> {
    /// Adds an operator of this node with the types of the request; `change` sets the other options
    /// of the operator.
    fn part(
        &mut self,
        role: Role,
        row: &'static Row,
        (m, n, k): (usize, usize, usize),
        change: impl FnOnce(&mut Request),
    ) -> Result<()> {
        let mut request = Request {
            row,
            m,
            n,
            k,
            variant: None,
            tile: None,
            output: None,
            wire: None,
            epilogue: Epilogue::None,
            rms_norm: None,
            shard: Shard::Rows,
            root: 0,
            members: None,
            reserve_sms: 0,
            step_blocks: if self.on_host() { 0 } else { STEP_BLOCKS },
            trace_spans: 0,
            ..self.request.clone()
        };
        change(&mut request);
        let plan = Plan::new(self.ranks.local(), &request)?;
        self.check_room(&plan)?;
        self.composed.parts.insert(role, plan);
        Ok(())
    }

    /// Adds the main operator of the node, which gets the variant and tile that the caller chose.
    fn main(
        &mut self,
        row: &'static Row,
        shape: (usize, usize, usize),
        change: impl FnOnce(&mut Request),
    ) -> Result<()> {
        let Request { variant, tile, .. } = *self.request;
        if let Some(asked) = variant
            && row.form(asked).is_none()
        {
            // The node's operator may have variants that the caller's operator lacks, so the error
            // lists only the variants that both have.
            let outer = self.request.row;
            let known = row.names(|form| outer.form(form.variant).is_some());
            return Err(self.refused("variant", &asked, &format!("auto, {known}")));
        }
        self.part(Role::Main, row, shape, |request| {
            (request.variant, request.tile) = (variant, tile);
            change(request);
        })
    }

    fn copy(&mut self, (m, n): (usize, usize), from: DType, to: DType) -> Result<()> {
        self.part(Role::Copy, &COPY, (m, n, 0), |r| (r.dtype, r.output) = (from, Some(to)))
    }

    fn finish(&mut self, (m, n): (usize, usize)) -> Result<()> {
        let Request { epilogue, rms_norm, .. } = *self.request;
        let (wire, output) = (self.request.wire_dtype(), self.request.output_dtype());
        self.part(Role::Finish, &COPY, (m, n, 0), |r| {
            (r.dtype, r.output) = (wire, Some(output));
            (r.epilogue, r.rms_norm) = (epilogue, rms_norm);
        })
    }

    fn area(&mut self, area: Area, bytes: u64) {
        self.composed.areas.insert(area, bytes);
    }

    /// Sets the number of blocks into which a call is split. A node exchanges the rows of one block
    /// with other nodes while it works on the rows of another block. The input of each step has
    /// `bytes` bytes, and the node's main operator works on `rows` rows for each node. Over the
    /// sockets of the host each step would send its input to all nodes, so there is one block,
    /// unless the caller asks for more.
    fn shift_blocks(&mut self, sent: Sent, bytes: u64, rows: usize) {
        let nodes = self.ranks.nodes();
        let others = (nodes - 1).max(1);
        // The first step exchanges with the most nodes, so it takes longest.
        let step = |blocks: usize| {
            let first = shift_steps(blocks, nodes, sent).next();
            first.map_or(0.0, |(exchange, _)| self.step_us(exchange.kind(), bytes as f64))
        };
        let of_node = self.work_us(rows);
        let work = |blocks: usize| Some(of_node? * others.div_ceil(blocks) as f64);
        let chosen = if self.on_host() { 1 } else { blocks_of(others, step, work) };
        self.composed.blocks = self.request.blocks.unwrap_or(chosen).clamp(1, others);
    }

    /// Predicted time in microseconds of the node's main operator for `rows` rows.
    fn work_us(&self, rows: usize) -> Option<f64> {
        self.composed.parts.get(&Role::Main)?.predicted_us(rows)
    }

    /// Predicted time in microseconds of a step between nodes whose input has `bytes` bytes.
    fn step_us(&self, kind: Kind, bytes: f64) -> f64 {
        let nodes = self.ranks.nodes();
        let collective = kind.collective(bytes, nodes);
        self.ranks.network().collective(collective, (nodes, 1), f64::INFINITY)
    }

    fn make(&mut self) -> Result<()> {
        let request = self.request;
        let Request { m, n, k, dtype, elements, .. } = *request;
        let (output, wire) = (request.output_dtype(), request.wire_dtype());
        let (nodes, local, size) = (self.ranks.nodes(), self.ranks.local().size, self.ranks.size);
        let all_gather = crate::ops::row(Op::AllGather);
        // Largest number of rows (or parts of a message of elements) that a rank owns, and that a
        // node owns.
        let own = if elements { 1 } else { m.div_ceil(size) };
        let of_node = if elements { local } else { local * own };
        let slots = |rows, cols, dtype| nodes as u64 * slot_bytes(rows, cols, dtype);
        // Sums over the ranks of a node go to other nodes in the wire type.
        let to_wire = |r: &mut Request| (r.output, r.wire) = (Some(wire), Some(wire));
        match request.row.composed {
            Composition::Alone => unreachable!("planned for a rank by itself"),
            Composition::AllReduce { scatter } => {
                let scatter = crate::ops::row(scatter);
                let bytes = slot_bytes(m.div_ceil(local), n, wire) as f64;
                let blocks = match request.blocks {
                    _ if elements => 1,
                    Some(blocks) => blocks.clamp(1, m.max(1)),
                    None => {
                        self.main(scatter, (m, n, k), to_wire)?;
                        let step = |blocks| self.step_us(Kind::AllReduce, bytes / blocks as f64);
                        let work = |blocks| self.work_us(m.div_ceil(blocks));
                        blocks_of(MOST_BLOCKS.min(m.max(1)), step, work)
                    }
                };
                self.composed.blocks = blocks;
                // If the plan counts elements, the message is padded, so that it can be split into
                // parts of equal length.
                let (rows, n) =
                    if elements { (local, n.div_ceil(local)) } else { (m.div_ceil(blocks), n) };
                let own = rows.div_ceil(local);
                self.main(scatter, (rows, n, k), to_wire)?;
                self.finish((own, n))?;
                self.part(Role::Gather, all_gather, (rows, n, 0), |r| r.dtype = output)?;
                let blocks = blocks as u64;
                self.area(Area::Send, blocks * slot_bytes(own, n, wire));
                self.area(Area::Result, blocks * slot_bytes(own, n, output));
                if request.rms_norm.is_some() {
                    self.area(Area::Normed, blocks * slot_bytes(own, n, output));
                }
                if elements {
                    self.copy((1, local * n), dtype, dtype)?;
                    self.part(Role::CopyOut, &COPY, (1, local * n, 0), |r| r.dtype = output)?;
                    self.area(Area::Padded, slot_bytes(local, n, dtype));
                    self.area(Area::PaddedOut, slot_bytes(local, n, output));
                }
                Ok(())
            }
            Composition::ReduceScatter => {
                self.main(request.row, (of_node, n, k), to_wire)?;
                self.shift_blocks(Sent::Slot, slots(own, n, wire), of_node);
                self.finish((own, n))?;
                self.area(Area::Send, slots(own, n, wire));
                self.area(Area::Receive, slots(own, n, wire));
                Ok(())
            }
            Composition::GatherC => {
                let epilogue = request.epilogue;
                self.main(request.row, (of_node, n, k), |r| {
                    (r.output, r.epilogue) = (Some(output), epilogue);
                })?;
                self.shift_blocks(Sent::Block, slot_bytes(own, n, output), of_node);
                self.part(Role::Gather, all_gather, (of_node, n, 0), |r| r.dtype = output)?;
                self.copy((own, n), output, output)?;
                self.area(Area::Send, slot_bytes(own, n, output));
                self.area(Area::Receive, slots(own, n, output));
                Ok(())
            }
            Composition::GatherA if request.shard == Shard::Rows => {
                let cols = (request.row.dims)(n, k).a;
                self.main(request.row, (of_node, n, k), |r| {
                    (r.output, r.epilogue) = (request.output, request.epilogue);
                })?;
                self.shift_blocks(Sent::Block, slot_bytes(own, cols, dtype), of_node);
                self.copy((own, cols), dtype, dtype)?;
                self.area(Area::Send, slot_bytes(own, cols, dtype));
                self.area(Area::Receive, slots(own, cols, dtype));
                Ok(())
            }
            Composition::GatherA => {
                if let Some(variant) = request.variant {
                    return Err(self.refused("variant of columns", &variant, "auto"));
                }
                // Columns of A are sent as rows of A's transpose.
                let own = k.div_ceil(size);
                let columns = split(k, size, self.ranks.rank).len();
                let Request { epilogue, tile, .. } = *request;
                // Ranks have different numbers of columns of C, but must use tiles of the same
                // shape.
                let tile = tile.unwrap_or(TileShape { m: 64, n: 64 });
                let product = |maker: &mut Self, rows: usize| {
                    maker.part(Role::Product, crate::ops::row(Op::Matmul), (rows, n, k), |r| {
                        (r.output, r.epilogue, r.tile) = (Some(output), epilogue, Some(tile));
                        // A is column-major here, for which the tile GEMM multiplies, but for the
                        // vendor's library.
                        if r.batch_invariant && r.library != Library::Vendor {
                            r.library = Library::None;
                        }
                    })
                };
                let gather = |maker: &mut Self, rows: usize| {
                    maker.part(Role::Main, all_gather, (local * own, rows, 0), |_| ())
                };
                product(self, m)?;
                gather(self, m)?;
                let parts = &self.composed.parts;
                let work = |blocks: usize| {
                    let product = parts[&Role::Product].predicted_us(m.div_ceil(blocks))?;
                    // A block has fewer rows of A, which are columns of A's transpose. Predictions
                    // take a number of rows, so the time is predicted for a gather of fewer rows of
                    // the transpose, which moves as many bytes.
                    let gather = parts[&Role::Main].predicted_us((local * own).div_ceil(blocks))?;
                    Some(product + nodes as f64 * gather)
                };
                let bytes = slot_bytes(own, m, dtype) as f64;
                let step = |blocks| self.step_us(Kind::AllGather, bytes / blocks as f64);
                let chosen = request
                    .blocks
                    .unwrap_or_else(|| blocks_of(MOST_BLOCKS.min(m.max(1)), step, work));
                self.composed.blocks = chosen.clamp(1, m.max(1));
                let rows = self.composed.rows_of_block(m);
                // `rows` is rounded up, so fewer blocks may be enough for all rows.
                self.composed.blocks = m.div_ceil(rows).max(1);
                let blocks = self.composed.blocks as u64;
                if rows != m {
                    product(self, rows)?;
                    gather(self, rows)?;
                }
                // The tile must have the same shape on all ranks. So it depends on `own`, the largest
                // number of columns that a rank has, and not on this rank's number of columns of A.
                let tile = TileShape { m: rows.clamp(1, 64), n: own.clamp(1, 256) };
                self.part(Role::Copy, &COPY, (rows, columns, 0), |r| {
                    (r.tile, r.uniform_shape) = (Some(tile), false);
                })?;
                self.area(Area::Send, blocks * slot_bytes(own, rows, dtype));
                self.area(Area::Receive, blocks * slots(own, rows, dtype));
                self.area(Area::Whole, slot_bytes(k, rows, dtype));
                Ok(())
            }
            Composition::AllToAll => {
                self.main(request.row, (of_node, n, 0), |_| ())?;
                let rows = if elements { 1 } else { of_node };
                self.copy((rows, n), dtype, dtype)?;
                self.area(Area::Send, slots(of_node, n, dtype));
                self.area(Area::Receive, slots(of_node, n, dtype));
                Ok(())
            }
            Composition::Broadcast => {
                let root = request.root % local;
                self.main(request.row, (m, n, 0), |r| r.root = root)?;
                self.copy((m, n), dtype, dtype)?;
                self.area(Area::Receive, slot_bytes(m, n, dtype));
                Ok(())
            }
            Composition::Barrier => {
                self.area(Area::Send, SLOT);
                self.main(request.row, (0, 0, 0), |_| ())
            }
        }
    }

    fn refused(&self, what: &str, value: &dyn ToString, expected: &str) -> Error {
        let what = format!("{what} over several nodes");
        Error::invalid(self.request.op(), what, value.to_string(), expected)
    }

    /// Refuses operators with a step between nodes of more than [`MOST_BYTES`] bytes, which the
    /// connections between CPUs cannot transfer.
    fn check_step(&self) -> Result<()> {
        if !self.on_host() {
            return Ok(());
        }
        let Composed { areas, blocks, .. } = &self.composed;
        let sent = areas.get(&Area::Send).or_else(|| areas.get(&Area::Receive)).unwrap_or(&0);
        // If the call is split by rows, the send area has a part for each block, and a step sends
        // one part.
        let by_rows = match self.request.row.composed {
            Composition::AllReduce { .. } => true,
            Composition::GatherA => self.request.shard == Shard::Columns,
            _ => false,
        };
        let parts = if by_rows { *blocks as u64 } else { 1 };
        let of_all = (sent / parts).saturating_mul(self.ranks.nodes() as u64);
        match of_all <= MOST_BYTES {
            true => Ok(()),
            false => {
                let expected = format!("at most {MOST_BYTES}: fewer rows in a call");
                Err(self.refused("bytes of a step", &of_all, &expected))
            }
        }
    }

    /// Whether steps between nodes run on threads of the host. If so, they need no multiprocessors
    /// of a device.
    fn on_host(&self) -> bool {
        self.ranks.device.backend.traits().host_threads
    }

    /// Refuses an operator within the node whose launches wait for peers and leave no room on the
    /// device for a step between nodes. A step may be in flight whenever the operator runs.
    fn check_room(&self, part: &Plan) -> Result<()> {
        let size = part.topology().size as u32;
        let broken = part.choices.iter().find_map(|it| part.program(it).check(size, 1).err());
        broken.map_or(Ok(()), |broken| {
            let expected = format!(
                "{STEP_BLOCKS} free multiprocessors for a step between nodes: at most {} workgroups",
                self.ranks.device.multiprocessors.saturating_sub(STEP_BLOCKS)
            );
            Err(self.refused("launch", &broken, &expected))
        })
    }

    /// Refuses options that operators over several nodes do not support; the error names the
    /// option.
    fn check(&self) -> Result<()> {
        let Request { reserve_sms, trace_spans, ref members, n, elements, .. } = *self.request;
        // If the plan counts elements, messages are padded to a multiple of the number of ranks of
        // a node.
        let local = self.ranks.size / self.ranks.nodes();
        let most = MOST_ELEMENTS / local.max(1) * local;
        if elements && n > most {
            return Err(self.refused("count", &n, &format!("at most {most}")));
        }
        if !self.ranks.size.is_multiple_of(self.ranks.nodes()) {
            let expected = format!("a multiple of {} nodes", self.ranks.nodes());
            return Err(self.refused("number of ranks", &self.ranks.size, &expected));
        }
        if reserve_sms > 0 {
            return Err(self.refused("reserve_sms", &reserve_sms, "0"));
        }
        let sums = matches!(
            self.request.row.composed,
            Composition::AllReduce { .. } | Composition::ReduceScatter
        );
        if self.request.batch_invariant && sums {
            let expected = "false: the order of sums between nodes depends on the number of rows";
            return Err(self.refused("batch_invariant", &true, expected));
        }
        if trace_spans > 0 {
            return Err(self.refused("trace_spans", &trace_spans, "0"));
        }
        if let Some(members) = members {
            return Err(self.refused("members", &format!("{members:?}"), "all ranks"));
        }
        Ok(())
    }
}

impl Plan {
    /// Makes the plan of an operator over several nodes from a request that was checked.
    pub(super) fn composed_of(ranks: Topology, request: Request) -> Result<Self> {
        if request.row.is_local() {
            return Self::new(ranks.local(), &request);
        }
        let (parts, areas) = Default::default();
        let composed = Composed { parts, areas, blocks: 1 };
        let mut maker = Maker { ranks, request: &request, composed };
        maker.check()?;
        maker.make()?;
        if !maker.on_host() {
            let bytes = RECORD_BYTES * (1 + maker.ranks.nodes() as u64);
            maker.area(Area::Records, bytes);
        }
        maker.check_step()?;
        let composed = maker.composed;
        let choices = composed.parts[&Role::Main].choices.clone();
        let (logged, composed) = (Arc::new(Once::new()), Some(Arc::new(composed)));
        Ok(Self { ranks, request, choices, logged, composed })
    }

    /// Parts of an operator over several nodes; `None` if all ranks are on one node.
    pub(crate) fn composed(&self) -> Option<&Arc<Composed>> {
        self.composed.as_ref()
    }

    /// Plans of this node's operators; if there is only one node, the plan itself.
    pub(crate) fn parts(&self) -> Vec<&Plan> {
        self.composed.as_ref().map_or_else(|| vec![self], |it| it.parts.values().collect())
    }

    /// Properties of all parts of the plan on which all ranks must agree.
    pub(crate) fn fingerprint_of_all(&self) -> Vec<(&'static str, String)> {
        let mut items = self.fingerprint();
        if let Some(composed) = &self.composed {
            items.push(("blocks", composed.blocks.to_string()));
            for part in composed.parts.values().filter(|part| !part.row().is_local()) {
                items.extend(part.fingerprint());
            }
        }
        items
    }

    /// Range of rows that the ranks of a node own together when `m` rows are split over all ranks.
    pub(crate) fn rows_of_node(&self, node: usize, m: usize) -> Range<usize> {
        let local = self.ranks.local().size;
        let of = |local_rank: usize| self.rows_of(node * local + local_rank, m);
        of(0).start..of(local - 1).end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_nest() {
        for (nodes, local) in [(2, 1), (2, 2), (3, 4), (2, 3)] {
            let size = nodes * local;
            for total in 0..3 * size + 2 {
                for node in 0..nodes {
                    let all = |rank: usize| split(total, size, node * local + rank);
                    let (start, end) = (all(0).start, all(local - 1).end);
                    for rank in 0..local {
                        let Range { start: first, end: last } = split(end - start, local, rank);
                        assert_eq!(start + first..start + last, all(rank));
                    }
                }
            }
        }
    }

    #[test]
    fn more_bytes_are_cut_into_more_blocks() {
        // A step takes 20 us, and 20 us more for each 250 kB that it sends.
        let step = |bytes: f64| move |blocks: usize| 20.0 + bytes / blocks as f64 / 12.5e3;
        let unknown = |_| None;
        assert_eq!(blocks_of(MOST_BLOCKS, step(0.0), unknown), 1);
        assert_eq!(blocks_of(MOST_BLOCKS, step(4e6), unknown), 4);
        assert_eq!(blocks_of(3, step(4e6), unknown), 3);
        assert_eq!(blocks_of(100, step(1e12), unknown), MOST_BLOCKS);
        // With hardly any work to overlap with the steps, one block must be fastest.
        assert_eq!(blocks_of(MOST_BLOCKS, step(4e6), |blocks| Some(10.0 / blocks as f64)), 1);
    }

    /// Tests that plans cut calls into fewer blocks for a faster network.
    #[test]
    fn blocks_are_sized_for_the_network() {
        let device = crate::Device::named("h200").unwrap();
        let blocks = |op: Op, gbit: u32| {
            let ranks = Topology::new(0, 32).on_nodes(4).network_gbit(gbit).on_device(device);
            let plan = Plan::new(ranks, &op.request(8192, 8192, 1024)).unwrap();
            plan.composed().unwrap().blocks
        };
        assert!(blocks(Op::MatmulAllReduce, 400) > blocks(Op::MatmulAllReduce, 100_000));
        // The rows of each of the three other nodes are exchanged in a separate step.
        assert_eq!(blocks(Op::AllGatherMatmul, 400), 3);
    }

    #[test]
    fn what_no_part_does_is_refused_by_name() {
        let ranks = Topology::new(1, 4).on_nodes(2);
        let options = crate::matmul_all_reduce::Options::new(8, 8, 8);
        let fails = |plan: Result<Plan>, words: [&str; 2]| {
            let text = plan.unwrap_err().to_string();
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        };
        let two_shot = crate::matmul_all_reduce::Variant::TwoShot;
        fails(options.clone().variant(two_shot).plan(ranks), ["variant over several", "two_shot"]);
        let large = crate::all_gather::Options::rows(1 << 20, 1 << 10);
        fails(large.plan(ranks), ["bytes of a step over", "fewer rows"]);
        fails(options.clone().trace_spans(8).plan(ranks), ["trace_spans over", "8"]);
        fails(options.plan(Topology::new(1, 5).on_nodes(2)), ["number of ranks", "multiple of 2"]);
        let barrier = crate::barrier::Options::new().members(vec![0]);
        fails(barrier.plan(ranks), ["members over", "all ranks"]);
        let gpus = ranks.on_device(crate::Device::named("h200").unwrap());
        let all = gpus.device.multiprocessors as usize;
        options.clone().workgroups(all - 8).plan(gpus).unwrap();
        let filled = options.clone().workgroups(all - 7).plan(gpus);
        fails(filled, ["leaves 7 multiprocessors free", "at most 124 workgroups"]);
        options.clone().workgroups(all).plan(gpus.on_nodes(1)).unwrap();
        let plan = crate::matmul::Options::new(8, 8, 8).plan(ranks).unwrap();
        assert_eq!((plan.topology().rank, plan.topology().size), (1, 2));
    }
}
