//! Figures of a kind of GPU, which the rules go by: measured on one, or reckoned from its data sheet.

use std::ops::Range;

use iris_heap::BackendKind;

use crate::device::Device;
use crate::kind::Op;

/// Figures of one GPU.
pub(super) struct Figures {
    /// Word in the name of that GPU, which tells it from the others that it stands in for.
    pub of: &'static str,
    /// Most workgroups of a message, if fewer fill the links than there are multiprocessors; odd, so that tiles whose
    /// owners take turns fall to all workgroups alike. `None` for one workgroup on each multiprocessor.
    pub message_groups: Option<u32>,
    /// Results of up to so many bytes are pushed to everybody rather than reduced by an owner.
    pub one_shot_bytes: usize,
    /// The same of two ranks, of which each has one peer: `one_shot` sends no byte twice.
    pub one_shot_bytes_of_two: usize,
    /// Messages of a root of so many bytes and more, of more than two ranks, go to each of the others in
    /// part, and these pass them on.
    pub relayed_bytes: usize,
    /// Messages of up to so many bytes from one rank to another go in words that carry their data, by
    /// operator, in a world of two ranks and in one of four; in others nobody has measured them. Where they
    /// are the quickest, by `iris bench`, write the largest size here, with device, commit and date.
    pub words: &'static [(Op, [usize; 2])],
    /// How many times larger they may be where rows are normalised, in either world.
    pub words_of_norms: [usize; 2],
    /// Threads of a workgroup of such a message of so many items and fewer, the fewest items first; of more
    /// there are as many as the kernel is built for.
    pub threads_of_words: &'static [(usize, u32)],
    /// Threads of a workgroup of a message that is reduced in tiles, likewise by its bytes.
    pub threads_of_sums: &'static [(usize, u32)],
    /// Of messages of so many bytes, between two ranks, that are summed by the owners of their tiles, so many eighths
    /// of the workgroups only send: where sums go to all, and where they stay.
    pub senders_to_all: (Range<usize>, u32),
    pub senders_to_owners: (Range<usize>, u32),
    /// The same of messages of which each rank sends a part, which is not summed.
    pub senders_of_parts: (Range<usize>, u32),
    /// Elements of a sum up to which its tiles have a vector for every other thread.
    pub spread_sums: usize,
    /// Products with messages of which one rank sends another so many bytes or more take copy engines: of two
    /// ranks, and of more.
    pub copied: &'static [(Op, [usize; 2])],
    /// Those whose products store to others themselves, likewise, where there are such products.
    pub stored: &'static [(Op, [usize; 2])],
    /// The same where rows are normalised.
    pub stored_of_norms: &'static [(Op, [usize; 2])],
}

/// Of an H200, which other GPUs of NVIDIA's are taken for.
const H200: Figures = Figures {
    of: "H200",
    // On 2 x H200 a reduce-scatter of 128 MiB took 241 us on 131 workgroups and 289 on 65, an all-gather
    // 202 and 215 with larger tiles (2026-11-22).
    message_groups: None,
    // On 4 x H200 an all-reduce of 1 MiB took 19.2 us by one_shot, 20.1 by two_shot; of 4 MiB 47.1 and
    // 32.5; behind a product 39.6 and 40.0 for 1 MiB, 50.7 and 44.8 for 2 MiB (commit 5270d58,
    // 2026-11-22).
    one_shot_bytes: 1 << 20,
    // On 2 x H200 it took 21.9 us for 4 MiB, two_shot 25.4; 66.5 and 65.1 for 16 MiB, 430 and 397 for 128
    // MiB; behind a product, 76.2 and 79.4 for 8 MiB, 287 and 274 for 32 MiB (commit 780ce29, 2026-11-22).
    one_shot_bytes_of_two: 8 << 20,
    // On 4 x H200 (2026-11-22) a broadcast of 1 MiB took 19.7 us so and 17.3 by `push`, of 4 MiB 35.5 and
    // 42.9, of 128 MiB 440 and 1101. Sizes up to a power of two are done alike.
    relayed_bytes: 2 << 20,
    // On 2 x H200 (commit 780ce29, 2026-11-22) they were the quickest of ours at all sizes from 8 KiB to 1
    // MiB of the whole message: an all_reduce took 5.3 to 12.2 us where `one_shot` took 8.8 to 11.8 and
    // NCCL 6.9 to 14.1; behind a product 5 us less than `one_shot` for 16 and 256 KiB, 1 us for 1 MiB. On
    // 4 x H200 (5270d58) an all_reduce of 256 KiB took 10.8 us by them and 12.0 by `one_shot`, of 1 MiB
    // 27.7 and 19.2. On 2 x H200 a reduce_scatter of 2 MiB of the whole took 11.7 us by them, 13.1 by `push` (057d0b9+).
    words: &[
        (Op::MatmulAllReduce, [1 << 20, 256 << 10]),
        (Op::AllReduce, [1 << 20, 256 << 10]),
        (Op::AllGather, [512 << 10, 256 << 10]),
        (Op::ReduceScatter, [1 << 20, 256 << 10]),
        (Op::AllToAll, [512 << 10, 256 << 10]),
        (Op::Broadcast, [1 << 20, 256 << 10]),
    ],
    // On 2 x H200 (2026-11-22) 96 and 128 rows of 8192 columns with a residual took 14.8 and 17.7 us so, 18.8 and 21.1
    // by one_shot.
    words_of_norms: [2, 1],
    // On 2 x H200 (commit 8b5846e, 2026-11-22), with 128, 256 and 512 threads: 512 items of an all_gather took
    // 4.34, 4.43 and 4.73 us, 1024 of an all_reduce 4.24, 4.26 and 4.51, 16384 of an all_gather 5.41, 5.21 and
    // 5.32, of a reduce_scatter 5.53, 5.14 and 5.43, 32768 of an all_reduce 6.33, 6.12 and 5.99.
    threads_of_words: &[(1 << 10, 128), (1 << 14, 256)],
    // Likewise an all_reduce of 4 MiB took 25.1 us with 256 threads, 26.1 with 384 and 26.8 with 512, of 16 MiB
    // 65.0, 65.8 and 66.9, of 32 MiB 119.8, 120.0 and 119.3; a reduce_scatter of 4 MiB 17.9 and 18.9.
    threads_of_sums: &[(16 << 20, 256)],
    // On 2 x H200 (2026-11-23) an all_reduce of 16 MiB took 65.5 us where all send and add up, 60.5 with 48 of 131 that
    // only send, 60.2 with 64, 74.2 with 80; of 64 MiB 215.6, 214, 205.6 and 219.5; of 128 MiB 398, 407, 401 and
    // 423. A reduce_scatter of 16 MiB 40.7, 41.8, 44.3 and 52.6; of 64 MiB 129, 122, 126 and 140; of 128 MiB 238,
    // 220, 230 and 247.
    senders_to_all: (16 << 20..128 << 20, 4),
    senders_to_owners: (64 << 20..usize::MAX, 3),
    // Likewise an all_gather of 16 MiB took 32.0 us where all send and take, 33.6 with three eighths that only send, 33.2 with four;
    // of 32 MiB 56.9, 57.0 and 56.4, of 64 MiB 109.4, 105.5 and 102.9, of 128 MiB 202.6, 200.6 and 196.9, with five 203.4.
    senders_of_parts: (32 << 20..usize::MAX, 4),
    // On 2 x H200 (2348345, 2026-11-23) an all_reduce of 64 KiB by `one_shot` took 8.28, 8.46 and 9.03 us with tiles of 1024, 2048
    // and 4096 elements, of 32 KiB 8.26, 8.38 and 8.82, of 256 KiB 8.94, 8.79 and 9.38.
    spread_sums: 32 << 10,
    // On 2 and on 4 x H200 (2026-11-22), beside `unfused`: a reduce-scatter of 4 MiB to each peer took 67 us
    // and 68 on two, 126 and 145 on four, of 2 MiB 100 and 81 on four; an all-reduce of 8 MiB 143 and 146 on
    // two, 310 and 316 on four, of 4 MiB 93 and 78, 201 and 173; an all-gather in front of a product of 8 MiB
    // 205 and 208 on two, of 16 MiB 780 and 808 on four, of 4 MiB 221 and 217; one behind a product of 16 MiB
    // 134 and 144 on two, of 8 MiB 89 and 72, of 32 MiB 428 and 459 on four, of 16 MiB more than 240.
    copied: &[
        (Op::MatmulReduceScatter, [4 << 20, 4 << 20]),
        (Op::MatmulAllReduce, [8 << 20, 16 << 20]),
        (Op::AllGatherMatmul, [8 << 20, 8 << 20]),
        (Op::MatmulAllGather, [16 << 20, 32 << 20]),
    ],
    // On 2 x H200 (2026-11-22), beside the best of the others: a reduce-scatter of 4 MiB took 65 us and 67, of 64
    // MiB 691 and 741; an all-reduce of 8 MiB 120 and 145, of 4 MiB 81 and 76; an all-gather of 16 MiB 120 and
    // 134, of 8 MiB 77 and 73.
    stored: &[
        (Op::MatmulReduceScatter, [4 << 20, usize::MAX]),
        (Op::MatmulAllReduce, [8 << 20, usize::MAX]),
        (Op::MatmulAllGather, [16 << 20, usize::MAX]),
    ],
    // On 2 x H200 (6f90704, 2026-11-23), beside `unfused_one_shot`, of 8192 columns and a K of 3584: 512 rows took 81.7 us
    // and 90.5, 384 rows 76.9 and 73.8.
    stored_of_norms: &[(Op::MatmulAllReduce, [4 << 20, usize::MAX])],
};

/// Of an MI300X, which other GPUs of AMD's are taken for: reckoned, since nobody has measured on one. It has
/// 304 compute units, and to each of seven peers a link of 48 GB/s, which no other peer's bytes can take.
const MI300X: Figures = Figures {
    of: "MI300X",
    // Seven links are busy while what they carry in the time of a way there and back, some 3 us, is under
    // way: 1 MB. A workgroup has 32 KiB of stores in flight: 32 of them do; twice as many hide that not
    // all push at the same time.
    message_groups: Some(65),
    // Of four ranks one_shot sends a peer all of a result, two_shot twice a quarter: half of it more, at
    // 48 GB/s, against a second hop of some 5 us, which is 480 KB; of eight three quarters, 320 KB.
    one_shot_bytes: 256 << 10,
    // It sends a peer no more bytes than two_shot; its sums are done twice, and read no link.
    one_shot_bytes_of_two: 8 << 20,
    // Of four ranks a link carries a third of a message at most twice, of eight a seventh, and not all of it:
    // against a second hop of some 5 us at 48 GB/s that is 720 KB, and 340 KB.
    relayed_bytes: 1 << 20,
    // Not before they were measured: only by name.
    words: &[],
    words_of_norms: [1, 1],
    threads_of_words: &[],
    threads_of_sums: &[],
    senders_to_all: (0..0, 0),
    senders_to_owners: (0..0, 0),
    senders_of_parts: (0..0, 0),
    spread_sums: 0,
    copied: &[],
    stored: &[],
    stored_of_norms: &[],
};

impl Figures {
    /// Whether they are another GPU's and stand in for those of `device`, which nobody has measured.
    pub(super) fn stand_in_for(&self, device: Device) -> bool {
        device.name.split_whitespace().all(|word| word != self.of)
    }
}

/// Figures for plans on a device; `None` for hosts, and for a backend that nothing is known of.
pub(super) fn of(device: Device) -> Option<&'static Figures> {
    match device.backend {
        BackendKind::Cuda => Some(&H200),
        BackendKind::Hip => Some(&MI300X),
        _ => None,
    }
}
