//! Loaded kernels of an operator, and their launches.

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
use crate::rtc::progress::Level;
use crate::target::Target;
use crate::trace::MAX_GROUPS;

/// Size of a launch: number of workgroups, and threads per workgroup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Workgroups {
    /// Number of workgroups of the launch.
    pub count: u32,
    /// Largest number of threads per workgroup on a GPU. `None`: the number for which the kernel is
    /// built.
    pub threads: Option<u32>,
    /// Whether a message by the LL protocol (data and flag in one word) consists of packs of 48
    /// bytes. It must be the same on all ranks of a call.
    pub packs: bool,
}

impl Workgroups {
    /// Size of a launch of [`Kernel::Norm`] on a GPU: one workgroup per row, up to a limit. Above
    /// this limit, each workgroup processes several rows. The kernel's workgroups wait for no other
    /// workgroup, so there may be more of them than are co-resident.
    pub fn of_rows(rows: u32) -> Self {
        rows.clamp(1, 4096).into()
    }
}

impl From<u32> for Workgroups {
    /// Makes a launch of `count` workgroups, with the number of threads for which the kernel is
    /// built.
    fn from(count: u32) -> Self {
        Self { count, threads: None, packs: false }
    }
}

/// Kernels of an operator: loaded on a GPU, or the CPU kernels of this crate.
#[derive(Clone, Debug)]
pub(super) struct KernelSet {
    resident: u32,
    code: Code,
}

#[derive(Clone, Debug)]
enum Code {
    /// CPU kernels, which run on the heap's threads.
    Host(Arc<HostLaunches>),
    /// GPU kernels, found by name when they are launched.
    Loaded(Vec<Loaded>),
}

/// Kernel that is loaded on a device.
#[derive(Clone, Debug)]
struct Loaded {
    name: &'static str,
    function: Function,
    /// Number of threads per workgroup for which the kernel is built.
    threads: u32,
    shared_bytes: u32,
}

impl KernelSet {
    /// Loads `kernels` of an operator on the heap's device, and compiles them if they are not
    /// cached. Loading may wait for the device, so call this function where all ranks create the
    /// operator.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a device, type or tile that no kernel supports; [`Error::Other`]
    /// with a [`crate::rtc::Error`]; [`Error::Device`]; [`Error::TooManyGroups`] if so many ranks
    /// share the device that not even one workgroup of each rank is co-resident.
    pub(super) fn new(heap: &SymmetricHeap, op: &OpBuild, kernels: &[Kernel]) -> Result<Self> {
        if heap.device().kind.traits().host_threads {
            return Ok(Self { resident: heap.workgroups(), code: Code::Host(Arc::default()) });
        }
        let target = Target::of(heap.device())?;
        let mut loaded: Vec<Loaded> = Vec::new();
        let mut resident = MAX_GROUPS as u32;
        let names = |&kernel: &Kernel| {
            let in_packs = kernel.name_of_packs().filter(|_| op.packs);
            [Some(kernel.name()), in_packs].into_iter().flatten().map(move |name| (kernel, name))
        };
        let mut all: Vec<(Kernel, &str)> = Vec::new();
        for (kernel, name) in kernels.iter().flat_map(names) {
            if all.iter().all(|known| known.1 != name) {
                all.push((kernel, name));
            }
        }
        let build = |&(kernel, name): &(Kernel, &str)| match op.of(kernel, &target.arch) {
            Ok(build) => Ok((build, format!("iris_{name}"))),
            Err(what) => Err(unsupported(
                format!("{} on a GPU: {what}", op.op),
                "no device source implements it",
            )),
        };
        let builds = all.iter().map(build).collect::<Result<Vec<_>>>()?;
        let progress = Level::new("kernel", all.len(), heap.rank() == 0);
        let images = build::compile(&builds, &target, heap.size(), || progress.step());
        let images = images.map_err(Error::other)?;
        for (((kernel, name), (build, function)), image) in all.into_iter().zip(&builds).zip(images)
        {
            let (threads, shared_bytes) = (build.threads, build.shared_bytes(kernel));
            let function = heap.load(&image)?.function(function, shared_bytes)?;
            if !matches!(kernel, Kernel::Barrier { .. } | Kernel::Norm | Kernel::Stamp { .. }) {
                resident = resident.min(share(heap, &function, threads, shared_bytes)?);
            }
            loaded.push(Loaded { name, function, threads, shared_bytes });
        }
        Ok(Self { resident, code: Code::Loaded(loaded) })
    }

    /// Number of workgroups that can be co-resident on the device, whichever of the kernels is
    /// launched.
    pub(super) fn max_coresident_workgroups(&self) -> u32 {
        self.resident
    }

    /// Enqueues one launch of a kernel. If `early`, the launch may begin before the previous launch
    /// has ended.
    ///
    /// # Errors
    /// [`Error::TooManyGroups`], [`Error::Closed`], [`Error::Device`]; [`Error::Unsupported`] for a
    /// kernel that was not loaded. If an error is returned, nothing is enqueued.
    ///
    /// # Safety
    /// The conditions of [`super::Executor::run`] hold.
    pub(super) unsafe fn enqueue(
        &self,
        (heap, stream): (&Arc<SymmetricHeap>, &Stream),
        kernel: Kernel,
        args: &OpArgs,
        (groups, early): (Workgroups, bool),
    ) -> Result<()> {
        let loaded = match &self.code {
            Code::Loaded(loaded) => loaded,
            Code::Host(kept) => return kept.enqueue(heap, stream, (kernel, *args), groups.count),
        };
        let name = kernel.name_of_packs().filter(|_| groups.packs).unwrap_or(kernel.name());
        let of_name = loaded.iter().find(|known| known.name == name);
        let &Loaded { ref function, threads, shared_bytes, .. } = of_name.ok_or_else(|| {
            unsupported(format!("kernel {name}"), "the operator was created without this kernel")
        })?;
        // Maximum number of workgroups: unlimited for norm kernels, whose workgroups do not wait
        // for each other.
        let most = if kernel == Kernel::Norm { u32::MAX } else { self.resident };
        fits(name, groups.count, most)?;
        let threads = groups.threads.map_or(threads, |most| most.min(threads));
        let shape = LaunchShape { groups: groups.count, threads, shared_bytes, early };
        let args = bytemuck::bytes_of(args);
        match kernel {
            Kernel::Barrier { phase, members, last } => {
                let (phase, last) = (phase.to_ne_bytes(), u32::from(last).to_ne_bytes());
                let members = members.bits().to_ne_bytes();
                // SAFETY: the parameters are those of `iris_barrier`; the caller guarantees that
                // the addresses are valid; `groups` are co-resident.
                unsafe { function.launch(stream, shape, &[args, &phase, &members, &last]) }
            }
            Kernel::Gate { source, first, parts } => {
                // The parameter `first` of `iris_gate` has 64 bits, because `iris_gate` has
                // parameters of the same types as `iris_barrier`.
                let (source, first) = (source.to_ne_bytes(), u64::from(first).to_ne_bytes());
                let parts = parts.to_ne_bytes();
                // SAFETY: the parameters are those of `iris_gate`; the caller guarantees that the
                // addresses are valid.
                unsafe { function.launch(stream, shape, &[args, &source, &first, &parts]) }
            }
            Kernel::Stamp { after, rows } => {
                let (after, rows) = (u32::from(after).to_ne_bytes(), u64::from(rows).to_ne_bytes());
                let span = (Span::Gemm as u32).to_ne_bytes();
                let shape = LaunchShape { threads: 1, ..shape };
                // SAFETY: the parameters are those of `iris_stamp`; the caller guarantees that the
                // addresses are valid.
                unsafe { function.launch(stream, shape, &[args, &after, &rows, &span]) }
            }
            // SAFETY: the only parameter of an operator's kernel is an `OpArgs`; the caller
            // guarantees that the addresses are valid.
            _ => unsafe { function.launch(stream, shape, &[args]) },
        }
    }
}

/// Pool of objects that describe launches of CPU kernels on the heap's threads. Objects of finished
/// launches are reused, so a launch allocates only if more launches are in progress at once than
/// ever before.
#[derive(Default)]
struct HostLaunches(Mutex<Vec<HostLaunch>>);

impl fmt::Debug for HostLaunches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostLaunches")
    }
}

struct HostLaunch {
    launch: Arc<RwLock<Launch>>,
    /// Closure that runs `launch` on the heap's threads. While no launch is in progress, this is
    /// the only reference to the closure.
    run: CpuKernel,
}

/// Launch of a CPU kernel that is enqueued or running.
struct Launch {
    kernel: Kernel,
    args: OpArgs,
    control: Arc<Control>,
    /// Number of workgroups that have not ended yet.
    left: AtomicU32,
    /// Announcement of the launch's operands, which makes host copies of the same bytes wait. It is
    /// held from the start of the first workgroup until the end of the last one.
    access: Mutex<Option<Access>>,
}

impl HostLaunches {
    /// Largest number of launch objects in the pool. If more launches are in progress at once, each
    /// further launch allocates an object and frees it at its end.
    const MOST: usize = 32;

    /// Enqueues a CPU kernel by a free launch object, or by a new object if none is free.
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
    /// Runs one workgroup of the launch on the calling thread.
    fn run(&self, group: Group) -> Result<()> {
        let _guard = EndGuard(self);
        let mut access = self.access.lock().unwrap_or_else(PoisonError::into_inner);
        access.get_or_insert_with(|| Access::of_kernel(&self.args.operands()));
        drop(access);
        // SAFETY: the caller of `enqueue` guarantees that the matrices are valid; the heap's
        // threads keep its memory mapped.
        let result = unsafe { cpu::run(self.kernel, &self.args, group.index, group.count) };
        // The fault record is returned instead of `Aborted`, because the record gives the reason.
        // The record of this rank or of a peer is complete by now.
        result.or_else(|_stop| self.control.outcome())
    }
}

/// Guard that counts a workgroup as ended when the guard is dropped, even if the workgroup panics.
struct EndGuard<'a>(&'a Launch);

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        if self.0.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.access.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
    }
}

/// Number of workgroups of a kernel that this rank can have co-resident on the device. If ranks
/// share the device, it is only this rank's share.
pub(crate) fn share(
    heap: &SymmetricHeap,
    function: &Function,
    threads: u32,
    shared: u32,
) -> Result<u32> {
    let (all, ranks) =
        (function.max_coresident_workgroups(threads, shared)?, heap.ranks_on_device());
    // If ranks share the device, only one workgroup per multiprocessor of this rank's share is
    // allowed, because kernels of other ranks may fill whole multiprocessors.
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

/// Checks that `groups` workgroups can be co-resident; `resident` is the largest number of
/// co-resident workgroups.
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
