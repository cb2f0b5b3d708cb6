//! Predicted time of a program: its steps run one after the other, and copies by copy engines run
//! at the same time.
//!
//! The model assumes that all ranks run in lockstep: data from a peer arrives when this rank has
//! itself sent the same amount of data.

use std::collections::BTreeMap;

use iris_heap::DType;
use iris_kernels::Kernel;
use iris_kernels::gemm::{Parts, StoringLaunch};
use iris_kernels::program::{
    Alternative, At, Core, Gemm, KernelOperands, Norm, Program, Rows, Source, Step, Target,
    Transfer, When, Work,
};

use super::CostParameters;
use super::steps::Message;
use crate::op_row::Row;

/// Properties of a call on which its time depends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// Row of the operator table that describes the operator.
    pub(crate) row: &'static Row,
    pub(crate) world: usize,
    /// Number of multiprocessors of the device; 0 for a host.
    pub(crate) multiprocessors: u32,
    pub(crate) shape: [usize; 3],
    /// Element types: `dtype` is the type of A, `wire` the type of partial results that are sent
    /// between ranks, and `output` the type of C.
    pub(crate) dtype: DType,
    pub(crate) wire: DType,
    pub(crate) output: DType,
    /// Whether ranks pass columns of A; otherwise they pass rows.
    pub(crate) columns: bool,
    /// Whether the built-in GEMMs that wait for peers and store to peers support these operands on
    /// the device.
    pub(crate) has_stores: bool,
    /// Whether programs may use a GEMM that waits for parts of A which copy engines deliver.
    pub(crate) gated: bool,
    /// Smallest number of 8-byte items per peer with which a message by the LL protocol consists of
    /// packs (units of 48 bytes); `None` for never.
    pub(crate) packs_from: Option<u32>,
    /// Whether the device has engines that copy to peers without using multiprocessors.
    pub(crate) has_engines: bool,
}

/// Two timelines of a call, in microseconds from its start: the steps of the main stream, and the
/// copies that run at the same time, with the arrival times of copied parts.
struct Clock<'a> {
    machine: &'a CostParameters,
    problem: &'a Problem,
    norm: Norm,
    tile: [usize; 2],
    parts: usize,
    main_us: f64,
    side_us: f64,
    /// Arrival times in microseconds, by transfer and part number.
    arrived_us: BTreeMap<(Transfer, u32), f64>,
    /// Whether the last step of the main stream was a GEMM.
    behind_gemm: bool,
}

/// Smallest number of columns of C for which it takes longer to multiply a row of A than to receive
/// the row from one peer.
const WIDE: usize = 2048;

impl Problem {
    fn own_rows(&self) -> usize {
        self.shape[0].div_ceil(self.world)
    }

    /// Number of parts in which a rank's data is sent, if a tile has `rows` rows and `cols`
    /// columns.
    fn parts(&self, [rows, cols]: [usize; 2]) -> usize {
        let own = |all: usize| all.div_ceil(self.world).max(1);
        let [m, _, k] = self.shape;
        match self.columns {
            true => own(k).div_ceil(cols) * m.max(1).div_ceil(rows),
            false if self.row.gathers_a() => own(m).div_ceil(rows) * k.max(1).div_ceil(cols),
            false => own(m).div_ceil(rows),
        }
    }

    /// Predicts whether the calls of this problem meet the condition `when`, which the executor
    /// tests at run time.
    fn meets(&self, when: When, tile: [usize; 2]) -> bool {
        match when {
            // The model predicts a GEMM that also exchanges as two launches, so a prediction never
            // uses this alternative.
            When::Exchanges => false,
            When::Stores => {
                self.has_stores && self.has_engines && self.stored(tile, self.world).is_some()
            }
            When::Engines => self.has_engines,
            When::Gated => {
                self.has_stores && self.has_engines && self.gated && self.suits_gated(tile)
            }
            When::ByColumns => self.columns,
            When::Wide => self.shape[1] >= WIDE * (self.world - 1),
            When::Adds => self.world == 2 && self.parts(tile) > 1,
        }
    }

    /// Whether a GEMM can wait for parts of `part` rows and columns of A. Tests only builds of the
    /// GEMM for this problem's shape; a plan for more rows may have other builds.
    fn suits_gated(&self, part: [usize; 2]) -> bool {
        let [m, _, k] = self.shape.map(|it| it as u32);
        let (columns, part) = (self.columns, part.map(|it| it as u32));
        let shard = Parts::shard([m, k], self.world as u32, columns);
        shard.is_some_and(|shard| {
            let parts = Parts { shard, part, first: 0, step: [0, 0], columns };
            parts.suit_any(self.shape, self.multiprocessors)
        })
    }

    /// Launch of a GEMM that stores to peers, with one signal for each block of `signalled` (rows,
    /// columns) of C; `None` if there is no such GEMM.
    fn stored(&self, signalled: [usize; 2], owners: usize) -> Option<StoringLaunch> {
        let ranks = (self.world, owners);
        StoringLaunch::of(signalled.map(|it| it as u32), self.shape, ranks, self.multiprocessors)
    }

    /// Predicted time of a call by this program, in microseconds; `None` if one of its steps has no
    /// prediction.
    pub(super) fn time(
        &self,
        machine: &CostParameters,
        program: &Program,
        tile: [usize; 2],
    ) -> Option<f64> {
        let parts = self.parts(tile).max(1);
        let meets = |of: &&Alternative| {
            program.takes(of) && of.when.iter().all(|&when| self.meets(when, tile))
        };
        let of = program.alternatives.iter().find(meets)?;
        let mut clock = Clock {
            machine,
            problem: self,
            norm: program.norm,
            tile,
            parts,
            main_us: 0.0,
            side_us: 0.0,
            arrived_us: BTreeMap::new(),
            behind_gemm: false,
        };
        let peers = || 1..self.world as u32;
        let mut each = |step: &Step, at: At| clock.step(step.work, at).ok_or(());
        program.walk(of, (parts as u32, &peers), &mut each).ok()?;
        Some(clock.main_us)
    }
}

impl Clock<'_> {
    /// Adds the predicted time of a step; returns `None` if the step has no prediction.
    fn step(&mut self, work: Work, at: At) -> Option<()> {
        let machine = self.machine;
        let behind_gemm = std::mem::take(&mut self.behind_gemm);
        match work {
            Work::Kernel(kernel, of) => self.kernel(kernel, of, behind_gemm)?,
            Work::Gemm(gemm) => {
                self.gemm(&gemm, at)?;
                self.behind_gemm = true;
            }
            Work::Open(_) | Work::Close(_) => self.main_us += machine.gate_us,
            Work::Copies(of) => self.copies(of, at),
            Work::Gate(of) => {
                self.main_us = self.main_us.max(self.arrival(of, at)) + machine.gate_us
            }
            // The step reads the partials of all ranks and writes the sum.
            Work::Sums { .. } => {
                let partials = self.problem.world as f64 * self.bytes(Transfer::Blocks, at.part);
                self.small(partials + self.bytes(Transfer::Rows, at.part));
            }
            Work::CopyReceived(of) => self.small(2.0 * self.bytes(of, at.part)),
            Work::Barrier(_) | Work::BarrierCall => self.main_us += machine.barrier_us,
            Work::RmsNorm => self.main_us += machine.norm(self.bytes_of_c(self.problem.output)),
        }
        Some(())
    }

    /// Adds to the main timeline a short launch that reads and writes `bytes` bytes of device
    /// memory.
    fn small(&mut self, bytes: f64) {
        self.main_us += self.machine.launch_us + bytes / self.machine.memory_bytes_per_us;
    }

    fn bytes_of_c(&self, dtype: DType) -> f64 {
        let [m, n, _] = self.problem.shape;
        m as f64 * n as f64 * dtype.size() as f64
    }

    fn bytes_of_a(&self) -> f64 {
        let [m, _, k] = self.problem.shape;
        m as f64 * k as f64 * self.problem.dtype.size() as f64
    }

    /// Number of bytes that one rank contributes to the transfer `of`, or number of bytes of one
    /// part of this contribution.
    fn bytes(&self, of: Transfer, part: Option<u32>) -> f64 {
        let all = match of {
            Transfer::Shards => self.bytes_of_a(),
            Transfer::Blocks => self.bytes_of_c(self.problem.wire),
            Transfer::Sums | Transfer::Rows => self.bytes_of_c(self.problem.output),
        };
        let own = all / self.problem.world as f64;
        if part.is_some() { own / self.parts as f64 } else { own }
    }

    fn kernel(&mut self, kernel: Kernel, of: KernelOperands, behind_gemm: bool) -> Option<()> {
        let (machine, problem) = (self.machine, self.problem);
        let world = problem.world as f64;
        if let (Kernel::Copies | Kernel::Blocks | Kernel::Results, KernelOperands::Of(transfer)) =
            (kernel, of)
        {
            // An earlier step has opened the call, and a later step waits for the data. So only the
            // launch and the stores are added here.
            let sent = (world - 1.0) * self.bytes(transfer, None);
            self.main_us +=
                machine.launch_us + machine.sent(sent, world - 1.0, machine.link_bytes_per_us);
            self.arrived_us.insert((transfer, 0), self.main_us);
            return Some(());
        }
        let mut shape = problem.shape.map(|it| it as f64);
        if kernel == Kernel::AllGather {
            shape[0] = problem.own_rows() as f64;
        }
        let product = machine.product(shape, [problem.dtype, problem.output], machine.tile_core);
        if kernel == Kernel::Gathered {
            self.main_us += product;
            return Some(());
        }
        let kind = match kernel {
            Kernel::Pull | Kernel::Staged => Kernel::Gather,
            other => other,
        };
        let bytes = match of {
            KernelOperands::Of(Transfer::Shards) => self.bytes_of_a(),
            KernelOperands::Call if problem.row.gathers_a() => self.bytes_of_a(),
            _ => match kind {
                // The second hop sends sums in the type of C.
                Kernel::TwoShot => {
                    (self.bytes_of_c(problem.wire) + self.bytes_of_c(problem.output)) / 2.0
                }
                Kernel::OneShot
                | Kernel::OneShotLl
                | Kernel::TwoShotLl
                | Kernel::ReduceScatter
                | Kernel::ReduceScatterLl => self.bytes_of_c(problem.wire),
                _ => self.bytes_of_c(problem.output),
            },
        };
        let by_gemm = problem.row.multiplies() && kind != Kernel::TwoShotLl;
        let packs_from = problem.packs_from.filter(|_| self.norm == Norm::None && !by_gemm);
        let packed_bytes = packs_from.map(|items| f64::from(items) * 8.0);
        let Message { fixed_us, moving_us } = machine.message(kind, world, bytes, packed_bytes)?;
        let fused =
            of == KernelOperands::Call && kernel != Kernel::Gather && problem.row.multiplies();
        let product = if fused { product } else { 0.0 };
        // The kernel normalises rows while other rows are still arriving.
        let within = self.norm == Norm::Within;
        let norm = if within { machine.norm(self.bytes_of_c(problem.output)) } else { 0.0 };
        self.main_us += fixed_us + product + moving_us.max(norm);
        // The start of `two_shot_ll` does not overlap with the GEMM. 4 x H100, matmul_all_reduce of 1 x
        // 8192 x 3584: GEMM 22.0 us, both 30.2; all_reduce of 8 KiB alone 6.6 (ce61ec9b).
        if behind_gemm && kind != Kernel::TwoShotLl {
            self.main_us -= machine.overlap_us.min(fixed_us);
        }
        Some(())
    }

    fn gemm(&mut self, gemm: &Gemm, at: At) -> Option<()> {
        let (machine, problem) = (self.machine, self.problem);
        let [m, n, k] = problem.shape.map(|it| it as f64);
        let (own, world) = (problem.own_rows() as f64, problem.world as f64);
        let rows = match gemm.rows {
            Rows::All if gemm.source == Source::Shard => own,
            Rows::All => m,
            Rows::Own => own,
            Rows::BeforeOwn | Rows::AfterOwn => (m - own) / 2.0,
            Rows::Part => own / self.parts as f64,
        };
        let written = match gemm.to {
            Target::Area(_) => problem.wire,
            Target::C | Target::Own | Target::OwnOfC => problem.output,
        };
        let alone = machine.gemm([rows, n, k], [problem.dtype, written]);
        match gemm.core {
            Core::Any | Core::Exchanging(_) => self.main_us += alone,
            // The GEMM adds the rows of the peer, so it waits for these rows.
            Core::Adding => {
                self.main_us = self.main_us.max(self.arrival(Transfer::Blocks, at)) + alone;
            }
            Core::Storing { blocks, results } => {
                let alone = alone.max(self.waves(blocks)?);
                let messages = f64::from(u8::from(blocks)) + f64::from(u8::from(results.is_some()));
                let sent = messages * (world - 1.0) * self.bytes(Transfer::Rows, None);
                let stores = machine.sent(sent, world - 1.0, machine.store_bytes_per_us);
                self.main_us += alone.max(stores);
            }
            // The GEMM multiplies this rank's own rows first, then each part as it arrives. The
            // part that arrives last takes at least one wave of tiles. If A is split by columns,
            // every tile waits for all parts.
            Core::Gated => {
                let waves = 2.0 * 128.0 * 256.0 * k * f64::from(problem.multiprocessors);
                let wave = (waves / machine.rate(problem.dtype)).min(alone);
                let part = alone * (world - 1.0) / world / self.parts as f64;
                let begun = self.main_us;
                let own = begun + alone / world;
                let parts = self.arrived_us.values();
                let end = parts.clone().fold(own, |end, &arrived| end.max(arrived) + part);
                let last = parts.fold(own, |last, &arrived| last.max(arrived));
                let least = if problem.columns { part } else { part.max(wave) };
                self.main_us = end.max(last + least).max(begun + alone);
            }
        }
        Some(())
    }

    /// Time of a GEMM that stores tiles to peers, computed from its number of waves of tiles. The
    /// GEMM multiplies the rows that this rank owns and, if `blocks`, the rows that its peers own.
    /// `None` if there is no such GEMM for the call.
    fn waves(&self, blocks: bool) -> Option<f64> {
        let (machine, problem) = (self.machine, self.problem);
        let owners = if blocks { problem.world } else { 1 };
        let StoringLaunch { config, grid } = problem.stored(self.tile, owners)?;
        let tile = f64::from(config.rows()) * f64::from(config.width);
        let each = f64::from(problem.multiprocessors.max(1));
        let wave = 2.0 * tile * problem.shape[2] as f64 * each / machine.rate(problem.dtype);
        Some(machine.gemm_us + f64::from(grid.waves) * wave)
    }

    /// Adds copies to the side timeline, one after the other. No copy starts before the current
    /// time of the main timeline.
    fn copies(&mut self, of: Transfer, at: At) {
        let (machine, world) = (self.machine, self.problem.world);
        let to = if at.peer.is_some() { 1 } else { world - 1 };
        let parts = match at.part {
            Some(part) => part..part + 1,
            None => 0..self.parts as u32,
        };
        for part in parts {
            let bytes = to as f64 * self.bytes(of, Some(part));
            let moving = machine.sent(bytes, to as f64, machine.engine_bytes_per_us);
            self.side_us = self.side_us.max(self.main_us) + moving;
            self.arrived_us.insert((of, part), self.side_us + machine.engine_us);
        }
    }

    /// Time in microseconds at which a part of the transfer `of` has arrived from all peers. If
    /// `at` has no part, time at which the whole transfer has arrived.
    fn arrival(&self, of: Transfer, at: At) -> f64 {
        let parts = self.arrived_us.range((of, 0)..=(of, at.part.unwrap_or(u32::MAX)));
        parts.map(|(_, &us)| us).fold(0.0, f64::max)
    }
}
