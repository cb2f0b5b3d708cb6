//! Engine: a front end that starts ranks as processes, gives every request to all of them, and
//! starts them anew after a rank that is lost, that fails, or that stands still. ENGINE.md explains
//! its parts.
//!
//! ```sh
//! cargo run --release -p iris-ops --example 03_engine          # cpu, or cuda
//! ```

#![allow(unsafe_code, reason = "a kernel of the program's own gets addresses")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytemuck::bytes_of;
use iris_heap::{BackendKind, Bytes, Settings, Stream, SymSlice, SymmetricHeap, UniqueId, World};
use iris_kernels::{UserKernel, gemm_config::THREADS};
use iris_ops::{
    HeapReserve, MatRef, MatmulAllReduce, MatmulArgs, Plan, Topology, matmul_all_reduce::Options,
};

const RANKS: usize = 2;
/// Numbers of rows (tokens), columns, and inner columns of a rank.
const SHAPE: (usize, usize, usize) = (4, 24, 16);

/// Kernel of the engine's own, for GPUs: weights of 4 bits, eight in a word, become floats.
const UNPACK: &str = r#"
#include "iris/tiles.h"
using namespace iris;
IRIS_KERNEL unpack(IRIS_ARGS HeapView heap, Slice<u32> packed, Slice<float> weight, u32 count) {
    const auto from = heap.at(packed, heap.rank);
    const auto to = heap.at(weight, heap.rank);
    for (u32 i = port::workgroup() * port::threads() + port::thread(); i < count;
         i += port::workgroups() * port::threads()) {
        to.put(i, float(int(from.get(i / 8) >> (i % 8 * 4) & 15) - 8));
    }
}"#;

/// Layer y = x w on one rank, which has the rows of w for its part of the columns of x.
struct Layer {
    heap: Arc<SymmetricHeap>,
    stream: Stream,
    op: MatmulAllReduce,
    unpack: Option<UserKernel>,
    packed: SymSlice<u32>,
    w: SymSlice<f32>,
    x: SymSlice<f32>,
    y: SymSlice<f32>,
}

impl Layer {
    fn new(world: &World, backend: BackendKind) -> Result<Layer> {
        let (m, n, k) = SHAPE;
        let options = Options::new(m, n, k).name("layer");
        let plan = options.plan(Topology::from(world).on(backend))?;
        let reserve = HeapReserve::matrices().and(Bytes::kib(64));
        let heap = Plan::open_heap(world, &[&plan], reserve)?;
        let unpack = match backend {
            BackendKind::Cpu => None,
            _ => Some(UserKernel::new(
                &heap,
                UNPACK.into(),
                &Default::default(),
                "unpack",
                (THREADS, 0),
            )?),
        };
        let packed = heap.alloc(k * n / 8)?;
        // Every weight is 1 more than the rank's number.
        heap.write(packed, &vec![0x1111_1111 * (9 + world.rank() as u32); k * n / 8])?;
        Ok(Layer {
            stream: heap.stream()?,
            op: MatmulAllReduce::new(&heap, &plan)?,
            unpack,
            packed,
            w: heap.alloc(k * n)?,
            x: heap.alloc(m * k)?,
            y: heap.alloc(m * n)?,
            heap,
        })
    }

    /// Enqueues the kernel of the engine's own. The heap keeps its place between calls of operators.
    fn unpack(&self) -> Result<()> {
        let count = self.w.len() as u32;
        let view = self.heap.view();
        let (packed, w) = (self.heap.slice_view(self.packed)?, self.heap.slice_view(self.w)?);
        if let Some(kernel) = &self.unpack {
            let args = [bytes_of(&view), bytes_of(&packed), bytes_of(&w), bytes_of(&count)];
            // SAFETY: the arguments match the parameters, and the heap outlives the stream's work.
            return Ok(unsafe { kernel.launch(&self.stream, 4, &args) }?);
        }
        let rank = self.heap.rank();
        let from = self.heap.resolve(self.packed, rank)? as usize;
        let to = self.heap.resolve(self.w, rank)? as usize;
        let kernel = move |group: iris_heap::Group| {
            for i in (group.index as usize..count as usize).step_by(group.count as usize) {
                // SAFETY: both matrices are allocated until the heap closes; each element is written
                // by one workgroup, and operators do not run at the same time.
                unsafe {
                    let word = (from as *const u32).add(i / 8).read();
                    (to as *mut f32).add(i).write((word >> (i % 8 * 4) & 15) as f32 - 8.0);
                }
            }
            Ok(())
        };
        Ok(self.stream.launch_cpu("unpack", 1, Arc::new(kernel))?)
    }

    fn run(&self, x: f32) -> Result<f32> {
        let (m, n, k) = SHAPE;
        self.heap.write(self.x, &vec![x; m * k])?;
        self.unpack()?;
        let (x, w) = (MatRef::sym(self.x, m, k), MatRef::sym(self.w, k, n));
        self.op.run(&MatmulArgs::new(x, w, MatRef::sym(self.y, m, n)), &self.stream)?;
        self.stream.sync()?;
        let y = self.heap.read(self.y)?;
        ensure!(y.iter().all(|value| *value == y[0]), "elements differ: {y:?}");
        Ok(y[0])
    }
}

/// Work of a rank: requests are lines of its input, results lines of its output.
fn serve(world: &World, backend: BackendKind) -> Result<()> {
    let layer = Layer::new(world, backend)?;
    for line in std::io::stdin().lines() {
        let line = line?;
        let (x, trouble) = line.split_once(' ').unwrap_or((&line, ""));
        if world.rank() == 1 {
            make(trouble)?;
        }
        println!("{}", layer.run(x.parse()?)?);
    }
    layer.heap.close()?;
    Ok(())
}

/// Trouble of a rank, by which this example tests itself.
fn make(trouble: &str) -> Result<()> {
    match trouble {
        "lost" => std::process::exit(9),
        "failed" => bail!("weights of layer 7 are not finite"),
        "stuck" => {
            let id = std::process::id().to_string();
            ensure!(
                Command::new("kill").args(["-STOP", &id]).status()?.success(),
                "no signal was sent"
            );
        }
        _ => {}
    }
    Ok(())
}

fn rank(id: &str, rank: usize, backend: BackendKind) -> Result<()> {
    // Requests come from outside, so a rank that does not enter a call stands still.
    let settings = Settings::default().work(Duration::from_secs(10));
    let world = World::from_unique_id_with(&id.parse()?, rank, RANKS, &settings)?;
    if let Err(error) = serve(&world, backend) {
        // Peers end at once, and show this reason unless another rank gave one first.
        world.abort_with(format!("{error:#}"));
        return Err(error);
    }
    Ok(world.close()?)
}

/// Output of a rank.
enum Output {
    Line(usize, String),
    Ended(usize),
}

/// Ranks of one world.
struct Job {
    ranks: Vec<(Child, ChildStdin)>,
    output: Receiver<Output>,
}

impl Job {
    fn start(backend: &str) -> Result<Job> {
        let (id, (send, output)) = (UniqueId::new()?.to_string(), channel());
        let mut ranks = Vec::new();
        for rank in 0..RANKS {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["rank", &id, &rank.to_string(), backend]);
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn()?;
            let (input, lines) = (child.stdin.take(), child.stdout.take());
            let (lines, send) = (lines.context("no pipe")?, send.clone());
            std::thread::spawn(move || {
                for line in BufReader::new(lines).lines().map_while(Result::ok) {
                    let _ = send.send(Output::Line(rank, line));
                }
                let _ = send.send(Output::Ended(rank));
            });
            ranks.push((child, input.context("no pipe")?));
        }
        Ok(Job { ranks, output })
    }

    /// Result of a request, on which all ranks agree.
    ///
    /// # Errors
    /// A rank has ended: the job cannot go on.
    fn ask(&mut self, request: &str) -> Result<f32> {
        for (_, input) in &mut self.ranks {
            writeln!(input, "{request}")?;
        }
        let mut results = [None; RANKS];
        while results.contains(&None) {
            match self.output.recv()? {
                Output::Line(rank, line) => results[rank] = Some(line.parse::<f32>()?),
                Output::Ended(rank) => bail!("rank {rank} has ended"),
            }
        }
        ensure!(results.iter().all(|result| *result == results[0]), "ranks differ: {results:?}");
        results[0].context("no rank")
    }

    /// Ends the ranks that are left. SIGKILL ends a stopped process, too.
    fn kill(mut self) {
        for (child, _) in &mut self.ranks {
            let _ = child.kill().and_then(|()| child.wait());
        }
    }

    /// Ends the ranks by the end of their input: of all first, because they close together.
    fn close(self) -> Result<()> {
        let (children, inputs): (Vec<_>, Vec<_>) = self.ranks.into_iter().unzip();
        drop(inputs);
        for mut child in children {
            let status = child.wait()?;
            ensure!(status.success(), "a rank ended with {status}");
        }
        Ok(())
    }
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let backend = |name: &str| if name == "cuda" { BackendKind::Cuda } else { BackendKind::Cpu };
    if let [what, id, number, name] = &args[..]
        && what == "rank"
    {
        return rank(id, number.parse()?, backend(name));
    }
    let name = args.first().map_or("cpu", |name| name.as_str());
    let mut job = Job::start(name)?;
    let mut starts = 1;
    for (x, trouble) in [(1, ""), (2, "lost"), (3, ""), (4, "failed"), (5, "stuck"), (6, "")] {
        let mut answer = job.ask(&format!("{x} {trouble}"));
        while let Err(error) = answer {
            println!("request {x}, {trouble}: {error:#}; all ranks are started anew");
            starts += 1;
            ensure!(starts < 10, "ranks fail again and again");
            std::mem::replace(&mut job, Job::start(name)?).kill();
            answer = job.ask(&x.to_string());
        }
        let answer = answer?;
        println!("request {x}: {answer}");
        ensure!(answer == (x * SHAPE.2 * (1 + 2)) as f32, "{answer}");
    }
    ensure!(starts >= 4, "{starts} starts");
    job.close()
}
