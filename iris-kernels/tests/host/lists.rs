//! Tests of gathers of a list of tensors: the Rust kernel, and the device source compiled for the host.

use iris_kernels::Kernel;
use iris_kernels::args::{ListTensor, MOST_TENSORS, OpArgs};
use iris_kernels::schedule::{Collective, Items, split};
use iris_sync::Shape;

use super::forms::{Run, in_each_form};
use super::messages::{FIRST_CALL, arguments, ranks};
use super::{Numbers, library};

/// Tensor to be tested, in bytes: length of a row, gap behind each row of input and output, and
/// distance of both from an address that is a multiple of 16.
type Tensor = (u64, [u64; 2], u64);

/// Lists of tensors whose rows are whole words, and of tensors with parts, gaps and addresses that
/// are multiples of 4, 2 or 1 bytes only.
const LISTS: [&[Tensor]; 5] = [
    &[(64, [0, 0], 0), (32, [0, 0], 8), (8, [0, 8], 0), (16, [0, 0], 0)],
    &[(14, [0, 2], 2), (12, [4, 0], 4), (4, [0, 0], 4), (5, [1, 0], 3)],
    &[(2, [0, 6], 6), (28, [0, 4], 4)],
    &[(11, [2, 0], 1)],
    &[(0, [0, 0], 0), (48, [16, 0], 0), (0, [8, 0], 0), (6, [0, 0], 2)],
];

/// Tests worlds of 1 to 9 ranks, in which some ranks have no rows, and several calls of each, so that
/// both parities and a periodic refresh of words come up.
pub(super) fn lists_are_right_in_rust_and_as_device_source() {
    let options = ["-std=c++20", "-DIRIS_THREADS=4"];
    let sources = ["kernels/all_gather.cu", "tests/host/hooks.cpp"];
    let (library, _folder) = library(&sources, &options);
    let kernel = Kernel::AllGatherListLl;
    in_each_form(&library, (kernel, &format!("iris_{}", kernel.name())), |run| {
        for (size, rows) in [(1, 5), (2, 7), (2, 1), (3, 2), (4, 11), (5, 13), (9, 20)] {
            for list in LISTS {
                gather(size, rows, list, run);
            }
        }
    });
}

fn gather(size: u32, rows: u32, list: &[Tensor], run: &Run<'_>) {
    let row_items = list.iter().map(|(row, ..)| row.div_ceil(8) as u32).sum();
    let collective = Collective::AllGather;
    let items = Items { collective, size, rows, cols: row_items, per_item: 1 };
    // One rank has no words, as in a heap.
    let pairs = if size == 1 { 0 } else { items.most() };
    let shape = Shape { op: 3, size, pairs, sequence: 2, ..Shape::default() };
    let mut ranks = ranks(shape, 0);
    let mut numbers = Numbers(u64::from(size * 100 + rows));
    let calls = 3;
    for call in 0..calls {
        // Every tensor of every rank has memory of its own, aligned to 16 bytes, and all bytes are
        // random.
        let mut room = |rows: u32, (row, gaps, shift): Tensor, of: usize| -> Vec<u128> {
            let bytes = u64::from(rows) * (row + gaps[of]) + shift + 16;
            let mut word =
                || (0..8).fold(0, |all, _| all << 16 | u128::from(numbers.below(1 << 16)));
            (0..bytes.div_ceil(16)).map(|_| word()).collect()
        };
        let mut rooms = |of: usize, rows: &dyn Fn(u32) -> u32| -> Vec<Vec<Vec<u128>>> {
            let of_rank = |rank| list.iter().map(|&it| room(rows(rank), it, of)).collect();
            (0..size).map(of_rank).collect()
        };
        let own = |rank| split(rows, size, rank);
        let inputs = rooms(0, &|rank| own(rank).len() as u32);
        let outputs = rooms(1, &|_| rows);
        let mut expected = outputs.clone();
        let args: Vec<OpArgs> = (0..size)
            .map(|rank| {
                let mut args = arguments(&mut ranks, rank, shape);
                args.record.fields[3] = call;
                args.m = rows;
                let mut tensors = [ListTensor::default(); MOST_TENSORS];
                for (at, &(row, gaps, shift)) in list.iter().enumerate() {
                    tensors[at] = ListTensor {
                        from: inputs[rank as usize][at].as_ptr() as u64 + shift,
                        from_pitch: row + gaps[0],
                        to: outputs[rank as usize][at].as_ptr() as u64 + shift,
                        to_pitch: row + gaps[1],
                        row,
                    };
                }
                args.list = tensors;
                args
            })
            .collect();
        for (to, (at, &(row, gaps, shift))) in
            (0..size).flat_map(|to| list.iter().enumerate().map(move |it| (to, it)))
        {
            let expected: &mut [u8] = bytemuck::cast_slice_mut(&mut expected[to as usize][at]);
            for (from, index) in (0..size).flat_map(|from| own(from).map(move |row| (from, row))) {
                let given: &[u8] = bytemuck::cast_slice(&inputs[from as usize][at]);
                let [source, target] = [(index - own(from).start, gaps[0]), (index, gaps[1])]
                    .map(|(index, gap)| (u64::from(index) * (row + gap) + shift) as usize);
                let row = row as usize;
                expected[target..target + row].copy_from_slice(&given[source..source + row]);
            }
        }
        // The ranks launch different numbers of workgroups: 2, 1, 3, 2, and so on.
        std::thread::scope(|scope| {
            for (args, groups) in args.iter().zip([2, 1, 3].into_iter().cycle()) {
                for group in 0..groups {
                    scope.spawn(move || run(args, group, groups));
                }
            }
        });
        for (rank, (seen, expected)) in outputs.iter().zip(&expected).enumerate() {
            for (at, (seen, expected)) in seen.iter().zip(expected).enumerate() {
                assert!(
                    seen == expected,
                    "tensor {at} of {list:?} at {rank} of {size} ranks with {rows} rows, call {call}"
                );
            }
        }
    }
    let ended = if size == 1 { FIRST_CALL } else { FIRST_CALL + calls };
    for rank in &ranks {
        assert_eq!((rank.control.fault_claim, rank.device[0]), (0, ended));
    }
}
