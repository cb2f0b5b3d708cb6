//! The loaded kernels of an operator, and one launch of one of them.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use iris_heap::plain_access::Access;
use iris_heap::{
    Control, CpuKernel, Error, Function, Group, LaunchShape, Result, Stream, SymmetricHeap,
};
use iris_sync::Span;

use super::unsupported;
use crate::args::OpArgs;
use crate::build::{self, OpBuild};
use crate::cpu;
use crate::kernel::Kernel;
use crate::target::Target;
use crate::trace::MAX_GROUPS;

/// The workgroups of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Workgroups {
    /// Number of workgroups.
    pub count: u32,
    /// Threads of each on a GPU, at most; by default as many as the kernel is built for.
    pub threads: Option<u32>,
    /// Whether each thread has several items of an LL message that is the same both ways between two ranks: a form of
    /// the kernel takes them together.
    pub several_items: bool,
}

impl Workgroups {
    /// Number of workgroups of [`Kernel::Norm`] on a GPU: one a row, up to a limit, above which they take turns.
    /// They wait for nobody, so there may be more than are resident.
    pub fn of_rows(rows: u32) -> Self {
        rows.clamp(1, 4096).into()
    }
}

impl From<u32> for Workgroups {
    /// So many workgroups, with as many threads as the kernel is built for.
    fn from(count: u32) -> Self {
        Self { count, threads: None, several_items: false }
    }
}

/// The kernels of an operator that a device has loaded, or the host's own code.
#[derive(Clone, Debug)]
pub(super) struct KernelSet {
    resident: u32,
    code: Code,
}

#[derive(Clone, Debug)]
enum Code {
    /// Functions of the host, for its threads.
    Host(Arc<HostLaunches>),
    /// Kernels by name.
    Loaded(Vec<Loaded>),
}

/// A kernel that a device has loaded.
#[derive(Clone, Debug)]
struct Loaded {
    name: &'static str,
    function: Function,
    /// Threads of a workgroup.
    threads: u32,
    shared_bytes: u32,
    /// Workgroups that run at the same time: a limit of the form for pairs of ranks, which is not taken for more.
    most: u32,
}

impl KernelSet {
    /// Loads `kernels` of an operator on the heap's device, after compiling those that never were. It may wait for
    /// the device: call it where all ranks make the operator.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a device, type or tile that there are no kernels for; [`Error::Other`] with an
    /// [`crate::rtc::Error`]; [`Error::Device`]; [`Error::TooManyGroups`] if so many ranks share the device that
    /// not one workgroup of each is resident.
    pub(super) fn new(heap: &SymmetricHeap, op: &OpBuild, kernels: &[Kernel]) -> Result<Self> {
        if heap.device().kind.traits().host_threads {
            return Ok(Self { resident: heap.workgroups(), code: Code::Host(Arc::default()) });
        }
        let target = Target::of(heap.device())?;
        let mut loaded: Vec<Loaded> = Vec::new();
        let mut resident = MAX_GROUPS as u32;
        let pair = heap.size() == 2 && !op.norm;
        let names = |&kernel: &Kernel| {
            let of_pair = kernel.name_of_pair().filter(|_| pair);
            [Some(kernel.name()), of_pair].into_iter().flatten().map(move |name| (kernel, name))
        };
        for (kernel, name) in kernels.iter().flat_map(names) {
            if loaded.iter().any(|known| known.name == name) {
                continue;
            }
            let (mut new, fits) = load(heap, &target, op, (kernel, name))?;
            if name != kernel.name() {
                new.most = fits().unwrap_or(0);
            } else if !matches!(
                kernel,
                Kernel::Barrier { .. } | Kernel::Norm | Kernel::Stamp { .. }
            ) {
                resident = resident.min(fits()?);
            }
            loaded.push(new);
        }
        Ok(Self { resident, code: Code::Loaded(loaded) })
    }

    /// Workgroups that run at the same time, of any of the kernels.
    pub(super) fn resident(&self) -> u32 {
        self.resident
    }

    /// Enqueues one launch of a kernel. `early`: it may begin before the launch ahead of it is over.
    ///
    /// # Errors
    /// [`Error::TooManyGroups`], [`Error::Closed`], [`Error::Device`]; [`Error::Unsupported`] for a kernel that was
    /// not loaded. Nothing is enqueued then.
    ///
    /// # Safety
    /// The conditions of [`super::Executor::run`] hold.
    pub(super) unsafe fn enqueue(
        &self,
        (heap, stream): (&Arc<SymmetricHeap>, &Stream),
        kernel: Kernel,
        args: OpArgs,
        (groups, early): (Workgroups, bool),
    ) -> Result<()> {
        let loaded = match &self.code {
            Code::Loaded(loaded) => loaded,
            Code::Host(kept) => return kept.enqueue(heap, stream, (kernel, args), groups.count),
        };
        let of_pair = loaded.iter().find(|known| Some(known.name) == kernel.name_of_pair());
        let of_pair = of_pair.filter(|it| groups.several_items && groups.count <= it.most);
        let name = kernel.name();
        let of_name = of_pair.or_else(|| loaded.iter().find(|known| known.name == name));
        let &Loaded { ref function, threads, shared_bytes, .. } = of_name.ok_or_else(|| {
            unsupported(format!("kernel {name}"), "the operator was made without it")
        })?;
        // Norms wait for nobody.
        let most = if kernel == Kernel::Norm { u32::MAX } else { self.resident };
        fits(name, groups.count, most)?;
        let threads = groups.threads.map_or(threads, |most| most.min(threads));
        let shape = LaunchShape { groups: groups.count, threads, shared_bytes, early };
        let args = bytemuck::bytes_of(&args);
        match kernel {
            Kernel::Barrier { phase, members, last } => {
                let (phase, last) = (phase.to_ne_bytes(), u32::from(last).to_ne_bytes());
                let members = members.bits().to_ne_bytes();
                // SAFETY: the parameters are those of `iris_barrier`; the caller vouches for the
                // addresses; `groups` are resident.
                unsafe { function.launch(stream, shape, &[args, &phase, &members, &last]) }
            }
            Kernel::Gate { source, first, parts } => {
                // The types are those of a barrier's parameters.
                let (source, first) = (source.to_ne_bytes(), u64::from(first).to_ne_bytes());
                let parts = parts.to_ne_bytes();
                // SAFETY: the parameters are those of `iris_gate`; the rest as above.
                unsafe { function.launch(stream, shape, &[args, &source, &first, &parts]) }
            }
            Kernel::Stamp { after, rows } => {
                let (after, rows) = (u32::from(after).to_ne_bytes(), u64::from(rows).to_ne_bytes());
                let span = (Span::Gemm as u32).to_ne_bytes();
                let shape = LaunchShape { threads: 1, ..shape };
                // SAFETY: the parameters are those of `iris_stamp`; the rest as above.
                unsafe { function.launch(stream, shape, &[args, &after, &rows, &span]) }
            }
            // SAFETY: the one parameter of the kernels of operators is an `OpArgs`; the rest as above.
            _ => unsafe { function.launch(stream, shape, &[args]) },
        }
    }
}

/// Launches on the host's threads, of which those that are over are used again: a call allocates none after the first.
#[derive(Default)]
struct HostLaunches(Mutex<Vec<HostLaunch>>);

impl fmt::Debug for HostLaunches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostLaunches")
    }
}

struct HostLaunch {
    launch: Arc<RwLock<Launch>>,
    /// Runs `launch`; nobody else has it where no launch is under way.
    run: CpuKernel,
}

/// A launch of a kernel on the host.
struct Launch {
    kernel: Kernel,
    args: OpArgs,
    /// The heap's.
    control: Arc<Control>,
    /// Workgroups that have not ended.
    left: AtomicU32,
    /// Kept until the last workgroup ends.
    access: Mutex<Option<Access>>,
}

impl HostLaunches {
    /// Launches that are kept, at most: a program that enqueues more ahead allocates the others anew.
    const MOST: usize = 32;

    /// Enqueues a kernel.
    fn enqueue(
        &self,
        heap: &Arc<SymmetricHeap>,
        stream: &Stream,
        (kernel, args): (Kernel, OpArgs),
        groups: u32,
    ) -> Result<()> {
        let control = heap.control().clone();
        let launch =
            Launch { kernel, args, control, left: groups.into(), access: Mutex::default() };
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let run = match kept.iter().find(|it| Arc::strong_count(&it.run) == 1) {
            Some(free) => {
                *free.launch.write().unwrap_or_else(PoisonError::into_inner) = launch;
                free.run.clone()
            }
            None => {
                let new = HostLaunch::new(launch);
                let run = new.run.clone();
                if kept.len() < Self::MOST {
                    kept.push(new);
                }
                run
            }
        };
        stream.launch_cpu(kernel.name(), groups, run)
    }
}

impl HostLaunch {
    fn new(launch: Launch) -> Self {
        let launch = Arc::new(RwLock::new(launch));
        let of_run = launch.clone();
        let run =
            move |group: Group| of_run.read().unwrap_or_else(PoisonError::into_inner).run(group);
        HostLaunch { launch, run: Arc::new(run) }
    }
}

impl Launch {
    /// Runs one workgroup.
    fn run(&self, group: Group) -> Result<()> {
        let _ended = Ended(self);
        let mut access = self.access.lock().unwrap_or_else(PoisonError::into_inner);
        access.get_or_insert_with(|| Access::of_kernel(&self.args.operands()));
        drop(access);
        // SAFETY: the caller of `enqueue` vouches for the matrices; the heap's threads keep its memory.
        let result = unsafe { cpu::run(self.kernel, &self.args, group.index, group.count) };
        // A fault says more than that there was one; the record is complete, or a peer's is.
        result.or_else(|_stop| self.control.outcome())
    }
}

/// A workgroup that ends when this is dropped, by a panic, too.
struct Ended<'a>(&'a Launch);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        if self.0.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.access.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
    }
}

/// Compiles and loads the form of a kernel that has this name; returns it with a function that says how many of its
/// workgroups run at the same time.
fn load<'a>(
    heap: &'a SymmetricHeap,
    target: &Target,
    op: &OpBuild,
    (kernel, name): (Kernel, &'static str),
) -> Result<(Loaded, impl FnOnce() -> Result<u32> + use<'a>)> {
    let build = op.of(kernel, &target.arch).map_err(|what| {
        unsupported(format!("{} on a GPU: {what}", op.op), "no device source has it")
    })?;
    let image = build::compile(&build, target).map_err(Error::other)?;
    let (threads, shared_bytes) = (build.threads, build.shared_bytes(kernel));
    let function = heap.load(&image)?.function(&format!("iris_{name}"), shared_bytes)?;
    let new = Loaded { name, function: function.clone(), threads, shared_bytes, most: u32::MAX };
    Ok((new, move || share(heap, &function, threads, shared_bytes)))
}

/// This rank's part of the workgroups that the device takes at a time.
pub(crate) fn share(
    heap: &SymmetricHeap,
    function: &Function,
    threads: u32,
    shared: u32,
) -> Result<u32> {
    let (all, ranks) = (function.resident(threads, shared)?, heap.sharing());
    // Beside kernels of other ranks, which may take whole multiprocessors: one on each of its own.
    let most = if ranks > 1 { heap.workgroups() } else { u32::MAX };
    match (all / ranks).min(most) {
        0 => Err(Error::TooManyGroups {
            name: format!("{} for each of {ranks} ranks", function.name()),
            groups: ranks,
            threads: all,
        }),
        groups => Ok(groups),
    }
}

/// Whether so many workgroups are all resident.
pub(crate) fn fits(name: &str, groups: u32, resident: u32) -> Result<()> {
    match groups {
        0 => Err(Error::Invalid {
            what: format!("workgroups of {name}"),
            value: "0".into(),
            expected: "at least 1".into(),
        }),
        _ if groups > resident => {
            Err(Error::TooManyGroups { name: name.into(), groups, threads: resident })
        }
        _ => Ok(()),
    }
}
