//! Tests of sums of weighted parts: the Rust kernel, and the device source compiled for the host, bit
//! by bit.

use iris_kernels::Kernel;
use iris_kernels::args::{Matrix, OpArgs, producer};
use iris_kernels::schedule::{Collective, Items};
use iris_sync::Shape;

use super::Numbers;
use super::forms::{Run, in_each_form};
use super::messages::{EPSILON, FIRST_CALL, arguments, kernels, ranks, rounded, value_of};

/// Message to be tested: element type, type of transferred sums, rows, columns, number of parts, gap
/// behind each row in elements, number of matrices that are added, and whether an RMSNorm follows.
#[derive(Clone, Copy, Debug)]
struct Message {
    dtype: u32,
    wire: u32,
    rows: u32,
    cols: u32,
    parts: u32,
    gap: u32,
    added: usize,
    norm: bool,
}

/// Row-major matrix in memory of its own, with a gap behind each row; elements of gaps are NaN.
#[derive(Clone, PartialEq)]
struct Room {
    data: Vec<u128>,
    dtype: u32,
    rows: u32,
    cols: u32,
    ld: u32,
}

impl Room {
    fn new(dtype: u32, (rows, cols): (u32, u32), gap: u32) -> Self {
        let ld = cols + gap;
        let bytes = (rows + 1) * ld * if dtype == 0 { 4 } else { 2 };
        Self { data: vec![u128::MAX; bytes.div_ceil(16) as usize], dtype, rows, cols, ld }
    }

    fn matrix(&self) -> Matrix {
        let Self { dtype, rows, cols, ref data, ld } = *self;
        Matrix { address: data.as_ptr() as u64, ld: ld.into(), rows, cols, dtype, transposed: 0 }
    }

    fn set(&mut self, row: u32, col: u32, value: f32) {
        let at = (row * self.ld + col) as usize;
        let bits = rounded(self.dtype, value);
        match self.dtype {
            0 => bytemuck::cast_slice_mut(&mut self.data)[at] = bits,
            _ => bytemuck::cast_slice_mut::<_, u16>(&mut self.data)[at] = bits as u16,
        }
    }

    fn get(&self, row: u32, col: u32) -> f32 {
        let at = (row * self.ld + col) as usize;
        let bits = match self.dtype {
            0 => bytemuck::cast_slice(&self.data)[at],
            _ => bytemuck::cast_slice::<_, u16>(&self.data)[at].into(),
        };
        value_of(self.dtype, bits)
    }

    fn fill(mut self, mut value: impl FnMut() -> f32) -> Self {
        let (rows, cols) = (self.rows, self.cols);
        for (row, col) in (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))) {
            self.set(row, col, value());
        }
        self
    }
}

/// Tests worlds of 1 to 9 ranks, in which some ranks own no rows, and several calls of each.
pub(super) fn weighted_parts_are_summed_in_rust_and_as_device_source() {
    let library = kernels();
    let plain =
        Message { dtype: 2, wire: 2, rows: 7, cols: 16, parts: 8, gap: 0, added: 2, norm: false };
    let messages = [
        plain,
        // Items that begin in one row and end in another, gaps, and other types on the wire.
        Message { cols: 7, parts: 3, added: 0, ..plain },
        Message { dtype: 1, wire: 0, cols: 10, parts: 5, gap: 3, added: 1, ..plain },
        Message { dtype: 0, wire: 2, cols: 6, parts: 1, gap: 1, rows: 11, ..plain },
        Message { dtype: 0, wire: 0, cols: 12, parts: 2, gap: 4, ..plain },
        // Rows of vectors that a thread holds in registers, of more vectors, and of items.
        Message { norm: true, ..plain },
        Message { norm: true, cols: 88, gap: 8, parts: 7, added: 1, ..plain },
        Message { norm: true, dtype: 1, wire: 1, cols: 296, parts: 6, ..plain },
        Message { norm: true, dtype: 0, wire: 0, cols: 20, parts: 4, added: 0, ..plain },
        Message { norm: true, cols: 24, gap: 5, wire: 0, ..plain },
    ];
    for message in messages {
        let collectives = [
            (Kernel::OneShotCombineLl, Collective::AllReduce),
            (Kernel::ReduceScatterCombineLl, Collective::ReduceScatter),
        ];
        for (kernel, collective) in collectives.into_iter().take(if message.norm { 1 } else { 2 }) {
            let suffix = if message.norm { "_norm" } else { "" };
            let function = format!("iris_{}{suffix}", kernel.name());
            in_each_form(library, (kernel, &function), |run| {
                for size in [1, 2, 3, 5, 9] {
                    // With one rank the RMSNorm is a launch of its own.
                    if size > 1 || !message.norm {
                        sum(collective, size, message, run);
                    }
                }
            });
        }
    }
}

fn sum(collective: Collective, size: u32, message: Message, run: &Run<'_>) {
    let Message { dtype, wire, rows, cols, parts, gap, added, norm } = message;
    let per_item = if wire == 0 { 2 } else { 4 };
    let items = Items { collective, size, rows, cols, per_item };
    // One rank has no words, as in a heap.
    let pairs = if size == 1 { 0 } else { items.most() };
    let shape = Shape { op: 3, size, pairs, sequence: 2, ..Shape::default() };
    let mut ranks = ranks(shape, 0);
    let mut numbers = Numbers(u64::from(size * 1000 + rows * cols));
    let calls = 3;
    for call in 0..calls {
        let mut number = || (numbers.below(1 << 20) as f32 - 524_288.0) * 1.37e-5;
        let own = |rank| items.rows_sent(rank, rank);
        let mut rooms = |dtype, rows: &dyn Fn(u32) -> u32, cols| -> Vec<Room> {
            let of = |rank| Room::new(dtype, (rows(rank), cols), gap).fill(&mut number);
            (0..size).map(of).collect()
        };
        let inputs = rooms(dtype, &|_| rows, parts * cols);
        let weights = rooms(0, &|_| rows, parts);
        let summands = [rooms(dtype, &own, cols), rooms(dtype, &own, cols)];
        let scales = rooms(dtype, &|_| 1, cols);
        let results = || -> Vec<Room> {
            (0..size).map(|rank| Room::new(dtype, (own(rank), cols), gap)).collect()
        };
        let (outputs, norms) = (results(), results());
        let args: Vec<OpArgs> = (0..size)
            .map(|rank| {
                let (mut args, at) = (arguments(&mut ranks, rank, shape), rank as usize);
                args.record.fields[3] = call;
                (args.a, args.factors) = (inputs[at].matrix(), weights[at].matrix());
                args.c = outputs[at].matrix();
                if added > 0 {
                    args.residual = summands[0][at].matrix();
                }
                if added > 1 {
                    args.addend = summands[1][at].matrix();
                }
                if norm {
                    args.epsilon = EPSILON;
                    args.weight = scales[0].matrix();
                    args.normed = norms[at].matrix();
                }
                (args.m, args.n, args.wire, args.producer) = (rows, cols, wire, producer::LOAD);
                args
            })
            .collect();
        std::thread::scope(|scope| {
            for (args, groups) in args.iter().zip([2, 1, 3].into_iter().cycle()) {
                for group in 0..groups {
                    scope.spawn(move || run(args, group, groups));
                }
            }
        });
        for rank in 0..size {
            let at = rank as usize;
            let mut expected = Room::new(dtype, (own(rank), cols), gap);
            for (row, col) in (0..own(rank)).flat_map(|r| (0..cols).map(move |c| (r, c))) {
                let from = items.source_row(rank) + row;
                let sent = |source: usize| {
                    let part = |sum: f32, part| {
                        let value = inputs[source].get(from, part * cols + col);
                        weights[source].get(from, part).mul_add(value, sum)
                    };
                    value_of(wire, rounded(wire, (0..parts).fold(-0.0, part)))
                };
                let sum = (0..size as usize).fold(-0.0, |sum, source| sum + sent(source));
                let add = |sum, which: &Vec<Room>| sum + which[at].get(row, col);
                expected.set(row, col, summands[..added].iter().fold(sum, add));
            }
            let what = format!("{collective:?} of {message:?}, rank {rank} of {size}, call {call}");
            assert!(outputs[at] == expected, "{what}");
            let normed = &norms[at];
            if !norm {
                assert!(*normed == Room::new(dtype, (own(rank), cols), gap), "{what}");
                continue;
            }
            for row in 0..rows {
                let squares = (0..cols).map(|col| f64::from(outputs[at].get(row, col)).powi(2));
                let mean = squares.sum::<f64>() / f64::from(cols) + f64::from(EPSILON);
                for col in 0..cols {
                    let value = f64::from(outputs[at].get(row, col)) / mean.sqrt();
                    let wanted = value * f64::from(scales[0].get(0, col));
                    let seen = f64::from(normed.get(row, col));
                    let roundoff = [1e-6, 5e-4, 4e-3][dtype as usize];
                    assert!((seen - wanted).abs() <= roundoff * wanted.abs() + 3e-8, "{what}");
                }
            }
        }
    }
    let ended = if size == 1 { FIRST_CALL } else { FIRST_CALL + calls };
    for rank in &ranks {
        assert_eq!((rank.control.fault_claim, rank.device[0]), (0, ended));
    }
}
