//! Predicted time of a program, which is the list of launches, copies and waits of a call. Its
//! steps run one after the other; copies by copy engines run at the same time.
//!
//! The model assumes that all ranks run in lockstep: data from a peer arrives when this rank has
//! itself sent the same amount of data.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ops::Range;

use iris_heap::DType;
use iris_kernels::Kernel;
use iris_kernels::gemm::{Config, Exchanging, Fusion, GemmCall, GemmLaunch, Parts};
use iris_kernels::program::{
    Alternative, At, Core, Facts, Gemm, KernelOperands, Norm, Program, Rows, Source, Step, Target,
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
    /// Product of the call. Its three element types are those of A, of C, and of partial results
    /// that are sent between ranks.
    pub(crate) product: GemmCall,
    /// Number of rows of the largest call that uses the same kernels as this call.
    pub(crate) rows: usize,
    /// Rows and columns of a tile.
    pub(crate) tile: [u32; 2],
    /// Whether each rank passes a block of columns of A; otherwise it passes a block of rows.
    pub(crate) columns: bool,
    /// Whether an RMSNorm follows.
    pub(crate) normed: bool,
    /// Whether programs may use a GEMM that stores to peers.
    pub(crate) stores: bool,
    /// Whether programs may use a GEMM that waits for parts of A which copy engines deliver.
    pub(crate) gated: bool,
    /// Whether programs may use a GEMM that also exchanges its result with the peers.
    pub(crate) exchanges: bool,
    /// Whether the vendor's library of GEMMs is installed.
    pub(crate) has_library: bool,
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
    parts: usize,
    main_us: f64,
    side_us: f64,
    /// Arrival times in microseconds, by transfer and part number.
    arrived_us: BTreeMap<(Transfer, u32), f64>,
    /// Whether the last step of the main stream was a GEMM.
    behind_gemm: bool,
}

/// Facts about a call, by which one alternative of a program is chosen. Predictions assume that
/// ranks do not share the device.
impl Facts for Problem {
    type Error = Infallible;

    fn ranks(&self) -> u32 {
        self.product.ranks as u32
    }

    fn columns(&self) -> u32 {
        self.product.shape[1] as u32
    }

    fn is_by_columns(&self) -> bool {
        self.columns
    }

    /// Number of parts in which a rank's data is sent.
    fn parts(&self) -> u32 {
        let own = |all: usize| all.div_ceil(self.product.ranks).max(1);
        let [m, _, k] = self.product.shape;
        let [rows, cols] = self.tile.map(|it| it as usize);
        let parts = match self.columns {
            true => own(k).div_ceil(cols) * m.max(1).div_ceil(rows),
            false if self.row.gathers_a() => own(m).div_ceil(rows) * k.max(1).div_ceil(cols),
            false => own(m).div_ceil(rows),
        };
        parts as u32
    }

    fn has_engines(&self) -> Result<bool, Infallible> {
        Ok(self.has_engines)
    }

    fn fits(&self, gemm: &Gemm) -> bool {
        match gemm.core {
            Core::Adding => self.has_library,
            _ => self.launch(gemm).is_some(),
        }
    }
}

impl Problem {
    fn own_rows(&self) -> usize {
        self.product.shape[0].div_ceil(self.product.ranks)
    }

    /// Types of A, of C and of partial results.
    fn types(&self) -> [DType; 3] {
        self.product.dtypes
    }

    /// Type in which a GEMM writes its result.
    fn written(&self, gemm: &Gemm) -> DType {
        let [_, output, wire] = self.types();
        if matches!(gemm.to, Target::Area(_)) { wire } else { output }
    }

    /// Communication that is fused into the GEMM of the step `gemm`; `None` if the call may not use
    /// such a GEMM.
    pub(crate) fn fusion(&self, gemm: &Gemm) -> Option<Fusion> {
        let (GemmCall { shape, ranks, .. }, tile) = (self.product, self.tile);
        match gemm.core {
            Core::Any => Some(Fusion::None),
            Core::Adding => None,
            Core::Gated => {
                let [m, _, k] = shape.map(|it| it as u32);
                let shard = Parts::shard([m, k], ranks as u32, self.columns)?;
                let parts =
                    Parts { shard, part: tile, first: 0, step: [0, 0], columns: self.columns };
                self.gated.then_some(Fusion::Gated(parts))
            }
            Core::Storing { blocks, .. } => {
                let owners = if blocks { ranks } else { 1 };
                self.stores.then_some(Fusion::Storing { signalled: tile, owners })
            }
            Core::Exchanging(kernel) => {
                let tile = Exchanging::tile_of(kernel, tile);
                self.exchanges.then_some(Fusion::Exchanging { tile, normed: self.normed })
            }
        }
    }

    /// Problem of a step that multiplies the rows `rows` of its factor A. A GEMM with fused
    /// communication always gets the problem with all rows of the call.
    pub(crate) fn of_rows(&self, gemm: &Gemm, rows: &Range<u32>) -> Self {
        if gemm.core != Core::Any {
            return *self;
        }
        let [_, n, k] = self.product.shape;
        // The stride between rows does not matter for the first row alone.
        let is_aligned = self.product.is_aligned || *rows == (0..1);
        let product = GemmCall { shape: [rows.len(), n, k], is_aligned, ..self.product };
        Problem { product, ..*self }
    }

    /// Kernel name and launch of the built-in GEMM for the step `gemm`; `None` if no compiled GEMM
    /// fits the call.
    pub(crate) fn launch(&self, gemm: &Gemm) -> Option<(&'static str, GemmLaunch)> {
        let [factors, _, wire] = self.types();
        let (written, fusion) = (self.written(gemm), self.fusion(gemm)?);
        let sent =
            if matches!(gemm.core, Core::Storing { blocks: true, .. }) { wire } else { written };
        let partial = matches!(gemm.to, Target::Area(_));
        let exchanges = matches!(gemm.core, Core::Exchanging(_));
        let call = GemmCall {
            most: if exchanges { self.rows } else { self.product.most },
            dtypes: [factors, written, sent],
            is_aligned: self.product.is_aligned || matches!(gemm.source, Source::Area(_)),
            // The activation function of the epilogue is applied to complete sums, not to partial
            // results.
            has_epilogue: self.product.has_epilogue && !partial,
            ..self.product
        };
        Some((fusion.kernel(), call.launch(&fusion)?))
    }

    /// First alternative of the program (a list of steps with conditions) whose conditions the call
    /// meets; `None` if there is none.
    pub(crate) fn alternative(&self, program: &Program) -> Option<&'static Alternative> {
        let Ok(found) = program.first_met(program.alternatives, self);
        found
    }

    /// Predicted time of a call by this program, in microseconds; `None` if one of its steps has no
    /// prediction.
    pub(super) fn time(&self, machine: &CostParameters, program: &Program) -> Option<f64> {
        let parts = self.parts().max(1) as usize;
        // A GEMM that also exchanges its result is predicted as two launches, a GEMM and a message.
        // So alternatives with such a GEMM are left out.
        let priced = program.alternatives.iter().filter(|of| !of.when.contains(&When::Exchanges));
        let Ok(of) = program.first_met(priced, self);
        let of = of?;
        let mut clock = Clock {
            machine,
            problem: self,
            norm: program.norm,
            parts,
            main_us: 0.0,
            side_us: 0.0,
            arrived_us: BTreeMap::new(),
            behind_gemm: false,
        };
        let peers = || 1..self.ranks();
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
                let partials = self.world() * self.bytes(Transfer::Blocks, at.part);
                self.small(partials + self.bytes(Transfer::Rows, at.part));
            }
            Work::CopyReceived(of) => self.small(2.0 * self.bytes(of, at.part)),
            Work::Barrier(_) | Work::BarrierCall => self.main_us += machine.barrier_us,
            Work::RmsNorm => self.main_us += machine.norm(self.bytes_of_c(self.output())),
        }
        Some(())
    }

    /// Adds to the main timeline a short launch that reads and writes `bytes` bytes of device
    /// memory.
    fn small(&mut self, bytes: f64) {
        self.main_us += self.machine.launch_us + bytes / self.machine.memory_bytes_per_us;
    }

    /// Number of ranks.
    fn world(&self) -> f64 {
        self.problem.product.ranks as f64
    }

    /// Type of C.
    fn output(&self) -> DType {
        self.problem.types()[1]
    }

    /// Type of partial results.
    fn wire(&self) -> DType {
        self.problem.types()[2]
    }

    fn bytes_of_c(&self, dtype: DType) -> f64 {
        let [m, n, _] = self.problem.product.shape;
        m as f64 * n as f64 * dtype.size() as f64
    }

    fn bytes_of_a(&self) -> f64 {
        let GemmCall { shape: [m, _, k], dtypes: [dtype, ..], .. } = self.problem.product;
        m as f64 * k as f64 * dtype.size() as f64
    }

    /// Number of bytes that one rank contributes to the transfer `of`, or number of bytes of one
    /// part of this contribution.
    fn bytes(&self, of: Transfer, part: Option<u32>) -> f64 {
        let all = match of {
            Transfer::Shards => self.bytes_of_a(),
            Transfer::Blocks => self.bytes_of_c(self.wire()),
            Transfer::Sums | Transfer::Rows => self.bytes_of_c(self.output()),
        };
        let own = all / self.world();
        if part.is_some() { own / self.parts as f64 } else { own }
    }

    fn kernel(&mut self, kernel: Kernel, of: KernelOperands, behind_gemm: bool) -> Option<()> {
        let (machine, problem) = (self.machine, self.problem);
        let (world, wire, output) = (self.world(), self.wire(), self.output());
        if let (Kernel::Copies | Kernel::Blocks | Kernel::Results, KernelOperands::Of(transfer)) =
            (kernel, of)
        {
            // An earlier step waits until the peers have entered the call, and a later step waits
            // for the data. So only the launch and the stores are added here.
            let sent = (world - 1.0) * self.bytes(transfer, None);
            self.main_us +=
                machine.launch_us + machine.sent(sent, world - 1.0, machine.link_bytes_per_us);
            self.arrived_us.insert((transfer, 0), self.main_us);
            return Some(());
        }
        let mut shape = problem.product.shape.map(|it| it as f64);
        if kernel == Kernel::AllGather {
            shape[0] = problem.own_rows() as f64;
        }
        let product = machine.product(shape, [problem.types()[0], output], machine.tile_core);
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
                Kernel::TwoShot => (self.bytes_of_c(wire) + self.bytes_of_c(output)) / 2.0,
                Kernel::OneShot
                | Kernel::OneShotLl
                | Kernel::OneShotCombineLl
                | Kernel::TwoShotLl
                | Kernel::ReduceScatter
                | Kernel::ReduceScatterLl
                | Kernel::ReduceScatterCombineLl => self.bytes_of_c(wire),
                _ => self.bytes_of_c(output),
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
        let norm = if within { machine.norm(self.bytes_of_c(output)) } else { 0.0 };
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
        let [m, n, k] = problem.product.shape.map(|it| it as f64);
        let (own, world) = (problem.own_rows() as f64, self.world());
        let rows = match gemm.rows {
            Rows::All if gemm.source == Source::Shard => own,
            Rows::All => m,
            Rows::Own => own,
            Rows::BeforeOwn | Rows::AfterOwn => (m - own) / 2.0,
            Rows::Part => own / self.parts as f64,
        };
        let alone = machine.gemm([rows, n, k], [problem.types()[0], problem.written(gemm)]);
        match gemm.core {
            Core::Any | Core::Exchanging(_) => self.main_us += alone,
            // The GEMM adds its product to rows that the peer has sent, so it waits for these rows.
            Core::Adding => {
                self.main_us = self.main_us.max(self.arrival(Transfer::Blocks, at)) + alone;
            }
            Core::Storing { blocks, results } => {
                let (_, GemmLaunch { config, grid }) = problem.launch(gemm)?;
                let waves = f64::from(grid.waves) * self.wave(&config);
                let alone = alone.max(machine.gemm_us + waves);
                let messages = f64::from(u8::from(blocks)) + f64::from(u8::from(results.is_some()));
                let sent = messages * (world - 1.0) * self.bytes(Transfer::Rows, None);
                let stores = machine.sent(sent, world - 1.0, machine.store_bytes_per_us);
                self.main_us += alone.max(stores);
            }
            // The GEMM multiplies this rank's own rows first, then each part as it arrives. The
            // part that arrives last takes at least one wave of tiles. If A is split by columns,
            // every tile waits for all parts.
            Core::Gated => {
                let wave = self.wave(&problem.launch(gemm)?.1.config).min(alone);
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

    /// Time of a wave of tiles: one tile on each multiprocessor, with the tile size of `config`.
    fn wave(&self, config: &Config) -> f64 {
        let GemmCall { shape: [.., k], dtypes: [dtype, ..], multiprocessors, .. } =
            self.problem.product;
        let tile = f64::from(config.rows()) * f64::from(config.width);
        let each = f64::from(multiprocessors.max(1));
        2.0 * tile * k as f64 * each / self.machine.rate(dtype)
    }

    /// Adds copies by copy engines to their own timeline, one after the other. No copy starts
    /// before the current time of the main stream.
    fn copies(&mut self, of: Transfer, at: At) {
        let (machine, world) = (self.machine, self.problem.product.ranks);
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
