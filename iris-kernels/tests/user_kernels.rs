//! Users' kernels on a GPU: every remote access of `iris/sym.h` and `iris/sync.h`, with the results
//! compared on the host. Without a GPU the tests are ignored; the source is compiled where NVRTC is.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use bytemuck::{Pod, bytes_of};
use iris_heap::abi::SliceView;
use iris_heap::{
    BackendKind, Element, Error, HeapOptions, Settings, SymSlice, SymmetricHeap, World, cuda,
};
use iris_kernels::UserKernel;
use iris_kernels::rtc::{self, Compiler, KernelSource, LANES, Options};
use iris_testkit::harness::{self, Group, named};

const SOURCE: KernelSource<'_> =
    KernelSource { name: "user_kernels.cu", text: include_str!("user_kernels.cu") };

fn main() -> ExitCode {
    let no_compiler = match Compiler::nvrtc() {
        Err(error @ rtc::Error::NotFound { .. }) => Some(error.to_string()),
        _ => None,
    };
    harness::run(vec![
        Group::new(no_compiler, named![the_source_compiles]),
        Group::new(
            harness::no_gpu(),
            named![
                words_of_both_widths,
                nothing_is_lost_among_all_lanes,
                copies_of_every_width_length_and_alignment,
                a_wait_in_vain_ends,
                launches_that_do_not_fit_are_refused,
            ],
        ),
    ])
}

fn the_source_compiles() {
    for arch in ["sm_80", "sm_90a"] {
        let code = Compiler::nvrtc().unwrap().compile(SOURCE, &Options::new(), arch);
        assert!(code.unwrap_or_else(|error| panic!("{error}")).starts_with(b"\x7fELF"));
    }
}

/// Worlds of two and three ranks, and of one a device if there are more.
fn worlds(rank: impl Fn(World) -> Result<(), Error> + Send + Sync + Copy) {
    let devices = cuda::device_count().unwrap();
    for size in [2, 3].into_iter().chain((devices > 3).then_some(devices)) {
        World::run_threads(size, rank).unwrap();
    }
}

fn open(world: &World) -> Result<std::sync::Arc<SymmetricHeap>, Error> {
    let options = HeapOptions::new().backend(BackendKind::Cuda).data_bytes(16 << 20);
    SymmetricHeap::open(world, options)
}

fn kernel(heap: &SymmetricHeap, name: &str) -> Result<UserKernel, Error> {
    UserKernel::new(heap, SOURCE, &Options::new(), name, (LANES, 0))
}

/// Launch behind the heap's view, and wait.
fn call(
    heap: &SymmetricHeap,
    kernel: &UserKernel,
    groups: u32,
    args: &[&[u8]],
) -> Result<(), Error> {
    let stream = heap.stream()?;
    let view = heap.view();
    let args = [&[bytes_of(&view)], args].concat();
    // SAFETY: the tests give each kernel its parameters, and the heap lives until the end.
    unsafe { kernel.launch(&stream, groups, &args)? };
    stream.sync()
}

/// The words before the kernel `operate`, at the rank behind `rank`.
fn before(rank: usize, wide: i64) -> Vec<i64> {
    (0..16).map(|i| (i * 321 + rank as i64 * 50 - 2000) ^ ((i % 3) * wide)).collect()
}

/// The words after it, and what it saw.
fn after(before: &[i64], wide: i64) -> (Vec<i64>, Vec<i64>) {
    let mut words = before.to_vec();
    let mask = 0x0ff0 | wide;
    let new = [
        -7 + wide,
        9,
        before[4].wrapping_add(100 + wide),
        before[5] - 100,
        -3 - wide,
        77 + wide,
        before[8],
        before[9] & mask,
        before[10] | mask,
        before[11] ^ mask,
        before[12].min(-1000 - wide),
        before[13].min(1000 + wide),
        before[14].max(-1000 - wide),
        before[15].max(1000 + wide),
    ];
    words[2..].copy_from_slice(&new);
    let mut old = before.to_vec();
    // Stores give no old value.
    (old[2], old[3]) = (0, 0);
    (words, old)
}

trait Word: Element + Pod + PartialEq + std::fmt::Debug {
    const WIDE: i64;
    fn of(value: i64) -> Self;
}

impl Word for i32 {
    const WIDE: i64 = 0;
    fn of(value: i64) -> i32 {
        i32::try_from(value).unwrap()
    }
}

impl Word for i64 {
    const WIDE: i64 = 1 << 60;
    fn of(value: i64) -> i64 {
        value
    }
}

fn words<T: Word>(world: &World, heap: &SymmetricHeap, name: &str) -> Result<(), Error> {
    let (rank, size) = (world.rank(), world.size());
    let all = |values: Vec<i64>| values.into_iter().map(T::of).collect::<Vec<_>>();
    let (words, old) = (heap.alloc::<T>(16)?, heap.zeros::<T>(16)?);
    // The rank before this one operates here.
    let mine = before((rank + size - 1) % size, T::WIDE);
    heap.write(words, &all(mine.clone()))?;
    let operate = kernel(heap, name)?;
    world.barrier()?;
    let slices = [heap.slice_view(words)?, heap.slice_view(old)?];
    call(heap, &operate, 1, &slices.each_ref().map(bytes_of))?;
    world.barrier()?;
    assert_eq!(heap.read(words)?, all(after(&mine, T::WIDE).0), "{name}, words at {rank}");
    let (_, seen) = after(&before(rank, T::WIDE), T::WIDE);
    assert_eq!(heap.read(old)?, all(seen), "{name}, old values at {rank}");
    Ok(())
}

fn words_of_both_widths() {
    worlds(|world| {
        let heap = open(&world)?;
        words::<i32>(&world, &heap, "operate_i32")?;
        words::<i64>(&world, &heap, "operate_i64")?;
        heap.close()
    });
}

fn contended<T: Word>(world: &World, heap: &SymmetricHeap, name: &str) -> Result<(), Error> {
    const GROUPS: u32 = 4;
    let (words, sums) = (heap.alloc::<T>(7)?, heap.zeros::<f32>(1)?);
    heap.write(words, &[0, 0, 0, 0, -1, 0, 0].map(T::of))?;
    let contend = kernel(heap, name)?;
    world.barrier()?;
    let slices = [heap.slice_view(words)?, heap.slice_view(sums)?];
    call(heap, &contend, GROUPS, &slices.each_ref().map(bytes_of))?;
    world.barrier()?;
    if world.rank() == 0 {
        let count = i64::from(GROUPS * LANES) * world.size() as i64;
        let bits = (1 << 30) - 1;
        let xor = (0..count).fold(0, |all, number| all ^ number);
        let wanted = [count, count - 1, 1 - count, bits, !bits, xor, count];
        assert_eq!(heap.read(words)?, wanted.map(T::of), "{name}");
        assert_eq!(heap.read(sums)?, [count as f32 / 2.0], "{name}");
    }
    world.barrier()
}

fn nothing_is_lost_among_all_lanes() {
    worlds(|world| {
        let heap = open(&world)?;
        for _ in 0..10 {
            contended::<i32>(&world, &heap, "contend_i32")?;
            contended::<i64>(&world, &heap, "contend_i64")?;
        }
        heap.close()
    });
}

/// Where to, where from and how many elements of `width` bytes; and the bytes that this takes.
fn cases(width: usize) -> (Vec<[u32; 3]>, usize) {
    // The last is long enough for four vectors of a lane at a time, and odd.
    let lengths = [0, 1, 2, 3, 7, 8, 15, 17, 63, 255, 1023, 17_700 / width + 1];
    let (mut cases, mut end) = (Vec::new(), 0);
    for count in lengths {
        for to in [0, 1, 5] {
            for from in [0, 1, 3] {
                let first = end / width;
                cases.push([first + to, first + from, count].map(|n| n as u32));
                end += ((count + 8) * width).next_multiple_of(16);
            }
        }
    }
    (cases, end)
}

/// A byte of what a rank has.
fn byte(rank: usize, at: usize) -> u8 {
    (at.wrapping_mul(167) ^ at >> 8 ^ rank.wrapping_mul(91)) as u8
}

fn copied(world: &World, heap: &SymmetricHeap, width: usize) -> Result<(), Error> {
    const POISON: u8 = 0xee;
    let (rank, size) = (world.rank(), world.size());
    let (cases, bytes) = cases(width);
    let slices: Vec<SymSlice<u8>> = (0..3).map(|_| heap.alloc(bytes)).collect::<Result<_, _>>()?;
    let [to, from, seen] = slices[..] else { unreachable!("there are three") };
    let table = heap.alloc::<u32>(3 * cases.len())?;
    let words = heap.alloc_signal(cases.len())?;
    heap.write(table, cases.as_flattened())?;
    heap.write(from, &(0..bytes).map(|at| byte(rank, at)).collect::<Vec<_>>())?;
    let copies = kernel(heap, &format!("copies_{width}"))?;
    let view =
        |slice: &SymSlice<u8>| SliceView { offset: slice.offset(), len: (bytes / width) as u64 };
    let views = slices.iter().map(view).collect::<Vec<_>>();
    for (mode, source) in [size - 1, 1, 2, size - 1, size - 1].into_iter().enumerate() {
        for poisoned in [to, seen] {
            heap.write(poisoned, &vec![POISON; bytes])?;
        }
        heap.write(words, &vec![0; cases.len()])?;
        world.barrier()?;
        let numbers = [mode as u32, (words.offset() / 4) as u32];
        let (table, [mode_arg, word]) = (heap.slice_view(table)?, numbers.each_ref().map(bytes_of));
        let [a, b, c] = [0, 1, 2].map(|i| bytes_of(&views[i]));
        call(heap, &copies, 3, &[a, b, c, bytes_of(&table), mode_arg, word])?;
        world.barrier()?;
        let mut wanted = vec![POISON; bytes];
        for [to, from, count] in cases.iter().map(|case| case.map(|n| n as usize * width)) {
            for at in 0..count {
                wanted[to + at] = byte((rank + source) % size, from + at);
            }
        }
        let compare = |slice, what| {
            let got = heap.read(slice)?;
            let wrong = got.iter().zip(&wanted).position(|(got, wanted)| got != wanted);
            assert_eq!(wrong, None, "{what} of width {width}, mode {mode}, rank {rank} of {size}");
            Ok::<_, Error>(())
        };
        compare(to, "target")?;
        if mode >= 3 {
            compare(seen, "what was seen after the wait")?;
        }
        world.barrier()?;
    }
    slices.into_iter().try_for_each(|slice| heap.free(slice))?;
    heap.free(words)
}

fn copies_of_every_width_length_and_alignment() {
    worlds(|world| {
        let heap = open(&world)?;
        [2, 4, 8, 16].into_iter().try_for_each(|width| copied(&world, &heap, width))?;
        heap.close()
    });
}

fn a_wait_in_vain_ends() {
    let settings = Settings::default().deadline(0.01);
    let each = World::run_threads_each(2, &settings, |world| {
        let heap = open(&world)?;
        let words = heap.alloc_signal(1)?;
        heap.write(words, &[0])?;
        let kernel = kernel(&heap, "wait_in_vain")?;
        world.barrier()?;
        if world.rank() == 0 {
            let (begun, word) = (Instant::now(), (words.offset() / 4) as u32);
            let error = call(&heap, &kernel, 1, &[bytes_of(&word)]).unwrap_err().to_string();
            assert!(error.contains("saw 0, wanted 1000"), "{error}");
            assert!(begun.elapsed() < Duration::from_secs(20));
            assert_eq!(heap.read(words)?, [0]);
        }
        world.barrier()?;
        assert!(heap.check().is_err(), "rank {} was not told", world.rank());
        heap.close()
    });
    each.unwrap().into_iter().collect::<Result<Vec<_>, _>>().unwrap();
}

fn launches_that_do_not_fit_are_refused() {
    worlds(|world| {
        let heap = open(&world)?;
        let kernel = kernel(&heap, "operate_i32")?;
        for groups in [0, kernel.resident() + 1] {
            let error = call(&heap, &kernel, groups, &[]).unwrap_err().to_string();
            assert!(error.contains("operate_i32"), "{error}");
        }
        heap.close()
    });
}
