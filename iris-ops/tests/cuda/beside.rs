//! Tests of a kernel of the caller that runs at the same time as an operator's call and reads each
//! tile of C as soon as the tile has arrived.

use std::ffi::OsStr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytemuck::bytes_of;
use iris_heap::{
    BackendKind, ErrorKind, HeapOptions, Settings, Stream, SymSlice, SymmetricHeap, World,
};
use iris_kernels::UserKernel;
use iris_kernels::args::TileView;
use iris_kernels::gemm_config::THREADS;
use iris_kernels::rtc::{Compiler, Options};
use iris_ops::{MatRef, Topology};
use iris_testkit::harness;
use iris_testkit::suite::{AnyOp, Op, Operands};
use libloading::os::unix::{Library, RTLD_NOW};

use crate::graphs::{callers, captured, drop_graph};
use crate::open;
use crate::sample::{Room, Sample};

const SOURCE: &str = r#"
#include "iris/tiles.h"
using namespace iris;
// If `which` is 0, copies the peers' tiles while the operator runs; if it is 1, copies this rank's
// tiles after the call; if it is 2, waits for one of this rank's tiles, which is an error.
IRIS_KERNEL take(IRIS_ARGS TileView view, Slice<float> c, Slice<float> seen, u32 which) {
    Tiles tiles(view);
    const auto from = view.heap.at(c, view.heap.rank), to = view.heap.at(seen, view.heap.rank);
    for (u32 tile = port::workgroup(); tile < tiles.count(); tile += port::workgroups()) {
        if (tiles.own(tile) != (which != 0)) continue;
        if (which != 1 && !tiles.wait(tile)) return;
        const Tile at = tiles.area(tile);
        for (u32 i = port::thread(); i < at.rows * at.cols; i += port::threads()) {
            const u64 place = u64(at.row + i / at.cols) * view.cols + at.col + i % at.cols;
            to.put(place, from.get(place));
        }
    }
}"#;

/// Number of workgroups of the caller's kernel.
const GROUPS: u32 = 4;

/// Operators and variants in which peers write C directly, so that all tiles have signals.
const OPS: [(Op, &str); 6] = [
    (Op::AllGather, "push"),
    (Op::MatmulAllGather, "push"),
    (Op::Broadcast, "push"),
    (Op::Broadcast, "two_shot"),
    (Op::AllReduce, "two_shot"),
    (Op::MatmulAllReduce, "two_shot"),
];

pub(crate) fn the_kernel_beside_ops_compiles() {
    let code = Compiler::nvrtc().unwrap().compile(SOURCE.into(), &Options::new(), "sm_90a");
    assert!(code.unwrap_or_else(|error| panic!("{error}")).starts_with(b"\x7fELF"));
}

type HostLaunch = unsafe extern "C" fn(*const *const u8, u32);

/// Returns the function that launches the caller's kernel as host code. The code is compiled once;
/// each of the kernel's threads is a host thread.
fn host() -> HostLaunch {
    static LIBRARY: OnceLock<(Library, HostLaunch)> = OnceLock::new();
    let (_, launch) = LIBRARY.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let [source, file] = ["take.cpp", "take.so"].map(|name| folder.path().join(name));
        let entry = "extern \"C\" void take_launch(void** args, u32 n) { launch(take, args, n); }";
        std::fs::write(&source, format!("#include \"launch.h\"\n{SOURCE}\n{entry}\n")).unwrap();
        let options = ["-shared", "-std=c++20", "-DIRIS_THREADS=2"].map(OsStr::new);
        harness::compile_for_host(options.into_iter().chain([source.as_os_str()]), &file);
        // SAFETY: the library was just built from our own source, and opening it runs no
        // initialisers.
        let library = unsafe { Library::open(Some(&file), RTLD_NOW) }.unwrap();
        // SAFETY: the compiled source defines `take_launch` with the type `HostLaunch`.
        let launch = *unsafe { library.get::<HostLaunch>(b"take_launch") }.unwrap();
        (library, launch)
    });
    *launch
}

/// Operator on the CPU together with a kernel of the caller. The kernel uses the same words,
/// schedules and views as on a GPU.
struct OnHost {
    heap: Arc<SymmetricHeap>,
    sample: Sample,
    op: AnyOp,
    room: Room,
    seen: SymSlice<f32>,
    stream: Stream,
}

impl OnHost {
    fn new(world: &World, (op, variant): (Op, &str)) -> Result<OnHost> {
        let options = HeapOptions::new().threads(2).data_bytes(4 << 20);
        let heap = SymmetricHeap::open(world, options)?;
        let sample =
            Sample::new(op, variant, Default::default(), Topology::from(world)).leaving(GROUPS);
        let sample = sample.on(BackendKind::Cpu, 2);
        let (op, room) = (sample.make(&heap)?, sample.room(&heap)?);
        let (seen, stream) = (heap.alloc::<f32>(room.c.len())?, heap.stream()?);
        Ok(OnHost { heap, sample, op, room, seen, stream })
    }

    /// Runs a call with the caller's kernel at the same time. If `behind`, the kernel is launched
    /// again after the call.
    fn call(&mut self, operands: &Operands, which: u32, late: bool, behind: bool) -> Result<()> {
        let view = self.op.beside(operands, &self.stream)?;
        self.stream.sync()?;
        let views = [self.heap.slice_view(self.room.c)?, self.heap.slice_view(self.seen)?];
        let launch = |which: u32| {
            let [c, seen] = views.each_ref().map(bytes_of);
            let args = [bytes_of(&view), c, seen, bytes_of(&which)].map(<[u8]>::as_ptr);
            // SAFETY: the arguments match the kernel's parameters, and their memory lies in the
            // open heap.
            unsafe { host()(args.as_ptr(), 2) }
        };
        let (op, stream) = (&mut self.op, &self.stream);
        let done = std::thread::scope(|scope| -> Result<()> {
            let taking = scope.spawn(|| launch(which));
            if late {
                std::thread::sleep(Duration::from_millis(3));
            }
            op.run(operands, stream)?;
            taking.join().expect("the kernel ends");
            Ok(stream.sync()?)
        });
        if behind {
            launch(1);
        }
        done
    }
}

fn taken_on_the_host(world: &World, op: (Op, &str)) -> Result<()> {
    let mut host = OnHost::new(world, op)?;
    let operands = host.sample.operands(&host.room);
    for call in 0..20 {
        host.sample.fill(&host.heap, &host.room, call)?;
        host.heap.write(host.seen, &vec![f32::NAN; host.seen.len()])?;
        host.call(&operands, 0, call % world.size() == world.rank(), true)?;
        host.sample.check(&host.heap.read(host.room.c)?, call)?;
        host.sample.check(&host.heap.read(host.seen)?, call)?;
        host.heap.check()?;
    }
    host.op.free()?;
    Ok(host.heap.close()?)
}

pub(crate) fn a_kernel_beside_an_op_takes_tiles_on_the_host() {
    for size in [1, 2, 3] {
        for op in OPS {
            World::run_threads(size, |world| taken_on_the_host(&world, op)).unwrap();
        }
    }
}

pub(crate) fn tiles_that_do_not_come_are_faults_on_the_host() {
    // In case 0, C has different offsets on the ranks, so peers do not write into C directly. In
    // case 2, the tile is this rank's own. Both cases must fail.
    for (which, text) in [(0, "Direct"), (2, "tile")] {
        let settings = Settings::default().deadline(0.02);
        let each = World::run_threads_each(2, &settings, |world| -> Result<()> {
            let mut host = OnHost::new(&world, (Op::AllReduce, "two_shot"))?;
            let mut operands = host.sample.operands(&host.room);
            if which == 0 {
                operands.c = shifted(&host.sample, &host.room, world.rank())?;
            }
            // The result of the call does not matter: the call may have ended before the kernel
            // timed out.
            let _ = host.call(&operands, which, false, false);
            let error = host.heap.check().expect_err("a fault").to_string();
            ensure!(error.contains(text) || error.contains("gave up"), "{error}");
            world.barrier()?;
            Ok(host.heap.close()?)
        });
        each.unwrap().into_iter().collect::<Result<Vec<_>>>().unwrap();
    }
}

/// Matrix C that begins at a different heap offset on each rank, so that peers do not write it
/// directly.
fn shifted(sample: &Sample, room: &Room, rank: usize) -> Result<MatRef> {
    let [_, _, (rows, cols)] = sample.shapes();
    Ok(MatRef::sym(room.c.slice(4 * rank..)?, rows, cols))
}

/// Kernel of the caller on one rank, with its input C and its copy `seen` of C.
struct Taker {
    kernel: UserKernel,
    c: SymSlice<f32>,
    seen: SymSlice<f32>,
}

impl Taker {
    fn new(heap: &Arc<SymmetricHeap>, c: SymSlice<f32>) -> Result<Taker> {
        let none = Options::new();
        let kernel = UserKernel::new(heap, SOURCE.into(), &none, "take", (THREADS, 0))?;
        Ok(Taker { kernel, c, seen: heap.alloc(c.len())? })
    }

    /// Launches the kernel at the same time as the next call. If `which` is 1, launches it after
    /// the last call instead.
    fn launch(
        &self,
        heap: &SymmetricHeap,
        stream: &Stream,
        view: &TileView,
        which: u32,
    ) -> Result<()> {
        let views = [heap.slice_view(self.c)?, heap.slice_view(self.seen)?];
        let [c, seen] = views.each_ref().map(bytes_of);
        let which_arg = bytes_of(&which);
        // SAFETY: the arguments match the kernel's parameters, and the matrices lie in the heap,
        // which outlives the launches.
        let launched = unsafe {
            match which {
                1 => self.kernel.launch(stream, GROUPS, &[bytes_of(view), c, seen, which_arg]),
                _ => self.kernel.launch_concurrent(stream, GROUPS, view, &[c, seen, which_arg]),
            }
        };
        Ok(launched?)
    }
}

/// Runs twenty calls, each with the caller's kernel at the same time, either enqueued one by one or
/// as a replayed graph.
fn taken(world: &World, (op, variant): (Op, &str), as_graph: bool) -> Result<()> {
    let heap = open(world)?;
    let ranks = Topology::from(world);
    let sample = Sample::new(op, variant, Default::default(), ranks).leaving(GROUPS);
    let (op, room) = (sample.make(&heap)?, sample.room(&heap)?);
    let taker = Taker::new(&heap, room.c)?;
    let ((theirs, stream), side) = (callers(&heap)?, heap.stream()?);
    let operands = sample.operands(&room);
    let enqueue = |late: bool| -> Result<()> {
        let view = op.beside(&operands, &stream)?;
        taker.launch(&heap, &side, &view, 0)?;
        if late {
            std::thread::sleep(Duration::from_millis(3));
        }
        op.run(&operands, &stream)?;
        taker.launch(&heap, &stream, &view, 1)?;
        Ok(stream.wait(&side.record()?)?)
    };
    world.barrier()?;
    let graph = if as_graph {
        Some(captured(&theirs, || {
            side.wait(&stream.record()?)?;
            enqueue(false)
        })?)
    } else {
        None
    };
    world.barrier()?;
    for call in 0..20 {
        sample.fill(&heap, &room, call)?;
        heap.write(taker.seen, &vec![f32::NAN; taker.seen.len()])?;
        match &graph {
            Some(graph) => graph.launch()?,
            None => enqueue(call % ranks.size == ranks.rank)?,
        }
        stream.sync()?;
        sample.check(&heap.read(room.c)?, call)?;
        sample.check(&heap.read(taker.seen)?, call)?;
    }
    if let Some(graph) = graph {
        drop_graph(graph);
    }
    op.free()?;
    Ok(heap.close()?)
}

fn all_taken(sizes: &[usize], as_graph: bool) {
    // The short deadline is for the case that the test fails: if the caller's kernel keeps the
    // operator from running, a fault is reported after 30 s.
    let settings = Settings::default().deadline(0.05);
    for &size in sizes {
        for op in OPS {
            let each =
                World::run_threads_each(size, &settings, |world| taken(&world, op, as_graph));
            each.unwrap().into_iter().collect::<Result<Vec<_>>>().unwrap();
        }
    }
}

pub(crate) fn a_kernel_beside_an_op_takes_tiles_as_they_come() {
    all_taken(&[1, 2, 3, 4], false);
}

/// Tests the caller's kernel in replays of a graph. It must read the call number on the device,
/// because each replay has another call number.
pub(crate) fn a_kernel_beside_an_op_is_replayed() {
    all_taken(&[2, 4], true);
}

/// Checks that `enqueue` leads to a fault on both of two ranks within the deadline, and that the
/// fault's text contains `text`.
fn fault(text: &str, enqueue: impl Fn(&World, &Arc<SymmetricHeap>) -> Result<Stream> + Sync) {
    let settings = Settings::default().deadline(0.02);
    let each = World::run_threads_each(2, &settings, |world| -> Result<()> {
        let heap = open(&world)?;
        let begun = Instant::now();
        let stream = enqueue(&world, &heap)?;
        let error = stream.sync().expect_err("a fault").to_string();
        ensure!(error.contains(text) || error.contains("gave up"), "{error}");
        ensure!(begun.elapsed() < Duration::from_secs(60), "{error}");
        world.barrier()?;
        Ok(heap.close()?)
    });
    each.unwrap().into_iter().collect::<Result<Vec<_>>>().unwrap();
}

pub(crate) fn tiles_that_do_not_come_are_faults() {
    let make = |world: &World| {
        Sample::new(Op::AllReduce, "two_shot", Default::default(), Topology::from(world))
            .leaving(GROUPS)
    };
    // No rank enqueues the call whose tiles the kernel waits for, so the kernel must time out.
    fault("all_reduce", |world, heap| {
        let sample = make(world);
        let (op, room) = (sample.make(heap)?, sample.room(heap)?);
        let (stream, side) = (heap.stream()?, heap.stream()?);
        let taker = Taker::new(heap, room.c)?;
        world.barrier()?;
        let view = op.beside(&sample.operands(&room), &stream)?;
        taker.launch(heap, &side, &view, 0)?;
        Ok(side)
    });
    // In case 0, C has different offsets on the ranks, so tiles come through the inbox. In case 2,
    // the tile is this rank's own. Both cases must fail.
    for (which, text) in [(0, "Direct"), (2, "tile")] {
        fault(text, |world, heap| {
            let sample = make(world);
            let (op, room) = (sample.make(heap)?, sample.room(heap)?);
            let (stream, side) = (heap.stream()?, heap.stream()?);
            let taker = Taker::new(heap, room.c)?;
            let mut operands = sample.operands(&room);
            if which == 0 {
                operands.c = shifted(&sample, &room, world.rank())?;
            }
            world.barrier()?;
            let view = op.beside(&operands, &stream)?;
            taker.launch(heap, &side, &view, which)?;
            op.run(&operands, &stream)?;
            Ok(side)
        });
    }
}

pub(crate) fn invalid_kernels_beside_an_op_are_refused() {
    let outcome = World::run_threads(2, |world| -> Result<()> {
        let heap = open(&world)?;
        let ranks = Topology::from(&world);
        let stream = heap.stream()?;
        let refused = |outcome: iris_ops::OpResult<TileView>, text: &str| {
            let error = outcome.map(drop).expect_err(text).to_string();
            ensure!(error.contains(text), "{error}");
            Ok(())
        };
        let sample = Sample::new(Op::AllReduce, "one_shot", Default::default(), ranks);
        let (op, room) = (sample.make(&heap)?, sample.room(&heap)?);
        refused(op.beside(&sample.operands(&room), &stream), "Options::reserve_sms")?;
        let sample = Sample::new(Op::AllReduce, "two_shot", Default::default(), ranks);
        let sample = sample.leaving(GROUPS);
        let op = sample.make(&heap)?;
        let mut operands = sample.operands(&room);
        operands.c = operands.a;
        refused(op.beside(&operands, &stream), "C of a call")?;

        let operands = sample.operands(&room);
        let mut view = op.beside(&operands, &stream)?;
        let taker = Taker::new(&heap, room.c)?;
        let error = taker.launch(&heap, &stream, &view, 0).unwrap_err().to_string();
        ensure!(error.contains("that of an op"), "{error}");

        // Streams of another heap on the same device must be refused: by the operator, by the
        // kernel, and by the two together.
        let other = open(&world)?;
        let theirs = other.stream()?;
        let error = op.run(&operands, &theirs).expect_err("another heap's stream").to_string();
        ensure!(error.contains("another heap"), "{error}");
        refused(op.beside(&operands, &theirs), "another heap")?;
        let error = taker.launch(&heap, &theirs, &view, 0).unwrap_err().to_string();
        ensure!(error.contains("stream for take is one of another heap"), "{error}");
        let stranger = TileView { heap: other.view(), ..view };
        let error = taker.launch(&heap, &heap.stream()?, &stranger, 0).unwrap_err().to_string();
        ensure!(error.contains("view for take is one of another heap"), "{error}");
        // All launches were refused, so there is no kernel to wait for.
        heap.check()?;
        other.close()?;

        view.groups = heap.workgroups() - GROUPS + 1;
        let error = taker.launch(&heap, &heap.stream()?, &view, 0).unwrap_err();
        let kind = error.downcast_ref::<iris_heap::Error>().map(iris_heap::Error::kind);
        ensure!(kind == Some(ErrorKind::Usage), "{error}");
        ensure!(error.to_string().contains("workgroups beside"), "{error}");
        world.barrier()?;
        Ok(heap.close()?)
    });
    outcome.unwrap();
}
