//! Tests of users' kernels: every remote access of `iris/sym.h` and `iris/sync.h`, with results
//! compared on the host. The kernels run on a GPU, and as host code compiled by g++. Tests whose
//! GPU or compiler is missing are ignored. The source is also compiled for GPUs if NVRTC is
//! installed.

#![allow(unsafe_code, reason = "the launch of a kernel of the user's")]

use std::ffi::{CString, c_char};
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytemuck::{Pod, bytes_of};
use iris_heap::abi::SliceView;
use iris_heap::{
    BackendKind, Element, Error, HeapOptions, Settings, SymSlice, SymmetricHeap, World,
};
use iris_kernels::UserKernel;
use iris_kernels::gemm_config::THREADS;
use iris_kernels::rtc::{self, Compiler, KernelSource, Options};
use iris_testkit::harness::{self, Group, named};
use libloading::os::unix::{Library, RTLD_NOW};

const SOURCE: KernelSource<'_> =
    KernelSource { name: "user_kernels.cu", text: include_str!("user_kernels.cu") };

/// Device on which the kernels run: a GPU, or the host, for which g++ compiles them.
#[derive(Clone, Copy)]
enum On {
    Gpu,
    Host,
}

fn main() -> ExitCode {
    let no_compiler = match Compiler::nvrtc() {
        Err(error @ rtc::Error::NotFound { .. }) => Some(error.to_string()),
        _ => None,
    };
    harness::run(vec![
        Group::new(no_compiler, named![the_source_compiles]),
        Group::new(
            harness::no_program("g++"),
            named![
                words_of_both_widths_on_the_host,
                nothing_is_lost_among_all_threads_on_the_host,
                copies_of_every_width_length_and_alignment_on_the_host,
                a_rectangle_of_many_columns_is_copied_whole_on_the_host,
                a_wait_in_vain_ends_on_the_host,
            ],
        ),
        Group::new(
            harness::no_gpu(),
            named![
                words_of_both_widths,
                nothing_is_lost_among_all_threads,
                copies_of_every_width_length_and_alignment,
                a_rectangle_of_many_columns_is_copied_whole,
                a_wait_in_vain_ends,
                launches_that_do_not_fit_are_refused,
            ],
        ),
    ])
}

fn the_source_compiles() {
    for arch in ["sm_80", "sm_90a"] {
        let nvrtc = Compiler::nvrtc().unwrap();
        let code = harness::compiled_by(nvrtc, SOURCE, &Options::new(), arch);
        assert!(code.unwrap_or_else(|error| panic!("{error}")).starts_with(b"\x7fELF"));
    }
}

/// Number of threads per workgroup of kernels that run on the host.
const HOST_THREADS: u32 = 4;

type HostLaunch = unsafe extern "C" fn(*const c_char, *const *const u8, u32) -> bool;

/// Returns the function that launches the kernels as host code. The code is compiled at the first
/// call only.
fn host() -> HostLaunch {
    static LIBRARY: OnceLock<(Library, HostLaunch)> = OnceLock::new();
    let (_, launch) = LIBRARY.get_or_init(|| {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/host/user.cpp");
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("user.so");
        let threads = format!("-DIRIS_THREADS={HOST_THREADS}");
        harness::compile_for_host(["-shared", "-std=c++20", &threads, source], &file);
        // SAFETY: the library was built just now from this crate's sources, and has no
        // initialisers.
        let library = unsafe { Library::open(Some(&file), RTLD_NOW) }.unwrap();
        // SAFETY: user.cpp defines `user_launch` with this type.
        let launch = *unsafe { library.get::<HostLaunch>(b"user_launch") }.unwrap();
        (library, launch)
    });
    *launch
}

impl On {
    fn threads(self) -> u32 {
        match self {
            On::Gpu => THREADS,
            On::Host => HOST_THREADS,
        }
    }

    /// Runs the test function `rank` in worlds of two and of three ranks and, if there are more
    /// devices, in a world with one rank per device.
    fn worlds(self, rank: impl Fn(World) -> Result<(), Error> + Send + Sync + Copy) {
        let devices = match self {
            On::Gpu => BackendKind::Cuda.device_count().unwrap(),
            On::Host => 1,
        };
        for size in [2, 3].into_iter().chain((devices > 3).then_some(devices)) {
            World::run_threads(size, rank).unwrap();
        }
    }

    fn open(self, world: &World) -> Result<Arc<SymmetricHeap>, Error> {
        let backend = match self {
            On::Gpu => BackendKind::Cuda,
            On::Host => BackendKind::Cpu,
        };
        SymmetricHeap::open(world, HeapOptions::new().backend(backend).data_bytes(16 << 20))
    }

    fn kernel(self, heap: &SymmetricHeap, name: &str) -> Result<Kernel, Error> {
        match self {
            On::Gpu => Ok(Kernel::Gpu(gpu(heap, name)?)),
            On::Host => Ok(Kernel::Host(CString::new(name).unwrap())),
        }
    }
}

fn gpu(heap: &SymmetricHeap, name: &str) -> Result<UserKernel, Error> {
    UserKernel::new(heap, SOURCE, &Options::new(), name, (THREADS, 0))
}

enum Kernel {
    Gpu(UserKernel),
    Host(CString),
}

/// Launches a kernel with the heap's view as its first argument, and waits until it has ended.
fn call(heap: &SymmetricHeap, kernel: &Kernel, groups: u32, args: &[&[u8]]) -> Result<(), Error> {
    let view = heap.view();
    let args = [&[bytes_of(&view)], args].concat();
    match kernel {
        Kernel::Gpu(kernel) => {
            let stream = heap.stream()?;
            // SAFETY: the callers pass the parameters that the kernel declares, and the heap
            // outlives the launch.
            unsafe { kernel.launch(&stream, groups, &args)? };
            stream.sync()
        }
        Kernel::Host(name) => {
            let args: Vec<_> = args.iter().map(|bytes| bytes.as_ptr()).collect();
            // SAFETY: the callers pass the parameters that the kernel declares, aligned for their
            // types.
            assert!(unsafe { host()(name.as_ptr(), args.as_ptr(), groups) }, "no kernel {name:?}");
            heap.check()
        }
    }
}

/// Contents of the words on the rank after `rank`, before the kernel `operate` changes them.
fn before(rank: usize, wide: i64) -> Vec<i64> {
    (0..16).map(|i| (i * 321 + rank as i64 * 50 - 2000) ^ ((i % 3) * wide)).collect()
}

/// Expected contents of the words after the kernel `operate`, and the old values that its
/// operations return.
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
    // Operations 2 and 3 are stores, which return no old value.
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

fn words<T: Word>(on: On, world: &World, heap: &SymmetricHeap, name: &str) -> Result<(), Error> {
    let (rank, size) = (world.rank(), world.size());
    let all = |values: Vec<i64>| values.into_iter().map(T::of).collect::<Vec<_>>();
    let (words, old) = (heap.alloc::<T>(16)?, heap.zeros::<T>(16)?);
    // The kernel of the preceding rank changes the words of this rank.
    let mine = before((rank + size - 1) % size, T::WIDE);
    heap.write(words, &all(mine.clone()))?;
    let operate = on.kernel(heap, name)?;
    world.barrier()?;
    let slices = [heap.slice_view(words)?, heap.slice_view(old)?];
    call(heap, &operate, 1, &slices.each_ref().map(bytes_of))?;
    world.barrier()?;
    assert_eq!(heap.read(words)?, all(after(&mine, T::WIDE).0), "{name}, words at {rank}");
    let (_, seen) = after(&before(rank, T::WIDE), T::WIDE);
    assert_eq!(heap.read(old)?, all(seen), "{name}, old values at {rank}");
    Ok(())
}

fn all_words(on: On) {
    on.worlds(|world| {
        let heap = on.open(&world)?;
        words::<i32>(on, &world, &heap, "operate_i32")?;
        words::<i64>(on, &world, &heap, "operate_i64")?;
        heap.close()
    });
}

fn words_of_both_widths() {
    all_words(On::Gpu);
}

fn words_of_both_widths_on_the_host() {
    all_words(On::Host);
}

fn contended<T: Word>(
    on: On,
    world: &World,
    heap: &SymmetricHeap,
    name: &str,
) -> Result<(), Error> {
    const GROUPS: u32 = 4;
    let (words, sums) = (heap.alloc::<T>(7)?, heap.zeros::<f32>(1)?);
    heap.write(words, &[0, 0, 0, 0, -1, 0, 0].map(T::of))?;
    let contend = on.kernel(heap, name)?;
    world.barrier()?;
    let slices = [heap.slice_view(words)?, heap.slice_view(sums)?];
    call(heap, &contend, GROUPS, &slices.each_ref().map(bytes_of))?;
    world.barrier()?;
    if world.rank() == 0 {
        let count = i64::from(GROUPS * on.threads()) * world.size() as i64;
        let bits = (1 << 30) - 1;
        let xor = (0..count).fold(0, |all, number| all ^ number);
        let wanted = [count, count - 1, 1 - count, bits, !bits, xor, count];
        assert_eq!(heap.read(words)?, wanted.map(T::of), "{name}");
        assert_eq!(heap.read(sums)?, [count as f32 / 2.0], "{name}");
    }
    world.barrier()
}

fn all_contended(on: On) {
    on.worlds(|world| {
        let heap = on.open(&world)?;
        for _ in 0..10 {
            contended::<i32>(on, &world, &heap, "contend_i32")?;
            contended::<i64>(on, &world, &heap, "contend_i64")?;
        }
        heap.close()
    });
}

fn nothing_is_lost_among_all_threads() {
    all_contended(On::Gpu);
}

fn nothing_is_lost_among_all_threads_on_the_host() {
    all_contended(On::Host);
}

/// Test cases of (target, source, number of elements) for elements of `width` bytes, and the number
/// of bytes that they need.
fn cases(width: usize) -> (Vec<[u32; 3]>, usize) {
    // The last length is odd, and more than four vectors for each thread.
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

/// Byte number `at` of the test data that `rank` writes.
fn byte(rank: usize, at: usize) -> u8 {
    (at.wrapping_mul(167) ^ at >> 8 ^ rank.wrapping_mul(91)) as u8
}

fn copied(on: On, world: &World, heap: &SymmetricHeap, width: usize) -> Result<(), Error> {
    const POISON: u8 = 0xee;
    let (rank, size) = (world.rank(), world.size());
    let (cases, bytes) = cases(width);
    let slices: Vec<SymSlice<u8>> = (0..3).map(|_| heap.alloc(bytes)).collect::<Result<_, _>>()?;
    let [to, from, seen] = slices[..] else { unreachable!("there are three") };
    let table = heap.alloc::<u32>(3 * cases.len())?;
    let words = heap.alloc_signal(cases.len())?;
    heap.write(table, cases.as_flattened())?;
    heap.write(from, &(0..bytes).map(|at| byte(rank, at)).collect::<Vec<_>>())?;
    let copies = on.kernel(heap, &format!("copies_{width}"))?;
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

fn all_copied(on: On) {
    on.worlds(|world| {
        let heap = on.open(&world)?;
        [2, 4, 8, 16].into_iter().try_for_each(|width| copied(on, &world, &heap, width))?;
        heap.close()
    });
}

fn copies_of_every_width_length_and_alignment() {
    all_copied(On::Gpu);
}

fn copies_of_every_width_length_and_alignment_on_the_host() {
    all_copied(On::Host);
}

/// Copies a rectangle of more than 65,536 columns that are no whole vectors, beside which nothing may
/// be written.
fn rectangle(on: On) {
    const ROWS: usize = 3;
    const COLS: usize = 70_001;
    const LD: usize = 70_008;
    on.worlds(|world| {
        let heap = on.open(&world)?;
        let [to, from] = [heap.alloc::<u32>(ROWS * LD)?, heap.alloc::<u32>(ROWS * LD)?];
        let data: Vec<u32> = (1..=ROWS * LD).map(|at| at as u32).collect();
        heap.write(from, &data)?;
        heap.write(to, &vec![0_u32; ROWS * LD])?;
        let views = [heap.slice_view(to)?, heap.slice_view(from)?];
        let sizes = [ROWS, COLS, LD].map(|size| size as u32);
        let [a, b] = views.each_ref().map(bytes_of);
        let [rows, cols, ld] = sizes.each_ref().map(bytes_of);
        call(&heap, &on.kernel(&heap, "rectangle")?, 1, &[a, b, rows, cols, ld])?;
        let copied = |at: usize| if at % LD < COLS { data[at] } else { 0 };
        let wrong = heap.read(to)?.iter().enumerate().position(|(at, &got)| got != copied(at));
        assert_eq!(wrong, None);
        heap.close()
    });
}

fn a_rectangle_of_many_columns_is_copied_whole() {
    rectangle(On::Gpu);
}

fn a_rectangle_of_many_columns_is_copied_whole_on_the_host() {
    rectangle(On::Host);
}

fn a_wait_in_vain_ends() {
    wait_in_vain(On::Gpu);
}

fn a_wait_in_vain_ends_on_the_host() {
    wait_in_vain(On::Host);
}

fn wait_in_vain(on: On) {
    let settings = Settings::default().deadline(0.01);
    let each = World::run_threads_each(2, &settings, |world| {
        let heap = on.open(&world)?;
        let words = heap.alloc_signal(1)?;
        heap.write(words, &[0])?;
        let kernel = on.kernel(&heap, "wait_in_vain")?;
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
    On::Gpu.worlds(|world| {
        let heap = On::Gpu.open(&world)?;
        let kernel = gpu(&heap, "operate_i32")?;
        let stream = heap.stream()?;
        for groups in [0, kernel.max_coresident_workgroups() + 1] {
            // SAFETY: the launch is refused, so no kernel runs.
            let launched = unsafe { kernel.launch(&stream, groups, &[]) };
            let error = launched.unwrap_err().to_string();
            assert!(error.contains("operate_i32"), "{error}");
        }
        // A launch on a stream of another heap must be refused, even if that heap is on the same
        // device.
        let other = On::Gpu.open(&world)?;
        // SAFETY: the launch is refused, so no kernel runs.
        let launched = unsafe { kernel.launch(&other.stream()?, 1, &[]) };
        let error = launched.unwrap_err().to_string();
        assert!(error.contains("another heap"), "{error}");
        other.close()?;
        heap.close()
    });
}
