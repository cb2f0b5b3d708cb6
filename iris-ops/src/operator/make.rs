//! Collective construction of an operator, and its release.

use std::panic::Location;
use std::sync::{Arc, Mutex};

use iris_heap::{DevWords, SymmetricHeap};
use iris_kernels::args::{OpArgs, dtype_code, epilogue, producer};
use iris_kernels::build::OpBuild;
use iris_kernels::rtc::progress::Level;
use iris_kernels::{Executor, source, trace};

use super::{Operator, Ready};
use crate::error::{Error, InOp, Result};
use crate::memory_needs::{Area, OWN_WORDS};
use crate::op_names::Op;
use crate::op_row;
use crate::options::{Epilogue, Request, Shard, StagingLayout};
use crate::plan::{Choice, Plan};
use crate::workspace::{Workspace, check_plan, give_words_back, outcome};

/// Parts of an operator that no other operator shares.
struct Own {
    /// Executor and maximum number of workgroups for each choice (variant and tile) of the plan.
    executors: Vec<(Arc<Executor>, u32)>,
    words: DevWords,
}

impl Own {
    fn prepare(
        op: Op,
        heap: &SymmetricHeap,
        plan: &Plan,
        workspace: Option<&Workspace>,
    ) -> Result<Self> {
        if plan.op() != op {
            let value = format!("a plan of {}", plan.op());
            return Err(Error::invalid(op, "plan", value, format!("a plan of {op}")));
        }
        check_plan(heap, plan)?;
        workspace.map_or(Ok(()), |workspace| workspace.check(plan))?;
        let mut executors: Vec<(Arc<Executor>, u32)> = Vec::new();
        let progress =
            Level::new("choice", plan.choices().len(), !plan.on_cpu() && heap.rank() == 0);
        for (index, choice) in plan.choices().iter().enumerate() {
            progress.step();
            let before = &plan.choices()[..index];
            let alike = before.iter().position(|before| plan.share_kernels(before, choice));
            let executor = match alike {
                Some(before) => executors[before].0.clone(),
                None => Arc::new(executor(heap, plan, choice)?),
            };
            let request = plan.request();
            let asked = request.workgroups;
            let beside = request.reserve_sms as u32 + request.step_blocks;
            // On the CPU the caller's kernel runs on a separate thread, so all workgroups remain
            // available to the call.
            let resident = match beside {
                1.. if !plan.on_cpu() => executor
                    .max_coresident_workgroups()
                    .min(heap.workgroups().saturating_sub(beside)),
                _ => executor.max_coresident_workgroups(),
            };
            if resident == 0 {
                let (all, rank) = (heap.workgroups(), heap.rank());
                let expected = format!("fewer than the {all} multiprocessors of rank {rank}");
                return Err(Error::invalid(op, "reserve_sms", beside, expected));
            }
            let groups = asked.map_or(Ok(resident), u32::try_from).ok();
            let groups = groups.filter(|&groups| groups <= resident).ok_or_else(|| {
                let expected = match heap.device().kind.traits().host_threads {
                    true => format!(
                        "at most {resident}, the threads of a rank in this heap (HeapOptions::threads, IRIS_THREADS)"
                    ),
                    false => format!(
                        "at most {resident}: more cannot be resident at once, with {beside} multiprocessors for a kernel beside"
                    ),
                };
                Error::invalid(op, "workgroups", asked.unwrap_or_default(), expected)
            })?;
            executors.push((executor, groups));
        }
        // The heap's word with the number of calls lives as long as the heap. It is allocated
        // before the operator's words, so that freeing the operator's words leaves no gap before
        // it.
        heap.sequence_word().in_op(op)?;
        Ok(Self { executors, words: heap.alloc_device_words(OWN_WORDS).in_op(op)? })
    }
}

fn executor(heap: &SymmetricHeap, plan: &Plan, choice: &Choice) -> Result<Executor> {
    let (op, request) = (plan.op(), plan.request());
    // An unfused variant runs a GEMM and then the kernels of the collective. So it needs the
    // kernels of the collective without a product.
    let unfused = choice.form.has_whole_gemm() && !plan.alone();
    let build = OpBuild {
        op: if unfused { plan.row().message.name() } else { op.name() },
        product: plan.row().multiplies() && !unfused,
        norm: request.rms_norm.is_some(),
        packs: plan.loads_packs(choice),
        dtype: request.dtype,
        tile_m: choice.tile.m as u32,
        tile_n: choice.tile.n as u32,
        fault_injection: request.fault_injection,
        observed: request.is_observed(),
    };
    // One executor serves all calls that share its kernels, so its GEMMs are chosen for the largest
    // of these calls.
    let whole = plan.library_gemm(choice.form, (plan.largest_of_kernels(choice), choice.tile));
    let program = plan.program(choice);
    Executor::new(heap, &build, &program, whole.as_ref(), request.count_traffic).in_op(op)
}

/// Makes all ranks use the same GEMM libraries: if the libraries differ between ranks, no rank uses
/// one; with `batch_invariant`, no rank fuses its product with the message. Collective if the plan has
/// a whole-matrix GEMM, otherwise local.
#[track_caller]
fn agree_on_libraries(
    heap: &SymmetricHeap,
    plan: &Plan,
    executors: &mut [(Arc<Executor>, u32)],
) -> Result<()> {
    let whole = plan.choices().iter().any(|choice| choice.form.gemm != op_row::GemmStage::None);
    if plan.on_cpu() || !whole || plan.alone() {
        return Ok(());
    }
    let libraries: Vec<_> = executors.iter().map(|(it, _)| it.library()).collect();
    let mine = format!("{libraries:?}").into_bytes();
    let all = heap.local_world().allgather(&mine).in_op(plan.op())?;
    if all.iter().any(|theirs| *theirs != mine) {
        let rank = heap.rank();
        let lost = match plan.request().batch_invariant {
            true => "no product is fused with the message",
            false => "none is used",
        };
        tracing::warn!(op = %plan.op(), rank, ?libraries, "GEMM libraries differ between ranks: {lost}");
        for (executor, _) in executors {
            *executor = Arc::new(executor.without_library());
        }
    }
    Ok(())
}

/// Properties that must be equal on all ranks: the plan, the crate version and the kernel sources.
pub(super) fn agreed(plan: &Plan) -> Vec<(&'static str, String)> {
    let mut items = plan.fingerprint();
    items.push(("iris-ops version", env!("CARGO_PKG_VERSION").into()));
    items.push(("kernel sources", format!("{:032x}", source::hash())));
    items
}

impl Operator {
    /// Makes an op with a workspace of its own. Collective: the ranks agree on the plan, allocate
    /// the workspace, and prepare its words.
    ///
    /// Either every rank gets the op or every rank gets an error. A rank that fails tells the other
    /// ranks, and all allocated memory is freed on all ranks.
    #[track_caller]
    pub(crate) fn new(op: Op, heap: &Arc<SymmetricHeap>, plan: &Plan) -> Result<Self> {
        Self::make(op, heap, plan, None, Workspace::prepare_words)
    }

    /// Makes an op in an existing workspace, which other ops may share. Collective.
    #[track_caller]
    pub(crate) fn within(op: Op, workspace: &Arc<Workspace>, plan: &Plan) -> Result<Self> {
        Self::make(op, workspace.heap(), plan, Some(workspace), Workspace::prepare_words)
    }

    #[track_caller]
    pub(super) fn make(
        op: Op,
        heap: &Arc<SymmetricHeap>,
        plan: &Plan,
        shared: Option<&Arc<Workspace>>,
        prepare: impl FnOnce(&Workspace) -> Result<()>,
    ) -> Result<Self> {
        let label = plan.request().label(Some(Location::caller()));
        // Avoids a closure, which would hide the caller's location from `#[track_caller]`;
        // collective calls report this location.
        match Self::make_labelled(op, heap, plan, &label, shared, prepare) {
            Ok(operator) => Ok(operator),
            Err(error) => Err(error.labelled(&label)),
        }
    }

    #[track_caller]
    fn make_labelled(
        op: Op,
        heap: &Arc<SymmetricHeap>,
        plan: &Plan,
        label: &Arc<str>,
        shared: Option<&Arc<Workspace>>,
        prepare: impl FnOnce(&Workspace) -> Result<()>,
    ) -> Result<Self> {
        heap.check_before_step().in_op(op)?;
        let world = heap.local_world();
        world.agree(op.name(), &agreed(plan)).in_op(op)?;
        let own = Own::prepare(op, heap, plan, shared.map(|workspace| &**workspace))
            .map_err(|error| error.labelled(label));
        let all_ok = world.all_ok(op.name(), outcome(&own)).in_op(op);
        let Own { mut executors, words } = own?;
        let all_ok = all_ok.and_then(|()| agree_on_libraries(heap, plan, &mut executors));
        let workspace = all_ok.and_then(|()| match shared {
            Some(workspace) => Ok(Arc::clone(workspace)),
            None => Workspace::make(heap, &[plan], prepare).map(Arc::new),
        });
        let workspace = match workspace {
            Ok(workspace) => workspace,
            Err(error) => {
                give_words_back(heap, op, words);
                return Err(error);
            }
        };
        let mut operator = Self {
            heap: Arc::clone(heap),
            plan: plan.clone(),
            label: label.clone(),
            workspace,
            owns: shared.is_none(),
            words,
            trace: None,
            ready: Vec::new(),
        };
        if let Err(error) = operator.take_trace() {
            // `free` is collective, and all ranks call it here unless the world is broken. If the
            // world is broken, `free` fails at once.
            if let Err(error) = operator.free() {
                tracing::warn!(%op, rank = heap.rank(), %error, "the memory of an op could not be freed");
            }
            return Err(error);
        }
        // The operator gets its id only now, when every rank has succeeded. So the ids of operators
        // agree between ranks.
        let id = heap.control().name_op(label.clone());
        let ready = |(executor, groups): (Arc<Executor>, u32), choice: &Choice| Ready {
            args: operator.template(id, choice, groups),
            executor,
            groups,
            last: Mutex::default(),
        };
        let choices = plan.choices().iter();
        operator.ready =
            executors.into_iter().zip(choices).map(|(own, choice)| ready(own, choice)).collect();
        Ok(operator)
    }

    /// Allocates the trace buffer and sets its counters to zero. Collective if the plan has a
    /// trace, otherwise local.
    #[track_caller]
    fn take_trace(&mut self) -> Result<()> {
        let (op, heap) = (self.plan.op(), &self.heap);
        let Some(block) = self.plan.trace_block() else { return Ok(()) };
        let slice = heap.alloc_many(op.name(), &[block]).in_op(op)?[0];
        self.trace = Some(slice);
        let counts = slice.slice(..trace::MAX_GROUPS * 4).in_op(op);
        let cleared =
            counts.and_then(|counts| heap.write(counts, &[0; trace::MAX_GROUPS * 4]).in_op(op));
        let all_ok = heap.local_world().all_ok(op.name(), outcome(&cleared)).in_op(op);
        cleared.and(all_ok)
    }

    fn template(&self, id: u32, choice: &Choice, groups: u32) -> OpArgs {
        let Choice { tile, needs, .. } = choice;
        let request = self.plan.request();
        let Request { n, k, root, epilogue, shard, trace_spans, .. } = *request;
        let code = |dtype| dtype_code(dtype).unwrap_or_default();
        let (view, workspace) = (self.heap.view(), &self.workspace);
        let extent = workspace.extent();
        OpArgs {
            heap: view,
            channel: workspace.channel(id),
            inbox: workspace.place(Area::Inbox) + extent.inbox_of(needs),
            slot: needs.slot,
            results: workspace.place(Area::Results) + extent.results_of(needs),
            result_slot: needs.result_slot,
            workspace: workspace.place(Area::Workspace),
            trace: self.trace.map_or(0, |slice| view.data[view.rank as usize] + slice.offset()),
            counters: view.device_words + self.words.offset(),
            n: n as u32,
            k: k as u32,
            tile_m: tile.m as u32,
            tile_n: tile.n as u32,
            k_group: needs.k_group,
            max_tiles: needs.places,
            max_results: needs.results,
            wire: code(request.wire_dtype()),
            epilogue: match epilogue {
                Epilogue::None => 0,
                Epilogue::Gelu => epilogue::GELU,
            },
            epsilon: request.rms_norm.unwrap_or_default(),
            producer: match self.plan.op().multiplies() {
                true if request.batch_invariant => producer::INVARIANT_GEMM,
                true => producer::GEMM,
                false => producer::LOAD,
            },
            root: root as u32,
            dedicated_workgroups: match request.staged.fetchers {
                Some(fetchers) => fetchers as u32,
                None if choice.form.fetches => (groups / 4).max(1),
                None => 0,
            },
            shard: u32::from(shard == Shard::Columns),
            m_contiguous: u32::from(request.staged.layout == StagingLayout::MContiguous),
            trace_spans,
            sources: needs.sources,
            record: self.record(choice),
            ..bytemuck::Zeroable::zeroed()
        }
    }

    /// Frees the trace buffer and, if no other operator uses it, the workspace. Collective, except
    /// for an operator in a shared workspace without a trace, for which it is local.
    #[track_caller]
    pub(crate) fn free(self) -> Result<()> {
        let label = self.label.clone();
        match self.give_back() {
            Ok(()) => Ok(()),
            Err(error) => Err(error.labelled(&label)),
        }
    }

    #[track_caller]
    fn give_back(self) -> Result<()> {
        let (op, trace) = (self.plan.op(), self.trace.as_slice());
        if let Some(ready) = self.ready.first() {
            self.heap.issue().in_op(op)?.announce_end(ready.args.channel.op);
        }
        match (self.owns, trace) {
            (true, _) => self.workspace.give_back(trace)?,
            (false, []) => self.heap.finish().in_op(op)?,
            (false, _) => self.heap.free_many(trace).in_op(op)?,
        }
        self.heap.free_device_words(self.words).in_op(op)
    }
}
