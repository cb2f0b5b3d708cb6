//! Tests of collectives of messages: the Rust kernels, and the device source compiled for the host.

use std::ffi::c_int;
use std::sync::OnceLock;

use iris_heap::abi::ControlBlock;
use iris_kernels::Kernel;
use iris_kernels::args::{Matrix, OpArgs, epilogue, producer};
use iris_kernels::schedule::{Collective, Grid, Items, SplitGrid, part_of};
use iris_sync::{Channel, REFRESH_PERIOD, RESERVED_WORDS, Shape};
use libloading::os::unix::Library;

use super::forms::Run;
use super::{Numbers, library, symbol};

/// Memory of one rank: data segment, signal segment, device words and control block.
pub(super) struct Rank {
    data: Vec<u128>,
    signal: Vec<u128>,
    pub(super) device: Vec<i32>,
    pub(super) control: Box<ControlBlock>,
}

/// Number of the first of several calls: words are refreshed in the second one.
pub(super) const FIRST_CALL: i32 = REFRESH_PERIOD - 1;

/// Ranks whose words have the shape `shape`, with `data_bytes` bytes of data each.
pub(super) fn ranks(shape: Shape, data_bytes: u64) -> Vec<Rank> {
    let (_, words) = Channel::lay_out(shape, 0, RESERVED_WORDS, 0);
    let unset = FIRST_CALL as u32 - 1;
    let word = (0..4).fold(0u128, |all, _| all << 32 | u128::from(unset));
    let rank = |_| {
        let mut signal = vec![word; (RESERVED_WORDS + words.signal) as usize / 4];
        signal[0] = 0;
        let mut device = vec![0; words.device as usize];
        device[0] = FIRST_CALL;
        let data = vec![u128::MAX; (data_bytes / 16) as usize];
        Rank { data, signal, device, control: Box::default() }
    };
    (0..shape.size).map(rank).collect()
}

/// Arguments of a call on `rank`, without operands.
pub(super) fn arguments(ranks: &mut [Rank], rank: u32, shape: Shape) -> OpArgs {
    let mut args: OpArgs = bytemuck::Zeroable::zeroed();
    (args.heap.rank, args.heap.size) = (rank, shape.size);
    for (at, of) in ranks.iter().enumerate() {
        args.heap.signal[at] = of.signal.as_ptr() as u64;
        args.heap.data[at] = of.data.as_ptr() as u64;
    }
    let own = &mut ranks[rank as usize];
    args.heap.control = std::ptr::from_mut(&mut *own.control) as u64;
    args.heap.device_words = own.device.as_mut_ptr() as u64;
    args.heap.entry_deadline_ns = 60_000_000_000;
    args.heap.progress_deadline_ns = 60_000_000_000;
    args.channel = Channel::lay_out(shape, rank, RESERVED_WORDS, 0).0;
    args
}

/// Absolute tolerance for results near zero: half of the smallest step (subnormal) of f16.
const SMALLEST: f64 = 3e-8;

/// Epsilon of the RMSNorm, which is added to the mean of squares.
pub(super) const EPSILON: f32 = 1e-2;

/// Message to be tested: element type, type of transferred sums, shape, gap between rows, and
/// whether GELU and an RMSNorm are applied.
#[derive(Clone, Copy, Debug)]
struct Message {
    dtype: u32,
    wire: u32,
    gelu: bool,
    norm: bool,
    rows: u32,
    cols: u32,
    gap: u32,
}

impl Message {
    fn element_bytes(self) -> usize {
        if self.dtype == 0 { 4 } else { 2 }
    }

    fn matrix(self, data: &[u32], rows: u32) -> Matrix {
        Matrix {
            address: data.as_ptr() as u64,
            ld: u64::from(self.cols + self.gap),
            rows,
            cols: self.cols,
            dtype: self.dtype,
            transposed: 0,
        }
    }

    /// Whether an element lies in a gap between rows or after row `rows`; a kernel must never write
    /// such elements.
    fn is_outside(self, rows: u32, row: u32, col: u32) -> bool {
        row >= rows || col >= self.cols
    }

    /// Buffer for `rows` rows and one additional row, with all bits set: every element is NaN until
    /// it is written.
    fn room(self, rows: u32) -> Vec<u32> {
        let elements = ((rows + 1) * (self.cols + self.gap)) as usize;
        vec![u32::MAX; (elements * self.element_bytes()).div_ceil(4)]
    }

    fn bits(self, data: &[u32], row: u32, col: u32) -> u32 {
        let at = (row * (self.cols + self.gap) + col) as usize;
        match self.element_bytes() {
            4 => data[at],
            _ => data[at / 2] >> (at % 2 * 16) & 0xffff,
        }
    }

    fn set(self, data: &mut [u32], row: u32, col: u32, value: f32) {
        let at = (row * (self.cols + self.gap) + col) as usize;
        if self.dtype == 0 {
            data[at] = value.to_bits();
            return;
        }
        let shift = at % 2 * 16;
        data[at / 2] = data[at / 2] & !(0xffff << shift) | self.rounded(value) << shift;
    }

    fn rounded(self, value: f32) -> u32 {
        rounded(self.dtype, value)
    }

    fn value(self, bits: u32) -> f32 {
        value_of(self.dtype, bits)
    }

    /// Whether `bits` is the right result for the sum `sum`, to which the function `added` adds the
    /// residual. The comparison is bit by bit, except with GELU, which the implementations
    /// approximate differently.
    fn is_result(self, bits: u32, sum: f32, added: impl Fn(f32) -> f32) -> bool {
        if !self.gelu {
            return bits == self.rounded(added(sum));
        }
        let gelu = sum * 0.5 * (1.0 + libm::erff(sum * std::f32::consts::FRAC_1_SQRT_2));
        let wanted = added(gelu);
        (self.value(bits) - wanted).abs() <= self.roundoff() * (sum.abs() + wanted.abs()).max(1.0)
    }

    /// Whether `seen` is the right RMSNorm of the element with bits `bits`. `row` yields the bits
    /// of all elements of the row.
    fn is_normed(self, seen: u32, bits: u32, row: impl Iterator<Item = u32>, weight: u32) -> bool {
        let squares = row.map(|bits| f64::from(self.value(bits)).powi(2)).sum::<f64>();
        let root = (squares / f64::from(self.cols) + f64::from(EPSILON)).sqrt();
        let wanted = f64::from(self.value(bits)) / root * f64::from(self.value(weight));
        (f64::from(self.value(seen)) - wanted).abs()
            <= f64::from(self.roundoff()) * wanted.abs() + SMALLEST
    }

    fn roundoff(self) -> f32 {
        [1e-6, 5e-4, 4e-3][self.dtype as usize]
    }
}

pub(super) fn rounded(dtype: u32, value: f32) -> u32 {
    match dtype {
        0 => value.to_bits(),
        1 => u32::from(half::f16::from_f32(value).to_bits()),
        _ => u32::from(half::bf16::from_f32(value).to_bits()),
    }
}

pub(super) fn value_of(dtype: u32, bits: u32) -> f32 {
    match dtype {
        0 => f32::from_bits(bits),
        1 => half::f16::from_bits(bits as u16).to_f32(),
        _ => half::bf16::from_bits(bits as u16).to_f32(),
    }
}

/// Kernels of messages with four threads, compiled once for all tests. The file of the loaded library
/// is removed.
pub(super) fn kernels() -> &'static Library {
    static KERNELS: OnceLock<Library> = OnceLock::new();
    KERNELS.get_or_init(|| {
        let options = ["-std=c++20", "-DIRIS_THREADS=4", "-DIRIS_FACTOR=0"];
        library(&["tests/host/messages.cpp"], &options).0
    })
}

/// Tests the Rust kernels against device kernels with four threads, bit by bit: for every
/// collective of small messages, for tile reductions and for relayed tiles. Each test makes several
/// calls; the first calls come before a periodic refresh of words. Some sums have a bias.
pub(super) fn messages_are_right_in_rust_and_as_device_source() {
    let library = kernels();
    type HostRun = unsafe extern "C" fn(usize, *const OpArgs, u32, u32, c_int, u32, u64, u32);
    let run: HostRun = symbol(library, "iris_host_run");
    let norm: usize = symbol(library, "iris_norm");
    let kernels = [
        (Kernel::OneShotLl, Collective::AllReduce),
        (Kernel::ReduceScatterLl, Collective::ReduceScatter),
        (Kernel::AllGatherLl, Collective::AllGather),
        (Kernel::AllToAllLl, Collective::AllToAll),
        (Kernel::BroadcastLl, Collective::Broadcast { root: 1 }),
        (Kernel::TwoShotLl, Collective::TwoShot { root: None }),
        (Kernel::RelayLl, Collective::TwoShot { root: Some(1) }),
        // Reductions tile by tile, in which a thread loads several vectors at a time.
        (Kernel::OneShot, Collective::AllReduce),
        (Kernel::TwoShot, Collective::AllReduce),
        (Kernel::ReduceScatter, Collective::ReduceScatter),
        // Collectives whose tiles arrive in inboxes (buffers that receive peers' tiles).
        (Kernel::AllGather, Collective::AllGather),
        (Kernel::AllToAll, Collective::AllToAll),
        (Kernel::Broadcast, Collective::Broadcast { root: 1 }),
        // Broadcast in which a relay forwards each tile.
        (Kernel::Relay, Collective::Broadcast { root: 1 }),
    ];
    let messages = [
        Message { dtype: 2, wire: 2, gelu: false, norm: false, rows: 6, cols: 8, gap: 0 },
        Message { dtype: 1, wire: 0, gelu: false, norm: false, rows: 5, cols: 7, gap: 0 },
        Message { dtype: 0, wire: 0, gelu: false, norm: false, rows: 4, cols: 5, gap: 3 },
        Message { dtype: 2, wire: 2, gelu: false, norm: false, rows: 1, cols: 1, gap: 0 },
        Message { dtype: 0, wire: 2, gelu: true, norm: false, rows: 5, cols: 6, gap: 0 },
        // Messages that consist of whole vectors only, one for each element type.
        Message { dtype: 2, wire: 2, gelu: false, norm: false, rows: 18, cols: 88, gap: 8 },
        Message { dtype: 1, wire: 1, gelu: false, norm: false, rows: 14, cols: 88, gap: 8 },
        Message { dtype: 0, wire: 0, gelu: false, norm: false, rows: 13, cols: 88, gap: 8 },
        // Messages so small that each thread has at most one vector of a tile.
        Message { dtype: 1, wire: 1, gelu: false, norm: false, rows: 7, cols: 16, gap: 0 },
        Message { dtype: 0, wire: 0, gelu: false, norm: false, rows: 11, cols: 8, gap: 8 },
        // Messages of several blocks of packs without gaps; the last block is not full.
        Message { dtype: 2, wire: 2, gelu: false, norm: false, rows: 21, cols: 264, gap: 0 },
        Message { dtype: 0, wire: 0, gelu: true, norm: false, rows: 12, cols: 301, gap: 0 },
    ];
    // Messages with an RMSNorm. Their rows have at most as many vectors as a thread holds in
    // registers, more vectors than that, or no whole vector.
    let normed = |dtype, cols, gap| Message {
        dtype,
        wire: dtype,
        gelu: false,
        norm: true,
        rows: 11,
        cols,
        gap,
    };
    let normed = [
        normed(2, 88, 8),
        normed(0, 296, 0),
        normed(2, 296, 0),
        normed(1, 301, 2),
        Message { wire: 0, gelu: true, ..normed(2, 40, 8) },
    ];
    let normalise = [
        (Kernel::OneShot, Collective::AllReduce),
        (Kernel::TwoShot, Collective::AllReduce),
        (Kernel::OneShotLl, Collective::AllReduce),
    ];
    let plain = kernels.map(|(kernel, collective)| (kernel, collective, &messages[..]));
    let normed = normalise.map(|(kernel, collective)| (kernel, collective, &normed[..]));
    for (kernel, collective, messages) in plain.into_iter().chain(normed) {
        let kind = if messages[0].norm { "_norm" } else { "" };
        let entry: usize = symbol(library, &format!("iris_{}{kind}", kernel.name()));
        let in_packs = kernel.name_of_packs().filter(|_| !messages[0].norm);
        let in_packs = in_packs.map(|name| symbol::<usize>(library, &format!("iris_{name}")));
        // The world of nine ranks has more sources than one wait polls together.
        let worlds = match messages[0].norm {
            true => vec![(2, messages), (3, &messages[1..])],
            false => {
                vec![(2, messages), (3, &messages[1..3]), (9, &messages[2..3]), (5, &messages[5..])]
            }
        };
        let each = |(size, messages): (u32, &[Message])| {
            messages.iter().map(move |&message| (size, message)).collect::<Vec<_>>()
        };
        let are_items = |(_, message): &(u32, Message)| {
            // With the LL protocol and an RMSNorm, rows must consist of whole items (here of four
            // elements each).
            let whole =
                kernel != Kernel::OneShotLl || !message.norm || message.cols.is_multiple_of(4);
            // Sums are sent in the type of C.
            whole && (kernel != Kernel::TwoShotLl || message.wire == message.dtype)
        };
        for (size, message) in worlds.into_iter().flat_map(each).filter(are_items) {
            let rust = |args: &OpArgs, index, count| {
                // SAFETY: `args` holds addresses of memory that outlives the calls.
                unsafe { iris_kernels::cpu::run(kernel, args, index, count) }.expect("a call");
            };
            // SAFETY: `entry` is a kernel of this library; every address in `args` is that of
            // memory that outlives the calls.
            let device =
                |args: &OpArgs, index, count| unsafe { run(entry, args, index, count, 0, 0, 0, 0) };
            let rust_norm = |args: &OpArgs, index, count| {
                // SAFETY: `args` holds addresses of memory that outlives the calls.
                unsafe { iris_kernels::cpu::run(Kernel::Norm, args, index, count) }
                    .expect("a norm");
            };
            // SAFETY: `norm` is a kernel of this library; every address in `args` is that of memory
            // that outlives the calls.
            let device_norm =
                |args: &OpArgs, index, count| unsafe { run(norm, args, index, count, 0, 0, 0, 0) };
            // The LL kernel includes the RMSNorm. For the other kernels the RMSNorm is a second
            // launch.
            let behind = usize::from(message.norm && kernel != Kernel::OneShotLl);
            let runs: [&Run<'_>; 2] = [&rust, &rust_norm];
            exchange(collective, size, message, &runs[..=behind]);
            let runs: [&Run<'_>; 2] = [&device, &device_norm];
            exchange(collective, size, message, &runs[..=behind]);
            if let Some(entry) = in_packs {
                // SAFETY: `entry` is a kernel of this library; every address in `args` is that of
                // memory that outlives the calls.
                let packs = |args: &OpArgs, index, count| unsafe {
                    run(entry, args, index, count, 0, 0, 0, 0)
                };
                exchange(collective, size, message, &[&packs]);
                // Calls of both kinds alternate in the same words.
                let turns = |args: &OpArgs, index, count| match args.record.fields[3] {
                    0 => packs(args, index, count),
                    _ => device(args, index, count),
                };
                exchange(collective, size, message, &[&turns]);
            }
        }
    }
}

fn exchange(collective: Collective, size: u32, message: Message, launches: &[&Run<'_>]) {
    let Message { dtype, rows, cols, .. } = message;
    let reduces = collective.reduces();
    let travels = if reduces { message.wire } else { dtype };
    let per_item = if travels == 0 { 2 } else { 4 };
    let items = Items { collective, size, rows, cols, per_item };
    let tile_n = cols.min(48);
    let tile_m = if rows > 8 { 4 } else { 2 };
    let grid = Grid { rows, cols, tile_m, tile_n };
    // Inboxes need room for the larger number of tiles: that of the whole grid, or that of the grid
    // whose rows are split over ranks.
    let tiles = SplitGrid { grid, size }.tiles().max(grid.tiles());
    let slot = u64::from(tile_m * tile_n * 4).next_multiple_of(128);
    let (inbox, results) = (2 * u64::from(size * tiles) * slot, 2 * u64::from(tiles) * slot);
    let (pairs, packs) = (items.most(), items.most_packs());
    let shape = Shape { op: 3, size, tiles, pairs, packs, sequence: 2, ..Shape::default() };
    let mut ranks = ranks(shape, inbox + results);
    // Number of rows that a rank passes to the call (`given`), and number of rows that it receives.
    // In an all-gather, M is the number of rows of all ranks.
    let given = |rank: u32| match collective {
        Collective::AllGather => items.rows_sent(rank, 0),
        _ => rows,
    };
    let taken = |rank: u32| match collective {
        Collective::ReduceScatter => items.rows_sent(rank, rank),
        Collective::AllToAll => size * items.rows_sent(rank, rank),
        _ => rows,
    };
    let mut numbers = Numbers(u64::from(size) + 7);
    for call in 0..4 {
        let inputs: Vec<Vec<u32>> = (0..size)
            .map(|rank| {
                let mut data = message.room(given(rank));
                for (row, col) in (0..given(rank)).flat_map(|r| (0..cols).map(move |c| (r, c))) {
                    // Sums of these values are not exact, so the last bits of a sum depend on the
                    // order of additions.
                    let value = (numbers.below(1 << 20) as f32 - 524_288.0) * 1.37e-5;
                    let value = value * [1.0, 37.0, 1e3][numbers.below(3) as usize];
                    message.set(&mut data, row, col, value);
                }
                data
            })
            .collect();
        // From the third call on, sums also get a bias, like a message after a product.
        let mut bias = message.room(1);
        let has_bias = reduces && call >= 2;
        for col in 0..cols {
            message.set(&mut bias, 0, col, numbers.below(1 << 10) as f32 - 511.5);
        }
        let outputs: Vec<Vec<u32>> = (0..size).map(|rank| message.room(taken(rank))).collect();
        // In every second call with an RMSNorm, a residual is added too.
        let has_residual = message.norm && call % 2 == 0;
        let (mut residual, mut weight) = (message.room(rows), message.room(1));
        for (row, col) in (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))) {
            message.set(&mut residual, row, col, numbers.below(1 << 12) as f32 * 0.013 - 26.0);
            message.set(&mut weight, 0, col, numbers.below(1 << 8) as f32 * 0.01 - 1.0);
        }
        let norms: Vec<Vec<u32>> = (0..size).map(|rank| message.room(taken(rank))).collect();
        let args: Vec<OpArgs> = (0..size)
            .map(|rank| {
                let mut args = arguments(&mut ranks, rank, shape);
                args.record.fields[2] = rows as i32;
                args.record.fields[3] = call % 2;
                args.a = message.matrix(&inputs[rank as usize], given(rank));
                args.c = message.matrix(&outputs[rank as usize], taken(rank));
                if has_bias {
                    args.bias = message.matrix(&bias, 1);
                }
                if message.norm {
                    args.epsilon = EPSILON;
                    args.weight = message.matrix(&weight, 1);
                    args.normed = message.matrix(&norms[rank as usize], rows);
                }
                if has_residual {
                    args.residual = message.matrix(&residual, rows);
                }
                (args.m, args.n, args.wire) = (rows, cols, message.wire);
                args.epilogue = if message.gelu { epilogue::GELU } else { 0 };
                (args.tile_m, args.tile_n, args.max_tiles) = (tile_m, tile_n, tiles);
                (args.slot, args.sources, args.producer) = (slot, size, producer::LOAD);
                (args.results, args.result_slot, args.max_results) = (inbox, slot, tiles);
                args.root = 1;
                // In every second call, one of a rank's workgroups is a dedicated sender.
                args.dedicated_workgroups = u32::from(call % 2 == 1);
                args
            })
            .collect();
        // The ranks launch different numbers of workgroups: 2, 1, 3, 2, and so on.
        for &run in launches {
            std::thread::scope(|scope| {
                for (args, groups) in args.iter().zip([2, 1, 3].into_iter().cycle()) {
                    for group in 0..groups {
                        scope.spawn(move || run(args, group, groups));
                    }
                }
            });
        }
        for rank in 0..size {
            let at = |from: u32, row, col| message.bits(&inputs[from as usize], row, col);
            let sum = |row, col| {
                let wire = |value| value_of(message.wire, rounded(message.wire, value));
                let parts = (0..size).map(|from| wire(message.value(at(from, row, col))));
                let sum = parts.reduce(|a, b| a + b).expect("a rank");
                if has_bias { sum + message.value(message.bits(&bias, 0, col)) } else { sum }
            };
            let wide = cols + message.gap;
            for (row, col) in (0..=taken(rank)).flat_map(|r| (0..wide).map(move |c| (r, c))) {
                let seen = message.bits(&outputs[rank as usize], row, col);
                let added = |at: f32| match has_residual {
                    true => at + message.value(message.bits(&residual, row, col)),
                    false => at,
                };
                let is_sum = |sum| message.is_result(seen, sum, added);
                let right = match collective {
                    _ if message.is_outside(taken(rank), row, col) => {
                        seen == if dtype == 0 { u32::MAX } else { 0xffff }
                    }
                    Collective::AllReduce => is_sum(sum(row, col)),
                    Collective::ReduceScatter => is_sum(sum(items.source_row(rank) + row, col)),
                    Collective::AllGather => {
                        let from = part_of(rows, size, row);
                        seen == at(from, row - items.target_row(from, rank), col)
                    }
                    Collective::AllToAll => {
                        let part = items.rows_sent(0, rank);
                        seen == at(row / part, items.source_row(rank) + row % part, col)
                    }
                    Collective::Broadcast { root } | Collective::TwoShot { root: Some(root) } => {
                        seen == at(root, row, col)
                    }
                    Collective::TwoShot { root: None } => is_sum(sum(row, col)),
                };
                assert!(
                    right,
                    "{collective:?} of {message:?}, {size} ranks, call {call}: {seen:#x} in ({row}, {col}) at {rank}"
                );
                if !message.norm {
                    continue;
                }
                let normed = message.bits(&norms[rank as usize], row, col);
                let output = &outputs[rank as usize];
                let right = if message.is_outside(rows, row, col) {
                    normed == if dtype == 0 { u32::MAX } else { 0xffff }
                } else {
                    let all = (0..cols).map(|col| message.bits(output, row, col));
                    message.is_normed(normed, seen, all, message.bits(&weight, 0, col))
                };
                assert!(
                    right,
                    "normed {normed:#x} of {seen:#x} in ({row}, {col}) at {rank}, {message:?}"
                );
            }
            if message.norm {
                assert_eq!(norms[rank as usize], norms[0], "bits at {rank}, {message:?}");
            }
        }
    }
    for rank in &ranks {
        assert_eq!((rank.control.fault_claim, rank.device[0]), (0, FIRST_CALL + 4));
    }
}
