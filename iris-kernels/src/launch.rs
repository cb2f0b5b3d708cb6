//! Launching a kernel on the device of a heap.
//!
//! Long because a launcher, and what is multiplied ahead of its kernels, know each other.

mod copied;

use std::sync::{Arc, OnceLock};

use iris_heap::plain_access::Access;
use iris_heap::{Error, Function, Group, LaunchShape, Memory, Result, Stream, SymmetricHeap};

use crate::args::{Matrix, OpArgs, producer, rows_of};
use crate::build::{self, OpBuild};
use crate::cpu;
use crate::gemm::{Exchanging, Gathering, Scattering};
use crate::kernel::Kernel;
use crate::library::{Library, Whole};
use crate::schedule::split;
use crate::target::Target;
use crate::trace::MAX_GROUPS;
use crate::whole::WholeProduct;

/// A kernel that was loaded.
#[derive(Clone, Debug)]
struct Prepared {
    name: &'static str,
    function: Function,
    /// Threads of a workgroup.
    threads: u32,
    shared_bytes: u32,
    /// Workgroups that run at the same time, of a form that is not taken for more.
    most: u32,
}

/// What an op keeps to launch its kernels: those that a device has loaded, or nothing where they are
/// the host's own code.
#[derive(Clone, Debug)]
pub struct Launcher {
    resident: u32,
    kernels: Kernels,
    ahead: Option<Arc<Ahead>>,
}

/// The workgroups of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Workgroups {
    /// How many.
    pub count: u32,
    /// Threads of each on a GPU, at most; by default as many as the kernel is built for.
    pub threads: Option<u32>,
}

impl Workgroups {
    /// Those of [`Kernel::Norm`] on a GPU: one a row, up to a limit, above which they take turns. They wait for
    /// nobody, so there may be more than are resident.
    pub fn of_rows(rows: u32) -> Self {
        rows.clamp(1, 4096).into()
    }
}

impl From<u32> for Workgroups {
    /// So many, with as many threads as the kernel is built for.
    fn from(count: u32) -> Self {
        Self { count, threads: None }
    }
}

/// A product of whole matrices that is multiplied ahead of a kernel, behind it, or instead of it.
#[derive(Debug)]
struct Ahead {
    whole: Whole,
    role: Role,
    /// Whether what the kernels move is counted, traced or held up.
    observed: bool,
    /// Whoever has it for calls that fit.
    product: Option<WholeProduct>,
    /// Of an A that engines bring while it is multiplied.
    gathering: Option<Gathering>,
    /// Of a C whose parts go to their owners while it is multiplied.
    scattering: Option<Scattering>,
    /// Of a partial that goes to all in words that carry their data.
    exchanging: Option<Exchanging>,
    /// The kernel of `matmul`, for those that do not; none where the launcher's own kernel is that.
    local: Option<Launcher>,
}

/// What the message is to the product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    /// There is none.
    None,
    /// It gathers A, and goes first.
    Gather,
    /// It takes a partial to the owners of its rows, which add up.
    Scatter,
    /// It does that, and takes the sums to all.
    Sum,
    /// It takes a rank's rows of C to all.
    Rows,
}

impl Role {
    /// The message of an op with a product, and what it is to that.
    fn of(op: &'static str) -> Option<(&'static str, Role)> {
        if let Some(name) = op.strip_suffix("_matmul") {
            return Some((name, Role::Gather));
        }
        let name = op.strip_prefix("matmul_")?;
        let role = match name {
            "reduce_scatter" => Role::Scatter,
            "all_reduce" => Role::Sum,
            "all_gather" => Role::Rows,
            _ => return None,
        };
        Some((name, role))
    }
}

#[derive(Clone, Debug)]
enum Kernels {
    /// Functions of the host, for its threads.
    Host,
    /// The kernels of the op by name.
    Loaded(Vec<Prepared>),
}

impl Launcher {
    /// Prepare to launch `kernels`, those of one op, on the heap's device. On a GPU they are
    /// compiled, unless they were before, and loaded, which may wait for the device: call it where
    /// all ranks make the op.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a device, type or tile that there are no kernels for;
    /// [`Error::Other`] with an [`crate::rtc::Error`]; [`Error::Device`]; [`Error::TooManyGroups`] if so
    /// many ranks share the device that not one workgroup of each is resident.
    pub fn new(heap: &SymmetricHeap, op: &OpBuild, kernels: &[Kernel]) -> Result<Self> {
        if heap.device().kind.traits().host_threads {
            let (resident, kernels) = (heap.workgroups(), Kernels::Host);
            return Ok(Self { resident, kernels, ahead: None });
        }
        let target = Target::of(&heap.device())?;
        let mut functions: Vec<Prepared> = Vec::new();
        let mut resident = MAX_GROUPS as u32;
        let pair = heap.size() == 2 && !op.norm;
        let names = |&kernel: &Kernel| {
            let of_pair = kernel.name_of_pair().filter(|_| pair);
            [Some(kernel.name()), of_pair].into_iter().flatten().map(move |name| (kernel, name))
        };
        for (kernel, name) in kernels.iter().flat_map(names) {
            if functions.iter().any(|known| known.name == name) {
                continue;
            }
            let (mut prepared, fits) = prepare(heap, &target, op, (kernel, name))?;
            if name != kernel.name() {
                prepared.most = fits().unwrap_or(0);
            } else if !matches!(kernel, Kernel::Barrier { .. } | Kernel::Norm) {
                resident = resident.min(fits()?);
            }
            functions.push(prepared);
        }
        Ok(Self { resident, kernels: Kernels::Loaded(functions), ahead: None })
    }

    /// The same, of `matmul`, with the product of whose library `whole` says, where there is one on the
    /// heap's device and a call fits it. A call needs [`Whole::memory`] bytes where its arguments say
    /// that the workspace is.
    ///
    /// # Errors
    /// As [`Launcher::new`], and [`WholeProduct::new`].
    pub fn with_whole(self, heap: &SymmetricHeap, whole: &Whole) -> Result<Self> {
        let product = WholeProduct::new(heap, whole)?;
        let ahead = Ahead { product, ..Ahead::of(whole) };
        Ok(Self { ahead: Some(Arc::new(ahead)), ..self })
    }

    /// Prepare to do `kernel` of an op with a product unfused: the product of whole matrices as for
    /// `matmul`, and the kernel of the message, with the same words and results. The product comes first
    /// where it is what the message sends, and last where the message gathers its A. A call needs
    /// [`Whole::memory`] bytes where its arguments say that the workspace is; the tile in its arguments
    /// is that of the message, which `op` has, too. Of several kernels the products lie between, at
    /// [`Kernel::Copies`] or [`Kernel::Blocks`].
    ///
    /// # Errors
    /// As [`Launcher::new`], and [`WholeProduct::new`]; [`Error::Unsupported`] for an op that is not a
    /// product and a message.
    pub fn unfused(
        heap: &SymmetricHeap,
        op: &OpBuild,
        kernels: &[Kernel],
        whole: &Whole,
    ) -> Result<Self> {
        let (name, role) = Role::of(op.op).ok_or_else(|| {
            unsupported(format!("unfused {}", op.op), "it is not a product and a message")
        })?;
        let (tile_m, tile_n) = whole.tile;
        let matmul = OpBuild { op: "matmul", product: true, norm: false, tile_m, tile_n, ..*op };
        let local = Some(Self::new(heap, &matmul, &[Kernel::Local])?);
        let product = WholeProduct::new(heap, whole)?;
        let message = OpBuild { op: name, product: false, ..*op };
        let observed = op.observed || op.injected.is_by_messages();
        // Of more than two ranks nobody has timed it.
        let preferred = whole.library == Library::Auto && heap.size() == 2;
        // A host has no products that wait for peers, or store to them.
        let on_gpu = !heap.device().kind.traits().host_threads;
        let gathers = on_gpu && role == Role::Gather && kernels.contains(&Kernel::Open);
        let gathering = match gathers && (preferred || whole.library == Library::Ours) {
            true => Gathering::new(heap, whole, op.injected)?,
            false => None,
        };
        let scattering = match whole.library {
            Library::Auto | Library::Ours if on_gpu && whole.signalled.is_some() => {
                Scattering::new(heap, whole, op.injected)?
            }
            _ => None,
        };
        let alone = on_gpu && heap.sharing() == 1 && !observed;
        let exchanges = alone && (preferred || whole.library == Library::Ours);
        let exchanging = match kernels.first() {
            Some(&kernel) if exchanges && role == Role::Sum => {
                Exchanging::new(heap, whole, op, kernel)?
            }
            _ => None,
        };
        let ahead = Ahead {
            role,
            observed,
            product,
            gathering,
            scattering,
            exchanging,
            local,
            ..Ahead::of(whole)
        };
        let mut kernels = kernels.to_vec();
        // Rows that the product with its sum has in tiles are normalised behind it.
        if op.norm && ahead.exchanging.is_some() && kernels.contains(&Kernel::OneShotLl) {
            kernels.push(Kernel::Norm);
        }
        // What stands beside the copies of a call.
        if kernels.contains(&Kernel::Open) {
            kernels.push(Kernel::Gate { source: 0, first: 0, parts: 0 });
            if role != Role::Gather {
                kernels.push(Kernel::Sums);
            }
            if role == Role::Sum {
                kernels.push(Kernel::Results);
            }
        }
        Ok(Self { ahead: Some(Arc::new(ahead)), ..Self::new(heap, &message, &kernels)? })
    }

    /// The library whose products of whole matrices it has, if there is one. Those of few rows need not be all
    /// ranks': whoever has none does the same call in two launches.
    pub fn library(&self) -> Option<String> {
        let ahead = self.ahead.as_ref()?;
        let product = ahead.product.as_ref()?;
        let gathering = ahead.gathering.as_ref().map_or("", |_| " or gemm_sm90_gather");
        let scattering = ahead.scattering.as_ref().map_or("", |_| " or gemm_sm90_scatter");
        Some(product.title() + gathering + scattering)
    }

    /// The same without that: for ranks of which not all have it.
    #[must_use]
    pub fn without_library(self) -> Self {
        let ahead = self.ahead.map(|ahead| {
            let Ahead { ref whole, role, observed, ref local, .. } = *ahead;
            Arc::new(Ahead { role, observed, local: local.clone(), ..Ahead::of(whole) })
        });
        Self { ahead, ..self }
    }

    /// Workgroups that run at the same time, all of them: a launch may have no more.
    pub fn resident(&self) -> u32 {
        self.resident
    }

    /// Enqueue `kernel` of `op` on `stream`, with these workgroups.
    ///
    /// # Errors
    /// [`Error::TooManyGroups`], [`Error::Closed`], [`Error::Device`]; as
    /// [`SymmetricHeap::check_stream`]; [`Error::Unsupported`] for a kernel that was not prepared. What goes
    /// wrong in the kernel comes from [`Stream::sync`].
    ///
    /// # Safety
    /// As for [`cpu::run`]: every address in `args` must be live until the stream has finished the
    /// launch, and every replay of a graph that it is captured in. Those of the heap are until it
    /// is closed.
    pub unsafe fn launch(
        &self,
        heap: &Arc<SymmetricHeap>,
        stream: &Stream,
        (op, kernel): (&'static str, Kernel),
        mut args: OpArgs,
        groups: Workgroups,
    ) -> Result<()> {
        heap.check_stream(op, stream)?;
        let copied =
            matches!(kernel, Kernel::Open | Kernel::Copies | Kernel::Blocks | Kernel::Close);
        if let Some(ahead) = self.ahead.as_ref().filter(|_| copied) {
            // SAFETY: as the caller says.
            return unsafe {
                self.copied(heap, stream, (op, kernel), (ahead, &args), groups.count)
            };
        }
        if let Some(ahead) = self.ahead.as_ref().filter(|ahead| ahead.role == Role::Gather) {
            let message = ahead.gather(&args);
            // SAFETY: the caller vouches for the matrices and the workspace, where A has room.
            unsafe { self.enqueue(heap, stream, (op, kernel), message, groups) }?;
            args.a = ahead.gathered(&args);
            // The message has ended the call: the next one of this op writes there when this rank has
            // entered it, behind the product on the stream.
            // SAFETY: as above.
            return unsafe { ahead.product(heap, stream, OpArgs { m: args.a.rows, ..args }) }
                .map(drop);
        }
        if let Some(ahead) = self.ahead.as_ref().filter(|_| kernel != Kernel::Norm) {
            let product = ahead.whole_of(kernel, &args);
            if let Some(exchanging) = &ahead.exchanging
                // SAFETY: as the caller says.
                && unsafe {
                    exchanging.launch((heap.gpu()?, stream), kernel, (&product, &args))
                }?
            {
                if kernel != Kernel::OneShotLl || args.normed.address == 0 {
                    return Ok(());
                }
                // Whoever does it in two launches normalises in the second.
                let rows = Workgroups::of_rows(args.m);
                // SAFETY: as the caller says.
                return unsafe { self.enqueue(heap, stream, (op, Kernel::Norm), args, rows) };
            }
            // SAFETY: as the caller says.
            match unsafe { ahead.product(heap, stream, product) }? {
                Multiplied::All => return Ok(()),
                Multiplied::Partial(a) => {
                    (args.a, args.producer) = (a, producer::LOAD);
                    if matches!(kernel, Kernel::AllGather) {
                        (args.bias, args.epilogue) = (Matrix::default(), 0);
                    }
                }
                Multiplied::Nothing => {}
            }
        }
        // SAFETY: as the caller says.
        unsafe { self.enqueue(heap, stream, (op, kernel), args, groups) }
    }

    /// Enqueue the kernel itself.
    ///
    /// # Safety
    /// As for [`Self::launch`].
    unsafe fn enqueue(
        &self,
        heap: &Arc<SymmetricHeap>,
        stream: &Stream,
        (op, kernel): (&'static str, Kernel),
        args: OpArgs,
        groups: Workgroups,
    ) -> Result<()> {
        let functions = match &self.kernels {
            Kernels::Loaded(functions) => functions,
            Kernels::Host => {
                let memory = heap.memory();
                let name = if op == kernel.name() { op } else { kernel.name() };
                // Kept until the launch drops this closure, which the last workgroup to end does.
                let access = OnceLock::new();
                let run = move |group: Group| {
                    access.get_or_init(|| Access::of_kernel(args.operands()));
                    // SAFETY: the caller vouches for the matrices; `memory` keeps the rest.
                    let result = unsafe { cpu::run(kernel, &args, group.index, group.count) };
                    // All of it is captured: the whole heap stays mapped while this runs.
                    let memory: &Memory = &memory;
                    // A fault says more than that there was one; the record is complete, or a
                    // peer's is.
                    result.or_else(|_stop| memory.control.outcome())
                };
                return stream.launch_cpu(name, groups.count, Arc::new(run));
            }
        };
        let of_pair = functions.iter().find(|known| Some(known.name) == kernel.name_of_pair());
        let of_pair = of_pair.filter(|it| {
            let threads = groups.threads.map_or(it.threads, |most| most.min(it.threads));
            groups.count <= it.most && has_several_items(kernel, &args, (groups.count, threads))
        });
        let name = kernel.name();
        let function = of_pair.or_else(|| functions.iter().find(|known| known.name == name));
        let &Prepared { ref function, threads, shared_bytes, .. } = function.ok_or_else(|| {
            unsupported(format!("kernel {name} of {op}"), "the op was prepared without it")
        })?;
        // Norms wait for nobody.
        let most = if kernel == Kernel::Norm { u32::MAX } else { self.resident };
        fits(name, groups.count, most)?;
        let threads = groups.threads.map_or(threads, |most| most.min(threads));
        // What waits on a device that ranks share must leave room for those that it waits for.
        // Copies of engines, which the last launch of a call stands behind, are no launches.
        let early = heap.sharing() == 1 && kernel != Kernel::Close;
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
                // Of the types that those of a barrier have.
                let (source, first) = (source.to_ne_bytes(), u64::from(first).to_ne_bytes());
                let parts = parts.to_ne_bytes();
                // SAFETY: the parameters are those of `iris_gate`; the rest as above.
                unsafe { function.launch(stream, shape, &[args, &source, &first, &parts]) }
            }
            // SAFETY: the one parameter of the kernels of ops is an `OpArgs`; the rest as above.
            _ => unsafe { function.launch(stream, shape, &[args]) },
        }
    }
}

/// What of a call a product of whole matrices did.
enum Multiplied {
    Nothing,
    All,
    /// This rank's partial, or its rows of C, which are there.
    Partial(Matrix),
}

impl Ahead {
    /// Nobody's yet, and of no message.
    fn of(whole: &Whole) -> Self {
        let (role, observed) = (Role::None, false);
        Ahead {
            whole: *whole,
            role,
            observed,
            product: None,
            gathering: None,
            scattering: None,
            exchanging: None,
            local: None,
        }
    }

    /// What the workspace keeps.
    fn kept(&self, args: &OpArgs, (rows, cols): (u32, u32), dtype: u32) -> Matrix {
        Matrix {
            address: args.heap.data[args.heap.rank as usize]
                + args.workspace
                + self.whole.library_bytes(),
            ld: Whole::line(cols as usize) as u64,
            rows,
            cols,
            dtype,
            transposed: 0,
        }
    }

    /// All of A, in the workspace.
    fn gathered(&self, args: &OpArgs) -> Matrix {
        self.kept(args, (args.m, args.k), args.a.dtype)
    }

    /// The arguments of the message that gathers A; where its columns are split, A's transpose, whose
    /// rows are.
    fn gather(&self, args: &OpArgs) -> OpArgs {
        let message = OpArgs {
            c: self.gathered(args),
            b: Matrix::default(),
            bias: Matrix::default(),
            n: args.k,
            k: 0,
            epilogue: 0,
            producer: producer::LOAD,
            ..*args
        };
        if args.shard == 0 {
            return message;
        }
        let turned = |it: Matrix| Matrix {
            rows: it.cols,
            cols: it.rows,
            transposed: 1 - it.transposed,
            ..it
        };
        OpArgs {
            a: turned(message.a),
            c: turned(message.c),
            m: args.k,
            n: args.m,
            tile_m: args.tile_n,
            tile_n: args.tile_m,
            ..message
        }
    }

    /// The product of a call, which comes ahead of the kernel.
    fn whole_of(&self, kernel: Kernel, args: &OpArgs) -> OpArgs {
        // The rows of this rank's product.
        let mut product = OpArgs { m: args.a.rows, ..*args };
        match kernel {
            Kernel::Local => {}
            // Its own rows of C, which is gathered where it lies.
            Kernel::AllGather => {
                let rows = split(args.m, args.channel.size, args.channel.rank);
                product.c = rows_of(args.c, &rows);
            }
            // What is done to results is done once they are added up.
            _ => {
                product.c = self.kept(args, (args.a.rows, args.n), args.wire);
                (product.bias, product.epilogue) = (Matrix::default(), 0);
                product.residual = Matrix::default();
            }
        }
        product
    }

    /// Enqueue the product of these arguments.
    ///
    /// # Safety
    /// As for [`Launcher::launch`].
    unsafe fn product(
        &self,
        heap: &Arc<SymmetricHeap>,
        stream: &Stream,
        mut product: OpArgs,
    ) -> Result<Multiplied> {
        let workspace = product.heap.data[product.heap.rank as usize] + product.workspace;
        // What adds a residual is our own kernel.
        if let Some(whole) = self.product.as_ref().filter(|_| product.residual.address == 0)
            // SAFETY: the caller vouches for the matrices and the workspace, where there is room.
            && unsafe { whole.enqueue(heap, stream, &product, workspace) }?
        {
            return Ok(match self.local {
                None => Multiplied::All,
                Some(_) => Multiplied::Partial(product.c),
            });
        }
        let Some(local) = &self.local else { return Ok(Multiplied::Nothing) };
        (product.tile_m, product.tile_n) = self.whole.tile;
        let tiles = |len: u32, tile: u32| u64::from(len.div_ceil(tile));
        let work = tiles(product.m, product.tile_m) * tiles(product.n, product.tile_n);
        let groups = work.clamp(1, u64::from(local.resident())) as u32;
        // SAFETY: as above.
        unsafe { local.launch(heap, stream, ("matmul", Kernel::Local), product, groups.into()) }?;
        Ok(Multiplied::Partial(product.c))
    }
}

/// Whether such workgroups have more than one item a thread of a message that is the same both ways. A last wave
/// takes none.
fn has_several_items(kernel: Kernel, args: &OpArgs, (groups, threads): (u32, u32)) -> bool {
    const WAVE: u32 = 32;
    let Some(items) = kernel.items(args).filter(|items| items.size == 2) else { return false };
    let sent = items.sent(0, 1);
    let alike = [(0, 0), (1, 0), (1, 1)].into_iter().all(|(from, to)| items.sent(from, to) == sent);
    alike && sent > groups.saturating_mul(threads.saturating_sub(WAVE))
}

/// Compile and load a kernel, the form of it that has this name; with how many of its workgroups run at the same time.
fn prepare<'a>(
    heap: &'a SymmetricHeap,
    target: &Target,
    op: &OpBuild,
    (kernel, name): (Kernel, &'static str),
) -> Result<(Prepared, impl FnOnce() -> Result<u32> + use<'a>)> {
    let build = op.of(kernel, &target.arch).map_err(|what| {
        unsupported(format!("{} on a GPU: {what}", op.op), "no device source has it")
    })?;
    let image = build::compile(&build, target).map_err(Error::other)?;
    let (threads, shared_bytes) = (build.threads, build.shared_bytes(kernel));
    let function = heap.load(&image)?.function(&format!("iris_{name}"), shared_bytes)?;
    let most = u32::MAX;
    let prepared = Prepared { name, function: function.clone(), threads, shared_bytes, most };
    Ok((prepared, move || share(heap, &function, threads, shared_bytes)))
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

fn unsupported(what: String, why: &str) -> Error {
    Error::Unsupported { what, why: why.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of few items each thread has one; and both ranks must do as much.
    #[test]
    fn several_items_of_a_thread_go_together_where_there_are_several() {
        let several = |kernel, size, m, groups| {
            let mut args = OpArgs { m, n: 4096, wire: 2, ..bytemuck::Zeroable::zeroed() };
            (args.channel.size, args.c.dtype) = (size, 2);
            has_several_items(kernel, &args, groups)
        };
        assert!(several(Kernel::OneShotLl, 2, 128, (128, 512)));
        assert!(!several(Kernel::OneShotLl, 2, 32, (74, 512)));
        assert!(!several(Kernel::OneShotLl, 4, 128, (128, 512)));
        assert!(!several(Kernel::BroadcastLl, 2, 128, (128, 512)));
        for kernel in [Kernel::AllGatherLl, Kernel::ReduceScatterLl, Kernel::AllToAllLl] {
            assert!(several(kernel, 2, 128, (128, 512)) && !several(kernel, 2, 127, (128, 512)));
            assert!(!several(kernel, 2, 128, (137, 512)) && several(kernel, 2, 128, (136, 512)));
        }
    }
}
